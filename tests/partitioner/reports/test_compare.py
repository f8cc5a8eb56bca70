"""Other plans next to the one that was chosen: why not so, and what is different."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from partitioner import Constraints, Plan, Topology, partition
from partitioner.cli.app import app
from partitioner.errors import ConstraintError
from partitioner.explain.diff import format_relative, in_words
from partitioner.passes.errors import PartitionError
from partitioner.plan import Candidate
from partitioner.units import bytes_text
from tests.helpers.experts_zoo import plain as experts
from tests.helpers.experts_zoo import plain_inputs as expert_inputs
from tests.helpers.infeasible_jobs import Attends, Headed
from tests.helpers.linear_towers import Tower
from tests.helpers.sample_programs import llama, plan_of
from tests.helpers.small_clusters import cluster

MODEL = """
import torch
from tests.helpers.linear_towers import Tower

def make():
    return Tower(), (torch.empty(64, 256),)
"""


def planned(topology: Topology, profile: str | None = None, **pins: Any) -> Plan:
    with torch.device("meta"):
        asked = {"constraints": Constraints(**pins), "profile": profile}
        return partition(Tower(), topology, (torch.empty(64, 256),), **asked)


def again() -> dict[str, Any]:
    with torch.device("meta"):
        return {"model": Tower(), "inputs": (torch.empty(64, 256),)}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(Topology.preset("dgx-h100"))


def test_what_the_plan_is_like_needs_no_answer(plan: Plan):
    answer = plan.why_not(tp=plan.mesh["tp"], pp=plan.mesh["pp"])
    assert answer.verdict == "chosen"


def test_what_was_solved_is_compared_from_the_certificate(plan: Plan):
    certificate = plan.certificate
    baseline = next(b.candidate for b in certificate.baselines if b.name.startswith("Megatron"))
    assert baseline is not None
    answer = plan.why_not(**{a: n for a, n in baseline.mesh.items() if a in ("pp", "tp", "dp")})
    assert answer.verdict in ("slower", "bounded")
    assert "the chosen plan's" in str(answer)


def test_a_bound_is_an_answer_and_planning_again_a_better_one(plan: Plan):
    asked = {"pp": 4, "schedule": "1f1b"}  # the search's own; others are tried beside its winner alone
    rough, exact = plan.why_not(**asked), plan.why_not(**asked, **again())
    assert rough.verdict in ("bounded", "slower")
    assert exact.verdict == "slower"
    assert exact.candidate is not None
    assert exact.candidate.mesh["pp"] == 4
    assert exact.candidate.step_time is not None
    assert rough.bound is not None
    assert rough.bound <= exact.candidate.step_time
    assert "The parts of the step time that differ most:" in exact.lines


def test_states_that_nobody_shares_are_shared_in_any_way():
    """On one rank of ``dp`` all stages of ZeRO are one plan, and where ``ep`` is 1 each expert is on one rank."""
    whole = planned(Topology.preset("dgx-h100"), dp=1, pp=1)
    for asked in ({"zero": 3}, {"zero": 1, "tp": 8}, {"etp": 1}):
        answer = whole.why_not(**asked)
        assert answer.verdict == "chosen", answer
        assert planned(Topology.preset("dgx-h100"), dp=1, pp=1, **asked).estimate == whole.estimate


def test_what_was_tried_for_the_best_meshes_alone_is_not_called_the_best():
    deep = planned(Topology.preset("dgx-h100"), pp=2)
    asked = {"schedule": "interleaved", "virtual_stages": 2}
    rough, exact = deep.why_not(**asked), deep.why_not(**asked, **again())
    if rough.verdict != "unknown":  # tried at all
        assert "The best plan found with schedule=interleaved" in str(rough)
    assert exact.candidate is not None and exact.candidate.step_time is not None
    assert exact.candidate.step_time == pytest.approx(
        planned(Topology.preset("dgx-h100"), pp=2, **asked).estimate.step_time
    )


def test_the_difference_of_the_breakdowns_is_that_of_the_times(plan: Plan):
    best = plan.why_not(pp=4, **again()).candidate
    assert best is not None
    assert best.breakdown is not None
    extra = sum(best.breakdown.values()) - sum(plan.estimate.breakdown.values())
    assert extra == pytest.approx((best.step_time or 0.0) - plan.estimate.step_time)


def test_memory_is_compared_as_it_was_found():
    """That of a plan is by its program, in the certificate too; that of a candidate which has none is the search's."""
    with torch.device("meta"):
        model, inputs = Headed(512, 24, 30000), (torch.empty(4, 128, dtype=torch.long),) * 2
        plan = partition(model, cluster(500), inputs, constraints=Constraints(pp=1, tp=1, zero=2))
    own = max(plan.estimate.memory)
    assert plan.chosen.memory == own
    chosen = f"that of the chosen plan needs {bytes_text(own)}."
    same = plan.why_not(overlap_steps=False, model=model, inputs=inputs)
    assert f"Its fullest rank needs {bytes_text(own)}; {chosen}" in same.lines
    row = plan.chosen.model_copy(update={"status": "solved", "schedule": "gpipe", "memory": 2 * own})
    rows = (*plan.certificate.candidates, row)
    known = plan.model_copy(update={"certificate": plan.certificate.model_copy(update={"candidates": rows})})
    searched = f"It fits in memory. Its fullest rank needs {bytes_text(2 * own)} at most (the search's estimate"
    assert any(line.startswith(searched) and line.endswith(chosen) for line in known.why_not(schedule="gpipe").lines)


def test_what_cannot_be_says_what_conflicts(plan: Plan):
    assert plan.why_not(pp=3).verdict == "infeasible"
    assert "a multiple of 3, but there are 8" in str(plan.why_not(pp=3))
    assert "it does not vary recompute: every layout has the best choice" in str(plan.why_not(recompute="full"))
    assert "the model has 4 block calls" in str(plan.why_not(pp=8))
    answer = plan.why_not(pp=8, **again())
    assert answer.verdict == "infeasible"
    assert [change.constraints.pp for change in answer.changes][:1] == [4]


def test_what_was_not_searched_is_planned_with_the_model(plan: Plan):
    deep = planned(Topology.preset("dgx-h100"), pp=4)
    unseen = deep.why_not(zero=3, pp=1)
    assert unseen.verdict == "unknown"
    assert "One such layout, ZeRO-3" in str(unseen)
    assert plan.why_not(dp_shard=2).verdict == "unknown"
    answer = plan.why_not(dp_shard=2, **again())
    assert answer.verdict in ("slower", "faster")


def test_what_partition_would_say_is_said_without_the_model(plan: Plan):
    for asked in ({"ep": 2}, {"dp": 4, "dp_shard": 8}, {"hierarchical": True}, {"tp": 8, "zero": 1, "dp_shard": 8}):
        with pytest.raises(PartitionError) as caught:
            planned(Topology.preset("dgx-h100"), **asked)
        answer = plan.why_not(**asked)
        assert answer.verdict == "infeasible"
        assert str(answer).startswith(f"There is no plan with {', '.join(f'{n}={v}' for n, v in asked.items())}: ")
        assert getattr(caught.value, "message", str(caught.value)).partition(":")[0] in str(answer)
    with torch.device("meta"):
        mixture = partition(experts(), Topology.preset("dgx-h100"), expert_inputs(8))
    assert "does not divide the model's 4 experts" in str(mixture.why_not(ep=8))


def test_what_is_tried_only_where_it_is_fixed_is_said_so(plan: Plan):
    assert "no attention was found in the model's graph" in str(plan.why_not(cp=2))
    with torch.device("meta"):
        attends = partition(Attends(64), cluster(64, 8), (torch.empty(8, 128, 64),))
    assert "for sequences of 128 tokens cp=2 is tried only where it is fixed" in str(attends.why_not(cp=2))
    assert "others only where dp_shard is fixed" in str(plan.why_not(dp_shard=2))


def test_candidates_that_are_only_counted_are_not_said_to_be_unseen(plan: Plan):
    rows = tuple(c for c in plan.certificate.candidates if c.mesh["pp"] != 4)
    counted = len(plan.certificate.candidates) - len(rows)
    for left, verdict in (({"bounded": counted}, "bounded"), ({"bounded": 1, "open": counted - 1}, "unknown")):
        update = {"candidates": rows, "left": left}
        few = plan.model_copy(update={"certificate": plan.certificate.model_copy(update=update)})
        answer = few.why_not(pp=4)
        assert answer.verdict == verdict
        assert f"Layouts with pp=4 are among the {counted} worst, which the report only counts" in str(answer)


def test_a_schedule_that_is_not_searched_is_called_so(plan: Plan):
    answer = plan.why_not(schedule="gpipe")
    assert answer.verdict == "unknown"
    assert "it tries 1f1b and zb-1p, and others where they are fixed" in str(answer)


def test_a_plan_for_inference_has_no_words_of_a_backward():
    with torch.device("meta"):
        model, inputs = Tower(), (torch.empty(64, 256),)
        plan = partition(model, Topology.preset("dgx-h100"), inputs, objective="infer", constraints=Constraints(dp=8))
        other = partition(model, Topology.preset("dgx-h100"), inputs, objective="infer", constraints=Constraints(tp=8))
    assert "outputs, kept to the end of the step" in plan.explain()
    assert "backward" not in plan.explain()
    assert "outputs, kept to the end of the step" in plan.diff(other)
    free = other.model_copy(update={"constraints": Constraints()})
    assert "for inference, which has no backward, it tries 1f1b alone" in str(free.why_not(schedule="zb-1p"))
    for answer in (plan.why_not(recompute="full"), plan.why_not(recompute="full", model=model, inputs=inputs)):
        assert answer.verdict == "infeasible"
        assert "recompute=full is given, but the plan is for inference" in str(answer)


def test_a_plan_that_was_fixed_may_be_slower_than_what_is_asked_for():
    slow = planned(Topology.preset("dgx-h100"), pp=4, tp=1, schedule="1f1b")
    assert "you fixed pp=4" in str(slow.why_not(pp=1))
    answer = slow.why_not(pp=1, **again())
    assert answer.verdict == "faster"
    assert any(line.startswith("It was not chosen because you fixed pp=4") for line in answer.lines)


def test_what_fits_with_host_memory_is_not_said_to_have_no_plan():
    """The search had no need of host memory, and did not look at it."""
    plan = planned(cluster(3, host=64))
    assert not plan.offload
    asked = {"dp": 4, "zero": 0, "microbatch_size": 16}
    rough = plan.why_not(**asked)
    assert rough.verdict == "infeasible"
    assert "No plan with dp=4, zero=0, microbatch_size=16 fits without offload to host memory." in rough.lines
    assert "With this mesh fixed, offload is used only where it is asked for" in str(rough)
    assert str(rough).endswith("why_not(model=..., ...).")
    assert rough.told("--model FILE.py:FUNCTION").endswith(": --model FILE.py:FUNCTION.")
    exact = plan.why_not(**asked, **again())
    assert exact.verdict == "infeasible"
    assert exact.changes[0].text.startswith("offload=optimizer (a step then takes ")
    hosted = plan.why_not(**asked, offload="optimizer", **again())
    assert hosted.verdict == "slower"
    assert any(line.startswith("In host memory: optimizer states: ") for line in hosted.lines)
    explained = " ".join(plan.explain().split())
    outcome = r"does not fit in memory without offload to host memory \(stage 0 of 1"
    assert re.search(rf"\(dp 4, microbatch of \d+ samples?\): {outcome}", explained)
    for known in (planned(cluster(3)), planned(cluster(3, host=64), offload="none")):
        assert known.why_not(**asked).verdict == "infeasible"
        assert "There is no plan with dp=4, zero=0, microbatch_size=16." in known.why_not(**asked).lines
        assert "without host memory" not in known.explain()


def test_what_does_not_fit_says_how_much_is_missing():
    sample = plan_of(llama(pp=4, dp=2, tp=2))
    short = Candidate(
        mesh={**sample.mesh, "tp": 1, "dp": 4}, microbatch_size=1, schedule="1f1b", status="infeasible",
        reason="stage 0 of 4 needs too much", missing=3 * 2**30,
    )  # fmt: skip
    certificate = sample.certificate.model_copy(update={"candidates": (*sample.certificate.candidates[:2], short)})
    answer = sample.model_copy(update={"certificate": certificate}).why_not(dp=4)
    assert answer.verdict == "unknown"
    assert "lacks 3 GiB: stage 0 of 4 needs too much." in str(answer)


def test_unknown_constraints_are_refused(plan: Plan):
    with pytest.raises(ConstraintError, match="unknown constraint 'width'"):
        plan.why_not(width=3)
    with pytest.raises(ConstraintError, match="no constraint is given"):
        plan.why_not()


def test_a_plan_is_no_different_from_itself(plan: Plan):
    text = plan.diff(plan)
    assert "the same as this one's" in text
    assert "Layouts of weights" not in text
    assert "Stages" not in text


def test_differences_are_told(plan: Plan):
    other = planned(Topology.preset("dgx-h100"), pp=2, tp=2)
    text = plan.diff(other)
    instead = "instead of pp 4 × dp 2."
    for words in ("The other plan takes", instead, "pipeline bubble", "layers.1 to layers.3, 3 calls"):
        assert words in text, text
    assert "layers.*.weight" in text
    assert "over 2 ranks" in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_plans_without_a_program_are_compared(plan: Plan):
    other = planned(Topology.preset("dgx-h100"), zero=3, dp=8, profile="overlap=false")
    only = "The other plan has overlap=False, which this version plans but does not execute."
    assert only in list(in_words(plan, other))
    assert f"zero={plan.chosen.zero}" in plan.diff(other)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [(1.0, 1.0, "the same as"), (1.0, 1.22, "22% more than"), (1.0, 0.5, "50% less than"), (1.0, 3.1, "3.1 times"),
     (0.07144, 0.07143, "the same as"), (0.07144, 0.07146, "<0.1% more than"), (0.07146, 0.07144, "<0.1% less than")],
)  # fmt: skip
def test_how_figures_stand_to_each_other(old: float, new: float, words: str):
    """What is written with other digits is not called the same."""
    assert format_relative(old, new) == words


def test_bytes_are_the_same_where_they_are_written_so():
    assert format_relative(2**30, 1.0004 * 2**30, bytes_text) == "the same as"
    assert format_relative(1000 * 2**20, 1000.4 * 2**20, bytes_text) == "the same as"


def test_what_rounding_left_is_no_time(plan: Plan):
    step = {"compute": 1.0, "bubble": 8.67e-19, "tp_communication": -1e-18}
    residue = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"breakdown": step})})
    some = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"breakdown": {**step, "bubble": 1.0}})})
    assert "bubble" not in residue.explain()
    assert "pipeline bubble: +1 s (0 s → 1 s)" in residue.diff(some)
    assert "0.00000" not in residue.diff(some)


def test_the_command_line_answers(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model.py").write_text(MODEL)
    one, two = plan.save(tmp_path / "one.json"), planned(Topology.preset("dgx-h100"), pp=2).save(tmp_path / "two.json")
    run = CliRunner(env={"COLUMNS": "120"})
    compared = run.invoke(app, ["diff", str(one), str(two)])
    assert compared.exit_code == 0, compared.output
    assert "one.json" in compared.stdout
    model = ["--model", f"{tmp_path / 'model.py'}:make", "--meta"]
    for more in ([], model):
        answer = run.invoke(app, ["explain", str(one), "--why-not", "pp=2,tp=2", *more])
        assert answer.exit_code == 0, answer.output
        assert "with pp=2, tp=2" in answer.stdout
    wrong = run.invoke(app, ["explain", str(one), "--why-not", "pp4"])
    assert wrong.exit_code == 2
    assert "expected name=value" in wrong.stderr
