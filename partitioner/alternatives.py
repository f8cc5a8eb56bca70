"""Schedules of several virtual stages on a rank, for the best plans that the search has found.

The search and its bounds are those of schedules with one stage on each rank: bounds of the others are loose where
memory is short, as what a rank holds depends on the order of its actions. Which of them fills the pipelines that were
found best is tried then, for the same mesh and microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from partitioner.evaluate import Solved
from partitioner.plan import Candidate, Certificate
from partitioner.solve.bestfirst import Bounds
from partitioner.solve.point import Point
from partitioner.solve.points import Space, several_stages
from partitioner.solve.rows import Evaluated, bound_and_gap, candidate, refused
from passes.errors import PartitionError

PATIENCE = 200  # meshes and schedules in a row that were no better, where such schedules are searched
_MOST_RUNS = 4e7  # runs of calls on virtual stages, of all points in a row that were no better: half a minute or so
_ROUNDING = 1e-9  # of a step
_BEST, _NEAR = 3, 1.15  # meshes and microbatches, that take no longer than this times the best


def effort(space: Space, point: Point) -> float:
    """What it takes to cut the calls into a point's virtual stages, as a share of what may be in vain."""
    return point.pp * point.virtual_stages * space.num_calls**2 / _MOST_RUNS


def schedules_of_several(space: Space, solved: Mapping[Point, Evaluated], found: Point) -> list[Point]:
    """Points of several virtual stages: of the meshes and microbatches that were best of ``solved``, and would be
    better than ``found`` without the pipeline's bubble."""
    enough = solved[found].step_time
    best: dict[Point, Point] = {}
    for point, known in sorted(solved.items(), key=lambda item: item[1].step_time):
        bubble = (known.breakdown or {}).get("bubble", 0.0)
        near = known.step_time <= _NEAR * solved[found].step_time and known.step_time - bubble < enough
        if point.pp > 1 and near and len(best) < _BEST:
            best.setdefault(replace(point, schedule="", zero=0, dp_shard=0), point)
    return [other for point in best.values() for other in several_stages(space, point)]


def best_schedule(
    evaluate: Callable[[Point], Evaluated],
    attempt: Callable[[Point], Evaluated],
    bounds: Bounds,
    last: Callable[[Point, float], float],
    several: Sequence[Point],
    found: Solved,
    certificate: Certificate,
    deadline: float,
) -> tuple[Solved, Certificate]:
    """``found``, or the best plan of ``several``; and the certificate, with what was tried, until ``deadline`` or
    ``KeyboardInterrupt``.

    ``attempt``: as ``evaluate``, which is asked for the best plan alone, but without a bound of the plan's own;
    ``last``: as :func:`partitioner.solve.bestfirst.search` has it.
    """
    best, rows, cut_off = found, [], certificate.cut_off
    try:
        for point in several:
            enough = best.estimate.step_time * (1 - _ROUNDING)
            if time.monotonic() > deadline:
                cut_off = "time limit"
                break
            least = float(bounds.times([point])[0])
            if least >= enough:
                continue
            try:
                least = max([least, *(bound([point], enough) for bound in bounds.together)])
                if least >= enough:
                    continue
                told = attempt(point)
            except PartitionError as error:
                rows.append(refused(point, error))
                continue
            rows.append(_at_least(candidate(point, told), max(least, 0.0 if told.partly else told.least or 0.0)))
            if told.step_time < enough:
                best = told.payload
    except KeyboardInterrupt:  # the best so far is a plan
        cut_off = "interruption"
    certificate = certificate.model_copy(update={"cut_off": cut_off})
    if best is not found:
        whole = evaluate(best.point)
        proven = last(best.point, whole.step_time) if whole.partly else whole.least_s
        rows = [_at_least(row, proven) if _same(row, candidate(best.point)) else row for row in rows]
    return best, _with(certificate, rows, best, found)


def evaluated(solved: Solved) -> Evaluated:
    """What the search asks of a solved candidate."""
    estimate = solved.estimate
    return Evaluated(estimate.step_time, max(estimate.memory), solved, solved.least_s, estimate.breakdown)


def _with(certificate: Certificate, rows: Sequence[Candidate], best: Solved, found: Solved) -> Certificate:
    """The rows come behind those of the search; the bound is that of the schedules of one stage on each rank, and of
    the plan that is used."""
    if best is found:
        return certificate.model_copy(update={"candidates": (*certificate.candidates, *rows)})
    step, chosen = best.estimate.step_time, candidate(best.point)
    solved = [c.model_copy(update={"status": "solved"}) if c.status == "chosen" else c for c in certificate.candidates]
    rows = [row.model_copy(update={"status": "chosen"}) if _same(row, chosen) else row for row in rows]
    chosen_s = [row.bound for row in rows if row.status == "chosen"]
    bound, gap = bound_and_gap(step, [certificate.bound, *chosen_s])
    return certificate.model_copy(
        update={"objective": step, "bound": bound, "gap": gap, "candidates": (*solved, *rows)}
    )


def _at_least(row: Candidate, seconds: float) -> Candidate:
    assert row.step_time is not None, row
    return row.model_copy(update={"bound": min(max(row.bound, seconds), row.step_time)})


def _same(row: Candidate, other: Candidate) -> bool:
    """Whether two rows are of one point."""
    names = "mesh", "microbatch_size", "schedule", "virtual_stages", "zero", "dp_shard", "etp"
    return all(getattr(row, name) == getattr(other, name) for name in names)


__all__ = ["PATIENCE", "best_schedule", "effort", "evaluated", "schedules_of_several"]
