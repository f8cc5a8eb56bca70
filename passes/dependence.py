"""Which gradients flow where, call by call: what backward takes, and what it gives.

``passes/gradients.py`` marks the nodes of a block type for all of its calls at once, to decide on layouts; programs
need the exact answer of each call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from passes.blocks import Block
from passes.gradients import differentiable, stops_gradient


class Run(Protocol):
    """A call of a block: ``passes.blocks.Call`` or ``runtime.program.CallData``."""

    @property
    def block(self) -> str: ...
    @property
    def states(self) -> tuple[str, ...]: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


def gradient_paths(block: Block) -> tuple[tuple[int, ...], ...]:
    """For each output, the positions of the placeholders (states, then inputs) that its gradient reaches."""
    reached: dict[fx.Node, frozenset[int]] = {}
    for position, node in enumerate(block.placeholders):
        reached[node] = frozenset([position] if differentiable(node.meta["val"]) else [])
    for node in block.graph.nodes:
        if node.op == "call_function":
            stops = stops_gradient(node) or not differentiable(node.meta["val"])
            reached[node] = frozenset() if stops else frozenset().union(*(reached[n] for n in node.all_input_nodes))
    return tuple(tuple(sorted(reached[n])) for n in block.outputs)


@dataclass(frozen=True)
class GradientFlow:
    """``values``: those through which a gradient flows, from the loss to a trainable state. Then, for each call, the
    states and the input values that its backward adds to; both empty: the call has no backward."""

    values: frozenset[str]
    states: tuple[tuple[str, ...], ...]
    inputs: tuple[tuple[str, ...], ...]

    def has_backward(self, call: int) -> bool:
        return bool(self.states[call] or self.inputs[call])


def gradient_flow(
    calls: Sequence[Run],
    paths: Mapping[str, tuple[tuple[int, ...], ...]],
    trainable: Collection[str],
    loss: str | None,
) -> GradientFlow:
    """The gradients of ``calls``, which stand in execution order. ``paths``: :func:`gradient_paths` of each block."""
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
