"""Device mesh placed on a topology: the devices, communication groups and links of each pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from partitioner.candidate import split_of
from partitioner.cost.call.expert_parallel import NO_SPREAD, Spread
from partitioner.cost.call.fp8 import find_scaling
from partitioner.cost.call.states import Sharded
from partitioner.cost.call.transient_bytes import Scattering
from partitioner.emit.buckets import bucket_limit
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.passes.ir.hashing import hashed_once
from partitioner.runtime.program.mesh import AXES, HYBRID_AXES, hybrid_mesh
from partitioner.topology.group import Group, select_slowest_group
from partitioner.topology.groups import (
    Devices,
    axis_group,
    find_stage_link,
    first_group,
    is_nested,
    map_ranks_to_devices,
    reference_type,
    replica_groups,
    replica_paces,
    stage_capacity,
    stage_groups,
    stage_links,
    stage_paces,
    stage_ranks,
)
from partitioner.topology.hardware import DeviceType, Link
from partitioner.topology.hosts import HostShare, least_share
from partitioner.topology.topology import Topology

Found = TypeVar("Found")

_SCATTERED = {1: 1, 2: 2}  # buckets besides the gradients that stay. Under ZeRO-2 one fills and one is sent
RING = ("cp",)  # axes along which ranks send messages around a ring
HERE = Link(name="here", bandwidth=1e30, latency=0.0, level=-1)


@hashed_once
@dataclass(frozen=True)
class RankProfile:
    """The properties of a rank that decide how long one call of a block, such as a layer, takes on it.

    ``kind``: name of the device type. ``speed``: factor on the type's compute rates and memory bandwidth. ``groups``:
    pairs of a mesh axis and the communication group of the rank along that axis.
    """

    kind: str
    speed: float
    groups: tuple[tuple[str, Group], ...]


Seats = tuple[RankProfile, ...]  # the distinct profiles of ranks that wait for each other


@dataclass(frozen=True)
class PlacedMesh:
    """A topology with a device mesh laid over it: the devices and links that a program runs on. Values of this type are
    also called placements.

    - ``topology``: the cluster. ``mesh``: size of each axis. The sizes, without ``ep``, multiply to the number of
      ranks. ``devices``: the device index of every rank; ``None``: rank ``i`` runs on device ``i``.
    - ``precision``: the number format of most matrix products, such as ``"bf16"``.
    - ``ep``: number of ranks over which the experts are distributed. These ranks are taken from the ``dp``, ``cp`` and
      ``tp`` ranks. ``etp``: number of ranks over which one expert is sharded; 0 means ``tp``. ``num_experts``: number
      of experts of the layer with the most experts.
    - ``zero``: the ZeRO stage. ``dp_shard``: number of ``dp`` ranks that shard a parameter under ZeRO; 0 means all of
      them.
    - ``gradient_bytes``: bytes of all gradients of the unsharded model.
    - ``profile``: how the framework that runs the plan executes it. ``reserve``: bytes that stay free on every rank.
    - ``nested``: numbers of consecutive ranks that are placed alike, ascending, such as ``(8, 32)`` for 8 ranks inside
      each node and 32 inside each rack. With them, one group of an axis can stand for all others. Empty: not known.
    - ``memo``: a cache of results, which copies of this object share.

    A property that is a tuple has one entry per pipeline stage, unless its docstring says otherwise.
    """

    topology: Topology
    mesh: Mapping[str, int]
    precision: str = "bf16"
    devices: Devices = field(default=None, compare=False)
    ep: int = 1
    etp: int = 0
    zero: int = 0
    dp_shard: int = 0
    gradient_bytes: int = 0
    num_experts: int = 0
    profile: ExecutionProfile = OURS
    reserve: int = 0
    nested: tuple[int, ...] = field(default=(), compare=False)  # steps of a nesting, see topology/groups.py
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)  # shared by copies

    def compute_once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """Return the result of ``find()``, and cache it under ``key``. All copies that ``dataclasses.replace`` makes of
        this mesh share the cache. ``key`` must therefore contain every field that the result depends on and that may
        differ between copies."""
        if key not in self.memo:
            self.memo[key] = find()
        found: Found = self.memo[key]
        return found

    @cached_property
    def device(self) -> DeviceType:
        """Return the most common device type of the topology, for which the shardings of tensors are chosen."""
        return self.topology.types[reference_type(self.topology)]

    def group(self, *axes: str) -> Group:
        """Return the slowest communication group of ranks along the mesh axes ``axes``, among the groups of all
        pipeline stages.
        """
        if "pp" in axes:
            return axis_group(self.topology, self.mesh, *axes, devices=self.devices)
        return select_slowest_group(self.stage_groups(*axes))

    @cached_property
    def groups(self) -> dict[str, Group]:
        """Return mesh axis -> the slowest group of ranks along it, for each axis with more than one rank. Collectives
        inside blocks (such as layers) are priced for these groups.
        """
        return {axis: self.group(axis) for axis in AXES if self.mesh.get(axis, 1) > 1}

    def stage_groups(self, *axes: str) -> tuple[Group, ...]:
        """Return, for each pipeline stage, the slowest of the groups that its ranks form along the mesh axes ``axes``,
        which exclude ``pp``.

        The axis ``"experts"`` means the ranks that hold replicas of the same expert. The axes of hybrid sharding are
        allowed, too: ``dp_shard`` (the data-parallel ranks that shard a parameter together) and ``dp_replicate`` (the
        ranks that hold the same shard of it); for parameters of experts they are ``edp_shard`` and ``edp_replicate``.
        """
        if any(a in HYBRID_AXES for a in axes):
            return self.grid_groups(self.hybrid_grid("edp_shard" in axes or "edp_replicate" in axes), axes)
        others = tuple(a for a in axes if a != "experts")
        return self._find_expert_groups("dp", *others) if "experts" in axes else self._find_mesh_groups(*axes)

    def grid_groups(self, grid: Mapping[str, int], axes: Collection[str]) -> tuple[Group, ...]:
        """Return, for each pipeline stage, the slowest of the communication groups that its ranks form along the axes
        ``axes`` of ``grid``. ``grid``: axis -> size, outermost first; the sizes multiply to the number of ranks.

        Inside a stage, adjacent axes that are all in ``axes``, or all not in ``axes``, are joined to one axis. If more
        than three axes are left, the group of all ranks of the stage is returned instead; it contains each group along
        ``axes``.
        """
        runs: list[tuple[bool, int]] = []  # neighbouring axes that are all in axes, or all not, are merged into one
        for axis, size in grid.items():
            if axis != "pp" and size > 1:
                inside = axis in axes
                merged = runs.pop()[1] if runs and runs[-1][0] == inside else 1
                runs.append((inside, merged * size))
        names = AXES[1:]
        if len(runs) > len(names):  # more alternations than a mesh has axes: use the group of the whole stage
            runs = [(True, math.prod(size for _, size in runs))]
        mesh = {"pp": grid.get("pp", 1), **{name: size for name, (_, size) in zip(names, runs, strict=False)}}
        return self._find_slowest_groups(
            mesh, tuple(name for name, (inside, _) in zip(names, runs, strict=False) if inside)
        )

    def _find_mesh_groups(self, *axes: str) -> tuple[Group, ...]:
        return self._find_slowest_groups(self.mesh, axes, ring=axes == RING)

    def _find_expert_groups(self, *axes: str) -> tuple[Group, ...]:
        return self._find_slowest_groups(self.expert_mesh, axes)

    def _find_slowest_groups(
        self, mesh: Mapping[str, int], axes: tuple[str, ...], ring: bool = False
    ) -> tuple[Group, ...]:
        """Return, for each pipeline stage, the slowest of the groups that its ranks form along ``axes`` of ``mesh``.
        ``mesh``: axis -> number of ranks. ``ring``: whether to compute also the links over which each rank of a group
        sends to the next one in a ring."""

        def find() -> tuple[Group, ...]:
            if self.nested and is_nested([mesh.get(axis, 1) for axis in reversed(AXES)], self.nested):
                first = first_group(self.topology, mesh, *axes, devices=self.devices, ring=ring)
                return (first,) * mesh.get("pp", 1)
            return stage_groups(self.topology, mesh, *axes, devices=self.devices, ring=ring)

        return self.compute_once((tuple(mesh.items()), axes, ring), find)

    @cached_property
    def expert_mesh(self) -> dict[str, int]:
        """Return a second mesh of this mesh's ranks, for the groups of experts: axis -> size. In it, ``cp`` is the axis
        over which experts are distributed (``ep``), ``tp`` has the ranks over which one expert is sharded (``etp``),
        and ``dp`` has the replicas of an expert.
        """
        room = math.prod(self.mesh.get(axis, 1) for axis in ("dp", "cp", "tp"))
        etp = self.expert_tp
        return {"pp": self.mesh.get("pp", 1), "dp": room // (self.ep * etp), "cp": self.ep, "tp": etp, "ep": 1}

    @cached_property
    def hybrid_mesh(self) -> dict[str, int]:
        return hybrid_mesh({**self.mesh, "ep": self.ep}, self.etp, self.dp_shard)

    def hybrid_grid(self, experts: bool) -> dict[str, int]:
        """Return a second mesh of this mesh's ranks for hybrid sharding: axis -> size, outermost first. In this second
        mesh, two axes replace ``dp``: ``dp_shard`` has the ranks that shard a parameter together, ``dp_replicate`` the
        ranks that hold the same shard of it.

        ``experts``: whether to return the mesh for parameters of experts instead. It has the axes ``ep`` and ``etp``
        (ranks over which one expert is sharded), and ``edp_shard`` and ``edp_replicate`` in place of ``dp_shard`` and
        ``dp_replicate``.
        """
        parts, mesh, pp = self.hybrid_mesh, self.mesh, {"pp": self.mesh.get("pp", 1)}
        if experts:
            edp = {axis: parts[axis] for axis in ("edp_replicate", "edp_shard")}
            return pp | edp | {"ep": self.ep, "etp": self.expert_tp}
        dp = {axis: parts[axis] for axis in ("dp_replicate", "dp_shard")}
        return pp | dp | {"cp": mesh.get("cp", 1), "tp": mesh.get("tp", 1)}

    @property
    def hybrid(self) -> bool:
        """Return whether ZeRO shards parameters, gradients and optimizer states over a part of the ``dp`` ranks (hybrid
        sharding). The parts are then replicas of each other.
        """
        return self.zero > 0 and self.dp_shard not in (0, self.mesh.get("dp", 1))

    @property
    def expert_tp(self) -> int:
        """Return the number of ranks over which one expert is sharded."""
        return self.etp or self.mesh.get("tp", 1)

    @property
    def by_rows(self) -> bool:
        """Return whether the ranks of ``tp`` hold different whole experts and process different rows (tokens), instead
        of sharing each expert.
        """
        return split_of(self.mesh.get("tp", 1), self.ep, self.etp) == "rows"

    @property
    def replicas(self) -> int:
        """Return the number of ranks among which ZeRO shards a parameter that does not belong to experts."""
        return (self.dp_shard or self.mesh.get("dp", 1)) * self.mesh.get("cp", 1)

    @property
    def spread(self) -> Spread:
        """Return how expert parallelism and ZeRO-3 distribute block calls (such as layers) over the ranks of this mesh:
        the groups of ranks that share experts and that shard weights, and their sizes. Each group is the slowest over
        all pipeline stages."""
        used = (
            self.ep,
            self.etp,
            self.zero == 3 and (self.zero, self.dp_shard),
            self.num_experts,
            self.profile,
            self.precision,
        )
        return self.compute_once(("spread", *used), self._build_spread)

    def _build_spread(self) -> Spread:
        """Compute how expert parallelism and ZeRO-3 distribute block calls (such as layers) over the ranks of this
        mesh: the groups of ranks that share experts and that shard weights, and their sizes.
        """
        tp = self.mesh.get("tp", 1)
        plain = self.ep == 1 and self.zero != 3 and self.expert_tp == tp
        fp8 = find_scaling(self.precision, self.profile)
        if plain and fp8 is None and not self.num_experts and self.profile.executes_as(OURS):
            return NO_SPREAD
        sharded, apart = self.zero == 3, self.profile.dispatch == "rows"
        return Spread(
            experts=select_slowest_group(self._find_expert_groups("cp")),
            shards=self.group("dp_shard" if self.hybrid else "dp", "cp") if sharded else Group(1),
            expert_shards=self.group("edp_shard" if self.hybrid else "experts") if sharded else Group(1),
            expert_tensor=1.0 if self.by_rows else tp / self.expert_tp,
            tp=tp,
            num_experts=self.num_experts,
            fp8=fp8,
            whole_scatter=self.topology.whole_scatter,
            profile=self.profile,
            sharers=Group(1) if apart else select_slowest_group(self._find_expert_groups("tp")),
        )

    @property
    def sharded(self) -> Sharded:
        """Return how parameters, gradients and optimizer states are sharded in addition to ``tp``: the ZeRO stage, the
        number of ranks over which ZeRO shards, and the fraction of the experts' weights that a rank holds."""
        held = self.spread.of_experts
        sharers = self.hybrid_mesh["edp_shard"]
        return Sharded(self.zero, self.replicas, held, sharers, self.by_rows, self.hybrid)

    def scattering(self, num_microbatches: int) -> Scattering:
        """Return the bytes of gradient buckets that a rank holds temporarily under ZeRO-1 and ZeRO-2. A bucket is a
        buffer that collects gradients before they are reduce-scattered. ``num_microbatches``: number of microbatches of
        a step."""
        all_of_them = self.gradient_bytes / (self.mesh.get("tp", 1) * self.mesh.get("pp", 1))
        ranks = self.mesh.get("dp", 1) * self.mesh.get("cp", 1)
        bucket = min(float(bucket_limit(ranks)), all_of_them)
        sent = _SCATTERED.get(self.zero, 0)
        if not sent or not self.topology.whole_scatter:
            return Scattering(sent * bucket, bucket, self.topology.whole_scatter)
        # the receive buffer replaces the bucket's gradients; it is additional only if another bucket fills
        fills = self.zero == 1 or num_microbatches > 1 or bucket < all_of_them
        summed = 1 / self.replicas if self.zero == 1 else 0.0  # under ZeRO-2 the sum is the shard
        return Scattering((sent + fills + summed) * bucket, bucket, whole=True)

    @property
    def device_of_rank(self) -> tuple[int, ...]:
        return tuple(map_ranks_to_devices(self.topology, self.mesh, self.devices).tolist())

    @property
    def capacity(self) -> tuple[int, ...]:
        """Return, for each pipeline stage, the usable bytes of a rank on the smallest device of the stage."""
        whole = self.compute_once("capacity", lambda: stage_capacity(self.topology, self.mesh, self.devices))
        return tuple(max(0, room - self.reserve) for room in whole) if self.reserve else whole

    @property
    def links(self) -> tuple[Link, ...]:
        """Return the link from each stage to the next, ``pp - 1`` entries. Each entry is the slowest link between ranks
        of the two stages."""
        return self.compute_once("links", lambda: stage_links(self.topology, self.mesh, self.devices))

    def link(self, stage: int, other: int) -> Link:
        """Return the slowest link between the ranks of two pipeline stages, given by their indices ``stage`` and
        ``other``. If the indices are equal, nothing is sent, and the result is a link that takes no time."""
        if stage == other:
            return HERE
        return self.compute_once(
            ("link", stage, other), lambda: find_stage_link(self.topology, self.mesh, stage, other, self.devices)
        )

    @property
    def seats(self) -> tuple[Seats, ...]:
        """Return, for each pipeline stage, the distinct profiles of its ranks: device type, speed factor and
        communication groups. Each group is the slowest of the stage along its axis. Stages with equal profiles share
        one tuple.
        """
        return self.compute_once(("seats", self.ep, self.expert_tp), self._build_rank_profiles)

    def _build_rank_profiles(self) -> tuple[Seats, ...]:
        """Return, for each pipeline stage, the distinct profiles of its ranks (device type, speed factor, groups along
        each axis).
        """
        inner = [axis for axis in AXES if axis != "pp" and self.mesh.get(axis, 1) > 1]
        of_axes = [self.stage_groups(axis) for axis in inner]
        if self.ep > 1:
            inner, of_axes = [*inner, "ep"], [*of_axes, self._find_expert_groups("cp")]
        known: dict[Seats, Seats] = {}
        by_stage = zip(stage_paces(self.topology, self.mesh, self.devices), *of_axes, strict=True)
        seats = (
            tuple(RankProfile(kind, speed, tuple(zip(inner, groups, strict=True))) for kind, speed in paces)
            for paces, *groups in by_stage
        )
        return tuple(known.setdefault(of_stage, of_stage) for of_stage in seats)

    @property
    def pipelines(self) -> tuple[tuple[Seats, ...], ...]:
        """Return, for each rank of ``dp``, a tuple with one entry per stage: the distinct profiles (device type, speed
        factor, groups) of the ranks of this replica on this stage. Each replica has its own groups, because replicas do
        not wait for each other inside the pipeline. Equal tuples are one object."""
        return self.compute_once(("pipelines", self.ep, self.expert_tp), self._build_pipeline_profiles)

    @property
    def distinct_pipelines(self) -> tuple[tuple[Seats, ...], ...]:
        """Return the distinct tuples of ``pipelines``, in the order of the first rank of ``dp`` that has each. A tuple
        has the distinct rank profiles (device type, speed factor, groups) of each stage."""
        if self.has_equal_replicas:
            return (self.seats,)
        key = "distinct pipelines", self.ep, self.expert_tp
        return self.compute_once(key, lambda: tuple(dict.fromkeys(self.pipelines)))

    @property
    def has_equal_replicas(self) -> bool:
        """Return whether all replicas of ``dp`` are known to have equal devices and groups on each stage."""
        return bool(self.nested) or self.mesh.get("dp", 1) == 1

    def _build_pipeline_profiles(self) -> tuple[tuple[Seats, ...], ...]:
        """Return, for each rank of ``dp``, a tuple with one entry per pipeline stage: the distinct profiles (device
        type, speed factor, groups) of the ranks of this replica on this stage.
        """
        dp, expert_mesh = self.mesh.get("dp", 1), self.expert_mesh
        if self.has_equal_replicas:
            return (self.seats,) * dp
        inside: dict[str, tuple[Mapping[str, int], str]] = {
            axis: (self.mesh, axis) for axis in ("cp", "tp") if self.mesh.get(axis, 1) > 1
        }
        if self.ep > 1 and expert_mesh["dp"] % dp == 0:  # otherwise an ep group spans several replicas
            inside["ep"] = expert_mesh, "cp"
        of_paces, paces = replica_paces(self.topology, self.mesh, self.devices)
        each = [
            replica_groups(self.topology, mesh, dp, axis, devices=self.devices, ring=(name,) == RING)
            for name, (mesh, axis) in inside.items()
        ]
        numbers = np.stack([of_paces, *(of_axis for of_axis, _ in each)])
        kinds, of_replica = np.unique(numbers.transpose(2, 1, 0), axis=0, return_inverse=True)
        known: dict[Any, Any] = {}
        found = []
        for by_stage in kinds.tolist():
            seats = []
            for (pace, *own), of_stage in zip(by_stage, self.seats, strict=True):
                groups = {axis: of_kind[k] for axis, (_, of_kind), k in zip(inside, each, own, strict=True)}
                over = tuple((axis, groups.get(axis, group)) for axis, group in of_stage[0].groups)
                here = tuple(RankProfile(kind, speed, over) for kind, speed in paces[pace])
                seats.append(known.setdefault(here, here))
            found.append(known.setdefault(tuple(seats), tuple(seats)))
        return tuple(found[k] for k in of_replica.reshape(-1).tolist())

    def devices_of(self, stage: int) -> list[DeviceType]:
        """Return the distinct device types of the pipeline stage with index ``stage``, with their rates scaled by the
        devices' speed factors."""
        return [self.topology.paced_type(seat.kind, seat.speed) for seat in self.seats[stage]]

    def host(self, stage: int) -> HostShare | None:
        """Return the share of a host's memory and bandwidth that every rank of the stage with index ``stage`` has at
        least: the smallest memory and bandwidths and the longest latency of its ranks. Return ``None`` if the topology
        does not describe the host of one of these ranks."""

        def find() -> tuple[HostShare | None, ...]:
            """Return, for each pipeline stage, the share of a host that each of its ranks has at least; ``None`` for a
            stage with a host that the topology does not describe."""
            shares = self.topology.host_shares
            if len(self.topology.different_host_shares) == 1:
                return (shares[0],) * self.mesh.get("pp", 1)
            return tuple(
                least_share([shares[d] for d in self.device_of_rank[ranks.start : ranks.stop]])
                for ranks in stage_ranks(self.mesh)
            )

        return self.compute_once("hosts", find)[stage]

    @cached_property
    def peak(self) -> float:
        """Return the sum of the peak FLOP/s of all devices in the precision of most matrix products."""
        paces, of_device = self.topology.paces
        counts = np.bincount(
            of_device[map_ranks_to_devices(self.topology, self.mesh, self.devices)], minlength=len(paces)
        )
        rates = [self.topology.types[kind].peak_of(self.precision) * speed for kind, speed in paces]
        return float(counts @ np.array(rates))
