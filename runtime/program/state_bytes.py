"""What a state, its gradient and the pieces of them that ranks share take on one rank, in bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from partitioner.passes.dtypes import get_dtype_itemsize, sum_type
from partitioner.runtime.program.program import Program, Stage, StateData, shard_shape


def host_states(program: Program, stage: int) -> frozenset[str]:
    """Return the names of the stage's parameters whose values an optimizer, or calls, read from host memory."""
    held = {n: s for n, s in program.states.items() if stage in s.stages}
    train = program.objective == "train"
    return frozenset(n for n, state in held.items() if is_hosted(state, program.offload, train))


def is_hosted(state: StateData, offload: Sequence[str], train: bool) -> bool:
    """Whether an optimizer, or calls, take a state's numbers from host memory."""
    if state.kind != "parameter":
        return False
    return "parameters" in offload or ("optimizer" in offload and train and state.requires_grad)


def staying_values(stage: Stage) -> frozenset[str]:
    """Return the values that an OFFLOAD leaves on the device: results of prologue calls, and values that several calls
    read."""
    reads = Counter(v for call in stage.calls if not call.prologue for v in set(call.inputs))
    totals = {v for call in stage.calls if call.prologue for v in call.outputs}
    return frozenset(v for v, count in reads.items() if count > 1) | totals


def state_bytes(program: Program, state: str) -> int:
    """Return the bytes of one rank's shard of a state (parameter or buffer) over ``ep`` and ``tp``."""
    return math.prod(shard_shape(program, state)) * get_dtype_itemsize(program.states[state].dtype)


def gradient_bytes(program: Program, state: str) -> int:
    """Return the bytes of the gradient of one rank's shard over ``ep`` and ``tp``, in the type in which it is
    accumulated."""
    return math.prod(shard_shape(program, state)) * get_dtype_itemsize(sum_type(program.states[state].dtype))


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
