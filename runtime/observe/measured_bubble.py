"""Measure how long a rank of a running program computes and how long it waits for others (its pipeline bubble).

::

    with partitioner.timed(engine) as times:
        for batch in batches:
            engine.step(batch)
    times.bubble  # the fraction of the step time in which the rank did not compute

Receives, TOTAL, SYNC, UPDATE and STEP count as waiting; F, B, I, W and TOTAL_F as computing. On a GPU, instructions
only launch kernels, so the times are those of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.execute.transfers import SENDING, PendingReceive
from partitioner.runtime.program.simulate import COMPUTE

_MEETING = frozenset({"TOTAL", "SYNC", "UPDATE", "STEP"})

Way = tuple[int, str]  # (peer stage, channel) of a send or receive


@dataclass
class StepTimes:
    """Times of one step on one rank, in seconds.

    Args:
        started: start of the step.
        whole: duration of the step.
        computing: total duration of computations.
        waiting: total duration of waiting for other ranks.
        work: (instruction index, duration) of every computation, in order.
        posting: instruction index -> the instruction's time that is neither computation nor waiting, such as for
            starting a send.
        sent: (index of the pipeline stage at the other end, "F" for values or "B" for gradients) -> start time of each
            send, in order.
        received: (index of the pipeline stage at the other end, "F" or "B") -> (start of waiting, end) of each receive,
            in order.

    Start and end times are readings of ``time.perf_counter``, which is the same clock for all processes of a machine.
    """

    started: float = 0.0
    whole: float = 0.0
    computing: float = 0.0
    waiting: float = 0.0
    work: list[tuple[int, float]] = field(default_factory=list)
    posting: dict[int, float] = field(default_factory=dict)
    sent: dict[Way, list[float]] = field(default_factory=dict)
    received: dict[Way, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def bubble(self) -> float:
        """Return the fraction of the step, from 0 to 1, in which the rank did not compute."""
        return 1 - self.computing / self.whole


@dataclass
class MeasuredTimes:
    """The times of all measured steps of one rank. ``steps``: the times of each step, in order."""

    steps: list[StepTimes] = field(default_factory=list)

    @property
    def bubbles(self) -> list[float]:
        """Return, for each step, the fraction from 0 to 1 in which the rank did not compute."""
        return [step.bubble for step in self.steps]

    @property
    def bubble(self) -> float:
        """Return the fraction, from 0 to 1, of all steps together in which the rank did not compute; 0
        without steps.
        """
        whole = sum(step.whole for step in self.steps)
        return 1 - sum(step.computing for step in self.steps) / whole if whole else 0.0


@contextmanager
def timed(engine: Engine) -> Iterator[MeasuredTimes]:
    """Measure the steps of ``engine`` inside the ``with`` block. The variable of the ``with`` statement is a
    :class:`MeasuredTimes`, to which the times of each step are added. Measuring takes about one microsecond per
    instruction.
    """
    executor, times = engine._executor, MeasuredTimes()
    instructions, actions = executor.rank.instructions, executor.actions
    clock = time.perf_counter
    steps = times.steps

    def time_computation(action: Callable[[], None], index: int) -> Callable[[], None]:
        """Return a function that runs ``action``, and adds its duration to the computing time of the current step, for
        the instruction at position ``index``.
        """

        def run() -> None:
            start = clock()
            action()
            seconds = clock() - start
            steps[-1].work.append((index, seconds))
            steps[-1].computing += seconds

        return run

    def time_wait(action: Callable[[], None], way: Way | None) -> Callable[[], None]:
        """Return a function that runs ``action``, and adds its duration to the waiting time of the current step.
        ``way``: for a receive, (index of the pipeline stage at the other end, "F" for values or "B" for gradients),
        under which its times are stored; ``None`` for another wait.
        """

        def run() -> None:
            start = clock()
            action()
            end = clock()
            steps[-1].waiting += end - start
            if way is not None:
                steps[-1].received.setdefault(way, []).append((start, end))

        return run

    def time_posting(action: Callable[[], None], index: int, way: Way | None) -> Callable[[], None]:
        """Return a function that runs ``action``, which starts a transfer or collective, and adds its duration to the
        instruction's time that is neither computation nor waiting. ``index``: position of the instruction. ``way``: for
        a send, (index of the pipeline stage at the other end, "F" for values or "B" for gradients), under which its
        start is stored; ``None`` for any other action.
        """

        def run() -> None:
            start = clock()
            if way is not None:
                steps[-1].sent.setdefault(way, []).append(start)
            action()
            posting = steps[-1].posting
            posting[index] = posting.get(index, 0.0) + clock() - start

        return run

    def begin() -> None:
        steps.append(StepTimes(started=clock()))

    def end() -> None:
        steps[-1].whole = clock() - steps[-1].started

    changed = [(0, begin)]
    for index, action in actions:
        instruction = instructions[index] if index < len(instructions) else None
        op = instruction.op if instruction is not None else "STEP"
        way = (instruction.peer, op[-1]) if instruction is not None and instruction.peer is not None else None
        if op in COMPUTE:
            changed.append((index, time_computation(action, index)))
        elif op in _MEETING:
            changed.append((index, time_wait(action, None)))
        elif getattr(action, "__func__", None) is PendingReceive.finish:
            changed.append((index, time_wait(action, way)))
        else:
            changed.append((index, time_posting(action, index, way if op in SENDING else None)))
    executor.actions = [*changed, (len(instructions), end)]
    try:
        yield times
    finally:
        executor.actions = actions
