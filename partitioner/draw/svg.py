"""Elements that all pictures share: the palette for light and dark viewers, SVG elements, headers with legends, cards.

Colours have names. An element has its light colour as an attribute, for viewers without style sheets, and a class
through which the style sheet applies the reader's colour scheme. The style sheet contains literal colours, because
viewers other than browsers do not support variables and draw them black.

A card is a list of rows with text, swatches and bars. It is measured first, and drawn at the position that the layout
gives it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

ROOT_CLASS = "pt"
HEADER_CLASS = "head"  # class of the group with title, figures and legend, which pages show beside the picture


@dataclass(frozen=True)
class Colour:
    """Describes a colour for viewers with a light and with a dark background. ``light``, ``dark``: texts like
    ``#4477aa``.
    """

    light: str
    dark: str

    def towards(self, other: Colour, share: float) -> Colour:
        """Return this colour mixed with ``other``. ``share``: the part of ``other`` in the mixture, 0 to 1."""
        return Colour(_mix_colours(self.light, other.light, share), _mix_colours(self.dark, other.dark, share))


def _mix_colours(one: str, other: str, share: float) -> str:
    """Return the mixture of the colours ``one`` and ``other``, which are given like ``#4477aa``. ``share``: the part of
    ``other`` in it, 0 to 1.
    """
    parts = ((int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in parts)


# The hues are Paul Tol's colour-blind safe sets (https://sronpersonalpages.nl/~pault/): no two kinds that stand side by
# side differ by red against green only. Light values are all different: a picture's colours can be named by them.
PALETTE: dict[str, Colour] = {
    "canvas": Colour("#ffffff", "#0d1117"),
    "ink": Colour("#1b1f24", "#e6edf3"),
    "muted": Colour("#59636e", "#9aa5b1"),
    "line": Colour("#c5cdd6", "#3d4650"),
    "grid": Colour("#e7eaee", "#222932"),
    "panel": Colour("#f4f6f8", "#151b23"),
    "card": Colour("#fefefe", "#1e252e"),
    "idle": Colour("#eceff2", "#1a2029"),
    "hatch": Colour("#d3d9e0", "#303945"),
    "forward": Colour("#4477aa", "#6ea6dc"),
    "on_forward": Colour("#fdfdfd", "#0b1016"),
    "backward": Colour("#ddaa33", "#e0b04a"),
    "backward_input": Colour("#b8651b", "#c97a35"),
    "backward_weight": Colour("#c4a6d0", "#b193c2"),
    "on_backward": Colour("#22262b", "#0c1117"),
    "total": Colour("#999933", "#b9b94d"),
    "update": Colour("#6b4c3a", "#a98a76"),
    "send": Colour("#332288", "#958ae8"),
    "all_gather": Colour("#44aa99", "#57c2b0"),
    "reduce_scatter": Colour("#aa4499", "#d06fc0"),
    "all_reduce": Colour("#cc6677", "#e58290"),
    "all_to_all": Colour("#9a8a2f", "#c2b25a"),
    "ring": Colour("#2f7f3f", "#63b873"),
    "tied": Colour("#882255", "#d4689c"),
    "long_edge": Colour("#ee7733", "#f39a66"),
    "memory": Colour("#5d8ab8", "#5b8fc4"),
    "memory_left": Colour("#dfe4ea", "#2c3540"),
    "on_stage": Colour("#14181c", "#0b0f14"),
    # Kinds of memory, from the ground up. Neighbours differ by 20 of 100 in lightness, any two by 25 in CIE Lab. That
    # holds for readers with red-green or blue-yellow blindness, too.
    "held_parameters": Colour("#3221be", "#3486d8"),
    "held_optimizer": Colour("#a5a5ff", "#a8ccff"),
    "held_gradients": Colour("#bb5500", "#ba830f"),
    "held_residuals": Colour("#f0bc81", "#d7f372"),
    "held_gathered": Colour("#5c2a6e", "#6f3e87"),
    "held_saved": Colour("#35bba6", "#42d177"),
    "held_flowing": Colour("#2b6959", "#035d4b"),
    "held_recomputed": Colour("#ebceff", "#f2c9c8"),
    "held_working": Colour("#712703", "#873903"),
    **{
        f"stage_{i}": Colour(light, dark)
        for i, (light, dark) in enumerate(
            [
                ("#77aadd", "#6f9fcf"),
                ("#eedd88", "#d9c878"),
                ("#44bb99", "#48b090"),
                ("#ee8866", "#dd8163"),
                ("#99ddff", "#8bcbe9"),
                ("#bbcc33", "#aebd3a"),
                ("#ffaabb", "#e89cac"),
                ("#aaaa00", "#a3a31c"),
            ]
        )
    },
}
NUM_STAGE_COLOURS = 8

# A gradient for more stages than that: constant steps of hue, neighbours of different lightness. Dark text is legible
# on all of them.
_GRADIENT_LIGHT = (
    "#a6c9ff #73a7ec #8ad2ff #56afe4 #71d9ff #38b5d5 #5fdff4 #28bac2 #5fe2dd #37bcaa #70e3c3 #55bb91 #8be1a9 #74b878 "
    "#a8dc90 #91b260 #c4d57c #abaa4e #dccc70 #c0a147 #f1c36f #d1984c #ffba79 #dd905d #ffb28c #e38972 #ffada3 #e3868b "
    "#ffabbd #de85a4 #ffabd6 #d587bb"
)
_GRADIENT_DARK = (
    "#95b6fe #6494d5 #7bbefa #479ccd #62c5ef #27a2c0 #51cade #10a6ad #50cec9 #25a898 #61ceb1 #46a780 #7bcc98 #64a468 "
    "#97c881 #809f52 #b1c16d #989740 #c8b962 #ac8f38 #dbb061 #bc863e #eaa76b #c67e4e #f2a07c #cc7863 #f69b92 #cd757a "
    "#f499aa #c87491 #ec9ac2 #bf77a7"
)
PALETTE |= {
    f"gradient_{i}": Colour(light, dark)
    for i, (light, dark) in enumerate(zip(_GRADIENT_LIGHT.split(), _GRADIENT_DARK.split(), strict=True))
}
_NUM_GRADIENT = len(_GRADIENT_LIGHT.split())


def name_stage_colour(number: int, count: int) -> str:
    """Return the name of the colour for ``number``, the index of one of ``count`` pipeline stages or device types. If
    ``count`` is at most eight, the colours have different hues. If it is more, they form a gradient from the first to
    the last; if it is more than 32, neighbours share colours."""
    if count <= NUM_STAGE_COLOURS:
        return f"stage_{number}"
    return f"gradient_{round(number * (_NUM_GRADIENT - 1) / (count - 1))}"


# How much paler the colours of a rank's second virtual stage, and of later ones, are.
_LATER = {1: 0.4, 2: 0.62}
_COMPUTED = ("forward", "backward", "backward_input", "backward_weight")
PALETTE |= {
    f"{name}_{k}": PALETTE[name].towards(PALETTE["canvas"], share) for name in _COMPUTED for k, share in _LATER.items()
}


def name_chunk_colour(colour: str, chunk: int) -> str:
    """Return the name of the colour for a box of a timeline. Computations on later virtual stages than 0 have a paler
    variant of ``colour``; everything else has ``colour`` itself. ``colour``: name of the colour of its operation, such
    as ``forward``. ``chunk``: which of its rank's virtual pipeline stages the box belongs to, from 0."""
    return f"{colour}_{min(chunk, max(_LATER))}" if chunk and colour in _COMPUTED else colour


def style_sheet() -> str:
    """Return the style sheet of a picture as CSS text. It has fonts and, for each colour name of ``PALETTE`` such as
    ``ink``, a class ``f-ink`` that fills with the colour and a class ``s-ink`` that draws lines in it, for light and
    dark viewers.
    """
    return "\n".join(
        [
            f"svg.{ROOT_CLASS}{{color-scheme:light dark}}",
            f".{ROOT_CLASS} text{{font-family:{FONT}}}",
            f".{ROOT_CLASS} .num{{font-variant-numeric:tabular-nums}}",
            f".{ROOT_CLASS} g.hit:hover>rect{{stroke-width:1.5}}",
            *_build_style_rules({name: c.light for name, c in PALETTE.items()}),
            "@media (prefers-color-scheme:dark){",
            *_build_style_rules({name: c.dark for name, c in PALETTE.items()}),
            "}",
        ]
    )


def _build_style_rules(colours: Mapping[str, str]) -> Iterator[str]:
    """Yield the CSS rules of one colour scheme, light or dark: two classes for each colour, which fill with it and draw
    lines in it. ``colours``: name of a colour -> its value like ``#4477aa``.
    """
    yield f"svg.{ROOT_CLASS}{{background:{colours['canvas']}}}"
    yield from (f".{ROOT_CLASS} .f-{name}{{fill:{colour}}}" for name, colour in colours.items())
    yield from (f".{ROOT_CLASS} .s-{name}{{stroke:{colour}}}" for name, colour in colours.items())
    yield f".{ROOT_CLASS} g.hit:hover>rect{{stroke:{colours['ink']}}}"


def format_coordinate(value: float) -> str:
    """Return ``value``, a coordinate in pixels, as text with at most two decimals, such as ``12.5``."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def create_picture(width: float, height: float, description: str) -> ET.Element:
    """Return the ``svg`` root element of a picture of ``width`` by ``height`` pixels. It contains the style sheet and
    the hatch pattern for idle time. ``description``: the picture's title in its accessible form.
    """
    root = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "class": ROOT_CLASS,
            "width": format_coordinate(width),
            "height": format_coordinate(height),
            "viewBox": f"0 0 {format_coordinate(width)} {format_coordinate(height)}",
            "role": "img",
            "font-family": FONT,
        },
    )
    ET.SubElement(root, "title").text = description
    ET.SubElement(root, "style").text = style_sheet()
    hatch = ET.SubElement(
        ET.SubElement(root, "defs"),
        "pattern",
        {
            "id": "pt-idle",
            "width": "6",
            "height": "6",
            "patternUnits": "userSpaceOnUse",
            "patternTransform": "rotate(45)",
        },
    )
    draw_rectangle(hatch, 0, 0, 6, 6, "idle")
    draw_rectangle(hatch, 0, 0, 1.6, 6, "hatch")
    return root


def draw_group(parent: ET.Element, tooltip: str = "", name: str = "") -> ET.Element:
    """Append a ``<g>`` element to ``parent`` and return it. ``tooltip``: text that browsers show when the pointer rests
    on the element; empty: no tooltip. ``name``: its ``class`` attribute."""
    element = ET.SubElement(parent, "g", {"class": name} if name else {})
    if tooltip:
        ET.SubElement(element, "title").text = tooltip
    return element


def draw_rectangle(
    parent: ET.Element,
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    stroke: str | None = None,
    radius: float = 0.0,
) -> ET.Element:
    """Append a rectangle to ``parent`` and return it. ``x``, ``y``: the top left corner, and ``width``, ``height``: the
    size, in pixels. ``fill``: name of a colour in ``PALETTE``, such as ``ink``, or ``"hatched"``, which marks idle
    time. ``stroke``: name of the colour of the outline; ``None``: no outline. ``radius``: radius of the corners in
    pixels.
    """
    attributes = {
        "x": format_coordinate(x),
        "y": format_coordinate(y),
        "width": format_coordinate(width),
        "height": format_coordinate(height),
    }
    if fill == "hatched":
        attributes["fill"] = "url(#pt-idle)"
    else:
        attributes |= {"fill": PALETTE[fill].light, "class": f"f-{fill}"}
    if stroke:
        attributes["stroke"] = PALETTE[stroke].light
        attributes["class"] = f"{attributes.get('class', '')} s-{stroke}".strip()
    if radius:
        attributes["rx"] = format_coordinate(radius)
    return ET.SubElement(parent, "rect", attributes)


def draw_line(
    parent: ET.Element, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1.0
) -> ET.Element:
    """Append a straight line from (``x1``, ``y1``) to (``x2``, ``y2``) to ``parent`` and return it. ``stroke``: name of
    a colour in ``PALETTE``, such as ``ink``. ``width``: of the line, in pixels.
    """
    return ET.SubElement(
        parent,
        "line",
        {
            "x1": format_coordinate(x1),
            "y1": format_coordinate(y1),
            "x2": format_coordinate(x2),
            "y2": format_coordinate(y2),
            "stroke": PALETTE[stroke].light,
            "class": f"s-{stroke}",
            "stroke-width": format_coordinate(width),
        },
    )


def draw_text(
    parent: ET.Element,
    x: float,
    y: float,
    content: str,
    *,
    size: float = 12.0,
    fill: str = "ink",
    anchor: str = "start",
    bold: bool = False,
) -> ET.Element:
    """Append ``content``, a line of text, to ``parent`` and return it, in bold letters if ``bold``. ``x``: the x
    coordinate of its left end, middle or right end, for ``anchor`` ``start``, ``middle`` or ``end``. ``y``: the y
    coordinate of its baseline. ``size``: size of the letters in pixels. ``fill``: name of a colour in ``PALETTE``, such
    as ``ink``.
    """
    attributes = {
        "x": format_coordinate(x),
        "y": format_coordinate(y),
        "font-size": format_coordinate(size),
        "fill": PALETTE[fill].light,
        "class": f"f-{fill} num",
    }
    if anchor != "start":
        attributes["text-anchor"] = anchor
    if bold:
        attributes["font-weight"] = "600"
    element = ET.SubElement(parent, "text", attributes)
    element.text = content
    return element


def draw_text_span(parent: ET.Element, content: str, *, size: float, fill: str, gap: float) -> ET.Element:
    """Append ``content`` in normal weight to the text element ``parent`` and return the new element. ``size``: of the
    letters, in pixels. ``fill``: name of a colour in ``PALETTE``, such as ``ink``. ``gap``: pixels between the earlier
    text and this one.
    """
    attributes = {
        "font-size": format_coordinate(size),
        "font-weight": "400",
        "fill": PALETTE[fill].light,
        "class": f"f-{fill}",
    }
    element = ET.SubElement(parent, "tspan", attributes | {"dx": format_coordinate(gap)})
    element.text = content
    return element


_NARROW, _WIDE = frozenset("iljtfrI.,:;'|!()[] -·"), frozenset("mwMWQ%@→×")


def text_width(content: str, size: float, bold: bool = False) -> float:
    """Return an estimate of the width of ``content`` in pixels. The exact width depends on the fonts of the viewer, so
    the estimate tends to be too wide. ``size``: of the letters, in pixels. ``bold``: whether the letters are bold."""
    width = 0.0
    for char in content:
        if char in _NARROW:
            width += 0.36
        elif char in _WIDE:
            width += 0.92
        elif unicodedata.east_asian_width(char) in "WF":
            width += 1.05
        else:
            width += 0.72 if char.isupper() else 0.61
    return width * size * (1.14 if bold else 1.0)


@dataclass(frozen=True)
class Header:
    """Describes the text above a picture. ``title``, ``subtitle``: a heading and a line below it. ``figures``: numbers
    to show, as pairs of texts (name, value) such as ``("step time", "7 s")``. ``legend``: pairs (name of a colour or
    ``"hatched"``, meaning).
    """

    title: str
    subtitle: str
    figures: Sequence[tuple[str, str]]
    legend: Sequence[tuple[str, str]]


_MARGIN, _GAP, _SWATCH = 20.0, 26.0, 11.0


def _wrap_words(content: str, size: float, width: float) -> list[str]:
    """Return ``content`` broken into lines of whole words that fit into ``width`` pixels. ``size``: of the letters, in
    pixels."""
    lines: list[str] = []
    for word in content.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def draw_header(parent: ET.Element, header: Header, width: float) -> float:
    """Draw ``header`` at the top of the picture ``parent``, with line breaks where needed. Return the y coordinate at
    which the header ends. The group that contains the header has this number as its attribute ``data-bottom``.
    ``width``: of the picture, in pixels.
    """
    parent = draw_group(parent, name=HEADER_CLASS)
    draw_text(parent, _MARGIN, 32, header.title, size=17, bold=True)
    y = 32.0
    if header.subtitle:
        for number, line in enumerate(_wrap_words(header.subtitle, 12, width - 2 * _MARGIN)):
            y += 16 if number else 20
            draw_text(parent, _MARGIN, y, line, size=12, fill="muted")
    if header.figures:
        y += 26
        x = _MARGIN
        for name, value in header.figures:
            cell = max(text_width(name, 11), text_width(value, 14, bold=True))
            if x > _MARGIN and x + cell > width - _MARGIN:
                x, y = _MARGIN, y + 42
            draw_text(parent, x, y, name, size=11, fill="muted")
            draw_text(parent, x, y + 18, value, size=14, bold=True)
            x += cell + _GAP
        y += 18
    if header.legend:
        y += 28
        x = _MARGIN
        for colour, meaning in header.legend:
            cell = _SWATCH + 6 + text_width(meaning, 11)
            if x > _MARGIN and x + cell > width - _MARGIN:
                x, y = _MARGIN, y + 20
            draw_rectangle(parent, x, y - _SWATCH + 1.5, _SWATCH, _SWATCH, colour, radius=2)
            draw_text(parent, x + _SWATCH + 6, y, meaning, size=11, fill="muted")
            x += cell + 16
    parent.set("data-bottom", format_coordinate(y + 16))
    return y + 16


def to_text(root: ET.Element) -> str:
    """Return the picture with the root element ``root`` as the text of a standalone SVG file."""
    for element in root.iter():
        if element.tag not in ("text", "tspan"):  # inside text, a line break is drawn as a space
            for child in element:
                child.tail = "\n"
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


_PAD_X, _PAD_Y = 12.0, 10.0

_CARD_SWATCH, _INDENT, _COLUMN_GAP = 10.0, 16.0, 18.0
_BAR_WIDTH, _BAR_HEIGHT = 110.0, 8.0


@dataclass(frozen=True)
class CardRow:
    """Describes a line of a card: a colour swatch, then ``text``, then the smaller grey text ``aside``, and at the
    right the texts in ``columns``.

    ``size``: size of the letters in pixels. ``bold``: whether they are bold. ``fill``, ``swatch``: names of the colours
    of the text and of the swatch; no swatch if empty. ``bar``: a fraction of 1 that is drawn as a bar before the text;
    ``None`` for no bar. ``space``: pixels above the line.
    """

    text: str
    size: float = 11.0
    fill: str = "ink"
    bold: bool = False
    aside: str = ""
    swatch: str = ""
    columns: tuple[str, ...] = ()
    bar: float | None = None
    space: float = 0.0  # pixels above the line

    @property
    def height(self) -> float:
        return self.space + self.size * 1.42

    @property
    def lead(self) -> float:
        """Return the distance in pixels from the left edge of the row to its text."""
        return (_INDENT if self.swatch else 0.0) + (_BAR_WIDTH + 8 if self.bar is not None else 0.0)

    @property
    def width(self) -> float:
        """Return the width in pixels of this line with its swatch, bar, ``text`` and ``aside``. The texts in
        ``columns``, which all rows of a card align, are not included."""
        aside = text_width(self.aside, self.size - 1) + 8 if self.aside else 0.0
        return self.lead + text_width(self.text, self.size, self.bold) + aside


@dataclass(frozen=True)
class Card:
    """Describes a list of text lines of a picture, whose size is known before it is drawn. ``rows``: the lines, from
    the top.
    """

    rows: tuple[CardRow, ...]

    @property
    def column_widths(self) -> list[float]:
        """Return the width in pixels of each right-aligned column, from left to right: the width of its longest text,
        with a margin.
        """
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
    """Draw the rows of ``card`` into ``parent``, without a frame. ``x``, ``y``: the top left corner in pixels.
    ``width``: pixels up to the right edge, to which columns are aligned.
    """
    columns = card.column_widths
    top = y + _PAD_Y
    for row in card.rows:
        base = top + row.space + row.size * 1.08
        _draw_row(parent, row, x + _PAD_X, base)
        right = x + width - _PAD_X
        for amount, column in zip(reversed(row.columns), reversed(columns), strict=False):
            draw_text(parent, right, base, amount, size=row.size, fill=row.fill, anchor="end")
            right -= column
        top += row.height


def _draw_row(parent: ET.Element, row: CardRow, x: float, base: float) -> None:
    """Draw ``row``, one line of a card, into ``parent``: its swatch, its bar and its texts, but not the texts that are
    aligned in columns. ``x``: the left edge. ``base``: the y coordinate of the text's baseline.
    """
    if row.swatch:
        draw_rectangle(
            parent, x, base - row.size * 0.36 - _CARD_SWATCH / 2, _CARD_SWATCH, _CARD_SWATCH, row.swatch, radius=2
        )
    if row.bar is not None:
        top = base - row.size * 0.36 - _BAR_HEIGHT / 2
        draw_rectangle(parent, x, top, _BAR_WIDTH, _BAR_HEIGHT, "memory_left", radius=_BAR_HEIGHT / 2)
        filled = min(1.0, max(0.06, row.bar)) * _BAR_WIDTH
        draw_rectangle(
            parent, x, top, filled, _BAR_HEIGHT, "memory" if row.bar <= 1 else "all_reduce", radius=_BAR_HEIGHT / 2
        )
    start = x + row.lead
    element = draw_text(parent, start, base, row.text, size=row.size, fill=row.fill, bold=row.bold)
    if row.aside:
        draw_text_span(element, row.aside, size=row.size - 1, fill="muted", gap=8)


def wrap_names(prefix: str, names: Sequence[str], most_lines: int = 2, longest: int = 52) -> list[str]:
    """Return a text of ``prefix`` and then ``names``, separated by commas, as at most ``most_lines`` lines of about
    ``longest`` characters. Names that do not fit are counted at the end of the last line: ``and 5 more``.
    """
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
