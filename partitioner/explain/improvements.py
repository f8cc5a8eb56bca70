"""Say what would make the step of a plan faster, the largest gain first, for ``explain_parts`` in ``explain.py``.

There are two kinds of sentences. Some name a plan that the search has found and that the user can ask for, such as one
without the constraints or with optimizer states in host memory; their gains are those of this plan. The others name a
part of the step time, such as recomputation, and what shortens it; their gains are upper limits, reached only if the
whole part vanishes. Everything is read from the plan: nothing is planned again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from partitioner.explain.proof import find_lowest_open_bound
from partitioner.explain.tables import (
    find_excluded_baseline,
    find_fewer_devices,
    find_offload_alternative,
    find_other_batch,
    per_sample_text,
    read_baseline_seconds,
)
from partitioner.plan import Baseline, Plan
from partitioner.plans.figures import candidate_text
from partitioner.simulate.weight_precision import common_precision
from partitioner.units import format_percent, seconds_text

_FREED = 0.02  # fraction of a rank's memory: optimizer states that take less are not worth moving to host memory
_NOTED = 0.01  # fraction of a step: smaller gains are not mentioned
_LESS_PRECISE = {"fp32": "bf16", "tf32": "bf16", "bf16": "fp8", "fp16": "fp8"}  # precision -> the next faster one


class Improvement(NamedTuple):
    """One way to make a step faster. ``gain``: the largest fraction of the step time that it saves. ``text``: a
    sentence."""

    gain: float
    text: str


def list_improvements(plan: Plan) -> list[str]:
    """Return sentences on what would make the step of ``plan`` faster, the largest gain first. Gains of less than a
    hundredth of the step are left out.
    """
    if not plan.certificate.objective:
        return []
    found = [*_list_found_plans(plan), *_list_upper_limits(plan)]
    ranked = sorted((one for one in found if one.gain >= _NOTED), key=lambda one: -one.gain)
    return [one.text for one in ranked]


def _list_found_plans(plan: Plan) -> Iterator[Improvement]:
    """Yield the faster plans that the search of ``plan`` has found: without the user's constraints, with optimizer
    states in host memory, on fewer devices, and with another global batch.
    """
    step = plan.certificate.objective
    hosted = find_offload_alternative(plan)
    asked = f'With offload="{"+".join(hosted.offload)}": ' if hosted is not None else ""
    others = (
        ("Without your constraints: ", find_excluded_baseline(plan)),
        (asked, hosted),
        ("", find_fewer_devices(plan)),
    )
    for start, baseline in others:
        if baseline is not None:
            gain = 1 - read_baseline_seconds(baseline) / step
            yield Improvement(gain, f"{start}{_describe_baseline(baseline)}, {format_percent(gain)} less.")
    if (other := find_other_batch(plan)) is not None:
        seconds = read_baseline_seconds(other)
        taken = per_sample_text(plan, other.global_batch, seconds)
        gain = 1 - seconds / step * plan.global_batch / other.global_batch
        yield Improvement(gain, f"With a global batch of {other.global_batch:,}: a step takes {taken}.")


def _describe_baseline(baseline: Baseline) -> str:
    """Return the name, layout and step time of ``baseline``, a layout that is compared with the plan, as text, such as
    ``ZeRO-3 (dp 16, zero 3) takes 42.6 s``.
    """
    layout = f" ({candidate_text(baseline.candidate)})" if baseline.candidate is not None else ""
    return f"{baseline.name}{layout} takes {seconds_text(read_baseline_seconds(baseline))}"


def _list_upper_limits(plan: Plan) -> Iterator[Improvement]:
    """Yield the parts of the step of ``plan`` that could be shorter, each with a text on what shortens it. The gain
    assumes that the whole part vanishes."""
    total = sum(plan.estimate.breakdown.values())
    if not total:
        return
    shares = {kind: seconds / total for kind, seconds in plan.estimate.breakdown.items()}
    given = plan.constraints.given
    axes = [axis for axis in ("tp", "cp") if plan.mesh.get(axis, 1) > 1 and axis not in given]
    lowers = plan.mesh.get("ep", 1) == 1 and plan.chosen.zero == 3 and "zero" not in given
    layers = f"fewer ranks of {' or '.join(axes)} or " if axes else "a lower ZeRO stage or " if lowers else ""
    parts = {
        "tp_communication": f"Less communication inside layers, by {layers}faster links",
        "reduction": "Less exposed gradient reduction per sample, by a larger global batch or faster links",
        "recompute": _describe_less_recomputation(plan),
        "bubble": "Fewer waits for other pipeline stages per sample, by a larger global batch",
        "offload": "Fewer transfers to host memory, by more devices",
        "optimizer": _describe_shorter_update(plan),
    }
    for kind, words in parts.items():
        share = shares.get(kind, 0.0)
        yield Improvement(share, f"{words}: at most {format_percent(share)} less.")
    yield from _compare_precisions(plan, shares.get("compute", 0.0) + shares.get("recompute", 0.0))
    certificate, gaps = plan.certificate, {"Another plan that the proof covers": plan.certificate.gap}
    if certificate.covered_bound is not None:  # the proof does not cover the plan's schedule
        bounds = {"with this layout": plan.chosen.bound, "that the proof covers": certificate.covered_bound}
        gaps = {f"Another plan {which}": 1 - bound / certificate.objective for which, bound in bounds.items()}
    if (row := find_lowest_open_bound(certificate)) is not None:
        gaps[f"Another plan of the layout {candidate_text(row)} ({row.schedule}), which the proof does not cover"] = (
            1 - row.bound / certificate.objective
        )
    for other, gap in gaps.items():
        yield Improvement(gap, f"{other}: at most {format_percent(gap)} less, by the lower bound.")


def _describe_shorter_update(plan: Plan) -> str:
    """Return what would make the optimizer update of ``plan`` shorter: sharding of the states, if ranks hold the same
    ones, or else more devices, on each of which there are fewer states."""
    dp, cp = plan.mesh.get("dp", 1), plan.mesh.get("cp", 1)
    sharded = (plan.chosen.dp_shard or dp) * cp if plan.chosen.zero else 1
    where = " on the host" if "optimizer" in plan.offload else ""
    if sharded < dp * cp:
        how = "a wider dp_shard" if plan.chosen.zero else "zero=1"
        return f"A shorter optimizer update{where}, by states that are sharded over more ranks ({how})"
    return f"A shorter optimizer update{where}, by more devices, each with fewer of the states"


def _describe_less_recomputation(plan: Plan) -> str:
    """Return what would make ``plan`` recompute less: without the user's constraint, or with more memory. Host memory
    is not named if a search with optimizer states there found no faster plan, or if these states are small."""
    asked = plan.constraints.given.get("recompute")
    if asked is not None:
        return f"No recomputation, without recompute={asked} and with enough memory"
    tried = [b for b in plan.certificate.baselines if b.offload and not plan.offload]
    fruitless = any(b.candidate is None for b in tried)
    held = [stage.memory.get("optimizer", 0) / max(1, sum(stage.memory.values())) for stage in plan.estimate.stages]
    frees = not fruitless and max(held, default=0.0) >= _FREED
    hosts = " or optimizer states in host memory" if frees else ""
    return f"No recomputation, by more memory for each rank (more devices{hosts})"


def _compare_precisions(plan: Plan, computed: float) -> Iterator[Improvement]:
    """Yield the next faster precision, if all devices of ``plan`` have a higher peak in it. ``computed``: the fraction
    of the step that is computation or recomputation. The gain assumes that all of this fraction consists of matrix
    products at the peak rate of the devices."""
    precision = plan.precision or (common_precision(plan.written) if plan.written is not None else "")
    faster = _LESS_PRECISE.get(precision or "")
    if faster is None or plan.written is None:  # a framework that is predicted has its own precisions
        return
    types = [plan.topology.types[kind] for kind in {plan.topology.devices[device].kind for device in plan.devices}]
    if any(faster not in kind.peak for kind in types):
        return
    gain = computed * (1 - max(kind.peak_of(str(precision)) / kind.peak[faster] for kind in types))
    yield Improvement(
        gain,
        f'With precision="{faster}": at most {format_percent(gain)} less, if all computation were matrix products. '
        "It changes rounding.",
    )


__all__ = ["Improvement", "list_improvements"]
