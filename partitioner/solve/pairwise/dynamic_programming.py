"""Exact dynamic programming for a pairwise assignment problem (one choice per node at minimum cost): eliminate one node
after the other.

Minimising over a node leaves one table over its neighbours. If the graph is narrow, these tables stay small and the
optimum is found in milliseconds. The graphs of model blocks are narrow after the presolve. :func:`elimination_order`
decides before any work is done whether the tables would be too large."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.pairwise.presolve import InfeasibleAssignmentError, Table, Vector

QUICK_WORK = 3_000_000  # entries of all tables together; about 50 ms

FAIR_WORK = 16_000_000  # allowed for any time limit; a fraction of a second
MOST_WORK = 256_000_000  # several seconds, in which HiGHS does not solve a problem of that size
WORK_PER_S = 50_000_000
LARGEST_TABLE = 16_000_000  # entries; 128 MB

_Score = Callable[[int, Mapping[int, int], Mapping[int, set[int]]], float]


def elimination_order(
    sizes: Mapping[int, int], neighbours: Mapping[int, set[int]], most_work: int = MOST_WORK
) -> list[int] | None:
    """Return an order in which dynamic programming can eliminate the nodes of an assignment problem (one choice per
    node at minimum cost), or ``None`` if the order found needs too large tables.

    All tables together may have at most ``most_work`` entries, and each table at most 16 million. The order is found
    greedily by two criteria, and the better of the two orders is returned. ``sizes``: node -> number of its choices.
    ``neighbours``: node -> nodes with which it shares a cost table."""
    orders = [_order_nodes_greedily(sizes, neighbours, score, most_work) for score in (_table_left, _entries_filled)]
    allowed = [order for order in orders if order is not None]
    return min(allowed)[1] if allowed else None


def _table_left(node: int, sizes: Mapping[int, int], near: Mapping[int, set[int]]) -> float:
    return math.prod(sizes[j] for j in near[node])


def _entries_filled(node: int, sizes: Mapping[int, int], near: Mapping[int, set[int]]) -> float:
    return sum(sizes[j] * sizes[k] for j, k in combinations(near[node], 2) if k not in near[j])


def _order_nodes_greedily(
    sizes: Mapping[int, int], neighbours: Mapping[int, set[int]], score: _Score, most_work: int
) -> tuple[int, list[int]] | None:
    """Return a pair: the number of entries of all cost tables together, and the nodes of an assignment problem (one
    choice per node at minimum cost) in an order in which dynamic programming can eliminate them. The node with the
    least ``score`` is always taken next. Return ``None`` if the tables would have more than ``most_work`` entries.
    ``sizes``: node -> number of its choices. ``neighbours``: node -> nodes with which it shares a cost table.
    ``score``: function of a node, the sizes and the neighbours."""
    near = {node: set(others) for node, others in neighbours.items()}
    scores = {node: score(node, sizes, near) for node in near}
    order, work = list[int](), 0
    while near:
        node = min(scores, key=scores.__getitem__)
        entries = sizes[node] * math.prod(sizes[j] for j in near[node])
        work += entries
        if work > most_work or entries > LARGEST_TABLE:
            return None
        del scores[node]
        around = near.pop(node)
        for j in around:
            near[j] = (near[j] | around) - {j, node}
        stale = around.union(*(near[j] for j in around))
        scores.update((j, score(j, sizes, near)) for j in stale)
        order.append(node)
    return work, order


_Term = tuple[tuple[int, ...], NDArray[np.float64]]  # the other nodes in order, and costs indexed (node, *others)


def eliminate_nodes(
    costs: Mapping[int, Vector], tables: Iterable[tuple[int, int, Table]], order: Sequence[int]
) -> tuple[dict[int, int], float]:
    """Solve an assignment problem (one choice per node at minimum cost) by dynamic programming. Return two values: a
    dict from each node in ``order`` to the index of its choice, and the total cost. Raises
    :class:`InfeasibleAssignmentError` if every assignment is forbidden.

    ``costs``: node -> costs of its choices. ``tables``: tuples (i, j, table), where ``table[p, q]`` is the cost of
    choice p of node i and choice q of node j. ``order``: the nodes in the order in which they are eliminated."""
    place = {node: i for i, node in enumerate(order)}
    waiting: dict[int, list[_Term]] = {node: [] for node in order}
    for i, j, table in tables:
        if place[i] < place[j]:
            waiting[i].append(((j,), table))
        else:
            waiting[j].append(((i,), table.T))
    scopes, total = list[list[int]](), 0.0
    for node in order:
        terms = waiting[node]
        scope = sorted({j for others, _ in terms for j in others}, key=place.__getitem__)
        scopes.append(scope)
        left = _sum_cost_tables(costs[node], terms, scope).min(axis=0)
        if not scope:
            if not np.isfinite(left):
                raise InfeasibleAssignmentError("no assignment satisfies the tables together", (node,))
            total += float(left)
        else:
            waiting[scope[0]].append((tuple(scope[1:]), left))
    choice: dict[int, int] = {}
    for node in reversed(order):
        vector = costs[node].copy()
        for others, table in waiting[node]:
            index: tuple[slice | int, ...] = (slice(None), *[choice[j] for j in others])
            vector += table[index]
        choice[node] = int(vector.argmin())
    return choice, total


def _sum_cost_tables(cost: Vector, terms: Sequence[_Term], scope: Sequence[int]) -> NDArray[np.float64]:
    """Return the costs of a node of an assignment problem (one choice per node at minimum cost) as one array with the
    dims (node, *scope): the sum of the costs of its choices and of all its tables.

    ``cost``: the cost of each choice of the node. ``terms``: pairs (others, table): the other nodes of a table, and the
    table with the dims (node, *others). ``scope``: the other nodes of all tables."""
    joined = cost.reshape(-1, *[1] * len(scope))
    for others, table in sorted(terms, key=lambda term: term[1].size):
        if len(others) < len(scope):
            sizes = dict(zip(others, table.shape[1:], strict=True))
            table = table.reshape(-1, *[sizes.get(j, 1) for j in scope])
        joined = joined + table
    return joined
