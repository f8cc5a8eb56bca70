"""Jobs for the search: models of the zoo, a mixture of experts, and a layer that is called again and again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from partitioner.constraints import Constraints
from partitioner.passes.capture.capture import capture
from partitioner.passes.ir.gradient_flow import mark_gradients
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.shard.fold import fold
from partitioner.solve.evaluate.job import Job
from partitioner.solve.sharding.batch import shard_batch
from partitioner.topology import Topology
from tests.helpers.models import CASES


def small_experts(batch: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=64, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(batch, 16, dtype=torch.long)
        return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


class OneLayer(nn.Module):
    """The same layer, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x + self.layer(x).tanh()
        return x.square().mean()


def job(name: str, topology: Topology, batch: int = 8, **pinned: Any) -> Job:
    if name == "experts":
        captured = capture(*small_experts(batch))
    elif name == "one layer":
        captured = capture(OneLayer(), (torch.zeros(batch, 64),))
    else:
        case = CASES[name]
        captured = capture(case.build(), case.inputs(batch), loss=case.loss)
    model = fold(normalize(captured))
    mark_gradients(model)
    return Job(model, shard_batch(model, batch), batch, topology, Constraints(**pinned), True, "adamw", "fp32")
