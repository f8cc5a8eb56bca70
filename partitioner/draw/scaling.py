"""Draw throughput and MFU over the number of ranks: the picture of ``partitioner size``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree import ElementTree as ET

from partitioner.draw.svg import (
    Header,
    create_picture,
    draw_group,
    draw_header,
    draw_line,
    draw_rectangle,
    draw_text,
    to_text,
)
from partitioner.units import count_text, format_percent, seconds_text

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _GAP, _FOOT = 720.0, 210.0, 96.0, 36.0, 46.0, 44.0

_DOT = 7.0


@dataclass(frozen=True)
class ScalingPoint:
    """Describes the best plan found for one number of ranks, ``num_ranks``. ``throughput``: tokens or samples per
    second. ``mfu``: model FLOPs utilization, a fraction of 1. ``step_time``: seconds. ``chosen``: whether this number
    of ranks was selected.
    """

    num_ranks: int
    throughput: float
    mfu: float
    step_time: float
    chosen: bool = False


def draw_scaling(title: str, what: str, points: Sequence[ScalingPoint]) -> str:
    """Return a picture of throughput and MFU (model FLOPs utilization) over the number of ranks as SVG text. ``title``:
    text above the picture. ``what``: the unit of throughput, such as ``tokens``. ``points``: one entry for each number
    of ranks.

    A further line shows perfect scaling, where the throughput per rank stays that of the smallest number of ranks.
    """
    points = sorted(points, key=lambda point: point.num_ranks)
    header = Header(
        title,
        "Each point is the best plan for that many ranks; both axes of throughput are logarithmic.",
        (),
        [("forward", f"{what} per second"), ("backward", "MFU"), ("line", "perfect scaling")],
    )
    scratch = ET.Element("svg")
    top = draw_header(scratch, header, _WIDTH) + 12
    root = create_picture(_WIDTH, top + 2 * _HEIGHT + _GAP + _FOOT, f"{title}: throughput and MFU over ranks")
    draw_rectangle(root, 0, 0, _WIDTH, top + 2 * _HEIGHT + _GAP + _FOOT, "canvas")
    draw_header(root, header, _WIDTH)
    perfect = [points[0].throughput / points[0].num_ranks * point.num_ranks for point in points]
    least = min(*(point.throughput for point in points), *perfect)
    most = max(*(point.throughput for point in points), *perfect)
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most) + 1e-9)
    base = top + _HEIGHT
    for power in range(low, high + 1):
        y = base - (power - low) / max(1, high - low) * _HEIGHT
        draw_line(root, _LEFT, y, _WIDTH - _RIGHT, y, "grid")
        words = count_text(10.0**power) if power >= 0 else f"{10.0**power:g}"
        draw_text(root, _LEFT - 8, y + 4, words, anchor="end", size=11)

    def height(value: float) -> float:
        return base - (math.log10(value) - low) / max(1, high - low) * _HEIGHT

    xs = [_compute_point_x(points, point) for point in points]
    _draw_path(root, [(x, height(value)) for x, value in zip(xs, perfect, strict=True)], "line")
    _draw_path(root, [(x, height(point.throughput)) for x, point in zip(xs, points, strict=True)], "forward")
    second = base + _GAP + _HEIGHT
    ceiling = max(0.1, math.ceil(10 * max(point.mfu for point in points)) / 10)
    for tenth in range(round(10 * ceiling) + 1):
        y = second - tenth / (10 * ceiling) * _HEIGHT
        draw_line(root, _LEFT, y, _WIDTH - _RIGHT, y, "grid")
        draw_text(root, _LEFT - 8, y + 4, format_percent(tenth / 10), anchor="end", size=11)
    _draw_path(root, [(x, second - p.mfu / ceiling * _HEIGHT) for x, p in zip(xs, points, strict=True)], "backward")
    for x, point in zip(xs, points, strict=True):
        tip = (
            f"{point.num_ranks:,} ranks: {count_text(point.throughput)} {what}/s, {format_percent(point.mfu)} MFU, "
            f"{seconds_text(point.step_time)} a step{', chosen' if point.chosen else ''}"
        )
        for y, colour in ((height(point.throughput), "forward"), (second - point.mfu / ceiling * _HEIGHT, "backward")):
            mark = draw_group(root, tip, "hit")
            edge = "ink" if point.chosen else None
            draw_rectangle(mark, x - _DOT / 2, y - _DOT / 2, _DOT, _DOT, colour, stroke=edge, radius=_DOT / 2)
        draw_text(root, x, second + 18, f"{point.num_ranks:,}", size=11, anchor="middle", bold=point.chosen)
    draw_text(root, (_LEFT + _WIDTH - _RIGHT) / 2, second + 36, "ranks", size=11, fill="muted", anchor="middle")
    return to_text(root)


def _compute_point_x(points: Sequence[ScalingPoint], point: ScalingPoint) -> float:
    """Return the x coordinate in pixels of ``point`` on a logarithmic axis of ranks. ``points``: all points, sorted by
    number of ranks, of which the first and the last are the ends of the axis.
    """
    first, last = math.log2(points[0].num_ranks), math.log2(points[-1].num_ranks)
    share = (math.log2(point.num_ranks) - first) / (last - first) if last > first else 0.5
    return _LEFT + 24 + share * (_WIDTH - _RIGHT - _LEFT - 48)


def _draw_path(root: ET.Element, corners: Sequence[tuple[float, float]], colour: str) -> None:
    for (x1, y1), (x2, y2) in pairwise(corners):
        draw_line(root, x1, y1, x2, y2, colour, 1.6)


__all__ = ["ScalingPoint", "draw_scaling"]
