"""Make a large assignment problem smaller: nodes in equal surroundings get one choice together.

A loop that is unrolled in the graph of a model repeats its nodes and edges many times. The repetitions differ in costs
alone, because they process tensors of different lengths. Colour refinement (Weisfeiler and Leman, 1968) finds such
nodes: two nodes have the same colour if they have the same choices, and their edges allow the same pairs of choices and
lead to the same colours. Nodes of one colour become one node, whose costs are the sums of their costs. An assignment of
the smaller problem is also one of the original problem, at the same cost. The optimum of the original problem may cost
less, so a lower bound must come from elsewhere."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Table = NDArray[np.float64]

_ROUNDS = 2  # rounds of refinement; with more, the first and last iterations of a loop differ from the others


@dataclass(frozen=True)
class MergedProblem:
    """A pairwise assignment problem (one choice per node at minimum cost) that was made smaller: each of its nodes
    stands for one or several nodes of the original problem, which all get the same choice.

    ``costs``: for each merged node, the cost of each choice. ``edges``: tuples (i, j, table) for merged nodes i and j,
    at most one for each pair; ``table[p, q]`` is the cost of choice p of i and q of j. ``merged_of``: for each node of
    the original problem, the index of its merged node."""

    costs: list[Vector]
    edges: list[tuple[int, int, Table]]
    merged_of: list[int]

    def restore(self, choice: Sequence[int]) -> list[int]:
        """Return the choice of each node of the original assignment problem (one choice per node at minimum cost), in
        which nodes are not merged. ``choice``: the choice of each merged node."""
        return [choice[merged] for merged in self.merged_of]


def merge_alike_nodes(costs: Sequence[Vector], edges: Sequence[tuple[int, int, Table]]) -> MergedProblem:
    """Return the assignment problem (one choice per node at minimum cost) that results from merging alike nodes. Nodes
    are alike if they have the same choices, and if their edges allow the same pairs of choices and lead to alike nodes.
    The costs of a merged node are the sums of the costs of its nodes. ``costs``: for each node, the cost of each
    choice. ``edges``: tuples (i, j, table), where ``table[p, q]`` is the cost of choice p of node i and choice q of
    node j."""
    merged_of = _number(_colour_nodes(costs, edges))
    sums: list[Vector | None] = [None] * (max(merged_of, default=-1) + 1)

    def add(merged: int, cost: Vector) -> None:
        """Add ``cost``, an array with one entry for each choice of a node of the assignment problem, to the costs of
        the merged node with the index ``merged``."""
        before = sums[merged]
        sums[merged] = cost if before is None else before + cost

    for merged, cost in zip(merged_of, costs, strict=True):
        add(merged, cost)
    tables: dict[tuple[int, int], Table] = {}
    for i, j, table in edges:
        first, second = merged_of[i], merged_of[j]
        if first == second:
            add(first, np.diagonal(table))
            continue
        pair, turned = ((first, second), table) if first < second else ((second, first), table.T)
        tables[pair] = turned if pair not in tables else tables[pair] + turned
    merged_costs = [cost for cost in sums if cost is not None]
    return MergedProblem(merged_costs, [(i, j, table) for (i, j), table in tables.items()], merged_of)


def _colour_nodes(costs: Sequence[Vector], edges: Sequence[tuple[int, int, Table]]) -> list[Hashable]:
    """Return a colour (a key) for each node of an assignment problem (one choice per node at minimum cost). Nodes have
    equal colours if they have the same choices, and if their edges allow the same pairs and lead to nodes of equal
    colours. ``costs``: for each node, the cost of each choice. ``edges``: tuples (i, j, table of the costs of pairs of
    choices)."""
    near: list[list[tuple[int, int]]] = [[] for _ in costs]  # per node: kind of the edge, other node
    kinds: dict[Hashable, int] = {}
    for i, j, table in edges:
        for node, other, seen in ((i, j, table), (j, i, table.T)):
            pattern = (seen.shape, np.isfinite(seen).tobytes(), (seen == 0).tobytes())
            near[node].append((kinds.setdefault(pattern, len(kinds)), other))
    colours: list[Hashable] = [(len(cost), np.isfinite(cost).tobytes()) for cost in costs]
    for _ in range(_ROUNDS):
        numbers = _number(colours)
        colours = [
            (numbers[node], tuple(sorted({(kind, numbers[other]) for kind, other in around})))
            for node, around in enumerate(near)
        ]
    return colours


def _number(items: Sequence[Hashable]) -> list[int]:
    """Return a number for each of ``items``. Equal items have equal numbers, counted from 0 in the order of first
    appearance: ``[0, 1, 0]`` for ``["a", "b", "a"]``."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(item, len(numbers)) for item in items]
