"""Tensors that a block saves from forward for backward, and the memory that it needs while it runs.

The gradient of an operator needs some of its operands or its result; the table ``NEEDS`` lists them by operator. A view
keeps its base alive. States (parameters and buffers) are not counted, because a rank holds them anyway. Inputs of the
block are listed separately, since several calls may keep the same input.

``carried_bytes`` is the memory that a microbatch holds between the two halves of its backward, that is, after the
gradients of inputs are computed and before those of weights. The half for weights reads the other operand of each
product with a weight, and the gradient of the product's result. Backward operators that do not depend on an input of
the block belong to the half for weights. An operator that computes both gradients at once (norms, convolutions) belongs
to the half for inputs, and so does a gradient that is a sum over a much larger tensor, for example the gradient of a
norm's weight.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.cost.call.operators import CROSS_ENTROPY, VIEWS, is_product, is_view, operator_name
from partitioner.passes.ir.collectives import COMMUNICATING, CONTEXT, collective_name
from partitioner.passes.ir.gradient_flow import accumulated_in, is_differentiable
from partitioner.passes.ir.model import Block
from partitioner.passes.ops.cross_entropy import MOST_PIECES
from partitioner.passes.rules.factors import operands_of, results_of
from partitioner.passes.rules.strategies import needs_gradient
from partitioner.passes.shard.backward_halves import is_in_first_half

Need = Literal["nothing", "operands", "others", "quotient", "result", "both", "indices", "norm", "attention"]

Value = tuple[fx.Node, int]  # (node, index of its result); views are traced back

# What the gradient of an operator reads. Operators that are not listed read their operands.
#   others     for each operand with a gradient, the other operands (a product)
#   quotient   the divisor, and for its own gradient the dividend
#   indices    operands and results that are not differentiable: indices, masks, conditions
#   norm       operands, and two fp32 numbers per row: mean and reciprocal deviation
#   attention  operands, result and the logarithm of the sum of exponents, one fp32 number per row
NEEDS: dict[str, Need] = {
    **dict.fromkeys(
        """add sub rsub neg sum mean cat stack concat clone _to_copy to copy ones_like zeros_like full_like round floor
        ceil sign constant_pad_nd pad roll flip repeat cumsum""".split(),
        "nothing",
    ),
    **dict.fromkeys(
        """mul mm bmm mv dot matmul _grouped_mm expert_mm addmm addmv baddbmm linear einsum convolution conv1d conv2d
        conv3d lerp""".split(),
        "others",
    ),
    **dict.fromkeys(
        "exp expm1 sigmoid tanh relu sqrt rsqrt reciprocal softmax _softmax log_softmax _log_softmax cumprod".split(),
        "result",
    ),
    **dict.fromkeys(
        "logsumexp cross_entropy target_and_logsumexp amax amin max min norm linalg_vector_norm prod".split(), "both"
    ),
    **dict.fromkeys(
        """where masked_fill embedding index_select gather index take_along_dim scatter scatter_add index_put index_add
        index_copy masked_select sort topk tril triu dropout native_dropout""".split(),
        "indices",
    ),
    **dict.fromkeys(
        """native_layer_norm layer_norm native_group_norm group_norm rms_norm _fused_rms_norm native_batch_norm
        batch_norm""".split(),
        "norm",
    ),
    "div": "quotient",
    **dict.fromkeys(
        """scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu band_attention
        context_attention document_attention context_document_attention scored_attention
        context_scored_attention""".split(),
        "attention",
    ),
}

_BATCHED = frozenset(("einsum", "matmul"))  # products that torch composes of products of batches of matrices
# Products whose weight's gradient the runtime adds to its buffer while it computes it.
_INTO_BUFFERS = frozenset(("linear", "mm", "addmm", "matmul"))


@dataclass(frozen=True)
class SavedBytes:
    """Memory of one call of a block (such as a layer), in bytes.

    ``inside``: tensors that the block computes and keeps for backward. ``inputs``: for each input, whether it is kept.
    ``working``: largest temporary memory, in forward or backward, in addition to what is kept; the block's outputs
    count as temporary. ``passing``: largest temporary memory without the block's outputs.
    """

    inside: int
    inputs: tuple[bool, ...]
    working: int
    passing: int


def find_score_nodes(block: Block) -> frozenset[fx.Node]:
    """Return the operators of ``block`` (a piece of the model, such as a layer) whose results are attention scores,
    which selective recomputation (Korthikanti et al. 2022) runs a second time in backward. A fused attention has none.

    A product of two activations is scores if it has more elements than both activations together. Results of at least
    this size that are computed from scores count as scores, too. Operators that depend on no input and no parameter and
    are combined with scores, such as those of a dropout mask, are included. Collectives are not, because their results
    are kept.
    """
    states = set(block.states)
    found: dict[fx.Node, int] = {}
    for node in block.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or collective_name(node.target) in COMMUNICATING:
            continue
        sources = operands_of(node)
        if operator_name(node) in ("bmm", "matmul", "baddbmm"):
            factors = [o for o in sources if value_of(o)[0].name not in states]
            if len(factors) >= 2 and value.numel() > sum(o.meta["val"].numel() for o in factors[-2:]):
                found[node] = value.numel()
        elif any(found.get(o, 0) and found[o] <= value.numel() for o in sources):
            found[node] = value.numel()
    return frozenset(found) | _find_input_free_nodes(block, found)


def _find_input_free_nodes(block: Block, scores: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Return the operators of ``block`` (a piece of the model, such as a layer) that depend on no input of the block
    and on no parameter, and from which ``scores`` are computed. ``scores``: the nodes of attention scores."""
    free: set[fx.Node] = set()
    placeholders = {
        n for n in block.placeholders if n.name not in block.inputs and not is_differentiable(n.meta["val"])
    }
    for node in block.graph.nodes:
        local = node.op == "call_function" and collective_name(node.target) not in COMMUNICATING
        if local and all(o in free or o in placeholders for o in node.all_input_nodes):
            free.add(node)
    found: set[fx.Node] = set()
    stack = [o for n in scores for o in n.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in free and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return frozenset(found)


def find_gathered_activations(block: Block) -> frozenset[fx.Node]:
    """Return the all-gathers of activations in ``block`` (a piece of the model, such as a layer). Backward can repeat
    them, so their results are not needed in memory until then.
    """
    states = set(block.states)
    return frozenset(
        node
        for node in block.graph.nodes
        if node.op == "call_function"
        and collective_name(node.target) == "all_gather"
        and value_of(node.all_input_nodes[0])[0].name not in states
    )


def kept_by(
    block: Block, train: bool = True, without: frozenset[fx.Node] = frozenset(), *, copies: bool = True
) -> SavedBytes:
    """Return the bytes that one call of ``block`` (a piece of the model, such as a layer) keeps for backward, and the
    bytes that it needs while it runs. ``train``: whether there is a backward; without one, nothing is kept.
    ``without``: nodes whose results are not kept but computed a second time in backward. ``copies``: whether to count
    the copies that products make of their operands. Lower bounds leave copies out, because they depend on how the
    operands are sharded."""
    states = set(block.states)
    saved: dict[Value, int] = {}
    kept_copies: set[Value] = set()
    extra = 0
    for node in block.graph.nodes:
        if train and node.op == "call_function" and needs_gradient(node):
            copied = _list_copies(node) if copies else []
            for value in find_needed_values(node, {value for value, _ in copied}):
                saved[value] = size_of(value)
            kept_copies.update(value for value, _ in copied)
            extra += _row_statistics(node) + sum(size for value, size in copied if value[0] not in without)
    for value in _read_again([node for node, _ in saved if node in without], without):
        if value not in kept_copies:  # otherwise the copy is read again
            saved[value] = size_of(value)
    saved = {v: size for v, size in saved.items() if v[0].name not in states and v[0] not in without}
    made = {value: size for value, size in saved.items() if value[0].op != "placeholder"}
    kept_names = {value[0].name for value in saved if value[0].op == "placeholder"}
    inside = sum(made.values()) + extra
    working, outputs = _forward_peak(block, made)
    backward = _compute_backward_peak_bytes(block) if train else 0
    inputs = tuple(name in kept_names for name in block.inputs)
    return SavedBytes(inside, inputs, max(working, backward), max(working - outputs, backward))


def _read_again(nodes: Sequence[fx.Node], without: frozenset[fx.Node]) -> Iterator[Value]:
    """Yield the values that must be kept so that backward can compute ``nodes`` a second time, as pairs (node that
    computed the value, index of the result). ``without``: all nodes that backward computes a second time. Their results
    are not kept: if an operand is such a result, the operands of its node are yielded instead."""
    seen, stack = set(nodes), [*nodes]
    while stack:
        for value in map(value_of, stack.pop().all_input_nodes):
            if value[0] not in without:
                yield value
            elif value[0] not in seen:
                seen.add(value[0])
                stack.append(value[0])


def value_of(node: fx.Node) -> Value:
    """Return the tensor that ``node`` refers to, as (node that computed it, index of the result). Views and ``getitem``
    are traced back."""
    while node.op == "call_function":
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node), node
            assert isinstance(index, int), node
            if not is_view(source):
                return source, index
            node = source
        elif collective_name(node.target) == "copy" or (is_view(node) and node.all_input_nodes):
            node = node.all_input_nodes[0]
        else:
            break
    return node, 0


def find_needed_values(node: fx.Node, copied: Collection[Value] = ()) -> Iterator[Value]:
    """Yield the values that the gradient of the operator ``node`` reads, as pairs (node that computed the value, index
    of the result). ``copied``: operands that are left out because the gradient reads a copy of them."""
    sends = collective_name(node.target) not in (None, *CONTEXT)
    if operator_name(node) in VIEWS or node.target is operator.getitem or sends:
        return
    operands = operands_of(node)
    need = NEEDS.get(operator_name(node), "operands")
    if need in ("operands", "both", "norm", "attention"):
        yield from (value_of(o) for o in operands)
    elif need == "others":
        marked = [needs_gradient(o) for o in operands]
        for place, operand in enumerate(operands):
            if sum(marked) > marked[place] and value_of(operand) not in copied:
                yield value_of(operand)
    elif need == "quotient" and len(operands) == 2:
        yield value_of(operands[1])
        if needs_gradient(operands[1]):
            yield value_of(operands[0])
    elif need == "indices":
        yield from (value_of(o) for o in operands if not is_differentiable(o.meta["val"]))
    if need in ("result", "both", "attention", "norm"):
        yield from ((node, i) for i in range(need == "norm", len(results_of(node))))
    elif need == "indices":
        yield from ((node, i) for i, r in enumerate(results_of(node)) if not is_differentiable(r))


def _list_copies(node: fx.Node) -> list[tuple[Value, int]]:
    """Return the operands of the product ``node`` that torch copies before it multiplies them, as pairs (value, bytes
    of the copy). The gradient of the other operand reads the copy.

    Torch computes ``einsum`` and ``matmul`` as products of batches of matrices, and copies an operand whose dims are in
    another order. Weights and operands that no gradient reads are left out.
    """
    if operator_name(node) not in _BATCHED:
        return []
    operands = operands_of(node)
    marked = [needs_gradient(o) for o in operands]
    layouts = tuple((o.meta["val"].shape, o.meta["val"].stride(), o.meta["val"].dtype) for o in operands)
    equation = node.args[0] if isinstance(node.args[0], str) else None
    sizes = _measure_copies(equation, layouts)
    return [
        (value_of(operand), size)
        for place, (operand, size) in enumerate(zip(operands, sizes, strict=True))
        if size and sum(marked) > marked[place] and value_of(operand)[0].op != "placeholder"
    ]


@functools.lru_cache(maxsize=4096)
def _measure_copies(equation: str | None, layouts: tuple[tuple[Any, ...], ...]) -> tuple[int, ...]:
    """Return, for each operand of a product, the bytes of the copy that torch makes of it, or 0 if torch makes none.

    ``equation``: the equation of ``torch.einsum``, or ``None`` for ``torch.matmul``. ``layouts``: (shape, strides,
    dtype) of each operand. A product that does not have exactly two operands is assumed to make no copies.
    """
    if len(layouts) != 2:
        return (0,) * len(layouts)
    operands = [torch.empty_strided(s, stride, dtype=dtype, device="meta") for s, stride, dtype in layouts]
    with _RecordedProducts() as recorded:
        _ = torch.matmul(*operands) if equation is None else torch.einsum(equation, operands)
    storages = [operand.untyped_storage()._cdata for operand in operands]
    read = [x for x in recorded.factors if x.untyped_storage()._cdata not in storages]
    if len(recorded.factors) != 2:
        return 0, 0
    return tuple(int(factor.nbytes) if any(factor is x for x in read) else 0 for factor in recorded.factors)


class _RecordedProducts(TorchDispatchMode):
    """A torch dispatch mode that appends the operands of every matrix product (``mm`` and ``bmm``) that runs under it
    to the list ``factors``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.factors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            self.factors += args
        return func(*args, **(kwargs or {}))


def _row_statistics(node: fx.Node) -> int:
    """Return the bytes of values that the operator of ``node`` saves for backward but does not return, such as the mean
    and the deviation of each row in a norm."""
    need = NEEDS.get(operator_name(node))
    if need not in ("attention", "norm") or len(results_of(node)) > 1:
        return 0
    shape: tuple[int, ...] = tuple(node.meta["val"].shape)
    if need == "attention":
        return 4 * math.prod(shape[:-1])
    normalized = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], list | tuple) else shape[-1:]
    return 8 * math.prod(shape[: len(shape) - len(normalized)])


def size_of(value: Value) -> int:
    """Return the bytes of ``value``, a pair (node, index of its result); 0 if it is not a tensor."""
    tensors = results_of(value[0])
    return int(tensors[value[1]].nbytes) if value[1] < len(tensors) and isinstance(tensors[value[1]], Tensor) else 0


def _forward_peak(block: Block, saved: dict[Value, int]) -> tuple[int, int]:
    """Return two numbers of bytes for a forward of ``block`` (a piece of the model, such as a layer): the peak memory
    besides the tensors in ``saved``, and the part of this memory that is still allocated after the forward, for outputs
    that are not saved. ``saved``: value -> bytes, where a value is a pair (node, index of its result)."""
    nodes = [n for n in block.graph.nodes if n.op == "call_function"]
    last: dict[Value, int] = {}
    for place, node in enumerate(nodes):
        for operand in node.all_input_nodes:
            last[value_of(operand)] = place
    for output in block.outputs:
        last[value_of(output)] = len(nodes)
    dying: dict[int, list[Value]] = {}
    for value, place in last.items():
        if value[0].op == "call_function" and value not in saved:
            dying.setdefault(place, []).append(value)
    alive = peak = kept = 0
    total = sum(saved.values())
    for place, node in enumerate(nodes):
        for value in _list_new_values(node):
            if value in saved:
                kept += saved[value]
            elif value in last:
                alive += size_of(value)
        peak = max(peak, alive + kept - total + _compute_scratch_bytes(node))
        alive -= sum(size_of(value) for value in dying.get(place, ()))
    return max(0, peak), alive


def _compute_scratch_bytes(node: fx.Node) -> int:
    """Return the temporary bytes of the operator of ``node`` if it processes its operand piece by piece, as the
    operator of cross-entropy does; 0 for other operators."""
    if operator_name(node) not in CROSS_ENTROPY:
        return 0
    logits: Tensor = operands_of(node)[0].meta["val"]
    return logits.numel() * accumulated_in(logits.dtype).itemsize // MOST_PIECES


def _compute_backward_peak_bytes(block: Block) -> int:
    """Return the largest number of bytes of gradients that exist at the same time in a backward of ``block`` (a piece
    of the model, such as a layer).

    The buffers in which gradients of parameters are accumulated are not counted here. The gradient of a product's
    weight is computed directly into its buffer (``runtime/execute/codegen.py``) and takes no further memory. The
    gradient of another parameter exists only until it is added to its buffer.
    """
    states = set(block.states)
    alive = {value_of(n): size_of(value_of(n)) for n in block.outputs if needs_gradient(n)}
    peak = sum(alive.values())
    for node in reversed(list(block.graph.nodes)):
        if node.op != "call_function" or not needs_gradient(node) or is_view(node):
            continue
        moment = _compute_scratch_bytes(node)
        for operand in operands_of(node):
            value = value_of(operand)
            if not needs_gradient(operand):
                continue
            if value[0].name not in states:
                alive[value] = size_of(value)
            elif operator_name(node) not in _INTO_BUFFERS:
                moment = max(moment, size_of(value))
        peak = max(peak, sum(alive.values()) + moment)
        for value in _list_new_values(node):
            alive.pop(value, None)
    return peak


def _list_new_values(node: fx.Node) -> list[Value]:
    """Return the results for which ``node`` allocates memory, as pairs (node, index). The list is empty for a view."""
    if is_view(node) or collective_name(node.target) == "copy":
        return []
    return [(node, i) for i in range(len(results_of(node)))]


_AT_ONCE = frozenset("convolution conv1d conv2d conv3d".split())


def carried_bytes(block: Block) -> int:
    """Return the bytes that one call of ``block`` (a piece of the model, such as a layer) holds between the two halves
    of its backward (first gradients of inputs, later gradients of weights): values and gradients that the second half
    reads. Inputs, parameters and buffers of the block are not counted. The graph must mark which nodes need gradients.
    """
    through = _depends_on_inputs(block)
    read: set[Value] = set()
    gradients: set[fx.Node] = set()
    for node in block.graph.nodes:
        if node.op != "call_function" or not needs_gradient(node):
            continue
        if node not in through:
            read.update(find_needed_values(node))
            continue
        later = [o for o in operands_of(node) if needs_gradient(o) and o not in through and not _is_sum(node, o)]
        if later and not _makes_all_at_once(node):
            read.update(value for operand in later for value in _needed_for(node, operand))
            gradients.add(_same_gradient(node, block.outputs))
    gradients.update(node for node in block.outputs if needs_gradient(node) and node not in through)
    return sum(map(size_of, {v for v in read if v[0].op != "placeholder"})) + sum(
        map(size_of, map(value_of, gradients))
    )


def _depends_on_inputs(block: Block) -> set[fx.Node]:
    """Return the nodes of ``block`` (a piece of the model, such as a layer) that need a gradient and are computed from
    an input of the block that needs a gradient."""
    inputs = set(block.inputs)
    through = {node for node in block.placeholders if node.name in inputs and needs_gradient(node)}
    for node in block.graph.nodes:
        if node.op == "call_function" and needs_gradient(node) and not through.isdisjoint(node.all_input_nodes):
            through.add(node)
    return through


def _is_sum(node: fx.Node, operand: fx.Node) -> bool:
    """Return whether the gradient of ``operand``, an operand of ``node``, is a sum over a tensor that is much larger
    than ``operand``. If backward is split, the first half (gradients of inputs) computes such a sum, so that the large
    tensor need not be kept for the second half."""
    return not is_product(node) and is_in_first_half(size_of(value_of(operand)), size_of(value_of(node)))


def _makes_all_at_once(node: fx.Node) -> bool:
    """Return whether PyTorch computes the gradients of all operands of ``node`` by one operator, as for a norm or an
    attention, so that a split backward cannot postpone some of them."""
    name = operator_name(node)
    return NEEDS.get(name) in ("norm", "attention") or name in _AT_ONCE


def _needed_for(node: fx.Node, operand: fx.Node) -> Iterator[Value]:
    """Yield the values that the gradient of ``operand``, one of the operands of ``node``, reads from forward, as pairs
    (node that computed the value, index of the result)."""
    operands, need = operands_of(node), NEEDS.get(operator_name(node), "operands")
    if is_view(node) or need == "nothing":
        return
    if need in ("others", "quotient"):
        yield from (value_of(o) for o in operands if o is not operand)
    elif need == "indices":
        yield from (value_of(o) for o in operands if not is_differentiable(o.meta["val"]))
    elif need in ("operands", "both"):
        yield from map(value_of, operands)
    if need in ("result", "both"):
        yield node, 0


def _same_gradient(node: fx.Node, outputs: Collection[fx.Node]) -> fx.Node:
    """Return the last node of the chain of readers that starts at ``node`` and whose nodes all have the same gradient.
    Views, additions and all-reduces pass a gradient on unchanged. The chain ends at a node of ``outputs``, the outputs
    of the block (a piece of the model, such as a layer)."""
    while node not in outputs:
        users = [user for user in node.users if user.op == "call_function" and needs_gradient(user)]
        if len(users) != 1 or not _passes_gradient(users[0]):
            break
        if size_of(value_of(users[0])) != size_of(value_of(node)):
            break
        node = users[0]
    return node


def _passes_gradient(node: fx.Node) -> bool:
    return is_view(node) or operator_name(node) == "add" or collective_name(node.target) == "all_reduce"
