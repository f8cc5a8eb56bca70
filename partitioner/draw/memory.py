"""The ``memory`` view: memory of a rank of each stage over the step, by kind, below the usable memory of its device.

States, saved activations and gradients in transfer come from the simulated program, call by call. The cost model adds
optimizer states and the working memory of operators. All ranks of a stage use equal amounts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.etree import ElementTree as ET

from partitioner.draw.svg import (
    PALETTE,
    Header,
    create_picture,
    draw_group,
    draw_header,
    draw_line,
    draw_rectangle,
    draw_text,
    format_coordinate,
    text_width,
    to_text,
)
from partitioner.draw.timeline import tick_step
from partitioner.explain.memory_texts import MEMORY_KINDS, disk_text, host_text, memory_words
from partitioner.plan import Plan
from partitioner.plans.figures import key_figures, list_usable_bytes, share_of_usable, simulated_seconds, view_title
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.memory import MemoryMoment, memory_moments
from partitioner.runtime.program.simulate import SimulatedSpan, Timeline
from partitioner.simulate.program_memory import fixed_sizes, moving_sizes
from partitioner.simulate.program_time import PlanDurations, simulate_plan
from partitioner.units import bytes_text, format_percent, format_ranges, seconds_text

KINDS: dict[str, tuple[str, str]] = {
    kind: (f"held_{kind}", MEMORY_KINDS[kind])
    for kind in (
        "parameters", "optimizer", "gradients", "residuals", "gathered", "saved", "flowing", "recomputed", "working",
    )
}  # fmt: skip  # from the ground up: kind -> (colour, meaning)

_MARGIN, _RIGHT, _WIDTH, _COLUMN, _HIT = 20.0, 168.0, 900.0, 2.0, 15.0
_FINE_STAGES = 24  # with more stages, columns of pixels are wider, so that the size of the picture is bounded

# Height of a panel and of the space below it, in pixels: normally, and with more than _MANY stages.
_TALL, _LOW, _MANY = (
    (118.0, 30.0),
    (66.0, 16.0),
    6,
)
_LABEL = 10.0
_PALE = frozenset({"optimizer", "residuals", "saved", "recomputed"})  # areas with dark letters
_FAR = 0.3  # fraction of the capacity: a lower peak is drawn on a scale of its own


@dataclass(frozen=True)
class MemoryLevel:
    """Describes the memory that a rank uses during an interval of a training step. ``start``, ``end``: seconds from the
    start of the step. ``sizes``: bytes by kind of memory; the kinds have names such as ``gradients`` (the keys of
    ``KINDS``).
    """

    start: float
    end: float
    sizes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def draw_plan_memory(plan: Plan) -> str:
    """Return a picture of the memory of each pipeline stage of ``plan`` over one step as SVG text."""
    of = simulate_plan(plan)
    return to_text(
        _MemoryChart(plan, of.timeline, stage_levels(plan, of.timeline, of.durations, of.facts)).draw_chart()
    )


def stage_levels(
    plan: Plan, timeline: Timeline, durations: PlanDurations, facts: ProgramFacts
) -> tuple[tuple[MemoryLevel, ...], ...]:
    """Return, for each pipeline stage of ``plan``, the memory of one of its ranks over time, as a tuple of intervals
    with the bytes in use. The intervals follow each other without gaps, from the start of the step to its end.
    ``timeline``: the simulated step. ``durations``: the predicted seconds of each instruction. ``facts``: the analysis
    of the plan's program, which knows when tensors are kept and freed."""
    stages = []
    for stage, lane in enumerate(timeline.stages):
        fixed = fixed_sizes(facts, stage, plan.optimizer)
        instructions = facts.program.stages[stage].instructions
        levels: list[MemoryLevel] = []
        before = MemoryMoment(None, 0, 0)
        for span, (moments, after) in zip(lane.spans, memory_moments(facts, stage, instructions), strict=True):
            start = span.end - span.work
            if start > span.start:
                levels.append(MemoryLevel(span.start, start, {**fixed, **moving_sizes(before, 0)}))
            intervals = list(_yield_memory_intervals(span, moments, durations, facts, stage))
            if not intervals:  # such as sums over the batch, before the pipeline starts
                levels.append(MemoryLevel(start, span.end, {**fixed, **moving_sizes(before, 0)}))
            for moment, begin, end in intervals:
                working = _get_working_bytes(plan, durations, stage, moment)
                levels.append(MemoryLevel(begin, end, {**fixed, **moving_sizes(moment, working)}))
            before = after
        last = levels[-1].end if levels else 0.0
        if last < timeline.step_time:
            levels.append(MemoryLevel(last, timeline.step_time, {**fixed, **moving_sizes(before, 0)}))
        stages.append(tuple(level for level in levels if level.end > level.start))
    return tuple(stages)


def _get_working_bytes(plan: Plan, durations: PlanDurations, stage: int, moment: MemoryMoment) -> int:
    """Return the bytes of temporary tensors while a layer runs. ``moment``: the memory at one time of the step; the
    result is 0 if no layer runs at this time. ``durations``: the cost model's predictions for ``plan``, which include
    these bytes. ``stage``: index of the pipeline stage.
    """
    if moment.call is None:
        return 0
    return durations.passing[plan.program.stages[stage].calls[moment.call].block]


def _yield_memory_intervals(
    span: SimulatedSpan, moments: Sequence[MemoryMoment], durations: PlanDurations, facts: ProgramFacts, stage: int
) -> Iterator[tuple[MemoryMoment, float, float]]:
    """Yield (memory at one moment, start, end) for each layer that a forward or backward instruction runs; start and
    end are seconds from the start of the step. Nothing is yielded for other instructions.

    ``span``: the simulated instruction. ``moments``: the memory while each of its layers runs. ``durations``: the
    predicted seconds of the layers, in proportion to which the instruction's time is divided. ``facts``: the analysis
    of the program. ``stage``: index of the stage.
    """
    part = {"F": "F", "B": "B", "I": "I", "W": "W"}.get(span.instruction.op)
    if part is None or not moments:
        return
    seconds = []
    for moment in moments:
        assert moment.call is not None
        took = durations.call(stage, moment.call, part)  # type: ignore[arg-type]  # one of the four
        if part in "BI" and facts.stages[stage][moment.call].recomputed:
            took += durations.call(stage, moment.call, "F")
        seconds.append(took)
    scale = span.work / sum(seconds) if sum(seconds) else 0.0
    clock = span.end - span.work
    for moment, took in zip(moments, seconds, strict=True):
        yield moment, clock, clock + took * scale
        clock += took * scale


class _MemoryChart:
    """Draws the memory of the stages of ``plan`` over one step. ``timeline``: the simulated step. ``stages``: for each
    stage, the memory of one of its ranks in consecutive intervals.
    """

    def __init__(self, plan: Plan, timeline: Timeline, stages: Sequence[Sequence[MemoryLevel]]) -> None:
        self.plan = plan
        self.stages = stages
        ends = [span.end for lane in timeline.stages for span in lane.spans]
        ended = max([*ends, *(b.end for lane in timeline.stages for b in lane.background)], default=0.0)
        self.total = simulated_seconds(plan, ended)[0] or 1.0
        self.step = plan.estimate.step_time or self.total  # seconds at which the axis ends
        self.per_stage = plan.world_size // len(stages)
        rooms = list_usable_bytes(plan)
        self.rooms = [min(rooms[r] for r in self.list_stage_ranks(s)) for s in range(len(stages))]
        self.peaks = [max(levels, key=lambda level: level.total, default=None) for levels in stages]
        peak = max((level.total for level in self.peaks if level is not None), default=1)
        self.far = peak < _FAR * min(self.rooms)
        self.scale = 1.15 * (peak if self.far else max(peak, *self.rooms))
        self.height, self.gap = _TALL if len(stages) <= _MANY else _LOW
        self.left = _MARGIN + 118.0
        coarser = math.ceil(len(stages) / _FINE_STAGES)
        self.column, self.hit = coarser * _COLUMN, coarser * _HIT
        words = memory_words(plan)
        self.kinds = {kind: (colour, words[kind]) for kind, (colour, _) in KINDS.items()}

    def list_stage_ranks(self, stage: int) -> range:
        """Return the ranks of a pipeline stage. ``stage``: index of the pipeline stage."""
        return range(stage * self.per_stage, (stage + 1) * self.per_stage)

    def draw_chart(self) -> ET.Element:
        """Return the whole picture: header, time axis, and one row of areas per pipeline stage."""
        width = self.left + _WIDTH + _RIGHT
        used = [k for k in KINDS if any(level.sizes.get(k, 0) for levels in self.stages for level in levels)]
        legend = [self.kinds[kind] for kind in used]
        legend += [] if self.far else [("ink", "usable memory: without reserve, communication groups and margin")]
        note = (
            "One row per stage: its ranks all hold the same."
            + self._describe_usable_memory()
            + self._describe_host_bytes()
        )
        header = Header(view_title(self.plan, "memory"), note, key_figures(self.plan), legend)
        top = draw_header(create_picture(width, 0, ""), header, width) + 10
        bottom = top + len(self.stages) * (self.height + self.gap) - self.gap
        root = create_picture(width, bottom + 46, header.title)
        draw_header(root, header, width)
        self.draw_time_axis(root, top, bottom)
        for stage in range(len(self.stages)):
            self.draw_stage_row(root, stage, top + stage * (self.height + self.gap), used)
        return root

    def _describe_usable_memory(self) -> str:
        """Return a sentence with the usable memory of a device, for the subtitle of the picture. The sentence is needed
        if the usable memory is so far above the peak that its line is not in the picture. If the line is in the
        picture, return an empty text."""
        if not self.far:
            return ""
        return f" Usable are {bytes_text(min(self.rooms))}, far beyond the scale."

    def _describe_host_bytes(self) -> str:
        """Return sentences on the plan's bytes in host memory and on disk, which are not drawn; an empty text if there
        are none.
        """
        text = host_text(self.plan)
        disk = disk_text(self.plan)
        return (f" In host memory, not drawn: {text}." if text else "") + (f" On disk: {disk}." if disk else "")

    def x(self, seconds: float) -> float:
        """Return the x coordinate in pixels of the time ``seconds`` from the start of the simulated step."""
        return self.left + _WIDTH * seconds / self.total

    def draw_time_axis(self, root: ET.Element, top: float, bottom: float) -> None:
        """Draw labelled vertical lines at round times and at the end of the step into ``root``. ``top``, ``bottom``: y
        coordinates at which the rows of all stages begin and end.
        """
        step = tick_step(self.step, int(_WIDTH / 110))
        times = [i * step for i in range(math.ceil(self.step / step - 1e-9)) if self.step - i * step > 0.4 * step]
        for time in [*times, self.step]:
            x, last = self.left + _WIDTH * time / self.step, time == self.step
            draw_line(root, x, top - 4, x, bottom + 5, "grid")
            draw_text(root, x, bottom + 20, seconds_text(time), size=11, fill="muted", anchor="middle", bold=last)

    def draw_stage_row(self, root: ET.Element, stage: int, top: float, kinds: Sequence[str]) -> None:
        """Draw the memory of one stage over the step into ``root``: its name, grid lines, an area for each of ``kinds``
        of memory from the bottom up, the peak, and tooltips. ``stage``: index of the stage. ``top``: y coordinate of
        the row's upper edge.
        """
        ranks, ground = self.list_stage_ranks(stage), top + self.height
        draw_text(root, _MARGIN, top + 14, f"Stage {stage}", size=13, bold=True)
        draw_text(
            root,
            _MARGIN,
            top + 29,
            f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranges(ranks)}",
            size=10,
            fill="muted",
        )
        draw_rectangle(root, self.left, top, _WIDTH, self.height, "panel")
        step = byte_step(self.scale, 4 if len(self.stages) <= _MANY else 2)
        for k in range(int(self.scale / step) + 1):
            y = ground - self.height * k * step / self.scale
            draw_line(root, self.left, y, self.left + _WIDTH, y, "grid")
            draw_text(root, self.left - 6, y + 3.5, bytes_text(k * step), size=9, fill="muted", anchor="end")
        columns = self.find_fullest_moments(stage)
        floor = [0.0] * len(columns)
        for kind in kinds:
            roof = [low + column.sizes.get(kind, 0) for low, column in zip(floor, columns, strict=True)]
            if roof != floor:
                self.draw_kind_area(root, kind, stage, floor, roof, ground)
            floor = roof
        self.draw_peak_mark(root, stage, top, ground)
        self.draw_tooltip_areas(root, columns, top)

    def find_fullest_moments(self, stage: int) -> list[MemoryLevel]:
        """Return, for each column of pixels from left to right, the interval with the most memory among those that the
        column shows. A column without an interval gets the interval of the column before it. ``stage``: index of the
        pipeline stage.
        """
        count = int(_WIDTH / self.column)
        fullest: list[MemoryLevel | None] = [None] * count
        for level in self.stages[stage]:
            first = min(count - 1, int(level.start / self.total * count))
            last = min(count - 1, max(first, math.ceil(level.end / self.total * count - 1e-6) - 1))
            for c in range(first, last + 1):
                known = fullest[c]
                if known is None or level.total > known.total:
                    fullest[c] = level
        filled: list[MemoryLevel] = []
        for known in fullest:
            filled.append(known or (filled[-1] if filled else MemoryLevel(0.0, 0.0, dict.fromkeys(KINDS, 0))))
        return filled

    def draw_kind_area(
        self, root: ET.Element, kind: str, stage: int, floor: Sequence[float], roof: Sequence[float], ground: float
    ) -> None:
        """Draw the area of one kind of memory with its tooltip into ``root``. ``kind``: its name, such as
        ``gradients``. ``stage``: index of the pipeline stage. ``floor``, ``roof``: bytes at the lower and upper edge of
        the area, for each column of pixels. ``ground``: y coordinate of 0 bytes.
        """
        colour, meaning = self.kinds[kind]
        most = max(level.sizes.get(kind, 0) for level in self.stages[stage])
        path = (
            "M" + "L".join([*self.trace_staircase(roof, ground), *reversed(self.trace_staircase(floor, ground))]) + "Z"
        )
        shape = draw_group(root, f"{meaning}: at most {bytes_text(most)} on a rank of stage {stage}")
        ET.SubElement(shape, "path", {"d": path, "fill": PALETTE[colour].light, "class": f"f-{colour}"})
        self.draw_kind_label(shape, kind, floor, roof, ground)

    def draw_kind_label(
        self, shape: ET.Element, kind: str, floor: Sequence[float], roof: Sequence[float], ground: float
    ) -> None:
        """Write the name of the kind of memory ``kind``, such as ``gradients``, into its area ``shape``, if the area is
        high enough over the width of the name. ``floor``, ``roof``: bytes at the lower and upper edge of the area, for
        each column of pixels. ``ground``: y coordinate of 0 bytes.
        """
        words = kind if kind != "saved" else "activations"
        half = math.ceil(text_width(words, _LABEL) / 2 / self.column) + 1
        middle = len(roof) // 2
        low, high = max(floor[middle - half : middle + half]), min(roof[middle - half : middle + half])
        if (high - low) * self.height / self.scale < _LABEL + 3:
            return
        y = ground - self.height * (low + high) / 2 / self.scale + 0.36 * _LABEL
        ink = "on_stage" if kind in _PALE else "on_forward"
        draw_text(shape, self.left + self.column * middle, y, words, size=_LABEL, fill=ink, anchor="middle")

    def trace_staircase(self, sizes: Sequence[float], ground: float) -> list[str]:
        """Return the corners of the upper or lower edge of an area of the chart from left to right, as texts ``x y`` in
        pixels. The edge is horizontal within each column of pixels. ``sizes``: its height in bytes in each column.
        ``ground``: y coordinate of 0 bytes.
        """
        corners, column = [], 0
        for size, run in groupby(sizes):
            length, y = len(list(run)), ground - self.height * size / self.scale
            for c in (column, column + length):
                corners.append(f"{format_coordinate(self.left + self.column * c)} {format_coordinate(y)}")
            column += length
        return corners

    def draw_peak_mark(self, root: ET.Element, stage: int, top: float, ground: float) -> None:
        """Draw a dot at the peak of a stage's memory, a dashed line at the usable memory, and both as text at the
        right, into ``root``. ``stage``: index of the pipeline stage. ``top``, ``ground``: y coordinates of the row's
        upper edge and of 0 bytes.
        """
        room, fullest = self.rooms[stage], self.peaks[stage]
        right = self.left + _WIDTH + 10
        if not self.far:
            y = ground - self.height * room / self.scale
            draw_line(root, self.left, y, self.left + _WIDTH, y, "ink", 1.5).set("stroke-dasharray", "6 3")
        if fullest is not None:
            told = self.plan.estimate.memory  # includes data that exist for no time, such as copies that are sent
            peak = max([fullest.total, *(told[r] for r in self.list_stage_ranks(stage) if r < len(told))])
            draw_text(root, right, top + 14, f"peak {bytes_text(peak)}", size=12, bold=True)
            draw_text(
                root,
                right,
                top + 29,
                f"{format_percent(share_of_usable(peak, room))} of {bytes_text(room)} usable",
                size=10,
                fill="muted",
            )
            x, y = self.x(fullest.start), ground - self.height * fullest.total / self.scale
            ET.SubElement(
                root, "circle",
                {"cx": format_coordinate(x), "cy": format_coordinate(y), "r": "3"}
                | {"fill": PALETTE["ink"].light, "class": "f-ink"},
            )  # fmt: skip

    def draw_tooltip_areas(self, root: ET.Element, columns: Sequence[MemoryLevel], top: float) -> None:
        """Draw transparent rectangles into ``root``, each over a few columns of pixels. Their tooltips show the bytes
        by kind at the time of most memory within these columns. ``columns``: the memory in each column. ``top``: y
        coordinate of the row's upper edge.
        """
        wide = max(1, int(self.hit / self.column))
        for start in range(0, len(columns), wide):
            level = max(columns[start : start + wide], key=lambda c: c.total)
            parts = [f"{self.kinds[k][1]}: {bytes_text(size)}" for k, size in reversed(level.sizes.items()) if size]
            tip = "\n".join(
                [f"{bytes_text(level.total)} at {seconds_text(level.start * self.step / self.total)}", *parts]
            )
            count = min(wide, len(columns) - start)
            shape = draw_rectangle(
                draw_group(root, tip, "hit"),
                self.left + self.column * start,
                top,
                self.column * count,
                self.height,
                "panel",
            )
            shape.set("fill-opacity", "0")


def byte_step(total: float, most: int) -> float:
    """Return the distance of grid lines in bytes: 1, 2, 5, 10, 20, 50, 100, 200 or 500 times a power of 1024. It is the
    smallest of these distances with which an axis from 0 to ``total`` bytes has at most ``most`` lines, but not less
    than the largest power of 1024 that is at most ``total``. For example, a ``total`` of 3 GiB and 5 lines give 1 GiB.
    """
    unit = 1024.0 ** max(0, math.floor(math.log(max(total, 1.0), 1024)))
    while True:
        for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500):
            if total / (unit * factor) <= most:
                return max(1.0, unit * factor)
        unit *= 1024
