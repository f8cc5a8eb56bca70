"""Run a forked helper process beside the main process. It shares solutions through memory, and computes results before
they are requested.

The helper is a fork, so the problem is neither built nor sent a second time. If ``os.fork`` or a second processor is
missing, the main process works alone.

``FindingSlot`` holds one solution in shared memory. Each process writes to its own slot, and increments a counter
before
and after a write; an odd counter marks a write in progress. No process waits for the other, and a helper that is killed
holds no lock.

``BackgroundWorker``, ``SharedTasks`` and ``Future`` compute results before they are requested. Both processes take
tasks from one list and mark in shared memory which tasks they begin, so a task runs twice only if both begin it at the
same moment. Results are kept in an unlinked file. The main process does not depend on the helper: it computes the tasks
that the helper has not begun or failed at, and waits, for a limited time, only for a task in progress.
"""

from __future__ import annotations

import errno
import io
import math
import mmap
import os
import pickle
import signal
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import IO, Any, Generic, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.pairwise.presolve import Choices

_HELPER_PAUSE_S = 0.01

_is_fork = False


@dataclass(frozen=True)
class Finding:
    """A solution of an assignment problem: one option is chosen for each node of a graph, under a limit on the sum of a
    resource such as memory.

    ``choice``: index of the chosen option of each node. ``cost``: cost of the solution. ``overflow``: the amount of the
    resource by which the solution exceeds the limit; 0 if it does not. ``bound``: no solution costs less.
    """

    choice: Choices
    cost: float
    overflow: float
    bound: float


class FindingSlot:
    """Shared memory for the latest solution of an assignment problem that one process found. The process and the forks
    that it starts later can read and write the slot without locks. ``num_nodes``: number of nodes of the problem."""

    def __init__(self, num_nodes: int) -> None:
        self._numbers = allocate_shared_array(4, np.float64)  # counter, cost, overflow, bound
        self._choice = allocate_shared_array(num_nodes, np.int64)
        self._read = 0.0

    def write(self, finding: Finding) -> None:
        """Store ``finding``, a solution of an assignment problem, in the shared memory in place of the earlier one.
        Only one process may write to a slot.
        """
        self._numbers[0] += 1.0
        self._choice[:] = finding.choice
        self._numbers[1:] = finding.cost, finding.overflow, finding.bound
        self._numbers[0] += 1.0

    def read(self) -> Finding | None:
        """Return the latest solution of the assignment problem that another process has stored in the shared memory;
        ``None`` if there is none, if this process has read it before, or if it is being written.
        """
        count = float(self._numbers[0])
        if count == self._read or count % 2:
            return None
        finding = Finding(self._choice.astype(np.intp), *map(float, self._numbers[1:]))
        if float(self._numbers[0]) != count:
            return None
        self._read = count
        return finding


def allocate_shared_array(size: int, dtype: type) -> NDArray[np.generic]:
    """Return a one-dimensional array of ``size`` zeros in memory that this process shares with the processes that it
    forks later. ``dtype``: the number type of its elements."""
    return np.frombuffer(mmap.mmap(-1, max(1, size) * np.dtype(dtype).itemsize), dtype)[:size]


def can_help() -> bool:
    """Return whether a helper process saves time: this process can fork and may run on several processors."""
    return hasattr(os, "fork") and has_processors(2)


def has_processors(number: int) -> bool:
    """Return whether this process may run on at least ``number`` processors, as far as the system tells."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) >= number


class ForkedWorker:
    """A fork of this process that runs ``work`` and exits. Exceptions of ``work`` are lost, since the parent process
    does not depend on it. ``pid``: process id of the fork."""

    def __init__(self, work: Callable[[], None]) -> None:
        global _is_fork
        with warnings.catch_warnings():
            # Python warns of locks that other threads may hold; ``work`` must need no such locks, except those of
            # numpy.
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
        """Return whether the forked process has not ended."""
        if not self._ended:
            try:
                self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            except ChildProcessError:  # the program ignores SIGCHLD, so there is no exit status
                self._ended = True
        return not self._ended

    def end(self, until: float) -> None:
        """Wait until the forked process has ended. ``until``: time on the clock of ``time.perf_counter()``, in seconds,
        at which the process is killed if it still runs."""
        while self.runs:
            if time.perf_counter() > until:
                os.kill(self.pid, signal.SIGKILL)
                until = math.inf
            time.sleep(_HELPER_PAUSE_S)


def check_threads() -> None:
    """Raise :class:`RuntimeError` if this process is a fork that computes results for its parent. An exact solver calls
    this first: it may use threads, which a fork does not inherit."""
    if _is_fork:
        raise RuntimeError("the exact solver is for the first process")


K = TypeVar("K", bound=Hashable)

R = TypeVar("R")
S = TypeVar("S")
C = TypeVar("C")

_FREE, _MINE, _BEGUN, _DONE, _FAILED = range(5)

_PATIENCE_S = 10.0  # seconds to wait for a task that the other process has begun, in case it hangs
_PAUSE_S = 0.002


class BackgroundWorker(Generic[K, R]):
    """Computes ``work(key)`` for each of ``keys`` in a forked process, so that a result is ready when :meth:`take` asks
    for it. Results are pickled.

    Keys that were passed to :meth:`wish` are computed first, then the others in the order of ``keys``. ``patience_s``:
    the most seconds that :meth:`take` waits for a result that is being computed. :meth:`end` kills the forked process
    and deletes its results.
    """

    def __init__(self, keys: Sequence[K], work: Callable[[K], R], patience_s: float = _PATIENCE_S) -> None:
        """Start the forked process, which computes ``work(key)`` for each of ``keys``; if it cannot be started,
        :meth:`take` always returns ``None``. ``patience_s``: seconds that :meth:`take` waits for a task in progress."""
        self._patience_s = patience_s
        self._places = {key: place for place, key in enumerate(keys)}
        self._keys = keys
        self._marks = allocate_shared_array(len(keys), np.int8)
        # the earlier a key was asked for, the farther below zero
        self._wishes = allocate_shared_array(len(keys), np.int64)
        self._is_paused = allocate_shared_array(1, np.int8)
        self._turns = count(-len(keys))
        # start and end of each result in the file
        self._spans = allocate_shared_array(2 * len(keys), np.int64).reshape(-1, 2)
        self._file: IO[bytes] = io.BytesIO()
        self._helper: ForkedWorker | None = None
        parent = os.getpid()

        def go_through() -> None:
            """Compute, in the forked process, the result for each key that the parent process has not begun, append it
            to the file of results, and mark the key as done or failed. Stop when the parent process has ended.
            """
            end = 0
            while os.getppid() == parent and (place := self._find_next_free()) is not None:
                if self._is_paused[0]:
                    time.sleep(_HELPER_PAUSE_S)
                    continue
                self._marks[place] = _BEGUN
                try:
                    found = pickle.dumps(work(keys[place]))
                    if os.pwrite(self._file.fileno(), found, end) < len(found):
                        raise OSError(errno.ENOSPC, "no room for results")
                except Exception:
                    self._marks[place] = _FAILED  # the first process will fail for the same reason, and report it
                else:
                    self._spans[place] = end, end + len(found)
                    end += len(found)
                    self._marks[place] = _DONE

        with suppress(OSError):  # no space for results, or no further process possible
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as this
            self._helper = ForkedWorker(go_through)
        self.end = weakref.finalize(self, _end_helper, self._helper, self._file)

    def take(self, key: K) -> R | None:
        """Return the result for ``key``; wait for a limited time if the forked process is computing it. ``None`` means
        that the forked process does not have it, so that the caller must compute it."""
        place = self._places.get(key)
        if place is None:
            return None
        if self._marks[place] == _FREE:
            self._marks[place] = _MINE
        until = time.perf_counter() + self._patience_s
        while self.works_on(key):
            if time.perf_counter() > until:
                self._stop_helper()
            time.sleep(_PAUSE_S)
        if self._marks[place] != _DONE or self._file.closed:
            return None
        start, end = self._spans[place].tolist()
        found: R = pickle.loads(os.pread(self._file.fileno(), end - start, start))
        return found

    def works_on(self, key: K) -> bool:
        """Return whether the forked process is computing the result for ``key`` now."""
        place = self._places.get(key)
        return place is not None and self._marks[place] == _BEGUN and self._helper is not None and self._helper.runs

    def wish(self, key: K) -> None:
        """Announce that the result for ``key`` will be requested. The forked process computes it before keys that were
        not announced, and after those announced earlier.
        """
        place = self._places.get(key)
        if place is not None and not self._wishes[place]:
            self._wishes[place] = next(self._turns)

    def claim(self, among: Container[C] | None = None) -> C | None:
        """Return the next key in the collection ``among`` whose computation neither this process nor the forked one has
        begun, and mark it as the caller's task. Return ``None`` if there is none. ``among``: ``None``: all keys.
        """
        place = self._find_next_free(among)
        if place is None:
            return None
        self._marks[place] = _MINE
        key: Any = self._keys[place]
        return cast(C, key)

    def take_if_done(self, key: K) -> R | None:
        """Return the result for ``key`` if the forked process has computed it, or else ``None``. Unlike :meth:`take`,
        this neither waits nor tells the forked process that the caller computes the result."""
        place = self._places.get(key)
        return None if place is None or self._marks[place] != _DONE else self.take(key)

    def _find_next_free(self, among: Container[Any] | None = None) -> int | None:
        """Return the index, in the list of all keys, of the next key whose computation has begun neither in this
        process nor in the forked one; ``None`` if there is none. Keys whose results were announced to be needed come
        first. ``among``: the keys to consider; ``None``: all."""
        free = np.flatnonzero(self._marks == _FREE)
        ordered = free[np.argsort(self._wishes[free], kind="stable")].tolist()
        return next((place for place in ordered if among is None or self._keys[place] in among), None)

    def pause(self, is_paused: bool) -> None:
        """If ``is_paused`` is true, let the forked process begin no further tasks; otherwise let it begin tasks
        again."""
        self._is_paused[0] = is_paused

    def _stop_helper(self) -> None:
        """Kill the forked process that computes results ahead, if it runs."""
        if self._helper is not None:
            self._helper.end(time.perf_counter())
            self._helper = None


def _end_helper(helper: ForkedWorker | None, file: IO[bytes]) -> None:
    """Kill the forked process ``helper``, if there is one, and close ``file``, in which it keeps its results."""
    if helper is not None:
        helper.end(time.perf_counter())
    file.close()


class SharedTasks(Generic[K, R, S]):
    """The results of ``work(key)`` for each of ``keys``, which this process and a forked one compute together. The
    forked process does not see what this process changes later, so ``work`` must not depend on it.

    ``pack``: function that turns a result into an object that can be pickled, in the forked process; ``unpack``: the
    inverse, in this process. ``worth_it``: whether the work takes long enough for a forked process. ``most_s``: the
    most seconds that this process waits for a result that the forked process is computing. ``first_is_own``: whether
    the forked process leaves out the first key, whose result this process requests at once.
    """

    def __init__(
        self,
        keys: Sequence[K],
        work: Callable[[K], R],
        pack: Callable[[R], S],
        unpack: Callable[[S], R],
        *,
        worth_it: bool = True,
        most_s: float = _PATIENCE_S,
        first_is_own: bool = True,
    ) -> None:
        self.keys, self._work, self._unpack = keys, work, unpack
        self._found: dict[K, R] = {}
        self._aside: BackgroundWorker[K, S] | None = None
        for_both = keys[1:] if first_is_own else keys
        if worth_it and for_both and can_help():
            self._aside = BackgroundWorker(for_both, lambda key: pack(work(key)), most_s)

    def result(self, key: K) -> R:
        """Return the result for ``key``. If the forked process is computing it, compute other results in the meantime.
        Raise the exceptions of ``work``."""
        if self._aside is None or key in self._found:
            return self._found.pop(key) if key in self._found else self._work(key)
        while self._aside.works_on(key) and (other := self._aside.claim()) is not None:
            self._found[other] = self._work(other)
        found = self._aside.take(key)
        return self._work(key) if found is None else self._unpack(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop the forked process, and forget its results."""
        if self._aside is not None:
            self._aside.end()
            self._aside = None


class Future(Generic[R]):
    """The result of ``work()``. If ``worth_it`` is true and a process can be forked, the forked process computes the
    result ahead of time; otherwise the result is computed when it is requested.

    ``most_s``: the most seconds that the caller waits for the forked process, before it computes the result itself.
    """

    def __init__(self, work: Callable[[], R], *, worth_it: bool = True, most_s: float = 0.0) -> None:
        self._work = work
        help_s = most_s + _PATIENCE_S
        self._aside = BackgroundWorker([None], lambda _: work(), help_s) if worth_it and can_help() else None

    def result(self) -> R:
        """Return the result of the function ``work`` with which this object was created. If a forked process computes
        it, wait for that process. If there is none, or if it fails, compute the result here. Raise the exceptions of
        ``work``.
        """
        found = None if self._aside is None else self._aside.take(None)
        return self._work() if found is None else found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop the forked process that computes the result, and discard the result. This is for results that are not
        needed any more.
        """
        if self._aside is not None:
            self._aside.end()
