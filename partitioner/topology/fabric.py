"""Compute the links between devices of a topology: storeys, a networkx graph, and arrays of bandwidths and latencies.

A *storey* is the set of links at the same depth, counted from the innermost. The direct links inside nodes (patterns)
are the first storey. Each level is one further storey, except that consecutive levels of different islands (named sets
of nodes) form one storey together.

The graph has one node per device, and one hub per group of devices that a level connects. ``links_at_once`` computes
the bandwidth and latency of many pairs that communicate at the same time.
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

MOST_PLACES = 62  # devices of a node with a pattern: a set of them is the bits of one int64


@dataclass(frozen=True, eq=False)
class Storey:
    """All links at one depth, such as inside nodes or between nodes, with the devices that they connect.

    ``joined``: a group number for each device, shape ``[num_devices]``: the smallest index of the devices that it
    reaches over the links at this depth and at inner depths. Devices with equal numbers reach each other. ``levels``:
    indices of the topology's levels of links at this depth; empty for the direct links inside nodes. ``shares``: the
    fraction of the levels' bandwidth that each device gets, shape ``[num_devices]``; ``None``: each device gets all of
    it.
    """

    joined: Ints
    levels: tuple[int, ...]
    shares: Floats | None = None


def level_groups(topology: Topology, level: Level) -> Ints:
    """Return a group number for each device of ``topology``, shape ``[num_devices]``: the links ``level`` connect
    devices with equal numbers. Devices that do not have such links get distinct negative numbers."""
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
    """Return whether the links ``level`` connect devices of different nodes, over network cards."""
    return level.devices is None and level.nodes != 1


def compute_level_extent(level: Level) -> tuple[float, float]:
    """Return how far the links ``level`` reach, as a pair (number of whole nodes, number of devices inside a node) in
    which one number is 0. A level with a greater pair reaches further. Infinity stands for all nodes."""
    if level.devices is not None:
        return 0, level.devices
    return level.nodes or math.inf, 0


def largest_node(nodes: Sequence[NodeGroup], level: Level) -> int:
    """Return the number of devices of the largest node that has the links of ``level``; 0 if no node has them.
    ``nodes``: the groups of equal nodes of the cluster."""
    return max((g.devices for g in nodes if not level.only or g.island_name in level.only), default=0)


def fitting_levels(levels: Sequence[Level], nodes: Sequence[NodeGroup]) -> dict[int, Level]:
    """Return the levels of links that connect devices of ``nodes``, as index in ``levels`` -> level. The number of
    devices that a level connects inside a node is reduced to the number of devices of the largest node. ``levels``: all
    levels of the cluster. ``nodes``: groups of equal nodes.

    A level is left out if none of its islands (named sets of nodes) is among ``nodes``, or if an inner level already
    connects the same devices.
    """
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
    """Return the storeys of ``topology``, from the innermost to the outermost. A storey is all links at one depth: the
    direct links inside nodes, or a level of links, or several levels that belong to different sets of nodes.
    """
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
    """Return the indices of ``levels``, grouped by depth. Consecutive levels of links are at one depth if they belong
    to different islands (named sets of nodes)."""
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
    """Return the bandwidth in bytes/s of the direct links that ``pattern`` gives a node, shape ``[devices, devices]``;
    0 for pairs of devices without a direct link. ``devices``: number of devices of the node."""
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
    """Find which direct links each communication group can use: the nodes with a pattern (direct links between pairs of
    devices) that have at least two devices of the group. ``rows``: device indices, one group of devices per row.

    Return three arrays with one entry for each pair of a group and such a node: the index of the group's row, the index
    of the pattern in ``topology.pattern_kinds``, and the devices as a bit mask (bit ``k`` is the device with index
    ``k`` in the node).
    """
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
    """Return, for each group of devices, the direct links inside a node, summarized as one level of links. If devices
    of several nodes are in a group, the node with the slowest such links counts. The result is ``None`` for a group
    that has no two devices in one node with direct links (a pattern). ``topology``: the cluster. ``rows``: device
    indices, one group per row."""
    slowest: list[Level | None] = [None] * len(rows)
    for row, kind, members in zip(*(column.tolist() for column in node_sets(topology, rows)), strict=True):
        level, seen = topology.inside_level(kind, members), slowest[row]
        if seen is None or _compute_level_rate(level) < _compute_level_rate(seen):
            slowest[row] = level
    return tuple(slowest)


def _compute_level_rate(level: Level) -> float:
    """Return the bandwidth in bytes/s that large collectives reach over the links ``level``: their bandwidth times
    their efficiency."""
    return level.bandwidth * level.efficiency


def inside_level(topology: Topology, kind: int, members: int) -> Level:
    """Return the direct links among some devices of a node, summarized as one level of links. ``kind``: index in
    ``topology.pattern_kinds`` of the node's pattern of direct links. ``members``: bit mask of the devices; bit ``k`` is
    the device with index ``k`` in the node.

    The bandwidth of the level is the least cut of the graph of links (Stoer and Wagner 1997), because rings carry at
    most what crosses each cut. On the cube mesh of DGX-1, the cut times the efficiency equals the rate measured with
    NCCL. If an ordinary level of links inside the node is as fast, that level is returned instead. If the direct links
    do not connect all of the devices, the result describes routes over other devices.
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
    """Return the least bandwidth in bytes/s over all cuts of a graph of devices into two parts. The result is 0 if the
    graph is not connected. ``matrix``: bytes/s of the link of each pair of devices, shape ``[n, n]``, 0 without a link.
    """
    import networkx as nx  # imported late: most topologies do not need it

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(matrix)))
    graph.add_weighted_edges_from((i, j, matrix[i, j]) for i, j in np.argwhere(np.triu(matrix)).tolist())
    if not nx.is_connected(graph):
        return 0.0
    return float(nx.stoer_wagner(graph)[0])


def least_share(parts: Ints, shares: Floats) -> Floats:
    """Return, for each group of devices, the bandwidth of its slowest part (such as a node), as a multiple of the
    bandwidth of one link, shape ``[rows]``, one row for each group. The bandwidth of a part is the sum of the shares of
    its devices.

    ``parts``: for each device of a group, the number of the part to which it belongs. ``shares``: for each device, the
    fraction of the bandwidth of a link that it gets. Both have the shape ``[rows, size]``.
    """
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
    """Return a networkx graph of ``topology``, for finding routes. Its nodes are the devices, by name, and one hub for
    each group of several devices that a level of links connects. Edges have ``bandwidth`` in bytes/s and ``latency`` in
    seconds."""
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
    """Return the bandwidth (bytes/s) and latency (s) of the link between the two devices of each pair while all devices
    of ``topology`` communicate. ``a``, ``b``: device indices; the pairs are ``a[k]``, ``b[k]`` after NumPy
    broadcasting, which also gives the shape of the results.

    For a pair of a device and itself, the bandwidth is the bandwidth of its memory, and the latency is 0.
    """
    a, b = _broadcast_indices(a, b)
    bandwidth, latency, beyond = _find_pair_links(topology, a, b)
    shares = np.minimum(topology.network_share[a], topology.network_share[b])
    bandwidth[beyond] *= shares[beyond]
    _put_routed(topology, a, b, bandwidth, latency)
    return bandwidth, latency


def links_at_once(topology: Topology, a: Ints, b: Ints) -> tuple[Floats, Floats]:
    """Return the bandwidth (bytes/s) and latency (s) of messages between devices of ``topology``, each of shape
    ``[rows, messages]``. ``a``, ``b``: the device indices of the senders and the receivers, of the same shape. The
    messages of one row are sent at the same time, without any others.

    Messages between nodes share the network cards of the sending and the receiving device. A card sends and receives at
    full bandwidth at the same time. A device sends and receives one message at a time.
    """
    a, b = _broadcast_indices(a, b)
    bandwidth, latency, beyond = _find_pair_links(topology, a, b)
    moment = np.broadcast_to(np.arange(len(a))[:, None], a.shape)[beyond]
    sent, received = (_compute_card_shares(topology, moment, ends[beyond]) for ends in (a, b))
    bandwidth[beyond] *= np.minimum(sent, received)
    _put_routed(topology, a, b, bandwidth, latency)
    return bandwidth, latency


def _compute_card_shares(topology: Topology, moment: Ints, devices: Ints) -> Floats:
    """Return the bandwidth that each message gets, as a multiple of the bandwidth of one network card. ``devices``: the
    index in ``topology`` of the sending (or the receiving) device of each message. ``moment``: a number for each
    message; messages with equal numbers are sent at the same time and share cards."""
    cards = topology.cards
    if not cards.are_shared:
        return cards.alone[devices]
    port = cards.port[devices]
    _, which, counts = np.unique(moment * (cards.port.max() + 1) + port, return_inverse=True, return_counts=True)
    return cards.among(devices, counts[which.reshape(-1)])


def _broadcast_indices(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Return the device indices ``a`` and ``b`` as two integer arrays of the same shape, by NumPy broadcasting."""
    a, b = np.broadcast_arrays(np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64))
    return a, b


def _find_pair_links(topology: Topology, a: Ints, b: Ints) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return three arrays for the pairs of devices ``a[k]``, ``b[k]`` (indices in ``topology``): the bandwidth in
    bytes/s, the latency in seconds, and a mask of the pairs that use network cards. Bandwidth and latency are NaN if no
    link connects a pair. Between nodes, the bandwidth is that of a whole network card."""
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
    """Write the bandwidth (bytes/s) and latency (s) of direct links inside nodes into the arrays ``bandwidth`` and
    ``latency``, which have one entry for each pair of devices ``a[k]``, ``b[k]`` (indices). The links come from the
    patterns of ``topology``; a pattern describes which devices of a node are linked. Return a mask of the pairs with
    such a link.
    """
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
    """Write the direct links that ``topology`` gives for single pairs into ``bandwidth`` (bytes/s) and ``latency`` (s),
    which have one entry for each pair of devices ``a[k]``, ``b[k]`` (indices). Return a mask of the pairs with such a
    link."""
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
    """Replace NaN in ``bandwidth`` (bytes/s) and ``latency`` (s), which have one entry for each pair of devices
    ``a[k]``, ``b[k]`` (indices in ``topology``), by the values of routes over other devices. NaN means that no link
    connects the pair."""
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
    """Return the routes from the device named ``source`` to all devices and hubs that it reaches: name -> (bandwidth in
    bytes/s, latency in seconds). A route is the path of least latency, and its bandwidth is the bandwidth of its
    slowest link. ``graph``: devices and hubs, with ``bandwidth`` and ``latency`` on each edge."""
    import networkx as nx

    paths = nx.single_source_dijkstra_path(graph, source, weight="latency")
    result = {}
    for target, path in paths.items():
        hops = [graph.edges[x, y] for x, y in pairwise(path)]
        result[target] = (min((h["bandwidth"] for h in hops), default=np.inf), sum(h["latency"] for h in hops))
    return result
