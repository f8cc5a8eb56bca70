"""The least that collectives take over any devices, and what that says of meshes that fit no level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner import Topology, partition
from partitioner.candidate import MeshCandidate
from partitioner.cost.call.collectives import collective_time
from partitioner.cost.step.relaxed_mesh import best_group, no_slower
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.search.bound_steps import BoundCascade
from partitioner.solve.search.space import build_search_space
from partitioner.solve.stages.split import SLACK
from partitioner.topology import loads
from partitioner.topology.group import select_slowest_group
from partitioner.topology.pair_links import group_of
from tests.helpers.linear_towers import Tower
from tests.helpers.placement_jobs import grid, job, times_of_all

pytestmark = pytest.mark.usefixtures("without_baselines")

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LEVELS = """
levels:
  - {name: inside, like: nvlink4, nodes: 1, only: [switched]}
  - {name: board, like: pcie4, nodes: 1, only: [board]}
  - {name: leaf, like: ib-ndr, nodes: 2}
  - {name: spine, bandwidth: 5 GB/s, latency: 25 us, oversubscription: 2}
"""
PATTERN = "patterns: {ring: {links: [{pairs: [[0, 1], [1, 2], [2, 3], [3, 0]], bandwidth: 40 GB/s}], latency: 5 us}}\n"


@st.composite
def clusters(draw: st.DrawFn) -> Topology:
    """Up to five nodes of one or two kinds, with two levels between them, of which one may have a slow card."""
    switched = (
        f"{{type: h100-sxm, island: switched, devices: {draw(st.integers(1, 4))}, count: {draw(st.integers(1, 3))}}}"
    )
    ring = draw(st.booleans())
    board = "{type: h100-sxm, island: board, devices: 4, pattern: ring, count: 2}"
    plain = f"{{type: h100-sxm, island: board, devices: {draw(st.integers(1, 3))}, count: {draw(st.integers(1, 2))}}}"
    slow = "node_overrides: {0: {network: 0.25}}\n" if draw(st.booleans()) else ""
    return loads(f"nodes: [{switched}, {board if ring else plain}]\n{LEVELS}{PATTERN if ring else ''}{slow}")


@settings(max_examples=60)
@given(clusters(), st.integers(2, 12), st.randoms(use_true_random=False))
def test_no_devices_communicate_faster_than_the_best_group(topology: Topology, size: int, random: Any):
    size = min(size, topology.num_devices)
    best = best_group(topology, size)
    for _ in range(30 if size > 1 else 0):
        devices = np.array(random.sample(range(topology.num_devices), size))
        group = group_of(topology, devices)
        for op in OPS:
            for num_bytes in (0.0, 1e4, 1e9):
                least = collective_time(op, num_bytes, best)
                assert least <= collective_time(op, num_bytes, group) * (1 + 1e-9), (devices, op, num_bytes)


@settings(max_examples=40)
@given(clusters(), st.integers(2, 12), st.randoms(use_true_random=False))
def test_of_groups_that_all_devices_are_in_none_is_slowest_that_is_faster(topology: Topology, size: int, random: Any):
    """However they are grouped: the slowest of the groups, over which their collectives are reckoned."""
    world = topology.num_devices
    size = max(n for n in range(1, size + 1) if world % n == 0)
    best = best_group(topology, size, everywhere=True)
    for _ in range(30 if size > 1 else 0):
        groups = np.array(random.sample(range(world), world)).reshape(-1, size)
        found = [group_of(topology, devices) for devices in groups]
        waited_for = select_slowest_group(found)
        for op in OPS:
            for num_bytes in (0.0, 1e4, 1e9):
                least = collective_time(op, num_bytes, best)
                assert least <= collective_time(op, num_bytes, waited_for) * (1 + 1e-9), (groups, op, num_bytes)


def test_a_group_of_all_devices_has_the_slow_one_in_it():
    slow = loads("machine: dgx-h100\nnodes: 4\nnode_overrides: {2: {network: 0.1}}\n")
    own = group_of(slow, np.arange(32))
    assert no_slower(own, best_group(slow, 32)) and no_slower(own, best_group(slow, 32, everywhere=True))
    of_16, everywhere = best_group(slow, 16), best_group(slow, 16, everywhere=True)
    assert collective_time("all_reduce", 1e9, everywhere) > 5 * collective_time("all_reduce", 1e9, of_16)


@pytest.mark.parametrize(("size", "devices"), [(8, range(8)), (12, [*range(6), *range(8, 14)]), (24, range(24))])
def test_of_devices_that_are_alike_it_is_one_that_there_is(size: int, devices: Any):
    topology = Topology.preset("dgx-h100", nodes=3)
    assert no_slower(group_of(topology, np.array([*devices])), best_group(topology, size))


@pytest.mark.parametrize(
    ("cluster", "mesh"),
    [
        (grid(2, 3), (3, 2, 1)),
        (grid(3, 2), (1, 2, 3)),
        (grid(2, 3), (1, 3, 2)),
        (grid(3, 2) + "overrides: {node1/0: {speed: 0.5}}", (3, 1, 2)),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-1p"])
def test_no_placement_is_below_what_is_said_of_a_point(cluster: str, mesh: tuple[int, int, int], schedule: str):
    """All permutations of the devices, judged by the same cost model."""
    pp, dp, tp = mesh
    if schedule != "1f1b" and pp == 1:
        return
    work = job(loads(cluster), 6)
    candidate = MeshCandidate(pp, dp, tp, 1, schedule)
    bounds, evaluator = ModelBounds(work), CandidateEvaluator(work)
    assert not evaluator.placements.complete(candidate.grid)
    space = build_search_space(work)
    bound = BoundCascade(bounds, evaluator, [candidate], space).bound_tightly(candidate)
    assert bound >= bounds.refine(candidate)
    assert bound <= min(times_of_all(work, candidate)) / (1 + SLACK) * (1 + 2 * SLACK)


def test_meshes_that_fit_no_level_leave_a_small_gap():
    """Of three nodes of eight: twelve ranks of dp are one and a half of them."""
    with torch.device("meta"):
        plan = partition(Tower(), Topology.preset("dgx-h100", nodes=3), (torch.empty(48, 256),), estimate_only=True)
    assert plan.certificate.gap < 0.15
