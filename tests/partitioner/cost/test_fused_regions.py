"""What a compiler merges: bytes and launches of regions, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from partitioner import Topology, partition
from partitioner.cost.call.block_profile import asked_by
from partitioner.cost.call.call_cost import CallWork
from partitioner.cost.call.expert_parallel import Spread
from partitioner.cost.call.fused_regions import FusedRegions
from partitioner.execution_profile import OURS
from partitioner.passes.ir.model import Block
from partitioner.runtime.program.analysis import load_block
from partitioner.solve.bounds.block_work import block_work
from tests.helpers.cost_devices import DEVICE, block
from tests.helpers.models import CASES

pytestmark = pytest.mark.usefixtures("without_baselines")

aten = torch.ops.aten
FUSED = OURS.executed("compiled", "cpu")
T, W = 8 * 16 * 4, 8 * 32 * 4  # bytes of a tensor [8, 16] and of one [8, 32]
ROW, WEIGHT = 8 * 4, 16 * 4  # of a number for each row, and of the norm's weight


def empty(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def gated_layer() -> tuple[Block, dict[str, fx.Node]]:
    """RMS norm, two linear layers, silu times the other, a linear layer, and the residual sum."""
    nodes: dict[str, fx.Node] = {}

    def build(g: Any, weight: fx.Node, gate: fx.Node, up: fx.Node, down: fx.Node, x: fx.Node) -> fx.Node:
        square = g(aten.mul.Tensor, x, x)
        mean = g(aten.mean.dim, square, [-1], True)
        scale = g(aten.rsqrt.default, g(aten.add.Tensor, mean, 1e-6))
        normed = g(aten.mul.Tensor, x, scale)
        weighted = g(aten.mul.Tensor, normed, weight)
        one, other = g(aten.linear.default, weighted, gate), g(aten.linear.default, weighted, up)
        active = g(aten.silu.default, one)
        product = g(aten.mul.Tensor, active, other)
        y = g(aten.add.Tensor, x, g(aten.linear.default, product, down))
        nodes.update(square=square, mean=mean, scale=scale, normed=normed, weighted=weighted, active=active)
        nodes.update(product=product, y=y)
        return y

    states = empty(weight=(16,), gate=(32, 16), up=(32, 16), down=(16, 32))
    return block(build, states, empty(x=(8, 16))), nodes


def test_a_norm_is_one_region_and_so_are_the_gate_and_the_residual_sum():
    layer, nodes = gated_layer()
    region = FusedRegions(layer, True).region
    norm = {region[nodes[name]] for name in ("square", "mean", "scale", "normed", "weighted")}
    gate = {region[nodes[name]] for name in ("active", "product")}
    assert len(norm) == len(gate) == 1
    assert len(norm | gate | {region[nodes["y"]]}) == 3
    assert not any("linear" in str(node.target) for node in region)


def test_bytes_of_forward_alone():
    """T = 512 bytes, W = 1024, the norm's weight 64.

    Norm: reads x (T) and the weight (64), writes the weighted result (T): 1,088; operator by operator it is
    mul 3 T (x twice), mean T + 32, add and rsqrt 32 + 32 each, mul T + 32 + T, mul T + 64 + T.
    Gate: reads both products (2 W), writes the result (W): 3 W = 3,072; by operator: silu 2 W, mul 3 W.
    Sum: reads x and the product (2 T), writes T: 3 T, as by operator.
    """
    layer, nodes = gated_layer()
    regions = FusedRegions(layer, False)
    traffic = regions.traffic()
    moved = {name: traffic[regions.region[nodes[name]]].forward for name in ("normed", "active", "y")}
    assert moved == {"normed": 2 * T + WEIGHT, "active": 3 * W, "y": 3 * T}

    eager, fused = asked_by(layer, False).kernels, asked_by(layer, False, fused_kernels=True).kernels
    plain, merged = eager.flops == 0, fused.flops == 0
    assert (
        eager.num_bytes[plain].sum() == (3 * T) + (T + ROW) + 4 * ROW + (2 * T + ROW) + (2 * T + WEIGHT) + 5 * W + 3 * T
    )
    assert fused.num_bytes[merged].sum() == pytest.approx((2 * T + WEIGHT) + 3 * W + 3 * T)
    assert eager.launches.sum() == 6 + 2 + 1 + 3
    assert fused.launches.sum() == 3 + 3  # regions and linear layers
    assert (eager.flops[~plain] == fused.flops[~merged]).all()
    assert (eager.num_bytes[~plain] == fused.num_bytes[~merged]).all()


def test_forward_of_training_writes_what_backward_reads():
    """As above, and what is saved: x * x keeps x, which is there; rsqrt its result (32); x * scale both; the product
    with the weight its operand, the normed tensor (T). The linear layers keep the weighted tensor, written anyway. silu
    keeps its operand, a linear layer's result, and the product keeps silu's result (W).
    """
    layer, nodes = gated_layer()
    regions = FusedRegions(layer, True)
    traffic = regions.traffic()
    moved = {name: traffic[regions.region[nodes[name]]].forward for name in ("normed", "active", "y")}
    assert moved == {"normed": (2 * T + WEIGHT) + ROW + T, "active": 3 * W + W, "y": 3 * T}


def test_bytes_of_backward():
    """Gate: reads the gradient of its result (W), the two saved operands and silu's result (3 W); writes two gradients
    (2 W): 6 W.

    Norm: reads the gradient of its result from both linear layers (2 T), x and the normed tensor (2 T), scale (32) and
    the weight (64); writes the gradients of x (T) and of the weight (64). The weight's gradient is a sum over rows, a
    second pass over the gradient and the normed tensor (2 T).
    """
    layer, nodes = gated_layer()
    regions = FusedRegions(layer, True)
    traffic = regions.traffic()
    gate, norm = (traffic[regions.region[nodes[name]]] for name in ("active", "normed"))
    assert gate.backward == 6 * W and gate.over_rows == 0
    assert norm.backward == 2 * T + (2 * T + ROW + WEIGHT) + (T + WEIGHT) + 2 * T
    assert norm.over_rows == 1


def test_what_a_product_lies_between_is_not_merged():
    """``x + f(x)`` with a product in ``f``: the sum after it cannot be in the kernel before it."""
    nodes: list[fx.Node] = []

    def build(g: Any, weight: fx.Node, x: fx.Node) -> fx.Node:
        before = g(aten.relu.default, x)
        after = g(aten.add.Tensor, before, g(aten.linear.default, before, weight))
        nodes.extend((before, after, g(aten.tanh.default, after)))
        return nodes[-1]

    region = FusedRegions(block(build, empty(weight=(16, 16)), empty(x=(8, 16))), True).region
    before, after, last = nodes
    assert region[before] != region[after] == region[last]


@pytest.mark.parametrize(("dim", "merged"), [(-1, True), (0, False)])
def test_a_sum_over_rows_ends_a_region_and_a_sum_over_columns_does_not(dim: int, merged: bool):
    nodes: list[fx.Node] = []

    def build(g: Any, x: fx.Node) -> fx.Node:
        total = g(aten.sum.dim_IntList, g(aten.relu.default, x), [dim], True)
        nodes.extend((total, g(aten.div.Tensor, x, total)))
        return nodes[-1]

    region = FusedRegions(block(build, {}, empty(x=(8, 16))), True).region
    assert (region[nodes[0]] == region[nodes[1]]) == merged


def test_kernels_never_move_more_than_operators_one_by_one():
    for case in ("llama", "t5", "gpt2"):
        model, batch = CASES[case].build(), CASES[case].inputs(4)
        program = partition(model, Topology.local(1), batch, loss=CASES[case].loss).program
        for name in program.blocks:
            here = load_block(program, name)
            eager, fused = asked_by(here, True), asked_by(here, True, fused_kernels=True)
            assert len(eager.kernels.num_bytes) == len(fused.kernels.num_bytes)
            assert (fused.kernels.num_bytes <= eager.kernels.num_bytes * (1 + 1e-12)).all(), name
            assert fused.kernels.launches.sum() <= eager.kernels.launches.sum(), name
            assert all(a <= b for a, b in zip(fused.issued, eager.issued, strict=True)), name


def test_costs_of_a_call_count_merged_kernels_and_keep_saved_bytes():
    work = CallWork(gated_layer()[0])
    eager, fused = work.cost(DEVICE, {}), work.cost(DEVICE, {}, replace(Spread(), profile=FUSED))
    assert fused.forward_s < eager.forward_s and fused.backward_s < eager.backward_s
    assert (fused.saved_bytes, fused.flops, fused.state_bytes) == (eager.saved_bytes, eager.flops, eager.state_bytes)
    assert work.cost(DEVICE, {}) == eager


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2", "bert"])
def test_bounds_are_below_the_costs_of_calls(name: str):
    """Of a block on one rank, in whichever regions: most of the cost, and never more."""
    case = CASES[name]
    program = partition(case.build(), Topology.local(1), case.inputs(4), loss=case.loss).program
    device = DEVICE.model_copy(update={"launch": 0.0})
    for block_name in program.blocks:
        here = load_block(program, block_name)
        cost = CallWork(here).cost(device, {}, replace(Spread(), profile=FUSED))
        bound = block_work(here, device, fused_kernels=True).at(1.0, 1)
        assert bound.forward_s <= cost.forward_s * (1 + 1e-9), block_name
        assert bound.backward_s <= cost.backward_s * (1 + 1e-9), block_name
        assert bound.forward_s > 0.3 * cost.forward_s or cost.forward_s < 1e-9, block_name
