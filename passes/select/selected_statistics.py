"""Rewrite sums, means, extremes, deviations and losses of the rows that a mask selects, with all rows kept.

Before a reduction, unselected rows are set to a value that does not change the result: zero for a sum, the lowest
number for a maximum. A mean is divided by the number of selected rows. A loss is rewritten as one term for each
element, and the reduction of these terms.

Each rule takes the rewriter ``build`` and the operator's arguments, and returns the node of the result. ``None`` means
that the reduction is not over the rows, so that the plain operator can run. Requires: nodes of an exported program.
Provides: operators with static shapes, as ``passes/select/masked_rows.py``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from partitioner.passes.normalize.losses import MEAN, NONE, REDUCTION_AT, SUM
from partitioner.passes.select.masked_row_ops import ALL_ROWS, MaskedRows, Unselectable

if TYPE_CHECKING:
    from partitioner.passes.select.masked_rows import SelectedRows

aten = torch.ops.aten

_IGNORED = -100


# -- means, variances and deviations -----------------------------------------------------------------------------------
def _compute_full_mean(build: SelectedRows, x: fx.Node, *, dtype: Any = None) -> Any:
    """Append the mean over all elements of the selected rows of ``x`` to the new graph, and return its node. ``x``
    keeps all rows, although the original model selects only those for which the mask ``build.rows[x]`` is true.

    ``build``: the rewriter, which appends operators to the new graph. ``dtype``: the dtype to which ``x`` is cast
    first; ``None`` for none.
    """
    return _append_mean(build, x, None, dtype=dtype)


def _append_mean(build: SelectedRows, x: fx.Node, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Append the mean over ``dims`` (all if empty) of the selected rows of ``x`` to the new graph, and return its node.
    If ``dims`` do not include the dim of rows, return ``None``: the plain operator can be used. ``x`` keeps all rows,
    although the original model selects only those for which the mask ``build.rows[x]`` is true.

    ``build``: the rewriter, which appends operators to the new graph. ``keepdim``: whether the reduced dims stay with
    size 1. ``dtype``: the dtype to which ``x`` is cast first; ``None`` for none.
    """
    over = _find_reduced_dims(build, x, dims)
    if over is None:
        return None
    total = build.insert_call(aten.sum.dim_IntList, build.zero_unselected(x), over, keepdim, dtype=dtype)
    return build.insert_call(aten.div.Tensor, total, _count_selected_elements(build, x, over))


def _find_reduced_dims(build: SelectedRows, x: fx.Node, dims: Any) -> list[int] | None:
    """Return the dims that a reduction of ``x`` over ``dims`` removes, as indices from 0; an empty ``dims`` or ``None``
    means all dims. Return ``None`` if the dim of rows is not among them. ``x`` keeps all rows, although the original
    model selects some of them by a mask.

    ``build``: the rewriter; ``build.rows[x]`` has the mask and the dim of rows.
    """
    rank = x.meta["val"].dim()
    dims = [dims] if isinstance(dims, int) else dims
    over = [d % rank for d in (dims if dims else range(rank))]
    return over if build.find_common_rows(x).dim in over else None


def _count_selected_elements(build: SelectedRows, x: fx.Node, over: list[int]) -> fx.Node:
    """Append a node to the new graph with the number of elements that a reduction of ``x`` over the dims ``over``
    combines in the original model, and return the node. ``x`` keeps all rows, but only the rows that the mask
    ``build.rows[x]`` selects are counted.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    rows, sizes = build.rows[x], x.meta["val"].shape
    others = math.prod(sizes[d] for d in over if d != rows.dim)
    count = build.count_selected(rows.mask)
    return count if others == 1 else build.insert_call(aten.mul.Tensor, count, others)


def _make_deviation_rule(*, root: bool, with_mean: bool) -> Callable[..., Any]:
    """Return a function that rewrites ``var`` or ``std`` over rows that a mask selects, with static shapes: the
    function reads a tensor that keeps all rows, and ignores the rows that the mask does not select.

    ``root``: true for ``std``, false for ``var``. ``with_mean``: whether the operator also returns the mean.
    """

    def rule(
        build: SelectedRows,
        x: fx.Node,
        dims: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Any:
        """Append the variance or standard deviation of ``x`` over ``dims`` (all if ``None``) to the new graph, and
        return its node; if the operator also returns the mean, return (this node, node of the mean). ``x`` keeps all
        rows; only rows that the mask ``build.rows[x]`` selects count. If ``dims`` do not include the dim of rows,
        return ``None``: the plain operator can be used.

        ``build``: the rewriter, which appends operators to the new graph. ``correction``: the divisor is the number of
        elements minus ``correction``. If it is ``None``, 1 is subtracted if ``unbiased`` is true, otherwise 0.
        ``keepdim``: whether the reduced dims stay with size 1.
        """
        if isinstance(dims, bool):  # the overload for all dims: var(x, unbiased)
            dims, unbiased = None, dims
        over = _find_reduced_dims(build, x, dims)
        if over is None:
            return None
        number = _count_selected_elements(build, x, over)
        mean = build.insert_call(
            aten.div.Tensor, build.insert_call(aten.sum.dim_IntList, build.zero_unselected(x), over, True), number
        )
        apart = build.insert_call(aten.sub.Tensor, x, mean)
        build.rows[apart] = build.rows[x]
        apart = build.zero_unselected(apart)
        squares = build.insert_call(
            aten.sum.dim_IntList, build.insert_call(aten.mul.Tensor, apart, apart), over, keepdim
        )
        less = int(unbiased) if correction is None else correction
        freedom = build.insert_call(aten.clamp_min.default, build.insert_call(aten.sub.Tensor, number, less), 0)
        found = build.insert_call(aten.div.Tensor, squares, freedom)
        found = _take_square_root(build, found) if root else found
        if not with_mean:
            return found
        return found, mean if keepdim else build.insert_call(aten.squeeze.dims, mean, over)

    return rule


def _take_square_root(build: SelectedRows, x: fx.Node) -> fx.Node:
    """Append the square root of ``x`` to the new graph and return its node. The gradient at zero is zero, whereas that
    of ``sqrt`` is infinite.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    none = build.insert_call(aten.eq.Scalar, x, 0)
    root = build.insert_call(aten.sqrt.default, build.insert_call(aten.masked_fill.Scalar, x, none, 1))
    return build.insert_call(aten.masked_fill.Scalar, root, none, 0)


# -- reductions in which a neutral number replaces unselected rows -----------------------------------------------------
def _get_lowest_value(value: Tensor) -> float:
    return -math.inf if value.dtype.is_floating_point else int(torch.iinfo(value.dtype).min)


def _get_highest_value(value: Tensor) -> float:
    return math.inf if value.dtype.is_floating_point else int(torch.iinfo(value.dtype).max)


def _make_filled_reduction(
    target: Any, number: Callable[[Tensor], float], dim_at: int | None = None
) -> Callable[..., Any]:
    """Return a function that rewrites the reduction ``target`` over rows that a mask selects, with static shapes. The
    function reads a tensor that keeps all rows, sets the rows that the mask does not select to a number that does not
    change the result, and reduces.

    ``number``: returns that number for a tensor, on whose dtype it depends. ``dim_at``: the position (from 0) of the
    argument with the dims among the operator's arguments; ``None`` if there is none.
    """

    def rule(build: SelectedRows, x: fx.Node, *args: Any, **kwargs: Any) -> Any:
        """Append a reduction of ``x`` to the new graph and return its node. ``x`` keeps all rows; only rows that the
        mask ``build.rows[x]`` selects count. If the dim of rows is not reduced, return ``None``: the plain operator can
        be used. ``build``: the rewriter, which appends operators to the new graph. ``args``, ``kwargs``: the further
        arguments of the reduction."""
        given = (x, *args)
        dims = None if dim_at is None or dim_at >= len(given) else given[dim_at]
        over = _find_reduced_dims(build, x, kwargs.get("dim", dims))
        if over is None:
            return None
        return build.insert_call(target, build.fill_unselected(x, number(x.meta["val"])), *args, **kwargs)

    return rule


def _make_extreme_rule(target: Any, number: Callable[[Tensor], float]) -> Callable[..., Any]:
    """Return a function that rewrites ``target``, which is ``max`` or ``min`` along a dim, over rows that a mask
    selects, with static shapes. The function reads a tensor that keeps all rows, and sets the rows that the mask does
    not select to the lowest or highest number. The index that it returns counts only selected rows.

    ``number``: returns the lowest (for ``max``) or highest (for ``min``) number of a tensor's dtype.
    """

    def rule(build: SelectedRows, x: fx.Node, dim: int, keepdim: bool = False) -> Any:
        """Append the maximum or minimum of ``x`` along ``dim`` to the new graph, and return (node of its value, node of
        its index). ``x`` keeps all rows; only rows that the mask ``build.rows[x]`` selects count. If ``dim`` is not the
        dim of rows, return ``None``: the plain operator can be used. ``build``: the rewriter, which appends operators
        to the new graph. ``keepdim``: whether ``dim`` stays with size 1."""
        if _find_reduced_dims(build, x, dim) is None:
            return None
        made = build.insert_call(target, build.fill_unselected(x, number(x.meta["val"])), dim, keepdim)
        value, place = (build.insert_call(operator.getitem, made, i) for i in range(2))
        return value, _convert_row_indices(build, x, place)

    return rule


def _make_extreme_index_rule(target: Any, number: Callable[[Tensor], float]) -> Callable[..., Any]:
    """Return a function that rewrites ``target``, which is ``argmax`` or ``argmin``, over rows that a mask selects,
    with static shapes. The function reads a tensor that keeps all rows, and sets the rows that the mask does not select
    to the lowest or highest number. The index that it returns counts only selected rows.

    ``number``: returns the lowest (for ``argmax``) or highest (for ``argmin``) number of a tensor's dtype.
    """

    def rule(build: SelectedRows, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> Any:
        """Append the index of the maximum or minimum of ``x`` along ``dim`` to the new graph and return its node. ``x``
        keeps all rows; only rows that the mask ``build.rows[x]`` selects count. If ``dim`` is not the dim of rows,
        return ``None``: the plain operator can be used. ``build``: the rewriter, which appends operators to the new
        graph. ``keepdim``: whether ``dim`` stays with size 1. Raise :class:`Unselectable` for an index into all
        elements of a tensor of several dims."""
        if _find_reduced_dims(build, x, dim) is None:
            return None
        if dim is None and x.meta["val"].dim() != 1:
            raise Unselectable
        return _convert_row_indices(
            build, x, build.insert_call(target, build.fill_unselected(x, number(x.meta["val"])), dim, keepdim)
        )

    return rule


def _convert_row_indices(build: SelectedRows, x: fx.Node, place: fx.Node) -> fx.Node:
    """Append a node to the new graph that converts ``place``, indices of rows of ``x``, to the indices of these rows in
    the original model, and return the node. ``x`` keeps all rows, of which the model has only those that the mask
    ``build.rows[x]`` selects.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    nth = build.insert_call(aten.sub.Tensor, build.number_selected(build.rows[x].mask), 1)
    flat = build.insert_call(aten.reshape.default, place, [place.meta["val"].numel()])
    found = build.insert_call(aten.index_select.default, nth, 0, flat)
    return build.insert_call(aten.reshape.default, found, list(place.meta["val"].shape))


def _make_norm_rule(target: Any, order_at: int, dim_at: int) -> Callable[..., Any]:
    """Return a function that rewrites the norm ``target`` over rows that a mask selects, with static shapes. The
    function reads a tensor that keeps all rows, and sets the rows that the mask does not select to zero. It raises
    :class:`Unselectable` for a norm of negative order.

    ``order_at``, ``dim_at``: the positions (from 0) of the norm's order and of its dims among the operator's arguments.
    """
    zeroed = _make_filled_reduction(target, lambda value: 0, dim_at)

    def rule(build: SelectedRows, x: fx.Node, *args: Any, **kwargs: Any) -> Any:
        """Append a norm of ``x`` to the new graph and return its node. ``x`` keeps all rows; only rows that the mask
        ``build.rows[x]`` selects count. If the dim of rows is not reduced, return ``None``: the plain operator can be
        used. ``build``: the rewriter, which appends operators to the new graph. ``args``, ``kwargs``: the further
        arguments of the norm."""
        order = args[order_at - 1] if len(args) >= order_at else kwargs.get("ord", kwargs.get("p", 2))
        order = 2 if order is None else order
        if _find_reduced_dims(build, x, args[dim_at - 1] if len(args) >= dim_at else kwargs.get("dim")) is None:
            return None
        if not isinstance(order, int | float) or order < 0:
            raise Unselectable
        return zeroed(build, x, *args, **kwargs)

    return rule


def _make_softmax_rule(target: Any) -> Callable[..., Any]:
    """Return a function that rewrites ``target``, softmax or log-softmax, along rows that a mask selects, with static
    shapes. The function reads a tensor that keeps all rows, and gives the rows that the mask does not select a score of
    minus infinity."""

    def rule(build: SelectedRows, x: fx.Node, dim: int, dtype: Any = None) -> Any:
        """Append a softmax or log-softmax of ``x`` along ``dim`` to the new graph and return its node. ``x`` and the
        result keep all rows; in the result, rows that the mask ``build.rows[x]`` does not select are zero. If ``dim``
        is not the dim of rows, return ``None``: the plain operator can be used. ``build``: the rewriter, which appends
        operators to the new graph. ``dtype``: the dtype to which ``x`` is cast first; ``None`` for none."""
        if _find_reduced_dims(build, x, dim) is None:
            return None
        made = build.insert_call(target, build.fill_unselected(x, -math.inf), dim, dtype)
        build.rows[made] = build.rows[x]
        return build.fill_unselected_with(made, 0)

    return rule


def _compute_cumsum(build: SelectedRows, x: fx.Node, dim: int, **kwargs: Any) -> Any:
    """Append the running sum of ``x`` along ``dim`` to the new graph and return its node. ``x`` and the result keep all
    rows; rows that the mask ``build.rows[x]`` does not select count as zero. If ``dim`` is not the dim of rows, return
    ``None``: the plain operator can be used. Raise :class:`Unselectable` if the rows are in another order than in the
    original model.

    ``build``: the rewriter, which appends operators to the new graph. ``kwargs``: further arguments of ``cumsum``.
    """
    if _find_reduced_dims(build, x, dim) is None:
        return None
    if build.rows[x].mask in build.unordered:
        raise Unselectable
    made = build.insert_call(aten.cumsum.default, build.zero_unselected(x), dim, **kwargs)
    build.rows[made] = build.rows[x]
    return made


# -- losses ------------------------------------------------------------------------------------------------------------
def _make_loss_rule(target: Any, position: int) -> Callable[..., Any]:
    """Return a function that rewrites the loss operator ``target`` over rows that a mask selects, with static shapes.
    The function reads tensors that keep all rows, computes the loss of each element, and then reduces the losses of the
    selected rows.

    ``position``: the position (from 0) of the operator's argument ``reduction``.
    """

    def rule(build: SelectedRows, *args: Any, **kwargs: Any) -> Any:
        """Append a loss, as one term for each element, and its reduction to the new graph. Tensors among the arguments
        keep all rows; only rows that their mask in ``build.rows`` selects are reduced. Return the node of the reduced
        loss; if the operator has other results, return a tuple of this node and the other results. If the loss is not
        reduced, return ``None``: the plain operator can be used. ``build``: the rewriter, which appends operators to
        the new graph. ``args``, ``kwargs``: the arguments of the loss."""
        given = list(args)
        reduction = kwargs.pop("reduction", MEAN)
        if len(given) > position:
            reduction, given[position] = given[position], NONE
        else:
            kwargs["reduction"] = NONE
        if reduction == NONE:
            return None
        terms = build.apply_operator(target, *given, **kwargs)
        if isinstance(terms, tuple):  # the loss, and results that its backward needs
            return _apply_reduction(build, terms[0], reduction), *terms[1:]
        return _apply_reduction(build, terms, reduction)

    return rule


def _apply_reduction(build: SelectedRows, terms: fx.Node, reduction: int) -> Any:
    """Append the reduction of the losses ``terms`` to the new graph and return its node. ``terms`` keeps all rows; only
    rows that the mask ``build.rows[terms]`` selects count. ``reduction``: 0 for none (``terms`` is returned), 1 for the
    mean, 2 for the sum. ``build``: the rewriter, which appends operators to the new graph."""
    if reduction == NONE:
        return terms
    return build.apply_operator(aten.sum.default if reduction == SUM else aten.mean.default, terms)


def _make_classification_rule(target: Any) -> Callable[..., Any]:
    """Return a function that rewrites ``target``, a cross entropy or a similar loss, over rows that a mask selects,
    with static shapes. The function reads tensors that keep all rows, and gives the rows that the mask does not select
    the class that the loss ignores."""

    def rule(
        build: SelectedRows,
        x: fx.Node,
        classes: fx.Node,
        weight: Any = None,
        reduction: int = MEAN,
        ignored: int = _IGNORED,
        *more: Any,
    ) -> Any:
        """Append a classification loss of the scores ``x`` and the targets ``classes`` (class numbers or probabilities)
        to the new graph, and return its node. Scores and targets keep all rows; only rows that their mask in
        ``build.rows`` selects count. For probabilities without a reduction, return ``None``: the plain operator can be
        used.

        ``build``: the rewriter, which appends operators to the new graph. ``weight``: the weight of each class, or
        ``None``. ``reduction``: 0 none, 1 mean, 2 sum. ``ignored``: the class number that the loss ignores. ``more``:
        further arguments of the loss. Raise :class:`Unselectable` if different masks select the rows of scores and of
        targets.
        """
        value: Tensor = classes.meta["val"]
        if value.is_floating_point():
            if reduction == NONE:
                return None
            terms = build.apply_operator(target, x, classes, weight, NONE, ignored, *more)
            return _apply_reduction(build, terms, reduction)
        rows = build.find_common_rows(classes)
        between = x.meta["val"].dim() > 1 and rows.dim >= 1  # scores have a dim of classes before the dim of rows
        if build.rows.get(x) != MaskedRows(rows.mask, rows.dim + between):
            raise Unselectable("" if x in build.rows else ALL_ROWS)
        kept = build.insert_call(aten.masked_fill.Scalar, classes, build.mask_unselected(classes), ignored)
        made = build.insert_call(target, x, kept, weight, reduction, ignored, *more)
        if reduction == NONE:
            build.rows[made] = rows
        return made

    return rule


def _broadcast_operands(build: SelectedRows, operands: Any) -> Any:
    """Rewrite ``broadcast_tensors`` of ``operands`` with static shapes. Some of the operands keep all rows, although
    the original model selects some rows by one mask. Return a tuple of the broadcast nodes, for all of which this mask
    is recorded in ``build.rows``.

    ``build``: the rewriter, which appends operators to the new graph. Raise :class:`Unselectable` if the operands have
    different masks, or if an operand without a mask has a dim of rows, too.
    """
    shape = torch.broadcast_shapes(*(o.meta["val"].shape for o in operands))
    wide = []
    for operand in operands:
        value = operand.meta["val"]
        made = operand if value.shape == shape else build.insert_call(aten.expand.default, operand, list(shape))
        if operand in build.rows and made is not operand:
            rows = build.rows[operand]
            build.rows[made] = MaskedRows(rows.mask, rows.dim + len(shape) - value.dim())
        wide.append(made)
    found = {build.rows[w] for w in wide if w in build.rows}
    if len(found) != 1:
        raise Unselectable
    (rows,) = found
    if any(w not in build.rows and w is o for w, o in zip(wide, operands, strict=True)):
        raise Unselectable(ALL_ROWS)
    for made, operand in zip(wide, operands, strict=True):
        if operand not in build.rows:
            build.rows[made] = rows  # the operand had no dim of rows; its broadcast form has one
    return tuple(wide)


STATISTICS: dict[Any, Callable[..., Any]] = {
    aten.mean.default: _compute_full_mean,
    aten.mean.dim: _append_mean,
    **{
        getattr(getattr(aten, name), form): _make_deviation_rule(
            root=name.startswith("std"), with_mean=name.endswith("mean")
        )
        for name in ("var", "std", "var_mean", "std_mean")
        for form in ("default", "dim", "correction")
    },
    aten.prod.default: _make_filled_reduction(aten.prod.default, lambda value: 1),
    aten.prod.dim_int: _make_filled_reduction(aten.prod.dim_int, lambda value: 1, 1),
    aten.any.default: _make_filled_reduction(aten.any.default, lambda value: 0),
    aten.any.dim: _make_filled_reduction(aten.any.dim, lambda value: 0, 1),
    aten.all.default: _make_filled_reduction(aten.all.default, lambda value: 1),
    aten.all.dim: _make_filled_reduction(aten.all.dim, lambda value: 1, 1),
    aten.max.default: _make_filled_reduction(aten.max.default, _get_lowest_value),
    aten.min.default: _make_filled_reduction(aten.min.default, _get_highest_value),
    aten.amax.default: _make_filled_reduction(aten.amax.default, _get_lowest_value, 1),
    aten.amin.default: _make_filled_reduction(aten.amin.default, _get_highest_value, 1),
    aten.max.dim: _make_extreme_rule(aten.max.dim, _get_lowest_value),
    aten.min.dim: _make_extreme_rule(aten.min.dim, _get_highest_value),
    aten.argmax.default: _make_extreme_index_rule(aten.argmax.default, _get_lowest_value),
    aten.argmin.default: _make_extreme_index_rule(aten.argmin.default, _get_highest_value),
    aten.logsumexp.default: _make_filled_reduction(aten.logsumexp.default, lambda value: -math.inf, 1),
    aten.norm.Scalar: _make_norm_rule(aten.norm.Scalar, 1, 2),
    aten.norm.ScalarOpt_dim: _make_norm_rule(aten.norm.ScalarOpt_dim, 1, 2),
    aten.linalg_vector_norm.default: _make_norm_rule(aten.linalg_vector_norm.default, 1, 2),
    aten.softmax.int: _make_softmax_rule(aten.softmax.int),
    aten.log_softmax.int: _make_softmax_rule(aten.log_softmax.int),
    aten.cumsum.default: _compute_cumsum,
    aten.broadcast_tensors.default: _broadcast_operands,
    **{
        target: _make_classification_rule(target)
        for target in (aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default,
                       aten.nll_loss2d.default)
    },
    **{target: _make_loss_rule(target, at) for target, at in REDUCTION_AT.items()},
}  # fmt: skip
