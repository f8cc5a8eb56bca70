"""The benchmark of a step on one GPU, with tiny models on the CPU, so that it works when there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_step
from tests.helpers.paths import ROOT


def run(tmp_path: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of the JSON line, and the page."""
    command = [sys.executable, "benchmarks/gpu_step.py", "--cpu", "--steps", "2", "--budget", "500"]
    page = tmp_path / "page.md"
    done = subprocess.run(
        [*command, "--docs", str(page), *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])["rows"], page.read_text()


def check_rows(rows: list[dict[str, Any]]) -> None:
    first = {row["job"]: row["loss"] for row in rows if row["contender"] == "eager"}
    for row in rows:
        assert not row["error"], row
        assert row["loss"] == pytest.approx(first[row["job"]], rel=1e-4), row
        assert row["kernels"] > 0, row
        assert row["step_s"] > 0, row
        assert row["mfu"] > 0, row


@pytest.mark.filterwarnings("ignore")
def test_ours_and_the_plain_model_compute_the_same_first_loss(tmp_path: Path):
    ours = ["eager", "ours eager", "ours replayed"]
    rows, page = run(tmp_path, "--only", "llama-0.5b", "vit", "--contenders", *ours)
    assert [(r["job"], r["contender"]) for r in rows] == [(j, c) for j in ("llama-0.5b", "vit") for c in ours]
    check_rows(rows)
    assert page.count("\n| llama-0.5b |") == 3
    assert "1 segments, between them nothing" in page
    assert all(r["predicted_s"] > 0 for r in rows if r["contender"].startswith("ours") and r["step_s"])


@pytest.mark.slow
def test_all_contenders_run(tmp_path: Path):
    rows, _ = run(tmp_path)
    assert len(rows) == len(gpu_step.TINY) * len(gpu_step.CONTENDERS)
    check_rows(rows)


def test_a_contender_that_fails_or_hangs_does_not_end_the_others(tmp_path: Path):
    assert gpu_step.call(os._exit, 3, timeout_s=120) == "the process ended with 3"
    assert "not ready after 1 s" in gpu_step.call(input_never_comes, timeout_s=1)
    failed = gpu_step.Row("vit", "FSDP2", error="RuntimeError: a | b")
    good = gpu_step.Row("vit", "torch.compile", step_s=0.002, kernels=7, loss=1.0)
    table = gpu_step.write_table([failed, good])
    assert "| vit | FSDP2 | RuntimeError: a / b | | | | | | |" in table
    assert "| vit | torch.compile | 2.00 ms | 1.00 |  | 0.0% | 7 | 1.0000 |  |" in table


def input_never_comes() -> None:
    import threading

    threading.Event().wait()
