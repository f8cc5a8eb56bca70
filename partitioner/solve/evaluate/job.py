"""Define the planning job: model, batch, cluster and constraints, and figures derived from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost.call.call_cost import call_costs
from partitioner.cost.call.states import gradient_bytes
from partitioner.cost.step.placed_mesh import PlacedMesh
from partitioner.errors import CapacityError
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.layouts import Layout
from partitioner.passes.ir.model import FoldedModel
from partitioner.solve.evaluate.pinned_layout import PinnedLayout
from partitioner.solve.sharding.expert_parallel import expert_states, regions_of, spread_batch
from partitioner.solve.sharding.sharding import ShardingSolution
from partitioner.topology import Topology


@dataclass(frozen=True)
class CompanionProgram:
    """A further program of a plan, such as an evaluation, that uses the parameters and buffers in the layout of the
    plan's main program, such as training. It cannot run in every layout, so a layout is searched in which both programs
    can run.

    ``job``: the planning problem of the further program. ``weight``: how often it is executed for each execution of the
    main program. ``inputs``: name of an input -> layouts over ``tp`` that the input may have; other inputs are
    replicated."""

    job: Job
    weight: float = 1.0
    inputs: Mapping[str, Collection[Layout]] = field(default_factory=dict[str, Collection[Layout]])


@dataclass(frozen=True)
class Job:
    """Everything that a plan is searched for: the model, the batch, the cluster and the constraints.

    - ``model``: the model as calls of blocks (equal layers share one block). Its graphs are for the whole batch, or for
      one group of samples if samples interact within groups. The graphs are marked with the gradients that they need.
    - ``global_batch``: number of samples of a step. ``train``: whether the plan is for training. ``precision``: number
      format of most of the work, such as ``"bf16"``. ``batch``: the layouts that split the batch into microbatches and
      data-parallel parts. ``profile``: how the plan is executed, such as the framework and its kernels.
    - ``reserve``: bytes of every rank's memory that stay free. ``reserves``: mesh candidate -> further reserved bytes.
      ``refused``: mesh candidate -> error to raise, for candidates whose emitted programs are known not to fit.
      ``unfollowed``: mesh candidate -> error to raise, for candidates in whose layout a further program of the plan,
      such as an evaluation, cannot run; a key may also be :attr:`MeshCandidate.axes`, the mesh sizes, which excludes
      all candidates with these sizes. ``simulated``: mesh candidate -> simulated seconds of a step, for candidates
      whose programs take longer than their estimates.
    - ``layout``: if the main program of the same plan exists already, the layout of its parameters and buffers, which
      has to be kept; otherwise ``None``.
    - ``further_samples``, ``further_positions``: for the further programs that will run in the layout of this one, the
      numbers of samples in a batch and of positions in a sample. ``companions``: the further programs that are sharded
      together with this one, because they cannot run in every layout of this program.

    ``topology``: the cluster. ``constraints``: the choices that the user fixed. ``optimizer``: name of the optimizer,
    such as ``"adam"``."""

    model: FoldedModel
    batch: ShardingSolution
    global_batch: int
    topology: Topology
    constraints: Constraints
    train: bool
    optimizer: str
    precision: str  # type of most of the work: "bf16", "fp32", ...
    profile: ExecutionProfile = OURS
    further_samples: tuple[int, ...] = ()
    further_positions: tuple[int, ...] = ()
    reserve: int = 0
    reserves: Mapping[MeshCandidate, int] = field(default_factory=dict[MeshCandidate, int])
    refused: Mapping[MeshCandidate, CapacityError] = field(default_factory=dict[MeshCandidate, CapacityError])
    simulated: Mapping[MeshCandidate, float] = field(default_factory=dict[MeshCandidate, float])
    layout: PinnedLayout | None = None
    companions: tuple[CompanionProgram, ...] = ()
    unfollowed: Mapping[MeshCandidate | tuple[int, ...], PartitionError] = field(
        default_factory=dict[MeshCandidate | tuple[int, ...], PartitionError]
    )

    def dressed(self, machine: PlacedMesh, candidate: MeshCandidate) -> PlacedMesh:
        """Return a copy of ``machine`` with the settings that decide costs: settings of the candidate (experts, ZeRO)
        and of this planning problem (precision, reserved memory, execution profile). ``machine``: the topology with the
        candidate's mesh laid over it. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        return replace(
            machine,
            precision=self.precision,
            ep=candidate.ep,
            etp=candidate.etp,
            zero=candidate.zero,
            dp_shard=candidate.dp_shard,
            gradient_bytes=self.gradient_bytes,
            profile=self.profile,
            num_experts=max(self.experts.values(), default=0),
            reserve=self.reserve + self.reserves.get(candidate, 0),
        )

    @property
    def samples(self) -> int:
        """Return the number of samples for which the model's graphs were captured: the size of one group if the user
        gave a size of groups of interacting samples, otherwise the global batch."""
        return self.constraints.group_size or self.global_batch

    @cached_property
    def expert_batch(self) -> ShardingSolution:
        """Return the layouts that split the batch into microbatches and data-parallel parts if experts are distributed
        over ranks. Ranks with different samples can hold different experts only if the layouts shard the experts' work
        by rows (tokens). If the layouts ``batch`` do this, or if no layouts can, the result is ``batch``."""
        if self.constraints.group_size is not None:
            return self.batch  # nothing is cut within a group
        return spread_batch(self.model, self.batch, self.global_batch)

    @cached_property
    def gradient_bytes(self) -> int:
        """Return the total bytes of all gradients of the unsharded model."""
        short = self.profile.short_gradients
        return sum(gradient_bytes(s.spec, short) for s in self.model.states.values() if s.requires_grad)

    @cached_property
    def experts(self) -> Mapping[str, int]:
        """Return the parameters that belong to experts of a mixture: name -> number of experts of the parameter's
        layer. Empty for a model without experts."""
        return {name: count for name, (_, count) in expert_states(self.model, regions_of(self.model)).items()}

    @cached_property
    def flops(self) -> float:
        """Return the FLOPs of all matrix products in one step of the unsharded model, forward and (in training)
        backward."""
        total = 0.0
        for name, block in self.model.blocks.items():
            cost = call_costs(block, self.topology.device_type(0), {}, train=self.train)
            total += self.model.num_calls(name) * (cost.flops + cost.backward_flops)
        return total * (self.global_batch // self.samples)
