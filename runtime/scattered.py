"""The gradients of parameters that a group shares: whole while backward adds to them, then a piece on each rank."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from passes.gradients import accumulated_in
from passes.serialize import dtype_of
from runtime.buffers import give_back
from runtime.compression import CODECS, Sender
from runtime.groups import Group, Pending
from runtime.levelled import exchange
from runtime.program import RankProgram, shard_shape
from runtime.sharded import Flat, Room
from runtime.sinks import RoomSink, Sink, WideRoomSink
from runtime.zero import pieces_of


class ScatteredBucket:
    """The gradients of one bucket. ``keep``: the whole of them stays until the next step (ZeRO 1); without, the pieces,
    too, have memory only from the first SCATTER of a step on.

    ``pieces``: what an optimizer sees; ``sinks``: what backward adds to.
    """

    def __init__(
        self,
        rank: RankProgram,
        number: int,
        group: Group,
        rest: Group,
        device: torch.device,
        keep: bool,
        grain: int = 1,
        whole: int = 1,
    ) -> None:
        bucket = rank.stage.buckets[number]
        states = bucket.states
        program, short = rank.program, dtype_of(rank.program.states[states[0]].dtype)
        dtype = accumulated_in(short)
        sink = RoomSink if dtype == short else WideRoomSink
        self.group, self.rest, self.keep = group, rest, keep
        self.flat = Flat(pieces_of(program, states, group.size, group.index), dtype, device, grain, whole)
        shapes = [shard_shape(program, s) for s in states]
        self.rooms = [Room(p, shape, dtype, device) for p, shape in zip(self.flat.pieces, shapes, strict=True)]
        self.pieces = {s: self.flat.piece(i) for i, s in enumerate(states)}
        self.sinks: dict[str, Sink] = {s: sink(room) for s, room in zip(states, self.rooms, strict=True)}
        self.fresh = True  # nothing of this step is in the pieces yet
        self._sent: deque[tuple[Tensor, Pending]] = deque()  # what is under way, oldest first
        self.sender: Sender | None = None  # where what goes over this group is compressed
        if bucket.compression and not bucket.levels:
            self.sender = Sender(CODECS[bucket.compression], group.size * self.flat.length, dtype, device)
        if not keep:
            self.give()

    def begin(self) -> None:
        self.fresh = True
        self._sent.clear()  # of a step that failed
        for sink in self.sinks.values():
            sink.fresh = True
        if not self.keep:
            self.flat.give()

    def restore(self) -> None:
        """The pieces have memory, whatever became of the step."""
        if self.flat.given:
            self.flat.take()
            self.flat.buffer.zero_()

    def give(self) -> None:
        for room in self.rooms:
            room.give()

    def start(self) -> None:
        """Send what was added since the last time to those whose piece it is."""
        make = self.flat.buffer.new_empty if self.flat.is_dense else self.flat.buffer.new_zeros
        whole = make(self.group.size * self.flat.length)
        for i, (sink, room) in enumerate(zip(self.sinks.values(), self.rooms, strict=True)):
            sink.settle()
            self.flat.rows(whole, i).copy_(room.rows)
            sink.fresh = True
        if not self.keep:
            self.give()
        if self.sender is None:
            pending = self.group.reduce_scatter(whole, 0)
        else:
            pending = exchange(self.sender, whole.view(self.group.size, -1), self.group)
        self._sent.append((whole, pending))

    def collect(self) -> None:
        """Add what comes of the oldest that was sent to this rank's piece."""
        whole, pending = self._sent.popleft()
        arrived = pending.wait()
        if self.fresh:
            self.flat.take()
            self.flat.buffer.copy_(arrived)
            self.fresh = False
        else:
            self.flat.buffer.add_(arrived)
        pending.release()
        give_back(whole)

    def settle(self) -> None:
        """Pieces to which nothing was sent in this step are zero; what was sent has been collected."""
        if self.fresh:
            self.flat.take()
            self.flat.buffer.zero_()
            self.fresh = False

    def reduce(self) -> Pending:
        """Add up the pieces over the ranks that have the same ones."""
        return self.rest.all_reduce(self.flat.buffer)
