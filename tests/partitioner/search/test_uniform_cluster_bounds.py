"""Bounds where devices or nodes differ: as if all devices were as good as the best, the nodes in any order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from partitioner.candidate import MeshCandidate
from partitioner.passes.errors import PartitionError
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.evaluate.job import Job
from partitioner.solve.search.bound_steps import BoundCascade
from partitioner.solve.search.search import search_for_plan
from partitioner.solve.search.space import build_search_space
from partitioner.solve.search.uniform_cluster import BEST, UniformClusterBound, list_uniform_clusters
from partitioner.solve.stages.split import SLACK
from partitioner.topology import loads
from tests.helpers.placement_jobs import candidates, grid, job, times_of_all


def bounds_of(work: Any, candidate: MeshCandidate) -> tuple[float, float]:
    """What is said of a candidate where not all placements are tried: by nodes that are alike, and by all together."""
    evaluator = CandidateEvaluator(work)
    evaluator.tries_all = lambda _: False  # type: ignore[method-assign]
    bounds = ModelBounds(work, evaluator.placements)
    floors = BoundCascade(bounds, evaluator, [candidate], build_search_space(work))
    return UniformClusterBound(evaluator).least(candidate, math.inf), floors.bound_tightly(candidate)


@pytest.mark.slow
@settings(max_examples=25)
@given(candidates())
def test_no_placement_takes_less(drawn: tuple[Job, MeshCandidate]):
    work, candidate = drawn
    times = times_of_all(work, candidate)
    if not times:
        return
    try:
        alike, every = bounds_of(work, candidate)
    except PartitionError:
        pytest.fail("a candidate that has a plan is called infeasible")
    assert alike <= min(times) * (1 + 1e-9)
    assert every <= min(times) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("cluster", "mesh"),
    [
        (grid(3, 2) + "node_overrides: {1: {network: 0.1}}", (3, 2, 1)),
        (grid(3, 2) + "node_overrides: {1: {network: 0.1}, 2: {network: 0.5}}", (3, 1, 2)),
        (grid(2, 3) + "node_overrides: {1: {network: 0.1}}", (2, 3, 1)),
        (grid(3, 2) + "node_overrides: {0: {network: 0.2}}", (1, 6, 1)),
    ],
)
def test_where_links_alone_differ_it_is_what_the_best_placement_takes(cluster: str, mesh: tuple[int, int, int]):
    pp, dp, tp = mesh
    work = job(loads(cluster), 6)
    candidate = MeshCandidate(pp, dp, tp, 1)
    alike, every = bounds_of(work, candidate)
    least = min(times_of_all(work, candidate))
    # no bound knows by how much reductions beside the last backwards delay the stages before
    assert alike == pytest.approx(least, rel=5 * SLACK)
    assert max(alike, every) <= least * (1 + 1e-9)


def test_the_search_proves_plans_where_a_network_is_slow():
    """Eight devices: not all of their orders are tried, and none is better."""
    certificate = search_for_plan(job(loads(grid(4, 2) + "node_overrides: {2: {network: 0.1}}"))).certificate
    # stages may be evened out at that cost; what reductions beside the last backwards delay is in no bound
    assert certificate.gap <= 3 * SLACK


def test_nodes_that_are_evened_have_their_networks_in_all_orders():
    cluster = loads(
        grid(4, 2)
        + "overrides: {node0/0: {speed: 0.5, memory: 20 GB}}\nnode_overrides: {1: {network: 0.5}, 3: {network: 0.1}}"
    )
    made = list_uniform_clusters(cluster)
    assert len(made) == 4 * 3  # two nodes that differ, among four
    assert len({tuple(t.network_share.tolist()) for t in made}) == len(made)
    for topology in made:
        assert sorted(topology.network_share.tolist()) == sorted(cluster.network_share.tolist())
        assert {device.kind for device in topology.devices} == {BEST}
        assert topology.usable.tolist() == [int(cluster.usable.max())] * 8
        assert topology.types[BEST].peak == cluster.types["a100-80gb"].peak


def test_of_many_orders_the_best_two_nodes_stand_for_all():
    shares = {n: {"network": 0.1 + n / 20} for n in range(9)}
    (made,) = list_uniform_clusters(loads(grid(9, 1) + f"node_overrides: {shares}"))
    assert np.unique(made.network_share).tolist() == pytest.approx([0.1 + 7 / 20])


@pytest.mark.parametrize(
    "cluster",
    [
        "nodes: [{type: a100-80gb, devices: 2}, {type: a100-80gb, devices: 4}]\nlevels: [{like: ib-hdr}]",
        grid(2, 2) + "links: [{between: [node0/0, node1/0], bandwidth: 100 GB/s, latency: 1 us}]",
        "nodes: [{type: a100-80gb, devices: 2}, {type: h100-sxm, devices: 2}]\n"
        "levels: [{like: nvlink3, nodes: 1, only: [a100-80gb]}, {like: nvlink4, nodes: 1, only: [h100-sxm]}, "
        "{like: ib-hdr}]",
    ],
)
def test_nothing_is_said_of_nodes_that_have_other_shapes_or_links(cluster: str):
    assert list_uniform_clusters(loads(cluster)) == []
