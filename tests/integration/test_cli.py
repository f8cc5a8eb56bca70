"""The command line: what it prints, what it writes, how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partitioner import Plan
from partitioner.cli.options import load_target
from partitioner.runtime.errors import Failure, RankError
from partitioner.user_function import TargetError
from tests.helpers.command_line import invoke
from tests.helpers.sample_programs import llama, plan_of

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.down(self.up(x).relu()), y)

def make():
    torch.manual_seed(0)
    return Net(), (torch.randn(8, 16), torch.randint(8, (8,)))

def model_only():
    return Net()

def with_loss():
    return nn.Linear(16, 8), (torch.randn(8, 16),), lambda output: output.square().sum()

def needs(size):
    return Net()

def wrong():
    return 3

def fails():
    raise RuntimeError("no weights here")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "model.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def sample(folder: Path) -> Path:
    """A plan of 16 ranks on disk."""
    return plan_of(llama(pp=4, dp=2, tp=2, layers=8)).save(folder / "sample.json")


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    """A plan made by the command line."""
    plan, svg = folder / "plan.json", folder / "plan.svg"
    where = ("--topology", "local:2", "--tp", 2, "--microbatch", 4)
    result = invoke("plan", f"{folder / 'model.py'}:make", *where, "-o", plan, "--svg", svg)
    assert result.exit_code == 0, result.output
    assert "Net" in result.stdout
    assert "tp 2" in result.stdout
    assert svg.read_text().startswith("<?xml")
    return plan


def test_plan_writes_what_can_be_loaded(made: Path):
    plan = Plan.load(made)
    assert plan.mesh["tp"] == 2
    assert plan.program.num_microbatches == 2


def test_commands_write_reports(sample: Path, folder: Path, tmp_path: Path):
    pages = {name: tmp_path / f"{name}.html" for name in ("plan", "show", "size", "topology")}
    model = f"{folder / 'model.py'}:make"
    results = [
        invoke("plan", model, "--topology", "local:2", "--tp", 2, "--html", pages["plan"]),
        invoke("show", sample, "--html", pages["show"]),
        invoke("size", model, "dgx-h100", "--nodes", "1", "--minimise", "time", "--html", pages["size"]),
        invoke("topology", "dgx-h100:2", "--html", pages["topology"]),
    ]
    for result, (name, path) in zip(results, pages.items(), strict=True):
        assert result.exit_code == 0, result.output
        assert "report" in result.stdout
        assert path.read_text().startswith("<!doctype html>")
        assert ("16 devices" in path.read_text()) == (name == "topology")
    assert invoke("show", sample, "--html", tmp_path).exit_code != 0


def test_any_constraint_can_be_given(folder: Path):
    where = ("--topology", "local:2", "-o", folder / "other.json")
    result = invoke("plan", f"{folder / 'model.py'}:make", *where, "--constraints", "tp=2,microbatch_size=2")
    assert result.exit_code == 0, result.output
    plan = Plan.load(folder / "other.json")
    assert (plan.mesh["tp"], plan.chosen.microbatch_size) == (2, 2)
    result = invoke("plan", f"{folder / 'model.py'}:make", *where, "--constraints", "speed=2")
    assert result.exit_code == 2
    assert "speed" in result.output


def test_constraints_of_several_values_can_be_given(folder: Path):
    where = (f"{folder / 'model.py'}:make", "--topology", "local:2", "-o", folder / "several.json")
    pins = "pp=2,microbatch_size=1,schedule=1f1b,stage_of=up:0+down:-1"
    result = invoke("plan", *where, "--constraints", pins)
    assert result.exit_code == 0, result.output
    assert Plan.load(folder / "several.json").constraints.stage_of == {"up": 0, "down": -1}
    result = invoke("plan", *where, "--constraints", "dp=2,microbatch_size=1,data_shares=5+3")
    assert result.exit_code == 0, result.output
    assert Plan.load(folder / "several.json").data_shares == (5, 3)
    result = invoke("plan", *where, "--constraints", "pp=2,stage_of=up")
    assert result.exit_code == 2
    assert "PREFIX:STAGE" in result.stderr


def test_prove_says_what_is_proven(made: Path):
    result = invoke("prove", made)
    assert result.exit_code == 0, result.output
    assert "free of deadlock" in result.stdout


def test_verify_compares_with_the_model(made: Path, folder: Path):
    result = invoke("verify", made, f"{folder / 'model.py'}:make")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("Equal: 6 tensors compared")


def test_run_trains(made: Path, folder: Path):
    result = invoke("run", made, f"{folder / 'model.py'}:make", "--steps", 3, "--lr", 0.05)
    assert result.exit_code == 0, result.output
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(losses) == 3
    assert losses[2] < losses[0]


def test_show_prints_the_summary_and_draws(sample: Path, tmp_path: Path):
    result = invoke("show", sample, "--svg", tmp_path / "a.svg", "--timeline", tmp_path / "b.svg")
    assert result.exit_code == 0, result.output
    assert "pp 4 × dp 2 × tp 2 (16 ranks)" in result.stdout
    assert "Stage 0" in (tmp_path / "a.svg").read_text()
    assert "idle" in (tmp_path / "b.svg").read_text()


def test_show_and_topology_draw_the_devices(sample: Path, tmp_path: Path):
    plain, placed = tmp_path / "a.svg", tmp_path / "b.svg"
    assert invoke("topology", "dgx-v100:2", "--svg", plain).exit_code == 0
    assert "hybrid-cube-mesh" in plain.read_text()
    assert invoke("show", sample, "--topology", placed).exit_code == 0
    assert "stages 2–3, ranks 8–15" in placed.read_text()


def test_show_rank_prints_its_program(sample: Path):
    result = invoke("show", sample, "--rank", 5)
    assert result.exit_code == 0, result.output
    assert "Rank 5 of 16" in result.stdout
    assert "pp 1, dp 0, tp 1" in result.stdout
    assert "ranks 1, 5, 9, 13" in result.stdout  # its pipeline
    assert "1RECV_F0 1F0 1SEND_F0" in result.stdout


def test_show_refuses_a_rank_that_is_not_there(sample: Path):
    result = invoke("show", sample, "--rank", 16)
    assert result.exit_code == 2
    assert "there is no rank 16; the plan has ranks 0 to 15" in result.stderr


def test_explain_prints_words(sample: Path):
    result = invoke("explain", sample)
    assert result.exit_code == 0, result.output
    assert "Does it fit?" in result.stdout


def test_schema_accepts_plans(sample: Path):
    schema = json.loads(invoke("schema").stdout)
    plan = json.loads(sample.read_text())
    assert set(plan) <= set(schema["properties"])
    assert set(schema["required"]) <= set(plan)


def test_topology_shows_devices_and_gives_yaml_back(tmp_path: Path):
    assert "16 devices on 2 nodes" in invoke("topology", "dgx-h100:2").stdout
    written = tmp_path / "cluster.yaml"
    written.write_text(invoke("topology", "dgx-h100:2", "--yaml").stdout)
    assert "16 devices on 2 nodes" in invoke("topology", written).stdout


def test_user_errors_are_a_panel_and_exit_code_2(tmp_path: Path):
    result = invoke("show", tmp_path / "absent.json")
    assert result.exit_code == 2
    assert "Plan file error" in result.stderr
    assert "--debug" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", 8, "--global-batch", 16), "--batch and --global-batch are one option"),
        (("--tp=2", "--tp", 1), "--tp is given 2 times; give it once"),
        (("--seq", "4k"), "expected a whole number, such as 4096, got '4k'"),
        (("--time-limit=soon",), "expected a number, such as 2.5, got 'soon'"),
    ],
)
def test_options_that_would_be_misread_are_refused(words: tuple[object, ...], message: str):
    result = invoke("plan", "model.py:make", "--topology", "local:2", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())


def test_what_is_no_plan_says_what_makes_one(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("config.json", "absent.json"):
        result = invoke("show", tmp_path / name)
        assert "file of `partitioner plan -o`" in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize("place", [0, 2])
def test_debug_anywhere_shows_the_traceback(place: int, tmp_path: Path):
    arguments = ["show", str(tmp_path / "absent.json")]
    arguments.insert(place, "--debug")
    result = invoke(*arguments)
    assert type(result.exception).__name__ == "PlanFileError"


def test_debug_behind_two_dashes_is_the_scripts(sample: Path):
    assert "train.py --debug" in invoke("launch", sample, "train.py", "--", "--debug").stdout


def test_constraints_that_contradict_each_other_are_refused(folder: Path):
    where = ("plan", f"{folder / 'model.py'}:make", "--topology", "local:2")
    result = invoke(*where, "--tp", 2, "--constraints", "tp=1")
    assert result.exit_code == 2
    assert "tp is given twice, as 2 by its option and as 1" in result.stderr


def test_a_plan_that_could_not_be_written_is_not_made(tmp_path: Path):
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "plan.json"):
        result = invoke("plan", "absent.py:make", "--topology", "local:2", "--out", out)
        assert result.exit_code == 2
        assert "File error" in result.stderr
        assert "absent.py" not in result.stderr


def test_files_that_cannot_be_written_are_a_panel(sample: Path, tmp_path: Path):
    result = invoke("show", sample, "--svg", tmp_path)
    assert result.exit_code == 2
    assert "Is a directory" in result.stderr


def test_panels_have_the_first_cause_and_no_traceback():
    failure = Failure(1, "index out of range", "IndexError", instruction="0F0", index=5, traceback="Traceback (most")
    error = RankError((failure,), 2)
    assert "Traceback" in str(error)
    assert error.brief == f"one of 2 ranks failed; first cause: {failure}"


def test_commands_start_without_torch():
    code = "import sys, partitioner.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_ctrl_c_ends_with_130(sample: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(path: Any) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(Plan, "load", staticmethod(interrupted))
    result = invoke("show", sample)
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr


def test_it_is_a_module_too():
    shown = subprocess.run([sys.executable, "-m", "partitioner", "topology", "local:2"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "local" in shown.stdout
    wrong = subprocess.run([sys.executable, "-m", "partitioner", "plans"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "Usage: partitioner" in wrong.stderr


def test_help_has_examples():
    for command in ("plan", "show", "explain", "prove", "verify", "run", "topology", "schema"):
        result = invoke(command, "--help")
        assert result.exit_code == 0
        assert f"partitioner {command}" in result.stdout.split("Examples")[1]


def test_targets_may_be_a_model_with_or_without_inputs_and_loss(folder: Path):
    path = folder / "model.py"
    assert load_target(f"{path}:model_only").inputs is None
    assert load_target(f"{path}:make").loss is None
    assert load_target(f"{path}:with_loss").loss is not None
    assert load_target(f"{path}:model_only", meta=True).model.up.weight.is_meta


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.py", "names no model; expected FILE.py:FUNCTION"),
        ("absent.py:make", "there is no file"),
        ("model.py:absent", "has no function 'absent'; it has make, model_only, with_loss, needs, wrong, fails"),
        ("model.py:needs", r"needs arguments \(size\)"),
        ("model.py:wrong", "returned int; expected a model"),
        ("model.py:fails", r"RuntimeError: no weights here \(line \d+: raise RuntimeError"),
        ("no_such_module:make", "ModuleNotFoundError"),
        ("notes.txt:make", "notes.txt is no Python file; expected FILE.py:FUNCTION"),
        ("models:make", "models is a folder; expected FILE.py:FUNCTION, or models alone"),
    ],
)
def test_wrong_targets_say_what_was_expected(folder: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    (folder / "notes.txt").touch()
    (folder / "models").mkdir(exist_ok=True)
    with pytest.raises(TargetError, match=message):
        load_target(text)
