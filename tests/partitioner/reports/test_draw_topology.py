"""The ``topology`` view: devices by stage, nodes that are alike once, axes over links."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from partitioner.draw import draw
from partitioner.draw.topology import MOST_CLUSTERS, draw_topology, link_table
from partitioner.explain.tables import bandwidth_text
from partitioner.plan import Plan
from partitioner.plans.mesh_axes import axis_text
from partitioner.topology import Topology, loads
from tests.helpers.island_topology import ISLANDS
from tests.helpers.sample_programs import llama, plan_of
from tests.helpers.svg_texts import texts, tooltips

SVG = "{http://www.w3.org/2000/svg}"


def placed(topology: Topology, pp: int, dp: int, tp: int) -> Plan:
    return plan_of(llama(pp=pp, dp=dp, tp=tp, layers=2 * pp)).model_copy(update={"topology": topology})


def boxes(svg: str) -> list[tuple[float, float, float, float, str]]:
    """(left, top, width, height, colour) of the devices."""
    found = []
    for outer in ET.fromstring(svg).iter(f"{SVG}g"):
        for r in outer.findall(f"{SVG}rect") if outer.get("class") == "hit" else ():
            colour = (r.get("class") or "").split()[0]
            if colour.startswith(("f-stage", "f-gradient", "f-idle")):
                left, top, width, height = (float(r.get(k, 0)) for k in ("x", "y", "width", "height"))
                found.append((left, top, width, height, colour))
    return found


def test_devices_are_coloured_by_stage_and_numbered_by_rank():
    svg = draw(placed(Topology.preset("dgx-h100"), 4, 1, 2), "topology")
    assert [box[4] for box in boxes(svg)] == [f"f-stage_{s}" for s in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert [t for t in texts(svg) if t.isdigit()][-8:] == list("01234567")
    assert any("node0/3: h100-sxm" in t and "rank 3: pp 1, tp 1" in t for t in tooltips(svg))


def test_ranks_stand_on_the_devices_that_the_plan_gives_them():
    plan = placed(Topology.preset("dgx-h100"), 2, 1, 2).model_copy(update={"devices": (6, 4, 1, 0)})
    svg = draw(plan, "topology")
    assert [b[4] for b in boxes(svg)] == [
        *("f-stage_1", "f-stage_1", "f-idle", "f-idle", "f-stage_0", "f-idle", "f-stage_0", "f-idle")
    ]
    assert "no rank" in texts(svg)


def test_nodes_that_are_alike_are_drawn_once():
    small, large = (draw(placed(Topology.preset("dgx-h100", 4 * n), 4, n, 8), "topology") for n in (1, 64))
    assert len(boxes(large)) == len(boxes(small)) == 32
    assert any(re.fullmatch(r"Nodes 64–127\s*node 64 is shown, 1 of 64 alike", t) for t in texts(large))
    assert "4 of 256 nodes are shown" in " ".join(texts(large))
    assert "nodes are shown" not in " ".join(texts(small))
    assert "stage 1, ranks 512–1023" in texts(large)


def test_many_stages_are_drawn_as_one_node():
    svg = draw(placed(Topology.preset("dgx-h100", MOST_CLUSTERS + 8), MOST_CLUSTERS + 8, 1, 8), "topology")
    assert len(boxes(svg)) == 8
    assert f"stages 0–{MOST_CLUSTERS + 7}, ranks 0–{8 * MOST_CLUSTERS + 63}" in texts(svg)


def test_nodes_that_all_differ_are_counted_in_the_end():
    differ = ", ".join(f"{n}: {{speed: {0.5 + n / 200}}}" for n in range(60))
    svg = draw_topology(loads(f"machine: dgx-h100\nnodes: 60\nnode_overrides: {{{differ}}}"))
    assert "and 20 further nodes" in texts(svg)


def test_axes_stand_over_the_links_their_groups_span():
    table = link_table(Topology.preset("dgx-h100", 2), placed(Topology.preset("dgx-h100", 2), 2, 2, 4))
    cells = {(table.rows[row][0], table.axes[axis][0]): cell.label for (row, axis), cell in table.cells.items()}
    assert cells == {
        ("nvlink4", "dp 2"): "2 ranks, 450 GB/s per device",
        ("nvlink4", "tp 4"): "4 ranks, 450 GB/s per device",
        ("ib-ndr", "pp 2"): "1 hand-over, 50 GB/s per device",
    }
    over_both = link_table(Topology.preset("dgx-h100", 2), placed(Topology.preset("dgx-h100", 2), 1, 8, 2))
    labels = {cell.label for cell in over_both.cells.values()}
    assert {"4 ranks, 450 GB/s per device", "2 parts of 4 ranks, 50 GB/s per device"} <= labels


def test_the_table_of_links_and_the_summary_give_bandwidths_of_a_device():
    """A device has 450 GB/s inside its node and one card of 50 GB/s; eight of them share a node."""
    plan = placed(Topology.preset("dgx-h100", 2), 1, 16, 1)
    table = link_table(plan.topology, plan)
    assert [row[2] for row in table.rows] == ["450 GB/s per device", "50 GB/s per device"]
    assert {cell.label.rpartition(", ")[2] for cell in table.cells.values()} == {row[2] for row in table.rows}
    assert bandwidth_text(plan) == "nvlink4 450 GB/s, ib-ndr 50 GB/s per device and direction"
    assert "Bandwidths are per device and direction" in " ".join(texts(draw(plan, "topology")))


def test_many_stages_have_colours_and_numbers_of_their_own():
    for num_stages in (9, 16, 32):
        svg = draw(placed(Topology.preset("dgx-h100", num_stages), num_stages, 1, 8), "topology")
        colours = [box[4] for box in boxes(svg)]
        assert len(set(colours)) == num_stages
        assert sum(t == f"stage {num_stages - 1}" for t in texts(svg)) == 8 + 1  # on its devices, and in the legend
        by_stage = dict(
            zip([t for t in texts(svg) if re.fullmatch(r"stage \d+", t)][-len(colours) :], colours, strict=True)
        )
        assert read_legend(svg).items() <= by_stage.items() and len(read_legend(svg)) > 8
    crowded = draw(placed(Topology.local(256), 64, 2, 2), "topology")  # drawn as ranges of devices
    assert len(boxes(crowded)) == 64
    assert {f"stage {s}" for s in range(64)} <= set(texts(crowded))
    few = texts(draw(placed(Topology.preset("dgx-h100", 8), 8, 1, 8), "topology"))
    assert few.count("stage 7") == 1


def read_legend(svg: str) -> dict[str, str]:
    """The classes of the colours in the legend, by meaning."""
    head = next(g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("class") == "head")
    swatches = [(r.get("class") or "").split()[0] for r in head.iter(f"{SVG}rect")]
    return dict(zip([t.text or "" for t in list(head.iter(f"{SVG}text"))[-len(swatches) :]], swatches, strict=True))


def test_each_kind_of_groups_of_an_axis_is_named():
    """On nodes of four and twelve devices, the first two groups of eight ranks differ from each other: one has devices
    of both nodes, the other is inside the second."""
    nodes = "nodes: [{type: h100-sxm, devices: 4}, {type: h100-sxm, devices: 12}]"
    topology = loads(f"{nodes}\nlevels: [{{like: nvlink4, nodes: 1}}, {{like: ib-ndr}}]")
    text = axis_text(placed(topology, 1, 2, 8))
    assert "tp over nvlink4 and ib-ndr (2 nodes) in 1 group and inside a node (nvlink4) in 1 group" in text
    assert axis_text(placed(Topology.preset("dgx-h100", 2), 1, 2, 8)).startswith("tp inside a node (nvlink4), dp")


def test_what_differs_is_said():
    svg = draw_topology(loads(ISLANDS))
    shown = texts(svg)
    assert {"h100-sxm", "v100-32gb", "network at 50%", "4 devices at 0.9 × speed", "1 device at 0.5 × speed"} <= set(
        shown
    )
    assert "1.25 to 5 GB/s per device" in shown  # of 20 GB/s by 4: a card for four devices, to one for each
    assert any(t == "node2/0 – node2/3: 50 GB/s" for t in tooltips(svg))
    chords = [line for line in ET.fromstring(svg).iter(f"{SVG}line") if "s-memory" in (line.get("class") or "")]
    assert len(chords) == 16


def test_names_and_memory_of_single_devices_are_shown():
    topology = loads(
        "name: lab\nnodes: [{type: a100-80gb, devices: 2, names: [left, right]}]\n"
        "levels: [{like: nvlink3}]\noverrides: {left: {memory: 40 GiB}}\n"
    )
    plan = placed(topology, 1, 1, 2)
    for svg, labels in (
        (draw_topology(topology), {"left", "right"}),
        (draw(plan, "topology"), {"left: 0", "right: 1"}),
    ):
        assert labels <= set(texts(svg))
        assert "1 device with 40 GiB" in texts(svg)
        assert any("40 GiB of memory, where its kind has" in t for t in tooltips(svg))
    assert not any(":" in t for t in texts(draw(placed(Topology.preset("dgx-h100"), 1, 1, 8), "topology"))[-8:])


def test_large_nodes_are_drawn_in_runs():
    svg = draw(placed(Topology.local(256), 4, 8, 8), "topology")
    assert len(boxes(svg)) == 4
    assert "64–127" in texts(svg)


def test_devices_do_not_overlap_and_stay_inside():
    for topology in (loads(ISLANDS), Topology.preset("dgx-v100", 2), Topology.preset("gb200-nvl72", 3)):
        svg = draw_topology(topology)
        root = ET.fromstring(svg)
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        found = boxes(svg)
        for i, (left, top, wide, high, _) in enumerate(found):
            assert left > 0 and left + wide < width and top > 0 and top + high < height
            for other_left, other_top, other_wide, other_high, _ in found[i + 1 :]:
                apart_across = left + wide <= other_left or other_left + other_wide <= left
                assert apart_across or top + high <= other_top or other_top + other_high <= top


def test_a_single_device_has_no_table_of_links():
    """The head of the table is left out with its rows."""
    assert ">latency<" in draw_topology(Topology.local(2))
    assert ">latency<" not in draw_topology(Topology.local(1))
