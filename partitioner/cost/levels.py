"""The ways of reducing gradients that there are on a machine.

Whether several levels are taken is decided here. The libraries for GPUs reduce over several nodes level by level
themselves, in rings and trees over all network cards: there, levels of the program's own are for those who ask. Where
an all-reduce is one ring (Gloo's), they are taken where they take less time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from partitioner.constraints import Constraints
from partitioner.cost.machine import Machine
from partitioner.cost.reducer import Reducer, coding_time
from partitioner.cost.states import StateCost
from partitioner.emit_levels import AT_ONCE, Reducing
from partitioner.topology.groups import Group, placed
from partitioner.topology.model import Topology
from partitioner.topology.parts import DeviceType
from runtime.compression import CODECS
from runtime.meshes import AXES


def reducer_of(machine: Machine, stage: int, how: Reducing) -> Reducer:
    """The reducer of a stage of ``machine``."""
    split = replace(machine, dp_shard=how.inside) if how.inside else machine
    device = max(machine.devices_of(stage), key=lambda kind: coding_time("bf16", 1.0, kind))

    @cache
    def group(axes: tuple[str, ...]) -> Group:
        return split.stage_groups(*axes)[stage]

    return Reducer(group, how, device, 8 if machine.precision == "fp64" else 4)


def data_reducers(machines: Sequence[Machine], zero: int, constraints: Constraints) -> list[Reducer]:
    """The reducers of one stage on any of ``machines``; ``dp`` stands for all ranks with the same weights there."""
    laid = [replace(machine, zero=zero) for machine in machines]
    return [_over_data(reducer_of(m, 0, how)) for m in laid for how in ways(m, constraints)]


def _over_data(reducer: Reducer) -> Reducer:
    group = reducer.group
    return replace(reducer, group=lambda axes: group(axes if axes == ("dp_replicate",) else (*axes, "cp")))


def best_reducers(topology: Topology, group: Group, device: DeviceType, constraints: Constraints) -> list[Reducer]:
    """The reducer over ``group``, which none is better than; none, where a part of it may be in nodes, or what is sent
    less."""
    if constraints.grad_compression is not None or may_be_hierarchical(topology, constraints):
        return []
    return [Reducer(lambda axes: group, AT_ONCE, device)]


def ways(machine: Machine, constraints: Constraints) -> list[Reducing]:
    """The ways of reducing gradients to choose from, the plainest first."""
    compression = constraints.grad_compression
    inside = 0 if machine.zero or not may_be_hierarchical(machine.topology, constraints) else ranks_inside(machine)
    stepped = [Reducing(inside, compression)] if inside else []
    return stepped if stepped and constraints.hierarchical else [Reducing(0, compression), *stepped]


def lost_by(machine: Machine, constraints: Constraints) -> Callable[[StateCost], float] | None:
    """What a state has kept of what sending its gradient loses, in the way in which it is most; ``None`` where nothing
    is kept."""
    compression = constraints.grad_compression
    if compression is None or not CODECS[compression].feedback:
        return None
    reducers = [reducer_of(machine, 0, how) for how in ways(machine, constraints)]

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


def ranks_inside(machine: Machine) -> int:
    """The most neighbours along ``dp`` that are on one node, with their ``cp``; 0 where that is one rank, or all."""
    sizes = [machine.mesh.get(axis, 1) for axis in AXES]
    nodes = machine.topology.node_of[placed(machine.topology, machine.mesh, machine.devices)].reshape(sizes)
    dp, cp = sizes[1], sizes[2]
    for ranks in (n for n in range(dp, 0, -1) if dp % n == 0):
        parts = nodes.reshape(sizes[0], dp // ranks, ranks, cp, sizes[3])
        if np.array_equal(parts, np.broadcast_to(parts[:, :, :1, :1], parts.shape)):
            return 0 if ranks == dp or ranks * cp == 1 else ranks
    return 0
