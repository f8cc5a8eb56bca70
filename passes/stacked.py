"""Experts that are modules of their own in a list, as one stack of them.

A loop over modules, each on all rows and times its own column of weights, adds up to products with stacked weights: the
same numbers in fewer operators, and experts that can be spread over ranks. The modules' parameters become one state
whose first dim counts them (:attr:`passes.blocks.State.parts`).

Requires and keeps values on every node. Requires normal form: products without bias, sums of two.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.assemble import Captured
from passes.packed import Different, Packing
from passes.regions import CHOICES
from passes.rewrite import Builder, shape
from passes.unused import drop_unused

aten = torch.ops.aten
_PRODUCTS = {aten.linear.default: True, aten.mm.default: False}  # whether the weight is [n, k]
_ON_DIM = {aten.split_with_sizes.default: 2, aten.slice.Tensor: 1, aten.softmax.int: 1}  # the place of their dim


def stack_experts(captured: Captured) -> Captured:
    """``captured`` with its lists of experts stacked; its graph is changed in place."""
    named = {o.value for o in captured.outputs} | {captured.loss, *captured.updates.values()}
    for head in reversed(list(captured.graph.nodes)):
        if head.target is aten.add.Tensor and head.name not in named and not is_inner(head):
            stacking = _Stacking(captured, head)
            if stacking.run():
                captured = stacking.packing.settle()
    return captured


def is_sum(node: fx.Node) -> bool:
    """Whether ``node`` adds two values of its own shape."""
    nodes = [a for a in node.args if isinstance(a, fx.Node)]
    return (
        node.target is aten.add.Tensor
        and len(nodes) == len(node.args) == 2
        and not node.kwargs
        and all(shape(n) == shape(node) for n in nodes)
    )


def is_inner(node: fx.Node) -> bool:
    """Whether ``node`` is an addend of a longer sum."""
    return len(node.users) == 1 and is_sum(next(iter(node.users)))


def addends_of(node: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
    """What ``node``, a sum, adds up, and the sums of two that it consists of."""
    found, sums = [], {node}
    for addend in node.all_input_nodes if len(node.all_input_nodes) == 2 else node.all_input_nodes * 2:
        if is_sum(addend) and len(addend.users) == 1:
            more, inner = addends_of(addend)
            found += more
            sums |= inner
        else:
            found.append(addend)
    return found, sums


class _Stacking:
    """One sum: its gated addends, walked together from their products down to the parameters."""

    def __init__(self, captured: Captured, head: fx.Node) -> None:
        self.packing = Packing(captured)
        self.head = head
        self.build = Builder(captured.graph, head)
        self.made: dict[tuple[fx.Node, ...], tuple[fx.Node, bool]] = {}
        self.visited: set[fx.Node] = set()
        self.packed: list[tuple[fx.Node, ...]] = []
        self.sums: set[fx.Node] = set()
        self.num = 0

    def run(self) -> bool:
        """Stack the sum's experts; ``False``, and nothing done, where it has none."""
        if not is_sum(self.head) or len(shape(self.head)) != 2:
            return False
        addends, self.sums = addends_of(self.head)
        gated = {n: found for n in addends if (found := self._gated(n)) is not None}
        if len(gated) < 2 or not self._is_chosen(list(gated)):
            return False
        self.num = len(gated)
        self.visited |= set(gated)
        outputs = [made for made, _ in gated.values()]
        try:
            self._check(tuple(outputs))
        except Different:
            return False
        if not self._is_apart():
            return False
        with self.build.graph.inserting_before(self.head):
            total = self._sum(outputs, [gate for _, gate in gated.values()])
            for other in [n for n in addends if n not in gated]:
                total = self.build(aten.add.Tensor, other, total)
        self.head.replace_all_uses_with(total)
        drop_unused(self.build.graph)
        return True

    def _gated(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """For an expert's output times its column of weights: both."""
        if node.target is not aten.mul.Tensor or len(node.users) != 1:
            return None
        for made, gate in (node.args, node.args[::-1]):
            if isinstance(made, fx.Node) and isinstance(gate, fx.Node):
                rows = shape(node)[0]
                if made.op == "call_function" and shape(made) == shape(node) and shape(gate) == [rows, 1]:
                    return made, gate
        return None

    def _is_chosen(self, addends: Sequence[fx.Node]) -> bool:
        """Whether the best of as many as there are addends are chosen before."""
        seen: set[fx.Node] = set()
        stack = list(addends)
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += node.all_input_nodes
        return any(n.target in CHOICES and shape(n.args[0])[-1:] == [len(addends)] for n in seen)  # type: ignore[arg-type]

    def _check(self, nodes: tuple[fx.Node, ...]) -> None:
        """Visit what makes ``nodes``; raises :class:`Different` unless all of it can be stacked."""
        if len(set(nodes)) == 1 or nodes in self.packed:
            return
        first = nodes[0]
        if len(set(nodes)) != len(nodes) or (
            any(n.op != first.op or n.target != first.target for n in nodes[1:]) and (first.op != "placeholder")
        ):
            raise Different
        if first.op == "placeholder":
            self.packing.check(nodes)
            self.packed.append(nodes)
            return
        self.visited |= set(nodes)
        flat = [_flat(n) for n in nodes]
        if any(len(f) != len(flat[0]) for f in flat):
            raise Different
        for arguments in zip(*flat, strict=True):
            if all(isinstance(a, fx.Node) for a in arguments):
                self._check(arguments)
            elif any(type(a) is not type(arguments[0]) or a != arguments[0] for a in arguments):
                raise Different
        if not self._has_form(first):
            raise Different

    def _has_form(self, node: fx.Node) -> bool:
        if node.target in _PRODUCTS:
            weight: Any = node.args[1]
            return len(node.args) == 2 and len(shape(node)) == 2 and len(shape(weight)) == 2
        if node.target in _ON_DIM or node.target is operator.getitem:
            return True
        return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags

    def _is_apart(self) -> bool:
        """Whether nothing else reads what the experts compute, or their parameters."""
        inner = self.visited | {n for nodes in self.packed for n in nodes}
        return bool(self.packed) and all(u in self.visited or u in self.sums for n in inner for u in n.users)

    def _sum(self, outputs: list[fx.Node], gates: list[fx.Node]) -> fx.Node:
        made, _ = self._stack(tuple(outputs))
        columns = self.build(aten.cat.default, gates, 1)
        weights = self.build(aten.unsqueeze.default, self.build(aten.transpose.int, columns, 0, 1), -1)
        return self.build(aten.sum.dim_IntList, self.build(aten.mul.Tensor, made, weights), [0])

    def _stack(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, bool]:
        """The stacked form of ``nodes``, and whether it is one: what all share stays as it is."""
        if len(set(nodes)) == 1:
            return nodes[0], False
        if nodes not in self.made:
            first = nodes[0]
            if first.op == "placeholder":
                self.made[nodes] = self.packing.pack(nodes), True
            else:
                self.made[nodes] = self._operator(nodes), True
        return self.made[nodes]

    def _operator(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        first = nodes[0]
        if first.target in _PRODUCTS:
            x, x_stacked = self._stack(_arguments(nodes, 0))
            weight, weight_stacked = self._stack(_arguments(nodes, 1))
            if _PRODUCTS[first.target]:
                dims = (1, 2) if weight_stacked else (0, 1)
                weight = self.build(aten.transpose.int, weight, *dims)
            x = x if x_stacked else self._repeated(x)
            weight = weight if weight_stacked else self._repeated(weight)
            return self.build(aten.bmm.default, x, weight)
        if first.target in _ON_DIM or first.target is operator.getitem:
            x, _ = self._stack(_arguments(nodes, 0))
            rest: list[Any] = list(first.args[1:])
            at = _ON_DIM.get(first.target)  # type: ignore[arg-type]
            if at is not None and len(rest) >= at and rest[at - 1] >= 0:
                rest[at - 1] += 1
            return self.build(first.target, x, *rest, **first.kwargs)
        rank = len(first.meta["val"].shape)
        args: list[Any] = []
        for place, argument in enumerate(first.args):
            if isinstance(argument, fx.Node):
                made, stacked = self._stack(_arguments(nodes, place))
                for _ in range(rank + 1 - len(shape(made)) if stacked else 0):
                    made = self.build(aten.unsqueeze.default, made, 1)
                args.append(made)
            else:
                args.append(argument)
        return self.build(first.target, *args, **first.kwargs)

    def _repeated(self, x: fx.Node) -> fx.Node:
        return self.build(aten.expand.default, self.build(aten.unsqueeze.default, x, 0), [self.num, *shape(x)])


def _flat(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    for argument in (*node.args, *(v for _, v in sorted(node.kwargs.items()))):
        found += list(argument) if isinstance(argument, list | tuple) else [argument]
    return found


def _arguments(nodes: tuple[fx.Node, ...], place: int) -> tuple[fx.Node, ...]:
    return tuple(n.args[place] for n in nodes)  # type: ignore[misc]
