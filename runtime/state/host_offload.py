"""Data of a rank in host memory: activations between OFFLOAD and FETCH, and parameters until a block reads them.

The copies that an offloaded optimizer updates are in ``parameters.py`` (``MasterParameters``). On CUDA, copies run on
their own streams, to and from pinned memory. On a CPU, host memory and device memory are the same, but the copies are
made nevertheless.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.program.program import RankProgram, shard_shape
from partitioner.runtime.program.sharded_buckets import FlatShard
from partitioner.runtime.state.disk_offload import release_pages
from partitioner.runtime.state.sharded_parameters import FlatBuffer, GatherBuffer, ShardedParameters


class Arrival:
    """A handle of copies between device and host memory that are in progress. :meth:`wait` makes GPU kernels that are
    queued later run after the copies, and does not block the host; :meth:`finish` blocks the host until the copies end.
    """

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        if self.event is not None:
            (stream or torch.cuda.current_stream()).wait_event(self.event)

    def finish(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class HostCopier:
    """Starts copies between ``device`` and host memory; on a GPU on one stream for each direction. A copy starts after
    the kernels that were queued before it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)] if self.pinned else []
        self._spare: dict[int, list[tuple[Tensor, Arrival]]] = {}
        self.parked = (
            Arrival()
        )  # the last move to host memory, for which the next computation waits, so that the device memory is free

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of ``shape`` and ``dtype`` in host memory with undefined contents, in pinned memory if the
        device is CUDA.
        """
        return torch.empty(list(shape), dtype=dtype, pin_memory=self.pinned)

    def take_buffer(self, num_bytes: int) -> tuple[Tensor, Arrival]:
        """Return a host buffer (uint8) of ``num_bytes`` bytes, and the last copy out of the buffer, which must end
        before the buffer is overwritten.
        """
        spare = self._spare.get(num_bytes)
        return spare.pop() if spare else (self.empty((num_bytes,), torch.uint8), Arrival())

    def return_buffer(self, memory: Tensor, read: Arrival) -> None:
        """Store the host buffer ``memory`` for later use, because pinning memory is slow. ``read``: the last copy out
        of the buffer.
        """
        self._spare.setdefault(memory.numel(), []).append((memory, read))

    def start(
        self, pairs: Iterable[tuple[Tensor, Tensor]], *, back: bool = False, after: Iterable[Arrival] = ()
    ) -> Arrival:
        """Start the copies ``pairs``, each a pair (source, target), once the copies ``after`` have ended, and return
        the handle of these copies. ``back``: if false, they go to host memory; otherwise to the device. The caller need
        not keep references to the sources.
        """
        if not self._streams:
            for source, target in pairs:
                target.copy_(source)
            return Arrival()
        stream = self._streams[back]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for other in after:
            other.wait(stream)
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                for tensor in (source, target):
                    if tensor.is_cuda:
                        tensor.record_stream(stream)
            event = torch.cuda.Event()
            event.record()
        return Arrival(event)


@dataclass(frozen=True)
class _View:
    """The place of a saved tensor in host memory: index of the buffer (``memory``), dtype, shape (``size``), strides,
    and offset in elements.
    """

    memory: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class OffloadedActivations:
    """Tensors saved for backward that are moved to host memory. Tensors that share memory are moved together. Device
    memory is released with the last reference to it, so the caller must drop ``saved``. ``saved``: the saved tensors,
    and other values, which stay. ``stay``: addresses of storages that remain on the device. ``copier``: starts the
    copies.
    """

    def __init__(self, saved: Sequence[Any], stay: Collection[int], copier: HostCopier) -> None:
        self._copier = copier
        self._slots: list[Any] = []
        self._host: list[Tensor] = []
        places: dict[int, int] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        after: list[Arrival] = []
        for entry in saved:
            if (
                not isinstance(entry, Tensor)
                or entry.device != copier.device
                or get_storage_address(entry) in (0, *stay)
            ):
                self._slots.append(entry)
                continue
            where = get_storage_address(entry)
            if where not in places:
                places[where] = len(self._host)
                memory = torch.empty(0, dtype=torch.uint8, device=copier.device).set_(entry.untyped_storage())
                host, read = copier.take_buffer(memory.numel())
                self._host.append(host)
                pairs.append((memory, host))
                after.append(read)
            self._slots.append(
                _View(places[where], entry.dtype, entry.shape, entry.stride(), int(entry.storage_offset()))
            )
        copier.parked.wait()
        self._arrival = copier.parked = copier.start(pairs, after=after)
        self._there: list[Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that the offloaded tensors take in host memory."""
        return sum(memory.numel() for memory in self._host)

    def fetch(self) -> None:
        """Start to copy the offloaded tensors from host memory back to the device. :meth:`restore` returns them."""
        self._there = [torch.empty(m.numel(), dtype=torch.uint8, device=self._copier.device) for m in self._host]
        pairs = zip(self._host, self._there, strict=True)
        self._arrival = self._copier.start(pairs, back=True, after=(self._arrival,))

    def restore(self) -> list[Any]:
        """Return the tensors saved for backward, and the other saved values, in their order. :meth:`fetch` must have
        been called, so that the tensors are on the device again. Kernels that are queued later may read them.
        """
        assert self._there is not None, "FETCH first"
        self._arrival.wait()
        device_buffers, self._there = self._there, None
        for memory in self._host:
            self._copier.return_buffer(memory, self._arrival)
        self._host = []
        return [self._rebuild_view(slot, device_buffers) if isinstance(slot, _View) else slot for slot in self._slots]

    def _rebuild_view(self, view: _View, device_buffers: Sequence[Tensor]) -> Tensor:
        empty = torch.empty(0, dtype=view.dtype, device=self._copier.device)
        return empty.set_(device_buffers[view.memory].untyped_storage(), view.offset, view.size, view.stride)


def get_storage_address(tensor: Tensor) -> int:
    """Return the address of the memory of the storage of ``tensor``; 0 if it has no memory."""
    return tensor.untyped_storage().data_ptr()


class HostParameters:
    """The parameters of a rank whose values are in host memory, where an optimizer updates them.

    Args:
        masters: parameter name -> its tensor in host memory.
        shards: parameter name -> this rank's shard on the device or, under ZeRO, its piece of the flattened shard.
        sharded: the parameters that ZeRO divides.
        copier: starts the copies.

    If the program offloads parameters, they are on the device only from their fetch until they are freed; ZeRO pieces
    only until their all-gather ends. ``whole``: the device tensors that calls read, for the parameters that are freed
    between block calls (such as layers); ``leaving`` has the names of these parameters. If a parameter has another
    dtype on the device, its tensor in host memory is converted to that dtype once a step, at its first fetch.
    """

    def __init__(
        self,
        rank: RankProgram,
        masters: Mapping[str, Tensor],
        shards: Mapping[str, Tensor],
        sharded: ShardedParameters,
        copier: HostCopier,
    ) -> None:
        program = rank.program
        self.masters = masters
        self._copier = copier
        self._pending: dict[str, Arrival] = {}
        self._rooms: dict[str, GatherBuffer] = {}
        self._flats: dict[str, FlatBuffer] = {}
        if "parameters" in program.offload:
            self._flats = {s: b.flat for b in sharded.buckets.values() for s in b.pieces}
            for name in masters.keys() - self._flats.keys():
                shape, dtype = shard_shape(program, name), dtype_of(program.states[name].dtype)
                self._rooms[name] = GatherBuffer(FlatShard(masters[name].numel(), 1, 0), shape, dtype, copier.device)
                self._rooms[name].release()
        self.whole = {name: room.tensor for name, room in self._rooms.items()}
        self.leaving = self.whole.keys()
        self._shards = {**shards, **self.whole}
        # Buffers for the conversion to the device's dtype, once a step: a converting copy cannot run asynchronously.
        self._short = {
            name: copier.empty(master.shape, self._shards[name].dtype)
            for name, master in masters.items()
            if master.dtype != self._shards[name].dtype
        }
        self._stale = set(self._short)

    def begin(self) -> None:
        """Mark all parameters whose dtype in host memory differs from that on the device, because an optimizer may have
        changed their values since the last training step. The first :meth:`fetch` of a marked parameter converts its
        values to the dtype of the device, still in host memory, before it copies them.
        """
        self._stale = set(self._short)

    def fetch(self, names: Sequence[str]) -> None:
        """Start to copy the parameters ``names``, or this rank's ZeRO pieces of them, from host memory to the device.
        Parameters that have another dtype on the device are converted first, unless this was already done in this
        training step. :meth:`wait` makes later kernels run after the copies.
        """
        for name in names:
            room = self._rooms.get(name) or self._flats.get(name)
            if room is not None:
                room.allocate()
        for name in self._stale.intersection(names):
            self._short[name].copy_(self.masters[name])
            release_pages(self.masters[name])
        self._stale.difference_update(names)
        sources = [self._short.get(name, self.masters[name]) for name in names]
        targets = [self._shards[name] for name in names]
        arrival = self._copier.start(zip(sources, targets, strict=True), back=True)
        self._pending.update(dict.fromkeys(names, arrival))

    def wait(self, names: Iterable[str]) -> None:
        """Make GPU kernels that are queued later run after the copies of the parameters ``names`` to the device. Do
        nothing for parameters whose copy was already waited for.
        """
        arrivals = {id(a): a for n in names if (a := self._pending.pop(n, None)) is not None}
        for arrival in arrivals.values():
            arrival.wait()

    def free(self, names: Sequence[str]) -> None:
        """Release the device memory of the parameters ``names``; their values in host memory remain."""
        self.wait(names)
        for name in names:
            self._rooms[name].release()


class TransientParameters(NamedTuple):
    """The parameters of a rank that are on its device only for part of a step. ``sharded``: parameters that ZeRO
    divides. ``host_parameters``: parameters whose values are in host memory.
    """

    sharded: ShardedParameters
    host_parameters: HostParameters

    @property
    def transient_names(self) -> set[str]:
        """Return the names of the parameters whose device memory is released between block calls (such as layers)."""
        return {*self.sharded.leaving, *self.host_parameters.leaving}
