"""Improve an assignment by solving a part of it, or all, to the optimum with an exact solver while the rest stays.

Of its memory rows only those that bind are needed: they are added as solutions break them (a cutting-plane method).
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

_FIRST_ROWS, _MORE_ROWS, _ROUNDS = 24, 16, 30


def solve_part(
    state: State, part: Sequence[int], exact: Exact, until: float, bound: list[float] | None = None
) -> bool | None:
    """Gives ``part`` its best choices beside the rest. Whether that is cheaper; ``None`` if it was not solved.

    ``bound``, for a part that is everything, receives lower bounds of the cost. Where the state exceeds the limit, any
    answer within it is better, and :class:`InfeasibleError` says that there is none.
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
    lost = state.overflow > 0.0
    if lost:
        before = np.inf
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
        except InfeasibleError:
            if lost:
                raise
            return None  # by rounding alone: the present choices are allowed
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
                return lost or after < before * (1 - 1e-9)
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
