"""Find key and value heads that a model repeats once for each query head before attention, and remove the repetition.

Models with grouped queries write it as an expansion and a reshape (``repeat_kv`` of Hugging Face), as
``repeat_interleave`` or as ``repeat``, with the heads in any dim. Attention within a band of positions accepts fewer
key heads than query heads, so ranks that share a sequence can exchange each key head once: with 8 key heads for 64
query heads, this saves seven eighths of the bytes. The gradients of a head's copies are then summed inside attention.

Requires: a graph in normal form. A tensor counts as repeated if every step from the repetition to attention keeps the
copies of a head adjacent: reshapes, transposes, copies and casts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.model import Block
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.rules.attention import find_attention_band
from partitioner.passes.rules.factors import get_meta_shape, get_node_argument, operands_of

aten = torch.ops.aten

_RESHAPES = frozenset(
    (
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.flatten.using_ints,
        aten.unflatten.int,
    )
)
_COPIES = frozenset((aten.clone.default, aten.contiguous.default, aten.alias.default))
_CASTS = frozenset((aten._to_copy.default, aten.to.dtype))


@dataclass(frozen=True)
class _RepeatedDim:
    """A dim along which a tensor was repeated. The dim consists of equal slices, each of which is followed by its
    copies.

    ``shape``: the shape of the tensor without copies. ``dim``: the index of the repeated dim. ``outer``: the number of
    slices. ``inner``: the number of elements of a slice along the dim. ``times``: how often each slice appears.
    """

    shape: tuple[int, ...]
    dim: int
    outer: int
    inner: int
    times: int


@dataclass(frozen=True)
class RepeatedHeads:
    """Keys or values ``[..., heads, positions, d]`` whose heads the model repeats, and the steps that compute them
    without the copies.

    ``source``: the node before the repetition. ``steps``: what the model applies to ``source`` besides the repetition,
    in order: a shape (for a reshape) or an operator node. ``times``: how often each head appears; copies are adjacent.
    """

    source: fx.Node
    steps: tuple[tuple[int, ...] | fx.Node, ...]
    times: int

    def build(self, graph: fx.Graph) -> fx.Node:
        """Append to ``graph`` the operators that compute the keys or values without copies of heads: ``steps``, applied
        to ``source``. Return the last node."""
        made, given = self.source, self.source.meta.get("grad")
        for step in self.steps:
            if isinstance(step, fx.Node):
                assert callable(step.target), step
                made = insert_operator_node(graph, step.target, (made, *step.args[1:]), dict(step.kwargs), like=step)
            else:
                known = _find_unreshaped(made, step)
                made = known or insert_operator_node(graph, aten.reshape.default, (made, list(step)), like=made)
            made.meta.setdefault("grad", given)
        return made


def match_repeated_heads(value: fx.Node) -> RepeatedHeads | None:
    """Return the :class:`RepeatedHeads` of ``value``, a node with keys or values ``[..., heads, positions, d]``;
    ``None`` if the model has not repeated their heads."""
    chain: list[fx.Node] = []
    node = value
    while (place := _find_repeated_dim(node)) is None:
        if node.op != "call_function" or not (node.target in _RESHAPES | _COPIES | _CASTS or _find_dim_order(node)):
            return None
        chain.append(node)
        node = operands_of(node)[0]
    source, steps = operands_of(node)[0], list[tuple[int, ...] | fx.Node]()
    for step in reversed(chain):
        order = _find_dim_order(step)
        if order is not None:
            dims = tuple(place.shape[d] for d in order)
            place = _RepeatedDim(dims, order.index(place.dim), place.outer, place.inner, place.times)
            steps.append(step)
        elif step.target in _RESHAPES:
            moved = _reshape_repeated_dim(place, get_meta_shape(step))
            if moved is None:
                return None
            place = moved
            steps.append(place.shape)
        elif step.target in _CASTS:
            steps.append(step)
    if place.dim != len(place.shape) - 3 or place.inner != 1:
        return None
    return RepeatedHeads(source, tuple(steps), place.times)


def _find_repeated_dim(node: fx.Node) -> _RepeatedDim | None:
    """Return the dim along which the operator ``node`` repeats its operand; ``None`` if it does not repeat the operand
    along exactly one dim."""
    if node.op != "call_function":
        return None
    if node.target is aten.repeat_interleave.self_int:
        times, dim = get_node_argument(node, "repeats"), get_node_argument(node, "dim")
        before = get_meta_shape(operands_of(node)[0])
        if dim is None or times < 2:
            return None
        dim %= len(before)
        return _RepeatedDim(before, dim, before[dim], 1, times)
    if node.target not in (aten.expand.default, aten.repeat.default):
        return None
    before, after = get_meta_shape(operands_of(node)[0]), get_meta_shape(node)
    if len(before) != len(after):
        return None
    grown = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(grown) != 1:
        return None
    (dim,) = grown
    return _RepeatedDim(before, dim, 1, before[dim], after[dim] // before[dim])


def _find_dim_order(node: fx.Node) -> tuple[int, ...] | None:
    """Return a tuple with the operand's dim that becomes each dim of the result, if ``node`` is a transpose or
    permutation; ``None`` for another operator."""
    if node.op != "call_function" or node.target not in (aten.transpose.int, aten.permute.default):
        return None
    rank = len(get_meta_shape(node))
    if node.target is aten.permute.default:
        return tuple(d % rank for d in get_node_argument(node, "dims"))
    order = list(range(rank))
    a, b = get_node_argument(node, "dim0") % rank, get_node_argument(node, "dim1") % rank
    order[a], order[b] = b, a
    return tuple(order)


def _reshape_repeated_dim(place: _RepeatedDim, after: Sequence[int]) -> _RepeatedDim | None:
    """Return the repeated dim of a tensor after a reshape to the shape ``after``; ``None`` if no dim of the result
    contains whole slices, each with all of its copies. ``place``: the repeated dim before the reshape."""
    before = math.prod(place.shape[: place.dim]) * place.outer  # number of repeated slices
    reached = 1
    for dim, size in enumerate(after):
        outer, rest = divmod(before, reached)
        if rest:
            return None
        if size % (outer * place.times) == 0 and size > outer:
            kept = (*after[:dim], size // place.times, *after[dim + 1 :])
            return _RepeatedDim(kept, dim, outer, size // place.times // outer, place.times)
        reached *= size
    return None


def _find_unreshaped(node: fx.Node, dims: tuple[int, ...]) -> fx.Node | None:
    """Return the nearest node with the shape ``dims`` among ``node`` and the nodes from which it was made by reshapes
    alone; ``None`` if there is none."""
    while get_meta_shape(node) != dims:
        if node.op != "call_function" or node.target not in _RESHAPES:
            return None
        node = operands_of(node)[0]
    return node


def count_head_repetitions(attention: fx.Node) -> int:
    """Return how often each key and value head appears in the operands of the operator ``attention``. Return 1 if the
    model does not repeat the heads, or if the operator cannot read each head only once."""
    if find_attention_band(attention) is None:
        return 1
    query, key, value = operands_of(attention)[:3]
    if (
        not len(get_meta_shape(query)) == len(get_meta_shape(key)) == 4
        or get_meta_shape(key)[1] != get_meta_shape(query)[1]
    ):
        return 1
    of_key, of_value = match_repeated_heads(key), match_repeated_heads(value)
    return of_key.times if of_key and of_value and of_key.times == of_value.times else 1


def count_exchanged_copies(heads: int, times: int, tp: int) -> int:
    """Return how many copies of each key head the ranks of context parallelism exchange. It is the smallest divisor of
    ``times`` for which the heads split evenly over ``tp`` ranks, because fewer copies mean fewer bytes; ``times`` if
    there is none.

    ``heads``: the number of key heads, including the model's copies. ``times``: how often each head appears among them.
    ``tp``: the number of tensor-parallel ranks that share the heads.
    """
    once = heads // times
    return next(n for n in range(1, times + 1) if times % n == 0 and (once * n % tp == 0 or n == times))


def group_queries(block: Block, tp: int = 1) -> Block:
    """Reduce the copies of key and value heads that attention with context parallelism reads in the graph of ``block``
    (a piece of the model such as a layer), in place, so that ranks exchange fewer bytes. As many copies stay as are
    needed to split the heads evenly over ``tp`` ranks. Return ``block``."""
    _reduce_head_copies(block, ops.context_attention.default, tp)
    _reduce_head_copies(block, ops.context_document_attention.default, tp)
    _reduce_head_copies(block, ops.context_scored_attention.default, tp)
    return block


def read_heads_once(block: Block) -> bool:
    """Change the graph of ``block`` (a piece of the model such as a layer), in place, so that attention reads each key
    and value head once (grouped-query attention) where the model repeats heads. Return whether anything changed. This
    covers torch's scaled dot-product attention, and ``band_attention``, ``document_attention`` and ``scored_attention``
    of this project."""
    targets = (
        aten.scaled_dot_product_attention.default,
        ops.band_attention.default,
        ops.document_attention.default,
        ops.scored_attention.default,
    )
    changed = [_reduce_head_copies(block, target, 1) for target in targets]
    return any(changed)


def _reduce_head_copies(block: Block, target: Any, tp: int) -> bool:
    """Let the operators ``target``, which are attention, read fewer copies of key and value heads in the graph of
    ``block`` (a piece of the model such as a layer), in place. As many copies stay as are needed to split the heads
    evenly over ``tp`` ranks. Return whether anything changed."""
    changed = False
    for node in list(block.graph.nodes):
        if node.op != "call_function" or node.target is not target:
            continue
        times = count_head_repetitions(node)
        left = count_exchanged_copies(get_meta_shape(operands_of(node)[1])[1], times, tp) if times > 1 else times
        if left == times:
            continue
        with block.graph.inserting_before(node):
            fewer = [_append_repeated_heads(block.graph, value, left) for value in operands_of(node)[1:3]]
        node.args = (node.args[0], *fewer, *node.args[3:])
        if target is aten.scaled_dot_product_attention.default:
            node.kwargs = {**node.kwargs, "enable_gqa": True}
        changed = True
    if changed:
        drop_unused(block.graph)
    return changed


def _append_repeated_heads(graph: fx.Graph, value: fx.Node, times: int) -> fx.Node:
    """Append operators to ``graph`` that compute ``value``, a node with keys or values whose heads the model repeats,
    with only ``times`` copies of each head. Return the node of the result."""
    found = match_repeated_heads(value)
    assert found is not None, value
    made = found.build(graph)
    if times > 1:
        made = insert_operator_node(graph, aten.repeat_interleave.self_int, (made, times, 1), like=made)
        made.meta.setdefault("grad", value.meta.get("grad"))
    return made


__all__ = [
    "RepeatedHeads",
    "count_exchanged_copies",
    "count_head_repetitions",
    "group_queries",
    "match_repeated_heads",
    "read_heads_once",
]
