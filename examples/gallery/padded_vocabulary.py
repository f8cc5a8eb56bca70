"""The head is padded to a multiple of the ranks, and the padding takes part in the softmax.

Reported as NVIDIA-BioNeMo/bionemo-recipes#631: the loss of two ranks is larger than that of one by a nearly constant
amount. The fault is `padding`.
"""

from __future__ import annotations

from typing import Any

import torch
from small_decoder import DIM, VOCABULARY, ColumnParallel, Decoder, Gather, make_batch, mean_loss, share_of
from torch import Tensor, nn

from partitioner import Setup

PADDED = VOCABULARY + 8


class PaddedHead(nn.Module):
    """The rows of the padded head on this rank; the logits are gathered. ``keep``: columns that are returned."""

    def __init__(self, head: nn.Linear, keep: int) -> None:
        super().__init__()
        padded = nn.Linear(DIM, PADDED, bias=False)
        with torch.no_grad():
            padded.weight.zero_()
            padded.weight[:VOCABULARY] = head.weight
        self.part, self.keep = ColumnParallel(padded, share_of(torch.arange(PADDED))), keep

    def forward(self, x: Tensor) -> Tensor:
        return Gather.apply(self.part(x), -1, False)[..., : self.keep]


def build(keep: int) -> Setup:
    ids, targets = make_batch()

    def distribute(model: Any) -> Any:
        model.head = PaddedHead(model.head, keep)
        return model

    return Setup(Decoder(), (ids,), distribute, loss=lambda logits: mean_loss(logits, targets))


def faulty() -> Setup:
    return build(PADDED)


def fixed() -> Setup:
    return build(VOCABULARY)
