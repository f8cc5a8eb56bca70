"""Links that are not alike: patterns inside nodes, islands, slow nodes, dead cards, oversubscribed levels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.cost.call.collectives import collective_time
from partitioner.topology import Topology, axis_group, axis_groups, loads, stage_links
from partitioner.topology.fabric import least_cut, least_share
from partitioner.topology.groups import rank_grid, stage_capacity, stage_paces, stage_ranks
from partitioner.topology.hardware import COLLECTIVES
from partitioner.topology.network_cards import card_shares
from partitioner.topology.pair_links import group_of
from tests.helpers.island_topology import ISLANDS


def test_the_cube_mesh_has_double_single_and_no_links():
    node = Topology.preset("dgx-v100")
    assert [node.link(0, j).bandwidth for j in range(1, 8)] == [25e9, 25e9, 50e9, 50e9, 15.7e9, 15.7e9, 15.7e9]
    matrix = node.pattern_kinds[0][1]
    assert matrix.sum(axis=1).tolist() == [150e9] * 8  # six links of each device
    assert (matrix == matrix.T).all()


@pytest.mark.parametrize(("size", "measured"), [(2, 22.6e9), (4, 86e9), (8, 135e9)])
def test_groups_on_the_cube_mesh_reach_what_was_measured(size: int, measured: float):
    node = Topology.preset("dgx-v100")
    assert axis_group(node, {"dp": 8 // size, "tp": size}, "tp").bus_bandwidth == pytest.approx(measured, rel=0.05)


def test_a_pattern_holds_on_every_node():
    nodes = Topology.preset("dgx-v100", 3)
    assert nodes.link(16, 19) == nodes.link(0, 3)
    assert nodes.link(0, 8).bandwidth == 6.25e9  # two devices share a card
    assert [link.bandwidth for link in stage_links(nodes, {"pp": 3, "dp": 8})] == [6.25e9] * 2


def test_devices_that_no_links_join_talk_over_the_level():
    node = Topology.preset("dgx-v100")
    group = axis_group(loads("machine: dgx-v100"), {"pp": 4, "tp": 2}, "pp")
    assert group.tiers[0].level.name == "hybrid-cube-mesh"
    apart = group_of(node, np.array([0, 5]))
    assert apart.tiers[0].level.name == "pcie3"


def test_a_mesh_of_direct_links_is_slow_for_few():
    node = Topology.preset("mi300x")
    assert axis_group(node, {"dp": 4, "tp": 2}, "tp").bus_bandwidth == pytest.approx(0.7 * 64e9)
    assert axis_group(node, {"tp": 8}, "tp").bus_bandwidth == pytest.approx(0.7 * 448e9)


def test_islands_have_links_of_their_own():
    lab = loads(ISLANDS)
    assert [lab.link(0, 1).name, lab.link(8, 13).name, lab.link(8, 9).name] == ["nvlink4", "pcie3", "hybrid-cube-mesh"]
    whole = axis_group(lab, {"tp": 16}, "tp")
    assert [(t.level.name, t.ways) for t in whole.tiers][-1] == ("spine", 3)
    assert {g.tiers[0].level.name for g in axis_groups(lab, {"dp": 8, "tp": 2}, "tp")} == {
        "nvlink4",
        "hybrid-cube-mesh",
    }


def test_a_whole_island_may_be_left_out():
    lab = loads(ISLANDS).without("node2")
    assert [level.name for level in lab.levels] == ["nvlink4", "spine"]
    assert lab.link(0, 4).bandwidth == loads(ISLANDS).link(0, 4).bandwidth


def test_a_slow_node_slows_the_groups_it_is_in():
    slow = loads("machine: dgx-h100\nnodes: 4\nnode_overrides: {3: {network: 0.1}}")
    well = Topology.preset("dgx-h100", 4)
    mesh = {"pp": 2, "dp": 2, "tp": 8}
    assert slow.link(0, 24).bandwidth == pytest.approx(5e9)
    assert slow.link(0, 16) == well.link(0, 16)
    assert slow.link(24, 25) == well.link(24, 25)
    assert axis_group(slow, mesh, "tp") == axis_group(well, mesh, "tp")
    assert axis_group(slow, mesh, "dp").bus_bandwidth == pytest.approx(0.1 * axis_group(well, mesh, "dp").bus_bandwidth)
    assert len(axis_groups(slow, mesh, "dp")) == 2
    assert [link.bandwidth for link in stage_links(slow, {"pp": 4, "tp": 8})] == pytest.approx([50e9, 50e9, 5e9])


def test_devices_of_a_dead_card_share_the_next():
    hurt = loads("machine: dgx-h100\nnodes: 2\nnode_overrides: {1: {dead_nics: 1}}")
    assert hurt.network_share.tolist() == [1.0] * 14 + [0.5, 0.5]
    whole = {"dp": 16}
    well = axis_group(Topology.preset("dgx-h100", 2), whole, "dp").tiers[1].level.bandwidth
    assert axis_group(hurt, whole, "dp").tiers[1].level.bandwidth == pytest.approx(7 / 8 * well)  # together
    assert axis_group(hurt, {"dp": 2, "tp": 8}, "dp").tiers[0].level.bandwidth == pytest.approx(25e9)  # one of eight


@given(st.integers(1, 16), st.integers(1, 16), st.data())
def test_cards_serve_no_more_than_they_have(devices: int, cards: int, data: st.DataObject):
    dead = frozenset(data.draw(st.sets(st.integers(0, cards - 1), max_size=cards - 1)))
    shares = card_shares(devices, cards, dead)
    assert (shares > 0).all() and (shares <= 1).all()
    assert not dead or devices % cards or shares.sum() / devices == pytest.approx(1 - len(dead) / cards)
    assert dead or (shares == 1).all()


def test_an_oversubscribed_level_is_divided():
    text = "machine: dgx-h100\nnodes: 4\nlevels:\n  - {like: nvlink4, nodes: 1}\n  - {like: ib-ndr, nodes: 2}\n"
    spine = loads(text + "  - {name: spine, like: ib-ndr, oversubscription: 4}")
    assert (spine.link(0, 8).bandwidth, spine.link(0, 16).bandwidth) == (50e9, 12.5e9)
    group = axis_group(spine, {"dp": 4, "tp": 8}, "dp")
    assert group.bus_bandwidth == pytest.approx(12.5e9 * 2 * 0.97)  # two ranks in each half bring a link


MEASURED = """
nodes: [{type: a100-80gb, count: 4}]
levels:
  - name: net
    bandwidth: 25 GB/s
    latency: 20 us
    all_reduce: [[2, 40 us, 20 GB/s], [4, 80 us, 18 GB/s]]
    all_gather: [[2, 30 us, 19 GB/s], [4, 60 us, 17 GB/s]]
    reduce_scatter: [[2, 30 us, 19 GB/s], [4, 60 us, 17 GB/s]]
    all_to_all: [[2, 50 us, 15 GB/s], [4, 90 us, 12 GB/s]]
"""


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("less", ["    oversubscription: 4\n", "node_overrides: {3: {network: 0.25}}\n"])
def test_what_was_measured_is_shared_too(op: str, less: str):
    plain, shared = (axis_group(loads(text), {"dp": 4}, "dp") for text in (MEASURED, MEASURED + less))
    start = collective_time(op, 0.0, plain)
    assert collective_time(op, 0.0, shared) == pytest.approx(start)
    assert collective_time(op, 1e9, shared) - start == pytest.approx(4 * (collective_time(op, 1e9, plain) - start))


def test_nodes_and_devices_that_differ_set_speed_and_memory():
    lab = loads(ISLANDS + "types: {old: {like: v100-16gb}}\n".replace("old", "spare"))
    assert [lab.devices[i].speed for i in (0, 4, 15)] == [1.0, 0.9, 0.5]
    few = loads("machine: dgx-h100\nnodes: 2\nnode_overrides: {1: {memory: 40 GB, speed: 0.5}}")
    groups = 2 * few.device_type(8).communicator  # along pp and dp
    assert stage_capacity(few, {"pp": 2, "dp": 8})[1] == few.devices[8].usable - groups < few.devices[0].usable - groups
    assert [{speed for _, speed in paces} for paces in stage_paces(few, {"pp": 2, "dp": 8})] == [{1.0}, {0.5}]


def test_hosts_prices_and_power_are_known():
    lab = loads(ISLANDS)
    host = lab.host(1)
    assert host is not None and host.memory == 2_000_000_000_000
    assert lab.host(2) is None
    assert lab.price_per_hour == pytest.approx(8 * 4.0 + 8 * 3.0)
    unpriced = loads("types: {x: {like: l4, price: null}}\nnodes: [{type: x}]")
    assert unpriced.price_per_hour is None


CLUSTERS = [
    loads(ISLANDS),
    loads("machine: dgx-v100\nnodes: 2\nnode_overrides: {1: {dead_nics: [0], network: 0.7}}"),
    loads("machine: mi300x\nnodes: 2\nnode_overrides: {0: {dead_nics: 2}}"),
]
MESHES = [(2, 2, 4), (4, 2, 2), (1, 2, 8), (2, 8, 1), (8, 1, 2), (1, 16, 1), (16, 1, 1)]


@settings(max_examples=60)
@given(st.sampled_from(CLUSTERS), st.sampled_from(MESHES), st.sampled_from([("pp",), ("dp",), ("tp",), ("dp", "tp")]))
def test_the_groups_that_are_told_apart_are_all_there_are(
    cluster: Topology, sizes: tuple[int, int, int], axes: tuple[str, ...]
):
    mesh = dict(zip(("pp", "dp", "tp"), sizes, strict=True))
    every = {group_of(cluster, row) for row in rank_grid(mesh, *axes) if len(row) > 1}
    found = axis_groups(cluster, mesh, *axes)
    assert {(g.bus_bandwidth, g.all_reduce_start) for g in found if g.size > 1} == {
        (g.bus_bandwidth, g.all_reduce_start) for g in every
    }


@settings(max_examples=30)
@given(st.sampled_from(CLUSTERS), st.sampled_from(MESHES))
def test_stages_talk_over_the_slowest_of_their_links(cluster: Topology, sizes: tuple[int, int, int]):
    mesh = dict(zip(("pp", "dp", "tp"), sizes, strict=True))
    stages = stage_ranks(mesh)
    for here, there, link in zip(stages, stages[1:], stage_links(cluster, mesh), strict=False):
        pairs = list(zip(here, there, strict=True))
        assert link.bandwidth == pytest.approx(min(rates_at_once(cluster, pairs)))
        assert link.bandwidth >= min(cluster.link(a, b).bandwidth for a, b in pairs)  # when all devices talk


def rates_at_once(cluster: Topology, pairs: list[tuple[int, int]]) -> list[float]:
    """Bytes/s of each pair, of which those between nodes share what a card has."""
    between, cards = cluster.levels[-1], cluster.cards
    far = [pair for pair in pairs if cluster.link(*pair).name == between.name]

    def got(device: int, end: int) -> float:
        mates = [d for d in range(cluster.num_devices) if cards.port[d] == cards.port[device]]
        card = sum(cluster.network_share[mates])
        return min(max(card, cards.alone[device]) / sum(pair[end] in mates for pair in far), cards.alone[device])

    whole = between.bandwidth / between.oversubscription
    return [whole * min(got(p[0], 0), got(p[1], 1)) if p in far else cluster.link(*p).bandwidth for p in pairs]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: c.name)
def test_links_between_devices_are_those_of_each_pair(cluster: Topology):
    chosen = list(range(16))[::-1]
    bandwidth, latency = cluster.links_between(chosen)
    links = [[cluster.link(i, j) for j in chosen] for i in chosen]
    assert bandwidth.tolist() == [[link.bandwidth for link in row] for row in links]
    assert latency.tolist() == [[link.latency for link in row] for row in links]


@settings(max_examples=50)
@given(st.integers(2, 6), st.data())
def test_the_least_cut_is_the_least_of_all(size: int, data: st.DataObject):
    upper = np.triu(
        np.array(data.draw(st.lists(st.integers(0, 3), min_size=size**2, max_size=size**2))).reshape(size, size), 1
    )
    matrix = (upper + upper.T).astype(float)
    cuts = []
    for side in range(1, 2 ** (size - 1)):
        inside = np.array([side >> k & 1 for k in range(size)], dtype=bool)
        cuts.append(matrix[np.ix_(inside, ~inside)].sum())
    assert least_cut(matrix) == min(cuts)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=6, max_size=6))
def test_the_least_share_is_that_of_the_weakest_part(members: list[tuple[int, int]]):
    parts, shares = np.array(members).T
    rows = least_share(parts.reshape(2, 3), shares.reshape(2, 3).astype(float))
    for row, found in enumerate(rows):
        sums: dict[int, int] = {}
        for part, share in members[3 * row : 3 * row + 3]:
            sums[part] = sums.get(part, 0) + share
        assert found == min(sums.values())
