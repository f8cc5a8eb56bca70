"""Makespan of a pipeline schedule: the time until all ranks have executed their actions, each action as soon as its
inputs are available.

The makespan is the longest path through the actions. Each action depends on the previous action of its rank, and on at
most one action of another virtual stage and the message from it. Dependencies are computed once per timetable. One pass
over the actions then gives their end times. A rank may also have collectives at the ends of the step, which run one
after the other while its actions run: parameters of a virtual stage are gathered before its first forward ends, and its
gradients are reduced after its last backward has begun. If steps overlap, a rank begins the next step as soon as it has
finished its own part of this step. The step time is then the time between the ends of two consecutive steps on one rank
in steady state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.passes.ir.hashing import SameObject
from partitioner.schedules.actions import KINDS, Timetable

PARTS = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}  # indices into a phase's seconds, in the order of ``KINDS``
_NUM_PHASES = 7  # numbers of a :class:`Phases`
_SENT, _ENDS = slice(3, 5), slice(5, 7)  # of these, messages, and collectives at the ends of a step
ENTRIES = len(KINDS) + 2  # durations of a virtual stage in a flat list: of actions by kind, and of collectives
_GATHER, _REDUCE = len(KINDS), len(KINDS) + 1
_MOST_STEPS, _SAME_PACE = 8, 1e-9  # steps until all ranks take equally long, and the tolerance
_AT_ONCE = 1 << 18  # most end times that are computed at once


@dataclass(frozen=True)
class Phases:
    """Seconds of one microbatch in one virtual stage (the part of the model that one action of a pipeline rank runs).

    ``forward``: the forward. ``inputs``, ``weights``: the halves of the backward for input gradients and for weight
    gradients. ``values_sent``, ``gradients_sent``: the messages that bring the input of the forward and of the
    backward; the rank may compute during a message. Two fields count once per step: ``gathered``: gathering the stage's
    parameters, before its first forward ends; ``reduced``: reducing its gradients, after its last backward has begun.
    The rank may compute during both; collectives of one rank run one after the other.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    values_sent: float = 0.0
    gradients_sent: float = 0.0
    gathered: float = 0.0
    reduced: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of one microbatch in this virtual stage: of the forward and of both halves of the
        backward, without messages.
        """
        return self.forward + self.inputs + self.weights


def compute_makespan(
    table: Timetable, phases: Sequence[Phases], train: bool = True, *, overlap_steps: bool = False
) -> float:
    """Return the seconds from the start of a step until all ranks have finished their actions, if each action starts as
    soon as its inputs are available. ``table``: the actions (forwards and backwards of one microbatch) of each rank.
    ``phases``: the times of each virtual stage. ``train``: whether backwards take time.

    ``overlap_steps``: whether a rank begins the next step as soon as it has finished its part of this one. If so, the
    result is the step time in steady state instead, and collectives at the ends of a step (gathers of parameters,
    reductions of gradients) are not counted.
    """
    return _compute_cached_makespan(SameObject(table), tuple(phases), train, overlap_steps)


@lru_cache(maxsize=32)
def _compute_cached_makespan(
    same: SameObject[Timetable], phases: tuple[Phases, ...], train: bool, overlap_steps: bool
) -> float:
    """Return the seconds until all ranks have finished their actions or, if ``overlap_steps``, the step time in steady
    state. Results are cached, because callers simulate some cuts into stages several times. ``same``: the timetable in
    a wrapper that compares by identity. ``phases``: the times of each virtual stage. ``train``: whether backwards take
    time."""
    ends = not overlap_steps and _has_ends(phases)
    waits, seconds, sent = waits_of(same.value, train, ends=ends), seconds_of(phases, train), sent_of(phases)
    if overlap_steps:
        return max(_compute_step_times(waits, seconds, sent))
    done = _compute_action_ends(waits, seconds, sent)
    return max(done[place] for place in waits.last)


def follow_all(
    table: Timetable, phases: NDArray[np.float64], train: bool = True, *, overlap_steps: bool = False
) -> NDArray[np.float64]:
    """Return the seconds of a step for each of ``n`` sets of durations on one timetable, shape ``[n]``: the time until
    all ranks have finished their actions.

    ``table``: the actions (forwards and backwards of one microbatch) of each rank. ``phases``: seconds, shape ``[n,
    virtual stages, 7]``; the last dimension is forward, backward for inputs, backward for weights, message of the
    forward's input, message of the backward's input, gathers of parameters, reductions of gradients (``[n, virtual
    stages, 5]`` without the last two). ``train``: whether backwards take time. ``overlap_steps``: whether a rank begins
    the next step as soon as it has finished its part of this one; if so, the result is the step time in steady state.
    """
    ends = not overlap_steps and bool(phases[:, :, _ENDS].any())
    fronts = _find_fronts(SameObject(table), train, ends)
    of_kinds, sent = _stack_durations(phases, train, ends)
    most = max(1, _AT_ONCE // len(fronts.before))
    taken = np.empty(len(phases))
    for first in range(0, len(phases), most):
        some = of_kinds[:, first : first + most]
        begun = np.zeros((len(fronts.last), some.shape[1]))
        for _ in range(_MOST_STEPS if overlap_steps else 1):
            ended = _compute_action_end_times(fronts, some, sent[:, first : first + most], begun)[fronts.last]
            paces, begun = ended - begun, ended
            if np.ptp(paces, axis=0).max() <= _SAME_PACE * paces.max():
                break
        taken[first : first + most] = paces.max(axis=0)
    return taken


def longest_path(
    table: Timetable, phases: Sequence[Phases], train: bool = True, *, overlap_steps: bool = False
) -> tuple[float, NDArray[np.float64]]:
    """Return two values: the seconds of the longest path through the actions of a step, and how often each phase is on
    this path, shape ``[virtual stages, 7]``: forward, backward for inputs, backward for weights, message of the
    forward's input, message of the backward's input, gathers, reductions.

    ``table``: the actions (forwards and backwards of one microbatch) of each rank. ``phases``: for each virtual stage,
    the seconds of the seven phases. ``train``: whether backwards take time. ``overlap_steps``: whether a rank begins
    the next step as soon as its part of this one has ended. If so, the seconds are the step time in steady state. The
    counts are then for the longest path from the first to the last action of the slowest rank; the seconds on this path
    may be fewer than the step time.
    """
    ends = not overlap_steps and _has_ends(phases)
    waits, of_kinds, sent = waits_of(table, train, ends=ends), seconds_of(phases, train), sent_of(phases)
    if overlap_steps:
        paces = _compute_step_times(waits, of_kinds, sent)
        seconds, rank = max(paces), paces.index(max(paces))
        done = _compute_action_ends(waits, of_kinds, sent, [0.0 if r == rank else -math.inf for r in range(len(paces))])
        place = waits.last[rank]
    else:
        done = _compute_action_ends(waits, of_kinds, sent)
        place = max(waits.last, key=done.__getitem__)
        seconds = done[place]
    return seconds, _count_phases_on_path(waits, done, sent, place, len(phases), train)


def longest_paths(table: Timetable, phases: NDArray[np.float64], train: bool = True) -> list[NDArray[np.float64]]:
    """Return, for each of ``n`` sets of durations, how often each phase is on the longest path through the actions of a
    step: arrays of shape ``[virtual stages, 7]``, as the second result of :func:`longest_path`. This is faster for many
    sets, since all are computed at once.

    ``table``: the actions (forwards and backwards of one microbatch) of each rank. ``phases``: seconds, shape ``[n,
    virtual stages, 7]``. ``train``: whether backwards take time. The step does not overlap with the next one.
    """
    ends = bool(phases[:, :, _ENDS].any())
    waits, fronts = waits_of(table, train, ends=ends), _find_fronts(SameObject(table), train, ends)
    of_kinds, sent = _stack_durations(phases, train, ends)
    messages = sent if len(sent) else np.zeros((1 + 2 * phases.shape[1], len(phases)))
    most = max(1, _AT_ONCE // len(fronts.before))
    found = []
    for first in range(0, len(phases), most):
        some = slice(first, min(first + most, len(phases)))
        begun = np.zeros((len(waits.last), some.stop - first))
        every = _compute_action_end_times(fronts, of_kinds[:, some], sent[:, some], begun)[fronts.place].T
        for done, of_messages in zip(every, messages[:, some].T.tolist(), strict=True):
            place = waits.last[int(done[waits.last].argmax())]
            found.append(_count_phases_on_path(waits, done, of_messages, place, phases.shape[1], train))
    return found


def _stack_durations(
    phases: NDArray[np.float64], train: bool, ends: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return two arrays with one column for each set of durations: the seconds of actions, with the rows of
    :func:`seconds_of`, and the seconds of messages, with the rows of :func:`sent_of`. The second array has no rows if
    messages take no time.

    ``phases``: seconds, shape ``[sets, virtual stages, 7]``. ``train``: whether backwards take time. ``ends``: whether
    to include the collectives at the ends of the step.
    """
    kinds = [phases[:, :, list(parts)].sum(axis=2) * (train or k == "F") for k, parts in PARTS.items()]
    last = phases[:, :, _ENDS] if ends else np.zeros((*phases.shape[:2], 2))
    of_kinds = np.concatenate([np.stack(kinds, axis=2), last], axis=2).reshape(len(phases), -1)
    of_kinds = np.pad(of_kinds, ((0, 0), (0, 1))).T.copy()
    sent = phases[:, :, _SENT].reshape(len(phases), -1).T
    return of_kinds, np.concatenate([sent, np.zeros((1, len(phases)))]) if sent.any() else sent[:0]


def _count_phases_on_path(
    waits: Waits,
    done: Sequence[float] | NDArray[np.float64],
    sent: Sequence[float],
    place: int,
    num_stages: int,
    train: bool,
) -> NDArray[np.float64]:
    """Return how often each phase is on the longest path to the action with the index ``place``, shape ``[virtual
    stages, 7]``. ``waits``: what each action waits for. ``done``: the end time of each action. ``sent``: the seconds of
    messages, in the form of :func:`sent_of`. ``num_stages``: number of virtual stages. ``train``: whether backwards
    take time."""
    often, messages = [0] * (num_stages * ENTRIES + 1), [0] * len(sent)
    while place >= len(waits.last):  # until the start of a rank or of its links
        often[waits.what[place]] += 1
        before, needed = waits.before[place], waits.needed[place]
        message = waits.message[place]
        place = before
        if done[needed] + sent[message] > done[before]:
            place = needed
            messages[message] += 1
    counts = np.zeros((num_stages, _NUM_PHASES))
    counts[:, _SENT] = np.reshape(messages[:-1], (-1, 2))
    by_stage = np.reshape(often[:-1], (-1, ENTRIES))
    counts[:, _ENDS] = by_stage[:, len(KINDS) :]
    for of_kind, (kind, parts) in zip(by_stage[:, : len(KINDS)].T, PARTS.items(), strict=True):
        for part in parts if train or kind == "F" else ():
            counts[:, part] += of_kind
    return counts


def _has_ends(phases: Sequence[Phases]) -> bool:
    """Return whether any virtual stage has collectives at the ends of a step: gathers of parameters at its start or
    reductions of gradients at its end. ``phases``: the times of each virtual stage."""
    return any(phase.gathered or phase.reduced for phase in phases)


class Waits(NamedTuple):
    """What each action (forward or backward of one microbatch) of all pipeline ranks in one step waits for: parallel
    lists with one entry per action, in topological order. The first entries, one per rank, stand for the start of the
    step on that rank. If the collectives at the ends of the step are counted, one further entry per rank stands for the
    start of the step on its links; collectives then have entries like actions.

    - ``before``: index of the previous action of the same rank. ``needed``: index of the action on another virtual
      stage that computes the input; the start of the rank if there is none.
    - ``what``: six times the index of the virtual stage, plus 0 for a forward, 1 or 2 for the backward for inputs or
      weights, 3 for a whole backward, 4 for the gathers and 5 for the reductions; six times the number of stages for an
      entry that takes no time.
    - ``message``: index of the message that brings the input: twice the index of the virtual stage, plus 1 for
      gradients; twice the number of stages if there is none. ``rank``: the rank of each action.
    - ``last``: for each rank, the index of its last action; if collectives are counted, followed by the index of the
      last collective of each rank.
    """

    before: list[int]
    needed: list[int]
    what: list[int]
    message: list[int]
    last: list[int]
    rank: list[int]


def waits_of(table: Timetable, train: bool = True, *, ends: bool = False) -> Waits:
    """Return, for all actions (forwards and backwards of one microbatch) of ``table`` in topological order, the actions
    and messages that each action waits for. The result is cached by the identity of ``table``.

    ``train``: whether backwards wait for other virtual stages. ``ends``: whether to include the collectives at the ends
    of the step (gathers of parameters at its start, reductions of gradients at its end).
    """
    return _compute_waits(SameObject(table), train, ends)


@lru_cache(maxsize=32)
def _compute_waits(same: SameObject[Timetable], train: bool, ends: bool) -> Waits:
    """Return, for all actions (forwards and backwards of one microbatch) of a timetable in topological order, the
    actions and messages that each action waits for.

    ``same``: the timetable in a wrapper that compares by identity, for the cache. ``train``: whether backwards wait for
    other virtual stages. ``ends``: whether to include the collectives at the ends of the step (gathers of parameters at
    its start, reductions of gradients at its end).
    """
    table, columns = same.value, same.value.columns
    starts = range((1 + ends) * len(table.orders))
    nothing = 2 * len(table.ranks)
    found = Waits([*starts], [*starts], [0 for _ in starts], [nothing for _ in starts], [*starts], [*starts])
    gathered = _add_gathers(table, found) if ends else {}
    needed = columns.find_needed(train)
    order, reached = columns.order_by_readiness(needed)
    kind, stage, rank, needed = columns.kind[order], columns.stage[order], columns.rank[order], needed[order]
    # the first forward of a virtual stage ends no earlier than the gathers: an entry behind it waits for both
    is_first = np.zeros(len(order), dtype=np.int64)
    if ends:
        forwards = np.flatnonzero(kind == 0)
        is_first[forwards[np.unique(stage[forwards], return_index=True)[1]]] = 1
    place = np.empty(len(columns.kind), dtype=np.int64)  # the entry that completes each action
    place[order] = len(found.before) + np.arange(len(order)) + np.cumsum(is_first)
    has_input, entry = needed >= 0, np.repeat(np.arange(len(order)), 1 + is_first)
    is_pause = np.diff(entry, prepend=-1) == 0
    of_gather = np.array([gathered.get(k, 0) for k in range(len(table.ranks))])
    before = np.where(order > columns.starts[rank], place[order - 1], rank)
    input_place = np.where(has_input, place[needed], rank)
    message = np.where(has_input, 2 * stage + (kind != 0), nothing)
    previous = len(found.before) - 1 + np.arange(len(entry))
    found.before.extend(np.where(is_pause, previous, before[entry]).tolist())
    found.needed.extend(np.where(is_pause, of_gather[stage[entry]], input_place[entry]).tolist())
    found.what.extend(np.where(is_pause, len(table.ranks) * ENTRIES, (stage * ENTRIES + kind)[entry]).tolist())
    found.message.extend(np.where(is_pause, nothing, message[entry]).tolist())
    found.rank.extend(rank[entry].tolist())
    for of_rank, (start, stop) in enumerate(zip(columns.starts.tolist(), reached, strict=False)):
        found.last[of_rank] = int(place[stop - 1]) if stop > start else of_rank
    if ends:
        _add_reductions(table, found)
    return found


def _add_gathers(table: Timetable, found: Waits) -> dict[int, int]:
    """Append the gathers of parameters to ``found``, the lists of what each action of a step waits for. The gathers of
    a rank run one after the other on its links from the start of the step, in the order of its virtual stages. Return
    index of a virtual stage -> index of its gather in ``found``. ``table``: the actions (forwards and backwards of one
    microbatch) of each rank."""
    places: dict[int, int] = {}
    for rank, stages in enumerate(table.held):
        for k in sorted(stages):
            _add_collective(table, found, rank, k * ENTRIES + _GATHER, len(table.orders) + rank)
            places[k] = len(found.before) - 1
    return places


def _add_reductions(table: Timetable, found: Waits) -> None:
    """Append the reductions of gradients to ``found``, the lists of what each action of a step waits for. The
    reductions of a rank run one after the other on its links. The reduction of a virtual stage begins no earlier than
    the last backward of the stage. ``table``: the actions (forwards and backwards of one microbatch) of each rank."""
    what = np.array(found.what)
    places = np.flatnonzero((what % ENTRIES > 0) & (what % ENTRIES < len(KINDS)))
    last = np.zeros(len(table.ranks), dtype=np.int64)  # the last backward of each virtual stage
    np.maximum.at(last, what[places] // ENTRIES, places)
    final = {stage: place for stage, place in enumerate(last.tolist()) if place}
    for stage, place in sorted(final.items(), key=lambda pair: pair[1]):
        _add_pause(table, found, found.rank[place], found.before[place], found.needed[place], found.message[place])
        _add_collective(table, found, found.rank[place], stage * ENTRIES + _REDUCE, len(found.before) - 1)


def _add_collective(table: Timetable, found: Waits, rank: int, what: int, needed: int) -> None:
    """Append a collective on the links of ``rank`` to ``found``, the lists of what each action of a step waits for. It
    runs after the previous collective of the rank. ``what``: index of its seconds in the flat list of durations of all
    actions and collectives. ``needed``: index of the entry of ``found`` that it also waits for. ``table``: the actions
    (forwards and backwards of one microbatch) of each rank."""
    lane = len(table.orders) + rank
    found.before.append(found.last[lane])
    found.needed.append(needed)
    found.what.append(what)
    found.message.append(2 * len(table.ranks))
    found.rank.append(rank)
    found.last[lane] = len(found.before) - 1


def _add_pause(table: Timetable, found: Waits, rank: int, before: int, needed: int, message: int | None = None) -> None:
    """Append an entry that takes no time to ``found``, the lists of what each action of a step waits for. The new entry
    waits for the entry with index ``before`` and for a message from the entry with index ``needed``. ``message``: index
    of this message; ``None``: it waits for the entry ``needed`` without a message. ``rank``: the rank of the new entry.
    ``table``: the actions (forwards and backwards of one microbatch) of each rank."""
    found.before.append(before)
    found.needed.append(needed)
    found.what.append(len(table.ranks) * ENTRIES)
    found.message.append(2 * len(table.ranks) if message is None else message)
    found.rank.append(rank)


def seconds_of(phases: Sequence[Phases], train: bool) -> list[float]:
    """Return the seconds of actions as a flat list with six numbers for each virtual stage: forward, backward for
    inputs, backward for weights, whole backward, and the gathers and reductions at the ends of a step. A final zero
    stands for an entry that takes no time. ``phases``: the times of each virtual stage. ``train``: whether backwards
    take time."""
    seconds: list[float] = []
    for phase in phases:
        of_parts = phase.forward, phase.inputs, phase.weights
        seconds += [sum(of_parts[p] for p in parts) * (train or k == "F") for k, parts in PARTS.items()]
        seconds += [phase.gathered, phase.reduced]
    return [*seconds, 0.0]


def sent_of(phases: Sequence[Phases]) -> list[float]:
    """Return the seconds of messages as a flat list with two numbers for each virtual stage: the messages that bring
    the input of its forward and of its backward. A final zero stands for "no message". ``phases``: the times of each
    virtual stage."""
    return [*(seconds for phase in phases for seconds in (phase.values_sent, phase.gradients_sent)), 0.0]


def _compute_action_ends(
    waits: Waits, seconds: Sequence[float], sent: Sequence[float], begun: Sequence[float] | None = None
) -> list[float]:
    """Return the end time in seconds of each action of a step, in the order of ``waits``, which says what each action
    waits for. ``seconds``: durations as a flat list with six numbers for each virtual stage (forward, backward for
    inputs, backward for weights, whole backward, gathers, reductions), followed by 0. ``sent``: durations of messages
    as a flat list with two numbers for each virtual stage (the message that brings the input of its forward, and of its
    backward), followed by 0. ``begun``: the start time of each rank; ``None``: all start at 0."""
    first = len(waits.last)
    done = [0.0] * first if begun is None else [*begun]
    every = zip(waits.before[first:], waits.needed[first:], waits.what[first:], waits.message[first:], strict=True)
    for before, needed, what, message in every:
        now, there = done[before], done[needed] + sent[message]
        done.append((now if now >= there else there) + seconds[what])
    return done


class _Fronts(NamedTuple):
    """The actions (forwards and backwards) of a step, reordered into groups ("fronts") within which no action waits for
    another, so that NumPy can compute the end times of a whole front at once.

    ``starts``: index of the first entry of each front, followed by the number of all entries. The first front consists
    of the entries that stand for the start of the step. ``before``, ``needed``, ``what``, ``message``, ``last``: the
    fields of :class:`Waits`, with entries and indices in the new order. ``place``: the index in the new order of each
    entry of :class:`Waits`.
    """

    starts: list[int]
    before: NDArray[np.int64]
    needed: NDArray[np.int64]
    what: NDArray[np.int64]
    message: NDArray[np.int64]
    last: NDArray[np.int64]
    place: NDArray[np.int64]


@lru_cache(maxsize=32)
def _find_fronts(same: SameObject[Timetable], train: bool, ends: bool) -> _Fronts:
    """Return the actions (forwards and backwards) of a timetable, grouped into fronts within which no action waits for
    another. Every action waits for two entries; the action is in the front that follows the later of the fronts of
    these two.

    ``same``: the timetable in a wrapper that compares by identity, for the cache. ``train``: whether backwards wait for
    other virtual stages. ``ends``: whether to include the collectives at the ends of the step.
    """
    waits = _compute_waits(same, train, ends)
    first = len(waits.last)
    depth = [0] * first
    for one, other in zip(waits.before[first:], waits.needed[first:], strict=True):
        depth.append(1 + max(depth[one], depth[other]))
    order = np.argsort(depth, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    starts = np.searchsorted(np.array(depth)[order], np.arange(max(depth) + 2)).tolist()
    before, needed, what, message = (
        np.array(of)[order] for of in (waits.before, waits.needed, waits.what, waits.message)
    )
    return _Fronts(starts, place[before], place[needed], what, message, place[waits.last], place)


def _compute_action_end_times(
    fronts: _Fronts, seconds: NDArray[np.float64], sent: NDArray[np.float64], begun: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the end times in seconds of all actions of a step for ``n`` sets of durations, shape ``[actions, n]``.
    ``fronts``: the actions, in the order of the result, with what each waits for.

    The other arguments have one column per set of durations. ``seconds``: durations, with the rows of
    :func:`seconds_of`. ``sent``: durations of messages, two rows per virtual stage (for its forward, for its backward)
    and a last row of zeros; empty if messages take no time. ``begun``: start times, one row per rank.
    """
    done = np.empty((len(fronts.before), seconds.shape[1]))
    done[: len(begun)] = begun
    for start, stop in pairwise(fronts.starts[1:]):
        some = slice(start, stop)
        there = done[fronts.needed[some]]
        if len(sent):
            there += sent[fronts.message[some]]
        np.maximum(there, done[fronts.before[some]], out=there)
        np.add(there, seconds[fronts.what[some]], out=done[some])
    return done


def _compute_step_times(waits: Waits, seconds: Sequence[float], sent: Sequence[float]) -> list[float]:
    """Return, for each rank, the seconds of one step after several overlapping steps: a rank begins the next step as
    soon as its part of the last one has ended. The largest result is an upper bound on the step time in steady state.
    ``waits``: what each action (forward or backward of one microbatch) waits for. ``seconds``: durations as a flat list
    with six numbers for each virtual stage (forward, backward for inputs, backward for weights, whole backward,
    gathers, reductions), followed by 0. ``sent``: durations of messages as a flat list with two numbers for each
    virtual stage (messages for its forward and for its backward), followed by 0."""
    begun = [0.0] * len(waits.last)
    for _ in range(_MOST_STEPS):
        done = _compute_action_ends(waits, seconds, sent, begun)
        ended = [done[place] for place in waits.last]
        paces = [end - start for end, start in zip(ended, begun, strict=True)]
        if max(paces) - min(paces) <= _SAME_PACE * max(paces):
            break
        begun = ended
    return paces
