"""The parts of a step time (such as computation and pipeline bubble): their names, their fractions of the step, and the
parts in which two plans differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from partitioner.plan import Plan
from partitioner.units import list_distinct_seconds_texts, seconds_text

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
_GROUPS = {  # what limits a step, in words -> the kinds of time that belong to it
    "computation": ("compute",),
    "optimizer update": ("optimizer",),
    "exposed communication": ("tp_communication", "pp_communication", "reduction", "offload"),
    "recomputation": ("recompute",),
    "pipeline bubble": ("bubble",),
    "contention for a machine's cores": ("contention",),
}
_RESIDUE = 1e-9  # fraction of a step: less is a rounding error of sums
_SAME = 1e-3  # fraction of a step: less is no difference
_NOTED_REST = 0.05  # fraction of a difference of two steps: a smaller rest of it is left out


def time_shares(plan: Plan) -> list[tuple[str, float]]:
    """Return pairs (activity, fraction of the step time) of ``plan``, the largest fraction first. An activity is a text
    such as ``computation`` or ``exposed communication``.
    """
    breakdown = plan.estimate.breakdown
    total = sum(breakdown.values())
    known = {kind for kinds in _GROUPS.values() for kind in kinds}
    groups = _GROUPS | {KINDS.get(kind, kind): (kind,) for kind in breakdown if kind not in known}
    shares = {name: sum(breakdown.get(kind, 0.0) for kind in kinds) / total for name, kinds in groups.items() if total}
    return sorted(((n, share) for n, share in shares.items() if share > _RESIDUE), key=lambda item: -item[1])


def without_residue(breakdown: Mapping[str, float]) -> dict[str, float]:
    """Return ``breakdown``, a dict of kind of time -> seconds, without entries so small that they are only rounding
    errors.
    """
    total = sum(breakdown.values())
    return {kind: seconds for kind, seconds in breakdown.items() if seconds > _RESIDUE * total}


def list_time_changes(old: Mapping[str, float], new: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return pairs (kind of time, change in seconds from ``old`` to ``new``), the largest change first. Changes of at
    most a thousandth of the step of ``old`` are left out. ``old``, ``new``: the seconds of two steps by kind.
    """
    least_s = _SAME * sum(old.values())
    old, new = without_residue(old), without_residue(new)
    changes = {kind: new.get(kind, 0.0) - old.get(kind, 0.0) for kind in {**old, **new}}
    return sorted(((k, s) for k, s in changes.items() if abs(s) > least_s), key=lambda item: -abs(item[1]))


def time_changes(old: Mapping[str, float], new: Mapping[str, float], most: int = 4) -> Iterator[str]:
    """Yield a text for each kind of time that differs between two steps, such as ``pipeline bubble: +48 ms (10 ms → 58
    ms)``, the largest change first. ``old``, ``new``: the seconds of the two steps by kind. ``most``: largest number of
    texts.
    """
    changes = list_time_changes(old, new)[:most]
    old, new = without_residue(old), without_residue(new)
    for kind, change in changes:
        was, now = list_distinct_seconds_texts(old.get(kind, 0.0), new.get(kind, 0.0))
        yield f"{KINDS.get(kind, kind)}: {_format_change(change)} ({was} → {now})"


def format_time_changes(old: Mapping[str, float], new: Mapping[str, float], most: int = 3) -> str:
    """Return the largest changes between two steps in one clause, for example ``recomputation +145 ms, pipeline bubble
    −48 ms, the rest +4 ms``; empty if nothing changed. ``old``, ``new``: the seconds of the two steps by kind of time.
    ``most``: number of kinds that are listed by name; more are listed if the rest would be larger than one of them. The
    rest is the sum of the kinds that are not listed."""
    changes, total_s = list_time_changes(old, new), sum(new.values()) - sum(old.values())
    rests = [total_s - sum(seconds for _, seconds in changes[:count]) for count in range(len(changes) + 1)]
    while most < len(changes) and abs(rests[most]) >= abs(changes[most - 1][1]):
        most += 1  # the rest must not be larger than what is listed
    told = [f"{KINDS.get(kind, kind)} {_format_change(seconds)}" for kind, seconds in changes[:most]]
    rest_s = rests[min(most, len(changes))]
    if told and abs(rest_s) > min(_SAME * sum(old.values()), _NOTED_REST * abs(total_s)):
        told.append(f"the rest {_format_change(rest_s)}")
    return ", ".join(told)


def _format_change(seconds: float) -> str:
    """Return ``seconds``, a difference between two times, as text with a sign, such as ``+145 ms``."""
    return f"{'+' if seconds > 0 else '−'}{seconds_text(abs(seconds))}"
