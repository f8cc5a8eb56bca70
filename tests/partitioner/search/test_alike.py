"""Problems in which nodes in equal surroundings share a choice: unrolled loops, whose turns differ in costs alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.solve.pairwise import assignment
from partitioner.solve.pairwise.alike import merge_alike_nodes
from partitioner.solve.pairwise.assignment import AssignmentProblem, solve_assignment

BODY = ((0, 1), (1, 2), (0, 2))  # edges of one turn of a loop


def unrolled(seed: int, turns: int, choices: int, spread: float = 0.1) -> AssignmentProblem:
    """A loop of ``turns`` turns of three nodes, each joined to the same nodes of the next turn. The costs of a turn
    differ from those of the others by at most the fraction ``spread``. Each table forbids the same pairs."""
    rng = np.random.default_rng(seed)
    body = [rng.random(choices) + 0.1 for _ in range(3)]
    inner = [rng.random((choices, choices)) + 0.1 for _ in BODY]
    onward = [np.where(np.eye(choices) > 0, 0.0, rng.random((choices, choices)) + 0.1) for _ in range(3)]
    costs, edges = [], []
    for turn in range(turns):
        factor = 1 + spread * rng.random()
        costs += [factor * cost for cost in body]
        for (i, j), table in zip(BODY, inner, strict=True):
            edges.append((3 * turn + i, 3 * turn + j, factor * np.where(np.tri(choices) > 0, table, np.inf)))
        if turn:
            edges += [(3 * turn - 3 + i, 3 * turn + i, factor * table) for i, table in enumerate(onward)]
    return AssignmentProblem(costs, edges)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 3))
def test_an_assignment_costs_the_same_in_both_problems(seed: int, turns: int, choices: int):
    problem = unrolled(seed, turns, choices)
    merged = merge_alike_nodes(problem.costs, problem.edges)
    smaller = AssignmentProblem(merged.costs, merged.edges)
    found = solve_assignment(smaller)
    assert problem.objective(merged.restore(found.choice)) == pytest.approx(found.objective)
    assert found.objective >= solve_assignment(problem).objective * (1 - 1e-9)


def test_the_turns_of_a_loop_are_merged_and_its_nodes_are_not():
    problem = unrolled(0, 40, 3)
    merged = merge_alike_nodes(problem.costs, problem.edges)
    assert merged.merged_of == [0, 1, 2] * 40
    for node, cost in enumerate(merged.costs):  # a change of layout between turns costs nothing if there is none
        assert cost == pytest.approx(np.sum(problem.costs[node::3], axis=0))


def test_nodes_with_other_choices_are_not_merged():
    costs = [np.array([0.0, 1.0]), np.array([1.0, 0.0]), np.array([0.0, np.inf]), np.array([0.0, 1.0, 2.0])]
    assert merge_alike_nodes(costs, []).merged_of == [0, 0, 1, 2]


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.1]))
def test_a_large_problem_is_solved_by_the_merged_one_if_that_is_near_the_bound(seed: int, spread: float):
    problem = unrolled(seed, 20, 3, spread)
    best = solve_assignment(problem).objective
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "QUICK_WORK", 1)  # nothing is narrow at first
        answer = solve_assignment(problem, settle=True, most_variables=0)
    assert best * (1 - 1e-9) <= answer.objective <= best * (1 + 0.005)
    assert answer.bound <= best * (1 + 1e-9)
