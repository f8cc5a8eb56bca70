"""Large problems with memory over time: contract, solve whole what is small, search and bound what is not.

Followers are contracted in bulk (``contract.py``). If what is left is small it is solved whole, with the memory rows
that bind (``moves.py``). Otherwise most of the time goes into a search at prices of memory (``search.py``), in
two processes where that can be (``partitioner/background.py``), and the rest into a bound at these prices
(``lower_bound.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from benchmarks.iopddl_solver.contract import Contraction
from benchmarks.iopddl_solver.lower_bound import LagrangianDual
from benchmarks.iopddl_solver.moves import Exact, NeighbourhoodSearch, solve_part
from benchmarks.iopddl_solver.search import AssignmentSearch
from benchmarks.iopddl_solver.state import FlatProblem, LocalSearchState
from partitioner.background import Finding, FindingSlot, ForkedWorker, can_help
from partitioner.solve.pairwise.live_memory import MemoryConstraint, Stretch, Usage, build_memory_stretches
from partitioner.solve.pairwise.presolve import Table, Vector

WHOLE_ENTRIES = 120_000  # of all tables: at most so many are given to the exact solver at once

_WHOLE_SHARE = 0.6  # of the time
_DUAL_SHARE, _HELPER_DUAL_SHARE = 0.12, 0.3
_LAST_SHARE = 0.02  # is left for what comes after
_HELPED_S = 10.0  # of time, from which on a second process is worth while


def solve_large(
    costs: Sequence[Vector],
    edges: Iterable[tuple[int, int, Table]],
    memory: MemoryConstraint,
    exact: Exact,
    until: float,
) -> tuple[list[int], float]:
    """The best choices found before ``until`` (of ``time.perf_counter``), and a lower bound of every assignment's cost.

    The choices may exceed the memory limit, where none within it was found.
    """
    problem = Contraction(costs, edges)
    found, room, _ = build_memory_stretches(memory, problem.roots, problem.maps)
    bound = sum(float(problem.costs[i].min()) for i in problem.nodes)
    known = None
    if sum(t.size for t in problem.tables.values()) <= WHOLE_ENTRIES:
        soon = time.perf_counter() + _WHOLE_SHARE * _left(until)
        known, proven, solved = _solve_whole(problem, found, room, exact, soon)
        bound = max(bound, proven)
        if solved:
            return problem.choice(known), bound
    flat = FlatProblem(problem.nodes, problem.costs, problem.tables)
    starts = dict(zip(problem.nodes, flat.start.tolist(), strict=True))
    usage = Usage(found, starts, len(flat.cost), len(room))

    def search_from(seed: int, parts: NeighbourhoodSearch | None = None) -> AssignmentSearch:
        search = AssignmentSearch(flat, usage, room, seed, parts)
        if known is not None:
            search.keep(np.array([known[i] for i in problem.nodes], np.intp))
        return search

    def raise_bound(search: AssignmentSearch, end: float, tell: Callable[[], None] = lambda: None) -> None:
        def report(raised: float) -> None:
            search.bound = max(search.bound, raised - 1e-9 * abs(raised))
            tell()

        dual = LagrangianDual(problem.nodes, problem.costs, problem.tables, found, room)
        dual.prices = search.prices.values.copy()
        dual.ascend(search.cost, end, report=report)

    # of two processes one alone has the exact solver, whose threads a fork does not have
    parts = NeighbourhoodSearch(
        flat, LocalSearchState(problem.nodes, problem.costs, problem.tables, found, room), exact
    )
    if can_help() and _left(until) >= _HELPED_S:
        best = _with_help(lambda: search_from(0, parts), lambda: search_from(1), raise_bound, len(problem.nodes), until)
    else:
        search = search_from(0, parts)
        search.run(until - _DUAL_SHARE * _left(until))
        if not search.proven:
            raise_bound(search, until - _LAST_SHARE * _left(until))
        best = search.finding
    return problem.choice(dict(zip(problem.nodes, best.choice.tolist(), strict=True))), max(bound, best.bound)


def _with_help(
    first: Callable[[], AssignmentSearch],
    second: Callable[[], AssignmentSearch],
    raise_bound: Callable[[AssignmentSearch, float, Callable[[], None]], None],
    num_nodes: int,
    until: float,
) -> Finding:
    """The best of two searches that tell each other what they find. The second, in the helper, ends with a bound."""
    mine, theirs = FindingSlot(num_nodes), FindingSlot(num_nodes)
    start, left = time.perf_counter(), _left(until)

    def exchanging(search: AssignmentSearch, out: FindingSlot, other: FindingSlot) -> Callable[[], None]:
        told = [(np.inf, np.inf)]

        def exchange() -> None:
            news = other.read()
            if news is not None:
                search.keep(news.choice)
                search.bound = max(search.bound, news.bound)
            if (search.overflow, search.cost) < told[0]:
                told[0] = search.overflow, search.cost
                out.write(search.finding)

        return exchange

    def help_out() -> None:
        search = second()
        exchange = exchanging(search, theirs, mine)
        search.run(start + (1.0 - _HELPER_DUAL_SHARE) * left, exchange)
        exchange()
        if not search.proven:
            end = start + (1.0 - 2.0 * _LAST_SHARE) * left
            raise_bound(search, end, lambda: theirs.write(search.finding))
        theirs.write(search.finding)

    helper = ForkedWorker(help_out)
    try:
        search = first()
        exchange = exchanging(search, mine, theirs)
        search.run(start + (1.0 - 2.0 * _LAST_SHARE) * left, exchange)
    except BaseException:
        helper.end(time.perf_counter())
        raise
    helper.end(time.perf_counter() if search.proven else start + (1.0 - _LAST_SHARE) * left)
    exchange()
    return search.finding


def _left(until: float) -> float:
    return max(0.0, until - time.perf_counter())


def _solve_whole(
    problem: Contraction, found: Mapping[int, Stretch], room: Vector, exact: Exact, until: float
) -> tuple[dict[int, int], float, bool]:
    """A choice of every root, a bound, and whether the choice is the exact solver's."""
    state = LocalSearchState(problem.nodes, problem.costs, problem.tables, found, room)
    state.descend(np.random.default_rng(0), time.perf_counter() + 0.3 * _left(until))
    bounds = [-np.inf]
    solved = solve_part(state, problem.nodes, exact, until, bounds) is not None
    return state.choice, max(bounds), solved
