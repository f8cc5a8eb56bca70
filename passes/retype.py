"""Make every floating type in a graph another one.

Requires: placeholders of the wanted type already or retyped here. Provides: values of the new type throughout; a model
that computes its norms and losses in float32 whatever its parameters are computes them in float64, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from passes.infer import propagate

_SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)


def as_type(given: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a type becomes where floating ones become ``dtype``: complex ones have parts of it where there is such."""
    if given.is_complex:
        return _WITH_PARTS.get(dtype, given)
    return dtype if given.is_floating_point else given


_WITH_PARTS = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def retype(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Turn every floating placeholder and every floating type among the arguments into ``dtype``, in place."""

    def retyped(argument: Any) -> Any:
        return as_type(argument, dtype) if isinstance(argument, torch.dtype) and argument not in _SMALL else argument

    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                node.meta["val"] = value.to(as_type(value.dtype, dtype))
        elif node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, retyped)
            node.kwargs = fx.node.map_aggregate(node.kwargs, retyped)
            if _takes_default(node):
                node.kwargs = {**node.kwargs, "dtype": dtype}
            elif dtype == torch.float64 and _promotes(node):
                _promote(graph, node, dtype)
    propagate(graph)


def _takes_default(node: fx.Node) -> bool:
    """Whether a floating value is made of torch's default type, since none is given."""
    value = node.meta.get("val")
    if node.all_input_nodes or not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return False
    schema = getattr(node.target, "_schema", None)
    named = schema is not None and any(a.name == "dtype" for a in schema.arguments)
    return named and node.kwargs.get("dtype") is None


def _promotes(node: fx.Node) -> bool:
    """Whether whole numbers are computed with as fractions, of torch's default type."""
    value, operands = node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]
    if not isinstance(value, Tensor) or not (value.dtype.is_floating_point or value.dtype.is_complex) or not operands:
        return False
    whole = all(isinstance(x, Tensor) and not x.dtype.is_floating_point and not x.dtype.is_complex for x in operands)
    name = str(getattr(node.target, "_schema", None) and node.target._schema.name)  # type: ignore[union-attr]
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return whole and pointwise and name not in _OF_GIVEN_TYPE


_OF_GIVEN_TYPE = ("aten::where", "aten::to", "aten::_to_copy", "aten::type_as")


def _promote(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> None:
    for operand in node.all_input_nodes:
        with graph.inserting_before(node):
            wide = graph.call_function(torch.ops.aten._to_copy.default, (operand,), {"dtype": dtype})
        wide.meta = {**node.meta, "val": operand.meta["val"].to(dtype)}
        node.replace_input_with(operand, wide)
