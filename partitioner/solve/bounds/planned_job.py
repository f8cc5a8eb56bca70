"""Define the attributes of a planning job (model, batch, cluster and constraints) that the lower bounds read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from partitioner.constraints import Constraints
from partitioner.execution_profile import ExecutionProfile
from partitioner.passes.ir.model import FoldedModel
from partitioner.topology.topology import Topology


class PlannedJob(Protocol):
    """The attributes of a planning job (model, batch, cluster and constraints) that the lower bounds read.

    ``samples``: the number of samples in the graphs of ``model``: the global batch, or the size of one group if samples
    interact within groups. ``profile``: how the plan is executed, such as the framework and its kernels. ``experts``:
    names of the experts' parameters."""

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
    @property
    def optimizer(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def experts(self) -> Collection[str]: ...
