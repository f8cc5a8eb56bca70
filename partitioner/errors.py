"""What users may see from the planner: each says what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from partitioner.passes.errors import PartitionError

if TYPE_CHECKING:
    from partitioner.advise.suggest import Advice, Change


class TopologyError(PartitionError):
    """A description of hardware that is malformed, contradicts itself or names what is not known."""


class InfeasibleError(PartitionError):
    """A job that has no plan.

    ``changes``: the nearest changes that give it one, the nearest first, each verified by planning; ``conflict``: a
    least set of the user's constraints that cannot hold together here. Both are looked for when first asked for, and
    empty where nothing was found or there is no job (a malformed constraint).
    """

    _least_conflict = 2  # a single one is what the message is about

    def __init__(self, message: str, *, advise: Callable[[], Advice] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advise = advise
        self.unadvised = ""  # why there is no advice, where looking for it failed

    @cached_property
    def _found_advice(self) -> Advice | None:
        try:
            return self.advise() if self.advise is not None else None
        except Exception as error:  # what is wrong is said in any case, whatever looking for a way out runs into
            self.unadvised = f"{type(error).__name__}: {error}".partition("\n")[0]
            return None

    @property
    def changes(self) -> tuple[Change, ...]:
        return self._found_advice.changes if self._found_advice is not None else ()

    @property
    def conflict(self) -> tuple[str, ...]:
        return self._found_advice.conflict if self._found_advice is not None else ()

    def __str__(self) -> str:
        text = self.message
        if len(self.conflict) >= self._least_conflict:
            text += f"; in conflict: {', '.join(self.conflict)}"
        if self.changes:
            return f"{text}; nearest change that fits: {'; or '.join(c.text for c in self.changes)}"
        if self.unadvised:
            return f"{text}; looking for a change that fits failed, which is a fault of the planner: {self.unadvised}"
        return text


class ConstraintError(InfeasibleError):
    """A constraint that the model, the batch or the topology cannot meet."""


class PlanError(InfeasibleError):
    """No plan can do what was asked, or this version cannot execute it."""


class TimeLimitError(PlanError):
    """The time limit passed before any plan was found; there may be one."""


class CapacityError(PlanError):
    """No plan fits in memory.

    ``stage`` is the pipeline stage that lacks most, ``missing_bytes`` how much each of its ranks lacks; ``at_least``:
    only that is known, and no stage.
    """

    _least_conflict = 1

    def __init__(
        self,
        shortage: str,
        *,
        stage: int = 0,
        missing_bytes: int = 0,
        at_least: bool = False,
        advise: Callable[[], Advice] | None = None,
    ) -> None:
        super().__init__(shortage, advise=advise)
        self.shortage = shortage
        self.stage = stage
        self.missing_bytes = missing_bytes
        self.at_least = at_least
