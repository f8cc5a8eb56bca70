"""Actions of a pipeline schedule, each rank's order of actions, and the placement of virtual stages on ranks.

The model is cut into virtual stages, numbered in the order in which a microbatch passes through them. Each of the ``p``
pipeline ranks holds one or more of them. A :class:`Timetable` states the rank of each virtual stage and the order of
actions of each rank. The virtual stages of one rank, in increasing order, are its *chunks*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from partitioner.passes.errors import PartitionError

ActionKind = Literal["F", "B", "I", "W"]
KINDS: tuple[ActionKind, ...] = ("F", "I", "W", "B")  # in this order they are numbered in arrays
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_FORWARD, _INPUTS, _WEIGHTS, _WHOLE = range(len(KINDS))

Places = NDArray[np.int64]


class ScheduleError(PartitionError):
    """Error: a pipeline schedule does not exist, does not support the given numbers of ranks, microbatches or virtual
    stages, or deadlocks."""


@dataclass(frozen=True)
class Action:
    """One step of a pipeline rank: it runs one microbatch forward or backward through one of its virtual stages (parts
    of the model).

    ``kind``: ``F`` forward, ``B`` the whole backward, ``I`` the half of the backward for input gradients, ``W`` the
    half for weight gradients. ``microbatch``: index of the microbatch, from 0. ``chunk``: index of the virtual stage
    among those of the rank, from 0.
    """

    kind: ActionKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        """Return the kind and the microbatch, such as ``F3``, and the chunk if it is not 0, such as ``F3/1``."""
        return f"{self.kind}{self.microbatch}" + (f"/{self.chunk}" if self.chunk else "")


Order = tuple[Action, ...]


@dataclass(frozen=True)
class Timetable:
    """A complete pipeline schedule: the order of actions of each rank, and the rank of each virtual stage.

    ``orders[s]``: the actions of pipeline rank ``s`` in the order of execution; each is a forward or backward of one
    microbatch through one virtual stage (part of the model). ``ranks[k]``: the pipeline rank that holds virtual stage
    ``k``. Ranks and virtual stages are counted from 0.
    """

    orders: tuple[Order, ...]
    ranks: tuple[int, ...]

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each pipeline rank, the indices of its virtual stages (parts of the model) in increasing order.
        ``held[rank][action.chunk]`` is the virtual stage that ``action``, a forward or backward of ``rank``, runs.
        """
        return group_stages_by_rank(self.ranks, len(self.orders))

    @cached_property
    def columns(self) -> ActionColumns:
        """Return all actions as parallel arrays, rank after rank."""
        kinds, stages, microbatches = list[int](), list[int](), list[int]()
        for order, own in zip(self.orders, self.held, strict=True):
            kinds += [_NUMBERS[action.kind] for action in order]
            stages += [own[action.chunk] for action in order]
            microbatches += [action.microbatch for action in order]
        lengths = np.array([len(order) for order in self.orders], dtype=np.int64)
        return ActionColumns(
            np.array(kinds, dtype=np.int64),
            np.array(stages, dtype=np.int64),
            np.array(microbatches, dtype=np.int64),
            np.repeat(np.arange(len(lengths)), lengths),
            np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]),
            len(self.ranks),
        )


@dataclass(frozen=True, eq=False)
class ActionColumns:
    """The actions of all pipeline ranks as parallel arrays: rank after rank, and on each rank in the order of
    execution.

    ``kind``: index into ``KINDS``. ``stage``: index of the virtual stage. ``microbatch``: index of the microbatch.
    ``rank``: the pipeline rank. ``starts``: for each rank the index of its first action, followed by the number of all
    actions. ``num_stages``: number of virtual stages.
    """

    kind: Places
    stage: Places
    microbatch: Places
    rank: Places
    starts: Places
    num_stages: int

    @cached_property
    def num_microbatches(self) -> int:
        """Return the number of microbatches: the largest microbatch index plus 1."""
        return 1 + int(self.microbatch.max(initial=-1))

    @cached_property
    def forwards(self) -> Places:
        """Return the index of the forward of each microbatch in each virtual stage, shape ``[stages, microbatches]``.
        If there is no such action, the entry is the number of all actions."""
        return self._index_actions(self.kind == _FORWARD)

    @cached_property
    def backwards(self) -> Places:
        """Return the index of the action that computes the input gradients of each microbatch in each virtual stage,
        shape ``[stages, microbatches]``. If there is no such action, the entry is the number of all actions."""
        return self._index_actions((self.kind == _INPUTS) | (self.kind == _WHOLE))

    def _index_actions(self, chosen: NDArray[np.bool_]) -> Places:
        found = np.full((self.num_stages, self.num_microbatches), len(self.kind), dtype=np.int64)
        found[self.stage[chosen], self.microbatch[chosen]] = np.flatnonzero(chosen)
        return found

    def find_needed(self, train: bool = True) -> Places:
        """Return, for each action, the index of the action on another virtual stage that computes its input: the
        forward on the previous stage, or the backward for inputs on the next stage. The entry is -1 if the action needs
        no other stage. If the timetable lacks the needed action, the entry is the index of the action itself, which
        then never starts. ``train``: whether backwards wait for other stages."""
        places = np.arange(len(self.kind))
        needed = np.full(len(self.kind), -1, dtype=np.int64)
        later = (self.kind == _FORWARD) & (self.stage > 0)
        needed[later] = self.forwards[self.stage[later] - 1, self.microbatch[later]]
        if train:
            back = ((self.kind == _INPUTS) | (self.kind == _WHOLE)) & (self.stage < self.num_stages - 1)
            needed[back] = self.backwards[self.stage[back] + 1, self.microbatch[back]]
        return np.where(needed == len(self.kind), places, needed)

    def order_by_readiness(self, needed: Places) -> tuple[Places, list[int]]:
        """Return two values. The first is the indices of all actions that can start, in an order in which each action
        follows the previous action of its rank and the action that it needs. The second is, for each rank, the index of
        its first action that never starts, or the index after its last action if all start. The ranks take turns, and
        each executes as many actions as it can.

        ``needed``: for each action, the index of the action on another virtual stage that it waits for; -1 if it waits
        for none.
        """
        waits, stops = needed.tolist(), self.starts[1:].tolist()
        at, done = self.starts[:-1].tolist(), [False] * len(waits)
        order = list[int]()
        moved = True
        while moved:
            moved = False
            for rank, stop in enumerate(stops):
                first = place = at[rank]
                while place < stop and (waits[place] < 0 or done[waits[place]]):
                    done[place] = True
                    place += 1
                if place > first:
                    order += range(first, place)
                    at[rank], moved = place, True
        return np.array(order, dtype=np.int64), at


def group_stages_by_rank(ranks: Sequence[int], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each pipeline rank, the indices of its virtual stages in increasing order. ``ranks[k]``: the rank of
    virtual stage ``k``. ``num_ranks``: number of pipeline ranks; a rank without virtual stages gets an empty tuple."""
    return tuple(tuple(k for k, rank in enumerate(ranks) if rank == s) for s in range(num_ranks))


def build_looped_placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each virtual stage if the virtual stages are assigned to the ranks cyclically: of
    ``p`` ranks, rank ``s`` holds the virtual stages ``s``, ``s + p``, ``s + 2p`` and so on. ``num_ranks``: number of
    ranks, ``p``. ``chunks``: number of virtual stages of each rank."""
    return tuple(range(num_ranks)) * chunks


def v_shaped(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each virtual stage if the virtual stages run back and forth through the ``p`` ranks.
    With two per rank, rank ``s`` holds the virtual stages ``s`` and ``2p - 1 - s``. At each reversal two consecutive
    virtual stages are on the same rank. ``num_ranks``: number of ranks, ``p``. ``chunks``: number of virtual stages of
    each rank.
    """
    there = tuple(range(num_ranks))
    return tuple(rank for c in range(chunks) for rank in (there[::-1] if c % 2 else there))


def check_timetable(timetable: Timetable, num_microbatches: int) -> None:
    """Raise :class:`ScheduleError` unless every pipeline rank in ``timetable`` runs each of ``num_microbatches``
    microbatches once forward and once backward through each of its virtual stages, and no rank deadlocks. If a backward
    is split, both halves must run.

    Deadlocks are found by simulation. A forward waits for the forward of the preceding virtual stage. A backward waits
    for its own forward and for the backward of the following virtual stage.
    """
    columns = timetable.columns
    shape = len(KINDS), columns.num_stages, max(num_microbatches, columns.num_microbatches)
    places = np.ravel_multi_index((columns.kind, columns.stage, columns.microbatch), shape)
    count = np.bincount(places, minlength=math.prod(shape)).reshape(shape)
    wanted = np.arange(shape[2]) < num_microbatches
    for stage, own in enumerate(timetable.held):
        of_kind = count[:, list(own)]
        for name, kinds in _ONCE:
            if (of_kind[list(kinds)].sum(axis=0) != wanted).any():
                raise ScheduleError(
                    f"stage {stage} does not run the {name} of each of {num_microbatches} microbatches exactly once"
                )
        if (of_kind[_INPUTS] != of_kind[_WEIGHTS]).any():
            raise ScheduleError(
                f"stage {stage} does not run exactly one weight backward (W) after each input backward (I)"
            )
    stuck = stuck_at(timetable)
    if stuck:
        stage, place = stuck[0]
        raise ScheduleError(
            f"the schedule deadlocks: stage {stage} can never start {timetable.orders[stage][place]}, because "
            "it needs an action that another stage never reaches"
        )


def stuck_at(timetable: Timetable) -> list[tuple[int, int]]:
    """Simulate the order of actions (forwards and backwards of one microbatch) of each rank in ``timetable``. Return
    the ranks that deadlock, as pairs (pipeline rank, index of the action that never starts in the order of the rank).
    An empty list means that all ranks finish."""
    columns = timetable.columns
    places, needed = np.arange(len(columns.kind)), columns.find_needed()
    here = columns.stage, columns.microbatch
    # on its own rank, a backward comes after the forward, and its half for weights after the one for inputs
    before = np.where(columns.kind == _WEIGHTS, columns.backwards[here], columns.forwards[here])
    needed = np.where((columns.kind != _FORWARD) & (before >= places), places, needed)
    _, reached = columns.order_by_readiness(needed)
    every = zip(reached, columns.starts.tolist(), columns.starts[1:].tolist(), strict=False)
    return [(rank, place - start) for rank, (place, start, stop) in enumerate(every) if place < stop]


_ONCE = (("forward", (_FORWARD,)), ("backward", (_INPUTS, _WHOLE)))  # each runs once for every microbatch


def peak_in_flight(order: Order) -> int:
    """Return the largest number of microbatches that one rank has in flight at once. A microbatch is in flight if its
    forward has run and its backward is not complete; it counts once for each virtual stage of the rank in which it is
    in flight. ``order``: the actions of the rank in the order of execution."""
    return max((sum(counts.values()) for counts in in_flight(order)), default=0)


def count_halves_in_flight(order: Order, chunks: int) -> NDArray[np.int64]:
    """Return, for each action of a rank (a forward or backward of one microbatch), the numbers of microbatches in
    flight after it, shape ``[actions, chunks, 2]``. Index 0 of the last dim counts microbatches whose forward has run
    and whose backward has not begun. Index 1 counts those whose backward has run for inputs but not yet for weights.
    ``order``: the actions of the rank in the order of execution. ``chunks``: number of virtual stages of the rank."""
    split = {(action.microbatch, action.chunk) for action in order if action.kind == "W"}
    changes = {"F": (1, 0), "W": (0, -1), "B": (-1, 0), "I": (-1, 0)}
    change = np.zeros((len(order), chunks, 2), dtype=np.int64)
    change[np.arange(len(order)), [action.chunk for action in order]] = [
        (-1, 1) if action.kind in ("B", "I") and (action.microbatch, action.chunk) in split else changes[action.kind]
        for action in order
    ] or np.zeros((0, 2), dtype=np.int64)
    return change.cumsum(axis=0)


def halves_in_flight(order: Order, chunks: int) -> list[tuple[tuple[int, int], ...]]:
    """Return, for each action of a rank (a forward or backward of one microbatch), the numbers of microbatches in
    flight after it: a tuple with one pair per virtual stage of the rank.

    The first number of a pair counts microbatches whose forward has run and whose backward has not begun. The second
    counts those whose backward has run for inputs but not yet for weights. ``order``: the actions of the rank in the
    order of execution. ``chunks``: number of virtual stages of the rank.
    """
    return [tuple(map(tuple, counts)) for counts in count_halves_in_flight(order, chunks).tolist()]


def in_flight(order: Order) -> list[Counter[int]]:
    """Return, for each action of a rank (a forward or backward of one microbatch), the microbatches in flight after it,
    as a dict: index of a virtual stage on the rank -> number of microbatches in flight in this stage. A microbatch is
    in flight if its forward has run and its backward is not complete. ``order``: the actions of the rank in the order
    of execution."""
    chunks = 1 + max((action.chunk for action in order), default=0)
    return [Counter(dict(enumerate(map(sum, counts)))) for counts in halves_in_flight(order, chunks)]
