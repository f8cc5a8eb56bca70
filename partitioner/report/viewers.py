"""A plan as files of other viewers: the simulated step for Perfetto, the graphs for Model Explorer.

Both files are under 5 MB. Pipelines that differ only in their data-parallel rank are shown once: a process of the trace
is a pipeline stage, and its name says how many ranks it stands for.

Sources of the formats: "Trace Event Format", Google, 2016; ``graph_builder.py`` of Model Explorer (its JSON is a
collection of graphs, whose nodes name their layer as a path in ``namespace``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from partitioner.explain.measured import predicted_events
from partitioner.plan import Plan
from partitioner.plans.figures import picture_title
from partitioner.plans.outline import CallGroup, Outline, ValueFlow, outline_program
from partitioner.runtime.files import write_text
from partitioner.simulate.program_time import plan_timeline
from partitioner.units import bytes_text, format_plural

MOST_BYTES = 5_000_000  # of a file
_RESERVED = 100_000  # bytes of a file for parts that are not counted exactly

Json = dict[str, Any]


def export_for_viewer(plan: Plan, format: str, path: str | Path) -> tuple[str, ...]:
    """Write ``plan`` to the file ``path`` for the viewer ``format``, ``perfetto`` or ``model-explorer``, atomically.
    Return sentences on what was left out because of the limit of 5 MB; empty if nothing was.
    """
    content, left_out = VIEWERS[format](plan)
    write_text(Path(path), json.dumps(content, separators=(",", ":"), ensure_ascii=False))
    return left_out


def build_perfetto_trace(plan: Plan) -> tuple[Json, tuple[str, ...]]:
    """Return a pair: the simulated step of ``plan`` as JSON data of a Perfetto trace, and sentences on what was left
    out because of the limit of 5 MB, empty if nothing was.

    If the step has too many instructions, the trace has those that start first.
    """
    events = [_name_ranks(plan, event) for event in predicted_events(plan_timeline(plan))]
    begun = sorted((e for e in events if e["ph"] != "M"), key=lambda e: e["ts"])
    named = [e for e in events if e["ph"] == "M"]
    kept = _keep_most([*named, *begun], MOST_BYTES - _RESERVED)
    about: Json = {
        "title": picture_title(plan),
        "ranks": plan.world_size,
        "step_s": plan.estimate.step_time,
        "times": "predicted by the cost model of partitioner",
    }
    left_out: tuple[str, ...] = ()
    if len(kept) < len(events):
        shown = kept[-1]["ts"] * 1e-6
        left_out = (
            f"{len(events) - len(kept):,} of {len(events):,} events are left out: those that start after {shown:.4g} s "
            f"of the step of {plan.estimate.step_time:.4g} s",
        )
    return {"traceEvents": kept, "displayTimeUnit": "ms", "otherData": about | {"left_out": [*left_out]}}, left_out


def _name_ranks(plan: Plan, event: Json) -> Json:
    """Return ``event``, an event of a Perfetto trace. If the event gives a pipeline stage of ``plan`` its name, the
    number of ranks of that stage is added to the name."""
    if event.get("name") != "process_name":
        return event
    stage = int(event["args"]["name"].split()[1])
    ranks = plan.world_size // len(plan.program.stages)
    name = f"stage {stage} of {len(plan.program.stages)}, {format_plural(ranks, 'rank')} alike (predicted)"
    return event | {"args": {"name": name}}


def _keep_most(entries: list[Json], limit: int) -> list[Json]:
    """Return the longest prefix of ``entries`` whose JSON text has at most ``limit`` bytes."""
    size = 0
    for count, entry in enumerate(entries):
        size += len(json.dumps(entry, separators=(",", ":"), ensure_ascii=False).encode()) + 1
        if size > limit:
            return entries[:count]
    return entries


def build_model_explorer_graphs(plan: Plan) -> tuple[Json, tuple[str, ...]]:
    """Return a pair: the graphs of ``plan`` as JSON data for Model Explorer, and sentences on what was left out because
    of the limit of 5 MB, empty if nothing was.

    The first graph has the pipeline stages as layers, with a node for each run of consecutive equal blocks (such as
    decoder layers). Each block has a graph of its operators, which a click on a run opens.
    """
    outline = outline_program(plan.program)
    stages = _build_stage_graph(plan, outline)
    graphs, left_out = [stages], []
    size = len(json.dumps(stages).encode())
    for name in plan.program.blocks:
        graph = _build_block_graph(plan, name)
        size += len(json.dumps(graph).encode())
        if size > MOST_BYTES - _RESERVED:
            left_out.append(name)
        else:
            graphs.append(graph)
    for node in stages["nodes"]:
        node["subgraphIds"] = [name for name in node["subgraphIds"] if name not in left_out]
    sentences = (f"the graphs of {format_plural(len(left_out), 'block')} are left out: {', '.join(left_out[:5])}",)
    return {"label": picture_title(plan), "graphs": graphs}, sentences if left_out else ()


def _build_stage_graph(plan: Plan, outline: Outline) -> Json:
    """Return the graph of the pipeline stages of ``plan`` for Model Explorer. It has a node for each run of consecutive
    equal blocks (such as layers), and edges for the values that runs pass on. ``outline``: these runs, by stage."""
    nodes = []
    for stage in outline.stages:
        for group in stage.groups:
            flows = [flow for flow in outline.flows if flow.target == (group.stage, group.index)]
            nodes.append(
                {
                    "id": _name_group(group.stage, group.index),
                    "label": f"{group.count} × {group.title}" if group.count > 1 else group.title,
                    "namespace": f"stage {group.stage}",
                    "subgraphIds": [*dict.fromkeys(group.blocks)],
                    "attrs": _list_attributes(_describe_group(group)),
                    "incomingEdges": [_build_flow_edge(flow, place) for place, flow in enumerate(flows)],
                    "outputsMetadata": [],
                }
            )
    figures = {
        "ranks": f"{plan.world_size:,}",
        "mesh": ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "1",
        "schedule": plan.schedule,
        "step time": f"{plan.estimate.step_time:.4g} s",
    }
    layers = {
        f"stage {stage.index}": {
            "ranks": f"{len(stage.ranks):,}: {stage.ranks[0]} to {stage.ranks[-1]}",
            "parameters": f"{stage.num_parameters:,}",
            "parameters on a rank": bytes_text(stage.parameter_bytes),
            "reads": ", ".join(stage.loads) or "nothing",
        }
        for stage in outline.stages
    }
    return {"id": "stages", "nodes": nodes, "groupNodeAttributes": {"": figures, **layers}}


def _name_group(stage: int, index: int) -> str:
    return f"stage {stage}/{index}"


def _build_flow_edge(flow: ValueFlow, place: int) -> Json:
    source = _name_group(*flow.source)
    return {"sourceNodeId": source, "sourceNodeOutputId": ", ".join(flow.values[:3]), "targetNodeInputId": str(place)}


def _describe_group(group: CallGroup) -> Iterator[tuple[str, str]]:
    """Yield (name, value) pairs of text for the side panel of Model Explorer, which describe ``group``, a run of
    consecutive calls of equal blocks (such as layers)."""
    yield "modules", group.paths
    yield "parameters", f"{group.num_parameters:,}"
    yield "parameters on a rank", bytes_text(group.parameter_bytes)
    for total in group.collectives:
        yield f"{total.op} over {total.axis}, {total.direction}", f"{total.amount(group.count)} a call"
    for weight in group.weights:
        yield weight.name, f"{list(weight.shape)}, {weight.how}"
    if group.recomputed:
        yield "backward", "recomputes the calls" if not group.selective else "recomputes a part of the calls"


def _build_block_graph(plan: Plan, name: str) -> Json:
    """Return the graph of the operators of the block (such as a layer) of ``plan`` called ``name`` for Model Explorer.
    Operators are grouped by the path of their module."""
    block = plan.program.blocks[name]
    nodes = []
    for node in block.nodes:
        op = node["op"]
        label = _name_operator(str(node["target"])) if op == "call_function" else node["name"]
        shown = {"operator": str(node["target"])} if op == "call_function" else {"kind": _name_kind(block.states, node)}
        sources = dict.fromkeys(_iterate_sources([node.get("args", []), node.get("kwargs", {})]))
        nodes.append(
            {
                "id": node["name"],
                "label": label,
                "namespace": str(node.get("path", "")).replace(".", "/"),
                "subgraphIds": [],
                "attrs": _list_attributes(shown.items()),
                "incomingEdges": [
                    {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}
                    for place, source in enumerate(sources)
                ],
                "outputsMetadata": _describe_result(node.get("val")),
            }
        )
    return {"id": name, "nodes": nodes}


def _name_operator(target: str) -> str:
    """Return ``target``, the full name of an operator, without namespace and overload: ``mm`` for
    ``aten.mm.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else target


def _name_kind(states: tuple[str, ...] | list[str], node: Mapping[str, Any]) -> str:
    if node["op"] == "output":
        return "results of the block"
    return "parameter or buffer" if node["name"] in states else "input of the block"


def _iterate_sources(value: Any) -> Iterator[str]:
    """Yield the name of each graph node that occurs in ``value``, the arguments of another node."""
    if isinstance(value, Mapping):
        if isinstance(value.get("node"), str):
            yield value["node"]
        else:
            for entry in value.values():
                yield from _iterate_sources(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _iterate_sources(entry)


def _describe_result(value: Any) -> list[Json]:
    """Return what Model Explorer shows of a node's result: a list with one entry of the format's
    ``outputsMetadata``. ``value``: the pair (shape, name of the type) of the result; for anything else the list is
    empty.
    """
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], list | tuple):
        shape, kind = value
        return [{"id": "0", "attrs": _list_attributes([("shape", f"{kind}{[*shape]}")])}]
    return []


def _list_attributes(pairs: Any) -> list[Json]:
    return [{"key": key, "value": value} for key, value in pairs]


VIEWERS: Mapping[str, Callable[[Plan], tuple[Json, tuple[str, ...]]]] = {
    "perfetto": build_perfetto_trace,
    "model-explorer": build_model_explorer_graphs,
}
