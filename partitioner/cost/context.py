"""What attention over a sequence that ranks share sends, and how much of that is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from torch import fx

from partitioner.cost.collectives import collective_time
from partitioner.cost.operators import Operand
from partitioner.topology.groups import Group
from passes.collectives import CONTEXT, collective_name
from passes.rules.algebra import argument
from passes.rules.attention import band
from passes.tiles import Band, ring_steps

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
    group = groups.get(argument(node, "axis", "")) if collective_name(node.target) in CONTEXT else None
    if group is None or group.size == 1:
        return (0.0, 0.0), False
    query, key, value = (Operand(tuple(o.meta["val"].shape), o.meta["val"].dtype) for o in node.all_input_nodes[:3])
    algorithm, zigzag = argument(node, "algorithm"), argument(node, "zigzag")
    seconds = exchange_seconds(query, key, value, band(node) or Band(), algorithm, zigzag, group)
    return seconds, algorithm == "ring"
