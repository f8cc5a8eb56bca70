"""Timeline of a plan: its program is simulated with the durations of the cost model that chose the plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

from torch import fx

from partitioner.constraints import Constraints
from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.call.collectives import collective_time, message_time
from partitioner.cost.call.expert_parallel import Spread, expert_region
from partitioner.cost.call.fp8 import find_scaling
from partitioner.cost.call.roofline import copied_s
from partitioner.cost.call.saved_activations import kept_by
from partitioner.cost.call.states import StateCost, update_time
from partitioner.cost.step.gradient_reduction import coding_time
from partitioner.cost.step.offload import update_seconds
from partitioner.cost.step.placed_mesh import PlacedMesh, Seats
from partitioner.cost.step.rank_costs import CallCostCache
from partitioner.execution_profile import OURS
from partitioner.optimizers import moment_bytes, optimizer_bytes
from partitioner.passes.ir.gradient_flow import mark_block
from partitioner.passes.ir.model import Block
from partitioner.passes.ir.serialize import block_from_data, dtype_of
from partitioner.passes.shard.piece_counts import PieceCounts
from partitioner.plan import Plan
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.buckets import Compression
from partitioner.runtime.program.mesh import HYBRID_AXES
from partitioner.runtime.program.program import Program
from partitioner.runtime.program.sharded_buckets import zero_axes
from partitioner.runtime.program.simulate import Part, Sharing, Timeline, simulate, simulate_step_time
from partitioner.runtime.program.state_bytes import list_host_states
from partitioner.schedules.formulas import is_split
from partitioner.simulate.weight_precision import common_precision
from partitioner.topology.group import Group
from partitioner.topology.hardware import DeviceType
from partitioner.topology.hosts import BOUNDLESS
from partitioner.topology.topology import Topology
from partitioner.validate import rate_cluster, torch_device

_EXPERT_AXES = {"edp": "experts", "etp": "tp"}  # axis of the experts' mesh -> its name in PlacedMesh


class HasProgram(Protocol):
    """Interface of objects with a program and the devices that it runs on, such as a :class:`Plan`.

    ``topology``: the cluster. ``devices``: for each rank the index of its device in ``topology``. ``constraints``: the
    choices that the user fixed. ``precision``: number format of the computation, such as ``"bf16"``; ``None``: the
    format of most weights. ``optimizer``: name of the optimizer, such as ``"adamw"``.
    """

    @property
    def program(self) -> Program: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def devices(self) -> tuple[int, ...]: ...
    @property
    def constraints(self) -> Constraints: ...
    @property
    def precision(self) -> str | None: ...
    @property
    def optimizer(self) -> str: ...


@dataclass(frozen=True)
class ProgramOnDevices:
    """A program (``program``) and the devices that it runs on, for simulation without a complete plan.

    ``topology``: the cluster. ``devices``: for each rank the index of its device in ``topology``. ``constraints``: the
    choices that the user fixed. ``precision``: number format of the computation, such as ``"bf16"``; ``None``: the
    format of most weights. ``optimizer``: name of the optimizer, such as ``"adamw"``.
    """

    program: Program
    topology: Topology
    devices: tuple[int, ...]
    constraints: Constraints
    precision: str | None
    optimizer: str


@dataclass(frozen=True)
class SimulatedStep:
    """Simulation of one step of one pipeline. A pipeline is the ranks with the same index along the data-parallel axis
    ``dp``.

    ``timeline``: when each instruction runs. ``durations``: the seconds of the instructions. ``facts``: figures derived
    from the program, such as bytes of values, for the number of microbatches of this pipeline. ``places``: the indices
    along ``dp`` of all pipelines that behave like this one, including its own.
    """

    timeline: Timeline
    durations: PlanDurations
    facts: ProgramFacts
    places: tuple[int, ...]


def simulate_plan(plan: HasProgram, facts: ProgramFacts | None = None) -> SimulatedStep:
    """Simulate one step of ``plan``, including the optimizer update. Return the result for the slowest pipeline (the
    ranks of one index along the data-parallel axis): its timeline, with the duration of each instruction. ``facts``:
    figures derived from the plan's program, such as the bytes of its values; ``None``: they are computed.
    """
    overlap = steps_overlap(plan)
    found = [
        SimulatedStep(simulate(own.program, durations, facts=own, overlap_steps=overlap), durations, own, places)
        for durations, own, places in _list_pipelines(plan, facts or ProgramFacts(plan.program))
    ]
    return max(found, key=lambda each: each.timeline.step_time)


def simulate_plan_seconds(plan: HasProgram, facts: ProgramFacts | None = None) -> float:
    """Return the simulated seconds of one step of ``plan``, including the optimizer update. This is faster than
    :func:`simulate_plan`, which also builds a timeline. ``facts``: figures derived from the plan's program, such as the
    bytes of its values; ``None``: they are computed.
    """
    overlap = steps_overlap(plan)
    pipelines = _list_pipelines(plan, facts or ProgramFacts(plan.program))
    return max(simulate_step_time(own, durations, overlap_steps=overlap) for durations, own, _ in pipelines)


def _list_pipelines(
    plan: HasProgram, facts: ProgramFacts
) -> Iterator[tuple[PlanDurations, ProgramFacts, tuple[int, ...]]]:
    """Yield three values for each distinct pipeline of ``plan``: the durations of its instructions, figures derived
    from its program (such as bytes of values), and the indices of all pipelines that are equal to it. A pipeline is the
    ranks with one index along the data-parallel axis. ``facts``: the figures for the plan's program, with its own
    number of microbatches."""
    if not plan.program.data_shares:
        yield PlanDurations(plan, facts=facts), facts, tuple(range(plan.program.size("dp")))
        return
    alike: dict[tuple[int, tuple[Seats, ...]], list[int]] = {}
    machine = PlanDurations(plan).machine
    apart = plan.program.zero < 2  # under ZeRO 2 and 3 replicas wait for the slowest in every microbatch
    for place, seats in enumerate(machine.pipelines):
        alike.setdefault((plan.program.data_shares[place], seats if apart else machine.seats), []).append(place)
    for (share, seats), places_of in alike.items():
        own = facts.restrict_to_share(share)
        yield PlanDurations(plan, seats, facts=own), own, tuple(places_of)


def steps_overlap(plan: HasProgram) -> bool:
    """Return whether a rank of ``plan`` may begin a step before all other ranks have finished the previous one. The
    constraint ``overlap_steps`` must allow it, and the pipeline schedule must split backwards."""
    return plan.constraints.overlap_steps and is_split(plan.program.schedule)


def plan_timeline(plan: Plan) -> Timeline:
    """Return the timeline of one simulated step of ``plan`` on the slowest data-parallel rank: when each instruction of
    each stage runs."""
    return simulate_plan(plan).timeline


@dataclass(frozen=True)
class StageSeconds:
    """The time that a pipeline stage computes in one step, over all microbatches, including collectives inside blocks
    (such as layers). ``forward``: seconds of forwards. ``backward``: seconds of backwards, including recomputation; 0
    for inference."""

    forward: float
    backward: float


def stage_seconds(plan: Plan) -> tuple[StageSeconds, ...]:
    """Return, for each pipeline stage of ``plan``, the seconds of its forwards and of its backwards (with
    recomputation), over all microbatches of one step. Waiting and communication between stages are not included. If
    pipelines (data-parallel ranks) differ, the seconds are those of the slowest pipeline."""
    durations = simulate_plan(plan).durations if plan.data_shares else PlanDurations(plan)
    train = plan.program.objective == "train"
    result = []
    for s, stage in enumerate(plan.program.stages):
        ahead = [durations.call(s, i, "F") for i in range(len(stage.calls))]
        back = [durations.call(s, i, "B") for i in range(len(stage.calls))] if train else []
        again = [ahead[i] for i in stage.checkpoint_calls] if train else []
        m = plan.program.num_microbatches
        result.append(StageSeconds(m * sum(ahead), m * (sum(back) + sum(again))))
    return tuple(result)


class PlanDurations:
    """Durations of the instructions of a plan in seconds, as the simulator of programs needs them.

    ``plan``: the program and its devices. ``seats``: for each stage, the device types, speeds and communication groups
    of the ranks to simulate; ``None``: the slowest ranks of each stage. ``facts``: figures derived from the plan's
    program, such as the bytes of its values; ``None``: they are computed.
    """

    def __init__(
        self, plan: HasProgram, seats: tuple[Seats, ...] | None = None, facts: ProgramFacts | None = None
    ) -> None:
        self.plan = plan
        self.facts = facts or ProgramFacts(plan.program)
        self._seats = seats
        self._copied: dict[tuple[int, tuple[str, ...]], tuple[float, float]] = {}
        precision = plan.precision or common_precision(plan.program)
        ep, etp = plan.program.size("ep"), plan.program.etp
        self.topology = rate_cluster(plan.topology, precision)
        given = plan.constraints
        device = torch_device(plan.topology)
        how = OURS.executed(given.execution, device, given.overlap_tensor, given.fp8_scaling)
        self.machine = PlacedMesh(
            self.topology, plan.program.mesh, precision, plan.devices, ep=ep, etp=etp, profile=how
        )

    def call(self, stage: int, call: int, part: Part) -> float:
        """Return the seconds of one call of a block, such as a layer. Full recomputation is not included. ``stage``:
        index of the pipeline stage. ``call``: position of the call in the stage, from 0. ``part``: ``F`` (forward),
        ``B`` (backward), or one half of it: ``I`` (input gradients) or ``W`` (weight gradients)."""
        here = self.plan.program.stages[stage]
        cost = self.costs[stage][here.calls[call].block]
        again = cost.selective_s if call in here.selective_calls else 0.0
        weights, gradients = self._compute_copy_seconds(stage, call)
        seconds: dict[Part, float] = {
            "F": cost.forward_total_s + weights,
            "B": cost.backward_total_s + again + weights + gradients,
            "I": cost.backward_total_s - cost.later_s + again + weights,
            "W": cost.later_s + gradients,
        }
        return seconds[part]

    def _compute_copy_seconds(self, stage: int, call: int) -> tuple[float, float]:
        """Return two numbers: the seconds in which a block call (such as a layer) copies its weights out of gathered
        buffers, and the seconds in which it copies its gradients into buffers to be scattered. ``stage``: index of the
        pipeline stage. ``call``: position of the call in the stage. Both results are 0 below ZeRO-3."""
        program = self.plan.program
        if program.zero < 3:
            return 0.0, 0.0
        states = program.stages[stage].calls[call].states
        if (stage, states) not in self._copied:
            shared = [s for s in states if math.prod(map(program.size, zero_axes(program, (s,)))) > 1]
            with_gradient = [s for s in shared if s in self.facts.with_gradient]
            self._copied[stage, states] = (
                max(
                    sum(copied_s(self.facts.state_bytes(s), d) for s in shared) for d in self._find_stage_devices(stage)
                ),
                max(
                    sum(copied_s(self.facts.gradient_bytes(s), d) for s in with_gradient)
                    for d in self._find_stage_devices(stage)
                ),
            )
        return self._copied[stage, states]

    def _find_stage_devices(self, stage: int) -> list[DeviceType]:
        """Return the types of the devices on which a pipeline stage runs. ``stage``: index of the stage."""
        return self.machine.devices_of(stage)

    def slowdown(self, stage: int) -> float:
        """Return the factor by which a computation and a collective of a pipeline stage each take longer while both
        run. ``stage``: index of the stage."""
        return max(device.overlap_slowdown for device in self._find_stage_devices(stage))

    def update(self, stage: int) -> float:
        """Return the seconds in which the optimizer updates the parameters of a pipeline stage: on the device, and on
        the host for states that are kept in host memory. ``stage``: index of the stage."""
        program, optimizer = self.plan.program, self.plan.optimizer
        hosted, costs = list_host_states(program, stage), []
        for name in self.facts.states_by_stage[stage]:
            if name not in self.facts.with_gradient:
                continue
            state = program.states[name]
            piece, itemsize = self.facts.piece_bytes(name), dtype_of(state.dtype).itemsize
            held = optimizer_bytes(piece // itemsize, itemsize, optimizer)
            costs.append(
                StateCost(
                    piece,
                    self.facts.gradient_piece_bytes(name),
                    held,
                    master=held - moment_bytes(piece // itemsize, itemsize, optimizer),
                    hosted=name in hosted,
                    disk=name in hosted and "disk" in program.offload,
                )
            )
        on_device = max(update_time(costs, device) for device in self._find_stage_devices(stage))
        return on_device + update_seconds(costs, self.machine.host(stage) or BOUNDLESS)

    def transfer(self, source: int, target: int, nbytes: int) -> float:
        """Return the seconds to send ``nbytes`` bytes from a rank of one pipeline stage to a rank of another.
        ``source``, ``target``: indices of the stages."""
        adjacent = abs(source - target) == 1
        link = self.machine.links[min(source, target)] if adjacent else self.machine.link(source, target)
        return message_time(nbytes, link)

    def host(self, stage: int, nbytes: int) -> float:
        """Return the seconds to copy ``nbytes`` bytes between device and host memory on a rank of a pipeline stage; 0
        if the topology describes no host memory. ``stage``: index of the stage."""
        return (self.machine.host(stage) or BOUNDLESS).time(nbytes)

    def share(self, op: Sharing, axes: tuple[str, ...], nbytes: int, stage: int) -> float:
        """Return the seconds of the collective ``op``, such as an all-gather or reduce-scatter of parameters or
        gradients, over the mesh axes ``axes``. ``nbytes``: bytes of the whole tensor. ``stage``: index of the pipeline
        stage whose ranks run it.
        """
        return collective_time(op, nbytes, self._find_axis_groups(axes)[stage])

    def coding(self, stage: int, compression: Compression, nbytes: int) -> float:
        """Return the seconds to compress and decompress ``nbytes`` bytes of gradients. ``stage``: index of the pipeline
        stage; its slowest device counts. ``compression``: the number format in which gradients are sent."""
        return max(coding_time(compression, nbytes, device) for device in self.machine.devices_of(stage))

    def posting(self, stage: int, op: str) -> float:
        """Return the seconds in which a rank cannot compute because it starts a transfer or collective: always 0,
        because the device computes while its host starts the next operation. ``stage``: index of the pipeline stage.
        ``op``: name of the instruction."""
        return 0.0  # the device computes while its host issues the next collective

    def _find_axis_groups(self, axes: tuple[str, ...]) -> tuple[Group, ...]:
        """Return, for each pipeline stage, the slowest communication group over ``axes``. ``axes``: names of mesh axes,
        such as ``dp``, or of the axes of the meshes for experts (such as ``ep``) and for hybrid sharding."""
        if any(axis in HYBRID_AXES for axis in axes):
            return self.machine.grid_groups(self.plan.program.grid(axes), axes)
        return self.machine.stage_groups(*(_EXPERT_AXES.get(axis, axis) for axis in axes))

    def all_reduce(self, axes: tuple[str, ...], nbytes: int, stages: tuple[int, ...]) -> float:
        """Return the seconds to all-reduce ``nbytes`` bytes over the mesh axes ``axes``, on the pipeline stage of
        ``stages`` on which it takes longest. ``stages``: indices of pipeline stages; empty: all stages. If ``axes`` is
        empty, the all-reduce is between one rank of each of ``stages`` instead; it takes 0 seconds if there are fewer
        than two."""
        if axes:
            groups = self._find_axis_groups(axes)
            return max(collective_time("all_reduce", nbytes, groups[stage]) for stage in stages or range(len(groups)))
        if len(stages) < 2:
            return 0.0
        return collective_time("all_reduce", nbytes, replace(self.machine.group("pp"), size=len(stages)))

    @cached_property
    def costs(self) -> tuple[dict[str, CallCost], ...]:
        """Return one dict for each pipeline stage: name of a block (such as a layer) -> cost of one call of it, in
        seconds and bytes."""
        return self._price_calls({name: block.pieces for name, block in self.plan.program.blocks.items()})

    def choose_pieces(self) -> dict[str, PieceCounts]:
        """Return name of a block (such as a layer) -> the numbers of pieces into which its collectives are cut, so that
        they overlap with matrix products. The constraints of the plan and the estimated times decide. If pipeline
        stages differ, a collective is cut only if all stages gain, into the smallest number of pieces."""
        found: dict[str, PieceCounts] = {}
        for stage, costs in zip(self.plan.program.stages, self._price_calls(None), strict=True):
            for name in dict.fromkeys(call.block for call in stage.calls):
                here, other = costs[name].pieces, found.get(name, costs[name].pieces)
                found[name] = PieceCounts(*map(min, here, other))
        return found

    def choose_fp8(self) -> frozenset[str]:
        """Return the names of the blocks (such as layers) whose products with weights are estimated to be faster in
        fp8, or NVFP4, on all pipeline stages. The plan's program must not yet have products in this format."""
        slower: set[str] = set()
        used: set[str] = set()
        for stage, costs in zip(self.plan.program.stages, self._price_calls(None, fp8=True), strict=True):
            names = {call.block for call in stage.calls}
            used |= names
            slower |= {name for name in names if not costs[name].fp8}
        return frozenset(used - slower)

    def _price_calls(
        self, pieces: Mapping[str, PieceCounts] | None, fp8: bool = False
    ) -> tuple[dict[str, CallCost], ...]:
        """Return one dict for each pipeline stage: name of a block (such as a layer) -> cost of one call of it, in
        seconds and bytes. ``pieces``: for each block, the numbers of pieces into which its collectives are cut to
        overlap with matrix products; ``None``: the numbers are chosen by the estimated times. ``fp8``: whether products
        with weights may be priced in fp8 although the program computes them in a wider format."""
        program = self.plan.program
        train, again = program.objective == "train", partial(_find_recomputed_nodes, program)
        costs = CallCostCache(self.blocks, self.topology, train, again, pieces=pieces)
        spread = self._expert_spread
        if fp8:
            spread = replace(spread, fp8=find_scaling(self.plan.precision or "", spread.profile))
        return tuple(costs.of_stage(seats, spread) for seats in self._seats or self.machine.seats)

    @property
    def _expert_spread(self) -> Spread:
        """Return how the experts of the plan's mixture-of-experts layers are distributed over ranks: the group of ranks
        that share the experts, and the largest number of experts in a layer."""
        program = self.plan.program
        regions = {name: expert_region(block).states for name, block in self.blocks.items()}
        num_experts = 0
        for call in (c for stage in program.stages for c in stage.calls):
            bound = zip(program.blocks[call.block].states, call.states, strict=True)
            of_experts = [
                program.states[name].shape for placeholder, name in bound if placeholder in regions[call.block]
            ]
            num_experts = max([num_experts, *(shape[0] for shape in of_experts if shape)])
        experts = self.machine.spread.experts if program.size("ep") > 1 else Group(1)
        return Spread(experts=experts, num_experts=num_experts, divided=True, profile=self.machine.profile)

    @cached_property
    def passing(self) -> dict[str, int]:
        """Return name of a block (such as a layer) -> bytes of temporary memory that a call of it needs besides its
        outputs."""
        train = self.plan.program.objective == "train"
        return {name: kept_by(block, train).passing for name, block in self.blocks.items()}

    @cached_property
    def blocks(self) -> dict[str, Block]:
        """Return the program's blocks (such as layers) with their graphs: name -> block. A placeholder is marked as
        needing a gradient if it needs one in any call of the block."""
        program = self.plan.program
        train = program.objective == "train"
        needing: dict[str, set[str]] = {name: set() for name in program.blocks}
        for call in (c for stage in program.stages for c in stage.calls):
            graph = program.blocks[call.block]
            bound = [*zip(graph.states, call.states, strict=True), *zip(graph.inputs, call.inputs, strict=True)]
            needing[call.block] |= {
                placeholder for placeholder, name in bound if train and _has_gradient(program, name)
            }
        blocks = {}
        for name, data in program.blocks.items():
            blocks[name] = block_from_data(name, data.nodes, data.states, data.inputs)
            mark_block(blocks[name], needing[name])
        return blocks


def _find_recomputed_nodes(program: Program, block: Block, sent: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes in the graph of ``block`` (such as a layer) that ``program`` runs again in backward under
    selective recomputation. ``sent``: not used; it is part of the signature that :class:`CallCostCache` expects."""
    names = set(program.blocks[block.name].again)
    return frozenset(node for node in block.graph.nodes if node.name in names)


def _has_gradient(program: Program, name: str) -> bool:
    """Return whether a gradient flows to the parameter or value ``name`` of ``program``."""
    if name in program.states:
        return program.states[name].kind == "parameter" and program.states[name].requires_grad
    return name in program.values and program.values[name].requires_grad
