"""Operators of random models: samples together, parts of weights, random numbers, other modules, optional inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.grammar_operators import VOCAB, Frame, distinct, fitted, inner_dim, operator, pick, tokens

# --- samples with each other, weights in parts, views -----------------------------------------------------------------


@operator
def samples(f: Frame, h: Tensor) -> Tensor:
    """Samples in another order, in halves, or one of them for all."""
    n = h.shape[0]
    half = n // 2
    return pick(
        [
            lambda: h + h.roll(1, 0),
            lambda: h + h.flip(0),
            lambda: torch.cat([h[half:], h[:half]]),
            lambda: h - h[:1],
            lambda: h * h[-1].tanh(),
            lambda: torch.cat([x * (i + 1) for i, x in enumerate(h.chunk(2, 0))]),
            lambda: torch.cat([h[::2], h[1::2]]),
            lambda: h[torch.arange(n - 1, -1, -1, device=h.device)],
            lambda: distinct(h, 0).sort(0).values,
            lambda: torch.cat([h, h.tanh()]).unflatten(0, (2, n)).mean(0),
            lambda: h.repeat_interleave(2, 0).unflatten(0, (n, 2)).sum(1),
            lambda: torch.stack([h[i] * (1 + 0.1 * i) for i in range(n)]),
            lambda: h * torch.arange(n, device=h.device, dtype=h.dtype).view(-1, *[1] * (h.dim() - 1)) / n,
            lambda: h.softmax(0) * h,
            lambda: h.flatten(0, 1).roll(1, 0).view(h.shape) if h.dim() > 1 else h,
        ],
        f.a,
    )()


@operator
def views(f: Frame, h: Tensor) -> Tensor:
    """What is written to a view is written to the value."""
    h = h * 1.0
    if f.a % 6 == 0:
        h.view(-1).mul_(0.5)
    if f.a % 6 == 1:
        h.transpose(0, -1)[0] += 1.0
    if f.a % 6 == 2:
        h.select(-1, 0).tanh_()
    if f.a % 6 == 3:
        h.narrow(-1, 0, 1).add_(2.0)
    if f.a % 6 == 4:
        made = h.clone()
        made[:, 0] = h[:, -1] * 2
        return made
    if f.a % 6 == 5:
        made = torch.zeros_like(h)
        for i in range(h.shape[-1]):
            made[..., i] = h[..., i] * (i + 1) * 0.3
        return made
    return h


@operator
def weight_parts(f: Frame, h: Tensor) -> Tensor:
    """One parameter of which parts are used: slices, a stack of matrices, a transposed or a flattened one."""
    n = h.shape[-1]
    return pick(
        [
            lambda: h @ f.weight(2, n, n)[0] + h @ f.weight(2, n, n)[1],
            lambda: F.linear(h, f.weight(2 * n, n)[:n]),
            lambda: F.linear(h, *[w.view(n, n) for w in f.weight(2 * n * n).chunk(2)][:1]),
            lambda: h @ f.weight(n, n).T + h @ f.weight(n, n),
            lambda: h @ torch.cat([f.weight(n, 1), f.weight(n, n - 1, suffix="m")], 1),
            lambda: h @ torch.stack([f.weight(n, n), f.weight(n, n, suffix="m")]).mean(0),
            lambda: sum((w * h for w in f.weight(3, n).unbind()), torch.zeros_like(h)),
            lambda: h @ (f.weight(n, 2) @ f.weight(2, n, suffix="m")),
            lambda: h * f.weight(n).softmax(-1) + f.weight(n).flip(0),
            lambda: h @ torch.triu(f.weight(n, n)),
            lambda: F.linear(h, f.weight(n, n).detach()) + f.weight(n),
            lambda: F.linear(h, f.weight(n, n) - f.weight(n, n).mean()),
            lambda: F.linear(h, f.weight(n, n).softmax(0)),
            lambda: F.linear(h, torch.linalg.matrix_exp(f.weight(n, n) * 0.1)),
        ],
        f.a,
    )()


@operator
def parametrized(f: Frame, h: Tensor) -> Tensor:
    """Weights that torch's own parametrizations make."""
    n = h.shape[-1]
    kind: Any = pick([nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm], f.a)
    return f.module(lambda: kind(nn.Linear(n, n)))(h)


@operator
def frequencies(f: Frame, h: Tensor) -> Tensor:
    dim = pick([-1, inner_dim(h, f.b)], f.a)
    spectrum = torch.fft.rfft(h, dim=dim)
    return (
        torch.fft.irfft(spectrum * 0.5, n=h.shape[dim], dim=dim)
        if f.b % 2
        else h + spectrum.abs().mean(dim, keepdim=True)
    )


@operator
def windows(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    if h.shape[1] < 2:
        return h
    return pick(
        [
            lambda: h.unfold(1, 2, 1).mean(-1),
            lambda: F.unfold(h.unsqueeze(1), (2, 1)).transpose(1, 2),
            lambda: h.unfold(1, 2, 2).flatten(2),
        ],
        f.a,
    )()


@operator
def loss_of_layer(f: Frame, h: Tensor) -> Tensor:
    """A head of its own on the targets, halfway."""
    rows = h.flatten(1)
    scores = f.linear(rows.shape[1], VOCAB)(rows)
    f.losses.append(0.3 * F.cross_entropy(scores, f.inputs["y"][:, 0], ignore_index=-100))
    return h


@operator
def inner_gradient(f: Frame, h: Tensor) -> Tensor:
    """A gradient that forward asks for."""
    inside = h.detach().requires_grad_(True)
    with torch.enable_grad():
        energy = (f.linear(h.shape[-1], 1)(inside).tanh()).sum()
    (g,) = torch.autograd.grad(energy, inside, create_graph=f.a % 2 == 0)
    return h - 0.1 * g


@operator
def decided(f: Frame, h: Tensor) -> Tensor:
    """Python decides by what is known before any value is."""
    if h.shape[1] > 2 and f.layer.training and h.requires_grad:
        h = h * 2
    assert h.dim() < 9
    for i, x in enumerate(h.unbind(1)[:2]):
        h = h + (x * 0.1 * i).unsqueeze(1) if h.dim() > 1 else h
    return h


@operator
def order(f: Frame, h: Tensor) -> Tensor:
    """Ranks and histograms of values."""
    h = distinct(h)
    return pick(
        [
            lambda: h + h.argsort(-1).argsort(-1).to(h.dtype) / h.shape[-1],
            lambda: (
                h + torch.bucketize(h.detach(), torch.linspace(-1, 1, 4, device=h.device, dtype=h.dtype)).to(h.dtype)
            ),
            lambda: h + h.kthvalue(1, -1, keepdim=True).values,
            lambda: h + torch.searchsorted(f.weight(4).detach().sort().values, h.detach()).to(h.dtype),
            lambda: h * (h >= h.quantile(0.5, -1, keepdim=True)),
        ],
        f.a,
    )()


# --- what is random ---------------------------------------------------------------------------------------------------


@operator
def dropout(f: Frame, h: Tensor) -> Tensor:
    kind = pick([nn.Dropout, nn.AlphaDropout, nn.Dropout], f.a)
    return f.module(lambda: kind(pick([0.5, 0.2], f.b)))(h)


@operator
def noise(f: Frame, h: Tensor) -> Tensor:
    return pick(
        [
            lambda: h + 0.1 * torch.randn_like(h),
            lambda: h * torch.rand_like(h),
            lambda: h * torch.rand(h.shape[0], *[1] * (h.dim() - 1), device=h.device, dtype=h.dtype),
            lambda: h * torch.bernoulli(torch.full_like(h, 0.5)),
            lambda: h + torch.rand(h.shape[-1], device=h.device, dtype=h.dtype),
            lambda: F.gumbel_softmax(h, tau=1.0),
            lambda: h * h.new_empty(h.shape[0], *[1] * (h.dim() - 1)).bernoulli_(0.7).div_(0.7),
        ],
        f.a,
    )()


# --- modules inside modules -------------------------------------------------------------------------------------------


@operator
def repeated(f: Frame, h: Tensor) -> Tensor:
    """Layers that are alike, each with weights of its own."""
    for index in range(len(f.bodies)):
        h = f.body(h, index)
    return h


@operator
def stacked(f: Frame, h: Tensor) -> Tensor:
    """Layers that are alike and get nothing but the value."""
    for layer in f.bodies:
        h = layer(h)
    return h


@operator
def by_index(f: Frame, h: Tensor) -> Tensor:
    """What differs by layer: a number, a text, what is in a dict, an array, a tensor that is no buffer, a function."""
    layer: Any = f.layer
    return pick(
        [
            lambda: h * (1.0 + 0.1 * layer.index),
            lambda: h.tanh() if layer.index == 2 else h,
            lambda: h.tanh() if layer.kind == "odd" else h,
            lambda: h * layer.settings["scale"],
            lambda: h + layer.settings["sizes"][1],
            lambda: h * float(layer.numbers[2]),
            lambda: h * torch.from_numpy(layer.numbers).to(h.dtype)[-1],
            lambda: h * layer.constant.to(h.dtype),
            lambda: layer.scaled(h),
            lambda: h * layer.constant.item(),
            lambda: h.roll(layer.index, -1),
            lambda: h + f.weight(h.shape[-1]) * layer.index,
        ],
        f.a,
    )()


@operator
def residual(f: Frame, h: Tensor) -> Tensor:
    made = f.body(h)
    return h + fitted(made, h)


@operator
def twice(f: Frame, h: Tensor) -> Tensor:
    """One module called on two values."""
    return f.body(h) + f.body(h.tanh())


@operator
def checkpointed(f: Frame, h: Tensor) -> Tensor:
    made: Tensor = checkpoint(f.body, h, use_reentrant=False)
    return made


@operator
def unused(f: Frame, h: Tensor) -> Tensor:
    weight = f.weight(3)
    if f.a % 2:
        weight.sum()
    return h


@operator
def extra_loss(f: Frame, h: Tensor) -> Tensor:
    f.losses.append(
        pick(
            [
                lambda: h.square().mean() * 0.1,
                lambda: h.abs().sum() * 0.01,
                lambda: (h.mean(0) ** 2).sum() * 0.1,
                lambda: h.flatten(1).logsumexp(1).mean() * 0.1,
            ],
            f.a,
        )()
    )
    return h


@operator
def weight_penalty(f: Frame, h: Tensor) -> Tensor:
    weight = f.weight(h.shape[-1], h.shape[-1])
    f.losses.append(pick([lambda: weight.square().sum() * 0.1, lambda: weight.norm() * 0.1], f.a)())
    return h @ weight


# --- optional inputs --------------------------------------------------------------------------------------------------


@operator
def of_scale(f: Frame, h: Tensor) -> Tensor:
    scale = f.inputs["scale"]
    return pick([lambda: h * scale, lambda: h + scale, lambda: h * (0.5 if scale > 1 else 2.0)], f.a)()


@operator
def of_flag(f: Frame, h: Tensor) -> Tensor:
    return h.tanh() if f.inputs["flag"] else h * 0.5


@operator
def of_mode(f: Frame, h: Tensor) -> Tensor:
    return h - h.mean(-1, keepdim=True) if f.inputs["mode"] == "mean" else h - h.amax(-1, keepdim=True)
