"""Generation under a plan between training steps, and by transformers' own ``generate`` in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partitioner import Constraints, Engine, Generate, Plan, Topology, partition
from tests.helpers.models import CASES, float64

VOCAB, NEW = 64, 6
PROMPTS = ((4, 8), (3, 5), (4, 11), (1, 19))  # samples and tokens: as planned, fewer, and more than are read at once
ASKED = Generate(batch=4, prompt=8, length=28)


class Generated(NamedTuple):
    """What came of some steps with a generation after each: losses, generated tokens, and weights."""

    losses: list[float]
    tokens: list[Tensor]
    weights: dict[str, Tensor]


def model_of(family: str) -> nn.Module:
    """The test model of a family in float64."""
    with float64():
        return CASES[family].build().double()


def draw_prompt(samples: int, positions: int) -> Tensor:
    return torch.randint(3, VOCAB, (samples, positions), generator=torch.Generator().manual_seed(positions))


def draw_mask(samples: int, positions: int) -> Tensor:
    """A mask of prompts that are shorter by one token from sample to sample, padded on the left."""
    missing = torch.arange(samples)[:, None] % max(1, positions - 1)
    return (torch.arange(positions)[None] >= missing).long()


@cache
def plan_generation(family: str, pp: int = 1, dp: int = 1, tp: int = 1, **others: int) -> Plan:
    with float64():
        return partition(
            model_of(family),
            Topology.local(pp * dp * tp),
            dict(CASES[family].inputs(8)),
            constraints=Constraints(pp=pp, dp=dp, tp=tp, cp=1, **others),  # type: ignore[arg-type]
            precision="fp64",
            programs={"generate": ASKED},
        )


def generate_on_rank(plan: Any, family: str, communicator: Any = None, model: nn.Module | None = None) -> Generated:
    """Two steps of training, each followed by generations, on one rank of ``plan``, a plan or its file."""
    engine = Engine(plan, model or model_of(family), communicator=communicator)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)

    def step(batch: Any) -> float:
        loss = float(engine.step(batch))  # type: ignore[arg-type]
        optimizer.step()
        return loss

    def generate(tokens: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        return engine.generate(tokens, attention_mask=mask, max_new_tokens=NEW, **options)

    return _alternate(dict(CASES[family].inputs(8)), step, generate, lambda: engine.state_dict(full=True))


def generate_alone(family: str) -> Generated:
    """The same in one process, with the model's own ``generate``."""
    model = model_of(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def generate(tokens: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        options = {"eos_token_id": None, "pad_token_id": 0} | options
        mask = torch.ones_like(tokens) if mask is None else mask
        model.eval()
        found: Tensor = model.generate(  # type: ignore[operator]
            tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options
        )
        model.train()
        return found

    batch = dict(CASES[family].inputs(8))
    with float64():
        return _alternate(batch, step, generate, model.state_dict)


def _alternate(
    batch: Any, step: Callable[[Any], float], generate: Callable[..., Tensor], weights: Callable[[], dict[str, Tensor]]
) -> Generated:
    losses, tokens = [], []
    for _ in range(2):
        losses.append(step(batch))
        for samples, positions in PROMPTS:
            prompt = draw_prompt(samples, positions)
            for mask in (None, draw_mask(samples, positions)):
                tokens.append(generate(prompt, mask))
        ends = int(tokens[-2][0, -2])
        tokens.append(generate(draw_prompt(4, 8), None, eos_token_id=ends, pad_token_id=1))
    return Generated(losses, tokens, {name: value.clone() for name, value in weights().items()})
