"""Compute the bytes that a state, its gradient and their ZeRO pieces take on one rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from partitioner.passes.dtypes import get_dtype_itemsize, sum_type
from partitioner.runtime.program.program import Program, Stage, StateData, shard_shape


def host_states(program: Program, stage: int) -> frozenset[str]:
    """Return the names of the stage's parameters whose values are in host memory.

    They are there because parameters are offloaded, or because the optimizer runs there and updates them.
    """
    held = {n: s for n, s in program.states.items() if stage in s.stages}
    train = program.objective == "train"
    return frozenset(n for n, state in held.items() if is_hosted(state, program.offload, train))


def is_hosted(state: StateData, offload: Sequence[str], train: bool) -> bool:
    """Whether the values of a parameter are in host memory, because parameters or the optimizer are offloaded.

    ``offload``: the kinds of data that the program offloads. ``train``: whether the program is for training.
    """
    if state.kind != "parameter":
        return False
    return "parameters" in offload or ("optimizer" in offload and train and state.requires_grad)


def staying_values(stage: Stage) -> frozenset[str]:
    """Return the names of the values that stay on the device when activations are moved to host memory.

    These are results of prologue calls, which compute totals over the batch, and values that several calls of the stage
    read.
    """
    reads = Counter(v for call in stage.calls if not call.prologue for v in set(call.inputs))
    totals = {v for call in stage.calls if call.prologue for v in call.outputs}
    return frozenset(v for v, count in reads.items() if count > 1) | totals


def state_bytes(program: Program, state: str) -> int:
    """Return the bytes of one rank's shard of a state (parameter or buffer) over ``ep`` and ``tp``."""
    return math.prod(shard_shape(program, state)) * get_dtype_itemsize(program.states[state].dtype)


def gradient_bytes(program: Program, state: str) -> int:
    """Return the bytes of the gradient of one rank's shard of a parameter over ``ep`` and ``tp``, in its accumulation
    type.
    """
    return math.prod(shard_shape(program, state)) * get_dtype_itemsize(sum_type(program.states[state].dtype))


class StateSizes(NamedTuple):
    """Bytes of a state (parameter or buffer) on one rank: its shard, the shard's gradient, and the ZeRO
    pieces of both.
    """

    part: int
    gradient: int
    piece: int
    gradient_piece: int


def state_sizes(program: Program, state: str) -> StateSizes:
    """Return the bytes of a state (parameter or buffer) and its gradient on one rank.

    The sizes of ZeRO pieces include padding; without ZeRO they equal those of the shard and its gradient.
    """
    part, gradient = state_bytes(program, state), gradient_bytes(program, state)
    ranks = math.prod(program.size(a) for a in program.states[state].zero_axes)
    return StateSizes(part, gradient, -(-part // ranks), -(-gradient // ranks))
