"""The layouts that every report has: always there, with what they cost or why they do not fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from partitioner import CapacityError, Constraints, Plan, partition
from partitioner.plan import Baseline
from tests.helpers.experts_zoo import plain as experts
from tests.helpers.experts_zoo import plain_inputs as expert_inputs
from tests.helpers.infeasible_jobs import Tower
from tests.helpers.small_clusters import cluster

NAMES = ["Plain data parallelism", "ZeRO-3", "Megatron's layout"]


def planned(memory: float = 64, batch: int = 64, host: float | None = None, **pins: Any) -> Plan:
    with torch.device("meta"):
        inputs = (torch.empty(batch, 256),)
        return partition(Tower(256, 4), cluster(memory, host=host), inputs, constraints=Constraints(**pins))


def by_name(plan: Plan) -> dict[str, Baseline]:
    return {b.name: b for b in plan.certificate.baselines}


@pytest.mark.parametrize("pins", [{}, {"pp": 2}, {"tp": 1}, {"dp": 4}, {"ahead": True}, {"zero": 3, "dp": 4}])
def test_they_are_there_whatever_is_fixed(pins: dict[str, Any]):
    plan = planned(**pins)
    found = by_name(plan)
    assert list(found) == NAMES
    for baseline in found.values():
        assert baseline.candidate is not None
        assert baseline.candidate.step_time is not None
        assert f"{baseline.name} (" in plan.explain()
    meshes = [b.candidate.mesh for b in found.values() if b.candidate is not None]
    assert [m["dp"] for m in meshes[:2]] == [4, 4]
    assert all(m["pp"] * m["dp"] * m["tp"] == 4 for m in meshes)


def test_those_that_are_no_candidates_say_why():
    assert [b.excluded for b in by_name(planned()).values()] == ["", "", ""]
    assert by_name(planned(pp=2))[NAMES[0]].excluded == "excluded by the constraints"
    assert by_name(planned(zero=3, dp=4))[NAMES[1]].excluded == ""


def test_what_does_not_fit_says_how_much_it_lacks():
    plain = by_name(planned(memory=3))[NAMES[0]]
    assert plain.candidate is not None
    assert plain.candidate.status == "infeasible"
    assert "too much" in plain.candidate.reason
    assert plain.candidate.missing is not None
    assert plain.candidate.missing > 0


def test_a_smaller_microbatch_is_tried_before_that_is_said():
    """4.1 MiB are states; the best microbatch by its bound is the largest, and does not fit."""
    found = planned(memory=6, batch=4096)
    plain = by_name(found)[NAMES[0]].candidate
    assert plain is not None
    assert plain.step_time is not None
    assert plain.microbatch_size < 1024
    with pytest.raises(CapacityError):
        planned(memory=6, batch=4096, dp=4, microbatch_size=1024)


def test_a_batch_that_does_not_split_is_told():
    plain = by_name(planned(batch=3))[NAMES[0]]
    assert (plain.candidate, plain.excluded) == (None, "the global batch of 3 is not divisible by dp=4")


def test_what_cannot_be_trained_is_not_sharded():
    with torch.device("meta"):
        plan = partition(Tower(256, 4), cluster(64), (torch.empty(8, 256),), objective="infer")
    assert list(by_name(plan)) == [NAMES[0], NAMES[2]]


@pytest.mark.parametrize("pins", [{"pp": 1, "zero": 0, "tp": 1}, {"zero": 0, "dp": 4}])
def test_they_are_as_they_would_be_tried_first_where_the_plan_needs_host_memory(pins: dict[str, Any]):
    """Of 3 MiB plain data parallelism lacks one; what shares states fits without host memory, and is faster."""
    plan = planned(memory=3, host=64, offload="optimizer", **pins)
    assert plan.offload == ("optimizer",)
    plain, sharded, megatron = by_name(plan).values()
    assert plain.offload == ("optimizer",)
    told = " ".join(plan.explain().split())
    assert re.search(
        r"Plain data parallelism \(dp 4, microbatch of \d+ samples?, with optimizer in host memory\): this is the", told
    )
    fitting = by_name(planned(memory=3))
    for found in (sharded, megatron):
        assert (found.offload, found.excluded) == ((), "excluded by the constraints")
        alone = fitting[found.name].candidate
        assert found.candidate is not None and alone is not None
        assert (found.candidate.mesh, found.candidate.step_time) == (alone.mesh, alone.step_time)


def test_what_does_not_fit_even_with_host_memory_is_marked():
    plan = planned(memory=0.8, host=64, batch=8)
    found = by_name(plan)[NAMES[1]]
    assert found.candidate is not None and found.candidate.step_time is None
    assert found.offload == plan.offload != ()
    assert f"with {' and '.join(plan.offload)} in host memory): does not fit in memory (stage" in " ".join(
        plan.explain().split()
    )


def test_where_experts_are_spread_nothing_is_plain():
    plan = partition(experts(), cluster(64), expert_inputs(8), constraints=Constraints(ep=4))
    plain = by_name(plan)[NAMES[0]]
    assert plain.candidate is not None
    assert (plain.candidate.mesh["dp"], plain.candidate.mesh["ep"]) == (4, 1)
    assert plain.excluded == "excluded by the constraints"


MEMBERS: list[dict[str, Any]] = [
    {"tp": 4, "pp": 1, "zero": 0}, {"tp": 4, "pp": 2, "zero": 0, "schedule": "1f1b"},
    {"tp": 2, "pp": 2, "zero": 1, "schedule": "1f1b"}, {"tp": 1, "pp": 4, "zero": 1, "schedule": "1f1b"},
    {"tp": 1, "pp": 4, "zero": 1, "schedule": "interleaved"}, {"tp": 1, "pp": 1, "zero": 1},
]  # fmt: skip


@pytest.mark.parametrize("memory", [2.2, 64])
def test_of_a_family_the_best_is_shown(memory: float):
    """As an expert would run it: Megatron's layouts have tp inside a node, stages under 1F1B or interleaved, and
    optimizer states sharded or not; none of those that fit is faster. The widest tp, the textbook's, is far slower."""

    def planned(**pins: Any) -> Plan:
        with torch.device("meta"):
            model, inputs = Tower(256, 8), (torch.empty(512, 256),)
            return partition(model, cluster(memory, 4, 2), inputs, constraints=Constraints(**pins), estimate_only=only)

    only = False
    best = by_name(planned())[NAMES[2]].candidate
    only = True
    assert best is not None and best.step_time is not None
    assert best.zero <= 1 and best.mesh["tp"] <= 4 and best.schedule in ("1f1b", "interleaved")
    seconds = []
    for pins in MEMBERS:
        try:
            seconds.append(planned(**pins).estimate.step_time)
        except CapacityError:
            continue
    assert seconds
    assert best.step_time <= 1.02 * min(seconds)
    assert best.step_time < 0.8 * max(seconds)


def test_the_plan_is_the_best_of_its_family():
    plan = planned()
    kind = NAMES[1] if plan.chosen.zero == 3 else NAMES[2]
    if plan.chosen.zero in (0, 1) and plan.schedule in ("1f1b", "interleaved"):
        assert by_name(plan)[kind].candidate == plan.chosen
    for baseline in plan.certificate.baselines:
        assert baseline.candidate is not None
        assert (baseline.candidate.step_time or 0.0) >= plan.estimate.step_time * (1 - 1e-9)
