"""How long a rank of a running program computes, and how long it waits for others: its bubble, measured.

::

    with runtime.timed(engine) as times:
        for batch in batches:
            engine.step(batch)
    times.bubble  # the share of its steps in which the rank computed nothing

Waiting is what passes in receives, and in TOTAL, SYNC, UPDATE and STEP; computing what passes in F, B, I, W and
TOTAL_F. On a GPU, where instructions only start kernels, the times are those of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from runtime.engine import Engine
from runtime.simulate import COMPUTE
from runtime.transfers import SENDING, Receive

_MEETING = frozenset({"TOTAL", "SYNC", "UPDATE", "STEP"})
Way = tuple[int, str]  # a stage that is sent to or received from, and the channel


@dataclass
class StepTimes:
    """One step of one rank, in seconds.

    ``work``: by instruction that computes, in order, how long it did. ``posted``: by instruction that starts or ends
    something else, what that took, waiting left out. ``sent``, ``received``: by the stage that it goes to or comes
    from and channel, in order, when a send was started; when a receive began to wait, and when it was done: by a clock
    that processes of one machine share.
    """

    begun: float = 0.0
    whole: float = 0.0
    computing: float = 0.0
    waiting: float = 0.0
    work: list[tuple[int, float]] = field(default_factory=list)
    posted: dict[int, float] = field(default_factory=dict)
    sent: dict[Way, list[float]] = field(default_factory=dict)
    received: dict[Way, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def bubble(self) -> float:
        """The share in which nothing was computed."""
        return 1 - self.computing / self.whole


@dataclass
class Times:
    """Of one rank's timed steps."""

    steps: list[StepTimes] = field(default_factory=list)

    @property
    def bubbles(self) -> list[float]:
        """For each step the share in which nothing was computed."""
        return [step.bubble for step in self.steps]

    @property
    def bubble(self) -> float:
        """That of all steps together."""
        whole = sum(step.whole for step in self.steps)
        return 1 - sum(step.computing for step in self.steps) / whole if whole else 0.0


@contextmanager
def timed(engine: Engine) -> Iterator[Times]:
    """Time what ``engine`` does in its steps until the end of the block; it costs a microsecond an instruction."""
    executor, times = engine._executor, Times()
    instructions, actions = executor.rank.instructions, executor.actions
    clock = time.perf_counter
    steps = times.steps

    def computes(action: Callable[[], None], index: int) -> Callable[[], None]:
        def run() -> None:
            start = clock()
            action()
            seconds = clock() - start
            steps[-1].work.append((index, seconds))
            steps[-1].computing += seconds

        return run

    def waits(action: Callable[[], None], way: Way | None) -> Callable[[], None]:
        def run() -> None:
            start = clock()
            action()
            end = clock()
            steps[-1].waiting += end - start
            if way is not None:
                steps[-1].received.setdefault(way, []).append((start, end))

        return run

    def posts(action: Callable[[], None], index: int, way: Way | None) -> Callable[[], None]:
        def run() -> None:
            start = clock()
            if way is not None:
                steps[-1].sent.setdefault(way, []).append(start)
            action()
            posted = steps[-1].posted
            posted[index] = posted.get(index, 0.0) + clock() - start

        return run

    def begin() -> None:
        steps.append(StepTimes(begun=clock()))

    def end() -> None:
        steps[-1].whole = clock() - steps[-1].begun

    changed = [(0, begin)]
    for index, action in actions:
        instruction = instructions[index] if index < len(instructions) else None
        op = instruction.op if instruction is not None else "STEP"
        way = (instruction.peer, op[-1]) if instruction is not None and instruction.peer is not None else None
        if op in COMPUTE:
            changed.append((index, computes(action, index)))
        elif op in _MEETING:
            changed.append((index, waits(action, None)))
        elif getattr(action, "__func__", None) is Receive.finish:
            changed.append((index, waits(action, way)))
        else:
            changed.append((index, posts(action, index, way if op in SENDING else None)))
    executor.actions = [*changed, (len(instructions), end)]
    try:
        yield times
    finally:
        executor.actions = actions
