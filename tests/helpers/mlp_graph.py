"""A multi-layer perceptron as a graph of aten operators on the CPU."""

from __future__ import annotations

import torch
from torch import fx

from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.model import Block

aten = torch.ops.aten
CPU = torch.device("cpu")


def placeholder(graph: fx.Graph, name: str, *shape: int) -> fx.Node:
    node = graph.create_node("placeholder", name, name=name)
    node.meta.update(val=torch.empty(shape, dtype=torch.float64, device="meta"), path="layer.0", source="model.py:7")
    return node


def mlp() -> Block:
    """linear, gelu, layer norm, linear; the input is also an output."""
    graph = fx.Graph()
    up, down, x = (placeholder(graph, n, *s) for n, s in (("up", (8, 4)), ("down", (4, 8)), ("x", (2, 3, 4))))
    h = insert_operator_node(graph, aten.linear.default, (x, up), like=x)
    h = insert_operator_node(graph, aten.gelu.default, (h,), like=x)
    h = insert_operator_node(graph, aten.layer_norm.default, (h, [8]), like=x)
    y = insert_operator_node(graph, aten.linear.default, (h, down), like=x)
    graph.output((y, x))
    return Block("mlp", graph, ("up", "down"), ("x",))
