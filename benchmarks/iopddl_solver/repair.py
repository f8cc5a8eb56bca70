"""Bring an assignment within the memory limit by moves of single nodes, then make it cheaper by such moves.

Each move frees memory in the row that is exceeded by most, at the least cost per unit freed (the greedy ratio of
knapsack problems; Dantzig, 1957). Costs beside the present choices of all others are kept up to date.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.iopddl_solver.state import FlatProblem
from partitioner.solve.pairwise.live_memory import Usage
from partitioner.solve.pairwise.presolve import Choices, Vector

_TRIED = 12  # moves per step, from the best ratio on

_STEPS = 500


class Repair:
    """An assignment ``choice`` of ``flat`` with its ``profile`` of memory and the costs of all moves."""

    def __init__(self, flat: FlatProblem, usage: Usage, room: Vector, choice: Choices) -> None:
        self._flat, self._usage, self._room = flat, usage, room
        self.choice = choice.copy()
        self._cost = flat.conditional(choice)
        self.profile = usage.profile(flat.start + choice)
        self._pieces = np.argsort(usage.choice, kind="stable")
        numbers = np.bincount(usage.choice, minlength=usage.num_choices)
        self._first_piece = np.concatenate([[0], np.cumsum(numbers)])

    @property
    def fits(self) -> bool:
        return bool((self.profile <= self._room).all())

    def run(self, until: float) -> bool:
        """Whether the assignment fits in the end."""
        for count in range(_STEPS):
            over = self.profile - self._room
            row = int(over.argmax()) if len(over) else 0
            if not len(over) or over[row] <= 0.0:
                self._descend(until)
                return True
            if (count % 8 == 0 and time.perf_counter() > until) or not self._free(row, float(over[row])):
                return False
        return False

    def _free(self, row: int, over: float) -> bool:
        """Moves one node so that less is used in ``row`` and the rows exceed their limits by less in all."""
        flat = self._flat
        taken = self._usage.at(row)
        now = flat.start + self.choice
        freed = taken[now][flat.owner] - taken
        moves = (freed > 0.0).nonzero()[0]
        cost = self._cost[moves] - self._cost[now[flat.owner[moves]]]
        ratio = np.where(cost > 0.0, cost / np.minimum(freed[moves], over), cost)
        tried = moves[np.argsort(ratio)[:_TRIED]] if len(moves) > _TRIED else moves[np.argsort(ratio)]
        for move in tried.tolist():
            begin, change = self._change(move)
            rows = slice(begin, begin + len(change))
            before = self.profile[rows] - self._room[rows]
            if np.maximum(before + change, 0.0).sum() < np.maximum(before, 0.0).sum():
                self._move(move, begin, change)
                return True
        return False

    def _descend(self, until: float) -> None:
        """Moves that cost less and fit, until there are none."""
        flat = self._flat
        for _ in range(20):
            gain = self._cost - self._cost[flat.start + self.choice][flat.owner]
            gaining = (gain < -1e-9 * np.abs(self._cost)).nonzero()[0]
            moved = set[int]()
            for move in gaining[np.argsort(gain[gaining])].tolist():
                node = int(flat.owner[move])
                if node in moved or self._cost[move] >= self._cost[flat.start[node] + self.choice[node]]:
                    continue
                begin, change = self._change(move)
                rows = slice(begin, begin + len(change))
                if (self.profile[rows] + change <= self._room[rows]).all():
                    self._move(move, begin, change)
                    moved.add(node)
                if len(moved) % 64 == 63 and time.perf_counter() > until:
                    return
            if not moved or time.perf_counter() > until:
                return

    def _change(self, move: int) -> tuple[int, Vector]:
        """The rows from which on, and by how much, memory changes if the owner of choice ``move`` takes it."""
        node = int(self._flat.owner[move])
        now = int(self._flat.start[node] + self.choice[node])
        usage, first = self._usage, self._first_piece
        old = self._pieces[first[now] : first[now + 1]]
        new = self._pieces[first[move] : first[move + 1]]
        both = np.concatenate([old, new])
        if not len(both):
            return 0, np.zeros(0)
        amount = np.concatenate([-usage.amount[old], usage.amount[new]])
        begin, end = int(usage.begin[both].min()), int(usage.end[both].max())
        change = np.zeros(end - begin + 1)
        np.add.at(change, usage.begin[both] - begin, amount)
        np.subtract.at(change, usage.end[both] - begin, amount)
        return begin, np.cumsum(change)[:-1]

    def _move(self, move: int, begin: int, change: Vector) -> None:
        flat = self._flat
        node = int(flat.owner[move])
        to = move - int(flat.start[node])
        sides = flat.sides_of(node) ^ 1
        if len(sides):  # one table per pair of nodes: no target comes twice
            target, after = flat.side_costs(sides, np.full(len(sides), to))
            self._cost[target] += after - flat.side_costs(sides, np.full(len(sides), self.choice[node]))[1]
        self.choice[node] = to
        self.profile[begin : begin + len(change)] += change
