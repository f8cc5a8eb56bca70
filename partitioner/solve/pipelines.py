"""How pipeline schedules fill the stages: their bubble, and how many microbatches a stage holds.

A step of ``m`` microbatches takes ``(m - b) max t_s + b sum t_s``, where ``t_s`` is a microbatch's time on stage
``s`` and the share ``b`` of the plain pipeline's fill and drain is the schedule's.

Sources: GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B (Narayanan et al. 2021), ZB-1p and ZB-2p (Qi et al. 2023:
the bubble is ``(p - 1)(F + I - W)`` and ``(p - 1)(F + I - 2 W)``), ZB-V (Qi et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Phases:
    """Seconds of a microbatch through all stages: forward, backward for inputs, backward for weights."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True)
class Pipeline:
    """A schedule. ``bubble(phases, p, m, v)``: its share ``b``; ``in_flight(stage, p, m, v)``: microbatches whose saved
    tensors stage ``stage`` of ``p`` holds at a time, with ``v`` virtual stages; ``chunks``: those that it needs."""

    bubble: Callable[[Phases, int, int, int], float]
    in_flight: Callable[[int, int, int, int], float]
    executed: bool = False
    chunks: int | None = 1  # None: as many as are asked for


def _whole(phases: Phases, p: int, m: int, v: int) -> float:
    return 1.0


def _split(weights: float) -> Callable[[Phases, int, int, int], float]:
    """The bubble that is left when backwards for weights fill it, ``weights`` for each of ``p - 1`` microbatches that
    come after the first: fewer microbatches leave more of it."""

    def share(phases: Phases, p: int, m: int, v: int) -> float:
        if not phases.total:
            return 1.0
        filled = weights * min(1.0, (m - 1) / max(1, p - 1))
        return max(0.0, (phases.forward + phases.inputs - filled * phases.weights) / phases.total)

    return share


PIPELINES: dict[str, Pipeline] = {
    "gpipe": Pipeline(_whole, lambda s, p, m, v: m, executed=True),
    "1f1b": Pipeline(_whole, lambda s, p, m, v: min(p - s, m), executed=True),
    "interleaved": Pipeline(
        lambda phases, p, m, v: 1.0 / v,
        lambda s, p, m, v: min(float(m), (2 * (p - s - 1) + (v - 1) * p + 1) / v),
        chunks=None,
    ),
    "zb-1p": Pipeline(_split(1.0), lambda s, p, m, v: min(p, m)),
    "zb-2p": Pipeline(_split(2.0), lambda s, p, m, v: min(2 * p - 1, m)),
    "zb-v": Pipeline(_split(2.0), lambda s, p, m, v: min(p, m), chunks=2),
}
