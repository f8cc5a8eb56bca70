"""Upper bounds on the activation memory that the ranks of a schedule have together, over all cuts of the calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.call.call_cost import CallCost
from partitioner.errors import CapacityError
from partitioner.passes.ir.model import Call
from partitioner.schedules.csv_table import ScheduleTable
from partitioner.schedules.formulas import held_microbatches
from partitioner.units import bytes_text

_ROUNDS = 64  # rounds of :func:`_least_mean`

_STEP = 0.3
_TINY_S = 1e-15
_HALVINGS = 20


class ActivationBytes:
    """Bytes of one microbatch in calls with lower bounds on their seconds."""

    def __init__(self, sizes: Sequence[float], seconds: Sequence[float]) -> None:
        self.total = sum(sizes)
        pairs = np.array([sizes, seconds], dtype=np.float64)
        order = np.argsort(-pairs[0] / np.maximum(pairs[1], _TINY_S), kind="stable")
        self._sizes, self._seconds = np.cumsum(pairs[:, order], axis=1)

    def within(self, seconds: float) -> float:
        """Greatest bytes of calls, or of fractions of calls, that take ``seconds`` together."""
        return float(np.interp(seconds, [0.0, *self._seconds], [0.0, *self._sizes]))


@dataclass(frozen=True)
class MicrobatchMemory:
    """Lower bounds for one microbatch through all calls. ``whole``: bytes without recomputation. ``inputs``: bytes with
    full recomputation. ``again``: (seconds for each recomputed byte, bytes) of each call, cheapest first."""

    whole: ActivationBytes
    inputs: ActivationBytes
    again: tuple[tuple[float, float], ...]

    def seconds_again(self, ranks: RankCapacity, recompute: str | None, limit_s: float) -> float:
        """Least seconds of recomputation that make the rest fit on ``ranks``, each of which computes for at most
        ``limit_s``.

        Infinite if nothing fits within ``limit_s``. Raises :class:`CapacityError` if nothing fits without a limit.
        """
        needed = self.inputs if recompute in (None, "full") else self.whole
        room = ranks.room(needed, math.inf)
        if (missing := math.ceil(needed.total - room)) > 0:
            raise CapacityError(
                f"the schedule leaves {bytes_text(max(0.0, room))} on all ranks for each microbatch on its way, which "
                f"takes {bytes_text(needed.total)}: {bytes_text(missing)} too much",
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
    """Ranks of ``capacity`` bytes that hold ``states`` bytes together. ``shares``: by rank, bytes of one microbatch for
    each byte of memory that states leave free."""

    shares: NDArray[np.float64]
    capacity: float
    states: float

    def room(self, needed: ActivationBytes, limit_s: float) -> float:
        """Bytes of one microbatch that fit, in calls that take at most ``limit_s`` on each rank. States are placed
        first where the time limit leaves memory free, then where memory is worth least."""
        most = needed.within(limit_s)
        over = float(np.maximum(0.0, self.capacity - most / self.shares).sum())
        rest = max(0.0, self.states - over) * float(self.shares.min())
        return float(np.minimum(self.capacity * self.shares, most).sum()) - rest


def needs_of(calls: Sequence[tuple[Call, CallCost]], split: bool = False) -> MicrobatchMemory:
    """Lower bounds on the memory of one microbatch through ``calls``, each with its least cost. A value that several
    calls read is kept once. ``split``: the schedule's backwards may run in two halves, between which less may be
    held."""
    seen: set[str] = set()
    kept_before: set[str] = set()
    whole, inputs, again = [], [], []
    for call, cost in calls:
        sizes = list(zip(call.inputs, cost.input_bytes, cost.saved_inputs, strict=True))
        inputs.append(sum({n: size for n, size, _ in sizes if n not in seen}.values()))
        kept = {n: size for n, size, is_kept in sizes if is_kept and n not in kept_before}
        saved = cost.saved_bytes - cost.selective_bytes  # the rest may be recomputed alone at almost no cost
        saved = min(saved, cost.carried_bytes) if split else saved
        whole.append(saved + sum(kept.values()))
        again += [(min(cost.forward_s, cost.recompute_s) / cost.saved_bytes, saved)] if saved > 0 else []
        seen.update(call.inputs)
        kept_before.update(kept)
    seconds = [cost.forward_s + cost.backward_s for _, cost in calls]
    return MicrobatchMemory(ActivationBytes(whole, seconds), ActivationBytes(inputs, seconds), tuple(sorted(again)))


@lru_cache(maxsize=1024)
def most_held(schedule: str | ScheduleTable, p: int, m: int, v: int | None) -> NDArray[np.float64]:
    """By rank, the most bytes that one microbatch can take on it, for each byte of its memory.

    A rank whose virtual stages take ``x_k`` bytes of one microbatch holds ``sum c_k x_k`` at each of the counts ``c``
    of microbatches that it has at one time. Since all of these fit, so does every mean of them, and with it ``sum x_k
    min_k (mean c)_k``.
    """
    together = held_microbatches(schedule, p, m, v).together
    return np.array([1 / _least_mean([tuple(map(sum, counts)) for counts in of_rank]) for of_rank in together])


def least_of(bound: Callable[[float], float], low: float, high: float) -> float:
    """Lower bound on a value between ``low`` and ``high``, or ``high``. ``bound(t)`` is non-increasing and bounds every
    value up to ``t``."""
    if math.isinf(high) or bound(low) <= low:
        return bound(high)
    if bound(high) >= high:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if bound(middle) > middle else (low, middle)
    return low


def _least_mean(counts: Sequence[Sequence[int]]) -> float:
    """Lower bound on the greatest minimum of a mean of ``counts``: the value of a game, by multiplicative weights."""
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
