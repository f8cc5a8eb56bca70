"""Find the best plan on one placement: cut the calls into stages, divide the batch among pipelines, and price the
step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from partitioner.candidate import MeshCandidate
from partitioner.cost.call.states import StateCost, with_lost
from partitioner.cost.step.estimate import estimate_step, how_reduced, stage_problem
from partitioner.cost.step.gradient_reduction import lost_by
from partitioner.cost.step.pipeline_tail import (
    bound_reduction_delays,
    bound_stage_ends,
    is_priced_by_rank_ends,
    least_update,
    run_tails,
)
from partitioner.cost.step.placed_mesh import PlacedMesh, RankProfile
from partitioner.cost.step.rank_costs import CallCostCache, Costs
from partitioner.emit.buckets import ReductionScheme
from partitioner.errors import CapacityError, PlanError
from partitioner.passes.ir.hashing import SameObject
from partitioner.plan import Estimate
from partitioner.schedules.formulas import is_formula, is_plain
from partitioner.schedules.registry import ranks_of
from partitioner.solve.evaluate.batch_shares import BatchSharing, Shares
from partitioner.solve.evaluate.job import Job
from partitioner.solve.sharding.local_model import LocalModel
from partitioner.solve.stages.lower_bound import least_time
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.split import StageSplit, solve_stages
from partitioner.solve.stages.split_for_step import cut_for_step
from partitioner.solve.stages.tables import Table
from partitioner.solve.stages.virtual_stages import set_scheduled_in_flight, solve_virtual

_CLOSE = 1e-4  # relative gap of a cut at which no tighter bound is computed
_SHARES = 6  # maximum number of divisions of the batch that are tried on one placement

_GAINED = 0.1  # assumed greatest gain of shares that are fitted to the stages: 6 % have been measured
_POOR, _SEEN = 1.03, 2  # shares are poor if slower than the best by this factor on this number of placements


class PlacementResult(NamedTuple):
    """The best plan on one placement (an assignment of ranks to devices). ``problem``: the problem of cutting block
    calls (such as layers) into pipeline stages, with the costs of the calls. ``split``: its solution, the calls of each
    stage. ``estimate``: the estimated time and memory of a step. ``data_shares``: the number of microbatches of each
    rank of ``dp``; empty if all ranks have equally many. ``reducing``: the fastest scheme of gradient reductions.
    """

    problem: StageProblem
    split: StageSplit
    estimate: Estimate
    data_shares: Shares
    reducing: ReductionScheme

    @property
    def calls(self) -> list[list[int]]:
        """Return, for each pipeline stage, the indices of its block calls (such as layers) in the model of one rank."""
        parts = ([(part.start, part.stop) for part in stage.parts or (stage,)] for stage in self.split.stages)
        return [[call.index for pair in pairs for call in self.problem.calls[slice(*pair)]] for pairs in parts]


def virtual_ranks(candidate: MeshCandidate, train: bool) -> tuple[int, ...]:
    """Return the pipeline rank of each virtual stage of ``candidate``, if its schedule is simulated action by action
    (an action is a forward or backward of one microbatch on one virtual stage). Return an empty tuple for a schedule
    whose step time is a closed formula. ``train``: whether there are backwards. ``candidate``: mesh sizes, microbatch
    size, schedule and ZeRO stage.
    """
    if is_formula(candidate.schedule, candidate.pp, train):
        return ()
    return ranks_of(candidate.schedule, candidate.pp, candidate.virtual_stages)


def split_of(
    problem: StageProblem,
    candidate: MeshCandidate,
    *,
    proven: bool = True,
    improved: bool = True,
    cutoff_s: float = math.inf,
) -> StageSplit:
    """Return the best cut of the block calls (such as layers) of ``problem`` into stages under the candidate's
    schedule.

    ``proven``: whether to compute a tight lower bound too. ``improved``: whether to search also for cuts with less idle
    time in the pipeline. Both matter only for schedules without a formula for the step time, which are simulated.
    ``cutoff_s``: cuts that take at least this many seconds are of no interest. ``candidate``: mesh sizes, microbatch
    size, schedule and ZeRO stage. Raises :class:`CapacityError` if no cut fits in memory, and :class:`PlanError` if
    there is none for another reason.
    """
    if is_formula(candidate.schedule, candidate.pp, problem.train):
        return solve_stages(problem)
    schedule = candidate.schedule, candidate.pp, candidate.virtual_stages
    return solve_virtual(problem, *schedule, proven=proven, improved=improved, cutoff_s=cutoff_s)


@dataclass
class ShareRecord:
    """Records which divisions of the batch among the ranks of ``dp`` were fast on the placements (assignments of ranks
    to devices) of one mesh, so that slow divisions need not be evaluated on further placements. A division is a tuple
    with the number of microbatches of each rank; divisions that are equal after sorting are treated as equal."""

    _ratios: dict[Shares, list[float]] = field(default_factory=lambda: defaultdict(list))

    def tell(self, steps: Mapping[Shares, float]) -> None:
        """Record how fast several divisions of the batch were on one placement (assignment of ranks to devices), so
        that slow divisions can be recognised later. ``steps``: the number of microbatches of each rank of ``dp`` ->
        seconds of a step with this division of the batch, for each division that was tried."""
        best = min(steps.values(), default=math.inf)
        for kind, step in {tuple(sorted(shares)): step for shares, step in steps.items()}.items():
            self._ratios[kind].append(step / best)

    def is_poor(self, shares: Shares) -> bool:
        """Return whether the division of the batch ``shares`` (number of microbatches of each rank of ``dp``) need not
        be tried again, because it was tried on at least two placements (assignments of ranks to devices) and was over
        3 % slower than the best division on each of them."""
        found = self._ratios.get(tuple(sorted(shares)), [])
        return len(found) >= _SEEN and min(found) > _POOR


@dataclass
class PlacementEvaluator:
    """Finds the best plan of ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage) on a placement, which
    is an assignment of ranks to devices, and the step time of this plan.

    - ``job``: the model, batch, cluster and constraints. ``local``: the graphs of one rank. ``costs``: the costs of
      their block calls (such as layers) by device. ``states``: the costs of the rank's parameters and buffers, by name.
    - ``reference``: the profile of a rank (device, speed and groups) that the sharding was optimized for.
    - ``check``: function of an estimate and a placement, which raises :class:`CapacityError` if hosts lack memory for
      offloaded data.
    - ``proven``: whether to compute tight lower bounds too. ``improved``: whether to search also for cuts with less
      idle time in the pipeline. ``cutoff_s``: plans that take at least this many seconds per step are of no interest;
      each plan that is found lowers it.
    - ``record``: which divisions of the batch were fast on other placements; candidates that differ only in ZeRO share
      one record.
    - ``lower_bounds``: for each evaluated placement that has a plan, a lower bound in seconds on the step of all plans
      on it. ``asked``: the placements that were evaluated so far, by identity.
    """

    job: Job
    candidate: MeshCandidate
    local: LocalModel
    costs: CallCostCache
    states: Mapping[str, StateCost]
    reference: RankProfile
    check: Callable[[Estimate, PlacedMesh], None]
    proven: bool = True
    cutoff_s: float = math.inf
    record: ShareRecord = field(default_factory=ShareRecord)
    improved: bool = True
    lower_bounds: list[float] = field(default_factory=list)
    asked: set[SameObject[PlacedMesh]] = field(default_factory=set)
    _dressed: dict[SameObject[PlacedMesh], PlacedMesh] = field(default_factory=dict)
    _known_bounds: dict[Hashable, float] = field(default_factory=dict)

    @cached_property
    def _batch_sharing(self) -> BatchSharing:
        job, independent = self.job, self.candidate.replicas_run_independently(self.job.model.updates)
        step = job.global_batch, job.constraints, job.train
        return BatchSharing(self.candidate, self.local, self.costs, *step, independent)

    def __call__(self, machine: PlacedMesh) -> tuple[float, PlacementResult]:
        """Return the step time in seconds of the best plan on ``machine``, a placement (assignment of the mesh's ranks
        to devices), and that plan. Raises :class:`PlanError` if there is none."""
        self.asked.add(SameObject(machine))
        machine = self.dressed(machine)
        step, best, least = math.inf, None, math.inf
        errors: list[PlanError] = []
        asked = self._order_divisions_by_lower_bound(machine)
        tried = {shares for _, shares in asked}
        steps: dict[Shares, float] = {}
        asked.sort(key=lambda pair: self.record.is_poor(pair[1]))  # poor ones last
        while asked:
            floor, shares = asked.pop(0)
            if best is not None and (floor >= min(step, self.cutoff_s) or self.record.is_poor(shares)):
                least = min(least, floor)
                continue
            try:
                told, judged, least_told = self._evaluate_with_shares(machine, shares)
            except PlanError as error:
                errors.append(error)
                continue
            least = min(least, least_told)
            steps[shares] = told
            if told < step:
                step, best = told, judged
            if asked or best is None or not 1 < len(tried) < _SHARES:
                continue
            if (other := self._batch_sharing.of_stages(best.calls, machine)) not in tried:
                floor = self._least_of(machine, other, 0.0) if self._has_floor else 0.0
                asked, tried = [(floor, other)], tried | {other}
        if best is None:
            raise errors[0]
        self.record.tell(steps)
        self.cutoff_s = min(self.cutoff_s, step)
        self.lower_bounds.append(
            min(least, self._batch_sharing.least(machine)) if self._batch_sharing.is_free(machine) else least
        )
        return step, best

    def _order_divisions_by_lower_bound(self, machine: PlacedMesh) -> list[tuple[float, Shares]]:
        """Return the divisions of the batch to try first on the placement ``machine`` (a topology with the mesh laid
        over it), the most promising first. Each is a pair: a quick lower bound on the step in seconds, and the number
        of microbatches of each rank of ``dp``. The bound is 0 if there is only one division, or if no quick bound is
        known."""
        shares = self._batch_sharing.first(machine)
        if len(shares) == 1 or not self._has_floor:
            return [(0.0, each) for each in shares]
        return sorted((self._least_of(machine, each, 0.0), each) for each in shares)

    @property
    def _has_floor(self) -> bool:
        """Return whether the step time of the candidate has a quick lower bound: the schedule is simulated forward by
        forward and backward by backward (not computed with a formula), and each pipeline rank has one stage."""
        candidate = self.candidate
        simulated = not is_formula(candidate.schedule, candidate.pp, self.job.train)
        return simulated and is_plain(candidate.schedule, candidate.virtual_stages)

    def bound_plans(self, machine: PlacedMesh) -> float:
        """Return a lower bound in seconds on the step of all plans on ``machine`` (a placement of the mesh). If a bound
        on the cuts into stages already reaches the cutoff, no plan is priced. Raises :class:`PlanError` if there is no
        plan."""
        dressed = self.dressed(machine)
        divisions = self._batch_sharing.first(dressed)
        if len(divisions) > 1 or self._batch_sharing.is_free(dressed):
            self(machine)
            return self.lower_bounds[-1]
        step, _, least = self._evaluate_with_shares(dressed, divisions[0], bound_only=True)
        self.cutoff_s = min(self.cutoff_s, step)
        return least

    def price_stages(self, machine: PlacedMesh) -> tuple[StageProblem, float]:
        """Return two values for ``machine``, a placement on which all replicas have equal devices and groups: the
        problem of cutting block calls (such as layers) into stages, and a lower bound in seconds on the optimizer's
        update."""
        machine, ranks = self.dressed(machine), virtual_ranks(self.candidate, self.job.train)
        problem, held, _ = self._build_stage_problem(machine, (), self.costs.by_stage(machine))
        if is_plain(self.candidate.schedule, self.candidate.virtual_stages):
            problem = self._set_microbatches_in_flight(problem)
        else:
            problem = replace(problem, ends=bound_stage_ends(problem, held, machine, self.job.constraints, ranks))
        return problem, least_update(problem, held, machine)

    def bound_delays(self, machine: PlacedMesh) -> Sequence[Table]:
        """Return, for each stage on the placement ``machine``, a table of lower bounds on the seconds from the stage's
        last backward to the end of its gradient reductions. Entry ``[start, stop]`` of a table is for a stage that
        consists of the block calls ``start:stop`` (such as layers). The result is empty if the reductions do not
        overlap with computation. The bounds also hold with fewer microbatches: less is then recomputed, so backwards
        are shorter and hide less."""
        machine = self.dressed(machine)
        problem, held, _ = self._build_stage_problem(machine, (), self.costs.by_stage(machine))
        if not is_priced_by_rank_ends(problem, machine):
            return ()
        flying = self._set_microbatches_in_flight(problem)
        return [delay.whole for delay in bound_reduction_delays(flying, held, machine, self.job.constraints)]

    def _evaluate_with_shares(
        self, machine: PlacedMesh, shares: Shares, *, bound_only: bool = False
    ) -> tuple[float, PlacementResult | None, float]:
        """Find the best plan on the placement ``machine`` (a topology with the mesh laid over it) in which the ranks of
        ``dp`` have the numbers of microbatches ``shares``. Return three values: its step time in seconds, the plan, and
        a lower bound in seconds on the step of all such plans. ``bound_only``: whether to return infinity, ``None`` and
        the bound if the bound is found to reach the cutoff before a plan is priced."""
        job, candidate = self.job, self.candidate
        costs = self._batch_sharing.by_stage(machine, shares)
        problem, held, shares = self._build_stage_problem(machine, shares, costs)
        ranks = virtual_ranks(candidate, job.train)
        problem = replace(problem, ends=bound_stage_ends(problem, held, machine, job.constraints, ranks))
        order = candidate.schedule, candidate.virtual_stages if ranks else None

        def price(split: StageSplit) -> tuple[float, tuple[Estimate, ReductionScheme]]:
            reduced_s, reducing = how_reduced(problem, split, held, machine, job.constraints, *order)
            expected = estimate_step(problem, split, held, machine, job.flops, reduced_s, *order)
            if job.constraints.offload:
                self.check(expected, machine)
            return expected.step_time, (expected, reducing)

        behind = least_update(problem, held, machine)
        cutoff_s = self.cutoff_s - behind
        solve = partial(split_of, candidate=candidate, proven=self.proven, improved=self.improved, cutoff_s=cutoff_s)
        first = solve(problem)
        if bound_only and first.lower_bound_s + behind >= self.cutoff_s:
            return math.inf, None, first.lower_bound_s + behind
        cut = cut_for_step(
            problem,
            solve,
            price,
            behind,
            lambda within_s: run_tails(
                self._set_microbatches_in_flight(problem), held, machine, job.constraints, ranks, within_s
            ),
            self.cutoff_s if self.proven else 0.0,
            first,
        )
        least_s, limit_s = cut.lower_bound_s, min(cut.step_s, self.cutoff_s)
        plain = self._has_floor and is_priced_by_rank_ends(problem, machine)
        if self.proven and plain and least_s < limit_s * (1 - _CLOSE):
            flying = self._set_microbatches_in_flight(problem)
            delays = bound_reduction_delays(flying, held, machine, job.constraints)
            found = least_time(flying, limit_s - behind, delays=delays)
            pipeline_s = found.pipeline_s(candidate.schedule, candidate.pp, problem.num_microbatches)
            least_s = max(least_s, min(limit_s, pipeline_s + behind))
        expected, reducing = cut.priced
        return cut.step_s, PlacementResult(problem, cut.split, expected, shares, reducing), least_s

    def _build_stage_problem(
        self, machine: PlacedMesh, shares: Shares, costs_by_stage: Sequence[Costs]
    ) -> tuple[StageProblem, Mapping[str, StateCost], Shares]:
        """Return three values for the placement ``machine`` (a topology with the mesh laid over it): the problem of
        cutting block calls (such as layers) into pipeline stages, without the collectives at the ends of a step; name
        of a parameter or buffer -> its cost; and the number of microbatches of each rank of ``dp`` (empty if all have
        equally many). ``shares``: the requested number of microbatches of each rank of ``dp``. ``costs_by_stage``: for
        each stage, block name -> cost of a call with this division of the batch."""
        job, candidate = self.job, self.candidate
        held = with_lost(self.states, lost_by(machine, job.constraints))
        shares = () if len(set(shares)) == 1 else shares
        problem = stage_problem(
            self.local.model,
            self.costs.at(self.reference, machine.spread),
            held,
            machine,
            num_microbatches=max(
                shares, default=candidate.num_microbatches(job.global_batch)
            ),  # of the rank with the most
            microbatch_size=candidate.microbatch_size,
            schedule=candidate.schedule,
            ranks=virtual_ranks(candidate, job.train),
            constraints=job.constraints,
            profile=job.profile,
            train=job.train,
            costs_by_stage=costs_by_stage,
            scattering=machine.scattering(candidate.num_microbatches(job.global_batch)),
        )
        if job.layout is not None:
            pinned = job.layout.pinned_calls(problem.calls)
            empty = bool(pinned) and len({*pinned.values()}) < problem.num_stages
            problem = replace(problem, pinned=pinned, may_be_empty=empty)
        return problem, held, shares

    def least(self, machine: PlacedMesh, cutoff_s: float = 0.0) -> float:
        """Return a lower bound in seconds on the step of every plan on the placement ``machine`` (a topology with the
        mesh laid over it); infinite if no cut into stages fits in memory. ``cutoff_s``: a bound of this many seconds is
        tight enough. If a simple bound is below ``cutoff_s``, and a tighter one is quick to compute, the tighter one is
        returned."""
        dressed = self.dressed(machine)
        return (
            self._batch_sharing.least(dressed)
            if self._batch_sharing.is_free(dressed)
            else self.expected(machine, cutoff_s)
        )

    def expected(self, machine: PlacedMesh, cutoff_s: float = 0.0) -> float:
        """Return a probable lower bound in seconds on the step of the plans on the placement ``machine`` (a topology
        with the mesh laid over it). It is not proven, because it assumes that no division of the batch among the ranks
        of ``dp`` is much faster than the divisions that are tried first. It is at least as high as the proven bound of
        this placement. ``cutoff_s``: a bound of this many seconds is tight enough. If one of the divisions has a bound
        below ``cutoff_s``, the other divisions are not examined, and the result may be looser."""
        machine = self.dressed(machine)
        quick = self._batch_sharing.least(machine)
        if quick >= cutoff_s or not self._has_floor:
            return quick
        left = 1 - _GAINED if self._batch_sharing.is_free(machine) else 1.0
        first, divisions = math.inf, self._batch_sharing.first(machine)
        for number, shares in enumerate(divisions, 1):
            first = min(first, self._least_of(machine, shares, cutoff_s / left))
            if first * left < cutoff_s and number < len(divisions):
                return quick
        return max(quick, first * left)

    def _least_of(self, machine: PlacedMesh, shares: Shares, cutoff_s: float) -> float:
        """Return a lower bound in seconds on a step if the ranks of ``dp`` have the numbers of microbatches ``shares``;
        infinite if no cut into stages fits in memory. It is used for schedules without a formula for their step time.
        ``machine``: the placement, a topology with the mesh laid over it. ``cutoff_s``: a bound of this many seconds is
        tight enough. Placements whose stages have equal costs, memory and links share one bound."""
        costs, fixed = self._batch_sharing.by_stage(machine, shares), self.job.constraints
        if fixed.offload or fixed.grad_compression is not None or self.job.profile.sends == "parts":
            # also depends on the hosts of stages, or on groups of ranks
            return self._compute_least_of(machine, shares, costs, cutoff_s)
        paces = frozenset((seat.kind, seat.speed) for seats in machine.seats for seat in seats)
        links = tuple(machine.link(stage, stage + 1) for stage in range(self.candidate.pp - 1))
        num_microbatches = max(shares, default=0), len(set(shares)) == 1
        key = *map(SameObject, costs), *num_microbatches, paces, links, machine.capacity, machine.spread, cutoff_s
        if key not in self._known_bounds:
            self._known_bounds[key] = self._compute_least_of(machine, shares, costs, cutoff_s)
        return self._known_bounds[key]

    def _compute_least_of(
        self, machine: PlacedMesh, shares: Shares, costs_by_stage: Sequence[Costs], cutoff_s: float
    ) -> float:
        """Compute without a cache a lower bound in seconds on a step on the placement ``machine`` (a topology with the
        mesh laid over it) if the ranks of ``dp`` have the numbers of microbatches ``shares``; infinite if no cut into
        stages fits in memory. ``costs_by_stage``: for each stage, block name -> cost of a call of the block (such as a
        layer). ``cutoff_s``: a bound of this many seconds is tight enough."""
        problem, held, _ = self._build_stage_problem(machine, shares, costs_by_stage)
        try:
            found = least_time(self._set_microbatches_in_flight(problem), cutoff_s, quick=True)
        except CapacityError:
            return math.inf
        m, overlap = problem.num_microbatches, problem.overlap_steps
        pipeline_s = found.pipeline_s(self.candidate.schedule, self.candidate.pp, m, overlap, problem.train)
        return pipeline_s + least_update(problem, held, machine)

    def dressed(self, machine: PlacedMesh) -> PlacedMesh:
        """Return the placement ``machine`` (a topology with the mesh laid over it) with the settings that decide costs:
        settings of the candidate, such as the ZeRO stage and the distribution of experts, and settings of the planning
        problem, such as the precision. Calls with equal arguments return the same object, because other results are
        cached by the identity of this object."""
        key = SameObject(machine)
        if key not in self._dressed:
            self._dressed[key] = self.job.dressed(machine, self.candidate)
        return self._dressed[key]

    def _set_microbatches_in_flight(self, problem: StageProblem) -> StageProblem:
        """Return a copy of ``problem``, the problem of cutting block calls (such as layers) into pipeline stages, in
        which each stage has the number of microbatches whose activations it holds at a time. If the schedule has a
        formula for its step time, and is therefore not simulated, ``problem`` itself is returned.
        """
        candidate = self.candidate
        if is_formula(candidate.schedule, candidate.pp, problem.train):
            return problem
        return set_scheduled_in_flight(problem, candidate.schedule, candidate.pp, candidate.virtual_stages)
