"""Experts with a capacity: samples meet before them, and a rank's batch need not be rows of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, PlanError, Topology, partition
from partitioner.passes.shard.split_batch import split_batch
from partitioner.solve.evaluate.prepared_model import prepare
from partitioner.solve.sharding.expert_parallel import can_spread_experts, spread_batch, spread_over_ranks

pytestmark = pytest.mark.usefixtures("without_baselines")

SAMPLES, LENGTH, EXPERTS, HIDDEN = 8, 4, 4, 12


class Limited(nn.Module):
    """The best expert of each token, as long as it has room: ``capacity`` tokens, in the order of the batch."""

    def __init__(self, capacity: int, width: int = 8) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, EXPERTS)
        self.up, self.up_bias = (
            nn.Parameter(torch.randn(EXPERTS, width, HIDDEN)),
            nn.Parameter(torch.randn(EXPERTS, 12)),
        )
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        weight, expert = self.router(x).softmax(-1).max(-1)
        chosen = nn.functional.one_hot(expert, EXPERTS)
        place = chosen.cumsum(0) * chosen - 1
        kept = (place < self.capacity) & (place >= 0)
        places = nn.functional.one_hot(place.clamp(0, self.capacity - 1), self.capacity)
        sent = (places * kept[..., None]).to(x.dtype)
        rows = torch.einsum("tec,td->ecd", sent, x)
        made = torch.bmm(nn.functional.gelu(torch.bmm(rows, self.up) + self.up_bias[:, None]), self.down)
        return torch.einsum("tec,ecd->td", sent * weight[:, None, None], made).square().mean()


def limited(capacity: int, width: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Limited(capacity, width), {"x": torch.randn(SAMPLES, LENGTH, width)}


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
    with pytest.raises(PlanError, match=r"ep=2: .* is among the experts' work and runs over ranks .* use ep=1"):
        spread_over_ranks(local, 1, 2, 0)
