"""A diffusion transformer: patches of a noisy image, each layer shifted and scaled by the time step and the class.

python examples/diffusion_transformer.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + gate1 * self.out(y)
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y), approximate="tanh"))


class DiffusionTransformer(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 4, layers: int = 4, patch: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, dim, patch, patch)
        self.place = nn.Parameter(torch.randn(1, 64, dim) * 0.02)
        self.of_class = nn.Embedding(classes + 1, dim)
        self.of_time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm, self.outward = nn.LayerNorm(dim), nn.Linear(dim, 4 * patch * patch)
        self.register_buffer("frequencies", torch.exp(-torch.arange(dim // 2) * (9.2 / (dim // 2))), persistent=False)

    def forward(self, latent: Tensor, noise: Tensor, time: Tensor, label: Tensor) -> Tensor:
        share = time[:, None, None, None]
        x = self.patches((1 - share) * latent + share * noise).flatten(2).mT + self.place
        angles = 1000 * time[:, None] * self.frequencies
        condition = self.of_time(torch.cat([angles.cos(), angles.sin()], -1)) + self.of_class(label)
        for layer in self.layers:
            x = layer(x, condition)
        velocity = F.fold(self.outward(self.norm(x)).mT, latent.shape[-2:], 2, stride=2)
        return F.mse_loss(velocity, noise - latent)


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one global batch."""
    torch.manual_seed(0)
    latent, noise = torch.randn(2, 8, 4, 16, 16)
    inputs = {"latent": latent, "noise": noise, "time": torch.rand(8), "label": torch.randint(10, (8,))}
    return DiffusionTransformer(), inputs


if __name__ == "__main__":
    from shown import show

    from partitioner import Constraints

    show(*example(), Constraints(tp=2), Constraints(tp=2, pp=2))
