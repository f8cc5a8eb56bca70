"""Communication between ranks that are threads of one process, to run and check a program without further devices.

The last rank that enters a collective computes it for all ranks, in the order of ranks, so that every run gives bitwise
equal results. If a rank fails, all ranks that wait are released immediately.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.runtime.comm.group import Pending, RankGroup, SoloGroup, TransferHandle
from partitioner.runtime.errors import CommunicationError
from partitioner.runtime.program.membership import PipelineEdge


class ThreadWorld:
    """The data that ranks share when all of them are threads of one process. ``world_size``: number of ranks.
    ``device``: device of their tensors. ``timeout``: seconds that a rank waits for the others.
    """

    def __init__(self, world_size: int, device: torch.device | str = "cpu", timeout: float = 300.0) -> None:
        self.world_size = world_size
        self.device = torch.device(device)
        self.timeout = timeout
        self.lock = threading.Lock()
        self.meetings: dict[tuple[tuple[int, ...], bool], deque[_ThreadCollective]] = {}
        self.mail: dict[PipelineEdge, deque[_ThreadCollective]] = {}
        self.failure: str | None = None

    def communicator(self, rank: int) -> ThreadCommunicator:
        return ThreadCommunicator(self, rank)

    def abort(self, reason: str) -> None:
        """Let all communication operations that wait, now or later, raise an error with the text ``reason``. If this is
        called again, the first reason stays.
        """
        with self.lock:
            self.failure = self.failure or reason
            for queue in (*self.meetings.values(), *self.mail.values()):
                for collective in queue:
                    collective.event.set()

    def join(
        self, queue: deque[_ThreadCollective], member: int, size: int, signature: str, entry: Any
    ) -> tuple[_ThreadCollective, bool]:
        """Enter a collective of ranks that are threads: the first one in ``queue`` that this member has not entered, or
        a new one. Return the collective, and whether all members have entered it now.

        ``queue``: the collectives of the group, oldest first. ``member``: position of this rank in the group. ``size``:
        number of members. ``signature``: description of the operation, which must be equal on all members. ``entry``:
        this member's operand. Raise :class:`CommunicationError` if communication was aborted, or if the descriptions
        differ.
        """
        with self.lock:
            if self.failure is not None:
                raise CommunicationError(self.failure)
            collective = next((m for m in queue if member not in m.entries), None)
            if collective is None:
                collective = _ThreadCollective(self, signature, size)
                queue.append(collective)
            elif collective.what != signature:
                raise CommunicationError(
                    f"mismatched communication: rank {member} of the group enters {signature}, the others are in "
                    f"{collective.what}"
                )
            collective.entries[member] = entry
            last = len(collective.entries) == size
            if last:
                queue.remove(collective)
        return collective, last


class _ThreadCollective:
    """One collective among threads: the operands of the members that have entered it, and the result for each member.

    ``world``: the data that all ranks share. ``signature``: description of the operation. ``size``: number of members.
    """

    def __init__(self, world: ThreadWorld, signature: str, size: int) -> None:
        self.world = world
        self.what = signature
        self.size = size
        self.entries: dict[int, Any] = {}
        self.results: list[Any] = []
        self.event = threading.Event()

    def complete(self, compute: Callable[[list[Any]], list[Any]]) -> None:
        self.results = compute([self.entries[i] for i in range(self.size)])
        self.entries = dict.fromkeys(range(self.size))
        self.event.set()

    def wait(self, member: int) -> Any:
        """Return the result for ``member`` (position in the group), once all members have entered the collective. Raise
        :class:`CommunicationError` if communication was aborted, or if a member does not enter in time.
        """
        came = self.event.wait(self.world.timeout)
        if self.results:
            return self.results[member]
        if self.world.failure is not None:
            raise CommunicationError(self.world.failure)
        missing = sorted(set(range(self.size)) - set(self.entries))
        assert not came
        raise CommunicationError(
            f"{self.what}: ranks {missing} of the group did not enter it within {self.world.timeout} s"
        )


class _PendingThreadCollective:
    """A collective among threads in progress, as seen by one of its members. ``member``: the member's position in the
    group.
    """

    __slots__ = ("meeting", "member")

    def __init__(self, collective: _ThreadCollective, member: int) -> None:
        self.meeting, self.member = collective, member

    def wait(self) -> Any:
        return self.meeting.wait(self.member)

    def release(self) -> None:
        pass  # others may have the same tensor


def _reduce_entries(entries: list[Tensor], maximum: bool) -> Tensor:
    """Return the sum or, if ``maximum`` is true, the maximum of the tensors ``entries`` in this order, as a new
    contiguous tensor.
    """
    total = entries[0].clone(memory_format=torch.contiguous_format)
    for entry in entries[1:]:
        if maximum:
            torch.maximum(total, entry, out=total)
        else:
            total += entry
    return total


class ThreadGroup:
    """A process group of ranks that are threads of one process. The last rank that enters a collective computes it for
    all. Implements :class:`partitioner.runtime.comm.group.RankGroup`.

    ``world``: the data that all ranks share. ``ranks``: the members. ``rank``: this rank. ``gathering``: whether this
    is the second of two groups of the same ranks, whose collectives do not wait for those of the first.
    """

    def __init__(self, world: ThreadWorld, ranks: tuple[int, ...], rank: int, gathering: bool = False) -> None:
        self.world = world
        self.ranks = ranks
        self.size = len(ranks)
        self.index = ranks.index(rank)
        with world.lock:
            self.queue = world.meetings.setdefault((ranks, gathering), deque())

    def _enter_collective(self, name: str, x: Tensor, compute: Callable[[list[Any]], list[Any]], *how: int) -> Pending:
        return self._enter_meeting(
            f"{name}{list(how)} of {list(x.shape)} {x.dtype} over ranks {list(self.ranks)}", x, compute
        )

    def _enter_meeting(self, signature: str, entry: Any, compute: Callable[[list[Any]], list[Any]]) -> Pending:
        """Enter a collective, and compute it if all other members have entered it. Return the collective.
        ``signature``: description, which must be equal on all members. ``entry``: this member's operand. ``compute``:
        function that takes the operands of all members and returns the result for each member.
        """
        collective, last = self.world.join(self.queue, self.index, self.size, signature, entry)
        if last:
            with torch.no_grad():
                collective.complete(compute)
        return _PendingThreadCollective(collective, self.index)

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Pending:
        """Enter an all-reduce of ``x`` over the group: the sum or, if ``maximum`` is true, the maximum. Return the
        collective in progress; its result overwrites ``x``.
        """

        def compute(entries: list[Tensor]) -> list[Tensor]:
            total = _reduce_entries(entries, maximum)
            return [entry.copy_(total) for entry in entries]

        return self._enter_collective("all_reduce_max" if maximum else "all_reduce", x, compute)

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        """Enter an all-gather of ``x``, this member's tensor. Return the collective in progress; its result is the
        concatenation of all members' tensors along ``dim``.
        """

        def compute(entries: list[Tensor]) -> list[Tensor]:
            whole = torch.cat(entries, dim)
            return [whole.clone() for _ in entries]

        return self._enter_collective("all_gather", x, compute, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Pending:
        """Enter a reduce-scatter of ``x``, this member's tensor. Return the collective in progress; its result is this
        member's equal part of the sum along ``dim``.
        """

        def compute(entries: list[Tensor]) -> list[Tensor]:
            parts = _reduce_entries(entries, False).chunk(self.size, dim)
            return [part.clone(memory_format=torch.contiguous_format) for part in parts]  # each rank may free its own

        return self._enter_collective("reduce_scatter", x, compute, dim)

    def broadcast(self, x: Tensor, first: int) -> Pending:
        """Enter a broadcast of ``x[i]`` of member ``first + i``, for each ``i``. Return the collective in progress; its
        result overwrites ``x``.
        """

        def compute(entries: list[Tensor]) -> list[Tensor]:
            for member, entry in enumerate(entries):
                for place, row in enumerate(entry):
                    if member != first + place:
                        row.copy_(entries[first + place][place])
            return entries

        return self._enter_collective("broadcast", x, compute, first)

    def reduce(self, x: Tensor, first: int) -> Pending:
        """Enter a sum of ``x[i]`` over the group for member ``first + i``, for each ``i``. Return the collective in
        progress; its result is the sum for this member.
        """

        def compute(entries: list[Tensor]) -> list[Tensor]:
            results = [*entries]
            for place in range(x.shape[0]):
                results[first + place] = _reduce_entries([entry[place] for entry in entries], False)
            return results

        return self._enter_collective("reduce", x, compute, first)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        """Enter an all-to-all: part ``i`` of ``x`` along ``split_dim`` goes to member ``i``. Return the collective in
        progress; its result is the concatenation of the received parts along ``concat_dim``.
        """

        def compute(entries: list[Tensor]) -> list[Tensor]:
            pieces = [entry.chunk(self.size, split_dim) for entry in entries]
            return [torch.cat([p[to] for p in pieces], concat_dim) for to in range(self.size)]

        return self._enter_collective("all_to_all", x, compute, split_dim, concat_dim)

    def exchange_rows(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Pending:
        """Enter an exchange of rows: the first ``sends[0]`` rows of ``x`` go to member 0, and so on. Return the
        collective in progress; its result has the received rows, ``receives[i]`` from member ``i``, in the order of
        members.
        """

        def compute(entries: list[tuple[Tensor, Sequence[int]]]) -> list[Tensor]:
            pieces = [rows.split([*counts]) for rows, counts in entries]
            return [torch.cat([p[to] for p in pieces]) for to in range(self.size)]

        signature = f"exchange_rows of {list(x.shape[1:])} {x.dtype} over ranks {list(self.ranks)}"
        return self._enter_meeting(signature, (x, sends), compute)


class ThreadCommunicator:
    """Process groups, sends and receives of one rank that is a thread of this process. Implements
    :class:`partitioner.runtime.comm.group.Communicator`. ``world``: the data that all ranks share.
    """

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.home = 0
        self.device = world.device
        self._groups: dict[tuple[tuple[int, ...], bool], ThreadGroup] = {}

    def prepare(
        self,
        groups: Sequence[tuple[int, ...]],
        links: Sequence[PipelineEdge],
        gathering: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Create the process groups ``groups`` (tuples of ranks). ``links`` (pipeline transfers between two ranks) and
        ``gathering`` (groups with a second channel for all-gathers) need no preparation among threads.
        """
        for ranks in groups:
            self.group(ranks)

    def group(self, ranks: tuple[int, ...], gathering: bool = False) -> RankGroup:
        """Return the process group of ``ranks``. If ``gathering`` is true, return the second group of these ranks,
        whose operations do not wait for those of the first.
        """
        if len(ranks) == 1:
            return SoloGroup()
        key = ranks, gathering
        if key not in self._groups:
            self._groups[key] = ThreadGroup(self.world, ranks, self.rank, gathering)
        return self._groups[key]

    def _enter_transfer(self, link: PipelineEdge, member: int, x: Tensor) -> TransferHandle:
        """Enter the next transfer over ``link``; if the other side has already entered it, copy the data. Return the
        transfer. ``member``: 0 for the sender, 1 for the receiver. ``x``: the tensor that is sent, or filled.
        """
        with self.world.lock:
            queue = self.world.mail.setdefault(link, deque())
        signature = (
            f"transfer {link.channel} of {list(x.shape)} {x.dtype} from rank {link.source} to rank {link.target}"
        )
        collective, last = self.world.join(queue, member, 2, signature, x)
        if last:
            with torch.no_grad():
                collective.complete(lambda entries: [entries[0], entries[1].copy_(entries[0])])
        return _PendingThreadCollective(collective, member)

    def send(self, x: Tensor, peer: int, channel: str) -> TransferHandle:
        return self._enter_transfer(PipelineEdge(self.rank, peer, channel), 0, x)

    def recv(self, x: Tensor, peer: int, channel: str) -> TransferHandle:
        return self._enter_transfer(PipelineEdge(peer, self.rank, channel), 1, x)

    def barrier(self) -> None:
        self.group(tuple(range(self.world.world_size))).all_reduce(torch.zeros(1)).wait()
