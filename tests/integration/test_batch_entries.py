"""Every entry of a batch is used, or equal to what the plan was made with, or refused with its name."""

from __future__ import annotations

import collections
import copy
import functools
import math
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import BatchError, Constraints, Engine, Plan, Topology, partition, run_threads

pytestmark = pytest.mark.usefixtures("without_baselines")

ONE = {"pp": 1, "dp": 1, "cp": 1, "tp": 1}


class Options(nn.Module):
    """A model whose forward has an input of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        weight: float = 1.0,
        mode: str = "mean",
        flag: bool = True,
        *,
        power: int = 2,
        extra: tuple[Tensor, ...] = (),
    ) -> Tensor:
        z = self.b(torch.tanh(self.a(x)))
        if mask is not None:
            z = z * mask[:, None]
        for tensor in extra:
            z = z + tensor
        z = (z**power).mean() if mode == "mean" else (z**power).sum()
        return z * weight if flag else -z


def x(seed: int = 0, rows: int = 8) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASK = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.float64)


def planned(model: nn.Module, inputs: Any, **mesh: int) -> Plan:
    given = ONE | mesh
    return partition(model, Topology.local(math.prod(given.values())), inputs, constraints=Constraints(**given))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def check_equal(plan: Plan, model: nn.Module, batch: Any) -> None:
    """The plan computes what the model does on ``batch``: the loss and every gradient."""
    eager = copy.deepcopy(model)
    loss = eager(**batch) if isinstance(batch, collections.abc.Mapping) else eager(*batch)
    loss.backward()
    run = run_threads(plan, model, batch)
    assert run.loss is not None
    torch.testing.assert_close(run.loss, loss.detach(), rtol=1e-10, atol=1e-12)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(run.grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
    report = plan.verify(model, batch)
    assert report.ok, str(report)


@functools.cache
def planned_once(planned_with: str) -> tuple[nn.Module, Plan]:
    """A model, and its plan with the inputs of those cases that have these."""
    inputs = next(inputs for inputs, _, _ in REFUSED.values() if repr(inputs) == planned_with)
    model = seeded(Options)
    return model, planned(model, {"x": x(), **inputs})


# planned with, then given, and what the message says of it
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a mask where there was none": ({}, {"mask": MASK}, r"'mask' is a float64 tensor.*mask=None"),
    "a mask instead of None": ({"mask": None}, {"mask": MASK}, r"'mask' is a float64 tensor.*mask=None"),
    "no mask where there was one": ({"mask": MASK}, {}, r"'mask' is missing"),
    "None instead of a mask": ({"mask": MASK}, {"mask": None}, r"'mask' is None: expected a float64 tensor"),
    "another text": ({"mode": "mean"}, {"mode": "sum"}, r"'mode' is 'sum'.*mode='mean'"),
    "a text instead of the default": ({}, {"mode": "sum"}, r"'mode' is 'sum'.*mode='mean'"),
    "a text left out": ({"mode": "sum"}, {}, r"'mode' is missing.*mode='sum'.*'mean' where it is left out"),
    "another flag": ({"flag": True}, {"flag": False}, r"'flag' is False.*flag=True"),
    "a number for a flag": ({"flag": True}, {"flag": 1}, r"'flag' is 1.*flag=True"),
    "a flag for a number": ({"weight": 1.0}, {"weight": True}, r"'weight' is True; expected a number"),
    "a number that was left out": ({}, {"weight": 2.0}, r"'weight' is 2.0.*weight=1.0"),
    "a tensor with dims for a number": ({"weight": 1.0}, {"weight": torch.ones(8)}, r"'weight' is a float32 tensor"),
    "a text for a number": ({"weight": 1.0}, {"weight": "1"}, r"'weight' is '1'; expected a number"),
    "a misspelt key": ({}, {"maks": MASK}, r"'maks'.*not read by the plan.*did you mean 'mask'"),
    "an unknown key": ({}, {"labels": MASK}, r"'labels'.*forward takes \(x, mask, weight"),
    "more elements of a list": ({"extra": (MASK[:4],)}, {"extra": (MASK[:4], MASK[:4])}, r"'extra.1'"),
    "fewer elements of a list": ({"extra": (MASK[:4],)}, {"extra": ()}, r"'extra.0' is missing"),
    "an array for a mask": ({"mask": MASK}, {"mask": MASK.numpy()}, r"'mask' is a ndarray: expected a float64 tensor"),
    "a number left out that has no default": ({"extra": (0.5,)}, {}, r"'extra.0' is missing: expected a number"),
    "too large a number": ({"power": 2}, {"power": 1 << 70}, r"'power' is \d+; expected a whole number of 64 bits"),
    "an object": ({}, {"mode": object()}, r"'mode' is a object.*mode='mean'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_plan_was_not_made_for_is_refused_by_name(case: str):
    planned_with, given, message = REFUSED[case]
    model, plan = planned_once(repr(planned_with))
    batch = {"x": x(1), **given}
    with pytest.raises(BatchError, match=message):
        run_threads(plan, model, batch)
    with pytest.raises(BatchError, match=message):
        plan.verify(model, batch)
    with pytest.raises(BatchError, match=message):
        Engine(plan, weights=model).step(batch)


TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another number": ({"weight": 2.0}, {"weight": 3.5}),
    "a whole number": ({"weight": 2.0}, {"weight": 3}),
    "a tensor of no dims": ({"weight": 2.0}, {"weight": torch.tensor(0.25, dtype=torch.float64)}),
    "a number of NumPy's": ({"weight": 2.0}, {"weight": np.float64(0.5)}),
    "a number left out": ({"weight": 2.0}, {}),
    "the default, written out": ({}, {"mask": None, "weight": 1.0, "mode": "mean", "flag": True, "power": 2}),
    "what was planned, left out": ({"mask": None, "mode": "mean"}, {}),
    "an empty list": ({}, {"extra": ()}),
    "a whole number that is a power": ({"power": 2}, {"power": 3}),
}


@pytest.mark.parametrize(
    "mesh",
    [pytest.param({}, marks=pytest.mark.slow), {"dp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("case", TAKEN)
def test_what_is_used_or_equal_is_taken(case: str, mesh: dict[str, int]):
    planned_with, given = TAKEN[case]
    model = seeded(Options)
    plan = planned(model, {"x": x(), **planned_with}, **mesh)
    check_equal(plan, model, {"x": x(1), **given})


def test_positional_and_keyword_arguments_are_one():
    model = seeded(Options)
    plan = planned(model, (x(), MASK))
    check_equal(plan, model, {"x": x(1), "mask": MASK.flip(0)})
    check_equal(plan, model, (x(1), MASK, 1.0))
    with pytest.raises(BatchError, match="'mode' is 'sum'"):
        run_threads(plan, model, (x(1), MASK, 1.0, "sum"))


@pytest.mark.parametrize("kind", [collections.UserDict, MappingProxyType, collections.OrderedDict])
def test_every_mapping_is_a_batch(kind: Callable[[Any], Any]):
    model = seeded(Options)
    plan = planned(model, kind({"x": x(), "mask": MASK}))
    batch = kind({"x": x(1), "mask": MASK})
    check_equal(plan, model, batch)
    assert Engine(plan, weights=model).step(batch) is not None


@pytest.mark.parametrize("batch", [None, 3, "x", {x}])
def test_what_is_no_batch_is_refused(batch: Any):
    model = seeded(Options)
    with pytest.raises(BatchError, match="expected a tuple of positional arguments, or a dict"):
        run_threads(planned(model, {"x": x()}), model, batch)


# --- numbers that a script schedules ----------------------------------------------------------------------------------


class Scheduled(nn.Module):
    """The loss is what ``compute`` makes of two layers' output and a number."""

    def __init__(self, compute: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.compute = nn.Linear(4, 8), nn.Linear(8, 4), compute

    def forward(self, x: Tensor, beta: Any) -> Tensor:
        return self.compute(self.b(torch.tanh(self.a(x))), beta)


class Reverse(torch.autograd.Function):
    """Gradient reversal: the number is in the backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grads[0], None


LIFTED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "a weight of the loss": lambda z, b: b * z.square().mean(),
    "a temperature": lambda z, b: F.log_softmax(z / b, -1)[:, 0].neg().mean(),
    "added": lambda z, b: (z + b).square().mean() + b,
    "subtracted from": lambda z, b: (1 - b) * z.square().mean() + (b - z).abs().mean(),
    "a power": lambda z, b: (z.abs() + 0.1).pow(b).mean(),
    "the base of a power": lambda z, b: (b**z).mean(),
    "a bound": lambda z, b: z.clamp(-b, b).square().mean(),
    "compared with tensors": lambda z, b: torch.where(z > b, z, z * 0.1).square().mean(),
    "of Python's own functions": lambda z, b: z.square().mean() * min(1.0, b / 10) + max(b, 0.1, 0.2) * z.mean(),
    "of math": lambda z, b: z.square().mean() * (0.5 * (1 + math.cos(math.pi * b / 10)) + math.exp(-b)),
    "of NumPy": lambda z, b: z.square().mean() * np.exp(-b) * np.minimum(b, 1.0),
    "a scale of what is added": lambda z, b: torch.add(z, z.detach(), alpha=b).square().mean(),
    "made a tensor": lambda z, b: (
        z.square().mean() * torch.tensor(b, dtype=z.dtype) + torch.full((4,), b).sum() * z.mean()
    ),
    "in the backward alone": lambda z, b: Reverse.apply(z, b).square().mean(),
    "interpolated": lambda z, b: torch.lerp(z, z.flip(-1), b / 4).square().mean(),
    "decided by": lambda z, b: z.square().mean() * b if b > 0.05 else z.sum(),
    "as a truth value": lambda z, b: z.square().mean() * (b or 1.0),
    "in a schedule": lambda z, b: z.square().mean() * (0.1 if b < 0.01 else (b - 0.01) ** 0.5 + (1 - b) / 3),
}


@pytest.mark.parametrize("case", LIFTED)
def test_a_float_of_the_batch_is_read_at_every_step(case: str):
    model = seeded(lambda: Scheduled(LIFTED[case]))
    plan = planned(model, {"x": x(), "beta": 0.5}, dp=2)
    assert not any("fixed inputs" in note for note in plan.notes)
    for beta in (0.5, 0.3, 2.25):
        check_equal(plan, model, {"x": x(1), "beta": beta})


@pytest.mark.parametrize(
    ("compute", "use"),
    [
        (lambda z, b: z.square().mean() * float(b), r"float\(\)"),
        (lambda z, b: z.square().mean() * round(b, 1), r"round\(\)"),
        (lambda z, b: z.square().mean() * {0.5: 1.0}.get(b, 2.0), "a key"),
        (lambda z, b: z.square().mean() if f"{b}" == "0.5" else z.sum(), "a text"),
        (lambda z, b: F.leaky_relu(z, b).mean(), ""),
    ],
)
def test_a_float_that_cannot_be_a_tensor_is_fixed_and_the_summary_says_so(compute: Any, use: str):
    model = seeded(lambda: Scheduled(compute))
    plan = planned(model, {"x": x(), "beta": 0.5})
    check_equal(plan, model, {"x": x(1), "beta": 0.5})
    with pytest.raises(BatchError, match=r"'beta' is 0.25.*beta=0.5"):
        run_threads(plan, model, {"x": x(1), "beta": 0.25})
    note = next(note for note in plan.notes if "fixed inputs" in note)
    assert "beta=0.5" in note
    assert re.search(use, note)
