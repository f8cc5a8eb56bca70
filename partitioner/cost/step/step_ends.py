"""Time of collectives at the start and the end of a step that computation does not hide, computed bucket by bucket.

At the start, updated parameters are gathered during the first forward. At the end, gradients are reduced during the
last backward. The buckets are those of :func:`partitioner.emit.buckets.plan_buckets`, and time passes as in
:class:`partitioner.runtime.program.simulate.RankClock`, so that the estimate agrees with the simulation of the emitted
program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partitioner.cost.call.states import StateCost
from partitioner.cost.step.gradient_reduction import CommunicationTime, Reducer
from partitioner.emit.buckets import bucket_limit
from partitioner.runtime.program.simulate import OverlappedCollective, RankClock
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.split import StagePlan

AFTER_SUM = -1  # place of a bucket whose reduction begins when pipeline ranks have summed its gradients

_NOTHING = CommunicationTime(0.0)
NO_TIES: Mapping[str, tuple[int, ...]] = {}


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are reduced together, and the time of their collectives.

    ``place``: index, in the model, of the first block call (such as a layer) that reads one of their parameters.
    Backward runs calls in reverse order, so the gradients are complete once this call's backward has run. ``scatter``:
    time of the reduce-scatter to shards. ``rest``: time of the all-reduce of the gradients or, after a reduce-scatter,
    of the shards. ``gather_s``: seconds of gathering the updated parameters. ``tied_ranks``: if several pipeline ranks
    have the parameters and sum their gradients, these ranks. They sum shards after the reduction, but whole gradients
    before it; ``place`` is ``AFTER_SUM`` in the latter case.
    """

    place: int
    scatter: CommunicationTime = _NOTHING
    rest: CommunicationTime = _NOTHING
    gather_s: float = 0.0
    tied_ranks: tuple[int, ...] = ()


def stage_buckets(
    problem: StageProblem,
    plan: StagePlan,
    states: Mapping[str, StateCost],
    reducer: Reducer,
    last_levels: Mapping[tuple[str, ...], bool],
    tied: Mapping[str, tuple[int, ...]] = NO_TIES,
) -> list[GradientBucket]:
    """Return the gradient buckets of a stage (gradients that are reduced together) in the order in which its backward
    completes them.

    ``plan``: the block calls (such as layers) of the stage. ``states``: cost of each parameter and buffer by name.
    ``reducer``: computes the seconds of collectives. ``last_levels``: axes of a reduce-scatter -> whether no other
    data-parallel reduction follows. ``tied``: name of a parameter that several pipeline ranks have -> these ranks.
    ``problem``: the block calls of the model with their costs, to be cut into pipeline stages.
    """
    found = [
        (ranks, bucket)
        for ranks, members, limit in _group_bucket_members(problem, plan, states, reducer, tied)
        for bucket in _fill_buckets(members, limit)
    ]

    def priced(ranks: tuple[int, ...], members: Sequence[tuple[int, StateCost]]) -> GradientBucket:
        """Return the bucket (gradients that are reduced together) with the gradients ``members``, and with the time of
        its collectives. A member is a pair (index of the first block call, such as a layer, that reads the parameter;
        cost of the parameter). ``ranks``: the pipeline ranks that sum these gradients; empty if only one rank has them.
        """
        cost = members[0][1]
        gradients = sum(c.gradient for _, c in members)
        place = min(p for p, _ in members)
        scatter = rest = _NOTHING
        gather = 0.0
        if cost.scatter_axes and cost.stage < 3:
            scatter = reducer.scatter(gradients, cost.scatter_axes, last_levels.get(cost.scatter_axes, False))
            parameters = sum(c.parameter for _, c in members)
            gather = reducer.all_gather(parameters, cost.scatter_axes).seconds
        if cost.rest_axes:
            rest = reducer.all_reduce(sum(c.gradient_piece for _, c in members), cost.rest_axes)
        whole = bool(ranks) and not cost.scatter_axes
        return GradientBucket(AFTER_SUM if whole else place, scatter, rest, gather, ranks)

    return sorted((priced(*group) for group in found), key=lambda bucket: -bucket.place)


def _group_bucket_members(
    problem: StageProblem,
    plan: StagePlan,
    states: Mapping[str, StateCost],
    reducer: Reducer,
    tied: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, StateCost]], float]]:
    """Group the gradients of a stage by whether they may be in one bucket (gradients that one collective reduces). For
    each group, yield the pipeline ranks that sum these gradients (empty if only one has them), the gradients, and the
    number of bytes that fill a bucket. A gradient is a pair (index of the first block call, such as a layer, that reads
    the parameter; cost of the parameter). The gradients are in the order in which the backward completes them.

    ``plan``: the block calls of the stage. ``states``: the cost of each parameter and buffer by name. ``reducer``:
    computes the seconds of collectives. ``tied``: name of a parameter that several pipeline ranks have -> these ranks.
    ``problem``: the block calls of the model with their costs, to be cut into pipeline stages.
    """
    together: dict[tuple[tuple[int, ...], object], list[tuple[int, StateCost]]] = {}
    first: dict[str, int] = {}
    for place in plan.places:
        for name in problem.calls[place].states:
            first.setdefault(name, place)
    for place in reversed(plan.places):
        begin = next(run.start for run in plan.runs if run.start <= place < run.stop)
        for name in problem.calls[place].states:
            if first.get(name) != place:
                continue
            del first[name]  # a call may name a parameter twice
            cost = states.get(name)
            if cost is None or not cost.gradient:
                continue
            scattered = cost.scatter_axes
            if not (scattered or cost.rest_axes):
                continue
            # under ZeRO-2 gradients are scattered behind each backward of one virtual stage
            by_call = place if cost.stage == 3 and scattered else begin if cost.stage == 2 and scattered else -1
            alike = scattered, cost.rest_axes, cost.stage, cost.expert, by_call
            together.setdefault((tied.get(name, ()), alike), []).append((place, cost))
    for (among, _), members in together.items():
        cost = members[0][1]
        whole = cost.stage == 3 and bool(cost.scatter_axes)
        ranks = math.prod(reducer.group(axes).size for axes in (cost.scatter_axes, cost.rest_axes) if axes)
        limit = float("inf") if whole else bucket_limit(ranks)
        yield among, members, limit


def _fill_buckets(members: Sequence[tuple[int, StateCost]], limit: float) -> Iterator[list[tuple[int, StateCost]]]:
    """Yield the gradients ``members`` in consecutive lists, each of which becomes a bucket (gradients that one
    collective reduces). A list ends as soon as its gradients have at least ``limit`` bytes. A member is a pair (index
    of a block call, such as a layer; cost of a parameter).
    """
    filling: list[tuple[int, StateCost]] = []
    size = 0.0
    for member in members:
        filling.append(member)
        size += member[1].gradient
        if size >= limit:
            yield filling
            filling, size = [], 0.0
    if filling:
        yield filling


def gathered_seconds(
    problem: StageProblem,
    plan: StagePlan,
    buckets: Sequence[GradientBucket],
    slowdown: float,
    idle_s: float = 0.0,
    first_s: float = 0.0,
) -> float:
    """Return the seconds by which gathers of updated parameters and other work delay the end of the first forward of a
    stage.

    The gathers begin with the step and run at the same time as the forward; each block call (such as a layer) waits for
    the gather of its own parameters. ``first_s``: seconds of other work before the forward. ``idle_s``: seconds in
    which the stage waits for its first input, during which gathers delay nothing. ``plan``: the block calls of the
    stage. ``buckets``: its gradient buckets; the parameters of a bucket are gathered together. ``slowdown``: factor on
    the time of computation and of a collective while both run. ``problem``: the block calls of the model with their
    costs.
    """
    gathers = {b: OverlappedCollective(0.0, b.gather_s) for b in sorted(buckets, key=lambda b: b.place) if b.gather_s}
    if not gathers:
        return first_s
    clock, pace, run = RankClock(slowdown), problem.pace(plan.number), plan.runs[0]
    for gather in gathers.values():
        clock.begin(gather)
    needed: dict[int, list[OverlappedCollective]] = {}
    for bucket, gather in gathers.items():
        needed.setdefault(bucket.place, []).append(gather)
    clock.wait(idle_s)
    clock.compute(first_s)
    overhead = max(0.0, run.forward_s - sum(pace.costs[p].forward_total_s for p in range(run.start, run.stop)))
    clock.compute(overhead)
    for place in range(run.start, run.stop):
        for gather in needed.get(place, ()):
            clock.wait_for(gather)
        clock.compute(pace.costs[place].forward_total_s)
    return max(0.0, clock.clock - idle_s - run.forward_s)


class Reductions:
    """Simulates the gradient reductions of one rank. ``clock``: the simulated clock of the rank, which counts the
    seconds of computation and of collectives that run at the same time."""

    def __init__(self, clock: RankClock) -> None:
        self.clock = clock
        # collectives of gradients that several pipeline ranks sum, by these ranks
        self.of_tied: dict[tuple[int, ...], list[OverlappedCollective]] = {}
        self._sent: list[OverlappedCollective] = []  # scatters of the previous backward
        # buckets to all-reduce when these scatters have ended
        self._left: list[tuple[OverlappedCollective, GradientBucket]] = []

    def begin(self, buckets: Sequence[GradientBucket], *, whole: bool = True) -> None:
        """Begin, in the simulation, to reduce the gradients in ``buckets`` (gradients that are reduced together), whose
        backward has run. If ``whole`` is false, more backwards follow, and the gradients are only reduce-scattered to
        shards."""
        if self._left:
            self.settle()
        if self._sent and any(bucket.scatter is not _NOTHING for bucket in buckets):
            for scatter in self._sent:
                self.clock.wait_for(scatter)
            self._sent.clear()
        for bucket in buckets:
            if bucket.scatter is not _NOTHING:
                self._sent.append(self._begin_collective(bucket.scatter, bucket.tied_ranks))
                if bucket.rest is not _NOTHING and whole:
                    self._left.append((self._sent[-1], bucket))
            elif whole:
                self._begin_collective(bucket.rest, bucket.tied_ranks)

    def settle(self) -> None:
        """Wait, in the simulation, for the reduce-scatters of gradients whose shards still have to be all-reduced over
        other mesh axes, and begin these all-reduces."""
        for scatter, bucket in self._left:
            self.clock.wait_for(scatter)
            self._begin_collective(bucket.rest, bucket.tied_ranks)
        self._left.clear()

    def _begin_collective(self, part: CommunicationTime, tied_ranks: tuple[int, ...]) -> OverlappedCollective:
        collective = OverlappedCollective(0.0, part.seconds)
        if part.coding_s:
            self.clock.compute(part.coding_s)
        self.clock.begin(collective)
        if tied_ranks:
            self.of_tied.setdefault(tied_ranks, []).append(collective)
        return collective


class Delays(NamedTuple):
    """How gradient reductions delay a stage.

    ``backward_s``: the seconds by which its last backward ends later than without reductions. ``whole_s``: the seconds
    from the end of a last backward without reductions until all gradients are reduced.
    """

    backward_s: float
    whole_s: float


def reduction_delays(
    problem: StageProblem,
    plan: StagePlan,
    buckets: Sequence[GradientBucket],
    slowdown: float,
    *,
    by_halves: bool = False,
) -> Delays:
    """Return how the gradient reductions of a stage delay the end of a step: the seconds by which they lengthen the
    stage's last backward, and the seconds from the end of an undelayed last backward until all gradients are reduced.

    ``problem``: the block calls (such as layers) of the model with their costs, to be cut into pipeline stages.
    ``plan``: the block calls of the stage. ``buckets``: its gradient buckets (gradients that one collective reduces).
    ``slowdown``: factor on the time of computation and of a collective while both run. ``by_halves``: whether the
    schedule splits each backward in two halves, so that only the half for gradients of weights runs last.
    """
    run = plan.runs[0]  # the virtual stage whose backwards end last
    clock = RankClock(slowdown)
    if by_halves:
        costs = problem.pace(plan.number).costs
        work = {place: costs[place].later_s for place in range(run.start, run.stop)}
        window = sum(work.values())
    else:
        work, window = _list_backward_seconds(problem, plan, run), run.backward_s + run.recompute_s
    scale = window / total if (total := sum(work.values())) else 0.0
    at: dict[int, list[GradientBucket]] = {}
    for bucket in buckets:
        at.setdefault(bucket.place if bucket.place in work else -1, []).append(bucket)
    reductions = Reductions(clock)
    begun = 0.0
    for place in (-1, *sorted(work, reverse=True)):
        clock.compute(work.get(place, 0.0) * scale)
        if place in at:
            reductions.begin(at[place])
        if place < 0 and at.get(
            place
        ):  # of other virtual stages, each as often as there are ranks behind the one before
            ahead = (len(plan.runs) - 1 if not by_halves else 1) * (problem.num_stages // problem.chunks) - 1
            clock.compute(ahead * window)
            reductions.settle()
            begun = clock.clock
    window += begun
    delayed = clock.clock - window
    reductions.settle()
    clock.wait_for_all()
    return Delays(delayed, clock.clock - window)


def _list_backward_seconds(problem: StageProblem, plan: StagePlan, run: StagePlan) -> dict[int, float]:
    """Return, for each block call (such as a layer) of the virtual stage ``run``, index of the call -> seconds of its
    backward with recomputation. ``plan``: the stage to which ``run`` belongs. ``problem``: the block calls of the model
    with their costs, to be cut into pipeline stages."""
    costs, work = problem.pace(plan.number).costs, {}
    for place in range(run.start, run.stop):
        cost = costs[place]
        again = cost.recompute_s if place < run.start + run.recompute else cost.selective_s * run.is_selective(place)
        work[place] = cost.backward_total_s + again
    return work
