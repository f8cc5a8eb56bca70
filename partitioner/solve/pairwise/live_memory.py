"""Memory limits over time: the nodes that are live at any time use at most a limit together.

Only maximal live sets matter, which are those after which a node dies: they are the *rows*. Their members are never
listed, because a model of 30,000 operators would have millions. A profile over the rows is a sum of differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.pairwise.presolve import Choices, Vector


@dataclass(frozen=True)
class MemoryConstraint:
    """A limit on the total memory of the nodes that are live at the same time. ``usages[i]``: bytes of each choice of
    node i during the half-open interval ``intervals[i]``."""

    intervals: Sequence[tuple[int, int]]
    usages: Sequence[Vector]
    limit: float

    def peak(self, choice: Sequence[int]) -> float:
        """Return the largest total memory at any time under the assignment ``choice``."""
        change: dict[int, float] = {}
        for (start, end), usage, p in zip(self.intervals, self.usages, choice, strict=True):
            if start < end:
                change[start] = change.get(start, 0.0) + float(usage[p])
                change[end] = change.get(end, 0.0) - float(usage[p])
        return float(np.cumsum([0.0, *(change[t] for t in sorted(change))]).max())


@dataclass(frozen=True)
class Stretch:
    """What one root takes: ``usage[p, s]`` in segment s, which are rows ``breaks[s]`` up to ``breaks[s + 1]``."""

    breaks: NDArray[np.intp]
    usage: NDArray[np.float64]

    @property
    def lengths(self) -> NDArray[np.intp]:
        return np.diff(self.breaks)

    def worst(self, profile: Vector) -> Vector:
        """The maximum of ``profile`` in each segment."""
        first, last = int(self.breaks[0]), int(self.breaks[-1])
        worst: Vector = np.maximum.reduceat(profile[first:last], self.breaks[:-1] - first)
        return worst

    def at(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """``usage[p, row]`` at each of ``rows``."""
        segment = np.searchsorted(self.breaks, rows, side="right") - 1
        inside = (segment >= 0) & (segment < self.usage.shape[1])
        return np.where(inside, self.usage[:, np.clip(segment, 0, self.usage.shape[1] - 1)], 0.0)


class Usage:
    """The stretches of many roots in flat arrays; ``starts[r]`` is where the choices of root r begin."""

    def __init__(
        self, stretches: Mapping[int, Stretch], starts: Mapping[int, int], num_choices: int, num_rows: int
    ) -> None:
        self.num_choices, self.num_rows = num_choices, num_rows
        choice, begin, end = ([np.empty(0, np.intp)] for _ in range(3))
        amount = [np.zeros(0)]
        for root, stretch in stretches.items():
            p, segment = stretch.usage.nonzero()
            choice.append(starts[root] + p)
            begin.append(stretch.breaks[segment])
            end.append(stretch.breaks[segment + 1])
            amount.append(stretch.usage[p, segment])
        self.choice, self.begin, self.end = np.concatenate(choice), np.concatenate(begin), np.concatenate(end)
        self.amount = np.concatenate(amount)

    def priced(self, prices: Vector) -> Vector:
        """Return for each choice the cost of its memory, given a price for each row (maximal live set)."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        weights = self.amount * (total[self.end] - total[self.begin])
        return np.bincount(self.choice, weights, minlength=self.num_choices).astype(np.float64)

    def profile(self, chosen: NDArray[np.intp]) -> Vector:
        """The memory per row of an assignment, given as places in the array of all choices."""
        taken = np.zeros(self.num_choices, bool)
        taken[chosen] = True
        entry = taken[self.choice].nonzero()[0]
        change = np.bincount(self.begin[entry], self.amount[entry], minlength=self.num_rows + 1)
        change -= np.bincount(self.end[entry], self.amount[entry], minlength=self.num_rows + 1)
        return np.cumsum(change)[:-1].astype(np.float64)

    def at(self, row: int) -> Vector:
        """What each choice takes in ``row``."""
        live = ((self.begin <= row) & (row < self.end)).nonzero()[0]
        return np.bincount(self.choice[live], self.amount[live], minlength=self.num_choices).astype(np.float64)

    def total(self) -> Vector:
        """What each choice takes, summed over the rows."""
        weights = self.amount * (self.end - self.begin)
        return np.bincount(self.choice, weights, minlength=self.num_choices).astype(np.float64)


def build_memory_stretches(
    memory: MemoryConstraint, roots: Sequence[int], maps: Sequence[Choices]
) -> tuple[dict[int, Stretch], Vector, Vector]:
    """Per root what its followers take; the limit left in every row by what is taken whatever is chosen; and that.

    ``maps[i]`` is the choice of node i for each choice of ``roots[i]``.
    """
    live = [i for i, (start, end) in enumerate(memory.intervals) if start < end and np.any(memory.usages[i])]
    events = sorted(e for i in live for e in ((memory.intervals[i][0], 1), (memory.intervals[i][1], 0)))
    times = np.array([a[0] for a, b in pairwise(events) if a[1] and not b[1]])  # the starts before an end
    pieces: dict[int, list[tuple[int, int, Vector]]] = {}
    fixed = np.zeros(len(times) + 1)
    for i in live:
        first, last = np.searchsorted(times, memory.intervals[i])
        if first == last:
            continue
        usage = np.asarray(memory.usages[i], np.float64)[maps[i]]
        least = float(usage.min())
        fixed[first] += least
        fixed[last] -= least
        if usage.max() > least:
            pieces.setdefault(roots[i], []).append((int(first), int(last), usage - least))
    found = {}
    for root, parts in pieces.items():
        breaks = np.unique([b for first, last, _ in parts for b in (first, last)])
        change = np.zeros((len(parts[0][2]), len(breaks)))
        at = {int(b): s for s, b in enumerate(breaks)}
        for first, last, usage in parts:
            change[:, at[first]] += usage
            change[:, at[last]] -= usage
        found[root] = Stretch(breaks, np.cumsum(change, axis=1)[:, :-1])
    taken = np.cumsum(fixed)[:-1]
    return found, memory.limit - taken, taken
