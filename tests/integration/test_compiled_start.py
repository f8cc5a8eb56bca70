"""The benchmark of the first compiled step, with two layers and a compiler that is quick, so that it keeps working."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


@pytest.mark.parametrize(
    ("name", "states"), [("one", ["cold"]), pytest.param("zero3", ["cold", "warm"], marks=pytest.mark.slow)]
)
def test_first_steps_are_compared(name: str, states: list[str]):
    """The benchmark itself checks that the losses are equal."""
    command = [sys.executable, "benchmarks/compiled_start.py", "--only", name, "--backend", "aot_eager"]
    done = subprocess.run(
        [*command, "--starts", "1", "--layers", "2", "--json"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ratios = json.loads(done.stdout.splitlines()[-1])["ratios"]
    assert ratios.keys() == {f"{name} {state} {what}" for state in states for what in ("s", "cpu_s")}
    assert all(ratio > 0 for ratio in ratios.values())
