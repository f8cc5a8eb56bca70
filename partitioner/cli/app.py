"""The command line: ``partitioner plan | show | explain | diff | prove | verify | run | trace | compare | ...``.

Commands call only the public interface of the package. Results go to the standard output, errors and progress to the
standard error. The exit code is 0 for success, 1 if a plan, layout or run differs from what it is compared with, 2 for
an error that the user can correct, and 3 for a fault of the partitioner.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from partitioner import __version__
from partitioner.cli.console import (
    Commands,
    build_output_console,
    check_outputs,
    print_parts,
    show_progress_bar,
    show_spinner,
)
from partitioner.cli.options import (
    Adapters,
    Chart,
    Cluster,
    GlobalBatch,
    Html,
    Layout,
    Memory,
    Meta,
    ModelFunction,
    Optimizer,
    Picture,
    PlanFile,
    Precision,
    Profile,
    SampleOptions,
    Seq,
    TaskName,
    all_constraints,
    announce_target,
    format_examples,
)
from partitioner.cli.predict import add_predict_commands
from partitioner.cli.run import add_launch_commands, add_watch_commands
from partitioner.cli.size import add_budget_command, add_fit_command, add_largest_command, add_size_command
from partitioner.option_text import read_options
from partitioner.units import format_plural, seconds_text

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Partition an unmodified PyTorch model: plan it for a cluster; show, prove, verify and run the plan.",
    epilog="Errors are short; `--debug`, anywhere on the line, shows their traceback.",
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"partitioner {__version__}")
        raise typer.Exit


@app.callback()
def add_version(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog=format_examples(
        "partitioner plan model.py:make --topology local:4 -o plan.json --svg plan.svg",
        "partitioner plan model.py:make --topology dgx-h100:4 --global-batch 512 --tp 8 --precision bf16",
        "partitioner plan model.py:make --topology cluster.yaml --pp 2 --microbatch 1 --schedule gpipe",
        "partitioner plan model.py:make --topology dgx-h100:8 --meta --profile megatron-core",
        "partitioner plan my-model/ --topology dgx-h100:2 --seq 4096 --batch 256 -o plan.json",
        "partitioner plan my-model/config.json --topology dgx-h100 --lora r=16,targets=q_proj+v_proj",
    )
)
def plan(
    function: ModelFunction,
    topology: Cluster = "detect",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan to this JSON file.", show_default=False)
    ] = None,
    pp: Annotated[
        int | None, typer.Option(help="Number of pipeline stages (ranks of a pipeline).", show_default=False)
    ] = None,
    dp: Annotated[int | None, typer.Option(help="Number of data-parallel ranks.", show_default=False)] = None,
    tp: Annotated[int | None, typer.Option(help="Number of tensor-parallel ranks.", show_default=False)] = None,
    microbatch: Annotated[
        int | None,
        typer.Option(help="Number of samples of a microbatch on one data-parallel rank.", show_default=False),
    ] = None,
    cp: Annotated[
        int | None,
        typer.Option(help="Number of context-parallel ranks, over which each sequence is sharded.", show_default=False),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Algorithm of context-parallel attention: `ring`, `all_gather` or `ulysses`.", show_default=False
        ),
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(help="Number of expert-parallel ranks, over which experts are distributed.", show_default=False),
    ] = None,
    etp: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks over which each expert is sharded: 1, or the value of `--tp`.", show_default=False
        ),
    ] = None,
    zero: Annotated[
        int | None,
        typer.Option(
            help="ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters (FSDP).",
            show_default=False,
        ),
    ] = None,
    dp_shard: Annotated[
        int | None,
        typer.Option(
            help="Number of data-parallel ranks over which ZeRO shards states (hybrid sharding).", show_default=False
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Pipeline schedule: `1f1b`, `gpipe`, `interleaved`, `zb-1p`, `zb-2p`, `zb-v`, `dualpipe-v`, or a "
            "CSV file.",
            show_default=False,
        ),
    ] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(help="Number of virtual stages on each pipeline rank.", show_default=False)
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="Activations that backward recomputes: `none`, `scores` (attention scores), `selective` (cheap "
            "operators), `alternate` (also every second matrix product) or `full` (whole layers).",
            show_default=False,
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            help="Shard activations between layers over the tensor-parallel ranks where this is faster, or never.",
            show_default=False,
        ),
    ] = None,
    more: Annotated[
        str | None,
        typer.Option(
            "--constraints",
            metavar="NAME=VALUE,...",
            help="Further constraints, like `stage_of=embed:0+head:-1`; several values of one constraint are "
            "joined by +.",
            show_default=False,
        ),
    ] = None,
    ahead: Annotated[
        bool,
        typer.Option("--ahead", help="Search more candidates: every schedule, and tensor parallelism over two nodes."),
    ] = False,
    profile: Profile = None,
    precision: Precision = None,
    global_batch: GlobalBatch = None,
    objective: Annotated[str, typer.Option(help="Kind of step: `train`, or `infer` (forward only).")] = "train",
    optimizer: Optimizer = "adamw",
    seq: Seq = None,
    task: TaskName = None,
    lora: Adapters = None,
    meta: Meta = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which the search ends with the best plan so far.")
    ] = None,
    svg: Picture = None,
    timeline: Chart = None,
    memory: Memory = None,
    html: Html = None,
) -> None:
    """Find the fastest plan for a model on a cluster, and print its summary.

    Mesh axes, microbatch size and schedule are chosen by the search unless they are given.
    """
    from partitioner import Constraints, Topology

    given = {
        "pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep, "etp": etp, "zero": zero, "dp_shard": dp_shard,
        "microbatch_size": microbatch, "schedule": schedule, "virtual_stages": virtual_stages, "recompute": recompute,
        "sequence_parallel": sequence_parallel, "context": context, "ahead": ahead or None,
    }  # fmt: skip
    constraints = Constraints(**all_constraints(given, more))
    check_outputs(out, svg, timeline, memory, html)
    where = Topology.parse(topology)
    sample = SampleOptions(seq, global_batch, task, lora, objective, devices=where.num_devices)
    target = announce_target(function, meta=meta, asked=sample)
    from partitioner import partition  # loads PyTorch: wrong names are reported before

    doing = f"Planning {target.name} for {format_plural(where.num_devices, 'device')}"
    with show_spinner(doing) as say:
        found = partition(
            target.model,
            where,
            inputs=target.inputs,
            global_batch=target.global_batch(global_batch),
            loss=target.loss,
            objective=objective,  # type: ignore[arg-type]  # partition says what it may be
            constraints=constraints,
            profile=profile,
            precision=precision,
            optimizer=optimizer,
            time_limit_s=time_limit,
            progress=lambda seen: say(f"{doing}: {_so_far(seen)}"),
        )
    if target.pretrained is not None:
        found = target.pretrained.describe(found)
    written = [("plan", found.save(out))] if out else []
    # before printing, where a closed pipe ends the program
    written += _write_pictures(found, svg, timeline, memory, html=html)
    _print_summary(found)
    _print_written_paths(written)


@app.command(
    epilog=format_examples(
        "partitioner show plan.json",
        "partitioner show plan.json --rank 3",
        "partitioner show plan.json --svg plan.svg",
        "partitioner show plan.json --html plan.html",
    )
)
def show(
    plan_file: PlanFile,
    rank: Annotated[
        int | None,
        typer.Option(
            help="Show the program of this rank (counted from 0) in place of the summary.", show_default=False
        ),
    ] = None,
    svg: Picture = None,
    timeline: Chart = None,
    topology: Layout = None,
    memory: Memory = None,
    html: Html = None,
) -> None:
    """Print the summary of a plan, or the program of one rank, and draw pictures of the plan."""
    from partitioner import Plan
    from partitioner.cli.show import rank_parts

    check_outputs(html)
    loaded = Plan.load(plan_file)
    written = _write_pictures(loaded, svg, timeline, memory, topology, html)  # before printing, where a pipe may end it
    if rank is None:
        _print_summary(loaded)
    else:
        print_parts(rank_parts(loaded, rank))
    _print_written_paths(written)


@app.command(
    epilog=format_examples(
        "partitioner explain plan.json",
        "partitioner explain plan.json --why-not tp=8",
        "partitioner explain plan.json --why-not tp=8,schedule=gpipe --model model.py:make",
    )
)
def explain(
    plan_file: PlanFile,
    why_not: Annotated[
        str | None,
        typer.Option(
            "--why-not",
            metavar="NAME=VALUE,...",
            help="Explain why the plan does not have these constraints: what they would cost, or why they are "
            "impossible.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model of the plan, in the form that `partitioner plan` takes. With it, a plan with the "
            "values of `--why-not` is searched for if the plan file has no answer.",
            show_default=False,
        ),
    ] = None,
    task: TaskName = None,
    lora: Adapters = None,
    meta: Meta = False,
) -> None:
    """Explain a plan: the constraints that limit it, what takes its step time, and why other layouts were not
    chosen.
    """
    from partitioner import Plan
    from partitioner.explain.explain import explain_parts

    loaded = Plan.load(plan_file)
    if why_not is None:
        print_parts(explain_parts(loaded))
        return
    asked = read_options(why_not)
    sample = SampleOptions(task=task, lora=lora, plan=loaded)
    target = announce_target(model, meta=meta, asked=sample) if model is not None else None
    with show_spinner(f"Looking for a plan with {why_not}"):
        answer = (
            loaded.why_not(**asked)
            if target is None
            else loaded.why_not(model=target.model, inputs=target.inputs, loss=target.loss, **asked)
        )
    build_output_console().print(Text(answer.told("--model FILE.py:FUNCTION")))


@app.command(epilog=format_examples("partitioner diff before.json after.json"))
def diff(
    plan_file: PlanFile,
    other: Annotated[Path, typer.Argument(help="JSON file of the plan to compare with.", show_default=False)],
) -> None:
    """Print the differences between two plans, and how they change step time and memory."""
    from partitioner import Plan
    from partitioner.explain.diff import diff_parts

    print_parts(diff_parts(Plan.load(plan_file), Plan.load(other), (plan_file.name, other.name)))


@app.command(epilog=format_examples("partitioner prove plan.json"))
def prove(plan_file: PlanFile) -> None:
    """Prove that the ranks of a plan cannot deadlock, and that every value exists when it is used."""
    from partitioner import Plan

    proof = Plan.load(plan_file).prove()
    build_output_console().print(Text.assemble(("Proven: ", "bold green"), str(proof)))


@app.command(epilog=format_examples("partitioner verify plan.json model.py:make"))
def verify(
    plan_file: PlanFile,
    function: ModelFunction,
    rows: Annotated[int, typer.Option(help="Number of the largest differences to list.")] = 5,
    task: TaskName = None,
    lora: Adapters = None,
) -> None:
    """Run all ranks on this machine in float64, and compare outputs, loss and every gradient with those of the model.

    The exit code is 1 if they differ.
    """
    from partitioner import Plan

    loaded = Plan.load(plan_file)
    target = announce_target(function, asked=SampleOptions(task=task, lora=lora, values=True, plan=loaded))
    with show_spinner(f"Running {loaded.program.world_size} ranks and the model"):
        result = loaded.verify(target.model, target.inputs, target.loss)
    worst = sorted(result.errors.items(), key=lambda item: -item[1])[:rows]
    table = Table("largest errors", "relative error", box=None, pad_edge=False, header_style="dim")
    for name, error in worst:
        table.add_row(Text(name), f"{error:.2e}")
    console = build_output_console()
    console.print(table)
    word = ("Equal: ", "bold green") if result.ok else ("Different: ", "bold red")
    console.print(Text.assemble(word, f"{len(result.errors)} tensors compared, largest error {result.max_error:.2e}"))
    if not result.ok:
        raise typer.Exit(1)


@app.command(
    epilog=format_examples(
        "partitioner check train.py:layout --ranks 4",
        "partitioner check examples/gallery/sequence_parallel_norm.py:faulty",
    )
)
def check(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help="`FILE.py:FUNCTION`, a function without arguments that returns a `partitioner.Setup`.",
            show_default=False,
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Number of processes (ranks), which communicate over Gloo.")] = 2,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which all processes are terminated.")] = 120.0,
    rows: Annotated[int, typer.Option(min=1, help="Number of parameters or outputs to list for each cause.")] = 8,
) -> None:
    """Run a model that is distributed by other means (FSDP, DTensor, pipelining, your own collectives) on this machine
    in float64; compare outputs, loss and every gradient with the plain model, and name likely causes of differences.

    The exit code is 1 if they differ.
    """
    from partitioner import check_layout
    from partitioner.check.compare import TOLERANCE

    with show_spinner(f"Running {ranks} ranks and the plain model"):
        found = check_layout(function, ranks, timeout)
    console = build_output_console()
    if found.ok:
        largest = max(found.errors.values(), default=0.0)
        told = f"{len(found.errors)} tensors compared, largest error {largest:.2e}"
        console.print(Text.assemble(("Equal: ", "bold green"), told))
        return
    wrong = {name: error for name, error in found.errors.items() if not error <= TOLERANCE}
    told = f"{len(wrong)} of {len(found.errors)} tensors compared differ"
    if not wrong:
        told = f"the {len(found.errors)} tensors compared are equal, and something else differs"
    console.print(Text.assemble(("Different: ", "bold red"), told))
    for difference in found.differences:
        console.print(Text.assemble("\n", (f"{difference.kind}: ", "bold"), difference.cause))
        for name in difference.names[:rows]:
            error = f"  {wrong[name]:.1e}" if name in wrong else ""
            console.print(Text(f"    {name}{error}"))
        if len(difference.names) > rows:
            console.print(Text(f"    and {len(difference.names) - rows} more"))
    raise typer.Exit(1)


@app.command(epilog=format_examples("partitioner run plan.json model.py:make --steps 20 --lr 1e-3"))
def run(
    plan_file: PlanFile,
    function: ModelFunction,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps, all on the same batch.")] = 10,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    task: TaskName = None,
    lora: Adapters = None,
) -> None:
    """Train a plan on this machine with one process per rank, and print the loss of each step."""
    from partitioner import Plan
    from partitioner.cli.train import train_on_target

    loaded = Plan.load(plan_file)
    console = build_output_console()
    target = announce_target(function, asked=SampleOptions(task=task, lora=lora, values=True, plan=loaded))
    for step, loss in enumerate(train_on_target(loaded, target, steps, lr)):
        console.print(f"step {step:>4}  loss {loss:.6f}")


@app.command(
    epilog=format_examples(
        "partitioner topology local:4",
        "partitioner topology dgx-h100:2 --yaml > cluster.yaml",
        "partitioner topology cluster.yaml --svg cluster.svg",
    )
)
def topology(
    name: Annotated[
        str,
        typer.Argument(
            help="The cluster: `local:4` (4 ranks on this machine), a preset and a number of nodes like `dgx-h100:2`, "
            "`detect` (the devices of this machine) or a YAML file."
        ),
    ],
    yaml: Annotated[
        bool,
        typer.Option(
            "--yaml",
            help="Print the topology as YAML, which can be edited and passed to `partitioner plan --topology`.",
        ),
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the devices and links to this SVG file.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the picture and the tables of the topology to this HTML file.", show_default=False),
    ] = None,
) -> None:
    """Show the devices and links of a topology."""
    from partitioner import Topology
    from partitioner.cli.show import topology_parts

    where = Topology.parse(name)
    if svg:
        from partitioner.draw.topology import draw_topology
        from partitioner.runtime.files import write_text

        write_text(svg, draw_topology(where))
    if html:
        from partitioner.report.page import build_topology_report
        from partitioner.runtime.files import write_text

        write_text(html, build_topology_report(where))
    if yaml:
        typer.echo(where.to_yaml(), nl=False)
        return
    print_parts(topology_parts(where))
    _print_written_paths([*([("picture", svg)] if svg else []), *([("report", html)] if html else [])])


@app.command(
    epilog=format_examples(
        "partitioner profile -o machine.yaml --ranks 4",
        "partitioner plan model.py:make --topology machine.yaml -o plan.json",
    )
)
def profile(
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the topology to this YAML file.")] = Path(
        "machine.yaml"
    ),
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks on this machine; default: one per GPU or, without GPUs, one per CPU core.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device to measure: `cuda` or `cpu`; default: `cuda` if there is a GPU.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure for a few seconds only, with less accuracy.")] = False,
) -> None:
    """Measure this machine, and write a topology file that `plan --topology` reads.

    Close other programs first. Ctrl-C ends the measurement, and nothing is written.
    """
    from partitioner.cli.show import topology_parts
    from partitioner.profile.profile import profile_machine as measure
    from partitioner.profile.report import profile_parts

    check_outputs(out)
    with show_progress_bar("Starting ranks") as report:
        found = measure(ranks, device=device, quick=quick, progress=report)
    _print_written_paths([("topology", found.save(out))])
    print_parts([*topology_parts(found.topology), *profile_parts(found.topology, found.errors)])


@app.command(epilog=format_examples("partitioner schema > plan.schema.json"))
def schema() -> None:
    """Print the JSON schema of plan files."""
    from partitioner.plans.files import plan_schema

    typer.echo(json.dumps(plan_schema(), indent=2))


def _print_summary(found: Any) -> None:
    from partitioner.explain.explain import summary_parts

    print_parts(summary_parts(found))


def _so_far(seen: Any) -> str:
    """Return the progress of a search as a short text. ``seen``: a ``Progress`` object. ``seen`` has the best step time
    so far, and three numbers of candidates: solved, ruled out by a lower bound, and remaining."""
    best = f", best so far {seconds_text(seen.best)}" if seen.best is not None else ""
    return (
        f"{format_plural(seen.num_evaluated, 'candidate')} solved, {seen.num_bounded} bounds, "
        f"{seen.num_open} open{best}"
    )


def _write_pictures(
    found: Any,
    svg: Path | None,
    timeline: Path | None,
    memory: Path | None,
    topology: Path | None = None,
    html: Path | None = None,
) -> list[tuple[str, Path]]:
    """Write pictures and a report of the plan ``found``. Each of ``svg`` (the graph), ``timeline``, ``memory``,
    ``topology`` and ``html`` (the report) is the file to write; ``None`` leaves it out. Return, for each written file,
    a word such as ``report`` and the file's path.
    """
    views = {"picture": ("graph", svg), "timeline": ("timeline", timeline), "memory": ("memory", memory)}
    views["topology"] = ("topology", topology)
    written = [(word, found.to_svg(path, view=view)) for word, (view, path) in views.items() if path is not None]
    return written if html is None else [*written, ("report", found.to_html(html))]


def _print_written_paths(written: Iterable[tuple[str, Path]]) -> None:
    """Print a line for each file in ``written``, pairs of a word such as ``report`` and the path of the file."""
    for what, path in written:
        build_output_console().print(Text.assemble((f"{what}: ", "dim"), str(path)))


add_watch_commands(app)

add_launch_commands(app)
add_size_command(app)
add_budget_command(app)
add_largest_command(app)
add_fit_command(app)
add_predict_commands(app)

if __name__ == "__main__":
    app()
