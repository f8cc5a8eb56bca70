"""Two nodes of H100 devices, groups of their devices, and blocks for the cost model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from partitioner.passes.ir.gradient_flow import mark_block
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.model import Block
from partitioner.topology import Topology, axis_group

H100 = Topology.preset("dgx-h100", nodes=2)
DEVICE = H100.device_type(0).model_copy(update={"dispatch": 0.0})
NVLINK = axis_group(H100, {"tp": 8, "dp": 2}, "tp")
ACROSS = axis_group(H100, {"tp": 16}, "tp")
BF16 = torch.bfloat16


def block(
    build: Callable[..., fx.Node | tuple[fx.Node, ...]], states: dict[str, Tensor], inputs: dict[str, Tensor]
) -> Block:
    """A block whose graph ``build(call, *placeholders)`` writes; floating tensors need gradients."""
    graph = fx.Graph()
    nodes = []
    for name, value in {**states, **inputs}.items():
        node = graph.placeholder(name)
        node.meta["val"] = value.to("meta")
        nodes.append(node)
    outputs = build(lambda target, *args, **kwargs: insert_operator_node(graph, target, args, kwargs), *nodes)
    graph.output(outputs if isinstance(outputs, tuple) else (outputs,))
    made = Block("block", graph, tuple(states), tuple(inputs))
    mark_block(made, {n.name for n in nodes if n.meta["val"].is_floating_point()})
    return made
