"""The problem of cutting calls into stages: the calls, the stages' memory and their links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.call.transient_bytes import NOTHING_MORE, AtEnds
from partitioner.schedules.formulas import Counts, stage_in_flight
from partitioner.topology.hardware import Link

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class StageCall:
    """A call to be placed. ``inputs``, ``outputs``: names of the values that stages pass on or keep, in the order of
    ``cost``. ``states``: names. ``index``: its position among the model's calls. ``gathered_bytes``: of its own weights
    and of its neighbours' while it runs, gradients included. ``at_ends``: see :class:`AtEnds`."""

    path: str
    cost: CallCost
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    index: int = 0
    gathered_bytes: float = 0.0
    at_ends: AtEnds = NOTHING_MORE

    @property
    def working_bytes(self) -> float:
        """Temporary bytes while the call runs, besides those that are kept."""
        return self.cost.working_bytes + self.gathered_bytes


@dataclass(frozen=True)
class Pace:
    """Costs of the calls on the devices of a stage: ``costs`` by position of the calls, of which only the seconds
    count, and ``overhead`` of the calls that every stage runs for itself."""

    costs: tuple[CallCost, ...]
    overhead: CallCost = field(default_factory=CallCost)


@dataclass(frozen=True)
class StageProblem:
    """The calls, the stages that hold them, and the schedule.

    ``state_bytes``: bytes of a state on a rank, with its gradient and optimizer states. ``late_bytes``: the part of
    them that is allocated only when the first backward frees activations. ``local``: values that are no call's output
    on another stage (model inputs, results of shared calls), never sent. ``capacity``: usable bytes of a rank by stage.
    ``links``: from each stage to the next. ``pinned``: call position -> stage. ``overhead``: the calls that every stage
    runs for itself. ``paces``: of each stage's devices; empty: the calls' own costs apply. ``bubble``: the schedule's
    share of the plain pipeline's fill and drain. ``repeated``: by call, whether its block occurs again. ``chunks``:
    number of stages on one rank, which runs them in turns. ``flying``: the microbatches that each stage holds at a time
    (:class:`partitioner.schedules.formulas.InFlightMicrobatches`), if the schedule has no formula. ``total_bytes``: of
    sums over the batch before the first forward of the stage that needs them. ``barred``: by stage, forbidden runs of
    calls, by start and stop. ``overlap_steps``: ranks begin the next step when they have ended their own part of this
    one.
    """

    calls: tuple[StageCall, ...]
    num_stages: int
    num_microbatches: int
    capacity: tuple[int, ...]
    links: tuple[Link, ...] = ()
    state_bytes: Mapping[str, float] = field(default_factory=dict)
    late_bytes: Mapping[str, float] = field(default_factory=dict)
    local: frozenset[str] = frozenset()
    schedule: str = "1f1b"
    recompute: Recompute | None = None
    pinned: Mapping[int, int] = field(default_factory=dict)
    overhead: CallCost = field(default_factory=CallCost)
    paces: tuple[Pace, ...] = ()
    microbatch_size: int = 1
    tp: int = 1
    dp: int = 1
    train: bool = True
    chunks: int = 1
    flying: tuple[tuple[Counts, ...], ...] = ()
    bubble: float = 1.0
    repeated: tuple[bool, ...] = ()
    barred: tuple[NDArray[np.bool_], ...] = ()
    overlap_steps: bool = False
    total_bytes: float = 0.0

    @property
    def num_rounds(self) -> int:
        """Number of times that a rank runs a stage, forward and backward."""
        return self.num_microbatches * self.chunks

    def pace(self, stage: int) -> Pace:
        return self.paces[stage] if self.paces else self._unscaled_pace

    @cached_property
    def _unscaled_pace(self) -> Pace:
        return Pace(tuple(call.cost for call in self.calls), self.overhead)

    def held(self, stage: int) -> tuple[Counts, ...]:
        """Counts of microbatches that a stage holds at a time: (backward not begun, between the two backward halves).
        The memory of the stage peaks at one of these pairs."""
        if not self.train:
            return ((1, 0),)
        return self.flying[stage] if self.flying else self._count_formula_in_flight(stage)

    def in_flight(self, stage: int) -> int:
        """Upper bound on the number of microbatches that a stage holds at a time."""
        return max(map(sum, self.held(stage)))

    def not_begun(self, stage: int) -> int:
        """Upper bound on the number of microbatches whose backward has not begun."""
        return max(whole for whole, _ in self.held(stage))

    def half_done(self, stage: int) -> int:
        """Upper bound on the number of microbatches between the two backward halves."""
        return max(half for _, half in self.held(stage))

    def _count_formula_in_flight(self, stage: int) -> tuple[Counts, ...]:
        return stage_in_flight(self.schedule, stage, self.num_stages, self.num_microbatches)

    @cached_property
    def slim(self) -> StageProblem | None:
        """This problem under selective recomputation; ``None`` if that is not allowed or no call has anything to
        recompute so."""
        scores = any(call.cost.selective_bytes for call in self.calls)
        if not (self.train and scores and self.recompute in (None, "selective")):
            return None
        calls = tuple(replace(call, cost=call.cost.selective()) for call in self.calls)
        paces = {id(pace): replace(pace, costs=tuple(c.selective() for c in pace.costs)) for pace in self.paces}
        # unless it is pinned, whole calls may be recomputed, too
        whole: Recompute | None = "none" if self.recompute == "selective" else None
        return replace(self, calls=calls, paces=tuple(paces[id(pace)] for pace in self.paces), recompute=whole)

    @property
    def last_repeated(self) -> int:
        """The position after the last call of a repeated block; "full" recomputes up to there."""
        places = [k for k, repeats in enumerate(self.repeated) if repeats]
        return places[-1] + 1 if places else len(self.calls)
