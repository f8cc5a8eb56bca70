"""Which values need a gradient.

Requires: values (``val``) on every node. Provides: ``node.meta["grad"]`` on every node of every block, true where some
call of the block needs it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from passes.blocks import Block, FoldedModel


def stops_gradient(node: fx.Node) -> bool:
    """Whether no gradient passes ``node``, whatever reads it."""
    return bool(node.target == torch.ops.aten.detach.default)


def differentiable(value: Any) -> bool:
    """Whether a (meta) value is of a type that can carry a gradient."""
    if isinstance(value, tuple | list):
        return any(differentiable(v) for v in value)
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of ``dtype`` are added up, gradients among them: float32 for shorter ones."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def mark_block(block: Block, sources: set[str]) -> tuple[bool, ...]:
    """Mark the nodes of ``block`` that depend on the placeholders ``sources``; which outputs need a gradient."""
    for node in block.graph.nodes:
        if node.op == "placeholder":
            node.meta["grad"] = node.name in sources and differentiable(node.meta["val"])
        elif node.op == "call_function":
            node.meta["grad"] = (
                differentiable(node.meta["val"])
                and not stops_gradient(node)
                and any(n.meta["grad"] for n in node.all_input_nodes)
            )
            if node.target is operator.getitem:
                node.meta["grad"] = node.meta["grad"] and differentiable(node.meta["val"])
    return tuple(bool(n.meta["grad"]) for n in block.outputs)


def mark_gradients(model: FoldedModel, train: bool = True) -> set[str]:
    """Mark all blocks; the names of the values between calls that need a gradient.

    A block type is marked once for all of its calls: a placeholder needs a gradient if it does in any of them.
    """
    sources: dict[str, set[str]] = {name: set() for name in model.blocks}
    needed: set[str] = set()
    changed = train
    while changed:
        changed = False
        for call in model.calls:
            block, wanted = model.blocks[call.block], sources[call.block]
            bound = [*zip(block.states, call.states, strict=True), *zip(block.inputs, call.inputs, strict=True)]
            new = {p for p, name in bound if (name in needed or _trainable(model, name)) and p not in wanted}
            if new or not wanted:
                wanted |= new
            for value, grad in zip(call.outputs, mark_block(block, wanted), strict=True):
                if grad and value not in needed:
                    needed.add(value)
                    changed = True
    if not train:
        for block in model.blocks.values():
            mark_block(block, set())
    return needed


def _trainable(model: FoldedModel, name: str) -> bool:
    state = model.states.get(name)
    return state is not None and state.kind == "parameter" and state.requires_grad
