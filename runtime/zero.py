"""What a program says of the states that ranks share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from runtime.pieces import Piece
from runtime.program import CallData, Instruction, Program, Stage, shard_shape

COMPUTING = frozenset({"TOTAL_F", "F", "B", "I", "W"})
BACKWARD = frozenset({"B", "I", "W"})
Scatter = TypeVar("Scatter")


class ScatterQueue(Generic[Scatter]):
    """The SCATTERs that are under way: those behind one backward, whose gradients are all there at the same time.

    The first one behind a further backward waits until these have ended, so that no more memory is taken.
    """

    def __init__(self) -> None:
        self._under_way: deque[Scatter] = deque()
        self._computed = False

    def __contains__(self, scatter: Scatter) -> bool:
        return scatter in self._under_way

    def __iter__(self) -> Iterator[Scatter]:
        return iter(self._under_way)

    def computed(self) -> None:
        """A backward has run: the next SCATTER is of its gradients."""
        self._computed = True

    def before_next(self) -> list[Scatter]:
        """What has to end before the next SCATTER begins, oldest first."""
        return [*self._under_way] if self._computed else []

    def begin(self, scatter: Scatter) -> None:
        """Add one, after those of :meth:`before_next` were ended."""
        if self._computed:
            self._under_way.clear()
        self._computed = False
        self._under_way.append(scatter)

    def end_first(self) -> Scatter:
        """Take the oldest one off."""
        return self._under_way.popleft()

    def __len__(self) -> int:
        return len(self._under_way)

    def clear(self) -> None:
        self._under_way.clear()
        self._computed = False


def states_read(instruction: Instruction, stage: Stage) -> list[str]:
    """The states that an instruction's calls read."""
    return reads_of(instruction, stage.calls)


def reads_of(instruction: Instruction, calls: Sequence[CallData]) -> list[str]:
    """The states that the computation of an instruction reads, of those that ``calls`` read."""
    if instruction.op == "TOTAL_F":
        return [s for call in calls if call.prologue for s in call.states]
    if instruction.calls is None or instruction.op not in COMPUTING:
        return []
    return [s for call in calls[slice(*instruction.calls)] for s in call.states]


def zero_axes(program: Program, states: Sequence[str]) -> tuple[str, ...]:
    """The axes over which a bucket's states are sharded: those of any of them."""
    return program.states[states[0]].zero_axes


def pieces_of(program: Program, states: Sequence[str], ranks: int, index: int) -> list[Piece]:
    """The ``index``-th piece of each of ``states``, shared by ``ranks``."""
    return [Piece(math.prod(shard_shape(program, s)), ranks, index) for s in states]
