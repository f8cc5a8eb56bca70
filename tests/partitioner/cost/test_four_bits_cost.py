"""What products in NVFP4 are predicted to take: by the search as by their program, and only where there are any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from partitioner import Constraints, ExecutionProfile, Plan, Topology, partition
from partitioner.cost.call.call_cost import call_costs
from partitioner.cost.call.expert_parallel import NO_SPREAD, Spread
from partitioner.cost.call.fp8 import CastRules, in_fp8
from partitioner.cost.call.operators import Kernel, Operand
from partitioner.passes.ir.gradient_flow import mark_block
from partitioner.passes.ir.model import Block
from partitioner.passes.ops.fp8 import convert_products_to_fp8
from partitioner.passes.ops.scaled_products import round_to_nvfp4
from partitioner.simulate.program_time import plan_timeline, stage_seconds
from partitioner.solve.bounds.block_work import block_work
from partitioner.topology import loads

pytestmark = pytest.mark.usefixtures("without_baselines")

aten = torch.ops.aten
B200 = Topology.preset("dgx-b200")
DEVICE = B200.device_type(0)
ELSEWHERE = ExecutionProfile(fused_casts=True)


@pytest.mark.parametrize(
    ("preset", "peak"),
    [("dgx-b200", 9e15), ("dgx-b300", 13.5e15), ("gb200-nvl72", 10e15), ("gb300-nvl72", 15e15)],
)
def test_rates_are_those_of_the_data_sheets(preset: str, peak: float):
    kind = Topology.preset(preset).device_type(0)
    assert kind.peak["nvfp4"] == peak and kind.has_nvfp4
    assert kind.peak_of("nvfp4") >= 2 * kind.peak_of("mxfp8")


def test_other_devices_do_not_have_it():
    assert not Topology.preset("dgx-h200").device_type(0).has_nvfp4
    assert Topology.local(2).device_type(0).has_nvfp4  # on CPUs it is emulated


def product(rows: int, inner: int, out: int, form: str, loss: bool = False) -> Block:
    """``x`` times a weight, and if ``loss`` the sum of the result, too."""
    graph = fx.Graph()
    shapes = {"w": (out, inner) if form == "linear" else (inner, out), "x": (rows, inner)}
    values = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    nodes = {name: graph.placeholder(name) for name in values}
    for name, node in nodes.items():
        node.meta["val"] = values[name]
    w, x = nodes.values()
    result = graph.call_function({"linear": aten.linear.default, "mm": aten.mm.default}[form], (x, w))
    result.meta["val"] = values["x"].new_empty(rows, out)
    if loss:
        result = graph.call_function(aten.sum.default, (result,))
        result.meta["val"] = values["x"].new_empty(())
    graph.output((result,))
    block = Block("product", graph, ["w"], ["x"])
    mark_block(block, set(values))
    return block


@given(st.sampled_from(["linear", "mm"]), *(st.integers(1, 40).map(lambda n: 16 * n) for _ in range(3)))
def test_the_rewritten_product_costs_what_the_search_counts(form: str, rows: int, inner: int, out: int):
    """Also where it is not rewritten, for its sizes."""
    block, spread = product(rows, inner, out, form), Spread(fp8="nvfp4")
    asked, plain = call_costs(block, DEVICE, {}, spread=spread), call_costs(block, DEVICE, {})
    short = convert_products_to_fp8(block, "nvfp4")
    assert bool(short) == all(size % 32 == 0 for size in (rows, inner, out))
    found = call_costs(block, DEVICE, {}, spread=NO_SPREAD)
    assert (found.forward_s, found.backward_s, found.weights_s) == (asked.forward_s, asked.backward_s, asked.weights_s)
    assert (found.flops, found.backward_flops) == (plain.flops, plain.backward_flops)
    assert short or (asked.forward_s, asked.backward_s) == (plain.forward_s, plain.backward_s)


def test_a_product_of_which_a_loss_is_made_is_priced_in_16_bits():
    block = product(4096, 4096, 4096, "linear", loss=True)
    asked, plain = call_costs(block, DEVICE, {}, spread=Spread(fp8="nvfp4")), call_costs(block, DEVICE, {})
    assert (asked.forward_s, asked.backward_s) == (plain.forward_s, plain.backward_s)
    assert not convert_products_to_fp8(block, "nvfp4") and convert_products_to_fp8(block, "tensor")


@given(
    st.sampled_from(["linear", "mm"]),
    st.booleans(),
    st.booleans(),
    *(st.integers(1, 256).map(lambda n: 16 * n) for _ in range(3)),
)
def test_bounds_hold_for_shards_that_do_not_fit(
    form: str, loss: bool, elsewhere: bool, rows: int, inner: int, out: int
):
    """A half of the columns, of which 32 may be no divisor, of a head or not, here and in another framework."""
    profile = ELSEWHERE if elsewhere else ExecutionProfile()
    whole = product(rows, inner, out, form, loss)
    bound = block_work(whole, DEVICE, fp8="nvfp4", fused_casts=elsewhere).at(1.0, 2)
    shard = call_costs(
        product(rows, inner, out // 2, form, loss), DEVICE, {}, spread=Spread(fp8="nvfp4", profile=profile)
    )
    assert bound.forward_s <= shard.forward_s * (1 + 1e-9)
    assert bound.backward_s <= shard.backward_s * (1 + 1e-9)


X, WEIGHT, OUT = (256, 512), (1024, 512), (256, 1024)
OPERANDS = [Operand(X, torch.bfloat16), Operand(WEIGHT, torch.bfloat16, state=True, learned=True)]
RESULTS = [Operand(OUT, torch.bfloat16)]
KIB = {"x": 128, "weight": 512, "out": 256}  # Ki numbers


def priced(backward: bool, **how: Any) -> tuple[list[Kernel], list[Kernel]]:
    traffic = 2.0 * 1024 * sum(KIB.values())
    of_state = 2.0 * 1024 * KIB["weight"]

    def kernel(learned: bool) -> Kernel:
        return Kernel("matmul", traffic, of_state, flops=1.0, precision="bf16", learned=learned)

    kernels = [kernel(False), kernel(True)] if backward else [kernel(False)]
    return in_fp8(kernels, OPERANDS, RESULTS, backward, CastRules(**how, scaling="nvfp4"))


def test_products_read_four_and_a_half_bits_and_write_sixteen():
    """That is what the runtime stores for each number."""
    rounded = round_to_nvfp4(torch.randn(*X).bfloat16(), "numbers")
    bits = 8 * (rounded.values.nbytes + rounded.scales.nbytes) / (X[0] * X[1])
    assert bits == 4.5
    ahead, back = priced(False)[0], priced(True)[0]
    assert {k.precision for k in (*ahead, *back)} == {"nvfp4"}
    pairs = [("x", "weight", "out"), ("out", "weight", "x"), ("out", "x", "weight")]
    expected = [KIB[a] * bits / 8 + KIB[b] * bits / 8 + KIB[c] * 2 for a, b, c in pairs]
    assert [k.num_bytes / 1024 for k in (*ahead, *back)] == expected


def test_casts_read_each_operand_twice():
    """To find the largest numbers, and to round. Scales of blocks are put in order: 8 bytes for each of 16 numbers."""
    _, casts = priced(False)
    written = 4.5 / 8 + 8 / 16
    assert [(c.kind, c.num_bytes / 1024) for c in casts] == [
        ("reduction", 2 * KIB["x"]), ("quantize", (2 + written) * KIB["x"]),
        ("reduction", 2 * KIB["weight"]), ("quantize", (2 + written) * KIB["weight"]),
    ]  # fmt: skip
    assert [c.state_bytes > 0 for c in casts] == [False, False, True, True]
    _, casts = priced(True)
    moved = {learned: sum(c.num_bytes for c in casts if c.learned == learned) / 1024 for learned in (False, True)}
    gradient = 2 + 2 + 2 + written  # its bits are summed for the random numbers
    assert moved[False] == gradient * KIB["out"] + (4 + 2 + 2 + written) * KIB["weight"]
    rotated = 4 + 6 + 8 + 4 + 4 + written  # transposed, widened, multiplied by the matrix, and cast from float32
    assert moved[True] == (4 + rotated) * KIB["out"] + rotated * KIB["x"]


def test_elsewhere_an_operand_is_cast_once_for_both_summed_dims():
    assert priced(False, fused=True, first=False)[1] == []
    for backward, name in ((False, "x"), (True, "out")):
        _, casts = priced(backward, fused=True)
        assert [(c.kind, c.num_bytes / 1024) for c in casts] == [
            ("reduction", 2 * KIB[name]), ("quantize", (2 + 2 * 4.5 / 8) * KIB[name]),
        ]  # fmt: skip


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        kinds = (nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False))
        self.layers = nn.ModuleList(nn.Sequential(*kinds) for _ in range(2))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


PAIR = loads("{name: pair, nodes: [{type: b200, devices: 2}], levels: [{like: nvlink5}]}")


def planned(width: int, precision: str, profile: ExecutionProfile | None = None, **pins: Any) -> Plan:
    with torch.device("meta"):
        model, batch = Layers(width), torch.empty(16384, width)
    one = Constraints(**{"dp": 2, "microbatch_size": 8192, "zero": 0, **pins})
    return partition(model, PAIR, (batch,), precision=precision, constraints=one, profile=profile)


def has_products(plan: Plan) -> bool:
    assert plan.program is not None
    return '"nvfp4"' in plan.program.model_dump_json()


def test_blocks_are_in_nvfp4_where_this_is_faster():
    """Wide layers; narrow ones stay in 16 bits, and a note says so."""
    wide, narrow = planned(16384, "nvfp4"), planned(512, "nvfp4")
    assert has_products(wide) and not has_products(narrow)
    assert wide.estimate.step_time < 0.8 * planned(16384, "bf16").estimate.step_time
    assert narrow.estimate.step_time == planned(512, "bf16").estimate.step_time
    assert any("that could be in nvfp4 stay in 16 bits" in note for note in narrow.notes)
    for plan in (wide, narrow):
        assert plan.estimate.simulated == pytest.approx(plan.estimate.step_time, rel=0.01)


def test_shared_casts_make_it_faster_than_fp8():
    steps = {p: planned(16384, p, ELSEWHERE).estimate.step_time for p in ("bf16", "fp8", "nvfp4")}
    assert steps["nvfp4"] < 0.8 * steps["fp8"] < 0.8 * 0.8 * steps["bf16"]


@pytest.mark.parametrize("pins", [dict(), dict(tp=2, dp=1), dict(pp=2, dp=1)], ids=str)
def test_a_program_is_priced_as_the_search_prices_it(pins: dict[str, int]):
    plan = planned(16384, "nvfp4", **pins)
    assert has_products(plan)
    told = [(s.forward_s, s.backward_s) for s in plan.estimate.stages]
    assert [(s.forward, s.backward) for s in stage_seconds(plan)] == [pytest.approx(s, rel=1e-6) for s in told]
    assert plan_timeline(plan).step_time == pytest.approx(plan.estimate.step_time, rel=0.1)
