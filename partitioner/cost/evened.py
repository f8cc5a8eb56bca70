"""A cluster as it would be if all of its devices were as good as the best, and its nodes had their links to others in
any order: no plan is slower there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from partitioner.cost.relaxed import best_type
from partitioner.topology.model import Topology
from partitioner.topology.parts import NodeGroup, NodeOverride

BEST = "best"  # the kind of all devices
_MOST = 30  # orders of nodes that are told apart


def evened(topology: Topology) -> list[Topology]:
    """``topology`` with devices that are all alike, one for each order of its nodes; of many orders one whose nodes all
    have the links that the best two leave each other. Empty where nodes have different numbers of devices or network
    cards, or links that single pairs or kinds of nodes have."""
    nodes, levels = topology.nodes, topology.levels
    shapes = {(group.devices, group.pattern, group.concurrent, group.num_cards) for group in nodes}
    if len(shapes) > 1 or topology.own_links or any(level.only for level in levels):
        return []
    paces, _ = topology.paces
    least = min(topology.types[name].communicator for name, _ in paces)
    kind = best_type([topology.paced_type(*pace) for pace in paces]).model_copy(
        update={"memory": int(topology.usable.max()), "reserved": 0, "communicator": least}
    )
    one = nodes[0]
    node = NodeGroup(
        type=BEST,
        devices=one.devices,
        count=topology.num_nodes,
        concurrent=one.concurrent,
        pattern=one.pattern,
        nics=one.nics,
    )
    shares = _shares(topology)
    if _num_orders(shares) > _MOST or any((level.nodes or 1) > 1 for level in levels):
        shares = [sorted(shares)[-min(2, len(shares))]] * len(shares)
    return [
        Topology(
            name=f"{topology.name}, evened",
            nodes=(node,),
            types={BEST: kind},
            levels=levels,
            patterns=topology.patterns,
            node_overrides={n: NodeOverride(network=share) for n, share in enumerate(order) if share < 1},
        )
        for order in _orders(shares)
    ]


def _shares(topology: Topology) -> list[float]:
    """The fraction, for each node, of the bandwidth to others that its best device is left with."""
    best = np.zeros(topology.num_nodes)
    np.maximum.at(best, topology.node_of, topology.cards.left)
    found: list[float] = best.tolist()
    return found


def _num_orders(shares: Sequence[float]) -> int:
    if len(set(shares)) == 1:
        return 1
    if len(shares) > 2 * _MOST:
        return _MOST + 1
    return math.factorial(len(shares)) // math.prod(math.factorial(n) for n in Counter(shares).values())


def _orders(shares: Sequence[float]) -> Iterator[tuple[float, ...]]:
    """All orders of ``shares``, of which some are equal."""
    if not shares:
        yield ()
    for first in sorted(set(shares), reverse=True):
        rest = list(shares)
        rest.remove(first)
        yield from ((first, *others) for others in _orders(rest))


__all__ = ["BEST", "evened"]
