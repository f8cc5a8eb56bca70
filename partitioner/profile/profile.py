"""``profile_machine()``: measure this machine, fit the cost model, and describe the machine as a topology for
planning.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from partitioner.errors import TopologyError
from partitioner.profile import rank as on_ranks
from partitioner.profile import transfers
from partitioner.profile.fit import FitError, device_errors, fit_concurrent, fit_device, fit_level, level_errors
from partitioner.profile.host_overhead import open_issuing_plan, time_issuing
from partitioner.profile.kernels import (
    LAUNCH,
    ON_ROWS,
    SIZES,
    KernelCase,
    list_attention_cases,
    list_product_cases,
    on_rows,
)
from partitioner.profile.report import machine_yaml
from partitioner.profile.timer import CollectiveSample, KernelSample, Measurements
from partitioner.runtime.files import write_text
from partitioner.runtime.launch.process_pool import LocalRanks
from partitioner.topology import Topology
from partitioner.topology.detect import num_cores, physical_memory
from partitioner.topology.hardware import COLLECTIVES
from partitioner.units import list_divisors

Report = Callable[[str, int, int], None]  # current measurement, steps done, total steps


@dataclass(frozen=True)
class ProfileEffort:
    """How long and how often the measurements of one profile of a machine run.

    ``kernel_s``: seconds to spend on each kernel. ``collective_s``: seconds to spend on each size of each collective.
    ``sharing_s``: seconds of each repetition of the work that several processes run at the same time, to measure how
    much they slow each other down on shared CPU cores. ``repeats``: repetitions of each measurement that compares two
    times, such as the times of a computation with and without a collective. ``message_sizes``: sizes in bytes of the
    tensors that collectives and messages transfer.
    """

    kernel_s: float
    collective_s: float
    sharing_s: float
    repeats: int
    message_sizes: tuple[int, ...]


_KB, _MB = 1 << 10, 1 << 20

_EFFORTS = {
    True: ProfileEffort(0.02, 0.02, 0.1, 3, (16 * _KB, 256 * _KB, 2 * _MB)),
    False: ProfileEffort(0.15, 0.15, 0.3, 7, (4 * _KB, 16 * _KB, 64 * _KB, 256 * _KB, _MB, 4 * _MB, 16 * _MB)),
}
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Profile:
    """Result of measuring a machine. ``topology``: the fitted description, for planning. ``errors``: the errors of its
    predictions against the measured times. ``measurements``: the measured times. ``machine``: a text that names the
    machine."""

    topology: Topology
    errors: tuple[FitError, ...]
    measurements: Measurements
    machine: str

    def to_yaml(self) -> str:
        """Return the measured topology as the text of a topology file (YAML), with the errors of the fits as
        comments."""
        return machine_yaml(self.topology, self.errors, self.machine)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the measured topology to ``path`` as a topology file (YAML) and return the path. The file is replaced
        atomically, so that it is never partial."""
        return write_text(Path(path), self.to_yaml())


def profile_machine(
    num_ranks: int | None = None,
    *,
    device: str | None = None,
    quick: bool = False,
    progress: Report | None = None,
) -> Profile:
    """Measure the kernels, the launches and the transfers of this machine with ``num_ranks`` processes. Return the
    topology fitted to these times, with the errors of the fits.

    Args:
        num_ranks: processes that share the machine; ``None``: one for each GPU or, on a CPU, one for each core.
        device: ``cuda`` (over NCCL) or ``cpu`` (over Gloo); ``None``: ``cuda`` if a GPU is present, otherwise ``cpu``.
        quick: whether to make fewer and shorter measurements, in some seconds instead of a minute or two.
        progress: called before every measurement with its name, the number of measurements done, and their total.

    Ranks on one CPU compete for its cores. Kernels are timed on at most as many ranks at a time as there are cores. The
    number of ranks that can really compute at a time is measured with all ranks.

    Raise :class:`TopologyError` before anything is started if the device or that many ranks are not available. Raise
    :class:`partitioner.RankError` if a rank fails.
    """
    kind = _device_kind(device)
    count = _num_ranks(num_ranks, kind)
    effort, report = _EFFORTS[quick], progress or (lambda doing, done, total: None)
    with LocalRanks(count) as pool:
        steps = list(_list_profile_steps(pool, kind, count, quick, effort))
        measured = Measurements()
        for done, (doing, step) in enumerate(steps):
            report(doing, done, len(steps))
            step(measured)
        report("done", len(steps), len(steps))
        described = (
            pool.call(on_ranks.describe_gpu, kind, timeout=_TIMEOUT_S)[0] if kind == "cuda" else _describe_cpu(count)
        )
    return _fit_measurements(measured, kind, count, described)


Step = Callable[[Measurements], None]


def _list_profile_steps(
    pool: LocalRanks, kind: str, count: int, quick: bool, effort: ProfileEffort
) -> Iterator[tuple[str, Step]]:
    """Yield the measurements of a profile in the order in which they are made, as pairs (name to show, function). The
    function takes a ``Measurements`` object, makes the measurement, and adds the times to that object. ``pool``: the
    processes that measure. ``kind``: ``cuda`` or ``cpu``. ``count``: number of ranks. ``quick``: whether to use fewer
    sizes. ``effort``: how long to measure.
    """
    sizes = SIZES[kind, quick]
    active = min(count, num_cores()) if kind == "cpu" else count

    def kernels(cases: Sequence[KernelCase], num_active: int = active) -> Step:
        """Return a function that times the kernels ``cases`` on the first ``num_active`` ranks at the same time, and
        adds the median over these ranks to the ``Measurements`` that it is given."""

        def step(measured: Measurements) -> None:
            """Time the kernels ``cases`` on the first ``num_active`` ranks at the same time (arguments of the enclosing
            function). Append one sample for each kernel, with the median seconds over these ranks, to
            ``measured.kernels``."""
            samples = pool.call(on_ranks.time_kernels, cases, kind, num_active, effort.kernel_s, timeout=_TIMEOUT_S)
            measured.kernels += _take_median_samples(samples[:num_active])

        return step

    def collective(op: str, over: int) -> Step:
        """Return a function that times the collective named ``op`` (or ``send``, a message) in groups of ``over``
        ranks, and adds the times to the ``Measurements`` that it is given."""

        def step(measured: Measurements) -> None:
            """Time the collective ``op`` over ``over`` ranks (arguments of the enclosing function) for each message
            size. Append one sample for each size (name, number of ranks, bytes, seconds of the slowest rank) to
            ``measured.collectives``."""
            found: list[list[CollectiveSample]] = pool.call(
                transfers.time_collectives,
                op,
                over,
                effort.message_sizes,
                kind,
                active,
                effort.repeats,
                effort.collective_s,
                timeout=_TIMEOUT_S,
            )
            measured.collectives += found[0]

        return step

    def overlap(measured: Measurements) -> None:
        """Time computation alone, an all-reduce alone, and both together. Append the seconds of each repetition of this
        measurement to ``measured.overlaps``."""
        found = pool.call(on_ranks.time_overlap, active, kind, effort.repeats, timeout=_TIMEOUT_S)
        measured.overlaps += found[0]

    def issue(measured: Measurements) -> None:
        """Time how long the host takes to issue an operator of a plan to the device. Append the seconds of one operator
        to ``measured.issued_s``, one entry for each repetition."""
        with open_issuing_plan() as plan:
            measured.issued_s += pool.call(time_issuing, plan, kind, effort.repeats, timeout=_TIMEOUT_S)[0]

    def sharing(measured: Measurements) -> None:
        """Time equal work on as many ranks as there are cores, then on all ranks. For each repetition, append the
        median seconds over the working ranks to ``measured.few_s`` (some ranks) and ``measured.all_s`` (all ranks)."""
        rows = pool.call(on_ranks.time_sharing, (active, count), effort.repeats, effort.sharing_s, timeout=_TIMEOUT_S)
        for few, every in zip(*(_column_medians(rows, place) for place in (0, 1)), strict=True):
            measured.few_s.append(few)
            measured.all_s.append(every)

    yield "launches", kernels([LAUNCH] * effort.repeats)
    if kind == "cuda":
        yield "operators on the host", issue
    yield "matrix products", kernels(list_product_cases(sizes))
    yield "attention", kernels(list_attention_cases(sizes))
    for name in ON_ROWS:
        yield name, kernels(on_rows(sizes, [name]))
    if count > active:
        yield "shared cores", sharing
    for over in [n for n in list_divisors(count) if n > 1]:
        for op in COLLECTIVES:
            yield f"{op} over {over} ranks", collective(op, over)
    if count > 1:
        yield "messages", collective("send", 2)
    if active > 1:
        yield "overlap", overlap


def _take_median_samples(samples: Sequence[Sequence[KernelSample]]) -> list[KernelSample]:
    """Return, for each kernel, the sample with the median time over the ranks. ``samples``: for each rank, its samples
    of the kernels, in the same order on all ranks."""
    found = []
    for row in zip(*samples, strict=True):
        seconds = sorted(s.seconds for s in row)
        found.append(KernelSample(row[0].name, row[0].kernel, seconds[len(seconds) // 2]))
    return found


def _column_medians(rows: Sequence[Sequence[Sequence[float]]], place: int) -> list[float]:
    """Return, for each repetition of one measurement, the median seconds over the ranks that took part. ``rows``:
    seconds, indexed by rank, repetition and measurement; NaN if the rank took no part. ``place``: index of the
    measurement, from 0."""
    turns = zip(*([turn[place] for turn in rank] for rank in rows), strict=True)
    return [float(torch.tensor(turn).nanmedian()) for turn in turns]


def _fit_measurements(measured: Measurements, kind: str, count: int, described: dict[str, Any]) -> Profile:
    """Return the profile fitted to the times ``measured``: a topology of one node with ``count`` devices, and the
    errors of the fits. ``kind``: ``cuda`` or ``cpu``. ``described``: ``name``, ``memory`` (bytes) and ``reserved``
    (bytes that no process can use, such as those of the driver) of the device."""
    device = fit_device(
        measured.kernels,
        measured.overlaps,
        memory=described["memory"],
        reserved=described["reserved"],
        dispatch=float(torch.tensor(measured.issued_s).median()) if measured.issued_s else 0.0,
        fused_attention=kind != "cpu",
        whole_scatter=kind == "cpu",
        single_ring=kind == "cpu",
    )
    errors = device_errors(measured.kernels, device)
    levels = []
    if count > 1:
        level = fit_level(measured.collectives, "nccl" if kind == "cuda" else "gloo")
        levels = [level]
        errors += level_errors(measured.collectives, level)
    concurrent = fit_concurrent(measured, num_cores())
    topology = Topology(
        name=f"{platform.node() or 'local'}:{count}",
        nodes=({"type": kind, "devices": count, "concurrent": concurrent},),
        types={kind: device},
        levels=levels,
    )
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = f"{described['name']}, torch {torch.__version__}, {count} ranks, {when}"
    return Profile(topology, tuple(errors), measured, machine)


def _describe_cpu(count: int) -> dict[str, Any]:
    """Return a dict that describes this machine's CPU as the device of one of ``count`` ranks. ``name``: the processor
    and its number of cores. ``memory``: the machine's bytes of memory divided by ``count``. ``reserved``: bytes that no
    process can use, 0 for a CPU."""
    name = f"{platform.processor() or platform.machine()} CPU of {num_cores()} cores"
    return {"name": name, "memory": physical_memory() // count, "reserved": 0}


def _device_kind(device: str | None) -> str:
    """Return the kind of device to profile, ``cuda`` or ``cpu``: ``device`` if given, otherwise ``cuda`` if PyTorch
    sees a GPU and ``cpu`` if not. Raise :class:`TopologyError` for other names, and for ``cuda`` without a GPU."""
    there = torch.cuda.is_available()
    if device not in (None, "cpu", "cuda"):
        raise TopologyError(f"unknown device {device!r}; expected 'cpu' or 'cuda'")
    if device == "cuda" and not there:
        raise TopologyError("device 'cuda': torch sees no GPU here; use device='cpu', or install torch with CUDA")
    return device or ("cuda" if there else "cpu")


def _num_ranks(num_ranks: int | None, kind: str) -> int:
    """Return the number of ranks to profile: ``num_ranks`` or, if it is ``None``, one for each GPU or CPU core.
    ``kind``: ``cuda`` or ``cpu``. Raise :class:`TopologyError` if the number is below 1 or above the number of GPUs."""
    there = torch.cuda.device_count() if kind == "cuda" else num_cores()
    count = there if num_ranks is None else num_ranks
    if count < 1:
        raise TopologyError(f"a profile of {count} ranks; expected at least 1")
    if kind == "cuda" and count > there:
        raise TopologyError(f"a profile of {count} ranks on {there} GPUs; expected at most one rank per GPU")
    return count
