"""The sampler repeats samples so that every rank gets as many, and they count twice.

Reported as pytorch/pytorch#25162, for the accuracy of a validation set; in training it is the gradient that is wrong.
The fault is `reweighted`: the first sample has twice its weight, relative to the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small_decoder import Decoder, make_batch, mean_loss, reduce_gradients

from partitioner import Setup


def build(repeat: bool) -> Setup:
    ids, targets = make_batch(samples=5)

    def step(model: Any, inputs: Any) -> Any:
        ranks, count = dist.get_world_size(), len(ids)
        padded = -(-count // ranks) * ranks if repeat else count
        mine = torch.arange(padded)[dist.get_rank() :: ranks] % count
        loss = mean_loss(model(inputs[0][mine]), targets[mine]) * len(mine) / padded
        loss.backward()
        reduce_gradients(model, mean=False)
        return loss

    return Setup(Decoder(), (ids,), lambda model: model, step, lambda logits: mean_loss(logits, targets))


def faulty() -> Setup:
    return build(repeat=True)


def fixed() -> Setup:
    return build(repeat=False)
