"""Operators of random models without weights of their own: elementwise ones, reductions, and changes of shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.grammar_operators import Frame, distinct, fitted, inner_dim, operator, pick, tokens

# --- elementwise ------------------------------------------------------------------------------------------------------

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh,
    torch.relu,
    F.gelu,
    F.silu,
    torch.sigmoid,
    F.elu,
    F.softplus,
    F.leaky_relu,
    F.hardtanh,
    F.mish,
    F.celu,
    F.logsigmoid,
    F.hardswish,
    F.softsign,
    F.selu,
    F.relu6,
    F.tanhshrink,
    F.softshrink,
)
UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin,
    lambda x: torch.exp(-x.abs()),
    lambda x: torch.sqrt(x * x + 1),
    lambda x: torch.log1p(x.square()),
    torch.abs,
    lambda x: x.clamp(-1, 1) ** 2,
    lambda x: torch.reciprocal(1 + x * x),
    torch.erf,
    torch.atan,
    lambda x: x.clamp(min=-0.5),
    lambda x: x.sign() * x.abs().add(0.1).pow(1.5),
    lambda x: torch.expm1(x.tanh()),
    torch.asinh,
    lambda x: torch.nan_to_num(x),
    lambda x: x.trunc() + x.frac() * 2,
    lambda x: torch.xlogy(x.sigmoid(), x.sigmoid()),
    lambda x: x.sigmoid().logit(eps=1e-3),
    lambda x: -x,
    lambda x: 1 - x,
    lambda x: x / 3,
    lambda x: 2 * x + 1,
    lambda x: torch.remainder(x, 2.5),
    lambda x: 2.0 ** x.tanh(),
    lambda x: 1.0 / (2.0 + x.tanh()),
    lambda x: x.tanh().acos(),
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.sub,
    torch.mul,
    lambda x, y: x / (1 + y * y),
    torch.maximum,
    torch.minimum,
    torch.atan2,
    lambda x, y: torch.lerp(x, y.expand_as(x), 0.3),
    lambda x, y: torch.addcmul(x, x, y, value=0.5),
    torch.hypot,
    lambda x, y: torch.where(x > y, x, y * 0.5),
    lambda x, y: torch.logaddexp(x, y),
    lambda x, y: torch.fmod(x, 1.5) + y,
    lambda x, y: torch.add(x, y, alpha=0.25),
    lambda x, y: x * (x > y) + y * (x <= y),
    lambda x, y: torch.addcdiv(x, x, 1 + y * y),
    lambda x, y: x - y.detach(),
    lambda x, y: y.sub(x),
)


@operator
def activation(f: Frame, h: Tensor) -> Tensor:
    return pick(ACTIVATIONS, f.a)(h)


@operator
def unary(f: Frame, h: Tensor) -> Tensor:
    return pick(UNARY, f.a)(h)


@operator
def binary(f: Frame, h: Tensor) -> Tensor:
    return pick(BINARY, f.a)(h, fitted(f.earlier(), h) + 0.01)


@operator
def gain(f: Frame, h: Tensor) -> Tensor:
    """A parameter of some dims of the value."""
    n = h.shape[-1]
    t = h.shape[-2] if h.dim() > 2 else 1
    weight = pick([lambda: f.weight(n), lambda: f.weight(1), lambda: f.weight(), lambda: f.weight(t, 1)], f.a)()
    return h * weight if f.b % 2 == 0 else h + weight


@operator
def prelu(f: Frame, h: Tensor) -> Tensor:
    return F.prelu(h, f.weight(1))


@operator
def snake(f: Frame, h: Tensor) -> Tensor:
    """An activation with a learned frequency."""
    alpha = f.weight(h.shape[-1]).exp()
    return h + torch.sin(alpha * h) ** 2 / alpha


@operator
def masked(f: Frame, h: Tensor) -> Tensor:
    positive = h > 0.05
    return pick(
        [
            lambda: h.masked_fill(positive, 0.5),
            lambda: torch.where(positive, h, h * h),
            lambda: torch.where(positive, h, 0.25),
            lambda: h * positive,
            lambda: h.masked_fill(~positive & (h < -0.5), -1.0),
            lambda: torch.where(positive.logical_not(), f.weight(h.shape[-1]), h),
        ],
        f.a,
    )()


@operator
def of_mask(f: Frame, h: Tensor) -> Tensor:
    """What forward's optional mask says."""
    mask = f.inputs.get("mask")
    h = tokens(h)
    if mask is None or mask.shape != h.shape[:2]:
        return h
    kept = mask.to(h.dtype).unsqueeze(-1)
    return pick(
        [
            lambda: h * kept,
            lambda: h.masked_fill(~mask.unsqueeze(-1), 0.0),
            lambda: h - (h * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1),
            lambda: torch.where(mask.unsqueeze(-1), h, h.detach()),
        ],
        f.a,
    )()


@operator
def inplace(f: Frame, h: Tensor) -> Tensor:
    h = h * 1.5
    if f.a % 7 == 0:
        return h.add_(1.0)
    if f.a % 7 == 1:
        h[..., 0] = 0.0
    if f.a % 7 == 2:
        h[..., 1:] += h[..., :-1].clone()
    if f.a % 7 == 3:
        h[..., : h.shape[-1] // 2].mul_(0.5)
    if f.a % 7 == 4:
        h.masked_fill_(h > 0.5, 0.5)
    if f.a % 7 == 5:
        h[h > 0.3] = 0.1
    if f.a % 7 == 6:
        F.relu(h, inplace=True)
    return h


@operator
def detached(f: Frame, h: Tensor) -> Tensor:
    if f.a % 3 == 0:
        return h * h.detach()
    if f.a % 3 == 1:
        with torch.no_grad():
            scale = h.std() + 1
        return h / scale
    return h + (h.round() - h).detach()


# --- reductions -------------------------------------------------------------------------------------------------------

REDUCTIONS: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda x, d: x.mean(d, keepdim=True),
    lambda x, d: x.sum(d, keepdim=True) * 0.25,
    lambda x, d: x.amax(d, keepdim=True),
    lambda x, d: x.amin(d, keepdim=True),
    lambda x, d: x.logsumexp(d, keepdim=True),
    lambda x, d: (x + 0.1).norm(dim=d, keepdim=True),
    lambda x, d: x.tanh().prod(d, keepdim=True),
    lambda x, d: distinct(x, d).std(d, keepdim=True),
    lambda x, d: distinct(x, d).var(d, keepdim=True, correction=0),
    lambda x, d: x.square().mean(d, keepdim=True),
    lambda x, d: (x > 0).to(x.dtype).mean(d, keepdim=True),
    lambda x, d: (x > 0).any(d, keepdim=True).to(x.dtype),
    lambda x, d: (x > 0).sum(d, keepdim=True) / 4,
    lambda x, d: torch.linalg.vector_norm(x + 0.1, 1, d, keepdim=True),
    lambda x, d: distinct(x, d).median(d, keepdim=True).values,
    lambda x, d: torch.var_mean(distinct(x, d), d, keepdim=True)[0],
    lambda x, d: x.nanmean(d, keepdim=True),
    lambda x, d: x.count_nonzero(d).unsqueeze(d).to(x.dtype),
    lambda x, d: distinct(x, d).max(d, keepdim=True).values,
)


@operator
def reduce(f: Frame, h: Tensor) -> Tensor:
    """A reduction over a dim of one sample, and the value beside it."""
    made = pick(REDUCTIONS, f.a)(h, inner_dim(h, f.b))
    return h - made if f.b % 3 else h * made


@operator
def reduce_samples(f: Frame, h: Tensor) -> Tensor:
    """A reduction over all samples."""
    return h - pick(REDUCTIONS, f.a)(h, 0)


@operator
def reduce_all(f: Frame, h: Tensor) -> Tensor:
    return pick(
        [
            lambda: h - h.mean(),
            lambda: h / (1 + h.square().sum().sqrt()),
            lambda: h + h.std(),
            lambda: h - h.max(),
            lambda: h / (1 + h.abs().amax()),
            lambda: h * (h.sum() * 0.1).tanh(),
            lambda: h - h.flatten().logsumexp(0),
        ],
        f.a,
    )()


@operator
def drop_dim(f: Frame, h: Tensor) -> Tensor:
    """One dim less."""
    if h.dim() < 3:
        return h
    return pick(
        [lambda: h.mean(1), lambda: h.sum(1), lambda: h.amax(1), lambda: h[:, -1], lambda: h.logsumexp(1)], f.a
    )()


@operator
def softmax(f: Frame, h: Tensor) -> Tensor:
    dim = pick([-1, inner_dim(h, f.b), 0], f.a)
    return pick([torch.softmax, torch.log_softmax, lambda x, d: F.softmin(x, d)], f.b)(h, dim)


@operator
def cumulative(f: Frame, h: Tensor) -> Tensor:
    dim = inner_dim(h, f.b)
    return pick(
        [
            lambda: h.cumsum(dim) * 0.5,
            lambda: h.tanh().cumprod(dim),
            lambda: h.logcumsumexp(dim),
            lambda: distinct(h, dim).cummax(dim).values,
            lambda: h.cumsum(0) * 0.5,
            lambda: h.flip(dim).cumsum(dim).flip(dim),
            lambda: torch.diff(h, dim=dim, prepend=h.narrow(dim, 0, 1)),
        ],
        f.a,
    )()


# --- shapes -----------------------------------------------------------------------------------------------------------


@operator
def cat(f: Frame, h: Tensor) -> Tensor:
    other = fitted(f.earlier(), h).expand_as(h)
    dim = pick([-1, inner_dim(h, f.a)], f.a)
    return torch.cat([h, other.tanh()], dim) if max(h.shape) < 17 else h


@operator
def stack(f: Frame, h: Tensor) -> Tensor:
    other = fitted(f.earlier(), h).expand_as(h)
    dim = pick([1, -1, 0], f.a)
    both = torch.stack([h, other], dim)
    return both.mean(dim) if f.a % 2 else both.softmax(dim).unbind(dim)[0] * both.sum(dim)


@operator
def split(f: Frame, h: Tensor) -> Tensor:
    n = h.shape[-1]
    if n < 2:
        return h
    if f.a % 4 == 0 and n % 2 == 0:
        return F.glu(h, -1)
    if f.a % 4 == 1:
        first, last = h.chunk(2, -1) if n % 2 == 0 else (h, h)
        return first * torch.sigmoid(last)
    if f.a % 4 == 2:
        first, last = h.split([1, n - 1], -1)
        return torch.cat([last, first], -1)
    return torch.cat([x * (i + 1) for i, x in enumerate(h.split(1, inner_dim(h, f.b)))], inner_dim(h, f.b))


@operator
def reshape(f: Frame, h: Tensor) -> Tensor:
    if f.a % 5 == 0:
        return h.flatten(1)
    if f.a % 5 == 1:
        return h.unflatten(-1, (2, -1)) if h.shape[-1] % 2 == 0 and h.dim() < 4 else h
    if f.a % 5 == 2:
        return tokens(h).reshape(h.shape[0], -1, 2) if h[0].numel() % 2 == 0 else h
    if f.a % 5 == 3:
        return h.reshape(-1, h.shape[-1]).tanh().view(h.shape)
    return h.unsqueeze(1) if h.dim() < 4 else h.flatten(1, 2)


@operator
def transpose(f: Frame, h: Tensor) -> Tensor:
    if h.dim() < 3:
        return h
    return pick([lambda: h.transpose(1, 2), lambda: h.movedim(-1, 1), lambda: h.swapaxes(-1, -2).contiguous()], f.a)()


@operator
def samples_aside(f: Frame, h: Tensor) -> Tensor:
    """Work with the samples in the second place, as sequence-first code has it."""
    if h.dim() < 3:
        return h
    h = h.transpose(0, 1)
    h = f.linear(h.shape[-1], h.shape[-1])(h) if f.a % 2 else h.softmax(0)
    return h.transpose(0, 1)


@operator
def expand(f: Frame, h: Tensor) -> Tensor:
    if f.a % 4 == 0:
        return (h.unsqueeze(1).expand(-1, 2, *h.shape[1:]) * f.weight(2, *[1] * (h.dim() - 1))).sum(1)
    if f.a % 4 == 1 and max(h.shape) < 17:
        return h.repeat(1, *[1] * (h.dim() - 2), 2)
    if f.a % 4 == 2 and max(h.shape) < 17:
        return h.repeat_interleave(2, dim=-1)
    return h.mean(-1, keepdim=True).expand_as(h) + f.weight(1).expand(h.shape[-1])


@operator
def slices(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    return pick(
        [
            lambda: h[:, ::2],
            lambda: h[:, -1:],
            lambda: h[..., : max(1, h.shape[-1] // 2)],
            lambda: h.narrow(1, 0, 1) + h,
            lambda: h.select(1, 0).unsqueeze(1) * h,
            lambda: torch.cat([h[:, 1:], h[:, :1]], 1),
            lambda: h[:, 1:] - h[:, :-1] if h.shape[1] > 1 else h,
        ],
        f.a,
    )()


@operator
def pool(f: Frame, h: Tensor) -> Tensor:
    h = distinct(distinct(tokens(h)), 1).transpose(1, 2)
    if h.shape[2] < 2:
        return h.transpose(1, 2)
    made = pick(
        [
            lambda: F.avg_pool1d(h, 2),
            lambda: F.max_pool1d(h, 2),
            lambda: F.adaptive_avg_pool1d(h, 2),
            lambda: F.avg_pool1d(h, 3, stride=1, padding=1),
            lambda: F.max_pool1d(h, 3, stride=1, padding=1),
            lambda: F.adaptive_max_pool1d(h, 1),
            lambda: F.avg_pool2d(h.unsqueeze(1), 2, ceil_mode=True).squeeze(1),
            lambda: F.lp_pool1d(h + 3, 2, 2),
        ],
        f.a,
    )()
    return made.transpose(1, 2)


@operator
def pad(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    if h.shape[2] < 2 or max(h.shape) > 16:
        return h
    mode = pick(["constant", "reflect", "replicate", "circular"], f.a)
    return F.pad(h, (1, 1), mode=mode, **({"value": 0.5} if mode == "constant" else {}))


@operator
def roll(f: Frame, h: Tensor) -> Tensor:
    dim = inner_dim(h, f.b)
    return pick([lambda: h.roll(1, dim), lambda: h.flip(dim), lambda: h.roll(-1, dim) + h.flip(-1)], f.a)()


@operator
def interpolate(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h).transpose(1, 2)
    if max(h.shape) > 16:
        return h.transpose(1, 2)
    return F.interpolate(h, scale_factor=2, mode=pick(["nearest", "linear"], f.a)).transpose(1, 2)


@operator
def triangle(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    return pick(
        [lambda: h.tril(), lambda: h.triu(1) + h, lambda: h + h.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]], f.a
    )()


@operator
def distances(f: Frame, h: Tensor) -> Tensor:
    h = distinct(tokens(h), 1)
    return pick(
        [
            lambda: h + F.cosine_similarity(h, f.weight(h.shape[-1]) + 0.1, -1).unsqueeze(-1),
            lambda: (h.unsqueeze(1) - h.unsqueeze(2)).square().sum(-1),
            lambda: h + torch.cdist(h, f.weight(3, h.shape[-1]).expand(h.shape[0], -1, -1)).mean(-1, keepdim=True),
            lambda: F.normalize(h, dim=-1) @ F.normalize(h, dim=-1).transpose(1, 2),
        ],
        f.a,
    )()


@operator
def compare_samples(f: Frame, h: Tensor) -> Tensor:
    """Every sample with all others."""
    rows = h.flatten(1)
    scores = rows @ rows.T / rows.shape[1]
    return pick(
        [lambda: h * scores.mean(1).view(-1, *[1] * (h.dim() - 1)), lambda: scores, lambda: scores.softmax(-1) @ rows],
        f.a,
    )()
