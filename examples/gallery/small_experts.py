"""A small mixture of experts, and its experts on several ranks, which two examples share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from small_decoder import DIM, Copy, Mlp, Sum, share_of
from torch import Tensor, nn

EXPERTS = 4


class Experts(nn.Module):
    """Every token goes to its two best experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Mlp() for i in range(EXPERTS)})
        self.head = nn.Linear(DIM, 3)

    def route(self, x: Tensor) -> Tensor:
        """Return the weight of each expert for each token, zero for all but two."""
        scores = self.router(x).softmax(-1)
        best = scores.topk(2, -1).indices
        return scores * torch.zeros_like(scores).scatter(-1, best, 1.0)

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        parts = [weights[..., int(name), None] * expert(x) for name, expert in self.experts.items()]
        return torch.stack(parts).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x, self.route(x)))


class ShardedExperts(Experts):
    """The experts of this rank; tokens are on every rank. ``reduce``: whether the gradient of the routing weights,
    to which each rank contributes through its own experts, is added up. ``detach``: whether the weights lose their
    gradient on the way to the experts.
    """

    def __init__(self, whole: Experts, reduce: bool, detach: bool = False) -> None:
        nn.Module.__init__(self)
        self.router, self.head = whole.router, whole.head
        mine = share_of(torch.arange(EXPERTS)).tolist()
        self.experts = nn.ModuleDict({str(i): whole.experts[str(i)] for i in mine})
        self.reduce, self.detach = reduce, detach

    def forward(self, x: Tensor) -> Tensor:
        weights = self.route(x)
        if self.detach:
            parts = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, weights.detach())
            weights = parts[0]
        weights = Copy.apply(weights) if self.reduce else weights
        return self.head(Sum.apply(self.mix(Copy.apply(x), weights)))
