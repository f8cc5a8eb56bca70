"""Parameters of the experts in a loop, for all experts at once: stacks of their own, or slices of what holds all.

Requires and keeps values on every node, and normal form. See ``passes/looped.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.loops import Loop
from passes.merged import Packed, Rows, Stack
from passes.packed import Different, Packing
from passes.rewrite import Builder, shape

aten = torch.ops.aten


class Weights:
    """The parameters that the experts of one loop read, appended to a graph where they are read."""

    def __init__(self, packing: Packing, build: Builder, loop: Loop) -> None:
        self.packing, self.build, self.loop = packing, build, loop
        self.read = False  # whether any is

    def sliced(self, nodes: tuple[fx.Node, ...]) -> Packed | None:
        """Each expert's part of a state of all, in order."""
        source: Any = nodes[0].args[0] if nodes[0].target is aten.select.int else None
        captured, first = self.packing.captured, self.loop.first
        if source is None or captured.placeholders.get(source.name) not in captured.states:
            return None
        if [(n.target, *n.args) for n in nodes] != [(aten.select.int, source, 0, first + i) for i in range(len(nodes))]:
            return None
        if shape(source)[0] == len(nodes):
            return Packed(source)
        return Packed(self.build(aten.slice.Tensor, source, 0, first, first + len(nodes)))

    def of_all(self, stack: Stack | Packed) -> fx.Node:
        """One value for all experts, which its first dim counts."""
        self.read = True
        return stack.node if isinstance(stack, Packed) else self.packing.pack(stack.nodes)

    def turned(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packed:
        """A parameter with its dims in another order, or of another type. Raises :class:`Different`."""
        whole, rank, rest = self.of_all(args[0]), len(shape(node)), list(args[1:])
        if node.target is aten.t.default and rank == len(rest) + 2:
            return Packed(self.build(aten.transpose.int, whole, 1, 2))
        if node.target is aten.transpose.int:
            rest = [d % rank + 1 for d in rest]
        elif node.target is aten.permute.default:
            rest = [[0, *(d % rank + 1 for d in rest[0])]]
        elif node.target is not aten.to.dtype:
            raise Different
        return Packed(self.build(node.target, whole, *rest, **kwargs))

    def by_row(self, node: fx.Node, stack: Stack | Packed, rows: Rows, expert: Callable[[], fx.Node]) -> fx.Node:
        """For each row the parameter of its ``expert``, where an operator reads elements that stand beside each other.
        Raises :class:`Different` where it does not."""
        assert isinstance(node.target, torch._ops.OpOverload)
        whole = self.of_all(stack)
        own = shape(whole)[1:]
        after = len(shape(node)) - 1 - rows.dim  # dims behind the rows
        if torch.Tag.pointwise not in node.target.tags or any(s != 1 for s in own[: max(0, len(own) - after)]):
            raise Different
        found = self.build(aten.index_select.default, whole, 0, expert())
        kept = own[max(0, len(own) - after) :]
        return self.build(aten.reshape.default, found, [shape(rows.node)[rows.dim], *[1] * (after - len(kept)), *kept])
