"""Interfaces for communication between ranks over process groups: Gloo for CPU tensors, NCCL for CUDA tensors.

A :class:`Communicator` uses rank numbers and not mesh axes; the program decides which ranks form a group. Every
operation starts immediately and ends with ``wait``. All ranks of a group must start its operations in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from partitioner.runtime.program.membership import PipelineEdge

CHANNELS = {"F": 0, "B": 1, "L": 2}  # activations, gradients and the loss never wait for each other


class TransferHandle(Protocol):
    """A transfer in progress; ``wait`` blocks until it has ended."""

    def wait(self) -> Any: ...


class Pending(Protocol):
    """A collective in progress.

    ``wait`` returns its result. ``release`` frees the result's memory: nothing reads it later.
    """

    def wait(self) -> Tensor: ...

    def release(self) -> None: ...


class RankGroup(Protocol):
    """An ordered group of ranks and its collectives; ``index`` is the position of this rank in it."""

    size: int
    index: int

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Pending:
        """Start to sum ``x`` over the ranks, or with ``maximum`` to take the maximum.

        ``x`` is contiguous, and is overwritten.
        """

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        """Start to gather the tensors ``x`` of all ranks; the result is their concatenation along ``dim``."""

    def reduce_scatter(self, x: Tensor, dim: int) -> Pending:
        """Start to sum ``x`` over the ranks; the result is this rank's part of the sum along ``dim``."""

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        """Start to send part ``i`` of ``x`` along ``split_dim`` to rank ``i``; received parts are joined along
        ``concat_dim``.
        """

    def exchange_rows(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Pending:
        """Start to send rows of ``x`` to the ranks: the first ``sends[0]`` to rank 0, the next ``sends[1]`` to rank 1,
        and so on.

        ``receives[i]`` rows arrive from rank ``i``, and are joined in the order of ranks. Any of these numbers may be
        0.
        """


class Communicator(Protocol):
    """The interface of one rank for communication with all others. ``home``: the rank that the first process runs."""

    rank: int
    home: int
    device: torch.device

    def prepare(
        self,
        groups: Sequence[tuple[int, ...]],
        links: Sequence[PipelineEdge],
        gathering: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Open the groups and pipeline links of a program.

        All ranks call it, each with the groups and links that it belongs to.

        ``gathering``: groups with a separate channel for all-gathers of parameters.
        """

    def group(self, ranks: tuple[int, ...], gathering: bool = False) -> RankGroup:
        """Return the group of ``ranks``.

        With ``gathering``, return one with a separate channel, whose operations do not wait for those of the first.
        """

    def send(self, x: Tensor, peer: int, channel: str) -> TransferHandle: ...

    def recv(self, x: Tensor, peer: int, channel: str) -> TransferHandle: ...

    def barrier(self) -> None: ...


def all_ranks(communicator: Communicator, world_size: int) -> RankGroup:
    """Return the group of all ranks, and open it if necessary. All ranks must call this."""
    ranks = tuple(range(world_size))
    communicator.prepare([ranks], [])
    return communicator.group(ranks)


class ImmediateResult:
    """A result that is available immediately, from a group of one rank."""

    __slots__ = ("result",)

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result

    def release(self) -> None:
        pass  # it is the caller's own


class SoloGroup:
    """A group of one rank, whose operations return their operand."""

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
