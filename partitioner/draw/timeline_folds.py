"""Choose the parts of a timeline that are not drawn, and map times to a pixel axis that leaves them out.

Equal periods are drawn once. If the step is still too long, its middle is left out.

A period begins with an anchor: the forward (or backward) of the next microbatch, or of the next layer, on the busiest
stage. Two periods are equal if all stages run equal instructions at equal times after the anchor. Microbatches, calls
and buckets are compared relative to those of the anchor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from partitioner.runtime.program.instructions import Instruction

_LEAST_TIMES = 4  # consecutive equal periods; fewer are all drawn

_LEAST_HIDDEN = 0.05  # fraction of the time drawn so far; hiding less is not worth a break
_MOST_FOLDS = 4
_KEPT = 0.375  # fraction of the limits that is drawn at either end, where the middle is left out
_TOLERANCE = 0.02  # fraction of a period by which times may differ; less cannot be seen
_EDGE = 1e-6  # fraction of a period by which it begins before its anchor, so that rounding does not matter


class Drawn(Protocol):
    """Describes the interface of a bar of a timeline: one instruction on one pipeline stage. ``stage``: index of the
    stage. ``start`` and ``end``: seconds from the start of the training step. ``instruction``: the instruction.
    """

    @property
    def stage(self) -> int: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def instruction(self) -> Instruction: ...


@dataclass(frozen=True)
class Fold:
    """Describes a part of a training step that repeats: ``times`` equal periods of ``period`` seconds each. The first
    begins ``start`` seconds after the start of the step. Only this one is drawn.
    """

    start: float
    period: float
    times: int

    @property
    def hidden(self) -> tuple[float, float]:
        """Return (start, end) of the interval of the periods that are not drawn, in seconds from the start of the
        step."""
        return self.start + self.period, self.start + self.period * self.times


@dataclass(frozen=True)
class Gap:
    """Describes a part of a training step that is not drawn because the step has too many instructions. ``start``,
    ``end``: seconds from the start of the step. ``count``: number of computations in it.
    """

    start: float
    end: float
    count: int

    @property
    def hidden(self) -> tuple[float, float]:
        """Return (start, end) of the part of the step that is not drawn, in seconds from the start of the step."""
        return self.start, self.end


@dataclass(frozen=True)
class TimeScale:
    """Maps seconds to pixels and leaves out some parts of the step. The pixels from ``left`` to ``left + width`` show
    the time from 0 to ``total`` seconds without the hidden parts of ``folds``. ``gap``: pixels in place of each hidden
    part.
    """

    total: float
    folds: tuple[Fold | Gap, ...]
    left: float
    width: float
    gap: float = 26.0  # pixels of a break

    @property
    def segments(self) -> list[tuple[float, float]]:
        """Return the (start, end) times in seconds between which the timeline is drawn, in order."""
        ends = [0.0, *(time for fold in self.folds for time in fold.hidden), self.total]
        return list(zip(ends[::2], ends[1::2], strict=True))

    @property
    def shown(self) -> float:
        """Return the number of seconds of the step that the timeline shows, without the repeated periods that are left
        out.
        """
        return sum(stop - start for start, stop in self.segments)

    @property
    def seconds_per_pixel(self) -> float:
        """Return the seconds that one pixel of the timeline stands for, outside of the gaps in place of
        hidden periods.
        """
        return self.shown / max(1.0, self.width - self.gap * len(self.folds))

    def x(self, seconds: float) -> float:
        """Return the x coordinate in pixels of the time ``seconds`` from the start of the step. For a time that is not
        drawn, return the left edge of the gap in its place."""
        x, last = self.left, self.left
        for number, (start, stop) in enumerate(self.segments):
            if seconds < start:
                return last
            last = x + (min(seconds, stop) - start) / self.seconds_per_pixel
            if seconds <= stop:
                return last
            x = last + self.gap
            if number == len(self.folds):
                return last
        return last

    def visible(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return the (left, right) x coordinates of the drawn parts of an interval, from left to right. ``start``,
        ``end``: seconds from the start of the step.
        """
        found = []
        x = self.left
        for first, last in self.segments:
            a, b = max(first, start), min(last, end)
            if a < b:
                found.append((x + (a - first) / self.seconds_per_pixel, x + (b - first) / self.seconds_per_pixel))
            x += (last - first) / self.seconds_per_pixel + self.gap
        return found


def find_folds(bars: Sequence[Drawn], num_stages: int) -> tuple[Fold, ...]:
    """Return the parts of a timeline in which equal periods follow each other, so that a picture need draw only the
    first period of each. Only long parts are returned, at most four, in order of time. The first period of a part may
    itself contain another returned part. ``bars``: all instructions of all ``num_stages`` pipeline stages.
    """
    computing = [b for b in bars if b.instruction.op in "FBI" and b.instruction.calls]
    if not computing:
        return ()
    busy = [0.0] * num_stages
    for bar in computing:
        busy[bar.stage] += bar.end - bar.start
    stage = busy.index(max(busy))
    ordered = sorted(bars, key=lambda b: b.start)
    total = max(b.end for b in bars)
    folds: list[Fold] = []
    while len(folds) < _MOST_FOLDS:
        shown = total - sum(stop - start for start, stop in (f.hidden for f in folds))
        found = [
            fold
            for anchors, strides in _list_anchor_bars([b for b in computing if b.stage == stage], num_stages)
            for stride in strides
            for fold in _equal_periods(ordered, anchors, stride, folds)
        ]
        best = max(found, key=lambda f: f.period * (f.times - 1), default=None)
        if best is None or best.period * (best.times - 1) < _LEAST_HIDDEN * shown:
            break
        folds.append(best)
    return tuple(sorted(folds, key=lambda f: f.hidden))


def leave_out_middle(
    bars: Sequence[Drawn], folds: Sequence[Fold], most: int, most_of_stage: int
) -> tuple[Fold | Gap, ...]:
    """Return ``folds``, the repeated parts of a timeline, with a gap in the middle of the step if too many of ``bars``
    are drawn without it: more than ``most``, or more than ``most_of_stage`` of one pipeline stage. At most 3/8 of these
    numbers are drawn before the gap, and as many after it. A repeated part that overlaps the gap becomes part of the
    gap. ``bars``: the computations of all stages, those in hidden periods included."""
    hidden = [fold.hidden for fold in folds]
    drawn = [b for b in bars if not any(start <= b.start and b.end <= stop for start, stop in hidden)]
    computing = Counter(b.stage for b in drawn)
    if len(drawn) <= most and max(computing.values(), default=0) <= most_of_stage:
        return tuple(folds)
    limits = int(_KEPT * most), int(_KEPT * most_of_stage)
    first = _find_end_of_first(sorted(drawn, key=lambda b: b.start), *limits).start
    last = _find_end_of_first(sorted(drawn, key=lambda b: -b.end), *limits).end
    within = [fold for fold in folds if fold.start < last and fold.hidden[1] > first]
    first = min([first, *(fold.hidden[0] for fold in within)])
    last = max([last, *(fold.hidden[1] for fold in within)])
    if last <= first:
        return tuple(folds)
    count = sum(first <= b.start and b.end <= last for b in bars)
    kept = [fold for fold in folds if fold not in within]
    return tuple(sorted([*kept, Gap(first, last, count)], key=lambda part: part.hidden))


def _find_end_of_first(bars: Sequence[Drawn], most: int, most_of_stage: int) -> Drawn:
    """Return the first of ``bars`` (computations of all pipeline stages) at which their number exceeds ``most``, or the
    number of bars on one stage exceeds ``most_of_stage``. If neither is exceeded, return the last bar."""
    computing = Counter[int]()
    for number, bar in enumerate(bars):
        computing[bar.stage] += 1
        if number >= most or computing[bar.stage] > most_of_stage:
            return bar
    return bars[-1]


def _list_anchor_bars(bars: Sequence[Drawn], num_stages: int) -> Iterator[tuple[list[Drawn], tuple[int, ...]]]:
    """Yield pairs of a list of anchors and a tuple of strides, from which the search for repeated periods of a timeline
    starts. Anchors are bars (instructions) at which a period may begin, such as the first forward of each microbatch,
    in order of time. With a stride of n, a period runs from one anchor to the n-th anchor after it. ``bars``: the
    forward and backward computations of one pipeline stage. ``num_stages``: number of pipeline stages.
    """
    for ops in ("F", "BI"):
        every = sorted((b for b in bars if b.instruction.op in ops), key=lambda b: b.start)
        firsts: dict[int | None, Drawn] = {}
        for bar in every:
            firsts.setdefault(bar.instruction.microbatch, bar)
        yield list(firsts.values()), tuple(sorted({1, 2, num_stages}))
        if len(firsts) < len(every):
            yield every, (1, 2)


def _equal_periods(
    ordered: Sequence[Drawn], anchors: Sequence[Drawn], stride: int, folds: Sequence[Fold]
) -> Iterator[Fold]:
    """Yield each part of a timeline in which at least four consecutive periods are equal. Periods that overlap hidden
    periods are skipped. Two periods are equal if their bars look the same: equal instructions and durations on each
    stage.

    ``ordered``: the bars (instructions) of all stages, by start. ``anchors``: bars at which a period may begin, in
    order of time. ``stride``: a period runs from one anchor to the anchor this many positions later. ``folds``: the
    repeated parts that were found before, of which the picture shows one period and hides the others.
    """
    begins = anchors[::stride]
    spans = [(a.start, b.start) for a, b in pairwise(begins)]
    hidden = [fold.hidden for fold in folds]
    free = [all(b <= start or a >= stop for start, stop in hidden) and b > a for a, b in spans]
    pictures = [
        _build_period_picture(begin.instruction, own)
        for begin, own in zip(begins, _group_bars_by_span(ordered, spans), strict=False)
    ]
    first = 0
    for i in range(1, len(spans) + 1):
        if (
            i < len(spans)
            and free[i]
            and free[first]
            and _is_equal_period(pictures[first], pictures[i], spans[first], spans[i])
        ):
            continue
        if i - first >= _LEAST_TIMES and free[first]:
            yield Fold(spans[first][0], (spans[i - 1][1] - spans[first][0]) / (i - first), i - first)
        first = i


def _group_bars_by_span(ordered: Sequence[Drawn], spans: Sequence[tuple[float, float]]) -> list[list[Drawn]]:
    """Return, for each of ``spans``, the list of bars that begin in it. ``ordered``: bars by start. ``spans``:
    consecutive intervals (start, end) in seconds.
    """
    found: list[list[Drawn]] = [[] for _ in spans]
    place = 0
    for bar in ordered:
        while place < len(spans) and bar.start >= spans[place][1] - _EDGE * (spans[place][1] - spans[place][0]):
            place += 1
        if place == len(spans):
            break
        if bar.start >= spans[place][0] - _EDGE * (spans[place][1] - spans[place][0]):
            found[place].append(bar)
    return found


Picture = list[tuple[tuple[int, str, int, int, int], float, float]]


def _build_period_picture(anchor: Instruction, bars: Sequence[Drawn]) -> Picture:
    """Return one period of a timeline in a form in which periods are compared: sorted tuples (key, start in seconds,
    duration in seconds), one for each of ``bars``, the instructions of the period.

    A key has the stage, the kind of instruction, and the indices of the microbatch, the layer and the gradient bucket.
    The bucket is relative to the lowest bucket of the period. ``anchor``: the instruction at which the period begins;
    microbatch and layer are relative to it.
    """
    microbatch, (call, _) = anchor.microbatch or 0, anchor.calls or (0, 0)
    bucket = min((b.instruction.bucket for b in bars if b.instruction.bucket is not None), default=0)
    found = []
    for bar in bars:
        i = bar.instruction
        key = (
            bar.stage,
            i.word,
            0 if i.microbatch is None else i.microbatch - microbatch,
            i.calls[0] - call if i.calls else 0,
            0 if i.bucket is None else i.bucket - bucket,
        )
        found.append((key, bar.start, bar.end - bar.start))
    return sorted(found)


def _is_equal_period(one: Picture, other: Picture, first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Return whether two periods contain the same instructions at nearly the same times after their start. ``one``,
    ``other``: each period as sorted tuples (key of the instruction, start in seconds from the start of the period,
    duration in seconds). ``first``, ``second``: the (start, end) of the periods in seconds.
    """
    if len(one) != len(other):
        return False
    near = _TOLERANCE * (first[1] - first[0])
    if not math.isclose(second[1] - second[0], first[1] - first[0], abs_tol=near):
        return False
    return all(
        a[0] == b[0] and abs((a[1] - first[0]) - (b[1] - second[0])) <= near and abs(a[2] - b[2]) <= near
        for a, b in zip(one, other, strict=True)
    )
