"""Seconds of kernels on a device.

``t = t0 launches + flops / (e peak) + bytes / (e_m bandwidth)``: additive rather than a maximum, as measured operators
are (see the sources in ``topology/data/devices.yaml``); ``e`` depends on the smallest of M, N and K.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from partitioner.cost.operators import Kernel
from partitioner.topology.parts import DeviceType


def kernel_time(kernel: Kernel, device: DeviceType) -> float:
    """Seconds of one kernel with all of its launches."""
    seconds = kernel.launches * device.launch + kernel.num_bytes / memory_rate(kernel.kind, device)
    if kernel.flops:
        seconds += kernel.flops / product_rate(kernel, device)
    return seconds


def kernels_time(kernels: Iterable[Kernel], device: DeviceType) -> float:
    return sum(kernel_time(kernel, device) for kernel in kernels)


def memory_rate(kind: str, device: DeviceType) -> float:
    """Bytes/s that kernels of ``kind`` reach."""
    table = device.memory_efficiency
    return device.memory_bandwidth * table.get(kind, table.get("default", 1.0))


def product_rate(kernel: Kernel, device: DeviceType) -> float:
    """FLOP/s that a matrix product or a fused attention reaches."""
    peak = device.peak_of(kernel.precision)
    if kernel.kind == "attention":
        return peak * device.attention_efficiency
    return peak * matmul_efficiency(kernel.smallest, device)


def matmul_efficiency(smallest: float, device: DeviceType) -> float:
    """The fraction of peak at this smallest of M, N and K: between two measured sizes along the logarithm; below the
    first in proportion to the size, above the last as there."""
    curve = device.matmul_efficiency
    place = bisect_right(curve, (smallest, math.inf))
    if place == 0:
        return curve[0][1] * max(smallest, 1e-9) / curve[0][0]
    if place == len(curve):
        return curve[-1][1]
    (low, a), (high, b) = curve[place - 1], curve[place]
    share = math.log(smallest / low) / math.log(high / low)
    return a + share * (b - a)
