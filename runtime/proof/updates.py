"""Buffers that forward changes: written once, by all that hold them, after the last that reads the old value."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from passes.variance import Sameness
from runtime.events import Collective
from runtime.facts import ProgramFacts
from runtime.program import Program, StateData
from runtime.proof.errors import Refusal


def check_updates(program: Program) -> None:
    """Raise :class:`Refusal` where a new value is not as the buffer is held, or no call of its stages makes it."""
    makers = _makers(program)
    for name, state in program.states.items():
        problem = "" if state.update is None else _problem(program, state, state.update, makers)
        if problem:
            stage = min((s for s in state.stages if 0 <= s < len(program.stages)), default=0)
            raise Refusal("structure", f"the state {name!r} {problem}", stage=stage, state=name)


def _makers(program: Program) -> dict[str, set[int]]:
    """The stages whose calls, but for prologue calls, make each value."""
    makers: dict[str, set[int]] = {}
    for s, stage in enumerate(program.stages):
        for call in stage.calls:
            for value in () if call.prologue else call.outputs:
                makers.setdefault(value, set()).add(s)
    return makers


def _problem(program: Program, state: StateData, name: str, makers: dict[str, set[int]]) -> str:
    if state.kind != "buffer":
        return f"is a {state.kind} and takes the value {name!r}: only buffers do"
    if name not in program.values:
        return f"takes the value {name!r}, which does not exist"
    value, made_by = program.values[name], makers.get(name, set())
    if len(made_by) != 1 or not made_by <= set(state.stages):
        return f"is on the stages {state.stages} and takes {name!r}, which is made on {tuple(sorted(made_by))}"
    if (value.dtype, value.layout, value.context, state.expert_layout) != (state.dtype, state.layout, "R", "R"):
        return f"is {state.dtype} and {state.layout} over tp, but takes {value.dtype} that is {value.layout}"
    return ""


def check_alike(program: Program, known: dict[str, Sameness]) -> None:
    """A new value that is not added up does not depend on what differs between microbatches, or ranks of ``dp``.

    Raises :class:`Refusal`.
    """
    for name, state in program.states.items():
        if state.update is not None and state.keeps is None and known.get(state.update) == "different":
            message = f"the state {name!r} takes {state.update!r}, which differs between the parts of the batch"
            raise Refusal("structure", message, stage=min(state.stages), state=name)


class Updates:
    """What one rank has written so far."""

    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        self.program, self.stage = facts.program, stage
        self.due = {n for n, s in facts.program.states.items() if s.update is not None and stage in s.stages}
        self.done: dict[str, int] = {}  # state -> index of its UPDATE
        self.made = {v: k for k, call in enumerate(facts.stages[stage]) for v in call.data.outputs}

    def update(
        self, states: Sequence[str], index: int, forward: Collection[tuple[int, int]]
    ) -> tuple[list[str], list[Collective]]:
        """The values that are read here, and the collectives in which ranks of ``dp`` meet for those that are added up,
        and stages, where there are several. ``forward``: the calls, and their microbatches, that have run."""
        together = {self.program.states[s].stages for s in states}
        if len(together) > 1:
            raise Refusal("fields", f"updates states of different stages: {', '.join(states)}")
        values: list[str] = []
        added: list[str] = []
        for name in states:
            if name not in self.due:
                raise Refusal("fields", f"{name!r} is no buffer of the stage that forward changes")
            if name in self.done:
                raise Refusal("twice", f"{name!r} was updated at instruction {self.done[name]}")
            self.done[name] = index
            value = self.program.states[name].update
            assert value is not None
            if value in self.made:
                self._check_sum(name, self.made[value], forward)
                (values if self.program.states[name].keeps is None else added).append(value)
        (stages,) = together
        meetings = []
        if added and self.program.mesh.get("dp", 1) > 1:
            text = f"sums of {', '.join(added)} over dp"
            meetings.append(Collective(("dp",), ("UPDATE", tuple(added)), text))
        text = f"new values of {', '.join(states)} over stages {stages}"
        if len(stages) > 1:
            meetings.append(Collective((), ("UPDATE", tuple(states)), text, "", stages))
        return values, meetings

    def _check_sum(self, name: str, position: int, forward: Collection[tuple[int, int]]) -> None:
        """All microbatches have added to what is added up."""
        missing = [m for m in range(self.program.num_microbatches) if (position, m) not in forward]
        if missing and self.program.states[name].keeps is not None:
            raise Refusal("order", f"takes the sum for {name!r}, to which microbatch {missing[0]} has not added yet")

    def read(self, states: Sequence[str]) -> None:
        """A call reads the old values."""
        for name in states if self.done else ():
            if name in self.done:
                raise Refusal("order", f"reads {name!r}, which was updated at instruction {self.done[name]}")

    def finish(self) -> None:
        missing = sorted(self.due - self.done.keys())
        if missing:
            raise Refusal("missing", f"{missing[0]!r} is never updated")
