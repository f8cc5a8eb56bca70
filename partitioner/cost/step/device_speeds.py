"""Lower bound on the step time where devices differ: each group of ranks does work in proportion to its speed.

Under GPipe and 1F1B, a pipeline in which ``j`` stages are fully loaded and the others idle takes ``(n - 1 + j) work /
v`` for ``n`` microbatches, where ``v`` is the summed speed of its ``j`` fastest stages. No other division of the work
among stages beats the best ``j``, since the longest stage and the sum of all stages are piecewise linear in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

Matrix = NDArray[np.float64]
Counts = NDArray[np.int64]
_ROUNDING = 1e-9
_TINY_S = 1e-15
ALONE = 0.5  # least share of a microbatch's work on its path: its backward for weights may run later
_STEPS = 64  # ends of microbatches that are looked at: fewer say less, but nothing wrong


@dataclass(frozen=True)
class PipelineSpeeds:
    """Groups of equal pipelines: ``speeds`` of their stages, shape ``[kinds of pipelines, stages]``, fastest first, and
    ``counts``, the number of pipelines of each kind."""

    speeds: Matrix
    counts: Counts

    def least(self, work: float, microbatches: float, *, plain: bool) -> float:
        """Lower bound in seconds on ``microbatches`` in all, each of ``work`` seconds at speed 1, at least one in each
        pipeline.

        ``plain``: under GPipe or 1F1B. Otherwise under any schedule: no stage is busy for longer than the step, and one
        microbatch goes through all stages.
        """
        speed = np.cumsum(self.speeds, axis=1)
        least = microbatches / float(speed[:, -1] @ self.counts)
        if plain:
            busy = np.arange(1.0, speed.shape[1] + 1)
            least = max(least, float((busy / speed).min(axis=1).max()))
        else:
            speed, busy = speed[:, -1:], np.zeros(1)
            least = max(least, ALONE / float(self.speeds[:, 0].min()))
        for _ in range(_STEPS):
            done = np.floor((least * speed - busy + plain).max(axis=1) + _ROUNDING)
            if done @ self.counts >= microbatches - _ROUNDING:
                break
            least = float(((done[:, None] + busy + (not plain)) / speed).min())
        return least * work


@dataclass(frozen=True)
class GroupSpeeds:
    """Groups of ranks, each as fast as its slowest device: ``counts`` groups of each of ``speeds``, fastest first. They
    form ``pipelines`` pipelines of equally many groups, one group to a stage, in any combination."""

    speeds: Vector
    counts: Counts
    pipelines: int

    @cached_property
    def number(self) -> int:
        """Number of groups."""
        return int(self.counts.sum())

    @cached_property
    def together(self) -> float:
        """Summed speed of all groups."""
        return float(self.speeds @ self.counts)

    @cached_property
    def fastest(self) -> float:
        """Speed of the fastest group."""
        return float(self.speeds[0])

    def fastest_together(self, number: Counts) -> Vector:
        """Summed speed of the fastest ``number`` groups, for each element of ``number``."""
        before = np.cumsum(self.counts) - self.counts
        taken = np.clip(number[:, None] - before, 0, self.counts)
        together: Vector = taken @ self.speeds
        return together

    def least(self, work: float, microbatches: float, *, plain: bool) -> float:
        """Lower bound in seconds as of :meth:`PipelineSpeeds.least`, over every way to form pipelines of the groups.

        In one pipeline no group is faster than the ``pipelines``-th fastest group. Summed over the pipelines, of which
        the fastest ``J`` groups work, GPipe and 1F1B take ``(microbatches - pipelines + J) work / v(J)``.
        """
        if self.number == self.pipelines:
            return PipelineSpeeds(self.speeds[:, None], self.counts).least(work, microbatches, plain=plain)
        alone = (1.0 if plain else ALONE) / float(self.speeds[np.searchsorted(np.cumsum(self.counts), self.pipelines)])
        if not plain:
            return max(microbatches / self.together, alone) * work
        ends = np.concatenate([np.cumsum(self.counts), [self.pipelines]])
        busy = ends[ends >= self.pipelines]
        seconds = (microbatches - self.pipelines + busy) / self.fastest_together(busy)
        return max(float(seconds.min()), alone) * work


def pool_of(speeds: Vector, counts: Counts, size: int, pipelines: int) -> GroupSpeeds:
    """Groups of ``size`` devices in ``pipelines``, formed of ``counts`` devices of each of ``speeds``, fastest
    together.

    >>> pool_of(np.array([0.5, 1.0]), np.array([5, 3]), 2, 2)
    Pool(speeds=array([1. , 0.5]), counts=array([1, 3]), pipelines=2)
    """
    order = np.argsort(-speeds, kind="stable")
    of_speed = np.diff(np.cumsum(counts[order]) // size, prepend=0)
    some = of_speed > 0
    return GroupSpeeds(speeds[order][some], of_speed[some], pipelines)


def work_and_speeds(seconds: Matrix, often: Sequence[int]) -> tuple[float, Vector]:
    """Seconds of all blocks' work at speed 1, and the speed of each device type.

    ``seconds``: of each block on each type, shape ``[kinds, blocks]``. ``often``: the number of calls of each block. No
    set of calls takes less on a type than its work divided by the type's speed.

    Speeds are averages over all blocks. Where a type runs a block relatively faster, the block's work is reduced
    accordingly: with these speeds as prices in the linear program that divides blocks among types, the dual is a bound.
    """
    of_all = np.maximum(seconds @ np.array(often, dtype=np.float64), _TINY_S)
    speeds = of_all.min() / of_all
    return float((speeds[:, None] * seconds).min(axis=0) @ np.array(often)), speeds
