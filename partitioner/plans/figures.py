"""The key figures of a plan, for every picture and the summary."""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.plan import Candidate, Plan
from partitioner.runtime.program.mesh import MESH_AXES
from partitioner.topology.groups import num_communicators
from partitioner.topology.hardware import margin_bytes
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
    """Return ``mesh`` as text, such as ``pp 4 × dp 2 × tp 2``. Axes of one rank are left out; a mesh of a single rank
    gives ``one rank``. ``mesh``: axis -> number of ranks.

    ``ep`` comes after a comma: its ranks are also ranks of the other axes, so it is not a factor of the number of
    ranks.
    """
    product = " × ".join(f"{axis} {mesh[axis]}" for axis in MESH_AXES if axis != "ep" and mesh.get(axis, 1) > 1)
    experts = f"ep {mesh['ep']}" if mesh.get("ep", 1) > 1 else ""
    return ", ".join(filter(None, (product, experts))) or "one rank"


def candidate_text(candidate: Candidate) -> str:
    """Return the mesh of ``candidate``, a layout that the search examined, as text such as ``dp 64, zero 3``. Three
    choices follow the mesh if they are not the defaults: the ZeRO stage (``zero``), the number of data-parallel ranks
    over which ZeRO shards (``dp_shard``), and the number of virtual stages per rank (``v``).
    """
    more = [("zero", candidate.zero, 0), ("dp_shard", candidate.dp_shard, 0), ("v", candidate.virtual_stages, 1)]
    return ", ".join([mesh_text(candidate.mesh), *(f"{name} {value}" for name, value, one in more if value != one)])


@dataclass(frozen=True)
class DeviceMemory:
    """How the memory of one rank's device is divided, in bytes.

    ``device``: the whole memory. ``reserved``: for the driver and libraries. ``groups``: for buffers of the rank's
    communication groups. ``margin``: left free because estimates are inexact (``memory_margin``). The rest is usable by
    the plan.
    """

    device: int
    reserved: int
    groups: int
    margin: int

    @property
    def usable(self) -> int:
        """Return the bytes that a plan may use on the device: its memory less the reserved part, the buffers of groups
        and the margin.
        """
        return max(0, self.device - self.reserved - self.groups - self.margin)


def device_memory(plan: Plan, rank: int) -> DeviceMemory:
    """Return an object that says how the memory of the device of ``rank`` is divided between the driver, communication
    groups, the margin and ``plan``."""
    device = plan.topology.devices[plan.devices[rank]]
    groups = num_communicators(plan.mesh) * plan.topology.types[device.kind].communicator
    margin = margin_bytes(device.usable, plan.constraints.memory_margin)
    return DeviceMemory(device.memory, device.reserved, groups, margin)


def list_usable_bytes(plan: Plan) -> tuple[int, ...]:
    """Return, for every rank of ``plan`` in order, the bytes of its device that the plan may use."""
    devices, known = plan.topology.devices, dict[tuple[str, int, int], int]()
    found = []
    for rank, number in enumerate(plan.devices):
        device = devices[number]
        alike = device.kind, device.memory, device.reserved
        if alike not in known:
            known[alike] = device_memory(plan, rank).usable
        found.append(known[alike])
    return tuple(found)


def fullest_rank(plan: Plan) -> int:
    """Return the rank of ``plan`` whose peak memory is the largest fraction of its usable memory; 0 if the plan has no
    memory estimate.
    """
    rooms, peaks = list_usable_bytes(plan), plan.estimate.memory
    return max(range(len(peaks)), key=lambda r: peaks[r] / max(1, rooms[r]), default=0)


def share_of_usable(peak: float, usable: float) -> float:
    """Return ``peak`` divided by ``usable``, both in bytes; above 1 if the peak does not fit."""
    return peak / max(1.0, usable)


def memory_text(plan: Plan) -> str:
    """Return a text on the memory of ``plan``, for the rank that uses the largest fraction of its device: its peak
    memory, the usable memory of its device, and their ratio in percent; ``unknown`` if the plan has no memory estimate.
    """
    if not plan.estimate.memory:
        return "unknown"
    rank = fullest_rank(plan)
    peak, usable = plan.estimate.memory[rank], list_usable_bytes(plan)[rank]
    return f"{bytes_text(peak)} of {bytes_text(usable)} usable ({format_percent(share_of_usable(peak, usable))})"


def _format_microbatches(plan: Plan) -> str:
    few = f"{min(plan.data_shares):,} to " if plan.data_shares else ""
    return f"{few}{plan.num_microbatches:,}"


def schedule_text(plan: Plan) -> str:
    """Return the name of the pipeline schedule of ``plan``, with the number of virtual stages per rank if it has
    several; ``one stage`` for a plan without a pipeline.
    """
    chunks = plan.chosen.virtual_stages
    if plan.num_stages == 1:
        return "one stage"
    return plan.schedule + (f", {chunks} virtual stages on each rank" if chunks > 1 else "")


@dataclass(frozen=True)
class WaitingShares:
    """The fractions of a step, from 0 to 1, in which ranks wait for other ranks of the pipeline (the bubble). The time
    of transfers does not count as waiting.

    ``slowest``: the fraction of the rank that works longest. ``mean``: the mean over all ranks; ``None`` if the work of
    each stage is unknown.
    """

    slowest: float
    mean: float | None


def waiting_shares(plan: Plan) -> WaitingShares:
    """Return the fractions of a step in which the slowest rank and the mean rank of ``plan`` wait in the pipeline (the
    bubble).

    The slowest rank is the one with the most work. All ranks have the same step time, so every other rank waits longer
    than the slowest one, by the difference of their work. The work of a rank is the forward and backward of its stage,
    in proportion to its microbatches if data-parallel replicas have different numbers of them.
    """
    estimate = plan.estimate
    works = [stage.forward_s + stage.backward_s for stage in estimate.stages]
    if not works or not estimate.step_time:
        return WaitingShares(estimate.bubble, None)
    shares = plan.data_shares or (1,)
    # mean over the replicas, relative to the one with the most microbatches
    worked = sum(shares) / (len(shares) * max(shares))
    idle = max(works) - worked * sum(works) / len(works)
    return WaitingShares(estimate.bubble, min(1.0, estimate.bubble + idle / estimate.step_time))


def bubble_text(plan: Plan) -> str:
    """Return as text the percentage of the step that the slowest rank and the mean rank of ``plan`` wait in the
    pipeline; empty for a plan without a pipeline in which no rank waits.
    """
    shares = waiting_shares(plan)
    if plan.num_stages == 1 and not plan.data_shares and not shares.slowest:
        return ""
    text = f"{format_percent(shares.slowest)} on the slowest rank"
    return text if shares.mean is None else f"{text}, {format_percent(shares.mean)} on average over the ranks"


def _format_bubble_figure(plan: Plan) -> tuple[str, str]:
    """Return a pair of texts for pictures of ``plan``, a label and a value, such as ``"bubble, slowest rank"`` and
    ``"7.3%"``: the percentage of the step that ranks wait in the pipeline. The value is empty if no rank waits."""
    shares = waiting_shares(plan)
    if not bubble_text(plan):
        return "bubble", ""
    if shares.mean is None:
        return "bubble, slowest rank", format_percent(shares.slowest)
    return "bubble, slowest rank and average", f"{format_percent(shares.slowest)}, {format_percent(shares.mean)}"


def key_figures(plan: Plan) -> list[tuple[str, str]]:
    """Return the main numbers of ``plan`` as pairs of texts (name, value): mesh, ranks, microbatches, schedule, step
    time, MFU, bubble and memory. Pairs with an empty value are left out.
    """
    estimate = plan.estimate
    figures = [
        ("mesh", mesh_text(plan.mesh)),
        ("ranks", f"{plan.world_size:,}"),
        ("microbatches", _format_microbatches(plan)),
        ("schedule", schedule_text(plan)),
        ("step time", seconds_text(estimate.step_time)),
        ("MFU", format_percent(estimate.mfu)),
        _format_bubble_figure(plan),
        ("memory, fullest rank", memory_text(plan)),
    ]
    return [(name, value) for name, value in figures if value]


def simulated_seconds(plan: Plan, gradients_s: float) -> tuple[float, float]:
    """Return a pair of times in seconds: the time of a whole step of ``plan``, which is ``gradients_s`` plus the time
    of the optimizer update, and the time of the optimizer update alone. ``gradients_s``: seconds from the start of the
    step until all gradients are complete, according to a simulation.
    """
    update = plan.estimate.breakdown.get("optimizer", 0.0)
    return gradients_s + update, update


VIEW_NAMES = {  # kind of picture -> what it shows
    "graph": "Pipeline stages and their layers",
    "timeline": "Timeline of the step",
    "memory": "Memory during the step",
    "topology": "Devices and links",
}


def view_title(plan: Plan, view: str) -> str:
    """Return the title of a picture of ``plan``: what it shows, the model and the number of ranks. ``view``: the kind
    of picture, such as ``timeline``.
    """
    return f"{VIEW_NAMES[view]} – {picture_title(plan)}"


def picture_title(plan: Plan) -> str:
    """Return the title of a page on ``plan``: the model, what a step is, and the number of ranks."""
    objective = "training step" if plan.objective == "train" else "inference"
    return f"{plan.model}: {objective} on {format_plural(plan.world_size, 'rank')}"
