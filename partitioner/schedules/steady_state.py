"""Compression of long schedules: the part of a list of actions or instructions that repeats is found and stored once.

Between its start and its end a schedule repeats the same actions for successive microbatches. The list for any number
of microbatches can be extrapolated from two lists of one schedule, of which the second has ``unit`` microbatches more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from partitioner.runtime.program.instructions import Instruction, Part
from partitioner.schedules.actions import Action, Order
from partitioner.schedules.csv_table import ScheduleTable, table_of
from partitioner.schedules.registry import schedule_orders

Item = tuple[Hashable, int | None]  # what is done, and on which microbatch

Ints = NDArray[np.int64]

_NONE = -(1 << 40)  # microbatch number of items without one

_LEAST_STEPS = 4  # lists with fewer steps are written out
_FETCHING = frozenset({"LOAD", "RECV_F", "RECV_B"})
_OPENING = _FETCHING | {"F", "B", "I", "W", "TOTAL_F", "TOTAL", "REDUCE", "SYNC", "UPDATE", "STEP"}


@dataclass(frozen=True)
class Growth:
    """A repeated section of a rank's list of actions (forwards and backwards of one microbatch) or instructions, with
    the number of its repetitions in longer lists of the same pipeline schedule. Long lists are stored as a short list
    and its sections. Each longer list has a fixed number of microbatches more than the list before.

    The section has ``length`` items from index ``start`` of the shortest list. In the shortest list it is executed
    ``times`` times, with microbatch indices raised by ``shift`` at each repetition. In each longer list it is executed
    ``more`` times more than in the list before, and all microbatch indices of the section are higher by ``moved``.
    """

    start: int
    length: int
    times: int = 1
    shift: int = 0
    more: int = 0
    moved: int = 0


@dataclass(frozen=True)
class SteadyState:
    """Numbers of microbatches from which the lists of actions (forwards and backwards) of a long schedule can be
    extrapolated. The lists for ``least`` and for ``least + unit`` microbatches determine the full list, which has
    ``least + steps * unit`` microbatches. For example, ``least`` 6, ``unit`` 1 and ``steps`` 94 stand for 100
    microbatches."""

    least: int
    unit: int
    steps: int


def find_growth(shorter: Sequence[Item], longer: Sequence[Item], unit: int) -> list[Growth] | None:
    """Find how the list of actions (forwards and backwards of one microbatch) ``shorter`` grows to ``longer``, which
    has ``unit`` more microbatches, by repeating some of its sections more often. Return the sections of ``shorter`` in
    order, each with its numbers of repetitions, or ``None`` if ``longer`` does not arise from ``shorter`` in this way.
    An item of a list is a pair (key of the action without its microbatch, index of the microbatch or ``None``)."""
    few, many = _find_repeated_parts(shorter, unit), _find_repeated_parts(longer, unit)
    if len(few) != len(many):
        return None
    found: list[Growth] = []
    for a, b in zip(few, many, strict=True):
        first, later = _get_growth_body(shorter, a), _get_growth_body(longer, b)
        moved = _find_first_microbatch(later) - _find_first_microbatch(first)
        same = (a.length, a.shift) == (b.length, b.shift) and _shift_microbatches(first, moved) == later
        grown = replace(a, more=b.times - a.times, moved=moved)
        if not same or grown.more < 0 or moved < 0:
            return None
        last = found[-1] if found else None
        if last and (last.times, last.more) == (1, 0) == (grown.times, grown.more) and last.moved == moved:
            found[-1] = replace(last, length=last.length + grown.length)
        else:
            found.append(grown)
    return found


def grow_items(items: Sequence[Item], parts: Sequence[Growth], steps: int) -> Iterator[Item]:
    """Yield the items of a longer list of actions (forwards and backwards of one microbatch). It has ``steps * unit``
    more microbatches than the list ``items``, where ``unit`` is a fixed number. An item is a pair (key of the action
    without its microbatch, index of the microbatch or ``None``). ``parts``: the sections of ``items``, with the number
    of repetitions that ``unit`` more microbatches add to each."""
    for part in parts:
        body = items[part.start : part.start + part.length]
        for again in range(part.times + part.more * steps):
            yield from _shift_microbatches(body, part.moved * steps + part.shift * again)


# schedule -> twice as many microbatches as ranks: orders for fewer are cut from one for more, and do not repeat
_LEAST_WHOLE = {"zb-v": 2, "dualpipe-v": 2}


def find_steady_state(
    schedule: str | ScheduleTable, num_stages: int, num_microbatches: int, chunks: int | None = None
) -> SteadyState | None:
    """Return small numbers of microbatches from which each rank's order of actions (forwards and backwards of one
    microbatch) for ``num_microbatches`` can be extrapolated exactly. Return ``None`` if none of the tried numbers is
    sufficient, the step is short, or the schedule is a user-defined table. ``schedule``: name or table. ``num_stages``:
    number of pipeline ranks. ``chunks``: number of virtual stages per rank; ``None``: the default of the schedule."""
    if table_of(schedule) is not None:
        return None  # a table is for one number of microbatches

    def orders(p: int, m: int) -> tuple[Order, ...]:
        """Return each rank's order of actions (forwards and backwards of one microbatch) for ``p`` pipeline ranks and
        ``m`` microbatches, under the schedule of the enclosing function."""
        return schedule_orders(schedule, p, m, chunks)

    wanted = None
    for least in (num_stages + 2, 2 * num_stages + 2, 4 * num_stages + 2):
        for unit in sorted({1, num_stages}):
            steps, rest = divmod(num_microbatches - least, unit)
            if steps < _LEAST_STEPS or (rest and unit == 1):
                continue
            start = least + rest
            if start < _LEAST_WHOLE.get(str(schedule), 0) * num_stages - 1:
                continue
            few, many = orders(num_stages, start), orders(num_stages, start + unit)
            parts = list[list[Growth]]()
            for a, b in zip(few, many, strict=True):
                if (grown := find_growth(_actions_to_items(a), _actions_to_items(b), unit)) is None:
                    break
                parts.append(grown)
            if len(parts) < num_stages:
                continue
            wanted = wanted or [_actions_to_items(order) for order in orders(num_stages, num_microbatches)]
            said = [list(grow_items(_actions_to_items(a), p, steps)) for a, p in zip(few, parts, strict=True)]
            if said == wanted:
                return SteadyState(start, unit, steps)
    return None


def parts_of(shorter: Sequence[Instruction], longer: Sequence[Instruction], unit: int) -> tuple[Part, ...] | None:
    """Return how the instruction list ``shorter`` of a rank grows to the list ``longer``, which has ``unit`` more
    microbatches: the sections of ``shorter`` in order, each with its number of repetitions in both lists. Return
    ``None`` if ``longer`` does not arise from ``shorter`` by repeating sections."""
    pieces = _split_instructions(shorter)
    found = find_growth(
        [_piece_to_item(p) for p in pieces], [_piece_to_item(p) for p in _split_instructions(longer)], unit
    )
    if found is None:
        return None
    return tuple(
        Part(
            body=tuple(i for piece in pieces[p.start : p.start + p.length] for i in piece),
            **{name: getattr(p, name) for name in ("times", "shift", "more", "moved")},
        )
        for p in found
    )


def _actions_to_items(order: Sequence[Action]) -> list[Item]:
    """Return ``order``, the actions (forwards and backwards of one microbatch) of a rank in order, as a list of items
    of the form ((kind, index of the virtual stage on the rank), microbatch).
    """
    return [((a.kind, a.chunk), a.microbatch) for a in order]


def _split_instructions(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return ``instructions``, the instruction list of a rank, divided into consecutive groups. The caller looks for
    groups that repeat, which is faster than to look for single instructions that repeat. Each group starts with a
    computation, or with the loads and receives that precede it.
    """
    pieces: list[list[Instruction]] = []
    before = ""
    for instruction in instructions:
        if not pieces or (instruction.op in _OPENING and before not in _FETCHING):
            pieces.append([])
        pieces[-1].append(instruction)
        before = instruction.op
    return pieces


def _piece_to_item(piece: Sequence[Instruction]) -> Item:
    """Return ``piece``, a list of consecutive instructions, as a pair (key, microbatch). The microbatch is that of the
    first instruction that has one, or ``None``. Two pieces have the same key if they differ only by a shift of all
    microbatch indices."""
    first = next((i.microbatch for i in piece if i.microbatch is not None), None)
    key = tuple(
        (
            i.op,
            i.stage,
            i.calls,
            i.values,
            i.peer,
            i.axes,
            i.bucket,
            i.states,
            i.gradients,
            _compute_microbatch_offset(i, first),
        )
        for i in piece
    )
    return key, first


def _compute_microbatch_offset(instruction: Instruction, first: int | None) -> int | None:
    """Return the microbatch index of ``instruction`` minus ``first``, so that equal pieces of instruction lists for
    different microbatches compare as equal; ``None`` if the instruction has no microbatch or ``first`` is ``None``.
    ``first``: the microbatch index of the piece that contains the instruction."""
    return None if first is None or instruction.microbatch is None else instruction.microbatch - first


def _find_repeated_parts(items: Sequence[Item], unit: int) -> list[Growth]:
    """Divide a list of actions (forwards and backwards of one microbatch) into repeated sections and single items, and
    return these in order. At each index the section that reaches furthest is chosen. The repetitions of a section are
    equal except that microbatch indices rise by 1 or by ``unit`` each time. ``items``: pairs (key of the action without
    its microbatch, index of the microbatch or ``None``)."""
    numbers: dict[Hashable, int] = {}
    kinds = np.array([numbers.setdefault(key, len(numbers)) for key, _ in items], np.int64)
    times = np.array([_NONE if m is None else m for _, m in items], np.int64)
    size = len(items)
    best_end, best = np.zeros(size, np.int64), np.zeros((size, 2), np.int64)  # -> (period, shift)
    endless, shifts = times == _NONE, sorted({1, unit})
    some = bool(endless.any())
    # for each period, whether an item is equal to the one a period later, except for the microbatch
    every: list[tuple[int, NDArray[np.bool_]]] = []
    for period in range(1, size // 2 + 1):
        same = kinds[period:] == kinds[:-period]
        if np.count_nonzero(same) >= period:  # otherwise nothing repeats, which needs ``period`` of them in a row
            every.append((period, same))
    for shift in shifts:
        for period, same in every:
            alike = times[period:] - times[:-period] == shift
            if some:
                alike |= endless[period:] & endless[:-period]
            alike &= same
            if np.count_nonzero(alike) < period:
                continue
            length = _count_consecutive_true(alike)
            repeats = 1 + length // period
            end = np.where(repeats >= 2, repeats * period, 0)
            better = end > best_end[: len(end)]
            best_end[: len(end)][better] = end[better]
            best[: len(end)][better] = period, shift
    runs, place = [], 0
    while place < size:
        period, shift = (int(x) for x in best[place])
        if best_end[place] and (times[place : place + period] != _NONE).any():
            runs.append(Growth(place, period, int(best_end[place]) // period, shift))
            place += int(best_end[place])
        else:
            runs.append(Growth(place, 1))
            place += 1
    return runs


def _count_consecutive_true(alike: NDArray[np.bool_]) -> Ints:
    """Return, for each index of the boolean array ``alike``, the number of consecutive true values from there on, shape
    ``[len(alike)]``."""
    ends = np.where(alike, np.iinfo(np.int64).max, np.arange(len(alike)))
    return np.asarray(np.minimum(np.minimum.accumulate(ends[::-1])[::-1], len(alike)) - np.arange(len(alike)), np.int64)


def _get_growth_body(items: Sequence[Item], part: Growth) -> list[Item]:
    """Return the items of the first repetition of ``part``, a repeated section of the list ``items``. An item is a pair
    (key of an action without its microbatch, index of the microbatch or ``None``)."""
    return list(items[part.start : part.start + part.length])


def _find_first_microbatch(items: Sequence[Item]) -> int:
    """Return the microbatch index of the first of ``items`` that has one, or 0. An item is a pair (key of an action
    without its microbatch, index of the microbatch or ``None``)."""
    return next((m for _, m in items if m is not None), 0)


def _shift_microbatches(items: Sequence[Item], microbatches: int) -> list[Item]:
    """Return ``items`` with ``microbatches`` added to the microbatch index of each. An item is a pair (key of an action
    without its microbatch, index of the microbatch or ``None``); ``None`` stays."""
    return [(key, None if m is None else m + microbatches) for key, m in items]
