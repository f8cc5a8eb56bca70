"""The step time that the search minimises is the one at which the simulation of the emitted program ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from partitioner import Constraints, Plan, partition
from partitioner.schedules.formulas import is_formula, pipeline_seconds
from partitioner.schedules.makespan import Phases
from partitioner.topology import loads

pytestmark = pytest.mark.usefixtures("without_baselines")

_SAME = 2e-3  # relative difference of estimate and simulation


class Uneven(nn.Module):
    """Layers of different widths, so that stages take different times. ``frozen``: so many of the first layers, and the
    embedding, are not trained."""

    def __init__(self, inner: tuple[int, ...], *, tied: bool, frozen: int) -> None:
        super().__init__()
        width, vocab = 1024, 32000
        self.embed = nn.Embedding(vocab, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in inner)
        self.up = nn.ModuleList(nn.Linear(width, size, bias=False) for size in inner)
        self.down = nn.ModuleList(nn.Linear(size, width, bias=False) for size in inner)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.embed.requires_grad_(False)
        for of_layer in (*self.norms[:frozen], *self.up[:frozen], *self.down[:frozen]):
            of_layer.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


UNEVEN = (8192, 8192, 8192, 8192, 2048, 2048, 4096, 4096)


def planned(
    *,
    inner: tuple[int, ...] = UNEVEN,
    tied: bool = False,
    frozen: int = 0,
    nodes: int = 2,
    batch: int = 16,
    train: bool = True,
    estimate_only: bool = False,
    **fixed: Any,
) -> Plan:
    network = [{"name": "network", "bandwidth": 3e9, "latency": 2e-5}] if nodes > 1 else []
    cluster = {
        "nodes": [{"type": "h100-sxm", "devices": 4, "count": nodes, "host": "dgx-h100"}],
        "levels": [{"like": "nvlink4", "nodes": 1}, *network],
    }
    with torch.device("meta"):
        model = Uneven(inner, tied=tied, frozen=frozen)
    ids = torch.empty((1, 2048), dtype=torch.int64, device="meta")
    return partition(
        model,
        loads(yaml.safe_dump(cluster)),
        {"ids": ids, "labels": ids},
        global_batch=batch,
        precision="bf16",
        objective="train" if train else "infer",
        constraints=Constraints(**{"offload": (), "execution": "eager", **fixed}),
        estimate_only=estimate_only,
    )


def check_clock(plan: Plan) -> None:
    estimate = plan.estimate
    assert estimate.simulated == pytest.approx(estimate.step_time, rel=_SAME)
    assert plan.certificate.bound <= min(estimate.step_time, estimate.simulated or 0.0) * (1 + _SAME)


@pytest.mark.all_cases
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-1p", "zb-v"])
@pytest.mark.parametrize(("pp", "dp", "tied"), [(4, 2, True), (8, 1, False)])
def test_pipelines_of_unequal_stages(schedule: str, pp: int, dp: int, tied: bool):
    """Messages cross a slow network; reductions, and the sums of tied gradients, run beside backwards of other stages;
    the sums over all targets are computed on the last stage while it waits for its first input."""
    if schedule == "zb-v" and pp == 8:
        pp, dp = 2, 4  # two stages on each rank
    check_clock(planned(tied=tied, pp=pp, dp=dp, tp=1, cp=1, schedule=schedule))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_shards_of_tied_gradients_are_summed_beside_other_reductions(zero: int):
    check_clock(planned(tied=True, pp=2, dp=4, tp=1, cp=1, schedule="1f1b", zero=zero))


@pytest.mark.all_cases
@pytest.mark.parametrize("inner", [(8192, 1024) * 4, (8192, 8192, 1024, 1024, 1024, 16384)])
@pytest.mark.parametrize(("batch", "fixed"), [(8, {}), (32, {}), (32, {"recompute": "full"}), (32, {"frozen": 4})])
def test_weights_are_gathered_while_the_layer_before_computes(inner: tuple[int, ...], batch: int, fixed: Any):
    """ZeRO-3 over a slow network. A large layer is gathered while the small one in front of it computes, so its own
    computation hides nothing of the gather. Frozen layers in front are gathered for each forward, and for no backward.
    """
    plan = planned(
        inner=inner, batch=batch, **{"zero": 3, "pp": 1, "dp": 8, "tp": 1, "cp": 1, "microbatch_size": 1} | fixed
    )
    check_clock(plan)


def test_the_only_backward_of_a_stage_does_not_hide_its_last_scatter():
    """With one microbatch and ZeRO-3, each of two stages ends with the scatter of its first layer's gradients. It is
    the largest part of the step where the embedding is large."""
    fixed = dict(nodes=1, batch=2, zero=3, pp=2, dp=2, tp=1, cp=1, microbatch_size=1, schedule="1f1b")
    estimated, simulated = planned(**fixed, estimate_only=True).estimate, planned(**fixed).estimate.simulated
    assert simulated == pytest.approx(estimated.step_time, rel=0.02)


@pytest.mark.parametrize(("nodes", "pinned"), [(2, dict(tp=1)), (1, dict(tp=2))])
def test_frozen_layers_are_gathered_for_no_backward_in_bounds_either(nodes: int, pinned: dict[str, int]):
    """The layout that is pinned is the fastest. A bound with gathers of frozen layers in backward would rule it out."""
    fixed = dict(inner=(16384,) * 6 + (256,) * 2, frozen=6, nodes=nodes, batch=8 * nodes, zero=3, pp=1, cp=1)
    free, other = planned(**fixed), planned(**fixed, **pinned)
    assert free.certificate.bound <= other.estimate.step_time * (1 + 1e-9)
    assert free.estimate.step_time <= other.estimate.step_time * (1 + 1e-9)


def test_forwards_of_microbatches_hide_gathers_of_the_next():
    """Without a backward, the last layer of a microbatch hides the gather of the first layer of the next."""
    check_clock(planned(inner=(1024,) * 2, batch=32, zero=3, pp=1, dp=8, tp=1, cp=1, microbatch_size=1, train=False))


def test_frozen_layers_in_front_are_not_recomputed():
    """Layers of which nothing needs a gradient have no backward, so that full recomputation does not run them again."""
    frozen = planned(frozen=6, nodes=1, recompute="full", pp=1)
    check_clock(frozen)
    whole = planned(nodes=1, recompute="full", pp=1)
    assert frozen.estimate.breakdown["recompute"] < 0.5 * whole.estimate.breakdown["recompute"]


def test_the_longest_path_of_1f1b_is_shorter_than_its_formula():
    """Two stages of 2 + 2 and 1 + 1 seconds (forward + backward), two microbatches.

    First stage: F1 0-2, F2 2-4, B1 4-6, B2 6-8. Second: F1 2-3, B1 3-4, F2 4-5, B2 5-6. So a step takes 8 seconds, and
    (m - 1) max + sum = 4 + 6 = 10.
    """
    assert not is_formula("1f1b", 2)
    assert pipeline_seconds("1f1b", 2, 2, 1, [Phases(2.0, 2.0), Phases(1.0, 1.0)]) == 8.0
