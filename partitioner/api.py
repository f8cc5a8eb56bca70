"""``partition``: plan a model for a cluster, from the check of the arguments to the finished plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.export import ExportedProgram

from partitioner.advise.suggest import attach_advice
from partitioner.advise.variants import RelaxationRequest
from partitioner.constraints import Constraints
from partitioner.execution_profile import ExecutionProfile
from partitioner.passes.faults import typed_errors
from partitioner.plan import Plan
from partitioner.programs.follow import list_further_sizes, plan_all_programs
from partitioner.programs.further import FirstProgram, assemble_plan
from partitioner.programs.requests import NO_PROGRAMS, Request, Shapes, constrain_for_programs
from partitioner.programs.shapes import ShapeFamily, look_ahead
from partitioner.solve.evaluate.job import Job
from partitioner.solve.evaluate.prepared_model import PreparedModel, modes_of_a_new_process, prepare, rare_collections
from partitioner.solve.search.best_first import SearchProgress
from partitioner.solve.search.fit_memory import plan_to_fit
from partitioner.solve.search.search import search_for_plan
from partitioner.topology import Topology
from partitioner.validate import check_options, check_request, precision_of, profile_of, rate_cluster, torch_device


@typed_errors("partition()")
@rare_collections()
@modes_of_a_new_process()
def partition(
    model: nn.Module | ExportedProgram | PreparedModel,
    topology: Topology,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    global_batch: int | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    objective: Literal["train", "infer"] = "train",
    programs: Mapping[str, Request] = NO_PROGRAMS,
    shapes: Shapes | None = None,
    constraints: Constraints | None = None,
    profile: ExecutionProfile | str | None = None,
    precision: str | None = None,
    documents: Sequence[int] = (),
    optimizer: str = "adamw",
    progress: Callable[[SearchProgress], None] | None = None,
    estimate_only: bool = False,
    time_limit_s: float | None = None,
) -> Plan:
    """Plan how ``model`` runs on ``topology``. Return the plan: a program for every rank, estimates of time and memory,
    and a certificate of how far the plan can be from the optimum. Together the programs compute what the model computes
    on one process.

    Args:
        model: a module that ``torch.export`` accepts (also on meta), an exported program, or a ``PreparedModel``.
        topology: the cluster, with its nodes, devices and links.
        inputs: one global batch, as a tuple or dict of arguments; ``None``: an exported program's own, or dummy inputs.
        global_batch: samples per step, if the inputs are only a sample of the batch.
        loss: computes the scalar loss from the output; ``None``: the output is, or contains, the loss.
        objective: what a step is: training (``train``) or inference (``infer``).
        programs: further programs on the same weights, such as an evaluation, by name, for ``engine.run(name, batch)``.
        shapes: the shapes that batches have, if they differ; a batch is padded to the next larger shape.
        constraints: choices that the user fixes, such as ``Constraints(tp=8)``; the search makes all others.
        profile: another framework, such as ``"megatron-core"``, to predict: the plan has estimates and no program.
        precision: ``bf16``, ``fp16``, ``fp32`` or ``fp64``; ``None``: that of the parameters. ``tf32``: fp32, with
            products in TF32 on GPUs. ``fp8`` (see ``fp8_scaling``), ``nvfp4``: products of weights only, else bf16.
        documents: typical lengths of packed documents, for the cost model; ``()``: the lengths in the inputs, if known.
        optimizer: the optimizer whose states need memory: ``adamw``, ``adam``, ``sgd_momentum``, ``sgd`` or ``none``.
        progress: called repeatedly during the search, with a ``SearchProgress`` (counts of candidates, best time).
        estimate_only: return the estimates without a program and without baselines; faster, for many plans.
        time_limit_s: seconds after which the search ends with its best plan so far; ``None``: no limit.

    Raises :class:`partitioner.passes.errors.PartitionError` if there is no plan.
    """
    check_options(time_limit_s, progress)
    constraints, how = constrain_for_programs(constraints, programs), profile_of(profile, constraints, topology)
    prepared = prepare(model, inputs, loss=loss, objective=objective, precision=precision, documents=documents)
    family = None if shapes is None else ShapeFamily.of(prepared, shapes, global_batch, topology)
    if family is not None:
        prepared, global_batch = family.largest, None
    train, sizes = prepared.objective == "train", list_further_sizes(prepared, family, programs, global_batch)

    def job_of(topology: Topology, pins: Constraints, global_batch: int | None, of: PreparedModel = prepared) -> Job:
        work, margin = of.at(global_batch, pins, torch_device(topology)), pins.memory_margin
        kind, train = precision_of(work[0], of.precision), of.objective == "train"
        return Job(*work, rate_cluster(topology, kind, margin), pins, train, optimizer, kind, how, *sizes)

    with attach_advice(RelaxationRequest(topology, constraints, global_batch, job_of)), ExitStack() as stack:
        check_request(topology, constraints, optimizer, train, how, prepared.precision)
        job = job_of(topology, constraints, global_batch)
        stack.enter_context(look_ahead(family))
        other = partial(job_of, topology, constraints)
        find = partial(search_for_plan, progress=progress, compare=not estimate_only, other_batch=other)
        found = plan_to_fit(job, find, estimate_only=estimate_only, time_limit_s=time_limit_s)
        first = FirstProgram(prepared, job, found, partial(job_of, topology, constraints), family)
    return assemble_plan(*plan_all_programs(first, constraints, find, programs, time_limit_s), topology)
