"""Compare the graphs of one model for two sizes of the batch, to find operators whose arguments depend on the size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
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
# attentions in which a query sees keys in a range of positions around its own
BANDED_ATTENTIONS = ("partition::band_attention", "partition::document_attention", "partition::scored_attention")
_END = {
    "slice": 3,
    "slice_copy": 3,
    "slice_scatter": 4,
}  # operator -> position of its argument ``end``, which may be a size


def get_operator_name(node: fx.Node) -> str:
    """Return the name of the operator of ``node`` without its overload, such as ``add``; for an operator of this
    project, ``partition::name``."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return str(getattr(target, "__name__", target))
    return target._schema.name.removeprefix("aten::")


def pair_nodes(main: Captured, other: Captured) -> dict[fx.Node, fx.Node] | None:
    """Return the corresponding nodes of two graphs, as a dict: node of ``main`` -> node of ``other``. Return ``None``
    if the graphs do not have the same operators, connected in the same way.

    ``main``, ``other``: one model captured for two batch sizes.
    """
    pairs = match_nodes(main.graph, other.graph)
    if pairs is None:
        return None
    given = ((a, b) for a, b in pairs.items() if a.op == "placeholder")
    if any(main.placeholders[a.name] != other.placeholders[b.name] for a, b in given):
        return None
    return pairs


def match_nodes(main: fx.Graph, other: fx.Graph) -> dict[fx.Node, fx.Node] | None:
    """Return the corresponding nodes of two graphs, as a dict: node of ``main`` -> node of ``other``. Return ``None``
    if the graphs do not have the same operators, connected in the same way. Numbers and placeholders may differ."""
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


def align_graphs(main: Captured, other: Captured) -> tuple[Captured, dict[fx.Node, fx.Node]] | None:
    """Return (the captured model ``main``, changed so that its graph has the same operators as the graph of ``other``;
    a dict: node of the changed graph -> corresponding node of ``other``). The only change is that slices of a whole dim
    are added where ``other`` slices the first part of this dim, for example of a table with as many rows as ``main``
    has positions. Return ``None`` if the graphs differ in anything else.

    ``main``, ``other``: one model captured for two batch sizes, the larger one first.
    """
    pairs = pair_nodes(main, other)
    if pairs is not None:
        return main, pairs
    sliced = _insert_whole_slices(main, other)
    pairs = None if sliced is None else pair_nodes(sliced, other)
    return None if sliced is None or pairs is None else (sliced, pairs)


def _insert_whole_slices(main: Captured, other: Captured) -> Captured | None:
    """Return a copy of ``main`` with additional slices that select a whole dim, one wherever ``other`` has a slice of
    the first elements and ``main`` has none. Return ``None`` if the operators of the graphs differ in another way.
    ``main``, ``other``: the model captured for the larger and for the smaller of two batch sizes."""
    graph, left = fx.Graph(), list(main.graph.nodes)
    made: dict[fx.Node, fx.Node] = {}  # node of main -> its copy
    paired: dict[fx.Node, fx.Node] = {}  # node of other -> node of the copy
    whole: dict[fx.Node, fx.Node] = {}  # inserted slice -> the tensor of which it selects everything

    def find_source(node: fx.Node) -> fx.Node:
        while node in whole:
            node = whole[node]
        return node

    for theirs in other.graph.nodes:
        ours = left[0] if left else None
        if (dim := _find_prefix_dim(theirs)) is not None and (
            ours is None
            or ours.target != theirs.target
            or _find_prefix_dim(ours) != dim
            or find_source(made[ours.all_input_nodes[0]]) != find_source(paired[theirs.all_input_nodes[0]])
        ):
            source = paired[theirs.all_input_nodes[0]]
            arguments = (source, *theirs.args[1:3], source.meta["val"].shape[dim], *theirs.args[4:])
            slice_ = graph.create_node("call_function", theirs.target, arguments, name="whole_slice")
            slice_.meta = {**theirs.meta, "val": source.meta["val"]}
            paired[theirs], whole[slice_] = slice_, source
            continue
        if ours is None or ((ours.op, ours.target) != (theirs.op, theirs.target) and theirs.op == "call_function"):
            return None
        left.pop(0)
        read, expected = _list_operands(ours), _list_operands(theirs)
        if len(read) != len(expected):
            return None
        if any(find_source(made[a]) != find_source(paired[b]) for a, b in zip(read, expected, strict=True)):
            return None
        new = graph.node_copy(ours, made.__getitem__)
        operands = iter([paired[b] for b in expected])
        new.args, new.kwargs = fx.node.map_arg((new.args, new.kwargs), partial(_take_next, operands))
        made[ours] = paired[theirs] = new
    return None if left else main.with_(graph=graph)


def _take_next(operands: Iterator[fx.Node], _: fx.Node) -> fx.Node:
    return next(operands)


def _list_operands(node: fx.Node) -> list[fx.Node]:
    """Return a list of the nodes among the arguments of ``node``, in order and with repetitions."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _find_prefix_dim(node: fx.Node) -> int | None:
    """If ``node`` is a slice that begins at index 0 with step 1, return the index of the sliced dim; otherwise return
    ``None``."""
    if node.op != "call_function" or get_operator_name(node) not in ("slice", "slice_copy") or node.kwargs:
        return None
    _, dim, start, *rest = node.args if len(node.args) > 3 else (None, None, None)
    return dim if isinstance(dim, int) and start in (0, None) and rest[1:] in ([], [1]) else None


def has_own_number(node: fx.Node, other: fx.Node) -> bool:
    """Return whether an argument of the operator ``node`` depends on the batch size, such as the factor ``1 / batch``
    of a mean. Padding a batch to this size then changes the results, because the argument counts the padded elements.
    Arguments that are sizes of the result are ignored.

    ``other``: the same operator in the model's graph for another batch size.
    """
    name, end = get_operator_name(node), None
    if name.startswith("partition::") and name not in ("partition::cross_entropy",) and _is_random(name):
        return False
    if name in _END:
        end = _END[name]
    elif name in _SIZED:
        return False
    elif name in BANDED_ATTENTIONS:
        return _limit_band(node, other) != _limit_band(other, node)
    for place, pair in enumerate(zip(node.args, other.args, strict=True)):
        if place != end and _are_arguments_different(*pair):
            return True
    return any(_are_arguments_different(node.kwargs[k], other.kwargs[k]) for k in node.kwargs)


def _limit_band(node: fx.Node, other: fx.Node) -> list[Any]:
    """Return the arguments of the attention ``node``, with ``None`` in place of graph nodes, for a comparison with
    ``other``, the same attention for another batch size.

    The numbers of positions that a query sees before and after its own become -1 (no limit) if they exclude no key in
    the shorter of the two sequences, because the model captured for this sequence has no limit there.
    """
    positions = min(each.args[0].meta["val"].shape[-2] for each in (node, other))  # type: ignore[union-attr]

    def limit(number: int) -> int:
        return number if 0 <= number < positions - 1 else -1

    found: list[Any] = []
    assert isinstance(node.target, torch._ops.OpOverload) and not node.kwargs
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.name in ("before", "after"):
            found.append(limit(value))  # type: ignore[arg-type]
        elif argument.name == "reach":
            found.append([limit(number) for number in value])  # type: ignore[union-attr,arg-type]
        else:
            found.append(None if isinstance(value, fx.Node) else value)
    return found


def _is_random(name: str) -> bool:
    """Return whether ``name`` is one of this project's operators that draw random numbers, such as
    ``partition::uniform``.
    """
    return name.removeprefix("partition::") in ("uniform", "normal", "exponential", "bits", "fraction")


def _are_arguments_different(a: Any, b: Any) -> bool:
    """Return whether ``a`` and ``b``, arguments of the same operator in two graphs, differ. Graph nodes, also in
    lists, count as equal."""
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return False  # operands are compared as nodes
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) != len(b) or any(_are_arguments_different(x, y) for x, y in zip(a, b, strict=True))
    return bool(a != b)


def list_result_shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return a tuple with the shape of each result of the operator ``node``."""
    return tuple(tuple(result.shape) for result in results_of(node))


def is_prefix(whole: Tensor, part: Tensor) -> bool:
    """Return whether the tensors ``whole`` and ``part`` have equal numbers of dims, and equal elements at all indices
    that exist in both. For example, ``part`` may be the first rows of a table of positions ``whole``."""
    if whole.dim() != part.dim():
        return False
    common = tuple(slice(min(a, b)) for a, b in zip(whole.shape, part.shape, strict=True))
    return torch.equal(whole[common], part[common])
