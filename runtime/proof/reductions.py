"""What of a rank's reductions is under way, and what has therefore to end before something else begins."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator

from runtime.levels import GATHERING, Turn
from runtime.program import Bucket
from runtime.zero import ScatterQueue


class Reductions:
    """Each method gives what the rank waits for first, and then has started another one."""

    def __init__(self) -> None:
        self._scatters: Counter[int] = Counter()
        self._scattering = ScatterQueue[tuple[int, Hashable]]()  # (bucket, what)
        self._turning: dict[int, Hashable] = {}  # bucket -> the turn of its reduction that was not waited for
        self._gathering: deque[int] = deque()  # buckets on their last turn, where that gathers

    def scatter(self, number: int, bucket: Bucket) -> tuple[list[Hashable], Hashable]:
        """A SCATTER over the axes that shard a bucket: what to wait for, and what has to agree."""
        waits = [what for _, what in self._scattering.before_next()]
        self._scatters[number] += 1
        what = "SCATTER", bucket.states, bucket.compression, self._scatters[number]
        self._scattering.begin((number, what))
        return waits, what

    def computed(self) -> None:
        """Record that a backward has run: the next SCATTER belongs to its gradients."""
        self._scattering.computed()

    def turn(self, number: int, bucket: Bucket, turn: Turn) -> tuple[list[Hashable], Hashable]:
        """One of :func:`runtime.levels.turns`; likewise."""
        waits = [*self.ended(number)]
        if turn[0] == "GATHER" and turn[1] == bucket.levels[0]:
            while len(self._gathering) >= GATHERING:
                waits += self._turned(self._gathering.popleft())
            self._gathering.append(number)
        what = turn[0], bucket.states, bucket.compression, turn[1]
        self._turning[number] = what
        return waits, what

    def ended(self, number: int) -> Iterator[Hashable]:
        """End the collectives in flight for a bucket, and the SCATTERs started before its own; yields each of them."""
        while any(bucket == number for bucket, _ in self._scattering):
            yield self._scattering.end_first()[1]
        yield from self._turned(number)

    def _turned(self, number: int) -> Iterator[Hashable]:
        if number in self._turning:
            yield self._turning.pop(number)
