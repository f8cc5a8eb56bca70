"""Define the problem of cutting calls into stages: the calls with their costs, the memory of the stages and their
links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.call.transient_bytes import NOTHING_MORE, AtEnds
from partitioner.passes.ir.hashing import SameObject
from partitioner.schedules.formulas import Counts, stage_in_flight
from partitioner.topology.hardware import Link

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class StageCall:
    """One call of a block (such as a layer) that is to be placed on a pipeline stage, with its cost.

    ``path``: the name of the module that is called, such as ``layers.3``. ``cost``: the seconds and bytes of the call.
    ``inputs``, ``outputs``: names of the values that it reads and computes, in the order in which ``cost`` lists their
    bytes. ``states``: names of the parameters and buffers that the call reads. ``index``: its position among the
    model's calls.

    Two fields count sharded weights and gradients that a rank temporarily has whole. ``gathered_bytes``: the bytes
    while the call runs: its own weights and gradients, the weights of the previous or next call that are gathered at
    the same time, and the gradients of the next call that are still being sent. ``at_ends``: three numbers of bytes for
    a call at an end of a pipeline stage. (1) For the last call of a stage: all temporary bytes during its backward. (2)
    For the first call: the bytes of its gradients that are still being sent while the last call runs the backward of
    the next microbatch; they add to number (1) of the last call. (3) For the first call: all temporary bytes after its
    backward, while its gradients are sent.
    """

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
        """Return the temporary bytes of this block call (such as a layer) while it runs: memory of its operators, of
        gathered weights and of gradients. Bytes that are kept for backward do not count."""
        return self.cost.working_bytes + self.gathered_bytes


@dataclass(frozen=True)
class Pace:
    """The costs of all block calls (such as layers) on the devices of one stage, for clusters whose stages have devices
    of different speeds. Of these costs only the seconds are used; bytes are taken from the calls of the problem.

    ``costs``: the cost of each call, in the order of the problem. ``overhead``: the cost of the calls that every stage
    runs in addition, such as the computation of a mask that all layers need.
    """

    costs: tuple[CallCost, ...]
    overhead: CallCost = field(default_factory=CallCost)


@lru_cache(maxsize=8)
def _recompute_calls_selectively(same: SameObject[tuple[StageCall, ...]]) -> tuple[StageCall, ...]:
    """Return the block calls (such as layers) with their costs under selective recomputation. The result is cached,
    because many problems have the same calls. ``same``: the calls in a wrapper that compares by identity."""
    return tuple(replace(call, cost=call.cost.selective()) for call in same.value)


@lru_cache(maxsize=256)
def _recompute_pace_selectively(same: SameObject[Pace]) -> Pace:
    """Return the costs of all block calls (such as layers) on the devices of a stage under selective recomputation.
    ``same``: the costs without selective recomputation, in a wrapper that compares by identity."""
    return replace(same.value, costs=tuple(cost.selective() for cost in same.value.costs))


@dataclass(frozen=True)
class StageEnds:
    """Lower bounds on the data-parallel collectives of one virtual stage at the ends of a step, in seconds for each
    block call (such as a layer), shape ``[calls]``. ``gathers``: all-gathers of the updated parameters. ``reductions``:
    reductions of the gradients. ``slowdown``: factor on the time of computation and of a collective while both run."""

    gathers: NDArray[np.float64]
    reductions: NDArray[np.float64]
    slowdown: float = 1.0


@dataclass(frozen=True)
class StageProblem:
    """The problem of cutting block calls (such as layers) into pipeline stages: the calls in order, the stages' memory
    and links, and the schedule.

    - ``num_stages``: number of stages. ``num_microbatches``: number of microbatches of a step. ``schedule``: name of
      the schedule.
    - ``capacity``: usable bytes of a rank, by stage. ``links``: the link from each stage to the next. ``tp``, ``dp``:
      numbers of tensor-parallel and of data-parallel ranks. ``microbatch_size``: number of samples of a microbatch.
      ``train``: whether calls have a backward.
    - ``state_bytes``: name of a parameter or buffer -> bytes on a rank, with its gradient and optimizer states.
      ``late_bytes``: the part of these bytes that is allocated only when the first backward frees activations.
      ``local``: names of values that are never sent between stages. ``total_bytes``: bytes of values that are summed
      over the whole batch by an all-reduce before the first forward. ``prologue_s``: if there are several stages, the
      seconds in which the last stage computes these values for one microbatch.
    - ``recompute``: the recomputation that is required, or ``None`` for a free choice. ``pinned``: index of a call ->
      its fixed stage. ``may_be_empty``: whether stages may have no call. ``barred``: for each stage, a mask whose entry
      ``[start, stop]`` says whether the stage must not consist of the calls ``start:stop``. ``repeated``: for each
      call, whether its block occurs more than once.
    - ``overhead``: the cost of the calls that every stage runs in addition, such as the computation of a mask that all
      layers need. ``paces``: for each stage, the costs of the calls on its devices; if empty, the calls' own costs
      apply to all stages. ``bubble``: the factor ``b`` in the formula ``(rounds - b) * slowest stage + b * sum of
      stages`` of the pipeline's seconds (``rounds`` is the number of microbatches times virtual stages of a rank): 1,
      or less with virtual stages, which shorten fill and drain. ``chunks``: number of virtual stages on a rank.
      ``flying``: for each stage, pairs of numbers of microbatches (backward not begun, between the halves of a split
      backward) that it holds at a time; empty if the schedule has a formula for them. ``overlap_steps``: whether a rank
      begins the next step when it has ended its own part of this one.
    - ``ends``: for each stage, the collectives at the ends of a step, if ranks have several virtual stages. If ``ends``
      is empty, these collectives are not known and not counted.
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
    may_be_empty: bool = False
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
    prologue_s: float = 0.0
    ends: tuple[StageEnds, ...] = ()

    @property
    def num_rounds(self) -> int:
        """Return how many times per step a rank runs one of its stages forward and backward: microbatches times virtual
        stages."""
        return self.num_microbatches * self.chunks

    def pace(self, stage: int) -> Pace:
        return self.paces[stage] if self.paces else self._unscaled_pace

    @cached_property
    def _unscaled_pace(self) -> Pace:
        return Pace(tuple(call.cost for call in self.calls), self.overhead)

    def held(self, stage: int) -> tuple[Counts, ...]:
        """Return the numbers of microbatches whose activations the stage with index ``stage`` holds at the same time,
        as pairs (backward not begun, between the two halves of a split backward). There is one pair for each time in a
        step at which the memory of the stage may peak."""
        if not self.train:
            return ((1, 0),)
        return self.flying[stage] if self.flying else self._count_formula_in_flight(stage)

    def in_flight(self, stage: int) -> int:
        """Return an upper bound on the number of microbatches whose activations the stage with index ``stage`` holds at
        a time."""
        return max(map(sum, self.held(stage)))

    def not_begun(self, stage: int) -> int:
        """Return the largest number of microbatches whose forward has run and whose backward has not begun, and whose
        activations the stage with index ``stage`` holds at a time."""
        return max(whole for whole, _ in self.held(stage))

    def half_done(self, stage: int) -> int:
        """Return the largest number of microbatches between the two halves of a split backward (for inputs, for
        weights) whose activations the stage with index ``stage`` holds at a time."""
        return max(half for _, half in self.held(stage))

    def _count_formula_in_flight(self, stage: int) -> tuple[Counts, ...]:
        return stage_in_flight(self.schedule, stage, self.num_stages, self.num_microbatches)

    @cached_property
    def slim(self) -> StageProblem | None:
        """Return a copy of this problem in which every block call (such as a layer) has its cost under selective
        recomputation, which recomputes cheap operators in backward. Return ``None`` if the problem does not allow
        selective recomputation, or if no call has such operators."""
        scores = any(call.cost.selective_bytes for call in self.calls)
        if not (self.train and scores and self.recompute in (None, "selective")):
            return None
        calls = _recompute_calls_selectively(SameObject(self.calls))
        paces = tuple(_recompute_pace_selectively(SameObject(pace)) for pace in self.paces)
        # unless recomputation is fixed, whole calls may be recomputed, too
        whole: Recompute | None = "none" if self.recompute == "selective" else None
        return replace(self, calls=calls, paces=paces, recompute=whole)

    @property
    def last_repeated(self) -> int:
        """Return the index after the last block call (such as a layer) whose block is called several times. If no block
        is called several times, return the number of calls. Only calls before this index are recomputed if the
        constraint ``recompute`` is ``"full"``."""
        places = [k for k, repeats in enumerate(self.repeated) if repeats]
        return places[-1] + 1 if places else len(self.calls)
