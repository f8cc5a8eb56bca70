"""What a step takes on one placement: its stages cut, its batch shared out, and all of it priced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from partitioner.cost.calls import CallCost
from partitioner.cost.estimate import estimate, stage_problem
from partitioner.cost.levels import lost_by
from partitioner.cost.machine import Machine, Seat, Seats
from partitioner.cost.paces import Pipelines, work_and_speeds
from partitioner.cost.seats import Costs, SeatCosts, fastest, slowest
from partitioner.cost.states import StateCost, with_lost
from partitioner.cost.tails import least_update, run_tails
from partitioner.errors import CapacityError, PlanError
from partitioner.job import Job
from partitioner.localize import LocalModel
from partitioner.plan import Estimate
from partitioner.schedules import ranks_of
from partitioner.solve.joint import cut_for_step
from partitioner.solve.least import least_time
from partitioner.solve.pipelines import is_formula, is_plain, least_fill
from partitioner.solve.point import Point
from partitioner.solve.shares import share_out
from partitioner.solve.stage_problem import StageProblem
from partitioner.solve.stages import StageSplit, solve_stages
from partitioner.solve.virtual import followed, solve_virtual

_SHARES = 6  # of the batch that are tried on one placement


class Judged(NamedTuple):
    """Stages that were cut for a placement, the step's estimate, and the microbatches of each rank of ``dp`` (empty:
    all have as many)."""

    problem: StageProblem
    split: StageSplit
    estimate: Estimate
    data_shares: tuple[int, ...]


def virtual_ranks(point: Point) -> tuple[int, ...]:
    """Of each virtual stage, of a schedule that is followed; empty where a formula says what it takes."""
    return () if is_formula(point.schedule) else ranks_of(point.schedule, point.pp, point.virtual_stages)


def split_of(problem: StageProblem, point: Point, *, proven: bool = True, enough_s: float = math.inf) -> StageSplit:
    """The best stages of ``problem`` under the schedule of ``point``; ``proven``, ``enough_s``, and errors: see
    :func:`partitioner.solve.virtual.solve_virtual`."""
    if is_formula(point.schedule):
        return solve_stages(problem)
    schedule = point.schedule, point.pp, point.virtual_stages
    return solve_virtual(problem, *schedule, proven=proven, enough_s=enough_s)


@dataclass
class Judge:
    """Prices placements of ``point``. ``local``, ``costs``, ``states``: what a rank runs, what that takes, what it
    holds; ``reference``: the seat that the sharding is chosen for; ``check``: raises where hosts lack memory for what
    is offloaded. ``proven``, ``enough_s``: see :meth:`partitioner.evaluate.Evaluator.solve`.

    ``leasts``: for each placement that was judged, what no plan on it goes below; ``asked``: which these are, by
    identity.
    """

    job: Job
    point: Point
    local: LocalModel
    costs: SeatCosts
    states: Mapping[str, StateCost]
    reference: Seat
    check: Callable[[Estimate, Machine], None]
    proven: bool = True
    enough_s: float = math.inf
    leasts: list[float] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    _dressed: dict[int, tuple[Machine, Machine]] = field(default_factory=dict)
    _quick: dict[int, float] = field(default_factory=dict)  # of those that are dressed
    _tried: dict[int, Sequence[tuple[int, ...]]] = field(default_factory=dict)  # shares, of the same

    def __call__(self, machine: Machine) -> tuple[float, Judged]:
        """Seconds of a step on ``machine``, and the plan. Raises :class:`PlanError` where there is none."""
        self.asked.add(id(machine))
        machine = self.dressed(machine)
        step, best, least = math.inf, None, math.inf
        errors: list[PlanError] = []
        asked = self._by_least(machine)
        tried = {shares for _, shares in asked}
        while asked:
            floor, shares = asked.pop(0)
            if best is not None and floor >= step:
                least = min(least, floor)
                continue
            try:
                told, judged, least_told = self._judged(machine, shares)
            except PlanError as error:
                errors.append(error)
                continue
            least = min(least, least_told)
            if told < step:
                step, best = told, judged
            if asked or best is None or not 1 < len(tried) < _SHARES:
                continue
            if (other := self._shares_of(best, machine)) not in tried:
                asked, tried = [(0.0, other)], tried | {other}
        if best is None:
            raise errors[0]
        self.leasts.append(min(least, self._quickly(machine)) if self._may_share(machine) else least)
        return step, best

    def _by_least(self, machine: Machine) -> list[tuple[float, tuple[int, ...]]]:
        """The microbatches of each rank of ``dp`` that are tried, by what they do not go below, as far as it is quick
        to know."""
        shares = self._shares(machine)
        if len(shares) == 1 or not self._has_floor:
            return [(0.0, each) for each in shares]
        return sorted((self._least_of(machine, each, 0.0), each) for each in shares)

    @property
    def _has_floor(self) -> bool:
        """Whether stages are followed, and are one on each rank."""
        return not is_formula(self.point.schedule) and is_plain(self.point.schedule, self.point.virtual_stages)

    def _judged(self, machine: Machine, shares: tuple[int, ...]) -> tuple[float, Judged, float]:
        """Seconds of a step in which ranks of ``dp`` have as many microbatches, the plan, and what none goes below."""
        job, point = self.job, self.point
        problem, held, shares = self._problem(machine, shares)
        ranks = virtual_ranks(point)
        order = point.schedule, point.virtual_stages if ranks else None

        def price(split: StageSplit) -> tuple[float, Estimate]:
            expected = estimate(problem, split, held, machine, job.flops, job.constraints, *order)
            if job.constraints.offload:
                self.check(expected, machine)
            return expected.step_time, expected

        cut = cut_for_step(
            problem,
            partial(split_of, point=point, proven=self.proven, enough_s=self.enough_s),
            price,
            least_update(problem, held, machine),
            lambda within_s: run_tails(self._followed(problem), held, machine, job.constraints, ranks, within_s),
            self.enough_s if self.proven else 0.0,
        )
        return cut.step_s, Judged(problem, cut.split, cut.priced, shares), cut.least_s

    def _problem(
        self, machine: Machine, shares: tuple[int, ...]
    ) -> tuple[StageProblem, Mapping[str, StateCost], tuple[int, ...]]:
        """What is cut into stages on ``machine``, the states there, and the microbatches of each rank of ``dp``."""
        job, point = self.job, self.point
        held = with_lost(self.states, lost_by(machine, job.constraints))
        costs_by_stage = self._shared_out(machine, shares)
        shares = () if len(set(shares)) == 1 else shares
        problem = stage_problem(
            self.local.model,
            self.costs.at(self.reference, machine.spread),
            held,
            machine,
            num_microbatches=max(shares, default=point.num_microbatches(job.global_batch)),  # of the longest list
            microbatch_size=point.microbatch_size,
            schedule=point.schedule,
            ranks=virtual_ranks(point),
            constraints=job.constraints,
            train=job.train,
            costs_by_stage=costs_by_stage,
            scattered_bytes=machine.scattered_bytes(point.num_microbatches(job.global_batch)),
        )
        return problem, held, shares

    def least(self, machine: Machine, enough_s: float = 0.0) -> float:
        """What judging ``machine`` does not go below, with the shares of the batch that are tried first; whether that
        is less than ``enough_s`` is found out as far as it is quick. Infinite where no stages fit."""
        machine = self.dressed(machine)
        quick = self._quickly(machine)
        if quick >= enough_s or not self._has_floor:
            return quick
        return max(quick, min(self._least_of(machine, shares, enough_s) for shares in self._shares(machine)))

    def _least_of(self, machine: Machine, shares: tuple[int, ...], enough_s: float) -> float:
        """What stages that are followed do not go below where ranks of ``dp`` have as many microbatches."""
        problem, held, _ = self._problem(machine, shares)
        try:
            found = least_time(self._followed(problem), enough_s, quick=True)
        except CapacityError:
            return math.inf
        m, overlap = problem.num_microbatches, problem.overlap_steps
        pipeline_s = found.pipeline_s(self.point.schedule, self.point.pp, m, overlap)
        return pipeline_s + least_update(problem, held, machine)

    def _quickly(self, machine: Machine) -> float:
        """What no plan on ``machine`` goes below: stages that are all as fast as the best and hold the same share of
        the work, of a rank that has as many microbatches as some rank must have; where stages differ, each its share
        of the work."""
        if id(machine) not in self._quick:
            self._quick[id(machine)] = self._at_best(machine)
        return self._quick[id(machine)]

    def _at_best(self, machine: Machine) -> float:
        point, num_microbatches = self.point, self.point.num_microbatches(self.job.global_batch)
        overlap = self.job.constraints.overlap_steps
        fill = least_fill(point.schedule, point.pp, num_microbatches, point.virtual_stages, overlap)
        apart = self.job.goes_apart(point)
        of_stages = self.costs.by_pipeline(machine) if apart else self.costs.by_stage(machine)
        different = {id(costs): costs for costs in of_stages}
        ahead, back = self._through(fastest(list(different.values())))
        filled = (1 - 1 / point.pp) * (fill[0] * ahead + fill[1] * back)
        alike = (ahead + back) * num_microbatches / point.pp + filled
        if len(different) == 1:
            return alike
        counts = list(Counter(machine.pipelines).values()) if apart else [1]
        of_all = point.parts(self.job.global_batch) if apart else num_microbatches
        return max(alike, self._shared_out_at_best(of_stages, different, counts, of_all))

    def _shared_out_at_best(
        self, of_stages: Sequence[Costs], different: Mapping[int, Costs], counts: Sequence[int], num_microbatches: int
    ) -> float:
        """What ``num_microbatches`` take at least of pipelines whose stages cost ``of_stages``, one after the other, of
        which there are ``counts``."""
        often, numbers = self._often, {key: k for k, key in enumerate(different)}
        seconds = [[sum(getattr(of[b], name) for name in self._ways) for b in often] for of in different.values()]
        work, speeds = work_and_speeds(np.array(seconds), list(often.values()))
        by_stage = speeds[[numbers[id(costs)] for costs in of_stages]].reshape(len(counts), -1)
        pipelines = Pipelines(-np.sort(-by_stage, axis=1), np.array(counts))
        return pipelines.least(work, num_microbatches, plain=is_formula(self.point.schedule))

    def dressed(self, machine: Machine) -> Machine:
        """``machine`` with what else the point says: one and the same object each time."""
        if id(machine) not in self._dressed:  # with what keeps it alive
            self._dressed[id(machine)] = machine, self.job.dressed(machine, self.point)
        return self._dressed[id(machine)][1]

    def _may_share(self, machine: Machine) -> bool:
        """Whether ranks of ``dp`` may have other numbers of microbatches than are tried, to go each at its own pace."""
        free = self.job.constraints.data_shares is None and self.job.goes_apart(self.point)
        return free and len(set(machine.pipelines)) > 1

    def _shares(self, machine: Machine) -> Sequence[tuple[int, ...]]:
        """The microbatches of each rank of ``dp`` that are tried first."""
        if id(machine) not in self._tried:
            self._tried[id(machine)] = self._first_shares(machine)
        return self._tried[id(machine)]

    def _first_shares(self, machine: Machine) -> Sequence[tuple[int, ...]]:
        """About as many; and as pipelines are fast if each had the best stages, or all have the same ones and wait for
        the slowest."""
        point, pipelines = self.point, machine.pipelines
        even = point.data_shares(self.job.global_batch)
        if not self._may_share(machine):
            return (self.job.constraints.data_shares or even,)
        parts, fill = point.parts(self.job.global_batch), float(point.pp - 1)
        work = {seats: self._work(seats, machine) for seats in dict.fromkeys(pipelines)}
        best = {seats: 1 / sum(1 / seconds for seconds in of) for seats, of in work.items()}
        paced = {seats: max(of) / point.pp for seats, of in work.items()}
        shared = [share_out(parts, [seconds[seats] for seats in pipelines], fill) for seconds in (best, paced)]
        alike = even or (parts // point.dp,) * point.dp
        return list(dict.fromkeys(shared if point.pp == 1 else [*shared, alike]))

    def _shares_of(self, judged: Judged, machine: Machine) -> tuple[int, ...]:
        """As pipelines are fast with the stages of ``judged``."""
        calls, point = self.local.model.calls, self.point
        paces: dict[tuple[Seats, ...], float] = {}
        for seats in dict.fromkeys(machine.pipelines):
            slowest_s = 0.0
            for stage, of_stage in zip(judged.split.stages, seats, strict=True):
                costs = self.costs.of_stage(of_stage, machine.spread)
                places = [part for plan in stage.parts or (stage,) for part in range(plan.start, plan.stop)]
                blocks = [calls[judged.problem.calls[place].index].block for place in places]
                slowest_s = max(slowest_s, sum(getattr(costs[b], name) for b in blocks for name in self._ways))
            paces[seats] = max(slowest_s, 1e-30)
        parts, fill = point.parts(self.job.global_batch), float(point.pp - 1)
        return share_out(parts, [paces[seats] for seats in machine.pipelines], fill)

    def _shared_out(self, machine: Machine, shares: Sequence[int]) -> Sequence[Costs]:
        """What calls take by stage: on the slowest devices, or, where pipelines go each at its own pace, as if those
        that have fewer microbatches took as many, each in so much less time."""
        point, pipelines = self.point, machine.pipelines
        if len(set(pipelines)) == 1 or not self.job.goes_apart(point):
            return self.costs.by_stage(machine)
        most, fill = max(shares), float(point.pp - 1)
        kinds = dict.fromkeys(pipelines)
        each = {seats: max(n for n, s in zip(shares, pipelines, strict=True) if s == seats) for seats in kinds}
        pace = {seats: (n + fill) / (most + fill) for seats, n in each.items()}
        return [
            slowest([_paced(self.costs.of_stage(seats[s], machine.spread), pace[seats]) for seats in kinds])
            for s in range(point.pp)
        ]

    def _work(self, seats: tuple[Seats, ...], machine: Machine) -> list[float]:
        """Seconds of all calls of a microbatch on each stage of a replica's pipeline, on ``seats``."""
        costs = (self.costs.of_stage(of_stage, machine.spread) for of_stage in seats)
        return [max(sum(self._through(of)), 1e-30) for of in costs]

    def _through(self, of: Mapping[str, CallCost]) -> tuple[float, float]:
        """Seconds of a microbatch through all calls."""
        ahead, back = (sum(n * getattr(of[b], name) for b, n in self._often.items()) for name in _TOTALS)
        return ahead, back if self.job.train else 0.0

    @cached_property
    def _often(self) -> Counter[str]:
        """How often each block is called."""
        return Counter(c.block for c in self.local.model.calls if not c.shared and not c.prologue)

    @property
    def _ways(self) -> Sequence[str]:
        return _TOTALS[: 1 + self.job.train]

    def _followed(self, problem: StageProblem) -> StageProblem:
        """``problem`` with what its schedule says of the microbatches that stages hold."""
        point = self.point
        if is_formula(point.schedule):
            return problem
        return followed(problem, point.schedule, point.pp, point.virtual_stages)


def _paced(costs: Costs, factor: float) -> Costs:
    return {name: cost.paced(factor) for name, cost in costs.items()}


_TOTALS = ("forward_total_s", "backward_total_s")
