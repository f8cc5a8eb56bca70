"""How long this process has waited for other ranks: what of an instruction's time is not its own work.

One number per process, added to wherever a transfer or collective is waited for. On CUDA devices a wait ends when the
device has been told to wait, so only what the host stands still for is counted.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Protocol


class _Waitable(Protocol):
    def wait(self) -> Any: ...


class WaitClock:
    """Nanoseconds waited since the process started."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0


waited = WaitClock()


def wait_for(work: _Waitable) -> None:
    """Wait for ``work``, and count how long."""
    start = perf_counter_ns()
    work.wait()
    waited.ns += perf_counter_ns() - start
