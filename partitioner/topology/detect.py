"""The machine at hand as a topology."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from partitioner.errors import TopologyError
from partitioner.topology.files import catalogue
from partitioner.topology.model import Topology
from partitioner.topology.quantities import quantity

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def local(num_ranks: int) -> Topology:
    """``num_ranks`` processes that share this machine's cores and memory evenly. Figures per core are rough.

    Raises :class:`TopologyError` unless ``num_ranks`` is positive.
    """
    if num_ranks < 1:
        raise TopologyError(f"local topology of {num_ranks} ranks; expected at least 1")
    core: dict[str, Any] = dict(catalogue("devices")["cpu-core"])
    share = num_cores() / num_ranks
    core["memory"] = physical_memory() // num_ranks
    core["memory_bandwidth"] = quantity(core["memory_bandwidth"]) * share
    core["peak"] = {name: quantity(value) * share for name, value in core["peak"].items()}
    levels = [{"name": "loopback", **catalogue("links")["loopback"]}] if num_ranks > 1 else []
    return Topology(
        name=f"local:{num_ranks}", nodes=({"type": "cpu", "devices": num_ranks},), types={"cpu": core}, levels=levels
    )


def detect() -> Topology:
    """This machine's CUDA devices, times the launcher's number of nodes; without CUDA, its CPU.

    Reads ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` as torchrun sets them. Raises :class:`TopologyError` for a device
    that the catalogue does not know.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if not torch.cuda.is_available():
        return local(world)
    kinds = [_kind(torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    if len(set(kinds)) > 1:
        raise TopologyError(f"this machine mixes {', '.join(sorted(set(kinds)))}; describe it in a YAML file")
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(len(kinds))))
    nodes = max(1, world // per_node)
    inside, between = _links(kinds[0])
    memory = torch.cuda.get_device_properties(0).total_memory
    levels = [{"name": inside, "nodes": 1, **catalogue("links")[inside]}] if per_node > 1 else []
    if nodes > 1:
        levels.append({"name": between, **catalogue("links")[between]})
    return Topology(
        name=f"detected {kinds[0]}",
        nodes=({"type": kinds[0], "devices": per_node, "count": nodes},),
        types={kinds[0]: {**catalogue("devices")[kinds[0]], "memory": memory}},
        levels=levels,
    )


def _kind(name: str) -> str:
    for kind, entry in catalogue("devices").items():
        if name in entry.get("matches", ()):
            return kind
    raise TopologyError(
        f"unknown device {name!r}; describe it in a YAML file, under types: mine: {{like: h100-sxm, ...}}"
    )


def _links(kind: str) -> tuple[str, str]:
    """The links of the machine that is built from ``kind``; PCIe and Ethernet where none is known."""
    for machine in catalogue("machines").values():
        if machine["type"] == kind and "inside" in machine:
            return machine["inside"], machine["between"]
    return "pcie4", "ethernet-10g"


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _CGROUP_LIMIT.exists():
        limit = _CGROUP_LIMIT.read_text().strip()
        memory = min(memory, int(limit)) if limit.isdigit() else memory
    return memory
