"""Lower bounds of the points of a search, the cheapest first: the relaxed model's, and those of actual shardings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.bounds import ModelBounds
from partitioner.cost.gathers import Floor, Gathers
from partitioner.errors import CapacityError
from partitioner.evaluate import Evaluator
from partitioner.solve.least import LeastTime
from partitioner.solve.pipelines import is_formula, is_plain
from partitioner.solve.points import Point
from passes.errors import PartitionError


class Floors:
    """What the search asks of bounds, for ``points``.

    The relaxed model knows no collectives. A sharding that is solved for the largest microbatch says what they take at
    least in smaller ones too, so that one sharding bounds all points of a width of ``tp``; the point's own says more.
    """

    def __init__(self, bounds: ModelBounds, evaluator: Evaluator, points: Sequence[Point]) -> None:
        self.bounds, self.evaluator = bounds, evaluator
        self._sizes: dict[int, set[int]] = defaultdict(set)  # by tp
        self._alike: dict[Point, list[Point]] = defaultdict(list)  # those of other ZeRO stages
        self._shared: dict[Point, LeastTime | PartitionError] = {}
        self._unseen: set[Point] = set()
        self._gathers = Gathers(evaluator.job, bounds.placements, bounds.device)
        for point in points:
            self._sizes[point.tp].add(point.microbatch_size)
            if is_plain(point.schedule, point.virtual_stages):
                self._alike[_plainest(point)].append(point)
        # kernels that fit in caches are faster than their share of larger ones
        self._scales = not any(device.memory_sizes for device in evaluator.job.topology.types.values())

    def times(self, points: Sequence[Point]) -> NDArray[np.float64]:
        """Of all points at once."""
        return self.bounds.times(points)

    @cached_property
    def steps(self) -> Sequence[Callable[[Point, float], float]]:
        """Bounds of one point, one tighter than the other: whether states fit; even stages, then the best ones of all
        ZeRO stages, and of its own, by the largest microbatch's sharding; then both by its own."""
        return self._held, self._even, self._together, self._staged, self._thoroughly, self._own, self._own_staged

    def shortage(self, point: Point) -> CapacityError | None:
        """What a point lacks at least on which stage, if its states alone are too large."""
        try:
            self.bounds.refine(point)
        except CapacityError as error:
            return error
        return None

    def _held(self, point: Point, _: float) -> float:
        self.bounds.check_states(point)
        return 0.0

    def _even(self, point: Point, _: float) -> float:
        floor = self._of_all(point)
        return self.bounds.with_floor(point, floor) if floor else 0.0

    def _together(self, point: Point, enough_s: float) -> float:
        """The best stages of points that differ in ZeRO alone, in the least memory that any of them takes."""
        key = _plainest(point)
        if len(self._alike[key]) < 2 or not is_plain(point.schedule, point.virtual_stages):
            return 0.0
        plain = self._shared.get(replace(key, schedule="1f1b"))  # which holds no more
        if isinstance(plain, LeastTime) and (bound := self.bounds.staged(point, plain)) >= enough_s:
            return bound
        if key not in self._shared:
            leanest = replace(key, zero=max(p.zero for p in self._alike[key]), dp_shard=point.dp_shard)
            try:
                self._shared[key] = self.bounds.relaxed(leanest, self._of_largest(key), enough_s=enough_s, quick=True)
            except PartitionError as error:
                self._shared[key] = error
        found = self._shared[key]
        if isinstance(found, PartitionError):
            raise found.with_traceback(None)
        return self.bounds.staged(point, found)

    def _staged(self, point: Point, enough_s: float) -> float:
        if not is_plain(point.schedule, point.virtual_stages):
            return 0.0
        quick = is_formula(point.schedule)  # others come when runs that make a step too long are known
        least = self.bounds.relaxed(point, self._of_all(point), enough_s=enough_s, quick=quick)
        if quick and not least.is_seen:
            self._unseen.add(point)
        return self.bounds.staged(point, least)

    def _thoroughly(self, point: Point, enough_s: float) -> float:
        """The same, where only stages that are far from even may fit."""
        if point not in self._unseen:
            return 0.0
        return self.bounds.staged(point, self.bounds.relaxed(point, self._of_all(point), enough_s=enough_s))

    def _own(self, point: Point, _: float) -> float:
        if self._scales and point.microbatch_size == self._largest(point):
            return 0.0  # said before
        floor = self.evaluator.floor(point, point.microbatch_size)
        return self.bounds.with_floor(point, floor) if floor else 0.0

    def _own_staged(self, point: Point, enough_s: float) -> float:
        own = self.evaluator.least(point) if is_plain(point.schedule, point.virtual_stages) else None
        return self.bounds.staged(point, self.bounds.least(point, *own, enough_s=enough_s)) if own else 0.0

    def _of_all(self, point: Point) -> Floor | None:
        """What the largest microbatch says, and what gathering weights takes for any."""
        return self._gathers.beside(self._of_largest(_plainest(point)), point)

    def _of_largest(self, point: Point) -> Floor | None:
        if not self._scales or point.tp == point.cp == point.ep == 1:  # without collectives little is gained
            return None
        return self.evaluator.floor(point, self._largest(point))

    def _largest(self, point: Point) -> int:
        """The largest microbatch that says something of the point's: a multiple that, like it, can or cannot be divided
        by ``tp``, which decides whether the batch itself may be sharded."""
        size, tp = point.microbatch_size, point.tp
        return max(s for s in self._sizes[tp] if s % size == 0 and (s % tp == 0) == (size % tp == 0))


def _plainest(point: Point) -> Point:
    """The same without ZeRO, where nothing is gathered."""
    return replace(point, zero=0, dp_shard=0)
