"""How the products of a rank's experts run: in one kernel, in one for each, and what the host issues of them."""

import math

import pytest
import torch
from test_dispatch import Experts

from partitioner.cost.calls import CallCost, CallWork
from partitioner.cost.spread import Software, Spread, sorting_seconds
from partitioner.topology import Topology
from passes.blocks import Block
from passes.capture import capture
from passes.fold import fold
from passes.gradients import mark_gradients
from passes.normalize import normalize

H100 = Topology.preset("dgx-h100", nodes=1).device_type(0)
FREE = {"memory_bandwidth": 1e30, "peak": {"bf16": 1e30, "fp32": 1e30, "fp8": 1e30}}
LAUNCHED = H100.model_copy(update={**FREE, "launch": 1.0, "dispatch": 0.0})  # a second for each kernel
ISSUED = H100.model_copy(update={**FREE, "launch": 0.0, "dispatch": 1.0})  # and for each operator
COUNT, PRODUCTS = 8, 2  # experts, and products of each


@pytest.fixture(scope="module")
def layer() -> Block:
    with torch.device("meta"):
        folded = fold(normalize(capture(Experts().bfloat16(), (torch.zeros(2, 16, 512, dtype=torch.bfloat16),))))
    mark_gradients(folded)
    return next(block for block in folded.blocks.values() if CallWork(block).has_experts)


def cost(block: Block, device: object = LAUNCHED, fp8: bool = False, **software: object) -> CallCost:
    made = Spread(num_experts=COUNT, fp8=fp8, software=Software(fused_casts=True, **software))  # type: ignore[arg-type]
    return CallWork(block).cost(device, {}, made)  # type: ignore[arg-type]


def test_kernels_of_single_experts_run_four_at_a_time(layer: Block):
    """Eight experts are two rounds on four streams where the grouped product is one kernel: one more forward for each
    product, and two backward, for the gradients of rows and of weights."""
    grouped, each = (cost(layer, expert_kernels=how) for how in ("grouped", "each"))
    rounds = math.ceil(COUNT / 4)
    assert each.forward_s - grouped.forward_s == pytest.approx(PRODUCTS * (rounds - 1))
    assert each.backward_s - grouped.backward_s == pytest.approx(2 * PRODUCTS * (rounds - 1))


def test_the_host_issues_a_product_for_each_expert(layer: Block):
    """Eight times two products forward, and twice as many backward, instead of two and four; of recorded graphs it
    issues nothing, and where experts are left out of them these products alone."""
    grouped, each, part, whole = (
        cost(layer, ISSUED, expert_kernels=how, graphs=graphs)
        for how, graphs in (("grouped", "none"), ("each", "none"), ("each", "part"), ("each", "all"))
    )
    assert each.forward_s - grouped.forward_s == PRODUCTS * (COUNT - 1)
    assert each.backward_s - grouped.backward_s == 2 * PRODUCTS * (COUNT - 1)
    assert (part.forward_s, part.backward_s) == (PRODUCTS * COUNT, 2 * PRODUCTS * COUNT)
    assert max(whole.forward_s, whole.backward_s) < 1e-9


def test_each_expert_casts_its_own_rows(layer: Block):
    """In fp8 a cast of the rows before each product, and of the gradient behind it: in one kernel of its own for all
    experts where rows have just come, in none where the kernel between writes them so."""
    grouped, each, fused = (cost(layer, fp8=True, expert_kernels=how) for how in ("grouped", "each", "fused"))
    plain = {how: cost(layer, expert_kernels=how) for how in ("grouped", "each")}
    rounds = math.ceil(COUNT / 4)
    assert each.forward_s - plain["each"].forward_s == pytest.approx(PRODUCTS * rounds + 0.0)
    assert grouped.forward_s - plain["grouped"].forward_s == pytest.approx(1.0), "of the rows that come"
    assert fused.forward_s == pytest.approx(grouped.forward_s)


def test_rows_are_put_in_order_and_back(layer: Block):
    """128 rows of 512 numbers of two bytes are read and written before the products and behind them, in a kernel each
    of 5 us; where rows come once they are laid out as they come, and a rank's only expert has all of them."""
    region = CallWork(layer).asked(False).region
    rows = 2 * 16 * 4 * 512 * 2
    moved = 5e-6 + 2 * rows / (0.87 * 3.35e12)
    found = sorting_seconds(region, COUNT, Spread(num_experts=COUNT), H100)
    assert found == pytest.approx(2 * moved, rel=0.01)
    assert sorting_seconds(region, COUNT, Spread(num_experts=COUNT, software=Software(dispatch="once")), H100) == 0.0
    assert sorting_seconds(region, 1, Spread(num_experts=1), H100) == 0.0
