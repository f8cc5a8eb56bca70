"""Step time of a pipeline schedule if several ranks compete for the processor cores of a node.

All ranks of a node that compute at the same time share its cores evenly. A rank that waits for a collective, a message
or another stage uses no core. A rank that computes slows the others down, even if the step time does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partitioner.schedules.actions import Timetable
from partitioner.schedules.csv_table import ScheduleTable
from partitioner.schedules.formulas import shorten_timetable
from partitioner.schedules.makespan import PARTS, Phases

_MOST_ACTIONS = 2000  # actions to simulate

_EPSILON = 1e-12  # seconds; work below it has ended


@dataclass(frozen=True)
class VirtualStageTime:
    """Seconds that one microbatch takes in a virtual stage (the part of the model that one action of a pipeline rank
    runs), divided into computation and waiting.

    ``computing``: seconds of computation on a processor core of its own. ``waiting``: seconds of communication, which
    uses no core. Both have one number for the forward and one for each half of the backward.
    """

    computing: Phases
    waiting: Phases


@dataclass(frozen=True)
class NodeCores:
    """The pipeline ranks and the processor cores of each node.

    ``ranks[s]``: index of a node -> number of ranks of pipeline stage ``s`` on the node. ``room``: index of a node ->
    number of ranks that can compute on the node at full speed at the same time, possibly fractional; a node that is not
    in ``room`` has cores for all its ranks.
    """

    ranks: tuple[Mapping[int, int], ...]
    room: Mapping[int, float]

    def speeds(self, stages: Sequence[int]) -> list[float]:
        """Return the relative speed of each of several pipeline stages while all of them compute at the same time; 1.0
        is the speed of a rank with a core of its own. A stage on several nodes has the speed of its slowest node.
        ``stages``: indices of the stages; the result has their order."""
        crowd = dict.fromkeys(self.room, 0)
        for stage in stages:
            for node, count in self.ranks[stage].items():
                if node in crowd:
                    crowd[node] += count
        share = {node: min(1.0, self.room[node] / max(1, count)) for node, count in crowd.items()}
        return [min((share[node] for node in self.ranks[s] if node in share), default=1.0) for s in stages]


def seconds_in_turns(
    schedule: str | ScheduleTable,
    m: int,
    v: int | None,
    works: Sequence[VirtualStageTime],
    cores: NodeCores,
    train: bool = True,
) -> float:
    """Return the seconds that the pipeline takes for one step if the ranks of a node share its processor cores. Long
    steps are extrapolated from two shorter ones.

    ``schedule``: name or table of the pipeline schedule. ``m``: number of microbatches. ``v``: number of virtual stages
    (parts of the model) of each rank; ``None``: the default of the schedule. ``works``: the times of each virtual
    stage. ``cores``: the ranks and cores of each node. ``train``: whether there are backwards.
    """
    p = len(cores.ranks)
    if p == 1:
        speed = cores.speeds([0])[0]
        return m * sum(
            _get_phase_seconds(w.computing, train) / speed + _get_phase_seconds(w.waiting, train) for w in works
        )
    whole, more = shorten_timetable(schedule, p, m, v, _MOST_ACTIONS)
    taken = _ContentionSimulation(whole, works, cores, train).run()
    if more is not None:
        longer, microbatches, left = more
        taken += (_ContentionSimulation(longer, works, cores, train).run() - taken) * left / microbatches
    return taken


def _get_phase_seconds(phases: Phases, train: bool) -> float:
    """Return the seconds of one microbatch in a virtual stage: the forward and, if ``train``, also the backward.
    ``phases``: the seconds of the forward and of each half of the backward."""
    return phases.total if train else phases.forward


class _ContentionSimulation:
    """Event simulation of one step of a pipeline whose ranks share the processor cores of their node. It tracks for
    each rank whether it waits or computes, and how fast it computes given the other ranks that compute on its node.

    ``table``: the actions (forwards and backwards of one microbatch) of each rank. ``works``: the seconds of one
    microbatch in each virtual stage. ``cores``: the ranks and cores of each node. ``train``: whether backwards take
    time.
    """

    def __init__(self, table: Timetable, works: Sequence[VirtualStageTime], cores: NodeCores, train: bool) -> None:
        self.table, self.cores, self.train = table, cores, train
        self.last = len(table.ranks) - 1
        self.at = [0] * len(table.orders)
        self.waiting: dict[int, float] = {}  # rank -> seconds left before it computes
        self.computing: dict[int, float] = {}  # rank -> seconds left on a core of its own
        self.done: set[tuple[str, int, int]] = set()  # (kind, microbatch, virtual stage) of completed passes
        self.work = [
            {
                kind: (self._sum_phase_parts(work.waiting, kind), self._sum_phase_parts(work.computing, kind))
                for kind in PARTS
            }
            for work in works
        ]

    def _sum_phase_parts(self, phases: Phases, kind: str) -> float:
        """Return the seconds of one action (a forward or backward of one microbatch); 0 for a backward without
        training. ``phases``: seconds of the forward and of both halves of the backward. ``kind``: ``F`` forward, ``B``
        backward, ``I`` or ``W`` its half for input or weight gradients."""
        of_parts = phases.forward, phases.inputs, phases.weights
        return sum(of_parts[part] for part in PARTS[kind]) if self.train or kind == "F" else 0.0

    def run(self) -> float:
        """Simulate all actions (forwards and backwards of one microbatch) of all ranks. Return the seconds from the
        start of the first to the end of the last action."""
        clock = 0.0
        self._start_idle_ranks(range(len(self.at)))
        while self.waiting or self.computing:
            running = list(self.computing)
            speeds = self.cores.speeds(running)
            ahead = [self.computing[rank] / speed for rank, speed in zip(running, speeds, strict=True)]
            passed = min([*ahead, *self.waiting.values()])
            clock += passed
            for rank, speed in zip(running, speeds, strict=True):
                self.computing[rank] -= passed * speed
            for rank in list(self.waiting):
                self.waiting[rank] -= passed
                if self.waiting[rank] <= _EPSILON:
                    del self.waiting[rank]
                    self.computing[rank] = self._get_next_seconds(rank)[1]
            self._finish_actions([rank for rank in running if self.computing[rank] <= _EPSILON])
        assert all(at == len(order) for at, order in zip(self.at, self.table.orders, strict=True)), "a rank is stuck"
        return clock

    def _get_next_seconds(self, rank: int) -> tuple[float, float]:
        """Return two numbers for the next action (forward or backward of one microbatch) of the pipeline rank ``rank``:
        its seconds of waiting, and its seconds of computation on a processor core of its own."""
        action = self.table.orders[rank][self.at[rank]]
        return self.work[self.table.held[rank][action.chunk]][action.kind]

    def _start_idle_ranks(self, ranks: Sequence[int]) -> None:
        """For each pipeline rank in ``ranks`` that is idle, start its next action (forward or backward of one
        microbatch) if the inputs of this action are available.
        """
        for rank in ranks:
            idle = rank not in self.waiting and rank not in self.computing
            if idle and self.at[rank] < len(self.table.orders[rank]) and self._is_rank_ready(rank):
                self.waiting[rank] = self._get_next_seconds(rank)[0]

    def _is_rank_ready(self, rank: int) -> bool:
        """Return whether the inputs of the next action (forward or backward of one microbatch) of the pipeline rank
        ``rank`` have been computed by other virtual stages."""
        action = self.table.orders[rank][self.at[rank]]
        k, i = self.table.held[rank][action.chunk], action.microbatch
        if action.kind == "F":
            return k == 0 or ("F", i, k - 1) in self.done
        return not self.train or action.kind == "W" or k == self.last or ("B", i, k + 1) in self.done

    def _finish_actions(self, ranks: Sequence[int]) -> None:
        """Record the current action (forward or backward of one microbatch) of each pipeline rank in ``ranks`` as
        finished and move the rank to its next action. Then start all idle ranks whose inputs are ready."""
        for rank in ranks:
            del self.computing[rank]
            action = self.table.orders[rank][self.at[rank]]
            if action.kind != "W":
                kind = "F" if action.kind == "F" else "B"
                self.done.add((kind, action.microbatch, self.table.held[rank][action.chunk]))
            self.at[rank] += 1
        if ranks:
            self._start_idle_ranks(range(len(self.at)))
