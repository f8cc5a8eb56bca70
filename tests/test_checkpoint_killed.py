"""Killed at any moment of a save, a run has the checkpoint before it or the new one, and goes on from it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from runtime import Checkpoints, Engine
from tests.runtime_programs import Net, net_inputs, program_of_net

ROOT = Path(__file__).parent.parent
WORLD = 2


def start(folder: Path, store: Path) -> list[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.killed", str(folder), str(rank), str(WORLD), str(store)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]


def latest(folder: Path) -> str:
    return (folder / "latest").read_text() if (folder / "latest").exists() else ""


def killed_after(folder: Path, store: Path, seconds: float) -> int:
    """Start all ranks, kill them all so long after one save more; the step that they went on from."""
    before = latest(folder)
    ranks = start(folder, store)
    try:
        lines = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
        assert all(line.startswith("ready") for line in lines), lines
        while latest(folder) == before:
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.01)
        time.sleep(seconds)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.communicate()
    return int(lines[0].split()[1])


def judge(steps: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps without any interruption."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**net_inputs())["loss"].backward()
        optimizer.step()
    return {n: t.detach() for n, t in model.state_dict().items()}


def survives(tmp_path: Path, times: int) -> None:
    generator, folder, before = random.Random(0), tmp_path / "run", 0
    for number in range(times):
        went_on_from = killed_after(folder, tmp_path / f"store-{number}", generator.uniform(0.0, 0.3))
        assert went_on_from == before, "the step that was found after the kill is the one that was gone on from"
        engine = Engine(program_of_net(), Net())
        optimizer = torch.optim.AdamW(engine.parameters())
        found = Checkpoints(folder, engine, optimizer).restore()
        assert found is not None and found > before, "a checkpoint that was complete stays"
        assert (folder / latest(folder) / "manifest.json").exists(), "what latest names is complete"
        before = found
    expected = judge(before)
    for name, tensor in engine.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_a_killed_run_goes_on_from_a_whole_checkpoint(tmp_path: Path):
    survives(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_fifty_times_goes_on_each_time(tmp_path: Path):
    survives(tmp_path, 50)
