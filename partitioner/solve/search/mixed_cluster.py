"""Compute a lower bound on a candidate on a cluster with different devices, over all ways to place its stages.

The devices are divided into two classes: those of the fastest type, and all others, which are treated as equal to the
best of the others. A group of ranks that wait for each other in every microbatch is fast if all of its devices are
fast. Any other group waits for a device of the second class, and is treated as one of that class. For each number of
fast stages in a pipeline, and each number of microbatches, the step has a lower bound that includes fill, drain and the
collectives at the ends of a step. A step of ``T`` seconds is possible only if the pipelines can be formed of the fast
groups that exist, and can run all microbatches of the batch within ``T`` seconds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.candidate import MeshCandidate
from partitioner.cost.step.placed_mesh import PlacedMesh
from partitioner.errors import CapacityError
from partitioner.schedules.formulas import is_plain
from partitioner.solve.evaluate.evaluate_placement import PlacementEvaluator, split_of, virtual_ranks
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.search.uniform_cluster import UniformClusters
from partitioner.solve.stages.lower_bound import StageRuns, StageRunsByClass
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.tables import Table
from partitioner.solve.stages.virtual_stages import set_scheduled_in_flight

Vector = NDArray[np.float64]

_FINE = 16  # numbers of microbatches up to which each is examined; beyond, each is larger by 1/16
_MOST_ORDERED = 4  # pipeline ranks up to which all orders of two classes are examined
_ROUNDING = 1e-9


class DeviceClasses(NamedTuple):
    """The two classes of devices of a cluster: those of the fastest type, and all others. ``fast``: copies of the
    cluster in which all devices are of the fastest type. ``rest``: copies in which all devices are as good as the best
    of the others. ``num_fast``: the number of devices of the fastest type in the cluster."""

    fast: UniformClusters
    rest: UniformClusters
    num_fast: int


@dataclass(frozen=True)
class PipelineSupply:
    """The pipelines that can be formed of the devices of a cluster, and their work in a step.

    ``pipelines``: number of pipelines that do not wait for each other before the end of a step. ``fast_groups``: number
    of groups of ranks that have fast devices only; each group is one stage of a pipeline. ``num_microbatches``: number
    of microbatches of all pipelines together; each pipeline has at least one."""

    pipelines: int
    fast_groups: int
    num_microbatches: int

    def list_counts(self) -> Iterator[int]:
        """Yield the numbers of microbatches of one pipeline for which bounds are computed, in ascending order. Small
        numbers are all included; larger ones are in steps of about one sixteenth."""
        most = self.num_microbatches - self.pipelines + 1
        number = 1 if self.pipelines > 1 else most
        while number < most:
            yield number
            number += max(1, number // _FINE)
        yield most

    def find_least_step(self, counts: Sequence[int], steps: NDArray[np.float64]) -> float:
        """Return the least seconds in which all pipelines together can run all microbatches; infinite if they cannot.

        ``counts``: numbers of microbatches, ascending. ``steps``: lower bounds in seconds on the step of a pipeline,
        shape ``[counts, stages + 1]``, by its number of microbatches and its number of fast stages.
        """
        # a step may be as short as that of counts[i] with up to counts[i + 1] - 1 microbatches
        ends = np.append(np.array(counts[1:], dtype=np.float64) - 1, self.num_microbatches)
        steps = np.maximum.accumulate(steps, axis=0)
        times = np.unique(steps[np.isfinite(steps)])
        low, high = 0, len(times)
        while low < high:
            middle = (low + high) // 2
            reached = (steps <= times[middle]).sum(axis=0)
            most = np.where(reached > 0, ends[reached - 1], -np.inf)
            if self._can_run(most):
                high = middle
            else:
                low = middle + 1
        return float(times[low]) if low < len(times) else math.inf

    def _can_run(self, most: Vector) -> bool:
        """Return whether the pipelines can run all microbatches. ``most``: entry ``n`` is the largest number of
        microbatches that a pipeline with ``n`` fast stages can run; minus infinity if it cannot run any. The numbers of
        pipelines and of fast groups are fixed. Numbers of pipelines of each kind need not be whole, so a mixture of at
        most two kinds is best."""
        mean = self.fast_groups / self.pipelines
        kinds = [n for n in range(len(most)) if np.isfinite(most[n]) and n <= self.fast_groups]
        best = max((most[n] for n in kinds if n <= mean), default=-np.inf)
        for n in kinds:
            for more in kinds:
                if n <= mean < more:
                    share = (mean - n) / (more - n)
                    best = max(best, (1 - share) * most[n] + share * most[more])
        return bool(best * self.pipelines >= self.num_microbatches - _ROUNDING)


class MixedClusterBound:
    """Computes lower bounds on candidates on a cluster with different devices. ``evaluator``: plans candidates on the
    cluster.
    """

    def __init__(self, evaluator: CandidateEvaluator) -> None:
        self._evaluator = evaluator

    def quickly(self, candidate: MeshCandidate, cutoff_s: float) -> float:
        """Return a lower bound in seconds on the step of every plan of ``candidate``, at most ``cutoff_s``; 0 if there
        is no bound or if ranks have several stages. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
        stage. Raises :class:`PartitionError` if the model cannot be sharded as the candidate says."""
        is_one = is_plain(candidate.schedule, candidate.virtual_stages)
        return self.least(candidate, cutoff_s) if is_one else 0.0

    def least(self, candidate: MeshCandidate, cutoff_s: float) -> float:
        """Return a lower bound in seconds on the step of every plan of ``candidate``, at most ``cutoff_s``; 0 if there
        is no bound. If ranks have several stages, there is a bound only for pipelines of few ranks, because all orders
        of device classes along the pipeline are examined. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
        stage. Raises :class:`PartitionError` if the model cannot be sharded as the candidate says."""
        job, classes = self._evaluator.job, self._classes
        fixed, is_one = job.constraints, is_plain(candidate.schedule, candidate.virtual_stages)
        if classes is None or not job.train or fixed.overlap_steps or fixed.data_shares is not None:
            return 0.0
        if self._evaluator.tries_all(candidate) or not (is_one or candidate.pp <= _MOST_ORDERED):
            return 0.0
        if not (classes.fast.covers(candidate) and classes.rest.covers(candidate)):
            return 0.0
        supply, least = self._count_pipelines(candidate, classes.num_fast), cutoff_s
        for machine in classes.fast.list_distinct_placements(candidate):
            if len(machine.distinct_pipelines) > 1:  # the bounds are for equal replicas
                return 0.0
            least = min(least, self._bound_on_placement(candidate, supply, machine, cutoff_s))
        return least

    @cached_property
    def _classes(self) -> DeviceClasses | None:
        """Return the classes of devices; ``None`` if all devices are equal or the cluster has no uniform copies."""
        topology, precision = self._evaluator.job.topology, self._evaluator.job.precision
        paces, of_device = topology.paces
        if len(paces) < 2:
            return None
        types = [topology.paced_type(*pace) for pace in paces]
        fastest = max(range(len(paces)), key=lambda n: (types[n].peak_of(precision), types[n].memory_bandwidth))
        fast, rest = (
            UniformClusters(
                self._evaluator,
                [pace for n, pace in enumerate(paces) if (n == fastest) == is_fast],
                equal_nodes=True,
            )
            for is_fast in (True, False)
        )
        return DeviceClasses(fast, rest, int((of_device == fastest).sum()))

    def _count_pipelines(self, candidate: MeshCandidate, num_fast: int) -> PipelineSupply:
        """Return the number of pipelines of ``candidate``, and of the groups of fast devices and microbatches that they
        have. If the replicas of the candidate wait for each other in every microbatch, all of them are one pipeline.
        ``num_fast``: the number of fast devices. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        job = self._evaluator.job
        if candidate.replicas_run_independently(job.model.updates):
            size = candidate.tp * candidate.cp
            return PipelineSupply(candidate.dp, num_fast // size, candidate.parts(job.global_batch))
        size = job.topology.num_devices // candidate.pp
        return PipelineSupply(1, num_fast // size, candidate.num_microbatches(job.global_batch))

    def _bound_on_placement(
        self, candidate: MeshCandidate, supply: PipelineSupply, machine: PlacedMesh, cutoff_s: float
    ) -> float:
        """Return a lower bound in seconds, at most ``cutoff_s``, on the step of every plan of ``candidate`` whose links
        are no better than on the placement ``machine``, for every assignment of device types to the ranks. All replicas
        are equal on ``machine``. ``supply``: the pipelines that ``candidate`` has. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage."""
        assert self._classes is not None
        fast, rest, _ = self._classes
        number = next(n for n, topology in enumerate(fast.topologies) if topology is machine.topology)
        slow = PlacedMesh(rest.topologies[number], candidate.grid, machine.precision, machine.devices)
        bound = _StepBounds(candidate, cutoff_s, supply.fast_groups, ((fast, machine), (rest, slow)))
        counts, rows = list[int](), list[Vector]()
        for count in supply.list_counts():
            counts.append(count)
            rows.append(bound.bound_steps(count))
            if not np.isfinite(rows[-1]).any():
                break
        least = supply.find_least_step(counts, np.stack(rows))
        if least < cutoff_s and candidate.pp > 1 and is_plain(candidate.schedule, candidate.virtual_stages):
            delays = bound.bound_delays(counts[-1])
            rows = [bound.bound_steps(count, delays) for count in counts]
            least = supply.find_least_step(counts, np.stack(rows))
        return min(cutoff_s, least)


Delays = tuple[Sequence[Table], Sequence[Table]]


@dataclass
class _StepBounds:
    """Computes lower bounds on the step of one pipeline of ``candidate`` (mesh sizes, microbatch size, schedule and
    ZeRO stage), for each number of stages on fast devices. ``cutoff_s``: bounds of at least this many seconds are
    replaced by infinity. ``most_fast``: the most fast stages that a pipeline can have. ``classes``: for the fast
    devices, then for the others, a pair: copies of the cluster in which all devices are of this class, and a placement
    on one of these copies."""

    candidate: MeshCandidate
    cutoff_s: float
    most_fast: int
    classes: tuple[tuple[UniformClusters, PlacedMesh], tuple[UniformClusters, PlacedMesh]]
    # by whether there is more than one microbatch
    _priced: dict[bool, list[tuple[StageProblem, float]]] = field(default_factory=dict)
    # by the numbers of microbatches in flight
    _runs: dict[Hashable, StageRunsByClass] = field(default_factory=dict)

    def bound_steps(self, count: int, delays: Delays = ((), ())) -> Vector:
        """Return lower bounds in seconds on the step with ``count`` microbatches, shape ``[stages + 1]``. Entry ``n``
        is for ``n`` fast stages; bounds of at least the cutoff are infinite. ``delays``: for each class of devices and
        each stage, a table of the seconds from the stage's last backward to the end of its gradient reductions."""
        candidate = self.candidate
        if candidate.pp == 1:
            return np.array([self._bound_single_stage(count, *of) for of in reversed(self.classes)])
        if not is_plain(candidate.schedule, candidate.virtual_stages):
            return self._bound_virtual_stages(count)
        (one, one_s), (other, other_s) = self._price_stages(count)
        update_s = min(one_s, other_s)
        if one.flying not in self._runs:  # the first number of microbatches allows the longest stages
            limit = (self.cutoff_s - update_s) / count
            self._runs[one.flying] = StageRunsByClass(StageRuns(one, limit), StageRuns(other, limit))
        return self._runs[one.flying].bound_steps(count, self.cutoff_s - update_s, delays) + update_s

    def _price_stages(self, count: int) -> list[tuple[StageProblem, float]]:
        """Return, for each class of devices, a pair: the problem of cutting block calls (such as layers) into stages
        with ``count`` microbatches, and a lower bound in seconds on the optimizer's update. In these problems, memory
        depends only on the microbatches in flight, and on whether there are several microbatches."""
        several = count > 1
        if several not in self._priced:
            self._priced[several] = [
                self._build_evaluator(clusters, count).price_stages(machine) for clusters, machine in self.classes
            ]
        how = self.candidate.schedule, self.candidate.pp, self.candidate.virtual_stages
        return [
            (set_scheduled_in_flight(replace(problem, num_microbatches=count), *how), update_s)
            for problem, update_s in self._priced[several]
        ]

    def bound_delays(self, count: int) -> Delays:
        """Return, for each class of devices, lower bounds on the seconds from the last backward of each stage to the
        end of its gradient reductions, with at most ``count`` microbatches."""
        one, other = (
            self._build_evaluator(clusters, count).bound_delays(machine) for clusters, machine in self.classes
        )
        return one, other

    def _bound_virtual_stages(self, count: int) -> Vector:
        """Return the bounds of :meth:`bound_steps` if each rank has several stages. Entry ``n`` is the least bound over
        all orders of ``n`` fast ranks and the other ranks along the pipeline. ``count``: number of microbatches."""
        found = np.full(self.candidate.pp + 1, math.inf)
        (one, one_s), (other, other_s) = (
            self._build_evaluator(clusters, count).price_stages(machine) for clusters, machine in self.classes
        )
        update_s, ranks = min(one_s, other_s), virtual_ranks(self.candidate, train=True)
        for order in product((one, other), repeat=self.candidate.pp):
            number = sum(problem is one for problem in order)
            if number > self.most_fast:
                continue
            of_stage = [order[rank] for rank in ranks]
            mixed = replace(
                one,
                paces=tuple(problem.pace(stage) for stage, problem in enumerate(of_stage)),
                capacity=tuple(problem.capacity[stage] for stage, problem in enumerate(of_stage)),
                ends=tuple(problem.ends[stage] for stage, problem in enumerate(of_stage) if problem.ends),
            )
            try:
                seconds = split_of(mixed, self.candidate, cutoff_s=self.cutoff_s - update_s).lower_bound_s + update_s
            except CapacityError:  # some cut may fit although none was found
                seconds = 0.0
            found[number] = min(found[number], seconds)
        return np.where(found < self.cutoff_s, found, math.inf)

    def _bound_single_stage(self, count: int, clusters: UniformClusters, machine: PlacedMesh) -> float:
        try:
            seconds = self._build_evaluator(clusters, count).bound_plans(machine)
        except CapacityError:
            return math.inf
        return seconds if seconds < self.cutoff_s else math.inf

    def _build_evaluator(self, clusters: UniformClusters, count: int) -> PlacementEvaluator:
        return clusters.build_placement_evaluator(self.candidate, self.cutoff_s, count)
