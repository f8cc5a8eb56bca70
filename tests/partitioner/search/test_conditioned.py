"""Assignments made better while some nodes keep their choices, and what is settled for where nothing else is quick."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.solve.pairwise import assignment, improve
from partitioner.solve.pairwise.assignment import Assignment, AssignmentProblem, solve_assignment
from partitioner.solve.pairwise.improve import improve_assignment


def grid(seed: int, side: int, choices: int, forbidden: float = 0.0) -> AssignmentProblem:
    """Nodes of a square grid with a table between neighbours: wide as soon as the square is."""
    rng = np.random.default_rng(seed)
    number = {(x, y): x * side + y for x in range(side) for y in range(side)}
    costs = [rng.random(choices) for _ in number]
    edges = []
    for (x, y), node in number.items():
        for other in ((x + 1, y), (x, y + 1)):
            if other in number:
                table = rng.random((choices, choices)) * 2
                banned = rng.random(table.shape) < forbidden
                banned[0, 0] = False  # of all nodes the first choice is allowed
                edges.append((node, number[other], np.where(banned, np.inf, table)))
    return AssignmentProblem(costs, edges)


def parts(problem: AssignmentProblem):
    return dict(enumerate(problem.costs)), {(i, j): table for i, j, table in problem.edges}


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 3), st.sampled_from([0.0, 0.3]))
def test_it_is_never_worse_and_what_is_narrow_is_optimal(seed: int, side: int, choices: int, forbidden: float):
    problem = grid(seed, side, choices, forbidden)
    first = dict.fromkeys(range(side * side), 0)
    best = solve_assignment(problem).objective
    found = improve_assignment(*parts(problem), first, time.perf_counter() + 10)
    reached = problem.objective([found[i] for i in range(side * side)])
    assert reached == pytest.approx(best)  # no table is too large
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(improve, "_ENTRIES", choices**2)  # chains alone are narrow
        found = improve_assignment(*parts(problem), first, time.perf_counter() + 10)
    near = problem.objective([found[i] for i in range(side * side)])
    assert best - 1e-9 <= near <= problem.objective([0] * side**2)


def test_nodes_that_kept_their_choices_change_in_another_turn():
    problem = grid(3, 6, 3)
    first = dict.fromkeys(range(36), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(improve, "_ENTRIES", 9)
        found = improve_assignment(*parts(problem), first, time.perf_counter() + 10)
    changed = sum(found[i] != 0 for i in first)
    assert changed > 36 / 2
    best = solve_assignment(problem).objective
    assert problem.objective([found[i] for i in first]) <= 1.1 * best


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3]))
def test_what_is_settled_for_is_allowed_and_has_a_bound(seed: int, forbidden: float):
    problem = grid(seed, 5, 3, forbidden)
    best = solve_assignment(problem).objective
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "QUICK_WORK", 1)
        patch.setattr(assignment, "MOST_WORK", 8)  # nothing is narrow
        answer = solve_assignment(problem, settle=True, most_variables=0)  # and HiGHS is not tried
    assert answer.bound <= best * (1 + 1e-9)
    assert best - 1e-9 <= answer.objective <= 1.2 * best
    assert answer.bound >= 0.7 * best


def solve_widely(problem: AssignmentProblem, **options: Any) -> tuple[Assignment, list[int]]:
    """The answer where no component is narrow, and the numbers of variables of the programs that HiGHS solved."""
    tried: list[int] = []
    solve = assignment._MixedIntegerProgram.solve

    def counted(program: Any, *arguments: Any) -> float:
        tried.append(program.num_variables)
        return solve(program, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "QUICK_WORK", 1)
        patch.setattr(assignment, "MOST_WORK", 8)
        patch.setattr(assignment._MixedIntegerProgram, "solve", counted)
        return solve_assignment(problem, settle=True, **options), tried


def frustrated(seed: int, offset: float) -> AssignmentProblem:
    """A grid on which the dual ascent leaves a gap. ``offset``: what each node costs beside."""
    problem = grid(seed, 6, 4)
    return replace(problem, costs=[cost + offset for cost in problem.costs])


def test_a_slow_program_is_not_solved_for_a_small_part_of_the_cost():
    tried = 0
    for seed in range(6):
        problem = frustrated(seed, 1000.0)
        best, programs = solve_widely(problem)
        near, none = solve_widely(problem, slow_variables=0)
        assert none == []
        assert near.objective <= best.objective * (1 + 5e-4)
        assert near.bound <= best.objective * (1 + 1e-9)
        tried += len(programs)
    assert tried  # something was left to solve
    assert any(solve_widely(frustrated(seed, 0.0), slow_variables=0)[1] for seed in range(6))  # the gap is a large part


def test_what_the_solver_has_when_its_time_ends_is_not_kept_if_it_is_worse(monkeypatch: pytest.MonkeyPatch):
    def end_early(program: Any, limit: float, gap: float, choice: dict[int, int]) -> float:
        choice.update(dict.fromkeys(program.nodes, 0))  # allowed, and expensive
        ended.append(program)
        return 0.0

    ended: list[Any] = []
    monkeypatch.setattr(assignment._MixedIntegerProgram, "solve", end_early)
    for seed in range(6):
        problem = frustrated(seed, 0.0)
        answer, _ = solve_widely(problem)
        known, _ = solve_widely(problem, most_variables=0)
        assert answer.objective <= 1.1 * known.objective
    assert ended
