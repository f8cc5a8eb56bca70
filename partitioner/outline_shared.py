"""What a stage's buckets move over data-parallel ranks, and who keeps a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from runtime.program import Bucket, Program, shard_shape
from runtime.zero import rest_axes, zero_axes

BUCKET_OPS = {"GATHER": "all_gather", "SCATTER": "reduce_scatter", "REDUCE": "all_reduce"}


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def state_bytes(program: Program, state: str) -> int:
    """The bytes of what the cuts over ``ep`` and ``tp`` leave of a state."""
    return tensor_bytes(shard_shape(program, state), program.states[state].dtype)


def kept_bytes(program: Program, state: str) -> int:
    """The bytes of a state on a rank, all the time."""
    shared = program.states[state].zero_axes if program.zero == 3 else ()
    return state_bytes(program, state) // math.prod(program.size(a) for a in shared)


def exchanged(program: Program, bucket: Bucket, op: str) -> tuple[tuple[str, str], int]:
    """What a GATHER, SCATTER or REDUCE of a bucket is, over which axes, and its bytes on a rank."""
    shared = zero_axes(program, bucket.states)
    num_bytes = sum(state_bytes(program, s) for s in bucket.states)
    axes = [a for a in bucket.axes if program.size(a) > 1]
    if shared and op == "REDUCE":
        axes, num_bytes = [*rest_axes(program, bucket)], num_bytes // math.prod(program.size(a) for a in shared)
    return (BUCKET_OPS[op], "×".join(axes if op == "REDUCE" else shared)), num_bytes
