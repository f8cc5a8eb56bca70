"""Build the output of ``show --rank`` and ``topology``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pydantic import BaseModel
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from partitioner.errors import PlanError
from partitioner.explain.tables import build_pair_grid, format_heading, indent_part
from partitioner.plan import Plan
from partitioner.plans.figures import list_usable_bytes
from partitioner.plans.mesh_axes import rate_rows
from partitioner.runtime.program.mesh import MESH_AXES
from partitioner.runtime.program.program import RankProgram, shard_shape
from partitioner.topology import DeviceType, Topology
from partitioner.units import bytes_text, format_digits, format_plural, format_ranges

_MOST_STATES = 40

_MOST_DIFFERENT = 12


def rank_parts(plan: Plan, rank: int) -> Iterator[RenderableType]:
    """Yield the description of one rank of ``plan`` as parts to print: its device, coordinates in the mesh, groups,
    peak memory, shards of parameters and buffers, and instructions. ``rank``: its number. Raise :class:`PlanError` if
    it does not exist.
    """
    if not 0 <= rank < plan.program.world_size:
        raise PlanError(f"there is no rank {rank}; the plan has ranks 0 to {plan.program.world_size - 1}")
    mine = plan.rank(rank)
    device = plan.topology.devices[plan.devices[rank]]
    yield format_heading(f"Rank {rank} of {plan.program.world_size} on {device.name}")
    axes = [a for a in MESH_AXES if plan.mesh.get(a, 1) > 1]
    places = {**mine.expert_coordinates, **mine.coordinates}
    rows = [("place", ", ".join(f"{a} {places[a]}" for a in axes) or "the one rank")]
    rows += [(f"{a} group", f"ranks {format_ranges(mine.group(a))}") for a in axes]
    if rank < len(plan.estimate.memory):
        room = bytes_text(list_usable_bytes(plan)[rank])
        rows.append(("peak memory", f"{bytes_text(plan.estimate.memory[rank])} of {room} usable"))
    yield build_pair_grid(rows)
    yield from ("", _build_state_table(mine), "", format_heading("Instructions"), _format_instructions(mine))


def _build_state_table(mine: RankProgram) -> RenderableType:
    """Return a table of the rank's parameters and buffers with their layouts and shapes; only the first are listed if
    there are many. ``mine``: the program of the rank."""
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
            _format_shape(state.shape),
            _format_shape(shape),
            state.dtype,
            ", ".join(state.grad_axes),
        ]
        table.add_row(*map(Text, cells))
    rest = len(mine.states) - _MOST_STATES
    if rest > 0:
        table.add_row(Text(f"and {rest} more", style="dim"))
    return indent_part(table)


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _format_instructions(mine: RankProgram) -> RenderableType:
    """Return the instructions of a rank as text to print. ``FREE`` (release a value) and ``LOAD`` (read an input) are
    only counted. ``mine``: the program of the rank.
    """
    silent = [i for i in mine.instructions if i.op in ("FREE", "LOAD")]
    text = " ".join(str(i) for i in mine.instructions if i.op not in ("FREE", "LOAD"))
    return indent_part(Text(text + (f"  (and {len(silent)} LOAD and FREE)" if silent else "")))


def topology_parts(topology: Topology) -> Iterator[RenderableType]:
    """Yield the description of ``topology`` as parts to print: device types, nodes with their hosts, levels of links,
    and single links or devices with other properties."""
    count = f"{format_plural(topology.num_devices, 'device')} on {format_plural(topology.num_nodes, 'node')}"
    price = topology.price_per_hour
    yield format_heading(f"{topology.name}: {count}" + (f", {price:,.2f} USD/h" if price is not None else ""))
    devices = _build_plain_table(
        "device", "count", "memory", "not reserved", "memory bandwidth", "peak", "USD/h", "watts"
    )
    counts = Counter(d.kind for d in topology.devices)
    for kind, number in counts.items():
        entry = topology.types[kind]
        peaks = ", ".join(f"{name} {format_digits(flops / 1e12)} TFLOP/s" for name, flops in entry.peak.items())
        room = max(0, entry.memory - entry.reserved)
        price = entry.price
        devices.add_row(
            *(
                kind,
                str(number),
                bytes_text(entry.memory),
                bytes_text(room),
                _format_bandwidth(entry.memory_bandwidth),
                peaks,
            ),
            *("" if price is None else f"{price:.2f}", _format_power(entry)),
        )
    yield indent_part(devices)
    yield from ("", indent_part(_build_node_table(topology)))
    links = _build_plain_table("link", "joins", "bandwidth", "a device gets", "a node gets", "latency")
    for row in rate_rows(topology):
        links.add_row(*row)
    if links.row_count:
        yield from ("", indent_part(links))
    different = _list_device_differences(topology)
    if different:
        yield from ("", indent_part(Text("\n".join(different))))


def _build_node_table(topology: Topology) -> Table:
    """Return a table of the nodes of ``topology`` with one row for each group of equal nodes, in order, and columns for
    those properties of their hosts that the topology describes.
    """
    hosts = [group.host for group in topology.nodes]
    titles = ["nodes", "devices in each"]
    cards = topology.num_nodes > 1 and any(group.num_cards != group.devices for group in topology.nodes)
    titles += ["network cards"] if cards else []
    titles += ["device and host", "host memory"] if any(hosts) else []
    titles += ["disk", "disk bandwidth"] if any(host and host.disk_bandwidth for host in hosts) else []
    table = _build_plain_table(*titles)
    for group, host in zip(topology.nodes, hosts, strict=True):
        row = [f"{group.count} x {group.island_name}", str(group.devices)]
        row += [str(group.num_cards)] if cards else []
        row += [_format_bandwidth(host.bandwidth), bytes_text(host.memory)] if host else []
        row += [bytes_text(host.disk), _format_bandwidth(host.disk_bandwidth)] if host and host.disk_bandwidth else []
        table.add_row(*row)
    return table


def _build_plain_table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title)
    return table


def _format_bandwidth(bandwidth: float) -> str:
    return f"{format_digits(bandwidth / 1e9)} GB/s"


def _format_power(entry: DeviceType) -> str:
    if entry.power_busy is None:
        return ""
    idle = f", idle {format_digits(entry.power_idle)}" if entry.power_idle is not None else ""
    limit = f", held to {format_digits(entry.power_limit)}" if entry.power_limit is not None else ""
    return f"{format_digits(entry.power_busy)}{idle}{limit}"


def _list_device_differences(topology: Topology) -> list[str]:
    """Return lines of text on nodes and devices that differ from their group in the description of ``topology``, such
    as a slower device. At most twelve nodes and twelve devices have a line each; a further line counts the rest.
    """
    nodes = [(f"node {node}", own) for node, own in topology.node_overrides.items()]
    every = [*nodes[:_MOST_DIFFERENT], *list(topology.overrides.items())[:_MOST_DIFFERENT]]
    lines = [f"{name}: {', '.join(_format_given_fields(own))}" for name, own in every]
    rest = len(topology.node_overrides) + len(topology.overrides) - len(lines)
    return lines + ([f"and {rest} more"] if rest else [])


def _format_given_fields(own: BaseModel) -> Iterator[str]:
    for key, value in own.model_dump(exclude_defaults=True).items():
        shown = (
            bytes_text(value) if key == "memory" else format_digits(value) if isinstance(value, float) else str(value)
        )
        yield f"{key.replace('_', ' ')} {shown}"
