"""The ``graph`` view: one panel per pipeline stage with its calls, and the transfers and tied weights between panels.

All ranks of a stage share one panel, so the size of the picture depends on the number of stages and not on the number
of ranks. A long run of equal stages is one panel. A panel shows the parameters and memory of a rank, and cards of equal
consecutive calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from xml.etree import ElementTree as ET

from partitioner.draw.graph_layout import (
    _HEAD,
    DotLayout,
    PanelBox,
    Point,
    Wire,
    WireLanes,
    _format_point,
    draw_arrowhead,
    draw_wires,
    lay_out,
)
from partitioner.draw.svg import (
    PALETTE,
    Card,
    CardRow,
    Header,
    create_picture,
    draw_card,
    draw_group,
    draw_header,
    draw_line,
    draw_rectangle,
    draw_text,
    format_coordinate,
    text_width,
    to_text,
    wrap_names,
)
from partitioner.explain.stage_layers import number_virtual_stages
from partitioner.plan import Plan
from partitioner.plans.block_outline import Weight
from partitioner.plans.figures import (
    COLLECTIVE_NAMES,
    key_figures,
    list_usable_bytes,
    mesh_text,
    share_of_usable,
    view_title,
)
from partitioner.plans.outline import (
    CallGroup,
    CollectiveTotal,
    Outline,
    StageOutline,
    ValueFlow,
    group_notes,
    outline_program,
)
from partitioner.units import bytes_text, count_text, format_percent, format_plural, format_ranges

_PAD = 14.0


@dataclass(frozen=True)
class Panel:
    """Describes what is drawn for one pipeline stage: a panel with boxes of text (cards) and curves between them.

    ``header``: the card at the top. ``cards``: name such as ``g0`` -> the card of a sequence of repeated blocks, such
    as decoder layers. ``tips``: the tooltip of each card, by the same names. ``layout``: the positions of the cards and
    of the curves, in pixels. ``flows``: the curves, as (name of the source card, name of the target card, tooltip).
    ``tooltip``: the tooltip of the whole panel.
    """

    header: Card
    cards: dict[str, Card]
    tips: dict[str, str]
    layout: DotLayout
    flows: tuple[tuple[str, str, str], ...]  # source, target, tooltip
    tooltip: str

    @property
    def width(self) -> float:
        return max(self.header.width, self.layout.width) + 2 * _PAD

    @property
    def height(self) -> float:
        return self.header.height + self.layout.height + 2 * _PAD


def _format_virtual_stages(numbers: Sequence[int]) -> str:
    return f"{'virtual stage' if len(numbers) == 1 else 'virtual stages'} {format_ranges(numbers)}"


def stage_panel(
    header: Card,
    groups: Sequence[CallGroup],
    flows: Sequence[ValueFlow],
    tooltip: str,
    notes: Mapping[int, str] = MappingProxyType({}),
) -> Panel:
    """Return what is drawn for one pipeline stage.

    ``header``: the card (text lines) at the top. ``groups``: the sequences of repeated blocks in the stage, such as
    decoder layers; each gets a card. ``flows``: the values that pass from one sequence to another, in the whole model;
    those inside this stage become curves. ``tooltip``: the tooltip of the panel. ``notes``: a text for the card of some
    of ``groups``, by their index.
    """
    names = {(g.stage, g.index): f"g{g.index}" for g in groups}
    cards = {names[g.stage, g.index]: group_card(g, notes.get(g.index, "")) for g in groups}
    within = [f for f in flows if f.source in names and f.target in names]
    edges = [(names[f.source], names[f.target]) for f in within]
    below = [(names[a.stage, a.index], names[b.stage, b.index]) for a, b in _stack_virtual_stages(groups)]
    layout = lay_out({name: (card.width, card.height) for name, card in cards.items()}, edges, below)
    return Panel(
        header=header,
        cards=cards,
        tips={names[g.stage, g.index]: group_tooltip(g) for g in groups},
        layout=layout,
        flows=tuple((*edge, flow_tooltip(flow)) for edge, flow in zip(edges, within, strict=True)),
        tooltip=tooltip,
    )


def _stack_virtual_stages(groups: Sequence[CallGroup]) -> list[tuple[CallGroup, CallGroup]]:
    """Return pairs of ``groups``, of which the second is to be drawn below the first, so that at most four virtual
    stages of a rank are side by side: the last group of a virtual stage, and the first of the one four places later."""
    chunks: dict[int, list[CallGroup]] = {}
    for group in groups:
        if group.chunk is not None and not group.prologue and not group.everywhere:
            chunks.setdefault(group.chunk, []).append(group)
    ordered = [chunks[number] for number in sorted(chunks)]
    return [(upper[-1], lower[0]) for upper, lower in zip(ordered, ordered[_MOST_BESIDE:], strict=False)]


def draw_panel(parent: ET.Element, panel: Panel, x: float, y: float, width: float, height: float) -> None:
    """Draw ``panel`` into ``parent``. ``x``, ``y``: its top left corner in pixels. ``width``, ``height``: the size of
    the drawn panel in pixels, at least the size of its contents."""
    outer = draw_group(parent)
    head = draw_group(outer, panel.tooltip)
    draw_rectangle(head, x, y, width, height, "panel", stroke="line", radius=10)
    draw_card(head, panel.header, x + 2, y + 2, width - 4)
    left = x + (width - panel.layout.width) / 2
    top = y + panel.header.height + _PAD
    for source, target, tip in panel.flows:
        curve = tuple((left + px, top + py) for px, py in panel.layout.edges[source, target])
        draw_curve(draw_group(outer, tip), curve, "muted", 1.2)
    for name, card in panel.cards.items():
        cx, cy = panel.layout.boxes[name]
        box = draw_group(outer, panel.tips[name], "hit")
        draw_rectangle(box, left + cx, top + cy, card.width, card.height, "card", stroke="line", radius=7)
        draw_card(box, card, left + cx, top + cy, card.width)


def draw_curve(parent: ET.Element, points: Sequence[Point], colour: str, width: float) -> None:
    """Draw a Bézier curve with an arrow head into ``parent``. ``points``: the start, three points per segment, and the
    tip of the arrow. ``colour``: name of a colour in ``PALETTE``, such as ``ink``. ``width``: of the line, in pixels.
    """
    *curve, tip = points
    start, rest = curve[0], curve[1:]
    rest = [*rest[:-1], _short_of(tip, rest[-1])]
    path = f"M{_format_point(start)}" + "".join(
        f"C{_format_point(rest[i])} {_format_point(rest[i + 1])} {_format_point(rest[i + 2])}"
        for i in range(0, len(rest) - 2, 3)
    )
    attributes = {"d": path, "fill": "none", "stroke": PALETTE[colour].light, "class": f"s-{colour}"}
    ET.SubElement(parent, "path", attributes | {"stroke-width": format_coordinate(width)})
    draw_arrowhead(parent, curve[-1], tip, colour)


def _short_of(tip: Point, start: Point) -> Point:
    """Return the point (x, y) in pixels at which to end the line of an arrow. The point is a little inside the arrow
    head. ``tip``: the tip of the head. ``start``: a point of the line before it."""
    dx, dy = start[0] - tip[0], start[1] - tip[1]
    length = max(1e-6, (dx * dx + dy * dy) ** 0.5)
    return tip[0] + dx / length * (_HEAD - 1), tip[1] + dy / length * (_HEAD - 1)


_DIRECTIONS = ("forward", "backward")
_MOST_BESIDE = 4  # virtual stages of a rank beside each other: about the width of a page


def group_card(calls: CallGroup, note: str = "") -> Card:
    """Return the card (a list of text lines) of ``calls``, a sequence of repeated blocks, such as decoder layers: names
    of the blocks, their number, module paths, notes, collectives by kind, parameters, and how weights are sharded.
    ``note``: a further note, before the others; an empty text adds none."""
    title = calls.title
    rows = [CardRow(title, 13, bold=True, aside=f"× {calls.count}" if calls.count > 1 else "")]
    if calls.paths and calls.paths != title:
        rows.append(CardRow(calls.paths, fill="muted"))
    rows += [CardRow(each, fill="muted") for each in [*filter(None, [note]), *group_notes(calls)]]
    shown = [d for d in _DIRECTIONS if any(m.direction == d for m in calls.collectives)]
    if shown:
        rows.append(CardRow("", 10, fill="muted", columns=tuple(shown), space=2))
    for op, axis in dict.fromkeys((m.op, m.axis) for m in calls.collectives):
        amounts = tuple(_format_amount(op, axis, d, calls.collectives) for d in shown)
        rows.append(CardRow(f"{COLLECTIVE_NAMES.get(op, op)} over {axis}", swatch=op, columns=amounts))
    if calls.num_parameters:
        size = f"{count_text(calls.num_parameters)} parameters, {bytes_text(calls.parameter_bytes)} per rank"
        rows.append(CardRow(size, space=4))
        rows += [CardRow(line, 10, fill="muted") for line in weight_lines(calls.weights)]
    return Card(tuple(rows))


def _format_amount(op: str, axis: str, direction: str, collectives: Sequence[CollectiveTotal]) -> str:
    """Return the number and bytes of collectives of one kind as text, such as ``2 × 32 MiB``; ``–`` if there are none.
    ``op``: kind of collective, such as ``all_reduce``. ``axis``: name of the mesh axis. ``direction``: ``forward`` or
    ``backward``. ``collectives``: the totals of one sequence of blocks (such as decoder layers).
    """
    found = next((m for m in collectives if (m.op, m.axis, m.direction) == (op, axis, direction)), None)
    return found.amount() if found else "–"


def weight_lines(weights: Sequence[Weight]) -> list[str]:
    """Return lines of text like ``column-parallel: q_proj, k_proj, v_proj``: for each way in which ``weights`` are
    sharded, one or two lines with the names of its weights.
    """
    by_way: dict[str, list[str]] = {}
    for weight in weights:
        by_way.setdefault(weight.how, []).append(short_name(weight.name))
    return [line for way, names in by_way.items() for line in wrap_names(f"{way}:", list(dict.fromkeys(names)))]


def short_name(name: str) -> str:
    """Return a short form of the parameter name ``name`` for a picture. A weight gets the name of its module without
    the path: ``self_attn.q_proj.weight`` becomes ``q_proj``. Another parameter also keeps its own name, as in
    ``q_proj.bias``.
    """
    parts = [p for p in name.split(".") if not re.fullmatch(r"\d+", p)]
    if len(parts) > 1:
        return parts[-2] if parts[-1] == "weight" else f"{parts[-2]}.{parts[-1]}"
    return name


def group_tooltip(calls: CallGroup) -> str:
    """Return the tooltip of ``calls``, a sequence of repeated blocks (such as decoder layers), one fact per line: the
    range of positions of these blocks in the stage, their collectives with their bytes, and the shape and sharding of
    each weight.
    """
    lines = [f"{calls.title} × {calls.count}: calls {calls.start} to {calls.stop - 1} of the stage"]
    for moved in calls.collectives:
        name = COLLECTIVE_NAMES.get(moved.op, moved.op)
        lines.append(f"{moved.direction}: {moved.count} {name} over {moved.axis}, {bytes_text(moved.num_bytes)} in all")
    for weight in calls.weights:
        shape = "×".join(map(str, weight.shape))
        lines.append(f"{weight.name} [{shape}] {weight.layout}: {weight.how}")
    return "\n".join(lines)


def flow_tooltip(flow: ValueFlow) -> str:
    """Return the tooltip of the curve that is drawn for ``flow``: the names of the values that pass along it, their
    bytes, and the bytes of their gradients.
    """
    names = ", ".join(flow.values[:8]) + (f" and {len(flow.values) - 8} more" if len(flow.values) > 8 else "")
    back = f", gradients {bytes_text(flow.backward_bytes)}" if flow.backward_bytes else ""
    return f"{names}: {bytes_text(flow.forward_bytes)}{back}"


MOST_STAGES = 8  # with more, runs of equal stages are drawn once

REDUCED = "; reductions of gradients, and gathers of sharded parameters, are those of a step."
_NUMBERED = (
    " A rank has several virtual stages, which are numbered in the order in which a microbatch passes through them; "
    "arrows name the two that they connect."
)
_FEWEST_EQUAL = 3
_MOST_STEPS = 4  # pairs of virtual stages in the label of an arrow
_WIDEST = 1900.0  # pixels of a row of panels
_MARGIN, _LINK_Y, _LABEL = 24.0, 42.0, 10.0

_LEGEND = (
    ("all_gather", "all-gather"),
    ("reduce_scatter", "reduce-scatter"),
    ("all_reduce", "all-reduce"),
    ("all_to_all", "all-to-all"),
    ("ring", "ring of sends"),
    ("send", "send and receive between stages"),
    ("long_edge", "value relayed over several stages"),
    ("tied", "tied weight"),
    ("memory", "peak memory"),
)


def draw_graph(plan: Plan) -> str:
    """Return a picture of ``plan`` as SVG text: a panel for each pipeline stage, and the transfers between stages."""
    scene = _GraphScene(plan, outline_program(plan.program))
    drawing, width, height = scene.draw_graph()
    used = {name[2:] for e in drawing.iter() for name in e.get("class", "").split() if name[:2] in ("f-", "s-")}
    header = Header(
        title=view_title(plan, "graph"),
        subtitle="Bytes are those of one rank and one microbatch"
        + (REDUCED if plan.program.objective == "train" else ".")
        + (_NUMBERED if scene.numbers else ""),
        figures=key_figures(plan),
        legend=[(colour, meaning) for colour, meaning in _LEGEND if colour in used],
    )
    total = max(width + 2 * _MARGIN, 860.0)
    top = draw_header(create_picture(total, 0, ""), header, total)
    root = create_picture(total, top + height + _MARGIN, header.title)
    draw_header(root, header, total)
    drawing.set("transform", f"translate({_MARGIN:g} {top:g})")
    root.append(drawing)
    return to_text(root)


@dataclass(frozen=True)
class StageCluster:
    """Describes consecutive pipeline stages with equal contents, which are drawn as one panel. ``stage``: the summary
    of the first of them. ``stages``: the indices of all of them.
    """

    stage: StageOutline
    stages: tuple[int, ...]


def clusters_of(whole: Outline, plan: Plan) -> list[StageCluster]:
    """Return the pipeline stages of ``whole``, the overview of the program of ``plan``, in groups that are drawn as one
    panel each. If there are more than eight stages, each run of three or more consecutive equal stages on equal devices
    forms one group. Every other stage is a group by itself.
    """
    if len(whole.stages) <= MOST_STAGES:
        return [StageCluster(stage, (stage.index,)) for stage in whole.stages]
    runs: list[StageCluster] = []
    for stage in whole.stages:
        if runs and _build_likeness_key(runs[-1].stage, plan) == _build_likeness_key(stage, plan):
            runs[-1] = StageCluster(runs[-1].stage, (*runs[-1].stages, stage.index))
        else:
            runs.append(StageCluster(stage, (stage.index,)))
    clusters: list[StageCluster] = []
    for run in runs:
        short = len(run.stages) < _FEWEST_EQUAL
        clusters += [StageCluster(whole.stages[s], (s,)) for s in run.stages] if short else [run]
    return clusters


def _build_likeness_key(stage: StageOutline, plan: Plan) -> object:
    """Return a key for ``stage``, the overview of a pipeline stage of ``plan``. Two stages have equal keys if they can
    be drawn as one panel: if their devices, blocks (such as decoder layers), collectives and parameter bytes are equal.
    """
    groups = [
        (g.blocks, g.count, g.collectives, g.parameter_bytes, g.recomputed, g.selective, g.chunk) for g in stage.groups
    ]
    return _list_stage_devices(stage, plan), groups, stage.reductions, stage.parameter_bytes


def _list_stage_devices(stage: StageOutline, plan: Plan) -> list[tuple[str, float, int]]:
    """Return (type, speed, bytes of memory) of the different devices on which ``plan`` runs ``stage``, sorted."""
    devices = (plan.topology.devices[plan.devices[rank]] for rank in stage.ranks)
    return sorted({(device.kind, device.speed, device.memory) for device in devices})


class _GraphScene:
    """Draws the graph of ``plan``. ``whole``: the overview of its program: stages, their blocks (such as decoder
    layers) and transfers."""

    def __init__(self, plan: Plan, whole: Outline) -> None:
        self.plan = plan
        self.whole = whole
        self.clusters = clusters_of(whole, plan)
        self.numbers = number_virtual_stages(plan)
        self.mixed = len({plan.topology.devices[device].kind for device in plan.devices}) > 1
        self.shown = {s: i for i, c in enumerate(self.clusters) for s in c.stages}
        self.links = {(k.source, k.target, k.direction): k for k in whole.links}
        self.panels = [self.build_stage_panel(c) for c in self.clusters]

    def draw_graph(self) -> tuple[ET.Element, float, float]:
        """Return the picture without its header as an SVG element, and its width and height in pixels."""
        rows = self.split_into_rows()
        columns = range(len(rows[0]))
        widths = [max(self.panels[row[i]].width for row in rows if i < len(row)) for i in columns]
        gaps = [max(self.compute_gap_width(row[i]) for row in rows if i < len(row)) for i in columns]
        lefts = [sum(widths[:i]) + sum(gaps[:i]) for i in columns]
        boxes = [
            PanelBox(level, lefts[i], widths[i], self.panels[index].height)
            for level, row in enumerate(rows)
            for i, index in enumerate(row)
        ]
        right = max(b.left + b.width for b in boxes)
        beside = [(row[i], row[i + 1]) for row in rows for i in range(len(row) - 1)]
        lanes = WireLanes(boxes, self.collect_wires(set(beside)), right)
        tops, bottoms, y = [], [], 0.0
        for level, row in enumerate(rows):
            tops.append(y)
            bottoms.append(y + max(self.panels[i].height for i in row))
            y = bottoms[-1] + lanes.height(level)
        drawing = ET.Element("g")
        for index, (panel, box) in enumerate(zip(self.panels, boxes, strict=True)):
            draw_panel(drawing, panel, box.left, tops[box.row], box.width, box.height)
            if any(first == index for first, _ in beside):
                self.draw_hand_over(
                    drawing, index, box.left + box.width, boxes[index + 1].left, tops[box.row] + _LINK_Y
                )
        draw_wires(drawing, lanes, tops, bottoms)
        return drawing, lanes.width, y

    def split_into_rows(self) -> list[list[int]]:
        """Return the indices of the panels row by row, from the top. All rows but the last have the same number of
        panels.
        """
        widest = max(p.width for p in self.panels) + max(
            (self.compute_gap_width(i) for i in range(len(self.panels))), default=0.0
        )
        most = max(1, int(_WIDEST // widest))
        count = math.ceil(len(self.panels) / most)
        size = math.ceil(len(self.panels) / count)
        return [list(range(i, min(i + size, len(self.panels)))) for i in range(0, len(self.panels), size)]

    def find_neighbour_stages(self, index: int) -> tuple[int, int] | None:
        """Return the indices of two stages: the last of the panel with the index ``index``, and the first of the panel
        after it. Return ``None`` for the last panel.
        """
        if index + 1 >= len(self.clusters):
            return None
        return self.clusters[index].stages[-1], self.clusters[index + 1].stages[0]

    def link_labels(self, stages: tuple[int, int]) -> tuple[str, str]:
        """Return the labels of two arrows as texts: the bytes that are sent forward, and the bytes that are sent
        backward. A label is empty if nothing is sent. ``stages``: the indices of the earlier and of the later stage.
        The first label begins with the virtual stages that the arrow connects, if a rank has several.
        """
        forward = self.links.get((*stages, "forward"))
        backward = self.links.get((stages[1], stages[0], "backward"))
        which = self.format_steps(*stages)
        return (
            f"{which}{bytes_text(forward.num_bytes)} forward" if forward else "",
            f"{bytes_text(backward.num_bytes)} backward" if backward else "",
        )

    def format_steps(self, source: int, target: int) -> str:
        """Return the virtual stages of the pipeline stage ``source`` that ``target`` continues, as text such as
        ``virtual stage 2 → 3: ``; empty if no rank has several virtual stages."""
        after = {number - 1 for (stage, _), number in self.numbers.items() if stage == target}
        steps = sorted(n for (stage, _), n in self.numbers.items() if stage == source and n in after)
        if not steps:
            return ""
        shown = [f"{n} → {n + 1}" for n in steps]
        shown = [*shown[:2], "…", shown[-1]] if len(shown) > _MOST_STEPS else shown
        return f"virtual stage {', '.join(shown)}: "

    def list_chunk_numbers(self, cluster: StageCluster, chunk: int | None) -> list[int]:
        """Return the numbers of the virtual stages that a panel shows, in ascending order. ``cluster``: the stages of
        the panel. ``chunk``: which virtual stages of a rank are meant, from 0; ``None``: all.
        """
        return sorted(n for (s, c), n in self.numbers.items() if s in cluster.stages and chunk in (None, c))

    def compute_gap_width(self, index: int) -> float:
        """Return the distance in pixels between the panel with the index ``index`` and the next one, with room for
        labels.
        """
        stages = self.find_neighbour_stages(index)
        labels = self.link_labels(stages) if stages else ("",)
        return max(44.0, *(text_width(label, _LABEL) + 24 for label in labels))

    def draw_hand_over(self, parent: ET.Element, index: int, left: float, right: float, y: float) -> None:
        """Draw the arrows between a panel and the next one in the row into ``parent``: activations forward and, below,
        gradients backward. ``index``: index of the panel. ``left``, ``right``: x coordinates between which the arrows
        are drawn. ``y``: y coordinate of the upper arrow.
        """
        stages = self.find_neighbour_stages(index)
        assert stages is not None
        directions = (("forward", stages, left, right), ("backward", stages[::-1], right, left))
        labels = self.link_labels(stages)
        for (direction, (source, target), start, end), label in zip(directions, labels, strict=True):
            link = self.links.get((source, target, "forward" if direction == "forward" else "backward"))
            if link is None:
                continue
            what = "gradients of " if direction == "backward" else ""
            tip = f"stage {source} to stage {target}: {what}{self.format_value_names(link.values)}"
            outer = draw_group(parent, tip)
            height = y if direction == "forward" else y + 12
            towards = 7 if end > start else -7
            draw_line(outer, start, height, end - towards, height, "send", 1.8)
            draw_arrowhead(outer, (start, height), (end, height), "send")
            base = height - 6 if direction == "forward" else height + 15
            draw_text(outer, (left + right) / 2, base, label, size=_LABEL, anchor="middle")

    def format_value_names(self, names: Sequence[str]) -> str:
        """Return a text of the values ``names`` of the program with their shapes and data types; at most ten are
        listed.
        """
        values = self.plan.program.values
        shown = [f"{n} {list(values[n].shape)} {values[n].dtype}" for n in names[:10] if n in values]
        return ", ".join(shown) + (f" and {len(names) - 10} more" if len(names) > 10 else "")

    def collect_wires(self, beside: set[tuple[int, int]]) -> list[Wire]:
        """Return the lines between panels that are not next to each other in a row: transfers, values that pass through
        other stages, and tied weights. ``beside``: the pairs of panel indices that are next to each other in a row.
        """
        wires = []
        for link in self.whole.links:
            pair = self.shown[link.source], self.shown[link.target]
            if link.direction == "forward" and pair not in beside and pair[0] != pair[1]:
                labels = [t for t in self.link_labels((link.source, link.target)) if t]
                tip = f"stage {link.source} to stage {link.target}: {self.format_value_names(link.values)}"
                wires.append(Wire(*pair, "send", ", ".join(labels), tip, heads=len(labels)))
        wires += self.build_relay_wires()
        for tie in self.whole.ties:
            places = list(dict.fromkeys(self.shown[p[0]] for p in tie.places))
            names = " = ".join([tie.state, *tie.aliases])
            shown = " = ".join([tie.state, *tie.aliases[:1]])
            more = f" = {len(tie.aliases) - 1} more names" if len(tie.aliases) > 1 else ""
            label = f"tied: {shown}{more}, {bytes_text(tie.num_bytes)} of gradients added up per step"
            wires += [Wire(a, b, "tied", label, names, heads=0) for a, b in pairwise(places)]
        return wires

    def build_relay_wires(self) -> list[Wire]:
        """Return one line for each pair of panels between which values pass although their stages send nothing to each
        other directly: other stages receive the values and send them on.
        """
        between: dict[tuple[int, int], list[ValueFlow]] = {}
        for flow in self.whole.flows:
            stages = flow.source[0], flow.target[0]
            link = self.links.get((*stages, "forward"))
            direct = link is not None and set(flow.values) <= set(link.values)
            pair = self.shown[stages[0]], self.shown[stages[1]]
            if not direct and pair[0] != pair[1]:
                between.setdefault(pair, []).append(flow)
        wires = []
        for pair, flows in between.items():
            first = flows[0]
            ends = " → ".join(self.whole.group(p).title for p in (first.source, first.target))
            more = f" and {len(flows) - 1} more" if len(flows) > 1 else ""
            ahead, back = (
                sum(sizes) for sizes in zip(*((f.forward_bytes, f.backward_bytes) for f in flows), strict=True)
            )
            sizes = f"{bytes_text(ahead)} forward" + (f", {bytes_text(back)} backward" if back else "")
            hops = format_plural(abs(first.hops), "hop")
            tip = "\n".join(self.format_value_names(f.values) for f in flows)
            wires.append(Wire(*pair, "long_edge", f"{ends}{more}: {sizes}, {hops}", tip))
        return wires

    def build_stage_panel(self, cluster: StageCluster) -> Panel:
        """Return the panel of ``cluster``, a group of equal stages, with the contents of the first of them."""
        notes = {
            group.index: _format_virtual_stages(self.list_chunk_numbers(cluster, group.chunk))
            for group in cluster.stage.groups
            if group.chunk is not None and self.numbers
        }
        return stage_panel(
            self.build_header_card(cluster),
            cluster.stage.groups,
            self.whole.flows,
            self.format_stage_tooltip(cluster),
            notes,
        )

    def build_header_card(self, cluster: StageCluster) -> Card:
        """Return the card (a list of text lines) at the top of the panel of ``cluster``, a group of equal stages:
        indices of stages and ranks, parameters and memory of a rank, and the collectives that sum gradients.
        """
        stage = cluster.stage
        ranks = [r for s in cluster.stages for r in self.whole.stages[s].ranks]
        several = len(cluster.stages) > 1
        title = f"Stages {format_ranges(cluster.stages)}" if several else f"Stage {stage.index}"
        rows = [CardRow(title, 15, bold=True, aside=f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranges(ranks)}")]
        if self.numbers:
            words = _format_virtual_stages(self.list_chunk_numbers(cluster, None))
            rows.append(CardRow(words, fill="muted"))
        if self.mixed:
            kinds = dict.fromkeys(kind for kind, _, _ in _list_stage_devices(stage, self.plan))
            rows.append(CardRow(f"on {' and '.join(kinds)}", fill="muted"))
        if several:
            rows.append(CardRow(f"{len(cluster.stages)} equal stages, drawn once", fill="muted"))
            first, second = cluster.stages[:2]
            labels = [t.removeprefix(self.format_steps(first, second)) for t in self.link_labels((first, second)) if t]
            rows.append(CardRow(f"{', '.join(labels)} from each to the next", swatch="send"))
            if self.format_steps(second, first):  # a V schedule comes back
                rows.append(CardRow("and from each to the one before, for later virtual stages", swatch="send"))
        size = f"{count_text(stage.num_parameters)} parameters, {bytes_text(stage.parameter_bytes)} per rank"
        rows.append(CardRow(size, 12, space=2))
        rows += self.build_memory_rows(ranks)
        for moved in stage.reductions:
            name = f"{COLLECTIVE_NAMES.get(moved.op, moved.op)} of {moved.what} over {moved.axis}"
            amount = f"{bytes_text(moved.num_bytes)} in {moved.transfers}"
            rows.append(CardRow(f"{name}: {amount}", swatch=moved.op))
        return Card(tuple(rows))

    def build_memory_rows(self, ranks: Sequence[int]) -> list[CardRow]:
        """Return a list with one row: the peak memory and the usable memory of the rank among ``ranks`` that uses the
        largest fraction of its device. The list is empty if the plan has no memory estimate for these ranks."""
        peaks, rooms = self.plan.estimate.memory, list_usable_bytes(self.plan)
        known = [r for r in ranks if r < len(peaks)]
        if not known:
            return []
        rank = max(known, key=lambda r: share_of_usable(peaks[r], rooms[r]))
        share = share_of_usable(peaks[rank], rooms[rank])
        return [
            CardRow(
                f"{bytes_text(peaks[rank])} of {bytes_text(rooms[rank])} usable ({format_percent(share)})",
                12,
                bar=share,
                space=2,
            )
        ]

    def count_calls(self, stage: StageOutline) -> str:
        """Return the number of calls of ``stage`` as text. Some calls are not divided over stages, such as that of a
        block that each stage computes for itself; if there are any, the text says how many calls are divided."""
        calls, estimates = format_plural(stage.num_calls, "call"), self.plan.estimate.stages
        divided = estimates[stage.index].num_calls if stage.index < len(estimates) else stage.num_calls
        if divided == stage.num_calls:
            return calls
        return f"{calls}, of which {divided} are divided over the stages; the others prepare values for them"

    def format_stage_tooltip(self, cluster: StageCluster) -> str:
        """Return the tooltip of the panel of ``cluster``, a group of equal stages: its ranks, number of layers and
        parameters, and the model inputs and outputs of its stages.
        """
        stage = cluster.stage
        inner = {a: n for a, n in self.plan.mesh.items() if a != "pp"}
        lines = [
            f"Stage {format_ranges(cluster.stages)}: {format_plural(len(stage.ranks), 'rank')} ({mesh_text(inner)})",
            f"{self.count_calls(stage)}, {stage.num_parameters:,} parameters",
        ]
        if stage.loads:
            lines.append(f"reads {', '.join(stage.loads)}")
        results = [o.path for o in self.plan.program.outputs if o.stage in cluster.stages and o.path]
        if results:
            lines.append(f"gives {', '.join(results[:8])}")
        return "\n".join(lines)
