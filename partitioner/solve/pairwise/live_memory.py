"""Memory limits over time for pairwise assignment problems (one choice per node at minimum cost): the nodes that are in
memory at the same time may together use at most a limit.

Only maximal sets of such nodes matter, which are those just before a node's memory is freed. They are called *rows*.
The members of a row are never listed, because a model of 30,000 operators would have millions. The memory of each row
is computed as a cumulative sum of differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.pairwise.presolve import Choices, Vector


@dataclass(frozen=True)
class MemoryConstraint:
    """A limit on the total memory of the nodes of an assignment problem (one choice for each node) that are in memory
    at the same time. ``usages[i]``: bytes of each choice of node i. ``intervals[i]``: the half-open interval of time,
    in integer steps, in which node i takes these bytes. ``limit``: bytes.
    """

    intervals: Sequence[tuple[int, int]]
    usages: Sequence[Vector]
    limit: float

    def peak(self, choice: Sequence[int]) -> float:
        """Return the largest total memory in bytes at any time under the assignment ``choice``: the index of the choice
        of each node of the assignment problem."""
        change: dict[int, float] = {}
        for (start, end), usage, p in zip(self.intervals, self.usages, choice, strict=True):
            if start < end:
                change[start] = change.get(start, 0.0) + float(usage[p])
                change[end] = change.get(end, 0.0) - float(usage[p])
        return float(np.cumsum([0.0, *(change[t] for t in sorted(change))]).max())


@dataclass(frozen=True)
class Stretch:
    """The memory of one node of an assignment problem (one choice per node at minimum cost) over time. Time is divided
    into rows: a row is a maximal set of nodes that are in memory together. The memory of the node is constant within
    segments of consecutive rows.

    ``usage[p, s]``: bytes of choice p in segment s, which consists of the rows ``breaks[s]`` up to, but without,
    ``breaks[s + 1]``."""

    breaks: NDArray[np.intp]
    usage: NDArray[np.float64]

    @property
    def lengths(self) -> NDArray[np.intp]:
        return np.diff(self.breaks)

    def worst(self, profile: Vector) -> Vector:
        """Return the maximum of ``profile`` within each segment of this node of an assignment problem, one number per
        segment. A segment is a range of consecutive rows in which the node's memory is constant; a row is a maximal set
        of nodes that are in memory together. ``profile``: a number for each row, such as its price or total memory."""
        first, last = int(self.breaks[0]), int(self.breaks[-1])
        worst: Vector = np.maximum.reduceat(profile[first:last], self.breaks[:-1] - first)
        return worst

    def at(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the memory of each choice of this node of an assignment problem in each of ``rows``, shape ``[choices,
        rows]``. ``rows``: indices of rows; a row is a maximal set of nodes that are in memory together."""
        segment = np.searchsorted(self.breaks, rows, side="right") - 1
        inside = (segment >= 0) & (segment < self.usage.shape[1])
        return np.where(inside, self.usage[:, np.clip(segment, 0, self.usage.shape[1] - 1)], 0.0)


class Usage:
    """The memory of many nodes of an assignment problem (one choice per node at minimum cost) by row, in flat arrays. A
    row is a maximal set of nodes that are in memory together.

    The choices of all nodes are numbered consecutively; ``starts[r]`` is the number of the first choice of node r.
    ``stretches``: node -> its memory in each row, for each of its choices. ``num_choices``, ``num_rows``: the numbers
    of choices and of rows."""

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
        """Return the price of the memory of each choice of the nodes of an assignment problem, shape ``[choices]``: the
        sum, over all rows, of the choice's memory in the row times ``prices[row]``. A row is a maximal set of nodes
        that are in memory together. The choices of all nodes are numbered consecutively. ``prices``: the price of one
        byte of memory in each row."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        weights = self.amount * (total[self.end] - total[self.begin])
        return np.bincount(self.choice, weights, minlength=self.num_choices).astype(np.float64)

    def profile(self, chosen: NDArray[np.intp]) -> Vector:
        """Return the total memory in each row under an assignment (one choice per node), shape ``[rows]``. A row is a
        maximal set of nodes that are in memory together. ``chosen``: for each node, the number of its choice, where the
        choices of all nodes are numbered consecutively."""
        taken = np.zeros(self.num_choices, bool)
        taken[chosen] = True
        entry = taken[self.choice].nonzero()[0]
        change = np.bincount(self.begin[entry], self.amount[entry], minlength=self.num_rows + 1)
        change -= np.bincount(self.end[entry], self.amount[entry], minlength=self.num_rows + 1)
        return np.cumsum(change)[:-1].astype(np.float64)

    def at(self, row: int) -> Vector:
        """Return the memory in one row of each choice of the nodes of an assignment problem, shape ``[choices]``. The
        choices of all nodes are numbered consecutively. ``row``: the index of a row, a maximal set of nodes that are in
        memory together."""
        live = ((self.begin <= row) & (row < self.end)).nonzero()[0]
        return np.bincount(self.choice[live], self.amount[live], minlength=self.num_choices).astype(np.float64)

    def total(self) -> Vector:
        """Return the memory, summed over all rows, of each choice of the nodes of an assignment problem, shape
        ``[choices]``. The choices of all nodes are numbered consecutively. A row is a maximal set of nodes that are in
        memory together."""
        weights = self.amount * (self.end - self.begin)
        return np.bincount(self.choice, weights, minlength=self.num_choices).astype(np.float64)


def build_memory_stretches(
    memory: MemoryConstraint, roots: Sequence[int], maps: Sequence[Choices]
) -> tuple[dict[int, Stretch], Vector, Vector]:
    """Return the memory of an assignment problem (one choice per node at minimum cost) by row. A row is a maximal set
    of nodes that are in memory together. A root is a node whose choice decides the choices of other nodes; its memory
    includes theirs.

    The result has three values: root node -> the part of its memory that depends on its choice; the bytes of the limit
    that are left in each row; and the bytes that are used in each row under every assignment. ``memory``: the limit,
    and the memory of each choice. ``roots[i]``: the root of node i. ``maps[i]``: the choice of node i for each choice
    of ``roots[i]``."""
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
