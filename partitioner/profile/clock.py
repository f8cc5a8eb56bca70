"""How long something takes on a device that others may be using too."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

_BLOCK_S = 2e-3  # long against the clock, short against what disturbs it
_FEWEST = 3


def median_seconds(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Seconds of one ``run``: the median over blocks of calls, for about ``budget_s`` seconds, but three at least.

    The calls of a block follow each other without waiting for the device, as in a program. On a CPU it is the time in
    which this thread ran: what others took of its core in between is not the kernel's.
    """
    run()
    first = _block(run, 1, device)
    count = max(1, math.ceil(min(_BLOCK_S, budget_s / _FEWEST) / max(first, 1e-7)))
    blocks: list[float] = []
    start = time.perf_counter()
    while len(blocks) < _FEWEST or time.perf_counter() - start < budget_s:
        blocks.append(_block(run, count, device) / count)
    return statistics.median(blocks)


def _block(run: Callable[[], object], count: int, device: torch.device) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    synchronize(device)
    start = clock()
    for _ in range(count):
        run()
    synchronize(device)
    return clock() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
