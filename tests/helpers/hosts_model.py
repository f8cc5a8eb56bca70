"""What is trained on several hosts; imports little, since every rank does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, DIM, STEPS, RATE = 8, 8, 40, 0.01


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM, dtype=torch.float64)
        self.down = nn.Linear(4 * DIM, DIM, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(DIM, DIM, dtype=torch.float64)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), target)


def batch(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, target = (torch.randn(BATCH, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"x": x, "target": target}
