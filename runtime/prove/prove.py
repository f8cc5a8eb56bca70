"""Prove, before anything is launched, that every rank runs to its end and computes what the program says.

:func:`prove` follows the programs of all ranks without numbers. It refuses the following, and names rank, instruction
and graph node:

* a program that contradicts itself: names, shapes, types, layouts, graphs, buckets, or missing fields of instructions;
* a rank that uses a value or gradient before it exists or after it was freed, or that never frees one;
* a call that does not run forward and backward exactly once per microbatch, in an order that the data allow; a gradient
  that is used before all contributions have arrived;
* a state (parameter or buffer) whose gradient is not summed exactly once over its stages and the required mesh axes;
* ranks that disagree on a collective, a send or a receive, or that deadlock;
* a value or gradient that is declared whole over ``tp`` but differs between ranks; a collective of a graph that gets a
  whole value instead of parts, or parts instead of a whole value;
* a rank that needs more memory than its limit, if limits are given.

It also refuses some programs that might compute the correct result: those that do anything twice (load, run, free,
reduce, synchronise, STEP); those with a REDUCE, SYNC or STEP before the last backward; those that never free a value or
gradient, or free one that does not exist; instructions with another stage's number or with unused fields; and
inconsistent data that no rank reads, such as the shape of a value that is never sent. Its assumptions about
communication channels are in :class:`partitioner.runtime.program.instructions.Instruction`. It cannot know whether a
call reads the *right* value of a shape, or whether an output is the intended one: ``Plan.verify`` checks that.

Ranks of one stage run one list, so its instructions are followed once for each number of microbatches that ranks have.
If the lists of some ranks were edited, only ranks that can be distinguished are followed. A compact list with a steady
state (:class:`partitioner.runtime.program.instructions.Listing`) is followed with one and with two repetitions of it.
All events are then linear in the number of repetitions, so ranks that agree for two numbers agree for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.instructions import (
    CollectiveEvent,
    Instruction,
    Instructions,
    Listing,
    SendEvent,
    Trace,
)
from partitioner.runtime.program.memory import peak_bytes
from partitioner.runtime.program.program import Program, RankProgram, keep_first_microbatches
from partitioner.runtime.prove.cross_rank import Mismatch, TraceRunner
from partitioner.runtime.prove.errors import FaultLocation, ProofError, Refusal
from partitioner.runtime.prove.gradient_ledger import find_gradient_returns
from partitioner.runtime.prove.rank_trace import trace_instructions
from partitioner.runtime.prove.replication import check_wholeness
from partitioner.runtime.prove.structure import check_structure

__all__ = ["Proof", "ProofError", "prove"]

Lists = tuple[tuple[Instruction, ...], ...]  # instructions of each stage


@dataclass(frozen=True)
class Proof:
    """The result of a successful proof: numbers of ranks, instructions, collectives and transfers, counted over all
    ranks.

    ``distinct_lists``: number of different instruction lists. ``peak_bytes``: for each pipeline stage, the peak memory
    of its fullest rank; empty if memory was not checked.
    """

    ranks: int
    instructions: int
    collectives: int
    transfers: int
    distinct_lists: int
    peak_bytes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks ({self.distinct_lists} distinct lists): {self.instructions} instructions, "
            f"{self.collectives} collectives and {self.transfers} transfers are complete and free of deadlock"
        )


def prove(
    program: Program,
    rank_programs: Mapping[int, RankProgram] | None = None,
    *,
    memory_limits: Sequence[int] | int | None = None,
    extra_bytes: Sequence[int] = (),
    facts: ProgramFacts | None = None,
) -> Proof:
    """Check, without running it, that ``program`` runs to its end on all ranks, and return the :class:`Proof`. Raise
    :class:`ProofError` at the first fault.

    Args:
        rank_programs: rank -> program, for ranks whose own instructions replace those of their stage.
        memory_limits: bytes that each rank may hold (one number, or one per rank); ``None``: memory is not checked.
        extra_bytes: further bytes per pipeline stage, such as optimizer states.
        facts: gradients, collectives and memory of the block calls (such as layers) of ``program``; ``None``: derived
            here.
    """
    facts = facts or ProgramFacts(program)
    try:
        check_structure(facts)
        check_wholeness(facts)
    except Refusal as refusal:
        raise _locate_refusal(program, refusal) from None
    rank_lists = _find_edited_lists(program, rank_programs or {})
    lists = _select_rank_lists(program, rank_lists)
    collectives, transfers = (_steady_counts(facts) if not rank_lists else None) or _check_lists_together(
        facts, rank_lists
    )
    return Proof(
        ranks=program.world_size,
        instructions=sum(len(i) for i in lists.values()),
        collectives=collectives,
        transfers=transfers,
        distinct_lists=len({id(i) for i in lists.values()}),
        peak_bytes=_check_memory(facts, lists, memory_limits, extra_bytes),
    )


def _check_lists_together(facts: ProgramFacts, rank_lists: Mapping[int, Instructions]) -> tuple[int, int]:
    """Check the instructions of all ranks together. Return two numbers, summed over all ranks: of the collectives and
    of the transfers that the instructions start. Raise :class:`ProofError` at the first fault. ``rank_lists``: rank ->
    instructions, for ranks whose own list replaces that of their pipeline stage. ``facts``: the program of all ranks,
    with the gradients, collectives and memory of its block calls (such as layers).
    """
    traces, lists = _trace_lists(facts, rank_lists)
    try:
        TraceRunner(facts.program, traces, rank_lists.keys()).run_traces()
    except Mismatch as mismatch:
        instruction = str(lists[mismatch.rank][mismatch.index])
        raise ProofError(
            mismatch.message,
            rank=mismatch.rank,
            index=mismatch.index,
            instruction=instruction,
            node=mismatch.node,
            fault=mismatch.fault,
        ) from None
    counts = {key: _count_events(trace) for key, trace in {id(t): t for t in traces.values()}.items()}
    return sum(counts[id(t)][0] for t in traces.values()), sum(counts[id(t)][1] for t in traces.values())


def _steady_counts(facts: ProgramFacts) -> tuple[int, int] | None:
    """Return the numbers of collectives and of transfers of all ranks, for a program whose instruction lists repeat a
    steady state: equal groups of instructions, one for each further microbatch. The numbers are extrapolated from
    checks of shorter lists, with one and with two repetitions. Return ``None`` if the lists have no common steady state
    or have a fault; the whole lists must be checked then. ``facts``: the program of all ranks, with the gradients,
    collectives and memory of its block calls (such as layers).
    """
    listings = [stage.instructions for stage in facts.program.stages]
    first = listings[0]
    if facts.program.data_shares or not isinstance(first, Listing) or first.steps <= 2:
        return None
    if any(
        not isinstance(i, Listing) or (i.steps, i.unit) != (first.steps, first.unit) or not i.even for i in listings
    ):
        return None
    try:
        once, twice = (_check_lists_together(facts.extend(steps), {}) for steps in (1, 2))
    except ProofError:
        return None
    further = first.steps - 1
    return once[0] + further * (twice[0] - once[0]), once[1] + further * (twice[1] - once[1])


def _find_edited_lists(program: Program, rank_programs: Mapping[int, RankProgram]) -> dict[int, Instructions]:
    """Return a dict: rank -> instructions, for the ranks whose own list (as a user may pass it to :func:`prove`)
    differs from the list of their pipeline stage. ``rank_programs``: rank -> its program. Raise :class:`ProofError` if
    one of these is derived from another program than ``program``, or belongs to another rank.
    """
    rank_lists: dict[int, Instructions] = {}
    compared = {id(program)}
    for rank, given in rank_programs.items():
        if id(given.program) not in compared:
            if given.program != program:
                raise ProofError(
                    "the rank's list is of another program: pass the lists of this program",
                    rank=rank,
                    index=0,
                    instruction=_format_instruction(given.instructions, 0),
                )
            compared.add(id(given.program))
        if given.rank != rank or not 0 <= rank < program.world_size:
            message = f"is the program of rank {given.rank}, of {program.world_size}"
            raise ProofError(message, rank=rank, index=0, instruction=_format_instruction(given.instructions, 0))
        if given.own is None:
            continue
        stage, share = program.stages[program.coordinates(rank)["pp"]], len(given.share)
        if given.own != keep_first_microbatches(stage.instructions, program, share):
            rank_lists[rank] = given.own
    return rank_lists


def _trace_lists(
    facts: ProgramFacts, rank_lists: Mapping[int, Instructions]
) -> tuple[dict[int, Trace], dict[int, Instructions]]:
    """Return two dicts by rank: the communication events, as pairs (instruction index, event), and the instructions.
    Ranks whose whole pipeline runs the same lists share one tuple of events. ``rank_lists``: rank -> instructions, for
    ranks whose own list replaces that of their pipeline stage. ``facts``: the program of all ranks, with the gradients,
    collectives and memory of its block calls (such as layers).
    """
    program, lists = facts.program, _select_rank_lists(facts.program, rank_lists)
    stride, num_stages = program.strides["pp"], len(program.stages)
    shares = _count_microbatches(program)
    of_share = {share: facts.restrict_to_share(share) for share in set(shares)}
    edited = dict.fromkeys(rank % stride for rank in sorted(rank_lists))
    first = {share: c for c, share in reversed([*enumerate(shares)]) if c not in edited}
    known: dict[tuple[int, ...], list[Trace]] = {}
    found: dict[int, list[Trace]] = {}  # first rank of a pipeline -> events of its ranks
    for column in (*edited, *first.values()):  # edited lists first, so that their faults are reported first
        ranks = range(column, num_stages * stride, stride)
        run = [lists[rank] for rank in ranks]
        key = tuple(map(id, run))
        if key not in known:
            known[key] = _trace_pipeline(of_share[shares[column]], ranks, run)
        found[column] = known[key]
    of_columns = [found[c if c in edited else first[share]] for c, share in enumerate(shares)]
    traces = {s * stride + c: of[s] for s in range(num_stages) for c, of in enumerate(of_columns)}
    return traces, lists


def _select_rank_lists(program: Program, rank_lists: Mapping[int, Instructions]) -> dict[int, Instructions]:
    """Return a dict: rank -> instructions. They are the rank's list in ``rank_lists`` if it has one, otherwise its
    pipeline stage's list without the microbatches that the rank does not process. ``program``: the program of all
    ranks. ``rank_lists``: rank -> instructions, for ranks whose own list replaces that of their pipeline stage.
    """
    shares = _count_microbatches(program)
    lists: dict[int, Instructions] = {}
    for s, stage in enumerate(program.stages):
        of = {share: keep_first_microbatches(stage.instructions, program, share) for share in set(shares)}
        lists |= {s * len(shares) + column: of[share] for column, share in enumerate(shares)}
    return lists | dict(rank_lists)


def _count_microbatches(program: Program) -> list[int]:
    """Return the number of microbatches of each rank of a pipeline stage, in the order of ranks. The result is the same
    for all stages. ``program``: the program of all ranks.
    """
    each = program.strides["dp"]
    return [len(program.share(place)) for place in range(program.size("dp")) for _ in range(each)]


def _trace_pipeline(facts: ProgramFacts, ranks: Sequence[int], run: Sequence[Instructions]) -> list[Trace]:
    """Return the communication events of the ranks of one pipeline: for each stage, pairs (instruction index, event).
    ``ranks``: the rank of each stage. ``run``: the instructions of each stage. Raise :class:`ProofError` at the first
    fault. ``facts``: the program of all ranks, with the gradients, collectives and memory of its block calls (such as
    layers).
    """
    returns = find_gradient_returns(facts, run)
    traces = []
    for s, instructions in enumerate(run):
        try:
            traces.append(trace_instructions(facts, s, instructions, returns[s]))
        except Refusal as refusal:
            refusal.location = replace(refusal.location, stage=s)
            raise _locate_refusal(facts.program, refusal, instructions, ranks[s]) from None
    return traces


def _locate_refusal(
    program: Program, refusal: Refusal, instructions: Sequence[Instruction] | None = None, rank: int | None = None
) -> ProofError:
    """Return the error that users see for the fault ``refusal``, with its rank and instruction. ``instructions`` and
    ``rank``: the list and the rank in which the fault was found; ``None``: the list and the first rank of the pipeline
    stage ``refusal.location.stage``. ``program``: the program of all ranks.
    """
    location = refusal.location
    if instructions is None:
        stages = program.stages
        instructions = stages[location.stage].instructions if 0 <= location.stage < len(stages) else ()
    if rank is None:
        rank = location.stage * program.strides["pp"]
    index = location.index
    if index is None:
        index = next((k for k, i in enumerate(instructions) if _uses_location(program, location, i)), 0)
    return ProofError(
        refusal.message,
        rank=rank,
        index=index,
        instruction=_format_instruction(instructions, index),
        node=location.node,
        fault=refusal.fault,
    )


def _uses_location(program: Program, location: FaultLocation, instruction: Instruction) -> bool:
    """Return whether ``instruction`` uses the object that ``location`` names: a bucket (parameters that are reduced
    together), a block call (an execution of a block, such as a layer), or a parameter or buffer. The fault is reported
    at the first such instruction. ``program``: the program of all ranks.
    """
    if location.bucket is not None:
        return instruction.bucket == location.bucket
    calls = program.stages[location.stage].calls
    if instruction.op == "TOTAL_F":
        positions = [p for p, c in enumerate(calls) if c.prologue]
    else:
        positions = list(range(*instruction.calls)) if instruction.calls is not None else []
    if location.call is not None:
        return location.call in positions
    return any(location.state in calls[p].states for p in positions if 0 <= p < len(calls))


def _format_instruction(instructions: Sequence[Instruction], index: int) -> str:
    return str(instructions[index]) if index < len(instructions) else "none"


def _check_memory(
    facts: ProgramFacts,
    lists: Mapping[int, Instructions],
    limits: Sequence[int] | int | None,
    extra_bytes: Sequence[int],
) -> tuple[int, ...]:
    """Return the peak device bytes of the fullest rank of each pipeline stage; empty if ``limits`` is ``None``. Raise
    :class:`ProofError` if a rank exceeds its limit. ``lists``: rank -> instructions. ``limits``: bytes that each rank
    may hold (one number, or one per rank). ``extra_bytes``: bytes to add per stage. ``facts``: the program of all
    ranks, with the gradients, collectives and memory of its block calls (such as layers).
    """
    if limits is None:
        return ()
    program, stride = facts.program, facts.program.strides["pp"]
    peaks: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, instructions in lists.items():
        stage = rank // stride
        key = stage, id(instructions)
        if key not in peaks:
            extra = extra_bytes[stage] if extra_bytes else 0
            peaks[key] = peak_bytes(facts, stage, instructions, extra)
        peak, index = peaks[key]
        limit = limits if isinstance(limits, int) else limits[rank]
        if peak > limit:
            message = f"holds {peak:,} bytes, {peak - limit:,} more than the {limit:,} that it may"
            text = _format_instruction(instructions, index)
            raise ProofError(message, rank=rank, index=index, instruction=text, fault="memory")
    return tuple(max(p for (s, _), (p, _) in peaks.items() if s == stage) for stage in range(len(program.stages)))


def _count_events(trace: Trace) -> tuple[int, int]:
    collectives = transfers = 0
    for _, event in trace:
        if isinstance(event, CollectiveEvent):
            collectives += event.count
        elif isinstance(event, SendEvent):
            transfers += 1
    return collectives, transfers
