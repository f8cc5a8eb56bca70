"""Links of a topology as seen by its devices: storeys, a graph for networkx, and bandwidths of many pairs as arrays.

A *storey* is a set of links that stand at the same depth, counted from the inside out: the pattern of links inside
nodes is the first, then each level follows; levels of different islands that stand side by side are one storey.

The graph has devices as nodes, and hubs where several devices are joined. ``links_at_once`` computes the bandwidth and
latency of :meth:`Topology.link` for many pairs at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partitioner.topology.hardware import Level, NodeGroup, Pattern

if TYPE_CHECKING:
    import networkx as nx

    from partitioner.topology.topology import Topology

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


def compute_level_extent(level: Level) -> tuple[float, float]:
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
        if not any(
            compute_level_extent(inner) >= compute_level_extent(level) and inner.only == level.only
            for inner in fitting.values()
        ):
            fitting[number] = level
    return fitting


def build_storeys(topology: Topology) -> tuple[Storey, ...]:
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
        if seen is None or _compute_level_rate(level) < _compute_level_rate(seen):
            slowest[row] = level
    return tuple(slowest)


def _compute_level_rate(level: Level) -> float:
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
    if levels and cut * pattern.efficiency <= _compute_level_rate(levels[0]):
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


def road_graph(topology: Topology) -> nx.Graph[str]:
    """See :meth:`partitioner.topology.topology.Topology.graph`."""
    import networkx as nx

    graph: nx.Graph[str] = nx.Graph()
    for i, name in enumerate(topology.names):
        graph.add_node(name, kind="device", level=-1, index=i)
    for number, (level, groups) in enumerate(zip(topology.levels, topology.groups, strict=True)):
        ids, counts = np.unique(groups, return_counts=True)
        shared = set(ids[counts > 1].tolist())
        for name, group in zip(topology.names, groups.tolist(), strict=True):
            if group in shared:
                hub = f"{level.name}:{group}"
                graph.add_node(hub, kind="hub", level=number)
                share = float(topology.network_share[topology.index[name]]) if spans_nodes(level) else 1.0
                bandwidth = level.bandwidth * share / level.oversubscription
                graph.add_edge(name, hub, bandwidth=bandwidth, latency=level.latency / 2)
    for first in np.flatnonzero((topology.place_of == 0) & (topology.pattern_of >= 0)).tolist():
        pattern, matrix = topology.pattern_kinds[topology.pattern_of[first]]
        for i, j in np.argwhere(np.triu(matrix)).tolist():
            ends = topology.names[first + i], topology.names[first + j]
            graph.add_edge(*ends, bandwidth=float(matrix[i, j]), latency=topology.patterns[pattern].latency)
    for (i, j), own in topology.own_links.items():
        graph.add_edge(topology.names[i], topology.names[j], bandwidth=own.bandwidth, latency=own.latency)
    return graph


def pair_links(topology: Topology, a: Ints, b: Ints) -> tuple[Floats, Floats]:
    """(bytes/s, seconds) of the links between ``a[k]`` and ``b[k]``, whose shapes are broadcast, when all talk at once.

    Between a device and itself: its memory's bandwidth and no latency.
    """
    a, b = _broadcast_indices(a, b)
    bandwidth, latency, beyond = _find_pair_links(topology, a, b)
    shares = np.minimum(topology.network_share[a], topology.network_share[b])
    bandwidth[beyond] *= shares[beyond]
    _put_routed(topology, a, b, bandwidth, latency)
    return bandwidth, latency


def links_at_once(topology: Topology, a: Ints, b: Ints) -> tuple[Floats, Floats]:
    """(bytes/s, seconds) of messages from ``a[k]`` to ``b[k]``, shape ``[moments, messages]``: those of a moment are
    under way at the same time, and no others.

    Messages between nodes share the network card that they leave by, and the one that they come in by. A card sends
    and receives at its full bandwidth at the same time. A device sends and receives one message at a time.
    """
    a, b = _broadcast_indices(a, b)
    bandwidth, latency, beyond = _find_pair_links(topology, a, b)
    moment = np.broadcast_to(np.arange(len(a))[:, None], a.shape)[beyond]
    sent, received = (_compute_card_shares(topology, moment, ends[beyond]) for ends in (a, b))
    bandwidth[beyond] *= np.minimum(sent, received)
    _put_routed(topology, a, b, bandwidth, latency)
    return bandwidth, latency


def _compute_card_shares(topology: Topology, moment: Ints, devices: Ints) -> Floats:
    """What each message has of a card, if ``devices`` are the ends of messages at the same ``moment``."""
    cards = topology.cards
    if not cards.are_shared:
        return cards.alone[devices]
    port = cards.port[devices]
    _, which, counts = np.unique(moment * (cards.port.max() + 1) + port, return_inverse=True, return_counts=True)
    return cards.among(devices, counts[which.reshape(-1)])


def _broadcast_indices(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    a, b = np.broadcast_arrays(np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64))
    return a, b


def _find_pair_links(topology: Topology, a: Ints, b: Ints) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """(bytes/s of whole network cards, seconds) of each pair, NaN where no link joins the two; and which pairs talk
    over network cards."""
    bandwidth, latency = np.full(a.shape, np.nan), np.full(a.shape, np.nan)
    beyond = np.zeros(a.shape, dtype=bool)
    for level, groups in zip(reversed(topology.levels), reversed(topology.groups), strict=True):
        joined = groups[a] == groups[b]
        bandwidth[joined] = level.bandwidth / level.oversubscription
        latency[joined] = level.latency
        beyond[joined] = spans_nodes(level)
    for found in (_put_patterns(topology, a, b, bandwidth, latency), _put_own(topology, a, b, bandwidth, latency)):
        beyond[found] = False
    same = a == b
    if same.any():
        bandwidth[same], latency[same], beyond[same] = topology.memory_bandwidths[a[same]], 0.0, False
    return bandwidth, latency, beyond


def _put_patterns(topology: Topology, a: Ints, b: Ints, bandwidth: Floats, latency: Floats) -> NDArray[np.bool_]:
    """The direct links inside nodes; which pairs have one."""
    direct = np.zeros(a.shape, dtype=bool)
    if not topology.pattern_kinds:
        return direct
    inside = (topology.node_of[a] == topology.node_of[b]) & (topology.pattern_of[a] >= 0)
    for kind, (name, matrix) in enumerate(topology.pattern_kinds):
        here = np.nonzero(inside & (topology.pattern_of[a] == kind))
        rates = matrix[topology.place_of[a[here]], topology.place_of[b[here]]]
        found = tuple(axis[rates > 0] for axis in here)
        bandwidth[found], latency[found], direct[found] = rates[rates > 0], topology.patterns[name].latency, True
    return direct


def _put_own(topology: Topology, a: Ints, b: Ints, bandwidth: Floats, latency: Floats) -> NDArray[np.bool_]:
    """The links that single pairs have; which pairs have one."""
    if not topology.own_links:
        return np.zeros(a.shape, dtype=bool)
    keys = np.minimum(a, b) * topology.num_devices + np.maximum(a, b)
    ordered = sorted(topology.own_links.items())
    known = np.array([i * topology.num_devices + j for (i, j), _ in ordered])
    place = np.searchsorted(known, keys).clip(max=len(known) - 1)
    found = known[place] == keys
    bandwidth[found] = np.array([link.bandwidth for _, link in ordered])[place[found]]
    latency[found] = np.array([link.latency for _, link in ordered])[place[found]]
    return np.asarray(found, dtype=bool)


def _put_routed(topology: Topology, a: Ints, b: Ints, bandwidth: Floats, latency: Floats) -> None:
    """What nothing joins directly: paths over other devices."""
    missing = np.isnan(bandwidth)
    if not missing.any():
        return
    graph = topology.roads
    for source in np.unique(a[missing]).tolist():
        here = missing & (a == source)
        widest = find_routes(graph, topology.names[source])
        found = np.array([widest[topology.names[j]] for j in b[here].tolist()])
        bandwidth[here], latency[here] = found[:, 0], found[:, 1]


def find_routes(graph: nx.Graph[str], source: str) -> dict[str, tuple[float, float]]:
    """(bytes/s, seconds) from ``source`` to all it reaches: the path of least latency, as fast as its slowest link."""
    import networkx as nx

    paths = nx.single_source_dijkstra_path(graph, source, weight="latency")
    result = {}
    for target, path in paths.items():
        hops = [graph.edges[x, y] for x, y in pairwise(path)]
        result[target] = (min((h["bandwidth"] for h in hops), default=np.inf), sum(h["latency"] for h in hops))
    return result
