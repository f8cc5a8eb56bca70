"""Groups where ranks are nested in levels that are all alike: of those over the same axes one stands for all.

A nesting gives every level a factor of every axis (``solve/nesting.py``). Its steps are the numbers of ranks behind
which another axis, or another level's part of an axis, begins, from the inside out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul

from partitioner.topology.groups import Devices, Group, group_of, kinds_of, placed, rank_grid
from partitioner.topology.hops import near
from partitioner.topology.model import Topology
from runtime.meshes import AXES


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
    on = placed(topology, mesh, devices).reshape(-1)
    if ring:
        rows = near(topology, on[rank_grid(mesh, *axes)])
        kinds, groups = kinds_of(topology, rows, ring=True)
        return groups[int(kinds[0])]
    grid = on.reshape([mesh.get(axis, 1) for axis in AXES])
    return group_of(topology, grid[tuple(slice(None) if axis in axes else 0 for axis in AXES)].reshape(-1))
