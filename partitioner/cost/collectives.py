"""Seconds of collectives and messages: start-up plus size over bandwidth (alpha-beta), by the levels a group spans.

``num_bytes`` is always the size of the whole tensor: what an all-gather gives, what a reduce-scatter takes, what all
ranks of an all-to-all hold together. A ring moves ``2 (n - 1) / n`` of it through each rank for an all-reduce and half
of that for an all-gather or a reduce-scatter (Thakur et al. 2005; nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

from partitioner.topology.groups import Group
from partitioner.topology.parts import Link

# How often (n - 1) / n of the whole tensor passes through each rank's links.
_ROUNDS = {"all_reduce": 2, "all_reduce_max": 2, "all_gather": 1, "reduce_scatter": 1}


def collective_time(op: str, num_bytes: float, group: Group) -> float:
    """Seconds of ``op`` over ``group``; 0 in a group of one. Raises ``KeyError`` for an unknown collective."""
    if group.size == 1:
        return 0.0
    if group.others:
        return max(collective_time(op, num_bytes, each) for each in group.every)
    measured = None if op in ("all_reduce", "all_reduce_max") else group.measured(op)
    if measured is not None:
        return measured[0] + moved_share(op, group.size) * num_bytes / measured[1]
    if op == "all_to_all":
        return group.exchange_start + num_bytes * group.exchange_slope
    share = moved_share(op, group.size)
    if _ROUNDS[op] == 2:
        return group.all_reduce_start + share * num_bytes / group.all_reduce_bandwidth
    return group.one_way_start + share * num_bytes / group.bus_bandwidth


def moved_share(op: str, size: int) -> float:
    """The part of the whole tensor that passes through each rank's links: what a bus bandwidth is measured by."""
    return _ROUNDS.get(op, 1 / size) * (size - 1) / size


def dispatch_time(num_bytes: float, group: Group, copies: float) -> float:
    """Seconds of an all-to-all of rows that go to ``copies`` ranks each, any of them, if a row goes to each node (and
    whatever else ``group``'s levels join) once, and from the rank where it comes in to the others there (DeepEP).

    ``num_bytes``: of all copies. Without copies that is :func:`collective_time`'s.
    """
    if group.size == 1:
        return 0.0
    if copies <= 1:
        return collective_time("all_to_all", num_bytes, group)
    if group.others:
        return max(dispatch_time(num_bytes, each, copies) for each in group.every)
    own = num_bytes / group.size / copies
    seconds, reached = 0.0, 1
    for tier in group.tiers:
        parts = group.size / reached
        hit = parts * (1 - (1 - 1 / parts) ** copies)  # of the parts that this level joins, by each row
        rate = min(group.cap, tier.level.bandwidth * tier.level.efficiency)
        seconds = max(seconds, own * hit * (1 - 1 / tier.ways) / rate)
        reached *= tier.ways
    return group.exchange_start + seconds


def message_time(num_bytes: float, link: Link) -> float:
    """Seconds of one message between pipeline stages; nothing is sent for no bytes."""
    return link.time(num_bytes) if num_bytes else 0.0


def link_of_parts(link: Link, size: int, gathering: Group | None) -> Link:
    """``link`` for a message that all of ``size`` ranks have: each sends a part of it to its peer, and the peers gather
    it (Narayanan et al. 2021, section 4.1). ``gathering``: the peers' group; ``None``: they gather at once."""
    latency, per_byte = link.latency, 1 / (size * link.bandwidth)
    if gathering is not None:
        latency += max(group.one_way_start for group in gathering.every)
        per_byte += moved_share("all_gather", size) / gathering.bus_bandwidth
    return link.model_copy(update={"bandwidth": 1 / per_byte, "latency": latency})
