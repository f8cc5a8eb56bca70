"""Pipeline schedules: what each stage does, in which order, and with how much in flight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.schedules.actions import Action, ScheduleError, Timetable, check_timetable, peak_in_flight
from partitioner.schedules.registry import SCHEDULES, schedule_orders

SIZES = {"p": st.integers(1, 9), "m": st.integers(1, 12)}


def text(order: tuple[Action, ...]) -> str:
    return " ".join(map(str, order))


def test_1f1b_reads_as_in_the_papers():
    assert [text(o) for o in schedule_orders("1f1b", 3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_gpipe_runs_all_forwards_first():
    assert [text(o) for o in schedule_orders("gpipe", 2, 2)] == ["F0 F1 B0 B1"] * 2


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@given(p=st.integers(1, 6), m=st.integers(1, 12))
def test_every_schedule_ends_for_any_size(name: str, p: int, m: int):
    orders = schedule_orders(name, p, m)
    assert len(orders) == p


@given(**SIZES)
def test_1f1b_has_the_least_in_flight(p: int, m: int):
    orders = schedule_orders("1f1b", p, m)
    assert [peak_in_flight(o) for o in orders] == [min(p - s, m) for s in range(p)]


@given(**SIZES)
def test_gpipe_has_all_in_flight(p: int, m: int):
    assert {peak_in_flight(o) for o in schedule_orders("gpipe", p, m)} == {m}


@given(**SIZES, data=st.data())
def test_an_order_that_lacks_an_action_is_refused(p: int, m: int, data: st.DataObject):
    orders = list(schedule_orders("1f1b", p, m))
    stage = data.draw(st.integers(0, p - 1))
    place = data.draw(st.integers(0, 2 * m - 1))
    orders[stage] = orders[stage][:place] + orders[stage][place + 1 :]
    with pytest.raises(ScheduleError, match=f"stage {stage} does not run the"):
        check_timetable(Timetable(tuple(orders), tuple(range(p))), m)


def test_an_order_that_waits_for_itself_is_refused():
    backward_first = (Action("B", 0), Action("F", 0))
    with pytest.raises(ScheduleError, match="stage 0 can never start B0"):
        check_timetable(Timetable((backward_first,), (0,)), 1)


def test_unknown_schedules_and_empty_pipelines_are_refused():
    with pytest.raises(ScheduleError, match="there is no schedule 'chimera'; choose one of"):
        schedule_orders("chimera", 2, 2)
    with pytest.raises(ScheduleError, match="at least one stage and one microbatch, got 0 and 2"):
        schedule_orders("1f1b", 0, 2)
