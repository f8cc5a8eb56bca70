"""Insert the transfers to and from host memory into a stage's instructions. The instruction OFFLOAD starts a copy to
host memory, FETCH starts a copy back, and FREE frees device memory.

- Activations: after the forward of a block call, OFFLOAD moves the activations that the call keeps to host memory.
  FETCH brings them back one computation ahead of the backward. This is done only if at least one other computation lies
  between.
- Optimizer states: every step starts with a FETCH of each parameter, because the optimizer has changed it in host
  memory. The parameters are fetched in the order in which they are read. OFFLOAD copies gradients to the host after the
  last backwards, as soon as they are complete.
- Parameters: a FETCH comes one computation ahead of every block call that reads them. A FREE follows the call, unless
  the next computation reads them as well. Parameters that ZeRO-3 shards are fetched right before they are gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.program import OFFLOADS, CallData, Offload
from partitioner.runtime.program.sharded_buckets import COMPUTING, list_states_read_by

_BACKWARD = frozenset({"B", "I", "W"})

_APART = 2  # activations are offloaded only if forward and backward are further apart, in computations


def select_offloads(offload: Sequence[Offload], train: bool) -> tuple[Offload, ...]:
    """Return the kinds of data in ``offload``, such as ``"optimizer"``, that a program can keep in host memory, in a
    fixed order. ``train``: whether the program trains; if not, only parameters can be offloaded."""
    kinds = OFFLOADS if train else ("parameters",)
    return tuple(kind for kind in kinds if kind in offload)


def with_parking(instructions: Sequence[Instruction], runs: Sequence[bool]) -> list[Instruction]:
    """Return ``instructions``, the list of one pipeline rank, with instructions that offload activations: OFFLOAD (copy
    to host memory) after a forward, and FETCH (copy back) one computation before the backward that needs them.
    Activations whose backward follows soon stay on the device. Each forward instruction must run a single block call
    (such as a layer). ``runs``: for each block call of the stage, whether it has a backward."""
    places = [index for index, i in enumerate(instructions) if i.op in COMPUTING]
    number = {index: k for k, index in enumerate(places)}
    ahead: dict[tuple[int, int | None], int] = {}
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    for index, i in enumerate(instructions):
        if i.calls is None or i.op not in ("F", "B", "I"):
            continue
        for call in range(*i.calls):
            if not runs[call]:
                continue
            if i.op == "F":
                ahead[call, i.microbatch] = index
                continue
            start = ahead[call, i.microbatch]
            if number[index] - number[start] <= _APART:
                continue
            at: dict[str, Any] = {"stage": i.stage, "microbatch": i.microbatch, "calls": (call, call + 1)}
            after.setdefault(start, []).append(Instruction(op="OFFLOAD", **at))
            before.setdefault(places[number[index] - 1], []).append(Instruction(op="FETCH", **at))
    return list(_insert_instructions(instructions, before, after))


def with_fetches(
    instructions: Sequence[Instruction], calls: Sequence[CallData], hosted: Collection[str]
) -> list[Instruction]:
    """Return ``instructions``, the list of one pipeline rank, with one FETCH (copy from host memory) of each parameter
    in ``hosted`` at the start of the step, in the order in which the parameters are read. ``hosted``: names of the
    parameters whose values are in host memory. ``calls``: the block calls (such as layers) of the stage.

    A forward is split before each block call that reads a parameter that no earlier call reads, so that the forward
    does not wait for all transfers.
    """
    seen: set[str] = set()
    fetches: list[Instruction] = []
    result: list[Instruction] = []
    for i in instructions:
        start = i.calls[0] if i.calls is not None else 0
        for position in range(*i.calls) if i.op == "F" and i.calls is not None else (None,):
            here = i if position is None else i.model_copy(update={"calls": (position, position + 1)})
            new = tuple(dict.fromkeys(s for s in list_states_read_by(here, calls) if s in hosted and s not in seen))
            if not new:
                continue
            fetches.append(Instruction(op="FETCH", stage=i.stage, states=new))
            seen.update(new)
            if position is not None and position > start:
                result.append(i.model_copy(update={"calls": (start, position)}))
                start = position
        cut = i.calls is not None and start > i.calls[0]
        result.append(i.model_copy(update={"calls": (start, i.calls[1])}) if cut and i.calls is not None else i)
    return [*fetches, *result]


def with_passing(
    instructions: Sequence[Instruction],
    calls: Sequence[CallData],
    runs: Sequence[bool],
    hosted: Collection[str],
    buckets: Mapping[int, Sequence[str]],
) -> list[Instruction]:
    """Return ``instructions``, the list of one pipeline rank, with instructions that copy parameters in host memory to
    the device (FETCH) and free the copies (FREE). A parameter is copied one computation ahead of the computation that
    reads it. The copy is freed after this computation, unless the next one reads the parameter, too.

    ``hosted``: names of the parameters in host memory. ``calls``: the block calls (such as layers) of the stage.
    ``runs``: for each call, whether it has a backward. ``buckets``: the parameters that ZeRO shards, in buckets that
    are all-gathered together: number of a bucket -> names of its parameters. The shards of a bucket are fetched right
    before each all-gather of the bucket.
    """
    shared = {s for states in buckets.values() for s in states}
    places = [index for index, i in enumerate(instructions) if i.op in COMPUTING]
    reads = []
    for index in places:
        i = instructions[index]
        back = i.op in _BACKWARD
        of_calls = [c for p, c in enumerate(calls) if (runs[p] or not back) and _is_call_covered(i, p, c)]
        reads.append(dict.fromkeys(s for c in of_calls for s in c.states if s in hosted and s not in shared))
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    there: dict[str, None] = {}
    stage = instructions[0].stage
    for k, (index, read) in enumerate(zip(places, reads, strict=True)):
        following = reads[k + 1] if k + 1 < len(reads) else {}
        first = 0 if k == 0 else index
        for wanted in (read, following):
            new = tuple(s for s in wanted if s not in there)
            if new:
                before.setdefault(first, []).append(Instruction(op="FETCH", stage=stage, states=new))
                there |= dict.fromkeys(new)
        gone = tuple(s for s in there if s not in following)
        if gone:
            after.setdefault(index, []).append(Instruction(op="FREE", stage=stage, states=gone))
        there = {s: None for s in there if s in following}
    for index, i in enumerate(instructions):
        if i.op == "GATHER" and i.bucket is not None and not i.gradients:
            states = tuple(s for s in buckets[i.bucket] if s in hosted)
            before.setdefault(index, []).append(Instruction(op="FETCH", stage=stage, states=states))
    return list(_insert_instructions(instructions, before, after))


def with_gradients(
    instructions: Sequence[Instruction],
    buckets: Sequence[Sequence[str]],
    wanted: Sequence[str],
    tied: Collection[str],
) -> list[Instruction]:
    """Return ``instructions``, the list of one pipeline rank, with an OFFLOAD (copy to host memory) of the gradients of
    the parameters ``wanted``, whose optimizer runs on the host.

    The gradients of a bucket (which one collective reduces) are offloaded after the backward instruction that follows
    the last collective of the bucket. Gradients outside of buckets, and gradients of the parameters ``tied`` (which
    several stages share), are offloaded before STEP, the end of the step. ``buckets``: for each bucket, the names of
    its parameters.
    """
    reducing = (
        k for k, i in enumerate(instructions) if i.op in ("SCATTER", "REDUCE") or (i.op == "GATHER" and i.gradients)
    )
    last = {instructions[k].bucket: k for k in reducing}
    ends = {index: number for number, index in last.items() if number is not None}
    left = dict.fromkeys(wanted)
    waiting: list[Instruction] = []
    result: list[Instruction] = []
    for index, i in enumerate(instructions):
        if i.op == "STEP":
            result += waiting
            if left:
                result.append(Instruction(op="OFFLOAD", stage=i.stage, states=tuple(left)))
            waiting = []
        result.append(i)
        if i.op in _BACKWARD:
            result += waiting
            waiting = []
        if index in ends:
            states = tuple(s for s in buckets[ends[index]] if s in left and s not in tied)
            if states:
                waiting.append(Instruction(op="OFFLOAD", stage=i.stage, states=states))
                left = {s: None for s in left if s not in states}
    return result


def _is_call_covered(instruction: Instruction, position: int, call: CallData) -> bool:
    """Return whether ``instruction`` runs the block call ``call``, such as a layer. An instruction without a range of
    calls runs the prologue, the calls before the pipeline starts. ``position``: index of the call in the stage.
    """
    if instruction.calls is None:
        return call.prologue
    return instruction.calls[0] <= position < instruction.calls[1]


def _insert_instructions(
    instructions: Sequence[Instruction],
    before: Mapping[int, Sequence[Instruction]],
    after: Mapping[int, Sequence[Instruction]],
) -> Iterator[Instruction]:
    """Yield ``instructions`` in order, with further instructions inserted. ``before``, ``after``: index in
    ``instructions``, from 0 -> the instructions to insert before, or after, the instruction with this index."""
    for index, instruction in enumerate(instructions):
        yield from before.get(index, ())
        yield instruction
        yield from after.get(index, ())
