"""How the products of a rank's experts run: in one kernel, in one for each, and what the host issues of them."""

import math

import pytest
import torch

from partitioner import ExecutionProfile
from partitioner.cost.call.block_profile import module_operators
from partitioner.cost.call.call_cost import CallCost, CallWork
from partitioner.cost.call.expert_parallel import Spread, sorting_seconds
from partitioner.passes.capture.capture import capture
from partitioner.passes.ir.gradient_flow import mark_gradients
from partitioner.passes.ir.model import Block
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.shard.fold import fold
from partitioner.topology import Topology
from partitioner.topology.group import Group
from tests.helpers.expert_layers import Experts

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


def cost(block: Block, device: object = LAUNCHED, fp8: str | None = None, **facts: object) -> CallCost:
    made = Spread(num_experts=COUNT, fp8=fp8, profile=ExecutionProfile(fused_casts=True, **facts))  # type: ignore[arg-type]
    return CallWork(block).cost(device, {}, made)  # type: ignore[arg-type]


def test_kernels_of_single_experts_run_four_at_a_time(layer: Block):
    """Eight experts are two rounds on four streams where the grouped product is one kernel: one more forward for each
    product, and two backward, for the gradients of rows and of weights."""
    grouped, each = (cost(layer, expert_kernels=how) for how in ("grouped", "each"))
    rounds = math.ceil(COUNT / 4)
    assert each.forward_s - grouped.forward_s == pytest.approx(PRODUCTS * (rounds - 1))
    assert each.backward_s - grouped.backward_s == pytest.approx(2 * PRODUCTS * (rounds - 1))


def test_the_host_issues_a_product_for_each_expert(layer: Block):
    """Eight times two products forward, and twice as many backward, instead of two and four, and 31 kernels of routing
    forward instead of those in the graph; of recorded graphs it issues nothing, and where experts are left out of them
    these products alone."""
    grouped, each, part, whole = (
        cost(layer, ISSUED, expert_kernels=how, graphs=graphs)
        for how, graphs in (("grouped", "none"), ("each", "none"), ("each", "part"), ("each", "all"))
    )
    routing = 31 - CallWork(layer).asked(None).routing
    assert each.forward_s - grouped.forward_s == PRODUCTS * (COUNT - 1) + routing
    assert each.backward_s - grouped.backward_s == 2 * PRODUCTS * (COUNT - 1)
    assert (part.forward_s, part.backward_s) == (PRODUCTS * COUNT, 2 * PRODUCTS * COUNT)
    assert max(whole.forward_s, whole.backward_s) < 1e-9


def test_experts_wait_for_the_host_which_waits_for_their_rows(layer: Block):
    """With a second for each kernel and for each operator: the host issues 16 products of experts when it has been told
    how many rows each gets, and the device is done with them in two rounds of two. Where each has as many rows the host
    is not told, and has issued them while the device was busy with what comes before."""
    device = LAUNCHED.model_copy(update={"dispatch": 1.0})
    alone = cost(layer, expert_kernels="each").forward_s
    rounds = PRODUCTS * math.ceil(COUNT / 4)
    told, padded = (
        cost(layer, device, expert_kernels="each", graphs="part", even_experts=even) for even in ("none", "padded")
    )
    assert told.forward_s == pytest.approx(alone + PRODUCTS * COUNT - rounds)
    assert padded.forward_s == pytest.approx(max(alone, PRODUCTS * COUNT))


@pytest.mark.parametrize(("even", "more"), [("none", 1 + math.sqrt(2 * math.log(4) * 3 / 512)), ("routed", 1.0)])
def test_ranks_have_as_many_rows_where_routing_is_even(layer: Block, even: str, more: float):
    """128 rows of each of four ranks, 512 in all, of which the fullest rank gets ``1 + sqrt(2 ln 4 * 3 / 512)`` times
    its share (Raab and Steger 1998), or its share."""
    spread = Spread(experts=Group(4), num_experts=COUNT, profile=ExecutionProfile(even_experts=even))
    plain = CallWork(layer).cost(H100, {}, Spread(num_experts=COUNT))
    assert CallWork(layer).cost(H100, {}, spread).flops / plain.flops == pytest.approx(more)


def test_products_that_read_the_same_value_are_one_layer_to_the_host():
    """One of Transformer Engine's linear layers takes the host 2.7 times as long as torch's: three products that read
    one value are more than that, one alone is 1.7 short of it."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (torch.nn.Linear(64, 64, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.out(self.q(x) * self.k(x) + self.v(x))
            return made

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    with torch.device("meta"):
        [block] = fold(normalize(capture(Layers(), (torch.zeros(2, 16, 64),)))).blocks.values()
    found = module_operators(block, CallWork(block).asked(None).region)
    assert sorted(found.values()) == pytest.approx([0.0, 1.7])


def test_each_expert_casts_its_own_rows(layer: Block):
    """In fp8 a cast of the rows before each product, and of the gradient behind it: in one kernel of its own for all
    experts where rows have just come, in none where the kernel between writes them so."""
    grouped, each, fused = (cost(layer, fp8="tensor", expert_kernels=how) for how in ("grouped", "each", "fused"))
    plain = {how: cost(layer, expert_kernels=how) for how in ("grouped", "each")}
    rounds = math.ceil(COUNT / 4)
    assert each.forward_s - plain["each"].forward_s == pytest.approx(PRODUCTS * rounds + 0.0)
    assert grouped.forward_s - plain["grouped"].forward_s == pytest.approx(1.0), "of the rows that come"
    assert fused.forward_s == pytest.approx(grouped.forward_s - 1.0), "the activation is part of the product before it"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_experts_are_in_nvfp4_where_another_framework_computes_them(layer: Block, elsewhere: bool):
    """The runtime of this project keeps them in 16 bits."""
    kernels = CallWork(layer).asked("nvfp4", ExecutionProfile(fused_casts=elsewhere)).kernels
    formats = {kernels.precisions[i] for i in kernels.precision[kernels.expert & (kernels.flops > 0)]}
    assert formats == {"nvfp4" if elsewhere else "bf16"}


def test_rows_are_put_in_order_and_back(layer: Block):
    """128 rows of 512 numbers of two bytes are read and written before the products and behind them, in a kernel each
    of 5 us; where rows come once they are laid out as they come, and a rank's only expert has all of them."""
    region = CallWork(layer).asked(None).region
    rows = 2 * 16 * 4 * 512 * 2
    moved = 5e-6 + 2 * rows / (0.87 * 3.35e12)
    found = sorting_seconds(region, COUNT, Spread(num_experts=COUNT), H100)
    assert found == pytest.approx(2 * moved, rel=0.01)
    assert (
        sorting_seconds(region, COUNT, Spread(num_experts=COUNT, profile=ExecutionProfile(dispatch="once")), H100)
        == 0.0
    )
    assert sorting_seconds(region, 1, Spread(num_experts=1), H100) == 0.0
