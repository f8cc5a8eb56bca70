"""``check_layout``: run a distributed model on local ranks, compare it with the plain model, and name likely causes of
differences.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from partitioner.check.causes import Cause, CauseFinder, name_output_cause
from partitioner.check.compare import (
    TOLERANCE,
    PlacedShards,
    compare_gradient,
    compare_loss,
    compare_output,
    place_shards,
)
from partitioner.check.plain_run import PlainResults, run_plain, split_gradients
from partitioner.check.rank_run import RankOutcome, run_rank
from partitioner.check.setup import CheckSetupError, Setup
from partitioner.runtime.errors import LaunchError
from partitioner.runtime.launch.process_pool import LocalRanks


@dataclass(frozen=True)
class LayoutDifference:
    """Results that differ from those of the plain model for one cause.

    Attributes:
        kind: identifier of the cause, such as ``unsummed``, ``untied`` or ``unknown``.
        cause: what was found, in a sentence.
        names: what differs: ``loss``, ``output <path>`` or ``grad <name>``.
        error: largest relative error among them; infinite if something is missing.
    """

    kind: str
    cause: str
    names: tuple[str, ...]
    error: float

    def __str__(self) -> str:
        shown = ", ".join(self.names[:4]) + (f" and {len(self.names) - 4} more" if len(self.names) > 4 else "")
        return f"{shown}: {self.cause} [{self.kind}]"


@dataclass(frozen=True)
class LayoutCheck:
    """The comparison of a distributed model with the plain model.

    Attributes:
        ok: whether everything is equal.
        errors: relative error by name: ``loss``, ``output <path>``, ``grad <name>``.
        differences: what differs, by cause; the causes with most names first.
        world_size: number of ranks.
        loss_is: how the ranks' losses give the loss: ``equal``, ``mean``, ``sum``, or ``none`` if none was returned.
    """

    ok: bool
    errors: dict[str, float] = field(repr=False)
    differences: tuple[LayoutDifference, ...]
    world_size: int
    loss_is: str

    def __str__(self) -> str:
        worst = max(self.errors.values(), default=0.0)
        if self.ok:
            return f"equal to the plain model: {len(self.errors)} tensors, largest relative error {worst:.1e}"
        return "NOT equal to the plain model:\n" + "\n".join(f"  {d}" for d in self.differences)


def check_layout(
    function: Callable[[], Setup] | str, ranks: int = 2, timeout: float = 120.0, tolerance: float = TOLERANCE
) -> LayoutCheck:
    """Run a distributed model on local processes over Gloo, in float64, and compare outputs, loss and every gradient
    with the plain model on one process.

    Args:
        function: returns the :class:`Setup`, without arguments: a function in a file, or ``FILE.py:FUNCTION``.
        ranks: number of processes.
        timeout: seconds after which all processes are ended.
        tolerance: largest relative error that counts as equal.

    Raise :class:`CheckSetupError` for an incomplete setup, :class:`RankError` if a rank fails, and
    :class:`RankTimeout` after ``timeout``.
    """
    if ranks < 1:
        raise LaunchError(f"ranks={ranks}; expected the number of processes to run, 1 or more")
    target = _locate_function(function)
    with LocalRanks(1) as single, LocalRanks(ranks, debug=True) as pool:
        plain: PlainResults = single.call(run_plain, target, timeout=timeout)[0]
        outcomes: list[RankOutcome] = pool.call(run_rank, target, timeout=timeout)
        errors, placed, loss_is = _compare(plain, outcomes)
        differences = []
        wrong = {name: error for name, error in errors.items() if not error <= tolerance}
        if wrong:
            parts = single.call(split_gradients, target, ranks, timeout=timeout)[0]
            names = [n.removeprefix("grad ") for n in wrong if n.startswith("grad ")]
            finder = CauseFinder(plain, parts, placed, ranks, names)
            differences = _explain(finder, plain, outcomes, wrong)
        differences += _find_foreign(plain, outcomes, placed)
    return LayoutCheck(not differences, errors, tuple(differences), ranks, loss_is)


def _compare(plain: PlainResults, outcomes: Sequence[RankOutcome]) -> tuple[dict[str, float], PlacedShards, str]:
    """Return the relative error by name, the elements that each rank holds, and how the losses of ranks are reduced."""
    placed = place_shards(plain, outcomes)
    errors: dict[str, float] = {}
    loss, loss_is = compare_loss(plain, outcomes)
    if loss_is != "none":
        errors["loss"] = loss
    for outcome in outcomes:
        for path, given in outcome.outputs.items():
            expected = plain.outputs.get(path)
            if expected is None:
                raise CheckSetupError(
                    f"step() returned the output {path!r}; the plain model has {', '.join(plain.outputs) or 'none'}"
                )
            name = f"output {path}"
            errors[name] = max(errors.get(name, 0.0), compare_output(expected, given))
    for name in plain.grads:
        errors[f"grad {name}"] = compare_gradient(plain, name, placed.holders[name])
    return errors, placed, loss_is


def _explain(
    finder: CauseFinder, plain: PlainResults, outcomes: Sequence[RankOutcome], wrong: dict[str, float]
) -> list[LayoutDifference]:
    """Return the differences in ``wrong`` (name -> error), grouped by cause."""
    groups: dict[Cause, list[str]] = defaultdict(list)
    for name in wrong:
        kind, _, rest = name.partition(" ")
        if kind == "grad":
            cause = finder.explain_gradient(rest)
        elif kind == "output":
            given = [o.outputs[rest] for o in outcomes if rest in o.outputs]
            cause = name_output_cause(plain.outputs[rest], given, len(outcomes))
        else:
            losses = [o.loss for o in outcomes if o.loss is not None]
            cause = name_output_cause(plain.loss, losses, len(outcomes))
        groups[cause].append(name)
    found = [
        LayoutDifference(cause.kind, cause.text, tuple(names), max(wrong[n] for n in names))
        for cause, names in groups.items()
    ]
    return sorted(found, key=lambda d: (d.kind == "unknown", -len(d.names)))


def _find_foreign(plain: PlainResults, outcomes: Sequence[RankOutcome], placed: PlacedShards) -> list[LayoutDifference]:
    """Return differences that no gradient shows: ranks that made another model, weights that are not the plain model's,
    and padding that gets a gradient.
    """
    found = []
    others = [o.rank for o in outcomes if o.digest != plain.digest]
    if others:
        text = (
            f"the function made other weights or inputs on ranks {others} than on one process: "
            "the random generators differ"
        )
        found.append(LayoutDifference("different-seeds", text, ("weights",), math.inf))
    for elements in placed.foreign:
        name = f"{elements.name} on rank {elements.rank}"
        if elements.beside is None or elements.count * 2 > elements.total:
            text = f"{elements.count} of {elements.total} values are not those of the plain model"
            found.append(LayoutDifference("other-weights", text, (name,), math.inf))
        elif elements.largest_gradient > 0.0:
            text = (
                f"{elements.count} elements beyond those of {elements.beside} (padding) have a gradient: padded rows "
                "take part in the loss"
            )
            found.append(LayoutDifference("padding", text, (name,), elements.largest_gradient))
    return found


def _locate_function(function: Callable[[], Any] | str) -> str:
    """Return ``FILE.py:FUNCTION`` for a function of a file."""
    if isinstance(function, str):
        return function
    name, where = getattr(function, "__qualname__", ""), inspect.getsourcefile(function)
    if not name.isidentifier() or where is None or not where.endswith(".py"):
        raise CheckSetupError(
            f"{function!r} cannot be imported by ranks; expected a function at the top level of a .py file"
        )
    return f"{where}:{name}"
