"""Actions of a pipeline schedule, each rank's order of actions, and the placement of virtual stages on ranks.

The model is cut into virtual stages, numbered in the order in which a microbatch passes through them. Each of the ``p``
pipeline ranks holds one or more of them. A :class:`Timetable` states the rank of each virtual stage and the order of
actions of each rank. The virtual stages of one rank, in increasing order, are its *chunks*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from partitioner.passes.errors import PartitionError

ActionKind = Literal["F", "B", "I", "W"]


class ScheduleError(PartitionError):
    """Raised for a schedule that does not exist, that does not support the given numbers, or whose order deadlocks."""


@dataclass(frozen=True)
class Action:
    """One step of a rank: it runs one microbatch through one of its virtual stages.

    ``kind``: ``F`` forward, ``B`` the whole backward, ``I`` the backward for input gradients, ``W`` the backward for
    weight gradients. ``chunk``: the index of the virtual stage among those of the rank.
    """

    kind: ActionKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f"/{self.chunk}" if self.chunk else "")


Order = tuple[Action, ...]


@dataclass(frozen=True)
class Timetable:
    """A complete schedule: the order of actions of each rank, and the rank of each virtual stage.

    ``orders[s]``: the actions of rank ``s`` in the order of execution. ``ranks[k]``: the rank that holds virtual stage
    ``k``.
    """

    orders: tuple[Order, ...]
    ranks: tuple[int, ...]

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the numbers of its virtual stages in increasing order. The index in this tuple is the
        ``chunk`` of an action."""
        return group_stages_by_rank(self.ranks, len(self.orders))


def group_stages_by_rank(ranks: Sequence[int], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the numbers of its virtual stages in increasing order. ``ranks[k]``: the rank of virtual
    stage ``k``."""
    return tuple(tuple(k for k, rank in enumerate(ranks) if rank == s) for s in range(num_ranks))


def build_looped_placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each virtual stage if the stages are assigned to ranks cyclically: of ``p`` ranks, rank ``s``
    holds the virtual stages ``s``, ``s + p``, ``s + 2p`` and so on. ``num_ranks``: number of ranks, ``p``. ``chunks``:
    number of virtual stages of each rank."""
    return tuple(range(num_ranks)) * chunks


def v_shaped(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each virtual stage if the direction reverses after every ``p`` stages: rank ``s`` of ``p``
    holds ``s`` and ``2p - 1 - s``. At each reversal two consecutive virtual stages are on the same rank. ``num_ranks``:
    number of ranks, ``p``. ``chunks``: number of virtual stages of each rank."""
    there = tuple(range(num_ranks))
    return tuple(rank for c in range(chunks) for rank in (there[::-1] if c % 2 else there))


def check_timetable(timetable: Timetable, num_microbatches: int) -> None:
    """Raise :class:`ScheduleError` unless every rank runs each microbatch once forward and once backward through each
    of its virtual stages, and no rank deadlocks.

    Deadlocks are found by simulation. A forward waits for the forward of the preceding virtual stage. A backward waits
    for its own forward and for the backward of the following virtual stage.
    """
    for stage, order in enumerate(timetable.orders):
        wanted = {(i, c) for i in range(num_microbatches) for c in range(len(timetable.held[stage]))}
        for kind, kinds in _ONCE:
            count = Counter((a.microbatch, a.chunk) for a in order if a.kind in kinds)
            if set(count) != wanted or set(count.values()) != {1}:
                raise ScheduleError(f"stage {stage} does not run each {kind} of {num_microbatches} microbatches once")
        halves = {k: Counter((a.microbatch, a.chunk) for a in order if a.kind == k) for k in ("I", "W")}
        if halves["I"] != halves["W"]:
            raise ScheduleError(f"stage {stage} does not follow each input backward by one weight backward")
    stuck = stuck_at(timetable)
    if stuck:
        stage, place = stuck[0]
        raise ScheduleError(f"stage {stage} waits for ever before {timetable.orders[stage][place]}")


def stuck_at(timetable: Timetable) -> list[tuple[int, int]]:
    """Simulate the orders and return the deadlocked ranks as pairs (rank, index of the action that never starts). An
    empty list means that all ranks finish."""
    orders, last = timetable.orders, len(timetable.ranks) - 1
    done: set[tuple[str, int, int]] = set()  # kind, microbatch, virtual stage
    position = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                action = order[position[stage]]
                virtual = timetable.held[stage][action.chunk]
                if not _is_action_ready(action, virtual, last, done):
                    break
                done.add(("B" if action.kind == "I" else action.kind, action.microbatch, virtual))
                position[stage] += 1
                moved = True
    return [(s, position[s]) for s, order in enumerate(orders) if position[s] < len(order)]


_ONCE: tuple[tuple[str, frozenset[ActionKind]], ...] = (
    ("forward", frozenset({"F"})),
    ("backward", frozenset({"B", "I"})),
)


def _is_action_ready(action: Action, virtual: int, last: int, done: set[tuple[str, int, int]]) -> bool:
    """Return whether ``action`` of the virtual stage ``virtual`` can run. ``last`` is the index of the last virtual
    stage, from 0; ``done`` has the finished work as (``F`` or ``B``, microbatch, virtual stage).
    """
    if action.kind == "F":
        return virtual == 0 or ("F", action.microbatch, virtual - 1) in done
    if action.kind == "W":
        return ("B", action.microbatch, virtual) in done
    after = virtual == last or ("B", action.microbatch, virtual + 1) in done
    return after and ("F", action.microbatch, virtual) in done


def peak_in_flight(order: Order) -> int:
    """Return the largest number of microbatches that a rank has in flight at once: the forward has run and the backward
    is not complete. A microbatch counts once for each virtual stage of the rank in which it is in flight."""
    return max((sum(counts.values()) for counts in in_flight(order)), default=0)


def halves_in_flight(order: Order, chunks: int) -> list[tuple[tuple[int, int], ...]]:
    """Return, for each action of a rank, the numbers of microbatches in flight after it: a tuple with one pair per
    virtual stage of the rank.

    The first number of a pair counts microbatches whose forward has run and whose backward has not begun. The second
    counts those whose backward has run for inputs but not yet for weights. ``order``: the actions of the rank.
    ``chunks``: number of virtual stages of the rank.
    """
    split = {(a.microbatch, a.chunk) for a in order if a.kind == "W"}
    current = [(0, 0)] * chunks
    seen = []
    for action in order:
        whole, half = current[action.chunk]
        if action.kind == "F":
            whole += 1
        elif action.kind == "W":
            half -= 1
        elif action.kind in ("B", "I"):
            whole -= 1
            half += (action.microbatch, action.chunk) in split
        current[action.chunk] = whole, half
        seen.append(tuple(current))
    return seen


def in_flight(order: Order) -> list[Counter[int]]:
    """Return, for each action of a rank, the number of microbatches in flight after it, by virtual stage of the rank
    (chunk -> count). A microbatch is in flight if its forward has run and its backward is not complete."""
    chunks = 1 + max((action.chunk for action in order), default=0)
    return [Counter(dict(enumerate(map(sum, counts)))) for counts in halves_in_flight(order, chunks)]
