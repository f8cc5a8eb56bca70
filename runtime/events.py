"""What the other ranks see of a rank: the communication that its instructions enter, in order.

Two ranks fit together if their events do. An event's ``what`` is all that has to agree between those who take part.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Collective:
    """An operation of the group over ``axes``, or over the pipeline stages ``stages``.

    ``waits``: whether the rank stands still until all members have entered it. ``count``: so many in a row, entered one
    after the other, of which ``text`` is the first.
    """

    axes: tuple[str, ...]
    what: Hashable
    text: str  # for people: all_reduce float32[4, 8] over tp
    node: str = ""
    stages: tuple[int, ...] = ()
    waits: bool = True
    count: int = 1


@dataclass(frozen=True)
class Send:
    direction: Literal["F", "B"]
    peer: int
    what: Hashable
    text: str


@dataclass(frozen=True)
class Receive:
    direction: Literal["F", "B"]
    peer: int
    what: Hashable
    text: str


@dataclass(frozen=True)
class Finish:
    """Wait until everything that was started has ended; or, if given, what has this ``what``."""

    what: Hashable = None


Event = Collective | Send | Receive | Finish
Trace = tuple[tuple[int, Event], ...]  # (index of the instruction, event)
