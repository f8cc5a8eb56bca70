"""Compute lower bounds on stage times quickly: on the slowest stage and on the sum of all stages.

Stages take about equally long if memory allows it. Sequences of calls that take much longer than an even share of the
work are therefore skipped. With many stages few sequences are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.call.call_cost import CallCost
from partitioner.errors import CapacityError
from partitioner.passes.ir.hashing import SameObject
from partitioner.schedules.csv_table import ScheduleTable
from partitioner.schedules.formulas import is_formula, is_split, least_fill
from partitioner.solve.stages.problem import Pace, StageProblem
from partitioner.solve.stages.split import capacity_error, stage_plan
from partitioner.solve.stages.tables import ROUNDING_BYTES, TINY, StageTables, Table
from partitioner.units import bytes_text, format_plural

Vector = NDArray[np.float64]

Places = NDArray[np.int64]
NO_DELAY = 0.0, 0.0


class StageDelays(NamedTuple):
    """Lower bounds in seconds on how gradient reductions of one stage delay the end of a step: two tables whose entries
    ``[start, stop]`` are for a stage of the block calls ``start:stop`` (such as layers).

    ``whole``: seconds from the end of the stage's last backward, if no reduction delayed it, to the end of its
    reductions. ``backward``: seconds by which reductions lengthen the stage's last backward, because they run at the
    same time.
    """

    whole: Table
    backward: Table


_ROUNDING = 1e-9  # tolerance when numbers of stages are rounded up
_LONG, _SEVERAL = (
    2.0,
    4,
)  # longest runs relative to an even share or the largest call; only from this many microbatches on


@dataclass(frozen=True)
class LeastTime:
    """Lower bounds in seconds per microbatch that hold for all cuts of the block calls (such as layers) into stages.

    ``slowest_s``: bound on the time of the slowest stage. ``total_s``: bound on the sum of the times of all stages.
    ``forward_s``: the part of ``total_s`` that is forward. ``backward_s``: the seconds of backward with recomputation
    if there is a single stage; 0 if there are several. ``unseen``: bounds on (slowest stage, sum) for the cuts that the
    search skipped; infinite if it skipped none. ``step_s``: a lower bound on the whole step for the cuts that the
    search examined; 0 if not computed.
    """

    slowest_s: float
    total_s: float
    forward_s: float
    backward_s: float = 0.0
    unseen: tuple[float, float] = (np.inf, np.inf)
    step_s: float = 0.0

    @property
    def is_seen(self) -> bool:
        """Return whether one of the cuts that the search examined fits in memory. If not, ``total_s`` is infinite, and
        only the bounds in ``unseen`` are known."""
        return bool(np.isfinite(self.total_s))

    def pipeline_s(
        self, schedule: str | ScheduleTable, p: int, m: int, overlap_steps: bool = False, train: bool = True
    ) -> float:
        """Return a lower bound on the seconds of ``m`` microbatches under ``schedule`` with one stage on each of ``p``
        ranks. ``overlap_steps``: whether a rank begins the next step as soon as it has ended its own part of this one.
        ``train``: whether there are backwards.
        """
        fill = None if is_formula(schedule, p, train) else least_fill(schedule, p, m, 1, overlap_steps)
        seen = max(self.step_s, self._pipeline_s(p, m, fill, self.slowest_s, self.total_s))
        return min(seen, self._pipeline_s(p, m, fill, *self.unseen))

    def _pipeline_s(self, p: int, m: int, fill: tuple[float, float] | None, slowest: float, total: float) -> float:
        """Return a lower bound on the seconds of ``m`` microbatches on ``p`` ranks, if the slowest stage takes at least
        ``slowest`` seconds and all stages together at least ``total`` seconds per microbatch. ``fill``: two fractions
        that give the time to fill and drain the pipeline: the first of the forward seconds, the second of the backward
        seconds of a microbatch through the whole model. ``None``: the schedule has a formula."""
        if total == np.inf:
            return total
        if fill is None:
            return (m - 1) * slowest + total
        filled = fill[0] * self.forward_s + fill[1] * (total - self.forward_s)
        return max(m * slowest, m * total / p + (1 - 1 / p) * filled)


def least_time(
    problem: StageProblem, cutoff_s: float = np.inf, *, quick: bool = False, delays: Sequence[StageDelays] = ()
) -> LeastTime:
    """Return lower bounds on the stage times of all cuts of the block calls (such as layers) of ``problem`` into
    stages.

    ``cutoff_s``: steps that take at least this many seconds are of no use to the caller, so stages that alone take so
    long are skipped. ``quick``: whether to skip all stages that take much longer than the total work divided by the
    number of stages, even if every cut that fits has such a stage. ``delays``: for each stage, the delays by its
    gradient reductions; empty if reductions do not count. Raises :class:`CapacityError` if memory cannot suffice, and
    :class:`PlanError` if there are more stages than calls.
    """
    tables = StageTables(problem)
    if tables.hopeless:
        raise capacity_error(tables, relaxed=True)
    p = problem.num_stages
    paces = {id(pace): pace for pace in map(problem.pace, range(p))}.values()
    forward = sum(min(costs) for costs in zip(*(map(_find_least_forward, pace.costs) for pace in paces), strict=True))
    alone = np.diagonal(tables.least_work, 1)  # each call by itself, on the stage that is fastest for it
    work = float(alone.sum())
    limit = _LONG * max(work / p, float(alone.max()))
    limit = limit if problem.num_microbatches >= _SEVERAL else np.inf
    enough = cutoff_s / problem.num_microbatches
    found = _over_runs(tables, min(limit, enough), delays)
    if found is None and enough <= limit and enough < np.inf:
        return LeastTime(np.inf, np.inf, forward, 0.0, (enough, max(work, enough)))
    if found is None and limit < np.inf:
        if quick:
            _check_memory(tables)
            return LeastTime(np.inf, np.inf, forward, 0.0, (limit, work))
        limit = np.inf
        found = _over_runs(tables, enough, delays)
    if found is None and enough < np.inf:
        return LeastTime(np.inf, np.inf, forward, 0.0, (enough, max(work, enough)))
    if found is None:
        raise capacity_error(tables, relaxed=True)
    backward = 0.0
    if p == 1:
        plan = stage_plan(tables, 0, 0, len(problem.calls))
        backward = plan.backward_s + plan.recompute_s
    limit = min(limit, enough)
    most, total, step = found
    return LeastTime(most, total, forward, backward, (limit, max(work, limit)), step)


def _over_runs(tables: StageTables, limit: float, delays: Sequence[StageDelays]) -> tuple[float, float, float] | None:
    """Return three lower bounds in seconds: on the slowest stage, on the sum of all stages (both per microbatch), and
    on the step (0 if the schedule has a formula). The bounds are minima over cuts of the block calls (such as layers)
    into stages. Only cuts are considered in which the work of each stage, without waits and recomputation, takes at
    most ``limit`` seconds per microbatch.

    Return ``None`` if there is no such cut, or if the slowest stage takes more than ``limit`` seconds with waits and
    recomputation, because a cut with more work in a stage might then be better. ``tables``: seconds and bytes of all
    possible stages. ``delays``: for each stage, the delays by its gradient reductions; empty if reductions do not
    count.
    """
    start, stop, firsts = _runs_by_stop(tables, limit)
    if not len(start):
        return None
    problem = tables.problem
    times = _price_runs(tables, start, stop)
    followed = not is_formula(
        problem.schedule, problem.num_stages, problem.train
    )  # for formula schedules the formula gives a tighter bound
    if times.min(axis=1).max() > limit:  # one of the stages is always too long
        return None
    # the last backward ends on the first stage, which then reduces its gradients
    least_delay = float(delays[0].whole[0, stop[start == 0]].min(initial=np.inf)) if delays else 0.0
    later = np.zeros_like(times)  # how much longer the last backward of a stage is, for the stages in front of it
    if delays and not is_split(problem.schedule):  # the delay of the first stage counts from its last backward
        later[1:] = [delay.backward[start, stop] for delay in delays[1:]]
    others = _list_other_stage_times(tables, start, stop, firsts, times, later) if followed else []
    ends, values = stop[firsts], np.empty((2 + followed, len(start)))
    # the least maximum, the least sum and the least step, up to each call
    least = np.full((len(values), len(problem.calls) + 1), np.inf)
    least[:, 0] = 0.0
    for stage, time in enumerate(times):
        before = least[:, start]
        np.maximum(before[0], time, out=values[0])
        np.add(before[1], time, out=values[1])
        if followed:
            delay = (delays[stage].whole[start, stop], least_delay + later[stage]) if delays else NO_DELAY
            step = _bound_step_after_stage(problem, stage, others[stage], start, stop, time, delay)
            if not is_split(problem.schedule):
                forward = _get_forward_seconds(tables, stage, start, stop)
                around = _bound_step_around_stage(problem, stage, others[stage], start, stop, time, forward, delay)
                step = np.maximum(step, around)
            np.maximum(before[2], step, out=values[2])
        least.fill(np.inf)
        least[:, ends] = reached = np.minimum.reduceat(values, firsts, axis=1)
        if reached[0].min() > limit:
            return None
    most, total, *step = least[:, -1].tolist()
    return (most, total, step[0] if step else 0.0) if most <= limit and most < np.inf else None


def _get_forward_seconds(tables: StageTables, stage: int, start: Places, stop: Places) -> Vector:
    """Return the seconds of a forward of the block calls ``start[i]:stop[i]`` (such as layers), for each ``i``, on the
    stage with index ``stage``, without waits. ``tables``: seconds and bytes of all possible stages."""
    forward: Vector = tables.seconds(stage)[0][start, stop]
    return forward + tables.problem.pace(stage).overhead.forward_total_s


def _list_other_stage_times(
    tables: StageTables, start: Places, stop: Places, firsts: Places, times: Table, later: Table
) -> list[OtherStageTimes]:
    """Return, for each stage, lower bounds on the seconds of one microbatch in the stages in front of it and behind it.
    The backward in the stages in front is the last one of the step. The bounds are minima over all cuts of the block
    calls (such as layers) into the possible stages ``start[i]:stop[i]``, which are sorted by ``stop``. They are
    infinite for calls that the other stages cannot have.

    ``firsts``: index of the first possible stage with each ``stop``. ``times``: seconds per microbatch of the possible
    stages, shape ``[stages, runs]``, with the recomputation that memory requires. ``later``: seconds by which gradient
    reductions lengthen the last backward of the possible stages, same shape. ``tables``: seconds and bytes of all
    possible stages.
    """
    problem = tables.problem
    size = len(problem.calls) + 1
    of_pace: dict[SameObject[Pace], OtherStageTimes] = {}
    for stage in range(len(times)):
        pace = problem.pace(stage)
        if SameObject(pace) not in of_pace:
            of_pace[SameObject(pace)] = _bound_other_stages(problem, pace)
    each = [of_pace[SameObject(problem.pace(stage))] for stage in range(len(times))]
    if problem.overlap_steps:
        return each
    order = np.argsort(start, kind="stable")
    begins, heads = np.unique(start[order], return_index=True)
    behind = [np.where(np.arange(size) == size - 1, 0.0, np.inf)]  # of the stages behind, from each call on
    for time in times[:0:-1]:
        least = np.full(size, np.inf)
        least[begins] = np.minimum.reduceat((time + behind[-1][stop])[order], heads)
        behind.append(least)
    back = np.where(np.arange(size) == 0, 0.0, np.inf)  # of the stages in front, up to each call
    found = []
    for stage, (time, own) in enumerate(zip(times, each, strict=True)):
        found.append(own._replace(back=np.maximum(own.back, back), behind=np.maximum(own.behind, behind[-1 - stage])))
        windows = _bound_backward_seconds(tables, own, stage, start, stop, time)
        back = _least_by_stop(back[start] + windows + later[stage], firsts, stop[firsts], size)
    return found


def _bound_backward_seconds(
    tables: StageTables, own: OtherStageTimes, stage: int, start: Places, stop: Places, times: Vector
) -> Vector:
    """Return lower bounds on the seconds for which the stage with index ``stage`` keeps the stages in front of it
    waiting for its backward, if it has the block calls ``start[i]:stop[i]`` (such as layers), for each ``i``. They
    include recomputation. If the schedule splits backwards, they exclude the half for gradients of weights.

    ``times``: seconds of these calls per microbatch. ``own``: its field ``weights`` has the seconds for gradients of
    weights on the stage's devices. ``tables``: seconds and bytes of all possible stages.
    """
    seconds = times - _get_forward_seconds(tables, stage, start, stop)
    if is_split(tables.problem.schedule):
        seconds = seconds - (own.weights[stop] - own.weights[start])
    return np.maximum(seconds, 0.0)


def _price_runs(tables: StageTables, start: Places, stop: Places) -> Table:
    """Return lower bounds on the seconds per microbatch of the block calls ``start[i]:stop[i]`` (such as layers) on
    each stage, shape ``[stages, runs]``, with the recomputation that memory requires. A bound is infinite if the calls
    do not fit. Waits for messages count only if the schedule has a formula for its step time: under other schedules a
    rank may compute for another microbatch while a message is on its way. ``tables``: seconds and bytes of all possible
    stages."""
    problem = tables.problem
    stages = np.arange(problem.num_stages)
    times = tables.run_times(stages, start, stop)
    if tables.slim is not None:
        slim = tables.slim.run_times(stages, start, stop)
        times = slim if problem.recompute == "selective" else np.minimum(times, slim)
    if not is_formula(problem.schedule, problem.num_stages, problem.train):
        waits = [tables.transfers(stage) for stage in stages.tolist()]
        times = times - np.stack([before[start, 0] + after[0, stop] for before, after in waits])
    return times


class StageRuns:
    """The sequences of consecutive block calls (such as layers) that a stage may have if all stages run on devices of
    one class, with their seconds on these devices. ``problem``: the problem of cutting the calls into stages on these
    devices; its schedule must have no formula for its step time. ``limit``: sequences that take more seconds per
    microbatch are left out."""

    def __init__(self, problem: StageProblem, limit: float = np.inf) -> None:
        self.problem, self._tables = problem, StageTables(problem)
        start, stop = self._tables.short_runs(limit)
        order = np.argsort(stop, kind="stable")
        self.start, self.stop = start[order], stop[order]
        self.firsts = np.flatnonzero(np.diff(self.stop, prepend=-1))
        self.ends = self.stop[self.firsts]
        self._times = _price_runs(self._tables, self.start, self.stop) if len(start) else None
        self.own = _bound_other_stages(problem, problem.pace(0))  # all stages have equal devices

    def bound_steps(
        self, number: int, stage: int, others: OtherStageTimes, delay: tuple[Table | None, float]
    ) -> Vector:
        """Return a lower bound in seconds on the step for each sequence of calls that the stage with index ``stage``
        may run, shape ``[sequences]``.

        ``number``: number of microbatches of a step. ``others``: the seconds of a microbatch on the other stages.
        ``delay``: a pair: a table whose entry ``[start, stop]`` is the seconds from the last backward of the calls
        ``start:stop`` on this stage to the end of its reductions (``None``: 0); and the least such seconds of the first
        stage.
        """
        if self._times is None:
            return np.zeros(0)
        problem = replace(self.problem, num_microbatches=number)
        start, stop, times = self.start, self.stop, self._times[stage]
        others = others._replace(weights=self.own.weights)
        late = (0.0 if delay[0] is None else delay[0][start, stop]), delay[1]
        steps = _bound_step_after_stage(problem, stage, others, start, stop, times, late)
        if not is_split(problem.schedule):
            forward = _get_forward_seconds(self._tables, stage, start, stop)
            around = _bound_step_around_stage(problem, stage, others, start, stop, times, forward, late)
            steps = np.maximum(steps, around)
        return steps

    def extend_front(self, stage: int, back: Vector) -> Vector:
        """Return the least seconds of a backward through all stages up to and including ``stage`` (an index), if these
        stages have the first ``k`` calls, for each ``k``; shape ``[calls + 1]``. ``back``: the same seconds for the
        stages in front of ``stage``."""
        size = len(self.problem.calls) + 1
        if self._times is None:
            return np.full(size, np.inf)
        windows = _bound_backward_seconds(self._tables, self.own, stage, self.start, self.stop, self._times[stage])
        return _least_by_stop(back[self.start] + windows, self.firsts, self.ends, size)

    def extend_behind(self, stage: int, behind: Vector) -> Vector:
        """Return the least seconds of a microbatch in all stages from ``stage`` (an index) on, if these stages have the
        calls from ``k`` on, for each ``k``; shape ``[calls + 1]``. ``behind``: the same seconds for the stages behind
        ``stage``."""
        found = np.full(len(self.problem.calls) + 1, np.inf)
        if self._times is not None:
            np.minimum.at(found, self.start, self._times[stage] + behind[self.stop])
        return found

    def find_first_delay(self, delays: Sequence[Table]) -> float:
        """Return the least seconds from the last backward of the first stage to the end of its reductions; 0 if
        ``delays`` is empty. ``delays``: for each stage, a table of these seconds by sequence of calls."""
        return float(delays[0][0, self.stop[self.start == 0]].min(initial=np.inf)) if delays else 0.0


@dataclass(frozen=True)
class StageRunsByClass:
    """The sequences of block calls (such as layers) that the stages of a pipeline may have if each stage runs on
    devices of one of two classes. ``one``, ``other``: the sequences on the first and on the second class, for the same
    calls, schedule and number of stages."""

    one: StageRuns
    other: StageRuns

    def bound_steps(
        self,
        num_microbatches: int,
        within_s: float = np.inf,
        delays: tuple[Sequence[Table], Sequence[Table]] = ((), ()),
    ) -> Vector:
        """Return lower bounds in seconds on the step, shape ``[stages + 1]``. Entry ``n`` holds if ``n`` stages run on
        devices of the first class and the others on devices of the second, for every order of the stages and every cut
        of the block calls (such as layers) into stages. An entry is infinite if such a step takes at least ``within_s``
        seconds, or if no cut fits in memory.

        ``num_microbatches``: number of microbatches of a step; the problems of the classes may have fewer microbatches
        in flight, but not more. ``delays``: for each class and each stage, a table whose entry ``[start, stop]`` is a
        lower bound on the seconds from the last backward of the calls ``start:stop`` to the end of their reductions;
        empty if reductions do not count.
        """
        num_stages, size = self.one.problem.num_stages, len(self.one.problem.calls) + 1
        first_delay_s = min(self.one.find_first_delay(delays[0]), self.other.find_first_delay(delays[1]))
        # stages of the first class -> least step up to a call
        reached = {0: np.where(np.arange(size) == 0, 0.0, np.inf)}
        for stage in range(num_stages):
            further: dict[int, Vector] = {}
            for runs, of, is_first in zip((self.one, self.other), delays, (1, 0), strict=True):
                delay = of[stage] if of else None, first_delay_s
                slow_ahead, mixed = (
                    runs.bound_steps(num_microbatches, stage, others[stage], delay) for others in self._other_stages
                )
                for number, before in reached.items():
                    values = np.maximum(before[runs.start], mixed if number else slow_ahead)
                    least = _least_by_stop(values, runs.firsts, runs.ends, size)
                    known = further.get(number + is_first)
                    further[number + is_first] = least if known is None else np.minimum(known, least)
            reached = further
        found = np.array([reached[number][-1] for number in range(num_stages + 1)])
        return np.where(found < within_s, found, np.inf)

    @cached_property
    def _other_stages(self) -> tuple[list[OtherStageTimes], list[OtherStageTimes]]:
        """Return two lists of lower bounds on the seconds of a microbatch in the stages in front of and behind each
        stage. The first list is for the case that all stages in front are of the second class, the second list for the
        case that they are of either class. The stages behind are of either class. The field ``weights`` must be
        replaced before use."""
        one, other = self.one, self.other
        either = one.own.take_fastest_calls(other.own)
        num_stages, size = one.problem.num_stages, len(one.problem.calls) + 1
        overlap = one.problem.overlap_steps
        behind = [np.where(np.arange(size) == size - 1, 0.0, np.inf)]
        for stage in range(num_stages - 1, 0, -1):
            behind.append(np.minimum(*(runs.extend_behind(stage, behind[-1]) for runs in (one, other))))
        found = []
        for classes, own in (((other,), other.own), ((one, other), either)):
            back, of_stages = np.where(np.arange(size) == 0, 0.0, np.inf), []
            for stage in range(num_stages):
                if overlap:
                    of_stages.append(own._replace(behind=either.behind))
                    continue
                rest = np.maximum(either.behind, behind[-1 - stage])
                of_stages.append(own._replace(back=np.maximum(own.back, back), behind=rest))
                back = np.minimum.reduce([runs.extend_front(stage, back) for runs in classes])
            found.append(of_stages)
        return found[0], found[1]


class OtherStageTimes(NamedTuple):
    """Seconds of one microbatch in the block calls (such as layers) of the stages other than a given stage, four arrays
    of shape ``[calls + 1]``.

    ``ahead`` (forward) and ``back`` (backward for inputs; the whole backward if the schedule does not split it): lower
    bounds for the stages in front of the given stage, which have the calls before each index. ``behind`` (forward plus
    backward): a lower bound for the stages behind it, which have the calls from each index on. ``weights``: the
    backward for weights of the calls before each index on the devices of the given stage itself.
    """

    ahead: Vector
    back: Vector
    weights: Vector
    behind: Vector

    def take_fastest_calls(self, other: OtherStageTimes) -> OtherStageTimes:
        """Return the seconds if each call takes the lesser of its seconds in this object and in ``other``."""
        calls = [np.minimum(*(np.diff(seconds) for seconds in pair)) for pair in zip(self[:3], other[:3], strict=True)]
        rests = np.minimum(-np.diff(self.behind), -np.diff(other.behind))
        ahead, back, weights = (np.concatenate([[0.0], np.cumsum(of_calls)]) for of_calls in calls)
        return OtherStageTimes(ahead, back, weights, np.concatenate([np.cumsum(rests[::-1])[::-1], [0.0]]))


def _bound_step_after_stage(
    problem: StageProblem,
    stage: int,
    others: OtherStageTimes,
    start: Places,
    stop: Places,
    times: Vector,
    delay: tuple[Vector | float, Vector | float],
) -> Vector:
    """Return lower bounds in seconds on the step if the stage with index ``stage`` runs the block calls (such as
    layers) ``start:stop`` in ``times`` seconds per microbatch. ``start``, ``stop`` and ``times`` are arrays of one
    shape.

    The stage begins when the first microbatch has passed all earlier calls. After its last backward for inputs,
    backward continues through all earlier calls; meanwhile the stage can still run the backwards for weights that it
    has postponed. If steps overlap, only the part of the earlier calls that exceeds these postponed backwards counts.

    ``others``: seconds of a microbatch on the other stages. ``delay``: a pair: seconds from the last backward of this
    stage to the end of its reductions; and the same for the first stage, plus the seconds by which reductions lengthen
    the last backward of this stage. ``problem``: the calls and the schedule.
    """
    ahead, back, weights, _ = others
    late = problem.half_done(stage) * (weights[stop] - weights[start])
    if problem.overlap_steps:
        besides = np.maximum(0.0, ahead[start] + back[start] - late)
    else:
        besides = ahead[start] + np.maximum(np.maximum(0.0, back[start] - late) + delay[1], delay[0])
    through: Vector = problem.num_microbatches * times + besides
    return through


def _bound_step_around_stage(
    problem: StageProblem,
    stage: int,
    others: OtherStageTimes,
    start: Places,
    stop: Places,
    times: Vector,
    forward: Vector,
    delay: tuple[Vector | float, Vector | float],
) -> Vector:
    """Return lower bounds in seconds on the step under 1F1B or GPipe if the stage with index ``stage`` runs the block
    calls (such as layers) ``start:stop`` in ``times`` seconds per microbatch. In addition to
    :func:`_bound_step_after_stage`, they count the calls behind the stage. ``start``, ``stop``, ``times`` and
    ``forward`` are arrays of one shape.

    Under 1F1B, the first microbatch passes all stages and comes back to the stage, which has run ``w`` forwards by
    then. The stage then runs the other forwards and all backwards, and the last backward continues through all earlier
    calls. Under GPipe the stage runs all forwards first, the last microbatch passes all later stages, and then the
    backwards follow.

    ``forward``: seconds of the stage's forward of a microbatch, without waits. ``others``: seconds of a microbatch on
    the other stages. ``delay``: a pair: seconds from the last backward of this stage to the end of its reductions; and
    the same for the first stage, plus the seconds by which reductions lengthen the last backward of this stage.
    ``problem``: the calls and the schedule.
    """
    ahead, back, _, behind = others
    besides = behind[stop] + ahead[start] + np.maximum(back[start] + delay[1], delay[0])
    begun = 1 if problem.schedule == "gpipe" else problem.not_begun(stage)
    around: Vector = problem.num_microbatches * times - (begun - 1) * forward + besides
    return around


def _bound_other_stages(problem: StageProblem, pace: Pace) -> OtherStageTimes:
    """Return lower bounds on the seconds of a microbatch in the block calls (such as layers) of ``problem`` before each
    index: forward, backward for inputs (whole backward if the schedule does not split it), and backward for weights;
    and on the seconds of forward plus backward from each index on. ``pace``: the costs on the devices of one stage,
    which give the seconds of the backward for weights; the others are the least over all stages."""
    paces = {id(pace): pace for pace in map(problem.pace, range(problem.num_stages))}.values()
    ahead = [min(costs) for costs in zip(*(map(_find_least_forward, p.costs) for p in paces), strict=True)]
    train = problem.train
    split = is_split(problem.schedule)
    halves = ([(_find_least_backward(c) - c.later_s * split) * train for c in p.costs] for p in paces)
    back = [min(costs) for costs in zip(*halves, strict=True)]
    weights = [c.later_s * train for c in pace.costs]
    before, after, later = (np.concatenate([[0.0], np.cumsum(values)]) for values in (ahead, back, weights))
    return OtherStageTimes(before, after, later, (before + after)[-1] - (before + after))


def _find_least_forward(cost: CallCost) -> float:
    """Return the lesser of the forward seconds without and with selective recomputation. ``cost``: the cost of a block
    call (such as a layer). With selective recomputation, the call may take less time, because it sends fewer
    activations to host memory."""
    return min(cost.forward_total_s, cost.slim.forward_total_s) if cost.slim is not None else cost.forward_total_s


def _find_least_backward(cost: CallCost) -> float:
    """Return the lesser of the backward seconds without and with selective recomputation. ``cost``: the cost of a block
    call (such as a layer). With selective recomputation, the call may take less time, because it fetches fewer
    activations from host memory."""
    return min(cost.backward_total_s, cost.slim.backward_total_s) if cost.slim is not None else cost.backward_total_s


def _check_memory(tables: StageTables) -> None:
    """Raise :class:`CapacityError` if no cut into stages fits in memory with any recomputation of block calls (such as
    layers). The error states the missing bytes, but does not name a stage. ``tables``: seconds and bytes of all
    possible stages."""
    problem = tables.problem
    if problem.pinned or problem.recompute == "full":
        return
    start, stop, firsts = _runs_by_stop(tables, np.inf)
    excess = tables.least_bytes(start, stop) - np.array(problem.capacity, dtype=np.float64)[:, None]
    most = np.full(len(problem.calls) + 1, np.inf)
    most[0] = -np.inf
    for of_stage in excess:
        most = _least_by_stop(np.maximum(most[start], of_stage), firsts, stop[firsts], len(most))
    if most[-1] > ROUNDING_BYTES:
        missing = bytes_text(float(most[-1]))
        raise CapacityError(
            f"one of {format_plural(problem.num_stages, 'stage')} needs at least {missing} more memory than is usable "
            "on a device, for all cuts into stages and with full recomputation",
            missing_bytes=round(float(most[-1])),
            at_least=True,
        )


def _runs_by_stop(tables: StageTables, limit: float) -> tuple[Places, Places, Places]:
    """Return all sequences of consecutive block calls (such as layers) that a stage may have if every stage works at
    most ``limit`` seconds: the sequence takes at most this time, and the other stages can do the rest of the work in
    this time. The sequences are sorted by their ends. They are returned as three arrays: the index of the first call;
    the index after the last call; and, for each distinct end, the position of its first entry in the other two arrays.
    ``tables``: seconds and bytes of all possible stages."""
    start, stop = tables.short_runs(limit)
    # least number of stages for the calls before and after the run, plus one for the run
    done = np.concatenate([[0.0], np.cumsum(np.diagonal(tables.least_work, 1))]) / max(limit, TINY)
    before, behind = done[start], done[-1] - done[stop]
    stages = np.ceil(before - _ROUNDING).clip(start > 0) + 1 + np.ceil(behind - _ROUNDING).clip(stop < len(done) - 1)
    start, stop = start[stages <= tables.problem.num_stages], stop[stages <= tables.problem.num_stages]
    order = np.argsort(stop, kind="stable")
    start, stop = start[order], stop[order]
    return start, stop, np.flatnonzero(np.diff(stop, prepend=-1))


def _least_by_stop(values: Vector, firsts: Places, ends: Places, size: int) -> Vector:
    least = np.full(size, np.inf)
    if len(ends):
        least[ends] = np.minimum.reduceat(values, firsts)
    return least
