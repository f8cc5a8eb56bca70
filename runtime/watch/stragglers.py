"""Detect slow ranks, and monitor whether a run makes progress and why it does not.

Ranks are compared by their computation times without waiting: the step takes equally long on all ranks, and the slow
rank is the one that does not wait. Ranks of one stage with the same number of microbatches do the same work and are
compared with each other. A rank without such peers is compared with its own past, scaled by the change of the other
ranks. All comparisons use medians, so a single disturbed step has no effect. On a machine that is shared with other
programs, times vary on every rank, and medians may be far apart by chance. Therefore nearly every step of the slow rank
must take longer than nearly every step of its peers, which happens by chance in one of ten thousand windows.

:class:`Monitor` may run outside of a run or in one of its ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from partitioner.runtime.errors import Failure
from partitioner.runtime.execute.flight_recorder import InstructionSpot, RecorderHeader
from partitioner.runtime.watch.root_cause import find_failure_cause
from partitioner.runtime.watch.status_board import RankState, StatusBoard, format_instruction_words

_WINDOW = 10  # number of recent steps that are compared

_MIN_PAST_STEPS = 4  # minimum number of steps before the window, which describe a rank's past
_KEPT = 64  # number of stored steps per rank
_SPREADS = 4.0  # the excess of a slow rank must also be more than this many median deviations
_SURE_FRACTION = 0.96  # fraction of pairs (step of the slow rank, step of a peer) in which the slow rank's takes longer


@dataclass(frozen=True)
class SlowRank:
    """A rank whose computation takes longer than expected. ``seconds``: its computation time per step. ``expected``:
    the seconds per step of ranks with the same work or, if there are none, of this rank in the past, scaled by the
    change of the other ranks. ``index``, ``spot``: index and description of the instruction that exceeds its expected
    time most. ``against``: text that says with which time it is compared, such as ``its peers take``.
    """

    rank: int
    seconds: float
    expected: float
    index: int
    spot: InstructionSpot | None
    against: str

    def __str__(self) -> str:
        where = [format_instruction_words(self.index, self.spot)]
        if self.spot is not None:
            where += [text for text in (self.spot.calls, self.spot.source) if text]
        return (
            f"rank {self.rank} is slow: {self.seconds * 1e3:.1f} ms of work in a step, {self.against} "
            f"{self.expected * 1e3:.1f} ms; most of the difference at {', '.join(where)}"
        )


class SlowRanks:
    """Finds ranks that have become slow, from the times of instructions that every rank records for its last step.
    ``board``: reads the folder in which ranks record them. ``factor``: a rank is slow if its computation in a step
    takes more than ``factor`` times the expected time: the time of ranks with the same work or, if there are none, the
    rank's own earlier time.
    """

    def __init__(self, board: StatusBoard, factor: float = 1.5) -> None:
        self.board = board
        self.factor = factor
        self.samples: dict[int, deque[dict[int, float]]] = {}
        self._last: dict[int, int] = {}
        self._told: set[int] = set()

    def look(self) -> list[SlowRank]:
        """Return the ranks that have become slow since the last call. A rank is returned again only after it has
        recovered.
        """
        self.board.states()
        recordings = self.board.recordings()
        for rank, recording in recordings.items():
            step = recording.last_step()
            if step is not None and step.step > self._last.get(rank, 0):  # skips the first step, a warm-up
                self._last[rank] = step.step
                self.samples.setdefault(rank, deque(maxlen=_KEPT)).append(step.busy())
        headers = {rank: r.about for rank, r in recordings.items()}
        new = [s for s in slow_ranks(self.samples, headers, self.factor) if s.rank not in self._told]
        if self._told:
            self._told &= {s.rank for s in slow_ranks(self.samples, headers, self.factor, spreads=0.0)}
        self._told |= {s.rank for s in new}
        return new


def slow_ranks(
    samples: Mapping[int, Sequence[Mapping[int, float]]],
    headers: Mapping[int, RecorderHeader],
    factor: float,
    spreads: float = _SPREADS,
) -> list[SlowRank]:
    """Return the ranks that are slow now, the one with the largest ratio of its time to its expected time first. The
    expected time of a rank is the time of other ranks with the same work or, if there are none, its own earlier time.

    Args:
        samples: rank -> for each recorded step, instruction index -> seconds of computation.
        headers: rank -> description of the rank and its instructions.
        factor: a rank is slow if its computation time exceeds ``factor`` times the expected time.
        spreads: a slow rank must exceed its expected time by more than this number of median deviations of the times of
            steps; 0: by any amount, and without the check that nearly all of its steps are longer.
    """
    if any(len(samples.get(rank, ())) < _WINDOW for rank in headers):
        return []
    current = {rank: _compute_typical_step(list(samples[rank])[-_WINDOW:]) for rank in headers}
    found = []
    for rank, work in current.items():
        own = headers[rank]
        peers = [r for r in current if r != rank and (headers[r].stage, headers[r].places) == (own.stage, own.places)]
        reference = _compute_typical_step([current[r] for r in peers]) if peers else _own_past(rank, samples, current)
        if reference is None:
            continue
        expected, seconds = sum(reference.values()), sum(work.values())
        if seconds <= factor * expected or seconds - expected <= spreads * _measure_spread([rank, *peers], samples):
            continue
        if not spreads or _is_surely_slower(rank, peers, samples, expected):
            index = max(work, key=lambda i: work[i] - reference.get(i, 0.0))
            spots = headers[rank].spots
            spot = spots[index] if index < len(spots) else None
            against = "its peers take" if peers else "where it took, by what the others take now,"
            found.append(SlowRank(rank, seconds, expected, index, spot, against))
    return sorted(found, key=lambda s: s.expected / s.seconds)


def _own_past(
    rank: int, samples: Mapping[int, Sequence[Mapping[int, float]]], current: Mapping[int, Mapping[int, float]]
) -> dict[int, float] | None:
    """Return the computation time that is expected of ``rank`` if no other rank has the same work, as a dict:
    instruction index -> seconds. It is the rank's own earlier time, scaled by the change of the other ranks: the median
    of their ratios of present to past time. Return ``None`` if some rank has too few earlier steps. ``samples``: rank
    -> for each step, instruction index -> seconds. ``current``: rank -> instruction index -> present seconds.
    """
    before = {r: list(samples[r])[:-_WINDOW] for r in current}
    if any(len(steps) < _MIN_PAST_STEPS for steps in before.values()):
        return None
    previous = {r: _compute_typical_step(steps) for r, steps in before.items()}
    second = [sum(current[r].values()) / total for r in current if r != rank and (total := sum(previous[r].values()))]
    general = median(second) if second else 1.0
    return {index: seconds * general for index, seconds in previous[rank].items()}


def _is_surely_slower(
    rank: int, peers: Sequence[int], samples: Mapping[int, Sequence[Mapping[int, float]]], previous: float
) -> bool:
    """Return whether nearly all recent steps of ``rank`` take longer than nearly all recent steps of most ``peers``.
    Without peers, compare with its own earlier steps, scaled so that their median is ``previous`` seconds. ``samples``:
    rank -> for each step, instruction index -> seconds.
    """
    totals = {r: [sum(step.values()) for step in samples[r]] for r in (rank, *peers)}
    current = totals[rank][-_WINDOW:]
    if peers:
        return median(_compute_longer_fraction(current, totals[peer][-_WINDOW:]) for peer in peers) >= _SURE_FRACTION
    took = sum(_compute_typical_step(list(samples[rank])[:-_WINDOW]).values())
    scale = previous / took if took else 1.0
    before = totals[rank][: -2 * _WINDOW]  # leave out steps in which it may have been slow already
    before = before if len(before) >= _MIN_PAST_STEPS else totals[rank][:-_WINDOW]
    return _compute_longer_fraction(current, [scale * seconds for seconds in before]) >= _SURE_FRACTION


def _compute_longer_fraction(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the fraction of pairs (one of ``first``, one of ``second``) whose first number is larger; ties count half.
    This is the Mann-Whitney U statistic divided by the number of pairs.
    """
    return sum((a > b) + (a == b) / 2 for a in first for b in second) / (len(first) * len(second))


def _measure_spread(ranks: Sequence[int], samples: Mapping[int, Sequence[Mapping[int, float]]]) -> float:
    """Return the median absolute deviation of the computation time of recent steps, in seconds; the largest over
    ``ranks``. ``samples``: rank -> for each step, instruction index -> seconds.
    """
    spreads = []
    for rank in ranks:
        totals = [sum(step.values()) for step in list(samples[rank])[-_WINDOW:]]
        middle = median(totals)
        spreads.append(median(abs(t - middle) for t in totals))
    return max(spreads)


def _compute_typical_step(steps: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return a dict: instruction index -> median of its seconds over ``steps``, each of which is a dict: instruction
    index -> seconds.
    """
    return {index: median(step.get(index, 0.0) for step in steps) for index in steps[0]}


_POLL_S = 0.05


class Monitor:
    """Reads the states that ranks write to ``folder``, and finds out why training does not continue. ``patience_s``: if
    no rank makes progress for this number of seconds, the ranks count as stalled. It must exceed the longest
    instruction and the longest pause between steps, checkpoints included.
    """

    def __init__(self, folder: str | Path, patience_s: float = 300.0) -> None:
        self.board = StatusBoard(Path(folder))
        self.patience_s = patience_s
        self.refresh: Callable[[], None] | None = None  # fetches the states of ranks on other hosts

    def states(self) -> list[RankState]:
        return self.board.states()

    def check(self, died: int | None = None) -> Failure | None:
        """Return the failure because of which training cannot continue, with rank, instruction and graph node; ``None``
        if it can continue, or has not started yet. ``died``: the rank whose process was seen to end first, if known.
        """
        if self.refresh is not None:
            self.refresh()
        told = self.board.told()
        if told is not None:
            return told
        states = self.states()
        return find_failure_cause(states, self.patience_s, time.time(), died, self.board.world_size)

    def wait_for_cause(self, seconds: float, died: int | None = None) -> Failure | None:
        """Wait up to ``seconds`` until :meth:`check` finds the cause of a failure that is known to have happened, and
        return it; ``None`` if no cause is found in this time. ``died``: the rank whose process was seen to end first,
        if known.
        """
        deadline = time.monotonic() + seconds
        while (found := self.check(died)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found
