"""Pipeline orders that the registry of schedules does not have."""

from __future__ import annotations

from partitioner.schedules.actions import Action
from partitioner.schedules.registry import SCHEDULES


def zero_bubble(num_stages: int, num_microbatches: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """Weight gradients last: each stage sends input gradients back as early as it can."""
    orders = []
    for order in SCHEDULES["1f1b"].orders(num_stages, num_microbatches, 1):
        early = [Action("I" if a.kind == "B" else a.kind, a.microbatch) for a in order]
        orders.append((*early, *(Action("W", i) for i in range(num_microbatches))))
    return tuple(orders)


def two_chunks(num_stages: int, num_microbatches: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """GPipe over two virtual stages on each rank."""
    runs = range(num_microbatches)
    order = [Action("F", i, c) for c in (0, 1) for i in runs] + [Action("B", i, c) for c in (1, 0) for i in runs]
    return (tuple(order),) * num_stages
