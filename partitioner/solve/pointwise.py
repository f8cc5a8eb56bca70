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
BY_SIZE: Key = attrgetter("dp", "microbatch_size")  # how many microbatches
BY_SHARES: Key = attrgetter("microbatch_size", *_STATES)  # the same, where faster ranks may have more


def by_all(point: Point) -> Point:
    """Each by itself."""
    return point


def each(points: Sequence[Point], key: Key, find: Callable[[Point], float]) -> NDArray[np.float64]:
    """``find`` of each of ``points``, which is the same where ``key`` is."""
    keys = list(map(key, points))
    known = {which: find(point) for which, point in dict(zip(keys, points, strict=True)).items()}
    return np.array([known[which] for which in keys], dtype=np.float64)


def different(points: Sequence[Point], key: Key) -> tuple[list[Point], NDArray[np.int64]]:
    """One point of each ``key``, and for each of ``points`` the place of its own."""
    keys = list(map(key, points))
    one = dict(zip(keys, points, strict=True))
    places = dict(zip(one, range(len(one)), strict=True))
    return list(one.values()), np.array([places[which] for which in keys], dtype=np.int64)


__all__ = ["BY_SHARES", "BY_SIZE", "BY_STATES", "BY_WORK", "by_all", "different", "each"]
