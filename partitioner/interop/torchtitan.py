"""Read and write configurations of torchtitan: TOML of versions up to 0.2, Python modules and flags of version 0.3."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from partitioner.execution_profile import PROFILES
from partitioner.interop.layout import ContradictionError, OptionValueError, TrainingLayout, UnusedOption
from partitioner.interop.options import Options, flatten_sections, list_known_names, load_known_options, parse_mapping
from partitioner.interop.torchtitan_module import Unreadable, read_config_function

_SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "zb-1p",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
    "LoopedBFS": None,
    "PipelineScheduleSingle": None,
    "PipelineScheduleMulti": None,
    "_PipelineScheduleRuntime": None,
}
_LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")
_FOLDED = ("zb-v", "dualpipe-v")  # schedules with two stages on each rank by definition
_OPTIMIZERS = {"adamw": "adamw", "adam": "adam", "sgd": "sgd_momentum"}
_TYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_BOTH = ("optimizer", "parameters")
_SAMPLE, _MICROBATCH = 2048, 16384  # tokens of a sample and of a microbatch by default
_TOKENS, _STEP_TOKENS, _CONTEXT = (  # options of versions after 0.3, which count tokens
    "training.num_tokens_per_microbatch_per_dp_rank",
    "training.num_tokens_per_train_step",
    "training.max_context_length",
)
_ROUNDS = "parallelism.num_pp_microbatches"
_FULL_AC = {"full": "full", "selective": "alternate", "none": "none", "memory_budget": None}

_BEYOND = {
    "optimizer.implementation": "the kernel of the optimizer is not modelled",
    "optimizer.early_step_in_backward": "the prediction assumes that the optimizer steps after backward",
    "parallelism.enable_compiled_autograd": "compiled autograd is not modelled",
    "parallelism.fsdp_disable_prefetch": "the prediction assumes that gathers of parameters overlap with computation",
    "parallelism.enable_fsdp_symm_mem": "symmetric memory is not modelled",
    "parallelism.expert_parallel_comm_backend": "the prediction assumes that tokens are exchanged by an all-to-all",
    "parallelism.expert_parallel_a2a_dispatch_impl": (
        "the prediction assumes that tokens are exchanged by an all-to-all"
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": "the schedule follows from its name",
    "parallelism.disable_loss_parallel": "the plan shards the loss if this is cheaper",
    "parallelism.enable_loss_parallel": "the plan shards the loss if this is cheaper",
    "parallelism.module_fqns_per_model_part": "names of modules are those of torchtitan; stages are divided evenly",
    "parallelism.pipeline_parallel_split_points": "names of modules are those of torchtitan; stages are divided evenly",
    "experimental.pipeline_parallel_split_points": "names of modules are torchtitan's; stages are divided evenly",
    "experimental.enable_compiled_autograd": "compiled autograd is not modelled",
    "training.enable_loss_parallel": "the plan shards the loss if this is cheaper",
    "activation_checkpoint.memory_budget": "recomputation by the compiler is not modelled",
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns": (
        "the prediction assumes that every second matrix product is recomputed"
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "the prediction assumes that every second matrix product is recomputed"
    ),
    "training.mixed_precision_reduce": "the prediction assumes that gradients are reduced in float32",
}
_FLOAT8 = re.compile(r"(float8|mx|mxfp8)", re.IGNORECASE)
_NVFP4 = re.compile(r"nvfp4", re.IGNORECASE)


def read_torchtitan(
    text: str, kind: str = "toml", function: str | None = None, ignore: Collection[str] = ()
) -> TrainingLayout:
    """Return the training layout (mesh, batch, schedule, state sharding) that a configuration of torchtitan describes.

    ``text``: the content of the configuration. ``kind``: its format: ``toml`` (up to version 0.2), ``json`` (written by
    ``debug.save_config_file``), ``flags`` (options such as ``--parallelism.tensor_parallel_degree 2``) or ``py`` (a
    Python module of version 0.3). ``function``: name of the function in a Python module that builds the configuration;
    ``None``: the only one that does. ``ignore``: names of options that the training script itself defines; they are not
    reported as unknown.

    Raise :class:`LayoutError` for unknown options, wrong values and contradictions.
    """
    where = "the torchtitan configuration"
    if kind == "py":
        nested: Mapping[str, Any] = read_config_function(text, function, where)
    elif kind == "flags":
        nested = _read_flags(text)
    else:
        nested = parse_mapping(text, kind, where)
    return _build_layout(nested, new=kind in ("py", "json"), ignore=ignore)


def _read_flags(text: str) -> dict[str, Any]:
    """Return the command-line flags in ``text``, such as ``--training.seq_len 4096``, as option name -> value; a flag
    without a value is ``True``. Raise :class:`OptionValueError` for a word that belongs to no flag.
    """
    words = text.replace("=", " ").split()
    found: dict[str, Any] = {}
    index = 0
    while index < len(words):
        name = words[index]
        index += 1
        if not name.startswith("--"):
            if not found:  # words of the launcher
                continue
            raise OptionValueError(f"{name!r} follows no option; expected --section.name value")
        value: Any = True
        if index < len(words) and not words[index].startswith("--"):
            value = words[index]
            index += 1
        name = name[2:].replace("-", "_")
        if name in ("module", "config") or ("." not in name and name not in ("hf_assets_path", "dump_folder")):
            continue
        found[name] = value
    return found


def _flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in ``nested``, a configuration whose sections are inner mappings, as ``section.name`` ->
    value. Entries that name the Python class of a component are left out.
    """
    sections = [name for name in load_known_options()["torchtitan"] if name]
    parents = {".".join(name.split(".")[:i]) for name in sections for i in range(1, name.count(".") + 2)}
    flat = flatten_sections(nested, parents)
    for name in [name for name in flat if name.endswith(".class") or name == "class"]:
        del flat[name]
    return flat


def _build_layout(nested: Mapping[str, Any], *, new: bool, ignore: Collection[str]) -> TrainingLayout:
    """Return the training layout (mesh, batch, schedule, state sharding) that a torchtitan configuration describes.

    ``nested``: its options, with sections as inner mappings. ``new``: whether it is of version 0.3, which names some
    options differently than earlier versions. ``ignore``: names of options that the training script itself defines;
    they are not reported as unknown. Raise :class:`LayoutError` for unknown options, wrong values and contradictions.
    """
    flat = _flatten(nested)
    options = Options(flat, "torchtitan", ignore=ignore)
    known = list_known_names("torchtitan")
    beside = ("job", "model", "optimizer", "dataloader", "loss", "tokenizer", "metrics", "checkpoint", "lr_scheduler",
              "validator", "profiler", "experimental", "training.dataloader", "validation.dataloader")  # fmt: skip
    own = {name for name in flat if name.rpartition(".")[0] in beside and new}  # components have fields of their own
    sections = {name for name in load_known_options()["torchtitan"] if name} | {"activation_checkpoint"}
    whole = {name for name in flat if name in sections}  # sections that are replaced as a whole
    of_class = _list_own_fields(nested, flat, {*known, *sections})
    options.reject_unknown({*known, *own, *whole, *of_class})
    for name in sorted(name for name in of_class if not isinstance(flat[name], Unreadable)):
        options.note(name, f"belongs to {nested['class']}; whether it changes time or memory is not known")
    for name, value in flat.items():
        if isinstance(value, Unreadable):
            default = "; the prediction uses its default" if name.startswith(("training.", "parallelism.")) else ""
            options.note(name, f"is not known without running the module{default}")
            options.given[name] = None
    take, flag = options.take_number, options.take_flag
    pp = _take_renamed(options, "parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree", 1)
    tp = _take_renamed(options, "parallelism.tensor_parallel_degree", "training.tensor_parallel_degree", 1)
    cp = _take_renamed(options, "parallelism.context_parallel_degree", "experimental.context_parallel_degree", 1)
    ep, etp = take("parallelism.expert_parallel_degree", 1), take("parallelism.expert_tensor_parallel_degree")
    graphs = new and not flag("training.disable_cuda_graphs")
    if graphs and pp > 1:
        raise ContradictionError(
            "torchtitan: parallelism.pipeline_parallel_degree above 1 needs training.disable_cuda_graphs=True; "
            "expected it on, or one pipeline rank"
        )
    batch, sequence = _read_batch(options, pp), flag("parallelism.enable_sequence_parallel", True)
    length = batch["seq_length"]
    unit = (tp if sequence else 1) * (2 * cp if cp > 1 else 1)
    if length % unit:
        raise ContradictionError(
            f"torchtitan: samples of {length} tokens are not divisible by tp x 2 cp = {unit}; expected a multiple of it"
        )
    recompute = _read_recompute(options, nested)
    layout: dict[str, Any] = {
        "framework": "torchtitan", "pp": pp, "tp": tp, "cp": cp, "ep": ep, "etp": (etp or 1) if ep > 1 else None,
        "sequence_parallel": bool(sequence) if tp > 1 else None, "recompute": recompute,
        "context": _read_context(options) if cp > 1 else None, "offload": _BOTH if _is_offloaded(options) else (),
        "precision": _read_precision(options, nested), "optimizer": _read_optimizer(options, nested),
        **_read_data_axes(options, pp), **batch, **_read_stages(options, pp),
    }  # fmt: skip
    facts: dict[str, Any] = {"graphs": "all" if graphs and ep == 1 else "none"}
    asynchronous = [f"{section}.enable_async_tensor_parallel" for section in ("compile", "parallelism", "experimental")]
    facts["overlap_tensor"] = any(list(map(flag, asynchronous)))
    forced = [flag(name) for name in ("debug.moe_force_load_balance", "training.debug_moe_force_load_balance")]
    facts["even_experts"] = "routed" if any(forced) else "none"
    facts["current_scaling"] = layout["precision"] == "fp8"
    facts["fused_kernels"] = _is_compiled(options)
    for option, reason in _BEYOND.items():
        options.note(option, reason)
    profile = PROFILES["torchtitan"].model_copy(update=facts)
    return TrainingLayout(**layout, profile=profile, unused=options.list_unused())


def _is_compiled(options: Options) -> bool:
    """Return whether the model is compiled by Inductor, which fuses operators. ``options``: the options of a torchtitan
    configuration."""
    enabled = options.take_any_flag("compile.enable", "training.compile")
    components = options.take("compile.components")
    if components is not None and not isinstance(components, list | tuple):
        raise options.wrong_value("compile.components", "a list, such as model and loss")
    if enabled and options.has("compile.backend") and options.take("compile.backend") != "inductor":
        options.note("compile.backend", "only the fusion of operators by Inductor is part of the prediction")
        return False
    options.take("compile.backend")
    return enabled and (components is None or "model" in components)


def _is_offloaded(options: Options) -> bool:
    return bool(options.take_flag("training.enable_cpu_offload"))


def _read_data_axes(options: Options, pp: int) -> dict[str, Any]:
    """Return the sizes of data parallelism and the ZeRO stage, as a dict of fields of a training layout: name -> value.
    They say how many ranks hold copies of the model, and how these ranks shard parameters, gradients and optimizer
    states. ``pp``: number of pipeline ranks. ``options``: the options of a torchtitan configuration."""
    replicate, shard = _read_older_data_degree(options) or _read_data_degrees(options)
    keep = options.take_choice(
        "parallelism.fsdp_reshard_after_forward",
        {"default": "default", "always": "always", "never": "never"},
        "default",
    )
    zero = 2 if keep == "never" or (keep == "default" and pp > 1) else 3
    cp = options.given.get("parallelism.context_parallel_degree")
    alone = shard == 1 and cp in (None, 1, "1")
    found: dict[str, Any] = {"zero": 0 if alone else zero}
    if not alone:
        found["dp_replicate"] = replicate
    if shard > 0 and replicate > 0:
        found |= {"dp": replicate * shard} | ({} if alone else {"dp_shard": shard})
    return found


def _read_data_degrees(options: Options) -> tuple[int, int]:
    """Return two numbers of data-parallel ranks: how many groups of ranks hold one copy of the model each, and over how
    many ranks the states (parameters, gradients, optimizer states) of one copy are sharded. -1 stands for all remaining
    ranks. ``options``: the options of a torchtitan configuration."""
    replicate = options.take_number("parallelism.data_parallel_replicate_degree", 1)
    replicate = options.take_number("training.data_parallel_replicate_degree", replicate)
    name = "training.data_parallel_shard_degree"
    name = name if options.has(name) else "parallelism.data_parallel_shard_degree"
    return replicate, _take_degree(options, name)


def _read_older_data_degree(options: Options) -> tuple[int, int] | None:
    """Return two numbers of data-parallel ranks from options that only early versions of torchtitan have: how many
    groups of ranks hold one copy of the model each, and over how many ranks one copy is sharded (-1: all remaining
    ranks). ``None`` if no such option is given.

    In these versions, ``training.data_parallel_type`` says whether the ``training.data_parallel_degree`` ranks shard
    one copy (``fsdp``) or hold one copy each (``ddp``). ``options``: the options of the configuration. Raise
    :class:`ContradictionError` if options of later versions are given, too.
    """
    older = [name for name in ("training.data_parallel_degree", "training.data_parallel_type") if options.has(name)]
    if not older:
        return None
    shared = options.take_choice("training.data_parallel_type", {"fsdp": True, "ddp": False}, True)
    degree = _take_degree(options, "training.data_parallel_degree")
    later = [f"{section}.data_parallel_{kind}_degree" for section in ("parallelism", "training")
             for kind in ("replicate", "shard")]  # fmt: skip
    beside = [name for name in later if options.has(name)]
    if beside:
        raise ContradictionError(
            f"torchtitan: {older[0]} is of early versions, {beside[0]} of later ones, which replace it; expected "
            "data_parallel_shard_degree alone (ranks that share the states of the model), or with "
            "data_parallel_replicate_degree (copies of the model)"
        )
    return (1, degree) if shared else (degree, 1)


def _take_degree(options: Options, name: str) -> int:
    """Return the value of the option ``name``, a number of data-parallel ranks; -1, the default, stands for all
    remaining ranks. ``options``: the options of a torchtitan configuration."""
    degree = options.take_number(name, -1, least=-1)
    if degree == 0:
        raise options.wrong_value(name, "1 or more, or -1 for the rest")
    return int(degree)


def _take_renamed(options: Options, name: str, older: str, default: int) -> int:
    """Return the value of the option ``name``, or of ``older``, its name in older versions; ``default`` without both.
    ``options``: the options of a torchtitan configuration. Raise :class:`ContradictionError` if both are given, and
    differ."""
    value, former = options.take_number(name), options.take_number(older)
    if None not in (value, former) and value != former:
        raise ContradictionError(
            f"torchtitan: {name}={value}, but {older}={former}, which is its name in older versions; expected one of "
            "them"
        )
    return int(next((number for number in (value, former) if number is not None), default))


def _list_own_fields(nested: Mapping[str, Any], flat: Mapping[str, Any], known: Collection[str]) -> set[str]:
    """Return the options of a torchtitan configuration that its class adds to the options of torchtitan's
    ``Trainer.Config``. The set is empty for ``Trainer.Config`` itself, whose unknown options are misspelt.

    ``nested``: the configuration, with sections as inner mappings and the name of its class, if it was read from
    Python. ``flat``: the same options as ``section.name`` -> value. ``known``: the options and sections of torchtitan.
    Raise :class:`OptionValueError` if the class has neither a section ``training`` nor a section ``parallelism``.
    """
    kind = nested.get("class")
    if kind is None or kind in ("Trainer.Config", "JobConfig"):
        return set()
    if not {"training", "parallelism"} & {*nested}:
        raise OptionValueError(
            f"torchtitan: {kind} has neither training nor parallelism; expected the configuration of one trainer, such "
            "as Trainer.Config"
        )
    sections = {name.split(".")[0] for name in known if "." in name}
    return {name for name in flat if name not in known and name.split(".")[0] not in sections}


def _read_batch(options: Options, pp: int) -> dict[str, Any]:
    """Return tokens of a sample, microbatch size and either the number of microbatches or the global batch, as a dict
    of fields of a training layout: name -> value. ``pp``: number of pipeline ranks. ``options``: the options of a
    torchtitan configuration."""
    counted = [name for name in (_TOKENS, _STEP_TOKENS, _CONTEXT, _ROUNDS) if name in options.given]
    if counted:
        return _read_token_batch(options, pp, counted[0])
    return {"seq_length": options.take_number("training.seq_len", _SAMPLE), **_read_sample_batch(options, pp)}


def _read_token_batch(options: Options, pp: int, counted: str) -> dict[str, Any]:
    """Return tokens of a sample, samples of a microbatch, and either the number of microbatches or the global batch, as
    a dict of fields of a training layout: name -> value. The torchtitan configuration is of a version after 0.3, which
    gives batch sizes in tokens. ``pp``: number of pipeline ranks. ``options``: the options of the configuration.

    ``counted``: the first option in the configuration that counts tokens, for the error message. Raise
    :class:`ContradictionError` if options of earlier versions, which count samples, are given beside it.
    """
    former = ("seq_len", "local_batch_size", "batch_size", "global_batch_size")
    if beside := [name for name in former if options.has(f"training.{name}")]:
        raise ContradictionError(
            f"torchtitan: {counted} counts tokens, as versions after 0.3 do, but training.{beside[0]} is of earlier "
            "versions, which count samples; expected options of one version"
        )
    tokens, context = options.take_number(_TOKENS, _MICROBATCH), options.take_number(_CONTEXT, _SAMPLE)
    step, rounds = options.take_number(_STEP_TOKENS, -1, least=-1), options.take_number(_ROUNDS, 1)
    samples = max(1, round(tokens / context))
    length = tokens // samples
    if length != context:
        options.note(
            _TOKENS, f"is no multiple of {_CONTEXT}; the prediction assumes microbatches of {samples} x {length} tokens"
        )
    if pp == 1:
        options.note(_ROUNDS, "has no effect without a pipeline")
        rounds = 1
    found: dict[str, Any] = {"seq_length": length, "microbatch_size": samples}
    if step < 1:
        return found | {"microbatches": rounds}
    if step % (tokens * rounds):
        raise ContradictionError(
            f"torchtitan: {_STEP_TOKENS}={step} is not divisible by the {tokens * rounds} tokens of a rank's "
            "microbatches; expected a multiple of it and of the data-parallel ranks"
        )
    return found | {"global_batch": step // tokens * samples}


def _read_sample_batch(options: Options, pp: int) -> dict[str, Any]:
    """Return microbatch size and either the number of microbatches or the global batch, as a dict of fields of a
    training layout: name -> value. ``pp``: number of pipeline ranks. ``options``: the options of a torchtitan
    configuration."""
    local = _take_renamed(options, "training.local_batch_size", "training.batch_size", 8)
    batch = options.take_number("training.global_batch_size", -1, least=-1)
    size = options.take_number("parallelism.pipeline_parallel_microbatch_size", 1)
    if pp > 1 and local % size:
        raise ContradictionError(
            f"torchtitan: training.local_batch_size={local} is not divisible by "
            f"parallelism.pipeline_parallel_microbatch_size={size}; expected a multiple of it"
        )
    count = options.take_number("parallelism.pipeline_parallel_microbatches")
    count = options.take_number("experimental.pipeline_parallel_microbatches", count)
    if pp > 1 and count and local % count == 0:  # versions that give the number of microbatches
        size = local // count
    found: dict[str, Any] = {"microbatch_size": size if pp > 1 else local}
    if batch < 1:
        return found | {"microbatches": local // found["microbatch_size"]}
    if batch % local:
        raise ContradictionError(
            f"torchtitan: training.global_batch_size={batch} is not divisible by training.local_batch_size={local}; "
            "expected a multiple of it and of the data-parallel ranks"
        )
    if pp > 1:
        options.note("training.global_batch_size", "the prediction assumes that the pipeline is not drained "
                     "between rounds of gradient accumulation")  # fmt: skip
    return found | {"global_batch": batch}


def _read_stages(options: Options, pp: int) -> dict[str, Any]:
    """Return the pipeline schedule and how layers are divided into stages, as a dict of fields of a training layout:
    name -> value. ``pp``: number of pipeline ranks; with one, there are no such fields. ``options``: the options of a
    torchtitan configuration."""
    name = "parallelism.pipeline_parallel_schedule"
    if not options.has(name) and options.has("experimental.pipeline_parallel_schedule"):
        name = "experimental.pipeline_parallel_schedule"
    given = options.take_choice(name, {n: n for n in _SCHEDULES}, "1F1B")
    table = options.take_text("parallelism.pipeline_parallel_schedule_csv", "")
    per_stage = options.take_number("parallelism.pipeline_parallel_layers_per_stage")
    first = options.take_number("parallelism.pipeline_parallel_first_stage_less_layers", 1, least=0)
    last = options.take_number("parallelism.pipeline_parallel_last_stage_less_layers", 1, least=0)
    if pp == 1:
        return {}
    schedule = table or _SCHEDULES[given]
    if schedule is None:
        options.note(name, "this schedule is not known; the search chooses one")
    found: dict[str, Any] = {"schedule": schedule, "first_less": first, "last_less": last}
    if schedule in _FOLDED:
        found["virtual_stages"] = 2
    elif per_stage:
        found["layers_per_stage"] = per_stage
    elif given in _LOOPED and not table:
        found["virtual_stages"] = 2
    return found


def _read_context(options: Options) -> str:
    names = [f"{section}.context_parallel_rotate_method" for section in ("parallelism", "experimental")]
    ways = [options.take_choice(name, {"allgather": "all_gather", "alltoall": "ring"}) for name in names]
    options.take("parallelism.context_parallel_load_balancer")
    return next((way for way in ways if way), "all_gather")


def _read_recompute(options: Options, nested: Mapping[str, Any]) -> str | None:
    """Return what the backward recomputes: ``none``, ``alternate`` (every second matrix product), ``full`` (every
    layer); ``None`` if the compiler decides. ``nested``: the configuration with sections as inner mappings.
    ``options``: the options of a torchtitan configuration, to which notes for the user are added."""
    section = nested.get("activation_checkpoint", {})
    if section is None:
        options.take("activation_checkpoint")
        return "none"
    kind = str(section.get("class", "")) if isinstance(section, Mapping) else ""
    mode = options.take_choice("activation_checkpoint.mode", _FULL_AC, "alternate")
    if "FullAC" in kind:
        return "full"
    if "MemoryBudget" in kind or (mode is None and not kind):
        options.note(
            "activation_checkpoint.mode",
            "recomputation by the compiler is not modelled; the search chooses what is recomputed",
        )
        return None
    way = str(options.take("activation_checkpoint.selective_ac_option") or "op")
    if way != "op" and not (way.isdecimal() and int(way)):
        raise options.wrong_value("activation_checkpoint.selective_ac_option", "op, or a whole number of 1 or more")
    if mode == "alternate" and way.isdecimal():
        if way == "1":
            return "full"
        options.note("activation_checkpoint.selective_ac_option", "torchtitan recomputes every n-th layer whole; "
                     "the prediction assumes every second matrix product of all layers")  # fmt: skip
    return str(mode)


def _read_precision(options: Options, nested: Mapping[str, Any]) -> str:
    """Return the precision of matrix products, such as ``bf16``, ``fp8`` or ``nvfp4``. ``nested``: the configuration
    with sections as inner mappings. ``options``: the options of a torchtitan configuration."""
    kind = options.take_choice("training.mixed_precision_param", _TYPES, "bf16")
    whole = options.take_choice("training.dtype", _TYPES, "fp32")
    if whole == "bf16":
        options.note(
            "training.dtype", "the prediction assumes that master copies of parameters and moments are in float32"
        )
    names = options.take("model.converters")
    listed = names if isinstance(names, list) else str(names or "").split(",")
    flags = [options.take_flag(f"{section}.enable_float8_linear") for section in ("float8", "training")]
    float8 = any(_FLOAT8.search(str(name)) for name in listed) or any(flags)
    model = nested.get("model_spec")
    nvfp4 = any(_NVFP4.search(str(name)) for name in listed)
    if isinstance(model, Unreadable):
        float8 = float8 or re.search(r"(Float8|MXFP8)\w*Converter", model) is not None
        nvfp4 = nvfp4 or re.search(r"NVFP4\w*Converter", model) is not None
    if nvfp4:
        return "nvfp4"
    return "fp8" if float8 else "bf16" if whole == "bf16" else str(kind)


def _read_optimizer(options: Options, nested: Mapping[str, Any]) -> str:
    """Return the optimizer in this project's terms, such as ``adamw``, by which the size of its states is known. An
    unknown optimizer counts as ``adamw``, and a note for the user says so. ``nested``: the configuration with sections
    as inner mappings. ``options``: the options of a torchtitan configuration."""
    name = str(options.take_text("optimizer.name", "AdamW"))
    own = nested.get("optimizer")
    if isinstance(own, Unreadable) and "adamw" not in own.lower():
        options.note("optimizer", "is not known without running the module; the prediction assumes AdamW")
    if name.lower() not in _OPTIMIZERS:
        options.note(
            "optimizer.name", "is not known to this project; the prediction assumes the optimizer states of AdamW"
        )
    return _OPTIMIZERS.get(name.lower(), "adamw")


def write_torchtitan_toml(layout: TrainingLayout) -> tuple[str, tuple[UnusedOption, ...]]:
    """Return two values: the text of a TOML file that configures torchtitan up to version 0.2 for ``layout``, and the
    fields of the layout that such a file cannot express, each with the reason."""
    sections, missing = _list_options(layout, new=False)
    lines: list[str] = []
    for section, options in sections.items():
        lines += [f"[{section}]", *(f"{name} = {_write_toml(value)}" for name, value in options.items()), ""]
    return "\n".join(lines), missing


def _write_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_write_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def write_torchtitan_module(layout: TrainingLayout) -> tuple[str, tuple[UnusedOption, ...]]:
    """Return two values: the text of a Python module that configures torchtitan 0.3 for ``layout``, and the fields of
    the layout that it cannot express, each with the reason. The function ``planned`` of that module returns a
    ``Trainer.Config``; the user adds the model, its data and the learning rate."""
    sections, missing = _list_options(layout, new=True)
    recompute = sections.pop("activation_checkpoint")["mode"]
    classes = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
    lines = [
        '"""The layout of a plan. Add the model: config.model_spec, hf_assets_path, dataloader, optimizer and loss."""',
        "",
        f"from torchtitan.config import {', '.join(sorted(classes[name] for name in sections if name in classes))}",
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def planned() -> Trainer.Config:",
        "    return Trainer.Config(",
    ]
    for section, options in sections.items():
        if section in classes:
            lines += [f"        {section}={classes[section]}("]
            lines += [f"            {name}={value!r}," for name, value in options.items()]
            lines += ["        ),"]
    made = {"full": "FullAC.Config()", "selective": "SelectiveAC.Config()", "none": "None"}[recompute]
    return "\n".join([*lines, f"        activation_checkpoint={made},", "    )", ""]), missing


def _list_options(layout: TrainingLayout, *, new: bool) -> tuple[dict[str, dict[str, Any]], tuple[UnusedOption, ...]]:
    """Return two values: the torchtitan options for ``layout`` (section -> option -> value), and the fields of the
    layout that they cannot express, each with the reason. ``new``: whether the options are for version 0.3 instead of
    earlier versions."""
    missing: list[UnusedOption] = []

    def leave_out(field: str, reason: str) -> None:
        missing.append(UnusedOption(option=field, value=str(getattr(layout, field)), reason=reason))

    parallelism: dict[str, Any] = {}
    training: dict[str, Any] = {}
    _add_axes(layout, parallelism, new, leave_out)
    _add_batch(layout, training, parallelism, leave_out)
    if layout.pp > 1:
        _add_stages(layout, parallelism, leave_out)
    unit = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    training["seq_len"] = -(-(layout.seq_length or _SAMPLE) // unit) * unit
    if layout.seq_length is None:
        leave_out("seq_length", f"the plan has no samples of tokens; {training['seq_len']} is written")
    elif training["seq_len"] != layout.seq_length:
        leave_out("seq_length", f"a multiple of tp x 2 cp = {unit} is needed; {training['seq_len']} is written")
    if layout.offload and {*layout.offload} != {*_BOTH}:
        leave_out("offload", "parameters and states of the optimizer are offloaded together, or nothing")
    elif layout.offload:
        training["enable_cpu_offload"] = True
    sections: dict[str, dict[str, Any]] = {"training": training, "parallelism": parallelism}
    if layout.precision == "fp32":
        training["mixed_precision_param"] = "float32"
    elif layout.precision == "fp8" and not new:
        sections["model"] = {"converters": ["quantize.linear.float8"]}
    elif layout.precision != "bf16":
        converted = layout.precision in ("fp8", "nvfp4") and (new or layout.precision == "nvfp4")
        how = "a converter of the model, which is not written" if converted else "bfloat16"
        leave_out("precision", f"the type is {how}")
    modes = {"full": "full", "alternate": "selective", "none": "none", "selective": "selective"}
    if layout.recompute not in modes or layout.recompute == "selective":
        done = "every second product is recomputed, too" if layout.recompute else "nothing is recomputed"
        leave_out("recompute", "nothing is recomputed" if layout.recompute == "scores" else done)
    sections["activation_checkpoint"] = {"mode": modes.get(layout.recompute or "", "none")}
    if sections["activation_checkpoint"]["mode"] == "selective" and not new:
        sections["activation_checkpoint"]["selective_ac_option"] = "op"
    if layout.optimizer == "adam" and not new:
        sections["optimizer"] = {"name": "Adam"}
    elif layout.optimizer != "adamw":
        leave_out("optimizer", "the optimizer is AdamW")
    if new:
        training["disable_cuda_graphs"] = layout.profile.graphs == "none" or layout.pp > 1 or layout.ep > 1
    if layout.profile.fused_kernels:
        sections["compile"] = {"enable": True}
    if layout.profile.overlap_tensor and layout.tp > 1:
        name = "enable_async_tensor_parallel"
        sections["compile"] = {"enable": True, **({name: True} if new else {})}
        parallelism |= {} if new else {name: True}
    return sections, tuple(missing)


def _add_axes(layout: TrainingLayout, parallelism: dict[str, Any], new: bool, leave_out: Any) -> None:
    """Add the sizes of the mesh axes and the state sharding of ``layout`` to ``parallelism``, the section of that name
    in a torchtitan configuration: option -> value. ``new``: whether the options are for version 0.3. ``leave_out``: a
    function ``leave_out(field, reason)`` that is called for each field of the layout that torchtitan cannot express."""
    replicate, shard = layout.dp_replicate or 1, layout.dp_shard or -1
    zero = layout.zero
    cut = (layout.dp_shard or layout.dp or 2) * layout.cp > 1  # whether there is more than one rank to shard over
    if zero == 0 and layout.dp is not None:
        replicate, shard = layout.dp, 1
        if layout.cp > 1:
            leave_out("zero", "states are sharded over cp, too")
    elif zero in (None, 0, 1):
        leave_out("zero", "states are sharded as in ZeRO-3, or ZeRO-2 with a pipeline")
    parallelism |= {"data_parallel_replicate_degree": replicate, "data_parallel_shard_degree": shard}
    if zero in (2, 3) and cut:
        parallelism["fsdp_reshard_after_forward"] = "always" if zero == 3 else "never"
    parallelism |= {
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.tp > 1:
        if layout.sequence_parallel is None:
            leave_out("sequence_parallel", "it is on unless it is switched off")
        elif not new and not layout.sequence_parallel:
            leave_out("sequence_parallel", "versions up to 0.2 always have it")
        elif new:
            parallelism["enable_sequence_parallel"] = layout.sequence_parallel
    if layout.ep > 1 and layout.etp not in (None, 1):
        if new:
            leave_out("etp", "experts are not divided over tensor-parallel ranks")
        else:
            parallelism["expert_tensor_parallel_degree"] = layout.etp
    if layout.ep > 1 and layout.etp is None:
        leave_out("etp", "an expert is on one rank")
    if layout.cp > 1:
        if layout.context in ("all_gather", "ring") and not new:
            parallelism["context_parallel_rotate_method"] = (
                "allgather" if layout.context == "all_gather" else "alltoall"
            )
        elif layout.context != "all_gather":
            leave_out("context", "attention over cp gathers keys and values" + (", or is a ring" if not new else ""))


def _add_batch(layout: TrainingLayout, training: dict[str, Any], parallelism: dict[str, Any], leave_out: Any) -> None:
    """Add the batch sizes of ``layout`` to ``training`` and ``parallelism``, two sections of a torchtitan
    configuration, each a dict: option -> value. ``leave_out``: a function ``leave_out(field, reason)`` that is called
    for each field of the layout that torchtitan cannot express."""
    size, batch = layout.microbatch_size, layout.global_batch
    if size is None:
        leave_out("microbatch_size", "its default is 1 with a pipeline, else 8")
        for field in ("global_batch", "microbatches"):
            if getattr(layout, field) is not None:
                leave_out(field, "it is a multiple of microbatch_size, which is not given")
        return
    count = layout.microbatches or (batch // (size * layout.dp) if batch and layout.dp else None)
    training["local_batch_size"] = size * (count or 1) if layout.pp > 1 else size
    if layout.pp > 1:
        parallelism["pipeline_parallel_microbatch_size"] = size
    if batch is not None:
        training["global_batch_size"] = batch
    elif count is not None and layout.pp == 1 and count > 1:
        leave_out("microbatches", "the number of accumulation steps follows from a global batch, which is not given")


def _add_stages(layout: TrainingLayout, parallelism: dict[str, Any], leave_out: Any) -> None:
    """Add the pipeline schedule of ``layout`` and its division into stages to ``parallelism``, the section of that name
    in a torchtitan configuration: option -> value. ``leave_out``: a function ``leave_out(field, reason)`` that is
    called for each field of the layout that torchtitan cannot express."""
    names = {ours: theirs for theirs, ours in _SCHEDULES.items() if ours}
    schedule, chunks = layout.schedule, layout.virtual_stages or 1
    if schedule is not None and schedule.endswith(".csv"):
        parallelism["pipeline_parallel_schedule_csv"] = schedule
        parallelism["pipeline_parallel_schedule"] = "PipelineScheduleMulti" if chunks > 1 else "PipelineScheduleSingle"
        if chunks > 1:
            leave_out("virtual_stages", "the table of the schedule has them")
    elif schedule in names and (names[schedule] not in _LOOPED or chunks > 1 or layout.layers_per_stage):
        parallelism["pipeline_parallel_schedule"] = names[schedule]
    else:
        leave_out("schedule", "it is 1F1B; schedules with several stages on each rank need them")
        schedule = "1f1b"
    implied = {"interleaved": 2, "zb-1p": 2, "zb-v": 2, "dualpipe-v": 2}.get(schedule or "", 1)
    if layout.layers_per_stage:
        if schedule in _FOLDED:
            leave_out("layers_per_stage", "the schedule has two stages on each rank")
        parallelism["pipeline_parallel_layers_per_stage"] = layout.layers_per_stage
        if chunks > 1 and schedule not in _FOLDED:
            leave_out("virtual_stages", "follows from the number of layers of a stage")
    elif chunks != implied and not (schedule or "").endswith(".csv"):
        leave_out(
            "virtual_stages",
            f"the schedule has {implied} for each rank, unless the number of layers of a stage is given",
        )
    if layout.stage_layers:
        leave_out("stage_layers", "cuts are given by names of modules of torchtitan's own models")
    parallelism["pipeline_parallel_first_stage_less_layers"] = layout.first_less
    parallelism["pipeline_parallel_last_stage_less_layers"] = layout.last_less
