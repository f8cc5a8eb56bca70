"""Fake quantisation, for quantisation-aware training, written in elementary operators.

``y = (clamp(round(x / scale) + zero_point) - zero_point) * scale``. The gradient of ``x`` passes unchanged where
nothing is clamped and is zero elsewhere. Learned scales and zero points have the gradients of "Learned step size
quantization" (Esser et al., 2020), as torch's operators define them. Plans use these formulas, and so does the
reference (the unmodified model on one process), because torch's kernels compute in float32 even on float64.

In each formula, ``run(operator, *arguments)`` executes an operator on tensors or appends it to a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.rewrite import Builder, Rule
from partitioner.passes.ops.random import parse_sizes

aten = torch.ops.aten

Run = Callable[..., Any]  # (operator, *its arguments) -> its result


def quantize_per_tensor(run: Run, x: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    """Return ``x`` fake-quantised with one ``scale`` and one ``zero_point`` for all elements; each of the two is a
    number or a tensor. ``run(operator, *arguments)``: executes an operator on tensors or appends it to a graph, and
    returns its result or node. ``quant_min``, ``quant_max``: the smallest and largest quantised level."""
    return _build_fake_quantize(run, x, scale, zero_point, quant_min, quant_max)


def quantize_per_channel(
    run: Run, x: Any, scale: Any, zero_point: Any, axis: int, quant_min: int, quant_max: int
) -> Any:
    """Return ``x`` fake-quantised with one scale and one zero point for each index of its dim ``axis``.

    ``scale``, ``zero_point``: vectors. ``run(operator, *arguments)``: executes an operator on tensors or appends it to
    a graph, and returns its result or node. ``quant_min``, ``quant_max``: the smallest and largest quantised level.
    """
    scale, zero_point = (_broadcast_along_axis(run, p, x, axis) for p in (scale, zero_point))
    return _build_fake_quantize(run, x, scale, zero_point, quant_min, quant_max)


def quantize_learnable_per_tensor(
    run: Run, x: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Any:
    """Return ``x`` fake-quantised with one ``scale`` and one ``zero_point`` that are trained. ``run(operator,
    *arguments)``: executes an operator on tensors or appends it to a graph, and returns its result or node.
    ``quant_min``, ``quant_max``: the smallest and largest quantised level. ``grad_factor``: multiplies the gradients of
    ``scale`` and ``zero_point``."""
    return _build_learnable_quantize(run, x, scale, zero_point, quant_min, quant_max, grad_factor)


def quantize_learnable_per_channel(
    run: Run, x: Any, scale: Any, zero_point: Any, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Any:
    """Return ``x`` fake-quantised with trained vectors ``scale`` and ``zero_point``, which have one entry for each
    index of the dim ``axis`` of ``x``. ``run(operator, *arguments)``: executes an operator on tensors or appends it to
    a graph, and returns its result or node. ``quant_min``, ``quant_max``: the smallest and largest quantised level.
    ``grad_factor``: multiplies the gradients of ``scale`` and ``zero_point``."""
    scale, zero_point = (_broadcast_along_axis(run, p, x, axis) for p in (scale, zero_point))
    return _build_learnable_quantize(run, x, scale, zero_point, quant_min, quant_max, grad_factor)


def _broadcast_along_axis(run: Run, parameter: Any, x: Any, axis: int) -> Any:
    """Return the vector ``parameter`` reshaped to broadcast with ``x`` along the dim ``axis``. It has one entry for
    each index of this dim. ``run(operator, *arguments)``: executes an operator on tensors or appends it to a graph, and
    returns its result or node."""
    dims = [1] * len(parse_sizes(x))
    dims[axis] = parse_sizes(parameter)[0]
    return run(aten.reshape.default, parameter, dims)


def _build_fake_quantize(run: Run, x: Any, scale: Any, zero_point: Any, low: int, high: int) -> Any:
    """Return ``x`` rounded to quantised levels and scaled back. Its gradient is 1 where nothing is clamped and 0
    elsewhere.

    ``run(operator, *arguments)``: executes an operator on tensors or appends it to a graph, and returns its result or
    node. ``low``, ``high``: the smallest and largest level. ``scale``, ``zero_point``: numbers or tensors that
    broadcast to ``x``; they get no gradient.
    """
    fixed = run(aten.detach.default, x)
    if isinstance(scale, Tensor | fx.Node):
        scale = run(aten.detach.default, scale)
        inverse = run(aten.reciprocal.default, scale)
    else:  # torch's kernels round a number to float32
        rounded = torch.tensor(scale, dtype=torch.float32)
        scale, inverse = rounded.item(), rounded.reciprocal().item()
    scaled = run(aten.mul.Tensor, fixed, inverse)
    if isinstance(zero_point, Tensor | fx.Node):
        zero_point = run(aten.detach.default, zero_point)
        if _get_dtype(zero_point).is_floating_point:  # such a zero point is not rounded by itself
            places = run(aten.round.default, run(aten.add.Tensor, scaled, zero_point))
            return _apply_straight_through(run, x, fixed, places, scale, zero_point, low, high)
    places = run(aten.add.Tensor, run(aten.round.default, scaled), zero_point)
    return _apply_straight_through(run, x, fixed, places, scale, zero_point, low, high)


def _apply_straight_through(
    run: Run, x: Any, fixed: Any, places: Any, scale: Any, zero_point: Any, low: int, high: int
) -> Any:
    """Clamp the quantised levels ``places`` to the allowed range and return ``(level - zero_point) * scale``, with a
    straight-through gradient: the gradient of ``x`` passes unchanged where nothing was clamped and is zero elsewhere.

    ``places``: the level of each element of ``x``, rounded but not yet clamped. ``low``, ``high``: the smallest and
    largest allowed level. ``fixed``: ``x`` detached from autograd. ``run(operator, *arguments)``: executes an operator
    on tensors or appends it to a graph, and returns its result or node.
    """
    clamped = run(aten.clamp.default, places, low, high)
    value = run(aten.mul.Tensor, run(aten.sub.Tensor, clamped, zero_point), scale)
    change = run(aten.mul.Tensor, run(aten.sub.Tensor, x, fixed), run(aten.eq.Tensor, clamped, places))
    return run(aten.add.Tensor, value, change)


def _build_learnable_quantize(run: Run, x: Any, scale: Any, zero_point: Any, low: int, high: int, factor: float) -> Any:
    """Return ``x`` rounded to quantised levels and scaled back, with gradients for ``x``, ``scale`` and ``zero_point``.

    ``run(operator, *arguments)``: executes an operator on tensors or appends it to a graph, and returns its result or
    node. ``low``, ``high``: the smallest and largest level. ``factor``: multiplies the gradients of scale and zero
    point.
    """
    fixed, scale_now, zero_now = (run(aten.detach.default, v) for v in (x, scale, zero_point))
    zero = run(aten.clamp.default, run(aten.round.default, zero_now), low, high)
    scaled = run(aten.mul.Tensor, fixed, run(aten.reciprocal.default, scale_now))
    places = run(aten.clamp.default, run(aten.add.Tensor, run(aten.round.default, scaled), zero), low, high)
    value = run(aten.mul.Tensor, run(aten.sub.Tensor, places, zero), scale_now)
    # Forward rounds, then adds the zero point; backward adds first. They differ halfway between two levels.
    places = run(aten.round.default, run(aten.add.Tensor, scaled, zero))
    clamped = run(aten.clamp.default, places, low, high)
    inside = run(aten.eq.Tensor, clamped, places)
    level = run(aten.sub.Tensor, clamped, zero)
    error = run(aten.sub.Tensor, level, run(aten.div.Tensor, fixed, scale_now))
    of_scale = run(aten.mul.Tensor, run(aten.where.self, inside, error, level), factor)
    of_zero = run(aten.where.ScalarSelf, inside, 0.0, run(aten.neg.default, run(aten.mul.Tensor, scale_now, factor)))
    for parameter, now, slope in ((x, fixed, inside), (scale, scale_now, of_scale), (zero_point, zero_now, of_zero)):
        change = run(aten.sub.Tensor, parameter, now)
        value = run(aten.add.Tensor, value, run(aten.mul.Tensor, change, slope))
    return value


def _get_dtype(value: Tensor | fx.Node) -> torch.dtype:
    tensor: Tensor = value.meta["val"] if isinstance(value, fx.Node) else value
    return tensor.dtype


# Formulas by the names of torch's functions.
FORMULAS: dict[str, Callable[..., Any]] = {
    "fake_quantize_per_tensor_affine": quantize_per_tensor,
    "fake_quantize_per_channel_affine": quantize_per_channel,
    "_fake_quantize_learnable_per_tensor_affine": quantize_learnable_per_tensor,
    "_fake_quantize_learnable_per_channel_affine": quantize_learnable_per_channel,
}


def _make_rewrite_rule(formula: Callable[..., Any]) -> Rule:
    """Return a rewrite rule: a function that replaces an operator of a graph by the operators of ``formula``. The rule
    calls ``formula(build, *args, **kwargs)`` with the operator's arguments; ``build(operator, *arguments)`` appends an
    operator to the graph and returns its node."""

    def rule(build: Builder, *args: Any, **kwargs: Any) -> Any:
        return formula(build, *args, **kwargs)

    return rule


QUANTIZED: dict[Any, Rule] = {
    aten.fake_quantize_per_tensor_affine.default: _make_rewrite_rule(quantize_per_tensor),
    aten.fake_quantize_per_tensor_affine.tensor_qparams: _make_rewrite_rule(quantize_per_tensor),
    aten.fake_quantize_per_channel_affine.default: _make_rewrite_rule(quantize_per_channel),
    aten._fake_quantize_learnable_per_tensor_affine.default: _make_rewrite_rule(quantize_learnable_per_tensor),
    aten._fake_quantize_learnable_per_channel_affine.default: _make_rewrite_rule(quantize_learnable_per_channel),
}


class FusedQuantizer(NamedTuple):
    """The arguments of ``torch.fused_moving_avg_obs_fake_quant`` after the tensor, with torch's names and order.

    ``observer_on``: 1 if the observer is on. ``fake_quant_on``: 1 if the quantisation is on. ``running_min``,
    ``running_max``: the observed range. ``quant_min``, ``quant_max``: the smallest and largest quantised level.
    ``per_row_fake_quant``: whether each index of the dim ``ch_axis`` has its own scale. ``scale``, ``zero_point``: the
    level of ``x`` is ``round(x / scale) + zero_point``. ``averaging_const``: the weight of new data in the observed
    range. ``symmetric_quant``: whether the range is symmetric.
    """

    observer_on: Tensor
    fake_quant_on: Tensor
    running_min: Tensor
    running_max: Tensor
    scale: Tensor
    zero_point: Tensor
    averaging_const: float
    quant_min: int
    quant_max: int
    ch_axis: int
    per_row_fake_quant: bool = False
    symmetric_quant: bool = False

    def quantize(self, x: Tensor, where: str) -> Tensor:
        """Return ``x`` fake-quantised, or unchanged if quantisation is off.

        ``where``: the model's source line, for the error message. Raise :class:`UnsupportedError` if the observer,
        which updates the scale from data, is on.
        """
        if bool(self.observer_on[0] == 1):
            raise UnsupportedError(f"forward observes what it quantises{where}, which {OBSERVERS_OFF}")
        if not bool(self.fake_quant_on[0] == 1):
            return x
        scale, zero_point, ends = self.scale, self.zero_point, (self.quant_min, self.quant_max)
        if self.per_row_fake_quant:
            return torch.fake_quantize_per_channel_affine(x, scale, zero_point, self.ch_axis, *ends)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, *ends)


@contextlib.contextmanager
def trace_fused_quantizers(line_now: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Return a context in which ``torch.fused_moving_avg_obs_fake_quant`` is replaced by fake quantisation without an
    observer.

    ``line_now`` returns the current source line of the model, for error messages. The replacement raises
    :class:`UnsupportedError` if an observer is on.
    """

    def quantize(x: Tensor, *quantizer: Any, **named: Any) -> Tensor:
        return FusedQuantizer(*quantizer, **named).quantize(x, line_now())

    with mock.patch.object(torch, "fused_moving_avg_obs_fake_quant", quantize):
        yield


OBSERVERS_OFF = (
    "makes scales of numbers that it has seen; expected observers that are off: let them see data in one process, then "
    "call model.apply(torch.ao.quantization.disable_observer)"
)
