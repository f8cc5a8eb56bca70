"""A cluster as data: nodes of devices, and links by level from the inside out.

Device ``i`` is the ``i``-th in the order of nodes. A level joins aligned runs of ``devices`` devices inside a node, or
of ``nodes`` whole nodes, or (neither given) all devices; two devices talk over the innermost level that joins them,
unless ``links`` gives the pair a link of its own, or the ``pattern`` of their node does. ``overrides`` describes single
devices that differ from their kind, ``node_overrides`` whole nodes. Bandwidths are those when all talk at once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
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

if TYPE_CHECKING:
    import networkx as nx


class Topology(TopologyPart):
    """Devices and the links between them. Device ``i`` is the ``i``-th in the order of nodes.

    ``Topology.local(4)``, ``Topology.preset("dgx-h100", nodes=2)`` and ``Topology.load("cluster.yaml")`` make one.
    Raises :class:`TopologyError` for inconsistent descriptions.
    """

    name: str = Field(description="What reports call the cluster.")
    nodes: tuple[NodeGroup, ...] = Field(
        min_length=1, description="Groups of equal nodes, in the order of the devices."
    )
    types: dict[str, DeviceType] = Field(description="Name to device type: rates, memory, times, price.")
    levels: tuple[Level, ...] = Field(
        default=(), description="Links by distance, from the inside out: within a node, between nodes."
    )
    overrides: dict[str, DeviceOverride] = Field(
        default_factory=dict, description="Device name to what is different about this device."
    )
    links: tuple[LinkOverride, ...] = Field(default=(), description="Links of single pairs of devices.")
    patterns: dict[str, Pattern] = Field(
        default_factory=dict, description="Name to a pattern of links inside a node, which a group of nodes can have."
    )
    node_overrides: dict[int, NodeOverride] = Field(
        default_factory=dict, description="Node number to what is different about this node."
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise TopologyError(
                format_validation_error(error, Topology, f"topology {data.get('name', '')!r}")
            ) from error

    def __eq__(self, other: object) -> bool:
        """Compare the described fields; derived values (arrays among them) do not count."""
        if not isinstance(other, Topology):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    def __hash__(self) -> int:
        return hash((self.name, self.nodes, self.levels, self.links))

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        check_parts(self)
        apart = self._find_disconnected_devices()
        if apart:
            raise ValueError(
                f"disconnected devices: {apart[0]} and {apart[1]} cannot reach each other; add a level that joins all "
                "devices (one with neither devices nor nodes) or a link between them"
            )
        return self

    def _find_disconnected_devices(self) -> tuple[str, str] | None:
        if self.num_devices == 1 or any(len(set(groups.tolist())) == 1 for groups in self.groups):
            return None
        import networkx as nx  # most topologies do not need it

        parts = [set(c) & set(self.names) for c in nx.connected_components(self.graph())]
        return (min(parts[0]), min(parts[1])) if len(parts) > 1 else None

    def changed(self, **fields: Any) -> Topology:
        """A copy of this topology with other ``fields``. Raises :class:`TopologyError` if the copy is inconsistent."""
        return Topology(**({name: getattr(self, name) for name in type(self).model_fields} | fields))

    @cached_property
    def in_tf32(self) -> Topology:
        """This topology with products in float32 at the rate of TF32."""
        return self.changed(types={name: kind.in_tf32 for name, kind in self.types.items()})

    @property
    def num_devices(self) -> int:
        return sum(g.count * g.devices for g in self.nodes)

    @property
    def num_nodes(self) -> int:
        return sum(g.count for g in self.nodes)

    @property
    def devices_per_node(self) -> int:
        """Number of devices of the smallest node."""
        return min(g.devices for g in self.nodes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every device's name, in order."""
        names: list[str] = []
        node = 0
        for group in self.nodes:
            names += group.names or [f"node{node + n}/{k}" for n in range(group.count) for k in range(group.devices)]
            node += group.count
        return tuple(names)

    @cached_property
    def index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def node_of(self) -> NDArray[np.int64]:
        """The node of every device, shape ``[num_devices]``."""
        sizes = [group.devices for group in self.nodes for _ in range(group.count)]
        return np.repeat(np.arange(len(sizes)), sizes)

    @cached_property
    def place_of(self) -> NDArray[np.int64]:
        """The place of every device in its node, shape ``[num_devices]``."""
        return np.arange(self.num_devices) - np.searchsorted(self.node_of, self.node_of)

    @cached_property
    def concurrent(self) -> dict[int, float]:
        """Number of devices that can compute at a time, by node; only nodes where not all of them can."""
        found = [g.concurrent for g in self.nodes for _ in range(g.count)]
        return {n: limit for n, limit in enumerate(found) if limit is not None}

    @cached_property
    def groups(self) -> tuple[NDArray[np.int64], ...]:
        """For each level the group of every device, shape ``[num_devices]``: equal numbers are joined."""
        return tuple(level_groups(self, level) for level in self.levels)

    @cached_property
    def cards(self) -> NetworkCards:
        """The network cards that devices talk to other nodes over."""
        return network_cards(self.nodes, self.node_overrides)

    @property
    def network_share(self) -> Floats:
        """Each device's share of a network card when all devices communicate, shape ``[num_devices]``."""
        return self.cards.share

    @cached_property
    def storeys(self) -> tuple[Storey, ...]:
        """The storeys of links from the inside out: which devices each joins."""
        return build_storeys(self)

    @cached_property
    def pattern_kinds(self) -> tuple[tuple[str, Floats], ...]:
        """The patterns in use with their bandwidths in bytes/s, shape ``[devices, devices]`` of a node, 0 where there
        is no link."""
        kinds = dict.fromkeys((g.pattern, g.devices) for g in self.nodes if g.pattern is not None)
        return tuple((name, pattern_matrix(self.patterns[name], devices)) for name, devices in kinds)

    @cached_property
    def pattern_of(self) -> NDArray[np.int64]:
        """The number of the pattern of every device's node, shape ``[num_devices]``; -1 for none."""
        kinds = {(name, len(matrix)): number for number, (name, matrix) in enumerate(self.pattern_kinds)}
        numbers = [kinds.get((g.pattern or "", g.devices), -1) for g in self.nodes]
        return np.repeat(numbers, [g.count * g.devices for g in self.nodes])

    @cached_property
    def _inner_level_cache(self) -> dict[tuple[int, int], Level]:
        return {}

    def inside_level(self, kind: int, members: int) -> Level:
        """The links among some devices of a node of pattern number ``kind``, as a level. ``members``: bit mask of their
        positions."""
        if (kind, members) not in self._inner_level_cache:
            self._inner_level_cache[kind, members] = inside_level(self, kind, members)
        return self._inner_level_cache[kind, members]

    @cached_property
    def host_shares(self) -> tuple[HostShare | None, ...]:
        """Each device's share of its node's host, see :func:`partitioner.topology.hosts.host_shares`."""
        return host_shares(self)

    @cached_property
    def different_host_shares(self) -> tuple[HostShare | None, ...]:
        """The distinct shares in :attr:`host_shares`."""
        return tuple({id(share): share for share in self.host_shares}.values())

    @cached_property
    def devices(self) -> tuple[Device, ...]:
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
        """Bytes that a program may use on every device, shape ``[num_devices]``."""
        return np.array([device.usable for device in self.devices], dtype=np.int64)

    @cached_property
    def paces(self) -> tuple[tuple[tuple[str, float], ...], NDArray[np.int64]]:
        """The distinct (kind, speed) of devices, sorted, and for every device the index of its pair, shape
        ``[num_devices]``."""
        own = [(device.kind, device.speed) for device in self.devices]
        known = tuple(sorted(set(own)))
        numbers = {pace: k for k, pace in enumerate(known)}
        return known, np.array([numbers[pace] for pace in own], dtype=np.int64)

    def paced_type(self, kind: str, speed: float) -> DeviceType:
        """A device type with ``speed`` times the compute rate and memory bandwidth of ``kind``."""
        plain = self.types[kind]
        if speed == 1.0:
            return plain
        peak = {precision: rate * speed for precision, rate in plain.peak.items()}
        return plain.model_copy(update={"peak": peak, "memory_bandwidth": plain.memory_bandwidth * speed})

    @cached_property
    def memory_bandwidths(self) -> Floats:
        """Bytes/s of every device's own memory, shape ``[num_devices]``."""
        return np.array([self.types[device.kind].memory_bandwidth for device in self.devices])

    @cached_property
    def fused_attention(self) -> bool:
        """Whether no device materialises an attention's scores."""
        return all(self.types[kind].fused_attention for kind, _ in self.paces[0])

    @cached_property
    def whole_scatter(self) -> bool:
        """Whether some device type receives whole buffers in a reduce-scatter before it sums them."""
        return any(self.types[kind].whole_scatter for kind, _ in self.paces[0])

    @cached_property
    def single_ring(self) -> bool:
        """Whether an all-reduce is one ring through all ranks."""
        return any(self.types[kind].single_ring for kind, _ in self.paces[0])

    def device_type(self, index: int) -> DeviceType:
        return self.types[self.devices[index].kind]

    def host(self, node: int) -> Host | None:
        """The host of node number ``node``, if it is described."""
        return self._host_by_node[node]

    @cached_property
    def _host_by_node(self) -> list[Host | None]:
        return [group.host for group in self.nodes for _ in range(group.count)]

    @property
    def price_per_hour(self) -> float | None:
        """Price of all devices in US dollars per hour; ``None`` if the price of a device is not known."""
        counts = Counter(device.kind for device in self.devices)
        prices = [(self.types[kind].price, count) for kind, count in counts.items()]
        return None if any(price is None for price, _ in prices) else sum((p or 0.0) * count for p, count in prices)

    @cached_property
    def singles(self) -> dict[tuple[int, int], PairLink]:
        """Direct links of single pairs of devices, with their collective parameters, by (smaller, larger) index."""
        return single_links(self)

    @cached_property
    def own_links(self) -> dict[tuple[int, int], Link]:
        """Direct links of single pairs of devices, by (smaller, larger) index."""
        return {pair: single.link for pair, single in self.singles.items()}

    @cached_property
    def linked_groups(self) -> dict[bytes, Group]:
        """Cache of groups over direct links, by the sorted devices."""
        return {}

    def link(self, i: int, j: int) -> Link:
        """The link between devices ``i`` and ``j``; routed over other devices if no link joins them.

        Raises :class:`TopologyError` for an index outside the topology.
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
        """The direct link between two devices that their node's pattern gives; ``None`` if there is none."""
        kind = int(self.pattern_of[i])
        if kind < 0 or self.node_of[i] != self.node_of[j]:
            return None
        name, matrix = self.pattern_kinds[kind]
        bandwidth = float(matrix[self.place_of[i], self.place_of[j]])
        return (
            Link(name=name, bandwidth=bandwidth, latency=self.patterns[name].latency, level=-1) if bandwidth else None
        )

    def _find_routed_link(self, i: int, j: int) -> Link:
        """The route over other devices: the path of least latency, as fast as its slowest link."""
        bandwidth, latency = find_routes(self.roads, self.names[i])[self.names[j]]
        return Link(name="routed", bandwidth=bandwidth, latency=latency, level=-1)

    def links_between(self, indices: Sequence[int] | NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Bytes/s and seconds of the links among the devices ``indices``, each of shape ``[n, n]``; see :meth:`link`.

        The diagonal has the device's own memory. Memory and time are quadratic in ``n``: meant for some thousand
        devices. Raises :class:`TopologyError` for an index outside the topology.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        outside = chosen[(chosen < 0) | (chosen >= self.num_devices)]
        if len(outside):
            self._refuse_unknown_device(int(outside[0]))
        return pair_links(self, chosen[:, None], chosen[None, :])

    def _refuse_unknown_device(self, k: int) -> None:
        raise TopologyError(f"device {k} is outside the topology {self.name!r} of {self.num_devices} devices")

    @cached_property
    def roads(self) -> nx.Graph[str]:
        """:meth:`graph`, computed once."""
        return self.graph()

    def graph(self) -> nx.Graph[str]:
        """Devices by name, and a hub for each group of a level that more than one device shares.

        Nodes carry ``kind`` (``device`` or ``hub``) and ``level``; edges ``bandwidth`` and ``latency`` (half of the
        level's on each of the two edges that a message takes over a hub).
        """
        return road_graph(self)

    def without(self, *names: str) -> Topology:
        """The topology without these devices, see :func:`partitioner.topology.subset.remove_devices`."""
        return remove_devices(self, names)

    def to_yaml(self) -> str:
        """Self-contained text. :meth:`load` reads an equal topology from a file with it."""
        from partitioner.topology.files import dump_topology

        return dump_topology(self)

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> Topology:
        """The topology of ``nodes`` machines of a kind in the catalogue, like ``dgx-h100``. Raises
        :class:`TopologyError` for an unknown name."""
        from partitioner.topology.files import build_preset_topology

        require_type("name", name, str)
        return build_preset_topology(name, nodes)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Topology:
        """The topology that a YAML file describes. Raises :class:`TopologyError` with the line of the mistake."""
        from partitioner.topology.files import load_topology

        require_type("path", path, str | os.PathLike)
        return load_topology(path)

    @classmethod
    def local(cls, num_ranks: int) -> Topology:
        """``num_ranks`` processes on this machine's CPU, which share its cores and memory. Rough figures."""
        from partitioner.topology.detect import build_local_topology

        require_type("num_ranks", num_ranks, int)
        return build_local_topology(num_ranks)

    @classmethod
    def detect(cls) -> Topology:
        """The devices at hand: CUDA devices under the launcher's number of nodes, else this machine's CPU."""
        from partitioner.topology.detect import detect_topology

        return detect_topology()

    @classmethod
    def parse(cls, text: str) -> Topology:
        """``local:4``, ``dgx-h100`` or ``dgx-h100:8`` (nodes), ``detect``, or the path of a YAML file; any of these
        ``without node1/3, left``."""
        from partitioner.topology.files import parse_topology

        require_type("text", text, str)
        return parse_topology(text)
