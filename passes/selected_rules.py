"""Operators that count selected rows, cut them or ignore some, and the table of all that know of selected rows.

Requires and provides: see ``passes/selected.py``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes.choices import RESHAPES
from passes.infer import META
from passes.selected_numbers import ITEMS
from passes.selected_places import (
    Rows,
    Unselectable,
    add_rows,
    find_rows,
    put_along,
    put_rows,
    take_along,
    take_rows,
    take_where,
)
from passes.selected_statistics import STATISTICS

if TYPE_CHECKING:
    from passes.selected import SelectedRows

aten = torch.ops.aten


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
    rows, dim = [build.rows.get(part) for part in parts], dim % parts[0].meta["val"].dim()
    if all(r is not None and r.dim != dim for r in rows) or any(r is not None and r.dim != dim for r in rows):
        return None
    joined = _join_pieces(build, parts, rows)
    return _cat_rows(build, parts, dim) if joined is None else joined


def _join_pieces(build: SelectedRows, parts: Any, rows: list[Rows | None]) -> fx.Node | None:
    """Pieces that are put together in the order in which they were cut; ``None``: they are something else."""
    cut = [build.pieces.get(r.mask) for r in rows if r is not None]
    if not cut or len(cut) != len(parts) or cut[0] is None:
        return None
    if cut != [(cut[0][0], i, len(parts)) for i in range(len(cut))]:
        return None
    whole: fx.Node = parts[-1]
    for part in reversed(parts[:-1]):
        whole = build.call(aten.where.self, build.unselected(part), whole, part)
    return whole


def _cat_rows(build: SelectedRows, parts: Any, dim: int) -> fx.Node:
    """Rows of several masks, or all, one after the other; where there are equally many, one of each in turn, which
    leaves samples together that a batch has together."""
    sizes = [int(part.meta["val"].shape[dim]) for part in parts]
    masks = [_mask_or_all(build, part, size) for part, size in zip(parts, sizes, strict=True)]
    in_turn = len(set(sizes)) == 1
    first, *others = masks

    def joined() -> fx.Node:
        if not in_turn:
            return build.call(aten.cat.default, masks)
        return build.call(aten.reshape.default, build.call(aten.stack.default, masks, 1), [sum(sizes)])

    mask = build.once(first, ("cat", *others), joined)
    if in_turn or build.unordered.intersection(masks):
        build.unordered.add(mask)
    if in_turn:
        made = build.call(aten.stack.default, parts, dim + 1)
        shape = list(parts[0].meta["val"].shape)
        made = build.call(aten.reshape.default, made, [*shape[:dim], sum(sizes), *shape[dim + 1 :]])
    else:
        made = build.call(aten.cat.default, parts, dim)
    build.rows[made] = Rows(mask, dim)
    return made


def _mask_or_all(build: SelectedRows, part: fx.Node, size: int) -> fx.Node:
    if part in build.rows:
        return build.rows[part].mask
    if size not in build.all_of:
        build.all_of[size] = build.call(aten.full.default, [size], True, dtype=torch.bool, device=META)
    return build.all_of[size]


def _reshaped(target: Any) -> Callable[..., Any]:
    """Rows in one dim with others, of which then all or none are selected, and back."""

    def rule(build: SelectedRows, x: fx.Node, *args: Any) -> Any:
        try:
            return build.by_rule(target, (x, *args), {})
        except Unselectable:
            made = build.by_rule(target, (build.call(aten.alias.default, x), *args), {}, plain=True)
        rows, before, after = build.rows[x], tuple(x.meta["val"].shape), tuple(made.meta["val"].shape)
        apart = build.flattened.get(rows.mask)
        for dim in range(len(after)):
            ahead = math.prod(after[:dim])
            if apart is not None and ahead == math.prod(before[: rows.dim]):
                mask, sizes, at = apart
                if after[dim : dim + len(sizes)] == sizes:
                    build.rows[made] = Rows(mask, dim + at)
                    return made
            for start in range(rows.dim + 1):
                for end in range(rows.dim + 1, len(before) + 1):
                    sizes = before[start:end]
                    if math.prod(before[:start]) == ahead and math.prod(sizes) == after[dim] and len(sizes) > 1:
                        build.rows[made] = Rows(build.flat_mask(rows.mask, sizes, rows.dim - start), dim)
                        return made
        raise Unselectable

    return rule


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
    aten.masked_select.default: take_where,
    aten.index_select.default: take_along,
    aten.index_copy.default: put_along,
    aten.index_fill.int_Scalar: put_along,
    aten.index_fill.int_Tensor: put_along,
    **{target: _reshaped(target) for target in (*RESHAPES, aten._unsafe_view.default)},
    **STATISTICS,
}
