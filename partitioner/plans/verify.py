"""``verify``: run the programs of all ranks on this machine, in float64, against the unmodified model.

If samples interact only within a microbatch, the reference is the model run group by group, and the mean of the
results. A group has as many consecutive samples as a microbatch, so the groups do not depend on the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partitioner.passes.capture.wrappers import unwrap_model
from partitioner.passes.errors import InputsError
from partitioner.passes.ir.layouts import Layout
from partitioner.passes.ir.model import leaf_paths
from partitioner.plans.reference import Reference, run_reference
from partitioner.runtime.launch.local import run_threads
from partitioner.runtime.launch.process_pool import Run
from partitioner.runtime.program.precision import remove_compression
from partitioner.runtime.program.program import Program
from partitioner.runtime.state.weights import get_number_attribute
from partitioner.solve.evaluate.prepared_model import modes_of_a_new_process
from partitioner.validate import type_of

Inputs = tuple[Any, ...] | Mapping[str, Any]


def run_groups(
    model: nn.Module,
    inputs: Inputs,
    loss: Callable[[Any], Tensor] | None,
    program: Program,
    size: int,
    counters: Collection[str] = (),
    precision: str | None = None,
) -> Reference:
    """Run ``model`` in float64 on consecutive groups of ``size`` samples of ``inputs``, one whole global batch of
    ``program``, and return the combined result.

    The loss, the gradients, and outputs that are means over samples are averaged over the groups; outputs with a batch
    dim are concatenated. Each group starts with the buffers that the previous one left. ``loss``: computes the loss
    from the model's result; ``None`` if the result contains it. ``counters``: names of attributes that are Python
    numbers; they are passed from group to group like buffers. ``precision``: name of the dtype that the plan computes
    in, such as ``bf16``; ``None``: the dtype of the model's parameters. The model computes in float64 in any case, but
    ``torch.finfo`` gives the limits of this dtype, and numbers in the model's code are rounded to it, as in the plan.
    """
    dims = {i.path: i.batch_dim for i in program.inputs}
    batch = next(i.shape[i.batch_dim] for i in program.inputs if i.batch_dim is not None)
    train = program.objective == "train"
    outputs: dict[str, list[Any]] = {}
    losses: list[Tensor] = []
    grads: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    changed, parameters = frozenset[str](), frozenset[str]()
    for group in range(batch // size):
        found = run_reference(
            model,
            _slice_input_samples(inputs, dims, group * size, size),
            loss,
            train=train,
            group=group,
            buffers=buffers,
            counters=counters,
            precision=precision,
        )
        buffers, changed, parameters = found.buffers, changed | found.changed, found.parameters
        losses += [] if found.loss is None else [found.loss]
        for path, output in found.outputs.items():
            outputs.setdefault(path, []).append(output)
        for name, gradient in found.grads.items():  # summed at once, so that one set of gradients is in memory
            share = gradient * (size / batch)
            grads[name] = grads[name] + share if group else share
    ways = {o.path: o.batch for o in program.outputs}
    wholes = {path: _join_group_results(parts, ways.get(path, "R")) for path, parts in outputs.items()}
    return Reference(wholes, _average_parts(losses) if losses else None, grads, buffers, changed, parameters)


def _slice_input_samples(inputs: Inputs, dims: Mapping[str, int | None], start: int, count: int) -> Any:
    """Return ``inputs`` with only the ``count`` samples from index ``start`` on. ``dims``: input path -> its dim of
    samples, or ``None`` for an input without one, which is not cut.
    """
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    leaves, tree = pytree.tree_flatten(inputs)
    paths = [path for path, _ in leaf_paths(inputs)]
    cut = [_slice_leaf_samples(leaf, dims.get(path), start, count) for path, leaf in zip(paths, leaves, strict=True)]
    return pytree.tree_unflatten(cut, tree)


def _slice_leaf_samples(leaf: Any, dim: int | None, start: int, count: int) -> Any:
    return leaf if dim is None or not isinstance(leaf, Tensor) else leaf.narrow(dim, start, count)


def _join_group_results(parts: Sequence[Any], way: str) -> Any:
    """Return the value of one model output for the whole batch. ``parts``: its values for several groups of samples, in
    order. ``way``: how the output depends on the samples. ``R``: all values are equal, and the first is returned.
    ``S0``, ``S1``...: the values are concatenated along this dim. Anything else: the values are averaged. If the values
    are not tensors, the first is returned."""
    if way == "R" or not all(isinstance(part, Tensor) for part in parts):
        return parts[0]
    layout = Layout.parse(way)
    return torch.cat([*parts], layout.dim) if layout.is_shard else _average_parts(parts)


def _average_parts(parts: Sequence[Any]) -> Tensor:
    return torch.stack([*parts]).mean(0)


TOLERANCE = 1e-9  # relative, in float64: nothing but the order of sums may differ

_ROUNDING_SCALE = 1e-3


@dataclass(frozen=True)
class Verification:
    """How far the results of a plan's programs (training, and further ones such as evaluation) are from those of the
    model.

    Attributes:
        ok: whether no error exceeds the tolerance.
        max_error: largest relative error.
        errors: relative error by name: ``loss``, ``output ...`` and ``grad ...``, and ``buffer ...`` and ``parameter
            ...`` for buffers and parameters that forward changes.
        tolerance: largest relative error that counts as equal.
    """

    ok: bool
    max_error: float
    errors: dict[str, float]
    tolerance: float

    def __str__(self) -> str:
        worst = max(self.errors, key=self.errors.__getitem__, default="nothing")
        verdict = "equal to the model" if self.ok else "NOT equal to the model"
        return f"{verdict}: largest relative error {self.max_error:.1e} ({worst}), tolerance {self.tolerance:.0e}"


@modes_of_a_new_process()
def verify(
    plan: Any,
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Run the programs of all ranks of ``plan`` on this machine in float64, and compare them with ``model``: outputs,
    loss, every gradient, and the values of buffers and parameters after the forward.

    ``inputs``: one global batch. ``loss``: the function that ``partition`` was given, which computes the loss from the
    model's result; ``None`` if the result contains the loss. ``tolerance``: largest relative error that counts as
    equal. If samples interact only within a microbatch (``couple="microbatch"``), the model runs on one group of
    samples after the other, and the results are averaged. Gradients are not compressed here, even if the plan
    compresses them.

    Raise :class:`partitioner.WeightsError` or :class:`partitioner.BatchError` if the model or the inputs are not the
    plan's, and :class:`InputsError` if the plan has a loss and the model gives none.
    """
    program: Program = remove_compression(plan.program)
    train = program.objective == "train"
    if not isinstance(model, nn.Module):
        raise InputsError(
            f"verify compares the plan with the model itself; expected an nn.Module, got {type(model).__name__}"
        )
    model, _ = unwrap_model(model)
    run = run_threads(program, model, inputs, precision="fp64")
    counters, size = counters_of(program, model), plan.constraints.group_size
    precision = type_of(plan.precision)
    if size is None:
        reference = run_reference(model, inputs, loss, train=train, counters=counters, precision=precision)
    else:
        reference = run_groups(model, inputs, loss, program, size, counters, precision)
    if train and program.loss is not None and reference.loss is None:
        raise InputsError(
            "the plan was made with a loss, and the model's output has none; expected the same loss= in verify() as in "
            "partition()"
        )
    if train and reference.loss is not None and reference.loss.isnan():
        raise InputsError(
            "the unmodified model's loss is not a number (nan) on these inputs, so that results cannot be compared; "
            "expected a finite loss: check the weights and inputs for nan, or pass other inputs"
        )
    errors = compare(run, reference, program)
    largest = max(errors.values(), default=0.0)
    return Verification(largest <= tolerance, largest, errors, tolerance)


def counters_of(program: Program, model: nn.Module) -> list[str]:
    """Return the names of the Python numbers in the modules of ``model`` that forward changes, such as a step counter.
    ``program`` has them as buffers, and a verification compares them like buffers."""
    held = dict(model.named_buffers(remove_duplicate=False))
    changed = [n for n, s in program.states.items() if s.update is not None and n not in held]
    return [name for name in changed if get_number_attribute(model, name) is not None]


def compare(run: Run, reference: Reference, program: Program) -> dict[str, float]:
    """Return the relative errors of everything that the model computes, by name: ``loss``, ``output <path>``, ``grad
    <name>``, ``buffer <name>`` or ``parameter <name>``.

    The difference of a gradient is divided by its largest element, or by 1/1000 of the largest element of all gradients
    if that is greater. Gradients that are zero except for rounding then count as equal. The differences of buffers and
    parameters are divided in this way, too.

    ``run``: results of one of the plan's programs, such as a training step. ``reference``: results of the model.
    ``program``: the program that ran, which says what each output and buffer is.
    """
    errors: dict[str, float] = {}
    if program.loss is not None and reference.loss is not None:
        errors["loss"] = relative_error(run.loss, reference.loss)
    for path, mine in run.leaves.items():
        if isinstance(mine, Tensor):
            theirs = reference.outputs.get(path)
            errors[f"output {path}"] = relative_error(mine, theirs) if isinstance(theirs, Tensor) else math.inf
    largest = max((float(g.abs().max()) for g in reference.grads.values() if g.numel()), default=0.0)
    for name, grad in reference.grads.items():
        errors[f"grad {name}"] = relative_error(run.grads.get(name), grad, _ROUNDING_SCALE * largest)
    buffers = {n: b for n, b in reference.buffers.items() if n in reference.changed or n in run.buffers}
    sums = [b for b in buffers.values() if b.is_floating_point() and b.numel()]
    largest = max((float(b.abs().max()) for b in sums), default=0.0)
    for name, buffer in buffers.items():
        least = _ROUNDING_SCALE * largest if buffer.is_floating_point() else 0.0
        kind = "parameter" if name in reference.parameters else "buffer"
        errors[f"{kind} {name}"] = relative_error(run.buffers.get(name), buffer, least)
    return errors


def relative_error(mine: Tensor | None, theirs: Tensor, least_scale: float = 0.0) -> float:
    """Return the largest absolute difference between the elements of the tensors ``mine`` and ``theirs``, divided by
    the largest absolute element of ``theirs`` or by ``least_scale``, whichever is greater. Infinite if ``mine`` is
    ``None`` or has another shape.
    """
    if mine is None or mine.shape != theirs.shape:
        return math.inf
    if theirs.numel() == 0:
        return 0.0
    mine, theirs = _convert_to_float64(mine), _convert_to_float64(theirs)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())  # also for infinities
    difference = float(torch.where(same, torch.zeros_like(mine), (mine - theirs).abs()).max())
    finite = torch.where(theirs.isfinite(), theirs, torch.zeros_like(theirs))
    scale = max(float(finite.abs().max()), least_scale)
    error = difference / scale if scale > 0.0 else difference
    return math.inf if math.isnan(error) else error


def _convert_to_float64(x: Tensor) -> Tensor:
    """Return the tensor ``x`` on the CPU in float64; a complex tensor as real and imaginary parts in a further dim."""
    x = x.detach().cpu()
    return torch.view_as_real(x.to(torch.complex128).resolve_conj()) if x.is_complex() else x.double()
