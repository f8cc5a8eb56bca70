"""Eliminate choices that no optimal assignment contains, by a lower bound and a known assignment close to it.

An assignment takes one choice for each node; nodes and pairs of nodes have costs (pairs in tables). A sequential dual
ascent (TRW-S: Kolmogorov, "Convergent Tree-reweighted Message Passing", 2006, on monotonic chains) moves costs between
nodes and tables. This does not change the cost of any assignment. The sum of all minima is then a lower bound. If a
choice exceeds the minimum of its node by more than the gap between the lower bound and the known assignment, the choice
is removed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.pairwise.improve import improve_assignment

Vector = NDArray[np.float64]

Table = NDArray[np.float64]
Mask = NDArray[np.bool_]

_SWEEPS = 60

_LOOK = 5  # sweeps between two checks of the gap
_CLOSE = 1e-10  # relative gap at which the assignment is taken as optimal
_NEAR = 0.3  # stop if the rate of the last sweeps would close less than this fraction of the gap
_SLACK = 1e-9  # relative rounding error of costs
_IMPROVED_S = 2.0  # time limit of the improvement of an assignment that is not proven to be optimal


class Reparametrization:
    """The node costs and the edge cost tables of a pairwise assignment problem (one choice per node at minimum cost).

    Costs are moved between nodes and tables to increase the sum of their minima, which is a lower bound. The total cost
    of each assignment stays unchanged. ``unary``: node -> costs of its choices. ``tables``: pair of nodes -> costs of
    each pair of their choices."""

    def __init__(self, costs: Mapping[int, Vector], tables: Mapping[tuple[int, int], Table]) -> None:
        self.unary = {i: cost.copy() for i, cost in costs.items()}
        self.tables = {pair: table.copy() for pair, table in tables.items()}
        self.near: dict[int, list[tuple[tuple[int, int], int, bool]]] = {i: [] for i in costs}
        place = {node: number for number, node in enumerate(costs)}
        for i, j in tables:
            self.near[i].append(((i, j), 0, place[j] > place[i]))  # pair, dim of the node, whether the other is later
            self.near[j].append(((i, j), 1, place[i] > place[j]))
        # moves of finite costs leave infinite entries where they are, so that all minima stay finite
        self._has_finite_minima = all(map(_is_finite, costs.values())) and all(
            _is_finite(np.minimum.reduce(table, axis=dim)) for table in tables.values() for dim in (0, 1)
        )

    @property
    def bound(self) -> float:
        return sum_of_minima(self.unary, self.tables)

    def sweep(self, forward: bool) -> None:
        """Raise the lower bound by moving costs between nodes and edge tables, through all nodes in order (``forward``)
        or in reverse. Each node collects the minima of its edge tables. It then moves cost to the tables that it shares
        with nodes which come later in this direction. The total cost of each assignment (one choice for each node)
        stays unchanged.
        """
        for node in self.unary if forward else reversed(self.unary):
            unary = self._gather_messages(node)
            ahead = [(pair, dim) for pair, dim, later in self.near[node] if later == forward]
            parts = max(len(ahead), len(self.near[node]) - len(ahead), 1)
            if ahead:
                share = (unary - np.minimum.reduce(unary)) / parts
                moved = share if self._has_finite_minima else _replace_infinite_by_zero(share)
            for pair, dim in ahead:
                table = self.tables[pair]
                np.add(table, share[:, None] if dim == 0 else share, out=table)
                unary = unary - moved
            self.unary[node] = unary

    def _gather_messages(self, node: int) -> Vector:
        """Subtract the minima of all cost tables of ``node`` from the tables, and return the costs of the node's
        choices with these minima added. A table has the costs of all pairs of choices of ``node`` and one neighbour; a
        minimum is taken over the neighbour's choices. If the caller stores the result, the total cost of each
        assignment (one choice per node) stays unchanged."""
        unary = self.unary[node]
        for pair, dim, _ in self.near[node]:
            table = self.tables[pair]
            least = np.minimum.reduce(table, axis=1 - dim)
            unary = unary + least
            moved = least if self._has_finite_minima else _replace_infinite_by_zero(least)
            table -= moved[:, None] if dim == 0 else moved
        return unary

    def assignment(self) -> dict[int, int]:
        """Return a good assignment of one choice to each node: node -> index of its choice. One node after the other
        takes its cheapest choice; then the choices of single nodes are improved as long as the total cost falls, in at
        most ten rounds."""
        choice: dict[int, int] = {}
        for node in self.unary:
            choice[node] = int(self._compute_conditional_costs(node, choice).argmin())
        for _ in range(10):
            before = dict(choice)
            for node in self.unary:
                choice[node] = int(self._compute_conditional_costs(node, choice).argmin())
            if choice == before:
                break
        return choice

    def _compute_conditional_costs(self, node: int, choice: Mapping[int, int]) -> Vector:
        """Return, given the choices of other nodes, the cost of each choice of ``node`` of this assignment problem (one
        choice per node), including the costs of the node's edges. A neighbour that is not in ``choice`` takes the
        choice that is cheapest on its edge to ``node``. ``choice``: node -> index of its choice."""
        cost = self.unary[node]
        for pair, dim, _ in self.near[node]:
            other = choice.get(pair[1 - dim])
            table = self.tables[pair]
            if other is None:
                cost = cost + np.minimum.reduce(table, axis=1 - dim)
            else:
                cost = cost + (table[:, other] if dim == 0 else table[other])
        return cost

    def cost(self, choice: Mapping[int, int]) -> float:
        total = sum(float(cost[choice[i]]) for i, cost in self.unary.items())
        return total + sum(float(table[choice[i], choice[j]]) for (i, j), table in self.tables.items())

    def allowed(self, room: float) -> dict[int, Mask]:
        """Return node -> boolean array over its choices. An entry is true if the choice may be part of an assignment
        (one choice per node) that costs at most ``room`` more than the lower bound."""
        masks = {}
        for node, unary in self.unary.items():
            extra = unary - unary.min()
            for pair, dim, _ in self.near[node]:
                least = self.tables[pair].min(axis=1 - dim)
                extra = extra + (least - least.min())
            masks[node] = extra <= room
        return masks


def sum_of_minima(costs: Mapping[int, Vector], tables: Mapping[tuple[int, int], Table]) -> float:
    """Return a lower bound on the cost of every assignment (one choice per node): the sum of the least cost of each
    node and the least entry of each table. ``costs``: node -> costs of its choices. ``tables``: pair of nodes -> costs
    of each pair of their choices."""
    return sum(float(c.min()) for c in (*costs.values(), *tables.values()))


@dataclass(frozen=True)
class RemainingChoices:
    """The result of a dual ascent, an algorithm that raises a lower bound on an assignment problem (one choice per node
    at minimum cost).

    ``masks``: node -> boolean array over its choices, true for choices that an optimal assignment may contain. If an
    optimal assignment was found, only its choices are true. ``choice``: a good assignment, node -> index of its choice;
    ``None`` if none was found. ``bound``: a lower bound on the cost of every assignment."""

    masks: dict[int, Mask]
    choice: dict[int, int] | None
    bound: float


def find_remaining_choices(costs: Mapping[int, Vector], tables: Mapping[tuple[int, int], Table]) -> RemainingChoices:
    """Run a dual ascent, which raises a lower bound, on a pairwise assignment problem (one choice per node at minimum
    cost). Return the choices of each node that an optimal assignment may contain, a good assignment if one was found,
    and the lower bound.

    ``costs``: node -> costs of its choices. ``tables``: pair of nodes -> costs of each pair of their choices."""
    dual = Reparametrization(costs, tables)
    best, least, bound = None, np.inf, -np.inf
    for sweep in range(_SWEEPS):
        dual.sweep(forward=sweep % 2 == 0)
        if sweep % _LOOK == _LOOK - 1:
            choice = dual.assignment()
            cost = dual.cost(choice)
            if cost < least:
                best, least = choice, cost
            if best is None:  # no allowed assignment yet, and nothing to compare with
                continue
            raised = dual.bound
            if least - raised <= _CLOSE * abs(least):
                return _keep_assignment(best, costs, raised)
            if (raised - bound) * (_SWEEPS - sweep) / _LOOK <= _NEAR * (least - raised):  # too slow
                break
            bound = raised
    if best is not None:
        best = improve_assignment(costs, tables, best, time.perf_counter() + _IMPROVED_S)
        least = dual.cost(best)
        if least - dual.bound <= _CLOSE * abs(least):
            return _keep_assignment(best, costs, dual.bound)
    if not np.isfinite(least) or not np.isfinite(dual.bound):
        return RemainingChoices({node: np.ones(len(cost), bool) for node, cost in costs.items()}, best, dual.bound)
    return RemainingChoices(dual.allowed(least - dual.bound + _SLACK * abs(least)), best, dual.bound)


def _keep_assignment(best: dict[int, int], costs: Mapping[int, Vector], bound: float) -> RemainingChoices:
    """Return the result of a dual ascent that found an optimal assignment: only the choices of the assignment remain.
    ``best``: node -> index of its choice. ``costs``: node -> costs of its choices. ``bound``: a lower bound on the cost
    of every assignment."""
    return RemainingChoices({node: _mask_single_index(len(costs[node]), best[node]) for node in costs}, best, bound)


def _replace_infinite_by_zero(values: Vector) -> Vector:
    """Return ``values`` with every infinite entry replaced by 0."""
    return np.where(values < np.inf, values, 0.0)


def _is_finite(values: Vector) -> bool:
    return bool(np.isfinite(values).all())


def _mask_single_index(size: int, index: int) -> Mask:
    mask = np.zeros(size, bool)
    mask[index] = True
    return mask
