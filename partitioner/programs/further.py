"""Plan the main program (the training step for the largest batch shape) and the further programs of a plan, such as an
evaluation, and combine the programs into one plan.

The main program decides the layout of the state (parameters, buffers and optimizer states). :class:`PinnedLayout` makes
the solver keep this layout for a further program. ``ProgramSpec.layout_of`` makes the emitter keep the ZeRO pieces and
gradient buckets. ``prove_same_layout`` refuses a program with another layout. A further program has its own
microbatches, and its own choice of how operators are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor, nn

from partitioner.background import BackgroundWorker, can_help
from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost.call.fp8 import find_scaling
from partitioner.errors import CapacityError, ConstraintError, PlanError
from partitioner.explain.kernel_costs import with_kernel_seconds
from partitioner.explain.tables import notes_on_precision
from partitioner.passes.capture.capture import PRECISIONS
from partitioner.passes.errors import InputsError, PartitionError
from partitioner.passes.ir.layouts import REPLICATED, Layout, make_shard_layout
from partitioner.plan import Candidate, Estimate, Plan, operator_share
from partitioner.pretrained.generation import (
    HEADS_DIM,
    GenerationError,
    build_inputs,
    find_cache_shapes,
    find_first_token,
    find_generated_module,
    generating,
    is_cache,
    prepare_forward,
)
from partitioner.programs.requests import Evaluate, Generate, Request, Shapes
from partitioner.programs.shapes import Shape, ShapeFamily
from partitioner.runtime.family.data import BatchPadding, FurtherProgram, name_shape
from partitioner.runtime.prove.layouts import prove_same_caches, prove_same_layout
from partitioner.schedules.csv_table import ScheduleTable
from partitioner.solve.evaluate.evaluator import CandidateEvaluator, SolvedCandidate
from partitioner.solve.evaluate.job import CompanionProgram, Job
from partitioner.solve.evaluate.pinned_layout import PinnedLayout
from partitioner.solve.evaluate.prepared_model import PreparedModel, prepare
from partitioner.solve.search.fit_memory import PlannedProgram, emit_program
from partitioner.solve.search.outcomes import bound_and_gap
from partitioner.solve.sharding.choices import ShardingError
from partitioner.solve.stages.split import check_room
from partitioner.topology import Topology
from partitioner.topology.groups import stage_capacity, stage_ranks
from partitioner.units import bytes_text, list_divisors, seconds_text
from partitioner.validate import torch_device, type_of

Purpose = Literal["evaluate", "step", "prefill", "decode"]

NO_LAYOUTS: Mapping[str, Layout] = MappingProxyType({})
GENERATES: tuple[Purpose, ...] = ("prefill", "decode")
_SIZES = 3  # microbatch sizes that are compared for a further program
_RAREST = 1e-3  # least frequency of a batch shape, relative to the largest one
_COMPARED = 3  # shapes by which layouts are compared, besides the largest
_LAYOUTS = 4  # layouts that are compared by their expected time
_GAIN = 0.01  # fraction of the expected time that another layout has to save
_PATIENCE_S = 600.0  # seconds to wait for the forked process that plans one of the shapes


class NoFurtherPlanError(PlanError):
    """Error: a further program of a plan, such as an evaluation, does not exist in the parameter layout of the training
    program. ``name``: the name of the further program. ``companions``: if the sharding of the further program failed: a
    tuple with this program, in the form in which it can be sharded together with the training program. Empty for other
    failures.
    """

    def __init__(self, message: str, name: str, companions: tuple[CompanionProgram, ...] = ()) -> None:
        super().__init__(message)
        self.name, self.companions = name, companions


@dataclass(frozen=True)
class FirstProgram:
    """A plan's training program, with the data from which further programs of the same plan are made (training steps
    for other batch shapes, evaluations and generation). All of them must use the training program's layout of
    parameters.

    ``prepared``: the model with its inputs. ``job``: the planning problem of the training program. ``found``: its
    solution. ``job_of``: a function that returns a planning problem; its arguments are the number of samples in the
    global batch (``None``: the number in the inputs) and the model with its inputs. ``family``: the batch shapes of the
    plan; ``None`` if it has only the shape of the inputs. ``note``: a sentence on why the layout is not the fastest one
    for the largest batch shape; empty if it is the fastest.
    """

    prepared: PreparedModel
    job: Job
    found: PlannedProgram
    job_of: Callable[[int | None, PreparedModel], Job]
    family: ShapeFamily | None = None
    note: str = ""
    _evaluators: dict[Shape, CandidateEvaluator] = field(
        default_factory=dict[Shape, CandidateEvaluator], repr=False, compare=False
    )

    def evaluator_at(self, shape: Shape) -> CandidateEvaluator:
        """Return the object that finds the best plan of each mesh candidate (mesh sizes, microbatch size, schedule and
        ZeRO stage) for batches of ``shape`` (samples, positions), one of the batch shapes of the plan. The object is
        created once for each shape and then reused.
        """
        assert self.family is not None
        if shape not in self._evaluators:
            self._evaluators[shape] = CandidateEvaluator(self.job_of(None, self.family.prepared_at(shape)))
        return self._evaluators[shape]

    def with_layout(self, found: PlannedProgram) -> FirstProgram:
        """Return a copy of this object whose training program is ``found``. ``found`` is slower for the largest batch
        shape, but faster on average over all shapes. The certificate of the copy has the same table of candidates, with
        ``found`` marked as chosen; the attribute ``note`` of the copy has a sentence that explains the choice."""
        row = next(c for c in found.certificate.candidates if c.status == "chosen")
        before = self.found.certificate
        rows = [
            c.model_copy(update={"status": "solved"}) if c.status == "chosen" else c
            for c in before.candidates
            if _candidate_of(c) != _candidate_of(row)
        ]
        bound, gap = bound_and_gap(row.step_time or found.estimate.step_time, (before.bound,))
        certificate = before.model_copy(
            update={
                "candidates": (row, *rows),
                "objective": row.step_time or found.estimate.step_time,
                "bound": bound,
                "gap": gap,
            }
        )
        note = (
            "the layout has the least expected step time over the shapes of batches, of those that were compared; for "
            f"the largest shape alone another one takes {seconds_text(self.found.estimate.step_time)}"
        )
        note = "; ".join(filter(None, (self.note, note)))
        return replace(self, found=replace(found, certificate=certificate), note=note)

    def plan_evaluation(self, name: str, asked: Evaluate) -> FurtherProgram:
        """Return the program called ``name`` that runs the model's forward in evaluation mode. Its parameters have the
        same layout over the ranks as in the training program. ``asked``: the user's request, with inputs and a loss
        function; where one of these is ``None``, the evaluation uses the one of training.

        Raise :class:`PlanError` if no such program exists in the layout of the training program, and
        :class:`InputsError` if the model is an exported program, which has a single mode.
        """
        model = self.prepared.model
        if not isinstance(model, nn.Module):
            raise InputsError(
                f"programs[{name!r}]: an exported program has one mode, so it cannot be evaluated in another; expected "
                "an nn.Module: pass the module"
            )
        inputs = self.prepared.inputs if asked.inputs is None else asked.inputs
        loss: Callable[[Any], Tensor] | None = self.prepared.loss if asked.loss is None else asked.loss
        documents = self.prepared.documents if asked.inputs is None else ()
        precision = self.prepared.precision
        prepared = prepare(model, inputs, loss=loss, objective="infer", precision=precision, documents=documents)
        batch = self.job.global_batch if asked.inputs is None else None
        with in_evaluation_mode(model):
            job = self.job_of(batch, prepared)
            return self.plan_program(name, job, "evaluate", _find_padding(prepared, job))

    def plan_generation(self, name: str, asked: Generate) -> dict[str, FurtherProgram]:
        """Return the two programs that generate tokens, by name: ``"<name> prefill"`` reads a prompt into the key/value
        caches, ``"<name> decode"`` reads one token of each sample. ``asked``: the user's request: the number of
        samples, and the lengths of the prompt and of the caches in tokens.

        Raise :class:`GenerationError` if the model has no caches, or if the number of samples or the mesh does not
        allow generation; :class:`LayoutError` if the two programs would place their caches differently; and
        :class:`PlanError` if one of them does not exist in the layout of the training program.
        """
        model, precision = self.prepared.model, self.prepared.precision
        mesh = self.found.chosen.candidate
        if not isinstance(model, nn.Module):
            raise GenerationError(
                f"programs[{name!r}]: an exported program has a fixed number of tokens, so it cannot generate; "
                "expected an nn.Module: pass the module"
            )
        if asked.batch % mesh.dp or mesh.cp > 1:
            raise GenerationError(
                f"programs[{name!r}] has batch={asked.batch}, and the plan has dp={mesh.dp} and cp={mesh.cp}; expected "
                "a batch that dp divides, and no cp, which would divide the positions of a cache: change batch, or "
                "give constraints=Constraints(dp=..., cp=1)"
            )
        generated = find_generated_module(name, model, asked.model)
        first = find_first_token(name, generated)
        if first is None and asked.length <= asked.prompt:
            raise GenerationError(
                f"programs[{name!r}] has length={asked.length} and prompt={asked.prompt}; expected a length above "
                "prompt, because it includes the prompt and the new tokens: increase length"
            )
        errors: list[PartitionError] = []
        with in_evaluation_mode(model):
            shapes = find_cache_shapes(name, generated, PRECISIONS.get(type_of(precision) or ""))
            sharded = mesh.tp > 1 and shapes.can_shard_heads(mesh.tp)
            grouped = (sharded or mesh.tp == 1) and torch_device(self.job.topology) == "cpu"
            with generating(model, asked.model, shapes.hidden):
                jobs: dict[Purpose, Job] = {}
                for purpose in GENERATES:
                    sizes = asked.batch, asked.prompt, asked.length
                    inputs = build_inputs(generated, shapes, *sizes, prefill=purpose == "prefill")
                    jobs[purpose] = self.job_of(None, prepare_forward(model, inputs, precision, grouped))
                for layout in (make_shard_layout(HEADS_DIM), REPLICATED) if sharded else (REPLICATED,):
                    try:
                        return self._plan_with_caches(name, jobs, layout, first)
                    except CapacityError:
                        raise
                    except PartitionError as error:
                        errors.append(error)
        raise errors[0]

    def _plan_with_caches(
        self, name: str, jobs: Mapping[Purpose, Job], layout: Layout, first: int | None
    ) -> dict[str, FurtherProgram]:
        """Return the two programs of the generation called ``name``, by program name. ``layout``: the layout of their
        key/value caches over the mesh axis ``tp``. ``jobs``: purpose (``"prefill"`` or ``"decode"``) -> planning
        problem. ``first``: for a model with an encoder, the id of the token with which its decoder starts; ``None``
        without an encoder.

        Raise :class:`PlanError` if one of the two programs has no plan, and :class:`LayoutError` if they would place
        their caches differently, or copy caches instead of writing to them in place.
        """
        found: dict[str, FurtherProgram] = {}
        for purpose, job in jobs.items():
            caches = {i.value: i.path for i in job.model.inputs if is_cache(i.path)}
            planned = self.plan_program(f"{name} {purpose}", job, purpose, inputs=dict.fromkeys(caches, layout))
            kept = {"caches": tuple(caches.values()), "first_token": first}
            found[f"{name} {purpose}"] = planned.model_copy(update=kept)
        prove_same_caches(found)
        return found

    def plan_program(
        self,
        name: str,
        job: Job,
        purpose: Purpose,
        padding: BatchPadding | None = None,
        inputs: Mapping[str, Layout] = NO_LAYOUTS,
    ) -> FurtherProgram:
        """Return the fastest further program of the plan (such as an evaluation), for ``job``, that keeps the mesh, the
        stages and the sharding of the training program.

        ``name``: the program's name. ``job``: the planning problem, with the model and its inputs. ``purpose``:
        ``"step"`` for a training step; otherwise it runs forward alone. ``padding``: how smaller batches are padded to
        the program's batch shape; ``None`` if batches are not padded. ``inputs``: name of an input -> its layout over
        ``tp``, for inputs that are sharded; others are replicated.

        Raise :class:`NoFurtherPlanError` if no such program exists, and :class:`CapacityError` if no such program fits
        in memory together with the states of training.
        """
        chosen, first = self.found.chosen, self.found.program
        assert first is not None
        pinned = PinnedLayout.of(chosen.local, chosen.stage_of_call, first)
        if inputs:  # the caller keeps these inputs sharded, and reads all outputs whole on each rank
            whole = dict.fromkeys((o.value for o in job.model.outputs if o.value is not None), REPLICATED)
            pinned = replace(pinned, inputs=inputs, outputs=whole)
        alone = job
        job = replace(job, layout=pinned, constraints=job.constraints.model_copy(update={"offload": chosen.offload}))
        solved, errors = solve_microbatchings(CandidateEvaluator(job), chosen.candidate, chosen.devices)
        for fastest in solved:
            try:
                program, estimate = emit_program(job, replace(fastest, reducing=chosen.reducing))
                prove_same_layout(first, name, program)
                memory = self._check_memory(name, estimate, purpose)
            except PartitionError as error:
                errors.append(error)
                continue
            seconds = estimate.simulated if estimate.simulated is not None else estimate.step_time
            return FurtherProgram(program=program, purpose=purpose, seconds=seconds, memory=memory, padding=padding)
        if lacking := [error for error in errors if isinstance(error, CapacityError)]:
            short = lacking[-1]
            raise CapacityError(
                f"program {name!r} does not fit in the layout of the training program ({chosen.candidate}): "
                f"{short.shortage}",
                stage=short.stage,
                missing_bytes=short.missing_bytes,
                at_least=short.at_least,
            )
        companions: tuple[CompanionProgram, ...] = ()
        if any(isinstance(error, ShardingError) for error in errors):
            allowed = {value: (layout, REPLICATED) for value, layout in inputs.items()}
            companions = (CompanionProgram(alone, self._weigh(padding if purpose == "step" else None), allowed),)
        why = (
            str(errors[0])
            if errors
            else f"its {job.global_batch} samples are not divisible by dp={chosen.candidate.dp}"
        )
        raise NoFurtherPlanError(
            f"program {name!r} has no plan in the layout of the training program ({chosen.candidate}): {why}; "
            "change its inputs, or fix another layout by constraints=",
            name,
            companions,
        )

    def _weigh(self, padding: BatchPadding | None) -> float:
        """Return the frequency of batches of the shape in ``padding`` divided by the frequency of the largest batch
        shape, limited to 0.001 to 1000. Return 1 if ``padding`` is ``None``, because the program is not a training
        step."""
        if padding is None or self.family is None:
            return 1.0
        largest = self.family.weight_of(self.family.shapes[0])
        return min(max(padding.weight / largest, _RAREST), 1 / _RAREST) if largest else 1 / _RAREST

    def _check_memory(self, name: str, estimate: Estimate, purpose: Purpose) -> int:
        """Return the peak memory in bytes of the fullest rank while the program called ``name`` runs. Raise
        :class:`CapacityError` if it exceeds a device's memory.

        ``estimate``: the program's cost. ``purpose``: except for ``"step"``, the gradients and optimizer states of
        training are added, because they stay in memory while the program runs.
        """
        mesh, chosen = self.found.chosen.candidate.grid, self.found.chosen
        rooms = stage_capacity(self.job.topology, mesh, chosen.devices)
        most = 0
        for stage, (ranks, room) in enumerate(zip(stage_ranks(mesh), rooms, strict=True)):
            kept = {} if purpose == "step" else self.found.estimate.stages[stage].memory
            beside = kept.get("gradients", 0) + kept.get("optimizer", 0)
            needed = max(estimate.memory[ranks.start : ranks.stop]) + beside
            check_room(f"stage {stage} of program {name!r} needs {bytes_text(needed)}", needed, room)
            most = max(most, needed)
        return most


def solve_microbatchings(
    evaluator: CandidateEvaluator, candidate: MeshCandidate, devices: Sequence[int] | None = None
) -> tuple[list[SolvedCandidate], list[PartitionError]]:
    """Solve ``candidate`` (mesh sizes, schedule, ZeRO stage) with several microbatch sizes. Return two lists: the
    solutions, fastest first, and the errors of the sizes that have no solution.

    The sizes that come into question divide the global batch, are at most ``candidate.microbatch_size``, and give all
    ranks of ``dp`` equally many microbatches. The sizes are tried from the largest on until three have a solution;
    without a pipeline, one solution is enough. ``evaluator``: finds the best plan of a candidate. ``devices``: the
    device index of each rank; ``None``: the solver places the ranks.
    """
    job, solved, errors = evaluator.job, list[SolvedCandidate](), list[PartitionError]()
    sizes = [s for s in list_divisors(job.global_batch) if s <= candidate.microbatch_size]
    for size in sorted(sizes, reverse=True):
        if job.global_batch // size % candidate.dp:
            continue
        try:
            solved.append(evaluator.solve(replace(candidate, microbatch_size=size), devices))
        except PartitionError as error:
            errors.append(error)
        if len(solved) == (1 if candidate.pp == 1 else _SIZES):
            break
    return sorted(solved, key=lambda each: each.estimate.step_time), errors


def choose_expected_layout(
    first: FirstProgram, constraints: Constraints, plan: Callable[[Job], PlannedProgram]
) -> FirstProgram:
    """Return ``first``, or a copy of it with another layout, if that reduces the mean step time over all batch shapes
    (weighted by how frequent they are) by more than 1%.

    At most four layouts are compared: the chosen one, and the fastest others that the search solved for the largest
    shape. ``constraints``: the user's constraints. ``plan``: a function that solves a planning problem (model, batch,
    cluster and constraints).
    """
    family, found = first.family, first.found
    if family is None or len(family.shapes) == 1 or found.program is None:
        return first
    if isinstance(constraints.schedule, ScheduleTable):
        return first
    rows = [c for c in found.certificate.candidates if c.status == "solved" and c.step_time]
    own = next(c for c in found.certificate.candidates if c.status == "chosen")
    best, least = own, _expect_step_time(first, own) * (1 - _GAIN)
    for row in sorted(rows, key=lambda c: c.step_time or 0.0)[: _LAYOUTS - 1]:
        expected = _expect_step_time(first, row, least)
        if expected < least:
            best, least = row, expected
    if best is own:
        return first
    try:
        return first.with_layout(plan(replace(first.job, constraints=_pin_candidate(constraints, best))))
    except PlanError:  # the program of the other layout does not fit after all
        return first


def _expect_step_time(first: FirstProgram, row: Candidate, least: float = math.inf) -> float:
    """Return the mean step time in seconds over the batch shapes of ``first``, weighted by their frequency, if the plan
    has the layout ``row``: a candidate (mesh, schedule, ZeRO stage) that the search solved for the largest shape. At
    most three of the other shapes are solved, as representatives of all others. The result is infinite if the candidate
    has no plan for one of these shapes. ``least``: the computation stops as soon as the sum reaches this number of
    seconds; the result is then at least ``least`` and not the mean."""
    family, candidate = first.family, _candidate_of(row)
    assert family is not None
    total = family.weight_of(family.shapes[0]) * (row.step_time or 0.0)
    for shape, weight in _pick_shapes(family):
        solved, _ = solve_microbatchings(first.evaluator_at(shape), candidate)
        total += weight * (solved[0].estimate.step_time if solved else math.inf)
        if total >= least:
            break
    return total


def _pick_shapes(family: ShapeFamily) -> list[tuple[Shape, float]]:
    """Return at most three pairs (batch shape, weight), by which layouts are compared without computing the step time
    of every batch shape of ``family`` (all batch shapes of the plan). The shapes are (samples, positions). All shapes
    but the largest, in order of size, are divided into three groups. Each group is represented by its most frequent
    shape, whose weight is the summed frequency of the group. The largest shape is not included, because its step time
    is known.
    """
    others = [(shape, family.weight_of(shape)) for shape in family.shapes[1:] if family.weight_of(shape)]
    each = max(1, math.ceil(len(others) / _COMPARED))
    groups = [others[at : at + each] for at in range(0, len(others), each)]
    return [(max(group, key=lambda pair: pair[1])[0], sum(weight for _, weight in group)) for group in groups]


def _candidate_of(row: Candidate) -> MeshCandidate:
    mesh = row.mesh
    axes = mesh["pp"], mesh["dp"], mesh["tp"], row.microbatch_size, row.schedule, mesh["cp"], mesh["ep"]
    return MeshCandidate(*axes, row.etp if mesh["ep"] > 1 else 0, row.zero, row.virtual_stages, row.dp_shard)


def _pin_candidate(constraints: Constraints, row: Candidate) -> Constraints:
    """Return ``constraints`` with the mesh axes, microbatch size, ZeRO stage, schedule and virtual stages of the
    candidate ``row`` where the user left them free."""
    pins: dict[str, Any] = {**row.mesh, "microbatch_size": row.microbatch_size, "zero": row.zero}
    if row.mesh["pp"] > 1:
        pins["schedule"] = row.schedule
        pins |= {"virtual_stages": row.virtual_stages} if row.virtual_stages > 1 else {}
    if row.zero and 0 < row.dp_shard < row.mesh["dp"]:
        pins["dp_shard"] = row.dp_shard
    free = {name: pin for name, pin in pins.items() if getattr(constraints, name) is None}
    return constraints.model_copy(update=free)


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Return a context manager within which ``model`` is in evaluation mode. At its end each module gets back its
    previous mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _find_padding(prepared: PreparedModel, job: Job) -> BatchPadding | None:
    """Return an object that says how smaller batches are padded to the batch shape of ``job``, the planning problem of
    an evaluation. ``prepared``: the model with the example inputs of the evaluation. If it has no example inputs,
    return ``None``, because the padding is determined from them."""
    if prepared.inputs is None:
        return None
    family = ShapeFamily.of(prepared, Shapes(), job.global_batch, job.topology)
    return family.padding_at(family.shapes[0])


def plan_further_programs(first: FirstProgram, programs: Mapping[str, Request]) -> dict[str, FurtherProgram]:
    """Return all programs of a plan besides ``first``, by name: a training step for each further batch shape, and an
    evaluation or the two programs of a generation for each entry of ``programs``.

    Raise :class:`ConstraintError` if the plan of ``first`` cannot have further programs (it cannot be executed, keeps
    data in host memory, or gives ranks different numbers of microbatches), and :class:`PlanError` if a further program
    has no plan.
    """
    shapes = () if first.family is None else first.family.shapes[1:]
    if not programs and not shapes:
        return {}
    check_first_program(first.found)
    found = _plan_shapes(first, shapes)
    for name, asked in programs.items():
        if isinstance(asked, Generate):
            found |= first.plan_generation(name, asked)
        else:
            found[name] = first.plan_evaluation(name, asked)
    return found


def _plan_shapes(first: FirstProgram, shapes: Sequence[Shape]) -> dict[str, FurtherProgram]:
    """Return the training steps for batches of ``shapes`` (samples, positions) by name, in the order of ``shapes``. If
    this machine has a second processor, a forked process plans a part of them at the same time.

    Raise :class:`PlanError` for the first of them that has no plan in the layout of ``first``.
    """
    family = first.family
    if family is None or not shapes:
        return {}
    paddings = {shape: family.padding_at(shape) for shape in shapes}  # found once, before the process is forked
    family.capture_ends()

    def plan(shape: Shape) -> FurtherProgram:
        return first.plan_program(name_shape(shape), first.evaluator_at(shape).job, "step", paddings[shape])

    found: dict[Shape, FurtherProgram] = {}
    # Small ones first: the graphs of the shapes above are derived from theirs and those of the largest one.
    if len(shapes) > _COMPARED:
        found[shapes[-1]] = plan(shapes[-1])
    shapes_left = [shape for shape in reversed(shapes) if shape not in found]
    aside = BackgroundWorker(shapes_left, plan, _PATIENCE_S) if len(shapes_left) > 1 and can_help() else None
    try:
        while aside is not None and (shape := aside.claim(shapes_left)) is not None:
            try:
                found[shape] = plan(shape)
            except PartitionError:
                break  # the error is raised below, unless an earlier shape has no plan either
        for shape in shapes:
            if shape not in found:
                told = None if aside is None else aside.take(shape)
                found[shape] = plan(shape) if told is None else told
    finally:
        if aside is not None:
            aside.end()
    return {name_shape(shape): found[shape] for shape in shapes}


def check_first_program(found: PlannedProgram) -> None:
    """Raise :class:`ConstraintError` if no further program, such as an evaluation, can share the parameters and buffers
    of the plan ``found``: the plan can only be estimated and not executed, it keeps data in host memory, or its ranks
    compute different numbers of microbatches.
    """
    if found.program is None:
        raise ConstraintError(
            f"programs= and shapes= need a plan that can be executed, but {', '.join(found.beyond)} gives "
            "estimates only; leave it out, or plan each program by itself"
        )
    if found.program.offload:
        raise ConstraintError(
            f"programs= and shapes= with offload={'+'.join(found.program.offload)}: further programs need all "
            "parameters on the device; expected offload=(): add devices, or plan each program by itself"
        )
    if found.program.data_shares:
        raise ConstraintError(
            f"programs= and shapes= with data_shares={found.program.data_shares}: further programs split their batches "
            "evenly; expected equal shares: fix data_shares, or a batch that dp divides"
        )


def assemble_plan(first: FirstProgram, further: dict[str, FurtherProgram], topology: Topology) -> Plan:
    """Return the complete :class:`Plan` of the training program ``first`` on ``topology``. ``further``: its further
    programs, by name, such as steps for other batch shapes.
    """
    job, found, prepared = first.job, first.found, first.prepared
    chosen = found.chosen
    plan = Plan(
        program=found.program,
        topology=topology,
        devices=chosen.devices,
        constraints=job.constraints,
        profile=job.profile,
        estimate=found.estimate,
        certificate=found.certificate,
        shares=operator_share(chosen.batch, chosen.local.sharding, chosen.local.context),
        model=type(prepared.model).__name__,
        precision=prepared.precision,
        optimizer=job.optimizer,
        notes=(
            *job.model.notes,
            *([first.note] if first.note else []),
            *notes_on_precision(
                topology, job.precision, chosen.local.model, find_scaling(job.precision, job.profile), found.program
            ),
        ),
        context=found.context,
        objective=prepared.objective,
        global_batch=job.global_batch,
        planned_only=found.beyond,
        in_host=chosen.offload,
        of_replicas=chosen.data_shares,
        lacking=found.lacking,
        further=further,
        padding=None if first.family is None else first.family.padding_at(first.family.shapes[0]),
    )
    return with_kernel_seconds(plan)
