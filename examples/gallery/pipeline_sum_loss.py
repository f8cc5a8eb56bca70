"""A pipeline schedule runs backward from the sum of the losses of all tokens, and nobody divides by their number.

Reported as pytorch/torchtitan#2972: with a pipeline, gradients are larger by the number of tokens than without one.
The fault is `factor`: 32 times, for 4 samples of 8 tokens. The loss is right, because it is divided when it is printed.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from small_decoder import Decoder, make_batch, mean_loss
from small_pipeline import cut_stage, make_stage, run_schedule
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

from partitioner import Setup


def build(divide: bool) -> Setup:
    ids, targets = make_batch()

    def sum_loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")

    def distribute(model: nn.Module) -> Any:
        module = cut_stage(model)
        return ScheduleGPipe(make_stage(module), n_microbatches=4, loss_fn=sum_loss, scale_grads=False), module

    def step(distributed: Any, inputs: Any) -> Any:
        schedule, module = distributed
        loss, logits = run_schedule(schedule, inputs[0], targets)
        if divide:
            for parameter in module.parameters():
                parameter.grad /= targets.numel()
        return None if loss is None else loss * 4 / targets.numel(), logits

    return Setup(Decoder(), (ids,), distribute, step, lambda logits: mean_loss(logits, targets))


def faulty() -> Setup:
    return build(divide=False)


def fixed() -> Setup:
    return build(divide=True)
