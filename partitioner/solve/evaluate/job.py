"""The planning job: model, batch, cluster and constraints, and figures derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost.call.call_cost import call_costs
from partitioner.cost.call.recomputation import Remade
from partitioner.cost.call.states import gradient_bytes
from partitioner.cost.step.placed_mesh import PlacedMesh
from partitioner.errors import CapacityError
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.passes.ir.model import FoldedModel
from partitioner.solve.evaluate.pinned_layout import PinnedLayout
from partitioner.solve.sharding.expert_parallel import common_experts, expert_states, regions_of, spread_batch
from partitioner.solve.sharding.sharding import ShardingSolution
from partitioner.topology import Topology


@dataclass(frozen=True)
class Job:
    """The planning job.

    ``model``: the folded model of the whole batch, or of one group if samples interact within groups, marked with its
    gradients. ``profile``: how the plan is executed. ``reserve``: bytes of every rank that stay free. ``reserves``:
    further reserved bytes of single candidates. ``refused``: candidates whose programs are known not to fit.
    ``simulated``: seconds of a step of candidates whose programs take longer than their estimates. ``layout``: the
    layout of the state, if the program is a further one over the state of another.
    """

    model: FoldedModel
    batch: ShardingSolution
    global_batch: int
    topology: Topology
    constraints: Constraints
    train: bool
    optimizer: str
    precision: str  # type of most of the work: "bf16", "fp32", ...
    profile: ExecutionProfile = OURS
    reserve: int = 0
    reserves: Mapping[MeshCandidate, int] = field(default_factory=dict[MeshCandidate, int])
    refused: Mapping[MeshCandidate, CapacityError] = field(default_factory=dict[MeshCandidate, CapacityError])
    simulated: Mapping[MeshCandidate, float] = field(default_factory=dict[MeshCandidate, float])
    layout: PinnedLayout | None = None

    def dressed(self, machine: PlacedMesh, candidate: MeshCandidate) -> PlacedMesh:
        """``machine``, on which the candidate's mesh is placed, with the other settings of the candidate and the
        job."""
        return replace(
            machine,
            precision=self.precision,
            ep=candidate.ep,
            etp=candidate.etp,
            zero=candidate.zero,
            dp_shard=candidate.dp_shard,
            gradient_bytes=self.gradient_bytes,
            profile=self.profile,
            num_experts=self.num_experts,
            reserve=self.reserve + self.reserves.get(candidate, 0),
        )

    @property
    def remade(self) -> Remade:
        """The kind of nodes that selective recomputation recomputes."""
        asked = self.constraints.recompute
        return asked if asked in ("scores", "alternate") else "selective"

    @property
    def made_again(self) -> Remade | None:
        """:attr:`remade`; ``None`` if selective recomputation is excluded."""
        return None if self.constraints.recompute in ("none", "full") else self.remade

    @property
    def samples(self) -> int:
        """Number of samples in the graphs of ``model``."""
        return self.constraints.group_size or self.global_batch

    def goes_apart(self, candidate: MeshCandidate) -> bool:
        """Whether ranks of ``dp`` wait for each other only at the end of a step, so that faster ones may do more work.
        Under ZeRO 2 and 3 they wait in each microbatch."""
        return not self.model.updates and candidate.dp > 1 and candidate.zero < 2 and candidate.shares_out

    def batch_of(self, ep: int) -> ShardingSolution:
        """The split of the batch if experts are spread over ``ep`` ranks."""
        return self.batch if ep == 1 else self.expert_batch

    @cached_property
    def expert_batch(self) -> ShardingSolution:
        """:attr:`batch`, or another split if :attr:`batch` divides the experts' work otherwise than by rows."""
        if self.constraints.group_size is not None:
            return self.batch  # nothing is cut within a group
        return spread_batch(self.model, self.batch, self.global_batch)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients of the model."""
        short = self.profile.short_gradients
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
        """Number of experts in the layer with the most; 0 without experts."""
        return max((count for _, count in self._experts.values()), default=0)

    @cached_property
    def common_experts(self) -> int:
        """A number that the ranks sharing all layers' experts evenly must divide; 0 without experts."""
        return common_experts(self._experts)

    @cached_property
    def flops(self) -> float:
        """FLOPs of the matrix products of one step of the unsharded model."""
        total = 0.0
        for name, block in self.model.blocks.items():
            cost = call_costs(block, self.topology.device_type(0), {}, train=self.train)
            total += self.model.num_calls(name) * (cost.flops + cost.backward_flops)
        return total * (self.global_batch // self.samples)
