"""Bounds on clusters of two classes of devices, over all ways to place the stages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from partitioner.candidate import MeshCandidate
from partitioner.passes.errors import PartitionError
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.evaluate.job import Job
from partitioner.solve.search.mixed_cluster import MixedClusterBound, PipelineSupply
from partitioner.solve.search.search import search_for_plan
from partitioner.topology import Topology, loads
from tests.helpers.placement_jobs import candidates, described, job, times_of_all


def least(work: Any, candidate: MeshCandidate, cutoff_s: float = math.inf) -> float:
    """The bound of a candidate, as where not all placements are tried."""
    evaluator = CandidateEvaluator(work)
    evaluator.tries_all = lambda _: False  # type: ignore[method-assign]
    return MixedClusterBound(evaluator).least(candidate, cutoff_s)


def two_kinds(h100: int, a100: int, devices: int = 1) -> Topology:
    """Nodes of H100 and of A100 with equal links; hosts take no time."""
    return loads(
        f"""
types: {{a100-80gb: {{like: a100-80gb, dispatch: 0, communicator: 0}},
         h100-sxm: {{like: h100-sxm, dispatch: 0, communicator: 0}}}}
nodes: [{{type: h100-sxm, devices: {devices}, count: {h100}, nics: {devices}}},
        {{type: a100-80gb, devices: {devices}, count: {a100}, nics: {devices}}}]
levels: [{{name: nvlink, like: nvlink3, nodes: 1}}, {{name: network, bandwidth: 100 GB/s, latency: 5 us}}]
"""
    )


@pytest.mark.slow
@settings(max_examples=60)
@given(candidates())
def test_no_placement_takes_less(drawn: tuple[Job, MeshCandidate]):
    work, candidate = drawn
    if not (times := times_of_all(work, candidate)):
        return
    try:
        bound = least(work, candidate)
    except PartitionError:
        pytest.fail("a candidate that has a plan is called infeasible")
    assert bound <= min(times) * (1 + 1e-9)


@pytest.mark.parametrize(("bandwidth", "share"), [(50.0, 0.1), (100.0, 0.3)])
def test_a_replica_with_good_links_is_not_bounded_by_the_links_of_another(bandwidth: float, share: float):
    """Two nodes have slow networks. Tensor parallelism crosses nodes, and takes most of the step."""
    nodes = {"kinds": ["h100-sxm"] * 2 + ["a100-80gb"] * 2, "per_node": 1, "memory": [80] * 4, "speed": [1.0] * 4}
    cluster = described(nodes | {"network": [1.0, 1.0, share, share], "bandwidth": bandwidth})
    work = job(cluster, 16, 8192)
    candidate = MeshCandidate(1, 2, 2, 1)
    assert 0 < least(work, candidate) <= min(times_of_all(work, candidate)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("mesh", "schedule", "virtual"),
    [((2, 2, 1), "zb-1p", 1), ((4, 1, 1), "1f1b", 1), ((1, 4, 1), "1f1b", 1), ((2, 1, 2), "zb-v", 2)],
)
def test_the_bound_is_near_the_best_placement(mesh: tuple[int, int, int], schedule: str, virtual: int):
    pp, dp, tp = mesh
    candidate = MeshCandidate(pp, dp, tp, 1, schedule=schedule, zero=1 if dp > 1 else 0, virtual_stages=virtual)
    work = job(two_kinds(2, 2))
    best = min(times_of_all(work, candidate))
    assert 0.85 * best <= least(work, candidate) <= best * (1 + 1e-9)


def test_a_pipeline_of_slow_devices_gets_fewer_microbatches():
    """Two pipelines of two stages run 6 microbatches. One with ``n`` fast stages takes ``3 - n`` seconds for each.

    Two fast groups: with one in each pipeline, both run 3 microbatches in 6 s. With both in one pipeline, it runs 5 in
    5 s, and the other 1 in 3 s. In less than 5 s they run at most 4 + 1, or 2 + 2.
    One fast group: its pipeline runs 4 microbatches in 8 s, and the other 2 in 6 s. In less than 8 s they run 3 + 2.
    """
    counts = [1, 2, 3, 4, 5]
    steps = np.array([[m * (3.0 - n) for n in range(3)] for m in counts])
    assert PipelineSupply(2, 2, 6).find_least_step(counts, steps) == 5.0
    assert PipelineSupply(2, 1, 6).find_least_step(counts, steps) == 8.0


def test_more_microbatches_than_the_pipelines_can_run_are_infinite():
    counts = [1, 2]
    steps = np.array([[1.0, 1.0], [math.inf, math.inf]])
    assert PipelineSupply(2, 2, 4).find_least_step(counts, steps) == math.inf
    assert PipelineSupply(2, 2, 2).find_least_step(counts, steps) == 1.0


@pytest.mark.parametrize(("pipelines", "total"), [(1, 12), (4, 12), (8, 400)])
def test_numbers_of_microbatches_end_with_the_most_of_one_pipeline(pipelines: int, total: int):
    counts = list(PipelineSupply(pipelines, 1, total).list_counts())
    assert counts == sorted(set(counts))
    assert counts[0] == (1 if pipelines > 1 else total)
    assert counts[-1] == total - pipelines + 1


def test_the_search_has_a_smaller_gap_with_the_bound(monkeypatch: pytest.MonkeyPatch):
    """Eight devices: not all of their placements are tried."""
    work = job(two_kinds(2, 2, 2))
    gap = search_for_plan(work).certificate.gap
    monkeypatch.setattr(MixedClusterBound, "least", lambda *_: 0.0)
    assert gap < 0.6 * search_for_plan(work).certificate.gap
