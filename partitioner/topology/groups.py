"""Groups of a placed mesh: the links over which the ranks of each mesh axis communicate.

Ranks are numbered along the mesh's axes, nested in the order of ``partitioner.runtime.program.mesh.AXES``, outermost
first. A placement maps each rank to a device; without one, rank ``i`` is on device ``i``. All groups of an axis work at
the same time, and a stage waits for the slowest one.

Where ranks are nested in levels that are all alike, one group stands for all groups over the same axes. A nesting gives
every level a factor of every axis (``partitioner/solve/placement/regular.py``). The steps of a nesting are the numbers
of ranks, from the inside out, after which another axis, or the part of an axis on another level, begins.
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

Devices = NDArray[np.int64] | Sequence[int] | None  # by rank; None: each rank on its namesake


def rank_grid(mesh: Mapping[str, int], *axes: str) -> NDArray[np.int64]:
    """The ranks of every group over ``axes``, shape ``[num_groups, group_size]``, each in order of rank."""
    sizes = [mesh.get(axis, 1) for axis in AXES]
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    inner = [AXES.index(axis) for axis in AXES if axis in axes]
    grid = np.moveaxis(grid, inner, range(len(AXES) - len(inner), len(AXES)))
    return np.ascontiguousarray(grid).reshape(-1, math.prod(sizes[i] for i in inner))


def expert_grid(mesh: Mapping[str, int], etp: int = 0) -> NDArray[np.int64]:
    """All groups of ``ep``, one per row; ``etp``: ranks that share one expert (0: ``tp``)."""
    sizes = expert_mesh(mesh, etp)
    return np.arange(num_ranks(mesh)).reshape(-1, sizes["ep"], sizes["etp"]).transpose(0, 2, 1).reshape(-1, sizes["ep"])


def map_ranks_to_devices(topology: Topology, mesh: Mapping[str, int], devices: Devices = None) -> NDArray[np.int64]:
    """The device of every rank: ``devices``, or each rank on its namesake.

    Raises :class:`TopologyError` where the mesh has more ranks than the topology has devices.
    """
    world = num_ranks(mesh)
    if world > topology.num_devices:
        raise TopologyError(
            f"a mesh of {world} ranks on the topology {topology.name!r} of {topology.num_devices} devices; "
            "expected at most one rank per device"
        )
    return np.arange(world) if devices is None else np.asarray(devices, dtype=np.int64)


def axis_groups(topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None) -> list[Group]:
    """The different kinds of groups that the ranks of ``axes`` form, each once; for ``devices`` see
    :func:`map_ranks_to_devices`."""
    return row_groups(topology, map_ranks_to_devices(topology, mesh, devices)[rank_grid(mesh, *axes)])


def row_groups(topology: Topology, rows: NDArray[np.int64]) -> list[Group]:
    """The different kinds of groups among ``rows`` of devices, shape ``[num_groups, group_size]``, each once."""
    return list(dict.fromkeys(kinds_of(topology, rows)[1]))


def axis_group(topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None) -> Group:
    """The slowest group that the ranks of ``axes`` form; see :func:`axis_groups`."""
    return select_slowest_group(axis_groups(topology, mesh, *axes, devices=devices))


def stage_groups(
    topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None, ring: bool = False
) -> tuple[Group, ...]:
    """For each pipeline stage the slowest of the groups that its ranks form over ``axes``, ``pp`` not among them;
    ``ring``: with their hops."""
    numbers, groups = replica_groups(topology, mesh, 1, *axes, devices=devices, ring=ring)
    return tuple(groups[k] for k in numbers[:, 0].tolist())


def kinds_of(topology: Topology, rows: NDArray[np.int64], ring: bool = False) -> tuple[NDArray[np.int64], list[Group]]:
    """For each row of devices the number of its kind, and a group of each kind; ``ring``: with their hops, of all rows
    at the same time."""
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
    """Columns that are equal for rows whose groups cost the same."""
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
    """For each row the number of the group that single links in it make; 0 without any."""
    paired = np.array(sorted({i for pair in topology.own_links for i in pair}))
    pairs = np.array(list(topology.own_links))
    numbers: dict[Group, int] = {}
    column = np.zeros(len(rows))
    for i in np.flatnonzero(np.isin(rows, paired).sum(axis=1) > 1).tolist():
        if np.isin(pairs, rows[i]).all(axis=1).any():
            column[i] = numbers.setdefault(group_of(topology, rows[i]), len(numbers) + 1)
    return column


def stage_ranks(mesh: Mapping[str, int]) -> list[range]:
    """The ranks of each pipeline stage: consecutive, since ``pp`` is the outermost axis."""
    stages = mesh.get("pp", 1)
    size = num_ranks(mesh) // stages
    return [range(s * size, (s + 1) * size) for s in range(stages)]


def stage_links(topology: Topology, mesh: Mapping[str, int], devices: Devices = None) -> tuple[Link, ...]:
    """What each stage talks to the next one over: the slowest of the links between their ranks, which all send at the
    same time."""
    stages = mesh.get("pp", 1)
    grid = map_ranks_to_devices(topology, mesh, devices).reshape(stages, -1)
    return _slowest_links(topology, grid[:-1], grid[1:]) if stages > 1 else ()


def find_stage_link(
    topology: Topology, mesh: Mapping[str, int], stage: int, other: int, devices: Devices = None
) -> Link:
    """What two stages talk over, as :func:`stage_links` has it."""
    grid = map_ranks_to_devices(topology, mesh, devices).reshape(mesh.get("pp", 1), -1)
    return _slowest_links(topology, grid[stage : stage + 1], grid[other : other + 1])[0]


def _slowest_links(topology: Topology, here: NDArray[np.int64], there: NDArray[np.int64]) -> tuple[Link, ...]:
    """For each row the slowest of its pairs, which talk at the same time: of the narrowest, and the longest latency."""
    bandwidth, latency = links_at_once(topology, here, there)
    narrowest = np.lexsort((-latency, bandwidth), axis=1)[:, 0]
    return tuple(
        topology.link(int(here[row, k]), int(there[row, k])).model_copy(
            update={"bandwidth": float(bandwidth[row, k]), "latency": float(latency[row].max())}
        )
        for row, k in enumerate(narrowest.tolist())
    )


def stage_capacity(topology: Topology, mesh: Mapping[str, int], devices: Devices = None) -> tuple[int, ...]:
    """Bytes that a rank of each stage may use: its smallest device's, without what its groups take."""
    paces, of_device = topology.paces
    grid = map_ranks_to_devices(topology, mesh, devices).reshape(mesh.get("pp", 1), -1)
    each = np.array([topology.types[kind].communicator for kind, _ in paces], dtype=np.int64)[of_device]
    free = topology.usable - num_communicators(mesh) * each
    return tuple(int(n) for n in np.maximum(free, 0)[grid].min(axis=1))


def num_communicators(mesh: Mapping[str, int]) -> int:
    """Groups that a rank is in: along ``tp``, of the ranks that add up gradients, and between stages."""
    sizes = mesh.get("tp", 1), mesh.get("dp", 1) * mesh.get("cp", 1), mesh.get("pp", 1)
    return sum(size > 1 for size in sizes)


def stage_paces(
    topology: Topology, mesh: Mapping[str, int], devices: Devices = None
) -> tuple[tuple[tuple[str, float], ...], ...]:
    """For each stage the different (kind, speed) of its devices."""
    paces, of_device = topology.paces
    if len(paces) == 1:
        return (tuple(paces),) * mesh.get("pp", 1)
    grid = map_ranks_to_devices(topology, mesh, devices).reshape(mesh.get("pp", 1), -1)
    return tuple(tuple(paces[k] for k in np.unique(of_device[row]).tolist()) for row in grid)


def replica_paces(
    topology: Topology, mesh: Mapping[str, int], devices: Devices = None
) -> tuple[NDArray[np.int64], list[tuple[tuple[str, float], ...]]]:
    """The different (kind, speed) of the devices of each rank of ``dp`` in each stage: numbers, shape ``[pp, dp]``, and
    what each stands for."""
    paces, of_device = topology.paces
    grid = of_device[map_ranks_to_devices(topology, mesh, devices)].reshape(mesh.get("pp", 1), mesh.get("dp", 1), -1)
    numbers, sets = _find_kind_sets(grid, len(paces))
    return numbers, [tuple(paces[k] for k in own) for own in sets]


def replica_groups(
    topology: Topology, mesh: Mapping[str, int], dp: int, *axes: str, devices: Devices = None, ring: bool = False
) -> tuple[NDArray[np.int64], list[Group]]:
    """The slowest of the groups over ``axes``, ``pp`` not among them, inside each of ``dp`` replicas in each stage:
    numbers, shape ``[pp, dp]``, and what each stands for; ``ring``: with their hops. The ranks of a replica follow each
    other in ``mesh``."""
    assert "pp" not in axes, axes
    kinds, groups = kinds_of(topology, map_ranks_to_devices(topology, mesh, devices)[rank_grid(mesh, *axes)], ring)
    # groups of one stage follow each other, since pp is the outermost axis
    numbers, sets = _find_kind_sets(kinds.reshape(mesh.get("pp", 1), dp, -1), len(groups))
    return numbers, [select_slowest_group([groups[k] for k in own]) for own in sets]


def _find_kind_sets(kinds: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], list[list[int]]]:
    """Which of so many ``kinds`` there are along the last dim: the number of each set, and the sets."""
    shape, rows = kinds.shape[:-1], kinds.reshape(-1, kinds.shape[-1])
    if count == 1:
        return np.zeros(shape, dtype=np.int64), [[0]]
    has = np.zeros((len(rows), count), dtype=bool)
    np.put_along_axis(has, rows, values=True, axis=1)
    sets, numbers = np.unique(has, axis=0, return_inverse=True)
    return numbers.reshape(shape), [np.flatnonzero(own).tolist() for own in sets]


def reference_type(topology: Topology) -> str:
    """The kind of device that the sharding is chosen for: the commonest, and of those the first by name."""
    paces, of_device = topology.paces
    counts: Counter[str] = Counter()
    for (kind, _), count in zip(paces, np.bincount(of_device, minlength=len(paces)).tolist(), strict=True):
        counts[kind] += count
    return min(counts, key=lambda kind: (-counts[kind], kind))


def is_nested(sizes: Iterable[int], steps: Sequence[int]) -> bool:
    """Whether all groups over the same axes are alike of a mesh whose ``sizes``, the innermost first, part the ranks of
    a nesting of these ``steps`` otherwise: where no axis has a part of a level's factor and something else."""
    for product in accumulate(sizes, mul):
        above = bisect_left(steps, product)
        if above == len(steps) or steps[above] % product or product % steps[max(above - 1, 0)]:
            return False
    return True


def first_group(
    topology: Topology, mesh: Mapping[str, int], *axes: str, devices: Devices = None, ring: bool = False
) -> Group:
    """The group over ``axes`` of the first rank; ``ring``: with its hops."""
    on = map_ranks_to_devices(topology, mesh, devices).reshape(-1)
    if ring:
        rows = select_card_neighbours(topology, on[rank_grid(mesh, *axes)])
        kinds, groups = kinds_of(topology, rows, ring=True)
        return groups[int(kinds[0])]
    grid = on.reshape([mesh.get(axis, 1) for axis in AXES])
    return group_of(topology, grid[tuple(slice(None) if axis in axes else 0 for axis in AXES)].reshape(-1))
