"""The primal side of large problems: a state that knows its memory, made feasible and then cheaper, node by node."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.memory import Stretch
from partitioner.solve.presolve import Table, Vector


class State:
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
