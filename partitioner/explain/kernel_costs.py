"""Split a microbatch's predicted time by kind of operator."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

from partitioner.cost.call.block_profile import asked_by
from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.call.roofline import kernel_times
from partitioner.passes.ir.model import Block
from partitioner.plan import Plan
from partitioner.simulate.program_time import PlanDurations
from partitioner.topology.hardware import DeviceType
from partitioner.units import format_percent

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
    """Return the kinds of operators that take the most time on the busiest stage, for example ``matrix products (61%),
    norms (20%) and reductions (8.1%)``; empty if it computes nothing."""
    durations = PlanDurations(plan)
    seconds = max((_of_stage(plan, durations, stage) for stage in range(plan.num_stages)), key=_sum_kind_seconds)
    total = _sum_kind_seconds(seconds)
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:_MOST]
    shown = [f"{kind} ({format_percent(s / total)})" for kind, s in ranked if s > _LEAST * total]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def _of_stage(plan: Plan, durations: PlanDurations, stage: int) -> Seconds:
    """Return the seconds per microbatch of ``stage`` by kind of operator, on the slowest of its devices."""
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
    """Return forward and backward seconds of one call by kind of operator. Time in which the device waits for the host
    to launch operators is a kind of its own."""
    asked = asked_by(block, train).kernels
    found: tuple[Seconds, Seconds] = defaultdict(float), defaultdict(float)
    for kind, way, took in zip(asked.kind, asked.way, kernel_times(asked, device), strict=True):
        found[way][_WORDS.get(asked.kinds[kind], asked.kinds[kind])] += float(took)
    for seconds, whole in zip(found, (cost.forward_s, cost.backward_s), strict=True):
        seconds[_ISSUING] += max(0.0, whole - _sum_kind_seconds(seconds))
    return found


def _sum_kind_seconds(seconds: Seconds) -> float:
    return sum(seconds.values())
