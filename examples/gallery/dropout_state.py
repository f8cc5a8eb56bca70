"""One rank draws random numbers for its data, and dropout then differs between ranks that hold the same activations.

Reported as NVIDIA/Megatron-LM#206: the random states of tensor-parallel ranks go out of step. The fault is
`random-state`; without dropout everything is equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small_decoder import DIM, ColumnParallel, RowParallel, share_of
from torch import Tensor, nn

from partitioner import Setup


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(DIM), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(self.norm(x)).tanh()))


def build(draw: bool) -> Setup:
    x = torch.randn(4, DIM)

    def distribute(model: Any) -> Any:
        hidden = share_of(torch.arange(2 * DIM))
        model.up, model.down = ColumnParallel(model.up, hidden), RowParallel(model.down, hidden)
        return model

    def step(model: Any, inputs: Any) -> Any:
        if draw and dist.get_rank() == 0:
            torch.randperm(8)
        loss = model(inputs[0]).square().mean()
        loss.backward()
        return loss

    return Setup(Residual(), (x,), distribute, step, lambda output: output.square().mean())


def faulty() -> Setup:
    return build(draw=True)


def fixed() -> Setup:
    return build(draw=False)
