"""What is fixed by bounds keeps an optimum; wide problems are solved to it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from partitioner.solve.pairwise import assignment
from partitioner.solve.pairwise.assignment import AssignmentProblem, AssignmentTimeLimitError, solve_assignment
from partitioner.solve.pairwise.dual_bound import Reparametrization, find_remaining_choices


def problem(seed: int, num_nodes: int, most: int, forbidden: float) -> AssignmentProblem:
    """All pairs of nodes have a table; some choices of two nodes exclude each other, the first ones never."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, num_nodes)
    costs = [rng.random(n) * 5 for n in sizes]
    edges = []
    for i in range(num_nodes):
        for j in range(i + 1, num_nodes):
            table = rng.random((sizes[i], sizes[j])) * 3
            table[rng.random(table.shape) < forbidden] = np.inf
            table[0, 0] = 2.0
            edges.append((i, j, table))
    return AssignmentProblem(costs, edges)


def optima(given: AssignmentProblem) -> tuple[float, list[tuple[int, ...]]]:
    every = {c: given.objective(list(c)) for c in product(*(range(len(c)) for c in given.costs))}
    least = min(every.values())
    return least, [c for c, cost in every.items() if cost <= least * (1 + 1e-12)]


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4), st.sampled_from([0.0, 0.2, 0.6]))
@example(66564, 5, 4, 0.2)  # the first assignments that are looked at are all forbidden
def test_an_optimum_is_kept_and_the_bound_is_one(seed: int, nodes: int, most: int, forbidden: float):
    given_problem = problem(seed, nodes, most, forbidden)
    least, best = optima(given_problem)
    costs = dict(enumerate(given_problem.costs))
    tables = {(i, j): t for i, j, t in given_problem.edges}
    masks = find_remaining_choices(costs, tables).masks
    assert any(all(masks[i][k] for i, k in enumerate(choice)) for choice in best)
    dual = Reparametrization(costs, tables)
    before = dual.bound
    for sweep in range(8):
        dual.sweep(forward=sweep % 2 == 0)
        assert dual.bound <= least * (1 + 1e-9)
    assert dual.bound >= before - 1e-9
    for choice in best[:2]:
        assert dual.cost(dict(enumerate(choice))) == pytest.approx(least)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3]))
def test_wide_problems_are_solved_to_the_optimum(seed: int, forbidden: float):
    given_problem = problem(seed, 5, 4, forbidden)
    least, _ = optima(given_problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "QUICK_WORK", 1)
        patch.setattr(assignment, "MOST_WORK", 8)  # nothing of two choices and more is narrow
        answer = solve_assignment(given_problem)
    assert answer.objective == pytest.approx(least)
    assert answer.bound == pytest.approx(least)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3]))
def test_without_time_the_answer_is_allowed_and_its_bound_one(seed: int, forbidden: float):
    given_problem = problem(seed, 5, 4, forbidden)
    least, _ = optima(given_problem)

    def too_late(*_: object) -> float:
        raise AssignmentTimeLimitError("no assignment found")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "QUICK_WORK", 1)
        patch.setattr(assignment, "MOST_WORK", 8)
        patch.setattr(assignment._MixedIntegerProgram, "solve", too_late)
        try:
            answer = solve_assignment(given_problem, settle=True)
        except AssignmentTimeLimitError:  # the ascent found none either
            assume(False)
    assert answer.bound <= least * (1 + 1e-9)
    assert answer.objective >= least * (1 - 1e-9)
    assert np.isfinite(answer.objective)
