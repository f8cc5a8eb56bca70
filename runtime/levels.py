"""Hierarchical reduction of gradients: the order of its collectives, and the mesh axes of each.

For example, a bucket is reduce-scattered inside each node, its shards are all-reduced between nodes, and the sums are
all-gathered inside each node. The links between nodes then carry a node's gradients once, spread over all of its ranks.
A single all-reduce over all ranks is as fast only if the library does the same internally.

Compressed gradients are exchanged instead, because a sum in a short type would be rounded at each addition. Every rank
sends each shard of its gradients, compressed, to the rank that sums that shard, and all-gathers the compressed sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from runtime.buckets import Bucket
from runtime.meshes import axes_beside
from runtime.program import Program
from runtime.zero import zero_axes

GATHERING = 1  # all-gathers of sums in flight at a time: each takes memory

Levels = Sequence[tuple[str, ...]]
Turn = tuple[Literal["SCATTER", "REDUCE", "GATHER"], tuple[str, ...]]


def rest_axes(program: Program, bucket: Bucket) -> tuple[str, ...]:
    """The axes over which REDUCE sums a bucket's gradients: the axes of the bucket over which nothing scatters them."""
    return left_of(bucket.axes, zero_axes(program, bucket.states), bucket.levels, program.size)


def left_of(axes: Sequence[str], shared: Sequence[str], levels: Levels, size: Callable[[str], int]) -> tuple[str, ...]:
    """The axes among ``axes``, or split from them, that are neither in ``shared`` nor in ``levels``; axes with one rank
    are left out."""
    scattered = {*shared, *(axis for level in levels for axis in level)}
    return tuple(a for a in axes_beside(axes, scattered) if a not in scattered and size(a) > 1)


def turns(program: Program, bucket: Bucket) -> tuple[Turn, ...]:
    """The collectives, as (instruction, axes), that reduce a bucket once its gradients, or its ZeRO shards of them, are
    computed."""
    return turns_of(bucket.levels, rest_axes(program, bucket))


def turns_of(levels: Levels, rest: tuple[str, ...]) -> tuple[Turn, ...]:
    """The collectives, as (instruction, axes), of a reduction: SCATTER over each of ``levels``, REDUCE over the axes
    ``rest``, and GATHER over the levels in reverse order."""
    return (
        *(("SCATTER", level) for level in levels),
        *((("REDUCE", rest),) if rest else ()),
        *(("GATHER", level) for level in reversed(levels)),
    )


def parts(program: Program, bucket: Bucket, level: int) -> int:
    """The number of shards into which the first ``level`` levels scatter a rank's gradients of a bucket."""
    return math.prod(program.size(axis) for axes in bucket.levels[:level] for axis in axes)


def level_problem(program: Program, bucket: Bucket) -> str:
    """Why a bucket's levels do not sum its gradients exactly once over its axes; an empty text if they do."""
    named = [axis for level in bucket.levels for axis in level]
    shared = zero_axes(program, bucket.states)
    if bucket.levels and not all(bucket.levels):
        return "has a level without axes"
    for axis in named:
        if program.size(axis) == 1 or axis in shared or named.count(axis) > 1:
            return f"is scattered over {axis!r} twice, or for nothing"
    covered = math.prod(program.size(a) for a in (*named, *shared, *rest_axes(program, bucket)))
    if bucket.axes and covered != math.prod(program.size(a) for a in bucket.axes):
        return f"has the levels {bucket.levels}, which do not make up {bucket.axes}"
    if bucket.levels and set(named) - set(_split(bucket.axes)):
        return f"has the levels {bucket.levels} of axes that are not among {bucket.axes}"
    if bucket.compression and not (bucket.levels or shared):
        return f"is compressed ({bucket.compression}), but nothing is scattered"
    if bucket.compression and bucket.levels and rest_axes(program, bucket):
        return f"is compressed over {bucket.levels[-1]} and added up over {rest_axes(program, bucket)} beside"
    return ""


def _split(axes: Sequence[str]) -> Iterator[str]:
    """``axes`` and, after each, the two axes that hybrid sharding splits it into."""
    for axis in axes:
        yield from (axis, f"{axis}_shard", f"{axis}_replicate")
