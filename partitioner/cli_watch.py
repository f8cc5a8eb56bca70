"""Commands on runs: ``trace``, ``compare`` and ``compare-runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from partitioner.cli_options import PlanFile, examples
from partitioner.cli_report import output, print_parts


def add_watch_commands(app: typer.Typer) -> None:
    """Make the commands of this module commands of ``app``."""
    app.command(epilog=examples("partitioner trace plan.json watch/ -o trace.json"))(trace)
    app.command(epilog=examples("partitioner compare plan.json trace.json"))(compare)
    app.command(epilog=examples("partitioner compare-runs monday/ tuesday/"))(compare_runs)


def trace(
    plan_file: PlanFile,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="The folder in which the ranks of a run were watched: of `Watch` or PARTITION_WATCH.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the trace to this JSON file.")] = Path("trace.json"),
) -> None:
    """Write a step for Perfetto (ui.perfetto.dev): the measured one of a run beside the predicted one."""
    from partitioner import Plan
    from partitioner.trace import write_plan_trace

    written = write_plan_trace(Plan.load(plan_file), folder, out)
    output().print(Text.assemble(("trace: ", "dim"), str(written)))


def compare(
    plan_file: PlanFile,
    trace_file: Annotated[Path, typer.Argument(help="A measured step, from `partitioner trace`.", show_default=False)],
) -> None:
    """Say where a plan's prediction and a measured step part."""
    from partitioner import Plan
    from partitioner.trace import compare_steps
    from runtime.traces import read_spans

    print_parts(compare_steps(Plan.load(plan_file), read_spans(trace_file)))


def compare_runs(
    one: Annotated[Path, typer.Argument(help="The hashes of a run: runtime.debug.record_hashes.", show_default=False)],
    other: Annotated[Path, typer.Argument(help="The hashes of another run.", show_default=False)],
) -> None:
    """Name the first operator that gave other bits in one run than in the other. Exit code 1 where there is one."""
    from runtime.debug import compare_runs as compared

    difference = compared(one, other)
    if difference is None:
        output().print(Text("Equal: every operator gave the same bits.", style="bold green"))
        return
    output().print(Text.assemble(("Different: ", "bold red"), str(difference)))
    raise typer.Exit(1)
