"""Work of an operator on a device: floating-point operations, memory traffic and kernel launches.

All figures follow from the shapes of operands and results. The same tables therefore serve whole tensors, the shards of
one rank under a strategy, and a finished local graph. Families of operators are rows of tables. An operator that is in
no family is assumed to read its operands and write its results once, and to move as many bytes again for each gradient.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, fx

from partitioner.passes.ir.collectives import CONTEXT, collective_name
from partitioner.passes.ir.gradient_flow import accumulated_in
from partitioner.passes.ops.attention import Band, count_max_pairs
from partitioner.passes.ops.cross_entropy import NARROW
from partitioner.passes.ops.documents import count_document_pairs
from partitioner.passes.ops.score_changes import estimate_num_blocks
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.attention import find_attention_band, find_document_lengths
from partitioner.passes.rules.factors import get_node_argument
from partitioner.passes.shard.backward_halves import is_in_first_half

Shape = tuple[int, ...]


class Operand(NamedTuple):
    """A tensor that an operator reads or writes.

    ``shape``, ``dtype``: shape and dtype of the tensor. ``state``: whether it is a weight, whose size does not depend
    on the batch. ``learned``: whether it is computed from weights alone, so that its gradient is not sent to another
    pipeline stage. ``repeats``: how many times a view such as ``expand`` repeats each element that is in memory.
    """

    shape: Shape
    dtype: torch.dtype
    state: bool = False
    learned: bool = False
    repeats: float = 1.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def traffic(self) -> float:
        """Return the bytes of memory traffic for reading this operand of an operator. Repeated elements are read once
        and then come from caches.
        """
        return self.nbytes / self.repeats

    @property
    def gradient(self) -> Operand:
        """Return the gradient of this operand: an operand with the same shape and dtype, and without repeated
        elements."""
        return self if self.repeats == 1.0 else self._replace(repeats=1.0)


class Kernel(NamedTuple):
    """One GPU kernel with its memory traffic and FLOPs.

    ``num_bytes``: bytes read and written. ``state_bytes``: the part of ``num_bytes`` that belongs to weights.
    ``flops``: FLOPs of a matrix product or attention. ``precision``: number format in which these FLOPs are computed,
    such as ``"bf16"``. ``launches``: number of launches. ``kind``: the key in the device's table of memory
    efficiencies. ``smallest``: the smallest of M, N and K of a product, or the number of keys of an attention.
    ``width``: the smallest head width of an attention. ``aligned``: whether every row of a product's 16-bit matrices is
    a multiple of 16 bytes, which matrix units need for full speed. ``learned``: whether the kernel computes a gradient
    of weights, which no other pipeline stage waits for. ``by_size``: whether the number of launches grows with the
    sizes of the tensors, at most in proportion.
    """

    kind: str
    num_bytes: float
    state_bytes: float = 0.0
    flops: float = 0.0
    smallest: float = math.inf
    precision: str = "fp32"
    launches: int = 1
    aligned: bool = True
    learned: bool = False
    width: float = math.inf
    by_size: bool = False


PRECISIONS: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

# Results that share their operand's memory.
VIEWS = frozenset(
    """view _unsafe_view reshape t transpose permute expand slice select narrow squeeze unsqueeze split
    split_with_sizes chunk tensor_split unbind diagonal alias detach as_strided movedim moveaxis flatten unflatten
    swapaxes swapdims view_as expand_as numpy_T mT mH adjoint lift_fresh real imag contiguous""".split()
)
_SUMMED_BACK = frozenset(("expand", "expand_as"))  # views that repeat elements: the gradient is summed
_FILLED_BACK = frozenset(  # views of a part: the gradient is padded with zeros, or joined
    "slice select narrow diagonal split split_with_sizes chunk tensor_split unbind as_strided".split()
)
_CACHE_WRITE = "write_cache"  # its result is the cache itself, of which it changes a part
_MAYBE_COPIES = frozenset(("reshape", "contiguous", "flatten"))

_LOOKUPS = frozenset(
    """embedding index_select gather index take_along_dim scatter scatter_add scatter_reduce index_put index_add
    index_copy masked_select _unsafe_index _unsafe_masked_index take""".split()
)
_WRITTEN_OVER = ("scatter", "index_put", "index_add", "index_copy")  # look-ups that return the table with changed rows
_SORTS = frozenset("sort argsort topk kthvalue median mode histc bincount unique _unique2 searchsorted".split())
_NORMS = frozenset(
    """native_layer_norm layer_norm native_group_norm group_norm rms_norm _fused_rms_norm native_batch_norm batch_norm
    _native_batch_norm_legit cudnn_batch_norm instance_norm""".split()
)
_REDUCTIONS = frozenset(
    """sum mean amax amin max min prod var std var_mean std_mean logsumexp softmax _softmax log_softmax _log_softmax
    norm linalg_vector_norm any all argmax argmin cumsum cumprod nll_loss_forward cross_entropy_loss""".split()
)
# Bound by exponentials rather than by memory on some devices, so they have kinds of their own.
_SOFTMAXES = frozenset("softmax _softmax log_softmax _log_softmax logsumexp cross_entropy_loss".split())
_NAMED = {"sort": _SORTS, "reduction": _REDUCTIONS, "softmax": _SOFTMAXES, "norm": _NORMS}  # the last of two counts
_KINDS = {name: kind for kind, names in _NAMED.items() for name in names}
# See ``passes/ops/cross_entropy.py``. Forward, a piece of the logits is read twice, and an intermediate result is
# written and read; for short types this happens twice, because they are widened first. Backward, the piece is read and
# its gradient is written; intermediate results are written and read twice.
CROSS_ENTROPY = frozenset(("cross_entropy", "target_and_logsumexp"))
_SPECIAL = frozenset(
    "silu gelu exp expm1 log log1p sigmoid tanh softplus mish elu erf sin cos pow silu_backward gelu_backward".split()
)
_SUMS = frozenset(("sum", "cat", "stack", "clone", "concat"))  # their gradient is a view of the result's gradient
_ADDITIONS = frozenset(("add", "sub", "rsub"))
_ADDED_TO = frozenset(("addcmul", "addcdiv"))  # add the product or quotient of two operands to the first
# linear in a single tensor operand, which the gradient does not read
_LINEAR = frozenset(("to", "_to_copy", "mul", "div", "neg"))
_ATTENTION = frozenset(
    """scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu band_attention
    context_attention document_attention context_document_attention scored_attention context_scored_attention""".split()
)
_SCORED = frozenset(("scored_attention", "context_scored_attention"))
# See ``passes/ops/score_changes.py``: passes over the scores, in forward and backward, and those for a cap and slopes.
_SCORE_PASSES, _CAP_PASSES, _SLOPE_PASSES = (11, 19), (4, 7), (2, 2)
_TRAINED_PASSES = 3  # of backward, for the gradient of slopes
_SCORE_LAUNCHES = 16, 26  # for each block
# FLOPs of a fused attention's backward relative to its forward: five products to two (Dao et al. 2022).
_ATTENTION_BACKWARD = 2.5
RECOMPUTED_SCORES = 0.5 / _ATTENTION_BACKWARD  # the part of these FLOPs that computes scores a second time

# See ``passes/ops/recurrent.py``. Each step of a recurrent layer is a product with the state and a kernel of the gates.
RECURRENT = frozenset(("lstm_layer", "recurrent_layer"))
_STEP_LAUNCHES = 2

_ALIGNMENT = 16  # bytes (NVIDIA, Matrix Multiplication Background: with whole 16 bytes cuBLAS takes tensor cores best)

_Product = tuple[float, float]  # FLOPs, the smallest of M, N and K


def _compute_contraction_work(a: Shape, b: Shape, out: Shape) -> _Product:
    k = a[-1]
    n = out[-1] if len(out) else 1
    rows = math.prod(out) / n if len(b) <= 2 else out[-2]
    return 2.0 * math.prod(out) * k, min(rows, n, k)


def _compute_linear_work(a: Shape, b: Shape, out: Shape) -> _Product:
    return 2.0 * math.prod(out) * a[-1], min(math.prod(a[:-1]), b[0], a[-1])


def _compute_grouped_work(a: Shape, b: Shape, out: Shape) -> _Product:
    """Return two numbers for a grouped product, which multiplies rows ``[t, k]`` (shape ``a``) by one matrix of ``[e,
    k, n]`` (shape ``b``) per expert: its FLOPs, and the smallest of M, N and K of one expert's product. Each expert
    gets an even share of the rows. ``out``: shape of the result."""
    return 2.0 * math.prod(out) * a[-1], min(a[0] / b[0], b[1], b[2])


def _compute_convolution_work(a: Shape, b: Shape, out: Shape) -> _Product:
    k = math.prod(b[1:])
    return 2.0 * math.prod(out) * k, min(math.prod(out) / max(1, b[0]), b[0], k)


# Operator -> (the places of its two factors among its operands, FLOPs and smallest dim from their shapes).
_PRODUCTS: dict[str, tuple[int, int, Callable[[Shape, Shape, Shape], _Product]]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "matmul", "linear_fp8"), (0, 1, _compute_contraction_work)),
    **dict.fromkeys(("_grouped_mm", "expert_mm"), (0, 1, _compute_grouped_work)),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), (1, 2, _compute_contraction_work)),
    "linear": (0, 1, _compute_linear_work),
    **dict.fromkeys(("convolution", "conv1d", "conv2d", "conv3d"), (0, 1, _compute_convolution_work)),
}


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator of ``node`` without namespace and overload, such as ``mm`` for
    ``aten.mm.default``; an empty string if the node calls no torch operator."""
    target = node.target
    return str(target._overloadpacket.__name__) if isinstance(target, torch._ops.OpOverload) else ""


def is_view(node: fx.Node) -> bool:
    """Return whether the result of ``node`` is a view, which shares its operand's memory."""
    name = operator_name(node)
    return (
        node.target is operator.getitem
        or name == _CACHE_WRITE
        or (name in VIEWS and not (name in _MAYBE_COPIES and _is_copying_reshape(node)))
    )


def repeats_of(node: fx.Node, copied: bool = False) -> float:
    """Return how many times each element of the original tensor occurs in the view ``node``, for example after
    ``expand``; 1 if no element is repeated. ``copied``: whether a reshape that has to copy also counts as a view, so
    that repetitions before it are included."""
    found = 1.0
    while node.op == "call_function" and operator_name(node) in VIEWS and (copied or is_view(node)):
        source = node.all_input_nodes[0]
        if operator_name(node) in _SUMMED_BACK and source.meta["val"].numel():
            found *= max(1.0, node.meta["val"].numel() / source.meta["val"].numel())
        node = source
    return found


def is_product(node: fx.Node) -> bool:
    """Return whether the operator of ``node`` is a matrix product, convolution, einsum or fused attention, whose FLOPs
    count.
    """
    name = operator_name(node)
    return name in _PRODUCTS or name in _ATTENTION or name == "einsum"


def is_attention(node: fx.Node) -> bool:
    """Return whether the operator of ``node`` is a fused attention."""
    return operator_name(node) in _ATTENTION


def _only_sends(node: fx.Node) -> bool:
    """Return whether ``node`` is a collective that only communicates. This is false for the attention operators over a
    sharded sequence, which are collectives that also compute."""
    name = collective_name(node.target)
    return name is not None and name not in CONTEXT


def _is_strided_shard(node: fx.Node) -> bool:
    """Return whether ``node`` takes one rank's part of a whole tensor and has to copy it, because the part is not
    contiguous in memory.
    """
    if collective_name(node.target) not in ("shard_slice", "shard_narrow"):
        return False
    dim = get_node_argument(node, "dim")
    return any(size != 1 for size in node.meta["val"].shape[:dim])


def _is_copying_reshape(node: fx.Node) -> bool:
    """Return whether ``node``, a reshape, has to copy, because its operand is not contiguous in memory."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return False
    value: Tensor = source.meta["val"]
    if value.is_contiguous() or operator_name(node) == "contiguous":
        return not value.is_contiguous()
    return _copies_to_reshape(tuple(value.shape), value.stride(), tuple(node.meta["val"].shape))


@lru_cache(maxsize=1024)
def _copies_to_reshape(shape: Shape, strides: tuple[int, ...], target: Shape) -> bool:
    """Return whether a reshape of a tensor of shape ``shape`` and strides ``strides`` to the shape ``target`` has to
    copy, because no view has this shape.
    """
    try:
        torch.empty_strided(shape, strides, device="meta").view(target)
    except RuntimeError:
        return True
    return False


def forward_kernels(node: fx.Node, operands: Sequence[Operand], results: Sequence[Operand]) -> list[Kernel]:
    """Return the kernels that run the operator of ``node`` in forward; empty for most views and collectives.
    ``operands``, ``results``: the tensors on one rank that it reads and writes."""
    if node.target is operator.getitem or not results:
        return []
    if _only_sends(node):
        return [_build_kernel("pointwise", [results[0], results[0]])] if _is_strided_shard(node) else []
    name = operator_name(node)
    if name == _CACHE_WRITE:
        return [_build_kernel("pointwise", [operands[1], operands[1]])]
    if name in VIEWS:
        return (
            [_build_kernel("default", [*operands, *results])]
            if name in _MAYBE_COPIES and _is_copying_reshape(node)
            else []
        )
    if is_product(node):
        flops, smallest = _compute_product_work(node, name, operands, results)
        kind = "attention" if name in _ATTENTION else "matmul"
        kernel = _build_kernel(kind, [*operands, *results], flops, smallest, _find_precision(operands))
        return [kernel, *_list_score_kernels(node, operands, results, kernel, backward=False)]
    if name.startswith(_WRITTEN_OVER):  # rows are read, and written over a copy of the table
        return [
            _build_kernel("pointwise", [operands[0], results[0]]),
            _build_kernel("lookup", [*operands[1:], operands[-1]]),
        ]
    if name in _LOOKUPS:  # as much is read as is written
        return [_build_kernel("lookup", [*operands[1:], results[0], *results])]
    if name in RECURRENT:
        return _list_recurrent_kernels(operands, results, passes=1)
    if name in CROSS_ENTROPY:
        return [_entropy_kernel("softmax", operands[0], 2, 4 if operands[0].dtype in NARROW else 2, 5)]
    return [_build_kernel(kind_of(node, name), [*operands, *results])]


def _list_recurrent_kernels(operands: Sequence[Operand], results: Sequence[Operand], passes: int) -> list[Kernel]:
    """Return the kernels of one direction of a recurrent layer: the product of all inputs with the input weights, and
    the product of each step's hidden state with the state weights. ``operands``: the tensors that the layer reads: the
    input ``[steps, batch, features]``, initial hidden states, weights and biases. ``results``: the tensors that it
    computes, its output first. ``passes``: how often each of these products is counted: 1 in forward, more in backward,
    which has several products of the same size for each product of forward."""
    x, output = operands[0], results[0]
    of_input, of_state, *_ = (o for o in operands[1:] if len(o.shape) == 2)  # of_input: [gates, features]
    precision, steps = _find_precision(operands), x.shape[0]
    gates = Operand((*x.shape[:2], of_input.shape[0]), x.dtype)
    first = _compute_linear_work(x.shape, of_input.shape, gates.shape)
    each = _compute_linear_work((1, *output.shape[1:]), of_state.shape, (1, *gates.shape[1:]))
    return [
        _build_kernel("matmul", [x, of_input, gates] * passes, passes * first[0], first[1], precision, launches=passes),
        _build_kernel(
            "matmul",
            [output, gates, of_state._replace(shape=(steps, *of_state.shape))] * passes,
            passes * steps * each[0],
            each[1],
            precision,
            launches=passes * steps * _STEP_LAUNCHES,
        ),
    ]


def _entropy_kernel(kind: str, logits: Operand, as_given: int, as_made: int, launches: int) -> Kernel:
    """Return the kernel of a cross-entropy over ``logits``. Its memory traffic is ``as_given`` passes over the logits,
    plus ``as_made`` passes over intermediate results, which have the shape of the logits and the dtype in which sums
    are accumulated. ``kind``: the key in the device's table of memory efficiencies. ``launches``: number of launches.
    """
    made = logits._replace(dtype=accumulated_in(logits.dtype))
    return _build_kernel(kind, [logits] * as_given + [made] * as_made, launches=launches)


def form_kernels(
    node: fx.Node, operands: Sequence[Operand], results: Sequence[Operand], num_ranks: int, zigzag: bool, backward: bool
) -> list[Kernel]:
    """Return the kernels of an attention ``node`` whose queries and keys are both sharded along the sequence over
    ``num_ranks`` ranks. ``operands``, ``results``: the tensors on one rank. ``zigzag``: whether each rank has two
    distant parts of the sequence, which balances a causal mask. ``backward``: whether to return the kernels of the
    backward instead of the forward."""
    width = results[0].shape[-1]
    flops, smallest = attention_product(node, operands[0].shape, operands[1].shape, width, (num_ranks, zigzag))
    flops *= _ATTENTION_BACKWARD if backward else 1.0
    traffic = [*operands, *results] if not backward else [*operands, *operands, results[0], results[0]]
    launches = (1 + backward) * num_ranks
    kernel = _build_kernel("attention", traffic, flops, smallest, _find_precision(operands), launches=launches)
    return [kernel, *_list_score_kernels(node, operands, results, kernel, backward)]


def _list_score_kernels(
    node: fx.Node,
    operands: Sequence[Operand],
    results: Sequence[Operand],
    products: Kernel,
    backward: bool,
    trained: bool = False,
) -> list[Kernel]:
    """Return the kernels that change the scores of the attention ``node`` between its two products (such as adding a
    position bias). The list is empty for an attention that a fused kernel computes. ``operands``: the tensors that it
    reads on one rank, first queries, keys and values. ``results``: the tensors that it writes. ``products``: the kernel
    of its two products, whose FLOPs give the number of scores. ``backward``: whether to return the kernels of the
    backward instead of the forward. ``trained``: whether the position slopes (ALiBi) of the heads need a gradient."""
    if operator_name(node) not in _SCORED:
        return []
    each = 2.0 * (operands[0].shape[-1] + results[0].shape[-1]) * (_ATTENTION_BACKWARD if backward else 1.0)
    heads = math.prod(operands[0].shape[:-2])
    scores = products.flops / each
    passes = _SCORE_PASSES[backward]
    passes += _CAP_PASSES[backward] * (get_node_argument(node, "cap", None) is not None)
    passes += _SLOPE_PASSES[backward] * (get_node_argument(node, "slopes", None) is not None)
    passes += _TRAINED_PASSES * trained
    made = Operand((max(1, round(scores)),), accumulated_in(operands[0].dtype))
    launches = _SCORE_LAUNCHES[backward] * estimate_num_blocks(scores / max(1, heads), heads)
    return [_build_kernel("pointwise", [made] * passes, launches=launches)._replace(by_size=True)]


def backward_kernels(
    node: fx.Node, operands: Sequence[Operand], results: Sequence[Operand], needs: Sequence[bool]
) -> list[Kernel]:
    """Return the kernels that compute the gradients of the operands of ``node``. ``operands``, ``results``: the tensors
    on one rank that the operator reads and writes in its forward. ``needs``: for each operand, whether its gradient is
    needed.
    """
    if not any(needs) or node.target is operator.getitem or _only_sends(node) or not results:
        return []
    name, result = operator_name(node), results[0]
    wanted = [o for o, need in zip(operands, needs, strict=True) if need]
    if name in VIEWS:
        if name in _SUMMED_BACK and wanted[0].numel < result.numel:
            return [_gradient_kernel("reduction", wanted[0], [result])]
        return [_gradient_kernel("default", wanted[0], [result])] if name in _FILLED_BACK else []
    if name in _ATTENTION:
        flops, smallest = _compute_product_work(node, name, operands, results)
        traffic = [*operands, *(o.gradient for o in operands), result, result]
        flops *= _ATTENTION_BACKWARD
        kernel = _build_kernel("attention", traffic, flops, smallest, _find_precision(operands), launches=2)
        trained = needs[-1] and get_node_argument(node, "slopes", None) is not None  # slopes are the last operand
        return [kernel, *_list_score_kernels(node, operands, results, kernel, backward=True, trained=trained)]
    if is_product(node):
        return _product_backward(node, name, operands, results, needs)
    if name in _LOOKUPS:
        fills = [_gradient_kernel("pointwise", o, []) for o in wanted]  # filled with zeros, then scattered into
        return fills + [_build_kernel("lookup", [result, result])._replace(learned=o.learned) for o in wanted]
    if name in RECURRENT:  # forward runs a second time, then two products for each of its products
        return _list_recurrent_kernels(operands, results, passes=3)
    if name in _SUMS or name in CROSS_ENTROPY:
        return [_entropy_kernel("pointwise", operands[0], 2, 4, 5)] if name in CROSS_ENTROPY else []
    kind = kind_of(node, name)
    if name in _LINEAR and len(operands) == 1:
        return [_gradient_kernel(kind, wanted[0], [result])]
    if kind in ("pointwise", "special"):
        return [k for o in wanted for k in _pointwise_backward(kind, name, o, operands, result)]
    if kind == "norm":  # one operator computes all gradients
        return [_build_kernel(kind, [o, o.gradient, result]) for o in wanted]
    return [_gradient_kernel(kind, o, [o, result]) for o in wanted]


def _pointwise_backward(
    kind: str, name: str, wanted: Operand, operands: Sequence[Operand], result: Operand
) -> list[Kernel]:
    """Return the kernels that compute the gradient of ``wanted``, an operand of a pointwise operator. One kernel
    multiplies the gradient of the result by the other operands; an addition does not need it. A second kernel sums over
    broadcast dims if ``wanted`` was broadcast. ``kind``: the key in the device's table of memory efficiencies.
    ``name``: the operator's name. ``operands``, ``result``: the tensors that its forward reads and writes."""
    broadcast = [_gradient_kernel("reduction", wanted, [result])] if wanted.numel < result.numel else []
    if name in _ADDITIONS or (name in _ADDED_TO and wanted is operands[0]):
        return broadcast  # the gradient passes unchanged
    factors = operands[1:] if name in _ADDED_TO else operands
    others = [o for o in factors if o is not wanted] or [wanted]
    later = wanted.learned and not is_in_first_half(wanted.numel, result.numel)
    return [_build_kernel(kind, [result, *others, result])._replace(learned=later), *broadcast]


def _product_backward(
    node: fx.Node, name: str, operands: Sequence[Operand], results: Sequence[Operand], needs: Sequence[bool]
) -> list[Kernel]:
    """Return the backward kernels of the product ``node``: one product of the same size for each factor that needs a
    gradient, and a sum for a bias. ``name``: the operator's name. ``needs``: for each operand, whether its gradient is
    needed. ``operands``, ``results``: the tensors on one rank that the operator reads and writes in its forward.
    """
    flops, smallest = _compute_product_work(node, name, operands, results)
    factors = _PRODUCTS[name][:2] if name in _PRODUCTS else range(len(operands))
    precision = _find_precision(operands)
    kernels = []
    for place, (operand, need) in enumerate(zip(operands, needs, strict=True)):
        if need and place in factors:
            others = [o for i, o in enumerate(operands) if i in factors and i != place]
            kernel = _build_kernel("matmul", [results[0], *others, operand.gradient], flops, smallest, precision)
            kernels.append(kernel._replace(learned=operand.learned))
        elif need and operand.numel < results[0].numel:
            kernels.append(_gradient_kernel("reduction", operand, [results[0]]))
    return kernels


def _gradient_kernel(kind: str, wanted: Operand, read: Sequence[Operand]) -> Kernel:
    later = wanted.learned and not (kind == "reduction" and is_in_first_half(wanted.numel, read[0].numel))
    return _build_kernel(kind, [wanted.gradient, *read])._replace(learned=later)


def add_kernel(value: Operand) -> Kernel:
    """Return the kernel that adds two gradients of the tensor ``value``."""
    whole = value.gradient
    return _build_kernel("pointwise", [whole, whole, whole])._replace(learned=value.learned)


def _compute_product_work(
    node: fx.Node, name: str, operands: Sequence[Operand], results: Sequence[Operand]
) -> _Product:
    """Return two numbers for ``node``, a matrix product, einsum or attention called ``name``: its FLOPs, and the
    smallest of M, N and K (the number of keys for an attention). ``operands``, ``results``: the tensors on one rank
    that the operator reads and writes.
    """
    out = results[0].shape
    if name in _PRODUCTS:
        first, second, formula = _PRODUCTS[name]
        return formula(operands[first].shape, operands[second].shape, out)
    if name in _ATTENTION:
        return _compute_attention_work(node, operands, out)
    return _compute_einsum_work(node, operands)


def _compute_attention_work(node: fx.Node, operands: Sequence[Operand], out: Shape) -> _Product:
    """Return two numbers for the attention ``node``: its FLOPs (scores, and their product with the values) and its
    number of keys. Pairs that a causal mask or a sliding window excludes are not counted. ``operands``: queries, keys
    and values on one rank. ``out``: shape of the result.
    """
    query, key = operands[0].shape, operands[1].shape
    over = collective_name(node.target) is not None
    ranks = (get_node_argument(node, "size"), get_node_argument(node, "zigzag")) if over else (1, False)
    return attention_product(node, query, key, out[-1], ranks)


def attention_product(node: fx.Node, query: Shape, key: Shape, width: int, ranks: tuple[int, bool]) -> _Product:
    """Return the FLOPs of the attention ``node`` and its number of keys, on the rank with the most work. Pairs of query
    and key that a mask excludes are not counted. If the lengths of packed documents are known, only pairs inside one
    document are counted, and the number of keys is at most the mean length of a document. In a prefix language model,
    positions of the prefix also attend to later positions of the prefix; each rank counts an equal share of these
    pairs.

    ``query``, ``key``: shapes on each rank. ``width``: head width of the values. ``ranks``: the number of ranks that
    share the sequence, and whether each has two distant parts of it.
    """
    lengths = find_document_lengths(node)
    pairs, keys = 0.0, float(key[-2])
    if lengths and query[-2] == key[-2]:
        seen = find_attention_band(node) or Band()
        pairs, keys = count_document_pairs(lengths, query[-2], *ranks, seen), min(keys, sum(lengths) / len(lengths))
    else:
        pairs = count_max_pairs(query[-2], key[-2], *ranks, _find_priced_band(node))
    pairs += max(0, get_node_argument(node, "ahead", 0)) / ranks[0]
    return 2.0 * math.prod(query[:-2]) * pairs * (query[-1] + width), keys


def _find_priced_band(node: fx.Node) -> Band:
    """Return the range of positions, relative to its own, that each query of the attention ``node`` attends to.
    ``node`` is either an attention operator of this project or one of PyTorch's fused attention kernels. The latter
    have no sliding window."""
    if "partition" in str(node.target):
        return find_attention_band(node) or Band()
    causal = bool(node.kwargs.get("is_causal") or (len(node.args) > 5 and node.args[5] is True))
    return Band(None, 0) if causal else Band()


def _compute_einsum_work(node: fx.Node, operands: Sequence[Operand]) -> _Product:
    """Return two numbers for the einsum ``node``: its FLOPs (twice the product of the sizes of all index letters), and
    the smallest of these sizes. The sizes come from the equation or, if it has an ellipsis, from the operator's
    sharding rule. ``operands``: the tensors that it reads.
    """
    equation = str(node.args[0]).replace(" ", "")
    if "." in equation:
        factors = factors_of(node)
        sizes = list(factors.sizes.values()) if factors is not None else [operands[0].numel]
        return 2.0 * math.prod(sizes), float(min(sizes, default=1))
    by_letter = {
        letter: size
        for letters, operand in zip(equation.split("->")[0].split(","), operands, strict=True)
        for letter, size in zip(letters, operand.shape, strict=True)
    }
    return 2.0 * math.prod(by_letter.values()), float(min(by_letter.values(), default=1))


def kind_of(node: fx.Node, name: str) -> str:
    """Return the key of the operator ``node``, called ``name``, in the device's table of memory efficiencies, such as
    ``"pointwise"`` or ``"norm"``.
    """
    if name in _KINDS:
        return _KINDS[name]
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return "special" if name in _SPECIAL else "pointwise"
    return "default"


def _find_precision(operands: Sequence[Operand]) -> str:
    return PRECISIONS.get(operands[0].dtype, "fp32") if operands else "fp32"


def _build_kernel(
    kind: str,
    traffic: Sequence[Operand],
    flops: float = 0.0,
    smallest: float = math.inf,
    precision: str = "fp32",
    launches: int = 1,
) -> Kernel:
    """Return a kernel that reads or writes each tensor of ``traffic`` once. ``kind``: its key in the device's table of
    memory efficiencies. ``flops``: its FLOPs. ``smallest``: the smallest of M, N and K of a product. ``precision``:
    number format in which the FLOPs are computed. ``launches``: number of launches."""
    if kind == "pointwise" and len({o.shape for o in traffic if o.numel > 1}) > 1:
        kind = "broadcast"  # elements are addressed by index
    rows = [o.shape[-1] * o.dtype.itemsize for o in traffic if flops and len(o.shape) > 1 and o.dtype.itemsize == 2]
    return Kernel(
        kind,
        float(sum(o.traffic for o in traffic)),
        float(sum(o.traffic for o in traffic if o.state)),
        flops,
        smallest,
        precision,
        launches,
        all(row % _ALIGNMENT == 0 for row in rows),
        width=min(o.shape[-1] for o in traffic[:3]) if kind == "attention" else math.inf,  # queries, keys and values
    )
