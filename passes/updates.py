"""What forward leaves in the model's buffers, as values of the graph.

Requires: a captured graph in normal form. Provides: for every buffer that forward changes an operator of its own, whose
result the buffer takes at the end of a step: of the buffer's type, without a gradient, in memory of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from passes.blocks import State
from passes.capture import Captured
from passes.infer import infer
from passes.inplace import is_view
from passes.rewrite import aten

_PLACE = ("path", "source", "stack")


def settle_updates(captured: Captured) -> dict[str, fx.Node]:
    """The operator of each buffer that forward changes. The graph is changed in place, and returns what these give."""
    if not captured.updates:
        return {}
    graph = captured.graph
    output = graph.output_node()
    by_name = {n.name: n for n in graph.nodes}
    made: dict[str, fx.Node] = {}
    for state, name in captured.updates.items():
        value = by_name[name]
        with graph.inserting_before(output if value.op == "placeholder" else value.next):
            made[state] = _settled(graph, value, captured.states[state])
    named = {captured.loss, *(o.value for o in captured.outputs)}
    returned: tuple[fx.Node, ...] = output.args[0]  # type: ignore[assignment]
    output.args = ((*(n for n in returned if n.name in named), *made.values()),)
    return made


def _settled(graph: fx.Graph, value: fx.Node, state: State) -> fx.Node:
    place = {k: value.meta[k] for k in _PLACE if k in value.meta}
    place = place or {"path": state.name.rpartition(".")[0], "source": "", "stack": ()}

    def then(target: torch._ops.OpOverload, node: fx.Node, **how: Any) -> fx.Node:
        with graph.inserting_after(node) if node is not value else nullcontext():
            after = graph.call_function(target, (node,), how)
        after.meta = {**place, "val": infer(target, (node.meta["val"],), how)}
        return after

    made = then(aten.detach.default, value)
    if made.meta["val"].dtype != state.spec.dtype:
        return then(aten._to_copy.default, made, dtype=state.spec.dtype)
    return then(aten.clone.default, made) if _may_be_held(value) else made


def _may_be_held(node: fx.Node) -> bool:
    """Whether a value may share its memory with a state or an input."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def leading_to(graph: fx.Graph, ends: Collection[fx.Node]) -> set[fx.Node]:
    """``ends``, and the operators whose results go nowhere else."""
    found = set(ends)
    if not found:
        return found
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.users and all(user in found for user in node.users):
            found.add(node)
    return found
