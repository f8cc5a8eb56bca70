"""Compute the value of the padded elements of an operator's result from the values of the padded elements of its
operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from partitioner.passes.padding.compare import get_operator_name
from partitioner.passes.rules.factors import get_meta_tensor, get_node_argument, operands_of, replace_operands
from partitioner.passes.rules.pointwise import LINEAR, NONLINEAR

VIEWS = frozenset(
    "view _unsafe_view reshape expand expand_copy unsqueeze squeeze permute transpose t clone contiguous alias detach "
    "flatten unflatten repeat".split()
)
CASTS = frozenset(("to", "_to_copy", "type_as"))
POINTWISE = frozenset(
    (*NONLINEAR, *LINEAR, *CASTS, "add", "sub", "rsub", "mul", "div", "where", "masked_fill", "clamp", "min", "max")
)
NEGATIVE = -1e30  # in a softmax, a score of at most this gets no weight beside any other score

_ZERO = frozenset(("mul", "bitwise_and", "logical_and", "__and__"))
_ONE = frozenset(("bitwise_or", "logical_or", "__or__"))


def is_pointwise(node: fx.Node) -> bool:
    """Return whether ``node`` is a pointwise operator with one result: each element of the result depends on one
    element of each operand."""
    return get_operator_name(node) in POINTWISE and not isinstance(node.meta["val"], tuple | list)


def apply_to_numbers(node: fx.Node, numbers: Sequence[float | None]) -> float | None:
    """Return the result of the pointwise operator ``node`` on one number for each operand, such as the value of the
    operand's padded elements; ``None`` if the result is not known.

    ``numbers``: one number for each operand of ``node``, in order; ``None`` for an operand whose number is not known.
    """
    name, operands = get_operator_name(node), operands_of(node)
    known = dict(zip(operands, numbers, strict=True))
    if name == "where" and len(node.args) == 3:
        condition = known.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
        return None if condition is None else _resolve_number(node.args[1 if condition else 2], known)
    if name == "masked_fill":
        mask = _resolve_number(node.args[1], known)
        return None if mask is None else _resolve_number(node.args[2 if mask else 0], known)
    if all(number is not None for number in numbers):
        return _evaluate_operator(node, numbers)
    if name in _ZERO and any(n == 0 for n in numbers):
        return 0.0
    if name in _ONE and get_meta_tensor(node).dtype == torch.bool and any(n not in (None, 0) for n in numbers):
        return 1.0
    low = [n for n in numbers if n is not None and n <= NEGATIVE]
    if name == "add" and low and get_node_argument(node, "alpha", 1) == 1:
        return min(low)  # a score that is added to it changes nothing
    return None


def _resolve_number(argument: Any, known: dict[fx.Node, float | None]) -> float | None:
    """Return the number that ``argument``, an argument of an operator, stands for: the argument itself if it is a
    number; ``known[argument]`` if it is a node; ``None`` if the number is not known. ``known``: for each operand node,
    the value of some of its elements, such as the padded ones; ``None`` if it is not known."""
    if isinstance(argument, fx.Node):
        return known.get(argument)
    return float(argument) if isinstance(argument, bool | int | float) else None


def _evaluate_operator(node: fx.Node, numbers: Sequence[float | None]) -> float | None:
    """Run the pointwise operator ``node`` on one number for each operand, and return the resulting number; ``None`` if
    it cannot be computed. ``numbers``: the number for each operand, in order, never ``None``."""
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    tensors: list[Any] = [
        torch.tensor(number, dtype=get_meta_tensor(operand).dtype)
        for number, operand in zip(numbers, operands_of(node), strict=True)
    ]
    args, kwargs = replace_operands(node, tensors)
    kwargs.pop("device", None)
    try:
        made = target(*args, **kwargs)
        return float(made.item()) if made.numel() == 1 else None
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None
