"""Experts lie on different ranks, and the gradient of the routing weights is not added up.

Reported as pytorch/torchtitan#2387: with tensor parallelism, the router's weights of the ranks diverge after one step.
The fault is `unsummed`: each rank has the gradient through its own experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_experts import DIM, Experts, ShardedExperts

from partitioner import Setup


def build(reduce: bool) -> Setup:
    x, targets = torch.randn(4, 6, DIM), torch.randn(4, 6, 3)
    return Setup(
        Experts(),
        (x,),
        distribute=lambda model: ShardedExperts(model, reduce),
        loss=lambda output: F.mse_loss(output, targets),
    )


def faulty() -> Setup:
    return build(reduce=False)


def fixed() -> Setup:
    return build(reduce=True)
