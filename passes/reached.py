"""Parameters that no gradient reaches are not trained.

Requires: a captured graph in normal form. Provides: states without ``requires_grad`` where every way to the loss leads
through ``detach``, or through values without gradients. Torch leaves the gradient of such a parameter ``None``, so that
no optimizer touches it; one of zeros would have it decay.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from passes.capture import Captured
from passes.gradients import differentiable, stops_gradient


def freeze_unreached(captured: Captured) -> Captured:
    """``captured`` with the parameters frozen that its loss sends no gradient to."""
    if captured.loss is None:
        return captured
    reached = _reached(captured.graph, captured.loss)
    trained = {captured.placeholders[n] for n in reached if n in captured.placeholders}
    states = {
        name: replace(state, requires_grad=state.requires_grad and name in trained)
        for name, state in captured.states.items()
    }
    return captured.with_(states=states)


def _reached(graph: fx.Graph, loss: str) -> set[str]:
    """The nodes to which the gradient of ``loss`` flows."""
    reached = {loss}
    for node in reversed(graph.nodes):
        if node.name in reached and node.op == "call_function" and not stops_gradient(node):
            reached |= {n.name for n in node.all_input_nodes if differentiable(n.meta["val"])}
    return reached
