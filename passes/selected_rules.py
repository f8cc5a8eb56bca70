"""Operators that count selected rows, cut them or ignore some, and the table of all that know of selected rows.

Requires and provides: see ``passes/selected.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from passes.infer import META
from passes.selected_places import ITEMS, Rows, Unselectable, add_rows, find_rows, put_rows, take_rows

if TYPE_CHECKING:
    from passes.selected import SelectedRows

aten = torch.ops.aten
_IGNORED = -100


def _scatter_add(build: SelectedRows, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Any:
    if x in build.rows or build.same(index, source).dim != dim % x.meta["val"].dim():
        raise Unselectable
    return build.call(aten.scatter_add.default, x, dim, build.harmless(index, 0), build.zeroed(source))


def _masked_scatter(build: SelectedRows, x: fx.Node, mask: fx.Node, source: fx.Node) -> Any:
    """The source's rows are taken in order: those that are selected come first."""
    rows = build.same(source)
    if x in build.rows or mask in build.rows or rows.dim != 0:
        raise Unselectable
    left_out = build.call(aten.to.dtype, build.call(aten.logical_not.default, rows.mask), torch.int64)
    ordered = build.call(aten.sort.stable, left_out, stable=True, dim=0)
    order = build.call(operator.getitem, ordered, 1)
    return build.call(aten.masked_scatter.default, x, mask, build.call(aten.index_select.default, source, 0, order))


def _split(build: SelectedRows, x: fx.Node, sizes: Any, dim: int = 0) -> Any:
    """Pieces of as many rows as is counted: the piece of each row is told by the running sum of the counts."""
    counts = [size.args[0] for size in sizes if isinstance(size, fx.Node) and size.target in ITEMS]
    if x in build.rows or len(counts) != len(sizes):
        raise Unselectable
    dim %= x.meta["val"].dim()
    number = int(x.meta["val"].shape[dim])
    every = build.call(aten.arange.default, number, dtype=torch.int64, device=META)
    end, masks = None, list[fx.Node]()
    before: fx.Node | None = None
    for count in counts:
        scalar = build.call(aten.reshape.default, count, [1])
        end = scalar if end is None else build.call(aten.add.Tensor, end, scalar)
        below = build.call(aten.lt.Tensor, every, end)
        inside = below if before is None else build.call(aten.logical_and.default, below, before)
        before = build.call(aten.logical_not.default, below)
        masks.append(inside)
    found = []
    for i, mask in enumerate(masks):
        build.pieces[mask] = x, i, len(masks)
        piece = build.call(aten.alias.default, x)
        build.rows[piece] = Rows(mask, dim)
        found.append(piece)
    return tuple(found)


def _cat(build: SelectedRows, parts: Any, dim: int = 0) -> Any:
    """Pieces that are put together in the order in which they were cut."""
    rows = [build.rows.get(part) for part in parts]
    cut = [build.pieces.get(r.mask) for r in rows if r is not None]
    if (
        not cut
        or len(cut) != len(parts)
        or cut[0] is None
        or cut != [(cut[0][0], i, len(parts)) for i in range(len(cut))]
    ):
        raise Unselectable
    if any(r is None or r.dim != dim % parts[0].meta["val"].dim() for r in rows):
        raise Unselectable
    whole = parts[-1]
    for part in reversed(parts[:-1]):
        whole = build.call(aten.where.self, build.unselected(part), whole, part)
    return whole


def _mean(build: SelectedRows, x: fx.Node, *, dtype: Any = None) -> Any:
    return _mean_over(build, x, list(range(x.meta["val"].dim())), dtype=dtype)


def _mean_over(build: SelectedRows, x: fx.Node, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    rows, value = build.same(x), x.meta["val"]
    dims = [d % value.dim() for d in (dims if dims else range(value.dim()))]
    if rows.dim not in dims:
        return None
    total = build.call(aten.sum.dim_IntList, build.zeroed(x), dims, keepdim, dtype=dtype)
    others = 1
    for d in dims:
        others *= value.shape[d] if d != rows.dim else 1
    number = build.call(aten.mul.Tensor, build.call(aten.sum.default, rows.mask), others)
    return build.call(aten.div.Tensor, total, number)


def _cross_entropy(
    build: SelectedRows,
    x: fx.Node,
    target: fx.Node,
    weight: Any = None,
    reduction: int = 1,
    ignored: int = _IGNORED,
    *more: Any,
) -> Any:
    """What is not selected has a target that is ignored."""
    value: Tensor = target.meta["val"]
    rows = build.same(target)
    if value.is_floating_point() or (x in build.rows and build.rows[x] != rows) or reduction == 0:
        raise Unselectable
    kept = build.call(aten.masked_fill.Scalar, target, build.unselected(target), ignored)
    return build.call(aten.cross_entropy_loss.default, x, kept, weight, reduction, ignored, *more)


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.split_with_sizes.default: _split,
    aten.split.sizes: _split,
    aten.cat.default: _cat,
    aten.where.default: find_rows,
    aten.nonzero_numpy.default: find_rows,
    aten.nonzero.default: lambda build, condition: find_rows(build, condition, as_tuple=False),
    aten.index.Tensor: take_rows,
    aten.index_put.default: put_rows,
    aten.index_add.default: add_rows,
    aten.scatter_add.default: _scatter_add,
    aten.masked_scatter.default: _masked_scatter,
    aten.mean.default: _mean,
    aten.mean.dim: _mean_over,
    aten.cross_entropy_loss.default: _cross_entropy,
}
