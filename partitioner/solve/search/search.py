"""Search the candidates of a job (meshes, microbatch sizes, schedules, ZeRO stages), those with the least lower bound
first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from partitioner.background import SharedTasks
from partitioner.candidate import MeshCandidate
from partitioner.errors import CapacityError, TimeLimitError
from partitioner.passes.errors import PartitionError
from partitioner.plan import Baseline, Candidate, Certificate, Limits
from partitioner.runtime.program.program import Offload
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.evaluate.evaluator import CandidateEvaluator, SolvedCandidate
from partitioner.solve.evaluate.job import Job
from partitioner.solve.search.attempts import CandidateAttempts
from partitioner.solve.search.baselines import (
    StandardLayout,
    compare_standard_layouts,
    is_known,
    list_standard_layouts,
    no_candidates,
    unpin_constraints,
)
from partitioner.solve.search.best_first import BestFirstSearch, SearchProgress, ZeroInfeasibility
from partitioner.solve.search.bound_steps import BoundCascade
from partitioner.solve.search.outcomes import (
    CandidateOutcome,
    bound_and_gap,
    list_solved_candidates,
)
from partitioner.solve.search.outside_search import PATIENCE, BestSchedule, keep_faster_plan, list_promising_candidates
from partitioner.solve.search.smaller_clusters import (
    UNFINISHED_OFFLOAD,
    UNTRIED_OFFLOAD,
    JobOf,
    describe_offload_comparison,
    faster_batches,
    faster_with_offload,
    is_even,
    is_offload_worth_trying,
    without_laggards,
)
from partitioner.solve.search.space import SearchSpace, beyond_the_bound, build_search_space, left_out, list_candidates
from partitioner.solve.search.warm_start import WarmStart
from partitioner.solve.sharding.context_parallel import check_algorithm
from partitioner.topology.hosts import can_offload, has_disks

# Kinds of data to keep in host memory if nothing fits otherwise, from the fewest to the most.
OFFLOAD_SETS: tuple[tuple[Offload, ...], ...] = (
    ("optimizer",),
    ("optimizer", "activations"),
    ("optimizer", "activations", "parameters"),
)

_LEAST_S = 5.0  # least time for smaller clusters and tuned layouts; otherwise as long as the search for the plan took


_RECOMPUTED = 0.02  # least share of a step for recomputation at which other shardings over tp are tried

# kinds of alternatives with which the report compares a plan
_SMALLER, _OFFLOAD, _LAYOUTS = "smaller clusters and other batches", "offload", "standard layouts"
Comparisons = SharedTasks[str, tuple[Baseline, ...], tuple[Baseline, ...]]


@dataclass(frozen=True)
class PlanSearchResult:
    """Result of the search: the plan (``chosen``), its certificate (how near it is to the optimum), and the baselines
    (well-known layouts for comparison), which may still be computed in the background.

    ``rows``: candidate (mesh sizes, microbatch size, schedule and ZeRO stage) -> its outcome. ``lacking``: the memory
    shortage that made the search choose offload; empty if there was none. ``evaluator``: the object that planned the
    candidates; its shardings can be reused in a search with other free memory."""

    chosen: SolvedCandidate
    certificate: Certificate
    baselines: Comparisons
    rows: Mapping[MeshCandidate, CandidateOutcome] = field(default_factory=dict)
    lacking: str = ""
    evaluator: CandidateEvaluator | None = None

    def compared(self, lower_bound_s: float = math.inf) -> Certificate:
        """Return the certificate (how near the plan is to the optimum) with the baselines (well-known layouts for
        comparison) added. The computation of the baselines is awaited; if the user interrupts it, they are left out.

        ``lower_bound_s``: a lower bound in seconds on the step times of plans that this search did not consider. If it
        is smaller than the lower bound of the certificate, it replaces that bound in the result."""
        bound, gap = bound_and_gap(self.certificate.objective, (self.certificate.bound, lower_bound_s))
        kinds = [kind for kind in (_OFFLOAD, _SMALLER, _LAYOUTS) if kind in self.baselines.keys]
        try:
            found = {kind: self.baselines.result(kind) for kind in kinds}
        except KeyboardInterrupt:  # the plan itself is complete
            found = {}
        baselines = tuple(chain.from_iterable(found.get(kind, ()) for kind in (_LAYOUTS, _SMALLER, _OFFLOAD)))
        covered, beyond = self.certificate.covered_bound, self.certificate.beyond
        if "offload" in beyond and (told := describe_offload_comparison(baselines, self.certificate.objective)):
            beyond = {**beyond, "offload": told}
        update = {"bound": bound, "gap": gap, "covered_bound": None if covered is None else min(covered, lower_bound_s)}
        return self.certificate.model_copy(update={"baselines": baselines, "beyond": beyond, **update})


def search_for_plan(
    job: Job,
    time_limit_s: float | None = None,
    *,
    progress: Callable[[SearchProgress], None] | None = None,
    compare: bool = True,
    cutoff_s: float = math.inf,
    before: PlanSearchResult | None = None,
    other_batch: JobOf | None = None,
) -> PlanSearchResult:
    """Return the best plan of all candidates of ``job`` (model, batch, cluster and constraints), with its certificate,
    which says how near the plan is to the optimum.

    If no candidate fits in memory, the search is repeated with more and more kinds of data offloaded to host memory. If
    host memory is too small, the last variants have optimizer states on disk. If the user fixed offload or the mesh,
    the search is not repeated.

    Args:
    - time_limit_s: time limit of the search in seconds; ``None``: no limit.
    - progress: called with the state of the search, or ``None``.
    - compare: whether to plan the standard layouts for comparison.
    - cutoff_s: plans with at least this step time in seconds are not of interest and may be missed.
    - before: result of an earlier search of the job, in which ranks had more free memory, or ``None``.
    - other_batch: function that returns the job with another global batch, for the report, or ``None``.

    Raises:
    - CapacityError: no candidate fits in memory.
    - PlanError, ConstraintError: there is no plan for another reason.
    """
    deadline = time.monotonic() + (math.inf if time_limit_s is None else time_limit_s)
    request = _SearchRequest(progress, compare, deadline, cutoff_s, other_batch, outside=True)
    return _search_variants(job, request, before, None)


def _search_variants(
    job: Job, request: _SearchRequest, before: PlanSearchResult | None, similar: CandidateEvaluator | None
) -> PlanSearchResult:
    """Return the best plan of ``job``. If no candidate fits in memory, variants of the job with more and more data in
    host memory are searched, and the best plan of the first variant that fits is returned. ``request``: time limit,
    cutoff and callbacks of the search. ``before``: result of an earlier search of the job, in which ranks had more free
    memory, or ``None``. ``similar``: evaluator of a similar job, whose shardings are reused if they are valid for this
    job, or ``None``."""
    pinned = job.constraints
    if pinned.cp is not None:
        check_algorithm(job.model, pinned.cp, pinned.tp or 1, pinned.context)
    had = before.chosen.offload if before else ()
    short: CapacityError | None = None
    hosts_lacked: list[bool] = []
    tried = before is None
    similar = similar if before is None else before.evaluator
    for asked in list_offload_variants(job, lambda: any(hosts_lacked) or "disk" in had):
        tried = tried or (asked.constraints.offload or ()) == had
        if not tried:  # in the earlier search nothing fitted with less data in host memory
            continue
        evaluator = CandidateEvaluator(asked) if similar is None else similar.for_job(asked)
        similar = evaluator
        try:
            known = before.rows if before and (asked.constraints.offload or ()) == had else {}
            hosts = asked is not job
            found = _search_candidates(asked, evaluator, request, known, hosts=hosts)
            lacking = short.shortage if short is not None else before.lacking if before else ""
            return replace(found, lacking=lacking if hosts else "")
        except CapacityError as error:
            short = error if asked is job or short is None else short  # keep the error of the job without offload
        finally:
            evaluator.locals.ahead.end()
            hosts_lacked.append(evaluator.host_lacks)
    assert short is not None
    raise short


def list_offload_variants(job: Job, host_lacks: Callable[[], bool] = lambda: False) -> Iterator[Job]:
    """Yield ``job`` (model, batch, cluster and constraints) unchanged, then variants with more and more kinds of data
    in host memory. If there are disks and ``host_lacks()`` says that host memory was too small, variants with optimizer
    states on disk follow. Only the unchanged job is yielded if the user fixed offload or the mesh, or if the plan has
    further programs, which read parameters on the device alone."""
    pinned = job.constraints
    yield job
    fixed = pinned.offload is not None or pinned.fixes_mesh(job.topology.num_devices) or bool(job.further_samples)
    if fixed or not can_offload(job.topology):
        return
    sets = OFFLOAD_SETS if job.train else OFFLOAD_SETS[-1:]
    sets = tuple(kinds for kinds in sets if "parameters" not in kinds or pinned.zero not in (1, 2))
    for kinds in sets:
        yield _with_offload(job, kinds)
    if job.train and has_disks(job.topology) and host_lacks():
        for kinds in sets:
            yield _with_offload(job, (*kinds, "disk"))


def _with_offload(job: Job, kinds: tuple[Offload, ...]) -> Job:
    return replace(job, constraints=job.constraints.model_copy(update={"offload": kinds}))


@dataclass(frozen=True)
class _SearchRequest:
    """Arguments of a search for a plan. ``progress``: called with the state of the search, or ``None``. ``compare``:
    whether to plan well-known layouts for comparison. ``deadline``: end of the search on the clock of
    :func:`time.monotonic`. ``cutoff_s``: plans of at least this many seconds per step are of no interest.
    ``other_batch``: function that returns the planning problem with another global batch, for comparison, or
    ``None``. ``outside``: whether to try promising candidates that the bounds do not cover."""

    progress: Callable[[SearchProgress], None] | None
    compare: bool
    deadline: float
    cutoff_s: float
    other_batch: JobOf | None
    outside: bool


def _search_candidates(
    job: Job,
    evaluator: CandidateEvaluator,
    request: _SearchRequest,
    before: Mapping[MeshCandidate, CandidateOutcome],
    *,
    hosts: bool,
) -> PlanSearchResult:
    """Search the candidates of one variant of a job, which fixes the kinds of offloaded data, and return the best plan.
    ``job``: the variant (model, batch, cluster and constraints). ``evaluator``: plans the candidates. ``request``: time
    limit, cutoff and callbacks of the search. ``before``: candidate -> its outcome in an earlier search. ``hosts``:
    whether offload was added because nothing fitted without it."""
    bounds = ModelBounds(job, evaluator.placements)
    start, compare, deadline = time.monotonic(), request.compare, request.deadline
    space = build_search_space(job)
    candidates = list_candidates(space)
    free = replace(job, constraints=unpin_constraints(job.constraints))
    always = list_standard_layouts(space, candidates, bounds) if compare else []

    early = WarmStart(space, frozenset(candidates), bounds, always, request.deadline, request.cutoff_s)
    cascade = BoundCascade(bounds, evaluator, candidates, space)
    attempts = CandidateAttempts(
        evaluator, space, cascade, early, ZeroInfeasibility(bounds.state_bytes), request.cutoff_s
    )
    result = BestFirstSearch(
        cascade,
        attempts,
        progress=request.progress,
        time_limit_s=request.deadline - time.monotonic(),
        patience=PATIENCE,
        cutoff_s=request.cutoff_s,
    ).run(
        candidates,
        always=chain(list(list_solved_candidates(before))[:1], early.list_first_candidates() if compare else ()),
        left_out=left_out(space, candidates),
        before=before,
    )
    attempts.withdraw()
    beside = evaluator if free.constraints == job.constraints else evaluator.for_job(free)
    found, certificate = result.best.payload, result.certificate
    if request.outside and not result.interrupted and job.train and job.constraints.leaves_schedule:
        known = {**list_solved_candidates(before), **list_solved_candidates(result.rows)}
        attempts.remember_devices(known.values())
        schedules = BestSchedule(found, certificate, attempts)
        promising = list_promising_candidates(space, schedules, known, result.rows, cascade)
        found, certificate = schedules.follow(promising, deadline)
    if certificate.cut_off is None and not evaluator.tries_all(found.candidate):
        found, certificate = keep_faster_plan(
            certificate, found, evaluator.without_share_history.solve(found.candidate)
        )
    if certificate.cut_off is None:
        for again in _solve_other_shardings(evaluator, found):
            found, certificate = keep_faster_plan(certificate, found, again)

    as_long_s = max(_LEAST_S, time.monotonic() - start)
    comparison = _Comparison(
        job,
        found,
        evaluator,
        beside,
        bounds,
        candidates,
        always,
        certificate.candidates,
        request,
        as_long_s,
        is_outside=found.candidate not in result.rows,
        hosts=hosts,
    )
    evaluator.locals.ahead.end()  # so that the comparisons, if they run in a fork, have a second process of their own
    baselines = comparison.start()
    beyond = beyond_the_bound(space)
    if comparison.tries_offload:
        beyond["offload"] = UNFINISHED_OFFLOAD  # until the result of the comparison is known
    elif compare and "offload" in beyond and job.train and not job.further_samples:
        beyond["offload"] = UNTRIED_OFFLOAD
    if not evaluator.placements.complete(found.candidate.grid) and job.constraints.placement is None:
        beyond["placement"] = "Only the most promising placements of ranks on devices were tried."
    certificate = certificate.model_copy(update={"limits": _space_to_limits(space), "beyond": beyond})
    return PlanSearchResult(found, certificate, baselines, result.rows, evaluator=evaluator)


@dataclass(frozen=True)
class _Comparison:
    """Plans the alternatives with which the report compares the plan of a job: well-known layouts, smaller clusters,
    other global batches, and offload to host memory.

    ``job``: the model, batch, cluster and constraints. ``found``: the best plan of the job. ``evaluator``: the object
    that planned the candidates of the job. ``beside``: evaluator of the job without pinned constraints. ``bounds``:
    computes quick lower bounds on the ``candidates`` of the search. ``standards``: the well-known layouts. ``rows``:
    the report's rows of all candidates. ``request``: the search for the plan. ``as_long_s``: most seconds for each kind
    of alternatives. ``is_outside``: whether ``found`` is a candidate that the bounds do not cover. ``hosts``: whether
    offload was added because nothing fitted without it."""

    job: Job
    found: SolvedCandidate
    evaluator: CandidateEvaluator
    beside: CandidateEvaluator
    bounds: ModelBounds
    candidates: Sequence[MeshCandidate]
    standards: Sequence[StandardLayout]
    rows: Sequence[Candidate]
    request: _SearchRequest
    as_long_s: float
    is_outside: bool
    hosts: bool

    def start(self) -> Comparisons:
        """Return the tasks that plan the alternatives. If planning will probably take long, a second process begins
        with them now."""
        job, compare = self.job, self.request.compare
        is_pinned = bool(job.constraints.offload) and not self.hosts
        is_unknown = is_pinned or any(not is_known(standard, self.rows) for standard in self.standards)
        worth_it = compare and (is_unknown or self.tries_offload or not is_even(job.topology))
        kinds = (_SMALLER, _OFFLOAD, _LAYOUTS) if compare else ()
        return SharedTasks(
            kinds, self.plan, tuple, tuple, worth_it=worth_it, most_s=self.as_long_s + _LEAST_S, first_is_own=False
        )

    @property
    def tries_offload(self) -> bool:
        """Return whether the plan is compared with plans that keep data in host memory."""
        return self.request.compare and is_offload_worth_trying(self.job, self.found.estimate)

    def plan(self, kind: str) -> tuple[Baseline, ...]:
        """Plan the alternatives of one kind and return their outcomes. ``kind``: ``"smaller clusters and other
        batches"``, ``"offload"`` or ``"standard layouts"``."""
        job, found_s, until = self.job, self.found.estimate.step_time, self._until
        offload = job.constraints.offload or ()

        def find_best(asked: Job, cutoff_s: float) -> Candidate:
            """Return the report's row of the best plan of ``asked``, a similar job, that takes less than ``cutoff_s``
            seconds per step. If the plan of the present job is a candidate that the bounds do not cover, such
            candidates are tried for ``asked`` too."""
            return find_best_report(until - time.monotonic(), asked, cutoff_s, self.evaluator, outside=self.is_outside)

        if kind == _SMALLER:
            fewer = without_laggards(job, found_s, self._bound_all_candidates, find_best)
            if self.request.other_batch is not None and not offload:
                fewer += faster_batches(job, found_s, self.request.other_batch, find_best)
            return tuple(baseline.model_copy(update={"offload": offload}) for baseline in fewer)
        if kind == _OFFLOAD:
            hosted = _with_offload(job, OFFLOAD_SETS[0])
            return faster_with_offload(hosted, found_s, find_best) if self.tries_offload else ()
        tried = {s.name for s in self.standards if offload and (s.excluded or not self.hosts)}
        alone = _plan_without_host_memory(job, tried, self.evaluator) if tried else {}
        return compare_standard_layouts(self.standards, self.rows, self.beside, offload, alone, self._until)

    @property
    def _until(self) -> float:
        return min(self.request.deadline, time.monotonic() + self.as_long_s)

    def _bound_all_candidates(self) -> float:
        """Return a lower bound in seconds on the step times of all candidates of the job."""
        return float(self.bounds.times(self.candidates).min())


def _solve_other_shardings(evaluator: CandidateEvaluator, found: SolvedCandidate) -> Iterator[SolvedCandidate]:
    """Yield plans of the candidate of ``found`` with other shardings over ``tp``: first with activations that are whole
    between layers, then with activations that are sharded along the sequence there. ``evaluator`` has planned ``found``
    with the sharding that takes the least time if nothing is recomputed.

    Another sharding can be faster if it saves fewer activations, or if its forward, which is repeated, is shorter. It
    is tried only if ``found`` recomputes for a noticeable time, and if its time without any recomputation is below the
    time of the sharding of ``found`` with full recomputation."""
    job, estimate, candidate = evaluator.job, found.estimate, found.candidate
    is_free = job.constraints.sequence_parallel is None and candidate.tp > 1 and job.layout is None
    if not is_free or estimate.breakdown.get("recompute", 0.0) < _RECOMPUTED * estimate.step_time:
        return
    most_s = sum(_sum_call_seconds(evaluator, candidate))
    for sequence_parallel in (False, True):
        constraints = job.constraints.model_copy(update={"sequence_parallel": sequence_parallel})
        other = evaluator.for_job(replace(job, constraints=constraints))
        with suppress(PartitionError):
            if _sum_call_seconds(other, candidate)[0] < most_s:
                yield other.solve(candidate, found.devices, proven=False, cutoff_s=estimate.step_time)


def _sum_call_seconds(evaluator: CandidateEvaluator, candidate: MeshCandidate) -> tuple[float, float]:
    """Return two numbers for one microbatch in all calls of ``candidate`` with the sharding of ``evaluator``: the
    seconds of forward and backward together, and the seconds of full recomputation. ``candidate``: mesh sizes,
    microbatch size, schedule and ZeRO stage."""
    local, cache, _ = evaluator.own(candidate)
    costs = [evaluator.list_stage_costs(candidate, cache)[0][call.block] for call in local.model.calls]
    return sum(c.forward_total_s + c.backward_total_s for c in costs), sum(c.recompute_s for c in costs)


def _space_to_limits(space: SearchSpace) -> Limits:
    """Return the numbers of the search space ``space`` (cluster, batch, constraints and sizes of the model), such as
    the number of layers, that are recorded in the certificate of the plan."""
    dims = tuple(sorted(space.dims))
    return Limits(
        calls=space.num_calls,
        dims=dims,
        experts=space.experts,
        length=space.length,
        repeated=space.repeated,
        even=space.even,
        further_samples=space.further_samples,
        further_positions=space.further_positions,
        tokens=space.tokens,
    )


def _plan_without_host_memory(job: Job, names: Collection[str], similar: CandidateEvaluator) -> dict[str, Baseline]:
    """Plan the standard layouts called ``names`` for ``job`` (model, batch, cluster and constraints) without offload to
    host memory. Return a dict: name -> the plan, or the reason why there is none; empty if the job has no candidates.
    ``similar``: evaluator of the job with offload, whose shardings are reused if they are valid without offload."""
    alone = replace(job, constraints=unpin_constraints(job.constraints).model_copy(update={"offload": ()}))
    evaluator = similar.for_job(alone)
    bounds = ModelBounds(alone, evaluator.placements)
    space = build_search_space(alone)
    try:
        found = no_candidates(list_standard_layouts(space, list_candidates(space), bounds), names)
    except PartitionError:
        return {}
    until = time.monotonic() + _LEAST_S
    return {b.name: b for b in compare_standard_layouts(found, (), evaluator, until=until)}


def find_best_report(
    time_limit_s: float,
    job: Job,
    cutoff_s: float,
    evaluator: CandidateEvaluator | None = None,
    *,
    outside: bool = True,
) -> Candidate:
    """Return the report's row of the best plan of ``job`` (model, batch, cluster and constraints) that takes less than
    ``cutoff_s`` seconds per step. ``time_limit_s``: seconds for the search. ``evaluator``: evaluator of a similar job,
    whose shardings are reused if they are valid for ``job``. ``outside``: whether to try also promising candidates that
    the bounds do not cover. Raises :class:`PartitionError` if there is no such plan, and :class:`TimeLimitError` if
    none was found in the time."""
    deadline = time.monotonic() + time_limit_s
    try:
        found = _search_variants(job, _SearchRequest(None, False, deadline, cutoff_s, None, outside), None, evaluator)
    except PartitionError as error:
        if time.monotonic() < deadline:
            raise
        raise TimeLimitError(str(error)) from error
    row = next(row for row in found.certificate.candidates if row.status == "chosen")
    if found.certificate.cut_off is not None and found.certificate.objective >= cutoff_s:
        raise TimeLimitError("the search ended before a plan was found that is fast enough")
    return row.model_copy(update={"status": "solved"})


__all__ = ["OFFLOAD_SETS", "MeshCandidate", "PlanSearchResult", "list_offload_variants", "search_for_plan"]
