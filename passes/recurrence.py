"""Buffers that forward changes, over groups of samples that follow one another.

Requires: a captured graph in normal form, of one group. Provides: the same graph, in which a buffer that takes
``a * old + b`` with a number ``a`` and a ``b`` that depends on no such buffer (running statistics, averages, counters,
the last group's values) takes a sum instead: after groups 0 to n - 1 it is ``a^n * old`` plus the sum of
``a^(n - 1 - i) * b_i``, of which each group gives its part, wherever and whenever it is worked on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.blocks import State
from passes.capture import Captured
from passes.collectives import ops
from passes.errors import UnsupportedError
from passes.microbatch import DATA
from passes.rewrite import Builder, aten, val

_SAME = (aten.detach.default, aten.alias.default, aten.clone.default)


@dataclass
class Recurrences:
    """``updates``: by buffer the node that it takes, or is added up; ``keeps``: of the latter, how much of the old
    value stays."""

    updates: dict[str, str] = field(default_factory=dict)
    keeps: dict[str, float] = field(default_factory=dict)


def over_groups(group: Captured, num_groups: int, apart: Collection[fx.Node]) -> Recurrences:
    """Rewrite the updates in the graph of one ``group`` in place. ``apart``: what depends on its samples.

    Raises :class:`UnsupportedError` for a buffer whose groups cannot be worked on independently.
    """
    found = Recurrences(dict(group.updates))
    if num_groups == 1 or not group.updates:
        return found
    nodes = {n.name: n for n in group.graph.nodes}
    held = {state: nodes[name] for name, state in group.placeholders.items() if state in group.updates}
    output = group.graph.output_node()
    given = {nodes[name] for name in (group.loss, *(o.value for o in group.outputs)) if name is not None}
    for state, name in group.updates.items():
        new, old = nodes[name], held.get(state)
        chain = _depending(old, output) if old is not None else set()
        read = next((n for n in chain if n in given or (output in n.users and n is not new)), None)
        if read is None and chain and new not in chain:
            read = next(iter(chain))
        if read is not None or old in given:
            raise UnsupportedError(_refusal(group.states[state], _READ.format(line=_line(read))))
        if new is old:
            continue
        factor = _factor(new, old, chain)
        if factor is None:
            raise UnsupportedError(_refusal(group.states[state], _OTHER.format(line=_line(new))))
        if new not in chain and new not in apart:
            continue  # the same after every group
        if new.meta["val"].dtype == torch.bool or (factor not in (0.0, 1.0) and not val(new).dtype.is_floating_point):
            raise UnsupportedError(_refusal(group.states[state], _KIND.format(kind=val(new).dtype)))
        found.updates[state] = _part(group.graph, new, old, chain, factor, num_groups).name
        found.keeps[state] = factor**num_groups
    return found


_READ = (
    "forward reads it for more than its own new value{line}, and would read what the group before has left, while "
    "ranks work on groups at the same time"
)
_OTHER = (
    "its new value{line} is not a number times the old one plus what does not depend on it, so that what the groups "
    "leave one after the other cannot be added up"
)
_KIND = "what the groups leave in it, of type {kind}, cannot be added up"


def _refusal(state: State, why: str) -> str:
    return (
        f"forward changes the buffer {state.name!r}: with couple='microbatch' each group of samples changes it after "
        f"the one before, and {why}; plan with couple='batch', or keep it as it is (model.eval())"
    )


def _line(node: fx.Node | None) -> str:
    source = node.meta.get("source") if node is not None else None
    return f" ({source})" if source else ""


def _depending(old: fx.Node, output: fx.Node) -> set[fx.Node]:
    found, stack = set[fx.Node](), [old]
    while stack:
        for user in stack.pop().users:
            if user is not output and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _factor(node: Any, old: fx.Node | None, chain: Collection[fx.Node]) -> float | None:
    """``a`` of ``node`` = ``a * old + b``; ``None`` where it is not of this form."""
    if node is old:
        return 1.0
    if node not in chain:
        return 0.0
    of = [_factor(a, old, chain) if isinstance(a, fx.Node) else 0.0 for a in node.args]
    if any(f is None for f in of):
        return None
    known = [f for f in of if f is not None]
    numbers = [a for a in node.args if isinstance(a, int | float) and not isinstance(a, bool)]
    if val(node).shape != val(old).shape if old is not None else False:
        return None
    match node.target:
        case aten.add.Tensor | aten.sub.Tensor:
            sign = 1.0 if node.target == aten.add.Tensor else -1.0
            return known[0] + sign * float(node.kwargs.get("alpha", 1)) * known[1]
        case aten.mul.Tensor | aten.div.Tensor if len(numbers) == 1 and isinstance(node.args[0], fx.Node):
            return known[0] * numbers[0] if node.target == aten.mul.Tensor else known[0] / numbers[0]
        case aten.neg.default:
            return -known[0]
        case aten.lerp.Scalar:
            return known[0] + float(numbers[0]) * (known[1] - known[0])
        case aten._to_copy.default if val(node).dtype.is_floating_point and val(node.args[0]).dtype.is_floating_point:
            return known[0]
    return known[0] if node.target in _SAME else None


def _part(
    graph: fx.Graph, new: fx.Node, old: fx.Node | None, chain: Collection[fx.Node], factor: float, num_groups: int
) -> fx.Node:
    """What a group adds: ``a^(n - 1 - i) * b``."""
    build = Builder(graph, new)
    if old is not None and new in chain:
        with graph.inserting_before(next(n for n in graph.nodes if n in chain)):
            nothing = Builder(graph, new)(aten.zeros_like.default, old)
        for node in chain:
            node.replace_input_with(old, nothing)
    with graph.inserting_before(new.next):
        if factor == 1.0:
            return build(aten.detach.default, new)
        index = build(ops.axis_index.default, DATA, num_groups)
        if factor == 0.0:
            last = build(aten.eq.Scalar, index, num_groups - 1)
            return build(aten.where.self, last, new, build(aten.zeros_like.default, new))
        after = build(aten.add.Tensor, build(aten.mul.Tensor, index, -1), num_groups - 1)
        kind = torch.float64 if val(new).dtype == torch.float64 else torch.float32
        weight = build(aten.pow.Scalar, factor, build(aten._to_copy.default, after, dtype=kind))
        return build(aten.mul.Tensor, new, weight)
