"""The time of one rank that computes while its collectives run beside it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class OverlappedCollective:
    """A collective beside computation, in seconds: when it may begin, and what is left of it. ``begun`` and ``ended``
    are known when the rank's clock has got there."""

    ready: float
    left: float
    begun: float | None = None
    ended: float | None = None


@dataclass
class RankClock:
    """Seconds since a rank's start. Its collectives run one after another, in the order in which they are posted: they
    share the links. While one of them and a computation run, each takes ``slowdown`` times as long."""

    slowdown: float = 1.0
    clock: float = 0.0
    under_way: deque[OverlappedCollective] = field(default_factory=deque)  # that have not ended, in order

    def begin(self, collective: OverlappedCollective) -> None:
        """Post ``collective`` behind those that are under way; it begins no earlier than now."""
        collective.ready = max(collective.ready, self.clock)
        self.under_way.append(collective)

    def compute(self, work: float) -> None:
        """Let so many seconds of work pass, which take longer beside a collective."""
        while work > 0 and self.under_way:
            first = self.under_way[0]
            if first.ready > self.clock:
                alone = min(work, first.ready - self.clock)
                self.clock, work = self.clock + alone, work - alone
                continue
            first.begun = self.clock if first.begun is None else first.begun
            both = min(work, first.left)
            self.clock, work, first.left = self.clock + both * self.slowdown, work - both, first.left - both
            if first.left <= 0:
                self._end()
        self.clock += work

    def wait(self, until: float) -> None:
        """Let time pass without work."""
        while self.under_way and self.clock < until:
            first = self.under_way[0]
            begin = max(self.clock, first.ready)
            if begin >= until:
                break
            first.begun = begin if first.begun is None else first.begun
            if begin + first.left > until:
                first.left -= until - begin
                break
            self.clock = begin + first.left
            self._end()
        self.clock = max(self.clock, until)

    def wait_for(self, collective: OverlappedCollective) -> None:
        """Let time pass without work until ``collective`` has ended."""
        while collective.ended is None:
            first = self.under_way[0]
            self.wait(max(self.clock, first.ready) + first.left)
            if first.ended is None:  # nothing was left of it, but for rounding
                self._end()

    def wait_for_all(self) -> None:
        if self.under_way:
            self.wait_for(self.under_way[-1])

    def _end(self) -> None:
        first = self.under_way.popleft()
        first.ended, first.left = self.clock, 0.0
        if first.begun is None:
            first.begun = self.clock
        self.ended(first)

    def ended(self, collective: OverlappedCollective) -> None:
        """Called with each collective that has ended."""
