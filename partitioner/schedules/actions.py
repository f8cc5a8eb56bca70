"""What a pipeline schedule is made of: actions, each rank's order of them, and where the virtual stages are.

The pipeline of ``p`` ranks is cut into virtual stages, numbered in the order in which a microbatch passes them. A
:class:`Timetable` says which rank holds each of them, and what each rank does in which order; the virtual stages of one
rank, in rising order, are its *chunks*.
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
    """A schedule that does not exist, cannot run with these numbers, or gives an order that cannot run."""


@dataclass(frozen=True)
class Action:
    """One microbatch through one chunk: forward, backward, or its two halves (input gradients, weight gradients)."""

    kind: ActionKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f"/{self.chunk}" if self.chunk else "")


Order = tuple[Action, ...]


@dataclass(frozen=True)
class Timetable:
    """``orders[s]``: what rank ``s`` does; ``ranks[k]``: the rank that holds virtual stage ``k``."""

    orders: tuple[Order, ...]
    ranks: tuple[int, ...]

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The virtual stages of each rank, by chunk."""
        return group_stages_by_rank(self.ranks, len(self.orders))


def group_stages_by_rank(ranks: Sequence[int], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The virtual stages of each rank, by chunk, from the rank of each virtual stage."""
    return tuple(tuple(k for k, rank in enumerate(ranks) if rank == s) for s in range(num_ranks))


def build_looped_placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Rank ``s`` holds the virtual stages ``s, s + p, s + 2p, ...``"""
    return tuple(range(num_ranks)) * chunks


def v_shaped(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """There and back: rank ``s`` holds ``s`` and ``2p - 1 - s``; the last rank passes a value on to itself."""
    there = tuple(range(num_ranks))
    return tuple(rank for c in range(chunks) for rank in (there[::-1] if c % 2 else there))


def check_timetable(timetable: Timetable, num_microbatches: int) -> None:
    """Raise :class:`ScheduleError` unless every rank can finish, having run each microbatch once each way.

    Whether they finish is found by running them: a forward waits for that of the virtual stage before it, a backward
    for its own forward and for the backward of the virtual stage after it.
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
    """The ranks that never end, each with the place in its order where it waits; empty: all end."""
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
    if action.kind == "F":
        return virtual == 0 or ("F", action.microbatch, virtual - 1) in done
    if action.kind == "W":
        return ("B", action.microbatch, virtual) in done
    after = virtual == last or ("B", action.microbatch, virtual + 1) in done
    return after and ("F", action.microbatch, virtual) in done


def peak_in_flight(order: Order) -> int:
    """The most (microbatch, chunk) pairs whose forward has run and whose backward has not ended."""
    return max((sum(counts.values()) for counts in in_flight(order)), default=0)


def halves_in_flight(order: Order, chunks: int) -> list[tuple[tuple[int, int], ...]]:
    """After each action, by chunk, the microbatches whose forward has run and whose backward has not begun, and those
    of which half the backward has run."""
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
    """After each action, by chunk, the microbatches whose forward has run and whose backward has not ended."""
    chunks = 1 + max((action.chunk for action in order), default=0)
    return [Counter(dict(enumerate(map(sum, counts)))) for counts in halves_in_flight(order, chunks)]
