"""Stages that share a machine's cores: what a schedule takes when all that compute at a time share them evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.schedules.core_contention import NodeCores, VirtualStageTime, seconds_in_turns
from partitioner.schedules.formulas import pipeline_seconds
from partitioner.schedules.makespan import Phases
from partitioner.schedules.registry import ranks_of

NONE = Phases()
SCHEDULES = [("1f1b", None), ("gpipe", None), ("interleaved", 2), ("zb-1p", None), ("zb-v", 2), ("dualpipe-v", 2)]
seconds = st.floats(0.1, 4.0)


def on_one_node(p: int, room: float | None, width: int = 1) -> NodeCores:
    return NodeCores(tuple({0: width} for _ in range(p)), {} if room is None else {0: room})


def works(times: list[float], waits: float = 0.0) -> list[VirtualStageTime]:
    waiting = Phases(waits, waits) if waits else NONE
    return [VirtualStageTime(Phases(t, t, t), waiting) for t in times]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("waits", [0.0, 0.25])
def test_with_cores_for_all_it_is_the_longest_path(schedule: str, chunks: int | None, waits: float):
    p, m = 4, 8
    num = len(ranks_of(schedule, p, chunks))
    times = [1.0 + 0.5 * (k % 3) for k in range(num)]
    phases = [Phases(t + waits, t + waits, t) for t in times]
    expected = pipeline_seconds(schedule, p, m, chunks, phases)
    for room in (None, 4.0):
        found = seconds_in_turns(schedule, m, chunks, works(times, waits), on_one_node(p, room))
        assert found == pytest.approx(expected)


@given(st.lists(seconds, min_size=2, max_size=4), st.integers(1, 6), st.floats(0.5, 4.0), st.sampled_from([1, 2]))
def test_no_less_than_the_work_and_than_the_path_and_no_more_than_all_in_turns(
    times: list[float], m: int, room: float, width: int
):
    p = len(times)
    alone = seconds_in_turns("1f1b", m, None, works(times), on_one_node(p, None, width))
    shared = seconds_in_turns("1f1b", m, None, works(times), on_one_node(p, room, width))
    work = 3 * m * width * sum(times)
    slack = 1 - 1e-9
    assert shared >= slack * max(alone, work / room)
    assert slack * shared <= max(alone * max(1.0, width * p / room), work)
    more = seconds_in_turns("1f1b", m, None, works(times), on_one_node(p, 2 * room, width))
    assert more >= slack * shared / 2


def test_two_stages_on_one_core_by_hand():
    """One microbatch: never both at a time. Two: while the second stage has the first one, the first has the second."""
    stages = [VirtualStageTime(Phases(1.0, 2.0), NONE)] * 2
    assert seconds_in_turns("gpipe", 1, None, stages, on_one_node(2, 1.0)) == pytest.approx(6.0)
    assert seconds_in_turns("gpipe", 2, None, stages, on_one_node(2, 1.0)) == pytest.approx(12.0)
    assert seconds_in_turns("gpipe", 2, None, stages, on_one_node(2, 2.0)) == pytest.approx(9.0)


def test_a_slow_stage_is_slowed_down_by_those_that_need_not_hurry():
    """More than the cores take for all the work, and than the step takes with cores for all."""
    uneven = works([1.0, 1.0, 1.0, 2.0])
    shared = seconds_in_turns("gpipe", 4, None, uneven, on_one_node(4, 2.0))
    alone = seconds_in_turns("gpipe", 4, None, uneven, on_one_node(4, None))
    assert shared > 1.05 * max(alone, 3 * 4 * 5.0 / 2)


def test_who_waits_leaves_the_cores_to_others():
    """Half of the time on a core and half of it waiting takes less on one core than all of it there."""
    core = on_one_node(2, 1.0)
    half = [VirtualStageTime(Phases(0.5, 0.5), Phases(0.5, 0.5))] * 2
    whole = [VirtualStageTime(Phases(1.0, 1.0), NONE)] * 2
    assert seconds_in_turns("1f1b", 8, None, whole, core) == pytest.approx(32.0)
    assert 18.0 <= seconds_in_turns("1f1b", 8, None, half, core) <= 26.0  # 18: with a core for each


def test_nodes_have_their_own_cores():
    apart = NodeCores(({0: 1}, {1: 1}), {0: 1.0, 1: 1.0})
    stages = works([1.0, 1.0])
    free = seconds_in_turns("1f1b", 4, None, stages, on_one_node(2, None))
    assert seconds_in_turns("1f1b", 4, None, stages, apart) == pytest.approx(free)
    beside = NodeCores(({0: 2}, {1: 1}), {0: 1.0, 1: 1.0})
    assert seconds_in_turns("1f1b", 4, None, stages, beside) > free


def test_many_microbatches_are_told_from_fewer():
    """Beyond the first thousands of actions every further round of microbatches takes as long."""
    stages, cores = works([1.0, 2.0]), on_one_node(2, 1.5)
    found = [seconds_in_turns("1f1b", m, None, stages, cores) for m in (1000, 2000, 3000)]
    assert found[2] - found[1] == pytest.approx(found[1] - found[0])
    assert found[1] == pytest.approx(3 * 2000 * 2.0, rel=0.2)


def test_without_training_only_forwards_run():
    stages = [VirtualStageTime(Phases(1.0, 2.0, 3.0), NONE)] * 2
    assert seconds_in_turns("1f1b", 3, None, stages, on_one_node(2, 1.0), train=False) == pytest.approx(6.0)
    one = NodeCores(({0: 4},), {0: 2.0})
    assert seconds_in_turns("1f1b", 3, None, stages[:1], one, train=False) == pytest.approx(6.0)
    assert seconds_in_turns("1f1b", 3, None, stages[:1], one) == pytest.approx(36.0)
