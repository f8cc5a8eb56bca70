"""The command ``size``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from partitioner.cli_options import GlobalBatch, Meta, ModelFunction, Optimizer, Precision, examples
from partitioner.cli_report import check_outputs, output, print_parts, progress
from partitioner.cli_target import TargetError, constraints_of, load_target

_EPILOG = examples(
    "partitioner size model.py:make dgx-h100 --step-time 0.5 --nodes 1,2,4,8",
    "partitioner size model.py:make dgx-h100 --minimise money --precision bf16 -o plan.json",
)


def add_size_command(app: typer.Typer) -> None:
    """Make the command of this module a command of ``app``."""
    app.command(epilog=_EPILOG)(size)


def size(
    function: ModelFunction,
    machine: Annotated[str, typer.Argument(help="A preset, like `dgx-h100`: one node of the cluster.")],
    step_time: Annotated[
        float | None, typer.Option(help="Seconds that a step may take at most.", show_default=False)
    ] = None,
    minimise: Annotated[str, typer.Option(help="`nodes`, `money` or `energy` per step, or `time`.")] = "nodes",
    nodes: Annotated[str, typer.Option(metavar="N,N,...", help="The sizes to try.")] = "1,2,4,8,16,32,64",
    constraints: Annotated[
        str | None, typer.Option(metavar="NAME=VALUE,...", help="What is fixed of the plans.", show_default=False)
    ] = None,
    precision: Precision = None,
    global_batch: GlobalBatch = None,
    optimizer: Optimizer = "adamw",
    meta: Meta = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds for each size; then its best plan so far is taken.")
    ] = None,
    every: Annotated[bool, typer.Option("--every", help="Plan all sizes, also above the fewest that suffice.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(help="Draw throughput and MFU over ranks to this SVG file; plans all sizes.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the chosen plan to this JSON file.", show_default=False)
    ] = None,
) -> None:
    """Find how many machines a job needs: the fewest for a step time, or the cheapest in money or energy per step."""
    from partitioner import Constraints, size_cluster
    from partitioner.explain import summary_parts
    from partitioner.sizing import SizeError, scaling_picture
    from runtime.files import write_text

    sizes = _sizes(nodes)
    pins = Constraints(**constraints_of(constraints or ""))
    check_outputs(out, svg)
    with progress(f"Loading {function}"):
        target = load_target(function, meta=meta)
    with progress(f"Planning {target.name} for {nodes} nodes of {machine}"):
        try:
            found = size_cluster(
                target.model,
                machine,
                target.inputs,
                step_time=step_time,
                minimise=minimise,  # type: ignore[arg-type]  # size_cluster says what it may be
                nodes=sizes,
                every=every or svg is not None,
                loss=target.loss,
                constraints=pins,
                precision=precision,
                global_batch=global_batch,
                optimizer=optimizer,
                time_limit_s=time_limit,
            )
        except SizeError as error:
            if svg is not None and any(size.plan is not None for size in error.tried):
                write_text(svg, scaling_picture(error.tried))
            raise
    output().print(Text(f"{found}\n"))
    if svg is not None:
        output().print(Text.assemble(("scaling: ", "dim"), str(found.to_svg(svg))))
    print_parts(summary_parts(found.plan))
    if out:
        output().print(Text.assemble(("plan: ", "dim"), str(found.plan.save(out))))


def _sizes(text: str) -> tuple[int, ...]:
    """``1,2,4``. Raises :class:`TargetError` for what is no list of numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise TargetError(f"--nodes {text!r}: expected numbers of nodes, like 1,2,4")
    return tuple(map(int, parts))
