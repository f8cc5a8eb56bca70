"""One stage of the ``graph`` view: a panel with what its ranks hold, and in it the folded calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from partitioner.draw.card import Card, Row, draw_card, wrap
from partitioner.draw.dot import Placed, Point, lay_out
from partitioner.draw.figures import COLLECTIVE_NAMES
from partitioner.draw.svg import PALETTE, group, number, rect
from partitioner.outline import CallGroup, Flow, Moved
from partitioner.outline_block import Weight
from partitioner.units import bytes_text, count_text

_PAD = 14.0
_HEAD = 8.0  # pixels of an arrow head


@dataclass(frozen=True)
class Panel:
    """A measured stage: ``header`` above, ``cards`` of its groups of calls placed by ``layout``."""

    header: Card
    cards: dict[str, Card]
    tips: dict[str, str]
    layout: Placed
    flows: tuple[tuple[str, str, str], ...]  # source, target, tooltip
    tooltip: str

    @property
    def width(self) -> float:
        return max(self.header.width, self.layout.width) + 2 * _PAD

    @property
    def height(self) -> float:
        return self.header.height + self.layout.height + 2 * _PAD


def stage_panel(header: Card, groups: Sequence[CallGroup], flows: Sequence[Flow], tooltip: str) -> Panel:
    """Measure a stage; ``flows`` are those within it."""
    names = {(g.stage, g.index): f"g{g.index}" for g in groups}
    cards = {names[g.stage, g.index]: group_card(g) for g in groups}
    within = [f for f in flows if f.source in names and f.target in names]
    edges = [(names[f.source], names[f.target]) for f in within]
    layout = lay_out({name: (card.width, card.height) for name, card in cards.items()}, edges)
    return Panel(
        header=header,
        cards=cards,
        tips={names[g.stage, g.index]: group_tooltip(g) for g in groups},
        layout=layout,
        flows=tuple((*edge, flow_tooltip(flow)) for edge, flow in zip(edges, within, strict=True)),
        tooltip=tooltip,
    )


def draw_panel(parent: ET.Element, panel: Panel, x: float, y: float, width: float, height: float) -> None:
    """Draw ``panel`` with its corner at ``x``, ``y``, stretched to ``width`` by ``height``."""
    outer = group(parent)
    head = group(outer, panel.tooltip)
    rect(head, x, y, width, height, "panel", stroke="line", radius=10)
    draw_card(head, panel.header, x + 2, y + 2, width - 4)
    left = x + (width - panel.layout.width) / 2
    top = y + panel.header.height + _PAD
    for source, target, tip in panel.flows:
        curve = tuple((left + px, top + py) for px, py in panel.layout.edges[source, target])
        draw_curve(group(outer, tip), curve, "muted", 1.2)
    for name, card in panel.cards.items():
        cx, cy = panel.layout.boxes[name]
        box = group(outer, panel.tips[name], "hit")
        rect(box, left + cx, top + cy, card.width, card.height, "card", stroke="line", radius=7)
        draw_card(box, card, left + cx, top + cy, card.width)


def draw_curve(parent: ET.Element, points: Sequence[Point], colour: str, width: float) -> None:
    """A Bézier path (start, then three points per segment, then where its arrow ends) with its arrow head."""
    *curve, tip = points
    start, rest = curve[0], curve[1:]
    rest = [*rest[:-1], _short_of(tip, rest[-1])]
    path = f"M{_at(start)}" + "".join(
        f"C{_at(rest[i])} {_at(rest[i + 1])} {_at(rest[i + 2])}" for i in range(0, len(rest) - 2, 3)
    )
    attributes = {"d": path, "fill": "none", "stroke": PALETTE[colour].light, "class": f"s-{colour}"}
    ET.SubElement(parent, "path", attributes | {"stroke-width": number(width)})
    arrow(parent, curve[-1], tip, colour)


def _short_of(tip: Point, start: Point) -> Point:
    """Where the line to an arrow's ``tip`` ends, a little within the head."""
    dx, dy = start[0] - tip[0], start[1] - tip[1]
    length = max(1e-6, (dx * dx + dy * dy) ** 0.5)
    return tip[0] + dx / length * (_HEAD - 1), tip[1] + dy / length * (_HEAD - 1)


def arrow(parent: ET.Element, start: Point, tip: Point, colour: str) -> None:
    """A triangle that points from ``start`` to ``tip``."""
    dx, dy = tip[0] - start[0], tip[1] - start[1]
    length = max(1e-6, (dx * dx + dy * dy) ** 0.5)
    ux, uy = dx / length, dy / length
    back = tip[0] - _HEAD * ux, tip[1] - _HEAD * uy
    corners = (tip, (back[0] - 3.6 * uy, back[1] + 3.6 * ux), (back[0] + 3.6 * uy, back[1] - 3.6 * ux))
    points = " ".join(_at(c) for c in corners)
    ET.SubElement(parent, "polygon", {"points": points, "fill": PALETTE[colour].light, "class": f"f-{colour}"})


def _at(point: Point) -> str:
    return f"{number(point[0])},{number(point[1])}"


_DIRECTIONS = ("forward", "backward")


def group_card(calls: CallGroup) -> Card:
    """Name, count, module paths, collectives by kind, parameters, weight layouts."""
    title = " + ".join(calls.blocks)
    rows = [Row(title, 13, bold=True, aside=f"× {calls.count}" if calls.count > 1 else "")]
    if calls.paths and calls.paths != title:
        rows.append(Row(calls.paths, fill="muted"))
    rows += [Row(note, fill="muted") for note in group_notes(calls)]
    shown = [d for d in _DIRECTIONS if any(m.direction == d for m in calls.collectives)]
    if shown:
        rows.append(Row("", 10, fill="muted", columns=tuple(shown), space=2))
    for op, axis in dict.fromkeys((m.op, m.axis) for m in calls.collectives):
        amounts = tuple(_amount(op, axis, d, calls.collectives) for d in shown)
        rows.append(Row(f"{COLLECTIVE_NAMES.get(op, op)} over {axis}", swatch=op, columns=amounts))
    if calls.num_parameters:
        size = f"{count_text(calls.num_parameters)} parameters, {bytes_text(calls.parameter_bytes)} per rank"
        rows.append(Row(size, space=4))
        rows += [Row(line, 10, fill="muted") for line in weight_lines(calls.weights)]
    return Card(tuple(rows))


def group_notes(calls: CallGroup) -> list[str]:
    """What is unusual about when and where these calls run."""
    notes = (
        ("recomputed in backward", calls.recomputed),
        ("recomputed in part in backward", calls.selective),
        ("before the pipeline starts", calls.prologue),
        ("computed by each stage that reads it", calls.everywhere and not calls.prologue),
    )
    return [note for note, holds in notes if holds]


def _amount(op: str, axis: str, direction: str, collectives: Sequence[Moved]) -> str:
    found = next((m for m in collectives if (m.op, m.axis, m.direction) == (op, axis, direction)), None)
    return found.amount() if found else "–"


def weight_lines(weights: Sequence[Weight]) -> list[str]:
    """``column-parallel: q_proj, k_proj, v_proj``: one entry per way of cutting weights."""
    by_way: dict[str, list[str]] = {}
    for weight in weights:
        by_way.setdefault(weight.how, []).append(short_name(weight.name))
    return [line for way, names in by_way.items() for line in wrap(f"{way}:", list(dict.fromkeys(names)))]


def short_name(name: str) -> str:
    """The module that a weight belongs to: ``self_attn.q_proj.weight`` is ``q_proj``; a bias says so."""
    parts = [p for p in name.split(".") if not re.fullmatch(r"\d+", p)]
    if len(parts) > 1:
        return parts[-2] if parts[-1] == "weight" else f"{parts[-2]}.{parts[-1]}"
    return name


def group_tooltip(calls: CallGroup) -> str:
    lines = [f"{' + '.join(calls.blocks)} × {calls.count}: calls {calls.start} to {calls.stop - 1} of the stage"]
    for moved in calls.collectives:
        name = COLLECTIVE_NAMES.get(moved.op, moved.op)
        lines.append(f"{moved.direction}: {moved.count} {name} over {moved.axis}, {bytes_text(moved.num_bytes)} in all")
    for weight in calls.weights:
        shape = "×".join(map(str, weight.shape))
        lines.append(f"{weight.name} [{shape}] {weight.layout}: {weight.how}")
    return "\n".join(lines)


def flow_tooltip(flow: Flow) -> str:
    names = ", ".join(flow.values[:8]) + (f" and {len(flow.values) - 8} more" if len(flow.values) > 8 else "")
    back = f", gradients {bytes_text(flow.backward_bytes)}" if flow.backward_bytes else ""
    return f"{names}: {bytes_text(flow.forward_bytes)}{back}"
