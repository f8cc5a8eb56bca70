"""Pipeline schedules: the order in which each rank runs its forwards and backwards.

A schedule is a function of (number of stages, number of microbatches) that gives each stage's actions in order; the
table :data:`SCHEDULES` has them by name. Adding one adds a function and a line: what is sent and received, freed and
reduced around the actions follows from them in ``partitioner/emit.py``.

The pipeline of ``p`` ranks may be cut into ``p * chunks`` *virtual* stages: rank ``s`` holds the virtual stages
``s, s + p, s + 2p, ...``, its chunks. A stage's actions say which chunk they run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from passes.errors import PartitionError

ActionKind = Literal["F", "B", "I", "W"]


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
class Schedule:
    """``orders(num_stages, num_microbatches)`` gives one order per stage, for ``chunks`` chunks on each."""

    orders: Callable[[int, int], tuple[Order, ...]]
    chunks: int = 1
    doc: str = ""


class ScheduleError(PartitionError):
    """A schedule that does not exist, cannot run with these numbers, or gives an order that cannot run."""


def gpipe(num_stages: int, num_microbatches: int) -> tuple[Order, ...]:
    """All forwards, then all backwards (Huang et al. 2019): every microbatch is in flight at once."""
    order = tuple(Action(kind, i) for kind in ("F", "B") for i in range(num_microbatches))
    return (order,) * num_stages


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> tuple[Order, ...]:
    """1F1B (Narayanan et al. 2019, 2021): stage ``s`` has ``min(p - s, m)`` microbatches in flight at most."""
    orders = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage - 1, num_microbatches)
        order = [Action("F", i) for i in range(warmup)]
        for i in range(num_microbatches - warmup):
            order += [Action("F", warmup + i), Action("B", i)]
        order += [Action("B", i) for i in range(num_microbatches - warmup, num_microbatches)]
        orders.append(tuple(order))
    return tuple(orders)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe, doc="all forwards, then all backwards"),
    "1f1b": Schedule(one_forward_one_backward, doc="one forward, one backward: least memory at the same bubble"),
}


def schedule_orders(name: str, num_stages: int, num_microbatches: int) -> tuple[Order, ...]:
    """Each stage's order under the schedule ``name``, checked. Raises :class:`ScheduleError`."""
    if name not in SCHEDULES:
        raise ScheduleError(f"there is no schedule {name!r}; choose one of {', '.join(sorted(SCHEDULES))}")
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"schedule {name!r} needs at least one stage and one microbatch, got {num_stages} and {num_microbatches}"
        )
    schedule = SCHEDULES[name]
    orders = schedule.orders(num_stages, num_microbatches)
    check_orders(orders, num_microbatches, schedule.chunks)
    return orders


def check_orders(orders: tuple[Order, ...], num_microbatches: int, chunks: int = 1) -> None:
    """Raise :class:`ScheduleError` unless every stage can finish, having run each microbatch once each way.

    Whether they finish is found by running them: a forward waits for that of the virtual stage before it, a backward
    for its own forward and for the backward of the virtual stage after it.
    """
    wanted = {(i, c) for i in range(num_microbatches) for c in range(chunks)}
    for stage, order in enumerate(orders):
        counts = {kind: Counter((a.microbatch, a.chunk) for a in order if a.kind in kinds) for kind, kinds in _KINDS}
        for kind, count in counts.items():
            if set(count) != wanted or set(count.values()) != {1}:
                raise ScheduleError(f"stage {stage} does not run each {kind} of {num_microbatches} microbatches once")
        halves = {k: Counter((a.microbatch, a.chunk) for a in order if a.kind == k) for k in ("I", "W")}
        if halves["I"] != halves["W"]:
            raise ScheduleError(f"stage {stage} does not follow each input backward by one weight backward")
    done: set[tuple[str, int, int]] = set()  # kind, microbatch, virtual stage
    position = [0] * len(orders)
    last = len(orders) * chunks - 1
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                action = order[position[stage]]
                if not _ready(action, action.chunk * len(orders) + stage, last, done):
                    break
                kind = "B" if action.kind == "I" else action.kind
                done.add((kind, action.microbatch, action.chunk * len(orders) + stage))
                position[stage] += 1
                moved = True
    for stage, order in enumerate(orders):
        if position[stage] < len(order):
            raise ScheduleError(f"stage {stage} waits for ever before {order[position[stage]]}")


_KINDS: tuple[tuple[str, frozenset[ActionKind]], ...] = (
    ("forward", frozenset({"F"})),
    ("backward", frozenset({"B", "I"})),
)


def _ready(action: Action, virtual: int, last: int, done: set[tuple[str, int, int]]) -> bool:
    if action.kind == "F":
        return virtual == 0 or ("F", action.microbatch, virtual - 1) in done
    if action.kind == "W":
        return ("B", action.microbatch, virtual) in done
    after = virtual == last or ("B", action.microbatch, virtual + 1) in done
    return after and ("F", action.microbatch, virtual) in done


def peak_in_flight(order: Order) -> int:
    """The most (microbatch, chunk) pairs whose forward has run and whose backward has not ended."""
    split = {(a.microbatch, a.chunk) for a in order if a.kind == "W"}
    peak = current = 0
    for action in order:
        if action.kind == "F":
            current += 1
            peak = max(peak, current)
        elif action.kind == "W" or (action.kind == "B" and (action.microbatch, action.chunk) not in split):
            current -= 1
    return peak
