"""Derive the functions that a rank runs from a block's forward graph: forward, backward, and backward in two halves.

A block is a piece of the model with one graph, such as a layer. Requires: the graph of one rank
(``passes/shard/shard_block.py``). Provides: graphs of plain operators on the rank's device, with the values saved
between forward and backward as explicit results. The collectives of backward are the transposes of those of forward.

:func:`remove_zero_terms` removes values that are always zero. ``x - detach(x)`` is zero and exists only for its
gradient (``passes/trace/autograd_functions.py``, and straight-through tricks). After differentiation, the zero and all
values that are linear in the zero are removed, and a sum with such a value is replaced by its other operand. Infinite
values, whose difference is NaN, are not treated separately.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.experts.sorted_rows import MADE_BY, keep_rows_sorted
from partitioner.passes.ir.collectives import COMMUNICATING, collective_name
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.model import Block
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.shard.backward_halves import (
    JointHalves,
    choose_saved_nodes,
    collect_ancestor_nodes,
    insert_recomputed_nodes,
)
from partitioner.passes.shard.record_operators import trace_function

aten = torch.ops.aten

# The result is zero if either operand is (_ZERO_IF_ONE_IS), if the first is (_FIRST), or if both are
# (_ZERO_IF_BOTH_ARE).
_ZERO_IF_ONE_IS = frozenset((aten.mul.Tensor, aten.mm.default, aten.bmm.default))
_FIRST = frozenset(
    (
        aten.div.Tensor,
        aten.mul.Scalar,
        aten.div.Scalar,
        aten.neg.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.tanh_backward.default,
        aten.sigmoid_backward.default,
        aten.silu_backward.default,
        aten.gelu_backward.default,
        aten.threshold_backward.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    )
)
_ZERO_IF_BOTH_ARE = frozenset((aten.add.Tensor, aten.sub.Tensor))


def remove_zero_terms(graph: fx.Graph) -> None:
    """Remove operators of ``graph`` whose results are always zero, such as ``x - x``, in place. A sum of such a result
    and another value is replaced by the other value. The graph must not have nodes that alias another."""
    zeros: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not node.args or not isinstance(node.meta.get("val"), Tensor):
            continue
        first, second = (*node.args, None)[:2]
        one, other = (isinstance(o, fx.Node) and o in zeros for o in (first, second))
        if _is_zero_result(node, one, other):
            zeros.add(node)
        elif node.target in _ZERO_IF_BOTH_ARE and other and _can_replace_node(first, node):
            node.replace_all_uses_with(first)
        elif node.target == aten.add.Tensor and one and _can_replace_node(second, node) and not node.kwargs:
            node.replace_all_uses_with(second)
    if zeros:
        drop_unused(graph)


def _is_zero_result(node: fx.Node, first: bool, second: bool) -> bool:
    """Return whether the result of the operator ``node`` is always zero. ``first``, ``second``: whether its first and
    second operands are always zero.
    """
    if node.target in _ZERO_IF_ONE_IS:
        return first or second
    if node.target in _FIRST:
        return first
    if node.target == aten.sub.Tensor and node.args[0] is node.args[1] and not node.kwargs:
        return True
    return node.target in _ZERO_IF_BOTH_ARE and first and second


def _can_replace_node(operand: object, node: fx.Node) -> bool:
    """Return whether ``operand``, an argument of an operator, is a node with the shape, dtype and strides of
    ``node``, so that it can replace ``node``."""
    if not isinstance(operand, fx.Node):
        return False
    one, other = operand.meta.get("val"), node.meta["val"]
    if not isinstance(one, Tensor) or one.dtype != other.dtype:
        return False
    return tuple(one.shape) == tuple(other.shape) and one.stride() == other.stride()


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_NO_DERIVATIVE = re.compile(r"derivative for '?([\w:]+)'? is not implemented")
_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)


@dataclass(frozen=True)
class JointSubgraph:
    """A function that was cut out of the joint graph of forward and backward of a piece of the model.

    ``graph``: the function, with one placeholder for each input. ``inputs``, ``outputs``: the names of the input and
    output nodes in the joint graph; an output of ``None`` is a gradient of zero.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]

    @cached_property
    def module(self) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), self.graph)


@dataclass(frozen=True)
class BlockDerivatives:
    """The functions of a block (a piece of the model, such as a layer) that a rank runs: forward, backward, and
    backward in two halves.

    ``forward(*states, *inputs) -> (*outputs, *saved)``; ``backward(*saved, *grads of grad_outputs) -> (*grads of
    grad_inputs, *grads of grad_states)``; ``backward_input(*saved, *grads of grad_outputs) -> (*grads of grad_inputs,
    *carried)``; ``backward_weight(*carried) -> grads of grad_states``. ``states`` are the block's parameters, buffers
    and constants; ``carried`` are the values that the first half of backward passes to the second.

    ``num_outputs``: the number of the block's outputs. ``saved``: names of the forward nodes whose values backward
    reads. ``grad_outputs``, ``grad_inputs``, ``grad_states``: indices (from 0) of the outputs, inputs and states that
    have a gradient. A gradient of ``None`` is zero.
    """

    forward: JointSubgraph
    backward: JointSubgraph
    backward_input: JointSubgraph
    backward_weight: JointSubgraph
    num_outputs: int
    saved: tuple[str, ...]
    grad_outputs: tuple[int, ...]
    grad_inputs: tuple[int, ...]
    grad_states: tuple[int, ...]


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of a block (a piece of the model, such as a layer) in one graph.

    ``graph``: takes states (parameters, buffers and constants), inputs, and gradients of outputs; returns outputs,
    and gradients of states and inputs. ``block``: the block. ``needs``: for each state, then each input, whether it
    gets a gradient. ``with_grad``: the indices (from 0) of the outputs that have a gradient.
    """

    graph: fx.Graph
    block: Block
    needs: tuple[bool, ...]
    with_grad: tuple[int, ...]

    def cut(self, recomputed: Collection[str] = ()) -> BlockDerivatives:
        """Return the forward and backward functions of the block, cut out of this joint graph. ``recomputed``: names of
        forward nodes whose results backward recomputes (activation recomputation) instead of reading saved ones."""
        return _cut_joint_graph(self.graph, self.block, self.needs, self.with_grad, frozenset(recomputed))


def differentiate(
    block: Block,
    device: torch.device,
    needs_input_grad: Sequence[bool],
    needs_state_grad: Sequence[bool],
    output_grads: Sequence[bool],
    recomputed: Collection[str] = (),
    *,
    fused: bool = False,
) -> BlockDerivatives:
    """Return the functions for forward and backward of ``block``, the graph of a piece of the model, such as a layer,
    on one rank.

    ``device``: the device of the operators. ``needs_input_grad``, ``needs_state_grad``, ``output_grads``: for each
    input, each state (parameter, buffer, constant) and each output, whether it has a gradient. ``recomputed``: names of
    forward nodes whose results backward recomputes instead of reading saved ones. ``fused``: whether to trace the fused
    kernels of accelerators on any device; the result is then for analysis only. Raise :class:`UnsupportedError` if an
    operator has no derivative.
    """
    return build_joint_graph(block, device, needs_input_grad, needs_state_grad, output_grads, fused=fused).cut(
        recomputed
    )


def build_joint_graph(
    block: Block,
    device: torch.device,
    needs_input_grad: Sequence[bool],
    needs_state_grad: Sequence[bool],
    output_grads: Sequence[bool],
    *,
    fused: bool = False,
) -> JointGraph:
    """Return forward and backward of ``block``, a piece of the model, traced into one graph on tensors without values.
    Outputs and gradients are made contiguous, because the traced kernels assume it.

    ``device``: the device of the operators. ``needs_input_grad``, ``needs_state_grad``, ``output_grads``: for each
    input, each state (parameter, buffer, constant) and each output, whether it has a gradient. ``fused``: whether to
    trace the fused kernels of accelerators on any device; the result is then for analysis only. Raise
    :class:`UnsupportedError` if an operator has no derivative.
    """
    block = keep_rows_sorted(block)
    needs = [*needs_state_grad, *needs_input_grad]
    placeholders = block.placeholders
    taken: list[int] = []

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Run forward and backward of a block, the graph of a piece of the model such as a layer. Return two lists: the
        outputs, and the gradients of those primals that need a gradient (``None`` for zero).

        ``primals``: the block's states (parameters, buffers, constants), then its inputs. ``tangents``: a gradient for
        each output.
        """
        leaves = [p.detach().requires_grad_() if need else p for p, need in zip(primals, needs, strict=True)]
        with torch.enable_grad():
            outputs = [o.contiguous() for o in _interpret_graph(block.graph, leaves, device, fused)]
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        with_grad = [i for i, o in enumerate(outputs) if output_grads[i] and o.requires_grad]
        taken[:] = with_grad
        if not wanted or not with_grad:
            return outputs, [None] * len(wanted)
        seeds = [tangents[i] for i in with_grad]
        try:
            grads = torch.autograd.grad([outputs[i] for i in with_grad], wanted, seeds, allow_unused=True)
        except RuntimeError as error:  # includes NotImplementedError
            raise _build_derivative_error(block, error) from error
        return outputs, [None if g is None else g.contiguous() for g in grads]

    # The number of rows that a rank gets from expert routing is not known when the block is traced.
    sizes = ShapeEnv() if any(collective_name(n.target) == "route" for n in block.graph.nodes) else None
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes)
    fake.cache_enabled = False  # few operators of a block recur, so the cache costs more time than it saves
    with fake, fx.traceback.preserve_node_meta():
        primals = [_make_empty_tensor(n.meta["val"], device) for n in placeholders]
        tangents = [_make_empty_tensor(n.meta["val"], device) for n in block.outputs]
        graph = trace_function(joint, primals, tangents, symbolic=sizes is not None)
        if any(map(_is_mutating_node, graph.nodes)):
            graph = _functionalize_graph(graph, [*primals, *tangents], symbolic=sizes is not None)
    if sizes is not None:
        _make_sizes_static(graph)
    _simplify_views(graph)
    remove_zero_terms(graph)
    _assign_source_locations(graph)
    return JointGraph(graph, block, tuple(needs), tuple(taken))


def _build_derivative_error(block: Block, error: RuntimeError) -> Exception:
    """Return the exception to raise after torch failed with ``error`` to differentiate ``block``: an
    :class:`UnsupportedError` that names the operator without a derivative, or ``error`` itself if there was another
    reason."""
    named = _NO_DERIVATIVE.search(str(error))
    if named is None:
        return error
    name = named[1].rpartition("::")[2]
    nodes = [n for n in block.graph.nodes if name.strip("_") in str(n.target)]
    where = f" ({nodes[0].meta['source']})" if nodes and nodes[0].meta.get("source") else ""
    return UnsupportedError(
        f"torch has no derivative of {named[1]}{where}, which the gradient of the loss leads through; write the "
        "operator with simpler ones, or detach() its result"
    )


def _is_mutating_node(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _functionalize_graph(graph: fx.Graph, arguments: list[Tensor], *, symbolic: bool) -> fx.Graph:
    """Return a graph equivalent to ``graph`` in which no operator writes to its operands. ``arguments``: tensors with
    the shapes and dtypes of the inputs. ``symbolic``: whether sizes may be symbolic."""
    traced = fx.GraphModule(torch.nn.Module(), graph)

    def run(*flat: Tensor) -> list[Tensor | None]:
        interpreter = fx.Interpreter(traced)
        return list(interpreter.run(*flat, enable_io_processing=False))

    return trace_function(torch.func.functionalize(run, remove="mutations"), *arguments, symbolic=symbolic)


def _make_empty_tensor(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def _interpret_graph(graph: fx.Graph, arguments: list[Tensor], device: torch.device, fused: bool) -> list[Tensor]:
    """Run ``graph`` on ``arguments``, one tensor for each placeholder, and return the list of its outputs. New tensors
    are created on ``device``.

    ``fused``: whether attention and RMS norm use the fused kernels of accelerators.
    """
    env: dict[fx.Node, Any] = {}
    values = iter(arguments)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(values)
        elif node.op == "output":
            return [env[n] for n in node.args[0]]
        else:
            args = fx.node.map_arg(node.args, env.__getitem__)
            kwargs = {k: device if v == META else v for k, v in fx.node.map_arg(node.kwargs, env.__getitem__).items()}
            where = {k: node.meta.get(k, "") for k in ("path", "source")} | {MADE_BY: node.meta.get(MADE_BY, node.name)}
            with fx.traceback.annotate(where):
                result = (_select_fused_kernel(node) if fused else node.target)(*args, **kwargs)
            env[node] = result
    raise AssertionError("a block's graph ends in an output node")


def _select_fused_kernel(node: fx.Node) -> Any:
    """Return the function that computes the operator ``node``: a fused kernel of accelerators if ``node`` is an
    attention or RMS norm whose dims and dtypes the kernel supports; otherwise the operator itself."""
    value, target = node.meta["val"], node.target
    if target is aten.scaled_dot_product_attention.default and value.dim() == 4 and value.dtype != torch.float64:
        return _fused_attention
    weights = [o.meta["val"].dtype for o in node.all_input_nodes[1:]]
    if target is aten.rms_norm.default and value.dtype != torch.float64 and set(weights) <= {value.dtype}:
        return _fused_rms_norm
    return target


def _fused_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return a stand-in for the result of the fused RMS norm of accelerators, which cannot be traced on other devices.
    It has the shape of ``x``, and saves tensors of the same sizes for backward, but has other values, so it is for
    analysis only.

    ``shape``: the sizes of the normalised last dims of ``x``. ``weight``: a factor for each element of these dims, or
    ``None``. ``eps``: the number that is added to the mean square.
    """
    alike: Sequence[Tensor] = aten.native_layer_norm(x, shape, weight, None, eps or 0.0)
    return alike[0]


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention of queries ``q``, keys ``k`` and values ``v``, computed with the fused kernels of accelerators,
    which can be traced without an accelerator. For analysis only: shapes, dtypes and saved tensors are right, but a
    boolean ``attn_mask`` hides nothing.

    ``attn_mask``, ``dropout_p``, ``is_causal``, ``scale`` and ``enable_gqa`` have the same meanings as in torch's
    ``scaled_dot_product_attention``.
    """
    if attn_mask is None and q.shape[-1] == v.shape[-1]:
        flash: Sequence[Tensor] = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)
        return flash[0]
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    if attn_mask is not None:
        added = attn_mask if attn_mask.is_floating_point() else torch.zeros_like(attn_mask, dtype=q.dtype)
        attn_mask = added.expand(*q.shape[:-1], k.shape[-2])
    kernel = aten._scaled_dot_product_efficient_attention
    efficient: Sequence[Tensor] = kernel(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)
    return efficient[0]


def _make_sizes_static(graph: fx.Graph) -> None:
    """Replace symbolic sizes in ``node.meta["val"]`` of all nodes of ``graph`` by numbers, in place. A symbolic size
    depends on how many rows (tokens) the router of a mixture of experts sends to each rank; the number is the size for
    a balanced router. ``node.meta["open"]`` is set to whether a result of the node had a symbolic size."""
    even: dict[Any, int] = {}
    for node in graph.nodes:
        if collective_name(node.target) == "route":
            order, _, experts = node.meta["val"]
            even[experts.shape[0].node.expr] = int(order.shape[0])

    def make_size_static(size: Any) -> Any:
        return int(size.node.expr.xreplace(even)) if isinstance(size, torch.SymInt) else size

    def make_value_static(value: Any) -> Any:
        """Return ``value`` (a size, a tensor, or a list or tuple of them) with symbolic sizes replaced by the sizes for
        a balanced router of experts."""
        if isinstance(value, tuple | list):
            return type(value)(map(make_value_static, value))
        if isinstance(value, Tensor) and any(isinstance(s, torch.SymInt) for s in value.shape):
            return torch.empty([make_size_static(s) for s in value.shape], dtype=value.dtype, device=META)
        return make_size_static(value)

    for node in graph.nodes:
        value = node.meta.get("val")
        parts = value if isinstance(value, tuple | list) else (value,)
        node.meta["open"] = any(isinstance(p, Tensor) and make_value_static(p) is not p for p in parts)
        node.meta["val"] = make_value_static(value)


def _simplify_views(graph: fx.Graph) -> None:
    """Remove aliases, pairs of transposes that cancel, and views of views from ``graph``, in place, because each of
    these operators costs time whenever the graph runs."""
    for node in graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None:
            continue
        if node.target in _ALIASES:
            node.replace_all_uses_with(source)
        elif node.target == aten.t.default and source.target == aten.t.default:
            node.replace_all_uses_with(source.args[0])
        elif node.target == aten.transpose.int and source.target == aten.transpose.int:
            if _read_transposed_dims(node) == _read_transposed_dims(source):
                node.replace_all_uses_with(source.args[0])
        elif node.target in _VIEWS:
            if source.target in _VIEWS:
                node.args = (source.args[0], *node.args[1:])
            if node.meta["val"].shape == node.args[0].meta["val"].shape:
                node.replace_all_uses_with(node.args[0])
    drop_unused(graph)


def _read_transposed_dims(node: fx.Node) -> set[int]:
    """Return the two dims that the transpose ``node`` exchanges, as indices from 0."""
    return {d % node.meta["val"].dim() for d in node.args[1:3]}


def _list_operand_nodes(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


def _list_user_nodes(node: fx.Node) -> list[fx.Node]:
    return list(node.users)


def _assign_source_locations(graph: fx.Graph) -> None:
    """Set the module path and source line of each backward node of ``graph`` to those of its forward operator, in
    place."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    for node in nodes:
        node.meta.update(node.meta.pop("custom", {}))
    from_inputs, from_users = (nodes, _list_operand_nodes), (nodes[::-1], _list_user_nodes)
    for order, neighbours in (from_inputs, from_users, from_inputs):
        for node in order:
            if not node.meta.get("path"):
                known = [n for n in neighbours(node) if n.meta.get("path")]
                if known:
                    node.meta.update({k: known[-1].meta.get(k, "") for k in ("path", "source")})


def _cut_joint_graph(
    graph: fx.Graph, block: Block, needs: Sequence[bool], with_grad: Sequence[int], recomputed: frozenset[str]
) -> BlockDerivatives:
    """Return the forward and backward functions of ``block``, copied from its joint graph ``graph``, which stays
    unchanged.

    ``needs``: for each state (parameter, buffer, constant), then each input, whether it gets a gradient. ``with_grad``:
    the indices of the outputs that have a gradient. ``recomputed``: names of forward nodes whose results backward
    recomputes.
    """
    nodes = list(graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    num_primals = len(block.placeholders)
    num_states = len(block.states)
    primals, tangents = placeholders[:num_primals], placeholders[num_primals:]
    results = nodes[-1].args[0]
    outputs, gradients = results[: len(block.outputs)], results[len(block.outputs) :]
    forward = collect_ancestor_nodes(outputs)
    forward |= {n for n in nodes if n.target is operator.getitem and n.args[0] in forward} | set(primals)
    backward = [n for n in nodes if n.op == "call_function" and n not in forward]
    read_later = {o for n in backward for o in n.all_input_nodes} | {g for g in gradients if g is not None}
    saved = [n for n in nodes if n in forward and n in read_later]
    unkept = {n for n in forward if n.meta.get(MADE_BY) in recomputed}
    saved, remade = choose_saved_nodes(saved, unkept, [n for n in nodes if n in forward], gradients)
    seeds = [tangents[i] for i in with_grad]

    needed = [i for i, need in enumerate(needs) if need]
    of_states = [g for i, g in zip(needed, gradients, strict=True) if i < num_states]
    of_inputs = [g for i, g in zip(needed, gradients, strict=True) if i >= num_states]
    start = [*saved, *seeds]
    first, later, carried = JointHalves(nodes, forward, backward, remade, start).cut(of_inputs, of_states)
    return BlockDerivatives(
        forward=_extract_subgraph(_select_operators(nodes, forward), primals, [*outputs, *saved]),
        backward=_extract_subgraph(insert_recomputed_nodes(backward, remade, nodes), start, [*of_inputs, *of_states]),
        backward_input=_extract_subgraph(first, start, [*of_inputs, *carried]),
        backward_weight=_extract_subgraph(later, carried, of_states),
        num_outputs=len(outputs),
        saved=tuple(n.name for n in saved),
        grad_outputs=tuple(with_grad),
        grad_inputs=tuple(i - num_states for i in needed if i >= num_states),
        grad_states=tuple(i for i in needed if i < num_states),
    )


def _select_operators(nodes: list[fx.Node], chosen: set[fx.Node]) -> list[fx.Node]:
    return [n for n in nodes if n in chosen and n.op == "call_function"]


def _extract_subgraph(
    body: list[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node | None]
) -> JointSubgraph:
    """Return a function that consists of copies of ``body``, operators of a larger graph, in order. ``inputs``: the
    nodes that become placeholders. ``outputs``: the nodes to return; ``None`` is a gradient of zero."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.create_node("placeholder", node.name, name=node.name)
        env[node].meta["val"] = node.meta.get("val")
    for node in body:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(None if n is None else env[n] for n in outputs))
    drop_unused(graph)
    return JointSubgraph(graph, tuple(n.name for n in inputs), tuple(None if n is None else n.name for n in outputs))


@dataclass(frozen=True)
class CollectiveUse:
    """One collective operator in a graph. All participating ranks must call it with equal field values.

    ``node``: the name of the graph node. ``op``: the name of the collective, such as ``all_reduce``. ``axis``: the name
    of the mesh axis. ``shape``, ``dtype``: shape and dtype of the operand on one rank. ``path``, ``source``: the module
    path and source line of the operator, for error messages.
    """

    node: str
    op: str
    axis: str
    shape: tuple[int, ...]
    dtype: str
    path: str = ""
    source: str = ""


def list_collectives(graph: fx.Graph) -> list[CollectiveUse]:
    """Return a list of all collectives in ``graph`` that communicate, in order."""
    uses = []
    for node in graph.nodes:
        name = collective_name(node.target) if node.op == "call_function" else None
        if name in COMMUNICATING:
            value = node.args[0].meta["val"]
            where = node.meta.get("path", ""), node.meta.get("source", "")
            axis = next(a for a in node.args if isinstance(a, str))
            dtype = str(value.dtype).removeprefix("torch.")
            uses.append(CollectiveUse(node.name, name, axis, tuple(value.shape), dtype, *where))
    return uses
