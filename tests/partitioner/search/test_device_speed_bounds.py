"""Bounds where devices differ: no division of work and no choice of pipelines beats them, nor does any plan."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.cost.step.device_speeds import PipelineSpeeds, least_forward_share, pool_of, work_and_speeds
from partitioner.passes.errors import PartitionError
from partitioner.schedules.makespan import Phases, compute_makespan
from partitioner.schedules.registry import build_timetable
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.search.bound_steps import BoundCascade
from partitioner.solve.search.search import search_for_plan
from partitioner.solve.search.space import build_search_space, list_candidates
from partitioner.topology.files import loads
from tests.helpers.placement_jobs import job

SPEEDS = st.sampled_from([0.25, 0.4, 0.5, 0.8, 1.0])


@st.composite
def pipelines(draw: st.DrawFn) -> list[list[float]]:
    """Speeds by stage, of some pipelines."""
    stages = draw(st.integers(1, 4))
    return draw(st.lists(st.lists(SPEEDS, min_size=stages, max_size=stages), min_size=1, max_size=4))


def step(speeds: list[float], work: np.ndarray[Any, np.dtype[np.float64]], n: int) -> float:
    """GPipe and 1F1B: seconds of ``n`` microbatches in a pipeline that divides the work like this."""
    times = work / np.array(speeds)
    return float((n - 1) * times.max() + times.sum())


def bound_of(of: list[list[float]], microbatches: int, plain: bool = True) -> float:
    ordered = np.array([sorted(speeds, reverse=True) for speeds in of])
    return PipelineSpeeds(ordered, np.ones(len(of), dtype=np.int64)).least(1.0, microbatches, plain=plain)


@settings(max_examples=200)
@given(pipelines(), st.lists(st.integers(1, 9), min_size=4, max_size=4), st.randoms(use_true_random=False))
def test_no_division_of_the_work_takes_less(of: list[list[float]], shares: list[int], random: Any):
    """However pipelines divide their microbatches and stages theirs; and the best division takes just as long."""
    shares = shares[: len(of)]
    ways = []
    for speeds, n in zip(of, shares, strict=True):
        some = np.array([random.random() ** 2 + 0.01 for _ in speeds])
        ways.append(step(speeds, some / some.sum(), n))
    assert bound_of(of, sum(shares), False) <= bound_of(of, sum(shares)) <= max(ways) * (1 + 1e-9)
    if len(of) == 1:
        order = np.argsort(-np.array(of[0]))
        best = min(
            step(
                of[0],
                np.where(np.isin(range(len(order)), order[:j]), of[0], 0) / np.sort(of[0])[::-1][:j].sum(),
                shares[0],
            )
            for j in range(1, len(order) + 1)
        )
        assert bound_of(of, shares[0]) == pytest.approx(best)


@settings(max_examples=100)
@given(pipelines(), st.integers(1, 30))
def test_no_choice_of_pipelines_takes_less(of: list[list[float]], more: int):
    groups = np.array(sorted(itertools.chain(*of)))
    speeds, counts = np.unique(groups, return_counts=True)
    pool = pool_of(speeds, counts, 1, len(of))
    for plain in (True, False):
        assert pool.least(1.0, len(of) + more, plain=plain) <= bound_of(of, len(of) + more, plain) * (1 + 1e-9)


@settings(max_examples=200)
@given(pipelines(), st.floats(0.0, 1.0), st.lists(st.integers(1, 9), min_size=4, max_size=4), st.randoms())
def test_no_division_fills_pipelines_in_less(of: list[list[float]], ahead: float, shares: list[int], random: Any):
    """A stage waits for the forwards before it, and then runs all of its microbatches."""
    work, taken = 1.0, []
    for speeds, n in zip(of, shares, strict=False):
        some = np.array([random.random() ** 2 for _ in speeds]) + 1e-3
        times = some / some.sum() * work / np.array(speeds)
        taken.append(float((ahead * (np.cumsum(times) - times) + n * times).max()))
    speeds_of, counts = np.unique(np.array(list(itertools.chain(*of))), return_counts=True)
    pool = pool_of(speeds_of, counts, 1, len(of))
    bound = pool.least(work, sum(shares[: len(of)]), plain=False, ahead=ahead)
    assert pool.least(work, sum(shares[: len(of)]), plain=False) <= bound * (1 + 1e-9)
    assert bound <= max(max(taken), max(0.5 * work / max(speeds) for speeds in of)) * (1 + 1e-9)


@settings(max_examples=100)
@given(st.lists(SPEEDS, min_size=2, max_size=4), st.integers(1, 8), st.sampled_from(["zb-1p", "zb-2p"]), st.randoms())
def test_no_simulated_pipeline_takes_less(speeds: list[float], n: int, schedule: str, random: Any):
    phases = [Phases(*((random.random() + 0.01) / speed for _ in range(3))) for speed in speeds]
    table = build_timetable(schedule, len(speeds), max(n, 1), 1)
    work = sum(phase.total * speed for phase, speed in zip(phases, speeds, strict=True))
    distinct, counts = np.unique(np.array(speeds), return_counts=True)
    ahead = min(phase.forward / phase.total for phase in phases)
    bound = pool_of(distinct, counts, 1, 1).least(work, n, plain=False, ahead=ahead)
    assert bound <= compute_makespan(table, phases) * (1 + 1e-9)


def test_filling_takes_time():
    """Two equal stages, two microbatches of 1 s each, of which a third is forward. A first stage with x seconds lets
    the second begin after x / 3, and it then takes 2 (1 - x): both end after 2 x if x = 6 / 11, after 12 / 11 s.
    """
    pool = pool_of(np.array([1.0]), np.array([2]), 1, 1)
    assert pool.least(1.0, 2, plain=False, ahead=1 / 3) == pytest.approx(12 / 11)
    assert pool.least(1.0, 2, plain=False) == pytest.approx(1.0)


@settings(max_examples=100)
@given(st.integers(1, 3), st.integers(1, 4), st.randoms())
def test_forwards_take_at_least_their_share(kinds: int, blocks: int, random: Any):
    both = np.array([[random.random() for _ in range(blocks)] for _ in range(kinds)])
    forward = both * np.array([[random.random() for _ in range(blocks)] for _ in range(kinds)])
    often = [random.randint(1, 4) for _ in range(blocks)]
    share, less = least_forward_share(forward, both, often)
    calls = [(random.randrange(kinds), block) for block, n in enumerate(often) for _ in range(random.randint(0, n))]
    assert sum(forward[at] for at in calls) >= share * sum(both[at] for at in calls) - less - 1e-12


def test_the_slowest_of_a_group_paces_it():
    pool = pool_of(np.array([0.5, 1.0]), np.array([3, 9]), 4, 1)
    assert pool.speeds.tolist() == [1.0, 0.5] and pool.counts.tolist() == [2, 1]


def test_shares_are_whole():
    """Ten microbatches, seven devices and one of half the speed: somebody has two, which takes two."""
    assert pool_of(np.array([0.5, 1.0]), np.array([1, 7]), 1, 8).least(1.0, 10, plain=True) == pytest.approx(2.0)


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_calls_take_no_less_than_their_work(rows: list[list[float]], random: Any):
    """Some of the calls on some kind: at its speed their work takes no longer, and all work is a bound of all of it."""
    seconds, often = np.array(rows), np.array([1, 4, 2])
    work, speeds = work_and_speeds(seconds, often.tolist())
    parts = np.array([[random.random() + 0.01 for _ in often] for _ in rows])
    parts = parts / parts.sum(axis=0) * often  # how often each kind does each block
    busy = (parts * seconds).sum(axis=1)
    assert work <= (busy * speeds).sum() * (1 + 1e-9)
    assert work <= busy.max() * speeds.sum() * (1 + 1e-9)


NODES = "nodes: [{{type: {}, devices: 2}}, {{type: {}, devices: {}}}]\n"
LEVELS = "levels: [{name: nvlink, like: nvlink3, nodes: 1}, {name: network, bandwidth: 5 GB/s, latency: 19 us}]\n"


@pytest.mark.parametrize(
    ("cluster", "every"),
    [
        (NODES.format("h100-sxm", "a100-80gb", 2) + LEVELS, 3),
        (NODES.format("h100-sxm", "l40s", 4) + LEVELS, 9),
        (NODES.format("a100-80gb", "a100-80gb", 6) + LEVELS + "overrides: {node1/2: {speed: 0.4}}\n", 11),
    ],
    ids=["two kinds", "a third are fast", "one is slow"],
)
def test_no_plan_on_devices_that_differ_is_below_its_bounds(cluster: str, every: int):
    work = job(loads(cluster), batch=12)
    bounds, evaluator = ModelBounds(work), CandidateEvaluator(work)
    space = build_search_space(work)
    candidates = list_candidates(space)
    floors = BoundCascade(bounds, evaluator, candidates, space)
    first, solved = floors.times(candidates), 0
    for candidate, quick in list(zip(candidates, first.tolist(), strict=True))[::every]:
        try:
            plan = evaluator.solve(candidate)
        except PartitionError:
            continue
        least = plan.estimate.step_time - (plan.stages.pipeline_s - plan.stages.lower_bound_s)
        assert quick <= least, candidate
        found = [bound(floors.members([candidate]), np.inf) for bound in floors.family_bounds]
        found += [bound(candidate, np.inf) for bound in floors.candidate_bounds]
        assert max(found) <= least, candidate
        assert floors.bound_tightly(candidate) <= least, candidate
        assert not floors.sharded.can_prune(candidate, least * (1 + 1e-9)), candidate
        solved += 1
    assert solved >= 10


def test_the_bound_counts_on_slow_devices_for_what_they_can():
    """Were all of them as fast as the fast ones, a step could take half as long."""
    types = "types: {fast: {like: h100-sxm, dispatch: 0}, slow: {like: a100-80gb, dispatch: 0}}\n"
    mixed = types + NODES.format("fast", "slow", 2) + "levels: [{like: nvlink3, nodes: 1}, {like: ib-ndr}]\n"
    certificate = search_for_plan(job(loads(mixed), batch=128)).certificate
    alike = search_for_plan(job(loads(mixed.replace("type: slow", "type: fast")), batch=128)).certificate
    assert alike.objective < 0.75 * certificate.bound
    assert certificate.gap < 0.2
