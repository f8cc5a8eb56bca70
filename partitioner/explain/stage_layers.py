"""Say which layers each pipeline stage runs, in a few lines even for many stages with many virtual stages.

Calls of one stage with the same block and the same notes are one entry with the numbers of their layers. If there are
many stages, stages with equal entries share a line without these numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from partitioner.plan import Plan, StageEstimate
from partitioner.plans.outline import CallGroup, Outline, StageOutline, group_notes, path_range
from partitioner.schedules.registry import SCHEDULES
from partitioner.units import format_plural, format_ranges

_MOST_STAGES = 8  # lines on stages; in a pipeline with more stages, equal ones share a line
_MOST_RANGES = 12  # ranges of layers, or of stages, in a line
_FEWEST_STEPS = 4  # numbers with equal distances that are written as such


class _StageLine(NamedTuple):
    """The layers that one pipeline stage runs. ``own``: a text that names them, with the numbers of the layers.
    ``common``: the text without the numbers; it is equal for stages that run equally many layers of each kind.
    ``calls``: number of the stage's calls of the block that occurs most often in the plan or, without a program, of all
    its block calls."""

    own: str
    common: str
    calls: int


def list_stage_lines(plan: Plan, whole: Outline | None) -> Iterator[str]:
    """Yield lines on the layers that each stage of ``plan`` runs, after a line on its virtual stages, if there are
    several on a rank. ``whole``: the overview of the plan's program. If it is ``None``, because the plan has no
    program, the lines give only numbers of calls."""
    if text := _describe_virtual_stages(plan):
        yield f"virtual stages: {text}"
    if whole is None:
        lines = [_describe_estimate(stage) for stage in plan.estimate.stages]
        yield from _merge_lines(lines, "calls")
        return
    entries = [_merge_groups(stage) for stage in whole.stages]
    often = Counter[str]()
    for groups in (groups for stage in entries for groups in stage):
        often[groups[0].title] += _count_repetitions(groups)
    most = max(often, key=lambda title: often[title], default="")
    lines = [
        _StageLine(
            own=", ".join(_format_groups(groups) for groups in stage),
            common=", ".join(_format_groups(groups, numbered=False) for groups in stage),
            calls=sum(_count_repetitions(groups) for groups in stage if groups[0].title == most),
        )
        for stage in entries
    ]
    yield from _merge_lines(lines, f"× {most}")


def _describe_virtual_stages(plan: Plan) -> str:
    """Return a text that says how the virtual stages of ``plan`` follow each other on the pipeline stages; empty if no
    rank has several."""
    stages, chunks = plan.num_stages, plan.chosen.virtual_stages
    if stages == 1 or chunks == 1:
        return ""
    text = f"the layers are cut into {stages * chunks} consecutive parts, {chunks} for each stage"
    if plan.schedule not in SCHEDULES:  # a table that the user wrote
        return text
    last, order = stages - 1, SCHEDULES[plan.schedule].placement(stages, chunks)
    then = f"again 0 to {last}" if order[stages] == 0 else f"back from {last} to 0"
    return f"{text}: in order on stages 0 to {last}, then {then}{', and so on' if chunks > 2 else ''}"


def number_virtual_stages(plan: Plan) -> dict[tuple[int, int], int]:
    """Return the virtual stages of ``plan``, numbered from 0 in the order in which a microbatch passes through them:
    (index of the pipeline stage, which of its virtual stages) -> number. The result is empty if no rank has several, or
    if the order is not known, because the user wrote the schedule as a table.
    """
    stages, chunks = plan.num_stages, plan.chosen.virtual_stages
    if stages == 1 or chunks == 1 or plan.schedule not in SCHEDULES:
        return {}
    seen = Counter[int]()
    found = {}
    for number, stage in enumerate(SCHEDULES[plan.schedule].placement(stages, chunks)):
        found[stage, seen[stage]] = number
        seen[stage] += 1
    return found


def _describe_estimate(stage: StageEstimate) -> _StageLine:
    """Return the line on ``stage``, a stage of a plan without a program: the number of its block calls (such as
    layers), the first and the last of them, and how many are recomputed."""
    calls, again = format_plural(stage.num_calls, "call"), f", {stage.again} in backward" if stage.again else ""
    return _StageLine(f"{calls}, first {stage.first}, last {stage.last}{again}", f"{calls}{again}", stage.num_calls)


def _merge_lines(lines: Sequence[_StageLine], counted: str) -> Iterator[str]:
    """Yield a text for each of ``lines``, which say what each pipeline stage runs, with the index of the stage before
    it. If there are many stages, stages with equal layers share a text, and a last text summarises the remaining
    stages. ``counted``: what the field ``calls`` of a line counts, as text after a number."""
    if len(lines) <= _MOST_STAGES:
        yield from (f"stage {number}: {line.own}" for number, line in enumerate(lines))
        return
    alike: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        alike.setdefault(line.common, []).append(number)
    shown = list(alike.items())
    shown = shown if len(shown) <= _MOST_STAGES else shown[: _MOST_STAGES - 1]
    for common, stages in shown:
        if len(stages) == 1:
            yield f"stage {stages[0]}: {lines[stages[0]].own}"
        else:
            yield f"{_name_numbers('stages', stages)}, each: {common}"
    told = {number for _, stages in shown for number in stages}
    counts = [line.calls for number, line in enumerate(lines) if number not in told]
    if counts:
        few = f"{min(counts)} to " if min(counts) < max(counts) else ""
        yield f"and {format_plural(len(counts), 'more stage')} with {few}{max(counts)} {counted} each"


def _merge_groups(stage: StageOutline) -> list[list[CallGroup]]:
    """Return the groups of calls of ``stage`` as lists: each list has the groups with equal blocks and notes. (A stage
    has separate groups for each of its virtual stages.)"""
    merged: dict[tuple[str, tuple[str, ...]], list[CallGroup]] = {}
    for group in stage.groups:
        merged.setdefault((group.title, tuple(group_notes(group))), []).append(group)
    return list(merged.values())


def _count_repetitions(groups: Sequence[CallGroup]) -> int:
    """Return how often the blocks of ``groups`` are repeated in all of these groups together. All groups have the same
    blocks."""
    return sum(group.count for group in groups)


def _format_groups(groups: Sequence[CallGroup], *, numbered: bool = True) -> str:
    """Return ``groups``, calls of the same blocks (such as decoder layers) on one stage, as text like ``16 ×
    model.layers.* (layers 0–15; all recomputed in backward)``: number, name, module paths and notes. ``numbered``:
    whether the text has the paths.
    """
    count, title = _count_repetitions(groups), groups[0].title
    notes = ", ".join(group_notes(groups[0]))
    if notes.startswith("recomputed") and count > 1:
        notes = f"all {notes}"
    paths = _format_paths(groups) if numbered else ""
    about = "; ".join(filter(None, ("" if paths == title else paths, notes)))
    return (f"{count} × " if count > 1 else "") + title + (f" ({about})" if about else "")


def _format_paths(groups: Sequence[CallGroup]) -> str:
    """Return the module paths of the calls of ``groups`` as text. If they differ in one number, it is ``layers 0,
    3–5`` for a block with the name ``model.layers.*``, and ``model.layers.0, 3–5`` for one with another name.
    """
    paths = [path for group in groups for path in group.members]
    parts = [path.split(".") for path in paths]
    title = groups[0].title.split(".")
    if title.count("*") == 1 and all(len(own) == len(title) for own in parts):
        place = title.index("*")
        fixed = all(own[:place] + own[place + 1 :] == title[:place] + title[place + 1 :] for own in parts)
        if fixed and all(own[place].isdigit() for own in parts):
            return _name_numbers(title[place - 1] if place else "modules", [int(own[place]) for own in parts])
    if len(set(paths)) == 1:
        return paths[0]
    differing = [n for n, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1]
    same_length = len({len(own) for own in parts}) == 1
    if same_length and len(differing) == 1 and all(own[differing[0]].isdigit() for own in parts):
        place = differing[0]
        numbers = _shorten_ranges([int(own[place]) for own in parts])
        before, after = ".".join(parts[0][:place]), ".".join(parts[0][place + 1 :])
        if after and not numbers.replace("–", "").isdigit():
            return f"{before}.*.{after} with * = {numbers}"
        return ".".join(filter(None, (before, numbers, after)))
    return path_range([paths[0], paths[-1]])


def _name_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Return ``numbers`` after ``noun``, the plural of what they count, as text such as ``layers 0, 3–5``, ``layer 7``,
    or ``every 8th of layers 0–120`` if their distances are equal. The text is short even for many numbers."""
    found = sorted(set(numbers))
    if len(found) == 1 and noun.endswith("s"):
        return f"{noun.removesuffix('s')} {found[0]}"
    steps = {after - before for before, after in pairwise(found)}
    if len(found) >= _FEWEST_STEPS and len(steps) == 1 and (step := steps.pop()) > 1:
        ending = "th" if step % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(step % 10, "th")
        return f"every {step}{ending} of {noun} {found[0]}–{found[-1]}"
    return f"{noun} {_shorten_ranges(found)}"


def _shorten_ranges(numbers: Sequence[int]) -> str:
    """Return ``numbers`` as ranges in text, such as ``0, 3–5``. If there are many ranges, the last ones are not listed
    but counted."""
    found = sorted(set(numbers))
    ranges = format_ranges(found).split(", ")
    if len(ranges) <= _MOST_RANGES:
        return ", ".join(ranges)
    shown = ranges[: _MOST_RANGES - 1]
    return f"{', '.join(shown)} and {len(ranges) - len(shown)} more ranges up to {found[-1]}"


__all__ = ["list_stage_lines", "number_virtual_stages"]
