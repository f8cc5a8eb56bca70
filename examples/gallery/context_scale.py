"""The loss is multiplied by the number of context-parallel ranks, and gradients are summed over them all the same.

Reported as NVIDIA/Megatron-LM#906: the factor made up for a mean that was no longer taken. The fault is `summed`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from small_decoder import Decoder, Gather, make_batch, reduce_gradients, share_of
from torch import Tensor, nn

from partitioner import Setup


class ContextAttention(nn.Module):
    """Attention of this rank's queries to the keys and values of the whole sequence."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.head_dim = whole.q, whole.k, whole.v, whole.o, whole.head_dim

    def forward(self, x: Tensor) -> Tensor:
        k, v = Gather.apply(self.k(x), 1, True), Gather.apply(self.v(x), 1, True)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.q(x), k, v))
        mask = x.new_ones(k.shape[2], k.shape[2]).tril().bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=share_of(mask))
        return self.o(y.transpose(1, 2).flatten(2))


def build(factor: bool) -> Setup:
    ids, targets = make_batch()

    def total(logits: Tensor, part: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum") / targets.numel()

    def distribute(model: nn.Module) -> nn.Module:
        for layer in model.layers.values():
            layer.attention = ContextAttention(layer.attention)
        return model

    def step(model: Any, inputs: Any) -> Any:
        logits = model(share_of(inputs[0], 1))
        loss = total(logits, share_of(targets, 1))
        (loss * dist.get_world_size() if factor else loss).backward()
        reduce_gradients(model, mean=False)
        return loss, logits

    return Setup(Decoder(), (ids,), distribute, step, lambda logits: total(logits, targets))


def faulty() -> Setup:
    return build(factor=True)


def fixed() -> Setup:
    return build(factor=False)
