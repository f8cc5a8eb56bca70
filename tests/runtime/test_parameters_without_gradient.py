"""A parameter that no gradient reaches is left alone by the optimizer, as it is in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partitioner import Constraints, Engine, Topology, partition, run_threads
from tests.helpers.every_rank import on_every_rank

pytestmark = pytest.mark.usefixtures("without_baselines")


class Stopped(nn.Module):
    """``target`` and ``frozen`` are read, and every way back to them is cut; ``late`` is cut in one of two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.target, self.frozen, self.late = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        with torch.no_grad():
            wanted = self.target(x)
        x = functional.linear(x, self.frozen.weight.detach(), self.frozen.bias.detach())
        x = self.late(x) + self.late(x).detach()
        return functional.mse_loss(x, wanted + y)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(8, 8, generator=generator, dtype=torch.float64) for n in "xy"}


def steps(model: Any, parameters: Any) -> None:
    """Of AdamW with a decay that would be seen, behind gradients of ``model``."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model()
        optimizer.step()


@pytest.mark.parametrize(
    "pinned",
    [dict(pp=2, dp=2, zero=0), dict(pp=2, dp=2, zero=3), dict(dp=2, zero=2), dict(pp=2, tp=2, offload="optimizer")],
    ids=str,
)
def test_the_optimizer_leaves_alone_what_no_gradient_reaches(pinned: dict[str, Any]):
    torch.manual_seed(0)
    model = Stopped().double()
    ranks = pinned["dp"] * pinned.get("pp", 1) if "dp" in pinned else 4
    plan = partition(model, Topology.local(ranks), batch(), constraints=Constraints(**pinned, microbatch_size=2))
    alone = copy.deepcopy(model)
    steps(lambda: alone(**batch()).backward(), alone.parameters())
    assert torch.equal(alone.target.weight, model.target.weight)

    def work(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(plan, model, communicator=communicator)
        steps(lambda: engine.step(batch()), engine.parameters())
        return engine.state_dict(full=True)

    [trained, *_] = on_every_rank(plan.program, work)
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-9, atol=1e-9)


def test_its_gradient_is_told_as_zero():
    model = Stopped().double()
    plan = partition(model, Topology.local(2), batch(), constraints=Constraints(pp=2, microbatch_size=4))
    assert not plan.program.states["target.weight"].requires_grad
    assert plan.program.states["late.weight"].requires_grad
    assert plan.verify(model, batch()).ok
    grads = run_threads(plan, model, batch()).grads
    assert not grads["frozen.weight"].any() and grads["late.weight"].any()


def test_a_stage_without_trained_parameters_knows_the_norm_as_exactly_as_the_others():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).double(), (batch()["x"],)
    model[:7].requires_grad_(False)
    plan = partition(model, Topology.local(2), x, loss=torch.sum, constraints=Constraints(pp=2, microbatch_size=2))
    assert [any(plan.program.states[s].requires_grad for s in plan.rank(r).states) for r in (0, 1)] == [False, True]
    model(*x).sum().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    def work(communicator: Any) -> Tensor:
        engine = Engine(plan, model, communicator=communicator)
        engine.step(x)
        return engine.clip_grad_norm_(0.5)

    for norm in on_every_rank(plan.program, work):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
