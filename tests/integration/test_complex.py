"""Complex numbers in a model: as weights, as constants and as numbers in its code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Plan, Topology, partition
from partitioner.plans.reference import run_reference
from partitioner.plans.verify import compare, relative_error

pytestmark = pytest.mark.usefixtures("without_baselines")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.weight = nn.Parameter(torch.randn(8, 16, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.register_buffer("turns", torch.polar(torch.ones(16), torch.arange(16) / 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.view_as_complex(self.first(x).view(-1, 8, 2))
        made = (pairs @ self.weight + self.bias) * self.turns * torch.exp(0.3j * torch.arange(16)) + (1 - 2j)
        return made.abs().square().mean(), made


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "microbatch_size": 2}, {"pp": 2, "microbatch_size": 4}], ids=str)
def test_complex_weights_are_equal_to_the_model(mesh: dict[str, int], tmp_path):
    torch.manual_seed(0)
    model, inputs = Model(), (torch.randn(8, 6),)
    constraints = Constraints(**{"pp": 1, "dp": 1, "tp": 1, **mesh})
    plan = partition(model, Topology.local(2), inputs, loss=first_of, constraints=constraints)
    plan.save(tmp_path / "plan.json")
    report = Plan.load(tmp_path / "plan.json").verify(model, inputs, loss=first_of)
    assert report.ok, str(report)
    assert {"grad weight", "grad bias", "output 1"} < report.errors.keys()


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "microbatch_size": 4}], ids=str)
def test_complex_numbers_pass_between_processes(mesh: dict[str, int]):
    torch.manual_seed(0)
    model, inputs = Model(), (torch.randn(8, 6),)
    constraints = Constraints(**{"pp": 1, "dp": 1, "tp": 1, **mesh})
    plan = partition(model, Topology.local(2), inputs, loss=first_of, constraints=constraints)
    run = partitioner.run_local(plan, model, inputs, precision="fp64", timeout=120)
    errors = compare(run, run_reference(model, inputs, first_of), plan.program)
    assert max(errors.values()) < 1e-9, errors


def test_an_engine_steps_complex_weights():
    torch.manual_seed(0)
    model, inputs = Model(), (torch.randn(8, 6),)
    plan = partition(model, Topology.local(1), inputs, loss=first_of)
    engine = partitioner.Engine(plan, weights=model)
    engine.step(inputs)
    gradients = dict(
        zip(("weight", "bias"), torch.autograd.grad(model(*inputs)[0], (model.weight, model.bias)), strict=True)
    )
    of_engine = {name: p.grad for name, p in engine.named_parameters() if name in gradients}
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_engine[name], gradient)


def first_of(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0]


def test_both_parts_count():
    x = torch.randn(4, dtype=torch.complex128)
    assert relative_error(x, x) == 0
    assert relative_error(x, x.conj()) > 0.1


class Detached(nn.Module):
    """Complex numbers as constants of the gradient, as projections and targets have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.layer(x).view(-1, 8, 2))
        with torch.no_grad():
            turned = z * 1j
        return ((z * z.detach().conj()).real + (z - turned).abs()).mean()


def test_complex_numbers_are_detached_as_others_are():
    torch.manual_seed(0)
    model, inputs = Detached(), (torch.randn(8, 6),)
    constraints = Constraints(pp=1, dp=2, tp=1, microbatch_size=2)
    report = partition(model, Topology.local(2), inputs, constraints=constraints).verify(model, inputs)
    assert report.ok, str(report)
