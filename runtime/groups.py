"""Communication between ranks, over process groups: Gloo for CPU tensors, NCCL for CUDA tensors.

A :class:`Communicator` knows ranks, not mesh axes: which ranks form a group is the program's to say. Every operation
starts at once and is finished by ``wait``; operations on one group are entered by all of its ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.errors import LaunchError

CHANNELS = {"F": 0, "B": 1}  # activations and gradients never wait for each other


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any: ...


class Pending(Protocol):
    """A collective under way; ``wait`` gives its result."""

    def wait(self) -> Tensor: ...


class Group(Protocol):
    """Some ranks, in order; ``index`` is this rank's place among them."""

    size: int
    index: int

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Pending:
        """Add up (or take the maximum of) the ranks' ``x``, which is dense and is overwritten with the result."""

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        """The ranks' ``x``, one after the other along ``dim``."""

    def reduce_scatter(self, x: Tensor, dim: int, scratch: bool = False) -> Pending:
        """This rank's part along ``dim`` of the sum of the ranks' ``x``; with ``scratch``, ``x`` may be overwritten."""

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        """Part ``i`` of ``x`` along ``split_dim`` goes to rank ``i``; the parts received are joined on ``concat_dim``."""


class Link(NamedTuple):
    """One direction of a pipeline edge: what ``source`` sends to ``target`` arrives in the order in which it was sent."""

    source: int
    target: int
    channel: str


class Communicator(Protocol):
    """One rank's view of all the others."""

    rank: int
    device: torch.device

    def prepare(self, groups: Sequence[tuple[int, ...]], links: Sequence[Link]) -> None:
        """Open what the program needs; called by all ranks, with those of ``groups`` and ``links`` that it is part of."""

    def group(self, ranks: tuple[int, ...]) -> Group: ...

    def send(self, x: Tensor, peer: int, channel: str) -> Work: ...

    def recv(self, x: Tensor, peer: int, channel: str) -> Work: ...

    def barrier(self) -> None: ...


class Finished:
    """A result that was there at once: what a group of one rank gives."""

    __slots__ = ("result",)

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


class SoloGroup:
    """A group of one: nothing is sent."""

    size = 1
    index = 0

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Pending:
        return Finished(x)

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        return Finished(x)

    def reduce_scatter(self, x: Tensor, dim: int, scratch: bool = False) -> Pending:
        return Finished(x)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        return Finished(x)


class _Started:
    """A torch ``Work``, the tensor that it fills, and what is to be done with it afterwards."""

    __slots__ = ("dim", "kept", "place", "result", "work")

    def __init__(
        self, work: Any, result: Tensor, dim: int = 0, place: tuple[int, int] | None = None, kept: object = None
    ) -> None:
        self.work, self.result, self.dim, self.place, self.kept = work, result, dim, place, kept

    def wait(self) -> Tensor:
        self.work.wait()
        self.kept = None
        if self.place is not None:  # a part of what was summed up: a copy, so that the rest can go
            return self.result.narrow(self.dim, *self.place).clone(memory_format=torch.contiguous_format)
        return _join(self.result, self.dim) if self.dim >= 0 else self.result


WHOLE = -1  # as _Started.dim: the result is complete as it is


def _parts(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` as ``[size, ...]``, dense, part by part along ``dim``."""
    return x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0).contiguous()


def _join(parts: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`_parts`: ``[size, ...]`` joined along ``dim``."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


class TorchGroup:
    """A process group, by its bare methods: the checks of ``torch.distributed`` cost more than a small transfer."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.size = process_group.size()
        self.index = process_group.rank()
        self._sum = dist.AllreduceOptions()
        self._max = dist.AllreduceOptions()
        self._max.reduceOp = dist.ReduceOp.MAX

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Pending:
        work = self.process_group.allreduce([x], self._max if maximum else self._sum)
        return _Started(work, x, WHOLE)

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        raise NotImplementedError

    def reduce_scatter(self, x: Tensor, dim: int, scratch: bool = False) -> Pending:
        raise NotImplementedError

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        parts = _parts(x, split_dim, self.size)
        out = torch.empty_like(parts)
        work = self.process_group.alltoall_base(out, parts, [], [])
        return _Started(work, out, concat_dim, kept=parts)


class GlooGroup(TorchGroup):
    """Gloo writes to strided tensors, and reduces and scatters by reducing all."""

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        x = x.contiguous()
        shape = list(x.shape)
        shape[dim] *= self.size
        out = x.new_empty(shape)
        work = self.process_group.allgather([list(out.chunk(self.size, dim))], [x])
        return _Started(work, out, WHOLE, kept=x)

    def reduce_scatter(self, x: Tensor, dim: int, scratch: bool = False) -> Pending:
        if not (scratch and x.is_contiguous()):
            x = x.clone(memory_format=torch.contiguous_format)
        length = x.shape[dim] // self.size
        work = self.process_group.allreduce([x], self._sum)
        return _Started(work, x, dim, (self.index * length, length))


class NcclGroup(TorchGroup):
    """NCCL moves dense buffers; parts along an inner dim are brought together before and after."""

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        work = self.process_group._allgather_base(out, x)
        return _Started(work, out, dim, kept=x)

    def reduce_scatter(self, x: Tensor, dim: int, scratch: bool = False) -> Pending:
        parts = _parts(x, dim, self.size)
        out = torch.empty_like(parts[0])
        work = self.process_group._reduce_scatter_base(out, parts)
        return _Started(work, out, WHOLE, kept=parts)


# Groups outlive a program: they are costly to make, and Gloo cannot always take them down.
_made: dict[tuple[int, ...], TorchGroup] = {}
_links: dict[Link, dist.ProcessGroup] = {}


class TorchCommunicator:
    """The ranks ``0 .. world_size - 1`` of the default process group, which is there already.

    ``prepare`` opens the groups in the order given: overlapping groups must come in the same order on all ranks.
    """

    def __init__(self, world_size: int, device: torch.device, timeout: timedelta | None = None) -> None:
        if not dist.is_initialized():
            raise LaunchError(
                "there is no process group: start with torchrun and call torch.distributed.init_process_group first"
            )
        if dist.get_world_size() < world_size:
            raise LaunchError(
                f"the program is for {world_size} ranks, there are {dist.get_world_size()}: "
                f"start it with torchrun --nproc-per-node so that nodes x processes is {world_size}"
            )
        self.rank = dist.get_rank()
        self.device = device
        self.everyone = tuple(range(world_size))
        self._timeout = timeout
        self._kind = NcclGroup if device.type == "cuda" else GlooGroup

    def prepare(self, groups: Sequence[tuple[int, ...]], links: Sequence[Link]) -> None:
        for ranks in (self.everyone, *groups):
            self._open(ranks)
        if self._kind is NcclGroup:
            # NCCL has no tags: transfers that cross on one communicator would wait for each other.
            for link in links:
                if link not in _links:
                    _links[link] = self._new([link.source, link.target])

    def _open(self, ranks: tuple[int, ...]) -> None:
        if len(ranks) == 1 or ranks in _made:
            return
        whole = len(ranks) == dist.get_world_size()
        process_group = dist.group.WORLD if whole else self._new(list(ranks))
        assert process_group is not None
        _made[ranks] = self._kind(process_group)

    def _new(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)

    def group(self, ranks: tuple[int, ...]) -> Group:
        return SoloGroup() if len(ranks) == 1 else _made[ranks]

    def send(self, x: Tensor, peer: int, channel: str) -> Work:
        group, target = self._link(Link(self.rank, peer, channel), peer)
        work: Work = group.send([x], target, CHANNELS[channel])
        return work

    def recv(self, x: Tensor, peer: int, channel: str) -> Work:
        group, source = self._link(Link(peer, self.rank, channel), peer)
        work: Work = group.recv([x], source, CHANNELS[channel])
        return work

    def _link(self, link: Link, peer: int) -> tuple[Any, int]:
        """The process group that carries ``link``, and ``peer``'s rank in it."""
        if link in _links:
            return _links[link], int(peer > self.rank)
        return dist.group.WORLD, peer

    def barrier(self) -> None:
        if len(self.everyone) > 1:
            self.group(self.everyone).all_reduce(torch.zeros(1, device=self.device)).wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
