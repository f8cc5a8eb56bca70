"""What a plan cannot hold, refused by the model's line.

Requires: a graph in normal form. Provides: operators of torch on tensors alone.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.errors import UnsupportedError
from passes.rewrite import where

STRIDED = torch.strided
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def refuse(graph: fx.Graph) -> None:
    """Raises :class:`UnsupportedError` for numbers taken out of tensors, sparse tensors, and for what is no operator of
    torch."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.meta.get("val"), _NUMBERS):
            raise UnsupportedError(
                f"{_name(node)} at {where(node)} takes a number out of a tensor, which plans do not know beforehand; "
                "keep it a tensor of no dims (no item(), float() or int()), or pass it as an input"
            )
        sparse = [v for v in pytree.tree_leaves(node.meta.get("val")) if getattr(v, "layout", STRIDED) is not STRIDED]
        if sparse:
            raise UnsupportedError(
                f"{_name(node)} at {where(node)} makes a tensor of layout {sparse[0].layout}; expected dense ones: "
                "write a product with a sparse matrix as index_add of rows that its columns select, times its values"
            )
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            raise UnsupportedError(
                f"{_name(node)} at {where(node)} is no operator of torch and cannot be partitioned; write the line "
                "with operators on tensors"
            )


def _name(node: fx.Node) -> str:
    named = not isinstance(node.target, torch._ops.OpOverload)
    return str(getattr(node.target, "__name__", node.target) if named else node.target)
