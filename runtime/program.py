"""A program: everything that the ranks need in order to run, as data.

One :class:`Program` describes all ranks. Ranks with the same pipeline coordinate share one :class:`Stage`, and thus one
instruction list; :meth:`Program.rank` derives what one rank does. A program is read, proven, simulated, drawn and run
from here alone: the model's class is not needed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field

from passes.layouts import Layout, Shard, local_shape
from runtime.buckets import Bucket
from runtime.listing import Data, Instruction, Instructions, Op
from runtime.meshes import (
    AXES,
    EXPERT_AXES,
    HYBRID_AXES,
    axes_beside,
    expert_mesh,
    hybrid_mesh,
    num_ranks,
)

FORMAT_VERSION = 1
Offload = Literal["optimizer", "activations", "parameters", "disk"]
OFFLOADS: tuple[Offload, ...] = ("optimizer", "activations", "parameters", "disk")

__all__ = [
    "FORMAT_VERSION",
    "OFFLOADS",
    "BlockGraph",
    "Bucket",
    "CallData",
    "Data",
    "InputData",
    "Instruction",
    "Instructions",
    "Offload",
    "Op",
    "OutputData",
    "Program",
    "RankProgram",
    "Stage",
    "StateData",
    "Value",
    "shard_shape",
    "shards_of",
    "updated_states",
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
    context: str = "R"  # over cp, of which tp shards what each rank has


class BlockGraph(Data):
    """A block type's local graph with its collectives; ``nodes`` as ``passes/serialize.py`` writes them.

    ``again``: names of nodes whose results are quickly made again: what selective recomputation does not keep.
    """

    nodes: tuple[dict[str, Any], ...]
    states: tuple[str, ...]
    inputs: tuple[str, ...]
    again: tuple[str, ...] = ()


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

    ``parts``: the model's own parameters of which it is a stack along dim 0; what goes in and out is under their names.
    ``grad_axes``: the mesh axes over which its gradient is a partial sum after the last backward.
    ``zero_axes``: the mesh axes whose ranks share it, or what is kept for it, under the program's ``zero``: what the
    cuts over ``ep`` and ``tp`` leave is taken flat, in equal pieces but for the last (see ``runtime/pieces.py``).
    ``update``: the value that a buffer takes at the end of a step, laid out as it is; with ``keeps`` the buffer takes
    the sum of this value over microbatches and ranks of ``dp``, and ``keeps`` times what it held.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: Literal["parameter", "buffer", "constant"]
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    layout: str = "R"  # over tp
    expert_layout: str = "R"  # over ep
    stages: tuple[int, ...] = ()
    grad_axes: tuple[str, ...] = ()
    zero_axes: tuple[str, ...] = ()
    update: str | None = None
    keeps: float | None = None


class InputData(Data):
    """A tensor of the global batch; ``batch_dim`` is split over microbatches and ``dp`` (``None``: read whole).

    ``number``: the batch has a Python number of this type, which the program reads as a 0-dimensional tensor.
    """

    value: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None = 0
    number: Literal["int", "float"] | None = None


class PlainValue(Data):
    """A value of an argument that is no tensor: its type, and how Python writes it."""

    kind: Literal["bool", "int", "float", "str", "NoneType"]
    text: str

    @classmethod
    def of(cls, value: bool | int | float | str | None) -> Self:
        return cls(kind=type(value).__name__, text=value if isinstance(value, str) else repr(value))  # type: ignore[arg-type]

    @property
    def value(self) -> bool | int | float | str | None:
        """The value itself."""
        if self.kind in ("int", "float"):
            return int(self.text) if self.kind == "int" else float(self.text)
        return {"str": self.text, "NoneType": None}.get(self.kind, self.text == "True")

    def __str__(self) -> str:
        return repr(self.value)


class ArgumentData(Data):
    """A parameter of the model's ``forward``; ``default``: absent where it has none, or one that is no plain value."""

    name: str
    required: bool = False
    default: PlainValue | None = None


class GuardData(Data):
    """A decision that the forward took by numbers of the batch: ``expression``, as JSON of the nested lists that
    ``passes/lifted_numbers.py`` evaluates, had this ``outcome`` at ``where`` (``file:line``). The program holds for
    numbers of which that is true."""

    expression: str
    outcome: bool
    where: str = ""


class SignatureData(Data):
    """How the model is called. ``arguments``: of its ``forward``, in order; absent where they are not known. ``fixed``:
    by path, values of the planned batch that are no tensors, for which alone the program holds."""

    arguments: tuple[ArgumentData, ...] | None = None
    fixed: dict[str, PlainValue] = Field(default_factory=dict)
    guards: tuple[GuardData, ...] = ()


class OutputData(Data):
    """A leaf of the model's result. ``batch``: ``S<dim>`` joined, ``P`` added up, ``R`` alike in every microbatch."""

    path: str
    value: str | None = None
    constant: Any = None
    batch: str = "R"
    layout: str = "R"  # over tp
    context: str = "R"  # over cp
    stage: int | None = None


class Stage(Data):
    """What the ranks of one pipeline coordinate hold and do."""

    calls: tuple[CallData, ...]
    instructions: Instructions
    buckets: tuple[Bucket, ...] = ()
    checkpoint_calls: tuple[int, ...] = ()  # calls that are recomputed in backward rather than saved
    selective_calls: tuple[int, ...] = ()  # calls of which only their block's ``again`` is


class Program(Data):
    """The programs of all ranks. ``fingerprint`` is that of the weights' names, shapes and types.

    ``mesh["ep"]`` ranks of dp x cp x tp share the experts, each expert over ``etp`` of them (0: as many as ``tp``).
    Experts see the ranks of a stage as the axes ``edp`` (replicas of an expert), ``ep`` and ``etp``, outermost first.

    ``zero``: what the ranks of a state's ``zero_axes`` share: optimizer states (1), gradients too (2), and parameters
    too (3). ``dp_shard``: the ranks of ``dp`` that do, neighbours (0: all); the rest, ``dp_replicate``, has replicas.
    Without ``zero``: those over which gradients are scattered first, where they are reduced level by level.

    ``data_shares``: how many microbatches each rank of ``dp`` has, in the order of the batch, where that is not
    ``num_microbatches``, the most of them, for all. A rank that has fewer passes over what its stage does for the rest.
    """

    mesh: dict[str, int]
    objective: Literal["train", "infer"]
    num_microbatches: int
    data_shares: tuple[int, ...] = ()
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
    initial: dict[str, Any] = Field(default_factory=dict)  # buffer -> a number, or nested lists: without any weights
    tree: str | None = None
    signature: SignatureData = Field(default_factory=SignatureData)
    etp: int = 0
    zero: Literal[0, 1, 2, 3] = 0
    dp_shard: int = 0
    fused_attention: bool = True  # kernels keep no scores, whatever the widths of heads
    tf32: bool = False  # products in float32 take the rounded operands of GPUs' tensor cores
    whole_scatter: bool = False  # scattering gradients receives all parts of them, which takes memory (Gloo)
    # what is kept in host memory, and whether the optimizer's states are on disk instead
    offload: tuple[Offload, ...] = ()

    @property
    def world_size(self) -> int:
        return num_ranks(self.mesh)

    def share(self, place: int) -> range:
        """The microbatches of the batch, in its order, that the ranks at ``place`` of ``dp`` have."""
        if not self.data_shares:
            return range(place * self.num_microbatches, (place + 1) * self.num_microbatches)
        start = sum(self.data_shares[:place])
        return range(start, start + self.data_shares[place])

    @property
    def batch_microbatches(self) -> int:
        """All microbatches of the batch."""
        return sum(self.data_shares) if self.data_shares else self.num_microbatches * self.mesh.get("dp", 1)

    @cached_property
    def expert_mesh(self) -> dict[str, int]:
        """The same ranks as the experts see them."""
        return expert_mesh(self.mesh, self.etp)

    @cached_property
    def hybrid_mesh(self) -> dict[str, int]:
        """``dp`` and ``edp`` in two: ranks that share states, and replicas of all these."""
        return hybrid_mesh(self.mesh, self.etp, self.dp_shard)

    def size(self, axis: str) -> int:
        """The ranks along an axis of the mesh, of the experts' mesh, or of what either is split into."""
        if axis in HYBRID_AXES:
            return self.hybrid_mesh[axis]
        return self.expert_mesh[axis] if axis in EXPERT_AXES else self.mesh.get(axis, 1)

    def grid(self, axes: Collection[str]) -> dict[str, int]:
        """The axes, with their sizes, among which ``axes`` are; their sizes multiply to the number of ranks.

        Of axes with one rank, which change no group, it may leave out any.
        """
        many = {axis for axis in axes if self.size(axis) > 1}
        return next(grid for grid in self._grids if many <= grid.keys())

    @cached_property
    def _grids(self) -> tuple[dict[str, int], ...]:
        plain, parts = {axis: self.mesh.get(axis, 1) for axis in AXES}, self.hybrid_mesh
        inner = {axis: n for axis, n in plain.items() if axis not in ("pp", "dp")}
        experts = {axis: n for axis, n in self.expert_mesh.items() if axis not in ("pp", "edp")}
        pp = {"pp": plain["pp"]}
        dp, edp = ({axis: parts[axis] for axis in HYBRID_AXES[i : i + 2]} for i in (0, 2))
        return plain, self.expert_mesh, pp | dp | inner, pp | edp | experts

    @property
    def experts_span_tp(self) -> bool:
        """Whether ranks along ``tp`` have different experts."""
        return self.mesh.get("ep", 1) > 1 and self.expert_mesh["etp"] < self.mesh.get("tp", 1)

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
        """The ranks that share all of ``rank``'s coordinates but those on ``axes``, of any mesh, by rank."""
        grid, step = self.grid(axes), 1
        ranks = [rank]
        for axis in reversed(grid):
            if axis in axes:
                place = rank // step % grid[axis]
                ranks = [r + (i - place) * step for i in range(grid[axis]) for r in ranks]
            step *= grid[axis]
        return tuple(ranks)

    def place(self, rank: int, axis: str) -> int:
        """A rank's place on an axis of the mesh, of the experts' mesh, or of what either is split into."""
        grid = self.grid((axis,))
        sizes = [*grid.values()]
        if axis not in grid:  # of one rank
            return 0
        at = [*grid].index(axis)
        return rank // math.prod(sizes[at + 1 :]) % sizes[at]

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place on each axis of the experts' mesh."""
        places, step = {}, 1
        for axis in reversed(self.expert_mesh):
            places[axis] = rank // step % self.expert_mesh[axis]
            step *= self.expert_mesh[axis]
        return places

    def rank(self, rank: int) -> RankProgram:
        return RankProgram(program=self, rank=rank)


def weights_fingerprint(states: dict[str, StateData]) -> str:
    """A hash of the names, shapes and types of the parameters and buffers."""
    rows = [[name, s.shape, s.dtype, s.kind, s.aliases] for name, s in sorted(states.items()) if s.kind != "constant"]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def shards_of(program: Program, state: str, rank: int) -> tuple[Shard, ...]:
    """The cuts of a state on ``rank``: over ``ep`` first, then over ``tp``; none where it is whole."""
    data = program.states[state]
    cuts = (
        (data.expert_layout, "ep", program.expert_coordinates(rank)),
        (data.layout, "tp", program.coordinates(rank)),
    )
    found = (Shard(Layout.parse(text), program.size(axis), places[axis]) for text, axis, places in cuts)
    return tuple(s for s in found if s.layout.is_shard and s.num_ranks > 1)


def shard_shape(program: Program, state: str) -> tuple[int, ...]:
    """The shape of one rank's part of a state. Raises ``ValueError`` where its layouts are malformed."""
    data = program.states[state]
    shape = data.shape
    for text, axis in ((data.expert_layout, "ep"), (data.layout, "tp")):
        shape = local_shape(Layout.parse(text), shape, program.size(axis))
    return shape


def updated_states(program: Program) -> list[str]:
    """The buffers that a step changes."""
    return [name for name, state in program.states.items() if state.update is not None]


def shortened(instructions: Instructions, program: Program, num_microbatches: int) -> Instructions:
    """What is left of a stage's list for a rank that has only the first ``num_microbatches``.

    What is done once a step is left: reductions are entered by all ranks.
    """
    if num_microbatches >= program.num_microbatches:
        return instructions
    return tuple(i for i in instructions if i.microbatch is None or i.microbatch < num_microbatches)


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

    @cached_property
    def share(self) -> range:
        """The microbatches of the batch that this rank has."""
        return self.program.share(self.coordinates["dp"])

    @cached_property
    def instructions(self) -> Instructions:
        return shortened(self.stage.instructions, self.program, len(self.share)) if self.own is None else self.own

    @property
    def places(self) -> tuple[int, ...]:
        """Where its instructions are in its stage's list, of which other ranks may have more; empty where none has."""
        kept, every = len(self.share), enumerate(self.stage.instructions if self.program.data_shares else ())
        return tuple(k for k, i in every if i.microbatch is None or i.microbatch < kept)

    def group(self, *axes: str) -> tuple[int, ...]:
        return self.program.group(self.rank, axes)

    def peer(self, stage: int) -> int:
        """The rank of ``stage`` that shares this rank's other coordinates."""
        return self.rank + (stage - self.stage_index) * self.program.strides["pp"]

    @cached_property
    def states(self) -> dict[str, Layout]:
        """The states that this rank holds, and their layout over ``tp``."""
        return {name: Layout.parse(s.layout) for name, s in self.program.states.items() if self.stage_index in s.stages}

    def shards(self, state: str) -> tuple[Shard, ...]:
        """How this rank's part of a state is cut out of the whole, one cut after the other."""
        return shards_of(self.program, state, self.rank)

    @cached_property
    def expert_coordinates(self) -> dict[str, int]:
        return self.program.expert_coordinates(self.rank)

    def is_first_holder(self, state: str) -> bool:
        """Whether no other rank of its stage has the same part of a state and comes before this one."""
        data = self.program.states[state]
        experts = Layout.parse(data.expert_layout).is_shard
        alike = ["edp", "etp"] if experts else ["dp", "cp", "tp"]
        if Layout.parse(data.layout).is_shard:
            alike.pop()
        # ranks that share a state have pieces of their own; only replicas of all these have the same
        same = axes_beside(alike, data.zero_axes)
        return all(self.program.place(self.rank, axis) == 0 for axis in same)

    def zero_group(self, state: str) -> tuple[int, ...]:
        """The ranks that share a state with this one; this one alone where it is not sharded."""
        return self.group(*self.program.states[state].zero_axes)

    def with_instructions(self, instructions: tuple[Instruction, ...]) -> Self:
        return self.model_copy(update={"own": instructions})
