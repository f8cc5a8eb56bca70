"""Lower bounds of the candidates of a search, cheapest first: from the relaxed model, then from actual shardings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from partitioner.candidate import MeshCandidate
from partitioner.errors import CapacityError
from partitioner.passes.errors import PartitionError
from partitioner.schedules.formulas import is_formula, is_plain, is_split, most_in_flight
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.bounds.schedule_memory import MicrobatchMemory, RankCapacity, least_of, most_held, needs_of
from partitioner.solve.bounds.zero_and_reduction import BlockLowerBound, Gathers
from partitioner.solve.evaluate.evaluate_placement import split_of, virtual_ranks
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.search.space import SearchSpace, list_hybrid_candidates
from partitioner.solve.search.uniform_cluster import UniformClusterBound
from partitioner.solve.stages.lower_bound import LeastTime

_activations_kind = attrgetter("pp", "dp", "cp", "tp", "ep", "microbatch_size")  # activations depend on these


class BoundCascade:
    """The bounds that the search needs for ``points``, and for the other points of their families in ``space``.

    The relaxed model has no collectives. A sharding solved for the largest microbatch gives a lower bound on the
    collectives of smaller ones, too, so one sharding bounds all points with one size of ``tp``. The point's own
    sharding gives a tighter bound.
    """

    def __init__(
        self, bounds: ModelBounds, evaluator: CandidateEvaluator, points: Sequence[MeshCandidate], space: SearchSpace
    ) -> None:
        self.bounds, self.evaluator, self.space = bounds, evaluator, space
        self._sizes: dict[int, set[int]] = defaultdict(set)  # by tp
        largest: dict[tuple[int, int], int] = defaultdict(int)  # by tp and pp
        self._shared: dict[MeshCandidate, LeastTime | PartitionError] = {}
        self._lean: dict[MeshCandidate, MeshCandidate] = {}  # by family, the one that takes least memory
        self._own_shared: dict[MeshCandidate, LeastTime | PartitionError | None] = {}  # by the leanest of a family
        self._unseen: set[MeshCandidate] = set()
        self._expected = False
        self._needs: dict[tuple[int, ...], MicrobatchMemory] = {}
        self._alike = UniformClusterBound(evaluator)
        self._gathers = Gathers(evaluator.job, bounds.placements, bounds.device)
        self._parts: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # stages of ZeRO, and who shares states
        for point in {_activations_kind(point): point for point in points}.values():
            if bounds.layer_bytes(point) <= bounds.capacity(point):
                self._sizes[point.tp].add(point.microbatch_size)
                largest[point.tp, point.pp] = max(largest[point.tp, point.pp], point.microbatch_size)
        self._first = {tp: min(size for (of, _), size in largest.items() if of == tp) for tp in self._sizes}
        # kernels that fit in caches are faster than their share of larger ones
        self._scales = not any(device.memory_sizes for device in evaluator.job.topology.types.values())

    def times(self, points: Sequence[MeshCandidate]) -> NDArray[np.float64]:
        """Lower bounds in seconds on all points at once, shape ``[points]``. The first call also starts background work
        on the shardings that the best points will need."""
        found = self.bounds.times(points)
        if len(points) > 1 and not self._expected:
            self._expected = True
            self._prefetch_shardings([points[i] for i in np.argsort(found, kind="stable")])
        return found

    def _prefetch_shardings(self, points: Sequence[MeshCandidate]) -> None:
        """Request the shardings that bound the first points: those of the largest microbatches, then each point's
        own."""
        first: dict[tuple[int, ...], MeshCandidate] = {}
        for point in points:
            first.setdefault((point.tp, point.cp, point.ep, point.etp, point.microbatch_size), point)
        fit = [point for point in first.values() if point.microbatch_size in self._sizes[point.tp]]
        largest = [(p, self._find_largest_microbatch(p)) for p in fit if self._scales and not p.tp == p.cp == p.ep == 1]
        self.evaluator.expect(self._of_families(points), [*largest, *((p, p.microbatch_size) for p in fit)])

    def _of_families(self, points: Sequence[MeshCandidate]) -> Iterator[tuple[MeshCandidate, int]]:
        """The points and microbatch sizes that :meth:`_of_largest` will need."""
        for family in dict.fromkeys(map(self.family, points)) if self._scales else ():
            if family.microbatch_size in self._sizes[family.tp] and not family.tp == family.cp == family.ep == 1:
                yield family, self._find_largest_microbatch(family)

    def family(self, point: MeshCandidate) -> MeshCandidate:
        """Key of the points that are bounded together: the point without ZeRO."""
        return point.sharing(0)

    def members(self, points: Sequence[MeshCandidate]) -> Sequence[MeshCandidate]:
        """All points of the family of ``points``, including those whose states are sharded over a part of ``dp``."""
        point = points[0]
        key = point.dp, point.cp, point.tp  # all that they depend on
        if key not in self._parts:
            self._parts[key] = [(other.zero, other.dp_shard) for other in list_hybrid_candidates(self.space, point)]
        return list(dict.fromkeys([*points, *(point.sharing(*part) for part in self._parts[key])]))

    @property
    def together(self) -> Sequence[Callable[[Sequence[MeshCandidate], float], float]]:
        """Bounds of a family: even stages, then the best stages in the least memory of any member, by the largest
        microbatch's sharding; then both by the family's own sharding."""
        return self._even, self._bound_least_memory_stages, self._own_even, self._own_lean

    @cached_property
    def steps(self) -> Sequence[Callable[[MeshCandidate, float], float]]:
        """Bounds of one point, increasingly tight.

        First, whether the states fit. Then even stages with weight gathers, and the best stages, by the largest
        microbatch's sharding. Then both by the point's own sharding, the best stages first in the least memory of any
        family member. Last, plans on a cluster of equal nodes, if not all placements are tried.
        """
        relaxed = self._held, self._gathered, self._bound_candidate_stages, self._bound_stages_thoroughly
        return *relaxed, self._bound_own_microbatch, self._own_leanest, self._own_staged, self._alike.quickly

    def of_point(self, point: MeshCandidate, enough_s: float = np.inf) -> float:
        """The tightest lower bound in seconds on a point that has a plan, wherever its ranks are. ``enough_s``: a bound
        of this value is tight enough."""
        floor, own = self.evaluator.floor(point, point.microbatch_size), self.evaluator.least(point)
        even = self.bounds.with_floor([point], floor) if floor else 0.0
        try:
            problem = self.bounds.problem(point, *own, virtual_ranks(point))
            pipeline_s = split_of(problem, point, enough_s=enough_s).least_s
        except CapacityError:  # schedules that are followed are not looked through to the end
            pipeline_s = 0.0
        stages = self.bounds.followed(point, pipeline_s)
        alike = self._alike.least(point, enough_s)
        return max(self.bounds.refine(point), even, stages, self._own_staged(point, np.inf), alike)

    def shortage(self, point: MeshCandidate) -> CapacityError | None:
        """The shortage of a point whose states alone are too large, with the stage; ``None`` for other points."""
        try:
            self.bounds.refine(point)
        except CapacityError as error:
            return error
        except PartitionError:  # it has another problem, too
            return None
        return None

    def _even(self, points: Sequence[MeshCandidate], _: float) -> float:
        self.bounds.check_microbatch(points[0])
        self._lean[self.family(points[0])] = min(points, key=self.bounds.state_bytes)
        floor = self._of_largest(self.family(points[0]))
        if not self._says_most(points[0]):
            self.evaluator.wish(points[0], points[0].microbatch_size)
        return self.bounds.with_floor(points, floor) if floor else 0.0

    def _bound_least_memory_stages(self, points: Sequence[MeshCandidate], enough_s: float) -> float:
        """Lower bound in seconds from the best stages in the least memory of any member."""
        key = self.family(points[0])
        if not is_plain(key.schedule, key.virtual_stages):
            return self._bound_simulated_recompute(points, enough_s)
        if len(points) < 2:
            return 0.0
        plain = self._shared.get(replace(key, schedule="1f1b"))  # 1F1B holds no more microbatches
        if isinstance(plain, PartitionError):
            raise plain.with_traceback(None)
        if plain is not None and (bound := self.bounds.staged(points, plain)) >= enough_s:
            return bound
        leanest = self._lean[key]
        try:
            speed = max(self.bounds.speeds(point)[0] for point in points)
            found = self.bounds.relaxed(leanest, self._of_largest(key), speed, enough_s=enough_s, quick=True)
        except PartitionError as error:
            self._shared[key] = error
            raise
        self._shared[key] = found
        return self.bounds.staged(points, found)

    def _own_even(self, points: Sequence[MeshCandidate], _: float) -> float:
        """Lower bound in seconds without ZeRO, which is never slower, by the family's own sharding."""
        if self._says_most(points[0]):
            return 0.0  # an earlier bound included it
        floor = self.evaluator.floor(self.family(points[0]), points[0].microbatch_size)
        return self.bounds.with_floor(points, floor) if floor else 0.0

    def _own_lean(self, points: Sequence[MeshCandidate], enough_s: float) -> float:
        if len(points) < 2 or not is_plain(points[0].schedule, points[0].virtual_stages):
            return 0.0
        found = self._of_leanest(self._lean[self.family(points[0])], enough_s)
        return self.bounds.staged(points, found) if found else 0.0

    def _held(self, point: MeshCandidate, _: float) -> float:
        self.bounds.check_states(point)
        return 0.0

    def _gathered(self, point: MeshCandidate, _: float) -> float:
        if point.zero == 2:
            return self._bound_zero2_scatters(point)
        floor = self._of_all(point) if point.zero == 3 else None  # for others the family's bound included it
        return self.bounds.with_floor([point], floor) if floor else 0.0

    def _bound_zero2_scatters(self, point: MeshCandidate) -> float:
        """Lower bound in seconds under ZeRO-2, where gradients are scattered after every backward."""
        job, m = self.evaluator.job, int(self.bounds.rounds(point))
        if m == 1 or not job.train or job.constraints.grad_compression is not None or self.bounds.may_differ(point):
            return 0.0
        if point.cp > 1:  # ranks of cp may have gradients whole, which fewer ranks share
            return 0.0
        floor = self._of_largest(self.family(point))
        known = self.bounds.with_floor([point], floor) if floor else float(self.bounds.times([point])[0])
        return self._gathers.scattered(point, m, known, self.bounds.forward_s(point, floor))

    def _bound_candidate_stages(self, point: MeshCandidate, enough_s: float) -> float:
        if not is_plain(point.schedule, point.virtual_stages):
            return self._bound_simulated_recompute([point], enough_s)
        if self._has_room(point):
            return 0.0  # the family's bound included it
        quick = is_formula(point.schedule)  # others come when runs that make a step too long are known
        least = self.bounds.relaxed(point, self._of_all(point), enough_s=enough_s, quick=quick)
        if quick and not least.is_seen:
            self._unseen.add(point)
        return self.bounds.staged([point], least)

    def _has_room(self, point: MeshCandidate) -> bool:
        """Whether even stages have so much room that memory hardly matters, and nothing else distinguishes the point
        from its family."""
        if point.zero == 3 or not isinstance(self._shared.get(self.family(point)), LeastTime):
            return False
        flying = most_in_flight(point.schedule, point.pp, int(self.bounds.rounds(point)))
        kept = flying * self._needs_of(point).whole.total / point.pp
        needed = self.bounds.state_bytes(point) + kept + self.bounds.layer_bytes(point)
        return needed <= self.bounds.capacity(point)

    def _bound_simulated_recompute(self, points: Sequence[MeshCandidate], enough_s: float) -> float:
        """Lower bound in seconds for a simulated schedule: enough recomputation that everything fits on all ranks
        together, none of which computes for longer than the step."""
        point = min(points, key=self.bounds.state_bytes)
        job = self.evaluator.job
        if not job.train or point.pp == 1 or job.constraints.offload:
            return 0.0
        m = self.bounds.rounds(point)
        least = 1.0 if self.bounds.may_differ(point) else m  # least number of microbatches of a rank
        speed, speeds = self.bounds.speeds(point)
        ranks = RankCapacity(
            most_held(point.schedule, point.pp, int(least), point.virtual_stages),
            capacity=self.bounds.capacity(point),
            states=self.bounds.state_bytes(point) * point.pp,
        )
        floor, needs = self._of_largest(self.family(point)), self._needs_of(point)
        shared = partial(self.bounds.with_floor, points, floor) if floor else partial(self.bounds.times, points)
        known = float(np.min(shared(shared=True)))  # without the largest call's pace: not a sum

        def of_steps(limit_s: float) -> float:
            """Lower bound on the steps that take at most ``limit_s`` seconds."""
            again = needs.seconds_again(ranks, job.constraints.recompute, limit_s / least * speed)
            return known + m / speeds * again

        return least_of(of_steps, known, enough_s)

    def _needs_of(self, point: MeshCandidate) -> MicrobatchMemory:
        split = is_split(point.schedule)
        key = point.microbatch_size, point.tp, point.cp, point.ep, split
        if key not in self._needs:
            calls = [c for c in self.evaluator.job.model.calls if not c.shared and not c.prologue]
            self._needs[key] = needs_of([(call, self.bounds.calls(point)[call.block]) for call in calls], split)
        return self._needs[key]

    def again_s(self, point: MeshCandidate) -> float:
        """Approximate seconds of recomputation in a step, for even stages on ranks that all hold as many microbatches
        as the fullest. Raises :class:`PartitionError` if the point has no plan."""
        model, of_block, _ = self.evaluator.least(point)
        costs = [of_block[call.block] for call in model.calls if not call.prologue]
        m, (_, speeds) = self.bounds.rounds(point), self.bounds.speeds(point)
        held = 1 / float(most_held(point.schedule, point.pp, int(m), point.virtual_stages).min())
        free = self.bounds.capacity(point) - self.bounds.state_bytes(point)
        free -= max(cost.working_bytes for cost in costs)
        kept = [(c.selective_s, c.selective_bytes) for c in costs]
        kept += [(c.forward_s, c.saved_bytes - c.selective_bytes) for c in costs]
        inputs = [zip(c.input_bytes, c.saved_inputs, strict=True) for c in costs]
        left = sum(size for each in inputs for size, is_kept in each if is_kept)
        left += sum(size for _, size in kept) - max(0.0, free) * point.pp / held
        seconds = 0.0
        for rate, size in sorted((made_s / size, size) for made_s, size in kept if size > 0):
            seconds += rate * min(max(0.0, left), size)
            left -= size
        return float(m / speeds * seconds)

    def _bound_stages_thoroughly(self, point: MeshCandidate, enough_s: float) -> float:
        """Lower bound by a thorough search of the stages, for points of which the quick search found no stages that
        fit."""
        if point not in self._unseen:
            return 0.0
        return self.bounds.staged([point], self.bounds.relaxed(point, self._of_all(point), enough_s=enough_s))

    def _bound_own_microbatch(self, point: MeshCandidate, _: float) -> float:
        if self._says_most(point):
            return 0.0  # an earlier bound included it
        floor = self.evaluator.floor(point, point.microbatch_size)
        return self.bounds.with_floor([point], floor) if floor else 0.0

    def _says_most(self, point: MeshCandidate) -> bool:
        """Whether the point's own sharding is the one that bounds other points with its size of ``tp``."""
        return self._scales and point.microbatch_size == self._find_largest_microbatch(point)

    def _own_leanest(self, point: MeshCandidate, enough_s: float) -> float:
        leanest = self._lean.get(self.family(point), point)
        if leanest == point or not is_plain(point.schedule, point.virtual_stages):
            return 0.0
        found = self._of_leanest(leanest, enough_s)
        return self.bounds.staged([point], found) if found else 0.0

    def _of_leanest(self, leanest: MeshCandidate, enough_s: float) -> LeastTime | None:
        """Lower bound on the stages of a family, in the memory of ``leanest``, its member with the least memory. Raises
        the exceptions of ``leanest``."""
        if leanest not in self._own_shared:
            try:
                least = self.evaluator.least_beside(leanest)
                self._own_shared[leanest] = least and self.bounds.least(leanest, *least, enough_s=enough_s)
            except PartitionError as error:
                self._own_shared[leanest] = error
        found = self._own_shared[leanest]
        if isinstance(found, PartitionError):
            raise found.with_traceback(None)
        return found

    def _own_staged(self, point: MeshCandidate, enough_s: float) -> float:
        if not is_plain(point.schedule, point.virtual_stages):
            return 0.0
        return self.bounds.staged([point], self.bounds.least(point, *self.evaluator.least(point), enough_s=enough_s))

    def _of_all(self, point: MeshCandidate) -> BlockLowerBound | None:
        """The floor by the largest microbatch's sharding, with the weight gathers of the point."""
        return self._gathers.beside(self._of_largest(self.family(point)), point)

    def _of_largest(self, point: MeshCandidate) -> BlockLowerBound | None:
        if not self._scales or point.tp == point.cp == point.ep == 1:  # without collectives little is gained
            return None
        return self.evaluator.floor(point, self._find_largest_microbatch(point))

    def _find_largest_microbatch(self, point: MeshCandidate) -> int:
        """The largest microbatch size that a device can hold and whose sharding bounds the point's: a multiple of the
        point's size that is divisible by ``tp`` exactly if the point's size is, since that decides whether the batch
        itself may be sharded.

        The largest size of the fewest stages is smaller and gives a tighter bound, where it is such a multiple.
        """
        size, tp = point.microbatch_size, point.tp
        known = [s for s in self._sizes[tp] if s % size == 0 and (s % tp == 0) == (size % tp == 0)]
        return self._first[tp] if self._first[tp] in known else max(known)
