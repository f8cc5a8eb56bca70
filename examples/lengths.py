"""Fine-tuning with texts of several lengths, evaluated between steps: one plan, one engine, no second copy of weights.

    python examples/lengths.py

Four processes of this machine train a small Llama. Batches have 64, 128 or 256 positions at most, and the last one
of the epoch fewer samples: each runs in the fastest program that fits. The loss is that of the model on the batch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, Engine, Evaluate, LocalRanks, Plan, Shapes, Topology, partition

RANKS, BATCH, VOCAB, IGNORED = 4, 8, 512, -100
LENGTHS, OFTEN = (64, 128, 256), {64: 0.6, 128: 0.3, 256: 0.1}
STEPS = ((8, 60), (8, 128), (8, 33), (8, 250), (5, 64))  # samples and positions; the last batch is smaller


def build() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def texts(samples: int, positions: int, seed: int) -> dict[str, Tensor]:
    """Random tokens; of every second text the first half is a prompt, which is not learned."""
    tokens = torch.randint(VOCAB, (samples, positions), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[::2, : positions // 2] = IGNORED
    return {"input_ids": tokens, "labels": labels}


def make_plan() -> Plan:
    return partition(
        build(),
        Topology.local(RANKS),
        texts(BATCH, LENGTHS[-1], 0),
        constraints=Constraints(dp=2, tp=2, pp=1),
        shapes=Shapes(length=LENGTHS, weights=OFTEN),
        programs={"eval": Evaluate(inputs=texts(BATCH, LENGTHS[1], 0))},
    )


def train(path: str) -> tuple[list[float], list[float]]:
    """One rank: the losses of the steps, and of an evaluation after each."""
    engine = Engine(path, build())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    losses, evaluations = [], []
    for step, (samples, positions) in enumerate(STEPS):
        losses.append(float(engine.step(texts(samples, positions, step))))  # type: ignore[arg-type]
        optimizer.step()
        evaluations.append(float(engine.run("eval", texts(6, 100, 99))))  # type: ignore[arg-type]
    return losses, evaluations


def train_alone() -> tuple[list[float], list[float]]:
    """The same in one process, without a plan."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, evaluations = [], []
    for step, (samples, positions) in enumerate(STEPS):
        optimizer.zero_grad()
        loss = model(**texts(samples, positions, step)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            evaluations.append(float(model(**texts(6, 100, 99)).loss))
    return losses, evaluations


def main() -> None:
    plan = make_plan()
    print(plan.summary())
    path = plan.save(Path("out") / "lengths.json")
    with LocalRanks(RANKS) as ranks:
        from examples.lengths import train as on_rank  # ranks import it by its name

        losses, evaluations = ranks.call(on_rank, str(path.resolve()))[0]
    alone, expected = train_alone()
    print("samples x positions   loss      alone     evaluation   alone")
    for (samples, positions), *row in zip(STEPS, losses, alone, evaluations, expected, strict=True):
        print(f"{samples} x {positions:<16}", *(f"{number:<9.5f}" for number in row))
    assert torch.allclose(torch.tensor([losses, evaluations]), torch.tensor([alone, expected]), rtol=1e-3)


if __name__ == "__main__":
    main()
