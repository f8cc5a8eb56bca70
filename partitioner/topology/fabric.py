"""What the links of a topology come to for each device: who is joined, and with what share of the bandwidth.

A *storey* is what levels make of the devices from the inside out: the pattern of links inside nodes first, then each
level; levels of different islands that stand side by side are one storey.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partitioner.topology.parts import Level, NodeGroup, Pattern

if TYPE_CHECKING:
    from partitioner.topology.model import Topology

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_PLACES = 62  # of a node with a pattern: a set of its devices is the bits of one int64


@dataclass(frozen=True, eq=False)
class Storey:
    """``joined``: for each device the first of those it reaches; ``levels``: their numbers, none for patterns.

    ``shares``: of the levels' bandwidth that each device has; ``None``: all have the whole.
    """

    joined: Ints
    levels: tuple[int, ...]
    shares: Floats | None = None


def level_groups(topology: Topology, level: Level) -> Ints:
    """The group of every device on ``level``, shape ``[num_devices]``; a negative number of its own outside it."""
    if level.nodes is not None:
        groups = topology.node_of // level.nodes
    elif level.devices is not None:
        groups = topology.node_of * (1 + topology.place_of.max()) + topology.place_of // level.devices
    else:
        groups = np.zeros(topology.num_devices, dtype=np.int64)
    if level.only:
        sizes = [g.devices * g.count for g in topology.nodes]
        inside = np.repeat([g.island_name in level.only for g in topology.nodes], sizes)
        groups = np.where(inside, groups, -1 - np.arange(topology.num_devices))
    return groups


def spans_nodes(level: Level) -> bool:
    """Whether ``level`` leaves the node, over its network cards."""
    return level.devices is None and level.nodes != 1


def extent(level: Level) -> tuple[float, float]:
    """How far ``level`` reaches: nodes, and devices of one."""
    if level.devices is not None:
        return 0, level.devices
    return level.nodes or math.inf, 0


def largest_node(nodes: Sequence[NodeGroup], level: Level) -> int:
    """The most devices of a node that may have ``level``; 0 where none does."""
    return max((g.devices for g in nodes if not level.only or g.island_name in level.only), default=0)


def fitting_levels(levels: Sequence[Level], nodes: Sequence[NodeGroup]) -> dict[int, Level]:
    """By number what is left of ``levels`` where nodes became ``nodes``: none reaches farther than a node has devices,
    and those go that then join no more than the one before, or are of islands that are gone."""
    islands = {group.island_name for group in nodes}
    fitting: dict[int, Level] = {}
    for number, level in enumerate(levels):
        most = largest_node(nodes, level)
        if not most:
            continue
        devices = level.devices and min(level.devices, most)
        only = tuple(name for name in level.only if name in islands)
        level = level.model_copy(update={"devices": devices, "only": only})
        if not any(extent(inner) >= extent(level) and inner.only == level.only for inner in fitting.values()):
            fitting[number] = level
    return fitting


def storeys(topology: Topology) -> tuple[Storey, ...]:
    """From the inside out."""
    found = []
    joined = np.arange(topology.num_devices)
    if (topology.pattern_of >= 0).any():
        firsts = np.searchsorted(topology.node_of, topology.node_of)
        joined = np.where(topology.pattern_of >= 0, firsts, joined)
        found.append(Storey(joined, ()))
    shares = None if (topology.network_share == 1).all() else topology.network_share
    for numbers in _side_by_side(topology.levels):
        for number in numbers:
            groups = topology.groups[number]
            _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
            joined = np.where(groups >= 0, first[inverse], joined)
        beyond = any(spans_nodes(topology.levels[n]) for n in numbers)
        found.append(Storey(joined, numbers, shares if beyond else None))
    return tuple(found)


def _side_by_side(levels: tuple[Level, ...]) -> list[tuple[int, ...]]:
    """The numbers of consecutive levels of different islands, together."""
    runs: list[list[int]] = []
    taken: set[str] = set()
    for number, level in enumerate(levels):
        if runs and level.only and taken and not taken & set(level.only):
            runs[-1].append(number)
            taken |= set(level.only)
        else:
            runs.append([number])
            taken = set(level.only)
    return [tuple(run) for run in runs]


def pattern_matrix(pattern: Pattern, devices: int) -> Floats:
    """Bytes/s between the places of a node, shape ``[devices, devices]``; 0 where there is no link."""
    matrix = np.zeros((devices, devices))
    for link in pattern.links:
        if link.pairs == "all":
            matrix[:] = link.bandwidth
        else:
            for i, j in link.pairs:
                matrix[i, j] = matrix[j, i] = link.bandwidth
    np.fill_diagonal(matrix, 0.0)
    return matrix


def node_sets(topology: Topology, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """(row, pattern, set) of each node that has a pattern and several members in a row; a set's bits are places."""
    row = np.repeat(np.arange(len(rows)), rows.shape[1])
    devices = rows.ravel()
    keys = row * topology.num_nodes + topology.node_of[devices]
    keep = topology.pattern_of[devices] >= 0
    nodes, first, inverse, counts = np.unique(keys[keep], return_index=True, return_inverse=True, return_counts=True)
    sets = np.zeros(len(nodes), dtype=np.int64)
    np.add.at(sets, inverse, np.int64(1) << topology.place_of[devices[keep]])
    several = counts > 1
    return row[keep][first][several], topology.pattern_of[devices[keep]][first][several], sets[several]


def inside_levels(topology: Topology, rows: Ints) -> tuple[Level | None, ...]:
    """For each row the links inside its nodes as a level, where patterns join them: the slowest of its nodes."""
    slowest: list[Level | None] = [None] * len(rows)
    for row, kind, members in zip(*(column.tolist() for column in node_sets(topology, rows)), strict=True):
        level, seen = topology.inside_level(kind, members), slowest[row]
        if seen is None or _rate(level) < _rate(seen):
            slowest[row] = level
    return tuple(slowest)


def _rate(level: Level) -> float:
    return level.bandwidth * level.efficiency


def inside_level(topology: Topology, kind: int, members: int) -> Level:
    """The links among the places ``members`` (bits) of a node of pattern number ``kind``, as a level of their own.

    Rings over direct links carry at most what every cut of the group does, and on the cube mesh of DGX-1 the least cut
    (Stoer and Wagner 1997) times the efficiency is what NCCL was measured to reach. Where the links do not join all,
    messages go over a level, or over other devices.
    """
    name, matrix = topology.pattern_kinds[kind]
    pattern = topology.patterns[name]
    places = [k for k in range(len(matrix)) if members >> k & 1]
    start = int(np.flatnonzero(topology.pattern_of == kind)[0])
    devices = np.array([start + k for k in places])
    levels = [
        level.shared()
        for level, groups in zip(topology.levels, topology.groups, strict=True)
        if not spans_nodes(level) and len(set(groups[devices].tolist())) == 1
    ]
    cut = least_cut(matrix[np.ix_(places, places)])
    if levels and cut * pattern.efficiency <= _rate(levels[0]):
        return levels[0]
    if not cut:
        bandwidth, latency = topology.links_between(devices)
        return Level.model_construct(
            name=name, bandwidth=float(bandwidth.min()), latency=float(latency.max()), base=pattern.base
        )
    measured: tuple[tuple[int, float, float], ...] = ()
    if pattern.starts:
        seconds = np.interp(len(places), [n for n, _ in pattern.starts], [start for _, start in pattern.starts])
        measured = ((len(places), float(seconds), cut * pattern.efficiency),)
    return Level(
        name=name,
        nodes=1,
        bandwidth=cut,
        all_reduce=measured,
        **{key: getattr(pattern, key) for key in ("latency", "step", "base", "efficiency")},
    )


def least_cut(matrix: Floats) -> float:
    """Bytes/s that cross the weakest of all ways to cut the graph of links ``matrix`` in two; 0: it is in parts."""
    import networkx as nx  # where a topology needs it: most do not

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(matrix)))
    graph.add_weighted_edges_from((i, j, matrix[i, j]) for i, j in np.argwhere(np.triu(matrix)).tolist())
    if not nx.is_connected(graph):
        return 0.0
    return float(nx.stoer_wagner(graph)[0])


def least_share(parts: Ints, shares: Floats) -> Floats:
    """Per row, over its parts (equal numbers in ``parts``), the least sum of ``shares``; both ``[rows, size]``."""
    rows, size = parts.shape
    order = np.lexsort((parts.ravel(), np.repeat(np.arange(rows), size)))
    ordered = parts.ravel()[order]
    starts = np.ones(rows * size, dtype=bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    starts[::size] = True
    first = np.flatnonzero(starts)
    sums = np.add.reduceat(shares.ravel()[order], first)
    return np.asarray(np.minimum.reduceat(sums, np.searchsorted(first, np.arange(rows) * size)), dtype=np.float64)
