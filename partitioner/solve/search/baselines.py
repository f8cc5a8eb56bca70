"""Plan the standard layouts that every report compares with: plain data parallelism, ZeRO-3, and Megatron-LM's layout.

They are reported whatever the user fixed, with their costs or the reasons why they do not fit. Layouts that are not
candidates of the search are planned in addition, first without data in host memory.

For ZeRO-3 and Megatron-LM, the report shows the best layout of a family, as an expert would tune it: the textbook
layout, those that the search solved, and a few more chosen by their bounds, for a limited time. Megatron-LM's family
has ``tp`` inside a node, any number of stages under 1F1B or interleaved schedules, any sizes of the other axes, and
optimizer states sharded or not."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from partitioner.candidate import MeshCandidate
from partitioner.constraints import OF_POINT, Constraints
from partitioner.passes.errors import PartitionError
from partitioner.plan import DATA_PARALLEL, FULLY_SHARDED, MEGATRON, Baseline, Candidate
from partitioner.schedules.formulas import is_plain
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.search.outcomes import build_candidate_report, build_refused_report, solved_to_evaluated
from partitioner.solve.search.space import (
    SearchSpace,
    estimate_interleaved_effort,
    explain_uneven_batch,
    find_baseline_candidates,
    find_least_bound_candidate,
    list_candidates,
    list_hybrid_candidates,
    several_stages,
)
from partitioner.units import list_divisors

_EXCLUDED = "excluded by the constraints"
MOST_TRIED = 12  # greatest number of candidates that are tried for one layout
_MOST_OF_FAMILY, _MOST_ALIKE, _MOST_INTERLEAVED = 5, 2, 2  # layouts that are planned in addition to known ones
_MOST_EFFORT = 0.05  # total effort of interleaved schedules after the first, as in estimate_interleaved_effort
_FILLED = 7 / 8  # fraction of the pipeline bubble that virtual stages fill
_MOST_CHUNKS = 2  # numbers of virtual stages per layout; the second only if the search knows the first
_MOST_FITTING, _MOST_BOUNDED = (
    4,
    12,
)  # per division of the model: candidates that fit, and candidates whose bounds are computed
_OF_COLLECTIVES = 1.05  # assumed factor by which bounds are too low per doubling of tp and cp; used for the order only
_FEW = 8  # virtual stages: interleaved schedules with about as many are tried first
_NONE: Mapping[str, Baseline] = {}


@dataclass(frozen=True)
class LayoutFamily:
    """The layouts of one kind, such as ZeRO-3, of which the report compares the best one with the plan. ``candidates``:
    the layouts (mesh sizes, microbatch size, schedule and ZeRO stage). ``bounds``: computes lower bounds on their step
    times. ``space``: the search space from which they were listed."""

    candidates: tuple[MeshCandidate, ...]
    bounds: ModelBounds
    space: SearchSpace

    def promising(self, most_s: float) -> list[MeshCandidate]:
        """Return the layouts of this family (all variants of a well-known layout, such as ZeRO-3) that are worth
        planning: by their lower bounds, they may fit in memory and take less than ``most_s`` seconds per step. They are
        in the order in which they should be planned: first the best layout of each combination of ``pp``, ``tp`` and
        ``cp``, then the others; each of these two parts is in increasing order of expected time."""
        if not self.candidates:
            return []
        times = self.bounds.times(self.candidates)
        likely: list[tuple[float, MeshCandidate]] = []
        fitting, asked = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
        most = _MOST_FITTING if len({(p.pp, p.tp, p.cp) for p in self.candidates}) > 1 else _MOST_BOUNDED
        for i in np.argsort(times, kind="stable").tolist():
            candidate = self.candidates[i]
            mesh = candidate.pp, candidate.tp, candidate.cp
            if times[i] >= most_s:
                break
            if fitting[mesh] == most or asked[mesh] == _MOST_BOUNDED or not self._baseline_holds_states(candidate):
                continue
            asked[mesh] += 1
            with suppress(PartitionError):
                seconds = self.bounds.refine(candidate)
                if seconds < most_s:
                    fitting[mesh] += 1
                    likely.append((seconds * _OF_COLLECTIVES ** math.log2(candidate.tp * candidate.cp), candidate))
        ranked = [candidate for _, candidate in sorted(likely)]
        first = {(candidate.pp, candidate.tp, candidate.cp): candidate for candidate in reversed(ranked)}
        best = [candidate for candidate in ranked if first[candidate.pp, candidate.tp, candidate.cp] == candidate]
        return best + [
            candidate for candidate in ranked if first[candidate.pp, candidate.tp, candidate.cp] != candidate
        ]

    def _baseline_holds_states(self, candidate: MeshCandidate) -> bool:
        try:
            self.bounds.check_states(candidate)
        except PartitionError:
            return False
        return True

    def interleaved(self, candidate: MeshCandidate) -> list[MeshCandidate]:
        """Return variants of ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage) under the interleaved
        schedule, with several virtual stages on each rank; variants with about 8 virtual stages come first. The list is
        empty if the candidate has no pipeline or is not under 1F1B."""
        if candidate.pp == 1 or candidate.schedule != "1f1b" or not self.space.train:
            return []
        several = [p for p in several_stages(self.space, candidate) if p.schedule == "interleaved"]
        return sorted(several, key=lambda p: abs(p.virtual_stages - _FEW))


@dataclass(frozen=True)
class StandardLayout:
    """A well-known layout with which the report compares the plan.

    ``name``: name of the layout in reports. ``candidates``: combinations of mesh sizes, microbatch size, schedule and
    ZeRO stage that have this layout, to try until one fits in memory; the first has the least lower bound, and later
    ones need less memory. ``excluded``: the reason why the search itself cannot choose the layout; empty if it can.
    ``family``: all variants of the layout, of which the report shows the best one; ``None`` if there are no others than
    ``candidates``."""

    name: str
    candidates: tuple[MeshCandidate, ...] = ()
    excluded: str = ""
    family: LayoutFamily | None = None


def list_standard_layouts(
    space: SearchSpace, candidates: Sequence[MeshCandidate], bounds: ModelBounds
) -> list[StandardLayout]:
    """Return the well-known layouts with which the report compares the plan (plain data parallelism, ZeRO-3,
    Megatron-LM's). ``space``: the search space (cluster, batch, constraints and sizes of the model). ``candidates``:
    the candidates of the search. ``bounds``: computes lower bounds on step time and memory of candidates. If the user's
    constraints exclude a layout from ``candidates``, it is taken from the space without constraints on the layout and
    marked as excluded."""
    wide = replace(space, constraints=unpin_constraints(space.constraints))
    free = bounds.with_constraints(wide.constraints)
    own = best = _find_textbook_layouts(space, candidates, bounds)
    others: Sequence[MeshCandidate] = candidates
    known = own_points = frozenset(candidates)
    if wide.constraints != space.constraints:
        others = _list_candidates_if_any(wide)
        best = _find_textbook_layouts(wide, others, free)
        known = known.union(others)
    plain = own["data parallel"] or best["data parallel"]
    megatron = best["megatron"] or own["megatron"]
    found = [(DATA_PARALLEL, plain)]
    if space.train and space.world_size > 1:
        found.append((FULLY_SHARDED, _select_fully_sharded_baseline(space, free)))
    if megatron is None or megatron.tp > 1:
        found.append((MEGATRON, megatron))
    several = _find_layout_families(wide, others, free)
    why = explain_uneven_batch(space, space.world_size)
    none = {DATA_PARALLEL: why, FULLY_SHARDED: why, MEGATRON: "no mesh has it"}
    return [
        StandardLayout(
            name,
            () if candidate is None else (candidate, *_list_leaner_candidates(space, candidate, known)),
            none[name] if candidate is None else "" if candidate in own_points else _EXCLUDED,
            several.get(name),
        )
        for name, candidate in found
    ]


def _find_layout_families(
    space: SearchSpace, candidates: Sequence[MeshCandidate], bounds: ModelBounds
) -> dict[str, LayoutFamily]:
    """Return two families of layouts by name, for comparison with the plan: ZeRO-3 layouts with as many data-parallel
    ranks as the batch allows, and layouts in the way of Megatron-LM (``tp`` inside a node, 1F1B, at most ZeRO-1).
    ``space``: the search space (cluster, batch, constraints and sizes of the model). ``candidates``: the candidates of
    the search. ``bounds``: computes lower bounds on candidates."""
    sharded = [p for p in candidates if p.pp == 1 and p.zero == 3 and not p.dp_shard]
    widest = max((p.dp for p in sharded), default=1)
    sharded = [p for p in sharded if p.dp == widest]
    sharded += [other for p in sharded for other in list_hybrid_candidates(space, p) if other.zero == 3]
    inside = space.topology.devices_per_node
    megatron = [p for p in candidates if p.tp <= inside and p.zero <= 1 and p.schedule == "1f1b"]
    found = {FULLY_SHARDED: sharded, MEGATRON: megatron}
    return {name: LayoutFamily(tuple(family), bounds, space) for name, family in found.items()}


def _find_textbook_layouts(
    space: SearchSpace, candidates: Sequence[MeshCandidate], bounds: ModelBounds
) -> dict[str, MeshCandidate | None]:
    """Return the layouts that every report compares with: ``"data parallel"`` (plain data parallelism, without expert
    parallelism) and ``"megatron"`` (the layout that Megatron-LM's authors recommend). The value for each name is the
    best of ``candidates`` with this layout: among those that fit in memory, or among all if none fits, the one with the
    least lower bound on its step time. It is ``None`` if no candidate has the layout. ``space``: the search space
    (cluster, batch, constraints and sizes of the model). ``bounds``: computes lower bounds on candidates.
    ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage.
    """
    found = find_baseline_candidates(space, candidates, bounds.times, _build_fit_check(bounds))
    plain = [p for p in candidates if p.pp == p.tp == p.cp == p.ep == 1 and not p.zero]
    return {**found, "data parallel": find_least_bound_candidate(plain, bounds.times, _build_fit_check(bounds))}


def _list_leaner_candidates(
    space: SearchSpace, candidate: MeshCandidate, known: Collection[MeshCandidate]
) -> Iterator[MeshCandidate]:
    """Yield variants of ``candidate`` that need less memory, to be tried if ``candidate`` does not fit: smaller
    microbatches, then (if ``candidate`` uses ``tp``) also more pipeline stages. ``space``: the search space (cluster,
    batch, constraints and sizes of the model). ``known``: the candidates of the search. A variant is yielded only if it
    is in ``known`` or, if it uses ZeRO, if ``space`` allows it. ``candidate``: mesh sizes, microbatch size, schedule
    and ZeRO stage."""
    for pp in list_divisors(candidate.pp * candidate.dp):
        dp = candidate.pp * candidate.dp // pp
        if pp < candidate.pp or (pp > candidate.pp and candidate.tp == 1) or not space.splits(dp):
            continue
        for size in reversed(space.sizes(dp)):
            leaner = replace(candidate, pp=pp, dp=dp, microbatch_size=size)
            smaller = size < candidate.microbatch_size or (pp > candidate.pp and size <= candidate.microbatch_size)
            if smaller and (leaner in known or (candidate.zero and space.allows(leaner))):
                yield leaner


def is_known(standard: StandardLayout, rows: Sequence[Candidate]) -> bool:
    """Return whether the report can show the well-known layout ``standard``, such as ZeRO-3, without planning it,
    because the search has planned it. If the layout has a family (variants of which the report shows the best), the
    plan that the search chose also has to be one of these variants. ``rows``: the outcomes of the search, one for each
    candidate (mesh sizes, microbatch size, schedule and ZeRO stage), with the step time or the reason why there is
    none."""
    if standard.family is not None:
        best = _best_row(standard, rows)
        return best is not None and best.status == "chosen"
    if not standard.candidates:
        return True
    row = None if standard.excluded else _find_candidate_row(standard.candidates[0], rows)
    return row is not None and row.step_time is not None


def compare_standard_layouts(
    found: Sequence[StandardLayout],
    rows: Sequence[Candidate],
    evaluator: CandidateEvaluator,
    offload: tuple[str, ...] = (),
    unhosted: Mapping[str, Baseline] = _NONE,
    until: float = math.inf,
) -> tuple[Baseline, ...]:
    """Return, for the report, each of the well-known layouts ``found``, such as ZeRO-3, with its outcome: the step time
    and memory of its plan, or the reason why there is none.

    The outcome of a layout is taken from ``unhosted`` if it has a plan there, otherwise from ``rows``, and otherwise
    the layout is planned now. If a layout does not fit, smaller microbatches and more stages are tried. For a layout
    with several variants (its field ``family``), the best one is shown that is found until ``until``
    (:func:`time.monotonic`).

    ``rows``: the outcomes of the search, one for each candidate. ``evaluator``: plans candidates. ``offload``: the
    kinds of data that plans of the search keep in host memory; empty: none. ``unhosted``: layout name -> outcome with
    all data in device memory.
    """
    made = []
    for standard in found:
        plain = unhosted.get(standard.name)
        if plain is not None and plain.candidate is not None and plain.candidate.step_time is not None:
            made.append(plain)
            continue
        tried: list[Candidate] = []
        for candidate in _limit_tries(standard.candidates):
            row = None if standard.excluded else _find_candidate_row(candidate, rows)
            known = row if row is not None and row.status != "bounded" else None
            tried.append(known or _plan_candidate_report(candidate, evaluator))
            if tried[-1].step_time is not None:
                break
        # of layouts without a plan, the smallest microbatch says best what the layout lacks
        shortest = min(tried, key=lambda c: (c.step_time is None, c.microbatch_size, c.missing or 0), default=None)
        best, excluded = _tune_standard_layout(standard, shortest, rows, evaluator, until), standard.excluded
        if best is not shortest and best is not None:
            excluded = "" if _row_like(best, rows) is not None else _EXCLUDED if excluded else ""
        hosted = offload if best is not None else ()
        made.append(Baseline(name=standard.name, candidate=best, excluded=excluded, offload=hosted))
    return tuple(made)


def _limit_tries(candidates: Sequence[MeshCandidate]) -> list[MeshCandidate]:
    """Return those of ``candidates`` that are planned for a well-known layout, whose number is limited: the first ones,
    and the one with the smallest microbatch. ``candidates``: combinations of mesh sizes, microbatch size, schedule and
    ZeRO stage."""
    if len(candidates) <= MOST_TRIED:
        return list(candidates)
    first, others = candidates[: MOST_TRIED - 1], candidates[MOST_TRIED - 1 :]
    return [*first, min(others, key=lambda candidate: candidate.microbatch_size)]


def _best_row(standard: StandardLayout, rows: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest of ``rows`` that is a variant of the well-known layout ``standard``, such as ZeRO-3; ``None``
    if there is none, or if ``standard.family`` is ``None``. The variants are ``standard.family.candidates``. A row
    belongs to a variant if both have the same mesh, microbatch size, schedule, virtual stages and ZeRO settings. A row
    with an interleaved schedule also belongs to a variant that has the same values under 1F1B. ``rows``: the outcomes
    of the search, one for each candidate."""
    family = standard.family
    if family is None:
        return None
    known = {_identify_layout(build_candidate_report(candidate)) for candidate in family.candidates}
    mine = [
        row
        for row in rows
        if row.step_time is not None
        and (
            _identify_layout(row) in known
            or (row.schedule == "interleaved" and _identify_layout(_row_to_1f1b(row)) in known)
        )
    ]
    return min(mine, key=lambda row: (row.step_time, row.status != "chosen"), default=None)


def _row_to_1f1b(row: Candidate) -> Candidate:
    return row.model_copy(update={"schedule": "1f1b", "virtual_stages": 1})


def _tune_standard_layout(
    standard: StandardLayout,
    textbook: Candidate | None,
    rows: Sequence[Candidate],
    evaluator: CandidateEvaluator,
    until: float,
) -> Candidate | None:
    """Return the fastest variant of the well-known layout ``standard``, such as ZeRO-3, as its outcome: step time and
    memory of its plan, or the reason why there is none. If the layout has no variants, or if no variant has a plan,
    return ``textbook``. Variants are candidates that differ in mesh, microbatch size, schedule and ZeRO settings.

    The search may have planned some variants: they are found in ``rows`` by mesh, microbatch size, schedule, virtual
    stages and ZeRO settings, where an interleaved schedule counts as 1F1B. Unless the plan that the search chose is a
    variant, a few more variants with low bounds on their step times are planned now, until the time ``until``
    (:func:`time.monotonic`).

    ``textbook``: the outcome of the layout itself; ``None``: it was not planned. ``rows``: the outcomes of the search.
    ``evaluator``: plans candidates.
    """
    family, best = standard.family, textbook
    if family is None:
        return best
    row = _best_row(standard, rows)
    if row is not None and (best is None or best.step_time is None or (row.step_time or 0.0) <= best.step_time):
        best = row
    if best is not None and best.status == "chosen":
        return best
    known = {_identify_layout(row): row for row in rows}
    candidates = {_identify_layout(build_candidate_report(candidate)): candidate for candidate in family.candidates}
    planned: set[MeshCandidate] = set()

    def plan(candidate: MeshCandidate) -> Candidate | None:
        """Plan ``candidate``, store its outcome as ``best`` if it is faster, and return the outcome: step time and
        memory, or the reason why there is no plan. Return ``None`` without planning it if it was planned before, if the
        search showed that it is not better than the best layout so far, or if time ran out. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage.
        """
        nonlocal best
        most_s, told = _read_step_seconds(best), known.get(_identify_layout(build_candidate_report(candidate)))
        if time.monotonic() > until or candidate in planned:
            return None
        if told is not None and (told.status != "bounded" or told.bound >= most_s):
            return None
        planned.add(candidate)
        found = _plan_candidate_report(candidate, evaluator, most_s)
        best = found if _read_step_seconds(found) < most_s else best
        return found

    tried = [row for row in rows if _identify_layout(row) in candidates and row.step_time is not None]

    def improve(choices: Iterable[MeshCandidate], most: int) -> None:
        for candidate in choices:
            if most and (found := plan(candidate)) is not None:
                most -= 1
                tried.extend([found] if found.step_time is not None else [])

    every = frozenset(family.candidates)
    if standard.name == MEGATRON:  # comes first, since a good plan here prunes most of the others
        shared = ((row, candidates[_identify_layout(row)]) for row in tried)
        lean = [(row, replace(p, zero=1) if replace(p, zero=1) in every else p) for row, p in shared]
        _plan_interleaved_layouts(family, lean, lambda: _read_step_seconds(best), plan)
    filled = best
    promising = family.promising(_read_step_seconds(best))
    improve(promising, _MOST_OF_FAMILY)
    here = candidates.get(_identify_layout(best)) if best is not None else None
    seen = {_identify_layout(row) for row in tried}
    alike = [p for p in promising if here is not None and (p.pp, p.tp, p.cp) == (here.pp, here.tp, here.cp)]
    improve([p for p in alike if _identify_layout(build_candidate_report(p)) not in seen], _MOST_ALIKE)
    if standard.name == MEGATRON and best is not filled:
        _plan_interleaved_layouts(
            family, [(row, candidates[_identify_layout(row)]) for row in tried], lambda: _read_step_seconds(best), plan
        )
    return best


def _plan_interleaved_layouts(
    family: LayoutFamily,
    tried: Sequence[tuple[Candidate, MeshCandidate]],
    best_s: Callable[[], float],
    plan: Callable[[MeshCandidate], Candidate | None],
) -> None:
    """Plan the layouts of ``tried`` again under the interleaved schedule, with several virtual stages on each rank. The
    interleaved schedule leaves about an eighth of the pipeline bubble, so the layouts that would be fastest with so
    small a bubble come first. Planning stops when a limit of the total effort is reached. The function ``plan`` stores
    the outcomes.

    ``family``: the variants of one well-known layout, with the search space. ``tried``: layouts that were planned
    already, as pairs of the outcome (step time and its parts) and the candidate. ``best_s``: returns the seconds of the
    best plan so far. ``plan``: plans one candidate; returns ``None`` if it need not be planned.
    """
    filled = sorted(
        (_read_step_seconds(row) - _FILLED * (row.breakdown or {}).get("bubble", 0.0), p) for row, p in tried
    )
    spent = 0.0
    for seconds, candidate in filled[:_MOST_INTERLEAVED]:
        chunks = family.interleaved(candidate)[:_MOST_CHUNKS] if seconds < best_s() else []
        for other in chunks:
            work = estimate_interleaved_effort(family.space, other)
            if spent and spent + work > _MOST_EFFORT:
                return
            if plan(other) is not None:
                spent += work
                break


def _read_step_seconds(row: Candidate | None) -> float:
    return math.inf if row is None or row.step_time is None else row.step_time


def _identify_layout(row: Candidate) -> tuple[object, ...]:
    """Return a key of the layout of ``row``, the outcome of a candidate: mesh, microbatch size, schedule, virtual
    stages, ZeRO settings and the ``tp`` of experts. Outcomes with equal keys have the same layout."""
    others = row.microbatch_size, row.schedule, row.zero, row.dp_shard, row.virtual_stages, row.etp
    return tuple(row.mesh.values()), *others


def _row_like(row: Candidate, rows: Sequence[Candidate]) -> Candidate | None:
    return next((other for other in rows if _identify_layout(other) == _identify_layout(row)), None)


def no_candidates(found: Sequence[StandardLayout], names: Collection[str]) -> list[StandardLayout]:
    """Return the well-known layouts in ``found`` whose names are in ``names``, marked as excluded from the search by
    the user's constraints. A layout that is already marked with another reason keeps it."""
    return [replace(standard, excluded=standard.excluded or _EXCLUDED) for standard in found if standard.name in names]


def _plan_candidate_report(
    candidate: MeshCandidate, evaluator: CandidateEvaluator, cutoff_s: float = math.inf
) -> Candidate:
    """Plan ``candidate`` with ``evaluator``. Return the candidate's row of the report: the step time and memory of the
    plan, or the reason why there is none. ``cutoff_s``: plans of at least this many seconds per step are of no
    interest. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
    """
    try:
        plain = is_plain(candidate.schedule, candidate.virtual_stages)
        solved = evaluator.solve(candidate, proven=plain, improved=False, cutoff_s=cutoff_s)
        return build_candidate_report(candidate, solved_to_evaluated(solved))
    except PartitionError as error:
        return build_refused_report(candidate, error)


def unpin_constraints(constraints: Constraints) -> Constraints:
    """Return a copy of ``constraints`` that does not fix mesh, microbatch size, schedule and stages. Constraints that
    change the computation itself are kept."""
    free: dict[str, Any] = {
        **dict.fromkeys(OF_POINT),
        "microbatch_size": constraints.group_size,
        "data_shares": None,
        "ahead": False,
        "stage_of": {},
    }
    return constraints.model_copy(update=free)


def _list_candidates_if_any(space: SearchSpace) -> list[MeshCandidate]:
    try:
        return list_candidates(space)
    except PartitionError:
        return []


def _build_fit_check(bounds: ModelBounds) -> Callable[[MeshCandidate], bool]:
    """Return a cached function ``fits(candidate)`` that says whether a candidate (mesh sizes, microbatch size, schedule
    and ZeRO stage) may fit in memory, by the lower bounds that ``bounds`` computes.
    """

    @cache
    def fits(candidate: MeshCandidate) -> bool:
        """Return whether ``candidate`` may have a plan: no lower bound shows that it has no plan, such as for lack of
        memory. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        try:
            bounds.check_states(candidate)
            bounds.refine(candidate)
        except PartitionError:
            return False
        return True

    return fits


def _select_fully_sharded_baseline(space: SearchSpace, bounds: ModelBounds) -> MeshCandidate | None:
    """Return the best candidate with ZeRO-3 over all ranks: all ranks are data-parallel, and parameters, gradients and
    optimizer states are sharded over all of them. The best is the one with the least lower bound. ``None`` if the batch
    does not divide over the ranks. ``space``: the search space (cluster, batch, constraints and sizes of the model).
    ``bounds``: computes the lower bounds.
    """
    world = space.world_size
    if space.units % world:
        return None
    return find_least_bound_candidate(
        [MeshCandidate(1, world, 1, size, zero=3) for size in space.sizes(world)],
        bounds.times,
        _build_fit_check(bounds),
    )


def _find_candidate_row(candidate: MeshCandidate, rows: Sequence[Candidate]) -> Candidate | None:
    return _row_like(build_candidate_report(candidate), rows)
