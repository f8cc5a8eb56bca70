"""Each rank materialises the weights anew, and the head no longer shares the weight of the embedding.

Reported as facebookresearch/lingua#75: under sharded data parallelism the embedding and the head silently had weights
of their own. The fault is `untied`: each copy has the gradient of its own use only.
"""

from __future__ import annotations

from typing import Any

from small_decoder import Decoder, make_batch, mean_loss, share_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from partitioner import Setup


def build(tie: bool) -> Setup:
    ids, targets = make_batch()

    def distribute(model: nn.Module) -> nn.Module:
        if not tie:
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        for layer in model.layers.values():
            fully_shard(layer)
        return fully_shard(model)

    def step(model: Any, inputs: Any) -> Any:
        logits = model(share_of(inputs[0]))
        loss = mean_loss(logits, share_of(targets))
        loss.backward()
        return loss, logits

    return Setup(Decoder(tied=True), (ids,), distribute, step, lambda logits: mean_loss(logits, targets))


def faulty() -> Setup:
    return build(tie=False)


def fixed() -> Setup:
    return build(tie=True)
