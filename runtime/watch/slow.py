"""A rank that is slower than the others: named from its own work, without what it waits.

In a step all ranks take the same time, and the slow one is the one that does not wait. Ranks of one stage that have as
many microbatches do the same work and are compared with each other; a rank that is alone with what it took before, in
proportion to what has become of the others. Medians throughout: a step that was disturbed changes nothing. On a machine
that others use, work takes now this, now that long on every rank, and some medians are far apart by chance: so nearly
every step of the slow rank has to take longer than nearly every other one, which chance does to one in ten thousand
windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from runtime.recorder import About, Spot
from runtime.watch.board import Board, instruction_words

_WINDOW = 10  # steps that are looked at together
_BEFORE = 4  # steps that say what a rank took before, at the least
_KEPT = 64
_SPREADS = 4.0  # median deviations by which it must be more, too
_SURE = 0.96  # of the pairs of one of its steps and another one, in how many its own takes longer


@dataclass(frozen=True)
class SlowRank:
    """``seconds``: of work in a step; ``expected``: from its peers, or from its own past; ``index``: the instruction
    with the largest excess."""

    rank: int
    seconds: float
    expected: float
    index: int
    spot: Spot | None
    against: str

    def __str__(self) -> str:
        where = [instruction_words(self.index, self.spot)]
        if self.spot is not None:
            where += [text for text in (self.spot.calls, self.spot.source) if text]
        return (
            f"rank {self.rank} is slow: {self.seconds * 1e3:.1f} ms of work in a step, {self.against} "
            f"{self.expected * 1e3:.1f} ms; most of the difference at {', '.join(where)}"
        )


class SlowRanks:
    """Looks at the last step of every rank now and then. ``factor``: by how much work must be slower to be told."""

    def __init__(self, board: Board, factor: float = 1.5) -> None:
        self.board = board
        self.factor = factor
        self.samples: dict[int, deque[dict[int, float]]] = {}
        self._last: dict[int, int] = {}
        self._told: set[int] = set()

    def look(self) -> list[SlowRank]:
        """Ranks that have become slow since the last look; each is told once until it is as fast as others again."""
        self.board.states()
        recordings = self.board.recordings()
        for rank, recording in recordings.items():
            step = recording.last_step()
            if step is not None and step.step > self._last.get(rank, 0):  # not the first, which warms up
                self._last[rank] = step.step
                self.samples.setdefault(rank, deque(maxlen=_KEPT)).append(step.busy())
        about = {rank: r.about for rank, r in recordings.items()}
        new = [s for s in slow_ranks(self.samples, about, self.factor) if s.rank not in self._told]
        if self._told:
            self._told &= {s.rank for s in slow_ranks(self.samples, about, self.factor, spreads=0.0)}
        self._told |= {s.rank for s in new}
        return new


def slow_ranks(
    samples: Mapping[int, Sequence[Mapping[int, float]]],
    about: Mapping[int, About],
    factor: float,
    spreads: float = _SPREADS,
) -> list[SlowRank]:
    """The ranks that are slow now, the worst first; ``samples`` are seconds of work by instruction, for each step."""
    if any(len(samples.get(rank, ())) < _WINDOW for rank in about):
        return []
    now = {rank: _typical(list(samples[rank])[-_WINDOW:]) for rank in about}
    found = []
    for rank, work in now.items():
        own = about[rank]
        peers = [r for r in now if r != rank and (about[r].stage, about[r].places) == (own.stage, own.places)]
        reference = _typical([now[r] for r in peers]) if peers else _own_past(rank, samples, now)
        if reference is None:
            continue
        expected, seconds = sum(reference.values()), sum(work.values())
        if seconds <= factor * expected or seconds - expected <= spreads * _spread([rank, *peers], samples):
            continue
        if not spreads or _sure(rank, peers, samples, expected):
            index = max(work, key=lambda i: work[i] - reference.get(i, 0.0))
            spots = about[rank].spots
            spot = spots[index] if index < len(spots) else None
            against = "its peers take" if peers else "where it took, by what the others take now,"
            found.append(SlowRank(rank, seconds, expected, index, spot, against))
    return sorted(found, key=lambda s: s.expected / s.seconds)


def _own_past(
    rank: int, samples: Mapping[int, Sequence[Mapping[int, float]]], now: Mapping[int, Mapping[int, float]]
) -> dict[int, float] | None:
    """What ``rank`` took before, times what the others take now for what they took before."""
    before = {r: list(samples[r])[:-_WINDOW] for r in now}
    if any(len(steps) < _BEFORE for steps in before.values()):
        return None
    past = {r: _typical(steps) for r, steps in before.items()}
    others = [sum(now[r].values()) / total for r in now if r != rank and (total := sum(past[r].values()))]
    general = median(others) if others else 1.0
    return {index: seconds * general for index, seconds in past[rank].items()}


def _sure(rank: int, peers: Sequence[int], samples: Mapping[int, Sequence[Mapping[int, float]]], past: float) -> bool:
    """Whether nearly all steps of ``rank`` now take longer than nearly all of most peers'; or, alone, than its own
    before, whose median is made ``past``."""
    totals = {r: [sum(step.values()) for step in samples[r]] for r in (rank, *peers)}
    now = totals[rank][-_WINDOW:]
    if peers:
        return median(_longer(now, totals[peer][-_WINDOW:]) for peer in peers) >= _SURE
    took = sum(_typical(list(samples[rank])[:-_WINDOW]).values())
    scale = past / took if took else 1.0
    before = totals[rank][: -2 * _WINDOW]  # it may have been slow for a while
    before = before if len(before) >= _BEFORE else totals[rank][:-_WINDOW]
    return _longer(now, [scale * seconds for seconds in before]) >= _SURE


def _longer(some: Sequence[float], others: Sequence[float]) -> float:
    """Of all pairs of one of each, in how many the first is larger (Mann and Whitney's statistic)."""
    return sum((a > b) + (a == b) / 2 for a in some for b in others) / (len(some) * len(others))


def _spread(ranks: Sequence[int], samples: Mapping[int, Sequence[Mapping[int, float]]]) -> float:
    """By how much a step's work differs from the rank's median now: the median of that, of the most restless rank."""
    spreads = []
    for rank in ranks:
        totals = [sum(step.values()) for step in list(samples[rank])[-_WINDOW:]]
        middle = median(totals)
        spreads.append(median(abs(t - middle) for t in totals))
    return max(spreads)


def _typical(steps: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The median of each instruction."""
    return {index: median(step.get(index, 0.0) for step in steps) for index in steps[0]}
