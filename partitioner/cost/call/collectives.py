"""Seconds of collectives and messages: start-up plus size over bandwidth (alpha-beta), by the levels a group spans.

``num_bytes`` is always the size of the whole tensor: the result of an all-gather, the operand of a reduce-scatter, the
tensors of all ranks of an all-to-all together. A ring moves ``2 (n - 1) / n`` of it through each rank for an all-reduce
and half of that for an all-gather or a reduce-scatter (Thakur et al. 2005; nccl-tests, PERFORMANCE.md).

``exchange_seconds`` gives the communication of attention over a sequence that is sharded over ranks, and
``context_exchanges`` that of a graph node, and whether it runs beside the node's computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from torch import fx

from partitioner.cost.call.operators import Operand
from partitioner.passes.ir.collectives import CONTEXT, collective_name
from partitioner.passes.ops.attention import Band, ring_steps
from partitioner.passes.rules.attention import find_attention_band
from partitioner.passes.rules.factors import get_node_argument
from partitioner.topology.group import Group
from partitioner.topology.hardware import Link

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


Seconds = tuple[float, float]  # forward and backward

_WIDE_BYTES = 4  # gradients of narrow types travel in float32


def exchange_seconds(
    query: Operand, key: Operand, value: Operand, seen: Band, algorithm: str, zigzag: bool, group: Group
) -> Seconds:
    """Seconds of the exchanges of one attention, of which each rank has such queries, keys and values. A ring's hops
    come one after the other, each as long as that of its slowest pair of ranks."""
    if group.others:
        each = (exchange_seconds(query, key, value, seen, algorithm, zigzag, one) for one in group.every)
        forward, backward = zip(*each, strict=True)
        return max(forward), max(backward)
    here = float(key.nbytes + value.nbytes)
    if algorithm != "ring":
        gather = collective_time("all_gather", group.size * here, group)
        return gather, gather + collective_time("reduce_scatter", group.size * here, group)
    steps = ring_steps(query.shape[-2], key.shape[-2], group.size, zigzag, seen)
    wide = here * max(1.0, _WIDE_BYTES / key.dtype.itemsize)
    counts = Counter(after - before for before, after in pairwise(steps))
    forward_s = sum(count * group.hop(places).time(here) for places, count in counts.items())
    behind = sum(count * group.hop(places).time(wide) for places, count in counts.items())  # gradients, backward
    home = group.hop(-steps[-1]).time(wide)  # their way back to where keys and values are from
    return forward_s, forward_s + behind + home


def context_exchanges(node: fx.Node, groups: Mapping[str, Group]) -> tuple[Seconds, bool]:
    """Seconds of what a node of a local graph sends, and whether that runs beside its computation."""
    group = groups.get(get_node_argument(node, "axis", "")) if collective_name(node.target) in CONTEXT else None
    if group is None or group.size == 1:
        return (0.0, 0.0), False
    query, key, value = (Operand(tuple(o.meta["val"].shape), o.meta["val"].dtype) for o in node.all_input_nodes[:3])
    algorithm, zigzag = get_node_argument(node, "algorithm"), get_node_argument(node, "zigzag")
    seconds = exchange_seconds(query, key, value, find_attention_band(node) or Band(), algorithm, zigzag, group)
    return seconds, algorithm == "ring"
