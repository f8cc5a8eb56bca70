"""Compute lower bounds of the candidates of a search, cheapest first: from the unsharded model, then from actual
shardings."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from partitioner.candidate import MeshCandidate
from partitioner.cost.call.call_cost import CallCost
from partitioner.errors import CapacityError
from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.model import FoldedModel
from partitioner.schedules.formulas import is_formula, is_plain, is_split, most_in_flight
from partitioner.solve.bounds.model_bounds import BY_BLOCKS, BoundOptions, ModelBounds
from partitioner.solve.bounds.schedule_memory import (
    MicrobatchMemory,
    RankCapacity,
    RecomputeCosts,
    least_of,
    most_held,
    needs_of,
)
from partitioner.solve.bounds.zero_and_reduction import BlockLowerBound, Gathers, Seconds
from partitioner.solve.evaluate.evaluate_placement import split_of, virtual_ranks
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.evaluate.sharded_bounds import ShardedBounds
from partitioner.solve.search.mixed_cluster import MixedClusterBound
from partitioner.solve.search.space import SearchSpace, list_hybrid_candidates
from partitioner.solve.search.uniform_cluster import UniformClusterBound
from partitioner.solve.stages.lower_bound import LeastTime

_activations_kind = attrgetter("pp", "dp", "cp", "tp", "ep", "microbatch_size")  # activations depend on these


class BoundCascade:
    """The sequence of lower bounds that the search computes for ``candidates`` and their families, from the quickest to
    the tightest. A family is the candidates of ``space`` (the search space) that differ only in ZeRO (its stage, and
    the number of ranks that shard).

    The first bounds come from the unsharded model without collectives (``bounds``). Then a sharding is solved
    (``evaluator``) for the largest microbatch. Its collectives also bound those of smaller microbatches, so one
    sharding bounds all candidates with one size of ``tp``. Last, the candidate's own sharding gives the tightest bound.
    """

    def __init__(
        self,
        bounds: ModelBounds,
        evaluator: CandidateEvaluator,
        candidates: Sequence[MeshCandidate],
        space: SearchSpace,
    ) -> None:
        self.bounds, self.sharded, self.space = bounds, ShardedBounds(evaluator), space
        self._sizes: dict[int, set[int]] = defaultdict(set)  # by tp
        largest: dict[tuple[int, int], int] = defaultdict(int)  # by tp and pp
        self._shared: dict[MeshCandidate, LeastTime | PartitionError] = {}
        self._lean: dict[MeshCandidate, MeshCandidate] = {}  # by family, the member that needs least memory
        self._own_shared: dict[MeshCandidate, LeastTime | PartitionError | None] = {}  # by the leanest of a family
        self._unseen: set[MeshCandidate] = set()
        self._expected = False
        self._needs: dict[tuple[int, ...], MicrobatchMemory] = {}
        self._recompute: dict[tuple[int, ...], RecomputeCosts] = {}
        self._alike, self._mixed = UniformClusterBound(evaluator), MixedClusterBound(evaluator)
        self._gathers = Gathers(evaluator.job, bounds.placements, bounds.device)
        self._parts: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # (ZeRO stage, dp_shard) under hybrid sharding
        for candidate in {_activations_kind(candidate): candidate for candidate in candidates}.values():
            if bounds.layer_bytes(candidate) <= bounds.capacity(candidate):
                self._sizes[candidate.tp].add(candidate.microbatch_size)
                largest[candidate.tp, candidate.pp] = max(
                    largest[candidate.tp, candidate.pp], candidate.microbatch_size
                )
        self._first = {tp: min(size for (of, _), size in largest.items() if of == tp) for tp in self._sizes}
        # kernels that fit in caches are faster than their share of larger ones, so bounds cannot be scaled then
        self._scales = not any(device.memory_sizes for device in evaluator.job.topology.types.values())

    def times(self, candidates: Sequence[MeshCandidate]) -> NDArray[np.float64]:
        """Return lower bounds in seconds on the step times of all candidates, shape ``[candidates]``. The first call
        also starts background work on the shardings that the best candidates will need. ``candidates``: combinations of
        mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        found = self.bounds.times(candidates)
        if len(candidates) > 1 and not self._expected:
            self._expected = True
            self._prefetch_shardings([candidates[i] for i in np.argsort(found, kind="stable")])
        return found

    def estimate_times(self, candidates: Sequence[MeshCandidate]) -> NDArray[np.float64]:
        """Return approximate lower bounds in seconds on the step times of candidates outside the search, shape
        ``[candidates]``, without solving their shardings. ``candidates``: combinations of mesh sizes, microbatch size,
        schedule and ZeRO stage.

        The seconds of blocks (such as layers) are taken from the shardings that the search has computed for equal
        ``tp``, ``ep`` and ``etp``, in proportion to the tokens of a rank. More ranks for a sequence (``cp``) only add
        collectives for attention, which are left out. If there is no such sharding, the bound is that of the unsharded
        model."""
        solved, known = self.sharded.list_known_floors(), dict[Hashable, Seconds]()
        for kind, candidate in {BY_BLOCKS(candidate): candidate for candidate in candidates}.items():
            tokens = candidate.microbatch_size / candidate.cp  # in samples per rank
            of_kind = solved.get((candidate.tp, candidate.ep, candidate.etp), [])
            larger = [(tokens / samples, seconds) for samples, seconds in of_kind if tokens <= samples]
            if larger and self._scales:
                known[kind] = {
                    block: (max(s * of[block][0] for s, of in larger), max(s * of[block][1] for s, of in larger))
                    for block in larger[0][1]
                }
        return self.bounds.times(candidates, known=known)

    def announce(self, candidates: Sequence[MeshCandidate]) -> None:
        """Announce that bounds of ``candidates``, which the search itself has not bounded, will be requested. A second
        process then solves their shardings ahead; earlier announcements are withdrawn. ``candidates``: combinations of
        mesh sizes, microbatch size, schedule and ZeRO stage, the most promising first."""
        self.sharded.locals.ahead.end()
        self._prefetch_shardings(candidates)

    def _prefetch_shardings(self, candidates: Sequence[MeshCandidate]) -> None:
        """Announce the sharding problems from which the most promising candidates will be bounded, so that a second
        process can solve them ahead: first the problems for the largest microbatches, then those for each candidate's
        own microbatch. ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage, those with
        the least first bound first."""
        first: dict[tuple[int, ...], MeshCandidate] = {}
        for candidate in candidates:
            first.setdefault(
                (candidate.tp, candidate.cp, candidate.ep, candidate.etp, candidate.microbatch_size), candidate
            )
        fit = [candidate for candidate in first.values() if candidate.microbatch_size in self._sizes[candidate.tp]]
        largest = [(p, self._find_largest_microbatch(p)) for p in fit if self._scales and not p.tp == p.cp == p.ep == 1]
        self.sharded.prefetch(self._of_families(candidates), [*largest, *((p, p.microbatch_size) for p in fit)])

    def _of_families(self, candidates: Sequence[MeshCandidate]) -> Iterator[tuple[MeshCandidate, int]]:
        """Yield pairs (candidate, microbatch size in samples) that name the shardings from which lower bounds on
        ``candidates`` will be computed. Candidates that differ only in ZeRO share one pair. ``candidates``:
        combinations of mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        for family in dict.fromkeys(map(self.family, candidates)) if self._scales else ():
            if family.microbatch_size in self._sizes[family.tp] and not family.tp == family.cp == family.ep == 1:
                yield family, self._find_largest_microbatch(family)

    def family(self, candidate: MeshCandidate) -> MeshCandidate:
        """Return ``candidate`` without ZeRO. It is the key of all candidates that differ only in ZeRO, for which the
        search computes common bounds first. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        return candidate.sharing(0)

    def members(self, candidates: Sequence[MeshCandidate]) -> Sequence[MeshCandidate]:
        """Return all candidates that differ from ``candidates`` only in ZeRO: in the stage, or in the number of ``dp``
        ranks over which parameters, gradients and optimizer states are sharded (only a part of the ranks under hybrid
        sharding). ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage."""
        candidate = candidates[0]
        key = candidate.dp, candidate.cp, candidate.tp  # all that the result depends on
        if key not in self._parts:
            self._parts[key] = [(other.zero, other.dp_shard) for other in list_hybrid_candidates(self.space, candidate)]
        return list(dict.fromkeys([*candidates, *(candidate.sharing(*part) for part in self._parts[key])]))

    @property
    def family_bounds(self) -> Sequence[Callable[[Sequence[MeshCandidate], float], float]]:
        """Return the functions that compute a lower bound in seconds on the step times of a family, in the order in
        which they are called. A family is candidates (mesh sizes, microbatch size, schedule) that differ only in ZeRO.
        The first two functions use the sharding solved for the largest microbatch. One assumes that the work is divided
        evenly into stages. The other searches the best stages with which the candidate of the family that needs the
        least memory fits. The last two functions compute the same bounds with the sharding solved for the family's own
        microbatch size."""
        return self._bound_even_split, self._bound_least_memory_stages, self._own_even, self._own_lean

    @cached_property
    def candidate_bounds(self) -> Sequence[Callable[[MeshCandidate, float], float]]:
        """Return the functions that compute a lower bound in seconds on the step time of one candidate (mesh sizes,
        microbatch size, schedule and ZeRO stage), in the order in which they are called, from the quickest to the
        tightest.

        The first checks whether parameters and optimizer states fit. The next ones use the sharding solved for the
        largest microbatch: an even division into stages with the collectives of ZeRO, and the best stages. Then the
        same bounds are computed with the candidate's own sharding: first with the memory of the candidate that needs
        the least among those that differ only in ZeRO, then with the candidate's own memory. If not all placements
        (assignments of ranks to devices) are tried, two more bounds follow: one evaluates placements on a cluster of
        equal devices, the other mixes stages on two classes of devices."""
        relaxed = self._held, self._bound_with_gathers, self._bound_candidate_stages, self._bound_stages_thoroughly
        return (
            *relaxed,
            self._bound_own_microbatch,
            self._own_leanest,
            self._own_staged,
            self._alike.quickly,
            self._mixed.quickly,
        )

    def bound_tightly(self, candidate: MeshCandidate, cutoff_s: float = np.inf) -> float:
        """Return the greatest of several lower bounds in seconds on the step of ``candidate``, on any placement
        (assignment of ranks to devices).

        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage; the search has found a plan for it.
        ``cutoff_s``: a bound of this value is high enough, so the computation may stop there.
        """
        floor, own = (
            self.sharded.bound_blocks(candidate, candidate.microbatch_size),
            self.sharded.bound_call_costs(candidate),
        )
        even = self.bounds.with_floor([candidate], floor) if floor else 0.0
        try:
            problem = self.bounds.problem(candidate, *own, virtual_ranks(candidate, self.bounds.train))
            pipeline_s = split_of(problem, candidate, cutoff_s=cutoff_s).lower_bound_s
        except CapacityError:  # for simulated schedules not all cuts are tried, so others may fit
            pipeline_s = 0.0
        stages = self.bounds.followed(candidate, pipeline_s)
        placed = max(self._alike.least(candidate, cutoff_s), self._mixed.least(candidate, cutoff_s))
        return max(self.bounds.refine(candidate), even, stages, self._own_staged(candidate, np.inf), placed)

    def shortage(self, candidate: MeshCandidate) -> CapacityError | None:
        """Return the error that says how many bytes ``candidate`` lacks and on which stage. If the lower bounds on its
        memory do not show that it cannot fit, return ``None``. ``candidate``: mesh sizes, microbatch size, schedule and
        ZeRO stage."""
        try:
            self.bounds.refine(candidate)
        except CapacityError as error:
            return error
        except PartitionError:  # the candidate has no plan for another reason
            return None
        return None

    def _bound_even_split(self, candidates: Sequence[MeshCandidate], _: float) -> float:
        """Return a lower bound in seconds on the steps of ``candidates``, which differ only in ZeRO, if the work is
        divided evenly into stages. Costs are computed with the sharding that was solved for the largest microbatch with
        these mesh sizes. The result is 0 if there is no bound. The second argument is not used. ``candidates``:
        combinations of mesh sizes, microbatch size, schedule and ZeRO stage. Raises :class:`CapacityError` if one
        microbatch does not fit.
        """
        self.bounds.check_microbatch(candidates[0])
        self._lean[self.family(candidates[0])] = min(candidates, key=self.bounds.state_bytes)
        floor = self._of_largest(self.family(candidates[0]))
        if not self._says_most(candidates[0]):
            self.sharded.prioritise(candidates[0], candidates[0].microbatch_size)
        return self.bounds.with_floor(candidates, floor) if floor else 0.0

    def _bound_least_memory_stages(self, candidates: Sequence[MeshCandidate], cutoff_s: float) -> float:
        """Return a lower bound in seconds on the steps of ``candidates``, which differ only in ZeRO, over all cuts into
        stages with which the candidate that needs the least memory fits. For a single candidate, return 0, because
        other bounds cover it.

        Costs are computed with the sharding that was solved for the largest microbatch with these mesh sizes. For
        schedules with several stages on a rank no cuts are examined; the bound is then the work plus the recomputation
        that memory requires. ``cutoff_s``: a bound of this many seconds is tight enough. ``candidates``: combinations
        of mesh sizes, microbatch size, schedule and ZeRO stage."""
        key = self.family(candidates[0])
        if not is_plain(key.schedule, key.virtual_stages):
            return self._bound_simulated_recompute(candidates, cutoff_s)
        if len(candidates) < 2:
            return 0.0
        plain = self._shared.get(replace(key, schedule="1f1b"))  # under 1F1B no more microbatches are in flight
        if isinstance(plain, PartitionError):
            raise plain.with_traceback(None)
        if plain is not None and (bound := self.bounds.staged(candidates, plain)) >= cutoff_s:
            return bound
        leanest = self._lean[key]
        try:
            speed = max(self.bounds.speeds(candidate)[0] for candidate in candidates)
            found = self.bounds.relaxed(leanest, self._of_largest(key), speed, cutoff_s=cutoff_s, quick=True)
        except PartitionError as error:
            self._shared[key] = error
            raise
        self._shared[key] = found
        return self.bounds.staged(candidates, found)

    def _own_even(self, candidates: Sequence[MeshCandidate], _: float) -> float:
        """Return a lower bound in seconds on the steps of ``candidates``, which differ only in ZeRO, if the work is
        divided evenly into stages. Costs are computed with the sharding that was solved for their microbatch size
        without ZeRO; a step is never slower without ZeRO. The result is 0 if there is no bound, or if an earlier bound
        used the same sharding. The second argument is not used. ``candidates``: combinations of mesh sizes, microbatch
        size, schedule and ZeRO stage.
        """
        if self._says_most(candidates[0]):
            return 0.0  # an earlier bound included it
        floor = self.sharded.bound_blocks(self.family(candidates[0]), candidates[0].microbatch_size)
        return self.bounds.with_floor(candidates, floor) if floor else 0.0

    def _own_lean(self, candidates: Sequence[MeshCandidate], cutoff_s: float) -> float:
        """Return a lower bound in seconds on the steps of ``candidates``, which differ only in ZeRO, over all cuts into
        stages with which the candidate that needs the least memory fits. Costs are computed with the sharding that was
        solved for these candidates. The result is 0 if there is no such bound. ``cutoff_s``: a bound of this many
        seconds is tight enough. ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        if len(candidates) < 2 or not is_plain(candidates[0].schedule, candidates[0].virtual_stages):
            return 0.0
        found = self._of_leanest(self._lean[self.family(candidates[0])], cutoff_s)
        return self.bounds.staged(candidates, found) if found else 0.0

    def _held(self, candidate: MeshCandidate, _: float) -> float:
        self.bounds.check_states(candidate)
        return 0.0

    def _bound_with_gathers(self, candidate: MeshCandidate, _: float) -> float:
        """Return a lower bound in seconds on the step of ``candidate`` with the collectives of ZeRO-2 or ZeRO-3; 0 for
        other stages of ZeRO, or if there is no bound. The second argument is not used. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage.
        """
        if candidate.zero == 2:
            return self._bound_zero2_scatters(candidate)
        floor = self._of_all(candidate) if candidate.zero == 3 else None  # for others the family's bound included it
        return self.bounds.with_floor([candidate], floor) if floor else 0.0

    def _bound_zero2_scatters(self, candidate: MeshCandidate) -> float:
        """Return a lower bound in seconds on a step of ``candidate`` under ZeRO-2, where gradients are scattered after
        every backward; 0 if the scatters cannot be bounded. ``candidate``: mesh sizes, microbatch size, schedule and
        ZeRO stage."""
        m, compression = int(self.bounds.rounds(candidate)), self.bounds.constraints.grad_compression
        if m == 1 or not self.bounds.train or compression is not None or self.bounds.may_differ(candidate):
            return 0.0
        if candidate.cp > 1:  # ranks of cp may compute whole gradients, which fewer ranks share
            return 0.0
        floor = self._of_largest(self.family(candidate))
        known = self.bounds.with_floor([candidate], floor) if floor else float(self.bounds.times([candidate])[0])
        return self._gathers.scattered(candidate, m, known, self.bounds.forward_s(candidate, floor))

    def _bound_candidate_stages(self, candidate: MeshCandidate, cutoff_s: float) -> float:
        """Return a lower bound in seconds on the step of ``candidate`` over all cuts into stages; 0 if it would not be
        tighter than earlier bounds. Costs are computed with the sharding that was solved for the largest microbatch
        with these mesh sizes. ``cutoff_s``: a bound of this many seconds is tight enough. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage.
        """
        if not is_plain(candidate.schedule, candidate.virtual_stages):
            return self._bound_simulated_recompute([candidate], cutoff_s)
        if self._has_room(candidate):
            return 0.0  # the family's bound included it
        quick = is_formula(
            candidate.schedule, candidate.pp, self.bounds.train
        )  # the step times of other schedules are known only later
        least = self._bound_all_cuts(candidate, cutoff_s=cutoff_s, quick=quick)
        if quick and not least.is_seen:
            self._unseen.add(candidate)
        return self.bounds.staged([candidate], least)

    def _has_room(self, candidate: MeshCandidate) -> bool:
        """Return whether memory does not limit ``candidate``: with an even division into stages, all activations fit
        without recomputation. The lower bound over all its cuts into stages is then equal to the bound of its family
        (candidates that differ only in ZeRO), and is not computed. ``candidate``: mesh sizes, microbatch size, schedule
        and ZeRO stage."""
        if candidate.zero == 3 or not isinstance(self._shared.get(self.family(candidate)), LeastTime):
            return False
        flying = most_in_flight(candidate.schedule, candidate.pp, int(self.bounds.rounds(candidate)))
        kept = flying * self._needs_of(candidate).whole.total / candidate.pp
        needed = self.bounds.state_bytes(candidate) + kept + self.bounds.layer_bytes(candidate)
        return needed <= self.bounds.capacity(candidate)

    def _bound_simulated_recompute(self, candidates: Sequence[MeshCandidate], cutoff_s: float) -> float:
        """Return a lower bound in seconds on the steps of ``candidates``, which differ only in ZeRO, under a schedule
        that has to be simulated. The bound is the work plus the least recomputation with which activations fit on all
        ranks together, given that no rank computes for longer than the step. ``cutoff_s``: a bound of this many seconds
        is tight enough. ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage."""
        candidate = min(candidates, key=self.bounds.state_bytes)
        constraints = self.bounds.constraints
        if not self.bounds.train or candidate.pp == 1 or constraints.offload:
            return 0.0
        m = self.bounds.rounds(candidate)
        least = 1.0 if self.bounds.may_differ(candidate) else m  # least number of microbatches of a rank
        speed, speeds = self.bounds.speeds(candidate)
        ranks = RankCapacity(
            most_held(candidate.schedule, candidate.pp, int(least), candidate.virtual_stages),
            capacity=self.bounds.capacity(candidate),
            states=self.bounds.state_bytes(candidate) * candidate.pp,
        )
        floor, needs = self._of_largest(self.family(candidate)), self._needs_of(candidate)
        shared = partial(self.bounds.with_floor, candidates, floor) if floor else partial(self.bounds.times, candidates)
        known = float(np.min(shared(shared=True)))  # without the largest call, whose time cannot be added

        def of_steps(limit_s: float) -> float:
            """Return a lower bound in seconds on the step that is valid if the step takes at most ``limit_s`` seconds:
            the work plus the least recomputation with which activations fit if no rank computes for longer than that.
            """
            again = needs.seconds_again(ranks, constraints.recompute, limit_s / least * speed)
            return known + m / speeds * again

        return least_of(of_steps, known, cutoff_s)

    def _needs_of(self, candidate: MeshCandidate) -> MicrobatchMemory:
        """Return lower bounds on the activation bytes of one microbatch of ``candidate`` in each block call (such as a
        decoder layer), without recomputation and with full recomputation. The result is cached. ``candidate``: mesh
        sizes, microbatch size, schedule and ZeRO stage.
        """
        split = is_split(candidate.schedule)
        key = candidate.microbatch_size, candidate.tp, candidate.cp, candidate.ep, split
        if key not in self._needs:
            calls = [c for c in self.bounds.model.calls if not c.shared and not c.prologue]
            self._needs[key] = needs_of([(call, self.bounds.calls(candidate)[call.block]) for call in calls], split)
        return self._needs[key]

    def again_s(self, candidate: MeshCandidate, *, quick: bool = False) -> float:
        """Return approximately how many seconds of a step of ``candidate`` recomputation takes; infinite if activations
        do not fit with the recomputation that the constraints allow. Work and memory are assumed to be divided evenly
        over virtual stages. ``quick``: whether to assume also that ``tp`` divides all work and memory evenly, instead
        of sharding the model. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage. Raises
        :class:`PartitionError` if the candidate has no plan."""
        if quick:
            key = candidate.microbatch_size, candidate.tp, candidate.cp, candidate.ep
            if key not in self._recompute:
                self._recompute[key] = _sum_recompute_costs(self.bounds.model, self.bounds.calls(candidate))
            costs = self._recompute[key]
        else:
            costs = _sum_recompute_costs(*self.sharded.bound_call_costs(candidate)[:2])
        m, (_, speeds) = self.bounds.rounds(candidate), self.bounds.speeds(candidate)
        free = self.bounds.capacity(candidate) - self.bounds.state_bytes(candidate) - costs.working_bytes
        how = candidate.schedule, candidate.pp, int(m), candidate.virtual_stages
        again_s = costs.estimate_seconds(free, *how)
        if again_s and self.bounds.constraints.recompute == "none":
            return math.inf
        return m * candidate.pp / speeds * again_s

    def _bound_stages_thoroughly(self, candidate: MeshCandidate, cutoff_s: float) -> float:
        """Return a lower bound in seconds on the step of ``candidate`` from a search of all its cuts into stages. The
        bound is computed only if the quick search, which leaves out cuts with very long stages, found no cut that fits
        in memory; otherwise the result is 0. ``cutoff_s``: a bound of this many seconds is tight enough. ``candidate``:
        mesh sizes, microbatch size, schedule and ZeRO stage."""
        if candidate not in self._unseen:
            return 0.0
        return self.bounds.staged([candidate], self._bound_all_cuts(candidate, cutoff_s=cutoff_s))

    def _bound_all_cuts(self, candidate: MeshCandidate, **how: Unpack[BoundOptions]) -> LeastTime:
        """Return lower bounds on the stage times of ``candidate`` over all cuts into stages, with the collectives of
        ZeRO-3. Costs are computed with the sharding that was solved for the largest microbatch with these mesh sizes.
        ``how``: ``cutoff_s`` and ``quick``, as for :meth:`ModelBounds.relaxed`. ``candidate``: mesh sizes, microbatch
        size, schedule and ZeRO stage."""
        floor = self._of_largest(self.family(candidate))
        return self.bounds.relaxed(candidate, floor, gathers=self._gathers, **how)

    def _bound_own_microbatch(self, candidate: MeshCandidate, _: float) -> float:
        """Return a lower bound in seconds on the step of ``candidate`` if the work is divided evenly into stages. Costs
        are computed with the sharding that was solved for the candidate itself. The result is 0 if there is no bound,
        or if an earlier bound used the same sharding. The second argument is not used. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage."""
        if self._says_most(candidate):
            return 0.0  # an earlier bound included it
        floor = self.sharded.bound_blocks(candidate, candidate.microbatch_size)
        return self.bounds.with_floor([candidate], floor) if floor else 0.0

    def _says_most(self, candidate: MeshCandidate) -> bool:
        """Return whether the earlier bounds of ``candidate`` already come from its own sharding. This is the case if
        its microbatch size is the largest one with its mesh sizes, since a sharding is solved for that size first.
        Bounds from the candidate's own sharding then need not be computed. ``candidate``: mesh sizes, microbatch size,
        schedule and ZeRO stage.
        """
        return self._scales and candidate.microbatch_size == self._find_largest_microbatch(candidate)

    def _own_leanest(self, candidate: MeshCandidate, cutoff_s: float) -> float:
        """Return a lower bound in seconds on the step of ``candidate`` over all cuts into stages with which the leanest
        candidate fits: the one that needs the least memory among those that differ from ``candidate`` only in ZeRO.
        Return 0 if ``candidate`` itself is the leanest, since a later bound covers that case, or if a rank has several
        stages. Costs are computed with the sharding that was solved for these candidates.

        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage. ``cutoff_s``: a bound of this many seconds
        is tight enough."""
        leanest = self._lean.get(self.family(candidate), candidate)
        if leanest == candidate or not is_plain(candidate.schedule, candidate.virtual_stages):
            return 0.0
        found = self._of_leanest(leanest, cutoff_s)
        return self.bounds.staged([candidate], found) if found else 0.0

    def _of_leanest(self, leanest: MeshCandidate, cutoff_s: float) -> LeastTime | None:
        """Return lower bounds on the stage times of candidates that differ only in ZeRO, over all cuts into stages that
        fit in memory for ``leanest``, the candidate that needs the least memory. ``None`` means that there is no bound.
        ``cutoff_s``: the computation may stop when the bounds imply a step of this many seconds. ``leanest``: mesh
        sizes, microbatch size, schedule and ZeRO stage. Raises :class:`PartitionError` if ``leanest`` has no plan.
        """
        if leanest not in self._own_shared:
            try:
                least = self.sharded.bound_family_costs(leanest)
                self._own_shared[leanest] = least and self.bounds.least(leanest, *least, cutoff_s=cutoff_s)
            except PartitionError as error:
                self._own_shared[leanest] = error
        found = self._own_shared[leanest]
        if isinstance(found, PartitionError):
            raise found.with_traceback(None)
        return found

    def _own_staged(self, candidate: MeshCandidate, cutoff_s: float) -> float:
        """Return a lower bound in seconds on the step of ``candidate`` over all cuts into stages. Costs are computed
        with the sharding that was solved for the candidate. Return 0 for schedules with several virtual stages on a
        rank. ``cutoff_s``: a bound of this many seconds is tight enough. ``candidate``: mesh sizes, microbatch size,
        schedule and ZeRO stage."""
        if not is_plain(candidate.schedule, candidate.virtual_stages):
            return 0.0
        return self.bounds.staged(
            [candidate], self.bounds.least(candidate, *self.sharded.bound_call_costs(candidate), cutoff_s=cutoff_s)
        )

    def _of_all(self, candidate: MeshCandidate) -> BlockLowerBound | None:
        """Return lower bounds on the seconds of each block (such as a layer) for one microbatch of ``candidate``, with
        the weight gathers of ZeRO-3. They come from the sharding solved for the largest microbatch with these mesh
        sizes. ``None`` means that there is no bound. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
        stage.
        """
        return self._gathers.beside(self._of_largest(self.family(candidate)), candidate)

    def _of_largest(self, candidate: MeshCandidate) -> BlockLowerBound | None:
        """Return lower bounds on the seconds of each block (such as a layer) for one microbatch of ``candidate``,
        scaled from the sharding solved for the largest microbatch with these mesh sizes; ``None`` if there is no bound.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        if (
            not self._scales or candidate.tp == candidate.cp == candidate.ep == 1
        ):  # without collectives the bound would hardly be tighter
            return None
        return self.sharded.bound_blocks(candidate, self._find_largest_microbatch(candidate))

    def _find_largest_microbatch(self, candidate: MeshCandidate) -> int:
        """Return the microbatch size in samples for which a sharding is solved to bound ``candidate`` (mesh sizes,
        microbatch size, schedule and ZeRO stage). It is the largest size that fits on a device, is a multiple of the
        candidate's size, and is divisible by ``tp`` exactly if the candidate's size is, because this decides whether
        the batch itself may be sharded over ``tp``.

        For each number of stages there is a largest size that fits. If the smallest of these meets the conditions, it
        is used instead, because it gives a tighter bound."""
        size, tp = candidate.microbatch_size, candidate.tp
        known = [s for s in self._sizes[tp] if s % size == 0 and (s % tp == 0) == (size % tp == 0)]
        first = self._first.get(tp)  # candidates outside the search may have sizes that no candidate of it has
        return first if first is not None and first in known else max(known, default=size)


def _sum_recompute_costs(model: FoldedModel, of_block: Mapping[str, CallCost]) -> RecomputeCosts:
    """Return the sums of costs over all block calls (such as layers) of ``model`` that can be distributed over pipeline
    stages. ``of_block``: block name -> cost of a call."""
    often = Counter(call.block for call in model.calls if not call.shared and not call.prologue)
    return RecomputeCosts.of((of_block[block], times) for block, times in often.items())
