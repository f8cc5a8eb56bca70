"""The predicted time of the operators of each block, by module path, as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from partitioner.cost.call.block_profile import (
    KernelRow,
    KernelTable,
    fan_out,
    learned_nodes,
    merge_rows,
    node_operands,
    operand_needs,
)
from partitioner.cost.call.fused_regions import FusedRegions
from partitioner.cost.call.operators import backward_kernels, forward_kernels, operator_name
from partitioner.cost.call.roofline import kernel_times
from partitioner.passes.rules.strategies import needs_gradient
from partitioner.plan import Plan
from partitioner.plans.outline import describe_block
from partitioner.report.html import Cell, build_table
from partitioner.simulate.program_time import PlanDurations
from partitioner.units import bytes_text, format_flops, format_percent, format_ranges, seconds_text

if TYPE_CHECKING:
    from partitioner.passes.ir.model import Block
    from partitioner.topology.hardware import DeviceType

MOST_OPERATORS = 300  # rows of the table


@dataclass
class OperatorCost:
    """Describes the predicted cost of one operator of a module for one microbatch, on one rank of each of some pipeline
    stages.

    ``device``: the device type of these ranks, with its speed factor if that is not 1. ``stages``: the indices of the
    stages as text, such as ``0–3, 5``. ``block``: name of the block (such as a decoder layer) that contains the
    operator. ``operator``: the module path and the name of the operator. ``calls``: how often the stages call the
    block. ``seconds``: a list of two numbers, for forward and for backward, summed over all these calls. ``num_bytes``:
    bytes read and written by forward and backward of a single call. ``flops``: floating-point operations of forward and
    backward of a single call.
    """

    device: str
    stages: str
    block: str
    operator: str
    calls: int
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    num_bytes: float = 0.0
    flops: float = 0.0


def list_operator_costs(plan: Plan) -> list[OperatorCost]:
    """Return the predicted cost of every operator of the blocks (pieces of the model, such as decoder layers) of
    ``plan``, the longest time first. Operators of equal name in one module of a block are added up. A block that
    several stages call has one entry per operator and device type, with all its calls on devices of this type. If
    devices of one type have different speeds, the slowest counts.

    Only the time of kernels counts, without communication, recomputation and the time in which a device waits for the
    host.
    """
    durations = PlanDurations(plan)
    train = plan.program.objective == "train"
    calls: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)  # (block, device type) -> stage -> calls
    speeds: dict[tuple[str, str], float] = {}
    for number, stage in enumerate(plan.program.stages):
        for seat in durations.machine.seats[number]:
            for name in {call.block for call in stage.calls if not call.prologue}:
                key = name, seat.kind
                speeds[key] = min(seat.speed, speeds.get(key, seat.speed))
                calls[key][number] = sum(call.block == name and not call.prologue for call in stage.calls)
    found: list[OperatorCost] = []
    for (name, kind), on_stages in calls.items():
        speed = speeds[name, kind]
        device = durations.topology.paced_type(kind, speed)
        shown = kind if speed == 1 else f"{kind} at {speed:g} of its speed"
        common = OperatorCost(shown, format_ranges(sorted(on_stages)), name, "", on_stages.total())
        block = durations.blocks[name]
        merged = FusedRegions(block, train) if durations.machine.profile.fused_kernels else None
        found += _list_block_costs(plan, block, device, train, common, merged)
    return sorted(found, key=lambda cost: -sum(cost.seconds))


def _list_block_costs(
    plan: Plan, block: Block, device: DeviceType, train: bool, common: OperatorCost, merged: FusedRegions | None
) -> Iterator[OperatorCost]:
    """Yield the predicted cost of each operator of ``block``, a piece of the model in ``plan`` such as a decoder layer,
    on ``device``. ``train``: whether backward is included. ``common``: its ``device``, ``stages``, ``block`` and
    ``calls`` are copied to each result, and seconds are multiplied by its ``calls``. ``merged``: the regions of
    operators that a compiler merges into one kernel, whose time is divided among its operators; ``None``: nothing is
    merged.
    """
    paths = {node["name"]: node.get("path", "") for node in plan.program.blocks[block.name].nodes}
    names, learned = set(block.states), learned_nodes(block)
    rows: list[KernelRow] = []
    keys: list[tuple[str, str]] = []
    regions: list[int | None] = []
    for node in block.graph.nodes:
        if node.op != "call_function":
            continue
        operands, results = node_operands(node, names, learned)
        kernels = [(0, kernel) for kernel in forward_kernels(node, operands, results)]
        if train and needs_gradient(node):
            back = [*backward_kernels(node, operands, results, operand_needs(node)), *fan_out(node)]
            kernels += [(1, kernel) for kernel in back]
        rows += [KernelRow(kernel, way) for way, kernel in kernels]
        regions += [None if merged is None else merged.region.get(node)] * len(kernels)
        keys += [(str(paths.get(node.name, "")), operator_name(node))] * len(kernels)
    if not rows:
        return
    if merged is not None:
        merge_rows(rows, regions, merged)
    costs: dict[tuple[str, str], OperatorCost] = {}
    for key, row, seconds in zip(keys, rows, kernel_times(KernelTable.of(rows), device), strict=True):
        if key not in costs:
            path, operator = key
            shown = f"{path}: {operator}" if path else operator
            own = describe_block(plan.program, common.block)
            costs[key] = OperatorCost(common.device, common.stages, own, shown, common.calls)
        cost = costs[key]
        cost.seconds[row.way] += float(seconds) * common.calls
        cost.num_bytes += row.kernel.num_bytes
        cost.flops += row.kernel.flops
    yield from costs.values()


def build_operator_table(costs: list[OperatorCost]) -> ET.Element:
    """Return a sortable HTML table with a row for each of the first 300 entries of ``costs``. Its column "share" is the
    fraction of the seconds of all ``costs`` on devices of the same type. It has a column with the device type if there
    are several.
    """
    totals: dict[str, float] = defaultdict(float)
    for cost in costs:
        totals[cost.device] += sum(cost.seconds)
    rows: list[list[Cell]] = []
    for cost in costs[:MOST_OPERATORS]:
        both = sum(cost.seconds)
        share = both / (totals[cost.device] or 1.0)
        ahead, back = cost.seconds
        rows.append(
            [
                cost.operator,
                cost.block,
                *([cost.device] if len(totals) > 1 else []),
                cost.stages,
                (float(cost.calls), f"{cost.calls:,}"),
                (ahead, seconds_text(ahead) if ahead else ""),
                (back, seconds_text(back) if back else ""),
                (share, format_percent(share)),
                (cost.flops, format_flops(cost.flops) if cost.flops else ""),
                (cost.num_bytes, bytes_text(cost.num_bytes)),
            ]
        )
    columns = [
        ("operator", False),
        ("block", False),
        *([("device", False)] if len(totals) > 1 else []),
        ("stages", False),
        ("calls", True),
        ("forward of all calls", True),
        ("backward of all calls", True),
        ("share", True),
        ("FLOPs, a call", True),
        ("bytes, a call", True),
    ]
    where = f" ({next(iter(totals))})" if len(totals) == 1 else ", for each device type"
    caption = f"Operators of one microbatch, by module, on one rank of each stage{where}"
    return build_table(caption, columns, rows, sortable=True, name="operator-table")
