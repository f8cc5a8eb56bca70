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

import runtime
from partitioner import Constraints, Plan, Topology, partition
from passes.eight_bits import linear_fp8, linear_fp8_input, linear_fp8_weight
from runtime.precision import check_fp8

ops = torch.ops.partition
NAME = "partition.linear_fp8.default"


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))


@settings(max_examples=40, deadline=None)
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


def test_its_gradients_are_the_two_other_products():
    x, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((4, 16, 32), (16, 32)))
    grad = torch.randn(4, 16, 16).bfloat16()
    of_x, of_weight = torch.autograd.grad(ops.linear_fp8(x, weight), (x, weight), grad)
    assert torch.equal(of_x, linear_fp8_input(grad, weight))
    assert torch.equal(of_weight, linear_fp8_weight(grad, x))
    torch.library.opcheck(ops.linear_fp8.default, (x, weight), test_utils=("test_schema", "test_faketensor"))


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


def products(plan: Plan) -> list[str]:
    assert plan.program is not None
    targets = [str(node.get("target")) for block in plan.program.blocks.values() for node in block.nodes]
    return [target for target in targets if "linear" in target]


@pytest.mark.parametrize("pins", [dict(tp=2), dict(pp=2, schedule="zb-1p"), dict(dp=2, zero=3)], ids=str)
def test_a_plan_computes_nearly_what_it_does_in_bf16(pins: dict[str, Any], tmp_path: Path):
    model, inputs = llama(), tokens()
    plan, plain = (planned(model, precision, **pins) for precision in ("fp8", "bf16"))
    assert set(products(plan)) == {NAME} and not plan.planned_only
    assert Plan.load(plan.save(tmp_path / "plan.json")).program == plan.program
    assert plan.verify(model, inputs).ok
    found, exact = (runtime.run_local(p, model, inputs) for p in (plan, plain))
    assert found.loss is not None and exact.loss is not None
    assert float(found.loss) == pytest.approx(float(exact.loss), rel=0.01)
    assert float(found.loss) != float(exact.loss)
    far = {name: error(grad, exact.grads[name]) for name, grad in found.grads.items()}
    assert 0.01 < max(far.values()) < 0.35, far


def test_products_that_kernels_do_not_take_stay():
    """Eight samples of 15 tokens over two ranks: 60 rows, which no 16 divides."""
    assert not [target for target in products(planned(llama(), "fp8", length=15, dp=2)) if target == NAME]


def test_it_learns():
    model, inputs = llama(), tokens()
    plan = partition(model, Topology.local(1), inputs, precision="fp8")
    assert set(products(plan)) == {NAME}
    engine = runtime.Engine(plan, weights=model)
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
    with pytest.raises(runtime.LaunchError, match=r"A100 \(compute capability 8.0\) has no kernels; expected 8.9"):
        check_fp8(program, torch.device("cuda"))
    check_fp8(program, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_fp8(program, torch.device("cuda"))
