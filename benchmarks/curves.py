"""Losses of a run and of one process in one picture; below, how far they are apart, and how far rounding alone goes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from partitioner.draw.svg import (
    PALETTE,
    Header,
    create_picture,
    draw_header,
    draw_line,
    draw_rectangle,
    draw_text,
    format_coordinate,
    to_text,
)
from partitioner.draw.timeline import tick_step

_WIDTH, _LEFT, _RIGHT = 860.0, 70.0, 20.0
_TALL, _LOW, _GAP = 260.0, 150.0, 54.0


@dataclass(frozen=True)
class Mark:
    """Something that happened after ``step``."""

    step: int
    words: str


@dataclass(frozen=True)
class Curves:
    """Losses by step: of the ``run``, of ``single``, one process, of ``alike``, which differ from it by rounding, and
    of one process in float32 (``exact``)."""

    run: Sequence[float]
    single: Sequence[float]
    alike: Sequence[Sequence[float]]
    exact: Sequence[float] | None
    marks: Sequence[Mark]
    precision: str


def draw_curves(curves: Curves) -> str:
    """The picture as SVG text."""
    steps = len(curves.run)
    apart = [a - b for a, b in zip(curves.run, curves.single, strict=True)]
    others = [[a - b for a, b in zip(other, curves.single, strict=True)] for other in curves.alike]
    low = [min(0.0, *(o[k] for o in others)) if others else 0.0 for k in range(steps)]
    high = [max(0.0, *(o[k] for o in others)) if others else 0.0 for k in range(steps)]
    figures = [
        ("largest distance", f"{max(map(abs, apart)):.4f}"),
        ("mean distance", f"{statistics.fmean(map(abs, apart)):.5f}"),
        ("mean distance, by rounding", f"{max((statistics.fmean(map(abs, o)) for o in others), default=0.0):.5f}"),
        ("kills", str(len(curves.marks))),
    ]
    legend = [("forward", "four processes, killed and resumed"), ("backward", f"one process, {curves.precision}")]
    legend += [("memory_left", "one process, other microbatches: rounding alone")] if others else []
    legend += [("ring", "one process, fp32")] if curves.exact is not None else []
    header = Header("Losses of a run that was killed, and of one process", f"{steps} steps", figures, legend)
    width = _LEFT + _WIDTH + _RIGHT
    top = draw_header(create_picture(width, 0, ""), header, width) + 24
    root = create_picture(width, top + _TALL + _GAP + _LOW + 40, "Losses by step, and their differences")
    draw_header(root, header, width)

    exact = [] if curves.exact is None else [("ring", curves.exact)]
    _Panel(root, top, _TALL, steps, "loss", [*exact, ("backward", curves.single), ("forward", curves.run)]).draw(
        curves.marks
    )
    away = [] if curves.exact is None else [[a - b for a, b in zip(curves.exact, curves.single, strict=True)]]
    below = _Panel(root, top + _TALL + _GAP, _LOW, steps, "less that of one process", [("ring", a) for a in away])
    below.lines.append(("forward", apart))
    below.band = low, high
    below.draw(curves.marks, words=False)
    draw_text(root, _LEFT + _WIDTH, top + _TALL + _GAP + _LOW + 30, "step", size=11, fill="muted", anchor="end")
    return to_text(root)


class _Panel:
    """One chart: ``lines`` are (colour, value by step), ``band`` what lies behind them."""

    def __init__(
        self,
        root: ET.Element,
        top: float,
        height: float,
        steps: int,
        title: str,
        lines: list[tuple[str, Sequence[float]]],
    ) -> None:
        self.root, self.top, self.height, self.steps, self.title = root, top, height, steps, title
        self.lines = lines
        self.band: tuple[Sequence[float], Sequence[float]] | None = None

    def draw(self, marks: Sequence[Mark], words: bool = True) -> None:
        curves = [curve for _, curve in self.lines] + [*(self.band or ())]
        self.low, self.high = min(map(min, curves)), max(map(max, curves))
        room = 0.05 * (self.high - self.low) or 1.0
        self.low, self.high = self.low - room, self.high + room
        draw_rectangle(self.root, _LEFT, self.top, _WIDTH, self.height, "panel")
        draw_text(self.root, _LEFT, self.top - 8, self.title, size=12, bold=True)
        self._grid()
        if self.band is not None:
            low, high = self.band
            corners = [*self._points(high), *reversed(self._points(low))]
            self._path("M" + "L".join(corners) + "Z", "memory_left", None)
        for colour, curve in self.lines:
            self._path("M" + "L".join(self._points(curve)), None, colour)
        for place, mark in enumerate(marks):
            x = self._x(mark.step)
            draw_line(self.root, x, self.top, x, self.top + self.height, "tied", 1.2).set("stroke-dasharray", "4 3")
            if words:
                right = x > _LEFT + _WIDTH / 2
                at, anchor = (x - 6, "end") if right else (x + 6, "start")
                draw_text(self.root, at, self.top + 18 + 16 * place, mark.words, size=11, fill="tied", anchor=anchor)

    def _grid(self) -> None:
        step = tick_step(self.high - self.low, max(2, int(self.height / 40)))
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1):
            y = self._y(k * step)
            draw_line(self.root, _LEFT, y, _LEFT + _WIDTH, y, "grid")
            draw_text(self.root, _LEFT - 6, y + 3.5, f"{k * step:.{decimals}f}", size=10, fill="muted", anchor="end")
        every = max(1.0, tick_step(self.steps, 10))
        for k in range(math.floor(self.steps / every) + 1):
            x = self._x(max(1.0, k * every))
            draw_text(
                self.root, x, self.top + self.height + 16, format_coordinate(max(1.0, k * every)), size=10,
                fill="muted",
                anchor="middle",
            )  # fmt: skip

    def _x(self, step: float) -> float:
        return _LEFT + _WIDTH * (step - 1) / max(1, self.steps - 1)

    def _y(self, value: float) -> float:
        return self.top + self.height * (self.high - value) / (self.high - self.low)

    def _points(self, curve: Sequence[float]) -> list[str]:
        return [f"{format_coordinate(self._x(k + 1))} {format_coordinate(self._y(v))}" for k, v in enumerate(curve)]

    def _path(self, data: str, fill: str | None, stroke: str | None) -> None:
        attributes = {"d": data, "fill": "none"}
        if fill is not None:
            attributes |= {"fill": PALETTE[fill].light, "class": f"f-{fill}"}
        if stroke is not None:
            attributes |= {"stroke": PALETTE[stroke].light, "class": f"s-{stroke}", "stroke-width": "1.5"}
        ET.SubElement(self.root, "path", attributes)
