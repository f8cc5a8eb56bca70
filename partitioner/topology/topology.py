"""Describe a cluster: nodes of devices, and levels of links between them, from the innermost to the outermost.

Devices are numbered in the order of their nodes. A level connects the devices of each group that it forms: ``devices``
consecutive devices of a node, or ``nodes`` consecutive whole nodes, or all devices if neither is given. Two devices use
the innermost level that connects them. A direct link replaces that level if ``links`` (single pairs) or the ``pattern``
of the node gives one. ``overrides`` changes single devices, ``node_overrides`` whole nodes. Bandwidths hold while all
devices communicate at the same time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from partitioner.errors import TopologyError
from partitioner.topology.fabric import (
    Floats,
    Storey,
    build_storeys,
    find_routes,
    inside_level,
    level_groups,
    pair_links,
    pattern_matrix,
    road_graph,
    spans_nodes,
)
from partitioner.topology.group import Group, PairLink, single_links
from partitioner.topology.hardware import (
    Device,
    DeviceOverride,
    DeviceType,
    Host,
    Level,
    Link,
    LinkOverride,
    NodeGroup,
    NodeOverride,
    Pattern,
    TopologyPart,
)
from partitioner.topology.hosts import HostShare, host_shares
from partitioner.topology.network_cards import NetworkCards, network_cards
from partitioner.topology.subset import remove_devices
from partitioner.topology.validate import check_parts, format_validation_error, require_type
from partitioner.units import bytes_text, format_digits, format_html_figures, format_plural, seconds_text

if TYPE_CHECKING:
    import networkx as nx


class Topology(TopologyPart):
    """A cluster: groups of equal nodes with their devices, the types of these devices, and the links between them.
    Devices are numbered from 0, in the order of their nodes.

    ``Topology.local(4)``, ``Topology.preset("dgx-h100", nodes=2)`` and ``Topology.load("cluster.yaml")`` create a
    topology. Raises :class:`TopologyError` for inconsistent descriptions.
    """

    name: str = Field(description="Name of the cluster in reports.")
    nodes: tuple[NodeGroup, ...] = Field(
        min_length=1, description="Groups of equal nodes. Devices are numbered from 0 in this order."
    )
    types: dict[str, DeviceType] = Field(
        description="Device types by name, with their compute rates, bandwidth, memory and price."
    )
    levels: tuple[Level, ...] = Field(
        default=(),
        description="Links that join devices at one distance, from the inside out: first within a node, then "
        "between nodes.",
    )
    overrides: dict[str, DeviceOverride] = Field(
        default_factory=dict,
        description="Devices that differ from the other devices of their node, by device name: type, memory or speed.",
    )
    links: tuple[LinkOverride, ...] = Field(
        default=(), description="Links between single pairs of devices, which replace the links of the levels."
    )
    patterns: dict[str, Pattern] = Field(
        default_factory=dict,
        description="Patterns of direct links between the devices of a node, by name. A group of nodes refers to a "
        "pattern by its name.",
    )
    node_overrides: dict[int, NodeOverride] = Field(
        default_factory=dict,
        description="Nodes that differ from the other nodes of their group, by node number from 0: network "
        "bandwidth, failed network cards, memory or speed.",
    )

    def __init__(self, **data: Any) -> None:
        """Build a topology from its fields ``data``, given by name. Raise :class:`TopologyError` with the first error
        in one sentence if a field is unknown, missing or wrong, or if the fields contradict each other."""
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise TopologyError(
                format_validation_error(error, Topology, f"topology {data.get('name', '')!r}")
            ) from error

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` is a topology with equal fields. Values that are derived from the fields are not
        compared."""
        if not isinstance(other, Topology):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    def __hash__(self) -> int:
        return hash((self.name, self.nodes, self.levels, self.links))

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the (name, value) pairs that ``repr`` shows of a topology: the numbers of nodes and devices, the device
        types and the levels of links, but not every device."""
        yield "name", self.name
        yield "nodes", self.num_nodes
        yield "devices", self.num_devices
        yield "types", sorted({group.type for group in self.nodes})
        yield "levels", [level.name for level in self.levels]

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays for a topology: the number and memory of the devices of each type,
        and the bandwidth and latency of each level of links."""
        kinds = Counter(device.kind for device in self.devices)
        rows = [("nodes", f"{self.num_nodes:,}")]
        rows += [(kind, f"{n:,} devices of {bytes_text(self.types[kind].memory)}") for kind, n in kinds.items()]
        rows += [
            (level.name, f"{format_digits(level.bandwidth / 1e9)} GB/s, {seconds_text(level.latency)}")
            for level in self.levels
        ]
        return format_html_figures(f"{self.name}: {format_plural(self.num_devices, 'device')}", rows)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        """Return this topology; raise :class:`TopologyError` if its parts contradict each other, or if there are two
        devices that no path of links connects."""
        check_parts(self)
        apart = self._find_disconnected_devices()
        if apart:
            raise ValueError(
                f"disconnected devices: {apart[0]} and {apart[1]} cannot reach each other; add a level that joins all "
                "devices (one with neither devices nor nodes) or a link between them"
            )
        return self

    def _find_disconnected_devices(self) -> tuple[str, str] | None:
        """Return the names of two devices that no path of links connects; ``None`` if all devices are connected."""
        if self.num_devices == 1 or any(len(set(groups.tolist())) == 1 for groups in self.groups):
            return None
        import networkx as nx  # imported late: most topologies do not need it

        parts = [set(c) & set(self.names) for c in nx.connected_components(self.graph())]
        return (min(parts[0]), min(parts[1])) if len(parts) > 1 else None

    def changed(self, **fields: Any) -> Topology:
        """Return a copy of this topology with the given ``fields`` replaced. Raise :class:`TopologyError` if the copy
        is inconsistent."""
        return Topology(**({name: getattr(self, name) for name in type(self).model_fields} | fields))

    @cached_property
    def in_tf32(self) -> Topology:
        """Return this topology with the peak rate of float32 matrix products replaced by the TF32 rate, for each device
        type that has one."""
        return self.changed(types={name: kind.in_tf32 for name, kind in self.types.items()})

    @property
    def num_devices(self) -> int:
        """Return the number of devices of all nodes together."""
        return sum(g.count * g.devices for g in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return sum(g.count for g in self.nodes)

    @property
    def devices_per_node(self) -> int:
        """Return the number of devices of the smallest node."""
        return min(g.devices for g in self.nodes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of all devices, in the order of devices. The default for device ``k`` of node ``n`` is
        ``node<n>/<k>``.
        """
        names: list[str] = []
        node = 0
        for group in self.nodes:
            names += group.names or [f"node{node + n}/{k}" for n in range(group.count) for k in range(group.devices)]
            node += group.count
        return tuple(names)

    @cached_property
    def index(self) -> dict[str, int]:
        """Return name of a device -> its index, from 0."""
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def node_of(self) -> NDArray[np.int64]:
        """Return the node number (from 0) of each device, shape ``[num_devices]``."""
        sizes = [group.devices for group in self.nodes for _ in range(group.count)]
        return np.repeat(np.arange(len(sizes)), sizes)

    @cached_property
    def place_of(self) -> NDArray[np.int64]:
        """Return the index of each device within its node, from 0, shape ``[num_devices]``."""
        return np.arange(self.num_devices) - np.searchsorted(self.node_of, self.node_of)

    @cached_property
    def concurrent(self) -> dict[int, float]:
        """Return node number (from 0) -> number of devices of the node that can compute at full speed at the same time.
        Nodes without such a limit have no entry."""
        found = [g.concurrent for g in self.nodes for _ in range(g.count)]
        return {n: limit for n, limit in enumerate(found) if limit is not None}

    @cached_property
    def groups(self) -> tuple[NDArray[np.int64], ...]:
        """Return one array for each level of links: the group number of each device, shape ``[num_devices]``. The level
        connects devices with equal numbers."""
        return tuple(level_groups(self, level) for level in self.levels)

    @cached_property
    def cards(self) -> NetworkCards:
        """Return the network cards of all nodes: which card each device uses, and the bandwidth that the device
        gets."""
        return network_cards(self.nodes, self.node_overrides)

    @property
    def network_share(self) -> Floats:
        """Return the bandwidth between nodes that each device gets while all devices communicate, as a multiple of the
        bandwidth of one network card, shape ``[num_devices]``."""
        return self.cards.share

    @cached_property
    def storeys(self) -> tuple[Storey, ...]:
        """Return the links by depth, from the innermost to the outermost. A storey is all levels of links at one depth,
        with the devices that they connect."""
        return build_storeys(self)

    @cached_property
    def pattern_kinds(self) -> tuple[tuple[str, Floats], ...]:
        """Return the patterns of direct links inside nodes that are in use, as (name, matrix). The matrix has the
        bandwidth in bytes/s between the devices of one node, shape ``[devices, devices]``, and 0 for pairs without a
        direct link."""
        kinds = dict.fromkeys((g.pattern, g.devices) for g in self.nodes if g.pattern is not None)
        return tuple((name, pattern_matrix(self.patterns[name], devices)) for name, devices in kinds)

    @cached_property
    def pattern_of(self) -> NDArray[np.int64]:
        """Return for each device the index of its node's pattern of direct links in :attr:`pattern_kinds`, shape
        ``[num_devices]``; -1 for nodes without a pattern."""
        kinds = {(name, len(matrix)): number for number, (name, matrix) in enumerate(self.pattern_kinds)}
        numbers = [kinds.get((g.pattern or "", g.devices), -1) for g in self.nodes]
        return np.repeat(numbers, [g.count * g.devices for g in self.nodes])

    @cached_property
    def _inner_level_cache(self) -> dict[tuple[int, int], Level]:
        """Return the cache of :meth:`inside_level`: (index of the node's pattern of direct links, bit mask of the
        devices) -> the direct links among these devices, summarized as one level of links."""
        return {}

    def inside_level(self, kind: int, members: int) -> Level:
        """Return the direct links among some devices of a node, summarized as one level of links. Results are cached.
        ``kind``: index in :attr:`pattern_kinds` of the node's pattern of direct links. ``members``: bit mask of the
        devices; bit ``k`` is the device with index ``k`` in the node."""
        if (kind, members) not in self._inner_level_cache:
            self._inner_level_cache[kind, members] = inside_level(self, kind, members)
        return self._inner_level_cache[kind, members]

    @cached_property
    def host_shares(self) -> tuple[HostShare | None, ...]:
        """Return, for each device, its share of its node's host (memory, disk and the bandwidth to them), in the order
        of devices; ``None`` for devices whose host is not described."""
        return host_shares(self)

    @cached_property
    def different_host_shares(self) -> tuple[HostShare | None, ...]:
        """Return the distinct shares of a host's memory, disk and bandwidth that devices have, in the order of their
        first device. ``None`` is among them if the host of a device is not described."""
        return tuple({id(share): share for share in self.host_shares}.values())

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return the description of each device (type, memory, speed), in the order of devices. Overrides of single
        devices and of whole nodes are applied; their speed factors are multiplied."""
        kinds = [g.type for g in self.nodes for _ in range(g.count * g.devices)]
        as_described, node_as_described = DeviceOverride(), NodeOverride()
        made = []
        for i, (name, kind, node) in enumerate(zip(self.names, kinds, self.node_of.tolist(), strict=True)):
            own, whole = self.overrides.get(name, as_described), self.node_overrides.get(node, node_as_described)
            kind = own.type or kind
            memory = own.memory or whole.memory or self.types[kind].memory
            reserved = min(self.types[kind].reserved, memory)
            made.append(Device(i, name, node, kind, memory, reserved, own.speed * whole.speed))
        return tuple(made)

    @cached_property
    def usable(self) -> NDArray[np.int64]:
        """Return the bytes that a program may use on each device, shape ``[num_devices]``."""
        return np.array([device.usable for device in self.devices], dtype=np.int64)

    @cached_property
    def paces(self) -> tuple[tuple[tuple[str, float], ...], NDArray[np.int64]]:
        """Return the distinct (device type, speed factor) pairs of the devices, sorted, and for each device the index
        of its pair, shape ``[num_devices]``."""
        own = [(device.kind, device.speed) for device in self.devices]
        known = tuple(sorted(set(own)))
        numbers = {pace: k for k, pace in enumerate(known)}
        return known, np.array([numbers[pace] for pace in own], dtype=np.int64)

    def paced_type(self, kind: str, speed: float) -> DeviceType:
        """Return the description of the device type named ``kind``, with its compute rates and memory bandwidth
        multiplied by the factor ``speed``."""
        plain = self.types[kind]
        if speed == 1.0:
            return plain
        peak = {precision: rate * speed for precision, rate in plain.peak.items()}
        return plain.model_copy(update={"peak": peak, "memory_bandwidth": plain.memory_bandwidth * speed})

    @cached_property
    def memory_bandwidths(self) -> Floats:
        """Return the bandwidth in bytes/s of each device's own memory, shape ``[num_devices]``."""
        return np.array([self.types[device.kind].memory_bandwidth for device in self.devices])

    @cached_property
    def fused_attention(self) -> bool:
        """Return whether all devices compute attention without storing the matrix of attention scores."""
        return all(self.types[kind].fused_attention for kind, _ in self.paces[0])

    @cached_property
    def whole_scatter(self) -> bool:
        """Return whether on some device type a rank of a reduce-scatter receives the whole buffers of the other ranks
        before it sums them."""
        return any(self.types[kind].whole_scatter for kind, _ in self.paces[0])

    @cached_property
    def single_ring(self) -> bool:
        """Return whether some device type runs an all-reduce as a single ring through all ranks."""
        return any(self.types[kind].single_ring for kind, _ in self.paces[0])

    def device_type(self, index: int) -> DeviceType:
        """Return the type of the device with the index ``index`` (from 0), without the overrides of single devices and
        nodes."""
        return self.types[self.devices[index].kind]

    def host(self, node: int) -> Host | None:
        """Return the host (memory, disk and the bandwidth to them) of node number ``node``, counted from 0; ``None`` if
        the topology does not describe it."""
        return self._host_by_node[node]

    @cached_property
    def _host_by_node(self) -> list[Host | None]:
        """Return the host of each node, in the order of nodes; ``None`` for nodes whose host is not described."""
        return [group.host for group in self.nodes for _ in range(group.count)]

    @property
    def price_per_hour(self) -> float | None:
        """Return the price of all devices in US dollars per hour; ``None`` if the price of a device type is unknown."""
        counts = Counter(device.kind for device in self.devices)
        prices = [(self.types[kind].price, count) for kind, count in counts.items()]
        return None if any(price is None for price, _ in prices) else sum((p or 0.0) * count for p, count in prices)

    @cached_property
    def singles(self) -> dict[tuple[int, int], PairLink]:
        """Return the direct links of single pairs of devices: (smaller device index, larger device index) -> link with
        its parameters for collectives. Only pairs that the field ``links`` lists have an entry."""
        return single_links(self)

    @cached_property
    def own_links(self) -> dict[tuple[int, int], Link]:
        """Return the direct links of single pairs of devices: (smaller device index, larger device index) -> link with
        bandwidth and latency. Only pairs that the field ``links`` lists have an entry."""
        return {pair: single.link for pair, single in self.singles.items()}

    @cached_property
    def linked_groups(self) -> dict[bytes, Group]:
        """Return a cache, empty at first, of communication groups on topologies with direct links of single pairs. The
        key is the bytes of the array of sorted device indices."""
        return {}

    def link(self, i: int, j: int) -> Link:
        """Return the link between the devices number ``i`` and ``j``, counted from 0. If no link connects them, return
        a route over other devices as one link. For ``i == j``, return the device's own memory as a link without
        latency.

        Raise :class:`TopologyError` for an index outside the topology.
        """
        for k in (i, j):
            if not 0 <= k < self.num_devices:
                self._refuse_unknown_device(k)
        if i == j:
            bandwidth = self.device_type(i).memory_bandwidth
            return Link(name="memory", bandwidth=bandwidth, latency=0.0, level=-1)
        own = self.own_links.get((min(i, j), max(i, j))) or self._inside_node(i, j)
        if own is not None:
            return own
        for number, (level, groups) in enumerate(zip(self.levels, self.groups, strict=True)):
            if groups[i] == groups[j]:
                share = min(self.network_share[i], self.network_share[j]) if spans_nodes(level) else 1.0
                bandwidth = level.bandwidth * float(share) / level.oversubscription
                return Link(name=level.name, bandwidth=bandwidth, latency=level.latency, level=number)
        return self._find_routed_link(i, j)

    def _inside_node(self, i: int, j: int) -> Link | None:
        """Return the direct link between the devices ``i`` and ``j`` (indices) from the pattern of direct links of
        their node; ``None`` if they are in different nodes, or if there is no such link."""
        kind = int(self.pattern_of[i])
        if kind < 0 or self.node_of[i] != self.node_of[j]:
            return None
        name, matrix = self.pattern_kinds[kind]
        bandwidth = float(matrix[self.place_of[i], self.place_of[j]])
        return (
            Link(name=name, bandwidth=bandwidth, latency=self.patterns[name].latency, level=-1) if bandwidth else None
        )

    def _find_routed_link(self, i: int, j: int) -> Link:
        """Return the route of least latency from device ``i`` to device ``j`` (indices) over other devices, as one
        link. Its bandwidth is that of the slowest link on the route."""
        bandwidth, latency = find_routes(self.roads, self.names[i])[self.names[j]]
        return Link(name="routed", bandwidth=bandwidth, latency=latency, level=-1)

    def links_between(self, indices: Sequence[int] | NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return the bandwidth in bytes/s and the latency in seconds of the links among ``n`` devices, each of shape
        ``[n, n]``. ``indices``: the indices of the devices.

        The diagonal describes each device's own memory. Time and memory are quadratic in ``n``, so use this for at most
        some thousand devices. Raise :class:`TopologyError` for an index outside the topology.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        outside = chosen[(chosen < 0) | (chosen >= self.num_devices)]
        if len(outside):
            self._refuse_unknown_device(int(outside[0]))
        return pair_links(self, chosen[:, None], chosen[None, :])

    def _refuse_unknown_device(self, k: int) -> None:
        """Raise :class:`TopologyError` with the message that there is no device with the index ``k``."""
        raise TopologyError(f"device {k} is outside the topology {self.name!r} of {self.num_devices} devices")

    @cached_property
    def roads(self) -> nx.Graph[str]:
        """Return the graph of devices and links, built once. Its nodes are the devices, by name, and a hub for each
        group of devices that a level of links connects. Edges have ``bandwidth`` in bytes/s and ``latency`` in seconds.
        """
        return self.graph()

    def graph(self) -> nx.Graph[str]:
        """Return a networkx graph of devices and links. Its nodes are the devices, by name, and one hub for each group
        of several devices that a level of links connects.

        Nodes have the attributes ``kind`` (``device`` or ``hub``) and ``level`` (index of the level of links; -1 for
        devices). Edges have ``bandwidth`` in bytes/s and ``latency`` in seconds. A message over a hub takes two edges,
        so each has half of the level's latency.
        """
        return road_graph(self)

    def without(self, *names: str) -> Topology:
        """Return a copy of this topology without the devices ``names``. A name like ``node3`` removes all devices of a
        node. Raise :class:`TopologyError` for unknown names, or if no valid topology describes the remaining devices.
        """
        return remove_devices(self, names)

    def to_yaml(self) -> str:
        """Return the topology as YAML text that needs no other file. :meth:`load` reads an equal topology from it."""
        from partitioner.topology.files import dump_topology

        return dump_topology(self)

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> Topology:
        """Return the topology of ``nodes`` machines of the kind ``name`` in the catalogue, like ``dgx-h100``. Raise
        :class:`TopologyError` for an unknown name or fewer than one machine."""
        from partitioner.topology.files import build_preset_topology

        require_type("name", name, str)
        return build_preset_topology(name, nodes)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Topology:
        """Return the topology that the YAML file ``path`` describes. Raise :class:`TopologyError` with the line of the
        mistake if it is not valid."""
        from partitioner.topology.files import load_topology

        require_type("path", path, str | os.PathLike)
        return load_topology(path)

    @classmethod
    def local(cls, num_ranks: int) -> Topology:
        """Return a topology of ``num_ranks`` processes that share this machine's CPU cores and memory evenly. Its
        compute rates and bandwidths are rough estimates."""
        from partitioner.topology.detect import build_local_topology

        require_type("num_ranks", num_ranks, int)
        return build_local_topology(num_ranks)

    @classmethod
    def detect(cls) -> Topology:
        """Return a topology of this machine's CUDA devices, repeated for each node that the launcher (torchrun)
        started. If there is no CUDA device, return a topology of this machine's CPU."""
        from partitioner.topology.detect import detect_topology

        return detect_topology()

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Return the topology that ``text`` names: ``local:4``, ``dgx-h100``, ``dgx-h100:8`` (eight nodes), ``detect``,
        or the path of a YAML file. Any of these can end in a text like ``without node1/3, node2``, which removes single
        devices or whole nodes.
        """
        from partitioner.topology.files import parse_topology

        require_type("text", text, str)
        return parse_topology(text)
