"""Try schedules with several virtual stages on a rank for the best plans that the search has found.

The search and its bounds use schedules with one stage on each rank. For other schedules the bounds are loose where
memory is short, because the memory of a rank depends on the order of its actions. After the search, these schedules are
tried for the best pipelines found, with the mesh and microbatch unchanged.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from partitioner.candidate import MeshCandidate
from partitioner.passes.errors import PartitionError
from partitioner.plan import Candidate, Certificate
from partitioner.solve.evaluate.evaluator import SolvedCandidate
from partitioner.solve.search.best_first import Bounds
from partitioner.solve.search.outcomes import (
    CandidateOutcome,
    EvaluatedCandidate,
    bound_and_gap,
    build_candidate_report,
    build_refused_report,
)
from partitioner.solve.search.space import SearchSpace, even_chunks, list_context_variants, several_stages

PATIENCE = 200  # consecutive families without a better plan after which such schedules are skipped

_MOST_RUNS = 4e7  # effort without a better plan, in runs of calls on virtual stages: about half a minute
_ROUNDING = 1e-9  # of a step
_BEST, _NEAR = 3, 1.15  # how many of the best meshes are tried; their greatest time relative to the best
_PROBED, _FEW = 6, 8  # how many further meshes are tried; virtual stages that are tried first
_WORTH_IT = 1.01  # others of a group are tried if the first takes at most this times the best step time
_HOPED, _MOST_ASKED = (
    0.93,
    1000,
)  # greatest estimate relative to the best plan (estimates are a tenth too low); most bounds
_BEST_CONTEXT, _NEAR_CONTEXT = (
    2,
    1.02,
)  # how many meshes are tried with more cp; their greatest time relative to the best
_RELAXED = 4  # number of a candidate's bounds that use the sharding of the largest microbatch


def estimate_interleaved_effort(space: SearchSpace, candidate: MeshCandidate) -> float:
    """Return the effort of cutting the model into the virtual stages of ``candidate``, as a fraction of the effort that
    the search may spend on such candidates without finding a better plan. ``space``: the search space (cluster, batch,
    constraints and sizes of the model). ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
    """
    return candidate.pp * candidate.virtual_stages * space.num_calls**2 / _MOST_RUNS


def schedules_of_several(
    space: SearchSpace,
    solved: Mapping[MeshCandidate, EvaluatedCandidate],
    found: MeshCandidate,
    rows: Mapping[MeshCandidate, CandidateOutcome],
    bounds: Bounds,
) -> list[Sequence[MeshCandidate]]:
    """Return groups of candidates with several virtual stages on each rank, in the order in which they should be tried.
    In each group, the first candidate shows whether the others are worth trying.

    The groups are variants of the best candidates in ``solved`` (candidate -> its plan with step time), of solved
    pipelines that lose much time to bubbles and recomputation, and of unsolved candidates whose bounds suggest a plan
    faster than that of ``found``. ``found``: the best candidate so far. ``rows``: candidate -> its outcome in the
    search: its plan, a lower bound on its step time, or the reason why it has no plan. ``bounds``: computes lower
    bounds on the step times of candidates. ``space``: the search space (cluster, batch, constraints and sizes of the
    model).
    """
    enough = solved[found].step_time
    best: dict[MeshCandidate, MeshCandidate] = {}
    waiting: dict[MeshCandidate, tuple[float, MeshCandidate]] = {}
    for candidate, known in sorted(solved.items(), key=lambda item: item[1].step_time):
        parts = known.breakdown or {}
        filled_s = known.step_time - parts.get("bubble", 0.0)
        lower_bound_s = filled_s - parts.get("recompute", 0.0)
        if candidate.pp > 1 and known.step_time > _NEAR * enough and lower_bound_s < enough:
            waiting.setdefault(mesh_of(candidate), (lower_bound_s, candidate))
        elif candidate.pp > 1 and known.step_time <= _NEAR * enough and filled_s < enough and len(best) < _BEST:
            best.setdefault(mesh_of(candidate), candidate)
    groups: list[Sequence[MeshCandidate]] = [
        [other] for candidate in best.values() for other in several_stages(space, candidate)
    ]
    for _, candidate in sorted(waiting[mesh] for mesh in waiting.keys() - best.keys())[:_BEST]:
        sharing = candidate.sharing(1)
        groups.append(
            sorted(several_stages(space, sharing if sharing in rows else candidate), key=_rank_by_distance_from_few)
        )
    for candidate in _list_promising_candidates(space, rows.values(), {*map(mesh_of, solved)}, enough, bounds):
        if len(best) >= _BEST + _PROBED:
            break
        if mesh_of(candidate) not in best:
            best[mesh_of(candidate)] = candidate
            groups.append(sorted(several_stages(space, candidate), key=_rank_by_distance_from_few))
    return groups


def _rank_by_distance_from_few(candidate: MeshCandidate) -> tuple[bool, int]:
    """Return a sort key of ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage), by which interleaved
    schedules with about 8 virtual stages on a rank come first: the pair (whether its schedule is not interleaved,
    difference of its number of virtual stages from 8).
    """
    return candidate.schedule != "interleaved", abs(candidate.virtual_stages - _FEW)


def contexts_of_best(
    space: SearchSpace, tried: Mapping[MeshCandidate, float], known: Collection[MeshCandidate]
) -> list[Sequence[MeshCandidate]]:
    """Return variants of the best candidates in which twice as many ranks share each sequence (the axis ``cp``), in the
    order in which they should be tried. Each is returned as a list with one element. ``tried``: candidate -> seconds of
    its step, for the candidates that were solved. ``known``: candidates to leave out, because they were searched
    already. ``space``: the search space (cluster, batch, constraints and sizes of the model).
    """
    enough = min(tried.values()) * _NEAR_CONTEXT
    near: dict[MeshCandidate, MeshCandidate] = {}
    for candidate in sorted(tried, key=tried.__getitem__):
        if tried[candidate] <= enough:
            near.setdefault(mesh_of(candidate), candidate)
    best = list(near.values())[:_BEST_CONTEXT]
    found = dict.fromkeys(other for candidate in best for other in list_context_variants(space, candidate))
    return [[other] for other in found if other not in known]


def mesh_of(candidate: MeshCandidate) -> MeshCandidate:
    """Return a copy of ``candidate`` that keeps only mesh sizes and microbatch size: schedule, virtual stages and ZeRO
    have fixed values. It serves as a key of all candidates with the same mesh and microbatch size."""
    return replace(candidate, schedule="", virtual_stages=1, zero=0, dp_shard=0)


def meshes_around(candidate: MeshCandidate) -> Iterator[MeshCandidate]:
    """Yield keys of meshes whose placement (assignment of ranks to devices), if it is known, can also be used for
    ``candidate``: its own mesh, then meshes with half of its ``cp`` and twice its ``tp`` or ``dp``. A key is a
    candidate (mesh sizes, microbatch size, schedule and ZeRO stage) with fixed schedule, virtual stages and ZeRO.
    """
    yield mesh_of(candidate)
    if candidate.cp % 2 == 0:
        for axis in ("tp", "dp"):
            yield mesh_of(replace(candidate, cp=candidate.cp // 2, **{axis: 2 * getattr(candidate, axis)}))


def _list_promising_candidates(
    space: SearchSpace,
    rows: Iterable[CandidateOutcome],
    solved: Collection[MeshCandidate],
    cutoff_s: float,
    bounds: Bounds,
) -> Iterator[MeshCandidate]:
    """Yield unsolved 1F1B candidates that would take clearly less than ``cutoff_s`` seconds with interleaved stages,
    fastest first. ``rows``: the outcomes of the search. ``bounds``: computes lower bounds on candidates. ``solved``:
    keys of the meshes and microbatch sizes that were solved already, which are skipped; a key is a candidate with fixed
    schedule, virtual stages and ZeRO.

    To estimate a step time, the lower bound of a candidate is reduced in proportion to the smaller pipeline bubble, and
    the recomputation that memory requires is added. ``space``: the search space (cluster, batch, constraints and sizes
    of the model).
    """
    heap: list[tuple[float, int, int]] = []  # seconds, the index in `nodes`, the number of bounds computed
    nodes: list[Sequence[MeshCandidate]] = []
    together, steps = bounds.family_bounds, bounds.candidate_bounds[:_RELAXED]
    alone, last = len(together), len(together) + len(steps)

    def push(seconds: float, candidates: Sequence[MeshCandidate], step: int) -> None:
        heapq.heappush(heap, (seconds, len(nodes), step))
        nodes.append(candidates)

    families = defaultdict[MeshCandidate, list[CandidateOutcome]](list)
    left = [
        row for row in rows if row.status == "bounded" and row.candidate.pp > 1 and row.candidate.schedule == "1f1b"
    ]
    for row in [row for row in left if row.candidate.zero < 2] or left:
        if mesh_of(row.candidate) not in solved:
            families[mesh_of(row.candidate)].append(row)
    known = {row.candidate: row.bound for row in left}
    for members in families.values():
        shorter = _bound_interleaved_ratio(space, members[0].candidate)
        push(shorter * min(row.bound for row in members), [row.candidate for row in members], 0)
    asked = 0
    while heap and heap[0][0] < _HOPED * cutoff_s:
        lower_bound_s, number, step = heapq.heappop(heap)
        candidates = nodes[number]
        shorter = _bound_interleaved_ratio(space, candidates[0])
        if step > last:
            yield candidates[0]
        elif step == alone and len(candidates) > 1:
            for candidate in candidates:
                push(max(lower_bound_s, shorter * known[candidate]), [candidate], step)
        elif asked < _MOST_ASKED:
            asked += 1
            with suppress(PartitionError):  # the candidate has no plan
                if step == last:
                    seconds = lower_bound_s + bounds.again_s(_interleave_candidate(space, candidates[0]))
                elif step < alone:
                    seconds = shorter * together[step](candidates, cutoff_s / shorter)
                else:
                    seconds = shorter * steps[step - alone](candidates[0], cutoff_s / shorter)
                push(max(lower_bound_s, seconds), candidates, step + 1)


def _count_most_virtual_stages(space: SearchSpace, candidate: MeshCandidate) -> int:
    return even_chunks(space, candidate.pp)[-1]


def _interleave_candidate(space: SearchSpace, candidate: MeshCandidate) -> MeshCandidate:
    return replace(candidate, schedule="interleaved", virtual_stages=_count_most_virtual_stages(space, candidate))


def _bound_interleaved_ratio(space: SearchSpace, candidate: MeshCandidate) -> float:
    """Return a lower bound on (step time under the interleaved schedule) / (step time under 1F1B) for ``candidate``,
    with the most virtual stages per rank that the search ``space`` (cluster, batch, constraints and sizes of the model)
    contains. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
    """
    idle = (candidate.pp - 1) / candidate.num_microbatches(space.global_batch)
    return (1 + idle / _count_most_virtual_stages(space, candidate)) / (1 + idle)


def best_schedule(
    evaluate: Callable[[MeshCandidate], EvaluatedCandidate],
    attempt: Callable[[MeshCandidate], EvaluatedCandidate],
    bounds: Bounds,
    last: Callable[[MeshCandidate, float], float],
    several: Sequence[Sequence[MeshCandidate]],
    found: SolvedCandidate,
    certificate: Certificate,
    deadline: float,
) -> tuple[SolvedCandidate, Certificate]:
    """Return the best plan among ``found`` and the candidates in ``several`` (groups with several virtual stages on a
    rank), and ``certificate`` with a row for each candidate tried.

    ``found``: the best plan of the search, with its estimated step time. ``certificate``: the record of how near that
    plan is to the optimum, with a table of candidates. ``evaluate``: plans a candidate and computes a lower bound on
    the step time of all its plans. ``attempt``: plans a candidate without such a bound. ``last``: returns the tightest
    lower bound in seconds on a candidate; its second argument is a bound in seconds at which the computation may stop.
    ``bounds``: computes quicker lower bounds. The function stops trying candidates at ``deadline``
    (:func:`time.monotonic`) or on ``KeyboardInterrupt``.
    """
    best, rows, cut_off = found, list[Candidate](), certificate.cut_off
    better: EvaluatedCandidate | None = None

    def tried(candidate: MeshCandidate, cutoff_s: float) -> EvaluatedCandidate | None:
        """Return the plan of ``candidate``. Return ``None`` if it has none, or, without planning it, if its lower
        bounds show that its step takes at least ``cutoff_s`` seconds. A candidate that was planned, or has no plan,
        gets a row in the list ``rows`` of the enclosing function. ``candidate``: mesh sizes, microbatch size, schedule
        and ZeRO stage.
        """
        least = float(bounds.times([candidate])[0])
        if least >= cutoff_s:
            return None
        try:
            least = max([least, *(bound([candidate], cutoff_s) for bound in bounds.family_bounds)])
            told = attempt(candidate) if least < cutoff_s else None
        except PartitionError as error:
            rows.append(build_refused_report(candidate, error))
            return None
        if told is not None:
            rows.append(
                _at_least(
                    build_candidate_report(candidate, told), max(least, 0.0 if told.partly else told.least or 0.0)
                )
            )
        return told

    left = [list(group) for group in several]
    try:
        while left:
            group = left[0]
            if not group:
                del left[0]
                continue
            if time.monotonic() > deadline:
                cut_off = "time limit"
                break
            cutoff_s = best.estimate.step_time * (1 - _ROUNDING)
            told = tried(group.pop(0), cutoff_s)
            if told is not None and told.step_time > _WORTH_IT * cutoff_s:
                group.clear()
            elif told is not None and told.step_time < cutoff_s:
                best, better = told.payload, told
    except KeyboardInterrupt:  # the best so far is a plan
        cut_off = "interruption"
    certificate = certificate.model_copy(update={"cut_off": cut_off})
    if better is not None:
        whole = (
            better if better.partly else evaluate(best.candidate)
        )  # bounds that cover some placements only do not count
        proven = last(best.candidate, whole.step_time) if whole.partly else whole.lower_bound_s
        chosen = build_candidate_report(best.candidate, whole)
        if whole.step_time < best.estimate.step_time:
            best, rows = whole.payload, [chosen if _is_same_candidate(row, chosen) else row for row in rows]
        rows = [_at_least(row, proven) if _is_same_candidate(row, chosen) else row for row in rows]
    return best, _add_rows_to_certificate(certificate, rows, best, found)


def without_limit(
    certificate: Certificate, found: SolvedCandidate, again: SolvedCandidate
) -> tuple[SolvedCandidate, Certificate]:
    """Return the faster of two plans of one candidate, and its certificate, the record of how near a plan is to the
    optimum. ``found``: a plan that was solved with a cutoff, above which plans are not searched, with its
    ``certificate``. ``again``: the plan of the same candidate that was solved without a cutoff. If ``again`` is faster,
    step time, lower bound, gap and chosen row of the returned copy are those of ``again``."""
    if again.estimate.step_time >= found.estimate.step_time:
        return found, certificate
    told = solved_to_evaluated(again)
    row = build_candidate_report(again.candidate, told).model_copy(update={"status": "chosen"})
    rows = [
        row.model_copy(update={"bound": min(old.bound, told.step_time)}) if old.status == "chosen" else old
        for old in certificate.candidates
    ]
    bound, gap = bound_and_gap(told.step_time, [certificate.bound])
    better = {"objective": told.step_time, "bound": bound, "gap": gap, "candidates": tuple(rows)}
    return again, certificate.model_copy(update=better)


def solved_to_evaluated(solved: SolvedCandidate) -> EvaluatedCandidate:
    """Return the record that the search keeps of a solved candidate: step time, memory, lower bound and parts of the
    step. ``solved``: the plan of the candidate."""
    estimate = solved.estimate
    return EvaluatedCandidate(
        estimate.step_time, max(estimate.memory), solved, solved.lower_bound_s, estimate.breakdown
    )


def _add_rows_to_certificate(
    certificate: Certificate, rows: Sequence[Candidate], best: SolvedCandidate, found: SolvedCandidate
) -> Certificate:
    """Return a copy of ``certificate``, the record of how near the plan ``found`` is to the optimum, with ``rows``
    appended to its table of candidates. ``rows``: the outcomes of candidates that were tried after the search, most of
    them with several virtual stages on each rank. ``best``: the best plan now: ``found`` itself, or the plan of one of
    ``rows``.

    In the second case, the row of ``best`` is marked as chosen. The copy's ``objective`` becomes the step time of
    ``best`` in seconds, ``bound`` a lower bound on the step times of the plans of the search and of the chosen row's
    candidate, and ``gap`` the relative difference of the two. The former lower bound is kept in ``covered_bound``; it
    holds for the schedules of the search only, which have one stage on each rank.
    """
    rows = [row.model_copy(update={"beside": True}) for row in rows]
    if best is found:
        return certificate.model_copy(update={"candidates": (*certificate.candidates, *rows)})
    step, chosen = best.estimate.step_time, build_candidate_report(best.candidate)
    solved = [c.model_copy(update={"status": "solved"}) if c.status == "chosen" else c for c in certificate.candidates]
    rows = [row.model_copy(update={"status": "chosen"}) if _is_same_candidate(row, chosen) else row for row in rows]
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


def _is_same_candidate(row: Candidate, other: Candidate) -> bool:
    """Return whether ``row`` and ``other``, rows of a report, are about the same mesh candidate."""
    names = "mesh", "microbatch_size", "schedule", "virtual_stages", "zero", "dp_shard", "etp"
    return all(getattr(row, name) == getattr(other, name) for name in names)


__all__ = [
    "PATIENCE",
    "best_schedule",
    "contexts_of_best",
    "estimate_interleaved_effort",
    "mesh_of",
    "meshes_around",
    "schedules_of_several",
    "solved_to_evaluated",
    "without_limit",
]
