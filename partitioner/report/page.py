"""The report of a plan: one HTML file with its own styles and script, which loads nothing.

The page has a bounded size: pictures, tables and texts have limits, and the page lists what was left out.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from xml.etree import ElementTree as ET

from partitioner.draw import draw
from partitioner.draw.topology import draw_topology
from partitioner.explain.explain import explain_parts, summary_parts
from partitioner.explain.tables import candidate_counts, describe_tried_rows, describe_uncovered_rows
from partitioner.passes.errors import PartitionError
from partitioner.plan import Plan
from partitioner.plans.figures import key_figures, picture_title
from partitioner.plans.mesh_axes import rate_rows
from partitioner.report.html import (
    append_children,
    build_element,
    build_parts,
    build_table,
    clean_text,
    format_html,
)
from partitioner.report.pictures import (
    build_figure,
    build_shared_patterns,
    embed_picture,
    format_picture_styles,
)
from partitioner.report.tables import (
    CANDIDATE_TABLES,
    MOST_CANDIDATES,
    build_candidate_tables,
    build_why_not_table,
    count_left_candidates,
)
from partitioner.topology import Topology
from partitioner.units import bytes_text, format_plural

MOST_BYTES = 5_000_000  # of a page

_MOST_SECTION_BYTES = 300_000  # of a section without pictures; a larger one is replaced by a sentence
_HERE = Path(__file__).parent

_PICTURES = {  # view -> title, what the section says
    "graph": (
        "Graph",
        "Pipeline stages, the runs of equal blocks in them, and what they exchange. Equal stages are drawn once.",
    ),
    "timeline": ("Timeline", "The simulated step: what each stage computes and sends, and when it waits."),
    "memory": ("Memory", "What the ranks of each stage hold during the step."),
    "topology": ("Topology", "The devices, their links, and the ranks on them. Equal nodes are drawn once."),
}


_VIEWERS = {  # view -> sentence on another viewer: before its link, address, text of the link, after it
    "graph": (
        "With all operators: partitioner export plan.json model-explorer graphs.json writes it for ",
        "https://github.com/google-ai-edge/model-explorer",
        "Model Explorer",
        ".",
    ),
    "timeline": (
        "With all instructions: partitioner export plan.json perfetto trace.json writes it for ",
        "https://ui.perfetto.dev",
        "Perfetto",
        ".",
    ),
}


def build_report(plan: Plan) -> str:
    """Return the report of ``plan`` as the text of one HTML file that loads nothing else. Every picture and section has
    its own limit in bytes. What exceeds a limit is left out, and the last section lists it.
    """
    left_out: list[str] = []
    return _build_page(picture_title(plan), list(_build_sections(plan, left_out)), left_out)


def build_topology_report(topology: Topology) -> str:
    """Return the text of one HTML file that shows ``topology``: its device types, a table of its links, and its
    picture.
    """
    left_out: list[str] = []
    titles = ("link", "joins", "bandwidth", "a device gets", "a node gets", "latency")
    links = build_table("Links", [(title, title in titles[2:]) for title in titles], rate_rows(topology))
    kinds = Counter(device.kind for device in topology.devices)
    words = [f"{count:,} × {kind}, {bytes_text(topology.types[kind].memory)}" for kind, count in kinds.items()]
    devices = build_element("ul", *(build_element("li", each) for each in words))
    sections = [
        build_element("section", build_element("h2", "Devices and links"), devices, links, id="summary"),
        _build_picture_section("topology", partial(draw_topology, topology), left_out),
    ]
    title = f"{topology.name}: {format_plural(topology.num_devices, 'device')}"
    return _build_page(title, sections, left_out)


def _build_page(title: str, sections: list[ET.Element], left_out: list[str]) -> str:
    """Return the text of an HTML file. ``title``: its heading. ``sections``: its contents, each with an ``id`` and a
    heading as its first child. ``left_out``: sentences that say what the page leaves out, which become the last
    section.
    """
    menu = build_element("ul")
    for section in sections:
        name = section.get("id", "")
        menu.append(build_element("li", build_element("a", section[0].text, href=f"#{name}")))
    header = build_element(
        "header",
        build_element("h1", title),
        build_element("button", "Dark or light", type="button", id="theme", title="Change between dark and light"),
        build_element("nav", menu, aria_label="Sections"),
    )
    body = build_element(
        "body",
        build_element("a", "To the contents", class_="skip", href="#contents"),
        build_shared_patterns(),
        header,
        build_element("main", *sections, _build_omissions(left_out), id="contents"),
        _build_footer(),
    )
    page = f'<!doctype html>\n<html lang="en">\n{_build_head(title)}\n{format_html(body)}\n</html>\n'
    script = f"<script>{read_asset('page.js')}</script></body>"
    return page.replace("</body>", script)


def _build_head(title: str) -> str:
    """Return the ``head`` element of the page as text. Its content security policy lets the page load nothing and run
    no script but that of the report. ``title``: the title of the page.
    """
    digest = base64.b64encode(hashlib.sha256(read_asset("page.js").encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    head = build_element(
        "head",
        build_element("meta", charset="utf-8"),
        build_element("meta", http_equiv="Content-Security-Policy", content=policy),
        build_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        build_element("meta", name="generator", content="partitioner"),
        build_element("title", title),
    )
    style = f"<style>{format_picture_styles()}{read_asset('page.css')}</style></head>"
    return format_html(head).replace("</head>", style)


@cache
def read_asset(name: str) -> str:
    """Return the text of the file ``name`` in the folder of this module, such as ``page.css`` or ``page.js``."""
    return (_HERE / name).read_text(encoding="utf-8")


def _build_sections(plan: Plan, left_out: list[str]) -> Iterator[ET.Element]:
    """Yield the sections of the report of ``plan`` in the order of the page. For each thing that is left out because of
    its size, or each picture that cannot be drawn, a sentence is appended to ``left_out``.
    """
    yield _build_section("summary", "Summary", lambda: _build_summary(plan), left_out)
    for view in _PICTURES:
        yield _build_picture_section(view, partial(draw, plan, view), left_out)
    yield _build_section("candidates", "Candidates", lambda: _build_candidates(plan, left_out), left_out)
    yield _build_section("why-not", "Why not?", lambda: _build_answers(plan), left_out)
    yield _build_section("operators", "Costs of operators", lambda: _build_operators(plan, left_out), left_out)
    yield _build_section(
        "explanation", "Explanation", lambda: build_parts(explain_parts(plan), "Explanation"), left_out
    )


def _build_picture_section(view: str, draw_source: Callable[[], str], left_out: list[str]) -> ET.Element:
    """Return a section of the page with one picture. ``view``: the kind of picture, such as ``graph`` or ``timeline``.
    ``draw_source``: returns the picture as SVG text. If the picture, or a part of it, is missing, a sentence on it is
    appended to ``left_out``.
    """
    title, words = _PICTURES[view]
    picture = embed_picture(view, draw_source)
    if picture.left_out or picture.missing:
        left_out.append(picture.missing or f"Of the pictures: {picture.left_out}.")
    figure = build_figure(picture, view, title)
    heading = [build_element("h2", title), build_element("p", words)]
    if view in _VIEWERS:
        before, address, name, after = _VIEWERS[view]
        heading.append(build_element("p", before, build_element("a", name, href=address), after))
    return build_element("section", *heading, figure, id=view)


def _build_section(
    name: str, title: str, build_content: Callable[[], list[ET.Element]], left_out: list[str]
) -> ET.Element:
    """Return a section with the ``id`` attribute ``name``, the heading ``title`` and the elements that
    ``build_content`` returns. If ``build_content`` raises :class:`PartitionError`, a sentence with the error replaces
    the elements. If they are longer than 300,000 bytes as HTML, a sentence replaces them and is appended to
    ``left_out``.
    """
    section = build_element("section", build_element("h2", title), id=name)
    try:
        content = build_content()
    except PartitionError as error:
        content = [build_element("p", f"This plan has none: {error}.", class_="missing")]
    size = sum(len(format_html(element).encode()) for element in content)
    if size > _MOST_SECTION_BYTES:
        sentence = f"The section {title} takes {bytes_text(size)} and is left out of this page."
        left_out.append(sentence)
        content = [build_element("p", sentence, class_="missing")]
    append_children(section, content)
    return section


def _build_summary(plan: Plan) -> list[ET.Element]:
    """Return the elements of the section "Summary": the main numbers of ``plan`` (such as the step time) as cards, then
    a table of more numbers and a table of the pipeline stages."""
    cards = build_element("dl", class_="cards")
    for name, value in key_figures(plan):
        cards.append(build_element("div", build_element("dt", name), build_element("dd", value)))
    parts = build_parts(summary_parts(plan), "Figures, stages and operators")
    for place, part in enumerate(parts):
        if part.tag == "div" and part.find("table[@class='pairs']") is None:  # the tables after the main numbers
            parts.insert(place, build_element("h3", "Stages"))
            break
    return [cards, *parts]


def _build_candidates(plan: Plan, left_out: list[str]) -> list[ET.Element]:
    """Return the elements of the section "Candidates" of the report of ``plan``: the numbers of candidates by outcome,
    a field to filter rows, and the tables of the layouts that the search examined. If some have no row, a sentence on
    it is appended to ``left_out``.
    """
    rest = count_left_candidates(plan)
    words = [candidate_counts(plan.certificate)]
    if rest:
        left_out.append(f"Of the candidates: {rest:,} without a row; the tables have the best {MOST_CANDIDATES:,}.")
        words.append(f"The tables have the best {MOST_CANDIDATES:,}; {rest:,} more have no row.")
    choice = build_element(
        "label",
        "Show only rows with ",
        build_element(
            "input",
            type="search",
            class_="filter",
            placeholder="tp 8, slower, 1f1b",
            data_tables=" ".join(CANDIDATE_TABLES),
            autocomplete="off",
        ),
    )
    status = build_element("span", class_="found", role="status")
    tools = build_element("div", choice, status, class_="tools")
    notes = [describe_tried_rows(plan.certificate, "lower bound"), describe_uncovered_rows(plan.certificate)]
    below = [build_element("p", note) for note in notes if note]
    return [build_element("p", ". ".join(filter(None, words))), tools, *build_candidate_tables(plan), *below]


def _build_answers(plan: Plan) -> list[ET.Element]:
    """Return the elements of the section "Why not?" of the report of ``plan``: an introduction, and a table that says
    what plans with other constraints would be, such as slower or impossible.
    """
    words = (
        "The answers of plan.why_not() for single constraints, from the candidates of the search. "
        'Where the table says "needs the model", plan.why_not(..., model=model) plans the job again.'
    )
    return [build_element("p", words), *build_why_not_table(plan)]


def _build_operators(plan: Plan, left_out: list[str]) -> list[ET.Element]:
    """Return the elements of the section "Costs of operators" of the report of ``plan``: an introduction and the table
    of predicted costs. If some operators have no row, a sentence on it is appended to ``left_out``. Raise
    :class:`PartitionError` if the plan has no program (instructions of its ranks), only estimates."""
    plan.program  # noqa: B018  # raises the typed error of a plan without a program
    from partitioner.report.operator_costs import MOST_OPERATORS, build_operator_table, list_operator_costs

    costs = list_operator_costs(plan)
    words = (
        "Kernels alone, forward and backward, without communication, recomputation and the time in which a device "
        "waits for the host. FLOPs and bytes of a call count its forward and its backward. Equal blocks share a row, "
        "under the path of the first."
    )
    if len(costs) > MOST_OPERATORS:
        left_out.append(f"Of the operators: the {len(costs) - MOST_OPERATORS:,} that take least.")
    return [build_element("p", words), build_operator_table(costs)]


def _build_omissions(left_out: list[str]) -> ET.Element:
    """Return the last section of the page, which lists the sentences ``left_out``; if there are none, it says that the
    page is complete.
    """
    lines = left_out or ["Nothing: all pictures and rows of the plan are in this page."]
    items = [build_element("li", clean_text(line)) for line in lines]
    return build_element(
        "section", build_element("h2", "What this page leaves out"), build_element("ul", *items), id="left-out"
    )


def _build_footer() -> ET.Element:
    from partitioner import __version__

    return build_element("footer", build_element("p", f"Written by partitioner {__version__}. Times are predictions."))
