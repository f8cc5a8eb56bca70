"""Training and evaluation with batches of several shapes, on the ranks of a plan and in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import Constraints, Engine, Evaluate, Plan, Shapes, Topology, partition

VOCAB, WIDTH, HEADS, LONGEST, IGNORED = 40, 16, 4, 16, -100
LEARNING = 0.01

MESHES: dict[str, dict[str, int]] = {
    "tp2": dict(tp=2, dp=1, pp=1),
    "pp2": dict(pp=2, dp=1, tp=1),
    "cp2": dict(cp=2, pp=1, dp=1, tp=1),
    "dp2 tp2": dict(dp=2, tp=2, pp=1),
    "dp2 zero3": dict(dp=2, tp=1, pp=1, zero=3),
    "dp2 zero1": dict(dp=2, tp=1, pp=1, zero=1),
}
# Samples and positions of each step's batch: shapes of the plan, smaller ones, and the last smaller batch.
STEPS = ((8, 16), (8, 11), (4, 8), (3, 7), (5, 16), (1, 5))


class Layer(nn.Module):
    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        x = x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))
        return x if self.norm is None else self.norm(x.transpose(1, 2)).transpose(1, 2)


class Writer(nn.Module):
    """A causal decoder. ``dropout``, ``norm``: what it does otherwise in evaluation mode."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout, norm) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


def writer(dropout: float = 0.0, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Writer(dropout, norm).double()


def written(samples: int, positions: int, seed: int = 0) -> dict[str, Tensor]:
    """Tokens and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (samples, positions), generator=generator)
    ignored = torch.rand((samples, positions), generator=generator) < 0.2
    return {"tokens": tokens, "labels": tokens.masked_fill(ignored, IGNORED)}


@cache
def planned(mesh: str, dropout: float = 0.0, norm: bool = False) -> Plan:
    axes = MESHES[mesh]
    ranks = axes["dp"] * axes["tp"] * axes["pp"] * axes.get("cp", 1)
    return partition(
        writer(dropout, norm),
        Topology.local(ranks),
        written(8, 16),
        constraints=Constraints(**axes),
        shapes=Shapes(batch=(4, 8), length=(8, 16)),
        programs={"eval": Evaluate(inputs=written(6, 16))},
    )


class Trained(NamedTuple):
    """What came of a training run: losses of steps and evaluations, gradients at its end, and weights."""

    losses: list[float]
    evaluations: list[float]
    logits: list[list[Tensor]]  # of each step, by microbatch
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def list_batches(inputs: Callable[[int, int, int], Any]) -> list[Any]:
    return [inputs(samples, positions, seed) for seed, (samples, positions) in enumerate(STEPS)]


def train_alone(model: nn.Module, batches: list[Any], evaluated: Any) -> Trained:
    """Steps with AdamW in one process on the batches as they are; then one step of SGD, which gives gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING)
    losses, evaluations, logits = [], [], []
    for batch in batches:
        optimizer.zero_grad()
        found = model(**batch)
        found["loss"].backward()
        optimizer.step()
        losses.append(float(found["loss"].detach()))
        logits.append([found["logits"].detach()])
        modes = model.training
        model.eval()
        with torch.no_grad():
            evaluations.append(float(model(**evaluated)["loss"]))
        model.train(modes)
    model.zero_grad()
    model(**batches[1])["loss"].backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Trained(losses, evaluations, logits, gradients, {n: t.detach() for n, t in model.state_dict().items()})


def train_rank(plan: Any, model: nn.Module, batches: list[Any], evaluated: Any, communicator: Any = None) -> Trained:
    """The same steps on one rank of ``plan``, a plan or its file."""
    engine = Engine(plan, model, communicator=communicator, keep_outputs=True)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=LEARNING)
    losses, evaluations, logits = [], [], []
    for batch in batches:
        losses.append(float(engine.step(batch)))  # type: ignore[arg-type]
        logits.append([part for parts in engine.outputs.values() for part in parts.values() if part.dim() > 1])
        optimizer.step()
        evaluations.append(float(engine.run("eval", evaluated)))  # type: ignore[arg-type]
    weights = {n: t.clone() for n, t in engine.state_dict(full=True).items()}
    engine.step(batches[1])
    torch.optim.SGD(engine.parameters(), lr=1.0).step()
    after = engine.state_dict(full=True)
    return Trained(losses, evaluations, logits, {n: w - after[n] for n, w in weights.items()}, weights)
