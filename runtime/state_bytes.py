"""What a state, its gradient and the pieces of them that ranks share take on one rank, in bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

from passes.dtypes import itemsize, sum_type
from runtime.program import Program, shard_shape


def state_bytes(program: Program, state: str) -> int:
    """The bytes of what the cuts over ``ep`` and ``tp`` leave of a state."""
    return math.prod(shard_shape(program, state)) * itemsize(program.states[state].dtype)


def gradient_bytes(program: Program, state: str) -> int:
    """The bytes of a state's gradient as it is added up, of what the cuts over ``ep`` and ``tp`` leave."""
    return math.prod(shard_shape(program, state)) * itemsize(sum_type(program.states[state].dtype))


class StateSizes(NamedTuple):
    """Bytes on one rank: of its part of a state and of that one's gradient, and of its pieces of both."""

    part: int
    gradient: int
    piece: int
    gradient_piece: int


def state_sizes(program: Program, state: str) -> StateSizes:
    """What a state takes. Pieces are of what ranks share, padding included; all of it where none do."""
    part, gradient = state_bytes(program, state), gradient_bytes(program, state)
    ranks = math.prod(program.size(a) for a in program.states[state].zero_axes)
    return StateSizes(part, gradient, -(-part // ranks), -(-gradient // ranks))
