"""Collectives that reduce a gradient bucket: their order and mesh axes, and the pieces into which ZeRO cuts the
bucket's parameters.

In a hierarchical reduction, a bucket is for example reduce-scattered inside each node, its shards are all-reduced
between nodes, and the sums are all-gathered inside each node. The links between nodes then carry the gradients of a
node once, spread over all of its ranks. A single all-reduce over all ranks is as fast only if the communication library
does the same internally.

Compressed gradients are not summed by a collective, because a sum in a short dtype would be rounded at each addition.
Instead, every rank sends each shard of its gradients, compressed, to the rank that sums that shard, and the compressed
sums are all-gathered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.mesh import ALL_AXES, subtract_axes
from partitioner.runtime.program.program import CallData, Program, Stage, shard_shape


def split_axes(program: Program, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mesh axes of ``axes`` that have more than one rank in ``program``, in the order of the mesh."""
    return tuple(a for a in ALL_AXES if a in axes and program.size(a) > 1)


@dataclass(frozen=True)
class FlatShard:
    """One piece of a flattened tensor of ``numel`` elements, which is cut into ``ranks`` equal pieces, one for each
    rank.

    ``index``: number of the piece, from 0. The piece has the elements ``[start, start + size)``. ``length``: number of
    elements of a full piece; the last pieces may be shorter and are padded to this length.
    """

    numel: int
    ranks: int
    index: int

    @property
    def length(self) -> int:
        return -(-self.numel // self.ranks)

    @property
    def start(self) -> int:
        return min(self.numel, self.index * self.length)

    @property
    def size(self) -> int:
        return min(self.numel, self.start + self.length) - self.start


COMPUTING = frozenset({"TOTAL_F", "F", "B", "I", "W"})

BACKWARD = frozenset({"B", "I", "W"})
Scatter = TypeVar("Scatter")


class ScatterQueue(Generic[Scatter]):
    """The reduce-scatters of gradients in progress on one rank, oldest first. The caller chooses the objects that
    represent them. To limit memory, the first reduce-scatter after a backward instruction starts only when all earlier
    ones have ended.
    """

    def __init__(self) -> None:
        self._under_way: deque[Scatter] = deque()
        self._computed = False

    def __contains__(self, scatter: Scatter) -> bool:
        return scatter in self._under_way

    def __iter__(self) -> Iterator[Scatter]:
        return iter(self._under_way)

    def computed(self) -> None:
        """Record that a backward instruction has run. The next reduce-scatter then starts only after all in progress
        have ended.
        """
        self._computed = True

    def list_blocking(self) -> list[Scatter]:
        """Return the reduce-scatters that must end before another one starts, oldest first: all in progress if a
        backward instruction has run since the last one started; otherwise none.
        """
        return [*self._under_way] if self._computed else []

    def begin(self, scatter: Scatter) -> None:
        """Add ``scatter``, a reduce-scatter of gradients that starts now. The reduce-scatters that
        :meth:`list_blocking` returns must have ended before the call, and are removed from the queue.
        """
        if self._computed:
            self._under_way.clear()
        self._computed = False
        self._under_way.append(scatter)

    def end_first(self) -> Scatter:
        """Remove the oldest reduce-scatter in progress, which has ended, from the queue, and return it."""
        return self._under_way.popleft()

    def __len__(self) -> int:
        return len(self._under_way)

    def clear(self) -> None:
        self._under_way.clear()
        self._computed = False


def list_states_read(instruction: Instruction, stage: Stage) -> list[str]:
    """Return the names of the parameters and buffers that the computation of ``instruction`` reads; empty if the
    instruction does not compute. ``stage``: the pipeline stage whose list contains the instruction.
    """
    return list_states_read_by(instruction, stage.calls)


def list_states_read_by(instruction: Instruction, calls: Sequence[CallData]) -> list[str]:
    """Return the names of the parameters and buffers that the computation of ``instruction`` reads; empty if the
    instruction does not compute. ``calls``: all block calls (such as layers) of the instruction's pipeline stage;
    ``instruction.calls`` is a range of positions in this list.
    """
    if instruction.op == "TOTAL_F":
        return [s for call in calls if call.prologue for s in call.states]
    if instruction.calls is None or instruction.op not in COMPUTING:
        return []
    return [s for call in calls[slice(*instruction.calls)] for s in call.states]


def zero_axes(program: Program, states: Sequence[str]) -> tuple[str, ...]:
    """Return the mesh axes over which ZeRO shards the parameters ``states`` (names), which are gathered together and
    thus have the same axes; empty if ZeRO does not shard them. ``program``: the program of all ranks.
    """
    return program.states[states[0]].zero_axes


def find_flat_shards(program: Program, states: Sequence[str], ranks: int, index: int) -> list[FlatShard]:
    """Return, for each parameter named in ``states``, the range of elements of its flattened shard that one rank holds
    if ZeRO cuts the shard into ``ranks`` equal pieces. ``index``: the number of the rank's piece, from 0. ``program``:
    the program of all ranks.
    """
    return [FlatShard(math.prod(shard_shape(program, s)), ranks, index) for s in states]


GATHERING = 1  # maximum number of all-gathers of sums in flight at a time: each takes memory

Levels = Sequence[tuple[str, ...]]

Turn = tuple[Literal["SCATTER", "REDUCE", "GATHER"], tuple[str, ...]]


def list_all_reduce_axes(program: Program, bucket: Bucket) -> tuple[str, ...]:
    """Return the mesh axes over which the gradients of ``bucket`` (parameters whose gradients are reduced together) are
    all-reduced: all axes of their reduction, except those of its reduce-scatters. ``program``: the program of all
    ranks.
    """
    return list_remaining_axes(bucket.axes, zero_axes(program, bucket.states), bucket.levels, program.size)


def list_remaining_axes(
    axes: Sequence[str], shared: Sequence[str], levels: Levels, size: Callable[[str], int]
) -> tuple[str, ...]:
    """Return the mesh axes of a gradient reduction that remain for an all-reduce after the reduce-scatters. Axes with
    one rank are left out. ``axes``: all axes of the reduction. ``shared``: axes over which ZeRO scatters. ``levels``:
    the axes of each step of a hierarchical reduction. ``size``: function that returns the number of ranks of an axis.
    If only one half of a split axis (``dp_shard``) is scattered, the other half (``dp_replicate``) remains.
    """
    scattered = {*shared, *(axis for level in levels for axis in level)}
    return tuple(a for a in subtract_axes(axes, scattered) if a not in scattered and size(a) > 1)


def list_reduction_collectives(program: Program, bucket: Bucket) -> tuple[Turn, ...]:
    """Return the collectives that reduce the gradients of ``bucket`` (parameters whose gradients are reduced together),
    in order, as pairs ("SCATTER", "REDUCE" or "GATHER"; mesh axes). They start after the gradients are computed and,
    under ZeRO, reduce-scattered. ``program``: the program of all ranks.
    """
    return list_level_collectives(bucket.levels, list_all_reduce_axes(program, bucket))


def list_level_collectives(levels: Levels, remaining: tuple[str, ...]) -> tuple[Turn, ...]:
    """Return the collectives of a hierarchical reduction, in order, as pairs (name, mesh axes): "SCATTER" over each of
    ``levels`` (tuples of axes), "REDUCE" over the axes ``remaining`` (if any), then "GATHER" over the levels in reverse
    order.
    """
    return (
        *(("SCATTER", level) for level in levels),
        *((("REDUCE", remaining),) if remaining else ()),
        *(("GATHER", level) for level in reversed(levels)),
    )


def count_gradient_shards(program: Program, bucket: Bucket, level: int) -> int:
    """Return the number of shards into which the gradients of ``bucket`` (parameters whose gradients are reduced
    together) are scattered after the first ``level`` steps of their hierarchical reduction. ``program``: the program of
    all ranks.
    """
    return math.prod(program.size(axis) for axes in bucket.levels[:level] for axis in axes)


def find_level_problem(program: Program, bucket: Bucket) -> str:
    """Return why the hierarchical reduction of the gradients of ``bucket`` would not sum them exactly once, as the end
    of an error message; empty if the reduction is valid. ``bucket``: the parameters whose gradients are reduced
    together, and the steps of the reduction (``bucket.levels``). ``program``: the program of all ranks.
    """
    named = [axis for level in bucket.levels for axis in level]
    shared = zero_axes(program, bucket.states)
    if bucket.levels and not all(bucket.levels):
        return "has a level without axes"
    for axis in named:
        if program.size(axis) == 1 or axis in shared or named.count(axis) > 1:
            return f"is scattered over {axis!r} twice, or for nothing"
    covered = math.prod(program.size(a) for a in (*named, *shared, *list_all_reduce_axes(program, bucket)))
    if bucket.axes and covered != math.prod(program.size(a) for a in bucket.axes):
        return f"has the levels {bucket.levels}, which do not make up {bucket.axes}"
    if bucket.levels and set(named) - set(_split_hybrid_axes(bucket.axes)):
        return f"has the levels {bucket.levels} of axes that are not among {bucket.axes}"
    if bucket.compression and not (bucket.levels or shared):
        return f"is compressed ({bucket.compression}), but nothing is scattered"
    if bucket.compression and bucket.levels and list_all_reduce_axes(program, bucket):
        return (
            f"is compressed over {bucket.levels[-1]} and added up over {list_all_reduce_axes(program, bucket)} beside"
        )
    return ""


def _split_hybrid_axes(axes: Sequence[str]) -> Iterator[str]:
    """Yield each mesh axis of ``axes`` and, after it, the two axes into which hybrid sharding splits it: ``dp``,
    ``dp_shard``, ``dp_replicate``.
    """
    for axis in axes:
        yield from (axis, f"{axis}_shard", f"{axis}_replicate")
