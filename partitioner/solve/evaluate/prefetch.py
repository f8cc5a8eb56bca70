"""Queue the shardings that a search will need, and results computed from them, for a second process to compute ahead.

No result depends on the second process: a result that it has not computed is computed when it is requested.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from partitioner.background import BackgroundWorker, can_help
from partitioner.candidate import Split
from partitioner.passes.errors import PartitionError
from partitioner.solve.sharding.sharding import ShardingSolution

_WORTH_S = 0.05  # processor seconds of sharding after which a second process is started

# tp, cp, microbatches of the batch, whether a rank has a single one, whether the batch is split for experts, and how
LocalKey = tuple[int, int, int, bool, bool, Split]  # the experts' work is sharded over tp
ProblemKey = tuple[int, int, int, bool, bool]  # a LocalKey without its last element
Wanted = tuple[LocalKey, int]  # a key, and the number of microbatches of a rank
Solutions = tuple[ShardingSolution | None, ShardingSolution]  # the shardings over cp and over tp
Reading = tuple[Hashable, LocalKey, Callable[[], Any]]  # a result: its name, the local model it needs, the function


class PrefetchQueue:
    """A queue of local models (sharded graphs of one rank) and of results that the search will need, which a second
    process computes ahead. ``solve``: function that solves the sharding of a local model, given its cache key and the
    number of microbatches of a rank. ``built``: cache key -> local model, for the models that exist already; the caller
    adds entries. The attribute ``spent_s``: processor seconds that the caller has spent on shardings so far; the second
    process is only started if sharding takes long."""

    def __init__(self, solve: Callable[[LocalKey, int], Solutions], built: Mapping[LocalKey, object]) -> None:
        self._solve, self._built, self.spent_s = solve, built, 0.0
        self._expected: dict[ProblemKey, dict[LocalKey, Wanted]] = {}
        self._readings: list[Iterable[Reading]] = []
        self._priorities: dict[ProblemKey, None] = {}  # in order
        self._worker: BackgroundWorker[Hashable, Any] | None = None
        self._known: dict[LocalKey, Solutions] = {}  # solutions that were computed ahead
        self._process_id = os.getpid()  # of the process that may direct the second one

    def expect(self, wanted: Iterable[Wanted], readings: Iterable[Reading] = ()) -> None:
        """Announce the local models and results that the search will request, approximately in order of use, so that a
        second process can compute them ahead if sharding takes long. ``wanted``: local models (sharded graphs of one
        rank), as pairs of a cache key and the number of microbatches of a rank. ``readings``: results that are computed
        from local models, as tuples (name of the result, cache key of the model, function that computes the result)."""
        for each in wanted:
            self._expected.setdefault(each[0][:5], {}).setdefault(each[0], each)
        self._readings.append(readings)

    def prioritise(self, wanted: Wanted) -> None:
        """Announce that a local model (the sharded graphs of one rank) will be needed soon, so that the second process
        computes it before all others that were announced. ``wanted``: pair of its cache key and the number of
        microbatches of a rank."""
        problem = wanted[0][:5]
        if problem not in self._priorities:
            self._priorities[problem] = None
            if self._worker is not None and os.getpid() == self._process_id:
                self._worker.wish(problem)

    def take_result(self, name: Hashable) -> Any | None:
        """Return the announced result with the key ``name`` if a second process has computed it; otherwise ``None``,
        and the caller has to compute the result."""
        if self._worker is None:
            return None
        if os.getpid() != self._process_id:
            return self._worker.take_if_done(name)
        return self._worker.take(name)

    def remember(self, key: LocalKey, solutions: Solutions) -> None:
        """Store the shardings of the local model (the sharded graphs of one rank) with the cache key ``key``, which
        another process has found. ``solutions``: the shardings over ``cp`` and over ``tp``."""
        self._known.setdefault(key, solutions)

    def pause(self) -> None:
        """Let the second process begin no further work until :meth:`resume` is called, to free its processor."""
        if self._worker is not None:
            self._worker.pause(True)

    def resume(self) -> None:
        """Let the second process go on after :meth:`pause`."""
        if self._worker is not None:
            self._worker.pause(False)

    def end(self) -> None:
        """Stop the second process that computes sharded graphs ahead, and forget which graphs and results were
        announced. The queue can be used again afterwards."""
        self._expected, self._readings, self._priorities = {}, [], {}
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def take_solutions(self, key: LocalKey) -> Solutions | None:
        """Return the shardings over ``cp`` and over ``tp`` of the local model (sharded graphs of one rank) with the
        cache key ``key`` if the second process has found them; otherwise ``None``. If the second process is still
        working on them, this process solves other announced problems in the meantime."""
        if key in self._known:
            return self._known[key]
        if os.getpid() != self._process_id:  # another fork must not take work from the second process
            return ((self._worker and self._worker.take_if_done(key[:5])) or {}).get(key)
        if self._worker is None and self._expected and self.spent_s > _WORTH_S and can_help():
            works = self._list_pending_work()
            if not works:
                return None
            self._worker = BackgroundWorker(list(works), lambda name: works[name]())
            for problem in self._priorities:
                self._worker.wish(problem)
        if self._worker is None:
            return None
        while self._worker.works_on(key[:5]):
            other = self._worker.claim(self._expected.keys())
            if other is None:
                break
            self._solve_problem(other)
        self._known |= self._worker.take(key[:5]) or {}
        return self._known.get(key)

    def _list_pending_work(self) -> dict[Hashable, Callable[[], Any]]:
        """Return the announced tasks that are not done: key of the task -> function that does it and returns the
        result, in order of use. Tasks are sharding problems and results that are computed from sharded graphs; each
        problem comes before its results.
        """
        left = [of for of, keys in self._expected.items() if not keys.keys() <= self._built.keys()]
        solve = {problem: partial(self._solve_problem, problem) for problem in left}
        works: dict[Hashable, Callable[[], Any]] = {}
        for name, key, read in chain.from_iterable(self._readings):
            if key[:5] in solve:
                works.setdefault(key[:5], solve[key[:5]])
            works[name] = partial(self._read_if_available, key, read)
        return works | {problem: solve[problem] for problem in left if problem not in works}

    def _solve_problem(self, problem: ProblemKey) -> dict[LocalKey, Solutions]:
        """Solve the sharding of all announced local models (sharded graphs of one rank) that belong to one sharding
        problem, and return cache key -> solutions over ``cp`` and over ``tp``. Models that cannot be sharded are left
        out. ``problem``: the part of the cache key that these models have in common."""
        found = {}
        for key, wanted in self._expected[problem].items():
            with suppress(PartitionError):  # the error is raised when the model is requested
                if key not in self._built:
                    found[key] = self._solve(*wanted)
        self._known |= found
        return found

    def _read_if_available(self, key: LocalKey, read: Callable[[], Any]) -> Any:
        if key not in self._known and key not in self._built:
            raise LookupError("its sharding is for the first process")
        return read()
