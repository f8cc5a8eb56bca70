"""What a rank holds while it runs its instructions, in bytes.

Counted: states, the gradients of parameters (from the start), values and their gradients from when they are made
until they are freed, and what each call keeps for its backward. What an operator needs while it runs, and optimizer
state, are not: they are to be given as extra.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from runtime.facts import ProgramFacts, value_bytes
from runtime.program import Instruction

Key = tuple[str, int | None]


class Moment(NamedTuple):
    """What a rank holds besides its states, in bytes, at the fullest of an instruction or of one of its calls.

    ``saved``: values, and what calls keep for backward; ``gradients``: of values; ``recomputed``: what a backward holds
    while it runs. ``call``: which of the stage's calls, ``None``: no single one.
    """

    call: int | None
    saved: int
    gradients: int
    recomputed: int = 0


def state_bytes(facts: ProgramFacts, stage: int) -> int:
    """The bytes of a stage's states and of their gradients, on one rank."""
    held = [name for name, state in facts.program.states.items() if stage in state.stages]
    return sum(facts.state_bytes(name) * (2 if name in facts.with_gradient else 1) for name in held)


def memory_steps(facts: ProgramFacts, stage: int, instructions: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """For each instruction the bytes held at its fullest, and after it, states included.

    The list must be one that the prover accepts. A value that is also kept for backward is counted once.
    """
    holder = _Holder(facts, stage)
    for instruction in instructions:
        yield holder.run(instruction)


def memory_moments(
    facts: ProgramFacts, stage: int, instructions: Sequence[Instruction]
) -> Iterator[tuple[list[Moment], Moment]]:
    """For each instruction the moments that it goes through, call by call, and what is held after it."""
    holder = _Holder(facts, stage)
    for instruction in instructions:
        holder.moments = []
        holder.run(instruction)
        yield holder.moments, holder.moment()


def peak_bytes(
    facts: ProgramFacts, stage: int, instructions: Sequence[Instruction], extra_bytes: int = 0
) -> tuple[int, int]:
    """The most bytes that a rank holds, and the instruction at which it first does."""
    peaks = [peak for peak, _ in memory_steps(facts, stage, instructions)]
    if not peaks:
        return state_bytes(facts, stage) + extra_bytes, 0
    peak = max(peaks)
    return peak + extra_bytes, peaks.index(peak)


class _Holder:
    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        self.facts = facts
        self.calls = facts.stages[stage]
        self.sizes = {name: value_bytes(value) for name, value in facts.program.values.items()}
        self.states = state_bytes(facts, stage)
        self.saved = self.flowing = 0  # what is held for backward or to be read, and gradients of values
        self.moments: list[Moment] | None = None
        self.values: Counter[Key] = Counter()  # how many hold the value: the table, and calls that keep it
        self.gradients: set[Key] = set()
        self.totals = {v for c in self.calls if c.data.prologue for v in c.data.outputs}

    @property
    def held(self) -> int:
        return self.states + self.saved + self.flowing

    def moment(self, call: int | None = None, recomputed: int = 0) -> Moment:
        return Moment(call, self.saved, self.flowing, recomputed)

    def note(self, call: int, recomputed: int = 0) -> None:
        if self.moments is not None:
            self.moments.append(self.moment(call, recomputed))

    def run(self, i: Instruction) -> tuple[int, int]:
        peak = self.held
        match i.op:
            case "LOAD" | "RECV_F":
                for value in i.values:
                    self.hold(value, i.microbatch)
            case "TOTAL":
                for value in i.values:
                    self.hold(value, None)
            case "TOTAL_F":
                peak += sum(self.sizes[v] for v in i.values)
            case "F":
                self.forward(i)
            case "RECV_B":
                for value in i.values:
                    self.hold_gradient(value, i.microbatch)
            case "B" | "I" | "W":
                peak = self.backward(i)
            case "FREE":
                for value in i.values:
                    if i.gradients:
                        self.gradients.discard((value, i.microbatch))
                        self.flowing -= self.sizes[value]
                    else:
                        self.release(value, i.microbatch)
        return max(peak, self.held), self.held

    def hold(self, value: str, microbatch: int | None) -> None:
        key = value, None if value in self.totals else microbatch
        self.values[key] += 1
        if self.values[key] == 1:
            self.saved += self.sizes[value]

    def release(self, value: str, microbatch: int | None) -> None:
        key = value, None if value in self.totals else microbatch
        self.values[key] -= 1
        if not self.values[key]:
            self.saved -= self.sizes[value]

    def hold_gradient(self, value: str, microbatch: int | None) -> None:
        if (value, microbatch) not in self.gradients:
            self.gradients.add((value, microbatch))
            self.flowing += self.sizes[value]

    def forward(self, i: Instruction) -> None:
        assert i.calls is not None
        for position, call in enumerate(self.calls[slice(*i.calls)], i.calls[0]):
            for value in call.data.outputs:
                self.hold(value, i.microbatch)
            for value in call.keeps:
                self.hold(value, i.microbatch)
            self.saved += call.kept_bytes
            self.note(position)

    def backward(self, i: Instruction) -> int:
        assert i.calls is not None
        peak = self.held
        for position in reversed(range(*i.calls)):
            call = self.calls[position]
            if not call.has_backward:
                continue
            if i.op != "W":
                for value in call.gives:
                    self.hold_gradient(value, i.microbatch)
            peak = max(peak, self.held + call.recomputed_bytes)
            self.note(position, call.recomputed_bytes)
            if i.op != "W":
                for value in call.keeps:
                    self.release(value, i.microbatch)
                self.saved -= call.kept_bytes
            if i.op == "I":
                for value in call.carries:
                    self.hold(value, i.microbatch)
                self.saved += call.carried_bytes
            if i.op == "W":
                for value in call.carries:
                    self.release(value, i.microbatch)
                self.saved -= call.carried_bytes
            peak = max(peak, self.held)
        return peak
