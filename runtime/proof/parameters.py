"""The parameters that a rank shares, followed through its instructions: are they there when they are read?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from runtime.facts import ProgramFacts
from runtime.proof.errors import Refusal
from runtime.proof.states import split_axes
from runtime.zero import zero_axes


class Parameters:
    """Each shared bucket is gathered before a call reads it; under ZeRO 3 it is freed after, else gathered once."""

    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        self.program = facts.program
        self.here = facts.program.stages[stage]
        self.shared = {n: b.states for n, b in enumerate(self.here.buckets) if zero_axes(self.program, b.states)}
        home = {state: number for number, states in self.shared.items() for state in states}
        self.needs = [sorted({home[s] for s in call.states if s in home}) for call in self.here.calls]
        self.there: dict[int, int] = {}  # bucket -> the instruction that gathered it
        self.freed: dict[int, int] = {}
        self.times: Counter[int] = Counter()
        self.under_way: dict[int, Hashable] = {}  # gathered, and not waited for

    def states(self, number: int) -> tuple[str, ...]:
        return self.here.buckets[number].states

    def axes(self, number: int) -> tuple[str, ...]:
        return split_axes(self.program, zero_axes(self.program, self.states(number)))

    def gather(self, number: int, index: int) -> Hashable:
        """What has to agree between those who gather."""
        if number not in self.shared:
            raise Refusal("fields", f"bucket {number} is whole on every rank: there is nothing to gather")
        if number in self.there:
            raise Refusal("twice", f"bucket {number} was gathered at instruction {self.there[number]}")
        self.there[number] = index
        self.times[number] += 1
        self.under_way[number] = "GATHER", self.shared[number], self.times[number]
        return self.under_way[number]

    def read(self, position: int) -> Iterator[Hashable]:
        """What a call has to wait for."""
        for number in self.needs[position]:
            if number not in self.there:
                gone = f"freed at instruction {self.freed[number]}" if number in self.freed else "never gathered"
                state = next(s for s in self.here.calls[position].states if s in self.shared[number])
                raise Refusal("order", f"{self.here.calls[position].path!r} reads {state!r}, which was {gone}")
            if number in self.under_way:
                yield self.under_way.pop(number)

    def free(self, number: int, index: int) -> Hashable:
        """What has to be waited for before."""
        if number not in self.shared or self.program.zero < 3:
            raise Refusal("fields", f"bucket {number} stays on every rank: it is not to be freed")
        if number not in self.there:
            what = f"was freed at instruction {self.freed[number]}" if number in self.freed else "was never gathered"
            raise Refusal("twice" if number in self.freed else "order", f"bucket {number} {what}")
        del self.there[number]
        self.freed[number] = index
        return self.under_way.pop(number, None)

    def finish(self) -> None:
        for number, index in self.there.items():
            if self.program.zero == 3:
                raise Refusal("leak", f"bucket {number} is gathered here and never freed", index=index)
