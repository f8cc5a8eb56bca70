"""Lower bound on the time of reducing gradients, wherever the ranks of a point are placed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from partitioner.cost.levels import best_reducers, data_reducers
from partitioner.cost.planned import Planned
from partitioner.cost.reductions import Sizes, last_levels, reduced_sizes, reduction_of
from partitioner.cost.states import StateCost
from partitioner.solve.placement import Placements
from partitioner.solve.point import Point
from partitioner.topology.parts import DeviceType


class LeastReduced:
    """Lower bounds in seconds, each computed once. ``device``: the best device type of the cluster."""

    def __init__(self, job: Planned, placements: Placements, device: DeviceType) -> None:
        self._job, self._placements, self._device = job, placements, device
        self._known: dict[tuple[int, ...], float] = {}

    def seconds(self, point: Point, states: Callable[[], Iterable[StateCost]]) -> float:
        """Lower bound in seconds on reducing the gradients of ``states`` in all stages, one after the other.

        ``states``: the least that a rank can hold of them. The bound is 0 with one replica, under ZeRO-3 and under
        hybrid sharding.
        """
        if point.replicas == 1 or point.zero == 3 or point.dp_shard:  # within nodes it may take next to nothing
            return 0.0
        single = point.pp == 1
        key = (point.dp, point.cp, point.tp, min(point.zero, 1), point.ep > 1, single)
        if key not in self._known:
            grid, constraints = {"dp": point.dp, "cp": point.cp, "tp": point.tp}, self._job.constraints
            if single and self._placements.complete(grid):
                reducers = data_reducers(self._placements.candidates(grid), point.zero, constraints)
            else:
                group = self._placements.best_group(point.replicas, everywhere=single)
                reducers = best_reducers(self._job.topology, group, self._device, constraints)
            sizes, last_level = _over_data(states())
            totals = (reduction_of(sizes, last_level, r, overlap=False).total_s for r in reducers)
            self._known[key] = min(totals, default=0.0)  # one bucket starts the least often
        return self._known[key]


def _over_data(states: Iterable[StateCost]) -> tuple[Sizes, dict[tuple[str, ...], bool]]:
    """Reduced bytes by key, and by axes whether scattering is the last step, if ``dp`` stands for all ranks with equal
    weights.

    ``states`` contains few distinct objects: equal states share one.
    """
    costs = list(states)
    often = Counter(map(id, costs))
    sizes: Sizes = {}
    last_level: dict[tuple[str, ...], bool] = {}
    for cost in {id(cost): cost for cost in costs}.values():
        plain = replace(cost, grad_axes=("dp",) if cost.grad_axes else ())
        for key, size in reduced_sizes(plain).items():
            sizes[key] = sizes.get(key, 0.0) + often[id(cost)] * size
        last_level |= last_levels(plain)
    return sizes, last_level


__all__ = ["LeastReduced"]
