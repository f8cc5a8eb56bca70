"""Seconds of the gradient reduction: algorithms for a group of ranks, and exposed time per stage.

A reduction is one collective, hierarchical over several levels, or compressed. ``ways`` lists the algorithms that a
machine offers, and decides whether hierarchical reduction is among them. GPU libraries already reduce level by level
over several nodes, in rings and trees over all network cards; there the program has levels of its own only on request.
Where an all-reduce is one ring (Gloo), levels are used if they are faster.

``GradientReduction`` gives the seconds of reducing the gradients of a stage, and the part that computation does not
hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.constraints import Constraints
from partitioner.cost.call.collectives import collective_time
from partitioner.cost.call.roofline import memory_rate
from partitioner.cost.call.states import INNER, OUTER, StateCost
from partitioner.cost.step.placed_mesh import PlacedMesh
from partitioner.emit.buckets import AT_ONCE, ReductionScheme, bucket_limit
from partitioner.runtime.program.buckets import Compression
from partitioner.runtime.program.codecs import CODECS, wire_share
from partitioner.runtime.program.mesh import AXES
from partitioner.topology.group import Group
from partitioner.topology.groups import map_ranks_to_devices
from partitioner.topology.hardware import DeviceType
from partitioner.topology.topology import Topology

# Passes through memory of compression and decompression together, summed over their kernels.
_PASSES: dict[Compression, float] = {"bf16": 3.0, "int8": 14.0}
_EXACT = frozenset({"tp"})  # reductions over these axes alone are not over data, and are never compressed


def coding_time(compression: Compression, num_bytes: float, device: DeviceType) -> float:
    """Seconds of compressing ``num_bytes`` of gradients and decompressing as many received bytes."""
    return _PASSES[compression] * num_bytes / memory_rate("default", device)


class CommunicationTime(NamedTuple):
    """Seconds of communication, and seconds of compression on the rank itself."""

    seconds: float
    coding_s: float = 0.0

    def and_(self, seconds: float) -> CommunicationTime:
        return CommunicationTime(self.seconds + seconds, self.coding_s)


Axes = tuple[str, ...]


@dataclass(frozen=True)
class Reducer:
    """Cost of reducing the gradients of a stage.

    ``group``: maps axes, in the machine's terms, to a group of ranks. ``itemsize``: bytes of one element of a gradient.
    """

    group: Callable[[tuple[str, ...]], Group]
    how: ReductionScheme
    device: DeviceType
    itemsize: int = 4
    _times: dict[tuple[str, float, Axes], CommunicationTime] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def all_reduce(self, num_bytes: float, axes: Axes) -> CommunicationTime:
        """Cost of an all-reduce of ``num_bytes`` of gradients over ``axes``: of a bucket, or of the shards left after
        scattering."""
        return self._time_once("all_reduce", num_bytes, axes, lambda: self._find_all_reduce_time(num_bytes, axes))

    def all_gather(self, num_bytes: float, axes: Axes) -> CommunicationTime:
        """Cost of gathering ``num_bytes`` of updated parameters over ``axes``."""
        return self._time_once(
            "all_gather",
            num_bytes,
            axes,
            lambda: CommunicationTime(collective_time("all_gather", num_bytes, self.group(axes))),
        )

    def _time_once(
        self, op: str, num_bytes: float, axes: Axes, find: Callable[[], CommunicationTime]
    ) -> CommunicationTime:
        """The result of ``find``, which is called once for each operation, size and axes."""
        key = op, num_bytes, axes
        if key not in self._times:
            self._times[key] = find()
        return self._times[key]

    def _find_all_reduce_time(self, num_bytes: float, axes: Axes) -> CommunicationTime:
        inner, outer = self._find_level_groups(axes)
        if inner.size > 1 and outer.size > 1:
            inside = collective_time("reduce_scatter", num_bytes, inner) + collective_time(
                "all_gather", num_bytes, inner
            )
            return self._compute_all_reduce_time(num_bytes / inner.size, outer, axes).and_(inside)
        return self._compute_all_reduce_time(num_bytes, self.group(axes), axes)

    def _find_level_groups(self, axes: tuple[str, ...]) -> tuple[Group, Group]:
        if not self.how.inside or not any(axis in OUTER for axis in axes):
            return Group(1), Group(1)
        inner = tuple(INNER.get(axis, axis) for axis in axes)
        return self.group(inner), self.group(tuple(OUTER[axis] for axis in axes if axis in OUTER))

    def _compute_all_reduce_time(self, num_bytes: float, group: Group, axes: Sequence[str]) -> CommunicationTime:
        if self.how.compression is None or group.size == 1 or not {*axes} - _EXACT:
            return CommunicationTime(collective_time("all_reduce", num_bytes, group))
        sent, back = self._compute_exchange_time(num_bytes, group), self._compute_coding_seconds(num_bytes / group.size)
        return CommunicationTime(
            sent.seconds + collective_time("all_gather", self._compute_wire_bytes(num_bytes), group),
            sent.coding_s + back,
        )

    def lost(self, axes: tuple[str, ...]) -> float:
        """Share of a bucket kept as compression residual when it is reduced over ``axes``: of the sent data and of the
        sums."""
        kind = self.how.compression
        if kind is None or not CODECS[kind].feedback or not {*axes} - _EXACT or self.group(axes).size == 1:
            return 0.0
        inner, outer = self._find_level_groups(axes)
        if inner.size > 1 and outer.size > 1:
            return (1 + 1 / outer.size) / inner.size
        return 1 + 1 / self.group(axes).size

    def scatter(self, num_bytes: float, axes: Axes, last: bool) -> CommunicationTime:
        """Cost of a reduce-scatter of a bucket to the ranks that share its states.

        ``last``: it crosses the outermost links of the reduction, on which gradients may be compressed.
        """
        op = "scatter_last" if last else "scatter"
        return self._time_once(op, num_bytes, axes, lambda: self._find_scatter_time(num_bytes, axes, last))

    def _find_scatter_time(self, num_bytes: float, axes: Axes, last: bool) -> CommunicationTime:
        group = self.group(axes)
        if self.how.compression is None or not last or group.size == 1:
            return CommunicationTime(collective_time("reduce_scatter", num_bytes, group))
        return self._compute_exchange_time(num_bytes, group)

    def _compute_exchange_time(self, num_bytes: float, group: Group) -> CommunicationTime:
        return CommunicationTime(
            collective_time("all_to_all", self._compute_wire_bytes(num_bytes) * group.size, group),
            self._compute_coding_seconds(num_bytes),
        )

    def _compute_wire_bytes(self, num_bytes: float) -> float:
        assert self.how.compression is not None
        return num_bytes * wire_share(self.how.compression, self.itemsize)

    def _compute_coding_seconds(self, num_bytes: float) -> float:
        assert self.how.compression is not None
        return coding_time(self.how.compression, num_bytes, self.device)


def reducer_of(machine: PlacedMesh, stage: int, how: ReductionScheme) -> Reducer:
    """The reducer of a stage of ``machine``, one for all copies of the machine whose groups are the same."""
    used = machine.zero, machine.dp_shard, machine.ep, machine.etp, machine.precision
    return machine.compute_once(("reducer", stage, how, *used), lambda: _build_reducer(machine, stage, how))


def _build_reducer(machine: PlacedMesh, stage: int, how: ReductionScheme) -> Reducer:
    split = replace(machine, dp_shard=how.inside) if how.inside else machine
    device = max(machine.devices_of(stage), key=lambda kind: coding_time("bf16", 1.0, kind))

    @cache
    def group(axes: tuple[str, ...]) -> Group:
        return split.stage_groups(*axes)[stage]

    return Reducer(group, how, device, 8 if machine.precision == "fp64" else 4)


def data_reducers(machines: Sequence[PlacedMesh], zero: int, constraints: Constraints) -> list[Reducer]:
    """The reducers of one stage on any of ``machines``; ``dp`` stands for all ranks with the same weights there."""
    laid = [replace(machine, zero=zero) for machine in machines]
    return [_over_data(reducer_of(m, 0, how)) for m in laid for how in list_reduction_schemes(m, constraints)]


def _over_data(reducer: Reducer) -> Reducer:
    group = reducer.group
    return replace(reducer, group=lambda axes: group(axes if axes == ("dp_replicate",) else (*axes, "cp")))


def best_reducers(topology: Topology, group: Group, device: DeviceType, constraints: Constraints) -> list[Reducer]:
    """The reducer over ``group``, which none is better than; none, where a part of it may be in nodes, or what is sent
    less."""
    if constraints.grad_compression is not None or may_be_hierarchical(topology, constraints):
        return []
    return [Reducer(lambda axes: group, AT_ONCE, device)]


def list_reduction_schemes(machine: PlacedMesh, constraints: Constraints) -> list[ReductionScheme]:
    """The ways of reducing gradients to choose from, the plainest first."""
    compression = constraints.grad_compression
    inside = 0 if machine.zero or not may_be_hierarchical(machine.topology, constraints) else ranks_inside(machine)
    stepped = [ReductionScheme(inside, compression)] if inside else []
    return stepped if stepped and constraints.hierarchical else [ReductionScheme(0, compression), *stepped]


def lost_by(machine: PlacedMesh, constraints: Constraints) -> Callable[[StateCost], float] | None:
    """What a state has kept of what sending its gradient loses, in the way in which it is most; ``None`` where nothing
    is kept."""
    compression = constraints.grad_compression
    if compression is None or not CODECS[compression].feedback:
        return None
    reducers = [reducer_of(machine, 0, how) for how in list_reduction_schemes(machine, constraints)]

    def lost(cost: StateCost) -> float:
        part = max(reducer.lost(cost.rest_axes) for reducer in reducers)
        if not part and cost.scatter_axes:  # what is scattered to shards is sent once
            return cost.gradient
        return part * cost.gradient_piece

    return lost


def may_be_hierarchical(topology: Topology, constraints: Constraints) -> bool:
    """Whether levels of the program's own are among the ways."""
    if constraints.hierarchical is None:
        return topology.single_ring and topology.num_nodes > 1
    return constraints.hierarchical


def ranks_inside(machine: PlacedMesh) -> int:
    """The most neighbours along ``dp`` that are on one node, with their ``cp``; 0 where that is one rank, or all."""
    sizes = [machine.mesh.get(axis, 1) for axis in AXES]
    nodes = machine.topology.node_of[map_ranks_to_devices(machine.topology, machine.mesh, machine.devices)].reshape(
        sizes
    )
    dp, cp = sizes[1], sizes[2]
    for ranks in (n for n in range(dp, 0, -1) if dp % n == 0):
        parts = nodes.reshape(sizes[0], dp // ranks, ranks, cp, sizes[3])
        if np.array_equal(parts, np.broadcast_to(parts[:, :, :1, :1], parts.shape)):
            return 0 if ranks == dp or ranks * cp == 1 else ranks
    return 0


@dataclass(frozen=True)
class GradientReduction:
    """The reduction of a stage's gradients: seconds in all, and of the last bucket, which nothing hides.

    ``again_s``: of scattering in every further microbatch, under ZeRO 2, which accumulates shards.
    ``gather_s``: of gathering the updated parameters under ZeRO 1 and 2, behind the forward that follows.
    ``coding_s``: of compressing what is sent, which nothing is beside; ``coding_again_s``: in every further microbatch.
    """

    total_s: float = 0.0
    last_s: float = 0.0
    gather_s: float = 0.0
    again_s: float = 0.0
    coding_s: float = 0.0
    coding_again_s: float = 0.0
    by_axes: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    @property
    def seconds(self) -> tuple[float, ...]:
        """All but what is by axes, in order."""
        return self.total_s, self.last_s, self.gather_s, self.again_s, self.coding_s, self.coding_again_s

    def exposed(
        self, window_s: float, slowdown: float, forward_s: float = 0.0, overlap: bool = True, microbatches: int = 1
    ) -> float:
        """Seconds that it adds to a backward of ``window_s`` that it overlaps with, and to a forward of ``forward_s``;
        and to the backwards of all ``microbatches`` but the last.

        While both run each takes ``slowdown`` times as long; what does not fit and the last bucket come after.
        """
        return float(exposed_seconds(self.seconds, window_s, slowdown, forward_s, overlap, microbatches))


Seconds = float | NDArray[np.float64]


def exposed_seconds(
    works: Sequence[Seconds], window_s: Seconds, slowdown: float, forward_s: Seconds, overlap: bool, microbatches: int
) -> Any:
    """:meth:`GradientReduction.exposed`, of many at a time; ``works``: as
    :attr:`GradientReduction.seconds`."""
    total, last, gather, again, coding, coding_again = works
    coding = coding + (microbatches - 1) * coding_again
    if not overlap:
        return total + gather + (microbatches - 1) * again + coding

    def beside(seconds: Seconds, other: Seconds) -> Any:
        return (slowdown - 1) * np.minimum(seconds, other) + np.maximum(0.0, seconds - other)

    behind = beside(np.maximum(0.0, total - last), window_s) + last
    return beside(gather, forward_s) + (microbatches - 1) * beside(again, window_s) + behind + coding


def by_owner(work: GradientReduction, tensors: Mapping[tuple[str, ...], int], reducer: Reducer) -> GradientReduction:
    """``work``, where each of so many ``tensors``, by the axes that share their states, is on one rank: gradients are
    added up to their owners and what those have updated goes out in a message for each owner, whose pieces pass through
    all ranks in turn, as of a ring's (InternEvo, ``hybrid_zero_optim.py``: ``dist.reduce`` and ``dist.broadcast``)."""
    groups = [(reducer.group(axes), count) for axes, count in tensors.items()]
    starts = sum(min(group.size, count) * group.one_way_start for group, count in groups)
    return replace(work, total_s=work.total_s + starts, gather_s=work.gather_s + starts)


Sizes = dict[tuple[str, Axes, int, Axes], float]
"""Bytes by operation, its axes, the stage of ZeRO, and the axes that gradients were scattered over before."""


def compute_gradient_reduction(
    costs: Collection[StateCost], reducer: Reducer, overlap: bool = True
) -> GradientReduction:
    """The reduction of the gradients of ``costs``, in buckets by axes.

    Buckets are small for the first to go out behind computation: without ``overlap`` there is one for the same axes.
    Under ZeRO 1 and 2 it is a reduce-scatter and, in the next step, an all-gather; under 3 both are the calls' own.
    What a reduce-scatter leaves is added up over other axes (replicas, ``tp``) once.
    """
    sizes: Sizes = {}
    last_level: dict[tuple[str, ...], bool] = {}
    for cost in costs:
        for key, size in reduced_sizes(cost).items():
            sizes[key] = sizes.get(key, 0.0) + size
        last_level |= last_levels(cost)
    return reduction_of(sizes, last_level, reducer, overlap)


def reduced_sizes(cost: StateCost) -> Sizes:
    """What of a state is reduced, and how."""
    sizes: Sizes = {}
    if cost.gradient and cost.scatter_axes and cost.stage < 3:
        sizes["reduce_scatter", cost.scatter_axes, cost.stage, ()] = cost.gradient
        sizes["all_gather", cost.scatter_axes, cost.stage, ()] = cost.parameter
    if cost.gradient and cost.rest_axes:
        sizes["all_reduce", cost.rest_axes, 0, cost.scatter_axes] = cost.gradient_piece
    return sizes


def last_levels(cost: StateCost) -> dict[tuple[str, ...], bool]:
    """Whether scattering a state's gradient over its axes is the last of its reduction that data takes part in."""
    scattered = cost.gradient and cost.scatter_axes and cost.stage < 3
    return {cost.scatter_axes: not any(axis != "tp" for axis in cost.rest_axes)} if scattered else {}


def reduction_of(
    sizes: Sizes, last_level: Mapping[tuple[str, ...], bool], reducer: Reducer, overlap: bool = True
) -> GradientReduction:
    """The reduction of so many bytes, see :func:`compute_gradient_reduction`."""
    by_axes: dict[tuple[str, ...], float] = {}
    last = gathered = again = coding = coding_again = 0.0
    for (op, axes, stage, before), size in sizes.items():
        group = reducer.group(axes)
        filled_by = reducer.group(before).size if before else 1  # a bucket of shards is one of what was scattered
        limit = bucket_limit(filled_by * group.size)
        count = math.ceil(size * filled_by / limit) if overlap else 1
        if op == "all_gather":  # of the parameters, in the next step
            gathered += count * collective_time(op, size / count, group)
            continue
        sent = reducer.all_reduce(size / count, axes) if op == "all_reduce" else None
        sent = sent or reducer.scatter(size / count, axes, last_level[axes])
        by_axes[axes] = by_axes.get(axes, 0.0) + count * sent.seconds
        last = max(last, sent.seconds)
        again += count * sent.seconds if stage == 2 else 0.0
        coding += count * sent.coding_s
        coding_again += count * sent.coding_s if stage == 2 else 0.0
    return GradientReduction(sum(by_axes.values()), last, gathered, again, coding, coding_again, by_axes)
