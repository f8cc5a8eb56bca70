"""Solve the pairwise assignment problem: one choice per node, at the least sum of node costs and edge costs.

::

    minimise    sum_i cost_i[x_i]  +  sum_(i,j) table_ij[x_i, x_j]
    subject to  sum_i usage_ri[x_i] <= limit_r     for every row r

An infinite cost forbids a choice or a pair of choices. After an exact presolve (``presolve.py``) each connected
component is solved by dynamic programming if its graph is narrow (``dynamic_programming.py``). Otherwise it becomes a
mixed-integer program over the tight local polytope: binaries ``s[i,p]``, one of them 1 per node, and for each edge
continuous ``e[p,q] >= 0`` whose marginals *equal* the nodes' binaries, ``sum_q e[p,q] = s_i[p]`` and ``sum_p e[p,q] =
s_j[q]``. HiGHS solves it through OR-Tools MathOpt. The caller may accept a solution without proof of optimality
(``settle``). If the program is too large for HiGHS then, a smaller problem is solved, in which nodes in equal
surroundings share a choice (``alike.py``). If its solution is far from the bound of a dual ascent
(``dual_bound.py``), or if HiGHS finds nothing in time, the result of the ascent is improved (``improve.py``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from partitioner.background import check_threads
from partitioner.passes.errors import PartitionError
from partitioner.solve.pairwise.alike import merge_alike_nodes
from partitioner.solve.pairwise.dual_bound import Reparametrization, find_remaining_choices, sum_of_minima
from partitioner.solve.pairwise.dynamic_programming import (
    FAIR_WORK,
    MOST_WORK,
    QUICK_WORK,
    WORK_PER_S,
    eliminate_nodes,
    elimination_order,
)
from partitioner.solve.pairwise.improve import improve_assignment
from partitioner.solve.pairwise.live_memory import MemoryConstraint
from partitioner.solve.pairwise.presolve import InfeasibleAssignmentError, ReducedProblem, Table, Vector

_LARGEST_COEFFICIENT = 1e6  # HiGHS' absolute tolerances of 1e-7 are made for numbers of about this size and below

_MOST_VARIABLES = 250_000  # variables of a program for which HiGHS finds no solution in a minute
_MOST_MERGED = 50_000  # as _MOST_VARIABLES, for a problem of merged nodes
_SETTLED_GAP = 0.005  # relative gap at which an assignment of merged nodes is accepted
_SLOW_VARIABLES = 100_000  # variables of a program for which HiGHS needs tens of seconds
_SLOW_MERGED = 10_000  # as _SLOW_VARIABLES, for a problem of merged nodes
_NEARLY_OPTIMAL = 5e-4  # relative gap at which an assignment is accepted instead of solving such a program
_FEW_LEFT = 0.5  # largest fraction of nodes that may be left for merging to be worth it
_TRIED_S = 25.0  # time limit of HiGHS if another assignment is known
_BOUND_SWEEPS = 4  # sweeps of a dual ascent; further ones hardly raise the bound of a large problem
_IMPROVED_S = 10.0  # time limit of the improvement of an assignment


class AssignmentTimeLimitError(PartitionError):
    """Error that is raised if the solver finds no assignment (one choice per node) within its time limit."""


@dataclass(frozen=True)
class ResourceConstraint:
    """A limit on a resource of an assignment problem (one choice per node at minimum cost).

    ``usage``: index of a node that uses the resource -> array with the amount that each of the node's choices takes.
    The amounts of the chosen choices must not add up to more than ``limit``."""

    usage: dict[int, Vector]
    limit: float


@dataclass(frozen=True)
class AssignmentProblem:
    """A pairwise assignment problem: choose one of the given choices for each node at the minimum total cost.

    ``costs[i][p]``: the cost of choice p of node i. ``edges``: tuples (i, j, table), where ``table[p, q]`` is the cost
    of choosing p for node i and q for node j; a pair may have several edges. ``rows``: resource limits. ``memory``: a
    limit on the total memory of the nodes that are in memory at the same time, or ``None``; it is more compact than a
    resource limit for each time. An infinite cost forbids a choice or a pair."""

    costs: Sequence[Vector]
    edges: Sequence[tuple[int, int, Table]]
    rows: Sequence[ResourceConstraint] = ()
    memory: MemoryConstraint | None = None

    def __post_init__(self) -> None:
        for i, j, table in self.edges:
            expected = (len(self.costs[i]), len(self.costs[j]))
            if table.shape != expected:
                raise ValueError(f"edge ({i}, {j}) needs a table of shape {expected}, got {table.shape}")

    def objective(self, choice: Sequence[int]) -> float:
        """Return the cost of the assignment ``choice`` (for each node, the index of its choice): the sum of the costs
        of the nodes and of the pairs of nodes with an edge. The cost is infinite if the assignment contains a forbidden
        choice or pair, or exceeds a limit."""
        if any(sum(u[choice[i]] for i, u in row.usage.items()) > row.limit for row in self.rows):
            return float("inf")
        if self.memory is not None and self.memory.peak(choice) > self.memory.limit:
            return float("inf")
        nodes = sum(float(cost[p]) for cost, p in zip(self.costs, choice, strict=True))
        return nodes + sum(float(table[choice[i], choice[j]]) for i, j, table in self.edges)


@dataclass(frozen=True)
class Assignment:
    """A solution of an assignment problem (one choice per node at minimum cost). ``choice[i]``: index of the choice of
    node i. ``objective``: the total cost of these choices. ``bound``: a lower bound on the cost of every assignment.
    ``seconds``: time that the solver took. ``num_variables``: number of variables of the mixed-integer programs that
    were solved. ``gap``: ``objective - bound`` relative to ``objective``."""

    choice: list[int]
    objective: float
    bound: float
    seconds: float
    num_variables: int = 0  # of the programs that were left to HiGHS

    @property
    def gap(self) -> float:
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-300)


def live_rows(intervals: Sequence[tuple[int, int]], usages: Sequence[Vector], limit: float) -> list[ResourceConstraint]:
    """Return a memory limit as resource constraints of an assignment problem (one choice per node at minimum cost).
    There is one constraint for each maximal set of nodes that are in memory at the same time and could exceed
    ``limit``.

    ``intervals``: for each node the half-open interval of time steps in which it is in memory; an empty one uses
    nothing. ``usages``: for each node an array with the memory of each choice. ``limit``: the memory that nodes may use
    together at any time."""
    events = sorted(
        event
        for node, (start, end) in enumerate(intervals)
        if start < end and np.any(usages[node])
        for event in ((start, 1, node), (end, 0, node))
    )
    rows, live, grown, most = [], set[int](), False, 0.0
    for _, starts, node in events:
        if starts:
            live.add(node)
            grown = True
            most += float(usages[node].max())
            continue
        if grown and most > limit:
            rows.append(ResourceConstraint({i: usages[i] for i in sorted(live)}, limit))
        grown = False
        live.discard(node)
        most -= float(usages[node].max())
    return rows


def solve_assignment(
    problem: AssignmentProblem,
    *,
    time_limit_s: float = 60.0,
    relative_gap: float = 1e-6,
    settle: bool = False,
    most_variables: int = _MOST_VARIABLES,
    slow_variables: int = _SLOW_VARIABLES,
) -> Assignment:
    """Return the cheapest assignment of ``problem`` to within ``relative_gap`` (a fraction of its cost), or the best
    one found in ``time_limit_s`` seconds.

    ``settle``: whether to accept a good assignment that is not proven to be optimal, from a smaller problem or from a
    dual ascent with local improvement; its lower bound comes from a dual ascent. Such an assignment is returned in
    three cases: the mixed-integer program has more than ``most_variables`` variables; the solver finds nothing better
    in time; or the program has more than ``slow_variables`` variables and the assignment is within 0.05 % of the bound.
    If a resource limit restricts the choices, there is no such assignment.

    Raises :class:`InfeasibleAssignmentError` if no assignment is allowed, and :class:`AssignmentTimeLimitError` if none
    was found in time."""
    start = time.perf_counter()
    rows = list(problem.rows)
    if problem.memory is not None:
        rows += live_rows(problem.memory.intervals, problem.memory.usages, problem.memory.limit)
    reduction = ReducedProblem(problem.costs, problem.edges, [(row.usage, row.limit) for row in rows])
    reduction.run(dominance=False)
    near, proven, gap = dict[int, int](), -np.inf, np.inf
    most_work = int(min(MOST_WORK, max(FAIR_WORK, 0.25 * time_limit_s * WORK_PER_S)))
    if _has_wide_component(reduction, QUICK_WORK):
        if settle and not rows and _count_variables(reduction) > most_variables:
            alike = _assign_alike_nodes(problem, time_limit_s)
            if alike is not None:
                objective, bound = problem.objective(alike), _bound_below(reduction)
                if objective - bound <= _SETTLED_GAP * abs(objective):
                    return Assignment(alike, objective, min(bound, objective), time.perf_counter() - start)
        reduction.run()
        near, proven, gap = _fix_wide_components(reduction, most_work)
    nearly = np.isfinite(gap) and gap <= _NEARLY_OPTIMAL * abs(proven)
    enough = min(slow_variables, most_variables) if nearly else most_variables
    bound, choice, size = reduction.constant, dict[int, int](), 0
    for nodes in _find_components(reduction):
        order = _order_narrow_component(reduction, nodes, most_work)
        if order is not None:
            costs, tables = _extract_component_costs(reduction, nodes)
            best, cost = eliminate_nodes(costs, [(i, j, t) for (i, j), t in tables.items()], order)
            choice.update(best)
            bound += cost
            continue
        until = start + time_limit_s
        program = _MixedIntegerProgram(reduction, nodes)
        size += program.num_variables
        known = _find_known_choices(reduction, nodes, near) if settle else None
        if known is None or program.num_variables <= enough:
            left = max(until - time.perf_counter(), 0.1)
            try:
                bound += program.solve(left if known is None else min(left, _TRIED_S), relative_gap, choice)
                if known is not None and _costs_less(reduction, nodes, known, choice):  # the solver was stopped early
                    choice.update(known)
                continue
            except AssignmentTimeLimitError:
                if known is None:
                    raise
        costs, tables = _extract_component_costs(reduction, nodes)
        choice.update(improve_assignment(costs, tables, known, time.perf_counter() + _IMPROVED_S))
        bound += sum_of_minima(costs, tables)
    bound = max(bound, proven)
    full = reduction.restore(choice)
    objective = problem.objective(full)
    assert np.isfinite(objective), "the presolve or the solver gave a forbidden assignment"
    return Assignment(full, objective, min(bound, objective), time.perf_counter() - start, size)


def _bound_below(reduction: ReducedProblem) -> float:
    """Return a lower bound on the cost of every assignment of the problem ``reduction`` (one choice per node at minimum
    cost), from the first sweeps of a dual ascent."""
    dual = Reparametrization(*_extract_component_costs(reduction, reduction.nodes))
    for sweep in range(_BOUND_SWEEPS):
        dual.sweep(forward=sweep % 2 == 0)
    return reduction.constant + dual.bound


def _assign_alike_nodes(problem: AssignmentProblem, time_limit_s: float) -> list[int] | None:
    """Return a good assignment of ``problem`` (for each node, the index of its choice) in which alike nodes have the
    same choice. Nodes are alike if they have the same choices, and if their edges allow the same pairs and lead to
    alike nodes. Return ``None`` if few nodes are alike, or if no such assignment is found. ``problem`` has no resource
    limits. ``time_limit_s``: seconds for the solver."""
    merged = merge_alike_nodes(problem.costs, problem.edges)
    if len(merged.costs) > _FEW_LEFT * len(problem.costs):
        return None
    smaller = AssignmentProblem(merged.costs, merged.edges)
    try:
        found = solve_assignment(
            smaller,
            time_limit_s=time_limit_s,
            settle=True,
            most_variables=_MOST_MERGED,
            slow_variables=_SLOW_MERGED,
        )
    except PartitionError:
        return None
    return merged.restore(found.choice)


def _has_wide_component(reduction: ReducedProblem, most_work: int) -> bool:
    """Return whether dynamic programming cannot solve some connected component of ``reduction``, an assignment problem
    (one choice per node at minimum cost), because its tables would have more than ``most_work`` entries or because it
    has resource limits."""
    return any(_order_narrow_component(reduction, nodes, most_work) is None for nodes in _find_components(reduction))


def _order_narrow_component(reduction: ReducedProblem, nodes: Sequence[int], most_work: int) -> list[int] | None:
    """Return an order in which dynamic programming can eliminate ``nodes``, the node indices of a connected component
    of the assignment problem ``reduction`` (one choice per node at minimum cost). Return ``None`` if the cost tables
    would have more than ``most_work`` entries, or if the component has resource limits."""
    if any(reduction.usage[i] for i in nodes):
        return None
    sizes = {i: len(reduction.costs[i]) for i in nodes}
    return elimination_order(sizes, {i: set(reduction.tables[i]) for i in nodes}, most_work)


def _fix_wide_components(reduction: ReducedProblem, most_work: int) -> tuple[dict[int, int], float, float]:
    """Remove choices that no optimal assignment has from the assignment problem ``reduction`` (one choice per node at
    minimum cost). Only those connected components are treated for which dynamic programming would need tables of more
    than ``most_work`` entries.

    Return three values. The first is a good choice for each node of these components: node index -> index among the
    node's original choices. The second is a lower bound on the cost of every assignment of the whole problem. The third
    is the gap of these components: the cost of their good choices minus the lower bound on their cost."""
    near, bound, gap = dict[int, int](), reduction.constant, 0.0
    for nodes in _find_components(reduction):
        costs, tables = _extract_component_costs(reduction, nodes)
        if _order_narrow_component(reduction, nodes, most_work) is not None or any(reduction.usage[i] for i in nodes):
            bound += sum_of_minima(costs, tables)
            continue
        found = find_remaining_choices(costs, tables)
        near |= {i: int(reduction.alive[i][place]) for i, place in (found.choice or {}).items()}
        bound += found.bound
        gap += _cost_of(found.choice, costs, tables) - found.bound if found.choice else np.inf
        for node, mask in found.masks.items():
            reduction.keep(node, mask)
    reduction.run()
    return near, bound, gap


def _costs_less(
    reduction: ReducedProblem, nodes: Sequence[int], first: Mapping[int, int], second: Mapping[int, int]
) -> bool:
    """Return whether, for ``nodes``, a component of the assignment problem ``reduction``, the assignment ``first``
    costs less than the assignment ``second``. Both are dicts: node index -> index of the node's choice."""
    costs, tables = _extract_component_costs(reduction, nodes)
    return _cost_of(first, costs, tables) < _cost_of(second, costs, tables)


def _cost_of(choice: Mapping[int, int], costs: Mapping[int, Vector], tables: Mapping[tuple[int, int], Table]) -> float:
    """Return the cost of the assignment ``choice`` (node -> index of its choice). ``costs``: node -> costs of its
    choices. ``tables``: pair of nodes -> costs of each pair of their choices."""
    single = sum(float(cost[choice[node]]) for node, cost in costs.items())
    return single + sum(float(table[choice[i], choice[j]]) for (i, j), table in tables.items())


def _find_known_choices(
    reduction: ReducedProblem, nodes: Sequence[int], near: Mapping[int, int]
) -> dict[int, int] | None:
    """Return the choices that ``nodes`` have in the known assignment ``near``, as a dict: node index -> index among the
    choices that the node has left in the reduced assignment problem ``reduction``. Return ``None`` if one of these
    choices was removed from the reduced problem. ``near``: node index -> index among the node's original choices."""
    places = {i: np.flatnonzero(reduction.alive[i] == near.get(i, -1)).tolist() for i in nodes}
    return {i: found[0] for i, found in places.items()} if all(places.values()) else None


def _count_variables(reduction: ReducedProblem) -> int:
    """Return the number of variables of the mixed-integer program of the problem ``reduction`` (one choice per node at
    minimum cost): one for each choice and each allowed pair of choices of two connected nodes."""
    tables = (table for i in reduction.nodes for j, table in reduction.tables[i].items() if i < j)
    return sum(int(np.isfinite(table).sum()) for table in tables) + sum(
        len(reduction.costs[i]) for i in reduction.nodes
    )


def _extract_component_costs(
    reduction: ReducedProblem, nodes: Sequence[int]
) -> tuple[dict[int, Vector], dict[tuple[int, int], Table]]:
    """Return the costs of ``nodes`` in the reduced assignment problem ``reduction`` (one choice per node at minimum
    cost), as two dicts: node -> costs of its choices; and (i, j), for connected nodes i < j -> table of the costs of
    each pair of their choices."""
    tables = {(i, j): t for i in nodes for j, t in reduction.tables[i].items() if i < j}
    return {i: reduction.costs[i] for i in nodes}, tables


def _find_components(reduction: ReducedProblem) -> list[list[int]]:
    """Return the undecided nodes of the assignment problem ``reduction`` (one choice per node at minimum cost) as lists
    of node indices, one list for each connected component. Edges and resource limits connect nodes."""
    seen, groups = set[int](), []
    for root in reduction.nodes:
        if root in seen:
            continue
        group, stack = [], [root]
        seen.add(root)
        while stack:
            node = stack.pop()
            group.append(node)
            near = set(reduction.tables[node]).union(*(reduction.members[r] for r in reduction.usage[node]))
            stack.extend(near - seen)
            seen |= near
        groups.append(sorted(group))
    return groups


class _MixedIntegerProgram:
    """The mixed-integer program of one connected component of a pairwise assignment problem (one choice per node at
    minimum cost), stored as arrays and converted to a MathOpt proto. ``nodes``: indices of the nodes of the component.
    ``reduction``: the reduced assignment problem."""

    def __init__(self, reduction: ReducedProblem, nodes: Sequence[int]) -> None:
        sizes = [len(reduction.costs[i]) for i in nodes]
        self.nodes, self.sizes = nodes, sizes
        self.starts = dict(zip(nodes, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        self.num_choices = sum(sizes)
        cost = [reduction.costs[i] for i in nodes]
        rows: list[NDArray[np.intp]] = [np.repeat(np.arange(len(nodes)), sizes)]
        columns: list[NDArray[np.intp]] = [np.arange(self.num_choices)]
        values: list[Vector] = [np.ones(self.num_choices)]
        num_rows, num_columns = len(nodes), self.num_choices
        lower, upper = [np.ones(num_rows)], [np.ones(num_rows)]
        for i in nodes:
            for j, table in reduction.tables[i].items():
                if j < i:
                    continue
                p, q = np.isfinite(table).nonzero()
                entries = num_columns + np.arange(len(p))
                marginals = np.arange(sum(table.shape)) + num_rows
                both = np.concatenate(
                    [self.starts[i] + np.arange(table.shape[0]), self.starts[j] + np.arange(table.shape[1])]
                )
                rows += [num_rows + p, num_rows + table.shape[0] + q, marginals]
                columns += [entries, entries, both]
                values += [np.ones(2 * len(p)), -np.ones(len(both))]
                lower.append(np.zeros(len(both)))
                upper.append(np.zeros(len(both)))
                cost.append(table[p, q])
                num_rows += len(both)
                num_columns += len(p)
        for r in sorted({r for i in nodes for r in reduction.usage[i]}):
            limit = reduction.limits[r]
            unit = max(limit, max(float(reduction.usage[i][r].max()) for i in reduction.members[r]))
            for i in sorted(reduction.members[r]):
                taken = reduction.usage[i][r].nonzero()[0]
                rows.append(np.full(len(taken), num_rows))
                columns.append(self.starts[i] + taken)
                values.append(reduction.usage[i][r][taken] / unit)
            lower.append(np.array([-np.inf]))
            upper.append(np.array([limit / unit]))
            num_rows += 1
        self.cost = np.concatenate(cost)
        self.num_variables = num_columns
        self._rows, self._columns = np.concatenate(rows), np.concatenate(columns)
        self._values = np.concatenate(values)
        self._lower, self._upper = np.concatenate(lower), np.concatenate(upper)
        largest = float(self.cost.max(initial=0.0))
        self.scale = _LARGEST_COEFFICIENT / largest if largest > 0 else 1.0

    def solve(self, time_limit_s: float, relative_gap: float, choice: dict[int, int]) -> float:
        """Solve this program of an assignment problem (one choice per node at minimum cost). Write the solution into
        the dict ``choice``: node index -> index of the node's choice. Return a lower bound on the cost of the nodes of
        this program.

        ``relative_gap``: the solver stops when its assignment and its bound differ by at most this fraction of the
        cost. ``time_limit_s``: seconds for the solver. Raises :class:`InfeasibleAssignmentError` if there is no
        assignment, and :class:`AssignmentTimeLimitError` if none was found in time."""
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=time_limit_s), relative_gap_tolerance=relative_gap
        )
        model = mathopt.Model.from_model_proto(self._build_model_proto())
        check_threads()
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            raise InfeasibleAssignmentError(
                "no assignment satisfies the tables and the limits together", tuple(self.nodes)
            )
        if not result.has_primal_feasible_solution():
            raise AssignmentTimeLimitError(
                f"no assignment found in {time_limit_s:.1f} s ({len(self.nodes)} nodes, {self.num_variables} "
                f"variables, {reason.name.lower()}); allow more time or loosen the limits"
            )
        variables = list(model.variables())[: self.num_choices]
        taken = np.array(result.variable_values(variables))
        for i, size in zip(self.nodes, self.sizes, strict=True):
            choice[i] = int(taken[self.starts[i] : self.starts[i] + size].argmax())
        return float(result.termination.objective_bounds.dual_bound) / self.scale

    def _build_model_proto(self) -> model_pb2.ModelProto:
        """Return this mixed-integer program as a MathOpt proto. The costs of the assignment problem (one choice per
        node at minimum cost) are multiplied by ``self.scale``, so that the largest cost is a constant that suits the
        solver."""
        proto = model_pb2.ModelProto()
        ids = np.arange(self.num_variables)
        proto.variables.ids.extend(ids.tolist())
        proto.variables.lower_bounds.extend([0.0] * self.num_variables)
        proto.variables.upper_bounds.extend([1.0] * self.num_variables)
        proto.variables.integers.extend((ids < self.num_choices).tolist())
        costly = self.cost.nonzero()[0]
        proto.objective.linear_coefficients.ids.extend(costly.tolist())
        proto.objective.linear_coefficients.values.extend((self.cost[costly] * self.scale).tolist())
        proto.linear_constraints.ids.extend(range(len(self._lower)))
        proto.linear_constraints.lower_bounds.extend(self._lower.tolist())
        proto.linear_constraints.upper_bounds.extend(self._upper.tolist())
        order = np.lexsort((self._columns, self._rows))
        matrix = proto.linear_constraint_matrix
        matrix.row_ids.extend(self._rows[order].tolist())
        matrix.column_ids.extend(self._columns[order].tolist())
        matrix.coefficients.extend(self._values[order].tolist())
        return proto
