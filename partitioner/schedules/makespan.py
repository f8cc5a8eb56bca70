"""Time of a schedule: every action runs in its rank's order, as soon as its inputs are ready.

This is the longest path through the actions, each of which depends on the previous action of its rank and on one action
of another rank and its message. Dependencies are computed once for a timetable; then one pass over the actions gives
their ends. If steps overlap, a rank begins the next step when it has ended its own part of this one. A step then takes
the time between two ends on one rank, which is the longest cycle of such paths, from a rank's first action on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.schedules.actions import Timetable

PARTS = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}  # indices into a phase's seconds

KINDS = tuple(PARTS)
_PHASES = "forward", "inputs", "weights", "values_sent", "gradients_sent"
_MOST_STEPS, _SAME_PACE = 8, 1e-9  # steps until all ranks take equally long, and the tolerance
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


def compute_makespan(
    table: Timetable, phases: Sequence[Phases], train: bool = True, *, overlap_steps: bool = False
) -> float:
    """Seconds until all ranks have ended their orders. ``overlap_steps``: seconds between the ends of two steps in
    steady state."""
    waits, seconds, sent = waits_of(table, train), seconds_of(phases, train), sent_of(phases)
    if overlap_steps:
        return max(_compute_step_times(waits, seconds, sent))
    done = _compute_action_ends(waits, seconds, sent)
    return max(done[place] for place in waits.last)


def follow_all(
    table: Timetable, phases: NDArray[np.float64], train: bool = True, *, overlap_steps: bool = False
) -> NDArray[np.float64]:
    """:func:`compute_makespan` of ``n`` sets of phases: ``[n]`` seconds. ``phases``: ``[n, stages, 5]``, see
    :class:`Phases`."""
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
    """Seconds of the longest path, and how often each of a virtual stage's :class:`Phases` is on it, shape
    ``[stages, 5]``. ``overlap_steps``: the path from one rank's first action to its own last, which may take less than
    the seconds."""
    waits, of_kinds, sent = waits_of(table, train), seconds_of(phases, train), sent_of(phases)
    if overlap_steps:
        paces = _compute_step_times(waits, of_kinds, sent)
        seconds, rank = max(paces), paces.index(max(paces))
        done = _compute_action_ends(waits, of_kinds, sent, [0.0 if r == rank else -math.inf for r in range(len(paces))])
        place = waits.last[rank]
    else:
        done = _compute_action_ends(waits, of_kinds, sent)
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
    """Dependencies of the actions of all ranks, in topological order; the first entries stand for the ranks' starts of
    the step.

    ``before``: the previous action of the rank. ``needed``: the action of another rank. ``what``: four times the
    virtual stage, plus the kind. ``message``: what the needed action sends: twice the virtual stage, plus 1 for
    gradients; twice the number of stages if nothing. ``last``: the last action of each rank. ``rank``: of each action.
    """

    before: list[int]
    needed: list[int]
    what: list[int]
    message: list[int]
    last: list[int]
    rank: list[int]


class _TimetableByIdentity:
    """A timetable that is compared by identity, since comparing its content takes long."""

    def __init__(self, table: Timetable) -> None:
        self.table = table

    def __hash__(self) -> int:
        return id(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TimetableByIdentity) and self.table is other.table


def waits_of(table: Timetable, train: bool = True) -> Waits:
    """Who waits for whom, in an order in which each action is behind those that it waits for."""
    return _compute_waits(_TimetableByIdentity(table), train)


@lru_cache(maxsize=32)
def _compute_waits(same: _TimetableByIdentity, train: bool) -> Waits:
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
    """Seconds of each kind of action in each virtual stage."""
    seconds: list[float] = []
    for phase in phases:
        of_parts = phase.forward, phase.inputs, phase.weights
        seconds += [sum(of_parts[p] for p in parts) * (train or k == "F") for k, parts in PARTS.items()]
    return seconds


def sent_of(phases: Sequence[Phases]) -> list[float]:
    """Seconds of the messages that each virtual stage receives, forward and backward, and a zero for no message."""
    return [*(seconds for phase in phases for seconds in (phase.values_sent, phase.gradients_sent)), 0.0]


def _compute_action_ends(
    waits: Waits, seconds: Sequence[float], sent: Sequence[float], begun: Sequence[float] | None = None
) -> list[float]:
    """The end of each action. ``begun``: start of each rank; ``None``: all start at 0."""
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
    """:func:`_compute_action_ends` of many at once, shape ``[actions, n]``; ``seconds`` by kind and ``begun`` by rank
    are alike, and ``sent`` by message, empty where nothing takes time."""
    first = len(waits.last)
    done = np.empty((len(waits.before), seconds.shape[1]))
    done[:first] = begun
    every = zip(waits.before[first:], waits.needed[first:], waits.what[first:], waits.message[first:], strict=True)
    for place, (before, needed, what, message) in enumerate(every, first):
        there = done[needed] + sent[message] if len(sent) else done[needed]
        np.maximum(done[before], there, out=done[place])
        done[place] += seconds[what]
    return done


def _compute_step_times(waits: Waits, seconds: Sequence[float], sent: Sequence[float]) -> list[float]:
    """What a step takes on each rank after some steps: the most of these is no less than it is in the end."""
    begun = [0.0] * len(waits.last)
    for _ in range(_MOST_STEPS):
        done = _compute_action_ends(waits, seconds, sent, begun)
        ended = [done[place] for place in waits.last]
        paces = [end - start for end, start in zip(ended, begun, strict=True)]
        if max(paces) - min(paces) <= _SAME_PACE * max(paces):
            break
        begun = ended
    return paces
