"""Try candidates outside the search that may be faster than its best plan: schedules with several virtual stages on a
rank, and sequences that are sharded over more ranks.

The search and its bounds use schedules with one stage on each rank. For other schedules the bounds are loose if memory
is short, because the memory of a rank depends on the order of its forwards and backwards. These candidates are
therefore ranked by an estimate of the step time, and solved in this order."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from partitioner.candidate import MeshCandidate
from partitioner.passes.errors import PartitionError
from partitioner.plan import Candidate, Certificate
from partitioner.solve.bounds.model_bounds import BY_BLOCKS
from partitioner.solve.evaluate.evaluator import SolvedCandidate
from partitioner.solve.search.attempts import CandidateAttempts, mesh_of
from partitioner.solve.search.best_first import Bounds
from partitioner.solve.search.outcomes import (
    CandidateOutcome,
    EvaluatedCandidate,
    bound_and_gap,
    build_candidate_report,
    build_refused_report,
    solved_to_evaluated,
)
from partitioner.solve.search.space import SearchSpace, list_short_context_candidates, several_stages

PATIENCE = 200  # consecutive families without a better plan after which candidates with virtual stages are skipped

_ROUNDING = 1e-9  # of a step
_BEST, _NEAR = 3, 1.15  # how many of the best meshes are tried first; their greatest time relative to the best
_ALIKE = 0.97  # a ratio of step time to estimate is expected to be at least this times the least one so far
# candidates in a row that were no better, after which no more are tried: those solved, and those that a bound prunes
_MOST_FRUITLESS, _MOST_PRUNED = 4, 16
_TOGETHER = 2  # promising candidates that are announced together, for two processes
_MOST_ANNOUNCED = 16  # shardings of the most promising candidates, which are solved ahead
# ways to shard layers for which candidates are ranked; the same for experts, whose shardings take long
_MOST_SHARDINGS, _MOST_OF_EXPERTS = 8, 3


def list_promising_candidates(
    space: SearchSpace,
    best: BestSchedule,
    solved: Mapping[MeshCandidate, EvaluatedCandidate],
    rows: Mapping[MeshCandidate, CandidateOutcome],
    bounds: Bounds,
) -> Iterator[MeshCandidate]:
    """Yield candidates that the search has not tried and that may be faster than the best plan. Stop when no candidate
    is expected to be faster, or when several in a row turned out not to be.

    First come the best candidates of the search with several pipeline stages, changed to several virtual stages on a
    rank. Then comes the best plan with each sequence sharded over twice as many ranks. Further candidates of both kinds
    follow, ordered by an estimate of the step time: a lower bound plus the recomputation that memory requires. The
    expected step time is the estimate times the least ratio of step time to estimate so far, for the same schedule.

    ``best``: the best plan so far. ``solved``: candidate -> its plan. ``rows``: candidate -> its outcome in the search.
    ``bounds``: computes lower bounds on the step times of candidates. ``space``: the search space (cluster, batch,
    constraints and sizes of the model)."""
    first = _list_schedules_of_best(space, solved)
    best.announce(first)
    yield from first
    fine = list_short_context_candidates(space, {(best.candidate.zero, best.candidate.dp_shard), (1, 0), (0, 0)})
    shared = _list_context_variants(best.candidate, fine)
    best.announce(shared)
    yield from shared
    known = {*rows, *first, *shared}
    left = [other for other in _list_untried_candidates(space, solved, rows, fine) if other not in known]
    ratios: dict[Hashable, float] = {}  # the least one, by schedule and whether ranks share a sequence
    promising = _order_by_estimate(space, best, left, bounds, ratios)
    fruitless, pruned = 0, 0
    while group := list(islice(promising, _TOGETHER)):
        if len({mesh_of(candidate) for _, candidate in group}) == len(group):  # none reuses devices of another
            best.announce([candidate for _, candidate in group])
        for estimate_s, candidate in group:
            before = best.seconds
            if _expect_seconds(estimate_s, candidate, ratios) >= before:
                continue
            yield candidate
            if math.isfinite(best.last_s):
                similar = _key_of_ratio(candidate)
                ratios[similar] = min(ratios.get(similar, math.inf), best.last_s / estimate_s)
            fruitless, pruned = fruitless + (not best.is_pruned), pruned + best.is_pruned
            if best.seconds < before:
                fruitless = pruned = 0
            if fruitless == _MOST_FRUITLESS or pruned == _MOST_PRUNED:
                return


def _key_of_ratio(candidate: MeshCandidate) -> Hashable:
    """Return a key of ``candidate``. It is equal for candidates that have similar ratios of the step time to its
    estimate."""
    return candidate.cp > 1, candidate.schedule


def _expect_seconds(estimate_s: float, candidate: MeshCandidate, ratios: Mapping[Hashable, float]) -> float:
    """Return the expected seconds of a step of ``candidate``, somewhat less than its estimate ``estimate_s`` times the
    least ratio of step time to estimate of similar candidates in ``ratios``."""
    similar = _key_of_ratio(candidate)
    return estimate_s * _ALIKE * ratios[similar] if similar in ratios else estimate_s


def _order_by_estimate(
    space: SearchSpace,
    best: BestSchedule,
    left: Sequence[MeshCandidate],
    bounds: Bounds,
    ratios: Mapping[Hashable, float],
) -> Iterator[tuple[float, MeshCandidate]]:
    """Yield pairs (estimated step time in seconds, candidate) of the candidates ``left``, in increasing order of the
    estimates. The estimate is a lower bound plus the recomputation that memory requires. A candidate is left out if its
    step is not expected to be faster than the best one.

    ``best``: the best plan so far. ``bounds``: computes lower bounds on the step times of candidates. ``ratios``: the
    least ratio of step time to estimate so far, by kind of candidate; the caller changes it during the iteration.
    ``space``: the search space."""
    if not left:
        return
    bound_s = bounds.estimate_times(left).tolist()
    recompute_s = [0.0] * len(left)
    heap = [(seconds, number, 0) for number, seconds in enumerate(bound_s) if seconds < best.seconds]
    heapq.heapify(heap)
    promising: dict[Hashable, MeshCandidate] = {}  # the best candidate for each sharding
    for _, number, _ in sorted(heap):
        promising.setdefault(BY_BLOCKS(left[number]), left[number])
    bounds.announce(list(promising.values())[:_MOST_ANNOUNCED])
    kinds: set[tuple[int, ...]] = set()
    most_kinds = _MOST_OF_EXPERTS if space.experts else _MOST_SHARDINGS
    while heap and heap[0][0] < best.seconds:
        seconds, number, step = heapq.heappop(heap)
        candidate = left[number]
        if _expect_seconds(seconds, candidate, ratios) >= best.seconds:
            continue
        if step == 3:
            yield seconds, candidate
            continue
        kind = candidate.tp, candidate.cp, candidate.ep, candidate.etp
        if step == 1 and len(kinds) == most_kinds and kind not in kinds:
            continue
        try:
            if step == 1:  # the first step that needs a sharding
                kinds.add(kind)
                bound_s[number] = max(bound_s[number], bounds.family_bounds[0]([candidate], best.seconds))
            else:
                recompute_s[number] = bounds.again_s(candidate, quick=step == 0)
        except PartitionError:  # the candidate has no plan
            continue
        heapq.heappush(heap, (max(seconds, bound_s[number] + recompute_s[number]), number, step + 1))


def _list_context_variants(candidate: MeshCandidate, fine: Sequence[MeshCandidate]) -> list[MeshCandidate]:
    """Return variants of ``candidate`` in which twice as many ranks share each sequence: one with half of ``tp``, and
    one with half of ``dp``. A variant is left out unless the candidates ``fine`` contain it, with any schedule.
    ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
    """
    halves = [axis for axis in ("tp", "dp") if getattr(candidate, axis) % 2 == 0]
    found = [replace(candidate, cp=2 * candidate.cp, **{axis: getattr(candidate, axis) // 2}) for axis in halves]
    known = set(fine)
    return [other for other in found if replace(other, schedule="1f1b", virtual_stages=1) in known]


def _list_schedules_of_best(
    space: SearchSpace, solved: Mapping[MeshCandidate, EvaluatedCandidate]
) -> list[MeshCandidate]:
    """Return variants, with several virtual stages on each rank, of the best candidates with several pipeline stages:
    those whose step without its pipeline bubble would be faster than the best step. ``solved``: candidate -> its plan.
    ``space``: the search space (cluster, batch, constraints and sizes of the model)."""
    enough = min(known.step_time for known in solved.values())
    best: dict[MeshCandidate, MeshCandidate] = {}
    for candidate, known in sorted(solved.items(), key=lambda item: item[1].step_time):
        filled_s = known.step_time - (known.breakdown or {}).get("bubble", 0.0)
        if candidate.pp > 1 and known.step_time <= _NEAR * enough and filled_s < enough and len(best) < _BEST:
            best.setdefault(mesh_of(candidate), candidate)
    return [other for candidate in best.values() for other in several_stages(space, candidate) if other not in solved]


def _list_untried_candidates(
    space: SearchSpace,
    solved: Mapping[MeshCandidate, EvaluatedCandidate],
    rows: Mapping[MeshCandidate, CandidateOutcome],
    fine: Sequence[MeshCandidate],
) -> list[MeshCandidate]:
    """Return candidates outside the search that may be faster than its best plan, of two kinds: the candidates of the
    search with several pipeline stages, changed to several virtual stages on a rank; and the 1F1B candidates ``fine``,
    in which more ranks share a sequence, both unchanged and with several virtual stages on a rank.

    For each mesh and microbatch size of the search, one ZeRO stage is used: 1 if possible, otherwise that of the
    fastest plan. ``solved``: candidate -> its plan. ``rows``: candidate -> its outcome in the search. ``space``: the
    search space (cluster, batch, constraints and sizes of the model)."""
    some = [candidate for candidate, row in rows.items() if candidate.pp > 1 and row.status != "infeasible"]
    usual = [candidate for candidate in some if candidate.zero == 1 and not candidate.dp_shard]
    planned = sorted((c for c in some if c in solved), key=lambda candidate: solved[candidate].step_time)
    plain: dict[MeshCandidate, MeshCandidate] = {}
    for candidate in (*usual, *planned, *some):
        plain.setdefault(mesh_of(candidate), replace(candidate, schedule="1f1b", virtual_stages=1))
    every = [*plain.values(), *(candidate for candidate in fine if candidate.pp > 1)]
    several = [other for candidate in every for other in several_stages(space, candidate)]
    return list(dict.fromkeys((*fine, *several)))


@dataclass
class BestSchedule:
    """Keeps the best plan while candidates outside the search are tried, most of them with several virtual stages on a
    rank.

    ``found``: the best plan of the search, with its estimated step time. ``certificate``: the record of how near that
    plan is to the optimum, with a table of candidates. ``attempts``: plans and bounds candidates. ``last_s``: seconds
    of a step of the candidate that was tried last; infinite if it was not planned. ``is_pruned``: whether that
    candidate was not planned because a lower bound showed that it is no better."""

    found: SolvedCandidate
    certificate: Certificate
    attempts: CandidateAttempts
    last_s: float = field(default=math.inf, init=False)
    is_pruned: bool = field(default=False, init=False)
    _better: EvaluatedCandidate | None = field(default=None, init=False)
    _rows: list[Candidate] = field(default_factory=list, init=False)

    @property
    def candidate(self) -> MeshCandidate:
        """Return the candidate (mesh sizes, microbatch size, schedule and ZeRO stage) of the best plan so far."""
        best: SolvedCandidate = self.found if self._better is None else self._better.payload
        return best.candidate

    @property
    def seconds(self) -> float:
        """Return the seconds of a step of the best plan so far."""
        return self._better.step_time if self._better is not None else self.found.estimate.step_time

    def announce(self, candidates: Sequence[MeshCandidate]) -> None:
        """Announce that ``candidates`` will probably be tried, in this order, so that they can be planned ahead. A
        candidate is a combination of mesh sizes, microbatch size, schedule and ZeRO stage."""
        self.attempts.announce(candidates, outside=True)

    def follow(self, candidates: Iterable[MeshCandidate], deadline: float) -> tuple[SolvedCandidate, Certificate]:
        """Try ``candidates``, and return the best plan and the certificate (how near the plan is to the optimum) with a
        row for each candidate. Stop at ``deadline`` (:func:`time.monotonic`) or on ``KeyboardInterrupt``. A candidate
        is a combination of mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        cut_off = self.certificate.cut_off
        try:
            for candidate in candidates:
                if time.monotonic() > deadline:
                    cut_off = "time limit"
                    break
                self._try_candidate(candidate)
        except KeyboardInterrupt:  # the best plan so far is returned
            cut_off = "interruption"
        self.attempts.withdraw()
        best = self.found
        if self._better is not None:
            best = self._prove(self._better)
        certificate = self.certificate.model_copy(update={"cut_off": cut_off})
        return best, add_rows_to_certificate(certificate, self._rows, best, self.found)

    def _try_candidate(self, candidate: MeshCandidate) -> None:
        """Plan ``candidate``, keep it if it is the best so far, and add a row to the table of candidates. It is not
        planned if its lower bounds show that it is no better. ``candidate``: mesh sizes, microbatch size, schedule and
        ZeRO stage.
        """
        self.last_s = math.inf
        try:
            told, least_s = self.attempts.try_outside(candidate)
        except PartitionError as error:
            self.is_pruned = False
            self._rows.append(build_refused_report(candidate, error))
            return
        self.is_pruned = told is None
        if told is None:
            return
        proven = max(least_s, 0.0 if told.partly else told.least or 0.0)
        self._rows.append(_at_least(build_candidate_report(candidate, told), proven))
        self.last_s = told.step_time
        if told.step_time < self.seconds * (1 - _ROUNDING):
            self._better = told

    def _prove(self, better: EvaluatedCandidate) -> SolvedCandidate:
        """Plan the candidate of ``better``, a plan that was found without a tight lower bound, again with such a bound,
        and return the faster of the two plans. The row of the candidate in the table gets the step time of the returned
        plan and the bound."""
        best: SolvedCandidate = better.payload
        try:
            whole = self.attempts.evaluate(best.candidate)
        except PartitionError:  # the plan that was found stands
            return best
        # a bound that covers only some placements is not valid here
        proven = self.attempts.bound_tightly(best.candidate, whole.step_time) if whole.partly else whole.lower_bound_s
        chosen = build_candidate_report(best.candidate, whole)
        if whole.step_time < best.estimate.step_time:
            best = whole.payload
            self._rows = [chosen if is_same_candidate(row, chosen) else row for row in self._rows]
        self._rows = [_at_least(row, proven) if is_same_candidate(row, chosen) else row for row in self._rows]
        return best


def keep_faster_plan(
    certificate: Certificate, found: SolvedCandidate, again: SolvedCandidate
) -> tuple[SolvedCandidate, Certificate]:
    """Return the faster of two plans of one candidate, and its certificate, the record of how near a plan is to the
    optimum. ``found``: a plan with its ``certificate``. ``again``: another plan of the same candidate, such as one that
    was solved without a cutoff or with another sharding. If ``again`` is faster, the returned certificate is a copy
    with the step time, lower bound, gap and chosen row of ``again``."""
    if again.estimate.step_time >= found.estimate.step_time:
        return found, certificate
    told = solved_to_evaluated(again)
    row = build_candidate_report(again.candidate, told).model_copy(update={"status": "chosen"})
    rows = [
        row.model_copy(update={"bound": min(old.bound, told.step_time), "beside": old.beside})
        if old.status == "chosen"
        else old
        for old in certificate.candidates
    ]
    bound, gap = bound_and_gap(told.step_time, [certificate.bound])
    better = {"objective": told.step_time, "bound": bound, "gap": gap, "candidates": tuple(rows)}
    return again, certificate.model_copy(update=better)


def add_rows_to_certificate(
    certificate: Certificate, rows: Sequence[Candidate], best: SolvedCandidate, found: SolvedCandidate
) -> Certificate:
    """Return a copy of ``certificate``, the record of how near the plan ``found`` is to the optimum, with ``rows``
    appended to its table of candidates. ``rows``: the outcomes of candidates that were tried after the search, most of
    them with several virtual stages on each rank. ``best``: the best plan now: ``found`` itself, or the plan of one of
    ``rows``.

    If it is the plan of one of ``rows``, this row is marked as chosen. ``objective`` of the copy becomes the step time
    of ``best`` in seconds. ``bound`` becomes the smaller of the former bound and the lower bound of the chosen row.
    ``gap`` is the relative difference of the two. The former bound is kept in ``covered_bound``; it holds for the
    schedules of the search only, which have one stage on each rank.
    """
    rows = [row.model_copy(update={"beside": True}) for row in rows]
    if best is found:
        return certificate.model_copy(update={"candidates": (*certificate.candidates, *rows)})
    step, chosen = best.estimate.step_time, build_candidate_report(best.candidate)
    solved = [c.model_copy(update={"status": "solved"}) if c.status == "chosen" else c for c in certificate.candidates]
    rows = [row.model_copy(update={"status": "chosen"}) if is_same_candidate(row, chosen) else row for row in rows]
    chosen_s = [row.bound for row in rows if row.status == "chosen"]
    bound, gap = bound_and_gap(step, [certificate.bound, *chosen_s])
    return certificate.model_copy(
        update={
            "objective": step,
            "bound": bound,
            "gap": gap,
            "covered_bound": certificate.bound if certificate.covered_bound is None else certificate.covered_bound,
            "candidates": (*solved, *rows),
        }
    )


def _at_least(row: Candidate, seconds: float) -> Candidate:
    assert row.step_time is not None, row
    return row.model_copy(update={"bound": min(max(row.bound, seconds), row.step_time)})


def is_same_candidate(row: Candidate, other: Candidate) -> bool:
    """Return whether ``row`` and ``other``, rows of a report, are about the same mesh candidate."""
    names = "mesh", "microbatch_size", "schedule", "virtual_stages", "zero", "dp_shard", "etp"
    return all(getattr(row, name) == getattr(other, name) for name in names)


__all__ = [
    "PATIENCE",
    "BestSchedule",
    "add_rows_to_certificate",
    "is_same_candidate",
    "keep_faster_plan",
    "list_promising_candidates",
]
