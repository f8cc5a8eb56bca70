"""Pipeline schedules by name: the order in which each rank runs its forwards and backwards, and what it holds.

A schedule is a function of (ranks, microbatches, chunks) that gives each rank's actions in order, and a placement of
the virtual stages; the table :data:`SCHEDULES` has them by name. Adding one adds a function and a line: what is sent
and received, freed and reduced around the actions follows from them in ``partitioner/emit/program.py``, and what it
costs in ``partitioner/schedules/formulas.py``. A schedule may also be written down
(:class:`partitioner.ScheduleTable`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from partitioner.schedules.actions import (
    Action,
    Order,
    ScheduleError,
    Timetable,
    build_looped_placement,
    check_timetable,
    in_flight,
    peak_in_flight,
    v_shaped,
)
from partitioner.schedules.csv_table import ScheduleTable, table_of
from partitioner.schedules.orders import (
    dual_pipe_v,
    gpipe,
    interleaved_1f1b,
    one_forward_one_backward,
    zero_bubble_1p,
    zero_bubble_2p,
    zero_bubble_v,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Order",
    "Schedule",
    "ScheduleError",
    "ScheduleTable",
    "Timetable",
    "build_timetable",
    "chunks_of",
    "in_flight",
    "peak_in_flight",
    "ranks_of",
    "schedule_name",
    "schedule_orders",
]


@dataclass(frozen=True)
class Schedule:
    """``orders(num_ranks, num_microbatches, chunks)`` gives one order per rank; ``placement(num_ranks, chunks)`` the
    rank of each virtual stage; ``chunks``: how many each rank holds, ``None``: as many as are asked for."""

    orders: Callable[[int, int, int], tuple[Order, ...]]
    chunks: int | None = 1
    placement: Callable[[int, int], tuple[int, ...]] = build_looped_placement
    doc: str = ""


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe, doc="all forwards, then all backwards"),
    "1f1b": Schedule(one_forward_one_backward, doc="one forward, one backward: least memory at the same bubble"),
    "interleaved": Schedule(
        interleaved_1f1b, None, doc="1F1B over several virtual stages on each rank: a smaller bubble"
    ),
    "zb-1p": Schedule(zero_bubble_1p, None, doc="1F1B whose bubble backwards for weights fill"),
    "zb-2p": Schedule(zero_bubble_2p, doc="the same with twice the microbatches in flight, and no bubble"),
    "zb-v": Schedule(zero_bubble_v, 2, v_shaped, "two virtual stages there and back: no bubble, 1F1B's memory"),
    "dualpipe-v": Schedule(dual_pipe_v, 2, v_shaped, "forwards of one chunk next to backwards of the other"),
}


def build_timetable(
    schedule: str | ScheduleTable, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> Timetable:
    """Where the virtual stages are and each rank's order, checked. ``chunks``: on each rank, where there is a choice.

    Raises :class:`ScheduleError` for a schedule that does not exist, and numbers with which it cannot run.
    """
    table = table_of(schedule)
    if table is not None:
        return table.timetable(num_ranks, num_microbatches)
    return _build_checked_timetable(_find_schedule(str(schedule)), str(schedule), num_ranks, num_microbatches, chunks)


@lru_cache(maxsize=64)
def _build_checked_timetable(
    schedule: Schedule, name: str, num_ranks: int, num_microbatches: int, chunks: int | None
) -> Timetable:
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"schedule {name!r} needs at least one stage and one microbatch, got {num_ranks} and {num_microbatches}"
        )
    count = _resolve_chunk_count(schedule, name, chunks)
    found = Timetable(schedule.orders(num_ranks, num_microbatches, count), schedule.placement(num_ranks, count))
    check_timetable(found, num_microbatches)
    return found


def _find_schedule(name: str) -> Schedule:
    if name not in SCHEDULES:
        known = ", ".join(sorted(SCHEDULES))
        raise ScheduleError(f"there is no schedule {name!r}; choose one of {known}, or name a file that ends in .csv")
    return SCHEDULES[name]


def _resolve_chunk_count(schedule: Schedule, name: str, asked: int | None) -> int:
    if schedule.chunks is None:
        count = asked or 1
        if count < 1:
            raise ScheduleError(f"schedule {name!r} with {count} virtual stages on each rank; expected at least 1")
        return count
    if asked not in (None, schedule.chunks):
        raise ScheduleError(f"schedule {name!r} has {schedule.chunks} virtual stages on each rank, got {asked}")
    return schedule.chunks


def chunks_of(schedule: str | ScheduleTable, chunks: int | None = None) -> int | None:
    """The virtual stages on each rank; ``None``: not the same on all. Raises :class:`ScheduleError`."""
    table = table_of(schedule)
    if table is None:
        return _resolve_chunk_count(_find_schedule(str(schedule)), str(schedule), chunks)
    counts = {len(stages) for stages in table.own.held}
    return counts.pop() if len(counts) == 1 else None


def ranks_of(schedule: str | ScheduleTable, num_ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """The rank of each virtual stage. Raises :class:`ScheduleError`."""
    table = table_of(schedule)
    if table is not None:
        return table.own.ranks
    known = _find_schedule(str(schedule))
    return known.placement(num_ranks, _resolve_chunk_count(known, str(schedule), chunks))


def schedule_name(schedule: str | ScheduleTable) -> str:
    """What plans and programs call it."""
    return schedule if isinstance(schedule, str) else schedule.name


def schedule_orders(
    schedule: str | ScheduleTable, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> tuple[Order, ...]:
    """Each rank's order, see :func:`build_timetable`."""
    return build_timetable(schedule, num_ranks, num_microbatches, chunks).orders
