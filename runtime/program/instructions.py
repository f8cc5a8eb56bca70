"""Instructions of a rank, compact instruction lists, and the communication events that other ranks observe.

The instruction list of a pipeline schedule grows with the number of microbatches, because its steady state repeats. A
:class:`Listing` stores the shortest list and the number of repetitions that each further group of ``unit`` microbatches
adds to each part. It can be read like the full tuple of instructions.

An event is a communication that an instruction starts. The events of a rank are in the order of its list. The prover
matches the events of different ranks: two events match only if their fields ``what`` are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, overload

from pydantic import BaseModel, ConfigDict, Field

from partitioner.passes.documented_model import DocumentedModel

Op = Literal[
    "LOAD",
    "TOTAL_F",
    "TOTAL",
    "RECV_F",
    "F",
    "SEND_F",
    "RECV_B",
    "B",
    "I",
    "W",
    "SEND_B",
    "GATHER",
    "SCATTER",
    "REDUCE",
    "SYNC",
    "UPDATE",
    "OFFLOAD",
    "FETCH",
    "FREE",
    "STEP",
]


class Data(BaseModel, metaclass=DocumentedModel):
    """Base class of the program's data: immutable, rejects unknown keys, compares by value.

    JSON keeps infinities as the constant ``Infinity``, because attention masks contain them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Instruction(Data):
    """One thing that a rank does. Fields that an operation does not use stay ``None`` or empty.

    ======== =============================================================================================
    op       meaning
    ======== =============================================================================================
    LOAD     take ``microbatch`` of the batch inputs ``values`` (this rank's slice)
    TOTAL_F  run the stage's prologue calls on ``microbatch``, adding their results ``values`` up
    TOTAL    all-reduce the totals ``values`` over ``axes``; afterwards every microbatch may read them
    RECV_F   receive ``values`` of ``microbatch`` from the stage ``peer`` (same other coordinates)
    F        run the calls ``calls[0]:calls[1]`` of the stage forward on ``microbatch``
    SEND_F   send ``values`` of ``microbatch`` to the stage ``peer``
    RECV_B   receive the gradients of ``values`` from the stage ``peer``
    B        backward of calls ``calls[0]:calls[1]``, last call first: gradients of inputs and of parameters
    I, W     the same in two halves: gradients of inputs; gradients of parameters
    SEND_B   send the gradients of ``values`` to the stage ``peer``
    GATHER   start gathering the parameters of bucket ``bucket`` over the axes that shard them; with ``gradients``:
             its gradients, over the level ``axes`` over which they were scattered last
    SCATTER  start adding up the gradients of bucket ``bucket`` over the axes that shard it: a shard to each rank; with
             ``axes``: what this rank has of them over this level of the bucket
    REDUCE   start adding up the gradients of bucket ``bucket`` over its axes; of a sharded one its shards, of one with
             levels what these left
    SYNC     add up the gradients of the tied ``states`` over the stages that share them
    UPDATE   let the buffers ``states`` take their new values, those of ``microbatch``, or what all microbatches and
             ranks of ``dp`` add to them; where several stages have them, that of the stage which makes the value
    OFFLOAD  start moving what F kept of ``calls`` for ``microbatch`` to host memory; with ``states``: start copying
             their gradients, which are whole, there
    FETCH    start bringing back what ``calls`` kept for ``microbatch``; with ``states``: start copying parameters, or
             this rank's shards of them, from host memory
    FREE     forget ``values`` of ``microbatch``; with ``gradients``: forget their gradients instead; with ``bucket``:
             forget its parameters, but for this rank's shard of them; with ``states``: forget those parameters, but for
             what host memory has
    STEP     wait for all reductions: every gradient is whole
    ======== =============================================================================================

    What the prover holds a program to, and an executor may build on:

    * ``stage`` and ``peer`` are pipeline coordinates. ``calls`` counts ``Stage.calls``: prologue calls first, then
      calls that other stages run as well, then the stage's own. ``F`` and ``B`` ranges have no prologue call.
    * A value exists per microbatch, from the LOAD, RECV_F or F that makes it (never twice) until its FREE. A total has
      no microbatch: it exists from TOTAL until a FREE without microbatch, and every microbatch reads it by its name.
      What TOTAL_F's calls make besides ``values`` is gone when it ends. A model's output is taken when it is made.
    * F keeps what its backward needs, apart from the values: a FREE may follow at once. B drops that; I drops what W
      does not need, and keeps the gradients that W does; W drops the rest.
    * A call has a backward if one of its outputs requires a gradient (:attr:`Value.requires_grad`); B, I and W pass
      over the others. Gradients of a value add up, those of all its readers on the stage and of RECV_B; one that
      nothing was added to is zero. The loss starts with 1, in every microbatch. They exist until their own FREE.
    * A send starts a transfer and does not wait for it; the transfer keeps its own reference to the tensors. Between
      two ranks the transfers of one direction (``_F``, ``_B``) are one FIFO channel that advances on its own; a
      receive waits for its transfer. REDUCE starts likewise: one FIFO channel per group. TOTAL, SYNC and STEP wait.
    * SYNC precedes the REDUCE of its states: first the sum over the stages, then that over ``grad_axes``. Of sharded
      states it adds up the shards, after their SCATTER and REDUCE; the shards of a bucket that no backward of the
      stage adds to have neither, and are zero.
    * Parameters that are sharded (:attr:`StateData.zero_axes`) are read between their GATHER and FREE; who reads them
      waits for the GATHER. Under ZeRO 1 and 2 they stay, and are gathered once a step, since an optimizer has changed
      the shards. GATHER and SCATTER are FIFO channels of a group each, beside that of REDUCE and of the graphs.
    * A buffer that forward changes (:attr:`StateData.update`) takes its new value by one UPDATE, after the last that
      reads the old one: every microbatch reads that, and makes the same new one, or, of one that ``keeps``, a part of
      the sum. Stages that share buffers UPDATE them together, and wait for each other.
    * What OFFLOAD moved is there for a backward after its FETCH, which it waits for. A value that several calls of the
      stage read stays where it is.
    * Parameters whose numbers are in host memory (:attr:`Program.offload`) are read, or GATHERed, after their FETCH,
      which is waited for: once a step, since an optimizer has changed them, or under ``parameters`` until their FREE
      (of shards: until the GATHER ends). The gradients of all that is trained are OFFLOADed once, before STEP.
    * A bucket with levels (:attr:`Bucket.levels`) is reduced in turns, each of which waits for the one before: a
      SCATTER for each level, REDUCE if axes are left, and a GATHER for each level in reverse. Only one bucket at a
      time is gathered over its first level: the next waits for it.
    * Under ZeRO 2 and 3 a SCATTER takes what was added since the last one, adds it to the shard and makes room; it
      waits for the SCATTER before.
    """

    op: Op
    stage: int
    microbatch: int | None = None
    calls: tuple[int, int] | None = None
    values: tuple[str, ...] = ()
    peer: int | None = None
    axes: tuple[str, ...] = ()
    bucket: int | None = None
    states: tuple[str, ...] = ()
    gradients: bool = False

    @property
    def word(self) -> str:
        """The name of the operation; ``GATHER_B`` for a GATHER of gradients."""
        return "GATHER_B" if self.op == "GATHER" and self.gradients else self.op

    def __str__(self) -> str:
        """Return the action name of torch.distributed.pipelining if it has one, else a name in the same form.

        The form is stage, operation, microbatch or bucket: ``0F3``, ``1SEND_B2``, ``0REDUCE:1``.
        """
        tail = "" if self.microbatch is None else str(self.microbatch)
        if self.bucket is not None:
            tail = f":{self.bucket}"
        return f"{self.stage}{self.word}{tail}"


class Part(Data):
    """A group of consecutive instructions of a :class:`Listing`, and how often it repeats.

    ``body``: the instructions of the first repetition in the shortest list. ``times``: repetitions in the shortest
    list. ``shift``: microbatches by which each repetition is later than the one before. Each time the list grows by
    ``unit`` microbatches, the part gets ``more`` repetitions, and all its microbatch numbers increase by ``moved``.
    """

    body: tuple[Instruction, ...]
    times: Annotated[int, Field(ge=1)] = 1
    shift: Annotated[int, Field(ge=0)] = 0
    more: Annotated[int, Field(ge=0)] = 0
    moved: Annotated[int, Field(ge=0)] = 0


class Listing(Data, Sequence[Instruction]):
    """A compact instruction list: ``parts`` of the shortest list, extended ``steps`` times by ``unit`` microbatches."""

    steps: Annotated[int, Field(ge=0)]
    unit: Annotated[int, Field(ge=1)]
    parts: tuple[Part, ...]

    @cached_property
    def expanded(self) -> tuple[Instruction, ...]:
        """All instructions of the list in execution order."""
        return tuple(
            _shift_microbatch(instruction, part.moved * self.steps + part.shift * again)
            for part in self.parts
            for again in range(part.times + part.more * self.steps)
            for instruction in part.body
        )

    @property
    def even(self) -> bool:
        """Whether every growth step adds exactly ``unit`` microbatches to each part, or shifts the part by ``unit``, or
        leaves it unchanged."""
        unit = self.unit
        return all(p.moved in (0, unit) and p.more * (p.shift or unit + 1) in (0, unit) for p in self.parts)

    def grown(self, steps: int) -> Listing:
        """Return this list extended ``steps`` times from its shortest form, instead of ``self.steps`` times."""
        return Listing(steps=steps, unit=self.unit, parts=self.parts)

    def __len__(self) -> int:
        return sum(len(part.body) * (part.times + part.more * self.steps) for part in self.parts)

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Instruction, ...]: ...
    def __getitem__(self, index: int | slice) -> Instruction | tuple[Instruction, ...]:
        return self.expanded[index]

    def __iter__(self) -> Iterator[Instruction]:  # type: ignore[override]  # its fields are nobody's to iterate over
        return iter(self.expanded)


# A listing first: it would pass for a tuple, written out.
Instructions = Annotated[Listing | tuple[Instruction, ...], Field(union_mode="left_to_right")]


def count_repetitions(instructions: Instructions) -> Iterator[tuple[Instruction, int]]:
    """Yield each distinct instruction in its first occurrence, and its number of repetitions.

    Repetitions differ only in the microbatch number.
    """
    if not isinstance(instructions, Listing):
        yield from ((instruction, 1) for instruction in instructions)
        return
    for part in instructions.parts:
        for instruction in part.body:
            yield (
                _shift_microbatch(instruction, part.moved * instructions.steps),
                part.times + part.more * instructions.steps,
            )


def _shift_microbatch(instruction: Instruction, microbatches: int) -> Instruction:
    if not microbatches or instruction.microbatch is None:
        return instruction
    update: dict[str, Any] = {"microbatch": instruction.microbatch + microbatches}
    return instruction.model_copy(update=update)


@dataclass(frozen=True)
class CollectiveEvent:
    """A collective over the mesh axes ``axes``, or over the pipeline stages ``stages``.

    ``what``: the data that all participants must agree on, such as operation, shape and type. ``waits``: whether the
    rank blocks until all members have entered the collective. ``count``: number of such collectives in a row; ``text``
    describes the first one.
    """

    axes: tuple[str, ...]
    what: Hashable
    text: str  # for people: all_reduce float32[4, 8] over tp
    node: str = ""
    stages: tuple[int, ...] = ()
    waits: bool = True
    count: int = 1


@dataclass(frozen=True)
class SendEvent:
    direction: Literal["F", "B"]
    peer: int
    what: Hashable
    text: str


@dataclass(frozen=True)
class ReceiveEvent:
    direction: Literal["F", "B"]
    peer: int
    what: Hashable
    text: str


@dataclass(frozen=True)
class FinishEvent:
    """The rank waits until all collectives that it started have ended, or only those whose ``what`` equals the one
    given."""

    what: Hashable = None


Event = CollectiveEvent | SendEvent | ReceiveEvent | FinishEvent

Trace = tuple[tuple[int, Event], ...]  # (index of the instruction, event)
