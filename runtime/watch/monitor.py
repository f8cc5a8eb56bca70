"""Looks at a run from outside, or from one of its ranks: is it still going, and if not, why."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from runtime.errors import Failure
from runtime.watch.board import Board, RankState
from runtime.watch.diagnose import cause_of

_LOOK_S = 0.05


class Monitor:
    """Watches the ranks that write to ``folder``.

    ``patience_s``: for so long may nothing move, in any rank, before the run counts as stalled: longer than the longest
    instruction, and than what comes between steps, checkpoints included.
    """

    def __init__(self, folder: str | Path, patience_s: float = 300.0) -> None:
        self.board = Board(Path(folder))
        self.patience_s = patience_s
        self.refresh: Callable[[], None] | None = None  # brings what ranks on other hosts say

    def states(self) -> list[RankState]:
        return self.board.states()

    def check(self, died: int | None = None) -> Failure | None:
        """Why the run cannot go on: rank, instruction, graph node. ``None`` while it may, or has not begun."""
        if self.refresh is not None:
            self.refresh()
        told = self.board.told()
        if told is not None:
            return told
        states = self.states()
        return cause_of(states, self.patience_s, time.time(), died, self.board.world_size)

    def settle(self, seconds: float, died: int | None = None) -> Failure | None:
        """As :meth:`check`, of a run that is known to have failed: wait for up to ``seconds`` until the cause shows."""
        deadline = time.monotonic() + seconds
        while (found := self.check(died)) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return found
