"""The normal form: one way to say each thing, so that few rules and patterns cover many models.

Requires: a captured graph. Provides: no composite operators without a rule; no aliases, copies, casts or reshapes that
do nothing, no bias-carrying products; means as sums times a constant, so that a sharded mean is a partial sum; losses
as each target's cross entropy and sums over a count that depends on targets alone; constant attention masks recognised.
Every rewrite is exact up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from passes.blocks import State, TensorSpec
from passes.capture import Captured
from passes.decompose import decompose
from passes.gathered import ungather
from passes.likewise import check_turns
from passes.log_probabilities import pick_before_softmax
from passes.looped import route_loops
from passes.masks import drop_constant_masks
from passes.normalize_algebra import ALGEBRA
from passes.normalize_bags import BAGS
from passes.normalize_flat import unflatten
from passes.normalize_indices import INDICES
from passes.normalize_losses import LOSSES
from passes.normalize_places import PLACES
from passes.normalize_random import RANDOM, refuse_draws
from passes.normalize_recurrent import RECURRENT
from passes.normalize_shapes import SHAPES
from passes.normalize_strides import STRIDES
from passes.quantize import QUANTIZED
from passes.refuse import refuse
from passes.rewrite import placeholder_name, rewrite
from passes.stacked import stack_experts
from passes.unsort import unsort

RULES = {**SHAPES, **STRIDES, **ALGEBRA, **BAGS, **INDICES, **LOSSES, **RANDOM, **QUANTIZED}


def normalize(captured: Captured) -> Captured:
    """The captured model in normal form. Raises :class:`UnsupportedError` for what no plan can hold."""
    try:
        for empty, left_out in zip(captured.turns[::2], captured.turns[1::2], strict=True):
            check_turns(_normalized(empty).graph, _normalized(left_out).graph)
        normal = stack_experts(_unflattened(route_loops(_normalized(captured))))
    except GuardOnDataDependentSymNode:  # a rule asked what a number is that only the data tell
        refuse(captured.graph)
        raise
    refuse(normal.graph)
    return normal


def _normalized(captured: Captured) -> Captured:
    graph, layers = captured.graph, {n.name: n.name for n in captured.graph.nodes}
    if any(node.target in RECURRENT for node in graph.nodes):
        graph, layers, _ = rewrite(graph, RECURRENT)
    graph, parts = decompose(graph, RULES)
    first = {old: parts[new] for old, new in layers.items() if new in parts}
    graph, then, drawn = rewrite(graph, RULES)
    refuse_draws(graph)
    moved = {old: then[new] for old, new in first.items() if new in then}
    captured = _with_constants(captured, drawn)
    constants = {p: captured.constants[s] for p, s in captured.placeholders.items() if _is_constant(captured, s)}
    results = _results(graph)
    drop_constant_masks(graph, constants)
    pick_before_softmax(graph)
    unsort(graph)
    ungather(graph)
    became = _became(graph, results)
    return _renamed(captured, graph, {old: became.get(new, new) for old, new in moved.items()})


def _unflattened(captured: Captured) -> Captured:
    """With dims as they are sharded, and places of rows that are no expert's by operators."""
    graph, results = captured.graph, _results(captured.graph)
    unflatten(graph)
    moved = _became(graph, results)
    if any(node.target in PLACES for node in graph.nodes):  # that are not a mask's, or counted in order
        graph, last, _ = rewrite(graph, PLACES)
        moved = {old: last[new] for old, new in moved.items()}
    return _renamed(captured, graph, moved)


def _results(graph: fx.Graph) -> list[str]:
    nodes: Any = graph.output_node().args[0]
    return [node.name for node in nodes]


def _became(graph: fx.Graph, results: list[str]) -> dict[str, str]:
    """By the names that results had the names that they have; each is a result once."""
    output: Any = graph.output_node()
    found = dict(zip(results, _results(graph), strict=True))
    output.args = (tuple(dict.fromkeys(output.args[0])),)
    return found


def _renamed(captured: Captured, graph: fx.Graph, moved: Mapping[str, str]) -> Captured:
    """``captured`` with another graph; ``moved``: the names in it of what was in its own."""
    outputs = [replace(o, value=moved[o.value]) if o.value is not None else o for o in captured.outputs]
    loss = moved[captured.loss] if captured.loss is not None else None
    updates = {state: moved[node] for state, node in captured.updates.items()}
    placeholders = {n.name: captured.placeholders[n.name] for n in graph.nodes if n.op == "placeholder"}
    return captured.with_(graph=graph, outputs=outputs, loss=loss, updates=updates, placeholders=placeholders)


def _with_constants(captured: Captured, added: dict[str, Tensor]) -> Captured:
    """``captured`` with further constants, whose placeholders have names of their own."""
    states = {name: State(name, TensorSpec.of(value), "constant") for name, value in added.items()}
    return captured.with_(
        states={**captured.states, **states},
        constants={**captured.constants, **added},
        placeholders={**captured.placeholders, **{placeholder_name(name): name for name in added}},
    )


def _is_constant(captured: Captured, name: str) -> bool:
    return name in captured.states and captured.states[name].kind == "constant"
