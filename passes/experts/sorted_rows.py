"""Remove sorts of rows (tokens) by expert from the model's graph, and avoid repeated sorts in the graph of one rank.

:func:`remove_row_sorts` keeps rows in their original order, so that they can be sharded. A mixture of experts sorts the
choices of all tokens, gathers rows in this order, works on each row separately and by its expert, and writes the rows
back. Operators on single rows commute with the sort: if an operator's sharding rule keeps the sorted dim, the operator
is applied to the unsorted rows. A value that does not depend on the order (rows written back, sums over all rows) then
replaces the value computed from sorted rows, and nothing reads the sort any more.

:func:`keep_rows_sorted` works on the graph of one rank. ``partition::expert_mm``, the product of each row with its
expert's matrix, sorts the rows that it reads and returns its rows in the original order. Between two products with the
same experts, rows can stay sorted if all operators between the products work on each row separately. Requires: a local
graph. Provides: an equivalent graph, in which rows are sorted once before the products and unsorted once after them,
also in backward.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partitioner.passes.errors import PartitionError
from partitioner.passes.experts.regions import ExpertRegion, find_expert_regions
from partitioner.passes.ir.interpret import META, insert_operator_node
from partitioner.passes.ir.model import Block
from partitioner.passes.ir.rewrite import Builder, drop_unused, get_node_tensor, list_node_sizes
from partitioner.passes.ops import experts
from partitioner.passes.ops.experts import ops
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.factors import get_node_argument, operands_of, replace_operands, results_of

aten = torch.ops.aten

_CASTS = (aten._to_copy.default, aten.to.dtype)
_SORTS = (aten.sort.default, aten.sort.stable)
_ARGSORTS = (aten.argsort.default, aten.argsort.stable)
_LOOKUPS = (aten.index.Tensor, aten.index_select.default)


def remove_row_sorts(graph: fx.Graph) -> None:
    """Rewrite ``graph`` in place so that rows (tokens) keep their order where the model sorts them, such as by expert.

    Only operators whose results do not depend on the order are rewritten; a sort that other operators still read stays.
    Every node must have a meta tensor in ``node.meta["val"]``, and still has one after the rewrite.
    """
    for node in list(graph.nodes):
        if node.target in (*_SORTS, *_ARGSORTS) and len(list_node_sizes(operands_of(node)[0])) == 1:
            _Unsorter(graph, node).unsort_rows()
    drop_unused(graph)


@dataclass(frozen=True)
class _UnsortedValue:
    """The value that replaces the results of an operator after a sort of rows (tokens) when the rows stay unsorted.

    ``node``: the node with this value. ``dims``: for each result of the original operator, the dim along which rows are
    sorted; ``None`` for a result that does not depend on the order of the rows.
    """

    node: fx.Node
    dims: tuple[int | None, ...] = (0,)


class _Unsorter:
    """Rewrites the operators of ``graph`` that read rows (tokens) sorted by expert to read the rows in their original
    order, so that the sort is not needed.

    ``sort``: the node that sorts rows. ``keys``: the values by which it sorts, such as expert numbers. ``order``: the
    node with the original positions of the sorted rows. ``unsorted_values``: node that depends on the sort -> its value
    on unsorted rows. ``inverse``: the nodes that compute the inverse permutation.
    """

    def __init__(self, graph: fx.Graph, sort: fx.Node) -> None:
        self.graph = graph
        self.sort = sort
        self.keys = operands_of(sort)[0]
        self.num_rows = list_node_sizes(self.keys)[0]
        self.ascending = not get_node_argument(sort, "descending", False)
        self.unsorted_values: dict[fx.Node, _UnsortedValue] = {}
        self.order: fx.Node | None = None
        self.inverse: set[fx.Node] = set()

    def unsort_rows(self) -> None:
        """Rewrite the operators that depend on the sort of rows (tokens), in graph order, to work on unsorted rows. An
        operator whose result needs the sorted order is not changed, and then the sort stays, too."""
        nodes = list(self.graph.nodes)
        with self.graph.inserting_before(self.sort):
            build = Builder(self.graph, self.sort)
            self.place = build(aten.arange.default, self.num_rows, device=META)
        if self.sort.target in _ARGSORTS:
            self._is_order(self.sort)
        reached = set(self.sort.users)
        for node in nodes[nodes.index(self.sort) + 1 :]:
            if (node in reached or node.target is aten.searchsorted.Tensor) and node.op == "call_function":
                with self.graph.inserting_before(node):
                    self._visit_node(node, Builder(self.graph, node))
                if node in self.unsorted_values or node in self.inverse:
                    reached.update(node.users)

    def _is_order(self, node: fx.Node) -> None:
        self.order = node
        self.unsorted_values[node] = _UnsortedValue(self.place)

    def _visit_node(self, node: fx.Node, build: Builder) -> None:
        """Compute the value of the operator ``node``, which reads rows (tokens) sorted by expert, for rows in their
        original order, and store it in ``unsorted_values``, or replace ``node`` by it. If this is impossible, leave
        ``node`` unchanged. ``build`` appends operators to the graph."""
        source: Any = node.args[0]
        if source is self.sort and self.sort.target in _SORTS:
            if node.args[1] == 0:
                self.unsorted_values[node] = _UnsortedValue(self.keys)
            else:
                self._is_order(node)
        elif self._is_inverse_order(node):
            self.inverse.add(node)
        elif self._computes_expert_keys(node):
            keys = self.keys
            if get_node_tensor(keys).dtype != get_node_tensor(node).dtype:
                keys = build(aten.to.dtype, keys, get_node_tensor(node).dtype)
            self.unsorted_values[node] = _UnsortedValue(keys)
        elif node.target is operator.getitem:
            self._unsort_getitem(node, build)
        else:
            unsorted = (
                self._match_unsorted_rows(node)
                or self._unsort_row_write(node)
                or self._unsort_grouped_product(node, build)
            )
            unsorted = unsorted or self._unsort_index_add(node, build) or self._commute_with_sort(node, build)
            if unsorted is not None:
                self._record_unsorted_value(node, unsorted)

    def _record_unsorted_value(self, node: fx.Node, unsorted: _UnsortedValue) -> None:
        """Record ``unsorted``, the value of ``node`` for unsorted rows (tokens). If no result of ``node`` depends on
        the order of the rows, ``unsorted`` replaces ``node`` in the graph."""
        if any(dim is not None for dim in unsorted.dims):
            self.unsorted_values[node] = unsorted
        elif unsorted.node.op == "call_function":  # ``node`` is changed in place, so that an output keeps its name
            node.target, node.args, node.kwargs = unsorted.node.target, unsorted.node.args, unsorted.node.kwargs
        else:
            node.replace_all_uses_with(unsorted.node)

    def _unsort_getitem(self, node: fx.Node, build: Builder) -> None:
        """If ``node`` selects a result of an operator that has a value for unsorted rows (tokens), record the selected
        result of this value. ``build`` appends operators to the graph."""
        source, index = node.args
        if source in self.unsorted_values:
            unsorted = self.unsorted_values[source]  # type: ignore[index]
            assert isinstance(index, int)
            self._record_unsorted_value(
                node, _UnsortedValue(build(node.target, unsorted.node, index), (unsorted.dims[index],))
            )

    def _is_inverse_order(self, node: fx.Node) -> bool:
        """Return whether ``node`` is the inverse of the sort's permutation, by which a model restores the original
        order of rows (tokens): an ``arange`` written to the positions of the sort order, or an ``argsort`` of the
        order."""
        if self.order is None:
            return False
        if node.target in _ARGSORTS:
            return node.args[0] is self.order and not get_node_argument(node, "descending", False)
        if node.target is aten.index_put.default:
            base, places, values, *_ = node.args
            sized = list_node_sizes(base) == [self.num_rows]  # type: ignore[arg-type]
            if not sized or list(places) != [self.order]:  # type: ignore[arg-type]
                return False
            return _is_full_arange(values, self.num_rows)
        if node.target is aten.scatter.src:
            base, _, places, values = node.args
            sized = list_node_sizes(base) == [self.num_rows]  # type: ignore[arg-type]
            return sized and places is self.order and _is_full_arange(values, self.num_rows)
        return False

    def _match_unsorted_rows(self, node: fx.Node) -> _UnsortedValue | None:
        """If ``node`` is an index operator that restores the original order of rows (tokens) after the sort
        ``self.sort``, return the value that replaces it, whose rows were never sorted; otherwise return ``None``. The
        ``dims`` of the value are ``(None,)``: it does not depend on the sort order."""
        found = _parse_row_lookup(node)
        if found is None or found[1] not in self.inverse or found[0] not in self.unsorted_values:
            return None
        unsorted = self.unsorted_values[found[0]]
        return _UnsortedValue(unsorted.node, (None,)) if unsorted.dims == (0,) else None

    def _unsort_row_write(self, node: fx.Node) -> _UnsortedValue | None:
        """If ``node`` writes all rows (tokens) sorted by ``self.sort`` to their original positions in a tensor of the
        same shape, return the value that replaces it, whose rows were never sorted; otherwise return ``None``. The
        ``dims`` of the value are ``(None,)``: it does not depend on the sort order."""
        args: Any = node.args
        if node.target is aten.index_copy.default and args[1] == 0:
            base, places, rows = args[0], args[2], args[3]
        elif node.target is aten.index_put.default and len(args[1]) == 1 and not any(args[3:]) and not node.kwargs:
            base, places, rows = args[0], args[1][0], args[2]
        else:
            return None
        if base in self.unsorted_values or not all(
            n in self.unsorted_values and self.unsorted_values[n].dims == (0,) for n in (places, rows)
        ):
            return None
        if self.unsorted_values[places].node is not self.place or list_node_sizes(base) != list_node_sizes(rows):
            return None
        return _UnsortedValue(self.unsorted_values[rows].node, (None,))

    def _computes_expert_keys(self, node: fx.Node) -> bool:
        """Return whether ``node`` computes the expert number of each sorted row: a ``searchsorted`` of the row
        positions in the end positions of each expert's rows (tokens)."""
        if node.target is not aten.searchsorted.Tensor or not get_node_argument(node, "right"):
            return False
        ends, rows = node.args[:2]
        plain = get_node_argument(node, "side") is None and get_node_argument(node, "sorter") is None
        return plain and _is_full_arange(rows, self.num_rows) and self._are_ends(ends, list_node_sizes(ends)[0])  # type: ignore[arg-type]

    def _unsort_grouped_product(self, node: fx.Node, build: Builder) -> _UnsortedValue | None:
        """If ``node`` multiplies rows (tokens), sorted by expert, by their experts' matrices, append a product that
        reads the rows in their original order, and return its value (rows along dim 0).

        Return ``None`` for other nodes, or if the new product has another dtype. ``build`` appends operators.
        """
        how = experts.find_grouped_product(node.target)
        if how is None:
            return None
        operands = operands_of(node)
        if (
            len(operands) != 3
            or operands[0] not in self.unsorted_values
            or self.unsorted_values[operands[0]].dims != (0,)
        ):
            return None
        rows, weight, ends = operands
        are_groups = self._are_ends if how.groups == "ends" else self._are_sizes
        if (
            weight in self.unsorted_values
            or len(list_node_sizes(weight)) != 3
            or not are_groups(ends, list_node_sizes(weight)[0])
        ):
            return None
        weight = build(aten.transpose.int, weight, 1, 2) if how.transposed else weight
        made = build(experts.ops.expert_mm.default, self.unsorted_values[rows].node, weight, self.keys)
        return _UnsortedValue(made) if made.meta["val"].dtype == node.meta["val"].dtype else None

    def _are_ends(self, node: fx.Node, num_experts: int) -> bool:
        """Return whether ``node`` has the end position of each expert's rows (tokens) in the sorted order, for
        ``num_experts`` experts: the cumulative sum of the experts' row counts."""
        total = _skip_casts(node)
        return total.target is aten.cumsum.default and self._are_sizes(total.args[0], num_experts)

    def _are_sizes(self, node: Any, num_experts: int) -> bool:
        """Return whether ``node`` has the number of rows (tokens) of each of ``num_experts`` experts, and the rows are
        sorted in this order of experts."""
        counts = _skip_casts(node)
        if not self.ascending:
            return False
        if counts.target is aten.histc.default:
            bins = [get_node_argument(counts, name) for name in ("bins", "min", "max")]
            return bins == [num_experts, 0, num_experts - 1] and self._is_keys(counts.args[0])
        if counts.target is aten.bincount.default:
            return get_node_argument(counts, "minlength") == num_experts and self._is_keys(counts.args[0])
        if counts.target is aten.sum.dim_IntList:
            marks = _skip_casts(counts.args[0])  # type: ignore[arg-type]
            return counts.args[1] == [0] and marks.target is aten.one_hot.default and self._is_keys(marks.args[0])
        return False

    def _is_keys(self, node: Any) -> bool:
        return _is_same_value(_skip_casts(node), _skip_casts(self.keys))

    def _unsort_index_add(self, node: fx.Node, build: Builder) -> _UnsortedValue | None:
        """If ``node`` is an ``index_add`` of rows (tokens) sorted by ``self.sort``, append an ``index_add`` of the rows
        in their original order, and return its value; otherwise return ``None``. The ``dims`` of the value are
        ``(None,)``: it does not depend on the order of the rows.

        If each position occurs equally often and in order, a sum replaces the ``index_add``. ``build`` appends
        operators.
        """
        if node.target is not aten.index_add.default:
            return None
        base, dim, places, rows = node.args[:4]
        if dim != 0 or base in self.unsorted_values or len(node.args) > 4 or node.kwargs:
            return None
        if not all(n in self.unsorted_values and self.unsorted_values[n].dims == (0,) for n in (places, rows)):  # type: ignore[index]
            return None
        where, what = self.unsorted_values[places].node, self.unsorted_values[rows].node  # type: ignore[index]
        times = self._count_repeats(where, list_node_sizes(base)[0])  # type: ignore[arg-type]
        if times is None:
            return _UnsortedValue(build(node.target, base, 0, where, what), (None,))
        split = build(
            aten.reshape.default, what, [list_node_sizes(what)[0] // times, times, *list_node_sizes(what)[1:]]
        )
        summed = build(aten.sum.dim_IntList, split, [1])
        return _UnsortedValue(build(aten.add.Tensor, base, summed), (None,))

    def _commute_with_sort(self, node: fx.Node, build: Builder) -> _UnsortedValue | None:
        """If ``node`` reads rows (tokens) sorted by ``self.sort``, and works on each row separately or sums rows,
        append its operator on the rows in their original order. Return the value of the new node, with the dim of rows
        in each result (``None`` for a sum over the rows).

        Return ``None`` for any other operator. ``build`` appends operators.
        """
        try:
            rule = factors_of(node)
        except PartitionError:
            return None
        operands = operands_of(node)
        if rule is None or any(o in self.inverse for o in operands):
            return None
        names = {
            n
            for i, o in enumerate(operands)
            if o in self.unsorted_values
            for n in self._find_sorted_factor(o, rule.operands[i])
        }
        if len(names) != 1:
            return None
        (name,) = names
        if name == "" or name in rule.whole or name in rule.lower or (rule.spans and rule.spans.factor == name):
            return None
        for i, o in enumerate(operands):
            held = sum(name in factors for factors in rule.operands[i])
            if held != (1 if o in self.unsorted_values else 0):
                return None
        dims = [_find_factor_dim(name, factors) for factors in rule.results]
        if any(dim == -1 for dim in dims) or len(dims) != len(results_of(node)):
            return None
        args, kwargs = replace_operands(
            node, [self.unsorted_values[o].node if o in self.unsorted_values else o for o in operands]
        )
        made = self._append_row_lookup(node, args, build) or build(node.target, *args, **kwargs)
        return _UnsortedValue(made, tuple(dims))

    def _find_sorted_factor(self, node: fx.Node, dims: tuple[tuple[str, ...], ...]) -> set[str]:
        """Return a set with the name of the loop dimension (as in an einsum) along which ``node``, an operand of an
        operator, is sorted. The name is ``""`` if the sorted dim does not belong to exactly one loop dimension.

        Args:
            dims: for each dim of the operand, the names of its loop dimensions.
        """
        dim = self.unsorted_values[node].dims[0]
        assert dim is not None
        return {dims[dim][0]} if dim < len(dims) and len(dims[dim]) == 1 else {""}

    def _append_row_lookup(self, node: fx.Node, args: tuple[Any, ...], build: Builder) -> fx.Node | None:
        """Append operators that compute the row look-up ``node`` (``rows[places]``) for unsorted rows (tokens) without
        an index operator, and return the result.

        Return ``None`` unless the looked-up positions are 0, 1, .. in order, each repeated equally often.

        Args:
            args: the arguments of ``node`` on unsorted rows.
            build: appends operators.
        """
        found = _parse_row_lookup(node)
        if found is None:
            return None
        rows, where = found[0], self.unsorted_values[found[1]].node if found[1] in self.unsorted_values else found[1]
        if rows in self.unsorted_values:
            return None
        times = self._count_repeats(where, list_node_sizes(rows)[0])
        if times is None:
            return None
        if times == 1:
            return rows
        wide = build(aten.unsqueeze.default, rows, 1)
        wide = build(aten.expand.default, wide, [list_node_sizes(rows)[0], times, *list_node_sizes(rows)[1:]])
        return build(aten.reshape.default, wide, [self.num_rows, *list_node_sizes(rows)[1:]])

    def _count_repeats(self, where: fx.Node, num_places: int) -> int | None:
        """If the index tensor ``where`` has the form ``0 0 1 1 2 2 ..``, with the numbers 0 to ``num_places - 1``,
        return how often each number occurs; otherwise return ``None``."""
        times = 1
        if where.target in (aten.floor_divide.default, aten.floor_divide.Scalar, aten.div.Tensor_mode):
            if where.kwargs.get("rounding_mode", "floor") not in ("floor", "trunc") or not isinstance(
                where.args[1], int
            ):
                return None
            times, where = where.args[1], where.args[0]  # type: ignore[assignment]
        return times if where is self.place and times * num_places == self.num_rows else None


def _parse_row_lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (``rows``, ``places``) if ``node`` computes ``rows[places]`` along dim 0; otherwise ``None``."""
    if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        return node.args[0], node.args[1][0]  # type: ignore[index,return-value]
    if node.target is aten.index_select.default and node.args[1] == 0:
        return node.args[0], node.args[2]  # type: ignore[return-value]
    return None


def _skip_casts(node: fx.Node) -> fx.Node:
    while node.target in _CASTS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_same_value(a: Any, b: Any) -> bool:
    """Return whether the operator arguments ``a`` and ``b`` have the same value: they are equal, or they are nodes that
    apply the same operators to the same nodes."""
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        computed = a.op == b.op == "call_function" and a.target == b.target and a.kwargs == b.kwargs
        return a is b or (computed and _is_same_value(a.args, b.args))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_same_value, a, b))
    return type(a) is type(b) and bool(a == b)


def _is_full_arange(node: Any, num: int) -> bool:
    """Return whether ``node`` is ``arange(num)``: the numbers 0 to ``num - 1`` in order."""
    if not isinstance(node, fx.Node) or "aten.arange" not in str(node.target):
        return False
    return (
        get_node_argument(node, "start", 0),
        get_node_argument(node, "end"),
        get_node_argument(node, "step", 1),
    ) == (0, num, 1)


def _find_factor_dim(name: str, dims: tuple[tuple[str, ...], ...]) -> int | None:
    """Return the dim of a value that runs over the loop dimension ``name`` of an operator (as in an einsum) and over no
    other one. Return ``None`` if no dim runs over ``name``. Return -1 if several dims do, or if the dim also runs over
    another loop dimension.

    Args:
        dims: for each dim of the value, the names of its loop dimensions.
    """
    held = [d for d, factors in enumerate(dims) if name in factors]
    if not held:
        return None
    return held[0] if len(held) == 1 and dims[held[0]] == (name,) else -1


# key of the meta of an inserted node: name of the node that it was inserted for, with which it is recomputed
MADE_BY = "made_by"

_PRODUCT = ops.expert_mm.default


def keep_rows_sorted(block: Block) -> Block:
    """Return a block equivalent to ``block`` (the graph of a piece of the model) in which several products with
    experts' matrices share one sort. In ``block``, every such product sorts its rows (tokens) by expert and restores
    their order. In the result, rows are sorted once before all products and restored once after them. If no two
    products have the same experts, ``block`` itself is returned."""
    products = Counter(n.args[2] for n in block.graph.nodes if n.target is _PRODUCT)
    if max(products.values(), default=0) < 2:
        return block
    block = block.copy()
    for region in find_expert_regions(block):
        if sum(n.target is _PRODUCT for n in region.products) > 1 and len(region.products) == sum(
            n.target is _PRODUCT for n in region.nodes
        ):
            _Sorter(block.graph, region).sort_rows()
    drop_unused(block.graph)
    return block


class _Sorter:
    """Rewrites one part of a graph that computes by expert so that its rows (tokens) are sorted once before this part
    and unsorted once after it.

    ``region``: the part that computes by expert. ``keys``: the node with the expert number of each row. ``moved``:
    operand from outside of the part -> its sorted copy.
    """

    def __init__(self, graph: fx.Graph, region: ExpertRegion) -> None:
        assert region.keys is not None
        self.graph, self.region, self.keys = graph, region, region.keys
        self.moved: dict[fx.Node, fx.Node] = {}

    def sort_rows(self) -> None:
        """Insert the sort of rows (tokens) by expert before the part of the graph that computes by expert, change the
        part's operators, and restore the order of rows that are read outside of the part."""
        nodes = [n for n in self.graph.nodes if n in self.region.nodes]
        with self.graph.inserting_after(self.keys):
            found = self._append_call(ops.sort_experts.default, self.keys, self.keys, self.region.num_experts)
        with self.graph.inserting_after(found):
            self.order = insert_operator_node(self.graph, operator.getitem, (found, 0), like=found)
        with self.graph.inserting_after(self.order):
            self.ends = insert_operator_node(self.graph, operator.getitem, (found, 1), like=found)
        for node in nodes:
            with self.graph.inserting_before(node):
                self._rewrite_region_node(node)
        for node in self.region.exits:
            outside = [u for u in node.users if u not in self.region.nodes]
            with self.graph.inserting_after(node):
                back = self._append_call(ops.unsort_rows.default, node, node, self.order)
            for user in outside:
                user.replace_input_with(node, back)

    def _rewrite_region_node(self, node: fx.Node) -> None:
        """Change ``node``, an operator between the sort and its inverse, in place to read sorted rows (tokens). A
        product of each row with its expert's matrix becomes a grouped product."""
        if node.target is _PRODUCT:
            rows, weight, _, *how = node.args
            node.target, node.args = ops.grouped_mm.default, (self._sort_operand(rows), weight, self.ends, *how)  # type: ignore[arg-type]
        else:
            node.args, node.kwargs = replace_operands(node, [self._sort_operand(o) for o in operands_of(node)])

    def _sort_operand(self, node: fx.Node) -> fx.Node:
        """Return the node that replaces ``node``, an operand of an operator that computes by expert, when rows (tokens)
        are sorted by expert: a sorted copy if ``node`` has rows or their expert numbers from outside; otherwise
        ``node`` itself."""
        if node is not self.keys and node not in self.region.entries:
            return node
        if node not in self.moved:
            self.moved[node] = self._append_call(ops.sort_rows.default, node, node, self.order)
        return self.moved[node]

    def _append_call(self, target: object, like: fx.Node, *args: object) -> fx.Node:
        made = insert_operator_node(self.graph, target, args, like=like)  # type: ignore[arg-type]
        made.meta[MADE_BY] = like.name
        return made
