"""Find which requirements of a job without a plan conflict, and the nearest changes that make a plan possible.

Requirements are the user's constraints, the batch and the cluster. Changes are tried by increasing effort. Changes that
this version can plan but not execute come last. Every reported change has been planned: its sharding and its stages are
solved under the memory limits. If memory was lacking, its program is also built and fits.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from partitioner.advise.variants import (
    RelaxationRequest,
    Variant,
    describe_pin_change,
    estimate_relaxation_effort,
    far_variants,
    fixed_of,
    format_given_pin,
    is_pin_changed,
    kinds_text,
    list_pin_subsets,
    list_variants,
    measure_pin_distance,
    pins_of,
    relax_pins,
)
from partitioner.candidate import MeshCandidate
from partitioner.constraints import OF_POINT, Constraints
from partitioner.cost.call.recomputation import allowed_recompute_mode, recompute_mode
from partitioner.errors import Advice, CapacityError, Change, InfeasibleError, TimeLimitError
from partitioner.passes.errors import PartitionError
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.evaluate.evaluator import CandidateEvaluator, SolvedCandidate
from partitioner.solve.evaluate.job import Job
from partitioner.solve.search.fit_memory import can_fit_program, planned_only
from partitioner.solve.search.search import find_best_report, list_offload_variants
from partitioner.solve.search.space import SearchSpace, build_search_space, list_candidates, several_stages
from partitioner.units import list_divisors, seconds_text
from partitioner.validate import check_request

_MOST_CHANGES, _MOST_SOLVED, _MOST_OF_ONE, _MOST_TRIED = 3, 36, 8, 4000

_LEAST_S = 30.0  # seconds of the search for changes; if finding that there is no plan took longer, as long as that
_OF_CONFLICT = 0.3  # fraction of these seconds for the search for conflicting constraints
_LEANEST = 4  # candidates of one changed job that are tried if memory is short, those that need least memory first
_ZERO_IS_FREE = ("etp", "dp_shard")  # fields of a candidate in which 0 is the default, and no constraint


@contextmanager
def attach_advice(asked: RelaxationRequest) -> Iterator[None]:
    """Return a context manager for the planning of a job (a model to be planned on a cluster). If the ``with`` block
    raises :class:`InfeasibleError`, attach a function to the error. The function finds the conflicting constraints, and
    the changes with the least effort for the user that make a plan possible. It runs when the user first requests its
    results, for at most the time that the block took or 30 s, whichever is more.

    ``asked``: the job as the user requested it.
    """
    begun = time.monotonic()
    try:
        yield
    except InfeasibleError as error:
        if isinstance(error, CapacityError) and (margin := asked.constraints.memory_margin):
            error.message += f" ({100 * margin:g}% of a device's memory is kept free: memory_margin)"
        # after a time limit there may be a plan that was not reached
        if error.advise is None and not isinstance(error, TimeLimitError):
            seconds = max(_LEAST_S, time.monotonic() - begun)
            error.advise = partial(find_advice, asked, isinstance(error, CapacityError), seconds=seconds)
        raise


def find_advice(asked: RelaxationRequest, short_of_memory: bool, seconds: float = math.inf) -> Advice:
    """Return advice on the job ``asked`` (a model to be planned on a cluster), which has no plan: the constraints of
    the user that conflict, and the changes with the least effort for the user that make a plan possible. Both are empty
    if the request itself is invalid.

    ``short_of_memory``: whether missing memory is the reason that there is no plan. ``seconds``: approximate time limit
    of the search.
    """
    begun = time.monotonic()
    try:
        _check_job_request(asked.prepare(asked.topology, asked.constraints.meaning, asked.global_batch))
    except PartitionError:
        return Advice()
    search = _RelaxationSearch(asked, short_of_memory, begun + _OF_CONFLICT * seconds)
    conflict = search.find_conflict()
    search.until = begun + seconds
    return Advice(conflict, search.find_changes())


# key of the caches of bounds and evaluators: all that these depend on besides the candidate
_Basis = tuple[Hashable, ...]

_OF_POINTS = (*OF_POINT, "stage_of", "recompute")


def _bounds_cache_key(job: Job) -> _Basis:
    ways = (getattr(job.constraints, name) for name in Constraints.model_fields if name not in _OF_POINTS)
    return job.topology, job.global_batch, recompute_mode(job.constraints.recompute), *ways


@dataclass
class _RelaxationSearch:
    """A search for changes that give a plan to a job (a model to be planned on a cluster) that has none. Lower bounds
    and solvers are cached, so that changed jobs with the same graphs share them.

    ``asked``: the job as the user requested it. ``short_of_memory``: whether missing memory is the reason that the job
    has no plan. ``until``: value of ``time.monotonic()``, in seconds, at which the search ends with what it has found.
    """

    asked: RelaxationRequest
    short_of_memory: bool
    until: float = math.inf  # end of the search on the monotonic clock
    _longest: float = 0.0  # seconds of the longest try
    _bounds: dict[_Basis, ModelBounds] = field(default_factory=dict)
    _evaluators: dict[_Basis, CandidateEvaluator] = field(default_factory=dict)
    # changed jobs, with pins to give up, that lack nothing but memory; nearest first
    _lacking: list[tuple[Variant, tuple[str, ...], MeshCandidate]] = field(default_factory=list)

    @property
    def late(self) -> bool:
        """Return whether the search must stop, because to plan one more variant of the requested job might exceed the
        time limit. Planning is assumed to take as long as it took for the slowest variant so far.
        """
        return time.monotonic() + self._longest > self.until

    def find_conflict(self) -> tuple[str, ...]:
        """Return a minimal set of user constraints that together exclude every plan, each formatted as text like
        ``tp=8``. Empty if lower bounds on memory do not show a conflict, or if the time is too short to find a minimal
        set.
        """
        given = self.asked.constraints
        every = kept = fixed_of(given)
        if self._is_possible_by_bounds(given) or not self._is_possible_by_bounds(relax_pins(given, every)):
            return ()
        for pin in every:
            if self.late:
                return ()
            rest = [p for p in kept if p != pin]
            if not self._is_possible_by_bounds(relax_pins(given, [p for p in every if p not in rest])):
                kept = rest
        return tuple(format_given_pin(given, pin) for pin in kept)

    def find_changes(self) -> tuple[Change, ...]:
        """Return at most three changes of constraints, batch or cluster that make a plan possible, nearest first; empty
        if none was found in time.
        """
        found = self._find_nearest_changes(list_variants(self.asked, self.short_of_memory))
        if not found and self.short_of_memory:
            found = self._find_nearest_changes(far_variants(self.asked), all_pins=True)
        return found or self._then_memory() or self._relax_differing_pins()

    def _find_nearest_changes(self, several: Iterable[Variant], *, all_pins: bool = False) -> tuple[Change, ...]:
        """Try ``several`` variants of the requested job (model, global batch, cluster and constraints), and return at
        most three changes with which it has a plan, in ascending order of the summed effort of their parts.

        Each variant is tried as it is, and also without some of the constraints that the user fixed. If ``all_pins`` is
        true, each variant is only tried with all of these constraints.
        """
        ticket = count()
        heap: list[tuple[float, float, int, Variant, tuple[str, ...], MeshCandidate | None]] = []
        for variant in several:
            for pins in [()] if all_pins else list_pin_subsets(pins_of(variant.constraints)):
                if variant.texts or pins:
                    cost = variant.cost + estimate_relaxation_effort(pins)
                    heapq.heappush(heap, (cost, 0.0, next(ticket), variant, pins, None))
        done: list[frozenset[str]] = []
        found: list[Change] = []
        solved: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
        values: defaultdict[tuple[tuple[str, ...], tuple[str, ...]], set[tuple[Any, ...]]] = defaultdict(set)
        for _ in range(_MOST_TRIED):
            if not heap or len(found) == _MOST_CHANGES or solved.total() >= _MOST_SOLVED or self.late:
                break
            cost, _, _, variant, pins, candidate = heapq.heappop(heap)
            given_up = variant.kinds | set(pins)
            if any(other <= given_up for other in done):
                continue  # gives up more than a change that was found already
            begun = time.monotonic()
            if candidate is None:
                for more, seconds, choice in self._list_relaxed_candidates(variant, pins):
                    heapq.heappush(heap, (cost + more, seconds, next(ticket), variant, pins, choice))
                self._longest = max(self._longest, time.monotonic() - begun)
                continue
            key, value = (variant.texts, pins), tuple(_find_new_pin_values(pins, candidate).values())
            few = solved[key] < (_LEANEST if self.short_of_memory else _MOST_OF_ONE)
            other = value not in values[key] and len(values[key]) < _MOST_OF_ONE  # a value that was not tried yet
            if (few or other) and self._can_bounds_allow(variant, pins, candidate):
                solved[key] += 1
                values[key].add(value)
                if (plan := self._plan_relaxed_candidate(variant, pins, candidate)) is not None:
                    done.append(given_up)
                    found.append(self._build_change(variant, pins, candidate, plan))
            self._longest = max(self._longest, time.monotonic() - begun)
        return tuple(found)

    def _then_memory(self) -> tuple[Change, ...]:
        """Return a tuple with one change that does two things: it resolves a conflict of constraints, and it adds the
        memory that is still missing then. The tuple is empty if no such change is found, or if missing memory is the
        only reason that the job has no plan.

        The search starts from those variants of the job (model, global batch, cluster and constraints) that turned out
        to lack only memory.
        """
        for variant, pins, candidate in [] if self.short_of_memory else self._lacking[:_MOST_CHANGES]:
            if self.late:
                break
            first = self._build_change(variant, pins, candidate)
            asked = replace(
                self.asked,
                topology=first.topology,
                constraints=first.constraints,
                global_batch=first.global_batch,
            )
            if found := _and_then(first.text, _RelaxationSearch(asked, True, self.until)):
                return found
        return ()

    def _relax_differing_pins(self) -> tuple[Change, ...]:
        """Find a plan for the job (model, global batch and cluster) without any of the constraints that the user fixed.
        Return a tuple with one change: to give up the constraints whose value differs in this plan.

        If there is no such plan, the change gives up all of these constraints, and changes the batch or the cluster,
        too. Empty if no plan is found in this way either.
        """
        base = next(iter(list_variants(self.asked, self.short_of_memory)))
        every = tuple(pins_of(base.constraints))
        if not every or self.late:
            return ()
        try:
            job = self._prepare_relaxed_job(base, every)
            least = self._find_model_bounds(_maximise_offload(job))
            choices = self._list_plainest_zero_choices(job, every)
        except PartitionError:
            return ()
        ranked = sorted(choices, key=lambda p: (least.state_bytes(p) + least.layer_bytes(p), p))
        for candidate in ranked[:_MOST_OF_ONE]:
            if self.late:
                return ()
            pins = [pin for pin in every if is_pin_changed(base.constraints, pin, candidate)]
            possible = _is_possible(replace(job, constraints=self._constrain_to_candidate(base, pins, candidate)))
            if (
                possible
                and self._can_bounds_allow(base, every, candidate)
                and self._plan_relaxed_candidate(base, every, candidate) is not None
            ):
                return (self._build_change(base, pins, candidate),)
        # There is no plan even without any of these constraints: find what else has to change.
        free = _RelaxationSearch(
            replace(self.asked, constraints=relax_pins(base.constraints, every)), self.short_of_memory, self.until
        )
        return _and_then(f"{', '.join(format_given_pin(base.constraints, pin) for pin in every)} left free", free)

    def _prepare_relaxed_job(self, variant: Variant, pins: Sequence[str]) -> Job:
        return self.asked.prepare(variant.topology, relax_pins(variant.constraints, pins), variant.global_batch)

    def _find_model_bounds(self, job: Job) -> ModelBounds:
        key = (*_bounds_cache_key(job), allowed_recompute_mode(job.constraints.recompute))
        if key not in self._bounds:
            self._bounds[key] = ModelBounds(job)
        return self._bounds[key].with_constraints(job.constraints)

    def _list_relaxed_candidates(
        self, variant: Variant, pins: tuple[str, ...]
    ) -> list[tuple[float, float, MeshCandidate]]:
        """Return the mesh candidates (mesh sizes, microbatch size, schedule and ZeRO stage) of a changed job (model,
        global batch, cluster and constraints) that differ from the user's value in each of ``pins``. Return a list of
        tuples (distance from the user's values, sort key, candidate) in ascending order; it is empty if the job is
        invalid.

        The distance is the sum, over ``pins``, of half the absolute base-2 logarithm of the ratio of both values. The
        sort key is a lower bound: the step time in seconds or, if memory is lacking, the bytes of a rank. ``variant``:
        the changed job. ``pins``: names of the fixed constraints to give up.
        """
        try:
            job = self._prepare_relaxed_job(variant, pins)
            _check_job_request(job)
            bounds, least = self._find_model_bounds(job), self._find_model_bounds(_maximise_offload(job))
            choices = self._list_plainest_zero_choices(job, pins)
        except PartitionError:
            return []
        changed = [p for p in choices if all(is_pin_changed(variant.constraints, pin, p) for pin in pins)]
        news = [tuple(_find_new_pin_values(pins, p).items()) for p in changed]
        possible = {
            new: _is_possible(replace(job, constraints=_update_constraints(job.constraints, new))) for new in set(news)
        }
        changed = [p for p, new in zip(changed, news, strict=True) if possible[new]]
        if not changed:
            return []
        far = [sum(measure_pin_distance(variant.constraints, pin, p) for pin in pins) for p in changed]
        # if any candidate has a plan, the one that needs the least memory does
        needs = [least.state_bytes(p) + least.layer_bytes(p) for p in changed]
        first = needs if self.short_of_memory else bounds.times(changed).tolist()
        ranked = sorted(zip(far, first, changed, strict=True))
        room = max(d.usable for d in job.topology.devices)
        fitting = [choice for choice in ranked if least.state_bytes(choice[2]) <= room]
        if not fitting:
            self._lacking.append((variant, pins, ranked[0][2]))
        return fitting

    def _list_plainest_zero_choices(self, job: Job, given_up: Sequence[str]) -> list[MeshCandidate]:
        """Return the simplest mesh candidates (mesh sizes, microbatch size, schedule and ZeRO stage) of ``job``: those
        with the schedule that needs the least memory and, if memory is not the problem, with the lowest ZeRO stage.

        ``given_up``: names of the fixed constraints that may change.
        """
        plainest = self._list_plainest_candidates(job, given_up)
        least = min(candidate.zero for candidate in plainest)
        return [p for p in plainest if self.short_of_memory or p.zero == least]

    def _list_plainest_candidates(self, job: Job, given_up: Sequence[str]) -> list[MeshCandidate]:
        """Return the mesh candidates (mesh sizes, microbatch size, schedule and ZeRO stage) of ``job``. If the user did
        not fix the schedule, only candidates with 1F1B are returned, which needs the least memory of the searched
        schedules.

        ``given_up``: names of the fixed constraints that may change. If ``virtual_stages`` is one of them, candidates
        with several virtual stages are returned, too.
        """
        space = build_search_space(job)
        asked = self.asked.constraints
        choices = _with_wider(space, {name: getattr(asked, name) for name in given_up if hasattr(asked, name)})
        free = job.constraints.schedule is None and not job.constraints.ahead
        plain = [p for p in choices if p.schedule == "1f1b"] if free else []
        if "virtual_stages" in given_up and job.train:
            plain += [other for p in plain if p.pp > 1 for other in several_stages(space, p)]
        return plain or choices

    def _can_bounds_allow(self, variant: Variant, pins: tuple[str, ...], candidate: MeshCandidate) -> bool:
        """Return whether the lower bounds on memory leave a plan possible with the mesh sizes and techniques of
        ``candidate``, for the changed job ``variant`` (model, global batch, cluster and constraints) without the fixed
        constraints named in ``pins``. If only memory is lacking, remember the candidate, so that a change that also
        adds memory can be tried later.
        """
        try:
            self._find_model_bounds(_maximise_offload(self._prepare_relaxed_job(variant, pins))).refine(candidate)
        except CapacityError:
            self._lacking.append((variant, pins, candidate))
            return False
        except PartitionError:
            return False
        return True

    def _plan_relaxed_candidate(
        self, variant: Variant, pins: Sequence[str], candidate: MeshCandidate
    ) -> SolvedCandidate | None:
        """Plan the changed job ``variant`` (model, global batch, cluster and constraints) with the mesh sizes and
        techniques of ``candidate``, with each kind of offload that ``partition`` tries in turn. Return the first
        solution that fits in memory; ``None`` if none fits. ``pins``: names of the fixed constraints that take the
        candidate's values.
        """
        lacking: list[CandidateEvaluator] = []
        changed = replace(
            self._prepare_relaxed_job(variant, pins), constraints=self._constrain_to_candidate(variant, pins, candidate)
        )
        # the offload that ``partition`` would try
        for job in list_offload_variants(changed, lambda: any(e.host_lacks for e in lacking)):
            if candidate.zero in (1, 2) and "parameters" in (job.constraints.offload or ()):
                continue  # ZeRO-1 and ZeRO-2 keep parameters whole, which are then not offloaded
            key = _bounds_cache_key(job)
            if key not in self._evaluators:
                self._evaluators[key] = CandidateEvaluator(job)
            try:
                self._find_model_bounds(job).refine(candidate)
                lacking.append(replace(self._evaluators[key], job=job, host_lacks=False))
                solved = lacking[-1].solve(candidate)
                if not self.short_of_memory or can_fit_program(job, solved):
                    return solved
            except CapacityError:
                continue
            except PartitionError:
                return None
        return None

    def _is_possible_by_bounds(self, constraints: Constraints) -> bool:
        """Return whether the lower bounds on memory allow a plan of the requested model, batch and cluster if the
        user's constraints are replaced by ``constraints``.
        """
        try:
            job = self.asked.prepare(self.asked.topology, constraints, self.asked.global_batch)
            _check_job_request(job)
            bounds = self._find_model_bounds(_maximise_offload(job))
            choices = self._list_plainest_candidates(job, ())
        except PartitionError:
            return False
        room = max(d.usable for d in job.topology.devices)
        for candidate in sorted(
            choices, key=lambda candidate: -candidate.zero if self.short_of_memory else candidate.zero
        ):
            if bounds.state_bytes(candidate) > room:
                continue
            try:
                bounds.refine(candidate)
            except PartitionError:
                continue
            return True
        return False

    def _constrain_to_candidate(self, variant: Variant, pins: Sequence[str], candidate: MeshCandidate) -> Constraints:
        """Return the constraints of the changed job ``variant`` (model, global batch, cluster and constraints), where
        those named in ``pins`` have the values of ``candidate``.
        """
        return _update_constraints(relax_pins(variant.constraints, pins), _find_new_pin_values(pins, candidate).items())

    def _step_time(self, variant: Variant, constraints: Constraints, known_s: float) -> float:
        """Return the step time in seconds of the best plan of the changed job ``variant`` (model, global batch, cluster
        and constraints) under ``constraints``. If the search fails, return ``known_s``, the step time of a plan that is
        already known.
        """
        job = self.asked.prepare(variant.topology, constraints, variant.global_batch)
        try:
            return find_best_report(min(_LEAST_S, self.until - time.monotonic()), job, math.inf).step_time or known_s
        except PartitionError:
            return known_s

    def _build_change(
        self, variant: Variant, pins: Sequence[str], candidate: MeshCandidate, plan: SolvedCandidate | None = None
    ) -> Change:
        """Return the change from the requested job to ``candidate``, with its description and its new constraints,
        topology and batch.

        ``variant``: the changed job (model, global batch, cluster and constraints). ``pins``: names of the fixed
        constraints that take the candidate's values. ``plan``: the candidate's solution; if it needs offload that the
        user did not request, the description names it and the step time. ``None``: not planned yet.
        """
        new, constraints = _find_new_pin_values(pins, candidate), self._constrain_to_candidate(variant, pins, candidate)
        texts = [*variant.texts, *(describe_pin_change(variant.constraints, pin, new.get(pin)) for pin in pins)]
        job = self._prepare_relaxed_job(variant, pins)
        beyond = [w for w in planned_only(job, candidate, constraints) if w not in job.profile.differences]
        marked = " (planned, but not executed by this version)" if beyond else ""
        if plan is not None and plan.offload and plan.offload != self.asked.constraints.offload:
            unsaid = "" if "offload" in variant.kinds else f"with offload={kinds_text(plan.offload)} "
            seconds = self._step_time(variant, constraints, plan.estimate.step_time)
            marked += f" ({unsaid}a step then takes {seconds_text(seconds)})"
        return Change(", ".join(texts) + marked, constraints, variant.topology, variant.global_batch, tuple(beyond))


def _with_wider(space: SearchSpace, given_up: Mapping[str, Any]) -> list[MeshCandidate]:
    """Return the mesh candidates (mesh sizes, microbatch size, schedule and ZeRO stage) of the search space ``space``,
    and further candidates that the search tries only on request: larger ``tp`` than the search's limit, if the user's
    ``tp`` is above this limit; and other ``cp``, if the user's ``cp`` is above 1.

    ``given_up``: name -> the user's value, for the fixed constraints that may change.
    """
    sizes = list_divisors(space.world_size)[1:]
    # each rank gets two pieces of the sequence
    shared = [size for size in sizes if space.length and space.length % (2 * size) == 0]
    wider = [{"tp": size} for size in sizes if size > space.widest] if given_up.get("tp", 1) > space.widest else []
    wider += [{"cp": size} for size in shared] if given_up.get("cp", 1) > 1 else []
    found: dict[MeshCandidate, None] = {}
    lacking: PartitionError | None = None
    for pinned in ({}, *wider):
        try:
            asked = space.constraints.model_copy(update=pinned)
            found |= dict.fromkeys(list_candidates(replace(space, constraints=asked)))
        except PartitionError as error:
            lacking = lacking or error
    if not found and lacking is not None:
        raise lacking
    return list(found)


def _and_then(text: str, search: _RelaxationSearch) -> tuple[Change, ...]:
    """Return the second change of a job (model, global batch, cluster and constraints) that needs the least effort
    among the changes that ``search`` finds, as a tuple of one; empty if it finds none. ``search``: searches for changes
    of a job that has been changed once already. ``text``: the description of that first change. It is put in front of
    the description of the second change, separated by a comma.
    """
    return tuple(replace(change, text=f"{text}, {change.text}") for change in search.find_changes()[:1])


def _find_new_pin_values(pins: Sequence[str], candidate: MeshCandidate) -> dict[str, Any]:
    """Return the values that ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage) has for the
    constraints named in ``pins``, as a dict: name -> value. Constraints for which a candidate has no value are left
    out."""
    new = {pin: getattr(candidate, pin) for pin in pins if pin in MeshCandidate.__dataclass_fields__}
    return {pin: size for pin, size in new.items() if size or pin not in _ZERO_IS_FREE}


def _update_constraints(constraints: Constraints, new: Iterable[tuple[str, Any]]) -> Constraints:
    return constraints.model_copy(update=dict(new))


def _check_job_request(job: Job) -> None:
    """Raise the errors that ``partition`` raises if its arguments (cluster, constraints and so on), which ``job``
    holds, are invalid."""
    check_request(job.topology, job.constraints, job.optimizer, job.train, job.profile)


def _is_possible(job: Job) -> bool:
    try:
        _check_job_request(job)
    except PartitionError:
        return False
    return True


def _maximise_offload(job: Job) -> Job:
    """Return ``job`` (model, batch, cluster and constraints) with as much offload to host memory as ``partition`` would
    try. If lower bounds on memory exclude the returned job, then ``job`` has no plan with any offload.
    """
    return list(list_offload_variants(job))[-1]
