"""Lower bounds on the step time of clusters whose devices differ in speed. Each group of ranks is given work in
proportion to its speed.

Consider ``n`` microbatches, each of ``work`` seconds at speed 1, under GPipe or 1F1B. If ``j`` stages have equal load
and the others are idle, a pipeline takes ``(n - 1 + j) work / v`` seconds, where ``v`` is the summed speed of its ``j``
fastest stages. The best ``j`` is at least as fast as any other division of the work: the step time is piecewise linear
in the stages' loads, so its minimum is at one of these divisions.
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
ALONE = 0.5  # least share of a microbatch's work on its critical path: gradients of weights may be computed later
_STEPS = 64  # ends of microbatches that are followed; fewer give a weaker bound


@dataclass(frozen=True)
class PipelineSpeeds:
    """Speeds of the stages of several pipelines, one pipeline for each data-parallel rank. Pipelines whose stages have
    equal speeds form one kind.

    ``speeds``: speed of each stage relative to the fastest device type of the cluster, shape ``[kinds, stages]``; the
    stages of a pipeline are sorted, the fastest first. ``counts``: number of pipelines of each kind, shape ``[kinds]``.
    """

    speeds: Matrix
    counts: Counts

    def least(self, work: float, microbatches: float, *, plain: bool) -> float:
        """Return a lower bound in seconds on the time in which all pipelines together process ``microbatches``
        microbatches, at least one in each pipeline.

        ``work``: seconds of one microbatch, forward and backward, on all stages together at speed 1. ``plain``: whether
        the schedule is GPipe or 1F1B. If not, the bound holds for any schedule and is lower: it uses only that a step
        takes at least as long as a stage is busy, and that one microbatch passes through all stages.
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
    """Speeds of groups of ranks, before it is decided which groups form a pipeline together. There will be
    ``pipelines`` pipelines of equal length, with one group for each stage.

    ``speeds``: the distinct speeds, fastest first, relative to the fastest device type (1.0); a group is as fast as its
    slowest device. ``counts``: number of groups of each speed.
    """

    speeds: Vector
    counts: Counts
    pipelines: int

    @cached_property
    def number(self) -> int:
        """Return the number of groups of ranks."""
        return int(self.counts.sum())

    @cached_property
    def together(self) -> float:
        """Return the sum of the speeds of all groups of ranks, relative to the fastest device type (1.0)."""
        return float(self.speeds @ self.counts)

    @cached_property
    def fastest(self) -> float:
        """Return the speed of the fastest group of ranks, relative to the fastest device type (1.0)."""
        return float(self.speeds[0])

    def fastest_together(self, number: Counts) -> Vector:
        """Return the summed speed of the ``n`` fastest groups of ranks, for each integer ``n`` in ``number``, relative
        to the fastest device type (1.0). The result has the shape of ``number``.
        """
        before = np.cumsum(self.counts) - self.counts
        taken = np.clip(number[:, None] - before, 0, self.counts)
        together: Vector = taken @ self.speeds
        return together

    def least(self, work: float, microbatches: float, *, plain: bool, ahead: float = 0.0) -> float:
        """Return a lower bound in seconds on the time in which all pipelines together process ``microbatches``
        microbatches, over every way to form pipelines of the groups. ``work``: seconds of one microbatch on all stages
        at speed 1. ``plain``: whether the schedule is GPipe or 1F1B; if not, the bound holds for any schedule.
        ``ahead``: if each group has one stage and steps do not overlap, the least share of a stage's seconds that is
        its forward; otherwise 0.

        Let ``P`` be the number of pipelines. The fastest group of the slowest pipeline is at most as fast as the
        ``P``-th fastest group. If the ``J`` fastest groups work and the others are idle, the formula of GPipe and 1F1B,
        summed over all pipelines, gives ``(microbatches - P + J) work / v(J)``, where ``v(J)`` is the summed speed of
        these groups.
        """
        if self.number == self.pipelines:
            return PipelineSpeeds(self.speeds[:, None], self.counts).least(work, microbatches, plain=plain)
        alone = (1.0 if plain else ALONE) / float(self.speeds[np.searchsorted(np.cumsum(self.counts), self.pipelines)])
        if not plain:
            return max(microbatches / self.together, alone, self._bound_filled_pipelines(microbatches, ahead)) * work
        ends = np.concatenate([np.cumsum(self.counts), [self.pipelines]])
        busy = ends[ends >= self.pipelines]
        seconds = (microbatches - self.pipelines + busy) / self.fastest_together(busy)
        return max(float(seconds.min()), alone) * work

    def _bound_filled_pipelines(self, microbatches: float, ahead: float) -> float:
        """Return a lower bound on the time in which all pipelines process ``microbatches`` microbatches, in units of
        the seconds of one microbatch on all stages at speed 1. It counts the time in which a stage waits for its first
        microbatch. ``ahead``: the least share of a stage's seconds that is its forward.

        Let a pipeline process ``n`` microbatches in ``T`` seconds, and let ``u_k`` be the seconds of one microbatch on
        its stage ``k``. The stage waits for the forwards before it, then processes all microbatches: ``ahead (u_0 + ...
        + u_(k-1)) + n u_k <= T``. A pipeline does the most work in this time if ``u_k = (T / n) (1 - ahead / n)^k`` and
        the fastest groups are its first stages. ``n`` is at most ``T`` divided by the seconds of one microbatch on the
        fastest groups. All pipelines together do the most work if the fastest groups are all first stages, the next all
        second stages, and so on.
        """
        stages = self.number // self.pipelines
        by_stage = np.diff(self.fastest_together(np.arange(stages + 1) * self.pipelines))
        fastest = float(self.fastest_together(np.array([stages]))[0])
        found, most = np.inf, max(1, int(microbatches * fastest / self.together))
        while most / fastest < found:
            capacity = float(by_stage @ (1 - ahead / most) ** np.arange(stages))
            found = min(found, max(microbatches / capacity, most / fastest))
            most += 1
        return float(found)


def pool_of(speeds: Vector, counts: Counts, size: int, pipelines: int) -> GroupSpeeds:
    """Return the :class:`GroupSpeeds` of groups of ``size`` devices each, formed of ``counts[i]`` devices of speed
    ``speeds[i]``. The fastest devices are grouped together, and a group is as fast as its slowest device.
    ``pipelines``: number of pipelines that the groups will form.

    >>> pool_of(np.array([0.5, 1.0]), np.array([5, 3]), 2, 2)
    GroupSpeeds(speeds=array([1. , 0.5]), counts=array([1, 3]), pipelines=2)
    """
    order = np.argsort(-speeds, kind="stable")
    of_speed = np.diff(np.cumsum(counts[order]) // size, prepend=0)
    some = of_speed > 0
    return GroupSpeeds(speeds[order][some], of_speed[some], pipelines)


def work_and_speeds(seconds: Matrix, often: Sequence[int]) -> tuple[float, Vector]:
    """Return two values: the seconds of all block calls (such as layers) on a device of speed 1, and the speed of each
    device type relative to the fastest, shape ``[kinds]``. The seconds of any set of calls on a device type are at
    least their seconds at speed 1, divided by the type's speed.

    ``seconds``: seconds of one call of each block on each device type, shape ``[kinds, blocks]``. ``often``: for each
    block, the number of its calls in one microbatch.

    A speed is an average over all blocks. If a type runs some block relatively faster than its average, that block's
    work is reduced until the statement above holds for it. (The speeds are a feasible dual solution of the linear
    program that divides the blocks among the device types, so the result is a bound.)
    """
    of_all = np.maximum(seconds @ np.array(often, dtype=np.float64), _TINY_S)
    speeds = of_all.min() / of_all
    return float((speeds[:, None] * seconds).min(axis=0) @ np.array(often)), speeds


def least_forward_share(forward: Matrix, both: Matrix, often: Sequence[int]) -> tuple[float, float]:
    """Return two values ``(share, less)`` with this property: for any set of block calls (such as layers) on any device
    types, the forward takes at least ``share`` times the seconds of forward and backward, minus ``less`` seconds.

    ``share`` is the least share of the main block, the one with the most work. Other blocks, such as an embedding, may
    have a smaller share; ``less`` makes up for that. ``forward``, ``both``: seconds of forward, and of forward and
    backward, of one call of each block on each device type, shape ``[kinds, blocks]``. ``often``: for each block, the
    number of its calls.
    """
    number = np.array(often, dtype=np.float64)
    main = int(np.argmax(number * both.max(axis=0)))
    share = float((forward[:, main] / np.maximum(both[:, main], _TINY_S)).min())
    return share, float((number * np.maximum(0.0, share * both - forward).max(axis=0)).sum())
