"""``check_layout``: run a distributed model on local ranks, compare it with the plain model, and name likely causes of
differences.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partitioner.check.causes import UNKNOWN, Cause, CauseFinder, format_ranks
from partitioner.check.compare import (
    TOLERANCE,
    ForeignElements,
    PlacedShards,
    compare_gradient,
    compare_loss,
    compare_output,
    largest_gradient,
    place_shards,
)
from partitioner.check.output_causes import (
    find_first_wrong_backward,
    find_first_wrong_module,
    find_reduced_precision,
    name_output_cause,
)
from partitioner.check.plain_run import PlainResults, run_plain, split_gradients
from partitioner.check.rank_run import RankOutcome, run_rank
from partitioner.check.setup import CheckSetupError, Setup
from partitioner.plans.verify import relative_error
from partitioner.runtime.errors import LaunchError, RankError
from partitioner.runtime.launch.process_pool import LocalRanks

_WRONG_LOSS = Cause(
    "loss", "the outputs are right and the loss is not: it has other targets, other weights or another mean"
)


@dataclass(frozen=True)
class LayoutDifference:
    """Results of a distributed model that differ from those of the plain model (the user's model on one process) for
    one cause.

    Attributes:
        kind: identifier of the cause, such as ``unsummed``, ``untied`` or ``unknown``.
        cause: what was found, in a sentence.
        names: the results that differ: ``loss``, ``output <path>`` or ``grad <name>``.
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
    """The comparison of a distributed model with the plain model, which is the user's model on one process.

    Attributes:
        ok: whether outputs, loss and gradients are equal.
        errors: relative error by name: ``loss``, ``output <path>``, ``grad <name>``.
        differences: the results that differ, grouped by cause. Causes with the most results come first, then causes
            that follow from other causes, then unknown causes.
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
        raise LaunchError(f"ranks={ranks}; expected the number of processes to run, at least 1")
    target = _locate_function(function)
    with LocalRanks(1) as single, LocalRanks(ranks, debug=True) as pool:
        plain = _run_alone(single, run_plain, target, timeout=timeout)
        outcomes: list[RankOutcome] = pool.call(run_rank, target, timeout=timeout)
        errors, placed, loss_is = _compare(plain, outcomes)
        wrong = {name: error for name, error in errors.items() if not error <= tolerance}
        differences = _find_foreign(plain, outcomes, placed) + _find_trained(plain, placed)
        if wrong:
            parts = _run_alone(single, split_gradients, target, ranks, timeout=timeout)
            names = [n.removeprefix("grad ") for n in wrong if n.startswith("grad ")]
            finder = CauseFinder(plain, parts, placed, ranks, names)
            outcomes = pool.call(run_rank, target, False, True, timeout=timeout)
            differences += _explain(finder, plain, outcomes, wrong, bool(differences))
        if plain.uses_random and not differences:
            outcomes = pool.call(run_rank, target, True, timeout=timeout)
            differences += _compare_replicas(place_shards(plain, outcomes))
    return LayoutCheck(not differences, errors, tuple(differences), ranks, loss_is)


def _run_alone(single: LocalRanks, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
    """Return ``function(*arguments)``, run in the only process of the pool ``single``. Raise :class:`CheckSetupError`
    if the user's function, or the user's model before it is distributed, fails. ``timeout``: seconds after which the
    process is ended.
    """
    try:
        return single.call(function, *arguments, timeout=timeout)[0]
    except RankError as error:
        failure = error.failure
        if failure.kind in ("TargetError", "CheckSetupError"):
            raise CheckSetupError(failure.error) from error
        raise CheckSetupError(f"the plain model failed with {failure.kind}: {failure.error}") from error


def _compare(plain: PlainResults, outcomes: Sequence[RankOutcome]) -> tuple[dict[str, float], PlacedShards, str]:
    """Compare a distributed model with the plain model (the user's model on one process). Return three results: the
    relative error by name (``loss``, ``output <path>``, ``grad <name>``); the elements of the plain model's parameters
    that each rank holds; and how the ranks' losses give the loss (``equal``, ``mean``, ``sum`` or ``none``).

    ``plain``: results of the plain model. ``outcomes``: results of each rank of the distributed model.
    """
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
    finder: CauseFinder, plain: PlainResults, outcomes: Sequence[RankOutcome], wrong: dict[str, float], foreign: bool
) -> list[LayoutDifference]:
    """Return the differences between a distributed model and the plain model (the user's model on one process), grouped
    by cause. Causes that follow from other causes, and then unknown causes, come last.

    ``finder``: finds the cause of a wrong gradient. ``plain``: results of the plain model. ``outcomes``: results of
    each rank. ``wrong``: name of each result that differs -> relative error. ``foreign``: whether ranks have weights
    that the plain model does not have.
    """
    causes: dict[str, Cause] = {}
    for name in wrong:
        kind, _, rest = name.partition(" ")
        if kind == "grad":
            causes[name] = finder.explain_gradient(rest)
        elif kind == "output":
            given = [o.outputs[rest] for o in outcomes if rest in o.outputs]
            causes[name] = name_output_cause(plain.outputs[rest], given, len(outcomes))
        else:
            losses = [o.loss for o in outcomes if o.loss is not None]
            cause = name_output_cause(plain.loss, losses, len(outcomes))
            # a single number is always some factor times the right one
            causes[name] = UNKNOWN if cause.kind == "factor" else cause
    outputs_differ = any(not name.startswith("grad ") for name in wrong)
    first = find_reduced_precision(outcomes) or (find_first_wrong_module(plain, outcomes) if outputs_differ else None)
    compared = any(o.outputs for o in outcomes) and not any(name.startswith("output ") for name in wrong)
    unknown = [name for name, cause in causes.items() if cause == UNKNOWN]
    if first is None and compared and causes.get("loss") == UNKNOWN:
        first = _name_wrong_term(plain, wrong, unknown) or _WRONG_LOSS
    if first is None and compared and unknown and "loss" not in wrong:
        backward = find_first_wrong_backward(plain, outcomes)
        place = max(range(len(unknown)), key=lambda i: [*plain.grads].index(unknown[i].removeprefix("grad ")))
        if backward is not None:
            causes[unknown[place]] = backward
    _explain_unknown(causes, plain, first, foreign)
    groups: dict[Cause, list[str]] = defaultdict(list)
    for name, cause in causes.items():
        groups[cause].append(name)
    found = []
    for cause, names in groups.items():
        detail = next((causes[n].detail for n in names if causes[n].detail), "")
        text = f"{cause.text}. {detail}" if detail else cause.text
        found.append(LayoutDifference(cause.kind, text, tuple(names), max(wrong[n] for n in names)))
    return sorted(found, key=lambda d: (d.kind == "unknown", d.kind == "follows", -len(d.names)))


def _name_wrong_term(plain: PlainResults, wrong: Mapping[str, float], unknown: Sequence[str]) -> Cause | None:
    """Return the cause "only one term of the loss is wrong". It applies if the loss is wrong, the gradient of the
    matrix that forward uses last is right, and no wrong gradient has another cause; otherwise return ``None``. (The
    gradient of a bias says nothing: it is right even if samples have the targets of other samples.)

    ``plain``: results of the plain model (the user's model on one process). ``wrong``: name of each result that differs
    -> relative error. ``unknown``: the names of those without a cause.
    """
    reached = [name for name in wrong if name.startswith("grad ")]
    least = 1e-6 * largest_gradient(plain)
    grads = {n: g for n, g in plain.grads.items() if g is not None and g.dim() > 1 and float(g.abs().max()) > least}
    last = [f"grad {name}" for name in grads][-1:]
    if not reached or not last or last[0] in wrong or not {*reached} <= {*unknown}:
        return None
    named = ", ".join(name.removeprefix("grad ") for name in reached[:3]) + (" and others" if len(reached) > 3 else "")
    return Cause(
        "loss-term",
        f"the outputs are right and the loss is not, but only the gradients that one term of it reaches are wrong "
        f"({named}): a term that is no mean over samples, such as load balancing, is computed on a rank's own samples, "
        "or has another weight",
    )


def _explain_unknown(causes: dict[str, Cause], plain: PlainResults, first_wrong: Cause | None, foreign: bool) -> None:
    """Replace unknown causes in ``causes`` by a cause that points to another difference, if they can follow from that
    difference.

    A wrong output makes the loss and gradients wrong. An error in backward also makes the gradients of all parameters
    wrong that forward uses earlier.

    ``causes``: name of a result of the distributed model that differs -> cause; changed in place. ``plain``: results of
    the plain model (the user's model on one process). ``first_wrong``: the cause that names the first module with a
    wrong output; ``None`` if there is none. ``foreign``: whether ranks have weights that the plain model does not have.
    """
    results = [name for name in causes if not name.startswith("grad ")]
    if first_wrong is not None:
        for name in [n for n in results if causes[n] == UNKNOWN] or results[:1] or [*causes]:
            causes[name] = first_wrong
    unknown = [name for name, cause in causes.items() if cause == UNKNOWN]
    order = {f"grad {name}": place for place, name in enumerate(plain.weights)}
    known = [name for name, cause in causes.items() if cause != UNKNOWN and name in order]
    last = max(known, key=order.__getitem__, default="")
    for name in unknown:
        if foreign:
            causes[name] = Cause("follows", "follows from the other weights")
        elif any(causes[n] != UNKNOWN for n in results):
            what = "outputs" if first_wrong is None or "loss" not in first_wrong.kind else "loss"
            causes[name] = Cause("follows", f"follows from the wrong {what}")
        elif name == "loss" and last and causes[last].kind in ("mean-of-means", "reweighted", "dropped"):
            causes[name] = Cause("follows", "follows from the weights of samples or tokens in the gradients")
        elif last and name in order and order[name] < order[last]:
            text = f"may follow: backward reaches {last.removeprefix('grad ')} earlier, whose gradient is wrong"
            causes[name] = Cause("follows", text)


def _compare_replicas(placed: PlacedShards) -> list[LayoutDifference]:
    """Return a list with one difference if ranks that hold the same elements of a parameter have different gradients
    for these elements; else an empty list. This function is called for a step with dropout, if all results are equal
    without dropout. ``placed``: the elements that each rank holds, with their gradients.
    """
    names = []
    for name, holders in placed.holders.items():
        first: dict[bytes, Tensor | None] = {}
        for holder in holders:
            other = first.setdefault(holder.index.numpy().tobytes(), holder.gradient)
            if other is None or holder.gradient is None:
                continue
            if relative_error(holder.gradient, other) > TOLERANCE and name not in names:
                names.append(name)
    if not names:
        return []
    text = "with dropout, ranks that hold the same parameter have different gradients: their random states differ"
    return [LayoutDifference("random-state", text, tuple(f"grad {n}" for n in names), math.inf)]


def _find_foreign(plain: PlainResults, outcomes: Sequence[RankOutcome], placed: PlacedShards) -> list[LayoutDifference]:
    """Return differences that comparing gradients does not show: ranks whose function made another model or other
    inputs, weights that are not in the plain model (the user's model on one process), and padding that gets a gradient.

    ``plain``: results of the plain model. ``outcomes``: results of each rank. ``placed``: for each rank, the elements
    of the plain model that it holds, and the elements that the plain model does not have.
    """
    found = []
    others = [o.rank for o in outcomes if o.digest != plain.digest]
    if others:
        text = (
            f"the function made other weights or inputs on {format_ranks(others)} than on one process: "
            "the random generators differ"
        )
        found.append(LayoutDifference("different-seeds", text, ("weights",), math.inf))
    groups: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for elements in placed.foreign:
        few = elements.beside is not None and elements.count * 2 <= elements.total
        if not few and not (elements.constant and _is_whole(plain, placed, elements)):
            cause = ("other-weights", "the values are not those of the plain model")
        elif elements.largest_gradient > 0.0:
            cause = (
                "padding",
                "elements that the plain model does not have (padding) have a gradient",
            )
        else:
            continue
        groups[cause][elements.name].append(elements.rank)
    for (kind, text), names in groups.items():
        told = [f"{name} on {format_ranks(ranks)}" for name, ranks in names.items()]
        found.append(LayoutDifference(kind, text, tuple(told), math.inf))
    return found


def _is_whole(plain: PlainResults, placed: PlacedShards, elements: ForeignElements) -> bool:
    """Return whether the ranks together hold every element of a parameter of the plain model (the user's model on one
    process), although they also hold ``elements``, which the plain model does not have. Then ``elements`` are
    additions, such as padding, and replace nothing.

    The parameter is the one that has elements in the same tensor as ``elements``, on this rank or on another one.
    ``plain``: results of the plain model. ``placed``: the elements that each rank holds.
    """
    beside = {other.beside for other in placed.foreign if other.name == elements.name} - {None}
    held = {h.name: name for name, holders in placed.holders.items() for h in holders}
    name = next(iter(beside), held.get(elements.name))
    if name is None:
        return False
    indices = torch.cat([h.index for h in placed.holders[name] if h.name == elements.name])
    return len(indices.unique()) == plain.weights[name].numel()


def _find_trained(plain: PlainResults, placed: PlacedShards) -> list[LayoutDifference]:
    """Return a list with one difference if ranks compute gradients of parameters that the plain model (the user's model
    on one process) freezes, so that an optimizer would train them; else an empty list. ``plain``: results of the plain
    model. ``placed``: the elements of its parameters that each rank holds.
    """
    found = {}
    for name in [name for name in placed.holders if name not in plain.grads]:
        given = [h for h in placed.holders[name] if h.gradient is not None and bool(h.gradient.count_nonzero())]
        if given:
            found[name] = f"{name} on {format_ranks(sorted({h.rank for h in given}))}"
    if not found:
        return []
    text = "the plain model freezes the parameter (requires_grad is False), and ranks compute a gradient for it"
    return [LayoutDifference("trained", text, tuple(found.values()), math.inf)]


def _locate_function(function: Callable[[], Any] | str) -> str:
    """Return the text ``FILE.py:FUNCTION`` by which other processes can import ``function``; such a text is returned
    unchanged. Raise :class:`CheckSetupError` if ``function`` is not at the top level of a file."""
    if isinstance(function, str):
        return function
    name, where = getattr(function, "__qualname__", ""), inspect.getsourcefile(function)
    if not name.isidentifier() or where is None or not where.endswith(".py"):
        raise CheckSetupError(
            f"{function!r} cannot be imported by the rank processes; expected a function at the top level of a .py "
            "file: move it there"
        )
    return f"{where}:{name}"
