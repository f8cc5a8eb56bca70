"""Compute the communication group of a set of devices, and the latency and bandwidth of ring neighbours in it.

``group_of`` builds a group from levels of links, from the innermost, and from direct links of single pairs.

In a hop of a ring, every rank sends a message to the rank a fixed number of positions further, all at the same time. A
hop lasts as long as its slowest pair. Pairs inside a node use their own links. Pairs on different nodes use one network
card each, which they share with the other pairs of all groups that use it in the same hop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from partitioner.topology.fabric import Ints, Storey, inside_levels, least_cut, least_share, links_at_once
from partitioner.topology.group import (
    Group,
    Pair,
    PairLink,
    Tier,
    level_like,
    matrix_of,
    narrowest_needed,
    round_lag,
    singles_among,
)
from partitioner.topology.hardware import Hop, Level
from partitioner.topology.topology import Topology

_RINGS_FOUND = 64  # devices of a group; in larger groups, rings are assumed to avoid slow links of single pairs

_MOST_KEPT = 1 << 16  # groups with links of single pairs that are cached


def group_of(topology: Topology, devices: Ints) -> Group:
    """Return the communication group of the devices with the indices ``devices``, shape ``[size]``. It uses the levels
    of links or, if that is faster, direct links of single pairs. Results with direct links are cached in ``topology``.
    """
    if not topology.own_links:
        return _level_group(topology, devices)
    key = np.sort(devices).tobytes()
    known = topology.linked_groups
    if key not in known:
        if len(known) >= _MOST_KEPT:
            known.clear()
        known[key] = _linked_group(topology, devices)
    return known[key]


def _linked_group(topology: Topology, devices: Ints) -> Group:
    """Return the communication group of the devices with the indices ``devices`` in ``topology``. Direct links of
    single pairs of these devices are taken into account. If these links alone connect all devices, and a ring over them
    is faster than over the levels of links, the group uses only them."""
    size, plain = len(devices), _level_group(topology, devices)
    singles = singles_among(topology, devices.tolist())
    if not singles:
        return plain
    import networkx as nx

    joined: nx.Graph[int] = nx.Graph(list(singles))
    joins_all = len(joined) == size and nx.is_connected(joined)
    if len(singles) == size * (size - 1) // 2:  # all pairs have links of their own
        return _over_singles(plain, singles)
    groups = [_past_singles(plain, singles), *([_over_singles(plain, singles)] if joins_all else [])]
    return max(groups, key=lambda group: group.bus_bandwidth)


def _past_singles(group: Group, singles: Mapping[Pair, PairLink]) -> Group:
    """Return a copy of ``group``, which was built from levels of links, with the limits that slow direct links between
    single pairs impose. A ring avoids these links as far as possible; an all-to-all must use all of them. ``singles``:
    the direct links of single pairs of devices, by pair of positions in the group."""
    size, every = group.size, singles.values()
    group = replace(group, pair_cap=min(own.reached for own in every), pair_lag=max(own.more for own in every))
    if size > _RINGS_FOUND:
        return group
    rates = matrix_of({pair: own.reached for pair, own in singles.items()}, size)
    rates[rates == 0] = math.inf
    cap = narrowest_needed(rates)
    if math.isinf(cap):
        return group
    more = matrix_of({pair: own.more for pair, own in singles.items()}, size)
    return replace(group, cap=cap, lag=round_lag(more, (rates >= cap) & ~np.eye(size, dtype=bool)))


def _over_singles(plain: Group, singles: Mapping[Pair, PairLink]) -> Group:
    """Return a communication group that uses only direct links of single pairs, which must connect all of its devices.
    ``plain``: the group of the same devices over levels of links. ``singles``: the direct links, by pair of positions
    in the group. A direct link for which the topology gives no efficiency has the efficiency of the link that it
    replaces."""
    size, every = plain.size, list(singles.values())
    step, latency = min(own.step for own in every), max(own.link.latency for own in every)
    if len(plain.tiers) == 1 and all(own.as_level for own in every):
        rate = least_cut(matrix_of({pair: own.link.bandwidth for pair, own in singles.items()}, size))
        level = level_like(plain.tiers[0].level, rate, latency, step)
    else:
        rate = least_cut(matrix_of({pair: own.reached for pair, own in singles.items()}, size))
        base = max(own.base for own in every)
        level = Level.model_construct(name="own", bandwidth=rate, latency=latency, step=step, base=base)
    more = matrix_of({pair: max(0.0, own.step - level.step_s) for pair, own in singles.items()}, size)
    allowed = matrix_of(dict.fromkeys(singles, 1.0), size) > 0
    return Group(
        size,
        (Tier(level, size, 1),),
        lag=round_lag(more, allowed),
        pair_cap=min(own.reached for own in every),
        pair_lag=float(more.max()),
    )


def spread_of(ids: Ints) -> tuple[Ints, Ints, Ints]:
    """Return three arrays with one number for each row of ``ids``: the number of distinct ids in the row, the count of
    the rarest id, and the count of the most frequent id. ``ids``: for each device of a communication group (a row), the
    number of the part, such as a node, to which it belongs, shape ``[rows, size]``."""
    ordered = np.sort(ids, axis=1)
    place = np.arange(ids.shape[1])
    starts = np.ones(ids.shape, dtype=bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    ends = np.ones(ids.shape, dtype=bool)
    ends[:, :-1] = starts[:, 1:]
    length = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1) + 1
    fewest = np.where(ends, length, ids.shape[1] + 1).min(axis=1)
    return starts.sum(axis=1), fewest, length.max(axis=1)


def _level_group(topology: Topology, devices: Ints) -> Group:
    """Return the communication group of the devices with the indices ``devices`` in ``topology`` over the levels of
    links, without direct links of single pairs. If no level connects all of these devices, the outermost tier of the
    group stands for routes over other devices."""
    size = len(devices)
    tiers: list[Tier] = []
    ring = math.inf
    parts, below, ids = size, 1, devices
    for storey in topology.storeys:
        joined = storey.joined[devices]
        count, fewest, _ = (int(column[0]) for column in spread_of(joined[None]))
        if count < parts:
            share = 1.0
            if storey.shares is not None:
                share = float(least_share(ids[None], storey.shares[devices][None])[0]) / below
            links = _storey_level(topology, storey, devices)
            level = links.shared(share)
            if topology.single_ring and tiers:
                ring = min(ring, links.bandwidth * links.efficiency)
            tiers.append(Tier(level, math.ceil(parts / count), below))
            parts, below, ids = count, fewest, joined
    if parts > 1:  # no level joins them all: they reach each other over other devices
        bandwidth, latency = topology.links_between(devices)
        for (i, j), own in singles_among(topology, devices.tolist()).items():
            bandwidth[i, j] = bandwidth[j, i] = own.reached
        routed = Level.model_construct(
            name="routed", bandwidth=narrowest_needed(bandwidth), latency=float(latency.max())
        )
        tiers.append(Tier(routed, parts, below))
    return Group(size, tuple(tiers), ring=ring)


def _storey_level(topology: Topology, storey: Storey, ranks: Ints) -> Level:
    """Return the slowest of the levels in ``storey`` (all links at one depth) that connect at least two of the devices
    with the indices ``ranks`` in ``topology``."""
    if not storey.levels:
        (inside,) = inside_levels(topology, ranks[None])
        assert inside is not None
        return inside
    used = [n for n in storey.levels if len(np.unique(topology.groups[n][ranks])) < len(ranks)]
    return min(
        (topology.levels[n] for n in used or storey.levels), key=lambda level: level.bandwidth * level.efficiency
    )


def ring_hops(topology: Topology, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the latency (s) and the bandwidth (bytes/s) of messages around rings, when all ranks send at the same
    time. Both have the shape ``[groups, size // 2]``; column ``k`` is the slowest message to the rank ``k + 1``
    positions further. Messages to the rank as many positions back take equally long, so larger distances are not
    needed.

    ``topology``: the devices and their links. ``rows``: the device indices of groups that communicate at the same time,
    in ring order, shape ``[groups, size]``.
    """
    latencies, bandwidths = [], []
    for places in range(1, rows.shape[1] // 2 + 1):
        bandwidth, latency = links_at_once(topology, rows.reshape(1, -1), np.roll(rows, -places, 1).reshape(1, -1))
        latencies.append(latency.reshape(rows.shape).max(axis=1))
        bandwidths.append(bandwidth.reshape(rows.shape).min(axis=1))
    return np.stack(latencies, axis=1), np.stack(bandwidths, axis=1)


def hops_of(latencies: NDArray[np.float64], bandwidths: NDArray[np.float64]) -> tuple[Hop, ...]:
    """Return one ``Hop`` (latency, bandwidth) for each distance in a ring. Entry ``k`` of both arguments is for
    messages to the rank ``k + 1`` positions further around the ring. ``latencies``: seconds. ``bandwidths``: bytes/s.
    """
    return tuple(map(Hop, latencies.tolist(), bandwidths.tolist()))


def select_card_neighbours(topology: Topology, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the groups that matter for the speed of the first of ``rows``: this group itself, and all groups that have
    a device on one of its nodes and may therefore share a network card with it. ``rows``: device indices in
    ``topology``, one communication group per row."""
    if not topology.cards.are_shared:
        return rows[:1]
    mine = np.unique(topology.node_of[rows[0]])
    return rows[np.isin(topology.node_of[rows], mine).any(axis=1)]
