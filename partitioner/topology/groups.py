"""Compute the communication groups of a mesh on a topology: the links over which the ranks of each mesh axis
communicate.

Ranks are numbered along the mesh axes, nested in the order of ``partitioner.runtime.program.mesh.AXES``, outermost
first. A placement maps each rank to a device; without a placement, rank ``i`` is on device ``i``. All groups of an axis
communicate at the same time, and a pipeline stage waits for the slowest one.

If all devices and levels are equal, one group can represent all groups over the same axes. A nesting gives each level a
factor of each axis (``partitioner/solve/placement/regular.py``). The steps of a nesting are the cumulative numbers of
ranks, from the innermost, at which another axis, or the part of an axis on another level, begins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from partitioner.errors import TopologyError
from partitioner.runtime.program.mesh import AXES, expert_mesh, num_ranks
from partitioner.topology.fabric import inside_levels, least_share, links_at_once
from partitioner.topology.group import Group, select_slowest_group
from partitioner.topology.hardware import Link
from partitioner.topology.pair_links import group_of, hops_of, ring_hops, select_card_neighbours, spread_of
from partitioner.topology.topology import Topology

Devices = NDArray[np.int64] | Sequence[int] | None  # device index of each rank; None: device i for rank i


def rank_grid(mesh: Mapping[str, int], *axes: str) -> NDArray[np.int64]:
    """Return the ranks of every communication group over the mesh axes named ``axes``, shape ``[num_groups,
    group_size]``, each row in ascending order. ``mesh``: number of ranks by name of the axis."""
    sizes = [mesh.get(axis, 1) for axis in AXES]
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    inner = [AXES.index(axis) for axis in AXES if axis in axes]
    grid = np.moveaxis(grid, inner, range(len(AXES) - len(inner), len(AXES)))
    return np.ascontiguousarray(grid).reshape(-1, math.prod(sizes[i] for i in inner))


def expert_grid(mesh: Mapping[str, int], etp: int = 0) -> NDArray[np.int64]:
    """Return the ranks of every group over the mesh axis ``ep`` (expert parallelism), one group per row. ``mesh``:
    number of ranks by name of the axis. ``etp``: number of ranks over which the matrices of one expert are sharded; 0:
    the size of the axis ``tp``."""
    sizes = expert_mesh(mesh, etp)
    return np.arange(num_ranks(mesh)).reshape(-1, sizes["ep"], sizes["etp"]).transpose(0, 2, 1).reshape(-1, sizes["ep"])


def map_ranks_to_devices(topology: Topology, mesh: Mapping[str, int], devices: Devices = None) -> NDArray[np.int64]:
    """Return the device index in ``topology`` of every rank: ``devices`` if given, else device ``i`` for rank ``i``.
    ``mesh``: number of ranks by name of the axis.

    Raise :class:`TopologyError` if the mesh has more ranks than the topology has devices.
    """
    world = num_ranks(mesh)
    if world > topology.num_devices:
        raise TopologyError(
            f"a mesh of {world} ranks on the topology {topology.name!r} of {topology.num_devices} devices; "
            "expected at most one rank per device"
        )
    return np.arange(world) if devices is None else np.asarray(devices, dtype=np.int64)


def axis_groups(topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None) -> list[Group]:
    """Return the distinct communication groups that the ranks form over the mesh axes named ``axes``. Groups with equal
    links are listed once. ``topology``: the devices and their links. ``mesh``: number of ranks by name of the axis.
    ``devices``: the device index of each rank; ``None`` for device ``i`` of rank ``i``.
    """
    return row_groups(topology, map_ranks_to_devices(topology, mesh, devices)[rank_grid(mesh, *axes)])


def row_groups(topology: Topology, rows: NDArray[np.int64]) -> list[Group]:
    """Return the distinct communication groups among ``rows``. Groups with equal links are listed once. ``rows``:
    device indices in ``topology``, one group per row, shape ``[num_groups, group_size]``."""
    return list(dict.fromkeys(kinds_of(topology, rows)[1]))


def axis_group(topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None) -> Group:
    """Return the slowest communication group that the ranks form over the mesh axes named ``axes``. ``topology``: the
    devices and their links. ``mesh``: number of ranks by name of the axis. ``devices``: the device index of each rank;
    ``None`` for device ``i`` of rank ``i``.
    """
    return select_slowest_group(axis_groups(topology, mesh, *axes, devices=devices))


def stage_groups(
    topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None, ring: bool = False
) -> tuple[Group, ...]:
    """Return for each pipeline stage the slowest of the communication groups that its ranks form over the mesh axes
    named ``axes`` (without ``pp``).

    ``topology``: the devices and their links. ``mesh``: number of ranks by name of the axis. ``devices``: the device
    index of each rank; ``None`` for device ``i`` of rank ``i``. ``ring``: whether to compute also the latency and
    bandwidth of messages around the group's ring.
    """
    numbers, groups = replica_groups(topology, mesh, 1, *axes, devices=devices, ring=ring)
    return tuple(groups[k] for k in numbers[:, 0].tolist())


def kinds_of(topology: Topology, rows: NDArray[np.int64], ring: bool = False) -> tuple[NDArray[np.int64], list[Group]]:
    """Sort communication groups into kinds: groups of one kind have equal links. Return an array with the index of each
    group's kind, and the list of kinds, one :class:`Group` for each. ``rows``: device indices in ``topology``, one
    group per row. ``ring``: whether to compute also the latency and bandwidth of messages around each group's ring,
    while all groups communicate."""
    if rows.shape[1] == 1:
        return np.zeros(len(rows), dtype=np.int64), [Group(1)]
    columns = list(_compute_cost_traits(topology, rows))
    hops = ring_hops(topology, rows) if ring else None
    if hops is not None:
        columns += [column for each in hops for column in each.T]
    traits = np.stack(columns, axis=1)
    first, kinds = np.zeros(1, dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    if not (traits == traits[0]).all():
        _, first, kinds = np.unique(traits, axis=0, return_index=True, return_inverse=True)
    groups = [group_of(topology, rows[i]) for i in first]
    if hops is not None:
        groups = [replace(g, hops=hops_of(hops[0][i], hops[1][i])) for g, i in zip(groups, first, strict=True)]
    return kinds.reshape(-1), groups


def _compute_cost_traits(topology: Topology, rows: NDArray[np.int64]) -> Iterator[NDArray[np.float64]]:
    """Yield arrays of shape ``[num_groups]``, with one number for each communication group. Groups that have equal
    numbers in all arrays take equally long for every collective. ``rows``: device indices in ``topology``, one group
    per row."""
    yield np.zeros(len(rows))
    for groups in topology.groups:
        yield from (column.astype(np.float64) for column in spread_of(groups[rows]))
    below = rows
    for storey in topology.storeys:
        if storey.shares is not None:
            yield least_share(below, storey.shares[rows])
        below = storey.joined[rows]
    if topology.pattern_kinds:
        inside = inside_levels(topology, rows)
        numbers = {level: n for n, level in enumerate(dict.fromkeys(inside))}
        yield np.array([numbers[level] for level in inside], dtype=np.float64)
    if topology.own_links:
        yield _own_kinds(topology, rows)


def _own_kinds(topology: Topology, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number for each communication group, shape ``[num_groups]``. Groups have equal numbers if their direct
    links (links that ``topology`` gives for single pairs of devices) make collectives equally fast. The number is 0 if
    no direct link connects two devices of the group. ``rows``: device indices, one group per row."""
    paired = np.array(sorted({i for pair in topology.own_links for i in pair}))
    pairs = np.array(list(topology.own_links))
    numbers: dict[Group, int] = {}
    column = np.zeros(len(rows))
    for i in np.flatnonzero(np.isin(rows, paired).sum(axis=1) > 1).tolist():
        if np.isin(pairs, rows[i]).all(axis=1).any():
            column[i] = numbers.setdefault(group_of(topology, rows[i]), len(numbers) + 1)
    return column


def stage_ranks(mesh: Mapping[str, int]) -> list[range]:
    """Return the ranks of each pipeline stage. They are consecutive, since ``pp`` is the outermost mesh axis. ``mesh``:
    number of ranks by name of the axis."""
    stages = mesh.get("pp", 1)
    size = num_ranks(mesh) // stages
    return [range(s * size, (s + 1) * size) for s in range(stages)]


def stage_links(topology: Topology, mesh: Mapping[str, int], devices: Devices = None) -> tuple[Link, ...]:
    """Return for each pair of consecutive pipeline stages the slowest of the links between their ranks, while all ranks
    of a stage send. The result is empty for a single stage. ``topology``: the devices and their links. ``mesh``: number
    of ranks by name of the axis. ``devices``: the device index of each rank; ``None`` for device ``i`` of rank ``i``.
    """
    stages = mesh.get("pp", 1)
    grid = map_ranks_to_devices(topology, mesh, devices).reshape(stages, -1)
    return _slowest_links(topology, grid[:-1], grid[1:]) if stages > 1 else ()


def find_stage_link(
    topology: Topology, mesh: Mapping[str, int], stage: int, other: int, devices: Devices = None
) -> Link:
    """Return the slowest of the links of ``topology`` between the ranks of two pipeline stages, while all ranks of a
    stage send. ``mesh``: number of ranks by name of the axis. ``stage``, ``other``: indices of the sending and the
    receiving stage, from 0. ``devices``: the device index of each rank; ``None`` for device ``i`` of rank ``i``."""
    grid = map_ranks_to_devices(topology, mesh, devices).reshape(mesh.get("pp", 1), -1)
    return _slowest_links(topology, grid[stage : stage + 1], grid[other : other + 1])[0]


def _slowest_links(topology: Topology, here: NDArray[np.int64], there: NDArray[np.int64]) -> tuple[Link, ...]:
    """Return one link for each row, for messages between all pairs of devices of all rows at the same time. The link
    has the name and bandwidth of the pair with the least bandwidth in the row, and the longest latency of all pairs in
    the row. ``topology``: the cluster. ``here``, ``there``: indices of the sending and the receiving devices, both of
    shape ``[rows, pairs]``."""
    bandwidth, latency = links_at_once(topology, here, there)
    narrowest = np.lexsort((-latency, bandwidth), axis=1)[:, 0]
    return tuple(
        topology.link(int(here[row, k]), int(there[row, k])).model_copy(
            update={"bandwidth": float(bandwidth[row, k]), "latency": float(latency[row].max())}
        )
        for row, k in enumerate(narrowest.tolist())
    )


def stage_capacity(topology: Topology, mesh: Mapping[str, int], devices: Devices = None) -> tuple[int, ...]:
    """Return, for each pipeline stage, the bytes that a rank may use: the usable memory of its smallest device, minus
    the memory that the communication library needs for the rank's groups. ``topology``: the devices. ``mesh``: number
    of ranks by name of the axis. ``devices``: the device index of each rank; ``None`` for device ``i`` of rank ``i``.
    """
    paces, of_device = topology.paces
    grid = map_ranks_to_devices(topology, mesh, devices).reshape(mesh.get("pp", 1), -1)
    each = np.array([topology.types[kind].communicator for kind, _ in paces], dtype=np.int64)[of_device]
    free = topology.usable - num_communicators(mesh) * each
    return tuple(int(n) for n in np.maximum(free, 0)[grid].min(axis=1))


def num_communicators(mesh: Mapping[str, int]) -> int:
    """Return the number of communication groups of a rank, each of which needs memory. There are up to three: one over
    the mesh axis ``tp``, one over ``dp`` and ``cp`` together, and one over ``pp``. Groups of one rank do not count.
    ``mesh``: number of ranks by name of the axis."""
    sizes = mesh.get("tp", 1), mesh.get("dp", 1) * mesh.get("cp", 1), mesh.get("pp", 1)
    return sum(size > 1 for size in sizes)


def stage_paces(
    topology: Topology, mesh: Mapping[str, int], devices: Devices = None
) -> tuple[tuple[tuple[str, float], ...], ...]:
    """Return for each pipeline stage the distinct pairs (name of the device type, speed factor) of its devices in
    ``topology``. ``mesh``: number of ranks by name of the axis. ``devices``: the device index of each rank; ``None``
    for device ``i`` of rank ``i``."""
    paces, of_device = topology.paces
    if len(paces) == 1:
        return (tuple(paces),) * mesh.get("pp", 1)
    grid = map_ranks_to_devices(topology, mesh, devices).reshape(mesh.get("pp", 1), -1)
    return tuple(tuple(paces[k] for k in np.unique(of_device[row]).tolist()) for row in grid)


def replica_paces(
    topology: Topology, mesh: Mapping[str, int], devices: Devices = None
) -> tuple[NDArray[np.int64], list[tuple[tuple[str, float], ...]]]:
    """Return, for each data-parallel rank in each pipeline stage, the set of pairs (name of the device type, speed
    factor) of its devices in ``topology``. ``mesh``: number of ranks by name of the axis. ``devices``: the device index
    of each rank; ``None`` for device ``i`` of rank ``i``.

    The first result has shape ``[pp, dp]``: for each stage and data-parallel rank, the index of its set in the second
    result. The second result lists the distinct sets, each as a tuple.
    """
    paces, of_device = topology.paces
    grid = of_device[map_ranks_to_devices(topology, mesh, devices)].reshape(mesh.get("pp", 1), mesh.get("dp", 1), -1)
    numbers, sets = _find_kind_sets(grid, len(paces))
    return numbers, [tuple(paces[k] for k in own) for own in sets]


def replica_groups(
    topology: Topology, mesh: Mapping[str, int], dp: int, *axes: str, devices: Devices = None, ring: bool = False
) -> tuple[NDArray[np.int64], list[Group]]:
    """Return the slowest communication group over the mesh axes named ``axes`` (without ``pp``) inside each of ``dp``
    replicas of the model in each pipeline stage.

    The first result has shape ``[pp, dp]``: for each stage and replica, the index of its group in the second result.
    The second lists the distinct groups. ``topology``: the devices and their links. ``mesh``: number of ranks by name
    of the axis; the ranks of a replica are consecutive. ``devices``: the device index of each rank; ``None`` for device
    ``i`` of rank ``i``. ``ring``: whether to compute also the latency and bandwidth of messages around the group's
    ring.
    """
    assert "pp" not in axes, axes
    kinds, groups = kinds_of(topology, map_ranks_to_devices(topology, mesh, devices)[rank_grid(mesh, *axes)], ring)
    # groups of one stage follow each other, since pp is the outermost axis
    numbers, sets = _find_kind_sets(kinds.reshape(mesh.get("pp", 1), dp, -1), len(groups))
    return numbers, [select_slowest_group([groups[k] for k in own]) for own in sets]


def _find_kind_sets(kinds: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], list[list[int]]]:
    """Find the set of kinds that occur in each row of ``kinds``, that is, along its last dim. Return two values: an
    array with one entry for each row, the index of its set; and the list of the distinct sets, each in ascending order.
    ``kinds``: numbers of kinds (such as of device types), from 0 to ``count - 1``."""
    shape, rows = kinds.shape[:-1], kinds.reshape(-1, kinds.shape[-1])
    if count == 1:
        return np.zeros(shape, dtype=np.int64), [[0]]
    has = np.zeros((len(rows), count), dtype=bool)
    np.put_along_axis(has, rows, values=True, axis=1)
    sets, numbers = np.unique(has, axis=0, return_inverse=True)
    return numbers.reshape(shape), [np.flatnonzero(own).tolist() for own in sets]


def reference_type(topology: Topology) -> str:
    """Return the name of the device type of ``topology`` for which the sharding is chosen: the one with the most
    devices. Among types with equally many devices, it is the first in alphabetical order."""
    paces, of_device = topology.paces
    counts: Counter[str] = Counter()
    for (kind, _), count in zip(paces, np.bincount(of_device, minlength=len(paces)).tolist(), strict=True):
        counts[kind] += count
    return min(counts, key=lambda kind: (-counts[kind], kind))


def is_nested(sizes: Iterable[int], steps: Sequence[int]) -> bool:
    """Return whether all communication groups over each mesh axis are known to have equal links, so that one of them
    represents all. Ranks are placed on devices in consecutive runs, one inside the other: for example, 8 ranks inside a
    node and 32 inside a rail. For each axis, take the product of its size and the sizes of the axes inside it. The
    result is true if each product divides the next longer run and is a multiple of the next shorter run.

    ``sizes``: numbers of ranks of the mesh axes, the innermost first. ``steps``: lengths of the runs in ranks,
    ascending.
    """
    for product in accumulate(sizes, mul):
        above = bisect_left(steps, product)
        if above == len(steps) or steps[above] % product or product % steps[max(above - 1, 0)]:
            return False
    return True


def first_group(
    topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None, ring: bool = False
) -> Group:
    """Return the communication group over the mesh axes named ``axes`` that contains rank 0. ``topology``: the devices
    and their links. ``mesh``: number of ranks by name of the axis. ``devices``: the device index of each rank; ``None``
    for device ``i`` of rank ``i``. ``ring``: whether to compute also the latency and bandwidth of messages around the
    group's ring.
    """
    on = map_ranks_to_devices(topology, mesh, devices).reshape(-1)
    if ring:
        rows = select_card_neighbours(topology, on[rank_grid(mesh, *axes)])
        kinds, groups = kinds_of(topology, rows, ring=True)
        return groups[int(kinds[0])]
    grid = on.reshape([mesh.get(axis, 1) for axis in AXES])
    return group_of(topology, grid[tuple(slice(None) if axis in axes else 0 for axis in AXES)].reshape(-1))
