"""What ``long_run.py`` is compared with: the unmodified model of ``examples/corpus.py``, trained by one process."""

from __future__ import annotations

import copy

import torch

from examples.corpus import CLIP, Corpus, build, optimizer_of
from partitioner.runtime.engine.data_loader import SampleOrder


def single(size: str, precision: str, batch: int, microbatch: int, steps: int) -> list[float]:
    """The loss of every step; gradients are those of ``microbatch`` sequences at a time, added up in float32.

    In ``bf16`` the model computes in bfloat16 with parameters that are made of float32 copies before every step; the
    optimizer steps the copies.
    """
    torch.set_num_threads(1)
    kept = build(size)
    model = kept if precision == "fp32" else copy.deepcopy(kept).to(torch.bfloat16)
    optimizer, schedule = optimizer_of([*kept.parameters()])
    corpus = Corpus()
    order = SampleOrder(len(corpus), seed=0).get_indices(range(steps * batch))
    losses = []
    for step in range(steps):
        tokens = torch.stack([corpus[i]["input_ids"] for i in order[step * batch : (step + 1) * batch]])
        if model is not kept:
            model.load_state_dict(kept.state_dict())
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
        parts = []
        for part in tokens.split(microbatch):
            model.zero_grad()
            loss = model(input_ids=part, labels=part).loss * (len(part) / batch)  # all have as many targets
            loss.backward()
            parts.append(loss.item())
            torch._foreach_add_(sums, [p.grad.float() for p in model.parameters() if p.grad is not None])
        losses.append(sum(parts))
        for parameter, gradient in zip(kept.parameters(), sums, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(kept.parameters(), CLIP)
        optimizer.step()
        schedule.step()
    return losses
