"""The command ``largest``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from partitioner.cli_options import Meta, ModelFunction, Optimizer, Precision, examples
from partitioner.cli_report import output, progress
from partitioner.cli_target import constraints_of, load_target

_EPILOG = examples(
    "partitioner largest model.py:make --topology dgx-h100:2 --of sequence --meta --precision bf16",
    "partitioner largest model.py:make --topology dgx-h100 --of microbatch --constraints tp=1,pp=1,zero=3",
)


def add_largest_command(app: typer.Typer) -> None:
    """Make the command of this module a command of ``app``."""
    app.command(epilog=_EPILOG)(largest)


def largest(
    function: ModelFunction,
    topology: Annotated[
        str, typer.Option("--topology", "-t", help="`local:4`, a preset like `dgx-h100:2` (nodes), or a YAML file.")
    ],
    of: Annotated[str, typer.Option(help="`microbatch` or `sequence`.")] = "sequence",
    most: Annotated[int, typer.Option(help="Where the search ends.")] = 2**24,
    constraints: Annotated[
        str | None, typer.Option(metavar="NAME=VALUE,...", help="What is fixed of the plans.", show_default=False)
    ] = None,
    precision: Precision = None,
    optimizer: Optimizer = "adamw",
    meta: Meta = False,
) -> None:
    """Find the largest microbatch, or the longest sequence, that fits in the memory of a cluster."""
    from partitioner import Constraints, Topology, largest_that_fits

    pins = Constraints(**constraints_of(constraints or ""))
    where = Topology.parse(topology)
    with progress(f"Loading {function}"):
        target = load_target(function, meta=meta)
    with progress(f"Planning {target.name} with larger and larger sizes"):
        found = largest_that_fits(
            target.model,
            where,
            target.inputs,
            of,  # type: ignore[arg-type]  # largest_that_fits says what it may be
            most=most,
            constraints=pins,
            loss=target.loss,
            precision=precision,
            optimizer=optimizer,
        )
    output().print(Text(str(found)))
