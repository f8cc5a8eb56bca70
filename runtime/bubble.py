"""How long a rank of a running program computes, and how long it waits for others: its bubble, measured.

::

    with runtime.timed(engine) as times:
        for batch in batches:
            engine.step(batch)
    times.bubble  # the share of its steps in which the rank computed nothing

Waiting is what passes in receives, and in TOTAL, SYNC and STEP; computing what passes in F, B, I, W and TOTAL_F. On a
GPU, where instructions only start kernels, the times are those of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from runtime.engine import Engine
from runtime.simulate import COMPUTE
from runtime.transfers import Receive

_MEETING = frozenset({"TOTAL", "SYNC", "STEP"})
Work = tuple[str, tuple[int, int]]  # an operation, and the calls that it runs


@dataclass
class Times:
    """Of one rank's timed steps, in seconds: each step, what of it was computing and waiting, and each computation."""

    steps: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    work: dict[Work, list[float]] = field(default_factory=dict)

    @property
    def bubbles(self) -> list[float]:
        """For each step the share in which nothing was computed."""
        return [1 - busy / step for busy, step in zip(self.computing, self.steps, strict=True)]

    @property
    def bubble(self) -> float:
        """That of all steps together."""
        return 1 - sum(self.computing) / sum(self.steps) if self.steps else 0.0


@contextmanager
def timed(engine: Engine) -> Iterator[Times]:
    """Time what ``engine`` does in its steps until the end of the block; it costs a microsecond an instruction."""
    executor, times = engine._executor, Times()
    instructions, actions = executor.rank.instructions, executor.actions
    clock = time.perf_counter

    def computes(action: Callable[[], None], work: Work) -> Callable[[], None]:
        seconds = times.work.setdefault(work, [])

        def run() -> None:
            start = clock()
            action()
            seconds.append(clock() - start)
            times.computing[-1] += seconds[-1]

        return run

    def waits(action: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            start = clock()
            action()
            times.waiting[-1] += clock() - start

        return run

    def begin() -> None:
        times.steps.append(-clock())
        times.computing.append(0.0)
        times.waiting.append(0.0)

    def end() -> None:
        times.steps[-1] += clock()

    changed = [(0, begin)]
    for index, action in actions:
        op = instructions[index].op if index < len(instructions) else "STEP"
        if op in COMPUTE:
            changed.append((index, computes(action, (op, instructions[index].calls or (0, 0)))))
        elif getattr(action, "__func__", None) is Receive.finish or op in _MEETING:
            changed.append((index, waits(action)))
        else:
            changed.append((index, action))
    executor.actions = [*changed, (len(instructions), end)]
    try:
        yield times
    finally:
        executor.actions = actions
