"""A topology as a graph of networkx: devices, and hubs for what joins several of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from partitioner.topology.fabric import spans_nodes

if TYPE_CHECKING:
    import networkx as nx

    from partitioner.topology.model import Topology


def road_graph(topology: Topology) -> nx.Graph[str]:
    """See :meth:`partitioner.topology.model.Topology.graph`."""
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
