"""A row-parallel layer adds its bias before the sum over the ranks.

Reported as huggingface/text-generation-inference#1036: the bias is added as many times as there are ranks. The fault is
`bias`, at the first such layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_decoder import DIM, ColumnParallel, Decoder, RowParallel, Sum, make_batch, mean_loss, share_of
from torch import Tensor, nn

from partitioner import Setup


class BiasBeforeSum(RowParallel):
    def forward(self, x: Tensor) -> Tensor:
        return Sum.apply(F.linear(x, self.weight, self.bias))


def build(kind: type[RowParallel]) -> Setup:
    ids, targets = make_batch()

    def distribute(model: nn.Module) -> nn.Module:
        hidden = share_of(torch.arange(2 * DIM))
        for layer in model.layers.values():
            layer.mlp.up = ColumnParallel(layer.mlp.up, hidden)
            layer.mlp.down = kind(layer.mlp.down, hidden)
        return model

    return Setup(Decoder(), (ids,), distribute, loss=lambda logits: mean_loss(logits, targets))


def faulty() -> Setup:
    return build(BiasBeforeSum)


def fixed() -> Setup:
    return build(RowParallel)
