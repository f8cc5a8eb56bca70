"""Rewrite experts that are separate modules to operators on stacked parameters of all experts.

Requires and keeps meta tensors (``node.meta["val"]``) on every node. Requires normal form: products without bias, sums
of two operands.

:func:`stack_experts` rewrites a loop over modules, each applied to all rows (tokens) and multiplied by its own column
of gates, to products with stacked parameters. The results are equal, there are fewer operators, and the experts can be
distributed over ranks. ``ParameterStacker`` stacks the modules' parameters to one state whose first dim is that of the
modules (:attr:`partitioner.passes.ir.model.ModelState.parts`).

:func:`replace_gathered_products` rewrites products with gathered parameters, where each row has its own matrix of a
stack. ``bmm(weight[expert], x)`` reads a copy of an expert's matrix for every row; ``partition::expert_mm`` reads each
matrix once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from partitioner.passes.experts.regions import CHOICES
from partitioner.passes.ir.model import Captured, ModelState, TensorSpec
from partitioner.passes.ir.rewrite import Builder, drop_unused, get_placeholder_name, list_node_sizes
from partitioner.passes.ops import experts

aten = torch.ops.aten


class NotMergeable(Exception):
    """Raised if corresponding nodes of several experts cannot be merged, for example because their operators differ."""


class ParameterStacker:
    """Stacks the corresponding parameters of several experts in a captured graph into one parameter each.

    ``captured``: the model, with the stacked parameters that were created so far. ``packed``: tuple of the experts'
    placeholders -> placeholder of the stacked parameter.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.packed: dict[tuple[fx.Node, ...], fx.Node] = {}

    def check_parameters(self, nodes: tuple[fx.Node, ...]) -> None:
        """Raise :class:`NotMergeable` unless ``nodes``, the placeholders of one parameter of each expert, can be
        stacked: they must be distinct parameters of the same shape and dtype, none of which has a second name."""
        states = [self.captured.states.get(self.captured.placeholders.get(n.name, "")) for n in nodes]
        kinds = {(s.kind, s.spec, s.requires_grad, s.aliases, s.parts) if s is not None else None for s in states}
        kind = kinds.pop()
        if kinds or kind is None or kind[0] != "parameter" or kind[3] or kind[4] or len(set(nodes)) != len(nodes):
            raise NotMergeable

    def pack_parameters(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """Return the placeholder of one parameter that stacks the parameters ``nodes`` along a new dim 0.

        The placeholder is created at the first call with these nodes.
        """
        if nodes in self.packed:
            return self.packed[nodes]
        names = tuple(self.captured.placeholders[n.name] for n in nodes)
        old = self.captured.states[names[0]]
        name = _merge_state_names(names)
        if name in self.captured.states:
            name += f" of {names[0]}"
        spec = TensorSpec((len(names), *old.spec.shape), old.spec.dtype)
        state = ModelState(name, spec, old.kind, old.requires_grad, parts=names)
        graph = self.captured.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            made = graph.placeholder(get_placeholder_name(name.replace("*", "all")))
        made.meta = {**nodes[0].meta, "val": spec.meta()}
        self.captured = self.captured.with_(
            states={**self.captured.states, name: state},
            placeholders={**self.captured.placeholders, made.name: name},
        )
        self.packed[nodes] = made
        return made

    def remove_placeholders(self) -> None:
        """Remove the placeholders of stacked parameters from the graph, after a rewrite has failed."""
        for made in self.packed.values():
            self.captured.graph.erase_node(made)

    def remove_packed_parameters(self) -> Captured:
        """Return the model without the parameters that are now part of a stack, and erase their placeholders from the
        graph."""
        placeholders, states = dict(self.captured.placeholders), dict(self.captured.states)
        for node in (n for nodes in self.packed for n in nodes):
            states.pop(placeholders.pop(node.name))
            self.captured.graph.erase_node(node)
        self.captured = self.captured.with_(states=states, placeholders=placeholders)
        return self.captured


def _merge_state_names(names: Sequence[str]) -> str:
    """Return one name for the parameters ``names``, with ``*`` where they differ, such as ``experts.*.up.weight``."""
    parts = [name.split(".") for name in names]
    return ".".join(p[0] if len(set(p)) == 1 else "*" for p in zip(*parts, strict=False))


_PRODUCTS = {aten.linear.default: True, aten.mm.default: False}  # product -> whether its weight is [n, k]
# operator -> position of its argument ``dim``
_ON_DIM = {aten.split_with_sizes.default: 2, aten.slice.Tensor: 1, aten.softmax.int: 1}


def stack_experts(captured: Captured) -> Captured:
    """Return ``captured`` with sums over the outputs of experts rewritten, if the experts are separate modules, such as
    in a ``ModuleList``. Batched products with stacked weights then compute all experts at once.

    The graph is changed in place.
    """
    named = {o.value for o in captured.outputs} | {captured.loss, *captured.updates.values()}
    for head in reversed(list(captured.graph.nodes)):
        if head.target is aten.add.Tensor and head.name not in named and not is_inner_sum(head):
            stacking = _ExpertSumRewriter(captured, head)
            if stacking.stack_experts():
                captured = stacking.packing.remove_packed_parameters()
    return captured


def is_plain_sum(node: fx.Node) -> bool:
    """Return whether ``node`` adds two nodes that both have the shape of the result."""
    nodes = [a for a in node.args if isinstance(a, fx.Node)]
    return (
        node.target is aten.add.Tensor
        and len(nodes) == len(node.args) == 2
        and not node.kwargs
        and all(list_node_sizes(n) == list_node_sizes(node) for n in nodes)
    )


def is_inner_sum(node: fx.Node) -> bool:
    """Return whether ``node`` is part of a longer sum: its only reader adds it to one other value."""
    return len(node.users) == 1 and is_plain_sum(next(iter(node.users)))


def list_addends(node: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return two values for the nested sum ``node``: the list of its addends, and the set of the nodes of its
    additions."""
    found, sums = [], {node}
    for addend in node.all_input_nodes if len(node.all_input_nodes) == 2 else node.all_input_nodes * 2:
        if is_plain_sum(addend) and len(addend.users) == 1:
            more, inner = list_addends(addend)
            found += more
            sums |= inner
        else:
            found.append(addend)
    return found, sums


class _ExpertSumRewriter:
    """Rewrites a sum of the outputs of experts, which are separate modules, to operators on stacked tensors with an
    additional first dim of experts.

    The corresponding nodes of all experts are visited together, from the outputs to the parameters. ``captured``: the
    model as one graph, which contains the sum. ``head``: the last addition of the sum.
    """

    def __init__(self, captured: Captured, head: fx.Node) -> None:
        self.packing = ParameterStacker(captured)
        self.head = head
        self.build = Builder(captured.graph, head)
        self.made: dict[tuple[fx.Node, ...], tuple[fx.Node, bool]] = {}
        self.visited: set[fx.Node] = set()
        self.packed: list[tuple[fx.Node, ...]] = []
        self.sums: set[fx.Node] = set()
        self.num = 0

    def stack_experts(self) -> bool:
        """If ``self.head`` is a sum of the outputs of experts that are separate modules, rewrite it to operators that
        compute all experts at once, and return ``True``. Otherwise, leave the graph unchanged and return ``False``."""
        if not is_plain_sum(self.head) or len(list_node_sizes(self.head)) != 2:
            return False
        addends, self.sums = list_addends(self.head)
        gated = {n: found for n in addends if (found := self._split_gated_output(n)) is not None}
        if len(gated) < 2 or not self._is_routed(list(gated)):
            return False
        self.num = len(gated)
        self.visited |= set(gated)
        outputs = [made for made, _ in gated.values()]
        try:
            self._check_stackable(tuple(outputs))
        except NotMergeable:
            return False
        if not self._is_self_contained():
            return False
        with self.build.graph.inserting_before(self.head):
            total = self._build_gated_sum(outputs, [gate for _, gate in gated.values()])
            for other in [n for n in addends if n not in gated]:
                total = self.build(aten.add.Tensor, other, total)
        self.head.replace_all_uses_with(total)
        drop_unused(self.build.graph)
        return True

    def _split_gated_output(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Return (an expert's output, its gate of shape ``[rows, 1]``) if ``node`` is their product; otherwise
        ``None``.
        """
        if node.target is not aten.mul.Tensor or len(node.users) != 1:
            return None
        for made, gate in (node.args, node.args[::-1]):
            if isinstance(made, fx.Node) and isinstance(gate, fx.Node):
                rows = list_node_sizes(node)[0]
                if (
                    made.op == "call_function"
                    and list_node_sizes(made) == list_node_sizes(node)
                    and list_node_sizes(gate) == [rows, 1]
                ):
                    return made, gate
        return None

    def _is_routed(self, addends: Sequence[fx.Node]) -> bool:
        """Return whether ``addends``, the outputs of experts, depend on a ``topk`` or similar operator over as many
        scores as there are addends, so that a router chooses among the experts."""
        seen: set[fx.Node] = set()
        stack = list(addends)
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += node.all_input_nodes
        return any(n.target in CHOICES and list_node_sizes(n.args[0])[-1:] == [len(addends)] for n in seen)  # type: ignore[arg-type]

    def _check_stackable(self, nodes: tuple[fx.Node, ...]) -> None:
        """Raise :class:`NotMergeable` unless the operators that compute ``nodes``, the corresponding nodes of all
        experts (one for each), correspond to each other and can work on stacked tensors."""
        if len(set(nodes)) == 1 or nodes in self.packed:
            return
        first = nodes[0]
        if len(set(nodes)) != len(nodes) or (
            any(n.op != first.op or n.target != first.target for n in nodes[1:]) and (first.op != "placeholder")
        ):
            raise NotMergeable
        if first.op == "placeholder":
            self.packing.check_parameters(nodes)
            self.packed.append(nodes)
            return
        self.visited |= set(nodes)
        flat = [_flatten_arguments(n) for n in nodes]
        if any(len(f) != len(flat[0]) for f in flat):
            raise NotMergeable
        for arguments in zip(*flat, strict=True):
            if all(isinstance(a, fx.Node) for a in arguments):
                self._check_stackable(arguments)
            elif any(type(a) is not type(arguments[0]) or a != arguments[0] for a in arguments):
                raise NotMergeable
        if not self._has_form(first):
            raise NotMergeable

    def _has_form(self, node: fx.Node) -> bool:
        """Return whether the operator of ``node``, which works on one expert, can work on all experts at once if its
        operands get an additional first dim of experts."""
        if node.target in _PRODUCTS:
            weight: Any = node.args[1]
            return len(node.args) == 2 and len(list_node_sizes(node)) == 2 and len(list_node_sizes(weight)) == 2
        if node.target in _ON_DIM or node.target is operator.getitem:
            return True
        return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags

    def _is_self_contained(self) -> bool:
        """Return whether the experts' parameters and intermediate values can be replaced: nothing outside of the sum
        over experts reads them."""
        inner = self.visited | {n for nodes in self.packed for n in nodes}
        return bool(self.packed) and all(u in self.visited or u in self.sums for n in inner for u in n.users)

    def _build_gated_sum(self, outputs: list[fx.Node], gates: list[fx.Node]) -> fx.Node:
        """Append the sum of the experts' ``outputs``, each multiplied by its gate (shape ``[rows, 1]``) in ``gates``,
        computed with stacked parameters, and return the node of the sum."""
        made, _ = self._stack_nodes(tuple(outputs))
        columns = self.build(aten.cat.default, gates, 1)
        weights = self.build(aten.unsqueeze.default, self.build(aten.transpose.int, columns, 0, 1), -1)
        return self.build(aten.sum.dim_IntList, self.build(aten.mul.Tensor, made, weights), [0])

    def _stack_nodes(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, bool]:
        """Return (node, stacked) for ``nodes``, the corresponding nodes of all experts (one for each). If all experts
        share one node, the result is this node and ``False``. Otherwise, it is a node with their values along a new
        first dim, and ``True``."""
        if len(set(nodes)) == 1:
            return nodes[0], False
        if nodes not in self.made:
            first = nodes[0]
            if first.op == "placeholder":
                self.made[nodes] = self.packing.pack_parameters(nodes), True
            else:
                self.made[nodes] = self._stack_operator(nodes), True
        return self.made[nodes]

    def _stack_operator(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """Append the operator of ``nodes``, the corresponding nodes of all experts, with an additional first dim of
        experts, and return the new node."""
        first = nodes[0]
        if first.target in _PRODUCTS:
            x, x_stacked = self._stack_nodes(_collect_arguments(nodes, 0))
            weight, weight_stacked = self._stack_nodes(_collect_arguments(nodes, 1))
            if _PRODUCTS[first.target]:
                dims = (1, 2) if weight_stacked else (0, 1)
                weight = self.build(aten.transpose.int, weight, *dims)
            x = x if x_stacked else self._repeat_for_experts(x)
            weight = weight if weight_stacked else self._repeat_for_experts(weight)
            return self.build(aten.bmm.default, x, weight)
        if first.target in _ON_DIM or first.target is operator.getitem:
            x, _ = self._stack_nodes(_collect_arguments(nodes, 0))
            rest: list[Any] = list(first.args[1:])
            at = _ON_DIM.get(first.target)  # type: ignore[arg-type]
            if at is not None and len(rest) >= at and rest[at - 1] >= 0:
                rest[at - 1] += 1
            return self.build(first.target, x, *rest, **first.kwargs)
        rank = len(first.meta["val"].shape)
        args: list[Any] = []
        for place, argument in enumerate(first.args):
            if isinstance(argument, fx.Node):
                made, stacked = self._stack_nodes(_collect_arguments(nodes, place))
                for _ in range(rank + 1 - len(list_node_sizes(made)) if stacked else 0):
                    made = self.build(aten.unsqueeze.default, made, 1)
                args.append(made)
            else:
                args.append(argument)
        return self.build(first.target, *args, **first.kwargs)

    def _repeat_for_experts(self, x: fx.Node) -> fx.Node:
        return self.build(
            aten.expand.default, self.build(aten.unsqueeze.default, x, 0), [self.num, *list_node_sizes(x)]
        )


def _flatten_arguments(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    for argument in (*node.args, *(v for _, v in sorted(node.kwargs.items()))):
        found += list(argument) if isinstance(argument, list | tuple) else [argument]
    return found


def _collect_arguments(nodes: tuple[fx.Node, ...], place: int) -> tuple[fx.Node, ...]:
    return tuple(n.args[place] for n in nodes)  # type: ignore[misc]


_BATCHED_PRODUCTS = (aten.bmm.default, aten.matmul.default)
_VIEW_OPERATORS = (
    aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int,
    aten.permute.default, aten.t.default, aten.expand.default, aten.clone.default, aten.slice.Tensor,
    aten.select.int, aten._to_copy.default, aten.to.dtype, aten.repeat_interleave.self_int,
)  # fmt: skip
_CHOICES: dict[Any, int] = {
    aten.topk.default: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.max.dim: 1,
    aten.min.dim: 1,
}
_PLACES = (aten.argmax.default, aten.argmin.default, aten.argsort.default)


def replace_gathered_products(graph: fx.Graph) -> None:
    """Replace batched products that read a copy of an expert's matrix for every row (token), such as
    ``bmm(weight[expert], x)``, by ``partition::expert_mm``, which multiplies each row by its expert's matrix without
    copies. ``graph`` is changed in place."""
    for node in list(graph.nodes):
        if node.target in _BATCHED_PRODUCTS and len(node.args) == 2:
            with graph.inserting_before(node):
                _rewrite_gathered_product(node, Builder(graph, node))
    drop_unused(graph)


def _rewrite_gathered_product(node: fx.Node, build: Builder) -> None:
    """If the batched product ``node`` reads one matrix of a stack for each row (token), replace it by
    ``partition::expert_mm``; otherwise leave it unchanged. ``build`` appends operators."""
    left, right = node.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if len(list_node_sizes(left)) != 3 or len(list_node_sizes(right)) != 3:
        return
    column = list_node_sizes(right)[2] == 1 and _find_picked_matrices(left)
    row = list_node_sizes(left)[1] == 1 and _find_picked_matrices(right)
    if column:
        stack, expert = column
        x, dim = right, 2
        stack = build(aten.transpose.int, stack, 1, 2)
    elif row:
        stack, expert = row
        x, dim = left, 1
    else:
        return
    rows = build(aten.squeeze.dim, x, dim)
    made = build(experts.ops.expert_mm.default, rows, stack, expert)
    whole = build(aten.unsqueeze.default, made, dim)
    if whole.meta["val"].dtype == node.meta["val"].dtype and list_node_sizes(whole) == list_node_sizes(node):
        for user in list(node.users):  # remove a squeeze that undoes the unsqueeze
            if user.target == aten.squeeze.dim and user.args[1] in (dim, dim - 3):
                user.replace_all_uses_with(made)
        node.replace_all_uses_with(whole)
        if x.target == aten.unsqueeze.default and x.args[1] in (dim, dim - 3):
            rows.replace_all_uses_with(x.args[0])  # type: ignore[arg-type]


def _find_picked_matrices(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (stack of matrices ``[n, k, m]``, index of the matrix for each row (token) ``[rows]``) if ``node`` reads
    one matrix of the stack for each row, as ``weight[expert]`` does; otherwise ``None``."""
    if node.target == aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        stack, picks = node.args[0], node.args[1][0]  # type: ignore[index]
    elif node.target == aten.index_select.default and node.args[1] == 0:
        stack, _, picks = node.args
    else:
        return None
    assert isinstance(stack, fx.Node) and isinstance(picks, fx.Node)
    if (
        len(list_node_sizes(stack)) != 3
        or len(list_node_sizes(picks)) != 1
        or not _is_below(picks, list_node_sizes(stack)[0])
    ):
        return None
    return stack, picks


def _is_below(node: Any, size: int) -> bool:
    """Return whether the indices in ``node`` are known to be less than ``size``. This is the case if ``topk`` or a
    similar operator chose them among at most ``size`` scores."""
    while isinstance(node, fx.Node):
        if node.target in _VIEW_OPERATORS:
            node = node.args[0]
        elif node.target in _PLACES:
            return _count_choices(node) <= size
        elif node.target is operator.getitem:
            source, index = node.args
            if not (isinstance(source, fx.Node) and source.target in _CHOICES and index == 1):
                return False
            return _count_choices(source) <= size
        else:
            return False
    return False


def _count_choices(node: Any) -> int:
    """Return the number of scores among which ``node``, a ``topk`` or similar operator, chooses: the size of its dim,
    by default the last. ``argmax`` and ``argmin`` without a dim choose among all elements.
    """
    among = list_node_sizes(node.args[0])
    names = [a.name for a in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    dim = given.get("dim", None if node.target in (aten.argmax.default, aten.argmin.default) else -1)
    return among[dim] if isinstance(dim, int) and among else math.prod(among)
