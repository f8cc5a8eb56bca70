"""Gradients that forward takes itself are part of the model: loss and every gradient are the eager model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad as imported_grad
from torch.func import functional_call

from partitioner import Constraints, PartitionError, Topology, UnsupportedError, partition

pytestmark = pytest.mark.usefixtures("without_baselines")

F = nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch.func.jvp itself


class Energy(nn.Module):
    """A sum over samples, to be differentiated by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).sum()


class Forces(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        energy = self.energy(x)
        force = -torch.autograd.grad(energy, x, create_graph=True)[0]
        return (force - target).square().mean() + 0.01 * energy


class ImportedGrad(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.requires_grad = True
        return (imported_grad(self.energy(x), x, create_graph=True)[0] - target).square().mean()


class Laplacian(Energy):
    """A gradient of a gradient."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.requires_grad_()
        (first,) = torch.autograd.grad(self.energy(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return (second - target).square().mean()


class NoGraph(Energy):
    """Without create_graph a gradient is a constant of the backward."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy, x, retain_graph=True)
        return self.first(force).square().mean() + energy


class Early(Energy):
    """What was computed before a tensor requires a gradient is not connected with it."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        early = self.first(x)
        x.requires_grad_()
        energy = self.last(torch.tanh(early + self.first(x))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0].square().mean()


class Unused(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.requires_grad_()
        target = target.detach().requires_grad_()
        force, none = torch.autograd.grad(self.energy(x), (x, target), create_graph=True, allow_unused=True)
        return force.square().mean() + (0.0 if none is None else 1.0)


class Intermediate(Energy):
    """A gradient by a value that another one that is asked for leads to."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.requires_grad_()
        hidden = self.first(x)
        by_x, by_hidden = torch.autograd.grad(self.last(torch.tanh(hidden)).sum(), (x, hidden), create_graph=True)
        return by_x.square().mean() + by_hidden.pow(3).mean()


class GradientPenalty(nn.Module):
    """As of a Wasserstein critic; with operators that write in place, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2, inplace=True), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        between = (0.3 * real + 0.7 * fake).requires_grad_(True)
        score = self.critic(between)
        (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)
        return ((slope.norm(2, dim=1) - 1) ** 2).mean() * 10 + self.critic(fake).mean() - self.critic(real).mean()


class InnerLoop(nn.Module):
    """One step of gradient descent inside of forward, by parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        named = dict(self.net.named_parameters())
        inner = F.mse_loss(functional_call(self.net, named, (x,)), y)
        grads = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(named.items(), grads, strict=True)}
        return F.mse_loss(functional_call(self.net, fast, (y,)), x)


class FuncGrad(InnerLoop):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        named = dict(self.net.named_parameters())
        grads = torch.func.grad(lambda p: F.mse_loss(functional_call(self.net, p, (x,)), y))(named)
        return F.mse_loss(functional_call(self.net, {n: p - 0.1 * grads[n] for n, p in named.items()}, (y,)), x)


class Jacobian(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        jacobian = torch.func.jacrev(lambda p: torch.tanh(self.first(p)).sum(0))(x)
        return jacobian.square().mean() + self.energy(x)


class Hessian(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return torch.func.hessian(self.energy)(x[0]).square().mean() + self.energy(x)


class Products(Energy):
    """A product with a Jacobian from the right, one from the left, and torch's older interface."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        def hidden(p: Tensor) -> Tensor:
            return torch.tanh(self.first(p))

        made, moved = torch.func.jvp(hidden, (x,), (target,))
        _, pull_back = torch.func.vjp(hidden, x)
        older = torch.autograd.functional.vjp(hidden, x, made, create_graph=True)[1]
        return (made * moved).mean() + pull_back(moved)[0].square().mean() + older.square().mean()


class BatchNorms(nn.Module):
    """Running statistics are updated once, not once more for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        made = self.net(x)
        return torch.autograd.grad(made.sum(), x, create_graph=True)[0].square().mean() + made.mean()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv1d(1, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        made = self.last(F.gelu(self.norm(self.conv(x.unsqueeze(1)))).flatten(1))
        (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        return slope.square().sum(1).mean() + made.mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.qkv, self.down = nn.Linear(1, 8), nn.Linear(8, 24), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        q, k, v = self.qkv(self.up(x.unsqueeze(-1))).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = ((q @ k.transpose(-1, -2)) / 2).softmax(-1) @ v
        made = self.down(mixed.transpose(1, 2).flatten(2)).sum((1, 2))
        return (torch.autograd.grad(made.sum(), x, create_graph=True)[0] * y).square().sum(1).mean()


ALONE: list[type[nn.Module]] = [
    ImportedGrad, NoGraph, Early, Unused, Intermediate, InnerLoop, FuncGrad, Hessian, Products, BatchNorms, Attention,
]  # fmt: skip
MESHES: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"microbatch_size": 4}]


def verified(build: Callable[[], nn.Module], **constraints: int) -> None:
    torch.manual_seed(0)
    model, inputs = build(), (torch.randn(8, 4), torch.randn(8, 4))
    mesh = {"pp": 1, "dp": 1, "tp": 1, "cp": 1, **constraints}
    world = mesh["pp"] * mesh["dp"] * mesh["tp"]
    plan = partition(model, Topology.local(world), inputs, constraints=Constraints(**mesh))
    found = plan.verify(model, inputs)
    assert found.ok, str(found)
    assert any(error > 0 or name == "loss" for name, error in found.errors.items())


@pytest.mark.parametrize("build", ALONE, ids=lambda build: build.__name__)
def test_inner_gradients_are_exact(build: type[nn.Module]):
    verified(build)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("build", [Forces, GradientPenalty], ids=lambda build: build.__name__)
def test_inner_gradients_are_exact_on_meshes(build: type[nn.Module], mesh: dict[str, int]):
    verified(build, **mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
@pytest.mark.parametrize("build", [*ALONE, Laplacian, Jacobian, Convolution], ids=lambda build: build.__name__)
def test_every_inner_gradient_is_exact_on_meshes(build: type[nn.Module], mesh: dict[str, int]):
    verified(build, **mesh)


class Inferred(Energy):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.requires_grad_(True)
        energy = self.last(torch.tanh(self.first(x)))
        return {"energy": energy, "forces": -torch.autograd.grad(energy.sum(), x)[0]}


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], ids=str)
def test_inference_gives_gradients(mesh: dict[str, int]):
    torch.manual_seed(0)
    model, inputs = Inferred(), (torch.randn(8, 4),)
    constraints = Constraints(pp=1, cp=1, **mesh)
    found = partition(model, Topology.local(2), inputs, objective="infer", constraints=constraints).verify(
        model, inputs
    )
    assert found.ok, str(found)
    assert set(found.errors) == {"output energy", "output forces"}


def test_gradients_of_parameters_combine_the_batch():
    with pytest.raises(PartitionError, match="combines samples across the batch"):
        verified(InnerLoop, microbatch_size=4)


class Backward(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        energy = self.energy(x)
        energy.backward()
        assert self.first.weight.grad is not None
        return energy * self.first.weight.grad.sum()


class Mapped(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return torch.vmap(torch.func.grad(self.energy))(x).square().mean()


class Dropping(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.requires_grad_()
        energy = F.dropout(self.first(x), 0.5).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0].square().mean()


class WritingViews(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.requires_grad_()
        held = torch.zeros(8, 8)
        held[:, :4] = self.first(x)[:, 4:].sin()
        return torch.autograd.grad(held.square().sum(), x, create_graph=True)[0].square().mean()


class NormOfItsType(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.requires_grad_()
        energy = F.rms_norm(self.first(x), (8,)).sin().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0].square().mean()


class Distances(Energy):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x.requires_grad_()
        energy = torch.cdist(self.first(x)[:, :, None], target[:, :, None]).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0].square().mean()


REFUSED: list[tuple[type[nn.Module], str]] = [
    (Backward, r"calls backward\(\) \(.*test_inner_gradients.py:\d+\).*torch.autograd.grad\(outputs"),
    (Mapped, r"inside of torch.vmap \(.*test_inner_gradients.py:\d+\)"),
    (Dropping, r"aten.dropout.default, which draws random numbers"),
    (WritingViews, r"aten.copy_.default, which writes in place"),
    (NormOfItsType, r"RMS norm whose eps depends on the dtype: set it"),
    (Distances, r"torch has no derivative of _cdist_backward"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=lambda case: getattr(case, "__name__", ""))
def test_what_cannot_be_followed_is_refused(build: type[nn.Module], message: str):
    with pytest.raises(UnsupportedError, match=message):
        verified(build)
