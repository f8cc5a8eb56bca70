"""Which links the ranks of a mesh talk over.

Ranks are numbered along the mesh's axes, nested in the order of ``runtime.program.AXES``, outermost first; a placement
says on which device each sits (without one: rank ``i`` on device ``i``). All groups of an axis work at the same time,
and the slowest one is what a stage waits for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from partitioner.errors import TopologyError
from partitioner.topology.fabric import Storey, inside_levels, least_cut, least_share
from partitioner.topology.model import Topology
from partitioner.topology.pairs import pair_links
from partitioner.topology.parts import Level, Link, Measured
from passes.hashing import hashed_once
from runtime.meshes import AXES, expert_mesh, num_ranks

_POST_S = 1e-6  # to post one send and one receive
_RINGS_FOUND = 64  # devices: of larger groups rings are taken to pass by slow links of single pairs
Devices = NDArray[np.int64] | Sequence[int] | None  # by rank; None: each rank on its namesake


@dataclass(frozen=True)
class Tier:
    """One level of links inside a group: ``ways`` parts of ``below`` ranks each talk over ``level``."""

    level: Level
    ways: int
    below: int


@hashed_once
@dataclass(frozen=True)
class Group:
    """Ranks that enter collectives together. ``tiers`` from the inside out; ``cap``: bytes/s of a slow link inside;
    ``ring``: of the slowest link of one ring, where an all-reduce has no more than one."""

    size: int
    tiers: tuple[Tier, ...] = ()
    cap: float = math.inf
    ring: float = math.inf

    @cached_property
    def bus_bandwidth(self) -> float:
        """Bytes/s at which a ring moves data through every rank.

        Measured where the group stays inside one level that has measurements; else the least over the levels, where
        each of the ranks of a part brings its own outward link: ``min(intra g / (g - 1), nic g)`` (NCCL's ring).
        """
        if self.size == 1:
            return math.inf
        first = self.tiers[0]
        if len(self.tiers) == 1:
            return min(self.cap, _measured(first.level, self.size)[1])
        inner = _measured(first.level, first.ways)[1] * first.ways / max(1, first.ways - 1)
        outer = [t.level.bandwidth * t.level.efficiency * t.below for t in self.tiers[1:]]
        return min(self.cap, inner, *outer)

    @property
    def all_reduce_bandwidth(self) -> float:
        """Bytes/s at which an all-reduce moves data through every rank."""
        return min(self.bus_bandwidth, self.ring)

    @cached_property
    def all_reduce_start(self) -> float:
        """Seconds of an all-reduce of nothing: measured, else the shorter of ring and tree."""
        if self.size == 1:
            return 0.0
        if len(self.tiers) == 1 and self.tiers[0].level.all_reduce:
            return _measured(self.tiers[0].level, self.size)[0]
        return self.base + min(self._ring_steps(2), self._tree_steps())

    @cached_property
    def one_way_start(self) -> float:
        """Seconds of an all-gather or a reduce-scatter of nothing: half of an all-reduce's steps."""
        if self.size == 1:
            return 0.0
        if len(self.tiers) == 1 and self.tiers[0].level.all_reduce:
            return max(self.base, (self.base + self.all_reduce_start) / 2)
        return self.base + self._ring_steps(1)

    def measured(self, op: str) -> tuple[float, float] | None:
        """(start-up seconds, bus bandwidth) of a collective that was measured on the one level that the group spans."""
        table = getattr(self.tiers[0].level, op, ()) if len(self.tiers) == 1 else ()
        if not table:
            return None
        start, bandwidth = _interpolated(table, self.size, self.tiers[0].level.step_s)
        return start, min(self.cap, bandwidth)

    @property
    def exchange_start(self) -> float:
        """Seconds of an all-to-all of nothing: one step of every level, and a message to each of the others."""
        if self.size == 1:
            return 0.0
        return self.base + sum(t.level.step_s for t in self.tiers) + (self.size - 1) * _POST_S

    @property
    def base(self) -> float:
        return max((t.level.base for t in self.tiers), default=0.0)

    def _ring_steps(self, rounds: int) -> float:
        """``(steps - outer steps) intra + outer steps net``, over any number of levels (NCCL's tuning model)."""
        seconds, counted = 0.0, 0
        for k in range(len(self.tiers) - 1, 0, -1):
            parts = math.prod(t.ways for t in self.tiers[k:])
            steps = max(0, rounds * parts - counted)
            seconds += steps * self.tiers[k].level.step_s
            counted += steps
        inner = max(0, rounds * (self.size - 1) - counted)
        return seconds + inner * self.tiers[0].level.step_s

    def _tree_steps(self) -> float:
        """``2 ((ranks inside - 1) intra + log2(parts) net)``: a chain inside, a tree between."""
        inside, *outside = self.tiers
        seconds = (inside.ways - 1) * inside.level.step_s
        seconds += sum(math.log2(t.ways) * t.level.step_s for t in outside)
        return 2 * seconds


def _measured(level: Level, size: int) -> tuple[float, float]:
    """(start-up seconds, bus bandwidth) of an all-reduce over ``size`` ranks inside one group of ``level``."""
    if not level.all_reduce:
        return level.base + 2 * (size - 1) * level.step_s, level.bandwidth * level.efficiency
    return _interpolated(level.all_reduce, size, 2 * level.step_s)


def _interpolated(table: Measured, size: int, step_s: float) -> tuple[float, float]:
    """(start-up seconds, bus bandwidth) at ``size`` ranks; above the largest measured, ``step_s`` more per rank."""
    sizes = [n for n, _, _ in table]
    start = np.interp(size, sizes, [a for _, a, _ in table]) + max(0, size - sizes[-1]) * step_s
    return float(start), float(np.interp(size, sizes, [b for _, _, b in table]))


def rank_grid(mesh: Mapping[str, int], *axes: str) -> NDArray[np.int64]:
    """The ranks of every group over ``axes``, shape ``[num_groups, group_size]``, each in order of rank."""
    sizes = [mesh.get(axis, 1) for axis in AXES]
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    inner = [AXES.index(axis) for axis in AXES if axis in axes]
    grid = np.moveaxis(grid, inner, range(len(AXES) - len(inner), len(AXES)))
    return np.ascontiguousarray(grid).reshape(-1, math.prod(sizes[i] for i in inner))


def expert_grid(mesh: Mapping[str, int], etp: int = 0) -> NDArray[np.int64]:
    """All groups of ``ep``, one per row; ``etp``: ranks that share one expert (0: ``tp``)."""
    sizes = expert_mesh(mesh, etp)
    return np.arange(num_ranks(mesh)).reshape(-1, sizes["ep"], sizes["etp"]).transpose(0, 2, 1).reshape(-1, sizes["ep"])


def placed(topology: Topology, mesh: Mapping[str, int], devices: Devices = None) -> NDArray[np.int64]:
    """The device of every rank: ``devices``, or each rank on its namesake.

    Raises :class:`TopologyError` where the mesh has more ranks than the topology has devices.
    """
    world = num_ranks(mesh)
    if world > topology.num_devices:
        raise TopologyError(
            f"a mesh of {world} ranks on the topology {topology.name!r} of {topology.num_devices} devices; "
            "expected at most one rank per device"
        )
    return np.arange(world) if devices is None else np.asarray(devices, dtype=np.int64)


def axis_groups(topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None) -> list[Group]:
    """The different kinds of groups that the ranks of ``axes`` form, each once; for ``devices`` see :func:`placed`."""
    return row_groups(topology, placed(topology, mesh, devices)[rank_grid(mesh, *axes)])


def row_groups(topology: Topology, rows: NDArray[np.int64]) -> list[Group]:
    """The different kinds of groups among ``rows`` of devices, shape ``[num_groups, group_size]``, each once."""
    return list(dict.fromkeys(_kinds_of(topology, rows)[1]))


def axis_group(topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None) -> Group:
    """The slowest group that the ranks of ``axes`` form; see :func:`axis_groups`."""
    return _slowest(axis_groups(topology, mesh, *axes, devices=devices))


def stage_groups(topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None) -> tuple[Group, ...]:
    """For each pipeline stage the slowest of the groups that its ranks form over ``axes``, ``pp`` not among them."""
    assert "pp" not in axes, axes
    rows = placed(topology, mesh, devices)[rank_grid(mesh, *axes)]
    kinds, groups = _kinds_of(topology, rows)
    # groups of one stage follow each other, since pp is the outermost axis
    if len(groups) == 1:
        return (groups[0],) * mesh.get("pp", 1)
    return tuple(_slowest([groups[k] for k in np.unique(own)]) for own in kinds.reshape(mesh.get("pp", 1), -1))


def _slowest(groups: Iterable[Group]) -> Group:
    return min(groups, key=lambda g: (g.bus_bandwidth, -g.all_reduce_start))


def _kinds_of(topology: Topology, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[Group]]:
    """For each row of devices the number of its kind, and a group of each kind."""
    if rows.shape[1] == 1:
        return np.zeros(len(rows), dtype=np.int64), [Group(1)]
    traits = np.stack(list(_traits(topology, rows)), axis=1)
    if (traits == traits[0]).all():
        return np.zeros(len(rows), dtype=np.int64), [group_of(topology, rows[0])]
    _, first, kinds = np.unique(traits, axis=0, return_index=True, return_inverse=True)
    return kinds.reshape(-1), [group_of(topology, rows[i]) for i in first]


def _traits(topology: Topology, rows: NDArray[np.int64]) -> Iterator[NDArray[np.float64]]:
    """Columns that are equal for rows whose groups cost the same."""
    yield np.zeros(len(rows))
    for groups in topology.groups:
        yield from (column.astype(np.float64) for column in _spread(groups[rows]))
    below = rows
    for storey in topology.storeys:
        if storey.shares is not None:
            yield least_share(below, storey.shares[rows])
        below = storey.joined[rows]
    if topology.pattern_kinds:
        inside = inside_levels(topology, rows)
        numbers = {level: n for n, level in enumerate(dict.fromkeys(inside))}
        yield np.array([numbers[level] for level in inside], dtype=np.float64)
    if topology.own_links:
        paired = np.array(sorted({i for pair in topology.own_links for i in pair}))
        numbers_of: dict[bytes, int] = {}
        column = np.zeros(len(rows))
        for i in np.flatnonzero(np.isin(rows, paired).sum(axis=1) > 1).tolist():
            links = _own_bandwidth(topology, rows[i])
            column[i] = numbers_of.setdefault(links.tobytes(), len(numbers_of) + 1) if links.any() else 0
        yield column


def _own_bandwidth(topology: Topology, row: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bytes/s of the links that pairs of ``row`` have of their own, shape ``[n, n]``, 0 for the others."""
    matrix = np.zeros((len(row), len(row)))
    members = row.tolist()
    for i, j in combinations(range(len(members)), 2):
        a, b = members[i], members[j]
        link = topology.own_links.get((a, b) if a < b else (b, a))
        if link is not None:
            matrix[i, j] = matrix[j, i] = link.bandwidth
    return matrix


def _spread(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per row of group numbers: how many different ones, the fewest and the most members of one."""
    ordered = np.sort(ids, axis=1)
    place = np.arange(ids.shape[1])
    starts = np.ones(ids.shape, dtype=bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    ends = np.ones(ids.shape, dtype=bool)
    ends[:, :-1] = starts[:, 1:]
    length = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1) + 1
    fewest = np.where(ends, length, ids.shape[1] + 1).min(axis=1)
    return starts.sum(axis=1), fewest, length.max(axis=1)


def group_of(topology: Topology, devices: NDArray[np.int64]) -> Group:
    """The group of ``devices``: over links that pairs of them have of their own where these join all, else by level."""
    if not topology.own_links or not (own := _own_bandwidth(topology, devices)).any():
        return _level_group(topology, devices)
    size = len(devices)
    widest = math.inf
    if size <= _RINGS_FOUND:
        bandwidth = topology.links_between(devices)[0]
        limit = _widest(bandwidth)
        widest = limit if (own == limit).any() else math.inf
    groups = [_level_group(topology, devices, widest)]
    rate = least_cut(own)
    if rate:
        pairs = [(int(devices[i]), int(devices[j])) for i, j in np.argwhere(np.triu(own)).tolist()]
        latency = max(topology.link(a, b).latency for a, b in pairs)
        groups.append(Group(size, (Tier(Level(name="own", bandwidth=rate, latency=latency), size, 1),)))
    return max(groups, key=lambda group: group.bus_bandwidth)


def _widest(bandwidth: NDArray[np.float64]) -> float:
    """The most bytes/s at which a ring may pass through all devices: that of links that leave no device cut off."""
    apart = ~np.eye(len(bandwidth), dtype=bool)
    for limit in np.unique(bandwidth[apart])[::-1].tolist():
        if nx.is_biconnected(nx.from_numpy_array((bandwidth >= limit) & apart)):
            return float(limit)
    raise AssertionError("all devices reach each other")


def _level_group(topology: Topology, devices: NDArray[np.int64], cap: float = math.inf) -> Group:
    """Level by level from the inside out; ``cap``: bytes/s of a slow link inside."""
    size = len(devices)
    tiers: list[Tier] = []
    ring = math.inf
    parts, below, ids = size, 1, devices
    for storey in topology.storeys:
        joined = storey.joined[devices]
        count, fewest, _ = (int(column[0]) for column in _spread(joined[None]))
        if count < parts:
            share = 1.0
            if storey.shares is not None:
                share = float(least_share(ids[None], storey.shares[devices][None])[0]) / below
            links = _storey_level(topology, storey, devices)
            level = links.shared(share)
            if topology.single_ring and tiers:
                ring = min(ring, links.bandwidth * links.efficiency)
            tiers.append(Tier(level, math.ceil(parts / count), below))
            parts, below, ids = count, fewest, joined
    if parts > 1:  # no level joins them all: they reach each other over other devices
        bandwidth, latency = topology.links_between(devices)
        routed = Level(name="routed", bandwidth=_widest(bandwidth), latency=float(latency.max()))
        tiers.append(Tier(routed, parts, below))
    return Group(size, tuple(tiers), cap, ring)


def _storey_level(topology: Topology, storey: Storey, ranks: NDArray[np.int64]) -> Level:
    """Of the levels of ``storey`` that join some of ``ranks``, the slowest."""
    if not storey.levels:
        (inside,) = inside_levels(topology, ranks[None])
        assert inside is not None
        return inside
    used = [n for n in storey.levels if len(np.unique(topology.groups[n][ranks])) < len(ranks)]
    return min(
        (topology.levels[n] for n in used or storey.levels), key=lambda level: level.bandwidth * level.efficiency
    )


def stage_ranks(mesh: Mapping[str, int]) -> list[range]:
    """The ranks of each pipeline stage: consecutive, since ``pp`` is the outermost axis."""
    stages = mesh.get("pp", 1)
    size = num_ranks(mesh) // stages
    return [range(s * size, (s + 1) * size) for s in range(stages)]


def stage_links(topology: Topology, mesh: Mapping[str, int], devices: Devices = None) -> tuple[Link, ...]:
    """What each stage talks to the next one over: the slowest of the links between their ranks."""
    stages = mesh.get("pp", 1)
    grid = placed(topology, mesh, devices).reshape(stages, -1)
    if stages == 1:
        return ()
    bandwidth, latency = pair_links(topology, grid[:-1], grid[1:])
    slowest = np.lexsort((-latency, bandwidth), axis=1)[:, 0]
    return tuple(topology.link(int(grid[s, i]), int(grid[s + 1, i])) for s, i in enumerate(slowest.tolist()))


def between(topology: Topology, mesh: Mapping[str, int], stage: int, other: int, devices: Devices = None) -> Link:
    """What two stages talk over: the slowest of the links between their ranks."""
    grid = placed(topology, mesh, devices).reshape(mesh.get("pp", 1), -1)
    bandwidth, latency = pair_links(topology, grid[stage], grid[other])
    slowest = int(np.lexsort((-latency, bandwidth))[0])
    return topology.link(int(grid[stage, slowest]), int(grid[other, slowest]))


def stage_capacity(topology: Topology, mesh: Mapping[str, int], devices: Devices = None) -> tuple[int, ...]:
    """Bytes that a rank of each stage may use: its smallest device's, without what its groups take."""
    paces, of_device = topology.paces
    grid = placed(topology, mesh, devices).reshape(mesh.get("pp", 1), -1)
    each = np.array([topology.types[kind].communicator for kind, _ in paces], dtype=np.int64)[of_device]
    free = topology.usable - num_communicators(mesh) * each
    return tuple(int(n) for n in np.maximum(free, 0)[grid].min(axis=1))


def num_communicators(mesh: Mapping[str, int]) -> int:
    """Groups that a rank is in: along ``tp``, of the ranks that add up gradients, and between stages."""
    sizes = mesh.get("tp", 1), mesh.get("dp", 1) * mesh.get("cp", 1), mesh.get("pp", 1)
    return sum(size > 1 for size in sizes)


def stage_paces(
    topology: Topology, mesh: Mapping[str, int], devices: Devices = None
) -> tuple[tuple[tuple[str, float], ...], ...]:
    """For each stage the different (kind, speed) of its devices."""
    paces, of_device = topology.paces
    if len(paces) == 1:
        return (tuple(paces),) * mesh.get("pp", 1)
    grid = placed(topology, mesh, devices).reshape(mesh.get("pp", 1), -1)
    return tuple(tuple(paces[k] for k in np.unique(of_device[row]).tolist()) for row in grid)


def replica_paces(
    topology: Topology, mesh: Mapping[str, int], devices: Devices = None
) -> list[tuple[tuple[tuple[str, float], ...], ...]]:
    """For each rank of ``dp``, for each stage, the different (kind, speed) of its devices."""
    paces, of_device = topology.paces
    pp, dp = mesh.get("pp", 1), mesh.get("dp", 1)
    grid = of_device[placed(topology, mesh, devices).reshape(pp, dp, -1)]
    rows = [[tuple(paces[k] for k in np.unique(row).tolist()) for row in of_stage] for of_stage in grid]
    return [tuple(of_stage[place] for of_stage in rows) for place in range(dp)]


def reference_type(topology: Topology) -> str:
    """The kind of device that the sharding is chosen for: the commonest, and of those the first by name."""
    paces, of_device = topology.paces
    counts: Counter[str] = Counter()
    for (kind, _), count in zip(paces, np.bincount(of_device, minlength=len(paces)).tolist(), strict=True):
        counts[kind] += count
    return min(counts, key=lambda kind: (-counts[kind], kind))
