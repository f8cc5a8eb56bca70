"""Undo the flattening of dims around matrix products, transposes and elementwise operators.

Flattening merges several dims into one. Without it, each dim can be sharded separately. Examples:

* ``reshape(reshape(x, [b * s, k]) @ w + bias, [b, s, n])`` becomes ``linear(x, w.t()) + bias``;
* ``reshape(transpose(reshape(x, [s, b * h, d]), 0, 1), [b, h, s, d])``
  becomes ``permute(reshape(x, [s, b, h, d]), ...)``;
* ``reshape(repeat(x, [e, 1]) * reshape(w, [e * s, 1]), [e, s, d])``
  becomes ``expand(x, [e, s, d]) * reshape(w, [e, s, 1])``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partitioner.passes.ir.rewrite import Builder, aten, drop_unused, list_node_sizes

_PRODUCTS = (aten.mm.default, aten.linear.default)

_TRANSPOSES = (aten.permute.default, aten.transpose.int)
_FLAT = (aten.reshape.default, aten.repeat.default)


def unflatten_dims(graph: fx.Graph) -> None:
    """Rewrite ``graph`` in place so that dims, such as batch and positions, that the model flattens into one dim for an
    operator and splits again behind it, stay separate dims. Each of them can then be sharded by itself.

    In ``graph``, every view must be a ``reshape``, and biases must be separate additions.
    """
    for node in list(graph.nodes):
        if node.target is aten.reshape.default:
            _unflatten_product(graph, node)
            _unflatten_transpose(graph, node)
            _unflatten_elementwise(graph, node)
    drop_unused(graph)


def _unflatten_product(graph: fx.Graph, node: fx.Node) -> None:
    """Change ``graph`` in place: replace a matrix product whose rows are several dims flattened into one by a product
    that keeps these dims separate. If ``node`` does not follow such a product, nothing changes.

    ``node``: the ``reshape`` after the product (and after the addition of a bias, if there is one) that splits the rows
    into the dims again; the new product takes the place of ``node``.
    """
    sizes = list_node_sizes(node)
    value: Any = node.args[0]
    bias: Any = None
    if value.target is aten.add.Tensor and not value.kwargs and len(value.users) == 1:
        value, bias = value.args
    if not _is_flat_product(value, sizes) or not _is_bias(bias, sizes[-1]):
        return
    rows, weight = value.args
    source = rows.args[0] if rows.target is aten.reshape.default else rows
    split = [*sizes[:-1], list_node_sizes(rows)[-1]]
    with graph.inserting_before(value):
        build = Builder(graph, value)
        whole = source if list_node_sizes(source) == split else build(aten.reshape.default, source, split)
        if value.target is aten.mm.default:
            weight = build(aten.t.default, weight)
        product = build(aten.linear.default, whole, weight)
    with graph.inserting_before(node):
        build = Builder(graph, node.args[0])  # type: ignore[arg-type]
        node.replace_all_uses_with(product if bias is None else build(aten.add.Tensor, product, bias))


def _is_flat_product(value: Any, sizes: list[int]) -> bool:
    """Return whether ``value`` is a matrix product ``[rows, n]`` that a reshape splits into the shape ``sizes``,
    ``[..., n]`` with three or more dims. The reshape must be the only reader of ``value``."""
    if not isinstance(value, fx.Node) or value.target not in _PRODUCTS or len(value.users) > 1:
        return False
    flat = list_node_sizes(value)
    return len(value.args) == 2 and len(flat) == 2 and len(sizes) > 2 and sizes[-1] == flat[-1]


def _is_bias(bias: Any, size: int) -> bool:
    return bias is None or (isinstance(bias, fx.Node) and list_node_sizes(bias) == [size])


def _unflatten_transpose(graph: fx.Graph, node: fx.Node) -> None:
    """Change ``graph`` in place: replace a transpose of a tensor in which several dims are flattened into one by a
    permutation of the separate dims. If ``node`` does not follow such a transpose, nothing changes.

    ``node``: the ``reshape`` after the transpose that splits the flattened dim again; the permutation takes the place
    of ``node``.
    """
    moved: Any = node.args[0]
    order = _find_transpose_order(moved)
    flat = moved.args[0] if order is not None else None
    if order is None or flat is None or flat.target is not aten.reshape.default:
        return
    parts = _split_dim_sizes(list_node_sizes(moved), list_node_sizes(node))
    if parts is None:
        return
    by_source = {source: parts[place] for place, source in enumerate(order)}
    start, first = 0, {}
    for source in sorted(by_source):
        first[source] = start
        start += len(by_source[source])
    places = [first[source] + i for source in order for i in range(len(by_source[source]))]
    with graph.inserting_before(node):
        build = Builder(graph, node)
        split = build(aten.reshape.default, flat.args[0], [size for s in sorted(by_source) for size in by_source[s]])
        node.replace_all_uses_with(build(aten.permute.default, split, places))


def _unflatten_elementwise(graph: fx.Graph, node: fx.Node) -> None:
    """Change ``graph`` in place: move the reshape ``node``, which splits dims of the result of an elementwise operator,
    to the operands of the operator.

    This is done only if reshaping the operands needs views alone: at least one operand must come from a ``reshape`` or
    ``repeat``, and every other operand must do so, too, or have size 1 in all dims that are split.
    """
    value: Any = node.args[0]
    if not _is_elementwise(value) or len(value.users) > 1 or len(list_node_sizes(node)) <= len(list_node_sizes(value)):
        return
    parts = _split_dim_sizes(list_node_sizes(value), list_node_sizes(node))
    operands = value.all_input_nodes
    if parts is None or not any(x.target in _FLAT for x in operands):
        return
    into = {x: _broadcast_dim_parts(x, list_node_sizes(value), parts) for x in operands}
    if not all(_can_split(x, sizes) for x, sizes in into.items()):
        return
    with graph.inserting_before(value):
        build = Builder(graph, value)
        split = {x: _split_operand(build, x, sizes) for x, sizes in into.items()}
        args, kwargs = fx.map_arg((value.args, value.kwargs), split.__getitem__)
        node.replace_all_uses_with(build(value.target, *args, **kwargs))
    for made in split.values():
        if made.target is aten.reshape.default:
            _unflatten_elementwise(graph, made)


def _is_elementwise(value: Any) -> bool:
    tags = value.target.tags if isinstance(value, fx.Node) and hasattr(value.target, "tags") else ()
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _broadcast_dim_parts(x: fx.Node, sizes: list[int], parts: list[list[int]]) -> list[list[int]]:
    """Return, for each dim of the operand ``x`` of an elementwise operator, the list of sizes into which this dim is
    split when the dims of the operator's result are split. A dim along which ``x`` broadcasts is split into ones.
    ``sizes``: the shape of the result. ``parts``: for each dim of the result, the sizes into which it is split."""
    own = list_node_sizes(x)
    last = list(zip(sizes, parts, strict=True))[len(sizes) - len(own) :]
    return [part if size == whole else [1] * len(part) for size, (whole, part) in zip(own, last, strict=True)]


def _can_split(x: fx.Node, parts: list[list[int]]) -> bool:
    """Return whether a view, without a copy, can split each dim of ``x`` into the sizes in ``parts`` (for each dim, a
    list of sizes).

    This is true if ``x`` comes from a ``reshape``; if it comes from a ``repeat`` and the first size of each repeated
    dim is the number of its copies; or if no dim is split into sizes other than 1.
    """
    if x.target is aten.repeat.default:
        of = _read_repeat_counts(x)
        return all(times in (1, part[0]) for (times, _), part in zip(of, parts, strict=True))
    return x.target in _FLAT or all(len(part) == 1 or set(part) == {1} for part in parts)


def _read_repeat_counts(x: fx.Node) -> list[tuple[int, int]]:
    """Return a pair for each dim of the ``repeat`` node ``x``: (number of copies, size before the repetition)."""
    source: Any = x.args[0]
    times: Any = x.args[1]
    own = [1] * (len(times) - len(list_node_sizes(source))) + list_node_sizes(source)
    return list(zip(times, own, strict=True))


def _split_operand(build: Builder, x: fx.Node, parts: list[list[int]]) -> fx.Node:
    """Append a view of ``x`` with its dims split to the graph, and return its node. ``build``: appends operators to the
    graph. ``parts``: for each dim of ``x``, the list of sizes into which it is split.

    The split must be possible as a view. If ``x`` is a ``repeat``, the view is an ``expand`` of the tensor before it.
    """
    source: Any = x.args[0] if x.target in _FLAT else x
    sizes = [size for part in parts for size in part]
    if x.target is not aten.repeat.default:
        return source if list_node_sizes(source) == sizes else build(aten.reshape.default, source, sizes)
    once = [p if times == 1 else [1, *p[1:]] for (times, _), p in zip(_read_repeat_counts(x), parts, strict=True)]
    own = [size for part in once for size in part]
    return build(
        aten.expand.default,
        source if list_node_sizes(source) == own else build(aten.reshape.default, source, own),
        sizes,
    )


def _find_transpose_order(node: fx.Node) -> list[int] | None:
    """If ``node`` is a transpose or permutation, return a list with the index of the operand's dim for each dim of the
    result. Return ``None`` for any other operator."""
    rank = len(list_node_sizes(node)) if node.target in _TRANSPOSES else 0
    given: Any = node.args[1:]
    if node.target is aten.permute.default:
        return [d % rank for d in given[0]]
    if node.target is aten.transpose.int:
        order = list(range(rank))
        a, b = (d % rank for d in given)
        order[a], order[b] = b, a
        return order
    return None


def _split_dim_sizes(sizes: list[int], into: list[int]) -> list[list[int]] | None:
    """Return, for each dim of a reshape's operand, the list of sizes into which the reshape splits this dim. Return
    ``None`` if the reshape merges dims. ``sizes``: the operand's shape. ``into``: the result's shape."""
    parts, rest = [], list(into)
    for size in sizes:
        part: list[int] = []
        product = 1
        while rest and (product < size or not part):
            part.append(rest.pop(0))
            product *= part[-1]
        if product != size or not part:
            return None
        parts.append(part)
    return parts if not rest else None
