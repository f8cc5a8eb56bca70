"""Whether a value is the same on all ranks of a mesh axis, and whether collectives are given what they expect.

A value that is said to be whole (``R``) must be alike on all ranks. Whether it is follows from the local graph alone:
shards and data differ, what is gathered or reduced is alike again, and an operator's result differs where one of its
operands does. So a collective that is missing, is there twice, or runs over another axis is seen without computing
anything. (JAX checks ``shard_map`` in this way.)

``unknown`` is what is alike to look at but may be a shard or a partial sum all the same: a new or expanded tensor of a
shard's size, or a whole value scaled by 1/n to be added up again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from passes.check import axis_of
from passes.collectives import COMMUNICATING, CONTEXT, collective_name

Sameness = Literal["alike", "different", "unknown"]

_MAKES_ALIKE = frozenset({"all_gather", "all_reduce", "all_reduce_max"})
_MAKES_DIFFERENT = (
    frozenset({"reduce_scatter", "shard_slice", "shard_narrow", "shard_pad", "all_to_all", "axis_index"}) | CONTEXT
)
# What joins the ranks' parts makes no sense of copies of one value, what takes a whole value none of the ranks' parts.
_WANTS_PARTS = frozenset({"all_gather", "all_reduce", "reduce_scatter", "all_to_all"})
# What may make nothing new to look at where the ranks share the new elements, one each.
_EXPANDS = ("aten.expand.", "aten.repeat.", "aten.repeat_interleave.")
_WANTS_WHOLE = frozenset({"copy", "shard_slice", "shard_narrow"})


def sameness(graph: fx.Graph, given: Mapping[str, Sameness], axis: str, size: int) -> dict[str, Sameness]:
    """How each node's value compares over the ``size`` ranks of ``axis``. ``given``: the placeholders, by name."""
    result: dict[str, Sameness] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            result[node.name] = given.get(node.name, "alike")
        elif node.op == "call_function":
            result[node.name] = _of_operator(node, result, axis, size)
    return result


def _of_operator(node: fx.Node, known: Mapping[str, Sameness], axis: str, size: int) -> Sameness:
    named = axis_of(node)
    if named is not None and named[0] == axis:
        kind = collective_name(node.target)
        if kind in _MAKES_ALIKE:
            return "alike"
        if kind in _MAKES_DIFFERENT:
            return "different"
    operands = {known[n.name] for n in node.all_input_nodes}
    if "different" in operands:
        return "different"
    if "unknown" in operands or _makes_elements(node) or _is_spread(node, size):
        return "unknown"
    return "alike"


def _makes_elements(node: fx.Node) -> bool:
    """Whether the result's size may come from a constant rather than from an operand."""
    if node.target is operator.getitem:
        return False
    sizes = [v.numel() for n in node.all_input_nodes for v in _tensors(n.meta["val"])]
    name = str(node.target)
    if not sizes or ".new_" in name or "_like" in name or name.startswith(_EXPANDS):
        return True
    constants = any(isinstance(a, int) for a in pytree.tree_leaves((node.args, node.kwargs)))
    return constants and max((v.numel() for v in _tensors(node.meta["val"])), default=0) > max(sizes)


def _is_spread(node: fx.Node, size: int) -> bool:
    return any(isinstance(a, float) and a == 1.0 / size for a in node.args)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, tuple | list):
        return [t for v in value for t in _tensors(v)]
    return [value] if isinstance(value, Tensor) else []


def misuse(graph: fx.Graph, known: Mapping[str, Sameness], axis: str) -> tuple[fx.Node, str] | None:
    """The first collective over ``axis`` that is given what it makes no sense of, and why."""
    for node in graph.nodes:
        named = axis_of(node)
        if named is None or named[0] != axis or not node.all_input_nodes:
            continue
        kind, operand = collective_name(node.target), known[node.all_input_nodes[0].name]
        if kind in _WANTS_PARTS and operand == "alike":
            return node, f"{kind} over {axis} of a value that is whole on every rank counts it {named[1]} times"
        if kind in _WANTS_WHOLE and operand == "different":
            return node, f"{kind} over {axis} of a value that differs from rank to rank"
        if kind in COMMUNICATING and _routed_apart(node.all_input_nodes[0], known):
            return node, f"{kind} over {axis} of rows that are routed apart: their number differs from rank to rank"
    return None


def _routed_apart(node: fx.Node, known: Mapping[str, Sameness]) -> bool:
    """Whether ``node`` has as many rows as were dispatched, by experts that differ from rank to rank."""
    rows = node.meta["val"].shape[:1]
    seen, stack = set(), [node]
    while stack:
        node = stack.pop()
        same = isinstance(node.meta["val"], tuple) or node.meta["val"].shape[:1] == rows
        if node in seen or not node.meta.get("open", same):  # only a traced graph knows which rows are open
            continue
        seen.add(node)
        if collective_name(node.target) == "combine":
            continue
        kind = collective_name(node.target)
        experts = node if kind == "route" else node.args[3] if kind == "dispatch" else None
        if isinstance(experts, fx.Node) and known[experts.name] == "different":
            return True
        stack += node.all_input_nodes
    return False


def culprit(node: fx.Node, known: Mapping[str, Sameness]) -> fx.Node:
    """Where a difference comes from: the furthest operator before ``node`` whose value differs."""
    while True:
        before = [n for n in node.all_input_nodes if n.op == "call_function" and known[n.name] == "different"]
        if not before:
            return node
        node = before[0]
