"""Upper bounds on what a placement can offer: the best devices, links and groups that the ranks of a mesh could
have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.cost.compute import matmul_efficiency, memory_efficiency
from partitioner.cost.machine import HERE, Machine
from partitioner.topology.groups import num_communicators
from partitioner.topology.hosts import BOUNDLESS, HostShare
from partitioner.topology.model import Topology
from partitioner.topology.parts import DeviceType, Link


@dataclass(frozen=True)
class Relaxed:
    """A machine that no placement of ``mesh`` beats, with the best capacity and links of each stage."""

    mesh: Mapping[str, int]
    capacity: tuple[int, ...]
    links: tuple[Link, ...]

    def host(self, stage: int) -> HostShare:
        """A host without limits, for every stage."""
        return BOUNDLESS

    def link(self, stage: int, other: int) -> Link:
        """The best link between the ranks of two stages; within one stage nothing is sent."""
        return HERE if stage == other else _best_link(self.links)


def best_type(types: Sequence[DeviceType]) -> DeviceType:
    """A device type on which no kernel takes longer than on any of ``types``."""
    if all(kind == types[0] for kind in types):
        return types[0]
    precisions = {precision for kind in types for precision in kind.peak}
    kernels = {name for kind in types for name in kind.memory_efficiency} | {"default"}
    sizes = sorted({size for kind in types for size, _ in kind.matmul_efficiency})
    return types[0].model_copy(
        update={
            "peak": {p: max(kind.peak_of(p) * kind.clock for kind in types) for p in precisions},
            "power_limit": None,
            "memory_bandwidth": max(kind.memory_bandwidth for kind in types),
            "launch": min(kind.launch for kind in types),
            "dispatch": min(kind.dispatch for kind in types),
            "memory_sizes": (),
            "attention_lengths": (),
            "attention_widths": (),
            "matmul_efficiency": tuple((s, max(matmul_efficiency(s, kind) for kind in types)) for s in sizes),
            "unaligned": max(kind.unaligned for kind in types),
            "attention_efficiency": max(kind.attention_efficiency for kind in types),
            "memory_efficiency": {name: max(memory_efficiency(name, kind) for kind in types) for name in kernels},
            "overlap_slowdown": min(kind.overlap_slowdown for kind in types),
        }
    )


def relaxed(topology: Topology, mesh: Mapping[str, int], candidates: Sequence[Machine] | None) -> Relaxed:
    """The best capacity of each stage and the best link of each boundary over ``candidates``.

    ``candidates`` is ``None`` if they are not all placements that count. Then the bound covers every placement: no
    stage has a smallest device larger than the ``n``-th largest device of the cluster, with ``n`` devices per stage.
    """
    stages = mesh.get("pp", 1)
    if candidates is not None:
        capacity = tuple(max(of_stage) for of_stage in zip(*(m.capacity for m in candidates), strict=True))
        boundaries = zip(*(m.links for m in candidates), strict=True)
        return Relaxed(mesh, capacity, tuple(_best_link(boundary) for boundary in boundaries))
    per_stage = topology.num_devices // stages
    largest = np.sort(topology.usable)[::-1]
    every = [level.shared(most_share(topology)) for level in topology.levels]
    links = [Link(name=level.name, bandwidth=level.bandwidth, latency=level.latency, level=-1) for level in every]
    for name, matrix in topology.pattern_kinds:
        latency = topology.patterns[name].latency
        links.append(Link(name=name, bandwidth=float(matrix.max()), latency=latency, level=-1))
    links += topology.own_links.values()
    least = min(topology.types[kind].communicator for kind, _ in topology.paces[0])
    room = max(0, int(largest[per_stage - 1]) - num_communicators(mesh) * int(least))
    return Relaxed(mesh, (room,) * stages, (_best_link(links),) * (stages - 1))


def most_share(topology: Topology) -> float:
    """Greatest share of the bandwidth between nodes that any device has; at least 1."""
    return max(1.0, float(topology.network_share.max()))


def _best_link(links: Sequence[Link]) -> Link:
    bandwidth, latency = max(link.bandwidth for link in links), min(link.latency for link in links)
    return Link(name="best", bandwidth=bandwidth, latency=latency, level=-1)
