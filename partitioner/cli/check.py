"""The command ``check``: compare a model that was distributed by other means with the plain model."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from partitioner.cli.console import build_output_console, show_spinner
from partitioner.cli.options import format_examples

_EPILOG = format_examples(
    "partitioner check train.py:layout --ranks 4",
    "partitioner check examples/gallery/sequence_parallel_norm.py:layout --ranks 2",
)

_SHOWN = 12  # names of one cause


def add_check_command(app: typer.Typer) -> None:
    """Add the command ``check`` to ``app``."""
    app.command(epilog=_EPILOG)(check)


def check(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help="`FILE.py:FUNCTION`, a function without arguments that returns a `partitioner.Setup`.",
            show_default=False,
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Processes, which communicate over Gloo.")] = 2,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which all processes are ended.")] = 120.0,
) -> None:
    """Run a model that is distributed by other means (FSDP, DTensor, pipelining, own collectives) on this machine in
    float64; compare outputs, loss and every gradient with the plain model, and name likely causes of differences.

    The exit code is 1 if they differ.
    """
    from partitioner import check_layout

    with show_spinner(f"Running {ranks} ranks and the plain model"):
        found = check_layout(function, ranks, timeout)
    console = build_output_console()
    if found.ok:
        largest = max(found.errors.values(), default=0.0)
        told = f"{len(found.errors)} tensors compared, largest error {largest:.2e}"
        console.print(Text.assemble(("Equal: ", "bold green"), told))
        return
    wrong = {name for difference in found.differences for name in difference.names} & set(found.errors)
    console.print(
        Text.assemble(("Different: ", "bold red"), f"{len(wrong)} of {len(found.errors)} tensors compared differ")
    )
    for difference in found.differences:
        names = [*difference.names[:_SHOWN]]
        names += [f"and {len(difference.names) - _SHOWN} more"] if len(difference.names) > _SHOWN else []
        console.print(Text.assemble("\n", (f"{difference.kind}: ", "bold"), difference.cause))
        for name in names:
            error = f"  {found.errors[name]:.1e}" if name in found.errors else ""
            console.print(Text(f"    {name}{error}"))
    raise typer.Exit(1)
