"""Whole plans: the layouts that the planner finds by itself, the shortest call, and what a plan says of itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import partitioner
from partitioner import Constraints, Plan, Topology, partition, prepare
from partitioner.passes.ir.layouts import Layout
from partitioner.plans.files import plan_schema
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.usefixtures("without_baselines")

HIDDEN, SEQUENCE, VOCAB = 2048, 2048, 32000


def meta_llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=VOCAB,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def meta_gpt2() -> nn.Module:
    sizes = {"n_embd": HIDDEN, "n_layer": 4, "n_head": 16, "n_positions": SEQUENCE, "vocab_size": VOCAB}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with torch.device("meta"):
        return GPT2LMHeadModel(config).to(torch.bfloat16)


def plan_of(model: nn.Module, tp: int) -> Plan:
    tokens = torch.empty(16, SEQUENCE, dtype=torch.int64, device="meta")
    inputs = {"input_ids": tokens, "labels": torch.empty_like(tokens)}
    constraints = Constraints(pp=1, dp=8 // tp, tp=tp, microbatch_size=1)
    return partition(model, Topology.preset("dgx-h100"), inputs, constraints=constraints)


def weights(plan: Plan, ending: str) -> set[str]:
    """The layouts over ``tp`` of the weights whose names end so."""
    found = {s.layout for name, s in plan.program.states.items() if name.endswith(ending)}
    assert found, ending
    return found


def between_layers(plan: Plan, path: str) -> set[str]:
    return {v.layout for name, v in plan.program.values.items() if path in name and v.requires_grad}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_llama_is_column_then_row_parallel_with_a_sharded_sequence(tp: int) -> None:
    plan = plan_of(meta_llama(), tp)
    for column in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert weights(plan, f"{column}.weight") == {"S0"}
    for row in ("o_proj", "down_proj"):
        assert weights(plan, f"{row}.weight") == {"S1"}
    assert weights(plan, "layernorm.weight") == {"R'"}
    assert weights(plan, "lm_head.weight") == {"S0"}
    assert between_layers(plan, "model.layers.") == {"S1"}  # batch, sequence, hidden
    assert plan.shares.matmul_sharded >= 0.95
    assert "100%" in plan.summary()


def test_gpt2_cuts_its_fused_projection_and_its_tied_vocabulary() -> None:
    plan = plan_of(meta_gpt2(), 4)
    assert weights(plan, "attn.c_attn.weight") == {str(Layout("S", 1, (HIDDEN, HIDDEN, HIDDEN)))}
    assert weights(plan, "attn.c_attn.bias") == {str(Layout("S", 0, (HIDDEN, HIDDEN, HIDDEN)))}
    assert weights(plan, "attn.c_proj.weight") == weights(plan, "mlp.c_proj.weight") == {"S0"}
    assert weights(plan, "mlp.c_fc.weight") == {"S1"}
    assert weights(plan, "wte.weight") == {"S0"}  # the vocabulary, in embedding and head alike
    assert between_layers(plan, "transformer.h.") == {"S1"}
    assert plan.shares.matmul_sharded >= 0.95


def test_the_shortest_call_plans_a_hugging_face_model() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    plan = partition(model, Topology.local(2))
    assert plan.program.loss is not None
    assert plan.certificate.gap == pytest.approx(0.0, abs=0.02)


def test_the_shortest_call_plans_an_exported_program() -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.stack(x), y)

    model = Regression()
    batch = (torch.randn(8, 8), torch.randn(8, 8))
    plan = partition(torch.export.export(model, batch), Topology.local(2))
    run = partitioner.run_threads(plan, model, batch)
    assert run.loss is not None
    torch.testing.assert_close(run.loss, model(*batch).detach())


def test_dropout_draws_the_same_for_every_plan() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=8)).train()
    tokens = torch.randint(0, 64, (8, 8))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    prepared, losses = prepare(model, inputs), []
    for pp, dp, tp in ((1, 1, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)):
        constraints = Constraints(pp=pp, dp=dp, tp=tp, microbatch_size=2)
        plan = partition(prepared, Topology.local(pp * dp * tp), constraints=constraints)
        check = plan.verify(model, inputs)  # the model draws by place as well
        assert check.ok, check
        losses.append(partitioner.run_threads(plan, model, inputs, seed=3).loss)
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0])
    other = partitioner.run_threads(plan, model, inputs, seed=4).loss
    assert other is not None
    assert not torch.allclose(other, losses[0])


class Encoder(nn.Module):
    """Dropout inside torch's own layers: of attention's weights, and between recurrent layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True) if kind == "attention" else None
        self.layers = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention(x, x, x, need_weights=False) if self.attention is not None else self.layers(x)
        return y[0].square().mean()


@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_dropout_inside_torch_layers_is_verified(kind: str) -> None:
    torch.manual_seed(0)
    model, inputs = Encoder(kind), (torch.randn(4, 3, 8),)
    check = partition(model, Topology.local(1), inputs).verify(model, inputs)
    assert check.ok, check


class Merged(nn.Module):
    """A projection whose weight is merged from others before it is used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.whole, self.down = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(2, width))
        self.up = nn.Parameter(torch.randn(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.whole + self.up @ self.down)


OF_WEIGHTS = {
    "merged": lambda: Merged(32),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
    "dropout": lambda: nn.Dropout(0.3),
}


@pytest.mark.parametrize("kind", OF_WEIGHTS)
def test_what_no_sample_reaches_is_not_split_over_microbatches(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), OF_WEIGHTS[kind](), nn.Tanh(), nn.Linear(32, 3))
    x = (torch.randn(8, 6),)
    plan = partition(
        model, Topology.local(2), x, loss=loss_of, constraints=Constraints(pp=1, tp=1, dp=2, microbatch_size=2)
    )
    check = plan.verify(model, x, loss_of)
    assert check.ok, check


@pytest.mark.parametrize("loss", [lambda y: 1 - y.cos().mean(), lambda y: y.square().mean() + 0.5])
def test_a_number_beside_the_loss_counts_once(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), (torch.randn(32, 64),)
    plan = partition(
        model, Topology.local(2), x, loss=loss, constraints=Constraints(pp=1, tp=1, dp=2, microbatch_size=4)
    )
    check = plan.verify(model, x, loss)
    assert check.ok, check


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_a_plan_says_what_each_rank_does(tmp_path: Path) -> None:
    plan = plan_of(meta_llama(), 4)
    files = plan.export_ranks(tmp_path)
    assert len(files) == 8
    content = json.loads(files[5].read_text())
    assert content["rank"] == 5
    assert content["coordinates"]["tp"] == 1
    assert content["groups"]["tp"] == [4, 5, 6, 7]
    schema = plan_schema()
    written = json.loads(plan.save(tmp_path / "plan.json").read_text())
    assert set(schema["required"]) <= set(written) <= set(schema["properties"])


def test_the_schema_in_the_docs_is_that_of_plans() -> None:
    """By what has which properties: libraries differ in how they say it."""

    def properties(schema: dict[str, Any]) -> dict[str, set[str]]:
        kinds = {"": schema, **schema["$defs"]}
        return {name: set(kind.get("properties", ())) for name, kind in kinds.items()}

    written = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
    assert properties(written) == properties(plan_schema()), "partitioner schema > docs/plan.schema.json"
