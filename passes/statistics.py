"""Operators that write to running statistics, of which their schemas say nothing.

Requires: a flat graph of one export. Provides: the same graph with those among them spelled out that torch's own
functionalisation does not see through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_NORMS = (
    aten.batch_norm.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
    aten.instance_norm.default,
)
_STATISTICS, _FROM_BATCH = (3, 4), 5  # the places of their operands, and of what says that these are changed


def spell_out(graph: fx.Graph) -> bool:
    """Rewrite ``graph`` in place; whether some operator in it changes running statistics."""
    found = [n for n in graph.nodes if n.target in _NORMS and n.args[_FROM_BATCH] and _changed(n)]
    for node in found:
        if node.target is aten.instance_norm.default:
            _as_batch_norm(graph, node)
    return bool(found)


def _changed(node: fx.Node) -> list[fx.Node]:
    return [a for a in (node.args[place] for place in _STATISTICS) if isinstance(a, fx.Node)]


def _as_batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Instance norm as torch defines it: batch norm with a channel for each channel of each sample. The statistics are
    moved for each sample, and what they become is averaged."""
    x, weight, bias, *statistics, _, momentum, eps, cudnn = node.args
    assert isinstance(x, fx.Node), node
    samples, channels, *rest = x.meta["val"].shape

    def add(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta = dict(node.meta)
        return made

    def repeated(operand: Any) -> Any:
        return add(aten.repeat.default, operand, [samples]) if isinstance(operand, fx.Node) else operand

    with graph.inserting_before(node):
        of_samples = [repeated(s) for s in statistics]
        each = add(aten.reshape.default, x, [1, samples * channels, *rest])
        normed = add(
            aten.batch_norm.default, each, repeated(weight), repeated(bias), *of_samples, True, momentum, eps, cudnn
        )
        for held, moved in zip(statistics, of_samples, strict=True):
            if isinstance(held, fx.Node):
                seen = add(aten.mean.dim, add(aten.reshape.default, moved, [samples, channels]), [0])
                add(aten.copy_.default, held, seen)
        node.replace_all_uses_with(add(aten.reshape.default, normed, [samples, channels, *rest]))
    graph.erase_node(node)
