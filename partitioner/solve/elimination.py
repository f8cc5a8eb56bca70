"""Exact dynamic programming: minimise a pairwise problem one node after the other.

Minimising over a node leaves one table over its neighbours. Where the graph is narrow, as a model's blocks are once
followers and values are merged, these tables stay small and the optimum is found in milliseconds; where it is not,
:func:`elimination_order` says so before any work is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.presolve import InfeasibleError, Table, Vector

QUICK_WORK = 3_000_000  # entries of all tables together: some 50 ms
MOST_WORK = 16_000_000  # at most 128 MB in one table

_Score = Callable[[int, Mapping[int, int], Mapping[int, set[int]]], float]


def elimination_order(
    sizes: Mapping[int, int], neighbours: Mapping[int, set[int]], most_work: int = MOST_WORK
) -> list[int] | None:
    """An order in which the nodes can be eliminated with tables of ``most_work`` entries together, or ``None``.

    ``sizes`` are numbers of choices. Greedy, by two scores of which one is better now and now the other.
    """
    orders = [_greedy(sizes, neighbours, score) for score in (_table_left, _entries_filled)]
    work, order = min(orders)
    return order if work <= most_work else None


def _table_left(node: int, sizes: Mapping[int, int], near: Mapping[int, set[int]]) -> float:
    return math.prod(sizes[j] for j in near[node])


def _entries_filled(node: int, sizes: Mapping[int, int], near: Mapping[int, set[int]]) -> float:
    return sum(sizes[j] * sizes[k] for j, k in combinations(near[node], 2) if k not in near[j])


def _greedy(sizes: Mapping[int, int], neighbours: Mapping[int, set[int]], score: _Score) -> tuple[int, list[int]]:
    """The number of table entries, and the order that takes the node of the least ``score`` next."""
    near = {node: set(others) for node, others in neighbours.items()}
    scores = {node: score(node, sizes, near) for node in near}
    order, work = list[int](), 0
    while near:
        node = min(scores, key=scores.__getitem__)
        work += sizes[node] * math.prod(sizes[j] for j in near[node])
        del scores[node]
        around = near.pop(node)
        for j in around:
            near[j] = (near[j] | around) - {j, node}
        stale = around.union(*(near[j] for j in around))
        scores.update((j, score(j, sizes, near)) for j in stale)
        order.append(node)
    return work, order


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
