"""What ``show --rank`` and ``topology`` print."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from partitioner.errors import PlanError
from partitioner.explain_tables import heading, indented, pairs
from partitioner.plan import Plan
from partitioner.topology import Topology
from partitioner.units import bytes_text, digits, plural, ranges, seconds_text
from passes.layouts import local_shape
from runtime.program import AXES, RankProgram

_MOST_STATES = 40


def rank_parts(plan: Plan, rank: int) -> Iterator[RenderableType]:
    """One rank's place, groups, shards and instructions. Raises :class:`PlanError` for a rank that is not there."""
    if not 0 <= rank < plan.program.world_size:
        raise PlanError(f"there is no rank {rank}; the plan has ranks 0 to {plan.program.world_size - 1}")
    mine = plan.rank(rank)
    device = plan.topology.devices[plan.devices[rank]]
    yield heading(f"Rank {rank} of {plan.program.world_size} on {device.name}")
    axes = [a for a in AXES if plan.mesh.get(a, 1) > 1]
    rows = [("place", ", ".join(f"{a} {mine.coordinates[a]}" for a in axes) or "the one rank")]
    rows += [(f"{a} group", f"ranks {ranges(mine.group(a))}") for a in axes]
    if rank < len(plan.estimate.memory):
        rows.append(("peak memory", f"{bytes_text(plan.estimate.memory[rank])} of {bytes_text(device.usable)}"))
    yield pairs(rows)
    yield from ("", _states(mine), "", heading("Instructions"), _instructions(mine))


def _states(mine: RankProgram) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("state", overflow="fold")
    for title in ("kind", "layout", "whole", "this rank", "type", "gradient over"):
        table.add_column(title, no_wrap=True)
    tp = mine.program.mesh.get("tp", 1)
    for name, layout in list(mine.states.items())[:_MOST_STATES]:
        state = mine.program.states[name]
        shape = local_shape(layout, state.shape, tp)
        cells = [
            name,
            state.kind,
            str(layout),
            _shape(state.shape),
            _shape(shape),
            state.dtype,
            ", ".join(state.grad_axes),
        ]
        table.add_row(*map(Text, cells))
    rest = len(mine.states) - _MOST_STATES
    if rest > 0:
        table.add_row(Text(f"and {rest} more", style="dim"))
    return indented(table)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _instructions(mine: RankProgram) -> RenderableType:
    """The list in the notation of the program, without what is mere bookkeeping."""
    silent = [i for i in mine.instructions if i.op in ("FREE", "LOAD")]
    text = " ".join(str(i) for i in mine.instructions if i.op not in ("FREE", "LOAD"))
    return indented(Text(text + (f"  (and {len(silent)} LOAD and FREE)" if silent else "")))


def topology_parts(topology: Topology) -> Iterator[RenderableType]:
    """Kinds of devices and levels of links."""
    count = f"{plural(topology.num_devices, 'device')} on {plural(topology.num_nodes, 'node')}"
    yield heading(f"{topology.name}: {count}")
    devices = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("device", "count", "memory", "usable", "memory bandwidth", "peak"):
        devices.add_column(title)
    for kind, entry in topology.types.items():
        those = [d for d in topology.devices if d.kind == kind]
        if not those:
            continue
        peaks = ", ".join(f"{name} {digits(flops / 1e12)} TFLOP/s" for name, flops in entry.peak.items())
        bandwidth = f"{digits(entry.memory_bandwidth / 1e9)} GB/s"
        memory, usable = those[0].memory, those[0].usable
        devices.add_row(kind, str(len(those)), bytes_text(memory), bytes_text(usable), bandwidth, peaks)
    links = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("link", "joins", "bandwidth", "latency"):
        links.add_column(title)
    for level in topology.levels:
        whole = "all devices" if level.nodes is None else plural(level.nodes, "node")
        joins = whole if level.devices is None else plural(level.devices, "device")
        links.add_row(level.name, joins, f"{digits(level.bandwidth / 1e9)} GB/s", seconds_text(level.latency))
    yield indented(devices)
    if topology.levels:
        yield from ("", indented(links))
