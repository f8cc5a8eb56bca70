"""What products in 8 bits are predicted to take: by the search as by their program, and only where there are any."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner import Constraints, ExecutionProfile, Plan, Topology, partition
from partitioner.cost.call.call_cost import CallWork, call_costs
from partitioner.cost.call.expert_parallel import NO_SPREAD, Spread
from partitioner.cost.call.fp8 import in_fp8
from partitioner.cost.call.operators import Kernel, Operand
from partitioner.passes.errors import InputsError
from partitioner.passes.ir.gradient_flow import mark_block
from partitioner.passes.ir.model import Block
from partitioner.passes.ops.fp8 import convert_products_to_fp8, linear_fp8, linear_fp8_input, linear_fp8_weight
from partitioner.simulate.program_time import plan_timeline, stage_seconds
from partitioner.solve.bounds.block_work import block_work
from partitioner.topology import loads

pytestmark = pytest.mark.usefixtures("without_baselines")

aten = torch.ops.aten
H100 = Topology.preset("dgx-h100")
DEVICE = H100.device_type(0)
FP8 = Spread(fp8="tensor")
OWN = """
name: lab
types: {card: {memory: 80 GB, peak: PEAK, memory_bandwidth: 2 TB/s}}
nodes: [{type: card, devices: 8}]
levels: [{name: link, bandwidth: 100 GB/s}]
"""


class Perceptron(nn.Module):
    def __init__(self, bias: bool, dim: int, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, width, bias), nn.Linear(width, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Layers(nn.Module):
    def __init__(self, bias: bool = True, dim: int = 8192, width: int = 32768) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Perceptron(bias, dim, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def planned(
    precision: str,
    topology: Topology = H100,
    *,
    bias: bool = True,
    width: int = 32768,
    profile: ExecutionProfile | None = None,
    **pins: Any,
) -> Plan:
    with torch.device("meta"):
        model, x = Layers(bias, width=width), torch.empty(128, 2048, 8192)
    pins = {"dp": 8, "microbatch_size": 8, "zero": 0, "execution": "eager"} | pins
    asked = {"precision": precision, "constraints": Constraints(**pins), "profile": profile}
    return partition(model, topology, {"x": x}, **asked)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("pins", [dict(), dict(tp=2, dp=4), dict(pp=2, dp=4), dict(tp=2, pp=2, dp=2)], ids=str)
def test_a_program_is_priced_as_the_search_prices_it(pins: dict[str, int], bias: bool):
    """The whole step as nearly as in bf16: what is apart is what is simulated of reductions and of the pipeline."""
    steps, apart = [], []
    for precision in ("bf16", "fp8"):
        plan = planned(precision, bias=bias, **pins)
        told = [(s.forward_s, s.backward_s) for s in plan.estimate.stages]
        assert [(s.forward, s.backward) for s in stage_seconds(plan)] == [pytest.approx(s, rel=1e-6) for s in told]
        steps.append(plan.estimate.step_time - plan.estimate.breakdown["optimizer"])
        apart.append(plan_timeline(plan).step_time / steps[-1] - 1)
    assert steps[1] < 0.97 * steps[0]
    assert apart[1] == pytest.approx(apart[0], abs=0.015), apart
    assert max(map(abs, apart)) < 0.08


def test_products_that_stay_in_16_bits_are_priced_so():
    plans = [planned(precision, width=32760) for precision in ("bf16", "fp8")]
    assert plans[0].estimate.step_time == plans[1].estimate.step_time
    assert stage_seconds(plans[0]) == stage_seconds(plans[1])
    assert plans[1].notes[0].startswith("0 of 4 products with weights are in fp8")


def product(rows: int, inner: int, out: int, form: str) -> Block:
    """``x`` times a weight in one of the forms that a graph has it in."""
    graph = fx.Graph()
    turned = form == "linear"
    shapes = {"w": (out, inner) if turned else (inner, out), "b": (out,), "x": (rows, inner)}
    values = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    nodes = {name: graph.placeholder(name) for name in values}
    for name, node in nodes.items():
        node.meta["val"] = values[name]
    w, b, x = nodes.values()
    target, args = {
        "linear": (aten.linear.default, (x, w, b)),
        "addmm": (aten.addmm.default, (b, x, w)),
        "mm": (aten.mm.default, (x, w)),
    }[form]
    result = graph.call_function(target, args)
    result.meta["val"] = values["x"].new_empty(rows, out)
    graph.output((result,))
    block = Block("product", graph, ["w", "b"], ["x"])
    mark_block(block, set(values))
    return block


@given(
    st.sampled_from(["linear", "addmm", "mm"]),
    *(st.integers(1, 40).map(lambda n: 8 * n) for _ in range(3)),
)
def test_the_rewritten_product_costs_what_the_search_counts(form: str, rows: int, inner: int, out: int):
    """Also where it is not rewritten, for its sizes."""
    block = product(rows, inner, out, form)
    asked, plain = call_costs(block, DEVICE, {}, spread=FP8), call_costs(block, DEVICE, {})
    short = convert_products_to_fp8(block)
    assert bool(short) == all(size % 16 == 0 for size in (rows, inner, out))
    found = call_costs(block, DEVICE, {}, spread=NO_SPREAD)
    assert (found.forward_s, found.backward_s, found.weights_s) == (asked.forward_s, asked.backward_s, asked.weights_s)
    assert (found.flops, found.backward_flops) == (plain.flops, plain.backward_flops)
    assert short or (asked.forward_s, asked.backward_s) == (plain.forward_s, plain.backward_s)


@given(
    st.sampled_from(["linear", "addmm", "mm"]),
    *(st.integers(1, 256).map(lambda n: 16 * n) for _ in range(3)),
)
def test_bounds_hold_for_shards_that_do_not_fit(form: str, rows: int, inner: int, out: int):
    """A half of the columns, of which 16 may be no divisor: then it is in 16 bits, and small ones are faster so."""
    bound = block_work(product(rows, inner, out, form), DEVICE, fp8="tensor").at(1.0, 2)
    shard = call_costs(product(rows, inner, out // 2, form), DEVICE, {}, spread=FP8)
    assert bound.forward_s <= shard.forward_s * (1 + 1e-9)
    assert bound.backward_s <= shard.backward_s * (1 + 1e-9)


@pytest.mark.parametrize("preset", ["dgx-v100", "dgx-a100"])
def test_devices_that_cannot_multiply_in_it_are_refused(preset: str):
    with pytest.raises(InputsError, match=r'precision="fp8", but [va]100-..gb of .* lists fp16, bf16.*plan with'):
        planned("fp8", Topology.preset(preset))


def test_own_devices_have_it_where_their_peak_lists_it():
    slow, fast = (loads(OWN.replace("PEAK", peak)) for peak in ("{bf16: 300 TFLOP/s}", "{bf16: 3e14, fp8: 6e14}"))
    with pytest.raises(InputsError, match=r"card of lab cannot compute matrix products in fp8.*card lists bf16"):
        planned("fp8", slow)
    assert planned("fp8", fast).estimate.step_time < planned("bf16", slow).estimate.step_time


def test_one_kind_of_several_without_it_is_named():
    mixed = OWN.replace("PEAK", "{bf16: 300 TFLOP/s}").replace("nodes: [", "nodes: [{type: h100-sxm, devices: 8}, ")
    with pytest.raises(InputsError, match="but card of lab cannot"):
        planned("fp8", loads(mixed), dp=16)


class Executed(TorchDispatchMode):
    """What kernels there are, but for products, and what they read and write of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.moved = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not aten._scaled_mm.default:
            self.kernels += 1
            self.moved += sum(t.nbytes for t in (*args, result) if isinstance(t, Tensor) and t.dim() == 2)
        return result


@pytest.mark.parametrize("form", ["linear", "mm"])
def test_casts_are_those_that_the_runtime_makes(form: str):
    block = product(64, 32, 128, form)
    asked = CallWork(block).asked("tensor")
    x, weight, grad = (torch.randn(n, m).bfloat16() for n, m in ((64, 32), (128, 32), (64, 128)))
    turned = form == "mm"
    args = (weight.t().contiguous(), turned) if turned else (weight, turned)
    with Executed() as executed:
        linear_fp8(x, args[0], None, turned)
        linear_fp8_input(grad, *args)
        linear_fp8_weight(grad, x, turned)
    casts = (asked.kernels.flops == 0) & (asked.kernels.launches > 1)
    assert executed.kernels == asked.kernels.launches[casts].sum()
    assert executed.moved == asked.kernels.num_bytes[casts].sum()


def test_products_in_fp8_read_a_byte_and_write_two():
    """256 rows of 512 numbers by a matrix of 1,024: the forward reads 128 and 512 KiB and writes 512; the gradient of
    the rows takes 256 and 512 KiB and writes 256; that of the matrix takes 256 and 128 KiB and writes 1,024."""
    x, weight, out = (256, 512), (1024, 512), (256, 1024)
    operands = [Operand(x, torch.bfloat16), Operand(weight, torch.bfloat16, state=True, learned=True)]
    results = [Operand(out, torch.bfloat16)]
    traffic = [2.0 * math.prod(shape) for shape in (x, weight, out)]

    def product(learned: bool, state: float) -> Kernel:
        return Kernel("matmul", sum(traffic), state, flops=1.0, precision="bf16", learned=learned)

    ahead, _ = in_fp8([product(False, traffic[1])], operands, results, False)
    back, _ = in_fp8([product(False, traffic[1]), product(True, traffic[1])], operands, results, True)
    kib = [kernel.num_bytes / 1024 for kernel in (*ahead, *back)]
    assert kib == [128 + 512 + 512, 256 + 512 + 256, 256 + 128 + 1024]
    assert [kernel.state_bytes / 1024 for kernel in (*ahead, *back)] == [512, 512, 1024]


def test_casts_of_their_own_are_dearer_than_those_that_other_kernels_write():
    own, fused = (planned("fp8", profile=ExecutionProfile(fused_casts=how)) for how in (False, True))
    assert own.estimate.step_time > 1.05 * fused.estimate.step_time
    assert not own.planned_only
    assert fused.planned_only == ("fused_casts=True",)
    short = [planned("bf16", profile=ExecutionProfile(fused_casts=how)) for how in (False, True)]
    assert short[0].estimate.step_time == short[1].estimate.step_time


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_blocks_are_in_fp8_where_this_is_faster(scaling: str) -> None:
    """Wide layers on a GPU; narrow ones stay in 16 bits, and a note says so. A CPU has fp8 everywhere, for tests."""

    def plan_of(width: int, precision: str, topology: Topology) -> Plan:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False))
            batch = torch.empty(8192, width)
        given: dict[str, Any] = {"fp8_scaling": scaling} if precision == "fp8" else {}
        one = Constraints(tp=1, pp=1, dp=2, microbatch_size=4096, zero=0, **given)
        return partition(model, topology, (batch,), loss=torch.sum, precision=precision, constraints=one)

    def has_fp8(plan: Plan) -> bool:
        return "partition.linear_fp8.default" in plan.program.model_dump_json()

    gpu = loads("{name: pair, nodes: [{type: h100-sxm, devices: 2}], levels: [{like: nvlink4}]}")
    wide, narrow = plan_of(8192, "fp8", gpu), plan_of(1024, "fp8", gpu)
    assert has_fp8(wide) and not has_fp8(narrow)
    assert wide.estimate.step_time < plan_of(8192, "bf16", gpu).estimate.step_time
    assert narrow.estimate.step_time == plan_of(1024, "bf16", gpu).estimate.step_time
    assert any("stay in 16 bits" in note for note in narrow.notes)
    assert not any("stay in 16 bits" in note for note in wide.notes)
    for plan in (wide, narrow):
        assert plan.estimate.simulated == pytest.approx(plan.estimate.step_time, rel=0.01)
    assert has_fp8(plan_of(128, "fp8", Topology.local(2)))
