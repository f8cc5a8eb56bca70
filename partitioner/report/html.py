"""Elements of HTML pages, and the tables and texts of ``partitioner/explain`` as HTML.

``page.py`` assembles the report from them. Pages are trees of elements. The serialiser escapes every text and
attribute, so that no name of a plan can become markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Child = ET.Element | str | None
Cell = Child | tuple[float | str, Child]  # a pair has a key to sort by

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_BAR = re.compile("█*")
_BAR_CELLS = 30  # characters of the longest bar in a text report

MOST_CHARACTERS = 1200  # of one text; the rest of a longer text is left out


def clean_text(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return ``text`` with each control character replaced by ``�``. A text longer than ``most`` characters is cut to
    that length and ends in ``…``.
    """
    text = _CONTROL.sub("�", text)
    return text if len(text) <= most else text[: most - 1] + "…"


def build_element(tag: str, *children: Child, **attributes: Any) -> ET.Element:
    """Return an HTML element with the name ``tag``. ``children``: elements and texts inside it, in order; ``None`` is
    skipped.

    ``attributes``: the attributes of the element by name. ``_`` in a name stands for ``-``, and ``_`` at its end is
    dropped, so that ``class_`` gives ``class``. An attribute whose value is ``None`` or ``False`` is left out; one
    whose value is ``True`` is written with an empty value.
    """
    element = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None and value is not False:
            element.set(name.rstrip("_").replace("_", "-"), clean_text("" if value is True else str(value)))
    append_children(element, children)
    return element


def append_children(element: ET.Element, children: Iterable[Child]) -> None:
    """Append ``children``, elements and texts, to ``element`` in order. ``None`` and empty texts are skipped."""
    for child in children:
        if isinstance(child, ET.Element):
            element.append(child)
        elif child:
            last = element[-1] if len(element) else None
            if last is None:
                element.text = (element.text or "") + clean_text(child)
            else:
                last.tail = (last.tail or "") + clean_text(child)


def format_html(element: ET.Element) -> str:
    """Return ``element`` with everything inside it as HTML text."""
    return ET.tostring(element, encoding="unicode", method="html")


def build_table(
    caption: str,
    columns: Sequence[tuple[str, bool]],
    rows: Iterable[Sequence[Cell]],
    *,
    sortable: bool = False,
    captioned: bool = True,
    name: str | None = None,
    marks: Sequence[str | None] = (),
) -> ET.Element:
    """Return an HTML table inside an element that scrolls sideways.

    ``caption``: the title, which is hidden if ``captioned`` is false. ``columns``: (title, whether it holds numbers) of
    each column. ``rows``: one cell per column; a cell is a text, an element, ``None``, or a pair (key to sort by,
    content). ``sortable``: whether a click on a column's title sorts the rows. ``name``: the ``id`` attribute of the
    table. ``marks``: the ``class`` attribute of each row, ``None`` for no class; the sequence may be shorter than
    ``rows``.
    """
    head = build_element("tr")
    for title, numeric in columns:
        shown: Child = build_element("button", title, type="button") if sortable else title
        head.append(build_element("th", shown, scope="col", class_="number" if numeric else None))
    body = build_element("tbody")
    for number, row in enumerate(rows):
        line = build_element("tr", class_=marks[number] if number < len(marks) else None)
        for place, ((_, numeric), cell) in enumerate(zip(columns, row, strict=True)):
            key, content = cell if isinstance(cell, tuple) else (None, cell)
            tag = "td" if place else "th"
            line.append(
                build_element(
                    tag,
                    content,
                    scope=None if place else "row",
                    class_="number" if numeric else None,
                    data_key=key,
                )
            )
        body.append(line)
    table = build_element(
        "table",
        build_element("caption", caption, class_=None if captioned else "hidden"),
        build_element("thead", head),
        body,
        id=name,
        class_="sortable" if sortable else None,
    )
    return build_element("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def build_parts(parts: Iterable[Any], caption: str, level: int = 3) -> list[ET.Element]:
    """Return the ``parts`` of a text report, which are objects of the library rich, as HTML elements in the same order.
    A rich table becomes an HTML table, a text without indent a heading, an indented text a paragraph, and consecutive
    texts that begin with ``- `` a list. Empty texts are left out.

    ``caption``: the caption of tables before the first heading; later tables have the text of the heading above them.
    ``level``: the level of the headings, 3 for ``<h3>``.
    """
    found: list[ET.Element] = []
    for part in parts:
        inner: object = part
        while isinstance(inner, Padding):  # lists inside lists are padded twice
            inner = inner.renderable
        if isinstance(inner, Table):
            found.append(_convert_table(inner, caption))
            continue
        text = inner.plain if isinstance(inner, Text) else str(inner)
        if not text.strip():
            continue
        if inner is part and isinstance(part, Text):
            caption = text
            found.append(build_element(f"h{level}", text))
        elif text.lstrip().startswith("- "):
            if not found or found[-1].tag != "ul":
                found.append(build_element("ul"))
            found[-1].append(build_element("li", text.lstrip()[2:]))
        else:
            found.append(build_element("p", text))
    return found


def read_cell(cell: Any) -> str:
    """Return the plain text of ``cell``, a cell of a table of the library rich."""
    return cell.plain if isinstance(cell, Text) else str(cell)


def _convert_table(table: Table, caption: str) -> ET.Element:
    """Return ``table``, a table of the library rich, as an HTML table with a hidden ``caption``. Right-aligned columns
    become columns of numbers. A row in bold is marked as the chosen row. A table whose columns have no titles becomes a
    list of names and values."""
    columns = [(read_cell(column.header), column.justify == "right") for column in table.columns]
    rows = [[read_cell(cell) for cell in row] for row in zip(*(column.cells for column in table.columns), strict=True)]
    if any(title for title, _ in columns):
        marks = ["chosen" if row.style == "bold" else None for row in table.rows]
        return build_table(caption, columns, rows, captioned=False, marks=marks)
    return build_pair_list(rows, caption)


def build_pair_list(rows: Iterable[Sequence[str]], caption: str) -> ET.Element:
    """Return an HTML table without column titles. ``rows``: for each row a name, which becomes the row's heading, then
    the values. If a row has several values, one that consists of ``█`` characters only becomes a bar of proportional
    length. ``caption``: a hidden title.
    """
    body = build_element("tbody")
    for name, *values in rows:
        line = build_element("tr", build_element("th", name, scope="row"))
        for value in values:
            drawn = len(values) > 1 and _BAR.fullmatch(value)
            line.append(_build_bar(len(value) / _BAR_CELLS) if drawn else build_element("td", value))
        body.append(line)
    table = build_element("table", build_element("caption", caption, class_="hidden"), body, class_="pairs")
    return build_element("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _build_bar(share: float) -> ET.Element:
    """Return a table cell with a horizontal bar. ``share``: the length of the bar as a fraction of the cell's width, 0
    to 1.
    """
    bar = build_element("span", class_="bar", style=f"width:{max(0.5, min(100.0, 100 * share)):.1f}%")
    return build_element("td", build_element("span", bar, class_="track", aria_hidden="true"), class_="bars")
