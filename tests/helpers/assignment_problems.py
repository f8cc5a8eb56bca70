"""Random assignment problems, with limits of memory too, and their optima by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from benchmarks.iopddl_solver.contract import Contraction
from benchmarks.iopddl_solver.state import FlatProblem
from partitioner.solve.pairwise.assignment import (
    AssignmentProblem,
    live_rows,
)
from partitioner.solve.pairwise.live_memory import MemoryConstraint
from partitioner.solve.pairwise.presolve import InfeasibleAssignmentError


def brute_force(problem: AssignmentProblem) -> float:
    return min(problem.objective(c) for c in itertools.product(*(range(len(c)) for c in problem.costs)))


@st.composite
def problems(draw: st.DrawFn) -> AssignmentProblem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 7))
    unit = draw(st.sampled_from([1.0, 1e-6, 1e6]))  # the scale of costs must not matter
    forbidden = draw(st.sampled_from([0.0, 0.2, 0.6]))

    def numbers(*shape: int) -> np.ndarray:
        values = rng.integers(0, 9, shape) * unit
        return np.where(rng.random(shape) < forbidden, math.inf, values)

    sizes = rng.integers(1, 5, count)
    edges = [
        (i, j, numbers(sizes[i], sizes[j]))
        for i, j in itertools.product(range(count), repeat=2)
        if rng.random() < draw(st.sampled_from([0.2, 0.5]))
    ]
    rows = []
    if draw(st.booleans()):
        usages = [rng.integers(0, 6, size).astype(float) for size in sizes]
        starts = rng.integers(0, 6, count)
        intervals = [(int(s), int(s + n)) for s, n in zip(starts, rng.integers(0, 5, count), strict=True)]
        rows = live_rows(intervals, usages, float(rng.integers(2, 12)))
    return AssignmentProblem([np.where(np.isinf(c), 0.0, c) for c in map(numbers, sizes)], edges, rows)


@st.composite
def memory_problems(draw: st.DrawFn) -> AssignmentProblem:
    problem = draw(problems())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    usages = [rng.integers(0, 6, len(c)).astype(float) for c in problem.costs]
    starts, lengths = rng.integers(0, 6, len(usages)), rng.integers(0, 5, len(usages))
    intervals = [(int(s), int(s + n)) for s, n in zip(starts, lengths, strict=True)]
    return AssignmentProblem(
        problem.costs, problem.edges, memory=MemoryConstraint(intervals, usages, float(rng.integers(6, 14)))
    )


def flat_of(problem: AssignmentProblem) -> tuple[FlatProblem, Contraction]:
    try:
        contraction = Contraction(problem.costs, problem.edges)
    except InfeasibleAssignmentError:
        reject()
    return FlatProblem(contraction.nodes, contraction.costs, contraction.tables), contraction
