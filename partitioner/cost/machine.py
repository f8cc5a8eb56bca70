"""A topology with a mesh laid over it: which devices, groups and links each pipeline stage has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from partitioner.topology.groups import (
    Devices,
    Group,
    axis_group,
    placed,
    reference_type,
    stage_capacity,
    stage_groups,
    stage_links,
    stage_paces,
)
from partitioner.topology.model import Topology
from partitioner.topology.parts import DeviceType, Link
from runtime.program import AXES


@dataclass(frozen=True)
class Seat:
    """What decides how long a call takes on a rank: a kind of device, its speed, and its groups by mesh axis."""

    kind: str
    speed: float
    groups: tuple[tuple[str, Group], ...]


@dataclass(frozen=True)
class Machine:
    """``devices``: the device of every rank; ``None``: rank ``i`` on device ``i``. ``precision``: of most of the work.

    All but ``device``, ``group`` and ``groups`` are by pipeline stage.
    """

    topology: Topology
    mesh: Mapping[str, int]
    precision: str = "bf16"
    devices: Devices = field(default=None, compare=False)

    @cached_property
    def device(self) -> DeviceType:
        """The kind of device that the sharding is chosen for."""
        return self.topology.types[reference_type(self.topology)]

    def group(self, *axes: str) -> Group:
        """The slowest group over ``axes`` on any stage."""
        if "pp" in axes:
            return axis_group(self.topology, self.mesh, *axes, devices=self.devices)
        return min(self.stage_groups(*axes), key=lambda g: (g.bus_bandwidth, -g.all_reduce_start))

    @cached_property
    def groups(self) -> dict[str, Group]:
        """By mesh axis, for the collectives inside blocks."""
        return {axis: self.group(axis) for axis in AXES if self.mesh.get(axis, 1) > 1}

    def stage_groups(self, *axes: str) -> tuple[Group, ...]:
        """The slowest group over ``axes``, ``pp`` not among them."""
        if axes not in self._stage_groups:
            self._stage_groups[axes] = stage_groups(self.topology, self.mesh, *axes, devices=self.devices)
        return self._stage_groups[axes]

    @cached_property
    def _stage_groups(self) -> dict[tuple[str, ...], tuple[Group, ...]]:
        return {}

    @property
    def device_of_rank(self) -> tuple[int, ...]:
        return tuple(placed(self.topology, self.mesh, self.devices).tolist())

    @cached_property
    def capacity(self) -> tuple[int, ...]:
        """Bytes that a rank may use."""
        return stage_capacity(self.topology, self.mesh, self.devices)

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """From each stage to the next."""
        return stage_links(self.topology, self.mesh, self.devices)

    @cached_property
    def seats(self) -> tuple[tuple[Seat, ...], ...]:
        """The different seats; each with the slowest groups of the stage."""
        inner = [axis for axis in AXES if axis != "pp" and self.mesh.get(axis, 1) > 1]
        of_axes = [self.stage_groups(axis) for axis in inner]
        return tuple(
            tuple(Seat(kind, speed, tuple(zip(inner, groups, strict=True))) for kind, speed in paces)
            for paces, *groups in zip(stage_paces(self.topology, self.mesh, self.devices), *of_axes, strict=True)
        )

    def devices_of(self, stage: int) -> list[DeviceType]:
        """The different kinds of devices, at their speeds."""
        return [self.topology.paced_type(seat.kind, seat.speed) for seat in self.seats[stage]]

    @cached_property
    def peak(self) -> float:
        """FLOP/s of all devices together, in ``precision``."""
        paces, of_device = self.topology.paces
        counts = np.bincount(of_device[placed(self.topology, self.mesh, self.devices)], minlength=len(paces))
        rates = [self.topology.types[kind].peak_of(self.precision) * speed for kind, speed in paces]
        return float(counts @ np.array(rates))
