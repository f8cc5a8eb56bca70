"""Time that parameter gathers and gradient reductions add to a pipeline schedule.

The schedule is simulated with a clock for each rank, as in :func:`partitioner.runtime.program.simulate.simulate`. First
forwards and last backwards are simulated call by call, since gathers end and reductions begin between their calls.
While a rank is idle, its collectives continue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice

from partitioner.cost.step.step_ends import AFTER_SUM, GradientBucket, Reductions
from partitioner.passes.ir.hashing import SameObject
from partitioner.runtime.program.simulate import OverlappedCollective, RankClock
from partitioner.schedules.actions import KINDS, Timetable
from partitioner.schedules.csv_table import ScheduleTable
from partitioner.schedules.formulas import shorten_timetable
from partitioner.schedules.makespan import ENTRIES, Phases, compute_makespan, seconds_of, sent_of, waits_of
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.split import StagePlan

_MOST_ACTIONS = 3000  # actions to simulate; gathers and reductions are at the ends of a step

_FORWARD, _WHOLE, _WEIGHTS = (KINDS.index(kind) for kind in "FBW")


@dataclass(frozen=True)
class RankEnds:
    """The parameters that a rank gathers at the start of a step, and the gradients that it reduces at the end.

    ``problem``: the block calls (such as layers) of the model with their costs. ``plan``: the block calls of the rank,
    by virtual stage. ``buckets``: its gradient buckets (gradients that are reduced together). ``slowdown``: factor on
    the time of computation and of a collective while both run. ``first_s``: seconds of work before its first forward.
    ``every_backward``: whether gradients are scattered during each backward (ZeRO-2), not only during the last.
    """

    problem: StageProblem
    plan: StagePlan
    buckets: Sequence[GradientBucket]
    slowdown: float
    first_s: float = 0.0
    every_backward: bool = False


NO_SUMS: Mapping[tuple[int, ...], float] = {}


def seconds_added(
    schedule: str | ScheduleTable,
    m: int,
    chunks: int | None,
    phases: Sequence[Phases],
    ranks: Sequence[RankEnds],
    sums: Mapping[tuple[int, ...], float] = NO_SUMS,
) -> float:
    """Return the seconds that gathers of updated parameters and gradient reductions add to the pipeline of a step: the
    time at which all gradients are reduced, minus the time at which the last backward would end without collectives.

    ``schedule``: name of the schedule, or a table that the user wrote. ``m``: number of microbatches. ``chunks``:
    number of virtual stages of each rank; ``None``: the number that the schedule fixes. ``phases``: seconds of forward
    and backward of each virtual stage. ``ranks``: gathers and reductions of each rank. ``sums``: pipeline ranks that
    share tied weights -> seconds of all-reducing the gradients of these weights over the ranks.
    """
    table, more = shorten_timetable(schedule, len(ranks), m, chunks, _MOST_ACTIONS)
    added = _compute_added_seconds(table, phases, ranks, sums)
    if more is not None and any(rank.every_backward for rank in ranks):
        longer, microbatches, left = more
        added += (_compute_added_seconds(longer, phases, ranks, sums) - added) * left / microbatches
    return max(0.0, added)


def _compute_added_seconds(
    table: Timetable,
    phases: Sequence[Phases],
    ranks: Sequence[RankEnds],
    sums: Mapping[tuple[int, ...], float],
) -> float:
    """Simulate the schedule ``table`` with the gathers and reductions of ``ranks``, and return the seconds by which
    these collectives lengthen it. ``phases``: seconds of forward and backward of each virtual stage. ``sums``: pipeline
    ranks that share tied weights -> seconds of all-reducing the gradients of these weights over the ranks."""
    waits, seconds, sent = waits_of(table), seconds_of(phases, True), sent_of(phases)
    first, last = _find_ends(SameObject(table))
    lanes = [_Lane(rank, table) for rank in ranks]
    clocks = [lane.clock for lane in lanes]
    scatters = [lane.ends.every_backward for lane in lanes]
    done = [0.0] * len(lanes)
    every = zip(waits.rank, waits.needed, waits.what, waits.message, strict=True)
    for place, (rank, needed, what, message) in islice(enumerate(every), len(lanes), None):
        clock, ready = clocks[rank], done[needed] + sent[message]
        if place in first:
            clock.wait(ready)
            lanes[rank].first_forward(what, seconds[what])
        elif place in last or (scatters[rank] and what % ENTRIES in (_WHOLE, _WEIGHTS)):
            clock.wait(ready)
            lanes[rank].backward(what, seconds[what], place in last)
        elif clock.in_progress:
            clock.wait(ready)
            clock.compute(seconds[what])
        else:  # as most actions do, without a collective
            now = clock.clock
            clock.clock = (now if now >= ready else ready) + seconds[what]
        done.append(clock.clock)
    for among, sum_s in sorted(sums.items()):
        for rank in among:
            lanes[rank].await_tied(among)
        begin_s = max(clocks[rank].clock for rank in among)
        for rank in among:
            clocks[rank].wait(begin_s)
            clocks[rank].compute(sum_s)
    return max(lane.ended() for lane in lanes) - compute_makespan(table, phases)


@lru_cache(maxsize=32)
def _find_ends(same: SameObject[Timetable]) -> tuple[frozenset[int], frozenset[int]]:
    """Return two sets of indices of actions (an action is a forward or backward of one microbatch on one virtual
    stage): the first forward of each virtual stage, and the last backward of each virtual stage that computes gradients
    of weights. All actions of the schedule are numbered in the order in which they are simulated. ``same``: the
    timetable in a wrapper that compares by identity, for the cache."""
    what = waits_of(same.value).what[len(same.value.orders) :]
    places = list(enumerate(what, len(same.value.orders)))
    last = {of // ENTRIES: place for place, of in places if of % ENTRIES in (_WHOLE, _WEIGHTS)}
    first = {of // ENTRIES: place for place, of in reversed(places) if of % ENTRIES == _FORWARD}
    return frozenset(first.values()), frozenset(last.values())


class _Lane:
    """The simulation of one pipeline rank in a step: its clock, and the collectives (gathers of parameters, reductions
    of gradients) that overlap with its computation. ``ends``: the block calls (such as layers) of the rank, and its
    gradient buckets with the seconds of their collectives. ``table``: the schedule."""

    def __init__(self, ends: RankEnds, table: Timetable) -> None:
        self.ends, self.table = ends, table
        # kind of a backward -> its calls, each with the buckets whose gradients it completes
        self._backwards: dict[int, list[tuple[float, Sequence[GradientBucket]]]] = {}
        self.clock = RankClock(ends.slowdown)
        self.reductions = Reductions(self.clock)
        self.gathers: dict[int, list[OverlappedCollective]] = {}  # by the first call that reads the parameters
        for bucket in sorted(ends.buckets, key=lambda bucket: bucket.place):
            if bucket.gather_s:
                gather = OverlappedCollective(0.0, bucket.gather_s)
                self.clock.begin(gather)
                self.gathers.setdefault(bucket.place, []).append(gather)
        self.clock.compute(ends.first_s)

    def _find_run(self, what: int) -> StagePlan:
        stage = what // ENTRIES
        return self.ends.plan.runs[self.table.held[self.table.ranks[stage]].index(stage)]

    @cached_property
    def _buckets_by_place(self) -> dict[int, list[GradientBucket]]:
        found: dict[int, list[GradientBucket]] = {}
        for bucket in self.ends.buckets:
            found.setdefault(bucket.place, []).append(bucket)
        return found

    def first_forward(self, what: int, seconds: float) -> None:
        """Simulate the first forward of a virtual stage, which takes ``seconds``. Each of its block calls (such as
        layers) waits for the gather of the parameters that it reads. ``what``: a number for the virtual stage and the
        kind of the action: six times the index of the virtual stage, plus the index of the kind."""
        run = self._find_run(what)
        costs = self.ends.problem.pace(run.number).costs
        work = {place: costs[place].forward_total_s for place in range(run.start, run.stop)}
        total = sum(work.values())
        shorter = min(1.0, seconds / total) if total else 1.0  # selective recomputation copies fewer activations
        self.clock.compute(max(0.0, seconds - total))
        for place, of_call in work.items():
            for gather in self.gathers.get(place, ()):
                self.clock.wait_for(gather)
            self.clock.compute(of_call * shorter)

    def backward(self, what: int, seconds: float, is_last: bool) -> None:
        """Simulate a backward of a virtual stage, from its last block call (such as a layer) to its first, and begin
        the reduction of each bucket (gradients that one collective reduces) once its gradients are complete.

        ``what``: a number for the virtual stage and the kind of the action: six times the index of the virtual stage,
        plus the index of the kind. ``seconds``: time of the backward without collectives. ``is_last``: whether no
        backward of this virtual stage follows; if one follows, gradients are only scattered.
        """
        calls = self._backwards.get(what)
        if calls is None:
            calls = self._backwards[what] = self._list_backward_calls(what, seconds)
        compute, begin = self.clock.compute, self.reductions.begin
        for work_s, buckets in calls:
            compute(work_s)
            if buckets:
                begin(buckets, whole=is_last)

    def _list_backward_calls(self, what: int, seconds: float) -> list[tuple[float, Sequence[GradientBucket]]]:
        """Return the block calls (such as layers) of a backward in the order in which it runs them, as pairs (seconds,
        buckets whose gradients are complete after the call). ``what``: a number for the virtual stage and the kind of
        the action (a whole backward, or only the half for gradients of weights): six times the index of the virtual
        stage, plus the index of the kind. ``seconds``: time of the backward without collectives."""
        run, weights = self._find_run(what), what % ENTRIES == _WEIGHTS
        costs, work = self.ends.problem.pace(run.number).costs, {}
        for place in range(run.start, run.stop):
            cost = costs[place]
            again = (
                cost.recompute_s if place < run.start + run.recompute else cost.selective_s * run.is_selective(place)
            )
            work[place] = cost.later_s if weights else cost.backward_total_s + again
        total = sum(work.values())
        calls: list[tuple[float, Sequence[GradientBucket]]] = [
            (work[place] * seconds / total if total else 0.0, self._buckets_by_place.get(place, ()))
            for place in reversed(range(run.start, run.stop))
        ]
        return calls if total else [*calls, (seconds, ())]

    def await_tied(self, among: tuple[int, ...]) -> None:
        """Wait until this rank has reduced the shards of gradients that the pipeline ranks ``among`` will sum."""
        self.reductions.settle()
        for collective in self.reductions.of_tied.get(among, ()):
            self.clock.wait_for(collective)

    def ended(self) -> float:
        self.reductions.settle()
        self.reductions.begin([bucket for bucket in self.ends.buckets if bucket.place == AFTER_SUM])
        self.reductions.settle()
        self.clock.wait_for_all()
        return self.clock.clock


__all__ = ["RankEnds", "seconds_added"]
