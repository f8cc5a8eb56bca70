"""Measure by how much collectives and messages lengthen a computation that they follow.

In back-to-back calls, all ranks already wait for a transfer and its threads are awake. In a program, each rank reaches
a transfer from a computation, at its own time, and the transfer takes cores away from computation. On ranks that share
a machine it then takes several times as long. The reported seconds are therefore differences between a computation with
and without transfers.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from partitioner.profile.rank import open_device
from partitioner.profile.timer import CollectiveSample, synchronize_device
from partitioner.runtime.comm.group import Communicator, Pending, RankGroup
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.program.membership import PipelineEdge

_BETWEEN_S = 2e-3  # seconds of computation between transfers; about those of one layer

_SIZE = {"cpu": 256, "cuda": 4096}  # size of the square products
_LEAST_SHARE = 0.1  # least share of the time of back-to-back transfers


@dataclass(frozen=True)
class _TransferRun:
    """A transfer (a collective, or messages between two ranks) that can be repeated on this rank to measure it.

    ``start``: a function that runs ``calls`` transfers one after the other and waits for their end. Its argument
    ``compute`` is a function without arguments that runs a computation on this rank's device. ``compute`` is called
    before each transfer: on all ranks before a collective, on the sender before a message. ``calls``: the number of
    transfers of one call of ``start``, by which a measured time is divided. ``busy``: whether this rank takes part in
    the transfers.
    """

    start: Callable[[Callable[[], None]], None]
    calls: int = 1
    busy: bool = True


def time_collectives(
    op: str, num_ranks: int, sizes: Sequence[int], kind: str, active: int, repeats: int, budget_s: float
) -> list[CollectiveSample]:
    """Return one sample of the transfer ``op`` (name of a collective, or ``send``) for each of ``sizes`` (bytes of the
    whole tensor), with the seconds of the slowest rank. All ranks return equal samples.

    Groups of ``num_ranks`` neighbouring ranks among the first ``active`` ranks (at least one group) run at the same
    time. ``kind``: ``cuda`` or ``cpu``. ``repeats``: measurements of each size. ``budget_s``: seconds for each size.
    """
    device = open_device(kind)
    world = dist.get_world_size()
    communicator = TorchCommunicator(world, device)
    most = max(num_ranks, active)
    groups = [tuple(range(s, s + num_ranks)) for s in range(0, most - num_ranks + 1, num_ranks)]
    mine = next((g for g in groups if dist.get_rank() in g), None)
    pairs = [pair for g in groups for pair in itertools.pairwise(g) if dist.get_rank() in pair]
    links = [PipelineEdge(*way, "F") for pair in pairs for way in (pair, pair[::-1])]
    communicator.prepare([mine] if mine else [], links if op == "send" else [])
    samples = []
    for size in sizes:
        seconds = 0.0
        if mine is not None:
            run = (
                _build_message_run(communicator, mine, size)
                if op == "send"
                else _build_collective_run(communicator, op, mine, size)
            )
            seconds = _Timer(communicator.group(mine), device).seconds(run, repeats, budget_s)
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        samples.append(CollectiveSample(op, num_ranks, 4 * _compute_element_count(size, num_ranks), float(slowest)))
    return samples


def _compute_element_count(num_bytes: int, size: int) -> int:
    """Return the number of four-byte elements of a tensor of about ``num_bytes`` bytes. It is a multiple of ``size **
    3``, so that every collective over ``size`` ranks can divide the tensor evenly.
    """
    return max(1, num_bytes // 4 // size**3) * size**3


def _build_collective_run(communicator: Communicator, op: str, ranks: tuple[int, ...], num_bytes: int) -> _TransferRun:
    """Return the collective ``op`` over ``ranks`` as an object that repeats it on this rank, to be measured. One
    repetition is one collective. ``num_bytes``: about the size of the whole tensor. ``communicator``: connects this
    rank with the others."""
    group: RankGroup = communicator.group(ranks)
    size = group.size
    length = _compute_element_count(num_bytes, size)
    whole = torch.zeros(length // size, size, device=communicator.device)
    part = torch.zeros(length // size // size, size, device=communicator.device)
    starts: dict[str, Callable[[], Pending]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.all_gather(part, 0),
        "reduce_scatter": lambda: group.reduce_scatter(whole, 0),
        "all_to_all": lambda: group.all_to_all(part, 0, 0),
    }
    start = starts[op]

    def run(compute: Callable[[], None]) -> None:
        """Call ``compute``, a function without arguments that runs a computation on this rank; then run the collective,
        and wait for its end."""
        compute()
        start().wait()

    return _TransferRun(run)


def _build_message_run(communicator: Communicator, ranks: tuple[int, ...], num_bytes: int) -> _TransferRun:
    """Return a round trip of messages between the first two of ``ranks`` as an object that repeats it on this rank, to
    be measured. One repetition is two messages of about ``num_bytes`` bytes, each after a computation of its sender. On
    other ranks the object does nothing. ``communicator``: connects this rank with the others."""
    rank = dist.get_rank()
    tensor = torch.zeros(_compute_element_count(num_bytes, len(ranks)), device=communicator.device)
    first = rank == ranks[0]
    peer = ranks[1] if first else ranks[0]

    def there_and_back(compute: Callable[[], None]) -> None:
        """Send a message from the first rank to the second and one back, and wait for both. Each sender calls
        ``compute``, a function without arguments that runs a computation, before its message."""
        for sends in (first, not first):
            if sends:
                compute()
                communicator.send(tensor, peer, "F").wait()
            else:
                communicator.recv(tensor, peer, "F").wait()

    busy = rank in ranks[:2]
    return _TransferRun(there_and_back if busy else _skip_transfer, 2, busy)


def _skip_transfer(_: Callable[[], None]) -> None:
    """Do nothing. This function replaces the transfer on ranks that do not take part in it. Its argument, a computation
    to run before the transfer, is not called."""


def _skip_computation() -> None:
    """Do nothing. This replaces the computation where transfers are measured without one."""


class _Timer:
    """Measures how long the transfers of one group of ranks take. All ranks of the group call its methods together and
    repeat a transfer equally often; otherwise a rank would wait forever for another. The slowest rank determines the
    number of repetitions."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        """Prepare a computation of about two milliseconds, which runs between transfers. ``group``: the ranks that
        transfer, all of which must create a timer. ``device``: the device of this rank."""
        self.group, self.device = group, device
        size = _SIZE[device.type]
        a, b = (torch.randn(size, size, device=device) for _ in range(2))
        took = min(self._time_call_block(lambda: torch.mm(a, b), 3) for _ in range(3))
        count = max(1, round(_BETWEEN_S / self._reduce_to_slowest(took)))

        def compute() -> None:
            for _ in range(count):
                torch.mm(a, b)

        self.compute = compute

    def seconds(self, run: _TransferRun, repeats: int, budget_s: float) -> float:
        """Return the seconds by which one transfer (a collective or a message) lengthens a computation. ``run``:
        repeats the transfer on this rank.

        Two blocks are timed ``repeats`` times: computations alone, and the same computations with a transfer after
        each. The result is the median of the differences, per transfer, but at least a tenth of the seconds of a
        transfer without computations. ``budget_s``: approximate seconds for all measurements together.
        """

        def alone() -> None:
            """Run the computation without a transfer. On ranks that do not take part in the measured transfer, do
            nothing."""
            if run.busy:
                self.compute()

        bare = self._time_call_block(lambda: run.start(_skip_computation), 2) / run.calls
        whole = self._time_call_block(lambda: run.start(self.compute), 2)
        count = max(1, math.ceil(budget_s / repeats / max(self._reduce_to_slowest(whole), 1e-6)))
        differences = []
        for _ in range(repeats):
            computed = self._reduce_to_slowest(self._time_call_block(alone, count))
            both = self._reduce_to_slowest(self._time_call_block(lambda: run.start(self.compute), count)) / run.calls
            differences.append(both - computed)
        return max(statistics.median(differences), _LEAST_SHARE * self._reduce_to_slowest(bare))

    def _time_call_block(self, call: Callable[[], object], count: int) -> float:
        """Return the mean seconds of one call of ``call`` on this rank, over ``count`` calls that all ranks of the
        group begin together."""
        self.group.all_reduce(torch.zeros(1, device=self.device)).wait()
        synchronize_device(self.device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize_device(self.device)
        return (time.perf_counter() - start) / count

    def _reduce_to_slowest(self, seconds: float) -> float:
        """Return the maximum of ``seconds`` over the ranks of the group, all of which must call this."""
        value = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        return float(self.group.all_reduce(value, maximum=True).wait())
