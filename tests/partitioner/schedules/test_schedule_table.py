"""Schedules that are written down: any order that can run does, and what is wrong is told by row and cell."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from partitioner import ConstraintError, Constraints, PlanError, ScheduleTable, Topology, partition
from partitioner.schedules.actions import Action, ScheduleError, in_flight
from partitioner.schedules.registry import SCHEDULES, build_timetable
from tests.helpers.models import CASES
from tests.helpers.symbolic_results import result
from tests.helpers.tiny_programs import tiny_program

pytestmark = pytest.mark.usefixtures("without_baselines")

ONE_F_ONE_B = "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


def table(text: str, tmp_path: Path) -> ScheduleTable:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    return ScheduleTable.load(path)


# --- what it reads ----------------------------------------------------------------------------------------------------


def test_a_file_says_what_ranks_do(tmp_path: Path):
    orders = table("0F0,0F1,,(0F2;0B0)OVERLAP_F_B,0I1,0W1,0B2\n1F0,1B0,1F1,1I1,1F2,1W1,1I2,1W2\n", tmp_path).own.orders
    assert [" ".join(map(str, order)) for order in orders] == [
        "F0 F1 F2 B0 B1 B2",  # nobody waits for the first stage's gradients: both halves are one
        "F0 B0 F1 I1 F2 W1 I2 W2",
    ]


def test_stages_may_be_on_any_rank(tmp_path: Path):
    own = table("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", tmp_path).own
    assert own.ranks == (0, 1, 1, 0)
    assert own.orders[1][1] == Action("F", 0, 1)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules_are_written_and_read(name: str, tmp_path: Path):
    chunks = 3 if SCHEDULES[name].chunks is None else None
    path = ScheduleTable.of(name, 3, 5, chunks).save(tmp_path / "schedule.csv")
    assert ScheduleTable.load(path).own == build_timetable(name, 3, 5, chunks)


def torch_rows(kind: Any, p: int, m: int, v: int) -> list[list[Any]]:
    """torch's order for each rank, without its own ranks and stages."""
    made = kind.__new__(kind)
    made.pp_group_size, made.n_local_stages, made.num_stages, made._n_microbatches = p, v, p * v, m
    made.number_of_rounds = max(1, m // p)
    made.microbatches_per_round = m // made.number_of_rounds
    rows = [[a for a in made._calculate_single_rank_operations(rank) if a is not None] for rank in range(p)]
    return [[part for a in row for part in (a.sub_actions or [a])] for row in rows]


@pytest.mark.parametrize(
    ("kind", "name", "v"),
    [
        (torch_schedules.ScheduleInterleaved1F1B, "interleaved", 2),
        (torch_schedules.ScheduleInterleaved1F1B, "interleaved", 3),
        (torch_schedules.ScheduleInterleavedZeroBubble, "zb-1p", 1),
        (torch_schedules.ScheduleInterleavedZeroBubble, "zb-1p", 2),
        (torch_schedules.ScheduleZBVZeroBubble, "zb-v", 2),
        (torch_schedules.ScheduleDualPipeV, "dualpipe-v", 2),
    ],
)
def test_orders_are_torchs_where_torch_has_one(kind: Any, name: str, v: int):
    compared = 0
    for p in range(1, 6):
        for m in range(2 * p if name == "dualpipe-v" else 1, 14):
            if name in ("interleaved", "zb-1p") and m % max(1, m // p):
                continue  # torch refuses these
            rows = torch_rows(kind, p, m, v)
            mine = [[torch_schedules._Action.from_str(a) for a in row] for row in ScheduleTable.of(name, p, m, v).rows]
            merged = torch_schedules._merge_bw
            assert [merged(row) for row in mine] == [merged(row) for row in rows], (p, m)
            compared += 1
    assert compared > 20


# --- any order that can run -------------------------------------------------------------------------------------------


def random_table(p: int, stages: int, m: int, random_: random.Random) -> ScheduleTable:
    """Some order that can run, of stages that are anywhere."""
    ranks = [*range(p), *(random_.randrange(p) for _ in range(stages - p))]
    random_.shuffle(ranks)
    rows: list[list[str]] = [[] for _ in range(p)]
    waiting = [("F", 0, i) for i in range(m)]
    while waiting:
        kind, k, i = waiting.pop(random_.randrange(len(waiting)))
        rows[ranks[k]].append(f"{k}{kind}{i}")
        if kind == "F":
            waiting.append(("F", k + 1, i) if k + 1 < stages else (random_.choice("BI"), k, i))
        elif kind != "W":
            waiting += [(random_.choice("BI"), k - 1, i)] * (k > 0) + [("W", k, i)] * (kind == "I")
    return ScheduleTable(name="random", rows=tuple(map(tuple, rows)))


@settings(max_examples=40)
@given(p=st.integers(1, 4), more=st.integers(0, 4), m=st.integers(1, 4), tied=st.booleans(), seed=st.integers(0, 10**6))
def test_every_order_that_can_run_computes_the_same(p: int, more: int, m: int, tied: bool, seed: int):
    made = random_table(p, p + more, m, random.Random(seed))
    assert result(tiny_program(p, 1, 1, m, 5, made, tied=tied)) == result(
        tiny_program(1, 1, 1, m, 5, "gpipe", tied=tied)
    )


@settings(max_examples=60)
@given(p=st.integers(1, 3), more=st.integers(0, 3), m=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_a_swapped_pair_is_refused_or_computes_the_same(p: int, more: int, m: int, seed: int):
    random_ = random.Random(seed)
    made = random_table(p, p + more, m, random_)
    rank = random_.randrange(p)
    row = list(made.rows[rank])
    a, b = random_.randrange(len(row)), random_.randrange(len(row))
    row[a], row[b] = row[b], row[a]
    swapped = ScheduleTable(name="swapped", rows=(*made.rows[:rank], tuple(row), *made.rows[rank + 1 :]))
    try:
        program = tiny_program(p, 1, 1, m, 5, swapped)
    except ScheduleError:
        return
    assert result(program) == result(tiny_program(1, 1, 1, m, 5, "gpipe"))


@given(p=st.integers(1, 4), more=st.integers(0, 4), m=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_nothing_is_in_flight_at_the_end(p: int, more: int, m: int, seed: int):
    for order in random_table(p, p + more, m, random.Random(seed)).own.orders:
        assert not any(in_flight(order)[-1].values())


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", r"row 1, cell 2: '0X0' is not an action; expected <stage><F, B, I or W><microbatch>, like 3F0"),
        ("0F0,0B0\n1F0,1SEND_B0\n", r"row 2, cell 2: '1SEND_B0' is not an action.*they follow from the order"),
        ("0F0,0B0\n1F0,0B0\n", r"row 2, cell 2: 0B0 runs stage 0, but row 1 runs this stage, too \(cell 1: 0F0\)"),
        ("0F0,0B0\n2F0,2B0\n", r"row 2, cell 1: 2F0 runs stage 2, but no row has stage 1"),
        ("0F0,0B0,0F0\n", r"row 1, cell 3: 0F0 repeats an action: cell 1 already has 0F0"),
        ("0F0,0B0,0W0\n", r"row 1, cell 3: 0W0 repeats an action: cell 2 already has 0B0"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1\n", r"row 2 lacks 1B1 \(or 1I1 and 1W1\).*row 1, cell 3: 0F1"),
        ("0F0,0I0\n", r"row 1 lacks 0W0, which follows 0I0"),
        ("0F0,0W0,0I0\n", r"row 1, cell 2: 0W0 comes before 0I0"),
        ("0B0,0F0\n", r"row 1, cell 1: 0B0 comes before 0F0"),
        ("0F0,2F0,2B0,0B0\n1B0,1F0\n", r"row 2, cell 1: 1B0 comes before 1F0"),
        ("2F0,0F0,2B0,0B0\n1F0,1B0\n", r"row 1, cell 1: 2F0 can never start.*row 2, cell 1 \(1F0\)"),
        ("0F0,0B0\n\n1F0,1B0\n", r"row 2 has no actions"),
        ("\n", r"has no actions; expected a row for each pipeline rank"),
    ],
)
def test_what_is_wrong_is_told_by_row_and_cell(text: str, message: str, tmp_path: Path):
    with pytest.raises(ScheduleError, match=message):
        _ = table(text, tmp_path).own


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ScheduleError, match=r"cannot read the schedule '.*absent.csv'"):
        ScheduleTable.load(tmp_path / "absent.csv")


# --- planned ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_as", ["path", "object"])
def test_a_file_is_planned_and_computes_what_the_model_does(given_as: str, tmp_path: Path):
    case = CASES["skip-mlp"]
    model, inputs = case.build(), case.inputs(4)
    made = table(ONE_F_ONE_B, tmp_path)
    schedule = str(tmp_path / "schedule.csv") if given_as == "path" else made
    constraints = Constraints(pp=2, dp=1, tp=1, microbatch_size=2, schedule=schedule)
    plan = partition(model, Topology.local(2), inputs, loss=case.loss, constraints=constraints)
    assert plan.schedule == str(tmp_path / "schedule.csv")
    assert plan.verify(model, inputs, case.loss).ok
    assert type(plan).load(plan.save(tmp_path / "plan.json")) == plan


def test_a_file_for_other_numbers_says_which(tmp_path: Path):
    case = CASES["skip-mlp"]
    schedule = table(ONE_F_ONE_B, tmp_path)
    constraints = Constraints(pp=2, dp=1, tp=1, microbatch_size=1, schedule=schedule)
    with pytest.raises(PlanError, match="written for pp=2, 2 microbatches and 2 virtual stages"):
        partition(case.build(), Topology.local(2), case.inputs(4), loss=case.loss, constraints=constraints)
    with pytest.raises(ScheduleError, match="is for pp=2 with 2 microbatches, got pp=2 with 3"):
        build_timetable(schedule, 2, 3)


def test_a_name_that_is_no_schedule_is_refused():
    with pytest.raises(
        ConstraintError, match=r"input should be 'gpipe', .*, or a file that ends in \.csv, got 'zigzag'"
    ):
        Constraints(schedule="zigzag")
