"""Put together again what normal form took apart: a bias that follows its matrix product directly.

Requires: a local graph (after the last :func:`passes.shard.shard_block`). Provides: the same function in fewer
operators.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.blocks import Block
from passes.infer import refresh
from passes.unused import drop_unused

aten = torch.ops.aten


def fuse_bias(block: Block) -> Block:
    """``linear(x, w) + b`` becomes ``linear(x, w, b)``, ``mm(a, b) + c`` becomes ``addmm(c, a, b)``."""
    block = block.copy()
    for node in list(block.graph.nodes):
        if node.target != aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        for product, bias in (node.args, node.args[::-1]):
            if _fusible(product, bias, node):
                _fuse(node, product, bias)
                break
    drop_unused(block.graph)
    return block


def _fusible(product: object, bias: object, node: fx.Node) -> bool:
    if not (isinstance(product, fx.Node) and isinstance(bias, fx.Node)) or len(product.users) != 1:
        return False
    if product.target not in (aten.linear.default, aten.mm.default) or len(product.args) != 2:
        return False
    a, b, out = product.meta["val"], bias.meta["val"], node.meta["val"]
    return bool(b.dim() == 1 and b.shape[0] == a.shape[-1] and a.shape == out.shape and a.dtype == b.dtype == out.dtype)


def _fuse(node: fx.Node, product: fx.Node, bias: fx.Node) -> None:
    with node.graph.inserting_before(node):
        if product.target == aten.linear.default:
            fused = node.graph.call_function(aten.linear.default, (*product.args, bias))
        else:
            fused = node.graph.call_function(aten.addmm.default, (bias, *product.args))
    fused.meta.update(product.meta)
    refresh(fused)
    node.replace_all_uses_with(fused)
    node.graph.erase_node(node)
