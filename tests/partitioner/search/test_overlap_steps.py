"""Steps that overlap: each rank begins the next one when it has ended its own part of this one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import astuple
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import partitioner
from partitioner import Constraints, Topology, partition
from partitioner.runtime.program.program import Program
from partitioner.schedules import makespan
from partitioner.schedules.actions import Timetable
from partitioner.schedules.formulas import is_split, least_fill, pipeline_seconds
from partitioner.schedules.makespan import Phases, compute_makespan, follow_all, longest_path
from partitioner.schedules.registry import build_timetable, ranks_of
from partitioner.solve.stages import improve_cuts as cutting
from partitioner.solve.stages.improve_cuts import better_cuts
from partitioner.solve.stages.lower_bound import least_time
from partitioner.solve.stages.split import stage_plan
from partitioner.solve.stages.tables import StageTables
from partitioner.solve.stages.virtual_stages import phases_of, set_scheduled_in_flight, solve_virtual
from tests.helpers.small_clusters import cluster
from tests.helpers.stage_problems import call, problem

pytestmark = pytest.mark.usefixtures("without_baselines")

EVERY = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-1p", 1), ("zb-2p", 1), ("zb-v", 2), ("dualpipe-v", 2)]
SPLIT = [kind for kind in EVERY if is_split(kind[0])]


def pace_of(table: Timetable, phases: list[Phases], steps: int) -> float:
    """Seconds of a step in the mean of many, each action as soon as its rank and what it reads are there."""
    free, first = [0.0] * len(table.orders), 0.0
    for step in range(steps):
        done: dict[tuple[str, int, int], float] = {}
        waiting = [list(order) for order in table.orders]
        while any(waiting):
            for rank, left in enumerate(waiting):
                while left:
                    action = left[0]
                    k, i = table.held[rank][action.chunk], action.microbatch
                    needed = {"F": ("F", i, k - 1), "W": ("W", 0, 0)}.get(action.kind, ("B", i, k + 1))
                    is_first = action.kind == "W" or k == (0 if action.kind == "F" else len(phases) - 1)
                    if not is_first and needed not in done:
                        break
                    phase = phases[k]
                    took = {"F": phase.forward, "I": phase.inputs, "W": phase.weights}
                    seconds = took.get(action.kind, phase.inputs + phase.weights)
                    sent = phase.values_sent if action.kind == "F" else phase.gradients_sent
                    free[rank] = max(free[rank], 0.0 if is_first else done[needed] + sent) + seconds
                    if action.kind != "W":
                        done["F" if action.kind == "F" else "B", i, k] = free[rank]
                    left.pop(0)
        if step == steps // 2 - 1:
            first = max(free)
    return (max(free) - first) / (steps - steps // 2)


def random_phases(seed: int, count: int) -> list[Phases]:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0.2, 1.0, 1.1], (count, 3)) * rng.uniform(0.5, 1.5)
    sent = rng.choice([0.0, 0.1, 0.7], (count, 2)).tolist()
    return [Phases(f, i + w, w, *of) for (f, i, w), of in zip(sizes.tolist(), sent, strict=True)]


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 7), (4, 12), (8, 24)])
def test_the_next_step_fills_what_zb_2p_leaves(p: int, m: int):
    phases = [Phases(1.0, 1.0, 1.0)] * p
    assert pipeline_seconds("zb-2p", p, m, 1, phases, overlap_steps=True) == pytest.approx(3 * m)
    assert pipeline_seconds("zb-2p", p, m, 1, phases) == pytest.approx(3 * m + p - 1)


@given(st.sampled_from(EVERY), st.integers(2, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_a_step_takes_what_many_take_in_the_mean(kind: tuple[str, int], p: int, rounds: int, seed: int):
    (schedule, v), m = kind, rounds * p
    phases, table = random_phases(seed, p * v), build_timetable(schedule, p, m, v)
    alone, found = compute_makespan(table, phases), compute_makespan(table, phases, overlap_steps=True)
    assert pace_of(table, phases, 40) <= found * (1 + 1e-9)
    assert found == pytest.approx(pace_of(table, phases, 40), rel=0.01)
    if is_split(schedule):
        assert found <= alone * (1 + 1e-9)
    else:  # whose first rank begins a step, and ends it
        assert found == pytest.approx(alone)


@given(st.sampled_from(EVERY), st.integers(2, 6), st.integers(1, 24), st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_a_longest_cycle_holds_wherever_calls_are_cut(kind: tuple[str, int], p: int, m: int, seed: int):
    """What goes through the same actions in other stages takes as long there, and fill is no more than is said."""
    (schedule, v), others = kind, random_phases(seed + 1, p * kind[1])
    m = m * p if schedule == "interleaved" else m
    table, phases = build_timetable(schedule, p, m, v), random_phases(seed, p * v)
    seconds, often = longest_path(table, phases, overlap_steps=True)

    def along(stages: list[Phases]) -> float:
        parts = np.array([astuple(s) for s in stages])
        return float((often * parts).sum())

    assert along(phases) <= seconds * (1 + 1e-9)
    assert along(others) <= compute_makespan(table, others, overlap_steps=True) * (1 + 1e-9)
    ahead, back = least_fill(schedule, p, m, v, overlap_steps=True)
    forward, total = sum(s.forward for s in phases), sum(s.total for s in phases)
    filled = m * total / p + (1 - 1 / p) * (ahead * forward + back * (total - forward))
    assert filled <= seconds * (1 + 1e-9) or not is_split(schedule)  # steps overlap under others only


@given(
    st.sampled_from(SPLIT),
    st.integers(2, 3),
    st.integers(1, 3),
    st.lists(st.floats(0.2, 3.0), min_size=6, max_size=8),
    st.booleans(),
)
@settings(max_examples=60)
def test_no_cuts_go_below_the_bounds(kind: tuple[str, int], p: int, rounds: int, seconds: list[float], tried: bool):
    """Whether all cuts are tried or not, and of schedules with one stage on a rank also without following them."""
    (schedule, v), m = kind, rounds * p
    calls = [call(k, forward, weights=0.9) for k, forward in enumerate(seconds)]
    whole = problem(calls, p * v, m, schedule=schedule, overlap_steps=True)
    if v > 1:
        whole = problem(calls, p * v, m, schedule=schedule, overlap_steps=True, chunks=v, bubble=0.5)
    whole = set_scheduled_in_flight(whole, schedule, p, v)
    tables, table = StageTables(whole), build_timetable(schedule, p, m, v)
    every = [(0, *inner, len(calls)) for inner in combinations(range(1, len(calls)), p * v - 1)]
    taken = []
    for found in every:
        plans = [stage_plan(tables, k, *pair) for k, pair in enumerate(pairwise(found))]
        phases = [phases_of(whole, k, plan) for k, plan in enumerate(plans)]
        taken.append(compute_makespan(table, phases, overlap_steps=True))
    with pytest.MonkeyPatch.context() as patch:
        if not tried:
            patch.setattr(cutting, "_ALL", 0)
        result = better_cuts(tables, table, every[len(every) // 2])
        split = solve_virtual(whole, schedule, p, v)
    assert result.bound <= min(taken) * (1 + 1e-9)
    assert min(taken) * (1 - 1e-9) <= result.cuts[0][0]
    assert split.lower_bound_s <= min(taken) * (1 + 1e-9)
    assert split.pipeline_s >= min(taken) * (1 - 1e-9)
    if tried:
        assert split.pipeline_s == pytest.approx(min(taken))
    if schedule in ("zb-1p", "zb-2p"):
        assert least_time(whole).pipeline_s(schedule, p, m, True) <= min(taken) * (1 + 1e-9)
    assert ranks_of(schedule, p, v) == table.ranks


@given(st.sampled_from(EVERY), st.integers(2, 4), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(1, 9))
@settings(max_examples=60)
def test_many_at_once_take_what_each_takes(
    kind: tuple[str, int], p: int, rounds: int, train: bool, overlap: bool, seed: int
):
    (schedule, v), m = kind, rounds * p
    table = build_timetable(schedule, p, m, v)
    every = [random_phases(seed + k, p * v) for k in range(7)]
    sizes = np.array([[astuple(x) for x in phases] for phases in every])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(makespan, "_AT_ONCE", 300)  # a few at a time
        found = follow_all(table, sizes, train, overlap_steps=overlap)
    alone = [compute_makespan(table, phases, train, overlap_steps=overlap) for phases in every]
    assert found.tolist() == pytest.approx(alone)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_plans_of_overlapping_steps_are_faster():
    batch = (torch.empty(64, 256),)
    pins = {"pp": 4, "dp": 1, "tp": 1, "schedule": "zb-2p", "microbatch_size": 4}

    def planned(**more: object):
        return partition(Layers(), cluster(64), batch, constraints=Constraints(**more))

    apart, over = planned(**pins), planned(**pins, overlap_steps=True)
    assert over.planned_only == ()
    assert over.estimate.step_time < 0.98 * apart.estimate.step_time
    assert sum(over.estimate.breakdown.values()) == pytest.approx(over.estimate.step_time)
    assert over.certificate.bound <= over.estimate.step_time * (1 + 1e-9)
    free = planned(overlap_steps=True)
    for schedule in ("1f1b", "zb-1p", "zb-2p"):
        pinned = planned(**{**pins, "schedule": schedule}, overlap_steps=True)
        assert free.certificate.bound <= pinned.estimate.step_time * (1 + 1e-9)
        assert free.estimate.step_time <= pinned.estimate.step_time * (1 + 1e-9)


def run_apart(program: str, folder: str, late: int) -> list[float]:
    """Two steps; the rank ``late`` ends neither before all others have."""
    engine = partitioner.Engine(Program.model_validate_json(program), seeded())
    rank, actions = engine.communicator.rank, engine._executor.actions
    index, finish = actions[-1]

    def last() -> None:
        others = [Path(folder) / f"{other}.{engine.steps}" for other in range(3) if other != rank]
        deadline = time.monotonic() + 60
        while rank == late and not all(path.exists() for path in others):
            assert time.monotonic() < deadline, f"ranks wait in step {engine.steps} for rank {rank} to end"
            time.sleep(0.002)
        finish()

    actions[-1] = index, last
    losses = []
    for step in range(2):
        loss = engine.step((batch_of_ones(),))
        assert loss is not None
        losses.append(loss.item())
        (Path(folder) / f"{rank}.{step}").touch()
    return losses


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def batch_of_ones() -> torch.Tensor:
    return torch.ones(24, 256)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[partitioner.LocalRanks]:
    with partitioner.LocalRanks(3) as ranks:
        yield ranks


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-1p", "zb-2p", "zb-v", "dualpipe-v"])
def test_no_rank_waits_for_another_to_end(schedule: str, tmp_path: Path, three_ranks: partitioner.LocalRanks):
    """What is left for a rank to do behind its last gradients, others do not wait for: they have the loss."""
    chunks = 2 if schedule in ("interleaved", "zb-v", "dualpipe-v") else None
    pins = Constraints(pp=3, dp=1, tp=1, schedule=schedule, microbatch_size=4, virtual_stages=chunks)
    plan = partition(seeded(), Topology.local(3), (batch_of_ones(),), constraints=pins)
    expected = pytest.approx(seeded()(batch_of_ones()).item(), rel=1e-5)
    for late in range(3):
        folder = tmp_path / str(late)
        folder.mkdir()
        losses = three_ranks.call(run_apart, plan.program.model_dump_json(), str(folder), late, timeout=120)
        assert losses == [[expected, expected]] * 3


def test_steps_whose_loss_is_scaled_do_not_overlap_yet():
    """In float16 all ranks say first whether their gradients are finite."""
    model, batch = Layers().half(), (torch.empty(64, 256, dtype=torch.float16),)
    pins = {"pp": 4, "dp": 2, "tp": 1, "microbatch_size": 4, "overlap_steps": True}
    for schedule, beyond in (("zb-2p", ("overlap_steps=True with precision=fp16",)), ("1f1b", ())):
        constraints = Constraints(**pins, schedule=schedule)
        plan = partition(model, Topology.preset("dgx-a100"), batch, constraints=constraints)
        assert plan.planned_only == beyond
