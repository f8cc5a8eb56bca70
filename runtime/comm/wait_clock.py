"""Count the time that this process waits for other ranks: the part of an instruction's time that is not its own work.

There is one counter per process; every wait for a transfer or collective adds to it. On CUDA devices a wait ends when
the wait is queued on the device, so only the blocking time of the host is counted.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Protocol


class _Waitable(Protocol):
    def wait(self) -> Any: ...


class WaitClock:
    """Counter of the time that this process has waited for other ranks since it started: ``ns``, in nanoseconds."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0


waited = WaitClock()


def wait_for(work: _Waitable) -> None:
    """Wait for ``work`` (a transfer or collective), and add the time to the process-wide counter of waiting time."""
    start = perf_counter_ns()
    work.wait()
    waited.ns += perf_counter_ns() - start
