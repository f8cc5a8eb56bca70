"""Time of a schedule: every action runs in its rank's order, as soon as its inputs are ready.

That is the longest path through the actions, each of which waits for the one before it on its rank and for one of
another, and for what that sends. Who waits for whom is found once for a timetable; then one pass over the actions says
when each ends. Where steps overlap, a rank begins the next one when it has ended its own part of this one: a step takes
what lies between two ends on one rank, which is the longest cycle of such paths, from a rank's first action on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.actions import Timetable

PARTS = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}  # of a phase's seconds
KINDS = tuple(PARTS)
_PHASES = "forward", "inputs", "weights", "values_sent", "gradients_sent"
_MOST_STEPS, _SAME_PACE = 8, 1e-9  # that are followed until all ranks take as long for one, to such a share
_AT_ONCE = 1 << 18  # actions of which it is known at a time when they end


@dataclass(frozen=True)
class Phases:
    """Seconds of a microbatch in a virtual stage: forward, backward for inputs, backward for weights.

    ``values_sent``, ``gradients_sent``: until what the forward and the backward read is there, once the rank that sends
    it has computed it. The stage's rank may compute meanwhile.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    values_sent: float = 0.0
    gradients_sent: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


def follow(table: Timetable, phases: Sequence[Phases], train: bool = True, *, overlap_steps: bool = False) -> float:
    """Seconds until all ranks have ended their orders; ``overlap_steps``: between two ends, of many steps."""
    waits, seconds, sent = waits_of(table, train), seconds_of(phases, train), sent_of(phases)
    if overlap_steps:
        return max(_steady(waits, seconds, sent))
    done = _ends(waits, seconds, sent)
    return max(done[place] for place in waits.last)


def follow_all(
    table: Timetable, phases: NDArray[np.float64], train: bool = True, *, overlap_steps: bool = False
) -> NDArray[np.float64]:
    """:func:`follow` of many at once, ``[n]`` seconds; ``phases``: ``[n, stages, 5]``, as :class:`Phases` has them, or
    the first three."""
    waits = waits_of(table, train)
    kinds = [phases[:, :, list(parts)].sum(axis=2) * (train or k == "F") for k, parts in PARTS.items()]
    of_kinds = np.stack(kinds, axis=2).reshape(len(phases), -1).T.copy()  # as the list of :func:`seconds_of`
    sent = phases[:, :, len(_PHASES) - 2 :].reshape(len(phases), -1).T
    sent = np.concatenate([sent, np.zeros((1, len(phases)))]) if sent.any() else sent[:0]
    most = max(1, _AT_ONCE // len(waits.before))
    taken = np.empty(len(phases))
    for first in range(0, len(phases), most):
        some = of_kinds[:, first : first + most]
        begun = np.zeros((len(waits.last), some.shape[1]))
        for _ in range(_MOST_STEPS if overlap_steps else 1):
            ended = _ends_of_all(waits, some, sent[:, first : first + most], begun)[waits.last]
            paces, begun = ended - begun, ended
            if np.ptp(paces, axis=0).max() <= _SAME_PACE * paces.max():
                break
        taken[first : first + most] = paces.max(axis=0)
    return taken


def longest_path(
    table: Timetable, phases: Sequence[Phases], train: bool = True, *, overlap_steps: bool = False
) -> tuple[float, NDArray[np.float64]]:
    """The seconds, and the actions that no time lies between: how often each of a virtual stage's :class:`Phases` is
    among them, shape ``[stages, 5]``. ``overlap_steps``: those of one rank's first
    action to its own last one, which may take less than the seconds."""
    waits, of_kinds, sent = waits_of(table, train), seconds_of(phases, train), sent_of(phases)
    if overlap_steps:
        paces = _steady(waits, of_kinds, sent)
        seconds, rank = max(paces), paces.index(max(paces))
        done = _ends(waits, of_kinds, sent, [0.0 if r == rank else -math.inf for r in range(len(paces))])
        place = waits.last[rank]
    else:
        done = _ends(waits, of_kinds, sent)
        place = max(waits.last, key=done.__getitem__)
        seconds = done[place]
    often, messages = [0] * len(of_kinds), [0] * len(sent)
    while place >= len(waits.last):
        often[waits.what[place]] += 1
        before, needed = waits.before[place], waits.needed[place]
        message = waits.message[place]
        place = before
        if done[needed] + sent[message] > done[before]:
            place = needed
            messages[message] += 1
    counts = np.zeros((len(phases), len(_PHASES)))
    counts[:, -2:] = np.reshape(messages[:-1], (-1, 2))
    for of_kind, (kind, parts) in zip(np.reshape(often, (-1, len(KINDS))).T, PARTS.items(), strict=True):
        for part in parts if train or kind == "F" else ():
            counts[:, part] += of_kind
    return seconds, counts


class Waits(NamedTuple):
    """The actions of all ranks, each behind those that it waits for; the first stand for the ranks' starts of the step.

    ``before``: the one before it on its rank; ``needed``: the one of another rank; ``what``: four for each virtual
    stage, and the kind; ``message``: two for each virtual stage, forward and backward, and one for nothing, which is
    what comes from the other action; ``last``: of each rank; ``rank``: that of each action.
    """

    before: list[int]
    needed: list[int]
    what: list[int]
    message: list[int]
    last: list[int]
    rank: list[int]


class _Same:
    """A timetable that is compared by identity, since comparing its content takes long."""

    def __init__(self, table: Timetable) -> None:
        self.table = table

    def __hash__(self) -> int:
        return id(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.table is other.table


def waits_of(table: Timetable, train: bool = True) -> Waits:
    """Who waits for whom, in an order in which each action is behind those that it waits for."""
    return _waits(_Same(table), train)


@lru_cache(maxsize=32)
def _waits(same: _Same, train: bool) -> Waits:
    table, last = same.table, len(same.table.ranks) - 1
    starts = range(len(table.orders))
    nothing = 2 * len(table.ranks)
    found = Waits([*starts], [*starts], [0 for _ in starts], [nothing for _ in starts], [*starts], [*starts])
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
                found.needed.append(place[needed] if needed is not None else rank)
                found.rank.append(rank)
                found.what.append(k * len(KINDS) + KINDS.index(kind))
                found.message.append(2 * k + (kind != "F") if needed is not None else nothing)
                found.last[rank] = len(found.before) - 1
                if kind != "W":
                    place["F" if kind == "F" else "B", i, k] = found.last[rank]
                at[rank] += 1
                moved = True
    return found


def seconds_of(phases: Sequence[Phases], train: bool) -> list[float]:
    """Of each kind of action in each virtual stage."""
    seconds: list[float] = []
    for phase in phases:
        of_parts = phase.forward, phase.inputs, phase.weights
        seconds += [sum(of_parts[p] for p in parts) * (train or k == "F") for k, parts in PARTS.items()]
    return seconds


def sent_of(phases: Sequence[Phases]) -> list[float]:
    """Of what each virtual stage receives, forward and backward, and at last of nothing."""
    return [*(seconds for phase in phases for seconds in (phase.values_sent, phase.gradients_sent)), 0.0]


def _ends(
    waits: Waits, seconds: Sequence[float], sent: Sequence[float], begun: Sequence[float] | None = None
) -> list[float]:
    """When each action ends, where ranks have ``begun`` then; ``None``: all at 0."""
    first = len(waits.last)
    done = [0.0] * first if begun is None else [*begun]
    every = zip(waits.before[first:], waits.needed[first:], waits.what[first:], waits.message[first:], strict=True)
    for before, needed, what, message in every:
        now, there = done[before], done[needed] + sent[message]
        done.append((now if now >= there else there) + seconds[what])
    return done


def _ends_of_all(
    waits: Waits, seconds: NDArray[np.float64], sent: NDArray[np.float64], begun: NDArray[np.float64]
) -> NDArray[np.float64]:
    """:func:`_ends` of many at once, shape ``[actions, n]``; ``seconds`` by kind and ``begun`` by rank are alike, and
    ``sent`` by message, empty where nothing takes time."""
    first = len(waits.last)
    done = np.empty((len(waits.before), seconds.shape[1]))
    done[:first] = begun
    every = zip(waits.before[first:], waits.needed[first:], waits.what[first:], waits.message[first:], strict=True)
    for place, (before, needed, what, message) in enumerate(every, first):
        there = done[needed] + sent[message] if len(sent) else done[needed]
        np.maximum(done[before], there, out=done[place])
        done[place] += seconds[what]
    return done


def _steady(waits: Waits, seconds: Sequence[float], sent: Sequence[float]) -> list[float]:
    """What a step takes on each rank after some steps: the most of these is no less than it is in the end."""
    begun = [0.0] * len(waits.last)
    for _ in range(_MOST_STEPS):
        done = _ends(waits, seconds, sent, begun)
        ended = [done[place] for place in waits.last]
        paces = [end - start for end, start in zip(ended, begun, strict=True)]
        if max(paces) - min(paces) <= _SAME_PACE * max(paces):
            break
        begun = ended
    return paces
