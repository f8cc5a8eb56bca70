"""Plans under the profile of another framework: their figures are everywhere; what needs a program says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import partitioner
from partitioner import (
    ConstraintError,
    Constraints,
    ExecutionProfile,
    Plan,
    PlanError,
    Topology,
    partition,
    size_cluster,
)
from partitioner.cli.app import app
from partitioner.cluster_size import largest_that_fits
from partitioner.execution_profile import OURS, PROFILES
from partitioner.plans.files import _compute_checksum
from tests.helpers.square_layers import Tower, inputs

pytestmark = pytest.mark.usefixtures("without_baselines")

MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), (torch.randn(8, 16),), torch.sum
"""
PINS = Constraints(pp=2, dp=2)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return partition(
        Tower(), Topology.local(4), inputs(), constraints=PINS, profile=ExecutionProfile(name="late", overlap=False)
    )


def test_its_figures_are_there(plan: Plan):
    assert plan.planned_only == ("overlap=False",)
    assert (plan.world_size, plan.num_stages, plan.num_microbatches) == (4, 2, 8 // (2 * plan.chosen.microbatch_size))
    assert len(plan.estimate.stages) == 2
    assert max(sum(stage.memory.values()) for stage in plan.estimate.stages) == max(plan.estimate.memory)


def test_summary_and_explanation_are_marked(plan: Plan):
    assert "planned, not executed  overlap=False: figures only" in plan.summary()
    assert "execution profile      late" in plan.summary()
    assert "No: this version plans overlap=False, but does not execute it." in plan.explain()
    assert "It predicts how late executes the layout." in plan.explain()
    assert "stage 1: " in plan.explain()


def test_it_is_saved_and_loaded(plan: Plan, tmp_path: Path):
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    assert loaded.profile == ExecutionProfile(name="late", overlap=False)


def test_facts_among_the_constraints_of_an_old_file_are_read(plan: Plan, tmp_path: Path):
    """Version 1 had them there, with ``null`` for the default."""
    written = json.loads(plan.save(tmp_path / "plan.json").read_text())
    body = {k: v for k, v in written.items() if k not in ("format", "version", "checksum", "profile")}
    body["constraints"] |= {"overlap": False, "gather": None, "graphs": "all"}
    old = {"format": written["format"], "version": 1, "checksum": _compute_checksum(body), **body}
    (tmp_path / "old.json").write_text(json.dumps(old))
    loaded = Plan.load(tmp_path / "old.json")
    assert loaded.constraints == plan.constraints
    assert loaded.profile.differences == ("overlap=False", "graphs=all")
    (tmp_path / "old.json").write_text(json.dumps({**old, "version": 3}))
    with pytest.raises(partitioner.PlanFileError, match="newer software: expected version 2, got 3"):
        Plan.load(tmp_path / "old.json")


@pytest.mark.parametrize("view", ["graph", "timeline", "memory"])
def test_pictures_of_programs_are_refused(plan: Plan, tmp_path: Path, view: str):
    with pytest.raises(PlanError, match="under the profile late: overlap=False is planned but not executed here"):
        plan.to_svg(tmp_path / "plan.svg", view=view)


def test_it_does_not_run(plan: Plan, tmp_path: Path):
    message = "overlap=False is planned but not executed here"
    with pytest.raises(PlanError, match=message):
        partitioner.run_local(plan, Tower(), inputs())
    with pytest.raises(PlanError, match=message):
        partitioner.Engine(plan, weights=Tower())
    with pytest.raises(partitioner.LaunchError, match=message):
        partitioner.Engine(plan.save(tmp_path / "plan.json"), weights=Tower())
    with pytest.raises(PlanError, match=message):
        plan.verify(Tower(), inputs())
    with pytest.raises(PlanError, match=message):
        plan.export_ranks(tmp_path)


def test_it_is_planned_again_under_the_same_profile(plan: Plan):
    answer = str(plan.why_not(pp=1, dp=4, model=Tower(), inputs=inputs()))
    assert "This version plans overlap=False, but does not execute it." in answer


def test_every_named_profile_but_ours_is_a_prediction():
    given = {"inputs": inputs(), "constraints": PINS}
    plans = {name: partition(Tower(), Topology.local(4), profile=name, **given) for name in PROFILES}
    assert {name for name, found in plans.items() if found.written is not None} == {"ours"}
    assert plans["ours"] == partition(Tower(), Topology.local(4), **given)
    for name, found in plans.items():
        assert found.planned_only == found.profile.differences == ExecutionProfile.parse(name).differences
        facts = {fact.partition("=")[0] for fact in found.profile.differences}
        assert found.profile.reasons.keys() == facts
        assert all(f"{field}: " in found.explain() for field in facts)


def test_a_name_may_be_followed_by_facts():
    late = ExecutionProfile.parse("megatron-core,overlap=true,graphs=all")
    named = PROFILES["megatron-core"]
    assert (late.overlap, late.graphs, late.regather) == (True, "all", named.regather)
    assert late.reasons.keys() == named.reasons.keys() - {"overlap"}
    assert ExecutionProfile.parse("dispatch=once").differences == ("dispatch=once",)
    assert ExecutionProfile.parse("ours") == OURS == ExecutionProfile()


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (
            "megatron",
            "unknown profile 'megatron'; did you mean megatron-core.* expected ours, megatron-core, torchtitan",
        ),
        ("megatron-core,dispatch=two", "profile field dispatch: input should be 'rows', 'parts' or 'once', got 'two'"),
        ("overlaps=true", "unknown profile field 'overlaps'; did you mean overlap"),
        ("megatron-core,tp", "'tp' is no option; expected name=value"),
        (3, "profile must be a name or an ExecutionProfile, got int"),
    ],
)
def test_what_is_no_profile_is_refused(profile: str, message: str):
    with pytest.raises(ConstraintError, match=message):
        partition(Tower(), Topology.local(4), inputs(), profile=profile)


def test_an_expert_over_some_ranks_of_tp_needs_a_profile():
    with pytest.raises(
        ConstraintError, match="etp=2 with tp=4: our runtime shards an expert over 1 rank or over all ranks"
    ):
        partition(Tower(), Topology.local(4), inputs(), constraints=Constraints(tp=4, etp=2))
    with pytest.raises(ConstraintError, match="etp=2, but no experts were recognised"):
        partition(Tower(), Topology.local(4), inputs(), constraints=Constraints(tp=4, etp=2), profile="megatron-core")


def test_sizes_are_found_under_a_profile():
    late = ExecutionProfile(overlap=False)
    sized = size_cluster(Tower(), Topology.local, inputs(), nodes=(2,), profile=late)
    assert sized.plan.planned_only == ("overlap=False",)
    largest = largest_that_fits(Tower(), Topology.local(2), inputs(), of="microbatch", most=2, profile=late)
    assert "overlap=False" in largest.plan.planned_only


def test_the_command_line_plans_and_shows_it(tmp_path: Path):
    (tmp_path / "model.py").write_text(MODEL)
    saved = str(tmp_path / "plan.json")
    target = f"{tmp_path / 'model.py'}:make"
    made = ["plan", target, "--topology", "local:2", "--profile", "overlap=false", "-o", saved]
    for arguments in (made, ["show", saved]):
        result = CliRunner(env={"COLUMNS": "120"}).invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "planned, not executed  overlap=False" in result.stdout
    for arguments in (
        ["show", saved, "--svg", str(tmp_path / "a.svg")],
        ["show", saved, "--rank", "0"],
        ["prove", saved],
    ):
        result = CliRunner(env={"COLUMNS": "120"}).invoke(app, arguments)
        assert result.exit_code == 2
        assert "planned but not" in result.stderr


@pytest.mark.parametrize(
    "command",
    [("size", "dgx-h100", "--nodes", "1"), ("largest", "--topology", "local:2", "--of", "microbatch", "--most", "2")],
)
def test_commands_of_sizes_take_a_profile(tmp_path: Path, command: tuple[str, ...]):
    (tmp_path / "model.py").write_text(MODEL)
    arguments = [command[0], f"{tmp_path / 'model.py'}:make", *command[1:]]
    assert CliRunner().invoke(app, [*arguments, "--profile", "deepspeed"]).exit_code == 0
    refused = CliRunner(env={"COLUMNS": "120"}).invoke(app, [*arguments, "--profile", "deepsped"])
    assert (refused.exit_code, "did you mean deepspeed" in refused.stderr) == (2, True)


def test_more_is_searched_from_the_command_line(tmp_path: Path):
    (tmp_path / "model.py").write_text(MODEL)
    saved = tmp_path / "plan.json"
    arguments = ["plan", f"{tmp_path / 'model.py'}:make", "--topology", "local:2", "--no-sequence-parallel"]
    result = CliRunner().invoke(app, [*arguments, "--ahead", "--profile", "deepspeed", "-o", str(saved)])
    assert result.exit_code == 0, result.output
    found = Plan.load(saved)
    assert (found.constraints.ahead, found.constraints.sequence_parallel) == (True, False)
    assert found.profile == PROFILES["deepspeed"]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)
