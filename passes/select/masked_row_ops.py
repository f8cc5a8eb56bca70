"""Rewrite operators that select rows by index or write rows back, so that they keep all rows together with a mask.

Each function takes the rewriter ``build`` (:class:`SelectedRows` of ``passes/select/masked_rows.py``) and appends
operators to its graph. Requires: nodes of an exported program. Provides: operators with static shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from partitioner.passes.experts.routing_masks import is_distinct_along, match_any_equality, match_equality
from partitioner.passes.ir.interpret import META

if TYPE_CHECKING:
    from partitioner.passes.select.masked_rows import SelectedRows

aten = torch.ops.aten

_LOGICAL_AND = {aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor}

ALL_ROWS = (
    "it combines rows that a mask selects with all rows, of which there are more; expected as many of both: select "
    "them by the same mask"
)
_ORDER = (
    "it puts rows in order of which a mask selects how many there are; expected a fixed number of rows: keep all, and "
    "give those that are not selected a number that comes last, as x.masked_fill(~mask.unsqueeze(-1), -torch.inf)"
)
_MIDDLE = (
    "it looks for the middle of rows of which a mask selects how many there are; expected a fixed number of rows: keep "
    "all, as x.masked_fill(~mask.unsqueeze(-1), torch.nan).nanmedian(0)"
)
_PRODUCT = (
    "it multiplies rows that a mask selects with each other, of which there is no fixed number; expected a fixed "
    "number of rows: keep all, and leave out products of the others, as scores.masked_fill(~mask, -torch.inf)"
)
# Operator that cannot skip unselected rows -> advice for the user.
INSTEAD: dict[Any, str] = {
    **dict.fromkeys((aten.sort, aten.argsort, aten.topk, aten.kthvalue, aten.msort), _ORDER),
    **dict.fromkeys((aten.median, aten.mode, aten.quantile), _MIDDLE),
    **dict.fromkeys((aten.mm, aten.matmul, aten.bmm, aten.cdist), _PRODUCT),
}


@dataclass(frozen=True)
class MaskedRows:
    """Describes a tensor of the rewritten graph that keeps all rows, although the original model selects some of them
    by a mask.

    ``mask``: a boolean node with one element for each row, true for the rows that the model selects. ``dim``: the
    index of the tensor's dim of rows.
    """

    mask: fx.Node
    dim: int


@dataclass(frozen=True)
class MaskCoordinate:
    """Describes a node of the rewritten graph that replaces one result of ``torch.where(condition)``, the indices of
    true elements along one dim. To keep shapes static, the node has an index for every element of ``condition``, true
    or not.

    ``mask``: ``condition``, flattened; it is true for the indices that the original model has. ``dim``: the dim of
    ``condition`` along which the indices are taken. ``shape``: the shape of ``condition``. ``condition``: a boolean
    node.
    """

    mask: fx.Node
    dim: int
    shape: tuple[int, ...]
    condition: fx.Node


@dataclass(frozen=True)
class MaskedRowCount:
    """Stands for the size of a dim that, in the original model, is the number of rows that ``mask`` selects, and so
    depends on the data. It may be an argument of operators of the rewritten graph, in which all rows are kept:
    ``int()`` of this object is the number of all rows. ``mask``: a boolean node with an element for each row."""

    mask: fx.Node

    def __int__(self) -> int:
        return int(self.mask.meta["val"].shape[0])


class Unselectable(Exception):
    """Raised if an operator on rows that a mask selects cannot be rewritten to static shapes, that is, to an operator
    on all rows and the mask. The text, if there is one, says why, and what to write instead."""


def rewrite_mask_indices(build: SelectedRows, condition: fx.Node, as_tuple: bool = True) -> Any:
    """Rewrite ``torch.where(condition)`` or ``nonzero`` with static shapes. Return nodes with the coordinates of all
    elements of ``condition``, true or not, and record in ``build`` that the original model has only the coordinates of
    true elements.

    ``build``: the rewriter, which appends operators to the new graph. ``as_tuple``: if true, return a tuple with one
    node for each dim; if false, return one node ``[elements, dims]``. Raise :class:`Unselectable` if ``condition``
    consists of rows that another mask selects, or has no dims.
    """
    if condition in build.rows or not condition.meta["val"].dim():
        raise Unselectable
    found = _build_choice_coordinates(build, condition) or _build_mask_coordinates(
        build, condition, build.flatten_condition(condition)
    )
    if as_tuple:
        return tuple(found)
    table = build.insert_call(aten.stack.default, found, -1)
    build.rows[table] = build.rows[found[0]]
    if len(found) == 1:
        build.places[table] = build.places[found[0]]
    return table


def _build_mask_coordinates(build: SelectedRows, condition: fx.Node, mask: fx.Node) -> list[fx.Node]:
    """Append one node for each dim of ``condition`` to the new graph, with the index of every element along this dim,
    in row-major order. Return a list of the nodes, which replace the results of ``torch.where(condition)``. ``build``
    records that the original model has only the entries for which ``mask`` is true.

    ``build``: the rewriter, which appends operators to the new graph. ``mask``: ``condition``, flattened.
    """
    shape = tuple(condition.meta["val"].shape)
    inner = number = int(mask.meta["val"].shape[0])
    every = build.insert_call(aten.arange.default, number, dtype=torch.int64, device=META)
    found = []
    for i, size in enumerate(shape):
        inner //= size
        place = every if inner == 1 else build.insert_call(aten.div.Tensor_mode, every, inner, rounding_mode="floor")
        place = place if i == 0 else build.insert_call(aten.remainder.Scalar, place, size)
        found.append(place if place is not every else build.insert_call(aten.clone.default, every))
        build.places[found[-1]] = MaskCoordinate(mask, i, shape, condition)
    build.rows.update(dict.fromkeys(found, MaskedRows(mask, 0)))
    return found


def _build_choice_coordinates(build: SelectedRows, condition: fx.Node) -> list[fx.Node]:
    """Append nodes to the new graph that replace the results of ``torch.where(condition)``. ``condition`` must test,
    for each token and each of its k choices, whether the router of a mixture of experts chose a given expert. Return
    one node for each dim of ``condition``, with the index of every entry, true or not. Entries are ordered so that the
    k choices of a token are adjacent, even if ``condition`` is transposed; they can then be sharded by tokens. Return
    an empty list if ``condition`` is not such a test, or has this order already.

    ``condition`` may also test whether any of a token's k choices is the expert. There are k entries for a token in
    this case, too, of which at most one is true, because a token's choices are distinct. ``build``: the rewriter, which
    appends operators to the new graph and records the mask of the entries that the original model has.
    """
    found, along = match_any_equality(condition), list[int]()
    if found is not None:
        along = list(range(condition.meta["val"].dim()))
    choice = match_equality(condition) if found is None and not build.in_order else None
    if choice is not None and choice.dims != tuple(sorted(choice.dims)):
        found, along = (choice.chosen, choice.number), list(choice.dims)
    if found is None:
        return []
    key = build.key(condition)
    if key not in build.pairs:
        numbers, number = found
        shape = list(numbers.meta["val"].shape)
        if choice is None:  # the condition tests whether any of a token's choices is the expert: add a dim of choices
            shape = [*condition.meta["val"].shape, shape[-1]]
        mask = build.flatten_condition(build.insert_call(aten.eq.Scalar, numbers, number))
        if shape != list(numbers.meta["val"].shape):
            numbers = build.insert_call(aten.reshape.default, numbers, shape)
        ones = _build_mask_coordinates(build, build.insert_call(aten.eq.Scalar, numbers, number), mask)
        build.pairs[key] = [ones[d] for d in along]
    return build.pairs[key]


def take_rows(build: SelectedRows, x: fx.Node, indices: Any) -> Any:
    """Rewrite ``x[indices]`` with static shapes, where rows are selected by a boolean mask or by the coordinates of its
    true elements. Return a node that keeps all rows, and record the mask for it in ``build.rows``. Return ``None`` if
    no mask selects rows.

    ``build``: the rewriter, which appends operators to the new graph. ``indices``: for each dim of ``x``, a node, or
    ``None`` for a dim without an index. Raise :class:`Unselectable` if there is no form that keeps all rows.
    """
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    first, index = given[0]
    if x in build.rows:
        return _index_selected_rows(build, x, given)
    if index.meta["val"].dtype == torch.bool and index not in build.rows:
        if len(given) != 1:
            return _index_by_mask_and_values(build, x, indices)
        pairs = _build_choice_coordinates(build, index)
        if pairs:
            return take_rows(build, x, [*indices[:first], *pairs])
        mask = build.flatten_condition(index)
        shape = list(x.meta["val"].shape)
        covered = index.meta["val"].dim()
        flat = [*shape[:first], int(mask.meta["val"].shape[0]), *shape[first + covered :]]
        made = build.insert_call(aten.reshape.default, x, flat)
        build.rows[made] = MaskedRows(mask, first)
        made = build.fill_unselected_with(made)
        if first == 0:
            build.read[made] = x, (mask,)
        return made
    if not any(i in build.rows for _, i in given):
        return None
    if [d for d, _ in given] != list(range(first, first + len(given))):
        raise Unselectable
    rows = build.find_common_rows(*(i for _, i in given))
    if rows.dim != 0 or any(i.meta["val"].dim() != 1 for _, i in given):
        raise Unselectable
    spread = _broadcast_to_mask(build, x, first, [i for _, i in given])
    made = spread if spread is not None else build.insert_call(aten.index.Tensor, x, _guard_indices(build, indices))
    build.rows[made] = MaskedRows(rows.mask, first)
    made = build.fill_unselected_with(made)
    if first == 0:
        build.read[made] = x, tuple(i for _, i in given)
    return made


def _index_selected_rows(build: SelectedRows, x: fx.Node, given: list[tuple[int, fx.Node]]) -> fx.Node:
    """Rewrite an index into ``x`` with static shapes, where ``x`` keeps all rows, although the original model selects
    some of them by a mask. The index is ``x[mask2]``, with a mask of the selected rows, or ``x[arange(rows),
    columns]``, which takes one element of dim 1 for each row. Return a node that keeps all rows, and record the mask
    for it in ``build.rows``.

    ``build``: the rewriter, which appends operators to the new graph. ``given``: the indices, each as (indexed dim of
    ``x``, node of the index). Raise :class:`Unselectable` for other indices.
    """
    rows = build.rows[x]
    dim, index = given[0]
    if any(i not in build.rows or build.rows[i] != MaskedRows(rows.mask, 0) for _, i in given) or rows.dim != dim:
        raise Unselectable
    if len(given) == 1 and index.meta["val"].dtype == torch.bool and index.meta["val"].dim() == 1:
        made = build.insert_call(aten.alias.default, x)
        build.rows[made] = MaskedRows(build.narrow_mask(rows.mask, index), dim)
        return build.fill_unselected_with(made)
    if dim or [d for d, _ in given] != [0, 1] or build.numbered.get(index) is not rows.mask:
        raise Unselectable
    number = build.fill_unselected_with(given[1][1], 0)
    count = int(number.meta["val"].shape[0])
    alone = build.insert_call(aten.reshape.default, number, [count] + [1] * (x.meta["val"].dim() - 1))
    places = build.insert_call(aten.expand.default, alone, [count, 1, *x.meta["val"].shape[2:]])
    taken = build.insert_call(aten.gather.default, x, 1, places)
    made = build.insert_call(aten.squeeze.dim, taken, 1)
    build.rows[made] = rows
    return made


def _index_by_mask_and_values(build: SelectedRows, x: fx.Node, indices: Any) -> Any:
    """Rewrite ``x[mask, numbers[mask]]``, an index by a mask and by values that the same mask selects, with static
    shapes. Return a node that keeps all rows, and record the mask for it in ``build.rows``.

    ``build``: the rewriter, which appends operators to the new graph. ``indices``: for each dim of ``x``, a node, or
    ``None`` for a dim without an index. Raise :class:`Unselectable` for other indices.
    """
    spread: list[Any] = []
    for i in indices:
        if i is not None and i.meta["val"].dtype == torch.bool and i not in build.rows:
            spread += _build_mask_coordinates(build, i, build.flatten_condition(i))
        else:
            spread.append(i)
    rows = {build.rows[i].mask for i in spread if i is not None and i in build.rows}
    if len(rows) != 1:
        raise Unselectable
    return take_rows(build, x, spread)


def take_where(build: SelectedRows, x: fx.Node, mask: fx.Node) -> Any:
    """Rewrite ``masked_select(x, mask)`` with static shapes: broadcast ``x`` and ``mask``, and flatten them into one
    dim. Return a node that keeps all elements, and record the mask for it in ``build.rows``.

    ``build``: the rewriter, which appends operators to the new graph. Raise :class:`Unselectable` if ``x`` or
    ``mask`` consists of rows that another mask selects, unless both have one dim of the same size.
    """
    if x in build.rows or mask in build.rows:
        if x.meta["val"].shape != mask.meta["val"].shape or x.meta["val"].dim() != 1:
            raise Unselectable
        return take_rows(build, x, [mask])
    shape = list(torch.broadcast_shapes(x.meta["val"].shape, mask.meta["val"].shape))
    both = [
        n if list(n.meta["val"].shape) == shape else build.insert_call(aten.expand.default, n, shape) for n in (x, mask)
    ]
    return take_rows(build, both[0], [both[1]])


def rewrite_index_select(build: SelectedRows, x: fx.Node, dim: int, index: fx.Node) -> Any:
    """Rewrite ``index_select(x, dim, index)`` with static shapes, where ``index`` has coordinates of the true elements
    of a mask. Return a node that keeps all rows, and record the mask for it in ``build.rows``. If no such rewrite is
    needed, or if ``x`` itself consists of rows that a mask selects, return ``None``: the caller then uses the
    operator's sharding rule.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    if x in build.rows or index.meta["val"].dim() != 1 or not x.meta["val"].dim():
        return None
    return take_rows(build, x, [*[None] * (dim % x.meta["val"].dim()), index])


def rewrite_index_copy(build: SelectedRows, x: fx.Node, dim: int, index: fx.Node, values: Any) -> Any:
    """Rewrite ``index_copy``, or ``index_fill`` with one number, with static shapes, where a mask selects the rows that
    are written. Return the new node. If ``index`` is not a vector or ``x`` has no dims, return ``None``: the caller
    then uses the operator's sharding rule. Raise :class:`Unselectable` if there is no form with static shapes.

    Args:
        build: the rewriter, which appends operators to the new graph.
        x: the tensor whose rows are overwritten.
        dim: the dim of rows.
        index: the indices of the rows to write, a node with coordinates of the true elements of a mask.
        values: the new rows, or one number.
    """
    if index.meta["val"].dim() != 1 or not x.meta["val"].dim():
        return None
    dim %= x.meta["val"].dim()
    if isinstance(values, fx.Node) and values in build.rows:
        return rewrite_index_put(build, x, [*[None] * dim, index], values)
    covered, _ = _match_mask_coordinates(build, x, dim, [index])
    if len(covered) != 1 or (isinstance(values, fx.Node) and values.meta["val"].dim()):
        raise Unselectable
    sizes = [1] * x.meta["val"].dim()
    sizes[dim] = covered[0]
    chosen = build.insert_call(aten.reshape.default, build.find_common_rows(index).mask, sizes)
    if not isinstance(values, fx.Node):
        return build.insert_call(aten.masked_fill.Scalar, x, chosen, values)
    return build.insert_call(aten.masked_fill.Tensor, x, chosen, values)


def _guard_indices(build: SelectedRows, indices: Any) -> list[Any]:
    """Return ``indices``, index nodes or ``None``, with 0 in place of the entries of rows that a mask does not select
    in the original model, so that every entry is in range. Indices without a mask are unchanged.

    ``build``: the rewriter, which appends operators to the new graph and knows the masks.
    """
    return [build.fill_unselected_with(i, 0) if i in build.rows else i for i in indices]


def _match_mask_coordinates(
    build: SelectedRows, x: fx.Node, first: int, indices: list[fx.Node]
) -> tuple[tuple[int, ...], list[int]]:
    """If ``indices`` are coordinates of the true elements of one mask, return (shape of the mask, for each index the
    dim of the mask to which its coordinates belong). Otherwise, or if these dims have other sizes than the indexed dims
    of ``x``, return ``((), [])``.

    In the first case, each element of the mask belongs to one fixed position of ``x``, so that ``x[indices]`` needs no
    index operator. ``build``: the rewriter, which knows which nodes are coordinates. ``first``: the dim of ``x`` at
    which the indexed dims begin.
    """
    places = [build.places.get(i) for i in indices]
    known = [place for place in places if place is not None]
    if len(known) < len(places) or len({(place.mask, place.shape) for place in known}) != 1:
        return (), []
    covered, along = known[0].shape, [place.dim for place in known]
    fits = [covered[i] for i in along] == list(x.meta["val"].shape[first : first + len(along)])
    return (covered, along) if fits and len(along) == len(set(along)) else ((), [])


def _broadcast_to_mask(build: SelectedRows, x: fx.Node, first: int, indices: list[fx.Node]) -> fx.Node | None:
    """Append operators to the new graph that compute ``x[indices]`` by broadcasting ``x`` to one row for each element
    of a mask, true or not, and return the node. Return ``None`` unless ``indices`` are coordinates of the true elements
    of one mask whose dims have the sizes of the indexed dims of ``x``.

    ``build``: the rewriter, which appends operators to the new graph. ``first``: the dim of ``x`` at which the indexed
    dims begin.
    """
    covered, along = _match_mask_coordinates(build, x, first, indices)
    if not along:
        return None
    sizes = list(x.meta["val"].shape)
    before, after = sizes[:first], sizes[first + len(along) :]
    if along != sorted(along):
        moved = [first + along.index(i) for i in sorted(along)]
        x = build.insert_call(aten.permute.default, x, [*range(first), *moved, *range(first + len(along), len(sizes))])
    alone = [size if i in along else 1 for i, size in enumerate(covered)]
    value = build.insert_call(aten.reshape.default, x, [*before, *alone, *after])
    value = build.insert_call(aten.expand.default, value, [*before, *covered, *after])
    return build.insert_call(aten.reshape.default, value, [*before, math.prod(covered), *after])


def rewrite_index_put(build: SelectedRows, x: fx.Node, indices: Any, values: fx.Node, accumulate: bool = False) -> Any:
    """Rewrite ``x[indices] = values`` with static shapes, where a mask selects which rows of ``x`` are written. If
    ``accumulate`` is true, ``values`` is added to the rows instead. ``values`` keeps all rows, although the original
    model selects some of them by the same mask, ``build.rows[values]``. Return the new node. Raise
    :class:`Unselectable` if there is no form with static shapes.

    ``build``: the rewriter, which appends operators to the new graph. ``indices``: for each dim of ``x``, ``None`` for
    a dim without an index, otherwise a boolean mask or coordinates of its true elements.
    """
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    rows = build.rows.get(values)
    first, index = given[0]
    if rows is None or x in build.rows or [d for d, _ in given] != list(range(first, first + len(given))):
        raise Unselectable
    if index.meta["val"].dtype == torch.bool:
        pairs = _build_choice_coordinates(build, index)
        if pairs:
            return rewrite_index_put(build, x, [*indices[:first], *pairs], values, accumulate)
        mask, covered, whole = build.flatten_condition(index), tuple(index.meta["val"].shape), True
    else:
        mask = build.find_common_rows(*(i for _, i in given)).mask
        covered, along = _match_mask_coordinates(build, x, first, [i for _, i in given])
        whole = bool(along) and along == list(range(len(covered))) and first == 0
    if rows.mask is not mask or rows.dim != first:
        raise Unselectable
    by = [mask] if index.meta["val"].dtype == torch.bool else [i for _, i in given]
    more = _find_other_addend(build, x, by, values) if whole and first == 0 and not accumulate else None
    if more is not None:
        values, accumulate = more, True
    shape = list(x.meta["val"].shape)
    if accumulate and not whole:
        added = None if index.meta["val"].dtype == torch.bool else _scatter_sum_rows(build, x, first, by, values)
        if added is not None:
            return build.insert_call(aten.add.Tensor, x, added)
        return build.insert_call(
            aten.index_put.default, x, _guard_indices(build, indices), build.zero_unselected(values), True
        )
    if not whole:
        put_once = _write_without_index(build, x, by, values) if first == 0 else None
        if put_once is not None:
            return put_once
    if not whole or tuple(shape[first : first + len(covered)]) != covered:
        raise Unselectable
    put = build.zero_unselected(values) if accumulate else values
    rest = [*shape[:first], int(mask.meta["val"].shape[0]), *shape[first + len(covered) :]]
    put = build.insert_call(aten.reshape.default, build.insert_call(aten.expand.default, put, rest), shape)
    if accumulate:
        return build.insert_call(aten.add.Tensor, x, put)
    chosen = build.insert_call(
        aten.reshape.default, mask, [1] * first + list(covered) + [1] * (len(shape) - first - len(covered))
    )
    return build.insert_call(aten.where.self, chosen, put, x)


def add_rows(build: SelectedRows, x: fx.Node, dim: int, index: fx.Node, source: fx.Node, **kwargs: Any) -> Any:
    """Rewrite ``index_add(x, dim, index, source)`` with static shapes. ``index`` and ``source`` keep all rows, although
    the original model selects some of them by one mask, recorded for both in ``build.rows``. Return the new node, in
    which rows that the mask does not select add nothing. Raise :class:`Unselectable` if ``index`` and ``source`` have
    no common mask.

    ``build``: the rewriter, which appends operators to the new graph. ``kwargs``: further arguments of ``index_add``.
    """
    if x in build.rows or build.find_common_rows(index).mask is not build.find_common_rows(source).mask:
        raise Unselectable
    dim %= x.meta["val"].dim()
    if build.find_common_rows(source).dim != dim:
        raise Unselectable
    added = _scatter_sum_rows(build, x, dim, [index], source)
    if added is None:
        return build.insert_call(
            aten.index_add.default,
            x,
            dim,
            build.fill_unselected_with(index, 0),
            build.zero_unselected(source),
            **kwargs,
        )
    return build.insert_call(aten.add.Tensor, x, added, **kwargs)


def _scatter_sum_rows(
    build: SelectedRows, x: fx.Node, first: int, indices: list[fx.Node], source: fx.Node, *, chosen: bool = False
) -> fx.Node | None:
    """Append a reshape and a sum to the new graph, which add up the rows of ``source`` that ``indices`` assign to the
    same position of ``x``. Return the node of the sums. ``source`` keeps all rows; rows that its mask does not select
    count as zero. Return ``None`` if this is impossible, because the mask and ``x`` have different sizes.

    Args:
        build: the rewriter, which appends operators to the new graph.
        x: the tensor to whose positions the indices point.
        first: the dim of ``x`` at which the indexed dims begin.
        indices: coordinates of the true elements of a mask, with an entry for every element, true or not.
        source: the rows to sum.
        chosen: whether the caller reads only positions to which a selected row points. If so, other positions may have
            any value.
    """
    covered, along = _match_mask_coordinates(build, x, first, indices)
    sizes = list(source.meta["val"].shape)
    if not along or sizes[first + 1 :] != list(x.meta["val"].shape[first + len(along) :]):
        return None
    others = [first + i for i in range(len(covered)) if i not in along]
    source = source if chosen and not others else build.zero_unselected(source)
    apart = build.insert_call(aten.reshape.default, source, [*sizes[:first], *covered, *sizes[first + 1 :]])
    dtype = source.meta["val"].dtype
    # a sum of integers would have a wider dtype
    kept = {} if dtype.is_floating_point or dtype.is_complex else {"dtype": dtype}
    total = build.insert_call(aten.sum.dim_IntList, apart, others, **kept) if others else apart
    return _permute_coordinates(build, total, first, along)


def _permute_coordinates(
    build: SelectedRows, value: fx.Node, first: int, along: list[int], *, back: bool = False
) -> fx.Node:
    """Append a permutation of the dims of ``value`` from ``first`` on to the new graph, and return its node. These dims
    correspond to dims of a mask, in ascending order; the result has them in the order ``along``. If ``along`` is
    ascending, return ``value`` itself.

    ``build``: the rewriter, which appends operators to the new graph. ``along``: the indices of the mask's dims in the
    wanted order, such as ``[1, 0]`` for a mask that was transposed. ``back``: if true, the permutation is from the
    order ``along`` to the ascending order instead.
    """
    if along == sorted(along):
        return value
    order = [sorted(along).index(i) for i in along]
    order = [order.index(i) for i in range(len(order))] if back else order
    order = [*range(first), *(first + i for i in order), *range(first + len(along), value.meta["val"].dim())]
    args: Any = value.args
    if value.target is aten.permute.default and [args[1][i] for i in order] == list(range(len(order))):
        source: fx.Node = args[0]  # the two permutations cancel, as between two iterations of a loop
        return source
    return build.insert_call(aten.permute.default, value, order)


def _write_without_index(build: SelectedRows, x: fx.Node, indices: list[fx.Node], values: fx.Node) -> fx.Node | None:
    """Rewrite ``x[indices] = values`` without an index operator, and return the new node. Return ``None`` unless
    ``indices`` are coordinates of a mask's true elements and point to each position of ``x`` at most once.

    ``build``: the rewriter, which appends operators to the new graph. ``values``: a node with a row for every
    element of the mask, true or not.
    """
    covered, along = _match_mask_coordinates(build, x, 0, indices)
    if not along:
        return None
    place = build.places[indices[0]]
    left = [d for d in range(len(covered)) if d not in along]
    if len(left) > 1 or (left and not _selects_at_most_one(place.condition, left[0])):
        return None
    more = _find_other_addend(build, x, indices, values)
    if more is not None:
        added = _scatter_sum_rows(build, x, 0, indices, more)
        return None if added is None else build.insert_call(aten.add.Tensor, x, added)
    order = sorted(along)  # the same order of dims for all writes of a loop
    straight = _permute_coordinates(build, x, 0, along, back=True)
    put = _scatter_sum_rows(build, straight, 0, [indices[along.index(i)] for i in order], values, chosen=True)
    if put is None:
        return None
    chosen = build.insert_call(aten.reshape.default, place.mask, list(covered))
    chosen = build.insert_call(aten.any.dim, chosen, left[0]) if left else chosen
    sizes = chosen.meta["val"].shape
    chosen = build.insert_call(aten.reshape.default, chosen, [*sizes, *[1] * (x.meta["val"].dim() - len(sizes))])
    return _permute_coordinates(build, build.insert_call(aten.where.self, chosen, put, straight), 0, along)


def _selects_at_most_one(condition: fx.Node, dim: int) -> bool:
    """Return whether the boolean node ``condition`` is known to have at most one true element along ``dim``, so that
    rows that are written at its true elements do not collide."""
    if condition.target is aten.full.default:
        return not condition.args[1]
    choice = match_equality(condition)
    if choice is not None:
        return is_distinct_along(choice.chosen, choice.dims[dim])
    both = condition.all_input_nodes if condition.target in _LOGICAL_AND else []
    shape = condition.meta["val"].shape
    return any(_selects_at_most_one(part, dim) for part in both if part.meta["val"].shape == shape)


def _find_other_addend(build: SelectedRows, x: fx.Node, indices: list[fx.Node], values: fx.Node) -> fx.Node | None:
    """If ``values`` is computed as ``x[indices] + b``, return the node ``b``; otherwise return ``None``. Writing
    ``values`` to ``x[indices]`` is the same as adding ``b`` to ``x`` there.

    ``build``: the rewriter, which knows which nodes are ``x[indices]``.
    """
    args: Any = values.args
    if values.target is not aten.add.Tensor or len(args) != 2 or values.kwargs:
        return None
    found = [b for a, b in (args, args[::-1]) if build.read.get(a) == (x, tuple(indices))]
    rows = build.rows.get(found[0]) if found else None
    return found[0] if rows is not None and rows.dim == 0 else None
