"""Errors of the planner that users can see. A message states what was expected, what was given, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partitioner.passes.errors import PartitionError

if TYPE_CHECKING:
    from partitioner.constraints import Constraints
    from partitioner.topology.topology import Topology


class TopologyError(PartitionError):
    """Error: the description of the hardware is malformed, inconsistent, or uses unknown names."""


@dataclass(frozen=True)
class Change:
    """A changed version of a job (model, global batch, cluster and constraints) that has no plan; the changed job has
    one. ``constraints``, ``topology`` and ``global_batch`` (in samples; ``None``: that of the inputs) are the arguments
    of ``partition`` for the changed job.

    ``text``: what was changed, for a message. ``planned_only``: techniques of the new plan that the runtime of this
    version cannot execute, by name; empty if it can execute the plan.
    """

    text: str
    constraints: Constraints
    topology: Topology
    global_batch: int | None = None
    planned_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """Why a job (model, global batch, cluster and constraints) has no plan, and which changes of the job would make one
    possible.

    ``conflict``: a minimal set of the user's constraints that exclude each other, as texts; empty if there is none.
    ``changes``: the changes with which the job has a plan and which need the least effort of the user, in ascending
    order of the effort.
    """

    conflict: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


class InfeasibleError(PartitionError):
    """Error: the job (model, global batch, cluster and constraints) has no plan. ``message``: the reason. ``advise``: a
    function without arguments that searches for changes of the job and returns an :class:`Advice`; ``None``: there is
    no such search.

    :meth:`suggest` runs this search, which takes some seconds. ``str(error)`` never starts it, but lists the changes
    once they are known.
    """

    _least_conflict = 2  # a conflict of fewer constraints is not listed: the message names it already

    def __init__(self, message: str, *, advise: Callable[[], Advice] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advise = advise
        self._advice: Advice | None = None  # set by the first search for it
        self._why_none = ""  # why the search for advice failed

    def suggest(self) -> Advice:
        """Return the constraints that conflict, and the changes (such as another value of a constraint) that make a
        plan possible and need the least effort, in ascending order of the effort.

        Each change was verified by planning. Both are empty if the search finds nothing, fails, or cannot start because
        a constraint is malformed. The search takes some seconds or longer and runs once; later calls return the same
        result.
        """
        if self._advice is None:
            self._advice = Advice()
            try:
                self._advice = self.advise() if self.advise is not None else Advice()
            except Exception as error:  # advice is optional: this error stays the one that is raised
                self._why_none = f"{type(error).__name__}: {error}".partition("\n")[0]
        return self._advice

    @property
    def changes(self) -> tuple[Change, ...]:
        """Return the nearest changes that make a plan possible, nearest first. The first access searches for them,
        which takes some seconds.
        """
        return self.suggest().changes

    @property
    def conflict(self) -> tuple[str, ...]:
        """Return a minimal set of the user's constraints that exclude each other, as texts; empty if there is none. The
        first access searches for it, which takes some seconds.
        """
        return self.suggest().conflict

    def __str__(self) -> str:
        """Return the message. If :meth:`suggest` was called, it is followed by the constraints that conflict, and by
        the smallest changes of constraints with which there is a plan."""
        text, advice = self.message, self._advice
        if advice is None:
            return (
                text
                if self.advise is None
                else f"{text}; error.suggest() searches for the smallest change with which there is a plan"
            )
        if len(advice.conflict) >= self._least_conflict:
            text += f"; in conflict: {', '.join(advice.conflict)}"
        if advice.changes:
            return f"{text}; nearest change that fits: {'; or '.join(c.text for c in advice.changes)}"
        if self._why_none:
            return (
                f"{text}; the search for a change with which there is a plan failed, which is a fault of the "
                f"planner: {self._why_none}"
            )
        return text


class ConstraintError(InfeasibleError):
    """Error: a constraint is malformed, or the model, the batch or the topology cannot satisfy it."""


class PlanError(InfeasibleError):
    """Error: no plan satisfies the request, or this version cannot execute the plan."""


class TimeLimitError(PlanError):
    """Error: the time limit ended the search before any plan was found. A plan may exist."""


class CapacityError(PlanError):
    """Error: no plan fits in memory.

    ``shortage``: what is missing, as text. ``stage``: index of the pipeline stage that exceeds its memory most.
    ``missing_bytes``: bytes that each of its ranks lacks. ``at_least``: whether ``missing_bytes`` is only a lower
    bound; the stage is then not known. ``advise``: a function without arguments that searches for changes with which a
    plan exists; ``None``: there is no such search.
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
