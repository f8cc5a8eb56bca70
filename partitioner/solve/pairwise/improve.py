"""Improve a known assignment (one choice per node, at little total cost) of a problem that is too large for dynamic
programming.

If a table over a node's neighbours would be too large, one of the neighbours keeps its present choice, which removes it
from the graph. Dynamic programming then finds the best choices of all other nodes, given the fixed ones. The result
costs no more than the known assignment (conditioning: Dechter, "Enhancement schemes for constraint processing", 1990).
In the next round other nodes keep their choices.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping

from partitioner.solve.pairwise.dynamic_programming import eliminate_nodes
from partitioner.solve.pairwise.presolve import Table, Vector

_ENTRIES = 20_000  # greatest size of a table

_VAIN = 3  # rounds in a row without gain, after which the search ends
_GAIN = 1e-9  # relative decrease of the cost that counts as a gain


def improve_assignment(
    costs: Mapping[int, Vector], tables: Mapping[tuple[int, int], Table], choice: Mapping[int, int], until: float
) -> dict[int, int]:
    """Improve ``choice``, an assignment of a pairwise assignment problem (one choice per node at minimum cost). Return
    an assignment that costs no more, as a dict: node -> index of its choice. The search ends after three rounds without
    gain, or after the round in which ``time.perf_counter()`` passes ``until``.

    ``costs``: node -> costs of its choices. ``tables``: pair of nodes -> costs of each pair of their choices.
    ``choice``: node -> index of its choice."""
    near: dict[int, set[int]] = {node: set() for node in costs}
    for i, j in tables:
        near[i].add(j)
        near[j].add(i)
    sizes = {node: len(cost) for node, cost in costs.items()}
    best, least, kept, vain = dict(choice), math.inf, Counter[int](), 0
    while vain < _VAIN and time.perf_counter() < until:
        order = _choose_elimination_order(sizes, near, kept)
        free = set(order)
        kept.update(node for node in costs if node not in free)
        beside = {node: costs[node].copy() for node in order}
        for (i, j), table in tables.items():
            if i in free and j not in free:
                beside[i] += table[:, best[j]]
            elif j in free and i not in free:
                beside[j] += table[best[i], :]
        inner = [(i, j, t) for (i, j), t in tables.items() if i in free and j in free]
        best.update(eliminate_nodes(beside, inner, order)[0])
        cost = sum(float(c[best[i]]) for i, c in costs.items())
        cost += sum(float(t[best[i], best[j]]) for (i, j), t in tables.items())
        vain = 0 if cost < least - _GAIN * abs(cost) else vain + 1
        least = min(least, cost)
    return best


def _choose_elimination_order(
    sizes: Mapping[int, int], neighbours: Mapping[int, set[int]], kept: Counter[int]
) -> list[int]:
    """Return the nodes of an assignment problem (one choice per node at minimum cost) whose choices are to be
    optimised, in an order in which dynamic programming can eliminate them with small tables. All other nodes keep their
    choices; nodes that have rarely kept their choices so far are preferred for this. ``sizes``: node -> number of its
    choices. ``neighbours``: node -> nodes with which it shares a cost table. ``kept``: node -> how often it has kept
    its choice so far."""
    near = {node: set(others) for node, others in neighbours.items()}
    scores = {node: _count_table_entries(node, sizes, near) for node in near}
    order = []
    while near:
        node = min(scores, key=scores.__getitem__)
        fixed = scores[node] > _ENTRIES
        if fixed:  # of the node and its neighbours, the one that makes the tables largest
            node = min({node, *near[node]}, key=lambda n: (kept[n], -sizes[n] * len(near[n]), n))
        around = near.pop(node)
        del scores[node]
        for j in around:
            near[j].discard(node)
            if not fixed:
                near[j] |= around - {j}
        if not fixed:
            order.append(node)
        scores.update((j, _count_table_entries(j, sizes, near)) for j in around)
    return order


def _count_table_entries(node: int, sizes: Mapping[int, int], near: Mapping[int, set[int]]) -> int:
    return sizes[node] * math.prod(sizes[j] for j in near[node])
