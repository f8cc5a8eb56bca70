"""Division of a batch among the pipelines (data-parallel replicas) of a placement, in proportion to their speeds.

A share is a number of microbatches: a faster replica takes more of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from partitioner.candidate import MeshCandidate
from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.step.device_speeds import PipelineSpeeds, work_and_speeds
from partitioner.cost.step.placed_mesh import PlacedMesh, Seats
from partitioner.cost.step.rank_costs import CallCostCache, Costs, combine_fastest_costs, combine_longest_costs
from partitioner.schedules.formulas import is_formula, least_fill
from partitioner.solve.evaluate.job import Job
from partitioner.solve.sharding.local_model import LocalModel


def share_out(parts: int, seconds: Sequence[float], fill: float = 0.0) -> tuple[int, ...]:
    """``parts`` microbatches over replicas that take ``seconds`` for each of theirs: at least one to each, so that the
    last one ends as early as can be. A replica of ``n`` microbatches takes ``n + fill`` times its seconds.

    Optimal: the next microbatch goes where it ends first, and ends only move on (Fox 1966).

    >>> share_out(8, [1.0, 3.0])
    (6, 2)
    >>> share_out(8, [1.0, 1.0, 1.0])
    (3, 3, 2)
    """
    assert len(seconds) <= parts, "a replica without a microbatch"
    each, more = divmod(parts, len(seconds))
    if len(set(seconds)) == 1:
        return (each + 1,) * more + (each,) * (len(seconds) - more)
    shares = [1] * len(seconds)
    ends = [((2 + fill) * s, place) for place, s in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(parts - len(seconds)):
        _, place = ends[0]
        shares[place] += 1
        heapq.heapreplace(ends, ((shares[place] + 1 + fill) * seconds[place], place))
    return tuple(shares)


_TOTALS = ("forward_total_s", "backward_total_s")

_TINY_S = 1e-30
Shares = tuple[int, ...]  # the microbatches of each rank of dp; empty: all ranks have equally many


@dataclass
class BatchSharing:
    """The shares of the batch that ranks of ``dp`` may have under ``candidate``. ``local``: the local model of a rank.
    ``costs``: its costs.

    Machines must have the settings of the candidate (:meth:`Job.dressed`), and one machine must be the same object in
    each call.
    """

    job: Job
    candidate: MeshCandidate
    local: LocalModel
    costs: CallCostCache
    _first: dict[int, tuple[PlacedMesh, Sequence[Shares]]] = field(default_factory=dict)  # by identity
    _least: dict[int, tuple[PlacedMesh, float]] = field(default_factory=dict)

    def is_free(self, machine: PlacedMesh) -> bool:
        """Whether ranks may have other numbers of microbatches than those of :meth:`first`, so that each goes at its
        own pace."""
        free = self.job.constraints.data_shares is None and self.job.goes_apart(self.candidate)
        return free and len(set(machine.pipelines)) > 1

    def first(self, machine: PlacedMesh) -> Sequence[Shares]:
        """The shares that are tried first: equal shares; shares by the speed of pipelines in which each has the best
        stages; and shares by the speed of pipelines whose stages are equal and wait for the slowest."""
        if id(machine) not in self._first:
            self._first[id(machine)] = machine, self._found_first(machine)
        return self._first[id(machine)][1]

    def of_stages(self, calls: Sequence[Sequence[int]], machine: PlacedMesh) -> Shares:
        """Shares in proportion to the speed of pipelines whose stages run ``calls``, numbers of the local model's
        calls."""
        blocks = [[self.local.model.calls[number].block for number in of_stage] for of_stage in calls]
        paces: dict[tuple[Seats, ...], float] = {}
        for seats in dict.fromkeys(machine.pipelines):
            costs = [self.costs.of_stage(of_stage, machine.spread) for of_stage in seats]
            stages = zip(costs, blocks, strict=True)
            each = (
                sum(getattr(of[block], name) for block in called for name in self._time_fields) for of, called in stages
            )
            paces[seats] = max(_TINY_S, *each)
        return self._share_out_batch([paces[seats] for seats in machine.pipelines])

    def by_stage(self, machine: PlacedMesh, shares: Shares) -> Sequence[Costs]:
        """Costs of calls by stage: on the slowest devices or, if pipelines go at different paces, scaled as if every
        pipeline had the most microbatches, each in proportionally less time."""
        candidate, pipelines = self.candidate, machine.pipelines
        if len(set(pipelines)) == 1 or not self.job.goes_apart(candidate):
            return self.costs.by_stage(machine)
        most, fill = max(shares), float(candidate.pp - 1)
        kinds = dict.fromkeys(pipelines)
        each = {seats: max(n for n, s in zip(shares, pipelines, strict=True) if s == seats) for seats in kinds}
        pace = {seats: (n + fill) / (most + fill) for seats, n in each.items()}
        paced = [
            [_scale_costs_by_pace(self.costs.of_stage(seats[s], machine.spread), pace[seats]) for seats in kinds]
            for s in range(candidate.pp)
        ]
        if candidate.pp == 1:  # all calls are one stage's
            return [max(paced[0], key=lambda costs: sum(self._sum_call_seconds(costs)))]
        return [combine_longest_costs(of_stage) for of_stage in paced]

    def least(self, machine: PlacedMesh) -> float:
        """Lower bound in seconds on the plans on ``machine``, whatever the shares. All stages are as fast as the best
        and hold equal shares of the work of a rank with the most microbatches; if stages differ, each has its share of
        the work."""
        if id(machine) not in self._least:
            self._least[id(machine)] = machine, self._found_least(machine)
        return self._least[id(machine)][1]

    def _found_first(self, machine: PlacedMesh) -> Sequence[Shares]:
        candidate = self.candidate
        even = candidate.data_shares(self.job.global_batch)
        if not self.is_free(machine):
            return (self.job.constraints.data_shares or even,)
        work = {seats: self._compute_stage_seconds(seats, machine) for seats in dict.fromkeys(machine.pipelines)}
        best = {seats: 1 / sum(1 / seconds for seconds in of) for seats, of in work.items()}
        paced = {seats: max(of) / candidate.pp for seats, of in work.items()}
        shared = [self._share_out_batch([seconds[seats] for seats in machine.pipelines]) for seconds in (best, paced)]
        alike = even or (candidate.parts(self.job.global_batch) // candidate.dp,) * candidate.dp
        return list(dict.fromkeys(shared if candidate.pp == 1 else [*shared, alike]))

    def _share_out_batch(self, seconds: Sequence[float]) -> Shares:
        """The batch divided among pipelines that take ``seconds`` for a microbatch."""
        return share_out(self.candidate.parts(self.job.global_batch), seconds, float(self.candidate.pp - 1))

    def _found_least(self, machine: PlacedMesh) -> float:
        candidate, num_microbatches = self.candidate, self.candidate.num_microbatches(self.job.global_batch)
        overlap = self.job.constraints.overlap_steps
        fill = least_fill(candidate.schedule, candidate.pp, num_microbatches, candidate.virtual_stages, overlap)
        apart = self.job.goes_apart(candidate)
        of_stages = self.costs.by_pipeline(machine) if apart else self.costs.by_stage(machine)
        different = {id(costs): costs for costs in of_stages}
        ahead, back = self._sum_call_seconds(combine_fastest_costs(list(different.values())))
        filled = (1 - 1 / candidate.pp) * (fill[0] * ahead + fill[1] * back)
        alike = (ahead + back) * num_microbatches / candidate.pp + filled
        if len(different) == 1:
            return alike
        counts = list(Counter(machine.pipelines).values()) if apart else [1]
        of_all = candidate.parts(self.job.global_batch) if apart else num_microbatches
        return max(alike, self._least_of_pipelines(of_stages, different, counts, of_all))

    def _least_of_pipelines(
        self, of_stages: Sequence[Costs], different: Mapping[int, Costs], counts: Sequence[int], num_microbatches: int
    ) -> float:
        """Lower bound in seconds on ``num_microbatches`` in all on pipelines whose stages cost ``of_stages``,
        consecutive for each pipeline. ``counts``: number of pipelines of each kind."""
        often, numbers = self._calls_by_block, {key: k for k, key in enumerate(different)}
        seconds = [
            [sum(getattr(of[b], name) for name in self._time_fields) for b in often] for of in different.values()
        ]
        work, speeds = work_and_speeds(np.array(seconds), list(often.values()))
        by_stage = speeds[[numbers[id(costs)] for costs in of_stages]].reshape(len(counts), -1)
        pipelines = PipelineSpeeds(-np.sort(-by_stage, axis=1), np.array(counts))
        return pipelines.least(work, num_microbatches, plain=is_formula(self.candidate.schedule))

    def _compute_stage_seconds(self, seats: tuple[Seats, ...], machine: PlacedMesh) -> list[float]:
        """Seconds of all calls of a microbatch on each stage of a replica's pipeline, on ``seats``."""
        costs = (self.costs.of_stage(of_stage, machine.spread) for of_stage in seats)
        return [max(sum(self._sum_call_seconds(of)), _TINY_S) for of in costs]

    def _sum_call_seconds(self, of: Mapping[str, CallCost]) -> tuple[float, float]:
        """Forward and backward seconds of a microbatch through all calls."""
        ahead, back = (sum(n * getattr(of[b], name) for b, n in self._calls_by_block.items()) for name in _TOTALS)
        return ahead, back if self.job.train else 0.0

    @cached_property
    def _calls_by_block(self) -> Counter[str]:
        """The number of calls of each block."""
        return Counter(c.block for c in self.local.model.calls if not c.shared and not c.prologue)

    @property
    def _time_fields(self) -> Sequence[str]:
        return _TOTALS[: 1 + self.job.train]


def _scale_costs_by_pace(costs: Costs, factor: float) -> Costs:
    return {name: cost.paced(factor) for name, cost in costs.items()}
