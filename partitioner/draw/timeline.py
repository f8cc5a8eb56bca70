"""The ``timeline`` view: the instructions of each pipeline stage over time. All ranks of a stage execute the same list,
so a stage is one row.

A row has a lane for computation, hatched while the stage waits, and below it thin lanes for transfers and reductions
that run at the same time. Repeated periods, such as the steady state of a pipeline, are drawn once with their number.
If a step is still too long to be drawn, its middle is left out.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple
from xml.etree import ElementTree as ET

from partitioner.draw.svg import (
    Header,
    create_picture,
    draw_group,
    draw_header,
    draw_line,
    draw_rectangle,
    draw_text,
    name_chunk_colour,
    text_width,
    to_text,
)
from partitioner.draw.timeline_folds import Fold, Gap, TimeScale, find_folds, leave_out_middle
from partitioner.plan import Plan
from partitioner.plans.figures import key_figures, simulated_seconds, view_title
from partitioner.plans.outline import chunk_starts
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.program import Program
from partitioner.runtime.program.sharded_buckets import list_all_reduce_axes, zero_axes
from partitioner.runtime.program.simulate import Timeline
from partitioner.simulate.program_time import plan_timeline
from partitioner.units import format_percent, format_ranges, seconds_text

Lane = Literal["compute", "exchange", "reduce", "gather", "host"]


@dataclass(frozen=True)
class OperationStyle:
    """Describes how one kind of instruction is drawn in a timeline. ``lane``: name of the parallel line (lane) in a
    stage's row that has the boxes. ``colour``: name of the colour of its box. ``on``: name of the colour of the text in
    the box. ``meaning``: the text that explains the colour in the legend. ``verb``: the name of the operation in
    tooltips."""

    lane: Lane
    colour: str
    on: str
    meaning: str
    verb: str


LOOKS: dict[str, OperationStyle] = {
    "F": OperationStyle("compute", "forward", "on_forward", "forward", "forward"),
    "B": OperationStyle("compute", "backward", "on_backward", "backward", "backward"),
    "I": OperationStyle("compute", "backward_input", "on_forward", "backward, inputs", "backward to inputs"),
    "W": OperationStyle("compute", "backward_weight", "on_backward", "backward, weights", "backward to weights"),
    "TOTAL_F": OperationStyle("compute", "total", "on_backward", "totals over the batch", "totals"),
    "TOTAL": OperationStyle("reduce", "total", "on_backward", "totals over the batch", "all-reduce of totals"),
    "SEND_F": OperationStyle("exchange", "send", "on_forward", "send", "send"),
    "SEND_B": OperationStyle("exchange", "send", "on_forward", "send", "send gradients"),
    "REDUCE": OperationStyle("reduce", "all_reduce", "on_backward", "reduction of gradients", "reduction of gradients"),
    "SCATTER": OperationStyle(
        "reduce", "reduce_scatter", "on_forward", "gradients to their shards", "scatter of gradients"
    ),
    "GATHER": OperationStyle("gather", "all_gather", "on_forward", "gathering of parameters", "gather of parameters"),
    "GATHER_B": OperationStyle("reduce", "all_gather", "on_forward", "gathering of gradients", "gather of gradients"),
    "OFFLOAD": OperationStyle("host", "all_gather", "on_forward", "to host memory", "move to host memory"),
    "FETCH": OperationStyle("host", "reduce_scatter", "on_forward", "from host memory", "fetch from host memory"),
    "SYNC": OperationStyle("reduce", "tied", "on_forward", "gradients of tied weights", "gradients of tied weights"),
    "UPDATE": OperationStyle("reduce", "total", "on_backward", "new values of buffers", "new values of buffers"),
    "STEP": OperationStyle("compute", "update", "on_forward", "optimizer's update", "the optimizer's update"),
}  # other instructions wait or do bookkeeping, and take no time of their own


def look_of(instruction: Instruction) -> OperationStyle | None:
    """Return the style in which ``instruction`` is drawn in a timeline: its lane (line within the row of the stage),
    colours and texts. ``None`` if it is not drawn, because it takes no time of its own."""
    return LOOKS.get(instruction.word)


_LANE_HEIGHTS: dict[Lane, float] = {"compute": 27.0, "exchange": 7.0, "reduce": 12.0, "gather": 12.0, "host": 9.0}

_LANE_GAP, _ROW_GAP, _MARGIN = 3.0, 13.0, 20.0
_NARROWEST, _LEAST_WIDTH, _MOST_WIDTH, _FOLDED_WIDTH = 19.0, 860.0, 3000.0, 1500.0
_MOST_SENDS = 1500  # with more sends, they are left out: the picture would be megabytes of hairlines
_MERGE = 1.5  # pixels: narrower boxes of one kind are drawn as one
_MOST_BARS = 40  # with more computations on a stage, repeated periods are left out
_MOST_STAGE_BARS = 160  # with more of them after that, the middle of the step is left out
_MOST_BOXES, _BOXES_LIMIT = 3200, 8000  # computations on all stages: for few stages, and for any number of them
_MOST_BYTES, _LEAST_SHARE = 1_000_000, 0.05  # of a picture; a longer one is drawn again with half as many computations
_GAP_WIDTH = 104.0  # pixels in place of the middle of the step
_BRACKETS = 24.0  # pixels above the rows for the number of times that a period runs
_NOTED = 0.1  # fraction of the width: a narrower part of the step gets no note
_WIDENED = 1.5  # the share of a part in the drawn time over its share of the step, from which a note gives both
_CLOSE = 0.01  # fraction of a step by which the simulated time may differ without a note


@dataclass(frozen=True)
class Bar:
    """Describes the box of one instruction on one pipeline stage in the picture. ``stage``: index of the stage.
    ``start``, ``end``: seconds from the start of the step. ``instruction``: the instruction, or the first if the box
    stands for several. ``merged``: the number of instructions that the box stands for.
    """

    stage: int
    start: float
    end: float
    instruction: Instruction
    merged: int = 1


def draw_plan_timeline(plan: Plan) -> str:
    """Return a picture of the simulated step of ``plan`` as SVG text: the instructions of each pipeline stage over
    time. The simulation uses the cost model with which the plan was chosen. The time axis ends at the plan's step time.
    """
    bars, notes = _scale_bars_to_step_time(plan, bars_of(plan_timeline(plan)))
    total = None if plan.constraints.overlap_steps else plan.estimate.step_time
    return draw_timeline(view_title(plan, "timeline"), plan.program, bars, key_figures(plan), total, notes)


def _scale_bars_to_step_time(plan: Plan, bars: list[Bar]) -> tuple[list[Bar], list[str]]:
    """Return two values: ``bars`` scaled so that the simulated step takes the step time of ``plan``, with the
    optimizer's update appended; and sentences on the difference between the two times. ``bars``: the instructions of
    the simulated step. If consecutive steps overlap, or if one of the times is 0, the bars are returned unscaled."""
    step, gradients = plan.estimate.step_time, max((b.end for b in bars), default=0.0)
    whole, update = simulated_seconds(plan, gradients)
    if plan.constraints.overlap_steps:
        return bars, [f"Consecutive steps overlap: this one takes longer than the {seconds_text(step)} between two."]
    if not whole or not step:
        return bars, []
    scale, notes = step / whole, []
    if abs(scale - 1) > _CLOSE:
        notes = [
            f"The simulated step takes {seconds_text(whole)}; it is drawn on the scale of the step time of the plan, "
            f"{seconds_text(step)}."
        ]
    bars = [replace(b, start=b.start * scale, end=b.end * scale) for b in bars]
    if update > 0:
        last = Instruction(op="STEP", stage=0)
        ends = gradients * scale
        bars += [Bar(s, ends, step, last.model_copy(update={"stage": s})) for s in range(len(plan.program.stages))]
    return bars, notes


def bars_of(timeline: Timeline) -> list[Bar]:
    """Return the instructions of the simulated step ``timeline`` as bars. A bar covers the time in which an instruction
    works, without the time in which it waits before.
    """
    bars = []
    for stage, lane in enumerate(timeline.stages):
        for span in lane.spans:
            if span.work > 0:
                bars.append(Bar(stage, span.end - span.work, span.end, span.instruction))
        bars += [Bar(stage, b.start, b.end, b.instruction) for b in lane.background]
    return bars


def draw_timeline(
    title: str,
    program: Program,
    bars: Sequence[Bar],
    figures: Sequence[tuple[str, str]] = (),
    total: float | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return a picture of ``bars`` as SVG text. Three texts are shown above the picture: ``title``; ``figures``,
    numbers as pairs of texts (name, value) such as ``("step time", "7 s")``; and ``notes``, sentences. ``program``: the
    program to which the instructions of ``bars`` belong. ``total``: seconds at which the axis ends; ``None``: at the
    end of the last bar.
    """
    drawn, share, texts = [b for b in bars if look_of(b.instruction)], 1.0, _HeaderTexts(title, figures, notes)
    repeated = find_repeated_parts(program, drawn)
    while True:
        text = to_text(_TimelineChart(texts, program, drawn, total, repeated, share).draw_chart())
        share /= 2
        if len(text) <= _MOST_BYTES or share < _LEAST_SHARE:
            return text


def find_repeated_parts(program: Program, bars: Sequence[Bar]) -> tuple[Fold, ...]:
    """Return the repeated parts of the step that are drawn once; an empty tuple if every stage has at most 40
    computations. ``program``: the program to which ``bars`` belong. ``bars``: the instructions of all stages.
    """
    kept, computing = [], 0
    for number, stage in enumerate(program.stages):
        lanes: dict[Lane, list[Bar]] = {}
        for bar in bars:
            if bar.stage == number:
                lanes.setdefault(get_bar_style(bar).lane, []).append(bar)
        joined = join_call_bars(lanes.get("compute", []), chunk_starts(stage))
        computing = max(computing, len(joined))
        kept += [*joined, *(bar for lane in ("reduce", "gather", "host") for bar in lanes.get(lane, []))]
    return find_folds(kept, len(program.stages)) if computing > _MOST_BARS else ()


def get_bar_style(bar: Bar) -> OperationStyle:
    """Return the style in which ``bar``, the box of one instruction, is drawn: its lane (line within the row of the
    stage), colours and texts. Its instruction must be of a kind that is drawn."""
    look = look_of(bar.instruction)
    assert look is not None, bar.instruction
    return look


def idle_shares(program: Program, bars: Iterable[Bar], total: float | None = None) -> list[float]:
    """Return, for each pipeline stage of ``program`` in order, the fraction of the step in which it computes nothing.
    ``bars``: the instructions of all stages. ``total``: seconds of the step; ``None``: until the end of the last bar.
    """
    bars = list(bars)
    total = total or max((b.end for b in bars), default=0.0)
    busy = [0.0] * len(program.stages)
    for bar in bars:
        look = look_of(bar.instruction)
        if look and look.lane == "compute":
            busy[bar.stage] += bar.end - bar.start
    return [1 - b / total if total else 0.0 for b in busy]


class _HeaderTexts(NamedTuple):
    """The texts of the header of a timeline. ``title``: the heading. ``figures``: pairs of texts (name, value) such as
    ``("step time", "7 s")``. ``notes``: sentences."""

    title: str
    figures: Sequence[tuple[str, str]]
    notes: Sequence[str]


class _TimelineChart:
    """Draws the instructions ``bars`` of the stages of ``program`` over time. ``texts``: the texts of its header.
    ``total``: seconds at which the axis ends; ``None``: at the end of the last bar. ``repeated``: the repeated parts of
    the step. ``share``: a factor, at most 1, on the number of computations above which the middle of the step is left
    out."""

    def __init__(
        self,
        texts: _HeaderTexts,
        program: Program,
        bars: Sequence[Bar],
        total: float | None,
        repeated: Sequence[Fold],
        share: float,
    ) -> None:
        self.title, self.figures, self.notes = texts
        self.share = share
        self.program = program
        self.total = total or max((b.end for b in bars), default=0.0) or 1.0
        self.idle = idle_shares(program, bars, self.total)
        self.chunks = [chunk_starts(stage) for stage in program.stages]
        self.folds = self._find_hidden_parts(bars, repeated)
        self.bars = [bar for bar in bars if not any(a <= bar.start and bar.end <= b for a, b in self._hidden_spans)]
        counts = Counter(get_bar_style(b).lane for b in self.bars)
        self.crowded = counts["exchange"] > _MOST_SENDS
        self.lanes: list[Lane] = [
            lane
            for lane in _LANE_HEIGHTS
            if lane == "compute" or (counts[lane] and not (lane == "exchange" and self.crowded))
        ]
        per_stage = program.world_size // len(program.stages)
        self.ranks = [format_ranges(range(s * per_stage, (s + 1) * per_stage)) for s in range(len(program.stages))]
        labels = [text_width(f"{'rank' if per_stage == 1 else 'ranks'} {r}", 10) for r in self.ranks]
        self.left = _MARGIN + max([text_width("Stage 00", 13, True), *labels]) + 14
        self.width = self._plot_width()
        self.scale = TimeScale(self.total, self.folds, self.left, self.width)
        if self.left_out is not None:
            self.scale = replace(self.scale, gap=_GAP_WIDTH)

    def _find_hidden_parts(self, bars: Sequence[Bar], folds: Sequence[Fold]) -> tuple[Fold | Gap, ...]:
        """Return the parts of the step that are not drawn: repetitions and, if the step is too long without them, its
        middle. ``bars``: the instructions of all stages, of which only forwards and backwards count. ``folds``: the
        repeated parts."""
        stages = len(self.program.stages)
        most = min(_BOXES_LIMIT, max(_MOST_BOXES, 2 * stages**2))  # the computations while a pipeline fills, and more
        by_stage: dict[int, list[Bar]] = {}
        for bar in bars:
            by_stage.setdefault(bar.stage, []).append(bar)
        joined = [bar for stage, own in by_stage.items() for bar in join_call_bars(own, self.chunks[stage])]
        computing = [bar for bar in joined if bar.instruction.op in ("F", "B", "I", "W")]
        of_stage = max(_MOST_STAGE_BARS, 4 * stages)
        return leave_out_middle(computing, folds, int(self.share * most), int(self.share * of_stage))

    @property
    def _hidden_spans(self) -> list[tuple[float, float]]:
        """Return the intervals (start, end) that are not drawn, in seconds from the start of the step."""
        return [fold.hidden for fold in self.folds]

    @property
    def left_out(self) -> Gap | None:
        """Return the middle of the step, if it is left out because the step is too long to be drawn."""
        return next((part for part in self.folds if isinstance(part, Gap)), None)

    def _plot_width(self) -> float:
        """Return the width of the plot in pixels. It is wide enough for a number in the box of a typical forward,
        within limits.
        """
        forwards = [b.end - b.start for b in self.bars if b.instruction.op == "F" and b.end > b.start]
        shown = self.total - sum(stop - start for start, stop in self._hidden_spans)
        wanted = _NARROWEST * shown / statistics.median(forwards) if forwards else 0.0
        return min(_FOLDED_WIDTH if self.folds else _MOST_WIDTH, max(_LEAST_WIDTH, wanted))

    @property
    def row_height(self) -> float:
        return sum(_LANE_HEIGHTS[lane] for lane in self.lanes) + _LANE_GAP * (len(self.lanes) - 1)

    def draw_chart(self) -> ET.Element:
        """Return the whole picture as an SVG element: header, time axis, one row per pipeline stage. If a period
        repeats, such as one forward and one backward in steady state, the picture shows it once; marks on the axis show
        where the repetitions are left out.
        """
        right = 84.0
        width = self.left + self.width + right
        alike = "its ranks all do the same" if not self.program.data_shares else "the ranks that take longest"
        note = (
            f"One row per stage: {alike}. Idle is the time in which a stage computes nothing. The summary counts "
            "exposed communication otherwise: collectives inside layers, and the time by which other transfers slow "
            "computation down, are in the boxes of computation here."
        )
        if any(name.startswith("bubble") for name, _ in self.figures):
            note += " The bubble is the part of idle time in which a rank waits for other stages, without transfers."
        if any(isinstance(part, Fold) for part in self.folds):
            note += " What repeats is drawn once, with how often it runs; the axis leaves the repetitions out."
            drawn_share, update_share = self._find_update_shares()
            if drawn_share > max(_NOTED, _WIDENED * update_share):
                note += (
                    f" So the optimizer's update, {format_percent(update_share)} of the step, takes "
                    f"{format_percent(drawn_share)} of the width."
                )
        if self.left_out is not None:
            note += f" The step is too long to be drawn in full: {self._describe_gap(self.left_out)} are left out."
        drawn = any(b.instruction.op == "STEP" for b in self.bars)
        note += " The optimizer's update is not drawn." if self.program.objective == "train" and not drawn else ""
        note += "".join(f" {words}" for words in self.notes)
        note += " Sends, too many to draw, are left out." if self.crowded else ""
        header = Header(self.title, note, self.figures, self.build_legend_entries())
        top = draw_header(create_picture(width, 0, ""), header, width) + 6 + (_BRACKETS if self.folds else 0.0)
        bottom = top + len(self.program.stages) * (self.row_height + _ROW_GAP)
        root = create_picture(width, bottom + 44, self.title)
        draw_header(root, header, width)
        if self.left_out is not None:
            root.set("data-left-out", f"{self._describe_gap(self.left_out)} of the timeline")
        self.draw_time_axis(root, top - 4, bottom)
        for stage in range(len(self.program.stages)):
            self.draw_stage_row(root, stage, top + stage * (self.row_height + _ROW_GAP))
        for part in self.folds:
            if isinstance(part, Fold):
                self.draw_fold_bracket(root, part, top, bottom)
            else:
                self.draw_gap(root, part, top, bottom)
        return root

    def _find_update_shares(self) -> tuple[float, float]:
        """Return two fractions for the optimizer's update, of the stage on which it takes longest: its part of the
        drawn time, and its part of the step. Both are 0 if the update is not drawn."""
        update = max((b.end - b.start for b in self.bars if b.instruction.op == "STEP"), default=0.0)
        return update / self.scale.shown, update / self.total

    @staticmethod
    def _describe_gap(gap: Gap) -> str:
        start, end = gap.hidden
        return f"{seconds_text(end - start)} (from {seconds_text(start)} to {seconds_text(end)})"

    def draw_gap(self, root: ET.Element, gap: Gap, top: float, bottom: float) -> None:
        """Mark the place in ``root`` at which ``gap``, the middle of the step, is left out: two dashed lines, the
        seconds between them above, and dots in each row. ``top``, ``bottom``: y coordinates of the edges of the rows.
        """
        start, end = gap.hidden
        outer = draw_group(root, f"left out: {gap.count:,} computations in {self._describe_gap(gap)}")
        first = self.scale.x(start)
        middle = first + self.scale.gap / 2
        draw_text(outer, middle, top - 14, f"{seconds_text(end - start)} left out", size=12, bold=True, anchor="middle")
        for x in (first + 2, first + self.scale.gap - 2):
            draw_line(outer, x, top - 8, x, bottom, "ink", 1.5).set("stroke-dasharray", "6 4")
        for stage in range(len(self.program.stages)):
            y = top + stage * (self.row_height + _ROW_GAP) + _LANE_HEIGHTS["compute"] / 2 + 4
            draw_text(outer, middle, y, ". . .", size=14, fill="muted", anchor="middle")

    def draw_fold_bracket(self, root: ET.Element, fold: Fold, top: float, bottom: float) -> None:
        """Mark a repeated part of the step in ``root``: draw a bracket with the number of periods above its first
        period, and two dashed lines where the other periods are left out. ``fold``: the equal consecutive periods, of
        which only the first is drawn. ``top``, ``bottom``: y coordinates of the edges of the rows.
        """
        start, _ = fold.hidden
        words = f"× {fold.times:,}"
        told = f"{fold.times:,} equal periods of {seconds_text(fold.period)} from {seconds_text(fold.start)} on"
        outer = draw_group(root, f"{told}: the first is drawn")
        first, last, y = self.scale.x(fold.start), self.scale.x(start), top - 10
        draw_line(outer, first, y, last, y, "ink", 1.5)
        for x in (first, last):
            draw_line(outer, x, y, x, y + 5, "ink", 1.5)
        draw_text(outer, (first + last) / 2, y - 4, words, size=12, bold=True, anchor="middle")
        middle = last + self.scale.gap / 2
        for x in (last + 2, last + self.scale.gap - 2):
            draw_line(outer, x, y + 5, x, bottom, "muted").set("stroke-dasharray", "3 3")
        draw_text(outer, middle, bottom - self.row_height / 2, "…", size=14, fill="muted", anchor="middle")

    def build_legend_entries(self) -> list[tuple[str, str]]:
        """Return pairs (name of a colour or ``hatched``, meaning) for the kinds of instructions in the picture and for
        idle time.
        """
        used = {get_bar_style(b) for b in self.bars if get_bar_style(b).lane in self.lanes}
        entries = [*dict.fromkeys((look.colour, look.meaning) for look in LOOKS.values() if look in used)]
        chunks = {self.find_chunk_number(b) for b in self.bars if get_bar_style(b).lane == "compute"} - {0}
        if chunks:
            which = "second virtual stage" if chunks == {1} else "further virtual stages"
            entries.append((name_chunk_colour(LOOKS["F"].colour, 1), f"fainter: a rank's {which}"))
        return [*entries, ("hatched", "idle")]

    def find_chunk_number(self, bar: Bar) -> int:
        """Return the index, from 0, of the virtual stage (among those of one rank) to which the instruction of ``bar``
        belongs."""
        calls = bar.instruction.calls
        return max(0, bisect_right(self.chunks[bar.stage], calls[0]) - 1) if calls else 0

    def draw_time_axis(self, root: ET.Element, top: float, bottom: float) -> None:
        """Draw labelled vertical lines at round times and at the end of the step into ``root``. ``top``, ``bottom``: y
        coordinates of their ends.
        """
        step = tick_step(self.scale.shown, max(2, int(self.width / 110)))
        times = [i * step for i in range(math.ceil(self.total / step - 1e-9))]
        right, last = self.left + self.width, -math.inf
        for start, stop in self.scale.visible(0.0, self.total):
            draw_line(root, start, bottom, stop, bottom, "line")
        for time in [*times, self.total]:
            if time < self.total and any(start < time < stop for start, stop in self._hidden_spans):
                continue
            places = max(3, 1 + math.floor(math.log10(time / step))) if 0 < time < self.total else 3
            x, words = self.scale.x(time), seconds_text(time, places)
            room = text_width(words, 11) / 2 + 6
            if x - last < room or (time < self.total and right - x < 2 * room + 12):
                continue
            last = x + room
            draw_line(root, x, top, x, bottom + 5, "grid")
            draw_text(root, x, bottom + 20, words, size=11, fill="muted", anchor="middle", bold=time == self.total)

    def draw_stage_row(self, root: ET.Element, stage: int, top: float) -> None:
        """Draw the row of one pipeline stage into ``root``: its name and ranks, the boxes of its instructions, and its
        fraction of idle time. ``stage``: index of the stage. ``top``: y coordinate of the row's upper edge.
        """
        several = "rank" if "–" not in self.ranks[stage] and "," not in self.ranks[stage] else "ranks"
        draw_text(root, _MARGIN, top + 12, f"Stage {stage}", size=13, bold=True)
        draw_text(root, _MARGIN, top + 26, f"{several} {self.ranks[stage]}", size=10, fill="muted")
        y = top
        for lane in self.lanes:
            height = _LANE_HEIGHTS[lane]
            for start, stop in self.scale.visible(0.0, self.total):
                draw_rectangle(root, start, y, stop - start, height, "hatched" if lane == "compute" else "panel")
            mine = [b for b in self.bars if b.stage == stage and get_bar_style(b).lane == lane]
            joined = join_call_bars(mine, self.chunks[stage])
            for bar in merge_narrow_bars(joined, _MERGE * self.scale.seconds_per_pixel):
                self.draw_bar_box(root, bar, y, height)
            y += height + _LANE_GAP
        idle = f"{format_percent(self.idle[stage])} idle"
        draw_text(root, self.left + self.width + 10, top + 18, idle, size=11, fill="muted")

    def draw_bar_box(self, root: ET.Element, bar: Bar, y: float, height: float) -> None:
        outer = draw_group(root, self.format_bar_tooltip(bar), "hit")
        for start, stop in self.scale.visible(bar.start, bar.end):
            self.draw_bar_piece(outer, bar, start, max(0.8, stop - start), y, height)

    def draw_bar_piece(self, outer: ET.Element, bar: Bar, x: float, width: float, y: float, height: float) -> None:
        """Draw one visible part of ``bar`` with its label into ``outer``. ``x``, ``y``: the top left corner in pixels.
        ``width``, ``height``: the size in pixels.
        """
        look = get_bar_style(bar)
        inset = 0.5 if width > 3 else 0.0
        colour = name_chunk_colour(look.colour, self.find_chunk_number(bar))
        draw_rectangle(outer, x + inset, y, width - 2 * inset, height, colour, radius=2 if width > 8 else 0)
        label = self.format_bar_label(bar)
        size = next((s for s in (11.0, 9.0) if s < height * 0.8 and text_width(label, s) < width - 1), None)
        if label and size:
            base = y + height / 2 + size * 0.36
            on = look.on if colour == look.colour else "ink"
            draw_text(outer, x + width / 2, base, label, size=size, fill=on, anchor="middle")

    def format_bar_label(self, bar: Bar) -> str:
        """Return the text inside the box of ``bar``: the index of its microbatch or gradient bucket (gradients that one
        collective reduces); empty for a box that stands for several instructions.
        """
        if bar.merged > 1 or get_bar_style(bar).lane == "exchange":
            return ""
        if bar.instruction.bucket is not None:
            return f"bucket {bar.instruction.bucket}"
        if bar.instruction.op == "STEP":
            return "update"
        return "" if bar.instruction.microbatch is None else str(bar.instruction.microbatch)

    def format_bar_tooltip(self, bar: Bar) -> str:
        """Return the tooltip of ``bar``: the instruction and its microbatch, layers, values or parameters, and its
        seconds.
        """
        instruction, look = bar.instruction, get_bar_style(bar)
        what = look.verb if bar.merged == 1 else f"{bar.merged} times {look.verb}"
        if instruction.microbatch is not None and bar.merged == 1:
            what += f" of microbatch {instruction.microbatch}"
        lines = [f"{instruction}: {what}"]
        if instruction.calls:
            lines.append(f"calls {instruction.calls[0]} to {instruction.calls[1] - 1} of stage {bar.stage}")
        if instruction.peer is not None:
            lines.append(f"from stage {bar.stage} to stage {instruction.peer}: {', '.join(instruction.values[:8])}")
        if instruction.bucket is not None:
            bucket = self.program.stages[bar.stage].buckets[instruction.bucket]
            shared = zero_axes(self.program, bucket.states)
            what = "parameters" if instruction.op == "GATHER" and not instruction.gradients else "gradients"
            over = instruction.axes or (
                list_all_reduce_axes(self.program, bucket) if instruction.op == "REDUCE" else shared
            )
            lines.append(f"{len(bucket.states)} {what} over {' × '.join(over)}")
        lines.append(f"{seconds_text(bar.end - bar.start)}, from {seconds_text(bar.start)} to {seconds_text(bar.end)}")
        return "\n".join(lines)


def join_call_bars(bars: Sequence[Bar], chunks: Sequence[int] = ()) -> list[Bar]:
    """Return ``bars``, the instructions of one pipeline stage, by start time. Consecutive instructions of one
    microbatch that run consecutive layers of one virtual stage without a pause are joined into one bar. ``chunks``: the
    positions of the calls at which the virtual stages of the rank begin.
    """
    joined: list[Bar] = []
    for bar in sorted(bars, key=lambda b: (b.start, b.end)):
        last = joined[-1] if joined else None
        calls = _joined_calls(last, bar, chunks) if last else None
        if last and calls and bar.start - last.end <= 1e-3 * (bar.end - last.start):
            whole = bar.instruction.model_copy(update={"calls": calls})
            joined[-1] = replace(last, end=bar.end, instruction=whole)
        else:
            joined.append(bar)
    return joined


def _joined_calls(last: Bar, bar: Bar, chunks: Sequence[int]) -> tuple[int, int] | None:
    """Return the range of layers that the instructions ``last`` and ``bar`` run together, as a pair (index of the
    first, index behind the last one); ``None`` if they differ in operation, microbatch or virtual stage, or if their
    layers are not adjacent. ``chunks``: the indices of the first layers of virtual stages.
    """
    one, two = last.instruction, bar.instruction
    if one.op != two.op or one.microbatch != two.microbatch or not one.calls or not two.calls:
        return None
    if max(one.calls[0], two.calls[0]) in chunks:
        return None
    if one.calls[1] == two.calls[0] or two.calls[1] == one.calls[0]:
        return min(one.calls[0], two.calls[0]), max(one.calls[1], two.calls[1])
    return None


def merge_narrow_bars(bars: Sequence[Bar], narrow: float) -> list[Bar]:
    """Return ``bars`` (boxes of instructions in the picture) by start time. Adjacent bars of the same kind of
    instruction are merged into one if each is shorter than ``narrow`` seconds.
    """
    merged: list[Bar] = []
    for bar in sorted(bars, key=lambda b: (b.start, b.end)):
        last = merged[-1] if merged else None
        if (
            last
            and bar.end - bar.start < narrow
            and (last.merged > 1 or last.end - last.start < narrow)
            and bar.start - last.end < narrow
            and last.instruction.word == bar.instruction.word
        ):
            merged[-1] = replace(last, end=max(last.end, bar.end), merged=last.merged + 1)
        else:
            merged.append(bar)
    return merged


def tick_step(total: float, most: int) -> float:
    """Return the distance of the ticks of an axis, in the unit of ``total`` (such as seconds): 1, 2 or 5 times a power
    of ten. It is the smallest of these distances with which an axis from 0 to ``total`` has at most ``most`` ticks.
    """
    rough = total / most
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
