"""Define the attributes of a job that the lower bounds read."""

from __future__ import annotations

from typing import Protocol

from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost.call.recomputation import Remade
from partitioner.execution_profile import ExecutionProfile
from partitioner.passes.ir.model import FoldedModel
from partitioner.topology.topology import Topology


class PlannedJob(Protocol):
    """The attributes of a planning job (model, batch, cluster and constraints) that the lower bounds read.

    ``samples``: the number of samples in the graphs of ``model``: those of the global batch, or of one group if samples
    interact within groups. ``profile``: how the plan is executed, such as the framework and its kernels.
    ``goes_apart``: function of a candidate (mesh sizes, microbatch size, schedule and ZeRO stage) that returns whether
    faster ranks of ``dp`` may compute more microbatches. ``made_again``: what selective recomputation may run again in
    the backward: ``"scores"`` (attention scores), ``"selective"`` (also other large results that take little time) or
    ``"alternate"`` (also every second matrix product); ``None``: it is excluded. ``experts``: names of the experts'
    parameters.
    """

    @property
    def model(self) -> FoldedModel: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def constraints(self) -> Constraints: ...
    @property
    def profile(self) -> ExecutionProfile: ...
    @property
    def train(self) -> bool: ...
    def goes_apart(self, candidate: MeshCandidate) -> bool: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def made_again(self) -> Remade | None: ...
    @property
    def experts(self) -> frozenset[str]: ...
