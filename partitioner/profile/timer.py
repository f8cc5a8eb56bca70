"""Timing on a device that other programs may also use, and records of measured times.

The records hold no tensors, so that ranks can send them to each other. The fits read them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from partitioner.cost.call.operators import Kernel

_BLOCK_S = 2e-3  # seconds of a block of calls: long against the clock's resolution, short against disturbances

_FEWEST = 3
_QUEUED = 24  # calls in a block, each of a few kernels: CUDA queues about a thousand before the host waits
_CYCLES_PER_S = 2e9  # at most, of a GPU's clock


def median_seconds(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the seconds of one call of ``run``: the median over blocks of calls, which take about ``budget_s`` seconds
    together. At least three blocks are timed. ``device``: the device on which ``run`` computes.

    On a CPU the time is the CPU time of this thread, so that other programs on its core do not count. On a GPU it is
    the device time. The calls of a block are queued while the device is kept busy, so that they run one after the other
    without delays by the host. :func:`host_seconds` measures the host.
    """
    run()
    if device.type == "cuda":
        return _on_gpu(run, device, budget_s)
    first = _time_thread_block(run, 1, device)
    count = max(1, math.ceil(min(_BLOCK_S, budget_s / _FEWEST) / max(first, 1e-7)))
    blocks: list[float] = []
    start = time.perf_counter()
    while len(blocks) < _FEWEST or time.perf_counter() - start < budget_s:
        blocks.append(_time_thread_block(run, count, device) / count)
    return statistics.median(blocks)


def _time_thread_block(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the CPU seconds of this thread for ``count`` calls of ``run`` together. ``device``: the device on which
    ``run`` computes.
    """
    start = time.thread_time()
    for _ in range(count):
        run()
    return time.thread_time() - start


def _on_gpu(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the GPU seconds of one call of ``run`` on the GPU ``device``: the median over at least three blocks of
    queued calls, which take about ``budget_s`` seconds together. Calls that cannot be queued are timed one by one.
    """
    synchronize_device(device)
    host = host_seconds(run, device)
    count, hold = _QUEUED, _BLOCK_S + 2 * _QUEUED * host
    blocks: list[float] = []
    start = time.perf_counter()
    while len(blocks) < _FEWEST or time.perf_counter() - start < budget_s:
        took = _time_queued_runs(run, count, hold, device)
        if took is not None:
            blocks.append(took / count)
        elif hold < budget_s:
            hold *= 2
        else:  # a call waits for the device itself, or has too many kernels
            count, hold = 1, 0.0
        if count > 1 and took is not None and took > budget_s / _FEWEST:
            count = max(1, round(count * budget_s / _FEWEST / took))
    return statistics.median(blocks)


def _time_queued_runs(run: Callable[[], object], count: int, hold: float, device: torch.device) -> float | None:
    """Return the seconds of ``count`` calls of ``run`` together on the GPU ``device``. The GPU is kept busy for
    ``hold`` seconds while the calls are queued. Return ``None`` if it became idle before all were queued.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if hold:
        torch.cuda._sleep(int(hold * _CYCLES_PER_S))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    ahead = not hold or not begin.query()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 if ahead else None


def host_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until one call of ``run`` returns on the host. ``device`` is synchronized before and after the
    call. If the device finishes the work faster than the host issues it, this is the time in which the host issues the
    work."""
    synchronize_device(device)
    start = time.perf_counter()
    run()
    took = time.perf_counter() - start
    synchronize_device(device)
    return took


def synchronize_device(device: torch.device) -> None:
    """Wait until all work queued on ``device`` is done; return at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class KernelSample:
    """A measured kernel. ``name``: its name in reports, such as ``mm 16x512x1024``. ``kernel``: the description by
    which the cost model predicts its time. ``seconds``: the measured time of one call."""

    name: str
    kernel: Kernel
    seconds: float


@dataclass(frozen=True)
class CollectiveSample:
    """A measured collective over ``num_ranks`` ranks. ``op``: name of the collective, such as ``all_reduce``; ``send``
    stands for one message between two ranks. ``num_bytes``: size of the whole tensor. ``seconds``: the measured time.
    """

    op: str
    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Overlap:
    """Measured seconds of a computation alone (``compute_s``), of a collective alone (``collective_s``), and of both
    started together (``both_s``)."""

    compute_s: float
    collective_s: float
    both_s: float


@dataclass
class Measurements:
    """All times that one profile of a machine measured. ``kernels``, ``collectives``: one entry for each measured case.
    ``overlaps``: times of computation and a collective, alone and together, one entry per repetition of the
    measurement. ``issued_s``: host seconds to issue one operator, one entry per repetition.

    ``few_s``, ``all_s``: seconds that one rank takes for a fixed piece of work, one entry per repetition. For
    ``few_s``, as many ranks work at the same time as there are CPU cores. For ``all_s``, all ranks work at the same
    time.
    """

    kernels: list[KernelSample] = field(default_factory=list)
    collectives: list[CollectiveSample] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    issued_s: list[float] = field(default_factory=list)
    few_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)
