"""Collectives at the ends of a step: gathers of parameters before first forwards, reductions of gradients after last
backwards, in the search for cuts into virtual stages and in its lower bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.schedules.makespan import Phases, compute_makespan, follow_all, longest_path
from partitioner.schedules.registry import build_timetable
from partitioner.solve.stages import improve_cuts
from partitioner.solve.stages.improve_cuts import better_cuts
from partitioner.solve.stages.problem import StageEnds, StageProblem
from partitioner.solve.stages.split import stage_plan
from partitioner.solve.stages.tables import StageTables
from partitioner.solve.stages.virtual_stages import phases_of, set_scheduled_in_flight
from partitioner.topology import loads
from tests.helpers.stage_problems import call, problem

pytestmark = pytest.mark.usefixtures("without_baselines")

SCHEDULES = [("interleaved", 2), ("zb-v", 2), ("zb-1p", 2), ("dualpipe-v", 2)]


def with_ends(phases: list[Phases], seed: int) -> list[Phases]:
    rng = np.random.default_rng(seed)
    ends = rng.choice([0.0, 0.5, 3.0, 9.0], (len(phases), 2)).tolist()
    return [replace(each, gathered=g, reduced=r) for each, (g, r) in zip(phases, ends, strict=True)]


def random_phases(seed: int, count: int) -> list[Phases]:
    sizes = np.random.default_rng(seed).uniform(0.5, 1.5, (count, 5)).tolist()
    return [Phases(f, i, w, v / 5, g / 5) for f, i, w, v, g in sizes]


@pytest.mark.parametrize("seconds", [0.5, 2.0, 7.0])
def test_ends_of_one_stage_by_hand(seconds: float):
    """Two ranks with two virtual stages each, forwards of 1 s and backwards of 2 s, no messages.

    Rank 0 begins the step with the first forward of stage 0, and ends it with its last backward. A gather of g seconds
    delays the end of that forward from 1 to max(1, g). A reduction of r seconds begins with that backward, so the step
    ends max(2, r) - 2 s later.
    """
    table, phases = build_timetable("interleaved", 2, 4, 2), [Phases(1.0, 1.0, 1.0)] * 4
    alone = compute_makespan(table, phases)
    gathered = [replace(phases[0], gathered=seconds), *phases[1:]]
    assert compute_makespan(table, gathered) == pytest.approx(alone + max(0.0, seconds - 1.0))
    reduced = [replace(phases[0], reduced=seconds), *phases[1:]]
    assert compute_makespan(table, reduced) == pytest.approx(alone + max(0.0, seconds - 2.0))


def test_collectives_of_a_rank_run_one_after_the_other():
    """Stages 0 and 2 are on rank 0, and a step takes 15 s. After the last backward of stage 2 begins, those of stages
    2, 1 and 0 run, 2 s each: its reduction may begin after 15 - 6 = 9 s. It takes 10 s, that of stage 0 takes 3 s:
    together 13 s from there.
    """
    table, phases = build_timetable("interleaved", 2, 2, 2), [Phases(1.0, 1.0, 1.0)] * 4
    assert compute_makespan(table, phases) == pytest.approx(15.0)
    both = [replace(phases[0], reduced=3.0), phases[1], replace(phases[2], reduced=10.0), phases[3]]
    assert compute_makespan(table, both) == pytest.approx(9.0 + 13.0)


@given(st.sampled_from(SCHEDULES), st.integers(2, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=80)
def test_paths_and_many_at_once_agree_with_the_makespan(kind: tuple[str, int], p: int, rounds: int, seed: int):
    (schedule, v), m = kind, rounds * p
    table = build_timetable(schedule, p, m, v)
    every = [with_ends(random_phases(seed + k, p * v), seed + k) for k in range(4)]
    taken = [compute_makespan(table, phases) for phases in every]
    assert follow_all(table, np.array([[astuple(x) for x in phases] for phases in every])).tolist() == (
        pytest.approx(taken)
    )
    for phases, seconds in zip(every, taken, strict=True):
        found, often = longest_path(table, phases)
        assert found == pytest.approx(seconds)
        assert (often * np.array([astuple(phase) for phase in phases])).sum() == pytest.approx(seconds)
        without = [replace(phase, gathered=0.0, reduced=0.0) for phase in phases]
        assert seconds >= compute_makespan(table, without) * (1 - 1e-9)
        for rank, stages in enumerate(table.held):
            reduced = sum(phases[k].reduced for k in stages)
            assert seconds >= reduced + min(phases[k].forward for k in stages), rank


def solved_by_hand(whole: StageProblem, tables: StageTables, schedule: str, p: int, v: int) -> float:
    """The least seconds over all cuts, each simulated by itself."""
    table, count = build_timetable(schedule, p, whole.num_microbatches, v), len(whole.calls)
    least = np.inf
    for inner in combinations(range(1, count), p * v - 1):
        plans = [stage_plan(tables, k, *pair) for k, pair in enumerate(pairwise((0, *inner, count)))]
        phases = [phases_of(whole, k, plan, ends=True) for k, plan in enumerate(plans)]
        least = min(least, compute_makespan(table, phases))
    return float(least)


@given(
    st.sampled_from(SCHEDULES),
    st.integers(2, 3),
    st.integers(1, 3),
    st.lists(st.floats(0.2, 3.0), min_size=7, max_size=9),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["listed", "too many", "all"]),
)
@settings(max_examples=60)
def test_no_cuts_with_ends_go_below_the_bound(
    kind: tuple[str, int], p: int, rounds: int, seconds: list[float], seed: int, how: str
):
    """The cuts that are left after pruning contain the best ones: if they are all tried, the result is the optimum."""
    (schedule, v), m = kind, rounds * p
    rng, calls = np.random.default_rng(seed), [call(k, forward, weights=0.9) for k, forward in enumerate(seconds)]
    of_rank = rng.choice([0.0, 0.2, 4.0], (p, 2))
    ranks = build_timetable(schedule, p, m, v).ranks
    ends = tuple(StageEnds(*(pace * np.array(seconds) for pace in of_rank[rank])) for rank in ranks)
    whole = problem(calls, p * v, m, schedule=schedule, chunks=v, bubble=0.5, ends=ends)
    whole = set_scheduled_in_flight(whole, schedule, p, v)
    tables = StageTables(whole)
    least = solved_by_hand(whole, tables, schedule, p, v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(improve_cuts, "_CLOSE", 0.0)
        patch.setattr(improve_cuts, "_ALL", 0 if how != "all" else 10**9)
        patch.setattr(improve_cuts, "_LISTED", 10**9 if how == "listed" else 0)
        start = (0, *sorted(rng.choice(np.arange(1, len(calls)), p * v - 1, replace=False).tolist()), len(calls))
        found = better_cuts(tables, build_timetable(schedule, p, m, v), start)
    assert found.bound <= least * (1 + 1e-9)
    assert found.cuts[0][0] >= least * (1 - 1e-9)
    if how != "too many":
        assert found.bound == pytest.approx(least)
        assert found.cuts[0][0] == pytest.approx(least)


class Tower(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def plan_of(network: float) -> Plan:
    """A plan of a pipeline of two stages on four nodes of two GPUs, one of which has ``network`` times the bandwidth.
    The first stage is on the node before it: the order of devices is fixed."""
    nodes = [{"type": "h100-sxm", "devices": 2, "count": 4}]
    levels = [{"like": "nvlink4", "nodes": 1}, {"like": "ib-ndr"}]
    topology: Topology = loads(
        yaml.safe_dump({"nodes": nodes, "levels": levels, "node_overrides": {0: {"network": network}}})
    )
    with torch.device("meta"):
        model = Tower(24, 4096)
    constraints = Constraints(
        pp=2, tp=1, schedule="zb-v", zero=1, microbatch_size=64, placement="in_order", execution="eager"
    )
    return partition(
        model, topology, {"x": torch.empty(4, 4096, device="meta")}, global_batch=2048, constraints=constraints
    )


def layers_of(plan: Plan) -> Iterator[int]:
    return (stage.num_calls for stage in plan.estimate.stages)


def test_ranks_behind_a_slow_card_get_fewer_layers():
    """The first stage's data-parallel group crosses the slow card. Its gradients take longer, so it gets fewer layers,
    and the step is faster than with the cuts of the cluster without the slow card."""
    fast, slow = plan_of(1.0), plan_of(0.05)
    first, second = layers_of(slow)
    assert first < second
    assert abs(int.__sub__(*layers_of(fast))) <= 2
    assert slow.certificate.bound <= slow.certificate.objective
