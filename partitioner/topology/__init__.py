"""Devices, links and the groups of ranks that talk over them."""

from partitioner.topology.files import catalogue, known_presets, loads
from partitioner.topology.groups import Group, Tier, axis_group, axis_groups, stage_links
from partitioner.topology.model import Topology
from partitioner.topology.parts import Device, DeviceType, Level, Link

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
