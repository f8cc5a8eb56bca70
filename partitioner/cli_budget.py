"""The command ``budget``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from partitioner.cli_options import PlanFile, examples
from partitioner.cli_report import output

_EPILOG = examples(
    "partitioner budget plan.json --tokens 15T", "partitioner budget plan.json --tokens 300B --price 2.5"
)


def add_budget_command(app: typer.Typer) -> None:
    """Make the command of this module a command of ``app``."""
    app.command(epilog=_EPILOG)(budget)


def budget(
    plan_file: PlanFile,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of the run, like `15T` or `300B`.", show_default=False)
    ] = None,
    samples: Annotated[str | None, typer.Option(help="Or its samples.", show_default=False)] = None,
    steps: Annotated[int | None, typer.Option(help="Or its steps.", show_default=False)] = None,
    price: Annotated[
        float | None,
        typer.Option(help="US dollars for one device and hour; default: the hardware file's.", show_default=False),
    ] = None,
) -> None:
    """Say what a training run takes under a plan: steps, days, device hours, money and energy."""
    from partitioner import Plan
    from partitioner.training_run import parse_count

    found = Plan.load(plan_file).training_run(
        tokens=None if tokens is None else parse_count(tokens),
        samples=None if samples is None else parse_count(samples),
        steps=steps,
        price=price,
    )
    output().print(Text(str(found)))
