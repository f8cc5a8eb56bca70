"""A recommendation model: embedding tables that no device can hold, small products after them.

Large tables are sharded by row or by column, whichever is cheaper; many equal ones, held as one tensor, by table.

python examples/dlrm.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EqualTables(nn.Module):
    """Tables of as many rows each: one parameter ``[table, row, dim]``."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tables, rows, dim) * 0.1)

    def forward(self, index: Tensor) -> Tensor:
        """``index``: a row of each table, ``[sample, table]``; ``[sample, table, dim]``."""
        rows = index.t().unsqueeze(-1).expand(-1, -1, self.weight.shape[-1])
        return self.weight.gather(1, rows).transpose(0, 1)


class DLRM(nn.Module):
    def __init__(self, dense: int = 16, dim: int = 32, large: tuple[int, ...] = (20000, 4000), small: int = 6) -> None:
        super().__init__()
        self.large = nn.ModuleList(nn.Embedding(rows, dim) for rows in large)
        self.small = EqualTables(small, 100, dim)
        self.bottom = nn.Sequential(nn.Linear(dense, 64), nn.ReLU(), nn.Linear(64, dim))
        features = 1 + len(large) + small
        pairs = torch.tril_indices(features, features, -1)
        self.register_buffer("pairs", pairs[0] * features + pairs[1], persistent=False)
        self.top = nn.Sequential(nn.Linear(dim + pairs.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, large: Tensor, small: Tensor, clicked: Tensor) -> Tensor:
        x = self.bottom(dense)
        looked_up = [table(large[:, i]) for i, table in enumerate(self.large)]
        features = torch.cat([torch.stack([x, *looked_up], 1), self.small(small)], 1)
        products = (features @ features.mT).flatten(1).index_select(1, self.pairs)
        logit = self.top(torch.cat([x, products], -1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logit, clicked)


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one global batch."""
    torch.manual_seed(0)
    large = torch.stack([torch.randint(rows, (64,)) for rows in (20000, 4000)], 1)
    batch = {"dense": torch.randn(64, 16), "large": large, "small": torch.randint(100, (64, 6))}
    return DLRM(), {**batch, "clicked": torch.randint(2, (64,)).float()}


if __name__ == "__main__":
    from shown import show

    from partitioner import Constraints

    show(*example(), Constraints(tp=2), Constraints(tp=2, dp=2))
