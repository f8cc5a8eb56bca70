"""Run the programs of all ranks on this machine, in float64, against the unmodified model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.reference import Reference, run_reference
from passes.retype import retype
from passes.serialize import block_from_data, block_to_data, dtype_of
from runtime.local import Run, run_threads
from runtime.program import BlockGraph, Program, weights_fingerprint

TOLERANCE = 1e-9  # relative, in float64: nothing but the order of sums may differ


@dataclass(frozen=True)
class Verification:
    """How far the programs are from the model. ``errors``: relative, by name (``loss``, ``output ...``, ``grad ...``)."""

    ok: bool
    max_error: float
    errors: dict[str, float]
    tolerance: float

    def __str__(self) -> str:
        worst = max(self.errors, key=self.errors.__getitem__, default="nothing")
        verdict = "equal to the model" if self.ok else "NOT equal to the model"
        return f"{verdict}: largest relative error {self.max_error:.1e} ({worst}), tolerance {self.tolerance:.0e}"


def verify(
    plan: Any,
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Compare outputs, loss and every gradient. ``loss``: what was given to ``partition``.

    Raises :class:`runtime.WeightsError` or :class:`runtime.BatchError` where ``model`` or ``inputs`` are not the plan's.
    """
    program: Program = plan.program
    train = program.objective == "train"
    run = run_threads(double_program(program), model, inputs)
    reference = run_reference(model, inputs, loss, train=train)
    errors = compare(run, reference, program)
    largest = max(errors.values(), default=0.0)
    return Verification(largest <= tolerance, largest, errors, tolerance)


def compare(run: Run, reference: Reference, program: Program) -> dict[str, float]:
    """The relative error of everything that the model gives, by name."""
    errors: dict[str, float] = {}
    if program.loss is not None and reference.loss is not None:
        errors["loss"] = relative_error(run.loss, reference.loss)
    for data, mine, theirs in zip(program.outputs, run.leaves, reference.outputs, strict=True):
        if isinstance(theirs, Tensor) and isinstance(mine, Tensor):
            errors[f"output {data.path}"] = relative_error(mine, theirs)
    errors |= {f"grad {name}": relative_error(run.grads.get(name), grad) for name, grad in reference.grads.items()}
    return errors


def relative_error(mine: Tensor | None, theirs: Tensor) -> float:
    """The largest difference over the largest element; infinite where shapes differ or something is missing."""
    if mine is None or mine.shape != theirs.shape:
        return float("inf")
    if theirs.numel() == 0:
        return 0.0
    mine, theirs = mine.detach().double().cpu(), theirs.detach().double().cpu()
    same = mine == theirs  # infinities among them
    difference = torch.where(same, torch.zeros_like(mine), (mine - theirs).abs()).max()
    finite = torch.where(theirs.isfinite(), theirs, torch.zeros_like(theirs))
    scale = finite.abs().max().clamp_min(1e-30)
    value = float(difference / scale) if float(scale) > 1e-30 else float(difference)
    return value if value == value else float("inf")


def double_program(program: Program) -> Program:
    """``program`` with every floating type float64, also where the model asks for a narrower one."""
    blocks = {}
    for name, data in program.blocks.items():
        block = block_from_data(name, data.nodes, data.states, data.inputs)
        retype(block.graph, torch.float64)
        blocks[name] = BlockGraph(nodes=block_to_data(block), states=data.states, inputs=data.inputs)
    states = {k: s.model_copy(update={"dtype": _widened(s.dtype)}) for k, s in program.states.items()}
    return program.model_copy(
        update={
            "blocks": blocks,
            "states": states,
            "values": {k: v.model_copy(update={"dtype": _widened(v.dtype)}) for k, v in program.values.items()},
            "inputs": tuple(i.model_copy(update={"dtype": _widened(i.dtype)}) for i in program.inputs),
            "fingerprint": weights_fingerprint(states),
        }
    )


def _widened(dtype: str) -> str:
    return "float64" if dtype_of(dtype).is_floating_point else dtype
