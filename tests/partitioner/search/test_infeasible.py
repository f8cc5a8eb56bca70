"""Jobs that have no plan: the error says what conflicts or lacks, and its first suggestion gives the job a plan."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from partitioner import CapacityError, ConstraintError, Constraints, Plan, PlanError, partition
from partitioner.advise.suggest import _RelaxationSearch
from partitioner.advise.variants import Variant, pins_of
from partitioner.errors import InfeasibleError
from partitioner.plan import Estimate
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.solve.search import fit_memory
from tests.helpers.infeasible_jobs import Attends, Headed, Infeasible, Tower
from tests.helpers.small_clusters import MARGIN, MIB, cluster

pytestmark = pytest.mark.usefixtures("without_baselines")


JOBS: dict[str, Infeasible] = {
    # 4 MiB of states, 64 KiB for an activation of the whole batch
    "states: plain data parallelism": Infeasible(
        CapacityError, "dp=|tp=|pp=|zero=", cluster(3), pins={"pp": 1, "tp": 1, "zero": 0}
    ),
    "states: all of the mesh is pinned": Infeasible(
        CapacityError, "", cluster(3), pins={"pp": 1, "tp": 1, "dp": 4, "zero": 0}
    ),
    "states: one device": Infeasible(CapacityError, "2 nodes", cluster(3, 1)),
    "states: one node": Infeasible(CapacityError, "nodes instead of 1", cluster(0.75, 4)),
    "states: two nodes": Infeasible(CapacityError, "nodes instead of 2", cluster(0.8, 2, 2)),
    "states: tp is too small": Infeasible(
        CapacityError, "pp=2|tp=4|zero=", cluster(1.8, 4, 2), pins={"tp": 2, "pp": 1, "zero": 0}
    ),
    "states: too few stages": Infeasible(
        CapacityError, "pp=4|tp=|zero=", cluster(1.8), pins={"pp": 2, "tp": 1, "zero": 0}
    ),
    "states: nothing can be divided": Infeasible(
        CapacityError, r"zero=\d", cluster(0.23), 127, 4, {"zero": 0}, depth=1
    ),
    "activations: microbatch": Infeasible(
        CapacityError, "microbatch_size=", cluster(6, 1), batch=1024, pins={"microbatch_size": 1024}
    ),
    "activations: microbatch and mesh": Infeasible(
        CapacityError, "microbatch_size=", cluster(6), batch=4096,
        pins={"dp": 4, "microbatch_size": 1024, "tp": 1, "pp": 1},
    ),
    "activations: recompute": Infeasible(
        CapacityError, "recompute left free", cluster(12, 1), batch=1024,
        pins={"microbatch_size": 1024, "recompute": "none"},
    ),
    "activations: schedule": Infeasible(
        CapacityError, "recompute left free", cluster(4), batch=2048,
        pins={"pp": 4, "microbatch_size": 64, "schedule": "gpipe", "recompute": "none"},
    ),
    "offload: none is wanted": Infeasible(
        CapacityError, "offload=optimizer instead of none", cluster(3, 1, host=64), pins={"offload": "none"}
    ),
    "offload: too little of it": Infeasible(
        CapacityError, r"offload=optimizer\+activations", cluster(3, 1, host=64), pins={"offload": "activations"}
    ),
    "offload: the host is too small": Infeasible(
        CapacityError, "offload=none .*2 nodes", cluster(3, 1, host=1), pins={"offload": "optimizer"}
    ),
    "sharing: over no such ranks": Infeasible(PlanError, "dp_shard=4 instead of 3", pins={"dp_shard": 3}),
    "sharing: over too many ranks": Infeasible(PlanError, "dp_shard=4 instead of 8", pins={"dp_shard": 8}),
    "sharing: over too few ranks": Infeasible(
        CapacityError, "dp_shard=4 instead of 2", cluster(2.4), pins={"pp": 1, "tp": 1, "zero": 3, "dp_shard": 2}
    ),
    "idle: a schedule without a pipeline": Infeasible(
        ConstraintError, "schedule=1f1b", pins={"pp": 1, "schedule": "zb-v"}
    ),
    "idle: a way to share no sequence": Infeasible(
        ConstraintError, "context left free", pins={"cp": 1, "context": "ring"}
    ),
    "offload: of hosts that nobody described": Infeasible(
        ConstraintError, "offload=none instead of optimizer", cluster(64), pins={"offload": "optimizer"}
    ),
    "idle: levels of one node": Infeasible(
        ConstraintError, "hierarchical left free instead of True", cluster(64), pins={"hierarchical": True}
    ),
    "memory: a layer that no device holds": Infeasible(
        CapacityError, "times the memory on every device", cluster(0.2), width=251
    ),
    "memory: a layer that only groups over nodes hold": Infeasible(CapacityError, "nodes instead of 1", cluster(0.2)),
    "offload: parameters that are kept whole": Infeasible(
        ConstraintError, "zero=0 instead of 1", cluster(64, host=64), pins={"offload": "parameters", "zero": 1}
    ),
    "pins: an axis does not divide": Infeasible(ConstraintError, "pp=", pins={"pp": 3}),
    "pins: axes make too few": Infeasible(ConstraintError, "=", pins={"pp": 2, "dp": 1, "tp": 1}),
    "pins: axes make too many": Infeasible(ConstraintError, "=|8 devices", pins={"pp": 2, "dp": 2, "tp": 2}),
    "pins: tp divides nothing": Infeasible(ConstraintError, "tp=", cluster(64, 3), pins={"tp": 3}),
    "pins: cp does not divide": Infeasible(ConstraintError, "cp=", pins={"cp": 3}),
    "pins: more stages than calls": Infeasible(PlanError, "pp=", cluster(64, 8), pins={"pp": 8}),
    "pins: too many virtual stages": Infeasible(
        PlanError, "virtual_stages|pp=", pins={"pp": 2, "virtual_stages": 4, "schedule": "interleaved"}
    ),
    "pins: another number of virtual stages": Infeasible(
        ConstraintError, "virtual_stages|schedule=", pins={"pp": 2, "virtual_stages": 3, "schedule": "zb-v"}
    ),
    "pins: virtual stages of one stage": Infeasible(
        PlanError, "pp=2|virtual_stages=1", pins={"pp": 1, "virtual_stages": 2}
    ),
    "batch: dp does not divide": Infeasible(
        ConstraintError, "microbatch_size=3|global_batch=64", batch=63, pins={"dp": 4, "microbatch_size": 4}
    ),
    "batch: microbatch does not divide": Infeasible(
        ConstraintError, "microbatch_size=|global_batch=", pins={"dp": 2, "microbatch_size": 3}
    ),
    "batch: smaller than dp": Infeasible(ConstraintError, "dp=|global_batch=", batch=2, pins={"dp": 4}),
    "world: no mesh of a prime": Infeasible(PlanError, "devices|global_batch=", cluster(64, 7), batch=4),
    "world: far more devices than a sample keeps busy": Infeasible(
        PlanError, "global_batch=20", cluster(64, 4, 25), width=251, batch=1, depth=7
    ),
    "stage_of: no such module": Infeasible(ConstraintError, "layers.3", pins={"pp": 2, "stage_of": {"layer.3": -1}}),
    "stage_of: nothing like it": Infeasible(ConstraintError, "no stage_of", pins={"pp": 2, "stage_of": {"decoder": 0}}),
    "stage_of: many that are wrong": Infeasible(
        ConstraintError, "no stage_of", pins={"pp": 2, "stage_of": {f"decoder.{k}": 0 for k in range(12)}}
    ),
    "stage_of: no such stage": Infeasible(
        ConstraintError, r"=1 instead of 7", pins={"pp": 2, "stage_of": {"layers.3": 7}}
    ),
    "stage_of: against the order": Infeasible(
        ConstraintError, "no stage_of", pins={"pp": 2, "stage_of": {"layers.0": 1, "layers.3": 0}}
    ),
    "stage_of: an empty stage": Infeasible(PlanError, "no stage_of|pp=", pins={"pp": 2, "stage_of": {"layers.0": 1}}),
    "memory: a hundred times too little": Infeasible(
        CapacityError, "times the memory", cluster(0.01, 1), depth=6
    ),
    "offload: of hosts that nobody described, and too little memory": Infeasible(
        ConstraintError, "offload=none instead of optimizer, .* times the memory", cluster(0.1),
        pins={"offload": "optimizer", "zero": 0},
    ),
    "pins: an axis does not divide, and too little memory": Infeasible(
        ConstraintError, "tp=4 instead of 3, .* times the memory", cluster(0.1), pins={"tp": 3, "pp": 1}
    ),
    "shares: not as many as microbatches": Infeasible(
        ConstraintError, "data_shares left free", pins={"data_shares": (3, 2)}
    ),
    "shares: and offload to hosts that nobody described": Infeasible(
        ConstraintError, "data_shares left free .*, offload=none", pins={"data_shares": (3, 2), "offload": "optimizer"}
    ),
    "stage_of: every layer on a virtual stage, and a microbatch too large": Infeasible(
        CapacityError, "microbatch_size=|recompute left free", cluster(24), batch=2048, depth=48,
        pins={
            "pp": 4, "tp": 1, "dp": 1, "microbatch_size": 256, "schedule": "interleaved", "virtual_stages": 6,
            "recompute": "none", "zero": 0, "stage_of": {f"layers.{i}": i // 2 for i in range(48)},
        },
    ),
    "stage_of: a stage too full": Infeasible(
        CapacityError, "no stage_of|tp=|zero=", cluster(2.6),
        pins={"pp": 2, "tp": 1, "zero": 0, "stage_of": {"layers.2": 0}},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is to be the same on machines that are busy."""
    monkeypatch.setattr("partitioner.advise.suggest._LEAST_S", 600.0)


def test_no_longer_is_looked_for_changes_than_for_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tries of half a second so many as there is time for, and what they found is told."""
    tried, candidates = [], _RelaxationSearch._list_relaxed_candidates

    def slow(search: _RelaxationSearch, variant: Variant, pins: tuple[str, ...]) -> Any:
        tried.append(pins)
        time.sleep(0.5)
        return candidates(search, variant, pins)

    monkeypatch.setattr("partitioner.advise.suggest._LEAST_S", 0.0)
    monkeypatch.setattr(_RelaxationSearch, "_list_relaxed_candidates", slow)
    job, begun = JOBS["states: all of the mesh is pinned"], time.monotonic()
    with pytest.raises(CapacityError) as caught:
        job.plan(job.topology, Constraints(**job.pins))
    least = time.monotonic() - begun
    assert str(caught.value).startswith(caught.value.message)
    assert len(tried) <= 1 + least / 0.5
    several = len(tried)
    assert caught.value.advise is not None
    caught.value.advise.keywords["seconds"] = math.inf  # type: ignore[attr-defined]  # a partial
    caught.value.advise()
    assert len(tried) - several > several


@pytest.mark.parametrize("name", JOBS)
def test_the_first_change_gives_the_job_a_plan(name: str) -> None:
    job = JOBS[name]
    with pytest.raises(job.kind) as caught:
        job.plan(job.topology, Constraints(**job.pins))
    error = caught.value
    assert error.changes, str(error)
    Constraints(**error.changes[0].constraints.model_dump())  # is what a user could have written
    first = error.changes[0]
    assert re.search(job.gives_up, first.text), first.text
    assert first.text in str(error)
    plan = job.plan(first.topology, first.constraints, first.global_batch)
    assert set(first.planned_only) <= set(plan.planned_only)
    assert bool(plan.planned_only) == bool(first.planned_only)
    if isinstance(error, CapacityError):
        assert error.missing_bytes > 0
        assert "too much" in str(error)


@pytest.mark.parametrize(
    "name",
    ["states: all of the mesh is pinned", "activations: schedule", "batch: dp does not divide"],
)
def test_so_does_every_other_change(name: str) -> None:
    job = JOBS[name]
    with pytest.raises(InfeasibleError) as caught:
        job.plan(job.topology, Constraints(**job.pins))
    others = caught.value.changes[1:]
    assert others
    for change in others:
        assert job.plan(change.topology, change.constraints, change.global_batch).estimate.step_time > 0


@pytest.mark.parametrize("name", ["states: all of the mesh is pinned", "pins: cp does not divide"])
def test_where_the_tries_end_pins_are_left_free(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pins that are all wrong have more changes than can be tried."""
    monkeypatch.setattr("partitioner.advise.suggest._MOST_TRIED", 1)
    job = JOBS[name]
    with pytest.raises(InfeasibleError) as caught:
        job.plan(job.topology, Constraints(**job.pins))
    (change,) = caught.value.changes
    assert " instead of " in change.text
    assert job.plan(change.topology, change.constraints, change.global_batch).estimate.step_time > 0


def test_what_takes_more_than_all_pins_left_free_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found where pins are given up one after the other; without any it takes more memory."""
    small = cluster(0.2)
    job = Infeasible(CapacityError, "", small, width=251, pins={"pp": 2, "dp": 2, "zero": 0})
    monkeypatch.setattr(
        _RelaxationSearch, "_list_relaxed_candidates", _only_without_pins(_RelaxationSearch._list_relaxed_candidates)
    )
    with pytest.raises(CapacityError) as caught:
        job.plan(small, Constraints(**job.pins))
    (change,) = caught.value.changes
    assert re.match("pp=2, dp=2, zero=0 left free, .* times the memory", change.text)
    assert job.plan(change.topology, change.constraints).estimate.step_time > 0


def _only_without_pins(candidates: Callable[..., Any]) -> Callable[..., Any]:
    def found(search: _RelaxationSearch, variant: Variant, pins: tuple[str, ...]) -> Any:
        return [] if pins_of(variant.constraints) else candidates(search, variant, pins)

    return found


def test_more_devices_do_not_mend_what_contradicts_itself() -> None:
    job = JOBS["offload: parameters that are kept whole"]
    with pytest.raises(ConstraintError) as caught:
        job.plan(job.topology, Constraints(**job.pins))
    assert [change.text for change in caught.value.changes] == ["zero=0 instead of 1"]


def test_where_the_program_of_the_best_point_does_not_fit_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if programs under one stage of ZeRO took more than tables say: that is left free for no others."""
    told = fit_memory.replace_estimated_memory
    pins = Constraints(pp=1, dp=4, tp=1)

    def planned(pins: Constraints) -> Plan:
        with torch.device("meta"):
            model, tokens = Headed(512, 24, 30000), torch.empty(4, 128, dtype=torch.long)
            return partition(model, cluster(500), (tokens, tokens), constraints=pins)

    def more(estimate: Estimate, facts: ProgramFacts, *rest: Any) -> Estimate:
        found = told(estimate, facts, *rest)
        extra = 300 * MIB * (facts.program.zero == best.chosen.zero)
        return found.model_copy(update={"memory": tuple(m + extra for m in found.memory)})

    best = planned(pins)
    monkeypatch.setattr(fit_memory, "replace_estimated_memory", more)
    plan = planned(pins)
    assert plan.chosen.zero != best.chosen.zero and max(plan.estimate.memory) <= 500 * MIB
    alone = planned(pins.model_copy(update={"zero": plan.chosen.zero}))
    assert plan.estimate == alone.estimate
    assert plan.certificate.bound == pytest.approx(alone.certificate.bound)


def test_a_bound_holds_where_memory_had_to_be_left_free_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if programs that recompute nothing took more than tables say: what is left out then is no part of a proof."""
    told = fit_memory.replace_estimated_memory

    def more(estimate: Estimate, *rest: Any) -> Estimate:
        found = told(estimate, *rest)
        extra = 450 * MIB * (found.breakdown["recompute"] == 0)
        return found.model_copy(update={"memory": tuple(m + extra for m in found.memory)})

    pins = Constraints(pp=1, dp=4, tp=1, zero=0, microbatch_size=8192)
    with torch.device("meta"):
        model, x = Tower(1024, 8), torch.zeros(32768, 1024)
        best = partition(model, cluster(900), (x,), constraints=pins)
        monkeypatch.setattr(fit_memory, "_TURNS", 1)
        monkeypatch.setattr(fit_memory, "replace_estimated_memory", more)
        plan = partition(model, cluster(900), (x,), constraints=pins)
    assert best.certificate.gap == 0 and best.estimate.breakdown["recompute"] == 0
    assert plan.estimate.breakdown["recompute"] > 0 and max(plan.estimate.memory) <= 900 * MIB
    assert plan.certificate.bound == pytest.approx(best.estimate.step_time)
    assert plan.certificate.gap == pytest.approx(1 - best.estimate.step_time / plan.certificate.objective)


def test_host_memory_is_tried_where_some_points_lack_something_else_besides() -> None:
    """No device holds the states; of four stages the last cannot have the last layer as well as the head alone."""
    with torch.device("meta"):
        model, tokens = Headed(64, 2, 30000), torch.empty(8, 16, dtype=torch.long)
        constraints = Constraints(zero=3, stage_of={"layers.1": -1})
        plan = partition(model, cluster(8, 1, 4, host=200), (tokens, tokens), constraints=constraints)
    assert plan.offload


def test_the_pins_that_conflict_are_named() -> None:
    """What is not to blame is left out: here recomputation and the microbatch."""
    beside = {"recompute": "full", "microbatch_size": 1}
    job = Infeasible(PlanError, "", cluster(1.8), pins={"pp": 2, "tp": 1, "zero": 0, **beside})
    with pytest.raises(CapacityError) as caught:
        job.plan(job.topology, Constraints(**job.pins))
    assert caught.value.conflict == ("pp=2", "tp=1", "zero=0")
    assert "in conflict: pp=2, tp=1, zero=0" in str(caught.value)


CONFLICTS: dict[str, tuple[Infeasible, set[str]]] = {
    "host memory": (
        Infeasible(PlanError, "", cluster(3, host=64), pins={"pp": 1, "tp": 1, "zero": 0, "offload": "none"}),
        {"pp", "tp", "zero"},  # with the mesh fixed, offload left free is not tried either
    ),
    "host memory, and recomputation": (
        Infeasible(
            PlanError, "", cluster(12, 1, host=64), batch=1024,
            pins={"microbatch_size": 1024, "recompute": "none", "offload": "none"},
        ),
        {"microbatch_size", "recompute", "offload"},
    ),
    "ways to reduce": (
        Infeasible(PlanError, "", cluster(64, 2, 2), pins={"zero": 1, "hierarchical": True, "dp": 4}),
        {"zero", "hierarchical"},
    ),
    "ways to send": (
        Infeasible(PlanError, "", cluster(64), pins={"zero": 3, "grad_compression": "bf16", "recompute": "full"}),
        {"zero", "grad_compression"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_conflicts_is_a_least_set(name: str) -> None:
    """There is a plan as soon as any one of them is left free, of all that is fixed those alone."""
    job, conflict = CONFLICTS[name]
    with pytest.raises(InfeasibleError) as caught:
        job.plan(job.topology, Constraints(**job.pins))
    assert {text.partition("=")[0] for text in caught.value.conflict} == conflict
    assert all(text in str(caught.value) for text in caught.value.conflict)
    alone = {pin: given for pin, given in job.pins.items() if pin in conflict}
    with pytest.raises(InfeasibleError):
        job.plan(job.topology, Constraints(**alone))
    for pin in conflict:
        rest = {other: given for other, given in alone.items() if other != pin}
        assert job.plan(job.topology, Constraints(**rest)).estimate.step_time > 0


def test_what_inference_has_nothing_of_is_refused() -> None:
    with (
        torch.device("meta"),
        pytest.raises(ConstraintError, match="recompute=full is given, but the plan is for inference") as caught,
    ):
        partition(
            Tower(256, 4), cluster(64), (torch.empty(64, 256),), objective="infer",
            constraints=Constraints(recompute="full", pp=2),
        )  # fmt: skip
    assert [change.text for change in caught.value.changes] == ["recompute left free instead of full"]


def test_several_times_the_memory_is_that_of_the_device() -> None:
    """What is usable of it also depends on the mesh and the margin, and is what the message is about."""
    job = JOBS["memory: a hundred times too little"]
    with pytest.raises(CapacityError) as caught:
        job.plan(job.topology, Constraints())
    caught.value.suggest()
    (now,) = re.findall(r"times .* \([\d.]+ .iB instead of ([\d.]+) KiB", str(caught.value))
    assert float(now) == pytest.approx(10.24 / (1 - MARGIN), rel=1e-2)
    assert "usable instead" not in str(caught.value)


def test_changes_may_need_host_memory_as_plans_do() -> None:
    """Four layers of 1 MiB with their states, on devices of 3 MiB each: what dp=1 needs is in host memory in part."""
    job = Infeasible(PlanError, "dp=", cluster(3, 1, host=64), pins={"dp": 3})
    with pytest.raises(InfeasibleError) as raised:
        job.plan(job.topology, Constraints(dp=3))
    change = raised.value.changes[0]
    assert re.fullmatch(r"dp=1 instead of 3 \(with offload=optimizer a step then takes \d+ µs\)", change.text)
    assert job.plan(change.topology, change.constraints, change.global_batch).offload == ("optimizer",)


def test_the_nearest_values_that_have_no_plan_do_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a nearer value no candidate fits, though bounds allow many: as when its hosts lack memory."""
    job = Infeasible(CapacityError, "", cluster(3), pins={"dp": 4, "zero": 0})
    planned = _RelaxationSearch._plan_relaxed_candidate
    monkeypatch.setattr(
        _RelaxationSearch,
        "_plan_relaxed_candidate",
        lambda self, *asked: planned(self, *asked) if asked[-1].dp != 2 else None,
    )
    with pytest.raises(CapacityError) as caught:
        job.plan(job.topology, Constraints(**job.pins))
    assert "dp=1 instead of 4" in [change.text for change in caught.value.changes]


@pytest.mark.parametrize(("asked", "nearest"), [({"cp": 3}, "cp=4 instead of 3"), ({"tp": 12}, "tp=16 instead of 12")])
def test_who_asks_for_an_axis_is_told_what_is_tried_for_those_who_ask(asked: dict[str, int], nearest: str) -> None:
    """The search itself shares no sequence of 128 tokens, and has no groups of more than eight ranks."""
    topology = cluster(64, 8) if "cp" in asked else cluster(64, 4, nodes=4)

    def plan(**pins: Any) -> Plan:
        with torch.device("meta"):
            return partition(Attends(64), topology, (torch.empty(16, 128, 64),), constraints=Constraints(**pins))

    with pytest.raises(ConstraintError) as caught:
        plan(**asked)
    assert caught.value.changes[0].text == nearest
    axis, size = nearest.split(" ")[0].split("=")
    assert plan(**{axis: int(size)}).mesh[axis] == int(size)


def test_of_too_many_virtual_stages_the_nearest_number_is_told() -> None:
    """Four layers and what is around them cannot be 2 x 9 stages, but 2 x 2."""
    job = Infeasible(PlanError, "v=9", cluster(64), pins={"pp": 2, "virtual_stages": 9})
    with pytest.raises(InfeasibleError) as raised:
        job.plan(job.topology, Constraints(**job.pins))
    change = raised.value.changes[0]
    assert change.text == "virtual_stages=2 instead of 9"
    assert job.plan(change.topology, change.constraints, change.global_batch).chosen.virtual_stages == 2


def test_errors_of_no_job_have_no_changes() -> None:
    with pytest.raises(ConstraintError) as caught:
        Constraints(tp=0)
    assert (caught.value.changes, caught.value.conflict) == ((), ())
