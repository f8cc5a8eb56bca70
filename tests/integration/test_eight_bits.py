"""Products with weights in 8 bits: how far they round, where they are, and that plans with them train."""

from __future__ import annotations

import math
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
from partitioner.passes.ops.scaled_products import quantize_blocks, quantize_rows, swizzle_scales, widen
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


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config).bfloat16()


def test_with_experts_it_is_planned_only():
    plan = planned(mixtral(), "fp8", dp=2)
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


def round_to_blocks(x: Tensor) -> Tensor:
    """What MXFP8 keeps of a matrix, number by number: 32 of a row share the least power of two with which none exceeds
    448, the largest number of the type."""
    made = torch.empty(x.shape, dtype=torch.float64)
    for i, row in enumerate(x.double()):
        for start in range(0, len(row), 32):
            part = row[start : start + 32]
            largest = float(part.abs().max())
            power = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 2.0**-127
            made[i, start : start + 32] = (part / power).float().to(torch.float8_e4m3fn).double() * power
    return made


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_finer_scales_keep_small_rows(scaling: str):
    """Rows of very different sizes: one scale per tensor loses the small ones."""
    sizes = torch.logspace(-6, 6, 64)[:, None]
    x, weight = (torch.randn(64, 128) * sizes).bfloat16(), torch.randn(96, 128).bfloat16()
    exact = x.double() @ weight.double().t()
    found, coarse = linear_fp8(x, weight, None, False, scaling), linear_fp8(x, weight)
    assert max(error(a, b) for a, b in zip(found, exact, strict=True)) < 0.06
    assert error(coarse[0], exact[0]) > 0.9


def test_blocks_are_those_of_the_format():
    x = (torch.randn(16, 96) * torch.logspace(-20, 20, 96)).bfloat16()
    x[3, 32:64] = 0
    x[4, :32] = torch.where(torch.arange(32) == 5, 448.0, 1.0).bfloat16()  # the scale is 1 itself
    values, scales = quantize_blocks(x)
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float8_e8m0fnu and scales.shape == (16, 3)
    assert torch.equal(widen(values, scales).double(), round_to_blocks(x))
    assert float(scales[4, 0].float()) == 1.0


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_products_multiply_the_rounded_numbers(scaling: str):
    """The product is that of the widened operands, to the rounding of its result."""
    x, weight = torch.randn(64, 128).bfloat16(), torch.randn(32, 128).bfloat16()
    quantize = quantize_rows if scaling == "row" else quantize_blocks
    (a, of_a), (b, of_b) = quantize(x), quantize(weight)
    exact = widen(a, of_a).double() @ widen(b, of_b).double().t()
    torch.testing.assert_close(linear_fp8(x, weight, None, False, scaling).double(), exact, rtol=2**-7, atol=1e-3)


def test_the_reference_is_the_kernel():
    """Of torch's own product with one scale per row, on a CPU."""
    x, weight = torch.randn(64, 128).bfloat16(), torch.randn(32, 128).bfloat16()
    (a, of_a), (b, of_b) = quantize_rows(x), quantize_rows(weight)
    kernel = torch._scaled_mm(a, b.t(), of_a, of_b.t(), out_dtype=torch.bfloat16)
    torch.testing.assert_close(linear_fp8(x, weight, None, False, "row"), kernel, rtol=2**-7, atol=1e-3)


def test_scales_are_in_the_order_of_the_kernel():
    """Row r, column c of a tile of 128 x 4 is at (r % 32) * 16 + (r // 32) * 4 + c; tiles are in rows."""
    rows, columns = 200, 6
    scale = torch.randint(1, 255, (rows, columns), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    made, given = swizzle_scales(scale).view(torch.uint8), scale.view(torch.uint8)
    assert made.numel() == 256 * 8
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * 2 + column // 4
            place = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
            assert made[place] == given[row, column]
    assert int((made != 0).sum()) == rows * columns


@pytest.mark.parametrize("scaling", ["row", "block"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_with_finer_scales(scaling: str, transposed: bool):
    shapes = (4, 16, 32), (32, 64) if transposed else (64, 32), (64,)
    x, weight, bias = (torch.randn(*shape).bfloat16().requires_grad_() for shape in shapes)
    given, grad = (x, weight, bias, transposed, scaling), torch.randn(4, 16, 64).bfloat16()
    of_x, of_weight, of_bias = torch.autograd.grad(ops.linear_fp8(*given), (x, weight, bias), grad)
    wide = weight.double() if transposed else weight.double().t()
    assert error(of_x, grad.double() @ wide.t()) < 0.06
    exact = x.double().flatten(0, 1).t() @ grad.double().flatten(0, 1)
    assert error(of_weight, exact if transposed else exact.t()) < 0.06
    assert error(of_bias, grad.double().sum((0, 1))) < 0.01
    torch.library.opcheck(ops.linear_fp8.default, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_what_is_not_finite_stays_so_in_its_row(scaling: str):
    x, weight = torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    for wrong in (torch.inf, torch.nan):
        x[3, 4] = wrong
        found = linear_fp8(x, weight, None, False, scaling)
        assert not found[3].isfinite().any()
        assert found[:3].isfinite().all()


@pytest.mark.parametrize("scaling", ["row", "block"])
@pytest.mark.parametrize("pins", [dict(tp=2), dict(pp=2, schedule="zb-1p")], ids=str)
def test_plans_with_finer_scales_run(scaling: Any, pins: dict[str, Any], tmp_path: Path):
    model, inputs = llama(), tokens(32)
    plan, plain = (
        planned(model, precision, 32, **pins, **more)
        for precision, more in (("fp8", {"fp8_scaling": scaling}), ("bf16", {}))
    )
    assert plan.program is not None and not plan.planned_only
    found = [n["args"][4] for b in plan.program.blocks.values() for n in b.nodes if n.get("target") == NAME]
    assert found and set(found) == {scaling}
    assert Plan.load(plan.save(tmp_path / "plan.json")).program == plan.program
    assert plan.estimate.simulated == pytest.approx(plan.estimate.step_time, rel=0.01)
    assert plan.verify(model, inputs).ok
    run, exact = (partitioner.run_local(p, model, inputs) for p in (plan, plain))
    assert run.loss is not None and exact.loss is not None
    assert float(run.loss) == pytest.approx(float(exact.loss), rel=0.01)
    far = {name: error(grad, exact.grads[name]) for name, grad in run.grads.items()}
    assert 0.001 < max(far.values()) < 0.25, far


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch):
    model, inputs = llama(), tokens(32)
    with pytest.raises(partitioner.ConstraintError, match="fp8_scaling='row' without precision='fp8'"):
        partition(model, Topology.local(2), inputs, constraints=Constraints(fp8_scaling="row"))
    for name, wanted in (("dgx-h100", "h100-sxm"), ("mi355x", "mi355x")):
        with pytest.raises(partitioner.ConstraintError, match=f"{wanted} of .* cannot multiply in MXFP8"):
            partition(
                model, Topology.preset(name), inputs, precision="fp8", constraints=Constraints(fp8_scaling="block")
            )
    program = planned(llama(), "fp8", 32, tp=2, fp8_scaling="block").program
    assert program is not None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(partitioner.LaunchError, match=r"MXFP8 .* H100 .* expected 10.0 .*fp8_scaling='row'"):
        check_fp8(program, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    check_fp8(program, torch.device("cuda"))


def test_blocks_need_sizes_of_whole_blocks():
    """16 rows are enough for one scale per row, not for blocks of 32 in the gradient of the weight."""
    model = llama()
    plans = [planned(model, "fp8", 2, tp=2, fp8_scaling=s, microbatch_size=8) for s in ("row", "block")]
    assert [targets(plan).count(NAME) > 0 for plan in plans] == [True, False]
    assert any("32 does not divide" in note for note in plans[1].notes)


EXPERTS = "partition.expert_mm.default"


def test_rows_are_multiplied_with_the_rounded_matrices_of_their_experts():
    """Forward and the gradient of the rows; the gradient of the matrices is that of 16 bits."""
    rows, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((40, 32), (3, 32, 48)))
    ends, grad = torch.tensor([16, 16, 32], dtype=torch.int32), torch.randn(40, 48).bfloat16()
    found = ops.grouped_mm(rows, weight, ends, "row")
    exact = torch.zeros(40, 48)
    for e, (start, end) in enumerate(((0, 16), (16, 16), (16, 32))):
        a, b = widen(*quantize_rows(rows[start:end])), widen(*quantize_rows(weight[e].t()))
        exact[start:end] = a @ b.t()
    torch.testing.assert_close(found, exact.bfloat16(), rtol=2**-7, atol=1e-3)
    assert not torch.equal(found, ops.grouped_mm(rows, weight, ends))
    of_rows, of_weight = torch.autograd.grad(found, (rows, weight), grad)
    assert torch.equal(of_rows, ops.grouped_mm(grad, weight.transpose(1, 2), ends, "row"))
    assert torch.equal(of_weight, ops.grouped_mm_weight(rows, grad, ends))
    expert = torch.randint(0, 3, (40,))
    given = (rows, weight, expert, "row")
    torch.library.opcheck(ops.expert_mm.default, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("pins", [dict(dp=2, ep=2), dict(tp=2)], ids=str)
def test_experts_with_a_scale_for_each_row_run(pins: dict[str, Any]):
    model, inputs = mixtral(), tokens(32)
    more: dict[str, Any] = {"fp8_scaling": "row"}
    plan, plain = planned(model, "fp8", 32, **pins, **more), planned(model, "bf16", 32, **pins)
    assert plan.program is not None and not plan.planned_only
    found = [n["args"][3:] for b in plan.program.blocks.values() for n in b.nodes if n.get("target") == EXPERTS]
    assert found and all(how == ["row"] for how in found)
    assert plan.estimate.simulated == pytest.approx(plan.estimate.step_time, rel=0.01)
    assert plan.verify(model, inputs).ok
    run, exact = (partitioner.run_local(p, model, inputs) for p in (plan, plain))
    assert run.loss is not None and exact.loss is not None
    assert float(run.loss) == pytest.approx(float(exact.loss), rel=0.02)
    assert float(run.loss) != float(exact.loss)


def test_experts_in_eight_bits_need_their_kernel(monkeypatch: pytest.MonkeyPatch):
    program = planned(mixtral(), "fp8", 32, dp=2, fp8_scaling="row").program
    blocks = planned(mixtral(), "fp8", 32, dp=2, fp8_scaling="block")
    assert not blocks.planned_only
    assert all(
        n["args"][3:] == [] for b in blocks.program.blocks.values() for n in b.nodes if n.get("target") == EXPERTS
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    with pytest.raises(partitioner.LaunchError, match=r"experts in fp8.* B200 .*expected 9.0"):
        check_fp8(program, torch.device("cuda"))
    check_fp8(blocks.program, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_fp8(program, torch.device("cuda"))
