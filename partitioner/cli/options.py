"""Define the arguments and options that several commands share, and load the model that a command names.

A model is named as ``FILE.py:FUNCTION`` or ``package.module:function``, or by its configuration: a Hugging Face folder,
a ``config.json``, or a name on the hub.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from partitioner.cli.console import build_output_console, show_spinner
from partitioner.option_text import read_options
from partitioner.user_function import TargetError, blame_user_code, find_user_function, import_user_module

if TYPE_CHECKING:
    from torch import nn

    from partitioner.plan import Plan
    from partitioner.pretrained.load import PretrainedModel

PlanFile = Annotated[
    Path, typer.Argument(help="JSON file of a plan, as `partitioner plan -o` writes it.", show_default=False)
]

ModelFunction = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face folder, a `config.json` or a name on the hub; or `FILE.py:FUNCTION`, a function without "
        "arguments that returns a model, (model, inputs) or (model, inputs, loss); or `package.module:function`.",
        show_default=False,
    ),
]
Cluster = Annotated[
    str,
    typer.Option(
        "--topology",
        "-t",
        help="The cluster: `local:4` (4 ranks on this machine), a preset and a number of nodes like `dgx-h100:2`, "
        "`detect` (the devices of this machine) or a YAML file.",
    ),
]
Pins = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=VALUE,...",
        help="Constraints that fix a part of the plan, like `tp=2,zero=3`; the search chooses the rest.",
        show_default=False,
    ),
]
Picture = Annotated[
    Path | None, typer.Option(help="Draw the graph of stages and blocks to this SVG file.", show_default=False)
]
Chart = Annotated[Path | None, typer.Option(help="Draw the timeline of a step to this SVG file.", show_default=False)]
Layout = Annotated[
    Path | None,
    typer.Option(
        help="Draw the devices and links, with the rank on each device, to this SVG file.", show_default=False
    ),
]
Memory = Annotated[
    Path | None, typer.Option(help="Draw the memory of the ranks during a step to this SVG file.", show_default=False)
]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write a report with all pictures and tables to this HTML file.", show_default=False),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="Precision of the computation: `bf16`, `fp16`, `fp32`, `tf32`, `fp64`, `fp8` or `nvfp4`; default: the "
        "dtype of the parameters."
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        "--batch",
        help="Number of samples per step, over all ranks. The inputs of a `FILE.py:FUNCTION` then give only the "
        "shapes. "
        "Default: the batch of these inputs; for a configuration, 8 per device.",
        show_default=False,
    ),
]
Seq = Annotated[
    int | None,
    typer.Option(
        "--seq",
        help="For a configuration: number of tokens per sample (audio: samples of a waveform, or frames); default: "
        "2,048, or the number of positions of the model if that is smaller.",
        show_default=False,
    ),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="For a configuration: training task, one of `causal`, `seq2seq`, `masked`, `image`, `audio`, "
        "`contrastive` and `text`; default: the task of its `architectures`, or of its model type.",
        show_default=False,
    ),
]
Adapters = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="r=N,...",
        help="For a configuration: train low-rank adapters only, like `r=16,alpha=32,targets=q_proj+v_proj`.",
        show_default=False,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,FIELD=VALUE,...",
        help="Predict time and memory under another framework: `megatron-core`, `torchtitan` or `deepspeed`. The "
        "plan then has estimates and no program.",
        show_default=False,
    ),
]
Optimizer = Annotated[
    str, typer.Option(help="Optimizer whose states need memory: `adamw`, `adam`, `sgd_momentum`, `sgd` or `none`.")
]
Meta = Annotated[
    bool,
    typer.Option(
        "--meta",
        help="Create the model of a `FILE.py:FUNCTION` on the meta device, without memory for weights. A model "
        "from a configuration is always created there.",
    ),
]


def format_examples(*lines: str) -> str:
    """Return the section with examples at the end of a command's help, in Markdown. ``lines``: the command line of each
    example.
    """
    return "**Examples**\n\n" + "\n\n".join(f"`{line}`" for line in lines)


SHAPE = "a model, (model, inputs) or (model, inputs, loss)"


def all_constraints(given: Mapping[str, Any], more: str | None) -> dict[str, Any]:
    """Return all constraints that a command was given, name -> value. ``given``: the values of the options that set a
    single constraint, by name (``None``: not given). ``more``: the text of the option ``--constraints``, such as
    ``tp=8,pp=2``.

    Raise :class:`TargetError` if a constraint has two different values, and :class:`ConstraintError` if ``more`` is
    malformed.
    """
    asked = read_options(more or "")
    options = {name: value for name, value in given.items() if value is not None}
    twice = [name for name in options if name in asked and asked[name] != options[name]]
    if twice:
        name = twice[0]
        raise TargetError(
            f"{name} is given twice, as {options[name]} by its option and as {asked[name]} in --constraints; "
            "expected it once"
        )
    return asked | options


@dataclass(frozen=True)
class TargetModel:
    """The model for which a command plans, from the user's function or from a Hugging Face configuration.

    ``model``: the module. ``inputs``: one global batch; ``None`` if the function returned none. ``loss``: function that
    computes the loss from the output; ``None`` if the output is or contains the loss. ``pretrained``: for a
    configuration, the same model together with its weights and with notes for the user; ``None`` for a function.
    """

    model: nn.Module
    inputs: Any = None
    loss: Callable[..., Any] | None = None
    pretrained: PretrainedModel | None = None

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def global_batch(self, asked: int | None) -> int | None:
        """Return the value to pass to ``partition`` as ``global_batch``, in samples: ``asked``, the value of the
        command's option (``None``: not given). For the model of a Hugging Face configuration, return ``None``, because
        its inputs were made with that number of samples."""
        return None if self.pretrained is not None else asked


@dataclass(frozen=True)
class SampleOptions:
    """Options of a command for a model and a batch that are built from a Hugging Face configuration. ``None`` means the
    default.

    ``seq``: tokens of a sample. ``batch``: samples of the global batch. ``task``: name of the task, which decides the
    class of the model. ``lora``: options of LoRA adapters as text. ``objective``: ``train`` or ``infer``. ``values``:
    whether tensors have values; otherwise they are on the meta device. ``devices``: number of devices, which decides
    the default number of samples. ``plan``: an existing plan of the model; if ``seq`` or ``batch`` is not given, the
    size in this plan is used. ``tokens``: length of a sample of tokens if ``seq`` is not given; without effect on
    samples of other kinds.
    """

    seq: int | None = None
    batch: int | None = None
    task: str | None = None
    lora: str | None = None
    objective: str = "train"
    values: bool = False
    devices: int = 64
    plan: Plan | None = None
    tokens: int | None = None

    def load(self, source: str) -> TargetModel:
        """Return the model of a Hugging Face configuration with inputs for it. These options decide task, batch size
        and sequence length. ``source``: path of the configuration, or its name on the Hugging Face hub."""
        from partitioner.pretrained.load import choose_samples, load_pretrained

        plan, batch = self.plan, self.batch
        if plan is not None:
            batch = batch or plan.global_batch or None

        def load(length: int | None, values: bool) -> PretrainedModel:
            return load_pretrained(
                source,
                seq=length,
                batch=choose_samples(self.devices) if batch is None else batch,
                task=self.task,  # type: ignore[arg-type]  # load_pretrained says what it may be
                lora=self.lora,
                objective=self.objective if plan is None else plan.objective,  # type: ignore[arg-type]
                values=values,
            )

        seq = self.seq
        if seq is None and plan is not None:
            seq = _find_planned_length(plan, lambda length: load(length, False))
        found = load(seq, self.values)
        ids = found.inputs.get("input_ids")
        if seq is None and self.tokens is not None and ids is not None and ids.shape[1] != self.tokens:
            found = load(self.tokens, self.values)
        return TargetModel(found.model, found.inputs, pretrained=found)


def _find_planned_length(plan: Plan, load: Callable[[int | None], PretrainedModel]) -> int | None:
    """Return the length of a sample (tokens, frames or samples of a waveform) with which a configuration's inputs have
    the same shapes as the inputs of ``plan``; ``None`` for the default length.

    The lengths that are tried are the dims of the plan's inputs, those of sequences of tokens first, then the default.
    If no length gives these shapes, return the first one. ``load``: builds the model with inputs of a length.
    """
    from partitioner.pretrained.configuration import PretrainedError

    if plan.written is None:
        return None
    shapes = {data.path: tuple(data.shape) for data in plan.written.inputs}
    of_tokens = [shape[1] for shape in shapes.values() if len(shape) == 2]
    others = [dim for shape in shapes.values() if len(shape) > 2 for dim in shape[1:]]
    lengths = [*dict.fromkeys([*of_tokens, *others]), None]
    for length in lengths:
        try:
            inputs = load(length).inputs
        except PretrainedError:
            continue
        if {name: tuple(value.shape) for name, value in inputs.items() if name in shapes} == shapes:
            return length
    return lengths[0]


def announce_target(text: str, *, meta: bool = False, asked: SampleOptions | None = None) -> TargetModel:
    """Return the model that ``text`` names, with inputs and loss if it has them. If it was built from a configuration,
    print its class, its task, the reason for both, and the shapes of its inputs.

    ``text``: ``FILE.py:FUNCTION``, where the function returns the model, or the path or name of a Hugging Face
    configuration. ``meta``: create a function's tensors on the meta device. ``asked``: options for a configuration;
    ``None``: the defaults. Raise the errors of :func:`load_target`.
    """
    with show_spinner(f"Loading {text}"):
        target = load_target(text, meta=meta, asked=asked)
    if (found := target.pretrained) is not None:
        console = build_output_console()
        sizes = [(name, getattr(value, "shape", None)) for name, value in found.inputs.items()]
        inputs = ", ".join(name if size is None else f"{name} {'×'.join(map(str, size))}" for name, size in sizes)
        console.print(
            Text.assemble(("model: ", "dim"), f"{target.name}, task {found.task} ({found.why})"), soft_wrap=True
        )
        console.print(Text.assemble(("inputs: ", "dim"), inputs), soft_wrap=True)
    return target


def load_target(text: str, *, meta: bool = False, asked: SampleOptions | None = None) -> TargetModel:
    """Return the model that ``text`` names, with inputs and loss if it has them. ``text``: ``FILE.py:FUNCTION``, where
    the function returns the model, or the path or name of a Hugging Face model folder or ``config.json``. ``meta``:
    create a function's tensors on the meta device, without memory. ``asked``: options for a Hugging Face configuration,
    such as the batch size and the sequence length; ``None``: the defaults.

    Raise :class:`TargetError` if the file or function does not exist, if the function fails, or if its result is not a
    model, (model, inputs) or (model, inputs, loss). Raise :class:`PretrainedError` for a configuration that cannot be
    used.
    """
    asked = asked or SampleOptions()
    where, colon, name = text.rpartition(":")
    if (Path(text).exists() and not text.endswith(".py")) or (not colon and text and not text.endswith(".py")):
        return asked.load(text)
    if not colon or not where or not name:
        raise TargetError(
            f"{text!r} names no model; expected FILE.py:FUNCTION, where FUNCTION() returns {SHAPE}, or a folder with a "
            "config.json"
        )
    given = [option for option in ("seq", "task", "lora") if getattr(asked, option) is not None]
    if given:
        raise TargetError(
            f"--{given[0]} applies only to a configuration, but {text} is a function, which creates the inputs "
            f"itself; leave --{given[0]} out"
        )
    function = find_user_function(import_user_module(where), where, name)
    import torch  # the user's file has imported it already; a wrong name is reported without it

    with blame_user_code(text), torch.device("meta") if meta else contextlib.nullcontext():
        made = function()
    return _parse_target_model(made, text)


def _parse_target_model(made: Any, text: str) -> TargetModel:
    """Return the model, inputs and loss function in ``made``, the result of the user's model function. ``text``: the
    name of the function, for messages. Raise :class:`TargetError` if the result has another form.
    """
    from torch import nn

    parts = made if isinstance(made, tuple) else (made,)
    if (
        1 <= len(parts) <= 3
        and isinstance(parts[0], nn.Module)
        and (len(parts) < 3 or parts[2] is None or callable(parts[2]))
    ):
        return TargetModel(*parts)
    shape = ", ".join(type(p).__name__ for p in parts)
    raise TargetError(f"{text} returned {f'({shape})' if isinstance(made, tuple) else shape}; expected {SHAPE}")
