"""Stages: the exact split, its memory, and what is said when nothing fits."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.constraints import pinned_calls
from partitioner.cost.call.call_cost import CallCost
from partitioner.errors import CapacityError, ConstraintError, PlanError
from partitioner.schedules.formulas import held_microbatches, pipeline_seconds
from partitioner.schedules.makespan import Phases
from partitioner.solve.stages.lower_bound import least_time
from partitioner.solve.stages.problem import StageCall, StageProblem
from partitioner.solve.stages.range_sums import segments_of
from partitioner.solve.stages.split import SLACK, StageSplit, solve_stages
from partitioner.solve.stages.tables import StageTables
from partitioner.solve.stages.virtual_stages import set_scheduled_in_flight, solve_virtual
from tests.helpers.stage_problems import by_hand, call, problem, problems


def brute_force(p: StageProblem) -> float:
    best = math.inf
    n = len(p.calls)
    for inner in itertools.combinations(range(1, n), p.num_stages - 1):
        cuts = (0, *inner, n)
        if any(not cuts[s] <= k < cuts[s + 1] for k, s in p.pinned.items()):
            continue
        times = [by_hand(p, s, cuts[s], cuts[s + 1])[0] for s in range(p.num_stages)]
        best = min(best, (p.num_microbatches - 1) * max(times) + sum(times))
    return best


@settings(max_examples=150)
@given(problems())
def test_the_split_is_the_best_of_all(p: StageProblem):
    expected = brute_force(p)
    if math.isinf(expected):
        with pytest.raises(CapacityError):
            solve_stages(p)
        return
    split = solve_stages(p)
    assert split.lower_bound_s == pytest.approx(expected)
    assert split.lower_bound_s <= split.pipeline_s <= (1 + SLACK) * split.lower_bound_s + 1e-9
    quick = least_time(p)
    assert quick.pipeline_s(p.schedule, p.num_stages, p.num_microbatches) <= split.lower_bound_s * (1 + 1e-12)
    if p.num_stages == 1:
        assert quick.total_s * p.num_microbatches == pytest.approx(split.lower_bound_s)
        assert quick.backward_s == split.stages[0].backward_s + split.stages[0].recompute_s
    for s, stage in enumerate(split.stages):
        seconds, memory = by_hand(p, s, stage.start, stage.stop)
        assert stage.time_s == pytest.approx(seconds)
        assert stage.memory == pytest.approx(memory, abs=1)


@settings(max_examples=150, deadline=None)
@given(problems(), problems(), st.sampled_from([None, "none", "selective", "full"]))
def test_tables_with_other_memory_are_those_of_the_problem_with_it(p: StageProblem, other: StageProblem, how: str):
    p = replace(p, recompute=how)
    capacity = [other.capacity[stage % other.num_stages] for stage in range(p.num_stages)]
    tables = StageTables(p)
    before = [table.copy() for table in tables.times]
    changed, made = tables.with_capacity(capacity), StageTables(replace(p, capacity=tuple(capacity)))
    for stage in range(p.num_stages):
        assert np.array_equal(changed.times[stage], made.times[stage])
        assert np.array_equal(tables.times[stage], before[stage])
    assert solved(changed.problem, changed) == solved(made.problem, made)


def solved(p: StageProblem, tables: StageTables) -> StageSplit | str:
    try:
        return solve_stages(p, tables)
    except CapacityError as error:
        return str(error)


def test_a_heavy_head_gets_fewer_layers():
    calls = [call(k) for k in range(8)] + [call(8, forward=4.0)]
    assert solve_stages(problem(calls, 3)).cuts == (4, 8)


def test_what_calls_share_counts_once():
    calls = [call(k, states=("tied",)) for k in range(3)]
    states = segments_of(calls).states_of({"tied": 7.0})
    assert states[0, 3] == 7.0
    assert states[1, 2] == 7.0


def test_only_as_many_calls_as_needed_are_recomputed():
    calls = [call(k, saved=10.0) for k in range(8)]
    roomy = solve_stages(problem(calls, 1, capacity=200))
    tight = solve_stages(problem(calls, 1, capacity=80))
    assert roomy.stages[0].recompute == 0
    assert tight.stages[0].recompute == 3  # 8 of states, 8 of inputs, 10 for one that is recomputed, 5 x 10 saved
    assert tight.stages[0].memory <= 80
    assert tight.stages[0].recompute_s == 3.0
    assert solve_stages(problem(calls, 1, capacity=200, recompute="full")).stages[0].recompute == 8


def test_earlier_stages_keep_more_microbatches():
    calls = [call(k, saved=1.0) for k in range(8)]
    memory = [stage.memory for stage in solve_stages(problem(calls, 4, 8)).stages]
    assert memory == sorted(memory, reverse=True)
    everything = solve_stages(problem(calls, 4, 8, schedule="gpipe")).stages[3]
    assert everything.memory > memory[3]


def test_pinned_calls_stay_where_they_are():
    calls = [call(k) for k in range(8)]
    split = solve_stages(problem(calls, 2, pinned={5: 0}))
    assert split.cuts[0] > 5


def test_what_is_lacking_is_said():
    calls = [call(k, saved=100.0, size=30.0) for k in range(4)]
    with pytest.raises(CapacityError) as caught:
        solve_stages(problem(calls, 2, capacity=200, microbatch_size=4, recompute="none"))
    error = caught.value
    assert (error.stage, error.missing_bytes) == (1, 253)
    assert error.shortage.startswith(
        "stage 1 of 2 (layers.1 to layers.3) needs 453 B without recomputation, but only 200 B are usable on a device"
    )
    assert str(error).endswith(": 253 B too much")
    with pytest.raises(CapacityError, match=r"needs at least 453 B .*: at least 253 B too much"):
        least_time(problem(calls, 2, capacity=200, microbatch_size=4, recompute="none"))  # of a relaxed problem


def test_no_more_stages_than_calls():
    with pytest.raises(PlanError, match="needs 5 pipeline stages, but the model has only 4 block calls"):
        solve_stages(problem([call(k) for k in range(4)], 5))


def test_pins_that_leave_a_stage_empty_are_refused():
    with pytest.raises(PlanError, match=r"cannot be cut into 3 stages with layers\.0 on stage 1"):
        solve_stages(problem([call(k) for k in range(4)], 3, pinned={0: 1}))


def test_stages_of_module_paths():
    paths = ["embed", "layers.0", "layers.1", "layers.10", "norm", "lm_head"]
    assert pinned_calls({"lm_head": -1, "layers.1": 0}, paths, 2) == {2: 0, 5: 1}
    assert pinned_calls({"layers": 0, "layers.10": 1}, paths, 2) == {1: 0, 2: 0, 3: 1}
    assert pinned_calls({"layers.0.mlp": 0}, paths, 2) == {1: 0}
    with pytest.raises(ConstraintError, match=r"\['head'\] names no module of the model; similar names: .*lm_head"):
        pinned_calls({"head": 0}, paths, 2)
    with pytest.raises(ConstraintError, match="expected -2 to 1"):
        pinned_calls({"norm": 2}, paths, 2)
    with pytest.raises(ConstraintError, match=r"'layers\.0' on stage 1 and 'norm', which runs after it, on stage 0"):
        pinned_calls({"layers.0": 1, "norm": 0}, paths, 2)


def test_a_deep_model_over_many_stages_is_quick():
    calls = [call(0, 0.3), *(call(k, 1.0, 3.0) for k in range(1, 127)), call(127, 2.5, 8.0)]
    start = time.perf_counter()
    split: StageSplit = solve_stages(problem(calls, 16, 64, capacity=700))
    assert time.perf_counter() - start < 1.0
    assert len(split.stages) == 16
    assert max(s.time_s for s in split.stages) < 3 * 10


EVEN = Phases(1.0, 1.0, 1.0)


def bubble(schedule: str, p: int, m: int, v: int = 1, phases: Phases = EVEN) -> float:
    """Seconds beyond the work, where all virtual stages take as long."""
    return pipeline_seconds(schedule, p, m, v, [phases] * (p * v)) - m * v * phases.total


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "seconds"),
    [  # those of the papers, in phases of a virtual stage
        ("1f1b", 4, 12, 1, 3 * 3),
        ("gpipe", 4, 12, 1, 3 * 3),
        ("interleaved", 4, 12, 2, 3 * 3),  # half of 1F1B's, whose stages are twice as long
        ("interleaved", 4, 12, 4, 3 * 3),
        ("zb-1p", 4, 12, 1, 3 * 1),  # (p - 1)(F + I - W)
        ("zb-2p", 4, 12, 1, 3 * 1),  # the ranks start one after the other
        ("zb-v", 4, 12, 2, 3 * 1),
        ("dualpipe-v", 4, 12, 2, 3 * 1),
    ],
)
def test_bubbles_are_those_of_the_papers(schedule: str, p: int, m: int, v: int, seconds: float):
    assert bubble(schedule, p, m, v) == pytest.approx(seconds)


def test_what_many_microbatches_take_goes_on_as_what_few_do():
    uneven = [Phases(1.0 + k % 3, 1.5, 0.5 + k % 2) for k in range(4)]
    for schedule in ("interleaved", "zb-1p", "zb-v"):
        taken = [pipeline_seconds(schedule, 2, m, 2, uneven) for m in (4000, 8000, 12000)]
        assert taken[2] - taken[1] == pytest.approx(taken[1] - taken[0])


def test_stages_hold_as_many_microbatches_as_the_papers_say():
    def most(counts: Sequence[tuple[int, int]]) -> int:
        return sum(map(sum, counts))

    assert held_microbatches("zb-1p", 4, 12, 1).pairs[2] == ((2, 2), (1, 3))
    for schedule, number in (("zb-1p", 4), ("zb-2p", 7)):
        held = held_microbatches(schedule, 4, 12, 1)
        assert [max(map(sum, pairs)) for pairs in held.pairs] == [number] * 4
    held = held_microbatches("zb-v", 4, 12, 2)
    assert [max(map(most, counts)) for counts in held.together] == [8, 8, 8, 8]  # half a stage each: as 1F1B's first


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_pieces_of_gradients_come_as_activations_go(sizes: list[tuple[int, int]]):
    """One microbatch: when a call runs backward, those behind it have brought pieces and given back what they saved."""
    calls = tuple(StageCall(f"c{k}", CallCost(saved_bytes=s), (), (), (f"w{k}",)) for k, (s, _) in enumerate(sizes))
    late = {f"w{k}": float(piece) for k, (_, piece) in enumerate(sizes)}
    states = {name: piece + 1.0 for name, piece in late.items()}
    problem = StageProblem(calls, 1, 1, (1000,), state_bytes=states, late_bytes=late, recompute="none")
    (stage,) = solve_stages(problem).stages
    n = len(sizes)
    moments = [n + sum(s for s, _ in sizes[: k + 1]) + sum(piece for _, piece in sizes[k + 1 :]) for k in range(n)]
    assert stage.memory == max(*moments, sum(states.values()))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-1p"])
@settings(max_examples=60, deadline=None)
@given(p=problems())
def test_no_cut_of_a_simulated_schedule_is_below_the_bound(schedule: str, p: StageProblem):
    """The bound knows how long the stages in front and behind keep a stage idle, with the recomputation that their
    memory requires."""
    p = replace(p, schedule=schedule, num_microbatches=max(2, p.num_microbatches))
    flying = set_scheduled_in_flight(p, schedule, p.num_stages, 1)
    try:
        least = least_time(flying).pipeline_s(schedule, p.num_stages, p.num_microbatches)
    except CapacityError:
        least = math.inf
    found = math.inf
    for inner in itertools.combinations(range(1, len(p.calls)), p.num_stages - 1):
        cuts = (0, *inner, len(p.calls))
        pinned = {k: s for s in range(p.num_stages) for k in range(cuts[s], cuts[s + 1])}
        if any(pinned[k] != s for k, s in p.pinned.items()):
            continue
        with suppress(CapacityError):
            found = min(found, solve_virtual(replace(p, pinned=pinned), schedule, p.num_stages, 1).ended_s)
    assert least <= found * (1 + 1e-9)
