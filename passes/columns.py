"""What a loop over experts knows of each of them beside its rows, for all experts at once: shares, masks.

``shares[:, i]`` and ``(chosen == i)`` are of one expert each, and need no parameter of it. What is computed of them is
computed here once, with the experts in a dim more, the last; a row takes its own expert's.

Requires and keeps values on every node, and normal form. See ``passes/looped.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.infer import META
from passes.loops import Loop
from passes.numbers import Numbers
from passes.packed import Different
from passes.rewrite import Builder, shape, val

aten = torch.ops.aten
_SIZED = (aten.reshape.default, aten.expand.default)  # whose argument is the result's shape
_ONE_DIM = (aten.unsqueeze.default, aten.squeeze.dim)
_OVER = (aten.sum.dim_IntList, aten.any.dim)


@dataclass(frozen=True)
class Column:
    """A value of every expert: ``node`` has them in its last dim."""

    node: fx.Node


class Columns:
    """The columns of one loop, appended to a graph."""

    def __init__(self, build: Builder, loop: Loop, numbers: Numbers) -> None:
        self.build, self.loop, self.numbers = build, loop, numbers

    def picked(self, nodes: tuple[fx.Node, ...]) -> Column | None:
        """What stands for slices of one value, one for each expert in order."""
        first, wanted = nodes[0], range(self.loop.first, self.loop.first + len(nodes))
        if any(n.target is not aten.select.int or n.args[1] != first.args[1] for n in nodes):
            return None
        if [n.args[2] for n in nodes] != list(wanted) or len({self.numbers(n.args[0]) for n in nodes}) > 1:  # type: ignore[arg-type]
            return None
        whole: Any = first.args[0]
        dim: int = first.args[1] % len(shape(whole))  # type: ignore[operator, assignment]
        others = [d for d in range(len(shape(whole))) if d != dim]
        if dim < len(others):
            whole = self.build(aten.permute.default, whole, [*others, dim])
        if shape(whole)[-1] != len(nodes):
            whole = self.build(aten.slice.Tensor, whole, len(others), wanted.start, wanted.stop)
        return Column(whole)

    def of_choice(self) -> Column:
        """Which numbers are each expert's."""
        numbers = self.loop.of
        every = self.build(aten.arange.default, len(self.loop.parts), dtype=val(numbers).dtype, device=META)
        if self.loop.first:
            every = self.build(aten.add.Tensor, every, self.loop.first)
        apart = self.build(aten.unsqueeze.default, numbers, len(shape(numbers)))
        return Column(self.build(aten.eq.Tensor, apart, every))

    def made(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Column:
        """What stands for ``node``, of columns and of what all experts share. Raises :class:`Different`."""
        assert isinstance(node.target, torch._ops.OpOverload)
        value, rest, many = args[0], list(args[1:]), len(self.loop.parts)
        if node.target in _SIZED:
            operands = [value.node, [*shape(node), many]]
        elif node.target in _ONE_DIM:
            rank = max(len(shape(node)), len(shape(node.args[0])))  # type: ignore[arg-type]
            operands = [value.node, rest[0] % rank]
        elif node.target in _OVER:
            rank, dims = len(shape(node.args[0])), rest[0]  # type: ignore[arg-type]
            if dims is None or dims == []:  # all of them, of which the experts would be one
                raise Different
            over = [d % rank for d in dims] if isinstance(dims, list | tuple) else dims % rank
            operands = [value.node, over, *rest[1:]]
        elif node.target is aten.to.dtype or torch.Tag.pointwise in node.target.tags:
            operands = [self._widened(argument) for argument in args]
        else:
            raise Different
        return Column(self.build(node.target, *operands, **kwargs))

    def at(self, column: Column, keys: fx.Node, dim: int) -> fx.Node:
        """For each row its own expert's, by ``keys``; ``dim``: the one of the rows, beside dims of size 1."""
        sizes = shape(column.node)
        if any(size != 1 for d, size in enumerate(sizes[:-1]) if d != dim):
            raise Different
        rows = self.build(aten.reshape.default, column.node, [sizes[dim], sizes[-1]])
        own = self.build(aten.gather.default, rows, 1, self.build(aten.reshape.default, keys, [sizes[dim], 1]))
        return self.build(aten.reshape.default, own, list(sizes[:-1]))

    def _widened(self, argument: Any) -> Any:
        if isinstance(argument, Column):
            return argument.node
        if isinstance(argument, fx.Node) and val(argument).dim():
            return self.build(aten.unsqueeze.default, argument, val(argument).dim())
        return argument
