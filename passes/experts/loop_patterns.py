"""Recognise loops over experts in a graph, and represent the merged form of corresponding nodes of all experts.

Requires and keeps meta tensors (``node.meta["val"]``) on every node, and normal form (products without bias, sums of
two operands). ``passes/experts/loops.py`` uses these classes to rewrite a loop.

:func:`find_loops` finds the ends of loops: sums and ``where`` chains that combine one output for each expert. The
output of an expert is zero, or not selected, in all rows (tokens) except the expert's own.

The classes are merged forms of nodes that correspond to each other in the iterations of all experts. ``ExpertColumn``
and ``ExpertMask`` stand for values of one expert that need no parameter of it, such as ``shares[:, i]`` and ``(chosen
== i)``. Such values are computed once for all experts, with an additional last dim of experts, from which each row
reads its own expert's entry. ``ExpertParameter`` and ``PackedParameter`` stand for parameters: one tensor for each
expert, or one tensor that holds all experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from partitioner.passes.experts.routing_masks import RoutingChoice, match_equality
from partitioner.passes.experts.stacked_modules import (
    NotMergeable,
    ParameterStacker,
    is_inner_sum,
    is_plain_sum,
    list_addends,
)
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.rewrite import Builder, get_node_tensor, list_node_sizes
from partitioner.passes.ir.value_numbering import ValueNumbers

aten = torch.ops.aten

RESHAPES = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default)
SCALED = (aten.mul.Tensor, aten.div.Tensor)
LINEAR = {  # operators that are linear in their first operand
    *RESHAPES, *SCALED, aten.permute.default, aten.transpose.int, aten.sum.dim_IntList, aten.to.dtype,
}  # fmt: skip
_MIN_EXPERTS = 2  # minimum number of experts of a loop


@dataclass(frozen=True)
class ExpertLoop:
    """A loop over the experts of a mixture in a graph. Each expert computes all rows (tokens). A sum, or a chain of
    ``where`` operators, then combines the experts' outputs, so that each output counts only in the rows that chose its
    expert.

    ``outputs[i]`` is the output of expert ``first + i``. The expert's rows are those where ``chosen``, the tensor with
    the expert numbers that rows chose, equals ``first + i``. Dim ``j`` of the experts' masks is dim ``dims[j]`` of
    ``chosen``. ``chain``: the nodes of the sum or of the ``where`` operators. ``others``: operands of the chain that
    are not an expert's output. ``adds``: whether the chain is a sum. ``mask_shape``: the shape of the masks of the
    ``where`` operators; empty for a sum.
    """

    outputs: tuple[fx.Node, ...]
    chosen: fx.Node
    dims: tuple[int, ...]
    first: int
    others: tuple[fx.Node, ...]
    chain: frozenset[fx.Node]
    adds: bool
    mask_shape: tuple[int, ...] = ()  # empty for a sum


def find_loops(head: fx.Node, numbers: ValueNumbers) -> Iterator[ExpertLoop]:
    """Yield the loops over experts of a mixture whose last addition or ``where`` is the node ``head``; nothing if there
    are none. Such a loop computes each expert on all rows (tokens), and combines the experts' outputs by a sum or by
    ``where``.

    Args:
        numbers: assigns equal integers to nodes that compute the same value.
    """
    if is_plain_sum(head) and not is_inner_sum(head):
        yield from _find_sum_loops(head, numbers)
    elif _is_where(head) and not any(_is_where(u) and u.args[2] is head for u in head.users):
        yield from _find_choice_loops(head, numbers)


def _find_sum_loops(head: fx.Node, numbers: ValueNumbers) -> Iterator[ExpertLoop]:
    """Yield the loops over experts of a mixture whose outputs are addends of the sum ``head``. The output of an expert
    is zero in all rows (tokens) except those that chose this expert.

    Args:
        numbers: assigns equal integers to nodes that compute the same value.
    """
    addends, chain = list_addends(head)
    found = {n: choice for n in addends if addends.count(n) == 1 and (choice := _find_nonzero_rows(n)) is not None}
    yield from _group_into_loops(found, lambda parts: [n for n in addends if n not in parts], chain, numbers, adds=True)


def _find_nonzero_rows(addend: fx.Node) -> RoutingChoice | None:
    """Return the rows (tokens) in which ``addend``, the output of one expert in a sum over experts, may be non-zero, as
    a tensor of chosen expert numbers and the number that it equals in these rows. Return ``None`` if the addend was not
    masked in this way."""
    node: Any = addend
    while isinstance(node, fx.Node) and node.target in LINEAR and len(node.users) == 1:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.masked_fill.Scalar or node.args[2] != 0:
        return None
    choice, negated = _find_mask_choice(node.args[1])
    return choice if negated else None


def _find_choice_loops(head: fx.Node, numbers: ValueNumbers) -> Iterator[ExpertLoop]:
    """Yield the loops over experts whose outputs are combined by a chain of ``where`` operators that ends in ``head``.

    Each ``where`` selects one expert's output in the rows (tokens) that chose this expert, and the result of the
    previous ``where`` in other rows.

    Args:
        numbers: assigns equal integers to nodes that compute the same value.
    """
    found: dict[fx.Node, RoutingChoice] = {}
    chain: set[fx.Node] = set()
    where = _find_condition_shape(head)
    node: Any = head
    while _is_where(node) and list_node_sizes(node) == list_node_sizes(head) and (not chain or len(node.users) == 1):
        choice, negated = _find_mask_choice(node.args[0])
        if choice is None or negated or list_node_sizes(node.args[1]) != list_node_sizes(head) or node.args[1] in found:
            break
        if _find_condition_shape(node) != where or math.prod(where) != get_node_tensor(choice.chosen).numel():
            break
        found[node.args[1]] = choice
        chain.add(node)
        node = node.args[2]
    if len(found) >= _MIN_EXPERTS and list_node_sizes(node) == list_node_sizes(head):
        for loop in _group_into_loops(
            found, lambda parts: [node] if len(parts) == len(found) else [], chain, numbers, adds=False
        ):
            yield replace(loop, mask_shape=where)


def _find_condition_shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the condition of ``node``, a ``where``, before it is expanded to the result's shape. Leading
    dims of size 1 are added up to the number of dims of the result."""
    condition: Any = node.args[0]
    while condition.target is aten.expand.default:
        condition = condition.args[0]
    sizes = list_node_sizes(condition)
    return (*[1] * (len(list_node_sizes(node)) - len(sizes)), *sizes)


def _is_where(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.where.self and len(node.args) == 3


def _group_into_loops(
    found: Mapping[fx.Node, RoutingChoice],
    others: Callable[[Collection[fx.Node]], list[fx.Node]],
    chain: Collection[fx.Node],
    numbers: ValueNumbers,
    *,
    adds: bool,
) -> Iterator[ExpertLoop]:
    """Group the outputs of experts into loops, and yield the loops. The experts of a loop are masked by the same tensor
    of chosen expert numbers, and their numbers are consecutive.

    Args:
        found: the output of each expert -> the tensor and the number by which the expert's rows (tokens) are masked.
        others: function of a loop's outputs that returns the other operands of the sum or ``where`` chain.
        chain: the nodes that combine the outputs.
        numbers: assigns equal integers to nodes that compute the same value.
        adds: whether the chain is a sum.
    """
    by_source: dict[Any, dict[int, list[fx.Node]]] = {}
    for node, choice in found.items():
        by_source.setdefault((numbers(choice.chosen), choice.dims), {}).setdefault(choice.number, []).append(node)
    for parts in by_source.values():
        order = sorted(parts)
        if len(order) < _MIN_EXPERTS or order != list(range(order[0], order[0] + len(order))):
            continue
        nodes = [parts[number] for number in order]
        if all(len(of) == 1 for of in nodes):
            mine = tuple(of[0] for of in nodes)
            rest = others(mine)
            if adds or rest:
                choice = found[mine[0]]
                yield ExpertLoop(mine, choice.chosen, choice.dims, order[0], tuple(rest), frozenset(chain), adds)


def _find_mask_choice(node: Any) -> tuple[RoutingChoice | None, bool]:
    """Return two values for the boolean mask ``node``: the integer tensor and the number that the mask compares, as in
    ``chosen == 3`` (``None`` if it is not such a mask), and whether the mask is negated. Reshapes of the mask are
    skipped."""
    negated = False
    while isinstance(node, fx.Node):
        choice = match_equality(node)
        if choice is not None:
            return choice, negated
        if node.target is aten.logical_not.default:
            negated = not negated
        elif node.target not in RESHAPES:
            break
        node = node.args[0]
    return None, False


def is_negated_mask(node: Any) -> bool:
    """Return whether the mask ``node`` is the negation of another mask: the result of a ``logical_not``, possibly
    reshaped."""
    while isinstance(node, fx.Node) and node.target in RESHAPES:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target is aten.logical_not.default


_SIZED = (aten.reshape.default, aten.expand.default)  # their second argument is the shape of the result
_ONE_DIM = (aten.unsqueeze.default, aten.squeeze.dim)
_REDUCTIONS = (aten.sum.dim_IntList, aten.any.dim)


@dataclass(frozen=True)
class ExpertColumn:
    """One value of each expert in a loop, such as the expert's column of the router's weights. ``node`` has the values
    of all experts, with the experts as its last dim."""

    node: fx.Node


class ExpertColumnBuilder:
    """Appends operators to a graph that compute one value for all experts of a loop at once (an :class:`ExpertColumn`),
    each in place of one operator per expert. ``build``: appends operators to the graph. ``loop``: the loop over
    experts. ``numbers``: assigns equal integers to nodes that compute the same value."""

    def __init__(self, build: Builder, loop: ExpertLoop, numbers: ValueNumbers) -> None:
        self.build, self.loop, self.numbers = build, loop, numbers

    def match_slices(self, nodes: tuple[fx.Node, ...]) -> ExpertColumn | None:
        """If ``nodes`` (one for each expert of the loop, in order) are the slices of one tensor at the experts'
        numbers, such as ``shares[:, i]``, return this tensor as a value with the experts as last dim. Return ``None``
        for other nodes."""
        first, wanted = nodes[0], range(self.loop.first, self.loop.first + len(nodes))
        if any(n.target is not aten.select.int or n.args[1] != first.args[1] for n in nodes):
            return None
        if [n.args[2] for n in nodes] != list(wanted) or len({self.numbers(n.args[0]) for n in nodes}) > 1:  # type: ignore[arg-type]
            return None
        whole: Any = first.args[0]
        dim: int = first.args[1] % len(list_node_sizes(whole))  # type: ignore[operator, assignment]
        others = [d for d in range(len(list_node_sizes(whole))) if d != dim]
        if dim < len(others):
            whole = self.build(aten.permute.default, whole, [*others, dim])
        if list_node_sizes(whole)[-1] != len(nodes):
            whole = self.build(aten.slice.Tensor, whole, len(others), wanted.start, wanted.stop)
        return ExpertColumn(whole)

    def append_row_masks(self) -> ExpertColumn:
        """Append the row masks of all experts of the loop as one boolean value, and return it. It has the dims of the
        tensor with the chosen expert numbers, followed by a dim of experts. An element is true where the chosen number
        is that of the expert."""
        numbers = self.loop.chosen
        every = self.build(
            aten.arange.default, len(self.loop.outputs), dtype=get_node_tensor(numbers).dtype, device=META
        )
        if self.loop.first:
            every = self.build(aten.add.Tensor, every, self.loop.first)
        apart = self.build(aten.unsqueeze.default, numbers, len(list_node_sizes(numbers)))
        return ExpertColumn(self.build(aten.eq.Tensor, apart, every))

    def append_operator(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExpertColumn:
        """Append one operator that computes for all experts of a loop what ``node`` computes for the first expert, and
        return its result, with the experts as last dim.

        Raises :class:`NotMergeable` unless the operator is elementwise, a ``reshape``, ``expand``, ``squeeze`` or
        ``unsqueeze``, or a ``sum`` or ``any`` over given dims. Other operators could mix the values of different
        experts.

        Args:
            node: the operator of the loop's first expert.
            args: values of all experts as :class:`ExpertColumn`, and arguments that all experts share.
            kwargs: the operator's keyword arguments.
        """
        assert isinstance(node.target, torch._ops.OpOverload)
        value, rest, many = args[0], list(args[1:]), len(self.loop.outputs)
        if node.target in _SIZED:
            operands = [value.node, [*list_node_sizes(node), many]]
        elif node.target in _ONE_DIM:
            rank = max(len(list_node_sizes(node)), len(list_node_sizes(node.args[0])))  # type: ignore[arg-type]
            operands = [value.node, rest[0] % rank]
        elif node.target in _REDUCTIONS:
            rank, dims = len(list_node_sizes(node.args[0])), rest[0]  # type: ignore[arg-type]
            if dims is None or dims == []:  # all dims, among them that of experts
                raise NotMergeable
            over = [d % rank for d in dims] if isinstance(dims, list | tuple) else dims % rank
            operands = [value.node, over, *rest[1:]]
        elif node.target is aten.to.dtype or torch.Tag.pointwise in node.target.tags:
            operands = [self._append_expert_dim(argument) for argument in args]
        else:
            raise NotMergeable
        return ExpertColumn(self.build(node.target, *operands, **kwargs))

    def gather_own_entries(self, column: ExpertColumn, keys: fx.Node, dim: int) -> fx.Node:
        """Append operators that take, for each row, the entry of the row's own expert from ``column``, a value with the
        experts as last dim. Return the node of the result. Raises :class:`NotMergeable` if ``column`` has a dim larger
        than 1 besides ``dim`` and the last one.

        Args:
            keys: the node with the expert number of each row.
            dim: the dim of ``column`` that indexes rows (tokens).
        """
        sizes = list_node_sizes(column.node)
        if any(size != 1 for d, size in enumerate(sizes[:-1]) if d != dim):
            raise NotMergeable
        rows = self.build(aten.reshape.default, column.node, [sizes[dim], sizes[-1]])
        own = self.build(aten.gather.default, rows, 1, self.build(aten.reshape.default, keys, [sizes[dim], 1]))
        return self.build(aten.reshape.default, own, list(sizes[:-1]))

    def _append_expert_dim(self, argument: Any) -> Any:
        """Return ``argument``, an argument of an operator, in a form that broadcasts with values that have the experts
        as last dim. An :class:`ExpertColumn` becomes its node; any other node with dims gets a last dim of size 1;
        everything else is returned unchanged."""
        if isinstance(argument, ExpertColumn):
            return argument.node
        if isinstance(argument, fx.Node) and get_node_tensor(argument).dim():
            return self.build(aten.unsqueeze.default, argument, get_node_tensor(argument).dim())
        return argument


@dataclass(frozen=True)
class ExpertMask:
    """The row masks of all experts in a loop over experts. The mask of an expert is true in the rows (tokens) that
    chose this expert; if ``negated``, it is true in all other rows.

    ``dim``: the dim of the mask that indexes rows; ``None`` if several dims together do, such as batch and position.
    ``plain``: whether the mask has the same dims, in the same order, as the tensor of chosen expert numbers from which
    it was computed.
    """

    dim: int | None
    negated: bool
    plain: bool = False


@dataclass(frozen=True)
class ExpertRows:
    """A value that replaces the corresponding values of all experts in a loop over experts: each row (token) of
    ``node`` is computed by the expert that the row chose. ``dim``: the dim that indexes rows. ``zeroed``: whether each
    expert's own value was zero in the rows of other experts."""

    node: fx.Node
    dim: int
    zeroed: bool


@dataclass(frozen=True)
class MultiResultRows:
    """An operator with several results, ``node``, that replaces the corresponding operators of all experts in a loop.
    In each result, every row (token) is computed by the expert that the row chose. ``dims[k]``: the dim that indexes
    rows in result ``k``."""

    node: fx.Node
    dims: tuple[int, ...]


@dataclass(frozen=True)
class ExpertSum:
    """A value, ``node``, that replaces the sum of the outputs of all experts in a loop. In each row (token), at most
    one of these outputs is non-zero: that of the expert that the row chose."""

    node: fx.Node


@dataclass(frozen=True)
class PlacedRows:
    """A value, ``node``, in which each row (token) is computed by the expert that it chose, and a reshape has split the
    dim of rows into several dims. ``where``: the shape of the value, with size 1 in every dim except those of rows."""

    node: fx.Node
    where: tuple[int, ...]


@dataclass(frozen=True)
class ExpertParameter:
    """The corresponding parameters of all experts in a loop over experts, which the model stores separately. ``nodes``:
    the placeholder of each expert's parameter, in order."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class PackedParameter:
    """The corresponding parameters of all experts in a loop over experts in one tensor, the result of ``node``, with
    the experts as dim 0."""

    node: fx.Node


Merged = (
    ExpertMask
    | ExpertRows
    | MultiResultRows
    | ExpertSum
    | PlacedRows
    | ExpertParameter
    | PackedParameter
    | ExpertColumn
)


class LoopWeights:
    """Merges the parameters that the experts of a loop read, and appends operators on the merged parameters to the
    graph.

    ``read``: whether a merged parameter was read. ``packing``: stacks the separate parameters of several experts into
    one. ``build``: appends operators. ``loop``: the loop over experts.
    """

    def __init__(self, packing: ParameterStacker, build: Builder, loop: ExpertLoop) -> None:
        self.packing, self.build, self.loop = packing, build, loop
        self.read = False  # whether an operator reads a merged parameter

    def match_packed(self, nodes: tuple[fx.Node, ...]) -> PackedParameter | None:
        """If ``nodes`` are slices of one parameter, one for each expert in order, return this packed parameter. Return
        ``None`` for other nodes."""
        source: Any = nodes[0].args[0] if nodes[0].target is aten.select.int else None
        captured, first = self.packing.captured, self.loop.first
        if source is None or captured.placeholders.get(source.name) not in captured.states:
            return None
        if [(n.target, *n.args) for n in nodes] != [(aten.select.int, source, 0, first + i) for i in range(len(nodes))]:
            return None
        if list_node_sizes(source)[0] == len(nodes):
            return PackedParameter(source)
        return PackedParameter(self.build(aten.slice.Tensor, source, 0, first, first + len(nodes)))

    def stack_parameters(self, stack: ExpertParameter | PackedParameter) -> fx.Node:
        """Return a node with the parameters ``stack`` of all experts in a loop, with the experts as dim 0."""
        self.read = True
        return stack.node if isinstance(stack, PackedParameter) else self.packing.pack_parameters(stack.nodes)

    def apply_to_all(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PackedParameter:
        """Append the transpose, permutation or cast ``node`` of one expert's parameter for the parameters of all
        experts at once, and return the result.

        Raises :class:`NotMergeable` for another operator. ``args``, ``kwargs``: the operator's arguments, of which the
        first has the parameters of all experts.
        """
        whole, rank, rest = self.stack_parameters(args[0]), len(list_node_sizes(node)), list(args[1:])
        if node.target is aten.t.default and rank == len(rest) + 2:
            return PackedParameter(self.build(aten.transpose.int, whole, 1, 2))
        if node.target is aten.transpose.int:
            rest = [d % rank + 1 for d in rest]
        elif node.target is aten.permute.default:
            rest = [[0, *(d % rank + 1 for d in rest[0])]]
        elif node.target is not aten.to.dtype:
            raise NotMergeable
        return PackedParameter(self.build(node.target, whole, *rest, **kwargs))

    def gather_for_rows(
        self, node: fx.Node, stack: ExpertParameter | PackedParameter, rows: ExpertRows, expert: Callable[[], fx.Node]
    ) -> fx.Node:
        """Return a node with the parameter of each row's own expert, as an operand of the pointwise operator ``node``.
        Its dim 0 indexes rows (tokens), and its further dims broadcast with the other operand.

        Raises :class:`NotMergeable` if ``node`` is not pointwise, or if one expert's parameter, broadcast to the other
        operand, varies along the dim of rows or a dim before it.

        Args:
            stack: the parameters of all experts.
            rows: the other operand of ``node``, in which each row is computed by its own expert.
            expert: returns the node with the expert number of each row.
        """
        assert isinstance(node.target, torch._ops.OpOverload)
        whole = self.stack_parameters(stack)
        own = list_node_sizes(whole)[1:]
        after = len(list_node_sizes(node)) - 1 - rows.dim  # number of dims behind the dim of rows
        if torch.Tag.pointwise not in node.target.tags or any(s != 1 for s in own[: max(0, len(own) - after)]):
            raise NotMergeable
        found = self.build(aten.index_select.default, whole, 0, expert())
        kept = own[max(0, len(own) - after) :]
        return self.build(
            aten.reshape.default, found, [list_node_sizes(rows.node)[rows.dim], *[1] * (after - len(kept)), *kept]
        )
