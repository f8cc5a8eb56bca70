"""The ``topology`` view: nodes with their devices, coloured by pipeline stage, and a table of links by mesh axis.

Equal nodes with equal stages are drawn once with their number, so the size of the picture depends on the number of
distinct nodes, not on the number of ranks. The table lists the levels of links from the innermost, and shows which
levels the groups of each mesh axis use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import NDArray

from partitioner.draw.svg import (
    NUM_STAGE_COLOURS,
    Header,
    create_picture,
    draw_group,
    draw_header,
    draw_line,
    draw_rectangle,
    draw_text,
    draw_text_span,
    name_stage_colour,
    text_width,
    to_text,
)
from partitioner.plans.figures import VIEW_NAMES, mesh_text, view_title
from partitioner.plans.mesh_axes import AxisCell, _find_axis_uses, link_rows
from partitioner.topology.groups import stage_ranks
from partitioner.topology.hardware import Device
from partitioner.topology.topology import Topology
from partitioner.units import bytes_text, format_digits, format_percent, format_plural, format_ranges, seconds_text

if TYPE_CHECKING:
    from partitioner.plan import Plan

_ROW, _TABLE_HEAD, _COLUMN_SPACE = 26.0, 40.0, 26.0

_HEADS = ("links", "join", "bandwidth", "latency")


@dataclass(frozen=True)
class LinkTable:
    """Describes a table of the links of a topology: one row for each kind of link, and, for a plan, one column for each
    mesh axis.

    ``rows``: four texts for each row: name, what the link connects, bandwidth per device, latency. ``axes``: (heading,
    subheading) of each axis. ``cells``: (index of the row, index of the axis) -> how the groups of ranks along the axis
    use the link; a pair without an entry means that the groups do not use it.
    """

    rows: tuple[tuple[str, str, str, str], ...]
    axes: tuple[tuple[str, str], ...]
    cells: dict[tuple[int, int], AxisCell]

    @property
    def columns(self) -> list[float]:
        """Return the widths in pixels of the first four columns and of one column per axis."""
        fixed = [
            max([text_width(head, 11), *(text_width(row[i], 11, i == 0) for row in self.rows)]) + _COLUMN_SPACE
            for i, head in enumerate(_HEADS)
        ]
        return fixed + [
            max(
                [
                    text_width(head, 12, True),
                    text_width(sub, 10),
                    *(text_width(c.label, 10.5) + 18 for (_, k), c in self.cells.items() if k == i),
                ]
            )
            + 12
            for i, (head, sub) in enumerate(self.axes)
        ]

    @property
    def width(self) -> float:
        return sum(self.columns)

    @property
    def height(self) -> float:
        return _TABLE_HEAD + _ROW * len(self.rows) if self.rows else 0.0


def link_table(topology: Topology, plan: Plan | None) -> LinkTable:
    """Return a table with a row for each kind of link of ``topology``. If ``plan`` is not ``None``, the table has a
    column for each mesh axis with more than one rank, which shows the links that this axis communicates over.
    """
    rows = link_rows(topology)
    used = {} if plan is None else _find_axis_uses(plan)
    names = [row[0] for row in rows]
    for uses in used.values():
        for name in uses.cells:
            if name not in names:  # a route over other devices, or links of single pairs
                names.append(name)
                rows.append((name, "some pairs", "", ""))
    cells = {(names.index(name), k): cell for k, uses in enumerate(used.values()) for name, cell in uses.cells.items()}
    heads = tuple((f"{axis} {plan.mesh[axis]}" if plan else axis, uses.summary) for axis, uses in used.items())
    return LinkTable(tuple(rows), heads, cells)


def draw_links(root: ET.Element, table: LinkTable, x: float, y: float) -> None:
    """Draw ``table`` into ``root``. ``x``, ``y``: its top left corner in pixels."""
    if not table.rows:  # a single device
        return
    widths = table.columns
    lefts = [x + sum(widths[:i]) for i in range(len(widths))]
    for left, head in zip(lefts, _HEADS, strict=False):
        draw_text(root, left, y + 28, head, size=11, fill="muted")
    for left, (head, sub) in zip(lefts[4:], table.axes, strict=True):
        draw_text(root, left, y + 14, head, size=12, bold=True)
        draw_text(root, left, y + 28, sub, size=10, fill="muted")
    draw_line(root, x, y + _TABLE_HEAD - 5, x + table.width, y + _TABLE_HEAD - 5, "line")
    for number, row in enumerate(table.rows):
        base = y + _TABLE_HEAD + number * _ROW + 15
        for i, words in enumerate(row):
            draw_text(root, lefts[i], base, words, size=11, bold=i == 0, fill="ink" if i in (0, 2) else "muted")
        for k in range(len(table.axes)):
            cell = table.cells.get((number, k))
            if cell is not None:
                mark = draw_group(root, cell.tooltip, "hit")
                draw_rectangle(mark, lefts[4 + k], base - 13, widths[4 + k] - 12, 19, "memory", radius=9)
                draw_text(mark, lefts[4 + k] + 9, base, cell.label, size=10.5, fill="on_forward")


MOST_CLUSTERS = 40  # with more groups of nodes, nodes that differ only in their stages are drawn once, too

_MOST_DEVICES = 96  # with more devices in a node, they are not drawn one by one
_MOST_NOTES = 3
_WIDTH, _LEAST_WIDTH, _MARGIN, _GAP, _PAD = 1320.0, 760.0, 24.0, 16.0, 12.0
_BOX_WIDTH, _BOX_HEIGHT, _BOX_GAP = 42.0, 26.0, 6.0
_STAGE_SIZE, _STAGE_HEIGHT = 9.0, 11.0  # pixels of the letters and of the line of a stage's number in a box
_HEAD = 40.0
_LEGEND_STAGES = 16  # of more, the legend shows as many at about equal distances


def draw_plan_topology(plan: Plan) -> str:
    """Return a picture of the devices and links of ``plan`` as SVG text. Devices are coloured by pipeline stage."""
    return to_text(_TopologyScene(plan.topology, plan).draw_scene())


def draw_topology(topology: Topology) -> str:
    """Return a picture of the devices and links of ``topology`` as SVG text. Devices are coloured by type."""
    return to_text(_TopologyScene(topology, None).draw_scene())


@dataclass(frozen=True)
class DeviceBox:
    """Describes devices of one node that are drawn as one box. ``start``, ``stop``: the range ``[start, stop)`` of
    their indices in the topology. ``label``: the text in the box. ``colour``: name of a colour in ``PALETTE``, such as
    ``ink``. ``stage``: a second line of text that names the pipeline stage; empty if colours suffice to distinguish
    stages."""

    start: int
    stop: int
    label: str
    colour: str
    stage: str = ""


@dataclass(frozen=True)
class NodeCluster:
    """Describes equal nodes, of which only the first is drawn. ``nodes``: the indices of all of them. ``boxes``: the
    devices of the first node. ``title``, ``lines``: texts above the boxes. ``chords``: direct links between devices of
    a node, as (index of a box, index of another box, bytes per second).
    """

    nodes: tuple[int, ...]
    boxes: tuple[DeviceBox, ...]
    title: str
    lines: tuple[str, ...]
    chords: tuple[tuple[int, int, float], ...] = field(default=(), repr=False)  # two indices of boxes, bytes/s

    @property
    def alike(self) -> str:
        """Return a note that says which of several equal nodes is drawn, such as ``node 0 is shown, 1 of 16 alike``;
        empty for a single node, or if no devices are drawn.
        """
        return (
            f"node {self.nodes[0]} is shown, 1 of {len(self.nodes):,} alike"
            if len(self.nodes) > 1 and self.boxes
            else ""
        )

    @property
    def columns(self) -> int:
        """Return the number of device boxes side by side, if the devices of a node are drawn in rows."""
        count = max(1, len(self.boxes))
        return min(count, 4 if count <= 4 else 8 if count <= 32 else 12)

    @property
    def box_width(self) -> float:
        stages = [text_width(box.stage, _STAGE_SIZE) + 8 for box in self.boxes]
        return max([_BOX_WIDTH, *stages, *(text_width(box.label, 11) + 12 for box in self.boxes)])

    @property
    def box_height(self) -> float:
        return _BOX_HEIGHT + (_STAGE_HEIGHT if any(box.stage for box in self.boxes) else 0.0)

    @property
    def radius(self) -> float:
        """Return the radius in pixels of the ring on which devices are drawn, if the node has direct links."""
        return max(64.0, len(self.boxes) * (self.box_width + 28) / (2 * math.pi))

    @property
    def width(self) -> float:
        inner = 2 * self.radius + self.box_width
        if not self.chords:
            inner = self.columns * (self.box_width + _BOX_GAP) - _BOX_GAP
        words = [
            text_width(self.title, 13, True) + 8 + text_width(self.alike, 11),
            *(text_width(t, 11) for t in self.lines),
        ]
        return max(inner, *words) + 2 * _PAD

    @property
    def top(self) -> float:
        """Return the distance in pixels from the upper edge of a node's frame to its devices."""
        return _PAD + 17 + 15.5 * len(self.lines) + 6

    @property
    def height(self) -> float:
        if self.chords:
            return self.top + 2 * self.radius + self.box_height + _PAD
        return self.top + math.ceil(len(self.boxes) / self.columns) * (self.box_height + _BOX_GAP) - _BOX_GAP + _PAD

    def centres(self, x: float, y: float) -> list[tuple[float, float]]:
        """Return the centre (x, y), in pixels, of the box of each device (or range of devices) of a node. ``x``, ``y``:
        the top left corner of the node's frame.
        """
        if self.chords:
            middle = x + self.width / 2, y + self.top + self.radius + self.box_height / 2
            turns = [2 * math.pi * (i + 0.5) / len(self.boxes) - math.pi / 2 for i in range(len(self.boxes))]
            return [(middle[0] + self.radius * math.cos(t), middle[1] + self.radius * math.sin(t)) for t in turns]
        across, down = self.box_width + _BOX_GAP, self.box_height + _BOX_GAP
        left, top = x + _PAD + self.box_width / 2, y + self.top + self.box_height / 2
        return [(left + (i % self.columns) * across, top + (i // self.columns) * down) for i in range(len(self.boxes))]


class _TopologyScene:
    """Draws the devices and links of ``topology``. ``plan``: the plan by whose pipeline stages devices are coloured;
    ``None``: they are coloured by type.
    """

    def __init__(self, topology: Topology, plan: Plan | None) -> None:
        self.topology = topology
        self.plan = plan
        self.kinds = list(dict.fromkeys(d.kind for d in topology.devices))

    @cached_property
    def rank_of(self) -> NDArray[np.int64]:
        """Return the rank of each device, an array of shape ``[num_devices]``; -1 for devices without a rank."""
        ranks = np.full(self.topology.num_devices, -1)
        if self.plan is not None:
            ranks[list(self.plan.devices)] = np.arange(len(self.plan.devices))
        return ranks

    @cached_property
    def stage_of(self) -> NDArray[np.int64]:
        """Return the index of the pipeline stage of each device, an array of shape ``[num_devices]``; -1 for devices
        without a rank.
        """
        if self.plan is None:
            return np.full(self.topology.num_devices, -1)
        size = len(stage_ranks(self.plan.mesh)[0])
        return np.where(self.rank_of >= 0, self.rank_of // size, -1)

    def draw_scene(self) -> ET.Element:
        """Return the whole picture: header, table of links, and a frame with devices for each group of equal nodes."""
        clusters = self.cluster_equal_nodes()
        links = link_table(self.topology, self.plan)
        widest = max([_WIDTH, *(c.width + 2 * _MARGIN for c in clusters)])
        used = max(x + c.width for c, x, _ in _place_clusters(clusters, widest, 0.0)[0])
        width = max(_LEAST_WIDTH, used + _MARGIN, links.width + 2 * _MARGIN)
        header = Header(
            self.title, self.format_subtitle(clusters, links), self.list_key_figures(links), self.build_legend_entries()
        )
        top = draw_header(create_picture(width, 0, ""), header, width) + 8
        placed, bottom = _place_clusters(clusters, width, top + links.height + 22)
        root = create_picture(width, bottom + _MARGIN, self.title)
        draw_header(root, header, width)
        draw_links(root, links, _MARGIN, top)
        for cluster, x, y in placed:
            self.draw_node_cluster(root, cluster, x, y)
        return root

    @property
    def title(self) -> str:
        if self.plan is None:
            return f"{VIEW_NAMES['topology']} of {self.topology.name}"
        return view_title(self.plan, "topology")

    def format_subtitle(self, clusters: Sequence[NodeCluster], links: LinkTable) -> str:
        """Return the sentences below the title of the picture: what bandwidths and the numbers in the boxes of devices
        mean, and how many of all nodes are drawn. ``clusters``: the groups of equal nodes.
        ``links``: the table of links below.
        """
        numbers = " Numbers are ranks." if self.plan is not None else ""
        if self.stages_are_numbered:
            numbers = " Numbers are ranks, with their stages below them."
        if self.named and self.plan is not None:
            numbers = " Numbers are ranks, behind the names that devices have of their own."
        if any(len(c.nodes) > 1 for c in clusters):
            alike = "have the same devices" + ("" if self.plan is None else " and pipeline stages")
            numbers += f" {self.format_drawn_share(clusters)} nodes are shown: of the nodes that {alike}, the first."
        ring = " The bus bandwidth of an axis is that of its slowest all-reduce, as NCCL's tests report it."
        ring = ring if self.plan is not None and links.axes and any("bus" in sub for _, sub in links.axes) else ""
        return f"Bandwidths are per device and direction, when all devices transfer at once.{ring}{numbers}"

    def format_drawn_share(self, clusters: Sequence[NodeCluster]) -> str:
        """Return how many of the topology's nodes have their devices in the picture, as text such as ``1 of 16``.
        ``clusters``: the groups of equal nodes, of which only the first node is drawn.
        """
        return f"{sum(1 for c in clusters if c.boxes):,} of {self.topology.num_nodes:,}"

    def list_key_figures(self, links: LinkTable) -> list[tuple[str, str]]:
        """Return pairs (name, value) for the header of the picture: numbers of devices and nodes, types of devices,
        mesh and step time or price. ``links``: the table of links below the header.
        """
        topology = self.topology
        found = [("devices", f"{topology.num_devices:,}"), ("nodes", f"{topology.num_nodes:,}")]
        kinds = Counter(d.kind for d in topology.devices)
        found.append(("kinds", ", ".join(f"{count:,} × {kind}" for kind, count in kinds.most_common(3))))
        if self.plan is not None:
            found = [("topology", topology.name), *found, ("mesh", mesh_text(self.plan.mesh))]
            found.append(("step time", seconds_text(self.plan.estimate.step_time)))
        elif topology.price_per_hour is not None:
            found.append(("list price", f"{topology.price_per_hour:,.2f} USD/h"))
        return found

    def build_legend_entries(self) -> list[tuple[str, str]]:
        """Return pairs (name of a colour, meaning): one for each pipeline stage, or for each type of device without a
        plan.
        """
        if self.plan is None:
            return [(self.choose_stage_colour(self.kinds.index(kind)), kind) for kind in self.kinds]
        last = self.plan.mesh.get("pp", 1) - 1
        places = min(last, _LEGEND_STAGES - 1) or 1
        shown = dict.fromkeys(round(last * i / places) for i in range(places + 1))
        found = [(self.choose_stage_colour(s), f"stage {s}") for s in shown]
        return found + ([("idle", "no rank")] if (self.rank_of < 0).any() else [])

    def choose_stage_colour(self, number: int) -> str:
        """Return the name of the colour for ``number``, the index of a pipeline stage or, without a plan, of a device
        type.
        """
        return name_stage_colour(number, len(self.kinds) if self.plan is None else self.plan.mesh.get("pp", 1))

    @property
    def stages_are_numbered(self) -> bool:
        """Return whether boxes show the indices of their stages, because the stages are too many for colours that are
        easy to distinguish."""
        return self.plan is not None and self.plan.mesh.get("pp", 1) > NUM_STAGE_COLOURS

    def cluster_equal_nodes(self) -> list[NodeCluster]:
        """Return the nodes of the topology in groups whose nodes look the same in the picture: equal devices, links and
        bandwidth, and corresponding pipeline stages. Only the first node of a group is drawn. There are at most 40
        groups; one further entry without devices lists the nodes of all other groups.
        """
        firsts = np.flatnonzero(self.topology.place_of == 0)
        ends = [*firsts[1:].tolist(), self.topology.num_devices]
        spans = list(zip(firsts.tolist(), ends, strict=True))
        runs: dict[object, list[int]] = {}
        for exact in (True, False):
            runs = {}
            for node, (start, stop) in enumerate(spans):
                runs.setdefault(self.build_likeness_key(start, stop, exact), []).append(node)
            if len(runs) <= MOST_CLUSTERS:
                break
        shown = sorted(runs.values())
        return [self.as_cluster(nodes, spans) for nodes in shown[:MOST_CLUSTERS]] + self.cluster_left_out_nodes(
            shown[MOST_CLUSTERS:]
        )

    def cluster_left_out_nodes(self, left_out: Sequence[Sequence[int]]) -> list[NodeCluster]:
        """Return a list with one entry that only names nodes whose devices are not drawn, because there are too many
        groups of nodes. ``left_out``: for each of these groups, the indices of its nodes; if it is empty, so is the
        result.
        """
        if not left_out:
            return []
        nodes = sorted(n for nodes in left_out for n in nodes)
        return [
            NodeCluster(
                tuple(nodes), (), f"and {format_plural(len(nodes), 'further node')}", (f"nodes {format_ranges(nodes)}",)
            )
        ]

    def build_likeness_key(self, start: int, stop: int, exact: bool) -> object:
        """Return a key that is equal for two nodes if drawing one of them suffices: equal devices, links, bandwidth and
        pipeline stages. ``start``, ``stop``: the range ``[start, stop)`` of the indices of the node's devices.
        ``exact``: whether the stages must have the same indices. If it is false, stages are counted from the last stage
        of the node, so a node with the stages 0 and 1 and a node with the stages 2 and 3 have equal keys."""
        here = slice(start, stop)
        devices = self.topology.devices[here]
        stages = self.stage_of[here]
        if not exact:
            stages = np.where(stages >= 0, stages - max(0, int(stages.max(initial=0))), 1)
        traits = [self.topology.pattern_of[here], stages, self.topology.network_share[here].round(6)]
        kinds = tuple((d.kind, d.speed, d.memory) for d in devices)
        return (kinds if len(set(kinds)) > 1 else (kinds[0], len(kinds)), *(t.tobytes() for t in traits))

    def as_cluster(self, nodes: Sequence[int], spans: Sequence[tuple[int, int]]) -> NodeCluster:
        """Return the boxes, texts and links that are drawn once for several equal nodes. ``nodes``: the indices of
        these nodes. ``spans``: for each node of the topology, the range ``(start, stop)`` of the indices of its
        devices.
        """
        start, stop = spans[nodes[0]]
        return NodeCluster(
            nodes=tuple(nodes),
            boxes=tuple(self.generate_device_boxes(start, stop)),
            title=_format_numbered("Node", nodes),
            lines=tuple(self.generate_cluster_lines(nodes, spans)),
            chords=tuple(self.find_direct_links(start, stop)),
        )

    def generate_cluster_lines(self, nodes: Sequence[int], spans: Sequence[tuple[int, int]]) -> Iterator[str]:
        """Yield the lines of text above the devices of equal nodes: device types, stages and ranks, and notes.
        ``nodes``: indices of the nodes. ``spans``: for each node of the topology, the range ``(start, stop)`` of the
        indices of its devices.
        """
        start, stop = spans[nodes[0]]
        kinds = Counter(d.kind for d in self.topology.devices[start:stop])
        yield ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        if self.plan is not None:
            ranks = sorted(r for n in nodes for r in self.rank_of[slice(*spans[n])].tolist() if r >= 0)
            stages = sorted({s for n in nodes for s in self.stage_of[slice(*spans[n])].tolist() if s >= 0})
            if ranks:
                yield f"{_format_numbered('stage', stages)}, {_format_numbered('rank', ranks)}"
        yield from self.list_node_notes(start, stop)

    def list_node_notes(self, start: int, stop: int) -> list[str]:
        """Return at most three notes on what is unusual about a node: reduced network bandwidth, device speed or
        memory. ``start``, ``stop``: the range ``[start, stop)`` of the indices of the node's devices.
        """
        found = []
        shares = self.topology.cards.left[start:stop]
        if (shares < 1).any():
            found.append(f"network at {format_percent(float(shares.mean()))}")
        speeds = Counter(d.speed for d in self.topology.devices[start:stop])
        found += [
            f"{format_plural(n, 'device')} at {format_digits(s)} × speed" for s, n in sorted(speeds.items()) if s != 1.0
        ]
        memories = Counter(d.memory for d in self.topology.devices[start:stop] if self.is_other_memory(d))
        found += [f"{format_plural(n, 'device')} with {bytes_text(size)}" for size, n in sorted(memories.items())]
        return found[:_MOST_NOTES]

    def is_other_memory(self, device: Device) -> bool:
        """Return whether the memory of ``device`` differs from that of its device type."""
        return device.memory != self.topology.types[device.kind].memory

    def generate_device_boxes(self, start: int, stop: int) -> Iterator[DeviceBox]:
        """Yield the boxes of a node's devices: one for each device or, on nodes with more than 96 devices, one for each
        range of devices of one stage or type. ``start``, ``stop``: the range ``[start, stop)`` of the indices of the
        devices.
        """
        one_by_one = stop - start <= _MOST_DEVICES
        first = start
        for i in range(start + 1, stop + 1):
            if i == stop or one_by_one or self.get_drawn_trait(i) != self.get_drawn_trait(i - 1):
                stage = int(self.stage_of[first])
                numbered = f"stage {stage}" if stage >= 0 and self.stages_are_numbered else ""
                colour = self.choose_device_colour(first)
                yield DeviceBox(first, i, self.format_device_label(first, i), colour, numbered)
                first = i

    def get_drawn_trait(self, device: int) -> object:
        """Return what the colour of a device shows: its pipeline stage or, without a plan, its device type. ``device``:
        index of the device.
        """
        return self.topology.devices[device].kind if self.plan is None else int(self.stage_of[device])

    def choose_device_colour(self, device: int) -> str:
        """Return the name of the colour of a device: the colour of its pipeline stage, or ``idle`` if it has no rank.
        Without a plan it is the colour of its device type. ``device``: index of the device.
        """
        if self.plan is None:
            return self.choose_stage_colour(self.kinds.index(self.topology.devices[device].kind))
        return self.choose_stage_colour(int(self.stage_of[device])) if self.stage_of[device] >= 0 else "idle"

    def format_device_label(self, start: int, stop: int) -> str:
        """Return the text in a box: the devices' own names, and their ranks or, without a plan, their indices in the
        node. ``start``, ``stop``: the range ``[start, stop)`` of the indices of the box's devices.
        """
        named = [d.name for d in self.topology.devices[start:stop] if d.index in self.named]
        name = _shorten_ranges(" – ".join(dict.fromkeys((named[0], named[-1])))) if named else ""
        if self.plan is not None:
            of_ranks = _shorten_ranges(format_ranges([r for r in self.rank_of[start:stop].tolist() if r >= 0]) or "")
            return f"{name}: {of_ranks}" if name and of_ranks else name or of_ranks
        return name or format_ranges(self.topology.place_of[start:stop].tolist())

    @cached_property
    def named(self) -> frozenset[int]:
        """Return the indices of the devices for which the topology's description gives names."""
        sizes = [(g.devices * g.count, bool(g.names)) for g in self.topology.nodes]
        return frozenset(np.flatnonzero(np.repeat([own for _, own in sizes], [n for n, _ in sizes])).tolist())

    def find_direct_links(self, start: int, stop: int) -> Iterator[tuple[int, int, float]]:
        """Yield the direct links of a node as (index of a device in the node, index of another, bytes per second).
        Nothing is yielded if all pairs of devices have equal links, or if the node has more than 32 devices. ``start``,
        ``stop``: the range ``[start, stop)`` of the indices of its devices.
        """
        kind = int(self.topology.pattern_of[start])
        matrix = self.topology.pattern_kinds[kind][1] if kind >= 0 else np.zeros((0, 0))
        apart = matrix[~np.eye(len(matrix), dtype=bool)]
        if stop - start <= 32 and len(set(apart.tolist())) > 1:
            for i, j in np.argwhere(np.triu(matrix)).tolist():
                yield i, j, float(matrix[i, j])

    def draw_node_cluster(self, root: ET.Element, cluster: NodeCluster, x: float, y: float) -> None:
        """Draw the frame, texts, links and devices of ``cluster``, a group of equal nodes, into ``root``. ``x``, ``y``:
        the top left corner in pixels.
        """
        frame = draw_group(
            root, f"nodes {format_ranges(cluster.nodes)}" if len(cluster.nodes) > 1 else f"node {cluster.nodes[0]}"
        )
        draw_rectangle(frame, x, y, cluster.width, cluster.height, "panel", stroke="line", radius=9)
        title = draw_text(frame, x + _PAD, y + _PAD + 11, cluster.title, size=13, bold=True)
        if cluster.alike:
            draw_text_span(title, cluster.alike, size=11, fill="muted", gap=8)
        for i, words in enumerate(cluster.lines):
            draw_text(frame, x + _PAD, y + _PAD + 28 + 15.5 * i, words, size=11, fill="muted")
        centres = cluster.centres(x, y)
        widest = max((rate for _, _, rate in cluster.chords), default=1.0)
        for i, j, rate in cluster.chords:
            ends = f"{self.find_device_name(cluster, i)} – {self.find_device_name(cluster, j)}"
            joined = draw_group(root, f"{ends}: {format_digits(rate / 1e9)} GB/s")
            draw_line(joined, *centres[i], *centres[j], "memory", 1.0 + 2.4 * (rate / widest) ** 2)
        for box, (cx, cy) in zip(cluster.boxes, centres, strict=True):
            drawn = draw_group(root, self.format_box_tooltip(box), "hit")
            height = cluster.box_height
            left, top = cx - cluster.box_width / 2, cy - height / 2
            draw_rectangle(drawn, left, top, cluster.box_width, height, box.colour, stroke="line", radius=4)
            ink = "muted" if box.colour == "idle" else "on_stage"
            base = cy + 4 - (_STAGE_HEIGHT / 2 if box.stage else 0.0)
            draw_text(drawn, cx, base, box.label, size=11, fill=ink, anchor="middle")
            if box.stage:
                draw_text(drawn, cx, base + _STAGE_HEIGHT, box.stage, size=_STAGE_SIZE, fill=ink, anchor="middle")
            device = self.topology.devices[box.start]
            if box.colour != "idle" and (device.speed != 1.0 or self.is_other_memory(device)):
                draw_line(
                    drawn,
                    left + 3,
                    top + height - 4,
                    left + cluster.box_width - 3,
                    top + height - 4,
                    "tied",
                    2,
                )

    def find_device_name(self, cluster: NodeCluster, place: int) -> str:
        return self.topology.devices[cluster.boxes[place].start].name

    def format_box_tooltip(self, box: DeviceBox) -> str:
        """Return the tooltip of ``box``, a box for one or several devices: the device's name, type and memory, what is
        unusual about it, and its rank."""
        device = self.topology.devices[box.start]
        lines = [f"{device.name}: {device.kind}, {bytes_text(device.usable)} not reserved"]
        if box.stop - box.start > 1:
            lines[0] = f"{device.name} to {self.topology.devices[box.stop - 1].name}: {device.kind}"
        if device.speed != 1.0:
            lines.append(f"{format_digits(device.speed)} × the speed of its kind")
        if self.is_other_memory(device):
            whole = bytes_text(self.topology.types[device.kind].memory)
            lines.append(f"{bytes_text(device.memory)} of memory, where its kind has {whole}")
        share = float(self.topology.cards.left[box.start])
        if share < 1:
            lines.append(f"{format_percent(share)} of the bandwidth between nodes")
        rank = int(self.rank_of[box.start])
        if self.plan is not None and rank >= 0:
            place = ", ".join(f"{a} {n}" for a, n in self.plan.rank(rank).coordinates.items() if self.plan.mesh[a] > 1)
            lines.append(f"rank {rank}" + (f": {place}" if place else ""))
            if rank < len(self.plan.estimate.memory):
                lines.append(f"{bytes_text(self.plan.estimate.memory[rank])} of memory at the peak")
        return "\n".join(lines)


def _format_numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return ``noun`` and ``numbers`` as text, such as ``Nodes 0–3``; the noun gets an ``s`` if there are several
    numbers.
    """
    return f"{noun if len(numbers) == 1 else noun + 's'} {_shorten_ranges(format_ranges(numbers))}"


def _shorten_ranges(words: str, longest: int = 30) -> str:
    """Return ``words``, a text like ``0–3, 8–11``, cut to about ``longest`` characters; ``…`` stands for the rest."""
    if len(words) <= longest:
        return words
    kept = words[:longest].rsplit(",", 1)[0]
    return f"{kept}, …"


def _place_clusters(
    clusters: Sequence[NodeCluster], width: float, top: float
) -> tuple[list[tuple[NodeCluster, float, float]], float]:
    """Return ``clusters``, groups of equal nodes, with the x and y coordinates in pixels of their top left corners, row
    by row, and the y coordinate of the end of the last row. ``width``: pixels of a row. ``top``: y coordinate of the
    first row.
    """
    placed = []
    x, y, tallest = _MARGIN, top, 0.0
    for cluster in clusters:
        if x > _MARGIN and x + cluster.width > width - _MARGIN:
            x, y, tallest = _MARGIN, y + tallest + _GAP, 0.0
        placed.append((cluster, x, y))
        x += cluster.width + _GAP
        tallest = max(tallest, cluster.height)
    return placed, y + tallest
