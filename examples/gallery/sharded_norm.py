"""A norm over the queries of all heads is computed on each rank over its own heads.

Reported as EleutherAI/gpt-neox#1424: under tensor parallelism, each rank normalises by the heads that it has, and the
sum of squares over all heads is needed. The fault is `wrong-module`, at the first such norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_decoder import (
    DIM,
    Attention,
    ColumnParallel,
    Copy,
    Decoder,
    RowParallel,
    Sum,
    make_batch,
    mean_loss,
    share_of,
)
from torch import Tensor, nn

from partitioner import Setup

EPSILON = 1e-6


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


class ShardedNorm(nn.Module):
    """A norm of columns that lie on several ranks. ``reduce``: whether squares are summed over the ranks."""

    def __init__(self, whole: nn.Module, columns: Tensor, reduce: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach()[columns].clone())
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        if self.reduce:
            mean = Copy.apply(Sum.apply(mean)) * x.shape[-1] / DIM
        return self.weight * x * torch.rsqrt(mean + EPSILON)


class NormedAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = Norm(), Norm()

    def forward(self, x: Tensor) -> Tensor:
        made = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in made)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


def build(reduce: bool) -> Setup:
    ids, targets = make_batch()
    model = Decoder()
    for layer in model.layers.values():
        layer.attention = NormedAttention()

    def distribute(model: nn.Module) -> nn.Module:
        mine = share_of(torch.arange(DIM))
        for layer in model.layers.values():
            whole = layer.attention
            whole.q, whole.k, whole.v = (ColumnParallel(y, mine) for y in (whole.q, whole.k, whole.v))
            whole.q_norm, whole.k_norm = (ShardedNorm(y, mine, reduce) for y in (whole.q_norm, whole.k_norm))
            whole.o = RowParallel(whole.o, mine)
        return model

    return Setup(model, (ids,), distribute, loss=lambda logits: mean_loss(logits, targets))


def faulty() -> Setup:
    return build(reduce=False)


def fixed() -> Setup:
    return build(reduce=True)
