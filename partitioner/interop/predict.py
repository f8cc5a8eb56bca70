"""Predict a step of another framework's layout, and compare it with this project's own plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from torch import Tensor, nn

from partitioner.api import partition
from partitioner.constraints import Constraints
from partitioner.errors import CapacityError
from partitioner.explain.memory_texts import memory_words
from partitioner.explain.tables import build_bar_chart, build_empty_table, format_heading, format_text_line
from partitioner.explain.time_parts import time_shares
from partitioner.interop.layout import ContradictionError, TrainingLayout, UnusedOption, divide_layers
from partitioner.interop.options import NO_EFFECT, NOT_USED, OF_MODEL
from partitioner.passes.capture.wrappers import unwrap_model
from partitioner.passes.errors import PartitionError
from partitioner.passes.faults import typed_errors
from partitioner.plan import Plan
from partitioner.plans.figures import candidate_text, list_usable_bytes, memory_text
from partitioner.topology import Topology
from partitioner.topology.files import with_memory
from partitioner.units import bytes_text, format_percent, format_plain_text, format_plural, seconds_text

_GROWTH = (4.0, 32.0, 1024.0)  # factors on the memory of devices on which a layout that does not fit is priced
_SMALL = 0.05  # fraction of the memory: less free memory is called little

# Option that describes a model -> the fields of a configuration of transformers with the same meaning.
_MODEL_FIELDS: dict[str, tuple[str, ...]] = {
    "num-layers": ("num_hidden_layers",),
    "hidden-size": ("hidden_size",),
    "ffn-hidden-size": ("intermediate_size",),
    "num-attention-heads": ("num_attention_heads",),
    "num-query-groups": ("num_key_value_heads",),
    "kv-channels": ("head_dim",),
    "num-experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num-moe-experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe-router-topk": ("num_experts_per_tok",),
    "moe-ffn-hidden-size": ("moe_intermediate_size",),
}


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of another framework's configuration on a cluster, compared with this project's plan for the
    same model, batch and cluster. A layout that does not fit is priced as if devices had enough memory.

    ``layout``: how the configuration divides the training on the cluster's devices. ``plan``: that layout as a plan
    without a program, with the step time and the memory of each rank. ``missing_bytes``: bytes that the fullest rank
    lacks; 0 if the layout fits. ``ours``: this project's own plan; ``None`` if it was not requested or does not exist.
    ``notes``: assumptions, one sentence each. ``compiled_s``: seconds of a step with the layout if a compiler fused its
    operators, as in ``ours``. It is ``None`` if the configuration already uses a compiler, if the layout does not fit,
    or if ``ours`` does not use a compiler or does not exist.
    """

    layout: TrainingLayout
    plan: Plan
    missing_bytes: int
    ours: Plan | None
    notes: tuple[str, ...] = ()
    compiled_s: float | None = None

    @property
    def fits(self) -> bool:
        """Return whether the predicted layout fits: every rank has enough memory for it."""
        return not self.missing_bytes

    @property
    def step_time(self) -> float:
        """Return the predicted seconds of a step with the layout of the other framework's configuration."""
        return self.plan.estimate.step_time

    @property
    def gain(self) -> float | None:
        """Return the step time of the other framework's layout divided by the step time of this project's own plan;
        ``None`` if there is no such plan."""
        return self.step_time / self.ours.estimate.step_time if self.ours is not None else None

    def __str__(self) -> str:
        return format_plain_text(prediction_parts(self))


@typed_errors("predict_layout()")
def predict_layout(
    layout: TrainingLayout,
    model: nn.Module,
    topology: Topology,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    compare: bool = True,
    time_limit_s: float | None = None,
) -> Prediction:
    """Predict a training step of ``layout``: its time and the memory of every rank, before training is launched.

    Args:
        layout: the layout of another framework's configuration, from :func:`partitioner.read_layout`. The search
            chooses the fields that are ``None``; ``layout.replace(recompute="full")`` sets one.
        model: a module that ``torch.export`` accepts, or an exported program. ``topology``: the cluster.
        inputs: one global batch, or a sample of it if the layout says how large the batch is; ``None``: an
            exported program's own, or dummy inputs (:func:`partitioner.partition`).
        loss: computes the scalar loss from the output; ``None``: the output is, or contains, the loss.
        compare: also make this project's own plan for the same model, batch and cluster.
        time_limit_s: seconds after which each search ends with its best plan so far; ``None``: no limit.

    Raises :class:`partitioner.ContradictionError` if the layout does not fit the devices, the batch or the model, and
    :class:`partitioner.PartitionError` if the cost model cannot price it.
    """
    placed = layout.at(topology.num_devices)
    notes: list[str] = []
    pins = _add_cuts(placed, model, notes)
    given: dict[str, Any] = {"global_batch": placed.global_batch, "loss": loss, "precision": placed.precision}
    given |= {"optimizer": placed.optimizer or "adamw", "time_limit_s": time_limit_s}
    plan, missing = _price_layout(placed, model, topology, inputs, (pins, given, notes))
    length = plan.tokens_per_sample
    if placed.seq_length and length not in (0, placed.seq_length):
        notes.append(
            f"The configuration has samples of {placed.seq_length} tokens, but the inputs have {length}. The "
            f"prediction is for the inputs; pass inputs of {placed.seq_length} tokens to predict the "
            "configuration."
        )
    notes += _note_other_model(placed, model)
    ours = None
    if compare:
        try:
            ours = partition(model, topology, inputs, **given)
        except CapacityError as error:
            notes.append(f"This project has no plan for the job: {error.message}.")
    compiled_s = None
    if ours is not None and not missing and ours.profile.fused_kernels and not placed.profile.fused_kernels:
        fused = placed.profile.model_copy(update={"fused_kernels": True})
        with suppress(PartitionError):  # such as the time limit: the prediction itself stands
            compiled, _ = _price_layout(placed.replace(profile=fused), model, topology, inputs, (pins, given, []))
            compiled_s = compiled.estimate.step_time
    return Prediction(placed, plan, missing, ours, tuple(notes), compiled_s)


def _price_layout(
    layout: TrainingLayout,
    model: nn.Module,
    topology: Topology,
    inputs: Any,
    job: tuple[Constraints, dict[str, Any], list[str]],
) -> tuple[Plan, int]:
    """Return the plan of ``layout`` for ``model`` without a program, and the bytes that its fullest rank lacks on
    ``topology`` (0 if it fits). A layout that does not fit is planned on devices with larger memories.

    ``inputs``: one global batch. ``job``: a triple of the constraints, further arguments of ``partition`` by name, and
    a list of assumptions (sentences), to which this function may add. Raise :class:`CapacityError` if the layout does
    not even fit into the largest memories that are tried.
    """
    pins, given, notes = job

    def price(where: Topology, constraints: Constraints) -> Plan:
        return partition(
            model, where, inputs, constraints=constraints, profile=layout.profile, estimate_only=True, **given
        )

    try:
        return price(topology, pins), 0
    except CapacityError:
        if pins.recompute is None:
            pins = pins.model_copy(update={"recompute": "full"})
            notes.append(
                "The configuration does not say what backward recomputes; the prediction assumes that whole "
                "layers are recomputed."
            )
        for times in _GROWTH:
            larger = with_memory(topology, times)
            try:
                if larger is not None:
                    plan = price(larger, pins)
                    return plan, _count_missing_bytes(plan, topology)
            except CapacityError:
                continue
        raise


def _count_missing_bytes(plan: Plan, topology: Topology) -> int:
    """Return the largest number of bytes by which a rank of ``plan`` exceeds the usable memory of its device on
    ``topology``; 0 if all ranks fit.
    """
    rooms = list_usable_bytes(plan.model_copy(update={"topology": topology}))
    return max(0, *(peak - room for peak, room in zip(plan.estimate.memory, rooms, strict=True)))


def _add_cuts(layout: TrainingLayout, model: nn.Module, notes: list[str]) -> Constraints:
    """Return the constraints of ``layout``, with the pipeline stage of each layer of ``model``. Assumptions are added
    to ``notes``. Raise :class:`ContradictionError` if the layout has another number of layers than the model.
    """
    pins = layout.constraints
    if layout.pp == 1:
        return pins
    lists = _list_layers(model)
    wanted = sum(layout.stage_layers)
    found = next((paths for paths in lists if len(paths) == wanted), None) if wanted else next(iter(lists), None)
    if found is None:
        if wanted:
            have = ", ".join(str(len(paths)) for paths in lists) or "none"
            raise ContradictionError(
                f"the stages have {wanted} layers together, but lists of layers in the model have {have}; expected a "
                "configuration of this model"
            )
        notes.append(
            "The model has no list of layers (ModuleList or Sequential), so the search chooses the cuts between stages."
        )
        return pins
    sizes = divide_layers(layout, len(found))
    stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    chunks = len(sizes) // layout.pp
    update: dict[str, Any] = {"stage_of": dict(zip(found, stages, strict=True))}
    if layout.layers_per_stage:
        update["virtual_stages"] = chunks
        update["schedule"] = "1f1b" if chunks == 1 and layout.schedule == "interleaved" else layout.schedule
    return Constraints(**(pins.given | update))


def _note_other_model(layout: TrainingLayout, model: nn.Module) -> list[str]:
    """Return a sentence for each option in ``layout`` that describes another model than ``model``: another number of
    layers, or a size that differs from the model's own configuration (for models of transformers).
    """
    config = getattr(unwrap_model(model)[0], "config", None)
    notes = []
    for option in layout.unused:
        name = option.option.lstrip("-").rpartition(".")[2].replace("_", "-")
        if name not in _MODEL_FIELDS or not option.value.isdecimal():
            continue
        known = {value for field in _MODEL_FIELDS[name] if isinstance(value := getattr(config, field, None), int)}
        if name == "num-layers":
            known |= {len(paths) for paths in _list_layers(model)}
        if known and int(option.value) not in known:
            have = " or ".join(f"{number:,}" for number in sorted(known))
            notes.append(
                f"The configuration is of another model: {option.option} is {int(option.value):,}, and the given model "
                f"has {have}. The prediction is for the given model."
            )
    return notes


def _list_layers(model: nn.Module) -> list[list[str]]:
    """Return the layers of ``model`` as lists of module paths, one list for each ``ModuleList`` or ``Sequential`` that
    is not inside another one, the longest first.
    """
    found: list[list[str]] = []
    inside: list[str] = []
    for path, module in unwrap_model(model)[0].named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            if any(path.startswith(f"{outer}.") for outer in inside):
                continue
            inside.append(path)
            found.append([f"{path}.{index}" if path else str(index) for index in range(len(module))])
    return sorted(found, key=lambda paths: -len(paths))


def prediction_parts(found: Prediction) -> list[RenderableType]:
    """Return a report on ``found``, a prediction for another framework's configuration, as texts, tables and charts of
    the library rich, to print on a terminal in this order.
    """
    plan, layout = found.plan, found.layout
    name = (
        layout.profile.name
        if layout.profile.name == layout.framework
        else f"{layout.framework} ({layout.profile.name})"
    )
    parts: list[RenderableType] = [
        format_heading(f"{plan.model} as {name} runs it on {format_plural(plan.world_size, 'device')}"),
        format_text_line(str(layout)),
        "",
        _build_comparison(found),
        "",
        format_heading("Does it fit?"),
        *_explain_memory(found),
        "",
        format_heading("What limits it?"),
        *_explain_time(found),
    ]
    if found.ours is not None and found.gain is not None:
        parts += ["", format_heading("What would our plan gain?"), format_text_line(_explain_gain(found))]
    if found.notes:
        parts += ["", format_heading("What was assumed"), *(format_text_line(f"- {note}") for note in found.notes)]
    if layout.unused:
        parts += ["", format_heading("Options that do not change the prediction")]
        parts += [format_text_line(f"- {line}") for line in group_unused(layout.unused)]
    return parts


def group_unused(unused: tuple[UnusedOption, ...]) -> list[str]:
    """Return one line for each reason why options do not change a prediction: first lines on single options, then lines
    on options that may matter, on options that describe the model, and on options without effect. ``unused``: the
    options, each with its reason."""
    by_reason: dict[str, list[UnusedOption]] = {}
    for option in unused:
        by_reason.setdefault(option.reason, []).append(option)
    common = (NOT_USED, OF_MODEL, NO_EFFECT)
    lines = [str(option) for reason, options in by_reason.items() if reason not in common for option in options]
    for reason in common:
        options = by_reason.get(reason, [])
        names = ", ".join(f"{each.option}={each.value}" if each.value else each.option for each in options)
        if len(options) == 1:
            lines.append(f"{names}: {reason}")
        elif options:
            lines.append(f"each of these {reason}: {names}")
    return lines


def _build_comparison(found: Prediction) -> RenderableType:
    """Return a table of step time, memory and other figures of the prediction ``found``, with a column for the other
    framework's configuration and, if it exists, one for this project's own plan."""
    table = build_empty_table([("", False), ("configuration", True), *([("our plan", True)] if found.ours else [])])
    plans = [found.plan, *([found.ours] if found.ours else [])]

    def add(name: str, value: Callable[[Plan], str]) -> None:
        table.add_row(Text(name), *(Text(value(plan)) for plan in plans))

    add("layout", lambda plan: candidate_text(plan.chosen))
    add("schedule", lambda plan: plan.schedule if plan.num_stages > 1 else "one stage")
    add("microbatch size", lambda plan: str(plan.chosen.microbatch_size))
    add("microbatches", lambda plan: str(plan.num_microbatches))
    add("step time", lambda plan: seconds_text(plan.estimate.step_time))
    if all(plan.tokens_per_step for plan in plans):
        add("tokens per second", lambda plan: f"{plan.tokens_per_step / plan.estimate.step_time:,.0f}")
    add("MFU", lambda plan: format_percent(plan.estimate.mfu))
    add("bubble", lambda plan: format_percent(plan.estimate.bubble))
    add("memory, fullest rank", lambda plan: bytes_text(max(plan.estimate.memory)) if plan is found.plan
        else memory_text(plan))  # fmt: skip
    return table


def _find_fullest(found: Prediction) -> tuple[int, int]:
    """Return two numbers for the predicted layout in ``found``: the rank with the highest peak memory, and the usable
    bytes of its device.
    """
    memory = found.plan.estimate.memory
    peak = max(range(len(memory)), key=lambda rank: memory[rank])
    rooms = list_usable_bytes(found.plan)
    return peak, rooms[peak]


def _explain_memory(found: Prediction) -> list[RenderableType]:
    """Return the part of the report that says whether the layout of the prediction ``found`` fits into memory, and a
    chart of the fullest rank's memory.
    """
    plan = found.plan
    rank, room = _find_fullest(found)
    peak, stage = plan.estimate.memory[rank], rank // (plan.world_size // plan.num_stages)
    where = f"rank {rank}" + (f", on stage {stage}," if plan.num_stages > 1 else "")
    if found.missing_bytes:
        usable = peak - found.missing_bytes
        lines = [
            f"No: {where} needs {bytes_text(peak)}, {bytes_text(found.missing_bytes)} more than the "
            f"{bytes_text(usable)} that a device has for it. The figures are those of devices with enough memory."
        ]
    else:
        lines = [f"Yes: {where} needs {bytes_text(peak)} of {bytes_text(room)}; {bytes_text(room - peak)} are left."]
        if room - peak < _SMALL * room:
            lines += ["That is little: fragmentation and libraries may need it."]
    parts = sorted(plan.estimate.stages[stage].memory.items(), key=lambda item: -item[1])
    total = max(1, sum(size for _, size in parts))
    words = memory_words(plan)
    chart = build_bar_chart([(words.get(kind, kind), size / total, bytes_text(size)) for kind, size in parts if size])
    return [*map(format_text_line, [*lines, "Its peak consists of:"]), chart]


def _explain_time(found: Prediction) -> list[RenderableType]:
    """Return the part of the report that says what limits the step time of the prediction ``found``, and a chart of its
    parts.
    """
    plan = found.plan
    shares = time_shares(plan)
    lines = [f"Most of the step is {shares[0][0]}."] if shares else []
    if found.missing_bytes:
        lines = ["Memory: the layout does not fit.", *lines]
    seconds = plan.estimate.step_time
    chart = build_bar_chart([(name, share, seconds_text(share * seconds)) for name, share in shares])
    return [*map(format_text_line, lines), chart]


def _explain_gain(found: Prediction) -> str:
    """Return, for the prediction ``found``, a sentence that compares the step time of this project's own plan with that
    of the other framework's configuration."""
    assert found.ours is not None and found.gain is not None
    taken = seconds_text(found.ours.estimate.step_time)
    if not found.fits:
        return f"It fits, and takes {taken} for a step."
    compiled = ""
    if found.compiled_s is not None:
        compiled = (
            " Our runtime compiles the operators, and the configuration does not: with torch.compile, a step of the "
            f"configuration would take {seconds_text(found.compiled_s)}."
        )
    if found.gain >= 1:
        less = format_percent(1 - 1 / found.gain)
        return f"A step takes {taken}: {found.gain:.2f} times as fast, {less} less time.{compiled}"
    return (
        f"Nothing: a step takes {taken}, {format_percent(1 / found.gain - 1)} more. The configuration's framework "
        f"executes something that our runtime does not, or less memory is left free under it.{compiled}"
    )
