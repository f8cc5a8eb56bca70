"""Describe a communication group of ranks: the links that its collectives use, and their bandwidth and latency.

A direct link between two devices (``PairLink``) replaces the link that a level or the pattern of the node gives the
pair. Fields that a file leaves out keep the values of the replaced link: the latency, the fraction of the bandwidth
that collectives reach, and the ratio of a collective's step to the latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partitioner.passes.ir.hashing import hashed_once
from partitioner.topology.fabric import Floats
from partitioner.topology.hardware import Hop, Level, Link, LinkOverride, Measured, Pattern

if TYPE_CHECKING:
    from partitioner.topology.topology import Topology

_POST_S = 1e-6  # seconds to post one send and one receive

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Tier:
    """One level of links inside a communication group of ranks. The links of ``level`` connect ``ways`` parts of the
    group with each other. Each part has ``below`` ranks, which are connected by levels further inside."""

    level: Level
    ways: int
    below: int


@hashed_once
@dataclass(frozen=True)
class Group:
    """Ranks that run collectives together, described by their number ``size`` and the links between them.

    ``tiers``: the levels of links, from the innermost. ``cap``: upper limit in bytes/s of collectives that run as
    rings, from the slowest direct link that a ring must use. ``ring``: upper limit in bytes/s of an all-reduce on
    devices that run it as a single ring through all ranks.

    Three fields describe direct links that the topology gives for single pairs of devices. ``lag``: additional seconds
    of a round of a ring because of these links. ``pair_cap`` and ``pair_lag``: bytes/s of the slowest of these links,
    and the greatest additional seconds of one of them, both for an all-to-all, which has to use the link of every pair.

    ``hops``: the latency and bandwidth of messages to the rank that is 1, 2, ... positions further in a ring; empty if
    the order of the ranks is not known. ``others``: further groups of the same mesh axis, each slower than this one for
    some collective and size. All groups of an axis run at the same time, so a step waits for the slowest.
    """

    size: int
    tiers: tuple[Tier, ...] = ()
    cap: float = math.inf
    ring: float = math.inf
    lag: float = 0.0
    pair_cap: float = math.inf
    pair_lag: float = 0.0
    hops: tuple[Hop, ...] = ()
    others: tuple[Group, ...] = ()

    @cached_property
    def every(self) -> tuple[Group, ...]:
        """Return this group without its ``others`` (further groups of the same mesh axis), followed by each of the
        ``others``."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    @cached_property
    def bus_bandwidth(self) -> float:
        """Return the bandwidth in bytes/s at which a ring moves data through each rank.

        If the group uses a single level of links, and collectives over it were measured, the result comes from the
        measurements. Otherwise it is the least bandwidth over the levels, as in NCCL's ring, ``min(intra g / (g - 1),
        nic g)``, with ``intra`` the bandwidth inside a node and ``nic`` that of a network card: each of the ``g`` ranks
        of a part uses its own outward link.
        """
        if self.size == 1:
            return math.inf
        first = self.tiers[0]
        if len(self.tiers) == 1:
            return min(self.cap, measured_ring(first.level, self.size)[1])
        inner = measured_ring(first.level, first.ways)[1] * first.ways / max(1, first.ways - 1)
        outer = [t.level.bandwidth * t.level.efficiency * t.below for t in self.tiers[1:]]
        return min(self.cap, inner, *outer)

    @property
    def all_reduce_bandwidth(self) -> float:
        """Return the bandwidth in bytes/s at which an all-reduce over this group moves data through each rank."""
        return min(self.bus_bandwidth, self.ring)

    @cached_property
    def all_reduce_start(self) -> float:
        """Return the seconds of an all-reduce of zero bytes: the measured value or, if there is none, the shorter of
        the times of a ring and of a tree."""
        if self.size == 1:
            return 0.0
        if len(self.tiers) == 1 and self.tiers[0].level.all_reduce:
            return measured_ring(self.tiers[0].level, self.size)[0] + 2 * self.lag
        return self.base + min(self._ring_steps(2), self._tree_steps()) + 2 * self.lag

    @cached_property
    def one_way_start(self) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of zero bytes. Both take half of the steps of an
        all-reduce."""
        if self.size == 1:
            return 0.0
        if len(self.tiers) == 1 and self.tiers[0].level.all_reduce:
            return max(self.base + self.lag, (self.base + self.all_reduce_start) / 2)
        return self.base + self._ring_steps(1) + self.lag

    def measured(self, op: str) -> tuple[float, float] | None:
        """Return (start-up seconds, bandwidth in bytes/s through each rank) of a collective over this group, from
        measurements. Return ``None`` if it was not measured, or if the group spans several levels of links. ``op``:
        name of the collective, such as ``all_gather``."""
        table = getattr(self.tiers[0].level, op, ()) if len(self.tiers) == 1 else ()
        if not table:
            return None
        start, bandwidth = _interpolate_measured(table, self.size, self.tiers[0].level.step_s)
        if op == "all_to_all":  # one of ``size - 1`` pieces goes over the slowest pair's link
            return start + self.pair_lag, min((self.size - 1) * self.pair_cap, bandwidth)
        return start + self.lag, min(self.cap, bandwidth)

    @cached_property
    def exchange_slope(self) -> float:
        """Return the seconds per byte of an all-to-all. The bytes are counted over all ranks: with ``n`` ranks, each
        rank holds ``1 / n`` of the bytes and sends ``1 / n`` of its own to each other rank. The levels of links
        transfer at the same time."""
        slowest, reached = 1 / self.pair_cap, 1
        for tier in self.tiers:
            here = reached * tier.ways
            slowest = max(slowest, (here - reached) / (tier.level.bandwidth * tier.level.efficiency))
            reached = here
        return slowest / self.size**2

    @cached_property
    def prices(self) -> tuple[float, ...]:
        """Return a tuple of numbers that determine the time of all communication in this group: the start-up seconds
        and the seconds per byte of each collective, and the latency and seconds per byte of each ring hop. A group is
        at least as fast as another if none of its numbers is greater."""
        found = [self.all_reduce_start, 1 / self.all_reduce_bandwidth]
        for op in ("all_gather", "reduce_scatter"):
            start, bandwidth = self.measured(op) or (self.one_way_start, self.bus_bandwidth)
            found += [start, 1 / bandwidth]
        found += [price for hop in self.hops for price in (hop.latency, 1 / hop.bandwidth)]
        exchange = self.measured("all_to_all")
        if exchange is not None:
            return *found, exchange[0], (self.size - 1) / self.size**2 / exchange[1]
        return *found, self.exchange_start, self.exchange_slope

    def hop(self, places: int) -> Hop:
        """Return the latency and bandwidth of a step in which each rank sends a message to the rank ``places``
        positions further in the ring, all at the same time; a negative number means backward.

        If the order of the ranks is not known, the result has the greatest latency and the least bandwidth of the
        group's levels of links.
        """
        places %= self.size
        if not places:
            return Hop(0.0, math.inf)
        if self.hops:
            return self.hops[min(places, self.size - places) - 1]
        levels = [tier.level for tier in self.tiers]
        return Hop(max(level.latency for level in levels), min(level.bandwidth for level in levels))

    @property
    def exchange_start(self) -> float:
        """Return the seconds of an all-to-all of zero bytes: one step of each level of links, and the time to post a
        message to each other rank."""
        if self.size == 1:
            return 0.0
        return self.base + sum(t.level.step_s for t in self.tiers) + (self.size - 1) * _POST_S + self.pair_lag

    @property
    def base(self) -> float:
        """Return the greatest number of seconds that one of the group's levels of links takes to start a collective."""
        return max((t.level.base for t in self.tiers), default=0.0)

    def _ring_steps(self, rounds: int) -> float:
        """Return the total seconds that a ring algorithm spends on the latency of its steps, without the time to move
        data. For two levels of links, NCCL's model is ``(steps - outer steps) intra + outer steps net``, where
        ``intra`` and ``net`` are the seconds of a step inside a node and between nodes. Here it is extended to any
        number of levels. ``rounds``: how often data goes around the ring (2 for an all-reduce, 1 for an all-gather)."""
        seconds, counted = 0.0, 0
        for k in range(len(self.tiers) - 1, 0, -1):
            parts = math.prod(t.ways for t in self.tiers[k:])
            steps = max(0, rounds * parts - counted)
            seconds += steps * self.tiers[k].level.step_s
            counted += steps
        inner = max(0, rounds * (self.size - 1) - counted)
        return seconds + inner * self.tiers[0].level.step_s

    def _tree_steps(self) -> float:
        """Return the total seconds of the steps of a tree all-reduce, without the time to move data: ``2 ((ranks inside
        - 1) intra + log2(parts) net)``. This is a chain inside each part of the group, and a tree between parts.
        ``intra`` and ``net`` are the seconds of a step inside a part and between parts."""
        inside, *outside = self.tiers
        seconds = (inside.ways - 1) * inside.level.step_s
        seconds += sum(math.log2(t.ways) * t.level.step_s for t in outside)
        return 2 * seconds


def select_slowest_group(groups: Iterable[Group]) -> Group:
    """Return the slowest of ``groups``, which communicate at the same time: the group with the least bandwidth. Its
    field ``others`` lists the groups that may be slower than it for some collective and size, such as small messages.
    """
    every = sorted(
        dict.fromkeys(each for group in groups for each in group.every),
        key=lambda g: (g.bus_bandwidth, -g.all_reduce_start),
    )
    kept: list[Group] = []
    for group in every:
        if not any(_no_faster(other, group) for other in kept):
            kept.append(group)
    return replace(kept[0], others=tuple(kept[1:])) if len(kept) > 1 else kept[0]


def _no_faster(group: Group, other: Group) -> bool:
    """Return whether each collective over ``group`` takes at least as long as over ``other``, up to rounding errors."""
    return all(own * (1 + _ROUNDING) >= its for own, its in zip(group.prices, other.prices, strict=True))


def measured_ring(level: Level, size: int) -> tuple[float, float]:
    """Return (start-up seconds, bandwidth in bytes/s through each rank) of an all-reduce over ``size`` ranks that the
    links ``level`` connect. The values are interpolated in the measurements of ``level``. If ``level`` has no
    measurements, they are computed from its latency and bandwidth."""
    if not level.all_reduce:
        return level.base + 2 * (size - 1) * level.step_s, level.bandwidth * level.efficiency
    return _interpolate_measured(level.all_reduce, size, 2 * level.step_s)


def _interpolate_measured(table: Measured, size: int, step_s: float) -> tuple[float, float]:
    """Return (start-up seconds, bandwidth in bytes/s through each rank) of a collective over ``size`` ranks,
    interpolated linearly between measurements. Above the largest measured number of ranks, each further rank adds
    ``step_s`` seconds to the start-up. ``table``: rows of (ranks, start-up seconds, bandwidth in bytes/s)."""
    sizes = [n for n, _, _ in table]
    start = np.interp(size, sizes, [a for _, a, _ in table]) + max(0, size - sizes[-1]) * step_s
    return float(start), float(np.interp(size, sizes, [b for _, _, b in table]))


Pair = tuple[int, int]

_TABLES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # collective -> rounds of its ring


@dataclass(frozen=True)
class PairLink:
    """A direct link that the topology gives for one pair of devices, with its parameters for collectives. It replaces
    the link that the pair would have otherwise, from a level of links or from the pattern of direct links of its node.

    ``link``: bandwidth and latency. ``reached``: bytes/s of large collectives. ``step``: seconds of one step of a
    collective. ``more``: seconds by which a step is longer than over the replaced link. ``base``: seconds to start a
    collective. ``as_level``: whether collectives reach the same fraction of the bandwidth as over the replaced link,
    because the topology gives no fraction for the direct link.
    """

    link: Link
    reached: float
    step: float
    more: float
    base: float
    as_level: bool


def single_links(topology: Topology) -> dict[Pair, PairLink]:
    """Return the direct links that the field ``links`` of ``topology`` gives for single pairs of devices. The keys are
    pairs of device indices (smaller, larger)."""
    found = {}
    for link in topology.links:
        i, j = sorted(topology.index[name] for name in link.between)
        found[i, j] = _build_pair_link(link, _find_connecting_level(topology, i, j))
    return found


def _build_pair_link(link: LinkOverride, plain: Level | Pattern | None) -> PairLink:
    """Return the direct link ``link`` of a pair of devices with its parameters for collectives. ``plain``: the replaced
    link, which gives the values that ``link`` leaves out; ``None`` if there is none."""
    latency = link.latency if link.latency is not None else plain.latency if plain else 0.0
    efficiency = link.efficiency or (plain.efficiency if plain else 1.0)
    step = step_over(latency, plain)
    return PairLink(
        Link(name=" - ".join(link.between), bandwidth=link.bandwidth, latency=latency, level=-1),
        reached=link.bandwidth * efficiency,
        step=step,
        more=max(0.0, step - plain.step_s) if plain else 0.0,
        base=plain.base if plain else 0.0,
        as_level=plain is not None and link.efficiency is None,
    )


def _find_connecting_level(topology: Topology, i: int, j: int) -> Level | Pattern | None:
    """Return the links of ``topology`` that connect the devices ``i`` and ``j`` (indices) apart from a direct link of
    this single pair: a level of links, or the pattern of direct links of their node. Return ``None`` if nothing else
    connects them."""
    kind = int(topology.pattern_of[i])
    if kind >= 0 and topology.node_of[i] == topology.node_of[j]:
        name, matrix = topology.pattern_kinds[kind]
        if matrix[topology.place_of[i], topology.place_of[j]]:
            return topology.patterns[name]
    joining = (level for level, groups in zip(topology.levels, topology.groups, strict=True) if groups[i] == groups[j])
    return next(joining, None)


def step_over(latency: float, plain: Level | Pattern | None) -> float:
    """Return the seconds of one step of a collective over a direct link of two devices, without the time to move data.
    ``latency``: seconds of one message over the direct link. ``plain``: the links that the direct link replaces, or
    ``None`` if it replaces none; the step then takes ``latency``. If ``latency`` is greater than the latency of
    ``plain``, the difference is added to the step of ``plain``. If it is smaller, the step is shortened in proportion.
    """
    if plain is None:
        return latency
    faster = latency / plain.latency if latency < plain.latency else 1.0
    return plain.step_s * faster + max(0.0, latency - plain.latency)


def level_like(plain: Level, bandwidth: float, latency: float, step: float) -> Level:
    """Return a copy of the links ``plain`` with other values. ``bandwidth``: in bytes/s. ``latency``: seconds of one
    message. ``step``: seconds of one step of a collective. If ``plain`` has measurements of collectives, they are
    scaled by the ratio of the bandwidths, and the step is at least as long as that of ``plain``."""
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
    if any(tables.values()):  # a step may not be faster than in the measurements
        step = max(step, plain.step_s)
    own = {"name": "own", "bandwidth": bandwidth, "latency": latency, "step": step}
    return plain.model_copy(update=own | tables)


def singles_among(topology: Topology, devices: Sequence[int]) -> dict[Pair, PairLink]:
    """Return the direct links that ``topology`` gives for single pairs among the devices with the indices ``devices``.
    The keys are pairs of positions in ``devices``."""
    place = {device: k for k, device in enumerate(devices)}
    known = topology.singles
    if len(known) < len(devices) ** 2:
        return {(place[i], place[j]): own for (i, j), own in known.items() if i in place and j in place}
    pairs = ((min(i, j), max(i, j)) for i in devices for j in devices if i < j)
    return {(place[i], place[j]): known[i, j] for i, j in pairs if (i, j) in known}


def matrix_of(values: Mapping[Pair, float], size: int) -> Floats:
    """Return a symmetric matrix of shape ``[size, size]``. ``values``: (row, column) -> entry, once for each pair.
    Entries without a value are 0."""
    matrix = np.zeros((size, size))
    for (i, j), value in values.items():
        matrix[i, j] = matrix[j, i] = value
    return matrix


def narrowest_needed(rates: Floats) -> float:
    """Return the greatest bandwidth in bytes/s that a ring through all devices can have: the largest number for which
    the links with at least this bandwidth form a biconnected graph, that is, a graph that stays connected if any single
    device is removed.

    ``rates``: bytes/s of each pair of devices, shape ``[n, n]``; infinite for pairs without a limit.
    """
    import networkx as nx

    apart = ~np.eye(len(rates), dtype=bool)
    for limit in np.unique(rates[apart])[::-1].tolist():
        if nx.is_biconnected(nx.from_numpy_array((rates >= limit) & apart)):
            return float(limit)
    raise AssertionError("all devices reach each other")


def round_lag(more: Floats, allowed: NDArray[np.bool_]) -> float:
    """Return how many seconds longer one round of a ring takes because of slow pairs of devices. ``more``: additional
    seconds of a message between each pair, shape ``[n, n]``. ``allowed``: mask of the pairs that the ring may use, same
    shape.

    The result is a lower bound: a path through all devices is at least as long as the minimum spanning tree, and one
    more message closes the ring. A round has one message less than the ring has links, so the message with the least
    additional seconds is left out.
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
