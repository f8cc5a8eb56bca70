"""The gradients of a rank's parameters: flat buffers, into which backward adds, and which are reduced as a whole.

Those of parameters shorter than float32 are added up and reduced in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from passes.gradients import accumulated_in
from runtime.groups import Communicator, Pending
from runtime.program import RankProgram

_ALIGNMENT = 64  # bytes: where vector loads and NCCL's chunks like to start


class Sink:
    """Where the gradient of one parameter is added up. The first gradient of a step overwrites the last step's."""

    __slots__ = ("fresh", "view")

    def __init__(self, view: Tensor) -> None:
        self.view = view
        self.fresh = True

    def add(self, gradient: Tensor) -> None:
        if self.fresh:
            self.view.copy_(gradient)
            self.fresh = False
        else:
            self.view.add_(gradient)

    def addmm(self, a: Tensor, b: Tensor) -> None:
        if self.fresh:
            torch.mm(a, b, out=self.view)
            self.fresh = False
        else:
            self.view.addmm_(a, b)

    def sum(self, x: Tensor, dims: list[int] | tuple[int, ...]) -> None:
        if self.fresh:
            torch.sum(x, dims, out=self.view)
            self.fresh = False
        else:
            self.view.add_(torch.sum(x, dims))

    def settle(self) -> None:
        """A gradient that nothing was added to is zero."""
        if self.fresh:
            self.view.zero_()
            self.fresh = False


class WideSink(Sink):
    """A sink in float32 of a parameter in a shorter type: what comes is added up in float32."""

    __slots__ = ()

    def addmm(self, a: Tensor, b: Tensor) -> None:
        self.add(torch.mm(a, b))

    def sum(self, x: Tensor, dims: list[int] | tuple[int, ...]) -> None:
        self.add(torch.sum(x, dims, dtype=self.view.dtype))


def _sink(shard: Tensor, view: Tensor) -> Sink:
    return Sink(view) if view.dtype == shard.dtype else WideSink(view)


class Gradients:
    """A rank's gradients, by state; ``shapes`` are those of its shards."""

    def __init__(self, rank: RankProgram, shards: Mapping[str, Tensor], communicator: Communicator) -> None:
        self.rank = rank
        self.communicator = communicator
        states = rank.program.states
        train = rank.program.objective == "train"
        trained = [s for s in rank.states if train and states[s].requires_grad]
        self.sinks: dict[str, Sink] = {}
        self.buffers: list[Tensor] = []
        for bucket in rank.stage.buckets:
            buffer, views = _flat([shards[s] for s in bucket.states])
            self.buffers.append(buffer)
            self.sinks.update((s, _sink(shards[s], v)) for s, v in zip(bucket.states, views, strict=True))
        for state in trained:
            if state not in self.sinks:
                shard = shards[state]
                wide = accumulated_in(shard.dtype)
                self.sinks[state] = _sink(shard, torch.zeros(shard.shape, dtype=wide, device=shard.device))
        self._groups = [communicator.group(rank.group(*bucket.axes)) for bucket in rank.stage.buckets]
        self._under_way: dict[int, Pending] = {}

    def views(self) -> list[Tensor]:
        """The gradient of every parameter."""
        return [sink.view for sink in self.sinks.values()]

    def begin(self) -> None:
        """A new step: what is there now is of the last one."""
        for sink in self.sinks.values():
            sink.fresh = True

    def reduce(self, bucket: int) -> None:
        """Start adding up a bucket over its axes."""
        for state in self.rank.stage.buckets[bucket].states:
            self.sinks[state].settle()
        self._under_way[bucket] = self._groups[bucket].all_reduce(self.buffers[bucket])

    def sync(self, states: Sequence[str]) -> None:
        """Add up the gradients of tied states over the stages that share them."""
        for ranks, tied in sharing(self.rank, states).items():
            group = self.communicator.group(ranks)
            views = [self.sinks[s] for s in tied]
            for sink in views:
                sink.settle()
            for work in [group.all_reduce(sink.view) for sink in views]:
                work.wait()

    def finish(self) -> None:
        """Wait until every gradient is whole."""
        for pending in self._under_way.values():
            pending.wait()
        self._under_way.clear()
        for sink in self.sinks.values():
            sink.settle()


def sharing(rank: RankProgram, states: Sequence[str]) -> dict[tuple[int, ...], list[str]]:
    """The ranks that hold each of ``states`` on their stages, with this rank's other coordinates: ranks -> states."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for state in states:
        ranks = tuple(rank.peer(stage) for stage in sorted(rank.program.states[state].stages))
        groups.setdefault(ranks, []).append(state)
    return groups


def _flat(shards: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One zeroed buffer with room for ``shards``, and a view of it for each."""
    dtype = accumulated_in(shards[0].dtype)
    step = max(1, _ALIGNMENT // dtype.itemsize)
    starts, total = [], 0
    for shard in shards:
        starts.append(total)
        total += -(-shard.numel() // step) * step
    buffer = torch.zeros(total, dtype=dtype, device=shards[0].device)
    views = [buffer[s : s + x.numel()].view(x.shape) for s, x in zip(starts, shards, strict=True)]
    return buffer, views
