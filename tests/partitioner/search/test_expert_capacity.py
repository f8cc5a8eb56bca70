"""Experts with a capacity: samples meet before them, and a rank's batch need not be rows of its own."""

from __future__ import annotations

from typing import Any

import pytest

from partitioner import Constraints, PlanError, Topology, partition
from partitioner.passes.shard.split_batch import split_batch
from partitioner.solve.evaluate.prepared_model import prepare
from partitioner.solve.sharding.expert_parallel import can_spread_experts, spread_batch, spread_over_ranks
from tests.helpers.expert_layers import limited

pytestmark = pytest.mark.usefixtures("without_baselines")


@pytest.mark.parametrize(
    ("capacity", "axes"),
    [
        (10, dict(dp=2, ep=2)),
        (16, dict(dp=2, ep=2)),  # rows that divide
        (10, dict(dp=2, ep=2, zero=3)),
        (9, dict(dp=2, tp=2, ep=2)),
        (10, dict(dp=2, tp=2, ep=4, etp=1)),
    ],
)
def test_equal_to_the_model(capacity: int, axes: dict[str, Any]):
    model, inputs = limited(capacity)
    pinned = dict(pp=1, tp=1) | axes
    plan = partition(model, Topology.local(pinned["dp"] * pinned["tp"]), inputs, constraints=Constraints(**pinned))
    assert plan.mesh["ep"] == axes["ep"] and plan.planned_only == ()
    assert "partition.all_to_all.default" in {n.get("target") for b in plan.program.blocks.values() for n in b.nodes}
    report = plan.verify(model, inputs)
    assert report.ok, str(report)


def test_the_batch_is_split_otherwise_only_where_experts_are_spread():
    model, batch, samples = prepare(*limited(10)).at(None)
    assert not can_spread_experts(model, batch)
    other = spread_batch(model, batch, samples)
    assert can_spread_experts(model, other)
    assert spread_batch(model, other, samples) is other


def test_experts_that_are_cut_over_ranks_with_other_experts_are_refused():
    """What the planner would otherwise do: parts of sums over ``dp``, of which each rank has those of other experts."""
    model, batch, _ = prepare(*limited(10)).at(None)
    local = split_batch(model, batch.blocks, batch.values, 2, 1)
    with pytest.raises(PlanError, match=r"ep=2: .* is part of the experts and communicates between ranks .* use ep=1"):
        spread_over_ranks(local, 1, 2, 0)
