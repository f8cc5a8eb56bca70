"""One candidate of the search, solved: its sharding, its stages, and what a step is expected to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from partitioner.constraints import Constraints
from partitioner.cost.axes import TensorCosts
from partitioner.cost.calls import call_costs
from partitioner.cost.estimate import Machine, estimate, stage_problem
from partitioner.cost.seats import SeatCosts
from partitioner.cost.states import state_costs
from partitioner.localize import LocalModel, shard_tensors
from partitioner.plan import Estimate
from partitioner.solve.sharding import ShardingSolution
from partitioner.solve.share import matmul_flops
from partitioner.solve.stages import StageSplit, solve_stages
from partitioner.topology import Topology
from passes.blocks import FoldedModel
from passes.microbatch import split_batch

# What tp leaves whole of the matrix products and of the weights costs, if that is all of them, this many times the time
# of all products and this many all-reduces.
_UNDIVIDED = 10.0
_UNDIVIDED_EXCHANGES = 1000.0


@dataclass(frozen=True)
class Job:
    """What is to be planned. ``model`` is the folded model of the whole batch, marked with its gradients."""

    model: FoldedModel
    batch: ShardingSolution
    global_batch: int
    topology: Topology
    constraints: Constraints
    train: bool
    optimizer: str
    precision: str  # of most of the work: "bf16", "fp32", ...

    @cached_property
    def flops(self) -> float:
        """FLOPs of the matrix products of one step of the unsharded model."""
        total = 0.0
        for name, block in self.model.blocks.items():
            cost = call_costs(block, self.topology.device_type(0), {}, train=self.train)
            total += self.model.num_calls(name) * (cost.flops + cost.backward_flops)
        return total


@dataclass(frozen=True)
class Solved:
    """A candidate's plan before it is written out."""

    mesh: Mapping[str, int]
    num_microbatches: int
    schedule: str
    local: LocalModel
    stages: StageSplit
    estimate: Estimate
    stage_of_call: tuple[int, ...]
    recompute: tuple[int, ...]


@dataclass
class Evaluator:
    """Solves candidates; what they share is solved once."""

    job: Job
    _splits: dict[tuple[int, bool], FoldedModel] = field(default_factory=dict)
    _locals: dict[tuple[int, int, bool], LocalModel] = field(default_factory=dict)
    _costs: dict[tuple[int, int, bool], SeatCosts] = field(default_factory=dict)

    def solve(self, mesh: Mapping[str, int], microbatch_size: int, schedule: str) -> Solved:
        """The best plan of one candidate.

        Raises :class:`PlanError` (:class:`CapacityError` where memory does not suffice) or
        :class:`passes.errors.UnsupportedError` where there is none.
        """
        job = self.job
        dp, tp = mesh["dp"], mesh["tp"]
        num_microbatches = job.global_batch // (dp * microbatch_size)
        machine = Machine(job.topology, mesh, job.precision)
        key = tp, num_microbatches * dp, num_microbatches == 1
        local = self._local(key, machine, num_microbatches, dp)
        if key not in self._costs:
            self._costs[key] = SeatCosts(local.model.blocks, job.topology, job.train)
        by_stage = self._costs[key].by_stage(machine)
        states = state_costs(local.model.states, local.sharding.states, mesh, optimizer=job.optimizer, train=job.train)
        problem = stage_problem(
            local.model,
            by_stage[0],
            states,
            machine,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            schedule=schedule,
            constraints=job.constraints,
            train=job.train,
            costs_by_stage=by_stage,
        )
        split = solve_stages(problem)
        stage_of_call = [0] * len(local.model.calls)
        recompute: list[int] = []
        for stage, plan in enumerate(split.stages):
            for place, call in enumerate(problem.calls[plan.start : plan.stop], plan.start):
                stage_of_call[call.index] = stage
                recompute += [call.index] if place < plan.start + plan.recompute else []
        return Solved(
            mesh,
            num_microbatches,
            schedule,
            local,
            split,
            estimate(problem, split, states, machine, job.flops),
            tuple(stage_of_call),
            tuple(recompute),
        )

    def _local(self, key: tuple[int, int, bool], machine: Machine, num_microbatches: int, dp: int) -> LocalModel:
        if key not in self._locals:
            tp, parts, whole = key
            if (parts, whole) not in self._splits:
                batch = self.job.batch
                self._splits[parts, whole] = split_batch(
                    self.job.model, batch.blocks, batch.values, num_microbatches, dp
                )
            split = self._splits[parts, whole]
            self._locals[key] = shard_tensors(split, tp, self._tensor_costs(split, machine, num_microbatches))
        return self._locals[key]

    def _tensor_costs(self, split: FoldedModel, machine: Machine, num_microbatches: int) -> TensorCosts:
        """Costs on ``tp``, which is there to divide matrix products and weights: leaving one whole is dear.

        Without that price the best use of any axis is to split the batch, which ``dp`` does already.
        """
        group = machine.group("tp")
        flops = sum(
            split.num_calls(name) * matmul_flops(node)
            for name, block in split.blocks.items()
            for node in block.graph.nodes
            if node.op == "call_function"
        )
        trained = sum(s.spec.nbytes for s in split.states.values() if s.requires_grad)
        peak = machine.device.peak_of(self.job.precision)
        dear = _UNDIVIDED * 3 * flops / peak + _UNDIVIDED_EXCHANGES * max(group.all_reduce_start, machine.device.launch)
        return TensorCosts(
            machine.device,
            group,
            train=self.job.train,
            num_microbatches=num_microbatches,
            sequence_parallel=self.job.constraints.sequence_parallel,
            undivided=dear / flops if flops else 0.0,
            state_price=dear / trained if trained else 0.0,
        )
