"""Find the ends of loops over experts: sums and ``where`` chains that combine one part per expert.

The part of an expert is zero, or not selected, in all rows but the expert's own. Requires values on every node, and
normal form. See ``passes/looped.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes.choices import Choice, choice_of
from passes.numbers import Numbers
from passes.rewrite import shape, val
from passes.stacked import addends_of, is_inner, is_sum

aten = torch.ops.aten
RESHAPES = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default)
SCALED = (aten.mul.Tensor, aten.div.Tensor)
LINEAR = {  # operators that are linear in their first operand
    *RESHAPES, *SCALED, aten.permute.default, aten.transpose.int, aten.sum.dim_IntList, aten.to.dtype,
}  # fmt: skip
_LEAST = 2  # experts in a loop


@dataclass(frozen=True)
class Loop:
    """A loop over experts whose ``chain`` of nodes sums one part per expert, or selects between them row by row.

    ``parts[i]`` holds the rows of expert ``first + i``: the rows whose chosen number in ``of`` is that; dim ``j`` of
    the masks is dim ``dims[j]`` of ``of``. ``others``: further operands of the chain. ``adds``: the chain is a sum.
    """

    parts: tuple[fx.Node, ...]
    of: fx.Node
    dims: tuple[int, ...]
    first: int
    others: tuple[fx.Node, ...]
    chain: frozenset[fx.Node]
    adds: bool
    where: tuple[int, ...] = ()  # shape of the masks that select; empty for a sum


def loops_at(head: fx.Node, numbers: Numbers) -> Iterator[Loop]:
    """The loops whose last addition or ``where`` is ``head``."""
    if is_sum(head) and not is_inner(head):
        yield from _sums(head, numbers)
    elif _is_choice(head) and not any(_is_choice(u) and u.args[2] is head for u in head.users):
        yield from _choices(head, numbers)


def _sums(head: fx.Node, numbers: Numbers) -> Iterator[Loop]:
    """The loops that ``head`` sums: each addend is zero in all rows but its expert's own."""
    addends, chain = addends_of(head)
    found = {n: choice for n in addends if addends.count(n) == 1 and (choice := _own_rows(n)) is not None}
    yield from _loops(found, lambda parts: [n for n in addends if n not in parts], chain, numbers, adds=True)


def _own_rows(addend: fx.Node) -> Choice | None:
    """The mask outside of which ``addend`` is zero; ``None`` if no mask of an expert tells."""
    node: Any = addend
    while isinstance(node, fx.Node) and node.target in LINEAR and len(node.users) == 1:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.masked_fill.Scalar or node.args[2] != 0:
        return None
    choice, negated = _mask(node.args[1])
    return choice if negated else None


def _choices(head: fx.Node, numbers: Numbers) -> Iterator[Loop]:
    """The loops of a ``where`` chain: each ``where`` takes its expert's part in its own rows, else the rest of the
    chain."""
    found: dict[fx.Node, Choice] = {}
    chain: set[fx.Node] = set()
    where = _spots(head)
    node: Any = head
    while _is_choice(node) and shape(node) == shape(head) and (not chain or len(node.users) == 1):
        choice, negated = _mask(node.args[0])
        if choice is None or negated or shape(node.args[1]) != shape(head) or node.args[1] in found:
            break
        if _spots(node) != where or math.prod(where) != val(choice.of).numel():
            break
        found[node.args[1]] = choice
        chain.add(node)
        node = node.args[2]
    if len(found) >= _LEAST and shape(node) == shape(head):
        for loop in _loops(found, lambda parts: [node] if len(parts) == len(found) else [], chain, numbers, adds=False):
            yield replace(loop, where=where)


def _spots(node: fx.Node) -> tuple[int, ...]:
    """Shape of the condition of a ``where`` before expansion, with 1 in front up to the rank of the ``where``."""
    condition: Any = node.args[0]
    while condition.target is aten.expand.default:
        condition = condition.args[0]
    sizes = shape(condition)
    return (*[1] * (len(shape(node)) - len(sizes)), *sizes)


def _is_choice(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.where.self and len(node.args) == 3


def _loops(
    found: Mapping[fx.Node, Choice],
    others: Callable[[Collection[fx.Node]], list[fx.Node]],
    chain: Collection[fx.Node],
    numbers: Numbers,
    *,
    adds: bool,
) -> Iterator[Loop]:
    """Group the parts whose masks test the same chosen numbers into one loop each; expert numbers are consecutive.

    ``found``: part -> its mask. ``others``: returns the chain's remaining operands for the parts of a loop.
    """
    by_source: dict[Any, dict[int, list[fx.Node]]] = {}
    for node, choice in found.items():
        by_source.setdefault((numbers(choice.of), choice.dims), {}).setdefault(choice.number, []).append(node)
    for parts in by_source.values():
        order = sorted(parts)
        if len(order) < _LEAST or order != list(range(order[0], order[0] + len(order))):
            continue
        nodes = [parts[number] for number in order]
        if all(len(of) == 1 for of in nodes):
            mine = tuple(of[0] for of in nodes)
            rest = others(mine)
            if adds or rest:
                choice = found[mine[0]]
                yield Loop(mine, choice.of, choice.dims, order[0], tuple(rest), frozenset(chain), adds)


def _mask(node: Any) -> tuple[Choice | None, bool]:
    """The choice that the mask ``node`` tests for, through reshapes, and whether the mask is negated."""
    negated = False
    while isinstance(node, fx.Node):
        choice = choice_of(node)
        if choice is not None:
            return choice, negated
        if node.target is aten.logical_not.default:
            negated = not negated
        elif node.target not in RESHAPES:
            break
        node = node.args[0]
    return None, False


def is_opposite(node: Any) -> bool:
    """Whether the mask ``node`` is the ``logical_not`` of another, through reshapes."""
    while isinstance(node, fx.Node) and node.target in RESHAPES:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target is aten.logical_not.default
