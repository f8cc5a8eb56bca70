"""Timing on a device that others may use too, and records of measured times.

The records are plain data: ranks send them to each other, and the fits read them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from partitioner.cost.call.operators import Kernel

_BLOCK_S = 2e-3  # long against the clock, short against what disturbs it

_FEWEST = 3
_QUEUED = 24  # calls of a few kernels each: CUDA queues about a thousand before the host waits
_CYCLES_PER_S = 2e9  # of a GPU's clock, at most


def median_seconds(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Seconds of one ``run``: the median over blocks of calls, for about ``budget_s`` seconds, but three at least.

    On a CPU it is the time in which this thread ran: what others took of its core in between is not the kernel's. On a
    GPU it is the device's own: the calls of a block are queued while it is kept busy, and follow each other then as
    where the host is ahead. How long the host takes is for :func:`host_seconds`.
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
    start = time.thread_time()
    for _ in range(count):
        run()
    return time.thread_time() - start


def _on_gpu(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
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
        else:  # it waits for the device itself, or its kernels are too many
            count, hold = 1, 0.0
        if count > 1 and took is not None and took > budget_s / _FEWEST:
            count = max(1, round(count * budget_s / _FEWEST / took))
    return statistics.median(blocks)


def _time_queued_runs(run: Callable[[], object], count: int, hold: float, device: torch.device) -> float | None:
    """Seconds of ``count`` runs on the device, which is kept busy for ``hold`` seconds while they are queued; ``None``
    where that was too short."""
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
    """Seconds until the host has queued one ``run``, of what takes the device less."""
    synchronize_device(device)
    start = time.perf_counter()
    run()
    took = time.perf_counter() - start
    synchronize_device(device)
    return took


def synchronize_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class KernelSample:
    """A kernel and the seconds that it took. ``name`` for people: ``mm 16x512x1024``."""

    name: str
    kernel: Kernel
    seconds: float


@dataclass(frozen=True)
class CollectiveSample:
    """A collective over ``num_ranks`` ranks; ``num_bytes`` is the size of the whole tensor. ``send``: one message."""

    op: str
    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Overlap:
    """Seconds of compute and of a collective on their own, and of both started together."""

    compute_s: float
    collective_s: float
    both_s: float


@dataclass
class Measurements:
    """All that one profile measured.

    ``issued_s``: a host's, for an operator, in turns. ``few_s`` and ``all_s``: the same work on one rank, while as
    many ranks work as there are cores, and while all do.
    """

    kernels: list[KernelSample] = field(default_factory=list)
    collectives: list[CollectiveSample] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    issued_s: list[float] = field(default_factory=list)
    few_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)
