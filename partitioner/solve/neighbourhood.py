"""Improve a large assignment by solving a part of it to the optimum while the rest stays, again and again.

A part is grown over the tables, from a root chosen at random, up to a number of table entries that follows how long the
last part took. Of its memory rows only those that bind are needed: they are added as solutions break them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.localsearch import State
from partitioner.solve.presolve import InfeasibleError, Table, Vector

# (costs, tables, rows of (usage, limit), seconds) -> (choice, bound), or None where nothing was found in time
Exact = Callable[
    [list[Vector], list[tuple[int, int, Table]], list[tuple[dict[int, Vector], float]], float],
    tuple[list[int], float] | None,
]

_FIRST_ROWS, _MORE_ROWS, _ROUNDS = 24, 16, 12
_MOST_ENTRIES = 100_000
_PART_SECONDS = 2.0  # of a part that is neither too small to help nor too large to be solved often


def solve_part(
    state: State, part: Sequence[int], exact: Exact, until: float, bound: list[float] | None = None
) -> bool | None:
    """Gives ``part`` its best choices beside the rest. Whether that is cheaper; ``None`` if it was not solved.

    ``bound``, for a part that is everything, receives lower bounds of the cost.
    """
    place = {node: k for k, node in enumerate(part)}
    costs, tables, before = [], list[tuple[int, int, Table]](), 0.0
    for node in part:
        cost = state.costs[node].copy()
        for other, table in state.near[node]:
            if other not in place:
                cost += table[state.choice[other]]
            elif node < other:
                tables.append((place[node], place[other], table.T))
                before += float(table[state.choice[other], state.choice[node]])
        before += float(cost[state.choice[node]])
        costs.append(cost)
    free, most = state.room - state.profile, np.zeros(len(state.room) + 1)
    members = [node for node in part if node in state.stretches]
    for node in members:
        stretch = state.stretches[node]
        now = stretch.usage[state.choice[node]]
        free[stretch.breaks[0] : stretch.breaks[-1]] += np.repeat(now, stretch.lengths)
        most[stretch.breaks] += np.diff(stretch.usage.max(axis=0), prepend=0.0, append=0.0)
    rows = _worst(np.cumsum(most)[:-1] - free, _FIRST_ROWS)
    for _ in range(_ROUNDS):
        left = until - time.perf_counter()
        if left < 0.1:
            return None
        usage = {node: state.stretches[node].at(rows) for node in members}
        limits = [
            ({place[node]: u[:, k] for node, u in usage.items() if u[:, k].any()}, float(free[row]))
            for k, row in enumerate(rows.tolist())
        ]
        try:
            answer = exact(costs, tables, limits, left)
        except InfeasibleError:  # by rounding alone: the present choices are allowed
            return None
        if answer is None:
            return None
        if bound is not None:
            bound.append(answer[1])
        old = {node: state.choice[node] for node in part}
        for node, to in zip(part, answer[0], strict=True):
            state.move(node, to)
        if state.overflow <= 0.0:
            after = sum(float(c[p]) for c, p in zip(costs, answer[0], strict=True))
            after += sum(float(t[answer[0][i], answer[0][j]]) for i, j, t in tables)
            if after <= before:
                return after < before * (1 - 1e-9)
            more = np.empty(0, np.intp)
        else:
            more = _worst(state.profile - state.room, _MORE_ROWS)
        for node, to in old.items():
            state.move(node, to)
        if not len(more):
            return False
        rows = np.union1d(rows, more)
    return None


def _worst(over: Vector, count: int) -> NDArray[np.intp]:
    """The row that is exceeded by most in each of up to ``count`` stretches of the rows that are exceeded."""
    rows = (over > 0).nonzero()[0]
    if not len(rows):
        return rows
    return np.array([part[over[part].argmax()] for part in np.array_split(rows, min(count, len(rows)))])


class Neighbourhoods:
    """Parts of a state, of ``size`` table entries or so."""

    def __init__(self, state: State, rng: np.random.Generator, size: int) -> None:
        self.state, self.rng, self.size = state, rng, size
        self._untried: list[int] = []

    def grow(self) -> list[int]:
        """A connected part around a root that has not been a centre for longest."""
        if not self._untried:
            self._untried = self.rng.permutation([i for i in self.state.nodes if len(self.state.costs[i]) > 1]).tolist()
        part, entries = dict[int, None](), 0
        edge, seen = [self._untried.pop()], set[int]()
        if self.rng.random() < 0.5:
            edge += self._sharing(edge[0])
        while edge and entries < self.size:
            node = edge.pop(int(self.rng.integers(len(edge))))
            if node in seen:
                continue
            seen.add(node)
            part[node] = None
            entries += len(self.state.costs[node])
            entries += sum(t.size for other, t in self.state.near[node] if other in part)
            near = [other for other, _ in self.state.near[node] if other not in seen]
            if len(near) > 20:  # a hub joins everything: only some of its neighbours
                near = self.rng.choice(near, 20, replace=False).tolist()
            edge += near
        return list(part)

    def _sharing(self, node: int) -> list[int]:
        """Some of the nodes that use memory at the fullest time of ``node``."""
        stretches = self.state.stretches
        if node not in stretches:
            return []
        first, last = stretches[node].breaks[[0, -1]]
        row = first + int((self.state.profile - self.state.room)[first:last].argmax())
        live = [i for i, s in stretches.items() if i != node and s.breaks[0] <= row < s.breaks[-1]]
        return [int(i) for i in self.rng.permutation(live)[:20]]

    def improve(self, exact: Exact, until: float) -> None:
        """Solves parts until the time is up."""
        while time.perf_counter() < until - 0.2:
            start = time.perf_counter()
            found = solve_part(self.state, self.grow(), exact, min(until, start + 2 * _PART_SECONDS))
            took = time.perf_counter() - start
            if found is None or took > _PART_SECONDS:
                self.size = max(500, int(self.size * 0.7))
            elif took < _PART_SECONDS / 2:
                self.size = min(int(self.size * 1.05) + 1, _MOST_ENTRIES)
