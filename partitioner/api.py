"""The whole way from a model to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn
from torch.export import ExportedProgram

from partitioner.batch import batch_size, shard_batch
from partitioner.changes import Asked, advised
from partitioner.constraints import Constraints
from partitioner.evaluate import Job
from partitioner.explore import explore
from partitioner.finish import emit_program, planned_only
from partitioner.garbage import rare_collections
from partitioner.plan import Plan, operator_share
from partitioner.requests import check_request, check_work, precision_of, type_of
from partitioner.solve.bestfirst import Progress
from partitioner.solve.sharding import ShardingSolution
from partitioner.topology import Topology
from passes.blocks import FoldedModel
from passes.capture import capture
from passes.fold import fold
from passes.gradients import mark_gradients
from passes.normalize import normalize

Prepared = tuple[FoldedModel, ShardingSolution, int]  # the folded model, how its batch is split, and how large it is


@rare_collections()
def partition(
    model: nn.Module | ExportedProgram,
    topology: Topology,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    global_batch: int | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    objective: Literal["train", "infer"] = "train",
    constraints: Constraints | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Plan how ``model`` runs on ``topology``: for every rank a program; together they do what the model does.

    Args:
        model: any module that ``torch.export`` accepts (meta tensors are fine), or an exported program.
        inputs: one whole global batch; a tuple is positional, a dict keyword arguments. ``None``: the exported
            program's own, or a Hugging Face model's dummy inputs.
        global_batch: the inputs' batch is only a sample of this many.
        loss: makes the scalar loss of the model's output; ``None``: the output is, or has, the loss.
        constraints: what is given is fixed.
        precision: ``bf16``, ``fp16``, ``fp32`` or ``fp64``; ``None``: as the parameters are. ``fp8``: bf16, but
            for products with weights; planned only.

    Raises a :class:`passes.errors.PartitionError`, before anything is launched, where there is no such plan.
    """
    constraints = constraints or Constraints()

    @cache
    def prepared(global_batch: int | None) -> Prepared:
        captured = capture(
            model, inputs, loss=loss, global_batch=global_batch, precision=type_of(precision), objective=objective
        )
        folded = fold(normalize(captured))
        check_work(folded, train)
        mark_gradients(folded, train)
        batch = batch_size(folded, global_batch)
        return folded, shard_batch(folded, batch), batch

    def prepare(topology: Topology, constraints: Constraints, global_batch: int | None) -> Job:
        work = prepared(global_batch)
        return Job(*work, topology, constraints, train, optimizer, precision_of(work[0], precision))

    train = objective == "train"
    with advised(Asked(topology, constraints, global_batch, prepare)):
        check_request(topology, constraints, objective, optimizer)
        job = prepare(topology, constraints, global_batch)
        chosen, certificate = explore(job, progress)
    beyond = planned_only(chosen.point, constraints, job.precision)
    program = None if beyond else emit_program(job, chosen)
    return Plan(
        program=program,
        topology=topology,
        devices=chosen.devices,
        constraints=constraints,
        estimate=chosen.estimate,
        certificate=certificate,
        shares=operator_share(job.batch, chosen.local.sharding),
        model=type(model).__name__,
        precision=precision,
        optimizer=optimizer,
        notes=job.model.notes,
        objective=objective,
        global_batch=job.global_batch,
        planned_only=beyond,
    )
