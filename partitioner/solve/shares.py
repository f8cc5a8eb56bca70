"""How many microbatches each data-parallel replica takes, where some are faster than others."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def share_out(parts: int, seconds: Sequence[float], fill: float = 0.0) -> tuple[int, ...]:
    """``parts`` microbatches over replicas that take ``seconds`` for each of theirs: at least one to each, so that the
    last one ends as early as can be. A replica of ``n`` microbatches takes ``n + fill`` times its seconds.

    Optimal: the next microbatch goes where it ends first, and ends only move on (Fox 1966).

    >>> share_out(8, [1.0, 3.0])
    (6, 2)
    >>> share_out(8, [1.0, 1.0, 1.0])
    (3, 3, 2)
    """
    assert len(seconds) <= parts, "a replica without a microbatch"
    each, more = divmod(parts, len(seconds))
    if len(set(seconds)) == 1:
        return (each + 1,) * more + (each,) * (len(seconds) - more)
    shares = [1] * len(seconds)
    ends = [((2 + fill) * s, place) for place, s in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(parts - len(seconds)):
        _, place = ends[0]
        shares[place] += 1
        heapq.heapreplace(ends, ((shares[place] + 1 + fill) * seconds[place], place))
    return tuple(shares)
