"""Monitor a run, from outside or from one of its ranks: does it make progress, and if not, why."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from runtime.errors import Failure
from runtime.watch.board import Board, RankState
from runtime.watch.diagnose import cause_of

_LOOK_S = 0.05


class Monitor:
    """Monitors the ranks that write their states to ``folder``.

    ``patience_s``: if no rank makes progress for so many seconds, the run counts as stalled. It must exceed the longest
    instruction and the longest pause between steps, checkpoints included.
    """

    def __init__(self, folder: str | Path, patience_s: float = 300.0) -> None:
        self.board = Board(Path(folder))
        self.patience_s = patience_s
        self.refresh: Callable[[], None] | None = None  # fetches the states of ranks on other hosts

    def states(self) -> list[RankState]:
        return self.board.states()

    def check(self, died: int | None = None) -> Failure | None:
        """The failure (rank, instruction, graph node) because of which the run cannot continue; ``None`` while it can,
        or before it has begun. ``died``: the rank whose process was seen to end first, if known."""
        if self.refresh is not None:
            self.refresh()
        told = self.board.told()
        if told is not None:
            return told
        states = self.states()
        return cause_of(states, self.patience_s, time.time(), died, self.board.world_size)

    def settle(self, seconds: float, died: int | None = None) -> Failure | None:
        """Wait up to ``seconds`` until :meth:`check` finds the cause of a run that is known to have failed.

        Returns ``None`` if no cause is found in this time.
        """
        deadline = time.monotonic() + seconds
        while (found := self.check(died)) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return found
