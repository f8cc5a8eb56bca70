"""Attention of a captured model: is it fused where the model's own is, and which masks are still made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

import partitioner.passes.ops.attention  # noqa: F401  registers partition::band_attention
from partitioner.passes.ir.model import Captured

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_BAND = torch.ops.partition.band_attention.default
_LEFT = ("is causal", "is causal, a buffer")


class FusedCalls(TorchFunctionMode):
    """Counts the calls of fused attention in what runs inside: ``number``."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def fused(captured: Captured) -> int:
    """How many operators are fused attention."""
    return sum(n.target in (_ATTENTION, _BAND) for n in captured.graph.nodes)


def masks_left(masks: Mapping[str, int]) -> bool:
    """Whether any of what :func:`masks_of` found is a causal mask that need not be made."""
    return any(kind in masks for kind in _LEFT)


def masks_of(captured: Captured, buffers: Mapping[str, Tensor]) -> dict[str, int]:
    """How many attentions have which mask.

    ``none``, ``causal`` and ``window``: nothing is materialised. ``computed``: the mask depends on the inputs or on
    parameters. ``constant``: it depends on neither, and is not causal alone. ``is causal``: it is, and should not be
    there; ``is causal, a buffer``: likewise, and the model keeps it in one of its ``buffers``, by name.
    """
    names = captured.placeholders
    constants = {p: captured.constants[n] for p, n in names.items() if n in captured.constants}
    kept = {p: buffers[n] for p, n in names.items() if n in buffers and p not in constants}
    with_constants: dict[fx.Node, Tensor | None] = {}
    with_buffers: dict[fx.Node, Tensor | None] = {}
    found: dict[str, int] = {}
    for node in captured.graph.nodes:
        if node.target is _BAND:
            kind = "window"
        elif node.target is _ATTENTION:
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
            kind = "causal" if causal else "none"
            if isinstance(mask, fx.Node):
                kind = _kind_of(_value(mask, constants, with_constants))
                if kind == "computed" and _is_causal(_value(mask, constants | kept, with_buffers)):
                    kind = "is causal, a buffer"
        else:
            continue
        found[kind] = found.get(kind, 0) + 1
    return found


def _kind_of(mask: Tensor | None) -> str:
    if mask is None:
        return "computed"
    return "is causal" if _is_causal(mask) else "constant"


def _is_causal(mask: Tensor | None) -> bool:
    if mask is None or mask.dim() < 2:
        return False
    shown = mask if mask.dtype == torch.bool else mask > -6e4
    return bool((shown == torch.ones(mask.shape[-2:], dtype=torch.bool).tril()).all())


def _value(node: fx.Node, constants: Mapping[str, Tensor], known: dict[fx.Node, Tensor | None]) -> Tensor | None:
    """The numbers of a node that depends on ``constants`` alone, ``None`` of any other."""
    stack = [node]
    while stack:
        top = stack[-1]
        waiting = [n for n in top.all_input_nodes if n not in known]
        if waiting and top not in known:
            stack += waiting
            continue
        stack.pop()
        if top.op == "placeholder":
            known[top] = constants.get(top.name)
        elif top not in known:
            whole = all(known[n] is not None for n in top.all_input_nodes)
            args, kwargs = fx.map_arg((top.args, top.kwargs), known.get)
            known[top] = top.target(*args, **{**kwargs, **_on_cpu(kwargs)}) if whole and callable(top.target) else None
    return known[node]


def _on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("cpu")} if "device" in kwargs else {}
