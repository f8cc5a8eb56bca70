"""What every rank runs: kernels, collectives and their overlap, timed together with the others.

All functions are called on every rank at once and return plain data. What one rank waits for, all wait for: a time is
the slowest rank's.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.profile.cases import Case, build
from partitioner.profile.clock import median_seconds, synchronize, undisturbed
from partitioner.profile.samples import CollectiveSample, KernelSample, Overlap
from runtime.groups import Communicator, Group, Link, Pending, TorchCommunicator

_OVERLAP_BYTES = 4 << 20
_OVERLAP_SIZE = 256  # of a square product


def open_device(kind: str) -> torch.device:
    """This rank's device: a GPU of its own, or the CPU."""
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank())
        return torch.device("cuda", dist.get_rank())
    return torch.device("cpu")


def describe(kind: str) -> dict[str, int | str]:
    """A GPU's name, memory, and the bytes of it that a process takes before it has a tensor."""
    device = open_device(kind)
    free, total = torch.cuda.mem_get_info(device)
    return {"name": torch.cuda.get_device_name(device), "memory": total, "reserved": total - free}


def time_kernels(cases: Sequence[Case], kind: str, active: int, budget_s: float) -> list[KernelSample]:
    """The kernels, one after the other, on ``active`` ranks at the same time; what this rank measured.

    What the device cannot do (a precision that it lacks) is left out.
    """
    device = open_device(kind)
    samples = []
    for case in cases:
        dist.barrier()
        if dist.get_rank() >= active:
            continue
        try:
            built = build(case, device)
            with torch.no_grad():
                seconds = median_seconds(built.run, device, budget_s)
        except (RuntimeError, NotImplementedError):
            continue
        samples.append(KernelSample(str(case), built.kernel, seconds))
    return samples


def time_sharing(active: Sequence[int], repeats: int, budget_s: float) -> list[list[float]]:
    """Seconds of the same work while ``active[i]`` ranks do it, in turns; a row for each turn, for this rank.

    Half of the work is bound by compute, half by memory. It takes about ``budget_s`` seconds in one piece: long against
    the time that the system lets one of several processes run. Seconds are those in which the rank ran: those in which
    it waited for a core say as much of other programs as of ranks.
    """
    device = torch.device("cpu")
    product, copy = (build(case, device) for case in (Case("mm", (256, 256, 256)), Case("add", (4096,))))

    def work(count: int) -> float:
        start = time.thread_time()
        for _ in range(count):
            for _ in range(4):
                product.run()
            copy.run()
        return time.thread_time() - start

    work(1)
    took = torch.tensor(work(3) / 3, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    count = max(1, round(budget_s / float(took)))
    rows: list[list[float]] = []
    for _ in range(repeats):
        row = []
        for ranks in active:
            dist.barrier()
            row.append(work(count) if dist.get_rank() < ranks else math.nan)
            dist.barrier()
        rows.append(row)
    return rows


def time_collectives(
    op: str, num_ranks: int, sizes: Sequence[int], kind: str, repeats: int, budget_s: float
) -> list[CollectiveSample]:
    """``op`` over groups of ``num_ranks`` neighbours, all groups at once; as the slowest rank saw it, on all ranks."""
    device = open_device(kind)
    world = dist.get_world_size()
    communicator = TorchCommunicator(world, device)
    groups = [tuple(range(s, s + num_ranks)) for s in range(0, world - num_ranks + 1, num_ranks)]
    mine = next((g for g in groups if dist.get_rank() in g), None)
    links = [Link(a, b, "F") for g in groups for a, b in itertools.pairwise(g) if dist.get_rank() in (a, b)]
    communicator.prepare([mine] if mine else [], links if op == "send" else [])
    samples = []
    for size in sizes:
        seconds = 0.0
        if mine is not None:
            run = _transfer(communicator, mine, size) if op == "send" else _collective(communicator, op, mine, size)
            seconds = _together(run, mine, communicator, device, repeats, budget_s)
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        samples.append(CollectiveSample(op, num_ranks, 4 * _length(size, num_ranks), float(slowest)))
    return samples


@dataclass(frozen=True)
class _Run:
    """What is timed on this rank, and how many transfers it is."""

    start: Callable[[], object]
    calls: int = 1

    def __call__(self) -> None:
        self.start()


def _nothing() -> None:
    """This rank has no part in it."""


def _length(num_bytes: int, size: int) -> int:
    """Elements of four bytes that every collective over ``size`` ranks can divide; about ``num_bytes``."""
    return max(1, num_bytes // 4 // size**3) * size**3


def _collective(communicator: Communicator, op: str, ranks: tuple[int, ...], num_bytes: int) -> _Run:
    group: Group = communicator.group(ranks)
    size = group.size
    length = _length(num_bytes, size)
    whole = torch.zeros(length // size, size, device=communicator.device)
    part = torch.zeros(length // size // size, size, device=communicator.device)
    starts: dict[str, Callable[[], Pending]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.all_gather(part, 0),
        "reduce_scatter": lambda: group.reduce_scatter(whole, 0),
        "all_to_all": lambda: group.all_to_all(part, 0, 0),
    }
    start = starts[op]
    return _Run(lambda: start().wait())


def _transfer(communicator: Communicator, ranks: tuple[int, ...], num_bytes: int) -> _Run:
    """There and back between the first two of ``ranks``: two messages."""
    rank = dist.get_rank()
    if rank not in ranks[:2]:
        return _Run(_nothing, 2)
    tensor = torch.zeros(_length(num_bytes, len(ranks)), device=communicator.device)
    first = rank == ranks[0]
    peer = ranks[1] if first else ranks[0]

    def there_and_back() -> None:
        for sends in (first, not first):
            if sends:
                communicator.send(tensor, peer, "F").wait()
            else:
                communicator.recv(tensor, peer, "F").wait()

    return _Run(there_and_back, 2)


def _together(
    run: _Run, ranks: tuple[int, ...], communicator: Communicator, device: torch.device, repeats: int, budget_s: float
) -> float:
    """Seconds of a call, undisturbed; all ranks run the same number of calls, which the first one sets."""
    run()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    slowest = float(communicator.group(ranks).all_reduce(took, maximum=True).wait())
    count = max(1, math.ceil(budget_s / repeats / max(slowest, 1e-6)))
    blocks = []
    for _ in range(repeats):
        communicator.group(ranks).all_reduce(torch.zeros(1, device=device)).wait()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            run()
        synchronize(device)
        blocks.append((time.perf_counter() - start) / count / run.calls)
    return undisturbed(blocks)


def time_overlap(num_ranks: int, kind: str, repeats: int) -> list[Overlap]:
    """Products on their own, an all-reduce over ``num_ranks`` ranks on its own, and both started together."""
    device = open_device(kind)
    communicator = TorchCommunicator(dist.get_world_size(), device)
    ranks = tuple(range(num_ranks))
    inside = dist.get_rank() in ranks
    communicator.prepare([ranks] if inside else [], [])
    if not inside:
        return []
    group = communicator.group(ranks)
    shared = torch.zeros(_OVERLAP_BYTES // 4, device=device)
    a, b = (torch.randn(_OVERLAP_SIZE, _OVERLAP_SIZE, device=device) for _ in range(2))
    reduce_s = _timed(lambda: group.all_reduce(shared).wait(), group, device)
    product_s = _timed(lambda: torch.mm(a, b), group, device)
    count = max(1, round(reduce_s / product_s))

    def products() -> None:
        for _ in range(count):
            torch.mm(a, b)

    def both() -> None:
        pending = group.all_reduce(shared)
        products()
        pending.wait()

    def reduce() -> None:
        group.all_reduce(shared).wait()

    return [
        Overlap(_timed(products, group, device), _timed(reduce, group, device), _timed(both, group, device))
        for _ in range(repeats)
    ]


def _timed(run: Callable[[], object], group: Group, device: torch.device) -> float:
    """Seconds of ``run`` on the slowest rank of ``group``."""
    group.all_reduce(torch.zeros(1, device=device)).wait()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    took: Tensor = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    return float(group.all_reduce(took, maximum=True).wait())
