"""What attention over a sequence that ranks share sends, and how much of that is seen."""

from __future__ import annotations

from collections.abc import Mapping

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
    """Of one attention, of which each rank has such queries, keys and values. Ring: one step after the other."""
    n = group.size
    here = float(key.nbytes + value.nbytes)
    gather = collective_time("all_gather", n * here, group)
    if algorithm != "ring":
        return gather, gather + collective_time("reduce_scatter", n * here, group)
    steps = ring_steps(query.shape[-2], key.shape[-2], n, zigzag, seen)
    share = (len(steps) - 1) / (n - 1)
    hop = gather / (n - 1)
    wide = max(1.0, _WIDE_BYTES / key.dtype.itemsize)
    back = hop * wide if steps[-1] else 0.0  # the gradients' way home
    return gather * share, gather * share * (1 + wide) + back


def context_exchanges(node: fx.Node, groups: Mapping[str, Group]) -> tuple[Seconds, bool]:
    """Seconds of what a node of a local graph sends, and whether that runs beside its computation."""
    group = groups.get(argument(node, "axis", "")) if collective_name(node.target) in CONTEXT else None
    if group is None or group.size == 1:
        return (0.0, 0.0), False
    query, key, value = (Operand(tuple(o.meta["val"].shape), o.meta["val"].dtype) for o in node.all_input_nodes[:3])
    algorithm, zigzag = argument(node, "algorithm"), argument(node, "zigzag")
    seconds = exchange_seconds(query, key, value, band(node) or Band(), algorithm, zigzag, group)
    return seconds, algorithm == "ring"
