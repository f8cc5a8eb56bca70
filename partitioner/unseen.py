"""In words, why a search did not look at what somebody asks about, as far as a plan says without its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partitioner.constraints import OF_POINT, Constraints
from partitioner.errors import ConstraintError
from partitioner.plan import Limits, Plan
from partitioner.requests import check_request
from partitioner.schedules import schedule_name
from partitioner.solve.point import Point
from partitioner.solve.points import SEARCHED, Space, points, widest_searched
from passes.errors import PartitionError


def shown(asked: Mapping[str, Any]) -> str:
    """``tp=8, pp=2``."""
    return ", ".join(f"{name}={value}" for name, value in asked.items())


def check_asked(plan: Plan, merged: Constraints) -> None:
    """Raise what ``partition`` does where ``merged``, the plan's constraints with others in their place, leave nothing
    to search."""
    train = plan.objective == "train"
    check_request(plan.topology, merged, plan.optimizer, train)
    merged.check(plan.world_size, plan.global_batch or None)
    limits = plan.certificate.limits
    calls = limits.calls if limits is not None else sum(stage.num_calls for stage in plan.estimate.stages)
    if calls and (merged.pp or 1) > calls:
        raise ConstraintError(f"the model has {calls} calls that stages can hold, each at least one")
    if limits is not None and plan.global_batch:
        points(_space(plan, limits, merged))


def without_row(plan: Plan, asked: Mapping[str, Any]) -> bool:
    """Whether the search had candidates that are as ``asked``, of those that the certificate only counts."""
    pinned = {name: value for name, value in asked.items() if name in OF_POINT}
    if not plan.certificate.left or pinned != asked:
        return False
    return any(all(_of(point, name) == value for name, value in pinned.items()) for point in _searched(plan))


def _of(point: Point, name: str) -> Any:
    if name == "schedule":
        return schedule_name(point.schedule)
    return point.expert_tp if name == "etp" else getattr(point, name)


def _searched(plan: Plan) -> list[Point]:
    """The points that the search began with; none where the plan does not say of what."""
    limits = plan.certificate.limits
    if limits is None or not plan.global_batch:
        return []
    try:
        return points(_space(plan, limits, plan.constraints))
    except PartitionError:
        return []


def _space(plan: Plan, limits: Limits, constraints: Constraints) -> Space:
    return Space(
        plan.topology,
        plan.global_batch,
        limits.calls,
        frozenset(limits.dims),
        constraints,
        plan.objective == "train",
        limits.experts,
        limits.length,
        limits.repeated,
        limits.even,
    )


def why_unseen(plan: Plan, asked: Mapping[str, Any], merged: Constraints) -> str:
    """Why no candidate is as ``asked``, though some could be."""
    fixed = {n: v for n, v in plan.constraints.given.items() if n != "ahead"}
    against = {n: v for n, v in fixed.items() if n in asked and v != asked[n]}
    beyond = merged.planned_only
    if against:
        return f"you fixed {shown(against)}"
    if (alone := _only_where_fixed(plan, asked)) is not None:
        return alone
    if "schedule" in asked and plan.constraints.schedule is None and not plan.constraints.ahead:
        if plan.objective != "train":
            return "for inference, which has no backward, it tries 1f1b alone, and others where they are fixed"
        searched = " and ".join(SEARCHED)
        return f"of the schedules with one stage on each rank it tries {searched}, and others where they are fixed"
    if beyond and not plan.constraints.ahead:
        return f"this version plans but does not execute {', '.join(beyond)}, and was not told to look ahead"
    beside = {n: v for n, v in asked.items() if n not in OF_POINT}
    if beside:
        return f"it does not vary {', '.join(beside)}: every layout has the best choice, or the one that you fixed"
    return f"with {shown(fixed)} fixed, no layout has it" if fixed else "it tries that only where it is fixed"


def _only_where_fixed(plan: Plan, asked: Mapping[str, Any]) -> str | None:
    """What of ``asked`` is tried only for those who fix it."""
    pinned, limits = plan.constraints, plan.certificate.limits
    widest = widest_searched(plan.topology, pinned)
    if pinned.tp is None and asked.get("tp", 1) > widest:
        return f"tp of more than {widest} ranks is tried only where it is fixed"
    if limits is not None and pinned.cp is None and asked.get("cp", 1) not in {p.cp for p in _searched(plan)}:
        if not limits.length:
            return "cp shares sequences, and no attention was found in the model's graph"
        return f"for sequences of {limits.length:,} tokens cp={asked['cp']} is tried only where it is fixed"
    if pinned.leaves_schedule and (asked.get("virtual_stages") or 1) > 1:
        return "several virtual stages on a rank are tried for the best meshes alone, where that may be faster"
    if pinned.dp_shard is None and asked.get("dp_shard"):
        return "states are shared by all ranks of dp, or by as many as fill nodes; others only where dp_shard is fixed"
    return None
