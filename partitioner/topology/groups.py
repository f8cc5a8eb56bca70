"""Which links the ranks of a mesh talk over.

Rank ``i`` sits on device ``i``, and the mesh's axes are nested in the order of ``runtime.program.AXES``, outermost
first. All groups of an axis work at the same time, and the slowest one is what a step waits for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partitioner.errors import TopologyError
from partitioner.topology.model import Topology
from partitioner.topology.parts import Level, Link
from runtime.program import AXES


@dataclass(frozen=True)
class Tier:
    """One level of links inside a group: ``ways`` parts of ``below`` ranks each talk over ``level``."""

    level: Level
    ways: int
    below: int


@dataclass(frozen=True)
class Group:
    """Ranks that enter collectives together. ``tiers`` from the inside out; ``cap``: bytes/s of a slow link inside."""

    size: int
    tiers: tuple[Tier, ...] = ()
    cap: float = math.inf

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
        """Seconds of an all-gather, a reduce-scatter or an all-to-all of nothing: half of an all-reduce's steps."""
        if self.size == 1:
            return 0.0
        if len(self.tiers) == 1 and self.tiers[0].level.all_reduce:
            return max(self.base, (self.base + self.all_reduce_start) / 2)
        return self.base + self._ring_steps(1)

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
    sizes = [n for n, _, _ in level.all_reduce]
    start = np.interp(size, sizes, [a for _, a, _ in level.all_reduce])
    if size > sizes[-1]:
        start += 2 * (size - sizes[-1]) * level.step_s
    return float(start), float(np.interp(size, sizes, [b for _, _, b in level.all_reduce]))


def rank_grid(mesh: Mapping[str, int], *axes: str) -> NDArray[np.int64]:
    """The ranks of every group over ``axes``, shape ``[num_groups, group_size]``, each in order of rank."""
    sizes = [mesh.get(axis, 1) for axis in AXES]
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    inner = [AXES.index(axis) for axis in AXES if axis in axes]
    grid = np.moveaxis(grid, inner, range(len(AXES) - len(inner), len(AXES)))
    return np.ascontiguousarray(grid).reshape(-1, math.prod(sizes[i] for i in inner))


def axis_groups(topology: Topology, mesh: Mapping[str, int], *axes: str) -> list[Group]:
    """The different kinds of groups that the ranks of ``axes`` form, each once.

    Raises :class:`TopologyError` where the mesh has more ranks than the topology has devices.
    """
    world = math.prod(mesh.values())
    if world > topology.num_devices:
        raise TopologyError(
            f"a mesh of {world} ranks on the topology {topology.name!r} of {topology.num_devices} devices; "
            "expected at most one rank per device"
        )
    rows = rank_grid(mesh, *axes)
    if rows.shape[1] == 1:
        return [Group(1)]
    shapes = [_spread(groups[rows]) for groups in topology.groups]
    kinds = np.stack([column for shape in shapes for column in shape], axis=1) if shapes else np.zeros((len(rows), 0))
    _, first = np.unique(kinds, axis=0, return_index=True)
    picked = {int(i): None for i in first}
    if topology.links:
        paired = np.array(sorted({i for pair in topology.own_links for i in pair}))
        picked |= {int(i): None for i in np.flatnonzero(np.isin(rows, paired).any(axis=1))}
    return list(dict.fromkeys(_group(topology, rows[i]) for i in picked))


def axis_group(topology: Topology, mesh: Mapping[str, int], *axes: str) -> Group:
    """The slowest group that the ranks of ``axes`` form; see :func:`axis_groups`."""
    return min(axis_groups(topology, mesh, *axes), key=lambda g: (g.bus_bandwidth, -g.all_reduce_start))


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


def _group(topology: Topology, ranks: NDArray[np.int64]) -> Group:
    size = len(ranks)
    ring = list(zip(ranks.tolist(), np.roll(ranks, -1).tolist(), strict=True))[: size if size > 2 else 1]
    own = [link for a, b in ring if (link := topology.own_links.get((min(a, b), max(a, b)))) is not None]
    if own and len(own) == len(ring):
        return Group(size, (Tier(_level("own", own), size, 1),))
    tiers: list[Tier] = []
    parts, below = size, 1
    for level, groups in zip(topology.levels, topology.groups, strict=True):
        count, fewest, _ = (int(column[0]) for column in _spread(groups[ranks][None]))
        if count < parts:
            tiers.append(Tier(level, math.ceil(parts / count), below))
            parts, below = count, fewest
    if parts > 1:  # no level joins them all: they reach each other over other devices
        tiers.append(Tier(_level("routed", [topology.link(a, b) for a, b in ring]), parts, below))
    return Group(size, tuple(tiers), min((link.bandwidth for link in own), default=math.inf))


def _level(name: str, links: list[Link]) -> Level:
    slowest = min(links, key=lambda link: link.bandwidth)
    return Level(name=name, bandwidth=slowest.bandwidth, latency=max(link.latency for link in links))


def stage_ranks(mesh: Mapping[str, int]) -> list[range]:
    """The ranks of each pipeline stage: consecutive, since ``pp`` is the outermost axis."""
    stages = mesh.get("pp", 1)
    size = math.prod(mesh.values()) // stages
    return [range(s * size, (s + 1) * size) for s in range(stages)]


def stage_links(topology: Topology, mesh: Mapping[str, int]) -> tuple[Link, ...]:
    """What each stage talks to the next one over: the slowest of the links between their ranks."""
    stages = stage_ranks(mesh)
    links = []
    for here, there in pairwise(stages):
        a, b = np.arange(here.start, here.stop), np.arange(there.start, there.stop)
        level = np.full(len(a), len(topology.levels))
        for number in range(len(topology.levels) - 1, -1, -1):
            groups = topology.groups[number]
            level[groups[a] == groups[b]] = number
        candidates = {int(np.argmax(level))}
        if topology.links:
            candidates |= set(range(len(a)))
        found = [topology.link(int(a[i]), int(b[i])) for i in candidates]
        links.append(min(found, key=lambda link: (link.bandwidth, -link.latency)))
    return tuple(links)


def stage_capacity(topology: Topology, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Bytes that a rank of each stage may use: its smallest device's."""
    return tuple(int(least) for least in _by_stage(topology.usable_bytes, mesh).min(axis=1))


def reference_type(topology: Topology) -> str:
    """The kind of device that compute costs are reckoned for: the commonest."""
    return topology.commonest_type


def stage_slowdown(topology: Topology, mesh: Mapping[str, int], precision: str) -> tuple[float, ...]:
    """How many times as long as on the reference device compute takes on the slowest device of each stage."""
    reference = topology.types[reference_type(topology)].peak_of(precision)
    kinds, kind_of, speeds = topology.paces
    pace = np.array([reference / topology.types[kind].peak_of(precision) for kind in kinds])
    return tuple(float(most) for most in _by_stage(pace[kind_of] / speeds, mesh).max(axis=1))


def _by_stage(values: NDArray[Any], mesh: Mapping[str, int]) -> NDArray[Any]:
    """``values`` of all devices as ``[pp, ranks of a stage]``."""
    return values[: math.prod(mesh.values())].reshape(mesh.get("pp", 1), -1)
