"""One candidate of the search, solved: its sharding, its stages, and what a step is expected to cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from partitioner.constraints import Constraints
from partitioner.context import ContextModel, shard_context
from partitioner.cost.axes import TensorCosts
from partitioner.cost.calls import call_costs
from partitioner.cost.divided import divided_costs
from partitioner.cost.estimate import estimate, stage_problem
from partitioner.cost.machine import Machine, Seat
from partitioner.cost.offload import check_hosts
from partitioner.cost.seats import Costs, SeatCosts, fastest
from partitioner.cost.spread import Software
from partitioner.cost.states import StateCost, gradient_bytes, state_costs
from partitioner.errors import PlanError
from partitioner.experts import Split, allowed_strategies, common_experts, expert_states, regions_of, split_of
from partitioner.localize import LocalModel, shard_tensors
from partitioner.plan import Estimate
from partitioner.schedules import ranks_of
from partitioner.solve.pipelines import is_formula, least_bubble
from partitioner.solve.placement import Found, Placements
from partitioner.solve.points import Point
from partitioner.solve.sharding import ShardingSolution
from partitioner.solve.stages import StageProblem, StageSplit, solve_stages
from partitioner.solve.virtual import solve_virtual
from partitioner.topology import Topology
from partitioner.topology.groups import reference_type, stage_ranks
from passes.blocks import FoldedModel
from passes.errors import UnsupportedError
from passes.microbatch import split_batch
from runtime.offload import Offload


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

    def dressed(self, machine: Machine, point: Point) -> Machine:
        """``machine``, over which the point's mesh is laid, with what else the point says."""
        return replace(
            machine,
            precision=self.precision,
            ep=point.ep,
            etp=point.etp,
            zero=point.zero,
            dp_shard=point.dp_shard,
            gradient_bytes=self.gradient_bytes,
            overlap=self.constraints.overlap is not False,
            software=Software(
                overlap_tensor=bool(self.constraints.overlap_tensor),
                regather=bool(self.constraints.regather),
                by_parameter=self.constraints.gather == "parameter",
                short_gradients=bool(self.constraints.short_gradients),
            ),
            num_experts=self.num_experts,
        )

    @cached_property
    def gradient_bytes(self) -> int:
        """Of all gradients of parameters."""
        short = bool(self.constraints.short_gradients)
        return sum(gradient_bytes(s.spec, short) for s in self.model.states.values() if s.requires_grad)

    @cached_property
    def experts(self) -> frozenset[str]:
        """The states that are experts' weights."""
        return frozenset(self._experts)

    @cached_property
    def _experts(self) -> dict[str, tuple[int, int]]:
        return expert_states(self.model, regions_of(self.model))

    @cached_property
    def num_experts(self) -> int:
        """Of the layer that has most."""
        return max((count for _, count in self._experts.values()), default=0)

    @cached_property
    def common_experts(self) -> int:
        """Ranks that share all layers' experts evenly are a divisor of this; 0 without experts."""
        return common_experts(self._experts)

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

    point: Point
    num_microbatches: int
    local: LocalModel
    stages: StageSplit
    estimate: Estimate
    stage_of_call: tuple[int, ...]
    recompute: tuple[int, ...]
    devices: tuple[int, ...]  # of each rank
    selective: tuple[int, ...] = ()  # of which attention scores are recomputed
    offload: tuple[Offload, ...] = ()  # what is kept in host memory
    context_model: FoldedModel | None = None  # one microbatch, before its sequence is shared over cp


# tp, cp, parts of the batch, whether one microbatch is all, experts over tp
LocalKey = tuple[int, int, int, bool, Split]


Floor = dict[str, tuple[float, float]]  # by block
Judged = tuple[StageProblem, StageSplit, Estimate]


@dataclass
class Evaluator:
    """Solves candidates; what they share is solved once."""

    job: Job
    _splits: dict[tuple[int, bool], FoldedModel] = field(default_factory=dict)
    _locals: dict[LocalKey, LocalModel] = field(default_factory=dict)
    _costs: dict[LocalKey, SeatCosts] = field(default_factory=dict)
    _contexts: dict[LocalKey, ContextModel] = field(default_factory=dict)
    _seats: dict[tuple[int, int], Seat] = field(default_factory=dict)
    _spread: set[tuple[int, LocalKey]] = field(default_factory=set)
    _floors: dict[tuple[Any, ...], Floor | None] = field(default_factory=dict)
    _held: dict[tuple[Any, ...], dict[str, StateCost]] = field(default_factory=dict)

    def solve(self, point: Point, devices: Sequence[int] | None = None) -> Solved:
        """The best plan of one candidate; on ``devices`` by rank, where they are given.

        Raises :class:`PlanError` (:class:`CapacityError` where memory does not suffice) or
        :class:`passes.errors.UnsupportedError` where there is none.
        """
        job = self.job
        num_microbatches = point.num_microbatches(job.global_batch)
        local, costs, states = self._own(point)
        plain = is_formula(point.schedule)
        ranks = () if plain else ranks_of(point.schedule, point.pp, point.virtual_stages)

        seen: dict[int, tuple[Machine, Machine]] = {}  # by identity, with what keeps it alive

        def dressed(machine: Machine) -> Machine:
            if id(machine) not in seen:
                seen[id(machine)] = machine, job.dressed(machine, point)
            return seen[id(machine)][1]

        def judge(machine: Machine) -> tuple[float, Judged]:
            machine = dressed(machine)
            problem = stage_problem(
                local.model,
                costs.at(self._reference_seat(point.tp, point.cp), machine.spread),
                states,
                machine,
                num_microbatches=num_microbatches,
                microbatch_size=point.microbatch_size,
                schedule=point.schedule,
                ranks=ranks,
                constraints=job.constraints,
                train=job.train,
                costs_by_stage=costs.by_stage(machine),
                scattered_bytes=machine.spread.scattered_bytes,
            )
            if plain:
                split = solve_stages(problem)
            else:
                split = solve_virtual(problem, point.schedule, point.pp, point.virtual_stages)
            expected = estimate(problem, split, states, machine, job.flops)
            if job.constraints.offload:
                of_stages = zip(expected.stages, stage_ranks(machine.mesh), strict=True)
                in_host = [stage.host for stage, ranks in of_stages for _ in ranks]
                check_hosts(job.topology, machine.device_of_rank, in_host)
            return expected.step_time, (problem, split, expected)

        def least(machine: Machine) -> float:
            """Stages that are all as fast as the best and hold the same share of the work."""
            bubble = least_bubble(point.schedule)
            share = (num_microbatches - bubble) / point.pp + bubble
            return self._fastest(local, costs, dressed(machine)) * share

        if devices is None:
            found = self.placements.best(point.grid, judge, least)
        else:
            machine = self.placements.at(point.grid, devices)
            found = Found(machine, *judge(machine))
        problem, split, expected = found.result
        stage_of_call = [0] * len(local.model.calls)
        recompute: list[int] = []
        selective: list[int] = []
        for stage, plan in enumerate(split.virtual or split.stages):
            for place, call in enumerate(problem.calls[plan.start : plan.stop], plan.start):
                stage_of_call[call.index] = stage
                recompute += [call.index] if place < plan.start + plan.recompute else []
                selective += [call.index] if plan.selective and call.cost.selective_bytes else []
        return Solved(
            point,
            num_microbatches,
            local,
            split,
            expected,
            tuple(stage_of_call),
            tuple(recompute),
            found.machine.device_of_rank,
            tuple(selective),
            job.constraints.offload or (),
            self._split_of(point) if point.cp > 1 else None,
        )

    def floor(self, point: Point, size: int) -> Floor | None:
        """Seconds that each block takes a microbatch of ``point`` at least, forward and backward, wherever its ranks
        are: its share of what one of ``size`` samples takes. ``None`` where nothing can be said.

        Per sample a smaller microbatch takes no less time than a larger one, since each cost is a start-up plus
        something that grows no faster than the batch, as long as whatever divides the smaller divides the larger.
        """
        if not self.placements.complete(point.grid):
            return None
        whole = size == point.microbatch_size and point.num_microbatches(self.job.global_batch) == 1
        key = *point.grid.values(), point.ep, point.etp, point.zero, point.dp_shard, size, whole
        if key not in self._floors:
            self._floors[key] = self._floor(point, size, whole)
        found, share = self._floors[key], point.microbatch_size / size
        return found and {name: (ahead * share, back * share) for name, (ahead, back) in found.items()}

    def least(self, point: Point) -> tuple[FoldedModel, Costs, dict[str, StateCost]] | None:
        """What a rank runs, what that takes at least on any placement, and its states; ``None`` where there are other
        placements than those that are tried. Raises as :meth:`solve` does."""
        if not self.placements.complete(point.grid):
            return None
        local, costs, states = self._own(point)
        return local.model, fastest(self._every(point, costs)), states

    def _own(self, point: Point) -> tuple[LocalModel, SeatCosts, dict[str, StateCost]]:
        """A point's own sharding, with what calls take and what states cost."""
        num_microbatches = point.num_microbatches(self.job.global_batch)
        key = self._key(point, num_microbatches * point.dp, num_microbatches == 1)
        local = self._local(key, num_microbatches, point.dp)
        costs = self._seat_costs(key, local)
        self._check_experts(point, key, local)
        return local, costs, self._states(point, key, local)

    def _split_of(self, point: Point) -> FoldedModel:
        """One microbatch, before its sequence is shared over ``cp``."""
        num_microbatches = point.num_microbatches(self.job.global_batch)
        return self._splits[num_microbatches * point.dp, num_microbatches == 1]

    def _every(self, point: Point, costs: SeatCosts) -> list[Costs]:
        """What calls take on the stages of all placements that are tried, each once."""
        machines = [self.job.dressed(machine, point) for machine in self.placements.candidates(point.grid)]
        return list({id(of): of for machine in machines for of in costs.by_stage(machine)}.values())

    def _floor(self, point: Point, size: int, whole: bool) -> Floor | None:
        job = self.job
        parts = job.global_batch // size
        key = self._key(point, parts, whole or parts == 1)
        try:
            dp = point.dp if whole or (parts % point.dp == 0 and parts > point.dp) else 1
            local = self._local(key, parts // dp, dp)
        except UnsupportedError:  # samples that are coupled need not be so in smaller batches
            return None
        costs = self._seat_costs(key, local)
        of_block = fastest(self._every(point, costs))
        least = {name: (cost.forward_s, cost.backward_s) for name, cost in of_block.items()}
        of_path = {call.path: least[call.block] for call in local.model.calls if not call.prologue}
        floor: Floor = {}
        for call in job.model.calls:  # whose blocks may be others than the local model's
            found = of_path.get(call.path, (0.0, 0.0))
            floor[call.block] = min(floor.get(call.block, found), found)
        return floor

    def _fastest(self, local: LocalModel, costs: SeatCosts, machine: Machine) -> float:
        """Seconds of a microbatch through all calls, if all stages were as fast as the fastest."""
        often = Counter(call.block for call in local.model.calls if not call.shared and not call.prologue)
        train = self.job.train
        return min(
            sum(n * (of[b].forward_total_s + of[b].backward_total_s * train) for b, n in often.items())
            for of in {id(of): of for of in costs.by_stage(machine)}.values()
        )

    def _check_experts(self, point: Point, key: LocalKey, local: LocalModel) -> None:
        """Raise :class:`PlanError` where the graph does not let experts be spread as ``point`` says."""
        if point.ep == 1 or (point.ep, key) in self._spread:
            return
        left = self.job.experts - local.spread(point.tp, point.ep, point.etp).experts.keys()
        if left:
            raise PlanError(f"ep={point.ep} with tp={point.tp}: {min(left)} is not read by expert on each rank")
        self._spread.add((point.ep, key))

    def _states(self, point: Point, key: LocalKey, local: LocalModel) -> dict[str, StateCost]:
        """What states cost a rank, which does not depend on where it is."""
        held = point.dp > 1, point.kind, point.zero and (point.zero, point.sharers, point.expert_sharers), key
        if held not in self._held:
            job = self.job
            machine = job.dressed(Machine(job.topology, point.grid), point)
            self._held[held] = state_costs(
                local.model.states,
                local.sharding.states,
                point.grid,
                optimizer=job.optimizer,
                train=job.train,
                sharded=machine.sharded(job.experts),
                short_gradients=bool(job.constraints.short_gradients),
                offload=job.constraints.offload or (),
            )
        return self._held[held]

    @cached_property
    def placements(self) -> Placements:
        return Placements(self.job.topology, self.job.precision)

    def _grid(self, tp: int, cp: int) -> dict[str, int]:
        others = {"dp": self.job.topology.num_devices // (tp * cp)}
        return {**others, "cp": cp, "tp": tp} if cp > 1 else {**others, "tp": tp}

    def _reference_seat(self, tp: int, cp: int = 1) -> Seat:
        """What decides a sharding: the commonest kind of device, over the best groups that all can have."""
        if (tp, cp) not in self._seats:
            machines = self.placements.candidates(self._grid(tp, cp))
            axes = ("tp", "cp") if cp > 1 else ("tp",)
            best = max(machines, key=lambda m: [(m.group(a).bus_bandwidth, -m.group(a).all_reduce_start) for a in axes])
            groups = tuple((axis, best.group(axis)) for axis in axes)
            self._seats[tp, cp] = Seat(reference_type(self.job.topology), 1.0, groups)
        return self._seats[tp, cp]

    def _seat_costs(self, key: LocalKey, local: LocalModel) -> SeatCosts:
        if key not in self._costs:
            self._costs[key] = SeatCosts(local.model.blocks, self.job.topology, self.job.train)
        return self._costs[key]

    def _key(self, point: Point, parts: int, whole: bool) -> LocalKey:
        return point.tp, point.cp, parts, whole, split_of(point.tp, point.ep, point.etp)

    def _local(self, key: LocalKey, num_microbatches: int, dp: int) -> LocalModel:
        if key not in self._locals:
            tp, cp, parts, whole, experts = key
            if (parts, whole) not in self._splits:
                batch = self.job.batch
                self._splits[parts, whole] = split_batch(
                    self.job.model, batch.blocks, batch.values, num_microbatches, dp
                )
            split = self._splits[parts, whole]
            context = self._context(split, key, num_microbatches) if cp > 1 else None
            split = split if context is None else context.model
            costs = self._tensor_costs(split, "tp", self._reference_seat(tp, cp), num_microbatches)
            costs = replace(costs, allowed=allowed_strategies(split, experts))
            self._locals[key] = shard_tensors(split, tp, costs, None if context is None else context.sharding)
        return self._locals[key]

    def _context(self, split: FoldedModel, key: LocalKey, num_microbatches: int) -> ContextModel:
        """``split`` with its sequence shared over ``cp``."""
        tp, cp = key[:2]
        if key not in self._contexts:
            self._contexts[key] = shard_context(
                split,
                self.job.batch,
                cp,
                replace(
                    self._tensor_costs(split, "cp", self._reference_seat(tp, cp), num_microbatches), state_price=0.0
                ),
                tp=tp,
                algorithm=self.job.constraints.context,
                allowed=allowed_strategies(split, "rows", in_order=False) if self.job.experts else None,
            )
        return self._contexts[key]

    def _tensor_costs(self, split: FoldedModel, axis: str, seat: Seat, num_microbatches: int) -> TensorCosts:
        job = self.job
        device, group, pinned = job.topology.types[seat.kind], dict(seat.groups)[axis], job.constraints
        return replace(
            divided_costs(split, axis, device, group, job.precision),
            train=job.train,
            num_microbatches=num_microbatches,
            sequence_parallel=pinned.sequence_parallel if axis == "tp" else None,
            short_gradients=bool(pinned.short_gradients),
        )
