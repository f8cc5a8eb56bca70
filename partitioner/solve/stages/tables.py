"""Compute the time and memory of every sequence of consecutive block calls (such as layers) on every pipeline stage.

Tables have the shape ``[calls + 1, calls + 1]``. The entry ``[start, stop]`` is for the calls ``start:stop``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.cost.call.call_cost import CallCost
from partitioner.errors import PlanError
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.range_sums import segments_of

Table = NDArray[np.float64]

Vector = NDArray[np.float64]
Counts = NDArray[np.int64]
TINY = 1e-12  # relative rounding of sums of seconds
ROUNDING_BYTES = 0.01  # rounding of sums of sizes
_MOST_ENTRIES = 1 << 21  # entries of tables that are made together


class _MeasuredRuns(NamedTuple):
    """Seconds and bytes of sequences of block calls (such as layers) on several stages. They do not depend on the
    memory of the devices. All arrays have the shape ``[stages, sequences]``.

    ``seconds``: per microbatch, without recomputation. ``kept_bytes``: peak bytes without full recomputation.
    ``allowed``: whether the stage may consist of the calls. ``may_recompute``: whether the stage may recompute some of
    the calls in full; ``None``: no stage may. ``least_bytes``: peak bytes if all calls are recomputed in full; ``None``
    if the problem requires full recomputation, or forbids it.
    """

    seconds: Table
    kept_bytes: Table
    allowed: NDArray[np.bool_]
    may_recompute: NDArray[np.bool_] | None
    least_bytes: Table | None


class StageTables:
    """Seconds and peak bytes of every sequence of consecutive block calls (such as layers) on every stage, as tables of
    shape ``[calls + 1, calls + 1]``. The entry ``[i, j]`` is for the calls ``i:j``.

    ``problem``: the calls and stages. ``slim``: the tables under selective recomputation, or ``None`` if selective
    recomputation is not allowed. For each sequence of calls, the faster of the two is used. Raises :class:`PlanError`
    if there are more stages than calls.
    """

    def __init__(self, problem: StageProblem, keeping: StageProblem | None = None) -> None:
        """Build the tables. ``keeping``: if ``problem`` is one under selective recomputation, the problem without it;
        the last calls of a stage may then keep all activations. ``None``: every call does as ``problem`` says."""
        self.problem = problem
        n, p = len(problem.calls), problem.num_stages
        if p > n and not problem.may_be_empty:
            raise PlanError(
                f"pp needs {p} pipeline stages, but the model has only {n} block calls (such as layers) that "
                f"can be placed; expected at most {n}: use a smaller pp, or a model with more layers"
            )
        self.segments = segments_of(problem.calls, problem.local)
        self.states = self.segments.states_of(problem.state_bytes)
        self._capacity = np.array(problem.capacity, dtype=np.float64)
        self._counts = _stack_in_flight_counts([problem.held(stage) for stage in range(p)])
        paces = [problem.pace(stage) for stage in range(p)]
        places = {id(pace): place for place, pace in enumerate({id(pace): pace for pace in paces}.values())}
        self._pace_of = np.array([places[id(pace)] for pace in paces])
        different = list({id(pace): pace for pace in paces}.values())
        sums = self.segments.sums
        self._forward = np.stack([sums([c.forward_total_s for c in pace.costs]) for pace in different])
        self._backward = np.stack([sums([c.backward_total_s for c in pace.costs]) for pace in different])
        whole = [[c.recompute_s for c in pace.costs] for pace in different]
        self._whole_again = np.stack([np.concatenate([[0.0], np.cumsum(seconds)]) for seconds in whole])
        self._overhead = np.array([pace.overhead.forward_total_s for pace in paces])
        self.allowed = self._mask_allowed_segments()
        self._kept = np.zeros(n + 1)  # bytes that calls keep in addition if they do not recompute selectively: sums
        self._spared = np.zeros((len(different), n + 1))  # seconds of selective recomputation: sums
        self.may_spare = (
            keeping is not None and keeping.recompute is None and all(_differs_in_saved(c.cost) for c in keeping.calls)
        )
        if keeping is not None and self.may_spare:
            self._kept[1:] = np.cumsum([call.cost.selective_bytes for call in keeping.calls])
            fast = {id(keeping.pace(stage)): keeping.pace(stage) for stage in range(p)}.values()
            self._spared[:, 1:] = np.cumsum([[c.selective_s for c in pace.costs] for pace in fast], axis=1)
        self.slim = StageTables(problem.slim, problem) if problem.slim is not None else None

    def with_capacity(self, capacity: Sequence[float]) -> StageTables:
        """Return the tables of the same problem with another memory capacity. The copy shares those tables of this
        object that are already computed and do not depend on the capacity. ``capacity``: usable bytes of a rank, by
        stage."""
        other = copy(self)
        other.problem = replace(self.problem, capacity=tuple(int(limit) for limit in capacity))
        other._capacity = np.array(other.problem.capacity, dtype=np.float64)
        other.__dict__.pop("_ways", None)
        other.slim = None if self.slim is None else self.slim.with_capacity(capacity)
        return other

    @property
    def times(self) -> list[Table]:
        """Return, for each pipeline stage, a table whose entry ``[start, stop]`` is the seconds per microbatch if the
        stage runs the block calls ``start:stop`` (such as layers): forward, backward if the model is trained,
        recomputation, and waits for values from other stages.

        As few calls are recomputed in full as memory demands, or as many as allowed if the problem requires full
        recomputation. If selective recomputation (of cheap operators only) is required, or makes the total time
        shorter, the entry is the seconds with selective recomputation. An entry is infinite if the calls do not fit in
        memory or are not allowed on the stage.
        """
        return self._ways[0]

    @cached_property
    def _ways(self) -> tuple[list[Table], list[NDArray[np.bool_]]]:
        """Return two lists with one table for each pipeline stage. In the first list, the entry ``[start, stop]`` of a
        table is the seconds per microbatch (forward, backward, recomputation and waits) of the block calls
        ``start:stop`` (such as layers). In the second list, the entry is whether these calls recompute selectively
        (cheap operators only), because this is required or takes less time. The second list is empty if selective
        recomputation is not allowed."""
        p, n = self.problem.num_stages, len(self.problem.calls)
        start, stop = self._segment_ranges
        always = self.problem.recompute == "selective"
        times: list[Table] = []
        slimmed: list[NDArray[np.bool_]] = []
        for stages in np.array_split(np.arange(p), math.ceil(p * (n + 1) ** 2 / _MOST_ENTRIES)):
            seconds = self._compute_segment_times(stages)
            if self.slim is not None:
                slim = self.slim._compute_segment_times(stages)
                is_slim = (slim < seconds * (1 - TINY)) | always
                seconds = np.where(is_slim, slim, seconds)
                masks = np.full((len(stages), n + 1, n + 1), always)
                masks[:, start, stop] = is_slim
                slimmed += list(masks)
            tables = np.full((len(stages), n + 1, n + 1), np.inf)
            tables[:, start, stop] = seconds
            times += list(tables)
        return times, slimmed

    @property
    def hopeless(self) -> bool:
        """Return whether no cut into stages can fit, because parameters, gradients and optimizer states alone need more
        bytes than all stages have together."""
        return bool(self.states[0, -1] > sum(self.problem.capacity))

    def slimmed(self, stages: Counts, start: Counts, stop: Counts) -> NDArray[np.bool_]:
        """Return one boolean for each position of the index arrays ``stages``, ``start`` and ``stop``: whether the
        stage recomputes selectively (cheap operators only) if it consists of the block calls ``start:stop`` (such as
        layers). This is so if selective recomputation is required, or takes less time than keeping or fully recomputing
        activations. The seconds and bytes of the stage are then found in the tables for selective recomputation."""
        if self.slim is None:
            return np.zeros(len(start), bool)
        slimmed, every = self._ways[1], zip(stages.tolist(), start.tolist(), stop.tolist(), strict=True)
        return np.array([slimmed[stage][first, end] for stage, first, end in every], dtype=bool)

    @cached_property
    def least_memory(self) -> list[Table]:
        """Return, for each stage, a table whose entry ``[start, stop]`` is the peak bytes of the block calls
        ``start:stop`` (such as layers) under the most recomputation allowed. An entry is infinite if the stage may not
        consist of these calls.
        """
        start, stop = self._segment_ranges
        least = np.full((self.problem.num_stages, *self.segments.saved.shape), np.inf)
        least[:, start, stop] = self.least_bytes(start, stop)
        return [np.where(allowed, of_stage, np.inf) for allowed, of_stage in zip(self.allowed, least, strict=True)]

    def least_bytes(self, start: Counts, stop: Counts) -> Table:
        """Return the peak bytes of a stage of the block calls ``start:stop`` (such as layers), for each pair of
        ``start`` and ``stop``, under the most recomputation allowed, shape ``[stages, pairs]``. Constraints on the
        calls that a stage may hold are ignored.
        """
        stages = np.arange(self.problem.num_stages)[:, None]
        fixed = np.broadcast_to(self.fixed_memory[start, stop], (len(stages), len(start)))
        least: Table = self._compute_peak_without_recompute(stages, start, stop) if self.problem.train else fixed
        if self.most_recomputed.any():
            again = self._compute_peak_with_recompute(stages, start, stop)
            least = np.where(self.most_recomputed[start, stop] > 0, np.minimum(least, again), least)
        if self.slim is None:
            return least
        slim = self.slim.least_bytes(start, stop)
        return slim if self.problem.recompute == "selective" else np.minimum(least, slim)

    def _compute_segment_times(self, stages: Counts) -> Table:
        """Return the seconds per microbatch of each sequence of block calls (such as layers) in :attr:`_segment_ranges`
        on each of ``stages`` (indices), shape ``[stages, sequences]``: forward, backward, full recomputation and waits
        for other stages. The seconds are infinite if the calls do not fit in memory or are not allowed."""
        start, stop = self._segment_ranges
        every = len(stages) == self.problem.num_stages
        measured = self._measured_segments if every else self._measure_runs(stages, start, stop)
        return self._limit_by_memory(measured, stages, start, stop)

    @cached_property
    def _measured_segments(self) -> _MeasuredRuns:
        """Return the seconds and bytes of all sequences of block calls (such as layers) on all stages, as far as they
        do not depend on the memory of the devices."""
        return self._measure_runs(np.arange(self.problem.num_stages), *self._segment_ranges)

    @property
    def _segment_ranges(self) -> tuple[Counts, Counts]:
        """Return two arrays, the first call and the index after the last call, of all sequences of consecutive block
        calls (such as layers) that leave at least one call for each other stage. If stages may be empty, all sequences
        are included, also empty ones."""
        n = len(self.problem.calls)
        if self.problem.may_be_empty:
            return _runs_of(n, n, 0)
        return _runs_of(n, n - self.problem.num_stages + 1)

    def run_times(self, stages: Counts, start: Counts, stop: Counts) -> Table:
        """Return the seconds per microbatch of the block calls ``start:stop`` (such as layers), for each pair of the
        index arrays ``start`` and ``stop``, on each of ``stages`` (indices), shape ``[stages, pairs]``: forward,
        backward if the model is trained, full recomputation, and waits for values from other stages. As few calls are
        recomputed in full as memory demands, or, if full recomputation is required, as many as allowed. The seconds are
        infinite if the calls do not fit or are not allowed."""
        return self._limit_by_memory(self._measure_runs(stages, start, stop), stages, start, stop)

    def _measure_runs(self, stages: Counts, start: Counts, stop: Counts) -> _MeasuredRuns:
        """Return the seconds and bytes of the block calls ``start:stop`` (such as layers), for each pair of the index
        arrays ``start`` and ``stop``, on each of ``stages`` (indices), without and with full recomputation.
        """
        problem, pace = self.problem, self._pace_of[stages][:, None]
        before, after = (of_ends[stages] for of_ends in self._end_wait_seconds)
        time: Table = self._forward[pace, start, stop] + self._overhead[stages][:, None]
        time += before[:, start] + after[:, stop]
        plain = self.fixed_memory[start, stop]
        if problem.train:
            time += self._backward[pace, start, stop]
            plain = self._compute_peak_without_recompute(stages[:, None], start, stop)
        different = stages if problem.pinned or problem.barred else stages[:1]
        every = [self.allowed[stage][start, stop] for stage in different.tolist()]
        allowed = np.broadcast_to(np.stack(every), time.shape)
        if not (problem.train and self.most_recomputed.any()):
            return _MeasuredRuns(time, plain, allowed, None, None)
        again = allowed & (self.most_recomputed[start, stop] > 0)
        # with full recomputation its bytes are computed later
        least = None if problem.recompute == "full" else self._compute_peak_with_recompute(stages[:, None], start, stop)
        return _MeasuredRuns(time, plain, allowed, again, least)

    def _limit_by_memory(self, measured: _MeasuredRuns, stages: Counts, start: Counts, stop: Counts) -> Table:
        """Return the seconds per microbatch of the block calls ``start:stop`` (such as layers), with the recomputation
        that the memory of the stages requires, shape ``[stages, pairs]``. The seconds are infinite if the calls do not
        fit. ``start``, ``stop``: index arrays, one entry for each pair. ``stages``: indices of the stages.
        ``measured``: seconds and bytes of the same calls without a memory limit."""
        usable, time = self._capacity[stages][:, None], measured.seconds
        fits = measured.allowed & (measured.kept_bytes <= usable + ROUNDING_BYTES)
        if measured.may_recompute is not None:
            again = measured.may_recompute
            if measured.least_bytes is not None:  # only runs that do not fit without recomputation and may with it
                again = again & ~(measured.kept_bytes <= usable) & (measured.least_bytes <= usable + ROUNDING_BYTES)
            here, run = np.nonzero(again)
            stage, begin, end = stages[here], start[run], stop[run]
            time = time.copy()
            count = self.recomputed(stage, begin, end)
            time[here, run] += self.again(stage, begin, count)
            memory = self.memory(stage, begin, end, count)
            fits[here, run] = memory <= self._capacity[stage] + ROUNDING_BYTES
        if self.may_spare:
            here, run = np.nonzero(measured.allowed & (measured.kept_bytes <= usable))
            stage, begin, end = stages[here], start[run], stop[run]
            time = time.copy()
            time[here, run] -= self.spared_seconds(stage, end, self.count_spared(stage, begin, end))
        return np.where(fits, time, np.inf)

    def count_spared(self, stage: Counts, start: Counts, stop: Counts) -> Counts:
        """Return, for each triple of entries of the index arrays ``stage``, ``start`` and ``stop``, how many of the
        block calls ``start:stop`` (such as layers), counted from the last, the stage need not recompute selectively to
        fit in memory, if none is recomputed in full. All are 0 in tables without selective recomputation, and if it is
        required."""
        if not self.may_spare:
            return np.zeros(np.shape(start), dtype=np.int64)
        whole, half = self.each(start, stop, np.zeros(np.shape(start), dtype=np.int64))
        room, capacity = np.full(np.shape(start), np.inf), self._capacity[stage]
        closing = self.segments.closing[start]
        for of_whole, of_half in self._counts:
            taken = of_whole[stage] * whole + of_half[stage] * half
            left = capacity - self._fixed_bytes_without_recompute[start, stop] - taken
            room = np.minimum(room, left / np.maximum(of_whole[stage], TINY))
            if closing.any():  # the moment when one of these microbatches is already freed
                gone = np.minimum(of_whole[stage], 1.0)
                left = capacity - self._fixed_bytes_without_working[start, stop] - closing - taken + gone * whole
                room = np.minimum(room, left / np.maximum(of_whole[stage] - gone, TINY))
        first = np.searchsorted(self._kept, self._kept[stop] - room * (1 - TINY), side="left")
        return np.asarray(stop - np.clip(first, start, stop))

    @property
    def spared_by_call(self) -> tuple[Table, Vector]:
        """Return two arrays: the seconds that the selective recomputation of each block call (such as a layer) takes on
        each stage, shape ``[stages, calls]``, and the bytes that each call keeps in addition without it, shape
        ``[calls]``. Both are 0 in tables without selective recomputation, and if it is required."""
        return np.diff(self._spared, axis=1)[self._pace_of], np.diff(self._kept)

    def spared_seconds(self, stage: Counts, stop: Counts, spared: Counts) -> Vector:
        """Return, for each triple of entries of the arrays, the seconds per microbatch that selective recomputation of
        the ``spared`` block calls (such as layers) before index ``stop`` takes on the stage with index ``stage``."""
        pace = self._pace_of[stage]
        seconds: Vector = self._spared[pace, stop] - self._spared[pace, stop - spared]
        return seconds

    def short_runs(self, limit: float) -> tuple[Counts, Counts]:
        """Return two arrays, the first call and the index after the last call, of the sequences of consecutive block
        calls (such as layers) whose work takes at most ``limit`` seconds on the fastest stage."""
        start, stop = self._segment_ranges
        near = np.flatnonzero(self.least_work[start, stop] <= limit)
        return start[near], stop[near]

    @cached_property
    def least_work(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the seconds per microbatch of the block calls ``start:stop``
        (such as layers) on the stage that is fastest for them, without recomputation and waits.
        """
        least: Table = (self._forward + self._backward if self.problem.train else self._forward).min(axis=0)
        return least

    def _mask_allowed_segments(self) -> list[NDArray[np.bool_]]:
        """Return, for each stage, a mask whose entry ``[start, stop]`` says whether the stage may consist of the block
        calls ``start:stop`` (such as layers). A stage must contain every call that is fixed to it and no call that is
        fixed to another stage. Stages that the problem forbids are excluded, and so are empty stages unless the problem
        allows them."""
        n = len(self.problem.calls)
        start, stop = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
        if self.problem.barred:
            both = zip(self._mask_pinned_segments(start, stop), self.problem.barred, strict=True)
            return [allowed & ~barred for allowed, barred in both]
        return self._mask_pinned_segments(start, stop)

    def _mask_pinned_segments(self, start: Counts, stop: Counts) -> list[NDArray[np.bool_]]:
        """Return, for each stage, a mask that says whether the stage may consist of the block calls ``start:stop``
        (such as layers). A stage must contain every call that is fixed to it and no call that is fixed to another
        stage. Empty stages are excluded unless the problem allows them. ``start``, ``stop``: arrays that are broadcast
        to a table."""
        runs = start <= stop if self.problem.may_be_empty else start < stop
        if not self.problem.pinned:
            return [runs] * self.problem.num_stages
        tables = []
        for stage in range(self.problem.num_stages):
            allowed = runs
            for call, pinned in self.problem.pinned.items():
                inside = (start <= call) & (call < stop)
                allowed = allowed & (inside == (pinned == stage))
            tables.append(allowed)
        return tables

    def pace_number(self, stage: int) -> int:
        """Return the index of the tables of seconds for the stage with index ``stage``. Stages share tables if every
        block call (such as a layer) takes equally long on both."""
        return int(self._pace_of[stage])

    def seconds(self, stage: int) -> tuple[Table, Table]:
        """Return two tables, one for the forward and one for the backward. The entry ``[start, stop]`` is the seconds
        of the block calls ``start:stop`` (such as layers) on the devices of the stage with index ``stage``. The calls
        that every stage runs in addition are not included."""
        return self._forward[self._pace_of[stage]], self._backward[self._pace_of[stage]]

    def seconds_at(self, stages: Counts, start: Counts, stop: Counts) -> tuple[Vector, Vector]:
        """Return two arrays with an entry for each position of the index arrays ``stages``, ``start`` and ``stop``: the
        forward and the backward seconds of the block calls ``start:stop`` (such as layers) on the devices of the stage.
        The forward includes the calls that every stage runs in addition."""
        pace = self._pace_of[stages]
        return self._forward[pace, start, stop] + self._overhead[stages], self._backward[pace, start, stop]

    def waits_at(self, stages: Counts, start: Counts, stop: Counts) -> tuple[Vector, Vector]:
        """Return two arrays with an entry for each position of the index arrays ``stages``, ``start`` and ``stop``: the
        seconds that the stage with the block calls ``start:stop`` (such as layers) waits for values from the previous
        stage, and for gradients from the next stage."""
        before, after = self._end_wait_seconds
        return before[stages, start], after[stages, stop]

    def transfers(self, stage: int) -> tuple[Table, Table]:
        """Return the seconds that the stage with index ``stage`` waits for other stages, as two arrays: for values from
        the previous stage, shape ``[calls + 1, 1]``, and for gradients from the next stage, shape ``[1, calls + 1]``.
        The index is the number of block calls (such as layers) before the cut between the two stages."""
        before, after = self._end_wait_seconds
        return before[stage][:, None], after[stage][None, :]

    @cached_property
    def _end_wait_seconds(self) -> tuple[Table, Table]:
        """Return two arrays of shape ``[stages, calls + 1]``: the seconds that each stage waits for values from the
        previous stage, and for gradients from the next stage. The second index is the number of block calls (such as
        layers) before the cut between the two stages."""
        problem, cut = self.problem, self.segments
        before, after = np.zeros((2, problem.num_stages, len(problem.calls) + 1))
        different = dict.fromkeys((link.bandwidth, link.latency) for link in problem.links)
        number = {link: n for n, link in enumerate(different)}
        crossed = [number[link.bandwidth, link.latency] for link in problem.links[: problem.num_stages - 1]]
        if crossed:
            before[1:] = np.stack([_message_times(cut.forward, *link) for link in different])[crossed]
            if problem.train:
                after[:-1] = np.stack([_message_times(cut.backward, *link) for link in different])[crossed]
        return before, after

    @cached_property
    def most_recomputed(self) -> Counts:
        """Return a table whose entry ``[start, stop]`` is the largest number of the block calls ``start:stop`` (such as
        layers), counted from the first, that may be recomputed in full. If recomputation is a free choice, all of them
        may. If full recomputation is required, only the calls up to the last call of a block that occurs several times
        may. The table is 0 if the model is not trained or the user excludes full recomputation."""
        n = len(self.problem.calls)
        stop = np.arange(n + 1)[None, :]
        if self.problem.recompute == "full":  # recomputing the embedding and the head frees hardly any memory
            stop = np.minimum(stop, self.problem.last_repeated)
        length = np.maximum(0, stop - np.arange(n + 1)[:, None])
        return length if self.problem.train and self.problem.recompute in (None, "full") else np.zeros_like(length)

    def recomputed(self, stage: int | Counts, start: Counts, stop: Counts) -> Counts:
        """Return, for each pair of the index arrays ``start`` and ``stop``, how many of the block calls ``start:stop``
        (such as layers), counted from the first, a stage recomputes in full. If the user requires full recomputation,
        this is the largest number allowed. Otherwise it is the least number with which the calls fit in memory. If the
        calls do not fit with any number, it is the largest number allowed; the caller has to compare the bytes with the
        memory.

        ``stage``: index of one stage for all pairs, or an array with one index for each pair. Recomputed calls keep all
        their inputs; the other calls keep what they save for backward. A prefix sum of the saved bytes gives the number
        of calls to recompute.
        """
        most, capacity = self.most_recomputed[start, stop], self._capacity[stage]
        if self.problem.recompute == "full" or not most.any():
            return most
        cut, prefix = self.segments, self.segments.saved[0]
        inputs, saved, carried = (of[start, stop] for of in (cut.all_inputs, cut.saved, cut.carried))
        excess = np.full(most.shape, -np.inf)
        for whole, half in self._counts:  # a recomputed byte frees one byte per microbatch not begun
            taken = whole[stage] * (saved + inputs) + half[stage] * (carried + inputs)
            over = taken + self._fixed_again[start, stop] - capacity
            excess = np.maximum(excess, over / np.maximum(whole[stage], TINY))
            if cut.closing.any():  # the moment when one of these microbatches is already freed
                gone = np.minimum(whole[stage], 1.0)
                over = (
                    taken
                    - gone * (saved + inputs)
                    + self._fixed_bytes_without_working[start, stop]
                    + cut.closing[start]
                    - capacity
                )
                excess = np.maximum(excess, over / np.maximum(whole[stage] - gone, TINY))
        count = np.searchsorted(prefix, prefix[start] + excess * (1 - TINY), side="left")
        count = np.clip(count - start, 1, np.maximum(most, 1))
        return np.where(
            self._compute_peak_without_recompute(stage, start, stop) <= capacity, 0, np.minimum(count, most)
        )

    def again(self, stage: int | Counts, start: Counts, recomputed: Counts) -> Table:
        """Return the seconds per microbatch that a stage takes to recompute in full the first ``recomputed`` block
        calls (such as layers) from index ``start`` on. ``start``, ``recomputed`` and the result are arrays of the same
        shape. ``stage``: index of the stage, or an array with one index for each entry."""
        prefix, pace = self._whole_again, self._pace_of[stage]
        stop = np.minimum(start + recomputed, prefix.shape[1] - 1)
        seconds: Table = prefix[pace, stop] - prefix[pace, start]
        return seconds

    @cached_property
    def fixed_memory(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of a stage of the block calls ``start:stop`` (such
        as layers) that do not depend on the number of microbatches in flight: parameters, gradients, optimizer states,
        send and receive buffers, and working memory."""
        cut = self.segments
        return self.states + cut.largest_working + cut.boundary + self.problem.overhead.working_bytes

    @cached_property
    def _fixed_bytes_without_recompute(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of a stage of the block calls ``start:stop`` (such
        as layers) that do not depend on the number of microbatches in flight, if the stage recomputes nothing.

        Gradients that are allocated late, during the first backward, count only as far as they exceed the activations
        that backward has freed by then.
        """
        late = self.problem.late_bytes
        if not late:
            return self.fixed_memory
        calls = self.problem.calls
        change = [sum(late.get(name, 0.0) for name in call.states) - call.cost.saved_bytes for call in calls]
        after: Table = np.concatenate([[0.0], np.cumsum(change)])
        # when call k runs backward, later calls have run: the maximum over all k of a segment
        behind = np.where(np.arange(len(after))[None, :] > np.arange(len(after))[:, None], after[None, :], np.inf)
        grown = np.maximum(0.0, after[None, :] - np.minimum.accumulate(behind, axis=1))
        coming = self.segments.states_of(late)
        return np.maximum(
            self.fixed_memory - coming + np.minimum(grown, coming), self.states - self._kept_segment_bytes
        )

    @cached_property
    def _fixed_again(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of a stage of the block calls ``start:stop`` (such
        as layers) that do not depend on the number of microbatches in flight, if the stage recomputes calls in full.

        They include the working memory, which is the larger of two: the temporary bytes of a call that is not
        recomputed, or the saved and temporary bytes of the one call that is being recomputed.
        """
        return self._fixed_bytes_without_working + np.maximum(
            self.segments.largest_working, self.segments.largest_again
        )

    @cached_property
    def _kept_segment_bytes(self) -> Table:
        return self.segments.saved + self.segments.saved_inputs

    def _bound_in_flight_bytes(
        self, stage: int | Counts, whole: Table, half: Table, gone: Table | float = 0.0
    ) -> Table:
        """Return the largest total bytes of activations of the microbatches that a stage holds at the same time, over
        all times of the schedule. ``whole``, ``half``, ``gone`` and the result are arrays of bytes of one shape, with
        an entry for each sequence of block calls (such as layers).

        ``stage``: index of the stage, or an array of indices. ``whole``: bytes of a microbatch whose backward has not
        begun. ``half``: bytes of a microbatch between the two halves of its backward. ``gone``: bytes that one of the
        microbatches whose backward has not begun has already freed.
        """
        held: Table = np.zeros(())
        for begun, (of_whole, of_half) in enumerate(self._counts):
            taken = of_whole[stage] * whole - np.minimum(of_whole[stage], 1.0) * gone
            taken = taken + of_half[stage] * half if of_half.any() else taken
            held = np.maximum(held, taken) if begun else taken
        return held

    def _compute_peak_without_recompute(self, stage: int | Counts, start: Counts, stop: Counts) -> Table:
        """Return the peak bytes of a stage of the block calls ``start:stop`` (such as layers) if no call is recomputed
        in full. The result has one number for each pair of ``start`` and ``stop``. ``stage``: index of the stage, or an
        array of indices."""
        inputs = self.segments.saved_inputs[start, stop]
        carried = self.segments.carried[start, stop] + inputs
        held = self.segments.saved[start, stop] + inputs, carried
        peak: Table = self._fixed_bytes_without_recompute[start, stop] + self._bound_in_flight_bytes(stage, *held)
        return self._closed(peak, stage, start, stop, *held)

    def _closed(
        self, peak: Table, stage: int | Counts, start: Counts, stop: Counts, whole: Table, half: Table
    ) -> Table:
        """Return the peak bytes of stages of the block calls ``start:stop`` (such as layers) over all times: the
        maximum of ``peak`` and of the bytes at the end of a microbatch's backward. At this time, which ``peak`` leaves
        out, the microbatch is already freed and gradients are sent to the ranks that own them.

        ``stage``: index of the stage, or an array of indices. ``start``, ``stop``: arrays. ``whole``: bytes of a
        microbatch whose backward has not begun. ``half``: bytes of a microbatch between the two halves of its backward.
        """
        closing = self.segments.closing[start]
        if not closing.any():
            return peak
        return np.maximum(
            peak,
            self._fixed_bytes_without_working[start, stop]
            + closing
            + self._bound_in_flight_bytes(stage, whole, half, whole),
        )

    @cached_property
    def _fixed_bytes_without_working(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of a stage of the block calls ``start:stop`` (such
        as layers) that do not depend on the number of microbatches in flight, without the temporary memory of running
        calls."""
        return self.fixed_memory - self.segments.largest_working

    def _compute_peak_with_recompute(self, stage: int | Counts, start: Counts, stop: Counts) -> Table:
        """Return the peak bytes of a stage of the block calls ``start:stop`` (such as layers) if all of them are
        recomputed in full, so that only inputs are kept. The result has one number for each pair of ``start`` and
        ``stop``. ``stage``: index of the stage, or an array of indices."""
        inputs = self.segments.all_inputs[start, stop]
        held = inputs, inputs + self.segments.carried[start, stop]
        peak: Table = self._fixed_again[start, stop] + self._bound_in_flight_bytes(stage, *held)
        return self._closed(peak, stage, start, stop, *held)

    def each(self, start: Counts, stop: Counts, recomputed: Counts, spared: Counts | int = 0) -> tuple[Table, Table]:
        """Return the activation bytes of one microbatch on a stage of the block calls ``start:stop`` (such as layers),
        as two arrays with an entry for each pair of ``start`` and ``stop``. The first is for a microbatch whose
        backward has not begun, the second for one between the two halves of its backward. The first ``recomputed``
        calls are recomputed in full; the last ``spared`` ones are not recomputed selectively."""
        cut, prefix = self.segments, self.segments.saved[0]
        made = prefix[np.minimum(start + recomputed, len(prefix) - 1)] - prefix[start]
        inputs = np.where(recomputed > 0, cut.all_inputs[start, stop], cut.saved_inputs[start, stop])
        kept = np.maximum(0.0, cut.saved[start, stop] - made) + (self._kept[stop] - self._kept[stop - spared])
        return inputs + kept, inputs + cut.carried[start, stop]

    def memory(
        self, stage: int | Counts, start: Counts, stop: Counts, recomputed: Counts, spared: Counts | int = 0
    ) -> Table:
        """Return the peak bytes of a rank that holds the block calls ``start:stop`` (such as layers), recomputes the
        first ``recomputed`` of them in full, and does not recompute the last ``spared`` selectively. The arguments are
        numbers or arrays, which are broadcast to the shape of the result. ``stage``: index of the stage, or an array of
        indices.
        """
        if not self.problem.train:
            return self.fixed_memory[start, stop]
        fixed = np.where(
            recomputed > 0, self._fixed_again[start, stop], self._fixed_bytes_without_recompute[start, stop]
        )
        each = self.each(start, stop, recomputed, spared)
        peak: Table = fixed + self._bound_in_flight_bytes(stage, *each)
        return self._closed(peak, stage, start, stop, *each)


def _differs_in_saved(cost: CallCost) -> bool:
    """Return whether a block call (such as a layer) of ``cost`` differs under selective recomputation only by fewer
    bytes that it saves and by the seconds of recomputation: it keeps all inputs that it keeps otherwise, and sends no
    activations to host memory."""
    inputs = zip(cost.saved_inputs, cost.selective().saved_inputs, strict=True)
    return cost.slim is None and all(is_saved or not saved for saved, is_saved in inputs)


@lru_cache(maxsize=8)
def _runs_of(calls: int, most: int, least: int = 1) -> tuple[Counts, Counts]:
    """Return two arrays, the first call and the index after the last call, of all sequences of ``least`` to ``most``
    consecutive block calls (such as layers). ``calls``: the number of calls of the model."""
    start, stop = np.triu_indices(calls + 1, least)
    short = stop - start <= most
    return start[short], stop[short]


def _stack_in_flight_counts(held: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[Vector, Vector]]:
    """Return the numbers of microbatches that each stage holds, rearranged for computation with arrays. ``held`` has a
    list of pairs for each stage; the result has a list of pairs of arrays of shape ``[stages]``. For stages with fewer
    pairs the last pair is repeated.

    A pair describes one point in time of the schedule: the number of microbatches whose backward has not begun, and the
    number between the two halves of their backward.
    """
    most = max(map(len, held))
    padded = np.array([[*pairs, *[pairs[-1]] * (most - len(pairs))] for pairs in held], dtype=np.float64)
    return [(pairs[:, 0].copy(), pairs[:, 1].copy()) for pairs in np.moveaxis(padded, 1, 0)]


def _message_times(num_bytes: Table, bandwidth: float, latency: float) -> Table:
    """Return the seconds of messages of ``num_bytes`` between stages: latency plus bytes / bandwidth, or 0 for empty
    messages. ``bandwidth``: bytes per second. ``latency``: seconds."""
    seconds: Table = np.where(num_bytes > 0, latency + num_bytes / bandwidth, 0.0)
    return seconds


def min_max(tables: list[Table], least: int = 0) -> tuple[float, list[int]]:
    """Cut the block calls (such as layers) into stages so that the largest value of a stage is as small as possible.
    Return this largest value, and the cuts: the index of the first call of each stage, followed by the number of calls.

    ``tables``: for each stage, a table whose entry ``[start, stop]`` is the value of the calls ``start:stop``.
    ``least``: the least number of calls of every stage, 0 or 1.
    """
    width = len(tables[0]) - len(tables) * least  # calls before a cut, if the other stages have as few as possible
    reached = np.full(width, np.inf)
    reached[0] = -np.inf
    came: list[NDArray[np.int64]] = []
    for stage, table in enumerate(tables):
        first = stage * least
        worst = np.maximum(reached[:, None], table[first : first + width, first + least : first + least + width])
        came.append(worst.argmin(axis=0))
        reached = worst.min(axis=0)
    places = [width - 1]
    for step in reversed(came):
        places.append(int(step[places[-1]]))
    return float(reached[-1]), [place + least * stage for stage, place in enumerate(reversed(places))]
