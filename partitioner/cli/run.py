"""Commands that start runs or read their records: ``launch``, ``trace``, ``compare`` and ``compare-runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from partitioner.cli.console import build_output_console, print_parts
from partitioner.cli.options import PlanFile, format_examples

_EPILOG = format_examples(
    "partitioner launch plan.json train.py -- --steps 1000",
    "partitioner launch plan.json train.py --slurm --time 24:00:00 -o job.sh -- --steps 1000",
    "partitioner launch plan.json --slurm -- --weights model/ --checkpoints run/",
)


def add_launch_commands(app: typer.Typer) -> None:
    """Add the command ``launch``, which prints how a plan is started on its nodes, to the command line ``app``."""
    app.command(epilog=_EPILOG)(launch)


def launch(
    plan_file: PlanFile,
    script: Annotated[
        str | None,
        typer.Argument(
            help="Training script; default: `-m partitioner.runtime`, which trains the plan on random or given "
            "batches.",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments for the script, after `--`.", show_default=False)
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Print a batch script for `sbatch` instead of torchrun commands.")
    ] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Maximum number of restarts after failures.")] = 3,
    time: Annotated[
        str | None, typer.Option(help="Time limit of the Slurm job, like 24:00:00.", show_default=False)
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="Slurm partition (queue) of the job.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the commands or the batch script to this file.", show_default=False),
    ] = None,
) -> None:
    """Print how to start a plan on its nodes: torchrun commands, or a batch script for Slurm."""
    from partitioner import Plan
    from partitioner.plans.launch import job_of, slurm_script, torchrun_commands

    given = [*([] if script is None else [script]), *(arguments or [])]
    own = given[0] if given and not given[0].startswith("-") else None  # `--` may come before any script
    job = job_of(Plan.load(plan_file), str(plan_file), own, given[own is not None :], max_restarts)
    text = slurm_script(job, time=time, partition=partition) if slurm else torchrun_commands(job)
    if out is None:
        typer.echo(text, nl=False)
        return
    from partitioner.runtime.files import write_text

    build_output_console().print(Text.assemble(("script: ", "dim"), str(write_text(out, text))))


def add_watch_commands(app: typer.Typer) -> None:
    """Add the commands ``trace``, ``compare`` and ``compare-runs``, which read records of runs, to the command line
    ``app``."""
    app.command(epilog=format_examples("partitioner trace plan.json watch/ -o trace.json"))(trace)
    app.command(epilog=format_examples("partitioner compare plan.json trace.json"))(compare)
    app.command(epilog=format_examples("partitioner compare-runs monday/ tuesday/"))(compare_runs)


def trace(
    plan_file: PlanFile,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder with the events of a run, which `partitioner.Watch` or the variable PARTITION_WATCH "
            "named; without it, only the predicted step is written.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the trace to this JSON file.")] = Path("trace.json"),
) -> None:
    """Write the events of a step to a file for Perfetto (ui.perfetto.dev): the predicted step and, for a run, the
    measured one.
    """
    from partitioner import Plan
    from partitioner.explain.measured import write_plan_trace

    written = write_plan_trace(Plan.load(plan_file), folder, out)
    build_output_console().print(Text.assemble(("trace: ", "dim"), str(written)))


def compare(
    plan_file: PlanFile,
    trace_file: Annotated[
        Path, typer.Argument(help="Trace of a measured step, as `partitioner trace` writes it.", show_default=False)
    ],
) -> None:
    """Compare the predicted step of a plan with a measured step, and print where they differ."""
    from partitioner import Plan
    from partitioner.explain.measured import compare_steps
    from partitioner.runtime.observe.trace_events import read_spans

    print_parts(compare_steps(Plan.load(plan_file), read_spans(trace_file)))


def compare_runs(
    one: Annotated[
        Path,
        typer.Argument(help="Folder that `partitioner.debug.record_hashes` wrote in a run.", show_default=False),
    ],
    other: Annotated[
        Path,
        typer.Argument(help="Folder that `partitioner.debug.record_hashes` wrote in another run.", show_default=False),
    ],
) -> None:
    """Compare two runs bitwise, and print the first operator whose results differ. The exit code is 1 if there is
    one.
    """
    from partitioner.runtime.debug import compare_runs as compared

    difference = compared(one, other)
    if difference is None:
        build_output_console().print(Text("Equal: every operator gave the same bits.", style="bold green"))
        return
    build_output_console().print(Text.assemble(("Different: ", "bold red"), str(difference)))
    raise typer.Exit(1)
