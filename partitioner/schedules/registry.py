"""Built-in pipeline schedules by name, and the timetable of a schedule.

A schedule consists of two functions. One returns each rank's order of actions for given numbers of ranks, microbatches
and chunks (virtual stages of a rank). The other returns the placement of the virtual stages on ranks. The table
:data:`SCHEDULES` lists the schedules by name; a new schedule needs one function and one line there. Sends, receives,
frees and reductions are derived from the orders in ``partitioner/emit/program.py``, and the costs in
``partitioner/schedules/formulas.py``. A user may also write a schedule as a table (:class:`partitioner.ScheduleTable`).
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
    """Definition of a built-in pipeline schedule.

    ``orders(num_ranks, num_microbatches, chunks)`` returns one order of actions (forwards and backwards of one
    microbatch) per rank. ``placement(num_ranks, chunks)`` returns the rank of each virtual stage. ``chunks``: number of
    virtual stages per rank; ``None``: the user chooses. ``doc``: a short description for the user.
    """

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
    """Return the timetable of ``schedule``, checked for completeness and deadlocks: each pipeline rank's order of
    actions (forwards and backwards of one microbatch), and the rank of each virtual stage. ``schedule``: the name of a
    built-in schedule, a path ending in ``.csv``, or a table. ``num_ranks``, ``num_microbatches``: numbers of pipeline
    ranks and of microbatches. ``chunks``: number of virtual stages per rank; ``None``: the default of the schedule.

    Raises :class:`ScheduleError` if the schedule does not exist or does not support these numbers.
    """
    table = table_of(schedule)
    if table is not None:
        return table.timetable(num_ranks, num_microbatches)
    return _build_checked_timetable(_find_schedule(str(schedule)), str(schedule), num_ranks, num_microbatches, chunks)


@lru_cache(maxsize=64)
def _build_checked_timetable(
    schedule: Schedule, name: str, num_ranks: int, num_microbatches: int, chunks: int | None
) -> Timetable:
    """Return the timetable of the built-in ``schedule``, checked for completeness and deadlocks. ``name``: name of the
    schedule, for errors. ``num_ranks``, ``num_microbatches``: numbers of pipeline ranks and of microbatches.
    ``chunks``: number of virtual stages on each rank; ``None``: the default of the schedule. Raise ``ScheduleError`` if
    a number is not possible."""
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"schedule {name!r} needs at least one stage and one microbatch, got {num_ranks} and {num_microbatches}"
        )
    count = _resolve_chunk_count(schedule, name, chunks)
    found = Timetable(schedule.orders(num_ranks, num_microbatches, count), schedule.placement(num_ranks, count))
    check_timetable(found, num_microbatches)
    return found


def _find_schedule(name: str) -> Schedule:
    """Return the built-in schedule that is called ``name``, such as ``1f1b``. Raise :class:`ScheduleError` if there is
    none."""
    if name not in SCHEDULES:
        known = ", ".join(sorted(SCHEDULES))
        raise ScheduleError(f"there is no schedule {name!r}; choose one of {known}, or name a file that ends in .csv")
    return SCHEDULES[name]


def _resolve_chunk_count(schedule: Schedule, name: str, asked: int | None) -> int:
    """Return the number of virtual stages on each rank: the number that ``schedule`` fixes or, if it fixes none,
    ``asked``, the number that the user requests (``None``: 1). Raise ``ScheduleError`` if ``asked`` is not possible.
    ``name``: name of the schedule, for errors."""
    if schedule.chunks is None:
        count = asked or 1
        if count < 1:
            raise ScheduleError(f"schedule {name!r} with {count} virtual stages on each rank; expected at least 1")
        return count
    if asked not in (None, schedule.chunks):
        raise ScheduleError(f"schedule {name!r} has {schedule.chunks} virtual stages on each rank, got {asked}")
    return schedule.chunks


def chunks_of(schedule: str | ScheduleTable, chunks: int | None = None) -> int | None:
    """Return the number of virtual stages per pipeline rank under ``schedule`` (a name, a path ending in ``.csv``, or a
    table). Return ``None`` if a table gives the ranks different numbers. ``chunks``: the number that the user requests;
    ``None``: the default of the schedule. Raise :class:`ScheduleError` if the schedule does not exist or does not
    support this number."""
    table = table_of(schedule)
    if table is None:
        return _resolve_chunk_count(_find_schedule(str(schedule)), str(schedule), chunks)
    counts = {len(stages) for stages in table.own.held}
    return counts.pop() if len(counts) == 1 else None


def ranks_of(schedule: str | ScheduleTable, num_ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """Return the pipeline rank of each virtual stage under ``schedule`` (a name, a path ending in ``.csv``, or a
    table). ``num_ranks``: number of pipeline ranks. ``chunks``: number of virtual stages per rank; ``None``: the
    default of the schedule. Raise :class:`ScheduleError` if the schedule does not exist or does not support ``chunks``.
    """
    table = table_of(schedule)
    if table is not None:
        return table.own.ranks
    known = _find_schedule(str(schedule))
    return known.placement(num_ranks, _resolve_chunk_count(known, str(schedule), chunks))


SEARCHED = {"1f1b": (1,), "zb-1p": (1,)}  # searched, and proven, if none is fixed; with their virtual stages


def schedule_name(schedule: str | ScheduleTable) -> str:
    """Return the name under which plans and programs refer to ``schedule``: ``schedule`` itself if it is a name, or the
    name of the table."""
    return schedule if isinstance(schedule, str) else schedule.name


def schedule_orders(
    schedule: str | ScheduleTable, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> tuple[Order, ...]:
    """Return the order of actions (forwards and backwards of one microbatch) of each of ``num_ranks`` pipeline ranks
    for ``num_microbatches`` microbatches, checked for completeness and deadlocks. ``schedule``: the name of a built-in
    schedule, a path ending in ``.csv``, or a table. ``chunks``: number of virtual stages per rank; ``None``: the
    default of the schedule. Raise :class:`ScheduleError` if the schedule does not exist or does not support these
    numbers."""
    return build_timetable(schedule, num_ranks, num_microbatches, chunks).orders
