"""Step time of a pipeline schedule, and the number of microbatches that a stage has in flight.

For GPipe (Huang et al. 2019) and 1F1B (Narayanan et al. 2021, section 2.2) with one stage per rank, the number in
flight is a closed formula. With a single stage, or without backwards, the step time is a closed formula, too: ``m``
microbatches take ``(m - 1) max t_s + sum t_s``, where ``t_s`` is the time of a microbatch on stage ``s``. All other
steps are simulated action by action: if stages take different times, the formula is only an upper bound on a step with
backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from partitioner.schedules.actions import Timetable, count_halves_in_flight
from partitioner.schedules.csv_table import ScheduleTable, table_of
from partitioner.schedules.makespan import Phases, compute_makespan
from partitioner.schedules.registry import build_timetable

_FORMULAS = frozenset({"gpipe", "1f1b"})

Counts = tuple[int, int]  # microbatches: (backward not begun, backward for inputs done)


def _zero_bubble(s: int, p: int, m: int, ahead: int) -> tuple[Counts, ...]:
    """Return the numbers of microbatches that a stage has in flight under a zero-bubble schedule at the two times that
    can need the most memory. Each entry is a pair: the number of microbatches whose backward has not begun, and the
    number whose backward has run for inputs but not for weights. The first pair is for the time when its first number
    is largest, the second for the time when its second number is largest. Equal pairs are returned once.

    ``s``: index of the stage, from 0. ``p``, ``m``: numbers of stages and of microbatches. ``ahead``: 1 or 2; a stage
    runs ``ahead * (p - 1 - s) + 1`` forwards before its first backward.
    """
    most, whole = min(ahead * (p - 1) + 1, m), min(ahead * (p - 1 - s) + 1, m)
    half = min(ahead * s + 1, m) if s else 0
    return tuple({(whole, most - whole): None, (most - half, half): None})


# Extreme counts of microbatches in flight on stage ``s`` of ``p``, of ``m`` in all; one stage on each rank.
_IN_FLIGHT: dict[str | ScheduleTable, Callable[[int, int, int], tuple[Counts, ...]]] = {
    "gpipe": lambda s, p, m: ((m, 0),),
    "1f1b": lambda s, p, m: ((min(p - s, m), 0),),
    "zb-1p": partial(_zero_bubble, ahead=1),
    "zb-2p": partial(_zero_bubble, ahead=2),
}
_UNSPLIT = frozenset(("gpipe", "1f1b", "interleaved"))
# Least fill as shares of (forward, backward), to be divided by the number of virtual stages: the value of a game for
# the least longest path of a step over all cuts, rounded down from the values of two to six ranks. Interleaved: valid
# for at most as many microbatches as ranks, and for two and more whole rounds.
_LEAST_FILL = {
    "interleaved": (0.5, 0.5),
    "zb-1p": (0.7, 0.0),
    "zb-2p": (0.45, 0.0),
    "zb-v": (0.4, 0.0),
    "dualpipe-v": (0.3, 0.0),
}
_LEAST_FILL_FEW = (0.66, 0.66)  # 1F1B with at most as many microbatches as ranks: found in the same way, with 2 ranks
_FEW = 0.7  # factor for ZB-1P with several virtual stages on a rank and less than two microbatches per rank
_FEW_ROUNDS = 3  # rounds of one microbatch for each rank, in which all numbers of microbatches in flight occur
_MOST_COMPARED = 1_000_000  # pairs of numbers that are compared at once
_MOST_ACTIONS = 30_000  # actions to simulate; longer steps are extrapolated from the steady state


def is_formula(schedule: str | ScheduleTable, p: int, train: bool = True) -> bool:
    """Return whether the step time of ``schedule`` (a name or a table) has a closed formula if each rank has one stage,
    so that it need not be simulated. ``p``: number of pipeline ranks. ``train``: whether there are backwards."""
    return isinstance(schedule, str) and schedule in _FORMULAS and (p == 1 or not train)


def is_plain(schedule: str | ScheduleTable, v: int) -> bool:
    """Return whether the number of microbatches in flight on a rank has a closed formula, so that forwards and
    backwards need not be simulated. This requires one stage on each rank. ``schedule``: name or table of the pipeline
    schedule. ``v``: number of virtual stages of each rank."""
    return schedule in _IN_FLIGHT and v == 1


def least_fill(
    schedule: str | ScheduleTable, p: int, m: int, v: int, overlap_steps: bool = False
) -> tuple[float, float]:
    """Return lower bounds on the time to fill and drain the pipeline, as two fractions: of the forward seconds and of
    the backward seconds of a microbatch through the whole model.

    For every cut of the model, a step on ``p`` equal devices takes at least ``m total / p + (1 - 1 / p) (fraction *
    forward + fraction * backward)`` seconds, with the first and the second fraction. Here ``forward`` and ``backward``
    are the seconds of one microbatch through the whole model, and ``total`` is their sum. ``schedule``: name or table.
    ``p``, ``m``, ``v``: numbers of ranks, microbatches, and virtual stages of each rank. ``overlap_steps``: whether a
    rank begins the next step as soon as its own part of this step has ended. If so, both fractions are 0 for schedules
    with split backwards.
    """
    if overlap_steps and is_split(schedule):
        return 0.0, 0.0
    if schedule == "gpipe" or (schedule == "1f1b" and not 1 < m <= p):
        return 1.0, 1.0
    if schedule == "1f1b":
        return _LEAST_FILL_FEW
    if schedule == "zb-1p" and v == 1:
        return (0.75 if m == p else 1.0), 0.0
    ahead, back = _LEAST_FILL.get(schedule, (0.0, 0.0)) if isinstance(schedule, str) else (0.0, 0.0)
    if schedule == "interleaved" and m > p and (m < 2 * p or m % p):
        return 0.0, 0.0
    some = _FEW if schedule == "zb-1p" and m < 2 * p else 1.0
    return some * ahead / v, some * back / v


def least_alone(schedule: str | ScheduleTable) -> float:
    """Return a lower bound on the fraction of a microbatch's backward through one stage that must have run before the
    preceding stage can begin its own backward of the microbatch. It is 1.0 if ``schedule`` (a name or a table) never
    splits backwards. Otherwise it is 0.5, because the half for weight gradients may run later."""
    return 0.5 if is_split(schedule) else 1.0


def is_split(schedule: str | ScheduleTable) -> bool:
    """Return whether ``schedule`` (a name or a table) may split a backward into one half for input gradients and one
    for weight gradients, which run at different times."""
    return schedule not in _UNSPLIT


def stage_in_flight(schedule: str | ScheduleTable, stage: int, p: int, m: int) -> tuple[Counts, ...]:
    """Return the largest numbers of microbatches that a pipeline stage has in flight, as one or two pairs: the number
    of microbatches whose backward has not begun, and the number whose backward has run for inputs but not for weights.
    The first pair is for the time when its first number is largest, the second for the time when its second number is
    largest. ``schedule``: ``gpipe``, ``1f1b``, ``zb-1p`` or ``zb-2p``, with one stage per rank. ``stage``: index of the
    stage, from 0. ``p``, ``m``: numbers of stages and of microbatches."""
    assert schedule in _IN_FLIGHT, schedule
    return _IN_FLIGHT[schedule](stage, p, m)


def most_in_flight(schedule: str | ScheduleTable, p: int, m: int) -> int:
    """Return the largest number of microbatches that any of ``p`` pipeline stages has in flight (forward run, backward
    not complete) in a step of ``m`` microbatches. ``schedule``: ``gpipe``, ``1f1b``, ``zb-1p`` or ``zb-2p``, with one
    stage per rank."""
    return max(map(sum, stage_in_flight(schedule, 0, p, m)))


@dataclass(frozen=True)
class InFlightMicrobatches:
    """Numbers of microbatches in flight under a pipeline schedule, which determine the memory of activations. Each is a
    pair: (microbatches whose backward has not begun, microbatches whose backward has run for inputs but not for
    weights).

    ``pairs[k]``: the pairs of virtual stage ``k`` at which its memory may peak. Which of these pairs is the peak
    depends on the bytes of the two kinds of microbatches. ``together[s]``: the combinations that rank ``s`` reaches at
    one time, each with one pair per virtual stage of the rank. A combination is left out if another one equals or
    exceeds it in every number.
    """

    pairs: tuple[tuple[Counts, ...], ...]
    together: tuple[tuple[tuple[Counts, ...], ...], ...]


@lru_cache(maxsize=64)
def held_microbatches(schedule: str | ScheduleTable, p: int, m: int, v: int | None) -> InFlightMicrobatches:
    """Return the numbers of microbatches in flight on each rank and virtual stage, found from the order in which each
    rank runs forwards and backwards. To save time, a step of many microbatches is replaced by one of fewer with the
    same steady state, which has the same result.

    ``schedule``: name or table of the pipeline schedule. ``p``, ``m``, ``v``: numbers of ranks, microbatches, and
    virtual stages of each rank (``None``: the default of the schedule).
    """
    if isinstance(schedule, str) and is_plain(schedule, v or 1):
        alone = tuple(stage_in_flight(schedule, stage, p, m) for stage in range(p))
        return InFlightMicrobatches(alone, tuple(tuple((pair,) for pair in pairs) for pairs in alone))
    if (fewer := shorten_to_steady_state(schedule, p, m)) < m:
        return held_microbatches(schedule, p, fewer, v)
    table = shorten_timetable(schedule, p, m, v)[0]
    pairs: list[tuple[Counts, ...]] = [()] * len(table.ranks)
    together = []
    for order, stages in zip(table.orders, table.held, strict=True):
        found = np.unique(_select_local_peaks(count_halves_in_flight(order, len(stages))), axis=0)
        for c, k in enumerate(stages):
            pairs[k] = _compute_upper_hull({(whole, half) for whole, half in found[:, c].tolist()})
        together.append(_not_less(found))
    return InFlightMicrobatches(tuple(pairs), tuple(together))


def _select_local_peaks(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the elements of ``counts`` that are local peaks: neither the previous nor the next element equals or
    exceeds them in every number. ``counts``: the microbatches in flight on a rank after each of its actions, as
    consecutive elements that differ, shape ``[actions, virtual stages, 2]``."""
    change = np.diff(counts.reshape(len(counts), -1), axis=0)
    is_peak = np.ones(len(counts), dtype=bool)
    is_peak[:-1] = (change < 0).any(axis=1)
    is_peak[1:] &= (change > 0).any(axis=1)
    return counts[is_peak]


def shorten_to_steady_state(schedule: str | ScheduleTable, p: int, m: int) -> int:
    """Return a number of microbatches, at most ``m``, for which a step has the same numbers of microbatches in flight
    on each of ``p`` pipeline ranks as a step of ``m`` microbatches. ``schedule``: name or table. Tables are never
    shortened, nor is GPipe, where all microbatches are in flight. All other orders reach their steady state within two
    rounds of ``p`` microbatches."""
    is_long = table_of(schedule) is None and schedule != "gpipe" and m % p == 0 and m > _FEW_ROUNDS * p
    return _FEW_ROUNDS * p if is_long else m


def _not_less(counts: NDArray[np.int64]) -> tuple[tuple[Counts, ...], ...]:
    """Return the elements of ``counts`` that no other element equals or exceeds in every number, because memory may
    peak at these. An element has, for each virtual stage of a rank, the pair of its microbatches in flight. ``counts``:
    the elements, without duplicates, shape ``[elements, virtual stages, 2]``."""
    rows = counts.reshape(len(counts), -1)
    if len(rows) * rows.size <= _MOST_COMPARED:
        exceeds = np.ones((len(rows), len(rows)), dtype=bool)  # [i, j]: j equals or exceeds i, as each does itself
        for column in rows.T:
            exceeds &= column[:, None] <= column[None, :]
        left = counts[exceeds.sum(axis=1) == 1].tolist()
        return tuple(tuple((whole, half) for whole, half in one) for one in left)
    is_left, greatest = np.ones(len(rows), dtype=bool), list[int]()
    for one in np.argsort(-rows.sum(axis=1), kind="stable").tolist():  # none exceeds another one with a larger sum
        if is_left[one]:
            greatest.append(one)
            is_left &= (rows > rows[one]).any(axis=1)
    return tuple(tuple((whole, half) for whole, half in counts[one].tolist()) for one in sorted(greatest))


def _compute_upper_hull(counts: set[Counts]) -> tuple[Counts, ...]:
    """Return the pairs of ``counts`` that maximise ``a * first + b * second`` for some non-negative ``a`` and ``b``,
    from the largest to the smallest first number. These are the numbers of microbatches that can need the most memory,
    where ``a`` and ``b`` are the bytes of the two kinds of microbatches."""
    hull: list[Counts] = []
    for x, y in sorted(counts, key=lambda pair: (-pair[0], -pair[1])):
        if hull and y <= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_below_line(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return tuple(hull)


def _is_below_line(a: Counts, b: Counts, c: Counts) -> bool:
    """Return whether point ``b`` lies on or below the line from ``a`` to ``c``. A point is (x, y); ``a`` has the
    largest x and ``c`` the smallest."""
    return (a[0] - b[0]) * (c[1] - b[1]) >= (b[0] - c[0]) * (b[1] - a[1])


def pipeline_seconds(
    schedule: str | ScheduleTable,
    p: int,
    m: int,
    v: int | None,
    phases: Sequence[Phases],
    train: bool = True,
    *,
    overlap_steps: bool = False,
) -> float:
    """Return the seconds that the pipeline takes for one step if each rank executes its actions in order, each as soon
    as its inputs are available.

    ``schedule``: name or table of the pipeline schedule. ``p``, ``m``, ``v``: numbers of ranks, microbatches, and
    virtual stages of each rank (``None``: the default of the schedule). ``phases``: for each virtual stage, the seconds
    of one microbatch's forward and backward and of the messages that it receives. ``train``: whether there are
    backwards. ``overlap_steps``: whether a rank begins the next step as soon as it has finished its own part of this
    step.
    """
    whole, more = shorten_timetable(schedule, p, m, v)
    taken = compute_makespan(whole, phases, train, overlap_steps=overlap_steps)
    if more is not None:
        longer, microbatches, left = more
        taken += (compute_makespan(longer, phases, train, overlap_steps=overlap_steps) - taken) * left / microbatches
    return taken


def shorten_timetable(
    schedule: str | ScheduleTable, p: int, m: int, v: int | None, most: int = _MOST_ACTIONS
) -> tuple[Timetable, tuple[Timetable, int, int] | None]:
    """Return the pipeline timetable of ``schedule`` for ``m`` microbatches, and ``None``. If this timetable would have
    more than about ``most`` actions (forwards and backwards of one microbatch), return instead two shorter timetables,
    from which a caller can extrapolate to ``m`` microbatches.

    In this case, the first result is the shorter of the two timetables. The second result is a tuple (longer timetable,
    extra, rest): the longer timetable has ``extra`` microbatches more than the shorter one, and the full step has
    ``rest`` more than the shorter one. The two timetables differ only in the length of their steady state.
    ``schedule``: name or table; a table is never shortened. ``p``, ``v``: numbers of ranks, and of virtual stages of
    each rank (``None``: the default of the schedule).
    """
    per_microbatch = 3 * p * (v or 2)
    fewer = max(4 * p, most // per_microbatch // 2 // p * p) + m % p
    if table_of(schedule) is not None or m <= fewer + p:
        return build_timetable(schedule, p, m, v), None
    return build_timetable(schedule, p, fewer, v), (build_timetable(schedule, p, fewer + p, v), p, m - fewer)
