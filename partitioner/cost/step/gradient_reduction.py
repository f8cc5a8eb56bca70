"""Seconds of the gradient reduction: the algorithms for a group of ranks, and the time of a stage that computation does
not hide.

A reduction is one collective, hierarchical over several levels of links, or compressed. ``list_reduction_schemes``
lists the schemes that are available on a machine. GPU libraries already reduce level by level over several nodes, in
rings and trees over all network cards. On GPUs, the program therefore adds levels of its own only if the user asks for
them. Where an all-reduce is one ring (Gloo), levels are used if they are faster.

``GradientReduction`` has the seconds of reducing the gradients of a stage.
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
    """Return the seconds in which ``device`` compresses ``num_bytes`` of gradients and decompresses as many received
    bytes. ``compression``: the compressed format."""
    return _PASSES[compression] * num_bytes / memory_rate("default", device)


class CommunicationTime(NamedTuple):
    """Seconds of a collective. ``seconds``: time of communication. ``coding_s``: time in which the rank compresses and
    decompresses."""

    seconds: float
    coding_s: float = 0.0

    def and_(self, seconds: float) -> CommunicationTime:
        return CommunicationTime(self.seconds + seconds, self.coding_s)


Axes = tuple[str, ...]


@dataclass(frozen=True)
class Reducer:
    """Computes the seconds of the collectives that reduce the gradients of a stage.

    ``group``: function from a tuple of mesh axes to the group of ranks along them. ``how``: the reduction scheme (one
    collective or hierarchical, with or without compression). ``device``: the type of the devices that compress
    gradients. ``itemsize``: bytes of one element of a gradient.
    """

    group: Callable[[tuple[str, ...]], Group]
    how: ReductionScheme
    device: DeviceType
    itemsize: int = 4
    _times: dict[tuple[str, float, Axes], CommunicationTime] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def all_reduce(self, num_bytes: float, axes: Axes) -> CommunicationTime:
        """Return the time of an all-reduce of ``num_bytes`` of gradients over the mesh axes ``axes``: seconds of
        communication, and seconds of compression. The gradients are either a bucket (several gradients in one buffer)
        or the shards of a bucket that a reduce-scatter over other axes has left."""
        return self._time_once("all_reduce", num_bytes, axes, lambda: self._find_all_reduce_time(num_bytes, axes))

    def all_gather(self, num_bytes: float, axes: Axes) -> CommunicationTime:
        """Return the time of all-gathering ``num_bytes`` of updated parameters over the mesh axes ``axes``: seconds of
        communication. Parameters are not compressed."""
        return self._time_once(
            "all_gather",
            num_bytes,
            axes,
            lambda: CommunicationTime(collective_time("all_gather", num_bytes, self.group(axes))),
        )

    def _time_once(
        self, op: str, num_bytes: float, axes: Axes, find: Callable[[], CommunicationTime]
    ) -> CommunicationTime:
        """Return ``find()``, the time of a collective (seconds of communication and of compression), and cache it by
        the other arguments. ``op``: name of the collective. ``num_bytes``: its size. ``axes``: the mesh axes over which
        it runs."""
        key = op, num_bytes, axes
        if key not in self._times:
            self._times[key] = find()
        return self._times[key]

    def _find_all_reduce_time(self, num_bytes: float, axes: Axes) -> CommunicationTime:
        """Return the time (seconds of communication and of compression) of an all-reduce of ``num_bytes`` over the mesh
        axes ``axes``. Under a hierarchical scheme, the all-reduce is a reduce-scatter inside nodes, an all-reduce
        between nodes and an all-gather inside nodes."""
        inner, outer = self._find_level_groups(axes)
        if inner.size > 1 and outer.size > 1:
            inside = collective_time("reduce_scatter", num_bytes, inner) + collective_time(
                "all_gather", num_bytes, inner
            )
            return self._compute_all_reduce_time(num_bytes / inner.size, outer, axes).and_(inside)
        return self._compute_all_reduce_time(num_bytes, self.group(axes), axes)

    def _find_level_groups(self, axes: tuple[str, ...]) -> tuple[Group, Group]:
        """Return two groups of ranks for a hierarchical reduction over ``axes``: the ranks inside a node, and the ranks
        with the same position on different nodes. Both have a single rank if the reduction is not hierarchical."""
        if not self.how.inside or not any(axis in OUTER for axis in axes):
            return Group(1), Group(1)
        inner = tuple(INNER.get(axis, axis) for axis in axes)
        return self.group(inner), self.group(tuple(OUTER[axis] for axis in axes if axis in OUTER))

    def _compute_all_reduce_time(self, num_bytes: float, group: Group, axes: Sequence[str]) -> CommunicationTime:
        """Return the time (seconds of communication and of compression) of one all-reduce of ``num_bytes`` over
        ``group``. ``axes``: mesh axes of the group. With compression, it is an all-to-all of compressed parts and an
        all-gather of the compressed sums."""
        if self.how.compression is None or group.size == 1 or not {*axes} - _EXACT:
            return CommunicationTime(collective_time("all_reduce", num_bytes, group))
        sent, back = self._compute_exchange_time(num_bytes, group), self._compute_coding_seconds(num_bytes / group.size)
        return CommunicationTime(
            sent.seconds + collective_time("all_gather", self._compute_wire_bytes(num_bytes), group),
            sent.coding_s + back,
        )

    def lost(self, axes: tuple[str, ...]) -> float:
        """Return the bytes of the compression residual (the rounding error that is kept for the next step) per byte of
        gradients that are reduced over ``axes``; 0 if no residual is kept. A rank keeps the errors of the gradients
        that it sends and of the sums that it sends back."""
        kind = self.how.compression
        if kind is None or not CODECS[kind].feedback or not {*axes} - _EXACT or self.group(axes).size == 1:
            return 0.0
        inner, outer = self._find_level_groups(axes)
        if inner.size > 1 and outer.size > 1:
            return (1 + 1 / outer.size) / inner.size
        return 1 + 1 / self.group(axes).size

    def scatter(self, num_bytes: float, axes: Axes, last: bool) -> CommunicationTime:
        """Return the time (seconds of communication and of compression) of a reduce-scatter of ``num_bytes`` of
        gradients over the mesh axes ``axes``, over which ZeRO shards the parameters. ``last``: whether no other
        data-parallel reduction follows. If so, and if the reduction scheme compresses, the gradients are compressed."""
        op = "scatter_last" if last else "scatter"
        return self._time_once(op, num_bytes, axes, lambda: self._find_scatter_time(num_bytes, axes, last))

    def _find_scatter_time(self, num_bytes: float, axes: Axes, last: bool) -> CommunicationTime:
        """Return the time (seconds of communication and of compression) of a reduce-scatter of ``num_bytes`` of
        gradients over the mesh axes ``axes``. ``last``: whether no other data-parallel reduction follows. If so, and if
        the reduction scheme compresses, the gradients are compressed."""
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
    """Return the :class:`Reducer` that computes the seconds of gradient collectives of the stage with index ``stage``
    under the reduction scheme ``how`` (one collective or a hierarchical reduction, with or without compression).
    ``machine``: the devices and links that the mesh is laid over. Copies of ``machine`` with the same groups share one
    reducer."""
    used = machine.zero, machine.dp_shard, machine.ep, machine.etp, machine.precision
    return machine.compute_once(("reducer", stage, how, *used), lambda: _build_reducer(machine, stage, how))


def _build_reducer(machine: PlacedMesh, stage: int, how: ReductionScheme) -> Reducer:
    """Return a new :class:`Reducer` that computes the seconds of gradient collectives of the stage with index ``stage``
    under the reduction scheme ``how`` (one collective or a hierarchical reduction, with or without compression). If the
    stage has several device types, the one that compresses most slowly counts. ``machine``: the devices and links that
    the mesh is laid over."""
    split = replace(machine, dp_shard=how.inside) if how.inside else machine
    device = max(machine.devices_of(stage), key=lambda kind: coding_time("bf16", 1.0, kind))

    @cache
    def group(axes: tuple[str, ...]) -> Group:
        return split.stage_groups(*axes)[stage]

    return Reducer(group, how, device, 8 if machine.precision == "fp64" else 4)


def data_reducers(machines: Sequence[PlacedMesh], zero: int, constraints: Constraints) -> list[Reducer]:
    """Return one :class:`Reducer` for each of ``machines`` (placements of a mesh) and each reduction scheme that
    ``constraints`` allow. The reducers compute the seconds of gradient collectives of pipeline stage 0 under ZeRO stage
    ``zero`` (0 to 3). For them, the axis ``dp`` means all ranks with the same weights, that is, the ranks of ``dp`` and
    ``cp``."""
    laid = [replace(machine, zero=zero) for machine in machines]
    return [_over_data(reducer_of(m, 0, how)) for m in laid for how in list_reduction_schemes(m, constraints)]


def _over_data(reducer: Reducer) -> Reducer:
    group = reducer.group
    return replace(reducer, group=lambda axes: group(axes if axes == ("dp_replicate",) else (*axes, "cp")))


def best_reducers(topology: Topology, group: Group, device: DeviceType, constraints: Constraints) -> list[Reducer]:
    """Return a list with one :class:`Reducer`, which computes lower bounds on the seconds of gradient collectives: each
    collective is priced as if it ran over ``group``. This is a bound if ``group`` is at least as fast as any group of
    as many ranks on ``topology``.

    The list is empty if gradients may be compressed or reduced hierarchically, because this can be faster. ``device``:
    the type of the devices. ``constraints``: the choices that the user fixed.
    """
    if constraints.grad_compression is not None or may_be_hierarchical(topology, constraints):
        return []
    return [Reducer(lambda axes: group, AT_ONCE, device)]


def list_reduction_schemes(machine: PlacedMesh, constraints: Constraints) -> list[ReductionScheme]:
    """Return the reduction schemes to choose from, the simplest first. A scheme is one collective or a hierarchical
    reduction, with or without compression. ``machine``: the devices and links that the mesh is laid over.
    ``constraints``: the choices that the user fixed."""
    compression = constraints.grad_compression
    inside = 0 if machine.zero or not may_be_hierarchical(machine.topology, constraints) else ranks_inside(machine)
    stepped = [ReductionScheme(inside, compression)] if inside else []
    return stepped if stepped and constraints.hierarchical else [ReductionScheme(0, compression), *stepped]


def lost_by(machine: PlacedMesh, constraints: Constraints) -> Callable[[StateCost], float] | None:
    """Return a function from the cost of a parameter to the bytes of its compression residual (the rounding error of
    sent gradients that is kept for the next step). The function assumes the reduction scheme with the largest residual.
    Return ``None`` if no residual is kept.

    ``machine``: the devices and links that the mesh is laid over. ``constraints``: the choices that the user fixed.
    """
    compression = constraints.grad_compression
    if compression is None or not CODECS[compression].feedback:
        return None
    reducers = [reducer_of(machine, 0, how) for how in list_reduction_schemes(machine, constraints)]

    def lost(cost: StateCost) -> float:
        part = max(reducer.lost(cost.rest_axes) for reducer in reducers)
        if not part and cost.scatter_axes:  # a gradient that is only scattered is sent once
            return cost.gradient
        return part * cost.gradient_piece

    return lost


def may_be_hierarchical(topology: Topology, constraints: Constraints) -> bool:
    """Return whether the plan's program may reduce gradients hierarchically on ``topology``, by separate collectives
    inside nodes and between nodes. ``constraints``: the choices that the user fixed.
    """
    if constraints.hierarchical is None:
        return topology.single_ring and topology.num_nodes > 1
    return constraints.hierarchical


def ranks_inside(machine: PlacedMesh) -> int:
    """Return the number of consecutive ranks of ``dp`` that form the inner group of a hierarchical reduction: the
    largest number for which these ranks, with all their ``cp`` ranks, are on one node. Return 0 if an inner group would
    have one rank or all ranks, so that a hierarchical reduction is useless. ``machine``: the devices and links that the
    mesh is laid over."""
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
    """Seconds of the reduction of a stage's gradients.

    - ``total_s``: all reductions after the last backward. ``last_s``: the part of ``total_s`` for the last bucket
      (gradients that are reduced together), which no computation hides. ``by_axes``: mesh axes of the collectives ->
      their part of ``total_s``.
    - ``again_s``: the reduce-scatters of each further microbatch under ZeRO-2, which accumulates shards.
    - ``gather_s``: the gathers of updated parameters under ZeRO-1 and ZeRO-2, which overlap with the next forward.
    - ``coding_s``: compression and decompression, which overlap with nothing. ``coding_again_s``: compression and
      decompression for each further microbatch under ZeRO-2.
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
        """Return the seconds of this reduction of a stage's gradients as six numbers, in this order: all reductions;
        the part for the last bucket (gradients that are reduced together); gathers of parameters; reduce-scatters per
        further microbatch; compression; compression per further microbatch.
        """
        return self.total_s, self.last_s, self.gather_s, self.again_s, self.coding_s, self.coding_again_s

    def exposed(
        self, window_s: float, slowdown: float, forward_s: float = 0.0, overlap: bool = True, microbatches: int = 1
    ) -> float:
        """Return the seconds that this gradient reduction adds to a step, because computation does not hide them.

        Reductions overlap with a backward of ``window_s`` seconds, gathers of parameters with a forward of
        ``forward_s`` seconds, and the reduce-scatters of ZeRO-2 with the backwards of all ``microbatches`` but the
        last. While a collective and computation run at the same time, each takes ``slowdown`` times as long. The last
        bucket always starts after the backward, and reductions that take longer than the backward end after it. If
        ``overlap`` is false, all seconds are added.
        """
        return float(exposed_seconds(self.seconds, window_s, slowdown, forward_s, overlap, microbatches))


Seconds = float | NDArray[np.float64]


def exposed_seconds(
    works: Sequence[Seconds], window_s: Seconds, slowdown: float, forward_s: Seconds, overlap: bool, microbatches: int
) -> Any:
    """Return the seconds that gradient reductions add to a step, for many reductions at once. The result has the shape
    of the arrays.

    ``works``: six numbers or arrays of seconds, in this order: all reductions, the last bucket (gradients that one
    collective reduces), gathers of parameters, reduce-scatters per further microbatch, compression, compression per
    further microbatch. ``window_s``: seconds of computation that can hide reductions. ``forward_s``: seconds of the
    forward, which hides gathers. ``overlap``: whether computation and collectives run at the same time. ``slowdown``:
    factor on the time of both while both run. ``microbatches``: number of microbatches in a step.
    """
    total, last, gather, again, coding, coding_again = works
    coding = coding + (microbatches - 1) * coding_again
    if not overlap:
        return total + gather + (microbatches - 1) * again + coding

    def beside(seconds: Seconds, other: Seconds) -> Any:
        return (slowdown - 1) * np.minimum(seconds, other) + np.maximum(0.0, seconds - other)

    behind = beside(np.maximum(0.0, total - last), window_s) + last
    return beside(gather, forward_s) + (microbatches - 1) * beside(again, window_s) + behind + coding


def by_owner(work: GradientReduction, tensors: Mapping[tuple[str, ...], int], reducer: Reducer) -> GradientReduction:
    """Return a copy of ``work``, the seconds of a stage's gradient reduction, for a ZeRO-1 that keeps each parameter
    whole on one rank, its owner, instead of sharding it. The copy has more latency.

    Gradients are reduced to their owners, and each owner broadcasts its updated parameters. The number of bytes is the
    same as with sharding, but each owner needs a message of its own (InternEvo, ``hybrid_zero_optim.py``:
    ``dist.reduce`` and ``dist.broadcast``). ``tensors``: mesh axes over which parameters are distributed -> number of
    parameters. ``reducer``: computes the seconds of single collectives.
    """
    groups = [(reducer.group(axes), count) for axes, count in tensors.items()]
    starts = sum(min(group.size, count) * group.one_way_start for group, count in groups)
    return replace(work, total_s=work.total_s + starts, gather_s=work.gather_s + starts)


CollectiveKey = tuple[str, Axes, int, Axes]
"""A kind of collective: its operation, its axes, the ZeRO stage, and the axes of an earlier scatter."""

Sizes = dict[CollectiveKey, float]
"""Bytes that each kind of collective moves."""


def compute_gradient_reduction(
    costs: Collection[StateCost], reducer: Reducer, overlap: bool = True
) -> GradientReduction:
    """Return the seconds of reducing the gradients of parameters with the given ``costs``. Gradients that are reduced
    over the same mesh axes are put into common buckets (sets that one collective reduces). ``reducer``: computes the
    seconds of single collectives.

    If ``overlap``, the buckets are small, so that the first ones are sent during the backward; otherwise each
    combination of axes has one bucket. Under ZeRO-1 and ZeRO-2 the reduction is a reduce-scatter and, in the next step,
    an all-gather. Under ZeRO-3 both are part of the block calls (such as layers) and not counted here. The shards that
    a reduce-scatter leaves are all-reduced over the remaining axes (replicas, ``tp``).
    """
    sizes: Sizes = {}
    last_level: dict[tuple[str, ...], bool] = {}
    for cost in costs:
        for key, size in reduced_sizes(cost).items():
            sizes[key] = sizes.get(key, 0.0) + size
        last_level |= last_levels(cost)
    return reduction_of(sizes, last_level, reducer, overlap)


def reduced_sizes(cost: StateCost) -> Sizes:
    """Return the bytes that the gradient reduction moves for one parameter or buffer, by collective: (name of the
    collective, its mesh axes, ZeRO stage, axes of an earlier reduce-scatter) -> bytes. Gathers of the updated parameter
    are included. The dict is empty if there is no gradient. ``cost``: the cost of the parameter or buffer."""
    sizes: Sizes = {}
    if cost.gradient and cost.scatter_axes and cost.stage < 3:
        sizes["reduce_scatter", cost.scatter_axes, cost.stage, ()] = cost.gradient
        sizes["all_gather", cost.scatter_axes, cost.stage, ()] = cost.parameter
    if cost.gradient and cost.rest_axes:
        sizes["all_reduce", cost.rest_axes, 0, cost.scatter_axes] = cost.gradient_piece
    return sizes


def last_levels(cost: StateCost) -> dict[tuple[str, ...], bool]:
    """Return a dict with one entry: the mesh axes of the reduce-scatter of a parameter's gradient -> whether no other
    data-parallel reduction of the gradient follows. The dict is empty if ZeRO does not scatter the gradient at the end
    of a step, as under ZeRO-3. ``cost``: the cost of the parameter."""
    scattered = cost.gradient and cost.scatter_axes and cost.stage < 3
    return {cost.scatter_axes: not any(axis != "tp" for axis in cost.rest_axes)} if scattered else {}


def reduction_of(
    sizes: Sizes, last_level: Mapping[tuple[str, ...], bool], reducer: Reducer, overlap: bool = True
) -> GradientReduction:
    """Return the seconds of reducing gradients: of all reductions, of the part that no computation hides, of gathers of
    parameters, and of compression.

    ``sizes``: the bytes that each collective moves; a key is (name of the collective, its mesh axes, ZeRO stage, axes
    of an earlier reduce-scatter). ``last_level``: axes of a reduce-scatter -> whether no other data-parallel reduction
    follows. ``overlap``: whether gradients are divided into small buckets (gradients that one collective reduces), so
    that most of them are reduced during the backward. ``reducer``: computes the seconds of single collectives.
    """
    by_axes: dict[tuple[str, ...], float] = {}
    last = gathered = again = coding = coding_again = 0.0
    for (op, axes, stage, before), size in sizes.items():
        group = reducer.group(axes)
        # a bucket of shards has the shards of one scattered bucket
        filled_by = reducer.group(before).size if before else 1
        limit = bucket_limit(filled_by * group.size)
        count = math.ceil(size * filled_by / limit) if overlap else 1
        if op == "all_gather":  # gathers of the parameters, in the next step
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
