"""Modules that interpret recipes, and the batches that they are planned with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.helpers import grammar_elementwise, grammar_modules, grammar_states  # noqa: F401  their operators enter the table
from tests.helpers.grammar_losses import IGNORED, LOSSES
from tests.helpers.grammar_operators import OF_INPUTS, OPERATORS, VOCAB, Frame
from tests.helpers.grammar_recipes import Op, Recipe

Batch = dict[str, Any]
_COPIES = {"repeated": 3, "stacked": 4, "residual": 1, "twice": 1, "checkpointed": 1}


class Layer(nn.Module):
    """Operators one after the other. Weights are made when it is called for the first time.

    ``index``: its place among layers that are alike; what else it holds of its own is made of that.
    """

    def __init__(self, ops: tuple[Op, ...], index: int = 0) -> None:
        super().__init__()
        self.ops = ops
        self.steps = 0
        self.seen: list[Any] = []
        self.index = index
        self.kind = "even" if index % 2 == 0 else "odd"
        self.settings = {"scale": 1.0 + 0.1 * index, "sizes": (index, index + 1)}
        self.numbers = np.linspace(0.5, 1.0 + index, 3)
        self.constant = torch.tensor(1.0 + 0.25 * index, dtype=torch.float64)
        self.scaled: Callable[[Tensor], Tensor] = lambda h: h * (1.0 + 0.1 * index)
        self.bodies = nn.ModuleList(
            nn.ModuleList(_layer(op, i) for i in range(_COPIES.get(op.name, 0) if op.body else 0)) for op in ops
        )

    def forward(self, h: Tensor, inputs: Batch | None = None, losses: list[Tensor] | None = None) -> Tensor:
        inputs, losses = {} if inputs is None else inputs, [] if losses is None else losses
        values = [h]
        for index, (op, bodies) in enumerate(zip(self.ops, self.bodies, strict=True)):
            key = f"{op.name}{index}"
            h = OPERATORS[op.name](Frame(self, key, op.a, op.b, values, inputs, losses, list(bodies)), h)
            values.append(h)
        return h


def _layer(op: Op, index: int) -> Layer:
    """A layer of a repeated operator. Where the layers get nothing but the value, operators that need more are left
    out."""
    body = tuple(o for o in op.body if op.name != "stacked" or o.name not in OF_INPUTS)
    return Layer(body, index)


class RandomModel(nn.Module):
    """What a recipe says."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.stem = nn.Linear(recipe.width, recipe.width)  # so that gradients have somewhere to go
        self.body = Layer(recipe.ops)
        self.head = nn.Module()

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        y: Tensor,
        t: Tensor,
        mask: Tensor | None = None,
        scale: float | Tensor = 1.0,
        flag: bool = True,
        mode: str = "mean",
    ) -> Any:
        inputs: Batch = {"x": x, "ids": ids, "y": y, "t": t, "mask": mask, "scale": scale, "flag": flag, "mode": mode}
        losses: list[Tensor] = []
        h = self.body(self.stem(x), inputs, losses)
        if self.recipe.output == "values":
            return h
        op = self.recipe.loss
        made = LOSSES[op.name](Frame(self.head, op.name, op.a, op.b, [h], inputs, losses), h)
        total = made + sum(losses)
        return {"loss": total, "values": h} if self.recipe.output == "dict" else total


def loss_of(recipe: Recipe) -> Callable[[Any], Tensor] | None:
    """The loss that is given to ``partition``."""
    return _mean_square if recipe.output == "values" else None


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def build_model(recipe: Recipe, seed: int = 0) -> RandomModel:
    """The model in float64, its weights made by one call on a batch; that call has changed its buffers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RandomModel(recipe).train(recipe.training)
        batch = {
            k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in _all(recipe).items()
        }
        model(**batch)
    return model.double()


def _all(recipe: Recipe, seed: int = 1) -> Batch:
    """A batch with all inputs."""
    generator = torch.Generator().manual_seed(seed)
    b, s, n = recipe.batch, recipe.length, recipe.width
    y = torch.randint(VOCAB, (b, s), generator=generator)
    y[:, 0] = torch.arange(b) % VOCAB
    y[::3, 1:] = IGNORED
    y[seed % b, 0] = IGNORED
    return {
        "x": torch.randn(b, s, n, generator=generator, dtype=torch.float64),
        "ids": torch.randint(VOCAB, (b, s), generator=generator),
        "y": y,
        "t": torch.randn(b, s, generator=generator, dtype=torch.float64),
        "mask": torch.rand(b, s, generator=generator) > 0.3,
        "scale": 0.5 + math.floor(seed),
        "flag": seed % 2 == 1,
        "mode": "mean" if seed % 2 else "max",
    }


OPTIONAL = ("mask", "scale", "flag", "mode")


def make_batch(recipe: Recipe, seed: int = 1) -> Batch:
    """The batch that the recipe is planned with, and others of its kind."""
    whole = _all(recipe, seed)
    plain = {"scale": 1.0, "flag": True, "mode": "mean"}
    kept = {k: v for k, v in whole.items() if k not in OPTIONAL}
    for name in recipe.options:
        kept[name] = whole["mask"] if name == "mask" else _all(recipe, 1)[name] if name in plain else whole[name]
    return kept
