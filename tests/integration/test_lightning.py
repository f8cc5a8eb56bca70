"""``PartitionedStrategy`` trains as Lightning does in one process with the whole batch.

Needs the package ``lightning``: ``make integrations`` installs it in an environment of its own and runs these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="needs the package lightning: run make integrations"
)
SCRIPT = str(ROOT / "tests" / "helpers" / "trainers" / "lightning_script.py")
# an epoch is ten batches of 4 samples, of which two are accumulated: 50 optimizer steps
OPTIONS: dict[str, Any] = dict(
    max_epochs=10, accumulate_grad_batches=2, gradient_clip_val=0.9, check_val_every_n_epoch=2
)
CLOSE = 1e-5


def run(folder: Path, **given: Any) -> dict[str, Any]:
    """What the script writes."""
    asked = {"folder": str(folder), "options": OPTIONS} | given
    done = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(asked)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "history.json").read_text())
    return found


def check_equal(found: dict[str, Any], expected: dict[str, Any], close: float = CLOSE) -> None:
    """The same values after the same batches, in the trained module, and by evaluations of it."""
    check_entries(found["values"], expected["values"], close)
    for what in ("state", "validated", "first"):
        assert found[what] == pytest.approx(expected[what], abs=10 * close)


def check_entries(found: list[dict[str, float]], expected: list[dict[str, float]], close: float = CLOSE) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=close)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("alone") / "out")


@pytest.mark.parametrize("constraints", [{"tp": 2}, {"dp": 2, "zero": 2}, {"pp": 2}], ids=["tp", "zero", "pp"])
def test_fifty_steps_are_those_of_one_process(tmp_path: Path, alone: dict[str, Any], constraints: dict[str, int]):
    """Losses, logged accuracies, evaluations, learning rates and trained weights, with clipping and accumulation."""
    batches = [entry for entry in alone["values"] if "rate" in entry]
    assert len(batches) == 100 and batches[-1]["train_loss"] < 0.8 * batches[0]["train_loss"]
    found = run(tmp_path / "planned", constraints=constraints)
    check_equal(found, alone)
    assert found["samples"] == [4 // constraints.get("dp", 1)]  # a rank reads the samples that it computes


def test_a_run_is_resumed_under_another_plan(tmp_path: Path, alone: dict[str, Any]):
    first = run(tmp_path / "first", constraints={"dp": 2, "zero": 2}, options=OPTIONS | {"max_epochs": 4})
    last = max((tmp_path / "first" / "saved").iterdir(), key=lambda path: path.stat().st_mtime)
    second = run(tmp_path / "second", constraints={"tp": 2}, resume=str(last))
    before = len(first["values"])
    check_entries(first["values"], alone["values"][:before])
    rest = alone["values"][before:]
    after = second["values"][3:]  # without the check of two batches before training
    assert len(after) == len(rest)
    for mine, theirs in zip(after, rest, strict=True):  # which has values of epochs before, too
        assert {"train_loss", "twice", "val_loss"} & mine.keys()
        assert mine == pytest.approx({name: theirs[name] for name in mine}, abs=CLOSE)
    assert second["state"] == pytest.approx(alone["state"], abs=10 * CLOSE)


def test_batch_statistics_frozen_and_unused_parameters(tmp_path: Path):
    """Of a model on tuples, in float64, whose ranks read their own samples alone."""
    options = {"precision": "64-true", "max_epochs": 3, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    expected = run(tmp_path / "alone", points=True, options=options)
    found = run(tmp_path / "planned", points=True, options=options, constraints={"dp": 2, "zero": 1})
    check_equal(found, expected, 1e-10)


def test_what_a_plan_cannot_honour_is_refused(tmp_path: Path):
    asked = {"folder": str(tmp_path), "refused": True}
    done = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(asked)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "refused.json").read_text())
    expected = {
        "manual": "automatic_optimization=False",
        "index": "training_step reads the index of the batch",
        "step": "uses self.global_step",
        "backward": "overrides backward",
        "states": "Adagrad creates its states for whole parameters",
        "vector": r"self.log('rows', ...) is given a tensor of shape [4]",
        "kept": "seen",
        "callback": "the callback StochasticWeightAveraging",
        "precision": "precision='16-true' is not supported",
        "anomaly": "detect_anomaly=True",
        "iterator": "a data loader is an iterator",
        "last": "the last batch of a train data loader has 4 samples instead of 12",
        "sampler": "a data loader has a DistributedSampler",
        "checkpoint": "is not a folder",
    }
    assert found.keys() == expected.keys()
    for name, message in expected.items():
        assert message in found[name], (name, found[name])
        assert found[name].startswith(("TrainerError", "UnsupportedError")), (name, found[name])
