"""Whether turns of a loop that a trace took besides come to nothing. See ``passes/hits.py`` and ``passes/guards.py``.

The trace went through all experts, where the model goes through those that some row has chosen. Of it there are two
more graphs: the same with the masks of every other expert empty, and that of a trace which left out their turns. In
normal form what is filled, chosen or added up by an empty mask goes away; then both must be the same graph.

Requires values on every node, and normal form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.errors import UnsupportedError
from passes.loops import LINEAR, RESHAPES
from passes.numbers import Numbers
from passes.rewrite import shape
from passes.unused import drop_unused

aten = torch.ops.aten
_CASTS = {aten.to.dtype, aten._to_copy.default, aten.clone.default}
_KEEP_TRUE = {*RESHAPES, *_CASTS}
_KEEP_FALSE = {*_KEEP_TRUE, aten.ne.Scalar, aten.gt.Scalar, aten.any.default, aten.any.dim, aten.any.dims,
               aten.sum.default, aten.sum.dim_IntList}  # fmt: skip
_KEEP_ZERO = (LINEAR | _CASTS) - {aten.mul.Tensor}
_ADDING = {aten.index_add.default: 3, aten.scatter_add.default: 3, aten.index_put.default: 2}  # where what is added is


def check_turns(empty: fx.Graph, left_out: fx.Graph) -> None:
    """Raise :class:`UnsupportedError` where the two are not the same. The graphs are changed."""
    alike: dict[tuple[str, str, str], int] = {}
    outputs = []
    for graph in (empty, left_out):
        _without_nothing(graph)
        (last,) = graph.find_nodes(op="output")
        outputs.append(list(map(Numbers(alike), last.args[0])))
    if outputs[0] != outputs[1]:
        raise UnsupportedError(
            "forward leaves out the experts that no row has chosen, and a turn does more than to add to its rows, so "
            "that a loop through all of them, which a plan needs, is not the same; write it as one that goes through "
            "all (for i in range(num_experts)), and compute what depends on which were chosen from their masks"
        )


def _without_nothing(graph: fx.Graph) -> None:
    """Drop what empty masks select."""
    false, true, zero = set[Any](), set[Any](), set[Any]()
    for node in list(graph.nodes):
        args: Any = node.args
        if node.target is aten.full.default and args[1] in (0, False):
            (zero if node.meta["val"].is_floating_point() else false).add(node)
        elif node.target is aten.masked_fill.Scalar:
            if args[1] in true and args[2] == 0:
                zero.add(node)
            elif args[1] in false:
                node.replace_all_uses_with(args[0])
        elif node.target is aten.where.self and args[0] in false:
            _stand_in(node, args[2])
        elif node.target is aten.logical_not.default:
            true |= {node} if args[0] in false else set()
        elif node.target is aten.add.Tensor and len(args) == 2 and not node.kwargs:
            for kept, added in (args, args[::-1]):
                if _is_in(added, zero) and isinstance(kept, fx.Node):
                    _stand_in(node, kept)
                    break
        elif node.target in _ADDING:
            accumulates = node.target is not aten.index_put.default or args[3:4] == (True,)
            if accumulates and args[_ADDING[node.target]] in zero:
                _stand_in(node, args[0])
        elif node.target is aten.mul.Tensor:
            zero |= {node} if any(_is_in(a, zero) for a in args) else set()
        else:
            for kind, keeping in ((false, _KEEP_FALSE), (true, _KEEP_TRUE), (zero, _KEEP_ZERO)):
                if node.target in keeping and _is_in(args[0], kind):
                    kind.add(node)
    drop_unused(graph)


def _is_in(value: Any, nodes: set[fx.Node]) -> bool:
    return isinstance(value, fx.Node) and value in nodes


def _stand_in(node: fx.Node, other: Any) -> None:
    if shape(other) == shape(node) and other.meta["val"].dtype == node.meta["val"].dtype:
        node.replace_all_uses_with(other)
