"""Seconds of reducing gradients level by level, or in fewer bytes."""

from __future__ import annotations

from partitioner.cost.compute import memory_rate
from partitioner.topology.parts import DeviceType
from runtime.buckets import Compression

# How often compressing and making again pass through memory what is compressed, kernel by kernel.
_PASSES: dict[Compression, float] = {"bf16": 3.0, "int8": 14.0}


def coding_time(compression: Compression, num_bytes: float, device: DeviceType) -> float:
    """Seconds of compressing ``num_bytes`` of gradients, and of making as many again of what was sent."""
    return _PASSES[compression] * num_bytes / memory_rate("default", device)
