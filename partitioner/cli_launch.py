"""The command ``launch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from partitioner.cli_options import PlanFile, examples
from partitioner.cli_report import output

_EPILOG = examples(
    "partitioner launch plan.json train.py -- --steps 1000",
    "partitioner launch plan.json train.py --slurm --time 24:00:00 -o job.sh -- --steps 1000",
    "partitioner launch plan.json --slurm -- --weights model/ --checkpoints run/",
)


def add_launch_commands(app: typer.Typer) -> None:
    """Make the command of this module a command of ``app``."""
    app.command(epilog=_EPILOG)(launch)


def launch(
    plan_file: PlanFile,
    script: Annotated[
        str | None,
        typer.Argument(help="The training script; without one, `-m runtime` trains the plan.", show_default=False),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the script is given, after `--`.", show_default=False)
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="A script for `sbatch` instead of commands.")] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often what failed is started again.")] = 3,
    time: Annotated[str | None, typer.Option(help="Slurm: the time limit, 24:00:00.", show_default=False)] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm: the partition.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write it to this file.", show_default=False)] = None,
) -> None:
    """Print how to start a plan on its nodes: torchrun commands, or a batch script for Slurm."""
    from partitioner import Plan
    from partitioner.launch import job_of, slurm_script, torchrun_commands

    given = [*([] if script is None else [script]), *(arguments or [])]
    own = given[0] if given and not given[0].startswith("-") else None  # `--` may come before any script
    job = job_of(Plan.load(plan_file), str(plan_file), own, given[own is not None :], max_restarts)
    text = slurm_script(job, time=time, partition=partition) if slurm else torchrun_commands(job)
    if out is None:
        typer.echo(text, nl=False)
        return
    from runtime.files import write_text

    output().print(Text.assemble(("script: ", "dim"), str(write_text(out, text))))
