"""The HTML report: its structure, that it escapes every text and loads nothing, and its size."""

from __future__ import annotations

import base64
import hashlib
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from partitioner import Plan, Topology
from partitioner.plan import Candidate, OperatorShare
from partitioner.report import page, pictures
from partitioner.report.html import build_element, clean_text, format_html
from partitioner.report.operator_costs import build_operator_table, list_operator_costs
from partitioner.report.page import MOST_BYTES, build_report, build_topology_report, read_asset
from partitioner.report.tables import (
    CANDIDATE_TABLES,
    MOST_ANSWERS,
    MOST_CANDIDATES,
    count_left_candidates,
    list_questions,
)
from partitioner.topology import loads
from tests.helpers.parsed_html import Node, parse_html
from tests.helpers.sample_programs import llama, plan_of

HOSTILE = "</script></style></title><script>hacked=1</script><img src=x onerror=hacked=2>\"'&\x01\ud800"
SECTIONS = "summary graph timeline memory topology candidates why-not operators explanation left-out".split()
VIEWERS = ["https://github.com/google-ai-edge/model-explorer", "https://ui.perfetto.dev"]  # links to other programs


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(llama(pp=4, dp=2, tp=2, layers=8, tied=True, skip=True))


@pytest.fixture(scope="module")
def text(plan: Plan) -> str:
    return build_report(plan)


@pytest.fixture(scope="module")
def nodes(text: str) -> list[Node]:
    return parse_html(text)


def find_nodes(nodes: list[Node], tag: str, **attributes: str) -> list[Node]:
    return [n for n in nodes if n.tag == tag and all(n.attributes.get(k) == v for k, v in attributes.items())]


def with_candidates(plan: Plan, count: int, reason: str = "") -> Plan:
    """``plan`` with ``count`` further candidates that were not solved."""
    more = tuple(
        Candidate(
            mesh={"pp": 1, "dp": 2**k, "cp": 1, "tp": n, "ep": 1},
            microbatch_size=1,
            schedule="1f1b",
            status="infeasible",
            reason=reason,
            missing=5,
        )
        for n, k in ((n, n % 14) for n in range(1, count + 1))
    )
    certificate = plan.certificate.model_copy(update={"candidates": (*plan.certificate.candidates, *more)})
    return plan.model_copy(update={"certificate": certificate})


def test_the_page_has_its_sections_in_order(nodes: list[Node]):
    sections = find_nodes(nodes, "section")
    assert [s.attributes["id"] for s in sections] == SECTIONS
    links = [n.attributes["href"] or "" for n in find_nodes(nodes, "a")]
    assert [link for link in links if "://" in link] == VIEWERS
    links = [link for link in links if "://" not in link]
    assert links == ["#contents", *(f"#{name}" for name in SECTIONS[:-1])]
    ids = [n.attributes["id"] for n in nodes if "id" in n.attributes]
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in links if link} <= set(ids)


def test_headings_are_in_order(nodes: list[Node]):
    levels = [int(n.tag[1]) for n in nodes if re.fullmatch(r"h[1-6]", n.tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert all(n.text.strip() for n in nodes if re.fullmatch(r"h[1-6]", n.tag))


def test_fields_buttons_pictures_and_tables_have_names(nodes: list[Node]):
    assert find_nodes(nodes, "html", lang="en")
    for field in find_nodes(nodes, "input"):
        assert any(parent.tag == "label" and parent.text.strip() for parent in field.parents)
    for button in find_nodes(nodes, "button"):
        assert button.text.strip() or button.attributes.get("aria-label")
        assert button.attributes.get("type") == "button"
    for picture in find_nodes(nodes, "svg"):
        named = picture.attributes.get("role") == "img" and picture.attributes.get("aria-label")
        assert named or picture.attributes.get("aria-hidden") == "true"
    assert len(find_nodes(nodes, "svg", role="img")) == 4
    tables = find_nodes(nodes, "table")
    assert len(tables) > 4
    for table in tables:
        inside = [n for n in nodes if table in n.parents]
        assert [n.text.strip() for n in inside if n.tag == "caption"] != [""]
        assert any(n.tag == "caption" for n in inside)
        assert all(n.attributes.get("scope") in ("row", "col") for n in inside if n.tag == "th")
        assert any(n.tag == "th" for n in inside)
    for frame in (n for n in nodes if n.attributes.get("class") in ("frame", "scroll")):
        assert frame.attributes["tabindex"] == "0" and frame.attributes["aria-label"]


def test_the_page_loads_nothing(text: str, nodes: list[Node]):
    for node in nodes:
        for name in ("src", "href", "xlink:href", "action", "data", "poster"):
            if node.tag == "a" and node.attributes.get(name) in VIEWERS:  # which a reader may open
                continue
            assert node.attributes.get(name, "#").startswith("#"), node  # type: ignore[union-attr]
    assert not find_nodes(nodes, "link") and not find_nodes(nodes, "img")
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {"#pt-idle"}
    assert "@import" not in text
    policy = find_nodes(nodes, "meta", **{"http-equiv": "Content-Security-Policy"})[0].attributes["content"] or ""
    digest = base64.b64encode(hashlib.sha256(read_asset("page.js").encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"'sha256-{digest}'" in policy
    assert [script.text for script in find_nodes(nodes, "script")] == [read_asset("page.js")]


def test_the_page_has_the_plans_numbers(plan: Plan, nodes: list[Node]):
    sections = {n.attributes["id"]: n.text for n in find_nodes(nodes, "section")}
    assert "pp 4 × dp 2 × tp 2" in sections["summary"]
    assert "1.23 s" in sections["summary"]
    assert "Stage 3" in sections["graph"] and "Stage 3" in sections["memory"]
    assert "RotaryEmbedding" in sections["operators"]
    assert "How good is it?" in sections["explanation"]
    rows = [n for n in nodes if n.tag == "tr" and any(p.attributes.get("id") == "candidate-table" for p in n.parents)]
    assert len(rows) == 1 + len(plan.certificate.candidates)
    assert [r.attributes.get("class") for r in rows].count("chosen") == 1
    assert "Nothing" in sections["left-out"]


def test_why_not_asks_about_values_that_the_plan_does_not_have(plan: Plan, nodes: list[Node]):
    questions = list_questions(plan)
    assert {"tp": 8} in questions
    assert all(plan.why_not(**asked).verdict != "chosen" for asked in questions if "tp" in asked)
    shown = next(n.text for n in nodes if n.attributes.get("id") == "why-not-table")
    assert "tp=8" in shown
    assert len(list_questions(with_candidates(plan, 500))) <= MOST_ANSWERS


def test_operators_are_sorted_and_complete(plan: Plan):
    costs = list_operator_costs(plan)
    seconds = [sum(cost.seconds) for cost in costs]
    assert seconds == sorted(seconds, reverse=True)
    blocks = {call.block for stage in plan.program.stages for call in stage.calls if not call.prologue}
    priced = {cost.block for cost in costs}
    assert priced <= blocks and any(cost.flops for cost in costs)
    calls = sum(1 for stage in plan.program.stages for call in stage.calls if call.block == costs[0].block)
    assert costs[0].calls == calls


def test_operators_are_priced_on_each_device_type(plan: Plan):
    """Stages 0 and 1 are on H100s and stages 2 and 3 on A100s, which are slower; each has two of the eight layers."""
    kinds = "[{type: h100-sxm, devices: 8}, {type: a100-80gb, devices: 8}]"
    topology = loads(f"nodes: {kinds}\nlevels: [{{like: nvlink4, nodes: 1}}, {{like: ib-ndr}}]")
    mixed = plan.model_copy(update={"topology": topology})
    costs = list_operator_costs(mixed)
    layers = [cost for cost in costs if cost.block == "DecoderLayer"]
    for operator in {cost.operator for cost in layers}:
        found = {cost.device: cost for cost in layers if cost.operator == operator}
        assert {(device, cost.stages, cost.calls) for device, cost in found.items()} == {
            ("h100-sxm", "0–1", 4),
            ("a100-80gb", "2–3", 4),
        }
        assert sum(found["a100-80gb"].seconds) > sum(found["h100-sxm"].seconds)
    table = format_html(build_operator_table(costs))
    assert ">device<" in table and "for each device type" in table
    alone = format_html(build_operator_table(list_operator_costs(plan)))
    assert ">device<" not in alone and "(h100-sxm)" in alone


def test_hostile_texts_are_escaped(plan: Plan):
    rows = with_candidates(plan, 3, reason=HOSTILE)
    topology = plan.topology.model_copy(update={"name": HOSTILE})
    shares = OperatorShare(matmul_sharded=1.0, without_rule={HOSTILE: 0.5})
    hostile = rows.model_copy(
        update={"model": HOSTILE, "notes": (HOSTILE,), "topology": topology, "shares": shares, "lacking": HOSTILE}
    )
    for text in (build_report(hostile), build_topology_report(topology)):
        nodes = parse_html(text)
        assert len(find_nodes(nodes, "script")) == 1
        assert not find_nodes(nodes, "img")
        assert not any(name.startswith("on") for n in nodes for name in n.attributes)
        text.encode()
        shown = HOSTILE.replace("\x01", "�").replace("\ud800", "�")
        assert shown in find_nodes(nodes, "h1")[0].text
    assert "<script" not in hostile._repr_html_().replace("&lt;script", "")
    assert "<script" not in topology._repr_html_()


def test_elements_escape_texts_and_attributes():
    made = build_element("p", "<b>&", title='"<>&', data_key=1.5, hidden=True, class_=None)
    assert parse_html(format_html(made))[0].attributes == {"title": '"<>&', "data-key": "1.5", "hidden": ""}
    assert parse_html(format_html(made))[0].text == "<b>&"
    assert clean_text("a\x00b" + "c" * 10, 5) == "a�bc…"


@pytest.mark.parametrize(("pp", "dp", "tp", "layers"), [(1, 8, 1, 32), (16, 4, 8, 64), (64, 32, 8, 128)])
def test_the_size_is_bounded(pp: int, dp: int, tp: int, layers: int):
    plan = with_candidates(plan_of(llama(pp=pp, dp=dp, tp=tp, layers=layers)), 6000, reason="because " * 200)
    text = build_report(plan)
    assert len(text.encode()) < MOST_BYTES
    assert count_left_candidates(plan) > 5000
    assert len(find_nodes(parse_html(text), "svg", role="img")) == 4
    left = next(n.text for n in parse_html(text) if n.attributes.get("id") == "left-out")
    assert f"{count_left_candidates(plan):,} without a row; the tables have the best {MOST_CANDIDATES}." in left


def test_limits_add_up_to_less_than_the_bound():
    drawn = len(page._PICTURES) * pictures.MOST_PICTURE_BYTES
    written = (len(SECTIONS) - len(page._PICTURES) - 1) * page._MOST_SECTION_BYTES
    assets = sum(len(read_asset(name)) for name in ("page.css", "page.js")) + len(pictures.format_picture_styles())
    texts = 200_000  # of headings, notes, legends and what is left out
    assert drawn + written + assets + texts <= MOST_BYTES


@pytest.mark.parametrize(("most", "said"), [(90_000, "the details under the pointer"), (1_000, "writes it to a file")])
def test_large_pictures_are_left_out(plan: Plan, monkeypatch: pytest.MonkeyPatch, most: int, said: str):
    monkeypatch.setattr(pictures, "MOST_PICTURE_BYTES", most)
    nodes = parse_html(build_report(plan))
    left = next(n.text for n in nodes if n.attributes.get("id") == "left-out")
    assert said in left
    shown = find_nodes(nodes, "svg", role="img")
    drawn = [svg for svg in shown if (svg.attributes["aria-label"] or "").startswith("Memory")]
    assert len(drawn) == (most > 10_000)
    assert not [n for n in nodes if n.tag == "title" and drawn and drawn[0] in n.parents]


def test_every_picture_has_a_title_of_its_own(plan: Plan, nodes: list[Node]):
    titles = [svg.attributes["aria-label"] or "" for svg in find_nodes(nodes, "svg", role="img")]
    assert len(set(titles)) == 4
    beginnings = ("Pipeline stages", "Timeline", "Memory", "Devices and links")
    for title, view, beginning in zip(titles, ("graph", "timeline", "memory", "topology"), beginnings, strict=True):
        assert title.startswith(beginning) and "LlamaForCausalLM: training step on 16 ranks" in title
        svg = plan.to_svg(view=view)
        assert f"<title>{title}</title>" in svg and f">{title}</text>" in svg
    captions = [n.text for n in find_nodes(nodes, "figcaption")]
    assert all(caption.startswith(title) for caption, title in zip(captions, titles, strict=True))


def test_many_candidates_are_folded(plan: Plan):
    def count_rows(nodes: list[Node], name: str) -> int:
        within = (n for n in nodes if n.tag == "tr" and any(p.attributes.get("id") == name for p in n.parents))
        return sum(any(p.tag == "tbody" for p in row.parents) for row in within)

    known = len(plan.certificate.candidates)
    few, many = (parse_html(build_report(with_candidates(plan, more))) for more in (10, 200))
    best, others = CANDIDATE_TABLES
    assert (count_rows(few, best), count_rows(few, others)) == (known + 10, 0)
    assert (count_rows(many, best), count_rows(many, others)) == (12, known + 188)
    folded = next(n for n in many if n.attributes.get("id") == others)
    assert any(p.tag == "details" and "open" not in p.attributes for p in folded.parents)
    assert find_nodes(many, "input", **{"data-tables": f"{best} {others}"})


def test_the_chosen_row_is_marked_in_both_tables(nodes: list[Node]):
    marked = [n for n in nodes if n.tag == "tr" and n.attributes.get("class") == "chosen"]
    sections = [next(p.attributes["id"] for p in row.parents if p.tag == "section") for row in marked]
    assert sections == ["candidates", "explanation"]
    assert all("chosen" in row.text for row in marked)


def test_large_sections_are_left_out(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "_MOST_SECTION_BYTES", 3000)
    nodes = parse_html(build_report(plan))
    left = next(n.text for n in nodes if n.attributes.get("id") == "left-out")
    assert "The section Explanation takes" in left
    assert not [n for n in nodes if n.attributes.get("id") == "operator-table"]


def test_a_plan_without_a_program_has_a_report(plan: Plan):
    estimate = plan.model_copy(update={"written": None, "planned_only": ("dispatch=once",), "global_batch": 16})
    nodes = parse_html(build_report(estimate))
    sections = {n.attributes["id"]: n.text for n in find_nodes(nodes, "section")}
    assert "There is no graph: this plan is an estimate" in sections["graph"]
    assert "This plan has none" in sections["operators"]
    assert "dispatch=once" in sections["summary"]
    assert "<img" in plan._repr_html_()
    assert "<img" not in estimate._repr_html_()


def test_the_file_is_replaced_whole(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "plan.html"
    assert plan.to_html(path) == path
    before = path.read_text()
    assert before.startswith("<!doctype html>")
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError(28, "no space", "plan.html")))
    with pytest.raises(ValueError, match="no space"):
        plan.to_html(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.html"]


def test_pictures_without_a_path_are_text(plan: Plan, tmp_path: Path):
    text = plan.to_svg()
    assert text == plan.to_svg(tmp_path / "a.svg").read_text()
    assert plan.to_svg(view="topology") == plan.to_svg(tmp_path / "b.svg", view="topology").read_text()


def test_reports_of_topologies():
    text = build_topology_report(Topology.preset("dgx-h100", nodes=2048))
    nodes = parse_html(text)
    assert len(text) < 300_000
    assert "16,384 devices" in find_nodes(nodes, "h1")[0].text
    assert "ib-ndr" in next(n.text for n in nodes if n.tag == "table")


def list_colours(theme: str) -> dict[str, str]:
    """The colours of the page's styles in a theme, by variable."""
    styles = pictures.format_picture_styles() + read_asset("page.css")
    found: dict[str, str] = {}
    for selector, body in re.findall(r"(:root[^{]*)\{([^{}]*)\}", styles):
        if ("dark" in selector or "not(" in selector) == (theme == "dark"):
            found |= dict(re.findall(r"--(\w+):(#\w{6})", body))
    return found


def compute_contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_contrast(theme: str):
    colours = list_colours(theme)
    pairs: list[tuple[str, str, float]] = [
        (front, back, 4.5) for front in ("ink", "muted", "link") for back in ("canvas", "panel")
    ]
    pairs += [("ink", "accent", 4.5), ("field", "canvas", 3.0), ("link", "canvas", 3.0)]
    low = {(a, b): compute_contrast(colours[a], colours[b]) for a, b, least in pairs}
    assert {pair: c for (pair, c), (_, _, least) in zip(low.items(), pairs, strict=False) if c < least} == {}


def test_repr_is_short(plan: Plan):
    shown: dict[str, Any] = {repr(plan): "Plan(model='LlamaForCausalLM', mesh={'pp': 4, 'dp': 2, 'tp': 2}, ranks=16"}
    shown[repr(Topology.preset("dgx-h100", nodes=2048))] = "Topology(name='2048 x dgx-h100', nodes=2048, devices=16384"
    for text, start in shown.items():
        assert text.startswith(start), text
        assert len(text) < 250
    assert len(str(plan)) < 250
