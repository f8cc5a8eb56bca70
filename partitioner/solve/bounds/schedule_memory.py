"""Compute how many bytes of activations all ranks of a schedule can hold together, and how much recomputation a
candidate therefore needs at least. The bounds hold for every cut into stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.call.call_cost import CallCost
from partitioner.errors import CapacityError
from partitioner.passes.ir.model import Call
from partitioner.schedules.csv_table import ScheduleTable, table_of
from partitioner.schedules.formulas import held_microbatches, shorten_to_steady_state
from partitioner.schedules.registry import ranks_of
from partitioner.units import bytes_text

_ROUNDS = 64  # rounds of :func:`_least_mean`

_STEP = 0.3
_TINY_S = 1e-15
_TINY = 1e-9
_HALVINGS = 20
_FEW_RANKS = 8  # most ranks of the pipeline whose microbatches in flight are counted for an estimate


class ActivationBytes:
    """The activation bytes of one microbatch in each block call (such as a decoder layer), with lower bounds on the
    seconds of the calls. :meth:`within` computes from both how many activation bytes a rank can have if its time is
    limited. ``sizes``, ``seconds``: bytes and seconds of each call, for one microbatch.
    """

    def __init__(self, sizes: Sequence[float], seconds: Sequence[float]) -> None:
        self.total = sum(sizes)
        pairs = np.array([sizes, seconds], dtype=np.float64)
        order = np.argsort(-pairs[0] / np.maximum(pairs[1], _TINY_S), kind="stable")
        self._sizes, self._seconds = np.cumsum(pairs[:, order], axis=1)

    def within(self, seconds: float) -> float:
        """Return the most activation bytes that a set of block calls (such as layers) can have for one microbatch, if
        the calls together take at most ``seconds`` seconds. Any calls, and fractions of calls, may be in the set (a
        fractional knapsack problem), so the result is an upper bound for the calls of one rank.
        """
        return float(np.interp(seconds, [0.0, *self._seconds], [0.0, *self._sizes]))


@dataclass(frozen=True)
class MicrobatchMemory:
    """Lower bounds on the activation bytes of one microbatch through all block calls (such as layers).

    ``whole``: bytes of each call without recomputation. ``inputs``: bytes of each call with full recomputation, which
    saves only inputs of calls. ``again``: for each call a pair (seconds of recomputation per freed byte, number of
    bytes that recomputation frees), in ascending order of the first number."""

    whole: ActivationBytes
    inputs: ActivationBytes
    again: tuple[tuple[float, float], ...]

    def seconds_again(self, ranks: RankCapacity, recompute: str | None, limit_s: float) -> float:
        """Return a lower bound in seconds on the recomputation of one microbatch without which its activations do not
        fit on ``ranks``, the memory of the ranks of a pipeline. ``limit_s``: each rank computes for at most this many
        seconds per microbatch. ``recompute``: the kind of recomputation that a constraint fixes (such as ``"full"``),
        or ``None``.

        The result is infinite if no recomputation makes the activations fit within ``limit_s``. Raises
        :class:`CapacityError` if none does even without a time limit."""
        needed = self.inputs if recompute in (None, "full") else self.whole
        room = ranks.room(needed, math.inf)
        if (missing := math.ceil(needed.total - room)) > 0:
            raise CapacityError(
                f"under the schedule, all ranks together have {bytes_text(max(0.0, room))} of free memory for "
                f"each microbatch in flight, but its activations need {bytes_text(needed.total)}: "
                f"{bytes_text(missing)} too much",
                missing_bytes=missing,
                at_least=True,
            )
        if needed.total > ranks.room(needed, limit_s):
            return math.inf
        left, seconds = self.whole.total - ranks.room(self.whole, limit_s), 0.0
        for rate, size in self.again:
            seconds += rate * min(max(0.0, left), size)
            left -= size
        return seconds


@dataclass(frozen=True)
class RankCapacity:
    """The memory of the ranks of a pipeline.

    ``capacity``: usable bytes of each rank. ``states``: bytes of parameters, gradients and optimizer states on all
    ranks together. ``shares``: for each rank, an upper bound on the activation bytes of one microbatch per byte of
    memory for activations; below 1 if the rank has several microbatches in flight."""

    shares: NDArray[np.float64]
    capacity: float
    states: float

    def room(self, needed: ActivationBytes, limit_s: float) -> float:
        """Return an upper bound on the bytes of one microbatch's activations that fit on all ranks of a pipeline
        together, if the calls of each rank take at most ``limit_s`` seconds per microbatch. ``needed``: bytes and
        seconds of all block calls (such as layers).

        With a time limit, a rank may be unable to fill its memory with activations. For an upper bound, such unused
        memory is first filled with parameters and optimizer states. The rest of them is put on the ranks where a byte
        of memory holds the least activations."""
        most = needed.within(limit_s)
        over = float(np.maximum(0.0, self.capacity - most / self.shares).sum())
        rest = max(0.0, self.states - over) * float(self.shares.min())
        return float(np.minimum(self.capacity * self.shares, most).sum()) - rest


def needs_of(calls: Sequence[tuple[Call, CallCost]], split: bool = False) -> MicrobatchMemory:
    """Return lower bounds on the activation bytes of one microbatch through ``calls``, pairs of a block call (such as a
    decoder layer) and a lower bound on its cost. A value that several calls read is counted once. ``split``: whether
    the schedule splits the backward into two halves (gradients of inputs, gradients of weights); if so, the bounds
    allow for fewer bytes between the two halves."""
    seen: set[str] = set()
    kept_before: set[str] = set()
    whole, inputs, again = [], [], []
    for call, cost in calls:
        sizes = list(zip(call.inputs, cost.input_bytes, cost.saved_inputs, strict=True))
        inputs.append(sum({n: size for n, size, _ in sizes if n not in seen}.values()))
        kept = {n: size for n, size, is_kept in sizes if is_kept and n not in kept_before}
        saved = cost.saved_bytes - cost.selective_bytes  # these bytes may be recomputed selectively at almost no cost
        saved = min(saved, cost.carried_bytes) if split else saved
        whole.append(saved + sum(kept.values()))
        again += [(min(cost.forward_s, cost.recompute_s) / cost.saved_bytes, saved)] if saved > 0 else []
        seen.update(call.inputs)
        kept_before.update(kept)
    seconds = [cost.forward_s + cost.backward_s for _, cost in calls]
    return MicrobatchMemory(ActivationBytes(whole, seconds), ActivationBytes(inputs, seconds), tuple(sorted(again)))


def _sum_kept_inputs(cost: CallCost) -> float:
    """Return the bytes of the inputs of a block call (such as a layer) that are kept until its backward. ``cost``: the
    cost of the call."""
    return sum(size for size, is_kept in zip(cost.input_bytes, cost.saved_inputs, strict=True) if is_kept)


@dataclass(frozen=True)
class RecomputeCosts:
    """Sums over the block calls (such as layers) of a model, for one microbatch, from which the recomputation that
    memory requires is estimated.

    ``num_calls``: number of calls. ``input_bytes``: bytes of inputs that are kept until the backward. ``saved_bytes``,
    ``carried_bytes``: bytes of other activations that are held until the backward, and between its two halves.
    ``selective_bytes``: bytes that selective recomputation frees, which takes ``selective_s`` seconds. ``whole_s``:
    seconds of full recomputation. ``working_bytes``: working memory of the call that needs most; not a sum.
    """

    num_calls: int
    input_bytes: float
    saved_bytes: float
    carried_bytes: float
    selective_bytes: float
    selective_s: float
    whole_s: float
    working_bytes: float

    @classmethod
    def of(cls, calls: Iterable[tuple[CallCost, int]]) -> RecomputeCosts:
        """Return the costs of recomputation, summed over all block calls (such as layers) of the model. ``calls``:
        pairs (cost of a call, how often the model has such a call).
        """
        every = list(calls)

        def total(of_call: Callable[[CallCost], float]) -> float:
            return sum(times * of_call(cost) for cost, times in every)

        return cls(
            num_calls=sum(times for _, times in every),
            input_bytes=total(_sum_kept_inputs),
            saved_bytes=total(attrgetter("saved_bytes")),
            carried_bytes=total(attrgetter("carried_bytes")),
            selective_bytes=total(attrgetter("selective_bytes")),
            selective_s=total(attrgetter("selective_s")),
            whole_s=total(attrgetter("recompute_s")),
            working_bytes=max(cost.working_bytes for cost, _ in every),
        )

    def estimate_seconds(self, free: float, schedule: str | ScheduleTable, p: int, m: int, v: int | None) -> float:
        """Estimate the seconds that the busiest rank of a pipeline needs to recompute activations, per microbatch;
        infinite if even full recomputation frees too few bytes. It is assumed that each virtual stage has an equal
        share of the work and bytes of the model. A rank recomputes some of its block calls (such as layers) selectively
        or in full, or all selectively and some in full.

        ``free``: bytes of a rank for activations. ``schedule``: name or table. ``p``: number of pipeline ranks. ``m``:
        number of microbatches. ``v``: number of virtual stages of a rank; ``None``: the number that the schedule fixes.
        """
        whole, half = _count_in_flight_moments(schedule, p, m, v)
        saved, inputs, stages = self.saved_bytes, self.input_bytes, len(ranks_of(schedule, p, v))
        over = whole * (saved + inputs) + half * (self.carried_bytes + inputs) - free * stages
        # Recomputation frees bytes of microbatches whose backward has not begun. Each has to free, for the whole model:
        excess = float((over / np.maximum(whole, _TINY)).max())
        if excess <= 0:
            return 0.0
        if excess > saved:
            return math.inf
        of_rank, call_s = self.num_calls / p, self.whole_s / self.num_calls
        seconds, selective = [math.ceil(of_rank * excess / saved) * call_s], self.selective_bytes
        if selective > 0:
            seconds.append(math.ceil(of_rank * min(1.0, excess / selective)) * self.selective_s / self.num_calls)
        if 0 < selective < excess:
            seconds[-1] += math.ceil(of_rank * (excess - selective) / (saved - selective)) * call_s
        return min(seconds)


@lru_cache(maxsize=1024)
def _count_in_flight_moments(
    schedule: str | ScheduleTable, p: int, m: int, v: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return two arrays with an entry for each time in the schedule at which the memory of a rank may peak. The first
    has the number of microbatches in flight whose backward has not begun, the second the number between the two halves
    of a split backward; both count all virtual stages of the rank. For many ranks, the numbers of a shorter pipeline
    are scaled, since they grow with the number of ranks.

    ``schedule``: name or table. ``p``: number of pipeline ranks. ``m``: number of microbatches. ``v``: number of
    virtual stages of a rank; ``None``: the number that the schedule fixes.
    """
    few = p if table_of(schedule) is not None else min(p, _FEW_RANKS)
    together = held_microbatches(schedule, few, max(1, round(m * few / p)), v).together
    sums = {tuple(map(sum, zip(*counts, strict=True))) for of_rank in together for counts in of_rank}
    moments = np.array(sorted(sums), dtype=np.float64) * (p / few)
    return moments[:, 0], moments[:, 1]


@lru_cache(maxsize=1024)
def most_held(schedule: str | ScheduleTable, p: int, m: int, v: int | None) -> NDArray[np.float64]:
    """Return, for each rank of a pipeline, an upper bound on the activation bytes of one microbatch per byte of memory
    for activations, shape ``[ranks]``. It is below 1 if the rank has several microbatches in flight. ``schedule``: name
    or table. ``p``: number of pipeline ranks. ``m``: number of microbatches. ``v``: number of virtual stages of a rank;
    ``None``: the number that the schedule fixes.

    If virtual stage ``k`` of a rank takes ``x_k`` bytes of one microbatch, the rank holds ``sum c_k x_k`` bytes at a
    time when it has ``c_k`` microbatches of stage ``k`` in flight. This fits at all times, so it also fits for every
    mean of the counts. Therefore ``sum x_k min_k (mean c)_k`` is at most the rank's memory.
    """
    if (fewer := shorten_to_steady_state(schedule, p, m)) < m:
        return most_held(schedule, p, fewer, v)
    together = held_microbatches(schedule, p, m, v).together
    return np.array([1 / _least_mean([tuple(map(sum, counts)) for counts in of_rank]) for of_rank in together])


def least_of(bound: Callable[[float], float], low: float, high: float) -> float:
    """Return a lower bound on an unknown number, such as the seconds of a step, found by bisection between ``low`` and
    ``high``. ``low``: a known lower bound on the number. ``high``: the greatest value that is returned. ``bound(t)``: a
    lower bound on the number that is valid if the number is at most ``t``; it must not increase with ``t``."""
    if math.isinf(high) or bound(low) <= low:
        return bound(high)
    if bound(high) >= high:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if bound(middle) > middle else (low, middle)
    return low


def _least_mean(counts: Sequence[Sequence[int]]) -> float:
    """Return a lower bound on the largest value ``v`` for which some weighted mean of the vectors ``counts`` has only
    components of at least ``v``. Each vector is for one time in a step: the number of microbatches in flight in each
    virtual stage of a rank. The memory of the rank divided by the result is an upper bound on the activation bytes of
    one microbatch. ``v`` is the value of a matrix game; it is approximated by multiplicative weights."""
    rows: NDArray[np.float64] = np.array(counts, dtype=np.float64)
    scaled, weights, best = rows / rows.max(), np.ones(len(rows)), 0.0
    total = np.zeros(len(rows))
    for _ in range(_ROUNDS if len(rows) > 1 else 1):
        total += weights / weights.sum()
        mean = total @ rows / total.sum()
        best = max(best, float(mean.min()))
        weights = weights * np.exp(_STEP * scaled[:, int((weights @ rows).argmin())])
        weights /= weights.max()
    return best
