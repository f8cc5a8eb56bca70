"""Plans that this version does not execute: their figures are everywhere, and what needs a program says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import partitioner
from partitioner import Constraints, Plan, PlanError, Topology, partition
from partitioner.cli.app import app
from tests.helpers.square_layers import Tower, inputs

pytestmark = pytest.mark.usefixtures("without_baselines")

MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), (torch.randn(8, 16),), torch.sum
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return partition(Tower(), Topology.local(4), inputs(), constraints=Constraints(pp=2, dp=2, overlap=False))


def test_its_figures_are_there(plan: Plan):
    assert plan.planned_only == ("overlap=False",)
    assert (plan.world_size, plan.num_stages, plan.num_microbatches) == (4, 2, 8 // (2 * plan.chosen.microbatch_size))
    assert len(plan.estimate.stages) == 2
    assert max(sum(stage.memory.values()) for stage in plan.estimate.stages) == max(plan.estimate.memory)


def test_summary_and_explanation_are_marked(plan: Plan):
    assert "planned, not executed  overlap=False: figures only" in plan.summary()
    assert "No: this version plans overlap=False, but does not execute it." in plan.explain()
    assert "stage 1: " in plan.explain()


def test_it_is_saved_and_loaded(plan: Plan, tmp_path: Path):
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan


@pytest.mark.parametrize("view", ["graph", "timeline", "memory"])
def test_pictures_of_programs_are_refused(plan: Plan, tmp_path: Path, view: str):
    with pytest.raises(PlanError, match="overlap=False is planned but not executed here"):
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


def test_the_command_line_plans_and_shows_it(tmp_path: Path):
    (tmp_path / "model.py").write_text(MODEL)
    saved = str(tmp_path / "plan.json")
    made = ["plan", f"{tmp_path / 'model.py'}:make", "--topology", "local:2", "--no-overlap", "-o", saved]
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


def test_what_is_ahead_is_searched_from_the_command_line(tmp_path: Path):
    (tmp_path / "model.py").write_text(MODEL)
    saved = tmp_path / "plan.json"
    arguments = ["plan", f"{tmp_path / 'model.py'}:make", "--topology", "local:2", "--no-sequence-parallel"]
    result = CliRunner().invoke(app, [*arguments, "--ahead", "--no-overlap", "-o", str(saved)])
    assert result.exit_code == 0, result.output
    given = Plan.load(saved).constraints
    assert (given.ahead, given.overlap, given.sequence_parallel) == (True, False, False)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)
