"""What ``show --rank`` and ``topology`` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pydantic import BaseModel
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from partitioner.errors import PlanError
from partitioner.explain.tables import heading, indented, pairs
from partitioner.plan import Plan
from partitioner.plans.figures import capacities
from partitioner.plans.mesh_axes import rate_rows
from partitioner.topology import DeviceType, Topology
from partitioner.units import bytes_text, digits, plural, ranges
from runtime.program.mesh import MESH_AXES
from runtime.program.program import RankProgram, shard_shape

_MOST_STATES = 40

_MOST_DIFFERENT = 12


def rank_parts(plan: Plan, rank: int) -> Iterator[RenderableType]:
    """One rank's place, groups, shards and instructions. Raises :class:`PlanError` for a rank that is not there."""
    if not 0 <= rank < plan.program.world_size:
        raise PlanError(f"there is no rank {rank}; the plan has ranks 0 to {plan.program.world_size - 1}")
    mine = plan.rank(rank)
    device = plan.topology.devices[plan.devices[rank]]
    yield heading(f"Rank {rank} of {plan.program.world_size} on {device.name}")
    axes = [a for a in MESH_AXES if plan.mesh.get(a, 1) > 1]
    places = {**mine.expert_coordinates, **mine.coordinates}
    rows = [("place", ", ".join(f"{a} {places[a]}" for a in axes) or "the one rank")]
    rows += [(f"{a} group", f"ranks {ranges(mine.group(a))}") for a in axes]
    if rank < len(plan.estimate.memory):
        room = bytes_text(capacities(plan)[rank])
        rows.append(("peak memory", f"{bytes_text(plan.estimate.memory[rank])} of {room}"))
    yield pairs(rows)
    yield from ("", _states(mine), "", heading("Instructions"), _instructions(mine))


def _states(mine: RankProgram) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("state", overflow="fold")
    for title in ("kind", "layout", "whole", "this rank", "type", "gradient over"):
        table.add_column(title, no_wrap=True)
    for name, layout in list(mine.states.items())[:_MOST_STATES]:
        state = mine.program.states[name]
        shape = shard_shape(mine.program, name)
        shown = [f"{state.expert_layout} over ep"] if state.expert_layout != "R" else []
        cells = [
            name,
            state.kind,
            ", ".join([*shown, str(layout)]),
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
    """Kinds of devices, their hosts, levels of links, and what differs."""
    count = f"{plural(topology.num_devices, 'device')} on {plural(topology.num_nodes, 'node')}"
    price = topology.price_per_hour
    yield heading(f"{topology.name}: {count}" + (f", {price:,.2f} USD/h" if price is not None else ""))
    devices = _table("device", "count", "memory", "usable", "memory bandwidth", "peak", "USD/h", "watts")
    counts = Counter(d.kind for d in topology.devices)
    for kind, number in counts.items():
        entry = topology.types[kind]
        peaks = ", ".join(f"{name} {digits(flops / 1e12)} TFLOP/s" for name, flops in entry.peak.items())
        room = max(0, entry.memory - entry.reserved)
        price = entry.price
        devices.add_row(
            *(kind, str(number), bytes_text(entry.memory), bytes_text(room), _rate(entry.memory_bandwidth), peaks),
            *("" if price is None else f"{price:.2f}", _watts(entry)),
        )
    yield indented(devices)
    yield from ("", indented(_nodes(topology)))
    links = _table("link", "joins", "bandwidth", "a device gets", "a node gets", "latency")
    for row in rate_rows(topology):
        links.add_row(*row)
    if links.row_count:
        yield from ("", indented(links))
    different = _differences(topology)
    if different:
        yield from ("", indented(Text("\n".join(different))))


def _nodes(topology: Topology) -> Table:
    """The kinds of nodes, in order, with as much of their hosts as is described."""
    hosts = [group.host for group in topology.nodes]
    titles = ["nodes", "devices in each"]
    cards = topology.num_nodes > 1 and any(group.num_cards != group.devices for group in topology.nodes)
    titles += ["network cards"] if cards else []
    titles += ["device and host", "host memory"] if any(hosts) else []
    titles += ["disk", "disk bandwidth"] if any(host and host.disk_bandwidth for host in hosts) else []
    table = _table(*titles)
    for group, host in zip(topology.nodes, hosts, strict=True):
        row = [f"{group.count} x {group.island_name}", str(group.devices)]
        row += [str(group.num_cards)] if cards else []
        row += [_rate(host.bandwidth), bytes_text(host.memory)] if host else []
        row += [bytes_text(host.disk), _rate(host.disk_bandwidth)] if host and host.disk_bandwidth else []
        table.add_row(*row)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title)
    return table


def _rate(bandwidth: float) -> str:
    return f"{digits(bandwidth / 1e9)} GB/s"


def _watts(entry: DeviceType) -> str:
    if entry.power_busy is None:
        return ""
    idle = f", idle {digits(entry.power_idle)}" if entry.power_idle is not None else ""
    limit = f", held to {digits(entry.power_limit)}" if entry.power_limit is not None else ""
    return f"{digits(entry.power_busy)}{idle}{limit}"


def _differences(topology: Topology) -> list[str]:
    """What nodes and devices have of their own, a line each."""
    nodes = [(f"node {node}", own) for node, own in topology.node_overrides.items()]
    every = [*nodes[:_MOST_DIFFERENT], *list(topology.overrides.items())[:_MOST_DIFFERENT]]
    lines = [f"{name}: {', '.join(_given(own))}" for name, own in every]
    rest = len(topology.node_overrides) + len(topology.overrides) - len(lines)
    return lines + ([f"and {rest} more"] if rest else [])


def _given(own: BaseModel) -> Iterator[str]:
    for key, value in own.model_dump(exclude_defaults=True).items():
        shown = bytes_text(value) if key == "memory" else digits(value) if isinstance(value, float) else str(value)
        yield f"{key.replace('_', ' ')} {shown}"
