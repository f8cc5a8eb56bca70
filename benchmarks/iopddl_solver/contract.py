"""Contract a large pairwise problem: nodes that only follow others disappear, in bulk.

Where a table allows one choice of node ``i`` for each choice of node ``j``, ``i`` follows ``j``. A graph of an operator
per node is mostly such tables. The steps of ``partitioner/solve/pairwise/presolve.py`` take one node after the other,
which is slow around a hub of thousands of neighbours; here every round picks a forest of followers, composes their
maps, and builds each table over the roots once. What a node takes of a resource stays with the node itself: a root's
choice decides it through :attr:`Contraction.maps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from partitioner.solve.pairwise.presolve import Choices, InfeasibleAssignmentError, Table, Vector


class Contraction:
    """The problem over the roots: ``costs[r]`` and ``tables[r, s]`` (r < s, without infinite minima or constants).

    ``roots[i]`` is the root that node i follows, ``maps[i]`` the choice of i for each remaining choice of that root,
    and ``nodes`` are the roots. Raises :class:`InfeasibleAssignmentError` where a node is left without a choice.
    """

    def __init__(self, costs: Sequence[Vector], edges: Iterable[tuple[int, int, Table]]) -> None:
        self.costs: list[Vector] = [np.asarray(c, np.float64) for c in costs]
        self.maps: list[Choices] = [np.arange(len(c)) for c in costs]
        self.roots = list(range(len(costs)))
        self.tables: dict[tuple[int, int], Table] = {}
        for i, j, table in edges:
            self._add(i, j, np.asarray(table, np.float64))
        self._drop()
        while self._round():
            self._drop()
        self.nodes = sorted(set(self.roots))
        self._normalise()

    def choice(self, of_roots: dict[int, int]) -> list[int]:
        """Every node's choice, given an index into ``costs[r]`` for each root r."""
        return [int(m[of_roots[r]]) for r, m in zip(self.roots, self.maps, strict=True)]

    def _add(self, i: int, j: int, table: Table) -> None:
        if i == j:
            self.costs[i] = self.costs[i] + np.diagonal(table)
            return
        if i > j:
            i, j, table = j, i, table.T
        old = self.tables.get((i, j))
        self.tables[i, j] = table if old is None else old + table

    def _drop(self) -> None:
        """Drops choices that a node's own cost or a neighbour forbids, until none is left."""
        allowed = [np.isfinite(c) for c in self.costs]
        near: dict[int, list[tuple[int, Table]]] = {}
        for (i, j), table in self.tables.items():
            finite = np.isfinite(table)
            if not finite.all():
                near.setdefault(i, []).append((j, finite.T))
                near.setdefault(j, []).append((i, finite))
        stack = list(near)
        while stack:
            node = stack.pop()
            for other, finite in near.get(node, ()):
                keep = allowed[other] & finite[:, allowed[node]].any(axis=1)
                if not np.array_equal(keep, allowed[other]):
                    allowed[other] = keep
                    stack.append(other)
        for node, keep in enumerate(allowed):
            if not keep.any():
                raise InfeasibleAssignmentError(f"node {node} has no choice left that its neighbours allow", (node,))
        changed = {node for node, keep in enumerate(allowed) if not keep.all()}
        if not changed:
            return
        for (i, j), table in self.tables.items():
            if i in changed or j in changed:
                self.tables[i, j] = table[allowed[i]][:, allowed[j]]
        for node, root in enumerate(self.roots):
            if root in changed:
                self.maps[node] = self.maps[node][allowed[root]]
        for node in changed:
            self.costs[node] = self.costs[node][allowed[node]]

    def _round(self) -> bool:
        """Contracts a forest of followers. Whether there were any."""
        leader: dict[int, tuple[int, Choices]] = {}
        top: dict[int, int] = {}

        def find(node: int) -> int:
            path = []
            while node in top:
                path.append(node)
                node = top[node]
            for step in path:
                top[step] = node
            return node

        for (i, j), table in self.tables.items():
            finite = np.isfinite(table)
            if finite.all() and 1 not in table.shape:
                continue
            if i not in leader and find(j) != i and (finite.sum(axis=0) == 1).all():
                leader[i], top[i] = (j, finite.argmax(axis=0)), j
            elif j not in leader and find(i) != j and (finite.sum(axis=1) == 1).all():
                leader[j], top[j] = (i, finite.argmax(axis=1)), i
        if not leader:
            return False
        decided: dict[int, tuple[int, Choices]] = {}
        for node in leader:
            path = []
            while node in leader and node not in decided:
                path.append(node)
                node = leader[node][0]
            root, choices = decided.get(node, (node, np.arange(len(self.costs[node]))))
            for step in reversed(path):
                choices = leader[step][1][choices]
                decided[step] = root, choices
        for node, (root, choices) in decided.items():
            self.costs[root] = self.costs[root] + self.costs[node][choices]
            self.costs[node] = np.zeros(1)
        for node, root in enumerate(self.roots):
            if root in decided:
                self.roots[node], choices = decided[root]
                self.maps[node] = self.maps[node][choices]
        before, self.tables = self.tables, {}
        for (i, j), table in before.items():
            if i in decided:
                i, choices = decided[i]
                table = table[choices]
            if j in decided:
                j, choices = decided[j]
                table = table[:, choices]
            self._add(i, j, table)
        return True

    def _normalise(self) -> None:
        """Moves row and column minima into the nodes and drops tables that are then zero."""
        for (i, j), table in list(self.tables.items()):
            by_row = table.min(axis=1)
            by_column = (table - by_row[:, None]).min(axis=0)
            rest = table - by_row[:, None] - by_column[None, :]
            rest[np.abs(rest) <= 1e-14 * np.abs(np.where(np.isfinite(table), table, 0.0))] = 0.0
            self.costs[i] = self.costs[i] + by_row
            self.costs[j] = self.costs[j] + by_column
            if rest.any():
                self.tables[i, j] = rest
            else:
                del self.tables[i, j]
