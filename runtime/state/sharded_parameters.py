"""Parameters sharded by ZeRO: each rank of a group holds a piece; whole parameters exist between GATHER and FREE.

A whole parameter is one tensor object for the entire run. FREE releases its memory, and GATHER allocates it again and
all-gathers the pieces. Tensors saved for backward (the parameter, or a view of it) are thus valid again after GATHER.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.comm.group import Communicator, Pending, RankGroup
from partitioner.runtime.comm.storage import resize_storage
from partitioner.runtime.program.program import RankProgram, shard_shape
from partitioner.runtime.program.sharded_buckets import FlatShard, find_flat_shards, zero_axes


class FlatBuffer:
    """A flat buffer with one rank's padded ZeRO pieces of several parameters, one after the other. ``piece(i)`` is a
    view of one piece without its padding. Pieces start at multiples of ``grain`` elements, and the length of the buffer
    is a multiple of ``whole`` elements. ``allocate`` and ``release`` manage its memory.
    """

    def __init__(
        self, pieces: Sequence[FlatShard], dtype: torch.dtype, device: torch.device, grain: int = 1, whole: int = 1
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
    def is_released(self) -> bool:
        """Return whether the memory of this buffer is released now."""
        return self._storage.nbytes() != self._nbytes

    def allocate(self) -> None:
        """If the memory of this buffer is released, allocate it, with undefined contents."""
        if self.is_released:
            resize_storage(self._storage, self._nbytes)

    def release(self) -> None:
        resize_storage(self._storage, 0)

    def piece(self, i: int) -> Tensor:
        return self.buffer[self.starts[i] : self.starts[i] + self.pieces[i].size]

    def rows(self, whole: Tensor, i: int) -> Tensor:
        """Return the padded ZeRO pieces (one for each rank) of the ``i``-th parameter (from 0), as a view ``[ranks,
        length]`` of ``whole``, the concatenation of all ranks' buffers.
        """
        start = self.starts[i]
        return whole.view(self.pieces[i].ranks, self.length)[:, start : start + self.pieces[i].length]


class GatherBuffer:
    """A whole parameter of shape ``shape``, in a buffer with space for the padded ZeRO pieces of all ranks.
    ``allocate`` and ``release`` manage its memory. ``piece``: this rank's piece, which has the number of pieces.
    """

    def __init__(self, piece: FlatShard, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.padded = torch.zeros(piece.ranks * piece.length, dtype=dtype, device=device)
        self.tensor = self.padded[: piece.numel].view(torch.Size(shape))
        self._padding = self.padded[piece.numel :]
        self._storage = self.padded.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._rows = piece.ranks, piece.length

    @property
    def rows(self) -> Tensor:
        """Return the padded ZeRO pieces of all ranks as a view ``[ranks, length]``. Writes through this view do not
        increase the version counter of the parameter: an all-gather writes values that the optimizer's step has already
        set, which is not a change for autograd or for a checkpoint that is being copied.
        """
        return self.padded.data.view(self._rows)

    def allocate(self) -> None:
        """If the memory of the parameter is released, allocate it, with zeros as padding; other contents
        are undefined.
        """
        if self._storage.nbytes() != self._nbytes:
            resize_storage(self._storage, self._nbytes)
            if self._padding.numel():  # padding is sent too, and must not depend on the memory's earlier contents
                self._padding.data.zero_()

    def release(self) -> None:
        resize_storage(self._storage, 0)


class GatheredBucket:
    """The parameters of one bucket, which ZeRO divides and which are all-gathered together, and their all-gather.
    ``number``: index of the bucket. ``stored``: parameter name -> this rank's piece (part of the flattened parameter),
    whose values are copied. ``keep``: whether whole parameters are never freed (ZeRO 1 and 2). ``host_parameters``:
    whether the rank's pieces are in host memory, and on the device only until the all-gather ends.
    """

    def __init__(
        self,
        rank: RankProgram,
        number: int,
        group: RankGroup,
        stored: Mapping[str, Tensor],
        keep: bool,
        host_parameters: bool = False,
    ) -> None:
        states = rank.stage.buckets[number].states
        program, device = rank.program, stored[states[0]].device
        dtype = dtype_of(program.states[states[0]].dtype)
        self.group, self.keep, self.hosted = group, keep, host_parameters
        self.flat = FlatBuffer(find_flat_shards(program, states, group.size, group.index), dtype, device)
        self.rooms = [
            GatherBuffer(p, shard_shape(program, s), dtype, device)
            for p, s in zip(self.flat.pieces, states, strict=True)
        ]
        self.whole = {s: room.tensor for s, room in zip(states, self.rooms, strict=True)}
        self.pieces = {s: self.flat.piece(i) for i, s in enumerate(states)}
        if keep:  # a rank's piece is a view of the whole parameter, so it is stored once
            self.pieces = {
                s: room.padded[p.start : p.start + p.size]
                for s, room, p in zip(states, self.rooms, self.flat.pieces, strict=True)
            }
        for state, piece in self.pieces.items():
            piece.copy_(stored[state])
        if not keep:
            self.free()
        if keep or host_parameters:
            self.flat.release()
        self._pending: Pending | None = None

    def start(self) -> None:
        self._pending = self.group.all_gather(self._concatenate_own_pieces(), 0)

    def _concatenate_own_pieces(self) -> Tensor:
        """Return this rank's padded ZeRO pieces of the parameters as one flat tensor, the operand of the all-gather."""
        if not self.keep:
            return self.flat.buffer
        return torch.cat([room.rows[self.group.index] for room in self.rooms])

    def wait(self) -> None:
        """Wait for the all-gather, if one was started, and copy its result into the whole parameters."""
        if self._pending is None:
            return
        whole = self._pending.wait()
        for i, room in enumerate(self.rooms):
            room.allocate()
            rows, own = self.flat.rows(whole, i), self.group.index
            others = (
                (slice(own), slice(own + 1, None)) if self.keep else (slice(None),)
            )  # the own piece is already in place
            for part in others:
                room.rows[part].copy_(rows[part])
        self._pending.release()
        self._pending = None
        if self.hosted:
            self.flat.release()

    def free(self) -> None:
        for room in self.rooms:
            room.release()


class ShardedParameters:
    """All parameters of a rank that ZeRO divides. ``stored``: parameter name -> this rank's piece (part of the
    flattened parameter), whose values are copied.

    ``pieces``: parameter name -> this rank's piece, which an optimizer updates. ``whole``: parameter name -> the whole
    parameter, which block calls (such as layers) read. ``leaving``: names of the parameters that are freed between
    block calls. ``buckets``: index -> parameters that are gathered together.
    """

    def __init__(self, rank: RankProgram, stored: Mapping[str, Tensor], communicator: Communicator) -> None:
        self.buckets: dict[int, GatheredBucket] = {}
        for number, bucket in enumerate(rank.stage.buckets):
            if zero_axes(rank.program, bucket.states):
                group = communicator.group(rank.zero_group(bucket.states[0]), gathering=True)
                keep, host_parameters = rank.program.zero < 3, "parameters" in rank.program.offload
                self.buckets[number] = GatheredBucket(rank, number, group, stored, keep, host_parameters)
        self.pieces = {s: piece for b in self.buckets.values() for s, piece in b.pieces.items()}
        self.whole = {s: whole for b in self.buckets.values() for s, whole in b.whole.items()}
        self.leaving = {s for b in self.buckets.values() if not b.keep for s in b.whole}

    def for_buckets(self, numbers: Mapping[int, int]) -> ShardedParameters:
        """Return the same parameters for another program, in which the buckets (parameters that are gathered together)
        have other indices. ``numbers``: index of a bucket in that program -> its index in this object.
        """
        other = copy.copy(self)
        other.buckets = {own: self.buckets[number] for own, number in numbers.items() if number in self.buckets}
        return other
