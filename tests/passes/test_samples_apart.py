"""What works on each sample by itself is equal to the model over microbatches; what does not is refused by its line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import Constraints, Topology, partition
from partitioner.errors import PlanError
from partitioner.passes.rules.factors import MAX_SECTIONS
from partitioner.solve.evaluate.local_model_cache import LocalModels
from partitioner.solve.evaluate.prefetch import LocalKey
from partitioner.solve.sharding.local_model import LocalModel

pytestmark = pytest.mark.usefixtures("without_baselines")

WIDTH = 8
MANY = MAX_SECTIONS + 6  # of parts of one dim that samples are in


class Model(nn.Module):
    """``function`` makes a scalar of what a layer gives of two inputs."""

    def __init__(self, function: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.then = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)
        self.cells = nn.ModuleList((nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.RNNCell(WIDTH, WIDTH)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self, self.first(x).tanh(), self.first(y))


def cells(model: Model, x: Tensor, y: Tensor) -> Tensor:
    lstm, gru, rnn = model.cells
    hidden, cell = torch.zeros_like(y), y
    for _ in range(3):
        hidden, cell = lstm(x, (hidden, cell))
        x = rnn(gru(hidden, x), y)
    return x.square().mean()


def warped(model: Model, x: Tensor, y: Tensor) -> Tensor:
    grid = F.affine_grid(model.then(x).view(-1, 2, 3), [x.shape[0], 2, 4, 4], align_corners=False)
    return F.grid_sample(y.view(-1, 2, 2, 2), grid, align_corners=False).square().mean()


def solved(model: Model, x: Tensor, y: Tensor) -> Tensor:
    matrix = torch.eye(WIDTH) + x.unsqueeze(-1) @ x.unsqueeze(-2)
    found = torch.linalg.solve(matrix, y.unsqueeze(-1)) + torch.linalg.inv(matrix)
    return found.square().mean() + torch.linalg.cholesky(matrix).square().mean() + matrix.logdet().mean()


def picked(model: Model, x: Tensor, y: Tensor) -> Tensor:
    rows, columns = torch.arange(x.shape[0]), torch.arange(4)[None]
    pairs = x.view(-1, 4, 2)
    of_each = pairs[rows, y[:, :4].argmax(-1) - 4] * pairs[rows[:, None], y[:, :3].argsort(-1)].sum(1)
    deep = pairs[rows[:, None], columns, (y[:, :4] > 0).long()]
    return of_each.square().mean() + deep.square().mean() - x.log_softmax(-1)[rows, y.argmax(-1)].mean()


def overwritten(model: Model, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[x < -0.3] = 0.1
    x[y[:, 0] > 0] = 0.7
    return (model.then(x) ** 2).mean()


def repeated_for_all_experts(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Each of many experts has all rows one after the other, scaled by how much they want it."""
    numbers = torch.arange(1, MANY + 1) / MANY
    wanted = (y.sum(1, keepdim=True) * numbers).sigmoid()
    rows = x.repeat(MANY, 1) * wanted.transpose(0, 1).reshape(-1, 1)
    experts = model.first.weight.expand(MANY, WIDTH, WIDTH) * numbers[:, None, None]
    made = torch.bmm(rows.view(MANY, -1, WIDTH), experts).relu().view(-1, WIDTH)
    return made.reshape(MANY, -1, WIDTH).sum(0).square().mean()


def flat_and_back(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Elementwise work on flat values, of which some broadcast."""
    scale, shift = model.first.weight.reshape(-1)[:1], model.first.bias
    flat = x.reshape(-1) * y.reshape(-1) + scale
    wide = x.reshape(-1, 2, 4).reshape(-1, 8).tanh() - shift
    return (flat.sigmoid().view(-1, WIDTH) + wide).view(-1, 2, 4).square().mean()


APART: dict[str, Callable[[Model, Tensor, Tensor], Tensor]] = {
    "triplets": lambda model, x, y: F.triplet_margin_loss(x, y, x.flip(1), swap=True),
    "ranking": lambda model, x, y: F.margin_ranking_loss(x, y, x.detach().sign(), margin=0.2),
    "cosine embedding": lambda model, x, y: F.cosine_embedding_loss(x, y, x[:, 0].detach().sign(), margin=0.1),
    "margins": lambda model, x, y: F.multi_margin_loss(model.then(x), y[:, :6].argmax(-1)),
    "margins of several": lambda model, x, y: F.multilabel_margin_loss(model.then(x), y[:, :6].argsort(-1)),
    "cells": cells,
    "overwritten": overwritten,
    "repeated for all experts": repeated_for_all_experts,
    "flat and back": flat_and_back,
    "picked": picked,
    "warped": warped,
    "solved": solved,
}


@pytest.mark.parametrize("name", APART)
def test_equal_to_the_model_over_microbatches(name: str):
    torch.manual_seed(0)
    model, inputs = Model(APART[name]), (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    constraints = Constraints(pp=1, dp=2, tp=1, microbatch_size=2)
    report = partition(model, Topology.local(2), inputs, constraints=constraints).verify(model, inputs)
    assert report.ok, str(report)


@torch.library.custom_op("samples_apart::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: 2 * grad)

TOGETHER: dict[str, tuple[Callable[[Model, Tensor, Tensor], Tensor], str]] = {
    "without a rule": (
        lambda model, x, y: doubled(x).square().mean(),
        r"samples_apart.doubled.default at the model \(.*test_samples_apart.py:\d+\) has no rule.* 2 microbatches",
    ),
    "medians": (lambda model, x, y: x.median(), r"the model \(.*\) combines samples .* \(aten.median.default\)"),
    "neighbours": (
        lambda model, x, y: (model.then(x)[1:] - model.then(x)[:-1]).square().mean(),
        r"the model \(.*\) combines samples .* \(aten.slice.Tensor\)",
    ),
    "root of a mean": (lambda model, x, y: x.square().mean().sqrt(), r"the model \(.*\) combines samples"),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_samples_that_meet_are_refused_where_they_do(name: str):
    function, message = TOGETHER[name]
    inputs = (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    line = function.__code__.co_firstlineno
    constraints = Constraints(pp=1, dp=2, tp=1, microbatch_size=2)
    with pytest.raises(PlanError, match=message) as caught:
        partition(Model(function), Topology.local(2), inputs, constraints=constraints)
    assert f"test_samples_apart.py:{line})" in str(caught.value)


def test_what_has_no_plan_is_looked_at_once(monkeypatch: pytest.MonkeyPatch):
    asked: Counter[object] = Counter()
    find = LocalModels._build_local_model

    def counted(self: LocalModels, key: LocalKey, num_microbatches: int) -> LocalModel:
        asked[key] += 1
        return find(self, key, num_microbatches)

    monkeypatch.setattr(LocalModels, "_build_local_model", counted)
    inputs = (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    plan = partition(Model(TOGETHER["neighbours"][0]), Topology.local(4), inputs, constraints=Constraints(pp=1))
    reasons = [row.reason for row in plan.certificate.candidates if row.status == "infeasible"]
    assert sum("combines samples" in reason for reason in reasons) > 1
    assert max(asked.values()) == 1
