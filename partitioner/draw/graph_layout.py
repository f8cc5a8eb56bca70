"""Layout of graphs: positions of boxes in layers by Graphviz, and orthogonal lines between panels.

``lay_out`` computes positions for boxes of given sizes with Graphviz. The boxes carry no text, so the result does not
depend on the fonts of a machine; the caller draws the contents.

``draw_wires`` draws lines between panels that are not adjacent. Panels are arranged in rows. A line leaves its panel at
the bottom, runs along a lane (one of the parallel lines) in the gutter, the space below the row, and enters the other
panel. A margin at the right holds the vertical parts of lines that pass a whole row. All angles are right angles, so
that many lines remain distinguishable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from partitioner.draw.svg import PALETTE, draw_group, draw_text, format_coordinate, text_width

_HEAD = 8.0  # pixels of an arrow head


def draw_arrowhead(parent: ET.Element, start: Point, tip: Point, colour: str) -> None:
    """Append a triangle to ``parent`` that ends a line. ``start``: a point (x, y) of the line. ``tip``: the end of the
    line, where the triangle's tip is. ``colour``: name of a colour in ``PALETTE``, such as ``ink``.
    """
    dx, dy = tip[0] - start[0], tip[1] - start[1]
    length = max(1e-6, (dx * dx + dy * dy) ** 0.5)
    ux, uy = dx / length, dy / length
    back = tip[0] - _HEAD * ux, tip[1] - _HEAD * uy
    corners = (tip, (back[0] - 3.6 * uy, back[1] + 3.6 * ux), (back[0] + 3.6 * uy, back[1] - 3.6 * ux))
    points = " ".join(_format_point(c) for c in corners)
    ET.SubElement(parent, "polygon", {"points": points, "fill": PALETTE[colour].light, "class": f"f-{colour}"})


def _format_point(point: Point) -> str:
    return f"{format_coordinate(point[0])},{format_coordinate(point[1])}"


_POINTS = 72.0  # Graphviz takes sizes in inches and gives positions in points; here a point is a pixel

Point = tuple[float, float]


@dataclass(frozen=True)
class DotLayout:
    """Describes positions of boxes and of the edges between them, in pixels with y downwards. ``boxes``: name of a box
    -> its top left corner (x, y). ``edges``: (name of the source box, name of the target box) -> the Bézier control
    points of the edge. ``width`` and ``height``: the size of the area that all of them take up.
    """

    boxes: dict[str, Point]
    edges: dict[tuple[str, str], tuple[Point, ...]]
    width: float
    height: float


def lay_out(
    sizes: Mapping[str, tuple[float, float]],
    edges: Sequence[tuple[str, str]],
    below: Sequence[tuple[str, str]] = (),
) -> DotLayout:
    """Return positions for boxes in layers from top to bottom, computed by Graphviz. ``sizes``: (width, height) in
    pixels of each box, by name. ``edges``: pairs (source, target) of names; a target is below its source. ``below``:
    pairs (upper, lower) of names of boxes that are placed below each other without an edge between them, so that fewer
    boxes are side by side.
    """
    if not sizes:
        return DotLayout({}, {}, 0.0, 0.0)
    import pygraphviz  # imported late: only a picture with boxes needs it

    drawing = pygraphviz.AGraph(string=dot_source(sizes, edges, below))
    drawing.layout(prog="dot")
    left, bottom, right, top = (float(v) for v in drawing.graph_attr["bb"].split(","))
    boxes, curves = {}, {}
    for name, (width, height) in sizes.items():
        x, y = _parse_point(drawing.get_node(name).attr["pos"])
        boxes[name] = (x - left - width / 2, top - y - height / 2)
    for source, target in edges:
        position = drawing.get_edge(source, target).attr["pos"]
        points = position.split()
        end = next((_parse_point(p[2:]) for p in points if p.startswith("e,")), None)
        curve = [_parse_point(p) for p in points if p[0] not in "es"] + ([end] if end else [])
        curves[source, target] = tuple((x - left, top - y) for x, y in curve)
    return DotLayout(boxes, curves, right - left, top - bottom)


def dot_source(
    sizes: Mapping[str, tuple[float, float]],
    edges: Sequence[tuple[str, str]],
    below: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the text in Graphviz's language DOT of a graph of boxes without labels. ``sizes``: (width, height) of each
    box in pixels, by name. ``edges``: pairs (source, target) of names.
    """
    import graphviz

    graph = graphviz.Digraph(
        graph_attr={"rankdir": "TB", "nodesep": "0.22", "ranksep": "0.32"},
        node_attr={"shape": "box", "fixedsize": "true", "label": ""},
    )
    for name, (width, height) in sizes.items():
        graph.node(name, width=f"{width / _POINTS:.4f}", height=f"{height / _POINTS:.4f}")
    for source, target in edges:
        graph.edge(source, target)
    for upper, lower in below:
        graph.edge(upper, lower, style="invis")
    return str(graph.source)


def _parse_point(text: str) -> Point:
    x, y = text.split(",")[:2]
    return float(x), float(y)


LANE = 27.0

_EMPTY, _RADIUS, _MARGIN_STEP, _LABEL_SIZE = 22.0, 8.0, 14.0, 11.0
# (start, width) of the part of a panel's side at which wires may end
_SIDES = {"top": (0.0, 0.4), "bottom": (0.4, 0.6)}


@dataclass(frozen=True)
class Wire:
    """Describes a line with a ``label`` between two panels of a picture. ``source``, ``target``: indices of the panels.
    ``colour``: name of a colour in ``PALETTE``, such as ``ink``. ``tooltip``: the text that browsers show under the
    pointer.

    ``heads``: 0 for a dashed line without arrow heads, 1 for an arrow head at the target, 2 for one at both ends.
    """

    source: int
    target: int
    colour: str
    label: str
    tooltip: str
    heads: int = 1


@dataclass(frozen=True)
class PanelBox:
    """Describes the position of a panel in a picture whose panels stand in rows. ``row``: index of the row, from the
    top. ``left``, ``width``, ``height``: in pixels. The upper edge of a panel is the upper edge of its row.
    """

    row: int
    left: float
    width: float
    height: float


@dataclass
class _WireRun:
    """Describes a horizontal segment of a wire in a gutter, the space below a row of panels. ``wire``: index of the
    wire. ``row``: index of the row above the gutter. ``start``, ``end``: x coordinates. ``lane``: which of the gutter's
    parallel lines, counted from its top. ``labelled``: whether the label of the wire is at this segment.
    """

    wire: int
    row: int
    start: float
    end: float
    lane: int = 0
    labelled: bool = True


@dataclass
class WireLanes:
    """Describes the horizontal lines (lanes) in the gutters between rows of panels along which wires (lines between
    panels) run, and the points at which wires leave and enter panels.

    ``boxes``: the position of each panel. ``wires``: all wires. ``right``: x coordinate at which the panels end.
    ``ends``: (index of a wire, whether at its target) -> x coordinate of that end. ``runs``: index of a wire -> its
    horizontal pieces. ``margins``: index of a wire between distant rows -> x coordinate of its vertical part beside the
    panels.
    """

    boxes: Sequence[PanelBox]
    wires: Sequence[Wire]
    right: float
    ends: dict[tuple[int, bool], float] = field(default_factory=dict)  # (wire, at its target) -> x
    runs: dict[int, list[_WireRun]] = field(default_factory=dict)
    margins: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._place_wire_ends()
        for index in range(len(self.wires)):
            self._build_wire_runs(index)
        self._assign_lanes()

    def height(self, row: int) -> float:
        """Return the height in pixels of the space below the panels of ``row`` (an index from the top), with room for
        its lanes (parallel lines along which wires run).
        """
        used = [run.lane + 1 for runs in self.runs.values() for run in runs if run.row == row]
        return _EMPTY + LANE * max(used, default=0)

    @property
    def width(self) -> float:
        """Return the x coordinate in pixels up to which panels and wires (lines between panels) extend."""
        return max([self.right, *(x + _MARGIN_STEP for x in self.margins.values())])

    def upper_first(self, index: int) -> tuple[int, int, bool]:
        """Return three values for the wire (a line between two panels) with the index ``index``: the index of its panel
        in the upper row, the index of its other panel, and whether the upper panel is the wire's target.
        """
        wire = self.wires[index]
        if self.boxes[wire.target].row < self.boxes[wire.source].row:
            return wire.target, wire.source, True
        return wire.source, wire.target, False

    def _place_wire_ends(self) -> None:
        """Compute the x coordinates at which wires (lines between panels) leave and enter panels, and store them in the
        attribute ``ends``: (index of a wire, whether at its target) -> x coordinate. The ends are spread over the lower
        or upper side of each panel, in the order of the panels at the other ends of the wires.
        """
        sides: dict[tuple[int, str], list[tuple[float, int, bool]]] = defaultdict(list)
        for index in range(len(self.wires)):
            upper, lower, swapped = self.upper_first(index)
            same = self.boxes[upper].row == self.boxes[lower].row
            for panel, other, at_lower in ((upper, lower, False), (lower, upper, True)):
                side = "top" if at_lower and not same else "bottom"
                sides[panel, side].append((self.boxes[other].left, index, at_lower != swapped))
        for (panel, side), users in sides.items():
            box = self.boxes[panel]
            # keeps apart wires that leave a panel and wires that enter the next panel of the column
            start, width = _SIDES[side]
            for place, (_, index, at_target) in enumerate(sorted(users)):
                share = start + width * (place + 1) / (len(users) + 1)
                self.ends[index, at_target] = box.left + box.width * share

    def _build_wire_runs(self, index: int) -> None:
        """Compute the horizontal segments of the wire (a line between two panels) with the index ``index``, and store
        them in the attribute ``runs``. There is one segment if the panels are in the same row or in adjacent rows.
        Otherwise there are two, joined by a vertical part beside all panels, whose x coordinate is stored in the
        attribute ``margins``.
        """
        upper, lower, swapped = self.upper_first(index)
        start, end = self.ends[index, swapped], self.ends[index, not swapped]
        first, last = self.boxes[upper].row, max(self.boxes[upper].row, self.boxes[lower].row - 1)
        if first == last:
            self.runs[index] = [_WireRun(index, first, start, end)]
            return
        x = self.margins[index] = self.right + _MARGIN_STEP * (len(self.margins) + 1)
        self.runs[index] = [_WireRun(index, first, start, x), _WireRun(index, last, x, end, labelled=False)]

    def _assign_lanes(self) -> None:
        """Give each horizontal segment of a wire (a line between two panels) one of the parallel lines (lanes) in the
        space below a row of panels. It gets the uppermost lane in which it and its label overlap no other segment.
        Short segments are placed before long ones. The index of the lane is stored in the segment's attribute ``lane``.
        """
        taken: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        runs = [run for runs in self.runs.values() for run in runs]
        for run in sorted(runs, key=lambda r: abs(r.end - r.start)):
            low, high = self._compute_run_extent(run)
            while any(low < b and a < high for a, b in taken[run.row, run.lane]):
                run.lane += 1
            taken[run.row, run.lane].append((low, high))

    def _compute_label_half(self, run: _WireRun) -> float:
        """Return half the width in pixels of a wire's label, with a margin. ``run``: a horizontal segment of the wire,
        a line between two panels.
        """
        return text_width(self.wires[run.wire].label, _LABEL_SIZE) / 2 + 8

    def middle(self, run: _WireRun) -> float:
        """Return the x coordinate in pixels of the centre of a wire's label. The centre is the middle of the segment,
        moved if the label would otherwise leave the picture. ``run``: the horizontal segment of the wire (a line
        between two panels) at which the label is.
        """
        half = self._compute_label_half(run)
        return max(half, min((run.start + run.end) / 2, self.right - half))

    def _compute_run_extent(self, run: _WireRun) -> tuple[float, float]:
        """Return the left and right x coordinates in pixels that ``run``, a horizontal segment of a wire (a line
        between two panels), takes up together with its label and a margin.
        """
        half = self._compute_label_half(run) if run.labelled else 0.0
        middle = self.middle(run)
        return min(run.start, run.end, middle - half) - 6, max(run.start, run.end, middle + half) + 6


def draw_wires(parent: ET.Element, lanes: WireLanes, tops: Sequence[float], bottoms: Sequence[float]) -> None:
    """Draw all wires (lines between panels) with their labels into ``parent``. ``lanes``: the wires and their
    positions. ``tops`` and ``bottoms``: the y coordinates in pixels at which each row of panels begins and ends.
    """
    labels: list[Point] = []
    for index, wire in enumerate(lanes.wires):
        upper, lower, swapped = lanes.upper_first(index)
        runs = lanes.runs[index]
        heights = [bottoms[run.row] + _EMPTY / 2 + LANE * (run.lane + 0.5) + 3 for run in runs]
        same = lanes.boxes[upper].row == lanes.boxes[lower].row
        first, last = lanes.boxes[upper], lanes.boxes[lower]
        corners = [(runs[0].start, tops[first.row] + first.height)]
        for run, y in zip(runs, heights, strict=True):
            corners += [(run.start, y), (run.end, y)]
        corners.append((runs[-1].end, tops[last.row] + (last.height if same else 0.0)))
        if swapped:
            corners.reverse()
        _draw_polyline(draw_group(parent, wire.tooltip), corners, wire)
        label = next(run for run in runs if run.labelled)
        labels.append((lanes.middle(label), heights[runs.index(label)] - 5))
    for (x, y), wire in zip(labels, lanes.wires, strict=True):
        _draw_wire_label(parent, x, y, wire)


def _draw_polyline(parent: ET.Element, corners: Sequence[Point], wire: Wire) -> None:
    """Draw a line through ``corners`` with rounded corners into ``parent``, in the colour of ``wire`` and with its
    arrow heads.
    """
    start = _step_towards(corners[0], corners[1], 6) if wire.heads > 1 else corners[0]
    end = _step_towards(corners[-1], corners[-2], 6) if wire.heads else corners[-1]
    path = f"M{format_coordinate(start[0])},{format_coordinate(start[1])}"
    for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
        enter, leave = _step_towards(corner, before), _step_towards(corner, after)
        path += f"L{format_coordinate(enter[0])},{format_coordinate(enter[1])}"
        path += f"Q{format_coordinate(corner[0])},{format_coordinate(corner[1])} "
        path += f"{format_coordinate(leave[0])},{format_coordinate(leave[1])}"
    path += f"L{format_coordinate(end[0])},{format_coordinate(end[1])}"
    attributes = {"d": path, "fill": "none", "stroke": PALETTE[wire.colour].light, "class": f"s-{wire.colour}"}
    attributes |= {"stroke-width": "1.8"} | ({} if wire.heads else {"stroke-dasharray": "5 4"})
    ET.SubElement(parent, "path", attributes)
    if wire.heads:
        draw_arrowhead(parent, end, corners[-1], wire.colour)
    if wire.heads > 1:
        draw_arrowhead(parent, start, corners[0], wire.colour)


def _step_towards(corner: Point, other: Point, most: float = _RADIUS) -> Point:
    """Return the point on the line from ``corner`` to ``other`` that is ``most`` pixels from ``corner``, or the middle
    of the line if that is nearer. The line is horizontal or vertical."""
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = abs(dx) + abs(dy)
    if length == 0:
        return corner
    step = min(most, length / 2) / length
    return corner[0] + dx * step, corner[1] + dy * step


def _draw_wire_label(parent: ET.Element, x: float, y: float, wire: Wire) -> None:
    """Draw the label of ``wire`` into ``parent``, with its centre at ``x`` and its baseline at ``y``, in pixels. An
    outline in the colour of the background keeps it legible where lines cross it.
    """
    element = draw_text(parent, x, y, wire.label, size=_LABEL_SIZE, anchor="middle")
    element.set("class", f"{element.get('class')} s-canvas")
    element.attrib |= {"stroke": PALETTE["canvas"].light, "stroke-width": "3", "paint-order": "stroke"}
