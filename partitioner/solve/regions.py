"""Regions of a graph for a search to work on: around what is dear or joins much, or around who shares a full row."""

from __future__ import annotations

import numpy as np

from partitioner.solve.flat import Flat
from partitioner.solve.memory import Usage
from partitioner.solve.presolve import Choices, Vector

_HUB = 30  # neighbours of which a region follows no more
_NEAREST, _STEP = 1e-9, 4.0  # the weight of a centre, and how it grows with every step away
_FULLEST = 5  # rows are drawn with this power of how full they are


class Regions:
    """Draws nodes of ``flat`` and weights that grow with their distance from a centre."""

    def __init__(self, flat: Flat, rng: np.random.Generator) -> None:
        self._flat, self._rng = flat, rng
        self._degree = flat.num_sides.astype(np.float64)

    def around(self, choice: Choices, number: int, most: int) -> dict[int, float]:
        """``most`` nodes around each of ``number`` centres.

        Centres are drawn by how many neighbours they have or by how far they cost more than they must in the
        assignment ``choice``: what is dear or joins much would else never change.
        """
        rng, degree = self._rng, self._degree
        if not degree.any():
            return {}
        found = dict[int, float]()
        for _ in range(number):
            weight = degree if rng.random() < 0.4 else self._regret(choice) * (degree > 0.0)
            weight = weight if weight.any() else degree
            if rng.random() < 0.3:
                weight = np.sqrt(weight)
            found = self._grown(int(rng.choice(len(weight), p=weight / weight.sum())), most) | found
        return found

    def at_row(self, usage: Usage, spare: Vector, number: int, most: int) -> dict[int, float]:
        """``most`` nodes around each of ``number`` centres that may take more or less of one row, a full one rather.

        Args:
            spare: what is left in each row.
        """
        rng, flat = self._rng, self._flat
        if not len(spare):
            return {}
        weight = (1.0 - np.clip(spare / max(float(spare.max()), 1e-300), 0.0, 1.0)) ** _FULLEST + 1e-9
        taken = usage.at(int(rng.choice(len(weight), p=weight / weight.sum())))
        spread = np.sqrt(np.maximum.reduceat(taken, flat.start) - np.minimum.reduceat(taken, flat.start))
        found = dict[int, float]()
        for _ in range(number if spread.any() else 0):
            found = self._grown(int(rng.choice(len(spread), p=spread / spread.sum())), most) | found
        return found

    def _grown(self, centre: int, most: int) -> dict[int, float]:
        flat, rng = self._flat, self._rng
        edge, weight = [centre], _NEAREST
        taken = {centre: weight}
        while edge and len(taken) < most:
            weight *= _STEP
            after = list[int]()
            for node in edge:
                around = [j for j in flat.near[node] if j not in taken]
                if len(around) > _HUB:
                    around = rng.choice(around, _HUB, replace=False).tolist()
                for j in around[: most - len(taken)]:
                    taken[j] = weight
                    after.append(j)
            edge = [after[k] for k in rng.permutation(len(after)).tolist()]
        return taken

    def _regret(self, choice: Choices) -> Vector:
        """Per node, its cost above its least, and half of what its tables cost."""
        flat = self._flat
        own = flat.cost[flat.start + choice] - np.minimum.reduceat(flat.cost, flat.start)
        tables = 0.5 * flat.table_costs(choice)
        for ends in (flat.first, flat.second):
            own += np.bincount(ends, tables, minlength=len(own))
        regret: Vector = np.maximum(own, 0.0)
        return regret
