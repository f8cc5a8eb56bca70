"""Plan single candidates, for the search and for the candidates outside of it that are tried afterwards.

Plans that are slower than the best one so far are not pursued. A candidate is skipped if it cannot fit in memory,
because another one that differs only in ZeRO and needs no more memory did not fit.

Candidates that will probably be planned one after the other are announced, and then planned by two processes. For all
of them, the cutoff and the known placements are those at the time of the announcement. Therefore no result depends on
which process computes it, or on whether there is a second process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from partitioner.background import SharedTasks, has_processors
from partitioner.candidate import MeshCandidate
from partitioner.passes.errors import PartitionError
from partitioner.solve.evaluate.evaluator import CandidateEvaluator, PackedCandidate, SolvedCandidate
from partitioner.solve.search.best_first import ZeroInfeasibility
from partitioner.solve.search.bound_steps import BoundCascade
from partitioner.solve.search.outcomes import EvaluatedCandidate, solved_to_evaluated
from partitioner.solve.search.space import SearchSpace, estimate_interleaved_effort
from partitioner.solve.search.warm_start import WarmStart


def mesh_of(candidate: MeshCandidate) -> MeshCandidate:
    """Return a key that is equal for candidates with the same mesh and microbatch size: a copy of ``candidate`` in
    which schedule, virtual stages and ZeRO have fixed values."""
    return replace(candidate, schedule="", virtual_stages=1, zero=0, dp_shard=0)


def meshes_around(candidate: MeshCandidate) -> Iterator[MeshCandidate]:
    """Yield the meshes whose known placement (assignment of ranks to devices) can also be used for ``candidate``: its
    own mesh, then meshes with half of its ``cp`` and twice its ``tp`` or ``dp``. A mesh is given as a candidate with
    the same microbatch size; schedule, virtual stages and ZeRO have fixed values. ``candidate``: mesh sizes, microbatch
    size, schedule and ZeRO stage."""
    yield mesh_of(candidate)
    if candidate.cp % 2 == 0:
        for axis in ("tp", "dp"):
            yield mesh_of(replace(candidate, cp=candidate.cp // 2, **{axis: 2 * getattr(candidate, axis)}))


_ROUNDING = 1e-9  # of a step
_WORTH_S = 0.3  # expected processor seconds of announced evaluations from which a second process saves time
_PATIENCE_S = 60.0  # most seconds to wait for an evaluation by the second process


@dataclass(frozen=True)
class _Request:
    """A request to plan ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage). ``devices``: the device
    index of each rank; ``None``: the placement (assignment of ranks to devices) is searched. ``proven``: whether to
    compute a tight lower bound. ``bounded``: whether to compute lower bounds first, and to plan the candidate only if
    they are below the cutoff. ``cutoff_s``: plans that take at least this many seconds per step are of no interest."""

    candidate: MeshCandidate
    devices: tuple[int, ...] | None
    proven: bool
    bounded: bool
    cutoff_s: float


@dataclass(frozen=True)
class _Attempt:
    """The result of an attempt to plan a candidate. ``solved``: the plan, or ``None``. ``error``: the reason why there
    is no plan, or ``None``. If both are ``None``, the candidate was not planned, because ``least_s`` is not below the
    cutoff. ``least_s``: a lower bound in seconds on the step time of the candidate's plans. ``host_lacks``: whether the
    memory of a host was too small for the data that a candidate offloads."""

    solved: SolvedCandidate | None
    error: PartitionError | None
    least_s: float
    host_lacks: bool


_PackedAttempt = tuple[_Attempt, PackedCandidate | None]  # the plan is packed separately


@dataclass
class CandidateAttempts:
    """Plans and bounds the candidates (combinations of mesh sizes, microbatch size, schedule and ZeRO stage) of one
    search.

    ``evaluator``: plans single candidates. ``space``: the search space. ``bounds``: lower bounds on candidates.
    ``early``: the object that chooses the first candidates; each outcome is reported to it. ``siblings``: skips
    candidates that cannot fit because another candidate, which differs only in ZeRO, did not fit. ``best_s``: step time
    in seconds of the best plan so far, or the cutoff if there is none; slower plans are of no interest. ``devices``:
    key of a mesh -> the device index of each rank, for meshes whose placement is known."""

    evaluator: CandidateEvaluator
    space: SearchSpace
    bounds: BoundCascade
    early: WarmStart
    siblings: ZeroInfeasibility
    best_s: float
    devices: dict[MeshCandidate, tuple[int, ...]] = field(default_factory=dict)
    _announced: dict[MeshCandidate, _Request] = field(default_factory=dict)
    _tasks: SharedTasks[_Request, _Attempt, _PackedAttempt] | None = None
    _mean_s: float = 0.0  # processor seconds of an evaluation, the last ones weighted most

    def announce(self, candidates: Sequence[MeshCandidate], *, outside: bool = False) -> None:
        """Announce that ``candidates`` will probably be planned, in this order, so that two processes can plan them. An
        earlier announcement is withdrawn, unless it contains the first candidate. ``outside``: whether the candidates
        will be passed to :meth:`try_outside`; if not, to :meth:`evaluate`. A candidate is a combination of mesh sizes,
        microbatch size, schedule and ZeRO stage."""
        if candidates and candidates[0] in self._announced:
            return
        self.withdraw()
        build = self._build_outside_request if outside else self._build_request
        # the divisions of the batch that are tried for the others depend on earlier evaluations
        requests = [build(candidate) for candidate in candidates if self.evaluator.tries_all(candidate)]
        if len(requests) < 2:
            return
        self._announced = {request.candidate: request for request in requests}
        # the schedules of candidates outside the search have to be simulated, unlike those of most others
        worth_it = outside or self._mean_s * len(requests) >= _WORTH_S
        if worth_it and not has_processors(3):  # of this process, of that for evaluations, and of that for shardings
            self.evaluator.locals.ahead.pause()
        self._tasks = SharedTasks(
            requests, self._attempt, self._pack, self._unpack, worth_it=worth_it, most_s=_PATIENCE_S
        )

    def withdraw(self) -> None:
        """Withdraw the announcement of candidates, and stop the second process that plans them."""
        self._announced = {}
        if self._tasks is not None:
            self._tasks.end()
            self._tasks = None
            self.evaluator.locals.ahead.resume()

    def evaluate(self, candidate: MeshCandidate) -> EvaluatedCandidate:
        """Return the best plan of ``candidate``, with a tight lower bound on its plans. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage. Raises :class:`PartitionError` if there is no plan."""
        request = self._announced.get(candidate)
        if candidate in self.early.coming and (request is None or request.cutoff_s != self.best_s):
            self.withdraw()
            self.announce(self.early.coming[self.early.coming.index(candidate) :])
            request = self._announced.get(candidate)
        if request is None or request.bounded:
            request = self._build_request(candidate)
        found, _ = self._evaluate_request(request)
        assert found is not None, candidate  # only requests that compute bounds first may give no plan
        return found

    def try_outside(self, candidate: MeshCandidate) -> tuple[EvaluatedCandidate | None, float]:
        """Return two values: the best plan of ``candidate``, found without computing a tight lower bound, and a lower
        bound in seconds on the step times of its plans. If the bound shows that the plan is not faster than the best
        plan so far, the first value is ``None``. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        Raises :class:`PartitionError` if there is no plan.

        If devices are equal, the placement (assignment of ranks to devices) of a known plan is reused instead of a new
        search. The known plan has the same mesh, or half as many ranks along ``cp`` and twice as many along ``tp`` or
        ``dp``."""
        request = self._announced.get(candidate)
        if request is None or not request.bounded:
            request = self._build_outside_request(candidate)
        found, least_s = self._evaluate_request(request)
        if found is None:
            return None, least_s
        self.devices.setdefault(mesh_of(candidate), found.payload.devices)
        return (found if request.devices is None else replace(found, least=0.0)), least_s

    def remember_devices(self, solved: Iterable[EvaluatedCandidate]) -> None:
        """Store the placement (device of each rank) of the fastest plan of each mesh, so that other candidates with
        similar meshes can be planned on the same devices. ``solved``: plans of candidates."""
        for each in sorted(solved, key=lambda found: -found.step_time):
            self.devices[mesh_of(each.payload.candidate)] = each.payload.devices

    def can_prune(self, candidate: MeshCandidate, upper_bound_s: float) -> bool:
        return self.bounds.sharded.can_prune(candidate, upper_bound_s)

    def bound_tightly(self, candidate: MeshCandidate, upper_bound_s: float) -> float:
        return self.bounds.bound_tightly(candidate, upper_bound_s)

    def estimate_effort(self, candidate: MeshCandidate) -> float:
        return estimate_interleaved_effort(self.space, candidate)

    def _is_complete(self, candidate: MeshCandidate) -> bool:
        """Return whether the placements (assignments of ranks to devices) that are tried for ``candidate`` certainly
        include an optimal one."""
        return self.evaluator.placements.complete(candidate.grid)

    def _build_request(self, candidate: MeshCandidate) -> _Request:
        return _Request(candidate, None, self._is_complete(candidate), False, self.best_s)

    def _build_outside_request(self, candidate: MeshCandidate) -> _Request:
        """Return the request to plan ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage) only if its
        lower bounds are below the best step time so far.

        If devices are equal, the candidate is planned on the devices of a known plan with a similar mesh, if there is
        one. If devices differ, all placements are tried. The placement of a known plan need not be the best one of its
        mesh then: the search may have stopped looking once no placement could beat the best plan."""
        key = next((key for key in meshes_around(candidate) if key in self.devices), None)
        are_equal = self.evaluator.placements.nested(candidate.grid)
        devices = self.devices[key] if key is not None and are_equal else None
        return _Request(candidate, devices, False, True, self.best_s)

    def _evaluate_request(self, request: _Request) -> tuple[EvaluatedCandidate | None, float]:
        """Return two values: the plan that ``request`` asks for, and a lower bound in seconds on its step time. The
        plan is ``None`` if the bound is not below the cutoff. Raises :class:`PartitionError` if there is no plan."""
        candidate = request.candidate

        def solve(_: MeshCandidate) -> _Attempt:
            is_announced = self._tasks is not None and self._announced.get(candidate) is request
            attempt = self._tasks.result(request) if self._tasks and is_announced else self._attempt(request)
            self.evaluator.host_lacks |= attempt.host_lacks
            if attempt.error is not None:
                raise attempt.error
            return attempt

        try:
            attempt = self.siblings.tried(candidate, solve)
        except PartitionError as error:
            self.early.tell(candidate, error)
            raise
        if attempt.solved is None:
            return None, attempt.least_s
        found = solved_to_evaluated(attempt.solved)
        self.early.tell(candidate, found.step_time)
        self.best_s = min(self.best_s, found.step_time)
        partly, unsure = not self._is_complete(candidate), not self.evaluator.tries_all(candidate)
        # other placements of candidates with virtual stages are bounded tightly only if the plan is the best so far
        unsure |= candidate.virtual_stages > 1 and found.step_time > request.cutoff_s
        return replace(found, partly=partly, unsure=unsure), attempt.least_s

    def _attempt(self, request: _Request) -> _Attempt:
        """Return the outcome of ``request``, computed in this process. It does not depend on evaluations of other
        candidates."""
        candidate, least_s, start = request.candidate, 0.0, time.process_time()
        within_s = request.cutoff_s * (1 - _ROUNDING)
        solved, lacks = None, None
        try:
            if request.bounded:
                least_s = float(self.bounds.times([candidate])[0])
                least_s = max([least_s, *(bound([candidate], within_s) for bound in self.bounds.family_bounds)])
            if not request.bounded or least_s < within_s:
                solved = self.evaluator.solve(
                    candidate, request.devices, proven=request.proven, cutoff_s=request.cutoff_s
                )
        except PartitionError as error:
            lacks = error.with_traceback(None)
        self._mean_s = (self._mean_s + time.process_time() - start) / 2
        return _Attempt(solved, lacks, least_s, self.evaluator.host_lacks)

    def _pack(self, attempt: _Attempt) -> _PackedAttempt:
        packed = None if attempt.solved is None else self.evaluator.pack(attempt.solved)
        return replace(attempt, solved=None), packed

    def _unpack(self, packed: _PackedAttempt) -> _Attempt:
        attempt, solved = packed
        return attempt if solved is None else replace(attempt, solved=self.evaluator.unpack(solved))
