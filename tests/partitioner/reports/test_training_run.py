"""What a whole run takes, by hand: steps, days, device hours and money."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from partitioner import Plan, PlanError, Topology, partition
from partitioner.cli.app import app
from partitioner.explain.tables import throughput_text
from partitioner.interop.plan_layout import describe_plan_layout
from partitioner.passes.errors import InputsError
from partitioner.plan import Limits
from partitioner.plans.training_run import parse_count
from tests.helpers.models import CASES
from tests.helpers.sample_programs import llama, plan_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    """16 ranks of which a step of 1,024 samples of 8,192 tokens takes 8 s: 2^20 tokens a second, 65,536 on each."""
    sample = plan_of(llama(pp=4, dp=2, tp=2))
    limits = Limits(calls=4, dims=(64,), length=8192)
    certificate = sample.certificate.model_copy(update={"limits": limits})
    estimate = sample.estimate.model_copy(update={"step_time": 8.0})
    return sample.model_copy(update={"certificate": certificate, "estimate": estimate, "global_batch": 1024})


def test_tokens_of_a_second(plan: Plan) -> None:
    assert plan.tokens_per_step == 8 * 2**20
    assert throughput_text(plan) == "1.05 M tokens/s, 65.5 k per device"


def test_token_ids_have_tokens_also_where_attention_is_not_recognized() -> None:
    """As in a model that mixes tokens by a recurrence or by plain products: reports had no tokens, and a budget of
    tokens was refused."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.mix = nn.Embedding(32, 8), nn.Linear(16, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.mix(self.embedding(tokens).transpose(1, 2)).square().mean()

    plan = partition(Mixer(), Topology.local(2), {"tokens": torch.zeros(4, 16, dtype=torch.long)}, estimate_only=True)
    assert (plan.tokens_per_sample, plan.tokens_per_step) == (16, 64)
    assert plan.training_run(tokens=640).steps == 10
    assert "tokens/s" in throughput_text(plan)
    layout, _ = describe_plan_layout(plan)
    assert layout.seq_length == 16


def test_images_have_no_tokens() -> None:
    """The second dim of images, that of their channels, was counted as tokens."""
    case = CASES["vit"]
    plan = partition(case.build(), Topology.local(2), case.inputs(4), estimate_only=True)
    assert plan.tokens_per_step == 0
    assert "samples/s" in throughput_text(plan)


def test_a_run_by_hand(plan: Plan) -> None:
    """1.5e12 tokens of 8,388,608 a step are 178,813.9 steps, and so 178,814 of 8 s: 1,430,512 s or 16.557 days; with 16
    devices 6,357.8 hours, at 2 USD 12,715.7 USD."""
    run = plan.training_run(tokens=1.5e12, price=2.0)
    assert run.steps == 178_814
    assert run.tokens == 178_814 * 8_388_608
    assert run.samples == 178_814 * 1024
    assert run.seconds == 1_430_512
    assert run.days == pytest.approx(16.557, abs=1e-3)
    assert run.device_hours == pytest.approx(6357.83, abs=0.01)
    assert run.money == pytest.approx(12715.66, abs=0.01)
    told = "1.5 T tokens are 178,814 steps: 16.6 days on 16 devices, 6,358 device hours, 12.7 k USD"
    assert str(run).startswith(told)
    assert plan.training_run(samples=2048).steps == 2 == plan.training_run(samples=1025).steps
    assert plan.training_run(steps=3).seconds == 24.0
    assert "24 s on 16 devices, 0.107 device hours, 0.213 USD" in str(plan.training_run(steps=3, price=2.0))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "expected one of these, got none"),
    ({"tokens": 1e9, "steps": 2}, "expected one of these, got tokens, steps"),
    ({"tokens": 0}, "tokens must be a positive number; got 0"),
    ({"steps": 2, "price": -1}, "price must be a positive number; got -1"),
]


@pytest.mark.parametrize(("asked", "message"), WRONG)
def test_what_is_no_run(plan: Plan, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputsError, match=message):
        plan.training_run(**asked)


def test_what_has_no_tokens_or_no_steps(plan: Plan) -> None:
    certificate = plan.certificate.model_copy(update={"limits": None})
    with pytest.raises(
        PlanError,
        match="the model reads no sequences, so the length of the run cannot be given in tokens; give it in "
        "samples or steps",
    ):
        plan.model_copy(update={"certificate": certificate}).training_run(tokens=1e9)
    with pytest.raises(PlanError, match="for inference"):
        plan.model_copy(update={"objective": "infer"}).training_run(steps=1)


@pytest.mark.parametrize(("text", "number"), [("15T", 15e12), ("300 B", 3e11), ("1.5e12", 1.5e12), ("2,000", 2000)])
def test_counts(text: str, number: float) -> None:
    assert parse_count(text) == number


def test_the_command_line_tells_it(plan: Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan.json")
    told = CliRunner().invoke(app, ["budget", str(path), "--tokens", "1.5T", "--price", "2"])
    assert told.exit_code == 0, told.output
    assert "178,814 steps: 16.6 days" in told.output
    refused = CliRunner().invoke(app, ["budget", str(path), "--tokens", "many"])
    assert refused.exit_code == 2
    assert "'many' is not a positive number; expected one like 15T" in " ".join(refused.output.split())
