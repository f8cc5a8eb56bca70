"""Prices of collectives in pieces next to matrix products, and the plans that they lead to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.cost.call.call_cost import CallWork, compute_exchange_seconds
from partitioner.cost.call.collectives import price_pieces
from partitioner.cost.call.expert_parallel import Spread
from partitioner.cost.call.roofline import kernel_times
from partitioner.execution_profile import OURS
from partitioner.passes.ir.gradient_flow import mark_block
from partitioner.passes.ir.serialize import block_from_data
from partitioner.passes.shard.overlap_products import fit_pieces
from partitioner.simulate.program_time import PlanDurations

pytestmark = pytest.mark.usefixtures("without_baselines")


def large_llama(overlap: bool | None, **mesh: Any) -> Plan:
    import transformers

    shape = dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
    config = transformers.LlamaConfig(vocab_size=4096, num_hidden_layers=4, **shape)
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty((8, 4096), dtype=torch.int64)
    constraints = Constraints(**({"pp": 1, "dp": 1, "tp": 8, "microbatch_size": 1} | mesh), overlap_tensor=overlap)
    batch = {"input_ids": ids, "labels": ids}
    return partition(model, Topology.parse("dgx-h100:1"), batch, precision="bf16", constraints=constraints)


@pytest.fixture(scope="module")
def plans() -> dict[bool | None, Plan]:
    return {overlap: large_llama(overlap) for overlap in (False, None, True)}


def test_pieces_where_faster_are_never_slower(plans: dict[bool | None, Plan]) -> None:
    seconds = {overlap: plan.estimate.step_time for overlap, plan in plans.items()}
    assert seconds[None] < seconds[False]
    assert seconds[None] <= seconds[True]


def test_the_simulation_takes_as_long_as_the_search_said(plans: dict[bool | None, Plan]) -> None:
    for plan in plans.values():
        assert plan.estimate.simulated == pytest.approx(plan.estimate.step_time, rel=0.01)
        assert plan.certificate.bound <= plan.estimate.step_time * (1 + 1e-9)


def test_the_plan_has_pieces_where_they_are_faster(plans: dict[bool | None, Plan]) -> None:
    def pieces(overlap: bool | None) -> dict[str, tuple[int, ...]]:
        return {name: block.pieces for name, block in plans[overlap].program.blocks.items()}

    assert not any(map(any, pieces(False).values()))
    assert all(pieces(True)["model.layers.*"])
    assert any(pieces(None)["model.layers.*"])


def test_a_plan_is_priced_with_the_pieces_that_it_has(plans: dict[bool | None, Plan]) -> None:
    plan = plans[None]
    blocks = {n: b.model_copy(update={"pieces": (0, 0, 0, 0)}) for n, b in plan.program.blocks.items()}
    whole = plan.model_copy(update={"written": plan.program.model_copy(update={"blocks": blocks})})
    layer = "model.layers.*"
    assert PlanDurations(whole).costs[0][layer].forward_total_s > PlanDurations(plan).costs[0][layer].forward_total_s
    assert PlanDurations(whole).choose_pieces() == {n: tuple(b.pieces) for n, b in plan.program.blocks.items()}


def test_small_products_are_not_cut_by_default() -> None:
    plan = large_llama(None, tp=2, dp=4, microbatch_size=1)
    small = PlanDurations(plan).choose_pieces()
    assert small == {n: tuple(b.pieces) for n, b in plan.program.blocks.items()}


def test_seconds_follow_from_the_formula(plans: dict[bool | None, Plan]) -> None:
    """An all-gather in two pieces of four shards each: the first is waited for, the second is hidden or not."""
    plan = plans[True]
    data = plan.program.blocks["model.layers.*"]
    block = block_from_data("layer", data.nodes, data.states, data.inputs)
    mark_block(block, {*block.states, *block.inputs})
    work = CallWork(block)
    durations = PlanDurations(plan)
    seat = durations.machine.seats[0][0]
    groups, device = dict(seat.groups), durations.topology.paced_type(seat.kind, seat.speed)
    asked = work.asked(None)
    beside = next(b for b in asked.beside if asked.exchanges[b.place].op == "all_gather")
    exchange, group = asked.exchanges[beside.place], groups["tp"]
    sent = group.one_way_start + exchange.nbytes * group.size / 2 / group.bus_bandwidth
    product = kernel_times(asked.kernels.cut_rows(beside.products, beside.rows, 2), device).sum()
    at_once = kernel_times(asked.kernels.cut_rows(beside.products, beside.rows, 1), device).sum()
    expected = max(2 * sent + product, 2 * product + sent) + (device.overlap_slowdown - 1) * 2 * min(sent, product)
    seconds, issued = price_pieces(asked, beside, 2, groups, device)
    assert seconds == pytest.approx(expected - at_once)
    assert issued == 7 + len(beside.products)
    assert seconds < compute_exchange_seconds(exchange, groups, device)
    cost = work.cost(device, groups, Spread(profile=OURS.executed("eager", "cuda", None)))
    assert cost.forward_total_s < work.cost(device, groups).forward_total_s
    assert cost.pieces.forward_gather >= 2


@pytest.mark.parametrize(
    ("wanted", "ranks", "length", "expected"),
    [(2, 8, 5, 2), (3, 8, 5, 2), (8, 8, 5, 8), (16, 8, 5, 8), (16, 8, 6, 16), (2, 3, 6, 3), (12, 3, 6, 9)],
)
def test_numbers_of_pieces_fit(wanted: int, ranks: int, length: int, expected: int) -> None:
    assert fit_pieces(wanted, ranks, length) == expected
