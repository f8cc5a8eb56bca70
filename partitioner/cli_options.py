"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PlanFile = Annotated[Path, typer.Argument(help="A plan, as `partitioner plan -o` writes it.", show_default=False)]
ModelFunction = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function without arguments that returns a model, (model, inputs) or (model, inputs, loss). "
        "`package.module:function` will do as well.",
        show_default=False,
    ),
]
Picture = Annotated[Path | None, typer.Option(help="Draw the stages to this SVG file.", show_default=False)]
Chart = Annotated[Path | None, typer.Option(help="Draw the schedule over time to this SVG file.", show_default=False)]
Layout = Annotated[
    Path | None, typer.Option(help="Draw the ranks on their devices to this SVG file.", show_default=False)
]
Memory = Annotated[Path | None, typer.Option(help="Draw the memory over time to this SVG file.", show_default=False)]
Precision = Annotated[
    str | None, typer.Option(help="`bf16`, `fp16`, `fp32`, `tf32`, `fp64` or `fp8`; default: as the parameters are.")
]
GlobalBatch = Annotated[
    int | None, typer.Option(help="Samples per step; the inputs are then only a sample.", show_default=False)
]
Optimizer = Annotated[str, typer.Option(help="Whose state is to fit in memory.")]
Meta = Annotated[bool, typer.Option("--meta", help="Make the model without memory for its weights.")]


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "**Examples**\n\n" + "\n\n".join(f"`{line}`" for line in lines)
