"""Record in a memory-mapped file which action a rank runs and when the action began, so that the record survives the
rank.

Before each of its actions a rank writes two numbers: the time, and how long it has waited for other ranks so far. This
takes 0.2 microseconds and no system call. Another process reads the numbers while the rank runs, hangs, or after it was
killed. The file has the last two steps: the current one and a complete one.

The file ``rank-3.times`` has the numbers of rank 3. The file ``rank-3.json`` beside it describes the rank's
instructions and their positions in the model.
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
_SLOTS = 2  # steps in the file, each after its own head
NUMBER, BEGUN, ENDED, WAITED = range(4)
_SLOT_HEAD = 4


@dataclass(frozen=True)
class InstructionSpot:
    """The description of one instruction. ``text``: its printed form. ``op``: its kind. ``microbatch``: index of the
    microbatch; ``None`` if it has none. ``peer``: index of the pipeline stage to which it sends, or from which it
    receives; ``None`` for other kinds. ``calls``: the modules that it runs, as text. ``source``: the source line where
    they start, as ``file:line``. ``values``: names of the tensors that it sends or receives.
    """

    text: str
    op: str
    microbatch: int | None = None
    peer: int | None = None
    calls: str = ""
    source: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecorderHeader:
    """The description of one rank and its instructions. The flight recorder writes it to a file beside the file with
    the times.

    Args:
        stage: index of the pipeline stage.
        pid, host: process ID and host name.
        actions: for each action (a function of the compiled step), the index of its instruction; the last action is the
            end of the step.
        spots: the description of each instruction.
        clock_s: seconds to add to the host's monotonic clock for the time of day, which is comparable between hosts.
        places: for each instruction of the rank, its index in the list of the pipeline stage, if ranks have different
            numbers of microbatches; otherwise empty.
    """

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
    """Writes the flight record of one rank to files in ``folder``: the time at which each action of a step began.
    ``actions``: for each action (a function of the compiled step), the index of its instruction.
    """

    def __init__(self, folder: Path, rank: RankProgram, actions: Sequence[int]) -> None:
        self.rank = rank.rank
        self.path = folder / f"rank-{rank.rank}.times"
        self.room = _SLOT_HEAD + 2 * len(actions)
        self._slot = _HEAD
        header = RecorderHeader(
            rank=rank.rank,
            world_size=rank.program.world_size,
            stage=rank.stage_index,
            pid=os.getpid(),
            host=socket.gethostname(),
            actions=tuple(actions),
            spots=tuple(iterate_spots(rank)),
            clock_s=time.time() - time.monotonic(),
            places=rank.places,
        )
        write_text(folder / f"rank-{rank.rank}.json", json.dumps(asdict(header)), durable=False)
        start = array("q", bytes(8 * (_HEAD + _SLOTS * self.room)))
        start[STEP] = -1  # before the first
        start[BEAT] = start[MOVED] = time.monotonic_ns()
        write_bytes(self.path, start.tobytes(), durable=False)  # last: readers look for this file
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.times = memoryview(self._map).cast("q")

    def begin(self, step: int) -> int:
        """Record the start of step number ``step`` (from 0). Return the index in the array :attr:`times` at which the
        numbers of the step's actions begin. For each action (a function that runs an instruction), the caller writes
        two numbers: its start, and how long the rank has waited for others so far, both in nanoseconds.
        """
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

    def record_heartbeat(self) -> None:
        """Record that the process is alive, by writing the current time."""
        self.times[BEAT] = time.monotonic_ns()

    def record_progress(self) -> None:
        """Record the current time as the time of progress, outside of steps or inside of a long instruction."""
        self.times[MOVED] = time.monotonic_ns()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Record that the rank is in ``phase``, such as "saving", inside the ``with`` block, and "between steps" after
        it. After an error the phase stays, so that an error report can name it.
        """
        self.enter(phase)
        yield
        self.enter("between steps")

    def enter(self, phase: Phase) -> None:
        self.times[PHASE], self.times[MOVED] = PHASES.index(phase), time.monotonic_ns()


def iterate_spots(rank: RankProgram) -> Iterator[InstructionSpot]:
    """Yield a description of each instruction of ``rank``, with the modules that it runs and the source line where they
    start.
    """
    stage, blocks = rank.stage, rank.program.blocks
    sources = {name: _find_first_source(block.nodes) for name, block in blocks.items()}
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


def _find_first_source(nodes: Sequence[dict[str, Any]]) -> str:
    return next((str(n["source"]) for n in nodes if n.get("source")), "")


@dataclass(frozen=True)
class RecordedMoment:
    """The state of a rank when its flight record was read. Times are in nanoseconds of the host's monotonic clock.
    ``step``: number of the step, from 0. ``phase``: activity of the rank, such as "saving" or "between steps".
    ``action``: index of the current action (a function that runs an instruction) in the step, from 0; -1 outside of a
    step. ``moved``: time of the last progress. ``beat``: last time at which the process was known to be alive.
    """

    step: int
    phase: Phase
    action: int
    moved: int
    beat: int


class Recording:
    """Reads the files in ``folder`` that the flight recorder of ``rank`` writes, at any time. Raise ``OSError`` if they
    do not exist yet.
    """

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
        """Return the current state of the rank: its phase, its step, the function of the step that runs (action), and
        the times of its last progress and last heartbeat.
        """
        numbers = self._read_numbers()
        phase, step = PHASES[numbers[PHASE]], numbers[STEP]
        if phase != "step":
            return RecordedMoment(step, phase, -1, numbers[MOVED], numbers[BEAT])
        slot = self._slot(numbers, step)
        times, begun = slot[_SLOT_HEAD::2], slot[BEGUN]
        begun_actions = bisect_left(range(len(times)), True, key=lambda k: times[k] < begun)  # later entries are older
        moved = times[begun_actions - 1] if begun_actions else begun
        return RecordedMoment(step, phase, max(0, begun_actions - 1), max(moved, numbers[MOVED]), numbers[BEAT])

    def last_step(self) -> MeasuredStep | None:
        """Return when each action (a function that runs an instruction) of the rank's last complete training step
        began; ``None`` if no step is complete yet.
        """
        numbers = self._read_numbers()
        for step in (numbers[STEP], numbers[STEP] - 1):
            slot = self._slot(numbers, step)
            times = slot[_SLOT_HEAD::2]
            if slot[NUMBER] == step and slot[ENDED] >= slot[BEGUN] > 0 and min(times) >= slot[BEGUN]:
                return MeasuredStep(self.about, step, (*times, slot[ENDED]), (*slot[_SLOT_HEAD + 1 :: 2], slot[WAITED]))
        return None


@dataclass(frozen=True)
class MeasuredStep:
    """The times of one step on one rank, in nanoseconds. ``header``: the description of the rank and its instructions.
    ``step``: number of the step, from 0. ``starts[k]``: time at which action ``k`` (a function of the compiled step)
    began. ``waited[k]``: how long the process had waited for other ranks until then, since it started. Both lists have
    one more entry, for the end of the step.
    """

    header: RecorderHeader
    step: int
    starts: tuple[int, ...]
    waited: tuple[int, ...]

    def seconds(self) -> list[tuple[int, float, float, float]]:
        """Return ``(instruction index, start, end, waiting time)`` of each action (a function of the compiled step,
        such as a backward), in order of time. The three times are in seconds; start and end are on the host's monotonic
        clock. ``waiting time`` is how long the action waited for other ranks. An instruction may be compiled to several
        actions.
        """
        return [
            (index, self.starts[k] * 1e-9, self.starts[k + 1] * 1e-9, (self.waited[k + 1] - self.waited[k]) * 1e-9)
            for k, index in enumerate(self.header.actions)
        ]

    def busy(self) -> dict[int, float]:
        """Return a dict: instruction index -> seconds that the instruction took, except waiting for other ranks."""
        found: dict[int, float] = {}
        for index, start, end, waiting in self.seconds():
            found[index] = found.get(index, 0.0) + end - start - waiting
        return found


def list_recordings(folder: Path) -> dict[int, Recording]:
    """Return the flight records in ``folder`` as a dict: rank -> record, in ascending order of ranks. A flight record
    is a set of files in which a rank writes what it does at which time.
    """
    found = {}
    for path in folder.glob("rank-*.times"):
        rank = int(path.stem.split("-")[1])
        found[rank] = Recording(folder, rank)
    return dict(sorted(found.items()))
