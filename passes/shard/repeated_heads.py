"""Find key and value heads that a model repeats once for each query head before attention, and remove the repetition.

Models with grouped queries write it as an expansion and a reshape (``repeat_kv`` of Hugging Face), as
``repeat_interleave`` or as ``repeat``, with the heads in any dim. Attention within a band accepts fewer key heads than
query heads, so ranks that share a sequence can exchange each key head once: with 8 key heads for 64 query heads, an
eighth of the bytes. The gradients of the repetitions are then added up inside attention.

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
    """Describes a tensor that was repeated along one dim. The dim consists of equal slices, and each slice is followed
    by its copies.

    ``shape``: the shape of the tensor without copies. ``dim``: the index of the repeated dim. ``outer``: the number
    of slices. ``inner``: the number of elements of a slice along the dim. ``times``: how often each slice appears.
    """

    shape: tuple[int, ...]
    dim: int
    outer: int
    inner: int
    times: int


@dataclass(frozen=True)
class RepeatedHeads:
    """Describes keys or values ``[..., heads, positions, d]`` whose heads the model repeats, and how to compute them
    without the copies.

    ``source``: the node before the repetition. ``steps``: what the model applies to it besides the repetition, in
    order; a step is a shape (a reshape to it) or an operator node. ``times``: how often each head appears; its
    copies follow one another.
    """

    source: fx.Node
    steps: tuple[tuple[int, ...] | fx.Node, ...]
    times: int

    def build(self, graph: fx.Graph) -> fx.Node:
        """Append to ``graph`` the operators that compute the keys or values from ``source`` by ``steps``, without
        copies of their heads. Return the last node."""
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
    """Return how the model has repeated the heads of ``value``, a node with keys or values ``[..., heads, positions,
    d]``; return ``None`` if it has not."""
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
    """Return along which dim, and how often, the operator ``node`` repeats its operand; return ``None`` if it does
    not repeat it along exactly one dim."""
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
    """Return a tuple with, for each dim of the result of ``node``, the index of the dim of the operand that moved
    there, if ``node`` is a transpose or permutation; return ``None`` for another operator."""
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
    """Return where the repeated slices and their copies are in a tensor after a reshape to the shape ``after``. Return
    ``None`` if no dim of the result contains whole slices, each with all of its copies. ``place``: where they are
    before the reshape."""
    before = math.prod(place.shape[: place.dim]) * place.outer  # slices that are repeated
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
    """Return the node of the shape ``dims`` from which ``node`` was made by reshapes alone, or ``node`` itself if it
    has this shape; return ``None`` if there is no such node."""
    while get_meta_shape(node) != dims:
        if node.op != "call_function" or node.target not in _RESHAPES:
            return None
        node = operands_of(node)[0]
    return node


def count_head_repetitions(attention: fx.Node) -> int:
    """Return how often each key and value head appears in the operands of the operator ``attention``, if the model
    repeats the heads and the operator could read each head once; otherwise return 1."""
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
    """Return how often each key head must appear so that the heads split evenly over ``tp`` ranks. With context
    parallelism, ranks exchange keys, and fewer copies mean fewer bytes. The result is the smallest divisor of ``times``
    for which the heads split evenly; ``times`` itself if there is none.

    ``heads``: the number of key heads, with the copies that the model makes. ``times``: how often each head appears
    among them. ``tp``: the number of tensor-parallel ranks that share the heads.
    """
    once = heads // times
    return next(n for n in range(1, times + 1) if times % n == 0 and (once * n % tp == 0 or n == times))


def group_queries(block: Block, tp: int = 1) -> Block:
    """Reduce the copies of key and value heads that attention with context parallelism reads in the graph of
    ``block``, in place, so that ranks exchange fewer bytes. Each head then appears as often as needed to split the
    heads evenly over ``tp`` ranks. Return ``block``, a piece of the model such as a layer."""
    _reduce_head_copies(block, ops.context_attention.default, tp)
    _reduce_head_copies(block, ops.context_document_attention.default, tp)
    _reduce_head_copies(block, ops.context_scored_attention.default, tp)
    return block


def read_heads_once(block: Block) -> bool:
    """Change the graph of ``block``, a piece of the model such as a layer, in place, so that attention reads each key
    and value head once (grouped-query attention) wherever the model repeats heads for it. Return whether anything
    changed. This is done for torch's scaled dot-product attention, and for ``band_attention``, ``document_attention``
    and ``scored_attention`` of this project.
    """
    targets = (
        aten.scaled_dot_product_attention.default,
        ops.band_attention.default,
        ops.document_attention.default,
        ops.scored_attention.default,
    )
    changed = [_reduce_head_copies(block, target, 1) for target in targets]
    return any(changed)


def _reduce_head_copies(block: Block, target: Any, tp: int) -> bool:
    """Let the attention operators ``target`` in the graph of ``block`` read fewer copies of key and value heads, in
    place. Each head then appears as often as needed to split the heads evenly over ``tp`` ranks. Return whether
    anything changed. ``block``: a piece of the model such as a layer."""
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
    """Append operators to ``graph`` that compute ``value``, a node with keys or values whose heads the model
    repeats, so that each head appears ``times`` times only. Return the node of the result."""
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
