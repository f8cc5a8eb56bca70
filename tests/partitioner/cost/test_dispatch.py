"""How rows go to experts over the network, in the cost model: a row for each expert, in parts, or once to a node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partitioner import Constraints, ExecutionProfile, Plan, Topology, partition
from partitioner.cost.call.collectives import collective_time, dispatch_time
from partitioner.passes.capture.capture import capture
from partitioner.passes.experts.regions import find_expert_regions
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.shard.fold import fold
from partitioner.topology import axis_group
from tests.helpers.cost_devices import H100
from tests.helpers.expert_layers import Experts

pytestmark = pytest.mark.usefixtures("without_baselines")

# Microseconds of sending 4,096 rows of 7,168 numbers in bfloat16 to 8 of 256 experts over so many ranks: by all-to-all,
# and once for each node and rank (HybridEP). Published in the report on Megatron-Core's mixtures of experts
# (arXiv 2603.07685, table 7).
MEASURED = {
    ("dgx-h100", 8): (1265, 661),
    ("dgx-h100", 16): (5774, 1485),
    ("dgx-h100", 32): (8059, 3064),
    ("dgx-h100", 64): (9164, 4626),
    ("gb200-nvl72", 8): (735, 391),
    ("gb200-nvl72", 16): (743, 578),
    ("gb200-nvl72", 32): (769, 612),
    ("gb200-nvl72", 64): (930, 675),
}
COPIES = 8


@pytest.mark.parametrize(("preset", "ranks"), MEASURED)
def test_exchanges_take_about_what_was_measured(preset: str, ranks: int):
    topology = Topology.preset(preset, nodes=-(-ranks // (8 if preset == "dgx-h100" else 72)))
    group = axis_group(topology, {"cp": ranks}, "cp")
    of_a_rank = 4096 * 7168 * 2 * COPIES
    rows, once = MEASURED[preset, ranks]
    assert collective_time("all_to_all", of_a_rank * ranks, group) == pytest.approx(rows * 1e-6, rel=0.2)
    assert dispatch_time(of_a_rank * ranks, group, COPIES) == pytest.approx(once * 1e-6, rel=0.25)


@given(st.floats(1, 64), st.sampled_from([2, 8, 16]), st.floats(1e3, 1e12))
def test_what_is_sent_once_takes_no_longer(copies: float, ranks: int, num_bytes: float):
    group = axis_group(H100, {"cp": ranks}, "cp")
    whole = collective_time("all_to_all", num_bytes, group)
    once = dispatch_time(num_bytes, group, copies)
    assert once <= whole * (1 + 1e-9)
    assert once >= dispatch_time(num_bytes, group, 2 * copies) - 1e-12
    assert dispatch_time(num_bytes, group, 1.0) == whole


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_experts_are_found_where_their_weights_count_before_the_last_product(topk: int, batch: int):
    """With one expert for each token nothing is added up behind it, so that rows go on being rows; with one sample they
    do even where the batch has its dim again."""
    with torch.device("meta"):
        model, x = Experts(topk).bfloat16(), torch.zeros(batch, 16, 512, dtype=torch.bfloat16)
        folded = fold(normalize(capture(model, (x,))))
    regions = [region for block in folded.blocks.values() for region in find_expert_regions(block)]
    assert [len(region.products) for region in regions] == [2] * len(regions)
    assert regions


def planned(topology: Topology | None = None, facts: dict[str, Any] | None = None, **pins: Any) -> Plan:
    with torch.device("meta"):
        model, x = Experts(width=4096).bfloat16(), torch.zeros(16, 8192, 4096, dtype=torch.bfloat16)
    pins = {
        "pp": 1,
        "microbatch_size": 1,
        "zero": 0,
        "recompute": "none",
        "placement": "in_order",
        "execution": "eager",
        **pins,
    }
    return partition(
        model, topology or Topology.preset("dgx-h100", nodes=2), (x,), constraints=Constraints(**pins),
        profile=ExecutionProfile(**facts or {}), estimate_only=True,
    )  # fmt: skip


def test_ranks_that_share_an_expert_send_parts():
    """Else each of them sends all rows over a network that is an eighth as fast as the links inside a node."""
    plans = {how: planned(dp=2, tp=8, ep=2, etp=8, facts={"dispatch": how}) for how in ("rows", "parts", "once")}
    sent = {how: plan.estimate.breakdown["tp_communication"] for how, plan in plans.items()}
    assert sent["once"] < sent["parts"] < 0.7 * sent["rows"]
    computed = {how: plan.estimate.breakdown["compute"] for how, plan in plans.items()}
    assert computed["parts"] == pytest.approx(computed["rows"])
    assert computed["once"] < computed["rows"], "what sends rows once lays them out in the order of the experts"
    assert {how: {*plan.planned_only} - {"estimate_only=True"} for how, plan in plans.items()} == {
        "rows": set(),
        "parts": {"dispatch=parts"},
        "once": {"dispatch=once"},
    }


def test_rows_travel_behind_the_computation_of_another_microbatch():
    plain, behind = (planned(dp=16, tp=1, ep=8, facts={"overlap_experts": overlap}) for overlap in (False, True))
    assert behind.estimate.step_time < plain.estimate.step_time
    assert "overlap_experts=True" in behind.planned_only


def test_ranks_may_be_asked_to_be_in_order():
    """Megatron-LM has ``tp`` innermost. Where ``dp`` sends more, that is not what is fastest."""
    topology = Topology.preset("dgx-h100", nodes=2)
    mesh = {"dp": 2, "tp": 8, "sequence_parallel": False}
    ordered, free = (planned(topology, placement=how, **mesh) for how in ("in_order", None))
    assert ordered.devices == tuple(range(16))
    assert free.estimate.step_time <= ordered.estimate.step_time
    assert not {name for name in ordered.planned_only if "placement" in name}
