"""A fused projection of queries, keys and values is cut into equal parts, which are no longer whole heads of each.

Reported as NVIDIA-NeMo/Automodel#1324: the first rank gets all queries and some keys. The fault is `fused-cut`: each
rank's part of the projection is right, but ranks have different parts of queries, keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_decoder import DIM, HEADS, ColumnParallel, RowParallel, share_of
from torch import Tensor, nn

from partitioner import Setup


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def build(by_head: bool) -> Setup:
    x, targets = torch.randn(4, 6, DIM), torch.randn(4, 6, DIM)

    def distribute(model: nn.Module) -> nn.Module:
        rows = torch.arange(3 * DIM)
        mine = share_of(rows.view(3, DIM), 1).flatten() if by_head else share_of(rows)
        model.qkv = ColumnParallel(model.qkv, mine)
        model.o = RowParallel(model.o, share_of(torch.arange(DIM)))
        return model

    return Setup(FusedAttention(), (x,), distribute, loss=lambda output: F.mse_loss(output, targets))


def faulty() -> Setup:
    return build(by_head=False)


def fixed() -> Setup:
    return build(by_head=True)
