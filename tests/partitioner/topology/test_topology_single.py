"""Links that single pairs of devices have: their latency and bandwidth count, whichever numbers the devices have."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from partitioner import Constraints, PreparedModel, partition, prepare
from partitioner.cost.call.collectives import collective_time
from partitioner.topology import Topology, axis_group, axis_groups, loads, stage_links
from partitioner.topology.files import catalogue
from partitioner.topology.group import Group, round_lag
from partitioner.topology.groups import find_stage_link
from partitioner.topology.pair_links import group_of

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
RINGED = {"tp": 2, "dp": 2}
Links = dict[tuple[int, int], dict[str, str | float]]


def cluster(
    links: Links, level: str = "{name: pcie, bandwidth: 10 GB/s, latency: 10 us}", devices: int = 4
) -> Topology:
    given_links = [
        {"between": [f"node0/{i}", f"node0/{j}"], **own} for (i, j), own in links.items()
    ]  # JSON is YAML, too
    text = f"nodes: [{{type: a100-80gb, devices: {devices}}}]\nlevels: [{level}]\nlinks: {given_links!r}"
    return loads(text)


def pairs(first: str, second: str, bandwidth: str = "100 GB/s") -> Topology:
    of = {(0, 1): first, (2, 3): second}
    return cluster({pair: {"bandwidth": bandwidth, "latency": latency} for pair, latency in of.items()})


def times(group: Group) -> list[float]:
    return [collective_time(op, size, group) for op in OPS for size in (0.0, 1e4, 1e6, 1e9)]


@pytest.mark.parametrize("latencies", [("5 us", "5 ms"), ("5 ms", "5 us")])
def test_the_latency_of_each_single_link_counts(latencies: tuple[str, str]):
    topology = pairs(*latencies)
    assert len(axis_groups(topology, RINGED, "tp")) == 2
    assert axis_group(topology, RINGED, "tp").all_reduce_start >= 5e-3


def test_an_axis_waits_for_the_narrow_and_for_the_late():
    links: Links = {
        (0, 1): {"bandwidth": "100 GB/s", "latency": "5 ms"},
        (2, 3): {"bandwidth": "50 GB/s", "latency": "5 us"},
    }
    topology = cluster(links)
    every = axis_groups(topology, RINGED, "tp")
    assert times(axis_group(topology, RINGED, "tp")) == [max(each) for each in zip(*map(times, every), strict=True)]
    stages = {"pp": 2, "dp": 2}
    assert stage_links(topology, stages, [0, 2, 1, 3])[0].time(0) == pytest.approx(5e-3)
    assert find_stage_link(topology, stages, 0, 1, [0, 2, 1, 3]).time(1e12) > 20


def test_a_link_as_wide_as_its_level_keeps_its_latency():
    plain, late = pairs("10 us", "10 us", "10 GB/s"), pairs("10 ms", "10 ms", "10 GB/s")
    assert axis_group(plain, RINGED, "tp").one_way_start == pytest.approx(10e-6)
    assert axis_group(late, RINGED, "tp").one_way_start == pytest.approx(10e-3)


@pytest.mark.parametrize("like", ["pcie4", "nvlink4", "ib-ndr", "ethernet-10g", "loopback"])
def test_a_link_that_is_as_its_level_is_no_faster(like: str):
    level = catalogue("links")[like]
    own: Links = {(0, 1): {"bandwidth": level["bandwidth"], "latency": level["latency"]}}
    bare: Links = {(0, 1): {"bandwidth": level["bandwidth"]}}
    plain, single, unsaid = (cluster(links, f"{{like: {like}}}") for links in ({}, own, bare))
    two, all_four = np.array([0, 1]), np.arange(4)
    assert times(group_of(single, two)) == pytest.approx(times(group_of(plain, two)))
    assert single.link(0, 1).time(1e6) == unsaid.link(0, 1).time(1e6) == plain.link(0, 1).time(1e6)
    assert times(group_of(single, all_four)) == pytest.approx(times(group_of(plain, all_four)))


def test_a_link_may_say_how_efficient_it_is():
    links: Links = {(0, 1): {"bandwidth": "100 GB/s", "efficiency": 0.8}}
    topology = cluster(links, "{like: pcie4}")
    assert group_of(topology, np.array([0, 1])).bus_bandwidth == pytest.approx(80e9)
    assert loads(topology.to_yaml()) == topology
    chain = loads(
        "nodes: [{type: l40s, devices: 3}]\nlinks:\n"
        "  - {between: [node0/0, node0/1], bandwidth: 100 GB/s, efficiency: 0.5}\n"
        "  - {between: [node0/1, node0/2], bandwidth: 80 GB/s, efficiency: 0.9}\n"
    )
    assert group_of(chain, np.arange(3)).bus_bandwidth == pytest.approx(50e9)


def test_a_ring_passes_by_a_late_link_but_an_exchange_does_not():
    late: Links = {(0, 1): {"bandwidth": "1 GB/s", "latency": "10 ms"}}
    plain, topology = group_of(cluster({}), np.arange(4)), group_of(cluster(late), np.arange(4))
    assert topology.all_reduce_start == plain.all_reduce_start
    assert topology.bus_bandwidth == plain.bus_bandwidth
    assert collective_time("all_to_all", 0.0, topology) >= 10e-3
    assert collective_time("all_to_all", 16e9, topology) >= 1.0  # a sixteenth of it at 1 GB/s


def test_a_round_counts_each_late_hop_once():
    all_pairs = ~np.eye(4, dtype=bool)
    late = np.zeros((4, 4))
    late[0, 1:] = late[1:, 0] = 1.0  # whoever passes through device 0 comes and goes
    assert round_lag(late, all_pairs) == 2.0
    assert round_lag(np.ones((4, 4)), all_pairs) == 3.0
    halves = np.kron(1 - np.eye(2), np.ones((2, 2)))  # two pairs far apart
    assert round_lag(halves, all_pairs) == 2.0
    late[0, 1] = late[1, 0] = 0.0
    assert round_lag(late, all_pairs) == 1.0


@st.composite
def linked(draw: st.DrawFn, devices: int = 6) -> Links:
    own = st.fixed_dictionaries(
        {"bandwidth": st.sampled_from([1e9, 10e9, 40e9, 100e9]), "latency": st.sampled_from([0.0, 5e-6, 1e-5, 1e-3])},
        optional={"efficiency": st.sampled_from([0.5, 1.0])},
    )
    every = [(i, j) for j in range(devices) for i in range(j)]
    return draw(st.dictionaries(st.sampled_from(every), own, min_size=1, max_size=len(every)))


LEVELS = st.sampled_from(["{like: pcie4}", "{like: nvlink4}", "{name: x, bandwidth: 10 GB/s, latency: 10 us}"])
MESHES = st.sampled_from([{"tp": 2, "dp": 3}, {"tp": 3, "dp": 2}, {"tp": 6}, {"pp": 2, "dp": 3}, {"pp": 3, "tp": 2}])


@settings(max_examples=15)
@given(linked(), LEVELS, MESHES, st.permutations(range(6)))
def test_other_numbers_for_the_devices_change_nothing(
    links: Links, level: str, mesh: dict[str, int], numbers: list[int]
):
    renamed = {tuple(sorted((numbers[i], numbers[j]))): own for (i, j), own in links.items()}
    one, other = cluster(links, level, 6), cluster(renamed, level, 6)  # type: ignore[arg-type]
    for axis in mesh:
        found = times(axis_group(other, mesh, axis, devices=numbers))
        assert found == pytest.approx(times(axis_group(one, mesh, axis)))
    assert [(link.bandwidth, link.latency) for link in stage_links(other, mesh, numbers)] == [
        (link.bandwidth, link.latency) for link in stage_links(one, mesh)
    ]


@settings(max_examples=200)
@given(linked(), LEVELS, MESHES, st.data())
def test_more_latency_makes_no_collective_faster(links: Links, level: str, mesh: dict[str, int], data: st.DataObject):
    pair = data.draw(st.sampled_from(sorted(links)))
    later = float(links[pair]["latency"]) + data.draw(st.sampled_from([1e-6, 1e-5, 1e-2]))
    one, other = cluster(links, level, 6), cluster({**links, pair: {**links[pair], "latency": later}}, level, 6)
    for axis in mesh:
        before, after = times(axis_group(one, mesh, axis)), times(axis_group(other, mesh, axis))
        assert all(b <= a * (1 + 1e-9) for b, a in zip(before, after, strict=True))
    for before_link, after_link in zip(stage_links(one, mesh), stage_links(other, mesh), strict=True):
        assert before_link.latency <= after_link.latency


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).float().pow(2).mean()


@cache
def mlp() -> PreparedModel:
    with torch.device("meta"):
        return prepare(Mlp(), (torch.empty(4096, 1024),))


@pytest.mark.slow
@settings(max_examples=15)
@given(linked(4), st.permutations(range(4)))
def test_the_best_placement_takes_as_long_whatever_the_devices_are_called(links: Links, numbers: list[int]):
    renamed = {tuple(sorted((numbers[i], numbers[j]))): own for (i, j), own in links.items()}
    pinned = Constraints(tp=2, dp=2, pp=1)
    one, other = (
        partition(mlp(), cluster(own), estimate_only=True, constraints=pinned).estimate.step_time
        for own in (links, renamed)  # type: ignore[arg-type]
    )
    assert one == pytest.approx(other)


@pytest.mark.parametrize("placement", ["in_order", None])
def test_a_plan_takes_as_long_whichever_pair_is_late(placement: str | None):
    asked = {"tp": 2, "dp": 2, "pp": 1} | ({"placement": placement} if placement else {})
    steps = [
        partition(mlp(), pairs(*latencies), estimate_only=True, constraints=Constraints(**asked)).estimate.step_time
        for latencies in (("5 us", "5 us"), ("5 us", "5 ms"), ("5 ms", "5 us"))
    ]
    assert steps[1] == pytest.approx(steps[2])
    assert steps[0] < steps[1]
