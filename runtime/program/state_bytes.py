"""Compute the bytes that a state (parameter or buffer), its gradient and their ZeRO pieces take on one rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from partitioner.passes.dtypes import get_dtype_itemsize, sum_type
from partitioner.runtime.program.program import Program, Stage, StateData, shard_shape


def list_host_states(program: Program, stage: int) -> frozenset[str]:
    """Return the names of the parameters of the pipeline stage ``stage`` (an index) whose values are in host memory,
    because ``program`` offloads parameters, or runs the optimizer on the host.
    """
    if not {"parameters", "optimizer"}.intersection(program.offload):
        return frozenset()
    held = {n: s for n, s in program.states.items() if stage in s.stages}
    train = program.objective == "train"
    return frozenset(n for n, state in held.items() if is_in_host_memory(state, program.offload, train))


def is_in_host_memory(state: StateData, offload: Sequence[str], train: bool) -> bool:
    """Return whether the values of ``state`` are in host memory: it is a parameter, and parameters or the optimizer are
    offloaded. ``offload``: the kinds of data that the program offloads, such as ``"parameters"`` or ``"optimizer"``.
    ``train``: whether the program is for training; without training, offloading the optimizer moves nothing.
    """
    if state.kind != "parameter":
        return False
    return "parameters" in offload or ("optimizer" in offload and train and state.requires_grad)


def list_staying_values(stage: Stage) -> frozenset[str]:
    """Return the names of the tensors that stay on the device when the pipeline stage ``stage`` moves activations to
    host memory: totals (sums over the global batch that are computed before the pipeline starts), and tensors that
    several calls of the stage read.
    """
    reads = Counter(v for call in stage.calls if not call.prologue for v in set(call.inputs))
    totals = {v for call in stage.calls if call.prologue for v in call.outputs}
    return frozenset(v for v, count in reads.items() if count > 1) | totals


def state_bytes(program: Program, state: str) -> int:
    """Return the bytes of one rank's shard (over ``ep`` and ``tp``) of the parameter or buffer named ``state``, before
    ZeRO divides the shard. ``program``: the program of all ranks.
    """
    return math.prod(shard_shape(program, state)) * get_dtype_itemsize(program.states[state].dtype)


def gradient_bytes(program: Program, state: str) -> int:
    """Return the bytes of the gradient of one rank's shard (over ``ep`` and ``tp``) of the parameter named ``state``,
    before ZeRO divides the gradient. Gradients have the dtype in which they are summed, which may be wider than the
    parameter's. ``program``: the program of all ranks.
    """
    return math.prod(shard_shape(program, state)) * get_dtype_itemsize(sum_type(program.states[state].dtype))


class StateSizes(NamedTuple):
    """Bytes of a parameter or buffer on one rank.

    ``part``: its shard over ``ep`` and ``tp``. ``gradient``: the shard's gradient. ``piece`` and ``gradient_piece``:
    the piece of each that ZeRO leaves on the rank, with padding.
    """

    part: int
    gradient: int
    piece: int
    gradient_piece: int


def state_sizes(program: Program, state: str) -> StateSizes:
    """Return the bytes that the parameter or buffer named ``state`` and its gradient take on one rank: of the rank's
    whole shard over ``ep`` and ``tp``, and of the piece of the shard that ZeRO leaves on the rank. ``program``: the
    program of all ranks.
    """
    part, gradient = state_bytes(program, state), gradient_bytes(program, state)
    ranks = math.prod(program.size(a) for a in program.states[state].zero_axes)
    return StateSizes(part, gradient, -(-part // ranks), -(-gradient // ranks))
