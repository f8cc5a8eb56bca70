"""What gathering weights takes at least under ZeRO-3, whatever the sharding: the same for a small microbatch as for a
large one, so that no share of a larger one's time says it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from partitioner.cost.asked import StateRead, gradient_bytes_of
from partitioner.cost.collectives import collective_time
from partitioner.cost.spread import hidden
from partitioner.job import Job
from partitioner.solve.placement import Placements
from partitioner.solve.point import Point
from partitioner.topology.groups import Group
from partitioner.topology.parts import DeviceType
from passes.blocks import FoldedModel

Seconds = Mapping[str, tuple[float, float]]  # by block, forward and backward


@dataclass(frozen=True)
class Floor:
    """What blocks take at least, wherever their ranks are; ``of_kind``: on each kind of device, empty where all are
    alike."""

    seconds: Seconds
    of_kind: tuple[Seconds, ...] = ()

    def each(self, change: Callable[[Seconds], Seconds]) -> Floor:
        """With all seconds changed."""
        return Floor(change(self.seconds), tuple(map(change, self.of_kind)))


@dataclass(frozen=True)
class _Read:
    """Bytes of the weights that a block reads, and of their gradients: of experts', and of the others."""

    experts: tuple[float, float]
    others: tuple[float, float]


class Gathers:
    """Of the blocks of a job; ``device``: the best kind."""

    def __init__(self, job: Job, placements: Placements, device: DeviceType) -> None:
        self.placements, self.train, self.slowdown = placements, job.train, device.overlap_slowdown
        self.overlap, short = job.constraints.overlap is not False, bool(job.constraints.short_gradients)
        self._reads = {name: _read(job.model, name, job.experts, short) for name in job.model.blocks}
        self._floors: dict[tuple[object, ...], Seconds] = {}

    def beside(self, floor: Floor | None, point: Point) -> Floor | None:
        """What blocks take at least that take ``floor`` without ZeRO."""
        gathers = self.floor(point)
        if not gathers:
            return floor
        if floor is None:
            return Floor(gathers)
        return floor.each(lambda seconds: self._beside(seconds, gathers))

    def _beside(self, seconds: Seconds, gathers: Seconds) -> Seconds:
        return {
            name: (self._both(a, gathers[name][0]), self._both(b, gathers[name][1])) for name, (a, b) in seconds.items()
        }

    def _both(self, seconds: float, gathers_s: float) -> float:
        """What of ``seconds`` is communication hides nothing, but then there is more to be hidden."""
        return seconds + hidden(seconds, gathers_s, self.slowdown, self.overlap)

    def floor(self, point: Point) -> Seconds:
        """Seconds in which a block gathers its weights, backward gathers them again and scatters gradients, over the
        best groups; empty where weights are not sharded."""
        if point.zero != 3 or point.sharers == point.expert_sharers == 1:
            return {}
        key = *point.grid.values(), point.ep, point.expert_tp, point.dp_shard
        if key not in self._floors:
            self._floors[key] = self._floor(*self._groups(point), point)
        return self._floors[key]

    def _groups(self, point: Point) -> tuple[Sequence[Group], Sequence[Group]]:
        """The groups that share weights, and experts' weights, on the placements that are tried."""
        if not self.placements.complete(point.grid):
            sizes, everywhere = (point.sharers, point.expert_sharers), point.pp == 1
            best = [self.placements.best_group(size, everywhere) for size in sizes]
            return best[:1], best[1:]
        plain = self.placements.candidates(point.grid)
        machines = [replace(m, ep=point.ep, etp=point.etp, zero=3, dp_shard=point.dp_shard) for m in plain]
        shards = [m.group("dp_shard" if m.hybrid else "dp", "cp") for m in machines]
        experts = [m.group("edp_shard" if m.hybrid else "experts") for m in machines]
        return list(dict.fromkeys(shards)), list(dict.fromkeys(experts))

    def _floor(self, shards: Sequence[Group], experts: Sequence[Group], point: Point) -> Seconds:
        def least(op: str, nbytes: float, groups: Sequence[Group]) -> float:
            return min(collective_time(op, nbytes, group) for group in groups) if nbytes else 0.0

        floor, known = dict[str, tuple[float, float]](), dict[_Read, tuple[float, float]]()
        for name, read in self._reads.items():
            if read not in known:
                ahead = back = 0.0
                parts = (read.others, shards, point.tp), (read.experts, experts, point.ep * point.expert_tp)
                for (weights, gradients), groups, ways in parts:
                    ahead += least("all_gather", weights / ways, groups)
                    back += least("reduce_scatter", gradients / ways, groups)
                known[read] = ahead, (ahead + back) * self.train
            floor[name] = known[read]
        return floor


def _read(model: FoldedModel, name: str, experts: Collection[str], short_gradients: bool) -> _Read:
    block = model.blocks[name]
    placeholders = {node.name: node for node in block.placeholders}
    names = next((call.states for call in model.calls if call.block == name), ())
    sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for own, state in zip(block.states, names, strict=False):
        node, expert = placeholders[own], state in experts
        sizes = StateRead(own, node.meta["val"].nbytes, gradient_bytes_of(node), expert).sizes(short_gradients)
        sums[expert] = [known + size for known, size in zip(sums[expert], sizes, strict=True)]
    return _Read((sums[True][0], sums[True][1]), (sums[False][0], sums[False][1]))
