"""Turn the best candidate into a program that is proven correct and fits in memory, or say why this version cannot
execute the plan.

If the program exceeds memory, the search is repeated with more memory left free for its candidate. ``context_ways``
gives the step time with each algorithm of attention over ``cp``."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, cast

from partitioner.background import Future
from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost.call.fp8 import find_scaling
from partitioner.cost.call.recomputation import find_recomputed_nodes, recompute_mode
from partitioner.cost.call.saved_activations import kept_by
from partitioner.cost.step.estimate import with_step_time
from partitioner.cost.step.offload import check_disks, check_hosts
from partitioner.emit.program import ProgramSpec, emit
from partitioner.errors import CapacityError, TimeLimitError
from partitioner.optimizers import OPTIMIZERS
from partitioner.passes.errors import PartitionError
from partitioner.passes.ops.scaled_products import Scaling
from partitioner.plan import NEAR, Candidate, Certificate, ContextWay, Estimate
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.memory import disk_bytes, host_bytes
from partitioner.runtime.program.precision import convert_to_fp8
from partitioner.runtime.program.program import Program
from partitioner.runtime.program.state_bytes import list_host_states
from partitioner.runtime.prove.prove import prove
from partitioner.schedules.formulas import is_formula, is_split
from partitioner.simulate.program_memory import replace_estimated_memory
from partitioner.simulate.program_time import PlanDurations, ProgramOnDevices, simulate_plan_seconds
from partitioner.solve.evaluate.evaluator import CandidateEvaluator, SolvedCandidate
from partitioner.solve.evaluate.job import Job
from partitioner.solve.search.baselines import unpin_constraints
from partitioner.solve.search.outcomes import bound_and_gap, build_candidate_report, solved_to_evaluated
from partitioner.solve.search.outside_search import add_rows_to_certificate, is_same_candidate
from partitioner.solve.search.search import PlanSearchResult
from partitioner.solve.sharding.context_parallel import ALGORITHMS, algorithms_of
from partitioner.solve.sharding.local_model import layouts_of
from partitioner.topology.groups import stage_capacity, stage_ranks
from partitioner.units import bytes_text


def context_ways(job: Job, chosen: SolvedCandidate) -> tuple[ContextWay, ...]:
    """Return, for the report, the step time of the plan ``chosen`` with each algorithm of context-parallel attention
    (ring, all-gather, Ulysses), one entry per algorithm. All entries keep the placement (assignment of ranks to
    devices) of ``chosen``.

    The result is empty if the plan has no context-parallel axis ``cp``. An entry has a reason instead of a step time if
    the algorithm has no plan. ``job``: the planning problem (model, batch, cluster and constraints) that was solved.
    """
    if chosen.local.context is None or not chosen.context_model:
        return ()
    calls = algorithms_of(chosen.context_model, chosen.local.context)
    plain = is_formula(
        chosen.candidate.schedule, chosen.candidate.pp, job.train
    )  # for other schedules the cut into stages takes long
    ways = []
    for name in ALGORITHMS:
        if calls == {name: sum(calls.values())}:
            ways.append(ContextWay(algorithm=name, calls=calls[name], step_time=chosen.estimate.step_time))
            continue
        pinned = job.constraints.model_copy(update={"context": name})
        try:
            evaluator = CandidateEvaluator(replace(job, constraints=pinned))
            found = evaluator.solve(chosen.candidate, chosen.devices, proven=plain, improved=plain)
            way = ContextWay(algorithm=name, step_time=found.estimate.step_time)
        except PartitionError as error:
            way = ContextWay(algorithm=name, reason=getattr(error, "message", str(error)))
        ways.append(way.model_copy(update={"calls": calls.get(name, 0)}))
    return tuple(ways)


_TRIES = 3  # how often more memory is reserved for a candidate, and at last for all candidates

_TURNS = 8  # repetitions of the search in which single candidates get more reserved memory
_ENOUGH = 5  # repetitions after which a program that nearly fits is returned
SAME_TIME = 0.01  # relative difference of estimated and simulated step time that is accepted
_ROUNDING = 1e-9  # relative rounding of sums of seconds
_MOST_SIMULATED = 4  # candidates that get their simulated time, at most; after that the plan is taken as it is


class PlanFinder(Protocol):
    """Function that returns the best plan of a job (model, batch, cluster and constraints) within a time limit in
    seconds (``None``: no limit).

    ``before``: the result of an earlier search, in which ranks had more free memory, or ``None``.
    """

    def __call__(
        self, job: Job, time_limit_s: float | None, /, *, before: PlanSearchResult | None
    ) -> PlanSearchResult: ...


def plan_to_fit(
    job: Job, find: PlanFinder, *, estimate_only: bool, time_limit_s: float | None = None
) -> PlannedProgram:
    """Return the best plan of ``job`` (model, batch, cluster and constraints), found by ``find``, together with a
    program that fits in memory.

    The program of a plan may need more memory than the search estimated. If it exceeds a device, the search is repeated
    with more memory reserved for this candidate, and finally for all candidates. Repetitions end when ``time_limit_s``
    seconds have passed.

    ``estimate_only``: whether to return no program, because the plan is not to be executed. Raises the exceptions of
    ``find``, and :class:`CapacityError` if no program fits."""
    near: tuple[PlannedProgram, PlanSearchResult] | None = None
    fastest: tuple[float, PlannedProgram, PlanSearchResult] | None = None  # of the plans slower than estimated
    explored: PlanSearchResult | None = None
    lacking: PartitionError | None = None
    tried: Counter[MeshCandidate] = Counter()
    lower_bound_s, untold = math.inf, 0
    end = None if time_limit_s is None else time.monotonic() + time_limit_s
    for turn in range(_TURNS + _TRIES):
        left = None if end is None else end - time.monotonic()
        if (lacking is not None and left is not None and left <= 0) or (near is not None and turn >= _ENOUGH):
            break
        if turn >= _TURNS:
            assert explored is not None
            lower_bound_s = lower_bound_s if job.reserve else explored.certificate.bound
            job = replace(job, reserve=max(untold, job.reserve + 1), reserves={}, refused={})
        try:
            explored = find(job, left, before=explored)
        except (CapacityError, TimeLimitError) as error:
            if lacking is None and isinstance(error, TimeLimitError):
                raise
            lacking = lacking or error
            break
        with explored.baselines:
            found = _emit_found_plan(job, explored, estimate_only)
            lacks = (
                None
                if found.program is None
                else _find_memory_shortfall(job, chosen=found.chosen, estimate=found.estimate)
            )
            if lacks is None:
                candidate, seconds = found.chosen.candidate, found.estimate.simulated
                if candidate in job.simulated or not _is_slower(found.estimate):
                    certificate = explored.compared(lower_bound_s)
                    layout = _plan_faster_layout(job, explored, certificate)
                    if layout is not None and (faster := _emit_if_faster(job, layout, found, estimate_only)):
                        found, certificate = faster, layout.certificate
                    return replace(found, certificate=_as_followed(certificate, found), lacking=explored.lacking)
                assert seconds is not None
                if fastest is None or seconds < fastest[0]:
                    fastest = seconds, found, explored
                done = explored.certificate.cut_off is not None or len(job.simulated) >= _MOST_SIMULATED
                if done or _rivals_s(explored) >= seconds * (1 - SAME_TIME):
                    _, found, explored = fastest
                    certificate = _as_followed(explored.compared(lower_bound_s), found)
                    return replace(_correct_step_time(found, certificate), lacking=explored.lacking)
                job = replace(job, simulated={**job.simulated, candidate: seconds})
                continue
        if near is None and lacks.error.missing_bytes <= NEAR * lacks.room:
            near = found, explored
        lacking, untold = lacking or lacks.error, max(untold, lacks.untold)
        job = _with_less(job, found.chosen.candidate, lacks, tried)
    if near is not None:
        found, explored = near
        return replace(
            found, certificate=_as_followed(explored.compared(lower_bound_s), found), lacking=explored.lacking
        )
    assert lacking is not None
    raise lacking


def _plan_faster_layout(job: Job, explored: PlanSearchResult, certificate: Certificate) -> PlanSearchResult | None:
    """Return ``explored`` with the plan of the fastest of the well-known layouts to which the plan is compared, if this
    layout is faster than the plan, and ``None`` otherwise. The search may miss such a layout if it has several virtual
    stages on a rank, since it tries only the most promising of these.

    ``explored``: the result of the search for ``job``. ``certificate``: its certificate with the layouts. Layouts are
    not considered if the user fixed a part of the layout, if the search was cut off, or if not all placements of ranks
    on devices can be tried, so that the lower bound of a layout would not be known."""
    if explored.evaluator is None or certificate.cut_off is not None:
        return None
    if unpin_constraints(job.constraints) != job.constraints:
        return None
    rows = [
        baseline.candidate
        for baseline in certificate.baselines
        if baseline.candidate is not None
        and not (baseline.excluded or baseline.global_batch)
        and baseline.offload == explored.chosen.offload
        and (baseline.candidate.step_time or math.inf) < certificate.objective * (1 - _ROUNDING)
    ]
    for row in sorted(rows, key=lambda row: row.step_time or math.inf):
        if math.prod(row.mesh.values()) != job.topology.num_devices * row.mesh["ep"]:
            continue  # of a part of the cluster
        if not explored.evaluator.tries_all(candidate := _row_to_candidate(row)):
            continue
        with suppress(PartitionError):
            solved = explored.evaluator.solve(candidate)
            if solved.estimate.step_time < certificate.objective * (1 - _ROUNDING):
                return replace(explored, chosen=solved, certificate=_with_layout_chosen(certificate, explored, solved))
    return None


def _row_to_candidate(row: Candidate) -> MeshCandidate:
    """Return the candidate of which ``row`` is the row in the report."""
    return MeshCandidate(
        **row.mesh,
        microbatch_size=row.microbatch_size,
        schedule=row.schedule,
        etp=0 if row.etp == row.mesh["tp"] else row.etp,
        zero=row.zero,
        virtual_stages=row.virtual_stages,
        dp_shard=row.dp_shard,
    )


def _with_layout_chosen(certificate: Certificate, explored: PlanSearchResult, solved: SolvedCandidate) -> Certificate:
    """Return a copy of ``certificate`` in which the chosen plan is ``solved``, the plan of a well-known layout, instead
    of that of ``explored``."""
    row = build_candidate_report(solved.candidate, solved_to_evaluated(solved))
    row = row.model_copy(update={"bound": solved.lower_bound_s})
    others = tuple(old for old in certificate.candidates if not is_same_candidate(old, row))
    known = certificate.model_copy(update={"candidates": others})
    told = add_rows_to_certificate(known, [row], solved, explored.chosen)
    chosen = told.candidates[-1]
    baselines = tuple(
        baseline.model_copy(update={"candidate": chosen})
        if baseline.candidate is not None and is_same_candidate(baseline.candidate, chosen)
        else baseline
        for baseline in told.baselines
    )
    return told.model_copy(update={"baselines": baselines})


def _emit_if_faster(
    job: Job, layout: PlanSearchResult, found: PlannedProgram, estimate_only: bool
) -> PlannedProgram | None:
    """Return the plan in ``layout`` with its program. Return ``None`` if the program does not fit in memory, or if its
    simulation takes longer than estimated or than that of ``found``, the plan of ``job`` so far. ``estimate_only``:
    write no program."""
    emitted = _emit_found_plan(job, layout, estimate_only)
    if emitted.program is None:
        return emitted if found.program is None else None
    lacks = _find_memory_shortfall(job, emitted.chosen, emitted.estimate)
    seconds = (emitted.estimate.simulated or math.inf), (found.estimate.simulated or math.inf)
    return None if lacks is not None or _is_slower(emitted.estimate) or seconds[0] > seconds[1] else emitted


def _is_slower(estimate: Estimate) -> bool:
    """Return whether the step time in ``estimate`` that was simulated for the emitted program (the instructions of all
    ranks) is more than 1 % longer than the estimated one."""
    return estimate.simulated is not None and estimate.simulated > estimate.step_time * (1 + SAME_TIME)


def _rivals_s(explored: PlanSearchResult) -> float:
    """Return a lower bound in seconds on the step times of all candidates except the chosen one; infinite if there is
    no other. If the program of the chosen plan is slower than estimated, this bound tells whether the plan is still the
    best. A solved candidate counts with its estimated step time, any other candidate with its lower bound.
    ``explored``: the result of the search."""
    rows = (row for row in explored.rows.values() if row.error is None and row.status != "chosen")
    return min((row.lower_bound_s for row in rows), default=math.inf)


def _correct_step_time(found: PlannedProgram, certificate: Certificate) -> PlannedProgram:
    """Return a copy of the plan ``found`` in which the simulated step time of its program (the instructions of all
    ranks) replaces the estimated one. Its certificate is a copy of ``certificate`` (how near the plan is to the
    optimum) with objective and gap computed from the simulated time.
    """
    seconds = found.estimate.simulated
    assert seconds is not None
    bound, gap = bound_and_gap(seconds, (certificate.bound,))
    told = certificate.model_copy(update={"objective": seconds, "bound": bound, "gap": gap})
    return replace(found, estimate=with_step_time(found.estimate, seconds), certificate=told)


def _as_followed(certificate: Certificate, found: PlannedProgram) -> Certificate:
    """Return a copy of ``certificate`` (how near the plan is to the optimum) in which the row of the chosen plan has
    the memory that its emitted program needs, instead of the search's estimate. ``found``: the plan with its program.
    If there is no program, ``certificate`` is returned unchanged."""
    if found.program is None:
        return certificate
    most = max(found.estimate.memory)

    def followed_row(row: Candidate) -> Candidate:
        return row.model_copy(update={"memory": most}) if row.status == "chosen" else row

    baselines = tuple(
        b.model_copy(update={"candidate": followed_row(b.candidate)}) if b.candidate is not None else b
        for b in certificate.baselines
    )
    rows = tuple(map(followed_row, certificate.candidates))
    return certificate.model_copy(update={"candidates": rows, "baselines": baselines})


def _with_less(job: Job, candidate: MeshCandidate, lacks: _MemoryShortfall, tried: Counter[MeshCandidate]) -> Job:
    """Return a copy of ``job`` (model, batch, cluster and constraints) with a larger memory reserve for ``candidate``,
    so that its program may fit. After a few tries the returned job excludes the candidate instead. ``lacks``: the
    memory that the program of the candidate's plan lacks. ``tried``: candidate -> number of tries, increased by this
    call. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
    tried[candidate] += 1
    if tried[candidate] >= _TRIES:
        return replace(job, refused={**job.refused, candidate: lacks.error})
    more = max(lacks.untold, job.reserves.get(candidate, 0) + 1)
    return replace(job, reserves={**job.reserves, candidate: more})


def _emit_found_plan(job: Job, explored: PlanSearchResult, estimate_only: bool) -> PlannedProgram:
    """Write the program of the plan in ``explored``, the result of the search for ``job`` (model, batch, cluster and
    constraints). Return the plan with its program and estimate. If ``estimate_only`` is true, or if this version cannot
    execute the plan, the program is ``None``."""
    chosen = explored.chosen
    beyond = planned_only(job, chosen.candidate, job.constraints)
    beyond += ("estimate_only=True",) if estimate_only else ()
    if beyond:
        ways = () if estimate_only else context_ways(job, chosen)
        return PlannedProgram(chosen, explored.certificate, None, chosen.estimate, beyond, ways)
    with Future(partial(context_ways, job, chosen), worth_it=chosen.local.context is not None) as later:
        return PlannedProgram(chosen, explored.certificate, *emit_program(job, chosen), (), later.result())


@dataclass(frozen=True)
class _MemoryShortfall:
    """Memory that a plan's program (the instructions of its ranks) lacks, if it does not fit on its devices. ``error``:
    the shortage of the pipeline stage that lacks the most bytes. ``room``: usable bytes of a device of that stage.
    ``untold``: the greatest number of bytes by which the search underestimated the memory of a stage that does not fit.
    """

    error: CapacityError
    room: int
    untold: int


def can_fit_program(job: Job, chosen: SolvedCandidate) -> bool:
    """Return whether the program of ``chosen``, a plan of ``job`` (model, batch, cluster and constraints), fits in
    device memory, or exceeds it by no more than a small tolerance. Returns ``True`` for plans that are only estimated,
    because they have no program.
    """
    if planned_only(job, chosen.candidate, job.constraints):
        return True
    lacks = _find_memory_shortfall(job, chosen, emit_program(job, chosen)[1])
    return lacks is None or lacks.error.missing_bytes <= NEAR * lacks.room


def _find_memory_shortfall(job: Job, chosen: SolvedCandidate, estimate: Estimate) -> _MemoryShortfall | None:
    """Return the memory shortage of the program of the plan ``chosen``; ``None`` if the program fits. ``estimate``: the
    estimate of a step, in which the memory is the peak bytes of each rank while it runs the program. ``job``: the
    planning problem, with the devices and their memory.
    """
    mesh = chosen.candidate.grid
    rooms = stage_capacity(job.topology, mesh, chosen.devices)
    of_stages = [slice(ranks.start, ranks.stop) for ranks in stage_ranks(mesh)]
    needs = [max(estimate.memory[ranks]) for ranks in of_stages]
    told = [max(chosen.estimate.memory[ranks]) for ranks in of_stages]
    missing, stage = max((need - room, stage) for stage, (need, room) in enumerate(zip(needs, rooms, strict=True)))
    if missing <= 0:
        return None
    error = CapacityError(
        f"the program of stage {stage} needs {bytes_text(needs[stage])} at its peak, but only "
        f"{bytes_text(rooms[stage])} are usable on a device: {bytes_text(missing)} too much",
        stage=stage,
        missing_bytes=missing,
    )
    untold = max(need - said for need, said, room in zip(needs, told, rooms, strict=True) if need > room)
    return _MemoryShortfall(error, rooms[stage], untold)


@dataclass(frozen=True)
class PlannedProgram:
    """A solved candidate with its certificate (how near the plan is to the optimum), program and estimate.

    ``chosen``: the plan before its program was written. ``certificate``: the bound and the outcomes of all candidates.
    ``estimate``: time and memory of a step. ``program``: the program of all ranks; ``None`` if this version cannot
    execute the plan, or if only an estimate was requested. ``beyond``: why there is no program, as texts: the features
    of the plan that this version cannot execute, or ``"estimate_only=True"``; empty if there is a program. ``context``:
    step times with each algorithm of context-parallel attention; empty without context parallelism. ``lacking``: the
    memory shortage that made the search choose offload; empty if there was none."""

    chosen: SolvedCandidate
    certificate: Certificate
    program: Program | None
    estimate: Estimate
    beyond: tuple[str, ...]
    context: tuple[ContextWay, ...] = ()  # the step time with other algorithms of attention
    lacking: str = ""  # the shortage for which the search chose offload by itself


def planned_only(job: Job, candidate: MeshCandidate, constraints: Constraints) -> tuple[str, ...]:
    """Return the features of a plan of ``candidate`` that this version can estimate but not execute, as texts such as
    ``"etp=2"``; empty if the plan can be executed. ``job``: the planning problem, with precision, model and execution
    profile. ``constraints``: the constraints under which the plan was made. ``candidate``: mesh sizes, microbatch size,
    schedule and ZeRO stage."""
    scaled = constraints.overlap_steps and is_split(candidate.schedule) and job.precision == "fp16"
    more = {
        f"etp={candidate.etp}": candidate.etp not in (0, 1, candidate.tp),
        "precision=fp8 with experts": job.precision == "fp8"
        and bool(job.experts)
        and constraints.fp8_scaling == "tensor",  # other scales are executed
        "overlap_steps=True with precision=fp16": scaled
        and job.train,  # all ranks have to agree whether gradients overflowed
    }
    return (*job.profile.differences, *(name for name, holds in more.items() if holds))


def _check_hosts(facts: ProgramFacts, job: Job, chosen: SolvedCandidate) -> None:
    """Raise :class:`CapacityError` if the data that a program offloads exceed the memory or the disks of the hosts.
    ``facts``: the program, with figures such as the bytes of its parameters. ``job``: the planning problem, which has
    the topology and the optimizer. ``chosen``: the plan, which has the device of each rank.
    """
    program = facts.program
    moments = OPTIMIZERS[job.optimizer].moment_bytes
    in_host, on_disk = [], []
    for s, (stage, ranks) in enumerate(zip(program.stages, stage_ranks(program.mesh), strict=True)):
        trained = [n for n in list_host_states(program, s) if n in facts.with_gradient]
        states = sum(moments * facts.gradient_piece_bytes(n) // 4 for n in trained)  # as many elements in fp32
        there = states if "disk" in program.offload else 0
        in_host += [host_bytes(facts, s, stage.instructions) + states - there] * len(ranks)
        on_disk += [there + disk_bytes(facts, s)] * len(ranks)
    check_hosts(job.topology, chosen.devices, in_host)
    if "disk" in program.offload:
        check_disks(job.topology, chosen.devices, on_disk)


def emit_program(job: Job, chosen: SolvedCandidate) -> tuple[Program, Estimate]:
    """Write the program of all ranks for the plan ``chosen`` of ``job`` (model, batch, cluster and constraints), and
    prove that its ranks cannot deadlock and that every value exists when it is used. Return two values: the program,
    and the plan's estimate, in which memory and simulated step time are those of the program."""
    candidate, how = chosen.candidate, recompute_mode(job.constraints.recompute)
    local = chosen.local.spread(candidate.tp, candidate.ep, candidate.etp)
    spec = ProgramSpec(
        mesh=candidate.mesh,
        num_microbatches=chosen.num_microbatches,
        data_shares=chosen.data_shares,
        schedule=candidate.schedule,
        virtual_stages=candidate.virtual_stages,
        objective="train" if job.train else "infer",
        layouts=layouts_of(local, chosen.batch),
        etp=candidate.etp if candidate.ep > 1 else 0,
        recompute=chosen.recompute,
        selective=chosen.selective,
        again={n: frozenset(x.name for x in find_recomputed_nodes(b, how)) for n, b in local.model.blocks.items()}
        if chosen.selective
        else {},
        zero=cast(Literal[0, 1, 2, 3], candidate.zero),
        dp_shard=candidate.dp_shard,
        fused_attention=job.topology.fused_attention,
        whole_scatter=job.topology.whole_scatter,
        offload=chosen.offload,
        reducing=chosen.reducing,
        left_whole=chosen.local.left_whole,
        layout_of=None if job.layout is None else job.layout.program,
    )
    program = emit(local.model, chosen.stage_of_call, spec)
    scaling = find_scaling(job.precision, job.profile)
    program = program if scaling is None else _put_in_fp8(job, chosen, program, scaling)
    program = program.model_copy(update={"tf32": job.precision == "tf32"})
    program = _put_in_pieces(job, chosen, program)
    facts = ProgramFacts(program)
    prove(program, facts=facts)
    if program.offload:
        _check_hosts(facts, job, chosen)
    working = {name: kept_by(block, job.train).passing for name, block in local.model.blocks.items()}
    caches = () if job.layout is None else job.layout.inputs
    estimate = replace_estimated_memory(chosen.estimate, facts, job.optimizer, working, caches)
    return program, estimate.model_copy(update={"simulated": _simulate_step_seconds(job, chosen, program, facts)})


def _put_in_fp8(job: Job, chosen: SolvedCandidate, program: Program, scaling: Scaling) -> Program:
    """Return ``program`` with the matrix products of weights in fp8 or NVFP4, in the way that ``scaling`` says. This is
    done in all blocks (such as layers), or only in those that the execution profile in ``job`` (the planning problem)
    and the estimated times of the plan ``chosen`` select."""
    if job.profile.fp8_products == "all":
        return convert_to_fp8(program, scaling)
    laid = ProgramOnDevices(program, job.topology, chosen.devices, job.constraints, job.precision, job.optimizer)
    return convert_to_fp8(program, scaling, PlanDurations(laid).choose_fp8())


def _put_in_pieces(job: Job, chosen: SolvedCandidate, program: Program) -> Program:
    """Return ``program`` with some collectives over ``tp`` divided into pieces that overlap with matrix products. The
    constraints in ``job`` (the planning problem) and the estimated times of the plan ``chosen`` select the collectives.
    """
    if job.profile.tensor_pieces == "none" or chosen.candidate.tp == 1:
        return program
    laid = ProgramOnDevices(program, job.topology, chosen.devices, job.constraints, job.precision, job.optimizer)
    pieces = PlanDurations(laid).choose_pieces()
    if not any(map(any, pieces.values())):
        return program
    changed = {name: block.model_copy(update={"pieces": pieces[name]}) for name, block in program.blocks.items()}
    return program.model_copy(update={"blocks": changed})


def _simulate_step_seconds(job: Job, chosen: SolvedCandidate, program: Program, facts: ProgramFacts) -> float:
    """Return the simulated seconds of one step of ``program``, plus the estimated seconds that ranks lose by sharing
    processor cores. ``chosen``: the plan, which has the device of each rank and the estimate of these lost seconds.
    ``facts``: sizes of the program's states. ``job``: the planning problem, which has the topology, constraints,
    precision and optimizer."""
    laid = ProgramOnDevices(program, job.topology, chosen.devices, job.constraints, job.precision, job.optimizer)
    contention = chosen.estimate.breakdown.get("contention", 0.0)
    return simulate_plan_seconds(laid, facts) + contention
