"""What is given and not a part of the plan is said, and the summary says what the plan does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.plan import StageEstimate
from tests.helpers.sample_programs import llama, plan_of

INPUTS = (torch.linspace(-1, 1, 32).reshape(4, 8),)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def noted(model: nn.Module, topology: Topology | None = None, **more: Any) -> str:
    given: dict[str, Any] = {"loss": loss, "estimate_only": True, **more}
    return " | ".join(partition(model, topology or Topology.local(1), INPUTS, **given).notes)


# --- modes of the model -----------------------------------------------------------------------------------------------


class OwnNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


OF_TWO_MODES: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.1),
    "AlphaDropout": lambda: nn.AlphaDropout(0.1),
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "RReLU": nn.RReLU,
    "OwnNoise": OwnNoise,
}
OF_ONE_MODE: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "ReLU": nn.ReLU,
    "dropout of nothing": lambda: nn.Dropout(0.0),
}


@pytest.mark.parametrize("name", OF_TWO_MODES)
def test_training_in_evaluation_mode_is_said(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), OF_TWO_MODES[name]())
    assert f"evaluation mode, in which {name} may behave differently from training" in noted(model.eval())
    if name != "RReLU":  # which is refused in training
        assert "evaluation mode" not in noted(model.train())


@pytest.mark.parametrize("name", OF_ONE_MODE)
def test_a_mode_without_effect_is_not(name: str) -> None:
    assert noted(nn.Sequential(nn.Linear(8, 8), OF_ONE_MODE[name]()).eval()) == ""


def test_frozen_layers_in_a_trained_model_may_be_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.BatchNorm1d(8))
    model[1].eval()
    assert noted(model) == ""


@pytest.mark.parametrize("name", ["Dropout", "AlphaDropout", "OwnNoise"])
def test_inference_in_training_mode_is_said(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), OF_TWO_MODES[name]())
    assert "the forward draws random numbers" in noted(model, objective="infer", loss=None)
    assert noted(model.eval(), objective="infer", loss=None) == ""


# --- losses -----------------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output = self.linear(x)
        return {"loss": output.abs().mean(), "logits": output}


def test_the_model_s_own_loss_beside_another_is_said() -> None:
    assert "the loss that the model itself returns is ignored" in noted(WithLoss(), loss=lambda o: loss(o["logits"]))
    assert noted(WithLoss(), loss=lambda o: o["loss"]) == ""
    assert noted(WithLoss(), loss=None) == ""


# --- modes of the process ---------------------------------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """Has a gradient of its own, which a trace without gradients would lose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Rounded.apply(self.linear(x)) + torch.arange(8))


@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), lambda: torch.set_grad_enabled(False)],
    ids=["no_grad", "inference_mode", "device", "set_grad_enabled"],
)
def test_regions_around_the_call_are_no_part_of_the_model(around: Callable[[], Any]) -> None:
    model = Rounding()
    expected = partition(model, Topology.local(1), INPUTS, loss=loss)
    with around():
        plan = partition(model, Topology.local(1), INPUTS, loss=loss)
        assert plan.verify(model, INPUTS, loss).ok
    assert plan.program == expected.program
    assert plan.program.states["linear.weight"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_type_is_that_of_the_model_s_own_constants(dtype: torch.dtype) -> None:
    class Scaled(Rounding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.ones(8, dtype=torch.float32) + torch.zeros(8).to(x)

    model = Scaled()
    torch.set_default_dtype(dtype)
    try:
        plan = partition(model, Topology.local(1), INPUTS, loss=loss)
    finally:
        torch.set_default_dtype(torch.float32)
    assert plan.verify(model, INPUTS, loss).ok


def test_settings_of_this_process_are_left_out() -> None:
    cluster = Topology.preset("dgx-h100")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert 'precision="tf32"' in noted(nn.Linear(8, 8), cluster)
        assert "left out" not in noted(nn.Linear(8, 8), cluster, precision="tf32")
        assert "left out" not in noted(nn.Linear(8, 8), cluster, precision="bf16")
        assert "left out" not in noted(nn.Linear(8, 8))  # CPUs have no TF32
    finally:
        torch.set_float32_matmul_precision(before)
    assert "left out" not in noted(nn.Linear(8, 8), cluster)


# --- the summary ------------------------------------------------------------------------------------------------------


def rows(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(llama(pp=4, dp=2, tp=2, tied=True, recompute=True), notes=("dropout is off",))


def test_the_summary_and_the_explanation_name_the_types(plan: Plan) -> None:
    types = "parameters in bf16; gradients in fp32; master copies of parameters in fp32; states of adamw in fp32"
    for text in (plan.summary(), plan.explain()):
        assert f"products in bf16; {types}" in rows(text)


@pytest.mark.parametrize(
    ("precision", "optimizer", "said"),
    [
        ("fp32", "adamw", "products in fp32; parameters in fp32; gradients in fp32; states of adamw in fp32"),
        ("fp64", "adam", "products in fp64; parameters in fp64; gradients in fp64; states of adam in fp64"),
        (
            "fp16",
            "sgd",
            "products in fp16; parameters in fp16; gradients in fp32; master copies of parameters in fp32",
        ),
        ("bf16", "none", "products in bf16; parameters in bf16; gradients in fp32"),
        (
            "tf32",
            "sgd_momentum",
            "products in tf32 on GPUs; parameters in fp32; gradients in fp32; states of",
        ),
    ],
)
def test_types_are_those_of_the_program(precision: str, optimizer: str, said: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    made = partition(model, Topology.local(1), INPUTS, loss=loss, precision=precision, optimizer=optimizer)
    assert said in rows(made.summary())
    assert ("states of" in made.summary()) == (optimizer not in ("sgd", "none"))


def test_a_type_inside_of_forward_is_seen() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.then = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.first(x)
            return self.then(x.float())

    made = partition(Mixed(), Topology.local(1), INPUTS, loss=loss)
    assert "products in bf16 and fp32" in rows(made.summary()) or "products in fp32 and bf16" in rows(made.summary())


@pytest.mark.parametrize(
    ("constraints", "said"),
    [
        ({"zero": 0}, "sharding ZeRO 0: states are not sharded over data-parallel ranks"),
        ({"zero": 1}, "sharding ZeRO 1: optimizer states over 4 ranks of dp"),
        ({"zero": 2}, "sharding ZeRO 2: optimizer states and gradients over 4 ranks of dp"),
        ({"zero": 3}, "sharding ZeRO 3: optimizer states, gradients and parameters over 4 ranks of dp"),
        ({"zero": 3, "dp_shard": 2}, "gradients and parameters over 2 ranks of dp, in 2 replicas"),
    ],
)
def test_the_summary_names_the_stage_of_zero(constraints: dict[str, int], said: str) -> None:
    made = partition(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        Topology.local(4),
        INPUTS,
        loss=loss,
        constraints=Constraints(dp=4, pp=1, tp=1, **constraints),
    )
    assert said in rows(made.summary())
    assert said.removeprefix("sharding ") in rows(made.explain())


def test_inference_has_no_states_to_share() -> None:
    made = partition(nn.Linear(8, 8), Topology.local(1), INPUTS, objective="infer")
    text = made.summary()
    assert "ZeRO" not in text
    assert "recompute" not in text
    assert "parameters in fp32" in rows(text)
    assert "gradients" not in text


def stage(recomputed: int, selective: bool, in_part: int = 0) -> StageEstimate:
    return StageEstimate(
        first="a",
        last="b",
        num_calls=4,
        recomputed=recomputed,
        forward_s=1,
        backward_s=2,
        memory={},
        selective=selective,
        in_part=in_part,
    )


@pytest.mark.parametrize(
    ("stages", "recompute", "said"),
    [
        ((stage(0, False),), None, "recompute nothing"),
        ((stage(4, False),), None, "recompute all calls in full"),
        (
            (stage(0, True, 4),),
            None,
            "4 of 4 calls in part (in part: norms, activation functions and other cheap operators)",
        ),
        ((stage(0, True),), None, "recompute calls in part (in part: norms"),
        ((stage(0, True, 3),), "scores", "recompute 3 of 4 calls in part (in part: attention scores)"),
        ((stage(0, True, 4),), "alternate", "(in part: cheap operators and every second matrix product)"),
        ((stage(1, True, 2),), None, "recompute 1 of 4 calls in full, 2 in part (in part: norms"),
        ((stage(1, True),), None, "recompute 1 of 4 calls in full, others in part (in part: norms"),
        (
            (stage(0, True, 2), stage(0, True, 4), stage(0, True, 2)),
            None,
            "recompute stages 0, 2: 2 of 4 calls in part; stage 1: 4 of 4 calls in part (in part: norms",
        ),
        (
            (stage(2, False), stage(0, False), stage(0, False)),
            None,
            "stage 0: 2 of 4 calls in full; stages 1–2: nothing",
        ),
    ],
)
def test_the_summary_names_what_is_recomputed(
    plan: Plan, stages: tuple[StageEstimate, ...], recompute: Any, said: str
) -> None:
    estimate = plan.estimate.model_copy(update={"stages": stages})
    other = plan.model_copy(update={"estimate": estimate, "constraints": Constraints(recompute=recompute)})
    assert said in rows(other.summary())


def test_notes_are_in_the_summary_and_in_the_explanation(plan: Plan) -> None:
    for text in (plan.summary(), plan.explain()):
        assert "- dropout is off" in text
