"""Plans of several batch shapes share captures, graphs and a forked process. They equal plans that share nothing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import partitioner.programs.further as further
import partitioner.programs.shapes as shapes
from partitioner import Constraints, Plan, Shapes, Topology, partition
from partitioner.passes.ir.model import FoldedModel
from partitioner.passes.padding.resize import JointShapes
from partitioner.runtime.program import analysis
from tests.helpers.models import CASES, SEQ, Case, float64
from tests.helpers.shape_training import writer, written

pytestmark = pytest.mark.usefixtures("without_baselines")

LENGTHS = (8, 10, 12, 14, 16)
MESHES = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2 zero3": {"dp": 2, "zero": 3}, "cp2": {"cp": 2}}


WRITER = Case("writer", writer, lambda samples: written(samples, SEQ))  # two layers of a plain decoder


def plan_lengths(family: str, mesh: str, fused: bool) -> Plan:
    case = WRITER if family == "writer" else CASES[family]
    axes: dict[str, Any] = dict.fromkeys(("pp", "dp", "tp", "cp"), 1) | {"zero": 0} | MESHES[mesh]
    cluster = Topology.preset("dgx-h100", nodes=1) if fused else Topology.local(2)
    if fused:
        axes["dp"] *= 4
    with nullcontext() if fused else float64():
        return partition(
            case.build() if fused else case.build().double(),
            cluster,
            dict(case.inputs(8)),
            constraints=Constraints(**axes),
            precision="bf16" if fused else "fp64",
            shapes=Shapes(length=LENGTHS),
        )


def forget() -> None:
    """Forget the graphs that were differentiated for earlier plans."""
    for cached in (analysis._derive_joint_graph, analysis._differentiate_block):
        cached.cache_clear()
    analysis._JOINT_SHAPES = JointShapes()


def check_equal_plans(family: str, mesh: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Check that the plan of five lengths is the same if nothing is derived or forked. Return how many graphs of
    forward and backward were derived in this process."""
    derived: list[object] = []
    resize = analysis.JointShapes.find

    def find(self: JointShapes, nodes: str, key: Any, trace: Any, parse: Any) -> Any:
        traced: list[Any] = []
        found = resize(self, nodes, key, lambda: traced.append(trace()) or traced[0], parse)
        derived.extend([] if traced else [found])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(JointShapes, "find", find)
        forget()
        shared = plan_lengths(family, mesh, fused)
    with monkeypatch.context() as patch:
        patch.setattr(JointShapes, "find", lambda _, nodes, key, trace, parse: trace())
        patch.setattr(shapes, "resize_folded", lambda *_: None)
        patch.setattr(shapes, "can_help", lambda: False)
        patch.setattr(further, "can_help", lambda: False)
        forget()
        apart = plan_lengths(family, mesh, fused)
    forget()
    assert shared.further.keys() == apart.further.keys()
    for name, program in apart.further.items():
        assert shared.further[name].model_dump_json() == program.model_dump_json(), name
    assert shared.padding == apart.padding
    assert shared.program == apart.program
    return len(derived)


@pytest.mark.parametrize(
    ("family", "mesh"), [("writer", "tp2"), ("llama", "tp2"), ("t5", "pp2"), ("gpt2", "dp2 zero3")]
)
def test_plans_equal_those_that_share_nothing(family: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_equal_plans(family, mesh, False, monkeypatch) > 0


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", sorted(CASES))
def test_plans_of_all_families_equal_those_that_share_nothing(
    family: str, mesh: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        plan_lengths(family, mesh, fused)
    except ValueError as error:
        pytest.skip(str(error))
    check_equal_plans(family, mesh, fused, monkeypatch)


def test_folded_model_of_another_size_is_that_of_a_capture() -> None:
    """Derived blocks have the operators, sizes and marks of the blocks of a capture at that length."""
    case = CASES["llama"]
    with float64():
        model = case.build().double()
        prepared = shapes.PreparedModel(model, dict(case.inputs(8)), precision="fp64")
        family = shapes.ShapeFamily.of(prepared, Shapes(length=LENGTHS), None, Topology.local(2))
        derived = family.prepared_at((8, 12)).at(None, None, "cpu")[0]
        captured = shapes.ShapeFamily.of(prepared, Shapes(length=(12,)), None, Topology.local(2))
        expected = captured.prepared_at((8, 12)).at(None, None, "cpu")[0]
    assert family._derive_folded((8, 12)) is not None
    assert describe(derived) == describe(expected)


def describe(model: FoldedModel) -> list[Any]:
    nodes = [(name, *describe_node(node)) for name, block in model.blocks.items() for node in block.graph.nodes]
    return [nodes, model.calls, model.inputs, model.outputs, model.states, model.values, model.updates, model.loss]


def describe_node(node: torch.fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    size = tuple(value.shape) if isinstance(value, torch.Tensor) else value
    texts = str(node.target), str(node.args), str(node.kwargs)
    return node.op, node.name, *texts, size, node.meta.get("grad"), node.meta.get("path")
