"""Products with weights in 8 bits: how far they round, where they are, and that plans with them train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import partitioner
from partitioner import Constraints, Plan, Topology, partition
from partitioner.passes.ops.fp8 import linear_fp8, linear_fp8_input, linear_fp8_weight
from partitioner.runtime.program.precision import check_fp8

pytestmark = pytest.mark.usefixtures("without_baselines")

ops = torch.ops.partition
NAME = "partition.linear_fp8.default"


def error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach(), exact.detach()
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.sampled_from([16, 48]),
    st.sampled_from([16, 64]),
    st.sampled_from([32, 128]),
    st.sampled_from([1e-12, 1.0, 1e4]),
)
def test_products_are_as_near_as_eight_bits_are(seed: int, rows: int, out: int, inner: int, size: float):
    """Each number is off by a 16th of itself at most (a quarter in gradients), and errors of many add up slowly."""
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, rows // 2, inner, generator=draw) * size).bfloat16()
    weight = torch.randn(out, inner, generator=draw).bfloat16()
    grad = (torch.randn(2, rows // 2, out, generator=draw) * size).bfloat16()
    flat, of = x.flatten(0, 1).double(), grad.flatten(0, 1).double()
    assert error(linear_fp8(x, weight), x.double() @ weight.double().t()) < 0.06
    assert error(linear_fp8_input(grad, weight), grad.double() @ weight.double()) < 0.12
    assert error(linear_fp8_weight(grad, x), of.t() @ flat) < 0.12


def test_a_tensor_of_zeros_gives_zeros_and_what_is_not_finite_stays_so():
    weight = torch.randn(16, 32).bfloat16()
    assert not linear_fp8(torch.zeros(16, 32).bfloat16(), weight).any()
    for wrong in (torch.inf, torch.nan):
        x = torch.randn(16, 32).bfloat16()
        x[3, 4] = wrong
        assert not linear_fp8(x, weight).isfinite().all()
        assert not linear_fp8_weight(torch.randn(16, 16).bfloat16(), x).isfinite().all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_its_gradients_are_the_two_other_products(biased: bool, transposed: bool):
    shapes = (4, 16, 32), (32, 48) if transposed else (48, 32), (48,)
    x, weight, bias = (torch.randn(*shape).bfloat16().requires_grad_() for shape in shapes)
    given, grad = (x, weight, bias if biased else None, transposed), torch.randn(4, 16, 48).bfloat16()
    found = ops.linear_fp8(*given)
    exact = x.double() @ (weight.double() if transposed else weight.double().t()) + (bias.double() if biased else 0.0)
    assert error(found, exact) < 0.06
    of_x, of_weight, *of_bias = torch.autograd.grad(found, (x, weight, bias)[: 2 + biased], grad)
    assert torch.equal(of_x, linear_fp8_input(grad, weight, transposed))
    assert torch.equal(of_weight, linear_fp8_weight(grad, x, transposed))
    assert error(of_x, grad.double() @ (weight.double().t() if transposed else weight.double())) < 0.12
    assert of_weight.shape == weight.shape
    assert all(error(b, grad.double().sum((0, 1))) < 0.01 for b in of_bias)
    torch.library.opcheck(ops.linear_fp8.default, given, test_utils=("test_schema", "test_faketensor"))


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def tokens(length: int = 16) -> dict[str, Any]:
    ids = torch.randint(0, 128, (8, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def planned(model: nn.Module, precision: str, length: int = 16, **pins: Any) -> Plan:
    return partition(model, Topology.local(2), tokens(length), constraints=Constraints(**pins), precision=precision)


def targets(plan: Plan) -> list[str]:
    assert plan.program is not None
    return [str(node.get("target")) for block in plan.program.blocks.values() for node in block.nodes]


def products(plan: Plan) -> list[str]:
    return [target for target in targets(plan) if "linear" in target]


@pytest.mark.parametrize("pins", [dict(tp=2), dict(pp=2, schedule="zb-1p"), dict(dp=2, zero=3)], ids=str)
def test_a_plan_computes_nearly_what_it_does_in_bf16(pins: dict[str, Any], tmp_path: Path):
    model, inputs = llama(), tokens()
    plan, plain = (planned(model, precision, **pins) for precision in ("fp8", "bf16"))
    assert set(products(plan)) == {NAME} and not plan.planned_only
    assert Plan.load(plan.save(tmp_path / "plan.json")).program == plan.program
    assert plan.verify(model, inputs).ok
    found, exact = (partitioner.run_local(p, model, inputs) for p in (plan, plain))
    assert found.loss is not None and exact.loss is not None
    assert float(found.loss) == pytest.approx(float(exact.loss), rel=0.01)
    assert float(found.loss) != float(exact.loss)
    far = {name: error(grad, exact.grads[name]) for name, grad in found.grads.items()}
    assert 0.01 < max(far.values()) < 0.35, far


class Forms(nn.Module):
    """A product with a weight in each form that models have it in."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, width), nn.Linear(32, 16, bias=False)
        self.conv = nn.Conv1d(width, width, 1)
        shapes = {"plain": (width, width), "flat": (width, 32), "turned": (32, 32), "bias": (32,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape) * 0.2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x)) @ self.plain
        y = self.conv(y.transpose(1, 2)).transpose(1, 2)
        flat = torch.addmm(self.bias, y.reshape(-1, y.shape[-1]), self.flat)
        flat = flat + nn.functional.linear(flat, self.turned.t())
        return self.last(flat).square().mean()


def forms(width: int = 64) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Forms(width).bfloat16(), {
        "x": torch.randn(16, 16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    }


@pytest.mark.parametrize("pins", [dict(tp=2), dict(pp=2), dict(dp=2)], ids=str)
def test_all_forms_of_products_with_weights_are_in_eight_bits(pins: dict[str, Any]):
    """With a bias, as ``x @ weight`` of two and three dims, ``addmm``, and of a transposed weight; not convolutions."""
    model, inputs = forms()
    plan, plain = (
        partition(model, Topology.local(2), inputs, constraints=Constraints(**pins), precision=precision)
        for precision in ("fp8", "bf16")
    )
    assert targets(plan).count(NAME) == 5
    assert not {"aten.linear.default", "aten.mm.default", "aten.addmm.default", "aten.matmul.default"} & set(
        targets(plan)
    )
    assert plan.notes == (
        "5 of 6 products with weights are in fp8, the others in 16 bits: conv.weight (no kernel in fp8 for conv1d)",
    )
    assert plan.notes[0] in " ".join(plan.summary().split())
    assert not plain.notes
    assert plan.verify(model, inputs).ok
    found, exact = (partitioner.run_local(p, model, inputs) for p in (plan, plain))
    assert found.loss is not None and exact.loss is not None
    assert float(found.loss) == pytest.approx(float(exact.loss), rel=0.2)
    far = {name: error(grad, exact.grads[name]) for name, grad in found.grads.items()}
    assert set(far) == {name for name, _ in model.named_parameters()}
    assert max(far.values()) < 0.35, far


def test_products_that_kernels_do_not_take_stay():
    """Eight samples of 15 tokens over two ranks: 60 rows, which no 16 divides."""
    plan = planned(llama(), "fp8", length=15, dp=2)
    assert not [target for target in products(plan) if target == NAME]
    assert plan.notes[0].startswith("0 of 15 products with weights are in fp8, the others in 16 bits: ")
    assert "16 does not divide all of 60 x 64 by 64 x 32" in plan.notes[0]


def test_widths_that_kernels_do_not_take_stay():
    model, inputs = forms(width=56)
    plan = partition(model, Topology.local(1), inputs, precision="fp8")
    assert targets(plan).count(NAME) == 2  # those that have no dim of 56
    assert plan.notes[0].startswith("2 of 6 products")
    assert "first.weight (16 does not divide all of 256 x 32 by 32 x 56)" in plan.notes[0]
    assert plan.verify(model, inputs).ok


@pytest.mark.slow
def test_it_learns():
    model, inputs = llama(), tokens()
    plan = partition(model, Topology.local(1), inputs, precision="fp8")
    assert set(products(plan)) == {NAME}
    engine = partitioner.Engine(plan, weights=model)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        losses.append(float(engine.step(inputs)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.6 * losses[0]


def test_with_experts_it_is_planned_only():
    config = MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    plan = planned(MixtralForCausalLM(config).bfloat16(), "fp8", dp=2)
    assert plan.planned_only == ("precision=fp8 with experts",) and plan.written is None


def test_devices_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch):
    program = planned(llama(), "fp8", tp=2).program
    assert program is not None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(partitioner.LaunchError, match=r"A100 \(compute capability 8.0\) has no kernels; expected 8.9"):
        check_fp8(program, torch.device("cuda"))
    check_fp8(program, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_fp8(program, torch.device("cuda"))


def test_weights_are_called_as_those_of_other_products():
    """The weight of ``x @ weight`` is the other way round: sharded on its first dim it is row-parallel."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Parameter(torch.empty(256, 64))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.relu(self.up(x)) @ self.down).square().mean()

    with torch.device("meta"):
        model, x = Pair(), torch.empty(32, 16, 64)
    plan = partition(model, Topology.local(2), {"x": x}, precision="fp8", constraints=Constraints(tp=2))
    assert targets(plan).count(NAME) == 2
    text = plan.explain()
    assert "column-parallel (S0): weight" in text
    assert "row-parallel (S0): down" in text
