"""Norms run on a part of the sequence on each rank, and nobody adds up the gradients of their weights.

Reported as NVIDIA/Megatron-LM#1446: with tensor and sequence parallelism, the gradient of the final norm differs by
rank. The fault is `unsummed`: each rank has the gradient of its own part of the sequence.
"""

from __future__ import annotations

import torch.distributed as dist
from small_decoder import Decoder, Gather, make_batch, mean_loss, share_of
from torch import Tensor, nn

from partitioner import Setup


class SplitNorm(nn.Module):
    """A norm of this rank's part of the sequence, whose results are gathered."""

    def __init__(self, norm: nn.Module, reduce: bool) -> None:
        super().__init__()
        self.norm = norm
        if reduce:
            for parameter in norm.parameters():
                parameter.register_hook(self._reduce)

    @staticmethod
    def _reduce(grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad

    def forward(self, x: Tensor) -> Tensor:
        return Gather.apply(self.norm(Split.apply(x)), 1, False)


class Split(Gather):
    """This rank's part of the sequence; the gradient is gathered."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return share_of(x, 1).contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return Gather.apply(grad, 1, False)


def build(reduce: bool) -> Setup:
    ids, targets = make_batch()

    def distribute(model: nn.Module) -> nn.Module:
        for layer in model.layers.values():
            layer.norm1 = SplitNorm(layer.norm1, reduce)
            layer.norm2 = SplitNorm(layer.norm2, reduce)
        model.norm = SplitNorm(model.norm, reduce)
        return model

    return Setup(Decoder(), (ids,), distribute, loss=lambda logits: mean_loss(logits, targets))


def faulty() -> Setup:
    return build(reduce=False)


def fixed() -> Setup:
    return build(reduce=True)
