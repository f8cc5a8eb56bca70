"""The commands ``predict`` and ``export``: price another framework's configuration, and write a plan as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from partitioner.cli.console import build_output_console, check_outputs, print_parts, show_spinner
from partitioner.cli.options import (
    Adapters,
    Cluster,
    GlobalBatch,
    Meta,
    ModelFunction,
    PlanFile,
    Precision,
    SampleOptions,
    Seq,
    TaskName,
    announce_target,
    format_examples,
)
from partitioner.option_text import read_options
from partitioner.user_function import TargetError

_PREDICT_EPILOG = format_examples(
    'partitioner predict model.py:make --megatron "--tensor-model-parallel-size 4 --micro-batch-size 1 --bf16" '
    "--topology dgx-h100:2 --meta",
    "partitioner predict model.py:make --torchtitan train.toml --topology dgx-h100 --meta",
    "partitioner predict model.py:make --deepspeed ds_config.json --set recompute=full --topology dgx-h100",
)
_EXPORT_EPILOG = format_examples(
    "partitioner export plan.json torchtitan planned.py", "partitioner export plan.json megatron arguments.txt"
)


def add_predict_commands(app: typer.Typer) -> None:
    """Add the commands ``predict`` and ``export`` to the command line ``app``."""
    app.command(epilog=_PREDICT_EPILOG)(predict)
    app.command(epilog=_EXPORT_EPILOG)(export)


def predict(
    function: ModelFunction,
    topology: Cluster = "detect",
    megatron: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|FILE",
            help="Megatron-LM: a command line, or a script that contains one, or a YAML file of Megatron-Bridge.",
            show_default=False,
        ),
    ] = None,
    torchtitan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="torchtitan: a TOML file, or `FILE.py:FUNCTION` of version 0.3.", show_default=False
        ),
    ] = None,
    deepspeed: Annotated[
        str | None, typer.Option(metavar="FILE", help="DeepSpeed: a JSON configuration file.", show_default=False)
    ] = None,
    accelerate: Annotated[
        str | None, typer.Option(metavar="FILE", help="accelerate: a YAML configuration file.", show_default=False)
    ] = None,
    transformers: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="transformers: a JSON file with a `DistributedConfig` or `TrainingArguments`.",
            show_default=False,
        ),
    ] = None,
    more: Annotated[
        str | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE,...",
            help="Values for fields of `TrainingLayout` that the configuration does not set, like `recompute=full`.",
            show_default=False,
        ),
    ] = None,
    ignore: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Options in the configuration to ignore, because they belong to the training script and not to "
            "the framework.",
            show_default=False,
        ),
    ] = None,
    precision: Precision = None,
    global_batch: GlobalBatch = None,
    seq: Seq = None,
    task: TaskName = None,
    lora: Adapters = None,
    meta: Meta = False,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Predict the given layout only; do not search for the best plan for comparison."),
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which each search ends with the best plan so far.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the best plan that the search found to this JSON file.", show_default=False
        ),
    ] = None,
) -> None:
    """Predict step time and memory of another framework's configuration, and compare it with our own plan.

    Nothing in a configuration is executed. Options without effect on the prediction are listed.
    """
    from partitioner import Topology, read_layout

    given = {
        "megatron": megatron, "torchtitan": torchtitan, "deepspeed": deepspeed, "accelerate": accelerate,
        "transformers": transformers,
    }  # fmt: skip
    source = [(name, text) for name, text in given.items() if text is not None]
    if len(source) != 1:
        raise TargetError(
            f"{len(source)} configurations are given; expected one of --{', --'.join(given)}: give exactly one"
        )
    check_outputs(out)
    layout = read_layout(source[0][1], source[0][0], ignore=[*filter(None, (ignore or "").split(","))])
    changes: dict[str, Any] = read_options(more or "")
    changes |= {"precision": precision} if precision else {}
    changes |= {"global_batch": global_batch, "microbatches": None} if global_batch else {}
    layout = layout.replace(**changes)
    where = Topology.parse(topology)
    placed = layout.at(where.num_devices)  # contradictions are reported before the model is loaded
    length, batch = layout.seq_length, placed.global_batch
    sample = SampleOptions(seq, batch, task, lora, devices=where.num_devices, tokens=length)
    target = announce_target(function, meta=meta, asked=sample)
    from partitioner import predict_layout
    from partitioner.interop.predict import prediction_parts

    with show_spinner(f"Predicting {target.name} for {where.num_devices} devices"):
        found = predict_layout(
            layout,
            target.model,
            where,
            target.inputs,
            loss=target.loss,
            compare=not alone or out is not None,
            time_limit_s=time_limit,
        )
    print_parts(prediction_parts(found))
    if out is not None and found.ours is not None:
        build_output_console().print(Text.assemble(("plan: ", "dim"), str(found.ours.save(out))))


def export(
    plan_file: PlanFile,
    format: Annotated[
        str,
        typer.Argument(
            help="`megatron`, `torchtitan`, `deepspeed`, `accelerate` or `transformers`: a configuration of this "
            "framework. `perfetto`: the simulated step as a trace. `model-explorer`: graphs of stages and operators.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            help="File to write. torchtitan: `.py`, or `.toml` for versions up to 0.2; Megatron: `.yaml` for "
            "Megatron-Bridge.",
            show_default=False,
        ),
    ],
) -> None:
    """Write a plan as a configuration of another framework, or for a viewer, and list what is not in the file."""
    from partitioner import Plan

    check_outputs(out)
    missing = Plan.load(plan_file).export(format, out)
    console = build_output_console()
    console.print(Text.assemble(("written: ", "dim"), str(out)))
    if missing:
        console.print(Text("The file does not have:"))
    for each in missing:
        console.print(Text(f"- {each}"))
