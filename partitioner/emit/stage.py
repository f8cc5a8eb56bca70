"""Build the instruction list of one pipeline rank: its forwards and backwards in order, with transfers, reductions and
frees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from partitioner.emit.buckets import PlannedBucket, build_turn_instruction, with_turns
from partitioner.emit.channels import Fetch
from partitioner.emit.offload import with_fetches, with_gradients, with_parking, with_passing
from partitioner.emit.routes import Routes
from partitioner.emit.zero import with_sharding
from partitioner.runtime.program.instructions import Forms, Instruction, with_microbatch
from partitioner.runtime.program.program import CallData, StateData
from partitioner.schedules.actions import Action, Order, group_stages_by_rank


@dataclass(frozen=True)
class StageFlow:
    """The gradients that the backward of each block call (such as a layer) of a pipeline stage reads and computes. All
    fields have one entry per call.

    ``takes``: the names of the values whose gradients its backward reads. ``gives``: the names of the values whose
    gradients it computes. ``runs``: whether the call has a backward.
    """

    takes: tuple[tuple[str, ...], ...]
    gives: tuple[tuple[str, ...], ...]
    runs: tuple[bool, ...]  # whether the call has a backward


@dataclass(frozen=True)
class StageJob:
    """All inputs from which the instructions of one pipeline rank are built. "Stage" means everything that the rank
    holds, in one or several virtual stages.

    - ``stage``: index of the rank along the mesh axis ``pp``. ``num_stages``: number of ranks along ``pp``.
      ``num_microbatches``: number of microbatches of a step. ``train``: whether there are backwards. ``routes``: the
      values sent between virtual stages. ``calls``: the block calls (such as layers) of the stage. ``flow``: the
      gradients that the backwards of the calls read and compute.
    - ``order``: the forwards and backwards of the rank. ``fetches``: for each forward and backward, the transfers
      received before it. ``buckets``: the gradients that are reduced together.
    - ``syncs``: names of the parameters shared with other stages, in one tuple for each set of stages that share them.
      ``total_axes``: the mesh axes over which results of the calls before the pipeline are summed. ``zero``: the ZeRO
      stage. ``offload``: the kinds of data in host memory.
    - ``hosted``: names of the parameters in host memory. ``trained``: names of the stage's parameters with a gradient.
      ``updates``: names of the buffers that forward changes, in one tuple for each set of stages that hold them.
      ``new_values``: name of such a buffer -> name of its new value, for new values that this stage computes.
    """

    stage: int
    num_stages: int
    num_microbatches: int
    train: bool
    routes: Routes
    calls: tuple[CallData, ...]
    flow: StageFlow
    order: Order
    fetches: Sequence[Sequence[Fetch]]  # what is received before each action of the order
    buckets: Sequence[PlannedBucket]
    syncs: Sequence[tuple[str, ...]]  # tied parameters, grouped by the stages that share them
    total_axes: tuple[str, ...]
    zero: int = 0
    offload: tuple[str, ...] = ()
    hosted: frozenset[str] = frozenset()  # names of parameters in host memory
    trained: tuple[str, ...] = ()  # names of the stage's parameters with a gradient
    updates: Sequence[tuple[str, ...]] = ()  # buffers that forward changes, grouped by their stages
    # buffer -> value, for new values that this stage computes
    new_values: Mapping[str, str] = field(default_factory=dict)

    @property
    def by_call(self) -> bool:
        """Return whether each block call (such as a layer) gets its own forward and backward instruction, because its
        parameters are gathered or fetched for it, or because its activations are offloaded after it."""
        if "parameters" in self.offload or (self.train and "activations" in self.offload):
            return True
        return self.zero == 3 and any(bucket.sharded for bucket in self.buckets)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Return the indices of this rank's virtual stages, counted over all ranks, in increasing order. An action (a
        forward or backward of one microbatch) of this rank names its virtual stage by an index into this tuple.
        """
        return group_stages_by_rank(self.routes.ranks, self.num_stages)[self.stage]

    def is_sent(self, hops: Sequence[Sequence[str]], virtual: int) -> bool:
        """Return whether the virtual stage with the index ``virtual`` (counted over all ranks) receives anything from
        the preceding one. Return false if the model has no virtual stage with this index. ``hops``: for each virtual
        stage, the names of the values that it receives."""
        return virtual < len(hops) and bool(hops[virtual])


def updates_of(states: Mapping[str, StateData], stage: int) -> list[tuple[str, ...]]:
    """Return the names of the buffers of a pipeline stage that forward changes, in one tuple for each set of stages
    that hold the same buffers. ``states``: all parameters and buffers by name. ``stage``: index of the stage."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name, state in states.items():
        if state.update is not None and stage in state.stages:
            found.setdefault(state.stages, []).append(name)
    return [tuple(names) for _, names in sorted(found.items())]


def stage_instructions(job: StageJob) -> tuple[Instruction, ...]:
    """Return the instruction list that all ranks of one pipeline stage run in a step: computations, transfers,
    reductions and frees. ``job``: the block calls (such as layers) of the stage, its schedule, its gradient buckets,
    and the data in host memory."""
    instructions = list(_emit_prologue(job))
    known = _ActionForms(job)
    for index, action in enumerate(job.order):
        if action.kind == "F" or job.train:
            instructions += known.list_instructions(action, index)
    instructions += _emit_step_end(job)
    sharded = {number: bucket.states for number, bucket in enumerate(job.buckets) if bucket.sharded}
    if job.train and "activations" in job.offload:
        instructions = with_parking(instructions, job.flow.runs)
    instructions = list(with_turns(instructions, job.buckets))
    instructions = with_sharding(instructions, job.calls, job.flow.runs, sharded, job.zero)
    if job.train and "optimizer" in job.offload:
        tied = {s for states in job.syncs for s in states}
        wanted = [s for s in job.trained if s in job.hosted]
        instructions = with_gradients(instructions, [b.states for b in job.buckets], wanted, tied)
    if "parameters" in job.offload:
        instructions = with_passing(instructions, job.calls, job.flow.runs, job.hosted, sharded)
    elif job.hosted:
        instructions = with_fetches(instructions, job.calls, job.hosted)
    return insert_frees(instructions, job.calls, job.flow, job.new_values)


def _emit_prologue(job: StageJob) -> Iterator[Instruction]:
    """Yield the instructions that compute totals (sums over the global batch, such as the number of targets) at the
    start of the step. Yield none if the stage reads no totals. ``job``: the block calls (such as layers) and transfers
    of the stage.
    """
    here = job.routes.stages[job.stage]
    if not here.totals:
        return
    for i in range(job.num_microbatches):
        if here.prologue_loads:
            yield Instruction(op="LOAD", stage=job.stage, microbatch=i, values=here.prologue_loads)
        yield Instruction(op="TOTAL_F", stage=job.stage, microbatch=i, values=here.totals)
    yield Instruction(op="TOTAL", stage=job.stage, values=here.totals, axes=job.total_axes)


class _ActionForms:
    """Builds the instructions of a rank's actions (forwards and backwards of one microbatch). The instructions of equal
    actions of different microbatches are built once and copied. ``job``: the calls, transfers and gradient buckets
    (gradients that one collective reduces) of the pipeline rank.
    """

    def __init__(self, job: StageJob) -> None:
        self.job = job
        self.fetched: dict[tuple[str, int, int], Instruction] = {}
        self.actions: dict[object, tuple[list[Instruction], list[Instruction]]] = {}
        # the actions in which reductions start, and the virtual stages in each of whose backwards some do
        self.ready = {bucket.ready[0] for bucket in job.buckets if bucket.ready is not None}
        self.scattered = {chunk for bucket in job.buckets for chunk in bucket.each}

    def list_instructions(self, action: Action, index: int) -> list[Instruction]:
        """Return the instructions of ``action``: loads of inputs, receives, block calls (such as layers), the send, and
        the reductions of gradients that start in the action. ``index``: index of the action in the rank's order."""
        reduced = self.find_reductions(action, index)
        key = action.kind, action.chunk, *((position, *numbers) for position, numbers in reduced.items())
        parts = self.actions.get(key)
        if parts is None:
            if action.kind == "F":
                parts = list(_emit_loads(self.job, action)), list(_emit_forward(self.job, action))
            else:
                parts = [], list(_emit_backward(self.job, action, reduced))
            self.actions[key] = parts
        number, (before, after) = action.microbatch, parts
        found = [with_microbatch(i, number) for i in before]
        found += [with_microbatch(self.find_receive(fetch), fetch.microbatch) for fetch in self.job.fetches[index]]
        found += [i if i.microbatch is None else with_microbatch(i, number) for i in after]
        return found

    def find_reductions(self, action: Action, index: int) -> dict[int, list[int]]:
        """Return the buckets whose reduction starts in ``action``, as position of a call -> indices of the buckets that
        are complete after the backward of this call. ``index``: index of the action in the rank's order."""
        reduced: dict[int, list[int]] = {}
        if action.kind not in ("F", "I") and (index in self.ready or action.chunk in self.scattered):
            for number, bucket in enumerate(self.job.buckets):
                position = bucket.done_by(index, action.chunk)
                if position is not None:
                    reduced.setdefault(position, []).append(number)
        return reduced

    def find_receive(self, fetch: Fetch) -> Instruction:
        """Return the receive instruction (RECV_F or RECV_B) of the transfer ``fetch``. Its microbatch may be that of
        another transfer of the same values."""
        key = fetch.direction, fetch.hop, fetch.peer
        if key not in self.fetched:
            job = self.job
            hops = job.routes.arriving if fetch.direction == "F" else job.routes.returning
            self.fetched[key] = Instruction(
                op="RECV_F" if fetch.direction == "F" else "RECV_B",
                stage=job.stage,
                microbatch=fetch.microbatch,
                values=hops[fetch.hop],
                peer=fetch.peer,
            )
        return self.fetched[key]


def _emit_loads(job: StageJob, action: Action) -> Iterator[Instruction]:
    """Yield the LOAD instruction of ``action``, a forward of one microbatch, if it loads inputs of the batch. ``job``:
    the calls of the pipeline rank."""
    loads = job.routes.stages[job.stage].loads[action.chunk]
    if loads:
        yield Instruction(op="LOAD", stage=job.stage, microbatch=action.microbatch, values=loads)


def _emit_forward(job: StageJob, action: Action) -> Iterator[Instruction]:
    """Yield the instructions of ``action``, a forward of one microbatch, after its loads and receives: block calls
    (such as layers) and the send. ``job``: the calls and transfers of the pipeline rank."""
    here, routes = job.routes.stages[job.stage], job.routes
    virtual = job.held[action.chunk]
    at: dict[str, Any] = {"stage": job.stage, "microbatch": action.microbatch}
    start, end = here.forward_range(action.chunk)
    # In training, a value between two calls is kept for backward. Without, it can be freed as soon as it is read.
    steps = [(start, end)] if job.train and not job.by_call else [(i, i + 1) for i in range(start, end)]
    for span in steps:
        if span[0] < span[1]:
            yield Instruction(op="F", calls=span, **at)
    if job.is_sent(routes.arriving, virtual + 1):
        yield Instruction(op="SEND_F", values=routes.arriving[virtual + 1], peer=routes.ranks[virtual + 1], **at)


def _emit_backward(job: StageJob, action: Action, reduced: Mapping[int, Sequence[int]]) -> Iterator[Instruction]:
    """Yield the instructions of ``action``, a backward of one microbatch, after its receives: block calls (such as
    layers), the send, and the reductions of gradients that start in the action. ``job``: the calls, transfers and
    gradient buckets (gradients that one collective reduces) of the pipeline rank. ``reduced``: position of a call ->
    indices of the buckets whose reduction starts after the backward of this call."""
    here, routes = job.routes.stages[job.stage], job.routes
    virtual = job.held[action.chunk]
    at: dict[str, Any] = {"stage": job.stage, "microbatch": action.microbatch}
    start, end = here.chunks[action.chunk]
    cuts = range(start + 1, end) if job.by_call else reduced
    for span in _split_call_range(start, end, cuts, job.flow.runs):
        if any(job.flow.runs[span[0] : span[1]]):
            yield Instruction(op=action.kind, calls=span, **at)
        # send what other stages wait for before starting reductions
        if span[0] == start and action.kind != "W" and routes.returning[virtual]:
            yield Instruction(op="SEND_B", values=routes.returning[virtual], peer=routes.ranks[virtual - 1], **at)
        for position in sorted((c for c in reduced if span[0] <= c < span[1]), reverse=True):
            for number in reduced[position]:
                yield _start_bucket_reduction(job, number)


def _split_call_range(start: int, end: int, cuts: Iterable[int], runs: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the ranges ``[start, end)`` into which a range of block calls (such as layers) is split, the last one
    first. A cut is ignored if none of the calls before it in the range has a backward.

    ``start``, ``end``: the range of positions in the stage. ``cuts``: positions at which a new range begins. ``runs``:
    for each call of the stage, whether it has a backward.
    """
    here = end
    for cut in sorted((c for c in cuts if any(runs[start:c])), reverse=True):
        yield cut, here
        here = cut
    yield start, here


def _emit_step_end(job: StageJob) -> Iterator[Instruction]:
    """Yield the instructions after the last forward and backward of a step: remaining reductions, buffer updates and,
    in training, STEP, which waits for all reductions. ``job``: the gradient buckets (gradients that one collective
    reduces) and buffers of the pipeline rank."""
    if job.train:
        for states in job.syncs:
            yield Instruction(op="SYNC", stage=job.stage, states=states)
        for number, bucket in enumerate(job.buckets):
            if bucket.ready is None and bucket.axes:
                yield _start_bucket_reduction(job, number)
    for states in job.updates:
        yield Instruction(op="UPDATE", stage=job.stage, states=states, microbatch=0)
    if job.train:
        yield Instruction(op="STEP", stage=job.stage)


def _start_bucket_reduction(job: StageJob, number: int) -> Instruction:
    """Return the first instruction of the reduction of a bucket (gradients that one collective reduces). The
    instruction is SCATTER (reduce-scatter to shards) if ZeRO shards the parameters, otherwise the first planned
    collective of the bucket. ``job``: the buckets of the pipeline rank. ``number``: index of the bucket in
    ``job.buckets``."""
    bucket = job.buckets[number]
    if bucket.sharded:
        return Instruction(op="SCATTER", stage=job.stage, bucket=number)
    return build_turn_instruction(job.stage, number, bucket.turns[0])


Key = tuple[str, int | None, bool]  # value, microbatch, whether its gradient


def insert_frees(
    instructions: Sequence[Instruction], calls: Sequence[CallData], flow: StageFlow, new_values: Mapping[str, str]
) -> tuple[Instruction, ...]:
    """Return ``instructions``, the list of one pipeline rank, with an instruction FREE after the last use of each value
    and gradient. A model input that is loaded several times is freed before it is loaded again.

    ``calls``: the block calls (such as layers) of the stage. ``flow``: the gradients that the backward of each call
    reads and computes. ``new_values``: name of each buffer that forward changes -> name of the value that becomes its
    content.
    """
    totals = {v for i in instructions if i.op == "TOTAL" for v in i.values}
    forms = Forms.of(instructions)
    kinds: dict[tuple[str, bool], int] = {}  # (value, whether its gradient) -> its number

    def number_kinds(keys: Sequence[Key]) -> Kinds:
        """Return, for each of the values and gradients ``keys``, a pair: its number, and whether it has a microbatch. A
        value gets one number for all microbatches."""
        return tuple(
            (kinds.setdefault((value, gradients), len(kinds)), microbatch is not None)
            for value, microbatch, gradients in keys
        )

    of_forms = [
        _Access(first.op == "LOAD", *map(number_kinds, _list_accessed_values(first, calls, flow, totals, new_values)))
        for first in forms.firsts
    ]
    find = _find_frees_of_all if totals else _find_frees_by_microbatch  # all microbatches read totals
    frees = find(instructions, [of_forms[form] for form in forms.numbers], [*kinds])
    stage = instructions[0].stage if instructions else 0
    known: dict[tuple[tuple[str, ...], bool, bool], Instruction] = {}
    result: list[Instruction] = []
    for instruction, following in zip(instructions, frees, strict=True):
        result.append(instruction)
        for microbatch, gradients, values in following:
            first = known.get((values, gradients, microbatch is None))
            if first is None:
                first = Instruction(op="FREE", stage=stage, microbatch=microbatch, values=values, gradients=gradients)
                known[values, gradients, microbatch is None] = first
            result.append(first if microbatch is None else with_microbatch(first, microbatch))
    return tuple(result)


Kinds = tuple[tuple[int, bool], ...]  # (number of a value or gradient, whether it has a microbatch)
Frees = Sequence[tuple[int | None, bool, tuple[str, ...]]]  # (microbatch, whether gradients, values)
Names = Sequence[tuple[str, bool]]  # of the values and gradients, by number: (value, whether its gradient)


@dataclass(frozen=True, eq=False)
class _Access:
    """The values and gradients that one instruction accesses. ``makes``: those that it computes or adds to. ``reads``:
    those that it reads. ``loads``: whether the instruction is a LOAD, which may make a value again."""

    loads: bool
    makes: Kinds
    reads: Kinds


def _find_frees_by_microbatch(
    instructions: Sequence[Instruction], accesses: Sequence[_Access], names: Names
) -> Iterator[Frees]:
    """Yield, for each of ``instructions``, the values and gradients that are freed after it. Each value must belong to
    the microbatch of the instructions that access it. The frees are computed once for all microbatches with the same
    sequence of instructions. ``accesses``: for each instruction, the values and gradients that it accesses. ``names``:
    the values and gradients by number."""
    sequences: dict[int | None, list[_Access]] = {}
    for instruction, access in zip(instructions, accesses, strict=True):
        sequences.setdefault(instruction.microbatch, []).append(access)
    known: dict[tuple[_Access, ...], list[Frees]] = {}
    following: dict[int | None, Iterator[Frees]] = {}
    for microbatch, sequence in sequences.items():
        key = tuple(sequence)
        if key not in known:
            keys = [(a.loads, [k for k, _ in a.makes], [k for k, _ in a.reads]) for a in sequence]
            known[key] = [_group_frees(ended, names) for ended in _find_last_accesses(keys)]
        following[microbatch] = iter(known[key])
    for instruction in instructions:
        microbatch = instruction.microbatch
        yield [(microbatch, gradients, values) for _, gradients, values in next(following[microbatch])]


def _find_frees_of_all(
    instructions: Sequence[Instruction], accesses: Sequence[_Access], names: Names
) -> Iterator[Frees]:
    """Yield, for each of ``instructions``, the values and gradients that are freed after it, also if instructions of
    several microbatches access a value. ``accesses``: for each instruction, the values and gradients that it accesses.
    ``names``: the values and gradients by number."""
    step, every = len(names), list[tuple[bool, list[int], list[int]]]()
    for instruction, access in zip(instructions, accesses, strict=True):
        # one of a microbatch is its number + the microbatch, from 1, times how many there are
        base = 0 if instruction.microbatch is None else step * (instruction.microbatch + 1)
        makes, reads = ([k + base if own else k for k, own in keys] for keys in (access.makes, access.reads))
        every.append((access.loads, makes, reads))
    for ended in _find_last_accesses(every):
        yield _group_frees(ended, names)


def _group_frees(keys: Sequence[int], names: Names) -> Frees:
    """Return the values and gradients ``keys`` in groups, each of which one FREE instruction frees. A key is ``number +
    microbatch * len(names)``, where ``number`` is the number of a value or gradient, and ``microbatch`` is the index of
    its microbatch plus 1, or 0 if it has none. ``names``: the values and gradients by number."""
    together: dict[tuple[int, bool], list[str]] = {}
    for key in keys:
        number, kind = divmod(key, len(names))
        value, gradients = names[kind]
        together.setdefault((number, gradients), []).append(value)
    return [(number - 1 if number else None, gradients, (*values,)) for (number, gradients), values in together.items()]


def _find_last_accesses(accesses: Sequence[tuple[bool, Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """Return, for each instruction, the keys of the values and gradients whose last access it is, before they are made
    again or the list ends. Values and gradients that no instruction makes are left out. ``accesses``: for each
    instruction, whether it is a LOAD, the keys that it makes, and the keys that it reads."""
    last: dict[int, int] = {}
    made: set[int] = set()
    ending: list[list[int]] = [[] for _ in accesses]
    for index, (loads, makes, reads) in enumerate(accesses):
        if loads:
            for key in makes:
                if key in made:
                    ending[last.pop(key)].append(key)
        last.update(dict.fromkeys((*reads, *makes), index))
        made.update(makes)
    for key, index in last.items():
        if key in made:
            ending[index].append(key)
    return ending


def _list_accessed_values(
    instruction: Instruction,
    calls: Sequence[CallData],
    flow: StageFlow,
    totals: set[str],
    new_values: Mapping[str, str],
) -> tuple[list[Key], list[Key]]:
    """Return two lists: the values and gradients that ``instruction`` computes or adds to, and those that it reads. An
    entry is (name of the value, microbatch, whether it is the value's gradient).

    ``calls``: the block calls (such as layers) of the stage. ``flow``: the gradients that the backwards of the calls
    read and compute. ``totals``: names of the values that are sums over the global batch, computed once in a step;
    their microbatch is ``None``. ``new_values``: name of each buffer that forward changes -> name of the value that
    becomes its content.
    """
    microbatch = instruction.microbatch
    named = [(v, microbatch, instruction.op.endswith("_B")) for v in instruction.values]
    match instruction.op:
        case "LOAD" | "RECV_F" | "RECV_B":
            return named, []
        case "SEND_F" | "SEND_B":
            return [], named
        case "UPDATE":
            return [], [(new_values[s], microbatch, False) for s in instruction.states if s in new_values]
        case "TOTAL_F":
            return [], [(v, microbatch, False) for c in calls if c.prologue for v in c.inputs]
        case "TOTAL":
            return [(v, None, False) for v in instruction.values], []
        case "F":
            assert instruction.calls is not None
            spanned = calls[slice(*instruction.calls)]
            makes = [(v, microbatch, False) for c in spanned for v in c.outputs]
            return makes, [(v, None if v in totals else microbatch, False) for c in spanned for v in c.inputs]
        case "B" | "I":
            assert instruction.calls is not None
            span = [i for i in range(*instruction.calls) if flow.runs[i]]
            gives = [(v, microbatch, True) for i in span for v in flow.gives[i]]
            return gives, [(v, microbatch, True) for i in span for v in flow.takes[i]]
    return [], []
