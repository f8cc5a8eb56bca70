"""Find faster alternatives for the report: smaller clusters, nearby global batches, and offload.

A mesh uses all devices of its topology. A device that is slow, small or far away may cost more than it adds, and over
slow links a part of the cluster may be faster alone. A global batch that does not divide over the devices leaves some
of them idle; a nearby batch may take less time per sample. If memory is so short that activations are recomputed,
optimizer states in host memory may cost less time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from partitioner.errors import TimeLimitError
from partitioner.passes.errors import PartitionError
from partitioner.plan import WITHOUT, Baseline, Candidate, Estimate
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.evaluate.job import Job
from partitioner.solve.placement.regular import equal_levels
from partitioner.solve.search.space import build_search_space, list_candidates
from partitioner.topology import Topology
from partitioner.topology.files import with_nodes
from partitioner.topology.hosts import can_offload
from partitioner.units import format_percent, list_divisors

_MOST = 3  # greatest number of smaller clusters that are planned

_NEARLY = 0.9  # a part is planned if its computation alone takes less than this share of the best step time
_WORTH = 0.99  # greatest share of the best step time at which an alternative is reported
_LEAST_GAIN = f"{100 * (1 - _WORTH):g}%"
_AS_FAST = 1.005  # the same for a power of two of nodes, which need only be as fast


Best = Callable[[Job, float], Candidate]  # the best plan of a job that takes less than so many seconds


def smaller_clusters(topology: Topology) -> Iterator[Topology]:
    """Yield copies of ``topology`` without some of its devices, on which a plan may be faster because nothing waits for
    the removed devices: the slowest ones, those with the least memory or network bandwidth, or those of the smallest
    nodes. At most three copies are yielded, first those that lose the least computing speed."""
    paces, of_device = topology.paces
    rates = np.array([max(topology.types[kind].peak.values()) * speed for kind, speed in paces])[of_device]
    sizes = np.bincount(topology.node_of)[topology.node_of]
    lost: dict[tuple[str, ...], float] = {}
    for key in (rates, topology.usable.astype(float), topology.network_share, sizes.astype(float)):
        for level in np.unique(key)[1:].tolist():
            gone = np.flatnonzero(key < level)
            lost.setdefault(tuple(topology.names[d] for d in gone), float(rates[gone].sum()))
    for names in sorted(lost, key=lambda names: (lost[names], len(names)))[:_MOST]:
        try:
            yield topology.without(*names)
        except PartitionError:  # the remaining cluster cannot be described
            continue


def parts_alone(topology: Topology, most_times: float) -> Iterator[Topology]:
    """Yield parts of ``topology``, which has equal devices, that may be faster alone: one group of each level of links
    (such as one node), the largest first, and last a single device.

    ``most_times``: a part is left out if its computation alone would take at least ``most_times`` times as long as on
    all devices, because it has at most ``num_devices / most_times`` devices."""
    for kept in sorted({1, *(equal_levels(topology) or ())}, reverse=True):
        if kept == topology.num_devices or topology.num_devices >= most_times * kept:
            continue
        try:
            yield topology.without(*topology.names[kept:])
        except PartitionError:  # the remaining cluster cannot be described
            continue


def rounder_clusters(topology: Topology) -> Iterator[Topology]:
    """Yield a copy of ``topology``, which has equal devices, whose number of nodes is the next lower power of two.
    Batches, layers and weight dims often divide by such numbers. Nothing is yielded if the number of nodes is a power
    of two already.
    """
    nodes = 1 << (topology.num_nodes.bit_length() - 1)
    if nodes < topology.num_nodes and (fewer := with_nodes(topology, nodes)) is not None:
        yield fewer


def is_even(topology: Topology) -> bool:
    """Return whether all devices of ``topology`` have the same speed, memory and network bandwidth, and all its nodes
    the same number of devices."""
    own: tuple[NDArray[np.float64] | NDArray[np.int64], ...] = topology.usable, topology.network_share
    alike = all(len(np.unique(values)) == 1 for values in own)
    return alike and len(topology.paces[0]) == 1 and len({group.devices for group in topology.nodes}) == 1


def without_laggards(job: Job, best_s: float, lower_bound_s: Callable[[], float], best: Best) -> tuple[Baseline, ...]:
    """Return the smaller clusters whose best plan takes clearly less than ``best_s`` seconds per step, each with that
    plan. Clusters of equal devices whose number of nodes is a power of two are returned even if they are only about as
    fast.

    ``lower_bound_s``: function that returns a lower bound in seconds on the step with all devices; it is called only if
    the devices are equal. ``job``: the model, batch, cluster and constraints. ``best``: function of a job and a step
    time in seconds, which returns the best plan that takes less."""
    found = []
    clusters = [(topology, _WORTH) for topology in _list_smaller_clusters(job.topology, best_s, lower_bound_s)]
    if is_even(job.topology):
        clusters += [(topology, _AS_FAST) for topology in rounder_clusters(job.topology)]
    for topology, worth in clusters:
        fewer = replace(job, topology=topology)
        try:
            if _bound_job_seconds(fewer) >= worth * best_s:
                continue
            candidate = best(fewer, worth * best_s)
        except PartitionError:
            continue
        if (candidate.step_time or math.inf) < worth * best_s:
            found.append(
                Baseline(name=f"{WITHOUT} {_describe_removed_devices(topology, job.topology)}", candidate=candidate)
            )
    return tuple(found)


def _describe_removed_devices(smaller: Topology, whole: Topology) -> str:
    if is_even(whole):
        return f"{whole.num_devices - smaller.num_devices} of the {whole.num_devices} devices"
    return smaller.name.removeprefix(f"{whole.name} without ")


def _list_smaller_clusters(topology: Topology, best_s: float, lower_bound_s: Callable[[], float]) -> Iterator[Topology]:
    if not is_even(topology):
        return smaller_clusters(topology)
    least = lower_bound_s()
    return parts_alone(topology, _NEARLY * best_s / least if least else math.inf)


def _bound_job_seconds(job: Job) -> float:
    """Return a lower bound in seconds on the step of every plan of ``job`` (the model, batch, cluster and constraints).
    Raises a :class:`PartitionError` if it has no candidates.
    """
    return float(ModelBounds(job).times(list_candidates(build_search_space(job))).min())


_FARTHEST = 0.25  # greatest relative difference from the given batch

_WORTH_A_BATCH = 0.99  # greatest share of the time of a sample at which another batch is reported

JobOf = Callable[[int], Job]  # returns the job with another global batch


def batches_near(global_batch: int, num_devices: int) -> list[int]:
    """Return up to two global batches near ``global_batch`` that are easier to divide over the devices, such as
    multiples of their number, the nearest first. Return an empty list if ``global_batch`` already is a multiple or a
    divisor of ``num_devices``."""
    if global_batch % num_devices == 0 or num_devices % global_batch == 0:
        return []
    step = max(part for part in list_divisors(num_devices) if part <= global_batch)
    both = {global_batch // step * step, -(-global_batch // step) * step} - {0, global_batch}
    near = [batch for batch in both if abs(batch - global_batch) <= _FARTHEST * global_batch]
    return sorted(near, key=lambda batch: (abs(batch - global_batch), batch))


def faster_batches(job: Job, best_s: float, job_of: JobOf, best: Best) -> tuple[Baseline, ...]:
    """Return the nearest global batch with which each sample takes clearly less time than now, with its plan, as a
    tuple of one entry; empty if there is none. ``job``: the planning problem (model, batch, cluster and constraints).
    ``best_s``: seconds of a step with the present batch. ``job_of``: function of a batch, which returns the planning
    problem with this batch. ``best``: function of a planning problem and a step time in seconds, which returns the best
    plan that takes less."""
    pinned = job.constraints
    if not job.train or pinned.group_size is not None or pinned.data_shares is not None:
        return ()
    for batch in batches_near(job.global_batch, job.topology.num_devices):
        most_s = _WORTH_A_BATCH * best_s * batch / job.global_batch
        try:
            other = job_of(batch)
            if _bound_job_seconds(other) >= most_s:
                continue
            candidate = best(other, most_s)
        except PartitionError:
            continue
        if candidate.step_time is not None and candidate.step_time < most_s:
            return (Baseline(name=f"A global batch of {batch:,}", candidate=candidate, global_batch=batch),)
    return ()


_RECOMPUTED = 0.02  # least share of a step for recomputation at which offload is tried
_HOSTED = "Offload of the optimizer"  # name of its row in reports
UNFINISHED_OFFLOAD = (
    "Offload to host memory: a search with optimizer states in host memory did not end in its time and found no "
    "faster plan. Other kinds of offload were not tried."
)
UNTRIED_OFFLOAD = (
    "Offload to host memory was not tried: the plan fits without it, and recomputes activations for less than "
    f"{_RECOMPUTED:.0%} of its step."
)


def is_offload_worth_trying(job: Job, estimate: Estimate) -> bool:
    """Return whether optimizer states in host memory may make the step of the best plan shorter: the user did not fix
    offload, hosts have memory for optimizer states, and the plan recomputes activations for a noticeable time. ``job``:
    the planning problem (model, batch, cluster and constraints). ``estimate``: the times of a step of the plan."""
    free = job.train and job.constraints.offload is None and not job.further_samples
    recomputed = estimate.breakdown.get("recompute", 0.0) >= _RECOMPUTED * estimate.step_time
    return free and recomputed and can_offload(job.topology)


def faster_with_offload(hosted: Job, best_s: float, best: Best) -> tuple[Baseline, ...]:
    """Return the best plan of ``hosted``, the planning problem with optimizer states in host memory, as a tuple of one
    entry. If no plan takes clearly less than ``best_s`` seconds per step, the entry has a text that says so instead of
    a plan. If the search did not end in its time, the tuple is empty. ``best``: function of a planning problem and a
    step time in seconds, which returns the best plan that takes less. It raises :class:`PartitionError` if there is
    none, and :class:`TimeLimitError` if its time ended before."""
    most_s, offload = _WORTH * best_s, hosted.constraints.offload or ()
    slower = Baseline(name=_HOSTED, excluded=f"no plan found takes at least {_LEAST_GAIN} less", offload=offload)
    try:
        if _bound_job_seconds(hosted) >= most_s:
            return (slower,)
        candidate = best(hosted, most_s)
    except TimeLimitError:
        return ()
    except PartitionError:
        return (slower,)
    if (candidate.step_time or math.inf) >= most_s:
        return (slower,)
    return (Baseline(name=_HOSTED, candidate=candidate, offload=offload),)


def describe_offload_comparison(baselines: Iterable[Baseline], best_s: float) -> str:
    """Return a sentence for the certificate that compares a plan without offload, whose step takes ``best_s`` seconds,
    with plans that keep optimizer states in host memory, as found by :func:`faster_with_offload`. The result is empty
    if there was no comparison, or if it did not end. ``baselines``: the layouts that the report compares with the plan.
    """
    hosted = next((b for b in baselines if b.name == _HOSTED), None)
    if hosted is None:
        return ""
    if hosted.candidate is None:
        return (
            "Offload to host memory: a search with optimizer states in host memory found no plan whose step is at "
            f"least {_LEAST_GAIN} shorter. Other kinds of offload were not tried."
        )
    seconds = hosted.candidate.step_time or 0.0
    return (
        f"Offload to host memory: with optimizer states there, a step takes {format_percent(1 - seconds / best_s)} "
        "less. The plan stays without offload, because you did not ask for it "
        f'(offload="{"+".join(hosted.offload)}").'
    )
