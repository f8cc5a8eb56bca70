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
