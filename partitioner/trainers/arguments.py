"""Which options of transformers' ``TrainingArguments`` and ``Trainer`` a plan honours, and which it refuses.

Every field is in exactly one of three tables: :data:`HONOURED` (it has the same effect as in ``Trainer``),
:data:`IRRELEVANT` (it changes nothing that a plan computes; the reason is given), and :data:`REFUSED` (any value that
is not listed raises :class:`TrainerError`). A field in none of these tables is from a version of transformers that this
module does not know; it is refused unless it has its default.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from partitioner.passes.errors import PartitionError


class TrainerError(PartitionError):
    """Error of :class:`PartitionedTrainer`: an option of the trainer cannot have its effect if a plan divides the model
    over ranks, or the trainer is used in a way that a plan does not allow.
    """


HONOURED = frozenset(
    """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    gradient_accumulation_steps max_grad_norm bf16 tf32 torch_compile torch_compile_backend use_cache
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
    prediction_loss_only eval_on_start eval_do_concat_batches eval_accumulation_steps include_for_metrics
    batch_eval_metrics save_only_model save_strategy save_steps save_total_limit push_to_hub hub_token hub_private_repo
    hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
    length_column_name ddp_backend ddp_timeout skip_memory_metrics
    """.split()
)

_SCRIPT = "the script reads it, the trainer does not"
_WRAPPER = "it tunes DistributedDataParallel, which is not used; a plan has its own buckets and reductions"
_RECOMPUTE = "the planner decides what is recomputed; pass constraints=Constraints(recompute=...) to fix it"

IRRELEVANT: dict[str, str] = {
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing_kwargs": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "ddp_find_unused_parameters": _WRAPPER,
    "ddp_bucket_cap_mb": _WRAPPER,
    "ddp_broadcast_buffers": _WRAPPER,
    "ddp_static_graph": _WRAPPER,
    "eval_use_gather_object": "predictions of all ranks are joined by the plan's layout",
    "fsdp_config": "it is read with fsdp, which is refused",
    "liger_kernel_config": "it is read with use_liger_kernel, which is refused",
    "do_train": _SCRIPT,
    "do_eval": _SCRIPT,
    "do_predict": _SCRIPT,
    "resume_from_checkpoint": _SCRIPT,
    "local_rank": "the launcher's environment says it",
}

_NO_VALUE: tuple[Any, ...] = (None, False, "", (), [], {})
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")

# Field -> the values that are accepted, and what to do instead of another value.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "optim": (
        _ELEMENTWISE,
        "these update each element by itself, which is exact on a rank's part of a parameter; pass another optimizer "
        "of this kind as optimizer_cls_and_kwargs",
    ),
    "optim_target_modules": (_NO_VALUE, "leave it out: it belongs to optimizers that need whole matrices"),
    "average_tokens_across_devices": ((True,), "leave it out: a plan's loss is the mean over the global batch"),
    "label_smoothing_factor": ((0, 0.0), "compute a smoothed loss in the model's forward"),
    "fp16": ((False,), "use bf16=True, or load the model in float16 and train it with partitioner.Engine"),
    "bf16_full_eval": ((False,), "leave it out: evaluation has the precision of the plan"),
    "fp16_full_eval": ((False,), "leave it out: evaluation has the precision of the plan"),
    "torch_compile_mode": (_NO_VALUE, "leave it out: parts of the plan are compiled in the default mode"),
    "use_liger_kernel": ((False,), "leave it out: a plan computes the loss over the vocabulary in blocks by itself"),
    "neftune_noise_alpha": (_NO_VALUE, "leave it out, or add noise to the embeddings in the model's forward"),
    "torch_empty_cache_steps": (_NO_VALUE, "leave it out"),
    "auto_find_batch_size": ((False,), "leave it out: the planner proves that the batch fits before anything starts"),
    "save_on_each_node": ((False,), "leave it out: all ranks see one file system, and write a checkpoint together"),
    "enable_jit_checkpoint": ((False,), "leave it out: ranks could save after different steps"),
    "train_sampling_strategy": (
        ("random", "sequential", "group_by_length"),
        "batches that are balanced over ranks belong to data parallelism; the plan balances its own work",
    ),
    "parallelism_config": (_NO_VALUE, "pass constraints=Constraints(tp=..., dp=..., cp=..., pp=...) instead"),
    "fsdp": (_NO_VALUE, "leave it out; pass constraints=Constraints(zero=3) to fix sharded parameters"),
    "deepspeed": (_NO_VALUE, "leave it out; partitioner.read_layout reads a DeepSpeed configuration"),
    "debug": (_NO_VALUE, "leave it out; see partitioner.debug"),
}

_OF_DATA_LOADERS = {"split_batches": False, "dispatch_batches": None, "gradient_accumulation_kwargs": None}


def check_arguments(arguments: Any) -> None:
    """Raise :class:`TrainerError` if a field of ``arguments`` has a value that a plan, which divides the model over
    ranks, cannot carry out, such as ``fp16=True``. The message lists all such fields, each with the allowed values and
    what to do instead. ``arguments``: an instance of transformers' ``TrainingArguments``.
    """
    faults = []
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if field.name in REFUSED:
            accepted, advice = REFUSED[field.name]
            if not any(_is_same(value, each) for each in accepted):
                expected = "no value" if accepted is _NO_VALUE else " or ".join(map(repr, accepted))
                faults.append(f"{field.name}={_show(value)}: expected {expected}; {advice}")
        elif field.name == "accelerator_config":
            faults += _list_loader_faults(value)
        elif field.name not in HONOURED and field.name not in IRRELEVANT and not _has_default(field, value):
            faults.append(f"{field.name}={_show(value)}: this option is not known here; leave it out")
    if faults:
        raise TrainerError("TrainingArguments that a plan does not support:\n  " + "\n  ".join(faults))


def check_constructor(options: dict[str, Any]) -> None:
    """Raise :class:`TrainerError` if ``options``, arguments of ``transformers.Trainer`` by name, has an argument that
    is impossible if a plan divides the model over ranks: an optimizer that already exists (``optimizers``),
    ``model_init`` or ``compute_loss_func``."""
    if any(each is not None for each in options.get("optimizers") or ()):
        raise TrainerError(
            "optimizers=(optimizer, schedule) contains an optimizer of whole parameters, but each rank has only "
            "shards: expected none; pass optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}), or override "
            "create_optimizer and use self.engine.parameters()"
        )
    for name, advice in (
        ("model_init", "pass model="),
        ("compute_loss_func", "compute the loss in the model's forward, which the plan is made of"),
    ):
        if options.get(name) is not None:
            raise TrainerError(f"{name} is not supported: expected None; {advice}")


def _list_loader_faults(config: Any) -> list[str]:
    """Return an error text for each field of ``config``, an instance of transformers' ``AcceleratorConfig``, whose
    value does not suit a trainer in which every rank reads the whole global batch. The list is empty if all fields are
    suitable.
    """
    found = [(name, getattr(config, name, value), value) for name, value in _OF_DATA_LOADERS.items()]
    return [
        f"accelerator_config.{name}={_show(value)}: expected {expected!r}; every rank reads the whole global batch"
        for name, value, expected in found
        if value != expected and not (name == "gradient_accumulation_kwargs" and value in ({}, {"num_steps": 1}))
    ]


def _is_same(value: Any, accepted: Any) -> bool:
    """Return whether ``value``, the value of an option, equals ``accepted``, a value that is allowed for it. Both must
    have the same type, so that 0 is not ``False``. For a member of an enumeration, its ``value`` is compared.
    """
    value = getattr(value, "value", value)
    return type(value) is type(accepted) and bool(value == accepted)


def _has_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return bool(value == field.default)


def _show(value: Any) -> str:
    return repr(getattr(value, "value", value))
