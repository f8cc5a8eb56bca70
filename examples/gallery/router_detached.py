"""Routing weights are gathered from all ranks by a collective without a backward.

Reported as NVIDIA-NeMo/Automodel#2995: a plain `all_gather` of the routing weights cuts the router off from the loss.
The fault is `missing`: the router has no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_experts import DIM, Experts, ShardedExperts

from partitioner import Setup


def build(detach: bool) -> Setup:
    x, targets = torch.randn(4, 6, DIM), torch.randn(4, 6, 3)
    return Setup(
        Experts(),
        (x,),
        distribute=lambda model: ShardedExperts(model, reduce=True, detach=detach),
        loss=lambda output: F.mse_loss(output, targets),
    )


def faulty() -> Setup:
    return build(detach=True)


def fixed() -> Setup:
    return build(detach=False)
