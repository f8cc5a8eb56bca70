"""Rewrite rules for products with an addend, means, variances and batch norms.

A product with a bias becomes a product and an addition. A mean becomes a sum times a constant, so that the mean of a
sharded tensor is a partial sum. Variances and batch norms become elementary operators on these means. ``ALGEBRA`` maps
each operator to its rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.rewrite import KEEP, Builder, Rule, aten, get_node_tensor, list_node_sizes
from partitioner.passes.normalize.shapes import add_nothing, to_dtype


def rewrite_linear(build: Builder, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> Any:
    product = build(aten.linear.default, x, weight)
    return product if bias is None else build(aten.add.Tensor, product, bias)


def _scale_by_factor(build: Builder, x: fx.Node, factor: Any) -> fx.Node:
    return x if factor == 1 else build(aten.mul.Tensor, x, factor)


def make_product_sum_rule(product: Any) -> Rule:
    """Return the function that rewrites an operator ``beta * c + alpha * product(a, b)``, such as ``addmm``, as a
    product and a separate sum. If ``c`` is an integer tensor and ``alpha`` or ``beta`` is not an integer, the function
    returns ``KEEP`` (the operator stays), because torch rounds ``alpha`` and ``beta`` in this case and separate
    operators would not.

    ``product``: the operator that multiplies, such as ``aten.mm.default`` for ``addmm``.
    """

    def rule(build: Builder, c: fx.Node, a: fx.Node, b: fx.Node, *, beta: Any = 1, alpha: Any = 1) -> Any:
        """Append ``beta * c + alpha * product(a, b)`` to the graph as separate operators and return the node of the
        result. ``product`` is a matrix product, ``beta`` and ``alpha`` are numbers. If ``c`` is an integer tensor and
        ``alpha`` or ``beta`` is not an integer, return ``KEEP`` (the operator stays), because torch rounds ``alpha``
        and ``beta`` in this case and separate operators would not. ``build``: appends operators to the graph."""
        whole_numbers = not get_node_tensor(c).dtype.is_floating_point and not get_node_tensor(c).dtype.is_complex
        if whole_numbers and not (isinstance(beta, int) and isinstance(alpha, int)):
            return KEEP  # torch rounds the factors to integers
        result = _scale_by_factor(build, build(product, a, b), alpha)
        # beta = 0 ignores c, even if it has NaN or infinity
        return result if beta == 0 else build(aten.add.Tensor, result, _scale_by_factor(build, c, beta))

    return rule


def rewrite_bitwise_and(build: Builder, a: Any, b: Any) -> fx.Node:
    return build(aten.bitwise_and.Tensor, a, b)


def rewrite_bitwise_or(build: Builder, a: Any, b: Any) -> fx.Node:
    return build(aten.bitwise_or.Tensor, a, b)


# --- numbers beside tensors of no dims: tensors themselves, so that a partial sum gets them once ----------------------
def make_number_sum_rule(sign: int) -> Rule:
    """Return the function that rewrites the addition (``sign`` 1) or subtraction (-1) of a number: ``x + sign * alpha *
    number``.

    If ``x`` is a 0-dimensional floating-point tensor, such as a loss, the function turns the number into a
    0-dimensional tensor. Reason: ``x`` may become a partial sum over ranks. A number would then be added once on every
    rank, whereas a tensor can be a partial sum, too. For any other ``x``, the function only removes the addition of an
    integer zero to an integer tensor.
    """

    def rule(build: Builder, x: Any, other: Any, alpha: Any = 1) -> Any:
        if not _is_sum_and_number(x, other):
            return add_nothing(build, x, other) if sign > 0 else KEEP
        return build(aten.add.Tensor, x, _create_scalar(build, x, sign * alpha * other))

    return rule


def number_minus(build: Builder, x: fx.Node, other: Any, alpha: Any = 1) -> Any:
    """Rewrite ``other - alpha * x``, with two numbers ``other`` and ``alpha``, as the sum of ``-alpha * x`` and a
    0-dimensional tensor that contains ``other``. Reason: ``x`` may become a partial sum over ranks. A number would then
    be added once on every rank, whereas a tensor can be a partial sum, too.

    Return the node of the result. If ``x`` is not a 0-dimensional floating-point tensor, such as a loss, return
    ``KEEP`` (the operator stays). ``build``: appends operators to the graph.
    """
    if not _is_sum_and_number(x, other):
        return KEEP
    return build(aten.add.Tensor, _scale_by_factor(build, x, -alpha), _create_scalar(build, x, other))


def _is_sum_and_number(x: Any, other: Any) -> bool:
    plain = isinstance(x, fx.Node) and isinstance(other, int | float)
    return plain and not list_node_sizes(x) and get_node_tensor(x).dtype.is_floating_point


def _create_scalar(build: Builder, like: fx.Node, value: float) -> fx.Node:
    return build(aten.full.default, [], value, dtype=get_node_tensor(like).dtype, device=META)


def drop_error_check(build: Builder, *_: Any, **__: Any) -> None:
    """Remove an operator that only checks whether a matrix factorisation succeeded, such as ``_linalg_check_errors``.
    Nothing is appended to the graph, and ``None`` is returned in place of the operator's result. No argument is used.

    Eager torch raises an error if the factorisation failed. The rewritten model continues with the factorisation's
    result instead.
    """


# --- means and variances ----------------------------------------------------------------------------------------------
def sum_over_dims(build: Builder, x: fx.Node, dims: Sequence[int] | None, keepdim: bool) -> fx.Node:
    if not dims and not keepdim:
        return build(aten.sum.default, x)
    return build(aten.sum.dim_IntList, x, list(dims or range(len(list_node_sizes(x)))), keepdim)


def count_reduced_elements(x: fx.Node, dims: Sequence[int] | None) -> int:
    """Return how many elements of ``x`` a reduction over ``dims`` combines into one; ``None`` or an empty sequence
    means all dims.
    """
    sizes = list_node_sizes(x)
    return math.prod(sizes[d] for d in dims) if dims and sizes else math.prod(sizes)


def rewrite_mean(
    build: Builder, x: fx.Node, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Rewrite a mean of ``x`` over ``dims`` as a sum times a constant, and return the node of the result; return
    ``KEEP`` (the operator stays) if ``x`` has no elements.

    ``build``: appends operators to the graph. ``dims``: indices of dims; ``None`` means all. ``keepdim``: whether the
    reduced dims stay with size 1. ``dtype``: the dtype to which ``x`` is cast first; ``None`` for none.
    """
    x = to_dtype(build, x, dtype)
    size = count_reduced_elements(x, dims)
    return build(aten.mul.Tensor, sum_over_dims(build, x, dims, keepdim), 1 / size) if size else KEEP


def _compute_moments(
    build: Builder, x: fx.Node, dims: Any, correction: float, keepdim: bool
) -> tuple[fx.Node, fx.Node]:
    """Append operators to the graph that compute the variance and the mean of ``x`` over ``dims``, and return the node
    of the variance and the node of the mean.

    ``build``: appends operators to the graph. ``dims``: indices of dims; ``None`` means all. ``correction``: the
    divisor of the variance is the number of elements minus ``correction``. ``keepdim``: whether the reduced dims stay
    with size 1.
    """
    centre = rewrite_mean(build, x, dims or list(range(len(list_node_sizes(x)))), True)
    distance = build(aten.sub.Tensor, x, centre)
    square = build(aten.mul.Tensor, distance, distance)
    variance = build(
        aten.mul.Tensor, sum_over_dims(build, square, dims, keepdim), 1 / (count_reduced_elements(x, dims) - correction)
    )
    kept = list_node_sizes(variance)
    return variance, centre if list_node_sizes(centre) == kept else build(aten.reshape.default, centre, kept)


def rewrite_variance(build: Builder, x: fx.Node, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
    moments = _append_variance_and_mean(build, x, dims, *args, **kwargs)
    return KEEP if moments is None else moments[0]


def rewrite_var_mean(build: Builder, x: fx.Node, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
    moments = _append_variance_and_mean(build, x, dims, *args, **kwargs)
    return KEEP if moments is None else moments


def rewrite_standard_deviation(build: Builder, x: fx.Node, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
    variance = rewrite_variance(build, x, dims, *args, **kwargs)
    return KEEP if variance is KEEP else build(aten.sqrt.default, variance)


def _append_variance_and_mean(
    build: Builder,
    x: fx.Node,
    dims: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[fx.Node, fx.Node] | None:
    """Append operators to the graph that compute the variance and the mean of ``x`` over ``dims``, and return the node
    of the variance and the node of the mean. If ``x`` is complex or the divisor of the variance would not be positive,
    return ``None``.

    ``build``: appends operators to the graph. ``dims``: indices of dims; ``None`` means all. If ``dims`` is a boolean,
    it is used as ``unbiased``, and all dims are reduced. ``correction``: the divisor of the variance is the number of
    elements minus ``correction``. If ``correction`` is ``None``, 1 is subtracted if ``unbiased`` is true, otherwise 0.
    ``keepdim``: whether the reduced dims stay with size 1.
    """
    if isinstance(dims, bool):  # var(x, unbiased)
        dims, unbiased = None, dims
    divisor = (1.0 if unbiased else 0.0) if correction is None else float(correction)
    if get_node_tensor(x).dtype.is_complex or count_reduced_elements(x, dims) <= divisor:
        return None
    return _compute_moments(build, x, dims, divisor, keepdim)


# --- norms ------------------------------------------------------------------------------------------------------------
class BatchNorm(NamedTuple):
    """The arguments of torch's batch-norm operators after the input, in the order of ``aten.batch_norm``.

    ``weight``, ``bias``: nodes of the factor and the addend of each channel, ``[channels]``, or ``None``.
    ``running_mean``, ``running_var``: nodes of the running statistics, ``[channels]``, or ``None``. ``training``:
    whether the input is normalised by the statistics of the batch. ``momentum``: the weight of the batch in the new
    running statistics. ``eps``: the number that is added to the variance.
    """

    weight: fx.Node | None
    bias: fx.Node | None
    running_mean: fx.Node | None
    running_var: fx.Node | None
    training: bool
    momentum: float
    eps: float


def rewrite_batch_norm_inference(build: Builder, x: fx.Node, *arguments: Any) -> Any:
    """Rewrite ``aten.batch_norm`` of ``x`` as elementary operators, and return the node of the normalised tensor.

    ``x`` is normalised by the statistics of the batch in training or if there are no running statistics, otherwise by
    the running statistics. ``build``: appends operators to the graph. ``arguments``: the arguments of the operator
    after ``x``; extra ones are ignored. If ``x`` has fewer than two dims, return ``KEEP`` (the operator stays).
    """
    return _rewrite_batch_norm(build, x, BatchNorm(*arguments[: len(BatchNorm._fields)]))


def _rewrite_batch_norm(build: Builder, x: fx.Node, norm: BatchNorm) -> Any:
    """Append the elementary operators of a batch norm of ``x`` to the graph, and return the node of the normalised
    tensor.

    ``build``: appends operators to the graph. ``norm``: the arguments of the batch norm after ``x``. If ``x`` has fewer
    than two dims, return ``KEEP`` (the operator stays).
    """
    if len(list_node_sizes(x)) < 2:  # a tensor without channels
        return KEEP
    if norm.training or norm.running_mean is None or norm.running_var is None:
        return _normalize_channels(build, x, norm, *_compute_moments(build, x, _list_statistics_dims(x), 0.0, True))
    variance, centre = (_broadcast_channels(build, running, x) for running in (norm.running_var, norm.running_mean))
    return _normalize_channels(build, x, norm, variance, centre)


def _list_statistics_dims(x: fx.Node) -> list[int]:
    """Return the indices of all dims of ``x`` except the channel dim 1: the dims over which the statistics of a channel
    are computed.
    """
    return [0, *range(2, len(list_node_sizes(x)))]


def _broadcast_channels(build: Builder, node: fx.Node, x: fx.Node) -> fx.Node:
    return build(aten.reshape.default, node, [1, list_node_sizes(x)[1]] + [1] * (len(list_node_sizes(x)) - 2))


def _normalize_channels(build: Builder, x: fx.Node, norm: BatchNorm, variance: fx.Node, centre: fx.Node) -> fx.Node:
    """Append the normalisation of ``x`` by channel (dim 1) to the graph: ``(x - centre) / sqrt(variance + eps)``, times
    the weight and plus the bias of ``norm``, the arguments of a batch norm. Return the node of the result. ``build``:
    appends operators to the graph. ``variance``, ``centre``: nodes of the variance and the mean of each channel, with
    as many dims as ``x`` and size 1 in all but the channel dim."""
    scale = build(aten.rsqrt.default, build(aten.add.Tensor, variance, norm.eps))
    result = build(aten.mul.Tensor, build(aten.sub.Tensor, x, centre), scale)
    if norm.weight is not None:
        result = build(aten.mul.Tensor, result, _broadcast_channels(build, norm.weight, x))
    return result if norm.bias is None else build(aten.add.Tensor, result, _broadcast_channels(build, norm.bias, x))


def rewrite_training_batch_norm(build: Builder, x: fx.Node, *arguments: Any) -> Any:
    """Rewrite a batch norm of ``x`` with running statistics, which torch updates, as elementary operators. Return a
    tuple of five: the node of the normalised tensor, two ``None`` for saved statistics that nothing reads, and the
    nodes of the new running mean and running variance.

    In training, the new running mean is ``(1 - momentum) * old + momentum * batch mean``; the new running variance is
    computed in the same way from the batch's unbiased variance. Outside of training, both are the old ones. ``build``:
    appends operators to the graph. ``arguments``: the operator's arguments after ``x``.
    """
    norm = BatchNorm(*arguments)
    running_mean, running_var, momentum = norm.running_mean, norm.running_var, norm.momentum
    assert running_mean is not None
    assert running_var is not None
    if not norm.training:
        return _rewrite_batch_norm(build, x, norm), None, None, running_mean, running_var
    size = count_reduced_elements(x, _list_statistics_dims(x))
    variance, centre = _compute_moments(build, x, _list_statistics_dims(x), 0.0, True)
    result = _normalize_channels(build, x, norm, variance, centre)

    def moved(running: fx.Node, seen: fx.Node, part: float) -> fx.Node:
        seen = build(aten.reshape.default, build(aten.detach.default, seen), list_node_sizes(running))
        seen = build(aten.mul.Tensor, to_dtype(build, seen, get_node_tensor(running).dtype), part)
        return build(aten.add.Tensor, build(aten.mul.Tensor, running, 1.0 - momentum), seen)

    unbiased = momentum * size / (size - 1) if size > 1 else math.nan  # with one value, torch divides by zero
    return result, None, None, moved(running_mean, centre, momentum), moved(running_var, variance, unbiased)


def rewrite_functional_batch_norm(
    build: Builder,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node,
    running_var: fx.Node,
    momentum: float,
    eps: float,
) -> Any:
    """Rewrite a batch norm outside of training as elementary operators: it normalises ``x`` by the running statistics
    ``running_mean`` and ``running_var``. Return the node of the normalised tensor and two ``None`` for the results that
    nothing reads. ``build``: appends operators to the graph. ``weight``, ``bias``: factor and addend of each channel,
    or ``None``. ``momentum`` is not used. ``eps``: the number that is added to the variance."""
    norm = BatchNorm(weight, bias, running_mean, running_var, False, momentum, eps)
    return _rewrite_batch_norm(build, x, norm), None, None


def rewrite_stateless_batch_norm(
    build: Builder,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Rewrite a batch norm without running statistics as elementary operators: it normalises ``x`` by the mean and
    variance of the batch. Return the node of the normalised tensor and two ``None`` for the results that nothing reads.
    ``build``: appends operators to the graph. ``weight``, ``bias``: factor and addend of each channel, or ``None``.
    ``training`` and ``momentum`` are not used. ``eps``: the number that is added to the variance."""
    norm = BatchNorm(weight, bias, None, None, True, momentum, eps)
    return _rewrite_batch_norm(build, x, norm), None, None


ALGEBRA: dict[Any, Rule] = {
    aten.linear.default: rewrite_linear,
    aten.addmm.default: make_product_sum_rule(aten.mm.default),
    aten.baddbmm.default: make_product_sum_rule(aten.bmm.default),
    aten.addmv.default: make_product_sum_rule(aten.mv.default),
    aten._linalg_check_errors.default: drop_error_check,
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), make_number_sum_rule(1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), make_number_sum_rule(-1)),
    aten.rsub.Scalar: number_minus,
    aten.__and__.Tensor: rewrite_bitwise_and,
    aten.__or__.Tensor: rewrite_bitwise_or,
    aten.mean.default: rewrite_mean,
    aten.mean.dim: rewrite_mean,
    aten.var.default: rewrite_variance,
    aten.var.dim: rewrite_variance,
    aten.var.correction: rewrite_variance,
    aten.std.default: rewrite_standard_deviation,
    aten.std.dim: rewrite_standard_deviation,
    aten.std.correction: rewrite_standard_deviation,
    aten.var_mean.default: rewrite_var_mean,
    aten.var_mean.dim: rewrite_var_mean,
    aten.var_mean.correction: rewrite_var_mean,
    aten.batch_norm.default: rewrite_batch_norm_inference,
    aten._native_batch_norm_legit_functional.default: rewrite_training_batch_norm,
    aten._native_batch_norm_legit_no_training.default: rewrite_functional_batch_norm,
    aten._native_batch_norm_legit.no_stats: rewrite_stateless_batch_norm,
}
