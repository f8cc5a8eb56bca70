"""What a plan cannot hold, refused by the model's line.

Requires: a graph in normal form. Provides: operators of torch on tensors alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.errors import InputsError, UnsupportedError
from passes.rewrite import where

STRIDED = torch.strided
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Operators that torch computes in one type alone, which it only looks at where there are numbers: the first operands
# that have to be of one type.
_ONE_TYPE: dict[Any, int] = {
    torch.ops.aten.linear: 2,
    torch.ops.aten.matmul: 2,
    torch.ops.aten.mm: 2,
    torch.ops.aten.bmm: 2,
    torch.ops.aten.convolution: 2,
    torch.ops.aten.scaled_dot_product_attention: 3,
}


def refuse(graph: fx.Graph) -> None:
    """Raises :class:`UnsupportedError` for numbers taken out of tensors, sparse tensors, and for what is no operator of
    torch, :class:`InputsError` for a product of two types."""
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
        _check_types(node)


def _check_types(node: fx.Node) -> None:
    """Raise :class:`InputsError` where torch would refuse the types of what is multiplied."""
    count = _ONE_TYPE.get(getattr(node.target, "overloadpacket", None), 0)
    found = [a.meta["val"].dtype for a in node.args[:count] if isinstance(a, fx.Node)]
    if len(set(found)) > 1:
        types = " and ".join(str(dtype).removeprefix("torch.") for dtype in found)
        raise InputsError(
            f"{_name(node)} at {where(node)} is given {types}; expected operands of one type: convert the inputs "
            "or the parameters, or give precision= for both"
        )


def _name(node: fx.Node) -> str:
    named = not isinstance(node.target, torch._ops.OpOverload)
    return str(getattr(node.target, "__name__", node.target) if named else node.target)
