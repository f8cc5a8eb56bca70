"""A model of square layers, small enough to be planned in every test."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tower(nn.Module):
    """Four square layers and a mean loss."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def inputs(batch: int = 8, width: int = 12) -> tuple[Tensor, ...]:
    return (torch.randn(batch, width),)
