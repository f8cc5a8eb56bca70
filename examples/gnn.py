"""A graph network: nodes gather from their neighbours and add up what they gathered.

One graph is the whole batch: there is nothing to split over data-parallel ranks, so ranks share features and stages.

python examples/gnn.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MessagePassing(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.message, self.own = nn.Linear(2 * dim, dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
        received = torch.zeros_like(x).index_add(0, target, sent)
        return x + F.relu(self.own(self.norm(received)))


class GraphNetwork(nn.Module):
    def __init__(self, features: int = 32, dim: int = 64, layers: int = 4, classes: int = 8) -> None:
        super().__init__()
        self.inward = nn.Linear(features, dim)
        self.layers = nn.ModuleList(MessagePassing(dim) for _ in range(layers))
        self.outward = nn.Linear(dim, classes)

    def forward(self, x: Tensor, edges: Tensor, label: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x, source, target)
        return F.cross_entropy(self.outward(x), label)


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one graph: of 64 nodes and 256 edges."""
    torch.manual_seed(0)
    edges = torch.randint(64, (2, 256))
    return GraphNetwork(), {"x": torch.randn(64, 32), "edges": edges, "label": torch.randint(8, (64,))}


if __name__ == "__main__":
    from shown import show

    from partitioner import Constraints

    show(*example(), Constraints(tp=2, pp=1), Constraints(tp=2, pp=2))
