"""Operators of random models that define gradients, change buffers, select rows, or depend on Python's own state."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.grammar_operators import Frame, operator, pick, tokens

# --- functions that define their gradient -----------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """The gradient of the opposite sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -0.5 * g


class StraightThrough(torch.autograd.Function):
    """Rounds, and the gradient goes through where the value was small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)


class OwnProduct(torch.autograd.Function):
    """A product with a weight, its gradients written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight.T, x.flatten(0, -2).T @ g.flatten(0, -2)


class OwnSwish(torch.autograd.Function):
    """Swish whose backward computes the sigmoid again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s + x * s * (1 - s))


class Affine(torch.autograd.Function):
    """A gradient with a part that does not depend on the one that comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g + 0.01 * x.sign()


class Injected(torch.autograd.Function):
    """Adds a second value's gradient to the loss's without adding the value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        ctx.save_for_backward(extra)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        (extra,) = ctx.saved_tensors
        return g, torch.full_like(extra, 0.1)


class SignOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.sign() * 0.01


class ClippedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.01, 0.01)


@operator
def own_gradient(f: Frame, h: Tensor) -> Tensor:
    """Functions whose backward is linear in the gradient."""
    n = h.shape[-1]
    return pick(
        [
            lambda: Reversed.apply(h),
            lambda: StraightThrough.apply(h),
            lambda: OwnProduct.apply(h, f.weight(n, n)),
            lambda: OwnSwish.apply(h),
        ],
        f.a,
    )()


@operator
def affine_gradient(f: Frame, h: Tensor) -> Tensor:
    if f.a % 2:
        return Affine.apply(h)
    return Injected.apply(h, f.weight(h.shape[-1]).square().sum())


@operator
def bent_gradient(f: Frame, h: Tensor) -> Tensor:
    """Functions whose backward is not linear."""
    return pick([SignOfGradient, ClippedGradient], f.a).apply(h)


@operator
def gradient_hook(f: Frame, h: Tensor) -> Tensor:
    """A hook of a tensor: forward's own change of a gradient."""
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(lambda g: g * 0.5)
    return h


# --- buffers ----------------------------------------------------------------------------------------------------------


@operator
def counter(f: Frame, h: Tensor) -> Tensor:
    """A buffer that counts calls; read where ``a`` is odd."""
    count = f.buffer(torch.zeros((), dtype=torch.long))
    getattr(f.layer, count).add_(1)
    return h / (1 + 0.1 * getattr(f.layer, count)) if f.a % 2 else h


@operator
def average(f: Frame, h: Tensor) -> Tensor:
    """A moving average of values, read before it is changed, after it, or not at all."""
    name = f.buffer(torch.zeros(h.shape[-1]))
    seen = h.detach().flatten(0, -2).mean(0)
    old = getattr(f.layer, name)
    before = old.clone()
    if f.b % 3 == 0:
        old.mul_(0.9).add_(seen, alpha=0.1)
    elif f.b % 3 == 1:
        old.lerp_(seen, 0.1)
    else:
        setattr(f.layer, name, 0.9 * old + 0.1 * seen)
    return pick([lambda: h, lambda: h - before, lambda: h - getattr(f.layer, name)], f.a)()


@operator
def running_sum(f: Frame, h: Tensor) -> Tensor:
    name = f.buffer(torch.zeros(()))
    getattr(f.layer, name).add_(h.detach().sum())
    return h


@operator
def running_sum_by_feature(f: Frame, h: Tensor) -> Tensor:
    name = f.buffer(torch.zeros(h.shape[-1]))
    old = getattr(f.layer, name)
    old += h.detach().flatten(0, -2).sum(0) if f.a % 2 else (h.detach() > 0).flatten(0, -2).sum(0).to(h.dtype)
    return h


@operator
def running_max(f: Frame, h: Tensor) -> Tensor:
    name = f.buffer(torch.zeros(h.shape[-1]))
    old = getattr(f.layer, name)
    old.copy_(torch.maximum(old, h.detach().flatten(0, -2).amax(0)))
    return h / (1 + getattr(f.layer, name)) if f.a % 2 else h


@operator
def queue(f: Frame, h: Tensor) -> Tensor:
    """The last values, the oldest shifted out."""
    name = f.buffer(torch.ones(3, h.shape[-1]))
    old = getattr(f.layer, name)
    logits = h @ old.clone().T
    old.copy_(torch.cat([h.detach().flatten(0, -2).mean(0, keepdim=True), old[:-1]]))
    return torch.cat([h, logits], -1) if max(h.shape) < 17 else h


@operator
def constant_buffer(f: Frame, h: Tensor) -> Tensor:
    """A buffer that forward only reads."""
    return h * getattr(f.layer, f.buffer(torch.linspace(0.5, 1.5, h.shape[-1])))


# --- selected rows ----------------------------------------------------------------------------------------------------


@operator
def selected(f: Frame, h: Tensor) -> Tensor:
    """Rows that a mask of the value selects; what is made of them is a loss."""
    kept = h.select(-1, 0) > -0.2
    f.losses.append(
        pick(
            [
                lambda: h[kept].square().sum() * 0.1,
                lambda: torch.masked_select(h, h > 0).sum() * 0.1,
                lambda: h[h > -0.1].square().sum() * 0.1,
                lambda: h[kept].square().mean(),
                lambda: h[kept].tanh().abs().mean(),
            ],
            f.a,
        )()
    )
    return h


@operator
def chosen_input_rows(f: Frame, h: Tensor) -> Tensor:
    """Rows that an input selects."""
    h = tokens(h)
    rows = f.inputs["ids"][:, 0] > VOCAB_HALF
    f.losses.append(pick([lambda: h[rows].square().sum() * 0.1, lambda: h[rows].square().mean() * 0.1], f.a)())
    return h


VOCAB_HALF = 3

# --- Python's own state -----------------------------------------------------------------------------------------------


@operator
def python_counter(f: Frame, h: Tensor) -> Tensor:
    f.layer.steps += 1  # type: ignore[operator]
    return h * min(1.0, int(f.layer.steps) / 10)  # type: ignore[arg-type]


@operator
def python_list(f: Frame, h: Tensor) -> Tensor:
    f.layer.seen.append(tuple(h.shape))  # type: ignore[operator,union-attr]
    return h * len(f.layer.seen) if f.a % 2 else h  # type: ignore[arg-type]


@operator
def python_random(f: Frame, h: Tensor) -> Tensor:
    drawn = pick([random.random, np.random.rand], f.a)()
    return h.tanh() if drawn < 0.5 else h


@operator
def python_time(f: Frame, h: Tensor) -> Tensor:
    return h * (1.0 + (time.time() % 100.0) / 100.0)
