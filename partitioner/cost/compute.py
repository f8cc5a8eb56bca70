"""Seconds of kernels on a device.

``t = t0 launches + flops / (e peak) + bytes / (e_m bandwidth)``: additive rather than a maximum, as measured operators
are (see the sources in ``topology/data/devices.yaml``); ``e`` depends on the smallest of M, N and K.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from partitioner.cost.operators import Kernel
from partitioner.topology.parts import DeviceType


def kernel_time(kernel: Kernel, device: DeviceType) -> float:
    """Seconds of one kernel with all of its launches."""
    rate = memory_rate(kernel.kind, device, kernel.num_bytes / max(1, kernel.launches))
    seconds = kernel.launches * device.launch + kernel.num_bytes / rate
    if kernel.flops:
        seconds += kernel.flops / product_rate(kernel, device)
    return seconds


def kernels_time(kernels: Iterable[Kernel], device: DeviceType) -> float:
    return sum(kernel_time(kernel, device) for kernel in kernels)


# The kind that stands in for one that a device does not list, before ``default``.
_ALIKE = {"optimizer": "pointwise", "special": "pointwise", "softmax": "reduction"}


def memory_rate(kind: str, device: DeviceType, num_bytes: float | None = None) -> float:
    """Bytes/s that kernels of ``kind`` that move ``num_bytes`` reach; ``None``: those of the best size."""
    table = device.memory_efficiency
    efficiency = table.get(kind, table.get(_ALIKE.get(kind, "default"), table.get("default", 1.0)))
    return device.memory_bandwidth * min(efficiency, _largest_factor(num_bytes, device))


def _largest_factor(num_bytes: float | None, device: DeviceType) -> float:
    curve = device.memory_sizes
    if not curve:
        return math.inf
    if num_bytes is None:
        return max(factor for _, factor in curve)
    return curve[0][1] if num_bytes <= curve[0][0] else interpolated(num_bytes, curve)


def interpolated(x: float, curve: Sequence[tuple[float, float]]) -> float:
    """Between two points of ``curve`` along the logarithm; above the last as there. ``x`` is not below the first."""
    place = bisect_right(curve, (x, math.inf))
    if place == len(curve):
        return curve[-1][1]
    (low, a), (high, b) = curve[place - 1], curve[place]
    return a + math.log(x / low) / math.log(high / low) * (b - a)


def product_rate(kernel: Kernel, device: DeviceType) -> float:
    """FLOP/s that a matrix product or a fused attention reaches."""
    peak = device.peak_of(kernel.precision)
    if kernel.kind == "attention":
        return peak * device.attention_efficiency * length_factor(kernel.smallest, device)
    return peak * matmul_efficiency(kernel.smallest, device) * (1.0 if kernel.aligned else device.unaligned)


def length_factor(keys: float, device: DeviceType) -> float:
    """The fraction of its best that a fused attention reaches over this many keys."""
    curve = device.attention_lengths
    if not curve:
        return 1.0
    return curve[0][1] if keys <= curve[0][0] else interpolated(keys, curve)


def matmul_efficiency(smallest: float, device: DeviceType) -> float:
    """The fraction of peak at this smallest of M, N and K: between two measured sizes along the logarithm; below the
    first in proportion to the size, above the last as there."""
    curve = device.matmul_efficiency
    if smallest < curve[0][0]:
        return curve[0][1] * max(smallest, 1e-9) / curve[0][0]
    return interpolated(smallest, curve)
