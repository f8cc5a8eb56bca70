"""A program: everything that the ranks need in order to run, as data.

One :class:`Program` describes all ranks. Ranks with the same pipeline coordinate share one :class:`Stage`, and thus one
instruction list; :meth:`Program.rank` derives what one rank does. A program is read, proven, simulated, drawn and run
from here alone: the model's class is not needed.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field

from passes.layouts import Layout
from runtime.listing import Data, Instruction, Instructions, Op

AXES = ("pp", "dp", "cp", "tp", "ep")  # outermost first: neighbouring ranks differ in the last axes
FORMAT_VERSION = 1

__all__ = [
    "AXES",
    "FORMAT_VERSION",
    "BlockGraph",
    "Bucket",
    "CallData",
    "Data",
    "InputData",
    "Instruction",
    "Instructions",
    "Op",
    "OutputData",
    "Program",
    "RankProgram",
    "Stage",
    "StateData",
    "Value",
    "weights_fingerprint",
]


class Value(Data):
    """A value that passes between calls: one rank's shape for one microbatch.

    ``requires_grad``: a gradient flows through it in backward, from the loss to a parameter.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    layout: str = "R"  # over tp


class BlockGraph(Data):
    """A block type's local graph with its collectives; ``nodes`` as ``passes/serialize.py`` writes them."""

    nodes: tuple[dict[str, Any], ...]
    states: tuple[str, ...]
    inputs: tuple[str, ...]


class CallData(Data):
    """One call of a block on a stage: which states and values it reads, which values it makes."""

    block: str
    path: str
    states: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    prologue: bool = False


class StateData(Data):
    """A parameter, buffer or constant: global shape, how it is sharded, on which stages it is read.

    ``grad_axes``: the mesh axes over which its gradient is a partial sum after the last backward.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: Literal["parameter", "buffer", "constant"]
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()
    layout: str = "R"  # over tp
    stages: tuple[int, ...] = ()
    grad_axes: tuple[str, ...] = ()


class InputData(Data):
    """A tensor of the global batch; ``batch_dim`` is split over microbatches and ``dp`` (``None``: read whole)."""

    value: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None = 0


class OutputData(Data):
    """A leaf of the model's result. ``batch``: ``S<dim>`` joined, ``P`` added up, ``R`` alike in every microbatch."""

    path: str
    value: str | None = None
    constant: Any = None
    batch: str = "R"
    layout: str = "R"  # over tp
    stage: int | None = None


class Bucket(Data):
    """Gradients that are reduced together: the same axes, the same type."""

    states: tuple[str, ...]
    axes: tuple[str, ...]


class Stage(Data):
    """What the ranks of one pipeline coordinate hold and do."""

    calls: tuple[CallData, ...]
    instructions: Instructions
    buckets: tuple[Bucket, ...] = ()
    checkpoint_calls: tuple[int, ...] = ()  # calls that are recomputed in backward rather than saved


class Program(Data):
    """The programs of all ranks. ``fingerprint`` is that of the weights' names, shapes and types."""

    mesh: dict[str, int]
    objective: Literal["train", "infer"]
    num_microbatches: int
    schedule: str
    blocks: dict[str, BlockGraph]
    states: dict[str, StateData]
    values: dict[str, Value]
    inputs: tuple[InputData, ...]
    outputs: tuple[OutputData, ...]
    loss: str | None
    stages: tuple[Stage, ...]
    fingerprint: str
    constants: dict[str, Any] = Field(default_factory=dict)  # name -> nested lists: what no checkpoint has
    tree: str | None = None

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values())

    @cached_property
    def strides(self) -> dict[str, int]:
        """How far apart neighbouring ranks on each axis are."""
        strides, step = {}, 1
        for axis in reversed(AXES):
            strides[axis] = step
            step *= self.mesh.get(axis, 1)
        return strides

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place on each mesh axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the mesh of {self.world_size} ranks {self.mesh}")
        return {axis: rank // self.strides[axis] % self.mesh.get(axis, 1) for axis in AXES}

    def rank_at(self, coordinates: dict[str, int]) -> int:
        return sum(self.strides[axis] * coordinates.get(axis, 0) for axis in AXES)

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that share all of ``rank``'s coordinates but those on ``axes``, in order of rank."""
        ranks = [rank - sum(self.strides[a] * c for a, c in self.coordinates(rank).items() if a in axes)]
        for axis in AXES:
            if axis in axes:
                ranks = [r + i * self.strides[axis] for r in ranks for i in range(self.mesh.get(axis, 1))]
        return tuple(ranks)

    def rank(self, rank: int) -> RankProgram:
        return RankProgram(program=self, rank=rank)


def weights_fingerprint(states: dict[str, StateData]) -> str:
    """A hash of the names, shapes and types of the parameters and buffers."""
    rows = [[name, s.shape, s.dtype, s.kind, s.aliases] for name, s in sorted(states.items()) if s.kind != "constant"]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


class RankProgram(Data):
    """One rank's program: its stage's instructions, its shards, its groups. Derived, and self-contained as JSON."""

    program: Program
    rank: int
    own: tuple[Instruction, ...] | None = None  # instead of the stage's, where a rank's list was edited

    @cached_property
    def coordinates(self) -> dict[str, int]:
        return self.program.coordinates(self.rank)

    @property
    def stage_index(self) -> int:
        return self.coordinates["pp"]

    @property
    def stage(self) -> Stage:
        return self.program.stages[self.stage_index]

    @property
    def instructions(self) -> Instructions:
        return self.stage.instructions if self.own is None else self.own

    def group(self, *axes: str) -> tuple[int, ...]:
        return self.program.group(self.rank, axes)

    def peer(self, stage: int) -> int:
        """The rank of ``stage`` that shares this rank's other coordinates."""
        return self.rank + (stage - self.stage_index) * self.program.strides["pp"]

    @cached_property
    def states(self) -> dict[str, Layout]:
        """The states that this rank holds, and their layout over ``tp``."""
        return {name: Layout.parse(s.layout) for name, s in self.program.states.items() if self.stage_index in s.stages}

    def with_instructions(self, instructions: tuple[Instruction, ...]) -> Self:
        return self.model_copy(update={"own": instructions})
