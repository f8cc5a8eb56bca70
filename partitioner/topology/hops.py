"""Messages between the ranks of a ring: every rank sends to the one that is so many places further, at the same time.

A hop lasts as long as its slowest pair. Pairs inside a node talk over their own links; pairs on different nodes talk
over one network card each, which they share with the other pairs of all groups that use it in the same hop.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partitioner.topology.model import Topology
from partitioner.topology.pairs import links_at_once
from partitioner.topology.parts import Hop


def ring_hops(topology: Topology, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(seconds of latency, bytes/s) of hops in each of the groups ``rows`` of devices, in the order of the ring.

    ``rows``: shape ``[groups, size]``, all groups that hop at the same time; the results ``[groups, size // 2]``, for
    hops of 1, 2, ... places. As many places back take as long, which is why there are no more.
    """
    latencies, bandwidths = [], []
    for places in range(1, rows.shape[1] // 2 + 1):
        bandwidth, latency = links_at_once(topology, rows.reshape(1, -1), np.roll(rows, -places, 1).reshape(1, -1))
        latencies.append(latency.reshape(rows.shape).max(axis=1))
        bandwidths.append(bandwidth.reshape(rows.shape).min(axis=1))
    return np.stack(latencies, axis=1), np.stack(bandwidths, axis=1)


def hops_of(latencies: NDArray[np.float64], bandwidths: NDArray[np.float64]) -> tuple[Hop, ...]:
    """The hops of one group, of its row of :func:`ring_hops`."""
    return tuple(map(Hop, latencies.tolist(), bandwidths.tolist()))


def near(topology: Topology, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first of ``rows`` and those that may share a network card with it: of nodes that it is in."""
    if not topology.cards.are_shared:
        return rows[:1]
    mine = np.unique(topology.node_of[rows[0]])
    return rows[np.isin(topology.node_of[rows], mine).any(axis=1)]
