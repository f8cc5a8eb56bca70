"""Values that are zero whatever a graph is given, taken out of it.

``x - detach(x)`` is zero, and there for its gradient alone (``passes/own_gradients.py``, and straight-through tricks).
Once the gradient is a graph of its own, nobody needs the zero, nor what is linear in it: a value that it was added to
is taken instead, and what was computed for it goes. Infinite values, of which the difference is no number, are not
told apart.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from passes.unused import drop_unused

aten = torch.ops.aten

# Zero if either operand is; if the first is; if both are, and else the other one.
_EITHER = frozenset((aten.mul.Tensor, aten.mm.default, aten.bmm.default))
_FIRST = frozenset(
    (
        aten.div.Tensor,
        aten.mul.Scalar,
        aten.div.Scalar,
        aten.neg.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.tanh_backward.default,
        aten.sigmoid_backward.default,
        aten.silu_backward.default,
        aten.gelu_backward.default,
        aten.threshold_backward.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    )
)
_BOTH = frozenset((aten.add.Tensor, aten.sub.Tensor))


def take_out_zeros(graph: fx.Graph) -> None:
    """Take out of ``graph`` what is zero by construction, where something else is left. Aliases are gone before."""
    zeros: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not node.args or not isinstance(node.meta.get("val"), Tensor):
            continue
        first, second = (*node.args, None)[:2]
        one, other = (isinstance(o, fx.Node) and o in zeros for o in (first, second))
        if _vanishes(node, one, other):
            zeros.add(node)
        elif node.target in _BOTH and other and _alike(first, node):
            node.replace_all_uses_with(first)
        elif node.target == aten.add.Tensor and one and _alike(second, node) and not node.kwargs:
            node.replace_all_uses_with(second)
    if zeros:
        drop_unused(graph)


def _vanishes(node: fx.Node, first: bool, second: bool) -> bool:
    """Whether ``node`` is zero, whose ``first`` or ``second`` operand may be."""
    if node.target in _EITHER:
        return first or second
    if node.target in _FIRST:
        return first
    if node.target == aten.sub.Tensor and node.args[0] is node.args[1] and not node.kwargs:
        return True
    return node.target in _BOTH and first and second


def _alike(operand: object, node: fx.Node) -> bool:
    """Whether ``operand`` can stand for ``node``: of its shape, type and memory order."""
    if not isinstance(operand, fx.Node):
        return False
    one, other = operand.meta.get("val"), node.meta["val"]
    if not isinstance(one, Tensor) or one.dtype != other.dtype:
        return False
    return tuple(one.shape) == tuple(other.shape) and one.stride() == other.stride()
