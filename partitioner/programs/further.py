"""Put a plan together: its first program, and further ones over the layout of the state that the first one has.

The first program decides the layout. :class:`PinnedLayout` makes the solver keep it, ``ProgramSpec.layout_of`` makes
the emitter keep its ZeRO pieces and buckets, and ``prove_same_layout`` refuses a program that has another layout. A
further program has its own microbatches and strategies of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from partitioner.candidate import MeshCandidate
from partitioner.errors import ConstraintError, PlanError
from partitioner.explain.tables import notes_on_precision
from partitioner.passes.errors import InputsError, PartitionError
from partitioner.plan import Estimate, Plan, operator_share
from partitioner.programs.requests import Evaluate, Shapes
from partitioner.programs.shapes import Shape, ShapeFamily
from partitioner.runtime.family.data import BatchPadding, FurtherProgram
from partitioner.runtime.prove.layouts import prove_same_layout
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.evaluate.job import Job
from partitioner.solve.evaluate.pinned_layout import PinnedLayout
from partitioner.solve.evaluate.prepared_model import PreparedModel, prepare
from partitioner.solve.search.fit_memory import PlannedProgram, emit_program
from partitioner.solve.stages.split import check_room
from partitioner.topology import Topology
from partitioner.topology.groups import stage_capacity, stage_ranks
from partitioner.units import bytes_text, list_divisors

Purpose = Literal["evaluate", "step"]


@dataclass(frozen=True)
class FirstProgram:
    """What further programs follow: the job of the first program, its plan, and the model.

    ``job_of``: makes the job of a number of samples (``None``: that of the inputs) and a prepared model. ``family``:
    the shapes of the batches; ``None``: the one of the inputs.
    """

    prepared: PreparedModel
    job: Job
    found: PlannedProgram
    job_of: Callable[[int | None, PreparedModel], Job]
    family: ShapeFamily | None = None

    def plan_evaluation(self, name: str, asked: Evaluate) -> FurtherProgram:
        """The program ``name`` that evaluates as ``asked``. Raises :class:`PlanError` if there is none."""
        model = self.prepared.model
        if not isinstance(model, nn.Module):
            raise InputsError(
                f"programs[{name!r}]: an exported program has one mode, so it cannot be evaluated in another; expected "
                "an nn.Module: pass the module"
            )
        inputs = self.prepared.inputs if asked.inputs is None else asked.inputs
        loss: Callable[[Any], Tensor] | None = self.prepared.loss if asked.loss is None else asked.loss
        prepared = prepare(model, inputs, loss=loss, objective="infer", precision=self.prepared.precision)
        batch = self.job.global_batch if asked.inputs is None else None
        with in_evaluation_mode(model):
            job = self.job_of(batch, prepared)
            return self.plan_program(name, job, "evaluate", _find_padding(prepared, job))

    def plan_program(
        self, name: str, job: Job, purpose: Purpose, padding: BatchPadding | None = None
    ) -> FurtherProgram:
        """The program of ``job`` in the layout of the first one. Raises :class:`PlanError` if there is none."""
        chosen, first = self.found.chosen, self.found.program
        assert first is not None
        pinned = PinnedLayout.of(chosen.local, chosen.stage_of_call, first)
        job = replace(job, layout=pinned, constraints=job.constraints.model_copy(update={"offload": chosen.offload}))
        errors = []
        for candidate in list_microbatchings(chosen.candidate, job.global_batch):
            try:
                solved = CandidateEvaluator(job).solve(candidate, chosen.devices)
                program, estimate = emit_program(job, replace(solved, reducing=chosen.reducing))
                prove_same_layout(first, name, program)
            except PartitionError as error:
                errors.append(error)
                continue
            memory = self._check_memory(name, estimate, purpose)
            seconds = estimate.simulated if estimate.simulated is not None else estimate.step_time
            return FurtherProgram(program=program, purpose=purpose, seconds=seconds, memory=memory, padding=padding)
        why = str(errors[0]) if errors else f"its {job.global_batch} samples do not split over dp={chosen.candidate.dp}"
        raise PlanError(
            f"program {name!r} has no plan in the layout of the training program ({chosen.candidate}): {why}; change "
            "its inputs, or fix another layout by constraints="
        )

    def _check_memory(self, name: str, estimate: Estimate, purpose: Purpose) -> int:
        """The most bytes of a rank while the program runs. Raises :class:`CapacityError` if a device has fewer.

        What training keeps between steps, gradients and optimizer states, is there beside an evaluation.
        """
        mesh, chosen = self.found.chosen.candidate.grid, self.found.chosen
        rooms = stage_capacity(self.job.topology, mesh, chosen.devices)
        most = 0
        for stage, (ranks, room) in enumerate(zip(stage_ranks(mesh), rooms, strict=True)):
            kept = self.found.estimate.stages[stage].memory if purpose == "evaluate" else {}
            beside = kept.get("gradients", 0) + kept.get("optimizer", 0)
            needed = max(estimate.memory[ranks.start : ranks.stop]) + beside
            check_room(f"stage {stage} of program {name!r} takes {bytes_text(needed)}", needed, room)
            most = max(most, needed)
        return most


def list_microbatchings(candidate: MeshCandidate, global_batch: int) -> Iterator[MeshCandidate]:
    """The ways to split ``global_batch`` samples on the mesh of ``candidate``, with its microbatch or smaller ones."""
    for size in sorted(list_divisors(global_batch), reverse=True):
        if size <= candidate.microbatch_size and global_batch // size % candidate.dp == 0:
            yield replace(candidate, microbatch_size=size)


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is in evaluation mode; afterwards every module has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _find_padding(prepared: PreparedModel, job: Job) -> BatchPadding | None:
    """How batches of an evaluation are padded; ``None`` if its inputs say nothing of it."""
    if prepared.inputs is None:
        return None
    family = ShapeFamily.of(prepared, Shapes(), job.global_batch, job.topology)
    return family.padding_at(family.shapes[0])


def plan_further_programs(first: FirstProgram, programs: Mapping[str, Evaluate]) -> dict[str, FurtherProgram]:
    """The further programs of a plan by name: those for other shapes of a batch, and ``programs``.

    Raises :class:`ConstraintError` if the plan of the first program cannot have further ones.
    """
    shapes = () if first.family is None else first.family.shapes[1:]
    if not programs and not shapes:
        return {}
    check_first_program(first.found)
    found: dict[str, FurtherProgram] = {}
    for shape in shapes:
        assert first.family is not None
        name, prepared = name_shape(shape), first.family.prepared_at(shape)
        job = first.job_of(None, prepared)
        found[name] = first.plan_program(name, job, "step", first.family.padding_at(shape))
    return found | {name: first.plan_evaluation(name, asked) for name, asked in programs.items()}


def name_shape(shape: Shape) -> str:
    """The name of the program for batches of ``shape``."""
    return f"step {shape[0]}x{shape[1]}" if shape[1] else f"step {shape[0]}"


def check_first_program(found: PlannedProgram) -> None:
    """Raise :class:`ConstraintError` if no other program can run on the state of the plan ``found``."""
    if found.program is None:
        raise ConstraintError(
            f"programs= and shapes= need a plan with programs, and {', '.join(found.beyond)} has none; leave it out, "
            "or plan each program by itself"
        )
    if found.program.offload:
        raise ConstraintError(
            f"programs= and shapes= with offload={'+'.join(found.program.offload)}: further programs read parameters "
            "on the device alone; expected offload=(): add devices, or plan each program by itself"
        )
    if found.program.data_shares:
        raise ConstraintError(
            f"programs= and shapes= with data_shares={found.program.data_shares}: further programs split their batches "
            "evenly; expected equal shares: fix data_shares, or a batch that dp divides"
        )


def assemble_plan(first: FirstProgram, topology: Topology, programs: Mapping[str, Evaluate]) -> Plan:
    """The plan of ``first`` on ``topology``, with the further ``programs``."""
    job, found, prepared = first.job, first.found, first.prepared
    chosen = found.chosen
    return Plan(
        program=found.program,
        topology=topology,
        devices=chosen.devices,
        constraints=job.constraints,
        profile=job.profile,
        estimate=found.estimate,
        certificate=found.certificate,
        shares=operator_share(job.batch_of(chosen.candidate.ep), chosen.local.sharding, chosen.local.context),
        model=type(prepared.model).__name__,
        precision=prepared.precision,
        optimizer=job.optimizer,
        notes=(*job.model.notes, *notes_on_precision(topology, job.precision, chosen.local.model)),
        context=found.context,
        objective=prepared.objective,
        global_batch=job.global_batch,
        planned_only=found.beyond,
        in_host=chosen.offload,
        of_replicas=chosen.data_shares,
        lacking=found.lacking,
        further=plan_further_programs(first, programs),
        padding=None if first.family is None else first.family.padding_at(first.family.shapes[0]),
    )
