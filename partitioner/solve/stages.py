"""Cut the sequence of calls into pipeline stages: the exact optimum under every stage's memory.

A stage is a run of consecutive calls. With ``t_s`` the time of one microbatch on stage ``s`` (forward, backward, what
it recomputes, what it waits for from its neighbours) a step of ``m`` microbatches takes ``(m - 1) max t_s + sum t_s``
(Narayanan et al. 2021, section 2.2, for uneven stages). Stage ``s`` keeps ``min(p - s, m)`` microbatches under 1F1B and
``m`` under GPipe, and runs as many of its first calls anew for their backward as memory demands.

For a limit on the maximum, the least sum is a shortest path over (stage, cut), one vectorised min-plus step per stage.
The limits that matter are few: above the least one that is feasible, the sum can fall only as far as without a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.calls import CallCost
from partitioner.cost.collectives import message_time
from partitioner.errors import CapacityError, PlanError
from partitioner.solve.segments import Segments
from partitioner.topology.parts import Link
from partitioner.units import bytes_text

Table = NDArray[np.float64]
Counts = NDArray[np.int64]
_TINY = 1e-12
_ROUNDING_BYTES = 1.0  # of sums of sizes


@dataclass(frozen=True)
class StageCall:
    """A call that is to be placed. ``inputs``, ``outputs``: names of the values that stages pass on or keep, by the
    places of ``cost``; ``states``: names. ``index`` is its place among the model's calls."""

    path: str
    cost: CallCost
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    index: int = 0


@dataclass(frozen=True)
class StageProblem:
    """The calls, and what holds them.

    ``state_bytes``: what a state takes on a rank, with its gradient and optimizer states. ``local``: values that are no
    call's output on another stage (model inputs, results of shared calls), never sent. ``capacity``: usable bytes of a
    rank by stage. ``links``: from each stage to the next. ``pinned``: call place -> stage. ``overhead``: the calls that
    every stage runs for itself. ``slowdown``: of each stage's devices over those that the costs are for.
    """

    calls: tuple[StageCall, ...]
    num_stages: int
    num_microbatches: int
    capacity: tuple[int, ...]
    links: tuple[Link, ...] = ()
    state_bytes: Mapping[str, float] = field(default_factory=dict)
    local: frozenset[str] = frozenset()
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    recompute: Literal["none", "full"] | None = None
    pinned: Mapping[int, int] = field(default_factory=dict)
    overhead: CallCost = field(default_factory=CallCost)
    slowdown: tuple[float, ...] = ()
    microbatch_size: int = 1
    tp: int = 1
    dp: int = 1
    train: bool = True

    def in_flight(self, stage: int) -> int:
        """Microbatches whose saved tensors a stage holds at a time."""
        if not self.train:
            return 1
        m, p = self.num_microbatches, self.num_stages
        return m if self.schedule == "gpipe" else min(p - stage, m)


@dataclass(frozen=True)
class StagePlan:
    """Calls ``start:stop``, of which the first ``recompute`` are run again for their backward. Seconds per microbatch;
    ``transfer_s``: waiting for neighbours, in both directions."""

    start: int
    stop: int
    recompute: int
    forward_s: float
    backward_s: float
    recompute_s: float
    transfer_s: float
    memory: int

    @property
    def time_s(self) -> float:
        return self.forward_s + self.backward_s + self.recompute_s + self.transfer_s


@dataclass(frozen=True)
class StageSplit:
    """The stages in order, and the seconds of a step's pipeline: the optimum, and thus its own bound.

    ``microbatch_s``: of one microbatch through all calls, forward and backward, whatever the stages.
    """

    stages: tuple[StagePlan, ...]
    pipeline_s: float
    microbatch_s: float = 0.0

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(stage.start for stage in self.stages[1:])


def solve_stages(problem: StageProblem) -> StageSplit:
    """The best split. Raises :class:`PlanError` with more stages than calls, :class:`CapacityError` if none fits."""
    tables = _Tables(problem)
    split = tables.best()
    if split is None:
        raise _capacity_error(problem, tables)
    return split


class _Tables:
    """Time and memory of every segment ``[i, j)`` on every stage, each of shape ``[calls + 1, calls + 1]``."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        n, p = len(problem.calls), problem.num_stages
        if p > n:
            raise PlanError(
                f"{p} pipeline stages for {n} calls that can be placed; expected at most {n}: lower pp, or let the "
                "model be split more finely"
            )
        self.segments = Segments(problem.calls, problem.state_bytes, problem.local)
        self.allowed = self._allowed()
        self.times: list[Table] = []
        self.least_memory: list[Table] = []
        for stage in range(p):
            again, most = self.recomputed(stage), self.most_recomputed()
            memory = self.memory(stage, again)
            fits = self.allowed[stage] & (memory <= problem.capacity[stage] + _ROUNDING_BYTES)
            self.times.append(np.where(fits, self.time(stage, again), np.inf))
            least = np.minimum(memory, self.memory(stage, most))
            self.least_memory.append(np.where(self.allowed[stage], least, np.inf))

    def _allowed(self) -> list[NDArray[np.bool_]]:
        """Which segments each stage may hold: not empty, and with the calls pinned to it and no others of those."""
        n = len(self.problem.calls)
        start, stop = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
        tables = []
        for stage in range(self.problem.num_stages):
            allowed = start < stop
            for call, pinned in self.problem.pinned.items():
                inside = (start <= call) & (call < stop)
                allowed = allowed & (inside == (pinned == stage))
            tables.append(allowed)
        return tables

    def slowdown(self, stage: int) -> float:
        return self.problem.slowdown[stage] if self.problem.slowdown else 1.0

    def transfers(self, stage: int) -> tuple[Table, Table]:
        """Seconds that a stage waits: for values at its start ``[i, 1]``, for gradients at its end ``[1, j]``."""
        problem, cut = self.problem, self.segments
        zero = np.zeros(len(problem.calls) + 1)
        before = after = zero
        if stage > 0:
            before = np.array([message_time(size, problem.links[stage - 1]) for size in cut.forward])
        if stage < problem.num_stages - 1 and problem.train:
            after = np.array([message_time(size, problem.links[stage]) for size in cut.backward])
        return before[:, None], after[None, :]

    def most_recomputed(self) -> Counts:
        """The most calls that each segment may recompute."""
        n = len(self.problem.calls)
        length = np.maximum(0, np.arange(n + 1)[None, :] - np.arange(n + 1)[:, None])
        return length if self.problem.train and self.problem.recompute != "none" else np.zeros_like(length)

    def recomputed(self, stage: int) -> Counts:
        """How many of its first calls each segment recomputes: all if that is pinned, else as few as memory allows.

        What is kept then is every input of theirs, and what the other calls save; for each start a prefix sum of what
        calls save says how many must go.
        """
        most = self.most_recomputed()
        if self.problem.recompute == "full" or not most.any():
            return most
        plain = self.memory(stage, np.zeros_like(most))
        excess = self.memory(stage, most, saved=False) + self.problem.in_flight(stage) * self.segments.saved
        excess = (excess - self.problem.capacity[stage]) / self.problem.in_flight(stage)
        prefix = self.segments.saved[0]
        count = np.searchsorted(prefix, prefix[:, None] + excess * (1 - _TINY), side="left")
        count = np.clip(count - np.arange(len(prefix))[:, None], 1, np.maximum(most, 1))
        return np.where(plain <= self.problem.capacity[stage], 0, np.minimum(count, most))

    def time(self, stage: int, recomputed: Counts) -> Table:
        cut, overhead = self.segments, self.problem.overhead
        time = cut.forward_s + overhead.forward_total_s
        if self.problem.train:
            time = time + cut.backward_s + self.again(recomputed)
        before, after = self.transfers(stage)
        return time * self.slowdown(stage) + before + after

    def again(self, recomputed: Counts) -> Table:
        """Seconds of the forward of each segment's first ``recomputed`` calls."""
        start = np.arange(recomputed.shape[0])[:, None]
        prefix = self.segments.forward_s[0]
        return prefix[np.minimum(start + recomputed, len(prefix) - 1)] - prefix[start]

    def memory(self, stage: int, recomputed: Counts, saved: bool = True) -> Table:
        """Peak bytes of a rank; without ``saved``, as if the calls that are not recomputed saved nothing."""
        cut, flying = self.segments, self.problem.in_flight(stage)
        total = cut.states + cut.largest_working + cut.boundary + self.problem.overhead.working_bytes
        if not self.problem.train:
            return total
        start = np.arange(recomputed.shape[0])[:, None]
        prefix = cut.saved[0]
        kept = cut.saved - (prefix[np.minimum(start + recomputed, len(prefix) - 1)] - prefix[start])
        plain = flying * (cut.saved + cut.saved_inputs)
        again = flying * (np.maximum(0.0, kept) * saved + cut.all_inputs) + cut.largest_saved
        return total + np.where(recomputed > 0, again, plain)

    def best(self) -> StageSplit | None:
        """Least ``(m - 1) max + sum``; ``None`` if nothing fits."""
        m = self.problem.num_microbatches
        free = self.path(np.inf)
        if free is None:
            return None
        if m == 1 or self.problem.num_stages == 1:
            return self.split(free)
        least_sum, lowest = self.total(free), self.lowest_limit()
        even = self.path(lowest)
        assert even is not None, lowest
        best, best_cost = min(((cuts, self.cost(cuts)) for cuts in (even, free)), key=lambda found: found[1])
        ceiling = np.inf
        while True:
            # whatever is better has a smaller maximum than these
            limit = min((best_cost - least_sum) / (m - 1), ceiling) * (1 - _TINY)
            if limit <= lowest:
                break
            cuts = self.path(limit)
            assert cuts is not None, limit
            if self.cost(cuts) < best_cost:
                best, best_cost = cuts, self.cost(cuts)
            # with a smaller maximum than this one's the sum is no smaller
            least_sum = max(least_sum, self.total(cuts))
            ceiling = self.largest(cuts)
        return self.split(best)

    def path(self, limit: float) -> list[int] | None:
        """The cuts of the least sum of times, none above ``limit``."""
        n, p = len(self.problem.calls), self.problem.num_stages
        reached = np.full(n + 1, np.inf)
        reached[0] = 0.0
        came: list[NDArray[np.int64]] = []
        for stage in range(p):
            time = self.times[stage]
            total = reached[:, None] + np.where(time <= limit, time, np.inf)
            came.append(total.argmin(axis=0))
            reached = total.min(axis=0)
        if not np.isfinite(reached[n]):
            return None
        cuts = [n]
        for stage in range(p - 1, -1, -1):
            cuts.append(int(came[stage][cuts[-1]]))
        return cuts[::-1]

    def lowest_limit(self) -> float:
        """The least possible maximum of the stages' times."""
        return float(_min_max(self.times)[0])

    def stage_times(self, cuts: list[int]) -> list[float]:
        return [float(self.times[s][cuts[s], cuts[s + 1]]) for s in range(self.problem.num_stages)]

    def largest(self, cuts: list[int]) -> float:
        return max(self.stage_times(cuts))

    def total(self, cuts: list[int]) -> float:
        return sum(self.stage_times(cuts))

    def cost(self, cuts: list[int]) -> float:
        return (self.problem.num_microbatches - 1) * self.largest(cuts) + self.total(cuts)

    def split(self, cuts: list[int]) -> StageSplit:
        stages = tuple(self.plan(s, cuts[s], cuts[s + 1]) for s in range(self.problem.num_stages))
        microbatch = self.segments.forward_s[0, -1] + (self.segments.backward_s[0, -1] if self.problem.train else 0.0)
        return StageSplit(stages, self.cost(cuts), float(microbatch))

    def plan(self, stage: int, start: int, stop: int) -> StagePlan:
        problem, cut = self.problem, self.segments
        recomputed = self.recomputed(stage)
        slow = self.slowdown(stage)
        before, after = self.transfers(stage)
        return StagePlan(
            start=start,
            stop=stop,
            recompute=int(recomputed[start, stop]),
            forward_s=(float(cut.forward_s[start, stop]) + problem.overhead.forward_total_s) * slow,
            backward_s=float(cut.backward_s[start, stop]) * slow if problem.train else 0.0,
            recompute_s=float(self.again(recomputed)[start, stop]) * slow,
            transfer_s=float(before[start, 0] + after[0, stop]),
            memory=round(float(self.memory(stage, recomputed)[start, stop])),
        )


def _min_max(tables: list[Table]) -> tuple[float, list[int]]:
    """The split of the least maximum over the stages, and where it cuts."""
    n = tables[0].shape[0] - 1
    reached = np.full(n + 1, np.inf)
    reached[0] = -np.inf
    came: list[NDArray[np.int64]] = []
    for table in tables:
        worst = np.maximum(reached[:, None], table)
        came.append(worst.argmin(axis=0))
        reached = worst.min(axis=0)
    cuts = [n]
    for step in reversed(came):
        cuts.append(int(step[cuts[-1]]))
    return float(reached[n]), cuts[::-1]


def least_shortage(problem: StageProblem) -> tuple[float, int, list[int]]:
    """Over all splits, the least that any rank can lack (bytes, negative: to spare), on which stage, and the cuts."""
    return _shortage(_Tables(problem))


def _shortage(tables: _Tables) -> tuple[float, int, list[int]]:
    excess = [m - c for m, c in zip(tables.least_memory, tables.problem.capacity, strict=True)]
    worst, cuts = _min_max(excess)
    lacking = [float(excess[s][cuts[s], cuts[s + 1]]) for s in range(len(excess))]
    return worst, int(np.argmax(lacking)), cuts


def _capacity_error(problem: StageProblem, tables: _Tables) -> PlanError:
    missing, stage, cuts = _shortage(tables)
    if not np.isfinite(missing):
        pins = ", ".join(f"{problem.calls[i].path} on stage {s}" for i, s in sorted(problem.pinned.items()))
        return PlanError(f"no split into {problem.num_stages} stages has {pins}; leave every stage at least one call")
    capacity = problem.capacity[stage]
    first, last = problem.calls[cuts[stage]].path, problem.calls[cuts[stage + 1] - 1].path
    where = f"{first} to {last}" if first != last else first
    how = "without recomputation" if problem.recompute == "none" else "even with everything recomputed"
    return CapacityError(
        f"stage {stage} of {problem.num_stages} ({where}) needs {bytes_text(capacity + missing)} of the "
        f"{bytes_text(capacity)} of a device {how}: {bytes_text(missing)} too much",
        stage=stage,
        missing_bytes=round(missing),
        advise=lambda: nearest_change(problem),
    )


def nearest_change(problem: StageProblem) -> str:
    """The first that fits, by estimate, of: recomputing, smaller microbatches, more tp, more pp, and all of these."""
    m, size = problem.num_microbatches, problem.microbatch_size
    free = replace(problem, recompute=None)
    changes: list[tuple[str, StageProblem]] = []
    if problem.recompute == "none":
        changes.append(("recompute='full'", free))
    while size > 1 and size % 2 == 0:
        size, m = size // 2, m * 2
        smaller = _scaled(free, size / problem.microbatch_size, 1.0)
        changes.append((f"microbatch_size={size}", replace(smaller, num_microbatches=m, microbatch_size=size)))
    smallest = changes[-1][1] if changes else free
    with_size = f", microbatch_size={size}" if size != problem.microbatch_size else ""
    for factor in (2, 4, 8, 16):
        tp, pp = problem.tp * factor, problem.num_stages * factor
        narrow = _scaled(smallest, 1 / factor, 1 / factor)
        changes.append((f"tp={tp}{with_size} {_room(problem, factor)}", narrow))
        if pp <= len(problem.calls) and not problem.pinned:
            changes.append((f"pp={pp}{with_size} {_room(problem, factor)}", _deeper(smallest, factor)))
            both = f"tp={tp}, pp={pp}{with_size} {_room(problem, factor**2)}"
            changes.append((both, _deeper(narrow, factor)))
    for text, changed in changes:
        if _shortage(_Tables(changed))[0] <= 0:
            return text
    return ""


def _room(problem: StageProblem, factor: int) -> str:
    """Where ``factor`` times as many ranks per replica come from."""
    if problem.dp % factor == 0:
        return f"(dp={problem.dp // factor})"
    return f"(on {factor} times as many devices)"


def _deeper(problem: StageProblem, factor: int) -> StageProblem:
    """``factor`` times as many stages, on devices like the smallest."""
    stages = problem.num_stages * factor
    link = problem.links[0] if problem.links else Link(name="", bandwidth=np.inf, latency=0.0, level=-1)
    return replace(
        problem,
        num_stages=stages,
        capacity=(min(problem.capacity),) * stages,
        links=(link,) * (stages - 1),
        slowdown=(),
    )


def _scaled(problem: StageProblem, activations: float, states: float) -> StageProblem:
    """The same problem with all tensors that depend on the batch, and all states, this much as large."""

    def cost(c: CallCost) -> CallCost:
        return replace(
            c,
            saved_bytes=c.saved_bytes * activations,
            working_bytes=c.working_bytes * activations,
            input_bytes=tuple(b * activations for b in c.input_bytes),
            output_bytes=tuple(b * activations for b in c.output_bytes),
        )

    shrunk = {id(call.cost): cost(call.cost) for call in problem.calls}
    return replace(
        problem,
        calls=tuple(replace(call, cost=shrunk[id(call.cost)]) for call in problem.calls),
        state_bytes={name: size * states for name, size in problem.state_bytes.items()},
        overhead=cost(problem.overhead),
    )
