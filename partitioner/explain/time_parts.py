"""The parts of a step time: their names, their shares, and by which of them two plans differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from partitioner.plan import Plan
from partitioner.units import seconds_text

KINDS = {
    "compute": "computation",
    "recompute": "recomputation",
    "tp_communication": "communication inside layers",
    "pp_communication": "sends between pipeline stages",
    "bubble": "pipeline bubble",
    "contention": "contention for a machine's cores",
    "reduction": "exposed gradient reduction",
    "optimizer": "optimizer update",
    "offload": "transfers to and from host memory",
}
_GROUPS = {  # what limits a step -> its kinds of time
    "computation": ("compute",),
    "optimizer update": ("optimizer",),
    "exposed communication": ("tp_communication", "pp_communication", "reduction", "offload"),
    "recomputation": ("recompute",),
    "pipeline bubble": ("bubble",),
    "contention for a machine's cores": ("contention",),
}
_RESIDUE = 1e-9  # of a step: differences of sums, no time
_SAME = 1e-3  # of a step: less is no difference


def time_shares(plan: Plan) -> list[tuple[str, float]]:
    """Return pairs of activity and fraction of the step time, the largest first."""
    breakdown = plan.estimate.breakdown
    total = sum(breakdown.values())
    known = {kind for kinds in _GROUPS.values() for kind in kinds}
    groups = _GROUPS | {KINDS.get(kind, kind): (kind,) for kind in breakdown if kind not in known}
    shares = {name: sum(breakdown.get(kind, 0.0) for kind in kinds) / total for name, kinds in groups.items() if total}
    return sorted(((n, share) for n, share in shares.items() if share > _RESIDUE), key=lambda item: -item[1])


def without_residue(breakdown: Mapping[str, float]) -> dict[str, float]:
    """Return ``breakdown`` (seconds by kind) without entries so small that they are only rounding residue."""
    total = sum(breakdown.values())
    return {kind: seconds for kind, seconds in breakdown.items() if seconds > _RESIDUE * total}


def list_time_changes(old: Mapping[str, float], new: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return (kind, seconds of ``new`` less those of ``old``) for each kind of time that changed between two breakdowns
    (seconds by kind) by more than a thousandth of the step, the largest change first."""
    least_s = _SAME * sum(old.values())
    old, new = without_residue(old), without_residue(new)
    changes = {kind: new.get(kind, 0.0) - old.get(kind, 0.0) for kind in {**old, **new}}
    return sorted(((k, s) for k, s in changes.items() if abs(s) > least_s), key=lambda item: -abs(item[1]))


def time_changes(old: Mapping[str, float], new: Mapping[str, float], most: int = 4) -> Iterator[str]:
    """Yield one line for each kind of time that changed between two breakdowns (seconds by kind), the largest change
    first. ``most``: largest number of lines."""
    changes = list_time_changes(old, new)[:most]
    old, new = without_residue(old), without_residue(new)
    for kind, change in changes:
        was, now = seconds_text(old.get(kind, 0.0)), seconds_text(new.get(kind, 0.0))
        yield f"{KINDS.get(kind, kind)}: {_format_change(change)} ({was} → {now})"


def format_time_changes(old: Mapping[str, float], new: Mapping[str, float], most: int = 3) -> str:
    """Return the largest changes between two breakdowns in one clause, for example ``recomputation +145 ms, pipeline
    bubble −48 ms, the rest +4 ms``; empty if nothing changed. ``most``: largest number of kinds by name. The others are
    the rest, with which the changes add up."""
    changes = list_time_changes(old, new)[:most]
    told = [f"{KINDS.get(kind, kind)} {_format_change(seconds)}" for kind, seconds in changes]
    rest_s = sum(new.values()) - sum(old.values()) - sum(seconds for _, seconds in changes)
    if told and abs(rest_s) > _SAME * sum(old.values()):
        told.append(f"the rest {_format_change(rest_s)}")
    return ", ".join(told)


def _format_change(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '−'}{seconds_text(abs(seconds))}"
