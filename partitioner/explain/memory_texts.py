"""Texts on the memory of a plan: whether the estimate leaves enough room, what is usable, and what is in host memory or
on disk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from partitioner.cost import MEMORY_ERRORS
from partitioner.plan import Baseline, Plan
from partitioner.plans.figures import device_memory, fullest_rank, memory_text
from partitioner.topology.groups import stage_ranks
from partitioner.topology.hosts import can_offload
from partitioner.units import bytes_text, format_percent

MEMORY_KINDS = {
    "parameters": "parameters and buffers",
    "gradients": "gradients of parameters",
    "optimizer": "optimizer states",
    "saved": "activations saved for backward",
    "recomputed": "activations recomputed in backward",
    "working": "temporary tensors of operators",
    "flowing": "gradients of activations",
    "gathered": "unsharded parameters and gradients of layers in use (ZeRO)",
    "residuals": "rounding errors of compressed gradients",
    "buffers": "buffers for sends between stages",
}
_OF_INFERENCE = {
    "saved": "outputs, kept to the end of the step",
    "gathered": "whole parameters of layers in use (ZeRO)",
}
_OF_ZERO_1 = {  # a rank holds gradients summed over its microbatches, and its piece of their sum over all ranks
    "gradients": "gradients of parameters, and the rank's piece of their sum (ZeRO 1)",
    "gathered": "parameters and gradients that ranks are exchanging (ZeRO)",
}
_OF_ZERO_2_AND_3 = {  # a rank holds its pieces of gradient sums from the first backward of a step on
    "gathered": "the rank's pieces of gradient sums, and unsharded parameters and gradients of layers in use (ZeRO)",
    "gradients": "gradients of parameters that ZeRO does not shard",
}


def memory_words(plan: Plan) -> dict[str, str]:
    """Return the names under which kinds of memory are shown to users: kind -> text. The kinds have names such as
    ``parameters`` or ``saved`` (activations kept for backward). The texts depend on whether ``plan`` is for training,
    and on its ZeRO stage.
    """
    words = MEMORY_KINDS if plan.objective == "train" else {**MEMORY_KINDS, **_OF_INFERENCE}
    if plan.objective == "train" and plan.chosen.zero >= 2:
        return {**words, **_OF_ZERO_2_AND_3}
    return {**words, **_OF_ZERO_1} if plan.chosen.zero == 1 else words


def is_tight(plan: Plan) -> bool:
    """Return whether an error of the memory estimate of usual size can exceed the memory of a device: whether the peak
    of the fullest rank of ``plan``, enlarged by the mean error of estimated peaks, is more than the device has without
    the margin. ``False`` if the plan has no memory estimate, or if it does not fit."""
    if not plan.estimate.memory:
        return False
    rank = fullest_rank(plan)
    parts = device_memory(plan, rank)
    peak = plan.estimate.memory[rank]
    return peak <= parts.usable and peak * (1 + MEMORY_ERRORS["known"][0]) > parts.usable + parts.margin


def fit_text(plan: Plan) -> str:
    """Return the peak memory of the fullest rank of ``plan``, its usable memory and their ratio as text, such as ``71.9
    GiB of 73.1 GiB usable (98%), tight``. The text says ``tight`` if an error of the estimate of usual size can exceed
    the memory of the device."""
    return memory_text(plan) + (", tight" if is_tight(plan) else "")


def describe_tightness(plan: Plan) -> str:
    """Return sentences that say why the memory of ``plan`` is tight and what to do; empty if it is not tight."""
    if not is_tight(plan):
        return ""
    rank = fullest_rank(plan)
    parts, error = device_memory(plan, rank), MEMORY_ERRORS["known"][0]
    peak, room = plan.estimate.memory[rank], parts.usable + parts.margin
    # the least margin, in whole percent, with which a peak that fills the usable memory still fits after the error
    margin = math.ceil(100 * room / max(1, parts.device - parts.reserved) * error / (1 + error)) / 100
    asks = f"memory_margin={margin:g} or more makes the search leave enough room for the mean error"
    larger = margin > (plan.constraints.memory_margin or 0.0)
    frees = ", ".join(_list_memory_savers(plan))
    return (
        f"Tight: with the mean error of {format_percent(error)} the peak would be {bytes_text(peak * (1 + error))}, "
        f"and the device has {bytes_text(room)} without the margin. "
        + (f"{asks}. " if larger else "")
        + f"Memory is freed by {frees}."
    )


def _list_memory_savers(plan: Plan) -> Iterator[str]:
    """Yield the choices that can free device memory of ``plan`` and that it has not made yet, such as a smaller
    microbatch; more devices always come last."""
    train, mesh, chosen = plan.objective == "train", plan.mesh, plan.chosen
    if chosen.microbatch_size > 1:
        yield "a smaller microbatch_size"
    if train and any(stage.recomputed < stage.num_calls for stage in plan.estimate.stages):
        yield "more recomputation (recompute)"
    if train and chosen.zero < 3 and mesh.get("dp", 1) * mesh.get("cp", 1) > 1:
        yield "a higher ZeRO stage (zero)"
    if train and can_offload(plan.topology) and "optimizer" not in plan.offload:
        yield 'optimizer states in host memory (offload="optimizer")'
    yield "more devices"


def describe_lack(plan: Plan) -> str:
    """Return a clause on the shortage of device memory for which the search of ``plan`` chose offload. It is the
    shortage of the layout that lacks the fewest bytes of all, which need not be that of the plan."""
    return f"even the layout that lacks the fewest bytes of all does not fit: {plan.lacking}"


def describe_memory_error() -> str:
    """Return a sentence on the mean error of estimated memory in measured runs, with which the reader can judge the
    margin."""
    (known, num_known), (unseen, num_unseen) = MEMORY_ERRORS["known"], MEMORY_ERRORS["unseen"]
    return (
        f"Larger errors occur: estimated peaks were off by {format_percent(known)} on average in {num_known:,} "
        f"published runs of other frameworks, and by {format_percent(unseen)} in {num_unseen:,} others, which were not "
        "used to set constants of the model."
    )


def describe_other_rooms(plan: Plan) -> str:
    """Return a sentence that says why other layouts have another usable memory than ``plan``; empty if no text on the
    plan gives the usable memory of another layout, or if groups take no memory."""
    told = [plan.lacking if plan.offload else ""]
    told += [baseline.candidate.reason for baseline in plan.certificate.baselines if baseline.candidate is not None]
    told += [candidate.reason for candidate in plan.certificate.candidates]
    if not plan.estimate.memory or not any("usable" in text for text in told):
        return ""
    groups = device_memory(plan, fullest_rank(plan)).groups
    if not groups:
        return ""
    return (
        "Other layouts have more or less usable memory, because each mesh axis with several ranks adds communication "
        "groups, whose buffers are on the device."
    )


def host_text(plan: Plan) -> str:
    """Return a text on the data that ranks of ``plan`` keep in host memory instead of device memory: the kinds of data,
    the bytes of the rank with the most, and the bytes and the memory of the fullest host, such as ``optimizer states:
    152 GiB for the rank with the most, 1.19 TiB of 2 TiB in all on the host``. Empty without such offload.
    """
    if not plan.offload:
        return ""
    most = max((stage.host for stage in plan.estimate.stages), default=0)
    whose = " for the rank with the most" if plan.world_size > 1 else ""
    kinds = " and ".join(", ".join(_name_host_data(plan)).rsplit(", ", 1))
    return f"{kinds}: {bytes_text(most)}{whose}{_describe_fullest_host(plan)}"


def _name_host_data(plan: Plan) -> list[str]:
    """Return names for the data that ``plan`` keeps in host memory, such as ``optimizer states``."""
    return ["optimizer states" if kind == "optimizer" else kind for kind in host_kinds(plan)]


def _describe_fullest_host(plan: Plan) -> str:
    """Return a clause with the bytes that the ranks of ``plan`` on the fullest host keep there, and with the memory of
    this host; empty if no host is described in the topology."""
    totals = Counter[int]()
    for stage, ranks in zip(plan.estimate.stages, stage_ranks(plan.mesh), strict=False):
        for rank in ranks:
            totals[plan.topology.devices[plan.devices[rank]].node] += stage.host
    hosts = {node: host for node in totals if (host := plan.topology.host(node)) is not None}
    if not hosts:
        return ""
    node = max(hosts, key=lambda node: totals[node] / max(1.0, hosts[node].memory))
    which = "on the fullest of the hosts" if len(hosts) > 1 else "on the host"
    return f", {bytes_text(totals[node])} of {bytes_text(hosts[node].memory)} in all {which}"


def host_kinds(plan: Plan | Baseline) -> list[str]:
    """Return names for the kinds of data that ``plan`` keeps in host memory, such as ``activations``. If the optimizer
    runs on the host and its states are on disk, ``optimizer`` is replaced by the data that the host still keeps: the
    optimizer's parameters and gradients.
    """
    kinds = [kind for kind in plan.offload if kind != "disk"]
    steps = "the optimizer's parameters and gradients"
    return [steps if kind == "optimizer" and "disk" in plan.offload else kind for kind in kinds]


def format_offload(plan: Plan | Baseline) -> str:
    """Return a phrase for the offload of ``plan``, such as ``with optimizer and activations in host memory``; empty
    without offload.
    """
    disk = ", its states on disk" if "disk" in plan.offload else ""
    return f"with {' and '.join(host_kinds(plan))} in host memory{disk}" if plan.offload else ""


def describe_tried_offload(plan: Plan) -> str:
    """Return a phrase on the offload with which the search of ``plan`` tried layouts, such as ``without offload to host
    memory``. It is for a message on a layout that does not fit and might fit with more offload. Empty if no more
    offload is possible, or if the user fixed the offload.
    """
    if plan.constraints.offload is not None or "parameters" in plan.offload or not can_offload(plan.topology):
        return ""
    if not plan.offload:
        return "without offload to host memory"
    return f"with only {' and '.join(host_kinds(plan))} in host memory"


def disk_text(plan: Plan) -> str:
    """Return a text with the bytes of optimizer states that a rank of ``plan`` keeps on disk, for the rank that keeps
    most there; empty if they are not on disk.
    """
    most = max((stage.disk for stage in plan.estimate.stages), default=0)
    return f"optimizer states: {bytes_text(most)} per rank" if "disk" in plan.offload else ""


def usable_memory_text(plan: Plan) -> str:
    """Return a text that derives the usable memory of the fullest rank of ``plan`` from its device's memory, for
    example ``79.6 GiB of the device, less 1.4 GiB reserved and 3.91 GiB of margin (memory_margin 5%)``; empty if the
    plan has no memory estimate.
    """
    if not plan.estimate.memory:
        return ""
    parts, margin = device_memory(plan, fullest_rank(plan)), plan.constraints.memory_margin
    less = [
        (parts.reserved, "reserved"),
        (parts.groups, "for communication groups"),
        (parts.margin, f"of margin (memory_margin {100 * margin:g}%)"),
    ]
    words = [f"{bytes_text(size)} {what}" for size, what in less if size]
    told = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    asked = "" if margin else "; no margin was asked for"
    return f"{bytes_text(parts.device)} of the device" + (f", less {told}" if told else "") + asked
