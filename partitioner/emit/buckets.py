"""Group gradients into buckets, each of which is reduced by its own collectives, and plan these collectives.

Buckets are filled in the order in which the last backward completes the gradients (the last calls first). Most
reductions are thus hidden behind the rest of the backward, as in PyTorch's DDP (Li et al. 2020).

A hierarchical or compressed reduction takes several collectives, each over its own axes; the code calls them turns. A
bucket starts its first turn when it is full. Each further turn starts after the next backward instruction, so that no
turn waits for the previous one. The remaining turns start at the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from partitioner.emit.routes import StageCalls
from partitioner.runtime.program.buckets import Compression
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.mesh import ALL_AXES
from partitioner.runtime.program.sharded_buckets import Turn, list_level_collectives, list_remaining_axes
from partitioner.schedules.actions import Order

_LEAST_BUCKET = 25 * 2**20

_PER_RANK = 2_000_000


def bucket_limit(ranks: int) -> int:
    """Return the bytes of gradients that fill a bucket, which one collective of ``ranks`` ranks reduces: PyTorch's 25
    MiB or, if that is more, Megatron-LM's one million two-byte gradients per rank. In a ring of many ranks, the time of
    a smaller bucket would be mostly latency."""
    return max(_LEAST_BUCKET, _PER_RANK * ranks)


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter on one rank of a pipeline stage.

    ``state``: name of the parameter. ``dtype``: its number format. ``nbytes``: bytes of the gradient. ``axes``: the
    mesh axes with more than one rank over which it is summed. ``tied``: indices of the stages that share the parameter;
    empty if only one has it. ``sharded``: the mesh axes over which ZeRO shards the parameter. ``readers``: under
    ZeRO-3, positions of the stage's block calls (such as layers) that read the parameter.
    """

    state: str
    dtype: str
    nbytes: int
    axes: tuple[str, ...]  # mesh axes with more than one rank over which it is summed
    tied: tuple[int, ...]  # the stages that share the parameter; empty if only one has it
    sharded: tuple[str, ...] = ()  # the axes over which ZeRO shards the parameter
    readers: tuple[int, ...] = ()  # under ZeRO-3, positions of the stage's calls that read the parameter


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of gradients (or of sharded parameters), and the point of the schedule at which its reduction starts.

    - ``states``: names of the parameters. ``axes``: the mesh axes over which their gradients are summed. ``sharded``:
      whether ZeRO shards the parameters or their gradients.
    - ``ready``: when the gradients are complete on this rank: (index of the action in the rank's order of forwards and
      backwards, position in the stage of the block call, such as a layer, whose backward completes them). ``None``:
      there are no gradients, or the gradients must first be summed over the stages that share the parameters.
    - ``each``: index of a virtual stage on the rank -> position in the stage of the block call whose backward is the
      last in this virtual stage to add to the bucket. It is filled under ZeRO-2 and ZeRO-3, which reduce-scatter the
      gradients of every microbatch.
    - ``levels``: for each level of a hierarchical or compressed reduction, the mesh axes over which the bucket is
      reduce-scattered and later gathered again. ``compression``: the number format of compressed gradients; ``None``:
      they are not compressed.
    - ``turns``: the collectives of the reduction in order, as pairs (operation, mesh axes). If ZeRO shards the bucket,
      they reduce the shards that a first reduce-scatter leaves.
    """

    states: tuple[str, ...]
    axes: tuple[str, ...]
    ready: tuple[int, int] | None
    sharded: bool = False
    each: Mapping[int, int] = field(default_factory=dict)
    levels: tuple[tuple[str, ...], ...] = ()
    compression: Compression | None = None
    turns: tuple[Turn, ...] = ()

    def done_by(self, index: int, chunk: int) -> int | None:
        """Return the position in the stage of the block call (such as a layer) after whose backward the reduction of
        this bucket starts, if the reduction starts in the given action; otherwise ``None``. A bucket is gradients that
        are reduced together. An action is a forward or backward of one microbatch.

        ``index``: index of the action in the rank's order. ``chunk``: index on the rank of the virtual stage that the
        action runs.
        """
        if self.each:
            return self.each.get(chunk)
        return self.ready[1] if self.ready is not None and self.ready[0] == index else None


def plan_buckets(
    stage: StageCalls,
    order: Order,
    gradients: Sequence[Gradient],
    adds: Mapping[str, Sequence[int]],
    limit: Callable[[tuple[str, ...]], int],
    zero: int = 0,
) -> list[PlannedBucket]:
    """Group ``gradients``, those of one pipeline rank, into buckets, and return the buckets in the order in which they
    are reduced. The gradients of a bucket are reduced together. Under ZeRO-3 all sharded parameters that the same calls
    read are one bucket of any size.

    ``stage``: the block calls (such as layers) of the rank. ``order``: the forwards and backwards of the rank in order.
    ``adds``: for each parameter, the positions in the stage of the calls whose backward adds to its gradient.
    ``limit``: function from all mesh axes over which a bucket is reduced to the bytes that fill it. ``zero``: the ZeRO
    stage, 0 to 3.
    """
    last = {a.chunk: i for i, a in enumerate(order) if a.kind in ("B", "W")}

    def done(gradient: Gradient) -> tuple[int, int]:
        """Return a sort key for the time at which ``gradient`` is complete: (index of the last action that adds to it,
        in the rank's order of forwards and backwards; minus the position of the block call, such as a layer, that adds
        last). A backward runs the calls from the last position to the first."""
        times = [(last[stage.chunk_of(i)], -i) for i in adds.get(gradient.state, ())]
        return max(times, default=(0, 0))

    buckets: list[PlannedBucket] = []
    filling: dict[object, list[Gradient]] = {}

    def close(key: object) -> None:
        """Turn the gradients that were collected under ``key`` into one bucket. The bucket is appended to ``buckets``
        and the key removed from ``filling`` (key -> gradients), both of the enclosing function."""
        content = filling.pop(key)
        action, position = done(content[-1])
        sharded = bool(content[0].sharded)
        ready = None if (content[0].tied and not sharded) or not content[0].axes else (action, -position)
        each: dict[int, int] = {}
        if sharded and zero >= 2:
            for i in (i for g in content for i in adds.get(g.state, ())):
                chunk = stage.chunk_of(i)
                each[chunk] = min(i, each.get(chunk, i))
        buckets.append(PlannedBucket(tuple(g.state for g in content), content[0].axes, ready, sharded, each))

    def together(gradient: Gradient) -> object:
        """Return a key for ``gradient``. Gradients with equal keys may be in one bucket (reduced by one collective):
        they are summed over the same mesh axes, sharded over the same axes and have the same number format; their
        parameters are shared by the same stages and read by the same block calls (such as layers). Under ZeRO-2 and
        ZeRO-3 the same virtual stages must also add to them."""
        chunks = {stage.chunk_of(i) for i in adds.get(gradient.state, ())} if zero >= 2 and gradient.sharded else ()
        return gradient.axes, gradient.dtype, gradient.tied, gradient.sharded, gradient.readers, tuple(sorted(chunks))

    for gradient in sorted((g for g in gradients if g.axes or g.sharded), key=done):
        key = together(gradient)
        filling.setdefault(key, []).append(gradient)
        if gradient.sharded and zero == 3:
            continue
        if sum(g.nbytes for g in filling[key]) >= limit(tuple(dict.fromkeys((*gradient.sharded, *gradient.axes)))):
            close(key)
    for rest in list(filling):
        close(rest)
    end = len(order), 0
    return sorted(buckets, key=lambda b: (b.ready[0], -b.ready[1]) if b.ready else end)


def follow_buckets(
    stage: StageCalls,
    order: Order,
    gradients: Sequence[Gradient],
    adds: Mapping[str, Sequence[int]],
    buckets: Sequence[Sequence[str]],
    zero: int = 0,
) -> list[PlannedBucket]:
    """Return the buckets (gradients that are reduced together) of a further program on the same weights as a plan's
    main program, such as evaluation beside training. Each bucket has the parameters of one bucket of the main program,
    but its reduction starts where the schedule of the further program completes its gradients. A bucket whose
    parameters have no gradient in the further program only gathers parameters.

    ``buckets``: for each bucket of the main program, the names of its parameters. The other arguments describe one
    pipeline rank of the further program. ``stage``: its block calls (such as layers). ``order``: its forwards and
    backwards in order. ``gradients``: its gradients. ``adds``: for each parameter, the positions in the stage of the
    calls whose backward adds to its gradient. ``zero``: the ZeRO stage, 0 to 3.
    """
    here = {g.state: g for g in gradients}
    planned = []
    for states in buckets:
        whole = [one for s in states for one in plan_buckets(stage, order, [here[s]], adds, lambda _: 0, zero)]
        if not whole:
            continue
        ready = None if any(b.ready is None for b in whole) else max((b.ready for b in whole if b.ready), key=_last)
        each: dict[int, int] = {}
        for bucket in whole:
            for chunk, position in bucket.each.items():
                each[chunk] = min(position, each.get(chunk, position))
        first = whole[0]
        planned.append(replace(first, states=tuple(states), ready=ready, each=each))
    return planned


def _last(ready: tuple[int, int]) -> tuple[int, int]:
    """Return a sort key for ``ready``, the time at which the gradients of a bucket are complete in a rank's schedule:
    later times have greater keys.

    ``ready`` is a pair: index of a backward in the rank's order of forwards and backwards; position, in the stage, of
    the block call (such as a layer) that completes the gradients in this backward. A backward runs the calls from the
    last position to the first, so a lower position is later.
    """
    return ready[0], -ready[1]


_BACKWARD = frozenset({"B", "I", "W"})

_INNER = {"dp": "dp_shard", "edp": "edp_shard"}
_OUTER = {"dp": "dp_replicate", "edp": "edp_replicate"}
_DATA = frozenset({"cp", *_INNER, *_OUTER.values()})  # axes whose ranks have gradients of different samples or tokens


@dataclass(frozen=True)
class ReductionScheme:
    """How gradients are reduced over the data-parallel ranks.

    ``inside``: for a hierarchical reduction, the number of neighbouring ranks of the mesh axis ``dp`` that form a
    group; gradients are reduce-scattered inside each group, then reduced between groups. 0: one reduction over all
    ranks. ``compression``: format to which gradients are compressed for the outermost links; ``None``: not compressed.
    """

    inside: int = 0
    compression: Compression | None = None


AT_ONCE = ReductionScheme()


def with_levels(
    bucket: PlannedBucket, shared: Sequence[str], sizes: Mapping[str, int], how: ReductionScheme
) -> PlannedBucket:
    """Return ``bucket``, gradients that are reduced together, with the collectives of its reduction filled in. A
    hierarchical or compressed reduction first reduce-scatters the bucket over the mesh axes of each level, then reduces
    the shards over the remaining axes, then all-gathers them over the axes of the levels.

    ``shared``: the mesh axes over which ZeRO shards the parameters of the bucket. ``sizes``: number of ranks by mesh
    axis. ``how``: whether the reduction is hierarchical or compressed.
    """
    axes = tuple(a for a in ALL_AXES if a in bucket.axes and sizes[a] > 1)
    if not axes:
        return bucket
    levels: tuple[tuple[str, ...], ...] = ()
    rest = list_remaining_axes(axes, shared, (), sizes.__getitem__)
    inner, outer = (tuple(a for a in split(axes) if sizes[a] > 1) for split in (inner_axes, outer_axes))
    if how.inside and inner and outer and not shared:
        levels, rest = (inner,), outer
    compression = how.compression if _DATA & {*rest, *shared} else None
    if compression and _DATA & {*rest}:
        levels, rest = (*levels, rest), ()
    return replace(bucket, levels=levels, compression=compression, turns=list_level_collectives(levels, rest))


def inner_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the mesh axes of the reduction inside groups of neighbouring ranks, for a reduction over ``axes``. ``dp``
    is replaced by ``dp_shard``, the ranks of ``dp`` in one group, and ``edp`` (data-parallel ranks of experts) by
    ``edp_shard``. Other axes stay.
    """
    return tuple(_INNER.get(axis, axis) for axis in axes)


def outer_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the mesh axes of the reduction between groups of neighbouring ranks, for a reduction over ``axes``. ``dp``
    is replaced by ``dp_replicate``, the ranks at the same place in different groups, and ``edp`` (data-parallel ranks
    of experts) by ``edp_replicate``. Other axes are left out.
    """
    return tuple(_OUTER[axis] for axis in axes if axis in _OUTER)


def build_turn_instruction(stage: int, number: int, turn: Turn) -> Instruction:
    """Return the instruction that starts one collective in the reduction of a gradient bucket. ``stage``: index of the
    pipeline stage. ``number``: index of the bucket in the stage. ``turn``: (``SCATTER``, ``REDUCE`` or ``GATHER``, mesh
    axes)."""
    op, axes = turn
    over: dict[str, Any] = {} if op == "REDUCE" else {"axes": axes}
    return Instruction(op=op, stage=stage, bucket=number, gradients=op == "GATHER", **over)


def with_turns(instructions: Sequence[Instruction], buckets: Sequence[PlannedBucket]) -> Iterator[Instruction]:
    """Yield ``instructions``, the list of one pipeline rank, with the missing collectives of each gradient bucket
    (gradients that are reduced together) inserted. If the reduction of a bucket takes several collectives,
    ``instructions`` have only the first of them.

    After each later backward instruction, one more collective of every such bucket starts, so that computation hides
    it. The remaining collectives come at the end of the step, before the first SYNC (sums gradients of shared
    parameters over stages) or STEP (waits for all reductions). ``buckets``: the buckets of the stage, in the order of
    their numbers.
    """
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
            left = deque(
                build_turn_instruction(i.stage, i.bucket, t) for t in bucket.turns[0 if bucket.sharded else 1 :]
            )
            waiting += [left] if left else []
    assert not waiting, "there is no STEP"
