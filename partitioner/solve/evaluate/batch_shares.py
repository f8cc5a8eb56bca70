"""Divide a batch among the data-parallel pipelines of a placement in proportion to their speeds.

The share of a pipeline is its number of microbatches. Faster pipelines get more of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost.call.call_cost import CallCost, mean_waits
from partitioner.cost.step.device_speeds import PipelineSpeeds, work_and_speeds
from partitioner.cost.step.placed_mesh import PlacedMesh, Seats
from partitioner.cost.step.rank_costs import CallCostCache, Costs, combine_fastest_costs, combine_longest_costs
from partitioner.passes.ir.hashing import SameObject
from partitioner.schedules.formulas import is_formula, least_fill
from partitioner.solve.sharding.local_model import LocalModel


def share_out(parts: int, seconds: Sequence[float], fill: float = 0.0) -> tuple[int, ...]:
    """Divide ``parts`` microbatches among replicas. Return the number of microbatches of each, at least one, such that
    the last replica ends as early as possible. ``seconds``: the time of one microbatch on each replica. ``fill``: how
    many further microbatch times each replica needs, such as to fill its pipeline; a replica with ``n`` microbatches
    takes ``n + fill`` times its entry in ``seconds``.

    The result is optimal: each microbatch goes to the replica where it ends first, and adding microbatches only delays
    ends (Fox 1966).

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
ScaledCosts = tuple[SameObject[Costs], float]  # costs of calls, and a factor on their seconds
Shares = tuple[int, ...]  # the number of microbatches of each rank of dp; empty: all ranks have equally many


@dataclass
class BatchSharing:
    """Chooses how many microbatches of the batch each rank of ``dp`` computes under ``candidate`` (mesh sizes,
    microbatch size, schedule and ZeRO stage), so that ranks on faster devices can get more. ``local``: the graphs of
    one rank. ``costs``: the costs of their block calls (such as layers) by device. ``global_batch``: samples of a step.
    ``constraints``: the choices that the user fixed. ``train``: whether a step has a backward. ``independent``: whether
    ranks of ``dp`` wait for each other only at the end of a step, so that their numbers of microbatches may differ.

    The methods take a placement: a topology with the mesh laid over it and the settings of the candidate. Results are
    cached by the identity of the placement object.
    """

    candidate: MeshCandidate
    local: LocalModel
    costs: CallCostCache
    global_batch: int
    constraints: Constraints
    train: bool
    independent: bool
    _first: dict[SameObject[PlacedMesh], Sequence[Shares]] = field(default_factory=dict)
    _least: dict[SameObject[PlacedMesh], float] = field(default_factory=dict)
    _longest: dict[tuple[ScaledCosts, ...], Costs] = field(default_factory=dict)

    def is_free(self, machine: PlacedMesh) -> bool:
        """Return whether ranks of ``dp`` may have different numbers of microbatches on the placement ``machine`` (a
        topology with the mesh laid over it), and different numbers may save time: neither a constraint nor the
        candidate fixes the numbers, and pipelines differ in speed."""
        free = self.constraints.data_shares is None and self.independent
        return free and len(machine.distinct_pipelines) > 1

    def first(self, machine: PlacedMesh) -> Sequence[Shares]:
        """Return the divisions of the batch to try first on the placement ``machine`` (a topology with the mesh laid
        over it), each as a tuple with the number of microbatches of every rank of ``dp``.

        If the numbers may differ, up to three divisions are returned. The first suits pipelines whose stages are cut in
        proportion to the speeds of their devices. The second suits pipelines with equal stages, which wait for the
        slowest. The third is even. If the numbers may not differ, there is one division, which a constraint fixes or
        which is even. An empty tuple stands for an even division.
        """
        key = SameObject(machine)
        if key not in self._first:
            self._first[key] = self._compute_first_divisions(machine)
        return self._first[key]

    def of_stages(self, calls: Sequence[Sequence[int]], machine: PlacedMesh) -> Shares:
        """Return the number of microbatches of each rank of ``dp`` for a given cut into stages on the placement
        ``machine`` (a topology with the mesh laid over it). Faster pipelines get more microbatches, so that the last
        pipeline ends as early as possible. ``calls``: for each stage, the indices of its block calls (such as layers)
        in the model of one rank.
        """
        blocks = [[self.local.model.calls[number].block for number in of_stage] for of_stage in calls]
        paces: dict[tuple[Seats, ...], float] = {}
        for seats in machine.distinct_pipelines:
            costs = [self.costs.of_stage(of_stage, machine.spread) for of_stage in seats]
            stages = zip(costs, blocks, strict=True)
            each = (
                sum(getattr(of[block], name) for block in called for name in self._time_fields) for of, called in stages
            )
            paces[seats] = max(_TINY_S, *each)
        return self._share_out_batch([paces[seats] for seats in machine.pipelines])

    def by_stage(self, machine: PlacedMesh, shares: Shares) -> Sequence[Costs]:
        """Return, for each pipeline stage, block name -> cost of a call of the block (such as a layer). These costs
        serve to choose the cut into stages. ``machine``: the placement, a topology with the mesh laid over it.
        ``shares``: the number of microbatches of each rank of ``dp``.

        All pipelines get the same cut. If they differ in speed, costs are compared per microbatch of the pipeline that
        has the most microbatches: the costs of other pipelines are scaled down in proportion to their numbers of
        microbatches. Each stage gets the greatest scaled costs of all pipelines. Stages with equal costs share one
        dict."""
        candidate, pipelines = self.candidate, machine.pipelines
        if len(machine.distinct_pipelines) == 1 or not self.independent:
            return self.costs.by_stage(machine)
        most, fill = max(shares), float(candidate.pp - 1)
        kinds = machine.distinct_pipelines
        each = {seats: max(n for n, s in zip(shares, pipelines, strict=True) if s == seats) for seats in kinds}
        pace = {seats: (n + fill) / (most + fill) for seats, n in each.items()}
        by_stage = [
            [(SameObject(self.costs.of_stage(seats[s], machine.spread)), pace[seats]) for seats in kinds]
            for s in range(candidate.pp)
        ]
        if candidate.pp == 1:  # all calls belong to one stage
            paced = [_scale_costs_by_pace(costs.value, factor) for costs, factor in by_stage[0]]
            return [max(paced, key=lambda costs: sum(self._sum_call_seconds(costs)))]
        return [self._combine_longest(tuple(dict.fromkeys(of_stage))) for of_stage in by_stage]

    def _combine_longest(self, scaled: tuple[ScaledCosts, ...]) -> Costs:
        """Return the greatest costs of a stage over all pipelines: block name -> cost of a call of the block (such as a
        layer). ``scaled``: for each kind of pipeline, the costs of the stage and the factor on their seconds. Equal
        arguments give the same dict object, so that other results can be cached by the identity of the dict."""
        if scaled not in self._longest:
            self._longest[scaled] = combine_longest_costs(
                [_scale_costs_by_pace(costs.value, factor) for costs, factor in scaled]
            )
        return self._longest[scaled]

    def least(self, machine: PlacedMesh) -> float:
        """Return a lower bound in seconds on the step of every plan on the placement ``machine`` (a topology with the
        mesh laid over it). It is valid for any division of the batch among pipelines and any cut into stages."""
        key = SameObject(machine)
        if key not in self._least:
            self._least[key] = self._compute_division_lower_bound(machine)
        return self._least[key]

    def _compute_first_divisions(self, machine: PlacedMesh) -> Sequence[Shares]:
        """Compute the divisions of the batch to try first on the placement ``machine`` (a topology with the mesh laid
        over it), and return each as a tuple with the number of microbatches of every rank of ``dp``.
        """
        candidate = self.candidate
        even = candidate.data_shares(self.global_batch)
        if not self.is_free(machine):
            return (self.constraints.data_shares or even,)
        work = {seats: self._compute_stage_seconds(seats, machine) for seats in machine.distinct_pipelines}
        best = {seats: 1 / sum(1 / seconds for seconds in of) for seats, of in work.items()}
        paced = {seats: max(of) / candidate.pp for seats, of in work.items()}
        shared = [self._share_out_batch([seconds[seats] for seats in machine.pipelines]) for seconds in (best, paced)]
        alike = even or (candidate.parts(self.global_batch) // candidate.dp,) * candidate.dp
        return list(dict.fromkeys(shared if candidate.pp == 1 else [*shared, alike]))

    def _share_out_batch(self, seconds: Sequence[float]) -> Shares:
        """Return the number of microbatches of each pipeline with which the last pipeline ends as early as possible.
        ``seconds``: for each pipeline, the time of one microbatch on its slowest stage."""
        return share_out(self.candidate.parts(self.global_batch), seconds, float(self.candidate.pp - 1))

    def _compute_division_lower_bound(self, machine: PlacedMesh) -> float:
        """Compute the lower bound of :meth:`least` in seconds, without the cache: on the step of every plan on the
        placement ``machine`` (a topology with the mesh laid over it), for any division of the batch and any cut into
        stages."""
        candidate, num_microbatches = self.candidate, self.candidate.num_microbatches(self.global_batch)
        overlap = self.constraints.overlap_steps
        fill = least_fill(candidate.schedule, candidate.pp, num_microbatches, candidate.virtual_stages, overlap)
        of_stages = self.costs.by_pipeline(machine) if self.independent else self.costs.by_stage(machine)
        calls, different = self.local.model.calls, {id(costs): costs for costs in of_stages}
        ahead, back = self._sum_call_seconds(mean_waits(combine_fastest_costs(list(different.values())), calls))
        filled = (1 - 1 / candidate.pp) * (fill[0] * ahead + fill[1] * back)
        alike = (ahead + back) * num_microbatches / candidate.pp + filled
        if len(different) == 1:
            return alike
        counts = list(Counter(machine.pipelines).values()) if self.independent else [1]
        of_all = candidate.parts(self.global_batch) if self.independent else num_microbatches
        means = {key: mean_waits(costs, calls) for key, costs in different.items()}
        return max(alike, self._least_of_pipelines(of_stages, means, counts, of_all))

    def _least_of_pipelines(
        self, of_stages: Sequence[Costs], different: Mapping[int, Costs], counts: Sequence[int], num_microbatches: int
    ) -> float:
        """Return a lower bound in seconds on running ``num_microbatches`` microbatches in total on all pipelines (one
        for each rank of ``dp``). Pipelines are of one kind if their stages have equal devices and links. If all
        pipelines wait for each other in every microbatch, the arguments describe a single pipeline.

        ``of_stages``: for each stage of the first kind of pipeline, then for each stage of the second kind, and so on,
        block name -> cost of a call of the block (such as a layer). ``different``: Python ``id`` of a dict in
        ``of_stages`` -> the same costs, with the mean waits for ZeRO-3 collectives. ``counts``: the number of pipelines
        of each kind."""
        often, numbers = self._calls_by_block, {key: k for k, key in enumerate(different)}
        seconds = [
            [sum(getattr(of[b], name) for name in self._time_fields) for b in often] for of in different.values()
        ]
        work, speeds = work_and_speeds(np.array(seconds), list(often.values()))
        by_stage = speeds[[numbers[id(costs)] for costs in of_stages]].reshape(len(counts), -1)
        pipelines = PipelineSpeeds(-np.sort(-by_stage, axis=1), np.array(counts))
        return pipelines.least(
            work, num_microbatches, plain=is_formula(self.candidate.schedule, self.candidate.pp, self.train)
        )

    def _compute_stage_seconds(self, seats: tuple[Seats, ...], machine: PlacedMesh) -> list[float]:
        """Return, for each stage of one pipeline, the seconds that all block calls (such as layers) of one microbatch
        would take on it. ``seats``: for each stage, the distinct profiles of its ranks (device, speed and groups).
        ``machine``: the placement, a topology with the mesh laid over it.
        """
        costs = (self.costs.of_stage(of_stage, machine.spread) for of_stage in seats)
        return [max(sum(self._sum_call_seconds(of)), _TINY_S) for of in costs]

    def _sum_call_seconds(self, of: Mapping[str, CallCost]) -> tuple[float, float]:
        """Return (forward seconds, backward seconds) of one microbatch through all block calls (such as layers) of the
        model. ``of``: block name -> cost of a call.
        """
        ahead, back = (sum(n * getattr(of[b], name) for b, n in self._calls_by_block.items()) for name in _TOTALS)
        return ahead, back if self.train else 0.0

    @cached_property
    def _calls_by_block(self) -> Counter[str]:
        """Return how often a microbatch calls each block (such as a layer) on the pipeline's stages. Two kinds of calls
        are not counted: those that run on all microbatches before the pipeline starts, because later calls need sums
        over the whole batch; and cheap calls, such as those for masks, that each stage runs itself.
        """
        return Counter(c.block for c in self.local.model.calls if not c.shared and not c.prologue)

    @property
    def _time_fields(self) -> Sequence[str]:
        return _TOTALS[: 1 + self.train]


def _scale_costs_by_pace(costs: Costs, factor: float) -> Costs:
    return {name: cost.paced(factor) for name, cost in costs.items()}
