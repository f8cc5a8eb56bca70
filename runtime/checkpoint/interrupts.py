"""A run that is asked to end: by a queue whose time is over, by a machine that is taken away, by hand.

The signal comes to some ranks, at some moment of a step. After each step all ranks ask each other, over Gloo and in
host memory, so that they stop behind the same one and save it together.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any

from runtime.checkpoint.peers import Peers
from runtime.errors import CheckpointError


class Interrupts:
    """Listens to ``signals`` on this rank, until one has come; another one ends the process as it would without.

    Raises :class:`CheckpointError` where Python cannot listen: outside of the main thread.
    """

    def __init__(self, rank: int, world_size: int, signals: Iterable[int]) -> None:
        self._peers = Peers(rank, world_size)
        self._asked = False
        self._before: dict[int, Any] = {}
        try:
            for number in signals:
                self._before[number] = signal.signal(number, self._ask)
        except ValueError as error:
            self.close()
            raise CheckpointError(
                f"signals={list(signals)} cannot be listened to ({error}): make Checkpoints in the main thread, of "
                "signals that a process may catch, or leave signals= out"
            ) from None

    def asked(self) -> bool:
        """Whether any rank was; all ranks call it."""
        return bool(self._peers.total([int(self._asked)])[0])

    def close(self) -> None:
        """Listen no more."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self.close()
