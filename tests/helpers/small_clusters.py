"""Clusters of small devices whose memory is given in MiB."""

from __future__ import annotations

import math
from typing import Any

from partitioner import Constraints, Topology

MIB = 2**20
MARGIN = Constraints().memory_margin


def cluster(memory: float, devices: int = 4, nodes: int = 1, host: float | None = None) -> Topology:
    """Small devices: of each, plans may use ``memory`` MiB beside the margin that they leave by default; each node's
    host has ``host`` MiB, if there is one."""
    size = math.ceil(int(memory * MIB) / (1 - MARGIN))
    device = {"memory": size, "peak": {"fp32": 1e12}, "memory_bandwidth": 1e11, "launch": 1e-6}
    levels = [
        {"name": "inside", "nodes": 1, "bandwidth": 1e10, "latency": 1e-6},
        {"name": "between", "bandwidth": 1e9, "latency": 1e-5},
    ]
    node: dict[str, Any] = {"type": "small", "devices": devices, "count": nodes}
    if host is not None:
        node["host"] = {"memory": int(host * MIB), "bandwidth": 1e10}
    return Topology(
        name="small",
        nodes=(node,),
        types={"small": device},
        levels=levels,
    )
