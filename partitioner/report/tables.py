"""The sortable tables of a report: the candidates of the search, and the answers why the plan does not have other
constraints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from partitioner.advise.why_not import WhyNot, format_asked_constraints
from partitioner.explain.proof import is_covered
from partitioner.explain.tables import STEP_PLACES, UNCOVERED_MARK, best_first, fullest_bytes, status_word
from partitioner.passes.errors import PartitionError
from partitioner.plan import Candidate, Plan
from partitioner.plans.figures import candidate_text
from partitioner.report.html import Cell, build_element, build_table
from partitioner.units import bytes_text, format_percent, list_distinct_seconds_texts, seconds_text

MOST_CANDIDATES = 400  # rows of the tables of candidates
_BEST_CANDIDATES = 12  # rows that are shown at first; a few more are shown, too, rather than folded
_FEWEST_FOLDED = 5
CANDIDATE_TABLES = (
    "candidate-table",
    "more-candidates-table",
)  # ids of the tables of the best candidates, and of all others
MOST_ANSWERS = 48  # questions of the why-not table
_MOST_VALUES = 6  # values of one constraint
_MOST_REASON = 240  # characters of a reason in a row

_ASKED = ("pp", "dp", "cp", "tp", "ep", "zero", "microbatch_size", "schedule", "virtual_stages")
_VERDICTS = {
    "slower": "the best found is slower",
    "faster": "faster",
    "bounded": "cannot be faster",
    "infeasible": "not possible",
    "unknown": "needs the model",
}
_COVERED_ONLY = f"covered plans cannot be faster{UNCOVERED_MARK}"  # the bound does not hold for all plans of the row
_LAST = math.inf  # sort key of a cell without a number: it comes last


def build_candidate_tables(plan: Plan) -> list[ET.Element]:
    """Return HTML elements with the layouts (mesh, microbatch size, schedule, ZeRO stage) that the search of ``plan``
    examined, the best first, in at most 400 rows: a sortable table of the best ones and, if there are many, a second
    one inside an element that a click unfolds. The row of the plan's own layout has the class ``chosen``."""
    ranked = best_first(plan.certificate.candidates)[:MOST_CANDIDATES]
    few = len(ranked) < _BEST_CANDIDATES + _FEWEST_FOLDED
    best, rest = (ranked, []) if few else (ranked[:_BEST_CANDIDATES], ranked[_BEST_CANDIDATES:])
    caption = f"The {len(best)} best candidates of the search, the best first" if rest else "Candidates of the search"
    tables = [_build_candidate_table(best, plan, caption, CANDIDATE_TABLES[0])]
    if rest:
        more = f"{len(rest):,} further candidates"
        tables.append(
            build_element(
                "details",
                build_element("summary", f"Show {more}"),
                _build_candidate_table(rest, plan, f"{more}, the best first", CANDIDATE_TABLES[1]),
            )
        )
    return tables


def _build_candidate_table(shown: Sequence[Candidate], plan: Plan, caption: str, name: str) -> ET.Element:
    """Return a sortable HTML table with a row for each of the layouts ``shown`` that the search of ``plan`` examined.
    ``caption``: its title. ``name``: its ``id`` attribute."""
    columns = [
        ("mesh", False),
        ("microbatch", True),
        ("schedule", False),
        ("step time", True),
        ("against the plan", True),
        ("lower bound", True),
        ("memory", True),
        ("outcome", False),
    ]
    return build_table(
        caption,
        columns,
        [_list_candidate_cells(candidate, plan) for candidate in shown],
        sortable=True,
        name=name,
        marks=["chosen" if candidate.status == "chosen" else None for candidate in shown],
    )


def _list_candidate_cells(candidate: Candidate, plan: Plan) -> list[Cell]:
    """Return the cells of one row of the table of layouts that the search examined. The cells are: mesh, microbatch
    size, schedule, step time, its difference from the step time of ``plan``, lower bound of the step time, peak memory,
    and what the search found. ``candidate``: the layout of the row. ``plan``: the plan that was found.
    """
    memory = candidate.memory
    if candidate.status == "chosen":
        memory = fullest_bytes(plan)
    outcome = status_word(candidate, plan.certificate)
    outcome += "" if is_covered(candidate, plan.certificate) else UNCOVERED_MARK
    reason = f"{outcome}: {candidate.reason[:_MOST_REASON]}" if candidate.reason else outcome
    seconds = plan.estimate.step_time if candidate.status == "chosen" else candidate.step_time
    ratio = seconds / plan.estimate.step_time - 1 if seconds is not None and plan.estimate.step_time else None
    return [
        candidate_text(candidate),
        (float(candidate.microbatch_size), str(candidate.microbatch_size)),
        candidate.schedule,
        (_LAST, "") if seconds is None else (seconds, seconds_text(seconds, STEP_PLACES)),
        (_LAST, "") if ratio is None else (ratio, _format_change(ratio)),
        (candidate.bound or _LAST, seconds_text(candidate.bound, STEP_PLACES) if candidate.bound else ""),
        (_LAST, "") if memory is None else (float(memory), bytes_text(memory)),
        (outcome, reason),
    ]


def _format_change(ratio: float) -> str:
    """Return ``ratio``, a relative change as a fraction of 1, as text with a sign, such as ``+5.0%``; ``0%`` if it is
    tiny.
    """
    if abs(ratio) < 5e-5:
        return "0%"
    return f"{'+' if ratio > 0 else '−'}{format_percent(abs(ratio))}"


def count_left_candidates(plan: Plan) -> int:
    """Return the number of layouts (mesh, schedule, ZeRO stage) that the search of ``plan`` examined and that have no
    row in the report's table of candidates, because the table and the list in the plan are limited. Layouts outside of
    the plan's list that may be faster than the plan are not counted: only their lower bound is known, and it is below
    the plan's step time.
    """
    rows = len(plan.certificate.candidates)
    return max(0, rows - MOST_CANDIDATES) + sum(n for kind, n in plan.certificate.left.items() if kind != "open")


def list_questions(plan: Plan) -> list[dict[str, Any]]:
    """Return the constraints that the table "why not" asks about, each as a dict with one entry: name of the constraint
    -> value, such as ``{"tp": 4}``. The values come from other layouts of the search, at most six per name, the nearest
    to the value of ``plan`` first. There are at most 48 in all.
    """
    asked = []
    for name in _ASKED:
        own = _read_value(plan.chosen, name)
        values = {_read_value(candidate, name) for candidate in plan.certificate.candidates} - {own}
        ranked = sorted(values, key=lambda value: _measure_distance(own, value))
        asked += [{name: value} for value in ranked[:_MOST_VALUES]]
    return asked[:MOST_ANSWERS]


def _read_value(candidate: Candidate, name: str) -> Any:
    """Return the value that ``candidate``, a layout (mesh, microbatch size, schedule, ZeRO stage) that the search
    examined, has for the constraint ``name``: the number of ranks if it is a mesh axis such as ``tp``, else the field
    of the candidate with this name.
    """
    return candidate.mesh.get(name, 1) if name in _ASKED[:5] else getattr(candidate, name)


def _measure_distance(own: Any, value: Any) -> tuple[float, str]:
    """Return a key by which values of a constraint are sorted, the nearest to the plan's value ``own`` first.
    ``value``: the value to sort. The key is a pair: the difference of the base-2 logarithms of the two numbers (0 for
    values that are not numbers), and ``value`` as text, which decides between equal distances.
    """
    if isinstance(own, int) and isinstance(value, int):
        return abs(math.log2(max(value, 0.5)) - math.log2(max(own, 0.5))), f"{value:012d}"
    return 0.0, str(value)


def build_why_not_table(plan: Plan) -> list[ET.Element]:
    """Return a sortable HTML table with a row for each of several constraints that the plan does not fulfil, such as
    ``tp=4``, and a note below it if rows have marks. A row says what a plan with the constraint would be: slower,
    faster or impossible; its step time, or a lower bound on it; and the reasons. The answers come from the results of
    the search that ``plan`` contains. The note says for which plans the lower bounds of the marked rows do not hold."""
    answers = list(_list_answers(plan))
    outside = dict.fromkeys(answer.uncovered for answer in answers if answer.uncovered)
    notes = [build_element("p", f"{UNCOVERED_MARK.strip()} {sentence}") for sentence in outside]
    columns = [("instead", False), ("answer", False), ("step time or bound", True), ("in words", False)]
    table = build_table(
        "What other values of one constraint would give",
        columns,
        [_list_answer_cells(answer, plan) for answer in answers],
        sortable=True,
        name="why-not-table",
    )
    return [table, *notes]


def _list_answers(plan: Plan) -> Iterator[WhyNot]:
    """Yield the answer for each row of the table "why not" of ``plan``. A constraint that the plan fulfils has no
    row."""
    for asked in list_questions(plan):
        try:
            answer = plan.why_not(**asked)
        except PartitionError as error:
            answer = WhyNot(asked, "infeasible", (str(error),))
        if answer.verdict != "chosen":
            yield answer


def _list_answer_cells(answer: WhyNot, plan: Plan) -> list[Cell]:
    """Return the cells of a row of the table "why not" of ``plan``: the constraints that ``answer`` is about, the
    verdict, the step time of a plan with them or its lower bound, and the reasons."""
    verdict = _COVERED_ONLY if answer.verdict == "bounded" and answer.uncovered else _VERDICTS[answer.verdict]
    chosen = plan.estimate.step_time
    return [format_asked_constraints(answer.asked), verdict, _build_time_cell(answer, chosen), _build_words(answer)]


def _build_time_cell(answer: WhyNot, chosen: float) -> Cell:
    """Return a table cell as a pair (number to sort by, text): the step time of a plan with the constraint that
    ``answer`` is about, or ``≥`` and a lower bound on it. ``answer``: what the search says on this constraint, such as
    ``tp=4``. ``chosen``: the step time of the plan in seconds, from which the text differs if the number does. The text
    is empty if neither is known.
    """
    if answer.verdict in ("slower", "faster") and answer.candidate is not None and answer.candidate.step_time:
        return answer.candidate.step_time, list_distinct_seconds_texts(answer.candidate.step_time, chosen)[0]
    if answer.bound:
        return answer.bound, f"≥ {list_distinct_seconds_texts(answer.bound, chosen)[0]}"
    return _LAST, ""


def _build_words(answer: WhyNot) -> ET.Element:
    """Return the first sentence of ``answer`` as an HTML element. If there are more sentences, a click on the element
    shows them.
    """
    first, *rest = answer.lines
    if not rest:
        return build_element("span", first)
    body: list[ET.Element] = []
    for line in rest:
        if not line.startswith(" "):
            body.append(build_element("p", line))
            continue
        if not body or body[-1].tag != "ul":
            body.append(build_element("ul"))
        body[-1].append(build_element("li", line.strip()))
    return build_element("details", build_element("summary", first), *body)
