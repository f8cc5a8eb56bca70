"""Hierarchical and compressed reduction of gradients: the steps (turns) of each bucket, and their axes and order.

A bucket starts its first turn as soon as it is full, and each further turn behind the next backward, so that no turn
waits for the one before. The remaining turns come at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from partitioner.emit_buckets import PlannedBucket
from runtime.buckets import Compression
from runtime.levels import Turn, left_of, turns_of
from runtime.listing import Instruction
from runtime.meshes import ALL_AXES

_BACKWARD = frozenset({"B", "I", "W"})
_INNER = {"dp": "dp_shard", "edp": "edp_shard"}
_OUTER = {"dp": "dp_replicate", "edp": "edp_replicate"}
_DATA = frozenset({"cp", *_INNER, *_OUTER.values()})  # axes whose ranks have gradients of different samples or tokens


@dataclass(frozen=True)
class Reducing:
    """How gradients are reduced. ``inside``: number of neighbouring ranks of ``dp`` among which they are scattered
    before the reduction over the others (0: one reduction over all). ``compression``: of the data on the outermost
    links."""

    inside: int = 0
    compression: Compression | None = None


AT_ONCE = Reducing()


def with_levels(bucket: PlannedBucket, shared: Sequence[str], sizes: Mapping[str, int], how: Reducing) -> PlannedBucket:
    """``bucket`` with its levels and turns. ``shared``: the axes over which its states are sharded."""
    axes = tuple(a for a in ALL_AXES if a in bucket.axes and sizes[a] > 1)
    if not axes:
        return bucket
    levels: tuple[tuple[str, ...], ...] = ()
    rest = left_of(axes, shared, (), sizes.__getitem__)
    inner, outer = (tuple(a for a in split(axes) if sizes[a] > 1) for split in (inner_axes, outer_axes))
    if how.inside and inner and outer and not shared:
        levels, rest = (inner,), outer
    compression = how.compression if _DATA & {*rest, *shared} else None
    if compression and _DATA & {*rest}:
        levels, rest = (*levels, rest), ()
    return replace(bucket, levels=levels, compression=compression, turns=turns_of(levels, rest))


def inner_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """``axes`` restricted to neighbouring ranks: ``dp`` becomes its inner part, other axes stay."""
    return tuple(_INNER.get(axis, axis) for axis in axes)


def outer_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """The outer parts of ``axes``: those between the groups of neighbouring ranks."""
    return tuple(_OUTER[axis] for axis in axes if axis in _OUTER)


def turn(stage: int, number: int, turn: Turn) -> Instruction:
    """The instruction for one turn of a bucket's reduction."""
    op, axes = turn
    over: dict[str, Any] = {} if op == "REDUCE" else {"axes": axes}
    return Instruction(op=op, stage=stage, bucket=number, gradients=op == "GATHER", **over)


def with_turns(instructions: Sequence[Instruction], buckets: Sequence[PlannedBucket]) -> Iterator[Instruction]:
    """``instructions`` with the remaining turns of every bucket whose first turn, or last SCATTER to shards, they
    contain."""
    started = {i.bucket: index for index, i in enumerate(instructions) if i.op in ("SCATTER", "REDUCE")}
    waiting: list[deque[Instruction]] = []  # the remaining turns of each bucket
    for index, i in enumerate(instructions):
        if i.op in ("SYNC", "STEP"):
            yield from (x for row in zip_longest(*waiting) for x in row if x is not None)
            waiting = []
        yield i
        if i.op in _BACKWARD:
            yield from (left.popleft() for left in waiting)
            waiting = [left for left in waiting if left]
        if i.bucket is not None and started.get(i.bucket) == index:
            bucket = buckets[i.bucket]
            left = deque(turn(i.stage, i.bucket, t) for t in bucket.turns[0 if bucket.sharded else 1 :])
            waiting += [left] if left else []
    assert not waiting, "there is no STEP"
