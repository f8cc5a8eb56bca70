"""A pairwise problem in flat arrays, and the state of a local search with its memory.

The choices of all nodes lie in one array, node by node; an *assignment* is an array with one choice per node. Nodes are
numbered from 0 in the order of ``nodes``. The costs of all choices, beside given choices of all other nodes, take a few
numpy calls. A forbidden choice costs :attr:`FlatProblem.forbidden`, more than every allowed assignment.

``LocalSearchState`` keeps an assignment, its memory and the costs of moves up to date while nodes change.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.pairwise.live_memory import Stretch
from partitioner.solve.pairwise.presolve import Choices, Table, Vector


class FlatProblem:
    """``start[i]`` is where the choices of node i begin in ``cost``, ``owner[c]`` the node of choice c.

    Table e joins the nodes ``first[e] < second[e]``. Seen from one of the two it is a *side*: sides ``2 e`` and
    ``2 e + 1`` have one entry per choice of the node that they add to, from ``side_start`` on.
    """

    def __init__(self, nodes: Sequence[int], costs: Sequence[Vector], tables: Mapping[tuple[int, int], Table]) -> None:
        self.nodes = list(nodes)
        self.sizes = np.array([len(costs[i]) for i in nodes], np.intp)
        self.start = _begins(self.sizes)
        cost: Vector = np.concatenate([costs[i] for i in nodes])
        self.owner = np.repeat(np.arange(len(nodes)), self.sizes)
        at = {node: k for k, node in enumerate(nodes)}
        dear = [
            np.max(np.abs(c), where=np.isfinite(c), initial=0.0) for c in (*tables.values(), *(costs[i] for i in nodes))
        ]
        self.forbidden = 2.0 * float(sum(dear)) + 1.0
        self.cost = np.minimum(cost, self.forbidden)
        self.tables = [np.minimum(t, self.forbidden) for t in tables.values()]
        self.first = np.array([at[i] for i, _ in tables], np.intp)
        self.second = np.array([at[j] for _, j in tables], np.intp)
        self.near: list[dict[int, int]] = [{} for _ in nodes]  # per node: neighbour -> table
        for e, (i, j) in enumerate(zip(self.first.tolist(), self.second.tolist(), strict=True)):
            self.near[i][j] = self.near[j][i] = e
        columns = self.sizes[self.second]
        self._offset = _begins(self.sizes[self.first] * columns)
        self._columns = columns
        self._pool = np.concatenate([t.ravel() for t in self.tables]) if self.tables else np.zeros(0)
        self.side_node = np.stack([self.first, self.second], axis=1).ravel()
        self.side_other = np.stack([self.second, self.first], axis=1).ravel()
        self.side_start = _begins(self.sizes[self.side_node])
        within = _within(self.sizes[self.side_node])
        side = np.repeat(np.arange(len(self.side_node)), self.sizes[self.side_node])
        row = side % 2 == 0
        self._side = side
        self._base = self._offset[side // 2] + within * np.where(row, columns[side // 2], 1)
        self._stride = np.where(np.arange(len(self.side_node)) % 2 == 0, 1, np.repeat(columns, 2))
        self._target = self.start[self.side_node[side]] + within
        by_node = np.argsort(self.side_node, kind="stable")
        self.sides = by_node  # sides in the order of their nodes: those of node i from first_side[i] on
        self.num_sides = np.bincount(self.side_node, minlength=len(nodes))
        self.first_side = _begins(self.num_sides)

    def side_costs(self, side: Choices, choice: Choices) -> tuple[Choices, Vector]:
        """Per entry of each ``side``: the choice that it adds to, and how much if the other node takes ``choice``."""
        lengths = self.sizes[self.side_node[side]]
        entries = np.repeat(self.side_start[side], lengths) + _within(lengths)
        move = np.repeat(self._stride[side] * choice, lengths)
        return self._target[entries], self._pool[self._base[entries] + move]

    def sides_of(self, node: int) -> Choices:
        """The sides that add to ``node``; their numbers ``^ 1`` are those through which it adds to its neighbours."""
        begin = self.first_side[node]
        return self.sides[begin : begin + self.num_sides[node]]

    def conditional(self, choice: Choices) -> Vector:
        """The cost of every choice beside ``choice`` of all other nodes."""
        move = (self._stride * choice[self.side_other])[self._side]
        tables = np.bincount(self._target, self._pool[self._base + move], minlength=len(self.cost))
        total: Vector = self.cost + tables
        return total

    def descend(self, choice: Choices, extra: Vector, rounds: int = 30) -> Choices:
        """Nodes take their best choices, none together with a neighbour of more gain; ``extra`` adds to all costs."""
        choice = choice.copy()
        for _ in range(rounds):
            cost = self.conditional(choice) + extra
            best = self.best(cost)
            gain = cost[self.start + choice] - cost[self.start + best]
            gain[gain <= 1e-9 * np.abs(cost[self.start + best])] = 0.0
            rank = np.empty(len(gain), np.intp)
            rank[np.argsort(gain, kind="stable")] = np.arange(len(gain))
            rival = np.full(len(gain), -1)
            np.maximum.at(rival, self.first, rank[self.second])
            np.maximum.at(rival, self.second, rank[self.first])
            moves = (gain > 0.0) & (rank > rival)
            if not moves.any():
                break
            choice[moves] = best[moves]
        return choice

    def table_costs(self, choice: Choices) -> Vector:
        """What each table costs in an assignment."""
        found: Vector = self._pool[self._offset + choice[self.first] * self._columns + choice[self.second]]
        return found

    def total(self, choice: Choices) -> float:
        """The cost of an assignment."""
        return float(self.cost[self.start + choice].sum() + self.table_costs(choice).sum())

    def best(self, score: Vector) -> Choices:
        """Every node's choice of the least ``score``."""
        least = np.minimum.reduceat(score, self.start)
        hits = (score <= least[self.owner]).nonzero()[0]
        nodes, place = np.unique(self.owner[hits], return_index=True)
        if len(nodes) < len(self.start):  # a node whose scores are not numbers
            raise FloatingPointError("a node has no choice of least cost")
        chosen: Choices = hits[place] - self.start
        return chosen

    def table(self, node: int, other: int) -> Table:
        """The table of two neighbours, indexed (choice of ``node``, choice of ``other``)."""
        table = self.tables[self.near[node][other]]
        return table if node < other else table.T

    def alike(self) -> NDArray[np.intp]:
        """One number for all nodes of equal costs, up to rounding: the same place in one layer and in another."""
        names: dict[bytes, int] = {}
        numbers = []
        for begin, size in zip(self.start.tolist(), self.sizes.tolist(), strict=True):
            cost = self.cost[begin : begin + size]
            rounded = np.round(cost / (np.abs(cost).max() or 1.0), 6)
            numbers.append(names.setdefault(rounded.tobytes(), len(names)))
        return np.array(numbers, np.intp)


def _begins(lengths: NDArray[np.intp]) -> NDArray[np.intp]:
    return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.intp)[: len(lengths)]


def _within(lengths: NDArray[np.intp]) -> NDArray[np.intp]:
    """0, 1, ..., n - 1 for each n of ``lengths``."""
    return np.arange(int(lengths.sum())) - np.repeat(_begins(lengths), lengths)


class LocalSearchState:
    """An assignment of roots with its profile of memory over the rows. ``room`` is the limit of each row."""

    def __init__(
        self,
        nodes: Sequence[int],
        costs: Sequence[Vector],
        tables: Mapping[tuple[int, int], Table],
        stretches: Mapping[int, Stretch],
        room: Vector,
    ) -> None:
        self.nodes, self.costs, self.tables, self.stretches, self.room = nodes, costs, tables, stretches, room
        self.near: dict[int, list[tuple[int, Table]]] = {i: [] for i in nodes}
        for (i, j), table in tables.items():
            self.near[i].append((j, table.T))
            self.near[j].append((i, table))
        self.choice = dict.fromkeys(nodes, 0)
        self.profile = np.zeros(len(room))
        self.set(
            {i: int((s.usage @ s.lengths).argmin()) for i, s in stretches.items()}
            | {i: int(costs[i].argmin()) for i in nodes if i not in stretches}
        )

    def set(self, choice: Mapping[int, int]) -> None:
        """Takes another assignment, of all roots or of some."""
        self.choice.update(choice)
        change = np.zeros(len(self.room) + 1)
        for i, s in self.stretches.items():
            change[s.breaks] += np.diff(s.usage[self.choice[i]], prepend=0.0, append=0.0)
        self.profile = np.cumsum(change)[:-1]

    @property
    def overflow(self) -> float:
        """By how much the worst row exceeds its limit."""
        return float(np.max(self.profile - self.room, initial=0.0))

    def cost(self) -> float:
        nodes = sum(float(self.costs[i][self.choice[i]]) for i in self.nodes)
        return nodes + sum(float(t[self.choice[i], self.choice[j]]) for (i, j), t in self.tables.items())

    def conditional(self, node: int) -> Vector:
        """The cost of each choice of ``node`` beside the choices of the others."""
        total = self.costs[node].copy()
        for other, table in self.near[node]:
            total += table[self.choice[other]]
        return total

    def excess(self, node: int) -> Vector:
        """Per choice of ``node``, the overflow that it would leave in its rows, weighed by their number."""
        stretch = self.stretches[node]
        now = stretch.usage[self.choice[node]]
        worst = stretch.worst(self.profile - self.room) - now
        over: Vector = np.maximum(worst + stretch.usage, 0.0) @ stretch.lengths.astype(np.float64)
        return over

    def move(self, node: int, to: int) -> None:
        stretch = self.stretches.get(node)
        if stretch is not None:
            step = stretch.usage[to] - stretch.usage[self.choice[node]]
            self.profile[stretch.breaks[0] : stretch.breaks[-1]] += np.repeat(step, stretch.lengths)
        self.choice[node] = to

    def sweep(self, order: NDArray[np.intp], until: float, prices: Mapping[int, Vector] | None = None) -> int:
        """Each node in turn takes the least overflow, then the least cost (plus ``prices``). Number of moves."""
        moves = 0
        for count, node in enumerate(order.tolist()):
            if count % 64 == 0 and time.perf_counter() > until:
                break
            score = self.conditional(node)
            if prices is not None and node in prices:
                score = score + prices[node]
            if node in self.stretches:
                over = self.excess(node)
                score = np.where(over <= over.min() * (1 + 1e-9), score, np.inf)
            best = int(score.argmin())
            if score[best] < score[self.choice[node]]:
                self.move(node, best)
                moves += 1
        return moves

    def descend(self, rng: np.random.Generator, until: float, prices: Mapping[int, Vector] | None = None) -> None:
        """Sweeps in random order until none moves."""
        while time.perf_counter() < until and self.sweep(rng.permutation(self.nodes), until, prices):
            pass
