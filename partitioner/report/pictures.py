"""The pictures of a plan inside a page. Colours follow the page's theme, the legend and the notes are HTML, and the
drawing is in a frame that the page's script moves and zooms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from partitioner.draw.svg import HEADER_CLASS, PALETTE
from partitioner.passes.errors import PartitionError
from partitioner.report.html import build_element, clean_text, format_html
from partitioner.units import bytes_text

MOST_PICTURE_BYTES = 750_000
MOST_SOURCE_BYTES = 8_000_000  # larger pictures are not read

_SVG = "{http://www.w3.org/2000/svg}"
_COLOURED = ("fill", "stroke")
_SEARCHED = ("graph", "topology")  # kinds of pictures whose parts have names to search for
_NOTE_SIZE = "12"  # font size of the notes in a header; the title is larger


@dataclass(frozen=True)
class Embedded:
    """A picture inside an HTML page. ``drawing``: the ``svg`` element, or ``None`` if there is no picture. ``title``:
    what the picture shows. ``notes``: the text under the title. ``legend``: pairs (name of a colour or ``hatched``,
    meaning). ``missing``: a sentence that says why there is no picture; empty if there is one. ``left_out``: a text
    that says which part of the picture was left out because of its size; empty if it is complete.
    """

    drawing: ET.Element | None
    title: str = ""
    notes: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    missing: str = ""
    left_out: str = ""


def embed_picture(view: str, draw_source: Callable[[], str]) -> Embedded:
    """Return a picture in the form that an HTML page embeds, at most 750,000 bytes long. If it is longer, its tooltips
    are removed; if that does not suffice, the result has no drawing and says why.

    ``view``: name of the kind of picture, such as ``graph``. ``draw_source``: returns the picture as SVG text; if it
    raises :class:`PartitionError`, the result has the error as its ``missing`` text.
    """
    try:
        source = draw_source()
    except PartitionError as error:
        return Embedded(None, missing=f"There is no {view}: {error}.")
    if len(source) > MOST_SOURCE_BYTES:
        return Embedded(None, missing=_format_missing(view, len(source)))
    root = ET.fromstring(clean_text(source, len(source)))
    title = root.findtext(f"{_SVG}title", view)
    notes, legend = _take_header(root)
    undrawn = root.attrib.pop("data-left-out", "")
    _adapt_elements(root)
    root.set("aria-label", title)
    size = len(format_html(root).encode())
    if size <= MOST_PICTURE_BYTES:
        return Embedded(root, title, notes, legend, left_out=undrawn)
    for parent in root.iter():
        for tip in parent.findall("title"):
            parent.remove(tip)
    if len(format_html(root).encode()) <= MOST_PICTURE_BYTES:
        details = f"the details under the pointer of the {view}, {bytes_text(size)} with them"
        notes = f"{notes} Left out: {details}."  # what the picture itself leaves out is in its notes already
        return Embedded(root, title, notes, legend, left_out=" and ".join(filter(None, (undrawn, details))))
    return Embedded(None, missing=_format_missing(view, size))


def _format_missing(view: str, size: int) -> str:
    """Return a sentence which says that the picture ``view`` of ``size`` bytes is not in the page, and how to write it
    to a file.
    """
    return (
        f"The {view} takes {bytes_text(size)} and is left out of this page. "
        f'plan.to_svg("{view}.svg", view="{view}") writes it to a file of its own.'
    )


def _take_header(root: ET.Element) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Remove the header (title, figures, legend) from the ``svg`` element ``root``, and cut the picture's box to the
    rest. Return the notes of the header as one text, and its legend as pairs (name of a colour or ``hatched``,
    meaning). Both are empty if there is no header.
    """
    header = next((g for g in root.findall(f"{_SVG}g") if g.get("class") == HEADER_CLASS), None)
    if header is None:
        return "", ()
    notes, legend, swatch = [], [], ""
    for element in header:
        if element.tag == f"{_SVG}rect":
            names = (element.get("class") or "").split()
            swatch = next((name[2:] for name in names if name.startswith("f-")), "hatched")
        elif swatch:
            legend.append((swatch, "".join(element.itertext())))
            swatch = ""
        elif element.get("font-size") == _NOTE_SIZE:
            notes.append("".join(element.itertext()))
    top = max(0.0, float(header.get("data-bottom", 0)) - 12)
    root.remove(header)
    width, height = float(root.get("width", 0)), float(root.get("height", 0)) - top
    root.set("viewBox", f"0 {top:g} {width:g} {height:g}")
    root.set("width", f"{width:g}")
    root.set("height", f"{height:g}")
    return " ".join(notes), tuple(legend)


def _adapt_elements(root: ET.Element) -> None:
    """Change the ``svg`` element ``root`` in place for an HTML page: remove name spaces, and the style sheets and
    patterns that the page contains once for all pictures. Attributes for colours and fonts that the page's style sheet
    sets are removed too.
    """
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{_SVG}style", f"{_SVG}defs") or (parent is root and child.tag == f"{_SVG}title"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        names = (element.get("class") or "").split()
        for attribute in _COLOURED:
            if any(name.startswith(f"{attribute[0]}-") for name in names):
                element.attrib.pop(attribute, None)
        element.attrib.pop("font-family", None)


def build_figure(picture: Embedded, view: str, title: str) -> ET.Element:
    """Return ``picture`` as an HTML ``figure`` with its title, notes, legend, a field for details and buttons to zoom.
    If there is no drawing, return a paragraph that says why. ``view``: name of the kind of picture; ``graph`` and
    ``topology`` also have a search field. ``title``: the name of the picture in the accessible label of its frame.
    """
    if picture.drawing is None:
        return build_element("p", picture.missing, class_="missing")
    legend = build_element("ul", class_="legend")
    for colour, meaning in picture.legend:
        swatch = build_element("span", class_=f"swatch b-{colour}", aria_hidden="true")
        legend.append(build_element("li", swatch, meaning))
    field = build_element("input", type="search", class_="search", placeholder="name, then Enter", autocomplete="off")
    search = build_element("label", "Search ", field) if view in _SEARCHED else None
    buttons = [
        build_element("button", shown, type="button", data_do=do, aria_label=f"{label} the {view}", title=label)
        for do, shown, label in (
            ("in", "+", "Enlarge"),
            ("out", "−", "Reduce"),
            ("fit", "Fit", "Fit"),
            ("whole", "Full screen", "Show only"),
        )
    ]
    tools = build_element("div", search, build_element("span", class_="found", role="status"), *buttons, class_="tools")
    hint = f"{title}: drag, or use the arrow keys to move, + and - to zoom, 0 to fit"
    frame = build_element(
        "div", picture.drawing, class_="frame", tabindex="0", role="group", aria_label=hint, data_view=view
    )
    cut = "Only a part of the picture is in the frame: drag it to move, or press Fit."
    hidden = build_element("p", cut, class_="cut", hidden="hidden")
    details = build_element("pre", "Point at, or tap, a part of the picture.", class_="details", aria_live="polite")
    caption = build_element("figcaption", build_element("strong", picture.title), f" {picture.notes}")
    return build_element("figure", tools, caption, legend, hidden, frame, details, class_="picture")


def format_picture_styles() -> str:
    """Return the style sheet that all pictures of a page share: the colours as variables, for the light and the dark
    theme, and classes that fill, stroke and paint the background with each colour.
    """
    light = "".join(f"--{name}:{colour.light};" for name, colour in PALETTE.items())
    dark = "".join(f"--{name}:{colour.dark};" for name, colour in PALETTE.items())
    classes = "".join(
        f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}.b-{name}{{background:var(--{name})}}"
        for name in PALETTE
    )
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}{classes}"
    )


def build_shared_patterns() -> ET.Element:
    """Return an invisible ``svg`` element with the hatch pattern of idle time, which all pictures of a page use."""
    pattern = build_element(
        "pattern",
        build_element("rect", width="6", height="6", class_="f-idle"),
        build_element("rect", width="1.6", height="6", class_="f-hatch"),
        id="pt-idle",
        width="6",
        height="6",
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    return build_element(
        "svg", build_element("defs", pattern), width="0", height="0", aria_hidden="true", class_="patterns"
    )
