"""Several ways to the same end, of which some may have no plan: the cheapest, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from partitioner.errors import CapacityError
from passes.errors import PartitionError

T = TypeVar("T")


def least_of(attempts: Sequence[Callable[[], tuple[float, T]]]) -> tuple[float, T]:
    """The result of the least cost, the first of equals. Raises :func:`nearest` where all attempts raise."""
    best: tuple[float, T] | None = None
    errors: list[PartitionError] = []
    for attempt in attempts:
        try:
            found = attempt()
        except PartitionError as error:
            errors.append(error)
            continue
        best = found if best is None or found[0] < best[0] else best
    if best is None:
        raise nearest(errors)
    return best


def nearest(errors: Sequence[PartitionError]) -> PartitionError:
    """The one that lacks least memory, if any lacks memory; else the first."""
    short = [error for error in errors if isinstance(error, CapacityError)]
    return min(short, key=lambda error: error.missing_bytes) if short else errors[0]
