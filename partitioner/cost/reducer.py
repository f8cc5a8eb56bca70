"""Seconds of reducing gradients over groups of ranks: in one collective, hierarchically, or compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partitioner.cost.collectives import collective_time
from partitioner.cost.compute import memory_rate
from partitioner.emit_levels import Reducing
from partitioner.topology.groups import Group
from partitioner.topology.parts import DeviceType
from runtime.buckets import Compression
from runtime.compression import CODECS, wire_share

# Passes through memory of compression and decompression together, summed over their kernels.
_PASSES: dict[Compression, float] = {"bf16": 3.0, "int8": 14.0}

# The machine's names of the axes inside a part of dp, and between parts.
INNER = {"dp": "dp_shard", "cp": "cp", "experts": "edp_shard"}
OUTER = {"dp": "dp_replicate", "experts": "edp_replicate"}
_EXACT = frozenset({"tp"})  # reductions over these axes alone are not over data, and are never compressed


def coding_time(compression: Compression, num_bytes: float, device: DeviceType) -> float:
    """Seconds of compressing ``num_bytes`` of gradients and decompressing as many received bytes."""
    return _PASSES[compression] * num_bytes / memory_rate("default", device)


class Sent(NamedTuple):
    """Seconds of communication, and seconds of compression on the rank itself."""

    seconds: float
    coding_s: float = 0.0

    def and_(self, seconds: float) -> Sent:
        return Sent(self.seconds + seconds, self.coding_s)


@dataclass(frozen=True)
class Reducer:
    """Cost of reducing the gradients of a stage.

    ``group``: maps axes, in the machine's terms, to a group of ranks. ``itemsize``: bytes of one element of a gradient.
    """

    group: Callable[[tuple[str, ...]], Group]
    how: Reducing
    device: DeviceType
    itemsize: int = 4

    def all_reduce(self, num_bytes: float, axes: tuple[str, ...]) -> Sent:
        """Cost of an all-reduce of ``num_bytes`` of gradients over ``axes``: of a bucket, or of the shards left after
        scattering."""
        inner, outer = self._levels(axes)
        if inner.size > 1 and outer.size > 1:
            inside = collective_time("reduce_scatter", num_bytes, inner) + collective_time(
                "all_gather", num_bytes, inner
            )
            return self._added(num_bytes / inner.size, outer, axes).and_(inside)
        return self._added(num_bytes, self.group(axes), axes)

    def _levels(self, axes: tuple[str, ...]) -> tuple[Group, Group]:
        if not self.how.inside or not any(axis in OUTER for axis in axes):
            return Group(1), Group(1)
        inner = tuple(INNER.get(axis, axis) for axis in axes)
        return self.group(inner), self.group(tuple(OUTER[axis] for axis in axes if axis in OUTER))

    def _added(self, num_bytes: float, group: Group, axes: Sequence[str]) -> Sent:
        if self.how.compression is None or group.size == 1 or not {*axes} - _EXACT:
            return Sent(collective_time("all_reduce", num_bytes, group))
        sent, back = self._exchange(num_bytes, group), self._coded(num_bytes / group.size)
        return Sent(sent.seconds + collective_time("all_gather", self._wire(num_bytes), group), sent.coding_s + back)

    def lost(self, axes: tuple[str, ...]) -> float:
        """Share of a bucket kept as compression residual when it is reduced over ``axes``: of the sent data and of the
        sums."""
        kind = self.how.compression
        if kind is None or not CODECS[kind].feedback or not {*axes} - _EXACT or self.group(axes).size == 1:
            return 0.0
        inner, outer = self._levels(axes)
        if inner.size > 1 and outer.size > 1:
            return (1 + 1 / outer.size) / inner.size
        return 1 + 1 / self.group(axes).size

    def scatter(self, num_bytes: float, axes: tuple[str, ...], last: bool) -> Sent:
        """Cost of a reduce-scatter of a bucket to the ranks that share its states.

        ``last``: it crosses the outermost links of the reduction, on which gradients may be compressed.
        """
        group = self.group(axes)
        if self.how.compression is None or not last or group.size == 1:
            return Sent(collective_time("reduce_scatter", num_bytes, group))
        return self._exchange(num_bytes, group)

    def _exchange(self, num_bytes: float, group: Group) -> Sent:
        return Sent(
            collective_time("all_to_all", self._wire(num_bytes) * group.size, group),
            self._coded(num_bytes),
        )

    def _wire(self, num_bytes: float) -> float:
        assert self.how.compression is not None
        return num_bytes * wire_share(self.how.compression, self.itemsize)

    def _coded(self, num_bytes: float) -> float:
        assert self.how.compression is not None
        return coding_time(self.how.compression, num_bytes, self.device)
