"""Lower bounds on the time after the pipeline (gradient reductions and the optimizer's update), for every run of
consecutive block calls (such as layers) that may be a stage.

No bound exceeds the time that :func:`partitioner.cost.step.estimate.estimate_step` counts for stages of these calls.
With one stage on each rank the bound is close to the estimate, except that it ignores host memory and shared cores. If
the collectives at the ends of a step are simulated together with the schedule, the bound counts only the update of one
stage; the collectives are then part of the problem of cutting the calls (``bound_stage_ends``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partitioner.constraints import Constraints
from partitioner.cost.call.collectives import collective_time
from partitioner.cost.call.roofline import memory_rate
from partitioner.cost.call.states import StateCost
from partitioner.cost.step.gradient_reduction import (
    CollectiveKey,
    Reducer,
    Sizes,
    exposed_seconds,
    last_levels,
    list_reduction_schemes,
    reduced_sizes,
    reducer_of,
    reduction_of,
)
from partitioner.cost.step.placed_mesh import PlacedMesh
from partitioner.cost.step.step_ends import Delays, gathered_seconds, reduction_delays, stage_buckets
from partitioner.passes.ir.hashing import SameObject
from partitioner.schedules.formulas import is_split
from partitioner.solve.stages.lower_bound import StageDelays
from partitioner.solve.stages.problem import StageCall, StageEnds, StageProblem
from partitioner.solve.stages.split import StagePlan, stage_plans
from partitioner.solve.stages.tables import Counts, StageTables, Table, min_max

_LARGE = 1e15  # bytes, to measure the slope of a collective's time
_MOST_FOLLOWED = 60  # with more runs of calls, reductions are not simulated bucket by bucket


def least_update(problem: StageProblem, states: Mapping[str, StateCost], machine: PlacedMesh) -> float:
    """Return a lower bound in seconds on the optimizer's update, over all ways to cut the model into stages. The bound
    divides the bytes that the update reads and writes equally over all pipeline ranks, and takes the memory bandwidth
    of the fastest device of the mesh. ``states``: the cost of each parameter and buffer by name. ``problem``: the block
    calls (such as layers) of the model with their costs. ``machine``: the devices and links that the mesh is laid over.
    """
    if not problem.train:
        return 0.0
    held = {name for call in problem.calls for name in call.states if name in states}
    paces = (memory_rate("optimizer", d) for s in range(_num_ranks(machine)) for d in machine.devices_of(s))
    return sum(_get_update_seconds(states[name]) for name in held) / max(paces) / _num_ranks(machine)


def run_tails(
    problem: StageProblem,
    states: Mapping[str, StateCost],
    machine: PlacedMesh,
    constraints: Constraints,
    ranks: Sequence[int],
    within_s: float,
) -> list[Table]:
    """Return, for each stage of ``problem``, a table of lower bounds on the seconds from the end of the pipeline to the
    end of the step. The entry ``[start, stop]`` is for a stage that consists of the block calls ``start:stop`` (such as
    layers).

    An entry is infinite if every step with this stage takes more than ``within_s`` seconds, or if the other calls
    cannot be divided over the other stages. ``states``: the cost of each parameter and buffer by name. ``ranks``: the
    pipeline rank of each stage if ranks hold several (virtual) stages; otherwise empty. ``machine``: the devices and
    links that the mesh is laid over. ``constraints``: the choices that the user fixed.
    """
    tables = StageTables(problem)
    stages, m = range(problem.num_stages), problem.num_microbatches
    seconds = _on_the_way([np.where(m * tables.least_work <= within_s, times, np.inf) for times in tables.times])
    tails = [np.where(np.isfinite(times), 0.0, np.inf) for times in seconds]
    if not problem.train:
        return tails
    by_rank = is_priced_by_rank_ends(problem, machine)
    if not by_rank and problem.num_stages == _num_ranks(machine):
        waits = _ReductionTails(tables, states, machine, constraints)
        ahead = np.where(np.arange(len(problem.calls) + 1) == 0, 0.0, -np.inf)  # most seconds of the stages in front
        for stage, times in zip(stages, seconds, strict=True):
            windows = _compute_backward_windows(tables, stage, times)
            tails[stage] = np.maximum(tails[stage], waits.of_stage(stage, windows, ahead))
            reached = np.isfinite(windows) & np.isfinite(ahead)[:, None]
            more = 0.0 if is_split(problem.schedule) else windows  # split backwards end at about the same time
            ahead = np.where(reached, ahead[:, None] + np.where(reached, more, 0.0), -np.inf).max(axis=0)
    stepped = tables.segments.states_of({name: _get_update_seconds(cost) for name, cost in states.items()})
    updates = []
    for rank, tail in zip(ranks or stages, tails, strict=True):
        rate = min(memory_rate("optimizer", device) for device in machine.devices_of(rank))
        updates.append(np.where(np.isfinite(tail), stepped / rate, np.inf))
    longest = min_max(updates)[0]  # all ranks wait for the longest update; this is its least value over all cuts
    # ranks may sum gradients of tied weights while others still run backwards
    tied = 0.0 if by_rank else _least_tied(problem, states, machine, seconds, ranks or stages)
    return [tail + np.maximum(update, longest) + tied for tail, update in zip(tails, updates, strict=True)]


def bound_reduction_delays(
    problem: StageProblem, states: Mapping[str, StateCost], machine: PlacedMesh, constraints: Constraints
) -> list[StageDelays]:
    """Return, for each stage of ``problem``, lower bounds on the seconds by which gradient reductions delay the end of
    the step. For the first stage, the seconds by which gathers of parameters delay its first forward are added to the
    field ``whole``. Each rank must have one stage.

    ``states``: the cost of each parameter and buffer by name. ``machine``: the devices and links that the mesh is laid
    over. ``constraints``: the choices that the user fixed.
    """
    tables = StageTables(problem)
    seconds, waits = _on_the_way(tables.times), _ReductionTails(tables, states, machine, constraints)
    nothing = np.zeros(len(problem.calls) + 1)
    windows = (_compute_backward_windows(tables, stage, times) for stage, times in enumerate(seconds))
    return [waits.delays_of_stage(stage, window, nothing) for stage, window in enumerate(windows)]


def bound_stage_ends(
    problem: StageProblem,
    states: Mapping[str, StateCost],
    machine: PlacedMesh,
    constraints: Constraints,
    ranks: Sequence[int],
) -> tuple[StageEnds, ...]:
    """Return, for each virtual stage of ``problem``, lower bounds on two times of each block call (such as a layer):
    the seconds of gathering its updated parameters and the seconds of reducing its gradients. Start-up times, and
    weights that several calls read, are not counted. The result is empty unless these collectives are priced by
    simulating the schedule with them (:func:`is_priced_by_rank_ends`).

    ``states``: the cost of each parameter and buffer by name. ``ranks``: the pipeline rank of each virtual stage.
    ``machine``: the devices and links that the mesh is laid over. ``constraints``: the choices that the user fixed.
    """
    if not is_priced_by_rank_ends(problem, machine):
        return ()
    readers = Counter(name for call in problem.calls for name in dict.fromkeys(call.states))
    of_calls = [[states[n] for n in dict.fromkeys(c.states) if readers[n] == 1 and n in states] for c in problem.calls]
    distinct = {id(cost): cost for own in of_calls for cost in own}
    sizes = {number: reduced_sizes(cost) for number, cost in distinct.items()}
    keys = list(dict.fromkeys(key for held in sizes.values() for key in held))
    levels = {axes: last for cost in distinct.values() for axes, last in last_levels(cost).items()}
    rows = {number: np.array([held.get(key, 0.0) for key in keys]) for number, held in sizes.items()}
    num_bytes = np.array([sum((rows[id(cost)] for cost in own), np.zeros(len(keys))) for own in of_calls])
    gathers = np.array([op == "all_gather" for op, *_ in keys], dtype=bool)
    found: dict[int, StageEnds] = {}
    for rank in dict.fromkeys(ranks):
        paces = [
            np.array([_bound_seconds_per_byte(key, reducer_of(machine, rank, how), levels) for key in keys])
            for how in list_reduction_schemes(machine, constraints)
        ]
        found[rank] = StageEnds(
            np.min([num_bytes[:, gathers] @ pace[gathers] for pace in paces], axis=0),
            np.min([num_bytes[:, ~gathers] @ pace[~gathers] for pace in paces], axis=0),
            max(device.overlap_slowdown for device in machine.devices_of(rank)),
        )
    return tuple(found[rank] for rank in ranks)


def is_priced_by_rank_ends(problem: StageProblem, machine: PlacedMesh) -> bool:
    """Return whether the collectives at the ends of a step (gathers of parameters at its start, reductions of gradients
    at its end) are priced by simulating the schedule with them: there are several stages, and collectives overlap with
    computation. ``problem``: the block calls (such as layers) of the model, to be cut into stages.
    ``machine``: the devices and links that the mesh is laid over."""
    profile = machine.profile
    several = problem.num_stages > 1 and problem.train and not problem.overlap_steps
    return several and profile.overlap and profile.gather != "owner"


def _bound_seconds_per_byte(key: CollectiveKey, reducer: Reducer, levels: Mapping[tuple[str, ...], bool]) -> float:
    """Return the seconds that each further byte adds to a collective. ``key``: (name of the collective, its mesh axes,
    ZeRO stage, axes of an earlier reduce-scatter). ``reducer``: computes the seconds of collectives. ``levels``: axes
    of a reduce-scatter -> whether no other data-parallel reduction follows."""
    op, axes, *_ = key

    def seconds(num_bytes: float) -> float:
        if op == "all_gather":
            return reducer.all_gather(num_bytes, axes).seconds
        whole = op == "all_reduce"
        return (
            reducer.all_reduce(num_bytes, axes) if whole else reducer.scatter(num_bytes, axes, levels[axes])
        ).seconds

    return (seconds(_LARGE) - seconds(0.0)) / _LARGE


def tied_seconds(cost: StateCost, count: int, machine: PlacedMesh) -> float:
    """Return the seconds of all-reducing the gradient of a tied weight (one that several stages read) over the
    ``count`` ranks of a pipeline that hold it; 0 for one rank. ``cost``: the cost of the weight. ``machine``: the
    devices and links that the mesh is laid over."""
    if count < 2 or not cost.gradient:
        return 0.0
    whole = machine.group("pp")
    return collective_time("all_reduce", cost.gradient_piece, replace(whole, size=min(whole.size, count)))


def _least_tied(
    problem: StageProblem,
    states: Mapping[str, StateCost],
    machine: PlacedMesh,
    seconds: Sequence[Table],
    ranks: Sequence[int],
) -> float:
    """Return a lower bound in seconds on all-reducing the gradients of tied weights, which several block calls (such as
    layers) read, over the ranks that hold them. Each weight is assumed to be on the fewest ranks that any cut of the
    model into stages allows.

    ``states``: the cost of each parameter and buffer by name. ``seconds``: for each stage, a table whose entry
    ``[start, stop]`` is infinite if the stage may not consist of the calls ``start:stop``. ``ranks``: the rank of each
    stage. ``problem``: the block calls of the model with their costs. ``machine``: the devices and links that the mesh
    is laid over.
    """
    readers: dict[str, list[int]] = {}
    for place, call in enumerate(problem.calls):
        for name in call.states:
            readers.setdefault(name, []).append(place)
    tied = {name: places for name, places in readers.items() if len(places) > 1 and name in states}
    if not tied:
        return 0.0
    # for each stage, the calls that it may have: those in a run that is still allowed
    inside = [np.isfinite(table) for table in seconds]
    least = 0.0
    for name, places in tied.items():
        apart: list[set[int]] = []  # disjoint sets of ranks, each of which must have a reader
        for place in places:
            at = {rank for rank, runs in zip(ranks, inside, strict=True) if runs[: place + 1, place + 1 :].any()}
            if all(at.isdisjoint(other) for other in apart):
                apart.append(at)
        least += tied_seconds(states[name], len(apart), machine)
    return least


def _on_the_way(tables: Sequence[Table]) -> list[Table]:
    """Exclude stages that no division of the model can contain: return ``tables``, one for each stage, with further
    entries set to infinity. An entry ``[start, stop]`` is for a stage of the block calls ``start:stop`` (such as
    layers). It becomes infinite if the stages in front cannot hold exactly the calls before ``start``, or if the stages
    behind cannot hold exactly the calls from ``stop`` on.
    """
    some = [np.isfinite(table) for table in tables]
    ends = np.arange(len(some[0]))
    before, behind = [ends == 0], [ends == ends[-1]]
    for runs in some[:-1]:
        before.append((before[-1][:, None] & runs).any(axis=0))
    for runs in reversed(some[1:]):
        behind.append((runs & behind[-1][None, :]).any(axis=1))
    ways = zip(tables, before, reversed(behind), strict=True)
    return [np.where(start[:, None] & stop[None, :], table, np.inf) for table, start, stop in ways]


def _num_ranks(machine: PlacedMesh) -> int:
    return machine.mesh.get("pp", 1)


def _get_update_seconds(cost: StateCost) -> float:
    return 0.0 if cost.hosted else cost.update


def _compute_backward_windows(tables: StageTables, stage: int, times: Table) -> Table:
    """Return a table whose entry ``[start, stop]`` is the seconds of one backward, with recomputation, of the block
    calls ``start:stop`` (such as layers) on the stage with index ``stage``. ``times``: a table with the same indices:
    the seconds of one microbatch, forward and backward. The result is infinite where ``times`` is. ``tables``: seconds
    and bytes of all sequences of consecutive calls."""
    forward, _ = tables.seconds(stage)
    before, after = tables.transfers(stage)
    overhead = tables.problem.pace(stage).overhead.forward_total_s
    return np.maximum(0.0, times - forward - before - after - overhead)


class _ReductionTails:
    """Lower bounds on the time of gradient reductions that computation does not hide, for stages of consecutive block
    calls (such as layers).

    ``tables``: seconds and bytes of all sequences of consecutive calls. ``states``: the cost of each parameter and
    buffer by name. ``machine``: devices and groups of ranks. ``constraints``: the choices that the user fixed.
    """

    def __init__(
        self,
        tables: StageTables,
        states: Mapping[str, StateCost],
        machine: PlacedMesh,
        constraints: Constraints,
    ) -> None:
        self.tables, self.machine, self.states = tables, machine, states
        self.ways = list_reduction_schemes(machine, constraints)
        alike = {id(cost): cost for cost in states.values()}.values()
        self.keys = list(dict.fromkeys(key for cost in alike for key in reduced_sizes(cost)))
        self.last_levels = {axes: last for cost in alike for axes, last in last_levels(cost).items()}
        parts = [{n: s[key] for n, c in states.items() if key in (s := reduced_sizes(c))} for key in self.keys]
        self.sizes = [tables.segments.states_of(part) for part in parts]
        self._reduced = {name: reduced_sizes(cost) for name, cost in states.items()}
        self._known: dict[Any, tuple[float, ...]] = {}
        self._axes = list(dict.fromkeys(axes for cost in alike for axes in (cost.scatter_axes, cost.rest_axes)))
        self._reducers: dict[int, list[Reducer]] = {}
        self._described: dict[int, tuple[bool, bool, float, tuple[object, ...]]] = {}
        self._readers = Counter(name for call in tables.problem.calls for name in dict.fromkeys(call.states))
        self._equal_calls: dict[int, tuple[int, ...]] = {}
        self._delays: dict[Hashable, Delays] = {}

    def delays_of_stage(self, stage: int, windows: Table, ahead: NDArray[np.float64]) -> StageDelays:
        """Return lower bounds on the seconds by which gradient reductions of the stage with index ``stage`` delay the
        end of the step, as tables whose entry ``[start, stop]`` is for the block calls ``start:stop`` (such as layers).
        ``windows``: a table of the seconds of one backward of the calls; infinite if the stage may not consist of them.
        ``ahead``: for each possible ``start``, the most seconds of one backward on all stages in front, which hide
        reductions."""
        start, stop = np.nonzero(np.isfinite(windows))
        whole, longer = np.maximum(0.0, self.of_stage(stage, windows, ahead)), np.zeros_like(windows)
        if self._is_simulated(start):
            longer[start, stop] = [delay.backward_s for delay in self._compute_reduction_delays(stage, start, stop)]
        return StageDelays(whole, longer)

    def _is_simulated(self, starts: Counts) -> bool:
        """Return whether the reductions of stages are simulated bucket by bucket (a bucket: gradients that one
        collective reduces) instead of computed by a formula. This requires that collectives overlap with computation
        and that there are few stages. ``starts``: the first block call (such as a layer) of each possible stage."""
        return bool(self.keys) and self.machine.profile.overlap and 0 < len(starts) <= _MOST_FOLLOWED

    def of_stage(self, stage: int, windows: Table, ahead: NDArray[np.float64]) -> Table:
        """Return a table whose entry ``[start, stop]`` is the seconds by which gradient reductions end after the
        pipeline if the stage with index ``stage`` consists of the block calls ``start:stop`` (such as layers). A
        negative value means that they end before the pipeline does.

        ``windows``: a table whose entry ``[start, stop]`` is the seconds of one backward of the calls; infinite if the
        stage may not consist of them. ``ahead``: for each possible ``start``, the largest number of seconds that one
        backward takes on all stages in front of this one; these seconds hide reductions.
        """
        waits = np.zeros_like(windows)
        start, stop = np.nonzero(np.isfinite(windows) & np.isfinite(ahead)[:, None])
        if not self.keys or not len(start):
            return waits
        problem, machine = self.tables.problem, self.machine
        if self._is_simulated(start):
            delays = self._compute_reduction_delays(stage, start, stop)
            waits[start, stop] = np.array([delay.whole_s for delay in delays]) - ahead[start]
            return waits
        forward, _ = self.tables.seconds(stage)
        overhead = problem.pace(stage).overhead.forward_total_s
        slowdown = max(device.overlap_slowdown for device in machine.devices_of(stage))
        reducers = self._reducers_of(stage)
        sizes = np.stack([size[start, stop] for size in self.sizes], axis=1)
        different, which = np.unique(sizes, axis=0, return_inverse=True)
        windows, forward = windows[start, stop], forward[start, stop] + overhead
        exposed = np.full(len(start), np.inf)
        for reducer in reducers:
            works = np.array([self._compute_reduction_seconds(row, reducer) for row in different.tolist()])[
                which.ravel()
            ].T
            if (
                machine.profile.overlap
            ):  # the last bucket has the first call's gradients; stages behind the first wait anyway
                works[1] = self._bound_call_reductions(reducer)[start]
                works[0] = np.maximum(works[0], works[1])
                works[2] *= stage == 0
            seconds = exposed_seconds(
                tuple(works), windows, slowdown, forward, machine.profile.overlap, problem.num_microbatches
            )
            exposed = np.minimum(exposed, seconds)
        waits[start, stop] = exposed - ahead[start]
        return waits

    def _compute_reduction_delays(self, stage: int, starts: Counts, stops: Counts) -> list[Delays]:
        """Return lower bounds, over all reduction schemes, on the seconds by which gradient reductions of the stage
        with index ``stage`` delay the end of the step. There is one result for each pair of ``starts`` and ``stops``;
        the stage then consists of the block calls ``start:stop`` (such as layers).

        The reductions are simulated bucket by bucket (a bucket: gradients that one collective reduces). On stage 0, the
        seconds by which gathers of updated parameters delay the first forward are added. Results are cached by the
        costs of the calls and by the groups and devices of the stage.
        """
        alike, delays = self._number_equal_calls(stage), list[Delays]()
        for plan in stage_plans(self.tables, np.full_like(starts, stage), starts, stops):
            again = plan.recompute, plan.selective, plan.spared
            key = self._describe_stage(stage), alike[plan.start : plan.stop], *again
            if key not in self._delays:
                self._delays[key] = self._compute_reduction_delay(stage, plan)
            delays.append(self._delays[key])
        return delays

    def _compute_reduction_delay(self, stage: int, plan: StagePlan) -> Delays:
        """Return lower bounds on the seconds by which the gradient reductions of one stage delay the end of the step:
        each of the two numbers is the least over all reduction schemes. ``stage``: index of the stage. On stage 0, the
        seconds by which gathers of parameters delay the first forward are added to ``whole_s``. ``plan``: the block
        calls (such as layers) of the stage.

        If the stage shares a parameter with other calls, the gradient of this parameter may be reduced only after the
        last backward, which the reduction then does not lengthen.
        """
        problem, (first, halves, slowdown, _) = self.tables.problem, self._describe_stage(stage)
        calls = problem.calls[plan.start : plan.stop]
        longer_s = 0.0 if any(self._readers[name] > 1 for call in calls for name in call.states) else math.inf
        whole_s = math.inf
        for reducer in self._reducers_of(stage):
            buckets = stage_buckets(problem, plan, self.states, reducer, self.last_levels)
            delays = reduction_delays(problem, plan, buckets, slowdown, by_halves=halves)
            gather_s = gathered_seconds(problem, plan, buckets, slowdown) if first else 0.0
            longer_s, whole_s = min(longer_s, delays.backward_s), min(whole_s, delays.whole_s + gather_s)
        return Delays(longer_s, whole_s)

    def _describe_stage(self, stage: int) -> tuple[bool, bool, float, tuple[object, ...]]:
        """Return a cache key with the properties of the stage with index ``stage`` that influence the delay by gradient
        reductions, apart from its block calls (such as layers). It has four entries: whether it is the first stage;
        whether it runs its backwards in two halves (for inputs, for weights); the slowdown of computation while
        collectives run; and its devices and groups of ranks."""
        if stage not in self._described:
            reducers = self._reducers_of(stage)
            groups = [reducer.group(axes) for reducer in reducers for axes in self._axes]
            halves = stage > 0 and is_split(self.tables.problem.schedule)
            slowdown = max(device.overlap_slowdown for device in self.machine.devices_of(stage))
            devices = [SameObject(reducer.device) for reducer in reducers]
            self._described[stage] = stage == 0, halves, slowdown, (*devices, *groups)
        return self._described[stage]

    def _number_equal_calls(self, stage: int) -> tuple[int, ...]:
        """Return one number for each block call (such as a layer). Calls get the same number if they have equal costs
        on the stage with index ``stage`` and equal parameters and buffers. A call that shares a parameter or buffer
        with another call has a number of its own."""
        pace = self.tables.pace_number(stage)
        if pace not in self._equal_calls:
            calls, costs = self.tables.problem.calls, self.tables.problem.pace(stage).costs
            numbers: dict[Hashable, int] = {}
            self._equal_calls[pace] = tuple(
                numbers.setdefault(
                    place
                    if any(self._readers[name] > 1 for name in call.states)
                    else (cost, tuple(self.states.get(name) for name in call.states)),
                    len(numbers),
                )
                for place, (call, cost) in enumerate(zip(calls, costs, strict=True))
            )
        return self._equal_calls[pace]

    def _reducers_of(self, stage: int) -> list[Reducer]:
        if stage not in self._reducers:
            self._reducers[stage] = [reducer_of(self.machine, stage, how) for how in self.ways]
        return self._reducers[stage]

    def _bound_call_reductions(self, reducer: Reducer) -> NDArray[np.float64]:
        """Return, for each block call (such as a layer), a lower bound on the seconds of the collectives that reduce
        the gradients of its parameters, shape ``[calls + 1]``. The additional last entry is 0; it is used for a stage
        without calls at the end of the model. ``reducer``: computes the seconds of gradient collectives."""
        calls = self.tables.problem.calls
        found = np.zeros(len(calls) + 1)
        for place, call in enumerate(calls):
            for key in self.keys:
                op, axes, _, before = key
                size = sum(
                    sizes.get(key, 0.0) for sizes in map(self._reduced.__getitem__, self._list_reduced_states(call))
                )
                if not size or op == "all_gather" or before:
                    continue
                whole = op == "all_reduce"
                sent = reducer.all_reduce(size, axes) if whole else reducer.scatter(size, axes, self.last_levels[axes])
                found[place] = max(found[place], sent.seconds)
        return found

    def _list_reduced_states(self, call: StageCall) -> list[str]:
        return [name for name in dict.fromkeys(call.states) if name in self._reduced]

    def _compute_reduction_seconds(self, sizes: Sequence[float], reducer: Reducer) -> tuple[float, ...]:
        """Return six durations in seconds of a gradient reduction: all reductions, the last bucket (gradients that one
        collective reduces), gathers of parameters, reduce-scatters per further microbatch, compression, compression per
        further microbatch. ``sizes``: the bytes that each collective moves, in the order of ``self.keys``. ``reducer``:
        computes the seconds of single collectives."""
        held: Sizes = {key: size for key, size in zip(self.keys, sizes, strict=True) if size}
        groups = tuple(reducer.group(axes) for _, axes, _, _ in self.keys)
        known = *sizes, reducer.how, SameObject(reducer.device), groups
        if known not in self._known:
            found = reduction_of(held, self.last_levels, reducer, overlap=False)  # one bucket has the fewest start-ups
            self._known[known] = found.seconds
        return self._known[known]


__all__ = ["bound_reduction_delays", "bound_stage_ends", "is_priced_by_rank_ends", "least_update", "run_tails"]
