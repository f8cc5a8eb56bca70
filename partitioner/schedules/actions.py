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

import numpy as np
from numpy.typing import NDArray

from partitioner.passes.errors import PartitionError

ActionKind = Literal["F", "B", "I", "W"]


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
    microbatches once forward and once backward through each of its virtual stages, and no rank deadlocks. A split
    backward needs both halves.

    Deadlocks are found by simulation. A forward waits for the forward of the preceding virtual stage. A backward waits
    for its own forward and for the backward of the following virtual stage.
    """
    for stage, order in enumerate(timetable.orders):
        wanted = {(i, c) for i in range(num_microbatches) for c in range(len(timetable.held[stage]))}
        for kind, kinds in _ONCE:
            count = Counter((a.microbatch, a.chunk) for a in order if a.kind in kinds)
            if set(count) != wanted or set(count.values()) != {1}:
                raise ScheduleError(
                    f"stage {stage} does not run the {kind} of each of {num_microbatches} microbatches exactly once"
                )
        halves = {k: Counter((a.microbatch, a.chunk) for a in order if a.kind == k) for k in ("I", "W")}
        if halves["I"] != halves["W"]:
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
    """Simulate the order of actions (forwards and backwards of one microbatch) of each rank in ``timetable`` and return
    the ranks that deadlock, as pairs (pipeline rank, index in its order of the action that never starts). An empty list
    means that all ranks finish.
    """
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
    """Return whether the inputs of ``action``, a forward or backward of one microbatch, are available. ``virtual``:
    index of the virtual stage that it runs, counted over all ranks. ``last``: index of the model's last virtual stage.
    ``done``: completed passes as (``F`` or ``B``, microbatch, virtual stage), where ``B`` means that the input
    gradients exist."""
    if action.kind == "F":
        return virtual == 0 or ("F", action.microbatch, virtual - 1) in done
    if action.kind == "W":
        return ("B", action.microbatch, virtual) in done
    after = virtual == last or ("B", action.microbatch, virtual + 1) in done
    return after and ("F", action.microbatch, virtual) in done


def peak_in_flight(order: Order) -> int:
    """Return the largest number of microbatches that one rank has in flight at once: their forward has run and their
    backward is not complete. A microbatch counts once for each virtual stage of the rank in which it is in flight.
    ``order``: the actions of the rank in the order of execution."""
    return max((sum(counts.values()) for counts in in_flight(order)), default=0)


def count_halves_in_flight(order: Order, chunks: int) -> NDArray[np.int64]:
    """Return, for each action of a rank (a forward or backward of one microbatch), the numbers of microbatches in
    flight after it, shape ``[actions, chunks, 2]``. The last dim is microbatches whose forward has run and whose
    backward has not begun, then microbatches whose backward has run for inputs but not yet for weights. ``order``: the
    actions of the rank in the order of execution. ``chunks``: number of virtual stages of the rank.
    """
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
    """Return, for each action of a rank (a forward or backward of one microbatch), the number of microbatches in flight
    after it: their forward has run and their backward is not complete. An entry is a dict: index of a virtual stage on
    the rank -> number of microbatches in flight in this stage. ``order``: the actions of the rank in the order of
    execution."""
    chunks = 1 + max((action.chunk for action in order), default=0)
    return [Counter(dict(enumerate(map(sum, counts)))) for counts in halves_in_flight(order, chunks)]
