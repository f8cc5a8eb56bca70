"""What forward leaves in the model's buffers and frozen parameters, as values of the graph.

Requires: a captured graph in normal form. Provides: for every state that forward changes an operator of its own, whose
result the state takes at the end of a step: of the state's type, without a gradient, in memory of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.blocks import State
from passes.capture import Captured
from passes.errors import UnsupportedError
from passes.infer import infer
from passes.inplace import is_view
from passes.rewrite import aten

_PLACE = ("path", "source", "stack")


def settle_updates(captured: Captured) -> dict[str, fx.Node]:
    """The operator of each state that forward changes. The graph is changed in place, and returns what these give.

    Raises :class:`UnsupportedError` for a parameter that is trained.
    """
    if not captured.updates:
        return {}
    _check_frozen(captured)
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


def with_frozen_as_buffers(states: Mapping[str, State], changed: Collection[str]) -> dict[str, State]:
    """``states``, the parameters among those that forward ``changed`` as buffers, which is what they are to a plan: no
    optimizer steps them, and each rank takes what forward leaves in them."""
    return {n: replace(s, kind="buffer") if n in changed and s.kind == "parameter" else s for n, s in states.items()}


def _check_frozen(captured: Captured) -> None:
    for name in captured.updates:
        state = captured.states[name]
        if state.kind == "parameter" and state.requires_grad:
            raise UnsupportedError(
                f"forward changes the parameter {name!r}, which is trained: the optimizer changes it too, from a "
                "gradient of numbers that it no longer has. Expected a frozen parameter (requires_grad_(False)) or a "
                "buffer; change what is trained after the optimizer's step"
            )


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
