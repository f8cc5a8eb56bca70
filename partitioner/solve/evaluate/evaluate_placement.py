"""The best plan and step time on one placement: cut into stages, divide the batch, and price the step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from partitioner.candidate import MeshCandidate
from partitioner.cost.call.states import StateCost, with_lost
from partitioner.cost.step.estimate import estimate_step, stage_problem
from partitioner.cost.step.gradient_reduction import lost_by
from partitioner.cost.step.pipeline_tail import least_update, run_tails
from partitioner.cost.step.placed_mesh import PlacedMesh, RankProfile
from partitioner.cost.step.rank_costs import CallCostCache
from partitioner.errors import CapacityError, PlanError
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
from partitioner.solve.stages.virtual_stages import set_scheduled_in_flight, solve_virtual

_SHARES = 6  # shares of the batch that are tried on one placement

_GAINED = 0.1  # greatest gain of shares that follow the stages: 6 % have been measured
_POOR, _SEEN = 1.03, 2  # shares are poor if slower than the best by this factor on this number of placements


class PlacementResult(NamedTuple):
    """The stages of a placement, the step's estimate, and the microbatches of each rank of ``dp`` (empty: all ranks
    have equally many)."""

    problem: StageProblem
    split: StageSplit
    estimate: Estimate
    data_shares: Shares

    @property
    def calls(self) -> list[list[int]]:
        """The calls of each stage, as indices into the local model's calls."""
        parts = ([(part.start, part.stop) for part in stage.parts or (stage,)] for stage in self.split.stages)
        return [[call.index for pair in pairs for call in self.problem.calls[slice(*pair)]] for pairs in parts]


def virtual_ranks(candidate: MeshCandidate) -> tuple[int, ...]:
    """The rank of each virtual stage, for a schedule that is simulated; empty for a schedule with a formula."""
    return (
        () if is_formula(candidate.schedule) else ranks_of(candidate.schedule, candidate.pp, candidate.virtual_stages)
    )


def split_of(
    problem: StageProblem,
    candidate: MeshCandidate,
    *,
    proven: bool = True,
    improved: bool = True,
    cutoff_s: float = math.inf,
) -> StageSplit:
    """The best stages of ``problem`` under the schedule of ``candidate``. Arguments and exceptions are those of
    :func:`partitioner.solve.stages.virtual_stages.solve_virtual`."""
    if is_formula(candidate.schedule):
        return solve_stages(problem)
    schedule = candidate.schedule, candidate.pp, candidate.virtual_stages
    return solve_virtual(problem, *schedule, proven=proven, improved=improved, cutoff_s=cutoff_s)


@dataclass
class ShareRecord:
    """History of step times with different shares of the batch on the placements of one mesh. Shares with equal sorted
    counts are one."""

    _ratios: dict[Shares, list[float]] = field(default_factory=lambda: defaultdict(list))

    def tell(self, steps: Mapping[Shares, float]) -> None:
        """Record the seconds of a step with the shares that were tried on one placement."""
        best = min(steps.values(), default=math.inf)
        for kind, step in {tuple(sorted(shares)): step for shares, step in steps.items()}.items():
            self._ratios[kind].append(step / best)

    def is_poor(self, shares: Shares) -> bool:
        """Whether other shares were clearly better on every placement where ``shares`` were tried."""
        found = self._ratios.get(tuple(sorted(shares)), [])
        return len(found) >= _SEEN and min(found) > _POOR


@dataclass
class PlacementEvaluator:
    """Prices placements of ``candidate``.

    ``local``: the local model of a rank. ``costs``: its costs. ``states``: the costs of its states. ``reference``: the
    seat that the sharding is chosen for. ``check``: raises if hosts lack memory for offloaded data. ``proven``,
    ``improved``, ``cutoff_s``: see :meth:`partitioner.solve.evaluate.evaluator.CandidateEvaluator.solve`. ``record``:
    history of the shares tried for candidates with the same pipelines.

    ``lower_bounds``: for each judged placement, a lower bound in seconds on its plans. ``asked``: the identities of the
    judged machines.
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
    asked: set[int] = field(default_factory=set)
    _dressed: dict[int, tuple[PlacedMesh, PlacedMesh]] = field(default_factory=dict)

    @cached_property
    def _batch_sharing(self) -> BatchSharing:
        return BatchSharing(self.job, self.candidate, self.local, self.costs)

    def __call__(self, machine: PlacedMesh) -> tuple[float, PlacementResult]:
        """Seconds of a step on ``machine``, and the plan. Raises :class:`PlanError` if there is none."""
        self.asked.add(id(machine))
        machine = self.dressed(machine)
        step, best, least = math.inf, None, math.inf
        errors: list[PlanError] = []
        asked = self._by_least(machine)
        tried = {shares for _, shares in asked}
        steps: dict[Shares, float] = {}
        asked.sort(key=lambda pair: self.record.is_poor(pair[1]))  # the others first
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
        self.lower_bounds.append(
            min(least, self._batch_sharing.least(machine)) if self._batch_sharing.is_free(machine) else least
        )
        return step, best

    def _by_least(self, machine: PlacedMesh) -> list[tuple[float, Shares]]:
        """The shares that are tried first, each with a quick lower bound in seconds, in increasing order."""
        shares = self._batch_sharing.first(machine)
        if len(shares) == 1 or not self._has_floor:
            return [(0.0, each) for each in shares]
        return sorted((self._least_of(machine, each, 0.0), each) for each in shares)

    @property
    def _has_floor(self) -> bool:
        """Whether the schedule is simulated and has one stage on each rank; then a quick lower bound exists."""
        return not is_formula(self.candidate.schedule) and is_plain(
            self.candidate.schedule, self.candidate.virtual_stages
        )

    def _evaluate_with_shares(self, machine: PlacedMesh, shares: Shares) -> tuple[float, PlacementResult, float]:
        """Seconds of a step with ``shares`` of the batch, the plan, and a lower bound in seconds on its stages."""
        job, candidate = self.job, self.candidate
        problem, held, shares = self._build_stage_problem(machine, shares)
        ranks = virtual_ranks(candidate)
        order = candidate.schedule, candidate.virtual_stages if ranks else None

        def price(split: StageSplit) -> tuple[float, Estimate]:
            expected = estimate_step(problem, split, held, machine, job.flops, job.constraints, *order)
            if job.constraints.offload:
                self.check(expected, machine)
            return expected.step_time, expected

        behind = least_update(problem, held, machine)
        cut = cut_for_step(
            problem,
            partial(
                split_of,
                candidate=candidate,
                proven=self.proven,
                improved=self.improved,
                cutoff_s=self.cutoff_s - behind,
            ),
            price,
            behind,
            lambda within_s: run_tails(
                self._set_microbatches_in_flight(problem), held, machine, job.constraints, ranks, within_s
            ),
            self.cutoff_s if self.proven else 0.0,
        )
        return cut.step_s, PlacementResult(problem, cut.split, cut.priced, shares), cut.lower_bound_s

    def _build_stage_problem(
        self, machine: PlacedMesh, shares: Shares
    ) -> tuple[StageProblem, Mapping[str, StateCost], Shares]:
        """The stage problem on ``machine``, the costs of its states, and the microbatches of each rank of ``dp``."""
        job, candidate = self.job, self.candidate
        held = with_lost(self.states, lost_by(machine, job.constraints))
        costs_by_stage = self._batch_sharing.by_stage(machine, shares)
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
            ranks=virtual_ranks(candidate),
            constraints=job.constraints,
            profile=job.profile,
            train=job.train,
            costs_by_stage=costs_by_stage,
            scattering=machine.scattering(candidate.num_microbatches(job.global_batch)),
        )
        if job.layout is not None:
            problem = replace(problem, pinned=job.layout.pinned_calls(problem.calls))
        return problem, held, shares

    def least(self, machine: PlacedMesh, cutoff_s: float = 0.0) -> float:
        """Lower bound in seconds on every plan on ``machine``; infinite if no stages fit. It is refined, as far as that
        is quick, to find out whether it reaches ``cutoff_s``."""
        dressed = self.dressed(machine)
        return (
            self._batch_sharing.least(dressed)
            if self._batch_sharing.is_free(dressed)
            else self.expected(machine, cutoff_s)
        )

    def expected(self, machine: PlacedMesh, cutoff_s: float = 0.0) -> float:
        """Estimated lower bound in seconds on ``machine``: at least :meth:`least`. It assumes that other shares gain at
        most a fixed fraction over those that are tried first."""
        machine = self.dressed(machine)
        quick = self._batch_sharing.least(machine)
        if quick >= cutoff_s or not self._has_floor:
            return quick
        left = 1 - _GAINED if self._batch_sharing.is_free(machine) else 1.0
        first = min(self._least_of(machine, shares, cutoff_s / left) for shares in self._batch_sharing.first(machine))
        return max(quick, first * left)

    def _least_of(self, machine: PlacedMesh, shares: Shares, cutoff_s: float) -> float:
        """Lower bound in seconds on a step of simulated stages with ``shares`` of the batch; infinite if no stages
        fit."""
        problem, held, _ = self._build_stage_problem(machine, shares)
        try:
            found = least_time(self._set_microbatches_in_flight(problem), cutoff_s, quick=True)
        except CapacityError:
            return math.inf
        m, overlap = problem.num_microbatches, problem.overlap_steps
        pipeline_s = found.pipeline_s(self.candidate.schedule, self.candidate.pp, m, overlap)
        return pipeline_s + least_update(problem, held, machine)

    def dressed(self, machine: PlacedMesh) -> PlacedMesh:
        """``machine`` with the other settings of the candidate; one object for each machine."""
        if id(machine) not in self._dressed:  # the machine keeps its identity valid
            self._dressed[id(machine)] = machine, self.job.dressed(machine, self.candidate)
        return self._dressed[id(machine)][1]

    def _set_microbatches_in_flight(self, problem: StageProblem) -> StageProblem:
        """``problem`` with the numbers of microbatches that stages hold under its schedule."""
        candidate = self.candidate
        if is_formula(candidate.schedule):
            return problem
        return set_scheduled_in_flight(problem, candidate.schedule, candidate.pp, candidate.virtual_stages)
