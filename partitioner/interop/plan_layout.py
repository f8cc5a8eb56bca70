"""Convert a plan to a training layout, and export it as the configuration of another framework."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any, get_args

from partitioner.interop.formats import write_layout
from partitioner.interop.layout import LayoutError, Precision, TrainingLayout, UnusedOption
from partitioner.plan import Plan
from partitioner.simulate.weight_precision import common_precision

_LAYER = re.compile(r"^(.*?)\.?(\d+)(?:\.|$)")
_FORMAT_OFFLOADS = ("optimizer", "activations", "parameters", "disk")


def describe_plan_layout(plan: Plan) -> tuple[TrainingLayout, tuple[UnusedOption, ...]]:
    """Return the training layout of ``plan`` (mesh, batch, schedule, state sharding), and the properties of the plan
    that such a layout cannot express.

    Raise :class:`LayoutError` if the plan is for inference.
    """
    if plan.objective != "train":
        raise LayoutError("the plan is for inference; expected a plan for training: configurations describe training")
    missing: list[UnusedOption] = []
    chosen, mesh = plan.chosen, plan.mesh
    dp, pp, tp, cp, ep = (mesh.get(axis, 1) for axis in ("dp", "pp", "tp", "cp", "ep"))
    recompute = _find_recompute(plan, missing)
    if plan.data_shares:
        missing.append(_lose("data_shares", plan.data_shares, "each data-parallel rank has equally many microbatches"))
    if plan.devices != tuple(sorted(plan.devices)):
        missing.append(_lose("devices", "", "ranks are placed on devices in order"))
    if plan.written is not None and tp > 1:
        missing.append(_lose("operators", "", "how single operators are sharded is chosen by the framework"))
    for name in ("grad_compression", "hierarchical", "overlap_steps", "overlap_tensor"):
        if getattr(plan.constraints, name):
            missing.append(_lose(name, getattr(plan.constraints, name), "is a property of this project's runtime"))
    context = Counter(way.algorithm for way in plan.context for _ in range(way.calls)).most_common(1)
    sharded = bool(chosen.zero)
    layout = TrainingLayout(
        framework="partitioner",
        pp=pp, dp=dp, cp=cp, tp=tp, ep=ep,
        etp=(chosen.etp or tp) if ep > 1 else None,
        dp_shard=(chosen.dp_shard or dp) if sharded else None,
        dp_replicate=dp // (chosen.dp_shard or dp) if sharded else None,
        devices=plan.world_size,
        microbatch_size=chosen.microbatch_size,
        microbatches=None if plan.data_shares else plan.num_microbatches,
        global_batch=plan.global_batch,
        schedule=plan.schedule if pp > 1 else None,
        virtual_stages=chosen.virtual_stages if pp > 1 and chosen.virtual_stages > 1 else None,
        stage_layers=_count_stage_layers(plan, missing) if pp > 1 else (),
        zero=chosen.zero,
        sequence_parallel=plan.constraints.sequence_parallel is not False if tp > 1 else None,
        context=context[0][0] if cp > 1 and context else None,
        recompute=recompute,
        offload=tuple(kind for kind in _FORMAT_OFFLOADS if kind in plan.offload),
        precision=_find_precision(plan, missing),
        optimizer=plan.optimizer,
        seq_length=plan.tokens_per_sample or None,
        profile=plan.profile,
    )  # fmt: skip
    return layout, tuple(missing)


def _lose(name: str, value: Any, reason: str) -> UnusedOption:
    return UnusedOption(option=name, value=str(value)[:60], reason=reason)


def _find_recompute(plan: Plan, missing: list[UnusedOption]) -> str:
    """Return what the backward of ``plan`` recomputes, as one word for all stages: ``none``, ``selective`` (results
    that are quick to compute), ``full``, or the word that the user fixed. If stages differ, a note on this is added to
    ``missing``, the list of properties of the plan that the layout cannot express."""
    given = plan.constraints.recompute
    if given is not None:
        return given
    stages = plan.estimate.stages
    whole = [stage.recomputed for stage in stages]
    if not any(whole):
        return "selective" if any(stage.selective for stage in stages) else "none"
    repeated = max(1, sum(stage.num_calls for stage in stages))
    if sum(whole) < repeated // 2 or any(stage.selective for stage in stages):
        text = ", ".join(f"{stage.recomputed} of {stage.num_calls}" for stage in stages[:8])
        missing.append(_lose("recompute", text, "a part of the layers is recomputed; all are written"))
    return "full"


def _count_stage_layers(plan: Plan, missing: list[UnusedOption]) -> tuple[int, ...]:
    """Return the number of layers in each pipeline stage of ``plan``; empty if it is not known, or if a layer is
    divided between stages. In these cases the reason is added to ``missing``, the list of properties of the plan that
    the layout cannot express."""
    if plan.written is None or plan.chosen.virtual_stages > 1:
        missing.append(_lose("stage_of", "", "the cuts between stages are those of the framework"))
        return ()
    of_stage = [{found.group(0) for call in stage.calls if (found := _LAYER.match(call.path)) and not call.prologue}
                for stage in plan.written.stages]  # fmt: skip
    names = Counter(_LAYER.sub(r"\1", name) for layers in of_stage for name in layers)
    if not names:
        missing.append(_lose("stage_of", "", "the model has no numbered layers"))
        return ()
    main = names.most_common(1)[0][0]
    if len(names) > 1:
        missing.append(_lose("stage_of", main, f"layers of {len(names)} lists; those of the longest are written"))
    sizes = [len({name.rstrip(".") for name in layers if _LAYER.sub(r"\1", name) == main}) for layers in of_stage]
    split = sum(sizes) > len({name.rstrip(".") for layers in of_stage for name in layers
                              if _LAYER.sub(r"\1", name) == main})  # fmt: skip
    if split:
        missing.append(_lose("stage_of", "", "a layer is divided between stages; the cuts are those of the framework"))
        return ()
    return tuple(sizes)


def _find_precision(plan: Plan, missing: list[UnusedOption]) -> Any:
    """Return the precision of matrix products: ``bf16``, ``fp16``, ``fp32``, ``fp8`` or ``nvfp4``. For any other
    precision of ``plan``, return ``fp32`` and add the precision to ``missing``, the list of properties that the layout
    cannot express."""
    if plan.precision in get_args(Precision):
        return plan.precision
    if plan.precision is None and plan.written is not None:
        found = common_precision(plan.written)
        if found in ("bf16", "fp16", "fp32"):
            return found
    missing.append(
        _lose(
            "precision",
            plan.precision or "that of the parameters",
            f"is not one of {', '.join(get_args(Precision))}",
        )
    )
    return "fp32"


def export_plan(plan: Plan, format: str, path: str | os.PathLike[str]) -> tuple[UnusedOption, ...]:
    """Write ``plan`` to the file ``path`` as a configuration of another framework. The file appears only when it is
    complete. Return the properties of the plan that the format cannot express. ``format``: such as ``megatron`` or
    ``deepspeed``.

    Raise :class:`LayoutError` for an unknown format, or a plan for inference.
    """
    layout, lost = describe_plan_layout(plan)
    return (*lost, *write_layout(layout, format, path))
