"""Cut the sequence of calls into pipeline stages: the exact optimum under every stage's memory.

A stage is a sequence of consecutive calls. Let ``t_s`` be the time of one microbatch on stage ``s`` (forward, backward,
recomputation, waits for neighbours). A step of ``m`` microbatches then takes ``(m - b) max t_s + b sum t_s`` (Narayanan
et al. 2021, section 2.2, for uneven stages; ``b`` depends on the schedule, see ``partitioner/schedules/formulas.py``).
Stages hold as many microbatches as the schedule has in flight, and recompute as many of their first calls as memory
demands.

For a given limit on the maximum, the least sum is a shortest path over (stage, cut), computed with one vectorised
min-plus step per stage. Few limits have to be tried, because the least sum is bounded below by its value without a
limit.

If no cuts fit, ``capacity_error`` returns an error that names the stage that lacks memory, and how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.errors import CapacityError, PlanError
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.tables import TINY, Counts, StageTables, Table, min_max
from partitioner.units import bytes_text

_HOW = {
    "none": " without recomputation",
    "selective": " with selective recomputation",
    "full": " with repeated layers recomputed",
}


def check_room(takes: str, needed: float, room: float) -> None:
    """Raise :class:`CapacityError` if ``needed`` bytes exceed ``room``, the bytes of memory that are available.
    ``takes``: the start of the error message, which names the data that need the memory, such as ``"one layer takes 12
    GB"``."""
    if (missing := math.ceil(needed - room)) > 0:
        text = f"{takes}, but only {bytes_text(room)} are usable on a device: {bytes_text(missing)} too much"
        raise CapacityError(text, missing_bytes=missing, at_least=True)


def _find_least_shortage(tables: StageTables) -> tuple[float, int, list[int]]:
    """Find the cut of the block calls (such as layers) into stages that lacks the least memory. The shortage of a cut
    is that of its worst stage. ``tables``: seconds and bytes of all possible stages.

    Return three values: the shortage in bytes (negative if memory is left over); the index of the worst stage; and the
    cuts, which are the index of the first call of each stage, followed by the number of calls.
    """
    least = [_find_pinned_memory(tables, stage) for stage in range(len(tables.allowed))]
    excess = [m - c for m, c in zip(least, tables.problem.capacity, strict=True)]
    worst, cuts = min_max(excess)
    lacking = [float(excess[s][cuts[s], cuts[s + 1]]) for s in range(len(excess))]
    return worst, int(np.argmax(lacking)), cuts


def _find_pinned_memory(tables: StageTables, stage: int) -> Table:
    """Return a table whose entry ``[start, stop]`` is the least peak bytes of the stage with index ``stage`` if it
    consists of the block calls ``start:stop`` (such as layers): with the most recomputation, or with full recomputation
    if the problem requires it. The entry is infinite if the stage may not consist of these calls. ``tables``: seconds
    and bytes of all possible stages.
    """
    if tables.problem.recompute != "full" or not tables.problem.train:
        return tables.least_memory[stage]
    start, stop = np.nonzero(tables.allowed[stage])
    found = np.full(tables.allowed[stage].shape, np.inf)
    found[start, stop] = tables.memory(stage, start, stop, tables.recomputed(stage, start, stop))
    return found


def capacity_error(tables: StageTables, *, relaxed: bool = False) -> PlanError:
    """Return the error to raise if no cut into stages fits in memory or satisfies the problem's constraints. It names
    the stage that lacks memory in the cut with the least shortage, and the missing bytes. ``tables``: seconds and bytes
    of all possible stages.

    The error is a plain :class:`PlanError` if block calls (such as layers) with a fixed stage exclude every cut.
    ``relaxed``: whether the error must call the missing bytes a lower bound ("at least").
    """
    problem = tables.problem
    missing, stage, cuts = _find_least_shortage(tables)
    if not np.isfinite(missing):
        pins = ", ".join(f"{problem.calls[i].path} on stage {s}" for i, s in sorted(problem.pinned.items()))
        return PlanError(
            f"the model cannot be cut into {problem.num_stages} stages with {pins}; expected at least one call on "
            "every stage: change stage_of or pp"
        )
    capacity = problem.capacity[stage]
    paths = [call.path for call in problem.calls[cuts[stage] : cuts[stage + 1]]]
    where = " to ".join(dict.fromkeys((paths[0], paths[-1]))) if paths else "without calls"
    how = _HOW.get(problem.recompute or "", " even with everything recomputed") if problem.train else ""
    least = "at least " if relaxed else ""
    return CapacityError(
        f"stage {stage} of {problem.num_stages} ({where}) needs {least}{bytes_text(capacity + missing)}{how}, "
        f"but only {bytes_text(capacity)} are usable on a device: {least}{bytes_text(missing)} too much",
        stage=stage,
        missing_bytes=round(missing),
    )


SLACK = 0.01  # share of the optimum that may be lost for equal stages


@dataclass(frozen=True)
class StagePlan:
    """The block calls ``start:stop`` (such as layers) of one pipeline stage, with seconds and memory.

    ``start``, ``stop``: indices among the calls of the problem; ``stop`` itself is not included. ``recompute``: how
    many of the calls, counted from the first, backward recomputes in full. ``selective``: whether backward also
    recomputes the operators of the other calls that are cheap to recompute. ``spared``: how many of the calls, counted
    from the last, recompute nothing if ``selective``. Seconds are per microbatch: ``forward_s``;
    ``backward_s``, without recomputation; ``recompute_s``, the recomputation; ``transfer_s``, waits for neighbouring
    stages in both directions; ``forward_wait_s``, the part of ``transfer_s`` before the forward. ``memory``: peak
    bytes. ``in_flight``: largest number of microbatches whose activations it holds at a time. ``number``: index of the
    stage in the problem. ``parts``: the virtual stages, if the plan is for a rank that has several; calls of other
    ranks lie between them.
    """

    start: int
    stop: int
    recompute: int
    forward_s: float
    backward_s: float
    recompute_s: float
    transfer_s: float
    memory: int
    forward_wait_s: float = 0.0
    number: int = 0
    parts: tuple[StagePlan, ...] = ()
    selective: bool = False
    in_flight: float = 1.0
    spared: int = 0

    def is_selective(self, place: int) -> bool:
        """Return whether backward recomputes only the cheap operators of the block call (such as a layer) with index
        ``place``. The stage must not have several virtual stages."""
        return self.selective and self.start + self.recompute <= place < self.stop - self.spared

    @property
    def runs(self) -> tuple[StagePlan, ...]:
        """Return the parts of this pipeline stage that consist of consecutive block calls (such as layers): its virtual
        stages, or the stage itself if it has none.
        """
        return self.parts or (self,)

    @property
    def places(self) -> list[int]:
        """Return the indices of this stage's block calls (such as layers) among the calls of the problem, in order."""
        return [place for run in self.runs for place in range(run.start, run.stop)]

    @property
    def time_s(self) -> float:
        return self.forward_s + self.backward_s + self.recompute_s + self.transfer_s


@dataclass(frozen=True)
class StageSplit:
    """A cut of the block calls (such as layers) into pipeline stages (``stages``), and the seconds of one step of the
    pipeline.

    ``pipeline_s``: the least seconds that were found; ``stages`` may take slightly longer, because stages of about
    equal time are preferred. ``with_ends_s``: the seconds of the pipeline with the collectives at the ends of a step
    (gathers of parameters, reductions of gradients); 0 if there are none. ``lower_bound_s``: lower bound over all cuts
    on the pipeline's seconds, including those collectives if there are any. ``microbatch_s``: seconds of one microbatch
    through all calls, forward and backward, by the calls' own costs. ``virtual``: the virtual stages if a rank has
    several, otherwise empty.
    """

    stages: tuple[StagePlan, ...]
    pipeline_s: float
    lower_bound_s: float
    microbatch_s: float = 0.0
    virtual: tuple[StagePlan, ...] = ()
    with_ends_s: float = 0.0

    @property
    def ended_s(self) -> float:
        """Return the seconds of the pipeline, including the collectives at the ends of a step (gathers of parameters,
        reductions of gradients) if they are known."""
        return max(self.pipeline_s, self.with_ends_s)

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(stage.start for stage in self.stages[1:])


class NoneLeft(CapacityError):
    """Error: no cut of the block calls (such as layers) into pipeline stages is allowed. Each cut that fits in memory
    has a stage that the problem forbids.
    """


def solve_stages(problem: StageProblem, tables: StageTables | None = None) -> StageSplit:
    """Return the cut of the block calls (such as layers) of ``problem`` into stages with the least pipeline time.
    ``tables``: seconds and bytes of all possible stages of ``problem``; ``None``: they are computed.

    Raises :class:`PlanError` if there are more stages than calls, and :class:`CapacityError` if no cut fits in memory.
    """
    tables = tables or StageTables(problem)
    split = None if tables.hopeless else _Splitter(tables).best()
    if split is None:
        raise NoneLeft("no other stages fit") if problem.barred else capacity_error(tables)
    return split


class _Splitter:
    """Searches for the best cut of block calls (such as layers) into stages by shortest paths in a graph whose nodes
    are pairs (stage, first call of the stage). ``tables``: the seconds and memory of all possible stages.
    """

    def __init__(self, tables: StageTables) -> None:
        self.tables = tables
        self.problem = tables.problem

    def best(self) -> StageSplit | None:
        """Return the cut into stages that minimises ``(m - b) * slowest + b * total``, the time of the pipeline, or
        ``None`` if no cut fits in memory. ``slowest`` and ``total`` are the maximum and the sum of the stage times per
        microbatch. ``m`` is the number of microbatches (times virtual stages). ``b`` (the field ``bubble`` of the
        problem) says how much of the time is filling and draining the pipeline."""
        bubble = self.problem.bubble
        often = self.problem.num_rounds - bubble
        free = self.path(np.inf)
        if free is None:
            return None
        if self.problem.num_stages == 1:
            return self.split(free, self.cost(free))
        if often <= 0:
            return self.split(self.balanced(free), self.cost(free))
        least_sum, lowest = self.total(free), self.lowest_limit()
        even = self.path(lowest)
        assert even is not None, lowest
        best, best_cost = min(((cuts, self.cost(cuts)) for cuts in (even, free)), key=lambda found: found[1])
        ceiling = np.inf
        while True:
            # better cuts have a smaller maximum than these
            limit = min((best_cost - bubble * least_sum) / often, ceiling) * (1 - TINY)
            if limit <= lowest:
                break
            cuts = self.path(limit)
            assert cuts is not None, limit
            if self.cost(cuts) < best_cost:
                best, best_cost = cuts, self.cost(cuts)
            # under a smaller limit the least sum does not fall
            least_sum = max(least_sum, self.total(cuts))
            ceiling = self.largest(cuts)
        return self.split(self.balanced(best), best_cost)

    def balanced(self, best: list[int]) -> list[int]:
        """Return cuts of the block calls (such as layers) into stages of nearly equal time. Their pipeline time is at
        most 1 % longer than that of ``best``, the cuts with the least pipeline time. Within this limit, the slowest
        stage takes the least time. Cuts are the index of the first call of each stage, followed by the number of calls.

        With few microbatches the step time hardly depends on the cuts. Equal stages then need less memory and suit
        other schedules.
        """
        low, high = self.lowest_limit(), self.largest(best)
        limit, allowed = low, (1 + SLACK) * self.cost(best)
        while high - low > SLACK * high:
            cuts = self.path(limit)
            if cuts is not None and self.cost(cuts) <= allowed:
                best, high = cuts, self.largest(cuts)
            else:
                low = limit
            limit = (low + high) / 2
        return best

    def path(self, limit: float) -> list[int] | None:
        """Return the cuts of the block calls (such as layers) into stages with the least sum of stage times, if no
        stage may take more than ``limit`` seconds per microbatch; ``None`` if there are no such cuts. Cuts are the
        index of the first call of each stage, followed by the number of calls."""
        p, least = self.problem.num_stages, 0 if self.problem.may_be_empty else 1
        width = len(self.problem.calls) + 1 - p * least  # the other stages have at least one call each
        reached = np.full(width, np.inf)  # by the number of calls more than the least before the cut
        reached[0] = 0.0
        came: list[NDArray[np.int64]] = []
        ends = np.arange(width)
        for stage, every in enumerate(self.tables.times):
            first = stage * least
            time = every[first : first + width, first + least : first + least + width]
            total = reached[:, None] + (time if limit == np.inf else np.where(time <= limit, time, np.inf))
            came.append(total.argmin(axis=0))
            reached = total[came[stage], ends]
        if not np.isfinite(reached[-1]):
            return None
        places = [width - 1]
        for stage in range(p - 1, -1, -1):
            places.append(int(came[stage][places[-1]]))
        return [place + least * stage for stage, place in enumerate(reversed(places))]

    def lowest_limit(self) -> float:
        """Return the least seconds per microbatch that the slowest stage can have, over all cuts of the block calls
        (such as layers) into stages.
        """
        return float(min_max(self.tables.times, 0 if self.problem.may_be_empty else 1)[0])

    def stage_times(self, cuts: list[int]) -> list[float]:
        return [float(self.tables.times[s][cuts[s], cuts[s + 1]]) for s in range(self.problem.num_stages)]

    def largest(self, cuts: list[int]) -> float:
        return max(self.stage_times(cuts))

    def total(self, cuts: list[int]) -> float:
        return sum(self.stage_times(cuts))

    def cost(self, cuts: list[int]) -> float:
        bubble = self.problem.bubble
        return (self.problem.num_rounds - bubble) * self.largest(cuts) + bubble * self.total(cuts)

    def split(self, cuts: list[int], lower_bound_s: float) -> StageSplit:
        bounds = np.array(cuts)
        stages = tuple(stage_plans(self.tables, np.arange(self.problem.num_stages), bounds[:-1], bounds[1:]))
        costs = [call.cost for call in self.problem.calls]
        microbatch = sum(c.forward_total_s + (c.backward_total_s if self.problem.train else 0.0) for c in costs)
        return StageSplit(stages, self.cost(cuts), lower_bound_s, microbatch)


def stage_plan(
    tables: StageTables, stage: int, start: int, stop: int, recompute: int | None = None, *, in_part: bool = False
) -> StagePlan:
    """Return the plan of one stage that holds the block calls ``start:stop`` (such as layers), with its seconds and
    peak bytes.

    ``tables``: seconds and bytes of all possible stages. ``stage``: index of a stage of the problem. ``recompute``: how
    many of the calls, counted from the first, are recomputed in full; ``None``: the fewest with which the stage fits in
    memory. ``in_part``: whether to recompute the other calls selectively (only operators that are cheap to recompute);
    it is ignored if ``recompute`` is ``None``.
    """
    where = np.array([stage]), np.array([start]), np.array([stop])
    if recompute is None:
        return stage_plans(tables, *where)[0]
    return recomputed_stage_plans(tables, *where, np.array([recompute]), in_part=in_part)[0]


def recomputed_stage_plans(
    tables: StageTables,
    stages: Counts,
    starts: Counts,
    stops: Counts,
    recomputed: Counts,
    *,
    in_part: bool = False,
    spared: Counts | None = None,
) -> list[StagePlan]:
    """Return the plans of several stages with fixed recomputation, one for each entry of the arrays.

    ``stages``: indices of the stages. ``starts``, ``stops``: the index of the first block call (such as a layer) of
    each, and the index after the last. ``recomputed``: how many of these calls, counted from the first, are recomputed
    in full. ``in_part``: recompute the other calls selectively (only operators that are cheap to recompute), if the
    problem allows it, except the last ``spared`` ones (``None``: none). ``tables``: seconds and bytes of all possible
    stages.
    """
    way = (tables.slim if in_part else None) or tables
    spared = np.zeros_like(recomputed) if spared is None else spared
    return _build_stage_plans(tables, way, stages, starts, stops, recomputed, spared)


def stage_plans(tables: StageTables, stages: Counts, starts: Counts, stops: Counts) -> list[StagePlan]:
    """Return the plans of several stages, with the least recomputation that fits in memory, one for each entry of the
    arrays and in the same order.

    ``stages``: indices of the stages; they may repeat. ``starts``, ``stops``: for each stage, the index of its first
    block call (such as a layer) and the index after its last. ``tables``: seconds and bytes of all possible stages.
    """
    slimmed = tables.slimmed(stages, starts, stops)
    plans: list[StagePlan | None] = [None] * len(starts)
    for way, chosen in ((tables, ~slimmed), (tables.slim, slimmed)):
        if way is None or not chosen.any():
            continue
        where = stages[chosen], starts[chosen], stops[chosen]
        count = way.recomputed(*where)
        built = _build_stage_plans(tables, way, *where, count, np.where(count > 0, 0, way.count_spared(*where)))
        for place, plan in zip(np.flatnonzero(chosen).tolist(), built, strict=True):
            plans[place] = plan
    return [plan for plan in plans if plan is not None]


def _build_stage_plans(
    tables: StageTables,
    way: StageTables,
    stages: Counts,
    start: Counts,
    stop: Counts,
    recomputed: Counts,
    spared: Counts,
) -> list[StagePlan]:
    """Return the plans of several stages, one for each entry of the arrays. ``way``: the tables from which their
    seconds and bytes are taken: ``tables``, or the tables for selective recomputation. ``stages``: indices of the
    stages. ``start``, ``stop``: the index of the first block call (such as a layer) of each, and the index after the
    last. ``recomputed``: the number of first calls to recompute in full. ``spared``: the number of last calls that are
    not recomputed selectively.
    """
    problem = tables.problem
    forward, of_way = way.seconds_at(stages, start, stop)
    # selective recomputation fetches fewer activations from the host
    backward = np.minimum(tables.seconds_at(stages, start, stop)[1], of_way)
    again = of_way - backward + way.again(stages, start, recomputed) - way.spared_seconds(stages, stop, spared)
    before, after = tables.waits_at(stages, start, stop)
    columns = (
        stages,
        start,
        stop,
        recomputed,
        forward,
        backward if problem.train else np.zeros_like(backward),
        again,
        before + after,
        before,
        way.memory(stages, start, stop, recomputed, spared),
        spared,
    )
    return [
        StagePlan(
            start=first,
            stop=end,
            recompute=count,
            forward_s=forward_s,
            backward_s=backward_s,
            recompute_s=recompute_s,
            transfer_s=transfer_s,
            forward_wait_s=wait_s,
            number=stage,
            memory=round(memory),
            selective=way is not tables,
            in_flight=problem.in_flight(stage),
            spared=kept,
        )
        for stage, first, end, count, forward_s, backward_s, recompute_s, transfer_s, wait_s, memory, kept in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


__all__ = [
    "NoneLeft",
    "StagePlan",
    "StageSplit",
    "recomputed_stage_plans",
    "solve_stages",
    "stage_plan",
    "stage_plans",
]
