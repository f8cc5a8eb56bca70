"""Generation between training steps: one plan, one engine, no second copy of the weights.

    python examples/generate.py

Four processes of this machine train a small Llama, with two pipeline stages of two tensor-parallel ranks. After each
step they generate from prompts of different lengths. Every token is compared with the model's own ``generate``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, Engine, Generate, LocalRanks, Plan, Topology, partition

RANKS, BATCH, VOCAB, STEPS, NEW = 4, 8, 256, 3, 12


def build() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).double()


def texts(seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCAB, (BATCH, 32), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def prompts() -> tuple[Tensor, Tensor]:
    """Four prompts of 4 to 10 tokens, padded on the left, and their mask."""
    tokens = texts(99)["input_ids"][:4, :10]
    mask = (torch.arange(10)[None] >= torch.tensor([0, 2, 4, 6])[:, None]).long()
    return tokens * mask, mask


def make_plan() -> Plan:
    return partition(
        build(),
        Topology.local(RANKS),
        texts(0),
        constraints=Constraints(pp=2, tp=2, dp=1),
        programs={"generate": Generate(batch=4, prompt=16, length=40)},
    )


def train(path: str) -> list[list[list[int]]]:
    """One rank: the generated tokens after each step."""
    engine = Engine(path, build())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    tokens, mask = prompts()
    found = []
    for step in range(STEPS):
        engine.step(texts(step))
        optimizer.step()
        found.append(engine.generate(tokens, attention_mask=mask, max_new_tokens=NEW)[:, -NEW:].tolist())
    return found


def train_alone() -> list[list[list[int]]]:
    """The same in one process, without a plan."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, mask = prompts()
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**texts(step)).loss.backward()
        optimizer.step()
        made = model.generate(  # type: ignore[operator]
            tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        found.append(made[:, -NEW:].tolist())
    return found


def main() -> None:
    plan = make_plan()
    print(plan.summary())
    path = plan.save(Path("out") / "generate.json")
    with LocalRanks(RANKS) as ranks:
        from examples.generate import train as on_rank  # ranks import it by its name

        found = ranks.call(on_rank, str(path.resolve()))
    alone = train_alone()
    for step, tokens in enumerate(found[0]):
        print(f"after step {step + 1}: {tokens[0]}")
    assert all(tokens == alone for tokens in found)
    print(f"{STEPS * 4 * NEW} generated tokens, all as one process has them")


if __name__ == "__main__":
    main()
