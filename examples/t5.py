"""An encoder-decoder: what the encoder gives, and the position bias of each first layer, cross stages as they must.

python examples/t5.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from partitioner import Constraints, Topology, partition


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    """A small T5 whose embedding, decoder embedding and head are one tensor."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=1024,
        d_model=128,
        d_kv=16,
        d_ff=256,
        num_layers=4,
        num_heads=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    inputs = {"input_ids": torch.randint(1024, (8, 32)), "labels": torch.randint(1024, (8, 16))}
    return T5ForConditionalGeneration(config), inputs


def main() -> None:
    model, inputs = example()
    plan = partition(model, Topology.local(4), inputs, constraints=Constraints(pp=4, microbatch_size=2))
    print(plan.summary())
    plan.prove()
    report = plan.verify(model, inputs)
    print(f"verified in float64 against the model: largest relative error {report.max_error:.1e}")
    assert report.ok


if __name__ == "__main__":
    main()
