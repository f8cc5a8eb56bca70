"""Split a microbatch's predicted time by kind of operator, and communication inside layers by mesh axis."""

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
from partitioner.plans.outline import Outline
from partitioner.simulate.program_time import PlanDurations
from partitioner.topology.hardware import DeviceType
from partitioner.units import format_percent, seconds_text

Seconds = dict[str, float]  # by kind, in words

_MOST, _LEAST = 3, 0.01  # kinds that are named, and the share below which none is

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


def format_costliest_kinds(plan: Plan) -> str:
    """Return the kinds of operators that take the most time on the stage with the longest computation of ``plan``, with
    their fractions of it, for example ``matrix products (61%), norms (20%) and reductions (8.1%)``. At most three are
    listed.
    """
    durations = PlanDurations(plan)
    seconds = max((_of_stage(plan, durations, stage) for stage in range(plan.num_stages)), key=_sum_kind_seconds)
    total = _sum_kind_seconds(seconds)
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:_MOST]
    shown = [f"{kind} ({format_percent(s / total)})" for kind, s in ranked if s > _LEAST * total]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def format_layer_communication(plan: Plan, whole: Outline) -> str:
    """Return the seconds per step of communication inside layers by purpose, on the busiest stage of ``plan``, for
    example ``tensor parallelism (tp) 2.8 s, experts (ep) 630 ms``; empty if there is none. Time that overlaps
    computation is included in full. ``whole``: the overview of the plan's program.
    """
    durations, program = PlanDurations(plan), plan.program
    busy = [stage.forward_s + stage.backward_s for stage in plan.estimate.stages]
    stage = busy.index(max(busy)) if busy else 0
    seconds: Seconds = defaultdict(float)
    calls = Counter(call.block for call in program.stages[stage].calls if not call.prologue)
    for name, count in calls.items():
        for purpose, took in _list_exchange_seconds(durations, stage, name):
            seconds[purpose] += program.num_microbatches * count * took
    for moved in whole.stages[stage].reductions if program.zero == 3 else ():
        op = cast("Any", moved.op)
        if moved.op in ("all_gather", "reduce_scatter"):
            each = durations.share(op, tuple(moved.axis.split("×")), moved.num_bytes // moved.count, stage)
            seconds[f"{moved.what} of ZeRO-3 ({moved.axis})"] += moved.count * each
    found = sorted(((took, purpose) for purpose, took in seconds.items() if took), reverse=True)
    return ", ".join(f"{purpose} {seconds_text(took)}" for took, purpose in found)


def _list_exchange_seconds(durations: PlanDurations, stage: int, name: str) -> Iterator[tuple[str, float]]:
    """Yield pairs (purpose, seconds) for the communication in one call of a block, such as ``tensor parallelism (tp)``.
    ``durations``: the cost model's predictions for the plan. ``stage``: index of the stage that makes the call.
    ``name``: name of the block.
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
    here, of_devices = plan.program.stages[stage], []
    for kind, speed in {(seat.kind, seat.speed) for seat in durations.machine.seats[stage]}:
        device = plan.topology.paced_type(kind, speed)
        of_block: dict[str, tuple[Seconds, Seconds]] = {}
        seconds: Seconds = defaultdict(float)
        for i, call in enumerate(here.calls):
            if call.prologue:
                continue
            if call.block not in of_block:
                cost = durations.costs[stage][call.block]
                of_block[call.block] = _of_call(durations.blocks[call.block], cost, device, train)
            ahead, back = of_block[call.block]
            again = [ahead] if train and i in here.checkpoint_calls else []
            for kind, took in chain(*(part.items() for part in (ahead, back, *again))):
                seconds[kind] += took
        of_devices.append(seconds)
    return max(of_devices, key=_sum_kind_seconds)


def _of_call(block: Block, cost: CallCost, device: DeviceType, train: bool) -> tuple[Seconds, Seconds]:
    """Return two dicts, kind of operator -> seconds, for the forward and the backward of one call of ``block``.
    ``cost``: the predicted seconds of the whole call on ``device``. What exceeds the sum of the operators is time in
    which the device waits for the host to launch them, listed as a kind of its own. ``train``: whether there is a
    backward.
    """
    asked = asked_by(block, train).kernels
    found: tuple[Seconds, Seconds] = defaultdict(float), defaultdict(float)
    for kind, way, took in zip(asked.kind, asked.way, kernel_times(asked, device), strict=True):
        found[way][_WORDS.get(asked.kinds[kind], asked.kinds[kind])] += float(took)
    for seconds, whole in zip(found, (cost.forward_s, cost.backward_s), strict=True):
        seconds[_ISSUING] += max(0.0, whole - _sum_kind_seconds(seconds))
    return found


def _sum_kind_seconds(seconds: Seconds) -> float:
    return sum(seconds.values())
