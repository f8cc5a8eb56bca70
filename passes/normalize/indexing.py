"""Rewrite rules for reads and writes by index: ``embedding_bag``, ``gather``, ``scatter``, ``index``,
``index_put``.

* ``embedding_bag`` becomes an embedding and a sum, mean or maximum over the ids of each bag. All bags must have
  the same size, as they have if ``nn.EmbeddingBag`` gets ids ``[bags, size]``. The bags are then a dim that can be
  sharded.
* If the index is one vector that is expanded over all other dims, ``gather`` becomes ``index_select``, ``scatter_add``
  becomes ``index_add`` and ``scatter`` becomes ``index_copy``.
* ``x[arange(n), index]``, which reads within row ``i`` for each ``i``, becomes a ``gather``. ``x[mask] = value``
  becomes a ``where``.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.rewrite import KEEP, Builder, Rule, aten, get_node_tensor, list_node_sizes
from partitioner.passes.normalize.shapes import to_dtype

_SUM, _MEAN, _MAX = range(3)  # torch's codes of the modes


class BagReduction(NamedTuple):
    """The arguments of ``torch.embedding_bag`` after the offsets, in torch's order. A bag is a group of ids whose rows
    of the embedding table are reduced to one row.

    ``scale_grad_by_freq``: whether the gradient of a table row is divided by how often its id occurs. ``mode``: 0 for
    the sum, 1 for the mean, 2 for the maximum. ``sparse``: whether the gradient of the table is sparse.
    ``per_sample_weights``: the node of a factor for each id, or ``None``. ``include_last_offset``: whether the last
    offset is the end of the last bag. ``padding_idx``: the id that does not count; ``None`` for none.
    """

    scale_grad_by_freq: bool = False
    mode: int = _SUM
    sparse: bool = False
    per_sample_weights: fx.Node | None = None
    include_last_offset: bool = False
    padding_idx: int | None = None


def rewrite_embedding_bag(build: Builder, weight: fx.Node, ids: fx.Node, offsets: fx.Node, *reduction: Any) -> Any:
    """Rewrite ``embedding_bag`` as an embedding and a reduction over each bag, a group of ids. Return the node
    of the result ``[bags, width]`` and three ``None`` for results that nothing reads.

    ``build``: appends operators to the graph. ``weight``: the table ``[rows, width]``. ``ids``: a vector of indices of
    table rows. ``offsets``: a vector; bag ``i`` starts at ``ids[offsets[i]]``. ``reduction``: the operator's further
    arguments, such as the mode (sum, mean or maximum) and a factor for each id. Raise :class:`UnsupportedError` if bags
    are not known to have the same size, or if ``scale_grad_by_freq`` is set.
    """
    how = BagReduction(*reduction)
    bags, length = list_node_sizes(offsets)[0] - how.include_last_offset, list_node_sizes(ids)[0]
    size = length // bags if bags > 0 else 0
    regular = offsets.target is aten.arange.start_step and offsets.args[0] == 0 and offsets.args[2] == size
    if not size or size * bags != length or not regular:
        raise UnsupportedError(
            f"embedding_bag at {build.location} has bags of different sizes, which would differ between ranks; give "
            "ids "
            "as [bags, size], and fill short bags with padding_idx"
        )
    if how.scale_grad_by_freq:
        raise UnsupportedError(
            f"embedding_bag at {build.location} scales gradients by the number of times that an id is in the batch, so "
            "that samples interact; expected scale_grad_by_freq=False"
        )
    table = _reshape_unless_equal(build, ids, [bags, size])
    rows = build(aten.embedding.default, weight, table)
    if how.per_sample_weights is not None:
        scale = _reshape_unless_equal(build, how.per_sample_weights, [bags, size])
        rows = build(aten.mul.Tensor, rows, build(aten.unsqueeze.default, scale, -1))
    kept = None
    if how.padding_idx is not None and how.padding_idx >= 0:
        kept = build(aten.ne.Scalar, table, how.padding_idx)
    return (_reduce_bags(build, rows, kept, how.mode), None, None, None)


def _reshape_unless_equal(build: Builder, flat: fx.Node, sizes: list[int]) -> fx.Node:
    while flat.target is aten.reshape.default:
        flat = flat.args[0]  # type: ignore[assignment]
    return flat if list_node_sizes(flat) == sizes else build(aten.reshape.default, flat, sizes)


def _reduce_bags(build: Builder, rows: fx.Node, kept: fx.Node | None, mode: int) -> fx.Node:
    """Return the node of the sum (``mode`` 0), mean (1) or maximum (2) of ``rows`` ``[bags, size, width]`` over dim 1.
    A bag without counted rows gives 0.

    ``build``: appends operators to the graph. ``kept``: a node ``[bags, size]``, true for the rows that are counted;
    ``None`` means all.
    """
    left_out = None
    if kept is not None:
        left_out = build(aten.unsqueeze.default, build(aten.logical_not.default, kept), -1)
    if mode == _MAX:
        compared = rows if left_out is None else build(aten.masked_fill.Scalar, rows, left_out, float("-inf"))
        largest = build(
            operator.getitem, build(aten.max.dim, compared, 1), 0
        )  # the gradient goes to one row, as in torch
        if kept is None:
            return largest
        empty = build(aten.logical_not.default, build(aten.any.dim, kept, 1, True))
        return build(aten.masked_fill.Scalar, largest, empty, 0)
    if left_out is not None:
        rows = build(aten.masked_fill.Scalar, rows, left_out, 0)
    total = build(aten.sum.dim_IntList, rows, [1])
    if mode == _SUM:
        return total
    if kept is None:
        return build(aten.mul.Tensor, total, 1 / list_node_sizes(rows)[1])
    count = build(aten.sum.dim_IntList, to_dtype(build, kept, get_node_tensor(rows).dtype), [1], True)
    return build(aten.div.Tensor, total, build(aten.clamp.default, count, 1))


def rewrite_embedding(
    build: Builder, weight: fx.Node, ids: fx.Node, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Any:
    """Rewrite an embedding with ``sparse=True`` as one with a dense gradient, and return its node. The result and the
    gradient have the same values. Return ``KEEP`` (the operator stays) if ``sparse`` is false.

    ``build``: appends operators to the graph. ``weight``: the table ``[rows, width]``. ``ids``: the indices of the rows
    to read. ``padding``: the id whose row gets no gradient; -1 for none. ``by_frequency``: whether the gradient of a
    row is divided by how often its id occurs.
    """
    return build(aten.embedding.default, weight, ids, padding, by_frequency) if sparse else KEEP


BAGS: dict[Any, Rule] = {
    aten.embedding.default: rewrite_embedding,
    aten.embedding_bag.default: rewrite_embedding_bag,
    aten.embedding_bag.padding_idx: rewrite_embedding_bag,
}

_VIEWS = (aten.expand.default, aten.repeat.default, aten.expand_as.default, aten.broadcast_to.default)


def rewrite_gather(build: Builder, x: fx.Node, dim: int, index: fx.Node, sparse_grad: bool = False) -> Any:
    places = _find_slice_indices(build, x, dim, index)
    return KEEP if places is None else build(aten.index_select.default, x, dim, places)


def scatter_add(build: Builder, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Any:
    return _rewrite_slice_write(build, aten.index_add.default, x, dim, index, source)


def rewrite_scatter(build: Builder, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Any:
    return _rewrite_slice_write(build, aten.index_copy.default, x, dim, index, source)


def index_fill(build: Builder, x: fx.Node, dim: int, index: fx.Node, value: fx.Node) -> Any:
    """Rewrite ``index_fill``, which sets the slices with the indices ``index`` along ``dim`` of ``x`` to ``value``, as
    a ``where`` on a mask of the indexed slices, and return the node of the result. The gradient of ``index_fill``
    itself would count repeated indices, whose number depends on data. If ``x`` has no dims, return ``KEEP`` (the
    operator stays). ``build``: appends operators to the graph."""
    if not list_node_sizes(x):
        return KEEP
    rank, size = len(list_node_sizes(x)), list_node_sizes(x)[dim]
    none = build(aten.full.default, [size], False, dtype=torch.bool, device=META)
    mask = build(aten.index_fill.int_Scalar, none, 0, index, True)
    mask = build(aten.reshape.default, mask, [size if d == dim % rank else 1 for d in range(rank)])
    return build(aten.where.self, mask, to_dtype(build, value, get_node_tensor(x).dtype), x)


def _rewrite_slice_write(build: Builder, target: Any, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Any:
    places = _find_slice_indices(build, x, dim, index) if list_node_sizes(source) == list_node_sizes(index) else None
    return KEEP if places is None else build(target, x, dim, places, source)


def _find_slice_indices(build: Builder, x: fx.Node, dim: int, index: fx.Node) -> fx.Node | None:
    """If the index tensor ``index`` of a ``gather`` or ``scatter`` of ``x`` along ``dim`` is a vector expanded over all
    other dims, such as ``v.view(-1, 1).expand(n, m)`` for ``dim`` 0, return the node of this vector: whole slices of
    ``x`` are then read or written. Return ``None`` for any other ``index``.

    ``build``: appends operators to the graph.
    """
    sizes, rank = list_node_sizes(index), len(list_node_sizes(index))
    if rank < 2 or index.target not in _VIEWS or get_node_tensor(index).dtype != torch.int64:
        return None
    dim %= rank
    source: Any = index.args[0]
    others = [d for d in range(rank) if d != dim]
    known = [1] * (rank - len(list_node_sizes(source))) + list_node_sizes(source)
    if any(sizes[d] != list_node_sizes(x)[d] or known[d] != 1 for d in others) or known[dim] != sizes[dim]:
        return None
    while source.target is aten.reshape.default:
        source = source.args[0]
    return source if list_node_sizes(source) == [sizes[dim]] else build(aten.reshape.default, source, [sizes[dim]])


INDICES: dict[Any, Rule] = {
    aten.gather.default: rewrite_gather,
    aten.scatter_add.default: scatter_add,
    aten.scatter.src: rewrite_scatter,
    aten.index_fill.int_Tensor: index_fill,
}

_RESHAPES = (aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten.squeeze.dim, aten._to_copy.default,
             aten.to.dtype, aten.to.device)  # fmt: skip


def rewrite_index(build: Builder, x: fx.Node, indices: list[fx.Node | None]) -> Any:
    """Rewrite ``x[rows_0, ..., rows_k, index]`` as a ``gather`` of ``x`` along the dim that ``index`` indexes, and
    return the node of the result.

    ``build``: appends operators to the graph. ``indices``: the nodes of the index tensors of the leading dims of ``x``.
    Each but the last must be ``arange(size)`` over a whole dim ``d`` of ``x``, and must lie along dim ``d`` of the
    broadcast shape of the indices. For any other indices, return ``KEEP`` (the operator stays).
    """
    if any(i is None or get_node_tensor(i).dtype not in (torch.int64, torch.int32) for i in indices):
        return KEEP
    *rows, places = (i for i in indices if i is not None)
    sizes = list(torch.broadcast_shapes(*(list_node_sizes(i) for i in (*rows, places))))
    if not rows or any(_find_counted_dim(i, len(sizes)) != (d, list_node_sizes(x)[d]) for d, i in enumerate(rows)):
        return KEEP
    dim = len(rows)
    outer, inner, rest = sizes[:dim], sizes[dim:], list_node_sizes(x)[dim + 1 :]
    negative = build(aten.lt.Scalar, places, 0)
    places = build(aten.where.self, negative, build(aten.add.Tensor, places, list_node_sizes(x)[dim]), places)
    places = build(aten.to.dtype, places, torch.int64)
    if list_node_sizes(places) != sizes:
        places = build(aten.expand.default, places, sizes)
    count = math.prod(inner)
    places = build(aten.reshape.default, places, [*outer, count, *[1] * len(rest)])
    if rest:
        places = build(aten.expand.default, places, [*outer, count, *rest])
    found = build(aten.gather.default, x, dim, places)
    return build(aten.reshape.default, found, [*sizes, *rest])


def _find_counted_dim(node: fx.Node, rank: int) -> tuple[int, int] | None:
    """If ``node`` is an ``arange(size)``, possibly reshaped, that varies along a single dim, return (this dim,
    ``size``). Return ``None`` for any other node.

    ``rank``: the number of dims to which ``node`` is broadcast; the returned dim is an index from 0 among these.
    """
    sizes = [1] * (rank - len(list_node_sizes(node))) + list_node_sizes(node)
    along = [d for d, size in enumerate(sizes) if size > 1]
    while node.target in _RESHAPES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    schema = getattr(node.target, "_schema", None)
    if len(along) != 1 or schema is None or schema.name != "aten::arange":
        return None
    given = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | node.kwargs
    if given.get("start", 0) != 0 or given.get("step", 1) != 1:
        return None
    return along[0], sizes[along[0]]


def index_put(
    build: Builder, x: fx.Node, indices: list[fx.Node | None], value: fx.Node, accumulate: bool = False
) -> Any:
    """Rewrite ``x[mask] = value`` (or ``+=`` if ``accumulate``) as a ``where``, and return the node of the result.
    Return ``KEEP`` (the operator stays) if ``indices`` or ``value`` has another form than the following.

    ``build``: appends operators to the graph. ``indices``: a single boolean mask over the leading dims of ``x``.
    ``value``: the node of one value for all masked positions: a number, or a tensor with the dims of ``x`` behind the
    mask.
    """
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or get_node_tensor(mask).dtype != torch.bool:
        return KEEP
    behind, sizes = len(list_node_sizes(x)) - len(list_node_sizes(mask)), list_node_sizes(value)
    if len(sizes) > behind and math.prod(sizes[: len(sizes) - behind]) != 1:
        return KEEP
    mask = build(aten.reshape.default, mask, list_node_sizes(mask) + [1] * behind)
    if len(sizes) > behind:
        value = build(aten.reshape.default, value, sizes[len(sizes) - behind :])
    if accumulate:
        return build(aten.add.Tensor, x, build(aten.where.ScalarOther, mask, value, 0))
    return build(aten.where.self, mask, value, x)


PLACES: dict[Any, Rule] = {aten.index.Tensor: rewrite_index, aten.index_put.default: index_put}
