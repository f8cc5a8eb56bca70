"""Jobs without a plan, and the models that they are about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.errors import InfeasibleError
from tests.helpers.small_clusters import cluster


class Tower(nn.Module):
    """Square layers and a mean loss: 16 bytes for each weight with its gradient and Adam's moments."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Headed(nn.Module):
    """An embedding, layers and a head of many tokens."""

    def __init__(self, width: int, depth: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Infeasible:
    """A job, and what its error must say: of which kind, and which requirement its first change gives up."""

    kind: type[InfeasibleError]
    gives_up: str
    topology: Topology = field(default_factory=lambda: cluster(64))
    width: int = 256
    batch: int = 64
    pins: dict[str, Any] = field(default_factory=dict)
    depth: int = 4

    def plan(self, topology: Topology, constraints: Constraints, global_batch: int | None = None) -> Plan:
        with torch.device("meta"):
            model, inputs = Tower(self.width, self.depth), (torch.empty(self.batch, self.width),)
        return partition(model, topology, inputs, global_batch=global_batch, constraints=constraints)


class Attends(nn.Module):
    """Causal attention, without which there is no sequence to share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1)]
        return nn.functional.scaled_dot_product_attention(*heads, is_causal=True).square().mean()
