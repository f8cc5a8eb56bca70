"""Cut calls into stages for the shortest step, of which the pipeline is only a part.

A stage solver minimises the pipeline time. The reductions and the optimizer's update after the pipeline depend on the
cuts too, so cuts with a longer pipeline may give a shorter step. Runs of calls with at least as much work after the
pipeline as the cuts found are therefore barred, and the solver is called again, until the pipeline alone takes as long
as the best step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from partitioner.errors import PlanError
from partitioner.schedules.formulas import is_formula
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.split import NoneLeft, StageSplit
from partitioner.solve.stages.tables import Table, min_max

_ROUNDS, _ROUNDS_FOLLOWED = 24, 8  # of cuts; of those that a schedule has to be followed for

_ROUNDING = 1e-12

Priced = TypeVar("Priced")


@dataclass(frozen=True)
class PricedSplit(Generic[Priced]):
    """Stages, the seconds of their step and what came with these; ``lower_bound_s``: what no cuts go below, if that is
    below what was asked."""

    split: StageSplit
    step_s: float
    priced: Priced
    lower_bound_s: float


def cut_for_step(
    problem: StageProblem,
    solve: Callable[[StageProblem], StageSplit],
    price: Callable[[StageSplit], tuple[float, Priced]],
    least_tail_s: float,
    run_tails: Callable[[float], Sequence[Table]],
    cutoff_s: float = np.inf,
) -> PricedSplit[Priced]:
    """The stages of the least step.

    Args:
        solve: the stages of the least pipeline; raises :class:`PlanError` where there are none.
        price: seconds of a step with some stages.
        least_tail_s: what follows the pipeline at least, wherever calls are cut.
        run_tails: the same by stage and run of calls; of runs that alone take a step longer than so many seconds
            infinite.
        cutoff_s: steps that take as long as that are of no interest.

    Raises as ``solve`` and ``price`` do for the least pipeline.
    """
    split = solve(problem)
    step, priced = price(split)
    best = split, step, priced
    pipeline, least = split.lower_bound_s, np.inf
    if problem.num_stages == 1:
        return PricedSplit(*best, step)
    if pipeline + least_tail_s >= min(cutoff_s, step) * (1 - _ROUNDING):
        return PricedSplit(*best, min(step, pipeline + least_tail_s))
    tails = run_tails(min(cutoff_s, step))
    lowest = max(least_tail_s, min_max(list(tails))[0])
    rounds = _ROUNDS if is_formula(problem.schedule) else _ROUNDS_FOLLOWED
    for left in range(rounds, -1, -1):
        if pipeline + lowest >= min(cutoff_s, best[1]) * (1 - _ROUNDING) or not left:
            least = min(least, pipeline + lowest)
            break
        behind = max(_list_stage_tails(tails, split))
        least = min(least, pipeline + max(behind, lowest))  # of the cuts that are barred now
        if behind <= lowest * (1 + _ROUNDING):
            break
        barred = tuple(tail >= behind * (1 - _ROUNDING) for tail in tails)
        try:
            split = solve(replace(problem, barred=barred))
        except NoneLeft:
            break
        except PlanError:  # some may fit that were not found
            least = min(least, pipeline + lowest)
            break
        pipeline = max(pipeline, split.lower_bound_s)
        try:
            step, priced = price(split)
        except PlanError:
            continue
        if step < best[1]:
            best = split, step, priced
    return PricedSplit(*best, min(least, best[1], cutoff_s))


def _list_stage_tails(tails: Sequence[Table], split: StageSplit) -> list[float]:
    """What follows the pipeline at least, by stage."""
    stages = split.virtual or split.stages
    return [float(tail[stage.start, stage.stop]) for tail, stage in zip(tails, stages, strict=True)]


__all__ = ["PricedSplit", "cut_for_step"]
