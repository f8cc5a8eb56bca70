"""Read and write configurations of DeepSpeed (JSON)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from partitioner.execution_profile import PROFILES
from partitioner.interop.layout import ContradictionError, TrainingLayout, UnusedOption
from partitioner.interop.options import Options, flatten_sections, list_known_names, load_known_options, parse_mapping

_NOTHING, _HOST, _DISK = "none", "cpu", "nvme"
_OPTIMIZERS = {
    "adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw", "sgd": "sgd_momentum",
}  # fmt: skip
# sections that accept any key
_LAX = ("activation_checkpointing", "pipeline", "expert_parallel", "optimizer", "scheduler")
_MICRO, _STEPS, _TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"

_BEYOND = {
    "amp": "mixed precision by Apex is not modelled",
    "communication_data_type": "the prediction assumes that gradients are reduced in the type of the execution profile",
    "seq_parallel_communication_data_type": "the prediction assumes that activations are exchanged in their own type",
    "fp32_allreduce": "the prediction assumes that gradients are reduced in the type of the execution profile",
    "sparse_gradients": "the prediction assumes that gradients are dense",
    "zero_optimization.zero_hpz_partition_size": "a second copy of parameters in each node is not modelled",
    "zero_optimization.zero_quantized_weights": "the prediction assumes that parameters are gathered in their own type",
    "zero_optimization.zero_quantized_gradients": (
        "the prediction assumes that gradients are reduced in the type of the execution profile"
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": (
        "the prediction assumes that parameters are gathered in their own type"
    ),
    "zero_optimization.round_robin_gradients": (
        "the prediction assumes that gradients are reduced to their owners in order"
    ),
    "zero_optimization.zenflow": "deferred updates are not modelled",
    "zero_optimization.stage3_param_persistence_threshold": "the plan chooses which small parameters stay unsharded",
    "zero_optimization.param_persistence_threshold": "the plan chooses which small parameters stay unsharded",
    "zero_optimization.stage3_max_live_parameters": (
        "the prediction assumes that parameters are freed after their layer"
    ),
    "zero_optimization.reduce_bucket_size": "the plan chooses the sizes of buckets",
    "zero_optimization.allgather_bucket_size": "the plan chooses the sizes of buckets",
    "zero_optimization.stage3_prefetch_bucket_size": (
        "the prediction assumes that the parameters of the next layer are gathered ahead"
    ),
    "activation_checkpointing.partition_activations": (
        "the prediction assumes that saved activations are not sharded over tp"
    ),
    "activation_checkpointing.cpu_checkpointing": (
        "the model's script decides what is recomputed; the prediction assumes that saved inputs stay on the "
        "device"
    ),
    "activation_checkpointing.number_checkpoints": "the model's script says what is recomputed",
    "pipeline.partition": "the prediction assumes that stages have equal numbers of layers",
    "tensor_parallel.partition_config": "the plan chooses how single layers are sharded",
    "tensor_parallel.preset_model": "the plan chooses how single layers are sharded",
    "tensor_parallel.tp_overlap_comm": "the overlap within single layers is not modelled",
    "compile": "the effect of DeepSpeed's compiler is not modelled",
    "compression_training": "compressed training is not modelled",
    "progressive_layer_drop": "the prediction assumes that no layers are dropped",
    "data_types.param_dtype": "the prediction assumes that parameters have the type of matrix products",
    "hybrid_engine": "generation is not predicted",
    "elasticity": "other numbers of devices are not predicted",
    "bf16.bf16_master_weights_and_grads": "the prediction assumes that master copies of parameters are in float32",
    "bf16.bf16_optimizer_states": "the prediction assumes that moments are in float32",
    "fp16.fp16_master_weights_and_grads": "the prediction assumes that master copies of parameters are in float32",
}  # fmt: skip


def read_deepspeed(
    text: str, where: str = "the DeepSpeed configuration", ignore: Collection[str] = ()
) -> TrainingLayout:
    """Return the training layout (mesh, batch, state sharding) that a JSON configuration of DeepSpeed describes.
    ``text``: its content. ``where``: the name of the source, for error messages. ``ignore``: names of options that the
    training script itself defines; they are not reported as unknown.

    Raise :class:`LayoutError` for unknown options, wrong values and contradictions.
    """
    return build_deepspeed_layout(parse_mapping(text, "json with comments", where), where, ignore)


def build_deepspeed_layout(nested: Mapping[str, Any], where: str, ignore: Collection[str] = ()) -> TrainingLayout:
    """Return the training layout (mesh, batch, state sharding) that a DeepSpeed configuration describes. ``nested``:
    its options, with sections as inner mappings. ``where``: the name of the source, for error messages. ``ignore``:
    names of options that the training script itself defines; they are not reported as unknown.

    Raise :class:`LayoutError` for unknown options, wrong values and contradictions.
    """
    sections = [name for name in load_known_options()["deepspeed"] if name]
    flat = flatten_sections(nested, sections)
    for name in sections:
        if name in flat and not isinstance(flat[name], Mapping | bool | None):
            Options(flat, where).reject_unknown(list_known_names("deepspeed") | {name})
            if name in ("zero_optimization", "bf16", "fp16", "tensor_parallel"):
                raise Options(flat, where).wrong_value(name, "a section with options")
    if isinstance(flat.get("zero_optimization"), bool):  # old form, in which true is stage 1
        flat["zero_optimization.stage"] = int(flat.pop("zero_optimization"))
    for name in ("bf16", "bfloat16", "fp16"):
        if isinstance(flat.get(name), bool):
            raise Options(flat, where).wrong_value(name, 'a section such as {"enabled": true}')
    options = Options(flat, where, ignore=ignore)
    lax = {name for name in flat if name.startswith(tuple(f"{section}." for section in _LAX))}
    misspelt = lax - list_known_names("deepspeed")
    comments = {name for name in flat if name.rpartition(".")[2].startswith("_")}
    options.reject_unknown(list_known_names("deepspeed") | {*sections} | misspelt | comments)
    for name in sorted(comments):
        options.note(name, "is a comment")
    for name in sorted(misspelt):
        options.note(name, "is not known; DeepSpeed ignores such names")
    layout = {"framework": "deepspeed", **_read_axes(options), **_read_batch(options), **_read_states(options)}
    layout["precision"] = _read_precision(options)
    layout["optimizer"] = _read_optimizer(options)
    profile = PROFILES["deepspeed"].model_copy(update=_read_profile(options, layout["zero"]))
    for option, reason in _BEYOND.items():
        if options.has(option) and options.given[option] is not False:
            options.note(option, reason)
    return TrainingLayout(**layout, profile=profile, unused=options.list_unused())


def _read_axes(options: Options) -> dict[str, Any]:
    """Return the fields of a training layout that say how ranks are divided (sizes of the mesh axes, sequence
    parallelism, attention algorithm), as a dict: name -> value. ``options``: the options of a DeepSpeed configuration.
    """
    tp = options.take_number("tensor_parallel.autotp_size", 0, least=0)
    inner = options.take_number("tensor_parallel.tp.tp_size", 1)
    if inner > 1 and inner != tp:
        raise ContradictionError(
            f"{options.where}: tensor_parallel.tp.tp_size={inner}, but autotp_size={tp}; expected both to be equal"
        )
    cp = options.take_number("sequence_parallel_size", 1)
    on = options.take_flag("expert_parallel.enabled")
    ep = options.take_number("expert_parallel.autoep_size", 1)
    etp = options.take_number("expert_parallel.expert_tensor_parallel_size", 1)
    if ep > 1 and not on:
        options.note("expert_parallel.autoep_size", "has no effect: expert_parallel.enabled is false")
        ep = 1
    pp = options.take_number("pipeline.stages", 1)
    found: dict[str, Any] = {"tp": max(tp, 1), "cp": cp, "ep": ep, "pp": pp, "etp": etp if ep > 1 else None}
    found |= {"context": "ulysses"} if cp > 1 else {}
    found |= {"sequence_parallel": False} if tp > 1 else {}
    found |= {"schedule": "1f1b"} if pp > 1 else {}
    interval = options.take_number("pipeline.activation_checkpoint_interval", 0, least=0)
    if interval and pp == 1:
        options.note("pipeline.activation_checkpoint_interval", "has no effect without a pipeline")
    elif interval:
        found["recompute"] = "full"
        if interval > 1:
            options.note(
                "pipeline.activation_checkpoint_interval",
                "the prediction assumes that the input of every layer is saved, not only that of a group of layers",
            )
    stage = options.given.get("zero_optimization.stage")
    if pp > 1 and str(stage) in ("2", "3"):
        raise ContradictionError(
            f"{options.where}: pipeline.stages={pp} with zero_optimization.stage={stage}, which DeepSpeed's pipeline "
            "engine refuses; expected stage 0 or 1, or one pipeline stage"
        )
    dp = options.take_number("data_parallel_size")
    return found | ({"dp": dp} if dp else {})


def _read_batch(options: Options) -> dict[str, Any]:
    """Return microbatch size, number of microbatches and global batch, as a dict of fields of a training layout: name
    -> value. Raise :class:`ContradictionError` if the global batch is not a multiple of the product of the other
    numbers. ``options``: the options of a DeepSpeed configuration."""
    micro, steps = options.take_number(_MICRO), options.take_number(_STEPS)
    total = options.take_number(_TOTAL)
    if micro and total and total % (micro * (steps or 1)):
        raise ContradictionError(
            f"{options.where}: {_TOTAL}={total} is not divisible by {_MICRO}={micro}"
            + (f" x {_STEPS}={steps}" if steps else "")
            + f"; expected a multiple of {micro * (steps or 1)}"
        )
    if micro and not total:
        steps = steps or 1
    if (
        micro
        and total
        and options.has("tensor_parallel.autotp_size")
        and (options.given["tensor_parallel.autotp_size"] not in (0, 1))
    ):
        # DeepSpeed multiplies by all processes; ranks of tp share samples, so the samples of a step are fewer
        options.note(
            _TOTAL,
            "counts each rank of tensor parallelism as a replica; the prediction uses the micro batch size and "
            "the accumulation steps instead",
        )
        return {"microbatch_size": micro, "microbatches": steps} if steps else {"microbatch_size": micro}
    return {"microbatch_size": micro, "microbatches": steps, "global_batch": total}


def _read_states(options: Options) -> dict[str, Any]:
    """Return the ZeRO stage, the kinds of data in host memory, and the number of ranks over which ZeRO shards, as a
    dict of fields of a training layout: name -> value. ``options``: the options of a DeepSpeed configuration."""
    stage = options.take_number("zero_optimization.stage", 0, least=0)
    if stage > 3:
        raise options.wrong_value("zero_optimization.stage", "0, 1, 2 or 3")
    devices = {name: name for name in (_NOTHING, _HOST, _DISK)}
    moved = options.take_choice("zero_optimization.offload_optimizer.device", devices, _NOTHING)
    weights = options.take_choice("zero_optimization.offload_param.device", devices, _NOTHING)
    if options.take_flag("zero_optimization.cpu_offload", None) and moved == _NOTHING:
        moved = _HOST
    for name in ("cpu_offload_param", "cpu_offload_params"):
        if options.take_flag(f"zero_optimization.{name}", None) and weights == _NOTHING:
            weights = _HOST
    share = options.take_share("zero_optimization.offload_optimizer.ratio", 1.0)
    if not 0 <= share <= 1:
        raise options.wrong_value("zero_optimization.offload_optimizer.ratio", "a number from 0 to 1")
    if share < 1 and stage != 3:
        raise ContradictionError(
            f"{options.where}: zero_optimization.offload_optimizer.ratio={share:g} with stage {stage}; expected "
            "stage 3, or a ratio of 1"
        )
    if share < 1:
        options.note(
            "zero_optimization.offload_optimizer.ratio",
            "the prediction assumes that all optimizer states are offloaded",
        )
    if weights == _DISK:
        options.note(
            "zero_optimization.offload_param.device", "the prediction assumes that parameters are in host memory"
        )
    if (weights != _NOTHING and stage < 3) or (moved != _NOTHING and stage == 0):
        options.note(f"zero_optimization.{'offload_param' if weights != _NOTHING else 'offload_optimizer'}.device",
                     f"has no effect under stage {stage}")  # fmt: skip
        weights = _NOTHING
        moved = _NOTHING if stage == 0 else moved
    offload = {"optimizer"} if moved != _NOTHING or weights != _NOTHING else set()
    offload |= {"disk"} if moved == _DISK else set()
    offload |= {"parameters"} if weights != _NOTHING else set()
    found: dict[str, Any] = {
        "zero": stage,
        "offload": tuple(k for k in ("optimizer", "parameters", "disk") if k in offload),
    }
    group = options.take_number("zero_optimization.mics_shard_size", -1, least=-1)
    if group > 0 and stage == 3:
        found["dp_shard"] = group
    elif group > 0:
        options.note("zero_optimization.mics_shard_size", "has no effect without stage 3")
    return found


def _read_precision(options: Options) -> str | None:
    """Return the precision of matrix products: ``bf16``, ``fp16`` or ``fp32``; ``None`` if the configuration says
    ``auto``, which accelerate or transformers replace by a value. ``options``: the options of a DeepSpeed
    configuration."""
    filled = any(options.given.get(name) == "auto" for name in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled"))
    bf16 = options.take_any_flag("bf16.enabled", "bfloat16.enabled")
    section = options.given.get("bfloat16")
    if isinstance(section, Mapping):
        options.take("bfloat16")
        bf16 = bf16 or section.get("enabled") is True
    fp16 = options.take_flag("fp16.enabled")
    auto = options.take_flag("torch_autocast.enabled")
    kind = options.take_text("torch_autocast.dtype", "bfloat16")
    if bf16 and fp16:
        raise ContradictionError(f"{options.where}: bf16 and fp16 are both enabled; expected one of them")
    if auto and not (bf16 or fp16):
        return "fp16" if "16" in kind and "bf" not in kind else "bf16"
    short = "bf16" if bf16 else "fp16" if fp16 else None
    return short if short or filled else "fp32"


def _read_optimizer(options: Options) -> str | None:
    """Return this project's name for the configured optimizer; ``adamw`` for an unknown one, ``None`` if none is
    configured. ``options``: the options of a DeepSpeed configuration."""
    name = options.take_text("optimizer.type")
    if name is None:
        return None
    if name.lower() not in _OPTIMIZERS:
        options.note(
            "optimizer.type", "is not known to this project; the prediction assumes the optimizer states of Adam"
        )
    params = options.given.get("optimizer.params")
    options.note("optimizer.params", "have no effect on the time or memory of a planned step")
    plain = isinstance(params, Mapping) and not params.get("momentum")
    found = _OPTIMIZERS.get(name.lower(), "adamw")
    return "sgd" if found == "sgd_momentum" and (plain or params is None) else found


def _read_profile(options: Options, stage: int) -> dict[str, Any]:
    overlap = options.take_flag("zero_optimization.overlap_comm", None)
    kind = options.take_text("data_types.grad_accum_dtype")
    facts: dict[str, Any] = {"overlap": stage == 3 if overlap is None else bool(overlap)}
    if kind is not None:
        facts["short_gradients"] = kind not in ("fp32", "float32")
    return facts


def write_deepspeed(layout: TrainingLayout) -> tuple[str, tuple[UnusedOption, ...]]:
    """Return the text of a JSON configuration of DeepSpeed for ``layout``, and the fields of the layout that DeepSpeed
    cannot express.
    """
    missing: list[UnusedOption] = []

    def leave_out(field: str, reason: str) -> None:
        missing.append(UnusedOption(option=field, value=str(getattr(layout, field)), reason=reason))

    found: dict[str, Any] = {}
    size, count = layout.microbatch_size, layout.microbatches
    if size is None:
        leave_out("microbatch_size", "DeepSpeed needs it, or the whole batch")
        if layout.global_batch:
            found[_TOTAL] = layout.global_batch
        if count:
            found[_STEPS] = count
    else:
        found[_MICRO] = size
        found |= {_STEPS: count} if count else {}
        if layout.global_batch and not count:
            leave_out("global_batch", "it follows from micro batch, accumulation steps and replicas")
    stage = min(layout.zero or 0, 1 if layout.pp > 1 else 3)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": layout.profile.overlap}
    if layout.zero is None:
        leave_out("zero", "states are not sharded unless it is asked for")
    elif stage != layout.zero:
        leave_out("zero", "the pipeline engine has ZeRO-1 at most, which is written")
    _add_offload(layout.replace(zero=stage), zero, leave_out)
    if (layout.dp_replicate or 1) > 1 and layout.zero:
        for field in ("dp_shard", "dp_replicate"):  # DeepSpeed refuses MiCS since version 0.19
            leave_out(field, "states are sharded over all data-parallel ranks")
    found["zero_optimization"] = zero
    found |= {"bf16": {"enabled": True}} if layout.precision == "bf16" else {}
    found |= {"fp16": {"enabled": True}} if layout.precision == "fp16" else {}
    if layout.precision not in ("bf16", "fp16", "fp32"):
        leave_out("precision", "it is float32 unless bf16 or fp16 is enabled")
    _add_axes(layout, found, leave_out)
    if layout.optimizer is not None:
        kinds = {"adamw": "AdamW", "sgd_momentum": "SGD", "sgd": "SGD"}
        if layout.optimizer in kinds:
            params = {"params": {"momentum": 0.9}} if layout.optimizer == "sgd_momentum" else {}
            found["optimizer"] = {"type": kinds[layout.optimizer], **params}
        else:
            leave_out("optimizer", "its type is left to the script")
    if layout.recompute == "full" and layout.pp > 1:
        found["pipeline"]["activation_checkpoint_interval"] = 1
    elif layout.recompute is not None:
        leave_out("recompute", "the model's script says what is recomputed")
    if layout.seq_length is not None:
        leave_out("seq_length", "samples are the script's")
    return json.dumps(found, indent=2) + "\n", tuple(missing)


def _add_offload(layout: TrainingLayout, zero: dict[str, Any], leave_out: Any) -> None:
    """Add the options for the data that ``layout`` keeps in host memory to ``zero``, the section ``zero_optimization``
    of a DeepSpeed configuration: option -> value. ``leave_out``: a function ``leave_out(field, reason)`` that records a
    field of the layout that DeepSpeed cannot express."""
    wanted = {*layout.offload}
    if "activations" in wanted or (wanted and not layout.zero) or ("parameters" in wanted and layout.zero != 3):
        leave_out("offload", "optimizer states are moved under ZeRO, parameters under ZeRO-3, activations never")
    if not layout.zero:
        return
    if "optimizer" in wanted:
        zero["offload_optimizer"] = {"device": _DISK if "disk" in wanted else _HOST}
    if "parameters" in wanted and layout.zero == 3:
        zero["offload_param"] = {"device": _HOST}


def _add_axes(layout: TrainingLayout, found: dict[str, Any], leave_out: Any) -> None:
    """Add the sizes of the mesh axes of ``layout`` to ``found``, the content of a DeepSpeed configuration file.
    ``leave_out``: function of (name of a field, reason) that records that DeepSpeed cannot express the field."""
    if layout.tp > 1:
        found["tensor_parallel"] = {"autotp_size": layout.tp}
        if layout.sequence_parallel is not False:
            leave_out("sequence_parallel", "values between layers are whole on each rank")
    if layout.cp > 1:
        found["sequence_parallel_size"] = layout.cp
        if layout.context != "ulysses":
            leave_out("context", "attention over the sequence exchanges heads (Ulysses)")
    if layout.ep > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
        if layout.etp is None:
            leave_out("etp", "an expert is on one rank")
        found["expert_parallel"] |= {"expert_tensor_parallel_size": layout.etp} if layout.etp else {}
    if layout.pp == 1:
        return
    found["pipeline"] = {"stages": layout.pp}
    if layout.schedule != "1f1b":
        leave_out("schedule", "the pipeline engine has 1F1B")
    reasons = {
        "virtual_stages": "a pipeline rank has one stage",
        "layers_per_stage": "stages follow from the balance of layers or parameters",
        "stage_layers": "stages follow from the balance of layers or parameters",
        "first_less": "stages follow from the balance of layers or parameters",
        "last_less": "stages follow from the balance of layers or parameters",
    }
    for field, reason in reasons.items():
        if getattr(layout, field):
            leave_out(field, reason)
