"""Fine-tune with sequence packing: a row has several texts, attention stays within each text, and no mask is computed.

    python examples/finetune_packed.py

Four processes of this machine train a small Llama. Texts have 5 to 120 tokens and are packed into rows of 128
positions. Positions restart at each text; the model gets no other input that tells texts apart. Every step packs
different texts, and all steps use one plan. Every loss is compared with that of the model on the texts one by one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, Engine, LocalRanks, Plan, Topology, partition

RANKS, ROWS, POSITIONS, VOCAB, IGNORED = 4, 4, 128, 512, -100
STEPS = 4


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


def texts(seed: int) -> list[Tensor]:
    """Random tokens of some texts that fit into ``ROWS`` rows."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    while True:
        length = int(torch.randint(5, 120, (), generator=generator))
        more = [*found, torch.randint(VOCAB, (length,), generator=generator)]
        if len(arrange(more)) > ROWS:
            return found
        found = more


def arrange(given: list[Tensor]) -> list[list[Tensor]]:
    """Rows of texts: each text is put into the first row that has room for it, long texts first."""
    rows: list[list[Tensor]] = []
    for text in sorted(given, key=len, reverse=True):
        fitting = (row for row in rows if sum(map(len, row)) + len(text) <= POSITIONS)
        row = next(fitting, None)
        if row is None:
            rows.append([text])
        else:
            row.append(text)
    return rows


def pack(given: list[Tensor]) -> dict[str, Tensor]:
    """A batch of packed texts. The end of a row is a text of its own, which is not learned.

    No text predicts the first token of the next one, so this token is no target.
    """
    rows = arrange(given)
    rows += [[] for _ in range(ROWS - len(rows))]
    tokens, labels, positions = (torch.zeros(ROWS, POSITIONS, dtype=torch.long) for _ in range(3))
    labels.fill_(IGNORED)
    for i, row in enumerate(rows):
        start = 0
        for text in row:
            stop = start + len(text)
            tokens[i, start:stop] = text
            labels[i, start + 1 : stop] = text[1:]
            positions[i, start:stop] = torch.arange(len(text))
            start = stop
        positions[i, start:] = torch.arange(POSITIONS - start)
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def make_plan() -> Plan:
    """The batch has numbers: the lengths of its texts say how much work attention is."""
    return partition(build(), Topology.local(RANKS), pack(texts(0)), constraints=Constraints(dp=2, tp=2, pp=1))


def train(path: str) -> list[float]:
    """One rank: the losses of the steps."""
    engine = Engine(path, build())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        losses.append(float(engine.step(pack(texts(step)))))  # type: ignore[arg-type]
        optimizer.step()
    return losses


def train_alone() -> list[float]:
    """The same in one process, without a plan, each text in a row of its own."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        given = texts(step)
        targets = sum(len(text) - 1 for text in given)
        loss = torch.zeros(())
        for text in given:
            loss = loss + model(input_ids=text[None], labels=text[None]).loss * (len(text) - 1) / targets
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    plan = make_plan()
    print(plan.summary())
    path = plan.save(Path("out") / "packed.json")
    with LocalRanks(RANKS) as ranks:
        from examples.finetune_packed import train as on_rank  # ranks import it by its name

        losses = ranks.call(on_rank, str(path.resolve()))[0]
    alone = train_alone()
    print("texts   loss      one by one")
    for step, row in enumerate(zip(losses, alone, strict=True)):
        print(f"{len(texts(step)):<7}", *(f"{number:<9.5f}" for number in row))
    assert torch.allclose(torch.tensor(losses), torch.tensor(alone), rtol=1e-3)


if __name__ == "__main__":
    main()
