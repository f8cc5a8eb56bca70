"""Instructions of a rank, compact instruction lists, and the communication events that other ranks observe.

The instruction list of a pipeline schedule grows with the number of microbatches, because its steady state repeats. A
:class:`Listing` stores the list for the fewest microbatches in groups of instructions. It also stores how many
repetitions of each group are added for every further ``unit`` microbatches. It can be read like the full tuple of
instructions.

An event is a communication that an instruction starts. The events of a rank are in the order of its list. The prover
matches the events of different ranks: two collectives match only if their fields ``key`` and ``microbatch`` are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter
from typing import Annotated, Literal, overload

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
    """Base class of the data of a program (what each rank of a plan executes): immutable, rejects unknown keys,
    compares by value.

    JSON keeps infinities as the constant ``Infinity``, because attention masks contain them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Instruction(Data):
    """One operation of a rank. Fields that an operation does not use are ``None`` or empty.

    ======== =============================================================================================
    op       meaning
    ======== =============================================================================================
    LOAD     slice ``microbatch`` of the batch inputs ``values`` for this rank
    TOTAL_F  run the stage's prologue calls on ``microbatch``, and add their results ``values`` to the totals
    TOTAL    all-reduce the totals ``values`` over ``axes``; afterwards every microbatch may read them
    RECV_F   receive ``values`` of ``microbatch`` from the stage ``peer`` (same other coordinates)
    F        run the forward of the calls ``calls[0]:calls[1]`` of the stage on ``microbatch``
    SEND_F   send ``values`` of ``microbatch`` to the stage ``peer``
    RECV_B   receive the gradients of ``values`` from the stage ``peer``
    B        run the backward of the calls ``calls[0]:calls[1]``, last call first: gradients of inputs and of
             parameters
    I, W     run the two halves of B: I computes gradients of inputs, W computes gradients of parameters
    SEND_B   send the gradients of ``values`` to the stage ``peer``
    GATHER   start to all-gather the parameters of ``bucket`` over their ZeRO axes; with ``gradients``: start to
             all-gather its gradients over ``axes``, the level over which they were scattered last
    SCATTER  start to reduce-scatter the gradients of ``bucket`` over their ZeRO axes; with ``axes``: start to
             reduce-scatter what this rank holds of them over this level of the bucket
    REDUCE   start to all-reduce the gradients of ``bucket`` over its axes; under ZeRO its shards of them, and
             with levels the shards that the last SCATTER left
    SYNC     sum the gradients of the tied ``states`` over the stages that share them, and wait
    UPDATE   set the buffers ``states`` to their new values: those that ``microbatch`` computed, or the sums over
             all microbatches and ranks of ``dp``; stages that share a buffer receive the value from the stage
             that computes it
    OFFLOAD  start to move the tensors that F saved for ``calls`` and ``microbatch`` to host memory; with
             ``states``: start to copy their gradients, which are complete, there
    FETCH    start to move the saved tensors of ``calls`` and ``microbatch`` back; with ``states``: start to copy
             parameters, or this rank's ZeRO pieces of them, from host memory
    FREE     release ``values`` of ``microbatch``; with ``gradients``: release their gradients instead; with
             ``bucket``: release its parameters, except this rank's ZeRO pieces; with ``states``: release those
             parameters on the device, whose values remain in host memory
    STEP     wait for all reductions; afterwards every gradient is complete
    ======== =============================================================================================

    The prover checks the following rules, and an executor may rely on them:

    * ``stage`` and ``peer`` are pipeline coordinates. ``calls`` are positions in ``Stage.calls``: prologue calls first,
      then calls that other stages run as well, then the stage's own calls. Ranges of F and B have no prologue calls.
    * A value exists per microbatch, from the LOAD, RECV_F or F that creates it (never twice) until its FREE. A total
      has no microbatch: it exists from TOTAL until a FREE without microbatch, and every microbatch reads it by its
      name. Other results of the calls of TOTAL_F are released when it ends. A model's output is collected when it is
      created.
    * F saves the tensors that its backward needs, separately from the values: a FREE may follow at once. B releases the
      saved tensors. I releases those that W does not need, and keeps the gradients that W needs; W releases the rest.
    * A call has a backward if one of its outputs requires a gradient (:attr:`Value.requires_grad`); B, I and W skip
      other calls. The gradient of a value is the sum of the gradients of all its readers on the stage and of RECV_B; it
      is zero if nothing was added. The gradient of the loss starts as 1, in every microbatch. Gradients exist until
      their own FREE.
    * A send starts a transfer and does not wait for it; the transfer keeps its own reference to the tensors. Between
      two ranks the transfers of one direction (``_F``, ``_B``) form one FIFO channel that advances by itself; a receive
      waits for its transfer. REDUCE also only starts; there is one FIFO channel per group. TOTAL, SYNC and STEP wait.
    * SYNC precedes the REDUCE of its states: gradients are summed over the stages first, then over ``grad_axes``. For
      ZeRO-sharded states SYNC sums the shards, after their SCATTER and REDUCE. If no backward of the stage adds to a
      bucket, it has neither, and its shards are zero.
    * Parameters that ZeRO shards (:attr:`StateData.zero_axes`) are read between their GATHER and FREE; an instruction
      that reads them waits for the GATHER. Under ZeRO 1 and 2 they are not freed, and are gathered once per step,
      because the optimizer has changed the shards. GATHER and SCATTER have one FIFO channel per group each, separate
      from the channels of REDUCE and of the blocks' collectives.
    * A buffer that forward changes (:attr:`StateData.update`) gets its new value by one UPDATE, after the last
      instruction that reads the old value. Every microbatch reads the old value and computes the same new one or, for a
      buffer with ``keeps``, one summand. Stages that share buffers UPDATE them together, and wait for each other.
    * A backward waits for the FETCH of the saved tensors that an OFFLOAD moved. A value that several calls of the stage
      read is not moved.
    * Parameters whose values are in host memory (:attr:`Program.offload`) are read, or GATHERed, after their FETCH, for
      which the reader waits. They are fetched once per step, because the optimizer has changed them, or, if parameters
      are offloaded, for each time until their FREE (for shards: until the GATHER ends). The gradients of all trained
      parameters are OFFLOADed once, before STEP.
    * A bucket with levels (:attr:`Bucket.levels`) is reduced by several instructions, each of which waits for the one
      before: a SCATTER for each level, REDUCE if axes remain, and a GATHER for each level in reverse order. Only one
      bucket at a time is gathered over its first level; the next one waits for it.
    * Under ZeRO 2 and 3 a SCATTER takes the gradients that were added since the last one, adds their sum to the shard
      and releases their memory; it waits for the SCATTERs of earlier backwards.
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
        """Return the name of the instruction's operation, such as ``SEND_F``; ``GATHER_B`` for a GATHER of
        gradients.
        """
        return "GATHER_B" if self.op == "GATHER" and self.gradients else self.op

    def __str__(self) -> str:
        """Return a short text: stage, operation, and index of the microbatch or bucket (the set of parameters that the
        operation is about), such as ``0F3`` or ``0REDUCE:1``. Operations that torch.distributed.pipelining also has are
        named as there.
        """
        tail = "" if self.microbatch is None else str(self.microbatch)
        if self.bucket is not None:
            tail = f":{self.bucket}"
        return f"{self.stage}{self.word}{tail}"


class Part(Data):
    """A group of consecutive instructions of a compact instruction list (:class:`Listing`). The group is repeated, each
    time with higher microbatch numbers.

    ``body``: the instructions of the first repetition in the shortest form of the list, that with the fewest
    microbatches. ``times``: number of repetitions in that form. ``shift``: number by which the microbatch numbers
    increase from one repetition to the next. The full list is that form, extended several times by :attr:`Listing.unit`
    microbatches. Each extension adds ``more`` repetitions, and increases all microbatch numbers of the group by
    ``moved``. For example, the backwards and forwards ``B0 F2 B1 F3 B2 F4`` are ``B0 F2`` with 3 ``times`` and
    ``shift`` 1; if the list is extended by one microbatch and ``more`` is 1, ``B3 F5`` follows.
    """

    body: tuple[Instruction, ...]
    times: Annotated[int, Field(ge=1)] = 1
    shift: Annotated[int, Field(ge=0)] = 0
    more: Annotated[int, Field(ge=0)] = 0
    moved: Annotated[int, Field(ge=0)] = 0


class Listing(Data, Sequence[Instruction]):
    """A compact instruction list of a pipeline stage, which can be read like the full sequence. Instructions that
    repeat with the microbatches are stored once.

    The shortest form of the list is the one with the fewest microbatches. ``parts``: the groups of instructions of this
    form, with their numbers of repetitions. The full list is this form after ``steps`` extensions, each of which adds
    ``unit`` microbatches. See :class:`Part` for an example.
    """

    steps: Annotated[int, Field(ge=0)]
    unit: Annotated[int, Field(ge=1)]
    parts: tuple[Part, ...]

    @cached_property
    def all_instructions(self) -> tuple[Instruction, ...]:
        """Return all instructions of this compact list, with repetitions written out, in execution order."""
        return tuple(
            _shift_microbatch(instruction, part.moved * self.steps + part.shift * again)
            for part in self.parts
            for again in range(part.times + part.more * self.steps)
            for instruction in part.body
        )

    @property
    def even(self) -> bool:
        """Return whether counts of instructions can be extrapolated from short lists, because every extension by
        :attr:`unit` microbatches is uniform: for each group of repeated instructions, it adds exactly ``unit``
        microbatches, or increases the microbatch numbers by ``unit``, or changes nothing.
        """
        unit = self.unit
        return all(p.moved in (0, unit) and p.more * (p.shift or unit + 1) in (0, unit) for p in self.parts)

    def extend(self, steps: int) -> Listing:
        """Return this list for another number of microbatches: the shortest form (the one with the fewest
        microbatches), extended ``steps`` times by :attr:`unit` microbatches.
        """
        return Listing(steps=steps, unit=self.unit, parts=self.parts)

    def __len__(self) -> int:
        return sum(len(part.body) * (part.times + part.more * self.steps) for part in self.parts)

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Instruction, ...]: ...
    def __getitem__(self, index: int | slice) -> Instruction | tuple[Instruction, ...]:
        return self.all_instructions[index]

    def __iter__(self) -> Iterator[Instruction]:  # type: ignore[override]  # its fields are nobody's to iterate over
        return iter(self.all_instructions)


# Listing first: pydantic would otherwise accept it as a sequence and expand it to a tuple.
Instructions = Annotated[Listing | tuple[Instruction, ...], Field(union_mode="left_to_right")]


def count_repetitions(instructions: Instructions) -> Iterator[tuple[Instruction, int]]:
    """Yield each distinct instruction of the list ``instructions`` with the number of times that it occurs.

    Occurrences that differ only in the microbatch number count as one instruction if the list is stored compactly (a
    :class:`Listing`); the first occurrence is yielded.
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
    """Return ``instruction`` with ``microbatches`` added to its microbatch number. An instruction without a microbatch
    number is returned unchanged.
    """
    if not microbatches or instruction.microbatch is None:
        return instruction
    return with_microbatch(instruction, instruction.microbatch + microbatches)


def with_microbatch(instruction: Instruction, microbatch: int) -> Instruction:
    """Return a copy of ``instruction`` whose microbatch number is ``microbatch``. Its number must not be ``None``
    before.

    The copy shares all other fields. It is made without pydantic's ``model_copy``, because the list of a large training
    step has hundreds of thousands of instructions, and no field needs to be checked again.
    """
    copy = object.__new__(Instruction)
    fields = instruction.__dict__.copy()
    fields["microbatch"] = microbatch
    put = object.__setattr__
    put(copy, "__dict__", fields)
    put(copy, "__pydantic_fields_set__", instruction.__pydantic_fields_set__)
    put(copy, "__pydantic_extra__", None)
    put(copy, "__pydantic_private__", None)
    return copy


_FORM_FIELDS = attrgetter("op", "stage", "calls", "values", "peer", "axes", "bucket", "states", "gradients")


@dataclass(frozen=True)
class Forms:
    """The distinct instructions of a list. Instructions that differ only in the microbatch number count as one, called
    a form. A list has few forms, so results that do not depend on the microbatch are computed once for each form.

    ``firsts``: the first instruction of each form. ``numbers``: for each instruction of the list, the index of its form
    in ``firsts``.
    """

    firsts: tuple[Instruction, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, instructions: Iterable[Instruction]) -> Forms:
        """Return the forms (instructions up to the microbatch number) of ``instructions``. The repetitions of a
        :class:`Listing` are not expanded.
        """
        if isinstance(instructions, Listing):
            steps, parts = instructions.steps, instructions.parts
            bodies = [(_shift_microbatch(i, part.moved * steps) for i in part.body) for part in parts]
            every = cls.of(chain.from_iterable(bodies))
            of_body, repeated = iter(every.numbers), list[int]()
            for part in parts:
                repeated += [*islice(of_body, len(part.body))] * (part.times + part.more * steps)
            return cls(every.firsts, tuple(repeated))
        known: dict[tuple[object, ...], int] = {}
        firsts: list[Instruction] = []
        numbers: list[int] = []
        for instruction in instructions:
            key = instruction.microbatch is None, _FORM_FIELDS(instruction)
            number = known.get(key)
            if number is None:
                number = known[key] = len(firsts)
                firsts.append(instruction)
            numbers.append(number)
        return cls(tuple(firsts), tuple(numbers))


@dataclass(frozen=True, slots=True)
class CollectiveEvent:
    """A collective that a rank starts, over the mesh axes ``axes`` or, if ``axes`` is empty, over the pipeline stages
    ``stages`` (indices).

    ``key``: data that all participants must agree on, such as operation, shape and dtype. ``what``: description for
    people, without the microbatch. ``node``: name of the graph node that is the collective; empty if an instruction
    itself is the collective. ``waits``: whether the rank blocks until all members have entered the collective.
    ``count``: number of equal collectives in a row that this event stands for; ``what`` describes the first.
    ``microbatch``: for a collective in a graph, the microbatch on which the graph runs; participants must agree on it
    too.
    """

    axes: tuple[str, ...]
    key: Hashable
    what: str  # for people: all_reduce float32[4, 8] over tp
    node: str = ""
    stages: tuple[int, ...] = ()
    waits: bool = True
    count: int = 1
    microbatch: int | None = None

    @property
    def text(self) -> str:
        """Return a description of the collective for people, with the microbatch."""
        return self.what if self.microbatch is None else f"{self.what} on microbatch {self.microbatch}"

    def matches(self, other: CollectiveEvent) -> bool:
        """Return whether this event and ``other``, an event of another rank, are the same collective: ``key`` and
        ``microbatch`` are equal.
        """
        return self.microbatch == other.microbatch and self.key == other.key


@dataclass(frozen=True, slots=True)
class SendEvent:
    """A rank starts to send the values named ``values`` (``direction`` ``F``) or their gradients (``B``) of a
    microbatch to the pipeline stage with the index ``peer``.
    """

    direction: Literal["F", "B"]
    peer: int
    values: tuple[str, ...]
    microbatch: int | None

    @property
    def text(self) -> str:
        """Return a description for people."""
        return _format_moved(self.direction, self.values, self.microbatch)


@dataclass(frozen=True, slots=True)
class ReceiveEvent:
    """A rank waits for the values named ``values`` (``direction`` ``F``) or their gradients (``B``) of a microbatch
    from the pipeline stage with the index ``peer``.
    """

    direction: Literal["F", "B"]
    peer: int
    values: tuple[str, ...]
    microbatch: int | None

    @property
    def text(self) -> str:
        """Return a description for people."""
        return _format_moved(self.direction, self.values, self.microbatch)

    def matches(self, sent: SendEvent) -> bool:
        """Return whether ``sent`` is the message that this event waits for."""
        return self.microbatch == sent.microbatch and self.values == sent.values


def _format_moved(direction: Literal["F", "B"], values: Sequence[str], microbatch: int | None) -> str:
    gradients = "gradients of " if direction == "B" else ""
    return f"{gradients}{', '.join(values)} of microbatch {microbatch}"


@dataclass(frozen=True)
class FinishEvent:
    """A rank waits until collectives that it started have ended. If ``key`` is ``None``, it waits for all of them;
    otherwise for those whose :attr:`CollectiveEvent.key` equals ``key``.
    """

    key: Hashable = None


Event = CollectiveEvent | SendEvent | ReceiveEvent | FinishEvent

Trace = tuple[tuple[int, Event], ...]  # (index of the instruction, event)
