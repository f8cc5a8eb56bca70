"""Killed at any moment of a save, a run has the checkpoint before it or the new one, and goes on from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from partitioner import Engine
from tests.helpers.paths import ROOT
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

WORLD = 2


def judge(steps: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps without any interruption."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**net_inputs())["loss"].backward()
        optimizer.step()
    return {n: t.detach() for n, t in model.state_dict().items()}


def survives(tmp_path: Path, times: int) -> int:
    """Kill ``times`` runs; how many of them in the midst of a save."""
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.killed", str(folder), str(times), str(WORLD)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == times
    last = amid = 0
    for first, found, latest, partial in rows:
        assert int(first) == last, "a run goes on from what was found after the one before"
        assert int(found) > last, "a checkpoint that was complete stays"
        assert int(latest.removeprefix("step-")) in (int(found), int(found) - 1), "what latest names is complete"
        last, amid = int(found), amid + int(partial)
    engine = Engine(program_of_net(), Net())
    engine.load(folder)
    assert engine.steps in (last, last - 1)
    expected = judge(engine.steps)
    for name, tensor in engine.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    return amid


@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_from_a_whole_checkpoint(tmp_path: Path):
    survives(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_fifty_times_goes_on_each_time(tmp_path: Path):
    assert survives(tmp_path, 50) > 5, "kills fell into saves"
