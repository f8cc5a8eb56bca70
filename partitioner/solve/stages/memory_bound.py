"""Compute a lower bound on the seconds of a pipeline over all cuts into virtual stages, with the recomputation that
memory requires.

The bound is a Lagrangian relaxation (Geoffrion 1974) that is maximised by column generation (Dantzig and Wolfe 1960).
Two kinds of constraints are relaxed. The time of a step is the longest path through the actions of its schedule; a
weighted mean of some paths is a lower bound on it. The memory of each rank has a limit at each time of the step; in the
relaxed problem, the bytes that are in use at that time have a price in seconds instead, and the price of the rank's
capacity is subtracted from the step. For given weights and prices the best cuts are a shortest path over (stage, cut),
and each call is recomputed if that is cheaper than the bytes it frees. The result is a lower bound for all weights that
sum up to 1 and all prices of 0 or more.

Weights and prices are the duals of a linear program: minimise the time of a mixture of the cuts so far, such that the
mixture fits in memory. The best cut for these duals is then added to the program, until its optimum is reached. A
sequence of calls is dropped if even the best cut that contains it takes at least the number of seconds that the caller
asks for.

A mixture may have a fraction of a layer on a rank. If the bound is not close, cases are distinguished (branch and
bound): either all ranks have as many heavy calls as in the known cut, or some rank has more. Each case adds constraints
on these numbers to the program. The least bound of all cases holds for all cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt.python import mathopt

from partitioner.schedules.actions import Timetable
from partitioner.schedules.formulas import Counts
from partitioner.schedules.makespan import Phases, longest_path, longest_paths
from partitioner.solve.stages.improve_cuts import PhaseCosts, count_microbatches, find_least_partial_cuts
from partitioner.solve.stages.split import StagePlan
from partitioner.solve.stages.tables import TINY, StageTables

Table = NDArray[np.float64]

# The kinds of bytes of a stage, and the number of its heavy calls, that rows of the program limit: bytes that do not
# depend on the number of microbatches in flight, bytes of a microbatch whose backward has not begun, bytes of one
# between the two halves of its backward; heavy calls
_HEAVY, _NUM_KINDS = 3, 4

_SLOWER = 1.15  # factor on the seconds of a rank, so that the longest path goes through it
_INPUTS = 1  # the phase that contains recomputation: backward for inputs
_WORK, _COLLECTIVES = 3, 5  # the first phases are work; from this one on, they are collectives at the ends of a step
_FIRST_PRICES = tuple(2.0**-k for k in range(8, 0, -1))  # of the memory of all ranks, as fractions of a step
_KEPT = 0.5  # the weight of the best duals so far in those that are tried next (Wentges 1997)
_EVERY = 3  # cuts after which the longest path of the last one is added
_EXCEEDED = 1e-6  # fraction of a rank's memory: a solution that exceeds it by less fits
_ROWS_AT_ONCE = 64  # rows for memory that are added to the linear program before it is solved again
_SAME = 1e-3  # relative difference of bound and program at which the search stops
_MOST_SIMULATED_ACTIONS = 400_000  # actions to simulate for the first paths, each of which goes through another rank
_MOST_CUTS, _MOST_WORK = 150, 200_000_000  # cuts to add, and sequences of calls to price in all of them together
_MOST_BRANCHED = 16  # ranks for which cases are distinguished
_CASE_COST = 20  # for each constraint of a case, the cost of exceeding it, relative to that of exceeding the memory


@dataclass(frozen=True)
class RankMemory:
    """The activations of one pipeline rank at several times of the step.

    ``stages``: its virtual stages. ``moments``: for each time and each of these stages, the microbatches in flight, as
    a pair (backward not begun, between the two halves of a split backward). ``capacity``: usable bytes of the rank.
    """

    stages: Sequence[int]
    moments: Sequence[Sequence[Counts]]
    capacity: float


def bound_fitting_cuts(
    tables: StageTables,
    timetable: Timetable,
    phases: Sequence[Phases],
    ranks: Sequence[RankMemory],
    microbatches_left: int,
    limit_s: float,
    *,
    goal_s: float,
    known: Sequence[StagePlan] = (),
) -> float:
    """Return a lower bound in seconds on the pipeline, over all cuts of the block calls (such as layers) into virtual
    stages with which every rank fits in memory, and over all ways to recompute calls. The bound is at most ``goal_s``.

    ``tables``: seconds and bytes of all possible stages; each may use all memory of its rank. ``timetable``: the order
    in which the schedule runs the forwards and backwards of microbatches. ``microbatches_left``: how many microbatches
    a step has more than the timetable. ``phases``: seconds of forward and backward of each virtual stage under some
    cut; their mean serves to find long paths through the schedule. ``ranks``: the memory of each rank. ``limit_s``:
    seconds of a known step; stages that alone take longer are excluded. ``goal_s``: a bound that is good enough, at
    most ``limit_s``. ``known``: the virtual stages of a good cut, from which the cases of the branch and bound are
    formed; empty: no cases are distinguished.
    """
    search = _BoundSearch.of(tables, timetable, phases, ranks, microbatches_left, limit_s, goal_s)
    bound_s, work = search.run(()), (len(ranks) + 1) * search.relaxed.num_sequences * _MOST_CUTS
    if not known or bound_s >= goal_s or len(ranks) > _MOST_BRANCHED or work > _MOST_WORK:
        return bound_s
    least_s = goal_s
    for case in _list_cases(tables, ranks, known):
        least_s = min(least_s, search.run(case))
        if least_s <= bound_s:
            break
    return max(bound_s, least_s)


def _list_cases(tables: StageTables, ranks: Sequence[RankMemory], known: Sequence[StagePlan]) -> list[list[_AtMost]]:
    """Return cases of which at least one holds for every cut into virtual stages. In the first case, no rank has more
    heavy calls than under ``known``, the virtual stages of a good cut. There is a further case for each rank: this rank
    has more heavy calls, so that the other ranks together have fewer. A call is heavy if it takes at least half of the
    median seconds of all calls. ``tables``: seconds of all possible stages. ``ranks``: the virtual stages of each rank.
    """
    heavy = _find_heavy_calls(tables)
    of_stage = [int(heavy[plan.start : plan.stop].sum()) for plan in known]
    numbers = [sum(of_stage[k] for k in rank.stages) for rank in ranks]
    cases = [[_AtMost(rank.stages, number) for rank, number in zip(ranks, numbers, strict=True)]]
    for rank, number in zip(ranks, numbers, strict=True):
        others = [k for k in range(len(known)) if k not in rank.stages]
        cases.append([_AtMost(others, sum(of_stage) - number - 1)])
    return [case for case in cases if all(constraint.number >= 0 for constraint in case)]


def _find_heavy_calls(tables: StageTables) -> NDArray[np.bool_]:
    """Return, for each block call (such as a layer), whether it takes at least half of the median seconds of all calls.
    ``tables``: seconds of all possible stages."""
    seconds = np.diagonal(tables.least_work, 1)
    heavy: NDArray[np.bool_] = seconds >= np.median(seconds) / 2
    return heavy


def _slow_each_rank(phases: Sequence[Phases], ranks: Sequence[RankMemory]) -> Iterator[list[Phases]]:
    """Yield, for each of ``ranks``, seconds of all virtual stages. The virtual stages of this rank are slower, and all
    others take equally long (the mean of ``phases``). The longest path then goes through this rank."""
    names = list(Phases.__dataclass_fields__)
    mean = {name: sum(getattr(of_stage, name) for of_stage in phases) / len(phases) for name in names}
    even, slow = Phases(**mean), Phases(**{name: seconds * _SLOWER for name, seconds in mean.items()})
    for rank in ranks:
        yield [slow if k in rank.stages else even for k in range(len(phases))]


def _list_rank_paths(
    tables: StageTables, ranks: Sequence[RankMemory], microbatches: int, num_phases: int
) -> list[Table]:
    """Return, for each of ``ranks``, how often each phase of each virtual stage counts in a lower bound on the step,
    shape ``[stages, phases]``. A rank takes its work for all ``microbatches``. A second of a collective at an end of
    the step adds at least the ``slowdown - 1`` seconds that it delays computation if both run at the same time: it adds
    a whole second if it runs alone. The result is empty if there are no such collectives. ``num_phases``: number of
    phases of a stage."""
    ends = tables.problem.ends
    if not ends:
        return []
    paths = []
    for rank in ranks:
        path = np.zeros((tables.problem.num_stages, num_phases))
        for stage in rank.stages:
            path[stage, :_WORK] = microbatches
            path[stage, _COLLECTIVES:] = min(1.0, max(0.0, ends[stage].slowdown - 1))
        paths.append(path)
    return paths


class _Duals(NamedTuple):
    """Values of the dual variables of the linear program. ``bound_s``: the lower bound in seconds that they give.
    ``weights``: a weight for each path through the schedule, shape ``[paths]``; the weights sum up to 1. ``prices``:
    for each rank and each time of the step, the price in seconds of all memory of the rank, shape ``[moments]``, with
    the times of the first rank first."""

    bound_s: float
    weights: Table
    prices: Table


class _AtMost(NamedTuple):
    """A constraint on cuts into virtual stages: ``stages`` have at most ``number`` heavy calls (such as layers)
    together."""

    stages: Sequence[int]
    number: int


@dataclass(frozen=True)
class _BoundSearch:
    """The search for weights of paths and prices of memory (dual variables) that give a high lower bound.

    ``relaxed``: the relaxed problem. ``find_path``: function from the seconds of all stages to the longest path through
    the schedule. ``first``: paths to begin with. ``num_moments``: for each rank, the number of times at which its
    memory may be short. ``limit_s``: seconds of a known step. ``goal_s``: a bound that is good enough.
    """

    relaxed: _RelaxedCuts
    find_path: Callable[[Sequence[Phases]], Table]
    first: Sequence[Table]
    num_moments: Sequence[int]
    limit_s: float
    goal_s: float

    @classmethod
    def of(
        cls,
        tables: StageTables,
        timetable: Timetable,
        phases: Sequence[Phases],
        ranks: Sequence[RankMemory],
        microbatches_left: int,
        limit_s: float,
        goal_s: float,
    ) -> _BoundSearch:
        """Return a search for a lower bound on the pipeline. ``tables``: seconds and bytes of all possible stages.
        ``timetable``: the order of the schedule's forwards and backwards. ``phases``: seconds of each virtual stage
        under some cut, to find long paths. ``ranks``: the memory of each rank. ``microbatches_left``: how many
        microbatches a step has more than the timetable. ``limit_s``: seconds of a known step. ``goal_s``: a bound that
        is good enough."""
        microbatches = count_microbatches(timetable) + microbatches_left
        relaxed = _RelaxedCuts(tables, ranks, limit_s / microbatches)
        train, overlaps = tables.problem.train, tables.problem.overlap_steps
        more = np.zeros((tables.problem.num_stages, relaxed.num_phases))
        more[:, :3] = microbatches_left / len(ranks)  # each costs a rank its work; a step takes at least their mean

        def find_path(of_stages: Sequence[Phases]) -> Table:
            path: Table = longest_path(timetable, of_stages, train, overlap_steps=overlaps)[1]
            return path[:, : relaxed.num_phases] + more

        apart = -(-len(ranks) * sum(map(len, timetable.orders)) // _MOST_SIMULATED_ACTIONS)
        slowed = list(_slow_each_rank(phases, ranks[::apart]))
        if overlaps:
            first = [find_path(of_stages) for of_stages in slowed]
        else:
            columns = np.array([[astuple(of_stage) for of_stage in of_stages] for of_stages in slowed])
            first = [path[:, : relaxed.num_phases] + more for path in longest_paths(timetable, columns, train)]
        first += _list_rank_paths(tables, ranks, microbatches, relaxed.num_phases)
        return cls(relaxed, find_path, first, [len(rank.moments) for rank in ranks], limit_s, goal_s)

    def run(self, case: Sequence[_AtMost]) -> float:
        """Return a lower bound in seconds over all cuts that satisfy the constraints ``case``; at most ``goal_s``."""
        relaxed, goal_s = self.relaxed.restrict(case) if case else self.relaxed, self.goal_s
        # a heavy call too much has to cost more than the time that it saves
        mixture = _CutMixture(relaxed.memory, self.limit_s * (1 + _CASE_COST * len(case)))
        for path in self.first:
            mixture.add_path(path)
        weights, none = np.full(len(self.first), 1 / len(self.first)), np.zeros(len(case))
        best = _Duals(-np.inf, weights, np.zeros(len(relaxed.memory)))
        even = [np.full(number, 1 / number / len(self.num_moments)) for number in self.num_moments]
        each = np.concatenate([*even, none])
        first = [best.prices, *(self.limit_s * price * each for price in _FIRST_PRICES)]
        for number in range(max(len(first), min(_MOST_CUTS, _MOST_WORK // relaxed.num_sequences))):
            tried = best._replace(prices=first[number]) if number < len(first) else best
            if number >= len(first):
                found = mixture.solve(best)
                if found is None or best.bound_s >= found[0] * (1 - _SAME):
                    break
                tried = found[1]
            bound_s, cut = relaxed.find_best_cut(mixture.weigh_paths(tried.weights), tried.prices, goal_s)
            if cut is None or bound_s >= goal_s:
                return goal_s
            mixture.add_cut(cut)
            if bound_s > best.bound_s:
                best = tried._replace(bound_s=bound_s)
            elif number < len(first):
                first = first[: number + 1]  # higher prices are too high, too
            if number % _EVERY == 0:
                mixture.add_path(self.find_path([Phases(*of_stage) for of_stage in cut.seconds.tolist()]))
        return best.bound_s


class _PricedCut(NamedTuple):
    """One way to cut the block calls (such as layers) into virtual stages and to recompute some of them.

    ``seconds``: the time of one microbatch by stage and phase (such as forward and the halves of backward), shape
    ``[stages, phases]``. ``bytes``: shape ``[4, stages]``: bytes that do not depend on the number of microbatches in
    flight; bytes of a microbatch whose backward has not begun; bytes of one between the two halves of its backward; and
    the number of heavy calls.
    """

    seconds: Table
    bytes: Table


@dataclass(frozen=True)
class _MemoryOfTimes:
    """The fraction of a rank's memory that a byte of a virtual stage takes at each time of the step. The times of the
    first rank come first.

    ``stages``: the virtual stages of each rank. ``parts``: for each rank, the fraction of its memory that a byte takes,
    shape ``[moments, 3, stages of the rank]``. The second dim is for bytes that do not depend on the number of
    microbatches in flight, bytes of a microbatch whose backward has not begun, and bytes of one between the two halves
    of its backward. ``num_stages``: number of virtual stages of all ranks. ``limits``: constraints on the numbers of
    heavy calls, which follow the times: 1 / (greatest number) for the stages to which a constraint applies, otherwise
    0; shape ``[constraints, stages]``.
    """

    stages: Sequence[Sequence[int]]
    parts: Sequence[Table]
    num_stages: int
    limits: Table

    @classmethod
    def of(cls, ranks: Sequence[RankMemory], num_stages: int, working_bytes: float) -> _MemoryOfTimes:
        """Return an object for ``ranks`` without constraints on heavy calls. ``num_stages``: number of virtual stages
        of all ranks. ``working_bytes``: bytes of a rank that no stage may use."""
        parts = []
        for rank in ranks:
            counts = np.array(rank.moments, dtype=np.float64).reshape(len(rank.moments), len(rank.stages), 2)
            whole = np.ones((len(counts), 1, len(rank.stages)))
            taken = np.concatenate([whole, counts.transpose(0, 2, 1)], axis=1)
            parts.append(taken * (1 / (rank.capacity - working_bytes)))
        return cls([list(rank.stages) for rank in ranks], parts, num_stages, np.zeros((0, num_stages)))

    def __len__(self) -> int:
        return sum(map(len, self.parts)) + len(self.limits)

    def price_bytes(self, prices: Table) -> Table:
        """Return the price in seconds of a byte of each kind, and of a heavy call, of each virtual stage, shape
        ``[kinds, stages]``. ``prices``: for each rank and time, the price in seconds of all memory of the rank; then
        for each constraint, the price of the greatest number of heavy calls."""
        per_byte, first = np.zeros((_NUM_KINDS, self.num_stages)), 0
        for stages, part in zip(self.stages, self.parts, strict=True):
            per_byte[:_HEAVY, stages] = np.einsum("t,tbk->bk", prices[first : first + len(part)], part)
            first += len(part)
        per_byte[_HEAVY] = prices[first:] @ self.limits
        return per_byte

    def measure(self, sizes: Table) -> Table:
        """Return two kinds of fractions in one array: for each time, the fraction of its rank's memory that is in use;
        then, for each constraint, the fraction of the greatest number of heavy calls. ``sizes``: bytes of each kind,
        and heavy calls, of each virtual stage, shape ``[kinds, stages]``."""
        taken = [
            part.reshape(len(part), -1) @ sizes[:_HEAVY, stages].ravel()
            for stages, part in zip(self.stages, self.parts, strict=True)
        ]
        return np.concatenate([*taken, self.limits @ sizes[_HEAVY]])


class _CutMixture:
    """A linear program over mixtures of cuts into stages. A mixture is a weight for each cut; the weights sum up to 1.
    The program minimises the seconds of a step such that no path through the schedule takes longer and each rank's
    memory suffices at each time of the step, both as weighted means over the cuts.

    ``memory``: the fraction of a rank's memory that a byte of a stage takes at each time of the step. ``limit_s``: the
    penalty in seconds for exceeding a limit on memory by all memory of a rank; with a penalty, the program always has a
    solution.

    The program has a row only for times at which some solution so far exceeded the memory. Most times never exceed it;
    their dual price would be 0.
    """

    def __init__(self, memory: _MemoryOfTimes, limit_s: float) -> None:
        self._memory = memory
        self._paths: list[Table] = []
        self._cuts: list[_PricedCut] = []
        self._shares: list[mathopt.Variable] = []
        self._model = mathopt.Model()
        self._used: list[Table] = []  # of each cut: the fraction of the memory that it takes at each time
        self._seconds, self._lacking = self._model.add_variable(lb=0.0), self._model.add_variable(lb=0.0)
        self._model.minimize(self._seconds + limit_s * self._lacking)
        self._whole = self._model.add_linear_constraint(lb=1.0, ub=1.0)
        self._longer: list[mathopt.LinearConstraint] = []
        self._fits: dict[int, mathopt.LinearConstraint] = {}  # time -> row
        self._solver = mathopt.IncrementalSolver(self._model, mathopt.SolverType.GLOP)

    def add_path(self, path: Table) -> None:
        """Add a path through the schedule. ``path``: how often each phase of each virtual stage is on it, shape
        ``[stages, phases]``.
        """
        row = self._model.add_linear_constraint(lb=0.0)
        row.set_coefficient(self._seconds, 1.0)
        for cut, share in zip(self._cuts, self._shares, strict=True):
            row.set_coefficient(share, -float(np.vdot(path, cut.seconds)))
        self._paths.append(path)
        self._longer.append(row)

    def add_cut(self, cut: _PricedCut) -> None:
        """Add ``cut`` to the cuts of which mixtures consist."""
        share = self._model.add_variable(lb=0.0)
        self._whole.set_coefficient(share, 1.0)
        for row, path in zip(self._longer, self._paths, strict=True):
            row.set_coefficient(share, -float(np.vdot(path, cut.seconds)))
        used = self._memory.measure(cut.bytes)
        for moment, row in self._fits.items():
            row.set_coefficient(share, float(used[moment]))
        self._used.append(used)
        self._cuts.append(cut)
        self._shares.append(share)

    def weigh_paths(self, weights: Table) -> Table:
        """Return the mean of the paths with ``weights``, shape ``[stages, phases]``. The last added paths have no
        weight and do not count."""
        mean: Table = np.tensordot(weights, np.stack(self._paths[: len(weights)]), axes=1)
        return mean

    def solve(self, best: _Duals) -> tuple[float, _Duals] | None:
        """Return two values: the least seconds of all mixtures of the cuts so far, and the duals to try next. These are
        the mean of the duals of this solution and of ``best``, the duals with the highest bound so far. Return ``None``
        if the linear solver fails."""
        result = self._solve_program()
        while result is not None and self._add_exceeded_times(result):
            result = self._solve_program()
        if result is None:
            return None
        values = result.dual_values()
        weights = np.maximum(0.0, [values[row] for row in self._longer])
        prices = np.zeros(len(self._memory))
        for moment, row in self._fits.items():
            prices[moment] = max(0.0, -values[row])
        if not weights.sum() > 0:
            return None
        known = np.zeros_like(weights)
        known[: len(best.weights)] = best.weights
        mean = _KEPT * known + (1 - _KEPT) * weights / weights.sum()
        return result.objective_value(), _Duals(-np.inf, mean, _KEPT * best.prices + (1 - _KEPT) * prices)

    def _add_exceeded_times(self, result: mathopt.SolveResult) -> bool:
        """Add rows for those times at which the mixture of ``result``, a solution, exceeds the memory most and that
        have no row yet. Return whether rows were added."""
        values = result.variable_values()
        most = 1.0 + values[self._lacking] + _EXCEEDED
        used = sum(values[share] * of_cut for share, of_cut in zip(self._shares, self._used, strict=True))
        exceeded = [moment for moment in np.argsort(-used).tolist()[:_ROWS_AT_ONCE] if used[moment] > most]
        added = [moment for moment in exceeded if moment not in self._fits]
        for moment in added:
            row = self._fits[moment] = self._model.add_linear_constraint(ub=1.0)
            row.set_coefficient(self._lacking, -1.0)
            for share, of_cut in zip(self._shares, self._used, strict=True):
                row.set_coefficient(share, float(of_cut[moment]))
        return bool(added)

    def _solve_program(self) -> mathopt.SolveResult | None:
        """Return the solution of the linear program, or ``None`` if there is none. The simplex method starts from the
        last solution. If it ends with a numerical error, it starts anew."""
        for _ in range(2):
            try:
                result = self._solver.solve()
            except Exception:  # an internal error of the solver, which MathOpt raises in several types
                self._solver = mathopt.IncrementalSolver(self._model, mathopt.SolverType.GLOP)
                continue
            return result if result.has_dual_feasible_solution() and result.has_primal_feasible_solution() else None
        return None


class _RelaxedCuts:
    """The relaxed problem: cuts into virtual stages whose cost is the seconds on a mean of paths plus the price of
    their memory.

    ``memory``: the fraction of a rank's memory that a byte of a stage takes at each time of the step. ``num_phases``:
    number of phases (such as forward) of a stage. ``num_sequences``: number of combinations of a virtual stage, a
    sequence of block calls (such as layers) and a kind of selective recomputation.

    ``tables``: seconds and bytes of all possible stages. ``ranks``: the memory of each rank. ``most_s``: the most
    seconds of a microbatch in a stage.
    """

    def __init__(self, tables: StageTables, ranks: Sequence[RankMemory], most_s: float) -> None:
        problem = tables.problem
        size = len(problem.calls) + 1
        stop, length = np.arange(size)[:, None], np.arange(1, size - problem.num_stages + 1)[None, :]
        start = np.maximum(stop - length, 0)
        ways = [way for way in (tables, tables.slim) if way is not None]
        seconds = [
            PhaseCosts(way, recomputed=False).stack_seconds([(start, stop)] * problem.num_stages) for way in ways
        ]
        fastest = np.min([of_way[:, :3].sum(axis=1) for of_way in seconds], axis=0)
        fit = (fastest <= most_s * (1 + TINY)) & (stop >= length)
        width = 1 + int(np.flatnonzero(fit.any(axis=(0, 1))).max(initial=0))  # 1 if nothing is quick enough
        self._start, self._stop, chunks = start[:, :width], stop, max(len(rank.stages) for rank in ranks)
        heavy = np.concatenate([[0.0], np.cumsum(_find_heavy_calls(tables))])
        num_heavy = np.maximum(0.0, heavy[None, :] - heavy[:, None])
        self._ways = [
            _Recomputation.of(
                way,
                np.where(fit[:, None, :, :width], of_way[..., :width], np.inf),
                self._start,
                stop,
                chunks,
                num_heavy,
            )
            for way, of_way in zip(ways, seconds, strict=True)
        ]
        self.num_phases = seconds[0].shape[1]
        self.num_sequences = problem.num_stages * size * width * len(ways)
        self.memory = _MemoryOfTimes.of(ranks, problem.num_stages, problem.overhead.working_bytes)

    def restrict(self, case: Sequence[_AtMost]) -> _RelaxedCuts:
        """Return a copy of the relaxed problem with rows for the constraints ``case``. The copy may drop sequences of
        calls without changing this object."""
        other = copy(self)
        limits = np.zeros((len(case), self.memory.num_stages))
        for row, (stages, number) in zip(limits, case, strict=True):
            row[list(stages)] = 1 / max(number, 0.5)  # no heavy call is at most half of one
        other.memory = replace(self.memory, limits=limits)
        other._ways = [replace(way, allowed=way.allowed.copy()) for way in self._ways]
        return other

    def find_best_cut(self, path: Table, prices: Table, goal_s: float) -> tuple[float, _PricedCut | None]:
        """Return a lower bound in seconds on the pipeline, and the cut of the relaxed problem that attains it. Also
        drop all sequences of block calls (such as layers) that only occur in cuts of at least ``goal_s`` seconds. If no
        cut is left, all cuts take at least ``goal_s``, and the returned cut is ``None``.

        ``path``: how often each phase counts, shape ``[stages, phases]``. ``prices``: for each moment, the price in
        seconds of all memory of a rank.
        """
        per_byte = self.memory.price_bytes(prices)
        costs = np.stack([way.price_sequences(path, per_byte, self._start, self._stop) for way in self._ways])
        least, ways = costs.min(axis=0), costs.argmin(axis=0)
        seconds, cuts, before = find_least_partial_cuts(least)
        if not np.isfinite(seconds):
            return goal_s, None
        others = _complete_cuts(least, self._start, before)
        for way, of_way in zip(self._ways, costs, strict=True):
            way.allowed &= of_way + others < goal_s + prices.sum()
        again = [way.choose_recomputation(path, per_byte) for way in self._ways]
        chosen = []
        for k, (start, stop) in enumerate(pairwise(cuts)):
            number = ways[k, stop, stop - start - 1]
            chosen.append(self._ways[number].read_stage(k, start, stop, again[number][:, k, start:stop]))
        both = _PricedCut(np.stack([each[0] for each in chosen]), np.stack([each[1] for each in chosen], axis=1))
        return seconds - float(prices.sum()), both


def _complete_cuts(costs: Table, start: NDArray[np.int64], before: Table) -> Table:
    """Return, for each stage and each sequence of consecutive block calls (such as layers), the least sum of the costs
    of all other stages if the stage consists of this sequence. The sum is infinite if the calls before and after the
    sequence cannot be cut into the other stages.

    ``costs``: cost of each stage for each sequence. The result and ``costs`` have the shape ``[stages, calls + 1,
    width]``: the second index is the end of a sequence (the call after its last), the third its number of calls minus
    1. ``start``: the first call of each sequence, shape ``[calls + 1, width]``. ``before``: the least sum of the costs
    of the first ``k`` stages if they have the calls before ``call``, at the entry ``[k, call]``.
    """
    _, size, width = costs.shape
    behind = np.full((len(costs) + 1, size), np.inf)
    behind[-1, -1] = 0.0
    later = np.minimum(np.arange(size)[:, None] + np.arange(1, width + 1)[None, :], size - 1)  # [first call, length]
    inside = np.arange(size)[:, None] + np.arange(1, width + 1)[None, :] < size
    by_start = np.where(inside, costs[:, later, np.arange(width)[None, :]], np.inf)
    for k in range(len(costs) - 1, -1, -1):
        behind[k] = (by_start[k] + behind[k + 1][later]).min(axis=1)
    others: Table = before[:-1][:, start] + behind[1:][:, :, None]
    return others


@dataclass
class _Recomputation:
    """The cost of all sequences of consecutive block calls (such as layers), either without selective recomputation or
    with selective recomputation of all calls. There are further ways to treat each call: it may be recomputed in full,
    and it may be left out of selective recomputation. Tables of sequences end with the dims ``[calls + 1, width]``: the
    end of the sequence (the call after its last), and its number of calls minus 1.

    There are six phases: forward, backward for inputs, backward for weights, two waits for messages, and collectives at
    the ends of a step. ``seconds``: the time of each phase for one microbatch, without full recomputation, shape
    ``[stages, phases, calls + 1, width]``. ``allowed``: whether the stage may consist of the sequence, shape ``[stages,
    calls + 1, width]``. ``bytes``: shape ``[kinds, calls + 1, width]``: bytes that do not depend on the number of
    microbatches in flight, bytes of a microbatch whose backward has not begun, bytes of one between the two halves of
    its backward, and the number of heavy calls. ``again_s``: seconds that each way adds for each call, shape ``[ways,
    stages, calls]``. ``freed``: bytes that this frees, shape ``[ways, calls]``. The first way is full
    recomputation. The second, without selective recomputation, has negative seconds and bytes.
    """

    seconds: Table
    allowed: NDArray[np.bool_]
    bytes: Table
    again_s: Table
    freed: Table

    @classmethod
    def of(
        cls,
        tables: StageTables,
        seconds: Table,
        start: NDArray[np.int64],
        stop: NDArray[np.int64],
        chunks: int,
        heavy_calls: Table,
    ) -> _Recomputation:
        """Return the costs under the kind of selective recomputation that ``tables`` is for: none, or of all calls.

        ``seconds``: for each phase (such as forward) of each stage and each sequence of calls, shape ``[stages, phases,
        calls + 1, width]``; infinite if a stage may not consist of the calls. ``start``, ``stop``: the first call of
        each sequence, and the call after its last. ``chunks``: the largest number of virtual stages of a rank.
        ``heavy_calls``: table whose entry ``[start, stop]`` is the number of heavy calls among ``start:stop``.
        """
        problem, cut = tables.problem, tables.segments
        # what several stages of a rank share, and temporary memory, counts once: at least the mean over its stages
        readers = Counter(name for call in problem.calls for name in set(call.states))
        sizes = {
            name: (size - problem.late_bytes.get(name, 0.0)) / (chunks if readers[name] > 1 else 1)
            for name, size in problem.state_bytes.items()
        }
        fixed = cut.states_of(sizes) + cut.boundary + cut.largest_working / chunks
        kinds = fixed, cut.saved + cut.saved_inputs, cut.carried + cut.saved_inputs, heavy_calls
        allowed = np.isfinite(np.sum(seconds, axis=1))
        again_s = [np.array([[c.recompute_s for c in problem.pace(k).costs] for k in range(problem.num_stages)])]
        freed = [np.array([call.cost.saved_bytes for call in problem.calls])]
        if tables.may_spare:  # a call that keeps its activations takes less time and more bytes
            spared_s, kept = tables.spared_by_call
            again_s.append(-spared_s)
            freed.append(-kept)
        return cls(
            np.where(allowed[:, None], seconds, 0.0),
            allowed,
            np.stack([of_kind[start, stop] for of_kind in kinds]),
            np.array(again_s),
            np.array(freed),
        )

    def price_sequences(self, path: Table, per_byte: Table, start: NDArray[np.int64], stop: NDArray[np.int64]) -> Table:
        """Return the cost of each sequence of consecutive block calls (such as layers) on each stage: its seconds on
        ``path`` plus the price of its memory. A call is recomputed where that is cheaper. The shape is
        ``[stages, calls + 1, width]``: stage, end of the sequence, and its number of calls minus 1. The cost is
        infinite if the stage may not consist of the sequence.

        ``path``: how often each phase (such as forward) of a stage counts, shape ``[stages, phases]``. ``per_byte``:
        the price in seconds of a byte of each kind, and of a heavy call, shape ``[kinds, stages]``. The kinds are bytes
        that do not depend on the number of microbatches in flight, bytes of a microbatch whose backward has not begun,
        and bytes of one between the two halves of its backward. ``start``, ``stop``: the first call of each sequence,
        and the call after its last.
        """
        saved = np.minimum(0.0, self.price_recomputation(path, per_byte).min(axis=0))
        sums = np.concatenate([np.zeros((len(saved), 1)), np.cumsum(saved, axis=1)], axis=1)
        priced = np.einsum("kc,kcjw->kjw", path, self.seconds) + np.einsum("bk,bjw->kjw", per_byte, self.bytes)
        return np.where(self.allowed, priced + sums[:, stop] - sums[:, start], np.inf)

    def read_stage(self, stage: int, start: int, stop: int, again: NDArray[np.bool_]) -> tuple[Table, Table]:
        """Return the seconds of each phase (such as forward), shape ``[phases]``, and the bytes of each kind, shape
        ``[kinds]``, of one stage with the calls ``start:stop``. ``again``: whether each of the calls is recomputed in
        each way, shape ``[ways, calls]``.
        """
        seconds = self.seconds[stage, :, stop, stop - start - 1].copy()
        seconds[_INPUTS] += self.again_s[:, stage, start:stop][again].sum()
        taken = self.bytes[:, stop, stop - start - 1].copy()
        taken[1] -= self.freed[:, start:stop][again].sum()
        return seconds, taken

    def price_recomputation(self, path: Table, per_byte: Table) -> Table:
        """Return the seconds that recomputation of each call in each way adds, less the price of the bytes that it
        frees, shape ``[ways, stages, calls]``. It is negative where recomputation is cheaper.

        ``path``: how often each phase (such as forward) of a stage counts, shape ``[stages, phases]``. ``per_byte``:
        the price of a byte in seconds, shape ``[kinds, stages]``; row 1 is for the activations of a microbatch whose
        backward has not begun.
        """
        added: Table = self.again_s * path[:, _INPUTS, None] - per_byte[1][:, None] * self.freed[:, None]
        return added

    def choose_recomputation(self, path: Table, per_byte: Table) -> NDArray[np.bool_]:
        """Return whether each call is recomputed in each way, shape ``[ways, stages, calls]``: in the cheapest way, if
        that is cheaper than its memory. The arguments are those of :meth:`price_recomputation`."""
        added = self.price_recomputation(path, per_byte)
        cheapest = added.argmin(axis=0)
        return np.stack([(cheapest == way) & (of_way < 0) for way, of_way in enumerate(added)])


__all__ = ["RankMemory", "bound_fitting_cuts"]
