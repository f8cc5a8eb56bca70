"""Communication between ranks, over process groups: Gloo for CPU tensors, NCCL for CUDA tensors.

A :class:`Communicator` knows ranks, not mesh axes: which ranks form a group is the program's to say. Every operation
starts at once and is finished by ``wait``; operations on one group are entered by all of its ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from partitioner.runtime.program.membership import PipelineEdge

CHANNELS = {"F": 0, "B": 1, "L": 2}  # activations, gradients and the loss never wait for each other


class TransferHandle(Protocol):
    """A transfer under way."""

    def wait(self) -> Any: ...


class Pending(Protocol):
    """A collective under way; ``wait`` gives its result. ``release``: nobody reads it any more."""

    def wait(self) -> Tensor: ...

    def release(self) -> None: ...


class RankGroup(Protocol):
    """Some ranks, in order; ``index`` is this rank's place among them."""

    size: int
    index: int

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Pending:
        """Add up (or take the maximum of) the ranks' ``x``, which is dense and is overwritten with the result."""

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        """The ranks' ``x``, one after the other along ``dim``."""

    def reduce_scatter(self, x: Tensor, dim: int) -> Pending:
        """This rank's part along ``dim`` of the sum of the ranks' ``x``."""

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        """Part ``i`` of ``x`` on ``split_dim`` goes to rank ``i``; the parts received are joined on ``concat_dim``."""

    def exchange_rows(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Pending:
        """The first ``sends[0]`` rows of ``x`` go to rank 0, the next to rank 1, and so on; ``receives`` rows come from
        each, and are joined in order of rank. Any of these numbers may be 0."""


class Communicator(Protocol):
    """One rank's view of all the others. ``home``: the rank that the first process runs."""

    rank: int
    home: int
    device: torch.device

    def prepare(
        self,
        groups: Sequence[tuple[int, ...]],
        links: Sequence[PipelineEdge],
        gathering: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Open what the program needs; called by all ranks, each with the groups and links that it is part of."""

    def group(self, ranks: tuple[int, ...], gathering: bool = False) -> RankGroup:
        """The group of ``ranks``; ``gathering``: another one, whose operations do not wait for those of the first."""

    def send(self, x: Tensor, peer: int, channel: str) -> TransferHandle: ...

    def recv(self, x: Tensor, peer: int, channel: str) -> TransferHandle: ...

    def barrier(self) -> None: ...


def all_ranks(communicator: Communicator, world_size: int) -> RankGroup:
    """The group of all ranks, opened where it was not; all of them call it."""
    ranks = tuple(range(world_size))
    communicator.prepare([ranks], [])
    return communicator.group(ranks)


class ImmediateResult:
    """A result that was there at once: what a group of one rank gives."""

    __slots__ = ("result",)

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result

    def release(self) -> None:
        pass  # it is the caller's own


class SoloGroup:
    """A group of one: nothing is sent."""

    size = 1
    index = 0

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Pending:
        return ImmediateResult(x)

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        return ImmediateResult(x)

    def reduce_scatter(self, x: Tensor, dim: int) -> Pending:
        return ImmediateResult(x)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        return ImmediateResult(x)

    def exchange_rows(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Pending:
        return ImmediateResult(x)
