"""Compare two plans: their differences as sentences and as tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from partitioner.explain.memory_texts import MEMORY_KINDS, host_kinds, memory_words
from partitioner.explain.tables import (
    build_empty_table,
    format_heading,
    fullest_bytes,
    indent_part,
    microbatches_text,
    precision_text,
)
from partitioner.explain.time_parts import KINDS, time_changes, without_residue
from partitioner.plan import Plan
from partitioner.plans.figures import COLLECTIVE_NAMES, bubble_text, fullest_rank, memory_text, mesh_text
from partitioner.plans.outline import outline_program
from partitioner.runtime.program.program import StateData
from partitioner.units import (
    bytes_text,
    format_digits,
    format_percent,
    format_plain_text,
    format_plural,
    list_distinct_seconds_texts,
    seconds_text,
)

_MOST_LAYOUTS = 20

_SAME = 1e-3  # relative difference of two figures; less is no difference


def format_plan_diff(plan: Plan, other: Plan) -> str:
    """Return the differences of ``other`` from ``plan`` as plain text: sentences, then tables of main properties (such
    as the mesh), times, memory and stages.
    """
    return format_plain_text(diff_parts(plan, other))


def diff_parts(plan: Plan, other: Plan, names: tuple[str, str] = ("this plan", "the other")) -> list[RenderableType]:
    """Return the comparison of two plans as texts and tables of the library rich, to print on a terminal in this order.
    ``names``: the column titles of ``plan`` and of ``other``.
    """
    parts: list[RenderableType] = []
    for title, body in (
        ("In short", [_format_item(line) for line in in_words(plan, other)]),
        ("The plans", [_build_pair_table(names, list(_compare_figures(plan, other)))]),
        ("Time by kind", [_compare_times(names, plan, other)]),
        ("Memory of the fullest rank by kind", _compare_memory(names, plan, other)),
        ("Stages", list(_compare_stages(names, plan, other))),
        ("Layouts of weights", list(_compare_layouts(plan, other))),
    ):
        if body:
            parts += [format_heading(title), *body, ""]
    return parts[:-1]


def in_words(plan: Plan, other: Plan) -> Iterator[str]:
    """Yield the differences of ``other`` from ``plan`` as sentences, the most important first."""
    if plan.model != other.model:
        yield f"The plans are for different models: {plan.model} and {other.model}."
    if plan.topology != other.topology:
        yield f"The plans are for different clusters: {plan.topology.name} and {other.topology.name}."
    mine, yours = plan.estimate, other.estimate
    yield (
        f"The other plan takes {seconds_text(yours.step_time)}, "
        f"{format_relative(mine.step_time, yours.step_time)} this one's "
        f"{seconds_text(mine.step_time)}."
    )
    yield from time_changes(mine.breakdown, yours.breakdown)
    a, b = fullest_bytes(plan), fullest_bytes(other)
    if a is not None and b is not None:
        yield f"Its fullest rank holds {bytes_text(b)}, {format_relative(a, b, bytes_text)} {bytes_text(a)}."
    if plan.mesh != other.mesh:
        yield f"Its mesh is {mesh_text(other.mesh)} instead of {mesh_text(plan.mesh)}."
    if plan.profile != other.profile:
        yield f"It is executed as by {other.profile.name} instead of {plan.profile.name}."
    if plan.planned_only != other.planned_only:
        for which, only in (("This plan", plan.planned_only), ("The other plan", other.planned_only)):
            if only:
                yield f"{which} has {', '.join(only)}, which this version plans but does not execute."


def format_relative(old: float, new: float, text: Callable[[float], str] = seconds_text) -> str:
    """Return a text that says how ``new`` compares with ``old``, for example ``22% more than``, ``3.1 times`` or ``the
    same as``. ``old``, ``new``: two amounts in one unit. ``text``: formats such an amount; almost equal amounts count
    as the same if it returns the same text for both."""
    if not old or (abs(new - old) <= _SAME * abs(old) and text(old) == text(new)):
        return "the same as"
    ratio = new / old
    if ratio >= 2:
        return f"{format_digits(ratio, 2)} times"
    return f"{format_percent(abs(ratio - 1))} {'more' if ratio > 1 else 'less'} than"


def compare_seconds(seconds: float, chosen: float, lower: bool = False, whose: str = "the chosen plan's") -> str:
    """Return a text that compares two step times, such as ``12.75 s, <0.1% more than the chosen plan's 12.74 s``, with
    enough digits to tell them apart. ``seconds``: the time that is compared. ``chosen``: the time it is compared with,
    which follows ``whose``. ``lower``: whether ``seconds`` is a lower bound, so that ``or more`` follows it."""
    shown, other = list_distinct_seconds_texts(seconds, chosen)
    relation = "the same as" if shown == other else format_relative(chosen, seconds, text=repr)
    return f"{shown}{' or more' if lower else ''}, {relation} {whose} {other}"


def _format_item(text: str) -> RenderableType:
    return indent_part(Text(f"- {text}"))


def _build_pair_table(names: tuple[str, str], rows: Sequence[tuple[str, str, str]]) -> RenderableType:
    """Return a table of two plans. Rows whose values differ are bold. ``names``: their column titles. ``rows``: (name
    of a property such as ``mesh``, its value in the first plan, its value in the second), all as text.
    """
    made = build_empty_table([("", False), (names[0], False), (names[1], False)])
    for name, one, two in rows:
        made.add_row(name, Text(one), Text(two), style="bold" if one != two else None)
    return indent_part(made)


def _compare_figures(plan: Plan, other: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value of ``plan``, value of ``other``) as texts for each property of a plan that differs between the
    two, such as the schedule. Mesh, step time and memory are always included.
    """
    pairs = zip(_describe_plan(plan), _describe_plan(other), strict=True)
    for (name, one), (_, two) in pairs:
        if one != two or name in ("mesh", "step time", "memory"):
            yield name, one, two


def _describe_plan(plan: Plan) -> list[tuple[str, str]]:
    """Return the properties of ``plan`` by which two plans are compared, such as mesh, schedule and step time, as pairs
    (name, value as text). The names are the same for all plans, in the same order.
    """
    chosen, estimate = plan.chosen, plan.estimate
    given = plan.constraints.given
    return [
        ("model", plan.model),
        ("cluster", plan.topology.name),
        ("objective", plan.objective),
        ("precision", precision_text(plan)),
        ("optimizer", plan.optimizer),
        ("global batch", f"{plan.global_batch:,}"),
        ("fixed by you", ", ".join(f"{k}={v}" for k, v in given.items()) or "nothing"),
        ("mesh", mesh_text(plan.mesh)),
        ("microbatches", f"{microbatches_text(plan)} of {format_plural(chosen.microbatch_size, 'sample')}"),
        ("schedule", plan.schedule if plan.num_stages > 1 else "one stage"),
        ("virtual stages", str(chosen.virtual_stages)),
        ("gradients", _added_up(plan)),
        ("state sharding", f"zero={chosen.zero}" + (f" dp_shard={chosen.dp_shard}" if chosen.dp_shard else "")),
        ("in host memory", ", ".join(host_kinds(plan)) or "nothing"),
        ("on disk", "optimizer states" if "disk" in plan.offload else "nothing"),
        ("step time", seconds_text(estimate.step_time)),
        ("MFU", format_percent(estimate.mfu)),
        ("bubble", bubble_text(plan) or "none"),
        ("memory", memory_text(plan)),
        ("gap of the certificate", format_percent(plan.certificate.gap)),
    ]


def _added_up(plan: Plan) -> str:
    """Return a text that names the collectives by which ``plan`` sums gradients over ranks, with number formats and
    mesh axes, such as ``all-reduce over dp``. If there are none, or the plan has no program, the text says so.
    """
    if plan.written is None:
        return "not written out"
    moved = [
        m for stage in outline_program(plan.written).stages for m in stage.reductions if m.what.startswith("gradients")
    ]
    ways = dict.fromkeys((COLLECTIVE_NAMES.get(m.op, m.op), m.what.removeprefix("gradients"), m.axis) for m in moved)
    return ", ".join(f"{op}{kind} over {axis}" for op, kind, axis in ways) or "nothing to add up"


def _build_amount_table(
    names: tuple[str, str],
    one: Mapping[str, float],
    two: Mapping[str, float],
    words: Mapping[str, str],
    text: Callable[[float], str],
) -> RenderableType:
    """Return a table that compares amounts, such as seconds by kind of time, of two plans. It has a row for each key of
    ``one`` and ``two``, the largest amounts first. ``names``: the column titles of the two plans. ``one``, ``two``:
    kind -> amount of the first and of the second plan. ``words``: kind -> its name in the table. ``text``: formats an
    amount.
    """
    made = build_empty_table([("", False), (names[0], True), (names[1], True), ("difference", True)])
    for kind in sorted({**one, **two}, key=lambda k: -max(one.get(k, 0.0), two.get(k, 0.0))):
        a, b = one.get(kind, 0.0), two.get(kind, 0.0)
        if a or b:
            sign = "" if a == b else "+" if b > a else "−"
            made.add_row(Text(words.get(kind, kind)), text(a), text(b), f"{sign}{text(abs(b - a))}" if sign else "")
    return indent_part(made)


def _compare_times(names: tuple[str, str], plan: Plan, other: Plan) -> RenderableType:
    """Return a table of the seconds of a step by kind of time, such as computation, for the plans ``plan`` and
    ``other``. ``names``: their column titles.
    """
    one, two = (without_residue(each.estimate.breakdown) for each in (plan, other))
    return _build_amount_table(names, one, two, KINDS, seconds_text)


def _compare_memory(names: tuple[str, str], plan: Plan, other: Plan) -> list[RenderableType]:
    """Return one table of the peak memory of the fullest stage of the plans ``plan`` and ``other``, by kind of memory.
    The list is empty if a plan has no estimates by stage. ``names``: the column titles of the two plans.
    """
    parts = []
    for each in (plan, other):
        if not each.estimate.stages:
            return []
        stage = fullest_rank(each) // (each.world_size // each.num_stages)
        parts.append(each.estimate.stages[stage].memory)
    words = memory_words(plan) if plan.objective == other.objective else MEMORY_KINDS
    return [_build_amount_table(names, parts[0], parts[1], words, bytes_text)]


def _compare_stages(names: tuple[str, str], plan: Plan, other: Plan) -> Iterator[RenderableType]:
    """Yield a table with the first module, the last module and the number of block calls (such as layers) of each stage
    in the plans ``plan`` and ``other``; nothing if all stages are equal. ``names``: the column titles of the two plans.
    """
    ones, twos = (
        [
            f"{s.first} to {s.last}, {format_plural(s.num_calls, 'call')}" + (f", {s.again}" if s.again else "")
            for s in each.estimate.stages
        ]
        for each in (plan, other)
    )
    if ones != twos:
        length = max(len(ones), len(twos))
        rows = [(str(k), (ones[k : k + 1] or [""])[0], (twos[k : k + 1] or [""])[0]) for k in range(length)]
        yield _build_pair_table(names, rows)


def _compare_layouts(plan: Plan, other: Plan) -> Iterator[RenderableType]:
    """Yield a line for each weight that the plans ``plan`` and ``other`` shard differently over the mesh axes ``tp`` or
    ``ep``, at most 20. Equal weights of repeated layers are on one line. Nothing is yielded if a plan has no program
    (instructions of its ranks), only estimates.
    """
    if plan.written is None or other.written is None:
        return
    mine, yours = plan.written.states, other.written.states
    told: Counter[tuple[str, str, str]] = Counter()
    for name, state in mine.items():
        if name in yours:
            one, two = _format_layouts(state, plan.mesh), _format_layouts(yours[name], other.mesh)
            if one != two:
                told[re.sub(r"\d+", "*", name), one, two] += 1
    for (name, one, two), count in list(told.items())[:_MOST_LAYOUTS]:
        times = f" ({count})" if count > 1 else ""
        yield _format_item(f"{name}{times}: {one} → {two}")
    if len(told) > _MOST_LAYOUTS:
        yield _format_item(f"and {len(told) - _MOST_LAYOUTS} more")


def _format_layouts(state: StateData, mesh: Mapping[str, int]) -> str:
    """Return a text that says how a weight is sharded, such as ``S0 over 4 ranks`` (cut along dimension 0); ``whole``
    if it is not sharded. ``state``: the weight. ``mesh``: name of a mesh axis -> number of ranks."""
    layouts = [(state.expert_layout, mesh.get("ep", 1), " of ep"), (state.layout, mesh.get("tp", 1), "")]
    cuts = [f"{layout} over {n} ranks{of}" for layout, n, of in layouts if n > 1 and layout.startswith("S")]
    return ", ".join(cuts) or "whole"
