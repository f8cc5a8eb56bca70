"""Collective and point-to-point communication for checkpoints, over Gloo and in host memory, separate from training."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from partitioner.runtime.comm.rendezvous import get_default_timeout
from partitioner.runtime.comm.wait_clock import wait_for
from partitioner.runtime.errors import CheckpointError

_CHUNK = 1 << 28  # bytes of one message

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_T = TypeVar("_T")
_opened: list[Any] = []  # keeps process groups alive, because Gloo cannot always be shut down


class Peers:
    """A Gloo group of all ranks, to exchange small integers and bytes in host memory. ``rank``: number of this rank.
    ``world_size``: number of ranks. All ranks must call each method together, except :meth:`send` and :meth:`receive`.
    Raise :class:`CheckpointError` if there are several ranks but no ``torch.distributed`` process group.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._backend: Any = None
        if world_size == 1:
            return
        if not dist.is_initialized():
            raise CheckpointError(
                f"copies in memory need a process group of the plan's {world_size} ranks: start them with torchrun, "
                "or leave copies_every out"
            )
        store = c10d.PrefixStore(f"partition copies {len(_opened)}", c10d._get_default_store())
        self._backend = dist.ProcessGroupGloo(store, rank, world_size, timeout=get_default_timeout(torch.device("cpu")))
        _opened.append(self._backend)

    def sum_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Return the element-wise sums of ``numbers`` over all ranks. The lists have equal lengths. All ranks call
        this.
        """
        found = torch.tensor(numbers, dtype=torch.int64)
        if self._backend is not None and len(numbers):
            wait_for(self._backend.allreduce([found]))
        return [int(n) for n in found.tolist()]

    def gather_number(self, number: int) -> list[int]:
        """Return the ``number`` of each rank, in the order of the ranks. All ranks call this."""
        return self.sum_numbers([number if rank == self.rank else 0 for rank in range(self.world_size)])

    def gather_lists(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the list ``numbers`` of each rank, in the order of the ranks. The lists may differ in length. All
        ranks call this.
        """
        lengths = self.gather_number(len(numbers))
        starts = [sum(lengths[:rank]) for rank in range(self.world_size)]
        padded = [0] * sum(lengths)
        padded[starts[self.rank] : starts[self.rank] + len(numbers)] = numbers
        found = self.sum_numbers(padded)
        return [found[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def run_on_all_ranks(self, action: str, work: Callable[[], _T]) -> _T:
        """Call ``work`` on every rank, and return this rank's result once ``work`` has succeeded on all ranks. All
        ranks call this. If ``work`` fails on any rank, raise :class:`CheckpointError` on all ranks. ``action``: start
        of the message, such as "the copy in memory was not made".
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        failed = self.gather_number(int(error is not None))
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"{action}: {type(error).__name__}: {error}") from error
        if any(failed):
            raise CheckpointError.from_other_rank(f"{action}: rank {failed.index(1)} failed; its own error says why")
        return result

    def send(self, content: Tensor, to: int) -> list[Any]:
        """Start to send the bytes ``content`` to rank ``to``, and return the handles of the sends. Wait for all handles
        before ``content`` changes.
        """
        return [self._backend.send([part], to, 0) for part in content.split(_CHUNK)]

    def receive(self, content: Tensor, source: int) -> None:
        for part in content.split(_CHUNK):
            self._backend.recv([part], source, 0).wait()


def identify_node(folder: Path) -> int:
    """Return a number that identifies the node of this process: equal for processes that see the same ``folder``, a
    folder in the memory of the node, such as one in ``/dev/shm``.
    """
    found = folder.stat()
    boot = _BOOT.read_text() if _BOOT.exists() else ""
    told = f"{socket.gethostname()} {boot} {os.path.realpath(folder)} {found.st_dev} {found.st_ino}"
    return int(hashlib.sha256(told.encode()).hexdigest()[:15], 16)


def assign_backup_ranks(nodes: Sequence[int]) -> list[int | None]:
    """Return, for each rank, the rank on another node that stores the second in-memory copy of its training state
    (parameters, optimizer states and so on).

    ``nodes[rank]``: number of the node of each rank. The nodes form a ring, and the second copy is on the next node: on
    the rank with the same index within the node, modulo the number of ranks there. All entries are ``None`` if there is
    only one node, because a second copy would be lost together with the first.

        >>> assign_backup_ranks([7, 7, 9, 9, 9])
        [2, 3, 0, 1, 0]
    """
    order = list(dict.fromkeys(nodes))
    on = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in order}
    if len(order) == 1:
        return [None] * len(nodes)
    following = {node: on[order[(index + 1) % len(order)]] for index, node in enumerate(order)}
    return [following[node][on[node].index(rank) % len(following[node])] for rank, node in enumerate(nodes)]
