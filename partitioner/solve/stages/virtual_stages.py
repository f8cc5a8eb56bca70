"""Stages for schedules without a formula: several virtual stages on a rank, backwards in two halves.

The calls are cut into as many stages as the schedule has. The first cuts are exact under the model that the largest
stage paces all others, ``(m v - b) max t_k + b sum t_k``, each within a share of its rank's memory; the shares follow
from the stages' needs. The time of the cuts is then found by simulating the schedule's order, action by action. Better
cuts, and a lower bound on all cuts, come from the paths through the schedule (``improve_cuts.py``). A further lower
bound counts the recomputation that memory requires (``memory_bound.py``).

:func:`fit_virtual_stages` chooses the recomputation of a rank once the calls of its virtual stages are known. Whole
calls are recomputed one after the other, in the order of bytes freed per second, until the virtual stages fit together;
a call frees more bytes if its virtual stage has more microbatches in flight. Alternatives are selective recomputation
of one call after the other, and selective recomputation of all calls with some in full. The fastest one that fits is
used, for each rank by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.call.call_cost import CallCost
from partitioner.errors import CapacityError
from partitioner.passes.ir.hashing import SameObject
from partitioner.schedules.actions import group_stages_by_rank
from partitioner.schedules.csv_table import ScheduleTable
from partitioner.schedules.formulas import (
    Counts,
    InFlightMicrobatches,
    held_microbatches,
    pipeline_seconds,
    shorten_timetable,
)
from partitioner.schedules.makespan import Phases
from partitioner.schedules.registry import ranks_of
from partitioner.solve.stages.improve_cuts import better_cuts
from partitioner.solve.stages.lower_bound import least_time
from partitioner.solve.stages.memory_bound import RankMemory, bound_fitting_cuts
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.split import (
    StagePlan,
    StageSplit,
    recomputed_stage_plans,
    solve_stages,
    stage_plans,
)
from partitioner.solve.stages.tables import StageTables
from partitioner.units import bytes_text

Taken = Callable[[Sequence[StagePlan]], float]
Places = NDArray[np.int64]


def fit_virtual_stages(
    tables: StageTables, plans: Sequence[StagePlan], taken: Taken, capacity: float
) -> list[StagePlan] | None:
    """Choose the recomputation of a rank's virtual stages so that they fit in ``capacity`` bytes together, with the
    least recomputation time. Return the new plans, or ``None`` if the stages do not fit even with the most
    recomputation.

    ``tables``: seconds and bytes of all possible stages. ``plans``: the virtual stages; their calls stay as they are.
    ``taken``: function from a list of plans to the peak bytes of these virtual stages together on one rank.
    """
    every = (
        _yield_variants_by_calls(tables, plans),
        _in_part(tables, plans),
        _yield_variants_by_calls(tables, plans, in_part=True),
    )
    found = [ways for ways in map(list, every) if ways]
    fits = [best for ways in found if (best := _find_least_recompute_fit(ways, taken, capacity)) is not None]
    return min(fits, key=lambda plans: sum(plan.time_s for plan in plans), default=None)


def _find_least_recompute_fit(ways: Sequence[list[StagePlan]], taken: Taken, capacity: float) -> list[StagePlan] | None:
    """Return the first entry of ``ways`` that fits in ``capacity`` bytes, or ``None`` if none fits. ``ways``: variants
    of the plans of one rank's virtual stages, ordered by increasing recomputation, which allows a binary search.
    ``taken``: function from such a list of plans to their peak bytes together on one rank."""
    low, high = 0, len(ways) - 1
    if taken(ways[high]) > capacity:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if taken(ways[middle]) <= capacity else (middle + 1, high)
    return ways[high]


def _yield_variants_by_calls(
    tables: StageTables, plans: Sequence[StagePlan], *, in_part: bool = False
) -> Iterator[list[StagePlan]]:
    """Yield variants of ``plans`` (the virtual stages of a rank): first one without full recomputation, then each time
    a variant in which one more block call (such as a layer) is recomputed in full. The next call is the one that frees
    the most bytes per second of recomputation. Nothing is yielded if the problem requires full recomputation, or allows
    no call to be recomputed.

    ``in_part``: whether the other calls are recomputed selectively (only cheap operators). ``tables``: seconds and
    bytes of all possible stages.
    """
    most = [int(tables.most_recomputed[plan.start, plan.stop]) for plan in plans]
    if tables.problem.recompute == "full" or not any(most) or (in_part and tables.slim is None):
        return
    problem = tables.slim.problem if in_part and tables.slim is not None else tables.problem

    def worth(chunk: int, place: int) -> tuple[float, int, int]:
        cost, stage = problem.calls[place].cost, plans[chunk].number
        of_stage = problem.pace(stage).costs[place]
        seconds = of_stage.recompute_s
        return -problem.not_begun(stage) * cost.saved_bytes / max(seconds, 1e-15), chunk, place

    steps = [(chunk, 0) for chunk in range(len(plans))]  # virtual stage, and how many of its calls are recomputed
    heap = [worth(chunk, plan.start) for chunk, plan in enumerate(plans) if most[chunk]]
    heapq.heapify(heap)
    while heap:
        _, chunk, place = heapq.heappop(heap)
        count = place + 1 - plans[chunk].start
        steps.append((chunk, count))
        if count < most[chunk]:
            heapq.heappush(heap, worth(chunk, place + 1))
    where = _index_plans([plans[chunk] for chunk, _ in steps])
    counts = np.array([count for _, count in steps])
    built = recomputed_stage_plans(tables, *where, counts, in_part=in_part)
    now = built[: len(plans)]
    yield list(now)
    for (chunk, _), plan in list(zip(steps, built, strict=True))[len(plans) :]:
        now[chunk] = plan
        yield list(now)


def _index_plans(plans: Sequence[StagePlan]) -> tuple[Places, Places, Places]:
    """Return three arrays with an entry for each of ``plans``: the index of its stage, the index of its first block
    call (such as a layer), and the index after its last."""
    numbers, starts, stops = np.array([(plan.number, plan.start, plan.stop) for plan in plans], dtype=np.int64).T
    return numbers, starts, stops


def _in_part(tables: StageTables, plans: Sequence[StagePlan]) -> Iterator[list[StagePlan]]:
    """Yield variants of ``plans`` (the virtual stages of a rank): first without recomputation, then each time with one
    more block call (such as a layer) recomputed selectively (only cheap operators). The calls of stages that hold more
    microbatches come first, since they free more memory.

    Nothing is yielded if selective recomputation is not allowed, or if it is required for all stages. ``tables``:
    seconds and bytes of all possible stages.
    """
    if tables.slim is None or tables.problem.recompute == "selective":
        return
    now = recomputed_stage_plans(tables, *_index_plans(plans), np.zeros(len(plans), dtype=np.int64))
    yield list(now)
    order = sorted(range(len(plans)), key=lambda chunk: -tables.problem.not_begun(plans[chunk].number))
    # virtual stage, and how many of its last calls are not recomputed
    steps = [(k, kept) for k in order for kept in _list_spared_counts(tables, plans[k].stop - plans[k].start)]
    where, spared = _index_plans([plans[k] for k, _ in steps]), np.array([kept for _, kept in steps])
    none = np.zeros(len(steps), dtype=np.int64)
    built = recomputed_stage_plans(tables, *where, none, in_part=True, spared=spared)
    for (chunk, _), plan in zip(steps, built, strict=True):
        now[chunk] = plan
        yield list(now)


def _list_spared_counts(tables: StageTables, num_calls: int) -> list[int]:
    """Return, from the greatest to 0, how many of the ``num_calls`` block calls (such as layers) of a virtual stage may
    keep all activations while its other calls are recomputed selectively."""
    return list(range(num_calls - 1, -1, -1)) if tables.slim is not None and tables.slim.may_spare else [0]


_MOST_IMPROVED = 0.1  # of a pipeline's seconds: better cuts saved up to 5 % on models of 32 to 126 layers
_FEW_CALLS = 32  # with fewer, a call is a large part of a stage: better cuts saved up to 15 %, and are found quickly
_ROUNDS = 6  # rounds of dividing a rank's memory
_CLOSE = 0.005  # relative gap that is small enough: a tighter bound is not computed
_MOST_ACTIONS = 200_000  # longest schedule, in actions, for which the tighter bound is computed

_ENOUGH = 1 << 60  # bytes


def solve_virtual(
    problem: StageProblem,
    schedule: str | ScheduleTable,
    num_ranks: int,
    chunks: int | None,
    *,
    proven: bool = True,
    improved: bool = True,
    cutoff_s: float = np.inf,
) -> StageSplit:
    """Cut the block calls (such as layers) of ``problem`` into the virtual stages of ``schedule``, and return the
    stages of each rank with the simulated pipeline time.

    ``problem``: the calls with their costs. It has one stage for each virtual stage, with the memory capacity of the
    rank that runs it. ``num_ranks``: number of pipeline ranks. ``chunks``: number of virtual stages on each rank;
    ``None``: the number that the schedule fixes. ``proven``: whether to compute also a tight lower bound over all cuts.
    ``improved``: whether to improve the cuts by simulation of the schedule. If not, the cuts minimise a formula of the
    slowest stage and the sum of stages. ``cutoff_s``: pipelines that take at least this many seconds are of no use to
    the caller. Raises :class:`PlanError` if there are more stages than calls, and :class:`CapacityError` if no cuts
    that fit were found.
    """
    split = _solve_with_recompute(problem, schedule, num_ranks, chunks, proven, improved, cutoff_s)
    if not proven or problem.chunks > 1 or split.lower_bound_s >= min(split.ended_s, cutoff_s) * (1 - _CLOSE):
        return split
    # with one stage on each rank, memory decides what each stage recomputes, whatever the other stages are
    flying = set_scheduled_in_flight(problem, schedule, num_ranks, chunks)
    stages, m = least_time(flying, min(split.ended_s, cutoff_s)), problem.num_microbatches
    least = stages.pipeline_s(schedule, num_ranks, m, problem.overlap_steps, problem.train)
    return replace(split, lower_bound_s=min(split.ended_s, max(split.lower_bound_s, least)))


def _solve_with_recompute(
    problem: StageProblem,
    schedule: str | ScheduleTable,
    num_ranks: int,
    chunks: int | None,
    proven: bool,
    improved: bool,
    cutoff_s: float,
) -> StageSplit:
    """Return the best cut of the block calls (such as layers) of ``problem`` into the virtual stages of ``schedule``,
    with the recomputation that makes it fastest. ``num_ranks``: number of pipeline ranks. ``chunks``: number of virtual
    stages on each rank; ``None``: the number that the schedule fixes. ``proven``: whether to compute also a tight lower
    bound over all cuts. ``improved``: whether to improve the cuts by simulation of the schedule. ``cutoff_s``:
    pipelines of at least this many seconds are of no use."""
    lacking: CapacityError | None = None
    found: list[StageSplit] = []
    try:
        found.append(_solve_virtual_stages(problem, schedule, num_ranks, chunks, proven, improved, cutoff_s))
    except CapacityError as error:
        lacking = error
    if found and not _cut_by_memory(problem, found[0]):
        return _tighten_bound(problem, found[0], found[0].lower_bound_s, schedule, num_ranks, chunks, proven, cutoff_s)
    if lacking is not None and (not problem.train or problem.recompute is not None):
        raise lacking
    for how in ("selective", "full") if problem.slim is not None else ("full",):
        fastest_s = min((cutoff_s, *(split.ended_s for split in found)))
        if found and _bound_recomputed_seconds(problem, num_ranks, how) >= fastest_s:
            continue
        with suppress(CapacityError):
            asked = replace(problem, recompute=how)
            split = _solve_virtual_stages(asked, schedule, num_ranks, chunks, False, improved, cutoff_s)
            found.append(_recompute_least(problem, split, schedule, num_ranks, chunks))
    if lacking is not None and found:
        roomy = replace(
            problem, capacity=tuple(_ENOUGH for _ in problem.capacity)
        )  # the bound without a memory limit holds for all cuts
        least = _solve_virtual_stages(roomy, schedule, num_ranks, chunks, proven, improved, cutoff_s).lower_bound_s
    elif lacking is not None:
        raise lacking
    else:
        least = found[0].lower_bound_s
    best = min(found, key=lambda split: split.ended_s)
    return _tighten_bound(problem, best, least, schedule, num_ranks, chunks, proven, cutoff_s)


def _tighten_bound(
    problem: StageProblem,
    best: StageSplit,
    least: float,
    schedule: str | ScheduleTable,
    num_ranks: int,
    chunks: int | None,
    proven: bool,
    cutoff_s: float,
) -> StageSplit:
    """Return ``best``, a cut that fits, with a lower bound in seconds on all cuts of ``problem``. The bound is
    ``least``, or a tighter one if ``proven`` is set and ``least`` is far from the time of ``best``. ``schedule``: name
    or table of the schedule. ``num_ranks``: number of pipeline ranks. ``chunks``: number of virtual stages on each
    rank; ``None``: the number that the schedule fixes. ``cutoff_s``: a bound of this many seconds is tight enough."""
    limit_s = min(best.ended_s, cutoff_s)
    if proven and least < limit_s * (1 - _CLOSE):
        # the cases take several times as long as the rest of the bound
        known = best.virtual if best.ended_s <= cutoff_s else ()
        least = max(least, _bound_with_memory(problem, best, schedule, num_ranks, chunks, limit_s, known))
    return replace(best, lower_bound_s=min(best.ended_s, least))


def _bound_with_memory(
    problem: StageProblem,
    split: StageSplit,
    schedule: str | ScheduleTable,
    num_ranks: int,
    chunks: int | None,
    limit_s: float,
    known: Sequence[StagePlan],
) -> float:
    """Return a lower bound in seconds on the pipeline over all cuts into virtual stages, with the recomputation that
    memory requires. Return 0 if the bound would take long to compute, if ``problem`` fixes recomputation or stages, or
    if there is no backward.

    ``split``: a cut that fits. ``schedule``: name or table of the schedule. ``num_ranks``: number of pipeline ranks.
    ``chunks``: number of virtual stages on each rank; ``None``: the number that the schedule fixes. ``limit_s``: a
    bound of this many seconds is tight enough. ``known``: the stages of ``split`` if the bound may be tightened by
    distinguishing cases (branch and bound), otherwise empty.
    """
    fixed = problem.recompute is not None or problem.may_be_empty or bool(problem.barred)
    timetable, more = shorten_timetable(schedule, num_ranks, problem.num_microbatches, chunks)
    if fixed or not problem.train or sum(map(len, timetable.orders)) > _MOST_ACTIONS:
        return 0.0
    ranks = _VirtualStageRanks.of(problem, schedule, num_ranks, chunks)
    tables = StageTables(ranks.problem)
    memory = [
        RankMemory(stages, moments, capacity)
        for stages, moments, capacity in zip(ranks.own, ranks.flying.together, ranks.capacity, strict=True)
    ]
    phases = [phases_of(problem, k, plan, ends=True) for k, plan in enumerate(split.virtual)]
    left, goal_s = more[2] if more is not None else 0, limit_s * (1 - _CLOSE / 5)
    return bound_fitting_cuts(tables, timetable, phases, memory, left, limit_s, goal_s=goal_s, known=known)


def _bound_recomputed_seconds(problem: StageProblem, num_ranks: int, how: str) -> float:
    """Return a lower bound in seconds on the pipeline of ``problem`` if all block calls (such as layers) are
    recomputed: the work, divided evenly over ``num_ranks`` ranks. ``how``: the kind of recomputation, ``"full"`` or
    ``"selective"``."""

    def of_call(cost: CallCost, number: int) -> float:
        cost = cost.selective() if how == "selective" else cost
        again = cost.recompute_s if how == "full" and number < problem.last_repeated else 0.0
        return cost.forward_total_s + cost.backward_total_s + again

    paces = {SameObject(pace): pace for pace in map(problem.pace, range(problem.num_stages))}.values()
    seconds = [[of_call(cost, number) for number, cost in enumerate(pace.costs)] for pace in paces]
    return problem.num_microbatches * float(np.min(seconds, axis=0).sum()) / num_ranks


@dataclass(frozen=True)
class _VirtualStageRanks:
    """The virtual stages of ``problem``, grouped by the rank that runs them under ``schedule``.

    ``chunks``: number of virtual stages on a rank; ``None``: the number that the schedule fixes. ``own``: for each
    rank, the indices of its virtual stages.
    """

    problem: StageProblem
    schedule: str | ScheduleTable
    chunks: int | None
    own: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls, problem: StageProblem, schedule: str | ScheduleTable, num_ranks: int, chunks: int | None
    ) -> _VirtualStageRanks:
        """Return the virtual stages of ``problem`` under ``schedule``, grouped by rank. ``num_ranks``: number of
        pipeline ranks. ``chunks``: number of virtual stages on a rank; ``None``: the number that the schedule fixes.
        """
        own = group_stages_by_rank(ranks_of(schedule, num_ranks, chunks), num_ranks)
        return cls(set_scheduled_in_flight(problem, schedule, num_ranks, chunks), schedule, chunks, own)

    @cached_property
    def flying(self) -> InFlightMicrobatches:
        """Return how many microbatches each virtual stage holds under the schedule, for each time at which memory may
        peak. A number of microbatches is a pair (backward not begun, between the two halves of a split backward)."""
        return held_microbatches(self.schedule, len(self.own), self.problem.num_microbatches, self.chunks)

    @cached_property
    def capacity(self) -> list[float]:
        """Return, for each rank of the pipeline, its usable memory in bytes."""
        return [self.problem.capacity[stages[0]] for stages in self.own]

    def seconds(self, split: StageSplit, *, ends: bool = True) -> float:
        """Return the seconds that a step's pipeline takes with the stages of ``split``, by simulating the forwards and
        backwards of the schedule. ``ends``: whether to include the collectives at the ends of the step, if the problem
        has them."""
        problem = self.problem
        phases = [phases_of(problem, k, plan, ends=ends) for k, plan in enumerate(split.stages)]
        m, overlap = problem.num_microbatches, problem.overlap_steps
        how = self.schedule, len(self.own), m, self.chunks, phases, problem.train
        return pipeline_seconds(*how, overlap_steps=overlap)

    def memory(self, tables: StageTables, every: Sequence[StagePlan]) -> list[float]:
        """Return, for each pipeline rank, the peak bytes of all its virtual stages together. ``tables``: seconds and
        bytes of all possible stages. ``every``: the plans (block calls, seconds and memory) of all virtual stages in
        order."""
        return [self.taken(tables, rank, [every[k] for k in own]) for rank, own in enumerate(self.own)]

    @cached_property
    def _counts_together(self) -> list[NDArray[np.float64]]:
        """Return, for each rank, an array of numbers of microbatches in flight, shape ``[virtual stages, 2, moments]``.
        Index 0 of the second dim has the microbatches whose backward has not begun, index 1 those between the two
        halves of their backward. The moments are the times at which the memory of the rank may peak."""
        return [np.moveaxis(np.array(moments, dtype=np.float64), 0, 2) for moments in self.flying.together]

    def hold(self, tables: StageTables, every: Sequence[StagePlan]) -> bool:
        """Return whether the virtual stages of every rank fit in its memory together. ``every``: the plans of all
        virtual stages in order. ``tables``: seconds and bytes of all possible stages."""
        every_rank = zip(self.own, self.capacity, strict=True)
        return all(
            self.taken(tables, rank, [every[k] for k in own]) <= room for rank, (own, room) in enumerate(every_rank)
        )

    def taken(self, tables: StageTables, rank: int, plans: Sequence[StagePlan]) -> float:
        """Return the peak bytes of the pipeline rank with index ``rank``. The result is the sum of the peaks of the
        rank's virtual stages, except that shared parameters and working memory count once, and activations count only
        as far as they exist at the same time.

        ``plans``: the plan of each virtual stage of the rank, in the order of ``own[rank]``. ``tables``: seconds and
        bytes of all possible stages.
        """
        problem, stages = tables.problem, self.own[rank]
        ways = [tables.slim if plan.selective and tables.slim is not None else tables for plan in plans]
        working = [
            float(way.segments.largest_working[plan.start, plan.stop]) + problem.overhead.working_bytes
            for way, plan in zip(ways, plans, strict=True)
        ]
        states = [float(tables.states[plan.start, plan.stop]) for plan in plans]
        names = {name for plan in plans for call in problem.calls[plan.start : plan.stop] for name in call.states}
        total = sum(float(plan.memory) for plan in plans) - sum(working) + max(working)
        total += sum(problem.state_bytes.get(name, 0.0) for name in names) - sum(states)
        if not problem.train:
            return total
        apart, at_once = 0.0, np.zeros(())
        for k, counts, each in zip(stages, self._counts_together[rank], _in_flight_sizes(tables, plans), strict=True):
            apart += max(_sum_in_flight_bytes(pair, each) for pair in problem.held(k))
            at_once = at_once + (counts[0] * each[0] + counts[1] * each[1])
        return total - apart + float(at_once.max())


def _in_flight_sizes(tables: StageTables, plans: Sequence[StagePlan]) -> list[tuple[float, float]]:
    """Return the activation bytes of a microbatch on each of the virtual stages ``plans``, as pairs: the bytes of a
    microbatch whose backward has not begun, and of a microbatch between the two halves of its backward. ``tables``:
    seconds and bytes of all possible stages."""
    sizes = np.empty((2, len(plans)))
    selective = np.array([plan.selective and tables.slim is not None for plan in plans])
    for way, chosen in ((tables, ~selective), (tables.slim, selective)):
        if way is not None and chosen.any():
            some = [plan for plan, is_chosen in zip(plans, chosen.tolist(), strict=True) if is_chosen]
            _, starts, stops = _index_plans(some)
            recomputed, spared = np.array([(plan.recompute, plan.spared) for plan in some]).T
            sizes[:, chosen] = way.each(starts, stops, recomputed, spared)
    return [(begun, half) for begun, half in sizes.T.tolist()]


def _solve_virtual_stages(
    problem: StageProblem,
    schedule: str | ScheduleTable,
    num_ranks: int,
    chunks: int | None,
    proven: bool,
    improved: bool,
    cutoff_s: float,
) -> StageSplit:
    """Cut the block calls (such as layers) of ``problem`` into the virtual stages of ``schedule``, and return the
    stages of each rank. ``num_ranks``: number of pipeline ranks. ``chunks``: number of virtual stages on a rank;
    ``None``: the number that the schedule fixes. ``proven``: whether the search may take longer, for a tighter lower
    bound. ``improved``: whether to improve the cuts by simulation of the schedule. ``cutoff_s``: pipelines of at least
    this many seconds are of no use. Raises :class:`CapacityError` if no cuts that fit were found."""
    ranks = _VirtualStageRanks.of(problem, schedule, num_ranks, chunks)
    capacity = ranks.capacity
    whole = tables = StageTables(ranks.problem)
    split = solve_stages(ranks.problem, tables)  # raises if some virtual stage does not fit even alone on its rank
    found: list[StageSplit] = []
    lacking: tuple[int, float] = 0, np.inf
    for attempt in range(_ROUNDS):
        excess = [t - c for t, c in zip(ranks.memory(tables, split.stages), capacity, strict=True)]
        if max(excess) <= 0:
            found.append(split)
            break
        lacking = min(lacking, (int(np.argmax(excess)), max(excess)), key=lambda lacks: lacks[1])
        if attempt == 0 and (made := _made_again(whole, split, ranks)) is not None:
            found.append(made)
        if attempt == _ROUNDS - 1:
            break
        needs = [float(stage.memory) for stage in split.stages]
        limits = _divide_rank_capacity(
            needs, ranks.own, [c - max(0.0, e) for c, e in zip(capacity, excess, strict=True)]
        )
        try:
            tables = whole.with_capacity(limits)
            split = solve_stages(tables.problem, tables)
        except CapacityError:
            break
    if found:
        split = min(found, key=ranks.seconds)
        quick = not proven and _cut_by_memory(ranks.problem, split)
        bound = 0.0
        # without a proof, the search for better cuts is of no use where it cannot reach the cutoff
        may_help = len(problem.calls) < _FEW_CALLS or ranks.seconds(split) * (1 - _MOST_IMPROVED) < cutoff_s
        if improved and (proven or may_help):
            split, bound = _improve_virtual_cuts(whole, split, ranks, cutoff_s, quick)
        return _join_stages_by_rank(split, ranks, ranks.memory(whole, split.stages), bound)
    stage, missing = lacking
    raise CapacityError(
        f"pipeline rank {stage} of {num_ranks} needs {bytes_text(capacity[stage] + missing)} for its "
        f"{len(ranks.own[stage])} virtual stages, but only {bytes_text(capacity[stage])} are usable on a "
        f"device: {bytes_text(missing)} too much",
        stage=stage,
        missing_bytes=round(missing),
    )


def set_scheduled_in_flight(
    problem: StageProblem, schedule: str | ScheduleTable, num_ranks: int, chunks: int | None
) -> StageProblem:
    """Return a copy of ``problem`` in which the field ``flying`` has the numbers of microbatches that each stage holds
    under ``schedule``. If the problem is not for training, return it unchanged.

    ``num_ranks``: number of pipeline ranks. ``chunks``: number of virtual stages on each rank; ``None``: the number
    that the schedule fixes.
    """
    if not problem.train:
        return problem
    flying = held_microbatches(schedule, num_ranks, problem.num_microbatches, chunks)
    return replace(problem, flying=flying.pairs)


def _recompute_least(
    problem: StageProblem,
    split: StageSplit,
    schedule: str | ScheduleTable,
    num_ranks: int,
    chunks: int | None,
) -> StageSplit:
    """Return ``split``, a cut into virtual stages in which all block calls (such as layers) are recomputed, with the
    least recomputation of ``problem`` that fits instead, if that is faster. The other arguments are those of
    :func:`solve_virtual`."""
    ranks = _VirtualStageRanks.of(problem, schedule, num_ranks, chunks)
    tables = StageTables(ranks.problem)
    made = _made_again(tables, replace(split, stages=split.virtual), ranks, always=True)
    if made is None:
        return split
    joined = _join_stages_by_rank(made, ranks, ranks.memory(tables, made.stages), split.lower_bound_s)
    return min(split, joined, key=lambda each: each.ended_s)


def _made_again(
    tables: StageTables, split: StageSplit, ranks: _VirtualStageRanks, *, always: bool = False
) -> StageSplit | None:
    """Return a copy of ``split``, a cut into virtual stages, with enough recomputation for every rank to fit in memory;
    the cuts stay as they are. Return ``None`` if some rank cannot fit. ``ranks``: the virtual stages of each rank.
    ``tables``: seconds and bytes of all possible stages. ``always``: choose the recomputation anew also for ranks that
    fit."""
    stages = list(split.stages)
    for rank, (virtual, room) in enumerate(zip(ranks.own, ranks.capacity, strict=True)):
        taken = partial(ranks.taken, tables, rank)
        plans = [stages[k] for k in virtual]
        if not always and taken(plans) <= room:
            continue
        made = fit_virtual_stages(tables, plans, taken, room)
        if made is None:
            return None
        for k, plan in zip(virtual, made, strict=True):
            stages[k] = plan
    return replace(split, stages=tuple(stages))


def _divide_rank_capacity(
    needs: Sequence[float], own: Sequence[Sequence[int]], capacity: Sequence[float]
) -> list[float]:
    """Divide the memory of each rank among its virtual stages in proportion to ``needs``, the bytes that each stage
    needs, and return the bytes of each virtual stage. ``capacity``: usable bytes by rank. ``own``: for each rank, the
    indices of its virtual stages.
    """
    limits = [0.0] * len(needs)
    for stages, room in zip(own, capacity, strict=True):
        total = sum(needs[k] for k in stages)
        for k in stages:
            limits[k] = room * needs[k] / total if total else room / len(stages)
    return limits


def _sum_in_flight_bytes(counts: Counts, each: tuple[float, float]) -> float:
    """Return the bytes of the microbatches in flight. ``counts``: numbers of microbatches. ``each``: bytes of one
    microbatch. Both are pairs (backward not begun, between the two halves of the backward)."""
    return counts[0] * each[0] + counts[1] * each[1]


def _improve_virtual_cuts(
    tables: StageTables, split: StageSplit, ranks: _VirtualStageRanks, cutoff_s: float, quick: bool
) -> tuple[StageSplit, float]:
    """Search for faster cuts into stages, starting from the cuts of ``split``. Return the fastest cuts that fit, and a
    lower bound in seconds over all cuts.

    ``tables``: tables in which each virtual stage may use all memory of its rank. ``ranks``: the virtual stages of each
    rank. ``cutoff_s``: pipelines that take at least this many seconds are of no use to the caller. ``quick``: whether
    to run only a quarter of the iterations.
    """
    problem, p = ranks.problem, len(ranks.own)
    table, more = shorten_timetable(ranks.schedule, p, problem.num_microbatches, ranks.chunks)
    times = np.array(
        [
            [c.forward_total_s + (c.backward_total_s if problem.train else 0.0) for c in pace.costs]
            for pace in {id(pace): pace for pace in map(problem.pace, range(problem.num_stages))}.values()
        ]
    )
    steady = max(
        float(times.sum(axis=1).min()) / p, float(times.min(axis=0).max())
    )  # an even share of the work, or the largest call
    rest = more[2] * steady if more is not None else 0.0
    found = better_cuts(tables, table, (0, *(plan.stop for plan in split.stages)), cutoff_s - rest, quick=quick)
    bound = found.bound + rest
    # other cuts that fit may need no recomputation
    known = ranks.seconds(split) if _cut_by_memory(problem, split) else np.inf
    plans: dict[tuple[int, int, int], StagePlan] = {}  # cuts have most runs of calls in common
    for seconds, cuts in found.cuts:
        if seconds + rest >= known:
            break
        runs = [(k, *pair) for k, pair in enumerate(pairwise(cuts))]
        if new := [run for run in runs if run not in plans]:
            plans |= zip(new, stage_plans(tables, *np.array(new).T), strict=True)
        stages = tuple(plans[run] for run in runs)
        if not ranks.hold(tables, stages):
            continue
        faster = replace(split, stages=stages)
        if known == np.inf or ranks.seconds(faster) < known:
            return faster, bound
        break
    return split, bound


def _cut_by_memory(problem: StageProblem, split: StageSplit) -> bool:
    """Return whether stages of ``split`` recompute block calls (such as layers) only to fit in memory, because
    ``problem`` does not require recomputation. Other cuts may then be faster, because the search for cuts does not
    count the time of this recomputation."""
    return problem.recompute is None and any(plan.recompute or plan.selective for plan in split.stages)


def _join_stages_by_rank(
    split: StageSplit, ranks: _VirtualStageRanks, memory: Sequence[float], bound: float
) -> StageSplit:
    """Return ``split``, a cut of the model into virtual stages, as a cut with one entry for each rank, which joins the
    rank's virtual stages. The result has the simulated seconds of the schedule. ``ranks``: the virtual stages of each
    rank. ``memory``: peak bytes of each rank. ``bound``: lower bound in seconds over all cuts."""
    seconds = ranks.seconds(split, ends=False)
    with_ends = ranks.seconds(split) if ranks.problem.ends else 0.0
    stages = tuple(
        _merge_virtual_stages([split.stages[k] for k in virtual], round(taken))
        for virtual, taken in zip(ranks.own, memory, strict=True)
    )
    least = min(max(seconds, with_ends), bound)
    return StageSplit(stages, seconds, least, split.microbatch_s, split.stages, with_ends)


def _merge_virtual_stages(parts: Sequence[StagePlan], memory: int) -> StagePlan:
    """Return the virtual stages of one rank as one plan of a single stage with summed seconds. ``parts``: the plans of
    these virtual stages. ``memory``: peak bytes of the rank."""
    total = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("forward_s", "backward_s", "recompute_s", "transfer_s", "recompute")
    }
    return StagePlan(
        start=parts[0].start,
        stop=parts[-1].stop,
        memory=memory,
        number=parts[0].number,
        parts=tuple(parts),
        selective=any(part.selective for part in parts),
        **total,
    )


def phases_of(problem: StageProblem, stage: int, plan: StagePlan, *, ends: bool = False) -> Phases:
    """Return the seconds of one microbatch in a virtual stage: forward, backward for inputs, backward for weights, and
    the waits for values and for gradients. Collectives and recomputation belong to the backward for inputs. While a
    message is on its way to the stage, its rank may run another virtual stage, or another microbatch.

    ``stage``: index of the virtual stage. ``plan``: its block calls (such as layers) and seconds. ``ends``: whether to
    return also the seconds of the collectives at the ends of a step, if the problem has them. ``problem``: the calls
    and links.
    """
    costs = problem.pace(stage).costs[plan.start : plan.stop]
    weights = sum(c.later_s for c in costs) if problem.train else 0.0
    values, gradients = plan.forward_wait_s, plan.transfer_s - plan.forward_wait_s
    inputs = plan.backward_s + plan.recompute_s - weights
    each = (problem.ends[stage].gathers, problem.ends[stage].reductions) if ends and problem.ends else ()
    gathered, reduced = (float(seconds[plan.start : plan.stop].sum()) for seconds in each) if each else (0.0, 0.0)
    return Phases(plan.forward_s, inputs, weights, values, gradients, gathered, reduced)
