"""Lower bound on a point from a cluster whose devices are all as good as the best device of the real one.

On that cluster few placements may be best: each axis spans a number of units on each level, with the nodes in any
order. The placements are judged as plans are, with collectives, transfers between stages and a simulated schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from partitioner.cost.evened import BEST, evened
from partitioner.cost.machine import Machine
from partitioner.cost.seats import SeatCosts
from partitioner.evaluate import Evaluator
from partitioner.job import Job
from partitioner.judge import Judge
from partitioner.solve.arrangement import arrangements
from partitioner.solve.nesting import all_nestings, equal_levels, fits
from partitioner.solve.placement import signature
from partitioner.solve.point import Point
from partitioner.topology.model import Topology
from passes.errors import PartitionError
from runtime.meshes import AXES

_NEAR = 0.75  # least mean peak, as a share of the best device's


class Alike:
    """Lower bounds of the points that ``evaluator`` solves."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._costs: dict[int, SeatCosts] = {}  # by identity of the evaluator's own costs
        self._machines: dict[tuple[int, ...], list[Machine]] = {}

    def quickly(self, point: Point, enough_s: float) -> float:
        """:meth:`least`, stopped when the bound falls below ``enough_s``; 0 if devices differ much."""
        return self._least(point, enough_s, enough_s) if self._are_near else 0.0

    def least(self, point: Point, enough_s: float) -> float:
        """Lower bound in seconds on every plan of ``point``, at most ``enough_s``; 0 if nothing can be said. Raises the
        exceptions of :meth:`Evaluator.own`."""
        return self._least(point, enough_s, 0.0)

    def _least(self, point: Point, enough_s: float, stop_s: float) -> float:
        """:meth:`least` that stops refining once the bound is below ``stop_s``."""
        if self._evaluator.tries_all(point) or not self._levels or not fits(point.grid, self._levels):
            return 0.0
        judge = self._judge(point, enough_s)
        floors = sorted(((judge.least(machine), machine) for machine in self._placed(point)), key=lambda pair: pair[0])
        least = enough_s
        for floor, machine in floors:
            if floor >= least:
                break
            if least < stop_s:  # the next floor bounds all remaining placements
                return min(least, floor)
            if (told := judge.least(machine, least)) < least:
                least = min(least, max(told, _judged(judge, machine)))
        return least

    @cached_property
    def _topologies(self) -> list[Topology]:
        """Topologies of the equalised cluster, one for each order of its nodes; empty if hosts are used or the
        placement is fixed."""
        job = self._evaluator.job
        if job.constraints.offload or self._evaluator.placements.in_order:  # hosts are not evened
            return []
        return evened(job.topology)

    @cached_property
    def _are_near(self) -> bool:
        """Whether the mean peak of the devices is near that of the best device."""
        job = self._evaluator.job
        paces, of_device = job.topology.paces
        rates = np.array([job.topology.types[kind].peak_of(job.precision) * speed for kind, speed in paces])
        return bool(rates[of_device].mean() >= _NEAR * rates.max())

    @cached_property
    def _levels(self) -> tuple[int, ...]:
        """Number of devices that each level joins."""
        if not self._topologies:
            return ()
        return equal_levels(self._topologies[0].changed(overrides={}, node_overrides={})) or ()

    @cached_property
    def _job(self) -> Job:
        return replace(self._evaluator.job, topology=self._topologies[0])

    def _judge(self, point: Point, enough_s: float) -> Judge:
        evaluator, job = self._evaluator, self._job
        local, costs, states = evaluator.own(point)
        if id(costs) not in self._costs:
            self._costs[id(costs)] = SeatCosts(costs.blocks, job.topology, costs.train, costs.again, costs.works)
        reference = replace(evaluator.locals.reference_seat(point.tp, point.cp), kind=BEST)
        return Judge(job, point, local, self._costs[id(costs)], states, reference, lambda *_: None, True, enough_s)

    def _placed(self, point: Point) -> list[Machine]:
        """The placements of a mesh, one for each distinct cost."""
        key = tuple(point.grid.values())
        if key not in self._machines:
            every = list(self._every(point))
            self._machines[key] = list({signature(machine): machine for machine in every}.values())
        return self._machines[key]

    def _every(self, point: Point) -> Iterator[Machine]:
        sizes = tuple(point.grid.get(axis, 1) for axis in AXES)
        nested = all_nestings(sizes, self._levels)
        first, precision = self._topologies[0], self._job.precision
        for devices in arrangements(first, point.grid):  # others that are tried on the cluster itself
            yield Machine(first, point.grid, precision, devices)
        for topology in self._topologies:
            for devices in nested:
                yield Machine(topology, point.grid, precision, devices)


def _judged(judge: Judge, machine: Machine) -> float:
    try:
        judge(machine)
    except PartitionError:  # stages that are followed may fit though none were found that do
        return 0.0
    return judge.leasts[-1]


__all__ = ["Alike"]
