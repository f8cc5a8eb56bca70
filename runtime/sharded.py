"""Parameters that the ranks of a group share: a piece on each, the whole of them between GATHER and FREE.

The whole of a parameter is one tensor all the time, of which FREE takes the memory away and GATHER gives it anew: what
a call's forward kept of it for its backward (the parameter, a view of it) reads it when it is there again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from passes.serialize import dtype_of
from runtime.groups import Communicator, Group, Pending
from runtime.pieces import Piece
from runtime.program import RankProgram, shard_shape
from runtime.zero import pieces_of, zero_axes


class Flat:
    """Padded pieces of several states, one after the other: ``piece(i)`` is a view without the padding.

    ``grain``, ``whole``: what the place of each, and the length of all, are multiples of.
    """

    def __init__(
        self, pieces: Sequence[Piece], dtype: torch.dtype, device: torch.device, grain: int = 1, whole: int = 1
    ) -> None:
        self.pieces = pieces
        ends = [0, *accumulate(-(-p.length // grain) * grain for p in pieces)]
        self.starts = ends[:-1]
        self.length = -(-ends[-1] // whole) * whole
        self.is_dense = self.length == sum(p.length for p in pieces)
        self.buffer = torch.zeros(self.length, dtype=dtype, device=device)
        self._storage = self.buffer.untyped_storage()
        self._nbytes = self._storage.nbytes()

    @property
    def given(self) -> bool:
        """Whether its memory is given away."""
        return self._storage.nbytes() != self._nbytes

    def take(self) -> None:
        """Take back the memory that :meth:`give` gave away."""
        if self.given:
            self._storage.resize_(self._nbytes)

    def give(self) -> None:
        self._storage.resize_(0)

    def piece(self, i: int) -> Tensor:
        return self.buffer[self.starts[i] : self.starts[i] + self.pieces[i].size]

    def rows(self, whole: Tensor, i: int) -> Tensor:
        """State ``i`` in ``whole``, the pieces of all ranks, flat: of shape ``[ranks, length]``."""
        start = self.starts[i]
        return whole.view(self.pieces[i].ranks, self.length)[:, start : start + self.pieces[i].length]


class Room:
    """A tensor of ``shape`` at the start of room for all of its pieces; the room may be given away and taken back."""

    def __init__(self, piece: Piece, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.padded = torch.zeros(piece.ranks * piece.length, dtype=dtype, device=device)
        self.tensor = self.padded[: piece.numel].view(torch.Size(shape))
        self._padding = self.padded[piece.numel :]
        self._storage = self.padded.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._rows = piece.ranks, piece.length

    @property
    def rows(self) -> Tensor:
        """Of shape ``[ranks, length]``. What is written here counts as no change of the parameter: it has its value
        from the optimizer's step, or is having it copied for a checkpoint."""
        return self.padded.data.view(self._rows)

    def take(self) -> None:
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)
            if self._padding.numel():  # what is sent with the rest is no matter what was there before
                self._padding.data.zero_()

    def give(self) -> None:
        self._storage.resize_(0)


class GatheredBucket:
    """The parameters of one bucket. ``keep``: the whole of them stays (ZeRO 1 and 2). ``hosted``: the rank's pieces are
    in host memory, and here from a FETCH to the end of the GATHER."""

    def __init__(
        self, rank: RankProgram, number: int, group: Group, held: Mapping[str, Tensor], keep: bool, hosted: bool = False
    ) -> None:
        states = rank.stage.buckets[number].states
        program, device = rank.program, held[states[0]].device
        dtype = dtype_of(program.states[states[0]].dtype)
        self.group, self.keep, self.hosted = group, keep, hosted
        self.flat = Flat(pieces_of(program, states, group.size, group.index), dtype, device)
        self.rooms = [
            Room(p, shard_shape(program, s), dtype, device) for p, s in zip(self.flat.pieces, states, strict=True)
        ]
        self.whole = {s: room.tensor for s, room in zip(states, self.rooms, strict=True)}
        self.pieces = {s: self.flat.piece(i) for i, s in enumerate(states)}
        if keep:  # a rank's piece is where it is in the whole, once
            self.pieces = {
                s: room.padded[p.start : p.start + p.size]
                for s, room, p in zip(states, self.rooms, self.flat.pieces, strict=True)
            }
        for state, piece in self.pieces.items():
            piece.copy_(held[state])
        if not keep:
            self.free()
        if keep or hosted:
            self.flat.give()
        self._pending: Pending | None = None

    def start(self) -> None:
        self._pending = self.group.all_gather(self._mine(), 0)

    def _mine(self) -> Tensor:
        """This rank's pieces, padded, one after the other."""
        if not self.keep:
            return self.flat.buffer
        return torch.cat([room.rows[self.group.index] for room in self.rooms])

    def wait(self) -> None:
        """Be sure that the parameters are there."""
        if self._pending is None:
            return
        whole = self._pending.wait()
        for i, room in enumerate(self.rooms):
            room.take()
            rows, own = self.flat.rows(whole, i), self.group.index
            others = (slice(own), slice(own + 1, None)) if self.keep else (slice(None),)  # its own is where it is
            for part in others:
                room.rows[part].copy_(rows[part])
        self._pending.release()
        self._pending = None
        if self.hosted:
            self.flat.give()

    def free(self) -> None:
        for room in self.rooms:
            room.give()


class ShardedParameters:
    """A rank's sharded parameters. ``held``: what :func:`runtime.state.load_states` gave, whose pieces are copied.

    ``pieces``: this rank's piece of each, which an optimizer updates; ``whole``: the tensors that calls read;
    ``leaving``: of which of them the memory is given away between calls.
    """

    def __init__(self, rank: RankProgram, held: Mapping[str, Tensor], communicator: Communicator) -> None:
        self.buckets: dict[int, GatheredBucket] = {}
        for number, bucket in enumerate(rank.stage.buckets):
            if zero_axes(rank.program, bucket.states):
                group = communicator.group(rank.zero_group(bucket.states[0]), gathering=True)
                keep, hosted = rank.program.zero < 3, "parameters" in rank.program.offload
                self.buckets[number] = GatheredBucket(rank, number, group, held, keep, hosted)
        self.pieces = {s: piece for b in self.buckets.values() for s, piece in b.pieces.items()}
        self.whole = {s: whole for b in self.buckets.values() for s, whole in b.whole.items()}
        self.leaving = {s for b in self.buckets.values() if not b.keep for s in b.whole}
