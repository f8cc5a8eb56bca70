"""What a schedule takes: every action in its rank's order, as soon as what it reads is there.

That is the longest path through the actions, each of which waits for the one before it on its rank and for one of
another. Who waits for whom is found once for a timetable; then one pass over the actions says when each ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.actions import Timetable

PARTS = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}  # of a phase's seconds
_KINDS = tuple(PARTS)


@dataclass(frozen=True)
class Phases:
    """Seconds of a microbatch in a virtual stage: forward, backward for inputs, backward for weights."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


def follow(table: Timetable, phases: Sequence[Phases], train: bool = True) -> float:
    """Seconds until all ranks have ended their orders."""
    waits = _waits(_Same(table), train)
    done = _ends(waits, phases, train)
    return max(done[place] for place in waits.last)


def longest_path(table: Timetable, phases: Sequence[Phases], train: bool = True) -> tuple[float, NDArray[np.float64]]:
    """The seconds, and the actions that no time lies between: how often each virtual stage's forward, backward for
    inputs and backward for weights is among them, shape ``[stages, 3]``."""
    waits = _waits(_Same(table), train)
    done = _ends(waits, phases, train)
    place = max(waits.last, key=done.__getitem__)
    seconds, often = done[place], [0] * (len(phases) * len(_KINDS))
    while place != _START:
        often[waits.what[place]] += 1
        before, needed = waits.before[place], waits.needed[place]
        place = needed if done[needed] > done[before] else before
    counts = np.zeros((len(phases), 3))
    for of_kind, (kind, parts) in zip(np.reshape(often, (-1, len(_KINDS))).T, PARTS.items(), strict=True):
        for part in parts if train or kind == "F" else ():
            counts[:, part] += of_kind
    return seconds, counts


class _Waits(NamedTuple):
    """The actions of all ranks, each behind those that it waits for; the first stands for the start of the step.

    ``before``: the one before it on its rank; ``needed``: the one of another rank; ``what``: four for each virtual
    stage, and the kind; ``last``: of each rank.
    """

    before: list[int]
    needed: list[int]
    what: list[int]
    last: list[int]


_START = 0


class _Same:
    """A timetable that is known by what it is, not by what it says, which takes long to compare."""

    def __init__(self, table: Timetable) -> None:
        self.table = table

    def __hash__(self) -> int:
        return id(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.table is other.table


@lru_cache(maxsize=32)
def _waits(same: _Same, train: bool) -> _Waits:
    table, last = same.table, len(same.table.ranks) - 1
    found = _Waits([_START], [_START], [0], [_START] * len(table.orders))
    place: dict[tuple[str, int, int], int] = {}  # where a microbatch leaves a virtual stage
    at = [0] * len(table.orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(table.orders):
            for action in order[at[rank] :]:
                kind, k, i = action.kind, table.held[rank][action.chunk], action.microbatch
                needed = ("F", i, k - 1) if kind == "F" and k else None
                if train and kind in "BI" and k < last:
                    needed = "B", i, k + 1
                if needed is not None and needed not in place:
                    break
                found.before.append(found.last[rank])
                found.needed.append(place[needed] if needed is not None else _START)
                found.what.append(k * len(_KINDS) + _KINDS.index(kind))
                found.last[rank] = len(found.before) - 1
                if kind != "W":
                    place["F" if kind == "F" else "B", i, k] = found.last[rank]
                at[rank] += 1
                moved = True
    return found


def _ends(waits: _Waits, phases: Sequence[Phases], train: bool) -> list[float]:
    """When each action ends."""
    seconds: list[float] = []
    for phase in phases:
        of_parts = phase.forward, phase.inputs, phase.weights
        seconds += [sum(of_parts[p] for p in parts) * (train or k == "F") for k, parts in PARTS.items()]
    done = [0.0]
    for before, needed, what in zip(waits.before[1:], waits.needed[1:], waits.what[1:], strict=True):
        now, there = done[before], done[needed]
        done.append((now if now >= there else there) + seconds[what])
    return done
