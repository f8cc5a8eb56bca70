"""Large problems with memory over time: contract, solve whole what is small, search and bound what is not.

Followers are contracted in bulk (``contract.py``). If what is left is small it is solved whole, with the memory rows
that bind (``neighbourhood.py``). Otherwise most of the time goes into a search that solves large random parts exactly
at prices of memory (``search.py``), and the rest into a bound at these prices (``messages.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from partitioner.solve.contract import Contraction
from partitioner.solve.flat import Flat
from partitioner.solve.localsearch import State
from partitioner.solve.memory import Memory, Stretch, Usage, stretches
from partitioner.solve.messages import Dual
from partitioner.solve.neighbourhood import Exact, solve_part
from partitioner.solve.presolve import Table, Vector
from partitioner.solve.search import Search

WHOLE_ENTRIES = 120_000  # of all tables: at most so many are given to the exact solver at once
_WHOLE_SHARE = 0.6  # of the time
_DUAL_SHARE = 0.12


def solve_large(
    costs: Sequence[Vector],
    edges: Iterable[tuple[int, int, Table]],
    memory: Memory,
    exact: Exact,
    until: float,
) -> tuple[list[int], float]:
    """The best choices found before ``until`` (of ``time.perf_counter``), and a lower bound of every assignment's cost.

    The choices may exceed the memory limit, where none within it was found.
    """
    problem = Contraction(costs, edges)
    found, room, _ = stretches(memory, problem.roots, problem.maps)
    bound = sum(float(problem.costs[i].min()) for i in problem.nodes)
    known = None
    if sum(t.size for t in problem.tables.values()) <= WHOLE_ENTRIES:
        soon = time.perf_counter() + _WHOLE_SHARE * _left(until)
        known, proven, solved = _solve_whole(problem, found, room, exact, soon)
        bound = max(bound, proven)
        if solved:
            return problem.choice(known), bound
    flat = Flat(problem.nodes, problem.costs, problem.tables)
    starts = dict(zip(problem.nodes, flat.start.tolist(), strict=True))
    search = Search(flat, Usage(found, starts, len(flat.cost), len(room)), room)
    if known is not None:
        search.keep(np.array([known[i] for i in problem.nodes], np.intp))
    search.run(until - _DUAL_SHARE * _left(until))
    if search.bound >= search.cost * (1.0 - 1e-8):
        return problem.choice(dict(zip(problem.nodes, search.best.tolist(), strict=True))), search.bound
    dual = Dual(problem.nodes, problem.costs, problem.tables, found, room)
    dual.prices = search.prices.values.copy()
    raised = dual.ascend(search.cost, until - 0.02 * _left(until))
    bound = max(bound, search.bound, raised - 1e-9 * abs(raised))
    return problem.choice(dict(zip(problem.nodes, search.best.tolist(), strict=True))), bound


def _left(until: float) -> float:
    return max(0.0, until - time.perf_counter())


def _solve_whole(
    problem: Contraction, found: Mapping[int, Stretch], room: Vector, exact: Exact, until: float
) -> tuple[dict[int, int], float, bool]:
    """A choice of every root, a bound, and whether the choice is the exact solver's."""
    state = State(problem.nodes, problem.costs, problem.tables, found, room)
    state.descend(np.random.default_rng(0), time.perf_counter() + 0.3 * _left(until))
    bounds = [-np.inf]
    solved = solve_part(state, problem.nodes, exact, until, bounds) is not None
    return state.choice, max(bounds), solved
