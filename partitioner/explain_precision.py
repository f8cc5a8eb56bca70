"""What to know of the precision that a plan is in, and of what is kept in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from partitioner.optimizers import OPTIMIZERS
from partitioner.outline_shared import common_precision
from partitioner.plan import Plan
from partitioner.topology import Topology
from partitioner.units import digits
from passes.dtypes import sum_type
from passes.products import is_product_name
from runtime.program import Program, StateData

if TYPE_CHECKING:
    from passes.blocks import FoldedModel

_OTHERS = {"bf16": "fp16", "fp16": "bf16", "fp32": "tf32"}
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_MUCH = 2.0  # times as fast: from here on it is told


def precision_notes(plan: Plan) -> list[str]:
    """For each kind of device that multiplies much faster in the other type of as many bits, that it does."""
    precision = plan.precision or (common_precision(plan.written) if plan.written is not None else "")
    other = _OTHERS.get(precision)
    if other is None:
        return []
    notes = []
    for kind in sorted({plan.topology.devices[device].kind for device in plan.devices}):
        device = plan.topology.types[kind]
        times = device.peak_of(other) / device.peak_of(precision)
        if times > _MUCH:
            loss = ", with losses scaled" if other == "fp16" else ""
            notes.append(
                f"{kind} multiplies {digits(times, 2)} times as fast in {other} as in {precision}: plan with "
                f'precision="{other}"{loss}, where the model can be trained or used in it'
            )
    return notes


def notes_on_precision(topology: Topology, precision: str, model: FoldedModel) -> tuple[str, ...]:
    """What of ``model`` is not computed in ``precision``, in which it is planned, and which of this process's settings
    are no part of the plan."""
    import torch  # a plan's report does without

    from partitioner.cost.eight_bits import notes_on_fp8
    from partitioner.requests import torch_device

    if precision == "fp8":
        return notes_on_fp8(model)
    setting = torch.get_float32_matmul_precision()
    if setting == "highest" or precision != "fp32" or torch_device(topology) != "cuda":
        return ()
    return (
        f"torch.set_float32_matmul_precision({setting!r}) is of this process and left out: "
        'partition(..., precision="tf32") plans for products in TF32, and runs them so',
    )


def types_text(plan: Plan) -> str:
    """The types of products, parameters and what is kept for them; empty where a plan has no program to say it."""
    program = plan.written
    if program is None:
        return ""
    return "; ".join(filter(None, (_product_types(program), *_kept_types(plan, program))))


def _product_types(program: Program) -> str:
    """``products in bf16``: the floating types of the results of products, the most frequent first."""
    found: Counter[str] = Counter()
    for node in (node for block in program.blocks.values() for node in block.nodes):
        _, _, name = str(node.get("target", "")).partition(".")
        value: Any = node.get("val") or ()  # of one tensor, its shape and type
        if node["op"] == "call_function" and is_product_name(name) and len(value) == 2 and isinstance(value[1], str):
            found["fp8" if "fp8" in name else _short(value[1])] += 1
    if program.tf32:
        found["tf32 on GPUs"] += found.pop("fp32", 0)
    return f"products in {' and '.join(name for name, _ in found.most_common())}" if found else ""


def _kept_types(plan: Plan, program: Program) -> Iterator[str]:
    parameters = [state for state in program.states.values() if state.kind == "parameter"]
    trained = [state for state in parameters if state.requires_grad and program.objective == "train"]
    if parameters:
        yield f"parameters in {_types_of(parameters)}"
    if not trained:
        return
    added_up = [_with_type_of_sums(state) for state in trained]
    yield f"gradients in {_types_of(trained if plan.constraints.short_gradients else added_up)}"
    optimizer = OPTIMIZERS[plan.optimizer]
    if optimizer.master and added_up != trained:
        yield "master copies of parameters in fp32"
    if optimizer.moment_bytes:
        yield f"states of {plan.optimizer} in {_types_of(added_up)}"


def _with_type_of_sums(state: StateData) -> StateData:
    """A parameter with the type in which its gradients are added up, and in which it is stepped."""
    return state.model_copy(update={"dtype": sum_type(state.dtype)})


def _types_of(states: Sequence[StateData]) -> str:
    """The types of ``states``, that of the most numbers first."""
    sizes: Counter[str] = Counter()
    for state in states:
        sizes[_short(state.dtype)] += math.prod(state.shape)
    return " and ".join(name for name, _ in sizes.most_common())


def _short(dtype: str) -> str:
    return _SHORT.get(dtype, dtype)
