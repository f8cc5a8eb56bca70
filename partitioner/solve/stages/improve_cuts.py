"""Improve the cuts of the calls into a schedule's virtual stages, and compute a lower bound on the step time of all
cuts.

The time of a schedule is the length of the longest path through its actions. Each path is a weighted sum of the forward
and backward times of the virtual stages. For one path, or a mean of paths, the best cuts are a shortest path over
(stage, cut), and their sum is a lower bound for all cuts. The search alternates: it computes the best cuts for the mean
of all paths so far, then adds the longest path under these cuts to the mean (fictitious play, Brown 1951; Robinson
1951). Upper and lower bound approach each other. If the problem has collectives at the ends of a step, they are actions
like any other: the cuts then trade idle time of the pipeline for gradients that are reduced earlier.

A rank runs the microbatches of a stage one after the other. Sequences of calls are therefore excluded if running all
microbatches through them takes longer than the step with the first cuts. If a gap remains, a local search moves cuts.
If there are few cuts, all are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice

import numpy as np
from numpy.typing import NDArray

from partitioner.schedules.actions import Timetable
from partitioner.schedules.makespan import Phases, follow_all, longest_path
from partitioner.solve.stages.tables import TINY, StageTables

Table = NDArray[np.float64]

Places = NDArray[np.int64]
_CLOSE = 0.005  # relative gap at which the search stops
_MOST_TURNS = 40
_ACTIONS = 200_000  # actions to simulate in all iterations together
_MOVED, _ALL = (
    500_000,
    2_000_000,
)  # actions to simulate in the local search, and if all cuts are tried (many at once are faster)
_LISTED = 20_000_000  # actions to simulate if all cuts are tried that could still be faster
_TABLED = 5_000_000  # seconds to tabulate for that: of each path on each sequence of calls in each stage
_BEGUN, _AT_ONCE = 200_000, 4_000_000  # cuts to build up at the same time, and their paths to add up at once
_FEW_PATHS = 8  # paths by which unfinished cuts are left out
_KEPT = 1000  # cuts that are returned if all are tried
_STEPS = (1, -1, 2, -2)  # numbers of calls by which cuts are moved


@dataclass(frozen=True)
class RankedCuts:
    """The result of a search for the best way to cut the block calls (such as layers) of a model into stages. ``cuts``:
    all cuts that were tried, fastest first, as pairs (step time in seconds, positions); the positions are the index of
    the first call of each stage, followed by the number of calls. ``bound``: a lower bound in seconds on the step time
    of every way to cut the calls."""

    cuts: tuple[tuple[float, tuple[int, ...]], ...]
    bound: float


def better_cuts(
    tables: StageTables, timetable: Timetable, start: Sequence[int], cutoff_s: float = math.inf, *, quick: bool = False
) -> RankedCuts:
    """Search cuts of the block calls (such as layers) into virtual stages with a shorter step time, starting from the
    cuts ``start`` (the index of the first call of each stage, followed by the number of calls). Return all cuts that
    were tried, fastest first, with a lower bound in seconds over all cuts.

    In the results, each virtual stage alone fits on its rank, but all virtual stages of a rank together may not fit;
    the caller checks that. If the best cuts do not reach the lower bound, all cuts that may still be faster are
    simulated, unless there are too many, ``quick`` is set or the problem forbids stages. The search stops early if the
    lower bound reaches ``cutoff_s`` seconds, because longer steps are of no use to the caller.

    ``tables``: seconds and bytes of all possible stages. ``timetable``: the order in which the schedule runs the
    forwards and backwards of microbatches. ``quick``: whether to run only a quarter of the iterations.
    """
    costs = PhaseCosts(tables)
    how = {"train": tables.problem.train, "overlap_steps": tables.problem.overlap_steps}
    seen: dict[tuple[int, ...], float] = {}
    mean, paths = np.zeros((tables.problem.num_stages, len(costs.of_stage[0]))), list[Table]()
    bound, cuts = 0.0, tuple(start)
    actions = sum(map(len, timetable.orders))
    calls, stages = len(tables.problem.calls), tables.problem.num_stages
    if tables.problem.may_be_empty:  # the stages of almost all calls are fixed
        seconds, _ = longest_path(timetable, costs.phases(cuts), **how)
        return RankedCuts(((seconds, cuts),), 0.0)
    if math.comb(calls - 1, stages - 1) * actions <= _ALL:
        return _simulate_all_cuts(costs, timetable, how, calls, stages)
    simulated = {cuts: longest_path(timetable, costs.phases(cuts), **how)}
    bands = costs.bands(simulated[cuts][0] / count_microbatches(timetable))
    turns = max(4, min(_MOST_TURNS, _ACTIONS // actions) // (4 if quick else 1))
    for turn in range(1, turns + 1):
        if cuts not in simulated:
            simulated[cuts] = longest_path(timetable, costs.phases(cuts), **how)
        seen[cuts], path = simulated[cuts]
        paths.append(path[:, : mean.shape[1]])
        mean += (paths[-1] - mean) / turn
        least, cuts = bands.shortest(mean)
        bound = max(bound, least)
        if min(min(seen.values()) * (1 - _CLOSE), cutoff_s) <= bound:
            break
    else:
        _improve_cuts_locally(costs, timetable, how, seen, (_MOVED // 4 if quick else _MOVED) // actions)
        limit_s = min(min(seen.values()) * (1 - TINY), cutoff_s)
        is_listed = quick or bool(tables.problem.barred)  # all cuts were listed before stages were forbidden
        left = None if is_listed else _list_cuts_within(costs, timetable, [*paths, mean], limit_s, _LISTED // actions)
        if left is not None:
            seen |= costs.taken(timetable, left, how)
            bound = max(bound, min(min(seen.values()), limit_s))
    order = sorted((taken, found) for found, taken in seen.items())
    return RankedCuts(tuple(order), min(bound, order[0][0]))


def _improve_cuts_locally(
    costs: PhaseCosts, timetable: Timetable, how: Mapping[str, bool], seen: dict[tuple[int, ...], float], left: int
) -> None:
    """Search for cuts into stages with a shorter step, starting from the fastest in ``seen``, and add all cuts that are
    tried to ``seen``, a dict: cuts -> step time in seconds. The search moves single cuts and groups of neighbouring
    cuts, and stops if no move is faster.

    ``timetable``: the order in which the schedule runs the forwards and backwards of microbatches. ``left``: the
    largest number of cuts to simulate. ``costs``: seconds of all possible stages. ``how``: options of the simulation:
    ``train`` (whether there is a backward) and ``overlap_steps`` (whether a rank begins the next step when it has ended
    its part of this one).
    """
    best, before = min(seen, key=lambda cuts: seen[cuts]), None
    while best != before and left > 0:
        near = list(islice((cuts for cuts in _list_neighbour_cuts(best) if cuts not in seen), left))
        seen |= costs.taken(timetable, np.array(near, dtype=np.int64).reshape(-1, len(best)), how)
        left -= len(near)
        best, before = min(seen, key=lambda cuts: seen[cuts]), best


def _list_neighbour_cuts(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield variants of ``cuts`` in which one or several neighbouring cuts are moved by one or two calls. Variants with
    fewer moved cuts come first. ``cuts``: how the block calls (such as layers) are cut into stages: the index of the
    first call of each stage, followed by the number of calls."""
    inner = len(cuts) - 2
    for count in range(1, inner + 1):
        for first in range(1, inner + 2 - count):
            behind = first + count
            for step in _STEPS:
                if cuts[first - 1] < cuts[first] + step and cuts[behind - 1] + step < cuts[behind]:
                    yield (*cuts[:first], *(c + step for c in cuts[first:behind]), *cuts[behind:])


def _simulate_all_cuts(
    costs: PhaseCosts, timetable: Timetable, how: Mapping[str, bool], calls: int, stages: int
) -> RankedCuts:
    """Simulate all possible cuts of the block calls (such as layers) into stages and return the fastest ones. The bound
    in the result is the step time of the best cut.

    ``costs``: seconds of all possible stages. ``timetable``: the order in which the schedule runs the forwards and
    backwards of microbatches. ``calls``, ``stages``: the numbers of calls and of stages. ``how``: options of the
    simulation: ``train`` (whether there is a backward) and ``overlap_steps`` (whether a rank begins the next step when
    it has ended its part of this one).
    """
    taken = costs.taken(timetable, _all_cuts(calls, stages), how, _KEPT)  # at least the first cuts fit
    order = tuple((seconds, cuts) for cuts, seconds in taken.items())
    return RankedCuts(order, order[0][0])


def _list_cuts_within(
    costs: PhaseCosts, timetable: Timetable, paths: Sequence[Table], limit_s: float, most: int
) -> Places | None:
    """Return all cuts into stages with which a step may take less than ``limit_s`` seconds, one row for each: the index
    of the first block call (such as a layer) of each stage, followed by the number of calls. Cuts are left out if some
    rank works for at least ``limit_s``, or if one of ``paths`` takes at least ``limit_s``. Return ``None`` if there are
    too many.

    The cuts are built up stage by stage. A path through the first stages is completed by the best cuts into the other
    stages for this path alone. ``paths``: paths through the forwards and backwards of the schedule, each given by how
    often it contains each phase (forward, backward for inputs, and so on) of each stage, shape ``[stages, phases]``.
    ``costs``: seconds of all possible stages. ``timetable``: the order in which the schedule runs the forwards and
    backwards of microbatches. ``most``: the largest number of cuts to return.
    """
    stages, calls = len(costs.of_stage), len(costs.of_stage[0][0]) - 1
    if len(paths) * stages * (calls + 1) ** 2 > _TABLED:
        return None
    windows = [np.stack(costs.in_window(stage)) for stage in range(stages)]
    fits = np.stack([np.isfinite(window[1]) for window in windows])
    along = np.stack(
        [
            np.einsum("pc,cij->pij", weights, np.where(allowed, window, 0.0))
            for weights, allowed, window in zip(np.stack(paths, axis=1), fits, windows, strict=True)
        ]
    )
    tightest = np.argsort(-_complete_paths(along, fits)[0][:, 0], kind="stable")[:_FEW_PATHS]
    every, along = along, along[:, tightest]  # the others are compared once, with the cuts that are left
    rest = _complete_paths(along, fits)
    m = count_microbatches(timetable)
    # positions count from the first window of a stage: cut ``k`` lies ``k`` calls behind its position
    cuts, loads = np.zeros((1, 1), dtype=np.int64), np.zeros((1, len(timetable.orders)))
    sums = np.zeros((1, len(tightest)))
    for stage, rank in enumerate(timetable.ranks):
        begun = cuts[:, -1]
        work = windows[stage][:3].sum(axis=0)  # forward, and both halves of the backward
        seconds = loads[:, rank, None] + m * work[begun]  # [cuts, end of the stage]
        allowed = fits[stage][begun] & np.isfinite(rest[stage + 1]).all(axis=0) & (seconds < limit_s)
        row, stop = np.nonzero(allowed)
        kept: list[NDArray[np.float64]] = []
        for some in np.array_split(np.arange(len(row)), 1 + len(row) * len(tightest) // _AT_ONCE):
            longer = sums[row[some]] + along[stage][:, begun[row[some]], stop[some]].T
            allowed[row[some], stop[some]] = (longer + rest[stage + 1][:, stop[some]].T < limit_s).all(axis=1)
            kept.append(longer[allowed[row[some], stop[some]]])
            if sum(map(len, kept)) > _BEGUN:
                return None
        row, stop = np.nonzero(allowed)
        cuts, loads, sums = np.column_stack([cuts[row], stop]), loads[row], np.concatenate(kept)
        loads[:, rank] = seconds[row, stop]
    lengths = np.zeros((len(paths), len(cuts)))
    for of_stage, start, stop in zip(every, cuts.T, cuts.T[1:], strict=False):
        lengths += of_stage[:, start, stop]
    left: Places = cuts[(lengths < limit_s).all(axis=0)] + np.arange(stages + 1)
    return left if len(left) <= most else None


def _complete_paths(along: Table, fits: NDArray[np.bool_]) -> list[Table]:
    """Return the least seconds of each path through a schedule on the last stages, as a list of arrays of shape
    ``[paths, width]``. Entry ``k`` of the list leaves out the first ``k`` stages, from none to all. The second index of
    an array is the first block call (such as a layer) of the remaining stages, minus ``k``. The seconds are infinite if
    these stages cannot hold the remaining calls.

    ``along``: the seconds of the paths on the sequences of calls that each stage can have, shape ``[stages, paths,
    width, width]``, as in :meth:`PhaseCosts.in_window`. ``fits``: whether a stage may consist of the sequence, shape
    ``[stages, width, width]``.
    """
    width = along.shape[-1]
    any_call = np.arange(width)[None, :] >= np.arange(width)[:, None]
    rest = [np.where(np.arange(width) == width - 1, 0.0, np.full((along.shape[1], width), np.inf))]
    for allowed, of_paths in zip(fits[::-1], along[::-1], strict=True):
        rest.append((np.where(allowed & any_call, of_paths, np.inf) + rest[-1][:, None, :]).min(axis=2))
    return rest[::-1]


@lru_cache(maxsize=16)
def _all_cuts(calls: int, stages: int) -> Places:
    """Return all ways to cut ``calls`` consecutive block calls (such as layers) into ``stages`` stages, as an array
    with one row for each: the index of the first call of each stage, followed by the number of calls.
    """
    inner = np.array(list(combinations(range(1, calls), stages - 1)), dtype=np.int64)
    return np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, calls)))


class PhaseCosts:
    """Seconds of every sequence of consecutive block calls (such as layers) on every virtual stage.

    ``of_stage``: for each stage a tuple of tables of shape ``[calls + 1, calls + 1]``, one for each phase: forward,
    backward for inputs, backward for weights, wait for values, wait for gradients; and gathers and reductions at the
    ends of a step, if the problem has them. Rows are the first call, columns the call after the last. The seconds of
    the backward for inputs are infinite if the calls do not fit in memory. Stages share tables that are equal.

    ``tables``: seconds and bytes of all possible stages. ``recomputed``: whether the backward for inputs includes the
    recomputation that the calls need to fit in the memory of the stage's rank, as if the rank had no other stage.
    """

    def __init__(self, tables: StageTables, *, recomputed: bool = True) -> None:
        problem = tables.problem
        self.of_stage: list[tuple[Table, ...]] = []
        self.longest = len(problem.calls) - problem.num_stages + 1  # calls of a stage, since others have at least one
        shared: dict[int, tuple[Table, Table]] = {}  # by speed: forward, and backward for weights
        collectives: dict[bytes, Table] = {}  # by seconds, which most stages have in common

        def sum_collectives(seconds: NDArray[np.float64]) -> Table:
            if (key := seconds.tobytes()) not in collectives:
                collectives[key] = tables.segments.sums(seconds.tolist())
            return collectives[key]

        for k in range(problem.num_stages):
            if (speed := tables.pace_number(k)) not in shared:
                pace = problem.pace(k)
                later = [c.later_s if problem.train else 0.0 for c in pace.costs]
                ahead = tables.seconds(k)[0] + pace.overhead.forward_total_s
                shared[speed] = ahead, tables.segments.sums(later)
            (forward, weights), times = shared[speed], tables.times[k]
            values, gradients = (np.broadcast_to(waits, times.shape) for waits in tables.transfers(k))
            inputs = times - forward - values - gradients - weights
            if not recomputed:
                inputs = np.where(np.isfinite(times), tables.seconds(k)[1] - weights, np.inf)
            ends = [problem.ends[k].gathers, problem.ends[k].reductions] if problem.ends else []
            self.of_stage.append(
                (
                    forward,
                    inputs,
                    weights,
                    values,
                    gradients,
                    *map(sum_collectives, ends),
                )
            )

    def in_window(self, stage: int) -> list[Table]:
        """Return the seconds of each phase of the stage with index ``stage`` for the sequences of block calls (such as
        layers) that it can have if every stage has at least one, shape ``[width, width]``. The entry ``[i, j]`` is for
        the calls ``stage + i : stage + 1 + j``.
        """
        starts, stops = slice(stage, stage + self.longest), slice(stage + 1, stage + 1 + self.longest)
        return [table[starts, stops] for table in self.of_stage[stage]]

    def phases(self, cuts: Sequence[int]) -> list[Phases]:
        """Return, for each stage under ``cuts``, its seconds per microbatch (forward, backward for inputs, backward for
        weights, wait for values, wait for gradients) and its seconds per step of collectives at the ends of a step.
        ``cuts``: how the block calls (such as layers) are cut into stages: the index of the first call of each stage,
        followed by the number of calls."""
        return [
            Phases(*(float(table[cuts[k], cuts[k + 1]]) for table in of_stage))
            for k, of_stage in enumerate(self.of_stage)
        ]

    def taken(
        self, timetable: Timetable, cuts: Places, how: Mapping[str, bool], most: int | None = None
    ) -> dict[tuple[int, ...], float]:
        """Simulate a step of the schedule for each row of ``cuts``, and return a dict: cut -> step time in seconds,
        fastest first. A cut is the index of the first block call (such as a layer) of each stage, followed by the
        number of calls. Cuts are left out if one of their stages does not fit even alone on its rank.

        ``most``: largest number of results; ``None``: no limit. ``how``: options of the simulation: ``train`` (whether
        there is a backward) and ``overlap_steps`` (whether a rank begins the next step when it has ended its part of
        this one). ``timetable``: the order in which the schedule runs the forwards and backwards of microbatches.
        """
        each = self.stack_seconds((cuts[:, k], cuts[:, k + 1]) for k in range(len(self.of_stage)))
        fit = np.flatnonzero(np.isfinite(each[:, 1]).all(axis=0))
        if not len(fit):
            return {}
        seconds = follow_all(timetable, each[:, :, fit].transpose(2, 0, 1), **how)
        order = np.argsort(seconds, kind="stable")[:most]
        return dict(zip(map(tuple, cuts[fit[order]].tolist()), seconds[order].tolist(), strict=True))

    def bands(self, most: float) -> _Bands:
        """Return the seconds of all sequences of consecutive block calls (such as layers) that take at most ``most``
        seconds per microbatch and fit in memory, together with a mask of these sequences. In both arrays, the last two
        indices are the end of a sequence (the call after its last) and its number of calls minus 1. The last dim is as
        long as the longest of these sequences."""
        size = len(self.of_stage[0][0])
        stop, start = np.arange(size)[:, None], np.arange(size)[:, None] - np.arange(1, self.longest + 1)[None, :]
        inside, start = start >= 0, np.maximum(start, 0)
        seconds = self.stack_seconds([(start, stop)] * len(self.of_stage))
        total = seconds[:, :3].sum(axis=1)
        fit = np.isfinite(total) & (total <= most * (1 + TINY)) & inside
        width = int(np.flatnonzero(fit.any(axis=(0, 1)))[-1]) + 1
        fit = fit[..., :width]
        return _Bands(np.where(fit[:, None], seconds[..., :width], 0.0), np.where(fit, 0.0, np.inf))

    def stack_seconds(self, places: Iterable[tuple[Places, Places]]) -> Table:
        """Return the seconds of sequences of block calls (such as layers), shape ``[stages, phases, ...]``. ``places``:
        for each stage two arrays, the first calls and the calls after the last.

        The phases are forward, backward for inputs, backward for weights, wait for values and wait for gradients; two
        more, gathers and reductions at the ends of a step, if the problem has them.
        """
        both = zip(self.of_stage, places, strict=True)
        return np.stack([np.stack([table[start, stop] for table in of_stage]) for of_stage, (start, stop) in both])


@dataclass(frozen=True)
class _Bands:
    """Seconds of sequences of consecutive block calls (such as layers), indexed by the call after the last and by the
    number of calls minus one.

    ``seconds``: shape ``[stages, phases, calls + 1, width]``. The phases are forward, backward for inputs, backward for
    weights, wait for values and wait for gradients; two more, gathers and reductions at the ends of a step, if the
    problem has them. ``barred``: shape ``[stages, calls + 1, width]``; 0 if the stage may consist of these calls,
    otherwise infinite.
    """

    seconds: Table
    barred: Table

    def shortest(self, paths: Table) -> tuple[float, tuple[int, ...]]:
        """Return the least weighted sum of the stages' seconds over all cuts of the block calls (such as layers) into
        stages, and the cuts that attain it (the index of the first call of each stage, followed by the number of
        calls).

        ``paths``: the weights of the phases (forward, backward for inputs, backward for weights, and so on) of each
        stage, shape ``[stages, phases]``. If they count how often each phase occurs on a path through the forwards and
        backwards of a schedule, the sum is a lower bound on the step time of all cuts.
        """
        return find_least_cuts(np.einsum("kc,kcjw->kjw", paths, self.seconds) + self.barred)


def find_least_cuts(costs: Table) -> tuple[float, tuple[int, ...]]:
    """Return the least sum of the stages' costs over all cuts of the block calls (such as layers) into stages, and the
    cuts that attain it: the index of the first call of each stage, followed by the number of calls. ``costs``: the cost
    of each stage for each sequence of consecutive calls, shape ``[stages, calls + 1, width]``; infinite if the stage
    may not consist of these calls. The last two indices are the end of the sequence (the call after its last) and its
    number of calls minus 1.
    """
    seconds, cuts, _ = find_least_partial_cuts(costs)
    return seconds, cuts


def find_least_partial_cuts(costs: Table) -> tuple[float, tuple[int, ...], Table]:
    """Return three values: the least sum of the stages' costs over all cuts of the block calls (such as layers) into
    stages; the cuts that attain it (the index of the first call of each stage, followed by the number of calls); and a
    table of shape ``[stages + 1, calls + 1]``, whose entry ``[k, call]`` is the least sum of the costs of the first
    ``k`` stages if they consist of the calls before ``call``.

    ``costs``: the cost of each stage for each sequence of consecutive calls, shape ``[stages, calls + 1, width]``. The
    last two indices are the end of the sequence (the call after its last) and its number of calls minus 1. A cost is
    infinite if the stage may not consist of these calls.
    """
    _, size, width = costs.shape
    # the first ``width`` entries stand for positions before the first call
    reached = np.full((len(costs) + 1, width + size), np.inf)
    reached[0, width] = 0.0
    every = np.arange(size)
    before = every[:, None] - np.arange(1, width + 1)[None, :] + width
    came = []
    for k, of_stage in enumerate(costs):
        total = reached[k][before] + of_stage
        came.append(total.argmin(axis=1))
        reached[k + 1, width:] = total[every, came[-1]]
    cuts = [size - 1]
    for step in reversed(came):
        cuts.append(cuts[-1] - 1 - int(step[cuts[-1]]))
    return float(reached[-1, -1]), tuple(cuts[::-1]), reached[:, width:]


def count_microbatches(timetable: Timetable) -> int:
    """Return the number of microbatches that ``timetable`` runs in one step."""
    return sum(action.kind == "F" and action.chunk == 0 for action in timetable.orders[0])
