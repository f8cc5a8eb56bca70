"""What is in host memory, followed through a rank's instructions: is it back when it is used, whole when it goes?"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from runtime.facts import ProgramFacts
from runtime.offload import host_states
from runtime.program import Instruction
from runtime.proof.errors import Refusal
from runtime.proof.ledger import StateGradients
from runtime.zero import zero_axes

Run = tuple[int, int]  # call, microbatch


class Parked:
    """What calls keep for their backward: moved once, after forward, and back before backward."""

    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        self.calls = facts.stages[stage]
        self.offloads = "activations" in facts.program.offload
        self.away: dict[Run, int] = {}  # -> the instruction that moved it
        self.back: dict[Run, int] = {}

    def runs(self, i: Instruction, forward: Collection[Run], *backward: Collection[Run]) -> list[Run]:
        """The calls of an OFFLOAD or FETCH: those that have run ``forward``, and are yet to run ``backward``."""
        if i.calls is None or i.microbatch is None:
            return []
        runs = [(p, i.microbatch) for p in range(*i.calls) if self.calls[p].has_backward]
        for run in runs:
            if run not in forward:
                raise Refusal("order", f"what {self._text(run)} keeps is not there: it has not run forward")
            if any(run in gone for gone in backward):
                raise Refusal("order", f"what {self._text(run)} keeps is gone: its backward has run")
        return runs

    def offload(self, run: Run, index: int) -> None:
        if not self.offloads:
            raise Refusal("fields", "moves activations to host memory, which the program does not say it does")
        at = self.away.get(run, self.back.get(run))
        if at is not None:
            raise Refusal("twice", f"what {self._text(run)} keeps was moved before: see instruction {at}")
        self.away[run] = index

    def fetch(self, run: Run, index: int) -> None:
        if run in self.back:
            raise Refusal("twice", f"what {self._text(run)} keeps came back at instruction {self.back[run]}")
        if run not in self.away:
            raise Refusal("order", f"what {self._text(run)} keeps is not in host memory")
        del self.away[run]
        self.back[run] = index

    def read(self, run: Run) -> None:
        if run in self.away:
            message = f"reads what {self._text(run)} keeps, which went to host memory at instruction {self.away[run]}"
            raise Refusal("order", f"{message} and was not fetched")

    def _text(self, run: Run) -> str:
        return f"{self.calls[run[0]].data.path!r} of microbatch {run[1]}"


class HostStates:
    """Parameters that are in host memory: fetched before they are read, and their gradients taken there, once."""

    def __init__(self, facts: ProgramFacts, stage: int, gradients: StateGradients) -> None:
        self.program = facts.program
        self.here = facts.program.stages[stage]
        self.hosted = host_states(facts.program, stage)
        self.gradients = gradients
        self.passing = "parameters" in facts.program.offload
        self.sharded = {s for b in self.here.buckets for s in b.states if zero_axes(self.program, b.states)}
        self.wanted = self.hosted & facts.with_gradient
        self.there: dict[str, int] = {}  # -> the instruction that fetched it
        self.freed: dict[str, int] = {}
        self.taken: dict[str, int] = {}  # -> the OFFLOAD of its gradient

    def fetch(self, states: Sequence[str], index: int) -> None:
        for state in states:
            if state not in self.hosted:
                raise Refusal("fields", f"{state!r} is not in host memory: there is nothing to fetch")
            if state in self.there:
                raise Refusal("twice", f"{state!r} was fetched at instruction {self.there[state]}")
            self.there[state] = index

    def read(self, states: Sequence[str], gather: bool = False) -> None:
        """A call reads ``states``, or a GATHER the shards of them that this rank has."""
        for state in states:
            if state not in self.hosted or (state in self.sharded and not gather):
                continue  # a call reads what was gathered
            if state not in self.there:
                gone = f"freed at instruction {self.freed[state]}" if state in self.freed else "never fetched"
                raise Refusal("order", f"reads {state!r}, which is in host memory and was {gone}")
            if gather and self.passing:  # the GATHER forgets them
                self.freed[state] = self.there.pop(state)

    def free(self, states: Sequence[str], index: int) -> None:
        for state in states:
            if state not in self.hosted or state in self.sharded or not self.passing:
                raise Refusal("fields", f"the state {state!r} stays on the device: it is not to be freed")
            if state not in self.there:
                again = f"was freed at instruction {self.freed[state]}" if state in self.freed else "was never fetched"
                raise Refusal("twice" if state in self.freed else "order", f"the state {state!r} {again}")
            del self.there[state]
            self.freed[state] = index

    def offload(self, states: Sequence[str], index: int) -> None:
        self.gradients.before_step()
        for state in states:
            if state not in self.wanted:
                raise Refusal("fields", f"no gradient of {state!r} is wanted in host memory")
            if state in self.taken:
                raise Refusal("twice", f"the gradient of {state!r} went at instruction {self.taken[state]}")
            self.gradients.offload(state, index)
            self.taken[state] = index

    def step(self) -> None:
        for state in sorted(self.wanted - self.taken.keys()):
            raise Refusal("missing", f"the gradient of {state!r} never reaches host memory, where it is stepped")

    def finish(self) -> None:
        for state, index in self.there.items():
            if self.passing:
                raise Refusal("leak", f"the state {state!r} is fetched here and never freed", index=index)
