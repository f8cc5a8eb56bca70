"""Large problems with memory over time: contract, bound, search, and solve parts of it exactly.

Followers are contracted in bulk (``contract.py``). If what is left is small it is solved whole, with the memory rows
that bind (``neighbourhood.py``). Otherwise a dual ascent gives a bound (``messages.py``), a local search goes down from
the choice of least memory (``localsearch.py``), and the remaining time goes into solving parts to their optimum.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from partitioner.solve.contract import Contraction
from partitioner.solve.localsearch import State
from partitioner.solve.memory import Memory, stretches
from partitioner.solve.messages import Dual
from partitioner.solve.neighbourhood import Exact, Neighbourhoods, solve_part
from partitioner.solve.presolve import Table, Vector

WHOLE_ENTRIES = 120_000  # of all tables: at most so many are given to the exact solver at once
_PART_ENTRIES = 20_000
_DUAL_SHARE = 0.08  # of the time


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
    state = State(problem.nodes, problem.costs, problem.tables, found, room)
    rng = np.random.default_rng(0)
    bound = sum(float(problem.costs[i].min()) for i in problem.nodes)
    state.descend(rng, time.perf_counter() + 0.2 * (until - time.perf_counter()))
    small = sum(t.size for t in problem.tables.values()) <= WHOLE_ENTRIES
    if state.overflow <= 0.0:
        if not small:
            now = time.perf_counter()
            dual = Dual(problem.nodes, problem.costs, problem.tables, found, room)
            raised = dual.ascend(state.cost(), now + _DUAL_SHARE * (until - now))
            bound = max(bound, raised - 1e-9 * abs(raised))
        if small:
            bounds = [bound]
            half = time.perf_counter() + 0.6 * (until - time.perf_counter())
            solved = solve_part(state, problem.nodes, exact, half, bounds)
            bound = max(bounds)
            if solved is not None:
                return problem.choice(state.choice), bound
        Neighbourhoods(state, rng, _PART_ENTRIES).improve(exact, until)
    return problem.choice(state.choice), bound
