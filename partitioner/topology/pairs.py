"""Bandwidth and latency of many pairs of devices at once: what :meth:`Topology.link` says, as arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partitioner.topology.fabric import Floats, Ints, spans_nodes

if TYPE_CHECKING:
    import networkx as nx

    from partitioner.topology.model import Topology


def pair_links(topology: Topology, a: Ints, b: Ints) -> tuple[Floats, Floats]:
    """(bytes/s, seconds) of the links between ``a[k]`` and ``b[k]``, whose shapes are broadcast, when all talk at once.

    Between a device and itself: its memory's bandwidth and no latency.
    """
    a, b = _aligned(a, b)
    bandwidth, latency, beyond = _links(topology, a, b)
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
    a, b = _aligned(a, b)
    bandwidth, latency, beyond = _links(topology, a, b)
    moment = np.broadcast_to(np.arange(len(a))[:, None], a.shape)[beyond]
    sent, received = (_among(topology, moment, ends[beyond]) for ends in (a, b))
    bandwidth[beyond] *= np.minimum(sent, received)
    _put_routed(topology, a, b, bandwidth, latency)
    return bandwidth, latency


def _among(topology: Topology, moment: Ints, devices: Ints) -> Floats:
    """What each message has of a card, if ``devices`` are the ends of messages at the same ``moment``."""
    cards = topology.cards
    if not cards.are_shared:
        return cards.alone[devices]
    port = cards.port[devices]
    _, which, counts = np.unique(moment * (cards.port.max() + 1) + port, return_inverse=True, return_counts=True)
    return cards.among(devices, counts[which.reshape(-1)])


def _aligned(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    a, b = np.broadcast_arrays(np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64))
    return a, b


def _links(topology: Topology, a: Ints, b: Ints) -> tuple[Floats, Floats, NDArray[np.bool_]]:
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
        widest = routes(graph, topology.names[source])
        found = np.array([widest[topology.names[j]] for j in b[here].tolist()])
        bandwidth[here], latency[here] = found[:, 0], found[:, 1]


def routes(graph: nx.Graph[str], source: str) -> dict[str, tuple[float, float]]:
    """(bytes/s, seconds) from ``source`` to all it reaches: the path of least latency, as fast as its slowest link."""
    import networkx as nx

    paths = nx.single_source_dijkstra_path(graph, source, weight="latency")
    result = {}
    for target, path in paths.items():
        hops = [graph.edges[x, y] for x, y in pairwise(path)]
        result[target] = (min((h["bandwidth"] for h in hops), default=np.inf), sum(h["latency"] for h in hops))
    return result
