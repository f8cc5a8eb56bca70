"""One rank's view of all the others, over torch's process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from runtime.backends import GlooGroup, NcclGroup, TorchGroup
from runtime.buffers import as_real, resolved
from runtime.errors import LaunchError
from runtime.groups import CHANNELS, Group, Link, SoloGroup, Work
from runtime.restarts import timeout_of_all

# Groups outlive a program: they are costly to make, and Gloo cannot always take them down. Keyed by processes, since
# another program may place its ranks otherwise.
_made: dict[tuple[tuple[int, ...], bool], TorchGroup] = {}
_links: dict[Link, Any] = {}


def processes_of(placement: Sequence[int], world_size: int) -> tuple[int, ...]:
    """The process that runs each rank, where process ``p`` drives the ``p``-th of the devices that a plan uses.

    ``placement[rank]``: the device of a rank; empty: each rank is on its namesake. Raises :class:`LaunchError` unless
    every rank has a device of its own.
    """
    if not placement:
        return tuple(range(world_size))
    if len(placement) != world_size or len(set(placement)) != world_size:
        raise LaunchError(
            f"the plan places {world_size} ranks on the devices {list(placement)}; expected one device of its own for "
            "every rank: make the plan again"
        )
    order = {device: process for process, device in enumerate(sorted(placement))}
    return tuple(order[device] for device in placement)


class TorchCommunicator:
    """The ranks ``0 .. world_size - 1`` on the processes of the default process group, which is there already.
    ``placement[rank]`` is the process that runs a rank (empty: its namesake); see :func:`processes_of`.
    Groups are made without the other ranks' help, from the default group's store: ``torch.distributed.new_group`` takes
    all ranks, or the same number of earlier groups on each. Those that overlap must be opened in the same order. They
    wait for ``timeout``; by default as long as the default group.
    """

    def __init__(
        self,
        world_size: int,
        device: torch.device,
        timeout: timedelta | None = None,
        placement: Sequence[int] = (),
    ) -> None:
        if not dist.is_initialized():
            raise LaunchError(
                "there is no process group: start with torchrun and call torch.distributed.init_process_group first"
            )
        if dist.get_world_size() < world_size:
            raise LaunchError(
                f"the program is for {world_size} ranks, there are {dist.get_world_size()}: "
                f"start it with torchrun --nproc-per-node so that nodes x processes is {world_size}"
            )
        self.processes = processes_of(placement, world_size)
        self._process = dist.get_rank()
        self.rank = self.processes.index(self._process)
        self.home = self.processes.index(0)
        self.device = device
        self.everyone = tuple(range(world_size))
        self._timeout = timeout_of_all(device) if timeout is None else timeout
        self._on_gpu = device.type == "cuda"

    def prepare(
        self, groups: Sequence[tuple[int, ...]], links: Sequence[Link], gathering: Sequence[tuple[int, ...]] = ()
    ) -> None:
        for ranks in groups:
            self._group(ranks)
        for ranks in gathering:
            self._group(ranks, gathering=True)
        for link in links:
            key = self._key(link)
            if key not in _links:
                _links[key] = self._open((key.source, key.target), f"link {key.channel}")
                if self._on_gpu:
                    self._connect(_links[key], key)

    def _group(self, ranks: tuple[int, ...], gathering: bool = False) -> Group:
        key = members, _ = self._on(ranks), gathering
        if len(ranks) > 1 and key not in _made:
            backend = self._open(members, "gathers" if gathering else "group")
            _made[key] = (NcclGroup if self._on_gpu else GlooGroup)(backend, members)
            if self._on_gpu:
                _made[key].all_reduce(torch.zeros(1, device=self.device)).wait()  # connect now: see _connect
        return self.group(ranks, gathering)

    def _on(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.processes[rank] for rank in ranks)

    def _connect(self, backend: Any, link: Link) -> None:
        """Let both ends meet now: NCCL would block the first of them to use the link until the other does."""
        one = torch.zeros(1, device=self.device)
        transfer = backend.send if link.source == self._process else backend.recv
        transfer([one], int(link.source == self._process), 0).wait()

    def _key(self, link: Link) -> Link:
        """The link between processes whose backend carries ``link``. Gloo has tags, one per channel, and serves both
        directions at once; NCCL has none, and transfers that cross on one communicator would wait for each other."""
        source, target = self._on(link[:2])
        return (
            Link(source, target, link.channel) if self._on_gpu else Link(min(source, target), max(source, target), "")
        )

    def _open(self, processes: tuple[int, ...], purpose: str) -> Any:
        name = f"partition {purpose} {'-'.join(map(str, processes))}"
        store = c10d.PrefixStore(name, c10d._get_default_store())
        index, size = processes.index(self._process), len(processes)
        backend: Any
        if self._on_gpu:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            options.global_ranks_in_group = list(processes)
            options.group_name = c10d.GroupName(name)
            backend = dist.ProcessGroupNCCL(store, index, size, options)
        else:
            backend = dist.ProcessGroupGloo(store, index, size, timeout=self._timeout)
        backend._set_sequence_number_for_group()
        if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
            return c10d._create_process_group_wrapper(backend, name, store, index, size, self._timeout)
        return backend

    def group(self, ranks: tuple[int, ...], gathering: bool = False) -> Group:
        return SoloGroup() if len(ranks) == 1 else _made[self._on(ranks), gathering]

    def send(self, x: Tensor, peer: int, channel: str) -> Work:
        key = self._key(Link(self.rank, peer, channel))
        work: Work = _links[key].send([as_real(resolved(x))], int(key.source == self._process), CHANNELS[channel])
        return work

    def recv(self, x: Tensor, peer: int, channel: str) -> Work:
        key = self._key(Link(peer, self.rank, channel))
        work: Work = _links[key].recv([as_real(x)], int(key.source == self._process), CHANNELS[channel])
        return work

    def ranks_of(self, processes: Sequence[int]) -> tuple[int, ...]:
        """The program's ranks that run on ``processes``."""
        return tuple(self.processes.index(p) for p in processes if p in self.processes)

    def barrier(self) -> None:
        self._group(self.everyone).all_reduce(torch.zeros(1, device=self.device)).wait()
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
