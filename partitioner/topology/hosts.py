"""Compute each rank's share of its node's host: memory, disk, and the bandwidth to them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partitioner.topology.topology import Topology

_UPDATE_EFFICIENCY = 0.6  # share of the host's memory bandwidth: DeepSpeed's CPU Adam with vector instructions

_UNKNOWN_MEMORY_BANDWIDTH = 100e9  # default: one socket with four channels of DDR4


@dataclass(frozen=True)
class HostShare:
    """The share that one rank has of the memory and disk of its node's host, and of the bandwidth to them.

    ``bandwidth``: bytes/s per direction between the device and host memory. ``latency``: seconds of one copy of zero
    bytes. ``memory``: bytes of host memory. ``update_bandwidth``: bytes/s at which an optimizer step on the host reads
    and writes. ``disk_bandwidth``: the rank's share of the bandwidth of its node's disks in bytes/s; infinite without a
    disk, since nothing is moved there.
    """

    bandwidth: float = math.inf
    latency: float = 0.0
    memory: float = math.inf
    update_bandwidth: float = math.inf
    disk_bandwidth: float = math.inf

    def time(self, num_bytes: float) -> float:
        """Return the seconds of a copy of ``num_bytes`` bytes between device and host; 0 for 0 bytes."""
        return self.latency + num_bytes / self.bandwidth if num_bytes else 0.0


BOUNDLESS = HostShare()  # a host without limits


def host_shares(topology: Topology) -> tuple[HostShare | None, ...]:
    """Return, for each device of ``topology``, its share of its node's host (memory, disk and the bandwidth to them),
    in the order of devices; ``None`` for devices whose host is not described. Equal shares are one object."""
    on_node = Counter(device.node for device in topology.devices)
    by_node: dict[int, HostShare | None] = {}
    different: dict[HostShare, HostShare] = {}
    for node, devices in on_node.items():
        host = topology.host(node)
        if host is None:
            by_node[node] = None
            continue
        memory_bandwidth = host.memory_bandwidth or _UNKNOWN_MEMORY_BANDWIDTH
        update = _UPDATE_EFFICIENCY * memory_bandwidth / devices
        disk = host.disk_bandwidth / devices if host.disk and host.disk_bandwidth else math.inf
        share = HostShare(host.bandwidth, host.latency, host.memory / devices, update, disk)
        by_node[node] = different.setdefault(share, share)
    return tuple(by_node[device.node] for device in topology.devices)


def can_offload(topology: Topology) -> bool:
    """Return whether every device of ``topology`` has a host whose memory is separate from the device's own, so that
    tensors can be moved there."""
    hosts = [topology.host(node) for node in {device.node for device in topology.devices}]
    return all(host is not None and not host.shared for host in hosts)


def has_disks(topology: Topology) -> bool:
    """Return whether the node of every device of ``topology`` has a disk, to which tensors can be moved."""
    hosts = [topology.host(node) for node in {device.node for device in topology.devices}]
    return all(host is not None and host.disk > 0 for host in hosts)


def least_share(shares: Sequence[HostShare | None]) -> HostShare | None:
    """Return the worst case of ``shares``, which are shares of hosts: the least memory, the least bandwidths and the
    longest latency of all entries. Return ``None`` if an entry is ``None`` (a host that is not described)."""
    known = [share for share in shares if share is not None]
    if len(known) < len(shares):
        return None
    return HostShare(
        min(s.bandwidth for s in known),
        max(s.latency for s in known),
        min(s.memory for s in known),
        min(s.update_bandwidth for s in known),
        min(s.disk_bandwidth for s in known),
    )
