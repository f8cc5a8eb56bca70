"""Prices of memory per row, which rise where an assignment takes too much and fall where it leaves room.

A subgradient step on the Lagrangian of the memory rows (Held and Karp, 1971), with two changes for a search that only
approximates the minimum: of neighbouring rows, which exceed their limit together, only the fullest is priced; and the
step grows while the rows keep their signs and shrinks when they change them. The step is taken from the best of all
assignments that are known, so that a poor one does not lead the prices astray.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioner.solve.presolve import Choices, Vector

_WINDOWS = 128
_START = 0.05
_LOWER = 0.3  # of the present prices
_FIRST_STEP, _LEAST_STEP, _MOST_STEP = 0.05, 0.01, 0.5
_DECAY = 2.0  # of a price in one step, per part of the limit that is left free in its row
_MOST_RISE = 0.2  # of the Lagrangian in one step, in parts of the cost


@dataclass(frozen=True, eq=False)
class Known:
    """An assignment that was found, its cost and its memory per row."""

    choice: Choices
    cost: float
    profile: Vector


class Prices:
    """``values[r]``, per unit of usage in row r. ``room`` is the limit of each row."""

    def __init__(self, room: Vector) -> None:
        self.room = room
        self.values = np.zeros(len(room))
        self.unit = float(room.max(initial=0.0)) or 1.0
        self._windows = np.array_split(np.arange(len(room)), min(_WINDOWS, max(1, len(room))))
        self._step, self._before = _FIRST_STEP, np.zeros(len(room))

    def excess(self, profile: Vector) -> Vector:
        """By how much each row exceeds its limit, in parts of the largest limit."""
        return (profile - self.room) / self.unit

    def start(self, scale: float) -> None:
        """Equal prices of all rows that are small beside ``scale``: of equal choices the least memory is taken."""
        self.values[:] = _START * scale / (self.unit * max(1, len(self.room)))

    def update(self, profile: Vector, scale: float) -> None:
        """One step from the memory of an assignment; ``scale`` is what an assignment costs, or so."""
        over = self.excess(profile)
        step = np.where((self.values > 0.0) & (over < 0.0), over, 0.0)
        for window in self._windows:
            if len(window):
                fullest = window[over[window].argmax()]
                step[fullest] = max(step[fullest], over[fullest]) if over[fullest] > 0.0 else step[fullest]
        lengths = float(np.linalg.norm(step) * np.linalg.norm(self._before))
        if lengths > 0.0:
            agree = float(step @ self._before) / lengths
            self._step *= 1.15 if agree > 0.1 else 0.85 if agree < -0.1 else 1.0
            self._step = min(max(self._step, _LEAST_STEP), _MOST_STEP)
        self._before = 0.5 * (self._before + step)
        most = _MOST_RISE / max(float(step @ step), 1e-30)
        self.values *= np.clip(1.0 + _DECAY * over, 0.5, 1.0)
        self.values = np.maximum(self.values + min(self._step, most) * scale / self.unit * step, 0.0)

    def lagrangian(self, known: Known, share: float = 1.0) -> float:
        """The cost of an assignment and of what it takes beyond the limits, at ``share`` of the present prices."""
        return known.cost + share * float(self.values @ (known.profile - self.room))


class Pool:
    """The assignments of least Lagrangian among those that were found; half of them for when prices will be lower."""

    def __init__(self, size: int = 40) -> None:
        self._size, self._known = size, list[Known]()

    def add(self, known: Known, prices: Prices) -> None:
        if any(k.cost == known.cost and np.array_equal(k.choice, known.choice) for k in self._known):
            return
        self._known.append(known)
        if len(self._known) > self._size:
            self._known.sort(key=prices.lagrangian)
            rest = self._known[self._size // 2 :]
            rest.remove(max(rest, key=lambda k: prices.lagrangian(k, _LOWER)))
            self._known[self._size // 2 :] = rest

    def least(self, prices: Prices) -> tuple[float, Known]:
        """The least Lagrangian, and the assignment that has it."""
        return min(((prices.lagrangian(k), k) for k in self._known), key=lambda pair: pair[0])
