"""On which mesh axes a value differs from rank to rank.

A value that is said to be whole (``R``) on an axis must be the same on all of its ranks. Whether it is follows from the
local graph alone: data and shards differ, what is gathered or reduced is alike again, and an operator's result differs
where one of its operands does. So a collective that is missing, or runs over another axis, is seen without computing
anything. (JAX checks ``shard_map`` the same way.)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from passes.check import axis_of
from passes.collectives import collective_name

Axes = frozenset[str]

_ALIKE = frozenset({"all_gather", "all_reduce", "all_reduce_max"})
_DIFFERENT = frozenset({"reduce_scatter", "shard_slice", "shard_narrow", "shard_pad", "all_to_all", "axis_index"})


def varying_axes(graph: fx.Graph, given: Mapping[str, Axes]) -> dict[str, Axes]:
    """The axes on which each node's value may differ. ``given``: those of the placeholders, by name."""
    result: dict[str, Axes] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            result[node.name] = given.get(node.name, frozenset())
        elif node.op == "call_function":
            varying: Axes = frozenset().union(*(result[n.name] for n in node.all_input_nodes))
            named = axis_of(node)
            if named is not None:
                kind = collective_name(node.target)
                if kind in _ALIKE:
                    varying -= {named[0]}
                elif kind in _DIFFERENT:
                    varying |= {named[0]}
            result[node.name] = varying
    return result


def culprit(graph: fx.Graph, node: fx.Node, axis: str, varying: Mapping[str, Axes]) -> fx.Node:
    """Where ``node``'s difference on ``axis`` comes from: its furthest ancestor that is an operator and differs."""
    while True:
        operands = [n for n in node.all_input_nodes if n.op == "call_function" and axis in varying[n.name]]
        if not operands:
            return node
        node = operands[0]
