"""What reducing the gradients of a stage takes, and how much of it computation does not hide."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.collectives import collective_time
from partitioner.cost.reducer import Reducer
from partitioner.cost.states import StateCost
from partitioner.emit_buckets import bucket_limit


@dataclass(frozen=True)
class Reduction:
    """The reduction of a stage's gradients: seconds in all, and of the last bucket, which nothing hides.

    ``again_s``: of scattering in every further microbatch, under ZeRO 2, which accumulates shards.
    ``gather_s``: of gathering the updated parameters under ZeRO 1 and 2, behind the forward that follows.
    ``coding_s``: of compressing what is sent, which nothing is beside; ``coding_again_s``: in every further microbatch.
    """

    total_s: float = 0.0
    last_s: float = 0.0
    gather_s: float = 0.0
    again_s: float = 0.0
    coding_s: float = 0.0
    coding_again_s: float = 0.0
    by_axes: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    @property
    def seconds(self) -> tuple[float, ...]:
        """All but what is by axes, in order."""
        return self.total_s, self.last_s, self.gather_s, self.again_s, self.coding_s, self.coding_again_s

    def exposed(
        self, window_s: float, slowdown: float, forward_s: float = 0.0, overlap: bool = True, microbatches: int = 1
    ) -> float:
        """Seconds that it adds to a backward of ``window_s`` that it overlaps with, and to a forward of ``forward_s``;
        and to the backwards of all ``microbatches`` but the last.

        While both run each takes ``slowdown`` times as long; what does not fit and the last bucket come after.
        """
        return float(exposed_seconds(self.seconds, window_s, slowdown, forward_s, overlap, microbatches))


Seconds = float | NDArray[np.float64]


def exposed_seconds(
    works: Sequence[Seconds], window_s: Seconds, slowdown: float, forward_s: Seconds, overlap: bool, microbatches: int
) -> Any:
    """:meth:`Reduction.exposed`, of many at a time; ``works``: as
    :attr:`Reduction.seconds`."""
    total, last, gather, again, coding, coding_again = works
    coding = coding + (microbatches - 1) * coding_again
    if not overlap:
        return total + gather + (microbatches - 1) * again + coding

    def beside(seconds: Seconds, other: Seconds) -> Any:
        return (slowdown - 1) * np.minimum(seconds, other) + np.maximum(0.0, seconds - other)

    behind = beside(np.maximum(0.0, total - last), window_s) + last
    return beside(gather, forward_s) + (microbatches - 1) * beside(again, window_s) + behind + coding


def by_owner(work: Reduction, tensors: Mapping[tuple[str, ...], int], reducer: Reducer) -> Reduction:
    """``work``, where each of so many ``tensors``, by the axes that share their states, is on one rank: gradients are
    added up to their owners and what those have updated goes out in a message for each owner, whose pieces pass through
    all ranks in turn, as of a ring's (InternEvo, ``hybrid_zero_optim.py``: ``dist.reduce`` and ``dist.broadcast``)."""
    groups = [(reducer.group(axes), count) for axes, count in tensors.items()]
    starts = sum(min(group.size, count) * group.one_way_start for group, count in groups)
    return replace(work, total_s=work.total_s + starts, gather_s=work.gather_s + starts)


Axes = tuple[str, ...]
Sizes = dict[tuple[str, Axes, int, Axes], float]
"""Bytes by operation, its axes, the stage of ZeRO, and the axes that gradients were scattered over before."""


def reduction(costs: Collection[StateCost], reducer: Reducer, overlap: bool = True) -> Reduction:
    """The reduction of the gradients of ``costs``, in buckets by axes.

    Buckets are small for the first to go out behind computation: without ``overlap`` there is one for the same axes.
    Under ZeRO 1 and 2 it is a reduce-scatter and, in the next step, an all-gather; under 3 both are the calls' own.
    What a reduce-scatter leaves is added up over other axes (replicas, ``tp``) once.
    """
    sizes: Sizes = {}
    last_level: dict[tuple[str, ...], bool] = {}
    for cost in costs:
        for key, size in reduced_sizes(cost).items():
            sizes[key] = sizes.get(key, 0.0) + size
        last_level |= last_levels(cost)
    return reduction_of(sizes, last_level, reducer, overlap)


def reduced_sizes(cost: StateCost) -> Sizes:
    """What of a state is reduced, and how."""
    sizes: Sizes = {}
    if cost.gradient and cost.scatter_axes and cost.stage < 3:
        sizes["reduce_scatter", cost.scatter_axes, cost.stage, ()] = cost.gradient
        sizes["all_gather", cost.scatter_axes, cost.stage, ()] = cost.parameter
    if cost.gradient and cost.rest_axes:
        sizes["all_reduce", cost.rest_axes, 0, cost.scatter_axes] = cost.gradient_piece
    return sizes


def last_levels(cost: StateCost) -> dict[tuple[str, ...], bool]:
    """Whether scattering a state's gradient over its axes is the last of its reduction that data takes part in."""
    scattered = cost.gradient and cost.scatter_axes and cost.stage < 3
    return {cost.scatter_axes: not any(axis != "tp" for axis in cost.rest_axes)} if scattered else {}


def reduction_of(
    sizes: Sizes, last_level: Mapping[tuple[str, ...], bool], reducer: Reducer, overlap: bool = True
) -> Reduction:
    """The reduction of so many bytes, see :func:`reduction`."""
    by_axes: dict[tuple[str, ...], float] = {}
    last = gathered = again = coding = coding_again = 0.0
    for (op, axes, stage, before), size in sizes.items():
        group = reducer.group(axes)
        filled_by = reducer.group(before).size if before else 1  # a bucket of shards is one of what was scattered
        limit = bucket_limit(filled_by * group.size)
        count = math.ceil(size * filled_by / limit) if overlap else 1
        if op == "all_gather":  # of the parameters, in the next step
            gathered += count * collective_time(op, size / count, group)
            continue
        sent = reducer.all_reduce(size / count, axes) if op == "all_reduce" else None
        sent = sent or reducer.scatter(size / count, axes, last_level[axes])
        by_axes[axes] = by_axes.get(axes, 0.0) + count * sent.seconds
        last = max(last, sent.seconds)
        again += count * sent.seconds if stage == 2 else 0.0
        coding += count * sent.coding_s
        coding_again += count * sent.coding_s if stage == 2 else 0.0
    return Reduction(sum(by_axes.values()), last, gathered, again, coding, coding_again, by_axes)
