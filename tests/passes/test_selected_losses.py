"""Losses and statistics of rows that a mask selects: the same numbers and gradients as of the model by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Topology, partition
from partitioner.passes.errors import CaptureError, PartitionError, UnsupportedError

pytestmark = pytest.mark.usefixtures("without_baselines")

WIDTH, BATCH = 4, 8
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of scores, other numbers, classes and a mask

ELEMENTS: dict[str, Function] = {
    "mse": lambda z, t, y, m: F.mse_loss(z[m], t[m]),
    "weighted mse": lambda z, t, y, m: F.mse_loss(z[m], t[m], weight=t[m].abs()),
    "l1, of a sum": lambda z, t, y, m: F.l1_loss(z[m], t[m], reduction="sum"),
    "smooth l1": lambda z, t, y, m: F.smooth_l1_loss(z[m], t[m], beta=0.7),
    "huber, each": lambda z, t, y, m: F.huber_loss(z[m], t[m], delta=0.5, reduction="none").mean(),
    "of one number": lambda z, t, y, m: F.mse_loss(z[m], t.mean(0).expand(z[m].shape[0], -1)),
    "binary": lambda z, t, y, m: F.binary_cross_entropy(z[m].sigmoid(), t[m].sigmoid(), weight=t[m][:, :1].abs()),
    "binary, of logits": lambda z, t, y, m: F.binary_cross_entropy_with_logits(
        z[m], t[m].sigmoid(), weight=t[m].abs(), pos_weight=torch.arange(1, WIDTH + 1).to(z.dtype)
    ),
    "divergence": lambda z, t, y, m: F.kl_div(z[m].log_softmax(-1), t[m].softmax(-1), reduction="batchmean"),
    "divergence of logs": lambda z, t, y, m: F.kl_div(
        z[m].log_softmax(-1), t[m].log_softmax(-1), reduction="sum", log_target=True
    ),
    "poisson": lambda z, t, y, m: F.poisson_nll_loss(z[m], t[m].abs(), full=True),
    "gaussian": lambda z, t, y, m: F.gaussian_nll_loss(z[m], t[m], t[m].abs() + 0.1, full=True),
    "soft margin": lambda z, t, y, m: F.soft_margin_loss(z[m], t[m].sign()),
    "modules": lambda z, t, y, m: nn.MSELoss()(z[m], t[m]) + nn.SmoothL1Loss(reduction="sum")(z[m], t[m]),
}
SAMPLES: dict[str, Function] = {
    "classes": lambda z, t, y, m: F.cross_entropy(z[m], y[m], weight=t[0].abs(), label_smoothing=0.1),
    "classes, each": lambda z, t, y, m: (F.cross_entropy(z[m], y[m], reduction="none") * t[m][:, 0]).sum(),
    "classes, some ignored": lambda z, t, y, m: F.cross_entropy(z[m], y[m], ignore_index=1),
    "probabilities": lambda z, t, y, m: F.cross_entropy(z[m], t[m].softmax(-1), label_smoothing=0.1),
    "probabilities, each": lambda z, t, y, m: F.cross_entropy(z[m], t[m].softmax(-1), reduction="none").mean(),
    "log probabilities": lambda z, t, y, m: F.nll_loss(z[m].log_softmax(-1), y[m], weight=t[0].abs()),
    "log probabilities, each": lambda z, t, y, m: F.nll_loss(z[m].log_softmax(-1), y[m], reduction="none").sum(),
    "margin of classes": lambda z, t, y, m: F.multi_margin_loss(z[m], y[m]),
    "margin of labels": lambda z, t, y, m: F.multilabel_margin_loss(z[m], F.one_hot(y[m], WIDTH) - 1),
    "labels": lambda z, t, y, m: F.multilabel_soft_margin_loss(z[m], (t[m] > 0).to(z.dtype)),
    "cosine": lambda z, t, y, m: F.cosine_embedding_loss(z[m], t[m], t[m][:, 0].sign(), margin=0.1),
    "cosine similarity": lambda z, t, y, m: F.cosine_similarity(z[m], t[m], dim=-1).mean(),
    "hinge": lambda z, t, y, m: F.hinge_embedding_loss(z[m], t[m].sign()),
    "ranking": lambda z, t, y, m: F.margin_ranking_loss(z[m], t[m], t[m].sign(), margin=0.1),
    "triplet": lambda z, t, y, m: F.triplet_margin_loss(z[m], t[m], t[m] * 2),
    "distance": lambda z, t, y, m: nn.PairwiseDistance()(z[m], t[m]).mean(),
}
STATISTICS: dict[str, Function] = {
    "std": lambda z, t, y, m: z[m].std() + z[m].std(0).sum(),
    "var": lambda z, t, y, m: z[m].var(0, unbiased=False).sum() + torch.var(z[m], dim=(0, 1), correction=2),
    "var and mean": lambda z, t, y, m: sum(v.sum() for v in torch.var_mean(z[m], 0)),  # type: ignore[misc,return-value]
    "norm": lambda z, t, y, m: z[m].norm() + torch.linalg.vector_norm(z[m], ord=3, dim=0).sum(),
    "largest": lambda z, t, y, m: z[m].max() + z[m].amin(0).sum() + z[m].amax((0, 1)),
    "largest, and of which row": lambda z, t, y, m: z[m].max(0).values.sum() * z[m].max(0).indices.sum(),
    "smallest of a row": lambda z, t, y, m: (z[m].min(dim=0)[0] * z[m].argmin(0)).sum() + z[m].min(-1)[0].mean(),
    "log of a sum": lambda z, t, y, m: z[m].logsumexp(0).sum(),
    "softmax of rows": lambda z, t, y, m: (z[m].softmax(0) * t[m]).sum() + (z[m].log_softmax(0) * t[m]).sum(),
    "product": lambda z, t, y, m: z[m].prod(0).sum(),
    "running sum": lambda z, t, y, m: (z[m].cumsum(0) * t[m]).sum(),
    "nan": lambda z, t, y, m: z[m].nanmean() + z[m].nansum(),
    "standard scores": lambda z, t, y, m: F.mse_loss((z[m] - z[m].mean(0)) / (z[m].std(0) + 1e-5), t[m]),
    "any and all": lambda z, t, y, m: z.sum() * ((z[m] > 1).any() + 2 * (z[m] > -9).all()),
}


def by_place(z: Tensor, t: Tensor, y: Tensor, m: Tensor) -> Tensor:
    at = m.nonzero().squeeze(-1)
    return F.mse_loss(z[at], t.index_select(0, at))


def in_order(z: Tensor, t: Tensor, y: Tensor, m: Tensor) -> Tensor:
    logs = z[m].log_softmax(-1)
    return -logs[torch.arange(logs.shape[0]), y[m]].mean() - z.log_softmax(-1)[m, y[m]].sum()


def nested(z: Tensor, t: Tensor, y: Tensor, m: Tensor) -> Tensor:
    a, b = z[m], t[m]
    return F.mse_loss(a[b[:, 0] > 0], b[b[:, 0] > 0])


SELECTIONS: dict[str, Function] = {
    "masked_select": lambda z, t, y, m: torch.masked_select((z - t).square().mean(-1), m).mean(),
    "masked_select, broadcast": lambda z, t, y, m: z.masked_select(m[:, None]).square().sum(),
    "masks computed alike": lambda z, t, y, m: F.mse_loss(z[t[:, 1] > 0], t[t[:, 1] > 0]),
    "elements": lambda z, t, y, m: F.binary_cross_entropy_with_logits(z[t > 0], t[t > 0].sigmoid()),
    "masked_select, computed alike": lambda z, t, y, m: F.l1_loss(z.masked_select(t > 0), t.masked_select(t > 0)),
    "by place": by_place,
    "by places as a tuple": lambda z, t, y, m: F.l1_loss(z[m.nonzero(as_tuple=True)], t[torch.where(m)[0]]),
    "in order": in_order,
    "of what is selected": nested,
    "not ignored": lambda z, t, y, m: F.nll_loss(z.log_softmax(-1)[y != 1], y[y != 1]),
    "flat": lambda z, t, y, m: F.binary_cross_entropy_with_logits(z[m].flatten(), t[m].view(-1).sigmoid()),
    "flat and back": lambda z, t, y, m: F.mse_loss(z[m].view(-1).view(-1, WIDTH), t[m].reshape(-1, WIDTH)),
    "of two masks": lambda z, t, y, m: F.mse_loss(torch.cat([z[m], z[~m]]), torch.cat([t[m], t[~m]])),
    "some, and all": lambda z, t, y, m: F.cross_entropy(torch.cat([z[m], z * 2]), torch.cat([y[m], y])),
    "along another dim": lambda z, t, y, m: F.mse_loss(z.T[:, m], t.T[:, m]),
    "products": lambda z, t, y, m: (z[m] * t[m]).mean() + torch.einsum("nd,ne->de", z[m], t[m]).square().mean(),
}
NUMBERS: dict[str, Function] = {
    "clamped": lambda z, t, y, m: z[m].sum() / m.sum().clamp(min=1),
    "size": lambda z, t, y, m: z[m].sum() / z[m].shape[0],
    "numel": lambda z, t, y, m: z[m].square().sum() / z[m].numel(),
    "at least one": lambda z, t, y, m: z[m].square().sum() / max(z[m].shape[0], 1),
    "one more": lambda z, t, y, m: z[m].square().sum() * (1 / (z[m].size(0) + 1)),
    "item": lambda z, t, y, m: z[m].square().sum() / m.sum().item(),
    "root": lambda z, t, y, m: z[m].square().sum() / z[m].shape[0] ** 0.5,
    "tensor": lambda z, t, y, m: z[m].square().sum() / torch.tensor(z[m].shape[0]),
    "made of as many": lambda z, t, y, m: F.mse_loss(z[m], z.new_zeros(z[m].shape[0], WIDTH)),
}


def filled(z: Tensor, t: Tensor, y: Tensor, m: Tensor) -> Tensor:
    z = z * 1
    z[m] = t[m] * 2
    z = z.index_fill(0, (~m).nonzero().squeeze(-1), 0.5).index_copy(0, m.nonzero().squeeze(-1), z[m] + 1)
    z[t[:, 0] > 0] = 0.0
    return (z * t).square().mean()


PUT: dict[str, Function] = {
    "filled": filled,
    "index_put": lambda z, t, y, m: torch.index_put(z, (m,), t[m] * z[m]).square().sum(),
    "masked_scatter": lambda z, t, y, m: z.masked_scatter(m[:, None], t[m]).square().sum(),
}
GROUPS = dict(
    elements=ELEMENTS, samples=SAMPLES, statistics=STATISTICS, selections=SELECTIONS, numbers=NUMBERS, put=PUT
)
# What several microbatches can be kept exact of: sums, and means whose count the inputs tell.
SPLIT = {
    name: function
    for group in (ELEMENTS, SAMPLES, SELECTIONS, NUMBERS)
    for name, function in group.items()
    if name not in ("of one number", "products")
}


class Model(nn.Module):
    def __init__(self, functions: dict[str, Function]) -> None:
        super().__init__()
        self.functions = functions
        self.first, self.then = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, m: Tensor) -> dict[str, Tensor]:
        z = self.then(self.first(x))
        each = {name: function(z, t, y, m) for name, function in self.functions.items()}
        return {"loss": sum((i + 1) * v for i, v in enumerate(each.values())), **each}  # type: ignore[dict-item]


def batch(seed: int = 0, *, classes: int = WIDTH) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x, t = (torch.randn(BATCH, WIDTH, generator=made).double() for _ in range(2))
    mask = torch.rand(BATCH, generator=made) > 0.4
    return dict(x=x, t=t, y=torch.arange(BATCH) % classes, m=mask)


def plan_of(functions: dict[str, Function], **split: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Model(functions).double()
    split = {"pp": 1, "dp": 1, "tp": 1, "cp": 1} | split
    ranks = math.prod(split[axis] for axis in ("pp", "dp", "tp", "cp"))
    return model, partition(model, Topology.local(ranks), batch(), constraints=Constraints(**split))  # type: ignore[arg-type]


def check(model: nn.Module, plan: Any, *batches: dict[str, Tensor]) -> None:
    for given_ in batches:
        report = plan.verify(model, given_)
        assert report.ok, str(report)


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_selected_is_what_counts(group: str):
    model, plan = plan_of(GROUPS[group])
    check(model, plan, batch(3))  # another mask than the plan was made with


@pytest.mark.parametrize("split", [dict(dp=2), dict(tp=2), dict(pp=2)], ids=str)
def test_over_ranks(split: dict[str, int]):
    some = [dict(list(group.items())[i % 7 :: 7]) for i, group in enumerate(GROUPS.values(), split.get("tp", 1))]
    model, plan = plan_of({name: function for group in some for name, function in group.items()}, **split)
    check(model, plan, batch(3))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))])
def test_means_are_those_of_the_global_batch(part: int):
    """Ranks and microbatches have different numbers of selected rows; compared with the model itself."""
    model, plan = plan_of(dict(list(SPLIT.items())[part::5]), dp=2, microbatch_size=2)
    inputs = batch(3)
    expected = model(**inputs)
    expected["loss"].backward()
    run = partitioner.run_threads(plan, model, inputs)
    for name, value in expected.items():
        torch.testing.assert_close(run.outputs[name], value.detach(), rtol=1e-10, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.grads[name], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["std", "largest", "log of a sum", "softmax of rows"])
def test_what_needs_all_samples_is_refused_over_microbatches(name: str):
    with pytest.raises(PartitionError, match="combines samples across the batch"):
        plan_of({name: STATISTICS[name]}, dp=2, microbatch_size=2)


def test_a_mask_that_selects_nothing_one_row_or_all():
    model, plan = plan_of({n: SELECTIONS[n] for n in ("masked_select", "some, and all")} | {"mse": ELEMENTS["mse"]})
    inputs = batch()
    for mask in (torch.zeros(BATCH).bool(), torch.arange(BATCH) == 2, torch.ones(BATCH).bool()):
        expected = {name: value.detach() for name, value in model(**inputs | {"m": mask}).items()}
        run = partitioner.run_threads(plan, model, inputs | {"m": mask})
        assert expected["mse"].isnan() == (not mask.any())
        torch.testing.assert_close(run.outputs, expected, equal_nan=True)


def test_what_is_not_selected_may_be_anything():
    """Rows that are left out would be infinite, in value or in gradient, or no class at all."""

    def worst(z: Tensor, t: Tensor, y: Tensor, m: Tensor) -> Tensor:
        hidden = torch.where(m[:, None], t, torch.nan)
        classes = torch.where(m, y, 1000)
        logs = (hidden[m].abs() + 0.1).log() + (1 - z[m].sigmoid()).log() + torch.log1p(-z[m].sigmoid())
        lost = F.cross_entropy(z[m], classes[m]) + F.nll_loss(logs, classes[m]) + F.multi_margin_loss(z[m], classes[m])
        return lost + F.mse_loss((z[m] * 1000 - 3000).clamp(max=1).exp(), hidden[m])

    model, plan = plan_of({"worst": worst})
    check(model, plan, batch(5))


class TestMasksThatAreComputedAlike:
    def test_not_where_what_they_are_computed_from_is_written_to(self):
        def written(z: Tensor, t: Tensor, y: Tensor, m: Tensor) -> Tensor:
            t, first, second = t.clone(), m.clone(), m.clone()
            first[0] = ~first[0]
            before = z[t > 0].sum()
            t.neg_()
            return before + z[t > 0].square().sum() + z[first].sum() + z[second].square().sum()

        model, plan = plan_of({"written": written})
        check(model, plan, batch())

    def test_different_masks_are_not_combined(self):
        with pytest.raises(UnsupportedError, match=r"aten\.mul.*test_selected_losses"):
            plan_of({"two": lambda z, t, y, m: (z[m] * t[t[:, 0] > 0]).sum()})


REFUSED: dict[str, tuple[type[PartitionError], str, Function]] = {
    "all rows": (UnsupportedError, "select them by the same mask", lambda z, t, y, m: (z[m] * t).sum()),
    "all targets": (UnsupportedError, "select them by the same mask", lambda z, t, y, m: F.cross_entropy(z[m], y)),
    "the largest few": (UnsupportedError, r"masked_fill\(", lambda z, t, y, m: z[m].topk(2, 0).values.sum()),
    "in order": (UnsupportedError, r"masked_fill\(", lambda z, t, y, m: z[m].sort(0).values[:2].sum()),
    "the middle": (UnsupportedError, "nanmedian", lambda z, t, y, m: z[m].median()),
    "with each other": (UnsupportedError, r"scores\.masked_fill", lambda z, t, y, m: (z[m] @ t[m].T).sum()),
    "the last": (UnsupportedError, "with a fixed size", lambda z, t, y, m: z[m][-1].sum()),
    "len": (CaptureError, r"rows\.shape\[0\]", lambda z, t, y, m: z[m].sum() / len(z[m])),
    "a number as a size": (CaptureError, "must not depend", lambda z, t, y, m: z[: int(m.sum())].sum()),
    "one_hot": (UnsupportedError, "num_classes=", lambda z, t, y, m: F.one_hot(y).double().mean() * z.sum()),
    "bincount": (UnsupportedError, "minlength=n", lambda z, t, y, m: torch.bincount(y).double().std() * z.sum()),
    "bincount of too many": (
        UnsupportedError,
        "minlength=n",
        lambda z, t, y, m: torch.bincount(y, minlength=3)[:4].double().std() * z.sum(),
    ),
    "a decision": (
        CaptureError,
        "control flow",
        lambda z, t, y, m: z.sum() if F.one_hot(y).shape[1] == WIDTH else z.square().sum(),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_its_line(name: str):
    kind, text, function = REFUSED[name]
    with pytest.raises(kind, match=rf"(?s)test_selected_losses\.py:\d+.*{text}"):
        plan_of({name: function})


# -- classes that are counted ------------------------------------------------------------------------------------------

CLASSES: dict[str, Function] = {
    "the first few": lambda z, t, y, m: (z.mean(0) * torch.bincount(y, minlength=WIDTH)[:WIDTH]).sum(),
    "fewer than there are": lambda z, t, y, m: (z.mean(0)[:2] * torch.bincount(y, minlength=2)[:2]).sum(),
    "weights": lambda z, t, y, m: (z.mean(0) * torch.bincount(y, t[:, 0], minlength=WIDTH)[:WIDTH]).sum(),
    "weights of another type": lambda z, t, y, m: (z.mean(0) * torch.bincount(y, y, WIDTH)[:WIDTH]).sum(),
    "of what is selected": lambda z, t, y, m: (z.mean(0) * torch.bincount(y[m], minlength=WIDTH)[:WIDTH]).sum(),
    "places of the largest": lambda z, t, y, m: (z.mean(0) * torch.bincount(z.argmax(-1), minlength=WIDTH)).sum(),
    "places of the larger": lambda z, t, y, m: (
        z.softmax(-1).mean(0) * torch.bincount(z.topk(2).indices.flatten(), minlength=WIDTH)
    ).sum(),
    "remainders": lambda z, t, y, m: z.square().mean() * torch.bincount(y % 3).double().std(),
    "clamped": lambda z, t, y, m: z.square().mean() * torch.bincount(y.clamp(0, 3), minlength=WIDTH).double().std(),
    "targets": lambda z, t, y, m: F.cross_entropy(z, y) * torch.bincount(y).double().std(),
    "entropy": lambda z, t, y, m: z.square().mean() * (torch.bincount(z.argmax(-1)) / BATCH + 1).log().mean(),
    "one hot of places": lambda z, t, y, m: F.one_hot(z.argmax(-1)).double().mean() * z.square().sum(),
    "rows of a table": lambda z, t, y, m: F.embedding(y, z[:WIDTH]).sum() * F.one_hot(y).double().std(),
    "so many": lambda z, t, y, m: z.square().sum() / F.one_hot(z.argmax(-1)).shape[1],
}
# The model needs the classes to be as many as those that they are compared with.
NEEDED: dict[str, Function] = {
    "terms": lambda z, t, y, m: -(F.one_hot(y) * z.log_softmax(-1)).sum(-1).mean(),
    "a loss": lambda z, t, y, m: F.mse_loss(z.softmax(-1), F.one_hot(y).double()),
    "of what is selected": lambda z, t, y, m: -(F.one_hot(y[m]) * z[m].log_softmax(-1)).sum(-1).mean(),
    "weights of classes": lambda z, t, y, m: F.cross_entropy(z, y, weight=1 / (1.0 + torch.bincount(y, minlength=4))),
    "weights of rows": lambda z, t, y, m: F.cross_entropy(z, y) / (1.0 + torch.bincount(y, minlength=4))[y].sum(),
}


def test_classes_are_as_many_as_the_largest_tells():
    model, plan = plan_of(CLASSES)
    check(model, plan, batch(3, classes=3))


@pytest.mark.parametrize("split", [dict(dp=2), dict(dp=2, microbatch_size=2), dict(tp=2)], ids=str)
def test_classes_over_ranks(split: dict[str, int]):
    some = CLASSES | {f"needed, {name}": function for name, function in NEEDED.items()}
    if "tp" in split:
        some = dict(list(some.items())[::3])
    if "microbatch_size" in split:  # without what the inputs alone do not tell before the first microbatch
        known = ("the first few", "weights", "of what is selected", "clamped", "needed, terms", "needed, a loss")
        some = {name: some[name] for name in known}
    model, plan = plan_of(some, **split)
    check(model, plan, batch(3))


def test_a_negative_variance_is_not_a_number():
    """The model raises an error; a plan, which knows no numbers, makes the loss one that nobody takes for good."""
    model, plan = plan_of({"gaussian": lambda z, t, y, m: F.gaussian_nll_loss(z, t, t)})
    inputs = batch()
    with pytest.raises(ValueError, match="negative"):
        model(**inputs)
    assert partitioner.run_threads(plan, model, inputs).outputs["gaussian"].isnan()
    check(model, plan, inputs | {"t": inputs["t"].abs()})


# -- compositions ------------------------------------------------------------------------------------------------------

MASKS: list[Function] = [
    lambda z, t, y, m: m, lambda z, t, y, m: t[:, 0] > 0, lambda z, t, y, m: (y != 1) & m,
    lambda z, t, y, m: ~m | (y == 2), lambda z, t, y, m: m.view(2, -1).flip(0).flatten(),
]  # fmt: skip
TAKES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda v, m: v[m], lambda v, m: v[m.nonzero().squeeze(-1)], lambda v, m: v[torch.where(m)],
    lambda v, m: v.index_select(0, m.nonzero().flatten()), lambda v, m: torch.cat([v[m], v[~m] * 2]),
    lambda v, m: v[m][torch.arange(BATCH)[m] != 3], lambda v, m: v.masked_select(m[:, None]).view(-1, WIDTH),
    lambda v, m: v.T[:, m].T, lambda v, m: torch.cat([v[m], v * 0.5]),
]  # fmt: skip
CHANGES: list[Callable[[Tensor], Tensor]] = [
    torch.tanh, lambda v: v * 2 - 1, lambda v: v.abs() + 0.1, lambda v: v.softmax(-1), lambda v: F.normalize(v, dim=-1),
    lambda v: (v.abs() + 0.1).log(), lambda v: v / (v.square().sum(-1, keepdim=True) + 1), lambda v: v - v.mean(0),
    lambda v: F.layer_norm(v, (WIDTH,)), lambda v: v.view(-1, 2, 2).transpose(1, 2).reshape(-1, WIDTH),
    lambda v: v.cumsum(-1), lambda v: torch.where(v > 0, v, v.exp() - 1), lambda v: v * v.shape[0],
]  # fmt: skip
ENDS: list[Callable[[Tensor, Tensor], Tensor]] = [
    F.mse_loss, lambda a, b: F.l1_loss(a, b, reduction="sum"), lambda a, b: F.smooth_l1_loss(a.flatten(), b.flatten()),
    lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
    lambda a, b: F.cross_entropy(a, b.softmax(-1)), lambda a, b: F.cross_entropy(a, b.argmax(-1)),
    lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
    lambda a, b: F.cosine_similarity(a, b).mean(), lambda a, b: (a * b).std() + b.mean(),
    lambda a, b: a.amax(0).sum() + b.norm(), lambda a, b: a.logsumexp(0).sum() * b.var(),
    lambda a, b: (a.T @ b).square().mean(), lambda a, b: a.sum() / max(b.shape[0], 1),
    lambda a, b: F.triplet_margin_loss(a, b, a * b), lambda a, b: (a.softmax(0) * b).sum(),
]  # fmt: skip


def check_composition(mask: int, take: int, first: list[int], second: list[int], end: int, **split: int) -> None:
    def composed(z: Tensor, t: Tensor, y: Tensor, m: Tensor) -> Tensor:
        mask_ = MASKS[mask](z, t, y, m)
        a, b = TAKES[take](z, mask_), TAKES[take](t, mask_)
        for change in first:
            a = CHANGES[change](a)
        for change in second:
            b = CHANGES[change](b)
        return ENDS[end](a, b)

    model, plan = plan_of({"composed": composed}, **split)
    check(model, plan, batch(7))


def index(of: list[Any]) -> st.SearchStrategy[int]:
    return st.integers(0, len(of) - 1)


COMPOSED = dict(
    mask=index(MASKS), take=index(TAKES), end=index(ENDS),
    first=st.lists(index(CHANGES), max_size=3), second=st.lists(index(CHANGES), max_size=2),
)  # fmt: skip
NO_DEADLINE = dict(suppress_health_check=list(HealthCheck), print_blob=True)


@settings(max_examples=3, derandomize=True, **NO_DEADLINE)  # type: ignore[arg-type]
@given(**COMPOSED)
def test_compositions(**composed: Any):
    check_composition(**composed)


@pytest.mark.slow
@settings(max_examples=150, **NO_DEADLINE)  # type: ignore[arg-type]
@given(dp=st.integers(1, 2), **COMPOSED)
def test_many_compositions(**composed: Any):
    check_composition(**composed)
