"""What a stage's buckets move over data-parallel ranks, and who keeps a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from runtime.program import Bucket, Program
from runtime.state_bytes import state_sizes
from runtime.zero import rest_axes, zero_axes

BUCKET_OPS = {"GATHER": "all_gather", "SCATTER": "reduce_scatter", "REDUCE": "all_reduce"}


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def kept_bytes(program: Program, state: str) -> int:
    """The bytes of a state on a rank, all the time."""
    sizes = state_sizes(program, state)
    return sizes.piece if program.zero == 3 else sizes.part


def exchanged(program: Program, bucket: Bucket, op: str) -> tuple[tuple[str, str], int]:
    """What a GATHER, SCATTER or REDUCE of a bucket is, over which axes, and its bytes on a rank."""
    shared = zero_axes(program, bucket.states)
    axes: tuple[str, ...] = shared
    if op == "REDUCE":
        axes = rest_axes(program, bucket) if shared else tuple(a for a in bucket.axes if program.size(a) > 1)
    size = {"GATHER": "part", "SCATTER": "gradient", "REDUCE": "gradient_piece"}[op]
    moved = sum(getattr(state_sizes(program, state), size) for state in bucket.states)
    return (BUCKET_OPS[op], "×".join(axes)), moved
