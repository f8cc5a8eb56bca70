"""Every schedule computes what the unmodified model does: tied weights, long edges, uneven stages, any microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

import partitioner
from partitioner import Constraints, Plan, Topology, partition, run_reference
from tests.helpers.models import CASES
from tests.helpers.reference_match import close

pytestmark = pytest.mark.usefixtures("without_baselines")

KINDS = [
    ("interleaved", 1),
    ("interleaved", 2),
    ("zb-1p", 1),
    ("zb-1p", 2),
    ("zb-2p", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]
MODELS = ["gpt2", "t5", "skip-mlp"]  # tied weights; the encoder's output, read by every decoder layer; values far ahead
BATCHES = [(8, 1), (6, 2), (5, 1), (2, 1)]  # samples, and those of a microbatch: 8, 3, 5 and 2 microbatches
EVERY = [
    (model, kind, pp, batch, recompute)
    for model, kind, pp, batch, recompute in product(MODELS, KINDS, (2, 4), BATCHES, ("none", "full"))
]
SAMPLE = [
    (MODELS[i % 3], kind, (2, 4)[(i + j) % 2], BATCHES[(i + 2 * j) % 4], ("none", "full")[(i // 2 + j) % 2])
    for i, kind in enumerate(KINDS)
    for j in (0, 1)
]
Case = tuple[str, tuple[str, int], int, tuple[int, int], str]


@pytest.fixture(scope="module")
def ranks() -> Iterator[partitioner.LocalRanks]:
    with partitioner.LocalRanks(4) as pool:
        yield pool


def planned(case: Case, **more: Any) -> tuple[Plan, Any, Any]:
    name, (schedule, chunks), pp, (batch, size), recompute = case
    model, inputs = CASES[name].build(), CASES[name].inputs(batch)
    constraints = Constraints(
        pp=pp, dp=1, tp=1, schedule=schedule, virtual_stages=chunks, microbatch_size=size, recompute=recompute, **more
    )
    plan = partition(model, Topology.local(pp), inputs, loss=CASES[name].loss, constraints=constraints)
    assert (plan.schedule, plan.chosen.virtual_stages, plan.num_microbatches) == (schedule, chunks, batch // size)
    return plan, model, inputs


def shown(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.all_cases
@pytest.mark.parametrize(("model", "kind", "pp", "batch", "recompute"), SAMPLE, ids=shown)
def test_schedules_compute_what_the_model_computes(
    model: str, kind: tuple[str, int], pp: int, batch: tuple[int, int], recompute: str
):
    plan, module, inputs = planned((model, kind, pp, batch, recompute))
    found = plan.verify(module, inputs, CASES[model].loss)
    assert found.ok, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind", "pp", "batch", "recompute"), [c for c in EVERY if c not in SAMPLE], ids=shown
)
def test_every_schedule_and_model(model: str, kind: tuple[str, int], pp: int, batch: tuple[int, int], recompute: str):
    plan, module, inputs = planned((model, kind, pp, batch, recompute))
    found = plan.verify(module, inputs, CASES[model].loss)
    assert found.ok, found


@pytest.mark.parametrize(
    ("model", "kind", "pp"),
    [("gpt2", ("zb-v", 2), 2), ("skip-mlp", ("interleaved", 2), 4), ("t5", ("zb-1p", 2), 2)],
    ids=shown,
)
def test_processes_compute_what_the_model_computes(
    model: str, kind: tuple[str, int], pp: int, ranks: partitioner.LocalRanks
):
    plan, module, inputs = planned((model, kind, pp, (5, 1), "none"))
    run = partitioner.run_local(plan, module, inputs, precision="fp64", ranks=ranks, timeout=240)
    close(plan, run, run_reference(module, inputs, CASES[model].loss))


def test_stages_may_be_uneven():
    case: Case = ("gpt2", ("zb-v", 2), 2, (5, 1), "none")
    plan, model, inputs = planned(case, stage_of={"transformer.h.2": 0, "transformer.h.3": 1})
    assert [sum(c.path.startswith("transformer.h.") for c in s.calls) for s in plan.program.stages] == [3, 1]
    assert plan.verify(model, inputs).ok


def test_the_last_rank_passes_values_on_to_itself():
    plan, _, _ = planned(("skip-mlp", ("zb-v", 2), 2, (8, 1), "none"))
    peers = {
        (s, i.peer) for s, stage in enumerate(plan.program.stages) for i in stage.instructions if i.peer is not None
    }
    assert peers == {(0, 1), (1, 0)}
    forward = [sum(i.op == "SEND_F" for i in stage.instructions) for stage in plan.program.stages]
    assert forward == [8, 8]  # there, and back: three passes between four virtual stages, one of them on rank 1


def test_the_schedule_is_chosen_where_it_is_left_open():
    case = CASES["gpt2"]
    model, inputs = case.build(), case.inputs(16)
    fixed: dict[str, Any] = dict(pp=2, dp=1, tp=1, microbatch_size=2)
    free = partition(model, Topology.local(2), inputs, constraints=Constraints(**fixed))
    pinned = partition(model, Topology.local(2), inputs, constraints=Constraints(**fixed, schedule="1f1b"))
    tried = {(c.schedule, c.virtual_stages): c.step_time for c in free.certificate.candidates}
    assert {("1f1b", 1), ("interleaved", 2), ("zb-1p", 1), ("zb-v", 2)} <= tried.keys()
    assert free.estimate.step_time == min(t for t in tried.values() if t is not None) < pinned.estimate.step_time
    assert free.certificate.bound <= free.certificate.objective == free.estimate.step_time
    assert free.verify(model, inputs).ok
