"""Compute a lower bound on a candidate from a uniform cluster, in which all devices are as good as the best real one.

In the uniform cluster, the nodes' bandwidths to other nodes may also be in any order, so no plan is slower there. Only
few placements can be optimal on it: those that divide each mesh axis into factors, one for each level of links (inside
a node, between nodes, ...). These placements are evaluated like plans, with collectives, transfers between stages and a
simulated schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from partitioner.candidate import MeshCandidate
from partitioner.cost.step.placed_mesh import PlacedMesh
from partitioner.cost.step.rank_costs import CallCostCache
from partitioner.cost.step.relaxed_mesh import best_type
from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.hashing import SameObject
from partitioner.runtime.program.mesh import AXES
from partitioner.solve.evaluate.evaluate_placement import PlacementEvaluator
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.evaluate.job import Job
from partitioner.solve.placement.irregular import list_arrangements
from partitioner.solve.placement.placement import identify_equal_cost
from partitioner.solve.placement.regular import all_nestings, equal_levels, is_regular_nesting
from partitioner.topology.hardware import NodeGroup, NodeOverride
from partitioner.topology.topology import Topology

BEST = "best"  # name of the device type of a uniform cluster
DevicePace = tuple[str, float]  # name of a device type, and the factor of a device on its speed

_MOST = 30  # with more orders of nodes, a single cluster stands for all


def list_uniform_clusters(
    topology: Topology, paces: Collection[DevicePace] | None = None, *, equal_nodes: bool = False
) -> list[Topology]:
    """Return copies of ``topology`` in which all devices are as good as the best one, on which lower bounds can be
    computed quickly. Nodes keep their network bandwidths, in another order in each copy: there is one copy for each
    order. If there are too many orders, return one copy in which every node has the second-best bandwidth.

    ``paces``: pairs (device type, speed factor), the best of which all devices get; ``None``: the best of all devices.
    ``equal_nodes``: whether to return one copy in which every node has the second-best bandwidth in any case. The list
    is empty if nodes have different numbers of devices or network cards, or if single pairs of devices or kinds of
    nodes have links of their own."""
    nodes, levels = topology.nodes, topology.levels
    shapes = {(group.devices, group.pattern, group.concurrent, group.num_cards) for group in nodes}
    if len(shapes) > 1 or topology.own_links or any(level.only for level in levels):
        return []
    every, of_device = topology.paces
    chosen = [number for number, pace in enumerate(every) if paces is None or pace in paces]
    least = min(topology.types[every[number][0]].communicator for number in chosen)
    kind = best_type([topology.paced_type(*every[number]) for number in chosen]).model_copy(
        update={"memory": int(topology.usable[np.isin(of_device, chosen)].max()), "reserved": 0, "communicator": least}
    )
    one = nodes[0]
    node = NodeGroup(
        type=BEST,
        devices=one.devices,
        count=topology.num_nodes,
        concurrent=one.concurrent,
        pattern=one.pattern,
        nics=one.nics,
    )
    shares = _find_node_bandwidth_shares(topology)
    if equal_nodes or _num_orders(shares) > _MOST or any((level.nodes or 1) > 1 for level in levels):
        shares = [sorted(shares)[-min(2, len(shares))]] * len(shares)
    return [
        Topology(
            name=f"{topology.name}, evened",
            nodes=(node,),
            types={BEST: kind},
            levels=levels,
            patterns=topology.patterns,
            node_overrides={n: NodeOverride(network=share) for n, share in enumerate(order) if share < 1},
        )
        for order in _list_share_orders(shares)
    ]


def _find_node_bandwidth_shares(topology: Topology) -> list[float]:
    """Return, for each node of ``topology``, the bandwidth of its best device to other nodes as a fraction of the full
    one. It is below 1 if network cards are missing or slower.
    """
    best = np.zeros(topology.num_nodes)
    np.maximum.at(best, topology.node_of, topology.cards.left)
    found: list[float] = best.tolist()
    return found


def _num_orders(shares: Sequence[float]) -> int:
    """Return in how many distinct orders the numbers ``shares`` can be arranged. If there are very many numbers, the
    result is not counted, but is some number above the limit up to which orders are enumerated. ``shares``: for each
    node, its fraction of the full network bandwidth."""
    if len(set(shares)) == 1:
        return 1
    if len(shares) > 2 * _MOST:
        return _MOST + 1
    return math.factorial(len(shares)) // math.prod(math.factorial(n) for n in Counter(shares).values())


def _list_share_orders(shares: Sequence[float]) -> Iterator[tuple[float, ...]]:
    """Yield the numbers ``shares`` in every distinct order, each as a tuple. ``shares``: for each node, its fraction of
    the full network bandwidth; several nodes may have equal fractions."""
    if not shares:
        yield ()
    for first in sorted(set(shares), reverse=True):
        rest = list(shares)
        rest.remove(first)
        yield from ((first, *others) for others in _list_share_orders(rest))


_NEAR = 0.75  # least mean peak, as a share of the best device's


class UniformClusters:
    """Copies of the user's cluster in which all devices are equal, and the placements (assignments of ranks to devices)
    that can be optimal on them. ``evaluator``: plans candidates on the real cluster. ``paces``: pairs (device type,
    speed factor), the best of which all devices get; ``None``: the best of the cluster's devices. ``equal_nodes``:
    whether all nodes get the second-best network bandwidth, so that replicas are equal; if not, there is one copy for
    each order of the nodes' bandwidths."""

    def __init__(
        self,
        evaluator: CandidateEvaluator,
        paces: Collection[DevicePace] | None = None,
        *,
        equal_nodes: bool = False,
    ) -> None:
        self._evaluator, self._paces, self._equal_nodes = evaluator, paces, equal_nodes
        self._costs: dict[SameObject[CallCostCache], CallCostCache] = {}  # by the evaluator's own costs
        self._machines: dict[tuple[int, ...], list[PlacedMesh]] = {}
        self._jobs: dict[int, Job] = {}  # by global batch

    def covers(self, candidate: MeshCandidate) -> bool:
        """Return whether the fastest of the listed placements on these clusters is at least as fast as every placement
        of ``candidate`` on the real cluster. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        return bool(self._level_sizes) and is_regular_nesting(candidate.grid, self._level_sizes)

    @cached_property
    def topologies(self) -> list[Topology]:
        """Return the clusters: one for each order of the nodes' network bandwidths. Return an empty list if the plan
        keeps data in host memory (hosts are not made equal), or if each rank has a fixed device."""
        job = self._evaluator.job
        if job.constraints.offload or self._evaluator.placements.in_order:  # hosts are not made equal
            return []
        return list_uniform_clusters(job.topology, self._paces, equal_nodes=self._equal_nodes)

    @cached_property
    def _level_sizes(self) -> tuple[int, ...]:
        """Return, for each level of links (inside a node, between nodes, ...), how many devices a group joined by links
        of this level has, from the inside out, such as ``(8, 32)`` for four nodes of eight devices. The sizes are those
        of the uniform clusters. The result is empty if there is no such cluster."""
        if not self.topologies:
            return ()
        return equal_levels(self.topologies[0].changed(overrides={}, node_overrides={})) or ()

    def _find_job(self, global_batch: int) -> Job:
        """Return the job on the first of these clusters, with ``global_batch`` samples in a step. Equal arguments
        return the same object, because the job caches results itself."""
        if global_batch not in self._jobs:
            self._jobs[global_batch] = replace(
                self._evaluator.job, topology=self.topologies[0], global_batch=global_batch
            )
        return self._jobs[global_batch]

    def build_placement_evaluator(
        self, candidate: MeshCandidate, cutoff_s: float, num_microbatches: int | None = None
    ) -> PlacementEvaluator:
        """Return the object that finds the best plan of ``candidate`` on placements (assignments of ranks to devices)
        on these clusters. ``cutoff_s``: plans of at least this many seconds per step are of no interest.
        ``num_microbatches``: number of microbatches of each rank; ``None``: as an even division of the batch gives.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        evaluator, global_batch = self._evaluator, self._evaluator.job.global_batch
        if num_microbatches is not None:
            global_batch = num_microbatches * candidate.dp * candidate.microbatch_size
        job = self._find_job(global_batch)
        local, costs, states = evaluator.own(candidate)
        key = SameObject(costs)
        if key not in self._costs:
            self._costs[key] = CallCostCache(costs.blocks, job.topology, costs.train, costs.again, costs.works)
        reference = replace(evaluator.locals.reference_seat(candidate.tp, candidate.cp), kind=BEST)
        return PlacementEvaluator(
            job, candidate, local, self._costs[key], states, reference, lambda *_: None, True, cutoff_s
        )

    def list_distinct_placements(self, candidate: MeshCandidate) -> list[PlacedMesh]:
        """Return the placements (assignments of ranks to devices) of the candidate's mesh on these clusters, one for
        each distinct cost. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        key = tuple(candidate.grid.values())
        if key not in self._machines:
            every = list(self._list_all_placements(candidate))
            self._machines[key] = list({identify_equal_cost(machine): machine for machine in every}.values())
        return self._machines[key]

    def _list_all_placements(self, candidate: MeshCandidate) -> Iterator[PlacedMesh]:
        """Yield placements of the candidate's mesh on these clusters, as topologies with the mesh laid over them. Some
        may have equal costs. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        sizes = tuple(candidate.grid.get(axis, 1) for axis in AXES)
        nested = all_nestings(sizes, self._level_sizes)
        first, precision = self.topologies[0], self._evaluator.job.precision
        # further placements that are tried on the real cluster; where nodes are equal, none is better
        for devices in () if self._equal_nodes else list_arrangements(first, candidate.grid):
            yield PlacedMesh(first, candidate.grid, precision, devices)
        for topology in self.topologies:
            for devices in nested:
                yield PlacedMesh(topology, candidate.grid, precision, devices)


class UniformClusterBound:
    """Computes lower bounds on candidates from a uniform cluster, whose devices are all as good as the best real one.
    ``evaluator``: plans candidates on the real cluster.
    """

    def __init__(self, evaluator: CandidateEvaluator) -> None:
        self._evaluator, self._clusters = evaluator, UniformClusters(evaluator)

    def quickly(self, candidate: MeshCandidate, cutoff_s: float) -> float:
        """Return a lower bound in seconds on the step of every plan of ``candidate``, at most ``cutoff_s``. The bound
        comes from the uniform cluster (the user's cluster with all devices as good as the best). The computation stops
        as soon as the bound is known to be below ``cutoff_s``, because the caller then cannot prune the candidate.
        Return 0 if devices differ so much that the bound would be loose. ``candidate``: mesh sizes, microbatch size,
        schedule and ZeRO stage."""
        return self._bound_until(candidate, cutoff_s, cutoff_s) if self._are_near else 0.0

    def least(self, candidate: MeshCandidate, cutoff_s: float) -> float:
        """Return a lower bound in seconds on the step of every plan of ``candidate``, at most ``cutoff_s``, as tight as
        it can be computed; 0 means that there is no bound. ``candidate``: mesh sizes, microbatch size, schedule and
        ZeRO stage. Raises :class:`PartitionError` if the model cannot be sharded as the candidate says."""
        return self._bound_until(candidate, cutoff_s, 0.0)

    def _bound_until(self, candidate: MeshCandidate, cutoff_s: float, stop_s: float) -> float:
        """Return a lower bound in seconds on the step of every plan of ``candidate``, at most ``cutoff_s``; 0 means
        that there is no bound. The result is the least of the bounds of all placements on the uniform cluster (the
        user's cluster with all devices as good as the best). As soon as one of these bounds is below ``stop_s``, the
        remaining placements are bounded only coarsely. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
        stage."""
        if self._evaluator.tries_all(candidate) or not self._clusters.covers(candidate):
            return 0.0
        placement_evaluator = self._clusters.build_placement_evaluator(candidate, cutoff_s)
        floors = sorted(
            (
                (placement_evaluator.least(machine), machine)
                for machine in self._clusters.list_distinct_placements(candidate)
            ),
            key=lambda pair: pair[0],
        )
        least = cutoff_s
        for floor, machine in floors:
            if floor >= least:
                break
            if least < stop_s:  # the next floor bounds all remaining placements
                return min(least, floor)
            if (told := _bound_plans(placement_evaluator, machine)) < least:
                least = min(least, max(told, placement_evaluator.least(machine, least)))
        return least

    @cached_property
    def _are_near(self) -> bool:
        """Return whether the mean peak FLOP/s of the cluster's devices is near that of the best device. Otherwise a
        bound from a cluster of equal devices would be loose."""
        job = self._evaluator.job
        paces, of_device = job.topology.paces
        rates = np.array([job.topology.types[kind].peak_of(job.precision) * speed for kind, speed in paces])
        return bool(rates[of_device].mean() >= _NEAR * rates.max())


def _bound_plans(placement_evaluator: PlacementEvaluator, machine: PlacedMesh) -> float:
    """Return a lower bound in seconds on the step of all plans on the placement ``machine`` (a topology with the mesh
    laid over it), from a search for the best plan; 0 if no plan was found. ``placement_evaluator``: finds the best plan
    on single placements."""
    try:
        return placement_evaluator.bound_plans(machine)
    except PartitionError:  # under a simulated schedule some cut may fit although none was found
        return 0.0
