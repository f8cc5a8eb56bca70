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
    """A collective in progress. ``wait`` blocks until it ends and returns its result. ``release`` frees the result's
    memory; call it when the result is no longer read.
    """

    def wait(self) -> Tensor: ...

    def release(self) -> None: ...


class RankGroup(Protocol):
    """An ordered group of ``size`` ranks and its collectives; ``index`` is the position of this rank in it, from 0."""

    size: int
    index: int

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Pending:
        """Start to reduce ``x`` element-wise over the ranks of the group: to the sum or, if ``maximum`` is true, to the
        maximum. Return the collective in progress. Its result overwrites ``x``, which must be contiguous.
        """

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        """Start to gather the tensors ``x`` of all ranks of the group, and return the collective in progress. Its
        result is their concatenation along ``dim``, in rank order.
        """

    def reduce_scatter(self, x: Tensor, dim: int) -> Pending:
        """Start to sum ``x`` over the ranks of the group, and return the collective in progress. Its result is this
        rank's part of the sum: part ``index`` of ``size`` equal parts along ``dim``.
        """

    def broadcast(self, x: Tensor, first: int) -> Pending:
        """Start to send ``x[i]`` from the rank at position ``first + i`` of the group to all others, for each ``i``,
        and return the collective in progress. Its result is ``x``, overwritten with the received tensors. ``x`` must be
        contiguous.
        """

    def reduce(self, x: Tensor, first: int) -> Pending:
        """Start to compute the element-wise sum of ``x[i]`` over the ranks of the group for the rank at position
        ``first + i``, for each ``i``, and return the collective in progress. Its result is the sum for this rank;
        undefined if there is no sum for this rank. ``x`` may be overwritten. It must be contiguous, and must not be
        changed before the collective ends.
        """

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        """Start to send the ``i``-th equal part of ``x`` along ``split_dim`` to the ``i``-th rank of the group, and
        return the collective in progress. Its result has the received parts, concatenated along ``concat_dim`` in rank
        order.
        """

    def exchange_rows(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Pending:
        """Start to send rows of ``x`` to the ranks of the group: the first ``sends[0]`` rows to the first rank, the
        next ``sends[1]`` to the second, and so on. Return the collective in progress. Its result has the received rows,
        ``receives[i]`` from the ``i``-th rank, in rank order. Any of these numbers may be 0.
        """


class Communicator(Protocol):
    """Interface with which one rank communicates with all others. ``rank``: number of this rank. ``home``: number of
    the rank that process 0 runs; it collects whole tensors and prints messages. ``device``: device of this rank's
    tensors.
    """

    rank: int
    home: int
    device: torch.device

    def prepare(
        self,
        groups: Sequence[tuple[int, ...]],
        links: Sequence[PipelineEdge],
        gathering: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Create the process groups and pipeline links of a program. All ranks call this, each with the groups and
        links to which it belongs. ``groups``: tuples of ranks. ``links``: connections from one rank to another rank of
        another pipeline stage, each for values, gradients or the loss. ``gathering``: groups that get a second channel,
        for all-gathers of parameters.
        """

    def group(self, ranks: tuple[int, ...], gathering: bool = False) -> RankGroup:
        """Return the process group of the ranks ``ranks``, which :meth:`prepare` has created. If ``gathering`` is true,
        return its second channel, whose operations do not wait for those of the first.
        """

    def send(self, x: Tensor, peer: int, channel: str) -> TransferHandle: ...

    def recv(self, x: Tensor, peer: int, channel: str) -> TransferHandle: ...

    def barrier(self) -> None: ...


def get_world_group(communicator: Communicator, world_size: int) -> RankGroup:
    """Return the process group of all ranks; create it if necessary. All ranks must call this. ``world_size``: number
    of ranks. ``communicator``: connects this rank with the others.
    """
    ranks = tuple(range(world_size))
    communicator.prepare([ranks], [])
    return communicator.group(ranks)


class ImmediateResult:
    """A collective that has already ended, in a process group of one rank; ``wait`` returns ``result``."""

    __slots__ = ("result",)

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result

    def release(self) -> None:
        pass  # the caller owns the result


class SoloGroup:
    """A process group of one rank, whose collectives return their operand."""

    size = 1
    index = 0

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Pending:
        return ImmediateResult(x)

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        return ImmediateResult(x)

    def reduce_scatter(self, x: Tensor, dim: int) -> Pending:
        return ImmediateResult(x)

    def broadcast(self, x: Tensor, first: int) -> Pending:
        return ImmediateResult(x)

    def reduce(self, x: Tensor, first: int) -> Pending:
        return ImmediateResult(x[0])

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        return ImmediateResult(x)

    def exchange_rows(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Pending:
        return ImmediateResult(x)
