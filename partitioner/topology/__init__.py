"""Describe clusters: devices, the links between them, and the groups of ranks that communicate over these links."""

from __future__ import annotations

from partitioner.topology.files import catalogue, known_presets, loads
from partitioner.topology.group import Group, Tier
from partitioner.topology.groups import axis_group, axis_groups, stage_links
from partitioner.topology.hardware import Device, DeviceType, Level, Link
from partitioner.topology.topology import Topology

__all__ = [
    "Device",
    "DeviceType",
    "Group",
    "Level",
    "Link",
    "Tier",
    "Topology",
    "axis_group",
    "axis_groups",
    "catalogue",
    "known_presets",
    "loads",
    "stage_links",
]
