"""Search of a large problem: solve as much of the graph as is narrow enough, exactly, again and again.

Each step fixes a random cutset at its present choices and solves the rest by dynamic programming (``cutset.py``,
``elimination.py``), over all choices of each node or over a few that are proposed (``proposals.py``). Memory enters by
prices per row that follow the assignment (``prices.py``); what exceeds a limit is repaired (``repair.py``), and the
cheapest assignment that fits is kept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.cutset import conditioned_order
from partitioner.solve.elimination import eliminate
from partitioner.solve.flat import Flat
from partitioner.solve.memory import Usage
from partitioner.solve.presolve import Choices, Table, Vector
from partitioner.solve.prices import Prices
from partitioner.solve.proposals import Proposals
from partitioner.solve.repair import Repair

_WARM_UP = 4  # steps without prices
_WIDTHS = (1e4, 1e5, 1e5, 1e6)  # entries of the largest table
_FEW = (2, 2, 3, 4)
_PATIENCE = 12  # steps without a better assignment, after which the search goes on from the best one


@dataclass
class Search:
    """The ``best`` assignment found, which fits if ``overflow`` is not positive, and the search's ``prices``."""

    flat: Flat
    usage: Usage
    room: Vector
    seed: int = 0
    best: Choices = field(init=False)
    cost: float = field(init=False, default=np.inf)
    overflow: float = field(init=False, default=np.inf)
    prices: Prices = field(init=False)
    steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self.prices = Prices(self.room)
        self._proposals = Proposals(self.flat, self._rng)
        self._isolated = self.flat.num_sides == 0
        self.best = self.flat.best(self.usage.total())
        self._keep(self.best)

    def run(self, until: float) -> None:
        """Searches until ``until`` of ``time.perf_counter``; a step is only begun if the last ones would fit."""
        choice, longest, stale = self.best, 0.0, 0
        while True:
            begin = time.perf_counter()
            if begin + longest > until:
                return
            choice = self._step(choice)
            fits = self._keep(choice)
            profile = self.usage.profile(self.flat.start + choice)
            cost = self.flat.total(choice)
            better = fits
            if not fits and self.steps > _WARM_UP and cost < self.cost:
                repair = Repair(self.flat, self.usage, self.room, choice)
                repair.run(until)
                better = self._keep(repair.choice)
            stale = 0 if better else stale + 1
            if self.steps >= _WARM_UP:
                self.prices.update(profile, min(cost, self.cost))
            if stale > _PATIENCE and self.overflow <= 0.0:
                choice, stale = self.best, 0
            self.steps += 1
            longest = max(0.8 * longest, time.perf_counter() - begin)

    def _keep(self, choice: Choices) -> bool:
        """Whether ``choice`` is better than the best: less over the limit, or within it and cheaper."""
        profile = self.usage.profile(self.flat.start + choice)
        overflow = max(0.0, float(np.max(profile - self.room, initial=0.0)))
        cost = self.flat.total(choice)
        if (overflow, cost) >= (self.overflow, self.cost):
            return False
        self.best, self.overflow, self.cost = choice.copy(), overflow, cost
        return True

    def _step(self, choice: Choices) -> Choices:
        """The best assignment at the present prices that keeps a random cutset of ``choice``."""
        flat, rng = self.flat, self._rng
        priced = self.usage.priced(self.prices.values)
        result: Choices = np.where(self._isolated, flat.best(flat.cost + priced), choice)
        allowed: NDArray[np.bool_] | None = None
        if self.steps > _WARM_UP and rng.random() < 0.7:
            allowed = self._proposals.draw(choice, priced, int(rng.choice(_FEW)), self.best)
        centres = self._centres(int(rng.integers(0, 4)))
        if allowed is not None:
            for node in {j for i in centres for j in (i, *flat.near[i])}:
                allowed[flat.start[node] : flat.start[node] + flat.sizes[node]] = True
        domains = self._domains(allowed)
        near = {
            i: {j for j in flat.near[i] if j in domains} for i in domains
        }
        weights = np.exp(rng.choice([1.0, 2.0]) * rng.standard_normal(len(choice)))
        weights[centres] *= 1e-9
        sizes = {i: len(d) for i, d in domains.items()}
        order = conditioned_order(sizes, near, float(rng.choice(_WIDTHS)), weights.tolist())
        free = np.zeros(len(choice), bool)
        free[order] = True
        unary = self._unary(free, choice) + priced
        costs: dict[int, Vector] = {i: unary[flat.start[i] + domains[i]] for i in order}
        tables = [
            (i, j, self._table(e, domains[i], domains[j]))
            for e, (i, j) in enumerate(zip(flat.first.tolist(), flat.second.tolist(), strict=True))
            if free[i] and free[j]
        ]
        for i, p in eliminate(costs, tables, order)[0].items():
            result[i] = domains[i][p]
        return result

    def _centres(self, number: int) -> list[int]:
        """Nodes near each other, rather those of many neighbours, that are to stay free: else they never change."""
        degree = self.flat.num_sides.astype(np.float64)
        if not degree.any():
            return []
        found = list[int]()
        for _ in range(number):
            near = [j for i in found for k in self.flat.near[i] for j in (k, *self.flat.near[k]) if j not in found]
            pool = np.unique(near) if near else np.arange(len(degree))
            weight = degree[pool]
            found.append(int(self._rng.choice(pool, p=weight / weight.sum())))
        return found

    def _domains(self, allowed: NDArray[np.bool_] | None) -> dict[int, Choices]:
        """Per node that has a table and more than one choice, the choices that are allowed."""
        flat = self.flat
        nodes = (~self._isolated).nonzero()[0].tolist()
        if allowed is None:
            return {i: np.arange(flat.sizes[i]) for i in nodes if flat.sizes[i] > 1}
        places = allowed.nonzero()[0]
        owner = flat.owner[places]
        edges = np.searchsorted(owner, np.arange(len(flat.start) + 1)).tolist()
        local = places - flat.start[owner]
        return {i: local[edges[i] : edges[i + 1]] for i in nodes if edges[i + 1] - edges[i] > 1}

    def _unary(self, free: NDArray[np.bool_], choice: Choices) -> Vector:
        """Costs of all choices with the tables towards nodes that are not ``free``."""
        flat = self.flat
        side = (free[flat.side_node] & ~free[flat.side_other]).nonzero()[0]
        target, cost = flat.side_costs(side, choice[flat.side_other[side]])
        total: Vector = flat.cost + np.bincount(target, cost, minlength=len(flat.cost))
        return total

    def _table(self, e: int, rows: Choices, columns: Choices) -> Table:
        table = self.flat.tables[e]
        if table.shape == (len(rows), len(columns)):
            return table
        return table[rows[:, None], columns]
