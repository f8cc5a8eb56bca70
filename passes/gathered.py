"""Products with gathered weights as products by expert: one matrix for each row, picked from a stack of them.

``bmm(weight[expert], x)`` reads a copy of an expert's matrix for every row; ``partition::expert_mm`` reads each once,
and says what it does. Requires and keeps values on every node.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes import experts
from passes.rewrite import Builder, shape
from passes.unused import drop_unused

aten = torch.ops.aten
_PRODUCTS = (aten.bmm.default, aten.matmul.default)
_MOVES = (
    aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int,
    aten.permute.default, aten.t.default, aten.expand.default, aten.clone.default, aten.slice.Tensor,
    aten.select.int, aten._to_copy.default, aten.to.dtype, aten.repeat_interleave.self_int,
)  # fmt: skip
_CHOICES: dict[Any, int] = {
    aten.topk.default: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.max.dim: 1,
    aten.min.dim: 1,
}
_PLACES = (aten.argmax.default, aten.argmin.default, aten.argsort.default)


def ungather(graph: fx.Graph) -> None:
    """Rewrite ``graph`` in place."""
    for node in list(graph.nodes):
        if node.target in _PRODUCTS and len(node.args) == 2:
            with graph.inserting_before(node):
                _rewrite(node, Builder(graph, node))
    drop_unused(graph)


def _rewrite(node: fx.Node, build: Builder) -> None:
    left, right = node.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if len(shape(left)) != 3 or len(shape(right)) != 3:
        return
    column = shape(right)[2] == 1 and _picked(left)
    row = shape(left)[1] == 1 and _picked(right)
    if column:
        stack, expert = column
        x, dim = right, 2
        stack = build(aten.transpose.int, stack, 1, 2)
    elif row:
        stack, expert = row
        x, dim = left, 1
    else:
        return
    rows = build(aten.squeeze.dim, x, dim)
    made = build(experts.ops.expert_mm.default, rows, stack, expert)
    whole = build(aten.unsqueeze.default, made, dim)
    if whole.meta["val"].dtype == node.meta["val"].dtype and shape(whole) == shape(node):
        for user in list(node.users):  # a squeeze that undoes the unsqueeze
            if user.target == aten.squeeze.dim and user.args[1] in (dim, dim - 3):
                user.replace_all_uses_with(made)
        node.replace_all_uses_with(whole)
        if x.target == aten.unsqueeze.default and x.args[1] in (dim, dim - 3):
            rows.replace_all_uses_with(x.args[0])  # type: ignore[arg-type]


def _picked(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The stack of matrices and the numbers of those that ``node`` picks, one for each row."""
    if node.target == aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        stack, picks = node.args[0], node.args[1][0]  # type: ignore[index]
    elif node.target == aten.index_select.default and node.args[1] == 0:
        stack, _, picks = node.args
    else:
        return None
    assert isinstance(stack, fx.Node) and isinstance(picks, fx.Node)
    if len(shape(stack)) != 3 or len(shape(picks)) != 1 or not _in_range(picks, shape(stack)[0]):
        return None
    return stack, picks


def _in_range(node: Any, size: int) -> bool:
    """Whether ``node`` is places of the best of at most ``size``: a number beyond is read otherwise by a look-up."""
    while isinstance(node, fx.Node):
        if node.target in _MOVES:
            node = node.args[0]
        elif node.target in _PLACES:
            return _counted(node) <= size
        elif node.target is operator.getitem:
            source, index = node.args
            if not (isinstance(source, fx.Node) and source.target in _CHOICES and index == 1):
                return False
            return _counted(source) <= size
        else:
            return False
    return False


def _counted(node: Any) -> int:
    """How many places a choice is made of: along its dim, the last one unless it says another."""
    among = shape(node.args[0])
    names = [a.name for a in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    dim = given.get("dim", -1)
    return among[dim] if isinstance(dim, int) and among else max([1, *among])
