"""Measurements that run on every rank: kernels, shared cores, and the overlap of computation with a collective.

All functions are called on every rank together. Their results hold no tensors, so that ranks can send them.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.profile.kernels import KernelCase, build_case_tensors
from partitioner.profile.timer import KernelSample, Overlap, median_seconds, synchronize_device
from partitioner.runtime.comm.group import RankGroup
from partitioner.runtime.comm.torch_backend import TorchCommunicator

_OVERLAP_BYTES = 4 << 20

_OVERLAP_SIZE = 256  # size of the square matrix products


def open_device(kind: str) -> torch.device:
    """Return the device of this rank: for ``kind`` ``cuda`` the GPU with the rank's number, which becomes PyTorch's
    current device; for ``cpu`` the CPU."""
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank())
        return torch.device("cuda", dist.get_rank())
    return torch.device("cpu")


def describe_gpu(kind: str) -> dict[str, int | str]:
    """Return a dict that describes this rank's GPU: ``name``, ``memory`` (bytes in total) and ``reserved`` (bytes that
    are in use without any tensor, such as the CUDA context). ``kind``: must be ``cuda``."""
    device = open_device(kind)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    tensors = torch.cuda.memory_reserved(device)
    return {"name": torch.cuda.get_device_name(device), "memory": total, "reserved": total - free - tensors}


def time_kernels(cases: Sequence[KernelCase], kind: str, active: int, budget_s: float) -> list[KernelSample]:
    """Return the measured times on this rank of the kernels ``cases``, which are timed one after the other, each on
    several ranks at the same time. Kernels that the device cannot run, such as those of a missing precision, are left
    out.

    ``kind``: ``cuda`` or ``cpu``. ``active``: the ranks 0 to ``active - 1`` measure; other ranks return an empty list.
    ``budget_s``: seconds to spend on each kernel.
    """
    device = open_device(kind)
    samples = []
    for case in cases:
        dist.barrier()
        if dist.get_rank() >= active:
            continue
        try:
            built = build_case_tensors(case, device)
            with torch.no_grad():
                seconds = median_seconds(built.run, device, budget_s)
        except (RuntimeError, NotImplementedError):
            continue
        samples.append(KernelSample(str(case), built.kernel, seconds))
    return samples


def time_sharing(active: Sequence[int], repeats: int, budget_s: float) -> list[list[float]]:
    """Measure how much slower ranks compute that share CPU cores. Return this rank's CPU seconds of a fixed piece of
    work: one row for each of ``repeats`` repetitions, with one entry for each number in ``active``. For a number ``n``,
    the ranks 0 to ``n - 1`` do the work at the same time; for other ranks the entry is NaN. All ranks must call this.

    Half of the work is limited by compute, half by memory. The work takes about ``budget_s`` seconds, which is long
    compared to the time slices of the operating system. CPU time is measured, because the time of waiting for a core
    also depends on other programs.
    """
    device = torch.device("cpu")
    product, copy = (
        build_case_tensors(case, device) for case in (KernelCase("mm", (256, 256, 256)), KernelCase("add", (4096,)))
    )

    def work(count: int) -> float:
        """Return the CPU seconds that this thread needs for ``count`` repetitions of the measured work: four small
        matrix products and an addition of large tensors."""
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


def time_overlap(num_ranks: int, kind: str, repeats: int) -> list[Overlap]:
    """Return ``repeats`` measurements, each with three times in seconds: matrix products alone, an all-reduce alone,
    and both started together. Each time is the longest of all ranks. The all-reduce is over the first ``num_ranks``
    ranks; other ranks return an empty list. ``kind``: ``cuda`` or ``cpu``."""
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
    reduce_s = _time_slowest_rank(lambda: group.all_reduce(shared).wait(), group, device)
    product_s = _time_slowest_rank(lambda: torch.mm(a, b), group, device)
    count = max(1, round(reduce_s / product_s))

    def products() -> None:
        """Run the matrix products that are measured alone and together with an all-reduce. They take about as long as
        the all-reduce."""
        for _ in range(count):
            torch.mm(a, b)

    def both() -> None:
        """Start the measured all-reduce, run the measured matrix products, and wait for the end of the all-reduce."""
        pending = group.all_reduce(shared)
        products()
        pending.wait()

    def reduce() -> None:
        """Run the measured all-reduce once, and wait for its end."""
        group.all_reduce(shared).wait()

    return [
        Overlap(
            _time_slowest_rank(products, group, device),
            _time_slowest_rank(reduce, group, device),
            _time_slowest_rank(both, group, device),
        )
        for _ in range(repeats)
    ]


def _time_slowest_rank(run: Callable[[], object], group: RankGroup, device: torch.device) -> float:
    """Return the wall-clock seconds of one call of ``run`` on the slowest rank of ``group``. All ranks of the group
    must call this function. ``device``: the device of this rank, which is synchronized before and after the call."""
    group.all_reduce(torch.zeros(1, device=device)).wait()
    synchronize_device(device)
    start = time.perf_counter()
    run()
    synchronize_device(device)
    took: Tensor = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    return float(group.all_reduce(took, maximum=True).wait())
