"""Read and write Megatron-LM command lines, and configurations of Megatron-Bridge and Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from partitioner.execution_profile import PROFILES
from partitioner.interop.layout import (
    ContradictionError,
    LayoutError,
    OptionValueError,
    TrainingLayout,
    UnknownOptionError,
    UnusedOption,
)
from partitioner.interop.megatron_words import CommandLine, depends_on_environment, parse_arguments, read_words
from partitioner.interop.options import OF_MODEL, Options, explain_unused, load_known_options, parse_mapping
from partitioner.topology.validate import format_suggestion

_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_CONTEXT = {
    "p2p": "ring",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "a2a": "ulysses",
    "a2a+p2p": "ulysses",
}
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd_momentum", "muon": "sgd_momentum", "dist_muon": "sgd_momentum"}
_QUICK = ("layernorm", "moe_act")  # modules whose results are quick to recompute
_RECOMPUTED = (
    "core_attn", "gdn_norm", "layernorm", "mhc", "mla_up_proj", "mlp", "moe", "moe_act", "mtp", "shared_experts",
)  # fmt: skip
_FP8 = {name: name for name in ("none", "e4m3", "hybrid", "e5m2")}
_FP8_RECIPES = {name: name for name in ("delayed", "tensorwise", "mxfp8", "blockwise", "custom", "nvfp4")}
_FP4 = {name: name for name in ("none", "e2m1")}
_FP4_RECIPES = {name: name for name in ("nvfp4", "custom")}
_GRAPHS = {name: name for name in ("none", "local", "transformer_engine", "full_iteration")}
_PLACES = re.compile(r"[EtmL]")
_MOST_REPEATED = 10_000

# Options that change time or memory and that a layout cannot express.
_BEYOND = {
    "rampup-batch-size": "the steps with smaller batches at the start are not predicted",
    "step-batch-size-schedule": "steps with other batches are not predicted",
    "distribute-saved-activations": "the prediction assumes that saved activations are not sharded over tp",
    "optimizer-offload-fraction": "the prediction assumes that all optimizer states are in host memory",
    "use-precision-aware-optimizer": "moments and master copies in short types are not modelled",
    "main-grads-dtype": "the type of accumulated gradients follows from grad-reduce-in-bf16",
    "main-params-dtype": "the prediction assumes that master copies of parameters are in float32",
    "exp-avg-dtype": "the prediction assumes that moments are in float32",
    "exp-avg-sq-dtype": "the prediction assumes that moments are in float32",
    "fp8-param-gather": "the prediction assumes that parameters are gathered in 16 bits",
    "fp8-wgrad": "the prediction assumes that all matrix products with weights are in fp8",
    "first-last-layers-bf16": "the prediction assumes that all layers compute in the same type",
    "overlap-param-gather-with-optimizer-step": (
        "the prediction assumes that gathers of parameters do not overlap with the optimizer"
    ),
    "delay-wgrad-compute": (
        "the prediction assumes that gradients of weights are computed together with those of inputs"
    ),
    "hierarchical-context-parallel-sizes": "the prediction assumes that context parallelism has one level",
    "cpu-offloading-num-layers": "the prediction assumes that the activations of all layers are in host memory",
    "fine-grained-activation-offloading": "the prediction assumes that all activations are in host memory",
    "offload-modules": "the prediction assumes that all activations are in host memory",
    "encoder-tensor-model-parallel-size": "an encoder with a mesh of its own is not modelled",
    "encoder-pipeline-model-parallel-size": "an encoder with a mesh of its own is not modelled",
    "use-tp-pp-dp-mapping": "the prediction assumes that ranks are placed in the default order",
    "microbatch-group-size-per-virtual-pipeline-stage": (
        "the prediction assumes that groups of microbatches are as large as pp"
    ),
    "microbatch-group-size-per-vp-stage": "the prediction assumes that groups of microbatches are as large as pp",
    "gradient-accumulation-fusion": "the execution profile of the framework already assumes it",
    "nccl-ub": "the memory and speed of registered buffers are not modelled",
    "fp4-param-gather": "the prediction assumes that parameters are gathered in 16 bits",
    "mtp-num-layers": "layers for multi-token prediction are counted if the given model has them",
}  # fmt: skip
_OF_MODEL = frozenset(
    "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention kv-channels "
    "max-position-embeddings num-experts num-moe-experts moe-router-topk moe-ffn-hidden-size vocab-size swiglu "
    "untie-embeddings-and-output-weights moe-shared-expert-intermediate-size moe-layer-freq multi-latent-attention "
    "make-vocab-size-divisible-by".split()
)
_BRIDGE_NAMES = {  # field of Megatron-Bridge -> Megatron-LM's option of the same meaning
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "num-moe-experts": "num-experts",
    "sequence-length": "seq-length",
    "grad-reduce-in-fp32": "accumulate-allreduce-grads-in-fp32",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
}


def read_megatron(text: str | list[str], ignore: Collection[str] = ()) -> TrainingLayout:
    """Return the training layout (mesh, batch, schedule, state sharding) that a Megatron-LM command line describes.
    ``text``: the command line, a shell script that contains it, or a list of its words. ``ignore``: names of options
    that the training script itself defines; they are not reported as unknown.

    Raise :class:`LayoutError` for unknown options, wrong values and contradictions.
    """
    line = read_words(text) if isinstance(text, str) else CommandLine(text, {})
    given, devices = parse_arguments(line, ignore)
    if devices is not None and isinstance(text, str) and depends_on_environment(text):
        devices = None
    if not given:
        raise LayoutError(
            "the command line has no options; expected arguments of Megatron-LM, like --tensor-model-parallel-size 2"
        )
    own = [name.replace("_", "-") for name in ignore]
    added = {name: name for name in given if name.startswith("$")}
    options = Options(given, "Megatron-LM", "--{}", written=added, ignore=own, explain=line.explain_value)
    for name in added:
        options.note(name, "what the caller of the script adds is not known")
    layout = _build_layout(options, "megatron", devices)
    doubts = (UnusedOption(option=text[:100], value="", reason=reason) for text, reason in line.doubts.items())
    return layout.replace(unused=(*doubts, *layout.unused))


def read_megatron_bridge(text: str) -> TrainingLayout:
    """Return the training layout (mesh, batch, schedule, state sharding) that a YAML configuration describes. ``text``:
    the fields of Megatron-Bridge's ``ConfigContainer``, or those of a ``TransformerConfig`` of Megatron-Core.

    Raise :class:`LayoutError` for unknown fields, wrong values and contradictions.
    """
    nested = parse_mapping(text, "yaml", "the Megatron configuration")
    flat = {name: value for name, value in nested.items() if not isinstance(value, Mapping)}
    sections = {str(name): content for name, content in nested.items() if isinstance(content, Mapping)}
    if isinstance(flat.get("mixed_precision"), str):
        sections["mixed_precision"] = _read_recipe(flat.pop("mixed_precision"))
    given: dict[str, Any] = {}
    written: dict[str, str] = {}
    beside: dict[str, Any] = {}
    for section, content in [("", flat), *sections.items()]:
        for field, value in content.items():
            name, place = str(field).replace("_", "-"), f"{section}.{field}" if section else str(field)
            name = _BRIDGE_NAMES.get(name, name)
            _check_field(section, str(field), place)
            if value is None or field == "_target_" or not _is_read(section, name):
                beside[place] = value
                continue
            if name in given and given[name] != value:
                raise ContradictionError(
                    f"{written[name]}={given[name]}, but {place}={value}; expected one value: leave one out"
                )
            given[name], written[name] = value, place
    layout = _build_layout(Options(given, "Megatron-Bridge", written=written), "megatron-bridge", None)
    more = (
        UnusedOption(option=name, value=str(value)[:60], reason=explain_unused(name)) for name, value in beside.items()
    )
    return layout.replace(unused=(*layout.unused, *more))


def _is_read(section: str, name: str) -> bool:
    """Return whether the field ``name`` in ``section`` of a Megatron-Bridge configuration is translated to an option of
    Megatron-LM.
    """
    if section == "dataset":
        return name == "seq-length"
    if section == "checkpoint":
        return name == "ckpt-format"
    return section in ("", *load_known_options()["megatron-bridge"])


def _check_field(section: str, field: str, place: str) -> None:
    """Raise :class:`UnknownOptionError` if ``section`` of a Megatron-Bridge configuration does not have ``field``.
    Sections that this project does not know may have any field. ``place``: text that names the field and its section,
    for the message."""
    sections = load_known_options()["megatron-bridge"]
    if section and section not in sections:
        return
    known = {*sections[section]} if section else {name for names in sections.values() for name in names}
    known |= {"_target_", "seq_length", "mixed_precision", *(() if section else ("sequence_length",))}
    if field not in known:
        section_text = f"section {section}" if section else "the configuration"
        raise UnknownOptionError(
            f"unknown field {place} of Megatron-Bridge; {format_suggestion(field, sorted(known))}expected a field of "
            f"{section_text}: correct the name, or leave it out"
        )


def _read_recipe(name: str) -> dict[str, Any]:
    """Return the configuration fields of the recipe of mixed precision called ``name``, such as
    ``bf16_with_fp8_current_scaling_mixed``, as a dict: field -> value. Raise :class:`OptionValueError` for an unknown
    recipe.
    """
    found = re.fullmatch(r"\w*?(bf16|fp16)(?:_with_(\w+?))?_mixed", name.replace("-", "_"))
    if found is None:
        raise OptionValueError(
            f"mixed_precision={name!r} is no recipe of Megatron-Bridge; expected one like bf16_mixed or "
            "bf16_with_fp8_current_scaling_mixed: correct the name"
        )
    short = bool(found[2]) or found[1] == "fp16"
    fields: dict[str, Any] = {found[1]: True, "grad_reduce_in_fp32": not short}
    if found[2] == "nvfp4":
        fields |= {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
    elif found[2]:
        scaling = {"fp8_delayed_scaling": "delayed", "fp8_current_scaling": "tensorwise", "mxfp8": "mxfp8"}
        fields |= {"fp8": "hybrid", "fp8_recipe": scaling.get(found[2], "blockwise")}
    return fields


def _build_layout(options: Options, name: str, devices: int | None) -> TrainingLayout:
    """Return the training layout (mesh, batch, schedule, state sharding) that ``options``, options of Megatron-LM,
    describe. ``name``: ``megatron`` or ``megatron-bridge``, the framework for which the options were written.
    ``devices``: number of devices; ``None`` if unknown. Raise :class:`LayoutError` for wrong values and contradictions.
    """
    take = options.take_number
    pp, tp = take("pipeline-model-parallel-size", 1), take("tensor-model-parallel-size", 1)
    cp, ep = take("context-parallel-size", 1), take("expert-model-parallel-size", 1)
    etp = take("expert-tensor-parallel-size")
    precision = _read_precision(options)
    zero = _read_zero(options)
    replicate = take("num-distributed-optimizer-instances", 1)
    if replicate > 1 and not zero:
        raise ContradictionError(
            f"{options.name('num-distributed-optimizer-instances')}={replicate} without a distributed optimizer; "
            f"expected {options.name('use-distributed-optimizer')}, or one instance"
        )
    size, batch = take("micro-batch-size"), take("global-batch-size")
    sequence = options.take_flag("sequence-parallel")
    if sequence and tp == 1:
        if name == "megatron-bridge":
            raise ContradictionError(
                f"{options.name('sequence-parallel')} with tp=1, over which nothing is sharded; expected it off, or tp "
                "of 2 or more"
            )
        options.note("sequence-parallel", "has no effect with one rank of tensor parallelism")
    length = take("seq-length")
    if length and cp > 1 and length % (2 * cp):
        raise ContradictionError(
            f"{options.name('seq-length')}={length} is not divisible by 2 x cp = {2 * cp}; expected a multiple of it"
        )
    if length and sequence and length % (tp * cp):
        raise ContradictionError(
            f"{options.name('seq-length')}={length} is not divisible by tp={tp}"
            + (f" x cp={cp}" if cp > 1 else "")
            + f" under {options.name('sequence-parallel')}; expected a multiple of {tp * cp}"
        )
    _check_model_sizes(options, tp, ep)
    for option, reason in _BEYOND.items():
        if options.has(option) and options.given[option] is not False:
            options.note(option, reason)
    for option in sorted(_OF_MODEL & options.given.keys()):
        options.note(option, OF_MODEL)
    layout: dict[str, Any] = {
        "framework": name, "pp": pp, "tp": tp, "cp": cp, "ep": ep, "devices": devices, "precision": precision,
        "etp": etp or (tp if ep > 1 else None), "zero": zero, "microbatch_size": size, "global_batch": batch,
        "microbatches": 1 if size and batch is None and not options.has("rampup-batch-size") else None,
        "dp_replicate": replicate if zero else None,
        "sequence_parallel": bool(sequence) if tp > 1 else None, "seq_length": length,
        "context": _read_context(options) if cp > 1 else None, "recompute": _read_recompute(options),
        "offload": _read_offload(options), "optimizer": _read_optimizer(options), **_read_stages(options, pp),
    }  # fmt: skip
    profile = PROFILES["megatron-core"].model_copy(update=_read_profile(options, precision, bool(zero)))
    return TrainingLayout(**layout, profile=profile, unused=options.list_unused())


def _check_model_sizes(options: Options, tp: int, ep: int) -> None:
    """Raise :class:`ContradictionError` if ``options``, options of Megatron-LM, give a number of attention heads that
    is not divisible by ``tp``, or a number of experts that is not divisible by ``ep``.
    """
    sizes = (
        ("num-attention-heads", "tensor-model-parallel-size", tp),
        ("num-experts", "expert-model-parallel-size", ep),
    )
    for option, axis, ranks in sizes:
        count = options.take_number(option)
        if count and count % ranks:
            raise ContradictionError(
                f"{options.name(option)}={count} is not divisible by {options.name(axis)}={ranks}; expected a multiple "
                f"of {ranks}, or a divisor of {count} ranks"
            )


def _read_precision(options: Options) -> str:
    """Return the precision of matrix products: ``bf16``, ``fp16``, ``fp32``, ``fp8`` or ``nvfp4``. ``options``: options
    of Megatron-LM (name -> value). Raise :class:`ContradictionError` for two formats at once."""
    bf16, fp16 = options.take_flag("bf16"), options.take_flag("fp16")
    if bf16 and fp16:
        raise ContradictionError(f"{options.name('bf16')} and {options.name('fp16')} together; expected one of them")
    options.take("pipeline-dtype")
    short = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    fp8, fp4 = _find_format(options, "fp8", _FP8), _find_format(options, "fp4", _FP4)
    options.take_flag("fp32")
    if fp8 and fp4:
        raise ContradictionError(
            f"{options.name(fp8)} and {options.name(fp4)} together; expected products in one format: remove one of them"
        )
    if fp4 and options.take_choice("fp4-recipe", _FP4_RECIPES, "nvfp4") == "custom":
        options.note("fp4-recipe", "the quantizers of a custom recipe are priced as those of nvfp4")
    return "nvfp4" if fp4 else "fp8" if fp8 else short


def _find_format(options: Options, name: str, known: Mapping[str, str]) -> str | None:
    """Return the name of the option that switches on products in ``name``, which is ``fp8`` or ``fp4``; ``None`` if no
    option does. For ``fp8`` it is ``fp8-format`` (Megatron-LM) or ``fp8`` (YAML configuration). ``known``: the allowed
    formats."""
    found = None
    for option in (f"{name}-format", name):
        if isinstance(value := options.given.get(option), str) and value:
            options.take_choice(option, known)
        if options.take(option) not in (None, False, "none", ""):
            found = found or option
    return found


def _read_zero(options: Options) -> int:
    """Return the ZeRO stage, 0 to 3, that follows from ``options``, options of Megatron-LM: those on the distributed
    optimizer and on FSDP. Raise :class:`ContradictionError` if they exclude each other.
    """
    distributed = options.take_flag("use-distributed-optimizer")
    own, torch = options.take_flag("use-megatron-fsdp"), options.take_flag("use-torch-fsdp2")
    own = options.take_flag("use-custom-fsdp") or own
    sharding = options.take_choice("data-parallel-sharding-strategy", _SHARDING)
    if own and torch:
        raise ContradictionError(
            f"{options.name('use-megatron-fsdp')} and {options.name('use-torch-fsdp2')} together; expected one of them"
        )
    kept = options.take_flag("torch-fsdp2-reshard-after-forward", True)
    if options.take_flag("torch-fsdp2-no-reshard-after-forward"):
        kept = False
    if torch:
        return 3 if kept else 2
    if own:
        options.take("ckpt-format")
        return _SHARDING["no_shard"] if sharding is None else int(sharding)
    if sharding is not None:
        options.note("data-parallel-sharding-strategy", "has no effect without Megatron's FSDP")
    return 1 if distributed else 0


def _read_context(options: Options) -> str:
    """Return this project's name of the attention algorithm over context-parallel ranks, such as ``ring``. ``options``:
    name of a Megatron-LM option -> value."""
    given = options.take("cp-comm-type")
    kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else ["p2p"]
    for kind in kinds:
        if kind not in _CONTEXT:
            raise options.wrong_value("cp-comm-type", f"one of {', '.join(_CONTEXT)}")
    if len({*kinds}) > 1:
        options.note("cp-comm-type", "the prediction assumes that attention runs in all layers as in the first one")
    elif "a2a+p2p" in kinds:
        options.note("cp-comm-type", "the prediction assumes that attention only exchanges heads (Ulysses)")
    return _CONTEXT[kinds[0]] if kinds else "ring"


def _read_recompute(options: Options) -> str:
    """Return which activations backward recomputes according to ``options``, options of Megatron-LM: ``none``,
    ``scores`` (attention scores), ``selective`` (results of operators that are quick to compute) or ``full`` (whole
    layers). Raise :class:`ContradictionError` if the options exclude each other."""
    kind = options.take_choice("recompute-granularity", {"full": "full", "selective": "selective"})
    method = options.take_choice("recompute-method", {"uniform": "uniform", "block": "block"})
    count = options.take_number("recompute-num-layers", options.take_number("activations-checkpoint-num-layers"))
    modules = options.take("recompute-modules")
    modules = modules.split() if isinstance(modules, str) else modules
    if options.take_flag("recompute-activations") and kind is None:
        kind = "selective"
    older = options.take_choice("activations-checkpoint-method", {"uniform": "uniform", "block": "block"})
    if options.take_flag("checkpoint-activations") or older:
        kind, method = kind or "full", method or older or "uniform"
    if modules is not None and not (isinstance(modules, list) and all(isinstance(each, str) for each in modules)):
        raise options.wrong_value("recompute-modules", "names of modules, like core_attn layernorm")
    unknown = [name for name in modules or () if name not in _RECOMPUTED]
    if unknown:
        raise OptionValueError(
            f"{options.where}: {options.name('recompute-modules')}: unknown module {unknown[0]}; "
            f"{format_suggestion(unknown[0], [*_RECOMPUTED])}expected some of {', '.join(_RECOMPUTED)}: "
            "correct the name"
        )
    if kind == "full":
        if method is None:
            raise ContradictionError(
                f"{options.name('recompute-granularity')}=full without {options.name('recompute-method')}; expected "
                "uniform or block"
            )
        if method == "block" and count:
            options.note(
                "recompute-num-layers",
                "the prediction assumes that all layers are recomputed, not only some of each stage",
            )
        elif count and count > 1:
            options.note(
                "recompute-num-layers",
                "the prediction assumes that the input of every layer is saved, not only that of a group of layers",
            )
        return "full"
    if kind is None:
        for option in ("recompute-method", "recompute-num-layers", "recompute-modules"):
            options.note(option, "has no effect without recompute-granularity")
        return "none"
    if method is not None or count is not None:
        raise ContradictionError(
            f"{options.name('recompute-granularity')}=selective with a method or a number of layers, which belong to "
            "full; expected neither"
        )
    names = [*(modules or ["core_attn"])]
    if names == ["core_attn"]:
        return "scores"
    if all(each in _QUICK for each in names):
        return "selective"
    known = "the prediction assumes that all cheap operators are recomputed, and no matrix products"
    options.note("recompute-modules", known)
    return "scores" if "core_attn" in names and len(names) == 1 else "selective"


def _read_offload(options: Options) -> tuple[str, ...]:
    found = ["optimizer"] if options.take_flag("optimizer-cpu-offload") else []
    layers = options.take_number("cpu-offloading-num-layers", 0, least=0)
    fine = options.take_flag("fine-grained-activation-offloading")
    return (*found, "activations") if layers or fine else tuple(found)


def _read_optimizer(options: Options) -> str:
    """Return this project's name for the configured optimizer; ``adamw`` for an unknown one. ``options``: name of a
    Megatron-LM option -> value."""
    name = str(options.take_text("optimizer", "adam")).lower()
    momentum = options.take_share("sgd-momentum", 0.9)
    if name not in _OPTIMIZERS:
        options.note("optimizer", "is not known to this project; the prediction assumes the optimizer states of Adam")
        return "adamw"
    if name not in ("adam", "sgd"):
        options.note("optimizer", "the prediction assumes that the optimizer has one moment for every parameter")
    return "sgd" if name == "sgd" and not momentum else _OPTIMIZERS[name]


def _read_stages(options: Options, pp: int) -> dict[str, Any]:
    """Return the pipeline schedule, the number of virtual stages and the layers of each stage, as a dict of fields of a
    training layout: name -> value. ``pp``: number of pipeline ranks; with one, there are no such fields. ``options``:
    name of a Megatron-LM option -> value."""
    chunks = options.take_number("num-virtual-stages-per-pipeline-rank")
    per_chunk = options.take_number("num-layers-per-virtual-pipeline-stage")
    text = options.take("pipeline-model-parallel-layout")
    first = options.take_number("decoder-first-pipeline-num-layers", least=0)
    last = options.take_number("decoder-last-pipeline-num-layers", least=0)
    ends = [options.take_flag(f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")]
    cuts = {
        "pipeline-model-parallel-layout": text,
        "num-layers-per-virtual-pipeline-stage": per_chunk,
        "num-virtual-stages-per-pipeline-rank": chunks,
    }
    given = [name for name, value in cuts.items() if value]
    if len(given) > 1:
        raise ContradictionError(f"{' and '.join(map(options.name, given))} together; expected one of them")
    if pp == 1:
        if chunks and chunks > 1:
            raise ContradictionError(
                f"{options.name('num-virtual-stages-per-pipeline-rank')}={chunks} with one pipeline rank; expected a "
                "pipeline of 2 or more ranks"
            )
        return {}
    found: dict[str, Any] = {"first_less": int(bool(ends[0])), "last_less": int(bool(ends[1]))}
    if text is not None:
        found["stage_layers"] = _parse_stage_layout(options, text)
        chunks = max(1, len(found["stage_layers"]) // pp)
    elif first is not None or last is not None:
        found["stage_layers"] = _divide_rest(options, (pp, chunks or 1), first, last)
    if per_chunk:
        found["layers_per_stage"] = per_chunk
        layers = options.take_number("num-layers")
        count = layers + sum(map(bool, ends)) if layers else 0
        if count and count % (pp * per_chunk):
            raise ContradictionError(
                f"{layers} layers do not divide into pp={pp} ranks with stages of {per_chunk} layers; expected a "
                f"multiple of {pp * per_chunk}"
            )
        chunks = count // (pp * per_chunk) if count else None
    layers, stages = options.take_number("num-layers"), pp * (chunks or 1)
    if layers and not per_chunk and "stage_layers" not in found and (layers + sum(map(bool, ends))) % stages:
        raise ContradictionError(
            f"{options.name('num-layers')}={layers} does not divide into {stages} stages; expected a multiple of it, "
            f"or {options.name('pipeline-model-parallel-layout')}"
        )
    found["virtual_stages"] = chunks if chunks and chunks > 1 else None
    unsure = bool(per_chunk) and chunks is None
    found["schedule"] = "interleaved" if unsure or (chunks or 1) > 1 else "1f1b"
    return found


def _divide_rest(options: Options, stages: tuple[int, int], first: int | None, last: int | None) -> tuple[int, ...]:
    """Return the number of layers in each virtual stage, in the order of the layers. The first and the last pipeline
    rank may have a configured number of layers; all other ranks share the remaining layers equally.

    ``options``: name of a Megatron-LM option -> value. ``stages``: the number of pipeline ranks, and of virtual stages
    on each. ``first``, ``last``: the configured number of layers of the first and of the last pipeline rank, over all
    its virtual stages; ``None``: not configured."""
    ranks, chunks = stages
    layers = options.take_number("num-layers")
    if layers is None:
        raise ContradictionError(
            f"{options.name('decoder-first-pipeline-num-layers')} or "
            f"{options.name('decoder-last-pipeline-num-layers')} is given without {options.name('num-layers')}; "
            "expected the number of layers, too, because the layers of the other stages follow from it"
        )
    others = ranks - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if (others < 1 and rest) or rest < 0 or (others and rest % others):
        raise ContradictionError(
            f"of {layers} layers, {rest} are left for {others} stages; expected a multiple of their number"
        )
    middle = [rest // others] * others if others else []
    of_rank = [*([] if first is None else [first]), *middle, *([] if last is None else [last])]
    for size in of_rank:
        if size % chunks:
            raise ContradictionError(
                f"{size} layers on a pipeline rank do not divide into its {chunks} virtual stages; expected a multiple "
                f"of {chunks} on each rank"
            )
    return tuple(size // chunks for size in of_rank) * chunks


def _parse_stage_layout(options: Options, given: Any) -> tuple[int, ...]:
    """Return the number of layers in each pipeline stage. ``given``: text like ``Ett|ttL``, where ``t`` is a layer and
    ``|`` separates stages, or for each stage a list of names such as ``decoder``. ``options``: name of a Megatron-LM
    option -> value."""
    option = "pipeline-model-parallel-layout"
    expected = "stages like Ett|ttL, with E, t, m and L for embedding, layer, prediction ahead and loss"
    if isinstance(given, list):
        if not all(isinstance(stage, list) for stage in given) or not given:
            raise options.wrong_value(option, expected)
        return tuple(sum(name == "decoder" for name in stage) for stage in given)
    if not isinstance(given, str) or not given or len(given) > _MOST_REPEATED:
        raise options.wrong_value(option, expected)
    text = re.sub(r"[,\s\"']", "", given)
    for pattern in (r"\(([^()]*)\)\*(\d{1,4})", r"([EtmL|])\*(\d{1,4})"):
        text = re.sub(pattern, lambda match: (match[1] * int(match[2]))[:_MOST_REPEATED], text)
    text = re.sub(r"\(([^()]*)\)", r"\1", text)
    if not text or _PLACES.sub("", text).strip("|").replace("|", ""):
        raise options.wrong_value(option, expected)
    return tuple(stage.count("t") for stage in text.split("|"))


def _read_profile(options: Options, precision: str, sharded: bool) -> dict[str, Any]:
    """Return the fields of the execution profile (how the framework runs a plan) that options of Megatron-LM change, as
    name -> value. ``options``: these options. ``precision``: the precision of matrix products. ``sharded``: whether
    optimizer states are sharded.
    """
    facts: dict[str, Any] = {}
    gradients, parameters = options.take_flag("overlap-grad-reduce"), options.take_flag("overlap-param-gather")
    if parameters and not gradients:
        raise ContradictionError(
            f"{options.name('overlap-param-gather')} without {options.name('overlap-grad-reduce')}; expected both"
        )
    facts["overlap"] = bool(gradients)
    if gradients and sharded and not parameters:
        options.note(
            "overlap-grad-reduce", "the prediction assumes that gathers of parameters overlap with computation, too"
        )
    facts["overlap_tensor"] = bool(options.take_flag("tp-comm-overlap"))
    long = options.take_flag("accumulate-allreduce-grads-in-fp32", None)
    short = options.take_flag("grad-reduce-in-bf16")
    if long and short:
        raise ContradictionError(
            f"{options.name('accumulate-allreduce-grads-in-fp32')} and {options.name('grad-reduce-in-bf16')} together; "
            "expected one of them"
        )
    facts["short_gradients"] = bool(short) or long is False or (precision == "fp16" and not long)
    if options.take_flag("no-scatter-gather-tensors-in-pipeline"):
        facts["sends"] = "whole"
    facts |= _read_expert_profile(options)
    recipe = options.take_choice("fp8-recipe", _FP8_RECIPES, "delayed")
    facts["current_scaling"] = precision == "fp8" and recipe == "tensorwise"
    facts["graphs"] = _read_graphs(options)
    return facts


def _read_expert_profile(options: Options) -> dict[str, Any]:
    """Return the fields of the execution profile (how the framework runs a plan) that concern experts: name -> value.
    ``options``: name of a Megatron-LM option -> value."""
    facts: dict[str, Any] = {}
    kind = options.take_choice(
        "moe-token-dispatcher-type", {k: k for k in ("allgather", "alltoall", "alltoall_seq", "flex")}
    )
    backend = options.take_choice("moe-flex-dispatcher-backend", {"deepep": "deepep", "hybridep": "hybridep"})
    if options.take_flag("moe-enable-deepep") or kind == "flex":
        facts["dispatch"] = "once"
    elif backend is not None:
        options.note("moe-flex-dispatcher-backend", "has no effect without the flex dispatcher")
    if kind == "allgather":
        options.note(
            "moe-token-dispatcher-type",
            "the prediction assumes that tokens are exchanged by an all-to-all, not gathered",
        )
    facts["overlap_experts"] = bool(options.take_flag("overlap-moe-expert-parallel-comm"))
    if options.take_flag("moe-use-legacy-grouped-gemm"):
        facts["expert_kernels"] = "grouped"
    options.take_flag("moe-grouped-gemm")
    padded = options.take_flag("moe-pad-expert-input-to-capacity")
    if options.take_flag("moe-router-force-load-balancing"):
        facts["even_experts"] = "routed"
    elif padded:
        facts["even_experts"] = "padded"
    capacity = options.take_share("moe-expert-capacity-factor", 1.0)
    if capacity != 1.0 or facts.get("even_experts") != "padded":
        options.note(
            "moe-expert-capacity-factor",
            "the prediction assumes that every expert gets the mean number of tokens, whatever the capacity"
            if padded
            else "the capacity has an effect only with moe-pad-expert-input-to-capacity",
        )
    return facts


def _read_graphs(options: Options) -> str:
    """Return which part of a training step is recorded and replayed as CUDA graphs: ``none``, ``part`` (only some
    modules of a layer) or ``all``. ``options``: name of a Megatron-LM option -> value."""
    kind = options.take_choice("cuda-graph-impl", _GRAPHS, "none")
    on = options.take_any_flag("enable-cuda-graph", "external-cuda-graph")
    scope = options.take("cuda-graph-scope")
    scope = scope if isinstance(scope, list) else [scope] if isinstance(scope, str) else []
    modules = options.take("cuda-graph-modules")
    if kind in ("none", None) and not on:
        return "none"
    whole = any("full" in str(each) for each in scope) or kind == "full_iteration"
    return "all" if whole and not modules else "part"


def write_megatron(layout: TrainingLayout) -> tuple[str, tuple[UnusedOption, ...]]:
    """Return a Megatron-LM command line for ``layout``, one option per line, and the fields of the layout that
    Megatron-LM cannot express.
    """
    given, missing = _list_options(layout)
    lines = [f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items()]
    return "\n".join(lines) + "\n", missing


def write_megatron_bridge(layout: TrainingLayout) -> tuple[str, tuple[UnusedOption, ...]]:
    """Return the text of a YAML file with fields of Megatron-Bridge's ``ConfigContainer`` for ``layout``, and the
    fields of the layout that it cannot express.
    """
    given, missing = _list_options(layout)
    if given.pop("num-layers-per-virtual-pipeline-stage", None):
        reason = "the number of virtual stages is given, which follows from the number of layers"
        fields = ("layers_per_stage", "schedule", *(() if layout.virtual_stages is None else ("virtual_stages",)))
        kept = tuple(each for each in missing if each.option not in fields)
        more = (UnusedOption(option=name, value=str(getattr(layout, name)), reason=reason) for name in fields)
        missing = (*kept, *more)
    back = {option: field for field, option in _BRIDGE_NAMES.items() if option != "seq-length"}
    places = load_known_options()["megatron-bridge"]
    found: dict[str, dict[str, Any]] = {}
    for option, value in given.items():
        field = back.get(option, option).replace("-", "_")
        order = ("ddp", "dist", "model", "train", "optimizer", "mixed_precision", "comm_overlap")
        first = {"bf16": "mixed_precision", "fp16": "mixed_precision", "grad_reduce_in_fp32": "ddp"}.get(field)
        section = first or next((name for name in order if field in places[name]), None)
        if field == "seq_length":
            section = "model"
        if section is None:  # an option of the command line alone
            continue
        if field in ("recompute_modules",):
            value = str(value).split()
        found.setdefault(section, {})[field] = value
    if "use-distributed-optimizer" in given:
        found["optimizer"] |= {"use_distributed_optimizer": True}
    if "use-megatron-fsdp" in given:
        found["dist"] = {"use_megatron_fsdp": True}
        found["checkpoint"] = {"ckpt_format": given["ckpt-format"]}
    if layout.pp > 1:
        types = {"bf16": "bfloat16", "fp8": "bfloat16", "nvfp4": "bfloat16", "fp16": "float16"}
        found["model"]["pipeline_dtype"] = f"torch.{types.get(layout.precision or '', 'float32')}"
    return yaml.safe_dump(found, sort_keys=False), missing


def _list_options(layout: TrainingLayout) -> tuple[dict[str, Any], tuple[UnusedOption, ...]]:
    """Return two values: the Megatron-LM options for ``layout``, as a dict name -> value; and the fields of the layout
    that they cannot express, each with the reason.
    """
    missing: list[UnusedOption] = []

    def leave_out(field: str, reason: str) -> None:
        missing.append(UnusedOption(option=field, value=str(getattr(layout, field)), reason=reason))

    given: dict[str, Any] = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep,
    }
    if layout.ep > 1:
        whole = (layout.dp or 1) * layout.cp * layout.tp % (layout.ep * layout.tp) == 0
        given["expert-tensor-parallel-size"] = layout.etp or (layout.tp if whole else 1)
        if layout.etp is None:
            leave_out("etp", f"an expert is on {given['expert-tensor-parallel-size']} ranks")
    if layout.cp > 1:
        back = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
        if layout.context is None:
            leave_out("context", "attention over cp runs in a ring (p2p) by default")
        given["cp-comm-type"] = back[layout.context or "ring"]
    if layout.tp > 1 and layout.sequence_parallel:
        given["sequence-parallel"] = True
    if layout.tp > 1 and layout.sequence_parallel is None:
        leave_out("sequence_parallel", "it is off unless it is asked for")
    given |= {"micro-batch-size": layout.microbatch_size, "global-batch-size": layout.global_batch}
    length, unit = layout.seq_length, 2 * layout.cp if layout.cp > 1 else 1
    given["seq-length"] = -(-length // unit) * unit if length else None
    if length and length % unit:
        leave_out("seq_length", f"a multiple of 2 x cp = {unit} is needed; {given['seq-length']} is written")
    _add_stages(layout, given, leave_out)
    _add_states(layout, given, leave_out)
    if layout.profile.overlap:
        given["overlap-grad-reduce"] = True
        given |= {"overlap-param-gather": True} if layout.zero else {}
    return {name: value for name, value in given.items() if value is not None}, tuple(missing)


def _add_stages(layout: TrainingLayout, given: dict[str, Any], leave_out: Any) -> None:
    """Add the pipeline options of ``layout`` to ``given``, a dict: option name -> value. ``leave_out``: a function
    ``leave_out(field, reason)`` that records a field of the layout that Megatron-LM cannot express."""
    if layout.pp == 1:
        return
    chunks = layout.virtual_stages or 1
    written = "interleaved" if chunks > 1 or layout.layers_per_stage else "1f1b"
    if layout.schedule is not None and layout.schedule != written:
        leave_out("schedule", f"the schedule is {written}; Megatron-LM has 1F1B and interleaved 1F1B")
    if layout.schedule is None:
        leave_out("schedule", f"the schedule is {written}")
    if layout.stage_layers:
        stages = ["t" * count for count in layout.stage_layers]
        given["pipeline-model-parallel-layout"] = "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])
    elif layout.layers_per_stage:
        given["num-layers-per-virtual-pipeline-stage"] = layout.layers_per_stage
        if layout.virtual_stages:
            leave_out("virtual_stages", "follows from the number of layers of a stage")
    elif chunks > 1:
        given["num-virtual-stages-per-pipeline-rank"] = chunks
    for field, end in (("first_less", "embedding"), ("last_less", "loss")):
        less = getattr(layout, field)
        if less and (less > 1 or layout.stage_layers):
            leave_out(field, "stages that are given one by one have no such number" if layout.stage_layers
                      else f"the {end} counts as one layer or none")  # fmt: skip
        elif less:
            given[f"account-for-{end}-in-pipeline-split"] = True


def _add_states(layout: TrainingLayout, given: dict[str, Any], leave_out: Any) -> None:
    """Add the options of ``layout`` for ZeRO, recomputation, offload, precision and the optimizer to ``given``, a dict:
    option name -> value. ``leave_out``: a function ``leave_out(field, reason)`` that records a field of the layout that
    Megatron-LM cannot express."""
    if layout.zero is None:
        leave_out("zero", "states are not sharded unless it is asked for")
    if layout.zero:
        given["use-distributed-optimizer"] = True
        if layout.zero > 1:
            # the only checkpoint format that Megatron-FSDP saves
            given |= {"use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor"}
            given["data-parallel-sharding-strategy"] = next(n for n, z in _SHARDING.items() if z == layout.zero)
        if (layout.dp_replicate or 1) > 1:
            given["num-distributed-optimizer-instances"] = layout.dp_replicate
    if layout.recompute == "full":
        given |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif layout.recompute == "scores":
        given |= {"recompute-granularity": "selective", "recompute-modules": "core_attn"}
    elif layout.recompute == "selective":
        delayed = layout.precision == "fp8" and not layout.profile.current_scaling
        module = "core_attn" if delayed else "layernorm"  # delayed scaling excludes the recomputation of norms
        given |= {"recompute-granularity": "selective", "recompute-modules": module}
        done = "attention scores" if delayed else "norms"
        leave_out("recompute", f"{done} are recomputed, and not everything that is quick")
    elif layout.recompute == "alternate":
        given |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
        leave_out("recompute", "whole layers are recomputed")
    elif layout.recompute is None:
        leave_out("recompute", "nothing is recomputed")
    moved = "optimizer" in layout.offload and layout.zero and layout.optimizer not in ("sgd", "sgd_momentum")
    if moved:
        given |= {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}
    elif "optimizer" in layout.offload:
        leave_out("offload", "states are moved to the host with Adam and a distributed optimizer alone")
    if moved and {*layout.offload} - {"optimizer"}:
        leave_out("offload", "states of the optimizer alone are written; how much else is moved depends on the model")
    elif layout.offload and "optimizer" not in layout.offload:
        leave_out("offload", "how much is moved depends on the model")
    if layout.precision is None:
        leave_out("precision", "it is float32 unless a type is given")
    types: dict[str, dict[str, Any]] = {
        "bf16": {"bf16": True},
        "fp8": {"bf16": True, "fp8-format": "hybrid"},
        "nvfp4": {"bf16": True, "fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
        "fp16": {"fp16": True},
    }
    given |= types.get(layout.precision or "", {})
    if layout.precision == "fp8" and layout.profile.current_scaling:
        given["fp8-recipe"] = "tensorwise"
    name = layout.optimizer
    given["optimizer"] = "sgd" if name in ("sgd", "sgd_momentum") else "adam"
    given |= {"sgd-momentum": 0.0} if name == "sgd" else {}
    if name not in ("adamw", "sgd", "sgd_momentum"):
        leave_out("optimizer", "the optimizer is AdamW")
