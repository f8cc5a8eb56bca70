"""Recomputation by operator: what is kept is the least cut, and what is made again is what it was."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from transformers import MixtralConfig, MixtralForCausalLM

from partitioner import Constraints, Plan, Topology, partition
from partitioner.cost.call.block_profile import node_operands
from partitioner.cost.call.operators import forward_kernels
from partitioner.cost.call.recomputation import find_recomputed_nodes
from partitioner.cost.call.saved_activations import find_needed_values, kept_by, size_of
from partitioner.passes.capture.capture import capture
from partitioner.passes.ir.gradient_flow import mark_block, mark_gradients
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.model import Block
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.rules.strategies import needs_gradient
from partitioner.passes.shard.fold import fold
from partitioner.runtime.program.analysis import ProgramFacts
from tests.helpers.models import CASES, keep_layers

pytestmark = pytest.mark.usefixtures("without_baselines")

aten = torch.ops.aten
_PRICE, _PER_FLOP = 16, 1 / 300  # bytes of traffic that one kept is worth; bytes that a FLOP is


def planned(model: nn.Module, inputs: Any, how: str, loss: Any, **pinned: Any) -> Plan:
    fixed = {"pp": 1, "dp": 1, "tp": 1, **pinned}
    ranks = fixed["pp"] * fixed["dp"] * fixed["tp"] * fixed.get("cp", 1)
    return partition(model, Topology.local(ranks), inputs, loss=loss, constraints=Constraints(recompute=how, **fixed))


def kept(plan: Plan) -> int:
    """Bytes between forward and backward, besides values that pass between calls."""
    return sum(c.kept_bytes for stage in ProgramFacts(plan.program).stages for c in stage)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, id=f"{name}-{mesh}", marks=[pytest.mark.slow] * (name not in few))
        for mesh, few in ((dict(tp=2), ("llama", "vit")), (dict(pp=2, schedule="zb-1p"), ("t5", "gpt2")))
        for name in ("gpt2", "llama", "gemma2", "qwen3", "t5", "vit")
    ],
)
def test_less_is_kept_and_every_gradient_is_the_models(name: str, mesh: dict[str, Any]):
    case = CASES[name]
    model, inputs = case.build(), case.inputs(4)
    plan = planned(model, inputs, "selective", case.loss, **mesh)
    assert kept(plan) < 0.75 * kept(planned(model, inputs, "none", case.loss, **mesh))
    found = plan.verify(model, inputs)
    assert found.ok and found.max_error < 1e-9, found.errors


def test_experts_on_several_ranks_keep_what_they_were_sent():
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    experts = dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False)
    model = MixtralForCausalLM(MixtralConfig(**sizes, **experts)).train()
    ids = torch.randint(0, 64, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    plans = [planned(model, batch, how, lambda o: o.loss, dp=2, ep=2) for how in ("selective", "none")]
    layer = next(b for b in plans[0].program.blocks.values() if b.again)
    sent = {node["name"] for node in layer.nodes if "dispatch" in str(node) or "combine" in node["name"]}
    assert sent and not sent & set(layer.again)
    assert kept(plans[0]) < 0.75 * kept(plans[1])
    assert plans[0].verify(model, batch).ok


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.up(x))))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_what_is_drawn_is_kept():
    """A mask takes more to be drawn again, by place, than it is worth."""
    torch.manual_seed(0)
    model, x = Dropped().train(), torch.randn(8, 16)
    plan = planned(model, (x,), "selective", lambda loss: loss)
    block = next(b for b in plan.program.blocks.values() if b.again)
    again = {node["target"] for node in block.nodes if node["name"] in block.again}
    assert {"aten.gelu.default", "aten.where.self"} <= again
    assert not any("uniform" in target or target.startswith("aten.ge.") for target in again), again
    assert plan.verify(model, (x,)).ok


def test_scores_alone_where_that_is_asked_for():
    case = CASES["llama"]
    model = fold(normalize(capture(case.build(), case.inputs(2), loss=case.loss)))
    mark_gradients(model)
    layer = max(model.blocks.values(), key=lambda block: len(block.graph.nodes))
    assert not find_recomputed_nodes(layer, "scores")
    again = find_recomputed_nodes(layer, "selective")
    assert again and kept_by(layer, without=again).inside < 0.6 * kept_by(layer).inside


_KINDS = {"exp": aten.exp.default, "sin": aten.sin.default, "relu": aten.relu.default}


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Products with weights, and between them operators of one and of two values, some summed to a row."""
    graph = fx.Graph()
    width = draw(st.sampled_from([8, 64]))
    rows = draw(st.sampled_from([4, 512]))
    nodes = []
    for name, shape in (("w", (width, width)), ("x", (rows, width))):
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        nodes.append(node)
    weight, values = nodes[0], [nodes[1]]
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["mm", "mul", "add", "row", *_KINDS]))
        one, two = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        if kind == "mm" and one.meta["val"].shape[-1] == width:
            made = insert_operator_node(graph, aten.mm.default, (one, weight))
        elif kind in ("mul", "add"):
            made = insert_operator_node(graph, aten.mul.Tensor if kind == "mul" else aten.add.Tensor, (one, two))
        elif kind == "row":
            made = insert_operator_node(graph, aten.sum.dim_IntList, (one, [1], True))
        else:
            made = insert_operator_node(graph, _KINDS.get(kind, aten.exp.default), (one,))
        values.append(made)
    graph.output((values[-1],))
    made_block = Block("block", graph, ("w",), ("x",))
    mark_block(made_block, {"w", "x"})
    return made_block


def cost(block: Block, again: set[fx.Node]) -> float | None:
    """Bytes kept and the price of what is made again; ``None`` where something is made again for nobody."""
    states = set(block.states)
    wanted = {
        v for n in block.graph.nodes if n.op == "call_function" and needs_gradient(n) for v in find_needed_values(n)
    }
    stack, seen = [v for v in wanted if v[0].name not in states], set()
    held = run = 0.0
    while stack:
        value = stack.pop()
        if value in seen or value[0].name in states:
            continue
        seen.add(value)
        if value[0] not in again:
            held += size_of(value)
            continue
        kernels = forward_kernels(value[0], *node_operands(value[0], states, ()))
        run += 1 + int(sum(k.num_bytes + k.flops * _PER_FLOP for k in kernels) / _PRICE)
        stack += [(o, 0) for o in value[0].all_input_nodes]
    return held + run if again <= {v[0] for v in seen} else None


@given(blocks())
@settings(max_examples=200)
def test_the_cut_is_the_least(block: Block):
    quick = [n for n in block.graph.nodes if n.op == "call_function" and n.target != aten.mm.default]
    every = itertools.chain.from_iterable(itertools.combinations(quick, n) for n in range(len(quick) + 1))
    costs = [c for some in every if (c := cost(block, set(some))) is not None]
    found = cost(block, set(find_recomputed_nodes(block, "selective")))
    assert found == pytest.approx(min(costs))


def test_every_second_product_is_made_again_besides():
    """As torchtitan has it: of products half as much is kept, and fused attentions are."""
    case = CASES["llama"]
    model, inputs = keep_layers(case.build(), 2), case.inputs(4)
    plans = {way: planned(model, inputs, way, case.loss) for way in ("none", "selective", "alternate")}
    assert kept(plans["alternate"]) < 0.9 * kept(plans["selective"]) < 0.9 * kept(plans["none"])
    assert plans["alternate"].estimate.step_time > plans["selective"].estimate.step_time
    layer = next(b for b in plans["alternate"].program.blocks.values() if b.again)
    again = {node["target"] for node in layer.nodes if node["name"] in layer.again}
    assert any("linear" in target or "mm" in target for target in again), again
    assert not any("attention" in target for target in again), again
    assert plans["alternate"].planned_only == ()
    assert plans["alternate"].verify(model, inputs).ok


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, id=f"{name}-{mesh}", marks=[pytest.mark.slow] * (name != first))
        for first, mesh in (("t5", dict(tp=2)), ("t5", dict(pp=2, schedule="zb-1p")), ("llama", dict(dp=2, zero=3)))
        for name in ("llama", "t5")
    ],
)
def test_products_that_are_made_again_make_the_same_gradients(name: str, mesh: dict[str, Any]):
    case = CASES[name]
    plan = planned(case.build(), case.inputs(4), "alternate", case.loss, **mesh)
    assert any(b.again for b in plan.program.blocks.values())
    assert plan.verify(case.build(), case.inputs(4)).ok
