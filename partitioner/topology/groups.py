"""Which links the ranks of a mesh talk over.

Rank ``i`` sits on device ``i``, and the mesh's axes are nested in the order of ``runtime.program.AXES``, outermost
first. All groups of an axis work at the same time, and the slowest one is what a step waits for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partitioner.errors import TopologyError
from partitioner.topology.fabric import Storey, inside_levels, least_share
from partitioner.topology.model import Topology
from partitioner.topology.pairs import pair_links
from partitioner.topology.parts import Level, Link, Measured
from runtime.program import AXES

_POST_S = 1e-6  # to post one send and one receive


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
    return row_groups(topology, rank_grid(mesh, *axes))


def row_groups(topology: Topology, rows: NDArray[np.int64]) -> list[Group]:
    """The different kinds of groups among ``rows`` of devices, shape ``[num_groups, group_size]``, each once."""
    if rows.shape[1] == 1:
        return [Group(1)]
    kinds = np.stack(list(_traits(topology, rows)), axis=1)
    _, first = np.unique(kinds, axis=0, return_index=True)
    return list(dict.fromkeys(_group(topology, rows[i]) for i in np.sort(first)))


def axis_group(topology: Topology, mesh: Mapping[str, int], *axes: str) -> Group:
    """The slowest group that the ranks of ``axes`` form; see :func:`axis_groups`."""
    return min(axis_groups(topology, mesh, *axes), key=lambda g: (g.bus_bandwidth, -g.all_reduce_start))


def _traits(topology: Topology, rows: NDArray[np.int64]) -> Iterator[NDArray[np.float64]]:
    """Columns that are equal for rows whose groups cost the same."""
    linked = np.isin(rows, [i for pair in topology.own_links for i in pair]).any(axis=1)
    yield np.where(linked, 1.0 + np.arange(len(rows)), 0.0)  # by themselves
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
    parts, below, ids = size, 1, ranks
    for storey in topology.storeys:
        joined = storey.joined[ranks]
        count, fewest, _ = (int(column[0]) for column in _spread(joined[None]))
        if count < parts:
            share = (
                1.0 if storey.shares is None else float(least_share(ids[None], storey.shares[ranks][None])[0]) / below
            )
            tiers.append(Tier(_storey_level(topology, storey, ranks).shared(share), math.ceil(parts / count), below))
            parts, below, ids = count, fewest, joined
    if parts > 1:  # no level joins them all: they reach each other over other devices
        tiers.append(Tier(_level("routed", [topology.link(a, b) for a, b in ring]), parts, below))
    return Group(size, tuple(tiers), min((link.bandwidth for link in own), default=math.inf))


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
        bandwidth, latency = pair_links(topology, a, b)
        slowest = int(np.lexsort((-latency, bandwidth))[0])
        links.append(topology.link(int(a[slowest]), int(b[slowest])))
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
