"""What a state, its gradient and the pieces of them that ranks share take on one rank, in bytes."""

from __future__ import annotations

import math

from passes.blocks import TensorSpec
from passes.gradients import accumulated_in
from passes.serialize import dtype_of
from runtime.program import Program, shard_shape


def state_bytes(program: Program, state: str) -> int:
    """The bytes of what the cuts over ``ep`` and ``tp`` leave of a state."""
    return TensorSpec(shard_shape(program, state), dtype_of(program.states[state].dtype)).nbytes


def gradient_bytes(program: Program, state: str) -> int:
    """The bytes of a state's gradient as it is added up, of what the cuts over ``ep`` and ``tp`` leave."""
    return TensorSpec(shard_shape(program, state), accumulated_in(dtype_of(program.states[state].dtype))).nbytes


def state_piece_bytes(program: Program, state: str) -> int:
    """The bytes of one rank's piece of a state that ranks share, padding included; of all of it where none do."""
    return -(-state_bytes(program, state) // _num_sharers(program, state))


def gradient_piece_bytes(program: Program, state: str) -> int:
    """As :func:`state_piece_bytes`, of the gradient."""
    return -(-gradient_bytes(program, state) // _num_sharers(program, state))


def _num_sharers(program: Program, state: str) -> int:
    return math.prod(program.size(a) for a in program.states[state].zero_axes)
