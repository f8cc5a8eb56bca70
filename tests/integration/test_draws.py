"""What models draw inside forward: the same numbers for every plan, and of the distributions that torch draws from."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partitioner import Constraints, Topology, partition
from partitioner.passes.ops.random import MOST_BITS, draw_whole_tensor, ops
from partitioner.plans.reference import run_reference

pytestmark = pytest.mark.usefixtures("without_baselines")

WIDTH = 8


class Model(nn.Module):
    """``function`` stands between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.then = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.function(self.first(x))
        return (self.function(self.then(h)) ** 2).mean()


def diffused(h: Tensor) -> Tensor:
    time = torch.randint(1, 10, (h.shape[0],), device=h.device)
    part = (time / 10).to(h.dtype)[:, None, None]
    return part * h + (1 - part).sqrt() * torch.randn_like(h)


def dropped_path(h: Tensor) -> Tensor:
    return h + h.tanh() * h.new_empty(h.shape[0], 1, 1).bernoulli_(0.7).div_(0.7)


def noisy(h: Tensor) -> Tensor:
    return F.dropout(h.tanh(), 0.4) * torch.rand_like(h)


def recomputed(h: Tensor) -> Tensor:
    return checkpoint(noisy, h, use_reentrant=False) + checkpoint(noisy, h, use_reentrant=True) + noisy(h)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal of a size": lambda h: h + torch.randn(h.shape[0], 1, WIDTH),
    "normal like": lambda h: h + 0.1 * torch.randn_like(h),
    "normal in place": lambda h: h + torch.empty_like(h).normal_(1.0, 0.5),
    "normal around": lambda h: torch.normal(h.detach(), 0.5) * h,
    "reparameterised": lambda h: torch.distributions.Normal(h, h.exp()).rsample(),
    "uniform": lambda h: h * torch.rand(h.shape[0], 1, 1) + torch.empty_like(h).uniform_(-1, 2),
    "of no sample": lambda h: h * torch.rand(WIDTH),
    "gumbel": lambda h: F.gumbel_softmax(h, tau=0.5, hard=True) * h,
    "whole": lambda h: h * torch.randint(2, 5, h.shape) + torch.randint_like(h, 3),
    "truth": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "dropped path": dropped_path,
    "dropped path of uniform": lambda h: h * torch.floor(0.7 + torch.rand(h.shape[0], 1, 1)),
    "dropped channels": lambda h: F.dropout1d(h, 0.4) + F.dropout2d(h.unsqueeze(-1), 0.3).squeeze(-1),
    "dropped to alpha": lambda h: F.alpha_dropout(h, 0.2) + F.feature_alpha_dropout(h, 0.3),
    "all dropped": lambda h: h + F.alpha_dropout(h, 1.0) + F.dropout1d(h, 1.0),
    "diffused": diffused,
    "recomputed": recomputed,
}
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"pp": 1, "dp": 1, "tp": 2},
    "dp, microbatches": {"pp": 1, "dp": 2, "tp": 1, "microbatch_size": 1},
    "pp": {"pp": 2, "dp": 1, "tp": 1, "microbatch_size": 2},
}


# Each way on one mesh, each mesh with every third of them.
FIRST = {(way, [*MESHES][place % len(MESHES)]) for place, way in enumerate(WAYS)}


@pytest.mark.parametrize(
    ("way", "mesh"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in FIRST)) for case in product(WAYS, MESHES)],
)
def test_plans_draw_what_the_judge_draws(way: str, mesh: str):
    torch.manual_seed(0)
    model, x = Model(WAYS[way]), torch.randn(4, 3, WIDTH)
    plan = partition(model, Topology.local(2), (x,), constraints=Constraints(**MESHES[mesh]))
    report = plan.verify(model, (x,))
    assert report.ok, str(report)


def test_another_seed_draws_other_numbers():
    torch.manual_seed(0)
    model, x = Model(WAYS["normal like"]), torch.randn(4, 3, WIDTH)
    losses = {float(run_reference(model, (x,), seed=seed).loss) for seed in (0, 1)}  # type: ignore[arg-type]
    assert len(losses) == 2


MOMENTS = {  # mean, variance, and how large what is drawn is at least and at most
    ops.uniform.default: (0.5, 1 / 12, 0.0, 1.0),
    ops.normal.default: (0.0, 1.0, -math.inf, math.inf),
    ops.exponential.default: (1.0, 1.0, 0.0, math.inf),
}


@pytest.mark.parametrize("distribution", MOMENTS, ids=str)
def test_numbers_have_their_distribution(distribution: Any):
    count = 1 << 18
    numbers = draw_whole_tensor(distribution, (count,), torch.device("cpu"), [7, 3]).double()
    mean, variance, least, most = MOMENTS[distribution]
    assert abs(float(numbers.mean()) - mean) < 5 * math.sqrt(variance / count)
    assert abs(float(numbers.var()) / variance - 1) < 0.02
    assert float(numbers.min()) >= least and float(numbers.max()) <= most
    assert numbers.isfinite().all()
    pairs = torch.corrcoef(numbers.view(2, -1))[0, 1]
    assert abs(float(pairs)) < 5 / math.sqrt(count / 2)


def test_whole_numbers_are_spread_evenly():
    count = 1 << 18
    numbers = draw_whole_tensor(ops.bits.default, (count,), torch.device("cpu"), [7, 3])
    assert int(numbers.min()) >= 0 and int(numbers.max()) < MOST_BITS
    of_each = torch.bincount(numbers % 10, minlength=10)
    assert int((of_each - count / 10).abs().max()) < 5 * math.sqrt(count / 10)
