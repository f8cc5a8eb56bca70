"""Trace the communication events of one rank's instructions. Instructions that repeat in many microbatches are checked
once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.instructions import Forms, Instruction, ReceiveEvent, SendEvent, Trace
from partitioner.runtime.prove.abstract_rank import StageInterpreter
from partitioner.runtime.prove.errors import Refusal
from partitioner.runtime.prove.gradient_ledger import Returns
from partitioner.runtime.prove.instruction_fields import check_fields


def trace_instructions(facts: ProgramFacts, stage: int, instructions: Sequence[Instruction], returns: Returns) -> Trace:
    """Return the communication events (collectives, sends and receives) of a rank that runs ``instructions``, as pairs
    (instruction index, event), in order. Raise :class:`Refusal` at the first invalid instruction, or at the end if a
    tensor or gradient was not freed.

    ``stage``: index of the rank's pipeline stage. ``returns``: the gradients that the stage must receive, as (name of a
    tensor that stages send each other, microbatch) -> the stages that send a summand of its gradient. ``facts``: the
    program of all ranks, with the gradients, collectives and memory of its block calls (such as layers).
    """
    forms = facts.forms(stage, instructions)
    check_fields(facts.program, stage, instructions, forms)
    quick = _RepeatingInterpreter(facts, stage, returns)
    if quick.can_follow(forms):
        try:
            return quick.trace_all(instructions, forms)
        except Refusal:
            pass  # the full check below names the right microbatch in its error
    machine = StageInterpreter(facts, stage, returns)
    for index, instruction in enumerate(instructions):
        machine.run_instruction(index, instruction)
    try:
        machine.check_end()
    except Refusal as refusal:
        if refusal.location.index is None:
            refusal.location = replace(refusal.location, index=max(len(instructions) - 1, 0))
        raise
    return tuple(machine.trace)


@dataclass(eq=False)
class _MicrobatchPoint:
    """The state of one microbatch on a rank after some instructions: the contents of the interpreter's ``tables`` and
    ``sets`` for this microbatch, without its number. ``next``: index of the form of an instruction (without its
    microbatch number) that was checked in this state -> the state after the instruction.
    """

    tables: tuple[dict[Any, Any], ...]
    sets: tuple[frozenset[Any], ...]
    next: dict[int, _MicrobatchPoint] = field(default_factory=dict)


@dataclass(frozen=True)
class _Repetition:
    """The effects of an instruction that are recorded again when it repeats on a further microbatch. ``calls``: the
    positions of the block calls (such as layers) that it runs, in order. ``event``: class of its transfer event,
    direction and the other stage; ``None`` if it does not transfer values.
    """

    calls: tuple[int, ...] = ()
    event: tuple[type[SendEvent | ReceiveEvent], Literal["F", "B"], int] | None = None


_OF_A_MICROBATCH = frozenset({"LOAD", "RECV_F", "F", "SEND_F", "RECV_B", "B", "I", "W", "SEND_B", "FREE"})


class _RepeatingInterpreter(StageInterpreter):
    """Checks instructions that repeat in many microbatches only once.

    The requirements and effects of an instruction on a microbatch concern this microbatch alone, except for parameters
    and the order of events. So if the same instructions have run before on another microbatch, the instruction is valid
    as well, and only its events and its uses of parameters are recorded. This does not hold for programs with totals
    (sums over the batch), with offloaded data or with buffers that forward changes: :meth:`can_follow` returns
    ``False`` for them. Messages may name instructions of another microbatch.
    """

    def __init__(self, facts: ProgramFacts, stage: int, returns: Returns) -> None:
        super().__init__(facts, stage, returns)
        ledger = self.gradients
        self.tables: tuple[dict[Any, Any], ...] = (self.alive, self.freed, self.origin, ledger.taken, ledger.freed)
        self.sets: tuple[set[Any], ...] = (self.forward, self.halfway, self.backward)
        self.points: dict[int, _MicrobatchPoint] = {}

    def can_follow(self, forms: Forms) -> bool:
        """Return whether this interpreter can check a list with the distinct instructions ``forms``."""
        simple = all(i.op not in ("TOTAL_F", "TOTAL", "UPDATE", "OFFLOAD", "FETCH") for i in forms.firsts)
        return simple and not self.of_prologue and not self.updates.due

    def trace_all(self, instructions: Sequence[Instruction], forms: Forms) -> Trace:
        """Check ``instructions``, and return the communication events as pairs (instruction index, event). ``forms``:
        the distinct instructions, up to the microbatch number. Raise :class:`Refusal` if an instruction is invalid.
        """
        self.points = points = self.find_first_points()
        repeats = [self.find_repetition(first) for first in forms.firsts]
        stop = len(instructions)
        for index, (instruction, form) in enumerate(zip(instructions, forms.numbers, strict=True)):
            repetition, microbatch = repeats[form], instruction.microbatch
            if repetition is None or microbatch is None:
                if instruction.op == "STEP":
                    stop = index
                    break
                self.run_instruction(index, instruction)
                continue
            point = points[microbatch]
            after = point.next.get(form)
            if after is None:
                self.restore(microbatch, point)
                self.run_instruction(index, instruction)
                after = point.next[form] = self.take()
            elif repetition.event is not None:
                kind, direction, peer = repetition.event
                self.trace.append((index, kind(direction, peer, instruction.values, microbatch)))
            elif repetition.calls:
                self.index = index
                self.repeat_calls(instruction.op, repetition.calls, microbatch)
            points[microbatch] = after
        for microbatch, point in points.items():
            self.restore(microbatch, point)
        for index, instruction in enumerate(instructions[stop:], stop):
            self.run_instruction(index, instruction)
        self.check_end()
        return tuple(self.trace)

    def find_repetition(self, i: Instruction) -> _Repetition | None:
        """Return the effects to record when the instruction ``i`` repeats on a further microbatch; ``None`` if it must
        be checked each time, because it is not on a microbatch.
        """
        if i.microbatch is None or i.op not in _OF_A_MICROBATCH or (i.op == "FREE" and not i.values):
            return None
        if i.calls is not None:
            every = range(*i.calls) if i.op == "F" else reversed(range(*i.calls))
            return _Repetition(tuple(p for p in every if i.op == "F" or self.calls[p].has_backward))
        if i.peer is None:
            return _Repetition()
        kind = SendEvent if i.op.startswith("SEND") else ReceiveEvent
        return _Repetition((), (kind, "F" if i.op.endswith("_F") else "B", i.peer))

    def find_first_points(self) -> dict[int, _MicrobatchPoint]:
        """Return, for each microbatch, its state before the first instruction, as a dict. Microbatches share one state
        object if the same stages send back gradients of the same values.
        """
        sent_back: dict[int, list[tuple[str, frozenset[int]]]] = {}
        for (value, microbatch), stages in self.gradients.returns.items():
            sent_back.setdefault(microbatch, []).append((value, stages))
        known: dict[frozenset[tuple[str, frozenset[int]]], _MicrobatchPoint] = {}
        nothing = self.take()
        return {
            microbatch: known.setdefault(
                frozenset(sent_back.get(microbatch, ())), _MicrobatchPoint(nothing.tables, nothing.sets)
            )
            for microbatch in range(self.program.num_microbatches)
        }

    def restore(self, microbatch: int, point: _MicrobatchPoint) -> None:
        """Copy the state ``point`` of a microbatch into the interpreter's tables and sets, under the number
        ``microbatch``.
        """
        for table, saved in zip(self.tables, point.tables, strict=False):
            table.update({(name, microbatch): value for name, value in saved.items()})
        added = point.tables[-1]
        self.gradients.added.update({(name, microbatch): set(adders) for name, adders in added.items()})
        for found, kept in zip(self.sets, point.sets, strict=True):
            found.update((name, microbatch) for name in kept)

    def take(self) -> _MicrobatchPoint:
        """Return the state of the only microbatch in the interpreter's tables and sets, and empty them."""
        tables = tuple({name: value for (name, _), value in table.items()} for table in self.tables)
        added = {name: frozenset(adders) for (name, _), adders in self.gradients.added.items()}
        point = _MicrobatchPoint((*tables, added), tuple(frozenset(n for n, _ in kept) for kept in self.sets))
        for table in (*self.tables, self.gradients.added):
            table.clear()
        for kept in self.sets:
            kept.clear()
        return point

    def repeat_calls(self, op: str, calls: Sequence[int], microbatch: int) -> None:
        """Record the events and the uses of parameters of an instruction of kind ``op`` (F, B, I or W), which was
        already checked on another microbatch. ``calls``: the positions of the block calls (such as layers) that it
        runs, in order. ``microbatch``: its microbatch number.
        """
        if op == "F":
            for position in calls:
                self.read_states(position)
                self.trace_collectives("F", position, microbatch)
            return
        self.reductions.computed()
        for position in calls:
            self.read_states(position)
        self.states.before_step()
        for position in calls:
            if op != "I":
                self.add_state_gradients(position, microbatch)
            self.trace_collectives(op, position, microbatch)
