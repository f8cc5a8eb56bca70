"""What the search of large assignment problems is made of: beliefs, prices, descent, parts, and a second process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import partitioner
from benchmarks.iopddl_solver import large, solve
from benchmarks.iopddl_solver.beliefs import BeliefPropagation, Prices
from benchmarks.iopddl_solver.moves import Exact, NeighbourhoodSearch, Regions
from benchmarks.iopddl_solver.solve import solve_within_memory
from benchmarks.iopddl_solver.state import FlatProblem, LocalSearchState
from partitioner.background import Finding, FindingSlot, ForkedWorker, can_help
from partitioner.solve.pairwise.assignment import (
    AssignmentProblem,
    AssignmentTimeLimitError,
    ResourceConstraint,
    solve_assignment,
)
from partitioner.solve.pairwise.live_memory import MemoryConstraint, Usage, build_memory_stretches
from partitioner.solve.pairwise.presolve import InfeasibleAssignmentError
from tests.helpers.assignment_problems import brute_force, flat_of, memory_problems
from tests.helpers.paths import ROOT

seeds = st.integers(0, 2**32 - 1)


def random_graph(seed: int, nodes: int, edges: int) -> FlatProblem:
    rng = np.random.default_rng(seed)
    costs = [rng.random(rng.integers(1, 5)) for _ in range(nodes)]
    pairs = {tuple(sorted(pair)) for pair in rng.integers(0, nodes, (edges, 2)).tolist() if pair[0] != pair[1]}
    tables = {(i, j): rng.random((len(costs[i]), len(costs[j]))) for i, j in sorted(pairs)}
    return FlatProblem(range(nodes), costs, tables)


@settings(max_examples=40)
@given(seeds, st.integers(2, 7))
def test_beliefs_on_a_tree_are_what_each_choice_costs_all_in_all(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    costs = [rng.random(rng.integers(1, 4)) for _ in range(count)]
    edges = [(int(rng.integers(0, i)), i) for i in range(1, count)]
    tables = {(i, j): rng.random((len(costs[i]), len(costs[j]))) for i, j in edges}
    flat = FlatProblem(range(count), costs, tables)
    beliefs = BeliefPropagation(flat)
    for _ in range(count + 1):
        believed = beliefs.propagate(flat.cost, 0.0)
    problem = AssignmentProblem(costs, [(i, j, t) for (i, j), t in tables.items()])
    for node, (start, size) in enumerate(zip(flat.start, flat.sizes, strict=True)):
        least = []
        for p in range(size):
            only = [np.where(np.arange(size) == p, c, math.inf) if i == node else c for i, c in enumerate(costs)]
            least.append(brute_force(replace(problem, costs=only)))
        found = believed[start : start + size]
        assert found - found.min() == pytest.approx(np.array(least) - min(least), abs=1e-5)


def test_beliefs_that_are_all_forgotten_are_the_costs_themselves() -> None:
    flat = random_graph(0, 20, 40)
    beliefs = BeliefPropagation(flat)
    beliefs.propagate(flat.cost, 0.5)
    assert not np.array_equal(beliefs.propagate(flat.cost, 0.5), flat.cost)
    beliefs.forget(1.0, np.random.default_rng(0))
    assert np.array_equal(beliefs.propagate(flat.cost, 0.5), flat.cost)


@settings(max_examples=60)
@given(seeds, st.integers(1, 30))
def test_a_descent_ends_where_no_single_node_gains(seed: int, count: int) -> None:
    flat = random_graph(seed, count, 2 * count)
    rng = np.random.default_rng(seed)
    extra = rng.random(len(flat.cost))
    before = (rng.random(count) * flat.sizes).astype(np.intp)
    after = flat.descend(before, extra, rounds=1000)
    cost = flat.conditional(after) + extra
    assert (cost[flat.start + after] <= np.minimum.reduceat(cost, flat.start) * (1 + 1e-6)).all()
    values = [flat.total(c) + float(extra[flat.start + c].sum()) for c in (before, after)]
    assert values[1] <= values[0] * (1 + 1e-9)


def test_prices_rise_where_a_row_is_exceeded_and_fall_where_there_is_room() -> None:
    prices = Prices(np.full(200, 10.0))
    prices.start(100.0)
    before = prices.values.copy()
    profile = np.full(200, 5.0)
    profile[40] = 12.0
    prices.update(profile, 100.0)
    assert prices.values[40] > before[40]
    assert (np.delete(prices.values, 40) < np.delete(before, 40)).all()
    rises = []
    for _ in range(3):  # the longer, the faster
        before = prices.values.copy()
        prices.update(profile, 100.0)
        rises.append(prices.values[40] - before[40])
    assert rises[0] < rises[1] < rises[2]
    for _ in range(100):
        prices.update(np.zeros(200), 100.0)
    assert not prices.values.any()


@given(seeds)
def test_disturbed_prices_are_prices(seed: int) -> None:
    prices = Prices(np.full(50, 10.0))
    prices.start(100.0)
    disturbed = prices.disturbed(100.0, np.random.default_rng(seed))
    assert disturbed.shape == prices.values.shape
    assert (disturbed >= 0.0).all() and np.isfinite(disturbed).all()


def exact(
    costs: list[np.ndarray],
    tables: list[tuple[int, int, np.ndarray]],
    rows: list[tuple[dict[int, np.ndarray], float]],
    seconds: float,
) -> tuple[list[int], float]:
    answer = solve_assignment(
        AssignmentProblem(costs, tables, [ResourceConstraint(*row) for row in rows]), time_limit_s=seconds
    )
    return answer.choice, answer.bound


def parts_of(problem: AssignmentProblem, solver: Exact) -> tuple[FlatProblem, Usage, np.ndarray, NeighbourhoodSearch]:
    assert problem.memory is not None
    flat, c = flat_of(problem)
    found, room, _ = build_memory_stretches(problem.memory, c.roots, c.maps)
    usage = Usage(found, dict(zip(c.nodes, flat.start.tolist(), strict=True)), len(flat.cost), len(room))
    return (
        flat,
        usage,
        room,
        NeighbourhoodSearch(flat, LocalSearchState(c.nodes, c.costs, c.tables, found, room), solver),
    )


@settings(max_examples=40)
@given(memory_problems())
def test_a_part_that_is_everything_is_solved_to_the_optimum(problem: AssignmentProblem) -> None:
    problem = replace(problem, rows=())
    expected = brute_force(problem)
    flat, usage, room, parts = parts_of(problem, exact)
    choice = flat.best(usage.total())
    better = parts.improve(choice, range(len(choice)), time.perf_counter() + 60.0)
    if better is None:  # it is the best already, or there is none
        better = choice
    if math.isfinite(expected):
        assert (usage.profile(flat.start + better) <= room).all()
        assert flat.total(better) == pytest.approx(expected)
    else:
        assert flat.total(better) >= flat.forbidden or (usage.profile(flat.start + better) > room).any()


def test_a_part_leaves_the_others_as_they_are() -> None:
    flat = random_graph(1, 40, 80)
    state = LocalSearchState(
        flat.nodes, dict(enumerate(np.split(flat.cost, flat.start[1:]))), tables_of(flat), {}, np.zeros(0)
    )
    choice = flat.best(-flat.cost)
    better = NeighbourhoodSearch(flat, state, exact).improve(choice, range(15), time.perf_counter() + 60.0)
    assert better is not None
    assert flat.total(better) < flat.total(choice)
    assert (better[15:] == choice[15:]).all()


def tables_of(flat: FlatProblem) -> dict[tuple[int, int], np.ndarray]:
    return dict(zip(zip(flat.first.tolist(), flat.second.tolist(), strict=True), flat.tables, strict=True))


def test_regions_are_around_centres_that_may_use_a_full_row() -> None:
    flat = random_graph(2, 60, 90)
    memory = MemoryConstraint([(0, 1)] * 30 + [(2, 3)] * 30, [np.arange(float(s)) for s in flat.sizes], 20.0)
    found, room, _ = build_memory_stretches(memory, range(60), [np.arange(s) for s in flat.sizes])
    usage = Usage(found, dict(enumerate(flat.start.tolist())), len(flat.cost), len(room))
    regions = Regions(flat, np.random.default_rng(0))
    for _ in range(20):  # the second row is full and the first is not
        region = regions.at_row(usage, np.array([20.0, 0.0]), 1, 10)
        centre = min(region, key=region.__getitem__)
        assert centre >= 30 and flat.sizes[centre] > 1
        assert 1 <= len(region) <= 10
    region = regions.around(flat.best(flat.cost), 2, 10)
    assert 1 <= len(region) <= 20
    for node, weight in region.items():
        assert weight == min(region.values()) or any(region.get(j, math.inf) < weight for j in flat.near[node])


def test_a_slot_gives_each_finding_once() -> None:
    slot = FindingSlot(3)
    assert slot.read() is None
    slot.write(Finding(np.array([1, 2, 3]), 5.0, 0.0, 4.0))
    found = slot.read()
    assert found is not None
    assert (found.choice.tolist(), found.cost, found.overflow, found.bound) == ([1, 2, 3], 5.0, 0.0, 4.0)
    assert slot.read() is None


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


@needs_fork
def test_a_helper_writes_what_the_first_process_reads() -> None:
    slot = FindingSlot(2)
    helper = ForkedWorker(lambda: slot.write(Finding(np.array([7, 8]), 1.0, 0.0, 0.5)))
    helper.end(time.perf_counter() + 60.0)
    found = slot.read()
    assert found is not None
    assert found.choice.tolist() == [7, 8]


@needs_fork
def test_a_helper_that_does_not_end_is_ended() -> None:
    helper = ForkedWorker(lambda: time.sleep(1e6))
    helper.end(time.perf_counter())
    with pytest.raises(ChildProcessError):
        os.waitpid(helper.pid, 0)


@needs_fork
def test_a_helper_that_fails_does_no_harm() -> None:
    def fail() -> None:
        raise RuntimeError("in the helper")

    ForkedWorker(fail).end(time.perf_counter() + 60.0)


@settings(max_examples=15)
@given(memory_problems())
def test_two_processes_are_bracketed_by_the_optimum(problem: AssignmentProblem) -> None:
    problem = replace(problem, rows=())
    expected = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "MANY_ENTRIES", -1)
        patch.setattr(large, "WHOLE_ENTRIES", -1)
        patch.setattr(large, "_HELPED_S", 0.0)
        patch.setattr(large, "can_help", lambda: hasattr(os, "fork"))
        try:
            answer = solve_within_memory(problem, time_limit_s=0.5)
        except (InfeasibleAssignmentError, AssignmentTimeLimitError):
            return
    assert answer.bound <= expected * (1 + 1e-9) + 1e-12
    assert expected <= answer.objective * (1 + 1e-9) + 1e-12
    assert problem.objective(answer.choice) == answer.objective


def test_a_second_process_needs_a_second_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert not can_help()


def test_the_solver_starts_without_pytorch() -> None:
    code = "import sys, partitioner.solve.pairwise.assignment; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(partitioner, name) is not None for name in partitioner.__all__)
    assert set(partitioner.__all__) <= set(dir(partitioner))
    with pytest.raises(AttributeError, match="nothing"):
        partitioner.nothing  # noqa: B018
