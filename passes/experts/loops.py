"""Rewrite loops over experts to products of each row (token) with its own expert's matrix.

In the captured graph of such a loop, every expert computes all rows, and only its own rows are added to the sum
(``passes/select/masked_rows.py``). If an expert's own rows are those whose chosen number is the expert's, no row
belongs to two experts. A single pass can then compute each row with its own expert. Matrix products become
``partition::expert_mm`` (each row times its expert's matrix), other parameters are looked up by expert, and the masks
are removed.

Requires and keeps meta tensors (``node.meta["val"]``) on every node. Requires normal form: products without bias, sums
of two operands.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from partitioner.passes.errors import PartitionError
from partitioner.passes.experts.loop_patterns import (
    LINEAR,
    RESHAPES,
    SCALED,
    ExpertColumn,
    ExpertColumnBuilder,
    ExpertLoop,
    ExpertMask,
    ExpertParameter,
    ExpertRows,
    ExpertSum,
    LoopWeights,
    Merged,
    MultiResultRows,
    PackedParameter,
    PlacedRows,
    find_loops,
    is_negated_mask,
)
from partitioner.passes.experts.routing_masks import get_num_choices, match_equality
from partitioner.passes.experts.stacked_modules import NotMergeable, ParameterStacker
from partitioner.passes.ir.model import Captured
from partitioner.passes.ir.rewrite import Builder, drop_unused, get_node_tensor, list_node_sizes
from partitioner.passes.ir.value_numbering import ValueNumbers
from partitioner.passes.ops import experts
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.factors import operands_of

SELECTS = (
    "the number of rows that a mask selects depends on data: the plan computes all rows and discards those that "
    "are not selected"
)

aten = torch.ops.aten

_PRODUCTS: dict[Any, bool] = {  # product -> whether its weight is [n, k]
    aten.linear.default: True,
    aten.mm.default: False,
    aten.matmul.default: False,
}
_ROUTED = (
    "loops over experts are computed as grouped products, in which each row is multiplied only with the matrices "
    "of its own experts"
)


def route_loops(captured: Captured) -> Captured:
    """Return ``captured`` with its loops over the experts of a mixture rewritten: products of all rows (tokens) with
    every expert's matrix become products of each row with the matrix of its own expert.

    The graph is changed in place. ``captured`` itself is returned if no loop matches.
    """
    graph = captured.graph
    # rows are left out by masked_fill; without one there is no loop to rewrite
    if not any(n.target is aten.masked_fill.Scalar for n in graph.nodes):
        return captured
    numbers, routed = ValueNumbers(), False
    for head in reversed(list(graph.nodes)):
        if head._erased or head.op != "call_function":
            continue
        for loop in find_loops(head, numbers):
            merging = _LoopMerger(captured, head, loop, numbers)
            if merging.merge_loop():
                captured, routed = merging.packing.remove_packed_parameters(), True
                break
    if not routed:
        return captured
    left = any(n.target is aten.masked_fill.Scalar and is_negated_mask(n.args[1]) for n in graph.nodes)
    return captured.with_(notes=(*(n for n in captured.notes if left or n != SELECTS), _ROUTED))


class _LoopMerger:
    """Merges the corresponding nodes of all experts in one loop into operators that compute all experts at once.

    ``head``: the last operator of the loop. ``known``: tuple of corresponding nodes, one of each expert -> the merged
    value; for a node that all experts share, the node itself. ``captured``: the model. ``numbers``: assigns equal
    integers to nodes that compute the same value.
    """

    def __init__(self, captured: Captured, head: fx.Node, loop: ExpertLoop, numbers: ValueNumbers) -> None:
        self.packing = ParameterStacker(captured)
        self.build = Builder(captured.graph, head)
        self.columns = ExpertColumnBuilder(self.build, loop, numbers)
        self.weights = LoopWeights(self.packing, self.build, loop)
        self.head, self.loop, self.numbers = head, loop, numbers
        self.num_rows = get_node_tensor(loop.chosen).numel()
        self.known: dict[tuple[fx.Node, ...], Any] = {}
        self.inner: set[fx.Node] = set()  # nodes that compute with rows or parameters of experts
        self.keys: fx.Node | None = None
        covers = get_num_choices(loop.chosen)
        self.covers = loop.first == 0 and covers == len(loop.outputs)  # whether every row has an expert of this loop

    def merge_loop(self) -> bool:
        """Rewrite the loop so that one operator computes the rows (tokens) of all experts, and return ``True``. Leave
        the graph unchanged and return ``False`` if the experts do not compute the same operators with their own
        parameters, if these operators cannot be merged, or if something outside of the loop reads their intermediate
        values."""
        graph = self.build.graph
        with graph.inserting_before(self.head):
            try:
                total = self._build_loop_total(self.merge_nodes(self.loop.outputs))
                apart = self._is_self_contained() and _has_same_specs(total, self.head)
            except NotMergeable:
                apart = False
        if apart:  # the last operator is changed in place, so that an output keeps its name
            self.head.target, self.head.args, self.head.kwargs = total.target, total.args, total.kwargs
        drop_unused(graph)
        if not apart:
            self.packing.remove_placeholders()
        return apart

    def _build_loop_total(self, made: Any) -> fx.Node:
        """Append operators that combine ``made``, the merged outputs of all experts, with the other operands of the
        loop's sum or ``where`` chain. Return the node that replaces the last operator of the loop.

        Raises :class:`NotMergeable` if ``made`` does not fit. For a sum, it must be an :class:`ExpertSum`, or
        :class:`ExpertRows` whose experts had zeros in the rows (tokens) of other experts. For a ``where`` chain, its
        rows must lie along the dims by which the chain selects.
        """
        if self.loop.adds:
            if not isinstance(made, ExpertSum) and not (isinstance(made, ExpertRows) and made.zeroed):
                raise NotMergeable
            total = made.node
            for other in self.loop.others:
                total = self.build(aten.add.Tensor, other, total)
            return total
        if not isinstance(made, ExpertRows | PlacedRows):
            raise NotMergeable
        where = made.where if isinstance(made, PlacedRows) else _keep_only_dim(made.node, made.dim)
        if where != self.loop.mask_shape:  # the rows lie in other dims than those by which the chain selects
            raise NotMergeable
        if self.covers:
            return made.node
        chosen = self.build(aten.reshape.default, self._mask_expert_rows(), list(where))
        return self.build(aten.where.self, chosen, made.node, *self.loop.others)

    def _is_self_contained(self) -> bool:
        """Return whether the loop can be replaced: it reads parameters of the experts, and nothing outside of the loop
        reads these parameters or the experts' intermediate values.
        """
        read = self.inner | {n for nodes in self.packing.packed for n in nodes}
        users = self.inner | self.loop.chain
        return self.weights.read and all(u in users for n in read for u in n.users)

    def merge_nodes(self, nodes: tuple[fx.Node, ...]) -> Any:
        """Return one value that replaces ``nodes``, the corresponding nodes of all experts in the loop: a node that all
        experts share, or a merged value such as :class:`ExpertRows`, in which each row (token) is computed by its own
        expert.

        Raises :class:`NotMergeable` if the nodes do not correspond. Nodes correspond if they apply the same operator to
        corresponding nodes and equal constants.
        """
        if nodes not in self.known:
            alike = len({self.numbers(n) for n in nodes}) == 1
            self.known[nodes] = nodes[0] if alike else self._merge_nodes(nodes)
        return self.known[nodes]

    def _merge_nodes(self, nodes: tuple[fx.Node, ...]) -> Any:
        """Return one merged value that replaces ``nodes``, which compute corresponding but different values of all
        experts in the loop. An example is :class:`ExpertRows`, in which each row (token) is computed by its own expert.

        Raises :class:`NotMergeable` if the nodes do not correspond (apply the same operator to corresponding nodes and
        equal constants), or if their operator has no merged form.
        """
        first = nodes[0]
        if first.op == "placeholder":
            self.packing.check_parameters(nodes)
            return ExpertParameter(nodes)
        new_node = self._merge_choices(nodes) or self._merge_slices(nodes) or self.columns.match_slices(nodes)
        if new_node is not None:
            return new_node
        if all(n.target is operator.getitem and n.args[1:] == first.args[1:] for n in nodes):
            return self._merge_getitem(nodes)
        if any(n.target != first.target for n in nodes) or not isinstance(first.target, torch._ops.OpOverload):
            raise NotMergeable
        args, kwargs = self._merge_arguments(nodes)
        given = [a for a in args if isinstance(a, Merged)]
        if isinstance(args[0], ExpertMask) and first.target in (aten.logical_not.default, *RESHAPES):
            return self._transform_mask(first, args[0])
        if given and all(isinstance(a, ExpertColumn) or (isinstance(a, ExpertMask) and a.plain) for a in given):
            return self.columns.append_operator(
                first, [self.columns.append_row_masks() if isinstance(a, ExpertMask) else a for a in args], kwargs
            )
        self.inner.update(nodes)
        if isinstance(args[0], ExpertParameter | PackedParameter) and len(given) == 1:
            return self.weights.apply_to_all(first, args, kwargs)
        if first.target is aten.masked_fill.Scalar and isinstance(args[1], ExpertMask):
            return self._fill_other_rows(first, args[0], args[1])
        if any(isinstance(a, ExpertMask | PlacedRows | ExpertColumn | MultiResultRows) for a in given):
            raise NotMergeable
        if first.target in _PRODUCTS and isinstance(args[1], ExpertParameter | PackedParameter):
            return self._merge_products(first, args)
        if any(isinstance(a, ExpertSum) for a in given):
            return self._apply_to_sum(first, args, kwargs)
        return self._merge_row_operator(first, args, kwargs)

    def _merge_slices(self, nodes: tuple[fx.Node, ...]) -> PackedParameter | None:
        new_node = self.weights.match_packed(nodes)
        self.inner.update(nodes if new_node is not None else ())
        return new_node

    def _merge_arguments(self, nodes: tuple[fx.Node, ...]) -> tuple[list[Any], dict[str, Any]]:
        """Return (list of positional arguments, dict of keyword arguments) of the one operator that replaces ``nodes``,
        the corresponding nodes of all experts in a loop.

        Raises :class:`NotMergeable` if the numbers of positional arguments differ, if keyword arguments differ or are
        nodes, or if the arguments at one position cannot be merged.
        """
        first = nodes[0]
        if any(len(n.args) != len(first.args) or n.kwargs != first.kwargs for n in nodes):
            raise NotMergeable
        if any(isinstance(v, fx.Node) for v in first.kwargs.values()):
            raise NotMergeable
        return [self._merge_one_argument([n.args[i] for n in nodes]) for i in range(len(first.args))], dict(
            first.kwargs
        )

    def _merge_one_argument(self, given: Sequence[Any]) -> Any:
        """Return one argument that replaces ``given``, the arguments at the same position of the corresponding
        operators of all experts: a merged value for nodes, the common value for constants.

        Raises :class:`NotMergeable` if constants differ, or if the nodes do not compute corresponding values.
        """
        if all(isinstance(g, fx.Node) for g in given):
            return self.merge_nodes(tuple(given))
        if isinstance(given[0], list | tuple) and all(type(g) is type(given[0]) for g in given):
            if any(len(g) != len(given[0]) for g in given):
                raise NotMergeable
            new_node = [self._merge_one_argument([g[i] for g in given]) for i in range(len(given[0]))]
            if any(isinstance(m, Merged) for m in new_node):
                raise NotMergeable
            return new_node
        if any(isinstance(g, fx.Node) or type(g) is not type(given[0]) or g != given[0] for g in given):
            raise NotMergeable
        return given[0]

    # -- masks ------------------------------------------------------------------------------------------------------

    def _merge_choices(self, nodes: tuple[fx.Node, ...]) -> ExpertMask | None:
        """If ``nodes`` are the row masks of all experts in the loop, in the order of the experts, return one
        description of these masks; otherwise return ``None``. The mask of an expert is true in the rows (tokens) that
        chose it."""
        loop, of = self.loop, self.numbers(self.loop.chosen)
        for number, node in enumerate(nodes, loop.first):
            choice = match_equality(node)
            if choice is None or (choice.number, choice.dims, self.numbers(choice.chosen)) != (number, loop.dims, of):
                return None
        return ExpertMask(
            0 if get_node_tensor(nodes[0]).dim() == 1 else None, False, loop.dims == tuple(range(len(loop.dims)))
        )

    def _transform_mask(self, node: fx.Node, mask: ExpertMask) -> ExpertMask:
        """Return the description ``mask`` of the row masks of all experts after ``node``, a negation or reshape of the
        first expert's mask. Raises :class:`NotMergeable` for another operator."""
        if node.target is aten.logical_not.default:
            return ExpertMask(mask.dim, not mask.negated)
        sizes = list_node_sizes(node)
        along = [d for d, size in enumerate(sizes) if size == self.num_rows]
        if node.target not in RESHAPES or get_node_tensor(node).numel() != self.num_rows:
            raise NotMergeable
        if len(sizes) == 1:
            return ExpertMask(0, mask.negated)
        if mask.dim is None or len(along) != 1:
            raise NotMergeable
        return ExpertMask(along[0], mask.negated)

    def _fill_other_rows(self, node: fx.Node, value: Any, mask: ExpertMask) -> ExpertRows:
        """Replace the ``masked_fill`` operators of all experts, each of which keeps the rows (tokens) of one expert and
        sets all other rows to a number. Return one merged value, in which each row is taken from its own expert's
        result. Raises :class:`NotMergeable` unless each mask is true for the rows that did not choose its expert, and
        lies along the rows of ``value``.

        ``node``: the operator of the first expert. ``value``, ``mask``: its first two operands, each merged over all
        experts.
        """
        held = value.node if isinstance(value, ExpertRows | ExpertColumn) else value
        if not mask.negated or mask.dim is None or not isinstance(held, fx.Node):
            raise NotMergeable
        dim = mask.dim + get_node_tensor(node).dim() - get_node_tensor(node.args[1]).dim()  # type: ignore[arg-type]
        if isinstance(value, ExpertColumn) and dim >= 0:
            held = self.columns.gather_own_entries(value, self._find_row_experts(), dim)
        if (
            dim < 0
            or list_node_sizes(held)[dim] != self.num_rows
            or (isinstance(value, ExpertRows) and value.dim != dim)
        ):
            raise NotMergeable
        number: Any = node.args[2]
        if not self.covers:
            none = self.build(aten.logical_not.default, self._mask_expert_rows())
            none = self.build(aten.reshape.default, none, list_node_sizes(node.args[1]))  # type: ignore[arg-type]
            held = self.build(aten.masked_fill.Scalar, held, none, number)
        return ExpertRows(held, dim, zeroed=bool(number == 0))

    def _mask_expert_rows(self) -> fx.Node:
        """Return a node with a boolean mask ``[rows]``, which is true for the rows (tokens) that chose an expert of the
        loop."""
        keys = self._find_chosen_expert_indices()
        above, below = self.build(aten.ge.Scalar, keys, 0), self.build(aten.lt.Scalar, keys, len(self.loop.outputs))
        return self.build(aten.logical_and.default, above, below)

    def _find_chosen_expert_indices(self) -> fx.Node:
        """Return a node ``[rows]`` with the index, from 0, of each row's expert within the loop. The index is out of
        range for a row (token) that chose none of the loop's experts."""
        loop, numbers = self.loop, self.loop.chosen
        if get_node_tensor(numbers).dtype not in (torch.int32, torch.int64):  # only these dtypes can be used as indices
            numbers = self.build(aten.to.dtype, numbers, torch.int64)
        if loop.dims != tuple(range(len(loop.dims))):
            numbers = self.build(aten.permute.default, numbers, list(loop.dims))
        if len(loop.dims) != 1:
            numbers = self.build(aten.reshape.default, numbers, [self.num_rows])
        return self.build(aten.sub.Tensor, numbers, loop.first) if loop.first else numbers

    def _find_row_experts(self) -> fx.Node:
        """Return a node ``[rows]`` with the index of each row's expert within the loop, clamped to a valid index for a
        row (token) that chose none of the loop's experts."""
        if self.keys is None:
            keys = self._find_chosen_expert_indices()
            self.keys = keys if self.covers else self.build(aten.clamp.default, keys, 0, len(self.loop.outputs) - 1)
        return self.keys

    # -- rows -------------------------------------------------------------------------------------------------------

    def _merge_products(self, node: fx.Node, args: Sequence[Any]) -> ExpertRows:
        """Append one operator that multiplies each row (token) by the matrix of its own expert, in place of the matrix
        products of all experts. Return the result. ``node``: the product of the first expert. ``args``: its operands,
        each merged over all experts.

        Raises :class:`NotMergeable` unless the operands are rows, each computed by its own expert, and one matrix for
        each expert, and the rows lie along a single dim that the product does not sum over.
        """
        x, weight = args[0], self.weights.stack_parameters(args[1])
        if not isinstance(x, ExpertRows) or len(args) != 2 or len(list_node_sizes(weight)) != 3:
            raise NotMergeable
        sizes = list_node_sizes(x.node)
        if x.dim == len(sizes) - 1 or any(s != 1 for d, s in enumerate(sizes[:-1]) if d != x.dim):
            raise NotMergeable
        rows = x.node if len(sizes) == 2 else self.build(aten.reshape.default, x.node, [self.num_rows, sizes[-1]])
        if _PRODUCTS[node.target]:
            weight = self.build(aten.transpose.int, weight, 1, 2)
        new_node = self.build(experts.ops.expert_mm.default, rows, weight, self._find_row_experts())
        new_node = new_node if len(sizes) == 2 else self.build(aten.reshape.default, new_node, list_node_sizes(node))
        return ExpertRows(new_node, x.dim, x.zeroed)

    def _apply_to_sum(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExpertSum:
        """Append the operator of ``node``, which the model applies to the output of each expert, on the sum of all
        experts' outputs, and return the result. This is exact if the operator is linear; otherwise,
        :class:`NotMergeable` is raised. ``args``, ``kwargs``: the operator's arguments, one of which is the sum."""
        given = [
            i for i, a in enumerate(args) if isinstance(a, ExpertRows | ExpertSum | ExpertParameter | PackedParameter)
        ]
        if node.target not in LINEAR or len(given) != 1 or not isinstance(args[given[0]], ExpertSum):
            raise NotMergeable
        if given[0] != 0 and node.target not in SCALED[:1]:
            raise NotMergeable
        return ExpertSum(self.build(node.target, *(a.node if isinstance(a, ExpertSum) else a for a in args), **kwargs))

    def _merge_row_operator(
        self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ExpertRows | MultiResultRows | ExpertSum | PlacedRows:
        """Append one operator on rows (tokens), each computed by its own expert, in place of the corresponding
        operators of all experts. Return the result.

        Raises :class:`NotMergeable` if no operand has such rows, if the operator combines rows, or if its result would
        differ in shape or dtype from ``node``. ``node``: the operator of the first expert. ``args``, ``kwargs``: its
        arguments, each merged over all experts.
        """
        rows = [a for a in args if isinstance(a, ExpertRows)]
        if not rows:
            raise NotMergeable
        operands = [a.node if isinstance(a, ExpertRows) else a for a in args]
        for i, argument in enumerate(args):
            if isinstance(argument, ExpertParameter | PackedParameter):
                operands[i] = self.weights.gather_for_rows(node, argument, rows[0], self._find_row_experts)
        new_node = self.build(node.target, *operands, **kwargs)
        if not _has_same_specs(new_node, node):
            raise NotMergeable
        scaled = node.target in LINEAR and any(a.zeroed for a in rows)
        dims = self._find_row_dims(new_node, {r.node: r.dim for r in rows})
        if isinstance(new_node.meta["val"], tuple | list):
            if dims is None:
                raise NotMergeable
            return MultiResultRows(new_node, dims)
        if dims is not None:
            return ExpertRows(
                new_node, dims[0], scaled and (node.target in SCALED[:1] or (args[0] in rows and args[0].zeroed))
            )
        if node.target is aten.reshape.default and not scaled:
            return PlacedRows(new_node, _find_split_shape(rows[0], new_node))
        if scaled and all(r.zeroed for r in rows):
            return self._apply_to_sum(
                node, [ExpertSum(a.node) if isinstance(a, ExpertRows) else a for a in args], kwargs
            )
        raise NotMergeable

    def _find_row_dims(self, new_node: fx.Node, rows: Mapping[fx.Node, int]) -> tuple[int, ...] | None:
        """Return a tuple with the dim that indexes rows in each result of the operator ``new_node``. Return ``None``
        unless each row of a result depends only on the same row of the operands.

        Args:
            rows: operand that has rows -> the dim that indexes them.
        """
        try:
            rule = factors_of(new_node)
        except PartitionError:
            rule = None
        if rule is None:
            return None
        names = {rule.operands[i][rows[o]] for i, o in enumerate(operands_of(new_node)) if o in rows}
        if len(names) != 1 or len(next(iter(names))) != 1:
            return None
        ((name,),) = names
        cut = rule.spans is not None and rule.spans.factor == name
        if cut or name in rule.whole or name in rule.lower:
            return None
        dims = [[d for d, held in enumerate(result) if name in held] for result in rule.results]
        alone = all(
            len(spots) == 1 and result[spots[0]] == (name,) for result, spots in zip(rule.results, dims, strict=True)
        )
        return tuple(spots[0] for spots in dims) if alone else None

    def _merge_getitem(self, nodes: tuple[fx.Node, ...]) -> ExpertRows:
        """Return the merged value of ``nodes``, the ``getitem`` nodes of all experts that take the same result of an
        operator with several results. Each row (token) is computed by its own expert. Raises :class:`NotMergeable` if
        the operator does not work on such rows."""
        whole: Any = self.merge_nodes(tuple(n.args[0] for n in nodes))  # type: ignore[misc]
        if not isinstance(whole, MultiResultRows):
            raise NotMergeable
        self.inner.update(nodes)
        index: Any = nodes[0].args[1]
        return ExpertRows(self.build(operator.getitem, whole.node, index), whole.dims[index], zeroed=False)


def _keep_only_dim(node: fx.Node, dim: int) -> tuple[int, ...]:
    """Return the shape of ``node`` with size 1 in every dim except ``dim``."""
    return tuple(size if d == dim else 1 for d, size in enumerate(list_node_sizes(node)))


def _find_split_shape(rows: ExpertRows, new_node: fx.Node) -> tuple[int, ...]:
    """Return the shape of ``new_node``, a reshape of ``rows``, with size 1 in every dim except those into which the dim
    of rows is split.

    Raises :class:`NotMergeable` if the reshape changes other dims.
    """
    sizes, end = (
        list_node_sizes(new_node),
        len(list_node_sizes(new_node)) - (len(list_node_sizes(rows.node)) - 1 - rows.dim),
    )
    before, after = list_node_sizes(rows.node)[: rows.dim], list_node_sizes(rows.node)[rows.dim + 1 :]
    if sizes[: len(before)] != before or sizes[end:] != after or end < len(before):
        raise NotMergeable
    return (*[1] * len(before), *sizes[len(before) : end], *[1] * len(after))


def _has_same_specs(new_node: fx.Node, node: fx.Node) -> bool:
    """Return whether the results of ``new_node`` and ``node`` have the same shapes and dtypes, so that ``new_node`` can
    replace ``node``."""
    forms = [
        [(v.shape, v.dtype) for v in (held if isinstance(held, tuple | list) else (held,))]
        for held in (new_node.meta["val"], node.meta["val"])
    ]
    return forms[0] == forms[1]
