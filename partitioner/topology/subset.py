"""Remove devices from a topology."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partitioner.errors import TopologyError
from partitioner.topology.fabric import Ints, fitting_levels
from partitioner.topology.hardware import NodeGroup, Pattern, PatternLink

if TYPE_CHECKING:
    from partitioner.topology.topology import Topology

_ROUNDING = 1e-9

Places = tuple[int, ...]  # in a node
Marks = NDArray[np.bool_]


def remove_devices(topology: Topology, names: Collection[str]) -> Topology:
    """Return a copy of ``topology`` without the devices ``names``; a name like ``node3`` stands for all devices of node
    3. The remaining devices keep their names and links.

    Raise :class:`TopologyError` for unknown names, if no device is left, or if no topology can describe the remaining
    devices. The latter is possible because levels of links connect consecutive devices, and network cards belong to
    positions in a node, so that a gap can change which devices are connected.
    """
    kept = np.ones(topology.num_devices, dtype=bool)
    for name in names:
        kept[_find_named_devices(topology, name)] = False
    if not kept.any():
        raise TopologyError(f"{topology.name} without all of its {topology.num_devices} devices: keep at least one")
    alive = {name for name, stays in zip(topology.names, kept.tolist(), strict=True) if stays}
    nodes, patterns = [], dict(topology.patterns)
    for group, places, names_of in _find_node_runs(topology, kept):
        whole = len(places) == group.devices
        pattern = group.pattern
        if pattern is not None and not whole:
            pattern = f"{group.pattern}[{','.join(map(str, places))}]"
            patterns[pattern] = _restrict_pattern(topology.patterns[str(group.pattern)], places)
        count = len(names_of) // len(places)
        changed = {"count": count, "devices": len(places), "names": names_of, "pattern": pattern}
        nodes.append(
            group.model_copy(update={**changed, "nics": group.nics if whole else _count_remaining_cards(group, places)})
        )
    left = np.unique(topology.node_of[kept])
    numbers = {int(node): number for number, node in enumerate(left)}
    levels = fitting_levels(topology.levels, nodes)
    smaller = topology.changed(
        name=f"{topology.name} without {_format_devices(topology, ~kept)}",
        nodes=tuple(nodes),
        levels=tuple(levels.values()),
        overrides={name: own for name, own in topology.overrides.items() if name in alive},
        links=tuple(link for link in topology.links if alive.issuperset(link.between)),
        patterns={name: pattern for name, pattern in patterns.items() if any(g.pattern == name for g in nodes)},
        node_overrides={numbers[n]: own for n, own in topology.node_overrides.items() if n in numbers},
    )
    _require_same_links(topology, smaller, tuple(levels), np.flatnonzero(kept))
    return smaller


def _find_named_devices(topology: Topology, name: str) -> Ints:
    """Return the indices of the devices of ``topology`` that ``name`` stands for: one device, or all devices of a node
    for a name like ``node3``. Raise :class:`TopologyError` if there is no such device or node."""
    if name in topology.index:
        return np.array([topology.index[name]])
    node = re.fullmatch(r"node ?(\d+)", name)
    if node is None or int(node[1]) >= topology.num_nodes:
        raise TopologyError(
            f"{topology.name} has no device or node {name!r}; it has the devices {topology.names[0]!r} to "
            f"{topology.names[-1]!r}, and node0 to node{topology.num_nodes - 1}"
        )
    return np.flatnonzero(topology.node_of == int(node[1]))


def _find_node_runs(topology: Topology, kept: Marks) -> Iterator[tuple[NodeGroup, Places, tuple[str, ...]]]:
    """Yield a tuple for each series of consecutive equal nodes that keep the same devices: the group of equal nodes to
    which they belong, the indices of the remaining devices in a node, and the names of all remaining devices of the
    series. Nodes without remaining devices are left out. ``kept``: for each device of ``topology``, whether it remains.
    """
    start = 0
    for group in topology.nodes:
        nodes = kept[start : start + group.count * group.devices].reshape(group.count, group.devices)
        number = 0
        for places, run in groupby(tuple(np.flatnonzero(node).tolist()) for node in nodes):
            count = len(list(run))
            firsts = range(start + number * group.devices, start + (number + count) * group.devices, group.devices)
            if places:
                yield group, places, tuple(topology.names[first + place] for first in firsts for place in places)
            number += count
        start += group.count * group.devices


def _count_remaining_cards(group: NodeGroup, places: Places) -> int | None:
    """Return the number of network cards that remain in a node of ``group`` if only some devices remain. ``places``:
    indices of the remaining devices in the node. ``None`` means one card for each device."""
    if group.nics is None:
        return None
    if group.nics < group.devices:
        return len({place * group.nics // group.devices for place in places})
    return group.nics * len(places) // group.devices


def _restrict_pattern(pattern: Pattern, places: Places) -> Pattern:
    """Return a copy of ``pattern`` (direct links inside a node) with only the links between remaining devices.
    ``places``: the indices of the remaining devices in the node; they are renumbered from 0 in this order. Raise
    :class:`TopologyError` if no link is left."""
    at = {place: number for number, place in enumerate(places)}
    links = []
    for link in pattern.links:
        pairs = link.pairs
        if not isinstance(pairs, str):
            pairs = tuple((at[i], at[j]) for i, j in pairs if i in at and j in at)
        links += [PatternLink(pairs=pairs, bandwidth=link.bandwidth)] if pairs else []
    if not links:
        raise TopologyError("no links of the pattern are left in a node; leave out the whole node")
    return pattern.model_copy(update={"links": tuple(links)})


def _require_same_links(topology: Topology, smaller: Topology, numbers: Sequence[int], kept: Ints) -> None:
    """Raise :class:`TopologyError` if the remaining devices would be connected differently than before. ``topology``:
    the topology before the removal. ``smaller``: the topology of the remaining devices. ``numbers``: indices in
    ``topology`` of the levels of links that remain. ``kept``: indices in ``topology`` of the remaining devices."""
    before = [topology.groups[number] for number in numbers]
    for level, old, new in zip(smaller.levels, before, smaller.groups, strict=True):
        pairs = len({*zip(old[kept].tolist(), new.tolist(), strict=True)})
        if not pairs == len(set(old[kept].tolist())) == len(set(new.tolist())):
            raise TopologyError(
                f"level {level.name!r} joins groups of consecutive devices, and without these devices the groups "
                "would be "
                "other ones; leave out whole groups, or describe the remaining devices in a topology file"
            )
    same = np.allclose(topology.cards.alone[kept], smaller.cards.alone)
    if not same or (smaller.network_share < topology.network_share[kept] * (1 - _ROUNDING)).any():
        raise TopologyError(
            "without these devices, the remaining devices would get other network cards; "
            "describe the remaining devices in a topology file"
        )


def _format_devices(topology: Topology, gone: Marks) -> str:
    """Return a text that names the removed devices: nodes that were removed as a whole by number, other devices by
    name. ``gone``: for each device of ``topology``, whether it is removed."""
    whole, single = [], []
    for node in np.unique(topology.node_of[gone]).tolist():
        of_node = np.flatnonzero(topology.node_of == node)
        if gone[of_node].all():
            whole.append(node)
        else:
            single += [topology.names[d] for d in of_node if gone[d]]
    parts = [f"node{'s' if len(whole) > 1 else ''} {_format_items(whole)}"] if whole else []
    return " and ".join([*parts, *([_format_items(single)] if single else [])])


def _format_items(items: Sequence[object]) -> str:
    """Return a text with the first four of ``items``, separated by commas, and the number of the others."""
    shown = ", ".join(map(str, items[:4]))
    return f"{shown} and {len(items) - 4} more" if len(items) > 4 else shown
