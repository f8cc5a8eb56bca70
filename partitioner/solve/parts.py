"""Parts of a large problem for an exact solver, beside the present choices of all others and with the memory rows.

Where a row is full, what one node takes another must leave: prices do not say who. A mixed-integer program of some
dozens of nodes does, and takes a fraction of a second (large neighbourhood search; Shaw, 1998).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from partitioner.solve.flat import Flat
from partitioner.solve.localsearch import State
from partitioner.solve.neighbourhood import Exact, solve_part
from partitioner.solve.presolve import Choices, InfeasibleError

_FIRST_ENTRIES, _MOST_ENTRIES, _LEAST_ENTRIES = 20_000.0, 200_000.0, 4_000.0  # of the tables of a part
_QUICK_S, _SLOW_S, _MOST_S = 0.15, 0.6, 3.0  # of a part: the next one is larger, is smaller, and is given up


class Parts:
    """Improves assignments of ``state``'s nodes, which are numbered as in ``flat``."""

    def __init__(self, flat: Flat, state: State, exact: Exact) -> None:
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
        except InfeasibleError:  # beside the present choices of the others
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
