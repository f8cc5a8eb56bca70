"""Simulate one step of a program in time, from the durations of its calls and collectives.

All ranks of a pipeline stage with equally many microbatches behave alike, so one rank of each stage is simulated. A
rank runs one computation at a time. Messages to other stages are sent at once, over one channel per neighbour and
direction. All-gathers of parameters and reductions of gradients overlap with computation. They run one after another in
the order of the list, because they share the links. While a collective and a computation overlap, each takes
``slowdown`` times as long (:class:`RankClock`). Waiting in a receive, in a call that reads a gathered parameter, or in
TOTAL, SYNC, UPDATE or STEP is idle time. The optimizer's update comes after STEP.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from partitioner.runtime.program.analysis import ProgramFacts, value_bytes
from partitioner.runtime.program.buckets import Bucket, Compression
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.memory import memory_steps
from partitioner.runtime.program.program import Program
from partitioner.runtime.program.sharded_buckets import (
    BACKWARD,
    ScatterQueue,
    count_gradient_shards,
    list_all_reduce_axes,
    list_states_read,
    split_axes,
    zero_axes,
)


@dataclass
class OverlappedCollective:
    """A collective that may overlap with computation on a simulated rank. All times are in seconds. ``ready``: earliest
    time at which it may begin. ``remaining``: the part of its duration that remains. ``started`` and ``ended``: times
    at which it began and ended; ``None`` if it has not.
    """

    ready: float
    remaining: float
    started: float | None = None
    ended: float | None = None


@dataclass
class RankClock:
    """The clock of one simulated rank, in seconds since its start, and the collectives that run while the rank
    computes. Collectives run one after another, in the order in which they are posted, because they share the links.
    While a collective and a computation overlap, each takes ``slowdown`` times as long. ``in_progress``: the
    collectives that have not ended, in order.
    """

    slowdown: float = 1.0
    clock: float = 0.0
    in_progress: deque[OverlappedCollective] = field(default_factory=deque)  # that have not ended, in order

    def begin(self, collective: OverlappedCollective) -> None:
        """Add ``collective`` behind those in progress on this rank. It begins when they have ended, but not before the
        clock's current time.
        """
        collective.ready = max(collective.ready, self.clock)
        self.in_progress.append(collective)

    def compute(self, work: float) -> None:
        """Advance the clock by ``work`` seconds of computation, which takes longer while a collective overlaps."""
        in_progress = self.in_progress
        while work > 0 and in_progress:
            first, now = in_progress[0], self.clock
            if first.ready > now:
                alone = min(work, first.ready - now)
                self.clock, work = now + alone, work - alone
                continue
            if first.started is None:
                first.started = now
            left = first.remaining
            both = work if work < left else left
            self.clock, work, first.remaining = now + both * self.slowdown, work - both, left - both
            if both >= left:
                self._end_first_collective()
        self.clock += work

    def wait(self, until: float) -> None:
        """Advance the clock to the time ``until`` (seconds) without computation; collectives continue. If the clock is
        later than ``until``, nothing happens.
        """
        while self.in_progress and self.clock < until:
            first = self.in_progress[0]
            begin = max(self.clock, first.ready)
            if begin >= until:
                break
            first.started = begin if first.started is None else first.started
            if begin + first.remaining > until:
                first.remaining -= until - begin
                break
            self.clock = begin + first.remaining
            self._end_first_collective()
        self.clock = max(self.clock, until)

    def wait_for(self, collective: OverlappedCollective) -> None:
        """Advance the clock of this simulated rank without computation until ``collective`` has ended."""
        while collective.ended is None:
            first = self.in_progress[0]
            self.wait(max(self.clock, first.ready) + first.remaining)
            if first.ended is None:  # it has ended except for a rounding error
                self._end_first_collective()

    def wait_for_all(self) -> None:
        if self.in_progress:
            self.wait_for(self.in_progress[-1])

    def _end_first_collective(self) -> None:
        """Record that the oldest collective in progress ends now, remove it, and pass it to :meth:`handle_end`."""
        first = self.in_progress.popleft()
        first.ended, first.remaining = self.clock, 0.0
        if first.started is None:
            first.started = self.clock
        self.handle_end(first)

    def handle_end(self, collective: OverlappedCollective) -> None:
        """Do nothing; called with each ``collective`` that has just ended on this simulated rank, for subclasses to
        override.
        """


Part = Literal["F", "B", "I", "W"]

Sharing = Literal["all_gather", "reduce_scatter", "all_to_all"]
COMPUTE = frozenset({"TOTAL_F", "F", "B", "I", "W"})
_STEPS_TO_STEADY = 4  # consecutive steps, after which all steps take equally long


class Durations(Protocol):
    """Interface of a cost model that gives durations, in seconds, to the simulation of a step. ``stage`` arguments are
    indices of pipeline stages.
    """

    def call(self, stage: int, call: int, part: Part) -> float:
        """Return the seconds of one part of a block call (an execution of a block, such as a layer) on one microbatch,
        including the collectives in its graph. Recomputation is not included. ``call``: position in the calls of the
        pipeline stage ``stage``. ``part``: "F" forward, "B" backward, "I" and "W" the halves of the backward for inputs
        and weights.
        """
        ...

    def transfer(self, source: int, target: int, nbytes: int) -> float:
        """Return the seconds to send ``nbytes`` from a rank of the pipeline stage ``source`` (an index) to the rank of
        stage ``target`` with equal other coordinates.
        """
        ...

    def share(self, op: Sharing, axes: tuple[str, ...], nbytes: int, stage: int) -> float:
        """Return the seconds of the collective ``op`` over the mesh axes ``axes``, on the ranks of the pipeline stage
        with the index ``stage``. ``nbytes``: for an all-gather or reduce-scatter, the bytes of the whole tensor; for an
        all-to-all, the sum of the bytes of all ranks' tensors.
        """
        ...

    def coding(self, stage: int, compression: Compression, nbytes: int) -> float:
        """Return the seconds to compress ``nbytes`` of gradients to the format ``compression``, or to decompress them,
        on a rank of the pipeline stage with the index ``stage``.
        """
        ...

    def host(self, stage: int, nbytes: int) -> float:
        """Return the seconds to copy ``nbytes`` from a rank's device to host memory, or back, on the pipeline stage
        with the index ``stage``.
        """
        ...

    def all_reduce(self, axes: tuple[str, ...], nbytes: int, stages: tuple[int, ...]) -> float:
        """Return the seconds to all-reduce ``nbytes``. If ``axes`` is not empty, the all-reduce is over these mesh
        axes, and ``stages`` has the index of the only pipeline stage. If ``axes`` is empty, the all-reduce is between
        the pipeline stages with the indices ``stages``.
        """
        ...

    def posting(self, stage: int, op: str) -> float:
        """Return the seconds for which a rank cannot compute because it starts an instruction whose work then runs in
        the background, such as a send. ``stage``: index of the rank's pipeline stage. ``op``: kind of instruction, such
        as ``SEND_F``.
        """
        ...

    def slowdown(self, stage: int) -> float:
        """Return the factor by which the durations of a computation and a collective of a pipeline stage
        grow while both run. ``stage``: index of the stage.
        """
        ...

    def update(self, stage: int) -> float:
        """Return the seconds of the optimizer's update on one rank of the pipeline stage with index ``stage``."""
        ...


@dataclass(frozen=True)
class SimulatedSpan:
    """The time of one instruction of a simulated rank, in seconds from the start of the step. ``index``: position in
    the instruction list. ``work``: the seconds of computation; the rest of the span is spent waiting.
    """

    start: float
    end: float
    index: int
    instruction: Instruction
    work: float


@dataclass(frozen=True)
class Background:
    """A transfer or collective of a simulated rank that overlaps with its instructions. Times are in seconds from the
    start of the step. ``instruction``: the instruction that started it. ``index``: position of this instruction in the
    rank's list. ``nbytes``: the bytes that it moves.
    """

    start: float
    end: float
    index: int  # of the instruction that started it
    instruction: Instruction
    nbytes: int


@dataclass(frozen=True)
class StageTimeline:
    """The simulated step of one rank of a pipeline stage, which stands for all ranks of the stage.

    Args:
        spans: the instructions in order, with their times.
        background: transfers and collectives that overlap with the instructions.
        busy: seconds of computation.
        bubble: the share of the step without computation, from 0 to 1.
        memory: pairs (seconds from the start of the step, device bytes held from then on).
        peak_bytes: the most device bytes held at a time.
        update_s: seconds of the optimizer's update, which begins when all instructions and transfers have ended.
    """

    spans: tuple[SimulatedSpan, ...]
    background: tuple[Background, ...]
    busy: float
    bubble: float
    memory: tuple[tuple[float, int], ...]
    peak_bytes: int
    update_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A simulated step of all pipeline stages.

    ``stages``: the timeline of each stage, which all its ranks share. ``step_time``: seconds from the start to the end
    of the last optimizer update; if consecutive steps overlap, the seconds from the end of one step to the end of the
    next. ``gradients_s``: seconds until all gradients are reduced, before the updates.
    """

    stages: tuple[StageTimeline, ...]
    step_time: float
    gradients_s: float

    @property
    def bubble(self) -> float:
        """Return the share of the step in which a rank does not compute, from 0 to 1, averaged over the pipeline
        stages.
        """
        return sum(s.bubble for s in self.stages) / len(self.stages)


def simulate(
    program: Program,
    durations: Durations,
    *,
    extra_bytes: Sequence[int] = (),
    facts: ProgramFacts | None = None,
    overlap_steps: bool = False,
) -> Timeline:
    """Simulate one step of ``program``, which must have passed the prover, and return its timeline.

    Args:
        durations: the cost model: seconds of each block call (such as a layer), transfer and collective.
        extra_bytes: for each pipeline stage, bytes to add to its memory; empty for none.
        facts: gradients, collectives and memory of the block calls of ``program``; ``None``: derived here.
        overlap_steps: if true, a rank begins the next step as soon as it has ended its own part of this one, and
            ``step_time`` is the time between the ends of two steps. The times of instructions are those of the first
            step.
    """
    facts = facts or ProgramFacts(program)
    lanes, updates = _simulate_step(facts, durations, records=True)
    gradients_s = max((lane.clock for lane in lanes), default=0.0)
    step_time = _find_step_time(facts, durations, lanes, updates, overlap_steps)
    stages = []
    for lane, update in zip(lanes, updates, strict=True):
        extra = extra_bytes[lane.stage] if extra_bytes else 0
        busy = sum(span.work for span in lane.spans if span.instruction.op in COMPUTE)
        memory, peak = _trace_memory(facts, lane, extra)
        stages.append(
            StageTimeline(
                spans=tuple(lane.spans),
                background=tuple(lane.background),
                busy=busy,
                bubble=1 - busy / step_time if step_time else 0.0,
                memory=memory,
                peak_bytes=peak,
                update_s=update,
            )
        )
    return Timeline(tuple(stages), step_time, gradients_s)


def simulate_step_time(facts: ProgramFacts, durations: Durations, *, overlap_steps: bool = False) -> float:
    """Return the simulated seconds of one step, without simulating memory. ``overlap_steps``: if true, a rank begins
    the next step as soon as it has ended its own part of this one, and the result is the time between the ends of two
    steps. ``facts``: the program of all ranks, with the gradients, collectives and memory of its block calls (such as
    layers). ``durations``: the cost model, which gives the seconds of instructions.
    """
    return _find_step_time(facts, durations, *_simulate_step(facts, durations), overlap_steps)


def _simulate_step(
    facts: ProgramFacts, durations: Durations, records: bool = False
) -> tuple[list[_SimulatedRank], list[float]]:
    """Simulate one step of the program in ``facts``, with the durations that the cost model ``durations`` gives. Return
    two lists over the pipeline stages: the simulated rank after its last instruction, and the seconds of the
    optimizer's update. ``records``: whether the simulated ranks record the times of their instructions.
    """
    stages = range(len(facts.program.stages))
    lanes = [_make_simulated_rank(facts, durations, s, records) for s in stages]
    _Simulation(facts, durations, lanes).run_lanes()
    for lane in lanes:
        lane.drain_collectives()
    return lanes, [durations.update(s) for s in stages]


def _find_step_time(
    facts: ProgramFacts,
    durations: Durations,
    lanes: Sequence[_SimulatedRank],
    updates: Sequence[float],
    overlap_steps: bool,
) -> float:
    """Return the seconds of a step. If ``overlap_steps`` is true, a rank begins the next step as soon as it has ended
    its own part of this one, and the result is the time between the ends of two steps; otherwise it is the time until
    the last optimizer update has ended. ``lanes``: the simulated rank of each pipeline stage after its last
    instruction. ``updates``: seconds of each stage's optimizer update. ``facts``: the program of all ranks, with the
    gradients, collectives and memory of its block calls (such as layers). ``durations``: the cost model, which gives
    the seconds of instructions.
    """
    if overlap_steps:
        return _steady_seconds(facts, durations, updates)
    return max((lane.clock + update for lane, update in zip(lanes, updates, strict=True)), default=0.0)


def _make_simulated_rank(facts: ProgramFacts, durations: Durations, stage: int, records: bool) -> _SimulatedRank:
    """Return the simulated rank of the pipeline stage ``stage`` (an index) before its first instruction. ``records``:
    whether it records the times of its instructions. If it records them or data are offloaded, it gets the full
    instruction list; otherwise only the distinct instructions, up to the microbatch number, and their order.
    """
    slowdown, listed = durations.slowdown(stage), facts.program.stages[stage].instructions
    forms = None if records else facts.forms(stage)
    if forms is None or any(i.op in ("OFFLOAD", "FETCH") for i in forms.firsts):
        return _SimulatedRank(slowdown, stage=stage, instructions=tuple(listed), records=records)
    return _SimulatedRank(slowdown, stage=stage, instructions=forms.firsts, order=forms.numbers)


def _steady_seconds(facts: ProgramFacts, durations: Durations, updates: Sequence[float]) -> float:
    """Return the simulated seconds between the ends of two consecutive training steps, after several steps. ``facts``:
    the program of all ranks, with the gradients, collectives and memory of its block calls (such as layers).
    ``durations``: the cost model, which gives the seconds of instructions. ``updates``: seconds of the optimizer
    update, for each pipeline stage.
    """
    lanes = [_make_simulated_rank(facts, durations, s, False) for s in range(len(facts.program.stages))]
    simulation = _Simulation(facts, durations, lanes)
    seconds = ended = 0.0
    for _ in range(_STEPS_TO_STEADY):
        simulation.run_lanes()
        for lane, update in zip(lanes, updates, strict=True):
            lane.drain_collectives()
            lane.clock += update
            lane.position = 0
        last = max(lane.clock for lane in lanes)
        seconds, ended = last - ended, last
    return seconds


def _trace_memory(facts: ProgramFacts, lane: _SimulatedRank, extra: int) -> tuple[tuple[tuple[float, int], ...], int]:
    """Return the device memory of the simulated rank ``lane`` over time, as pairs (seconds, bytes), and its peak bytes.
    Each instruction gives two pairs: the peak bytes at its start, and the bytes held at its end. ``extra``: bytes added
    to each number. ``facts``: the program of all ranks, with the gradients, collectives and memory of its block calls
    (such as layers).
    """
    points: list[tuple[float, int]] = []
    peak = extra
    for span, (most, after) in zip(lane.spans, memory_steps(facts, lane.stage, lane.instructions), strict=True):
        points += [(span.start, most + extra), (span.end, after + extra)]
        peak = max(peak, most + extra)
    return tuple(points), peak


@dataclass(kw_only=True)
class _InstructionJob(OverlappedCollective):
    """A collective that an instruction of a simulated rank has started. ``index``: the position of the instruction in
    the rank's list. ``nbytes``: the bytes of the collective.
    """

    index: int
    instruction: Instruction
    nbytes: int


@dataclass
class _SimulatedRank(RankClock):
    """The simulated rank of one pipeline stage. A bucket is a set of parameters that are gathered or reduced together.

    Args:
        instructions: the rank's instruction list; if ``order`` is given, only its distinct instructions.
        order: the instruction list as indices of ``instructions``, if microbatch numbers do not matter; otherwise
            ``None``.
        position: position of the next instruction in the list.
        gathered: index of a bucket -> the all-gather of its parameters, until a computation has waited for it.
        scattered: index of a bucket -> the collective of its gradients that was started last.
        summed: the final all-gather of a hierarchical reduction that was started last; ``None`` before the first.
        scattering: the reduce-scatters over ZeRO axes in progress.
        offload_until, fetch_until: times until which copies to and from host memory are in progress.
        offloaded_at: (position of a call, microbatch) -> time at which its activations are back on the device.
        fetched_at: name of a parameter -> time at which its copy is on the device.
        records: whether ``spans`` and ``background`` are recorded.
        spans: the times of the instructions so far.
        background: the times of the transfers and collectives so far.
        background_until: the time at which the last transfer or collective ends.
        began: time at which the current instruction began, if it has waited already; otherwise ``None``.
    """

    stage: int = 0
    instructions: tuple[Instruction, ...] = ()
    order: tuple[int, ...] | None = None
    position: int = 0
    gathered: dict[int, _InstructionJob] = field(default_factory=dict)
    scattered: dict[int, _InstructionJob] = field(default_factory=dict)
    summed: _InstructionJob | None = None
    scattering: ScatterQueue[_InstructionJob] = field(default_factory=lambda: ScatterQueue())
    offload_until: float = 0.0
    fetch_until: float = 0.0
    offloaded_at: dict[tuple[int, int | None], float] = field(default_factory=dict)
    fetched_at: dict[str, float] = field(default_factory=dict)
    records: bool = False
    spans: list[SimulatedSpan] = field(default_factory=list)
    background: list[Background] = field(default_factory=list)
    background_until: float = 0.0
    began: float | None = None

    @property
    def num_instructions(self) -> int:
        return len(self.instructions if self.order is None else self.order)

    def get_instruction(self, position: int) -> Instruction:
        """Return the instruction at ``position`` in the list. Its microbatch number may be wrong if this simulated rank
        stores only distinct instructions.
        """
        return self.instructions[position if self.order is None else self.order[position]]

    def keep_background(self, start: float, end: float, index: int, instruction: Instruction, nbytes: int) -> None:
        """Record that a transfer or collective of this simulated rank runs from ``start`` to ``end`` (seconds).
        ``index``: position of ``instruction``, which starts it. ``nbytes``: the bytes that it moves.
        """
        self.background_until = max(self.background_until, end)
        if self.records:
            self.background.append(Background(start, end, index, instruction, nbytes))

    def spend_time(self, start: float, work: float, wait_for: Iterable[OverlappedCollective] = ()) -> None:
        """Run the current instruction of this simulated rank: wait until the time ``start`` (seconds) and for the
        collectives ``wait_for``, then compute for ``work`` seconds. Record its times, and advance to the next
        instruction.
        """
        began, self.began = self.clock if self.began is None else self.began, None
        self.wait(start)
        for job in wait_for:
            self.wait_for(job)
        ready = self.clock
        self.compute(work)
        if self.records:
            instruction = self.instructions[self.position]
            self.spans.append(SimulatedSpan(began, self.clock, self.position, instruction, self.clock - ready))
        self.position += 1

    def post_collective(self, index: int, seconds: float, nbytes: int, ready: float = 0.0) -> _InstructionJob:
        """Start the collective of the instruction at position ``index``, and return the collective. ``seconds``: its
        duration. ``nbytes``: its size, for reports. ``ready``: time (seconds) before which it cannot begin.
        """
        instruction = self.get_instruction(index)
        job = _InstructionJob(ready, seconds, index=index, instruction=instruction, nbytes=nbytes)
        self.begin(job)
        return job

    def drain_collectives(self) -> None:
        """Advance the clock until all collectives and transfers of this simulated rank have ended."""
        self.wait_for_all()
        self.wait(max(self.clock, self.background_until))

    def handle_end(self, collective: OverlappedCollective) -> None:
        assert isinstance(collective, _InstructionJob)
        assert collective.started is not None
        begun, index, instruction = collective.started, collective.index, collective.instruction
        self.keep_background(begun, self.clock, index, instruction, collective.nbytes)


@dataclass(frozen=True)
class _QuickStep:
    """Precomputed data to run an instruction of a simulated rank, for any microbatch. ``kind``: what the instruction
    does. ``seconds``: duration of its computation or transfer. ``channel``: (sending stage, receiving stage,
    direction), if it sends or receives. ``arrivals``: arrival times of the messages of this channel. ``is_backward``:
    whether it is a backward.
    """

    kind: Literal["none", "compute", "send", "receive"]
    seconds: float = 0.0
    arrivals: deque[float] = field(default_factory=deque)
    channel: tuple[int, int, str] = (0, 0, "")
    is_backward: bool = False


class _Simulation:
    """Simulates the instruction lists of all pipeline stages together, with the messages between them."""

    def __init__(self, facts: ProgramFacts, durations: Durations, lanes: Sequence[_SimulatedRank]) -> None:
        """Start without messages between stages. ``lanes``: the simulated rank of each pipeline stage, in order; their
        clocks and recorded times are updated. ``facts``: the program of all ranks, with the gradients, collectives and
        memory of its block calls (such as layers). ``durations``: the cost model, which gives the seconds of
        instructions.
        """
        self.facts = facts
        self.program = facts.program
        self.durations = durations
        self.lanes = lanes
        self.sizes = {name: value_bytes(value) for name, value in self.program.values.items()}
        self.computed: dict[tuple[int, str, tuple[int, int] | None], float] = {}
        self.arrivals: dict[tuple[int, int, str], deque[float]] = {}
        self.busy_until: dict[tuple[int, int, str], float] = {}
        self.meetings: dict[tuple[str, ...], dict[int, float]] = {}  # states to sync -> stage -> arrival time

    def run_lanes(self) -> None:
        """Run the instructions of all simulated ranks to their end. In turn, each rank runs until it must wait for
        another one.
        """
        quick = {lane.stage: self.list_quick_steps(lane) for lane in self.lanes if lane.order is not None}
        moved = True
        while moved:
            moved = False
            for lane in self.lanes:
                begun = lane.position
                if lane.order is not None:
                    self.run_quick_steps(lane, lane.order, quick[lane.stage])
                else:
                    while lane.position < lane.num_instructions and self.run_next_instruction(lane):
                        pass
                moved = moved or lane.position > begun
        for lane in self.lanes:
            assert lane.position == lane.num_instructions, f"stage {lane.stage} is stuck: prove the program first"

    def list_quick_steps(self, lane: _SimulatedRank) -> list[_QuickStep | None]:
        """Return, for each distinct instruction of the rank ``lane``, precomputed data to run it quickly; ``None`` if
        the instruction is not of a frequent, simple kind.
        """
        return [self.find_quick_step(lane, i) for i in lane.instructions]

    def find_quick_step(self, lane: _SimulatedRank, i: Instruction) -> _QuickStep | None:
        """Return precomputed data to run the instruction ``i`` of the rank ``lane`` quickly. Return ``None`` if ``i``
        is not a computation, transfer, LOAD or FREE, or if it is not a computation and takes time to start.
        """
        if i.op in COMPUTE:
            return _QuickStep("compute", self.compute_seconds(lane.stage, i), is_backward=i.op in BACKWARD)
        if self.durations.posting(lane.stage, i.op):
            return None
        if i.op in ("LOAD", "FREE"):
            return _QuickStep("none")
        if i.op in ("SEND_F", "SEND_B"):
            assert i.peer is not None
            channel = lane.stage, i.peer, i.op[-1]
            seconds = self.durations.transfer(lane.stage, i.peer, sum(self.sizes[v] for v in i.values))
            return _QuickStep("send", seconds, self.arrivals.setdefault(channel, deque()), channel)
        if i.op in ("RECV_F", "RECV_B"):
            assert i.peer is not None
            channel = i.peer, lane.stage, i.op[-1]
            return _QuickStep("receive", 0.0, self.arrivals.setdefault(channel, deque()), channel)
        return None

    def run_quick_steps(self, lane: _SimulatedRank, order: Sequence[int], steps: Sequence[_QuickStep | None]) -> None:
        """Run the next instructions of the rank ``lane`` until one must wait for another rank. The times are those of
        :meth:`run_next_instruction`. ``order``: the instruction list of the rank, as indices of ``steps``. ``steps``:
        precomputed data of each distinct instruction; ``None`` if it is not of a simple kind.
        """
        position, stop, busy_until = lane.position, len(order), self.busy_until
        while position < stop:
            step = steps[order[position]]
            if step is None or (step.kind == "compute" and lane.gathered):
                lane.position = position
                if not self.run_next_instruction(lane):
                    return
            elif step.kind == "compute":
                lane.compute(step.seconds)
                if step.is_backward:
                    lane.scattering.computed()
            elif step.kind == "receive":
                if not step.arrivals:
                    break
                lane.wait(step.arrivals.popleft())
            elif step.kind == "send":
                end = max(lane.clock, busy_until.get(step.channel, 0.0)) + step.seconds
                busy_until[step.channel] = end
                step.arrivals.append(end)
                lane.background_until = max(lane.background_until, end)
            position += 1
        lane.position = position

    def run_next_instruction(self, lane: _SimulatedRank) -> bool:
        """Run the next instruction of the rank ``lane``, and return ``True``. If the instruction must wait for another
        rank first, run nothing and return ``False``.
        """
        i = lane.get_instruction(lane.position)
        match i.op:
            case "F" | "B" | "I" | "W" | "TOTAL_F":
                lane.spend_time(*self.await_parameters(lane, i))
                if i.op in BACKWARD:
                    lane.scattering.computed()
            case "SEND_F" | "SEND_B":
                self.send_values(lane, i)
            case "RECV_F" | "RECV_B":
                assert i.peer is not None
                arrived = self.arrivals.get((i.peer, lane.stage, i.op[-1]))
                if not arrived:
                    return False
                posted = lane.clock + self.durations.posting(lane.stage, i.op)
                lane.spend_time(max(posted, arrived.popleft()), 0.0)
            case "TOTAL":
                axes = split_axes(self.program, i.axes)
                nbytes = sum(self.sizes[v] for v in i.values)
                lane.spend_time(lane.clock, self.durations.all_reduce(axes, nbytes, (lane.stage,)) if axes else 0.0)
            case "GATHER" if not i.gradients:
                self.start_gather(lane, i)
            case "SCATTER" if not i.axes:
                self.start_scatter(lane, i)
            case "GATHER" | "SCATTER" | "REDUCE":
                self.start_reduction_turn(lane, i)
            case "SYNC":
                return self.meet_stages(lane, i)
            case "UPDATE" if len(self.program.states[i.states[0]].stages) > 1:
                return self.meet_stages(lane, i)
            case "OFFLOAD":
                self.start_offload(lane, i)
            case "FETCH":
                self.start_fetch(lane, i)
            case "STEP":
                lane.spend_time(lane.offload_until if self.program.offload else 0.0, 0.0, [*lane.in_progress])
                lane.scattering.clear()
            case _:
                lane.spend_time(lane.clock, self.durations.posting(lane.stage, i.op))
        return True

    def compute_seconds(self, stage: int, i: Instruction) -> float:
        """Return the seconds of the computation of the instruction ``i`` on the pipeline stage ``stage`` (an index).
        They are the same for all microbatches, so they are cached.
        """
        key = stage, i.op, i.calls
        if key not in self.computed:
            self.computed[key] = self._sum_call_seconds(stage, i)
        return self.computed[key]

    def _sum_call_seconds(self, stage: int, i: Instruction) -> float:
        """Return the seconds of all block calls (such as layers) that the instruction ``i`` runs on the pipeline stage
        with the index ``stage``, including recomputation.
        """
        calls = self.facts.stages[stage]
        if i.op == "TOTAL_F":
            return sum(self.durations.call(stage, p, "F") for p, c in enumerate(calls) if c.data.prologue)
        assert i.calls is not None
        if i.op == "F":
            return sum(self.durations.call(stage, p, "F") for p in range(*i.calls))
        part: Part = "B" if i.op == "B" else "I" if i.op == "I" else "W"
        total = 0.0
        for p in range(*i.calls):
            if calls[p].has_backward:
                total += self.durations.call(stage, p, part)
                if calls[p].recomputed and part != "W":
                    total += self.durations.call(stage, p, "F")
        return total

    def send_values(self, lane: _SimulatedRank, i: Instruction) -> None:
        """Start the transfer of the instruction ``i`` (SEND_F or SEND_B) of the simulated rank ``lane`` when its
        channel is idle, and store the time at which the message arrives.
        """
        assert i.peer is not None
        channel = lane.stage, i.peer, i.op[-1]
        nbytes = sum(self.sizes[v] for v in i.values)
        start = max(lane.clock, self.busy_until.get(channel, 0.0))
        end = start + self.durations.transfer(lane.stage, i.peer, nbytes)
        self.busy_until[channel] = end
        self.arrivals.setdefault(channel, deque()).append(end)
        lane.keep_background(start, end, lane.position, i, nbytes)
        lane.spend_time(lane.clock, self.durations.posting(lane.stage, i.op))

    def start_reduction_turn(self, lane: _SimulatedRank, i: Instruction) -> None:
        """Start the collective of the instruction ``i``, one step of the reduction of a gradient bucket, on the
        simulated rank ``lane``. It begins after the bucket's previous step has ended.
        """
        assert i.bucket is not None
        bucket = self.program.stages[lane.stage].buckets[i.bucket]
        level = bucket.levels.index(i.axes) if i.axes else len(bucket.levels)
        nbytes = self.facts.bucket_bytes(bucket) // count_gradient_shards(self.program, bucket, level)
        coding = 0.0
        if i.op == "REDUCE":
            seconds = self.durations.all_reduce(list_all_reduce_axes(self.program, bucket), nbytes, (lane.stage,))
        elif bucket.compression is not None and level == len(bucket.levels) - 1:
            sent = self.time_exchange(bucket, i.axes, nbytes, lane.stage)
            seconds, coding = sent[i.op == "GATHER"], self.durations.coding(lane.stage, bucket.compression, nbytes)
        else:
            op: Sharing = "all_gather" if i.op == "GATHER" else "reduce_scatter"
            seconds = self.durations.share(op, i.axes, nbytes, lane.stage)
        last = i.op == "GATHER" and level == 0
        before = [lane.scattered[i.bucket]] if i.bucket in lane.scattered else []
        before += [lane.summed] if last and lane.summed is not None else []
        index = lane.position
        lane.spend_time(lane.clock, coding, before)
        lane.scattered[i.bucket] = lane.post_collective(index, seconds, nbytes)
        lane.summed = lane.scattered[i.bucket] if last else lane.summed

    def time_exchange(self, bucket: Bucket, axes: tuple[str, ...], nbytes: int, stage: int) -> tuple[float, float]:
        """Return two durations in seconds: of the all-to-all of compressed gradients among ranks, and of the all-gather
        of their sums. ``bucket``: the set of parameters whose gradients are exchanged together. ``axes``: mesh axes of
        these ranks. ``nbytes``: uncompressed bytes on one rank. ``stage``: index of the pipeline stage.
        """
        wire = int(nbytes * self.facts.wire_share(bucket))
        ranks = math.prod(map(self.program.size, axes))
        exchanged = self.durations.share("all_to_all", axes, wire * ranks, stage)
        return exchanged, self.durations.share("all_gather", axes, wire, stage)

    def start_gather(self, lane: _SimulatedRank, i: Instruction) -> None:
        """Start the all-gather of parameters of the instruction ``i`` on the simulated rank ``lane``. If some of the
        parameters are copied from host memory, it begins after these copies.
        """
        assert i.bucket is not None
        states = self.program.stages[lane.stage].buckets[i.bucket].states
        ready = max([0.0, *(lane.fetched_at.pop(s) for s in states if s in lane.fetched_at)])
        lane.gathered[i.bucket] = lane.post_collective(lane.position, *self.time_sharing(lane, i, "all_gather"), ready)
        lane.spend_time(lane.clock, 0.0)

    def start_scatter(self, lane: _SimulatedRank, i: Instruction) -> None:
        """Start the reduce-scatter of gradients of the instruction ``i`` on the simulated rank ``lane``, after the
        reduce-scatters of earlier backward instructions have ended.
        """
        assert i.bucket is not None
        bucket, coding = self.program.stages[lane.stage].buckets[i.bucket], 0.0
        seconds, nbytes = self.time_sharing(lane, i, "reduce_scatter")
        if bucket.compression is not None and not bucket.levels:
            coding = self.durations.coding(lane.stage, bucket.compression, nbytes)
            seconds = self.time_exchange(bucket, zero_axes(self.program, bucket.states), nbytes, lane.stage)[0]
        index = lane.position
        lane.spend_time(lane.clock, coding, lane.scattering.list_blocking())
        job = lane.scattered[i.bucket] = lane.post_collective(index, seconds, nbytes)
        lane.scattering.begin(job)

    def time_sharing(self, lane: _SimulatedRank, i: Instruction, op: Sharing) -> tuple[float, int]:
        """Return the seconds and the bytes of the collective over ZeRO axes that the instruction ``i`` of the simulated
        rank ``lane`` runs. ``op``: all-gather of parameters or reduce-scatter of gradients.
        """
        assert i.bucket is not None
        states = self.program.stages[lane.stage].buckets[i.bucket].states
        size = self.facts.state_bytes if op == "all_gather" else self.facts.gradient_bytes
        nbytes = sum(map(size, states))
        return self.durations.share(op, zero_axes(self.program, states), nbytes, lane.stage), nbytes

    def await_parameters(self, lane: _SimulatedRank, i: Instruction) -> tuple[float, float, list[_InstructionJob]]:
        """Return three values for the computation of the instruction ``i`` of the simulated rank ``lane``: the time
        (seconds) at which the data that it needs from host memory have arrived, the computation's own duration in
        seconds, and the all-gathers in progress of the parameters that it reads.
        """
        there = [
            lane.fetched_at.pop(s) for s in list_states_read(i, self.program.stages[lane.stage]) if s in lane.fetched_at
        ]
        if i.calls is not None and i.op in ("B", "I"):
            there += [lane.offloaded_at.pop((p, i.microbatch), 0.0) for p in range(*i.calls)]
        start, seconds = max([lane.clock, *there]), self.compute_seconds(lane.stage, i)
        if not lane.gathered:
            return start, seconds, []
        stage = self.program.stages[lane.stage]
        read = set(list_states_read(i, stage))
        needed = [b for b in lane.gathered if not read.isdisjoint(stage.buckets[b].states)]
        return start, seconds, [lane.gathered.pop(b) for b in needed]

    def start_offload(self, lane: _SimulatedRank, i: Instruction) -> None:
        """Start the copies to host memory of the OFFLOAD instruction ``i`` of the simulated rank ``lane``. Copies of
        activations begin when earlier copies have ended; copies of gradients also wait for the collectives that reduce
        them.
        """
        nbytes, needed = self.count_kept_bytes(lane, i), list[OverlappedCollective]()
        if i.states:
            nbytes, needed = sum(map(self.facts.gradient_piece_bytes, i.states)), [*lane.in_progress]
        # the activations offloaded before have left the device by then, so memory does not grow
        lane.spend_time(lane.clock if i.states else lane.offload_until, 0.0, needed)
        start = max(lane.clock, lane.offload_until)
        lane.offload_until = start + self.durations.host(lane.stage, nbytes)
        lane.keep_background(start, lane.offload_until, lane.position - 1, i, nbytes)

    def start_fetch(self, lane: _SimulatedRank, i: Instruction) -> None:
        """Start the copy of activations or parameters from host memory for the FETCH instruction ``i`` of the simulated
        rank ``lane``, after earlier copies have ended.
        """
        nbytes = sum(map(self.facts.piece_bytes, i.states)) if i.states else self.count_kept_bytes(lane, i)
        start = max(lane.clock, lane.fetch_until)
        lane.fetch_until = start + self.durations.host(lane.stage, nbytes)
        if i.calls is not None:
            lane.offloaded_at.update(((p, i.microbatch), lane.fetch_until) for p in range(*i.calls))
        lane.fetched_at.update(dict.fromkeys(i.states, lane.fetch_until))
        lane.keep_background(start, lane.fetch_until, lane.position, i, nbytes)
        lane.spend_time(lane.clock, 0.0)

    def count_kept_bytes(self, lane: _SimulatedRank, i: Instruction) -> int:
        """Return the bytes of the activations that the instruction ``i`` (OFFLOAD or FETCH) of the simulated rank
        ``lane`` moves between device and host memory.
        """
        calls = self.facts.stages[lane.stage][slice(*i.calls)] if i.calls is not None else ()
        return sum(map(self.facts.moved_bytes, calls))

    def meet_stages(self, lane: _SimulatedRank, i: Instruction) -> bool:
        """Run the instruction ``i`` of the simulated rank ``lane``, in which several pipeline stages together sum
        gradients (SYNC) or update buffers (UPDATE). Return ``True`` if all these stages have arrived at it; otherwise
        return ``False``, and ``lane`` must wait.

        A stage arrives at SYNC when its collectives in progress for the same gradients have ended. When the last stage
        has arrived, the all-reduce between the stages runs.
        """
        stages = self.program.states[i.states[0]].stages
        came = self.meetings.setdefault(i.states, {})
        if lane.stage not in came:
            began = lane.clock
            buckets = self.program.stages[lane.stage].buckets if i.op == "SYNC" else ()
            summed = {n for n, bucket in enumerate(buckets) if not set(bucket.states).isdisjoint(i.states)}
            for job in [*lane.in_progress]:
                if isinstance(job, _InstructionJob) and job.instruction.bucket in summed:
                    lane.wait_for(job)
            came[lane.stage] = lane.clock
            lane.began = began
        if len(came) < len(stages):
            return False
        size = self.facts.state_bytes if i.op == "UPDATE" else self.facts.gradient_piece_bytes
        nbytes = sum(map(size, i.states))
        lane.spend_time(max(came.values()), self.durations.all_reduce((), nbytes, stages))
        return True
