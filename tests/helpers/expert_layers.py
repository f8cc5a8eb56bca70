"""Mixtures of experts: several experts for each token, and one whose experts have a capacity."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """Layers of eight experts, of which each token takes ``topk``; their weights count before the last product."""

    def __init__(self, topk: int = 4, width: int = 512, depth: int = 2) -> None:
        super().__init__()
        self.topk = topk
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.routers = nn.ModuleList(nn.Linear(width, 8, bias=False) for _ in range(depth))
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(8, width, width)) for _ in range(depth))
        self.down = nn.ParameterList(nn.Parameter(torch.zeros(8, width, width)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for norm, router, up, down in zip(self.norms, self.routers, self.up, self.down, strict=True):
            x = x + self.layer(norm(x).flatten(0, 1), router, up, down).view_as(x)
        return x.square().mean()

    def layer(self, x: Tensor, router: nn.Module, up: Tensor, down: Tensor) -> Tensor:
        weights, chosen = router(x).softmax(-1).topk(self.topk, -1)
        by_expert, order = chosen.reshape(-1).sort()
        ends = torch.cumsum(torch.histc(by_expert.float(), bins=8, min=0, max=7), 0, dtype=torch.int32)
        inner = torch._grouped_mm(x[order // self.topk], up, offs=ends)
        inner = inner * weights.reshape(-1)[order].unsqueeze(-1)
        made = torch._grouped_mm(inner, down, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=x.device)
        return made[back].view(-1, self.topk, x.shape[-1]).sum(1)


SAMPLES, LENGTH, EXPERTS, HIDDEN = 8, 4, 4, 12


class Limited(nn.Module):
    """The best expert of each token, as long as it has room: ``capacity`` tokens, in the order of the batch."""

    def __init__(self, capacity: int, width: int = 8) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, EXPERTS)
        self.up, self.up_bias = (
            nn.Parameter(torch.randn(EXPERTS, width, HIDDEN)),
            nn.Parameter(torch.randn(EXPERTS, 12)),
        )
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        weight, expert = self.router(x).softmax(-1).max(-1)
        chosen = nn.functional.one_hot(expert, EXPERTS)
        place = chosen.cumsum(0) * chosen - 1
        kept = (place < self.capacity) & (place >= 0)
        places = nn.functional.one_hot(place.clamp(0, self.capacity - 1), self.capacity)
        sent = (places * kept[..., None]).to(x.dtype)
        rows = torch.einsum("tec,td->ecd", sent, x)
        made = torch.bmm(nn.functional.gelu(torch.bmm(rows, self.up) + self.up_bias[:, None]), self.down)
        return torch.einsum("tec,ecd->td", sent * weight[:, None, None], made).square().mean()


def limited(capacity: int, width: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Limited(capacity, width), {"x": torch.randn(SAMPLES, LENGTH, width)}
