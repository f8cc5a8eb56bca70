"""List how the axes of a mesh can be assigned to the levels of a cluster whose devices are all equal.

Every level, such as a node or a rack, divides the devices into runs of equal length. A *nesting* gives each level a
factor of the size of each axis. For example, with 8 devices in a node, ``tp=4`` and ``pp=4`` can put two stages into
each node, or all stages into different nodes. All placements with the same factors cost the same, so one placement is
made for each nesting. A nesting is left out if another one is at least as fast for every collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.call.collectives import collective_time
from partitioner.cost.step.placed_mesh import RING
from partitioner.runtime.program.mesh import AXES
from partitioner.topology.groups import first_group, stage_links
from partitioner.topology.topology import Topology

Ints = NDArray[np.int64]

Steps = tuple[int, ...]  # numbers of consecutive ranks after which a factor of an axis ends, ascending
Factors = tuple[tuple[int, ...], ...]  # [level from the inside out][axis]

_OPS = ("all_reduce", "all_gather", "all_to_all")

_SIZES = (1.0, 1e15)  # bytes: costs are linear in the size, so both ends decide


def equal_levels(topology: Topology) -> tuple[int, ...] | None:
    """Return, for each level of links of ``topology`` (such as inside a node, between nodes), how many devices its
    links join, from the inside out, such as ``(8, 64)``. Return ``None`` if devices differ, or if the links of a level
    differ.
    """
    paces, _ = topology.paces
    alike = len(paces) == 1 and len(np.unique(topology.usable)) == 1 and not topology.own_links
    if not alike or len(np.unique(topology.network_share)) > 1:
        return None
    if any(len(np.unique(matrix[~np.eye(len(matrix), dtype=bool)])) > 1 for _, matrix in topology.pattern_kinds):
        return None
    if len(np.unique(topology.pattern_of)) > 1:
        return None
    everyone = np.arange(topology.num_devices)
    sizes = [1]
    if topology.num_nodes > 1 and topology.cards.are_shared:  # messages depend on which devices share a network card
        if len(np.unique(topology.cards.users)) > 1:
            return None
        sizes.append(int(topology.cards.users[0]))
    for storey in topology.storeys:
        size = int(np.searchsorted(storey.joined > 0, True))  # the first run of devices
        if len(storey.levels) > 1 or size % sizes[-1] or topology.num_devices % size:
            return None
        if (storey.joined != everyone // size * size).any():
            return None
        sizes.append(size)
    return tuple(dict.fromkeys(sizes[1:])) if sizes[-1] == topology.num_devices else None


def is_regular_nesting(mesh: Mapping[str, int], levels: Sequence[int]) -> bool:
    """Return whether no mesh axis straddles a level of links (such as nodes) if rank ``i`` runs on device ``i``. An
    axis of 2 ranks straddles nodes of 3 devices, for example. ``mesh``: axis -> number of ranks. ``levels``: for each
    level, the number of devices that its links join.
    """
    product = 1
    for axis in reversed(AXES):
        product *= mesh.get(axis, 1)
        if any(size % product and product % size for size in levels):
            return False
    return True


def list_best_nestings(topology: Topology, mesh: Mapping[str, int], levels: Sequence[int]) -> list[tuple[Ints, Steps]]:
    """Return the best placements of ``mesh`` on the equal devices of ``topology``, each as a pair (devices, steps). A
    placement divides the size of each axis into factors, one for each level of links (inside a node, between nodes,
    ...). All such divisions are considered; one is left out if another is at least as fast for every collective. The
    placement of rank ``i`` on device ``i`` is first unless it is left out.

    ``devices`` is an array of shape ``[ranks]`` with the device index of every rank. ``steps`` has, in ascending order,
    the numbers of consecutive ranks that are placed alike: the products of the factors, from the innermost axis and
    level outwards, such as ``(1, 8, 64)``. With them one can tell which groups of ranks have equal links.

    ``mesh``: axis -> number of ranks. ``levels``: for each level of links, the number of devices that its links join.
    """
    sizes = tuple(mesh.get(axis, 1) for axis in AXES)
    made = [
        (_factors_to_devices(factors), _factors_to_steps(factors))
        for factors in _list_axis_factors(sizes, _count_parts_per_level(levels))
    ]
    made.sort(key=lambda nesting: bool((nesting[0] != np.arange(len(nesting[0]))).any()))
    costs = [_measure_nesting_costs(topology, devices.reshape(sizes)) for devices, _ in made]
    kept: list[int] = []
    for i, cost in enumerate(costs):
        if not any((costs[k] <= cost).all() for k in kept):
            kept = [k for k in kept if not (cost <= costs[k]).all()]
            kept.append(i)
    return [made[i] for i in kept]


def all_nestings(sizes: tuple[int, ...], levels: Sequence[int]) -> list[Ints]:
    """Return one placement, an array of shape ``[ranks]`` with device indices, for every way to divide the axes'
    ``sizes`` into factors, one for each level of links. ``levels``: for each level, from the inside out, the number of
    devices that its links join.
    """
    return [_factors_to_devices(factors) for factors in _list_axis_factors(sizes, _count_parts_per_level(levels))]


def _count_parts_per_level(levels: Sequence[int]) -> tuple[int, ...]:
    """Return, for each level of links (such as inside a node, between nodes), how many groups of the next inner level
    it joins, such as 8 nodes in a rack. ``levels``: the number of devices that the links of each level join, from the
    inside out.
    """
    return tuple(size // below for size, below in zip(levels, (1, *levels), strict=False))


def _list_axis_factors(sizes: tuple[int, ...], ways: tuple[int, ...]) -> Iterator[Factors]:
    """Yield every way to divide the sizes of the mesh axes into factors, one for each level of links (inside a node,
    between nodes, ...), so that an axis is the product of its factors. ``sizes``: size of each axis. ``ways``: for each
    level, from the inside out, the number to which the factors of all axes must multiply. Each yielded result is
    indexed ``[level][axis]``."""
    if not ways:
        if all(size == 1 for size in sizes):
            yield ()
        return
    for inner in _list_factorings(sizes, ways[0]):
        rest = tuple(size // factor for size, factor in zip(sizes, inner, strict=True))
        yield from ((inner, *outer) for outer in _list_axis_factors(rest, ways[1:]))


@cache
def _list_factorings(sizes: tuple[int, ...], product: int) -> tuple[tuple[int, ...], ...]:
    """Return all tuples that have, for each number in ``sizes``, one of its divisors, such that the divisors multiply
    to ``product``."""
    if not sizes:
        return ((),) if product == 1 else ()
    found = []
    for factor in range(1, math.gcd(sizes[0], product) + 1):
        if sizes[0] % factor == 0 and product % factor == 0:
            found += [(factor, *rest) for rest in _list_factorings(sizes[1:], product // factor)]
    return tuple(found)


def _factors_to_devices(factors: Factors) -> Ints:
    """Return the device index of every rank, shape ``[ranks]``. ``factors``: indexed ``[level of links][mesh axis]``,
    levels from the inside out; the number of ranks of the axis that lie inside one group of that level.

    Devices are numbered level by level from the outside in, and within a level by axis. Ranks are numbered by axis, and
    within an axis by level.
    """
    outward = factors[::-1]
    grid = np.arange(math.prod(chain.from_iterable(factors))).reshape([f for level in outward for f in level])
    num = len(AXES)
    by_axis = [level * num + axis for axis in range(num) for level in range(len(outward))]
    return np.ascontiguousarray(grid.transpose(by_axis)).reshape(-1)


def _factors_to_steps(factors: Factors) -> Steps:
    """Return the strides of a placement in ranks, such as ``(1, 8, 64)``, by which one can tell which groups of ranks
    have equal links. They are the distinct products of the factors, multiplied from the innermost axis outwards and
    within an axis from the innermost level outwards, in ascending order, and start with 1. ``factors``: indexed
    ``[level of links][mesh axis]``, levels from the inside out.
    """
    steps = [1]
    for axis in reversed(range(len(AXES))):
        for of_level in factors:
            steps.append(steps[-1] * of_level[axis])
    return tuple(dict.fromkeys(steps))


def _measure_nesting_costs(topology: Topology, grid: Ints) -> NDArray[np.float64]:
    """Return the costs of a placement on ``topology`` as an array, in which smaller values are never worse. They are
    the seconds of collectives over each mesh axis and over several axes together, and the latency and inverse bandwidth
    of the links between stages. ``grid``: the device index of each rank, with one dim for each mesh axis.

    All groups of an axis are alike, so only the first one is measured.
    """
    mesh = dict(zip(AXES, grid.shape, strict=True))
    wide = [i for i, size in enumerate(grid.shape) if size > 1]
    costs = []
    for count in range(1, len(wide) + 1):
        for axes in combinations(wide, count):
            if 0 in axes and count > 1:
                continue
            names = tuple(AXES[i] for i in axes)
            group = first_group(topology, mesh, *names, devices=grid, ring=names == RING)
            costs += [collective_time(op, size, group) for op in _OPS for size in _SIZES]
            costs += [hop.time(size) for hop in group.hops for size in _SIZES]
    alike = not topology.cards.are_shared  # then the link of the first rank of a stage stands for those of all ranks
    of_stages = {"pp": grid.shape[0]} if alike else mesh
    ranks = grid.reshape(grid.shape[0], -1)[:, :1] if alike else grid
    for link in stage_links(topology, of_stages, ranks.reshape(-1)):
        costs += [link.latency, 1 / link.bandwidth]
    return np.array(costs)
