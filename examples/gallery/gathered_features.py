"""A contrastive loss gathers the features of all ranks without their gradient, and gradients are averaged.

Reported as JohnGiorgi/DeCLUTR#212: the gradients are too small by the number of ranks. The fault is `averaged`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_decoder import DIM, reduce_gradients, share_of
from torch import Tensor, nn

from partitioner import Setup


def contrast(features: Tensor) -> Tensor:
    """Return the loss that makes neighbouring samples alike."""
    features = F.normalize(features, dim=-1)
    scores = features @ features.T - 10.0 * torch.eye(len(features))
    return F.cross_entropy(scores, torch.arange(len(features)) ^ 1)


def build(rescale: bool) -> Setup:
    x = torch.randn(8, DIM)

    def step(model: Any, inputs: Any) -> Any:
        own = model(share_of(inputs[0]))
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.detach())
        parts[dist.get_rank()] = own
        loss = contrast(torch.cat(parts))
        (loss * dist.get_world_size() if rescale else loss).backward()
        reduce_gradients(model, mean=True)
        return loss

    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 6))
    return Setup(model, (x,), lambda model: model, step, contrast)


def faulty() -> Setup:
    return build(rescale=False)


def fixed() -> Setup:
    return build(rescale=True)
