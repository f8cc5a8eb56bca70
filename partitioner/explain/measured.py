"""Compare a measured step with the predicted one, as a trace to view and as tables of the differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import RenderableType
from rich.text import Text

from partitioner.errors import PlanError
from partitioner.explain.tables import build_empty_table, format_heading, indent_part
from partitioner.plan import Plan
from partitioner.runtime.observe.trace_events import (
    Event,
    TraceSpan,
    build_events,
    list_spans,
    load_measured_steps,
    make_complete_event,
    make_flow_events,
    make_process_name_events,
    write_trace,
)
from partitioner.runtime.program.program import Program
from partitioner.runtime.program.simulate import COMPUTE, Timeline
from partitioner.runtime.watch.watchdog import newest_attempt
from partitioner.simulate.program_time import plan_timeline, simulate_plan
from partitioner.units import format_percent, seconds_text

_PREDICTED = 10_000  # number of the first process of the prediction, behind those of the ranks

_MOST_ROWS = 12

KINDS = {
    "F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights", "TOTAL_F": "totals",
    "TOTAL": "totals", "SEND_F": "send", "SEND_B": "send", "RECV_F": "receive", "RECV_B": "receive",
    "GATHER": "gathering of parameters", "SCATTER": "reduction of gradients", "REDUCE": "reduction of gradients",
    "GATHER_B": "reduction of gradients",
    "STEP": "reduction of gradients", "SYNC": "tied weights", "UPDATE": "new values of buffers",
    "OFFLOAD": "to host memory", "FETCH": "from host memory",
}  # fmt: skip


def write_plan_trace(plan: Plan, folder: Path | None, path: Path) -> Path:
    """Write the predicted step of ``plan`` as a trace file to ``path`` and return the path. ``folder``: the recordings
    of the ranks of a training that executed the plan; the last step that they contain is added to the trace. If the
    training was started several times, those of the last start are used. If ``folder`` is ``None``, only the prediction
    is written. Raise :class:`PlanError` if the recordings have another number of ranks than the plan.
    """
    events: list[Event] = []
    if folder is not None:
        folder = newest_attempt(folder)
        steps = load_measured_steps(folder)
        if len(steps) != plan.program.world_size:
            raise PlanError(
                f"{folder} has a step of {len(steps)} ranks, but the plan has {plan.program.world_size}; give the "
                "folder of a run of this plan"
            )
        events += build_events(list_spans(steps), steps)
    return write_trace(path, events + list(predicted_events(plan_timeline(plan))))


def predicted_events(timeline: Timeline) -> Iterator[Event]:
    """Yield trace events of the predicted step ``timeline``. Each pipeline stage is one process of the trace: one
    thread has the instructions, another the transfers and reductions that run in the background.
    """
    ends = _receive_ends(timeline)
    number = _PREDICTED
    for stage, lane in enumerate(timeline.stages):
        process = _PREDICTED + stage
        yield from make_process_name_events(process, f"stage {stage} (predicted)", 2 * stage + 1)
        for s in lane.spans:
            if s.end > s.start:
                op, of = s.instruction.word, {"stage": stage, "index": s.index, "work_s": s.work}
                args = {"kind": "predicted", "op": op, **of}
                yield make_complete_event(str(s.instruction), op, process, s.start, s.end, args)
        for b in lane.background:
            args = {"kind": "predicted", "stage": stage, "index": b.index, "bytes": b.nbytes}
            yield make_complete_event(str(b.instruction), b.instruction.word, process, b.start, b.end, args, thread=1)
            i = b.instruction
            if i.peer is not None and (i.peer, i.op[-1], i.microbatch, i.values) in ends:
                number += 1
                end = ends[i.peer, i.op[-1], i.microbatch, i.values]
                yield from make_flow_events(number, process, b.start, _PREDICTED + i.peer, end, (1, 0))


def _receive_ends(timeline: Timeline) -> dict[tuple[int, str, int | None, tuple[str, ...]], float]:
    """Return the time at which each receive of ``timeline``, a simulated step, ends, in seconds from the start of the
    step. The keys are (stage, direction, microbatch, names of the received values); the direction is ``F`` or ``B``,
    for forward and backward. The microbatch is ``None`` if the receive belongs to none.
    """
    return {
        (stage, s.instruction.op[-1], s.instruction.microbatch, s.instruction.values): s.end
        for stage, lane in enumerate(timeline.stages)
        for s in lane.spans
        if s.instruction.op.startswith("RECV")
    }


@dataclass(frozen=True)
class StageComparison:
    """Describes one line of a comparison of predicted and measured seconds. ``stage``: index of the pipeline stage; -1
    for a sum over all stages. ``what``: what took the time: a kind of work, ``waiting``, or the name of an instruction.
    ``predicted``, ``measured``: seconds in one step; ``measured`` is the median over the ranks of a stage.
    """

    stage: int
    what: str
    predicted: float
    measured: float


def compare_steps(plan: Plan, spans: Sequence[TraceSpan]) -> list[RenderableType]:
    """Return a comparison of the predicted step of ``plan`` with a measured one, as texts and tables of the library
    rich: one table by stage, one by kind of work, and one of the instructions that differ most. ``spans``: the measured
    instructions of all ranks.

    Raise :class:`PlanError` if the measurement is from a different plan.
    """
    _require_same_plan(plan.program, spans)
    of = simulate_plan(plan)
    timeline = of.timeline
    spans = [s for s in spans if plan.program.coordinates(s.rank)["dp"] in of.places]
    total = max(s.end for s in spans)
    short = [
        f"The step was predicted to take {seconds_text(timeline.step_time)}, and took {seconds_text(total)}: "
        f"{_format_time_ratio(timeline.step_time, total)}.",
        *_describe_differences(by_stage(timeline, spans), by_kind(timeline, spans)),
    ]
    kinds, places = by_kind(timeline, spans), by_instruction(timeline, spans)
    return [
        format_heading("In short"),
        *(indent_part(Text(f"- {line}")) for line in short),
        "",
        format_heading("Work and waiting by stage"),
        _build_comparison_table("what", by_stage(timeline, spans)),
        "",
        format_heading("Work by kind"),
        _build_comparison_table("kind", sorted(kinds, key=lambda r: -max(r.predicted, r.measured))),
        "",
        format_heading("The instructions that differ most"),
        _build_comparison_table(
            "instruction", sorted(places, key=lambda r: -abs(r.measured - r.predicted))[:_MOST_ROWS]
        ),
    ]


def _require_same_plan(program: Program, spans: Sequence[TraceSpan]) -> None:
    """Raise :class:`PlanError` if the measured instructions ``spans`` are not the instructions of ``program``, or if
    some of its ranks are missing.
    """
    ranks = {s.rank for s in spans}
    if ranks != set(range(program.world_size)):
        raise PlanError(
            f"the trace is not of this plan: it has {len(ranks)} ranks, the plan {program.world_size}; write one of a "
            "whole run of this plan with `partitioner trace`"
        )
    lists = {rank: program.rank(rank).instructions for rank in ranks}
    for s in spans:
        instructions = lists[s.rank]
        if (s.index < len(instructions) and str(instructions[s.index]) != s.text) or s.index > len(instructions):
            raise PlanError(
                f"the trace is not of this plan: rank {s.rank} has {s.text} as instruction {s.index}; "
                "measure a run of this one"
            )


def by_stage(timeline: Timeline, spans: Sequence[TraceSpan]) -> list[StageComparison]:
    """Return two entries for each pipeline stage, each with predicted and measured seconds: one for work, then one for
    waiting. Measured seconds are the median over the ranks of a stage. ``timeline``: the predicted step. ``spans``: the
    measured instructions of all ranks.
    """
    rows = []
    for stage, lane in enumerate(timeline.stages):
        ranks = _group_spans_by_rank(spans, stage)
        work = median(sum(s.end - s.start - s.waiting for s in mine) for mine in ranks)
        waiting = median(sum(s.waiting for s in mine) for mine in ranks)
        rows.append(StageComparison(stage, "work", lane.busy, work))
        rows.append(StageComparison(stage, "waiting", sum(s.end - s.start - s.work for s in lane.spans), waiting))
    return rows


def by_kind(timeline: Timeline, spans: Sequence[TraceSpan]) -> list[StageComparison]:
    """Return an entry for each kind of work, such as forward: the predicted and measured seconds, summed over the
    stages and without waiting. Measured seconds of a stage are the median over its ranks. ``timeline``: the predicted
    step. ``spans``: the measured instructions of all ranks.
    """
    predicted: dict[str, float] = {}
    for lane in timeline.stages:
        for p in lane.spans:
            name = KINDS.get(p.instruction.word, "other")
            predicted[name] = predicted.get(name, 0.0) + p.work
    measured: dict[str, float] = {}
    for stage in range(len(timeline.stages)):
        ranks = _group_spans_by_rank(spans, stage)
        for name in {KINDS.get(s.op, "other") for s in spans}:
            mine = [sum(s.end - s.start - s.waiting for s in r if KINDS.get(s.op, "other") == name) for r in ranks]
            measured[name] = measured.get(name, 0.0) + median(mine)
    return [
        StageComparison(-1, n, predicted.get(n, 0.0), measured.get(n, 0.0))
        for n in dict.fromkeys((*predicted, *measured))
    ]


def by_instruction(timeline: Timeline, spans: Sequence[TraceSpan]) -> list[StageComparison]:
    """Return an entry for each forward and backward instruction, by stage and in order of execution: its predicted and
    measured seconds. Measured seconds are the median over the ranks of a stage. ``timeline``: the predicted step.
    ``spans``: the measured instructions of all ranks.
    """
    rows = []
    for stage, lane in enumerate(timeline.stages):
        ranks = _group_spans_by_rank(spans, stage)
        for p in lane.spans:
            if p.instruction.op in COMPUTE:
                mine = median(sum(s.end - s.start - s.waiting for s in r if s.index == p.index) for r in ranks)
                rows.append(StageComparison(stage, str(p.instruction), p.work, mine))
    return rows


def _group_spans_by_rank(spans: Sequence[TraceSpan], stage: int) -> list[list[TraceSpan]]:
    """Return the measured instructions of one pipeline stage, a list for each of its ranks. ``spans``: the measured
    instructions of all ranks. ``stage``: index of the stage.
    """
    found: dict[int, list[TraceSpan]] = {}
    for s in spans:
        if s.stage == stage:
            found.setdefault(s.rank, []).append(s)
    return list(found.values())


def _describe_differences(stages: Sequence[StageComparison], kinds: Sequence[StageComparison]) -> Iterator[str]:
    """Yield a sentence that names the kind of instruction, or the stage's waiting, whose measured time differs most
    from the prediction. If the ratio of measured to predicted work differs much between stages, also yield a sentence
    on the stage with the largest ratio. ``stages``: work and waiting of each stage. ``kinds``: work by kind of
    instruction.
    """
    total = sum(r.measured for r in stages) or 1.0
    worst = max((*kinds, *(r for r in stages if r.what == "waiting")), key=lambda r: abs(r.measured - r.predicted))
    where = f" of stage {worst.stage}" if worst.stage >= 0 else ""
    yield (
        f"Most of the difference is in {worst.what}{where}: predicted {seconds_text(worst.predicted)}, measured "
        f"{seconds_text(worst.measured)}; {format_percent(abs(worst.measured - worst.predicted) / total)} of all."
    )
    works = [r for r in stages if r.what == "work"]
    ratios = [r.measured / r.predicted for r in works if r.predicted]
    if len(ratios) > 1 and max(ratios) > 1.25 * min(ratios):
        slow = max(works, key=lambda r: r.measured / r.predicted if r.predicted else 0.0)
        yield f"Stages part unevenly: stage {slow.stage} takes the most beyond its prediction."


def _format_time_ratio(predicted: float, measured: float) -> str:
    """Return a text that says how a measured time compares with a predicted one, such as ``1.20 times as long``.
    ``predicted``, ``measured``: seconds."""
    return f"{measured / predicted:.2f} times as long" if predicted else "nothing was predicted"


def _build_comparison_table(title: str, rows: Sequence[StageComparison]) -> RenderableType:
    """Return a table with a row for each of ``rows``: stage, name, predicted time, measured time, and measured divided
    by predicted. ``title``: the heading of the column of names.
    """
    made = build_empty_table(
        [("stage", True), (title, False), ("predicted", True), ("measured", True), ("ratio", True)]
    )
    for r in rows:
        ratio = f"{r.measured / r.predicted:.2f}" if r.predicted else ""
        stage = str(r.stage) if r.stage >= 0 else "all"
        made.add_row(stage, Text(r.what), seconds_text(r.predicted), seconds_text(r.measured), ratio)
    return indent_part(made)
