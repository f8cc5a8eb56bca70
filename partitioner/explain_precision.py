"""What to know of the precision that a plan is in."""

from __future__ import annotations

from partitioner.plan import Plan
from partitioner.timing import common_precision
from partitioner.units import digits

_OTHERS = {"bf16": "fp16", "fp16": "bf16", "fp32": "tf32"}
_MUCH = 2.0  # times as fast: from here on it is told


def precision_notes(plan: Plan) -> list[str]:
    """For each kind of device that multiplies much faster in the other type of as many bits, that it does."""
    precision = plan.precision or (common_precision(plan.written) if plan.written is not None else "")
    other = _OTHERS.get(precision)
    if other is None:
        return []
    notes = []
    for kind in sorted({plan.topology.devices[device].kind for device in plan.devices}):
        device = plan.topology.types[kind]
        times = device.peak_of(other) / device.peak_of(precision)
        if times > _MUCH:
            loss = ", with losses scaled" if other == "fp16" else ""
            notes.append(
                f"{kind} multiplies {digits(times, 2)} times as fast in {other} as in {precision}: plan with "
                f'precision="{other}"{loss}, where the model can be trained or used in it'
            )
    return notes
