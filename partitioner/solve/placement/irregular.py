"""List candidate placements (which device each rank runs on) for clusters whose devices or links differ.

1. Groups of devices are formed for the ranks that differ in neither ``pp`` nor ``dp``, such as the ranks of one
   tensor-parallel group. The devices of a group are as equal and as well linked as possible. Groups are formed inside
   each node, and equal nodes are divided in the same way. If the nodes are too small for a group, groups are formed
   over the whole cluster.
2. Several orders of nodes and groups are generated. They are sorted by speed, memory or outward bandwidth, ascending
   and descending, so that a pipeline stage gets similar devices.
3. For each order, the mesh axes are assigned to the levels of links in every way that two levels (inside and between
   nodes) allow. If pipeline stages do not fill nodes evenly, there are also placements that put as many whole stages as
   possible inside single nodes.

If there are few groups, all orders of them are candidates. Otherwise ``placement.py`` improves the best candidates by
exchanging groups between stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from partitioner.runtime.program.mesh import AXES
from partitioner.solve.placement.regular import all_nestings
from partitioner.solve.placement.set_partition import linked_groups, match_widest_links
from partitioner.topology.topology import Topology

Ints = NDArray[np.int64]

_TEMPLATE = 16  # sets of at most this many devices are divided by their links; larger ones in order

_FEW = 5  # if there are at most this many groups, every order is tried
_EVERY = 4  # with at most this many devices, every permutation is tried
MOST = 200  # greatest number of candidate placements


def list_arrangements(topology: Topology, mesh: Mapping[str, int]) -> list[Ints]:
    """Return distinct candidate placements of the mesh on the devices of ``topology``, at most 200. ``mesh``: axis ->
    number of ranks. Each placement is an array of shape ``[ranks]`` with the device index of every rank. The first one
    puts rank ``i`` on device ``i``. With at most four devices, all permutations are returned."""
    num = topology.num_devices
    plain = np.arange(num)
    if num <= _EVERY:
        return [np.array(order) for order in permutations(range(num))]
    size = group_size(mesh)
    found: dict[bytes, Ints] = {plain.tobytes(): plain}
    for devices in (*_list_straddling_nestings(topology, mesh, size), *_list_packed_placements(topology, mesh)):
        found.setdefault(devices.tobytes(), devices)
    for order in _list_device_orders(topology, size):
        for devices in _list_group_nestings(topology, mesh, order, size):
            found.setdefault(devices.tobytes(), devices)
    return list(islice(found.values(), MOST))


def group_size(mesh: Mapping[str, int]) -> int:
    """Return the number of ranks that have the same index along ``pp`` and along ``dp``. Such ranks communicate most,
    so their devices are chosen together as one group. ``mesh``: axis -> number of ranks."""
    return math.prod(size for axis, size in mesh.items() if axis not in ("pp", "dp"))


def has_all_arrangements(topology: Topology) -> bool:
    """Return whether :func:`list_arrangements` returns every possible placement of ranks on the devices of
    ``topology``. This is the case for at most four devices.
    """
    return topology.num_devices <= _EVERY


def _list_straddling_nestings(topology: Topology, mesh: Mapping[str, int], size: int) -> Iterator[Ints]:
    """Yield one placement for every way to divide the sizes of the mesh axes between "inside a node" and "between
    nodes". Each is an array of shape ``[ranks]`` with device indices of ``topology``. Nothing is yielded unless all
    nodes have the same number of devices and ``size`` does not divide it; other functions list the placements for other
    topologies. ``mesh``: axis -> number of ranks. ``size``: number of ranks with one index of ``pp`` and one of ``dp``.
    """
    per_node = {group.devices for group in topology.nodes}
    if len(per_node) == 1 and (devices := min(per_node)) % size:
        levels = [n for n in (devices, topology.num_devices) if n > 1]
        yield from all_nestings(tuple(mesh.get(axis, 1) for axis in AXES), levels)


def _list_packed_placements(topology: Topology, mesh: Mapping[str, int]) -> Iterator[Ints]:
    """Yield placements that put as many whole pipeline stages as possible inside single nodes of ``topology``, each an
    array of shape ``[ranks]`` with device indices. ``mesh``: axis -> number of ranks.

    A stage inside one node gets similar devices of that node. The other stages get the devices that remain. If there
    are at most five stages, one placement is yielded for every order of the stages; otherwise one for each of two
    orders. Nothing is yielded if a stage is one device, if every node can be divided into whole stages, or if no node
    is large enough for a stage."""
    stage = topology.num_devices // mesh.get("pp", 1)
    if stage == 1 or not any(group.devices % stage for group in topology.nodes):
        return
    features = _measure_device_features(topology)
    whole: list[Ints] = []
    left: list[int] = []
    for node in range(topology.num_nodes):
        devices = np.flatnonzero(topology.node_of == node)
        devices = devices[np.lexsort(-features[devices].T[::-1])]
        cut = len(devices) // stage * stage
        whole += [*devices[:cut].reshape(-1, stage)]
        left += devices[cut:].tolist()
    if not whole:
        return
    rest = np.array(left, dtype=np.int64)
    rest = rest[np.lexsort([topology.node_of[rest], *-features[rest].T[::-1]])]
    stages = np.array([*whole, *rest.reshape(-1, stage)])
    least = features[stages].min(axis=1)
    stages = stages[np.lexsort(-least.T[::-1])]
    if len(stages) <= _FEW:
        yield from (stages[list(order)].reshape(-1) for order in permutations(range(len(stages))))
    else:
        yield from (order.reshape(-1) for order in (stages, stages[::-1]))


def _list_group_nestings(topology: Topology, mesh: Mapping[str, int], order: Ints, size: int) -> Iterator[Ints]:
    """Yield placements on ``topology``, arrays of shape ``[ranks]`` with the device index of every rank. Devices are
    taken in groups of ``size``, each of which gets the ranks with one index of ``pp`` and one of ``dp``. If there are
    few groups, there is one placement for every order of the groups; otherwise there is one for every way to divide
    ``pp`` and ``dp`` between "inside a node" and "between nodes".

    ``order``: all device indices; each ``size`` consecutive ones form a group. ``mesh``: axis -> number of ranks.
    """
    sizes = tuple(mesh.get(axis, 1) for axis in AXES)
    groups = order.reshape(-1, size)
    if len(groups) <= _FEW:
        yield from (groups[list(p)].reshape(-1) for p in permutations(range(len(groups))))
        return
    yield order
    outer = tuple(n if axis in ("pp", "dp") else 1 for axis, n in zip(AXES, sizes, strict=True))
    nodes = {group.devices for group in topology.nodes}
    levels = [max(1, min(nodes) // size)] if len(nodes) == 1 and min(nodes) % size == 0 else [1]
    levels = [level for level in (*levels, len(groups)) if level > 1]
    pp, dp = outer[0], outer[1]
    yield groups.reshape(dp, pp, size).transpose(1, 0, 2).reshape(-1)
    yield from (groups[nest].reshape(-1) for nest in all_nestings(outer, levels))


def _list_device_orders(topology: Topology, size: int) -> Iterator[Ints]:
    """Yield arrays of all device indices of ``topology``, in several orders, which sort by different features (speed,
    memory, bandwidth), ascending or descending. In each order, devices that are similar, or near each other in the
    network, are neighbours, and each ``size`` consecutive devices form a group."""
    features = _measure_device_features(topology)
    by_node = np.array([features[topology.node_of == node].min(axis=0) for node in range(topology.num_nodes)])
    near = np.array([storey.joined for storey in reversed(topology.storeys)]).reshape(-1, topology.num_devices)
    first = np.searchsorted(topology.node_of, np.arange(topology.num_nodes))
    templates: dict[tuple[bytes, int], list[int]] = {}
    whole = any(group.devices % size for group in topology.nodes)
    num_features = features.shape[1]
    for key in range(num_features):
        for sign in (-1, 1):
            columns = [sign * by_node[:, (key + k) % num_features] for k in range(num_features)]
            for keys in ([*columns, *near[:, first]], [*near[:-1, first], *columns]):
                nodes = np.lexsort([np.arange(topology.num_nodes), *keys[::-1]])
                if whole:
                    yield _cut_cluster_into_groups(topology, size, features, sign, key, nodes)
                else:
                    yield np.concatenate(
                        [_cut_node_into_groups(topology, n, size, features, sign, key, templates) for n in nodes]
                    )


def _measure_device_features(topology: Topology) -> NDArray[np.float64]:
    """Return the features by which the devices of ``topology`` are compared, shape ``[num_devices, 3]``; more is
    better. They are the peak speed (FLOP/s), the usable memory (bytes) and a number for the outward bandwidth: the
    device's fraction of a network card, plus the bytes/s of its direct links to other nodes, if it has any."""
    paces, of_device = topology.paces
    speed = np.array([max(topology.types[kind].peak.values()) * speed for kind, speed in paces])[of_device]
    outward = topology.network_share.copy()
    for (i, j), link in topology.own_links.items():
        if topology.node_of[i] != topology.node_of[j]:
            outward[i] += link.bandwidth
            outward[j] += link.bandwidth
    return np.stack([speed, topology.usable.astype(np.float64), outward], axis=1)


def _cut_node_into_groups(
    topology: Topology,
    node: int,
    size: int,
    features: NDArray[np.float64],
    sign: int,
    key: int,
    templates: dict[tuple[bytes, int], list[int]],
) -> Ints:
    """Return the device indices of one node of ``topology``, ordered so that each ``size`` consecutive devices form a
    group. ``node``: index of the node. ``features``, ``sign`` and ``key``: the devices are first sorted by column
    ``key`` of ``features`` (one row per device), descending if ``sign`` is -1.

    Nodes with equal links and devices get the same order. ``templates``: cache of these orders, as device indices minus
    that of the node's first device. Its key is a pair: the links and features of the node's devices as bytes, and a
    number for the sort order.
    """
    devices = np.flatnonzero(topology.node_of == node)
    own = features[devices]
    if len(devices) == 1 or (size == len(devices)) or _has_alike_devices(topology, devices, own):
        return devices
    linked = topology.links_between(devices)[0] if len(devices) <= _TEMPLATE else own
    seen = (linked.tobytes() + own.tobytes(), 0 if len(np.unique(own, axis=0)) == 1 else sign * (key + 1))
    if seen not in templates:
        start = int(devices[0])
        templates[seen] = [
            d - start for d in _sort_devices_into_groups(topology, devices.tolist(), size, features, sign, key)
        ]
    return np.asarray(devices[0] + np.array(templates[seen]), dtype=np.int64)


def _has_alike_devices(topology: Topology, devices: Ints, own: NDArray[np.float64]) -> bool:
    """Return whether all ``devices`` (the indices of the devices of one node of ``topology``) have equal speed, memory
    and outward bandwidth, and no direct links to each other. Then every division of the node into groups is equally
    good. ``own``: the three features of each device, one row per device.
    """
    direct = topology.pattern_of[devices[0]] >= 0 or topology.own_links
    return not direct and len(np.unique(own, axis=0)) == 1


def _cut_cluster_into_groups(
    topology: Topology, size: int, features: NDArray[np.float64], sign: int, key: int, nodes: Ints
) -> Ints:
    """Return all device indices of ``topology``, ordered so that each ``size`` consecutive devices form a group. A
    group may span nodes. ``nodes``: the order of the nodes. ``features``, ``sign`` and ``key``: the devices are first
    sorted by column ``key`` of ``features`` (one row per device), descending if ``sign`` is -1.
    """
    order = np.concatenate([np.flatnonzero(topology.node_of == node) for node in nodes])
    return np.array(_sort_devices_into_groups(topology, order.tolist(), size, features, sign, key))


def _sort_devices_into_groups(
    topology: Topology, devices: list[int], size: int, features: NDArray[np.float64], sign: int, key: int
) -> list[int]:
    """Return ``devices``, indices of devices of ``topology``, ordered so that each ``size`` consecutive devices form a
    group.

    The devices are sorted by column ``key`` of ``features``, which has one row per device (ascending if ``sign`` is 1,
    descending if -1), and then divided into well-linked groups. The members of each group are ordered so that the links
    to the members at the same positions of the preceding group are as wide as possible. More than 16 devices are only
    sorted.
    """
    rows = features[devices]
    columns = [sign * rows[:, (key + k) % rows.shape[1]] for k in range(rows.shape[1])]
    devices = [devices[i] for i in np.lexsort(columns[::-1])]
    if len(devices) > _TEMPLATE:
        return devices
    _, classes = np.unique(features[devices], axis=0, return_inverse=True)
    groups = linked_groups(topology, devices, size, classes.reshape(-1).tolist())
    place = {device: k for k, device in enumerate(devices)}
    groups.sort(key=lambda group: min(place[d] for d in group))
    for before, group in pairwise(groups):
        bandwidth = topology.links_between([*before, *group])[0][:size, size:]
        group[:] = [group[k] for k in match_widest_links(bandwidth)]
    return [device for group in groups for device in group]
