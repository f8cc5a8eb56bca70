"""The commands ``size``, ``budget``, ``largest`` and ``fit``: the cluster that a job needs, the cost of a training run,
the largest input that fits on a cluster, and whether a job fits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from partitioner.cli.console import build_output_console, check_outputs, print_parts, show_spinner
from partitioner.cli.options import (
    Adapters,
    Cluster,
    GlobalBatch,
    Meta,
    ModelFunction,
    Optimizer,
    Pins,
    PlanFile,
    Precision,
    Profile,
    SampleOptions,
    Seq,
    TaskName,
    announce_target,
    format_examples,
)
from partitioner.user_function import TargetError

_EPILOG = format_examples(
    "partitioner size model.py:make dgx-h100 --step-time 0.5 --nodes 1,2,4,8",
    "partitioner size model.py:make dgx-h100 --minimise money --precision bf16 -o plan.json",
)


def add_size_command(app: typer.Typer) -> None:
    """Add the command ``size``, which finds how many nodes a job (model, batch and constraints) needs, to the command
    line ``app``."""
    app.command(epilog=_EPILOG)(size)


def size(
    function: ModelFunction,
    machine: Annotated[str, typer.Argument(help="Preset of one node of the cluster, like `dgx-h100`.")],
    step_time: Annotated[float | None, typer.Option(help="Maximum step time in seconds.", show_default=False)] = None,
    minimise: Annotated[
        str, typer.Option(help="Quantity to minimise: `nodes` (their number), or `money`, `energy` or `time` per step.")
    ] = "nodes",
    nodes: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of nodes to try.")] = "1,2,4,8,16,32,64",
    constraints: Pins = None,
    profile: Profile = None,
    precision: Precision = None,
    global_batch: GlobalBatch = None,
    optimizer: Optimizer = "adamw",
    seq: Seq = None,
    task: TaskName = None,
    lora: Adapters = None,
    meta: Meta = False,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds after which the search for each number of nodes ends with its best plan so far."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Plan all numbers of nodes, also those larger than necessary.")
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            help="Draw throughput and MFU over the number of ranks to this SVG file; implies `--every`.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the chosen plan to this JSON file.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a report of the chosen plan to this HTML file.", show_default=False)
    ] = None,
) -> None:
    """Find how many nodes a job needs: the fewest for a step time, or those with the least money, energy or time per
    step.
    """
    from partitioner import Constraints, size_cluster
    from partitioner.cluster_size import SizeError, scaling_picture
    from partitioner.explain.explain import summary_parts
    from partitioner.runtime.files import write_text

    sizes = _parse_node_counts(nodes)
    pins = Constraints.parse(constraints or "")
    check_outputs(out, svg, html)
    target = announce_target(function, meta=meta, asked=SampleOptions(seq, global_batch, task, lora))
    with show_spinner(f"Planning {target.name} for {nodes} nodes of {machine}"):
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
                profile=profile,
                precision=precision,
                global_batch=target.global_batch(global_batch),
                optimizer=optimizer,
                time_limit_s=time_limit,
            )
        except SizeError as error:
            if svg is not None and any(size.plan is not None for size in error.tried):
                write_text(svg, scaling_picture(error.tried))
            raise
    written = [("scaling", found.to_svg(svg))] if svg is not None else []
    written += [("plan", found.plan.save(out))] if out else []
    written += [("report", found.plan.to_html(html))] if html else []
    build_output_console().print(Text(f"{found}\n"))
    print_parts(summary_parts(found.plan))
    for what, path in written:
        build_output_console().print(Text.assemble((f"{what}: ", "dim"), str(path)))


def _parse_node_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of nodes in ``text``, a list such as ``1,2,4``. Raise :class:`TargetError` if it is not a list
    of numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise TargetError(f"--nodes {text!r}: expected numbers of nodes, like 1,2,4")
    return tuple(map(int, parts))


_BUDGET_EPILOG = format_examples(
    "partitioner budget plan.json --tokens 15T", "partitioner budget plan.json --tokens 300B --price 2.5"
)


def add_budget_command(app: typer.Typer) -> None:
    """Add the command ``budget``, which prints what a training run takes, to the command line ``app``."""
    app.command(epilog=_BUDGET_EPILOG)(budget)


def budget(
    plan_file: PlanFile,
    tokens: Annotated[
        str | None, typer.Option(help="Length of the training run in tokens, like `15T` or `300B`.", show_default=False)
    ] = None,
    samples: Annotated[
        str | None, typer.Option(help="Length of the training run in samples, instead of tokens.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Length of the training run in steps, instead of tokens.", show_default=False)
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(help="US dollars per device and hour; default: the price in the topology.", show_default=False),
    ] = None,
) -> None:
    """Print what a training run takes under a plan: steps, days, device hours, money and energy."""
    from partitioner import Plan
    from partitioner.plans.training_run import parse_count

    found = Plan.load(plan_file).training_run(
        tokens=None if tokens is None else parse_count(tokens),
        samples=None if samples is None else parse_count(samples),
        steps=steps,
        price=price,
    )
    build_output_console().print(Text(str(found)))


_LARGEST_EPILOG = format_examples(
    "partitioner largest model.py:make --topology dgx-h100:2 --of sequence --meta --precision bf16",
    "partitioner largest model.py:make --topology dgx-h100 --of microbatch --constraints tp=1,pp=1,zero=3",
)


def add_largest_command(app: typer.Typer) -> None:
    """Add the command ``largest``, which finds the largest input that fits, to the command line ``app``."""
    app.command(epilog=_LARGEST_EPILOG)(largest)


def largest(
    function: ModelFunction,
    topology: Cluster,
    of: Annotated[
        str, typer.Option(help="Quantity to maximise: `microbatch` (samples) or `sequence` (tokens).")
    ] = "sequence",
    most: Annotated[
        int,
        typer.Option(
            help="Largest size to try, in samples or tokens. For a configuration, sequences are at most as long as "
            "its number of positions."
        ),
    ] = 2**24,
    constraints: Pins = None,
    profile: Profile = None,
    precision: Precision = None,
    global_batch: GlobalBatch = None,
    optimizer: Optimizer = "adamw",
    seq: Seq = None,
    task: TaskName = None,
    lora: Adapters = None,
    meta: Meta = False,
) -> None:
    """Find the largest microbatch, or the longest sequence, for which a plan fits in the memory of a cluster."""
    from partitioner import Constraints, Topology, largest_that_fits

    pins = Constraints.parse(constraints or "")
    where = Topology.parse(topology)
    sample = SampleOptions(seq, global_batch, task, lora, devices=where.num_devices)
    target = announce_target(function, meta=meta, asked=sample)
    longest = None if target.pretrained is None else target.pretrained.longest
    if of == "sequence" and longest is not None:
        most = min(most, longest)  # the model has no more positions
    with show_spinner(f"Planning {target.name} with larger and larger sizes"):
        found = largest_that_fits(
            target.model,
            where,
            target.inputs,
            of,  # type: ignore[arg-type]  # largest_that_fits says what it may be
            most=most,
            constraints=pins,
            profile=profile,
            loss=target.loss,
            precision=precision,
            global_batch=target.global_batch(global_batch),
            optimizer=optimizer,
        )
    build_output_console().print(Text(str(found)))


_FIT_EPILOG = format_examples(
    "partitioner fit my-model/ --topology dgx-h100:2 --seq 4096 --tokens 300B",
    "partitioner fit my-model/ --topology dgx-h100 --lora r=16 --tokens 1B --price 2.50",
    "partitioner fit model.py:make --topology local:4",
)


def add_fit_command(app: typer.Typer) -> None:
    """Add the command ``fit``, which says whether a job (model, batch and constraints) fits on a cluster, to the
    command line ``app``."""
    app.command(epilog=_FIT_EPILOG)(fit)


def fit(
    function: ModelFunction,
    topology: Cluster,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Length of a training run in tokens, like `15T` or `300B`, for its time and cost.", show_default=False
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(help="US dollars per device and hour; default: the price in the topology.", show_default=False),
    ] = None,
    constraints: Pins = None,
    precision: Precision = None,
    global_batch: GlobalBatch = None,
    optimizer: Optimizer = "adamw",
    seq: Seq = None,
    task: TaskName = None,
    lora: Adapters = None,
    meta: Meta = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which each search ends with the best plan so far.")
    ] = None,
) -> None:
    """Say whether a job fits on a cluster, the largest batch and sequence that fit, and what a training run takes.

    The exit code is 1 if the job does not fit.
    """
    from partitioner import Constraints, Topology, check_fit
    from partitioner.plans.training_run import parse_count

    pins = Constraints.parse(constraints or "")
    count = None if tokens is None else parse_count(tokens)
    where = Topology.parse(topology)
    sample = SampleOptions(seq, global_batch, task, lora, devices=where.num_devices)
    target = announce_target(function, meta=meta, asked=sample)
    with show_spinner(f"Planning {target.name} with larger and larger sizes"):
        found = check_fit(
            target.model,
            where,
            target.inputs,
            tokens=count,
            price=price,
            longest=None if target.pretrained is None else target.pretrained.longest,
            constraints=pins,
            loss=target.loss,
            precision=precision,
            global_batch=target.global_batch(global_batch),
            optimizer=optimizer,
            time_limit_s=time_limit,
        )
    build_output_console().print(Text(str(found)))
    if found.plan is None:
        raise typer.Exit(1)
