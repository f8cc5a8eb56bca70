"""Rows that a mask selects, of which nobody knows how many: planned at a fixed size, and equal to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import Constraints, Topology, partition
from partitioner.passes.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("without_baselines")

WIDTH = 8


class Model(nn.Module):
    """``x``: ``[4, 6, WIDTH]``; the mask is of its numbers, and is true of a part of the 24 rows."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.then = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(self, self.first(x), x[..., 0] > 0.3) ** 2).mean()


def loss_of_some(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    targets = mask.long() + 2
    return F.cross_entropy(model.then(h)[mask].view(-1, h.size(-1)), targets[mask].view(-1))


def put_back(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    out = h.clone()
    out[mask] = model.then(h[mask]).tanh()
    return out


def added_by_place(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    flat = h.flatten(0, 1)
    (at,) = torch.where(mask.flatten())
    return flat.index_add(0, at, F.layer_norm(model.then(flat[at]), (WIDTH,)))


def changed_by_place(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    flat = h.flatten(0, 1) * 2
    at = mask.flatten().nonzero().squeeze(-1)
    flat[at] += model.then(flat[at])
    return flat


def by_two_places(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    rows, columns = mask.nonzero(as_tuple=True)
    out = torch.zeros_like(h)
    out[rows, columns] = model.then(h[rows, columns])
    return out


def accumulated(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    rows, columns = torch.where(mask)
    taken = model.then(h[rows, columns])
    return torch.zeros(6, WIDTH, dtype=h.dtype).index_put((columns,), taken, accumulate=True)


def into_another(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    taken = model.then(h[mask])
    return (h * 2).masked_scatter(mask.flip(0)[..., None] & mask.flip(0)[..., None], taken)


def averaged(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    taken = model.then(h[mask])
    return taken.mean(0) + taken.sum(0) / 7 + taken.mean()


def multiplied(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    taken = h[mask]
    return model.then(taken).transpose(0, 1) @ taken


def what_must_not_be_looked_at(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    """Infinite in value and in gradient, and an index that there is none of, wherever the mask is not."""
    numbers = torch.where(mask, 3, -100)
    out = torch.zeros_like(h)
    taken = model.then(h[mask]) / (mask.to(h.dtype) * h[..., 0] ** 2)[mask].sqrt()[:, None]
    out[mask] = taken + model.then.weight[numbers[mask]]
    return out


def experts(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    flat = h.flatten(0, 1)
    weights, chosen = flat.softmax(-1).topk(2, dim=-1)
    out = torch.zeros_like(flat)
    for number, layer in enumerate((model.first, model.then)):
        row, k = torch.where(chosen == number)
        out.index_add_(0, row, layer(flat[row]) * weights[row, k, None])
    return out


def split_by_count(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    flat = h.flatten(0, 1)
    order = mask.flatten().long().sort(stable=True)[1]
    counts = [(~mask).sum().item(), mask.sum().item()]
    first, then = flat[order].split(counts, dim=0)
    return torch.cat([model.first(first), model.then(then)], dim=0)


def of_many_layers(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    for _ in range(40):  # 2 ** 40 paths lead from x to the masks
        h = h + h.tanh()
    out = h.clone()
    out[h[..., 0] > 0.3] = model.then(h[h[..., 0] > 0.3])  # two that are computed alike
    return out


def beside_what_is_selected(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    """The places before and behind, which are there for all rows that are selected, and not for all others."""
    flat = h.flatten(0, 1)
    inner = mask.flatten().clone()
    inner[0] = inner[-1] = False
    (at,) = torch.where(inner)
    out = torch.zeros_like(flat).index_add(0, at - 1, model.then(flat[at + 1]))
    return out.index_put((at + 1,), model.first(flat[at - 1]), accumulate=True)


def overwritten_by_any(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    """Rows of different choices are written: no row is written twice by one of them."""
    flat = h.flatten(0, 1)
    chosen = flat.topk(3, dim=-1)[1]
    out = torch.zeros_like(flat)
    tokens = (chosen == 1).any(-1)
    out[tokens] = model.first(flat[tokens])
    row, place = torch.where(chosen == 2)
    out[row] = model.then(flat[row]) * (place[:, None] + 1)
    row, place = torch.where((chosen == 3) & mask.flatten()[:, None].expand_as(chosen))
    out[row] += model.then(flat[row]) * (place[:, None] + 2)
    return out


def divided_by_what_may_be_zero(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    """Not in rows that are selected: ones, and a first row, are nothing to divide by."""
    flat, inner = h.flatten(0, 1), mask.flatten().clone()
    inner[0] = False
    (at,) = torch.where(inner)
    taken = flat[at] - flat[at].mean(-1, keepdim=True)
    taken = model.first(taken / taken.square().sum(-1, keepdim=True).sqrt())
    nth = inner.long().cumsum(0) - 1
    return flat.index_add(0, at, model.then(taken / at[:, None]) / (nth[at][:, None] + 1))


WAYS = [loss_of_some, put_back, added_by_place, changed_by_place, by_two_places, accumulated, into_another, averaged,
        multiplied, what_must_not_be_looked_at, experts, split_by_count, of_many_layers,
        beside_what_is_selected, overwritten_by_any, divided_by_what_may_be_zero]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_selected_is_what_counts(way: Callable[..., Tensor]):
    torch.manual_seed(0)
    model, x = Model(way), torch.randn(4, 6, WIDTH)
    plan = partition(model, Topology.local(2), (x,), constraints=Constraints(pp=1, dp=1, tp=2))
    report = plan.verify(model, (x,))
    assert report.ok, str(report)
    assert any("discards those that are not selected" in note for note in plan.notes)


@pytest.mark.parametrize("way", [loss_of_some, put_back, averaged], ids=lambda way: way.__name__)
def test_over_the_batch(way: Callable[..., Tensor]):
    torch.manual_seed(0)
    model, x = Model(way), torch.randn(4, 6, WIDTH)
    plan = partition(model, Topology.local(2), (x,), constraints=Constraints(pp=1, dp=2, tp=1))
    report = plan.verify(model, (x,))
    assert report.ok, str(report)


def test_over_microbatches():
    torch.manual_seed(0)
    model, x = Model(experts), torch.randn(4, 6, WIDTH)
    plan = partition(model, Topology.local(2), (x,), constraints=Constraints(pp=1, dp=2, microbatch_size=1))
    report = plan.verify(model, (x,))
    assert report.ok, str(report)


def test_a_mask_that_selects_nothing_and_one_that_selects_all():
    torch.manual_seed(0)
    model, x = Model(put_back), torch.randn(4, 6, WIDTH)
    plan = partition(model, Topology.local(2), (x,), constraints=Constraints(pp=1, dp=1, tp=2))
    for sign in (-1, 1):
        assert plan.verify(model, (sign * x.abs(),)).ok


def put_apart(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    """Places whose dims do not lie beside each other."""
    rows, columns = torch.where(mask)
    out = h.new_zeros(4, 6, 6)
    out[rows, :, columns] = model.then(h[rows, columns])[:, :6]
    return out


REFUSED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a row of its own": lambda model, h, mask: h[mask][0],
    "place of a number": lambda model, h, mask: h * mask.any().nonzero().sum(),
    "places apart": put_apart,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_the_number_of_rows_is_refused(name: str):
    with pytest.raises(UnsupportedError, match="with a fixed size"):
        partition(Model(REFUSED[name]), Topology.local(2), (torch.randn(4, 6, WIDTH),))
