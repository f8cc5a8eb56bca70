"""The problem of cutting calls into stages: the calls, and what holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.calls import CallCost
from partitioner.solve.pipelines import Counts, stage_in_flight
from partitioner.topology.parts import Link

Recompute = Literal["none", "selective", "full"]


class AtEnds(NamedTuple):
    """Bytes of a call's sharded states at the ends of a stage. ``last``: while it runs backward as the last call of a
    stage, all else that is there for a moment included; ``lingering``: of its gradients, where it is the first, until
    then; ``closing``: where its gradients are sent at the end of a backward, which has freed all else."""

    last: float = 0.0
    lingering: float = 0.0
    closing: float = 0.0


NOTHING_MORE = AtEnds()


@dataclass(frozen=True)
class StageCall:
    """A call that is to be placed. ``inputs``, ``outputs``: names of the values that stages pass on or keep, by the
    places of ``cost``; ``states``: names. ``index`` is its place among the model's calls. ``gathered_bytes``: of its
    own weights and of those of the calls beside it, gradients included, while it runs; ``at_ends``: see there."""

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
        """What is there for a moment, besides what is kept."""
        return self.cost.working_bytes + self.gathered_bytes


@dataclass(frozen=True)
class Pace:
    """What calls take on the devices of a stage: ``costs`` by the places of the calls, of which only the seconds count,
    and of the calls that every stage runs for itself."""

    costs: tuple[CallCost, ...]
    overhead: CallCost = field(default_factory=CallCost)


@dataclass(frozen=True)
class StageProblem:
    """The calls, and what holds them.

    ``state_bytes``: what a state takes on a rank, with its gradient and optimizer states; ``late_bytes``: what of it
    comes only as the one backward there is gives back what forward saved. ``local``: values that are no
    call's output on another stage (model inputs, results of shared calls), never sent. ``capacity``: usable bytes of a
    rank by stage. ``links``: from each stage to the next. ``pinned``: call place -> stage. ``overhead``: the calls that
    every stage runs for itself. ``paces``: of each stage's devices; empty: all take what the calls' own costs say.
    ``bubble``: the schedule's share of the plain pipeline's fill and drain. ``repeated``: by call, whether its block
    occurs again. ``chunks``: how many of the stages are on one rank, which runs them in turns; ``flying``: what
    each stage holds at a time (:class:`partitioner.solve.pipelines.Held`), where the schedule's formula does not say.
    ``total_bytes``: of what is added up over the batch before the first forward of the stage that needs it.
    ``barred``: by stage, runs of calls that are not wanted, by start and stop. ``overlap_steps``: ranks begin the next
    step when they have ended their own part of this one.
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
        """How often a rank runs a stage, forward and backward."""
        return self.num_microbatches * self.chunks

    def pace(self, stage: int) -> Pace:
        return self.paces[stage] if self.paces else self._plain

    @cached_property
    def _plain(self) -> Pace:
        return Pace(tuple(call.cost for call in self.calls), self.overhead)

    def held(self, stage: int) -> tuple[Counts, ...]:
        """The microbatches whose backward has not begun, and those of which half has run, that a stage holds at a
        time; its memory is fullest at one of these."""
        if not self.train:
            return ((1, 0),)
        return self.flying[stage] if self.flying else self._formula(stage)

    def in_flight(self, stage: int) -> int:
        """Microbatches that a stage holds something of at a time."""
        return max(map(sum, self.held(stage)))

    def not_begun(self, stage: int) -> int:
        """Those of them of which no backward has run, at most."""
        return max(whole for whole, _ in self.held(stage))

    def half_done(self, stage: int) -> int:
        """Those of them of which half the backward has run, at most."""
        return max(half for _, half in self.held(stage))

    def _formula(self, stage: int) -> tuple[Counts, ...]:
        return stage_in_flight(self.schedule, stage, self.num_stages, self.num_microbatches)

    @cached_property
    def slim(self) -> StageProblem | None:
        """The same problem if what is quickly made again is; ``None`` where that is not asked for, or nothing is."""
        scores = any(call.cost.selective_bytes for call in self.calls)
        if not (self.train and scores and self.recompute in (None, "selective")):
            return None
        calls = tuple(replace(call, cost=call.cost.selective()) for call in self.calls)
        paces = {id(pace): replace(pace, costs=tuple(c.selective() for c in pace.costs)) for pace in self.paces}
        # where it is not asked for, whole calls may be made again besides
        whole: Recompute | None = "none" if self.recompute == "selective" else None
        return replace(self, calls=calls, paces=tuple(paces[id(pace)] for pace in self.paces), recompute=whole)

    @property
    def last_repeated(self) -> int:
        """The place behind the last call of a block that repeats: up to there "full" recomputes."""
        places = [k for k, repeats in enumerate(self.repeated) if repeats]
        return places[-1] + 1 if places else len(self.calls)
