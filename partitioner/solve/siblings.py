"""Points that differ in how states are shared alone: what does not fit with fewer bytes of them does not with more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from partitioner.errors import CapacityError
from partitioner.solve.pipelines import is_plain
from partitioner.solve.point import Point

Found = TypeVar("Found")


@dataclass
class Siblings:
    """``state_bytes``: of a rank. All else that a rank of several virtual stages holds is the same under ZeRO 0 to 2;
    under ZeRO-3 weights are gathered besides. Only for schedules that are followed, whose stages take long to find."""

    state_bytes: Callable[[Point], float]
    _refused: dict[Point, list[tuple[Point, CapacityError]]] = field(default_factory=lambda: defaultdict(list))

    def tried(self, point: Point, solve: Callable[[Point], Found]) -> Found:
        """What ``solve`` finds. Raises :class:`CapacityError` where it does, and where it did for a sibling that takes
        no more."""
        if is_plain(point.schedule, point.virtual_stages):
            return solve(point)
        family = replace(point, zero=0, dp_shard=0)
        for other, error in self._refused[family]:
            if (other.zero == 3) == (point.zero == 3) and self.state_bytes(other) <= self.state_bytes(point):
                raise CapacityError(error.shortage, missing_bytes=error.missing_bytes, at_least=True)
        try:
            return solve(point)
        except CapacityError as error:
            self._refused[family].append((point, error.with_traceback(None)))
            raise
