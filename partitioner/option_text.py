"""Parse options from text, translate option names of other libraries, and explain wrong values.

A message names the option, the values allowed, the value given, and the name that was probably meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from partitioner.errors import ConstraintError
from partitioner.topology.validate import format_suggestion

_WORDS = {  # kind of a pydantic error -> what was expected
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of module paths to stages, like {{'lm_head': -1}}",
    "string_type": "text",
    "less_than_equal": "at most {le}",
    "model_type": "the name of a schedule, a file that ends in .csv, or a ScheduleTable",
}

# What to write here -> what Megatron, DeepSpeed, FSDP, torchtitan, accelerate, Lightning and others call the option.
# ``{value}`` is what was given. Words of ``_BEFORE`` and ``_BEHIND`` are left out: ``tensor_parallel[_size]``.
_AXES = {
    "tp": "tensor_parallel tensor_model_parallel tensor model_parallel mp tensor_parallelism autotp",
    "pp": "pipeline_parallel pipeline_model_parallel pipeline pipeline_parallelism stages pipeline_stages "
    "pipeline_parallel_stages",
    "dp": "data_parallel data data_parallelism ddp replicas",
    "cp": "context_parallel context_parallelism sequence_context_parallel ulysses_sequence_parallel ring_parallel",
    "ep": "expert_parallel expert_model_parallel moe_expert_parallel moe_expert_model_parallel expert moe_parallel "
    "expert_parallelism moe_ep",
    "etp": "expert_tensor_parallel expert_tensor_model_parallel moe_tensor_parallel moe_tp",
    "dp_shard": "data_parallel_shard fsdp_shard fsdp_group hsdp_shard zero_hpz_partition hpz",
}
_RECOMPUTE = (
    'recompute="full" (all layers), "selective" (all but products), "alternate" or "none"; left out, the plan chooses'
)
_ZERO = "zero=1 (optimizer states), 2 (gradients, too) or 3 (parameters, too: FSDP); dp_shard=N: over N ranks of dp"
_OFFLOAD = 'offload="optimizer", "activations", "parameters" or "disk", several joined by +'
_ACCUMULATION = (
    "microbatch_size=N: a step has as many microbatches as the global batch has samples for on each rank of dp"
)
_SENT = 'grad_compression="bf16" or "int8"; gradients are added up in float32'


def _profile(fact: str) -> str:
    """Return a clause for error messages that tells the user to pass an execution profile to ``partition``, which then
    predicts another framework. ``fact``: a keyword argument of ``ExecutionProfile`` as text, such as ``overlap=False``.
    """
    return f"partition(..., profile=ExecutionProfile({fact})), which predicts another framework"


_ELSEWHERE: dict[str, str] = {
    "partition(..., precision={value})": "precision",
    'partition(..., precision="bf16"), "fp16", "tf32", "fp8" or "nvfp4"': "bf16 fp16 fp8 nvfp4 fp4 tf32 "
    "mixed_precision amp autocast dtype torch_dtype param_dtype mixed_precision_param half bfloat16 float16 "
    "compute_dtype",
    "partition(..., optimizer={value})": "optimizer optim optimizer_name",
    "partition(..., global_batch={value})": "global_batch batch global_train_batch train_batch gbs",
    "partition(..., objective={value})": "objective mode",
    "partition(..., loss=...)": "loss loss_fn criterion",
    "partition(..., time_limit_s={value})": "time_limit timeout solver_timeout time_limit_s",
    'a topology of as many devices, as Topology.local(4) or Topology.preset("dgx-h100", nodes=2)': "world nodes "
    "gpus devices gpus_per_node nproc_per_node nnodes num_processes machines",
    "partitioner.Engine(..., compile=True)": "compile torch_compile use_compile dynamo_backend compile_mode",
    "partitioner.Engine(..., loss_scale=...)": "loss_scale initial_scale grad_scaler initial_loss_scale",
    "engine.clip_grad_norm_({value}) before the optimizer's step": "clip_grad gradient_clipping max_grad_norm "
    "max_norm clip_grad_norm grad_clip",
    "torch.optim's own learning rate: the plan has none": "lr learning_rate",
}
_OPTIONS: dict[str, str] = {
    "microbatch_size={value}": "micro_batch micro_batch_per_gpu train_micro_batch_size_per_gpu "
    "micro_batch_size_per_gpu micro_batch_per_device mbs microbatch per_device_train_batch "
    "per_device_batch device_batch local_batch "
    "pipeline_parallel_microbatch pp_microbatch ubatch batch_per_device batch_per_gpu",
    _ACCUMULATION: "gradient_accumulation_steps gradient_accumulation grad_accumulation grad_accum accumulate_grad "
    "accumulation_steps grad_accum_steps grad_acc_steps accumulate_grad_batches batch_accumulation_per_replica "
    "microbatches micro_batches pipeline_microbatches pipeline_parallel_microbatches chunks acc_steps",
    "schedule={value} (1f1b, gpipe, interleaved, zb-1p, zb-2p, zb-v, dualpipe-v, or a CSV file)": "pipeline_schedule "
    "pipeline_parallel_schedule pp_schedule pp_engine pipeline_engine pipeline_parallel_schedule_csv pipe_schedule",
    "virtual_stages=N: stages of each pipeline rank": "virtual_pipeline_model_parallel virtual_pipeline_parallel "
    "virtual_pipeline vpp virtual_pp virtual_chunks layers_per_virtual_pipeline_stage interleave "
    "pipeline_parallel_layers_per_stage layers_per_stage model_chunks pp_interleave",
    "stage_of={{'module.path': stage}}": "pipeline_split split_points pipeline_parallel_split_points partition_method "
    "pipeline_model_parallel_layout pipeline_layout module_fqns_per_model_part balance device_map "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
    _RECOMPUTE: "activation_checkpointing gradient_checkpointing activation_checkpoint gradient_checkpoint "
    "activation_recomputation activation_recompute recompute_granularity recompute_method recompute_activations "
    "recompute_layers recompute_num_layers recomputation checkpoint_activations checkpointing ac ac_mode "
    "activation_checkpoint_mode activation_checkpointing_mode selective_ac selective_ac_option ac_freq remat "
    "rematerialization gradient_checkpointing_kwargs checkpoint_layers moe_layer_recompute recompute_modules",
    "zero={value}": "zero_stage zero_level stage zero_optimization_stage deepspeed_stage",
    "dp=N with dp_shard=N: dp / dp_shard are replicas": "data_parallel_replicate dp_replicate hsdp_replicate "
    "data_parallel_replicas",
    _ZERO: "zero_optimization zero_redundancy zero1 zero2 zero3 fsdp fsdp2 fully_shard "
    "fully_sharded use_fsdp hsdp sharding sharding_strategy shard_strategy shard_optimizer sharded_ddp "
    "distributed_optimizer dist_optimizer reshard_after_forward fsdp_sharding_strategy "
    "data_parallel_sharding_strategy shard_params fsdp_reshard_after_forward distributed_optimizer_instances",
    _OFFLOAD: "cpu_offload cpu_offloading offload_optimizer offload_param offload_params offload_parameters "
    "offload_activations activation_offload activation_offloading optimizer_offload optimizer_cpu_offload "
    "param_offload enable_cpu_offload nvme_offload cpu_offload_params offload_optimizer_device offload_param_device "
    "offload_to_cpu fine_grained_activation_offloading cpu_offload_optimizer",
    "sequence_parallel={value}": "seq_parallel sequence_parallelism sequence_parallelism_enabled sp_enabled "
    "megatron_sp tp_sequence_parallel",
    'cp=N (ranks that share each sequence), context="ulysses", "ring" or "all_gather"; sequence_parallel=True or False '
    "shards values between blocks over tp": "sp sequence_parallel_degree ulysses ring ring_attention ulysses_degree "
    "sequence_parallel_size sequence_parallel_ranks",
    'context="ring", "ulysses" or "all_gather"': "cp_comm_type context_parallel_algorithm cp_backend "
    "context_parallel_rotate_method cp_rotate_method context_parallel_load_balancer attention_context "
    "hierarchical_context_parallel cp_mode",
    "no constraint: our runtime reduces gradients behind computation; partition(..., profile=ExecutionProfile("
    "overlap=False)) predicts a framework that does not": "overlap_grad_reduce overlap_comm overlap_communication "
    "overlap_param_gather overlap_grad_reduction overlap_gradients overlap_reduce_scatter overlap_all_gather "
    "overlap_grad_sync overlap",
    "overlap_tensor={value}": "tp_comm_overlap async_tp async_tensor_parallel "
    "async_tensor_model_parallel_allreduce tp_linear_async_communication tensor_overlap overlap_tp "
    "tensor_parallel_overlap enable_async_tensor_parallel tensor_pieces",
    _profile('dispatch="rows", "parts" or "once"'): "moe_token_dispatcher moe_token_dispatcher_type token_dispatcher "
    "deepep expert_parallel_comm_backend moe_flex_dispatcher_backend moe_dispatch moe_enable_deepep dispatch",
    _profile("overlap_experts=True"): "overlap_moe overlap_moe_expert_parallel_comm overlap_ep "
    "moe_overlap dual_batch_overlap delay_wgrad_compute overlap_experts",
    _profile('expert_kernels="grouped", "each" or "fused"'): "moe_grouped_gemm "
    "grouped_gemm moe_use_grouped_gemm use_grouped_gemm moe_grouped_mm grouped_mm expert_kernels",
    _profile("current_scaling=True"): "fp8_recipe fp8_current_scaling tensorwise fp8_amax_compute_algo current_scaling",
    _profile('even_experts="routed" or "padded"'): "moe_router_force_load_balancing "
    "moe_pad_expert_input_to_capacity moe_expert_capacity_factor capacity_factor token_drop moe_token_drop_policy "
    "even_experts",
    _profile('graphs="all" or "part"'): "cuda_graph cuda_graphs cuda_graph_impl cuda_graph_scope "
    "enable_cuda_graph use_cuda_graphs external_cuda_graph cuda_graph_modules graphs",
    _profile('sends="parts"'): "scatter_gather_tensors_in_pipeline pipe_partitioned sends",
    _profile("regather={value}"): "regather",
    _profile("gather={value}"): "gather",
    _profile("fused_casts={value}"): "fused_casts",
    _profile("fused_kernels={value}"): "fused_kernels",
    _profile("short_gradients=True") + "; else gradients of short types are added up in float32": "grad_dtype "
    "grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 accumulate_grad_in_fp32 main_grads_dtype "
    "grad_accum_dtype short_gradients",
    _SENT: "gradient_compression grad_compress compress_gradients communication_data_type ddp_comm_hook "
    "fp16_allreduce compression grad_reduce_dtype reduce_dtype mixed_precision_reduce",
    "hierarchical=True": "hierarchical_allreduce hierarchical_all_reduce two_level_allreduce hierarchical_reduce",
}


def _list_option_spellings() -> dict[str, str]:
    """Return how options of other libraries are written in this project, as a dict: name of the option in lower case ->
    text such as ``tp={value}``, where ``{value}`` stands for the option's value."""
    found = {word: f"{axis}={{value}}" for axis, words in _AXES.items() for word in words.split()}
    for written, words in (*_OPTIONS.items(), *_ELSEWHERE.items()):
        found |= dict.fromkeys(words.split(), written)
    return found


_BY_NAME = _list_option_spellings()

_BEFORE = ("num", "n", "number_of", "enable", "use", "enabled", "is", "with")
_BEHIND = tuple("size degree deg dim way ways world_size ranks num enabled group_size groups".split())


def written_here(name: str, value: str, known: Sequence[str] = ()) -> str:
    """Return how an option ``name=value`` of another library is written in this project, such as ``tp=8``; ``""`` if
    there is no equivalent. ``value``: the value as text. ``known``: names of this project's options; an option of the
    same name is equivalent."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(".", "_").strip("_")
    for stem in _list_name_stems(words):
        if stem in _BY_NAME:
            return _BY_NAME[stem].format(value=value)
        if stem in known:
            return f"{stem}={value}"
    return ""


def _list_name_stems(name: str) -> list[str]:
    """Return the option name ``name`` and its shorter forms without generic words such as ``num_`` or ``_size``, the
    longest first."""
    stems = [name]
    for stem in stems:  # the list grows during the loop
        shorter = [stem.removeprefix(f"{word}_") for word in _BEFORE] + [stem.removesuffix(f"_{w}") for w in _BEHIND]
        stems += [each for each in shorter if each and each not in stems]
    return stems


def explain_validation_error(error: ValidationError, known: Sequence[str], noun: str = "constraint") -> str:
    """Return the first error in ``error``, the exception of a failed pydantic validation, as one sentence: the option,
    the expected values, and the given value. ``known``: the valid option names. ``noun``: the word for an option in the
    sentence, such as ``constraint``."""
    first = error.errors()[0]
    name, got = str(first["loc"][0]), first["input"]
    if first["type"] == "extra_forbidden":
        here = written_here(name, repr(got), known)
        meant = f"here it is {here}; " if here else format_suggestion(name, known)
        return f"unknown {noun} {name!r}; {meant}expected {', '.join(known)}"
    if len({each["loc"] for each in error.errors() if each["loc"][0] == name}) > 1 and name == "schedule":
        return f"{noun} {name}: input should be {_WORDS['model_type']}, got {got!r}"
    place = "".join(f"[{key!r}]" for key in first["loc"][1:] if key != "[key]")
    context = first.get("ctx", {})
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] in _WORDS:
        message = f"input should be {_WORDS[first['type']].format_map(context)}"
    return f"{noun} {name}{place}: {message}, got {got!r}{_suggest_meant_value(got, context)}"


def _suggest_meant_value(got: Any, context: dict[str, Any]) -> str:
    """Return the suggestion of an allowed value that resembles ``got``, with a leading semicolon; ``""`` if there is
    none. ``context``: the ``ctx`` of a pydantic error, which has the allowed values under ``values`` or ``expected``.
    """
    values = context.get("values") or str(context.get("expected", "")).replace(" or ", ", ").split(", ")
    meant = format_suggestion(got, [str(value).strip("'") for value in values if value]) if isinstance(got, str) else ""
    return f"; {meant.rstrip()}" if meant else ""


def read_options(text: str) -> dict[str, Any]:
    """Return the options in ``text``, such as ``tp=8,schedule=gpipe``, as a dict: name -> value. Numbers and booleans
    are converted.

    Several values are joined by ``+`` (``data_shares=3+2``). In ``stage_of`` a module path is followed by its pipeline
    stage (``stage_of=embed:0+head:-1``). Raise :class:`ConstraintError` for malformed text.
    """
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ConstraintError(f"{part!r} is no option; expected name=value, as in tp=8,schedule=gpipe")
        name = name.replace("-", "_")
        found[name] = _OF_SEVERAL.get(name, _parse_value)(value)
    return found


def _parse_value(text: str) -> Any:
    """Return ``text``, the value of an option, as an integer or a boolean if it is written like one, otherwise
    unchanged.
    """
    words = {"true": True, "false": False}
    return int(text) if text.lstrip("-").isdigit() else words.get(text.lower(), text)


def _parse_stage_places(text: str) -> dict[str, Any]:
    """Return the pipeline stages in ``text``, such as ``embed:0+head:-1``, as module path prefix -> stage; -1 is the
    last stage. Raise :class:`ConstraintError` for malformed text.
    """
    parts = [part.rpartition(":") for part in text.split("+")]
    for prefix, colon, stage in parts:
        if not (prefix and colon and stage):
            raise ConstraintError(
                f"stage_of={text} names no stages; expected PREFIX:STAGE, several joined by +, as in "
                "stage_of=model.embed_tokens:0+lm_head:-1"
            )
    return {prefix.strip(): _parse_value(stage.strip()) for prefix, _, stage in parts}


_OF_SEVERAL: dict[str, Callable[[str], Any]] = {
    "data_shares": lambda text: [_parse_value(part.strip()) for part in text.split("+")],
    "stage_of": _parse_stage_places,
}
