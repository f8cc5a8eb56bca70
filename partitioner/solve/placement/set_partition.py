"""Divide devices into groups of one size so that links inside groups are wide. This is a set partition problem, solved
by CP-SAT.

Devices that can be exchanged without any effect are one kind. A group is described by how many devices of each kind it
has, so the solver does not distinguish equal groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import linear_sum_assignment
from ortools.sat.python import cp_model

from partitioner.background import check_threads
from partitioner.topology.fabric import Floats
from partitioner.topology.pair_links import group_of
from partitioner.topology.topology import Topology

Ints = NDArray[np.int64]

MOST_GROUPS = 2000  # with more possible groups the problem is not solved; there are 1820 groups of 4 of 16 devices

_PARTS = 1 << 30  # the largest sum of bandwidths is scaled to this integer
_LEAST = 1.0  # byte/s
_SECONDS = 5.0  # limit of the solver's deterministic time, far above what these problems take


def linked_groups(topology: Topology, devices: Sequence[int], size: int, classes: Sequence[int]) -> list[list[int]]:
    """Divide ``devices``, indices of devices of ``topology``, into groups of ``size``, and return the groups as lists
    of indices.

    There are three goals, in this order of priority: few different ``classes`` inside a group, the greatest bandwidth
    of the slowest group, and the greatest sum of bandwidths inside groups. ``classes``: a number for each device, equal
    for devices with equal features. If all divisions are equally good, or if there are more than 2000 possible groups,
    consecutive devices form the groups.
    """
    n = len(devices)
    plain = [list(devices[i : i + size]) for i in range(0, n, size)]
    bandwidth = topology.links_between(np.array(devices))[0]
    apart = bandwidth[~np.eye(n, dtype=bool)]
    alike = len(set(classes)) == 1 and len(np.unique(apart)) <= 1
    if size in (1, n) or alike or comb(n, size) > MOST_GROUPS:
        return plain
    kinds = _find_interchangeable_devices(
        bandwidth, list(zip(classes, topology.node_of[list(devices)].tolist(), strict=True))
    )
    groups = {tuple(sorted(kinds[i] for i in group)): group for group in combinations(range(n), size)}
    mixed = [len({classes[i] for i in g}) - 1 for g in groups.values()]
    rate = [group_of(topology, np.array([devices[i] for i in g])).bus_bandwidth for g in groups.values()]
    inside = [float(bandwidth[np.ix_(g, g)].sum() - bandwidth[list(g), list(g)].sum()) for g in groups.values()]
    left = {kind: [d for d, k in zip(devices, kinds, strict=True) if k == kind] for kind in dict.fromkeys(kinds)}
    chosen = _solve_set_partition(
        [Counter(group) for group in groups],
        Counter(kinds),
        [mixed, _rank_distinct_values(rate), _scale_to_integers(inside)],
    )
    return [
        [left[kind].pop(0) for kind in group] for group, times in zip(groups, chosen, strict=True) for _ in range(times)
    ]


def _find_interchangeable_devices(bandwidth: Floats, known: Sequence[Hashable]) -> list[int]:
    """Return, for each device, the position of the first device with which it can be exchanged; for a device that can
    be exchanged with no earlier one, this is its own position. Two devices can be exchanged if their features are equal
    and their links to all other devices are equal. ``known``: the features of each device. ``bandwidth``: bytes/s
    between devices, shape ``[n, n]``."""
    places = np.arange(len(known))

    def change(i: int, j: int) -> bool:
        order = places.copy()
        order[[i, j]] = j, i
        return known[i] == known[j] and bool((bandwidth[np.ix_(order, order)] == bandwidth).all())

    return [next(i for i in range(j + 1) if i == j or change(i, j)) for j in range(len(known))]


def _rank_distinct_values(values: Sequence[float]) -> list[int]:
    """Return, for each of ``values``, its rank among the distinct values, starting with 0 for the least. Values that
    agree in nine digits count as equal."""
    rounded = [float(f"{value:.9g}") for value in values]
    order = {value: k for k, value in enumerate(sorted(set(rounded)))}
    return [order[value] for value in rounded]


def _scale_to_integers(values: Sequence[float]) -> list[int]:
    """Return ``values`` multiplied by a common factor and rounded to integers; the greatest becomes about 10 ** 9."""
    return [round(value / max(*values, _LEAST) * _PARTS) for value in values]


def _solve_set_partition(
    groups: Sequence[Counter[int]], things: Counter[int], goals: Sequence[Sequence[int]]
) -> list[int]:
    """Return how often each of ``groups`` occurs in the best division of all devices into groups, as one count for each
    entry of ``groups``. Each possible group has three values. The division minimizes the sum of the first values, then
    maximizes the least second value, and then maximizes the sum of the third values.

    ``groups``: for each possible group, kind of device -> number of such devices in the group. ``things``: kind of
    device -> number of such devices in total. ``goals``: the first, second and third values, as three lists with one
    value for each group.
    """
    check_threads()
    model = cp_model.CpModel()
    taken = [model.new_int_var(0, min(things[k] // n for k, n in group.items()), "") for group in groups]
    for kind, number in things.items():
        model.add(sum(group[kind] * t for group, t in zip(groups, taken, strict=True) if group[kind]) == number)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = _SECONDS
    chosen: list[int] = []
    least = model.new_int_var(0, max(goals[1]), "narrowest")
    for times, value in zip(taken, goals[1], strict=True):
        some = model.new_bool_var("")
        model.add(times == 0).only_enforce_if(some.negated())
        model.add(least <= value).only_enforce_if(some)
    totals = [sum(v * t for v, t in zip(goal, taken, strict=True)) for goal in goals]
    for sense, goal in ((-1, totals[0]), (1, least), (1, totals[2])):
        model.maximize(sense * goal)
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            break
        chosen = [solver.value(times) for times in taken]
        model.add(sense * goal >= round(solver.objective_value))
    assert chosen, (things, len(groups))
    return chosen


def match_widest_links(bandwidth: Floats) -> list[int]:
    """Assign a different column to each row of ``bandwidth``, a square matrix of bandwidths, and return the column of
    each row. The least of the chosen bandwidths is as great as possible. Among assignments with this least bandwidth,
    the second least is as great as possible, and so on."""
    levels = np.unique(bandwidth)[::-1]
    rank = np.searchsorted(-levels, -bandwidth)
    costs = (len(bandwidth) + 1) ** np.minimum(rank, 12)  # one narrower link outweighs all wider ones
    assignment = linear_sum_assignment.SimpleLinearSumAssignment()
    rows, columns = np.indices(bandwidth.shape)
    assignment.add_arcs_with_cost(rows.ravel(), columns.ravel(), costs.ravel())
    status = assignment.solve()
    assert status == assignment.OPTIMAL, status
    return [assignment.right_mate(i) for i in range(len(bandwidth))]
