"""Map the ranks of a mesh to devices: find the placement whose plan has the least step time.

If all devices are equal, and all links of a level are equal, placements differ only in the assignment of mesh axes to
levels of links (``regular.py``). Otherwise tensor-parallel groups are formed by their links and ordered by the features
of their devices (``irregular.py``). Groups are then exchanged between stages as long as this reduces the step time.
Every placement is priced by the plan's cost model. On irregular clusters, the placement of rank ``i`` on device ``i``
is always among the candidates.

``least_of`` chooses the cheapest of several alternatives, some of which may have no plan, or raises the most useful of
their errors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
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
    """Call all ``attempts``, functions that return a pair (cost, result), and return the pair with the least cost, the
    first one if several are equal. Functions that raise :class:`PartitionError` are skipped. If all functions raise it,
    raise the :class:`CapacityError` with the fewest missing bytes, or the first error if there is no error of this
    class."""
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
    """Return the error in ``errors`` that is most useful for the user: the :class:`CapacityError` with the fewest
    missing bytes of memory. If there is no error of this class, return the first error."""
    short = [error for error in errors if isinstance(error, CapacityError)]
    return min(short, key=lambda error: error.missing_bytes) if short else errors[0]


Ints = NDArray[np.int64]

Result = TypeVar("Result")
Key = tuple[int, ...]

_BETTER = 1e-9  # relative difference of costs that is attributed to rounding

EXCHANGES = 60  # placements that are evaluated during the exchanges of one mesh, at most
_LOOKS = 400  # placements that are generated during the exchanges of one mesh, at most
_NEAR = 1.1  # exchanges are tried below the best cost of any mesh times this; they have gained 3 % at most
_NEAR_INSIDE = 2.5  # the same factor if pairs of devices have links of their own, where exchanges have gained a half
_NEAR_LEAST = 1.05  # placements of equal devices are evaluated up to the least lower bound times this
_AS_LIKELY = 1.01  # placements are evaluated up to the least estimated cost times this
_KEPT, _AS_GOOD = 4, 1.05  # placements kept for other microbatch sizes; their greatest cost relative to the best
_SENT = 1e6  # bytes of the all-reduce by which groups are compared
_KEY_BYTES = 16  # of the key of a placement
_MOST_GROUPS = 64  # with more groups (or devices), they are not exchanged


@dataclass(frozen=True)
class BestPlacement(Generic[Result]):
    """The cheapest placement that was tried.

    ``machine``: the topology with the mesh laid over it, which contains the device of each rank. ``cost``: the cost
    that the evaluator returned, seconds of a step in the search. ``result``: the evaluator's second result, such as the
    plan.
    """

    machine: PlacedMesh
    cost: float
    result: Result


@dataclass
class Placements:
    """Finds placements (the device of each rank) of meshes on one topology. The placements to try for each mesh are
    listed once and cached.

    ``topology``: the devices and links. ``precision``: the number type of most of the work, such as ``"bf16"``.
    ``in_order``: whether to consider only the placement of rank ``i`` on device ``i``.
    """

    topology: Topology
    precision: str = "bf16"
    in_order: bool = False
    _levels: tuple[int, ...] | None = field(init=False)
    _candidates: dict[Key, list[PlacedMesh]] = field(default_factory=dict, init=False)
    _narrowed: set[Key] = field(default_factory=set, init=False)
    _exchanged: set[Key] = field(default_factory=set, init=False)
    _best_groups: dict[tuple[int, bool], Group] = field(default_factory=dict, init=False)
    _marks: dict[Hashable, Hashable] = field(default_factory=dict, init=False)  # of placements with equal costs

    def __post_init__(self) -> None:
        self._levels = equal_levels(self.topology)

    def nested(self, mesh: Mapping[str, int]) -> bool:
        """Return whether placements of ``mesh`` differ only in which part of each axis lies inside a node, between
        nodes, and so on. This is the case if all devices are equal, all links of a level are equal, and no axis
        straddles a level of links, as an axis of 2 ranks would in nodes of 3 devices. ``mesh``: axis -> number of
        ranks."""
        return self._levels is not None and is_regular_nesting(mesh, self._levels)

    def complete(self, mesh: Mapping[str, int]) -> bool:
        """Return whether one of the placements (devices of the ranks) that are tried for ``mesh`` is certainly optimal
        among all allowed placements, so that no other placement need be considered. ``mesh``: axis -> number of ranks.
        """
        return self.in_order or self.nested(mesh) or has_all_arrangements(self.topology)

    def candidates(self, mesh: Mapping[str, int]) -> list[PlacedMesh]:
        """Return the placements of ``mesh`` that are tried, as topologies with the mesh laid over them. Of several
        placements with equal cost, only one is in the list. ``mesh``: axis -> number of ranks.
        """
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
                marks = map(self._identify_equal_cost, reversed(machines))
                machines = list(dict(zip(marks, reversed(machines), strict=True)).values())[::-1]
            self._candidates[key] = machines
        return self._candidates[key]

    @property
    def _differ_inside(self) -> bool:
        """Return whether single pairs of devices in the topology have links of their own. It then matters which devices
        of a node form a group together, so single devices are exchanged when placements are improved.
        """
        return bool(self.topology.own_links or self.topology.pattern_kinds)

    def best_group(self, size: int, everywhere: bool = False) -> Group:
        """Return an imaginary group of ``size`` devices for lower bounds: no collective over any real group of this
        size is faster than over the returned group. ``everywhere``: whether all devices belong to groups of ``size``
        that run collectives at the same time and wait for the slowest group. If so, the statement holds only for the
        slowest of these groups."""
        if (size, everywhere) not in self._best_groups:
            self._best_groups[size, everywhere] = best_group(self.topology, size, everywhere)
        return self._best_groups[size, everywhere]

    def at(self, mesh: Mapping[str, int], devices: Sequence[int]) -> PlacedMesh:
        """Return the placement that puts rank ``i`` of ``mesh`` on the device with index ``devices[i]``, as a topology
        with the mesh laid over it. ``mesh``: axis -> number of ranks. If it is among the placements that are tried for
        ``mesh``, the cached object is returned.
        """
        known = self.candidates(mesh) if self.complete(mesh) else self._candidates.get(_mesh_to_key(mesh), ())
        tried = (machine for machine in known if machine.device_of_rank == devices)
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
        """Return the placement of ``mesh`` with the least cost, and the result that ``placement_evaluator`` returned
        for it.

        - ``placement_evaluator``: returns (cost, result) of a placement, or raises :class:`PartitionError` if it has no
          plan. ``least``: a quick lower bound on the cost of a placement. Its second argument is a cutoff: the bound
          need not be tighter than needed to reach it. Placements whose bound reaches the best known cost are not
          evaluated.
        - ``enough``: the best cost that was found for another mesh. If the best cost of this mesh is far above it, this
          mesh will not win, and no exchanges of devices are tried.
        - ``exchanges``: the maximum number of placements that are evaluated when, starting from the best one, devices
          are exchanged between ranks.
        - ``likely``: a cheap estimate of the cost, given if an evaluation takes long. Placements whose estimate is
          clearly worse than the best one are not evaluated. If the listed placements are all possible ones, ``least``
          is used as the estimate.

        If ``placement_evaluator`` raises for every placement, raise the :class:`CapacityError` with the fewest missing
        bytes, or the first error if memory is not the reason.
        """
        best: BestPlacement[Result] | None = None
        errors: list[PartitionError] = []
        costs: list[tuple[float, int]] = []
        machines = self.candidates(mesh)
        floors = [0.0 if least is None else least(machine, 0.0) for machine in machines]
        told, enough_told = floors, np.inf
        if likely is not None and self.complete(mesh):
            enough_told = min(floors) * _NEAR_LEAST
        elif likely is not None and len(machines) > 1:
            told = [likely(machine) for machine in machines]
            enough_told = min(told) * _AS_LIKELY
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
                break  # if devices are equal, memory lacks in every placement
            if found is not None:
                costs.append((found.cost, number))
                best = found if best is None or found.cost < best.cost * (1 - _BETTER) else best
        if best is not None and not self.complete(mesh):
            self._keep_best_candidates(mesh, costs)
            best = self._improve_by_exchange(best, placement_evaluator, least, errors, enough, exchanges, likely)
        if best is None:
            raise find_least_shortage(errors)
        return best

    def _keep_best_candidates(self, mesh: Mapping[str, int], costs: Collection[tuple[float, int]]) -> None:
        """Reduce the list of placements to try for ``mesh`` to the cheapest few and the placement of rank ``i`` on
        device ``i``. When other candidates with this mesh are planned, such as candidates with another microbatch size,
        fewer placements are then evaluated. A second call for the same mesh changes nothing.

        ``costs``: pairs (cost of a placement or a lower bound on that cost, index of the placement in the list).
        """
        key = _mesh_to_key(mesh)
        if key in self._narrowed:
            return
        self._narrowed.add(key)
        near = min(costs)[0] * _AS_GOOD
        kept = sorted({0, *(number for cost, number in sorted(costs)[:_KEPT] if cost <= near)})
        self._candidates[key] = [self._candidates[key][number] for number in kept]

    def _improve_by_exchange(
        self,
        best: BestPlacement[Result],
        placement_evaluator: Callable[[PlacedMesh], tuple[float, Result]],
        least: Callable[[PlacedMesh, float], float] | None,
        errors: list[PartitionError],
        enough: float,
        exchanges: int,
        likely: Callable[[PlacedMesh], float] | None,
    ) -> BestPlacement[Result]:
        """Return the best placement (device of each rank) that is found by exchanging devices between ranks, starting
        from ``best``. Return ``best`` itself if no exchange makes it cheaper, or if an earlier call has tried exchanges
        for the same mesh sizes.

        ``placement_evaluator``: returns (cost, result) of a placement; its errors are appended to ``errors``.
        ``least``: a quick lower bound on the cost of a placement, given a cutoff; ``None``: there is none. ``enough``:
        the best cost that was found for another mesh; placements that cost at least this are of no interest.
        ``exchanges``: the largest number of placements to evaluate. ``likely``: a cheap estimate of the cost; if given,
        exchanges first minimize this estimate, and then the evaluated cost.
        """
        key = _mesh_to_key(best.machine.mesh)
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
        """Exchange the devices of whole pipeline stages, groups or single ranks as long as the cost decreases, and
        return the best placement. A group is the ranks with one index of ``pp`` and one of ``dp``.

        ``best``: the placement to start from. ``placement_evaluator``: returns the cost and the result of a placement;
        its errors are appended to ``errors``. ``least``: returns a lower bound on the cost of a placement; its second
        argument is the cost above which the bound does not matter. ``enough``: the best cost that was found for another
        mesh. Placements whose bound reaches ``enough`` or the best cost so far are not evaluated. ``left``: the maximum
        number of placements that are evaluated.
        """
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
        """Return whether the placement ``found`` costs less than the placement ``best``. If both cost the same, and if
        single pairs of devices have links of their own, ``found`` is also better if its groups communicate faster in
        total. This helps if several groups are equally slow: making one of them faster does not change the cost yet.
        """
        if found.cost < best.cost * (1 - _BETTER):
            return True
        alike = self._differ_inside and found.cost <= best.cost * (1 + _BETTER)
        return alike and _in_groups(found.machine) < _in_groups(best.machine) * (1 - _BETTER)

    def _identify_placement(self, machine: PlacedMesh) -> Hashable:
        """Return a key of the placement ``machine`` (a topology with the mesh laid over it). Of several placements with
        equal keys, only one is tried: they have equal costs. If single pairs of devices have links of their own, their
        groups also communicate equally fast."""
        return self._identify_equal_cost(machine), _in_groups(machine) if self._differ_inside else 0.0

    def _identify_equal_cost(self, machine: PlacedMesh) -> Hashable:
        """Return the key of :func:`identify_equal_cost` for the placement ``machine`` (a topology with the mesh laid
        over it). The key is computed once for all placements that differ only in which of several equal nodes or
        devices their ranks are on."""
        symmetric = _identify_symmetric(machine)
        if symmetric is None:
            return identify_equal_cost(machine)
        if symmetric not in self._marks:
            self._marks[symmetric] = identify_equal_cost(machine)
        return self._marks[symmetric]


def identify_equal_cost(machine: PlacedMesh) -> Hashable:
    """Return a key of the placement ``machine`` (a topology with the mesh laid over it). Placements with equal keys
    have equal costs, because their stages have equal devices, groups, memory and links. Only one of them needs to be
    evaluated.
    """
    wide = [axis for axis in AXES if axis != "pp" and machine.mesh.get(axis, 1) > 1]
    together = [machine.stage_groups(*axes) for axes in combinations(wide, 2)]
    across = machine.group("pp") if machine.mesh.get("pp", 1) > 1 else None
    links = tuple((link.bandwidth, link.latency) for link in machine.links)
    return machine.seats, machine.pipelines, machine.capacity, links, tuple(together), across


def _identify_symmetric(machine: PlacedMesh) -> Hashable | None:
    """Return a key of the placement ``machine`` (a topology with the mesh laid over it). Placements with equal keys
    differ only in which of several equal devices, nodes or other parts of the cluster their ranks are on. The key is
    quicker to compute than that of :func:`identify_equal_cost`, and distinguishes more placements. ``None`` if pairs of
    devices have links of their own, which parts alone do not describe."""
    topology, devices = machine.topology, np.asarray(machine.devices)
    if topology.own_links or topology.pattern_kinds:
        return None
    cards, (_, of_pace) = topology.cards, topology.paces
    traits = [of_pace, topology.usable, topology.network_share, cards.alone, cards.share, cards.left]
    traits += [storey.shares for storey in topology.storeys if storey.shares is not None]
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for trait in traits:
        digest.update(trait[devices].tobytes())
    for part in (topology.node_of, cards.port, *topology.groups, *(storey.joined for storey in topology.storeys)):
        # parts are numbered in the order of the first rank on them
        _, first, of_rank = np.unique(part[devices], return_index=True, return_inverse=True)
        digest.update(np.argsort(np.argsort(first))[of_rank.reshape(-1)].tobytes())
    return _mesh_to_key(machine.mesh), digest.digest()


def _in_groups(machine: PlacedMesh) -> float:
    """Return the summed seconds of an all-reduce of 1 MB over every group of ranks along every mesh axis except ``pp``,
    on the placement ``machine`` (a topology with the mesh laid over it). It decides between placements of equal cost.
    """
    total, rows_of = 0.0, np.asarray(machine.devices)
    for axis in AXES:
        if axis != "pp" and machine.mesh.get(axis, 1) > 1:
            numbers, groups = kinds_of(machine.topology, rows_of[rank_grid(machine.mesh, axis)])
            seconds = np.array([collective_time("all_reduce", _SENT, group) for group in groups])
            total += float(seconds[numbers].sum())
    return total


def _list_exchange_neighbours(devices: Ints, mesh: Mapping[str, int], inside: bool) -> Iterator[Ints]:
    """Yield the placements, arrays of shape ``[ranks]`` with device indices, that differ from the placement ``devices``
    by one exchange: of the devices of two stages, of two groups of different stages or, if ``inside``, of two single
    ranks. A group is the ranks with one index of ``pp`` and one of ``dp``. ``devices``: the device index of each rank.
    ``mesh``: axis -> number of ranks."""
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
    """Return the placement ``machine`` (a topology with the mesh laid over it) with its cost and result, which
    ``placement_evaluator`` computes. If that raises a :class:`PartitionError`, append it to ``errors`` and return
    ``None``.
    """
    try:
        return BestPlacement(machine, *placement_evaluator(machine))
    except PartitionError as error:
        errors.append(error)
        return None


def _mesh_to_key(mesh: Mapping[str, int]) -> Key:
    return tuple(mesh.get(axis, 1) for axis in AXES)
