"""Tables of the links that each mesh axis of a plan communicates over, for pictures and reports.

A cell describes the groups of one axis on one level of links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partitioner.plans.figures import AXIS_NAMES
from partitioner.runtime.program.mesh import MESH_AXES
from partitioner.topology.fabric import level_groups, spans_nodes
from partitioner.topology.group import Group
from partitioner.topology.groups import expert_grid, kinds_of, rank_grid, stage_links
from partitioner.topology.hardware import Level
from partitioner.topology.topology import Topology
from partitioner.units import format_digits, format_plural, format_ranges, seconds_text

if TYPE_CHECKING:
    from partitioner.plan import Plan
_MOST_OWN = 4


@dataclass(frozen=True)
class AxisCell:
    """A cell of a table that says how the groups of ranks along one mesh axis use one level of links (such as the links
    inside a node). ``label``: the text in the cell, such as numbers of ranks and bandwidth. ``tooltip``: a longer
    explanation."""

    label: str
    tooltip: str


def axis_text(plan: Plan) -> str:
    """Return a text on the links over which the ranks of each mesh axis of ``plan`` communicate, such as ``tp inside a
    node (nvlink4), dp over ib-ndr (4 nodes)``, with the number of nodes of one group. If groups of an axis use
    different links, each kind is described, with its number of groups. Empty for a single rank.
    """
    said = []
    for axis, uses in _find_axis_uses(plan).items():
        rows = np.array(plan.devices)[_list_axis_groups(plan, axis)]
        if axis == "pp":  # a pipeline uses the links of all its hand-overs
            said.append(f"{axis} {_describe_group_links(plan.topology, tuple(uses.cells), rows)}")
            continue
        by_links: dict[tuple[tuple[str, ...], bool], list[int]] = {}
        numbers, kinds = kinds_of(plan.topology, rows)
        for row, (kind, nodes) in enumerate(zip(numbers.tolist(), plan.topology.node_of[rows].tolist(), strict=True)):
            names = tuple(tier.level.name for tier in kinds[kind].tiers)
            by_links.setdefault((names, len(set(nodes)) == 1), []).append(row)
        told = [
            _describe_group_links(plan.topology, names, rows[of])
            + (f" in {format_plural(len(of), 'group')}" if len(by_links) > 1 else "")
            for (names, _), of in by_links.items()
        ]
        said.append(f"{axis} {' and '.join(told)}")
    return ", ".join(reversed(said))


def _describe_group_links(topology: Topology, names: Sequence[str], rows: NDArray[np.int64]) -> str:
    """Return a phrase for the links over which groups of ranks communicate, such as ``over ib-ndr (4 nodes)``.
    ``names``: the links, from the innermost. ``rows``: the device indices of each group, one group per row.
    """
    links = " and ".join(names) or "memory"
    nodes = [len(set(row)) for row in np.unique(topology.node_of[rows], axis=0).tolist()]
    if topology.num_nodes == 1:
        return f"over {links}"
    if max(nodes) == 1:
        return f"inside a node ({links})"
    few = f"{min(nodes)} to " if min(nodes) < max(nodes) else ""
    return f"over {links} ({few}{format_plural(max(nodes), 'node')})"


def devices_text(plan: Plan) -> str:
    """Return a text on the device types of the ranks of ``plan``, such as ``stages 0–3 on h100-sxm; stages 4–7 on
    a100-80gb``, or ``ranks 0–7 on h100-sxm; ranks 8–15 on a100-80gb`` without a pipeline. A device of reduced speed is
    named with its speed factor. Empty if all ranks have equal devices.
    """
    kinds = [(plan.topology.devices[device].kind, plan.topology.devices[device].speed) for device in plan.devices]
    if len(set(kinds)) == 1:
        return ""
    noun, parts = ("stage", plan.num_stages) if plan.num_stages > 1 else ("rank", plan.world_size)
    each, used = plan.world_size // parts, dict[tuple[tuple[str, float], ...], list[int]]()
    for part in range(parts):
        used.setdefault(tuple(dict.fromkeys(sorted(kinds[part * each : (part + 1) * each]))), []).append(part)
    return "; ".join(
        f"{noun if len(numbers) == 1 else f'{noun}s'} {format_ranges(numbers)} on "
        + " and ".join(kind if speed == 1 else f"{kind} at {speed:g} of its speed" for kind, speed in of_part)
        for of_part, numbers in used.items()
    )


def link_rows(topology: Topology) -> list[tuple[str, str, str, str]]:
    """Return one row of four texts for each kind of link of ``topology``: its name; what it connects, such as the
    devices of a node; the bandwidth of a device while all devices communicate; and the latency. Links inside a node
    come first, links between a single pair of devices last.
    """
    levels = [
        (
            level.name,
            _describe_level_joins(level),
            f"{level_rates(topology, level)[1]} per device",
            seconds_text(level.latency),
        )
        for level in topology.levels
    ]
    return [*_pattern_rows(topology), *levels, *_own_rows(topology)]


def rate_rows(topology: Topology) -> list[tuple[str, str, str, str, str, str]]:
    """Return one row of six texts for each kind of link of ``topology``: its name; what it connects, such as the
    devices of a node; its bandwidth as the topology's description gives it; the bandwidth of a device, and that of a
    node, while all devices communicate; and its latency. The two bandwidths while all communicate are empty for links
    between single pairs of devices.
    """
    rows = []
    for level in topology.levels:
        whole, device, node = level_rates(topology, level)
        rows.append((level.name, _describe_level_joins(level), whole, device, node, seconds_text(level.latency)))
    others = [(name, joins, rate, "", "", latency) for name, joins, rate, latency in _pattern_rows(topology)]
    own = [(name, joins, rate, "", "", latency) for name, joins, rate, latency in _own_rows(topology)]
    return [*others, *rows, *own]


def level_rates(topology: Topology, level: Level) -> tuple[str, str, str]:
    """Return three bandwidths of ``level``, a level of links of ``topology``, as texts: of one device or network card
    as described, of one device while all devices communicate, and of one node while all devices communicate. If devices
    or nodes differ, a text gives the least and the greatest.
    """
    left = level.bandwidth / level.oversubscription
    beyond = spans_nodes(level)
    has = np.flatnonzero(level_groups(topology, level) >= 0)
    shares: NDArray[np.floating[Any]] = topology.network_share[has] if beyond else np.ones(len(has))
    _, of_node = np.unique(topology.node_of[has], return_inverse=True)
    nodes = np.bincount(of_node.reshape(-1), weights=shares)
    whole = f"{_format_bandwidth(level.bandwidth)} per {'card' if beyond else 'device'}"
    if level.oversubscription != 1:
        whole += f", {format_digits(level.oversubscription)}:1"
    return whole, _format_rate_range(left * shares), _format_rate_range(left * nodes)


def _format_rate_range(rates: NDArray[np.floating[Any]]) -> str:
    """Return the range of ``rates`` (bytes/s) as text: ``25 to 50 GB/s``, or ``50 GB/s`` if all are equal."""
    low, high = format_digits(float(rates.min()) / 1e9), format_digits(float(rates.max()) / 1e9)
    return f"{high} GB/s" if low == high else f"{low} to {high} GB/s"


def _describe_level_joins(level: Level) -> str:
    joins = f"up to {format_plural(level.nodes, 'node')}" if level.nodes is not None else "all devices"
    if level.devices is not None:
        joins = format_plural(level.devices, "device")
    elif level.nodes == 1:
        joins = "a node"
    return joins + (f" of {', '.join(level.only)}" if level.only else "")


def _pattern_rows(topology: Topology) -> list[tuple[str, str, str, str]]:
    """Return one row of texts for each kind of link of ``topology`` that joins single pairs of devices inside a node:
    the name of the link, which pairs it connects, its bandwidths per pair, and its latency."""
    rows = []
    for name, matrix in topology.pattern_kinds:
        rates = sorted(set(matrix[matrix > 0].tolist()), reverse=True)
        words = " or ".join(format_digits(rate / 1e9) for rate in rates) + " GB/s per pair"
        whole = (matrix > 0).sum() == len(matrix) * (len(matrix) - 1)
        joins = "all pairs of a node" if whole else "some pairs of a node"
        rows.append((name, joins, words, seconds_text(topology.patterns[name].latency)))
    return rows


def _own_rows(topology: Topology) -> list[tuple[str, str, str, str]]:
    """Return one row of texts for each link that ``topology`` describes for a single pair of devices: its name,
    ``two devices``, its bandwidth and its latency. Only the first links have a row; a last row says how many more there
    are.
    """
    own = list(topology.own_links.values())
    rows = [
        (link.name, "two devices", f"{_format_bandwidth(link.bandwidth)} per pair", seconds_text(link.latency))
        for link in own[:_MOST_OWN]
    ]
    if len(own) > _MOST_OWN:
        rows.append((f"{len(own) - _MOST_OWN} more", "two devices", "", ""))
    return rows


@dataclass(frozen=True)
class _Uses:
    """How the ranks of one mesh axis communicate, as texts. ``summary``: a text on the whole axis. ``cells``: name of a
    level of links -> text on how the axis uses these links.
    """

    summary: str
    cells: dict[str, AxisCell]


def _find_axis_uses(plan: Plan) -> dict[str, _Uses]:
    """Return texts on how the ranks of each mesh axis of ``plan`` communicate, as a dict: axis -> texts. Axes with one
    rank are left out."""
    devices = np.array(plan.devices)
    found = {}
    for axis in (a for a in MESH_AXES if plan.mesh.get(a, 1) > 1):
        rows = devices[_list_axis_groups(plan, axis)]
        found[axis] = (
            _describe_stage_messages(plan, rows)
            if axis == "pp"
            else _describe_collectives(axis, *kinds_of(plan.topology, rows))
        )
    return found


def _list_axis_groups(plan: Plan, axis: str) -> NDArray[np.int64]:
    """Return the groups of ranks of ``plan`` along the mesh axis ``axis``, as an array with one group of ranks per
    row."""
    return expert_grid(plan.mesh, plan.chosen.etp) if axis == "ep" else rank_grid(plan.mesh, axis)


def _describe_collectives(axis: str, numbers: NDArray[np.int64], kinds: Sequence[Group]) -> _Uses:
    """Return texts on how the collectives of the mesh axis ``axis`` use the links, for the report. ``numbers``: the
    index in ``kinds`` of each group of ranks along the axis. ``kinds``: groups with different links. If several groups
    use one level of links, the slowest of these groups is described."""
    counts = Counter(numbers.tolist())
    ranked = sorted(range(len(kinds)), key=lambda k: (kinds[k].bus_bandwidth, -kinds[k].all_reduce_start))
    cells: dict[str, AxisCell] = {}
    for kind in ranked:
        for tier in kinds[kind].tiers:
            parts = (
                format_plural(tier.ways, "rank")
                if tier.below == 1
                else f"{format_plural(tier.ways, 'part')} of {tier.below} ranks"
            )
            rate = f"{_format_bandwidth(tier.level.bandwidth)} per device"
            tip = f"{AXIS_NAMES[axis]}: {parts} communicate over {tier.level.name}, {rate}"
            if len(counts) > 1:
                tip += f"; {counts[kind]:,} of {len(numbers):,} groups do"
            cells.setdefault(tier.level.name, AxisCell(f"{parts}, {rate}", tip))
    least = _format_bandwidth(kinds[ranked[0]].bus_bandwidth)
    return _Uses(f"{AXIS_NAMES[axis]}: bus bandwidth {least}", cells)


def _describe_stage_messages(plan: Plan, rows: NDArray[np.int64]) -> _Uses:
    """Return texts on how messages between consecutive pipeline stages of ``plan`` use the links. For each pair of
    consecutive stages, only the slowest link between their ranks is counted. ``rows``: device indices, one row for each
    pipeline, with the stages in order."""
    slowest = stage_links(plan.topology, {"pp": rows.shape[1], "dp": len(rows)}, rows.T.reshape(-1))
    counts = Counter(link.name for link in slowest)
    rates = {link.name: min(k.bandwidth for k in slowest if k.name == link.name) for link in slowest}
    cells = {}
    for name, count in counts.items():
        words = f"{format_plural(count, 'hand-over')}, {_format_bandwidth(rates[name])} per device"
        cells[name] = AxisCell(words, f"pipeline: {words}, over {name}")
    return _Uses(f"pipeline: {format_plural(len(slowest), 'hand-over')}", cells)


def _format_bandwidth(bandwidth: float) -> str:
    return f"{format_digits(bandwidth / 1e9)} GB/s"
