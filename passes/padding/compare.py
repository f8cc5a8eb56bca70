"""Compare the graphs of a model for two sizes of the batch: which operators have numbers that follow from the size?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.ir.model import Captured
from partitioner.passes.rules.factors import results_of

# Operators with sizes among their arguments: the sizes of their results are compared instead.
_SIZED = frozenset(
    "view _unsafe_view reshape expand expand_copy arange full zeros ones empty new_full new_zeros new_ones new_empty "
    "slice slice_copy narrow split_with_sizes split repeat slice_scatter unflatten".split()
)
_END = {"slice": 3, "slice_copy": 3, "slice_scatter": 4}  # the position of an argument that may be a size


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator of ``node`` without its overload, such as ``add``; ``partition::name`` for an
    operator of this project."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return str(getattr(target, "__name__", target))
    return target._schema.name.removeprefix("aten::")


def pair_nodes(main: Captured, other: Captured) -> dict[fx.Node, fx.Node] | None:
    """Return a dict from each node of the graph of ``main`` to the corresponding node of the graph of ``other``.

    ``main``, ``other``: one model captured for two batch sizes. Return ``None`` if their graphs do not have the same
    operators, connected in the same way.
    """
    pairs = match_nodes(main.graph, other.graph)
    if pairs is None:
        return None
    given = ((a, b) for a, b in pairs.items() if a.op == "placeholder")
    if any(main.placeholders[a.name] != other.placeholders[b.name] for a, b in given):
        return None
    return pairs


def match_nodes(main: fx.Graph, other: fx.Graph) -> dict[fx.Node, fx.Node] | None:
    """Return a dict from each node of the graph ``main`` to the corresponding node of the graph ``other``; ``None`` if
    they do not have the same operators, connected in the same way. Numbers and placeholders may differ.
    """
    ours, theirs = list(main.nodes), list(other.nodes)
    if len(ours) != len(theirs):
        return None
    pairs = dict(zip(ours, theirs, strict=True))
    for a, b in pairs.items():
        if a.op != b.op or (a.target != b.target and a.op == "call_function"):
            return None
        if [pairs[n] for n in a.all_input_nodes] != b.all_input_nodes:
            return None
    return pairs


def has_own_number(node: fx.Node, other: fx.Node) -> bool:
    """Return whether an argument of the operator ``node`` depends on the batch size, such as the factor ``1 / batch``
    of a mean. If so, the graph for this batch size gives other results for a smaller batch that is padded to it than
    the graph for the smaller batch.

    ``other``: the same operator in the model's graph for another batch size. Arguments that are sizes of the result
    do not count.
    """
    name, end = operator_name(node), None
    if name.startswith("partition::") and name not in ("partition::cross_entropy",) and _is_random(name):
        return False
    if name in _END:
        end = _END[name]
    elif name in _SIZED:
        return False
    for place, pair in enumerate(zip(node.args, other.args, strict=True)):
        if place != end and _differ(*pair):
            return True
    return any(_differ(node.kwargs[k], other.kwargs[k]) for k in node.kwargs)


def _is_random(name: str) -> bool:
    """Return whether ``name`` is one of this project's operators that draw random numbers, such as
    ``partition::uniform``.
    """
    return name.removeprefix("partition::") in ("uniform", "normal", "exponential", "bits", "fraction")


def _differ(a: Any, b: Any) -> bool:
    """Return whether ``a`` and ``b``, arguments of the same operator in two graphs, differ. Graph nodes, also in
    lists, count as equal."""
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return False  # operands are compared as nodes
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) != len(b) or any(_differ(x, y) for x, y in zip(a, b, strict=True))
    return bool(a != b)


def shapes_of(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return a tuple with the shape of each result of the operator ``node``."""
    return tuple(tuple(result.shape) for result in results_of(node))


def is_prefix(whole: Tensor, part: Tensor) -> bool:
    """Return whether the tensors ``whole`` and ``part`` have equal numbers of dims, and equal elements at all
    indices that exist in both, as a table of positions and a longer one have."""
    if whole.dim() != part.dim():
        return False
    common = tuple(slice(min(a, b)) for a, b in zip(whole.shape, part.shape, strict=True))
    return torch.equal(whole[common], part[common])
