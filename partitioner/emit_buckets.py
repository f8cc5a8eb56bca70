"""Which gradients are reduced together, and when they are ready.

Buckets are filled in the order in which the last backward completes the gradients (the last calls first), so that each
is reduced behind what is left of it, as in PyTorch's DDP (Li et al. 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from partitioner.actions import Order
from partitioner.emit_routes import StageCalls
from runtime.buckets import Compression
from runtime.levels import Turn

_LEAST_BUCKET = 25 * 2**20
_PER_RANK = 2_000_000


def bucket_limit(ranks: int) -> int:
    """The size of buckets over ``ranks``: PyTorch's, and for many ranks Megatron-LM's million of two-byte gradients for
    each, so that the steps around the ring are not most of it."""
    return max(_LEAST_BUCKET, _PER_RANK * ranks)


@dataclass(frozen=True)
class Gradient:
    """A state's gradient as one stage's rank holds it."""

    state: str
    dtype: str
    nbytes: int
    axes: tuple[str, ...]  # those with more than one rank over which it is to be added up
    tied: tuple[int, ...]  # the stages that share it, where they are several
    sharded: tuple[str, ...] = ()  # the axes that share the state
    readers: tuple[int, ...] = ()  # under ZeRO 3 the positions of the stage's calls that read it


@dataclass(frozen=True)
class PlannedBucket:
    """``ready``: (index of the action in the order, position of the call) after which it is whole on this rank;
    ``None`` where it has to wait for SYNC, or is of parameters without gradients. ``each``: under ZeRO 2 and 3, for
    each chunk the position of the call after which a microbatch has added all to it that it adds. ``levels``,
    ``compression``: see :class:`runtime.buckets.Bucket`; ``turns``: what reduces it, or the shards that SCATTER makes.
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
        """The position of the call of ``chunk`` whose backward, the order's action ``index``, it is to follow."""
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
    """Buckets of ``gradients``, in the order in which they are to be reduced.

    ``adds``: for each state the positions of the stage's calls whose backward adds to its gradient. ``limit``: the
    bytes that fill a bucket that is added up over these axes, at once or one after the other: what is left of a bucket
    after it is scattered inside a node still goes around all nodes. ``zero``: under 3 a bucket is of what the same
    calls read, without limit.
    """
    last = {a.chunk: i for i, a in enumerate(order) if a.kind in ("B", "W")}

    def done(gradient: Gradient) -> tuple[int, int]:
        """When the gradient is complete; calls run backward from the last one."""
        times = [(last[stage.chunk_of(i)], -i) for i in adds.get(gradient.state, ())]
        return max(times, default=(0, 0))

    buckets: list[PlannedBucket] = []
    filling: dict[object, list[Gradient]] = {}

    def close(key: object) -> None:
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
        """What may be in one bucket: under ZeRO 2 and 3 what the same chunks add to."""
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
