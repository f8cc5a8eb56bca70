"""What the blocks of a model take on each kind of device of a topology, without collectives."""

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
    """``often``: how often the blocks are called, whose graphs are for ``samples`` of a batch; ``counts``: the devices
    of each kind."""

    works: Works
    often: Counter[str]
    samples: int
    counts: NDArray[np.int64]

    @property
    def differ(self) -> bool:
        """Whether there are several."""
        return len(self.counts) > 1

    def seconds(self, blocks: Mapping[str, BlockWork], points: Sequence[Point]) -> tuple[Matrix, Matrix]:
        """Of a microbatch in each block that is called, forward and backward, shapes ``[blocks, points]``."""
        fields = ("cp", "tp", "ep", "microbatch_size")
        cp, tp, ep, size = (np.array([getattr(p, a) for p in points], dtype=np.float64) for a in fields)
        share, several = size / self.samples / cp, (size > 1).astype(np.float64)

        def both(work: BlockWork) -> Matrix:
            seconds = np.stack([each.at(share, tp, several, ep) for each in (work.forward, work.backward)])
            return np.where(cp > 1, both(work.over_ranks), seconds) if work.over_ranks is not None else seconds

        found = np.stack([both(blocks[name]) for name in self.often], axis=1)
        return found[0], found[1]

    def of_each(self, points: Sequence[Point]) -> NDArray[np.float64]:
        """The same of every kind, both ways together: shape ``[kinds, blocks, points]``."""
        return np.stack([sum(self.seconds(paced, points)) for paced in self.works.paced])

    def longest_backward(self, points: Sequence[Point]) -> Vector:
        """Of a microbatch through all calls, backward, on the kind that takes longest."""
        calls = np.array([self.often[name] for name in self.often], dtype=np.float64)
        each = np.stack([calls @ self.seconds(paced, points)[1] for paced in self.works.paced])
        longest: Vector = each.max(axis=0)
        return longest

    def speeds(self, points: Sequence[Point]) -> Matrix:
        """The greatest speed that each kind has for any block, either way, where 1 is that of the best kind: shape
        ``[kinds, points]``."""
        best = np.maximum(np.concatenate(self.seconds(self.works.best, points)), _TINY_S)
        own = [np.maximum(np.concatenate(self.seconds(paced, points)), _TINY_S) for paced in self.works.paced]
        return np.stack([(best / seconds).max(axis=0) for seconds in own])

    def fastest(self, points: Sequence[Point]) -> Vector:
        """That of the kind that has most."""
        return self.speeds(points).max(axis=0) if self.differ else np.ones(len(points))
