"""Models with a tied weight and with experts, meshes and ZeRO stages for them, and the errors of their training."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.plans.verify import relative_error
from partitioner.runtime.checkpoint.dcp_files import ShardReader
from partitioner.runtime.checkpoint.shards import ShardPiece
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.program.precision import convert_precision
from partitioner.runtime.program.program import Program
from tests.helpers.every_rank import on_every_rank
from tests.helpers.experts_zoo import plain, plain_inputs

VOCAB, WIDTH, STEPS = 24, 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TiedModel(nn.Module):
    """Embedding and head are one parameter; one block is frozen, and a scale has no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tied_model() -> nn.Module:
    torch.manual_seed(0)
    return TiedModel()


def tied_inputs(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randint(VOCAB, (8, 4), generator=generator) for n in ("tokens", "target")}


def expert_inputs(step: int = 0) -> dict[str, Tensor]:
    return {n: x + 0.01 * step for n, x in plain_inputs().items()}


MODELS: dict[str, tuple[Any, Any]] = {"tied": (tied_model, tied_inputs), "experts": (plain, expert_inputs)}


MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp4": ("tied", dict(dp=4, tp=1, pp=1)),
    "dp2 tp2": ("tied", dict(dp=2, tp=2, pp=1)),
    # otherwise the weight that is tied over stages would be on one stage
    "dp2 pp2": ("tied", dict(dp=2, tp=1, pp=2, stage_of={"embed": 0, "head": -1})),
    "dp2 ep2": ("experts", dict(dp=2, ep=2, tp=1, pp=1)),
    "dp4 ep2": ("experts", dict(dp=4, ep=2, tp=1, pp=1, microbatch_size=1)),
}


SHARDINGS: dict[str, dict[str, int]] = {
    "zero0": dict(zero=0),
    "zero1": dict(zero=1),
    "zero2": dict(zero=2),
    "zero3": dict(zero=3),
    "hybrid2": dict(zero=2, dp_shard=2),
    "hybrid3": dict(zero=3, dp_shard=2),
}


@cache
def planned(mesh: str, sharding: str, recompute: str = "none", microbatch_size: int = 2) -> Plan:
    name, axes = MESHES[mesh]
    model, inputs = MODELS[name]
    pinned = dict(microbatch_size=microbatch_size) | axes | SHARDINGS[sharding]
    ranks = axes["dp"] * axes["tp"] * axes["pp"]
    return partition(model(), Topology.local(ranks), inputs(), constraints=Constraints(**pinned, recompute=recompute))


@cache
def trained_alone(name: str) -> dict[str, Tensor]:
    """Parameters and states of AdamW after the steps, in float64, by one process."""
    model, inputs = MODELS[name][0]().double(), MODELS[name][1]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**{n: x.double() if x.is_floating_point() else x for n, x in inputs(step).items()}).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    held = {n: p.detach() for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        held |= {f"{n}::{key}": value for key, value in optimizer.state.get(p, {}).items()}
    return held


def train(program: Program, name: str, folder: Path, first: int = 0, last: int = STEPS, load: bool = False) -> None:
    """Steps ``first`` to ``last`` on threads, from the model or from what ``folder`` has; ends with a checkpoint."""
    model, inputs = MODELS[name]
    weights, program = model().double(), convert_precision(program, "fp64")

    def work(communicator: Any) -> None:
        engine = Engine(program, None if load else weights, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        if load:
            engine.load(folder, optimizer)
        for step in range(first, last):
            engine.step({n: x.double() if x.is_floating_point() else x for n, x in inputs(step).items()})
            engine.clip_grad_norm_(0.5)
            optimizer.step()
        engine.save(folder, optimizer)

    on_every_rank(program, work)


def errors(folder: Path, name: str) -> dict[str, float]:
    """How far a checkpoint is from what one process trains, by name."""
    reader = ShardReader(folder)
    found = {key: torch.empty(list(t.size), dtype=t.properties.dtype) for key, t in reader.tensors.items()}
    reader.read([ShardPiece(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in found.items()])
    found = {key.removeprefix("model.").removeprefix("optimizer.state."): t for key, t in found.items()}
    return {n: relative_error(found.get(n.replace("::", ".")), value) for n, value in trained_alone(name).items()}
