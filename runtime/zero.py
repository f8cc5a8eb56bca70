"""What a program says of the states that ranks share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from runtime.pieces import Piece
from runtime.program import CallData, Instruction, Program, Stage, shard_shape

COMPUTING = frozenset({"TOTAL_F", "F", "B", "I", "W"})
SCATTERING = 1  # SCATTERs that are under way at a time: each takes memory


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
