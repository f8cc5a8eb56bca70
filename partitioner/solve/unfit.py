"""In words, why a batch, a mesh or a schedule leaves no point to search."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from partitioner.constraints import OF_ONE_STAGE
from partitioner.errors import ConstraintError, PlanError
from partitioner.schedule_table import table_of
from partitioner.schedules import SCHEDULES, ScheduleTable, schedule_name
from partitioner.units import plural

if TYPE_CHECKING:
    from partitioner.solve.points import Space


def uneven(space: Space, dp: int) -> str:
    """What to say where the batch does not split over ``dp``."""
    size = space.constraints.group_size
    groups = "" if size is None else f", in groups of {size} samples that meet,"
    return f"the global batch of {space.global_batch}{groups} does not split over dp={dp}"


def why_none(space: Space) -> PlanError | ConstraintError:
    """What to raise where there is no point."""
    asked = space.constraints
    if None not in (asked.pp, asked.dp, asked.tp) and math.prod(asked.pinned.values()) != space.world_size:
        return ConstraintError(asked.too_few(space.world_size))
    schedule = space.constraints.schedule
    size = space.constraints.group_size
    batch = f"global batch of {space.global_batch}" if size is None else f"{space.units} groups of {size} samples"
    fixed: dict[str, Any] = {
        "ep": space.constraints.ep,
        "etp": space.constraints.etp,
        "schedule": schedule and schedule_name(schedule),
        "v": space.constraints.virtual_stages,
        "dp_shard": space.constraints.dp_shard,
    }
    fixed = {**space.constraints.pinned, **{k: v for k, v in fixed.items() if v is not None}}
    pinned = ", ".join(f"{k}={v}" for k, v in fixed.items())
    return PlanError(
        f"no mesh of {plural(space.world_size, 'rank')}{' with ' + pinned if pinned else ''} fits: dp must "
        f"{_shared(space)} the {batch}, {_depth(space)} (the calls that can be placed), tp must "
        f"divide a dim of a weight{_widest(space)}"
        + (f", dp is {len(asked.data_shares)}, as many as data_shares" if asked.data_shares else "")
        + (", dp_shard must divide dp" if space.constraints.dp_shard else "")
        + (", ep x etp must divide dp x cp x tp" if space.constraints.ep or space.constraints.etp else "")
        + (_asked_by(schedule) if schedule else "")
    )


def _shared(space: Space) -> str:
    """What the batch asks of ``dp``."""
    return "divide" if space.even or space.experts else "be at most"


def _depth(space: Space) -> str:
    """What pipelines there can be."""
    pinned = space.constraints
    if (pinned.virtual_stages or 1) > 1:
        return f"pp is more than 1 and pp x virtual_stages at most {space.num_calls}"
    if pinned.schedule not in (None, *OF_ONE_STAGE) and table_of(pinned.schedule) is None:
        return f"pp is more than 1, since {pinned.schedule} is for a pipeline, and at most {space.num_calls}"
    return f"pp is at most {space.num_calls}"


def _widest(space: Space) -> str:
    """How wide tensor groups may be, if that forbids any."""
    forbids = space.constraints.tp is None and space.widest < space.world_size
    return f" and be at most {space.widest}" if forbids else ""


def _asked_by(schedule: str | ScheduleTable) -> str:
    """What a schedule leaves no choice of."""
    table = table_of(schedule)
    if table is not None:
        return (
            f"; the schedule is written for pp={len(table.own.orders)}, {table.num_microbatches} microbatches and "
            f"{len(table.own.ranks)} virtual stages"
        )
    chunks = SCHEDULES[str(schedule)].chunks
    return f"; the schedule has {chunks} virtual stages on each rank" if chunks is not None else ""
