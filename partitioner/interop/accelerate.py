"""Read and write configurations of accelerate (YAML with FSDP, DeepSpeed, Megatron-LM or ``ParallelismConfig``)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from partitioner.execution_profile import OURS, PROFILES
from partitioner.interop.deepspeed import build_deepspeed_layout
from partitioner.interop.layout import ContradictionError, LayoutError, TrainingLayout, UnusedOption
from partitioner.interop.options import (
    Options,
    flatten_sections,
    list_known_names,
    load_known_options,
    parse_mapping,
    read_text_file,
)

_DEVICES = ("CPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU")
_KINDS = ("NO", *(f"MULTI_{kind}" for kind in _DEVICES), "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP")
_STRATEGIES = {
    "FULL_SHARD": (3, False), "SHARD_GRAD_OP": (2, False), "NO_SHARD": (0, False), "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True), "_HYBRID_SHARD_ZERO2": (2, True),
    "1": (3, False), "2": (2, False), "3": (0, False), "4": (3, True), "5": (2, True),
}  # fmt: skip
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
_PREFIX = "parallelism_config."
_WHERE = "the accelerate configuration"
_BEYOND = {
    "fsdp_config.fsdp_forward_prefetch": "the prediction assumes that parameters are gathered ahead of their layer",
    "fsdp_config.fsdp_backward_prefetch": "the prediction assumes that parameters are gathered ahead of their layer",
    "fsdp_config.fsdp_backward_prefetch_policy": (
        "the prediction assumes that parameters are gathered ahead of their layer"
    ),
    "fsdp_config.fsdp_auto_wrap_policy": "the prediction assumes that parameters are gathered layer by layer",
    "fsdp_config.fsdp_min_num_params": "the prediction assumes that parameters are gathered layer by layer",
    "fsdp_config.fsdp_ignored_modules": "the prediction assumes that the states of all modules are sharded",
    "fsdp_config.fsdp_activation_checkpointing_offload": (
        "the prediction assumes that saved inputs of layers stay on the device"
    ),
    "megatron_lm_config.megatron_lm_gradient_clipping": "has no effect on the time or memory of a planned step",
}  # fmt: skip


def read_accelerate(text: str, folder: Path | None = None, ignore: Collection[str] = ()) -> TrainingLayout:
    """Return the training layout (mesh, batch, schedule, state sharding) that a YAML configuration of accelerate
    describes.

    ``text``: its content. ``folder``: the folder of a DeepSpeed file that the configuration names; ``None``: the
    configuration must not name such a file. ``ignore``: names of options that the training script itself defines; they
    are not reported as unknown.

    Raise :class:`LayoutError` for unknown options, wrong values and contradictions.
    """
    nested = parse_mapping(text, "yaml", _WHERE)
    sections = [name for name in load_known_options()["accelerate"] if name]
    flat = flatten_sections(nested, sections)
    options = Options(flat, _WHERE, ignore=ignore)
    options.reject_unknown(list_known_names("accelerate") | {*sections})
    options.take("compute_environment")
    kind = options.take_choice("distributed_type", {name: name for name in _KINDS}, "NO")
    processes, machines = options.take_number("num_processes"), options.take_number("num_machines", 1)
    if processes and processes % machines:
        raise ContradictionError(
            f"{_WHERE}: num_processes={processes} is not divisible by num_machines={machines}; expected a multiple"
        )
    of_node = processes // machines if processes else None
    compiled = {"fused_kernels": _is_compiled(options)}
    if kind == "DEEPSPEED":
        found = _read_deepspeed_section(options, folder, processes)
        return found.replace(profile=found.profile.model_copy(update=compiled))
    layout: dict[str, Any] = {"framework": "accelerate", "devices": processes, "zero": 0}
    layout["precision"] = _read_precision(options)
    facts: dict[str, Any] = {"name": "accelerate", **compiled}
    parallel = any(name.startswith(_PREFIX) for name in flat)
    if kind == "MEGATRON_LM":
        found = _read_megatron_section(options, layout)
        return found.replace(profile=found.profile.model_copy(update=compiled))
    if kind == "FSDP":
        layout |= _read_fsdp(options, of_node)
        facts["short_gradients"] = layout["precision"] in ("bf16", "fp16")
    elif any(name.startswith("fsdp_config.") for name in flat):
        for name in [name for name in flat if name.startswith("fsdp_config.")]:
            options.note(name, f"has no effect with distributed_type {kind}")
    if parallel:
        layout |= _read_axes(options, layout["zero"])
    _note_beyond(options)
    return TrainingLayout(**layout, profile=OURS.model_copy(update=facts), unused=options.list_unused())


def _is_compiled(options: Options) -> bool:
    """Return whether Inductor compiles the model, and fuses its operators. ``options``: the options of an accelerate
    configuration."""
    names = [name for name in ("dynamo_config.dynamo_backend", "dynamo_backend") if options.has(name)]
    backends = {name: str(options.take(name)).upper() for name in names}
    for name, backend in backends.items():
        if backend not in ("NO", "FALSE", "INDUCTOR"):
            options.note(name, "only the fusion of operators by Inductor is part of the prediction")
    return "INDUCTOR" in backends.values()


def _note_beyond(options: Options) -> None:
    for option, reason in _BEYOND.items():
        if options.has(option) and options.given[option] not in (False, {}):
            options.note(option, reason)


def _read_precision(options: Options) -> str:
    kinds = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "False": "fp32"}
    return str(options.take_choice("mixed_precision", kinds, "fp32"))


def _read_fsdp(options: Options, of_node: int | None) -> dict[str, Any]:
    """Return the fields of a training layout that the FSDP section decides (ZeRO stage, sharding ranks, offload and
    recomputation), as a dict: name -> value. ``of_node``: number of processes on a node; ``None`` if unknown.
    ``options``: the options of an accelerate configuration."""
    name = "fsdp_config.fsdp_"
    version = options.take_number(f"{name}version", 1)
    if version > 2:
        raise options.wrong_value(f"{name}version", "1 or 2")
    given = options.given.get(f"{name}reshard_after_forward")
    strategy = options.take_choice(f"{name}sharding_strategy", _STRATEGIES)
    if version == 2 and strategy is not None:
        options.note(f"{name}sharding_strategy", "has no effect in version 2, which has fsdp_reshard_after_forward")
        strategy = None
    if version == 1 and isinstance(given, str) and given.upper() in _STRATEGIES and strategy is None:
        strategy = options.take_choice(f"{name}reshard_after_forward", _STRATEGIES)
    elif version == 1:
        options.note(f"{name}reshard_after_forward", "has no effect in version 1, which has fsdp_sharding_strategy")
    zero, hybrid = strategy or (3, False)
    if version == 2:
        zero = 3 if options.take_flag(f"{name}reshard_after_forward", True) else 2
    found: dict[str, Any] = {"zero": zero}
    if hybrid and of_node:
        found["dp_shard"] = of_node
    elif hybrid:
        options.note(f"{name}sharding_strategy", "num_processes is not given; states are sharded over all ranks")
    moved = options.take_any_flag(f"{name}offload_params", f"{name}cpu_offload")
    found["offload"] = ("optimizer", "parameters") if moved else ()
    again = options.take_flag(f"{name}activation_checkpointing", None)
    found["recompute"] = None if again is None else "full" if again else "none"
    return found


def _read_axes(options: Options, zero: int) -> dict[str, Any]:
    """Return the fields of a training layout that the section ``parallelism_config`` decides (the sizes of the mesh
    axes, the attention algorithm and the sequence length), as a dict: name -> value. ``zero``: the ZeRO stage.
    ``options``: the options of an accelerate configuration."""
    name = f"{_PREFIX}parallelism_config_"
    sizes = {axis: options.take_number(f"{name}{axis}_size", 1) for axis in _AXES}
    options.take_choice(f"{name}cp_backend", {"torch": "torch"})
    options.take_choice(f"{name}sp_backend", {"deepspeed": "deepspeed"})
    way = options.take_choice(f"{name}cp_comm_strategy", {"allgather": "all_gather", "alltoall": "ring"}, "all_gather")
    length = options.take_number(f"{name}sp_seq_length")
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        raise ContradictionError(f"{_WHERE}: cp_size and sp_size are both above 1; expected one of them")
    if max(sizes["tp"], sizes["cp"]) > 1 and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
        raise ContradictionError(
            f"{_WHERE}: tp_size or cp_size with dp_replicate_size={sizes['dp_replicate']} and dp_shard_size=1; "
            "expected dp_shard_size of 2 or more, or one replica"
        )
    cp = sizes["cp"] * sizes["sp"]
    found: dict[str, Any] = {"tp": sizes["tp"], "cp": cp, "dp": sizes["dp_replicate"] * sizes["dp_shard"]}
    found |= {"dp_shard": sizes["dp_shard"], "dp_replicate": sizes["dp_replicate"]} if zero else {}
    found |= {"context": way if sizes["cp"] > 1 else "ulysses"} if cp > 1 else {}
    found |= {"sequence_parallel": False} if sizes["tp"] > 1 else {}
    return found | ({"seq_length": length} if length and sizes["sp"] > 1 else {})


def _read_deepspeed_section(options: Options, folder: Path | None, processes: int | None) -> TrainingLayout:
    """Return the training layout of a configuration of accelerate that uses DeepSpeed. ``options``: the options of an
    accelerate configuration; its section ``deepspeed_config`` names a DeepSpeed file or holds the options of DeepSpeed.
    ``folder``: the folder of this file; ``None``: naming a file is an error. ``processes``: number of processes;
    ``None`` if unknown."""
    file = options.take_text("deepspeed_config.deepspeed_config_file")
    if file is not None:
        if folder is None:
            raise LayoutError(
                f"{_WHERE}: deepspeed_config_file={file!r} is in another file; expected the path of this file, beside "
                "which it is looked for"
            )
        path = Path(file) if Path(file).is_absolute() else folder / file
        inner = build_deepspeed_layout(parse_mapping(read_text_file(path), "json", str(path)), str(path))
    else:
        inner = build_deepspeed_layout(_translate_deepspeed(options), "deepspeed_config")
    precision = inner.precision if file is not None and not options.has("mixed_precision") else _read_precision(options)
    if file is not None and inner.precision not in (precision, "fp32", None):
        raise ContradictionError(
            f"{_WHERE}: mixed_precision is {precision}, but {file} enables {inner.precision}; expected the same"
        )
    _note_beyond(options)
    profile = inner.profile.model_copy(update={"name": "accelerate, deepspeed"})
    return inner.replace(
        framework="accelerate",
        devices=processes,
        precision=precision,
        profile=profile,
        unused=(*options.list_unused(), *inner.unused),
    )


def _translate_deepspeed(options: Options) -> dict[str, Any]:
    """Return the options that accelerate would pass to DeepSpeed (in nested sections, as in DeepSpeed's JSON file) for
    the section ``deepspeed_config`` of its own configuration. ``options``: the options of the accelerate configuration.
    """
    name = "deepspeed_config."
    zero: dict[str, Any] = {"stage": options.take_number(f"{name}zero_stage", 2, least=0)}
    for what in ("optimizer", "param"):
        device = options.take_choice(f"{name}offload_{what}_device", {k: k for k in ("none", "cpu", "nvme")}, "none")
        if device != "none":
            zero[f"offload_{what}"] = {"device": device}
    found: dict[str, Any] = {"zero_optimization": zero}
    for option in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size"):
        if options.has(f"{name}{option}"):
            found[option] = options.take_number(f"{name}{option}")
    return found


def _read_megatron_section(options: Options, layout: dict[str, Any]) -> TrainingLayout:
    """Return the training layout of a configuration that uses Megatron-LM. ``options``: the options of an accelerate
    configuration. ``layout``: the fields that the other sections of the configuration decide, such as the precision:
    name -> value. This function adds fields to it."""
    name = "megatron_lm_config.megatron_lm_"
    tp, pp = options.take_number(f"{name}tp_degree", 1), options.take_number(f"{name}pp_degree", 1)
    layout |= {"tp": tp, "pp": pp, "schedule": "1f1b" if pp > 1 else None}
    layout["microbatches"] = options.take_number(f"{name}num_micro_batches")
    layout["zero"] = int(options.take_flag(f"{name}use_distributed_optimizer"))
    sequence = options.take_flag(f"{name}sequence_parallelism")
    layout |= {"sequence_parallel": bool(sequence)} if tp > 1 else {}
    layout["recompute"] = "scores" if options.take_flag(f"{name}recompute_activations") else "none"
    _note_beyond(options)
    return TrainingLayout(**layout, profile=PROFILES["megatron-core"], unused=options.list_unused())


def write_accelerate(layout: TrainingLayout) -> tuple[str, tuple[UnusedOption, ...]]:
    """Return the text of a YAML configuration of accelerate for ``layout``, with FSDP 2 and a ``ParallelismConfig``,
    and the fields of the layout that accelerate cannot express.
    """
    missing: list[UnusedOption] = []

    def leave_out(field: str, reason: str) -> None:
        missing.append(UnusedOption(option=field, value=str(getattr(layout, field)), reason=reason))

    found: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    sharded = layout.zero in (2, 3)
    found["distributed_type"] = "FSDP" if sharded else "MULTI_GPU"
    # ranks along axes that this configuration cannot express
    lost = layout.pp * (1 if sharded else layout.tp * layout.cp)
    found |= {"num_processes": layout.devices // lost} if layout.devices else {}
    if layout.devices and lost > 1:
        leave_out("devices", "they are fewer without the axes that are left out")
    precision = {"fp32": "no", "nvfp4": "bf16"}.get(layout.precision or "fp32", layout.precision)
    if layout.precision is None:
        leave_out("precision", "it is float32 unless a type is given")
    elif layout.precision == "nvfp4":
        leave_out("precision", "there is no product in 4 bits; the type is bf16")
    found["mixed_precision"] = precision
    if layout.profile.fused_kernels:
        found["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    if layout.zero not in (0, 2, 3):
        leave_out("zero", "FSDP shards parameters, too, or gradients; nothing is sharded")
    if layout.pp > 1:
        for field in (
            "pp",
            "schedule",
            "virtual_stages",
            "layers_per_stage",
            "stage_layers",
            "first_less",
            "last_less",
        ):
            if getattr(layout, field) not in (None, (), 0):
                leave_out(field, "accelerate has no pipeline for training")
    if layout.ep > 1:
        for field in ("ep", "etp"):
            if getattr(layout, field) is not None:
                leave_out(field, "accelerate does not spread experts")
    for field in ("microbatch_size", "microbatches", "global_batch", "optimizer", "seq_length"):
        if getattr(layout, field) is not None:
            leave_out(field, "the training script says it")
    _add_fsdp(layout, found, sharded, leave_out)
    _add_parallelism(layout, found, sharded, leave_out)
    return yaml.safe_dump(found, sort_keys=False), tuple(missing)


def _add_fsdp(layout: TrainingLayout, found: dict[str, Any], sharded: bool, leave_out: Any) -> None:
    """Add the options of FSDP for ``layout`` to ``found``, the content of an accelerate configuration file.
    ``sharded``: whether parameters, gradients or optimizer states are sharded; otherwise FSDP is not used.
    ``leave_out``: function of (name of a field, reason) that records that accelerate cannot express the field."""
    wanted = {*layout.offload}
    if wanted and (wanted != {"optimizer", "parameters"} or not sharded):
        leave_out("offload", "FSDP moves parameters and states of the optimizer together, or nothing")
    if layout.recompute not in ("full", "none") and (sharded or layout.recompute):
        whole = layout.recompute in ("selective", "alternate")
        leave_out("recompute", "FSDP recomputes whole layers" if whole else "nothing is recomputed")
    elif not sharded:
        leave_out("recompute", "the training script says what is recomputed")
    if sharded:
        found["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_offload_params": wanted == {"optimizer", "parameters"},
            "fsdp_activation_checkpointing": layout.recompute in ("full", "selective", "alternate"),
        }


def _add_parallelism(layout: TrainingLayout, found: dict[str, Any], sharded: bool, leave_out: Any) -> None:
    """Add the sizes of the mesh axes of ``layout`` to ``found``, the content of an accelerate configuration file.
    ``sharded``: whether parameters, gradients or optimizer states are sharded. ``leave_out``: function of (name of a
    field, reason) that records that accelerate cannot express the field."""
    replicas = 1 if sharded else layout.dp or 1
    shard, replicate = (layout.dp_shard or layout.dp or 1, layout.dp_replicate or 1) if sharded else (1, replicas)
    if layout.tp == layout.cp == 1 and not (sharded and replicate > 1):
        return
    if not sharded:
        leave_out("tp", "axes besides data need FSDP")
        for field, used in (("cp", layout.cp > 1), ("context", layout.cp > 1), ("sequence_parallel", layout.tp > 1)):
            if used:
                leave_out(field, "axes besides data need FSDP")
        for field in ("dp", "dp_shard", "dp_replicate"):
            leave_out(field, "axes besides data need FSDP")
        return
    if layout.tp > 1 and layout.sequence_parallel is not False:
        leave_out("sequence_parallel", "values between layers are whole on each rank")
    sizes = {"dp_replicate_size": replicate, "dp_shard_size": shard, "tp_size": layout.tp}
    if max(layout.tp, layout.cp) > 1 and replicate > 1 and shard == 1:
        leave_out("dp_shard", "replicas with tensor or context parallelism need sharded states")
        leave_out("dp_replicate", "replicas with tensor or context parallelism need sharded states")
        sizes |= {"dp_replicate_size": 1, "dp_shard_size": replicate}
    more: dict[str, Any] = {}
    if layout.cp > 1 and layout.context == "ulysses":
        more = {"sp_size": layout.cp, "sp_backend": "deepspeed"}
    elif layout.cp > 1:
        more = {"cp_size": layout.cp, "cp_backend": "torch"}
        more["cp_comm_strategy"] = "alltoall" if layout.context == "ring" else "allgather"
        if layout.context is None:
            leave_out("context", "keys and values are gathered")
    found["parallelism_config"] = {f"parallelism_config_{name}": value for name, value in (sizes | more).items()}
