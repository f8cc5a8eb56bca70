"""The decoder of this folder as pipeline stages of PyTorch, which several examples share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small_decoder import DIM
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

LENGTH = 8


def cut_stage(model: nn.Module) -> nn.Module:
    """Keep the layers of this rank's stage; the embedding is in the first one, norm and head in the last one."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    names = list(model.layers)
    mine = torch.arange(len(names)).tensor_split(stages)[rank].tolist()
    for i, name in enumerate(names):
        if i not in mine:
            del model.layers[name]
    if rank > 0:
        model.embed = None
    if rank < stages - 1:
        model.norm = model.head = None
    return model


def make_stage(module: nn.Module) -> PipelineStage:
    return PipelineStage(module, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def run_schedule(schedule: Any, ids: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Run one step. Return the mean of the microbatches' losses and the logits on the last rank, ``None`` elsewhere."""
    losses: list[Tensor] = []
    if dist.get_rank() == 0:
        out = schedule.step(ids)
    elif dist.get_rank() == dist.get_world_size() - 1:
        out = schedule.step(target=targets, losses=losses)
    else:
        out = schedule.step()
    return (torch.stack(losses).mean(), out) if losses else (None, None)


__all__ = ["DIM", "LENGTH", "cut_stage", "make_stage", "run_schedule"]
