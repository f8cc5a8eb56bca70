"""Loops through the experts that some row has chosen: planned as loops through all, where that is the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from partitioner import Constraints, Topology, partition
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import CaptureError, UnsupportedError
from partitioner.passes.normalize.pipeline import normalize
from tests.helpers.looped_experts import E, H, K, Loop, Mixture, built, check_equal, targets

pytestmark = pytest.mark.usefixtures("without_baselines")


def masks_of(self: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    shares, chosen = self.choose(x)
    return shares, F.one_hot(chosen, E).permute(2, 1, 0)


def hit(self: Mixture, x: Tensor) -> Tensor:
    """As Hugging Face's models do it."""
    shares, masks = masks_of(self, x)
    y = torch.zeros_like(x)
    for i in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
        place, row = torch.where(masks[i].squeeze(0))
        y.index_add_(0, row, self.experts[i](x[None, row].reshape(-1, H)) * shares[row, place, None])
    return y


def named(self: Mixture, x: Tensor) -> Tensor:
    """The number of an expert in the name of its module."""
    shares, masks = masks_of(self, x)
    y = torch.zeros_like(x)
    for i in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
        place, row = torch.where(masks[i].squeeze(0))
        expert = self.experts.get_submodule(f"{i[0]}")
        y.index_add_(0, row, expert(x[None, row].reshape(-1, H)) * shares[row, place, None])
    return y


def flat(self: Mixture, x: Tensor) -> Tensor:
    """By number, out of a table of truth values, and added out of place."""
    shares, masks = masks_of(self, x)
    masks, y = masks.bool(), torch.zeros_like(x)
    for i in masks.any(-1).any(-1).nonzero().flatten():
        if i == E:
            continue
        place, row = torch.where(masks[i])
        if row.numel() == 0:
            continue
        y = y.index_add(0, row, self.experts[int(i)](x[row]) * shares[row, place, None])
    return y


def crowded(self: Mixture, x: Tensor) -> Tensor:
    """No more than three rows for each expert: no choice alone tells them."""
    share, chosen = self.router(x).softmax(-1).max(-1)
    table = F.one_hot(chosen, E)
    table = table * (table.cumsum(0) <= 3)
    y = torch.zeros_like(x)
    for i in table.sum(0).nonzero().squeeze(-1):
        (row,) = torch.where(table[:, i])
        y[row] += self.experts[i](x[row]) * share[row, None]
    return y


@pytest.mark.parametrize("loop", [hit, named, flat, crowded])
@pytest.mark.parametrize("missed", [False, True], ids=["", "an expert without rows"])
def test_turns_without_rows_come_to_nothing(loop: Loop, missed: bool):
    model, x = built(loop)
    if missed:
        with torch.no_grad():
            model.router.weight[1] = 0.0
            model.router.weight[0] *= 40.0
    captured = normalize(capture(model, (x,)))
    assert targets(captured.graph).count("partition.expert_mm.default") == 3 * (loop is not crowded)
    assert not any("partition.hits" in target for target in targets(captured.graph))
    check_equal(captured, model, x)


def counted(self: Mixture, x: Tensor) -> Tensor:
    """What is added is divided by how many experts there were."""
    shares, masks = masks_of(self, x)
    y, turns = torch.zeros_like(x), 0
    for i in masks.sum((1, 2)).nonzero().flatten():
        place, row = torch.where(masks[i])
        y, turns = y.index_add(0, row, self.experts[i](x[row]) * shares[row, place, None]), turns + 1
    return y / turns


def forgotten(self: Mixture, x: Tensor) -> Tensor:
    """Only the last expert's rows stay."""
    shares, masks = masks_of(self, x)
    y = x
    for i in masks.sum((1, 2)).nonzero().flatten():
        place, row = torch.where(masks[i])
        y = x.index_add(0, row, self.experts[i](x[row]) * shares[row, place, None])
    return y


def weighed(self: Mixture, x: Tensor) -> Tensor:
    """Each expert that is hit adds what depends on no row."""
    shares, masks = masks_of(self, x)
    y = torch.zeros_like(x)
    for i in masks.sum((1, 2)).nonzero().flatten():
        place, row = torch.where(masks[i])
        y = y.index_add(0, row, self.experts[i](x[row]) * shares[row, place, None]) + self.experts[i].scale
    return y


def others(self: Mixture, x: Tensor) -> Tensor:
    """The rows are those of another choice."""
    shares, masks = masks_of(self, x)
    wanted = F.one_hot((-self.router(x)).topk(K).indices, E).permute(2, 1, 0)
    y = torch.zeros_like(x)
    for i in masks.sum((1, 2)).nonzero().flatten():
        place, row = torch.where(wanted[i])
        y = y.index_add(0, row, self.experts[i](x[row]) * shares[row, place, None])
    return y


def first(self: Mixture, x: Tensor) -> Tensor:
    """The first expert that is hit has a part of its own."""
    shares, masks = masks_of(self, x)
    y = torch.zeros_like(x)
    for n, i in enumerate(masks.sum((1, 2)).nonzero().flatten()):
        place, row = torch.where(masks[i])
        y = y.index_add(0, row, self.experts[i](x[row]) * shares[row, place, None] * (n + 1))
    return y


@pytest.mark.parametrize("loop", [counted, forgotten, weighed, others, first])
def test_turns_that_do_more_are_refused(loop: Loop):
    model, x = built(loop)
    with pytest.raises(UnsupportedError, match=r"an iteration does more than add to its rows.* range\(num_experts\)"):
        normalize(capture(model, (x,)))


def changed_before(self: Mixture, x: Tensor) -> Tensor:
    """An expert that nobody had chosen gets rows, and no turn."""
    shares, masks = masks_of(self, x)
    hits, y = masks.sum((1, 2)).nonzero().flatten(), torch.zeros_like(x)
    masks[2] = masks[1]
    for i in hits:
        place, row = torch.where(masks[i])
        y = y.index_add(0, row, self.experts[i](x[row]) * shares[row, place, None])
    return y


def changed_within(self: Mixture, x: Tensor) -> Tensor:
    """A turn changes the masks of others by way of the table that they are views of."""
    shares, chosen = self.choose(x)
    table, y = F.one_hot(chosen, E), torch.zeros_like(x)
    masks = table.permute(2, 1, 0)
    for i in masks.sum((1, 2)).nonzero().flatten():
        place, row = torch.where(masks[i])
        y = y.index_add(0, row, self.experts[i](x[row]) * shares[row, place, None])
        table[..., 3] = table[..., 1]
    return y


@pytest.mark.parametrize("loop", [changed_before, changed_within])
def test_masks_that_change_after_it_was_asked_who_is_hit_are_refused(loop: Loop):
    model, x = built(loop)
    with pytest.raises(UnsupportedError, match="are changed in place after they were read"):
        capture(model, (x,))


def left(self: Mixture, x: Tensor) -> Tensor:
    shares, masks = masks_of(self, x)
    y = torch.zeros_like(x)
    for i in masks.sum((1, 2)).nonzero().flatten():
        place, row = torch.where(masks[i])
        y = y.index_add(0, row, self.experts[i](x[row]) * shares[row, place, None])
        if i == 2:
            break
    return y


def test_a_loop_that_is_left_early_is_refused():
    model, x = built(left)
    with pytest.raises(UnsupportedError, match="ends early"):
        capture(model, (x,))


def test_other_rows_that_the_data_select_are_not_gone_through():
    model, x = built(lambda self, x: sum(row for row in x[x[:, 0] > 0]))
    with pytest.raises(CaptureError, match="must not depend on tensors' numbers"):
        capture(model, (x,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("mixtral", dict(dp=2, ep=2)),
        pytest.param("qwen3_moe", dict(dp=2, tp=2, ep=4, etp=1), marks=pytest.mark.slow),
    ],
)
def test_a_published_model_with_its_plainest_experts(name: str, axes: dict[str, int]):
    config = AutoConfig.for_model(
        name, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4, vocab_size=64,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 64, (4, 8))
    inputs = {"input_ids": ids, "labels": ids}
    topology = Topology.local(2 * axes.get("tp", 1) * axes["dp"])
    plan = partition(model, topology, inputs, constraints=Constraints(pp=2, **axes))
    assert plan.verify(model, inputs).ok
    assert any("loops over experts" in note for note in plan.notes)
