"""Computation time of a model's blocks on each device type of a topology, without collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.blockwork import BlockWork, Works
from partitioner.solve.point import Point

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
_TINY_S = 1e-15


@dataclass(frozen=True)
class Kinds:
    """Time of blocks by device type.

    ``often``: the number of calls of each block. ``samples``: the samples of a batch in the block graphs. ``counts``:
    the number of devices of each type.
    """

    works: Works
    often: Counter[str]
    samples: int
    counts: NDArray[np.int64]

    @property
    def differ(self) -> bool:
        """Whether the topology has several device types."""
        return len(self.counts) > 1

    def seconds(self, blocks: Mapping[str, BlockWork], points: Sequence[Point]) -> tuple[Matrix, Matrix]:
        """Forward and backward seconds of one microbatch in each block that is called: two arrays ``[blocks,
        points]``."""
        fields = ("cp", "tp", "ep", "microbatch_size")
        cp, tp, ep, size = (np.array([getattr(p, a) for p in points], dtype=np.float64) for a in fields)
        share, several = size / self.samples / cp, (size > 1).astype(np.float64)

        def both(work: BlockWork) -> Matrix:
            seconds = np.stack([each.at(share, tp, several, ep) for each in (work.forward, work.backward)])
            return np.where(cp > 1, both(work.over_ranks), seconds) if work.over_ranks is not None else seconds

        found = np.stack([both(blocks[name]) for name in self.often], axis=1)
        return found[0], found[1]

    def of_each(self, points: Sequence[Point]) -> NDArray[np.float64]:
        """Forward plus backward seconds of one microbatch in each block on every device type: ``[kinds, blocks,
        points]``."""
        return np.stack([sum(self.seconds(paced, points)) for paced in self.works.paced])

    def longest_backward(self, points: Sequence[Point]) -> Vector:
        """Backward seconds of one microbatch through all calls, on the slowest device type: shape ``[points]``."""
        calls = np.array([self.often[name] for name in self.often], dtype=np.float64)
        each = np.stack([calls @ self.seconds(paced, points)[1] for paced in self.works.paced])
        longest: Vector = each.max(axis=0)
        return longest

    def speeds(self, points: Sequence[Point]) -> Matrix:
        """Greatest relative speed of each device type over all blocks, forward or backward; the best type has speed 1.
        Shape ``[kinds, points]``."""
        best = np.maximum(np.concatenate(self.seconds(self.works.best, points)), _TINY_S)
        own = [np.maximum(np.concatenate(self.seconds(paced, points)), _TINY_S) for paced in self.works.paced]
        return np.stack([(best / seconds).max(axis=0) for seconds in own])

    def fastest(self, points: Sequence[Point]) -> Vector:
        """Greatest relative speed over all device types: shape ``[points]``."""
        return self.speeds(points).max(axis=0) if self.differ else np.ones(len(points))
