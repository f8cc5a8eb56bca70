"""A call of the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from partitioner.cli.app import app


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(a) for a in arguments])
