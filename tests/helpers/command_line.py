"""A call of the command line in this process, and a Python script in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from partitioner.cli.app import app
from tests.helpers.paths import ROOT


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(a) for a in arguments])


def execute(*command: str, cwd: Path, timeout: float = 300) -> str:
    """Standard output of ``python command``; fails with what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
