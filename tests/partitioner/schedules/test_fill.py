"""The least fill and drain of schedules: whoever cuts the calls, a step takes no less than the table says."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp

from partitioner.errors import CapacityError
from partitioner.schedules.actions import group_stages_by_rank, halves_in_flight
from partitioner.schedules.formulas import (
    held_microbatches,
    is_split,
    least_alone,
    least_fill,
    pipeline_seconds,
    shorten_timetable,
    stage_in_flight,
)
from partitioner.schedules.makespan import Phases, longest_path
from partitioner.schedules.registry import build_timetable, ranks_of
from partitioner.solve.bounds.schedule_memory import RankCapacity, most_held, needs_of
from partitioner.solve.stages.lower_bound import LeastTime, least_time
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.virtual_stages import solve_virtual
from tests.helpers.stage_problems import call, problem, problems

_TURNS = 300
_EVERY = [
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved", 2),
    ("zb-1p", 1),
    ("zb-1p", 2),
    ("zb-2p", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]
_MIXES = [(1 / 3, 1 / 3, 1 / 3), (0.3, 0.45, 0.25), (0.25, 0.6, 0.15)]


def value(schedule: str, p: int, m: int, v: int, whole: tuple[float, float, float]) -> float:
    """What a step takes at least, if a microbatch's forward, backward for inputs and for weights are shared out over
    the virtual stages at will (that for weights is no more than half a backward): a game between who shares out and the
    longest path, solved by adding the paths that answer."""
    table, n = shorten_timetable(schedule, p, m, v)[0], p * v
    solver = pywraplp.Solver.CreateSolver("GLOP")
    parts = [[solver.NumVar(0, solver.infinity(), "") for _ in whole] for _ in range(n)]
    step = solver.NumVar(0, solver.infinity(), "")
    for kind, total in enumerate(whole):
        solver.Add(sum(part[kind] for part in parts) == total)
    for _, inputs, weights in parts:
        solver.Add(inputs >= weights)
    solver.Minimize(step)
    now = np.tile(np.array(whole) / n, (n, 1))
    best = np.inf
    for _ in range(_TURNS):
        seconds, often = longest_path(table, [Phases(*part) for part in now])
        best = min(best, seconds)
        solver.Add(step >= sum(float(often[k, c]) * parts[k][c] for k in range(n) for c in range(3)))
        assert solver.Solve() == pywraplp.Solver.OPTIMAL
        if step.solution_value() >= best * (1 - 1e-7):
            return float(step.solution_value())
        now = np.array([[part.solution_value() for part in of] for of in parts])
    raise AssertionError("the game was not solved")


@pytest.mark.parametrize(("schedule", "v"), _EVERY)
@pytest.mark.parametrize(
    ("p", "m"), [(2, 1), (2, 2), (2, 3), (2, 4), (2, 9), (3, 2), (3, 3), (3, 5), (3, 6), (3, 14), (4, 6)]
)
def test_no_cuts_fill_a_pipeline_faster(schedule: str, v: int, p: int, m: int):
    ahead, back = least_fill(schedule, p, m, v)
    for whole in _MIXES:
        filled = m * sum(whole) / p + (1 - 1 / p) * (ahead * whole[0] + back * sum(whole[1:]))
        alone = whole[0] + least_alone(schedule) * sum(whole[1:])
        assert max(filled, alone) <= value(schedule, p, m, v, whole) * (1 + 1e-6), whole


@given(
    st.sampled_from(_EVERY),
    st.integers(2, 6),
    st.integers(1, 24),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=300)
def test_nor_do_stages_that_are_cut_at_random(kind: tuple[str, int], p: int, m: int, seed: int):
    schedule, v = kind
    rng = np.random.default_rng(seed)
    stages = [Phases(f, i + w, w) for f, i, w in rng.choice([0.2, 1.0, 1.1], (p * v, 3)) * rng.uniform(0.5, 1.5)]
    ahead, back = least_fill(schedule, p, m, v)
    forward = sum(stage.forward for stage in stages)
    total = sum(stage.total for stage in stages)
    filled = m * total / p + (1 - 1 / p) * (ahead * forward + back * (total - forward))
    assert filled <= pipeline_seconds(schedule, p, m, v, stages) * (1 + 1e-9)


@given(problems(), st.sampled_from(["1f1b", "gpipe", "zb-1p", "zb-2p"]), st.floats(0.3, 3.0))
@settings(max_examples=400)
def test_least_times_hold_for_schedules_that_no_formula_describes(
    given_problem: StageProblem, schedule: str, share: float
):
    """In full; where long runs are left out; and where runs are left out that alone take too long."""
    p = replace(given_problem, schedule=schedule)
    if p.num_stages == 1:
        return
    try:
        solved = solve_virtual(p, schedule, p.num_stages, 1).pipeline_s
    except CapacityError:
        return  # what fits may still be found to fit

    def seconds(least: LeastTime) -> float:
        return least.pipeline_s(schedule, p.num_stages, p.num_microbatches)

    assert seconds(least_time(p)) <= solved * (1 + 1e-9)
    assert seconds(least_time(p, quick=True)) <= solved * (1 + 1e-9)
    assert seconds(least_time(p, share * solved)) <= solved * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-1p", "zb-2p"])
def test_what_stages_hold_is_what_the_order_holds(schedule: str):
    for p, m in product(range(2, 9), (1, 2, 3, 5, 8, 9, 16, 27)):
        pairs = held_microbatches(schedule, p, m, 1).pairs
        assert tuple(stage_in_flight(schedule, s, p, m) for s in range(p)) == pairs, (p, m)


@pytest.mark.parametrize(("schedule", "v"), [*_EVERY, ("interleaved", 5), ("zb-1p", 3), ("gpipe", 1), ("1f1b", 1)])
def test_long_steps_hold_what_their_orders_hold(schedule: str, v: int):
    """Numbers in flight are found from a few rounds of a long step. They are those of the whole step, in which no other
    moment has as many of each."""
    for p, rounds in product((2, 3, 5, 8), (2, 3, 4, 7)):
        found, table = held_microbatches(schedule, p, rounds * p, v), build_timetable(schedule, p, rounds * p, v)
        for order, stages, together in zip(table.orders, table.held, found.together, strict=True):
            moments = set(halves_in_flight(order, len(stages)))
            rows = {moment: np.array(moment).ravel() for moment in moments}
            exceeded = {
                one for one, row in rows.items() if any((row <= other).all() for m, other in rows.items() if m != one)
            }
            assert set(together) == moments - exceeded, (p, rounds)


@given(st.sampled_from(_EVERY), st.integers(2, 6), st.integers(1, 24), st.floats(0, 3), st.floats(0, 3))
@settings(max_examples=200)
def test_a_stage_is_fullest_at_one_of_its_pairs(
    kind: tuple[str, int], p: int, m: int, whole: float, half: float
) -> None:
    """Whatever a microbatch takes whose backward has not begun, and one of which half has run."""
    schedule, v = kind
    m = m * p if schedule == "interleaved" else m
    table = shorten_timetable(schedule, p, m, v)[0]
    found = held_microbatches(schedule, p, m, v)
    for order, stages, together in zip(table.orders, table.held, found.together, strict=True):
        moments = halves_in_flight(order, len(stages))
        for c, k in enumerate(stages):
            fullest = max(counts[c][0] * whole + counts[c][1] * half for counts in moments)
            assert max(a * whole + b * half for a, b in found.pairs[k]) == pytest.approx(fullest)
        fullest = max(sum(a * whole + b * half for a, b in counts) for counts in moments)
        assert max(sum(a * whole + b * half for a, b in counts) for counts in together) == pytest.approx(fullest)


@given(st.sampled_from(_EVERY), st.integers(2, 5), st.integers(1, 24), st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_what_must_be_made_again_is_no_more_than_any_cut_makes_again(
    kind: tuple[str, int], p: int, m: int, seed: int
) -> None:
    """Calls are put anywhere, and made again or not; ranks have as much memory as the fullest takes."""
    schedule, v = kind
    m = m * p if schedule == "interleaved" else m
    rng = np.random.default_rng(seed)
    calls = [
        call(
            k,
            float(rng.integers(1, 9)),
            float(rng.integers(0, 9)),
            size=float(rng.integers(1, 9)),
            carried=float(rng.choice([0.0, 0.3, 1.0, 1.5])),
        )
        for k in range(int(rng.integers(2, 12)))
    ]
    place = rng.integers(0, p * v, len(calls))
    remade = rng.random(len(calls)) < rng.random()
    inputs = np.array([c.cost.input_bytes[0] for c in calls])
    whole = inputs + np.array([0 if r else c.cost.saved_bytes for c, r in zip(calls, remade, strict=True)])
    half = inputs + np.array([c.cost.carried_bytes for c in calls])
    sizes = np.bincount(place, np.minimum(whole, half) if is_split(schedule) else whole, minlength=p * v)
    each = np.stack([np.bincount(place, of, minlength=p * v) for of in (whole, half)], axis=1)
    own = group_stages_by_rank(ranks_of(schedule, p, v), p)
    states = rng.integers(0, 20, p) * rng.integers(0, 2)
    peaks = [
        max(float((each[list(stages)] * np.array(counts)).sum()) for counts in together) + float(states[rank])
        for rank, (stages, together) in enumerate(zip(own, held_microbatches(schedule, p, m, v).together, strict=True))
    ]
    shares = most_held(schedule, p, m, v)
    for rank, stages in enumerate(own):
        assert sizes[list(stages)].sum() <= shares[rank] * (peaks[rank] - states[rank]) * (1 + 1e-9)
    seconds = np.array([c.cost.forward_s + c.cost.backward_s for c in calls])
    of_rank = [float(seconds[np.isin(place, stages)].sum()) for stages in own]
    again = float(sum(c.cost.forward_s for c, r in zip(calls, remade, strict=True) if r))
    needs = needs_of([(c, c.cost) for c in calls], is_split(schedule))  # type: ignore[misc]
    ranks = RankCapacity(shares, max(peaks), float(states.sum()))
    for limit in (max(of_rank), 2 * max(of_rank), np.inf):
        assert needs.seconds_again(ranks, None, limit) <= again * (1 + 1e-9) + 1e-9


@given(problems(), st.sampled_from([("interleaved", 2), ("zb-1p", 2), ("zb-v", 2), ("zb-1p", 1)]))
@settings(max_examples=200)
def test_virtual_stages_hold_together_what_their_rank_has(given_problem: StageProblem, kind: tuple[str, int]):
    schedule, v = kind
    ranks = given_problem.num_stages // v
    if given_problem.num_stages % v or ranks < 2 or given_problem.pinned:
        return
    m = given_problem.num_microbatches * (ranks if schedule == "interleaved" else 1)
    p = replace(given_problem, num_microbatches=m, chunks=v)
    try:
        solved = solve_virtual(p, schedule, ranks, v)
    except CapacityError:
        return
    own = group_stages_by_rank(ranks_of(schedule, ranks, v), ranks)
    for stage, virtual in zip(solved.stages, own, strict=True):
        assert stage.memory <= p.capacity[virtual[0]] + 1
    assert solved.lower_bound_s <= solved.pipeline_s


@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_as_much_is_made_again_as_memory_asks_for(v: int, share: float):
    """Of layers that are alike: no more than a rank's fullest moment needs, by one call for each virtual stage."""
    schedule, ranks, layers, saved = "interleaved", 2, 16, 20.0
    plain = problem([call(k, 1.0, saved) for k in range(layers)], ranks * v, 8)
    most = max(stage.memory for stage in solve_virtual(plain, schedule, ranks, v).stages)
    tight = replace(plain, capacity=(round(share * most),) * (ranks * v))
    solved = solve_virtual(tight, schedule, ranks, v)
    assert all(stage.memory <= share * most + 1 for stage in solved.stages)
    for stage in solved.stages:
        flying = min(plan.in_flight for plan in stage.parts)
        needed = (most - share * most) / saved / max(1.0, flying)
        assert sum(plan.recompute for plan in stage.parts) <= 2 * needed + v, (stage.recompute, needed)
