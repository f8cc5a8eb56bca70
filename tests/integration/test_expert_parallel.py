"""Experts over ranks: the same outputs, loss and gradients, whatever the routing."""

from __future__ import annotations

import logging
from functools import cache

import pytest

from partitioner import Constraints, Plan, Topology, partition
from tests.helpers.experts_zoo import FAMILIES, ROUTINGS, build, chosen_experts, force, inputs

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("without_baselines")

# name -> (ranks, what is fixed). ``ep`` ranks are ranks of dp x tp; ``etp=1``: those along tp have other experts.
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "ep2": (2, dict(ep=2, dp=2, tp=1, pp=1)),
    "ep4-dp4": (4, dict(ep=4, dp=4, tp=1, pp=1)),
    "ep2-dp4": (4, dict(ep=2, dp=4, tp=1, pp=1, microbatch_size=1)),
    "ep2-tp2": (4, dict(ep=2, dp=2, tp=2, pp=1)),
    "ep2-tp2-etp1": (4, dict(ep=2, etp=1, dp=2, tp=2, pp=1)),
    "ep4-tp2-etp1": (4, dict(ep=4, etp=1, dp=2, tp=2, pp=1)),
    "ep2-cp2": (2, dict(ep=2, cp=2, dp=1, tp=1, pp=1)),
    "ep2-pp2": (4, dict(ep=2, dp=2, tp=1, pp=2, microbatch_size=2)),
}
SAMPLE = [
    ("mixtral", "ep2"),
    ("gpt_oss", "ep4-tp2-etp1"),
    ("llama4_text", "ep2-pp2"),
    ("qwen3_moe", "ep2-tp2"),
    ("mixtral", "ep2-cp2"),
]
QUICK = ("random", "one")
FIRST = [(family, mesh, QUICK[i % 2]) for i, (family, mesh) in enumerate(SAMPLE)]
ALL = [
    (family, mesh, routing)
    for family in FAMILIES
    for mesh in MESHES
    for routing in ROUTINGS
    if (family, mesh, routing) not in FIRST
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)


@cache
def planned(family: str, mesh: str, implementation: str = "grouped_mm") -> Plan:
    """Weights do not matter to a plan: one serves all routings."""
    ranks, pinned = MESHES[mesh]
    model = build(family, implementation)
    return partition(model, Topology.local(ranks), inputs(), constraints=Constraints(**pinned))


def check(family: str, mesh: str, routing: str) -> None:
    plan = planned(family, mesh)
    assert plan.planned_only == () and plan.mesh["ep"] == MESHES[mesh][1]["ep"]
    model = build(family)
    force(model, family, routing)
    report = plan.verify(model, inputs())
    assert report.ok, str(report)


@pytest.mark.all_cases
@pytest.mark.parametrize(("family", "mesh", "routing"), FIRST)
def test_equal_to_the_model(family: str, mesh: str, routing: str):
    check(family, mesh, routing)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh", "routing"), ALL)
def test_every_family_on_every_mesh(family: str, mesh: str, routing: str):
    check(family, mesh, routing)


@pytest.mark.parametrize("family", FAMILIES)
def test_routing_is_what_it_is_called(family: str):
    num_experts = FAMILIES[family][0]
    for routing in ROUTINGS[1:]:
        model = build(family)
        force(model, family, routing)
        for counts in chosen_experts(model, family, inputs()):
            if routing == "one":
                assert counts[0] == counts.max() and (counts > 0).sum() <= 2
            elif routing == "empty":
                assert counts[-2:].sum() == 0
            else:
                assert counts.min() > 0
            assert len(counts) == num_experts
