"""Search the meshes, microbatches and schedules for a job, best bound first."""

from __future__ import annotations

from collections.abc import Callable

from partitioner.cost.bounds import ModelBounds
from partitioner.errors import CapacityError, PlanError
from partitioner.evaluate import Evaluator, Job, Solved
from partitioner.plan import Certificate
from partitioner.solve.bestfirst import Evaluated, Progress, search
from partitioner.solve.points import Point, Space, baselines, left_out, points


def explore(job: Job, progress: Callable[[Progress], None] | None = None) -> tuple[Solved, Certificate]:
    """The best plan of all candidates, and the certificate.

    Raises :class:`CapacityError` where none fits in memory, :class:`PlanError` or :class:`ConstraintError` where there
    is none for other reasons.
    """
    evaluator = Evaluator(job)
    bounds = ModelBounds(job, evaluator.placements)
    length = max((i.spec.shape[1] for i in job.model.inputs if len(i.spec.shape) > 1), default=0)
    space = Space(
        job.topology,
        job.global_batch,
        bounds.num_calls,
        bounds.dims,
        job.constraints,
        job.train,
        experts=job.num_experts,
        length=length,
    )
    candidates = points(space)
    first = dict(zip(candidates, bounds.times(candidates).tolist(), strict=True))

    def fits(point: Point) -> bool:
        try:
            bounds.refine(point)
        except (CapacityError, PlanError):
            return False
        return True

    def evaluate(point: Point) -> Evaluated:
        solved = evaluator.solve(point)
        estimate, split = solved.estimate, solved.stages
        least = estimate.step_time - (split.pipeline_s - split.least_s)
        if not evaluator.placements.complete(point.grid):  # others may be better than those that were tried
            least = min(least, bounds.refine(point))
        # a floor for other points only where none of their seats can be better than this one's
        floor = split.microbatch_s if evaluator.alike(point.tp) else None
        return Evaluated(estimate.step_time, max(estimate.memory), solved, floor, least)

    always = baselines(space, candidates, first.__getitem__, fits)
    result = search(
        candidates,
        bounds,
        evaluate,
        always=always.values(),
        left_out=left_out(space, candidates),
        progress=progress,
    )
    return result.best.payload, result.certificate
