"""Schedules of several virtual stages for the plan that the search has found: same mesh, same microbatches.

The search and its bounds are those of schedules with one stage on each rank. Which other fills the pipeline that it has
found best is then tried: there are few, and each is followed action by action. Where devices are alike, ranks stay
where they are; elsewhere they are placed anew.
"""

from __future__ import annotations

from partitioner.constraints import Constraints
from partitioner.evaluate import Evaluator, Solved
from partitioner.plan import Candidate, Certificate
from partitioner.solve.bestfirst import Evaluated, candidate, refused
from partitioner.solve.points import Space, points_beside
from passes.errors import PartitionError

LEAST_GAIN = 0.01  # of the step: less is not worth more of the schedule


def asks_for(constraints: Constraints) -> bool:
    """Whether the constraints leave the schedule open, and do not have all of them searched."""
    return constraints.schedule is None and constraints.virtual_stages is None and not constraints.ahead


def best_schedule(
    space: Space, evaluator: Evaluator, found: Solved, certificate: Certificate
) -> tuple[Solved, Certificate]:
    """``found``, or the same under the schedule that takes least; and the certificate, with what was tried."""
    if not (space.train and found.point.pp > 1 and asks_for(space.constraints)):
        return found, certificate
    best, rows = found, []
    devices = found.devices if evaluator.placements.nested(found.point.grid) else None
    for point in points_beside(space, found.point):
        try:
            solved = evaluator.solve(point, devices)
        except PartitionError as error:
            rows.append(refused(point, error))
            continue
        told = evaluated(solved)
        rows.append(candidate(point, told).model_copy(update={"bound": told.least}))
        if told.step_time < min(best.estimate.step_time, found.estimate.step_time * (1 - LEAST_GAIN)):
            best = solved
    return best, _with(certificate, rows, best, found)


def evaluated(solved: Solved) -> Evaluated:
    """What the search asks of a solved candidate."""
    estimate, split = solved.estimate, solved.stages
    least = estimate.step_time - (split.pipeline_s - split.least_s)
    memory = max(estimate.memory)
    return Evaluated(estimate.step_time, memory, solved, least, estimate.breakdown)


def _with(certificate: Certificate, rows: list[Candidate], best: Solved, found: Solved) -> Certificate:
    """The rows come behind those of the search; the bound is that of the schedule that is used."""
    if best is found:
        return certificate.model_copy(update={"candidates": (*certificate.candidates, *rows)})
    step = best.estimate.step_time
    solved = [c.model_copy(update={"status": "solved"}) if c.status == "chosen" else c for c in certificate.candidates]
    name, chunks = str(best.point.schedule), best.point.virtual_stages
    rows = [
        row.model_copy(update={"status": "chosen"}) if (row.schedule, row.virtual_stages) == (name, chunks) else row
        for row in rows
    ]
    bound = min([certificate.bound, *(row.bound for row in rows if row.status == "chosen")])
    gap = (step - bound) / step if step else 0.0
    return certificate.model_copy(
        update={"objective": step, "bound": bound, "gap": gap, "candidates": (*solved, *rows)}
    )
