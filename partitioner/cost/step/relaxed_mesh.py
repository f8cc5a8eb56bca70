"""Best-case mesh for lower bounds: the best devices, links and groups that any placement of the ranks could have.

A group of ranks is described by how many parts of the cluster it spans at each depth of the links (how many nodes, how
many racks, ...), and by the number of its devices in the part that has the fewest. The code calls all links at one
depth, such as those inside nodes, a storey. All combinations that fit the cluster are enumerated, each with the best
links of each depth. For each collective, the shortest latency and the highest bandwidth of all combinations are
combined into one imaginary group. No collective over a real group of as many devices is faster than over this group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from partitioner.cost.call.collectives import collective_time, moved_share
from partitioner.cost.call.roofline import matmul_efficiency, memory_efficiency
from partitioner.cost.step.placed_mesh import HERE, PlacedMesh
from partitioner.topology.fabric import Floats, Ints, Storey, spans_nodes
from partitioner.topology.group import Group, Tier, select_slowest_group
from partitioner.topology.groups import num_communicators
from partitioner.topology.hardware import COLLECTIVES, DeviceType, Hop, Level, Link
from partitioner.topology.hosts import BOUNDLESS, HostShare
from partitioner.topology.topology import Topology


@dataclass(frozen=True)
class BestCaseMesh:
    """A mesh with the best memory capacity and the best links that any placement of its ranks has, for lower bounds.

    ``mesh``: size of each axis. ``capacity``: usable bytes of a rank, for each stage. ``links``: the link from each
    stage to the next.
    """

    mesh: Mapping[str, int]
    capacity: tuple[int, ...]
    links: tuple[Link, ...]

    def host(self, stage: int) -> HostShare:
        """Return a host without limits on memory and bandwidth, for any pipeline stage (``stage``: its index)."""
        return BOUNDLESS

    def link(self, stage: int, other: int) -> Link:
        """Return the best link between the ranks of two pipeline stages, given by their indices ``stage`` and
        ``other``. If the indices are equal, nothing is sent, and the result is a link that takes no time."""
        return HERE if stage == other else _best_link(self.links)


def best_type(types: Sequence[DeviceType]) -> DeviceType:
    """Return an imaginary device type on which no kernel takes longer than on any of ``types``, for lower bounds."""
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


def build_best_case_mesh(
    topology: Topology, mesh: Mapping[str, int], candidates: Sequence[PlacedMesh] | None
) -> BestCaseMesh:
    """Return a mesh that has, over all placements of its ranks on ``topology``, the best memory capacity of each stage
    and the best link between neighbouring stages. The step time of a plan on this mesh is a lower bound.

    ``mesh``: axis -> number of ranks. ``candidates``: all placements that the search may choose; ``None`` if they are
    not enumerated. In that case, the link is the best of the cluster, and the capacity follows from a count: if a stage
    has ``n`` devices, its smallest device has at most the memory of the ``n``-th largest device of the cluster.
    """
    stages = mesh.get("pp", 1)
    if candidates is not None:
        capacity = tuple(max(of_stage) for of_stage in zip(*(m.capacity for m in candidates), strict=True))
        boundaries = zip(*(m.links for m in candidates), strict=True)
        return BestCaseMesh(mesh, capacity, tuple(_best_link(boundary) for boundary in boundaries))
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
    return BestCaseMesh(mesh, (room,) * stages, (_best_link(links),) * (stages - 1))


def most_share(topology: Topology) -> float:
    """Return the largest bandwidth that any device of ``topology`` has to other nodes, as a multiple of the bandwidth
    of one network card; at least 1.
    """
    return max(1.0, float(topology.network_share.max()))


def _best_link(links: Sequence[Link]) -> Link:
    bandwidth, latency = max(link.bandwidth for link in links), min(link.latency for link in links)
    return Link(name="best", bandwidth=bandwidth, latency=latency, level=-1)


_LARGE = 1e15  # bytes, to measure the slope of a collective's time

_ROUNDING = 1e-9
_MOST_FORMS = 2000  # forms of a group to enumerate; beyond that a bound from all links is used
_SINGLY = 8  # sizes of the smallest part of a group up to which every number is a range of its own
_FEW = 100  # numbers of parts up to which several ranges are enumerated
_Range = tuple[int, int]


def best_group(topology: Topology, size: int, everywhere: bool = False) -> Group:
    """Return an imaginary group of ``size`` ranks for lower bounds: no collective over any ``size`` devices of
    ``topology`` is faster than over this group.

    ``everywhere``: whether the bound is needed only for the slowest of several groups that together contain all
    devices, like the groups of a mesh axis. The bound is then higher, because some of these groups may have to span two
    nodes.
    """
    if size == 1:
        return Group(1)
    hops = _compute_best_hops(topology, size)
    return select_slowest_group(replace(group, hops=hops) for group in _best_groups(topology, size, everywhere))


def _best_groups(topology: Topology, size: int, everywhere: bool) -> list[Group]:
    """Return imaginary groups of ``size`` ranks for a lower bound: no collective over ``size`` devices of ``topology``
    takes less time than over the slowest of these groups. The returned groups have no data about messages between
    single ranks.

    ``everywhere``: whether the real groups together contain all devices, and the bound is needed only for the slowest
    of them.
    """
    storeys = topology.storeys
    joins_all = bool(storeys) and len(np.unique(storeys[-1].joined)) == 1
    if topology.own_links or not joins_all:
        return [_over_all_links(topology, size)]
    shares = np.sort(topology.network_share)
    asked = [(float(shares[0 if everywhere else -size]), False)]
    if everywhere:  # the slowest is the group of the slowest device, or one in more parts than necessary
        asked += [(float(shares[-size]), True)] * any(_must_part(storey, size) for storey in storeys)
    found: list[Group] = []
    for farthest, parted in asked:
        made: list[Group] = []
        for group in _enumerate_groups(topology, storeys, size, farthest, parted):
            made.append(group)
            if len(made) > _MOST_FORMS:
                return [_over_all_links(topology, size)]
        found.append(_least_of(made, size))
    return found


def _compute_best_hops(topology: Topology, size: int) -> tuple[Hop, ...]:
    """Return one link for each distance 1, 2, ... ``size // 2`` between two ranks of a ring of ``size`` devices. No
    ring of that many devices on ``topology`` has a faster link for messages over that distance.

    Messages over the distance ``d`` connect the devices in cycles of ``size / gcd(size, d)``. If a cycle does not fit
    into one part of a level of links (such as a node), it has to use a link of an outer level, or a direct link.
    """
    own = [Hop(link.latency, link.bandwidth) for link in topology.own_links.values()]
    patterns = [topology.patterns[name] for name, _ in topology.pattern_kinds]
    direct = [Hop(p.latency, max(link.bandwidth for link in p.links)) for p in patterns]
    most = most_share(topology)
    levels = [
        Hop(level.latency, level.bandwidth / level.oversubscription * (most if spans_nodes(level) else 1.0))
        for level in topology.levels
    ]
    largest = [int(np.unique(storey.joined, return_counts=True)[1].max()) for storey in topology.storeys]
    by_cycle: dict[int, Hop] = {}
    for places in range(1, size // 2 + 1):
        cycle = size // math.gcd(size, places)
        if cycle not in by_cycle:
            fits = [storey for storey, n in zip(topology.storeys, largest, strict=True) if n >= cycle]
            numbers = {n for storey in fits for n in storey.levels}
            within = any(not storey.levels for storey in fits) or not topology.storeys
            found = own + (direct if within else []) + [levels[n] for n in sorted(numbers)]
            found = found or own + direct + levels  # routed over other devices: no faster than the best link
            by_cycle[cycle] = Hop(min(hop.latency for hop in found), max(hop.bandwidth for hop in found))
    return tuple(by_cycle[size // math.gcd(size, places)] for places in range(1, size // 2 + 1))


def no_slower(group: Group, other: Group) -> bool:
    """Return whether no collective and no message of any size takes longer over ``group`` than over ``other``, up to
    rounding."""
    # pairs of groups; a collective time is a start plus a slope
    lines = [(own, least) for own in group.every for least in other.every]
    hops = [pair for own, least in lines if own.hops and least.hops for pair in zip(own.hops, least.hops, strict=True)]
    if any(own.time(n) > least.time(n) * (1 + _ROUNDING) for own, least in hops for n in (1.0, _LARGE)):
        return False
    return all(
        collective_time(op, num_bytes, own) <= collective_time(op, num_bytes, least) * (1 + _ROUNDING)
        for own, least in lines
        for op in COLLECTIVES
        for num_bytes in (0.0, _LARGE)
    )


def _least_of(groups: Sequence[Group], size: int) -> Group:
    """Return a group of ``size`` ranks that has, for every collective, the shortest latency and the highest bandwidth
    of any of ``groups``."""
    tables: dict[str, Any] = {}
    for op in COLLECTIVES:
        starts = [collective_time(op, 0.0, group) for group in groups]
        large = [collective_time(op, _LARGE, group) - start for group, start in zip(groups, starts, strict=True)]
        tables[op] = ((size, min(starts), moved_share(op, size) * _LARGE / min(large)),)
    widest = max(bandwidth for ((_, _, bandwidth),) in tables.values())
    return Group(size, (Tier(Level.model_construct(name="best", bandwidth=widest, **tables), size, 1),))


def _enumerate_groups(
    topology: Topology, storeys: Sequence[Storey], size: int, farthest: float, parted: bool
) -> Iterator[Group]:
    """Yield an imaginary group of ranks for each way in which ``size`` devices of ``topology`` can be distributed over
    the levels of links, such as all in one node, or divided between two.

    ``storeys``: the levels, innermost first; each joins devices into parts, such as nodes. ``farthest``: at least one
    device of the group has at most this fraction of the bandwidth between nodes. ``parted``: whether the group spans at
    least two parts on each level whose parts cannot be divided into groups of ``size`` devices without remainder.

    The devices of the group in one part divide the part's bandwidth among each other. The number of devices in the
    smallest part is therefore chosen, too: there is one group for each range of this number.
    """
    alone = np.arange(topology.num_devices)
    parts_below = [alone, *(storey.joined for storey in storeys)]
    fewest = [max(_compute_fewest_parts(storey, size), 1 + (parted and _must_part(storey, size))) for storey in storeys]
    most = [len(np.unique(storey.joined)) for storey in storeys]
    largest = [int(np.unique(storey.joined, return_counts=True)[1].max()) for storey in storeys]
    ways = [_most_ways(*pair) for pair in pairwise(parts_below)]

    alike = bool((topology.network_share == topology.network_share[0]).all())

    def further(number: int, parts: int, below: _Range, tiers: tuple[Tier, ...], ring: float) -> Iterator[Group]:
        """Yield the groups for a given choice on the inner levels of links, one for every choice on the outer levels.
        ``number``: index of the next level to choose. ``parts``: number of parts (such as nodes) that the group has on
        the level below. ``below``: least and greatest number of devices in the smallest of these parts. ``tiers``: the
        levels chosen so far. ``ring``: bandwidth of a ring over the chosen levels, in bytes/s."""
        if number == len(storeys):
            if parts == 1:
                yield Group(size, tiers, ring=ring)
            return
        storey = storeys[number]
        least = max(fewest[number], math.ceil(parts / ways[number]))
        fine = most[number] - least <= _FEW
        for count in range(least, min(parts, most[number]) + 1):
            if count == parts:
                yield from further(number + 1, parts, below, tiers, ring)
                continue
            for links in _list_storey_links(topology, storey):
                share = _most_share(storey.shares, parts_below[number], farthest, below[0])
                tier = Tier(links.shared(share), math.ceil(parts / count), below[1])
                slowest = min(ring, links.bandwidth * links.efficiency) if topology.single_ring and tiers else ring
                smallest = (
                    [(size // count,) * 2] if alike else _enumerate_part_sizes(size, count, largest[number], fine)
                )
                for each in smallest:
                    yield from further(number + 1, count, each, (*tiers, tier), slowest)

    yield from further(0, size, (1, 1), (), math.inf)


def _enumerate_part_sizes(size: int, count: int, largest: int, fine: bool) -> Iterator[_Range]:
    """Yield ranges (least, greatest) of the number of devices in the smallest part, if ``size`` devices are divided
    into ``count`` parts of at most ``largest`` devices. Together the ranges contain every possible number. ``fine``:
    whether to yield several short ranges, for a tighter bound, instead of one. Ranges of larger numbers are longer."""
    low, most = max(1, size - (count - 1) * largest), size // count
    while low <= most:
        high = min(most, low if low <= _SINGLY else 2 * low) if fine else most
        yield low, high
        low = high + 1


def _most_share(shares: Floats | None, parts: Ints, farthest: float, devices: int) -> float:
    """Return an upper bound on the bandwidth that each device of a group has on a level of links, as a fraction of the
    level's bandwidth. ``devices`` devices of the group are in one part of the cluster (such as a node) and divide the
    part's bandwidth among each other. One of them is slow: its fraction is at most ``farthest``.

    ``shares``: bandwidth of each device of the cluster as a fraction of the level's bandwidth; ``None`` if all
    fractions are 1. ``parts``: index of the part of each device.
    """
    if shares is None:
        return 1.0
    of_part = np.bincount(parts, weights=shares)
    far = np.unique(parts[shares <= farthest])
    return min(float(shares.max()), float(of_part[far].max()) / devices)


def _compute_fewest_parts(storey: Storey, size: int) -> int:
    """Return the least number of parts of the cluster (such as nodes) that together have ``size`` devices. ``storey``:
    the level of links that joins devices into these parts."""
    sizes = np.sort(np.unique(storey.joined, return_counts=True)[1])[::-1]
    return int(np.searchsorted(np.cumsum(sizes), size)) + 1


def _must_part(storey: Storey, size: int) -> bool:
    """Return whether every division of all devices into groups of ``size`` has a group that spans several parts of the
    cluster (such as nodes), because ``size`` does not divide the numbers of devices in the parts. ``storey``: the level
    of links that joins devices into these parts."""
    sizes = np.unique(storey.joined, return_counts=True)[1]
    return bool((sizes // size).sum() * size < sizes.sum())


def _most_ways(below: Ints, joined: Ints) -> int:
    """Return the greatest number of inner parts (such as devices) in one outer part (such as a node). ``below``,
    ``joined``: for each device, the index of its inner part and of its outer part.
    """
    parts = np.unique(np.stack([joined, below]), axis=1)
    return int(np.unique(parts[0], return_counts=True)[1].max())


def _list_storey_links(topology: Topology, storey: Storey) -> list[Level]:
    """Return the distinct kinds of links that a group of ranks may use at one depth of the cluster ``topology``.
    ``storey``: all links at this depth, such as those inside nodes."""
    if storey.levels:
        return list(dict.fromkeys(topology.levels[number] for number in storey.levels))
    # direct links inside nodes: at most the bandwidth of all links of a device, or of a level inside the node
    rates = [float(matrix.sum(axis=1).max()) for _, matrix in topology.pattern_kinds]
    inside = [level for level in topology.levels if not spans_nodes(level)]
    rates += [rate for level in inside for rate in _list_level_rates(level)]
    return [Level.model_construct(name="direct", bandwidth=max(rates), latency=0.0)]


def _list_level_rates(level: Level) -> Iterator[float]:
    """Yield the bandwidth of the links of ``level`` in bytes/s, and then the bandwidths that were measured for
    collectives over them.
    """
    yield level.bandwidth
    for op in COLLECTIVES:
        yield from (rate for _, _, rate in getattr(level, op))


def _over_all_links(topology: Topology, size: int) -> Group:
    """Return a group of ``size`` ranks in which no collective takes longer than over any ``size`` devices of
    ``topology``. The group has no latency, and every device sends and receives over all of its links at once. It gives
    a weak lower bound, for topologies on which the possible groups are not enumerated, such as those with links between
    single devices."""
    every = [level.shared(most_share(topology)) for level in topology.levels]
    rates = [0.0, *(rate for level in every for rate in _list_level_rates(level))]
    inside = 2 * max([*rates, *(float(matrix.sum(axis=1).max()) for _, matrix in topology.pattern_kinds)])
    of_device: dict[int, float] = {}
    for pair, link in topology.own_links.items():
        for i in pair:
            of_device[i] = of_device.get(i, 0.0) + link.bandwidth
    rate = max([inside, *of_device.values()])
    return Group(size, (Tier(Level.model_construct(name="best", bandwidth=rate, latency=0.0), size, 1),))
