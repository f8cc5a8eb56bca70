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


def retype(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Turn every floating placeholder and every floating type among the arguments into ``dtype``, in place."""

    def retyped(argument: Any) -> Any:
        floating = isinstance(argument, torch.dtype) and argument.is_floating_point and argument not in _SMALL
        return dtype if floating else argument

    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.dtype.is_floating_point:
                node.meta["val"] = value.to(dtype)
        elif node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, retyped)
            node.kwargs = fx.node.map_aggregate(node.kwargs, retyped)
            if _takes_default(node):
                node.kwargs = {**node.kwargs, "dtype": dtype}
    propagate(graph)


def _takes_default(node: fx.Node) -> bool:
    """Whether a floating value is made of torch's default type, since none is given."""
    value = node.meta.get("val")
    if node.all_input_nodes or not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return False
    schema = getattr(node.target, "_schema", None)
    named = schema is not None and any(a.name == "dtype" for a in schema.arguments)
    return named and node.kwargs.get("dtype") is None
