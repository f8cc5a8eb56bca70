"""The key figures of a plan, for every picture and the summary."""

from __future__ import annotations

from partitioner.plan import Candidate, Plan
from partitioner.runtime.program.mesh import MESH_AXES
from partitioner.topology.groups import num_communicators
from partitioner.units import bytes_text, format_percent, format_plural, seconds_text

AXIS_NAMES = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor", "ep": "expert"}

COLLECTIVE_NAMES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "ring": "ring of sends",
}


def mesh_text(mesh: dict[str, int]) -> str:
    """The mesh as text, ``pp 4 × dp 2 × tp 2``, without axes of one rank; ``one rank`` for a mesh of one rank.

    ``ep`` comes after a comma: its ranks are ranks of the other axes, and not a factor of their product.
    """
    product = " × ".join(f"{axis} {mesh[axis]}" for axis in MESH_AXES if axis != "ep" and mesh.get(axis, 1) > 1)
    experts = f"ep {mesh['ep']}" if mesh.get("ep", 1) > 1 else ""
    return ", ".join(filter(None, (product, experts))) or "one rank"


def candidate_text(candidate: Candidate) -> str:
    """The candidate's mesh, with state sharding and virtual stages (``v``) if it has any: ``dp 64, zero 3``."""
    more = [("zero", candidate.zero, 0), ("dp_shard", candidate.dp_shard, 0), ("v", candidate.virtual_stages, 1)]
    return ", ".join([mesh_text(candidate.mesh), *(f"{name} {value}" for name, value, one in more if value != one)])


def list_rank_capacities(plan: Plan) -> tuple[int, ...]:
    """Usable bytes on the device of every rank, without the buffers of its communication groups."""
    topology, groups = plan.topology, num_communicators(plan.mesh)
    paces, of_device = topology.paces
    each = [topology.types[kind].communicator for kind, _ in paces]
    return tuple(max(0, int(topology.usable[d]) - groups * each[of_device[d]]) for d in plan.devices)


def memory_text(plan: Plan) -> str:
    """The peak memory of the fullest rank, and the capacity of its device."""
    peaks = plan.estimate.memory
    if not peaks:
        return "unknown"
    rooms = list_rank_capacities(plan)
    fullest = max(range(len(peaks)), key=lambda r: peaks[r] / max(1, rooms[r]))
    return f"{bytes_text(peaks[fullest])} of {bytes_text(rooms[fullest])}"


def _format_microbatches(plan: Plan) -> str:
    few = f"{min(plan.data_shares):,} to " if plan.data_shares else ""
    return f"{few}{plan.num_microbatches:,}"


def schedule_text(plan: Plan) -> str:
    """The schedule's name and the number of virtual stages on a rank; ``one stage`` for a plan with a single stage,
    which has no schedule."""
    chunks = plan.chosen.virtual_stages
    if plan.num_stages == 1:
        return "one stage"
    return plan.schedule + (f", {chunks} virtual stages on each rank" if chunks > 1 else "")


def key_figures(plan: Plan) -> list[tuple[str, str]]:
    """(name, value) pairs: mesh, microbatches, schedule, step time, MFU, bubble, memory."""
    estimate = plan.estimate
    return [
        ("mesh", mesh_text(plan.mesh)),
        ("ranks", f"{plan.world_size:,}"),
        ("microbatches", _format_microbatches(plan)),
        ("schedule", schedule_text(plan)),
        ("step time", seconds_text(estimate.step_time)),
        ("MFU", format_percent(estimate.mfu)),
        ("bubble", format_percent(estimate.bubble)),
        ("memory, fullest rank", memory_text(plan)),
    ]


def simulated_seconds(plan: Plan, gradients_s: float) -> tuple[float, float]:
    """The seconds of a simulated step whose gradients are complete after ``gradients_s``, and the seconds of its
    update."""
    update = plan.estimate.breakdown.get("optimizer", 0.0)
    return gradients_s + update, update


def picture_title(plan: Plan) -> str:
    objective = "training step" if plan.objective == "train" else "inference"
    return f"{plan.model}: {objective} on {format_plural(plan.world_size, 'rank')}"
