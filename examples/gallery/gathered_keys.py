"""Keys and values are gathered over context-parallel ranks by a collective without a backward.

Reported as modelscope/ms-swift#9516: `all_gather` passes no gradient to the tokens of other ranks, and the rank's own
part that is put back into the list has only the gradient of the rank's own queries. The fault is `wrong-backward`, at
the projections of keys and values; every output is right.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_decoder import Decoder, Gather, make_batch, reduce_gradients, share_of
from torch import Tensor, nn

from partitioner import Setup


def gather_without_backward(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts, 1)


class ContextAttention(nn.Module):
    """Attention of this rank's queries to the keys and values of the whole sequence."""

    def __init__(self, whole: nn.Module, backward: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.head_dim = whole.q, whole.k, whole.v, whole.o, whole.head_dim
        self.backward = backward

    def gather(self, x: Tensor) -> Tensor:
        return Gather.apply(x, 1, True) if self.backward else gather_without_backward(x)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.gather(self.k(x)), self.gather(self.v(x))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.q(x), k, v))
        mask = x.new_ones(k.shape[2], k.shape[2]).tril().bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=share_of(mask))
        return self.o(y.transpose(1, 2).flatten(2))


def build(backward: bool) -> Setup:
    ids, targets = make_batch()

    def total(logits: Tensor, part: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum") / targets.numel()

    def distribute(model: nn.Module) -> nn.Module:
        for layer in model.layers.values():
            layer.attention = ContextAttention(layer.attention, backward)
        return model

    def step(model: Any, inputs: Any) -> Any:
        logits = model(share_of(inputs[0], 1))
        loss = total(logits, share_of(targets, 1))
        loss.backward()
        reduce_gradients(model, mean=False)
        return loss, logits

    return Setup(Decoder(), (ids,), distribute, step, lambda logits: total(logits, targets))


def faulty() -> Setup:
    return build(backward=False)


def fixed() -> Setup:
    return build(backward=True)
