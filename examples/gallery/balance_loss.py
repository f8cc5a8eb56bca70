"""The load-balancing loss of a router counts only the tokens of the rank.

Reported as pytorch/torchtitan#3000: the counts of tokens for each expert have to be summed over the ranks, because the
term is a product of two means. The fault is `loss-term`: only the router's gradient is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_decoder import DIM, Sum, reduce_gradients, share_of
from small_experts import EXPERTS, Experts
from torch import Tensor, nn

from partitioner import Setup


class BalancedExperts(Experts):
    """Experts and the loss that balances them. ``over_ranks``: whether tokens of all ranks are counted."""

    over_ranks = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(2, -1).indices, 1.0)
        counted, probability = chosen.flatten(0, -2).mean(0), scores.flatten(0, -2).mean(0)
        if self.over_ranks:
            counted = Sum.apply(counted) / dist.get_world_size()
        return self.head(self.mix(x, scores * chosen)), EXPERTS * (counted * probability).sum()


def build(over_ranks: bool) -> Setup:
    x, targets = torch.randn(8, 6, DIM), torch.randn(8, 6, 3)

    def total(made: tuple[Tensor, Tensor], part: Tensor) -> Tensor:
        return F.mse_loss(made[0], part) + 0.1 * made[1]

    def distribute(model: nn.Module) -> nn.Module:
        model.over_ranks = over_ranks
        return model

    def step(model: Any, inputs: Any) -> Any:
        made = model(share_of(inputs[0]))
        loss = total(made, share_of(targets))
        loss.backward()
        reduce_gradients(model, mean=True)
        return loss, {"0": made[0]}

    return Setup(BalancedExperts(), (x,), distribute, step, lambda made: total(made, targets))


def faulty() -> Setup:
    return build(over_ranks=False)


def fixed() -> Setup:
    return build(over_ranks=True)
