"""Parts of a function's own gradient that do not depend on the gradient of its result, as terms of the loss.

``backward`` of a :class:`torch.autograd.Function` may return ``c`` whatever it is given, to inject an auxiliary loss
for example. Autograd runs it where a result of the function takes part in the loss, and starts at a gradient of 1 of
the loss. The term ``sum(c (x - detach(x)))`` of the loss, which is zero, has this gradient. Loss scales, microbatches
and shards then treat it like all other terms.

Requires: a captured graph with the mark ``partition::own`` on the results of such functions. Provides: the graph
without marks, and with the terms.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from passes.assemble import Captured
from passes.gradients import differentiable
from passes.infer import META, call
from passes.own_gradients import OWN
from passes.unused import drop_unused

aten = torch.ops.aten


def with_terms_added(captured: Captured) -> Captured:
    """``captured`` without marks, its loss with the terms of all marked results that take part in it."""
    graph = captured.graph
    marks = [n for n in graph.nodes if n.target is OWN]
    if not marks:
        return captured
    loss = next((n for n in graph.nodes if n.name == captured.loss), None)
    joined = set() if loss is None else _joined_by_gradients(graph, loss, marks)
    terms: Any = dict.fromkeys(t for mark in marks if mark in joined for t in mark.args[1])
    became: dict[fx.Node, fx.Node] = {}
    for mark in marks:
        became[mark] = mark.args[0]
        mark.replace_all_uses_with(became[mark])
    if loss is not None:
        total = _sum(graph, became.get(loss, loss), terms)
        if terms:
            became[loss] = total
    names = {old.name: new.name for old, new in became.items()}
    by_name = {n.name: n for n in graph.nodes}
    captured = captured.with_(
        outputs=[replace(o, value=names.get(o.value, o.value)) if o.value else o for o in captured.outputs],
        loss=names.get(captured.loss, captured.loss) if captured.loss is not None else None,
        updates={state: names.get(node, node) for state, node in captured.updates.items()},
    )
    results = [*(o.value for o in captured.outputs), captured.loss, *captured.updates.values()]
    graph.output_node().args = (tuple(by_name[name] for name in dict.fromkeys(results) if name is not None),)
    drop_unused(graph)
    return captured


def _sum(graph: fx.Graph, loss: fx.Node, terms: Iterable[fx.Node]) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        for term in terms:
            added = _called(graph, aten._to_copy.default, (term,), {"dtype": loss.meta["val"].dtype}, loss)
            loss = _called(graph, aten.add.Tensor, (loss, added), {}, loss)
    return loss


def _called(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
    node = call(graph, target, args, kwargs, like=like)
    node.meta["stack"] = like.meta.get("stack", ())
    return node


def _joined_by_gradients(graph: fx.Graph, loss: fx.Node, marks: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes behind ``marks`` from which autograd has a way to ``loss``, be the gradient zero or not."""
    behind = set(marks)
    for node in graph.nodes:
        if node not in behind and node.op == "call_function" and not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    joined = {loss}
    for node in reversed(graph.nodes):
        if node in joined and node.op == "call_function":
            joined.update(n for n in node.all_input_nodes if n in behind and _has_edge(node, n))
    return joined


def _has_edge(node: fx.Node, operand: fx.Node) -> bool:
    """Whether autograd notes an edge from ``node`` to ``operand``."""
    if not differentiable(operand.meta["val"]) or not differentiable(node.meta["val"]):
        return False
    if node.target is OWN:
        result, _, inputs = cast(Any, node.args)
        return operand is result or operand in inputs
    if node.target is operator.getitem:
        return True

    def value(n: fx.Node) -> Any:
        return n.meta["val"].detach().requires_grad_() if n is operand else n.meta["val"]

    if not isinstance(operand.meta["val"], Tensor):
        return True
    with torch.enable_grad(), META:
        assert callable(node.target), node
        made = node.target(*fx.node.map_arg(node.args, value), **fx.node.map_arg(node.kwargs, value))
    return any(isinstance(v, Tensor) and v.requires_grad for v in pytree.tree_leaves(made))
