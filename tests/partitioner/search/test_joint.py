"""Stages are cut for the whole step: what follows the pipeline counts as well."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner import Constraints, PlanError, Topology, partition, prepare
from partitioner.solve.evaluate import evaluate_placement as judge_module
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.split import SLACK, StageSplit, solve_stages
from partitioner.solve.stages.split_for_step import cut_for_step
from partitioner.solve.stages.tables import Table
from partitioner.topology.files import loads
from tests.helpers.stage_problems import by_hand, problems

pytestmark = pytest.mark.usefixtures("without_baselines")


def cuts_of(p: StageProblem) -> list[tuple[int, ...]]:
    """All ways of cutting that fit."""
    n = len(p.calls)
    ways = [(0, *inner, n) for inner in itertools.combinations(range(1, n), p.num_stages - 1)]
    ways = [cuts for cuts in ways if all(cuts[s] <= k < cuts[s + 1] for k, s in p.pinned.items())]
    return [cuts for cuts in ways if all(math.isfinite(t) for t in times_of(p, cuts))]


def times_of(p: StageProblem, cuts: tuple[int, ...]) -> list[float]:
    return [by_hand(p, s, cuts[s], cuts[s + 1])[0] for s in range(p.num_stages)]


@settings(max_examples=150)
@given(problems(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 3.0, 60.0]), st.sampled_from([0.5, 1.0, 1.2]))
def test_no_other_cuts_have_a_lesser_step(p: StageProblem, seed: int, scale: float, enough: float):
    """Any tails by stage and run: none of the cuts is below the bound, and the one found is as good as the best, but
    for what evenness may take of the pipeline; as far as steps below ``enough`` are asked for."""
    n = len(p.calls)
    tails: list[Table] = list(scale * np.random.default_rng(seed).random((p.num_stages, n + 1, n + 1)))
    ways = cuts_of(p)
    if not ways:
        return
    steps = {}
    for cuts in ways:
        times = times_of(p, cuts)
        behind = max(float(tails[s][cuts[s], cuts[s + 1]]) for s in range(p.num_stages))
        steps[cuts] = (p.num_microbatches - 1) * max(times) + sum(times) + behind
    best = min(steps.values())

    def price(split: StageSplit) -> tuple[float, None]:
        behind = (float(tail[s.start, s.stop]) for tail, s in zip(tails, split.stages, strict=True))
        return split.pipeline_s + max(behind), None

    found = cut_for_step(p, solve_stages, price, 0.0, lambda within_s: tails, enough * best)
    assert found.lower_bound_s <= best * (1 + 1e-9)
    assert found.step_s == pytest.approx(steps[0, *found.split.cuts, n])
    if enough > 1:
        assert found.step_s <= best * (1 + SLACK) + 1e-9
        assert found.lower_bound_s >= best * (1 - SLACK) - 1e-9
    else:
        assert found.lower_bound_s >= enough * best * (1 - SLACK) - 1e-9


class Uneven(nn.Module):
    """Layers that take long and have few weights, then layers with many."""

    def __init__(self, width: int = 1024, *, tied: bool = False) -> None:
        super().__init__()
        self.long = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.wide = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        if tied:
            self.wide[-1].weight = self.long[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.long:
            x = torch.relu(layer(x))
        x = x.mean(1)
        for layer in self.wide:
            x = torch.relu(layer(x))
        return x.square().mean()


def slow() -> Topology:
    """Four nodes of two devices over a slow network."""
    return loads(
        "nodes: [{type: a100-80gb, devices: 2, count: 4}]\n"
        "levels: [{like: nvlink3, nodes: 1}, {name: net, bandwidth: 5 GB/s, latency: 10 us}]\n"
    )


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "tied"])
def uneven(request: pytest.FixtureRequest) -> Any:
    with torch.device("meta"):
        return prepare(Uneven(tied=request.param), (torch.empty(64, 256, 1024),), precision="bf16")


@pytest.mark.parametrize(
    "pins",
    [
        {"schedule": "1f1b", "zero": 0},
        {"schedule": "1f1b", "zero": 1},
        {"schedule": "zb-1p", "virtual_stages": 1, "zero": 0},
    ],
    ids=["plain", "shared states", "zero bubble"],
)
def test_no_pinned_cut_beats_the_plan_or_its_bound(uneven: Any, pins: dict[str, Any]):
    """The pipeline alone would have as many calls of either kind of layer on a stage as take as long; reducing the
    gradients of those with many weights then takes longer than all else."""
    same = {"pp": 2, "dp": 4, "tp": 1, "microbatch_size": 4, **pins}
    topology = slow()
    free = partition(uneven, topology, constraints=Constraints(**same), estimate_only=True)
    names = [*(f"long.{k}" for k in range(2)), *(f"wide.{k}" for k in range(5))]
    steps = []
    for last, first in itertools.pairwise(names):
        places = {last: 0, first: 1}
        try:
            plan = partition(uneven, topology, constraints=Constraints(**same, stage_of=places), estimate_only=True)
        except PlanError:
            continue
        steps.append(plan.estimate.step_time)
    assert len(steps) == len(names) - 1
    assert free.estimate.step_time <= min(steps) * (1 + SLACK)
    assert free.certificate.bound <= min(steps) * (1 + 1e-9)
    assert free.certificate.gap <= SLACK


def test_what_runs_leave_behind_is_what_the_estimate_counts(uneven: Any, monkeypatch: pytest.MonkeyPatch):
    """Of the stages that are found: the seconds after the pipeline, in which the reductions of gradients are simulated,
    are the most that the update of one of their runs takes."""
    seen: list[tuple[float, float]] = []
    plain = judge_module.cut_for_step

    def watched(problem: Any, solve: Any, price: Any, least: float, tails: Any, enough: float, first: Any) -> Any:
        cut = plain(problem, solve, price, least, tails, enough, first)
        table = tails(math.inf)
        left = [float(table[s][stage.start, stage.stop]) for s, stage in enumerate(cut.split.stages)]
        estimate, _ = cut.priced
        parts = estimate.breakdown
        counted = sum(parts[kind] for kind in ("reduction", "optimizer"))
        assert least <= counted * (1 + 1e-9)
        assert max(left) <= counted * (1 + 1e-9)
        seen.append((max(left), parts["optimizer"]))
        return cut

    monkeypatch.setattr(judge_module, "cut_for_step", watched)
    for zero in (0, 1):
        pins = Constraints(pp=2, dp=4, tp=1, zero=zero, schedule="1f1b")
        partition(uneven, slow(), constraints=pins, estimate_only=True)
    assert len(seen) > 2
    assert all(most == pytest.approx(updated) for most, updated in seen)


@pytest.mark.parametrize("zero", [0, 1])
def test_no_run_is_left_within_a_step_that_is_too_short(uneven: Any, zero: int, monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    plain = judge_module.cut_for_step

    def watched(problem: Any, solve: Any, price: Any, least: float, tails: Any, enough: float, first: Any) -> Any:
        cut = plain(problem, solve, price, least, tails, enough, first)
        seen.extend(bool(np.isinf(table).all()) for part in (1e-6, 1e-3) for table in tails(part * cut.step_s))
        return cut

    monkeypatch.setattr(judge_module, "cut_for_step", watched)
    partition(uneven, slow(), constraints=Constraints(pp=2, dp=4, tp=1, zero=zero), estimate_only=True)
    assert seen
    assert all(seen)
