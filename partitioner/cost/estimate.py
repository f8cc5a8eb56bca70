"""What a step is expected to take: time, its parts, the share of peak, and every rank's memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partitioner.constraints import Constraints, pinned_calls
from partitioner.cost.calls import CallCost
from partitioner.cost.collectives import collective_time
from partitioner.cost.peak import stage_estimates
from partitioner.cost.spread import NO_SPREAD, Spread
from partitioner.cost.states import Sharded, StateCost, reduction, update_time
from partitioner.plan import Estimate
from partitioner.solve.pipelines import PIPELINES, Phases
from partitioner.solve.stages import StageCall, StagePlan, StageProblem, StageSplit
from partitioner.topology.groups import (
    Group,
    axis_group,
    reference_type,
    stage_capacity,
    stage_links,
    stage_ranks,
    stage_slowdown,
)
from partitioner.topology.model import Topology
from partitioner.topology.parts import DeviceType
from passes.blocks import FoldedModel
from runtime.program import AXES


@dataclass(frozen=True)
class Machine:
    """A topology with a mesh laid over it: rank ``i`` on device ``i``. ``precision`` is that of most of the work.

    ``mesh`` has ``ep``, folded over dp x cp x tp, each expert on ``etp`` of them; ``zero``: the stage of state
    sharding; ``overlap``: whether collectives of gradients and weights run behind computation.
    """

    topology: Topology
    mesh: Mapping[str, int]
    precision: str = "bf16"
    etp: int = 1
    zero: int = 0
    overlap: bool = True

    @cached_property
    def device(self) -> DeviceType:
        """The kind of device that costs are reckoned for."""
        return self.topology.types[reference_type(self.topology)]

    @cached_property
    def grid(self) -> dict[str, int]:
        """The axes whose sizes multiply to the number of ranks."""
        return {**self.mesh, "ep": 1}

    @cached_property
    def expert_grid(self) -> dict[str, int]:
        """The same ranks as the experts see them: replicas, then (in the place of ``cp``) ``ep``, then ``etp``."""
        ep = self.mesh.get("ep", 1)
        room = math.prod(self.mesh.get(axis, 1) for axis in ("dp", "cp", "tp"))
        return {"pp": self.mesh.get("pp", 1), "dp": room // (ep * self.etp), "cp": ep, "tp": self.etp, "ep": 1}

    def group(self, *axes: str) -> Group:
        """The slowest group over ``axes``; ``experts`` stands for the replicas of an expert."""
        if "experts" in axes:
            others = [a for a in axes if a != "experts"]
            return self._group(True, "dp", *others)
        return self._group(False, *axes)

    def _group(self, of_experts: bool, *axes: str) -> Group:
        key = of_experts, axes
        if key not in self._groups:
            self._groups[key] = axis_group(self.topology, self.expert_grid if of_experts else self.grid, *axes)
        return self._groups[key]

    @cached_property
    def _groups(self) -> dict[tuple[bool, tuple[str, ...]], Group]:
        return {}

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights."""
        return self.mesh.get("dp", 1) * self.mesh.get("cp", 1)

    @cached_property
    def spread(self) -> Spread:
        """How calls are spread besides ``tp``."""
        ep = self.mesh.get("ep", 1)
        if self.mesh.get("cp", 1) == 1 and ep == 1 and self.zero < 3 and self.precision != "fp8" and self.etp_is_tp:
            return NO_SPREAD
        sharded = self.zero == 3
        return Spread(
            context=self.group("cp"),
            experts=self._group(True, "cp"),
            shards=self.group("dp", "cp") if sharded else Group(1),
            expert_shards=self.group("experts") if sharded else Group(1),
            expert_tensor=self.mesh.get("tp", 1) / self.etp,
            overlap=self.overlap,
            fp8=self.precision == "fp8",
        )

    @property
    def etp_is_tp(self) -> bool:
        return self.etp == self.mesh.get("tp", 1)

    def sharded(self, experts: frozenset[str]) -> Sharded:
        """How states are sharded; ``experts``: those that are experts' weights."""
        return Sharded(self.zero, self.replicas, experts, self.spread.of_experts, self.expert_grid["dp"])

    @cached_property
    def groups(self) -> dict[str, Group]:
        """By mesh axis, for the collectives inside blocks."""
        return {axis: self.group(axis) for axis in AXES if self.grid.get(axis, 1) > 1}


def stage_problem(
    model: FoldedModel,
    costs: Mapping[str, CallCost],
    states: Mapping[str, StateCost],
    machine: Machine,
    *,
    num_microbatches: int,
    microbatch_size: int = 1,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    bubble: float | None = None,
    constraints: Constraints | None = None,
    train: bool = True,
) -> StageProblem:
    """The calls of ``model`` as a problem of stages; ``costs`` by block, ``states`` by name.

    Calls that are shared or a prologue run on every stage that reads them, and are charged to all of them. ``bubble``:
    the schedule's share of fill and drain, if it is not to be reckoned from the costs.
    """
    constraints = constraints or Constraints()
    if constraints.recompute == "selective":
        costs = {name: cost.selective() for name, cost in costs.items()}
    placed = [(i, call) for i, call in enumerate(model.calls) if not call.shared and not call.prologue]
    if bubble is None:
        bubble = PIPELINES[schedule].bubble(_phases([costs[call.block] for _, call in placed]), virtual_stages)
    often = Counter(call.block for _, call in placed)
    everywhere = [call for call in model.calls if call.shared or call.prologue]
    stages = machine.mesh.get("pp", 1)
    return StageProblem(
        calls=tuple(
            StageCall(call.path, costs[call.block], call.inputs, call.outputs, call.states, i) for i, call in placed
        ),
        num_stages=stages,
        num_microbatches=num_microbatches,
        capacity=stage_capacity(machine.topology, machine.grid),
        links=stage_links(machine.topology, machine.grid),
        state_bytes={name: cost.total for name, cost in states.items()},
        local=frozenset([i.value for i in model.inputs] + [v for call in everywhere for v in call.outputs]),
        schedule=schedule,
        virtual_stages=virtual_stages,
        bubble=bubble,
        repeated=tuple(often[call.block] > 1 for _, call in placed),
        recompute=constraints.recompute,
        pinned=pinned_calls(constraints.stage_of, [call.path for _, call in placed], stages),
        overhead=_together([costs[call.block] for call in everywhere]),
        slowdown=stage_slowdown(machine.topology, machine.grid, machine.precision),
        microbatch_size=microbatch_size,
        tp=machine.mesh.get("tp", 1),
        dp=machine.mesh.get("dp", 1),
        train=train,
    )


def _phases(costs: Sequence[CallCost]) -> Phases:
    """Each half of a backward is about as many products; collectives belong to the half for inputs."""
    return Phases(
        sum(c.forward_total_s for c in costs),
        sum(c.backward_s / 2 + c.backward_comm_s for c in costs),
        sum(c.backward_s / 2 for c in costs),
    )


def _together(costs: Sequence[CallCost]) -> CallCost:
    """Small calls run one after the other."""
    return CallCost(
        forward_s=sum(c.forward_s for c in costs),
        forward_comm_s=sum(c.forward_comm_s for c in costs),
        flops=sum(c.flops for c in costs),
        working_bytes=sum(c.working_bytes + sum(c.output_bytes) + c.state_bytes for c in costs),
    )


def estimate(
    problem: StageProblem,
    split: StageSplit,
    states: Mapping[str, StateCost],
    machine: Machine,
    model_flops: float,
) -> Estimate:
    """The estimate of one step. ``model_flops``: those of the whole unsharded model for the global batch.

    ``breakdown`` adds up to the step time: what the slowest stage does in it (``compute``, ``recompute``,
    ``tp_communication``, ``pp_communication``), ``bubble``: what it waits for the others, ``reduction``: of gradients,
    as far as nothing hides it, and ``optimizer``: the update after it.
    """
    m = problem.num_microbatches
    slowest = max(range(len(split.stages)), key=lambda s: split.stages[s].time_s)
    stage = split.stages[slowest]
    reduced = reduction_tail(problem, split, states, machine)
    updated = max(update_time(list(_held(problem, s, states).values()), machine.device) for s in split.stages)
    updated = updated if problem.train else 0.0
    step = split.pipeline_s + reduced + updated
    communicated = m * _communication(problem, stage, slowest)
    breakdown = {
        "compute": m * (stage.forward_s + stage.backward_s) - communicated,
        "recompute": m * stage.recompute_s,
        "tp_communication": communicated,
        "pp_communication": m * stage.transfer_s,
        "bubble": split.pipeline_s - m * stage.time_s,
        "reduction": reduced,
        "optimizer": updated,
    }
    peak = sum(
        machine.topology.types[d.kind].peak_of(machine.precision) * d.speed
        for d in machine.topology.devices[: stage_ranks(machine.grid)[-1].stop]
    )
    memory = tuple(
        plan.memory for plan, ranks in zip(split.stages, stage_ranks(machine.grid), strict=True) for _ in ranks
    )
    return Estimate(
        step_time=step,
        mfu=model_flops / (step * peak) if step else 0.0,
        bubble=breakdown["bubble"] / step if step else 0.0,
        memory=memory,
        breakdown=breakdown,
        stages=stage_estimates(problem, split, states),
    )


def _communication(problem: StageProblem, stage: StagePlan, index: int) -> float:
    """Seconds of collectives per microbatch on a stage, forward and backward."""
    costs = [call.cost for call in problem.calls[stage.start : stage.stop]]
    seconds = sum(c.forward_comm_s + (c.backward_comm_s if problem.train else 0.0) for c in costs)
    slowdown = problem.slowdown[index] if problem.slowdown else 1.0
    return slowdown * (seconds + problem.overhead.forward_comm_s)


def _held(problem: StageProblem, stage: StagePlan, states: Mapping[str, StateCost]) -> dict[str, StateCost]:
    """The different states that a stage's calls read."""
    return {n: states[n] for call in problem.calls[stage.start : stage.stop] for n in call.states if n in states}


def reduction_tail(
    problem: StageProblem, split: StageSplit, states: Mapping[str, StateCost], machine: Machine
) -> float:
    """Seconds by which the reductions of gradients end after the pipeline does.

    Stage ``s`` reduces behind its last backward, which ends before those of the stages ahead of it.
    The gradients of tied weights are added up over their stages first, which nothing hides.
    """
    if not problem.train:
        return 0.0
    held = [_held(problem, stage, states) for stage in split.stages]
    every = {c.grad_axes for costs in held for c in costs.values() if c.grad_axes}
    groups = {axes: machine.group(*axes) for axes in every}
    tail = ahead = 0.0
    for stage, costs in zip(split.stages, held, strict=True):
        work = reduction(list(costs.values()), groups)
        window = stage.backward_s + stage.recompute_s
        exposed = work.exposed(window, machine.device.overlap_slowdown, stage.forward_s, machine.overlap)
        tail = max(tail, exposed - ahead)
        ahead += stage.backward_s + stage.recompute_s
    return tail + _tied(held, machine)


def _tied(held: Sequence[Mapping[str, StateCost]], machine: Machine) -> float:
    seconds = 0.0
    for name in {name for costs in held for name in costs}:
        stages = [s for s, costs in enumerate(held) if name in costs]
        if len(stages) > 1 and (cost := held[stages[0]][name]).gradient:
            whole = machine.group("pp")
            seconds += collective_time("all_reduce", cost.gradient, replace(whole, size=min(whole.size, len(stages))))
    return seconds


__all__ = ["Machine", "estimate", "reduction_tail", "stage_problem"]
