"""Search of a large problem: propagate beliefs at prices of memory, then solve large parts of the graph exactly.

Prices per row of memory follow the assignments, and beliefs are propagated at these prices until both have settled
(``beliefs.py``). Then steps of several kinds take turns; a kind that gained more is used more often:

* belief propagation is continued;
* a random cutset keeps its present choices, and the rest is solved exactly by dynamic programming
  (``partitioner/solve/pairwise/dynamic_programming.py``), over all choices of each node or over proposed ones
  (``moves.py``), for the whole graph or for a region;
* a small part is solved with its memory rows by an exact solver (``moves.py``).

An assignment that exceeds a limit is repaired (``repair.py``), and the cheapest assignment that fits is kept.

``conditioned_order`` gives an elimination order of bounded width, and the cutset that this takes (cutset conditioning:
Pearl, 1988; w-cutsets: Bidyuk and Dechter, 2007). With a new random cutset, each step searches another large
neighbourhood and finds its best member.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.iopddl_solver.beliefs import AssignmentPool, BeliefPropagation, PricedAssignment, Prices
from benchmarks.iopddl_solver.moves import NeighbourhoodSearch, Proposals, Regions
from benchmarks.iopddl_solver.repair import Repair
from benchmarks.iopddl_solver.state import FlatProblem
from partitioner.background import Finding
from partitioner.solve.pairwise.dynamic_programming import eliminate_nodes
from partitioner.solve.pairwise.live_memory import Usage
from partitioner.solve.pairwise.presolve import Choices, Table, Vector


def conditioned_order(
    sizes: Mapping[int, int], neighbours: Mapping[int, set[int]], most_entries: float, weights: Sequence[float]
) -> list[int]:
    """The nodes outside the cutset, in an order in which no table of their elimination exceeds ``most_entries``.

    The node of the smallest table goes next. Where even that is too large, the node of it with most neighbours goes
    into the cutset, neighbours being weighed with ``weights[node]``. ``sizes`` are numbers of choices.
    """
    near = {node: set(others) for node, others in neighbours.items()}
    log = {node: math.log(size) for node, size in sizes.items()}
    score = {node: log[node] + sum(log[j] for j in others) for node, others in near.items()}
    heap = [(s, node) for node, s in score.items()]
    heapq.heapify(heap)
    most, order = math.log(most_entries) + 1e-9, list[int]()
    while heap:
        known, node = heapq.heappop(heap)
        if node not in near:
            continue
        now = score[node]
        if now > known + 1e-9:  # it has grown since
            heapq.heappush(heap, (now, node))
            continue
        if now > most:
            cut = max((*near[node], node), key=lambda j: len(near[j]) * log[j] * weights[j])
            for j in near.pop(cut):
                near[j].discard(cut)
                score[j] -= log[cut]
                heapq.heappush(heap, (score[j], j))
            if cut != node:
                heapq.heappush(heap, (score[node], node))
            continue
        around = near.pop(node)
        order.append(node)
        for j in around:
            mine = near[j]
            mine.discard(node)
            new = around - mine
            new.discard(j)
            mine |= new
            score[j] += sum([log[k] for k in new]) - log[node]
            if len(new) <= 1:
                heapq.heappush(heap, (score[j], j))
    return order


_PASSES, _UNPRICED = 20, 8  # of messages in a step, and before there are prices

_SMOOTH = 0.7  # of the memory profile that prices follow, from one pass to the next
_SETTLED, _SETTLED_SHARE = 8, 0.35  # steps without progress, or the part of the time, that beliefs have for themselves
_PROGRESS = 1e-3  # of the cost
_DAMPING, _DAMPINGS = 0.5, (0.3, 0.5, 0.8)
_ASTRAY = (0.2, 0.4, 0.4)  # how often settled beliefs are in part forgotten, at other prices, or held
_FORGET_SHARES = (0.1, 0.5, 1.0)
_HELD_NODES, _RANKS, _SAME = (
    100,
    12,
    1e-5,
)  # nodes and choices that are held, unless they are as good, in parts of a cost
_FIRST_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 1e5, 5e4, 1e7  # entries of the largest table
_FIRST_STEP = 2e-4  # seconds per node, a guess at the time of the first step
_STEP_SECONDS = 1.0  # of a step, which the width follows
_BELIEVING = 0.5  # the share of beliefs, beside 1 for all kinds together and 1 for those that gain
_SMALL = 1e-4  # of the cost, a gain per second that does not count
_LEAST_S = 0.01  # of a step, as far as shares of time go
_PATIENCE = 15  # steps without progress, after which the search is kicked
_MENDABLE = 0.15  # parts of the limit
_LATE = 0.7  # of the time, after which everything is mended
_DESCENT = 8  # steps after a kick before it is judged
_REGION, _PART = (200, 1000, 4000), 60  # nodes


@dataclass
class AssignmentSearch:
    """The ``best`` assignment found, which fits if ``overflow`` is not positive, and the search's ``prices``.

    ``bound`` is a lower bound where the graph is so narrow that no cutset is needed, and minus infinity elsewhere.
    """

    flat: FlatProblem
    usage: Usage
    room: Vector
    seed: int = 0
    parts: NeighbourhoodSearch | None = None
    best: Choices = field(init=False)
    cost: float = field(init=False, default=np.inf)
    overflow: float = field(init=False, default=np.inf)
    bound: float = field(init=False, default=-np.inf)
    prices: Prices = field(init=False)
    steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self.prices = Prices(self.room)
        self._proposals = Proposals(self.flat, self._rng)
        self._isolated = self.flat.num_sides == 0
        self._regions = Regions(self.flat, self._rng)
        self._pool = AssignmentPool()
        self._beliefs: BeliefPropagation | None = None  # made when first needed: some problems never do
        self._believed, self._turns, self._half = self.flat.cost, list[tuple[int, int, int]](), self.seed
        self._smooth, self._scale = np.zeros(len(self.room)), 0.0
        self.keep(self.flat.best(self.usage.total()))
        self._now, self._stale, self._away, self._until = self.best, 0, 0, np.inf
        self._mendable = _MENDABLE
        self._width = _FIRST_WIDTH

    def run(self, until: float, exchange: Callable[[], None] = lambda: None) -> None:
        """Searches until ``until`` of ``time.perf_counter``; a step is only begun if the last ones would fit.

        ``exchange`` is called between steps, and may :meth:`keep` what was found elsewhere.
        """
        kinds = [lambda: self._widely(0), lambda: self._widely(2), lambda: self._widely(4), self._locally]
        kinds += [self._exactly] if self.parts is not None else []
        kinds.append(lambda: self._believe(settled=settled))
        worth, longest = np.zeros(len(kinds)), np.full(len(kinds), _FIRST_STEP * float((~self._isolated).sum()))
        usual, base = np.full(len(kinds), _STEP_SECONDS), np.full(len(kinds), 1.0 / len(kinds))
        base[-1] = _BELIEVING
        self._until, settled, waiting, reached = until, False, 0, np.inf
        start = time.perf_counter()
        alone, late = (start * (1 - share) + until * share for share in (_SETTLED_SHARE, _LATE))
        while not self.proven:
            begin, before = time.perf_counter(), self.cost
            waiting = 0 if self.cost < reached * (1.0 - _PROGRESS) else waiting + 1
            reached = min(reached, self.cost)
            settled |= begin > alone or waiting > _SETTLED
            chance = (worth / (worth.sum() + _SMALL) + base) / usual  # shares of time
            kind = int(self._rng.choice(len(kinds), p=chance / chance.sum())) if settled else len(kinds) - 1
            if self.steps == 0:
                kind = 0  # solves what is narrow, and says so
            if begin + longest[kind] > until:
                return
            self._mendable = _MENDABLE if begin < late else np.inf
            kinds[kind]()
            exchange()
            self.steps += 1
            took = time.perf_counter() - begin
            usual[kind] = 0.8 * usual[kind] + 0.2 * max(took, _LEAST_S)
            if settled and before > 0.0:
                worth[kind] = 0.9 * worth[kind] + 0.1 * max(0.0, 1.0 - self.cost / before) / max(took, _LEAST_S)
            if kind < len(kinds) - 1 and took < 0.5 * _STEP_SECONDS:
                self._width = min(1.1 * self._width, _MOST_WIDTH)
            elif kind < len(kinds) - 1 and took > _STEP_SECONDS:
                self._width = max(0.8 * self._width, _LEAST_WIDTH)
            longest[kind] = max(0.8 * longest[kind], 1.1 * took)

    @property
    def proven(self) -> bool:
        """Whether nothing is cheaper than the best assignment, which fits."""
        return self.overflow <= 0.0 and self.bound >= self.cost * (1.0 - 1e-8)

    @property
    def finding(self) -> Finding:
        return Finding(self.best, self.cost, self.overflow, self.bound)

    def _value(self) -> float:
        """What steps shall make smaller: the cost of the best assignment and the least Lagrangian of the known ones."""
        return self.cost + max(self._pool.least(self.prices)[0], 0.0) + 1.0

    def _widely(self, few: int) -> None:
        """A step over the whole graph, with ``few`` choices per node or all (0), after which prices follow."""
        if self._away == 0:
            self._now = self._pool.least(self.prices)[1].choice
            if self._stale > _PATIENCE:
                self._now, self._away, self._stale = self._kicked(), _DESCENT, 0
        else:
            self._away -= 1
        before = self._value()
        centres = self._regions.around(self.best, int(self._rng.integers(0, 4)), 1)
        self._now = choice = self._solve(self._now, self.prices.values, few, centres)
        if not self.keep(choice):
            self._mend(choice)
        self._stale = 0 if self._value() < before * (1.0 - 1e-6) else self._stale + 1
        if self._away == 0:
            known = self._pool.least(self.prices)[1]
            self.prices.update(known.profile, min(known.cost, self.cost))

    def _believe(self, settled: bool) -> None:
        """Passes of messages at prices that follow, and the assignment that the beliefs give.

        Once that has settled, from beliefs that are led astray first: in part forgotten, at other prices, or with a
        node that joins many others kept from what is believed best of it, of which beliefs are too sure.
        """
        rng, beliefs = self._rng, self._beliefs or BeliefPropagation(self.flat)
        self._beliefs, damping = beliefs, _DAMPING
        if settled:
            damping, kind = float(rng.choice(_DAMPINGS)), rng.choice(3, p=_ASTRAY)
            if kind == 0:
                beliefs.forget(float(rng.choice(_FORGET_SHARES)), rng)
            else:
                prices = self.prices.disturbed(self._scale, rng) if kind == 1 else self.prices.values
                extra = self.usage.priced(prices)
                if kind == 2:
                    extra += self._held()
                    beliefs.forget(1.0, rng)
                for _ in range(kind * _PASSES):
                    self._believed = beliefs.propagate(self.flat.cost + extra, damping)
                self._decide(extra, settled)
        for _ in range(_PASSES if self._scale else _UNPRICED):
            priced = self.usage.priced(self.prices.values)
            self._believed = beliefs.propagate(self.flat.cost + priced, damping)
            if self._scale:
                profile = self.usage.profile(self.flat.start + self.flat.best(self._believed))
                self._smooth = _SMOOTH * self._smooth + (1.0 - _SMOOTH) * profile
                self.prices.update(self._smooth, self._scale)
            if time.perf_counter() > self._until:
                break
        self._decide(self.usage.priced(self.prices.values), settled)

    def _held(self) -> Vector:
        """What keeps one node, that has many neighbours, at a choice that is believed good but not best.

        In turn, the second best choice of the node of most neighbours first; two searches begin with half each.
        """
        flat = self.flat
        if not self._turns:
            joined = np.where(flat.sizes > 1, flat.num_sides, 0)
            nodes = np.argsort(-joined, kind="stable")[: min(_HELD_NODES, int((joined > 0).sum()))]
            turns = [(rank * (k + 1), node, rank) for k, node in enumerate(nodes.tolist()) for rank in range(1, _RANKS)]
            self._turns = sorted((t for t in turns if t[2] < flat.sizes[t[1]]), reverse=True)[self._half % 2 :: 2]
            self._half += 1
        held = np.zeros(len(flat.cost))
        while self._turns:
            _, node, rank = self._turns.pop()
            choices = slice(flat.start[node], flat.start[node] + flat.sizes[node])
            order = np.argsort(self._believed[choices])
            if np.ptp(self._believed[choices][order[[0, rank]]]) > _SAME * self._scale:
                held[choices] = flat.forbidden
                held[choices][order[rank]] = 0.0
                break
        return held

    def _decide(self, extra: Vector, settled: bool) -> None:
        """Tries the assignment that is believed best and, once settled, the best mixture of it and the best known."""
        choice = self.flat.descend(self.flat.best(self._believed), extra)
        known = self._known(choice)
        if not self._scale:
            self._smooth = known.profile
            if self.prices.excess(known.profile).max(initial=0.0) > 0.0:
                self.prices.start(known.cost)
        self._scale = min(known.cost, self.cost) or 1.0
        mixed = [self._solve(self.best, self.prices.values, 0, {}, other=choice)] if settled else []
        for tried in (choice, *mixed):
            if not self.keep(tried):
                self._mend(tried)

    def _locally(self) -> None:
        """A step from the best assignment, over one region in which all choices are allowed."""
        factor = float(self._rng.choice([0.0, 0.5, 1.0, 1.0, 2.0]))
        region = self._regions.around(self.best, 1, int(self._rng.choice(_REGION)))
        choice = self._solve(self.best, factor * self.prices.values, 0, region, only=True)
        if not np.array_equal(choice, self.best) and not self.keep(choice):
            self._mend(choice)

    def _exactly(self) -> None:
        """Solves a part of the best assignment, or of one that exceeds the limit, with the memory rows that bind."""
        assert self.parts is not None
        number = int(self._rng.integers(1, 4))
        kind = self._rng.random()
        base = self.best
        if kind < 0.4:
            over = self._pool.cheaper(self.prices, self.cost, self._mendable)
            base = over[int(self._rng.integers(len(over)))].choice if over else base
        spare = self.room - self.usage.profile(self.flat.start + base)
        if kind < 0.7:
            region = self._regions.at_row(self.usage, spare, number, _PART)
        else:
            region = self._regions.around(base, number, _PART)
        choice = self.parts.improve(base, sorted(region, key=region.__getitem__), self._until)
        if choice is not None:
            self.keep(choice)

    def _kicked(self) -> Choices:
        """An assignment near the present one: some nodes, chosen at random, have random choices."""
        kicked = self._rng.random(len(self._now)) < float(self._rng.choice([0.05, 0.2, 0.5, 1.0]))
        return np.where(kicked, self._proposals.together(), self._now)

    def _mend(self, choice: Choices) -> bool:
        """Whether a repair of an assignment makes it the best. Not tried on what is far from the limit."""
        known = self._known(choice)
        dearer = self.overflow <= 0.0 and known.cost >= self.cost
        if dearer or self.prices.excess(known.profile).max(initial=0.0) > self._mendable:
            return False
        repair = Repair(self.flat, self.usage, self.room, choice)
        repair.run(self._until)
        return self.keep(repair.choice)

    def keep(self, choice: Choices) -> bool:
        """Whether ``choice`` is better than the best: less over the limit, or within it and cheaper."""
        known = self._known(choice)
        self._pool.add(known, self.prices)
        overflow = max(0.0, float(np.max(known.profile - self.room, initial=0.0)))
        if (overflow, known.cost) >= (self.overflow, self.cost):
            return False
        self.best, self.overflow, self.cost = choice, overflow, known.cost
        return True

    def _solve(
        self,
        choice: Choices,
        prices: Vector,
        few: int,
        centres: dict[int, float],
        *,
        only: bool = False,
        other: Choices | None = None,
    ) -> Choices:
        """The best assignment at ``prices`` that keeps a random cutset of ``choice``.

        Args:
            few: how many choices per node are looked at, but for ``centres`` and their neighbours; 0 means all.
            centres: nodes that shall rather stay out of the cutset, and how much.
            only: whether all nodes but ``centres`` keep their choices.
            other: if given, each node keeps its choice or takes that of this assignment.
        """
        flat, rng = self.flat, self._rng
        priced = self.usage.priced(prices)
        result: Choices = np.where(self._isolated, flat.best(flat.cost + priced), choice)
        allowed: NDArray[np.bool_] | None = None
        if only:
            allowed = np.zeros(len(flat.cost), bool)
            result = choice.copy()
        elif other is not None:
            allowed = np.zeros(len(flat.cost), bool)
            allowed[flat.start + choice] = allowed[flat.start + other] = True
        elif few:
            allowed = self._proposals.draw(choice, priced, few, self.best)
        if allowed is not None:
            for node in centres if only else {j for i in centres for j in (i, *flat.near[i])}:
                allowed[flat.start[node] : flat.start[node] + flat.sizes[node]] = True
        domains = self._domains(allowed)
        near = {i: {j for j in flat.near[i] if j in domains} for i in domains}
        weights = np.exp(rng.choice([1.0, 2.0]) * rng.standard_normal(len(choice)))
        weights[list(centres)] *= np.array(list(centres.values()))
        sizes = {i: len(d) for i, d in domains.items()}
        order = conditioned_order(sizes, near, self._width * float(rng.choice([0.1, 1.0])), weights.tolist())
        free = np.zeros(len(choice), bool)
        free[order] = True
        unary = self._unary(free, choice) + priced
        costs: dict[int, Vector] = {i: unary[flat.start[i] + domains[i]] for i in order}
        tables = [
            (int(flat.first[e]), int(flat.second[e]), self._table(e, domains))
            for e in (free[flat.first] & free[flat.second]).nonzero()[0].tolist()
        ]
        for i, p in eliminate_nodes(costs, tables, order)[0].items():
            result[i] = domains[i][p]
        if allowed is None and len(order) == len(domains):  # nothing was fixed: no assignment has a lower Lagrangian
            known = self._known(result)
            value = known.cost + float(prices @ (known.profile - self.room))
            self.bound = max(self.bound, value - 1e-9 * (abs(value) + known.cost))
        return result

    def _known(self, choice: Choices) -> PricedAssignment:
        return PricedAssignment(choice, self.flat.total(choice), self.usage.profile(self.flat.start + choice))

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

    def _table(self, e: int, domains: dict[int, Choices]) -> Table:
        rows, columns = domains[int(self.flat.first[e])], domains[int(self.flat.second[e])]
        table = self.flat.tables[e]
        if table.shape == (len(rows), len(columns)):
            return table
        return table[rows[:, None], columns]
