"""What is held between the two halves of a backward: the search counts what the program does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from partitioner import Constraints, Plan, Topology, partition, prepare
from partitioner.cost.call.saved_activations import carried_bytes
from partitioner.passes.ir.gradient_flow import mark_block
from partitioner.passes.ir.model import Block
from partitioner.runtime.program.analysis import CallFacts, ProgramFacts
from partitioner.solve.evaluate.prepared_model import PreparedModel

pytestmark = pytest.mark.usefixtures("without_baselines")

SIZE = dict(
    num_hidden_layers=8, hidden_size=256, intermediate_size=704, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=512,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZE,
    "gpt2": dict(n_layer=8, n_embd=256, n_head=8, vocab_size=512, bos_token_id=0, eos_token_id=0),
    "qwen2": SIZE,
    "gemma2": dict(head_dim=32, **SIZE),
    "bloom": dict(n_layer=8, hidden_size=256, n_head=8, vocab_size=512),
}


@cache
def prepared(family: str) -> PreparedModel:
    config = AutoConfig.for_model(family, use_cache=False, **FAMILIES[family])
    with torch.device("meta"):
        ids = torch.zeros(1, 512, dtype=torch.int64)
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return prepare(model, {"input_ids": ids, "labels": ids}, precision="bf16")


def planned(model: PreparedModel, **pins: Any) -> Plan:
    pins = dict(microbatch_size=1, zero=0) | pins
    return partition(model, Topology.preset("dgx-h100"), global_batch=32, constraints=Constraints(**pins))


def halves(plan: Plan) -> Iterator[tuple[str, Block, int]]:
    """Each layer's block once, and the bytes that the program carries from one half of its backward to the other."""
    facts, seen = ProgramFacts(plan.program), set[str]()
    for call in (call for stage in facts.stages for call in stage):
        name = call.data.block
        if call.has_backward and call.carried_bytes and "*" in name and name not in seen:
            seen.add(name)
            yield name, marked(facts, call), call.carried_bytes


def marked(facts: ProgramFacts, call: CallFacts) -> Block:
    """The call's block with its gradients marked."""
    block, program = facts.blocks[call.data.block], facts.program
    bound = [*zip(block.states, call.data.states, strict=True), *zip(block.inputs, call.data.inputs, strict=True)]
    values = {n for n, v in program.values.items() if v.requires_grad}
    states = {n for n, s in program.states.items() if s.kind == "parameter" and s.requires_grad}
    mark_block(block, {placeholder for placeholder, name in bound if name in values | states})
    return block


@pytest.mark.parametrize(
    ("recompute", "tp"),
    [
        ("none", 2),
        ("selective", 1),
        pytest.param("none", 1, marks=pytest.mark.slow),
        pytest.param("selective", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) if f == "qwen2" else f for f in FAMILIES])
def test_a_layer_leaves_as_much_as_is_counted(family: str, recompute: str, tp: int) -> None:
    """Values and gradients that gradients of weights read, made again or not."""
    plan = planned(prepared(family), pp=4, tp=tp, dp=2 // tp, schedule="zb-1p", recompute=recompute)
    found = list(halves(plan))
    assert found
    for name, block, carried in found:
        assert carried_bytes(block) == pytest.approx(carried, rel=0.03), name


def test_where_nothing_goes_on_to_inputs_all_of_the_backward_comes_later() -> None:
    class Deep(nn.Module):
        """A first layer that keeps what its inputs, which need no gradient, made."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).sin()
            return x.sum()

    with torch.device("meta"):
        model = prepare(Deep(), (torch.zeros(1, 64),))
    plan = planned(model, pp=4, dp=2, schedule="zb-1p", recompute="none")
    facts = ProgramFacts(plan.program)
    for stage, tensors in ((0, 2), (1, 1)):
        call = facts.stages[stage][0]
        assert call.carried_bytes == carried_bytes(marked(facts, call)) == tensors * 64 * 4


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("schedule", "v"),
    [
        ("zb-1p", 1),
        pytest.param("zb-2p", 1, marks=pytest.mark.slow),
        ("zb-v", 2),
        pytest.param("dualpipe-v", 2, marks=pytest.mark.slow),
    ],
)
def test_the_search_counts_the_memory_of_split_backwards(schedule: str, v: int, recompute: str) -> None:
    """Of every stage, a little more than it takes: the most of each kind is added up."""
    model = prepared("llama")
    pins: dict[str, Any] = dict(pp=4, tp=1, dp=2, schedule=schedule, virtual_stages=v, recompute=recompute)
    pins = dict(microbatch_size=1, zero=0) | pins
    tables, program = (
        partition(
            model,
            Topology.preset("dgx-h100"),
            global_batch=32,
            constraints=Constraints(**pins),
            estimate_only=only,
        )
        for only in (True, False)
    )
    for counted, taken in zip(tables.estimate.memory, program.estimate.memory, strict=True):
        assert 0.99 * taken <= counted <= (1.25 if recompute == "full" else 1.1) * taken
