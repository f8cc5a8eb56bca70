"""Reduce a pairwise assignment problem (one choice per node at minimum cost) without losing its optimum.

Every step keeps at least one optimal assignment, and can be undone on a solution of the reduced problem. These are the
steps, in the order in which they are tried on a node:

- Normalise: move row and column minima of a table of pair costs into the costs of its nodes; drop tables of zeros and
  impossible choices.
- Force: if a node has one choice left, add the costs of its pairs to its neighbours, and subtract its usage from the
  resource limits.
- Eliminate: minimise over a node with at most two neighbours (and no resource), which leaves a table of these two.
- Follow: merge a node whose choice is decided by one neighbour's choice into that neighbour.
- Dominate: drop a choice if another is never worse, whatever the neighbours choose (Goldstein's criterion).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.passes.errors import PartitionError

Vector = NDArray[np.float64]

Table = NDArray[np.float64]
Choices = NDArray[np.intp]

_MAX_ELIMINATION = 4_000_000  # entries of the largest intermediate array

_MAX_DOMINANCE = 8_000_000
_MAX_CHOICES = 2_000
_ALWAYS_COMPARED = 500_000  # bytes up to which all pairs of choices are compared, without merging equal ones first
_ALWAYS_FILL = 256  # entries of a new table up to which a node is always eliminated


class InfeasibleAssignmentError(PartitionError):
    """Error that is raised if no assignment (one choice per node) satisfies the constraints. ``message``: the text of
    the error. ``nodes``: the indices of nodes that have no choice left."""

    def __init__(self, message: str, nodes: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes


@dataclass(frozen=True)
class _Function:
    """The choice of a node that was eliminated from an assignment problem (one choice per node at minimum cost), as a
    function of its neighbours' choices.

    ``node``: the eliminated node. ``neighbours``: the nodes with which it shared a cost table. ``labels``: for each
    neighbour, the choices that it had left at that time, as original indices in increasing order. ``choice``: an array
    of original indices of choices of ``node``; it has one dim per neighbour, indexed by the position of the neighbour's
    choice in ``labels``."""

    node: int
    neighbours: tuple[int, ...]
    labels: tuple[Choices, ...]  # per neighbour: the original choices that it had left, sorted
    choice: Choices  # original choice of ``node``, indexed like ``labels``


class ReducedProblem:
    """A pairwise assignment problem (one choice per node at minimum cost) while it is being reduced. Only the nodes in
    :attr:`nodes` remain to be solved.

    ``costs[i]`` has one entry per remaining choice of node i. ``tables[i][j]`` is indexed (choice of i, choice of j).
    ``usage[i][r]`` is the amount that each choice of i takes of resource r. ``limits[r]`` is the amount of r that is
    left. Arguments: ``edges``: tuples (i, j, table). ``rows``: for each resource a pair: node -> amounts that its
    choices take, and the limit."""

    def __init__(
        self,
        costs: Sequence[Vector],
        edges: Iterable[tuple[int, int, Table]],
        rows: Sequence[tuple[dict[int, Vector], float]] = (),
    ) -> None:
        self.constant = 0.0
        self.costs: list[Vector] = [np.array(c, dtype=np.float64) for c in costs]
        self.alive: list[Choices] = [np.arange(len(c)) for c in costs]
        self.tables: list[dict[int, Table]] = [{} for _ in costs]
        self.usage: list[dict[int, Vector]] = [{} for _ in costs]
        self.limits: list[float] = [limit for _, limit in rows]
        self.members: list[set[int]] = [set(usage) for usage, _ in rows]
        self._changed: list[dict[int, None]] = [{} for _ in costs]  # per node: neighbours whose table is not normal
        self._done = [False] * len(self.costs)
        self._undo: list[_Function] = []
        self._queue: deque[int] = deque(range(len(self.costs)))
        self._queued = [True] * len(self.costs)
        self._later: dict[int, None] = {}  # nodes to check for dominated choices, in this order
        self._rows: set[int] = set(range(len(rows)))  # limits whose members changed since the last check
        for row, (usage, _) in enumerate(rows):
            for node, vector in usage.items():
                self.usage[node][row] = np.array(vector, dtype=np.float64)
        for first, second, table in edges:
            if first == second:
                self.costs[first] = self.costs[first] + np.diagonal(table)
            else:
                self._add_table(first, second, np.asarray(table, dtype=np.float64))

    @property
    def nodes(self) -> list[int]:
        """Return the indices of the nodes of this assignment problem whose choices are not yet decided."""
        return [i for i, done in enumerate(self._done) if not done]

    def run(self, *, dominance: bool = True) -> None:
        """Reduce this assignment problem (one choice per node at minimum cost) until no reduction step applies. Raises
        :class:`InfeasibleAssignmentError` if a node has no choice left.

        ``dominance``: whether to apply also the slowest step, which removes choices that are never better than another
        one. A call with ``False`` may be followed by a call with ``True``, which continues with the result of the first
        call."""
        for node in self.nodes:
            self._drop_choices(node, np.isfinite(self.costs[node]))
        cheap: tuple[Callable[[int], bool], ...] = (
            self._normalise_tables,
            self._fix_forced_choice,
            self._eliminate_node,
            self._follow,
        )
        while self._queue or self._rows or (self._later and dominance):
            if self._queue:
                node = self._queue.popleft()
                self._queued[node] = False
                while not self._done[node] and any(step(node) for step in cheap):
                    pass
                self._later[node] = None
            elif self._rows:
                self._check_row(self._rows.pop())
            else:
                node = next(iter(self._later))
                del self._later[node]
                if not self._done[node]:
                    self._drop_dominated_choices(node)

    def keep(self, node: int, choices: NDArray[np.bool_]) -> None:
        """Remove choices of ``node`` from this assignment problem. ``choices``: a mask over the node's remaining
        choices, false for those to remove."""
        self._drop_choices(node, choices)

    def restore(self, choice: dict[int, int]) -> list[int]:
        """Return the choice of every node of the original assignment problem (one choice per node at minimum cost), as
        an index among the node's original choices. ``choice``: index i of a node that was left to solve -> index into
        ``costs[i]``, the costs of its remaining choices."""
        full = {node: int(self.alive[node][index]) for node, index in choice.items()}
        for step in reversed(self._undo):
            where = tuple(
                int(np.searchsorted(labels, full[j])) for j, labels in zip(step.neighbours, step.labels, strict=True)
            )
            full[step.node] = int(step.choice[where])
        return [full[i] for i in range(len(self.costs))]

    # -- steps: each returns whether it changed the node, which is then processed again ---------------------------

    def _normalise_tables(self, node: int) -> bool:
        """Simplify the cost tables of ``node`` of this assignment problem that changed since the last call. A table has
        the costs of pairs of choices of ``node`` and a neighbour. The minimum of each row and column is moved into the
        cost of the single choice. Then tables of zeros, and choices of infinite cost, are dropped. Return whether
        choices of ``node`` were dropped."""
        changed, self._changed[node] = self._changed[node], {}
        for other in changed:
            if other not in self.tables[node]:
                continue
            self._changed[other].pop(node, None)
            table = self.tables[node][other]
            by_row = np.minimum.reduce(table, axis=1)
            if np.count_nonzero(by_row):
                self.costs[node] = self.costs[node] + by_row
                table = _subtract_tables(table, by_row[:, None])
            by_column = np.minimum.reduce(table, axis=0)
            if np.count_nonzero(by_column):
                self.costs[other] = self.costs[other] + by_column
                table = _subtract_tables(table, by_column[None, :])
                self._later[other] = None
            if not np.count_nonzero(table):
                self._remove_table(node, other)
                continue
            self.tables[node][other], self.tables[other][node] = table, table.T
            self._drop_choices(other, np.isfinite(self.costs[other]))
        least = float(np.minimum.reduce(self.costs[node]))
        if least and np.isfinite(least):
            self.constant += least
            self.costs[node] = _subtract_tables(self.costs[node], np.array(least))
        return self._drop_choices(node, np.isfinite(self.costs[node]))

    def _fix_forced_choice(self, node: int) -> bool:
        """If ``node`` of this assignment problem has a single choice left, decide the node: add the costs of its pairs
        with each neighbour's choices to the costs of these choices, and subtract its resource usage from the limits.
        Return whether this was done."""
        if len(self.costs[node]) != 1:
            return False
        for other, table in self.tables[node].items():
            self.costs[other] = self.costs[other] + table[0]
        for row, usage in self.usage[node].items():
            self.limits[row] -= float(usage[0])
        self.constant += float(self.costs[node][0])
        self._finish_node(_Function(node, (), (), np.array(self.alive[node][0])))
        return True

    def _eliminate_node(self, node: int) -> bool:
        """If ``node`` of this assignment problem has at most two neighbours and uses no limited resource, eliminate the
        node: add its least cost, given the neighbours' choices, to the costs of the one neighbour, or to the cost table
        of the pair of neighbours. Return whether this was done; it is not if the table would be too large."""
        neighbours = list(self.tables[node])
        if self.usage[node] or len(neighbours) > 2:
            return False
        cost = self.costs[node]
        sizes = [len(self.costs[j]) for j in neighbours]
        if len(neighbours) == 2:
            entries = sizes[0] * sizes[1]
            grows = neighbours[1] not in self.tables[neighbours[0]] and entries > len(cost) * sum(sizes)
            if len(cost) * entries > _MAX_ELIMINATION or (grows and entries > _ALWAYS_FILL):
                return False
        total = cost
        for axis, j in enumerate(neighbours):
            table = self.tables[node][j]
            total = total[..., None] + (table if axis == 0 else table[:, None, :])
        best = total.argmin(axis=0)
        value = np.minimum.reduce(total, axis=0)
        labels = tuple(self.alive[j] for j in neighbours)
        self._finish_node(_Function(node, tuple(neighbours), labels, self.alive[node][best]))
        if not neighbours:
            self.constant += float(value)
        elif len(neighbours) == 1:
            self.costs[neighbours[0]] = self.costs[neighbours[0]] + value
            self._drop_choices(neighbours[0], np.isfinite(self.costs[neighbours[0]]))
        else:
            self._add_table(neighbours[0], neighbours[1], value)
        return True

    def _follow(self, node: int) -> bool:
        """If each choice of some neighbour allows only one choice of ``node`` of this assignment problem, merge
        ``node`` into this neighbour: add its costs and its resource usage to those of the neighbour's choices. Return
        whether there is such a neighbour."""
        leader = next((j for j, t in self.tables[node].items() if _allows_one_each(t)), None)
        if leader is None:
            return False
        table = self.tables[node][leader]
        decided = np.isfinite(table).argmax(axis=0)  # per choice of the leader: the choice of the node
        self.costs[leader] = self.costs[leader] + self.costs[node][decided] + table.min(axis=0)
        for row, usage in self.usage[node].items():
            old = self.usage[leader].get(row)
            self.usage[leader][row] = usage[decided] if old is None else old + usage[decided]
            self.members[row].add(leader)
            self._rows.add(row)
        rest = [(other, t[decided]) for other, t in self.tables[node].items() if other != leader]
        self._finish_node(_Function(node, (leader,), (self.alive[leader],), self.alive[node][decided]))
        for other, t in rest:
            self._add_table(leader, other, t)
        return True

    def _drop_dominated_choices(self, node: int) -> bool:
        """Remove the choices of ``node`` of this assignment problem that are never better than another choice of
        ``node``, whatever the neighbours choose (Goldstein's criterion). Return whether any choice was removed."""
        cost, tables = self.costs[node], list(self.tables[node].values())
        if len(cost) > _MAX_CHOICES:
            return False
        # q can replace p only if q allows every choice of the neighbours that p allows
        possible = np.concatenate([np.isfinite(t) for t in tables], axis=1) if tables else np.ones((len(cost), 1), bool)
        narrower = _compare_allowed_choices(possible)
        for usage in self.usage[node].values():
            narrower |= usage[None, :] > usage[:, None]
        np.fill_diagonal(narrower, True)
        p, q = (~narrower).nonzero()
        if len(p) * possible.shape[1] > _MAX_DOMINANCE:
            return False
        worse = cost[q] - cost[p]  # by how much q can cost more than p, at most
        if tables and len(p):
            whole = np.concatenate(tables, axis=1)
            more = np.where(possible, whole, 0.0).take(q, axis=0) - whole.take(
                p, axis=0
            )  # pairs that p forbids do not matter
            starts = np.cumsum([0, *(table.shape[1] for table in tables[:-1])])
            worse = worse + np.maximum.reduceat(more, starts, axis=1).sum(axis=1)
        beaten = np.zeros_like(narrower)
        beaten[p, q] = worse <= 1e-13 * float(np.abs(cost).max())
        tie = beaten & beaten.T
        beaten &= ~tie | np.tri(len(cost), k=-1, dtype=bool)  # of equal choices the first is kept
        return self._drop_choices(node, np.logical_not(beaten.any(axis=1)))

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def _enqueue_node(self, node: int) -> None:
        if not self._queued[node] and not self._done[node]:
            self._queued[node] = True
            self._queue.append(node)

    def _set_table(self, first: int, second: int, table: Table) -> None:
        self.tables[first][second] = table
        self.tables[second][first] = table.T
        self._changed[first][second] = self._changed[second][first] = None

    def _add_table(self, first: int, second: int, table: Table) -> None:
        old = self.tables[first].get(second)
        self._set_table(first, second, table if old is None else old + table)
        self._enqueue_node(first)
        self._enqueue_node(second)

    def _remove_table(self, first: int, second: int) -> None:
        del self.tables[first][second]
        del self.tables[second][first]
        self._enqueue_node(second)

    def _drop_choices(self, node: int, keep: NDArray[np.bool_]) -> bool:
        """Remove choices of ``node`` from this assignment problem, and return whether any was removed. ``keep``: a mask
        over the node's remaining choices, false for those to remove. Raises :class:`InfeasibleAssignmentError` if none
        is left."""
        left = np.count_nonzero(keep)
        if left == len(keep):
            return False
        if not left:
            raise InfeasibleAssignmentError(
                f"node {node} has no choice left that its neighbours and the limits allow", (node,)
            )
        self.costs[node] = self.costs[node][keep]
        self.alive[node] = self.alive[node][keep]
        for other, table in list(self.tables[node].items()):
            self._set_table(node, other, table[keep])
            self._enqueue_node(other)
        for row in list(self.usage[node]):
            self.usage[node][row] = self.usage[node][row][keep]
            self._rows.add(row)
        if not self.usage[node]:
            self._enqueue_node(node)
        return True

    def _check_row(self, row: int) -> None:
        """Simplify a resource limit of this assignment problem: subtract what each node uses under all of its choices,
        remove choices that exceed the limit alone, and remove the limit if it cannot be exceeded. ``row``: the index of
        the limit. Raises :class:`InfeasibleAssignmentError` if the limit is always exceeded."""
        for node in list(self.members[row]):
            usage = self.usage[node][row]
            least = float(usage.min())
            self.limits[row] -= least
            if least:
                usage = self.usage[node][row] = usage - least
            if not usage.any():
                self._remove_from_row(node, row)
        if self.limits[row] < 0:
            raise InfeasibleAssignmentError(
                f"limit {row} is exceeded by {-self.limits[row]:g} even when every node takes least",
                tuple(sorted(self.members[row])),
            )
        if sum(float(self.usage[node][row].max()) for node in self.members[row]) <= self.limits[row]:
            for node in list(self.members[row]):
                self._remove_from_row(node, row)
        for node in list(self.members[row]):
            self._drop_choices(node, self.usage[node][row] <= self.limits[row])

    def _remove_from_row(self, node: int, row: int) -> None:
        del self.usage[node][row]
        self.members[row].discard(node)
        self._rows.add(row)
        if not self.usage[node]:
            self._enqueue_node(node)

    def _finish_node(self, step: _Function) -> None:
        """Mark a node of this assignment problem as decided, and remove its cost tables and resource usage. ``step``:
        the node, and its choice as a function of its neighbours' choices; it is stored, so that the choice can be
        restored later."""
        node = step.node
        self._done[node] = True
        self._undo.append(step)
        for other in self.tables[node]:
            del self.tables[other][node]
            self._enqueue_node(other)
        self.tables[node] = {}
        for row in list(self.usage[node]):
            self._remove_from_row(node, row)


def _compare_allowed_choices(possible: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a boolean matrix for the choices of one node of an assignment problem. Entry ``[p, q]`` is true if choice
    ``p`` allows some choice of a neighbour that choice ``q`` does not allow. ``possible``: a boolean matrix with a row
    for each choice of the node and a column for each choice of its neighbours, true if the two are allowed together.
    BLAS is not used, because its threads wait for each other."""
    packed = np.packbits(possible, axis=1)
    narrower: NDArray[np.bool_]
    if len(packed) * packed.size <= _ALWAYS_COMPARED:
        narrower = np.asarray((packed[:, None] & ~packed).any(axis=2))
        return narrower
    rows, of = np.unique(packed, axis=0, return_inverse=True)  # rows repeat, so that few are left
    compared = np.stack([(row & ~rows).any(axis=1) for row in rows])
    narrower = compared[of.reshape(-1)][:, of.reshape(-1)]
    return narrower


def _subtract_tables(values: Table, least: Table) -> Table:
    """Return ``values - least``, tables of costs that may contain infinities. Differences that are only rounding errors
    become 0. Infinite entries of ``least`` are treated as 0."""
    rest = values - np.where(least < np.inf, least, 0.0)
    np.putmask(rest, np.abs(rest) < 1e-14 * np.abs(values), 0.0)  # false where both are infinite
    return rest


def _allows_one_each(table: Table) -> bool:
    """Return whether each column of ``table``, costs of pairs of choices of two nodes, has exactly one finite entry."""
    finite = np.isfinite(table)
    return np.count_nonzero(finite) == table.shape[1] and bool(finite.any(axis=0).all())
