"""Processes on this machine that stand for ranks, kept alive from one run to the next."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runtime.errors import DIED, LEFT, LOST, Failure, LaunchError, RankError, RankTimeout, first_cause
from runtime.forkserver import Child, ForkServer, fork_server
from runtime.messages import get, put
from runtime.watch.monitor import Monitor

_START_S = 120.0  # for all ranks to have found each other
_GRACE_S = 0.3  # after the first failure: others may tell of an earlier one
_LATE_S = 5.0  # at most, to say where they are, after the time is out
_SETTLE_S = 2.0  # for the cause to show where ranks have only lost each other
_LOOK_S = 0.25  # between two looks at a run that is watched


class LocalRanks:
    """``num_ranks`` processes over Gloo, for programs of up to that many ranks.

    A context manager. They start on first use, and anew after a run that failed. ``debug``: check every collective for
    agreement before it runs (slow; names both sides of a mismatch).

    >>> with LocalRanks(2) as ranks:
    ...     pass  # run_local(plan, model, inputs, ranks=ranks)
    """

    def __init__(self, num_ranks: int, *, debug: bool = False) -> None:
        self.num_ranks = num_ranks
        self.debug = debug
        self._children: list[Child] = []
        self._server: ForkServer | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def call(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0, watch: Monitor | None = None
    ) -> list[Any]:
        """``function(*arguments)`` on every rank, inside the process group; what each returned.

        The function must be importable by name, and what it is given and returns be picklable. ``watch``: looks after
        ranks that run a :class:`runtime.Watch` in its folder; a run that stands still ends as one that failed, and the
        error names the cause among the ranks that wait.

        Raises :class:`RankError` with the first cause when a rank fails, :class:`RankTimeout` after ``timeout``
        seconds; all ranks are gone then. :class:`LaunchError` for a function of the script itself.
        """
        if getattr(function, "__module__", None) == "__main__":
            raise LaunchError(
                f"{getattr(function, '__name__', function)} is a function of the script that is run, which ranks do "
                "not import; expected one of a module: move it into a file of its own"
            )
        request = pickle.dumps((function, arguments))
        if not self._children:
            self._start(timeout)
        deadline = time.monotonic() + timeout
        try:
            for child in self._children:
                with contextlib.suppress(OSError):  # it has died, and is found to have below
                    put(child.connection, "call", request)
            return self._collect("done", deadline, timeout, watch)
        except BaseException:
            self.kill()
            raise

    def _start(self, timeout: float) -> None:
        self._server = fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        threads = max(1, (os.cpu_count() or 1) // self.num_ranks)
        arguments = {
            "world_size": self.num_ranks,
            "store": str(Path(self._folder.name, "store")),
            "threads": threads,
            "debug": self.debug,
            "timeout_s": max(timeout, _START_S),
            "path": sys.path,
        }
        try:
            for rank in range(self.num_ranks):
                self._children.append(self._server.fork({"rank": rank, **arguments}))
            self._collect("ready", time.monotonic() + _START_S, _START_S)
        except BaseException:
            self.kill()
            raise

    def _collect(self, kind: str, deadline: float, timeout: float, watch: Monitor | None = None) -> list[Any]:
        """What each rank answered, when all have."""
        waiting = set(range(self.num_ranks))
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        while waiting:
            left = deadline - time.monotonic()
            pause = min(left, _GRACE_S if failures else left if watch is None else _LOOK_S)
            answers = self._answers(waiting, pause)
            for rank, (answer, content) in answers.items():
                waiting.discard(rank)
                results[rank] = content
                if answer == "failed":
                    failures.append(Failure.from_data(content))
            if answers:
                continue
            if failures:
                break
            if watch is not None and (cause := watch.check()) is not None:
                failures.append(cause)
                break
            if left <= pause:
                raise RankTimeout(self._late(waiting, kind, timeout))
        if failures:
            raise RankError(self._explained(failures, watch), self.num_ranks)
        return [results[rank] for rank in range(self.num_ranks)]

    def _explained(self, failures: list[Failure], watch: Monitor | None) -> tuple[Failure, ...]:
        """The failures, with what the watch knows about the first: where a rank was when it was killed."""
        first = first_cause(tuple(failures))
        if watch is None:
            return tuple(failures)
        cause = watch.settle(_SETTLE_S, died=None if first.secondary else first.rank)
        if cause is None or (cause.kind in (LEFT, LOST) and not first.secondary):
            return tuple(failures)  # it ended before it could be watched
        if cause.kind == DIED and first.kind == DIED:
            cause = replace(cause, error=first.error)  # with the signal
        return (cause, *(f for f in failures if f.rank != cause.rank))

    def _answers(self, ranks: set[int], timeout: float) -> dict[int, tuple[str, Any]]:
        """What came in from ``ranks`` within ``timeout``; a rank that has died has failed."""
        connections = {id(self._children[r].connection): r for r in ranks}
        found: dict[int, tuple[str, Any]] = {}
        for ready in wait([self._children[r].connection for r in ranks], max(timeout, 0.0)):
            rank = connections[id(ready)]
            try:
                found[rank] = get(self._children[rank].connection)
            except (EOFError, OSError):
                found[rank] = "failed", self._death(rank).to_data()
        return found

    def _death(self, rank: int) -> Failure:
        assert self._server is not None
        for _ in range(20):
            status = self._server.status(self._children[rank].pid)
            if status is not None:
                break
            time.sleep(0.01)
        how = f"by signal {-status}" if status is not None and status < 0 else f"with status {status}"
        return Failure(rank, f"the process ended {how} and said nothing", DIED)

    def _late(self, ranks: set[int], kind: str, timeout: float) -> str:
        """What the ranks that have not answered are doing."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                put(self._children[rank].connection, "where")
        places: dict[int, str] = {}
        deadline = time.monotonic() + _LATE_S
        while len(places) < len(ranks) and time.monotonic() < deadline:
            for rank, (answer, content) in self._answers(ranks - set(places), deadline - time.monotonic()).items():
                places[rank] = str(content) if answer == "where" else answer
        told = "\n  ".join(f"rank {r}: {places.get(r, 'does not answer')}" for r in sorted(ranks))
        task = "start" if kind == "ready" else "finish"
        return f"{len(ranks)} of {self.num_ranks} ranks did not {task} within {timeout:g} s and were ended:\n  {told}"

    def kill(self) -> None:
        """End all ranks at once; the next run starts new ones."""
        children, self._children = self._children, []
        for child in children:
            child.kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def close(self) -> None:
        """Let the ranks leave, and make sure that they do."""
        for child in self._children:
            with contextlib.suppress(OSError):
                put(child.connection, "leave")
        for child in self._children:
            child.connection.poll(5.0)
        self.kill()
