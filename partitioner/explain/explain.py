"""A plan as text for people: the summary in tables, and the explanation of why it is as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from partitioner.explain.tables import (
    bars,
    candidate_counts,
    candidate_table,
    collective_table,
    cut_off,
    estimate_table,
    experts,
    fate,
    figures,
    fullest_rank,
    heading,
    host_kinds,
    hosted,
    indented,
    line,
    memory_left,
    microbatches_text,
    other_batch_text,
    precision_notes,
    recomputed_text,
    rule_table,
    sequence,
    sharing_text,
    stage_table,
    types_text,
    uncovered,
    unhosted,
)
from partitioner.plan import NEAR, WITHOUT, Baseline, Plan
from partitioner.plans.figures import AXIS_NAMES, COLLECTIVE_NAMES, candidate_text, capacities
from partitioner.plans.mesh_axes import axis_text
from partitioner.plans.outline import CallGroup, Outline, group_notes, outline
from partitioner.topology.groups import stage_ranks
from partitioner.topology.hosts import BOUNDLESS
from partitioner.units import bytes_text, count_text, percent, plain, plural, ranges, seconds_text
from runtime.program.program import updated_states

_SHOWN = 3  # buffers that are named

KINDS = {
    "compute": "computation",
    "recompute": "recomputation",
    "tp_communication": "communication inside layers",
    "pp_communication": "sends between pipeline stages",
    "bubble": "pipeline bubble",
    "contention": "contention for a machine's cores",
    "reduction": "gradient reduction that is not hidden",
    "optimizer": "optimizer update",
    "offload": "transfers to and from host memory",
}
_GROUPS = {  # what limits a step -> its kinds of time
    "computation": ("compute", "optimizer"),
    "communication": ("tp_communication", "pp_communication", "reduction", "offload"),
    "recomputation": ("recompute",),
    "pipeline bubble": ("bubble",),
    "contention for a machine's cores": ("contention",),
}
MEMORY_KINDS = {
    "parameters": "parameters and buffers",
    "gradients": "gradients of parameters",
    "optimizer": "optimizer states",
    "saved": "activations saved for backward",
    "recomputed": "activations recomputed in backward",
    "working": "temporary tensors of operators",
    "flowing": "gradients of activations",
    "gathered": "whole parameters and gradients of layers in use (ZeRO)",
    "residuals": "rounding errors of compressed gradients",
    "buffers": "buffers for sends between stages",
}
_OF_INFERENCE = {
    "saved": "outputs, kept to the end of the step",
    "gathered": "whole parameters of layers in use (ZeRO)",
}
_AXIS_WORDS = {  # axes of groups that are not of the plan's mesh
    "edp": "data-parallel ranks with the same experts",
    "etp": "ranks that divide an expert",
    "dp_shard": "data-parallel ranks that share states",
    "dp_replicate": "data-parallel ranks with the same part of the states",
    "edp_shard": "ranks with the same experts that share states",
    "edp_replicate": "ranks with the same experts and the same part of the states",
}
_RESIDUE = 1e-9  # of a step: differences of sums, no time
_LOW = 0.3  # MFU: below it the kinds of operators are named that take longest
_NOTED = 0.01  # of a step: recomputation that is worth a word
_TIGHT = 0.9  # of the memory: from here on memory is said to bind


def memory_words(plan: Plan) -> dict[str, str]:
    """What kinds of memory are called; without a backward, nothing is saved for one."""
    return MEMORY_KINDS if plan.objective == "train" else {**MEMORY_KINDS, **_OF_INFERENCE}


def summary(plan: Plan) -> str:
    """The plan's figures and stages in tables, as plain text."""
    return plain(summary_parts(plan))


def explain(plan: Plan) -> str:
    """Why the plan is as it is, as plain text."""
    return plain(explain_parts(plan))


def summary_parts(plan: Plan) -> list[RenderableType]:
    """The summary for a terminal."""
    parts: list[RenderableType]
    if plan.written is None:
        parts = [
            heading(plan.model + _hosted_unasked(plan)),
            figures(plan, _shares_text(plan)),
            "",
            estimate_table(plan),
        ]
    else:
        whole = outline(plan.written)
        size = f", {count_text(whole.num_parameters)} parameters" if whole.num_parameters else ""
        stages = stage_table(plan, whole)
        parts = [heading(f"{plan.model}{size}{_hosted_unasked(plan)}"), figures(plan, _shares_text(plan)), "", stages]
    rules = rule_table(plan)
    if rules:
        parts += ["", rules]
    if notes := [*plan.notes, *precision_notes(plan)]:
        parts += ["", heading("Notes"), *_items(notes)]
    return parts


def _hosted_unasked(plan: Plan) -> str:
    """That the job fits only with host memory, which nobody asked for; empty where that is not so."""
    return f": fits only {hosted(plan)}" if plan.lacking and plan.offload else ""


def explain_parts(plan: Plan) -> list[RenderableType]:
    """The explanation for a terminal: a heading and lines for each question that a reader has."""
    whole = outline(plan.written) if plan.written is not None else None
    parts: list[RenderableType] = []
    for title, body in (
        ("Can it be run?", list(_planned_only(plan))),
        ("Does it fit?", list(_fit(plan))),
        ("What limits it?", list(_limits(plan))),
        ("Where does the time go?", _breakdown(plan)),
        ("How is the work divided?", list(_cut(plan, whole))),
        ("How is the sequence shared?", list(sequence(plan))),
        ("How are the experts spread?", list(experts(plan))),
        ("How are the parameters laid out?", list(_weights(whole)) if whole else []),
        ("What is communicated?", list(_communication(whole)) if whole else []),
        ("What would other layouts take?", list(_alternatives(plan))),
        ("How good is it?", list(_certificate(plan))),
        ("What to know", list(_notes(plan))),
    ):
        if body:
            parts += [heading(title), *body, ""]
    return parts[:-1]


def _items(lines: Sequence[str]) -> list[RenderableType]:
    return [indented(Text(f"- {line}")) for line in lines]


def _planned_only(plan: Plan) -> Iterator[RenderableType]:
    if plan.written is None:
        what = ", ".join(plan.planned_only)
        yield line(f"No: this version plans {what}, but does not execute it. The plan has estimates and no program.")


def _fit(plan: Plan) -> Iterator[RenderableType]:
    if not plan.estimate.memory:
        return
    if plan.lacking and plan.offload:
        yield line(f"Only {hosted(plan)}. Without it: {plan.lacking}.")
    rank = fullest_rank(plan)
    peak, room = plan.estimate.memory[rank], capacities(plan)[rank]
    stage = rank // (plan.world_size // plan.num_stages)
    where = f"the fullest rank ({rank}, on stage {stage})" if plan.world_size > 1 else "the one rank"
    if peak <= room:
        left, margin = memory_left(plan), plan.constraints.memory_margin
        yield line(
            f"Yes: {where} needs {bytes_text(peak)} of {bytes_text(room)}; {bytes_text(room - peak)} are left "
            f"({percent(left)})."
        )
        if left < margin:
            yield line(f"That is less than the margin of {100 * margin:g}%; no plan that leaves as much was found.")
        elif margin:
            yield line(f"Plans leave {100 * margin:g}% free, for what the estimate does not know (memory_margin).")
    elif peak <= (1 + NEAR) * room:
        more = f"{bytes_text(peak)}, {bytes_text(peak - room)} more than the {bytes_text(room)} that plans may use"
        yield line(f"Hardly: {where} needs {more}; nothing that needs less was found.")
    else:
        yield line(f"No: {where} needs {bytes_text(peak)}, {bytes_text(peak - room)} more than its {bytes_text(room)}.")
    if plan.offload:
        held = " and ".join(", ".join(host_kinds(plan)).rsplit(", ", 1))
        size = bytes_text(max((part.host for part in plan.estimate.stages), default=0))
        yield line(f"In host memory are {held}: {size} of a rank at most.")
    if "disk" in plan.offload:
        size = bytes_text(max((part.disk for part in plan.estimate.stages), default=0))
        yield line(f"The optimizer's states are on disk: {size} of a rank at most.")
    if plan.estimate.stages:
        parts = sorted(plan.estimate.stages[stage].memory.items(), key=lambda item: -item[1])
        total = max(1, sum(size for _, size in parts))
        yield line(f"Its peak consists of, on stage {stage}:" if plan.num_stages > 1 else "Its peak consists of:")
        words = memory_words(plan)
        yield bars([(words.get(kind, kind), size / total, bytes_text(size)) for kind, size in parts])


def time_shares(plan: Plan) -> list[tuple[str, float]]:
    """What the step's time goes to, in a few words each, with its share; the largest first."""
    breakdown = plan.estimate.breakdown
    total = sum(breakdown.values())
    known = {kind for kinds in _GROUPS.values() for kind in kinds}
    groups = _GROUPS | {KINDS.get(kind, kind): (kind,) for kind in breakdown if kind not in known}
    shares = {name: sum(breakdown.get(kind, 0.0) for kind in kinds) / total for name, kinds in groups.items() if total}
    return sorted(((n, share) for n, share in shares.items() if share > _RESIDUE), key=lambda item: -item[1])


def _shares_text(plan: Plan) -> str:
    """``computation 86%, communication 11%, pipeline bubble 2.2%``."""
    return ", ".join(f"{name} {percent(share)}" for name, share in time_shares(plan))


def _limits(plan: Plan) -> Iterator[RenderableType]:
    estimate = plan.estimate
    if time_shares(plan):
        yield line(f"Time: {_shares_text(plan)}.")
        computing = estimate.breakdown.get("compute", 0.0) / sum(estimate.breakdown.values())
        if computing > 0.5 and estimate.mfu < _LOW and plan.written is not None:
            from partitioner.explain.kernel_costs import dearest  # with the cost model and PyTorch, which most need not

            kinds = dearest(plan)
            yield from [line(f"Most of a microbatch's computation is in {kinds}.")] if kinds else []
    if estimate.memory:
        rank = fullest_rank(plan)
        usable = capacities(plan)[rank] * (1 - plan.constraints.memory_margin)
        share = estimate.memory[rank] / max(1, usable)
        used = f"the fullest rank uses {percent(share)} of what the margin leaves"
        again = estimate.breakdown.get("recompute", 0.0) / (sum(estimate.breakdown.values()) or 1.0)
        if again > _NOTED:
            used += f", and {percent(again)} of the step is recomputation, which saves memory"
        if share >= _TIGHT or again > _NOTED:
            yield line(
                f"Memory limits the plan: {used}. Layouts that need more are ruled out, even if they were faster."
            )
        else:
            yield line(f"Memory does not limit the plan: {used}.")
    yield from _disk_binds(plan)
    if plan.constraints.given:
        fixed = ", ".join(f"{k}={v}" for k, v in plan.constraints.given.items())
        yield line(f"Constraints that you gave: {fixed}.")


def _disk_binds(plan: Plan) -> Iterator[RenderableType]:
    """How much of the update it is to read and write what is on disk."""
    update = plan.estimate.breakdown.get("optimizer", 0.0)
    if "disk" not in plan.offload or not update:
        return
    shares = [plan.topology.host_shares[device] for device in plan.devices]
    of_stages = zip(plan.estimate.stages, stage_ranks(plan.mesh), strict=True)
    seconds = max(2 * part.disk / (shares[r] or BOUNDLESS).disk_bandwidth for part, ranks in of_stages for r in ranks)
    moved = f"reading and writing its states on disk takes {seconds_text(seconds)} or more"
    binds = "Disk" if seconds >= _TIGHT * update else "The disk does not limit the plan"
    yield line(f"{binds}: the optimizer's update takes {seconds_text(update)}; {moved}.")


def without_residue(breakdown: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind, without what is left of others' rounding where there is none of a kind."""
    total = sum(breakdown.values())
    return {kind: seconds for kind, seconds in breakdown.items() if seconds > _RESIDUE * total}


def _breakdown(plan: Plan) -> list[RenderableType]:
    kinds = sorted(without_residue(plan.estimate.breakdown).items(), key=lambda item: -item[1])
    total = sum(s for _, s in kinds)
    if not total:
        return []
    taken, mfu = seconds_text(plan.estimate.step_time), percent(plan.estimate.mfu)
    words = f"One step takes {taken} on the slowest rank, at {mfu} of the devices' peak (MFU):"
    return [line(words), bars([(KINDS.get(k, k), s / total, seconds_text(s)) for k, s in kinds])]


def _cut(plan: Plan, whole: Outline | None) -> Iterator[RenderableType]:
    for axis, size in plan.mesh.items():
        if size > 1:
            yield line(f"{AXIS_NAMES.get(axis, axis)} parallelism ({axis}) over {plural(size, 'rank')}")
    if links := axis_text(plan):
        yield line(f"links: {links}")
    microbatches = plural(plan.num_microbatches, "microbatch", "microbatches")
    schedule = f" under the {plan.schedule} schedule" if plan.num_stages > 1 else ""
    if plan.data_shares:
        microbatches = f"{sum(plan.data_shares)} microbatches, {microbatches_text(plan)},"
    yield line(f"{microbatches} per step{schedule}")
    told = (
        ("types", types_text(plan)),
        ("state sharding", sharing_text(plan)),
        ("recomputed in backward", recomputed_text(plan)),
    )
    yield from (line(f"{name}: {text}") for name, text in told if text)
    for number, part in enumerate(plan.estimate.stages if whole is None else ()):
        again = f", {part.again} in backward" if part.again else ""
        yield line(f"stage {number}: {plural(part.num_calls, 'call')}, {part.first} to {part.last}{again}")
    for stage in whole.stages if whole is not None else ():
        calls = ", ".join(_calls_text(g) for g in stage.groups)
        yield line(f"stage {stage.index}: {calls}")
    changed = updated_states(plan.program) if whole is not None else []
    if changed:
        names = ", ".join(changed[:_SHOWN]) + (", ..." if len(changed) > _SHOWN else "")
        yield line(f"at the end of a step {plural(len(changed), 'buffer')} that forward changes: {names}")


def _calls_text(group: CallGroup) -> str:
    times = f"{group.count} × " if group.count > 1 else ""
    name = " + ".join(group.blocks)
    about = [*([group.paths] if group.paths not in ("", name) else []), *group_notes(group)]
    return f"{times}{name}" + (f" ({', '.join(about)})" if about else "")


def _weights(whole: Outline) -> Iterator[RenderableType]:
    """Per block type, the weights by layout; a type that occurs on several stages is told once."""
    seen: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for stage in whole.stages:
        for group in stage.groups:
            ways = seen.setdefault(group.blocks, {})
            for weight in group.weights:
                names = ways.setdefault(f"{weight.how} ({weight.layout})", [])
                name = weight.name.removesuffix(".weight")
                if name not in names:
                    names.append(name)
    for blocks, ways in seen.items():
        if ways:
            yield line(f"{' + '.join(blocks)}:")
            for way, names in ways.items():
                yield indented(indented(Text(f"{way}: {', '.join(names)}")))


def _communication(whole: Outline) -> Iterator[RenderableType]:
    calls = collective_table(whole)
    if calls:
        yield from (calls, "")
    hand_overs: dict[str, list[str]] = {}
    for link in whole.links:
        what = "activations" if link.direction == "forward" else "gradients"
        text = f"{bytes_text(link.num_bytes)} of {what} per microbatch"
        hand_overs.setdefault(text, []).append(f"{link.source}→{link.target}")
    for text, pairs in hand_overs.items():
        yield line(f"{'stages' if len(pairs) > 1 else 'stage'} {', '.join(pairs)}: {text}")
    reductions: dict[str, list[int]] = {}
    for stage in whole.stages:
        for moved in stage.reductions:
            size = f"{bytes_text(moved.num_bytes)} of {moved.what} over {moved.axis} in "
            name, buckets = COLLECTIVE_NAMES.get(moved.op, moved.op), moved.buckets
            if moved.count > buckets:  # again for every microbatch, or forward and backward
                size += f"{plural(moved.count, 'transfer')} of {plural(buckets, 'bucket')}, in all per step"
            else:
                size += f"{plural(buckets, 'bucket')}, once per step"
            reductions.setdefault(f"{name} of {size}", []).append(stage.index)
    for text, stages in reductions.items():
        yield line(f"{'stages' if len(stages) > 1 else 'stage'} {ranges(stages)}: {text}")
    axes = {axis for stage in whole.stages for moved in stage.reductions for axis in moved.axis.split("×")}
    yield from (line(f"{axis}: {words}") for axis, words in _AXIS_WORDS.items() if axis in axes)
    for tie in whole.ties:
        places = sorted({p[0] for p in tie.places})
        if len(places) > 1:
            names = " = ".join([tie.state, *tie.aliases])
            yield line(f"stages {ranges(places)}: {bytes_text(tie.num_bytes)} of gradients of the tied weight {names}")


def _alternatives(plan: Plan) -> Iterator[RenderableType]:
    candidates = plan.certificate.candidates
    if not candidates:
        return
    yield line(candidate_counts(plan.certificate) + ".")
    chosen = plan.certificate.objective
    yield from (line(_baseline(b, chosen, unhosted(plan))) for b in plan.certificate.baselines if not b.global_batch)
    if other := other_batch_text(plan):
        yield line(f"A global batch {other}.")
    if any(b.name.startswith(WITHOUT) for b in plan.certificate.baselines):
        yield line('A topology without devices: topology.without("node1/3", ...), or --topology "... without node1/3".')
    yield candidate_table(plan)
    yield line(
        "zero: ZeRO's stage; dp_shard: ranks that share states; v: virtual stages of a rank; at least: a lower bound "
        "on the step time; memory: of the fullest rank"
    )


def _baseline(baseline: Baseline, chosen: float, unhosted: str) -> str:
    if baseline.candidate is None:
        return f"{baseline.name}: {baseline.excluded}"
    excluded = f"; {baseline.excluded}" if baseline.excluded else ""
    became = fate(baseline.candidate, chosen, "" if baseline.offload else unhosted)
    layout = ", ".join(filter(None, (candidate_text(baseline.candidate), hosted(baseline))))
    return f"{baseline.name} ({layout}): {became}{excluded}"


def _certificate(plan: Plan) -> Iterator[RenderableType]:
    c, outside = plan.certificate, uncovered(plan)
    covered = "that the proof covers " if outside else ""
    yield line(f"The cost model estimates {seconds_text(c.objective)} for a step of this plan.")
    if c.gap <= 1e-6:
        yield line(f"It is proven optimal under the cost model: no plan {covered}takes less.")
    else:
        least = f"a plan {covered}takes {seconds_text(c.bound)} or more"
        yield line(f"It is not proven optimal: {least}, so a better plan could save {percent(c.gap)} at most.")
    if c.cut_off is not None:
        yield line(f"The search was {cut_off(c)}: with more time it may find a better plan.")
    elif c.num_open:
        were = "layout was" if c.num_open == 1 else "layouts were"
        nearest = min((row.bound for row in c.candidates if c.is_open(row)), default=c.bound)
        most = percent((c.objective - nearest) / c.objective)
        yield line(f"{c.num_open} {were} not worked out and may be faster, by {most} at most.")
    yield from map(line, outside)
    if plan.estimate.simulated is not None:
        simulated, step = plan.estimate.simulated, plan.estimate.step_time
        off = f"{abs(simulated / step - 1):.1%} {'above' if simulated > step else 'below'} that"
        yield line(f"The simulation of the program ends at {seconds_text(simulated)}, {off}.")
    over = [axis for axis in ("cp", "tp") if plan.mesh.get(axis, 1) > 1]
    if over:  # the other axes divide samples, stages and experts, all of whose work is divided
        share = percent(plan.shares.matmul_sharded)
        yield line(f"{share} of the matrix-multiply work is divided over {' and '.join(over)}.")


def _notes(plan: Plan) -> Iterator[RenderableType]:
    for name, share in sorted(plan.shares.without_rule.items(), key=lambda item: -item[1]):
        yield line(f"- {name} has no sharding rule, so every rank runs all of it: {percent(share)} of the work")
    yield from _items([*plan.notes, *precision_notes(plan)])
