"""Plans as files for Perfetto and Model Explorer: what is in them, and their size."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from partitioner import LayoutError, Plan
from partitioner.cli.app import app
from partitioner.report.viewers import MOST_BYTES
from partitioner.simulate.program_time import plan_timeline
from tests.helpers.sample_programs import llama, plan_of

# fields of Model Explorer's ``graph_builder.py``: what its server sends to the page
GRAPH = {"id", "nodes", "groupNodeAttributes"}
NODE = {"id", "label", "namespace", "subgraphIds", "attrs", "incomingEdges", "outputsMetadata"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(llama(pp=4, dp=2, tp=2, layers=8, tied=True, skip=True))


@pytest.fixture(scope="module")
def huge() -> Plan:
    """Of 16,384 ranks, with 256 microbatches in a pipeline of 16 stages."""
    return plan_of(llama(pp=16, dp=128, tp=8, layers=32, microbatches=256))


def export(plan: Plan, format: str, folder: Path) -> tuple[Any, tuple[Any, ...]]:
    path = folder / "plan.json"
    left_out = plan.export(format, path)
    assert path.stat().st_size < MOST_BYTES
    return json.loads(path.read_text()), left_out


def test_a_trace_has_the_instructions_of_the_simulated_step(plan: Plan, tmp_path: Path):
    trace, left_out = export(plan, "perfetto", tmp_path)
    assert left_out == () and trace["otherData"]["ranks"] == 16
    timeline = plan_timeline(plan)
    for stage, lane in enumerate(timeline.stages):
        mine = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["args"]["stage"] == stage and e["tid"] == 0]
        expected = [s for s in lane.spans if s.end > s.start]
        assert [e["name"] for e in mine] == [str(s.instruction) for s in sorted(expected, key=lambda s: s.start)]
        last = max(e["ts"] + e["dur"] for e in mine)
        assert last == pytest.approx(max(s.end for s in expected) * 1e6)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"stage {i} of 4, 4 ranks alike (predicted)" for i in range(4)]
    starts = [e["id"] for e in trace["traceEvents"] if e["ph"] == "s"]
    assert starts and sorted(starts) == sorted(e["id"] for e in trace["traceEvents"] if e["ph"] == "f")


def test_a_large_trace_says_what_is_left_out(huge: Plan, tmp_path: Path):
    trace, left_out = export(huge, "perfetto", tmp_path)
    assert [*left_out] == trace["otherData"]["left_out"] and len(left_out) == 1
    assert "events are left out: those that start after" in left_out[0]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names[0] == "stage 0 of 16, 1,024 ranks alike (predicted)" and len(names) == 16
    assert {e["pid"] for e in trace["traceEvents"] if e["ph"] == "X"} == {e["pid"] for e in trace["traceEvents"]}


def check_graphs(found: Any) -> None:
    """Every edge, subgraph and layer names something that exists."""
    assert found.keys() == {"label", "graphs"}
    names = [graph["id"] for graph in found["graphs"]]
    assert len(set(names)) == len(names)
    for graph in found["graphs"]:
        assert graph.keys() <= GRAPH
        ids = [node["id"] for node in graph["nodes"]]
        assert len(set(ids)) == len(ids)
        layers = {""} | {"/".join(n["namespace"].split("/")[:k]) for n in graph["nodes"] for k in range(1, 9)}
        assert set(graph.get("groupNodeAttributes", {})) <= layers
        for node in graph["nodes"]:
            assert node.keys() == NODE
            assert {edge["sourceNodeId"] for edge in node["incomingEdges"]} <= {*ids}
            assert {*node["subgraphIds"]} <= {*names}
            assert all(isinstance(a["key"], str) and isinstance(a["value"], str) for a in node["attrs"])


def test_graphs_have_stages_and_the_operators_of_each_block(plan: Plan, tmp_path: Path):
    found, left_out = export(plan, "model-explorer", tmp_path)
    assert left_out == ()
    check_graphs(found)
    stages, *blocks = found["graphs"]
    assert {block["id"] for block in blocks} == {*plan.program.blocks}
    assert {node["namespace"] for node in stages["nodes"]} == {f"stage {i}" for i in range(4)}
    layers = next(node for node in stages["nodes"] if node["label"] == "2 × DecoderLayer")
    assert layers["subgraphIds"] == ["DecoderLayer"] and layers["incomingEdges"]
    attributes = {a["key"]: a["value"] for a in layers["attrs"]}
    assert attributes["reduce_scatter over tp, forward"] == "2 × 32 MiB a call"
    for block in blocks:
        nodes = plan.program.blocks[block["id"]].nodes
        assert [node["id"] for node in block["nodes"]] == [node["name"] for node in nodes]


def test_graphs_of_a_large_plan_are_small(huge: Plan, tmp_path: Path):
    found, left_out = export(huge, "model-explorer", tmp_path)
    check_graphs(found)
    assert left_out == () and found["graphs"][0]["groupNodeAttributes"][""]["ranks"] == "16,384"


def test_blocks_that_make_a_file_too_large_are_left_out(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("partitioner.report.viewers.MOST_BYTES", 110_000)
    found, left_out = export(plan, "model-explorer", tmp_path)
    check_graphs(found)
    assert len(found["graphs"]) < 1 + len(plan.program.blocks)
    assert "left out: " in left_out[0]


def read_dataclass(kind: Any, value: Any) -> Any:
    """``value`` as the dataclass ``kind``, whose fields it may leave out but not exceed."""
    if isinstance(value, list):
        return [read_dataclass(kind, entry) for entry in value]
    hints = get_type_hints(kind, vars(sys.modules[kind.__module__]))
    fields = {}
    for name, entry in value.items():
        inner = [t for t in (*get_args(hints[name]), hints[name]) if dataclasses.is_dataclass(t)]
        fields[name] = read_dataclass(inner[0], entry) if inner and not isinstance(entry, str) else entry
    return kind(**fields)


def test_graphs_are_those_of_the_real_package(plan: Plan, tmp_path: Path):
    """The data classes of ``graph_builder.py``, which Model Explorer's adapters return, take every field."""
    found = importlib.util.find_spec("model_explorer")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("needs the package ai-edge-model-explorer: run make integrations")
    spec = importlib.util.spec_from_file_location(
        "graph_builder", f"{found.submodule_search_locations[0]}/graph_builder.py"
    )
    assert spec is not None and spec.loader is not None
    builder = sys.modules["graph_builder"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    graphs = export(plan, "model-explorer", tmp_path)[0]
    collection = read_dataclass(builder.GraphCollection, graphs)
    assert dataclasses.asdict(collection)["label"] == graphs["label"]
    assert [graph.id for graph in collection.graphs] == [graph["id"] for graph in graphs["graphs"]]


def test_the_command_line_writes_both(plan: Plan, tmp_path: Path):
    path = tmp_path / "plan.json"
    plan.save(path)
    for format in ("perfetto", "model-explorer"):
        out = tmp_path / f"{format}.json"
        done = CliRunner().invoke(app, ["export", str(path), format, str(out)])
        assert done.exit_code == 0, done.output
        assert "does not have" not in done.output and json.loads(out.read_text())


def test_an_unknown_format_is_told_with_the_viewers(plan: Plan, tmp_path: Path):
    with pytest.raises(LayoutError, match=r"did you mean perfetto.*torchtitan.*perfetto, model-explorer"):
        plan.export("perfeto", tmp_path / "trace.json")
    assert not [*tmp_path.iterdir()]
