"""Read and write configurations of transformers: ``DistributedConfig``, and ``TrainingArguments`` with FSDP or
DeepSpeed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from partitioner.execution_profile import OURS
from partitioner.interop.deepspeed import build_deepspeed_layout
from partitioner.interop.layout import ContradictionError, OptionValueError, TrainingLayout, UnusedOption
from partitioner.interop.options import (
    Options,
    flatten_sections,
    list_known_names,
    load_known_options,
    parse_mapping,
    read_text_file,
)
from partitioner.topology.validate import format_suggestion

_WHERE = "the transformers configuration"
_OF_DEEPSPEED = (  # options of DeepSpeed that the trainer fills in
    ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
)
_WORDS = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "hybrid_shard_zero2": 2}
_SIZES = ("tp_size", "pp_size", "fsdp_size", "dp_replicate_size", "ep_size")
_STYLES = (  # styles in plans for single modules: tensor and expert parallelism, FSDP, and names of versions 4.5x
    "all_reduce", "colwise", "colwise_gather_output", "colwise_rep", "embedding_colwise", "embedding_rowwise",
    "ep_dispatch_experts", "ep_router", "free_full_weight", "gather", "grouped_gemm", "keep_full_weight", "local",
    "local_colwise", "local_packed_rowwise", "local_params", "local_rowwise", "mla_kv_a_proj", "moe_identity_expert",
    "moe_tp_experts", "packed_colwise", "packed_rowwise", "replicate", "replicated_with_grad_allreduce", "rowwise",
    "rowwise_rep", "rowwise_split_input", "sequence_parallel",
)  # fmt: skip


def read_transformers(
    text: str, folder: Path | None = None, ignore: Collection[str] = (), syntax: str = "json"
) -> TrainingLayout:
    """Return the training layout (mesh, batch, schedule, state sharding) that a configuration of transformers
    describes.

    ``text``: the fields of a ``DistributedConfig`` or of ``TrainingArguments``. ``folder``: the folder to which the
    path of a DeepSpeed file in the configuration is relative; ``None``: the current folder. ``ignore``: names of
    options that the training script itself defines; they are not reported as unknown. ``syntax``: ``json`` or
    ``yaml``.

    Raise :class:`LayoutError` for unknown options, wrong values and contradictions.
    """
    nested = parse_mapping(text, syntax, _WHERE)
    own = {*load_known_options()["transformers"]["distributed_config"]}
    if (nested and {*map(str, nested)} <= own | {"distributed_config"}) or any(name in nested for name in _SIZES[1:]):
        return _read_distributed(Options(nested, _WHERE))
    sections = ["fsdp_config", "distributed_config"]
    options = Options(flatten_sections(nested, sections), _WHERE)
    strip = {name: name.replace("fsdp_config.fsdp_", "fsdp_config.") for name in options.given}
    options = Options({strip[name]: value for name, value in options.given.items()}, _WHERE, ignore=ignore)
    options.reject_unknown(list_known_names("transformers") | {"fsdp_config"})
    return _read_arguments(options, folder)


def _read_distributed(options: Options) -> TrainingLayout:
    """Return the training layout that the fields of a ``DistributedConfig`` describe. ``options``: the options of a
    transformers configuration."""
    options.reject_unknown(load_known_options()["transformers"]["distributed_config"])
    tp, pp, shard, replicate, ep = (options.take_number(name, 1) for name in _SIZES)
    old = options.take_flag("enable_expert_parallel")
    if old and not options.has("ep_size"):
        ep = tp
    if ep > 1 and (ep % tp or (shard * tp) % ep):
        raise ContradictionError(
            f"{_WHERE}: ep_size={ep} is no multiple of tp_size={tp} that divides fsdp_size={shard} x tp_size; expected "
            f"a multiple of {tp} that divides {shard * tp}"
        )
    if shard * replicate > 1 and pp > 1:
        raise ContradictionError(
            f"{_WHERE}: pp_size={pp} with fsdp_size={shard} and dp_replicate_size={replicate}; expected pp_size alone, "
            "or none"
        )
    for name in ("tp_plan", "fsdp_plan", "ep_plan"):
        if options.given.get(name) == "auto":  # the model's own plan
            del options.given[name]
        elif options.has(name):
            _check_plan(options, name)
            options.note(name, "how single modules are sharded is chosen by the plan")
    if options.take_flag("enable_sequence_parallel"):
        options.note("enable_sequence_parallel", "is reserved and does nothing")
    if options.has("ep_implementation"):
        options.note("ep_implementation", "the prediction assumes that tokens are exchanged by an all-to-all")
    if pp > 1:
        options.note("pp_size", "the pipeline of transformers runs forward only; it is priced as GPipe")
    moved, short = options.take_flag("fsdp_cpu_offload"), options.take_flag("fsdp_mixed_precision")
    layout: dict[str, Any] = {
        "tp": tp, "pp": pp, "ep": ep, "dp": shard * replicate, "zero": 3 if shard > 1 else 0,
        "schedule": "gpipe" if pp > 1 else None, "offload": ("optimizer", "parameters") if moved and shard > 1 else (),
        "precision": "bf16" if short else None, "sequence_parallel": False if tp > 1 else None,
        "etp": 1 if ep > 1 else None, "devices": tp * pp * shard * replicate,
    }  # fmt: skip
    layout |= {"dp_shard": shard, "dp_replicate": replicate} if shard > 1 else {}
    profile = OURS.model_copy(update={"name": "transformers"})
    return TrainingLayout(framework="transformers", **layout, profile=profile, unused=options.list_unused())


def _is_compiled(options: Options) -> bool:
    """Return whether Inductor compiles the model, and fuses its operators. Setting a backend or a mode also switches
    compilation on. ``options``: the fields of ``TrainingArguments``."""
    enabled = options.take_flag("torch_compile")
    backend, mode = options.take("torch_compile_backend"), options.take("torch_compile_mode")
    if backend not in (None, "inductor"):
        options.note("torch_compile_backend", "only the fusion of operators by Inductor is part of the prediction")
        return False
    if mode not in (None, "default"):
        options.note("torch_compile_mode", "the prediction assumes the default mode")
    return enabled or backend is not None or mode is not None


def _check_plan(options: Options, name: str) -> None:
    """Raise :class:`OptionValueError` if the plan ``name`` among ``options``, such as ``tp_plan``, is not a mapping of
    modules to styles, has a style that transformers does not know, or names a single layer."""
    plan = options.given[name]
    if not isinstance(plan, Mapping):
        raise options.wrong_value(name, "auto, or a mapping of modules to styles")
    for module, style in plan.items():
        if not isinstance(style, str) or style not in _STYLES:
            meant = format_suggestion(style, [*_STYLES]) if isinstance(style, str) else ""
            raise OptionValueError(
                f"{_WHERE}: {name}: {module} has the unknown style {style!r}; {meant}expected one of "
                f"{', '.join(_STYLES)}: correct the style"
            )
        if re.search(r"\.\d+(\.|$)", str(module)):
            raise OptionValueError(
                f"{_WHERE}: {name}: {module} names a single layer, which transformers refuses; expected a name for all "
                f"layers, with * for the number: {re.sub(r'[.][0-9]+(?=[.]|$)', '.*', str(module))}"
            )


def _read_arguments(options: Options, folder: Path | None) -> TrainingLayout:
    """Return the training layout that the fields of ``TrainingArguments`` describe. ``options``: these fields.
    ``folder``: the folder to which the path of a DeepSpeed file in them is relative; ``None``: the current folder."""
    size = options.take_number("per_device_train_batch_size", options.take_number("per_gpu_train_batch_size", 8))
    steps = options.take_number("gradient_accumulation_steps", 1)
    bf16, fp16 = options.take_flag("bf16"), options.take_flag("fp16")
    if bf16 and fp16:
        raise ContradictionError(f"{_WHERE}: bf16 and fp16 together; expected one of them")
    checkpointed = options.take_any_flag("gradient_checkpointing", "activation_checkpointing")
    layout: dict[str, Any] = {
        "framework": "transformers", "microbatch_size": size, "microbatches": steps, "zero": 0,
        "precision": "bf16" if bf16 else "fp16" if fp16 else "fp32", "recompute": "full" if checkpointed else "none",
        "optimizer": _read_optimizer(options),
    }  # fmt: skip
    compiled = _is_compiled(options)
    if options.take_flag("use_liger_kernel"):
        options.note("use_liger_kernel", "the fused kernels of Liger are not modelled")
    facts: dict[str, Any] = {"name": "transformers", "fused_kernels": compiled}
    deepspeed = options.take("deepspeed")
    if deepspeed:
        found = _add_deepspeed(options, layout, deepspeed, folder)
        return found.replace(profile=found.profile.model_copy(update={"fused_kernels": compiled}))
    given = options.take("fsdp")
    if given:
        layout |= _read_fsdp(options, given)
        if options.take_flag("fsdp_config.activation_checkpointing"):
            layout["recompute"] = "full"
        facts["short_gradients"] = bf16 or fp16
    return TrainingLayout(**layout, profile=OURS.model_copy(update=facts), unused=options.list_unused())


def _read_optimizer(options: Options) -> str:
    name = str(options.take_text("optim", "adamw_torch")).lower()
    if name.startswith("sgd"):
        return "sgd"
    if not name.startswith("adamw") or any(word in name for word in ("8bit", "4bit", "bnb", "paged", "anyprecision")):
        options.note("optim", "is not known to this project; the prediction assumes the optimizer states of AdamW")
    return "adamw"


def _read_fsdp(options: Options, given: Any) -> dict[str, Any]:
    """Return two fields of a training layout: ``zero``, the ZeRO stage, and ``offload``, a tuple that names what is
    kept in host memory (``optimizer`` and ``parameters``, or nothing). ``given``: the value of the option ``fsdp``:
    true, or words such as ``full_shard offload``. ``options``: all options of a transformers configuration."""
    words = given.split() if isinstance(given, str) else given if isinstance(given, list) else []
    words = [str(word).lower() for word in words if str(word).lower() not in ("true", "1")]
    unknown = [word for word in words if word not in _WORDS and word not in ("auto_wrap", "offload")]
    if unknown or not isinstance(given, str | list | bool | int):
        raise options.wrong_value("fsdp", f"true, or words of {', '.join(_WORDS)}, offload and auto_wrap")
    version = options.take_number("fsdp_config.version", 2)
    keep = options.take("fsdp_config.reshard_after_forward")
    zero = next((_WORDS[word] for word in words if word in _WORDS), 3)
    if isinstance(keep, bool) or str(keep).lower() in ("true", "false"):
        zero = 3 if str(keep).lower() == "true" else 2
    elif keep is not None:
        if str(keep).lower() not in _WORDS:
            raise options.wrong_value("fsdp_config.reshard_after_forward", "true or false")
        zero = _WORDS[str(keep).lower()]
    if any(word.startswith("hybrid") for word in [*words, str(keep).lower()]):
        options.note("fsdp", "the ranks of a node are not known; states are sharded over all ranks")
    if version not in (1, 2):
        raise options.wrong_value("fsdp_config.version", "1 or 2")
    moved = options.take_any_flag("fsdp_config.cpu_offload", "fsdp_config.offload_params")
    return {"zero": zero, "offload": ("optimizer", "parameters") if moved or "offload" in words else ()}


def _add_deepspeed(options: Options, layout: dict[str, Any], given: Any, folder: Path | None) -> TrainingLayout:
    """Return the training layout of ``TrainingArguments`` that use DeepSpeed: the layout of the DeepSpeed
    configuration, completed by other options. Raise an error if a field has different values in both.

    ``options``: the fields of ``TrainingArguments``. ``layout``: the fields of the layout that follow from options
    other than DeepSpeed's: name -> value. ``given``: the DeepSpeed configuration, or the path of its file. ``folder``:
    the folder to which this path is relative; ``None``: the current folder.
    """
    where = "deepspeed"
    if isinstance(given, str):
        path = (folder or Path()) / given  # an absolute path stays as it is
        # relative to the folder in which a script starts
        path = path if path.exists() or not Path(given).exists() else Path(given)
        given, where = parse_mapping(read_text_file(path), "json", str(path)), str(path)
    if not isinstance(given, Mapping):
        raise options.wrong_value("deepspeed", "the path of a JSON file, or its content")
    for theirs, ours in _OF_DEEPSPEED:
        stated, wanted = given.get(theirs), options.given.get(ours)
        if stated not in (None, "auto") and wanted is not None and stated != wanted:
            raise ContradictionError(
                f"{_WHERE}: {ours}={wanted}, but {theirs}={stated} in {where}; expected the same, or auto"
            )
    inner = build_deepspeed_layout(given, where)
    kept = {name: layout[name] for name in ("framework", "recompute", "precision")}
    if inner.precision not in (None, "fp32", kept["precision"]):
        if kept["precision"] != "fp32":
            raise ContradictionError(
                f"{_WHERE}: the precision is {kept['precision']}, but {inner.precision} in {where}; expected the same "
                "precision in both"
            )
        kept["precision"] = inner.precision
    batch = {"microbatch_size": inner.microbatch_size or layout["microbatch_size"]}
    batch["microbatches"] = inner.microbatches or layout["microbatches"]
    profile = inner.profile.model_copy(update={"name": "transformers, deepspeed"})
    return inner.replace(
        **kept,
        **batch,
        optimizer=inner.optimizer or layout["optimizer"],
        profile=profile,
        unused=(*options.list_unused(), *inner.unused),
    )


def write_transformers(layout: TrainingLayout) -> tuple[str, tuple[UnusedOption, ...]]:
    """Return two values: the text of a JSON file with the fields of a ``DistributedConfig`` for ``layout``, and the
    fields of the layout that it cannot express, each with the reason."""
    missing: list[UnusedOption] = []

    def leave_out(field: str, reason: str) -> None:
        missing.append(UnusedOption(option=field, value=str(getattr(layout, field)), reason=reason))

    plain = {name: field.default for name, field in TrainingLayout.model_fields.items()}
    found: dict[str, Any] = {}
    shard, replicate = layout.dp_shard or layout.dp or 1, layout.dp_replicate or 1
    if layout.zero != 3:
        shard, replicate = 1, layout.dp or 1
        if layout.zero:
            for field in ("zero", "dp_shard", "dp_replicate"):
                leave_out(field, "parameters are sharded (ZeRO-3), or nothing is")
        elif layout.zero is None:
            leave_out("zero", "nothing is sharded unless it is asked for")
    if layout.pp > 1 and shard * replicate > 1:
        for field in ("pp", "schedule"):
            leave_out(field, "a pipeline excludes data parallelism")
    elif layout.pp > 1:
        found["pp_size"] = layout.pp
        if layout.schedule != "gpipe":
            leave_out("schedule", "layers run stage by stage, forward only")
    if layout.ep > 1 and (layout.ep % layout.tp or (shard * layout.tp) % layout.ep):
        leave_out("ep", "a multiple of tp that divides the sharded ranks is needed")
        leave_out("etp", "a multiple of tp that divides the sharded ranks is needed")
    elif layout.ep > 1:
        found["ep_size"] = layout.ep
        if layout.etp != 1:
            leave_out("etp", "an expert is on one rank")
    found |= {"tp_size": layout.tp, "fsdp_size": shard, "dp_replicate_size": replicate}
    if layout.tp > 1:
        found["tp_plan"] = "auto"
        if layout.sequence_parallel is not False:
            leave_out("sequence_parallel", "values between layers are whole on each rank")
    if layout.precision == "bf16":
        found["fsdp_mixed_precision"] = True
    elif layout.precision is not None:
        leave_out("precision", "the type is the model's, or bf16 with float32 sums")
    if layout.offload and ({*layout.offload} != {"optimizer", "parameters"} or shard == 1):
        leave_out("offload", "FSDP moves parameters and states of the optimizer together, or nothing")
    elif layout.offload:
        found["fsdp_cpu_offload"] = True
    others = (
        *("cp", "context", "microbatch_size", "microbatches", "global_batch", "recompute", "optimizer", "seq_length"),
        *("virtual_stages", "layers_per_stage", "stage_layers", "first_less", "last_less"),
    )
    for field in others:
        if getattr(layout, field) != plain[field]:
            leave_out(field, "the format has no such field")
    return json.dumps(found, indent=2) + "\n", tuple(missing)
