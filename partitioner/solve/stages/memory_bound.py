"""Compute a lower bound on the seconds of a pipeline over all cuts into virtual stages, with the recomputation that
memory requires.

The bound is a Lagrangian relaxation (Geoffrion 1974). The time of a schedule is the longest path through its actions
(forwards and backwards of microbatches). It is relaxed to the mean of several paths, one for each rank. The memory of
each rank is relaxed, too: instead of a limit, its bytes have a price in seconds, and the step gets back the price of
the rank's capacity. For given prices the best cuts are a shortest path over (stage, cut), and each call is recomputed
if that is cheaper than the bytes it frees. The result is a lower bound for every price of 0 or more; a line search
looks for the price with the highest bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.schedules.actions import Timetable
from partitioner.schedules.formulas import Counts
from partitioner.schedules.makespan import Phases, longest_path
from partitioner.solve.stages.improve_cuts import PhaseCosts, count_microbatches, find_least_cuts
from partitioner.solve.stages.tables import TINY, StageTables

Table = NDArray[np.float64]

_SLOWER = 1.15  # factor on the seconds of a rank, so that the longest path goes through it
_INPUTS = 1  # the phase that contains recomputation: backward for inputs
_LEAST_PRICE, _REFINED = 1 / 256, 4  # of a step, for the memory of all ranks; steps of the line search


@dataclass(frozen=True)
class RankMemory:
    """The activations that one pipeline rank holds at one time in the step. ``stages``: indices of its virtual stages.
    ``counts``: for each of them, the number of microbatches that it holds, as a pair (backward not begun, between the
    two halves of a split backward). ``capacity``: usable bytes of the rank."""

    stages: Sequence[int]
    counts: Sequence[Counts]
    capacity: float


def bound_fitting_cuts(
    tables: StageTables,
    timetable: Timetable,
    phases: Sequence[Phases],
    ranks: Sequence[RankMemory],
    microbatches_left: int,
    limit_s: float,
) -> float:
    """Return a lower bound in seconds on the pipeline, over all cuts of the block calls (such as layers) into virtual
    stages with which every rank fits in memory, and over all ways to recompute calls. The bound is at most ``limit_s``.

    ``tables``: seconds and bytes of all possible stages; each may use all memory of its rank. ``timetable``: the order
    in which the schedule runs the forwards and backwards of microbatches. ``microbatches_left``: how many microbatches
    a step has more than the timetable. ``phases``: seconds of forward and backward of each virtual stage under some
    cut; their mean serves to find long paths through the schedule. ``ranks``: the activations of each rank at one time
    in the step. ``limit_s``: seconds of a step that is known.
    """
    paths = _average_rank_paths(tables, timetable, phases, [rank.stages for rank in ranks])
    paths[:, :3] += microbatches_left / len(ranks)  # each costs a rank its work; a step takes at least the mean of all
    microbatches = count_microbatches(timetable) + microbatches_left
    relaxed = _PricedCuts(tables, paths, ranks, limit_s / microbatches)
    prices = limit_s * np.exp2(np.arange(np.log2(_LEAST_PRICE), 1.0))
    return min(limit_s, _maximise(relaxed.bound, prices.tolist()))


def _average_rank_paths(
    tables: StageTables, timetable: Timetable, phases: Sequence[Phases], own: Sequence[Sequence[int]]
) -> Table:
    """Return the mean of several paths through the schedule: how often it contains each phase (forward, backward for
    inputs, backward for weights, waits, collectives at the ends of a step) of each virtual stage, shape ``[stages,
    7]``. There is one path for each rank: the longest one if all stages take equally long, except that those of the
    rank are slower.

    ``tables``: seconds and bytes of all possible stages. ``timetable``: the order in which the schedule runs the
    forwards and backwards of microbatches. ``phases``: seconds of the phases of each virtual stage, of which the mean
    is taken. ``own``: for each rank, the indices of its virtual stages.
    """
    how = {"train": tables.problem.train, "overlap_steps": tables.problem.overlap_steps}
    names = list(Phases.__dataclass_fields__)
    mean = {name: sum(getattr(of_stage, name) for of_stage in phases) / len(phases) for name in names}
    even, slow = Phases(**mean), Phases(**{name: seconds * _SLOWER for name, seconds in mean.items()})
    paths = []
    for stages in own:
        uneven = [slow if k in stages else even for k in range(len(phases))]
        paths.append(longest_path(timetable, uneven, **how)[1])
    average: Table = np.mean(paths, axis=0)
    return average


def _maximise(bound: Callable[[float], float], prices: Sequence[float]) -> float:
    """Return the largest value of ``bound`` that was found. ``bound``: a concave function of a price, for prices of at
    least 0. ``prices``: the prices to try first, in ascending order; after that, prices next to the best one are tried.
    """
    known = {0.0: bound(0.0)}
    for price in prices:
        known[price] = bound(price)
        if known[price] < max(known.values()):
            break
    for _ in range(_REFINED):
        tried = sorted(known)
        at = tried.index(max(known, key=known.__getitem__))
        gaps = [
            (tried[k + 1] - tried[k], (tried[k + 1] + tried[k]) / 2) for k in (at - 1, at) if 0 <= k < len(tried) - 1
        ]
        known[max(gaps)[1]] = bound(max(gaps)[1])
    return max(known.values())


class _PricedCuts:
    """The relaxed problem of cutting block calls (such as layers) into virtual stages: memory has no limit but a price.
    The cost of a cut is its seconds on ``paths`` plus the price of its memory.

    ``tables``: seconds and bytes of all possible stages. ``paths``: weight of each phase (forward, backward for inputs,
    and so on) of each virtual stage, shape ``[stages, phases]``. ``ranks``: the activations of each rank at one time in
    the step. ``most_s``: seconds that a stage may take for a microbatch.
    """

    def __init__(self, tables: StageTables, paths: Table, ranks: Sequence[RankMemory], most_s: float) -> None:
        problem = tables.problem
        size = len(problem.calls) + 1
        stop, length = np.arange(size)[:, None], np.arange(1, size - problem.num_stages + 1)[None, :]
        start = np.maximum(stop - length, 0)
        each = [way for way in (tables, tables.slim) if way is not None]
        seconds = [
            PhaseCosts(way, recomputed=False).stack_seconds([(start, stop)] * problem.num_stages) for way in each
        ]
        fastest = np.min([of_way[:, :3].sum(axis=1) for of_way in seconds], axis=0)
        fit = (fastest <= most_s * (1 + TINY)) & (stop >= length)
        width = 1 + int(np.flatnonzero(fit.any(axis=(0, 1))).max(initial=0))  # 1 if nothing is quick enough
        start, fit = start[:, :width], fit[..., :width]
        self._ways = [
            _Recomputation(way, np.where(fit[:, None], of_way[..., :width], np.inf), paths, ranks, start, stop)
            for way, of_way in zip(each, seconds, strict=True)
        ]
        self._prices = np.zeros((3, problem.num_stages))  # of a byte: once, per microbatch not begun, and half done
        for rank in ranks:
            per_byte = 1 / (rank.capacity - problem.overhead.working_bytes) / len(ranks)
            self._prices[0, list(rank.stages)] = per_byte
            self._prices[1:, list(rank.stages)] = np.array(rank.counts).T * per_byte

    def bound(self, price: float) -> float:
        """Return a lower bound in seconds on the pipeline. ``price``: seconds for the memory of all ranks together; it
        is divided evenly over the ranks.
        """
        costs = np.min([way.price_calls(self._prices * price) for way in self._ways], axis=0)
        return find_least_cuts(costs)[0] - price


class _Recomputation:
    """The cost of all sequences of block calls (such as layers) if either no call or every call recomputes selectively
    (cheap operators only). In addition, each call may be recomputed in full.

    ``tables``: seconds and bytes of all possible stages in this case. ``seconds``: of a microbatch without full
    recomputation, shape ``[stages, phases, calls + 1, width]``, indexed by the call after the last and the number of
    calls minus one; infinite if a stage may not consist of the calls. ``start``, ``stop``: the first call and the call
    after the last of the same sequences. ``paths``: weight of each phase (forward, backward for inputs, and so on) of
    each stage, shape ``[stages, phases]``. ``ranks``: the activations of each rank at one time in the step.
    """

    def __init__(
        self,
        tables: StageTables,
        seconds: Table,
        paths: Table,
        ranks: Sequence[RankMemory],
        start: NDArray[np.int64],
        stop: NDArray[np.int64],
    ) -> None:
        problem, cut = tables.problem, tables.segments
        may = np.isfinite(np.sum(seconds, axis=1))
        on_paths = np.einsum("kc,kcjw->kjw", paths[:, : seconds.shape[1]], np.where(may[:, None], seconds, 0.0))
        self._seconds = np.where(may, on_paths, np.inf)
        chunks = max(len(rank.stages) for rank in ranks)
        # what several stages of a rank share, and temporary memory, counts once: at least the mean over its stages
        readers = Counter(name for call in problem.calls for name in set(call.states))
        sizes = {
            name: (size - problem.late_bytes.get(name, 0.0)) / (chunks if readers[name] > 1 else 1)
            for name, size in problem.state_bytes.items()
        }
        fixed = cut.states_of(sizes) + cut.boundary + cut.largest_working / chunks
        kept = fixed, cut.saved + cut.saved_inputs, cut.carried + cut.saved_inputs
        self._bytes = np.stack([of_kind[start, stop] for of_kind in kept])
        again = [[cost.recompute_s for cost in problem.pace(k).costs] for k in range(problem.num_stages)]
        self._again_s = np.array(again) * paths[:, _INPUTS, None]
        self._freed = np.array([call.cost.saved_bytes for call in problem.calls])
        self._start, self._stop = start, stop

    def price_calls(self, prices: Table) -> Table:
        """Return the seconds of all sequences of block calls (such as layers), weighted by phase, plus the price of
        their memory, shape ``[stages, calls + 1, width]``. Each call is recomputed in full where that is cheaper.

        ``prices``: seconds per byte, shape ``[3, stages]``: of bytes that do not depend on the number of microbatches,
        of those of a microbatch whose backward has not begun, and of one between the two halves of its backward.
        """
        saved = np.minimum(0.0, self._again_s - prices[1][:, None] * self._freed)
        sums = np.concatenate([np.zeros((len(saved), 1)), np.cumsum(saved, axis=1)], axis=1)
        held = np.einsum("bk,bjw->kjw", prices, self._bytes)
        priced: Table = self._seconds + held + sums[:, self._stop] - sums[:, self._start]
        return priced


__all__ = ["RankMemory", "bound_fitting_cuts"]
