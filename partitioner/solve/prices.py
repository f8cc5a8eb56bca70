"""Prices of memory per row, which rise where an assignment takes too much and fall where it leaves room.

A subgradient step on the Lagrangian of the memory rows (Held and Karp, 1971), with two changes for a search that only
approximates the minimum: of neighbouring rows, which exceed their limit together, only the fullest is priced; and the
step grows while the rows keep their signs and shrinks when they change them.
"""

from __future__ import annotations

import numpy as np

from partitioner.solve.presolve import Vector

_WINDOWS = 128
_FIRST_STEP, _LEAST_STEP, _MOST_STEP = 0.05, 2e-3, 2.0


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
            self._step *= 1.15 if agree > 0.1 else 0.75 if agree < -0.1 else 1.0
            self._step = min(max(self._step, _LEAST_STEP), _MOST_STEP)
        self._before = 0.5 * (self._before + step)
        most = 0.5 / max(float(np.abs(step).sum()), 1e-30)  # keeps one step from moving the cost by much
        self.values = np.maximum(self.values + min(self._step, max(most, _FIRST_STEP)) * scale / self.unit * step, 0.0)
