"""Put a plan together: the first program and its figures, and the further programs."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.explain.tables import notes_on_precision
from partitioner.plan import Plan, operator_share
from partitioner.programs.further import FirstProgram, plan_further_programs
from partitioner.programs.requests import Evaluate
from partitioner.topology import Topology


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
