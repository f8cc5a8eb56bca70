"""The recording of one step: segments of device operators, and the functions that the host calls between them.

A :class:`Tape` records a step while it runs. Device operators go to segments of a :class:`Capture`. Work that cannot be
in a segment ends it, and is stored as a function that the host calls again in each replay: collectives that the device
does not run by itself (:class:`RecordedCommunicator`), and functions that the executor names. In a replay the host
calls the segments and functions in their order, and does not run any other Python code of the step.

Tensors that the host produces and a segment reads, such as results of collectives, keep the memory that they had in the
recording: a replay copies the new values there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partitioner.runtime.comm.group import Communicator, Pending, RankGroup, TransferHandle
from partitioner.runtime.program.membership import PipelineEdge
from partitioner.runtime.replay.capture import Capture, Replay, copy_values

Entry = tuple[int, Replay]


class Tape:
    """The recording of one step, which later steps replay: segments of operators that run on the device, and functions
    that the host calls between them.

    A step is divided into numbered places, such as the actions of an executor. ``entries``: pairs (place, function
    without arguments that replays a segment or calls the host's function), in the order of execution; a segment that
    spans several places has the first one. ``host``: kind of function -> number of functions that the host calls.
    ``num_segments``: number of segments. ``capture``: records segments, such as in CUDA graphs.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.entries: list[Entry] = []
        self.host: Counter[str] = Counter()
        self.num_segments = 0
        self.place = 0
        self.recording = False
        self._begun_at = 0
        self._open: dict[int, RecordedPending] = {}  # collectives in a segment that are not waited for yet

    def start(self) -> None:
        """Start to record a step. Its first operators belong to place 0."""
        self.entries, self.host, self.num_segments, self.place = [], Counter(), 0, 0
        self._open.clear()
        self._begin_segment()

    def finish(self) -> None:
        """End the recording of the step. When this returns, all operators of the step have run once."""
        self._end_segment()

    def abort(self) -> None:
        """Drop the recording of a step that has failed."""
        self.capture.abort()
        self.recording = False
        self._open.clear()
        self.entries = []

    def run_on_host(self, first: Replay, again: Replay | None = None, kind: str = "host") -> None:
        """Call ``first`` now, outside of the recorded segments. Each replay calls ``again`` at this point; if ``again``
        is ``None``, ``first``. ``kind``: a word for the function's purpose, such as ``all-reduce``, by which functions
        are counted.
        """
        self._end_segment()
        first()
        self.entries.append((self.place, again or first))
        self.host[kind] += 1
        self._begin_segment()

    def _begin_segment(self) -> None:
        self._begun_at = self.place
        self.capture.begin()
        self.recording = True

    def _end_segment(self) -> None:
        # Collectives must end in the segment that started them: the next segment could not wait for them.
        for pending in list(self._open.values()):
            pending.wait()
        self.recording = False
        replay = self.capture.end()
        if replay is not None:
            self.entries.append((self._begun_at, replay))
            self.num_segments += 1

    def start_collective(self, kind: str, call: Callable[[], Pending]) -> Pending:
        """Start a collective by ``call``, and return it. While a step is recorded, also record the collective, so that
        replays start it again. ``kind``: name of the collective, such as ``all-reduce``, by which functions that the
        host calls in a replay are counted.
        """
        if not self.recording:
            with self.capture.pause_watch():
                return call()
        if self.capture.collectives:
            pending = RecordedPending(self, kind, call())
            self._open[id(pending)] = pending
            return pending
        pending = RecordedPending(self, kind)

        def start() -> None:
            pending.started = call()

        self.run_on_host(start, kind=kind)
        return pending

    def close_collective(self, pending: RecordedPending) -> None:
        """Record that the step has waited for ``pending``, a collective in a recorded segment of operators."""
        self._open.pop(id(pending), None)


class RecordedPending:
    """A collective or transfer in progress in a step that is recorded on ``tape``. A replay copies the result to the
    memory that it had in the recorded step. ``kind``: a word under which it is counted. ``started``: the handle that
    the underlying communicator has returned, in the recorded step or in the last replay.
    """

    def __init__(self, tape: Tape, kind: str, started: Pending | TransferHandle | None = None) -> None:
        self.tape, self.kind, self.started = tape, kind, started
        self._inside = started is not None
        self._ended = False
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait until the collective ends, and return its result; ``None`` for a transfer."""
        if not self._ended:
            self._ended = True
            if self._inside:
                self.tape.close_collective(self)
                self._finish_first()
            elif self.tape.recording:
                self.tape.run_on_host(self._finish_first, self._finish_again, f"wait for {self.kind}")
            else:
                self._finish_first()
        return self._result  # type: ignore[return-value]  # only transfers have none, and nobody reads it there

    def _finish_first(self) -> None:
        assert self.started is not None
        self._result = self.started.wait()

    def _finish_again(self) -> None:
        assert self.started is not None
        found = self.started.wait()
        if isinstance(found, Tensor) and self._result is not None:
            copy_values(self._result, found)
            release = getattr(self.started, "release", None)
            if release is not None and found.data_ptr() != self._result.data_ptr():
                release()
        self.started = None

    def release(self) -> None:
        """If the collective is part of a recorded segment, free the memory of its result, which replays then free, too.
        Otherwise keep the memory, because replays copy the result to it.
        """
        if self._inside and self.started is not None:
            self.started.release()  # type: ignore[union-attr]  # transfers are never released


class RecordedGroup:
    """A process group that runs collectives with ``group`` and, while a step is recorded, also records them on
    ``tape``, so that later steps can replay them.
    """

    def __init__(self, tape: Tape, group: RankGroup) -> None:
        self.tape, self.group = tape, group
        self.size, self.index = group.size, group.index

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Pending:
        return self.tape.start_collective("all-reduce", lambda: self.group.all_reduce(x, maximum))

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        return self.tape.start_collective("all-gather", lambda: self.group.all_gather(x, dim))

    def reduce_scatter(self, x: Tensor, dim: int) -> Pending:
        return self.tape.start_collective("reduce-scatter", lambda: self.group.reduce_scatter(x, dim))

    def broadcast(self, x: Tensor, first: int) -> Pending:
        return self.tape.start_collective("broadcast", lambda: self.group.broadcast(x, first))

    def reduce(self, x: Tensor, first: int) -> Pending:
        return self.tape.start_collective("reduce", lambda: self.group.reduce(x, first))

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        return self.tape.start_collective("all-to-all", lambda: self.group.all_to_all(x, split_dim, concat_dim))

    def exchange_rows(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Pending:
        return self.tape.start_collective("exchange of rows", lambda: self.group.exchange_rows(x, sends, receives))


class RecordedCommunicator:
    """A communicator that runs collectives, sends and receives with ``communicator`` and, while a step is recorded,
    also records them on ``tape``, so that later steps can replay them. Implements
    :class:`partitioner.runtime.comm.group.Communicator`.
    """

    def __init__(self, tape: Tape, communicator: Communicator) -> None:
        self.tape, self.communicator = tape, communicator
        self.rank, self.home = communicator.rank, communicator.home
        self.device: torch.device = communicator.device

    def prepare(
        self,
        groups: Sequence[tuple[int, ...]],
        links: Sequence[PipelineEdge],
        gathering: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Create process groups and pipeline links. ``groups``: the groups, as tuples of ranks. ``links``: connections
        to ranks of other pipeline stages. ``gathering``: groups that get a second channel, for all-gathers of
        parameters.
        """
        self.communicator.prepare(groups, links, gathering)

    def group(self, ranks: tuple[int, ...], gathering: bool = False) -> RankGroup:
        """Return the process group of the ranks ``ranks``, which :meth:`prepare` has created. If ``gathering`` is true,
        return its second channel, for all-gathers of parameters.
        """
        group = self.communicator.group(ranks, gathering)
        return group if group.size == 1 else RecordedGroup(self.tape, group)

    def send(self, x: Tensor, peer: int, channel: str) -> TransferHandle:
        return self._start_transfer("send", lambda: self.communicator.send(x, peer, channel))

    def recv(self, x: Tensor, peer: int, channel: str) -> TransferHandle:
        return self._start_transfer("receive", lambda: self.communicator.recv(x, peer, channel))

    def _start_transfer(self, kind: str, call: Callable[[], TransferHandle]) -> TransferHandle:
        return self.tape.start_collective(kind, call)  # type: ignore[arg-type]  # never released

    def barrier(self) -> None:
        self.communicator.barrier()
