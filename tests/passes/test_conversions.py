"""Modules that forward converts: nothing where they are of that type, refused where they are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, Topology, partition
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("without_baselines")


class Converting(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.net, self.router, self.dtype = nn.Linear(8, 8), nn.Linear(8, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        self.router = self.router.to(self.dtype)
        shares = self.router(x.to(self.dtype)).softmax(-1).to(x.dtype)
        return (x * shares.amax(-1, keepdim=True)).square().mean()


def samples() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_a_module_converted_to_the_type_that_it_has_is_planned():
    model, inputs = Converting(), (samples(),)
    plan = partition(model, Topology.local(2), inputs, constraints=Constraints(tp=2, pp=1, dp=1))
    assert plan.verify(model, inputs).ok
    assert model.router.weight.dtype == torch.float32


def test_in_float64_all_stays_in_float64():
    assert {s.spec.dtype for s in capture(Converting(), (samples(),), precision="fp64").states.values()} == {
        torch.float64
    }


@pytest.mark.parametrize(
    ("model", "precision"), [(Converting(), "bf16"), (Converting(torch.float64), None)], ids=["narrow", "wide"]
)
def test_a_module_converted_to_another_type_is_refused(model: nn.Module, precision: str | None):
    with pytest.raises(
        UnsupportedError, match=r"forward converts the module 'router' \(weight: .* before planning \(module.to"
    ):
        capture(model, (samples(),), precision=precision)
    assert model.get_parameter("router.weight").dtype == torch.float32
