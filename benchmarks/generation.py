"""Generation: tokens per second of a plan's engine on one process, beside the model's own ``generate``.

    python benchmarks/generation.py [--width 256] [--layers 8] [--batch 4] [--prompt 32] [--new 64] [--pairs 7]

A Llama generates on the CPU with one thread, greedily, from the same prompts: by ``Engine.generate`` under a plan of
one rank, and by ``model.generate`` of transformers with a static cache of the same length. Runs alternate, and each
pair gives a ratio of their times. The program ends with 1 if tokens differ, or if the median ratio is above 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, Engine, Generate, Topology, partition

VOCAB, HEAD = 4096, 32


def build(width: int, layers: int) -> LlamaForCausalLM:
    """Return a model with random weights in evaluation mode. ``width``: the size of its hidden states."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD // 2,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).eval()


def measure(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the seconds of a call of ``run``, and its result."""
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 256), ("layers", 8), ("batch", 4), ("prompt", 32), ("new", 64), ("pairs", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, length = build(asked.width, asked.layers), asked.prompt + asked.new
    tokens = torch.randint(3, VOCAB, (asked.batch, asked.prompt), generator=torch.Generator().manual_seed(1))
    plan = partition(
        model,
        Topology.local(1),
        {"input_ids": tokens, "labels": tokens},
        constraints=Constraints(pp=1, dp=1, tp=1, cp=1),
        programs={"generate": Generate(batch=asked.batch, prompt=asked.prompt, length=length)},
    )
    engine = Engine(plan, model)

    def run_engine() -> Tensor:
        return engine.generate(tokens, max_new_tokens=asked.new)

    def run_model() -> Tensor:
        with torch.no_grad():
            found: Tensor = model.generate(  # type: ignore[assignment]
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=asked.new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation="static",
            )
        return found

    if not torch.equal(run_engine(), run_model()):  # also warms both up
        print("tokens differ")
        return 1
    times = [(measure(run_engine)[0], measure(run_model)[0]) for _ in range(asked.pairs)]
    made = asked.batch * asked.new
    for name, seconds in zip(("engine", "model.generate"), zip(*times, strict=True), strict=True):
        print(f"{name:>15}: {made / statistics.median(seconds):8.1f} tokens per second")
    ratio = statistics.median(own / other for own, other in times)
    print(f"time of the engine to the model's own generate, median of {asked.pairs} pairs: {ratio:.2f}")
    return int(ratio > 1)


if __name__ == "__main__":
    raise SystemExit(main())
