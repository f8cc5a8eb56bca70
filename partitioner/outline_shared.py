"""What a stage's buckets move over data-parallel ranks, who keeps a parameter, and the precision of most of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from passes.dtypes import itemsize, sum_type
from runtime.levels import parts, rest_axes
from runtime.listing import repetitions
from runtime.program import Bucket, Program, Stage
from runtime.state_bytes import state_sizes
from runtime.zero import zero_axes

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
BUCKET_OPS = {"GATHER": "all_gather", "SCATTER": "reduce_scatter", "REDUCE": "all_reduce"}


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * itemsize(dtype)


def kept_bytes(program: Program, state: str) -> int:
    """The bytes of a state on a rank, all the time."""
    sizes = state_sizes(program, state)
    return sizes.piece if program.zero == 3 else sizes.part


Exchange = tuple[str, str, str]  # the collective, the axes it runs over, what it moves


@dataclass(frozen=True)
class ExchangeTotal:
    """What the transfers of one kind move on one rank in one step. ``buckets``: how many different ones are moved."""

    transfers: int
    buckets: int
    num_bytes: int


def exchange_totals(program: Program, stage: Stage) -> dict[Exchange, ExchangeTotal]:
    """The totals of a stage's buckets. A list repeats few different transfers many times: each is looked at once."""
    transfers = Counter[tuple[int, str, tuple[str, ...]]]()
    for instruction, times in repetitions(stage.instructions):
        if instruction.op in BUCKET_OPS and instruction.bucket is not None:
            transfers[instruction.bucket, instruction.op, instruction.axes] += times
    found: dict[Exchange, list[tuple[int, int, int]]] = {}
    for (bucket, op, axes), times in transfers.items():
        exchange, num_bytes = exchanged(program, stage.buckets[bucket], op, axes)
        found.setdefault(exchange, []).append((bucket, times, times * num_bytes))
    return {
        exchange: ExchangeTotal(
            transfers=sum(times for _, times, _ in parts),
            buckets=len({bucket for bucket, _, _ in parts}),
            num_bytes=sum(num_bytes for _, _, num_bytes in parts),
        )
        for exchange, parts in found.items()
    }


def common_precision(program: Program) -> str:
    """The precision of most of the weights."""
    weights: Counter[str] = Counter()
    for state in program.states.values():
        if state.kind == "parameter":
            weights[_PRECISIONS.get(state.dtype, "fp32")] += math.prod(state.shape)
    return weights.most_common(1)[0][0] if weights else "fp32"


def exchanged(program: Program, bucket: Bucket, op: str, axes: tuple[str, ...]) -> tuple[Exchange, int]:
    """What a GATHER, SCATTER or REDUCE of a bucket is, over which axes, of what, and its bytes on a rank."""
    level = bucket.levels.index(axes) if axes else len(bucket.levels)
    size = "gradient_piece" if axes or op == "REDUCE" else "part" if op == "GATHER" else "gradient"
    moved = sum(getattr(state_sizes(program, state), size) for state in bucket.states)
    if axes or op == "REDUCE":
        moved //= parts(program, bucket, level)
    axes = axes or (rest_axes(program, bucket) if op == "REDUCE" else zero_axes(program, bucket.states))
    what, kind = "parameters" if size == "part" else "gradients", BUCKET_OPS[op]
    if bucket.compression and what == "gradients" and level == max(0, len(bucket.levels) - 1) and op != "REDUCE":
        from runtime.compression import wire_share  # where gradients are compressed: it imports PyTorch

        moved = int(moved * wire_share(bucket.compression, itemsize(sum_type(program.states[bucket.states[0]].dtype))))
        what = f"gradients in {bucket.compression}"
        kind = "all_to_all" if op == "SCATTER" else kind
    return (kind, "×".join(axes), what), moved
