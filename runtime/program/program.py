"""A program: everything that the ranks need to run a plan, as data.

One :class:`Program` describes all ranks. Ranks with the same pipeline coordinate share one :class:`Stage`, and thus one
instruction list; :meth:`Program.rank` derives the program of one rank. A program is sufficient to prove, simulate, draw
and run a plan: the model's class is not needed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from partitioner.passes.ir.layouts import Layout, Shard, local_shape
from partitioner.passes.shard.piece_counts import WHOLE, PieceCounts
from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.instructions import Data, Instruction, Instructions, Op
from partitioner.runtime.program.mesh import (
    AXES,
    EXPERT_AXES,
    HYBRID_AXES,
    expert_mesh,
    hybrid_mesh,
    num_ranks,
    subtract_axes,
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
    "hash_weights",
    "list_shards",
    "list_updated_states",
    "shard_shape",
]


class Value(Data):
    """A tensor that passes between calls of blocks (pieces of the model): its shape and dtype on one rank for one
    microbatch.

    ``requires_grad``: whether backward computes its gradient. ``layout`` and ``context``: how the tensor is distributed
    over ``tp`` and over ``cp``: ``S<dim>`` sharded on a dim, ``R`` replicated, ``P`` a partial sum.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    layout: str = "R"  # over tp
    context: str = "R"  # over cp; tp shards the part that each cp rank has


class BlockGraph(Data):
    """The graph of a block (a piece of the model that may occur repeatedly, such as a layer) on one rank, with its
    collectives.

    ``nodes``: the graph's nodes as JSON data, in the form that ``passes/ir/serialize.py`` writes. ``states``,
    ``inputs``: names of the placeholders for parameters and buffers, and for other tensors. ``again``: names of nodes
    that are cheap to recompute; selective recomputation does not save their results. ``pieces``: collectives over
    ``tp`` can be cut into pieces that overlap with matrix products. These are four numbers of pieces: of all-gathers
    and of reduce-scatters in forward, and of all-gathers and of reduce-scatters in backward; 0: not cut.
    """

    nodes: tuple[dict[str, Any], ...]
    states: tuple[str, ...]
    inputs: tuple[str, ...]
    again: tuple[str, ...] = ()
    pieces: PieceCounts = WHOLE

    @model_serializer(mode="wrap")
    def _leave_out_pieces(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return this block as JSON data. The field ``pieces`` is left out if no collective is cut into pieces; the
        file is then equal to that of an earlier version without this field.
        """
        data: dict[str, Any] = serialize(self)
        if not any(self.pieces):
            data.pop("pieces", None)
        return data


class CallData(Data):
    """One call of a block (a piece of the model, such as a layer) on a pipeline stage.

    ``block``: name of the block. ``path``: path of the module in the model. ``states``, ``inputs``: names of the
    parameters and buffers, and of the tensors, that it reads. ``outputs``: names of the tensors that it computes.
    ``prologue``: whether it runs on every microbatch before the pipeline starts, to compute totals (sums over the
    global batch that forward needs, such as the number of targets).
    """

    block: str
    path: str
    states: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    prologue: bool = False


class StateData(Data):
    """A parameter, buffer or constant: its global shape, its layouts, and the indices of the pipeline stages that read
    it.

    ``layout`` and ``expert_layout``: how it is distributed over ``tp`` and over ``ep``: ``S<dim>`` sharded, ``R``
    replicated. ``aliases``: other names of the same tensor. ``parts``: names of the model's parameters that are stacked
    in it along dim 0; weights are loaded and saved under these names. ``grad_axes``: mesh axes over which its gradient
    is a partial sum after the last backward. ``zero_axes``: mesh axes over which ZeRO divides it: its shard over ``ep``
    and ``tp`` is flattened and cut into equal pieces, the last ones shorter. ``update``: name of the value that becomes
    the new value of a buffer at the end of a step. If ``keeps`` is given, the new value is instead ``keeps`` times the
    old one plus the sum of the value ``update`` over microbatches and ``dp`` ranks.
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
    """A tensor of the global batch that a step reads. ``shape``, ``dtype``: of the whole tensor.

    ``value``: name under which the block calls (such as layers) read it. ``path``: where it is in the batch, such as
    ``input_ids``. ``batch_dim``: the dim that is split over microbatches and ``dp`` ranks; ``None``: every microbatch
    reads the whole tensor. ``number``: if the batch has a Python number here, its type; the number becomes a
    0-dimensional tensor. ``None``: the batch has a tensor.
    """

    value: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None = 0
    number: Literal["int", "float"] | None = None


class PlainValue(Data):
    """An argument value that is not a tensor. ``kind``: the name of its type. ``text``: its ``repr``, or the string
    itself.
    """

    kind: Literal["bool", "int", "float", "str", "NoneType"]
    text: str

    @classmethod
    def of(cls, value: bool | int | float | str | None) -> Self:
        return cls(kind=type(value).__name__, text=value if isinstance(value, str) else repr(value))  # type: ignore[arg-type]

    @property
    def value(self) -> bool | int | float | str | None:
        """Return the argument's value as a Python object of its type."""
        if self.kind in ("int", "float"):
            return int(self.text) if self.kind == "int" else float(self.text)
        return {"str": self.text, "NoneType": None}.get(self.kind, self.text == "True")

    def __str__(self) -> str:
        return repr(self.value)


class ArgumentData(Data):
    """An argument of the model's ``forward``. ``required``: whether it must be passed. ``default``: its default value;
    ``None`` if the argument has no default, or one that is not a bool, number, string or ``None``.
    """

    name: str
    required: bool = False
    default: PlainValue | None = None


class GuardData(Data):
    """A condition on numbers of the batch that decides which branch the model's ``forward`` takes. The plan's program
    is valid only for batches for which the condition has the recorded outcome.

    ``expression``: the condition, as JSON of nested lists (see ``passes/ir/lifted_numbers.py``). ``outcome``: its
    result when the model was traced. ``where``: its position in the source (``file:line``).
    """

    expression: str
    outcome: bool
    where: str = ""


class SignatureData(Data):
    """The arguments with which the model is called.

    ``arguments``: the arguments of ``forward``, in order; ``None`` if unknown. ``fixed``: path in the batch -> value,
    for everything in the planned batch that is not a tensor. ``guards``: conditions on the batch's numbers. The plan's
    program is valid only for batches with the values ``fixed`` that meet ``guards``.
    """

    arguments: tuple[ArgumentData, ...] | None = None
    fixed: dict[str, PlainValue] = Field(default_factory=dict)
    guards: tuple[GuardData, ...] = ()


class OutputData(Data):
    """A tensor or constant in the model's result.

    ``path``: where it is in the result. ``value``: name of the tensor that pipeline stage ``stage`` computes; if
    ``None``, the result is ``constant``. ``batch``: how the results of the microbatches are combined: ``S<dim>``
    concatenated along a dim, ``P`` summed, ``R`` that of any microbatch. ``layout``, ``context``: how the tensor is
    distributed over ``tp`` and ``cp``: ``S<dim>`` sharded, ``R`` replicated.
    """

    path: str
    value: str | None = None
    constant: Any = None
    batch: str = "R"
    layout: str = "R"  # over tp
    context: str = "R"  # over cp
    stage: int | None = None


class Stage(Data):
    """What all ranks of one pipeline stage run: calls of blocks (pieces of the model) and instructions.

    ``buckets``: sets of parameters whose gradients are reduced together. ``checkpoint_calls``, ``selective_calls``:
    positions of the calls that backward recomputes fully, or in part.
    """

    calls: tuple[CallData, ...]
    instructions: Instructions
    buckets: tuple[Bucket, ...] = ()
    checkpoint_calls: tuple[int, ...] = ()  # calls that are recomputed in backward rather than saved
    selective_calls: tuple[int, ...] = ()  # calls of which only the block's ``again`` nodes are recomputed


class Program(Data):
    """The programs of all ranks of a plan, as data.

    For experts of mixture-of-experts layers, the ranks of a pipeline stage form the axes ``edp`` (replicas of an
    expert), ``ep`` (different experts) and ``etp`` (ranks over which one expert is sharded), outermost first.
    """

    mesh: dict[str, int] = Field(
        description="Number of ranks along each mesh axis. The product over all axes except ep is the number of "
        "ranks; ep reuses the ranks of dp, cp and tp."
    )
    objective: Literal["train", "infer"] = Field(description="Kind of step: training (train), or forward only (infer).")
    num_microbatches: int = Field(
        description="Number of microbatches per step of the data-parallel rank that has the most."
    )
    data_shares: tuple[int, ...] = Field(
        default=(),
        description="Number of microbatches of each data-parallel rank, in the order of the batch; empty if all "
        "ranks have the same number. A rank with fewer than num_microbatches skips the instructions of "
        "the missing microbatches.",
    )
    schedule: str = Field(description="Name of the pipeline schedule, such as 1f1b.")
    blocks: dict[str, BlockGraph] = Field(
        description="Graph of each block (a piece of the model that may be called several times, such as a decoder "
        "layer), by name."
    )
    states: dict[str, StateData] = Field(description="Parameters, buffers and constants of the model, by name.")
    values: dict[str, Value] = Field(
        description="Shape, type and layout of each tensor that block calls pass to each other, by name."
    )
    inputs: tuple[InputData, ...] = Field(description="Tensors of the batch that a step reads.")
    outputs: tuple[OutputData, ...] = Field(description="Tensors and constants that a step returns.")
    loss: str | None = Field(description="Name of the tensor that is the loss; null if there is none.")
    stages: tuple[Stage, ...] = Field(description="Block calls and instructions of each pipeline stage, in order.")
    fingerprint: str = Field(
        description="Hash of the names, shapes and types of the parameters and buffers. Checkpoints of the same "
        "model have the same hash."
    )
    constants: dict[str, Any] = Field(
        default_factory=dict,
        description="Values of constants as nested lists, by name. Checkpoints do not contain constants.",
    )
    initial: dict[str, Any] = Field(
        default_factory=dict,
        description="Initial value of each buffer (a number or nested lists), by name, for engines that start "
        "without weights.",
    )
    tree: str | None = Field(
        default=None,
        description="Pytree structure of the model's result, as text for torch.utils._pytree; null if it is not known.",
    )
    signature: SignatureData = Field(
        default_factory=SignatureData,
        description="Arguments of the model's forward, and the conditions on the batch under which the program is "
        "valid.",
    )
    etp: int = Field(
        default=0, description="Number of ranks over which each expert is sharded; 0 means the size of tp."
    )
    zero: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="ZeRO stage: 0 shards nothing over the data-parallel ranks, 1 optimizer states, 2 also "
        "gradients, 3 also parameters.",
    )
    dp_shard: int = Field(
        default=0,
        description="Number of neighbouring data-parallel ranks over which ZeRO shards states (hybrid sharding); 0 "
        "means all of them. Without ZeRO, hierarchical reductions first reduce-scatter gradients over "
        "these ranks.",
    )
    fused_attention: bool = Field(
        default=True,
        description="Whether no attention kernel saves the matrix of attention scores for backward. If false, "
        "kernels save it when heads of queries and of values differ in width, as on CPUs.",
    )
    tf32: bool = Field(
        default=False,
        description="Whether float32 matrix products round their operands to TF32, for the tensor cores of GPUs.",
    )
    whole_scatter: bool = Field(
        default=False,
        description="Whether a rank in a reduce-scatter receives the whole buffers of all ranks before it sums "
        "them, as with Gloo. This needs additional memory.",
    )
    offload: tuple[Offload, ...] = Field(
        default=(),
        description="Kinds of data in host memory between uses: optimizer (its states), activations or parameters; "
        "disk means that optimizer states are on disk instead.",
    )

    @property
    def world_size(self) -> int:
        return num_ranks(self.mesh)

    def share(self, place: int) -> range:
        """Return the indices of the microbatches that ranks with ``dp`` coordinate ``place`` process, as a range.
        Microbatches are counted from 0 over the global batch.
        """
        if not self.data_shares:
            return range(place * self.num_microbatches, (place + 1) * self.num_microbatches)
        start = sum(self.data_shares[:place])
        return range(start, start + self.data_shares[place])

    @property
    def batch_microbatches(self) -> int:
        """Return the number of microbatches of the whole batch, over all ``dp`` ranks."""
        return sum(self.data_shares) if self.data_shares else self.num_microbatches * self.mesh.get("dp", 1)

    @cached_property
    def expert_mesh(self) -> dict[str, int]:
        """Return the mesh of the ranks as mixture-of-experts layers use it, as a dict: axis -> size, outermost first.

        ``pp`` stays; ``edp`` (replicas of an expert), ``ep`` (different experts) and ``etp`` (ranks that share an
        expert) replace ``dp``, ``cp`` and ``tp``.
        """
        return expert_mesh(self.mesh, self.etp)

    @cached_property
    def hybrid_mesh(self) -> dict[str, int]:
        """Return the sizes of the axes into which hybrid sharding splits ``dp`` and the experts' ``edp``, as a dict:
        axis -> number of ranks.

        ``dp_shard`` and ``edp_shard``: ranks that ZeRO divides parameters, gradients or optimizer states over.
        ``dp_replicate`` and ``edp_replicate``: replicas of such groups.
        """
        return hybrid_mesh(self.mesh, self.etp, self.dp_shard)

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``; 1 if the program's mesh does not have this axis.

        ``axis``: an axis of the mesh, of the experts' mesh (``edp``, ``ep``, ``etp``) or of hybrid sharding
        (``dp_shard``, ``dp_replicate``, ``edp_shard``, ``edp_replicate``).
        """
        if axis in HYBRID_AXES:
            return self.hybrid_mesh[axis]
        return self.expert_mesh[axis] if axis in EXPERT_AXES else self.mesh.get(axis, 1)

    def grid(self, axes: Collection[str]) -> dict[str, int]:
        """Return an arrangement of all ranks as a grid that has all of ``axes``, as a dict: axis -> size, outermost
        axis first. Consecutive ranks differ in the last axis.

        ``axes``: axes of the mesh, of the experts' mesh (``edp``, ``ep``, ``etp``) or of hybrid sharding (``dp_shard``,
        ``dp_replicate``, ...). Axes of size 1 may be missing in the result.
        """
        many = {axis for axis in axes if self.size(axis) > 1}
        return next(grid for grid in self._axis_grids if many <= grid.keys())

    @cached_property
    def _axis_grids(self) -> tuple[dict[str, int], ...]:
        """Return the four ways to arrange all ranks in a grid, each as axis -> size, outermost axis first: the mesh,
        the experts' mesh, and each of them with its data axis (``dp`` or ``edp``) split into a replicate and a shard
        axis.
        """
        plain, parts = {axis: self.mesh.get(axis, 1) for axis in AXES}, self.hybrid_mesh
        inner = {axis: n for axis, n in plain.items() if axis not in ("pp", "dp")}
        experts = {axis: n for axis, n in self.expert_mesh.items() if axis not in ("pp", "edp")}
        pp = {"pp": plain["pp"]}
        dp, edp = ({axis: parts[axis] for axis in HYBRID_AXES[i : i + 2]} for i in (0, 2))
        return plain, self.expert_mesh, pp | dp | inner, pp | edp | experts

    @property
    def experts_span_tp(self) -> bool:
        """Return whether ranks along ``tp`` hold different experts of a mixture-of-experts layer."""
        return self.mesh.get("ep", 1) > 1 and self.expert_mesh["etp"] < self.mesh.get("tp", 1)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Return, for each mesh axis, the difference between the global ranks of neighbours along it."""
        strides, step = {}, 1
        for axis in reversed(AXES):
            strides[axis] = step
            step *= self.mesh.get(axis, 1)
        return strides

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the mesh coordinates of the global rank ``rank``, as a dict: axis -> index from 0. Raise
        ``ValueError`` if the rank is outside the mesh.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the mesh of {self.world_size} ranks {self.mesh}")
        return {axis: rank // self.strides[axis] % self.mesh.get(axis, 1) for axis in AXES}

    def rank_at(self, coordinates: dict[str, int]) -> int:
        return sum(self.strides[axis] * coordinates.get(axis, 0) for axis in AXES)

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the global ranks, in ascending order, whose coordinates equal those of ``rank`` except on ``axes``.

        ``axes``: axes of the mesh, of the experts' mesh (``edp``, ``ep``, ``etp``) or of hybrid sharding (``dp_shard``,
        ``dp_replicate``, ``edp_shard``, ``edp_replicate``).
        """
        grid, step = self.grid(axes), 1
        ranks = [rank]
        for axis in reversed(grid):
            if axis in axes:
                place = rank // step % grid[axis]
                ranks = [r + (i - place) * step for i in range(grid[axis]) for r in ranks]
            step *= grid[axis]
        return tuple(ranks)

    def place(self, rank: int, axis: str) -> int:
        """Return the coordinate of ``rank`` on ``axis``, counted from 0.

        ``axis``: an axis of the mesh, of the experts' mesh (``edp``, ``ep``, ``etp``) or of hybrid sharding
        (``dp_shard``, ``dp_replicate``, ``edp_shard``, ``edp_replicate``).
        """
        grid = self.grid((axis,))
        sizes = [*grid.values()]
        if axis not in grid:  # an axis with one rank
            return 0
        at = [*grid].index(axis)
        return rank // math.prod(sizes[at + 1 :]) % sizes[at]

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of the global rank ``rank`` in the experts' mesh, as a dict: axis -> index from 0.

        The axes are ``pp``, ``edp`` (replicas of an expert), ``ep`` (different experts) and ``etp`` (ranks that share
        an expert).
        """
        places, step = {}, 1
        for axis in reversed(self.expert_mesh):
            places[axis] = rank // step % self.expert_mesh[axis]
            step *= self.expert_mesh[axis]
        return places

    def rank(self, rank: int) -> RankProgram:
        return RankProgram(program=self, rank=rank)


def hash_weights(states: dict[str, StateData]) -> str:
    """Return a hash (hex text) of the names, shapes and dtypes of the parameters and buffers in ``states`` (name ->
    parameter, buffer or constant). Constants do not count.
    """
    rows = [[name, s.shape, s.dtype, s.kind, s.aliases] for name, s in sorted(states.items()) if s.kind != "constant"]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def list_shards(program: Program, state: str, rank: int) -> tuple[Shard, ...]:
    """Return how to cut the part that ``rank`` holds out of the parameter or buffer named ``state``: up to two cuts,
    first over ``ep``, then over ``tp``. Each :class:`Shard` has the layout, the number of ranks, and the index of this
    rank among them. Empty if the rank holds the whole tensor. A further division by ZeRO is not included.
    """
    data = program.states[state]
    cuts = (
        (data.expert_layout, "ep", program.expert_coordinates(rank)),
        (data.layout, "tp", program.coordinates(rank)),
    )
    found = (Shard(Layout.parse(text), program.size(axis), places[axis]) for text, axis, places in cuts)
    return tuple(s for s in found if s.layout.is_shard and s.num_ranks > 1)


def shard_shape(program: Program, state: str) -> tuple[int, ...]:
    """Return the shape of the shard over ``ep`` and ``tp`` that one rank has of the parameter or buffer named
    ``state``, before ZeRO divides the shard. Raise ``ValueError`` if a layout is malformed.
    """
    data = program.states[state]
    shape = data.shape
    for text, axis in ((data.expert_layout, "ep"), (data.layout, "tp")):
        shape = local_shape(Layout.parse(text), shape, program.size(axis))
    return shape


def list_updated_states(program: Program) -> list[str]:
    """Return the names of the buffers whose value a step of ``program`` changes."""
    return [name for name, state in program.states.items() if state.update is not None]


def keep_first_microbatches(instructions: Instructions, program: Program, num_microbatches: int) -> Instructions:
    """Return the instructions for a rank that runs only the first ``num_microbatches`` microbatches of its pipeline
    stage: ``instructions`` without those of later microbatches. Instructions without a microbatch, such as reductions
    of gradients, are kept, because all ranks take part in reductions.

    ``instructions``: the list of the stage, for all ``program.num_microbatches`` microbatches.
    """
    if num_microbatches >= program.num_microbatches:
        return instructions
    return tuple(i for i in instructions if i.microbatch is None or i.microbatch < num_microbatches)


class RankProgram(Data):
    """The program of one rank: its instructions, shards and process groups, derived from the program of all ranks."""

    program: Program = Field(description="The program of all ranks.")
    rank: int = Field(description="The number of the rank, from 0.")
    own: tuple[Instruction, ...] | None = Field(
        default=None, description="The rank's own list of instructions; None means the list of its pipeline stage."
    )

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
        """Return the indices of the microbatches that this rank processes, as a range. Microbatches are counted from 0
        over the global batch.
        """
        return self.program.share(self.coordinates["dp"])

    @cached_property
    def instructions(self) -> Instructions:
        """Return the instructions of this rank. If the rank has no list of its own, they are the stage's list for this
        rank's microbatches.
        """
        return (
            keep_first_microbatches(self.stage.instructions, self.program, len(self.share))
            if self.own is None
            else self.own
        )

    @property
    def places(self) -> tuple[int, ...]:
        """Return, for each instruction of this rank, its position in the list of the pipeline stage, because a rank
        with fewer microbatches than others skips instructions. Empty if all ranks have equally many microbatches.
        """
        kept, every = len(self.share), enumerate(self.stage.instructions if self.program.data_shares else ())
        return tuple(k for k, i in every if i.microbatch is None or i.microbatch < kept)

    def group(self, *axes: str) -> tuple[int, ...]:
        return self.program.group(self.rank, axes)

    def peer(self, stage: int) -> int:
        """Return the rank of pipeline stage ``stage`` (an index) whose other mesh coordinates equal this rank's."""
        return self.rank + (stage - self.stage_index) * self.program.strides["pp"]

    @cached_property
    def states(self) -> dict[str, Layout]:
        """Return the parameters and buffers that this rank holds, as a dict: name -> layout over ``tp``."""
        return {name: Layout.parse(s.layout) for name, s in self.program.states.items() if self.stage_index in s.stages}

    def shards(self, state: str) -> tuple[Shard, ...]:
        """Return how to cut this rank's shard out of the parameter or buffer named ``state``: the cuts over ``ep`` and
        ``tp``, to be applied in this order. Each :class:`Shard` has the layout, the number of ranks, and the index of
        this rank among them. Empty if the rank holds the whole tensor.
        """
        return list_shards(self.program, state, self.rank)

    @cached_property
    def expert_coordinates(self) -> dict[str, int]:
        return self.program.expert_coordinates(self.rank)

    def is_first_holder(self, state: str) -> bool:
        """Return whether this rank has the lowest number among the ranks of its stage that hold the same part of the
        parameter or buffer named ``state``. Exactly one rank then writes or counts each part.
        """
        data = self.program.states[state]
        experts = Layout.parse(data.expert_layout).is_shard
        alike = ["edp", "etp"] if experts else ["dp", "cp", "tp"]
        if Layout.parse(data.layout).is_shard:
            alike.pop()
        # ranks that share a state hold different pieces; only replicas hold the same piece
        same = subtract_axes(alike, data.zero_axes)
        return all(self.program.place(self.rank, axis) == 0 for axis in same)

    def zero_group(self, state: str) -> tuple[int, ...]:
        """Return the global ranks among which ZeRO divides the parameter named ``state``, this rank included; only this
        rank if the parameter is not divided.
        """
        return self.group(*self.program.states[state].zero_axes)

    def with_instructions(self, instructions: tuple[Instruction, ...]) -> Self:
        return self.model_copy(update={"own": instructions})
