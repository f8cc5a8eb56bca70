"""The operators of random models: each takes the value so far and gives the next.

An operator is a function of a :class:`Frame` and of the value ``h``, whose shape it adapts to: samples are mostly dim
0. ``a`` and ``b`` of the frame choose among variants. Values stay small, and are distinct where an order decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB = 8
Operator = Callable[["Frame", Tensor], Tensor]
OPERATORS: dict[str, Operator] = {}
OF_INPUTS = frozenset(  # operators that read forward's inputs or add to its loss
    "tied embedding one_hot embedding_bag index scatter attention of_mask of_scale of_flag of_mode extra_loss "
    "weight_penalty loss_of_layer selected chosen_input_rows".split()
)


@dataclass
class Frame:
    """What an operator may use: the module that it belongs to, its numbers, earlier values, inputs, added losses."""

    layer: nn.Module
    key: str
    a: int
    b: int
    values: Sequence[Tensor]
    inputs: dict[str, Any]
    losses: list[Tensor]
    bodies: Sequence[nn.Module] = field(default_factory=list)

    def module(self, make: Callable[[], nn.Module], suffix: str = "") -> Any:
        """A submodule, made when it is first asked for."""
        name = self.key + suffix
        if name not in self.layer._modules:
            self.layer.add_module(name, make())
        return getattr(self.layer, name)

    def weight(self, *shape: int, suffix: str = "w") -> Any:
        name = f"{self.key}_{suffix}"
        if name not in self.layer._parameters:
            fan_in = shape[-1] if shape else 1
            self.layer.register_parameter(name, nn.Parameter(torch.randn(shape) / math.sqrt(fan_in)))
        return getattr(self.layer, name)

    def buffer(self, value: Tensor, suffix: str = "buffer") -> str:
        """The name of a buffer, which begins as ``value``."""
        name = f"{self.key}_{suffix}"
        if name not in self.layer._buffers:
            self.layer.register_buffer(name, value.detach().clone())
        return name

    def linear(self, inner: int, outer: int, bias: bool = True, suffix: str = "") -> Any:
        return self.module(lambda: nn.Linear(inner, outer, bias=bias), suffix)

    def earlier(self) -> Tensor:
        return self.values[self.b % len(self.values)]

    def body(self, h: Tensor, index: int = 0) -> Tensor:
        if not self.bodies:
            return h
        made: Tensor = self.bodies[index](h, self.inputs, self.losses)
        return made


def operator(function: Operator) -> Operator:
    OPERATORS[function.__name__.rstrip("_")] = function
    return function


def pick(options: Sequence[Any], number: int) -> Any:
    return options[number % len(options)]


def fitted(x: Tensor, like: Tensor) -> Tensor:
    """``x``, or a mean of it, in a shape that goes with ``like``'s."""
    if x.dim() <= like.dim() and all(n in (1, m) for n, m in zip(x.shape[::-1], like.shape[::-1], strict=False)):
        return x
    if x.dim() > 1 and x.shape[0] == like.shape[0] and like.dim() > 1:
        return x.flatten(1).mean(1).view(-1, *[1] * (like.dim() - 1))
    return x.mean()


def distinct(h: Tensor, dim: int = -1) -> Tensor:
    """``h`` with something added, so that no two elements along ``dim`` are equal."""
    n = h.shape[dim]
    steps = torch.arange(n, device=h.device, dtype=h.dtype) * 0.0137
    return h + steps.view([n if d == dim % h.dim() else 1 for d in range(h.dim())])


def tokens(h: Tensor) -> Tensor:
    """``h`` as samples, positions, features."""
    if h.dim() == 1:
        return h.view(-1, 1, 1)
    if h.dim() == 2:
        return h.unsqueeze(1)
    return h if h.dim() == 3 else h.flatten(1, -2)


def inner_dim(h: Tensor, number: int) -> int:
    """One of the dims but that of samples."""
    return 1 + number % (h.dim() - 1) if h.dim() > 1 else 0


# --- products ---------------------------------------------------------------------------------------------------------


@operator
def linear(f: Frame, h: Tensor) -> Tensor:
    n = h.shape[-1]
    return f.linear(n, pick([n, 2 * n, 4, 8], f.a), f.b % 2 == 0)(h)


@operator
def mlp(f: Frame, h: Tensor) -> Tensor:
    n = h.shape[-1]
    return h + f.linear(2 * n, n, suffix="down")(torch.relu(f.linear(n, 2 * n, suffix="up")(h)))


@operator
def gated(f: Frame, h: Tensor) -> Tensor:
    n = h.shape[-1]
    up, gate = f.linear(n, 2 * n, False, "up")(h), f.linear(n, 2 * n, False, "gate")(h)
    return f.linear(2 * n, n, False, "down")(F.silu(gate) * up)


@operator
def frozen_linear(f: Frame, h: Tensor) -> Tensor:
    layer = f.linear(h.shape[-1], h.shape[-1])
    layer.weight.requires_grad_(False)
    if f.a % 2:
        layer.bias.requires_grad_(False)
    return layer(h)


@operator
def shared_linear(f: Frame, h: Tensor) -> Tensor:
    layer = f.linear(h.shape[-1], h.shape[-1])
    return layer(torch.tanh(layer(h)))


@operator
def tied(f: Frame, h: Tensor) -> Tensor:
    n = h.shape[-1]
    table = f.module(lambda: nn.Embedding(VOCAB, n))
    h = h + fitted(table(f.inputs["ids"]), h)
    return F.linear(h, table.weight)


@operator
def conv1d(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h).transpose(1, 2)
    n = h.shape[1]
    groups = pick([1, n, 1], f.a)
    conv = f.module(lambda: nn.Conv1d(n, n, 3, padding=1, stride=1 + f.b % 2, groups=groups))
    return conv(h).transpose(1, 2)


@operator
def conv2d(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h).unsqueeze(1)
    conv = f.module(lambda: nn.Conv2d(1, 2, 3, padding=1))
    return conv(h).flatten(1, 2) if f.a % 2 else conv(h).mean(1)


@operator
def matmul(f: Frame, h: Tensor) -> Tensor:
    n = h.shape[-1]
    return pick(
        [
            lambda: h @ f.weight(n, n),
            lambda: torch.matmul(tokens(h), tokens(h).transpose(1, 2)) / n,
            lambda: torch.bmm(tokens(h).transpose(1, 2), tokens(h)) / n,
            lambda: torch.einsum("...i,oi->...o", h, f.weight(n, n)),
            lambda: torch.einsum("bsi,bti->bst", tokens(h), tokens(h)) / n,
            lambda: torch.einsum("bsd,hde->bshe", tokens(h), f.weight(2, n, 4)).flatten(2),
            lambda: torch.addmm(f.weight(n), h.reshape(-1, n), f.weight(n, n, suffix="m")).view(h.shape),
            lambda: tokens(h) @ torch.softmax(tokens(h).transpose(1, 2), -1) @ tokens(h),
        ],
        f.a,
    )()


@operator
def bilinear(f: Frame, h: Tensor) -> Tensor:
    n = h.shape[-1]
    return f.module(lambda: nn.Bilinear(n, n, n))(h, torch.tanh(h))


@operator
def low_rank(f: Frame, h: Tensor) -> Tensor:
    """A frozen layer with an adapter."""
    n = h.shape[-1]
    whole = f.linear(n, n, suffix="whole")
    whole.requires_grad_(False)
    return whole(h) + f.linear(2, n, False, "up")(f.linear(n, 2, False, "down")(h)) * 0.5


# --- embeddings and what indexes --------------------------------------------------------------------------------------


@operator
def embedding(f: Frame, h: Tensor) -> Tensor:
    table = f.module(lambda: nn.Embedding(VOCAB, h.shape[-1], padding_idx=pick([None, 0], f.a)))
    return h + fitted(table(f.inputs["ids"]), h)


@operator
def positions(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    table = f.module(lambda: nn.Embedding(h.shape[1], h.shape[2]))
    return h + table(torch.arange(h.shape[1], device=h.device))


@operator
def one_hot(f: Frame, h: Tensor) -> Tensor:
    hot = F.one_hot(f.inputs["ids"], VOCAB).to(h.dtype)
    return h + fitted(hot @ f.weight(VOCAB, h.shape[-1]), h)


@operator
def embedding_bag(f: Frame, h: Tensor) -> Tensor:
    bag = f.module(lambda: nn.EmbeddingBag(VOCAB, h.shape[-1], mode=pick(["mean", "sum"], f.a)))
    return h + fitted(bag(f.inputs["ids"]).unsqueeze(1), tokens(h))


@operator
def gather(f: Frame, h: Tensor) -> Tensor:
    dim = -1 if f.a % 2 == 0 else inner_dim(h, f.b)
    return torch.gather(h, dim, distinct(h, dim).argsort(dim))


@operator
def index(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    n = h.shape[1]
    turned = torch.tensor([*range(1, n), 0], device=h.device)
    rows = torch.arange(h.shape[0], device=h.device)
    picked = f.inputs["ids"][:, 0] % n
    return pick(
        [
            lambda: h[:, turned],
            lambda: h.index_select(1, turned),
            lambda: h[rows, picked].unsqueeze(1),
            lambda: h[:, [0, -1]],
            lambda: torch.take_along_dim(h, picked[:, None, None], 1),
            lambda: h[rows[:, None], f.inputs["ids"] % n],
            lambda: h.flatten(0, 1)[turned].mean(0) + h,
        ],
        f.a,
    )()


@operator
def scatter(f: Frame, h: Tensor) -> Tensor:
    n = h.shape[-1]
    order = distinct(h).argsort(-1)
    ids = (order * 3) % n
    rows = tokens(h)
    n_rows = rows.shape[1]
    turned = torch.tensor([*range(1, n_rows), 0], device=h.device)
    return pick(
        [
            lambda: h.scatter(-1, order, h.tanh()),
            lambda: torch.zeros_like(h).scatter_add(-1, ids, h),
            lambda: rows.index_add(1, turned, rows.tanh()),
            lambda: rows.index_copy(1, turned, rows.sin()),
            lambda: torch.zeros_like(h).scatter(-1, order[..., :1], 1.0) * h,
            lambda: h.scatter_reduce(-1, ids, h, "mean"),
            lambda: (
                rows.new_zeros(VOCAB, rows.shape[2]).index_add(0, f.inputs["ids"].flatten(), spread(f, rows))
                + rows.mean()
            ),
        ],
        f.a,
    )()


def spread(f: Frame, rows: Tensor) -> Tensor:
    """A row for each of the input's ids."""
    ids = f.inputs["ids"]
    return rows.mean(1, keepdim=True).expand(-1, ids.shape[1], -1).reshape(ids.numel(), -1)


@operator
def sort(f: Frame, h: Tensor) -> Tensor:
    dim = inner_dim(h, f.a)
    return torch.sort(distinct(h, dim), dim, descending=f.b % 2 == 1).values


@operator
def topk(f: Frame, h: Tensor) -> Tensor:
    n = h.shape[-1]
    found = torch.topk(distinct(h), max(1, n // 2), -1)
    if f.a % 3 == 0:
        return found.values
    if f.a % 3 == 1:
        return torch.zeros_like(h).scatter(-1, found.indices, found.values)
    return h * torch.zeros_like(h).scatter(-1, found.indices, 1.0)


@operator
def largest(f: Frame, h: Tensor) -> Tensor:
    h = distinct(h)
    if f.a % 3 == 0:
        return h + h.max(-1, keepdim=True).values
    if f.a % 3 == 1:
        return h + h.argmax(-1, keepdim=True).to(h.dtype) / h.shape[-1]
    chosen = f.module(lambda: nn.Embedding(h.shape[-1], h.shape[-1]))(h.argmax(-1))
    return h + chosen


# --- norms ------------------------------------------------------------------------------------------------------------


@operator
def layer_norm(f: Frame, h: Tensor) -> Tensor:
    return f.module(lambda: nn.LayerNorm(h.shape[-1], elementwise_affine=f.a % 3 != 2))(h)


@operator
def rms_norm(f: Frame, h: Tensor) -> Tensor:
    if f.a % 2:
        return f.module(lambda: nn.RMSNorm(h.shape[-1]))(h)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3) * f.weight(h.shape[-1])


@operator
def group_norm(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h).transpose(1, 2)
    n = h.shape[1]
    norm = f.module(lambda: nn.GroupNorm(2 if n % 2 == 0 and n * h.shape[2] > 2 else 1, n))
    return norm(h).transpose(1, 2)


@operator
def batch_norm(f: Frame, h: Tensor) -> Tensor:
    momentum = pick([0.1, 0.1, None], f.a)
    if h.dim() == 2:
        return f.module(lambda: nn.BatchNorm1d(h.shape[1], momentum=momentum))(h)
    h = tokens(h).transpose(1, 2)
    norm = f.module(lambda: nn.BatchNorm1d(h.shape[1], affine=f.b % 2 == 0, track_running_stats=f.b % 3 != 2))
    return norm(h).transpose(1, 2)


@operator
def instance_norm(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    return F.instance_norm(h) if h.shape[2] > 1 else h


@operator
def normalize(f: Frame, h: Tensor) -> Tensor:
    return F.normalize(h + 0.1, dim=inner_dim(h, f.a), p=pick([2.0, 1.0], f.b))


@operator
def weight_norm(f: Frame, h: Tensor) -> Tensor:
    n = h.shape[-1]
    v, g = f.weight(n, n, suffix="v"), f.weight(n, 1, suffix="g")
    return F.linear(h, g * v / v.norm(dim=1, keepdim=True))


# --- attention and recurrence -----------------------------------------------------------------------------------------


@operator
def attention(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    b, s, n = h.shape
    heads = 2 if n % 2 == 0 else 1
    q, k, v = (f.linear(n, n, suffix=x)(h).view(b, s, heads, -1).transpose(1, 2) for x in "qkv")
    mask = f.inputs.get("mask") if f.b % 2 else None
    if mask is not None and mask.shape == (b, s):
        keep = mask[:, None, None, :] | torch.eye(s, dtype=torch.bool, device=h.device)
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    else:
        made = F.scaled_dot_product_attention(q, k, v, is_causal=f.a % 2 == 1)
    return h + f.linear(n, n, suffix="o")(made.transpose(1, 2).reshape(b, s, n))


@operator
def written_attention(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    n = h.shape[-1]
    q, k, v = f.linear(n, 3 * n)(h).chunk(3, -1)
    scores = q @ k.transpose(1, 2) / math.sqrt(n)
    if f.a % 3 == 1:
        above = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    if f.a % 3 == 2:
        scores = scores + torch.linspace(0, 1, h.shape[1], device=h.device, dtype=h.dtype)
    return scores.softmax(-1) @ v


@operator
def multihead(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    n = h.shape[-1]
    attend = f.module(lambda: nn.MultiheadAttention(n, 2 if n % 2 == 0 else 1, batch_first=True))
    made, weights = attend(h, h, h, need_weights=f.a % 2 == 1)
    return h + made if weights is None else h + made * weights.mean()


@operator
def encoder_layer(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    n = h.shape[-1]
    return f.module(
        lambda: nn.TransformerEncoderLayer(
            n, 2 if n % 2 == 0 else 1, 2 * n, dropout=0.0, batch_first=True, norm_first=f.a % 2 == 1
        )
    )(h)


@operator
def cell_loop(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    n = h.shape[-1]
    kind = pick([nn.GRUCell, nn.RNNCell, nn.LSTMCell], f.a)
    cell = f.module(lambda: kind(n, n))
    state: Any = h.new_zeros(h.shape[0], n)
    state = (state, state) if kind is nn.LSTMCell else state
    made = []
    for x in h.unbind(1):
        state = cell(x, state)
        made.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(made, 1) if f.b % 2 == 0 else made[-1]


@operator
def recurrent(f: Frame, h: Tensor) -> Tensor:
    h = tokens(h)
    n = h.shape[-1]
    kind = pick([nn.GRU, nn.LSTM, nn.RNN], f.a)
    made, _ = f.module(lambda: kind(n, n, batch_first=True, bidirectional=f.b % 2 == 1))(h)
    return made


@operator
def written_loop(f: Frame, h: Tensor) -> Tensor:
    """A scan with a decay, written as a loop over positions."""
    h = tokens(h)
    decay = torch.sigmoid(f.weight(h.shape[-1]))
    state, made = torch.zeros_like(h[:, 0]), []
    for t in range(h.shape[1]):
        state = decay * state + (1 - decay) * h[:, t]
        made.append(state)
    return torch.stack(made, dim=1)


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
