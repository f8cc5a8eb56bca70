"""What becomes of a recipe: the plan's run beside the unmodified model in float64."""

from __future__ import annotations

import copy
import math
import random
import traceback
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import partitioner
from partitioner import LocalRanks, Plan, RankError, Topology, partition
from partitioner.passes.errors import PartitionError
from partitioner.plans.reference import find_loss, run_reference
from tests.helpers.grammar_batches import KEEPING, changed_batch
from tests.helpers.grammar_models import Batch, RandomModel, build_model, loss_of, make_batch
from tests.helpers.grammar_recipes import Op, Recipe

Kind = Literal[
    "equal", "refused", "noted", "skipped", "different", "untyped", "crashed", "unusable", "too lenient", "verify"
]
FAILURES = frozenset({"different", "untyped", "crashed", "unusable", "too lenient", "verify"})
TOLERANCE = 1e-8
DRAWING = frozenset({"dropout", "noise"})
OF_PYTHON = {"python_counter": "steps", "python_list": "seen", "python_random": "random", "python_time": "time"}


@dataclass(frozen=True)
class Outcome:
    """``kind``: ``equal``; ``refused`` with a typed error; ``noted``: different, and a note of the plan says why;
    ``skipped``: no model (its shapes do not fit, its loss is no number). Failures: ``different``; ``untyped``: an
    error of another type; ``crashed``: a rank failed inside; ``unusable``: a batch like the planned one was refused;
    ``too lenient``: a result where the model itself raises an error; ``verify``: it says something else."""

    kind: Kind
    text: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in FAILURES


@dataclass(frozen=True)
class Truth:
    """What the unmodified model gives."""

    loss: Tensor
    values: Tensor | None
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def names_in(ops: tuple[Op, ...]) -> set[str]:
    """The operators of a recipe."""
    return {op.name for op in ops}.union(*(names_in(op.body) for op in ops))


def is_judged_by_place(recipe: Recipe) -> bool:
    """Whether the reference is not the plain call: plans draw by place, and change buffers once where torch
    changes those of a checkpointed layer twice, both by design."""
    return bool((DRAWING | {"checkpointed"}) & names_in(recipe.ops))


def eager(recipe: Recipe, model: nn.Module, batch: Batch) -> Truth:
    """The loss, every gradient and every buffer of one step of the model itself, which is left as it is."""
    # Floats of another length are converted to the planned type by design; the judge converts them too.
    batch = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    if is_judged_by_place(recipe):
        made = run_reference(model, batch, loss_of(recipe))
        values = made.outputs.get("values" if recipe.output == "dict" else "")
        assert made.loss is not None
        return Truth(made.loss, None if recipe.output == "scalar" else values, made.grads, made.buffers)
    model = copy.deepcopy(model)
    output = model(**batch)
    make_loss = loss_of(recipe)
    total = find_loss(output) if make_loss is None else make_loss(output)
    assert total is not None
    if total.requires_grad:
        total.backward()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad
        for n, p in model.named_parameters(remove_duplicate=False)
        if p.requires_grad
    }
    values = output["values"] if recipe.output == "dict" else output if recipe.output == "values" else None
    return Truth(
        total.detach(),
        values if values is None else values.detach(),
        grads,
        dict(model.named_buffers(remove_duplicate=False)),
    )


def difference(run: Any, truth: Truth, model: nn.Module) -> str:
    """The first thing that is not the same; ``""``: all is."""
    pairs: dict[str, tuple[Any, Tensor, float]] = {"loss": (run.loss, truth.loss, 0.0)}
    if truth.values is not None:
        pairs["values"] = run.leaves.get("values", run.leaves.get("", run.leaves.get("0"))), truth.values, 0.0
    largest = max((float(g.nan_to_num().abs().max()) for g in truth.grads.values() if g.numel()), default=0.0)
    for name, grad in truth.grads.items():
        pairs[f"grad {name}"] = run.grads.get(name), grad, largest
    before = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    for name, buffer in truth.buffers.items():
        pairs[f"buffer {name}"] = run.buffers.get(name, before[name]), buffer, 0.0
    for name, (mine, theirs, scale) in pairs.items():
        if not isinstance(mine, Tensor):
            return f"{name} is missing"
        if mine.shape != theirs.shape:
            return f"{name} has shape {tuple(mine.shape)}, the model's {tuple(theirs.shape)}"
        largest_of_it = float(theirs.double().nan_to_num().abs().max()) if theirs.numel() else 0.0
        bound = TOLERANCE * max(scale, largest_of_it, 1e-3)
        if not torch.allclose(mine.double(), theirs.double(), rtol=TOLERANCE, atol=bound, equal_nan=True):
            apart = float((mine.double() - theirs.double()).abs().max())
            return f"{name} differs by {apart:.3g} of {float(theirs.double().abs().max()):.3g}"
    return ""


def seed_python(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def judge(recipe: Recipe, ranks: LocalRanks | None = None, *, verify: bool = False) -> Outcome:
    """Plan a recipe's model and run it, on ``ranks`` or in threads."""
    try:
        model, planned = build_model(recipe), make_batch(recipe)
        found = eager(recipe, model, planned)
    except Exception as error:
        return Outcome("skipped", f"{type(error).__name__}: {error}")
    sizes = [float(v.abs().max()) for v in (found.loss, *found.grads.values()) if v.numel()]
    if not all(math.isfinite(size) for size in sizes) or sizes[0] > 1e6:
        return Outcome("skipped", "no number")
    if max(sizes[1:], default=0.0) < 1e-9:  # of the gradients
        return Outcome("skipped", "nothing but rounding")
    seed_python(0)
    try:
        plan = partition(
            model,
            Topology.local(recipe.mesh.num_ranks),
            planned,
            loss=loss_of(recipe),
            constraints=recipe.mesh.constraints,
        )
    except PartitionError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return _untyped("partition", error)
    if recipe.change == "model called":  # buffers and Python's state move on
        model(**planned)
    return _compared(recipe, plan, model, changed_batch(recipe), ranks, verify)


def _compared(
    recipe: Recipe, plan: Plan, model: RandomModel, batch: Batch, ranks: LocalRanks | None, verify: bool
) -> Outcome:
    try:
        seed_python(1)
        truth = eager(recipe, model, batch)
    except Exception as error:
        truth = None
        failed = f"{type(error).__name__}: {error}"
    precision = "fp64" if is_judged_by_place(recipe) else None  # of numbers that are made of integers, too
    try:
        seed_python(1)
        if ranks is not None:
            run = partitioner.run_local(plan, model, batch, precision=precision, ranks=ranks, timeout=60.0)
        else:
            run = partitioner.run_threads(plan, model, batch, precision=precision, timeout=60.0)
    except RankError as error:
        return Outcome("crashed", str(error))
    except PartitionError as error:
        kind: Kind = "unusable" if recipe.change in KEEPING else "refused"
        return Outcome(kind, f"run: {type(error).__name__}: {error}")
    except Exception as error:
        return _untyped("run", error)
    if truth is None:
        return Outcome("too lenient", f"the run gave {run.loss}; the model raises {failed}")
    different = difference(run, truth, model)
    if different and _is_noted(recipe, plan):
        return Outcome("noted", different)
    if different:
        return Outcome("different", different)
    if verify and not truth.loss.isnan().any():  # which verify refuses to compare
        seed_python(1)
        report = plan.verify(model, batch, loss_of(recipe))
        if not report.ok:
            return Outcome("verify", f"the run is equal to the model; verify says {report}")
    return Outcome("equal")


def _is_noted(recipe: Recipe, plan: Plan) -> bool:
    words = [word for name, word in OF_PYTHON.items() if name in names_in(recipe.ops)]
    return any(word in note for word in words for note in plan.notes)


def _untyped(where: str, error: Exception) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    at = " < ".join(
        f"{f.filename.rsplit('/', 2)[-2]}/{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in frames[:-5:-1]
    )
    return Outcome("untyped", f"{where}: {type(error).__name__}: {error} [{at}]")
