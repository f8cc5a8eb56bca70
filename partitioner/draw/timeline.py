"""The ``timeline`` view: what every stage does when. All ranks of a stage do the same, so a stage is one row.

A row has a lane for computation, hatched where the stage waits, and below it thin lanes for what is sent and reduced
meanwhile.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from xml.etree import ElementTree as ET

from partitioner.draw.figures import key_figures, picture_title
from partitioner.draw.svg import Header, draw_header, group, later, line, picture, rect, text, text_width, to_text
from partitioner.outline import chunk_starts
from partitioner.plan import Plan
from partitioner.timing import plan_timeline
from partitioner.units import percent, ranges, seconds_text
from runtime.levels import rest_axes
from runtime.program import Instruction, Program
from runtime.simulate import Timeline
from runtime.zero import zero_axes

Lane = Literal["compute", "exchange", "reduce", "gather", "host"]


@dataclass(frozen=True)
class Look:
    """How an operation is drawn: lane, colour, the colour of its number, and its words in legend and tooltip."""

    lane: Lane
    colour: str
    on: str
    meaning: str
    verb: str


LOOKS: dict[str, Look] = {
    "F": Look("compute", "forward", "on_forward", "forward", "forward"),
    "B": Look("compute", "backward", "on_backward", "backward", "backward"),
    "I": Look("compute", "backward_input", "on_forward", "backward, inputs", "backward to inputs"),
    "W": Look("compute", "backward_weight", "on_backward", "backward, weights", "backward to weights"),
    "TOTAL_F": Look("compute", "total", "on_backward", "totals over the batch", "totals"),
    "TOTAL": Look("reduce", "total", "on_backward", "totals over the batch", "all-reduce of totals"),
    "SEND_F": Look("exchange", "send", "on_forward", "send", "send"),
    "SEND_B": Look("exchange", "send", "on_forward", "send", "send gradients"),
    "REDUCE": Look("reduce", "all_reduce", "on_backward", "reduction of gradients", "reduction of gradients"),
    "SCATTER": Look("reduce", "reduce_scatter", "on_forward", "gradients to their shards", "scatter of gradients"),
    "GATHER": Look("gather", "all_gather", "on_forward", "gathering of parameters", "gather of parameters"),
    "GATHER_B": Look("reduce", "all_gather", "on_forward", "gathering of gradients", "gather of gradients"),
    "OFFLOAD": Look("host", "all_gather", "on_forward", "to host memory", "move to host memory"),
    "FETCH": Look("host", "reduce_scatter", "on_forward", "from host memory", "fetch from host memory"),
    "SYNC": Look("reduce", "tied", "on_forward", "gradients of tied weights", "gradients of tied weights"),
    "UPDATE": Look("reduce", "total", "on_backward", "new values of buffers", "new values of buffers"),
}  # what is absent is waiting or bookkeeping, and takes no time of its own


def look_of(instruction: Instruction) -> Look | None:
    """How an instruction is drawn, if it is."""
    return LOOKS.get(instruction.word)


_LANE_HEIGHTS: dict[Lane, float] = {"compute": 27.0, "exchange": 7.0, "reduce": 12.0, "gather": 12.0, "host": 9.0}
_LANE_GAP, _ROW_GAP, _MARGIN = 3.0, 13.0, 20.0
_NARROWEST, _LEAST_WIDTH, _MOST_WIDTH = 19.0, 860.0, 3000.0
_MOST_SENDS = 4000  # beyond which they are left out: the picture would be megabytes of hairlines
_MERGE = 1.5  # pixels: narrower boxes of one kind are drawn as one


@dataclass(frozen=True)
class Bar:
    """One instruction on one stage, in seconds from the start of the step."""

    stage: int
    start: float
    end: float
    instruction: Instruction
    merged: int = 1


def draw_plan_timeline(plan: Plan) -> str:
    """The picture of ``plan``, simulated under the cost model that chose it."""
    return draw_timeline(picture_title(plan), plan.program, bars_of(plan_timeline(plan)), key_figures(plan))


def bars_of(timeline: Timeline) -> list[Bar]:
    """A simulated step as bars: an instruction that waits before it works is as long as its work."""
    bars = []
    for stage, lane in enumerate(timeline.stages):
        for span in lane.spans:
            if span.work > 0:
                bars.append(Bar(stage, span.end - span.work, span.end, span.instruction))
        bars += [Bar(stage, b.start, b.end, b.instruction) for b in lane.background]
    return bars


def draw_timeline(title: str, program: Program, bars: Sequence[Bar], figures: Sequence[tuple[str, str]] = ()) -> str:
    """The picture of ``bars`` as SVG text; ``figures`` stand in the header."""
    return to_text(_Chart(title, program, [b for b in bars if look_of(b.instruction)], figures).draw())


def idle_shares(program: Program, bars: Iterable[Bar]) -> list[float]:
    """For each stage the share of the step in which it computes nothing."""
    bars = list(bars)
    total = max((b.end for b in bars), default=0.0)
    busy = [0.0] * len(program.stages)
    for bar in bars:
        look = look_of(bar.instruction)
        if look and look.lane == "compute":
            busy[bar.stage] += bar.end - bar.start
    return [1 - b / total if total else 0.0 for b in busy]


class _Chart:
    def __init__(self, title: str, program: Program, bars: Sequence[Bar], figures: Sequence[tuple[str, str]]) -> None:
        self.title = title
        self.program = program
        self.bars = bars
        self.total = max((b.end for b in bars), default=0.0) or 1.0
        counts = Counter(self.look(b).lane for b in bars)
        self.crowded = counts["exchange"] > _MOST_SENDS
        self.lanes: list[Lane] = [
            lane
            for lane in _LANE_HEIGHTS
            if lane == "compute" or (counts[lane] and not (lane == "exchange" and self.crowded))
        ]
        self.idle = idle_shares(program, bars)
        per_stage = program.world_size // len(program.stages)
        self.ranks = [ranges(range(s * per_stage, (s + 1) * per_stage)) for s in range(len(program.stages))]
        self.chunks = [chunk_starts(stage) for stage in program.stages]
        labels = [text_width(f"{'rank' if per_stage == 1 else 'ranks'} {r}", 10) for r in self.ranks]
        self.left = _MARGIN + max([text_width("Stage 00", 13, True), *labels]) + 14
        self.width = self._plot_width()
        self.figures = figures

    @staticmethod
    def look(bar: Bar) -> Look:
        look = look_of(bar.instruction)
        assert look is not None, bar.instruction
        return look

    def _plot_width(self) -> float:
        """Wide enough for the typical forward to hold its number, within reason."""
        forwards = [b.end - b.start for b in self.bars if b.instruction.op == "F" and b.end > b.start]
        wanted = _NARROWEST * self.total / statistics.median(forwards) if forwards else 0.0
        return min(_MOST_WIDTH, max(_LEAST_WIDTH, wanted))

    @property
    def row_height(self) -> float:
        return sum(_LANE_HEIGHTS[lane] for lane in self.lanes) + _LANE_GAP * (len(self.lanes) - 1)

    def draw(self) -> ET.Element:
        right = 84.0
        width = self.left + self.width + right
        alike = "its ranks all do the same" if not self.program.data_shares else "the ranks that take longest"
        note = f"One row per stage: {alike}. Idle is all time without computation, that of transfers included."
        if any(name == "bubble" for name, _ in self.figures):
            note += " The bubble is less: what the slowest stage waits for other stages, transfers not counted."
        note += " The optimizer's update is not drawn." if self.program.objective == "train" else ""
        note += " Sends, too many to draw, are left out." if self.crowded else ""
        header = Header(self.title, note, self.figures, self.legend())
        top = draw_header(picture(width, 0, ""), header, width) + 6
        bottom = top + len(self.program.stages) * (self.row_height + _ROW_GAP)
        root = picture(width, bottom + 44, self.title)
        draw_header(root, header, width)
        self.axis(root, top - 4, bottom)
        for stage in range(len(self.program.stages)):
            self.row(root, stage, top + stage * (self.row_height + _ROW_GAP))
        return root

    def legend(self) -> list[tuple[str, str]]:
        used = {self.look(b) for b in self.bars if self.look(b).lane in self.lanes}
        entries = [*dict.fromkeys((look.colour, look.meaning) for look in LOOKS.values() if look in used)]
        chunks = {self.chunk(b) for b in self.bars if self.look(b).lane == "compute"} - {0}
        if chunks:
            which = "second virtual stage" if chunks == {1} else "further virtual stages"
            entries.append((later(LOOKS["F"].colour, 1), f"fainter: a rank's {which}"))
        return [*entries, ("hatched", "idle")]

    def chunk(self, bar: Bar) -> int:
        """Which of its rank's virtual stages an instruction is of."""
        calls = bar.instruction.calls
        return max(0, bisect_right(self.chunks[bar.stage], calls[0]) - 1) if calls else 0

    def x(self, seconds: float) -> float:
        return self.left + self.width * seconds / self.total

    def axis(self, root: ET.Element, top: float, bottom: float) -> None:
        step = tick_step(self.total, max(2, int(self.width / 110)))
        line(root, self.left, bottom, self.left + self.width, bottom, "line")
        for i in range(math.floor(self.total / step + 1e-9) + 1):
            x = self.x(i * step)
            line(root, x, top, x, bottom + 5, "grid")
            text(root, x, bottom + 20, seconds_text(i * step), size=11, fill="muted", anchor="middle")

    def row(self, root: ET.Element, stage: int, top: float) -> None:
        several = "rank" if "–" not in self.ranks[stage] and "," not in self.ranks[stage] else "ranks"
        text(root, _MARGIN, top + 12, f"Stage {stage}", size=13, bold=True)
        text(root, _MARGIN, top + 26, f"{several} {self.ranks[stage]}", size=10, fill="muted")
        rect(root, self.left, top, self.width, _LANE_HEIGHTS["compute"], "hatched")
        y = top
        for lane in self.lanes:
            height = _LANE_HEIGHTS[lane]
            if lane != "compute":
                rect(root, self.left, y, self.width, height, "panel")
            mine = [b for b in self.bars if b.stage == stage and self.look(b).lane == lane]
            for bar in merge(join(mine), _MERGE * self.total / self.width):
                self.box(root, bar, y, height)
            y += height + _LANE_GAP
        idle = f"{percent(self.idle[stage])} idle"
        text(root, self.left + self.width + 10, top + 18, idle, size=11, fill="muted")

    def box(self, root: ET.Element, bar: Bar, y: float, height: float) -> None:
        look = self.look(bar)
        x, width = self.x(bar.start), max(0.8, self.x(bar.end) - self.x(bar.start))
        outer = group(root, self.tooltip(bar), "hit")
        inset = 0.5 if width > 3 else 0.0
        colour = later(look.colour, self.chunk(bar))
        rect(outer, x + inset, y, width - 2 * inset, height, colour, radius=2 if width > 8 else 0)
        label = self.label(bar)
        size = next((s for s in (11.0, 9.0) if s < height * 0.8 and text_width(label, s) < width - 1), None)
        if label and size:
            base = y + height / 2 + size * 0.36
            on = look.on if colour == look.colour else "ink"
            text(outer, x + width / 2, base, label, size=size, fill=on, anchor="middle")

    def label(self, bar: Bar) -> str:
        if bar.merged > 1 or self.look(bar).lane == "exchange":
            return ""
        if bar.instruction.bucket is not None:
            return f"bucket {bar.instruction.bucket}"
        return "" if bar.instruction.microbatch is None else str(bar.instruction.microbatch)

    def tooltip(self, bar: Bar) -> str:
        instruction, look = bar.instruction, self.look(bar)
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
            over = instruction.axes or (rest_axes(self.program, bucket) if instruction.op == "REDUCE" else shared)
            lines.append(f"{len(bucket.states)} {what} over {' × '.join(over)}")
        lines.append(f"{seconds_text(bar.end - bar.start)}, from {seconds_text(bar.start)} to {seconds_text(bar.end)}")
        return "\n".join(lines)


def join(bars: Sequence[Bar]) -> list[Bar]:
    """The pieces in which a microbatch passes through consecutive calls without a pause, as one bar each."""
    joined: list[Bar] = []
    for bar in sorted(bars, key=lambda b: (b.start, b.end)):
        last = joined[-1] if joined else None
        calls = _joined_calls(last, bar) if last else None
        if last and calls and bar.start - last.end <= 1e-3 * (bar.end - last.start):
            whole = bar.instruction.model_copy(update={"calls": calls})
            joined[-1] = replace(last, end=bar.end, instruction=whole)
        else:
            joined.append(bar)
    return joined


def _joined_calls(last: Bar, bar: Bar) -> tuple[int, int] | None:
    one, two = last.instruction, bar.instruction
    if one.op != two.op or one.microbatch != two.microbatch or not one.calls or not two.calls:
        return None
    if one.calls[1] == two.calls[0] or two.calls[1] == one.calls[0]:
        return min(one.calls[0], two.calls[0]), max(one.calls[1], two.calls[1])
    return None


def merge(bars: Sequence[Bar], narrow: float) -> list[Bar]:
    """Neighbours of one kind that are all shorter than ``narrow`` seconds, joined."""
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
    """The smallest of 1, 2 or 5 times a power of ten that puts at most ``most`` ticks on ``total``."""
    rough = total / most
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
