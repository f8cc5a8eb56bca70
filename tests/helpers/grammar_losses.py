"""Losses of random models, with their reductions, weights and ignored targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.grammar_operators import VOCAB, Frame, pick

IGNORED = -100
LOSSES: dict[str, Callable[[Frame, Tensor], Tensor]] = {}


def loss(function: Callable[[Frame, Tensor], Tensor]) -> Callable[[Frame, Tensor], Tensor]:
    LOSSES[function.__name__] = function
    return function


def _rows(f: Frame, h: Tensor) -> Tensor:
    """One row for every sample."""
    count = f.inputs["x"].shape[0]
    if h.shape[0] == count:
        return h.flatten(1)
    return h.mean().expand(count, 1)


def _scores(f: Frame, h: Tensor, classes: int = VOCAB) -> Tensor:
    """Scores of classes for every sample, or for every position where the value has as many as the input."""
    if h.dim() == 3 and h.shape[:2] == f.inputs["ids"].shape and f.b % 2:
        return f.linear(h.shape[-1], classes)(h).flatten(0, 1)
    rows = _rows(f, h)
    return f.linear(rows.shape[1], classes)(rows)


def _labels(f: Frame, scores: Tensor) -> Tensor:
    """Targets, of which some are ignored."""
    y = f.inputs["y"]
    return y.flatten() if scores.shape[0] == y.numel() else y[:, 0]


def _targets(f: Frame, rows: Tensor) -> Tensor:
    return f.inputs["t"][:, :1].expand_as(rows)


def _reduced(f: Frame, each: Tensor) -> Tensor:
    """What was left unreduced, by hand."""
    return pick(
        [
            lambda: each.mean(),
            lambda: each.sum() * 0.1,
            lambda: each.flatten(1).mean(1).sum() if each.dim() > 1 else each.mean(),
        ],
        f.b,
    )()


@loss
def mse(f: Frame, h: Tensor) -> Tensor:
    rows = _rows(f, h)
    kind = pick([F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss], f.a)
    targets = _targets(f, rows)
    if kind is F.soft_margin_loss:
        targets = torch.where(targets > 0, 1.0, -1.0).to(rows.dtype)
    how = pick(["mean", "sum", "none"], f.b)
    made = kind(rows, targets, reduction=how)
    return _reduced(f, made) if how == "none" else made


@loss
def cross_entropy(f: Frame, h: Tensor) -> Tensor:
    scores = _scores(f, h)
    labels = _labels(f, scores)
    return pick(
        [
            lambda: F.cross_entropy(scores, labels, ignore_index=IGNORED),
            lambda: F.cross_entropy(scores, labels, reduction="sum"),
            lambda: F.cross_entropy(scores, labels, label_smoothing=0.1),
            lambda: F.cross_entropy(scores, labels, weight=torch.linspace(0.5, 1.5, VOCAB, dtype=scores.dtype)),
            lambda: _reduced(f, F.cross_entropy(scores, labels, reduction="none")),
            lambda: F.nll_loss(scores.log_softmax(-1), labels),
            lambda: -scores.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None]).mean(),
            lambda: _counted(scores, labels),
            lambda: F.cross_entropy(scores, labels.clamp(min=0), ignore_index=2),
            lambda: F.multi_margin_loss(scores, labels.clamp(min=0)),
            lambda: F.cross_entropy(scores, F.one_hot(labels.clamp(min=0), VOCAB).to(scores.dtype)),
        ],
        f.a,
    )()


def _counted(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over targets that are not ignored, by hand."""
    each = F.cross_entropy(scores, labels, reduction="none", ignore_index=IGNORED)
    return each.sum() / (labels != IGNORED).sum().clamp(min=1)


@loss
def binary(f: Frame, h: Tensor) -> Tensor:
    rows = _rows(f, h)
    targets = (_targets(f, rows) > 0).to(rows.dtype)
    return pick(
        [
            lambda: F.binary_cross_entropy_with_logits(rows, targets),
            lambda: F.binary_cross_entropy(rows.sigmoid(), targets),
            lambda: F.binary_cross_entropy_with_logits(
                rows, targets, pos_weight=torch.tensor(2.0, dtype=rows.dtype), reduction="sum"
            ),
            lambda: _reduced(f, F.binary_cross_entropy_with_logits(rows, targets, reduction="none")),
            lambda: F.hinge_embedding_loss(rows, 2 * targets - 1),
            lambda: F.multilabel_soft_margin_loss(rows, targets),
        ],
        f.a,
    )()


@loss
def divergence(f: Frame, h: Tensor) -> Tensor:
    rows = _rows(f, h)
    theirs = (_targets(f, rows) * torch.arange(rows.shape[1], device=rows.device)).softmax(-1)
    mine = rows.log_softmax(-1)
    return pick(
        [
            lambda: F.kl_div(mine, theirs, reduction="batchmean"),
            lambda: F.kl_div(mine, theirs, reduction="sum"),
            lambda: F.kl_div(mine, theirs.log(), reduction="batchmean", log_target=True),
            lambda: -(mine * theirs).sum(-1).mean(),
            lambda: F.poisson_nll_loss(rows, theirs),
            lambda: F.gaussian_nll_loss(rows, theirs, rows.square() + 0.1),
            lambda: F.cosine_embedding_loss(rows, theirs + 0.1, f.inputs["t"][:, 0].sign()),
            lambda: F.margin_ranking_loss(rows, theirs, _targets(f, rows).sign()),
            lambda: F.triplet_margin_loss(rows, theirs, rows.flip(1) + 0.3),
        ],
        f.a,
    )()


@loss
def plain(f: Frame, h: Tensor) -> Tensor:
    return pick(
        [
            lambda: h.square().mean(),
            lambda: h.square().sum() * 0.1,
            lambda: h.flatten(1).logsumexp(1).mean() if h.dim() > 1 else h.logsumexp(0),
            lambda: (h * h).flatten(1).mean(1).sum() if h.dim() > 1 else h.sum(),
            lambda: h.norm() if h.dim() else h,
            lambda: h.tanh().mean(0).square().sum(),
            lambda: _masked_mean(f, h),
            lambda: h.square().mean().sqrt(),
            lambda: h.square().mean().add(1).log(),
        ],
        f.a,
    )()


def _masked_mean(f: Frame, h: Tensor) -> Tensor:
    rows = _rows(f, h)
    kept = (f.inputs["y"][:, :1] != IGNORED).to(rows.dtype)
    return (rows.square() * kept).sum() / kept.sum().clamp(min=1)


@loss
def contrastive(f: Frame, h: Tensor) -> Tensor:
    """Every sample against all others."""
    rows = F.normalize(_rows(f, h) + 0.1, dim=-1)
    scores = rows @ rows.T / 0.5
    return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))


@loss
def hardest(f: Frame, h: Tensor) -> Tensor:
    """Of the samples' losses the largest, weighted ones, or their order."""
    each = (
        F.cross_entropy(_scores(f, h), f.inputs["y"][:, 0].clamp(min=0), reduction="none")
        if f.b % 2 == 0
        else _rows(f, h).square().mean(1)
    )
    return pick(
        [
            lambda: each.topk(2).values.mean(),
            lambda: (each * f.inputs["t"][:, 0].sigmoid()).sum() / f.inputs["t"][:, 0].sigmoid().sum(),
            lambda: (each * each.detach().softmax(0)).sum(),
            lambda: each.mean() + each.std(),
            lambda: each.max(),
            lambda: torch.stack([e * (i + 1) for i, e in enumerate(each)]).mean(),
            lambda: each.logsumexp(0),
            lambda: (each[1:] - each[:-1]).square().mean(),
            lambda: torch.dot(each, each) / each.numel(),
            lambda: each.median(),
        ],
        f.a,
    )()
