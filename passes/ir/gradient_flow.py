"""Find which values need a gradient, which gradients each call of a block reads and returns, and which parameters are
trained.

:func:`mark_gradients` marks the nodes of a block for all of its calls at once; sharding layouts are chosen from these
marks. Requires: meta tensors (``node.meta["val"]``) on every node. Provides: ``node.meta["grad"]`` on every node of
every block, which is true if some call of the block needs the node's gradient.

:func:`compute_gradient_flow` computes exactly which gradients the backward of each call reads and returns, for
programs.

:func:`freeze_unreached` removes ``requires_grad`` from parameters that no gradient reaches, because every path to the
loss leads through ``detach`` or through values without gradients. Torch leaves the gradient of such a parameter
``None``, so no optimizer changes it; with a gradient of zeros, weight decay would change it. Requires: a captured graph
in normal form (rewritten to a small set of operators).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from partitioner.passes.ir.model import Block, Captured, FoldedModel


def stops_gradient(node: fx.Node) -> bool:
    """Return whether ``node`` is a ``detach``, so that no gradient flows back to its operand."""
    return bool(node.target == torch.ops.aten.detach.default)


def is_differentiable(value: Any) -> bool:
    """Return whether ``value``, a meta tensor, has a dtype that can carry a gradient (floating-point or complex). For a
    tuple of meta tensors, return whether any of them has such a dtype."""
    if isinstance(value, tuple | list):
        return any(is_differentiable(v) for v in value)
    return isinstance(value, Tensor) and can_have_gradient(value.dtype)


def can_have_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of the dtype ``dtype`` and their gradients are summed: float32 for
    floating-point dtypes of less than 4 bytes, ``dtype`` itself for all others."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def mark_block(block: Block, sources: set[str]) -> tuple[bool, ...]:
    """Set ``node.meta["grad"]`` on the nodes of ``block``, the graph of a piece of the model: whether a gradient flows
    from the node back to one of ``sources``. Return a tuple of these flags for the outputs of the block, in order.

    Args:
        sources: names of the placeholders that need a gradient.
    """
    for node in block.graph.nodes:
        if node.op == "placeholder":
            node.meta["grad"] = node.name in sources and is_differentiable(node.meta["val"])
        elif node.op == "call_function":
            node.meta["grad"] = (
                is_differentiable(node.meta["val"])
                and not stops_gradient(node)
                and any(n.meta["grad"] for n in node.all_input_nodes)
            )
            if node.target is operator.getitem:
                node.meta["grad"] = node.meta["grad"] and is_differentiable(node.meta["val"])
    return tuple(bool(n.meta["grad"]) for n in block.outputs)


def mark_gradients(model: FoldedModel, train: bool = True) -> set[str]:
    """Set ``node.meta["grad"]`` (whether the node needs a gradient) in all blocks of ``model``. Return the names of all
    call outputs that need a gradient.

    A block is the graph of a piece of the model, such as a layer, which several calls execute. The graph is marked once
    for all of its calls: a placeholder needs a gradient if it needs one in any call.

    Args:
        train: if false, no value needs a gradient.
    """
    sources: dict[str, set[str]] = {name: set() for name in model.blocks}
    needed: set[str] = set()
    changed = train
    while changed:
        changed = False
        for call in model.calls:
            block, wanted = model.blocks[call.block], sources[call.block]
            bound = [*zip(block.states, call.states, strict=True), *zip(block.inputs, call.inputs, strict=True)]
            new = {
                p for p, name in bound if (name in needed or _is_trainable_parameter(model, name)) and p not in wanted
            }
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


def _is_trainable_parameter(model: FoldedModel, name: str) -> bool:
    state = model.states.get(name)
    return state is not None and state.kind == "parameter" and state.requires_grad


class CallLike(Protocol):
    """Protocol of a call, the execution of a block (the graph of a piece of the model, such as a layer) on given
    values.

    ``block``: the block's name. ``states``: the names of the parameters and buffers that the call reads. ``inputs``:
    the names of the other values that it reads. ``outputs``: the names of the values that it produces.
    """

    @property
    def block(self) -> str: ...
    @property
    def states(self) -> tuple[str, ...]: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


def find_gradient_paths(block: Block) -> tuple[tuple[int, ...], ...]:
    """Return a tuple with, for each output of the graph ``block``, the positions of the placeholders that the gradient
    of this output reaches.

    Positions are indices from 0: first the placeholders of parameters and buffers, then those of other inputs.
    """
    reached: dict[fx.Node, frozenset[int]] = {}
    for position, node in enumerate(block.placeholders):
        reached[node] = frozenset([position] if is_differentiable(node.meta["val"]) else [])
    for node in block.graph.nodes:
        if node.op == "call_function":
            stops = stops_gradient(node) or not is_differentiable(node.meta["val"])
            reached[node] = frozenset() if stops else frozenset().union(*(reached[n] for n in node.all_input_nodes))
    return tuple(tuple(sorted(reached[n])) for n in block.outputs)


@dataclass(frozen=True)
class GradientFlow:
    """The gradients that flow between the calls of a model; a call is the execution of a block, such as a layer.

    ``values``: names of the values through which a gradient flows from the loss to a trained parameter. ``states`` and
    ``inputs``: for each call, in order, the names of the parameters and of the input values that receive a gradient
    from its backward. If both are empty for a call, the call has no backward.
    """

    values: frozenset[str]
    states: tuple[tuple[str, ...], ...]
    inputs: tuple[tuple[str, ...], ...]

    def has_backward(self, call: int) -> bool:
        return bool(self.states[call] or self.inputs[call])


def compute_gradient_flow(
    calls: Sequence[CallLike],
    paths: Mapping[str, tuple[tuple[int, ...], ...]],
    trainable: Collection[str],
    loss: str | None,
) -> GradientFlow:
    """Find the values, parameters and inputs of calls that receive a gradient when ``loss`` is differentiated, and
    return them.

    Args:
        calls: the calls of blocks (graphs of pieces of the model, such as layers), in execution order.
        paths: name of a block -> for each of its outputs, the positions of the placeholders that its gradient reaches
            (indices from 0: parameters and buffers first, then inputs).
        trainable: names of the parameters that are trained.
        loss: name of the loss value; ``None`` means no gradients.
    """
    needed = set(trainable)
    for call in calls:
        bound = (*call.states, *call.inputs)
        for value, path in zip(call.outputs, paths[call.block], strict=True):
            if any(bound[i] in needed for i in path):
                needed.add(value)
    live = {loss} & needed
    states: list[tuple[str, ...]] = []
    inputs: list[tuple[str, ...]] = []
    for call in reversed(calls):
        bound = (*call.states, *call.inputs)
        taken = [p for v, p in zip(call.outputs, paths[call.block], strict=True) if v in live]
        reached = {bound[i] for path in taken for i in path if bound[i] in needed}
        states.append(tuple(s for s in dict.fromkeys(call.states) if s in reached))
        inputs.append(tuple(v for v in dict.fromkeys(call.inputs) if v in reached))
        live |= set(inputs[-1])
    return GradientFlow(frozenset(v for v in live if v is not None), tuple(states[::-1]), tuple(inputs[::-1]))


def freeze_unreached(captured: Captured) -> Captured:
    """Return ``captured`` with ``requires_grad`` set to false for parameters that no gradient of the loss reaches, so
    that no optimizer changes them, as in torch."""
    if captured.loss is None:
        return captured
    reached = _find_gradient_nodes(captured.graph, captured.loss)
    trained = {captured.placeholders[n] for n in reached if n in captured.placeholders}
    states = {
        name: replace(state, requires_grad=state.requires_grad and name in trained)
        for name, state in captured.states.items()
    }
    return captured.with_(states=states)


def _find_gradient_nodes(graph: fx.Graph, loss: str) -> set[str]:
    """Return the names of the nodes of ``graph`` that the gradient of the node ``loss`` reaches."""
    reached = {loss}
    for node in reversed(graph.nodes):
        if node.name in reached and node.op == "call_function" and not stops_gradient(node):
            reached |= {n.name for n in node.all_input_nodes if is_differentiable(n.meta["val"])}
    return reached
