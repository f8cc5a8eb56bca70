"""``PartitionedLoop`` trains under Ray Train as one process does with the whole batch.

Needs the package ``ray[train]``: ``make integrations`` installs it in an environment of its own and runs these tests.
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
import torch

from partitioner.runtime.engine.data_loader import SampleOrder
from tests.helpers.paths import ROOT

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray[train]: run make integrations"),
    pytest.mark.timeout(1200),  # Ray takes its time to start workers on a busy machine
]
STEPS = 50


def run(folder: Path, **given: Any) -> dict[str, Any]:
    """What the script prints last."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.trainers.ray_script", json.dumps({"folder": str(folder)} | given)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def read_losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_alone(steps: int) -> list[float]:
    """Losses of the unmodified model in one process: two batches of 8 are averaged in a step, and clipped."""
    from tests.helpers.trainers import ray_script

    model, data = ray_script.build(), ray_script.Rows()
    optimizer = ray_script.make_optimizer([*model.parameters()])
    schedule = ray_script.make_schedule(optimizer)
    order, losses = SampleOrder(len(data)), []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for batch in (2 * step, 2 * step + 1):
            rows = torch.tensor(order.get_indices(range(8 * batch, 8 * batch + 8)))
            loss = model(data.x[rows], data.label[rows]) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("constraints", [{"tp": 2}, {"dp": 2, "zero": 2}], ids=["tp", "zero"])
def test_fifty_steps_are_those_of_one_process(tmp_path: Path, constraints: dict[str, int]):
    """The second half is another run, which goes on from the checkpoint of the first under the plan of its file."""
    options = dict(accumulate=2, max_norm=0.5, save_every=5, report_every=5)
    half = run(tmp_path, constraints=constraints, steps=STEPS // 2, **options)
    whole = run(
        tmp_path, plan=str(tmp_path / "plan.json"), steps=1, config={"steps": STEPS}, **options
    )  # the configuration replaces a field
    assert half["metrics"]["optimizer_step"] == STEPS // 2 and whole["metrics"]["optimizer_step"] == STEPS
    expected = train_alone(STEPS)
    assert read_losses(tmp_path) == pytest.approx(expected, abs=1e-10)
    assert whole["metrics"]["loss"] == pytest.approx(expected[-1], abs=1e-10)
    assert expected[-1] < 0.9 * expected[0]


def test_wrong_fields_and_wrong_plans_are_refused(tmp_path: Path):
    assert (
        "'learning_rate', which is not a field of PartitionedLoop"
        in run(tmp_path, steps=2, config={"learning_rate": 1.0})["error"]
    )
    run(tmp_path, steps=1)
    found = run(tmp_path, steps=1, plan=str(tmp_path / "plan.json"), workers=1)
    assert "has started 1 workers, but the plan is for 2 ranks" in found["error"]
