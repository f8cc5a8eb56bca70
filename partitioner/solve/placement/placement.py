"""Map the ranks of a mesh to devices: find the placement whose plan has the least step time.

Where devices and levels are all alike, placements differ only in the assignment of axes to levels (``regular.py``).
Otherwise tensor groups are formed by their links and ordered by the capabilities of their devices (``irregular.py``),
and groups are exchanged between stages as long as this reduces the step time. Every placement is evaluated by the cost
model of the plan. The placement of rank ``i`` on device ``i`` is always tried, so the result is never worse.

``least_of`` chooses the cheapest of several alternatives, some of which may have no plan, or reports why none has one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.call.collectives import collective_time
from partitioner.cost.step.placed_mesh import PlacedMesh
from partitioner.cost.step.relaxed_mesh import best_group
from partitioner.errors import CapacityError
from partitioner.passes.errors import PartitionError
from partitioner.runtime.program.mesh import AXES
from partitioner.solve.placement.irregular import group_size, has_all_arrangements, list_arrangements
from partitioner.solve.placement.regular import equal_levels, is_regular_nesting, list_best_nestings
from partitioner.topology.group import Group
from partitioner.topology.groups import kinds_of, rank_grid
from partitioner.topology.topology import Topology

T = TypeVar("T")


def least_of(attempts: Sequence[Callable[[], tuple[float, T]]]) -> tuple[float, T]:
    """The result of the least cost, the first of equals. Raises :func:`find_least_shortage` where all attempts
    raise."""
    best: tuple[float, T] | None = None
    errors: list[PartitionError] = []
    for attempt in attempts:
        try:
            found = attempt()
        except PartitionError as error:
            errors.append(error)
            continue
        best = found if best is None or found[0] < best[0] else best
    if best is None:
        raise find_least_shortage(errors)
    return best


def find_least_shortage(errors: Sequence[PartitionError]) -> PartitionError:
    """The one that lacks least memory, if any lacks memory; else the first."""
    short = [error for error in errors if isinstance(error, CapacityError)]
    return min(short, key=lambda error: error.missing_bytes) if short else errors[0]


Ints = NDArray[np.int64]

Result = TypeVar("Result")
Key = tuple[int, ...]

_BETTER = 1e-9  # of a cost: what rounding may differ by

EXCHANGES = 60  # placements that exchanges may placement_evaluator for one mesh
_LOOKS = 400  # and look at
_NEAR = 1.1  # of the best cost of any mesh: exchanges have gained 3 % at most,
_NEAR_INSIDE = 2.5  # and a half where pairs of devices have links of their own
_AS_LIKELY = 1.01  # times the likely cost of the best placement, those that are judged
_KEPT, _AS_GOOD = 4, 1.05  # placements of a mesh that are judged again for every microbatch, times the best one's cost
_SENT = 1e6  # bytes, by which groups are told apart
_MOST_GROUPS = 64  # or devices, that are exchanged


@dataclass(frozen=True)
class BestPlacement(Generic[Result]):
    """The best placement that was tried: its cost, and what judging it gave."""

    machine: PlacedMesh
    cost: float
    result: Result


@dataclass
class Placements:
    """The placements of one topology, found once for each mesh. ``precision``: that of most of the work; ``in_order``:
    only ranks on their namesakes."""

    topology: Topology
    precision: str = "bf16"
    in_order: bool = False
    _levels: tuple[int, ...] | None = field(init=False)
    _candidates: dict[Key, list[PlacedMesh]] = field(default_factory=dict, init=False)
    _narrowed: set[Key] = field(default_factory=set, init=False)
    _exchanged: set[Key] = field(default_factory=set, init=False)
    _best_groups: dict[tuple[int, bool], Group] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._levels = equal_levels(self.topology)

    def nested(self, mesh: Mapping[str, int]) -> bool:
        """Whether all devices are alike, and all groups of a level, and ``mesh`` fits them."""
        return self._levels is not None and is_regular_nesting(mesh, self._levels)

    def complete(self, mesh: Mapping[str, int]) -> bool:
        """Whether the candidates stand for all placements of ``mesh``: all nestings, or all permutations."""
        return self.in_order or self.nested(mesh) or has_all_arrangements(self.topology)

    def candidates(self, mesh: Mapping[str, int]) -> list[PlacedMesh]:
        """What is tried for ``mesh``, of placements that cost the same one each."""
        key = _mesh_to_key(mesh)
        if key not in self._candidates:
            if self.in_order:
                machines = [PlacedMesh(self.topology, mesh, self.precision)]
            elif self._levels is not None and self.nested(mesh):
                made = list_best_nestings(self.topology, mesh, self._levels)
                machines = [PlacedMesh(self.topology, mesh, self.precision, devices, nested=s) for devices, s in made]
            else:
                every = list_arrangements(self.topology, mesh)
                machines = [PlacedMesh(self.topology, mesh, self.precision, devices) for devices in every]
                machines = list({identify_equal_cost(machine): machine for machine in reversed(machines)}.values())[
                    ::-1
                ]
            self._candidates[key] = machines
        return self._candidates[key]

    @property
    def _differ_inside(self) -> bool:
        """Whether pairs of devices have links of their own, so that who is in a group with whom matters."""
        return bool(self.topology.own_links or self.topology.pattern_kinds)

    def best_group(self, size: int, everywhere: bool = False) -> Group:
        """What no collective over ``size`` devices can beat, wherever they are; ``everywhere``: the slowest of those
        over all devices."""
        if (size, everywhere) not in self._best_groups:
            self._best_groups[size, everywhere] = best_group(self.topology, size, everywhere)
        return self._best_groups[size, everywhere]

    def at(self, mesh: Mapping[str, int], devices: Sequence[int]) -> PlacedMesh:
        """The placement that puts the ranks of ``mesh`` on ``devices``."""
        tried = (
            machine for machine in self._candidates.get(_mesh_to_key(mesh), ()) if machine.device_of_rank == devices
        )
        return next(tried, None) or PlacedMesh(self.topology, mesh, self.precision, tuple(devices))

    def best(
        self,
        mesh: Mapping[str, int],
        placement_evaluator: Callable[[PlacedMesh], tuple[float, Result]],
        least: Callable[[PlacedMesh, float], float] | None = None,
        enough: float = np.inf,
        exchanges: int = EXCHANGES,
        likely: Callable[[PlacedMesh], float] | None = None,
    ) -> BestPlacement[Result]:
        """The placement of ``mesh`` that ``placement_evaluator`` gives the least cost, and the result that came with
        it.

        ``least``: what ``placement_evaluator`` cannot go below, quickly, found out as far as a cost that is enough;
        what cannot be better is then not judged. ``enough``: a cost that is known for another mesh; one that is far
        from it is not improved on. ``exchanges``: placements that are then judged besides, at most. ``likely``: what
        tells good placements from others, much sooner than ``placement_evaluator``, which is then not asked for those
        that are clearly worse.
        Raises what ``placement_evaluator`` raises where it refuses all: the :class:`CapacityError` that lacks least, if
        any.
        """
        best: BestPlacement[Result] | None = None
        errors: list[PartitionError] = []
        costs: list[tuple[float, int]] = []
        machines = self.candidates(mesh)
        floors = [0.0 if least is None else least(machine, 0.0) for machine in machines]
        told = floors if likely is None or len(machines) == 1 else [likely(machine) for machine in machines]
        enough_told = min(told) * _AS_LIKELY if told is not floors else np.inf
        for number in sorted(range(len(machines)), key=lambda k: (told[k], floors[k])):
            machine = machines[number]
            if best is not None and told[number] > enough_told:
                costs.append((max(floors[number], told[number]), number))
                continue
            if best is not None and least is not None:
                floor = least(machine, min(best.cost, enough))
                if floor >= min(best.cost, enough):
                    costs.append((floor, number))
                    continue
            found = _evaluate_mesh_placement(machine, placement_evaluator, errors)
            if found is None and likely is not None and self.nested(mesh) and isinstance(errors[-1], CapacityError):
                break  # where devices are all alike what is lacking is lacking in any order
            if found is not None:
                costs.append((found.cost, number))
                best = found if best is None or found.cost < best.cost * (1 - _BETTER) else best
        if best is not None and not self.complete(mesh):
            best = self._improve_by_exchange(best, placement_evaluator, least, costs, errors, enough, exchanges, likely)
        if best is None:
            raise find_least_shortage(errors)
        return best

    def _improve_by_exchange(
        self,
        best: BestPlacement[Result],
        placement_evaluator: Callable[[PlacedMesh], tuple[float, Result]],
        least: Callable[[PlacedMesh, float], float] | None,
        costs: list[tuple[float, int]],
        errors: list[PartitionError],
        enough: float,
        exchanges: int,
        likely: Callable[[PlacedMesh], float] | None,
    ) -> BestPlacement[Result]:
        """``best``, or what exchanges make of it: once for a mesh. For its other microbatches the best of the
        candidates, which took ``costs``, and ranks on their namesakes, are enough. Where ``likely`` tells placements
        apart, exchanges go by that first."""
        mesh = best.machine.mesh
        key = _mesh_to_key(mesh)
        if key not in self._narrowed:
            self._narrowed.add(key)
            near = min(costs)[0] * _AS_GOOD
            kept = sorted({0, *(number for cost, number in sorted(costs)[:_KEPT] if cost <= near)})
            self._candidates[key] = [self._candidates[key][number] for number in kept]
        if key in self._exchanged or best.cost >= enough * (_NEAR_INSIDE if self._differ_inside else _NEAR):
            return best
        self._exchanged.add(key)
        improved = best
        if likely is not None:
            start = BestPlacement(best.machine, likely(best.machine), None)
            told = self._exchange_groups(start, lambda machine: (likely(machine), None), None, [], np.inf, EXCHANGES)
            if (
                told is not start
                and (found := _evaluate_mesh_placement(told.machine, placement_evaluator, errors)) is not None
            ):
                improved = found if found.cost < best.cost * (1 - _BETTER) else best
        improved = self._exchange_groups(improved, placement_evaluator, least, errors, enough, exchanges)
        if improved is not best:
            self._candidates[key].append(improved.machine)
        return improved

    def _exchange_groups(
        self,
        best: BestPlacement[Result],
        placement_evaluator: Callable[[PlacedMesh], tuple[float, Result]],
        least: Callable[[PlacedMesh, float], float] | None,
        errors: list[PartitionError],
        enough: float,
        left: int,
    ) -> BestPlacement[Result]:
        """Exchange groups between stages, and stages with each other, until nothing helps."""
        mesh = best.machine.mesh
        seen = {self._identify_placement(machine) for machine in self.candidates(mesh)}
        looks = _LOOKS
        improved = True
        while improved and left > 0 and looks > 0:
            improved = False
            for devices in _list_exchange_neighbours(np.asarray(best.machine.devices), mesh, self._differ_inside):
                machine = PlacedMesh(self.topology, mesh, self.precision, devices)
                mark = self._identify_placement(machine)
                looks -= 1
                if left <= 0 or looks <= 0:
                    break
                if mark in seen:
                    continue
                seen.add(mark)
                if least is not None and least(machine, min(best.cost, enough)) >= min(best.cost, enough):
                    continue
                left -= 1
                found = _evaluate_mesh_placement(machine, placement_evaluator, errors)
                if found is not None and self._is_better(found, best):
                    best, improved = found, True
                    break
        return best

    def _is_better(self, found: BestPlacement[Result], best: BestPlacement[Result]) -> bool:
        """Whether ``found`` costs less, or as much over faster groups: of several that are slow, one is fewer."""
        if found.cost < best.cost * (1 - _BETTER):
            return True
        alike = self._differ_inside and found.cost <= best.cost * (1 + _BETTER)
        return alike and _in_groups(found.machine) < _in_groups(best.machine) * (1 - _BETTER)

    def _identify_placement(self, machine: PlacedMesh) -> Hashable:
        """Equal for placements of which one is enough."""
        return identify_equal_cost(machine), _in_groups(machine) if self._differ_inside else 0.0


def identify_equal_cost(machine: PlacedMesh) -> Hashable:
    """Equal for placements that cost the same."""
    wide = [axis for axis in AXES if axis != "pp" and machine.mesh.get(axis, 1) > 1]
    together = [machine.stage_groups(*axes) for axes in combinations(wide, 2)]
    across = machine.group("pp") if machine.mesh.get("pp", 1) > 1 else None
    links = tuple((link.bandwidth, link.latency) for link in machine.links)
    return machine.seats, machine.pipelines, machine.capacity, links, tuple(together), across


def _in_groups(machine: PlacedMesh) -> float:
    """Seconds of a collective over each group of every axis, added up."""
    total, rows_of = 0.0, np.asarray(machine.devices)
    for axis in AXES:
        if axis != "pp" and machine.mesh.get(axis, 1) > 1:
            numbers, groups = kinds_of(machine.topology, rows_of[rank_grid(machine.mesh, axis)])
            seconds = np.array([collective_time("all_reduce", _SENT, group) for group in groups])
            total += float(seconds[numbers].sum())
    return total


def _list_exchange_neighbours(devices: Ints, mesh: Mapping[str, int], inside: bool) -> Iterator[Ints]:
    """Two stages exchanged, then two groups of different stages; ``inside``: then two devices of any groups."""
    stages = mesh.get("pp", 1)
    by_stage = devices.reshape(stages, -1)
    for a, b in combinations(range(stages), 2):
        order = list(range(stages))
        order[a], order[b] = b, a
        yield by_stage[order].reshape(-1)
    groups = devices.reshape(-1, group_size(mesh))
    per_stage = len(groups) // stages
    for a, b in combinations(range(len(groups) if len(groups) <= _MOST_GROUPS else 0), 2):
        if a // per_stage != b // per_stage:
            order = list(range(len(groups)))
            order[a], order[b] = b, a
            yield groups[order].reshape(-1)
    for a, b in combinations(range(len(devices) if inside and len(devices) <= _MOST_GROUPS else 0), 2):
        changed = devices.copy()
        changed[[a, b]] = changed[[b, a]]
        yield changed


def _evaluate_mesh_placement(
    machine: PlacedMesh, placement_evaluator: Callable[[PlacedMesh], tuple[float, Result]], errors: list[PartitionError]
) -> BestPlacement[Result] | None:
    try:
        return BestPlacement(machine, *placement_evaluator(machine))
    except PartitionError as error:
        errors.append(error)
        return None


def _mesh_to_key(mesh: Mapping[str, int]) -> Key:
    return tuple(mesh.get(axis, 1) for axis in AXES)
