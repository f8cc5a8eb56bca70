"""Losses that jump: told from the ones before by their median, so that one bad step does not hide the next."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

_NORMAL = 1.4826  # times the median deviation is the standard deviation, of a normal distribution


@dataclass(frozen=True)
class LossSpike:
    """``deviations``: by how many (robust) standard deviations the loss is above ``usual``."""

    step: int
    loss: float
    usual: float
    deviations: float

    def __str__(self) -> str:
        return (
            f"step {self.step}: the loss {self.loss:.4g} is {self.deviations:.1f} deviations above the usual "
            f"{self.usual:.4g}"
        )


class LossSpikes:
    """Sees the losses of a run, in order.

    ``window``: losses that say what is usual; ``deviations``: above it that are a spike; ``least``: losses before the
    first is told. A spike is not counted among the usual ones, unless it stays for a quarter of the window.
    """

    def __init__(self, window: int = 64, deviations: float = 8.0, least: int = 8) -> None:
        self.deviations = deviations
        self.least = least
        self._usual: deque[float] = deque(maxlen=window)
        self._above: deque[float] = deque(maxlen=max(1, window // 4))

    def see(self, step: int, loss: float) -> LossSpike | None:
        """The loss of ``step``; a :class:`LossSpike` if it is one. What is no number is infinitely far."""
        found = self._judged(step, loss)
        if found is None:
            self._usual.append(loss)
            self._above.clear()
        elif math.isfinite(loss):
            self._above.append(loss)
            if len(self._above) == self._above.maxlen:  # it stays: a new level
                self._usual.extend(self._above)
                self._above.clear()
        return found

    def _judged(self, step: int, loss: float) -> LossSpike | None:
        if not math.isfinite(loss):
            return LossSpike(step, loss, median(self._usual) if self._usual else math.nan, math.inf)
        if len(self._usual) < self.least:
            return None
        usual = median(self._usual)
        deviation = _NORMAL * median(abs(x - usual) for x in self._usual)
        away = (loss - usual) / max(deviation, 1e-3 * abs(usual), 1e-12)
        return LossSpike(step, loss, usual, away) if away > self.deviations else None
