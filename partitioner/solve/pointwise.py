"""Numbers of many points at once, each found once for those points that it is the same for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.point import Point

Key = Callable[[Point], Hashable]

_WORK = "pp", "dp", "tp", "microbatch_size", "schedule", "cp", "ep", "virtual_stages"
_STATES = "pp", "dp", "tp", "cp", "ep", "etp", "zero", "dp_shard"
BY_WORK: Key = attrgetter(*_WORK)  # what is computed, and in which pipeline
BY_STATES: Key = attrgetter(*_STATES)  # which states a rank has, and who has them as well
BY_ROUNDS: Key = attrgetter("microbatch_size", *_STATES)  # how many microbatches


def by_all(point: Point) -> Point:
    """Each by itself."""
    return point


def each(points: Sequence[Point], key: Key, find: Callable[[Point], float]) -> NDArray[np.float64]:
    """``find`` of each of ``points``, which is the same where ``key`` is."""
    known: dict[Hashable, float] = {}
    found = []
    for point, which in zip(points, map(key, points), strict=True):
        if which not in known:
            known[which] = find(point)
        found.append(known[which])
    return np.array(found, dtype=np.float64)


def different(points: Sequence[Point], key: Key) -> tuple[list[Point], NDArray[np.int64]]:
    """One point of each ``key``, and for each of ``points`` the place of its own."""
    places: dict[Hashable, int] = {}
    at = [places.setdefault(which, len(places)) for which in map(key, points)]
    first = dict(zip(reversed(at), reversed(points), strict=True))
    return [first[place] for place in range(len(places))], np.array(at, dtype=np.int64)


__all__ = ["BY_ROUNDS", "BY_STATES", "BY_WORK", "by_all", "different", "each"]
