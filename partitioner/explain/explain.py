"""A plan as text for people: its summary as tables, and the reasons for its choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from partitioner.cost import MEAN_ERRORS
from partitioner.explain.improvements import list_improvements
from partitioner.explain.memory_texts import (
    describe_lack,
    describe_memory_error,
    describe_other_rooms,
    describe_tightness,
    describe_tried_offload,
    disk_text,
    format_offload,
    host_text,
    is_tight,
    memory_words,
    usable_memory_text,
)
from partitioner.explain.proof import explain_proof, list_assumptions, list_uncovered_choices
from partitioner.explain.stage_layers import list_stage_lines
from partitioner.explain.tables import (
    baseline_text,
    build_bar_chart,
    build_figure_grid,
    candidate_counts,
    candidate_table,
    collective_table,
    cut_off,
    describe_outcome,
    describe_tried_rows,
    describe_uncovered_rows,
    divided_work_text,
    estimate_table,
    explain_expert_axis,
    explain_sequence_axis,
    format_heading,
    format_text_line,
    indent_part,
    microbatches_text,
    other_batch_text,
    partly_recomputed_text,
    peak_rate_text,
    precision_notes,
    rule_table,
    sharing_text,
    stage_table,
    types_text,
)
from partitioner.explain.time_parts import KINDS, format_time_changes, time_shares, without_residue
from partitioner.plan import LAYOUT_MEANINGS, NEAR, WITHOUT, Baseline, Candidate, Plan
from partitioner.plans.figures import (
    AXIS_NAMES,
    COLLECTIVE_NAMES,
    candidate_text,
    device_memory,
    fullest_rank,
    list_usable_bytes,
    memory_text,
    schedule_text,
    share_of_usable,
    waiting_shares,
)
from partitioner.plans.mesh_axes import axis_text, devices_text
from partitioner.plans.outline import Outline, describe_block, outline_program
from partitioner.runtime.family.data import BatchPadding
from partitioner.runtime.program.program import Program, list_updated_states
from partitioner.topology.groups import stage_ranks
from partitioner.topology.hosts import BOUNDLESS
from partitioner.units import (
    bytes_text,
    count_text,
    format_percent,
    format_plain_text,
    format_plural,
    format_ranges,
    list_distinct_seconds_texts,
    seconds_text,
)

_SHOWN = 3  # buffers that a text names

_AXIS_WORDS = {  # axes of groups that are not axes of the plan's mesh
    "edp": "data-parallel ranks with the same experts",
    "etp": "ranks that divide an expert",
    "dp_shard": "data-parallel ranks that share states",
    "dp_replicate": "data-parallel ranks with the same part of the states",
    "edp_shard": "ranks with the same experts that share states",
    "edp_replicate": "ranks with the same experts and the same part of the states",
}
_NOTED = 0.01  # fraction of a step: recomputation that takes less is not mentioned
_MOST_KINDS, _LEAST_SHARE = 3, 0.01  # how many kinds of operators are named, and the least share of one that is
_MOST_PAIRS = 8  # pairs of stages that a text lists
_TIGHT = 0.9  # fraction of the usable memory from which memory is said to limit the plan


def format_summary(plan: Plan) -> str:
    """Return a summary of ``plan`` as plain text: a table of its main numbers (such as step time and peak memory) and a
    table of its pipeline stages.
    """
    return format_plain_text(summary_parts(plan))


def format_explanation(plan: Plan) -> str:
    """Return the explanation of the choices of ``plan`` as plain text. For each of several questions, such as "Does it
    fit?" and "What limits it?", there are a heading and lines that answer it.
    """
    return format_plain_text(explain_parts(plan))


def summary_parts(plan: Plan) -> list[RenderableType]:
    """Return the summary of ``plan`` as texts and tables of the library rich, to print on a terminal in this order."""
    parts: list[RenderableType]
    if plan.written is None:
        parts = [
            format_heading(plan.model + _describe_fit(plan)),
            build_figure_grid(plan, _shares_text(plan)),
            "",
            estimate_table(plan),
        ]
    else:
        whole = outline_program(plan.written)
        size = f", {count_text(whole.num_parameters)} parameters" if whole.num_parameters else ""
        stages = stage_table(plan, whole)
        parts = [
            format_heading(f"{plan.model}{size}{_describe_fit(plan)}"),
            build_figure_grid(plan, _shares_text(plan)),
            "",
            stages,
        ]
    if plan.further:
        parts += ["", format_heading("Programs"), *_format_items([*_describe_programs(plan)])]
    rules = rule_table(plan)
    if rules:
        parts += ["", rules]
    if notes := [*plan.notes, *precision_notes(plan)]:
        parts += ["", format_heading("Notes"), *_format_items(notes)]
    return parts


def _describe_programs(plan: Plan) -> Iterator[str]:
    """Yield one line for each program of ``plan``: its name, batch shape, seconds and memory. A plan has several
    programs if batches have different shapes, or for evaluation. The first line is for the main program, which decides
    how parameters and optimizer states are sharded.
    """
    most = max(plan.estimate.memory)
    first = f"{seconds_text(plan.estimate.step_time)}, {bytes_text(most)} on the fullest rank"
    yield f"step: {_describe_shape(plan.padding)}{first}; the layout is that of this program"
    for name, further in plan.further.items():
        what = f"{seconds_text(further.seconds)}, {bytes_text(further.memory)}"
        yield f"{name}: {_describe_shape(further.padding)}{what}" + (
            ", forward alone in evaluation mode" if further.purpose == "evaluate" else ""
        )
    if any(f.purpose == "step" for f in plan.further.values()):
        yield f"expected step time over the shapes: {seconds_text(plan.expected_step_time)}"
    if plan.padding is not None:
        faults = {
            "samples": plan.padding.fewer,
            "positions": plan.padding.shorter,
            "target positions": plan.padding.shorter_targets,
        }
        for what, why in faults.items():
            if why:
                yield f"batches with fewer {what} than a planned shape are refused: {why}"


def _describe_shape(padding: BatchPadding | None) -> str:
    """Return the shape of a program's batches as text, such as ``8 samples of 512 positions, ``; empty if ``padding``
    is ``None``.
    """
    if padding is None:
        return ""
    return f"{padding.batch} samples" + (f" of {padding.length} positions" if padding.length else "") + ", "


def _describe_fit(plan: Plan) -> str:
    """Return a text on the memory of ``plan``, to append to a line. If the peak exceeds the usable memory of a device,
    the text is like ``: does not fit, 604 MiB more than usable (101%), which the margin covers``. If the search had to
    offload data, it is like ``: fits only with optimizer in host memory``. Otherwise it is empty."""
    if not plan.estimate.memory:
        return ""
    rank = fullest_rank(plan)
    peak, usable = plan.estimate.memory[rank], list_usable_bytes(plan)[rank]
    if peak > usable:
        covered = ", which the margin covers" if peak - usable <= device_memory(plan, rank).margin else ""
        share = format_percent(share_of_usable(peak, usable))
        return f": does not fit, {bytes_text(peak - usable)} more than usable ({share}){covered}"
    return f": fits only {format_offload(plan)}" if plan.lacking and plan.offload else ""


def explain_parts(plan: Plan) -> list[RenderableType]:
    """Return the explanation of ``plan`` as texts and tables of the library rich, to print on a terminal in this order.
    For each of several questions, such as "Does it fit?" and "What limits it?", there are a heading and lines that
    answer it.
    """
    whole = outline_program(plan.written) if plan.written is not None else None
    parts: list[RenderableType] = []
    for title, body in (
        ("Can it be run?", list(_planned_only(plan))),
        ("Does it fit?", list(_explain_fit(plan))),
        ("What limits it?", list(_explain_limits(plan))),
        ("What would make it faster?", _format_items(list_improvements(plan))),
        ("How is the work divided?", list(_explain_partition(plan, whole))),
        ("How is the sequence shared?", list(explain_sequence_axis(plan))),
        ("How are the experts spread?", list(explain_expert_axis(plan))),
        ("How are the parameters laid out?", list(_explain_weights(whole, plan.program)) if whole else []),
        ("What is communicated?", list(_explain_communication(whole)) if whole else []),
        ("What would other layouts take?", list(_explain_alternatives(plan))),
        ("How good is it?", list(_explain_certificate(plan))),
        ("What to know", list(_explain_notes(plan))),
    ):
        if body:
            parts += [format_heading(title), *body, ""]
    return parts[:-1]


def _format_items(lines: Sequence[str]) -> list[RenderableType]:
    """Return ``lines`` as indented items of a list, each with ``- `` before it."""
    return [indent_part(Text(f"- {line}")) for line in lines]


def _planned_only(plan: Plan) -> Iterator[RenderableType]:
    """Yield lines that say why ``plan`` cannot be executed; nothing if it has a program (the instructions of its
    ranks), because it can then be executed."""
    if plan.written is None:
        what = ", ".join(plan.planned_only)
        yield format_text_line(
            f"No: this version plans {what}, but does not execute it. The plan has estimates and no program."
        )
        if plan.profile.differences:
            yield format_text_line(f"It predicts how {plan.profile.name} executes the layout.")
            yield from _format_items([f"{field}: {reason}" for field, reason in plan.profile.reasons.items()])


def _explain_fit(plan: Plan) -> Iterator[RenderableType]:
    """Yield lines on whether ``plan`` fits into device memory: the fullest rank, its usable memory, what is in host
    memory or on disk, and a bar chart of the peak by kind of memory. Nothing is yielded if the plan has no memory
    estimate.
    """
    if not plan.estimate.memory:
        return
    if plan.lacking and plan.offload:
        yield format_text_line(f"Only {format_offload(plan)}. Without it, {describe_lack(plan)}.")
    rank = fullest_rank(plan)
    peak, room = plan.estimate.memory[rank], list_usable_bytes(plan)[rank]
    needs = f"needs {memory_text(plan)}"
    stage = rank // (plan.world_size // plan.num_stages)
    where = f"the fullest rank ({rank}, on stage {stage})" if plan.world_size > 1 else "the one rank"
    if peak <= room:
        fits = "Yes, but tight" if is_tight(plan) else "Yes"
        yield format_text_line(f"{fits}: {where} {needs}; {bytes_text(room - peak)} of these are left.")
    elif peak <= (1 + NEAR) * room:
        margin = device_memory(plan, rank).margin
        covered = f", which the margin of {bytes_text(margin)} covers" if peak - room <= margin else ""
        yield format_text_line(
            f"Hardly: {where} {needs}: {bytes_text(peak - room)} too much{covered}; nothing that needs less was found."
        )
    else:
        yield format_text_line(f"No: {where} {needs}: {bytes_text(peak - room)} too much.")
    yield format_text_line(f"Usable are {usable_memory_text(plan)}.")
    yield from map(format_text_line, filter(None, [describe_other_rooms(plan)]))
    if device_memory(plan, rank).margin:
        yield format_text_line(
            f"The margin is for fragmentation and small errors of the estimate. {describe_memory_error()}"
        )
    if told := describe_tightness(plan):
        yield format_text_line(told)
    if host := host_text(plan):
        yield format_text_line(f"In host memory: {host}.")
    if disk := disk_text(plan):
        yield format_text_line(f"On disk: {disk}.")
    if plan.estimate.stages:
        parts = sorted(plan.estimate.stages[stage].memory.items(), key=lambda item: -item[1])
        total = max(1, sum(size for _, size in parts))
        yield format_text_line(
            f"The peak of rank {rank} (stage {stage}) consists of:" if plan.num_stages > 1 else "Its peak consists of:"
        )
        words = memory_words(plan)
        yield build_bar_chart([(words.get(kind, kind), size / total, bytes_text(size)) for kind, size in parts])


def _describe_slowest_stage(plan: Plan) -> str:
    """Return the stage of ``plan`` whose forward and backward take longest as text, such as `` (on stage 7)``; empty if
    there is only one stage.
    """
    busy = [stage.forward_s + stage.backward_s for stage in plan.estimate.stages]
    return f" (on stage {busy.index(max(busy))})" if len(busy) > 1 else ""


def _shares_text(plan: Plan) -> str:
    """Return the fractions of the step time of ``plan`` as text, such as ``computation 86%, communication 11%``."""
    return ", ".join(f"{name} {format_percent(share)}" for name, share in time_shares(plan))


def _explain_limits(plan: Plan) -> Iterator[RenderableType]:
    """Yield lines on what limits the speed of ``plan``: a chart of the kinds of time, slow operators, memory, disk, and
    constraints of the user.
    """
    yield from _explain_breakdown(plan)
    if plan.estimate.memory:
        yield format_text_line(_describe_memory_limit(plan))
    yield from _explain_disk_limit(plan)
    if plan.constraints.given:
        fixed = ", ".join(f"{k}={v}" for k, v in plan.constraints.given.items())
        yield format_text_line(f"Constraints that you gave: {fixed}.")


def _describe_memory_limit(plan: Plan) -> str:
    """Return sentences that say whether memory makes the step of ``plan`` longer: how full the fullest rank is, and
    whether activations are recomputed, by which stages and for which reason."""
    estimate, rank = plan.estimate, fullest_rank(plan)
    again = estimate.breakdown.get("recompute", 0.0) / (sum(estimate.breakdown.values()) or 1.0)
    if again > _NOTED:
        asked = plan.constraints.given.get("recompute")
        if asked is not None:
            return f"Activations are recomputed because of recompute={asked}."
        return (
            "Memory limits the plan: it recomputes activations to save memory, and layouts that need more memory "
            "than there is are ruled out, even if they were faster."
        )
    hidden = _describe_hidden_recomputation(plan)
    if share_of_usable(estimate.memory[rank], list_usable_bytes(plan)[rank]) >= _TIGHT:
        little = "Little is recomputed" if again else "Nothing is recomputed"
        if hidden and not again:
            little = "The slowest stage recomputes nothing"
        return f"Memory is nearly full. {little}, so more memory helps other layouts only."
    if hidden:
        return f"Memory costs no time: {hidden}, but other stages take longer."
    return "Memory does not limit the plan."


def _describe_hidden_recomputation(plan: Plan) -> str:
    """Return a clause that names the stages of ``plan`` that recompute activations, such as ``stage 0 recomputes to
    fit``; empty if no stage does. This function is for plans whose step time contains no recomputation, because the
    slowest stage does not recompute."""
    some = [k for k, stage in enumerate(plan.estimate.stages) if stage.recomputed or stage.in_part or stage.selective]
    if len(some) > 1:
        return f"stages {format_ranges(some)} recompute to fit"
    return f"stage {some[0]} recomputes to fit" if some else ""


def _explain_disk_limit(plan: Plan) -> Iterator[RenderableType]:
    """Yield a line that compares the seconds of the optimizer's update in ``plan`` with the seconds of reading and
    writing the optimizer states on disk, and says whether the disk limits the plan. Yield nothing if no states are on
    disk."""
    update = plan.estimate.breakdown.get("optimizer", 0.0)
    if "disk" not in plan.offload or not update:
        return
    shares = [plan.topology.host_shares[device] for device in plan.devices]
    of_stages = zip(plan.estimate.stages, stage_ranks(plan.mesh), strict=True)
    seconds = max(2 * part.disk / (shares[r] or BOUNDLESS).disk_bandwidth for part, ranks in of_stages for r in ranks)
    moved = f"reading and writing its states on disk takes {seconds_text(seconds)} or more"
    binds = "Disk" if seconds >= _TIGHT * update else "The disk does not limit the plan"
    yield format_text_line(f"{binds}: the optimizer's update takes {seconds_text(update)}; {moved}.")


def _format_costliest_kinds(plan: Plan) -> str:
    """Return the kinds of operators that take the most time on the stage with the longest computation of ``plan``, with
    their fractions of it, for example ``matrix products (61%), norms (20%) and reductions (8.1%)``. At most three are
    listed; empty if the plan's estimate does not name kinds.
    """
    seconds = plan.estimate.kinds
    total = sum(seconds.values())
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:_MOST_KINDS]
    shown = [f"{kind} ({format_percent(s / total)})" for kind, s in ranked if s > _LEAST_SHARE * total]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def _format_layer_communication(plan: Plan) -> str:
    """Return a text with the seconds of communication inside layers in one step, by purpose: for example ``tensor
    parallelism (tp) 2.8 s, experts (ep) 630 ms``. The seconds are for the pipeline stage of ``plan`` whose forward and
    backward take longest. Empty if the plan's estimate does not have them by purpose.
    """
    found = sorted(((took, purpose) for purpose, took in plan.estimate.exchanges.items() if took), reverse=True)
    return ", ".join(f"{purpose} {seconds_text(took)}" for took, purpose in found)


def _explain_breakdown(plan: Plan) -> list[RenderableType]:
    """Return a bar chart of the step time of ``plan`` by kind of time, with sentences on slow operators, on waiting and
    on communication inside layers; an empty list if no times are known."""
    kinds = sorted(without_residue(plan.estimate.breakdown).items(), key=lambda item: -item[1])
    total = sum(s for _, s in kinds)
    if not total:
        return []
    taken, mfu = seconds_text(plan.estimate.step_time), format_percent(plan.estimate.mfu)
    peak = peak_rate_text(plan)
    most, part = time_shares(plan)[0]
    words = (
        f"One step takes {taken} on the slowest rank{_describe_slowest_stage(plan)}, at {mfu} of the devices' "
        f"peak{peak and f' of {peak}'} (MFU). {'Most' if part > 0.5 else 'The largest part'} of it is {most}:"
    )
    chart = build_bar_chart([(KINDS.get(k, k), s / total, seconds_text(s)) for k, s in kinds])
    lines = []
    if costliest := _format_costliest_kinds(plan):
        lines.append(f"Most of a microbatch's computation is in {costliest}.")
    if plan.num_stages > 1 and (waits := waiting_shares(plan).mean) is not None:
        shown = " (pipeline bubble; the chart has that of the slowest rank)" if "bubble" in dict(kinds) else ""
        lines.append(f"A rank waits for other ranks during {format_percent(waits)} of the step on average{shown}.")
    if told := _format_layer_communication(plan):
        whole = sum(plan.estimate.exchanges.values())
        hidden = max(0.0, 1 - plan.estimate.breakdown.get("tp_communication", 0.0) / whole)
        share = format_percent(hidden) if hidden >= _NOTED else "nothing"
        lines.append(f"Communication inside layers: {told}, of which computation hides {share}.")
    return [format_text_line(words), chart, *map(format_text_line, lines)]


def _describe_work(plan: Plan) -> str:
    """Return a line on the devices of ``plan``, and on the samples of a step if their number is known."""
    devices = f"{format_plural(plan.world_size, 'rank')} on {plan.topology.name}"
    if not plan.global_batch:
        return devices
    length = f" of {plan.tokens_per_step // plan.global_batch:,} tokens" if plan.tokens_per_step else ""
    return f"{devices}; a step has {format_plural(plan.global_batch, 'sample')}{length}"


def _explain_partition(plan: Plan, whole: Outline | None) -> Iterator[RenderableType]:
    """Yield lines on how ``plan`` divides the work: mesh axes, links, microbatches, schedule, data types, sharding of
    parameters, gradients and optimizer states, and the layers of each stage, with those that are recomputed. ``whole``:
    the overview of the plan's program (what each rank executes); ``None`` without a program.
    """
    yield format_text_line(_describe_work(plan))
    for axis, size in plan.mesh.items():
        if size > 1:
            yield format_text_line(
                f"{AXIS_NAMES.get(axis, axis)} parallelism ({axis}) over {format_plural(size, 'rank')}"
            )
    if divided := divided_work_text(plan):
        yield format_text_line(divided)
    if devices := devices_text(plan):
        yield format_text_line(f"devices: {devices}")
    if links := axis_text(plan):
        yield format_text_line(f"links: {links}")
    microbatches = format_plural(plan.num_microbatches, "microbatch", "microbatches")
    schedule = f" under the schedule {schedule_text(plan)}" if plan.num_stages > 1 else ""
    if plan.data_shares:
        microbatches = f"{sum(plan.data_shares)} microbatches, {microbatches_text(plan)},"
    yield format_text_line(f"{microbatches} per step{schedule}")
    told = (
        ("types", types_text(plan)),
        ("state sharding", sharing_text(plan)),
        ("recomputed in part", partly_recomputed_text(plan)),
    )
    yield from (format_text_line(f"{name}: {text}") for name, text in told if text)
    yield from map(format_text_line, list_stage_lines(plan, whole))
    changed = list_updated_states(plan.program) if whole is not None else []
    if changed:
        names = ", ".join(changed[:_SHOWN]) + (", ..." if len(changed) > _SHOWN else "")
        yield format_text_line(
            f"at the end of a step {format_plural(len(changed), 'buffer')} that forward changes: {names}"
        )


def _explain_weights(whole: Outline, program: Program) -> Iterator[RenderableType]:
    """Yield lines that list the weights of each type of block (such as a decoder layer) by the way in which they are
    sharded. A type that occurs on several stages is listed once. ``whole``: the overview of ``program`` (what each rank
    executes).
    """
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
            yield format_text_line(f"{' + '.join(describe_block(program, block) for block in blocks)}:")
            for way, names in ways.items():
                yield indent_part(indent_part(Text(f"{way}: {', '.join(names)}")))
    layouts = {weight.layout for stage in whole.stages for group in stage.groups for weight in group.weights}
    if layouts:
        yield format_text_line(_explain_layouts(layouts, program))


def _explain_layouts(layouts: set[str], program: Program) -> str:
    """Return sentences that explain the symbols ``layouts`` for how the weights of ``program`` are laid out, such as
    ``R`` and ``S0``."""
    over = "of tp" if program.size("tp") > 1 else "of a stage"
    words = {
        "R": f"R: the same on every rank {over}",
        "R'": "R': the same on every rank of tp, with a gradient that is summed over tp",
    }
    told = [text for layout, text in words.items() if layout in layouts]
    dims = sorted({layout[1:] for layout in layouts if layout[:1] == "S" and layout[1:].isdigit()})
    if dims:
        several = "dimensions" if len(dims) > 1 else "dimension"
        told.append(f"{', '.join(f'S{dim}' for dim in dims)}: sharded on {several} {', '.join(dims)}")
    zero = " ZeRO's sharding comes on top." if program.zero else ""
    return f"{'; '.join(told)}.{zero}" if told else zero.strip()


def _explain_communication(whole: Outline) -> Iterator[RenderableType]:
    """Yield a table of the collectives inside layers, then lines on what else is communicated: the bytes sent between
    stages, the gradients summed over ranks, and the gradients of tied weights, which several stages use. ``whole``: the
    overview of a program (what each rank executes).
    """
    calls = collective_table(whole)
    if calls:
        yield from (calls, "")
    hand_overs: dict[str, list[str]] = {}
    for link in whole.links:
        what = "activations" if link.direction == "forward" else "gradients"
        text = f"{bytes_text(link.num_bytes)} of {what} per microbatch"
        hand_overs.setdefault(text, []).append(f"{link.source}→{link.target}")
    for text, pairs in hand_overs.items():
        several = "stages" if len(pairs) > 1 else "stage"
        shown = [*pairs[:2], "...", pairs[-1]] if len(pairs) > _MOST_PAIRS else pairs
        yield format_text_line(f"{several} {', '.join(shown)}: {text}")
    reductions: dict[str, list[int]] = {}
    for stage in whole.stages:
        for moved in stage.reductions:
            name = COLLECTIVE_NAMES.get(moved.op, moved.op)
            often = "in all per step" if moved.count > moved.buckets else "once per step"
            size = f"{bytes_text(moved.num_bytes)} of {moved.what} over {moved.axis} in {moved.transfers}, {often}"
            reductions.setdefault(f"{name} of {size}", []).append(stage.index)
    for text, stages in reductions.items():
        yield format_text_line(f"{'stages' if len(stages) > 1 else 'stage'} {format_ranges(stages)}: {text}")
    axes = {axis for stage in whole.stages for moved in stage.reductions for axis in moved.axis.split("×")}
    yield from (format_text_line(f"{axis}: {words}") for axis, words in _AXIS_WORDS.items() if axis in axes)
    for tie in whole.ties:
        places = sorted({p[0] for p in tie.places})
        if len(places) > 1:
            names = " = ".join([tie.state, *tie.aliases])
            yield format_text_line(
                f"stages {format_ranges(places)}: {bytes_text(tie.num_bytes)} of gradients of the tied weight {names}"
            )


def _explain_alternatives(plan: Plan) -> Iterator[RenderableType]:
    """Yield lines on the layouts that the search compared with ``plan``: how many there are, standard layouts, other
    batch sizes, and a table of the best layouts. Nothing is yielded if ``plan`` lists none."""
    candidates = plan.certificate.candidates
    if not candidates:
        return
    yield format_text_line(candidate_counts(plan.certificate) + ".")
    told = [b for b in plan.certificate.baselines if not (b.global_batch or (b.offload and b.candidate is None))]
    yield from (format_text_line(_format_baseline(b, plan)) for b in told)
    kinds = [f"{b.name} is {LAYOUT_MEANINGS[b.name]}." for b in told if b.name in LAYOUT_MEANINGS and b.candidate]
    yield from map(format_text_line, kinds)
    yield from _explain_uncounted_layouts(plan)
    if other := other_batch_text(plan):
        yield format_text_line(f"A global batch {other}.")
    if any(b.name.startswith(WITHOUT) for b in plan.certificate.baselines):
        yield format_text_line(
            'A topology without devices: topology.without("node1/3", ...), or --topology "... without node1/3".'
        )
    yield candidate_table(plan)
    yield format_text_line(
        "A row is a layout. mesh: the number of ranks on each axis; zero: ZeRO's stage, 0 if absent; dp_shard: ranks "
        "that share states, all of dp × cp if absent; v: virtual stages of a rank; microbatch: its samples; step "
        "time: of the best plan that was found for the row; at least: a lower bound on the step time of every plan "
        "of the row; memory: of the fullest rank."
    )
    notes = [describe_tried_rows(plan.certificate, "at least"), describe_uncovered_rows(plan.certificate)]
    yield from map(format_text_line, filter(None, notes))
    yield format_text_line(
        "why_not(...), such as why_not(tp=2), says in which parts of the step time another layout differs."
    )


def _explain_uncounted_layouts(plan: Plan) -> Iterator[RenderableType]:
    """Yield a line that names standard layouts, such as ZeRO-3 alone, that the search of ``plan`` did not examine.
    Their step times were computed only for comparison, so they are not in the report's table and numbers of layouts.
    Nothing is yielded if there are none.
    """
    rows = {_get_layout(row) for row in plan.certificate.candidates}
    names = [
        baseline.name
        for baseline in plan.certificate.baselines
        if not baseline.global_batch and baseline.candidate is not None and baseline.candidate.step_time is not None
        if not baseline.name.startswith(WITHOUT) and _get_layout(baseline.candidate) not in rows
    ]
    if names:
        yield format_text_line(
            f"Planned only for this comparison, not counted and not in the table: {', '.join(names)}."
        )


def _get_layout(candidate: Candidate) -> tuple[str, int, str]:
    """Return (mesh as text, microbatch size in samples, schedule) of ``candidate``. Candidates with equal results are
    the same layout for the report.
    """
    return candidate_text(candidate), candidate.microbatch_size, candidate.schedule


def _format_baseline(baseline: Baseline, plan: Plan) -> str:
    """Return a line on ``baseline``, a standard layout that is compared with ``plan``: its name, layout and microbatch
    size, its step time or the reason why it is not possible, and the kinds of time in which it differs from the plan.
    """
    if baseline.candidate is None:
        return f"{baseline.name}: {baseline.excluded}"
    excluded = f"; {baseline.excluded}" if baseline.excluded else ""
    unhosted = "" if baseline.offload else describe_tried_offload(plan)
    became = describe_outcome(baseline.candidate, plan.certificate.objective, unhosted)
    layout = ", ".join(filter(None, (baseline_text(baseline.candidate), format_offload(baseline))))
    differences = ""
    if baseline.candidate.status != "chosen" and baseline.candidate.breakdown:
        differences = format_time_changes(plan.estimate.breakdown, baseline.candidate.breakdown)
    also = baseline.candidate.status != "chosen" and baseline.candidate.zero == plan.chosen.zero == 3
    other = "; the plan is ZeRO-3, too, on another mesh" if also else ""
    told = f" ({differences})" if differences else ""
    rows = _describe_like_rows(baseline.candidate, plan)
    return f"{baseline.name} ({layout}): {became}{told}{excluded}{other}{rows}"


def _describe_like_rows(candidate: Candidate, plan: Plan) -> str:
    """Return a clause on the row of the table of layouts that has the mesh and ZeRO stage of ``candidate`` but another
    step time, with the reason: its microbatch size or schedule. Empty if the layout itself has a row, or none is
    alike."""
    rows = [row for row in plan.certificate.candidates if row.step_time is not None]
    if candidate.step_time is None or any(_get_layout(row) == _get_layout(candidate) for row in rows):
        return ""
    alike = [row for row in rows if candidate_text(row) == candidate_text(candidate)]
    if not alike:
        return ""
    row = min(alike, key=lambda row: row.step_time or 0.0)
    shown, _ = list_distinct_seconds_texts(row.step_time or 0.0, candidate.step_time)
    why = f"microbatches of {format_plural(row.microbatch_size, 'sample')}"
    why += f" under {row.schedule}" if row.schedule != candidate.schedule else ""
    return f"; the row of this mesh in the table has {why} and takes {shown}"


def _explain_certificate(plan: Plan) -> Iterator[RenderableType]:
    """Yield lines on how good ``plan`` is: its step time under the cost model, the errors of this model in
    measurements, whether no plan can be faster, which plans this proof does not cover, and the result of the
    simulation.
    """
    c = plan.certificate
    (known, num_known), (unseen, num_unseen) = MEAN_ERRORS["known"], MEAN_ERRORS["unseen"]
    yield format_text_line(
        f"The cost model's step times were off by {format_percent(known)} on average in {num_known:,} measured runs, "
        "and by "
        f"{format_percent(unseen)} in {num_unseen:,} others, by which none of its constants was set. Smaller "
        "differences between plans are within the error of the model."
    )
    yield from map(format_text_line, explain_proof(plan))
    if c.cut_off is not None:
        yield format_text_line(f"The search was {cut_off(c)}: with more time it may find a better plan.")
    elif c.num_open:
        were = "layout was" if c.num_open == 1 else "layouts were"
        nearest = min((row.bound for row in c.candidates if c.is_open(row)), default=c.bound)
        most = format_percent((c.objective - nearest) / c.objective)
        yield format_text_line(f"{c.num_open} {were} not tried and may be faster, by {most} at most.")
    if outside := [*list_assumptions(plan), *list_uncovered_choices(plan)]:
        yield format_text_line("The proof does not cover the following, so that another plan may be faster:")
        yield from _format_items(outside)
    if plan.estimate.simulated is not None:
        simulated, step = plan.estimate.simulated, plan.estimate.step_time
        difference = abs(simulated / step - 1)
        compared = f"{difference:.1%} {'more' if simulated > step else 'less'} than the estimate"
        compared = compared if difference >= 5e-4 else "the same"
        yield format_text_line(
            f"Check: a simulation of the generated programs with the same costs takes {seconds_text(simulated)}, "
            f"{compared}. It checks the schedule, not the cost model."
        )


def _explain_notes(plan: Plan) -> Iterator[RenderableType]:
    """Yield lines on operators that every rank runs in full because no sharding rule exists for them, and the remarks
    for the user that ``plan`` contains as ``notes``.
    """
    for name, share in sorted(plan.shares.without_rule.items(), key=lambda item: -item[1]):
        yield format_text_line(
            f"- {name} has no sharding rule, so every rank runs all of it: {format_percent(share)} of the work"
        )
    yield from _format_items([*plan.notes, *precision_notes(plan)])
