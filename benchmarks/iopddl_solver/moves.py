"""Neighbourhoods of a search: proposed choices per node, regions of the graph, and parts for an exact solver.

``Proposals`` gives few choices per node, so that much of the graph can be solved at once. Besides the present choice
these are: the node's best choice given the others; its best answer to a change of one neighbour; the choice of a
similar node (a model repeats its layers, and a good choice in one layer is good in all); and a random one. Solving
exactly over proposed choices is a fusion move (Lempitsky, Rother, Roth and Blake, 2010).

``Regions`` selects nodes to work on: around expensive nodes, around hubs, or around nodes that share a full row.

``solve_part`` and ``NeighbourhoodSearch`` solve a part of the problem, or all of it, by mixed-integer programming, with
the memory rows, while the other nodes keep their choices (large neighbourhood search; Shaw, 1998). Where a row is full,
prices do not tell which nodes may use it; a mixed-integer program of some dozens of nodes does, in a fraction of a
second. Only memory rows that bind are needed: they are added when a solution violates them (a cutting-plane method).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.iopddl_solver.state import FlatProblem, LocalSearchState
from partitioner.solve.pairwise.live_memory import Usage
from partitioner.solve.pairwise.presolve import Choices, InfeasibleAssignmentError, Table, Vector

_TURNS = 8  # draws per node, of which many give a choice that is already allowed


class Proposals:
    """Draws choices for the nodes of ``flat``."""

    def __init__(self, flat: FlatProblem, rng: np.random.Generator) -> None:
        self._flat, self._rng = flat, rng
        colour = flat.alike()
        self._members = np.argsort(colour, kind="stable")  # nodes, those that look alike side by side
        numbers = np.bincount(colour)
        begins = np.cumsum(numbers) - numbers
        self._begin, self._number, self._colour = begins[colour], numbers[colour], colour

    def draw(self, choice: Choices, priced: Vector, most: int, known: Choices) -> NDArray[np.bool_]:
        """At most ``most`` choices per node, beside all choices of nodes that have no more.

        Args:
            choice: the present assignment, always among them.
            priced: what the memory of each choice costs.
            most: at least 2.
            known: another assignment, which may be drawn from.
        """
        flat, rng = self._flat, self._rng
        allowed = flat.sizes[flat.owner] <= most
        allowed[flat.start + choice] = True
        conditional = flat.conditional(choice) + priced
        best = flat.best(conditional)
        number = np.add.reduceat(allowed, flat.start, dtype=np.intp)
        for turn in range(_TURNS):
            drawn = self._answer(choice, conditional) if turn else best
            kind = rng.random(len(choice))
            drawn = np.where(kind < 0.1, choice[self._alike()], drawn)
            drawn = np.where((kind > 0.1) & (kind < 0.2), known, drawn)
            drawn = np.where(kind > 0.95, self.together(), drawn)
            new = (number < most) & ~allowed[flat.start + drawn]
            allowed[(flat.start + drawn)[new]] = True
            number += new
        return allowed

    def _alike(self) -> NDArray[np.intp]:
        """For each node another that looks like it, or itself."""
        which = (self._rng.random(len(self._begin)) * self._number).astype(np.intp)
        alike: NDArray[np.intp] = self._members[self._begin + which]
        return alike

    def together(self) -> Choices:
        """Random choices, the same for nodes that look alike."""
        draw = self._rng.random(len(self._colour))[self._members[self._begin]]
        drawn: Choices = (draw * self._flat.sizes).astype(np.intp)
        return drawn

    def _answer(self, choice: Choices, conditional: Vector) -> Choices:
        """Every node's best choice if one of its neighbours, at random, changed to a random choice."""
        flat = self._flat
        nodes = flat.num_sides.nonzero()[0]
        if not len(nodes):
            return flat.best(conditional)
        which = (self._rng.random(len(nodes)) * flat.num_sides[nodes]).astype(np.intp)
        side = flat.sides[flat.first_side[nodes] + which]
        other = flat.side_other[side]
        to = self.together()[other] if self._rng.random() < 0.5 else choice[self._alike()][other]
        changed = conditional.copy()
        target, after = flat.side_costs(side, to)  # one side per node: no target comes twice
        changed[target] += after - flat.side_costs(side, choice[other])[1]
        return flat.best(changed)


_HUB = 30  # neighbours of which a region follows no more

_NEAREST, _STEP = 1e-9, 4.0  # the weight of a centre, and how it grows with every step away
_FULLEST = 5  # rows are drawn with this power of how full they are


class Regions:
    """Draws nodes of ``flat`` and weights that grow with their distance from a centre."""

    def __init__(self, flat: FlatProblem, rng: np.random.Generator) -> None:
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


# (costs, tables, rows of (usage, limit), seconds) -> (choice, bound), or None where nothing was found in time
Exact = Callable[
    [list[Vector], list[tuple[int, int, Table]], list[tuple[dict[int, Vector], float]], float],
    tuple[list[int], float] | None,
]

_FIRST_ROWS, _MORE_ROWS, _ROUNDS = 24, 16, 30


def solve_part(
    state: LocalSearchState, part: Sequence[int], exact: Exact, until: float, bound: list[float] | None = None
) -> bool | None:
    """Gives ``part`` its best choices beside the rest. Whether that is cheaper; ``None`` if it was not solved.

    ``bound``, for a part that is everything, receives lower bounds of the cost. Where the state exceeds the limit, any
    answer within it is better, and :class:`InfeasibleAssignmentError` says that there is none.
    """
    place = {node: k for k, node in enumerate(part)}
    costs, tables, before = [], list[tuple[int, int, Table]](), 0.0
    for node in part:
        cost = state.costs[node].copy()
        for other, table in state.near[node]:
            if other not in place:
                cost += table[state.choice[other]]
            elif node < other:
                tables.append((place[node], place[other], table.T))
                before += float(table[state.choice[other], state.choice[node]])
        before += float(cost[state.choice[node]])
        costs.append(cost)
    lost = state.overflow > 0.0
    if lost:
        before = np.inf
    free, most = state.room - state.profile, np.zeros(len(state.room) + 1)
    members = [node for node in part if node in state.stretches]
    for node in members:
        stretch = state.stretches[node]
        now = stretch.usage[state.choice[node]]
        free[stretch.breaks[0] : stretch.breaks[-1]] += np.repeat(now, stretch.lengths)
        most[stretch.breaks] += np.diff(stretch.usage.max(axis=0), prepend=0.0, append=0.0)
    rows = _worst(np.cumsum(most)[:-1] - free, _FIRST_ROWS)
    for _ in range(_ROUNDS):
        left = until - time.perf_counter()
        if left < 0.1:
            return None
        usage = {node: state.stretches[node].at(rows) for node in members}
        limits = [
            ({place[node]: u[:, k] for node, u in usage.items() if u[:, k].any()}, float(free[row]))
            for k, row in enumerate(rows.tolist())
        ]
        try:
            answer = exact(costs, tables, limits, left)
        except InfeasibleAssignmentError:
            if lost:
                raise
            return None  # by rounding alone: the present choices are allowed
        if answer is None:
            return None
        if bound is not None:
            bound.append(answer[1])
        old = {node: state.choice[node] for node in part}
        for node, to in zip(part, answer[0], strict=True):
            state.move(node, to)
        if state.overflow <= 0.0:
            after = sum(float(c[p]) for c, p in zip(costs, answer[0], strict=True))
            after += sum(float(t[answer[0][i], answer[0][j]]) for i, j, t in tables)
            if after <= before:
                return lost or after < before * (1 - 1e-9)
            more = np.empty(0, np.intp)
        else:
            more = _worst(state.profile - state.room, _MORE_ROWS)
        for node, to in old.items():
            state.move(node, to)
        if not len(more):
            return False
        rows = np.union1d(rows, more)
    return None


def _worst(over: Vector, count: int) -> NDArray[np.intp]:
    """The row that is exceeded by most in each of up to ``count`` stretches of the rows that are exceeded."""
    rows = (over > 0).nonzero()[0]
    if not len(rows):
        return rows
    return np.array([part[over[part].argmax()] for part in np.array_split(rows, min(count, len(rows)))])


_FIRST_ENTRIES, _MOST_ENTRIES, _LEAST_ENTRIES = 20_000.0, 200_000.0, 4_000.0  # of the tables of a part

_QUICK_S, _SLOW_S, _MOST_S = 0.15, 0.6, 3.0  # of a part: the next one is larger, is smaller, and is given up


class NeighbourhoodSearch:
    """Improves assignments of ``state``'s nodes, which are numbered as in ``flat``."""

    def __init__(self, flat: FlatProblem, state: LocalSearchState, exact: Exact) -> None:
        self._flat, self._state, self._exact = flat, state, exact
        self._entries = _FIRST_ENTRIES

    def improve(self, choice: Choices, candidates: Sequence[int], until: float) -> Choices | None:
        """An assignment that is better than ``choice`` in some of ``candidates``, of which the first go first."""
        state, nodes = self._state, self._flat.nodes
        begin = time.perf_counter()
        now = dict(zip(nodes, choice.tolist(), strict=True))
        if now != state.choice:
            state.set(now)
        part = [nodes[i] for i in self._fitting(candidates)]
        try:
            better = bool(part) and solve_part(state, part, self._exact, min(until, begin + _MOST_S))
        except InfeasibleAssignmentError:  # beside the present choices of the others
            better = False
        took = time.perf_counter() - begin
        if took < _QUICK_S:
            self._entries = min(1.1 * self._entries, _MOST_ENTRIES)
        elif took > _SLOW_S:
            self._entries = max(0.7 * self._entries, _LEAST_ENTRIES)
        return np.array([state.choice[i] for i in nodes], np.intp) if better else None

    def _fitting(self, candidates: Sequence[int]) -> list[int]:
        """The first of ``candidates`` whose tables have no more entries together than may be."""
        flat, left, taken = self._flat, self._entries, dict[int, None]()
        for node in candidates:
            entries = sum(flat.tables[e].size for j, e in flat.near[node].items() if j in taken) + flat.sizes[node]
            if entries <= left:
                left -= entries
                taken[node] = None
        return list(taken)
