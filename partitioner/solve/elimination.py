"""Exact dynamic programming: minimise a pairwise problem one node after the other.

Minimising over a node leaves one table over its neighbours. Where the graph is narrow, as a model's blocks are once
followers and values are merged, these tables stay small and the optimum is found in milliseconds; where it is not,
:func:`elimination_order` says so before any work is done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.presolve import InfeasibleError, Table, Vector

MAX_ENTRIES = 4_000_000  # of the largest table; 32 MB
MAX_WORK = 20_000_000  # of all tables together


def elimination_order(sizes: Mapping[int, int], neighbours: Mapping[int, set[int]]) -> list[int] | None:
    """An order in which the nodes can be eliminated within the limits above, ``None`` where none was found.

    Greedy: the node whose table with its neighbours is smallest comes next. ``sizes`` are numbers of choices.
    """
    near = {node: set(others) for node, others in neighbours.items()}
    entries = {node: sizes[node] * math.prod(sizes[j] for j in near[node]) for node in near}
    order, work = [], 0
    while near:
        node = min(entries, key=entries.__getitem__)
        work += entries[node]
        if entries[node] > MAX_ENTRIES or work > MAX_WORK:
            return None
        del entries[node]
        around = near.pop(node)
        for j in around:
            near[j] = (near[j] | around) - {j, node}
        for j in around:
            entries[j] = sizes[j] * math.prod(sizes[k] for k in near[j])
        order.append(node)
    return order


@dataclass(frozen=True)
class _Table:
    """Costs over the choices of the nodes ``scope``, one dim per node."""

    scope: tuple[int, ...]
    costs: NDArray[np.float64]


def eliminate(
    costs: Mapping[int, Vector], tables: Sequence[tuple[int, int, Table]], order: Sequence[int]
) -> tuple[dict[int, int], float]:
    """The best choice of every node of ``costs`` and its cost. Raises :class:`InfeasibleError` where there is none."""
    place = {node: i for i, node in enumerate(order)}
    waiting: dict[int, list[_Table]] = {node: [_Table((node,), cost)] for node, cost in costs.items()}
    for i, j, table in tables:
        waiting[min(i, j, key=place.__getitem__)].append(_Table((i, j), table))
    answers: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    total = 0.0
    for node in order:
        scope = tuple(sorted({i for t in waiting[node] for i in t.scope if i != node}, key=place.__getitem__))
        joined = _sum(waiting.pop(node), (node, *scope))
        answers.append((node, scope, joined.argmin(axis=0)))
        left = joined.min(axis=0)
        if not np.isfinite(left).any():
            raise InfeasibleError("no assignment satisfies the tables together", (node, *scope))
        if scope:
            waiting[scope[0]].append(_Table(scope, left))
        else:
            total += float(left)
    choice: dict[int, int] = {}
    for node, scope, best in reversed(answers):
        choice[node] = int(best[tuple(choice[i] for i in scope)])
    return choice, total


def _sum(tables: Sequence[_Table], scope: tuple[int, ...]) -> NDArray[np.float64]:
    """The sum of ``tables``, broadcast to the dims of ``scope``."""
    axis = {node: i for i, node in enumerate(scope)}
    total: NDArray[np.float64] = np.zeros((1,) * len(scope))
    for table in sorted(tables, key=lambda t: t.costs.size):
        order = sorted(range(len(table.scope)), key=lambda d: axis[table.scope[d]])
        shape = [1] * len(scope)
        for d in order:
            shape[axis[table.scope[d]]] = table.costs.shape[d]
        total = total + table.costs.transpose(order).reshape(shape)
    return total
