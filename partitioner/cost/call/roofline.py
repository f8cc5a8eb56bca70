"""Seconds of kernels on a device.

The time is ``launches * launch time + FLOPs / (efficiency * peak) + bytes / (efficiency * bandwidth)``. The terms are
added, because measured operators agree better with a sum than with a maximum (sources in
``topology/data/devices.yaml``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.call.operators import Kernel
from partitioner.topology.hardware import DeviceType

if TYPE_CHECKING:
    from partitioner.cost.call.block_profile import KernelTable

Column = NDArray[np.float64]

_LEAST = 1e-9  # least size of which a logarithm is taken


def kernel_time(kernel: Kernel, device: DeviceType) -> float:
    """Return the seconds of ``kernel`` on ``device``, with all of its launches."""
    rate = memory_rate(kernel.kind, device, kernel.num_bytes / max(1, kernel.launches))
    seconds = kernel.launches * device.launch + kernel.num_bytes / rate
    if kernel.flops:
        seconds += kernel.flops / product_rate(kernel, device)
    return seconds


def kernel_times(columns: KernelTable, device: DeviceType) -> Column:
    """Return the seconds of each kernel in the table ``columns`` on ``device``, as an array of shape ``[kernels]``."""
    rates = np.array([memory_efficiency(kind, device) for kind in columns.kinds], dtype=np.float64)[columns.kind]
    if device.memory_sizes:
        moved = columns.num_bytes / np.maximum(1.0, columns.launches)
        rates = np.minimum(rates, _interpolate_column(moved, device.memory_sizes))
    seconds: Column = columns.launches * device.launch + columns.num_bytes / (device.memory_bandwidth * rates)
    works = np.nonzero(columns.flops)[0]
    if works.size:
        smallest = columns.smallest[works]
        lowest, share = device.matmul_efficiency[0]
        below = share * np.maximum(smallest, _LEAST) / lowest
        efficiency = np.where(smallest < lowest, below, _interpolate_column(smallest, device.matmul_efficiency))
        efficiency = efficiency * np.where(columns.aligned[works], 1.0, device.unaligned)
        attention = columns.kind[works] == (columns.kinds.index("attention") if "attention" in columns.kinds else -1)
        of_keys = _interpolate_column(smallest, device.attention_lengths) if device.attention_lengths else 1.0
        of_heads = (
            _interpolate_column(columns.width[works], device.attention_widths) if device.attention_widths else 1.0
        )
        efficiency = np.where(attention, device.attention_efficiency * of_keys * of_heads, efficiency)
        peaks = (
            device.clock
            * np.array([device.peak_of(precision) for precision in columns.precisions])[columns.precision[works]]
        )
        seconds[works] += columns.flops[works] / (peaks * efficiency)
    return seconds


def _interpolate_column(values: Column, curve: Sequence[tuple[float, float]]) -> Column:
    """Return the fraction at each size in ``values``, interpolated in ``curve``, which is a sequence of pairs (size,
    fraction), linearly in the logarithm of the size. Beyond the ends of the curve, its first or last fraction is
    returned."""
    points, shares = zip(*curve, strict=True)
    found: Column = np.interp(np.log(np.maximum(values, _LEAST)), np.log(points), shares)
    return found


def kernels_time(kernels: Iterable[Kernel], device: DeviceType) -> float:
    return sum(kernel_time(kernel, device) for kernel in kernels)


# Kind -> similar kind, which is used if a device does not list the first; then ``default``.
_ALIKE = {
    **dict.fromkeys(("optimizer", "special", "broadcast", "quantize"), "pointwise"),
    "softmax": "reduction",
}


def memory_rate(kind: str, device: DeviceType, num_bytes: float | None = None) -> float:
    """Return the memory traffic in bytes/s that kernels of ``kind`` (such as ``"pointwise"``) reach on ``device``.
    ``num_bytes``: bytes that each kernel moves; ``None``: the size at which the rate is highest."""
    return device.memory_bandwidth * min(memory_efficiency(kind, device), _largest_factor(num_bytes, device))


def copied_s(nbytes: float, device: DeviceType) -> float:
    """Return the seconds of a kernel on ``device`` that copies ``nbytes`` bytes, that is, reads and writes them."""
    return device.launch + 2 * nbytes / memory_rate("pointwise", device, 2 * nbytes) if nbytes else 0.0


def memory_efficiency(kind: str, device: DeviceType) -> float:
    """Return the fraction of memory bandwidth that kernels of ``kind`` (such as ``"norm"``) reach on ``device``. If the
    device does not list the kind, return the value of a similar kind or, without one, of the kind ``"default"``."""
    table = device.memory_efficiency
    return table.get(kind, table.get(_ALIKE.get(kind, "default"), table.get("default", 1.0)))


def _largest_factor(num_bytes: float | None, device: DeviceType) -> float:
    """Return the largest fraction of the memory bandwidth of ``device`` that a kernel reaches. ``num_bytes``: bytes
    that the kernel moves; ``None``: the size at which the fraction is largest. Return ``math.inf`` if the device has no
    such measurements."""
    curve = device.memory_sizes
    if not curve:
        return math.inf
    if num_bytes is None:
        return max(factor for _, factor in curve)
    return curve[0][1] if num_bytes <= curve[0][0] else interpolate_curve(num_bytes, curve)


def interpolate_curve(x: float, curve: Sequence[tuple[float, float]]) -> float:
    """Return the fraction at the size ``x``, interpolated in ``curve``, which is a sequence of pairs (size, fraction),
    linearly in the logarithm of the size. Above the last size the last fraction is returned. ``x`` must not be below
    the first size."""
    place = bisect_right(curve, (x, math.inf))
    if place == len(curve):
        return curve[-1][1]
    (low, a), (high, b) = curve[place - 1], curve[place]
    return a + math.log(x / low) / math.log(high / low) * (b - a)


def product_rate(kernel: Kernel, device: DeviceType) -> float:
    """Return the FLOP/s that ``kernel``, a matrix product or a fused attention, reaches on ``device``."""
    peak = device.peak_of(kernel.precision) * device.clock
    if kernel.kind == "attention":
        return peak * device.attention_efficiency * attention_factor(kernel, device)
    return peak * matmul_efficiency(kernel.smallest, device) * (1.0 if kernel.aligned else device.unaligned)


def attention_factor(kernel: Kernel, device: DeviceType) -> float:
    """Return the efficiency of the fused attention ``kernel`` on ``device``, as a fraction of the best measured
    efficiency. It depends on the number of keys and the head width; both must be large for 1.0."""
    return _evaluate_curve(device.attention_lengths, kernel.smallest) * _evaluate_curve(
        device.attention_widths, kernel.width
    )


def _evaluate_curve(curve: Sequence[tuple[float, float]], value: float) -> float:
    """Return the fraction at the size ``value``, interpolated in ``curve``, which is a sequence of pairs (size,
    fraction), linearly in the logarithm of the size. Beyond the ends of the curve, its first or last fraction is
    returned. Return 1 if the curve is empty."""
    if not curve:
        return 1.0
    return curve[0][1] if value <= curve[0][0] else interpolate_curve(min(value, curve[-1][0]), curve)


def matmul_efficiency(smallest: float, device: DeviceType) -> float:
    """Return the fraction of the peak FLOP/s of ``device`` that a matrix product reaches. The fraction depends on
    ``smallest``, the smallest of the product's sizes M, N and K. It is interpolated between measured sizes,
    proportional to ``smallest`` below the first measured size, and constant above the last."""
    curve = device.matmul_efficiency
    if smallest < curve[0][0]:
        return curve[0][1] * max(smallest, _LEAST) / curve[0][0]
    return interpolate_curve(smallest, curve)
