"""All query heads share one key and value head, which every rank holds, and its gradient is not added up.

Reported as bigcode-project/Megatron-LM#37: multi-query attention under tensor parallelism trains to a worse loss. The
fault is `unsummed` at the projections of keys and values.
"""

from __future__ import annotations

import torch
from small_decoder import DIM, ColumnParallel, Copy, Decoder, RowParallel, make_batch, mean_loss, share_of
from torch import Tensor, nn

from partitioner import Setup


class SharedHead(nn.Module):
    """The projection of keys or values, whole on every rank. ``reduce``: add up the gradient of its result."""

    def __init__(self, layer: nn.Linear, reduce: bool) -> None:
        super().__init__()
        self.layer, self.reduce = layer, reduce

    def forward(self, x: Tensor) -> Tensor:
        return Copy.apply(self.layer(x)) if self.reduce else self.layer(Copy.apply(x))


def build(reduce: bool) -> Setup:
    ids, targets = make_batch()

    def distribute(model: nn.Module) -> nn.Module:
        heads = share_of(torch.arange(DIM))
        for layer in model.layers.values():
            attention = layer.attention
            attention.q = ColumnParallel(attention.q, heads)
            attention.k, attention.v = SharedHead(attention.k, reduce), SharedHead(attention.v, reduce)
            attention.o = RowParallel(attention.o, heads)
        return model

    return Setup(Decoder(kv_heads=1), (ids,), distribute, loss=lambda logits: mean_loss(logits, targets))


def faulty() -> Setup:
    return build(reduce=False)


def fixed() -> Setup:
    return build(reduce=True)
