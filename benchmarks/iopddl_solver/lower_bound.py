"""A lower bound of a large pairwise problem with memory, and prices at which nodes share it.

The rows of memory are dualised: prices ``y >= 0`` add ``y . usage`` to the nodes' costs, and ``y . room`` is taken off
(Lagrangian relaxation). What is left is bounded by reparametrisation: messages move cost between tables and nodes, and
``sum of node minima + sum of table minima`` is a lower bound whatever they are. All tables of one shape are updated at
once: each takes an equal share of its two nodes and gives back half of its minima (dual block-coordinate ascent;
Werner, 2007; Globerson and Jaakkola, 2007).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.pairwise.live_memory import Stretch, Usage
from partitioner.solve.pairwise.presolve import Table, Vector

_LEAST_EXCESS = 1e-6  # of memory over all rows, in parts of the largest limit


@dataclass(frozen=True)
class _MessageTableGroup:
    """Tables of one shape: ``tables[e, p, q]``, and where the choices of their nodes are, ``first[e, p]``."""

    tables: NDArray[np.float64]
    first: NDArray[np.intp]
    second: NDArray[np.intp]
    to_first: NDArray[np.float64]  # what the tables have given to their nodes
    to_second: NDArray[np.float64]


class LagrangianDual:
    """The choices of all roots in one array, ``starts[r]`` being where those of root r begin."""

    def __init__(
        self,
        nodes: Sequence[int],
        costs: Sequence[Vector],
        tables: Mapping[tuple[int, int], Table],
        stretches: Mapping[int, Stretch],
        room: Vector,
    ) -> None:
        sizes = np.array([len(costs[i]) for i in nodes])
        self.nodes, self.room = list(nodes), room
        self._begin = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.starts = dict(zip(nodes, self._begin.tolist(), strict=True))
        self.sizes = sizes
        self.cost = np.concatenate([costs[i] for i in nodes])
        self.prices = np.zeros(len(room))
        share = np.ones(len(self.cost))
        by_shape: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for (i, j), table in tables.items():
            by_shape.setdefault(table.shape, []).append((i, j))
        self._groups = []
        for (rows, columns), pairs in by_shape.items():
            first = np.array([self.starts[i] for i, _ in pairs])[:, None] + np.arange(rows)
            second = np.array([self.starts[j] for _, j in pairs])[:, None] + np.arange(columns)
            np.add.at(share, first, 1.0)
            np.add.at(share, second, 1.0)
            stacked = np.stack([tables[pair] for pair in pairs])
            stacked = np.where(np.isfinite(stacked), stacked, 1e30)
            self._groups.append(
                _MessageTableGroup(stacked, first, second, np.zeros(first.shape), np.zeros(second.shape))
            )
        self._share = 1.0 / share
        self._usage = Usage(stretches, self.starts, len(self.cost), len(room))

    def _beliefs(self) -> Vector:
        belief = self.cost + self._usage.priced(self.prices)
        for g in self._groups:
            np.add.at(belief, g.first, g.to_first)
            np.add.at(belief, g.second, g.to_second)
        return belief

    def pass_messages(self) -> tuple[float, NDArray[np.intp]]:
        """One update of all messages. The bound before it, and every node's best choice by its belief."""
        belief = self._beliefs()
        bound = float(np.minimum.reduceat(belief, self._begin).sum()) - float(self.prices @ self.room)
        for g in self._groups:
            mine, other = (belief * self._share)[g.first], (belief * self._share)[g.second]
            rest = g.tables - g.to_first[:, :, None] - g.to_second[:, None, :]
            bound += float(rest.min(axis=(1, 2)).sum())
            rest += mine[:, :, None] + other[:, None, :]
            g.to_first[:] += 0.5 * rest.min(axis=2) - mine
            g.to_second[:] += 0.5 * rest.min(axis=1) - other
        edges = np.append(self._begin, len(belief))
        chosen = np.array([a + int(belief[a:b].argmin()) for a, b in itertools.pairwise(edges)])
        return bound, chosen

    def ascend(
        self, upper: float, until: float, rounds: int = 10_000, report: Callable[[float], None] = lambda _: None
    ) -> float:
        """Raises the bound, at most to ``upper``, the cost of a known assignment; keeps the best prices. The bound.

        ``report`` is told of every higher one.

        Prices move along a smoothed subgradient by Polyak's step, towards a target above the best bound that grows
        while bounds do and shrinks where they do not.
        """
        best, best_prices, stale = -np.inf, self.prices.copy(), 0
        smooth = np.zeros_like(self.prices)
        ahead = 0.0
        least = (_LEAST_EXCESS * (float(np.max(self.room, initial=0.0)) or 1.0)) ** 2  # below, steps have no end
        for count in range(rounds):
            if time.perf_counter() > until:
                break
            bound, chosen = self.pass_messages()
            if count < 20:  # tables first
                best, ahead = max(best, bound), max(0.5 * abs(bound), 1e-4 * upper)
                report(best)
                continue
            if bound > best:
                best, best_prices, stale = bound, self.prices.copy(), 0
                ahead *= 1.1
                report(best)
            else:
                stale += 1
            if stale >= 8:
                ahead, stale = 0.6 * ahead, 0
                self.prices = best_prices.copy()
                smooth[:] = 0.0
            smooth = 0.6 * smooth + 0.4 * (self._usage.profile(chosen) - self.room)
            direction = np.where((self.prices > 0) | (smooth > 0), smooth, 0.0)
            length = float(direction @ direction)
            if length > least and best < upper:
                target = min(best + ahead, upper)
                step = 0.5 * (target - min(bound, best)) / length
                if not math.isfinite(step):  # no choice is known yet, or there is none
                    break
                self.prices = np.maximum(self.prices + step * direction, 0.0)
        self.prices = best_prices
        return best
