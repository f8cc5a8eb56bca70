"""Belief propagation for a pairwise problem, at prices of memory that follow the assignments.

A belief estimates the total cost of each choice of each node. It comes from messages along the tables: a table sends to
each of its two nodes, for every choice of it, the least cost of the table and of the other node's beliefs (min-sum;
Pearl, 1988). On a tree the beliefs are exact. On a graph with cycles they need not converge, but they decide on many
nodes together, hubs and whole layers included, which moves of single nodes cannot. A pass over all tables takes
milliseconds: all tables of one shape are updated at once, in single precision, and messages are damped.

Prices of memory, one per row, rise where an assignment exceeds the limit and fall where it leaves room. This is a
subgradient step on the Lagrangian of the memory rows (Held and Karp, 1971), with two changes for assignments that only
approximate the minimum. Of neighbouring rows that exceed their limit together, only the fullest is priced. Each such
group of rows has its own step, which grows while the excess lasts and shrinks when its sign changes (as in Rprop;
Riedmiller and Braun, 1993).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.iopddl_solver.state import FlatProblem
from partitioner.solve.pairwise.presolve import Choices, Vector

_Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _BeliefTableGroup:
    """Tables of one shape, ``tables[p, q, e]``, and what they tell their nodes, ``to_first[p, e]``."""

    tables: _Floats
    first: NDArray[np.intp]  # [p, e]: the place of the choice among all choices
    second: NDArray[np.intp]
    to_first: _Floats
    to_second: _Floats


class BeliefPropagation:
    """The messages of all tables of ``flat``."""

    def __init__(self, flat: FlatProblem) -> None:
        self._groups = list[_BeliefTableGroup]()
        self._num_choices = len(flat.cost)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for e, table in enumerate(flat.tables):
            by_shape.setdefault(table.shape, []).append(e)
        for (rows, columns), members in by_shape.items():
            # the tables are the last dim: minima over a short one are slow
            tables = np.stack([flat.tables[e] for e in members], axis=-1).astype(np.float32)
            first = flat.start[flat.first[members]] + np.arange(rows)[:, None]
            second = flat.start[flat.second[members]] + np.arange(columns)[:, None]
            zeros = np.zeros(first.shape, np.float32), np.zeros(second.shape, np.float32)
            self._groups.append(_BeliefTableGroup(tables, first, second, *zeros))
        places = [np.zeros(0, np.intp)] + [x.ravel() for g in self._groups for x in (g.first, g.second)]
        self._places = np.concatenate(places)

    def propagate(self, costs: Vector, damping: float) -> Vector:
        """One update of all messages, of which ``damping`` is kept; the beliefs before it.

        Args:
            costs: what each choice costs by itself.
            damping: from 0 to 1.
        """
        told = [np.zeros(0, np.float32)] + [x.ravel() for g in self._groups for x in (g.to_first, g.to_second)]
        beliefs: Vector = costs + np.bincount(self._places, np.concatenate(told), minlength=self._num_choices)
        for g in self._groups:
            by_first = (beliefs[g.first] - g.to_first).astype(np.float32)
            by_second = (beliefs[g.second] - g.to_second).astype(np.float32)
            for message, new in (
                (g.to_first, (g.tables + by_second).min(axis=1)),
                (g.to_second, (g.tables + by_first[:, None]).min(axis=0)),
            ):
                new -= new.min(axis=0)
                message *= damping
                message += (1.0 - damping) * new
        return beliefs

    def forget(self, share: float, rng: np.random.Generator) -> None:
        """Takes back the messages of some tables, chosen at random."""
        for g in self._groups:
            kept = rng.random(g.tables.shape[2]) >= share
            g.to_first[:] *= kept
            g.to_second[:] *= kept


_WINDOWS = 128

_START = 0.05
_LOWER = 0.3  # share of the present prices
_STEP, _LEAST_RATE, _MOST_RATE = 0.02, 0.5, 40.0
_FASTER, _SLOWER = 1.05, 0.7
_NEAR, _FAR = (0.0, 0.1, 0.5), (0.0, 0.01, 0.05, 0.2, 1.0)  # disturbed prices: spread; increase as a share
_MOST_DECAY = 0.7  # least factor of a price in one step; else one minus the free share of its row's limit


@dataclass(frozen=True, eq=False)
class PricedAssignment:
    """A known assignment, its cost and its memory per row."""

    choice: Choices
    cost: float
    profile: Vector


class Prices:
    """Prices of memory: ``values[r]`` per unit of usage in row r. ``room`` is the limit of each row."""

    def __init__(self, room: Vector) -> None:
        self.room = room
        self.values = np.zeros(len(room))
        self.unit = float(room.max(initial=0.0)) or 1.0
        number = min(_WINDOWS, len(room))
        self._begins = np.arange(number) * len(room) // max(number, 1)
        self._rates, self._signs = np.ones(number), np.zeros(number)

    def excess(self, profile: Vector) -> Vector:
        """The excess of each row over its limit, as a share of the largest limit."""
        return (profile - self.room) / self.unit

    def start(self, scale: float) -> None:
        """Set equal prices of all rows that are small compared with ``scale``, so that of equal choices the least
        memory wins."""
        self.values[:] = _START * scale / (self.unit * max(1, len(self.room)))

    def disturbed(self, scale: float, rng: np.random.Generator) -> Vector:
        """Other prices, near these or far from them, that change slowly from row to row."""
        rows = len(self.values)
        knots = np.linspace(0, rows, len(self._begins) + 1)
        factor, more = rng.normal(0.0, rng.choice(_NEAR), len(knots)), rng.random(len(knots)) ** 4
        more *= rng.choice(_FAR) * scale / (self.unit * max(1, rows))
        places = np.arange(rows)
        return self.values * np.exp(np.interp(places, knots, factor)) + np.interp(places, knots, more)

    def update(self, profile: Vector, scale: float) -> None:
        """Make one step from the memory ``profile`` of an assignment. ``scale`` is the approximate cost of an
        assignment."""
        if not len(self.room):
            return
        over = self.excess(profile)
        most = np.maximum.reduceat(over, self._begins)
        signs = np.sign(most)
        rates = np.where(signs != self._signs, _SLOWER * self._rates, np.where(signs > 0, _FASTER, 1.0) * self._rates)
        self._rates, self._signs = np.clip(rates, _LEAST_RATE, _MOST_RATE), signs
        step = np.where((self.values > 0.0) & (over < 0.0), 0.5 * over, 0.0)
        ends = np.append(self._begins[1:], len(over))
        for w in (most > 0.0).nonzero()[0].tolist():
            fullest = self._begins[w] + int(over[self._begins[w] : ends[w]].argmax())
            step[fullest] = self._rates[w] * over[fullest]
        self.values *= np.clip(1.0 + over, _MOST_DECAY, 1.0)
        self.values = np.maximum(self.values + _STEP * scale / self.unit * np.clip(step, -1.0, 1.0), 0.0)

    def lagrangian(self, known: PricedAssignment, share: float = 1.0) -> float:
        """The cost of an assignment plus the price of its excess memory, at ``share`` of the present prices."""
        return known.cost + share * float((self.values * (known.profile - self.room)).sum())  # no threads as in BLAS


class AssignmentPool:
    """The assignments of least Lagrangian found so far; half of them are kept for lower prices."""

    def __init__(self, size: int = 40) -> None:
        self._size, self._known = size, list[PricedAssignment]()

    def add(self, known: PricedAssignment, prices: Prices) -> None:
        if any(k.cost == known.cost and np.array_equal(k.choice, known.choice) for k in self._known):
            return
        self._known.append(known)
        if len(self._known) > self._size:
            self._known.sort(key=prices.lagrangian)
            rest = self._known[self._size // 2 :]
            rest.remove(max(rest, key=lambda k: prices.lagrangian(k, _LOWER)))
            self._known[self._size // 2 :] = rest

    def least(self, prices: Prices) -> tuple[float, PricedAssignment]:
        """The least Lagrangian, and its assignment."""
        return min(((prices.lagrangian(k), k) for k in self._known), key=lambda pair: pair[0])

    def cheaper(self, prices: Prices, cost: float, most: float) -> list[PricedAssignment]:
        """The assignments with a cost below ``cost`` that exceed a limit by at most ``most``, a share of the largest
        limit."""
        return [k for k in self._known if k.cost < cost and 0.0 < prices.excess(k.profile).max(initial=0.0) <= most]
