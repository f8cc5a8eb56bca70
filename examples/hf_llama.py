"""An unmodified Hugging Face Llama, pinned to two pipeline stages of two tensor-parallel ranks.

    python examples/hf_llama.py
    partitioner plan examples/hf_llama.py:example --topology local:4 -o out/llama.json

Weights that lie on disk are not read for planning: build the model under ``torch.device("meta")`` and give the folder
of safetensors to the ``Engine`` of each worker, which reads its own shards of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, Topology, partition, run_local


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    """A small Llama with random weights, and one global batch of which some targets are ignored."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    tokens = torch.randint(config.vocab_size, (8, 64))
    labels = tokens.masked_fill(torch.rand(8, 64) < torch.linspace(0, 0.9, 8)[:, None], -100)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": labels}


def main() -> None:
    model, inputs = example()
    constraints = Constraints(pp=2, tp=2, microbatch_size=2, schedule="1f1b")
    plan = partition(model, Topology.local(4), inputs, constraints=constraints)
    print(plan.summary())
    print(plan.explain())
    plan.prove()

    result = run_local(plan, model, inputs)
    expected = model(**inputs).loss
    expected.backward()
    print(f"loss {result.loss:.6f} on {plan.program.world_size} processes, {expected.item():.6f} on one")
    worst = max(
        ((result.grads[name] - p.grad).abs().max() / p.grad.abs().max()).item()
        for name, p in model.named_parameters()
        if p.grad is not None
    )
    print(f"largest relative error of a gradient in float32: {worst:.1e}")


if __name__ == "__main__":
    main()
