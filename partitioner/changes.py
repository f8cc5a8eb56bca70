"""A job that has no plan: which of its requirements conflict, and the nearest changes that give it one.

Requirements are the user's constraints, the batch and the cluster. Changes are tried nearest first: fewer and smaller
ones before more and larger, all of them before what this version plans but does not execute. Every one that is
reported has been planned: its sharding and its stages are solved under the memory of the devices.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import count
from typing import Any

from partitioner.constraints import Constraints
from partitioner.cost.bounds import ModelBounds
from partitioner.errors import CapacityError, InfeasibleError, TimeLimitError
from partitioner.evaluate import Evaluator
from partitioner.explore import OFFLOAD_SETS, rooms, space_of
from partitioner.finish import planned_only
from partitioner.job import Job
from partitioner.pins import differs, distance, effort, instead, pins_of, shown, subsets, without
from partitioner.solve.points import Point, divisors, points
from partitioner.topology import Topology
from partitioner.topology.hosts import can_offload
from partitioner.topology.resize import with_devices, with_nodes
from partitioner.units import plural
from passes.errors import PartitionError

_PLACE, _OFFLOAD, _ROOM = 0.4, 0.6, 3.0  # a stage_of entry put right, other kinds in host memory, other devices
_MOST_CHANGES, _MOST_SOLVED, _MOST_OF_ONE, _MOST_TRIED = 3, 36, 8, 4000
_ZERO_IS_FREE = ("etp", "dp_shard")  # in points
_MOST_DEVICES = 32768
_TIMES = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Change:
    """What to ask for instead: give these to ``partition``. ``global_batch`` is ``None`` where it stays the inputs'.

    ``planned_only``: what of it this version plans but does not execute.
    """

    text: str
    constraints: Constraints
    topology: Topology
    global_batch: int | None = None
    planned_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """``conflict``: a least set of constraints that cannot hold together; ``changes``: nearest first."""

    conflict: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Asked:
    """A job as it was asked for. ``prepare``: the job of these constraints, on this topology, with this batch."""

    topology: Topology
    constraints: Constraints
    global_batch: int | None
    prepare: Callable[[Topology, Constraints, int | None], Job]


@contextmanager
def advised(asked: Asked) -> Iterator[None]:
    """Gives an error of the block that says that there is no plan the advice, to be looked for when it is read."""
    try:
        yield
    except InfeasibleError as error:
        if error.advise is None and not isinstance(error, TimeLimitError):  # a plan may be near: it takes time
            error.advise = partial(advice, asked, isinstance(error, CapacityError))
        raise


def advice(asked: Asked, short_of_memory: bool) -> Advice:
    """What conflicts, and the nearest changes, of a job that has no plan."""
    try:
        asked.prepare(asked.topology, Constraints(), asked.global_batch)
    except PartitionError:
        return Advice()
    search = _Search(asked, short_of_memory)
    return Advice(search.conflict(), search.changes())


@dataclass(frozen=True)
class _Variant:
    """The job with something else than its pins changed."""

    cost: float
    kinds: frozenset[str]
    texts: tuple[str, ...]
    topology: Topology
    constraints: Constraints
    global_batch: int | None


def _and(variant: _Variant, cost: float, kind: str, text: str, **changed: Any) -> _Variant:
    """``variant`` with one thing more ``changed``."""
    return replace(
        variant, cost=variant.cost + cost, kinds=variant.kinds | {kind}, texts=(*variant.texts, text), **changed
    )


_Basis = tuple[Topology, int, tuple[str, ...]]  # what bounds and placements are of: topology, batch, offload


def _basis(job: Job) -> _Basis:
    return job.topology, job.global_batch, job.constraints.offload or ()


@dataclass
class _Search:
    asked: Asked
    short_of_memory: bool
    _bounds: dict[_Basis, ModelBounds] = field(default_factory=dict)
    _evaluators: dict[_Basis, Evaluator] = field(default_factory=dict)

    def conflict(self) -> tuple[str, ...]:
        """A least set of pins without a plan, by bounds; empty where the bounds allow one or none is needed."""
        kept = pins_of(self.asked.constraints)
        if self._possible(self.asked.constraints) or not self._possible(without(self.asked.constraints, kept)):
            return ()
        for pin in list(kept):
            rest = [p for p in kept if p != pin]
            others = [p for p in pins_of(self.asked.constraints) if p not in rest]
            if not self._possible(without(self.asked.constraints, others)):
                kept = rest
        return tuple(shown(self.asked.constraints, pin) for pin in kept)

    def changes(self) -> tuple[Change, ...]:
        """The nearest changes with which there is a plan."""
        ticket = count()
        heap: list[tuple[float, float, int, _Variant, tuple[str, ...], Point | None]] = []
        for variant in self._variants():
            for pins in subsets(pins_of(variant.constraints)):
                if variant.texts or pins:
                    cost = variant.cost + effort(pins)
                    heapq.heappush(heap, (cost, 0.0, next(ticket), variant, pins, None))
        done: list[frozenset[str]] = []
        found: list[Change] = []
        solved: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
        for _ in range(_MOST_TRIED):
            if not heap or len(found) == _MOST_CHANGES or solved.total() >= _MOST_SOLVED:
                break
            cost, _, _, variant, pins, point = heapq.heappop(heap)
            given_up = variant.kinds | set(pins)
            if any(other <= given_up for other in done):
                continue  # more than what was enough already
            if point is None:
                for more, seconds, choice in self._points(variant, pins):
                    heapq.heappush(heap, (cost + more, seconds, next(ticket), variant, pins, choice))
            elif solved[variant.texts, pins] < _MOST_OF_ONE and self._allowed(variant, pins, point):
                solved[variant.texts, pins] += 1
                if self._has_plan(variant, pins, point):
                    done.append(given_up)
                    found.append(self._change(variant, pins, point))
        return tuple(found)

    def _variants(self) -> Iterator[_Variant]:
        asked = self.asked
        base = _Variant(0.0, frozenset(), (), asked.topology, asked.constraints, asked.global_batch)
        yield base
        yield from self._places(base)
        if (context := asked.constraints.context) is not None:
            freed = asked.constraints.model_copy(update={"context": None})
            yield _and(base, _PLACE, "context", f"context left free instead of {context}", constraints=freed)
        yield from self._shards(base)
        hosted = [*self._hosted(base)] if self.short_of_memory else []
        yield from hosted
        if not self.short_of_memory:
            yield from self._batches(base)
        for variant in (base, *hosted):
            yield from self._rooms(variant)

    def _places(self, base: _Variant) -> Iterator[_Variant]:
        """Entries of ``stage_of`` with the nearest name, or the nearest stage that there is."""
        given = base.constraints.stage_of
        stages = base.constraints.pp
        job = self.asked.prepare(base.topology, Constraints(), base.global_batch)
        paths = sorted({call.path for call in job.model.calls})
        for name, stage in given.items():
            for near in get_close_matches(name, paths, n=1, cutoff=0.5):
                if near not in given:
                    places = {near if n == name else n: s for n, s in given.items()}
                    yield self._placed(base, places, f"stage_of {near!r} instead of {name!r}")
            if stages is not None and not -stages <= stage < stages:
                places = {**given, name: stages - 1 if stage > 0 else 0}
                yield self._placed(base, places, f"stage_of[{name!r}]={places[name]} instead of {stage}")

    def _placed(self, base: _Variant, places: dict[str, int], text: str) -> _Variant:
        constraints = base.constraints.model_copy(update={"stage_of": places})
        return _and(base, _PLACE, text, text, constraints=constraints)

    def _batches(self, base: _Variant) -> Iterator[_Variant]:
        """Batches that divide as pinned, or over the devices."""
        given = base.constraints
        batch = self.asked.prepare(base.topology, Constraints(), base.global_batch).global_batch
        parts = {(given.dp or 1) * (given.microbatch_size or 1), *divisors(base.topology.num_devices)}
        near = {n for part in parts for n in (batch // part * part, -(-batch // part) * part)} - {0, batch}
        for size in sorted(near, key=lambda n: abs(math.log2(n / batch)))[:4]:
            text = f"global_batch={size} instead of {batch}"
            kind = "more" if size > batch else "less"
            yield _and(base, 1.0 + abs(math.log2(size / batch)), kind, text, global_batch=size)

    def _shards(self, base: _Variant) -> Iterator[_Variant]:
        """States shared by as many ranks as there can be: points have all of them, or those that are pinned."""
        given = base.constraints.dp_shard
        if given is None:
            return
        for size in divisors(base.constraints.dp or base.topology.num_devices)[1:]:
            if size != given:
                cost = _PLACE + 0.5 * abs(math.log2(size / given))
                constraints = base.constraints.model_copy(update={"dp_shard": size})
                text = f"dp_shard={size} instead of {given}"
                yield _and(base, cost, "dp_shard", text, constraints=constraints)

    def _hosted(self, base: _Variant) -> Iterator[_Variant]:
        """Other kinds in host memory than those that are pinned."""
        given = base.constraints.offload
        if given is None or not can_offload(base.topology):
            return
        for kinds in ((), *OFFLOAD_SETS):
            constraints = base.constraints.model_copy(update={"offload": kinds})
            if kinds == given or ("parameters" in kinds and constraints.zero in (1, 2)):
                continue
            text = f"offload={_kinds_text(kinds)} instead of {_kinds_text(given)}"
            cost = _OFFLOAD + 0.1 * len(set(kinds) ^ set(given))
            yield _and(base, cost, "offload", text, constraints=constraints)

    def _rooms(self, base: _Variant) -> Iterator[_Variant]:
        """More nodes of the same kind, or as many devices as the pinned axes ask for."""
        topology, now = base.topology, base.topology.num_devices
        counts = {topology.num_nodes + 1, *(math.ceil(topology.num_nodes * times) for times in _TIMES)}
        for nodes in sorted(n for n in counts if n * topology.devices_per_node <= _MOST_DEVICES):
            larger = with_nodes(topology, nodes) if topology != _local(topology) else None
            if larger is not None:
                text = f"{plural(nodes, 'node')} instead of {topology.num_nodes} ({larger.num_devices} devices)"
                yield _and(base, _ROOM + math.log2(nodes / topology.num_nodes), "nodes", text, topology=larger)
        if self.short_of_memory:
            return
        pinned = math.prod(base.constraints.pinned.values())
        sizes = {pinned * -(-now // pinned), max(1, now // pinned) * pinned, 1 << (now.bit_length() - 1)} - {now}
        for size in sorted(sizes):
            other = with_devices(topology, size)
            if other is None and size % topology.devices_per_node == 0:
                other = with_nodes(topology, size // topology.devices_per_node)
            if other is not None:
                text = f"{plural(size, 'device')} instead of {now}"
                kind = "larger" if size > now else "smaller"
                yield _and(base, _ROOM + abs(math.log2(size / now)), kind, text, topology=other)

    def _job(self, variant: _Variant, pins: Sequence[str]) -> Job:
        return self.asked.prepare(variant.topology, without(variant.constraints, pins), variant.global_batch)

    def _bound(self, job: Job) -> ModelBounds:
        key = _basis(job)
        if key not in self._bounds:
            self._bounds[key] = ModelBounds(job)
        return self._bounds[key].with_job(job)

    def _points(self, variant: _Variant, pins: Sequence[str]) -> list[tuple[float, float, Point]]:
        """Points without ``pins`` that differ in each: what that costs, their bound in seconds, and they."""
        try:
            job = self._job(variant, pins)
            job.constraints.check_offload()
            bounds, least = self._bound(job), self._bound(_roomiest(job))
            choices = self._choices(job, bounds)
        except PartitionError:
            return []
        changed = [p for p in choices if all(differs(variant.constraints, pin, p) for pin in pins)]
        if job.constraints.schedule is not None or job.constraints.context is not None:
            changed = [p for p in changed if _says_all(self._constraints(variant, pins, p))]
        if not changed:
            return []
        far = [sum(distance(variant.constraints, pin, p) for pin in pins) for p in changed]
        ranked = sorted(zip(far, bounds.times(changed).tolist(), changed, strict=True))
        room = max(d.usable for d in job.topology.devices)
        return [choice for choice in ranked if least.state_bytes(choice[2]) <= room]

    def _choices(self, job: Job, bounds: ModelBounds) -> list[Point]:
        """The points of a job, of those that are alike the plainest: one that is better is found when it is planned."""
        choices = points(space_of(job, bounds))
        free = job.constraints.schedule is None and not job.constraints.ahead
        plain = [p for p in choices if p.schedule == "1f1b"] if free else []
        least = min(point.zero for point in choices)
        return [p for p in plain or choices if self.short_of_memory or p.zero == least]

    def _allowed(self, variant: _Variant, pins: Sequence[str], point: Point) -> bool:
        """Whether the bounds allow a plan at ``point``."""
        try:
            self._bound(_roomiest(self._job(variant, pins))).refine(point)
        except PartitionError:
            return False
        return True

    def _has_plan(self, variant: _Variant, pins: Sequence[str], point: Point) -> bool:
        for job in rooms(self._job(variant, pins)):  # as partition does
            key = _basis(job)
            if point.zero in (1, 2) and "parameters" in key[-1]:
                continue  # which that keeps whole
            if key not in self._evaluators:
                self._evaluators[key] = Evaluator(job)
            try:
                self._bound(job).refine(point)
                replace(self._evaluators[key], job=job).solve(point)
            except CapacityError:
                continue
            except PartitionError:
                return False
            return True
        return False

    def _possible(self, constraints: Constraints) -> bool:
        """Whether the bounds allow a plan."""
        try:
            job = self.asked.prepare(self.asked.topology, constraints, self.asked.global_batch)
            bounds = self._bound(_roomiest(job))
            choices = self._choices(job, bounds)
        except PartitionError:
            return False
        room = max(d.usable for d in job.topology.devices)
        for point in choices:
            if bounds.state_bytes(point) > room:
                continue
            try:
                bounds.refine(point)
            except PartitionError:
                continue
            return True
        return False

    def _constraints(self, variant: _Variant, pins: Sequence[str], point: Point) -> Constraints:
        """What to ask for, to have ``point`` instead of the ``pins``."""
        return without(variant.constraints, pins).model_copy(update=_new(pins, point))

    def _change(self, variant: _Variant, pins: Sequence[str], point: Point) -> Change:
        new, constraints = _new(pins, point), self._constraints(variant, pins, point)
        texts = [*variant.texts, *(instead(variant.constraints, pin, new.get(pin)) for pin in pins)]
        found = planned_only(self._job(variant, pins), point, constraints)
        beyond = [what for what in found if what not in self.asked.constraints.planned_only]
        marked = " (planned, not executed by this version)" if beyond else ""
        return Change(", ".join(texts) + marked, constraints, variant.topology, variant.global_batch, tuple(beyond))


def _new(pins: Sequence[str], point: Point) -> dict[str, Any]:
    """What ``point`` has for those of the ``pins`` that it fixes otherwise."""
    new = {pin: getattr(point, pin) for pin in pins if pin in Point.__dataclass_fields__}
    return {pin: size for pin, size in new.items() if size or pin not in _ZERO_IS_FREE}


def _says_all(constraints: Constraints) -> bool:
    try:
        constraints.check_idle()
    except PartitionError:
        return False
    return True


def _roomiest(job: Job) -> Job:
    """``job`` with as much in host memory as ``partition`` would try: what its bounds refuse has no plan."""
    return list(rooms(job))[-1]


def _kinds_text(kinds: Sequence[str]) -> str:
    return "+".join(kinds) or "none"


def _local(topology: Topology) -> Topology:
    return Topology.local(topology.num_devices)
