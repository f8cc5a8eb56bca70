"""Clusters as data: presets, files, links, and the groups that a mesh's ranks form."""

from __future__ import annotations

import re
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.errors import TopologyError
from partitioner.topology import Topology, axis_group, axis_groups, known_presets, loads, stage_links
from partitioner.topology.files import with_devices
from partitioner.topology.groups import rank_grid, stage_capacity, stage_paces
from partitioner.topology.quantities import parse_quantity
from tests.helpers.paths import ROOT

LAB = """
name: lab
types:
  big: {like: h100-sxm, memory: 94 GB}
nodes:
  - {type: big, devices: 2, count: 2}
  - {type: a100-80gb, devices: 2, names: [left, right]}
levels:
  - {name: nvlink, like: nvlink4, nodes: 1}
  - {name: network, bandwidth: 25 GB/s, latency: 19 us}
overrides: {left: {memory: 40 GB, speed: 0.5}}
links: [{between: [left, right], bandwidth: 300 GB/s, latency: 8 us}]
"""


CHAIN = """
nodes: [{type: a100-80gb, names: [a, b, c], devices: 3}]
links:
  - {between: [a, b], bandwidth: 100 GB/s, latency: 5 us}
  - {between: [b, c], bandwidth: 50 GB/s, latency: 5 us}
"""


def test_a_preset_has_its_devices_and_links_by_level():
    topology = Topology.preset("dgx-h100", nodes=2)
    assert (topology.num_devices, topology.num_nodes) == (16, 2)
    inside, between = topology.link(0, 7), topology.link(7, 8)
    assert (inside.name, inside.bandwidth) == ("nvlink4", 450e9)
    assert (between.name, between.bandwidth) == ("ib-ndr", 50e9)
    assert inside.time(450e9) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("name", known_presets())
@pytest.mark.parametrize("nodes", [1, 3])
def test_every_preset_survives_a_file(name: str, nodes: int):
    topology = Topology.preset(name, nodes)
    assert loads(topology.to_yaml()) == topology


def test_local_ranks_share_the_machine():
    one, four = Topology.local(1), Topology.local(4)
    assert four.num_devices == 4
    assert four.devices[0].memory == one.devices[0].memory // 4
    assert four.device_type(3).peak_of("fp32") == pytest.approx(one.device_type(0).peak_of("fp32") / 4)


def test_parse_reads_what_the_command_line_says(tmp_path: Path):
    assert Topology.parse("local:3").num_devices == 3
    assert Topology.parse("dgx-a100:2").num_devices == 16
    path = tmp_path / "lab.yaml"
    path.write_text(LAB)
    assert Topology.parse(str(path)).names == ("node0/0", "node0/1", "node1/0", "node1/1", "left", "right")


def test_a_file_may_name_a_machine():
    assert loads("machine: dgx-h100\nnodes: 4") == Topology.preset("dgx-h100", nodes=4)


def test_single_devices_and_links_may_differ():
    lab = loads(LAB)
    assert lab.devices[0].memory == 94_000_000_000
    assert lab.devices[4].memory == 40_000_000_000
    assert lab.link(4, 5).bandwidth == 300e9
    assert lab.link(1, 4).name == "network"
    assert stage_capacity(lab, {"pp": 3, "tp": 2})[2] < stage_capacity(lab, {"pp": 3, "tp": 2})[0]
    paces = stage_paces(lab, {"pp": 3, "tp": 2})
    assert paces == ((("big", 1.0),), (("big", 1.0),), (("a100-80gb", 0.5), ("a100-80gb", 1.0)))
    assert lab.paced_type("a100-80gb", 0.5).peak_of("bf16") == 156e12


def test_devices_without_a_common_level_talk_over_others():
    chain = loads(CHAIN)
    assert chain.link(0, 2).bandwidth == 50e9
    assert chain.link(0, 2).latency == pytest.approx(10e-6)
    assert axis_group(chain, {"tp": 3}, "tp").bus_bandwidth == 50e9


@pytest.mark.parametrize("text", [LAB, CHAIN, "machine: dgx-h100\nnodes: 3"])
def test_links_between_devices_are_those_of_each_pair(text: str):
    topology = loads(text)
    chosen = list(range(topology.num_devices))[::-1]
    bandwidth, latency = topology.links_between(chosen)
    links = [[topology.link(i, j) for j in chosen] for i in chosen]
    assert bandwidth.tolist() == [[link.bandwidth for link in row] for row in links]
    assert latency.tolist() == [[link.latency for link in row] for row in links]
    with pytest.raises(TopologyError, match="device 99 is outside"):
        topology.links_between([0, 99])


def test_the_graph_joins_devices_over_hubs():
    graph = Topology.preset("dgx-a100", nodes=2).graph()
    assert nx.is_connected(graph)
    assert sum(kind == "hub" for _, kind in graph.nodes(data="kind")) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "nodes: [{type: h100-sxm, devices: 2, names: [a, a]}]\nlevels: [{name: x, bandwidth: 1 GB/s}]",
            "duplicate device",
        ),
        (
            "nodes: [{type: h100-sxm, devices: 2, count: 2}]\nlevels: [{name: x, nodes: 1, bandwidth: 1 GB/s}]",
            "disconnected",
        ),
        ("machine: dgx-h100\noverrides:\n  node0/0: {memory: 0}", r"line 3.*memory.*greater than 0"),
        ("machine: dgx-h100\noverrides:\n  node0/9: {memory: 1 GB}", "unknown device 'node0/9'"),
        ("nodes: [{type: l40s}]\nlevels:\n  - {name: x, bandwidth: -1 GB/s}", r"line 3.*bandwidth.*greater than 0"),
        ("nodes: [{type: l40s}]\nlevels:\n  - {name: x, bandwidth: 1 GBit}", "line 3.*unknown unit 'GBit'"),
        ("nodes: [{type: gpu}]", "device type 'gpu' is not described"),
        ("nodes: [{type: l40s}]\nspeed: 3", "unknown key 'speed'"),
        ("nodes:\n  - type: [l40s", "line 2.*not valid YAML"),
        ("machine: dgx-h100\nlinks: []\nlinks: []", "line 3: duplicate name 'links'"),
        ("machine: dgx-h200\nnodes: 0", "expected at least 1"),
        ("- 1", "expected a mapping"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(text: str, message: str):
    with pytest.raises(TopologyError, match="(?s)" + message):
        loads(text, "cluster.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes:\n  - {type: l40s}\n  - {type: gpu}", r"line 3: nodes\.1\.type: device type 'gpu'"),
        ("nodes:\n  - {type: l40s, devices: 2, pattern: ring}", "line 2.*pattern 'ring' is not described"),
        (
            "nodes: [{type: l40s, devices: 2, pattern: p}]\npatterns:\n  p:\n    links:\n"
            "      - {bandwidth: 1 GB/s, pairs: [[0, 2]]}",
            r"line 5.*the pair \[0, 2\] on nodes of 2 devices",
        ),
        ("machine: dgx-h100\nnode_overrides:\n  1: {network: 0.1}", "line 3.*no node 1; nodes are numbered 0 to 0"),
        ("machine: dgx-h100\nnode_overrides:\n  0: {network: 0}", "line 3.*network.*greater than 0"),
        (
            "machine: dgx-h100\nnode_overrides:\n  0: {dead_nics: 9}",
            "line 3.*more cards than the node has; expected at most 8 cards",
        ),
        ("machine: dgx-h100\nnode_overrides:\n  0: {dead_nics: 8}", "line 3.*all 8 network cards of node 0 are broken"),
        (
            "nodes: [{type: l40s, devices: 2}]\nlevels:\n  - {like: pcie4, only: [old]}",
            "line 3.*only: 'old', but there are no such nodes; there are nodes of l40s",
        ),
        (
            "nodes: [{type: l40s, devices: 2}]\nlevels:\n  - {like: pcie9}",
            r"'pcie9' is unknown; did you mean pcie.*\? known are nvlink3",
        ),
        (
            "machine: dgx-h100\nlevels:\n  - {like: ib-ndr, oversubscription: 0.5}",
            "line 3.*oversubscription.*greater than or equal to 1",
        ),
        (
            "nodes:\n  - {type: l40s, host: {memory: 1 TB, bandwidth: 1 GB/s, disk: 1 TB}}",
            "line 2.*without disk_bandwidth",
        ),
        (
            "nodes: [{type: l40s, devices: 2}]\nlinks:\n  - {between: [node0/0, x], bandwidth: 1}",
            "line 3.*unknown device 'x'",
        ),
        ("types:\n  mine: {like: h900}\nnodes: [{type: mine}]", "line 2.*'h900' is unknown"),
        (
            "nodes:\n  - {type: l40s, host: dgx-9}",
            r"line 2.*'dgx-9' is unknown; (did you mean .*\? )?known are dgx-v100",
        ),
        ("machine: dgx-h10", r"line 1: unknown preset 'dgx-h10'; did you mean dgx-h100\? known are"),
        ("machine: dgx-h100\nnods: 2", r"line 2: unknown key 'nods'; did you mean nodes\? expected machine"),
        ("types:\n  t: {like: h100-smx}\nnodes: [{type: t}]", r"'h100-smx' is unknown; did you mean h100-sxm"),
        ("name: x\nmachine: dgx-9", "line 2.*unknown preset 'dgx-9'"),
        ("name: x\nspeed: 3\nnodes: [{type: l40s}]", "line 2.*unknown key 'speed'"),
        ("nodes: 5", "line 1.*nodes"),
        ("nodes:\n  - {type: [l40s]}", "line 2.*type"),
        ("nodes: [{type: l40s}]\ntypes: [3]", "line 2.*types"),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_line(text: str, message: str):
    with pytest.raises(TopologyError, match="(?s)cluster.yaml.*" + message):
        loads(text, "cluster.yaml")


PAIR = "nodes: [{type: h100-sxm, devices: 2}]\nlevels:\n  - {like: nvlink4}\n"
MINE = "nodes: [{type: mine}]\ntypes:\n  mine: {like: h100-sxm, %s}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PAIR + "  - {name: a, bandwidth: 5 us}", "line 4.*bandwidth: '5 us' measures time; expected bytes per second"),
        (
            PAIR + "  - {name: a, bandwidth: 1, latency: 1 GB/s}",
            "line 4.*latency.*measures bytes per second; expected t",
        ),
        (MINE % "memory: 80 TFLOP/s", "line 3.*measures operations per second; expected bytes, like 80 GB"),
        (MINE % "power_idle: 900 W, power_busy: 700 W", "line 3.*power_idle of 900 W above power_busy of 700 W"),
        (MINE % "price: 3 EUR/h", "line 3.*unknown unit 'EUR/h'; write it like 2.80 USD/h, the one unit of money"),
        (MINE % "matmul_efficiency: [[1 GB, 1]]", "line 3.*measures bytes; expected a number"),
        (MINE % "matmul_efficiency: [[64, 0.5], [64, 0.9]]", "line 3.*64 after 64; expected rows in order"),
        (MINE % "peak: {BF16: 1 TFLOP/s}", "line 3.*unknown precision 'BF16'; expected nvfp4, mxfp8, fp8, fp16"),
        (MINE % "peak: {bf17: 1 TFLOP/s}", "line 3.*unknown precision 'bf17'"),
        (MINE % "memory: 1 GB, reserved: 2 GB", "line 3.*left"),
        (MINE % "memory: .inf", "line 3.*inf is not a size of memory"),
        (MINE % "memory: 1e400 GB", "line 3.*inf is not a size of memory"),
        (MINE % "memory: 1e9999999999 GB", "line 3.*too large"),
        (MINE % "memory: .nan", "line 3.*nan is not a size of memory"),
        (MINE % "memory: true", "line 3.*true is not a number"),
        ("machine: dgx-h100\nnode_overrides:\n  0: {network: 5}", r"line 3.*network.*1 \(got 5\)"),
        ("machine: dgx-h100\nnode_overrides:\n  0: {dead_nics: -1}", "line 3.*the number of broken cards.*got -1"),
        (
            "machine: dgx-h100\nnode_overrides:\n  0: {dead_nics: some}",
            "line 3.*dead_nics: expected the number of broken cards",
        ),
        ("machine: dgx-h100\nnode_overrides:\n  0: {speed: .inf}", r"line 3.*finite number \(got inf\)"),
        ("nodes:\n  - {type: h100-sxm, devices: true}", "line 2.*true is not a number"),
    ],
)
def test_quantities_that_cannot_be_are_refused(text: str, message: str):
    with pytest.raises(TopologyError, match="(?s)cluster.yaml.*" + message):
        loads(text, "cluster.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("machine: dgx-h100\nnodes: true", "line 2.*their number, like 4; got True"),
        ("machine: dgx-h100\nnode_overrides:\n  0: {memory: 1 GB}", "line 3.*left"),
        ("machine: dgx-h100\noverrides:\n  node0/1: {memory: 1 GB}", "line 3.*left"),
        (
            "nodes: [{type: l40s, devices: 2, count: 2}]\nlevels:\n  - {like: ib-ndr}\n  - {like: nvlink4, nodes: 1}",
            "line 4.*'nvlink4' is never used: 'ib-ndr', listed before it.*from the inside out",
        ),
        (
            "nodes: [{type: l40s, devices: 2, count: 4}]\nlevels:\n  - {like: nvlink4}\n  - {like: ib-ndr}",
            "line 4.*'ib-ndr' is never used: 'nvlink4', listed before it.*nodes: 1 is inside each node",
        ),
        (
            "nodes: [{type: l40s, devices: 8, count: 2}]\nlevels:\n  - {like: pcie4, devices: 16}\n  - {like: ib-ndr}",
            "line 3.*'pcie4' joins every 16 devices of a node.*the largest node has 8; expected at most 8, or nodes: 2",
        ),
        ("nodes:\n  - {type: l40s, count: 100000000}", "100,000,000 devices; expected at most 1,048,576"),
        ("machine: dgx-h100\nnodes: 1000000", "8,000,000 devices; expected at most 1,048,576"),
        ("nodes: &x [*x]", "line 1: what stands here contains itself"),
        ("nodes: " + "[" * 3000, "nested too deeply"),
        ("name: \x00", r"not valid YAML: the character .* at place 6"),
        ("name: 2026-13-45", "not valid YAML: month must be in 1..12"),
        ("nodes:\n  - {type: H100}", "line 2: nodes.0.type: .*did you mean h100-sxm or h100-pcie.*one of v100-32gb"),
        ("nodes:\n  - {typ: l40s}", "line 2: nodes.0.typ: unknown key; did you mean type.*expected type, devices"),
        (PAIR + "links:\n  - {between: 3, bandwidth: 1}", r"line 5: links.0.between: expected a list.*got 3"),
        (PAIR + "node_overrides:\n  x: {speed: 1}", r"line 5: node_overrides.x: expected a whole number \(got 'x'\)"),
        (
            "nodes:\n  - {type: l40s, host: {memory: 1 TB}}",
            "line 2: nodes.0.host.bandwidth: missing; give it",
        ),
        (
            "nodes: [{type: l40s, names: [a, b], devices: 2}]\nlinks:\n  - {between: [a, b], bandwidth: 1}\n"
            "  - {between: [b, a], bandwidth: 2}",
            "line 4: links.1: a second link between 'b' and 'a'; give one for each pair",
        ),
        (
            "nodes: [{type: l40s, devices: 2, pattern: p}]\npatterns:\n  p:\n    links:\n"
            "    - {bandwidth: 1, pairs: [[0, 1]]}\n    - {bandwidth: 2, pairs: [[1, 0]]}",
            r"line 6: patterns.p.links.1.pairs: the pair \[1, 0\] twice; give it once",
        ),
        (
            "nodes: [{type: l40s, devices: 2, pattern: p}]\npatterns:\n  p:\n    links:\n"
            "    - {bandwidth: 1, pairs: [[0, 1]]}\n    - {bandwidth: 2, pairs: all}",
            "line 6: patterns.p.links.1.pairs: all comes after single pairs; list all first",
        ),
        (
            PAIR + "  - {name: a, bandwidth: 1, all_reduce: [[8, 1 us, 5 GB/s], [2, 1 us, 5 GB/s]]}",
            "line 4: levels.1.all_reduce: 2 after 8; expected rows in order of their first number, each once",
        ),
        (PAIR + "node_overrides:\n  0: 3", r"line 5: node_overrides.0: expected a mapping, like \{name: value\}"),
        (
            "nodes: [{type: l40s, devices: 2, pattern: p}]\npatterns:\n  p: {links: [{bandwidth: 1, pairs: some}]}",
            "line 3: patterns.p.links.0.pairs: expected all, or pairs of device indices in the node, like",
        ),
    ],
)
def test_files_that_cannot_be_are_refused_in_plain_words(text: str, message: str):
    with pytest.raises(TopologyError, match="(?s)cluster.yaml.*" + message):
        loads(text, "cluster.yaml")


def test_levels_of_the_same_extent_may_be_of_different_nodes():
    text = """
    nodes: [{type: l40s, devices: 2}, {type: l4, devices: 4}]
    levels: [{like: pcie4, nodes: 1, only: [l40s]}, {like: pcie3, nodes: 1, only: [l4]}, {like: ib-ndr}]
    """
    assert [loads(text).link(*pair).name for pair in ((0, 1), (2, 3), (1, 2))] == ["pcie4", "pcie3", "ib-ndr"]


def test_what_is_left_of_nodes_keeps_the_levels_that_it_has():
    levels = "[{like: nvlink4, devices: 2}, {like: nvlink3, devices: 4}, {like: pcie4, nodes: 1}]"
    whole = loads(f"nodes: [{{type: l40s, devices: 4}}]\nlevels: {levels}")
    pair = whole.without("node0/2", "node0/3")
    assert pair.link(0, 1).name == "nvlink4"
    assert loads(pair.to_yaml()) == pair
    smaller = with_devices(whole, 2)
    assert smaller is not None and smaller.link(0, 1).name == "nvlink4"


def test_what_is_no_text_is_refused(tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_bytes("name: \u00e9\nmachine: dgx-h100".encode("latin-1"))
    with pytest.raises(TopologyError, match=r"not UTF-8 text \(byte 6\); save it as UTF-8"):
        Topology.load(file)
    with pytest.raises(TopologyError, match=r"2\.5 nodes; expected at least 1, a whole number"):
        Topology.preset("dgx-h100", 2.5)  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="expected a number after the colon"):
        Topology.parse("dgx-h100:\u00b2")


def test_the_page_on_topologies_is_true():
    page = (ROOT / "docs" / "topology.md").read_text()
    whole, machine = (loads(text, "topology.md") for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    assert (whole.num_devices, whole.num_nodes) == (52, 7)
    assert whole.link(0, 48).bandwidth == 12.5e9  # its own
    assert whole.link(48, 50).name == "square"
    assert whole.link(0, 16).bandwidth == 12.5e9  # a spine shared by four
    assert whole.link(16, 24).bandwidth == 5e9  # a leaf, and a slow node
    assert loads(whole.to_yaml()) == whole
    assert machine.num_nodes == 16
    listed = set(re.findall(r"`([a-z0-9-]+)`", page.split("## Presets")[1].split("## Your own")[0]))
    assert set(known_presets()) <= listed


@pytest.mark.parametrize(
    ("name", "peak", "memory", "price"),
    [("dgx-h800", 989e12, 85_520_809_984, 4.0), ("tpu-v5p", 459e12, 95 * 2**30, 4.2), ("gaudi3", 1677e12, 128e9, 3.5)],
)
def test_presets_know_their_devices(name: str, peak: float, memory: int, price: float):
    kind = Topology.preset(name).device_type(0)
    assert (kind.peak_of("bf16"), kind.memory, kind.price) == (peak, memory, price)
    assert all(entry.price is not None and entry.power_busy is not None for entry in [kind])


def test_slices_of_tpus_are_joined_by_a_slower_network():
    slices = Topology.preset("tpu-v5e", nodes=128)
    assert [slices.link(0, j).name for j in (3, 255, 256)] == ["ici-v5e", "ici-v5e", "dcn"]
    cubes = Topology.preset("tpu-v4", nodes=32)
    assert [slices.link(0, 256).bandwidth, cubes.link(0, 64).bandwidth] == [6.25e9, 75e9]
    row, cube = axis_group(cubes, {"dp": 32, "tp": 4}, "tp"), axis_group(cubes, {"dp": 2, "tp": 64}, "tp")
    assert (row.bus_bandwidth, cube.bus_bandwidth) == (90e9, 270e9)  # two and six links of each chip


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(TopologyError, match="unknown preset 'dgx-z9'; known are dgx-v100, dgx-a100"):
        Topology.preset("dgx-z9")
    with pytest.raises(TopologyError, match="expected 'dgx-h100' here, and the number apart: nodes=2, or --nodes 2"):
        Topology.preset("dgx-h100:2")
    with pytest.raises(TopologyError, match="neither a file nor a known topology"):
        Topology.parse("dgx-z9:2")
    with pytest.raises(TopologyError, match=r"cannot read the topology 'missing\.yaml'"):
        Topology.parse("missing.yaml")


def test_quantities_have_units():
    assert parse_quantity("7.6 us") == 7.6e-6
    assert parse_quantity("80GiB") == 80 * 2**30
    assert parse_quantity("400 Gbit/s") == 50e9
    assert parse_quantity("989 TFLOP/s") == 989e12


@settings(max_examples=30)
@given(st.sampled_from([(1, 1, 8), (2, 2, 4), (4, 4, 1), (16, 1, 1), (1, 16, 1), (2, 8, 1), (1, 2, 8)]))
def test_groups_partition_the_ranks(sizes: tuple[int, int, int]):
    mesh = dict(zip(("pp", "dp", "tp"), sizes, strict=True))
    for axis, size in mesh.items():
        rows = rank_grid(mesh, axis)
        assert rows.shape[1] == size
        assert sorted(rows.ravel().tolist()) == list(range(sizes[0] * sizes[1] * sizes[2]))


def test_a_group_spans_the_levels_between_its_ranks():
    topology = Topology.preset("dgx-h100", nodes=2)
    mesh = {"pp": 1, "dp": 4, "tp": 4}
    assert [t.level.name for t in axis_group(topology, mesh, "tp").tiers] == ["nvlink4"]
    across = axis_group(topology, mesh, "dp")
    assert [(t.level.name, t.ways, t.below) for t in across.tiers] == [("nvlink4", 2, 1), ("ib-ndr", 2, 2)]
    # two ranks in each node bring two network cards
    assert across.bus_bandwidth == pytest.approx(2 * 50e9 * 0.97)
    assert [link.name for link in stage_links(topology, {"pp": 4, "tp": 4})] == ["nvlink4", "ib-ndr", "nvlink4"]


def test_the_slowest_group_of_an_axis_counts():
    lab = loads(LAB)
    assert len(axis_groups(lab, {"dp": 3, "tp": 2}, "tp")) == 2
    assert axis_group(lab, {"dp": 3, "tp": 2}, "tp").bus_bandwidth == pytest.approx(300e9 * 271 / 450)
    # of the link between left and right as much as was measured of NVLink 4, for which it stands
    with pytest.raises(TopologyError, match="a mesh of 8 ranks on the topology 'lab' of 6 devices"):
        axis_group(lab, {"dp": 8}, "dp")
