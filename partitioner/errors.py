"""What users may see from the planner: each says what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partitioner.passes.errors import PartitionError

if TYPE_CHECKING:
    from partitioner.constraints import Constraints
    from partitioner.topology.topology import Topology


class TopologyError(PartitionError):
    """A description of hardware that is malformed, contradicts itself or names what is not known."""


@dataclass(frozen=True)
class Change:
    """A job near one that has no plan: give these to ``partition``.

    ``global_batch``: ``None`` where it stays the inputs'.
    ``planned_only``: what of it this version plans but does not execute.
    """

    text: str
    constraints: Constraints
    topology: Topology
    global_batch: int | None = None
    planned_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """Why a job has no plan, and what would give it one.

    ``conflict``: a least set of constraints that cannot hold together; ``changes``: nearest first.
    """

    conflict: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


class InfeasibleError(PartitionError):
    """A job that has no plan.

    :meth:`suggest` looks for changes that give it one, which takes some seconds of planning. ``str(error)`` never
    plans; it lists the changes once they were looked for.
    """

    _least_conflict = 2  # a single one is what the message is about

    def __init__(self, message: str, *, advise: Callable[[], Advice] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advise = advise
        self._advice: Advice | None = None  # once it was looked for
        self._why_none = ""  # why there is no advice, where looking for it failed

    def suggest(self) -> Advice:
        """What conflicts, and the nearest changes that give the job a plan, the nearest first.

        Each change was verified by planning. Both are empty where nothing was found, and where there is no job: a
        constraint is malformed. The search runs once, for a few seconds.
        """
        if self._advice is None:
            self._advice = Advice()
            try:
                self._advice = self.advise() if self.advise is not None else Advice()
            except Exception as error:  # the message stands, whatever looking for a change runs into
                self._why_none = f"{type(error).__name__}: {error}".partition("\n")[0]
        return self._advice

    @property
    def changes(self) -> tuple[Change, ...]:
        """The nearest changes that give the job a plan; see :meth:`suggest`."""
        return self.suggest().changes

    @property
    def conflict(self) -> tuple[str, ...]:
        """A least set of the user's constraints that cannot hold together here; see :meth:`suggest`."""
        return self.suggest().conflict

    def __str__(self) -> str:
        text, advice = self.message, self._advice
        if advice is None:
            return text if self.advise is None else f"{text}; error.suggest() looks for the nearest change that fits"
        if len(advice.conflict) >= self._least_conflict:
            text += f"; in conflict: {', '.join(advice.conflict)}"
        if advice.changes:
            return f"{text}; nearest change that fits: {'; or '.join(c.text for c in advice.changes)}"
        if self._why_none:
            return f"{text}; looking for a change that fits failed, which is a fault of the planner: {self._why_none}"
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
