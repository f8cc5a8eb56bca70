"""A model whose attention is written out, for selective recomputation."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, BATCH = 16, 2, 32, 8


class Attention(nn.Module):
    """Written out: products, a mask that is added, softmax, dropout of the weights."""

    def __init__(self, dropout: float, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask
        return self.out((self.drop(torch.softmax(scores, -1)) @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norms[0](x), mask))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


class Eager(nn.Module):
    def __init__(self, dropout: float = 0.0, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        mask = torch.where(place[:, None] >= place, 0.0, -1e4).to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def model(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return Eager(dropout)


@cache
def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    return {"x": x, "target": torch.randint(5, (BATCH, LENGTH), generator=generator)}
