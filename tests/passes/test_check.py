"""The graph checker names the first node that breaks an invariant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.model import Block, TensorSpec
from partitioner.passes.ir.verify import (
    GraphError,
    check_block,
    check_model,
    compare_across_ranks,
    find_misused_collective,
)
from tests.helpers.tiny_programs import Graph, layer_block, tiny_model

aten = torch.ops.aten
MESH = {"dp": 2, "tp": 2}


def node(block: Block, target: object) -> fx.Node:
    return next(n for n in block.graph.nodes if n.target == target)


def test_blocks_and_models_as_the_passes_make_them_are_accepted():
    check_block(layer_block(2), MESH)
    check_model(tiny_model(3)[0], {"tp": 1})


def wrong_shape(block: Block) -> None:
    node(block, aten.relu.default).meta["val"] = torch.empty(3, 3, device="meta")


def no_value(block: Block) -> None:
    del node(block, aten.relu.default).meta["val"]


def in_place(block: Block) -> None:
    node(block, aten.relu.default).target = aten.relu_.default


def unknown_axis(block: Block) -> None:
    node(block, ops.all_reduce.default).args = (node(block, ops.all_reduce.default).args[0], "sp", 2, "copy")


def wrong_size(block: Block) -> None:
    node(block, ops.copy.default).args = (node(block, ops.copy.default).args[0], "tp", 4)


def bad_operands(block: Block) -> None:
    mm = node(block, aten.mm.default)
    mm.args = (mm.args[0], mm.args[0])


def plain_function(block: Block) -> None:
    node(block, aten.relu.default).target = torch.relu


def no_tuple(block: Block) -> None:
    block.graph.output_node().args = (block.outputs[0],)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_shape, r"block 'layer', node 'relu_default': aten.relu.default gives float32\[2, 4\], the node carries"),
        (no_value, "block 'layer', node 'relu_default': carries no value"),
        (in_place, "node 'relu_default': aten.relu_.default changes its operand in place"),
        (unknown_axis, "node 'all_reduce_default': partition.all_reduce.default on the axis 'sp'; the mesh has dp, tp"),
        (wrong_size, "node 'copy_default': partition.copy.default over 4 ranks; the axis 'tp' has 2"),
        (bad_operands, "node 'mm_default': aten.mm.default does not accept its operands"),
        (plain_function, "node 'relu_default': calls .*relu.*, not a registered operator"),
        (no_tuple, "node 'output': does not return a tuple"),
    ],
)
def test_a_damaged_graph_is_refused_at_its_node(damage: Callable[[Block], None], message: str):
    block = layer_block(2)
    damage(block)
    with pytest.raises(GraphError, match=message):
        check_block(block, MESH)


def test_placeholders_stand_in_the_order_of_states_and_inputs():
    block = layer_block(2)
    with pytest.raises(GraphError, match=r"has the placeholders \['up', .*\], not \['down'"):
        check_block(replace(block, states=("down", "up", "bias", "gain")))


def test_a_shard_has_to_be_even():
    g = Graph("odd", {}, {"x": (3, 4)})
    with pytest.raises(GraphError, match=r"cannot divide dim 0 of shape \(3, 4\) over 2 ranks"):
        check_block(g.block(g(ops.shard_slice.default, g["x"], 0, "tp", 2)), MESH)


def test_calls_have_to_follow_what_they_read():
    model, _ = tiny_model(2)
    calls = [*model.calls[:2], *model.calls[3:], model.calls[2]]
    with pytest.raises(
        GraphError,
        match=r"call 2 \('layers.0'\) reads 'h0', which is neither an input of the model nor an output of an earlier",
    ):
        check_model(model.with_(calls=calls))


def test_the_models_values_are_those_of_its_graphs():
    model, _ = tiny_model(2)
    values = {**model.values, "h1": TensorSpec((2, 4), torch.float64)}
    with pytest.raises(GraphError, match=r"has 'h1' as float32\[2, 4\], the model as float64\[2, 4\]"):
        check_model(model.with_(values=values))


def test_what_differs_from_rank_to_rank():
    """Shards differ, products of shards differ, sums over the axis are alike again."""
    block = layer_block(2)
    known = compare_across_ranks(block.graph, {"up": "different", "down": "different"}, "tp", 2)
    assert [known[n] for n in ("copy_default", "mm_default", "mm_default_1")] == ["alike", "different", "different"]
    assert known["all_reduce_default"] == known["add_tensor_1"] == "alike"
    assert find_misused_collective(block.graph, known, "tp") is None
    over_dp = compare_across_ranks(block.graph, {"up": "different", "down": "different"}, "dp", 2)
    assert over_dp["add_tensor_1"] == "different"


def test_an_expanded_value_may_be_a_part():
    """Of two elements each of two ranks has one: the local operator does nothing."""
    g = Graph("expanded", {}, {"x": (2, 4, 1)})
    expanded = g(torch.ops.aten.expand.default, g["x"], [2, 4, 1])
    graph = g.block(g(ops.all_gather.default, expanded, 2, "tp", 2, "slice")).graph
    assert find_misused_collective(graph, compare_across_ranks(graph, {}, "tp", 2), "tp") is None


def test_a_whole_value_is_not_added_up_nor_a_part_cut():
    g = Graph("twice", {}, {"x": (2, 4), "part": (2, 4)})
    again = g(ops.all_reduce.default, g["x"], "tp", 2, "copy")
    graph = g.block(again, g(ops.shard_slice.default, g["part"], 0, "tp", 2)).graph
    found = find_misused_collective(graph, compare_across_ranks(graph, {"part": "different"}, "tp", 2), "tp")
    assert found == (again, "all_reduce over tp of a value that is whole on every rank counts it 2 times")
    again.args = (again.args[0], "dp", 2, "copy")
    found = find_misused_collective(graph, compare_across_ranks(graph, {"part": "different"}, "tp", 2), "tp")
    assert found is not None
    assert found[1] == "shard_slice over tp of a value that differs from rank to rank"


def test_new_expanded_and_spread_values_may_be_parts():
    g = Graph("parts", {}, {"x": (1, 4)})
    expanded = g(aten.expand.default, g["x"], (2, 4))
    spread = g(aten.mul.Tensor, g["x"], 0.5)
    ones = g(aten.ones_like.default, g["x"])
    graph = g.block(*(g(ops.all_reduce.default, v, "tp", 2, "copy") for v in (expanded, spread, ones))).graph
    assert find_misused_collective(graph, compare_across_ranks(graph, {}, "tp", 2), "tp") is None
