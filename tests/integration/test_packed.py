"""Packed documents: every notation of the mask becomes one operator, and ranks compute what documents give alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

import partitioner
from partitioner import Constraints, Plan, Topology, partition
from partitioner.plans.verify import TOLERANCE
from tests.helpers.packed_models import (
    LENGTHS,
    NOTATIONS,
    ROW,
    PackedDecoder,
    list_packings,
    make_documents,
    pack,
    run_alone,
)

pytestmark = pytest.mark.usefixtures("without_baselines")

DOCUMENTS = make_documents()
PACKINGS = list_packings(LENGTHS, 12)


@pytest.fixture(scope="module")
def ranks() -> Iterator[partitioner.LocalRanks]:
    with partitioner.LocalRanks(4) as pool:
        yield pool


def plan_of(model: PackedDecoder, **fixed: Any) -> Plan:
    fixed = {"pp": 1, "dp": 1, "tp": 1, "cp": 1, **fixed}
    size = fixed["pp"] * fixed["dp"] * fixed["tp"] * fixed["cp"]
    plan = partition(model, Topology.local(size), pack(DOCUMENTS, PACKINGS[0]), constraints=Constraints(**fixed))
    assert plan.planned_only == ()
    return plan


def targets_of(plan: Plan) -> set[str]:
    return {str(n.get("target")) for b in plan.program.blocks.values() for n in b.nodes}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).abs().max() / (1 + expected[n].abs().max())) for n in found)


def check_packing(run: Any, model: PackedDecoder, order: list[int]) -> None:
    loss, logits, gradients = run_alone(model, DOCUMENTS, order)
    outputs = {"loss": loss, "logits": logits}
    assert worst({n: run.outputs[n].detach() for n in outputs}, outputs) <= TOLERANCE
    assert worst(run.grads, gradients) <= TOLERANCE


MESHES: list[dict[str, Any]] = [
    dict(tp=2),
    dict(pp=2, microbatch_size=1),
    dict(dp=2),
    dict(cp=2, context="ring"),
    dict(cp=2, context="all_gather"),
    dict(cp=2, context="ulysses"),
    dict(cp=2, tp=2, context="ring"),
    dict(cp=2, pp=2, context="all_gather", microbatch_size=1),
]


def _name(value: Any) -> str:
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("fixed", MESHES, ids=_name)
@pytest.mark.parametrize("name", ["boolean", "restarted_window"])
def test_ranks_give_what_documents_give_alone(name: str, fixed: dict[str, Any], ranks: partitioner.LocalRanks):
    """One plan for all packings of the same documents, because documents are data."""
    model = PackedDecoder(name)
    plan = plan_of(model, **fixed)
    context = "context_" if fixed.get("context") in ("ring", "all_gather") else ""
    assert f"partition.{context}document_attention.default" in targets_of(plan)
    for order in PACKINGS if name == "boolean" else PACKINGS[:3]:
        run = partitioner.run_local(plan, model, pack(DOCUMENTS, order), ranks=ranks, timeout=120)
        check_packing(run, model, order)


@pytest.mark.parametrize("name", NOTATIONS)
def test_no_notation_leaves_a_mask(name: str):
    model = PackedDecoder(name)
    plan = plan_of(model)
    assert "partition.document_attention.default" in targets_of(plan)
    shapes = [
        tuple(n["val"][0]) for b in plan.program.blocks.values() for n in b.nodes if isinstance(n.get("val"), list)
    ]
    assert shapes and not any(s[-2:] == (ROW, ROW) for s in shapes)
    for order in PACKINGS[:2]:
        check_packing(partitioner.run_threads(plan, model, pack(DOCUMENTS, order)), model, order)


def test_the_plan_is_verified_beside_the_model():
    model = PackedDecoder("boolean")
    report = plan_of(model, tp=2).verify(model, pack(DOCUMENTS, PACKINGS[1]))
    assert report.ok, str(report)
