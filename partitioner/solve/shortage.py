"""When nothing fits: what lacks how much on which stage."""

from __future__ import annotations

import math

import numpy as np

from partitioner.errors import CapacityError, PlanError
from partitioner.solve.tables import StageTables, Table, min_max
from partitioner.units import bytes_text

_HOW = {
    "none": " without recomputation",
    "selective": " with activations recomputed in part",
    "full": " with repeated layers recomputed",
}


def check_room(takes: str, needed: float, room: float) -> None:
    """Raise :class:`CapacityError` where what ``takes`` the ``needed`` bytes has no ``room``; no plan lacks less."""
    if (missing := math.ceil(needed - room)) > 0:
        text = f"{takes} of the {bytes_text(room)} usable on a device: {bytes_text(missing)} too much"
        raise CapacityError(text, missing_bytes=missing, at_least=True)


def _shortage(tables: StageTables) -> tuple[float, int, list[int]]:
    """Over all splits, the least that any rank can lack (bytes, negative: to spare), on which stage, and the cuts."""
    least = [_pinned(tables, stage) for stage in range(len(tables.allowed))]
    excess = [m - c for m, c in zip(least, tables.problem.capacity, strict=True)]
    worst, cuts = min_max(excess)
    lacking = [float(excess[s][cuts[s], cuts[s + 1]]) for s in range(len(excess))]
    return worst, int(np.argmax(lacking)), cuts


def _pinned(tables: StageTables, stage: int) -> Table:
    """The least peak bytes of every segment: where "full" is asked for, with just that recomputed."""
    if tables.problem.recompute != "full" or not tables.problem.train:
        return tables.least_memory[stage]
    start, stop = np.nonzero(tables.allowed[stage])
    found = np.full(tables.allowed[stage].shape, np.inf)
    found[start, stop] = tables.memory(stage, start, stop, tables.recomputed(stage, start, stop))
    return found


def capacity_error(tables: StageTables, *, relaxed: bool = False) -> PlanError:
    """Why no split of a problem is possible: what lacks least, and where; ``relaxed``: a plan lacks that or more."""
    problem = tables.problem
    missing, stage, cuts = _shortage(tables)
    if not np.isfinite(missing):
        pins = ", ".join(f"{problem.calls[i].path} on stage {s}" for i, s in sorted(problem.pinned.items()))
        return PlanError(f"no split into {problem.num_stages} stages has {pins}; leave every stage at least one call")
    capacity = problem.capacity[stage]
    first, last = problem.calls[cuts[stage]].path, problem.calls[cuts[stage + 1] - 1].path
    where = f"{first} to {last}" if first != last else first
    how = _HOW.get(problem.recompute or "", " even with everything recomputed") if problem.train else ""
    least = "at least " if relaxed else ""
    return CapacityError(
        f"stage {stage} of {problem.num_stages} ({where}) needs {least}{bytes_text(capacity + missing)} of the "
        f"{bytes_text(capacity)} usable on a device{how}: {least}{bytes_text(missing)} too much",
        stage=stage,
        missing_bytes=round(missing),
    )
