"""A flight recorder: where a rank is and when it came there, in a file that survives the rank.

The file is mapped into memory. Before each of its actions a rank writes two numbers there, the time and how long it has
waited for others so far: 0.2 microseconds, no system call. Another process reads them while the rank runs, hangs, or
after it was killed. The last two steps are kept: one under way, one whole.

Beside the numbers (``rank-3.times``) lies what they mean (``rank-3.json``): the rank's instructions and their place in
the model.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from partitioner.runtime.comm.wait_clock import waited
from partitioner.runtime.files import write_bytes, write_text
from partitioner.runtime.program.program import RankProgram

Phase = Literal["between steps", "step", "saving", "loading", "gone", "in a further program"]

PHASES: tuple[Phase, ...] = ("between steps", "step", "saving", "loading", "gone", "in a further program")

# The head of the file: int64 each; all times are of CLOCK_MONOTONIC, one clock for all processes of a host.
STEP, PHASE, MOVED, BEAT = range(4)
_HEAD = 8
_SLOTS = 2  # steps kept, each behind a head of its own
NUMBER, BEGUN, ENDED, WAITED = range(4)
_SLOT_HEAD = 4


@dataclass(frozen=True)
class InstructionSpot:
    """An instruction, and where in the model it is: the calls that it runs, and the source line where they start."""

    text: str
    op: str
    microbatch: int | None = None
    peer: int | None = None
    calls: str = ""
    source: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecorderHeader:
    """What a recorder's numbers mean. ``actions[k]``: the instruction that the ``k``-th action belongs to; its last one
    is the end of the step. ``clock_s``: what to add to the host's clock for the time of day, which hosts share.
    ``places``: see :attr:`partitioner.runtime.program.program.RankProgram.places`."""

    rank: int
    world_size: int
    stage: int
    pid: int
    host: str
    actions: tuple[int, ...]
    spots: tuple[InstructionSpot, ...]
    clock_s: float
    places: tuple[int, ...] = ()

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RecorderHeader:
        spots = tuple(InstructionSpot(**{**s, "values": tuple(s["values"])}) for s in data["spots"])
        return cls(**{**data, "actions": tuple(data["actions"]), "spots": spots, "places": tuple(data["places"])})


class Recorder:
    """Writes one rank's file in ``folder``; ``actions`` are the instructions that its actions belong to, in order."""

    def __init__(self, folder: Path, rank: RankProgram, actions: Sequence[int]) -> None:
        self.rank = rank.rank
        self.path = folder / f"rank-{rank.rank}.times"
        self.room = _SLOT_HEAD + 2 * len(actions)
        self._slot = _HEAD
        about = RecorderHeader(
            rank=rank.rank,
            world_size=rank.program.world_size,
            stage=rank.stage_index,
            pid=os.getpid(),
            host=socket.gethostname(),
            actions=tuple(actions),
            spots=tuple(spots_of(rank)),
            clock_s=time.time() - time.monotonic(),
            places=rank.places,
        )
        write_text(folder / f"rank-{rank.rank}.json", json.dumps(asdict(about)), durable=False)
        start = array("q", bytes(8 * (_HEAD + _SLOTS * self.room)))
        start[STEP] = -1  # before the first
        start[BEAT] = start[MOVED] = time.monotonic_ns()
        write_bytes(self.path, start.tobytes(), durable=False)  # last: it says that the rank is there
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.times = memoryview(self._map).cast("q")

    def begin(self, step: int) -> int:
        """A step starts; where its first numbers go. ``step`` counts from 0."""
        times = self.times
        now = time.monotonic_ns()
        self._slot = slot = _HEAD + (step % _SLOTS) * self.room
        times[slot + NUMBER], times[slot + BEGUN], times[slot + ENDED] = step, now, 0
        times[STEP], times[MOVED], times[PHASE] = step, now, 1
        return slot + _SLOT_HEAD

    def end(self) -> None:
        times, slot = self.times, self._slot
        now = time.monotonic_ns()
        times[slot + WAITED], times[slot + ENDED], times[MOVED], times[PHASE] = waited.ns, now, now, 0

    def beat(self) -> None:
        """Say that the process runs."""
        self.times[BEAT] = time.monotonic_ns()

    def moved(self) -> None:
        """Say that something moves: outside of steps, or within an action."""
        self.times[MOVED] = time.monotonic_ns()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """What is done meanwhile; an error leaves it as it is, to be told."""
        self.enter(phase)
        yield
        self.enter("between steps")

    def enter(self, phase: Phase) -> None:
        self.times[PHASE], self.times[MOVED] = PHASES.index(phase), time.monotonic_ns()


def spots_of(rank: RankProgram) -> Iterator[InstructionSpot]:
    """Each instruction of ``rank``, and the place in the model that it starts at."""
    stage, blocks = rank.stage, rank.program.blocks
    sources = {name: _first_source(block.nodes) for name, block in blocks.items()}
    for i in rank.instructions:
        calls = [] if i.calls is None else [c for c in stage.calls[slice(*i.calls)] if not c.prologue]
        if i.op == "TOTAL_F":
            calls = [c for c in stage.calls if c.prologue]
        if i.op in ("B", "I", "W"):
            calls = calls[::-1]
        paths = [c.path or c.block for c in calls]
        names = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}" if paths else ""
        yield InstructionSpot(
            text=str(i),
            op=i.word,
            microbatch=i.microbatch,
            peer=i.peer,
            calls=names,
            source=sources[calls[0].block] if calls else "",
            values=i.values if i.op.startswith(("SEND", "RECV")) else (),
        )


def _first_source(nodes: Sequence[dict[str, Any]]) -> str:
    return next((str(n["source"]) for n in nodes if n.get("source")), "")


@dataclass(frozen=True)
class RecordedMoment:
    """Where a rank is. ``action`` counts from 0, -1 outside of a step; times in nanoseconds of the host's clock."""

    step: int
    phase: Phase
    action: int
    moved: int
    beat: int


class Recording:
    """Reads what a :class:`Recorder` writes, at any time. Raises ``OSError`` where there is no such file yet."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.about = RecorderHeader.from_data(json.loads((folder / f"rank-{rank}.json").read_text()))
        self.path = folder / f"rank-{rank}.times"
        self.room = _SLOT_HEAD + 2 * len(self.about.actions)

    def _read_numbers(self) -> memoryview:
        return memoryview(self.path.read_bytes()).cast("q")

    def _slot(self, numbers: memoryview, step: int) -> memoryview:
        start = _HEAD + (step % _SLOTS) * self.room
        return numbers[start : start + self.room]

    def moment(self) -> RecordedMoment:
        numbers = self._read_numbers()
        phase, step = PHASES[numbers[PHASE]], numbers[STEP]
        if phase != "step":
            return RecordedMoment(step, phase, -1, numbers[MOVED], numbers[BEAT])
        slot = self._slot(numbers, step)
        times, begun = slot[_SLOT_HEAD::2], slot[BEGUN]
        begun_actions = bisect_left(range(len(times)), True, key=lambda k: times[k] < begun)  # others are of old steps
        moved = times[begun_actions - 1] if begun_actions else begun
        return RecordedMoment(step, phase, max(0, begun_actions - 1), max(moved, numbers[MOVED]), numbers[BEAT])

    def last_step(self) -> MeasuredStep | None:
        """The last whole step; ``None`` before there is one."""
        numbers = self._read_numbers()
        for step in (numbers[STEP], numbers[STEP] - 1):
            slot = self._slot(numbers, step)
            times = slot[_SLOT_HEAD::2]
            if slot[NUMBER] == step and slot[ENDED] >= slot[BEGUN] > 0 and min(times) >= slot[BEGUN]:
                return MeasuredStep(self.about, step, (*times, slot[ENDED]), (*slot[_SLOT_HEAD + 1 :: 2], slot[WAITED]))
        return None


@dataclass(frozen=True)
class MeasuredStep:
    """One rank's step. ``starts[k]``: when action ``k`` began; ``waited[k]``: how long the rank had waited in its life
    until then. Both in nanoseconds, with one more entry for the end of the step."""

    about: RecorderHeader
    step: int
    starts: tuple[int, ...]
    waited: tuple[int, ...]

    def seconds(self) -> list[tuple[int, float, float, float]]:
        """``(instruction, start, end, of which waiting)`` of each action; starts and ends on the host's clock."""
        return [
            (index, self.starts[k] * 1e-9, self.starts[k + 1] * 1e-9, (self.waited[k + 1] - self.waited[k]) * 1e-9)
            for k, index in enumerate(self.about.actions)
        ]

    def busy(self) -> dict[int, float]:
        """Seconds of own work by instruction."""
        found: dict[int, float] = {}
        for index, start, end, waiting in self.seconds():
            found[index] = found.get(index, 0.0) + end - start - waiting
        return found


def list_recordings(folder: Path) -> dict[int, Recording]:
    """All recordings in ``folder``, by rank in ascending order."""
    found = {}
    for path in folder.glob("rank-*.times"):
        rank = int(path.stem.split("-")[1])
        found[rank] = Recording(folder, rank)
    return dict(sorted(found.items()))
