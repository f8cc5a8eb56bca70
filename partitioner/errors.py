"""What users may see from the planner: each says what was expected, what came and what to do."""

from __future__ import annotations

from passes.errors import PartitionError


class TopologyError(PartitionError):
    """A description of hardware that is malformed, contradicts itself or names what is not known."""


class ConstraintError(PartitionError):
    """A constraint that the model, the batch or the topology cannot meet."""


class PlanError(PartitionError):
    """No plan can do what was asked, or this version cannot execute it."""


class CapacityError(PlanError):
    """No plan fits in memory.

    ``stage`` is the pipeline stage that lacks most, ``missing_bytes`` how much each of its ranks lacks, ``change`` the
    nearest change that fits (empty: none was found).
    """

    def __init__(self, message: str, *, stage: int = 0, missing_bytes: int = 0, change: str = "") -> None:
        super().__init__(message)
        self.stage = stage
        self.missing_bytes = missing_bytes
        self.change = change
