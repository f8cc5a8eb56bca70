"""Undo the flattening of leading dims around a matrix product.

``reshape(reshape(x, [b * s, k]) @ w + bias, [b, s, n])`` is ``linear(x, w.t()) + bias``: the same product, in which batch
and sequence are dims of their own, so that each can be sharded.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.rewrite import Builder, aten, shape

_PRODUCTS = (aten.mm.default, aten.linear.default)


def unflatten_products(graph: fx.Graph) -> None:
    """Rewrite ``graph`` in place. Requires: normal form (``reshape`` alone, biases apart)."""
    for node in list(graph.nodes):
        if node.target is aten.reshape.default:
            _unflatten(graph, node)
    graph.eliminate_dead_code()


def _unflatten(graph: fx.Graph, node: fx.Node) -> None:
    sizes = shape(node)
    value: Any = node.args[0]
    bias: Any = None
    if value.target is aten.add.Tensor and not value.kwargs and len(value.users) == 1:
        value, bias = value.args
    if not _is_flat_product(value, sizes) or not _is_bias(bias, sizes[-1]):
        return
    rows, weight = value.args
    source = rows.args[0] if rows.target is aten.reshape.default else rows
    split = [*sizes[:-1], shape(rows)[-1]]
    with graph.inserting_before(value):
        build = Builder(graph, value)
        whole = source if shape(source) == split else build(aten.reshape.default, source, split)
        if value.target is aten.mm.default:
            weight = build(aten.t.default, weight)
        product = build(aten.linear.default, whole, weight)
    with graph.inserting_before(node):
        build = Builder(graph, node.args[0])  # type: ignore[arg-type]
        node.replace_all_uses_with(product if bias is None else build(aten.add.Tensor, product, bias))


def _is_flat_product(value: Any, sizes: list[int]) -> bool:
    """Whether ``value`` is a product of ``[b * s, k]``, read here alone, where ``sizes`` are ``[b, s, n]``."""
    if not isinstance(value, fx.Node) or value.target not in _PRODUCTS or len(value.users) > 1:
        return False
    flat = shape(value)
    return len(value.args) == 2 and len(flat) == 2 and len(sizes) > 2 and sizes[-1] == flat[-1]


def _is_bias(bias: Any, size: int) -> bool:
    return bias is None or (isinstance(bias, fx.Node) and shape(bias) == [size])
