"""Products with weights in NVFP4: how numbers are rounded, where the products are, and that plans with them train."""

from __future__ import annotations

import math
import struct
from itertools import pairwise
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
from partitioner.passes.errors import InputsError
from partitioner.passes.ops import scaled_products
from partitioner.passes.ops.fp8 import linear_fp8, linear_fp8_input, linear_fp8_weight
from partitioner.passes.ops.scaled_products import Operand, rotate, round_to_nvfp4, widen_nvfp4
from partitioner.runtime.program.precision import check_fp8

pytestmark = pytest.mark.usefixtures("without_baselines")

ops = torch.ops.partition
NAME = "partition.linear_fp8.default"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]


def error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach(), exact.detach()
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))


def single(x: float) -> float:
    """``x``, the result of one operation on numbers in single precision, in single precision."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def nearest(x: float, magnitudes: list[float]) -> float:
    """The nearest of the numbers of a format, which are sorted by their bits; of two as near, the one whose bits are
    even."""
    places = range(len(magnitudes))
    place = min(places, key=lambda i: (abs(abs(x) - magnitudes[i]), i % 2))
    return math.copysign(magnitudes[place], x)


def reference(x: list[list[float]], tall: int) -> tuple[list[list[float]], list[list[float]]]:
    """What NVFP4 keeps of a matrix with blocks of ``tall`` x 16, number by number, and the numbers before they are
    rounded to E2M1, over their scales."""
    largest = max(abs(v) for row in x for v in row)
    scale = single(max(largest, single(1e-30)) / 2688)
    kept, scaled = ([[0.0] * len(row) for row in x] for _ in range(2))
    for top in range(0, len(x), tall):
        for left in range(0, len(x[0]), 16):
            places = [(i, j) for i in range(top, top + tall) for j in range(left, left + 16)]
            block = max(abs(x[i][j]) for i, j in places)
            wide = single(nearest(single(block / single(6 * scale)), E4M3) * scale)
            factor = single(1 / wide) if wide else 0.0
            for i, j in places:
                scaled[i][j] = single(x[i][j] * factor)
                kept[i][j] = single(nearest(scaled[i][j], E2M1) * wide)
    return kept, scaled


def draw_matrix(seed: int, rows: int, columns: int, spread: float) -> Tensor:
    """Numbers of very different sizes, some of which are halfway between two of the format."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=draw) * torch.logspace(-spread, spread, columns)
    x[0, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2)
    return x.bfloat16()


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.sampled_from([16, 48]),
    st.sampled_from([16, 96]),
    st.sampled_from([0.0, 1.0, 6.0]),
    st.sampled_from(["numbers", "weight"]),
)
def test_numbers_are_rounded_as_the_format_says(seed: int, rows: int, columns: int, spread: float, operand: Operand):
    x = draw_matrix(seed, rows, columns, spread)
    exact, _ = reference(x.tolist(), 16 if operand == "weight" else 1)
    assert widen_nvfp4(round_to_nvfp4(x, operand)).tolist() == exact


def test_a_tie_goes_to_the_number_with_even_bits():
    x = torch.tensor(
        [[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], [-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.0]]
    )
    x = torch.cat([x.reshape(1, 16), torch.full((1, 16), 2688.0)])  # both scales are 1
    found = widen_nvfp4(round_to_nvfp4(x, "numbers"))[0]
    assert found.tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -1, -2, -2, -4, -4, 0]


def test_two_numbers_are_in_a_byte_and_scales_have_their_types():
    x = torch.tensor([[6.0, -0.5, 0.0, 1.5] + [0.0] * 12, [2688.0] * 16])
    rounded = round_to_nvfp4(x, "numbers")
    assert rounded.values.view(torch.float4_e2m1fn_x2).shape == (2, 8)
    assert rounded.values[0].tolist() == [0b1001_0111, 0b0011_0000, *[0] * 6]
    assert rounded.scales.dtype == torch.float8_e4m3fn and rounded.scales.float().tolist() == [[1.0], [448.0]]
    assert rounded.scale.dtype == torch.float32 and float(rounded.scale) == 1.0


def test_gradients_are_right_on_average():
    """Each is one of its two neighbours, the nearer more often. Another number elsewhere makes other draws."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0] = 8.0
    _, scaled = reference(x.tolist(), 1)
    levels = sorted({*E2M1, *(-v for v in E2M1)})
    ups, draws = torch.zeros(32, 64), 400
    for i in range(draws):
        more = torch.cat([x, torch.full((16, 64), i / 128).bfloat16()])
        rounded = round_to_nvfp4(more, "gradient")
        wide = (rounded.scales.float() * rounded.scale).repeat_interleave(16, 1)
        found = (widen_nvfp4(rounded) / wide)[:32]
        ups += (found > torch.tensor(scaled)).float()
        if i == 0:
            for row, kept in zip(scaled, found.tolist(), strict=True):
                for value, got in zip(row, kept, strict=True):
                    value = min(max(value, -6.0), 6.0)
                    pair = next((a, b) for a, b in pairwise(levels) if a <= value <= b)
                    assert min(abs(got - level) for level in pair) < 1e-5, (value, got)
    below = torch.tensor([[max(a for a in levels if a <= min(max(v, -6.0), 6.0)) for v in row] for row in scaled])
    above = torch.tensor([[min(a for a in levels if a >= min(max(v, -6.0), 6.0)) for v in row] for row in scaled])
    inside = above > below
    chance = ((torch.tensor(scaled) - below) / (above - below))[inside]
    off = (ups[inside] / draws - chance) / (chance * (1 - chance) / draws + 1e-4).sqrt()
    assert float(off.abs().max()) < 5 and 0.8 < float(off.std()) < 1.2 and abs(float(off.mean())) < 0.1


def test_random_numbers_are_even_and_follow_from_the_bits():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = scaled_products._draw_by_bits(x)
    assert float(found.min()) >= 0 and float(found.max()) < 1
    counts = torch.histc(found, 64, 0, 1)
    assert float(((counts - 1024) ** 2 / 1024).sum()) < 110  # chi-squared with 63 degrees of freedom: 1 in 5,000
    assert torch.equal(found, scaled_products._draw_by_bits(x.clone()))
    x[3, 4] += 1
    other = scaled_products._draw_by_bits(x)
    assert abs(float(torch.corrcoef(torch.stack([found, other]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([found[1:], found[:-1]]))[0, 1])) < 0.02


def test_the_rotation_cancels_in_products():
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    matrix = rotate(torch.eye(16))
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25))
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert 3 < int((matrix[:, 0] < 0).sum()) < 13  # its signs are random, as those of the first column show
    torch.testing.assert_close(rotate(a) @ rotate(b).t(), a @ b.t(), rtol=1e-4, atol=1e-4)


def as_multiplied(x: Tensor, operand: Operand, rotated: bool = False) -> Tensor:
    x = x.contiguous()
    return widen_nvfp4(round_to_nvfp4(rotate(x) if rotated else x, operand)).double()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_the_rounded_operands(biased: bool, transposed: bool):
    """Forward and both gradients, to the rounding of the result; also that of the bias, which is not rounded."""
    shapes = (4, 16, 96), (96, 64) if transposed else (64, 96), (64,)
    x, weight, bias = (torch.randn(*shape).bfloat16().requires_grad_() for shape in shapes)
    given, grad = (x, weight, bias if biased else None, transposed, "nvfp4"), torch.randn(4, 16, 64).bfloat16()
    found = ops.linear_fp8(*given)
    rows, flat, of = (weight.t() if transposed else weight), x.flatten(0, 1), grad.flatten(0, 1)
    exact = as_multiplied(flat, "numbers") @ as_multiplied(rows, "weight").t() + (bias.double() if biased else 0.0)
    close: dict[str, float] = dict(rtol=2**-7, atol=0.05)
    torch.testing.assert_close(found.flatten(0, 1).double(), exact, **close)
    of_x, of_weight, *of_bias = torch.autograd.grad(found, (x, weight, bias)[: 2 + biased], grad)
    exact_x = as_multiplied(of, "gradient") @ as_multiplied(rows.t(), "weight").t()
    exact_weight = as_multiplied(of.t(), "gradient", True) @ as_multiplied(flat.t(), "numbers", True).t()
    torch.testing.assert_close(of_x.flatten(0, 1).double(), exact_x, **close)
    torch.testing.assert_close(of_weight.double(), exact_weight.t() if transposed else exact_weight, **close)
    assert all(error(b, of.double().sum(0)) < 0.01 for b in of_bias)
    assert torch.equal(of_x, linear_fp8_input(grad, weight, transposed, "nvfp4"))
    assert torch.equal(of_weight, linear_fp8_weight(grad, x, transposed, "nvfp4"))
    torch.library.opcheck(ops.linear_fp8.default, given, test_utils=("test_schema", "test_faketensor"))


def test_forward_and_backward_multiply_by_the_same_weight():
    weight = torch.randn(64, 96).bfloat16()
    ahead, back = (widen_nvfp4(round_to_nvfp4(w.contiguous(), "weight")) for w in (weight, weight.t()))
    assert torch.equal(ahead, back.t())


def test_products_are_as_near_as_four_bits_are():
    x, weight, grad = (torch.randn(*shape).bfloat16() for shape in ((256, 512), (128, 512), (256, 128)))
    assert error(linear_fp8(x, weight, None, False, "nvfp4"), x.double() @ weight.double().t()) < 0.16
    assert error(linear_fp8_input(grad, weight, False, "nvfp4"), grad.double() @ weight.double()) < 0.19
    assert error(linear_fp8_weight(grad, x, False, "nvfp4"), grad.double().t() @ x.double()) < 0.19


def test_the_rotation_spreads_outliers():
    """Of a weight's gradient, whose operands have a few large rows: without the rotation small numbers are lost."""
    x, grad = torch.randn(256, 64).bfloat16(), torch.randn(256, 64).bfloat16()
    x[::16] *= 200
    grad[::16] = 0
    exact = grad.double().t() @ x.double()
    plain = as_multiplied(grad.t(), "gradient") @ as_multiplied(x.t(), "numbers").t()
    assert error(linear_fp8_weight(grad, x, False, "nvfp4"), exact) != error(plain, exact)
    assert error(plain, exact) > 0.3


def test_a_tensor_of_zeros_gives_zeros_and_what_is_not_finite_stays_so():
    weight = torch.randn(32, 64).bfloat16()
    assert not linear_fp8(torch.zeros(32, 64).bfloat16(), weight, None, False, "nvfp4").any()
    for wrong in (torch.inf, torch.nan):
        x = torch.randn(32, 64).bfloat16()
        x[3, 4] = wrong
        assert not linear_fp8(x, weight, None, False, "nvfp4").isfinite().any()
        assert not linear_fp8_weight(torch.randn(32, 32).bfloat16(), x, False, "nvfp4").isfinite().any()


def test_the_kernel_gets_what_it_reads(monkeypatch: pytest.MonkeyPatch):
    """A kernel in plain Python, by the layouts that cuBLAS documents, computes the same product."""
    a, b = (round_to_nvfp4(torch.randn(rows, 96).bfloat16(), "numbers") for rows in (160, 32))

    def scaled_mm(
        left: Tensor, right: Tensor, of_left: Any, how_left: Any, of_right: Any, how_right: Any, *orders: Any,
        output_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        F = torch.nn.functional
        assert left.dtype == right.dtype == torch.float4_e2m1fn_x2 and right.stride() == (1, 48)
        assert how_left == how_right == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        assert orders == ([F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE],) * 2

        def numbers(packed: Tensor, scales: list[Tensor]) -> Tensor:
            bits, (blocks, whole) = packed.view(torch.uint8), scales
            assert blocks.dtype == torch.float8_e4m3fn
            made = torch.empty(len(bits), 96)
            for row in range(len(bits)):
                for column in range(96):
                    code = int(bits[row, column // 2]) >> 4 * (column % 2) & 15
                    block = column // 16
                    tile = (row // 128) * 2 + block // 4
                    place = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
                    value = E2M1[code & 7] * (-1 if code & 8 else 1)
                    made[row, column] = value * float(blocks[place].float()) * float(whole)
            return made

        return (numbers(left, of_left) @ numbers(right.t(), of_right).t()).to(output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    found = scaled_products._multiply_on_gpu(a, b)
    torch.testing.assert_close(found, (widen_nvfp4(a) @ widen_nvfp4(b).t()).bfloat16(), rtol=2**-7, atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_rounding_is_that_of_eager():
    """As on GPUs, with sizes that change."""
    tables, compiled = scaled_products._tables("cpu"), scaled_products._compiled_rounding()
    for shape in ((256, 512), (64, 96)):
        for tall, at_random in ((1, False), (16, False), (1, True)):
            x = torch.randn(shape).bfloat16()
            pairs = zip(
                *(f(x, tables, tall, at_random) for f in (compiled, scaled_products._round_blocks)), strict=True
            )
            assert all(torch.equal(a.float(), b.float()) for a, b in pairs)


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=128, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def tokens(length: int = 32) -> dict[str, Any]:
    ids = torch.randint(0, 128, (8, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def planned(model: nn.Module, precision: str = "nvfp4", length: int = 32, **pins: Any) -> Plan:
    return partition(model, Topology.local(2), tokens(length), constraints=Constraints(**pins), precision=precision)


def scalings(plan: Plan) -> list[Any]:
    assert plan.program is not None
    return [n["args"][4] for b in plan.program.blocks.values() for n in b.nodes if n.get("target") == NAME]


@pytest.mark.parametrize("pins", [dict(tp=2), dict(pp=2, schedule="zb-1p"), dict(dp=2, zero=3)], ids=str)
def test_a_plan_computes_nearly_what_it_does_in_bf16(pins: dict[str, Any], tmp_path: Path):
    model, inputs = llama(), tokens()
    plan, plain = (planned(model, precision, **pins) for precision in ("nvfp4", "bf16"))
    assert set(scalings(plan)) == {"nvfp4"} and not plan.planned_only and plan.precision == "nvfp4"
    assert "products in nvfp4 and bf16" in plan.summary()
    assert Plan.load(plan.save(tmp_path / "plan.json")).program == plan.program
    assert plan.estimate.simulated == pytest.approx(plan.estimate.step_time, rel=0.01)
    assert plan.verify(model, inputs).ok
    found, again, exact = (partitioner.run_local(p, model, inputs) for p in (plan, plan, plain))
    assert found.loss is not None and exact.loss is not None and again.loss is not None
    assert float(found.loss) == pytest.approx(float(exact.loss), rel=0.01)
    assert float(found.loss) != float(exact.loss)
    far = {name: error(grad, exact.grads[name]) for name, grad in found.grads.items()}
    assert 0.05 < max(far.values()) < 0.5, far
    assert float(again.loss) == float(found.loss)
    assert all(torch.equal(grad, again.grads[name]) for name, grad in found.grads.items())


def test_products_of_which_a_loss_is_made_keep_16_bits():
    plan = planned(llama(), dp=2)
    assert plan.notes == (
        "14 of 15 products with weights are in nvfp4, the others in 16 bits: "
        "lm_head.weight (a loss or a choice is made of it)",
    )
    assert len(scalings(plan)) == 7  # of a layer


def test_experts_and_routers_keep_16_bits():
    """Routers because a choice is made of them; experts as with blocks of 8-bit numbers."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=128, num_local_experts=32, use_cache=False, output_router_logits=True,
    )  # fmt: skip
    model = MixtralForCausalLM(config).bfloat16()
    plan = planned(model, dp=2)
    assert plan.program is not None and not plan.planned_only
    found = [str(n.get("target")) for b in plan.program.blocks.values() for n in b.nodes]
    experts = [
        n["args"][3:] for b in plan.program.blocks.values() for n in b.nodes if "expert_mm" in str(n.get("target"))
    ]
    assert found.count(NAME) == 4 and experts and not any(experts)
    assert plan.verify(model, tokens()).ok


def test_sizes_of_which_32_is_no_divisor_stay():
    plan = planned(llama(), length=28, dp=2, microbatch_size=1)
    assert not scalings(plan)
    assert "32 does not divide all of 28 x 64 by 64 x 64" in plan.notes[0]


def test_devices_without_it_are_refused_before_anything_is_planned():
    for name, wanted, instead in (("dgx-h100", "h100-sxm", "fp8"), ("dgx-a100", "a100-80gb", "bf16")):
        with pytest.raises(InputsError, match=f'nvfp4", but {wanted} of .* lists .*plan with precision="{instead}"'):
            partition(llama(), Topology.preset(name), tokens(), precision="nvfp4")
    with pytest.raises(partitioner.ConstraintError, match="fp8_scaling='row' without precision='fp8'"):
        planned(llama(), fp8_scaling="row")


def test_devices_without_kernels_are_refused_at_launch(monkeypatch: pytest.MonkeyPatch):
    program = planned(llama(), tp=2).program
    assert program is not None
    check_fp8(program, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(partitioner.LaunchError, match=r'in NVFP4, .* H100 .* expected 10.0 .*precision="fp8"'):
        check_fp8(program, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    check_fp8(program, torch.device("cuda"))
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    with pytest.raises(partitioner.LaunchError, match=r"NVFP4, for which torch .* has no product; expected torch 2.10"):
        check_fp8(program, torch.device("cuda"))


@pytest.mark.slow
def test_it_learns():
    model, inputs = llama(), tokens()
    plan = partition(model, Topology.local(1), inputs, precision="nvfp4")
    assert set(scalings(plan)) == {"nvfp4"}
    engine = partitioner.Engine(plan, weights=model)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        losses.append(float(engine.step(inputs)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.6 * losses[0]
