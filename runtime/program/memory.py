"""Compute the memory that a rank needs while it runs its instructions: bytes on the device, in the host and on disk.

Device memory counts parameters and buffers; gradients of parameters; values and their gradients from creation until
they are freed; tensors saved for backward; and buffers of hierarchical reductions (partial sums, transfers in flight,
compression residuals). Gradients of parameters are held from the start; under ZeRO only the rank's pieces are, and
whole gradients count while they exist. Temporary tensors of operators and optimizer states are not counted. Callers add
these as extra bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from partitioner.runtime.program.analysis import CallFacts, ProgramFacts
from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.codecs import CODECS
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.sharded_buckets import BACKWARD, ScatterQueue, count_gradient_shards, zero_axes
from partitioner.runtime.program.state_bytes import list_host_states

# Temporary copies of a buffer while it is compressed: int8 needs the rounded numbers, and the decompressed ones to
# compute the rounding error.
WORKING = {"bf16": 0.0, "int8": 2.0}
_WITHOUT_EFFECT = frozenset({"SEND_F", "SEND_B", "UPDATE"})  # operations that do not change the counted memory


def residual_bytes(facts: ProgramFacts, bucket: Bucket) -> int:
    """Return the device bytes in which a rank stores the rounding errors of compressed gradients of ``bucket``
    (parameters whose gradients are reduced together). The errors of a step are added to the transfers of the next step.
    0 without compression, or with a format whose errors are discarded. ``facts``: the program of all ranks, with the
    sizes of its tensors.
    """
    if bucket.compression is None or not CODECS[bucket.compression].feedback:
        return 0
    if not bucket.levels:
        return sum(map(facts.gradient_bytes, bucket.states))
    sent = facts.bucket_bytes(bucket) // count_gradient_shards(facts.program, bucket, len(bucket.levels) - 1)
    return sent + facts.bucket_bytes(bucket) // count_gradient_shards(facts.program, bucket, len(bucket.levels))


class LevelReductionBytes:
    """Counts the extra device bytes of one rank while gradients of its pipeline stage are reduced hierarchically:
    within nodes, between nodes, and so on. ``held``: the bytes held now, besides the gradients themselves. ``facts``:
    the program of all ranks, with the sizes of its tensors.
    """

    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        self.facts, self.buckets = facts, facts.program.stages[stage].buckets
        self.held = 0
        self._of: dict[int, int] = {}
        self._gathering: int | None = None  # the bucket whose sums are being all-gathered over its first level

    def add_collective(self, i: Instruction) -> int:
        """Count the extra bytes that the instruction ``i``, one step of a hierarchical gradient reduction, allocates
        and releases, and update ``held``. Return the peak bytes during the instruction above the bytes held after it; 0
        for instructions of other kinds.
        """
        number = i.bucket
        if number is None or not self.buckets[number].levels or i.op == "REDUCE":
            return 0
        bucket, program = self.buckets[number], self.facts.program
        level = bucket.levels.index(i.axes)
        whole = self.facts.bucket_bytes(bucket) // count_gradient_shards(program, bucket, level)
        part = whole // math.prod(map(program.size, i.axes))
        compressed = bucket.compression if level == len(bucket.levels) - 1 else None
        wire = int(whole * self.facts.wire_share(bucket)) if compressed else 0
        if i.op == "SCATTER":
            before = part if not compressed else 0  # bytes of the previous level, released once this one has begun
            comes = 2 * wire if compressed else part + (whole if program.whole_scatter else 0)
            self._set_bucket_bytes(number, comes)
            return before + int(WORKING[compressed] * whole if compressed else 0)
        if level == 0 and self._gathering not in (None, number):
            self._set_bucket_bytes(self._gathering, 0)
        self._gathering = number if level == 0 else self._gathering
        self._set_bucket_bytes(number, part + (wire if compressed else whole))
        return whole if compressed else 0

    def finish(self) -> None:
        """Record that all hierarchical gradient reductions have ended, so that no extra bytes are held."""
        self._of.clear()
        self.held, self._gathering = 0, None

    def _set_bucket_bytes(self, number: int | None, nbytes: int) -> None:
        assert number is not None
        self.held += nbytes - self._of.get(number, 0)
        self._of[number] = nbytes


Key = tuple[str, int | None]


class MemoryMoment(NamedTuple):
    """Device bytes that a rank holds at one moment, besides its parameters, buffers and the gradients that it holds
    during the whole step. The moment is the peak of a block call (an execution of a block, such as a layer), or the
    peak or the end of an instruction.

    ``call``: position of the running call on its pipeline stage; ``None`` if no call runs. ``saved``: bytes of tensors
    that pass between calls, and of tensors saved for backward. ``gradients``: bytes of gradients of tensors that pass
    between calls. ``recomputed``: bytes of recomputed tensors of a running backward. ``gathered``: bytes of gathered
    parameters, and of sharded parameters' gradients before, during and after their reduce-scatter. ``host``: bytes in
    host memory.
    """

    call: int | None
    saved: int
    gradients: int
    recomputed: int = 0
    gathered: int = 0
    host: int = 0


def state_bytes(facts: ProgramFacts, stage: int) -> int:
    """Return the device bytes that one rank of the pipeline stage ``stage`` (an index) holds during the whole step: its
    parameters, buffers, gradients, and the rounding errors stored for gradient compression. ``facts``: the program of
    all ranks, with the sizes of its tensors.
    """
    held = facts.states_by_stage[stage]
    residuals = sum(residual_bytes(facts, bucket) for bucket in facts.program.stages[stage].buckets)
    return sum(parameter_bytes(facts, name) + gradient_bytes(facts, name) for name in held) + residuals


def parameter_bytes(facts: ProgramFacts, state: str) -> int:
    """Return the device bytes that the parameter or buffer called ``state`` takes on a rank during the whole step; 0 if
    it is a parameter and parameters are offloaded. ``facts``: the program of all ranks, with the sizes of its tensors.
    """
    if "parameters" in facts.program.offload and facts.program.states[state].kind == "parameter":
        return 0
    return facts.piece_bytes(state) if facts.program.zero == 3 else facts.state_bytes(state)


def gradient_bytes(facts: ProgramFacts, state: str) -> int:
    """Return the device bytes that the gradient of the parameter called ``state`` takes on a rank during the whole
    step; 0 if it has no gradient.

    Under ZeRO 1, the result is the gradient of the rank's shard over ``ep`` and ``tp``, plus the piece of this gradient
    that ZeRO leaves on the rank. Under ZeRO 2 and 3, it is 0 for a parameter that ZeRO divides, since the piece exists
    only after the first reduce-scatter. ``facts``: the program of all ranks, with the sizes of its tensors.
    """
    if state not in facts.with_gradient:
        return 0
    if not facts.program.states[state].zero_axes:
        return facts.gradient_bytes(state)
    return facts.gradient_piece_bytes(state) + facts.gradient_bytes(state) if facts.program.zero < 2 else 0


def memory_steps(facts: ProgramFacts, stage: int, instructions: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """Yield for each instruction a pair: the peak device bytes of a rank while the instruction runs, and the bytes held
    after it. Both include parameters, buffers and gradients. ``stage``: index of the rank's pipeline stage.
    ``instructions``: the rank's list, which the prover has accepted. ``facts``: the program of all ranks, with the
    gradients, collectives and memory of its block calls (such as layers).
    """
    holder = _MemoryCounter(facts, stage)
    for instruction in instructions:
        yield holder.run_instruction(instruction)


def memory_moments(
    facts: ProgramFacts, stage: int, instructions: Sequence[Instruction]
) -> Iterator[tuple[list[MemoryMoment], MemoryMoment]]:
    """Yield for each instruction a pair: a list of :class:`MemoryMoment`, and the moment after the instruction. The
    list has the peak of each of the instruction's block calls (such as layers); for an instruction without calls, its
    own peak if it is higher than the end. ``stage``: index of the rank's pipeline stage. ``instructions``: the rank's
    list. ``facts``: the program of all ranks, with the gradients, collectives and memory of its block calls.
    """
    holder = _MemoryCounter(facts, stage)
    for instruction in instructions:
        yield holder.list_moments(instruction)


def find_fullest_moment(
    facts: ProgramFacts, stage: int, instructions: Sequence[Instruction], working: Sequence[int]
) -> tuple[MemoryMoment, int]:
    """Return the first moment at which a rank holds the most bytes, and the working memory (bytes) of the block call
    (an execution of a block, such as a layer) that runs at this moment. ``stage``: index of the rank's pipeline stage.
    ``instructions``: the rank's list. ``working``: for each call of the stage, bytes of working memory while it runs,
    which count as held. ``facts``: the program of all ranks, with the gradients, collectives and memory of its calls.
    """
    return _PeakFinder(facts, stage, working).find_fullest_moment(instructions)


def peak_bytes(
    facts: ProgramFacts, stage: int, instructions: Sequence[Instruction], extra_bytes: int = 0
) -> tuple[int, int]:
    """Return the peak device bytes of a rank, and the index of the first instruction that reaches the peak. ``stage``:
    index of the rank's pipeline stage. ``instructions``: the rank's list. ``extra_bytes``: bytes added to the peak.
    ``facts``: the program of all ranks, with the gradients, collectives and memory of its block calls (such as layers).
    """
    peaks = [peak for peak, _ in memory_steps(facts, stage, instructions)]
    if not peaks:
        return state_bytes(facts, stage) + extra_bytes, 0
    peak = max(peaks)
    return peak + extra_bytes, peaks.index(peak)


def host_bytes(facts: ProgramFacts, stage: int, instructions: Sequence[Instruction]) -> int:
    """Return the peak bytes that a rank holds in host memory: offloaded activations, and offloaded parameters with
    their gradients and the copies that the optimizer updates. Optimizer states are not counted. ``stage``: index of the
    rank's pipeline stage. ``instructions``: the rank's list. ``facts``: the program of all ranks, with the gradients,
    collectives and memory of its block calls (such as layers).
    """
    holder = _MemoryCounter(facts, stage)
    most = 0
    for instruction in instructions:
        holder.run_instruction(instruction)
        most = max(most, holder.host)
    return most + sum(master_bytes(facts, s) for s in list_host_states(facts.program, stage))


def master_bytes(facts: ProgramFacts, state: str) -> int:
    """Return the bytes that the offloaded parameter named ``state`` takes in host memory on one rank: the parameter
    and, if it is trained, its gradient and the copy in a wider dtype that the optimizer updates. The copy is not
    counted if it is on disk. ``facts``: the program of all ranks, with the sizes of its tensors.
    """
    data = facts.program.states[state]
    if facts.program.objective != "train" or not data.requires_grad:
        return facts.piece_bytes(state)
    wide, short = facts.gradient_piece_bytes(state), facts.piece_bytes(state)  # updates run in the gradient's type
    return wide + short + _copy_bytes(facts, state) * ("disk" not in facts.program.offload)


def disk_bytes(facts: ProgramFacts, stage: int) -> int:
    """Return the bytes that one rank of the pipeline stage ``stage`` (an index) stores on disk: copies of parameters in
    a wider dtype, which the optimizer updates. Optimizer states are not counted. 0 if the program does not offload to
    disk. ``facts``: the program of all ranks, with the sizes of its tensors.
    """
    trained = (s for s in list_host_states(facts.program, stage) if s in facts.with_gradient)
    return sum(_copy_bytes(facts, s) for s in trained) if "disk" in facts.program.offload else 0


def _copy_bytes(facts: ProgramFacts, state: str) -> int:
    """Return the bytes of the copy in a wider dtype that the optimizer updates for the parameter ``state``; 0 if there
    is no copy. ``facts``: the program of all ranks, with the sizes of its tensors.
    """
    wide, short = facts.gradient_piece_bytes(state), facts.piece_bytes(state)
    return wide if short < wide else 0


class _MemoryCounter:
    """Counts the bytes that one rank of a pipeline stage holds on the device and in the host, instruction after
    instruction.
    """

    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        """Start before the first instruction, when the rank holds only parameters, buffers and gradients. ``stage``:
        index of the rank's pipeline stage. ``facts``: the program of all ranks, with the gradients, collectives and
        memory of its block calls (such as layers).
        """
        self.facts, self.stage = facts, stage
        self.calls = facts.stages[stage]
        self.sizes = facts.value_sizes
        self.states = state_bytes(facts, stage)
        self.saved = self.flowing = 0  # bytes of values and saved tensors; bytes of gradients of values
        self.moments: list[MemoryMoment] | None = None
        self.values: Counter[Key] = Counter()  # value -> references: the table of values, and calls that save it
        self.gradients: set[Key] = set()
        buckets = facts.program.stages[stage].buckets
        self.shared = [b.states if zero_axes(facts.program, b.states) else () for b in buckets]
        self.passing = {s for states in self.shared for s in states} if facts.program.zero >= 2 else set()
        self.gathered = 0
        self.added: set[str] = set()  # states whose whole gradient is held
        self.whole = 0  # bytes of these gradients
        self.scattering = ScatterQueue[tuple[int, int]]()  # (bucket, bytes) of reduce-scatters in flight
        self.scattered: set[int] = set()  # buckets whose gradient pieces are held, under ZeRO 2 and 3
        self.pieces = 0  # bytes of these pieces
        self.turning = LevelReductionBytes(facts, stage)
        self.host = 0
        self.leaving = 0  # bytes on their way to host memory while the next computation runs
        self.totals = {v for c in self.calls if c.data.prologue for v in c.data.outputs}

    @property
    def held(self) -> int:
        return self.states + self.saved + self.flowing + self.shared_bytes + self.leaving

    @property
    def shared_bytes(self) -> int:
        sent = sum(size for _, size in self.scattering)
        return self.gathered + self.whole + sent + self.pieces + self.turning.held

    def hold_gradients(self, states: Iterable[str]) -> None:
        """Count the gradients of the parameters ``states`` (names) as held on the device. Gradients that are already
        counted are not counted again. ZeRO has not yet reduce-scattered them.
        """
        new = set(states) - self.added
        self.added |= new
        self.whole += sum(map(self.facts.gradient_bytes, new))

    def drop_gradients(self, states: Iterable[str]) -> None:
        """Count the gradients of the parameters ``states`` (names) as released from the device, because their
        reduce-scatter has started.
        """
        old = self.added.intersection(states)
        self.added -= old
        self.whole -= sum(map(self.facts.gradient_bytes, old))

    def bucket_bytes(self, number: int) -> int:
        return sum(self.facts.state_bytes(s) for s in self.shared[number])

    def build_moment(self, call: int | None = None, recomputed: int = 0) -> MemoryMoment:
        return MemoryMoment(call, self.saved + self.leaving, self.flowing, recomputed, self.shared_bytes, self.host)

    def note_moment(self, call: int, recomputed: int = 0) -> None:
        if self.moments is not None:
            self.moments.append(self.build_moment(call, recomputed))

    def list_moments(self, i: Instruction) -> tuple[list[MemoryMoment], MemoryMoment]:
        """Count the bytes that the instruction ``i`` allocates and releases on this rank. Return a list of peaks, and
        the moment after the instruction. The list has the peak of each of the instruction's block calls (such as
        layers); for an instruction without calls, its own peak if it is higher than the end.
        """
        self.moments = []
        peak, held = self.run_instruction(i)
        after = self.build_moment()
        if not self.moments and peak > held:  # a copy is sent, so the data exist twice
            self.moments = [after._replace(gathered=after.gathered + peak - held)]
        return self.moments, after

    def run_instruction(self, i: Instruction) -> tuple[int, int]:
        """Count the bytes that the instruction ``i`` allocates and releases on this rank. Return the peak device bytes
        while it runs, and the device bytes held after it.
        """
        peak = self.held
        match i.op:
            case "LOAD" | "RECV_F":
                for value in i.values:
                    self.hold_value(value, i.microbatch)
            case "TOTAL":
                for value in i.values:
                    self.hold_value(value, None)
            case "TOTAL_F":
                peak += sum(self.sizes[v] for v in i.values)
            case "F":
                self.run_forward(i)
            case "RECV_B":
                for value in i.values:
                    self.hold_gradient(value, i.microbatch)
            case "B" | "I" | "W":
                peak = self.run_backward(i)
            case "GATHER" if i.gradients:
                peak = max(peak, self.turning.add_collective(i) + self.held)
            case "GATHER" if self.facts.program.zero == 3:
                assert i.bucket is not None
                self.gathered += self.bucket_bytes(i.bucket)
                peak = self.held
                self.gathered -= self.count_fetched_bytes(
                    self.shared[i.bucket]
                )  # the gathered parameters contain this rank's pieces
            case "OFFLOAD" if i.calls is not None:
                self.offload_activations(i)
            case "FETCH" if i.calls is not None:
                self.fetch_activations(i)
            case "FETCH" if "parameters" in self.facts.program.offload:
                self.gathered += self.count_fetched_bytes(i.states)
            case "FREE" if i.states:
                self.gathered -= self.count_fetched_bytes(i.states)
            case "SCATTER" if not i.axes:
                peak = self.start_scatter(i)
            case "REDUCE" | "SCATTER" if i.bucket is not None:
                while any(bucket == i.bucket for bucket, _ in self.scattering):
                    peak = max(peak, self.collect_scatter())
                peak = max(peak, self.turning.add_collective(i) + self.held)
            case "SYNC" | "STEP":
                while self.scattering:
                    peak = max(peak, self.collect_scatter())
                self.settle_gradients(i.states)
                self.turning.finish()
            case "FREE" if i.bucket is not None:
                self.gathered -= self.bucket_bytes(i.bucket)
            case "FREE":
                for value in i.values:
                    if i.gradients:
                        self.gradients.discard((value, i.microbatch))
                        self.flowing -= self.sizes[value]
                    else:
                        self.release_value(value, i.microbatch)
        peak = max(peak, self.held)
        if i.op in ("F", "B", "I", "W"):
            self.leaving = 0
        if i.op in BACKWARD:
            self.scattering.computed()
        return peak, self.held

    def start_scatter(self, i: Instruction) -> int:
        """Count the device bytes of the reduce-scatter ``i`` of gradients, which starts now. Earlier reduce-scatters
        that must end first are counted as ended. Return the peak device bytes of this rank meanwhile.
        """
        assert i.bucket is not None
        peak = self.held
        for _ in self.scattering.list_blocking():
            peak = max(peak, self.collect_scatter())
        states = self.shared[i.bucket]
        whole = sum(map(self.facts.gradient_bytes, states))
        peak = max(peak, self.held + whole)  # a copy of the gradients is sent
        comes = whole if self.facts.program.whole_scatter else sum(map(self.facts.gradient_piece_bytes, states))
        bucket = self.facts.program.stages[self.stage].buckets[i.bucket]
        if bucket.compression is not None and not bucket.levels:
            comes = int(2 * whole * self.facts.wire_share(bucket))  # compressed bytes, sent and received
            peak += int(WORKING[bucket.compression] * whole)
        self.scattering.begin((i.bucket, whole + comes))
        self.drop_gradients(states)
        return peak

    def collect_scatter(self) -> int:
        """Count the oldest reduce-scatter of gradients in progress as ended, and its result as added to this rank's
        ZeRO pieces of the gradients. Return the peak device bytes of this rank meanwhile.
        """
        number = next(iter(self.scattering))[0]
        pieces = sum(map(self.facts.gradient_piece_bytes, self.shared[number]))
        peak = self.held + (pieces if self.facts.program.whole_scatter else 0)  # the sum of the parts
        if self.facts.program.zero >= 2 and number not in self.scattered:
            self.scattered.add(number)
            self.pieces += pieces
        self.scattering.end_first()
        return peak

    def settle_gradients(self, states: Sequence[str]) -> None:
        """Count the ZeRO pieces of gradients that a SYNC instruction creates on this rank. A SYNC sums the gradients of
        the parameters ``states`` (names), which several pipeline stages share. It creates pieces only if this stage has
        not reduce-scattered gradients of these parameters.
        """
        for number, held in enumerate(self.shared):
            if self.facts.program.zero >= 2 and number not in self.scattered and not set(held).isdisjoint(states):
                self.scattered.add(number)
                self.pieces += sum(map(self.facts.gradient_piece_bytes, held))

    def count_fetched_bytes(self, states: Sequence[str]) -> int:
        """Return the bytes that are copied from host memory to the device for the parameters ``states`` (names); 0 if
        parameters are not offloaded.
        """
        host_parameters = "parameters" in self.facts.program.offload
        return sum(self.facts.piece_bytes(s) for s in states) if host_parameters else 0

    def list_moved_calls(self, i: Instruction) -> list[CallFacts]:
        """Return the block calls (executions of blocks, such as layers) whose activations the OFFLOAD or FETCH
        instruction ``i`` moves: those of its calls that have a backward.
        """
        assert i.calls is not None
        return [call for call in self.calls[slice(*i.calls)] if call.has_backward]

    def offload_activations(self, i: Instruction) -> None:
        """Count the tensors that the block calls (such as layers) of the OFFLOAD instruction ``i`` saved for backward
        as held in host memory. On the device they count as held until the next computation ends.
        """
        for call in self.list_moved_calls(i):
            before = self.saved
            for value in call.moves:
                self.release_value(value, i.microbatch)
            self.saved -= call.kept_bytes
            self.leaving += before - self.saved
            self.host += self.facts.moved_bytes(call)

    def fetch_activations(self, i: Instruction) -> None:
        """Count the tensors that the block calls (such as layers) of the FETCH instruction ``i`` saved for backward as
        moved from host memory back to the device.
        """
        for call in self.list_moved_calls(i):
            for value in call.moves:
                self.hold_value(value, i.microbatch)
            self.saved += call.kept_bytes
            self.host -= self.facts.moved_bytes(call)

    def hold_value(self, value: str, microbatch: int | None) -> None:
        key = value, None if value in self.totals else microbatch
        self.values[key] += 1
        if self.values[key] == 1:
            self.saved += self.sizes[value]

    def release_value(self, value: str, microbatch: int | None) -> None:
        key = value, None if value in self.totals else microbatch
        self.values[key] -= 1
        if not self.values[key]:
            self.saved -= self.sizes[value]

    def hold_gradient(self, value: str, microbatch: int | None) -> None:
        if (value, microbatch) not in self.gradients:
            self.gradients.add((value, microbatch))
            self.flowing += self.sizes[value]

    def run_forward(self, i: Instruction) -> None:
        """Count as held the outputs of the block calls (such as layers) of the forward instruction ``i``, and the
        tensors that these calls save for backward.
        """
        assert i.calls is not None
        for position, call in enumerate(self.calls[slice(*i.calls)], i.calls[0]):
            for value in call.data.outputs:
                self.hold_value(value, i.microbatch)
            for value in call.keeps:
                self.hold_value(value, i.microbatch)
            self.saved += call.kept_bytes
            self.note_moment(position)

    def run_backward(self, i: Instruction) -> int:
        """Count the device bytes of the gradients that the backward instruction ``i`` (B, I or W) computes, and of the
        tensors that it releases. Return the peak device bytes of the instruction.
        """
        assert i.calls is not None
        peak = self.held
        for position in reversed(range(*i.calls)):
            call = self.calls[position]
            if not call.has_backward:
                continue
            if i.op != "W":
                for value in call.gives:
                    self.hold_gradient(value, i.microbatch)
            new = [s for s in call.adds if s in self.passing] if i.op != "I" else []
            # the other gradients are created while the call's saved tensors are freed
            self.hold_gradients(sorted(new, key=self.facts.gradient_bytes)[-1:])
            first = self.held + call.recomputed_bytes
            self.note_moment(position, call.recomputed_bytes)
            if i.op != "W":
                for value in call.keeps:
                    self.release_value(value, i.microbatch)
                self.saved -= call.kept_bytes
            if i.op == "I":
                for value in call.carries:
                    self.hold_value(value, i.microbatch)
                self.saved += call.carried_bytes
                self.note_moment(position)  # the carried tensors are held until the call's W
            if i.op == "W":
                for value in call.carries:
                    self.release_value(value, i.microbatch)
                self.saved -= call.carried_bytes
            self.hold_gradients(new)
            if self.held > first:
                self.note_moment(position)
            peak = max(peak, first, self.held)
        return peak


class _MicrobatchChange(NamedTuple):
    """The effect of an instruction on one microbatch on the bytes that a rank holds. All numbers of bytes are relative
    to those before the instruction.

    ``saved`` and ``gradients``: change of the fields of :class:`MemoryMoment` with these names. ``fullest``: the moment
    of the instruction with the most bytes. ``total``: bytes at this moment, including working memory. ``then``: the
    tensors of the microbatch that the rank holds after the instruction.
    """

    saved: int
    gradients: int
    fullest: MemoryMoment
    total: int
    then: _MicrobatchHoldings


@dataclass(eq=False)
class _MicrobatchHoldings:
    """The tensors of one microbatch that a rank holds at some position in its instruction list. ``values``: name of a
    value (a tensor that passes between block calls, such as layers) -> number of its uses. ``gradients``: names of the
    values whose gradients exist. ``changes``: effects of instructions that were simulated from this state. The key is
    the index of the instruction's form (the instruction without its microbatch number).
    """

    values: dict[str, int]
    gradients: tuple[str, ...]
    changes: dict[int, _MicrobatchChange] = field(default_factory=dict)


class _PeakFinder(_MemoryCounter):
    """Finds the moment of peak memory of one rank. ``working``: bytes of working memory of each block call (such as a
    layer) of the stage while it runs.

    An instruction on a microbatch usually changes only the tensors of this microbatch, and the change depends only on
    the earlier instructions on the same microbatch. All microbatches run nearly the same instructions, so a change is
    computed for one microbatch and reused for the others. This does not hold for programs with totals (sums over the
    batch) or with offloading, nor for backwards whose gradients ZeRO scatters. Their instructions are counted one by
    one.
    """

    def __init__(self, facts: ProgramFacts, stage: int, working: Sequence[int]) -> None:
        super().__init__(facts, stage)
        self.working = working
        self.most, self.most_total = (MemoryMoment(None, 0, 0), 0), 0
        self.reuses_changes = not self.totals and not facts.program.offload
        self.empty = _MicrobatchHoldings({}, ())
        self.holdings: dict[int, _MicrobatchHoldings] = {}
        self.scatters = [not self.passing.isdisjoint(call.adds) for call in self.calls]

    def find_fullest_moment(self, instructions: Sequence[Instruction]) -> tuple[MemoryMoment, int]:
        """Return the moment at which the rank holds the most bytes while it runs ``instructions``, and the bytes of
        working memory of the block call (an execution of a block, such as a layer) that runs at this moment.
        """
        forms = self.facts.forms(self.stage, instructions)
        ignored = [i.microbatch is not None and i.op in _WITHOUT_EFFECT for i in forms.firsts]
        scatters = [
            i.op in ("B", "W") and i.calls is not None and any(self.scatters[slice(*i.calls)]) for i in forms.firsts
        ]
        shared = self.shared_bytes  # not of one microbatch; changes only if an instruction is counted individually
        for i, form in zip(instructions, forms.numbers, strict=True):
            if i.microbatch is None or not self.reuses_changes:
                self.compare_moments(i)
                shared = self.shared_bytes
                continue
            if ignored[form]:
                continue
            before = self.holdings.get(i.microbatch, self.empty)
            change = before.changes.get(form)
            if change is None or scatters[form]:
                self.holdings[i.microbatch] = self.follow_microbatch(before, form, i, change)
                shared = self.shared_bytes
                continue
            if self.saved + self.flowing + shared + change.total > self.most_total:
                fullest = change.fullest
                self.keep_fuller(
                    fullest._replace(
                        saved=self.saved + fullest.saved, gradients=self.flowing + fullest.gradients, gathered=shared
                    )
                )
            self.saved += change.saved
            self.flowing += change.gradients
            self.holdings[i.microbatch] = change.then
            if i.op in BACKWARD:
                self.scattering.computed()
        return self.most

    def follow_microbatch(
        self, before: _MicrobatchHoldings, key: int, i: Instruction, known: _MicrobatchChange | None
    ) -> _MicrobatchHoldings:
        """Simulate the instruction ``i`` on a microbatch: count the bytes that it allocates and releases. Return the
        tensors of the microbatch that the rank holds after ``i``. ``before``: the tensors of the microbatch that the
        rank holds before ``i``; its ``changes`` store the effect of ``i`` under ``key``, the index of the form of
        ``i``. ``known``: the stored effect, if the same instruction was simulated for another microbatch; otherwise
        ``None``.
        """
        number = i.microbatch
        self.values.update({(name, number): uses for name, uses in before.values.items()})
        self.gradients.update((name, number) for name in before.gradients)
        saved, flowing = self.saved, self.flowing
        moments = self.compare_moments(i)
        uses = {name: count for (name, _), count in self.values.items() if count}
        left = _MicrobatchHoldings(uses, tuple(name for name, _ in self.gradients))
        self.values.clear()
        self.gradients.clear()
        if known is not None:
            return known.then
        changes = [m._replace(saved=m.saved - saved, gradients=m.gradients - flowing, gathered=0) for m in moments]
        totals = [m.saved + m.gradients + m.recomputed + self.get_working_bytes(m) for m in changes]
        place = max(range(len(totals)), key=totals.__getitem__)
        before.changes[key] = _MicrobatchChange(
            self.saved - saved, self.flowing - flowing, changes[place], totals[place], left
        )
        return left

    def compare_moments(self, i: Instruction) -> list[MemoryMoment]:
        """Count the bytes that the instruction ``i`` allocates and releases, and keep its fullest moment if it is the
        fullest so far. Return the moments of ``i``: its peaks, then the end of the instruction.
        """
        peaks, after = self.list_moments(i)
        for moment in (*peaks, after):
            self.keep_fuller(moment)
        return [*peaks, after]

    def keep_fuller(self, moment: MemoryMoment) -> None:
        """Record ``moment`` as the fullest if the rank holds more bytes, including working memory, than at all earlier
        moments.
        """
        working = self.get_working_bytes(moment)
        total = moment.saved + moment.gradients + moment.recomputed + moment.gathered + working
        if total > self.most_total:
            self.most, self.most_total = (moment, working), total

    def get_working_bytes(self, moment: MemoryMoment) -> int:
        return 0 if moment.call is None else self.working[moment.call]
