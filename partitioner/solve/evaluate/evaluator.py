"""Solve one candidate of the search: its sharding, its stages, and the estimate of its step time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

from partitioner.candidate import MeshCandidate
from partitioner.cost.call.states import StateCost
from partitioner.cost.step.estimate import with_step_time
from partitioner.cost.step.offload import check_disks, check_hosts
from partitioner.cost.step.placed_mesh import PlacedMesh, RankProfile
from partitioner.cost.step.rank_costs import CallCostCache, Costs
from partitioner.emit.buckets import AT_ONCE, ReductionScheme
from partitioner.errors import CapacityError, PlanError
from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.hashing import SameObject
from partitioner.passes.ir.model import FoldedModel
from partitioner.plan import Estimate
from partitioner.runtime.program.program import Offload
from partitioner.schedules.formulas import is_formula, is_plain
from partitioner.solve.bounds.zero_and_reduction import BlockLowerBound
from partitioner.solve.evaluate.evaluate_placement import PlacementEvaluator, PlacementResult, ShareRecord
from partitioner.solve.evaluate.job import Job
from partitioner.solve.evaluate.local_model_cache import LocalCosts, LocalModels
from partitioner.solve.evaluate.prefetch import LocalKey, Solutions, Wanted
from partitioner.solve.placement.placement import EXCHANGES, BestPlacement, Placements
from partitioner.solve.sharding.expert_parallel import can_spread_experts
from partitioner.solve.sharding.local_model import LocalModel
from partitioner.solve.sharding.sharding import ShardingSolution
from partitioner.solve.stages.split import StageSplit
from partitioner.topology.groups import stage_ranks

# sizes of pp, dp, cp, tp and 1; ep, etp, ZeRO stage, dp_shard, samples, and whether these are all samples of a rank
FloorKey = tuple[int, int, int, int, int, int, int, int, int, int, bool]

_CLOSE = 0.005  # relative difference of a bound from the best step time that is small enough
_EXCHANGES_FOLLOWED = 8  # placements that are evaluated during exchanges under simulated schedules, at most


@dataclass(frozen=True)
class SolvedCandidate:
    """The best plan of ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage) before its program is
    emitted.

    ``num_microbatches``: number of microbatches of a rank; if ranks of ``dp`` have different numbers, the greatest.
    ``local``: the graphs of one rank. ``batch``: the layouts that split the batch into microbatches and data-parallel
    parts. ``stages``: the cut into stages. ``estimate``: time and memory of a step. ``context_model``: the model before
    its sequence is sharded over ``cp``; ``None`` if ``cp`` is 1. ``stage_of_call``: the stage index of each call of
    ``local.model``. ``devices``: the device index of each rank. ``recompute``: indices of the block calls (such as
    layers) that are recomputed in full. ``selective``: indices of the block calls with selective recomputation.
    ``offload``: the kinds of data kept in host memory. ``reducing``: how gradients are reduced: by one collective or
    hierarchically, compressed or not. ``data_shares``: the number of microbatches of each rank of ``dp``; empty if all
    ranks have equally many. ``lower_bound_s``: every plan of the candidate takes at least this many seconds, or at
    least the cutoff of the search if that is smaller."""

    candidate: MeshCandidate
    num_microbatches: int
    local: LocalModel
    batch: ShardingSolution
    stages: StageSplit
    estimate: Estimate
    stage_of_call: tuple[int, ...]
    recompute: tuple[int, ...]
    devices: tuple[int, ...]  # by rank
    selective: tuple[int, ...] = ()  # calls that are recomputed selectively
    offload: tuple[Offload, ...] = ()  # data kept in host memory
    context_model: FoldedModel | None = None  # one microbatch, before its sequence is shared over cp
    reducing: ReductionScheme = AT_ONCE  # how gradients are reduced
    data_shares: tuple[int, ...] = ()  # the microbatches of each rank of dp; empty: all ranks have equally many
    lower_bound_s: float = 0.0


_GRAPHS = {"local", "batch", "context_model"}  # fields that are derived from the shardings


@dataclass(frozen=True)
class PackedCandidate:
    """A solved candidate without its graphs, in a form that is quick to pickle. ``values``: name of a field of
    :class:`SolvedCandidate` -> value, for all fields except graphs. ``shardings``: the shardings over ``cp`` (``None``
    if ``cp`` is 1) and over ``tp``, from which the graphs of a rank are derived."""

    values: dict[str, Any]
    shardings: Solutions


# the constraints on which placements, shardings and costs of calls depend
_OF_SHARDINGS = "context", "group_size", "placement", "recompute", "sequence_parallel"
# fields of a job on which placements, shardings and costs of calls do not depend
_APART = {"constraints", "reserve", "reserves", "refused", "unfollowed", "simulated"}


def _have_equal_shardings(job: Job, other: Job) -> bool:
    """Return whether the planning problems ``job`` and ``other`` have equal placements, shardings and costs of calls,
    so that results for one of them are valid for the other."""
    names = [each.name for each in fields(Job) if each.name not in _APART]
    same = all(getattr(job, name) is getattr(other, name) for name in names)  # a changed copy shares the other fields
    return same and all(getattr(job.constraints, name) == getattr(other.constraints, name) for name in _OF_SHARDINGS)


def _check_refused(job: Job, candidate: MeshCandidate) -> None:
    """Raise the error that ``job`` (the planning problem) has recorded for ``candidate``, if any. ``job.refused`` has
    the errors of candidates whose programs do not fit in memory. ``job.unfollowed`` has the errors of candidates in
    whose layout a further program of the plan, such as an evaluation, cannot run. ``candidate``: mesh sizes, microbatch
    size, schedule and ZeRO stage."""
    unfollowed = job.unfollowed.get(candidate) or job.unfollowed.get(candidate.axes)
    error = job.refused.get(candidate) or unfollowed
    if error is not None:
        raise error.with_traceback(None)


@dataclass
class CandidateEvaluator:
    """Finds the best plan of single candidates (combinations of mesh sizes, microbatch size, schedule and ZeRO stage)
    of ``job`` (the model, batch, cluster and constraints). Results that candidates share, such as shardings, are
    computed once and cached. ``host_lacks``: whether a host's memory was too small for the data that some candidate
    offloads. ``costs``: cache of the costs of shardings. ``floors``: cache of lower bounds on the seconds of blocks
    (such as layers). Evaluators of similar jobs share ``costs`` and ``floors``."""

    job: Job
    host_lacks: bool = False  # whether a host's memory was too small for what a candidate offloads
    costs: LocalCosts = field(default_factory=LocalCosts)
    floors: dict[FloorKey, BlockLowerBound | None] = field(default_factory=dict)
    _spread: set[tuple[int, LocalKey]] = field(default_factory=set)
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
        """Return the best plan of ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage). ``devices``:
        the device index of each rank; ``None``: the best placement (assignment of ranks to devices) is searched.

        ``proven``: whether to compute a tight lower bound on the cut into stages too. For schedules that are simulated,
        because their step time has no formula, this doubles the time. ``improved``: whether, for simulated schedules,
        to search also for cuts with less idle time in the pipeline. ``cutoff_s``: plans that take at least this many
        seconds per step are of no interest, and bounds need not be tighter.

        Raises :class:`PlanError` (:class:`CapacityError` if memory does not suffice) or
        :class:`partitioner.passes.errors.UnsupportedError` if there is no plan."""
        job = self.job
        _check_refused(job, candidate)
        placement_evaluator = replace(self.build_placement_evaluator(candidate, proven, cutoff_s), improved=improved)
        local = placement_evaluator.local
        if devices is None:
            exchanges = EXCHANGES if is_formula(candidate.schedule, candidate.pp, job.train) else _EXCHANGES_FOLLOWED
            likely = (
                None if is_plain(candidate.schedule, candidate.virtual_stages) else self._estimate_by_1f1b(candidate)
            )
            found = self.placements.best(
                candidate.grid, placement_evaluator, placement_evaluator.expected, cutoff_s, exchanges, likely
            )
            if likely is not None:
                found = self._evaluate_other_placements(candidate, placement_evaluator, found, cutoff_s)
        else:
            machine = self.placements.at(candidate.grid, devices)
            found = BestPlacement(machine, *placement_evaluator(machine))
        problem, split, expected, shares, reducing = found.result
        if candidate in job.simulated:
            expected = with_step_time(expected, max(expected.step_time, job.simulated[candidate]))
        stage_of_call = [0] * len(local.model.calls)
        recompute: list[int] = []
        selective: list[int] = []
        for stage, plan in enumerate(split.virtual or split.stages):
            for place, call in enumerate(problem.calls[plan.start : plan.stop], plan.start):
                stage_of_call[call.index] = stage
                recompute += [call.index] if place < plan.start + plan.recompute else []
                selective += [call.index] if plan.is_selective(place) and call.cost.selective_bytes else []
        return SolvedCandidate(
            candidate,
            problem.num_microbatches,
            local,
            self._select_batch_sharding(candidate),
            split,
            expected,
            tuple(stage_of_call),
            tuple(recompute),
            found.machine.device_of_rank,
            tuple(selective),
            job.constraints.offload or (),
            self._find_context_model(candidate),
            reducing,
            shares,
            min(expected.step_time, *placement_evaluator.lower_bounds),
        )

    def _evaluate_other_placements(
        self,
        candidate: MeshCandidate,
        evaluator: PlacementEvaluator,
        found: BestPlacement[PlacementResult],
        cutoff_s: float,
    ) -> BestPlacement[PlacementResult]:
        """Examine the placements (assignments of ranks to devices) that ``evaluator`` has not evaluated. Return the
        best plan of all: ``found``, the best one so far, or the plan of another placement. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage.

        A placement is evaluated if ``evaluator`` computes tight bounds, ``found`` takes at most ``cutoff_s`` seconds,
        and a quick lower bound of the placement is clearly below the best step time. The quick bound ignores how much
        has to be recomputed. For each placement that may have a plan, a lower bound is appended to
        ``evaluator.lower_bounds``: a tight one if the placement is evaluated, otherwise the quick one."""
        is_best = evaluator.proven and found.cost <= cutoff_s
        others = [m for m in self.placements.candidates(candidate.grid) if SameObject(m) not in evaluator.asked]
        for least_s, machine in sorted(((evaluator.least(m), m) for m in others), key=lambda pair: pair[0]):
            if not is_best or least_s >= min(found.cost, evaluator.cutoff_s) * (1 - _CLOSE):
                evaluator.lower_bounds.append(least_s)
                continue
            try:
                seconds, result = evaluator(machine)  # appends its bound
            except PlanError:
                continue
            if seconds < found.cost:
                found = BestPlacement(machine, seconds, result)
        return found

    def pack(self, solved: SolvedCandidate) -> PackedCandidate:
        """Return ``solved`` without its graphs, in the form in which a forked process sends it to its parent."""
        values = {each.name: getattr(solved, each.name) for each in fields(solved) if each.name not in _GRAPHS}
        return PackedCandidate(values, (solved.local.context, solved.local.sharding))

    def unpack(self, packed: PackedCandidate) -> SolvedCandidate:
        """Return the solved candidate that a fork of this process has packed with :meth:`pack`; its graphs are derived
        again from the shardings."""
        candidate: MeshCandidate = packed.values["candidate"]
        key, num_microbatches = self._find_local_key(candidate)
        self.locals.ahead.remember(key, packed.shardings)
        local = self.locals.at(key, num_microbatches)
        batch, context_model = self._select_batch_sharding(candidate), self._find_context_model(candidate)
        return SolvedCandidate(**packed.values, local=local, batch=batch, context_model=context_model)

    def for_job(self, job: Job) -> CandidateEvaluator:
        """Return an evaluator for ``job``. If the placements, shardings and costs of both jobs are equal, the new
        evaluator shares them with this one. They are equal if the jobs differ only in the data kept in host memory, in
        reserved memory, in the errors and simulated times of single candidates, and in constraints on which no sharding
        depends."""
        if not _have_equal_shardings(self.job, job):
            return CandidateEvaluator(job)
        other = CandidateEvaluator(job, costs=self.costs, floors=self.floors, _spread=self._spread)
        vars(other).update(locals=self.locals, placements=self.placements)  # the cached properties
        return other

    @property
    def without_share_history(self) -> CandidateEvaluator:
        """Return a copy of this evaluator that has forgotten which divisions of the batch among the ranks of ``dp``
        were slow on earlier placements (assignments of ranks to devices). The results of the copy do not depend on
        earlier evaluations."""
        return replace(self, _records=defaultdict(ShareRecord))

    def _estimate_by_1f1b(self, candidate: MeshCandidate) -> Callable[[PlacedMesh], float]:
        """Return a function that estimates how good a placement is (a topology with the mesh of ``candidate`` laid over
        it). The function returns the seconds of a step on the placement under the 1F1B schedule, which is quick to
        compute, or infinity if the candidate does not fit in memory. ``candidate``: mesh sizes, microbatch size,
        schedule and ZeRO stage.

        The estimate serves only to compare placements. It is not the step time of the candidate, under whose own
        schedule gradient reductions start earlier."""
        placement_evaluator = self.build_placement_evaluator(
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
        divisions of the batch among the ranks of ``dp``. The plan that it returns is then optimal. ``candidate``: mesh
        sizes, microbatch size, schedule and ZeRO stage."""
        if not self.placements.complete(candidate.grid):
            return False
        independent = candidate.replicas_run_independently(self.job.model.updates)
        return self.placements.nested(candidate.grid) or not independent  # nested replicas are equal

    def build_placement_evaluator(
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

    def own(self, candidate: MeshCandidate) -> tuple[LocalModel, CallCostCache, dict[str, StateCost]]:
        """Return three values for the sharding with the least cost for ``candidate`` itself: the graphs of one rank, a
        cache of the costs of their block calls (such as layers) by device, and the costs of a rank's parameters and
        buffers by name. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        key, num_microbatches = self._find_local_key(candidate)
        local, costs = self.find_local_costs(key, num_microbatches)
        return local, costs, self.costs.compute_state_costs(self.job, candidate, key, local)

    def find_local_costs(self, key: LocalKey, num_microbatches: int) -> tuple[LocalModel, CallCostCache]:
        """Return two values: the graphs of one rank with the cache key ``key``, and a cache of the costs of their block
        calls (such as layers) by device. ``num_microbatches``: the number of microbatches of a rank. Raises
        :class:`PlanError` or :class:`partitioner.passes.errors.UnsupportedError` if the model cannot be sharded in this
        way."""
        local = self.locals.at(key, num_microbatches)
        return local, self.costs.cache_call_costs(self.job, key, local)

    def list_stage_costs(self, candidate: MeshCandidate, costs: CallCostCache) -> list[Costs]:
        """Return the distinct call costs that the stages of ``candidate`` have under its possible placements
        (assignments of ranks to devices), as a list of dicts: name of a block, such as a layer -> cost of one call. If
        not all possible placements are known, the list instead has one dict for each device type, with the best groups
        that any placement could have, so that lower bounds stay valid. ``costs``: the cache from which call costs are
        taken. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        if not self.placements.complete(candidate.grid):
            return self.list_best_rank_costs(candidate, costs)
        machines = [self.job.dressed(machine, candidate) for machine in self.placements.candidates(candidate.grid)]
        each = costs.by_pipeline if candidate.replicas_run_independently(self.job.model.updates) else costs.by_stage
        return list({id(of): of for machine in machines for of in each(machine)}.values())

    def list_best_rank_costs(self, candidate: MeshCandidate, costs: CallCostCache) -> list[Costs]:
        """Return lower bounds on the costs of calls on each device type, as a list with one dict for each type: block
        name -> cost of a call of the block (such as a layer). The communication groups of the rank are the fastest that
        any placement (assignment of ranks to devices) could have. ``costs``: the cache from which call costs are taken.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        one_each = candidate.parts(self.job.global_batch) == candidate.dp
        all_wait = candidate.pp == 1 and (one_each or not candidate.replicas_run_independently(self.job.model.updates))
        best = partial(self.placements.best_group, everywhere=all_wait)
        machine = self.job.dressed(PlacedMesh(self.job.topology, candidate.grid), candidate)
        sizes = {
            axis: size for axis, size in {**candidate.grid, "ep": candidate.ep}.items() if axis != "pp" and size > 1
        }
        groups, spread = tuple((axis, best(size)) for axis, size in sizes.items()), machine.spread
        names = "experts", "sharers", "shards", "expert_shards"
        over: dict[str, Any] = {name: best(getattr(spread, name).size) for name in names}
        return [costs.at(RankProfile(*pace, groups), replace(spread, **over)) for pace in self.job.topology.paces[0]]

    def _find_local_key(self, candidate: MeshCandidate) -> Wanted:
        """Return two values: the cache key of the sharded graphs that one rank of ``candidate`` runs for one
        microbatch, and the number of microbatches of the rank. ``candidate``: mesh sizes, microbatch size, schedule and
        ZeRO stage."""
        num_microbatches = candidate.num_microbatches(self.job.global_batch)
        key = self.locals.key(candidate, candidate.parts(self.job.global_batch), num_microbatches == 1)
        return key, num_microbatches

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

    def _select_batch_sharding(self, candidate: MeshCandidate) -> ShardingSolution:
        """Return the layouts that split the batch of ``candidate`` into microbatches and data-parallel parts."""
        return self.job.batch if candidate.ep == 1 else self.job.expert_batch

    def _find_context_model(self, candidate: MeshCandidate) -> FoldedModel | None:
        """Return the model of ``candidate`` for one microbatch, before the sequence is sharded over ``cp``; ``None`` if
        ``cp`` is 1. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        if candidate.cp == 1:
            return None
        num_microbatches = candidate.num_microbatches(self.job.global_batch)
        return self.locals.split(candidate, candidate.parts(self.job.global_batch), num_microbatches == 1)

    def _check_experts(self, candidate: MeshCandidate) -> None:
        """Raise :class:`PlanError` if the model's graphs do not allow the candidate's distribution of experts over
        ranks. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        apart = candidate.ep == 1 and candidate.expert_tp != candidate.tp
        if self.job.experts and (apart or candidate.tp % candidate.expert_tp):
            expected = f"etp={candidate.tp}, the size of tp" if apart else f"a divisor of tp={candidate.tp}"
            raise PlanError(
                f"etp={candidate.etp} with ep={candidate.ep}, tp={candidate.tp}: the ranks over which an "
                "expert is sharded would have different tokens, and no collective gathers these; expected "
                f"{expected}"
            )
        if candidate.ep == 1:
            return
        key, num_microbatches = self._find_local_key(candidate)
        local = self.locals.at(key, num_microbatches)
        if (candidate.ep, key) in self._spread:
            return
        whole = candidate.dp == 1 or self.job.constraints.group_size is not None
        if not whole and not can_spread_experts(self.job.model, self.job.expert_batch):
            raise PlanError(
                f"ep={candidate.ep}: samples interact within the experts, and the tokens there cannot be "
                "traced back to samples; expected experts that work on each token separately, or on all "
                "tokens; use ep=1"
            )
        left = self.job.experts.keys() - local.spread(candidate.tp, candidate.ep, candidate.etp).experts.keys()
        if left:
            raise PlanError(
                f"ep={candidate.ep} with tp={candidate.tp}: {min(left)} has no dim of experts that can be "
                "distributed over the ranks; use ep=1"
            )
        self._spread.add((candidate.ep, key))

    @cached_property
    def locals(self) -> LocalModels:
        return LocalModels(self.job, self.placements)

    @cached_property
    def placements(self) -> Placements:
        return Placements(self.job.topology, self.job.precision, self.job.constraints.placement == "in_order")
