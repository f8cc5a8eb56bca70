"""Differentiation of a block, and graphs as data."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch
from torch import fx

from partitioner.passes.errors import UntrustedOperatorError
from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.model import Block
from partitioner.passes.ir.serialize import GraphFormatError, block_from_data, block_to_data
from partitioner.passes.shard.differentiate import differentiate, list_collectives
from tests.helpers.mlp_graph import CPU, aten, mlp, placeholder


def eager(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = torch.nn.functional.gelu(torch.nn.functional.linear(x, up))
    return torch.nn.functional.linear(torch.nn.functional.layer_norm(h, [8]), down)


def test_pieces_compute_what_autograd_computes() -> None:
    parts = differentiate(mlp(), CPU, [True], [True, True], [True, False])
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((8, 4), (4, 8), (2, 3, 4))]
    seed = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = torch.autograd.grad(eager(*leaves), leaves, seed)

    y, same, *saved = parts.forward.module(*(leaf.detach() for leaf in leaves))
    assert torch.equal(y, eager(*leaves))
    assert torch.equal(same, leaves[2])
    assert len(saved) == len(parts.saved)
    assert {"primals_1", "primals_2"} <= set(parts.saved), "weights are saved by reference, not as transposed views"
    x_grad, up_grad, down_grad = parts.backward.module(*saved, seed)
    x_first, *carried = parts.backward_input.module(*saved, seed)
    up_last, down_last = parts.backward_weight.module(*carried)
    for mine, halves, theirs in zip((up_grad, down_grad, x_grad), (up_last, down_last, x_first), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(halves, theirs)


def test_a_gradient_that_is_zero_is_none() -> None:
    parts = differentiate(mlp(), CPU, [True], [True, True], [False, True])
    assert parts.backward.outputs[1:] == (None, None)


def test_backward_collectives_are_the_transposed_forward_ones() -> None:
    graph = fx.Graph()
    w, x = placeholder(graph, "w", 8, 4), placeholder(graph, "x", 2, 3, 4)
    whole = insert_operator_node(graph, ops.all_gather.default, (x, 1, "tp", 2, "reduce"), like=x)
    y = insert_operator_node(graph, aten.linear.default, (whole, w), like=x)
    graph.output((insert_operator_node(graph, ops.reduce_scatter.default, (y, 1, "tp", 2), like=x),))
    parts = differentiate(Block("column", graph, ("w",), ("x",)), CPU, [True], [True], [True])
    forward, backward = list_collectives(parts.forward.graph), list_collectives(parts.backward.graph)
    assert [(u.op, u.shape) for u in forward] == [("all_gather", (2, 3, 4)), ("reduce_scatter", (2, 6, 8))]
    assert [(u.op, u.shape) for u in backward] == [("all_gather", (2, 3, 8)), ("reduce_scatter", (2, 6, 4))]
    assert {(u.path, u.source) for u in (*forward, *backward)} == {("layer.0", "model.py:7")}


def test_graphs_round_trip_through_json() -> None:
    block = mlp()
    text = json.dumps(block_to_data(block))
    again = block_from_data("mlp", tuple(json.loads(text)), block.states, block.inputs)
    assert json.dumps(block_to_data(again)) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "aten.nonsense.default"}, "torch has no such operator"),
        ({"args": [{"node": "later"}]}, "not defined before"),
        ({"op": "call_module"}, "unknown kind of node"),
        ({"val": [[1], "float17"]}, "not a tensor type"),
    ],
)
def test_data_that_is_no_graph_is_refused_with_the_node(change: dict[str, object], message: str) -> None:
    block = mlp()
    nodes = [dict(n) for n in block_to_data(block)]
    nodes[4].update(change)
    with pytest.raises((GraphFormatError, UntrustedOperatorError), match=message) as error:
        block_from_data("mlp", tuple(nodes), block.states, block.inputs)
    assert nodes[4]["name"] in str(error.value)


def test_what_goes_between_functions_is_contiguous() -> None:
    """Tracing takes contiguous values for granted, and so do the kernels that it chooses."""
    graph = fx.Graph()
    x = placeholder(graph, "x", 2, 3, 4)
    y = insert_operator_node(graph, aten.transpose.int, (x, 1, 2), like=x)
    graph.output((y, insert_operator_node(graph, aten.mul.Tensor, (y, 2.0), like=x)))
    parts = differentiate(Block("turned", graph, (), ("x",)), CPU, [True], [], [True, False])
    value = torch.randn(2, 3, 4, dtype=torch.float64)
    turned, doubled, *saved = parts.forward.module(value)
    assert turned.is_contiguous() and doubled.is_contiguous()
    torch.testing.assert_close(turned, value.mT)
    (gradient,) = parts.backward.module(*saved, turned)
    assert gradient.is_contiguous()
    torch.testing.assert_close(gradient, value)


@pytest.mark.parametrize("pool", [aten.adaptive_avg_pool1d.default, aten.adaptive_max_pool1d.default])
def test_what_derivatives_write_into_is_not_lost(pool: Any) -> None:
    """Pooling of values that are not contiguous writes into buffers that only the write reads, forward and backward."""
    graph = fx.Graph()
    x = placeholder(graph, "x", 4, 9, 6)
    y = insert_operator_node(
        graph, pool, (insert_operator_node(graph, aten.transpose.int, (x, 1, 2), like=x), [1]), like=x
    )
    y = insert_operator_node(graph, operator.getitem, (y, 0), like=x) if pool is aten.adaptive_max_pool1d.default else y
    graph.output((y,))
    parts = differentiate(Block("pooled", graph, (), ("x",)), CPU, [True], [], [True])
    pieces = (parts.forward, parts.backward, parts.backward_input)
    assert not any(n.target._schema.is_mutable for p in pieces for n in p.graph.nodes if hasattr(n.target, "_schema"))
    value = torch.randn(4, 9, 6, dtype=torch.float64, requires_grad=True)
    made = pool(value.mT, [1])
    expected = made if isinstance(made, torch.Tensor) else made[0]
    seed = torch.randn_like(expected)
    found, *saved = parts.forward.module(value.detach())
    torch.testing.assert_close(found, expected.detach())
    (gradient,) = parts.backward.module(*saved, seed)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, value, seed)[0])


def test_derivatives_of_routed_rows_that_write_into_a_buffer() -> None:
    """How many rows a rank receives is a symbolic size; the derivative of clamp combines two conditions in place."""
    graph = fx.Graph()
    x, keys = placeholder(graph, "x", 6, 4), placeholder(graph, "keys", 6)
    keys.meta["val"] = torch.empty(6, dtype=torch.int64, device="meta")
    routed = insert_operator_node(graph, ops.route.default, (keys, 4, "ep", 2), like=keys)
    routes = [insert_operator_node(graph, operator.getitem, (routed, place), like=keys) for place in range(3)]
    rows = insert_operator_node(graph, ops.dispatch.default, (x, *routes, "ep", 2), like=x)
    rows = insert_operator_node(graph, aten.clamp.default, (rows, -1.0, 1.0), like=x)
    mean = insert_operator_node(graph, aten.mean.dim, (rows, [1], True), like=x)  # its derivative takes the size
    rows = insert_operator_node(graph, aten.sub.Tensor, (rows, mean), like=x)
    graph.output((insert_operator_node(graph, ops.combine.default, (rows, *routes, "ep", 2), like=x),))
    parts = differentiate(Block("experts", graph, (), ("x", "keys")), CPU, [True, False], [], [True])
    nodes = [n for p in (parts.forward, parts.backward, parts.backward_input) for n in p.graph.nodes]
    assert not any(n.target._schema.is_mutable for n in nodes if isinstance(n.target, torch._ops.OpOverload))
    assert aten.logical_and.default in {n.target for n in parts.backward.graph.nodes}
    assert [u.op for u in list_collectives(parts.backward.graph)] == ["dispatch", "combine"]
