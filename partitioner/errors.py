"""What users may see from the planner: each says what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

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
    nearest change that fits (empty: none was found); ``advise`` looks for it when it is first asked for.
    """

    def __init__(
        self, shortage: str, *, stage: int = 0, missing_bytes: int = 0, advise: Callable[[], str] | None = None
    ) -> None:
        super().__init__(shortage)
        self.shortage = shortage
        self.stage = stage
        self.missing_bytes = missing_bytes
        self._advise = advise

    @cached_property
    def change(self) -> str:
        return self._advise() if self._advise is not None else ""

    def __str__(self) -> str:
        if self.change:
            return f"{self.shortage}; nearest change that fits: {self.change}"
        return f"{self.shortage}; no smaller microbatch, larger tp or pp was found to fit"
