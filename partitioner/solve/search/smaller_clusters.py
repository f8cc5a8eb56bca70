"""Alternatives for the report: smaller clusters and nearby global batches that are faster.

A mesh uses all devices of its topology. A device that is slow, small or far away may cost more than it adds, and over
slow links a part of the cluster may be faster alone. A global batch that does not divide over the devices leaves some
of them idle; a nearby batch may take less time per sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from partitioner.passes.errors import PartitionError
from partitioner.plan import WITHOUT, Baseline, Candidate
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.evaluate.job import Job
from partitioner.solve.placement.regular import equal_levels
from partitioner.solve.search.space import SearchSpace, list_candidates
from partitioner.topology import Topology
from partitioner.topology.files import with_nodes
from partitioner.units import list_divisors

_MOST = 3  # smaller clusters that are looked at

_NEARLY = 0.9  # of what computes alone, that a step on fewer devices may reach
_WORTH = 0.99  # of the step's time: what is hardly faster is not worth a word
_AS_FAST = 1.005  # of the step's time: what fewer nodes may take to be called as fast

SpaceOf = Callable[[Job, ModelBounds], SearchSpace]

Best = Callable[[Job, float], Candidate]  # that takes less than so many seconds


def smaller_clusters(topology: Topology) -> Iterator[Topology]:
    """``topology`` without its slowest devices, the smallest, those with the least of the network, or the smallest
    nodes; those that lose least of its speed first."""
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
        except PartitionError:  # what is left cannot be written down
            continue


def parts_alone(topology: Topology, most_times: float) -> Iterator[Topology]:
    """A group of each level of an even ``topology``, the largest first, and a single device; those that have less than
    ``most_times`` fewer devices."""
    for kept in sorted({1, *(equal_levels(topology) or ())}, reverse=True):
        if kept == topology.num_devices or topology.num_devices >= most_times * kept:
            continue
        try:
            yield topology.without(*topology.names[kept:])
        except PartitionError:  # what is left cannot be written down
            continue


def rounder_clusters(topology: Topology) -> Iterator[Topology]:
    """An even ``topology`` with fewer nodes, as many as a power of two, where it has more: numbers that batches, layers
    and dims of weights divide by."""
    nodes = 1 << (topology.num_nodes.bit_length() - 1)
    if nodes < topology.num_nodes and (fewer := with_nodes(topology, nodes)) is not None:
        yield fewer


def is_even(topology: Topology) -> bool:
    """Whether no device is slower, smaller or farther than another, and all nodes have as many."""
    own: tuple[NDArray[np.float64] | NDArray[np.int64], ...] = topology.usable, topology.network_share
    alike = all(len(np.unique(values)) == 1 for values in own)
    return alike and len(topology.paces[0]) == 1 and len({group.devices for group in topology.nodes}) == 1


def without_laggards(
    job: Job, best_s: float, lower_bound_s: Callable[[], float], space_of: SpaceOf, best: Best
) -> tuple[Baseline, ...]:
    """Smaller clusters that do the job's step in less than ``best_s`` (or, of a power of two of nodes, in as much),
    each with its plan (``best``); ``lower_bound_s``: what no step takes less than on all devices, asked for where these
    are even."""
    found = []
    clusters = [(topology, _WORTH) for topology in _list_smaller_clusters(job.topology, best_s, lower_bound_s)]
    if is_even(job.topology):
        clusters += [(topology, _AS_FAST) for topology in rounder_clusters(job.topology)]
    for topology, worth in clusters:
        fewer = replace(job, topology=topology)
        try:
            if _bound_job_seconds(fewer, space_of) >= worth * best_s:
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


def _bound_job_seconds(job: Job, space_of: SpaceOf) -> float:
    """What no plan of ``job`` goes below. Raises a :class:`PartitionError` where there is none."""
    bounds = ModelBounds(job)
    return float(bounds.times(list_candidates(space_of(job, bounds))).min())


_FARTHEST = 0.25  # of the batch, that another one may differ by

_WORTH_A_BATCH = 0.99  # of a sample's time: what is hardly faster is not worth a word

JobOf = Callable[[int], Job]  # of another global batch


def batches_near(global_batch: int, num_devices: int) -> list[int]:
    """Batches that divide over the devices, or their divisors, the nearest first; none where ``global_batch`` does."""
    if global_batch % num_devices == 0 or num_devices % global_batch == 0:
        return []
    step = max(part for part in list_divisors(num_devices) if part <= global_batch)
    both = {global_batch // step * step, -(-global_batch // step) * step} - {0, global_batch}
    near = [batch for batch in both if abs(batch - global_batch) <= _FARTHEST * global_batch]
    return sorted(near, key=lambda batch: (abs(batch - global_batch), batch))


def faster_batches(job: Job, best_s: float, job_of: JobOf, space_of: SpaceOf, best: Best) -> tuple[Baseline, ...]:
    """The nearest batch whose samples take less time than those of a step of ``best_s``, with its plan (``best``)."""
    pinned = job.constraints
    if not job.train or pinned.group_size is not None or pinned.data_shares is not None:
        return ()
    for batch in batches_near(job.global_batch, job.topology.num_devices):
        most_s = _WORTH_A_BATCH * best_s * batch / job.global_batch
        try:
            other = job_of(batch)
            bounds = ModelBounds(other)
            if float(bounds.times(list_candidates(space_of(other, bounds))).min()) >= most_s:
                continue
            candidate = best(other, most_s)
        except PartitionError:
            continue
        if candidate.step_time is not None and candidate.step_time < most_s:
            return (Baseline(name=f"A global batch of {batch:,}", candidate=candidate, global_batch=batch),)
    return ()
