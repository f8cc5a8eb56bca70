"""What a stage's buckets move over data-parallel ranks, and who keeps a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from passes.gradients import accumulated_in
from passes.serialize import dtype_of
from runtime.compression import wire_share
from runtime.levels import parts, rest_axes
from runtime.program import Bucket, Instruction, Program
from runtime.state_bytes import state_sizes
from runtime.zero import zero_axes

BUCKET_OPS = {"GATHER": "all_gather", "SCATTER": "reduce_scatter", "REDUCE": "all_reduce"}


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def kept_bytes(program: Program, state: str) -> int:
    """The bytes of a state on a rank, all the time."""
    sizes = state_sizes(program, state)
    return sizes.piece if program.zero == 3 else sizes.part


def exchanged(program: Program, bucket: Bucket, instruction: Instruction) -> tuple[tuple[str, str, str], int]:
    """What a GATHER, SCATTER or REDUCE of a bucket is, over which axes, of what, and its bytes on a rank."""
    op, axes = instruction.op, instruction.axes
    level = bucket.levels.index(axes) if axes else len(bucket.levels)
    size = "gradient_piece" if axes or op == "REDUCE" else "part" if op == "GATHER" else "gradient"
    moved = sum(getattr(state_sizes(program, state), size) for state in bucket.states)
    if axes or op == "REDUCE":
        moved //= parts(program, bucket, level)
    axes = axes or (rest_axes(program, bucket) if op == "REDUCE" else zero_axes(program, bucket.states))
    what, kind = "parameters" if size == "part" else "gradients", BUCKET_OPS[op]
    if bucket.compression and what == "gradients" and level == max(0, len(bucket.levels) - 1) and op != "REDUCE":
        itemsize = accumulated_in(dtype_of(program.states[bucket.states[0]].dtype)).itemsize
        moved = int(moved * wire_share(bucket.compression, itemsize))
        what = f"gradients in {bucket.compression}"
        kind = "all_to_all" if op == "SCATTER" else kind
    return (kind, "×".join(axes), what), moved
