"""Decisions that pass over experts without rows: planned as if there were rows, where that is the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import Constraints, Topology, partition
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import CaptureError, UnsupportedError
from partitioner.passes.normalize.pipeline import normalize
from tests.helpers.looped_experts import E, K, Loop, Mixture, built, check_equal, targets

pytestmark = pytest.mark.usefixtures("without_baselines")


def added(self: Mixture, x: Tensor, y: Tensor, shares: Tensor, where: tuple[Tensor, Tensor], i: int) -> Tensor:
    row, place = where
    return y.index_add(0, row, self.experts[i](x[row]) * shares[row, place, None])


def no_rows(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        row, place = torch.where(chosen == i)
        if row.numel() == 0:
            continue
        y = added(self, x, y, shares, (row, place), i)
    return y


def places_first(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    masks = F.one_hot(chosen, E).permute(2, 1, 0)
    for i in range(E):
        place, row = torch.where(masks[i])
        if row.shape[0] > 0:
            y.index_add_(0, row, self.experts[i](x[row]) * shares[row, place, None])
    return y


def anywhere(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        mask = chosen == i
        if mask.any():
            row, place = torch.where(mask)
            y[row] += self.experts[i](x[row]) * shares[row, place, None]
    return y


def asked_twice(self: Mixture, x: Tensor) -> Tensor:
    """The mask is made anew behind the question; and it is asked once more."""
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        if not (chosen == i).any().item():
            continue
        row, place = torch.where(chosen == i)
        if row.numel():
            y = added(self, x, y, shares, (row, place), i)
    return y


def of_tokens(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        mask = (chosen == i).any(-1)
        if mask.sum() == 0:
            continue
        share = (shares * (chosen == i)).sum(-1)
        y[mask] += self.experts[i](x[mask]) * share[mask][:, None]
    return y


def rows_of_mask(self: Mixture, x: Tensor) -> Tensor:
    share, chosen = self.router(x).softmax(-1).max(-1)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        mask = chosen == i
        rows = x[mask]
        if rows.shape[0] == 0:
            continue
        y[mask] = expert(rows) * share[mask][:, None]
    return y


def counted(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    counts = F.one_hot(chosen, E).sum((0, 1))
    for i in range(E):
        if counts[i] > 0:
            y = added(self, x, y, shares, torch.where(chosen == i), i)  # type: ignore[arg-type]
    return y


def listed(self: Mixture, x: Tensor) -> Tensor:
    """As DeepSeek's own code does it."""
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    counts = torch.bincount(chosen.flatten(), minlength=E).tolist()
    for i in range(E):
        if counts[i] == 0:
            continue
        row, place = torch.where(chosen == i)
        y[row] += self.experts[i](x[row]) * shares[row, place, None]
    return y


def crowded(self: Mixture, x: Tensor) -> Tensor:
    """No more than three rows for each expert: no choice alone tells them."""
    share, chosen = self.router(x).softmax(-1).max(-1)
    table, y = F.one_hot(chosen, E), torch.zeros_like(x)
    table = table * (table.cumsum(0) <= 3)
    for i in range(E):
        (row,) = torch.where(table[:, i])
        if row.numel() > 0:
            y[row] += self.experts[i](x[row]) * share[row, None]
    return y


def over_samples(self: Mixture, x: Tensor) -> Tensor:
    """Rows are read by flat masks, and written by those of samples and positions."""
    scores = self.router(x).view(2, 5, E)
    best, chosen = scores.topk(K)
    shares = torch.full_like(scores, float("-inf")).scatter(-1, chosen, best).softmax(-1).view(-1, E)
    y = torch.zeros(2, 5, x.size(-1), dtype=x.dtype)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        flat = mask.view(-1)
        if flat.any():
            y[mask] += expert(x[flat]) * shares[flat, i].unsqueeze(1)
    return y.view_as(x)


def written_over(self: Mixture, x: Tensor) -> Tensor:
    """One expert for each position, whose rows take the place of the input's."""
    x = x.view(2, 5, -1)
    y, masks = x.clone(), F.one_hot(self.router(x).argmax(-1), E)
    for i, expert in enumerate(self.experts):
        rows = masks[:, :, i].bool()
        if not torch.any(rows):
            continue
        y[rows] = expert(x[rows])
    return y.view(10, -1)


PASSING = [no_rows, places_first, anywhere, asked_twice, of_tokens, rows_of_mask, counted, listed, crowded,
           over_samples, written_over]  # fmt: skip


@pytest.mark.parametrize("loop", PASSING)
def test_experts_without_rows_may_be_passed_over(loop: Loop):
    model, x = built(loop)
    captured = normalize(capture(model, (x,)))
    found = targets(captured.graph)
    assert found.count("partition.expert_mm.default") == 3 * (loop is not crowded)
    assert not any("partition.hit" in target for target in found)
    check_equal(captured, model, x)
    with torch.no_grad():  # an expert has no rows
        model.router.weight[1] = 0.0
        model.router.weight[0] *= 40.0
    check_equal(captured, model, x.detach())


def with_a_bias(self: Mixture, x: Tensor) -> Tensor:
    """Each expert that has rows adds what depends on none."""
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        mask = chosen == i
        if mask.any():
            y = added(self, x, y, shares, torch.where(mask), i) + self.experts[i].scale  # type: ignore[arg-type]
    return y


def of_others(self: Mixture, x: Tensor) -> Tensor:
    """The rows are those of another choice."""
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    other = (-self.router(x)).topk(K).indices
    for i in range(E):
        if (chosen == i).any():
            y = added(self, x, y, shares, torch.where(other == i), i)  # type: ignore[arg-type]
    return y


def of_another_expert(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        if (chosen == (i + 1) % E).any():
            y = added(self, x, y, shares, torch.where(chosen == i), i)  # type: ignore[arg-type]
    return y


def by_how_many(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y, turns = self.choose(x), torch.zeros_like(x), 0
    for i in range(E):
        row, place = torch.where(chosen == i)
        if row.numel() == 0:
            continue
        y, turns = added(self, x, y, shares, (row, place), i), turns + 1
    return y / turns


def otherwise(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        row, place = torch.where(chosen == i)
        y = added(self, x, y, shares, (row, place), i) if row.numel() else y + self.experts[i].scale
    return y


def left(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        row, place = torch.where(chosen == i)
        if row.numel() == 0:
            break
        y = added(self, x, y, shares, (row, place), i)
    return y


@pytest.mark.parametrize("loop", [with_a_bias, of_others, of_another_expert, by_how_many, otherwise, left])
def test_what_does_more_than_to_add_to_rows_is_refused(loop: Loop):
    model, x = built(loop)
    with pytest.raises(UnsupportedError, match=r"an iteration does more than add to its rows.* range\(num_experts\)"):
        normalize(capture(model, (x,)))


def changed(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    masks = F.one_hot(chosen, E).permute(2, 1, 0).bool()
    for i in range(E):
        mask = masks[i]
        if mask.any():
            mask[0] = True
            place, row = torch.where(mask)
            y = added(self, x, y, shares, (row, place), i)
    return y


def test_masks_that_change_after_it_was_asked_whether_they_are_true_are_refused():
    model, x = built(changed)
    with pytest.raises(UnsupportedError, match="are changed in place after they were read"):
        capture(model, (x,))


def several(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        row, place = torch.where(chosen == i)
        if row.numel() < 2:
            continue
        y = added(self, x, y, shares, (row, place), i)
    return y


def by_numbers(self: Mixture, x: Tensor) -> Tensor:
    """What is asked is not whether any expert has rows."""
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        if (x[:, i] > 0.5).any() or chosen.max() == i:
            y = added(self, x, y, shares, torch.where(chosen == i), i)  # type: ignore[arg-type]
    return y


def by_len(self: Mixture, x: Tensor) -> Tensor:
    (shares, chosen), y = self.choose(x), torch.zeros_like(x)
    for i in range(E):
        row, place = torch.where(chosen == i)
        if len(row) == 0:
            continue
        y = added(self, x, y, shares, (row, place), i)
    return y


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (several, "must not depend on tensors' numbers"),
        (by_numbers, "must not depend on tensors' numbers"),
        (by_len, r"ask for rows.shape\[0\]"),
    ],
)
def test_other_decisions_are_not_taken(loop: Loop, reason: str):
    model, x = built(loop)
    with pytest.raises(CaptureError, match=reason):
        capture(model, (x,))


@pytest.mark.parametrize(
    ("loop", "axes"), [(listed, dict(pp=2, dp=2, ep=2)), (places_first, dict(dp=2, tp=2, ep=4, etp=1))]
)
def test_experts_that_may_be_passed_over_are_spread_over_ranks(loop: Loop, axes: dict[str, int]):
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Mixture(loop) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 5, 8)
    plan = partition(model, Topology.local(4), (x,), constraints=Constraints(**axes))
    assert plan.mesh["ep"] == axes["ep"]
    assert plan.verify(model, (x,)).ok
