"""Robust fits of the fields of :class:`DeviceType` and :class:`Level` to measured times. This module measures nothing.

The fits invert the cost model. Seconds of a kernel are ``launch + flops / (efficiency peak) + bytes / rate``
(``partitioner/cost/call/roofline.py``). Seconds of a collective are ``start + share bytes / bandwidth``
(``partitioner/cost/call/collectives.py``). All fits are medians or least absolute errors, so that single disturbed
times have little effect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any

import numpy as np

from partitioner.cost.call.collectives import moved_share
from partitioner.cost.call.operators import Kernel
from partitioner.cost.call.roofline import attention_factor, kernel_time, matmul_efficiency, memory_rate
from partitioner.errors import TopologyError
from partitioner.profile.timer import CollectiveSample, KernelSample, Measurements, Overlap
from partitioner.topology.hardware import COLLECTIVES, DeviceType, Level


def fit_line(sizes: Sequence[float], seconds: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """Return ``(start, per)`` of the line ``seconds = start + per * size`` through the points (``sizes[k]``,
    ``seconds[k]``) with the least sum of relative errors. ``start`` is at least 0 and ``per`` at least ``least``.

    An optimal line under least absolute errors passes through two of the points, or through one point if ``start`` is 0
    or ``per`` is ``least``. Trying all of these lines is therefore exact. The line stays the same if up to about a
    third of the points are far off.

    >>> fit_line([1, 2, 3, 4], [3.0, 5.0, 7.0, 90.0])
    (1.0, 2.0)
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    assert len(x) == len(y) > 0, (x, y)
    assert (y > 0).all(), y
    found = [(max(0.0, float(b - least * a)), least) for a, b in zip(x, y, strict=True)]
    found += [(0.0, float(b / a)) for a, b in zip(x, y, strict=True) if a > 0 and b / a >= least]
    for i, j in combinations(range(len(x)), 2):
        if x[i] != x[j]:
            per = (y[j] - y[i]) / (x[j] - x[i])
            start = y[i] - per * x[i]
            if per >= least and start >= 0:
                found.append((float(start), float(per)))
    return min(found, key=lambda line: float(np.abs((line[0] + line[1] * x) / y - 1).sum()))


def median_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return the median of the relative errors ``|predicted[k] / measured[k] - 1|``; 0 for empty sequences."""
    return statistics.median([abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)] or [0.0])


_NEGLIGIBLE_BYTES = 4096  # a kernel that moves no more takes as long as its launch

_LEAST_SHARE = 0.05  # least share of a time that remains without launch and memory
_LARGE_ERROR = 0.25
_TOLD = 0.05  # share of the largest transfer's time; a slope below it is noise
_ANY_PEAK = {"fp32": 1.0}  # a placeholder until the peak is fitted
_UNBOUNDED = {"default": 1e6}  # so high that only ``memory_sizes`` limits the rate


@dataclass(frozen=True)
class FitError:
    """How well a fit predicts the samples to which it was fitted. ``what``: the kind of kernel or collective.
    ``num_samples``: number of its samples. ``median``: the median of ``|predicted / measured - 1|`` over the samples.
    """

    what: str
    num_samples: int
    median: float

    @property
    def is_large(self) -> bool:
        """Return whether the error is so large (over 25 %) that plans based on the fit may be wrong."""
        return self.median > _LARGE_ERROR


def fit_device(samples: Sequence[KernelSample], overlaps: Sequence[Overlap] = (), **given: Any) -> DeviceType:
    """Return the device description that best explains the measured kernels ``samples``. ``overlaps``: measured times
    of a computation and a collective, alone and together. ``given``: fields of :class:`DeviceType` that are not fitted,
    such as ``memory``.

    Raise :class:`TopologyError` if there are no samples of matrix products or none of pointwise kernels.
    """
    products = [s for s in samples if s.kernel.kind == "matmul"]
    moves = [s for s in samples if not s.kernel.flops]
    if not products or not any(s.kernel.kind == "pointwise" and s.kernel.num_bytes > _NEGLIGIBLE_BYTES for s in moves):
        raise TopologyError("a device needs times of matrix products and of pointwise kernels; measure both")
    launch = fit_launch(moves)
    bandwidth, efficiency, sizes = fit_memory(moves, launch, given.get("dispatch", 0.0))
    draft = DeviceType(
        peak=_ANY_PEAK,
        memory_bandwidth=bandwidth,
        launch=launch,
        memory_efficiency=efficiency,
        memory_sizes=sizes,
        overlap_slowdown=fit_overlap(overlaps),
        **given,
    )
    device = fit_products(products, draft)
    return device.model_copy(update={"attention_efficiency": fit_attention(samples, device)})


def fit_launch(samples: Iterable[KernelSample]) -> float:
    """Return the seconds of a kernel launch: the median time of the ``samples`` that move at most 4096 bytes; 0 if
    there are no such samples."""
    found = [s.seconds for s in samples if s.kernel.num_bytes <= _NEGLIGIBLE_BYTES]
    return statistics.median(found) if found else 0.0


def fit_memory(
    samples: Iterable[KernelSample], launch: float, dispatch: float = 0.0
) -> tuple[float, dict[str, float], tuple[tuple[float, float], ...]]:
    """Return three values fitted to the measured kernels ``samples``, which move memory and have no FLOPs: the memory
    bandwidth in bytes/s; a dict, kind of kernel -> fraction of the bandwidth that it reaches; and a table of pairs
    (bytes, largest fraction that any kernel of that size reaches).

    Pointwise kernels do little but move memory: their rates are the rates of the memory, by size, and the rate at the
    largest size is the bandwidth. The fraction of a kind is chosen such that the predicted times have the least sum of
    relative errors. Samples that take less than ``dispatch`` are ignored, because the host determines their times.
    ``launch``: seconds to launch a kernel. ``dispatch``: seconds in which the host issues a kernel.
    """
    rates: dict[str, list[tuple[float, float]]] = {}  # kind -> (bytes, rate)
    seen: dict[str, list[tuple[float, float]]] = {}  # samples that take longer than the host needs to issue them
    for s in samples:
        if s.kernel.num_bytes > _NEGLIGIBLE_BYTES:
            rate = s.kernel.num_bytes / max(s.seconds - launch, _LEAST_SHARE * s.seconds)
            rates.setdefault(s.kernel.kind, []).append((s.kernel.num_bytes, rate))
            if s.seconds > dispatch:
                seen.setdefault(s.kernel.kind, []).append((s.kernel.num_bytes, rate))
    by_size: dict[float, list[float]] = {}
    for num_bytes, rate in rates["pointwise"]:
        by_size.setdefault(_round_to_octave(num_bytes), []).append(rate)
    caps = {size: statistics.median(by_size[size]) for size in sorted(by_size)}
    bandwidth = caps[max(caps)]
    curve = tuple((size, rate / bandwidth) for size, rate in caps.items()) if len(caps) > 1 else ()
    bounded = DeviceType(
        memory=1, peak=_ANY_PEAK, memory_bandwidth=bandwidth, memory_sizes=curve, memory_efficiency=_UNBOUNDED
    )
    efficiency = {kind: _memory_efficiency(seen.get(kind, found), bounded) for kind, found in sorted(rates.items())}
    efficiency.setdefault("default", 1.0)
    return bandwidth, efficiency, curve


def _memory_efficiency(rates: Sequence[tuple[float, float]], device: DeviceType) -> float:
    """Return the fraction of the memory bandwidth of ``device`` that one kind of kernel reaches. ``rates``: (bytes
    moved, bytes/s) of each measured kernel of this kind. Each kernel gives a candidate for the fraction; the result is
    the candidate that predicts the rates of all kernels with the least sum of relative errors."""
    most = [(memory_rate("default", device, num_bytes), rate) for num_bytes, rate in rates]

    def error(efficiency: float) -> float:
        """Return the sum of the relative errors of the measured rates (bytes/s) if this kind of kernel reaches the
        fraction ``efficiency`` of the memory bandwidth."""
        return sum(abs(rate / min(efficiency * device.memory_bandwidth, cap) - 1) for cap, rate in most)

    return min((rate / device.memory_bandwidth for _, rate in rates), key=error)


def _round_to_octave(size: float) -> float:
    """Return the power of two that is nearest to ``size`` on a logarithmic scale, so that similar sizes are grouped."""
    return float(2.0 ** round(math.log2(size)))


def fit_products(samples: Sequence[KernelSample], device: DeviceType) -> DeviceType:
    """Return a copy of ``device`` with three fields fitted to the measured matrix products in ``samples``: the peak
    FLOP/s by precision; the fraction of the peak that is reached, by the smallest of M, N and K; and the rate at which
    products move memory.

    The peak is the FLOP/s of the products whose smallest dim is greatest, because large products are the fastest. For
    the memory rate 25 values are tried, and the value with the least errors is taken.
    """
    leading = max({s.kernel.precision for s in samples}, key=lambda p: sum(s.kernel.precision == p for s in samples))
    curve_samples = [s for s in samples if s.kernel.precision == leading]
    best: tuple[float, DeviceType] | None = None
    for share in np.geomspace(0.25, 16, 25):
        efficiency = {**device.memory_efficiency, "matmul": float(share)}
        rates = _product_rates(curve_samples, device.model_copy(update={"memory_efficiency": efficiency}))
        knots = sorted(rates)
        # with more work in every dim, the rate is never lower; with little work, memory traffic hides it
        curve = list(accumulate((rates[k] for k in reversed(knots)), min))[::-1]
        peak = curve[-1]
        found = device.model_copy(
            update={
                "memory_efficiency": efficiency,
                "peak": {leading: peak},
                "matmul_efficiency": tuple((k, r / peak) for k, r in zip(knots, curve, strict=True)),
            }
        )
        error = sum(abs(kernel_time(s.kernel, found) / s.seconds - 1) for s in curve_samples)
        if best is None or error < best[0]:
            best = error, found
    assert best is not None
    device = best[1]
    peaks = dict(device.peak)
    for precision in sorted({s.kernel.precision for s in samples} - {leading}):
        others = [s for s in samples if s.kernel.precision == precision]
        rates = _product_rates(others, device)
        top = max(rates)
        at = matmul_efficiency(top, device)
        peaks[precision] = rates[top] / at
    return device.model_copy(update={"peak": peaks})


def _product_rates(samples: Sequence[KernelSample], device: DeviceType) -> dict[float, float]:
    """Return smallest of M, N and K -> FLOP/s of the measured matrix products ``samples`` with this smallest dim. The
    FLOP/s are chosen such that the predicted times of these products have the least sum of relative errors. They are
    computed from the measured time minus the time that ``device`` predicts for the launch and memory traffic."""
    found: dict[float, list[tuple[KernelSample, float]]] = {}
    for s in samples:
        found.setdefault(s.kernel.smallest, []).append((s, _without_products(s.kernel, device)))
    return {smallest: _product_rate(rest) for smallest, rest in found.items()}


def _product_rate(samples: Sequence[tuple[KernelSample, float]]) -> float:
    """Return the FLOP/s that best explain the times of matrix products with the same smallest dim (of M, N and K). Each
    product gives a candidate; the result is the candidate that predicts the times of all products with the least sum of
    relative errors. ``samples``: pairs (measured product, predicted seconds of its launch and memory traffic)."""

    def error(rate: float) -> float:
        """Return the sum of the relative errors of the predicted times if products run at ``rate`` FLOP/s."""
        return sum(abs((rest + s.kernel.flops / rate) / s.seconds - 1) for s, rest in samples)

    return min((s.kernel.flops / max(s.seconds - rest, _LEAST_SHARE * s.seconds) for s, rest in samples), key=error)


def _without_products(kernel: Kernel, device: DeviceType) -> float:
    """Return the seconds that ``kernel`` takes on ``device`` for its launches and memory traffic, if its FLOPs took no
    time."""
    moved = Kernel(kernel.kind, kernel.num_bytes, launches=kernel.launches)
    return kernel_time(moved, device)


def fit_attention(samples: Iterable[KernelSample], device: DeviceType) -> float:
    """Return the fraction of the peak FLOP/s of ``device`` that fused attention reaches over long sequences, as a
    median over the attention kernels in ``samples``; 0.5 if there are none."""
    found = [
        s.kernel.flops
        / max(s.seconds - _without_products(s.kernel, device), _LEAST_SHARE * s.seconds)
        / (device.peak_of(s.kernel.precision) * attention_factor(s.kernel, device))
        for s in samples
        if s.kernel.kind == "attention"
    ]
    return statistics.median(found) if found else 0.5


def fit_overlap(overlaps: Sequence[Overlap]) -> float:
    """Return the factor by which computation and a collective slow down while both run, as a median over ``overlaps``;
    1 if there are none. ``overlaps``: measured times of both, alone and together."""
    found = []
    for o in overlaps:
        longer, shorter = max(o.compute_s, o.collective_s), min(o.compute_s, o.collective_s)
        found.append(1 + (o.both_s - longer) / shorter)
    return max(1.0, statistics.median(found)) if found else 1.0


def fit_concurrent(measured: Measurements, cores: int) -> float | None:
    """Return the number of ranks that can compute at full speed at the same time: ``cores``, the number of CPU cores,
    divided by the slowdown while all ranks compute. The slowdown is the time of a piece of work while all ranks
    compute, divided by its time while only one rank per core computes. Return ``None`` if this was not measured; the
    cost model then assumes that all ranks can compute at full speed. ``measured``: the measured times."""
    if not measured.all_s:
        return None
    stretch = statistics.median([a / f for a, f in zip(measured.all_s, measured.few_s, strict=True)])
    return round(cores / max(1.0, stretch), 2)


def fit_level(samples: Sequence[CollectiveSample], name: str) -> Level:
    """Return the links between the measured ranks as one level of links called ``name``: bandwidth, latency, and for
    each collective a table of rows (ranks, start-up seconds, bytes/s through each rank).

    If the times of a message or collective do not grow with its size, they do not determine a bandwidth. Its bandwidth
    is then at most the largest bandwidth that was found for the other messages and collectives. ``samples``: measured
    messages and collectives. Raise :class:`TopologyError` if there are no times of messages.
    """
    lines = {("send", 2): _BandwidthSamples.of(s for s in samples if s.op == "send")}
    if not lines["send", 2].seconds:
        raise TopologyError("a level of links needs times of messages between two ranks; measure 'send'")
    for op in COLLECTIVES:
        for size in sorted({s.num_ranks for s in samples if s.op == op}):
            lines[op, size] = _BandwidthSamples.of(s for s in samples if s.op == op and s.num_ranks == size)
    slopes = [line.slope for line in lines.values()]
    told = [slope for slope in slopes if slope is not None]
    least = min(told or [line.least_slope for line in lines.values()])
    fitted = {key: fit_line(line.moved, line.seconds, least) for key, line in lines.items()}
    latency, per_byte = fitted.pop(("send", 2))
    tables = {
        op: tuple((size, start, 1 / per) for (of, size), (start, per) in fitted.items() if of == op)
        for op in COLLECTIVES
    }
    return Level.model_validate({"name": name, "bandwidth": 1 / per_byte, "latency": latency, **tables})


@dataclass(frozen=True)
class _BandwidthSamples:
    """Measured transfers of one kind, one entry per transfer. ``moved``: bytes that pass through each rank's links.
    ``seconds``: the time that the transfer took."""

    moved: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, samples: Iterable[CollectiveSample]) -> _BandwidthSamples:
        """Return the bytes through each rank's links and the seconds of ``samples``, measured messages or collectives
        of one kind."""
        every = list(samples)
        shares = [1.0 if s.op == "send" else moved_share(s.op, s.num_ranks) for s in every]
        return cls(
            tuple(share * s.num_bytes for share, s in zip(shares, every, strict=True)),
            tuple(s.seconds for s in every),
        )

    @property
    def slope(self) -> float | None:
        """Return the seconds per byte of the line fitted to the transfers; ``None`` if the size accounts for at most 5
        % of the largest transfer's time."""
        start, per = fit_line(self.moved, self.seconds)
        most = per * max(self.moved)
        return per if most > _TOLD * (start + most) else None

    @property
    def least_slope(self) -> float:
        """Return the least ratio of seconds to bytes among the measured transfers. This overestimates the seconds per
        byte, because the time to start a transfer is included. It is used if no kind of transfer has a :attr:`slope`.
        """
        return min(s / n for n, s in zip(self.moved, self.seconds, strict=True))


def device_errors(samples: Sequence[KernelSample], device: DeviceType) -> list[FitError]:
    """Return the errors of the times that the fitted ``device`` predicts for the measured kernels ``samples``, one for
    each kind of kernel and, for matrix products, for each precision. Kernels that take less time than the host needs to
    issue one, or do almost no work, are left out.
    """
    groups: dict[str, list[KernelSample]] = {}
    for s in samples:
        if s.seconds > device.dispatch and (s.kernel.flops or s.kernel.num_bytes > _NEGLIGIBLE_BYTES):
            label = f"matmul {s.kernel.precision}" if s.kernel.kind == "matmul" else s.kernel.kind
            groups.setdefault(label, []).append(s)
    return [
        FitError(label, len(g), median_error([kernel_time(s.kernel, device) for s in g], [s.seconds for s in g]))
        for label, g in groups.items()
    ]


def level_errors(samples: Sequence[CollectiveSample], level: Level) -> list[FitError]:
    """Return the errors of the times that the fitted links ``level`` predict for the measured ``samples``, one for each
    collective and number of ranks; messages between two ranks come first."""
    errors = []
    for op in ("send", *COLLECTIVES):
        for size in sorted({s.num_ranks for s in samples if s.op == op}):
            group = [s for s in samples if s.op == op and s.num_ranks == size]
            measured = [s.seconds for s in group]
            errors.append(
                FitError(
                    f"{op} over {size}",
                    len(group),
                    median_error([_predict_collective_seconds(s, level) for s in group], measured),
                )
            )
    return errors


def _predict_collective_seconds(sample: CollectiveSample, level: Level) -> float:
    """Return the seconds that ``level``, fitted links, predicts for the message or collective ``sample``. The level
    must have measurements for its number of ranks."""
    if sample.op == "send":
        return level.latency + sample.num_bytes / level.bandwidth
    start, bandwidth = next((a, b) for n, a, b in getattr(level, sample.op) if n == sample.num_ranks)
    return float(start + moved_share(sample.op, sample.num_ranks) * sample.num_bytes / bandwidth)
