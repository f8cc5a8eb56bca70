"""Write a measured step in the Trace Event Format, which Perfetto and chrome://tracing open, and read it back.

Each rank is a process with one thread for its instructions. An arrow leads from every send to the end of its receive.
The ``args`` of the events have all data that are needed to read the step back.

Source of the format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.runtime.errors import LaunchError
from partitioner.runtime.execute.flight_recorder import MeasuredStep, list_recordings
from partitioner.runtime.files import parse_json, write_text

Event = dict[str, Any]

MEASURED = "measured"


@dataclass(frozen=True)
class TraceSpan:
    """The time of one instruction of one rank, in seconds from the start of the step. ``stage``: index of the pipeline
    stage. ``index``, ``text``, ``op``: position, printed form and kind of the instruction. ``waiting``: the seconds
    spent waiting for other ranks.
    """

    rank: int
    stage: int
    index: int
    text: str
    op: str
    start: float
    end: float
    waiting: float


def load_measured_steps(folder: str | Path) -> list[MeasuredStep]:
    """Return the times of the last step of each rank, from the files (flight records) in ``folder`` in which the ranks
    recorded them. Raise :class:`LaunchError` unless all ranks have completed the same step.
    """
    found = [step for r in list_recordings(Path(folder)).values() if (step := r.last_step()) is not None]
    if not found or len({s.step for s in found}) > 1 or len(found) != found[0].header.world_size:
        steps = {s.header.rank: s.step + 1 for s in found}
        raise LaunchError(
            f"{folder} does not contain a complete step of all ranks (last steps by rank: {steps or 'none'}): use the "
            "folder of a watched run that has finished"
        )
    return found


def list_spans(steps: Sequence[MeasuredStep]) -> list[TraceSpan]:
    """Return the times of all instructions of one step, over all ranks, in seconds from the start of the step. An
    instruction that starts a transfer and ends it later occurs twice. ``steps``: the measured step of each rank.
    """
    begin = min(_convert_to_wall_clock(s, s.starts[0] * 1e-9) for s in steps)
    spans = []
    for step in steps:
        about = step.header
        for index, start, end, waiting in step.seconds():
            spot = about.spots[index] if index < len(about.spots) else None
            text, op = (spot.text, spot.op) if spot is not None else ("end", "END")
            first, last = _convert_to_wall_clock(step, start) - begin, _convert_to_wall_clock(step, end) - begin
            spans.append(TraceSpan(about.rank, about.stage, index, text, op, first, last, waiting))
    return spans


def _convert_to_wall_clock(step: MeasuredStep, seconds: float) -> float:
    """Return the time of day, in seconds, for ``seconds`` of the monotonic clock of the host of ``step``. The time of
    day is comparable between hosts.
    """
    return seconds + step.header.clock_s


def build_events(spans: Iterable[TraceSpan], steps: Sequence[MeasuredStep], first_process: int = 0) -> list[Event]:
    """Return the events, in the Trace Event Format, of a measured step. A rank's process in the trace has the number
    ``first_process + rank``. ``spans``: times of the instructions. ``steps``: the measured step of each rank.
    """
    events: list[Event] = []
    for step in steps:
        name = f"rank {step.header.rank}, stage {step.header.stage} ({MEASURED}, step {step.step + 1})"
        events += make_process_name_events(first_process + step.header.rank, name, 2 * step.header.rank)
    for s in spans:
        args = {
            "kind": MEASURED,
            "rank": s.rank,
            "stage": s.stage,
            "index": s.index,
            "op": s.op,
            "waiting_s": s.waiting,
        }
        events.append(make_complete_event(s.text, s.op, first_process + s.rank, s.start, s.end, args))
    return events + _list_flows(list(spans), steps, first_process)


def _list_flows(spans: Sequence[TraceSpan], steps: Sequence[MeasuredStep], first_process: int) -> list[Event]:
    """Return the trace events of arrows from the start of each send to the end of its receive. A rank's process in the
    trace has the number ``first_process + rank``. ``spans``: times of the instructions. ``steps``: the measured step of
    each rank.
    """
    about = {s.header.rank: s.header for s in steps}
    stride = _compute_stride(steps)
    sends: dict[tuple[int, int, str, int | None, tuple[str, ...]], TraceSpan] = {}
    receives: dict[tuple[int, int, str, int | None, tuple[str, ...]], TraceSpan] = {}
    for s in spans:
        spot = about[s.rank].spots[s.index] if s.index < len(about[s.rank].spots) else None
        if spot is None or spot.peer is None or spot.peer == s.stage:
            continue
        other = s.rank + (spot.peer - s.stage) * stride
        sending = spot.op.startswith("SEND")
        ends = (s.rank, other) if sending else (other, s.rank)
        key = (*ends, spot.op[-1], spot.microbatch, spot.values)
        (sends if sending else receives)[key] = s  # of a receive's two actions, the one that ends it
    events: list[Event] = []
    for number, (key, sent) in enumerate(sends.items()):
        if key in receives:
            got = receives[key]
            events += make_flow_events(number, first_process + sent.rank, sent.start, first_process + got.rank, got.end)
    return events


def _compute_stride(steps: Sequence[MeasuredStep]) -> int:
    stages = {s.header.stage for s in steps}
    return len(steps) // len(stages)


def make_process_name_events(process: int, name: str, place: int) -> list[Event]:
    """Return the trace events that name the process with the number ``process`` and set ``place``, its position in a
    viewer.
    """
    return [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": place}},
    ]


def make_complete_event(
    name: str, category: str, process: int, start: float, end: float, args: Mapping[str, Any], thread: int = 0
) -> Event:
    """Return an event of the Trace Event Format with a beginning and an end. ``start``, ``end``: times in seconds; the
    format stores microseconds. ``name``, ``category``: the event's label and its category, as text. ``process`` and
    ``thread``: numbers in the trace. ``args``: further data to store in the event.
    """
    event = {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, "args": dict(args)}
    return {**event, "ts": start * 1e6, "dur": max(0.0, end - start) * 1e6}


def make_flow_events(
    number: int, source: int, start: float, target: int, end: float, threads: tuple[int, int] = (0, 0)
) -> list[Event]:
    """Return the two trace events of an arrow from the time ``start`` in one process to the time ``end`` in another, in
    seconds. Other events must contain these times, because the ends of the arrow are attached to these events.
    ``number``: identifies the arrow. ``source``, ``target``: numbers of the processes in the trace; ``threads``:
    numbers of their threads.
    """
    both = {"name": "transfer", "cat": "transfer", "id": number}
    return [
        {**both, "ph": "s", "pid": source, "tid": threads[0], "ts": start * 1e6},
        {**both, "ph": "f", "bp": "e", "pid": target, "tid": threads[1], "ts": end * 1e6},
    ]


def write_trace(path: str | Path, events: Sequence[Event]) -> Path:
    return write_text(Path(path), json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))


def read_spans(path: str | Path) -> list[TraceSpan]:
    """Return the times of the instructions of the measured step in the trace file ``path``. Raise :class:`LaunchError`
    if the file does not contain a measured step or cannot be read.
    """
    try:
        events = parse_json(Path(path).read_text())["traceEvents"]
        mine = [e for e in events if e.get("ph") == "X" and e.get("args", {}).get("kind") == MEASURED]
        spans = [
            TraceSpan(
                rank=(a := e["args"])["rank"],
                stage=a["stage"],
                index=a["index"],
                text=e["name"],
                op=a["op"],
                start=e["ts"] * 1e-6,
                end=(e["ts"] + e["dur"]) * 1e-6,
                waiting=a["waiting_s"],
            )
            for e in mine
        ]
    except OSError as error:
        raise LaunchError(f"cannot read the trace {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LaunchError(
            f"{path} is not a trace: expected a file that `partitioner trace` wrote, got {type(error).__name__}: "
            f"{error}"
        ) from None
    if not spans:
        raise LaunchError(f"{path} holds no measured step; write one with `partitioner trace`")
    return spans
