"""Search candidates best-first: evaluate them in order of lower bounds until no bound is below the best plan's step
time.

Candidates that differ in ZeRO alone form a family, and the lower bound of a family holds for each of its candidates.
The bound is tightened in steps, each taken only when the family is next in the queue: first an estimate of all
candidates at once, then the caller's bounds, cheapest first. After that, the candidates of the family are queued one by
one. A candidate is evaluated only after all steps.

``ZeroInfeasibility`` skips candidates that differ from an infeasible one only in ZeRO and need at least as much memory.
"""

from __future__ import annotations

import heapq
import math
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
from partitioner.units import format_html_figures, seconds_text

_TOGETHER = 3  # candidates that are announced together
_TOLD_EVERY_S = 0.1  # least seconds between two progress reports without an evaluation


class Bounds(Protocol):
    """Interface of the object that gives the search lower bounds, in seconds, on the step times of a candidate's plans.
    A candidate is a combination of mesh sizes, microbatch size, schedule and ZeRO stage."""

    def times(self, candidates: Sequence[MeshCandidate]) -> NDArray[np.float64]:
        """Return a lower bound in seconds on the step time of each of ``candidates``, shape ``[candidates]``.
        ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage.
        """

    def family(self, candidate: MeshCandidate) -> Hashable:
        """Return a key that is equal for candidates that share their first lower bounds (a family), such as those that
        differ only in ZeRO. Candidates with equal keys have the same schedule. ``candidate``: mesh sizes, microbatch
        size, schedule and ZeRO stage.
        """

    def members(self, candidates: Sequence[MeshCandidate]) -> Sequence[MeshCandidate]:
        """Return all candidates of the family of ``candidates``, which are some members of one family. A family is the
        candidates (mesh sizes, microbatch size, schedule and ZeRO stage) that share their first lower bounds. The
        result may contain candidates that are new to the search."""

    @property
    def family_bounds(self) -> Sequence[Callable[[Sequence[MeshCandidate], float], float]]:
        """Return the functions that compute a lower bound in seconds on the step time of every member of a family, from
        the quickest to the tightest. A family is candidates (mesh sizes, microbatch size, schedule, ZeRO stage) that
        share their first bounds. The arguments of each function are the candidates of the family and a cutoff in
        seconds; a bound above the cutoff need not be exact."""

    @property
    def candidate_bounds(self) -> Sequence[Callable[[MeshCandidate, float], float]]:
        """Return the functions that compute a lower bound in seconds on the step time of one candidate (mesh sizes,
        microbatch size, schedule and ZeRO stage), from the quickest to the tightest. The arguments of each function are
        the candidate and a cutoff in seconds; a bound above the cutoff need not be exact. The functions raise
        :class:`PartitionError` if the candidate has no plan."""

    def estimate_times(self, candidates: Sequence[MeshCandidate]) -> NDArray[np.float64]:
        """Return approximate lower bounds in seconds on the step times of candidates that the search has not bounded,
        shape ``[candidates]``, from results for similar candidates. ``candidates``: combinations of mesh sizes,
        microbatch size, schedule and ZeRO stage.
        """

    def announce(self, candidates: Sequence[MeshCandidate]) -> None:
        """Announce that bounds of ``candidates``, which the search itself has not bounded, will be requested, so that
        they can be computed ahead. ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO
        stage, the most promising first."""

    def again_s(self, candidate: MeshCandidate, *, quick: bool = False) -> float:
        """Return approximately how many seconds of a step of ``candidate`` the recomputation of activations takes. This
        is an estimate and not a bound; it helps to choose what to try next. ``quick``: whether to estimate without
        sharding the model. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""

    def shortage(self, candidate: MeshCandidate) -> CapacityError | None:
        """Return the exact memory shortage of a candidate for which only a lower bound on the missing bytes is known;
        ``None`` if it cannot be computed. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """


@dataclass(frozen=True)
class SearchProgress:
    """The state of a running search for the best plan, for progress reports.

    ``num_evaluated``: candidates evaluated so far. ``num_open``: entries of the search's queue (candidates, or families
    of them) that may still be better than the best plan. ``best``: step time in seconds of the best plan so far;
    ``None`` if there is no plan yet. ``candidate``: the candidate that is processed now. ``bound``: the lower bound in
    seconds on its step time. ``num_bounded``: how many bounds were tightened so far.
    """

    num_evaluated: int
    num_open: int
    best: float | None
    bound: float
    candidate: MeshCandidate
    num_bounded: int = 0

    def __repr__(self) -> str:
        return f"SearchProgress({', '.join(f'{name}={value}' for name, value in self._list_figures())})"

    def _repr_html_(self) -> str:
        """Return the HTML by which a notebook displays this progress report of a search: its numbers with their
        names."""
        return format_html_figures("Search in progress", self._list_figures())

    def _list_figures(self) -> list[tuple[str, str]]:
        """Return the numbers that this progress report of a search shows, as pairs (name, number as text)."""
        return [
            ("solved", f"{self.num_evaluated:,}"),
            ("bounds", f"{self.num_bounded:,}"),
            ("open", f"{self.num_open:,}"),
            ("best", "none yet" if self.best is None else seconds_text(self.best)),
            ("bound", seconds_text(self.bound)),
            ("candidate", " × ".join(f"{axis} {n}" for axis, n in self.candidate.mesh.items() if n > 1) or "one rank"),
        ]


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the best candidate (mesh sizes, microbatch size, schedule and ZeRO stage), its plan
    (``best``), and the certificate, which says how near the plan is to the optimum. ``num_evaluated``: number of
    candidates that were evaluated. ``rows``: candidate -> its outcome (solved, pruned by a bound, or infeasible).
    ``interrupted``: whether the search ended early, at its time limit or by ``KeyboardInterrupt``."""

    candidate: MeshCandidate
    best: EvaluatedCandidate
    certificate: Certificate
    num_evaluated: int
    interrupted: bool = False
    rows: Mapping[MeshCandidate, CandidateOutcome] = field(default_factory=dict)


class CandidatePlanner(Protocol):
    """Interface of the object by which the search plans single candidates (combinations of mesh sizes, microbatch size,
    schedule and ZeRO stage) and computes its tightest lower bounds on them."""

    def announce(self, candidates: Sequence[MeshCandidate]) -> None:
        """Announce that ``candidates`` (combinations of mesh sizes, microbatch size, schedule and ZeRO stage) will
        probably be evaluated, in this order, so that several of them may be planned at the same time."""

    def evaluate(self, candidate: MeshCandidate) -> EvaluatedCandidate:
        """Return the best plan of ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage), with its step
        time. Raises :class:`PartitionError` if the candidate has no plan."""

    def can_prune(self, candidate: MeshCandidate, upper_bound_s: float) -> bool:
        """Return whether ``candidate`` can be skipped, because an evaluation would probably find no plan that takes
        less than ``upper_bound_s`` seconds. This need not be proven, so the caller keeps its lower bounds.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage. Raises :class:`PartitionError` if the
        candidate has no plan."""

    def bound_tightly(self, candidate: MeshCandidate, upper_bound_s: float) -> float:
        """Return the tightest lower bound in seconds on the step times of the candidate's plans. The computation may
        stop when the bound reaches ``upper_bound_s`` seconds. ``candidate``: mesh sizes, microbatch size, schedule and
        ZeRO stage.
        """

    def estimate_effort(self, candidate: MeshCandidate) -> float:
        """Return the effort of evaluating ``candidate``, which has several virtual stages on a rank, as a fraction of a
        budget. The budget limits how much the search spends on such candidates without finding a better plan: when the
        sum of the fractions reaches 1, the search skips the other such candidates. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage."""


@dataclass
class BestFirstSearch:
    """Branch and bound over candidates. It finds the candidate with the least step time and a certificate, which says
    how near the plan is to the optimum.

    ``tolerance``: stop when no bound is better than the best plan by more than this fraction. ``patience``: after this
    many consecutive groups of candidates with several virtual stages on a rank have brought no better plan, the search
    skips further groups and keeps their bounds; ``None``: no limit. ``cutoff_s``: plans that take at least this many
    seconds are of no interest. ``time_limit_s``: after this time, or on ``KeyboardInterrupt``, the best plan so far is
    returned with its gap. ``progress``: called before each evaluation, and from time to time between evaluations.
    ``bounds``, ``planner``: compute lower bounds and plans of candidates. ``outcomes``: candidate -> its outcome
    (solved, pruned by a bound, or infeasible). ``incumbent``: the candidate with the best plan so far."""

    bounds: Bounds
    planner: CandidatePlanner
    progress: Callable[[SearchProgress], None] | None = None
    time_limit_s: float = math.inf
    tolerance: float = 0.0
    patience: int | None = None
    cutoff_s: float = math.inf

    outcomes: dict[MeshCandidate, CandidateOutcome] = field(default_factory=dict, init=False)
    incumbent: MeshCandidate | None = field(default=None, init=False)
    _before: Mapping[MeshCandidate, CandidateOutcome] = field(default_factory=dict, init=False)
    _num_evaluated: int = field(default=0, init=False)
    _num_bounded: int = field(default=0, init=False)
    # since the best plan was found, for several virtual stages on a rank: evaluated families, and the effort spent
    _fruitless: set[Hashable] = field(default_factory=set, init=False)
    _spent: float = field(default=0.0, init=False)
    _reported: float = field(default_factory=time.monotonic, init=False)  # time of the last progress report

    @property
    def incumbent_s(self) -> float:
        """Return the step time in seconds of the best plan so far; infinite if there is none."""
        found = self.outcomes[self.incumbent].evaluated if self.incumbent is not None else None
        return found.step_time if found is not None else math.inf

    @property
    def upper_bound_s(self) -> float:
        """Return the smaller of the best step time so far and ``cutoff_s``, in seconds. The search prunes a candidate
        if the lower bound on its step time reaches this number.
        """
        return min(self.incumbent_s, self.cutoff_s)

    def run(
        self,
        candidates: Sequence[MeshCandidate],
        *,
        always: Iterable[MeshCandidate | None] = (),
        left_out: Mapping[MeshCandidate, str] | None = None,
        before: Mapping[MeshCandidate, CandidateOutcome] | None = None,
    ) -> SearchResult:
        """Search ``candidates`` and return the best one with its plan. Can be called once for each search object.

        Args:
            candidates: combinations of mesh sizes, microbatch size, schedule and ZeRO stage.
            always: candidates that are evaluated first, whatever their bounds. Each is evaluated before the next one is
                taken from the iterable, so the iterable may choose the next one by the result. ``None``, and candidates
                that are not among ``candidates``, are ignored.
            left_out: candidate -> reason, for candidates that are reported but not searched.
            before: candidate -> its outcome in an earlier search with fewer constraints, whose bounds are also valid in
                this search.

        Raises :class:`CapacityError` if no candidate fits in memory (the error of the candidate that lacks the fewest
        bytes), and :class:`PlanError` if no candidate has a plan for other reasons, or if none takes less than
        ``cutoff_s``."""
        deadline = time.monotonic() + self.time_limit_s
        self._open_candidates(candidates, left_out or {}, before or {})
        cut_off: CutOff | None = None
        try:
            for candidate in always:
                if candidate in self.outcomes and self.outcomes[candidate].evaluated is None:
                    self._evaluate_candidate(candidate)
            done = self._branch_and_bound(deadline)
            done = self._tighten_least_bound(deadline) and done
            cut_off = None if done else "time limit"
        except KeyboardInterrupt:
            if self.incumbent is None:
                raise
            cut_off = "interruption"
        if self.incumbent is None:
            raise self._explain_no_plan(cut_off is not None)
        for candidate, reason in (left_out or {}).items():
            self.outcomes.setdefault(candidate, CandidateOutcome(candidate, 0.0, "infeasible", reason=reason))
        best = self.outcomes[self.incumbent]
        assert best.evaluated is not None, self.incumbent
        best.status = "chosen"
        certificate = certificate_of(self.outcomes.values(), self.incumbent_s, cut_off)
        return SearchResult(
            self.incumbent, best.evaluated, certificate, self._num_evaluated, cut_off is not None, self.outcomes
        )

    def _open_candidates(
        self,
        candidates: Sequence[MeshCandidate],
        left_out: Mapping[MeshCandidate, str],
        before: Mapping[MeshCandidate, CandidateOutcome],
    ) -> None:
        """Create an outcome, the search's record of a candidate, for each of ``candidates`` (combinations of mesh
        sizes, microbatch size, schedule and ZeRO stage), with its quickest lower bound. ``before``: candidate -> its
        outcome in an earlier search, from which bounds and errors are taken over. ``left_out``: candidate -> reason,
        for candidates that are reported but not searched."""
        is_choice = len(candidates) > 1
        first = self.bounds.times(candidates).tolist() if is_choice else [0.0] * len(candidates)
        self.outcomes = {c: CandidateOutcome(c, bound) for c, bound in zip(candidates, first, strict=True)}
        self._before = before
        for candidate, old in before.items():
            if candidate in left_out:
                continue
            row = self.outcomes.setdefault(candidate, CandidateOutcome(candidate, old.bound))
            row.bound = max(row.bound, old.bound)
            if old.error is not None:
                _mark_infeasible(row, old.error)

    def _branch_and_bound(self, deadline: float) -> bool:
        """Tighten bounds and evaluate candidates until no lower bound is below the best step time. Return ``True`` if
        the search was completed, and ``False`` if time ran out. ``deadline``: end of the search on the clock of
        :func:`time.monotonic`.

        Schedules that have to be simulated come after the others, because their bounds are quick once a good plan is
        known."""
        rows, num_family_bounds = self.outcomes, len(self.bounds.family_bounds)
        nodes = self._group_open_families()
        unknown = list(dict.fromkeys(c for members in nodes for c in members if c not in rows))
        estimates = self.bounds.times(unknown).tolist() if unknown else []
        first = {c: row.bound for c, row in rows.items()} | dict(zip(unknown, estimates, strict=True))
        least = [min(first[c] for c in members) for members in nodes]
        # (simulated, bound, number of the node, next step); equal bounds are ordered by number
        queue = [(not is_formula(nodes[n][0].schedule, nodes[n][0].pp), bound, n, 0) for n, bound in enumerate(least)]
        heapq.heapify(queue)
        while queue:
            later, bound, number, step = heapq.heappop(queue)
            members = nodes[number]
            if self._is_skipped(members[0]) or bound >= self.upper_bound_s * (1 - self.tolerance):
                continue
            if self._were_pruned_before(members):
                continue
            if time.monotonic() > deadline:
                return False
            alone = len(members) == 1
            if step == num_family_bounds and not alone:
                for member in members:
                    row = rows.setdefault(member, CandidateOutcome(member, bound))
                    if row.is_open:
                        nodes.append([member])
                        heapq.heappush(queue, (later, max(bound, row.bound), len(nodes) - 1, step))
                continue
            last = self.upper_bound_s == math.inf and not queue  # no bound can prune the last candidate
            if alone and (last or step == num_family_bounds + len(self.bounds.candidate_bounds)):
                if _has_virtual_stages(members[0]):
                    self._fruitless.add(self.bounds.family(members[0]))
                    self._spent += self.planner.estimate_effort(members[0])
                if not self._can_prune(members[0]):
                    following = (nodes[n] for _, _, n, done in heapq.nsmallest(_TOGETHER - 1, queue) if done >= step)
                    self.planner.announce([members[0], *(of[0] for of in following if len(of) == 1)])
                    self._evaluate_candidate(members[0], len(queue) + 1)
                continue
            self._num_bounded += 1
            if time.monotonic() > self._reported + _TOLD_EVERY_S:
                self._report_progress(members[0], len(queue) + 1)
            tighter = self._compute_next_bound(members, step)
            if tighter is not None:
                heapq.heappush(queue, (later, max(bound, tighter), number, step + 1))
        return True

    def _is_skipped(self, candidate: MeshCandidate) -> bool:
        """Return whether the search skips ``candidate`` without evaluating it, because it has several virtual stages on
        a rank, a plan is known, and as many such candidates as allowed were tried without finding a better plan.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        if self.patience is None or self.incumbent is None or not _has_virtual_stages(candidate):
            return False
        return len(self._fruitless) >= self.patience or self._spent >= 1.0

    def _group_open_families(self) -> list[Sequence[MeshCandidate]]:
        """Return the candidates of the search as a list of families in a fixed order. The candidates of a family share
        their first lower bounds, such as those that differ only in ZeRO. A family of a single candidate that is already
        evaluated or has no plan is left out."""
        families: dict[Hashable, list[MeshCandidate]] = {}
        for candidate in self.outcomes:
            families.setdefault(self.bounds.family(candidate), []).append(candidate)
        each = [sorted(members, key=in_order) for members in families.values()]
        nodes = [self.bounds.members(members) for members in sorted(each, key=lambda members: in_order(members[0]))]
        return [members for members in nodes if len(members) > 1 or self.outcomes[members[0]].is_open]

    def _compute_next_bound(self, members: Sequence[MeshCandidate], step: int) -> float | None:
        """Compute the next, tighter lower bound on the step time of ``members``, store it in their outcomes, and return
        it in seconds; ``None`` if the computation shows that there is no plan. ``members``: a family, whose candidates
        (mesh sizes, microbatch size, schedule, ZeRO stage) share their first bounds, or a single candidate. ``step``:
        index of the bound in the list of bounds for families, followed by those for single candidates.
        """
        num_family_bounds = len(self.bounds.family_bounds)
        known = [self.outcomes[candidate] for candidate in members if candidate in self.outcomes]
        rows = [row for row in known if row.is_open]
        try:
            if step < num_family_bounds:
                bound = self.bounds.family_bounds[step](members, self.upper_bound_s)
            else:
                bound = self.bounds.candidate_bounds[step - num_family_bounds](members[0], self.upper_bound_s)
        except PartitionError as error:
            for row in rows:
                _mark_infeasible(row, error)
            return None
        for row in rows:
            row.bound = max(row.bound, bound)
        return bound

    def _evaluate_candidate(self, candidate: MeshCandidate, num_open: int = 0) -> None:
        """Plan ``candidate``, and store its plan, or the reason why it has none, in its outcome. ``num_open``: number
        of queue entries, for the progress report. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        row = self.outcomes[candidate]
        self._report_progress(candidate, num_open or len(self.outcomes))
        self._num_evaluated += 1
        try:
            row.evaluated = self.planner.evaluate(candidate)
        except PartitionError as error:
            _mark_infeasible(row, error)
            return
        found = row.evaluated
        row.status, row.loose = "solved", found.partly or found.unsure
        row.bound = min(max(row.bound, 0.0 if found.partly else found.lower_bound_s), found.step_time)
        if found.step_time < self.incumbent_s:
            self.incumbent = candidate
            self._fruitless.clear()
            self._spent = 0.0

    def _were_pruned_before(self, members: Sequence[MeshCandidate]) -> bool:
        """Return whether an earlier search found, for each of ``members``, that it has no plan or takes at least the
        step time of the best plan so far. If so, these step times are stored in the outcomes of ``members``, and no new
        bounds need be computed. ``members``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage."""
        found = [self._before.get(candidate) for candidate in members] if self._before else [None]
        if not all(row is not None and row.lower_bound_s >= self.upper_bound_s for row in found):
            return False
        for row in found:
            if row is not None and row.error is None:
                here = self.outcomes[row.candidate]
                here.loose, here.pruned_s = row.loose, row.lower_bound_s
        return True

    def _can_prune(self, candidate: MeshCandidate) -> bool:
        """Return whether ``candidate`` need not be evaluated, because it has no plan, or because an evaluation is
        expected to find no better plan than the best one. In the second case nothing was proven, so the candidate's
        lower bound is kept. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        row = self.outcomes[candidate]
        try:
            if self.upper_bound_s == math.inf or not self.planner.can_prune(candidate, self.upper_bound_s):
                return False
            row.loose, row.pruned_s = True, self.upper_bound_s
            return True
        except PartitionError as error:
            _mark_infeasible(row, error)
            return True

    def _tighten_least_bound(self, deadline: float) -> bool:
        """Tighten the least of all lower bounds as long as that is possible, since it is the bound of the certificate
        (how near the plan is to the optimum). Return ``False`` if time ran out, otherwise ``True``. ``deadline``: end
        of the search on the clock of :func:`time.monotonic`."""
        while self.incumbent is not None:
            row = min((row for row in self.outcomes.values() if row.says), key=lambda row: row.bound, default=None)
            if row is None or not row.loose or row.bound >= self.incumbent_s:
                break
            if time.monotonic() > deadline:
                return False
            row.loose = False
            found = row.evaluated
            try:
                tighter = self.planner.bound_tightly(row.candidate, self.incumbent_s)
            except PartitionError as error:
                if found is None:
                    _mark_infeasible(row, error)
                continue
            row.bound = max(row.bound, tighter if found is None else min(tighter, found.step_time))
        return True

    def _report_progress(self, candidate: MeshCandidate, num_open: int) -> None:
        """Call the progress function with the state of the search. ``candidate``: the candidate (mesh sizes, microbatch
        size, schedule and ZeRO stage) that is processed now. ``num_open``: number of queue entries that may still be
        better.
        """
        self._reported = time.monotonic()
        if self.progress is not None:
            best = self.incumbent_s if self.incumbent is not None else None
            bound = self.outcomes[candidate].bound
            self.progress(SearchProgress(self._num_evaluated, num_open, best, bound, candidate, self._num_bounded))

    def _explain_no_plan(self, interrupted: bool) -> InfeasibleError:
        """Return the error that explains why no candidate has a plan. ``interrupted``: whether the search ended before
        it had looked at all candidates."""
        rows = self.outcomes
        if any(row.is_open for row in rows.values()) and self.cutoff_s < math.inf:
            return PlanError(f"no plan takes less than {self.cutoff_s:.3g} s per step; allow a longer step")
        if interrupted:  # the other candidates may have plans
            return TimeLimitError(
                "the time limit passed before any plan was found; allow more time or fix more constraints"
            )
        short = {row.candidate: row.error for row in rows.values() if isinstance(row.error, CapacityError)}
        while short:
            candidate, error = min(short.items(), key=lambda item: (item[1].missing_bytes, item[1].at_least))
            if not error.at_least:
                return error
            known = CapacityError(error.shortage, missing_bytes=error.missing_bytes)
            short[candidate] = self.bounds.shortage(candidate) or known
        errors = [row.error for row in rows.values()]
        if all(isinstance(error, ConstraintError) for error in errors):
            return ConstraintError(str(errors[0]))
        reasons = list(dict.fromkeys(row.reason for row in rows.values() if row.reason))
        return PlanError(f"none of the {len(rows)} candidates has a plan: {'; '.join(reasons[:3])}")


def _has_virtual_stages(candidate: MeshCandidate) -> bool:
    """Return whether a rank of ``candidate`` has several stages, or the number of microbatches in flight on it has no
    closed formula. Such candidates take long to evaluate, so the search limits their number. ``candidate``: mesh sizes,
    microbatch size, schedule and ZeRO stage.
    """
    return not is_plain(candidate.schedule, candidate.virtual_stages)


def _mark_infeasible(row: CandidateOutcome, error: PartitionError) -> None:
    row.status, row.error = "infeasible", error.with_traceback(None)  # the traceback holds all tables
    row.reason = error.shortage if isinstance(error, CapacityError) else str(error)


Found = TypeVar("Found")


@dataclass
class ZeroInfeasibility:
    """Skips candidates (combinations of mesh sizes, microbatch size, schedule and ZeRO stage) that cannot fit in
    memory, because another candidate did not fit that differs only in ZeRO and needs no more bytes for parameters,
    gradients and optimizer states. ``state_bytes``: function that returns these bytes on a rank of a candidate.

    This rule applies only to schedules with several stages on a rank or without a formula, whose stages take long to
    solve. ZeRO-3 is compared only with ZeRO-3, because it also needs memory for gathered weights."""

    state_bytes: Callable[[MeshCandidate], float]
    _refused: dict[MeshCandidate, list[tuple[MeshCandidate, CapacityError]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def tried(self, candidate: MeshCandidate, solve: Callable[[MeshCandidate], Found]) -> Found:
        """Return ``solve(candidate)``, the plan of ``candidate``. ``candidate``: mesh sizes, microbatch size, schedule
        and ZeRO stage. Raises the :class:`CapacityError` of ``solve`` if the plan does not fit in memory.

        If an earlier candidate that differs only in ZeRO and needs no more memory did not fit, ``solve`` is not called,
        and the error of the earlier candidate is raised again. This is checked only for schedules with several stages
        on a rank or without a formula for the step time."""
        if is_plain(candidate.schedule, candidate.virtual_stages):
            return solve(candidate)
        family = replace(candidate, zero=0, dp_shard=0)
        for other, error in self._refused[family]:
            if (other.zero == 3) == (candidate.zero == 3) and self.state_bytes(other) <= self.state_bytes(candidate):
                raise CapacityError(error.shortage, missing_bytes=error.missing_bytes, at_least=True)
        try:
            return solve(candidate)
        except CapacityError as error:
            self._refused[family].append((candidate, error.with_traceback(None)))
            raise
