"""Sharding rules of reads and writes by index: embedding, gather, index, scatter and others.

Each function returns the :class:`OpFactors` of one operator call, which says which dims may be sharded. A read along a
sharded dim makes a partial sum: each rank reads the elements that it holds and has zeros for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from partitioner.passes.ir.collectives import ops as collective
from partitioner.passes.ir.layouts import PARTIAL
from partitioner.passes.rules.factors import (
    FIRST,
    NAMES,
    LocalBuilder,
    Lowering,
    OpFactors,
    build_factor_rule,
    forbid_sharding,
    get_meta_shape,
    get_node_argument,
    normalize_dim,
    operands_of,
)
from partitioner.passes.rules.registry import register_family, rule

aten = torch.ops.aten

rule("aten.one_hot", "... -> ... c!")


def localize_row_indices(local: LocalBuilder, index: fx.Node, rows: int) -> tuple[fx.Node, fx.Node]:
    """Convert indices into a sharded dim to indices into this rank's part of the dim, which has ``rows`` rows. Return
    two nodes: the local indices (0 for rows of other ranks), and a mask that is true for rows of other ranks.

    ``local``: the operator to replace, its layouts, and the graph of one rank, to which operators are appended.
    ``index``: the node of the indices into the whole dim.
    """
    rank = local.call(collective.axis_index.default, local.axis, local.num_ranks)
    shifted = local.call(aten.sub.Tensor, index, local.call(aten.mul.Tensor, rank, rows))
    below = local.call(aten.lt.Scalar, shifted, 0)
    elsewhere = local.call(aten.logical_or.default, below, local.call(aten.ge.Scalar, shifted, rows))
    return local.call(aten.masked_fill.Scalar, shifted, elsewhere, 0), elsewhere


@register_family("embedding")
def shard_embedding(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``embedding``: every dim of the ids and of the weight may be
    sharded.

    With a sharded vocabulary, each rank reads the rows that it holds and has zeros for the others, so the result is
    a partial sum. No dim may be sharded with ``sparse`` or ``scale_grad_by_freq``.
    """
    if get_node_argument(node, "sparse") or get_node_argument(node, "scale_grad_by_freq"):
        return forbid_sharding(node)
    names = NAMES[: len(get_meta_shape(operands_of(node)[1]))]
    lower = {"v": Lowering(_lower_sharded_embedding, PARTIAL)}
    return build_factor_rule(node, [("v", "h"), names], [(*names, "h")], linear=FIRST, lower=lower)


def _lower_sharded_embedding(local: LocalBuilder) -> fx.Node:
    """Append to the graph of one rank an embedding that reads the rows of the weight that this rank holds, and has
    zeros for ids of other ranks' rows. Return the node of the result. ``local``: the embedding to replace, its layouts,
    and the graph of one rank."""
    weight, index = local.operands
    own, elsewhere = localize_row_indices(local, index, local.size("v"))
    found = local.call(aten.embedding.default, weight, own)
    padding = get_node_argument(local.node, "padding_idx")
    if padding >= 0:  # the padding row is read, but has no gradient
        at = local.call(aten.unsqueeze.default, local.call(aten.eq.Scalar, index, padding), -1)
        found = local.call(aten.where.self, at, local.call(aten.detach.default, found), found)
    return local.call(aten.masked_fill.Scalar, found, local.call(aten.unsqueeze.default, elsewhere, -1), 0.0)


def name_matching_dims(operands: Sequence[fx.Node], dim: int) -> list[str | None]:
    """Return a list of names for the dims of the tensors ``operands``, which have equal numbers of dims. In a sharding
    rule, dims with the same name are sharded together. The entry is ``None`` (must not be sharded) for ``dim`` and for
    each dim in which the tensors differ in size.

    If sizes differ, an operator such as ``gather`` reads only the first part of the larger tensor, so the shards of the
    two tensors on one rank would not belong together.
    """
    sizes = zip(*(get_meta_shape(o) for o in operands), strict=True)
    return [NAMES[d] if d != dim and len({*s}) == 1 else None for d, s in enumerate(sizes)]


@register_family("gather", "take_along_dim")
def shard_gather(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a call of ``gather`` or ``take_along_dim``.

    ``gather`` may be sharded along its argument ``dim``: each rank reads the elements that it holds and has zeros for
    the others, so the result is a partial sum. ``take_along_dim`` must not be sharded along ``dim``. Another dim may be
    sharded if source and index have the same size there. Return ``None`` (no sharding) if the call has no ``dim``.
    """
    rank = len(get_meta_shape(operands_of(node)[0]))
    dim = get_node_argument(node, "dim")
    if rank == 0 or dim is None or len(node.meta["val"].shape) != rank:
        return None
    dim = normalize_dim(dim, rank)
    if node.target == aten.gather.default:
        names = name_matching_dims(operands_of(node), dim)
        lower = {NAMES[dim]: Lowering(_lower_sharded_gather, PARTIAL)}
    else:  # take_along_dim, whose operands broadcast
        names, lower = list(NAMES[:rank]), {}
    source, picked = ([n if d != dim else along for d, n in enumerate(names)] for along in (NAMES[dim], "picked"))
    whole = frozenset() if lower else frozenset((NAMES[dim],))
    return build_factor_rule(node, [source, picked], [picked], whole=whole, linear=FIRST, lower=lower)


def _lower_sharded_gather(local: LocalBuilder) -> fx.Node:
    """Append to the graph of one rank a gather from the part of the source that this rank holds, with zeros for indices
    into other ranks' parts. Return the node of the result. ``local``: the gather to replace, its layouts, and the graph
    of one rank."""
    source, index = local.operands
    dim = normalize_dim(get_node_argument(local.node, "dim"), len(get_meta_shape(source)))
    own, elsewhere = localize_row_indices(local, index, get_meta_shape(source)[dim])
    found = local.call(aten.gather.default, source, dim, own)
    return local.call(aten.masked_fill.Scalar, found, elsewhere, 0.0)


@register_family("index_select")
def index_select(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``index_select``: every dim may be sharded. If the indexed dim is
    sharded, the result is a partial sum."""
    x, index = operands_of(node)
    dim = normalize_dim(get_node_argument(node, "dim"), len(get_meta_shape(x)))
    names = NAMES[: len(get_meta_shape(x))]
    picked = [n if d != dim else "picked" for d, n in enumerate(names)]
    lower = {NAMES[dim]: Lowering(_select_sharded, PARTIAL)} if names else {}
    one_or_many = ["picked"][: len(get_meta_shape(index))]
    return build_factor_rule(node, [names, one_or_many], [picked], linear=FIRST, lower=lower)


def _select_sharded(local: LocalBuilder) -> fx.Node:
    """Append to the graph of one rank an ``index_select`` from the part of the source that this rank holds, with zeros
    for indices into other ranks' parts. Return the node of the result. ``local``: the operator to replace, its layouts,
    and the graph of one rank."""
    source, index = local.operands
    dim = normalize_dim(get_node_argument(local.node, "dim"), len(get_meta_shape(source)))
    own, elsewhere = localize_row_indices(local, index, get_meta_shape(source)[dim])
    found = local.call(aten.index_select.default, source, dim, own)
    return _zero_rows(local, found, elsewhere, dim)


def _zero_rows(local: LocalBuilder, x: fx.Node, where: fx.Node, dim: int) -> fx.Node:
    """Append to the graph of one rank an operator that sets ``x`` to zero where the mask ``where`` is true. Return the
    node of the result. ``local``: has the graph. ``dim``: the dim of ``x`` that corresponds to the first dim of the
    mask; the mask broadcasts over the last dims of ``x``."""
    behind = len(get_meta_shape(x)) - dim - len(get_meta_shape(where))
    mask = local.call(aten.reshape.default, where, [*get_meta_shape(where), *[1] * behind]) if behind else where
    return local.call(aten.masked_fill.Scalar, x, mask, 0.0)


def _index_dims(indices: Sequence[fx.Node | None], rank: int) -> tuple[int, list[str | None], list[int]]:
    """Return three values that describe ``x[indices]``: the index of the result's first dim that comes from the index
    tensors; a list of names for the dims of the broadcast index tensors; and a list of the indexed dims of ``x``.

    ``indices``: for each dim of ``x``, the node of its index tensor, or ``None``. ``rank``: unused.
    """
    indexed = [d for d, i in enumerate(indices) if i is not None]
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    width = max(len(get_meta_shape(i)) for i in indices if i is not None)
    return indexed[0] if adjacent else 0, [f"i{k}" for k in range(width)], indexed


@register_family("index", "_unsafe_index")
def shard_index(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a read ``x[i, :, j]`` with index tensors: the dims of ``x`` without an
    index and the dims of the index tensors may be sharded.

    If there is a single index tensor, the dim that it indexes may be sharded, too, and the result is then a partial
    sum. Return ``None`` (no sharding) if an index is a boolean mask, because the size of the result then depends on
    data.
    """
    x, *tensors = operands_of(node)
    indices = list(get_node_argument(node, "indices"))
    if not tensors or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in tensors):
        return None  # the number of elements that a mask selects depends on data
    at, places, indexed = _index_dims(indices, len(get_meta_shape(x)))
    names: list[str | None] = list(NAMES[: len(get_meta_shape(x))])
    left = [n for d, n in enumerate(names) if d not in indexed]
    operands: list[Sequence[str | None]] = [names, *(places[len(places) - len(get_meta_shape(i)) :] for i in tensors)]
    result = [*left[:at], *places, *left[at:]]
    first = names[indexed[0]]
    assert first is not None
    if len(indexed) > 1:
        whole = frozenset(n for d, n in enumerate(names) if d in indexed and n)
        return build_factor_rule(node, operands, [result], whole=whole, linear=FIRST)
    return build_factor_rule(
        node, operands, [result], linear=FIRST, lower={first: Lowering(_lower_sharded_index, PARTIAL)}
    )


def _lower_sharded_index(local: LocalBuilder) -> fx.Node:
    """Append to the graph of one rank a read ``x[:, i]`` from the part of the indexed dim that this rank holds, with
    zeros for indices into other ranks' parts. Return the node of the result. ``local``: the operator to replace, its
    layouts, and the graph of one rank."""
    source, places = local.operands
    dim = next(d for d, i in enumerate(get_node_argument(local.node, "indices")) if i is not None)
    rows = get_meta_shape(source)[dim]
    negative = local.call(aten.lt.Scalar, places, 0)
    from_end = local.call(aten.add.Tensor, places, rows * local.num_ranks)
    places = local.call(aten.where.self, negative, from_end, places)
    own, elsewhere = localize_row_indices(local, places, rows)
    found = local.call(aten.index.Tensor, source, [*[None] * dim, own])
    return _zero_rows(local, found, elsewhere, dim)


@register_family("index_put", "_unsafe_index_put")
def index_put(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a write ``x[i, :, j] = values`` with index tensors: dims without an
    index may be sharded, indexed dims must not be. Return ``None`` (no sharding) if an index is a boolean mask."""
    x, *rest = operands_of(node)
    tensors, values = rest[:-1], rest[-1]
    indices = list(get_node_argument(node, "indices"))
    rank = len(get_meta_shape(x))
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in tensors):
        return None
    at, places, indexed = _index_dims(indices, rank)
    names = [n if d not in indexed else None for d, n in enumerate(NAMES[:rank])]
    left = [n for n in names if n]
    aligned: list[str | None] = [*left[:at], *[None] * len(places), *left[at:]]
    operands: list[Sequence[str | None]] = [names, *([None] * len(get_meta_shape(i)) for i in tensors)]
    operands.append(aligned[len(aligned) - len(get_meta_shape(values)) :])
    return build_factor_rule(node, operands, [names], linear=(frozenset((0, len(rest))),))


@register_family("scatter", "scatter_add", "scatter_reduce")
def shard_scatter(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``scatter``, ``scatter_add`` or ``scatter_reduce``: its argument
    ``dim`` must not be sharded. Another dim may be sharded if all operands have the same size there."""
    operands = operands_of(node)
    rank = len(get_meta_shape(operands[0]))
    if rank == 0 or any(len(get_meta_shape(o)) != rank for o in operands):
        return forbid_sharding(node)
    names = name_matching_dims(operands, normalize_dim(get_node_argument(node, "dim"), rank))
    sums = get_node_argument(node, "reduce") is None and len(operands) == 3
    return build_factor_rule(node, [names for _ in operands], [names], linear=(frozenset((0, 2)),) if sums else ())


@register_family("index_add", "index_copy", "index_fill", "index_reduce")
def index_rows(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an operator such as ``index_add``, which writes slices at indices of its
    argument ``dim``. This dim must not be sharded, other dims may be."""
    x, index, *source = operands_of(node)
    dim = normalize_dim(get_node_argument(node, "dim"), len(get_meta_shape(x)))
    names = [n if d != dim else None for d, n in enumerate(NAMES[: len(get_meta_shape(x))])]
    sums = bool(source) and get_node_argument(node, "reduce") is None and bool(get_meta_shape(source[0]))
    operands: list[Sequence[str | None]] = [
        names,
        [None] * len(get_meta_shape(index)),
        *(names[: len(get_meta_shape(s))] for s in source),
    ]
    return build_factor_rule(node, operands, [names], linear=(frozenset((0, 2)),) if sums else ())
