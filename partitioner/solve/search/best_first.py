"""Best-first search over candidates: evaluate in order of lower bounds until no bound beats the incumbent.

Similar candidates form a family, and the lower bound of a family holds for each of its candidates. The bound is
tightened in steps, each taken only when the family is next in the queue: first an estimate of all candidates at once,
then the caller's bounds, cheapest first. After that, the candidates of the family are queued one by one. A candidate is
evaluated only after all steps.

``ZeroInfeasibility`` prunes candidates that differ from an infeasible one only in state sharding and hold more bytes of
states.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from partitioner.candidate import MeshCandidate, in_order
from partitioner.errors import CapacityError, ConstraintError, InfeasibleError, PlanError, TimeLimitError
from partitioner.passes.errors import PartitionError
from partitioner.plan import Certificate
from partitioner.schedules.formulas import is_formula, is_plain
from partitioner.solve.search.outcomes import CandidateOutcome, CutOff, EvaluatedCandidate, certificate_of

_TOLD_EVERY_S = 0.1  # between two words on points that are only bounded


class Bounds(Protocol):
    """Lower bounds in seconds on the plans of a point; see ``partitioner/solve/search/bound_steps.py``."""

    def times(self, points: Sequence[MeshCandidate]) -> NDArray[np.float64]:
        """Lower bounds in seconds on all points at once, shape ``[points]``."""

    def family(self, point: MeshCandidate) -> Hashable:
        """Key of the point's family, which includes the schedule."""

    def members(self, points: Sequence[MeshCandidate]) -> Sequence[MeshCandidate]:
        """All points of the family of ``points``, including those unknown to the estimate of all points at once."""

    @property
    def together(self) -> Sequence[Callable[[Sequence[MeshCandidate], float], float]]:
        """Bounds of a family; see :attr:`steps` for the arguments."""

    @property
    def steps(self) -> Sequence[Callable[[MeshCandidate, float], float]]:
        """Bounds of one point, to be tried in order. The second argument is a cutoff in seconds: a bound above it need
        not be exact. They raise :class:`PartitionError` if the point has no plan."""

    def again_s(self, point: MeshCandidate) -> float:
        """Approximate seconds of recomputation in a step; not a bound."""

    def shortage(self, point: MeshCandidate) -> CapacityError | None:
        """The exact shortage of a point for which a step gave only a lower bound."""


@dataclass(frozen=True)
class SearchProgress:
    """State of a search. ``best``: seconds of the incumbent. ``bound``: lower bound in seconds on ``point``.

    ``num_evaluated``: points evaluated so far. ``num_open``: points that may still be better. ``num_bounded``: bounds
    that were tightened.
    """

    num_evaluated: int
    num_open: int
    best: float | None
    bound: float
    point: MeshCandidate
    num_bounded: int = 0


@dataclass(frozen=True)
class SearchResult:
    """The best point, its plan, and its certificate. ``certificate`` and ``rows`` have a row for every point."""

    point: MeshCandidate
    best: EvaluatedCandidate
    certificate: Certificate
    num_evaluated: int
    interrupted: bool = False
    rows: Mapping[MeshCandidate, CandidateOutcome] = field(default_factory=dict)


@dataclass
class _BestFirstState:
    rows: dict[MeshCandidate, CandidateOutcome]
    best: MeshCandidate | None = None
    enough_s: float = float("inf")
    before: Mapping[MeshCandidate, CandidateOutcome] = field(default_factory=dict)
    num_evaluated: int = 0
    num_bounded: int = 0
    # since the last incumbent, of schedules with several virtual stages: evaluated families, and the effort spent
    in_vain: set[Hashable] = field(default_factory=set)
    spent: float = 0.0
    told: float = field(default_factory=time.monotonic)  # time of the last progress report

    @property
    def best_time(self) -> float:
        found = self.rows[self.best].evaluated if self.best is not None else None
        return found.step_time if found is not None else float("inf")

    @property
    def limit(self) -> float:  # plans from here on are of no interest
        return min(self.best_time, self.enough_s)


def search_best_first(
    points: Sequence[MeshCandidate],
    bounds: Bounds,
    evaluate: Callable[[MeshCandidate], EvaluatedCandidate],
    *,
    always: Iterable[MeshCandidate | None] = (),
    left_out: Mapping[MeshCandidate, str] | None = None,
    progress: Callable[[SearchProgress], None] | None = None,
    time_limit_s: float = float("inf"),
    tolerance: float = 0.0,
    patience: int | None = None,
    effort: Callable[[MeshCandidate], float] = lambda point: 0.0,
    in_vain: Callable[[MeshCandidate, float], bool] = lambda point, best_s: False,
    last: Callable[[MeshCandidate, float], float] | None = None,
    enough_s: float = float("inf"),
    before: Mapping[MeshCandidate, CandidateOutcome] | None = None,
) -> SearchResult:
    """The point of the least step time.

    Args:
        evaluate: plans a point; raises :class:`PartitionError` if it has no plan, which is recorded as the reason.
        always: points that are evaluated first, whatever their bounds, each before the next is requested.
        left_out: points that are no candidates but are reported, and the reasons.
        tolerance: stop when no bound is better than the incumbent by more than this share.
        patience: number of consecutive families with several virtual stages on a rank that may bring no better plan;
            then the search skips such families, and their bounds stay as they are. ``effort``: of such a point, as a
            share of all the effort that may be in vain.
        in_vain: whether ``evaluate`` would find no plan of a point that takes less than so many seconds, though its
            bound does not show it; then the point is not evaluated. Raises the exceptions of ``evaluate``.
        last: the tightest bound of a point; the second argument is a cutoff in seconds. Called if the least of all
            bounds belongs to a point that was not evaluated, or that was evaluated only ``partly``.
        enough_s: plans that take this long or longer are of no interest.
        before: the rows of an earlier search with fewer constraints, whose bounds hold here, too.
        progress: called before each evaluation, and from time to time between evaluations.
        time_limit_s: after it, or on ``KeyboardInterrupt``, the incumbent is returned, with its gap.

    Raises:
        CapacityError: no point fits in memory; the error of the point with the least shortage.
        PlanError: no point has a plan for other reasons, or none takes less than ``enough_s``.
    """
    deadline = time.monotonic() + time_limit_s
    first = bounds.times(points).tolist() if len(points) > 1 else [0.0] * len(points)  # only if there is a choice
    state = _BestFirstState(
        {p: CandidateOutcome(p, b) for p, b in zip(points, first, strict=True)}, enough_s=enough_s, before=before or {}
    )
    for which, old in state.before.items():
        if which in (left_out or {}):
            continue
        row = state.rows.setdefault(which, CandidateOutcome(which, old.bound))
        row.bound = max(row.bound, old.bound)
        if old.error is not None:
            _mark_infeasible(row, old.error)
    cut_off: CutOff | None = None
    try:
        for point in always:
            if point in state.rows and state.rows[point].evaluated is None:
                _evaluate_candidate(state, point, evaluate, progress)
        done = _best_first(state, bounds, evaluate, in_vain, progress, deadline, tolerance, patience, effort)
        done = (last is None or _tighten_least_bound(state, last, deadline)) and done
        cut_off = None if done else "time limit"
    except KeyboardInterrupt:
        if state.best is None:
            raise
        cut_off = "interruption"
    if state.best is None:
        raise _explain_no_plan(state, bounds, cut_off is not None)
    for point, reason in (left_out or {}).items():
        state.rows.setdefault(point, CandidateOutcome(point, 0.0, "infeasible", reason=reason))
    best = state.rows[state.best]
    assert best.evaluated is not None, state.best
    best.status = "chosen"
    certificate = certificate_of(state.rows.values(), state.best_time, cut_off)
    return SearchResult(state.best, best.evaluated, certificate, state.num_evaluated, cut_off is not None, state.rows)


def _best_first(
    state: _BestFirstState,
    bounds: Bounds,
    evaluate: Callable[[MeshCandidate], EvaluatedCandidate],
    in_vain: Callable[[MeshCandidate, float], bool],
    progress: Callable[[SearchProgress], None] | None,
    deadline: float,
    tolerance: float,
    patience: int | None,
    effort: Callable[[MeshCandidate], float],
) -> bool:
    """Run until no bound beats the incumbent. Returns ``False`` if time ran out.

    Schedules without a formula come after the others: their bounds are quick once a good plan is known.
    """
    rows, shared = state.rows, len(bounds.together)
    nodes = _group_open_families(state, bounds)
    unknown = list(dict.fromkeys(p for members in nodes for p in members if p not in rows))
    estimates = bounds.times(unknown).tolist() if unknown else []
    first = {p: row.bound for p, row in rows.items()} | dict(zip(unknown, estimates, strict=True))
    least = [min(first[p] for p in members) for members in nodes]
    # ties go to the lowest number, which is quick to compare; the last item is the next step
    heap = [(not is_formula(nodes[n][0].schedule), bound, n, 0) for n, bound in enumerate(least)]
    heapq.heapify(heap)
    while heap:
        later, bound, number, step = heapq.heappop(heap)
        members = nodes[number]
        several = not is_plain(members[0].schedule, members[0].virtual_stages)
        tired = patience is not None and (len(state.in_vain) >= patience or state.spent >= 1.0)
        enough = several and tired and state.best is not None
        if enough or bound >= state.limit * (1 - tolerance) or _were_in_vain(state, members):
            continue
        if time.monotonic() > deadline:
            return False
        alone = len(members) == 1
        if step == shared and not alone:
            for member in members:
                row = rows.setdefault(member, CandidateOutcome(member, bound))
                if row.is_open:
                    nodes.append([member])
                    heapq.heappush(heap, (later, max(bound, row.bound), len(nodes) - 1, step))
            continue
        last = state.limit == float("inf") and not heap  # no bound can prune the last one
        if alone and (last or step == shared + len(bounds.steps)):
            if several:
                state.in_vain.add(bounds.family(members[0]))
                state.spent += effort(members[0])
            if not _is_in_vain(state, members[0], in_vain):
                _evaluate_candidate(state, members[0], evaluate, progress, len(heap) + 1)
            continue
        state.num_bounded += 1
        if time.monotonic() > state.told + _TOLD_EVERY_S:
            _report_progress(state, members[0], progress, len(heap) + 1)
        tighter = _compute_next_bound(state, bounds, members, step)
        if tighter is not None:
            heapq.heappush(heap, (later, max(bound, tighter), number, step + 1))
    return True


def _group_open_families(state: _BestFirstState, bounds: Bounds) -> list[Sequence[MeshCandidate]]:
    """The families of the points, in order, without points that are closed."""
    families: dict[Hashable, list[MeshCandidate]] = {}
    for point in state.rows:
        families.setdefault(bounds.family(point), []).append(point)
    each = [sorted(points, key=in_order) for points in families.values()]
    nodes = [bounds.members(points) for points in sorted(each, key=lambda points: in_order(points[0]))]
    return [members for members in nodes if len(members) > 1 or state.rows[members[0]].is_open]


def _compute_next_bound(
    state: _BestFirstState, bounds: Bounds, members: Sequence[MeshCandidate], step: int
) -> float | None:
    """The bound of the next step, of a family or of one point; ``None`` if there is no plan."""
    of_family = len(bounds.together)
    known = [state.rows[point] for point in members if point in state.rows]
    rows = [row for row in known if row.is_open]
    try:
        if step < of_family:
            bound = bounds.together[step](members, state.limit)
        else:
            bound = bounds.steps[step - of_family](members[0], state.limit)
    except PartitionError as error:
        for row in rows:
            _mark_infeasible(row, error)
        return None
    for row in rows:
        row.bound = max(row.bound, bound)
    return bound


def _evaluate_candidate(
    state: _BestFirstState,
    point: MeshCandidate,
    evaluate: Callable[[MeshCandidate], EvaluatedCandidate],
    progress: Callable[[SearchProgress], None] | None,
    num_open: int = 0,
) -> None:
    row = state.rows[point]
    _report_progress(state, point, progress, num_open or len(state.rows))
    state.num_evaluated += 1
    try:
        row.evaluated = evaluate(point)
    except PartitionError as error:
        _mark_infeasible(row, error)
        return
    found = row.evaluated
    row.status, row.loose = "solved", found.partly or found.unsure
    row.bound = min(max(row.bound, 0.0 if found.partly else found.least_s), found.step_time)
    if found.step_time < state.best_time:
        state.best = point
        state.in_vain.clear()
        state.spent = 0.0


def _were_in_vain(state: _BestFirstState, members: Sequence[MeshCandidate]) -> bool:
    """Whether the earlier search showed that no point is better than the incumbent; then the points' bounds stay as
    they are."""
    found = [state.before.get(point) for point in members] if state.before else [None]
    if not all(row is not None and row.least_s >= state.limit for row in found):
        return False
    for row in found:
        if row is not None and row.error is None:
            here = state.rows[row.point]
            here.loose, here.in_vain_s = row.loose, row.least_s
    return True


def _is_in_vain(state: _BestFirstState, point: MeshCandidate, in_vain: Callable[[MeshCandidate, float], bool]) -> bool:
    """Whether a point need not be evaluated; then its bound stays as it is."""
    row = state.rows[point]
    try:
        if state.limit == float("inf") or not in_vain(point, state.limit):
            return False
        row.loose, row.in_vain_s = True, state.limit
        return True
    except PartitionError as error:
        _mark_infeasible(row, error)
        return True


def _tighten_least_bound(
    state: _BestFirstState, last: Callable[[MeshCandidate, float], float], deadline: float
) -> bool:
    """Make the least of all bounds as tight as possible. Returns ``False`` if time ran out."""
    while state.best is not None:
        row = min((row for row in state.rows.values() if row.says), key=lambda row: row.bound, default=None)
        if row is None or not row.loose or row.bound >= state.best_time:
            break
        if time.monotonic() > deadline:
            return False
        row.loose = False
        found = row.evaluated
        try:
            tighter = last(row.point, state.best_time)
        except PartitionError as error:
            if found is None:
                _mark_infeasible(row, error)
            continue
        row.bound = max(row.bound, tighter if found is None else min(tighter, found.step_time))
    return True


def _report_progress(
    state: _BestFirstState, point: MeshCandidate, progress: Callable[[SearchProgress], None] | None, num_open: int
) -> None:
    state.told = time.monotonic()
    if progress is not None:
        best = state.best_time if state.best is not None else None
        bound = state.rows[point].bound
        progress(SearchProgress(state.num_evaluated, num_open, best, bound, point, state.num_bounded))


def _mark_infeasible(row: CandidateOutcome, error: PartitionError) -> None:
    row.status, row.error = "infeasible", error.with_traceback(None)  # the traceback holds all tables
    row.reason = error.shortage if isinstance(error, CapacityError) else str(error)


def _explain_no_plan(state: _BestFirstState, bounds: Bounds, interrupted: bool) -> InfeasibleError:
    """The error that explains why no point has a plan."""
    if any(row.is_open for row in state.rows.values()) and state.enough_s < float("inf"):
        return PlanError(f"no plan takes less than {state.enough_s:.3g} s a step")
    if interrupted:  # the other points may have plans
        return TimeLimitError(
            "the time limit passed before any plan was found; allow more time or fix more constraints"
        )
    short = {row.point: row.error for row in state.rows.values() if isinstance(row.error, CapacityError)}
    while short:
        point, error = min(short.items(), key=lambda item: (item[1].missing_bytes, item[1].at_least))
        if not error.at_least:
            return error
        short[point] = bounds.shortage(point) or CapacityError(error.shortage, missing_bytes=error.missing_bytes)
    errors = [row.error for row in state.rows.values()]
    if all(isinstance(error, ConstraintError) for error in errors):
        return ConstraintError(str(errors[0]))
    reasons = list(dict.fromkeys(row.reason for row in state.rows.values() if row.reason))
    return PlanError(f"none of the {len(state.rows)} candidates has a plan: {'; '.join(reasons[:3])}")


Found = TypeVar("Found")


@dataclass
class ZeroInfeasibility:
    """``state_bytes``: of a rank. All else that a rank of several virtual stages holds is the same under ZeRO 0 to 2;
    under ZeRO-3 weights are gathered besides. Only for schedules that are followed, whose stages take long to find."""

    state_bytes: Callable[[MeshCandidate], float]
    _refused: dict[MeshCandidate, list[tuple[MeshCandidate, CapacityError]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def tried(self, point: MeshCandidate, solve: Callable[[MeshCandidate], Found]) -> Found:
        """What ``solve`` finds. Raises :class:`CapacityError` where it does, and where it did for a sibling that takes
        no more."""
        if is_plain(point.schedule, point.virtual_stages):
            return solve(point)
        family = replace(point, zero=0, dp_shard=0)
        for other, error in self._refused[family]:
            if (other.zero == 3) == (point.zero == 3) and self.state_bytes(other) <= self.state_bytes(point):
                raise CapacityError(error.shortage, missing_bytes=error.missing_bytes, at_least=True)
        try:
            return solve(point)
        except CapacityError as error:
            self._refused[family].append((point, error.with_traceback(None)))
            raise
