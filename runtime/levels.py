"""Gradients that are reduced level by level, each over links of its own: what comes when, and over which axes.

Inside a node, say, a bucket is scattered: every rank adds up a part. Ranks of different nodes with the same part add
that up, and it is gathered inside. So what passes between nodes is a node's gradients once, over the links of all of
its ranks; one all-reduce over all ranks is as good only where the library does it so.

What is compressed is exchanged: a sum of numbers in a short type would be rounded at each addition. Every rank sends
each part of its gradients, compressed, to the rank that adds that part up, and gathers the sums, compressed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from runtime.buckets import Bucket
from runtime.meshes import axes_beside
from runtime.program import Program
from runtime.zero import zero_axes

GATHERING = 1  # gatherings of sums that are under way at a time: each takes memory

Levels = Sequence[tuple[str, ...]]
Turn = tuple[Literal["SCATTER", "REDUCE", "GATHER"], tuple[str, ...]]


def rest_axes(program: Program, bucket: Bucket) -> tuple[str, ...]:
    """The axes over which a bucket's gradients are added up by REDUCE: those over which nothing scatters them."""
    return left_of(bucket.axes, zero_axes(program, bucket.states), bucket.levels, program.size)


def left_of(axes: Sequence[str], shared: Sequence[str], levels: Levels, size: Callable[[str], int]) -> tuple[str, ...]:
    """What of ``axes`` is neither ``shared`` nor among ``levels``."""
    scattered = {*shared, *(axis for level in levels for axis in level)}
    return tuple(a for a in axes_beside(axes, scattered) if a not in scattered and size(a) > 1)


def turns(program: Program, bucket: Bucket) -> tuple[Turn, ...]:
    """What reduces a bucket once its gradients are there, or once SCATTER has made their shards; with the axes."""
    return turns_of(bucket.levels, rest_axes(program, bucket))


def turns_of(levels: Levels, rest: tuple[str, ...]) -> tuple[Turn, ...]:
    """The same of any levels, and the axes that these leave."""
    return (
        *(("SCATTER", level) for level in levels),
        *((("REDUCE", rest),) if rest else ()),
        *(("GATHER", level) for level in reversed(levels)),
    )


def parts(program: Program, bucket: Bucket, level: int) -> int:
    """How many parts there are of what a rank has of a bucket's gradients, after ``level`` levels."""
    return math.prod(program.size(axis) for axes in bucket.levels[:level] for axis in axes)


def level_problem(program: Program, bucket: Bucket) -> str:
    """Why a bucket's levels do not add up its gradients over its axes, once; nothing where they do."""
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
    """``axes`` and what they are split into."""
    for axis in axes:
        yield from (axis, f"{axis}_shard", f"{axis}_replicate")
