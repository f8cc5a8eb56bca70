"""Constraints that the user sets, and error messages for constraints that are wrong.

The search chooses everything that is not constrained. A message names the constraint, the values allowed, the value
given, and the name that was probably meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from partitioner.errors import ConstraintError
from partitioner.runtime.program.buckets import Compression
from partitioner.runtime.program.mesh import AXES
from partitioner.runtime.program.program import OFFLOADS, Offload
from partitioner.schedules.csv_table import SUFFIX, ScheduleTable
from partitioner.schedules.registry import SCHEDULES
from partitioner.topology.validate import format_suggestion
from partitioner.units import list_divisors

_WORDS = {  # pydantic's kind of complaint -> what was expected
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
_TENSOR_OVERLAP = "overlap_tensor=True (planned, not executed)"
_SENT = 'grad_compression="bf16" or "int8"; gradients are added up in float32'
_ELSEWHERE: dict[str, str] = {
    "partition(..., precision={value})": "precision",
    'partition(..., precision="bf16"), "fp16", "tf32" or "fp8"': "bf16 fp16 fp8 tf32 mixed_precision amp autocast "
    "dtype torch_dtype param_dtype mixed_precision_param half bfloat16 float16 compute_dtype",
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
    "overlap={value}": "overlap_grad_reduce overlap_comm overlap_communication overlap_param_gather "
    "overlap_grad_reduction overlap_gradients overlap_reduce_scatter overlap_all_gather overlap_grad_sync",
    _TENSOR_OVERLAP: "tp_comm_overlap async_tp async_tensor_parallel async_tensor_model_parallel_allreduce "
    "tp_linear_async_communication tensor_overlap overlap_tp tensor_parallel_overlap",
    'dispatch="rows", "parts" or "once"': "moe_token_dispatcher moe_token_dispatcher_type token_dispatcher deepep "
    "expert_parallel_comm_backend moe_flex_dispatcher_backend moe_dispatch moe_enable_deepep",
    "overlap_experts=True (planned, not executed)": "overlap_moe overlap_moe_expert_parallel_comm overlap_ep "
    "moe_overlap dual_batch_overlap delay_wgrad_compute",
    'expert_kernels="grouped", "each" or "fused" (planned, not executed but for grouped)': "moe_grouped_gemm "
    "grouped_gemm moe_use_grouped_gemm use_grouped_gemm moe_grouped_mm grouped_mm",
    "current_scaling=True (planned, not executed)": "fp8_recipe fp8_current_scaling tensorwise fp8_amax_compute_algo",
    'even_experts="routed" or "padded" (planned, not executed)': "moe_router_force_load_balancing "
    "moe_pad_expert_input_to_capacity moe_expert_capacity_factor capacity_factor token_drop moe_token_drop_policy",
    'graphs="all" or "part" (planned, not executed)': "cuda_graph cuda_graphs cuda_graph_impl cuda_graph_scope "
    "enable_cuda_graph use_cuda_graphs external_cuda_graph cuda_graph_modules",
    _SENT: "gradient_compression grad_compress compress_gradients communication_data_type ddp_comm_hook "
    "fp16_allreduce compression grad_reduce_dtype reduce_dtype mixed_precision_reduce",
    "short_gradients=True (planned, not executed); else gradients of short types are added up in float32": "grad_dtype "
    "grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 accumulate_grad_in_fp32 main_grads_dtype "
    "grad_accum_dtype",
    "hierarchical=True": "hierarchical_allreduce hierarchical_all_reduce two_level_allreduce hierarchical_reduce",
}


def _by_name() -> dict[str, str]:
    found = {word: f"{axis}={{value}}" for axis, words in _AXES.items() for word in words.split()}
    for written, words in (*_OPTIONS.items(), *_ELSEWHERE.items()):
        found |= dict.fromkeys(words.split(), written)
    return found


_BY_NAME = _by_name()

_BEFORE = ("num", "n", "number_of", "enable", "use", "enabled", "is", "with")
_BEHIND = tuple("size degree deg dim way ways world_size ranks num enabled group_size groups".split())


def written_here(name: str, value: str, known: Sequence[str] = ()) -> str:
    """What to write instead of ``name=value`` of another library, where ``known`` are the constraints; empty where
    nothing here is meant by it."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(".", "_").strip("_")
    for stem in _list_name_stems(words):
        if stem in _BY_NAME:
            return _BY_NAME[stem].format(value=value)
        if stem in known:
            return f"{stem}={value}"
    return ""


def _list_name_stems(name: str) -> list[str]:
    """``name``, and what is left of it without words that say nothing, the longest first."""
    stems = [name]
    for stem in stems:  # grows meanwhile
        shorter = [stem.removeprefix(f"{word}_") for word in _BEFORE] + [stem.removesuffix(f"_{w}") for w in _BEHIND]
        stems += [each for each in shorter if each and each not in stems]
    return stems


def explain_validation_error(error: ValidationError, known: Sequence[str]) -> str:
    """The first of ``error``'s complaints as one sentence; ``known``: the constraints that there are."""
    first = error.errors()[0]
    name, got = str(first["loc"][0]), first["input"]
    if first["type"] == "extra_forbidden":
        here = written_here(name, repr(got), known)
        meant = f"here it is {here}; " if here else format_suggestion(name, known)
        return f"unknown constraint {name!r}; {meant}expected {', '.join(known)}"
    if len({each["loc"] for each in error.errors() if each["loc"][0] == name}) > 1 and name == "schedule":
        return f"constraint {name}: input should be {_WORDS['model_type']}, got {got!r}"
    place = "".join(f"[{key!r}]" for key in first["loc"][1:] if key != "[key]")
    context = first.get("ctx", {})
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] in _WORDS:
        message = f"input should be {_WORDS[first['type']].format_map(context)}"
    return f"constraint {name}{place}: {message}, got {got!r}{_suggest_meant_value(got, context)}"


def _suggest_meant_value(got: Any, context: dict[str, Any]) -> str:
    """What was meant, of the values that there are."""
    values = context.get("values") or str(context.get("expected", "")).replace(" or ", ", ").split(", ")
    meant = format_suggestion(got, [str(value).strip("'") for value in values if value]) if isinstance(got, str) else ""
    return f"; {meant.rstrip()}" if meant else ""


Recompute = Literal["none", "scores", "selective", "alternate", "full"]

# The fields that fix what a point of the search is.
OF_POINT = ("pp", "dp", "cp", "tp", "ep", "etp", "microbatch_size", "schedule", "virtual_stages", "zero", "dp_shard")
_NUMBERS = tuple(name for name in OF_POINT if name != "schedule")
_DECISIVE = 3  # of the four axes whose sizes multiply: the last one follows from the number of devices
OF_ONE_STAGE = ("1f1b", "gpipe")  # schedules under which one stage runs its microbatches as alone

# Field -> the values that this version executes; others are planned when asked for, and the plan says so.
_EXECUTED: dict[str, tuple[Any, ...]] = {
    "etp": (None, 1),
    "overlap": (None, True),
    "overlap_tensor": (None, False),
    "regather": (None, False),
    "gather": (None, "call"),
    "sends": (None, "whole"),
    "dispatch": (None, "rows"),
    "overlap_experts": (None, False),
    "short_gradients": (None, False),
    "fused_casts": (None, False),
    "current_scaling": (None, False),
    "expert_kernels": (None, "grouped"),
    "graphs": (None,),
    "even_experts": (None,),
}

_WHY_NOT = {
    2: "what is lost in sending a whole gradient would be kept, which the gradient itself is not",
    3: "gradients are sent one call at a time, as they are",
}


class Constraints(BaseModel):
    """What is given is fixed; ``None`` leaves the choice to the search.

    ``pp``, ``dp``, ``cp``, ``tp``, ``ep``: ranks on each mesh axis. ``microbatch_size``: samples per data-parallel rank
    and microbatch. ``data_shares``: the microbatches of each rank of ``dp`` (``None``: about as many, or as ranks are
    fast). ``schedule``: a name of ``partitioner/schedules/registry.py`` (all but ``1f1b`` and ``gpipe`` are for several
    stages), a CSV file, or a :class:`ScheduleTable`. ``stage_of``: module path prefix -> pipeline stage (where a
    schedule has virtual ones, virtual stage), negative from the end. ``context``: how attention runs over ``cp``: by
    gathering keys and values, in a ring, or by heads (``None``: as is cheapest). ``sequence_parallel``: ``False`` keeps
    values between blocks whole over ``tp``; else they are sharded where that is cheaper. ``zero``: the stage of state
    sharding over ``dp`` and ``cp``; ``dp_shard``: over so many of the ``dp`` ranks, neighbours, of which there are then
    replicas (``None``: over all). ``ep`` ranks of dp x cp x tp share the experts, each expert over ``etp`` of them
    (``None``: as ``tp``). ``recompute``: what backward makes again: ``selective``, whatever is quickly made (all but
    products, fused attentions and what is sent), ``scores``, of it those of attentions alone, ``alternate``, every
    second product besides, or ``full``, whole layers. ``overlap``: whether gradients are reduced, and sharded states
    gathered, behind computation; ``overlap_tensor``: gathers and scatters over ``tp``, in pieces behind the products
    beside them; ``regather``: whether values that are gathered over ``tp`` are kept sharded and gathered again in
    backward. ``gather``: whether sharded states are gathered together for a call, or each ``parameter`` by itself, or,
    under ``zero=1``, are whole on an ``owner`` each, which sends its own to the others before the next step. ``sends``:
    whether what ``sequence_parallel=False`` keeps whole goes ``whole`` from each rank to its peer in the next stage, or
    in ``parts``, one from each rank of ``tp``, which the ranks there gather. ``dispatch``: how rows go to experts: as
    ``rows``, one for every expert, from each of the ranks that share it; in ``parts``, as ``sends``; or ``once``,
    besides, to each node and rank, which hand them on (DeepEP). ``overlap_experts``: whether that runs behind the
    computation of another microbatch. ``expert_kernels``: whether products of a rank's experts are ``grouped`` in one
    kernel, launched for ``each``, as their casts are (Transformer Engine's grouped linear layers), or grouped and
    ``fused`` with what lies between (its grouped MLP). ``graphs``: what is recorded in CUDA graphs, so that the host
    issues nothing of it: ``all``, or a ``part``, all but experts (``None``: nothing is). ``even_experts``: that all
    experts have as many rows: they are ``routed`` so, or those beyond a share are dropped and what lacks is ``padded``
    (``None``: rows go to any expert with the same probability, so that some ranks have more). ``placement``:
    ``in_order`` has rank i on device i (``None``: as is fastest). ``overlap_steps``: that a rank begins the next step
    when it has ended its own part of this one, and a step takes what lies between two ends of it on one rank: nothing
    is then asked of all ranks in between, as clipping by the norm of all gradients does, or scaling of the loss in
    float16. ``short_gradients``: whether gradients are of their parameter's type where that is shorter than float32,
    rather than in float32. ``fused_casts``: whether what products in fp8 read is written so by the kernels before them,
    rather than cast for each; ``current_scaling``: whether each tensor is then cast by its own largest number, rather
    than by what it was before or block by block. ``offload``: what is in host memory between uses: ``optimizer``
    states, stepped there then, ``activations``, ``parameters`` (and the optimizer); one name, several
    (``"optimizer+activations"``), or none, ``()``; ``disk``: optimizer states (it goes with the optimizer) are on the
    nodes' disks instead. ``None``: nothing, unless nothing fits otherwise and the parallel degrees are left to the
    search (see :meth:`fixes_mesh`); a fixed mesh that does not fit is a :class:`CapacityError`, which says what offload
    would give. ``hierarchical``: whether gradients that are added up over several nodes are scattered inside each
    first, and gathered there last. ``grad_compression``: in what gradients are sent between the outermost of those; it
    changes what is trained, and is never chosen unasked. ``couple``: what a model that has samples meet (losses that
    balance experts, batch norm) is computed on: the global ``batch``, or each ``microbatch``, whose size is then given;
    loss and gradients are their mean. ``ahead``: search what is only planned yet, too (see :attr:`planned_only`).
    ``memory_margin``: the fraction of each device's usable memory that plans leave free, for what the estimate does not
    know (fragmentation, libraries); 0 uses all of it.

    Raises :class:`ConstraintError` for a malformed value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pp: PositiveInt | None = None
    dp: PositiveInt | None = None
    cp: PositiveInt | None = None
    tp: PositiveInt | None = None
    ep: PositiveInt | None = None
    etp: PositiveInt | None = None
    microbatch_size: PositiveInt | None = None
    data_shares: tuple[PositiveInt, ...] | None = None
    schedule: str | ScheduleTable | None = None
    virtual_stages: PositiveInt | None = None
    recompute: Recompute | None = None
    zero: int | None = Field(default=None, ge=0, le=3)
    dp_shard: PositiveInt | None = None
    context: Literal["all_gather", "ring", "ulysses"] | None = None
    sequence_parallel: bool | None = None
    overlap: bool | None = None
    overlap_tensor: bool | None = None
    regather: bool | None = None
    gather: Literal["call", "parameter", "owner"] | None = None
    sends: Literal["whole", "parts"] | None = None
    dispatch: Literal["rows", "parts", "once"] | None = None
    overlap_experts: bool | None = None
    overlap_steps: bool = False
    short_gradients: bool | None = None
    fused_casts: bool | None = None
    current_scaling: bool | None = None
    expert_kernels: Literal["grouped", "each", "fused"] | None = None
    graphs: Literal["part", "all"] | None = None
    even_experts: Literal["routed", "padded"] | None = None
    placement: Literal["in_order"] | None = None
    couple: Literal["batch", "microbatch"] = "batch"
    offload: tuple[Offload, ...] | None = None
    memory_margin: float = Field(default=0.05, ge=0, lt=1)
    hierarchical: bool | None = None
    grad_compression: Compression | None = None
    ahead: bool = False
    stage_of: dict[str, int] = Field(default_factory=dict)

    @field_validator(*_NUMBERS, mode="before")
    @classmethod
    def _no_truth_value(cls, given: Any) -> Any:
        if isinstance(given, bool):  # which Python takes for 0 or 1
            raise PydanticCustomError("number", "input should be a whole number")
        return given

    @field_validator("offload", mode="before")
    @classmethod
    def _in_order(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = () if given == "none" else given.split("+")
        if given is None or not isinstance(given, Collection) or not all(isinstance(kind, str) for kind in given):
            return given
        unknown = [kind for kind in given if kind not in OFFLOADS]
        if unknown:
            names = ", ".join(repr(name) for name in OFFLOADS)
            what = f"input should be of {names}, joined by +, or 'none'"
            raise PydanticCustomError("offload", "{what}", {"what": what, "values": OFFLOADS})
        wanted = {*given, "optimizer"} if {"parameters", "disk"} & {*given} else {*given}
        return tuple(kind for kind in OFFLOADS if kind in wanted)

    @field_validator("schedule")
    @classmethod
    def _is_schedule(cls, given: str | ScheduleTable | None) -> str | ScheduleTable | None:
        if isinstance(given, str) and given not in SCHEDULES and not given.endswith(SUFFIX):
            names = ", ".join(repr(name) for name in SCHEDULES)
            what = f"input should be {names}, or a file that ends in {SUFFIX}"
            raise PydanticCustomError("schedule", "{what}", {"what": what, "values": tuple(SCHEDULES)})
        return given

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConstraintError(explain_validation_error(error, [*Constraints.model_fields])) from error

    @property
    def planned_only(self) -> tuple[str, ...]:
        """What of it this version plans but does not execute, as ``name=value``."""
        given = ((name, getattr(self, name), values) for name, values in _EXECUTED.items())
        return tuple(f"{name}={value}" for name, value, values in given if value not in values)

    @property
    def leaves_schedule(self) -> bool:
        """Whether the schedule is left open, and not all of them are searched: some are tried for the best meshes."""
        return self.schedule is None and self.virtual_stages is None and not self.ahead

    @property
    def group_size(self) -> int | None:
        """The samples of the groups within which samples meet; ``None``: all of a batch do."""
        return self.microbatch_size if self.couple == "microbatch" else None

    @property
    def given(self) -> dict[str, Any]:
        """What is fixed, by name: all that is set, but for what is set to be left free."""
        return {name: value for name, value in self.model_dump(exclude_unset=True).items() if value is not None}

    @property
    def meaning(self) -> Constraints:
        """What of it says what is computed, rather than how."""
        if self.couple == "batch":
            return Constraints()
        return Constraints(couple=self.couple, microbatch_size=self.microbatch_size)

    @property
    def pinned(self) -> dict[str, int]:
        """The mesh axes that are fixed and whose sizes multiply: all but ``ep``, which is folded over the others."""
        return {axis: value for axis in AXES if axis != "ep" and (value := getattr(self, axis)) is not None}

    def fixes_mesh(self, world_size: int) -> bool:
        """Whether the fixed axes leave the search no choice of parallel degrees on ``world_size`` devices, except how
        the remaining ranks are split between ``dp`` and ``cp``. Host offload is then used only where it is asked
        for. One device has no degrees to fix."""
        pinned = self.pinned
        if math.prod(pinned.values()) == world_size or {"pp", "tp"} <= pinned.keys() or len(pinned) >= _DECISIVE:
            return world_size > 1
        return False

    def check_world(self, world_size: int) -> None:
        """Raise :class:`ConstraintError` unless the pinned axes fit ``world_size`` ranks, or with a ``cp`` that is free
        and that a model may have no sequence for."""
        pinned = self.pinned
        product = math.prod(pinned.values())
        shown = " x ".join(f"{axis}={value}" for axis, value in pinned.items())
        if all(axis in pinned for axis in ("pp", "dp", "tp")):
            if product != world_size and (self.cp is not None or world_size % product):
                raise ConstraintError(self.too_few(world_size))
        elif world_size % product:
            raise ConstraintError(
                f"{shown} makes {product}, which does not divide the {world_size} devices; "
                f"expected a divisor of {world_size}"
            )

    def too_few(self, world_size: int) -> str:
        """What to say where the pinned axes make other than ``world_size`` ranks, and none can make up for it."""
        shown = " x ".join(f"{axis}={value}" for axis, value in self.pinned.items())
        made = math.prod(self.pinned.values())
        return f"{shown} makes {made} ranks; expected {world_size}, one per device: change an axis or free one"

    def check_batch(self, global_batch: int) -> None:
        """Raise :class:`ConstraintError` unless ``global_batch`` samples split as pinned: evenly where that has to be,
        else into microbatches of which there is one for every rank of ``dp``."""
        self._check_shares(global_batch)
        dp, size = self.dp or 1, self.microbatch_size or 1
        if global_batch % (dp * size) == 0:
            return
        given = [f"{n}={v}" for n, v in (("dp", self.dp), ("microbatch_size", self.microbatch_size)) if v]
        what = " x ".join(given) + (f" = {dp * size}" if len(given) > 1 else "")
        if global_batch % size:
            raise ConstraintError(
                f"the global batch of {global_batch} does not split by {what}; expected a divisor of {global_batch}"
            )
        if global_batch // size < dp:
            raise ConstraintError(
                f"the global batch of {global_batch} does not split by {what}: fewer microbatches than ranks; expected "
                f"at most {global_batch}"
            )

    def _check_shares(self, global_batch: int) -> None:
        shares = self.data_shares
        if shares is None:
            return
        size = global_batch // sum(shares) if shares and global_batch % sum(shares) == 0 else None
        if size is None or self.dp not in (None, len(shares)) or self.microbatch_size not in (None, size):
            raise ConstraintError(
                f"data_shares={shares} is {sum(shares)} microbatches on {len(shares)} ranks of dp; expected as many as "
                f"the global batch of {global_batch} has, for as many ranks as dp has"
            )

    def check_tensor_axis(self, dims: Iterable[int]) -> None:
        """Raise :class:`ConstraintError` if ``tp`` divides none of ``dims``, the sizes of the weights' dims."""
        sizes = sorted(set(dims))
        if self.tp is not None and self.tp > 1 and not any(size % self.tp == 0 for size in sizes):
            shown = ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
            raise ConstraintError(
                f"tp={self.tp} divides no dimension of any weight (sizes {shown or 'none'}); expected a divisor of one"
            )

    def check_experts(self, experts: int) -> None:
        """Raise :class:`ConstraintError` unless ``ep`` ranks can share ``experts`` evenly (0: there are none)."""
        asked = next((name for name in ("ep", "etp") if (getattr(self, name) or 1) > 1), None)
        if asked is not None and not experts:
            raise ConstraintError(
                f"{asked}={getattr(self, asked)}, but no experts were found in the model's graph; expected {asked}=1, "
                "or experts written in a form that docs/experts.md lists (other loops that pick each expert's rows are "
                "sharded over tp alone)"
            )
        if experts % (self.ep or 1):
            raise ConstraintError(
                f"ep={self.ep} does not divide the model's {experts} experts; expected a divisor of {experts}"
            )

    def check_coupling(self) -> None:
        """Raise :class:`ConstraintError` where samples are to meet within microbatches of no given size."""
        if self.couple == "microbatch" and self.microbatch_size is None:
            raise ConstraintError(
                "couple='microbatch' without microbatch_size: the step is the mean over groups of as many samples, the "
                "same on any mesh, so it is not for the search to choose; expected microbatch_size=N, a divisor of the "
                "global batch"
            )

    def check_groups(self, global_batch: int) -> None:
        """Raise :class:`ConstraintError` unless ``global_batch`` is a whole number of groups that samples meet in."""
        size = self.group_size
        if size is not None and global_batch % size:
            nearest = min(list_divisors(global_batch), key=lambda d: abs(math.log2(d / size)))
            raise ConstraintError(
                f"the global batch of {global_batch} is no whole number of groups of microbatch_size={size}, within "
                f"which samples meet (couple='microbatch'); expected a divisor of {global_batch}, as {nearest} is"
            )

    def check_offload(self) -> None:
        """Raise :class:`ConstraintError` where parameters are to be in host memory, and whole on the device."""
        if self.offload and "parameters" in self.offload and self.zero in (1, 2):
            raise ConstraintError(
                f"offload of parameters with zero={self.zero}, which keeps them whole; expected zero=0 or 3"
            )

    def check_reduction(self, num_nodes: int, train: bool) -> None:
        """Raise :class:`ConstraintError` for a way of reducing gradients that says nothing here, or cannot be."""
        given = {"hierarchical": self.hierarchical or None, "grad_compression": self.grad_compression}
        asked = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        if asked and not train:
            raise ConstraintError(f"{asked} without training, which has no gradients; leave it out")
        if self.hierarchical and num_nodes == 1:
            raise ConstraintError(
                "hierarchical=True on one node: there is nothing to reduce between nodes; leave it out"
            )
        if self.hierarchical and self.zero:
            raise ConstraintError(
                f"hierarchical=True with zero={self.zero}, under which gradients are scattered to their shards; "
                "expected zero=0, or dp_shard=N instead, the ranks of dp in a node: shards are added up between nodes"
            )
        if self.zero is not None and self.dp_shard is None and not self.sends_compressed(self.zero, 0):
            raise ConstraintError(
                f"grad_compression={self.grad_compression} with zero={self.zero}: {_WHY_NOT[self.zero]}; expected "
                "zero=0 or 1, or dp_shard=N, so that what is sent between N and N is compressed"
            )

    def sends_compressed(self, zero: int, dp_shard: int) -> bool:
        """Whether gradients can be sent as ``grad_compression`` says; under ``zero``, shared by all ranks of ``dp`` or
        ``dp_shard`` of them."""
        if self.grad_compression is None or zero < 2 or dp_shard:
            return True
        return zero == 2 and self.grad_compression == "bf16"

    def check_idle(self) -> None:
        """Raise :class:`ConstraintError` for what would say nothing beside an axis that is fixed to one rank."""
        name = self.schedule
        if self.pp == 1 and isinstance(name, str) and name in SCHEDULES and name not in OF_ONE_STAGE:
            raise ConstraintError(
                f"schedule={name} with pp=1, which has no pipeline; expected pp of 2 or more, or no schedule"
            )
        chunks = SCHEDULES[name].chunks if isinstance(name, str) and name in SCHEDULES else None
        if chunks is not None and self.virtual_stages not in (None, chunks):
            raise ConstraintError(
                f"schedule={name} with virtual_stages={self.virtual_stages}: under it each rank has {chunks}; expected "
                f"virtual_stages={chunks}, or none, or a schedule of any number, like interleaved"
            )
        for axis, way, shared in (("cp", "context", "sequence is"), ("ep", "dispatch", "experts are")):
            if getattr(self, axis) == 1 and (given := getattr(self, way)) is not None:
                raise ConstraintError(
                    f"{way}={given} with {axis}=1, over which no {shared} shared; expected {axis} of 2 or more, or no "
                    f"{way}"
                )
        if self.sends == "parts" and self.sequence_parallel is not False:
            raise ConstraintError(
                "sends=parts without sequence_parallel=False: what is sharded over tp goes in parts anyway; expected "
                "both, or no sends"
            )

    def check_sharding(self) -> None:
        """Raise :class:`ConstraintError` where ``dp_shard`` ranks are to share states, and cannot or are not to."""
        if self.dp_shard is None:
            return
        if self.zero == 0:
            raise ConstraintError(
                f"dp_shard={self.dp_shard} with zero=0: nothing would be shared; expected zero=1, 2 or 3, or none"
            )
        if self.dp is not None and self.dp % self.dp_shard:
            raise ConstraintError(
                f"dp_shard={self.dp_shard} does not divide dp={self.dp}; expected a divisor of {self.dp}"
            )

    def check(self, world_size: int, global_batch: int | None = None, dims: Iterable[int] | None = None) -> None:
        """All of the checks above that the arguments allow."""
        self.check_idle()
        self.check_world(world_size)
        if global_batch is not None:
            self.check_batch(global_batch)
        if dims is not None:
            self.check_tensor_axis(dims)


def pinned_calls(stage_of: Mapping[str, int], paths: Sequence[str], num_stages: int) -> dict[int, int]:
    """Call index -> stage, for calls at module ``paths`` that lie under a prefix of ``stage_of`` or contain it.

    The longest prefix wins. Raises :class:`ConstraintError` for a prefix that names no module, a stage that is not
    there, or stages that run against the order of the calls.
    """
    pinned: dict[int, int] = {}
    for prefix, stage in sorted(stage_of.items(), key=lambda item: len(item[0])):
        if not -num_stages <= stage < num_stages:
            raise ConstraintError(
                f"stage_of[{prefix!r}] = {stage} with {num_stages} stages; expected {-num_stages} to {num_stages - 1}"
            )
        inside = [i for i, path in enumerate(paths) if _is_under_prefix(path, prefix)]
        inside = inside or [i for i, path in enumerate(paths) if path and _is_under_prefix(prefix, path)]
        if not inside:
            near = get_close_matches(prefix, sorted(set(paths)), n=3, cutoff=0.3) or sorted(set(paths))[:3]
            raise ConstraintError(f"stage_of[{prefix!r}] names no module of the model; near it: {', '.join(near)}")
        pinned |= dict.fromkeys(inside, stage % num_stages)
    ordered = sorted(pinned)
    for a, b in pairwise(ordered):
        if pinned[a] > pinned[b]:
            raise ConstraintError(
                f"stage_of puts {paths[a]!r} on stage {pinned[a]} and {paths[b]!r}, which runs after it, on stage "
                f"{pinned[b]}; expected stages that do not fall in the order of execution"
            )
    return pinned


def _is_under_prefix(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + ".")
