"""Belief propagation: what each choice of each node would cost all in all, estimated by messages along the tables.

A table tells each of its two nodes what every choice of it costs at least, beside all that the other node was told
elsewhere (min-sum; Pearl, 1988). On a tree the beliefs are exact; on a graph with circles they need not even settle,
but what they decide together, hubs and whole layers included, is far beyond moves of single nodes, and a pass over all
tables takes milliseconds: all tables of one shape are updated at once, in single precision, and messages are damped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.flat import Flat
from partitioner.solve.presolve import Vector

_Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Group:
    """Tables of one shape, ``tables[p, q, e]``, and what they tell their nodes, ``to_first[p, e]``."""

    tables: _Floats
    first: NDArray[np.intp]  # [p, e]: the place of the choice among all choices
    second: NDArray[np.intp]
    to_first: _Floats
    to_second: _Floats


class Beliefs:
    """The messages of all tables of ``flat``."""

    def __init__(self, flat: Flat) -> None:
        self._groups = list[_Group]()
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
            self._groups.append(_Group(tables, first, second, *zeros))
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
