"""A second process that searches beside the first: what both found lies in shared memory.

The helper is a fork, so that the problem is neither built nor sent again. Each of the two writes to a slot of its own,
between two changes of a counter that is odd meanwhile: nobody ever waits for the other, and a helper that is killed
holds nothing. Where there is no fork or no second processor the search goes on alone.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.presolve import Choices

_PAUSE_S = 0.01
_is_fork = False


@dataclass(frozen=True)
class Finding:
    """An assignment, its cost, how much it exceeds the limit by, and a lower bound of all costs."""

    choice: Choices
    cost: float
    overflow: float
    bound: float


class Slot:
    """Shared memory for the latest finding of one process."""

    def __init__(self, num_nodes: int) -> None:
        self._numbers = shared(4, np.float64)  # counter, cost, overflow, bound
        self._choice = shared(num_nodes, np.int64)
        self._read = 0.0

    def write(self, finding: Finding) -> None:
        self._numbers[0] += 1.0
        self._choice[:] = finding.choice
        self._numbers[1:] = finding.cost, finding.overflow, finding.bound
        self._numbers[0] += 1.0

    def read(self) -> Finding | None:
        """The latest finding, unless it was read before or is being written."""
        count = float(self._numbers[0])
        if count == self._read or count % 2:
            return None
        finding = Finding(self._choice.astype(np.intp), *map(float, self._numbers[1:]))
        if float(self._numbers[0]) != count:
            return None
        self._read = count
        return finding


def shared(size: int, dtype: type) -> NDArray[np.generic]:
    """Zeros that a fork sees changing."""
    return np.frombuffer(mmap.mmap(-1, max(1, size) * np.dtype(dtype).itemsize), dtype)[:size]


def can_help() -> bool:
    """Whether this process may fork and has a second processor."""
    return hasattr(os, "fork") and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


class Helper:
    """Runs ``work`` in a fork of this process, ``pid``; its errors go nowhere, as it is only ever a help."""

    def __init__(self, work: Callable[[], None]) -> None:
        global _is_fork
        with warnings.catch_warnings():
            # Python warns of locks that other threads hold: the work must need none but numpy's
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        self._ended = False
        if self.pid:
            return
        try:
            _is_fork = True
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted as well, and ends this process
            work()
        finally:
            os._exit(0)  # leaves the parent's files and threads alone

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        if not self._ended:
            try:
                self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            except ChildProcessError:  # whoever ignores SIGCHLD is not told
                self._ended = True
        return not self._ended

    def end(self, until: float) -> None:
        """Waits for its end, at most until ``until`` of ``time.perf_counter``; then ends it."""
        while self.runs:
            if time.perf_counter() > until:
                os.kill(self.pid, signal.SIGKILL)
                until = math.inf
            time.sleep(_PAUSE_S)


def check_threads() -> None:
    """Raise :class:`RuntimeError` in a helper, which lacks the threads that an exact solver may have started."""
    if _is_fork:
        raise RuntimeError("the exact solver is for the first process")
