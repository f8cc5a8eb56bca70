"""Split a microbatch's predicted time by kind of operator, and communication inside layers by mesh axis.

This needs the cost model and PyTorch, so it is computed together with the plan, and only if the explanation of the plan
uses it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

from partitioner.cost.call.block_profile import asked_by
from partitioner.cost.call.call_cost import CallCost, compute_exchange_seconds
from partitioner.cost.call.collectives import context_exchanges
from partitioner.cost.call.roofline import kernel_times
from partitioner.passes.ir.model import Block
from partitioner.plan import Plan
from partitioner.plans.figures import AXIS_NAMES
from partitioner.plans.outline import outline_program
from partitioner.simulate.program_time import PlanDurations
from partitioner.topology.hardware import DeviceType

Seconds = dict[str, float]  # kind of operator, in words -> seconds

_LOW = 0.3  # MFU below which the kinds of operators that take longest are named
_COMPUTING = 0.5  # and only if computation is more than this share of the step
_SPLIT = 0.1  # share of the step from which communication inside layers is listed by kind
_ISSUING = "the host's issuing of operators"
_WORDS = {
    "matmul": "matrix products",
    "attention": "fused attention",
    "pointwise": "pointwise operators",
    "special": "activation functions",
    "softmax": "softmaxes and cross entropies",
    "reduction": "reductions",
    "norm": "norms",
    "lookup": "lookups and scatters",
    "sort": "sorts",
    "default": "copies and other operators",
}


def with_kernel_seconds(plan: Plan) -> Plan:
    """Return a copy of ``plan`` whose estimate has up to two more dicts, for the explanation of the plan.

    ``kinds``: kind of operator, such as norms -> its seconds in one microbatch, on the stage with the longest
    computation. This dict is added if computation is a large part of the step and the MFU is low. ``exchanges``:
    purpose of communication inside layers, such as tensor parallelism -> its seconds in one step. This dict is added if
    this communication is a large part of the step. Otherwise ``plan`` itself is returned.
    """
    estimate = plan.estimate
    total = sum(estimate.breakdown.values())
    if plan.written is None or not total:
        return plan
    found: dict[str, dict[str, float]] = {}
    if estimate.breakdown.get("compute", 0.0) > _COMPUTING * total and estimate.mfu < _LOW:
        found["kinds"] = _sum_kinds_of_slowest(plan)
    if estimate.breakdown.get("tp_communication", 0.0) > _SPLIT * total:
        found["exchanges"] = sum_exchange_seconds(plan)
    return plan.model_copy(update={"estimate": estimate.model_copy(update=found)}) if found else plan


def _sum_kinds_of_slowest(plan: Plan) -> Seconds:
    """Return the computation seconds of one microbatch on the stage of ``plan`` with the longest computation, as a
    dict: kind of operator, such as norms -> seconds.
    """
    durations = PlanDurations(plan)
    seconds = max((_of_stage(plan, durations, stage) for stage in range(plan.num_stages)), key=_sum_kind_seconds)
    return dict(seconds)


def sum_exchange_seconds(plan: Plan) -> Seconds:
    """Return the seconds of communication inside layers in one step, as a dict: purpose, such as ``tensor parallelism
    (tp)`` -> seconds. They are counted on the pipeline stage of ``plan`` whose forward and backward take longest. Time
    in which communication and computation overlap is included.
    """
    durations, program = PlanDurations(plan), plan.program
    busy = [stage.forward_s + stage.backward_s for stage in plan.estimate.stages]
    stage = busy.index(max(busy)) if busy else 0
    seconds: Seconds = defaultdict(float)
    calls = Counter(call.block for call in program.stages[stage].calls if not call.prologue)
    for name, count in calls.items():
        for purpose, took in _list_exchange_seconds(durations, stage, name):
            seconds[purpose] += program.num_microbatches * count * took
    for moved in outline_program(program).stages[stage].reductions if program.zero == 3 else ():
        op = cast("Any", moved.op)
        if moved.op in ("all_gather", "reduce_scatter"):
            each = durations.share(op, tuple(moved.axis.split("×")), moved.num_bytes // moved.count, stage)
            seconds[f"{moved.what} of ZeRO-3 ({moved.axis})"] += moved.count * each
    return dict(seconds)


def _list_exchange_seconds(durations: PlanDurations, stage: int, name: str) -> Iterator[tuple[str, float]]:
    """Yield pairs (purpose, seconds) for the communication in one call of a block (such as a layer). A purpose is a
    text such as ``tensor parallelism (tp)``. ``durations``: the cost model's predictions for the plan. ``stage``: index
    of the stage that makes the call. ``name``: name of the block.
    """
    train = durations.plan.program.objective == "train"
    seat = durations.machine.seats[stage][0]
    groups, device = dict(seat.groups), durations.topology.paced_type(seat.kind, seat.speed)
    asked = asked_by(durations.blocks[name], train)
    for exchange in asked.exchanges:
        took = compute_exchange_seconds(exchange, groups, device)
        yield f"{AXIS_NAMES.get(exchange.axis, exchange.axis)} parallelism ({exchange.axis})", took
    for node, back in asked.rings:
        sent, _ = context_exchanges(node, groups)
        yield f"{AXIS_NAMES['cp']} parallelism (cp)", sum(sent[: 1 + back])


def _of_stage(plan: Plan, durations: PlanDurations, stage: int) -> Seconds:
    """Return the computation seconds of one microbatch by kind of operator, on the slowest device type of a stage.
    Recomputation in backward is included. ``durations``: the cost model's predictions for ``plan``. ``stage``: index of
    the stage.
    """
    train = plan.program.objective == "train"
    here, of_devices, fused = plan.program.stages[stage], [], durations.machine.profile.fused_kernels
    for kind, speed in {(seat.kind, seat.speed) for seat in durations.machine.seats[stage]}:
        device = plan.topology.paced_type(kind, speed)
        of_block: dict[str, tuple[Seconds, Seconds]] = {}
        seconds: Seconds = defaultdict(float)
        for i, call in enumerate(here.calls):
            if call.prologue:
                continue
            if call.block not in of_block:
                cost = durations.costs[stage][call.block]
                of_block[call.block] = _of_call(durations.blocks[call.block], cost, device, train, fused)
            ahead, back = of_block[call.block]
            again = [ahead] if train and i in here.checkpoint_calls else []
            for kind, took in chain(*(part.items() for part in (ahead, back, *again))):
                seconds[kind] += took
        of_devices.append(seconds)
    return max(of_devices, key=_sum_kind_seconds)


def _of_call(
    block: Block, cost: CallCost, device: DeviceType, train: bool, fused: bool = False
) -> tuple[Seconds, Seconds]:
    """Return the computation seconds of one call of ``block`` by kind of operator, as two dicts: for its forward and
    for its backward. ``block``: a piece of the model, such as a decoder layer.

    ``cost``: the predicted seconds of the whole call on ``device``. If they exceed the sum of the operators, the device
    waits for the host to launch operators; this time is listed as a kind of its own. ``train``: whether there is a
    backward. ``fused``: whether a compiler merges operators.
    """
    asked = asked_by(block, train, fused_kernels=fused).kernels
    found: tuple[Seconds, Seconds] = defaultdict(float), defaultdict(float)
    for kind, way, took in zip(asked.kind, asked.way, kernel_times(asked, device), strict=True):
        found[way][_WORDS.get(asked.kinds[kind], asked.kinds[kind])] += float(took)
    for seconds, whole in zip(found, (cost.forward_s, cost.backward_s), strict=True):
        seconds[_ISSUING] += max(0.0, whole - _sum_kind_seconds(seconds))
    return found


def _sum_kind_seconds(seconds: Seconds) -> float:
    return sum(seconds.values())
