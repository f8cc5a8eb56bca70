"""Resized clusters: a topology with another number of nodes, devices or bytes of memory."""

from __future__ import annotations

import math

from partitioner.errors import TopologyError
from partitioner.topology.fabric import fitting_levels
from partitioner.topology.files import known_presets, preset
from partitioner.topology.model import Topology
from partitioner.topology.parts import Part


def with_nodes(topology: Topology, num_nodes: int) -> Topology | None:
    """``topology`` with ``num_nodes`` nodes, by more or fewer of its most common kind; ``None`` if that is not
    possible.

    A single machine of a known kind gets the network of that kind. Any other topology needs a level that joins all of
    its nodes. Devices and links that are described one by one keep their descriptions.
    """
    more = num_nodes - topology.num_nodes
    largest = max(range(len(topology.nodes)), key=lambda k: topology.nodes[k].count)
    group = topology.nodes[largest]
    if group.names or group.count + more < 1 or not more:
        return None
    if topology == _local(topology.num_devices):
        return _local(num_nodes * topology.num_devices) if topology.num_nodes == 1 else None
    nodes = tuple(
        g.model_copy(update={"count": g.count + more}) if k == largest else g for k, g in enumerate(topology.nodes)
    )
    levels = list(topology.levels)
    if topology.num_nodes == 1 and topology.name in known_presets():
        levels += preset(topology.name, 2).levels[-1:]
    return _made(topology, nodes=nodes, levels=levels, name=_name(topology, num_nodes))


def with_devices(topology: Topology, num_devices: int) -> Topology | None:
    """A single node with ``num_devices`` devices; ``None`` for a topology that is not a single node."""
    group = topology.nodes[0]
    if topology.num_nodes > 1 or group.names or num_devices < 1:
        return None
    if topology == _local(topology.num_devices):
        return _local(num_devices)
    node = group.model_copy(update={"devices": num_devices})
    levels = tuple(fitting_levels(topology.levels, (node,)).values())
    return _made(topology, nodes=(node,), levels=levels, name=f"{topology.name}, {num_devices} devices")


def with_memory(topology: Topology, times: float) -> Topology | None:
    """``topology`` with ``times`` the memory on every device; reserved bytes do not change."""

    def grown(part: Part) -> Part:
        memory = getattr(part, "memory", None)
        return part if memory is None else part.model_copy(update={"memory": round(memory * times)})

    parts = ("types", "overrides", "node_overrides")
    changed = {name: {key: grown(part) for key, part in getattr(topology, name).items()} for name in parts}
    return _made(topology, **changed, name=f"{topology.name}, {times:g} times the memory")


def with_margin(topology: Topology, margin: float) -> Topology:
    """``topology`` without the fraction ``margin`` of each device's usable memory."""
    if not margin:
        return topology

    def smaller(memory: int, kind: str) -> int:
        return memory - math.ceil(margin * max(0, memory - topology.types[kind].reserved))

    types = {n: kind.model_copy(update={"memory": smaller(kind.memory, n)}) for n, kind in topology.types.items()}
    of_node = [group.type for group in topology.nodes for _ in range(group.count)]
    nodes = {
        node: own if own.memory is None else own.model_copy(update={"memory": smaller(own.memory, of_node[node])})
        for node, own in topology.node_overrides.items()
    }
    devices = {}
    for name, own in topology.overrides.items():
        kind = own.type or of_node[topology.node_of[topology.names.index(name)]]
        changed = {} if own.memory is None else {"memory": smaller(own.memory, kind)}
        devices[name] = own.model_copy(update=changed)
    return topology.changed(types=types, overrides=devices, node_overrides=nodes)


def _local(num_devices: int) -> Topology:
    return Topology.local(num_devices)


def _name(topology: Topology, num_nodes: int) -> str:
    kind = topology.name.split(" x ")[-1]
    return f"{num_nodes} x {kind}"


def _made(topology: Topology, **changed: object) -> Topology | None:
    try:
        return topology.changed(**changed)
    except TopologyError:
        return None
