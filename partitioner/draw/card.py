"""Cards: framed rows of text, swatches and bars, measured first and drawn where the layout puts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from partitioner.draw.svg import rect, span, text, text_width

_PAD_X, _PAD_Y = 12.0, 10.0
_SWATCH, _INDENT, _COLUMN_GAP = 10.0, 16.0, 18.0
_BAR_WIDTH, _BAR_HEIGHT = 110.0, 8.0


@dataclass(frozen=True)
class Row:
    """A line of a card: a swatch, text, a muted ``aside`` after it, and ``columns`` set flush right.

    ``bar``: a share of one, drawn as a bar before the text.
    """

    text: str
    size: float = 11.0
    fill: str = "ink"
    bold: bool = False
    aside: str = ""
    swatch: str = ""
    columns: tuple[str, ...] = ()
    bar: float | None = None
    space: float = 0.0  # above the line

    @property
    def height(self) -> float:
        return self.space + self.size * 1.42

    @property
    def lead(self) -> float:
        """Where the text begins."""
        return (_INDENT if self.swatch else 0.0) + (_BAR_WIDTH + 8 if self.bar is not None else 0.0)

    @property
    def width(self) -> float:
        """Without the columns."""
        aside = text_width(self.aside, self.size - 1) + 8 if self.aside else 0.0
        return self.lead + text_width(self.text, self.size, self.bold) + aside


@dataclass(frozen=True)
class Card:
    rows: tuple[Row, ...]

    @property
    def column_widths(self) -> list[float]:
        most = max((len(r.columns) for r in self.rows), default=0)
        return [
            max(text_width(r.columns[i], r.size) for r in self.rows if i < len(r.columns)) + _COLUMN_GAP
            for i in range(most)
        ]

    @property
    def width(self) -> float:
        columns = sum(self.column_widths)
        return 2 * _PAD_X + max((r.width + (columns if r.columns else 0.0) for r in self.rows), default=0.0)

    @property
    def height(self) -> float:
        return 2 * _PAD_Y + sum(r.height for r in self.rows)


def draw_card(parent: ET.Element, card: Card, x: float, y: float, width: float) -> None:
    """Draw the rows of ``card`` (not a frame) with its corner at ``x``, ``y``; columns end at ``width``."""
    columns = card.column_widths
    top = y + _PAD_Y
    for row in card.rows:
        base = top + row.space + row.size * 1.08
        _draw_row(parent, row, x + _PAD_X, base)
        right = x + width - _PAD_X
        for amount, column in zip(reversed(row.columns), reversed(columns), strict=False):
            text(parent, right, base, amount, size=row.size, fill=row.fill, anchor="end")
            right -= column
        top += row.height


def _draw_row(parent: ET.Element, row: Row, x: float, base: float) -> None:
    if row.swatch:
        rect(parent, x, base - row.size * 0.36 - _SWATCH / 2, _SWATCH, _SWATCH, row.swatch, radius=2)
    if row.bar is not None:
        top = base - row.size * 0.36 - _BAR_HEIGHT / 2
        rect(parent, x, top, _BAR_WIDTH, _BAR_HEIGHT, "memory_left", radius=_BAR_HEIGHT / 2)
        filled = min(1.0, max(0.06, row.bar)) * _BAR_WIDTH
        rect(parent, x, top, filled, _BAR_HEIGHT, "memory" if row.bar <= 1 else "all_reduce", radius=_BAR_HEIGHT / 2)
    start = x + row.lead
    element = text(parent, start, base, row.text, size=row.size, fill=row.fill, bold=row.bold)
    if row.aside:
        span(element, row.aside, size=row.size - 1, fill="muted", gap=8)


def wrap(prefix: str, names: Sequence[str], most_lines: int = 2, longest: int = 52) -> list[str]:
    """``prefix`` and ``names`` over at most ``most_lines`` lines; what does not fit is counted."""
    lines: list[str] = []
    line = prefix
    for i, name in enumerate(names):
        piece = name + ("," if i < len(names) - 1 else "")
        if len(line) + 1 + len(piece) > longest and line != prefix:
            if len(lines) + 1 == most_lines:
                return [*lines, f"{line.rstrip(',')} and {len(names) - i} more"]
            lines.append(line)
            line = "  " + piece
        else:
            line = f"{line} {piece}"
    return [*lines, line]
