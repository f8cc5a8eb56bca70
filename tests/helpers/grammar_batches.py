"""How the batch of a run differs from the one that a plan was made with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.helpers.grammar_models import Batch, make_batch
from tests.helpers.grammar_recipes import Recipe

Change = Callable[[Recipe, Batch], Batch]


def _with(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda recipe, batch: batch | {name: change(batch[name])}


def _without(name: str) -> Change:
    return lambda recipe, batch: {k: v for k, v in batch.items() if k != name}


def _mask(recipe: Recipe) -> Tensor:
    return torch.rand(recipe.batch, recipe.length, generator=torch.Generator().manual_seed(3)) > 0.3


def _renamed(recipe: Recipe, batch: Batch) -> Batch:
    return {{"y": "labels"}.get(k, k): v for k, v in batch.items()}


# Each takes a batch with the planned keys, types and shapes. The first three keep them.
CHANGES: dict[str, Change] = {
    "model called": lambda recipe, batch: batch,
    "nothing": lambda recipe, batch: make_batch(recipe),
    "values": lambda recipe, batch: batch,
    "strides": _with("x", lambda x: x.transpose(0, 2).contiguous().transpose(0, 2)),
    "mask added": lambda recipe, batch: batch | {"mask": _mask(recipe)},
    "mask left out": _without("mask"),
    "mask is None": lambda recipe, batch: batch | {"mask": None},
    "mask inverted": lambda recipe, batch: batch | {"mask": ~batch.get("mask", _mask(recipe))},
    "number changed": lambda recipe, batch: batch | {"scale": 0.75},
    "number a tensor": lambda recipe, batch: batch | {"scale": torch.tensor(0.75, dtype=torch.float64)},
    "number whole": lambda recipe, batch: batch | {"scale": 2},
    "number left out": _without("scale"),
    "flag changed": lambda recipe, batch: batch | {"flag": False},
    "flag left out": _without("flag"),
    "string changed": lambda recipe, batch: batch | {"mode": "max"},
    "string unknown": lambda recipe, batch: batch | {"mode": "median"},
    "key missing": _without("y"),
    "unread key missing": _without("t"),
    "key misspelt": _renamed,
    "key added": lambda recipe, batch: batch | {"weight": batch["t"]},
    "float32": _with("x", Tensor.float),
    "int32": _with("ids", Tensor.int),
    "floats for ids": _with("ids", Tensor.double),
    "whole numbers for floats": _with("x", Tensor.long),
    "fewer samples": lambda recipe, batch: {k: v[:2] if isinstance(v, Tensor) else v for k, v in batch.items()},
    "shorter": lambda recipe, batch: {
        k: v[:, :-1] if isinstance(v, Tensor) and v.dim() > 1 else v for k, v in batch.items()
    },
    "one dim more": _with("x", lambda x: x.unsqueeze(0)),
    "array": lambda recipe, batch: batch | {"x": batch["x"].numpy()},
    "list": lambda recipe, batch: batch | {"ids": batch["ids"].tolist()},
}
KEEPING = ("nothing", "values", "strides")


def changed_batch(recipe: Recipe) -> Batch:
    """The batch that the plan is run on."""
    return CHANGES[recipe.change](recipe, make_batch(recipe, seed=2))
