"""States that are stacks of the model's own parameters: by the model's names outside, one tensor inside."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from passes.layouts import Layout, shard, shard_slices
from runtime.program import Program, StateData
from runtime.weights import Weights


def by_model_names(name: str, state: StateData, whole: Tensor) -> dict[str, Tensor]:
    """A whole state under all of the model's names, or its parts under theirs."""
    if state.parts:
        return dict(zip(state.parts, whole.unbind(0), strict=True))
    return dict.fromkeys((name, *state.aliases), whole)


def model_names(name: str, state: StateData) -> tuple[str, ...]:
    """What the model calls a state."""
    return state.parts or (name, *state.aliases)


def names_read(program: Program) -> set[str]:
    """All names by which the model knows the states of ``program``."""
    return {known for name, state in program.states.items() for known in model_names(name, state)}


class StackedWeights:
    """``weights`` with the stacks of a program in place of their parts; only the parts that are asked for are read."""

    def __init__(self, weights: Weights, stacks: dict[str, tuple[str, ...]]) -> None:
        self.weights = weights
        self.stacks = stacks
        self.origin = weights.origin
        self._parts = {part for parts in stacks.values() for part in parts}

    def names(self) -> list[str]:
        return [*(n for n in self.weights.names() if n not in self._parts), *self.stacks]

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        if name not in self.stacks:
            return self.weights.spec(name)
        specs = {self.weights.spec(part) for part in self.stacks[name]}
        found = specs.pop()
        return None if specs or found is None else ((len(self.stacks[name]), *found[0]), found[1])

    def read(self, name: str, layout: Layout, num_ranks: int, index: int) -> Tensor:
        if name not in self.stacks:
            return self.weights.read(name, layout, num_ranks, index)
        parts, inner = self.stacks[name], layout
        if layout.is_shard and layout.dim == 0:
            pieces = shard_slices(layout, len(parts), num_ranks, index)
            parts, inner = tuple(p for start, length in pieces for p in parts[start : start + length]), Layout("R")
        elif layout.is_shard:
            inner = shard(layout.dim - 1, layout.sections)
        return torch.stack([self.weights.read(part, inner, num_ranks, index) for part in parts])

    def identity(self, name: str) -> Hashable:
        return None if name in self.stacks else self.weights.identity(name)


def stacked(program: Program, weights: Weights, suffix: str = "") -> Weights:
    """``weights`` as ``program`` names them. ``suffix``: behind every name."""
    stacks = {
        name + suffix: tuple(part + suffix for part in state.parts)
        for name, state in program.states.items()
        if state.parts
    }
    return StackedWeights(weights, stacks) if stacks else weights
