"""Cut calls into stages for the shortest training step, of which the pipeline is only a part.

A stage solver minimises the pipeline time. The gradient reductions and the optimizer's update after the pipeline depend
on the cuts too, so cuts with a longer pipeline may give a shorter step. The search therefore calls the solver
repeatedly. Each time it forbids the stages that have at least as much work after the pipeline as the last cuts. It
stops when the least pipeline time plus the least time after the pipeline reaches the best step time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Generic, TypeVar

import numpy as np

from partitioner.errors import PlanError
from partitioner.schedules.formulas import is_formula
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.split import NoneLeft, StageSplit
from partitioner.solve.stages.tables import Table, min_max

_FEW_CUTS = 16  # cuts that are all priced
_ROUNDS, _ROUNDS_FOLLOWED = 24, 8  # most calls of the solver; the same for simulated schedules

_ROUNDING = 1e-12

Priced = TypeVar("Priced")


@dataclass(frozen=True)
class PricedSplit(Generic[Priced]):
    """A cut of the block calls (such as layers) into stages (``split``) with the price of its step.

    ``step_s``: seconds of the step. ``priced``: the second result of the caller's price function for this cut.
    ``lower_bound_s``: lower bound in seconds on the step over all cuts, at most ``step_s`` and at most the cutoff of
    the search.
    """

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
    first: StageSplit | None = None,
) -> PricedSplit[Priced]:
    """Return the cut into stages with the shortest step, with a lower bound on the step over all cuts.

    - ``problem``: the calls and stages. ``solve``: returns the cut with the shortest pipeline; raises
      :class:`PlanError` if there is none. ``first``: the result of ``solve(problem)``, if it is known. ``price``:
      returns the seconds of a step with a cut, and any further result, which is returned as ``priced``.
    - ``least_tail_s``: lower bound for any cut on the seconds after the pipeline, in which gradients are reduced and
      parameters updated. ``run_tails``: function from a step time in seconds to a table for each stage. The entry
      ``[start, stop]`` of a table is the seconds after the pipeline if the stage has the calls ``start:stop``; it is
      infinite if this stage alone makes the step longer than the step time.
    - ``cutoff_s``: steps that take at least this many seconds are of no use to the caller.

    If there are few cuts, each is priced. Raises the errors of ``solve`` and ``price`` for the cut with the shortest
    pipeline.
    """
    split = solve(problem) if first is None else first
    step, priced = price(split)
    if _has_few_cuts(problem) and split.lower_bound_s + least_tail_s < min(cutoff_s, step) * (1 - _ROUNDING):
        shortest, tails = PricedSplit(split, step, priced, 0.0), run_tails(min(cutoff_s, step))
        return _price_all_cuts(problem, solve, price, tails, shortest, cutoff_s)
    best = split, step, priced
    pipeline, least = split.lower_bound_s, np.inf
    if problem.num_stages == 1:
        return PricedSplit(*best, step)
    if pipeline + least_tail_s >= min(cutoff_s, step) * (1 - _ROUNDING):
        return PricedSplit(*best, min(step, pipeline + least_tail_s))
    tails = run_tails(min(cutoff_s, step))
    lowest = max(least_tail_s, min_max(list(tails))[0])
    formula = is_formula(problem.schedule, problem.num_stages // problem.chunks, problem.train)
    rounds = _ROUNDS if formula else _ROUNDS_FOLLOWED
    for left in range(rounds, -1, -1):
        if pipeline + lowest >= min(cutoff_s, best[1]) * (1 - _ROUNDING) or not left:
            least = min(least, pipeline + lowest)
            break
        behind = max(_list_stage_tails(tails, split))
        least = min(least, pipeline + max(behind, lowest))  # holds for the cuts that are forbidden from now on
        if behind <= lowest * (1 + _ROUNDING):
            break
        barred = tuple(tail >= behind * (1 - _ROUNDING) for tail in tails)
        try:
            split = solve(replace(problem, barred=barred))
        except NoneLeft:
            break
        except PlanError:  # cuts may fit that were not found
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


def _has_few_cuts(problem: StageProblem) -> bool:
    """Return whether there are so few cuts of ``problem`` into stages that all are priced. This requires that each rank
    has one stage and that no stages are forbidden or may be empty."""
    free = not problem.barred and not problem.may_be_empty and problem.chunks == 1
    return free and 1 < math.comb(len(problem.calls) - 1, problem.num_stages - 1) <= _FEW_CUTS


def _price_all_cuts(
    problem: StageProblem,
    solve: Callable[[StageProblem], StageSplit],
    price: Callable[[StageSplit], tuple[float, Priced]],
    tails: Sequence[Table],
    best: PricedSplit[Priced],
    cutoff_s: float,
) -> PricedSplit[Priced]:
    """Return the cut into stages with the shortest step, with a lower bound on the step over all cuts. ``problem``: the
    calls and stages. ``solve``: returns the cut with the shortest pipeline. ``price``: returns the seconds of a step
    with a cut, and any further result. ``tails``: for each stage, a table of seconds after the pipeline, whose entry
    ``[start, stop]`` is for the block calls ``start:stop`` (such as layers). ``best``: the cut with the shortest
    pipeline. ``cutoff_s``: steps of at least this many seconds are of no use.

    If nothing is recomputed, the bound of a cut is its step time. Otherwise another recomputation may give a shorter
    step, and the bound is the least pipeline time of the cut plus the longest of its tails.
    """
    size, stages, first = len(problem.calls) + 1, problem.num_stages, best
    least = np.inf
    for inner in combinations(range(1, size - 1), stages - 1):
        if any(bisect_right(inner, call) != stage for call, stage in problem.pinned.items()):
            continue
        runs = list(pairwise((0, *inner, size - 1)))
        barred = [np.ones((size, size), dtype=np.bool_) for _ in range(stages)]
        for table, (start, stop) in zip(barred, runs, strict=True):
            table[start, stop] = False
        split, step, priced = first.split, first.step_s, first.priced
        try:
            if _is_recomputed(split) or [(stage.start, stage.stop) for stage in split.stages] != runs:
                split = solve(replace(problem, barred=tuple(barred)))
                step, priced = price(split)
        except NoneLeft:
            continue
        except PlanError:  # this cut may fit with a recomputation that was not found
            least = min(least, first.split.lower_bound_s + min_max(list(tails))[0])
            continue
        behind = max(_list_stage_tails(tails, split))
        least = min(least, split.lower_bound_s + behind if _is_recomputed(split) else step)
        if step < best.step_s:
            best = PricedSplit(split, step, priced, 0.0)
    return replace(best, lower_bound_s=min(least, best.step_s, cutoff_s))


def _is_recomputed(split: StageSplit) -> bool:
    """Return whether any stage of ``split`` recomputes activations."""
    return any(stage.recompute or stage.selective for stage in split.virtual or split.stages)


def _list_stage_tails(tails: Sequence[Table], split: StageSplit) -> list[float]:
    """Return, for each stage of ``split``, a lower bound on the seconds that it works after the pipeline (gradient
    reduction and update). ``tails``: for each stage, a table of these bounds, whose entry ``[start, stop]`` is for the
    block calls (such as layers) ``start:stop``.
    """
    stages = split.virtual or split.stages
    return [float(tail[stage.start, stage.stop]) for tail, stage in zip(tails, stages, strict=True)]


__all__ = ["PricedSplit", "cut_for_step"]
