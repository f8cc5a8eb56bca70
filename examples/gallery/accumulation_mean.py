"""Gradients of microbatches with unequal numbers of targets are averaged.

Reported as huggingface/transformers#24725: with accumulation, the tokens of short samples count more than without. The
fault is `mean-of-means`; the weights that it shows are those of the samples.
"""

from __future__ import annotations

from typing import Any

from small_decoder import Decoder, make_batch, mean_loss, reduce_gradients, share_of

from partitioner import Setup


def build(by_tokens: bool) -> Setup:
    ids, targets = make_batch(ignored=(6, 4, 1, 0))
    counted = (targets != -100).sum()

    def step(model: Any, inputs: Any) -> Any:
        total = 0.0
        for row, target in zip(share_of(inputs[0]), share_of(targets), strict=True):
            weight = (target != -100).sum() / counted if by_tokens else 1 / len(targets)
            loss = mean_loss(model(row[None]), target[None]) * weight
            loss.backward()
            total = total + loss.detach()
        reduce_gradients(model, mean=False)
        return total

    return Setup(Decoder(), (ids,), lambda model: model, step, lambda logits: mean_loss(logits, targets))


def faulty() -> Setup:
    return build(by_tokens=False)


def fixed() -> Setup:
    return build(by_tokens=True)
