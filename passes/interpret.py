"""Run graphs and folded models with real tensors: the reference for every later form of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.blocks import FoldedModel
from passes.infer import META


def run_graph(graph: fx.Graph, arguments: Sequence[Tensor], device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """What ``graph`` gives for its placeholders' ``arguments``; operators on ``meta`` run on ``device``."""
    env: dict[fx.Node, Any] = {}
    rest = iter(arguments)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(rest)
        elif node.op == "output":
            return tuple(env[n] for n in node.args[0])
        else:
            args = fx.node.map_arg(node.args, env.__getitem__)
            kwargs = {
                k: torch.device(device) if v == META else v
                for k, v in fx.node.map_arg(node.kwargs, env.__getitem__).items()
            }
            result = node.target(*args, **kwargs)
            env[node] = result
    raise AssertionError("a graph ends in an output node")


def run_folded(
    model: FoldedModel,
    states: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """All values of ``model`` by name. ``states``: parameters and buffers; constants are the model's own."""
    values = dict(inputs)
    known = {**model.constants, **states}
    for call in model.calls:
        arguments = [known[s] for s in call.states] + [values[i] for i in call.inputs]
        values.update(zip(call.outputs, run_graph(model.blocks[call.block].graph, arguments, device), strict=True))
    return values
