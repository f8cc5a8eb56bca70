"""Sharding rules of operators that split, join, shift or pad a dim: split, slice, cat, stack, select, pad, roll.

Each function returns the :class:`OpFactors` of one operator call, which says which dims may be sharded. A dim that is
split or joined is sharded in *sections*: each piece is divided over all ranks separately, so that splitting needs no
communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from partitioner.passes.rules.factors import (
    FIRST,
    NAMES,
    LocalBuilder,
    OpFactors,
    Spans,
    build_factor_rule,
    get_meta_shape,
    get_node_argument,
    mark_linear_together,
    normalize_dim,
    normalize_dims,
    operands_of,
    results_of,
)
from partitioner.passes.rules.registry import register_family

aten = torch.ops.aten

_WHOLE = None
_FLIPPED: dict[Any, int] = {aten.fliplr.default: 1, aten.flipud.default: 0}


def _list_part_spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return a list of (start, length), in elements, of consecutive parts of a dim whose lengths are ``sizes``."""
    return [(end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]


@register_family(
    "split", "split_with_sizes", "split_copy", "split_with_sizes_copy", "chunk", "tensor_split", "unsafe_split",
        "unsafe_chunk", "unsafe_split_with_sizes")  # fmt: skip
def shard_split(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a ``split`` or ``chunk``: every dim may be sharded. Each piece of the split
    dim is divided over all ranks separately, so that every rank has a part of every piece.

    Return ``None`` (no sharding) if the pieces overlap or leave a gap.
    """
    (x,) = operands_of(node)
    dim = normalize_dim(get_node_argument(node, "dim", 0), len(get_meta_shape(x)))
    names = NAMES[: len(get_meta_shape(x))]
    sizes = tuple(r.shape[dim] for r in results_of(node))
    if sum(sizes) != get_meta_shape(x)[dim]:
        return None  # unordered borders: the pieces overlap
    spans = Spans(names[dim], tuple(s for s in sizes if s), (_WHOLE,), tuple(_list_part_spans(sizes)))
    pieces = [_forbid_if_empty(names, dim, s) for s in sizes]
    return build_factor_rule(node, [names], pieces, linear=FIRST, local=_lower_split, spans=spans)


def _forbid_if_empty(names: Sequence[str], dim: int, size: int) -> list[str | None]:
    """Return ``names``, the factor names of a tensor's dims in a sharding rule. If ``size`` is 0, the name of ``dim``
    is replaced by ``None`` (must not be sharded).

    ``dim``: the dim along which an operator cuts or joins tensors. ``size``: the tensor's size along ``dim``.
    """
    return [n if size or d != dim else None for d, n in enumerate(names)]


def _lower_split(local: LocalBuilder) -> fx.Node:
    """Append the split (such as ``aten.split``) of this rank's operand, with piece sizes for one rank, to the graph of
    one rank, and return the new node. ``local``: the split to replace, its layouts, and the graph of one rank."""
    spans = local.factors.spans
    if spans is None or local.strategy.factor != spans.factor:
        return local.copy()
    (x,) = local.operands
    dim = normalize_dim(get_node_argument(local.node, "dim", 0), len(get_meta_shape(x)))
    sizes = [length // local.num_ranks for _, length in spans.results]  # type: ignore[misc]
    return local.call(aten.split_with_sizes.default, x, sizes, dim)


@register_family("cat", "concat", "concatenate")
def shard_cat(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``cat``: every dim may be sharded. Along the concatenated dim, each
    operand is divided over all ranks separately."""
    operands = operands_of(node)
    rank = len(node.meta["val"].shape)
    dim = normalize_dim(get_node_argument(node, "dim", 0), rank)
    names = NAMES[:rank]
    # An empty one-dimensional tensor may be concatenated with any tensor.
    sizes = [get_meta_shape(o)[dim] if len(get_meta_shape(o)) == rank else 0 for o in operands]
    spans = Spans(names[dim], tuple(s for s in sizes if s), tuple(_list_part_spans(sizes)), (_WHOLE,))
    pieces = [
        _forbid_if_empty(names, dim, s) if len(get_meta_shape(o)) == rank else [None]
        for s, o in zip(sizes, operands, strict=True)
    ]
    return build_factor_rule(node, pieces, [names], linear=mark_linear_together(len(operands)), spans=spans)


@register_family("slice", "slice_copy", "narrow", "narrow_copy")
def shard_slice_operator(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a ``slice`` or ``narrow``: every dim may be sharded. The parts of the
    sliced dim before, inside and after the slice are each divided over all ranks. With a step greater than 1, the
    sliced dim may be sharded only if the slice covers all of it.

    Return ``None`` (no sharding) if the start is a tensor.
    """
    x, *others = operands_of(node)
    if others:
        return None  # the start depends on data
    names = list(NAMES[: len(get_meta_shape(x))])
    dim = normalize_dim(get_node_argument(node, "dim", 0), len(names))
    size, length = get_meta_shape(x)[dim], int(node.meta["val"].shape[dim])
    start, step = _start_and_step(node, size)
    if step > 1:
        return _shard_strided_slice(node, names, dim, start, step)
    if length == 0:
        return build_factor_rule(node, [[n if d != dim else None for d, n in enumerate(names)]], [names], linear=FIRST)
    sections = tuple(s for s in (start, length, size - start - length) if s)
    spans = Spans(names[dim], sections, (_WHOLE,), ((start, length),))
    return build_factor_rule(node, [names], [names], linear=FIRST, local=_lower_slice, spans=spans)


def _start_and_step(node: fx.Node, size: int) -> tuple[int, int]:
    """Return (start, step) of the slice operator ``node``, in elements. The start is a nonnegative index, at most
    ``size``, the size of the sliced dim."""
    start = get_node_argument(node, "start") or 0
    start = max(start + size, 0) if start < 0 else min(start, size)
    return start, get_node_argument(node, "step", 1)


def _shard_strided_slice(node: fx.Node, names: list[str], dim: int, start: int, step: int) -> OpFactors:
    """Return the sharding rule of ``node``, a slice that takes every ``step``-th element of the dim ``dim``, from index
    ``start`` on.

    ``names``: a factor name for each dim of the operand. ``dim`` may be sharded only if its size is a multiple of
    ``step`` and the slice covers all of the dim; other dims may be sharded.
    """
    (x,) = operands_of(node)
    length = int(node.meta["val"].shape[dim])
    if get_meta_shape(x)[dim] != length * step or start >= step:
        before, after = ([n if d != dim else None for d, n in enumerate(names)] for _ in range(2))
        return build_factor_rule(node, [before], [after], linear=FIRST)
    found = build_factor_rule(node, [[n if d != dim else None for d, n in enumerate(names)]], [names], linear=FIRST)
    before_dims = tuple(f if d != dim else (names[dim], "step") for d, f in enumerate(found.operands[0]))
    after_dims = tuple(f if d != dim else (names[dim],) for d, f in enumerate(found.results[0]))
    sizes = {**found.sizes, names[dim]: length, "step": step}
    return OpFactors(sizes, (before_dims,), (after_dims,), frozenset(("step",)), FIRST, local=_lower_slice)


def _lower_slice(local: LocalBuilder) -> fx.Node:
    """Append the slice of this rank's operand to the graph of one rank, and return the new node. If the sliced dim is
    sharded, start and end are converted to this rank's. ``local``: the slice to replace, its layouts, and the graph of
    one rank."""
    (x,) = local.operands
    dim = normalize_dim(get_node_argument(local.node, "dim", 0), len(get_meta_shape(x)))
    if not local.strategy.operands[0].is_shard or local.strategy.operands[0].dim != dim:
        return local.copy()
    size = get_meta_shape(operands_of(local.node)[0])[dim]
    start, step = _start_and_step(local.node, size)
    if step > 1:
        return local.call(aten.slice.Tensor, x, dim, start, get_meta_shape(x)[dim], step)
    start //= local.num_ranks
    return local.call(aten.slice.Tensor, x, dim, start, start + local.result_shape()[dim])


@register_family("slice_scatter")
def slice_scatter(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``slice_scatter``, which replaces a range of a dim of the first operand
    by the second operand.

    Every dim may be sharded. The parts of the written dim before, inside and after the range are each divided over all
    ranks. With a step greater than 1, the written dim must not be sharded.
    """
    x, part = operands_of(node)
    names = NAMES[: len(get_meta_shape(x))]
    dim = normalize_dim(get_node_argument(node, "dim"), len(names))
    size, length = get_meta_shape(x)[dim], get_meta_shape(part)[dim]
    start, step = _start_and_step(node, size)
    if step > 1 or length == 0:
        kept = [n if d != dim else None for d, n in enumerate(names)]
        return build_factor_rule(node, [kept, kept], [kept], linear=mark_linear_together(2))
    sections = tuple(s for s in (start, length, size - start - length) if s)
    spans = Spans(names[dim], sections, (_WHOLE, (start, length)), (_WHOLE,))
    return build_factor_rule(
        node, [names, names], [names], linear=mark_linear_together(2), local=_lower_slice_scatter, spans=spans
    )


def _lower_slice_scatter(local: LocalBuilder) -> fx.Node:
    """Append the write of a range into this rank's operand to the graph of one rank, and return the new node. If the
    written dim is sharded, start and end are converted to this rank's. ``local``: the ``slice_scatter`` to replace, its
    layouts, and the graph of one rank."""
    x, part = local.operands
    dim = normalize_dim(get_node_argument(local.node, "dim"), len(get_meta_shape(x)))
    spans = local.factors.spans
    if spans is None or local.strategy.factor != spans.factor:
        return local.copy()
    start = _start_and_step(local.node, get_meta_shape(operands_of(local.node)[0])[dim])[0] // local.num_ranks
    return local.call(aten.slice_scatter.default, x, part, dim, start, start + get_meta_shape(part)[dim])


@register_family("select_scatter")
def select_scatter(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``select_scatter``, which replaces one index of a dim: this dim must
    not be sharded, other dims may be."""
    rank = len(get_meta_shape(operands_of(node)[0]))
    dim = normalize_dim(get_node_argument(node, "dim"), rank)
    names = [n if d != dim else None for d, n in enumerate(NAMES[:rank])]
    return build_factor_rule(node, [names, [n for n in names if n]], [names], linear=mark_linear_together(2))


@register_family("select", "select_copy")
def shard_select(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a ``select``: the dim of the selected index must not be sharded, other
    dims may be. Return ``None`` (no sharding) if the index is a tensor."""
    x, *others = operands_of(node)
    if others:
        return None
    dim = normalize_dim(get_node_argument(node, "dim", 0), len(get_meta_shape(x)))
    return _shard_removed_dim(node, dim)


@register_family("unbind", "unbind_copy")
def shard_unbind(node: fx.Node) -> OpFactors:
    (x,) = operands_of(node)
    return _shard_removed_dim(node, normalize_dim(get_node_argument(node, "dim", 0), len(get_meta_shape(x))))


def _shard_removed_dim(node: fx.Node, dim: int) -> OpFactors:
    """Return the sharding rule of ``node``, an operator such as ``unbind``, each of whose results is one index of
    ``dim``: this dim must not be sharded, other dims may be."""
    (x,) = operands_of(node)
    names = NAMES[: len(get_meta_shape(x))]
    left = [n for d, n in enumerate(names) if d != dim]
    results = [left for _ in results_of(node)]
    return build_factor_rule(node, [names], results, whole=frozenset((names[dim],)), linear=FIRST)


@register_family("stack")
def shard_stack(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``stack``: the new dim must not be sharded, other dims may be."""
    rank = len(node.meta["val"].shape)
    dim = normalize_dim(get_node_argument(node, "dim", 0), rank)
    names = NAMES[:rank]
    operands = operands_of(node)
    left = [n for d, n in enumerate(names) if d != dim]
    whole = frozenset((names[dim],))
    return build_factor_rule(
        node, [left for _ in operands], [names], whole=whole, linear=mark_linear_together(len(operands))
    )


def _shard_unchanged_dims(node: fx.Node, dims: Sequence[int], is_linear: bool = True) -> OpFactors:
    """Return the sharding rule of ``node``, an operator that moves or adds elements along ``dims`` (indices from 0):
    these dims must not be sharded, other dims may be.

    ``is_linear``: whether the result is a partial sum if the operand is one.
    """
    rank = len(get_meta_shape(operands_of(node)[0]))
    names = [n if d not in dims else None for d, n in enumerate(NAMES[:rank])]
    return build_factor_rule(node, [names], [names for _ in results_of(node)], linear=FIRST if is_linear else ())


@register_family("constant_pad_nd", "pad")
def shard_padding(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``pad``: padded dims must not be sharded, other dims may be.

    If the operand is a partial sum, so is the result, unless the padding is a constant other than zero.
    """
    is_linear = get_node_argument(node, "mode", "constant") != "constant" or not get_node_argument(node, "value")
    return _shard_unchanged_dims(node, _find_padded_dims(node, get_node_argument(node, "pad")), is_linear)


@register_family(
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d",
)  # fmt: skip
def pad_by_copies(node: fx.Node) -> OpFactors:
    return _shard_unchanged_dims(node, _find_padded_dims(node, get_node_argument(node, "padding")))


def _find_padded_dims(node: fx.Node, amounts: Sequence[int]) -> list[int]:
    """Return the dims of the operand of ``node`` that are padded, as indices from 0, last dim first. ``amounts``: the
    numbers of elements added before and after each dim, starting with the last dim."""
    rank = len(get_meta_shape(operands_of(node)[0]))
    return [rank - 1 - i for i in range(len(amounts) // 2) if amounts[2 * i] or amounts[2 * i + 1]]


@register_family("flip", "roll", "fliplr", "flipud", "rot90")
def shard_flip_or_roll(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a flip, roll or rotation: the dims along which elements move must not be
    sharded, other dims may be. If the operator has no argument ``dims``, elements move along all dims."""
    rank = len(get_meta_shape(operands_of(node)[0]))
    return _shard_unchanged_dims(node, normalize_dims(get_node_argument(node, "dims", _FLIPPED.get(node.target)), rank))


@register_family("tril", "triu")
def shard_triangle(node: fx.Node) -> OpFactors:
    rank = len(get_meta_shape(operands_of(node)[0]))
    return _shard_unchanged_dims(node, (rank - 2, rank - 1))


@register_family("diff")
def shard_diff(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``diff``: the dim along which differences are taken must not be
    sharded, other dims may be."""
    operands = operands_of(node)
    rank = len(get_meta_shape(operands[0]))
    dim = normalize_dim(get_node_argument(node, "dim", -1), rank)
    names = [n if d != dim else None for d, n in enumerate(NAMES[:rank])]
    return build_factor_rule(node, [names for _ in operands], [names], linear=mark_linear_together(len(operands)))


@register_family("diagonal", "diagonal_copy")
def shard_diagonal(node: fx.Node) -> OpFactors:
    rank = len(get_meta_shape(operands_of(node)[0]))
    pair = {normalize_dim(get_node_argument(node, "dim1"), rank), normalize_dim(get_node_argument(node, "dim2"), rank)}
    names = [n if d not in pair else None for d, n in enumerate(NAMES[:rank])]
    return build_factor_rule(node, [names], [[*(n for n in names if n), None]], linear=FIRST)


@register_family("diag_embed")
def shard_diag_embed(node: fx.Node) -> OpFactors:
    rank = len(node.meta["val"].shape)
    pair = {normalize_dim(get_node_argument(node, "dim1"), rank), normalize_dim(get_node_argument(node, "dim2"), rank)}
    names = [n if d not in pair else None for d, n in enumerate(NAMES[:rank])]
    return build_factor_rule(node, [[*(n for n in names if n), None]], [names], linear=FIRST)


@register_family("unfold", "unfold_copy")
def shard_unfold(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an ``unfold``: the dim that is cut into windows must not be sharded,
    other dims may be."""
    rank = len(get_meta_shape(operands_of(node)[0]))
    dim = normalize_dim(get_node_argument(node, "dimension"), rank)
    names = [n if d != dim else None for d, n in enumerate(NAMES[:rank])]
    return build_factor_rule(node, [names], [[*names, None]], linear=FIRST)
