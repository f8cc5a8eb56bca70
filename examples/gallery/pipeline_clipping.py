"""Each pipeline stage clips its gradients by their own norm.

Reported as pytorch/torchtitan#596: `clip_grad_norm_` knows the parameters of one stage only. The fault is `local-clip`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small_decoder import Decoder, make_batch, mean_loss
from small_pipeline import cut_stage, make_stage, run_schedule
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from partitioner import Setup

MOST = 0.5


def build(together: bool) -> Setup:
    ids, targets = make_batch()

    def distribute(model: nn.Module) -> Any:
        module = cut_stage(model)
        return Schedule1F1B(make_stage(module), n_microbatches=4, loss_fn=mean_loss), module

    def step(distributed: Any, inputs: Any) -> Any:
        schedule, module = distributed
        loss, logits = run_schedule(schedule, inputs[0], targets)
        grads = [p.grad for p in module.parameters()]
        square = torch.stack([g.square().sum() for g in grads]).sum()
        if together:
            dist.all_reduce(square)
        for grad in grads:
            grad *= (MOST / (square.sqrt() + 1e-6)).clamp(max=1.0)
        return loss, logits

    return Setup(Decoder(), (ids,), distribute, step, lambda logits: mean_loss(logits, targets), clip_norm=MOST)


def faulty() -> Setup:
    return build(together=False)


def fixed() -> Setup:
    return build(together=True)
