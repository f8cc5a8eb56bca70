"""The bare pairwise problem: against brute force, and on public instances."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.iopddl_solver import large, solve
from benchmarks.iopddl_solver.search import AssignmentSearch, conditioned_order
from benchmarks.iopddl_solver.solve import solve_within_memory
from partitioner.solve.pairwise import assignment
from partitioner.solve.pairwise.assignment import (
    AssignmentProblem,
    AssignmentTimeLimitError,
    ResourceConstraint,
    live_rows,
    solve_assignment,
)
from partitioner.solve.pairwise.dynamic_programming import eliminate_nodes
from partitioner.solve.pairwise.live_memory import MemoryConstraint, Usage, build_memory_stretches
from partitioner.solve.pairwise.presolve import InfeasibleAssignmentError, ReducedProblem
from tests.helpers.assignment_problems import brute_force, flat_of, memory_problems, problems
from tests.helpers.paths import ROOT

INSTANCES = ROOT.parent / "shared" / "iopddl"


@settings(max_examples=150)
@given(problems())
def test_optimum_is_that_of_brute_force(problem: AssignmentProblem) -> None:
    expected = brute_force(problem)
    if math.isinf(expected):
        with pytest.raises(InfeasibleAssignmentError):
            solve_assignment(problem)
        return
    answer = solve_assignment(problem)
    assert answer.objective == pytest.approx(expected, rel=1e-6)
    assert problem.objective(answer.choice) == answer.objective
    assert answer.bound == pytest.approx(expected, rel=1e-5)


@settings(max_examples=100)
@given(problems())
def test_presolve_keeps_an_optimum(problem: AssignmentProblem) -> None:
    expected = brute_force(problem)
    reduction = ReducedProblem(problem.costs, problem.edges, [(r.usage, r.limit) for r in problem.rows])
    try:
        reduction.run()
    except InfeasibleAssignmentError:
        assert math.isinf(expected)
        return
    left = reduction.nodes
    choices = itertools.product(*(range(len(reduction.costs[i])) for i in left))
    best = min(problem.objective(reduction.restore(dict(zip(left, c, strict=True)))) for c in choices)
    assert best == pytest.approx(expected)


@settings(max_examples=60)
@given(memory_problems(), st.sampled_from([0, 10**9]))
def test_the_method_for_large_problems_is_bracketed_by_the_optimum(problem: AssignmentProblem, whole: int) -> None:
    expected = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "MANY_ENTRIES", -1)
        patch.setattr(large, "WHOLE_ENTRIES", whole)
        try:
            answer = solve_within_memory(problem, time_limit_s=0.5)
        except (InfeasibleAssignmentError, AssignmentTimeLimitError):
            return
    assert math.isfinite(expected)
    assert answer.bound <= expected * (1 + 1e-9) + 1e-12
    assert expected <= answer.objective * (1 + 1e-9) + 1e-12
    assert problem.objective(answer.choice) == answer.objective
    if problem.memory is not None:
        assert problem.memory.peak(answer.choice) <= problem.memory.limit


@settings(max_examples=60)
@given(memory_problems())
def test_a_large_problem_is_answered_within_its_limit_wherever_that_can_be(problem: AssignmentProblem) -> None:
    problem = replace(problem, rows=())
    expected = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "MANY_ENTRIES", -1)
        if math.isinf(expected):
            with pytest.raises((InfeasibleAssignmentError, AssignmentTimeLimitError)):
                solve_within_memory(problem, time_limit_s=0.2)
            return
        answer = solve_within_memory(problem, time_limit_s=10.0)
    assert answer.objective == pytest.approx(expected, rel=1e-6)
    assert answer.bound <= expected * (1 + 1e-9) + 1e-12


@settings(max_examples=100)
@given(problems(), st.sampled_from([1.0, 4.0, 20.0, 1e6]))
def test_elimination_beside_a_cutset_never_makes_an_assignment_dearer(problem: AssignmentProblem, width: float) -> None:
    flat, _ = flat_of(replace(problem, rows=()))
    choice = flat.best(flat.cost)
    sizes = dict(enumerate(flat.sizes.tolist()))
    near = {i: set(flat.near[i]) for i in sizes}
    order = conditioned_order(sizes, near, width, [1.0] * len(sizes))
    assert len(set(order)) == len(order)
    if width == 1e6:
        assert sorted(order) == list(sizes)
    free = set(order)
    costs = {i: flat.conditional(choice)[flat.start[i] :][: sizes[i]] for i in order}
    tables = []
    for i, j, table in zip(flat.first.tolist(), flat.second.tolist(), flat.tables, strict=True):
        if i in free and j in free:
            tables.append((i, j, table))
            costs[i] = costs[i] - table[:, choice[j]]
            costs[j] = costs[j] - table[choice[i]]
    found = choice.copy()
    for i, p in eliminate_nodes(costs, tables, order)[0].items():
        found[i] = p
    assert flat.total(found) <= flat.total(choice) * (1 + 1e-9)


@settings(max_examples=60)
@given(memory_problems())
def test_flat_costs_and_memory_are_those_of_the_problem(problem: AssignmentProblem) -> None:
    assert problem.memory is not None
    flat, contraction = flat_of(problem)
    found, room, taken = build_memory_stretches(problem.memory, contraction.roots, contraction.maps)
    usage = Usage(found, dict(zip(contraction.nodes, flat.start.tolist(), strict=True)), len(flat.cost), len(room))
    rng = np.random.default_rng(0)
    choice = (rng.random(len(flat.sizes)) * flat.sizes).astype(np.intp)
    full = contraction.choice(dict(zip(contraction.nodes, choice.tolist(), strict=True)))
    profile = usage.profile(flat.start + choice) + taken
    assert problem.memory.peak(full) == pytest.approx(profile.max(initial=0.0))
    cost = AssignmentProblem(problem.costs, problem.edges).objective(full)
    assert flat.total(choice) == pytest.approx(cost) if math.isfinite(cost) else flat.total(choice) >= flat.forbidden
    prices = rng.random(len(room))
    assert usage.priced(prices)[flat.start + choice].sum() == pytest.approx(prices @ usage.profile(flat.start + choice))
    beside = flat.conditional(choice)
    for node in range(len(choice)):
        for p in range(flat.sizes[node]):
            other = choice.copy()
            other[node] = p
            step = beside[flat.start[node] + p] - beside[flat.start[node] + choice[node]]
            assert step == pytest.approx(flat.total(other) - flat.total(choice), abs=1e-9 * flat.forbidden)


def test_the_search_ends_before_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    costs = [rng.random(4) for _ in range(60)]
    edges = [(int(i), int(j), rng.random((4, 4))) for i, j in rng.integers(0, 60, (400, 2)) if i != j]
    memory = MemoryConstraint([(0, 1)] * 60, [rng.random(4) for _ in range(60)], 25.0)
    flat, contraction = flat_of(AssignmentProblem(costs, edges, memory=memory))
    found, room, _ = build_memory_stretches(memory, contraction.roots, contraction.maps)
    usage = Usage(found, dict(zip(contraction.nodes, flat.start.tolist(), strict=True)), len(flat.cost), len(room))
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 0.1 * next(ticks))  # every look at the clock takes as long
    search = AssignmentSearch(flat, usage, room)
    search.run(12.0)
    assert search.steps > 0
    assert 0.1 * next(ticks) <= 12.5
    assert search.overflow == 0.0


def test_a_tree_is_solved_by_presolve_alone() -> None:
    rng = np.random.default_rng(0)
    edges = [(int(rng.integers(0, i)), i, rng.random((6, 6))) for i in range(1, 200)]
    answer = solve_assignment(AssignmentProblem([rng.random(6) for _ in range(200)], edges))
    assert answer.num_variables == 0
    assert answer.gap < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_dynamic_programming_and_mixed_integer_programming_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    costs = [rng.random(4) for _ in range(20)]
    grid = [(i, i + step) for i in range(20) for step in (1, 5) if i + step < 20 and (step == 5 or (i + 1) % 5)]
    tables = [(i, j, np.where(rng.random((4, 4)) < 0.2, math.inf, rng.random((4, 4)))) for i, j in grid]
    problem = AssignmentProblem(costs, tables)
    narrow = solve_assignment(problem)
    assert narrow.num_variables == 0
    monkeypatch.setattr(assignment, "QUICK_WORK", 0)
    monkeypatch.setattr(assignment, "MOST_WORK", 0)
    monkeypatch.setattr(assignment, "_fix_wide_components", lambda *_: ({}, -np.inf, np.inf))
    wide = solve_assignment(problem)
    assert wide.num_variables > 0
    assert wide.objective == pytest.approx(narrow.objective, rel=1e-6)


def test_a_shared_resource_couples_nodes_without_edges() -> None:
    costs = [np.array([0.0, 3.0]), np.array([0.0, 2.0])]
    usage = {0: np.array([5.0, 1.0]), 1: np.array([5.0, 1.0])}
    answer = solve_assignment(AssignmentProblem(costs, [], [ResourceConstraint(usage, 6.0)]))
    assert (answer.choice, answer.objective) == ([0, 1], 2.0)


def test_live_rows_are_the_maximal_live_sets_that_may_exceed_the_limit() -> None:
    usages = [np.array([1.0, 4.0]), np.ones(1), 2 * np.ones(1), np.ones(1)]
    intervals = [(0, 3), (1, 2), (2, 5), (4, 4)]
    assert [sorted(row.usage) for row in live_rows(intervals, usages, 4.0)] == [[0, 1], [0, 2]]
    assert [sorted(row.usage) for row in live_rows(intervals, usages, 5.0)] == [[0, 2]]


def test_infeasible_names_its_nodes() -> None:
    closed = np.array([[0.0, math.inf], [math.inf, 0.0]])
    with pytest.raises(InfeasibleAssignmentError) as error:
        solve_assignment(AssignmentProblem([np.array([0.0, math.inf]), np.array([math.inf, 0.0])], [(0, 1, closed)]))
    assert error.value.nodes


def test_a_table_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"edge \(0, 1\) needs a table of shape \(2, 3\)"):
        AssignmentProblem([np.zeros(2), np.zeros(3)], [(0, 1, np.zeros((3, 2)))])


def load_instance(name: str) -> AssignmentProblem:
    """An instance of the ASPLOS 2025 contest on intra-operator parallelism; costs of 1e18 mean forbidden."""
    data = json.loads(gzip.decompress((INSTANCES / f"{name}.json.gz").read_bytes()))["problem"]

    def numbers(values: list[float]) -> np.ndarray:
        array = np.array(values, float)
        return np.where(array >= 1e18, math.inf, array)

    nodes, edges = data["nodes"], data["edges"]
    costs = [numbers(c) for c in nodes["costs"]]
    tables = [
        (i, j, numbers(c).reshape(len(costs[i]), len(costs[j])))
        for (i, j), c in zip(edges["nodes"], edges["costs"], strict=True)
    ]
    usages = [np.array(u, float) for u in nodes["usages"]]
    return AssignmentProblem(
        costs, tables, live_rows([tuple(i) for i in nodes["intervals"]], usages, data["usage_limit"])
    )


@pytest.mark.parametrize("name", ["G", "B"])
def test_public_instance_is_solved_to_its_known_optimum(name: str) -> None:
    if not INSTANCES.is_dir():
        pytest.skip(f"the public instances are not at {INSTANCES}")
    with (INSTANCES / "best_known.csv").open() as file:
        best = {row["instance"]: float(row["best_contest_cost"]) for row in csv.DictReader(file)}
    answer = solve_assignment(load_instance(name), time_limit_s=120)
    assert answer.objective == best[name]
    assert answer.gap <= 1e-6
