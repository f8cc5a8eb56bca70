"""Solve one candidate of the search: its sharding, its stages, and the estimate of its step time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import fx

from partitioner.candidate import MeshCandidate
from partitioner.cost.call.call_cost import CallWork
from partitioner.cost.call.recomputation import find_recomputed_nodes
from partitioner.cost.call.states import StateCost, StateCosts, StateKinds, kinds_of, state_costs
from partitioner.cost.step.estimate import how_reduced, with_step_time
from partitioner.cost.step.offload import check_disks, check_hosts
from partitioner.cost.step.placed_mesh import PlacedMesh, RankProfile
from partitioner.cost.step.rank_costs import CallCostCache, Costs, combine_fastest_costs
from partitioner.cost.step.relaxed_mesh import no_slower
from partitioner.emit.buckets import AT_ONCE, ReductionScheme
from partitioner.errors import CapacityError, PlanError
from partitioner.passes.errors import PartitionError, UnsupportedError
from partitioner.passes.ir.hashing import SameObject
from partitioner.passes.ir.model import Block, FoldedModel
from partitioner.plan import Estimate
from partitioner.runtime.program.program import Offload
from partitioner.schedules.formulas import is_formula, is_plain
from partitioner.solve.bounds.zero_and_reduction import BlockLowerBound, Seconds
from partitioner.solve.evaluate.evaluate_placement import PlacementEvaluator, ShareRecord
from partitioner.solve.evaluate.job import Job
from partitioner.solve.evaluate.local_model_cache import LocalKey, LocalModels, Reading, Wanted
from partitioner.solve.placement.placement import EXCHANGES, BestPlacement, Placements
from partitioner.solve.sharding.expert_parallel import can_spread_experts
from partitioner.solve.sharding.local_model import LocalModel
from partitioner.solve.stages.split import StageSplit
from partitioner.topology.groups import stage_ranks

# sizes of pp, dp, cp, tp and 1; ep, etp, ZeRO stage, dp_shard, samples, and whether these are all of a rank
FloorKey = tuple[int, int, int, int, int, int, int, int, int, int, bool]

_EXCHANGES_FOLLOWED = 8  # placements that are evaluated during exchanges under simulated schedules, at most


@dataclass(frozen=True)
class SolvedCandidate:
    """The best plan of ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage) before its program is
    emitted.

    ``num_microbatches``: number of microbatches of a rank; if ranks of ``dp`` have different numbers, the greatest.
    ``local``: the graphs of one rank. ``stages``: the cut into stages. ``estimate``: time and memory of a step.
    ``context_model``: the model before its sequence is sharded over ``cp``; ``None`` if ``cp`` is 1. ``stage_of_call``:
    the stage index of each call of ``local.model``. ``devices``: the device index of each rank. ``recompute``: indices
    of the block calls (such as layers) that are recomputed in full. ``selective``: indices of those that recompute
    selectively. ``offload``: the kinds of data kept in host memory. ``reducing``: how gradients are reduced, such as
    all at the end of the step. ``data_shares``: the number of microbatches of each rank of ``dp``; empty if all have
    equally many. ``lower_bound_s``: every plan of the candidate takes at least this many seconds, or at least the
    cutoff of the search if that is smaller.
    """

    candidate: MeshCandidate
    num_microbatches: int
    local: LocalModel
    stages: StageSplit
    estimate: Estimate
    stage_of_call: tuple[int, ...]
    recompute: tuple[int, ...]
    devices: tuple[int, ...]  # by rank
    selective: tuple[int, ...] = ()  # calls that recompute selectively
    offload: tuple[Offload, ...] = ()  # data kept in host memory
    context_model: FoldedModel | None = None  # one microbatch, before its sequence is shared over cp
    reducing: ReductionScheme = AT_ONCE  # how gradients are reduced
    data_shares: tuple[int, ...] = ()  # the microbatches of each rank of dp; empty: all ranks have equally many
    lower_bound_s: float = 0.0


@dataclass
class CandidateEvaluator:
    """Finds the best plan of single candidates (combinations of mesh sizes, microbatch size, schedule and ZeRO stage)
    of ``job`` (the model, batch, cluster and constraints), and computes lower bounds on their step times. Results that
    candidates share, such as shardings, are computed once and cached. ``host_lacks``: whether a host's memory was too
    small for the data that some candidate offloads. ``floors``: the results of :meth:`floor` so far; those of a job
    that differs in its free memory, or in which candidates it excludes, can be passed.
    """

    job: Job
    host_lacks: bool = False  # whether a host's memory was too small for what a candidate offloads
    _costs: dict[LocalKey, CallCostCache] = field(default_factory=dict)
    _works: dict[SameObject[Block], CallWork] = field(default_factory=dict)
    _spread: set[tuple[int, LocalKey]] = field(default_factory=set)
    floors: dict[FloorKey, BlockLowerBound | None] = field(default_factory=dict)
    _held: dict[tuple[Any, ...], StateCosts] = field(default_factory=dict)
    _kinds: dict[LocalKey, StateKinds] = field(default_factory=dict)
    _records: dict[MeshCandidate, ShareRecord] = field(
        default_factory=lambda: defaultdict(ShareRecord)
    )  # by candidate without ZeRO

    def solve(
        self,
        candidate: MeshCandidate,
        devices: Sequence[int] | None = None,
        *,
        proven: bool = True,
        improved: bool = True,
        cutoff_s: float = math.inf,
    ) -> SolvedCandidate:
        """Return the best plan of ``candidate``. ``devices``: the device index of each rank; if ``None``, the placement
        (assignment of ranks to devices) is searched. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
        stage.

        ``proven``: whether to compute a tight lower bound on the cut into stages too, which doubles the time for
        schedules without a formula for the step time, which are simulated. ``improved``: whether, for these schedules,
        to search also for cuts with less idle time in the pipeline. ``cutoff_s``: plans that take at least this many
        seconds per step are of no interest, and bounds need not be tighter.

        Raises :class:`PlanError` (:class:`CapacityError` if memory does not suffice) or
        :class:`partitioner.passes.errors.UnsupportedError` if there is no plan.
        """
        job = self.job
        job.check_refused(candidate)
        placement_evaluator = replace(self._build_placement_evaluator(candidate, proven, cutoff_s), improved=improved)
        local, states = placement_evaluator.local, placement_evaluator.states
        if devices is None:
            exchanges = EXCHANGES if is_formula(candidate.schedule) else _EXCHANGES_FOLLOWED
            likely = (
                None if is_plain(candidate.schedule, candidate.virtual_stages) else self._estimate_by_1f1b(candidate)
            )
            found = self.placements.best(
                candidate.grid, placement_evaluator, placement_evaluator.expected, cutoff_s, exchanges, likely
            )
            asked = placement_evaluator.asked
            others = [m for m in self.placements.candidates(candidate.grid) if SameObject(m) not in asked]
            placement_evaluator.lower_bounds += map(placement_evaluator.least, others if likely is not None else ())
        else:
            machine = self.placements.at(candidate.grid, devices)
            found = BestPlacement(machine, *placement_evaluator(machine))
        problem, split, expected, shares = found.result
        if candidate in job.simulated:
            expected = with_step_time(expected, max(expected.step_time, job.simulated[candidate]))
        order = candidate.schedule, candidate.virtual_stages if split.virtual else None
        stage_of_call = [0] * len(local.model.calls)
        recompute: list[int] = []
        selective: list[int] = []
        for stage, plan in enumerate(split.virtual or split.stages):
            for place, call in enumerate(problem.calls[plan.start : plan.stop], plan.start):
                stage_of_call[call.index] = stage
                recompute += [call.index] if place < plan.start + plan.recompute else []
                selective += [call.index] if plan.selective and call.cost.selective_bytes else []
        return SolvedCandidate(
            candidate,
            problem.num_microbatches,
            local,
            split,
            expected,
            tuple(stage_of_call),
            tuple(recompute),
            found.machine.device_of_rank,
            tuple(selective),
            job.constraints.offload or (),
            self._split_of(candidate) if candidate.cp > 1 else None,
            how_reduced(problem, split, states, placement_evaluator.dressed(found.machine), job.constraints, *order)[1],
            shares,
            min(expected.step_time, *placement_evaluator.lower_bounds),
        )

    @property
    def without_share_history(self) -> CandidateEvaluator:
        """Return a copy of this evaluator that has forgotten which divisions of the batch among ranks were slow on
        earlier placements (assignments of ranks to devices), so that its results do not depend on what was evaluated
        before.
        """
        return replace(self, _records=defaultdict(ShareRecord))

    def _estimate_by_1f1b(self, candidate: MeshCandidate) -> Callable[[PlacedMesh], float]:
        """Return a function that estimates how good a placement is (a topology with the mesh of ``candidate`` laid over
        it). It returns the seconds of a step there under the 1F1B schedule, which is quick to compute; infinite if the
        candidate does not fit there. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.

        The estimate serves only to compare placements, which differ in devices, links and collectives. It is not the
        step time of the candidate, under whose own schedule gradient reductions start earlier.
        """
        placement_evaluator = self._build_placement_evaluator(
            replace(candidate, schedule="1f1b", virtual_stages=1), proven=False
        )

        def seconds(machine: PlacedMesh) -> float:
            try:
                return placement_evaluator(machine)[0]
            except PartitionError:
                return math.inf

        return seconds

    def tries_all(self, candidate: MeshCandidate) -> bool:
        """Return whether :meth:`solve` tries all placements (assignments of ranks to devices) of ``candidate`` and all
        divisions of the batch among the ranks of ``dp``. Its plan is then the best of all, and not only the best of
        those tried. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        complete, nested = self.placements.complete(candidate.grid), self.placements.nested(candidate.grid)
        return complete and (nested or not self.job.goes_apart(candidate))  # nested replicas are equal

    def can_prune(self, candidate: MeshCandidate, cutoff_s: float) -> bool:
        """Return whether every placement (assignment of ranks to devices) of ``candidate`` that :meth:`solve` would try
        is expected to take at least ``cutoff_s`` seconds per step, so that solving the candidate is useless. Return
        ``False`` if :meth:`solve` would try all possible placements, since other bounds are tight then. ``candidate``:
        mesh sizes, microbatch size, schedule and ZeRO stage.

        Raises :class:`PlanError` or :class:`partitioner.passes.errors.UnsupportedError` if the candidate has no plan.
        """
        if self.placements.complete(candidate.grid):
            return False  # the bounds are exact enough
        placement_evaluator = self._build_placement_evaluator(candidate)
        return all(
            placement_evaluator.expected(machine, cutoff_s) >= cutoff_s
            for machine in self.placements.candidates(candidate.grid)
        )

    def _build_placement_evaluator(
        self, candidate: MeshCandidate, proven: bool = True, cutoff_s: float = math.inf
    ) -> PlacementEvaluator:
        """Return the object that finds the best plan of ``candidate`` on single placements (assignments of ranks to
        devices). ``proven``: whether that object also computes tight lower bounds. ``cutoff_s``: plans that take at
        least this many seconds per step are of no interest. ``candidate``: mesh sizes, microbatch size, schedule and
        ZeRO stage.
        """
        self._check_experts(candidate)
        local, costs, states = self.own(candidate)
        reference = self.locals.reference_seat(candidate.tp, candidate.cp)
        record = self._records[candidate.sharing(0)]
        return PlacementEvaluator(
            self.job, candidate, local, costs, states, reference, self._check_offload, proven, cutoff_s, record
        )

    def floor(self, candidate: MeshCandidate, size: int) -> BlockLowerBound | None:
        """Return a lower bound on the forward and backward seconds of each block (such as a decoder layer) for one
        microbatch of ``candidate``, on any placement (assignment of ranks to devices). ``None`` means that there is no
        bound. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage. ``size``: the number of samples, a
        multiple of the candidate's microbatch size, for which costs are computed.

        The bound is scaled down from ``size`` samples to the candidate's microbatch. This is valid because a smaller
        microbatch takes at least as long per sample: each cost is a start-up time plus a term that grows at most
        linearly with the batch.
        """
        if size != candidate.microbatch_size and not self._is_at_best(candidate):
            return None
        key, asked = self._asked(candidate, size)
        if key not in self.floors:
            ahead = self.locals.read_ahead(key)
            self.floors[key] = self._compute_block_bound(*asked) if ahead is None else ahead
        found, share = self.floors[key], candidate.microbatch_size / size
        return found and found.each(lambda seconds: {n: (a * share, b * share) for n, (a, b) in seconds.items()})

    def list_known_floors(self) -> dict[tuple[int, ...], list[tuple[float, Seconds]]]:
        """Return all lower bounds without ZeRO that :meth:`floor` computed so far: key ``tp, ep, etp`` -> pairs (number
        of samples whose tokens a rank processes, block name -> pair of forward and backward seconds). With ``cp`` ranks
        that share each sample, a rank processes the tokens of a ``cp``-th of the microbatch's samples. Of pairs with
        equal keys and numbers, that differ in the placement of their ranks, the least seconds are given.
        """
        found: dict[tuple[int, ...], dict[float, Seconds]] = defaultdict(dict)
        for (_, _, cp, tp, _, ep, etp, zero, dp_shard, size, _), bound in self.floors.items():
            if bound is not None and not zero and not dp_shard:
                of_kind, samples = found[tp, ep, etp], size / cp
                other = of_kind.get(samples, bound.seconds)
                of_kind[samples] = {
                    block: (min(pair[0], other[block][0]), min(pair[1], other[block][1]))
                    for block, pair in bound.seconds.items()
                }
        return {kind: sorted(of_kind.items()) for kind, of_kind in found.items()}

    def expect(
        self, floors: Iterable[tuple[MeshCandidate, int]], shardings: Iterable[tuple[MeshCandidate, int]]
    ) -> None:
        """Announce which results the search will request, so that a second process can compute them ahead. Both
        arguments have pairs of a candidate (mesh sizes, microbatch size, schedule and ZeRO stage) and a microbatch size
        in samples, approximately in order of use. ``floors``: the pairs for which lower bounds on the seconds of blocks
        (such as layers) will be requested. ``shardings``: the pairs for which sharded graphs will be requested.
        """
        wanted = (self._wanted(p, size, self._is_whole(p, size)) for p, size in shardings)
        self.locals.expect(wanted, self._readings(floors))

    def wish(self, candidate: MeshCandidate, size: int) -> None:
        """Announce that the lower bound on the blocks (such as layers) of ``candidate`` will be needed soon, so that
        the second process, which computes announced results ahead, computes it before the others. ``size``: samples of
        the microbatch for which the bound is computed. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
        stage.
        """
        self.locals.wish(self._wanted(candidate, size, self._is_whole(candidate, size)))

    def _readings(self, floors: Iterable[tuple[MeshCandidate, int]]) -> Iterator[Reading]:
        """Yield a task for each lower bound on blocks (such as layers) that is not known yet and that a second process
        can compute ahead: (key of the bound, cache key of the sharded graphs from which it is computed, function that
        computes it). ``floors``: pairs of a candidate (mesh sizes, microbatch size, schedule and ZeRO stage) and a
        microbatch size in samples.
        """
        for candidate, size in floors:
            if size == candidate.microbatch_size or self._is_at_best(candidate):
                key, asked = self._asked(candidate, size)
                if key not in self.floors:
                    yield key, self._wanted(*asked)[0], partial(self._compute_block_bound, *asked)

    def _asked(self, candidate: MeshCandidate, size: int) -> tuple[FloorKey, tuple[MeshCandidate, int, bool]]:
        """Return two values: a cache key that is equal for candidates whose lower bounds on blocks (such as layers) are
        equal, and the arguments with which these bounds are computed: (candidate, microbatch size in samples, whether
        all samples of a rank are one microbatch). ``size``: samples of the microbatch for which the bounds are
        computed. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        whole = self._is_whole(candidate, size)
        if candidate.zero < 3:  # candidates with these ZeRO stages take equally long, except for waits between ranks
            candidate = replace(
                candidate, zero=candidate.zero if self._has_mixed_speeds and candidate.zero == 2 else 0, dp_shard=0
            )
        pp, dp, cp, tp, one = candidate.grid.values()
        rest = candidate.ep, candidate.etp, candidate.zero, candidate.dp_shard, size, whole
        return (pp, dp, cp, tp, one, *rest), (candidate, size, whole)

    def least(self, candidate: MeshCandidate) -> tuple[FoldedModel, Costs, dict[str, StateCost]]:
        """Return three values for ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage): the graphs of
        one rank; a dict from the name of each block (such as a layer) to a lower bound on the cost of a call on any
        placement (assignment of ranks to devices); and a dict from the name of each parameter or buffer to its cost on
        a rank.

        Raises :class:`PlanError` or :class:`partitioner.passes.errors.UnsupportedError` if the model cannot be sharded
        in this way.
        """
        local, costs, states = self.own(candidate)
        return local.model, combine_fastest_costs(self._list_stage_costs(candidate, costs)), states

    def bound_family_costs(self, candidate: MeshCandidate) -> tuple[FoldedModel, Costs, dict[str, StateCost]] | None:
        """Return three values from which lower bounds follow for ``candidate``, and for all candidates which differ
        from it only in their ZeRO stage and need at least as much memory: the graphs of one rank; a dict from the name
        of each block (such as a layer) to a lower bound on the cost of a call without ZeRO; and a dict from the name of
        each parameter or buffer to its cost. Return ``None`` if devices differ in speed, because the ZeRO stage then
        also decides how the batch may be divided. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        if self._has_mixed_speeds:
            return None
        model, costs, _ = self.least(candidate.sharing(0))
        return model, costs, self.own(candidate)[2]

    def own(self, candidate: MeshCandidate) -> tuple[LocalModel, CallCostCache, dict[str, StateCost]]:
        """Return three values for the sharding with the least cost for ``candidate`` itself: the graphs of one rank, a
        cache of the costs of their block calls (such as layers) by device, and the costs of a rank's parameters and
        buffers by name. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        key, local = self._find_local_model(candidate)
        return local, self._seat_costs(key, local), self._compute_state_costs(candidate, key, local)

    def _find_local_model(self, candidate: MeshCandidate) -> tuple[LocalKey, LocalModel]:
        """Return the cache key of the sharded graphs that one rank of ``candidate`` runs for one microbatch, and these
        graphs. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        num_microbatches = candidate.num_microbatches(self.job.global_batch)
        key = self.locals.key(candidate, candidate.parts(self.job.global_batch), num_microbatches == 1)
        return key, self.locals.at(key, num_microbatches)

    def _check_offload(self, expected: Estimate, machine: PlacedMesh) -> None:
        """Raise :class:`CapacityError` if the memory or the disk of a host is too small for the data that its ranks
        offload. ``expected``: the estimate of the plan's step, which contains the offloaded bytes of each stage.
        ``machine``: the placement (assignment of ranks to devices), which says on which host each rank runs.
        """
        topology, devices = self.job.topology, machine.device_of_rank
        held = [s for s, ranks in zip(expected.stages, stage_ranks(machine.mesh), strict=True) for _ in ranks]
        try:
            check_hosts(topology, devices, [stage.host for stage in held])
        except CapacityError:
            self.host_lacks = True
            raise
        if "disk" in (self.job.constraints.offload or ()):
            check_disks(topology, devices, [stage.disk for stage in held])

    def _split_of(self, candidate: MeshCandidate) -> FoldedModel:
        """Return the model of ``candidate`` for one microbatch, before the sequence is sharded over ``cp``.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        num_microbatches = candidate.num_microbatches(self.job.global_batch)
        return self.locals.split(candidate, candidate.parts(self.job.global_batch), num_microbatches == 1)

    def _list_stage_costs(self, candidate: MeshCandidate, costs: CallCostCache) -> list[Costs]:
        """Return the distinct dicts (name of a block, such as a layer -> cost of a call) that occur on the stages of
        the placements (assignments of ranks to devices) of ``candidate``. If not all possible placements are known,
        return instead one dict for each device type, with the best groups that any placement could have, so that lower
        bounds still hold. ``costs``: the cache from which call costs are taken. ``candidate``: mesh sizes, microbatch
        size, schedule and ZeRO stage.
        """
        if not self.placements.complete(candidate.grid):
            return self._at_best(candidate, costs)
        machines = [self.job.dressed(machine, candidate) for machine in self.placements.candidates(candidate.grid)]
        each = costs.by_pipeline if self.job.goes_apart(candidate) else costs.by_stage
        return list({id(of): of for machine in machines for of in each(machine)}.values())

    def _at_best(self, candidate: MeshCandidate, costs: CallCostCache) -> list[Costs]:
        """Return, for each device type, a dict from the name of each block (such as a layer) to the cost of a call of
        ``candidate`` on a rank whose groups (of tensor parallelism and other axes) are the fastest that any placement
        (assignment of ranks to devices) could have. ``costs``: the cache from which call costs are taken.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        one_each = candidate.parts(self.job.global_batch) == candidate.dp
        all_wait = candidate.pp == 1 and (one_each or not self.job.goes_apart(candidate))
        best = partial(self.placements.best_group, everywhere=all_wait)
        machine = self.job.dressed(PlacedMesh(self.job.topology, candidate.grid), candidate)
        sizes = {
            axis: size for axis, size in {**candidate.grid, "ep": candidate.ep}.items() if axis != "pp" and size > 1
        }
        groups, spread = tuple((axis, best(size)) for axis, size in sizes.items()), machine.spread
        over: dict[str, Any] = {n: best(getattr(spread, n).size) for n in ("experts", "shards", "expert_shards")}
        return [costs.at(RankProfile(*pace, groups), replace(spread, **over)) for pace in self.job.topology.paces[0]]

    @property
    def _has_mixed_speeds(self) -> bool:
        """Return whether the devices of the topology have different speeds."""
        return len(self.job.topology.paces[0]) > 1

    def _is_at_best(self, candidate: MeshCandidate) -> bool:
        """Return whether the lower bounds on the block calls (such as layers) of ``candidate`` are for the same kind of
        rank (device and groups) as the one that its sharding is optimized for. Only then can a bound for one microbatch
        size be scaled to another, because no other sharding costs less. ``candidate``: mesh sizes, microbatch size,
        schedule and ZeRO stage.
        """
        if self.placements.complete(candidate.grid):
            return True
        groups = dict(self.locals.reference_seat(candidate.tp, candidate.cp).groups).values()
        return not self._has_mixed_speeds and all(
            no_slower(group, self.placements.best_group(group.size)) for group in groups
        )

    def _compute_block_bound(self, candidate: MeshCandidate, size: int, whole: bool) -> BlockLowerBound | None:
        """Return lower bounds on the seconds of each block (such as a layer) of ``candidate`` for microbatches of
        ``size`` samples; ``None`` if the model cannot be sharded in this way. ``whole``: whether all samples of a rank
        are one microbatch. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        wanted = self._wanted(candidate, size, whole)
        try:
            local = self.locals.at(*wanted)
        except UnsupportedError:  # samples that interact in one batch need not do so in a smaller one
            return None
        costs = self._seat_costs(wanted[0], local)
        best = self._bound_block_seconds(local, combine_fastest_costs(self._list_stage_costs(candidate, costs)))
        kinds = self._at_best(candidate, costs) if self._has_mixed_speeds else ()
        return BlockLowerBound(best, tuple(self._bound_block_seconds(local, of_kind) for of_kind in kinds))

    def _bound_block_seconds(self, local: LocalModel, costs: Costs) -> Seconds:
        """Return, for each block (such as a layer) of the job's unsharded model, name -> least (forward seconds,
        backward seconds) of a call. ``local``: the graphs of one rank. ``costs``: the costs of the blocks of ``local``.
        These blocks may differ from those of the unsharded model, so calls of the two models are matched by their
        module path.
        """
        least = {name: (cost.forward_total_s, cost.backward_total_s) for name, cost in costs.items()}
        of_path = {call.path: least[call.block] for call in local.model.calls if not call.prologue}
        found: dict[str, tuple[float, float]] = {}
        for call in self.job.model.calls:
            of_call = of_path.get(call.path, (0.0, 0.0))
            found[call.block] = min(found.get(call.block, of_call), of_call)
        return found

    def _is_whole(self, candidate: MeshCandidate, size: int) -> bool:
        whole = size == candidate.microbatch_size and candidate.num_microbatches(self.job.global_batch) == 1
        return whole and self.locals.coupled

    def _wanted(self, candidate: MeshCandidate, size: int, whole: bool) -> Wanted:
        """Return two values: the cache key of the sharded graphs of one rank of ``candidate`` for microbatches of
        ``size`` samples, from which lower bounds on blocks (such as layers) are computed, and the number of
        microbatches of a rank. ``whole``: whether all samples of a rank are one microbatch. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage.
        """
        parts = self.job.global_batch // size
        dp = candidate.dp if whole or (parts % candidate.dp == 0 and parts > candidate.dp) else 1
        return self.locals.key(candidate, parts, whole or parts == 1), parts // dp

    def _check_experts(self, candidate: MeshCandidate) -> None:
        """Raise :class:`PlanError` if the model's graphs do not allow the candidate's distribution of experts over
        ranks. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        apart = candidate.ep == 1 and candidate.expert_tp != candidate.tp
        if self.job.num_experts and (apart or candidate.tp % candidate.expert_tp):
            expected = f"{candidate.tp}, as many as share all else" if apart else f"a divisor of tp={candidate.tp}"
            raise PlanError(
                f"etp={candidate.etp} with ep={candidate.ep}, tp={candidate.tp}: ranks over which an expert is "
                f"sharded would have different rows, which no collective gathers; expected {expected}"
            )
        if candidate.ep == 1:
            return
        key, local = self._find_local_model(candidate)
        if (candidate.ep, key) in self._spread:
            return
        whole = candidate.dp == 1 or self.job.constraints.group_size is not None
        if not whole and not can_spread_experts(self.job.model, self.job.batch_of(candidate.ep)):
            raise PlanError(
                f"ep={candidate.ep}: samples interact within the experts, and their rows cannot be assigned to "
                "samples; expected experts that work on each row separately, or on all rows; use ep=1"
            )
        left = self.job.experts - local.spread(candidate.tp, candidate.ep, candidate.etp).experts.keys()
        if left:
            raise PlanError(
                f"ep={candidate.ep} with tp={candidate.tp}: {min(left)} is not indexed by expert on each rank; use ep=1"
            )
        self._spread.add((candidate.ep, key))

    def _compute_state_costs(self, candidate: MeshCandidate, key: LocalKey, local: LocalModel) -> dict[str, StateCost]:
        """Return a dict from the name of each parameter and buffer to its cost on one rank of ``candidate``, which does
        not depend on the placement (assignment of ranks to devices). ``key``: the cache key of ``local``, the graphs of
        one rank. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        held = (
            candidate.dp > 1,
            candidate.kind,
            candidate.zero and (candidate.zero, candidate.sharers, candidate.expert_sharers),
            key,
        )
        if held not in self._held:
            job = self.job
            if key not in self._kinds:
                layouts = local.sharding.states
                self._kinds[key] = kinds_of(local.model.states, layouts, job.experts, local.complete, local.left_whole)
            self._held[held] = state_costs(
                self._kinds[key],
                candidate.grid,
                optimizer=job.optimizer,
                train=job.train,
                sharded=job.dressed(PlacedMesh(job.topology, candidate.grid), candidate).sharded,
                short_gradients=job.profile.short_gradients,
                offload=job.constraints.offload or (),
            )
        return self._held[held]

    @cached_property
    def locals(self) -> LocalModels:
        return LocalModels(self.job, self.placements)

    @cached_property
    def placements(self) -> Placements:
        return Placements(self.job.topology, self.job.precision, self.job.constraints.placement == "in_order")

    def _find_recomputed_nodes(self, block: Block, sent: Collection[fx.Node]) -> frozenset[fx.Node]:
        return find_recomputed_nodes(block, self.job.remade, sent)

    def _seat_costs(self, key: LocalKey, local: LocalModel) -> CallCostCache:
        """Return the cache from which costs of calls of ``local``, the graphs of one rank, are taken. Costs are stored
        for each kind of rank (device, speed and groups). ``key``: the cache key of ``local``; equal keys share one
        cache."""
        if key not in self._costs:
            job = self.job
            self._costs[key] = CallCostCache(
                local.model.blocks, job.topology, job.train, self._find_recomputed_nodes, self._works
            )
        return self._costs[key]
