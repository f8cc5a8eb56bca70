"""Links that single pairs of devices have of their own, and what collectives make of them.

Such a link stands in place of what the levels (or the pattern of the node) give the pair. What a file does not say of
it is as there: the latency, the part of the bandwidth that collectives reach, how much of the latency a step takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partitioner.topology.fabric import Floats
from partitioner.topology.parts import Level, Link, LinkOverride, Pattern

if TYPE_CHECKING:
    from partitioner.topology.model import Topology

Pair = tuple[int, int]
_TABLES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # rounds of a ring


@dataclass(frozen=True)
class Single:
    """``reached``: bytes/s of large collectives; ``step``: seconds of a step of one, ``more`` than over what the link
    stands for; ``base``: seconds to start one; ``as_level``: whether it is as efficient as that."""

    link: Link
    reached: float
    step: float
    more: float
    base: float
    as_level: bool


def single_links(topology: Topology) -> dict[Pair, Single]:
    """By (smaller, larger) index."""
    found = {}
    for link in topology.links:
        i, j = sorted(topology.index[name] for name in link.between)
        found[i, j] = _single(link, _in_place_of(topology, i, j))
    return found


def _single(link: LinkOverride, plain: Level | Pattern | None) -> Single:
    latency = link.latency if link.latency is not None else plain.latency if plain else 0.0
    efficiency = link.efficiency or (plain.efficiency if plain else 1.0)
    step = step_over(latency, plain)
    return Single(
        Link(name=" - ".join(link.between), bandwidth=link.bandwidth, latency=latency, level=-1),
        reached=link.bandwidth * efficiency,
        step=step,
        more=max(0.0, step - plain.step_s) if plain else 0.0,
        base=plain.base if plain else 0.0,
        as_level=plain is not None and link.efficiency is None,
    )


def _in_place_of(topology: Topology, i: int, j: int) -> Level | Pattern | None:
    """What two devices would talk over; ``None`` where nothing else joins them."""
    kind = int(topology.pattern_of[i])
    if kind >= 0 and topology.node_of[i] == topology.node_of[j]:
        name, matrix = topology.pattern_kinds[kind]
        if matrix[topology.place_of[i], topology.place_of[j]]:
            return topology.patterns[name]
    joining = (level for level, groups in zip(topology.levels, topology.groups, strict=True) if groups[i] == groups[j])
    return next(joining, None)


def step_over(latency: float, plain: Level | Pattern | None) -> float:
    """Seconds of a step over a link of another ``latency`` than ``plain``: what a message takes longer, a step does."""
    if plain is None:
        return latency
    faster = latency / plain.latency if latency < plain.latency else 1.0
    return plain.step_s * faster + max(0.0, latency - plain.latency)


def level_like(plain: Level, bandwidth: float, latency: float, step: float) -> Level:
    """``plain`` with another ``bandwidth`` and ``step``, and all that was measured over it scaled to them."""
    scale, more = bandwidth / plain.bandwidth, max(0.0, step - plain.step_s)
    rounds = {op: [laps * (n - 1) for n, _, _ in getattr(plain, op)] for op, laps in _TABLES.items()}
    rounds["all_to_all"] = [1] * len(plain.all_to_all)
    tables = {
        op: tuple(
            (n, start + steps * more, rate * scale)
            for steps, (n, start, rate) in zip(of_op, getattr(plain, op), strict=True)
        )
        for op, of_op in rounds.items()
    }
    if any(tables.values()):  # what was measured may be no faster than it was
        step = max(step, plain.step_s)
    own = {"name": "own", "bandwidth": bandwidth, "latency": latency, "step": step}
    return plain.model_copy(update=own | tables)


def singles_among(topology: Topology, devices: Sequence[int]) -> dict[Pair, Single]:
    """The single links between ``devices``, by their places there."""
    place = {device: k for k, device in enumerate(devices)}
    known = topology.singles
    if len(known) < len(devices) ** 2:
        return {(place[i], place[j]): own for (i, j), own in known.items() if i in place and j in place}
    pairs = ((min(i, j), max(i, j)) for i in devices for j in devices if i < j)
    return {(place[i], place[j]): known[i, j] for i, j in pairs if (i, j) in known}


def matrix_of(values: Mapping[Pair, float], size: int) -> Floats:
    """``values`` of pairs, shape ``[size, size]``, 0 for the others."""
    matrix = np.zeros((size, size))
    for (i, j), value in values.items():
        matrix[i, j] = matrix[j, i] = value
    return matrix


def narrowest_needed(rates: Floats) -> float:
    """The most bytes/s at which a ring may pass through all devices: that of links that leave no device cut off.

    ``rates``: of each pair; infinite where it sets no limit.
    """
    import networkx as nx

    apart = ~np.eye(len(rates), dtype=bool)
    for limit in np.unique(rates[apart])[::-1].tolist():
        if nx.is_biconnected(nx.from_numpy_array((rates >= limit) & apart)):
            return float(limit)
    raise AssertionError("all devices reach each other")


def round_lag(more: Floats, allowed: NDArray[np.bool_]) -> float:
    """Seconds that a round of a ring over ``allowed`` pairs takes longer, where a hop takes as much ``more``.

    The ring is a path through all, no shorter than the least spanning tree, and one hop that closes it, which takes
    what leaves no device cut off. A round has one hop less than the ring. (Where there is no ring, it turns back.)
    """
    import networkx as nx

    graph: nx.Graph[int] = nx.Graph()
    graph.add_weighted_edges_from((i, j, more[i, j]) for i, j in np.argwhere(np.triu(allowed, 1)).tolist())
    hops = [data["weight"] for _, _, data in nx.minimum_spanning_edges(graph, data=True)]
    closing = max(hops)
    for limit in np.unique(more[allowed]).tolist():
        if limit >= closing and nx.is_biconnected(nx.from_numpy_array((more <= limit) & allowed)):
            closing = limit
            break
    return math.fsum(sorted([*hops, closing])[1:])
