"""Messages between ranks are priced by the links and network cards that each pair crosses, by hand arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.cost.call.collectives import collective_time, exchange_seconds, message_time
from partitioner.cost.call.operators import Operand
from partitioner.cost.step.placed_mesh import PlacedMesh
from partitioner.cost.step.relaxed_mesh import best_group, no_slower
from partitioner.passes.ops.attention import Band
from partitioner.plans.mesh_axes import rate_rows
from partitioner.runtime.program.mesh import AXES
from partitioner.solve.placement.regular import equal_levels, list_best_nestings
from partitioner.topology import Topology, axis_group, loads, stage_links
from partitioner.topology.groups import kinds_of
from partitioner.topology.hardware import NodeOverride
from partitioner.topology.pair_links import group_of

MIB = 2**20
ETHERNET = """
nodes: [{type: h100-sxm, devices: 8, count: 2%s}]
levels:
  - {like: nvlink4, nodes: 1}
  - {name: ethernet, bandwidth: 100 Gbit/s, latency: 30 us}
"""
ONE_CARD = loads(ETHERNET % ", nics: 1")
TWO_CARDS = loads(ETHERNET % ", nics: 2")
A_CARD_EACH = loads(ETHERNET % "")


def ring(topology: Topology, mesh: dict[str, int]):
    """The group of ``cp``, with its hops."""
    return PlacedMesh(topology, mesh).group("cp")


def test_a_ring_hop_between_nodes_is_one_pair_on_one_card():
    """Sixteen ranks on two nodes: rank 7 sends 256 MiB to rank 8 over one card of 50 GB/s, 268.4 MB / 50 GB/s =
    5.369 ms, and 19 us of latency. Inside a node a pair has 450 GB/s: 0.597 ms and 7.6 us."""
    two_nodes = Topology.preset("dgx-h100", 2)
    assert ring(two_nodes, {"cp": 16}).hop(1).time(256 * MIB) == pytest.approx(5.369e-3 + 19e-6, rel=1e-3)
    assert ring(two_nodes, {"dp": 2, "cp": 8}).hop(1).time(256 * MIB) == pytest.approx(0.597e-3 + 7.6e-6, rel=1e-3)


def test_a_hop_lasts_as_long_as_its_slowest_pair_however_far_it_goes():
    """Eight ranks in each of two nodes. A hop of 8 places sends all sixteen messages between the nodes, each on a card
    of its own: as long as one message. Back by 3 is as long as ahead by 13."""
    group = ring(Topology.preset("dgx-h100", 2), {"cp": 16})
    assert len(group.hops) == 8
    assert {hop.bandwidth for hop in group.hops} == {50e9}
    assert group.hop(-3) == group.hop(13) == group.hop(3)
    assert group.hop(16).time(MIB) == 0.0


def test_attention_in_a_ring_takes_a_hop_for_each_step():
    """Sixteen ranks, causal, keys and values of [1, 8, 8192, 128] in bf16: 2 x 16 MiB = 32 MiB on each rank.

    Forward 15 hops of 33.55 MB / 50 GB/s + 19 us = 690.1 us: 10.35 ms. Backward keys and values travel as often, and
    behind them their gradients in float32, 67.1 MB in 1361 us, which take one more hop to come home: 10.35 ms + 16 x
    1361 us = 32.13 ms.
    """
    query = Operand((1, 64, 8192, 128), torch.bfloat16)
    key = Operand((1, 8, 8192, 128), torch.bfloat16)
    group = ring(Topology.preset("dgx-h100", 2), {"cp": 16})
    forward, backward = exchange_seconds(query, key, key, Band(None, 0), "ring", True, group)
    assert forward == pytest.approx(10.35e-3, rel=1e-3)
    assert backward == pytest.approx(32.13e-3, rel=1e-3)


def test_a_window_sends_as_far_as_it_sees():
    """A window of one part: keys go one place, and their gradients one place back: 2 hops of gradients for 1 of keys.

    [1, 1, 512, 64] in float32 is 128 KiB, both 256 KiB: 262.1 kB / 50 GB/s + 19 us = 24.24 us.
    """
    key = Operand((1, 1, 512, 64), torch.float32)
    group = ring(Topology.preset("dgx-h100", 2), {"cp": 16})
    forward, backward = exchange_seconds(key, key, key, Band(511, 0), "ring", False, group)
    assert forward == pytest.approx(24.24e-6, rel=1e-3)
    assert backward == pytest.approx(3 * 24.24e-6, rel=1e-3)


@pytest.mark.parametrize(("topology", "rate"), [(ONE_CARD, 12.5e9 / 8), (TWO_CARDS, 12.5e9 / 4), (A_CARD_EACH, 12.5e9)])
def test_devices_share_the_cards_of_their_node(topology: Topology, rate: float):
    """100 Gbit/s is 12.5 GB/s a card: an eighth of it, a quarter or all for each of eight devices that all talk."""
    assert topology.link(0, 8).bandwidth == rate
    assert topology.network_share.tolist() == [rate / 12.5e9] * 16
    dp = axis_group(topology, {"dp": 2, "tp": 8}, "dp")
    assert dp.bus_bandwidth == rate  # eight groups of two, one device of each node
    both = axis_group(topology, {"dp": 16}, "dp")
    assert both.bus_bandwidth == min(8 * rate, 345e9 * 8 / 7)  # one group of all


@pytest.mark.parametrize(("topology", "ms"), [(ONE_CARD, 42.95), (TWO_CARDS, 21.47), (A_CARD_EACH, 5.369)])
def test_eight_sends_between_two_stages_share_the_cards_of_a_node(topology: Topology, ms: float):
    """Eight ranks of a node send 64 MiB = 67.1 MB each to their peers: 8 x 67.1 MB / 12.5 GB/s = 42.95 ms over one
    card, half of that over two, and 5.369 ms each on its own. All have 30 us of latency."""
    (link,) = stage_links(topology, {"pp": 2, "dp": 8})
    assert message_time(64 * MIB, link) == pytest.approx(ms * 1e-3 + 30e-6, rel=1e-3)


def test_who_sends_alone_has_the_whole_card():
    """Two stages in each of two nodes: from the second to the third four ranks send over one card, 12.5 / 4 GB/s each,
    though all eight would get 12.5 / 8. A ring of sixteen crosses with one pair: 12.5 GB/s. Of two rings side by side
    two pairs cross: 6.25 GB/s each."""
    links = stage_links(ONE_CARD, {"pp": 4, "tp": 4})
    assert [link.bandwidth for link in links] == [450e9, 12.5e9 / 4, 450e9]
    assert ring(ONE_CARD, {"cp": 16}).hop(1).bandwidth == 12.5e9
    assert ring(ONE_CARD, {"cp": 8, "tp": 2}).hop(1).bandwidth == 12.5e9 / 2
    assert ring(TWO_CARDS, {"cp": 8, "tp": 2}).hop(1).bandwidth == 12.5e9 / 2  # neighbours share a card


def test_more_cards_than_devices_are_several_for_each():
    """Four devices with eight cards of 12.5 GB/s: 25 GB/s each, also where one talks alone."""
    wide = loads("nodes: [{type: h100-sxm, devices: 4, count: 2, nics: 8}]\nlevels: [{like: ib-edr}]")
    assert wide.link(0, 4).bandwidth == 25e9
    assert stage_links(wide, {"pp": 8})[3].bandwidth == 25e9


def test_a_slow_node_and_a_dead_card_count_for_messages_too():
    """Devices 14 and 15 share a living card: each has half of it while both send, all of it alone. A node with a tenth
    of its network has a tenth of each card."""
    hurt = loads("machine: dgx-h100\nnodes: 2\nnode_overrides: {1: {dead_nics: 1}}")
    assert stage_links(hurt, {"pp": 2, "dp": 8})[0].bandwidth == 25e9
    assert stage_links(hurt, {"pp": 2}, [0, 15])[0].bandwidth == 50e9
    slow = loads("machine: dgx-h100\nnodes: 2\nnode_overrides: {1: {network: 0.1}}")
    assert stage_links(slow, {"pp": 2}, [0, 15])[0].bandwidth == pytest.approx(5e9)


def test_nestings_tell_apart_who_shares_a_card():
    """With two cards of four devices, stages of four ranks on one card cross it fourfold, on both twofold."""
    assert equal_levels(TWO_CARDS) == (4, 8, 16)
    mesh = {"pp": 4, "dp": 1, "cp": 1, "tp": 4}
    made = [devices for devices, _ in list_best_nestings(TWO_CARDS, mesh, (4, 8, 16))]
    rates = [tuple(link.bandwidth for link in stage_links(TWO_CARDS, mesh, devices)) for devices in made]
    assert (450e9, 12.5e9 / 2, 450e9) in rates
    assert (450e9, 12.5e9 / 4, 450e9) not in rates  # which is no better at anything


CLUSTERS = [
    ONE_CARD,
    TWO_CARDS,
    Topology.preset("dgx-h100", 2),
    loads("machine: dgx-h100\nnodes: 2\nnode_overrides: {1: {dead_nics: 1, network: 0.5}}"),
    loads(ETHERNET % ", nics: 3" + "links: [{between: [node0/0, node1/3], bandwidth: 40 GB/s, latency: 3 us}]"),
    Topology.preset("dgx-v100", 2),
]


@settings(max_examples=60)
@given(st.sampled_from(CLUSTERS), st.integers(2, 16), st.randoms(use_true_random=False))
def test_no_ring_is_faster_than_the_best_one(topology: Topology, size: int, random: object):
    """However its ranks are placed: bounds go by the best ring."""
    best = best_group(topology, size)
    for _ in range(10):
        devices = np.array(random.sample(range(16), size))  # type: ignore[attr-defined]
        _, (group,) = kinds_of(topology, devices[None], ring=True)
        assert len(group.hops) == len(best.hops) == size // 2
        for places in range(1, size):
            for num_bytes in (1.0, 1e9):
                least = best.hop(places).time(num_bytes)
                assert least <= group.hop(places).time(num_bytes) * (1 + 1e-9), (devices, places)


def test_a_ring_in_another_order_is_another_group():
    """The same sixteen devices: in turns from both nodes every pair crosses, four on each card, and hops of two
    places stay in their nodes."""
    in_turns = np.arange(16).reshape(2, 8).T.reshape(1, -1)
    _, (other,) = kinds_of(TWO_CARDS, in_turns, ring=True)
    _, (plain,) = kinds_of(TWO_CARDS, np.arange(16)[None], ring=True)
    assert group_of(TWO_CARDS, in_turns[0]) == group_of(TWO_CARDS, np.arange(16))
    assert (plain.hop(1).bandwidth, other.hop(1).bandwidth) == (12.5e9, 12.5e9 / 4)
    assert (plain.hop(2).bandwidth, other.hop(2).bandwidth) == (12.5e9 / 2, 450e9)
    assert not no_slower(other, plain) and not no_slower(plain, other)
    assert collective_time("all_gather", 1e9, plain) == collective_time("all_gather", 1e9, other)


@pytest.mark.parametrize("topology", [ONE_CARD, TWO_CARDS, Topology.preset("dgx-h100", 2)])
@pytest.mark.parametrize("sizes", [(1, 1, 16, 1), (1, 2, 4, 2), (2, 1, 4, 2), (2, 2, 2, 2), (1, 4, 2, 2)])
def test_of_groups_that_are_nested_the_first_stands_for_all(topology: Topology, sizes: tuple[int, ...]):
    mesh = dict(zip(AXES, sizes, strict=True))
    for devices, steps in list_best_nestings(topology, mesh, equal_levels(topology) or ()):
        one = PlacedMesh(topology, mesh, devices=devices, nested=steps)
        every = PlacedMesh(topology, mesh, devices=devices)
        assert one.stage_groups("cp") == every.stage_groups("cp")
        assert one.group("cp").hops and not one.group("cp").others


def test_the_topology_says_what_a_device_and_a_node_get():
    """One card of 100 Gbit/s is 12.5 GB/s for a node of eight devices; 2:1 oversubscribed, on a node with half of its
    network, 3.125 GB/s."""
    ethernet = ("ethernet", "all devices", "12.5 GB/s per card")
    assert rate_rows(ONE_CARD)[1] == (*ethernet, "1.56 GB/s", "12.5 GB/s", "30 µs")
    assert rate_rows(TWO_CARDS)[1] == (*ethernet, "3.12 GB/s", "25 GB/s", "30 µs")
    level = ONE_CARD.levels[1].model_copy(update={"oversubscription": 2.0})
    shared = ONE_CARD.changed(levels=(ONE_CARD.levels[0], level), node_overrides={1: NodeOverride(network=0.5)})
    assert rate_rows(shared)[1][2:5] == ("12.5 GB/s per card, 2:1", "0.391 to 0.781 GB/s", "3.12 to 6.25 GB/s")
    assert rate_rows(shared)[0] == ("nvlink4", "a node", "450 GB/s per device", "450 GB/s", "3,600 GB/s", "7.6 µs")
