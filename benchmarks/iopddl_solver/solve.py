"""Solve an assignment problem whose live memory is limited: exactly where it is small, else by search."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.iopddl_solver.large import solve_large
from partitioner.solve.pairwise.assignment import (
    Assignment,
    AssignmentProblem,
    AssignmentTimeLimitError,
    ResourceConstraint,
    solve_assignment,
)
from partitioner.solve.pairwise.presolve import Table, Vector

_EXACT_SHARE = 0.75  # of the time limit, after which a problem without an exact answer is searched

MANY_ENTRIES = 400_000  # of all tables; larger problems are searched without an exact attempt


def solve_within_memory(
    problem: AssignmentProblem, *, time_limit_s: float = 60.0, relative_gap: float = 1e-6
) -> Assignment:
    """Solve ``problem`` with its ``memory`` limit to within ``relative_gap``, or as well as ``time_limit_s`` allows.

    Raises:
        InfeasibleError: no assignment is allowed.
        TimeLimitError: none was found in time.
    """
    start = time.perf_counter()
    memory = problem.memory
    if memory is None or problem.rows:
        return solve_assignment(problem, time_limit_s=time_limit_s, relative_gap=relative_gap)
    if sum(table.size for _, _, table in problem.edges) <= MANY_ENTRIES:
        try:
            return solve_assignment(problem, time_limit_s=_EXACT_SHARE * time_limit_s, relative_gap=relative_gap)
        except AssignmentTimeLimitError:
            pass  # a search finds an assignment where the exact solver has none yet
    choice, bound = solve_large(problem.costs, problem.edges, memory, _solve_part, start + time_limit_s)
    objective = problem.objective(choice)
    if not np.isfinite(objective):
        raise AssignmentTimeLimitError(
            f"no assignment within the memory limit of {memory.limit:g} was found in {time_limit_s:.1f} s "
            f"(the best takes {memory.peak(choice):g}); allow more time or loosen the limit"
        )
    return Assignment(choice, objective, min(bound, objective), time.perf_counter() - start)


def _solve_part(
    costs: list[Vector],
    tables: list[tuple[int, int, Table]],
    rows: list[tuple[dict[int, Vector], float]],
    seconds: float,
) -> tuple[list[int], float] | None:
    """The best choice of a part and its bound; ``None`` where none was found in time."""
    part = AssignmentProblem(costs, tables, [ResourceConstraint(usage, limit) for usage, limit in rows])
    try:
        answer = solve_assignment(part, time_limit_s=seconds)
    except AssignmentTimeLimitError:
        return None
    return answer.choice, answer.bound
