"""Find the regions of a block that compute by expert: their inputs, their outputs, and the experts' parameters.

The regions are found from the graph alone. There are two forms:

* *routed*: rows (tokens), each with the number of its expert (``keys``), pass through ``partition::expert_mm`` (a
  product of each row with its expert's matrix), look-ups of a parameter of the expert (a bias) and operators that work
  on each row separately;
* *dense*: every expert works on all rows, ``[e, t, k]`` through ``bmm`` with a weight ``[e, k, n]``, and a ``topk``
  over as many scores as there are experts selects the results that count.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.collectives import is_collective_over
from partitioner.passes.ir.model import Block
from partitioner.passes.ops.experts import list_row_products
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.factors import OpFactors, get_meta_shape, operands_of, results_of

aten = torch.ops.aten

CHOICES = (aten.topk.default, aten.sort.default, aten.argsort.default, aten.argmax.default, aten.max.dim)
_LOOKUPS: dict[Any, tuple[int, int]] = {
    aten.index.Tensor: (0, 1),
    aten.index_select.default: (0, 2),
    aten.embedding.default: (0, 1),
}


@dataclass(frozen=True)
class RowExpertDims:
    """The dims of a value that index rows (tokens) and experts.

    ``rows``: the dim of rows. ``experts``: the dim of experts; ``None`` if each row has a single expert, so that no dim
    indexes experts.
    """

    rows: int
    experts: int | None = None


@dataclass(frozen=True)
class ExpertRegion:
    """A part of a block (the graph of a piece of the model) in which the experts of a mixture compute: each row (token)
    is computed by its own expert (routed form), or every row by all experts (dense form).

    ``keys``: the node with the expert number of each row; ``None`` in the dense form. ``num_experts``: the number of
    experts. ``tables``: node that is computed only from the experts' parameters -> its dim of experts. ``nodes``:
    operator that works row by row -> the row and expert dims of its results, in order. ``entries``: value from outside
    that operators in ``nodes`` read -> its row and expert dims. ``exits``: the operators in ``nodes`` that are read
    outside. ``products``: the matrix products among ``nodes``.
    """

    keys: fx.Node | None
    num_experts: int
    tables: Mapping[fx.Node, int]
    nodes: Mapping[fx.Node, tuple[RowExpertDims, ...]]
    entries: Mapping[fx.Node, RowExpertDims]
    exits: tuple[fx.Node, ...]
    products: tuple[fx.Node, ...]

    @property
    def states(self) -> dict[str, int]:
        """Return a dict: placeholder name of a parameter or buffer of the experts -> its dim of experts."""
        return {n.name: dim for n, dim in self.tables.items() if n.op == "placeholder"}


def find_expert_regions(block: Block, expert_axes: Collection[str] = ()) -> list[ExpertRegion]:
    """Return the parts of ``block`` (the graph of a piece of the model) that compute by expert (expert regions).

    A region consists of matrix products in which each row (token) has one expert (or all experts compute all rows), and
    of operators between and after them that work on each row separately. If an operator between products combines rows,
    the products are in no region.

    Args:
        expert_axes: mesh axes along which ranks will have different experts. An operator that communicates over such an
            axis ends a region.
    """
    found = []
    products: dict[fx.Node, list[fx.Node]] = {}
    for node in block.graph.nodes:
        if node.target in list_row_products():
            products.setdefault(list_row_products()[node.target](node)[2], []).append(node)
    for keys, nodes in products.items():
        region = _RegionFinder(block, keys, nodes, expert_axes).find_region()
        if region is not None:
            found.append(region)
    dense: dict[int, list[fx.Node]] = {}
    for node in block.graph.nodes:
        if node.target == aten.bmm.default:
            dense.setdefault(get_meta_shape(node)[0], []).append(node)
    for nodes in dense.values():
        region = _RegionFinder(block, None, nodes, expert_axes).find_region()
        if region is not None:
            found.append(region)
    return found


class _RegionFinder:
    """Finds one expert region, a part of a block (the graph of a piece of the model) in which the experts of a mixture
    compute, starting from the experts' matrix products.

    ``products``: the matrix products. ``tables``: node that is computed only from the experts' parameters -> its dim of
    experts. ``keys``: the node with the expert number of each row (token); ``None`` if all experts compute every row.
    ``places``: operator of the region -> the row and expert dims of its results. ``entries``: value from outside that
    the operators read -> its row and expert dims. ``expert_axes``: mesh axes along which ranks will have different
    experts; operators that communicate over them cannot be in the region.
    """

    def __init__(
        self, block: Block, keys: fx.Node | None, products: list[fx.Node], expert_axes: Collection[str] = ()
    ) -> None:
        self.block = block
        self.apart = expert_axes
        self.keys = keys
        self.products = products
        self.states = set(block.states)
        self.tables: dict[fx.Node, int] = {}
        self.places: dict[fx.Node, tuple[RowExpertDims, ...]] = {}
        self.entries: dict[fx.Node, RowExpertDims] = {}
        self.num_experts = 0

    def find_region(self) -> ExpertRegion | None:
        """Return the part of the graph that computes by expert around the matrix products of this object. Return
        ``None`` if its experts cannot be distributed over ranks, for one of these reasons:

        * an operator between the products combines rows (tokens);
        * an operator outside of the part reads the experts' parameters;
        * values that enter or leave the part have rows or experts in other dims than values sent between ranks.
        """
        seeds = self._find_seed_nodes()
        if not seeds:
            return None
        inside = seeds | (_collect_descendants(self.block, seeds) & _collect_ancestors(self.block, seeds))
        inside -= set(self.tables)
        order = [n for n in self.block.graph.nodes if n in inside]
        if not all(self._add_region_node(node, node in seeds) for node in order):
            return None
        self._extend_region()
        if not all(u in self.tables or u in self.places for table in self.tables for u in table.users):
            return None
        exits = tuple(n for n in self.places if any(u not in self.places for u in n.users))
        if not all(place == self._find_sent_row_dims for n in exits for place in self.places[n]):
            return None
        if not all(place == self._find_sent_row_dims for place in self.entries.values()):
            return None
        products = tuple(n for n in self.products if n in self.places)
        return ExpertRegion(self.keys, self.num_experts, self.tables, self.places, self.entries, exits, products)

    @property
    def _find_sent_row_dims(self) -> RowExpertDims:
        """Return the dims of rows (tokens) and experts in values that are sent between the ranks of experts. If each
        row has one expert, rows are dim 0. Otherwise, experts are dim 0 and rows dim 1."""
        return RowExpertDims(0) if self.keys is not None else RowExpertDims(1, 0)

    def _find_seed_nodes(self) -> set[fx.Node]:
        """Return the nodes from which the search for a part that computes by expert starts: operators that combine rows
        (tokens) with a parameter of the experts, such as products with the experts' matrices, and look-ups of a bias.
        Return an empty set if there are no such products, or if their numbers of experts differ."""
        if self.keys is None:
            tables = {n: n.args[1] for n in self.products if self._is_table(n.args[1], 0)}
            tables = {n: t for n, t in tables.items() if not self._is_table(n.args[0], 0)}
        else:
            tables = {n: list_row_products()[n.target](n)[1] for n in self.products}
            tables = {n: t for n, t in tables.items() if self._is_table(t, 0)}
            for node in self.keys.users:
                at = _LOOKUPS.get(node.target)
                if (
                    at is not None
                    and _find_lookup_indices(node, at[1]) is self.keys
                    and self._is_table(node.args[at[0]], 0)
                ):
                    tables[node] = node.args[at[0]]
        sizes = {get_meta_shape(t)[0] for t in tables.values()}  # type: ignore[arg-type]
        if len(sizes) != 1 or not any(n in tables for n in self.products):
            return set()
        (self.num_experts,) = sizes
        if self.keys is None and not self._is_routed(tables):
            return set()
        for table in tables.values():
            self._add_table(table, 0)
        if self.keys is not None:
            return set(tables)
        return {u for t in self.tables for u in t.users if u not in self.tables and u.op == "call_function"}

    def _is_routed(self, products: Iterable[fx.Node]) -> bool:
        """Return whether a router chooses among the experts of the matrix products ``products``: the products, or
        values that depend on them, also depend on an operator such as ``topk`` over as many scores as there are
        experts."""
        behind = _collect_descendants(self.block, set(products))
        around = _collect_ancestors(self.block, behind | set(products)) - behind
        return any(n.target in CHOICES and get_meta_shape(n.args[0])[-1:] == (self.num_experts,) for n in around)  # type: ignore[arg-type]

    def _is_table(self, node: Any, dim: int) -> bool:
        """Return whether ``node`` is computed only from parameters, buffers and constants, and can be sharded along its
        dim ``dim`` by sharding them."""
        return isinstance(node, fx.Node) and _trace_to_states(node, dim, self.states) is not None

    def _add_table(self, node: Any, dim: int) -> None:
        found = _trace_to_states(node, dim, self.states)
        assert found is not None
        self.tables |= found

    def _add_region_node(self, node: fx.Node, seed: bool) -> bool:
        """Add the operator ``node`` to the part of the graph that computes by expert: record the dims of its results
        that index rows (tokens) and experts, and its operands from outside. Return ``True``; or return ``False``
        without adding ``node`` if it does not work row by row.

        Args:
            seed: whether the operator combines rows with a parameter of the experts.
        """
        if seed and self.keys is not None:
            if any(node is p for p in self.products):
                self._add_region_entry(list_row_products()[node.target](node)[0], RowExpertDims(0))
            self.places[node] = (RowExpertDims(0),)
            return True
        if node.target is operator.getitem:
            source, index = node.args
            self.places[node] = (self.places[source][index],)  # type: ignore[index]
            return True
        rule = _find_factor_rule(node)
        if rule is None:
            return False
        rows, experts = self._find_row_factors(node, rule)
        if rows is None or (self.keys is None and experts is None):
            return False
        places = [_find_row_dims(rows, experts, dims) for dims in rule.results]
        if len(places) != len(results_of(node)) or any(p is None for p in places):
            return False
        for operand, dims in zip(operands_of(node), rule.operands, strict=True):
            if operand in self.tables:
                continue
            if operand in self.places:
                if _find_row_dims(rows, experts, dims) != self.places[operand][0]:
                    return False
            elif any(rows in factors or experts in factors for factors in dims):
                place = _find_row_dims(rows, experts, dims)
                by = [d for d, held in enumerate(dims) if experts in held]
                # a parameter of each expert, such as a bias
                if not any(rows in held for held in dims) and self._is_table(operand, by[0]):
                    self._add_table(operand, by[0])
                    continue
                if place is None:
                    return False
                self._add_region_entry(operand, place)
        self.places[node] = tuple(places)  # type: ignore[arg-type]
        return True

    def _find_row_factors(self, node: fx.Node, rule: OpFactors) -> tuple[str | None, str | None]:
        """Return (loop dimension of rows, loop dimension of experts) of the operator ``node``: the names in its
        sharding rule ``rule``, where loop dimensions are named as in an einsum. The second is ``None`` if each row
        (token) has a single expert. Both are ``None`` if the operator does not work on each row separately."""
        rows: set[str] = set()
        experts: set[str] = set()
        for operand, dims in zip(operands_of(node), rule.operands, strict=True):
            if operand in self.places:
                place = self.places[operand][0]
                rows |= set(dims[place.rows])
                experts |= set() if place.experts is None else set(dims[place.experts])
            elif operand in self.tables:
                experts |= set(dims[self.tables[operand]])
        if self.keys is None and not rows and node in self.products:
            rows = {"m"}
        if len(rows) != 1 or len(experts) != (self.keys is None):
            return None, None
        cut = {rule.spans.factor} if rule.spans else set()
        if (rows | experts) & (rule.whole | set(rule.lower) | cut):
            return None, None
        return rows.pop(), experts.pop() if experts else None

    def _add_region_entry(self, node: fx.Node, place: RowExpertDims) -> None:
        if node not in self.places:
            self.entries[node] = place

    def _extend_region(self) -> None:
        """Add operators to the region, the part of the graph that computes by expert, that read its results, work on
        each row (token) separately and read no rows from outside, such as the addition of a bias or an activation."""
        for node in self.block.graph.nodes:
            operands = operands_of(node) if node.op == "call_function" else ()
            inside = [o for o in operands if o in self.places]
            if not inside or node in self.places or is_collective_over(node, self.apart):
                continue
            if _count_result_bytes(node) > max(_count_result_bytes(o) for o in inside):
                continue
            entries, tables = dict(self.entries), dict(self.tables)
            added = self._add_region_node(node, False) and all(
                place == self._find_sent_row_dims for place in self.places[node]
            )
            if not added or self.entries != entries:
                self.entries, self.tables = entries, tables
                self.places.pop(node, None)


def _find_lookup_indices(node: fx.Node, at: int) -> Any:
    """Return the node of the indices by which ``node`` looks up rows (tokens) along dim 0; ``None`` if ``node`` looks
    up along another dim.

    Args:
        at: position of the index among the operator's arguments, from 0.
    """
    if node.target == aten.index.Tensor:
        indices: Any = node.args[1]
        return indices[0] if len(indices) == 1 else None
    if node.target == aten.index_select.default and node.args[1] != 0:
        return None
    return node.args[at]


def _trace_to_states(node: fx.Node, dim: int, states: set[str]) -> dict[fx.Node, int] | None:
    """Return a dict of the dims along which ``node`` and its ancestors must be sharded so that ``node`` is sharded
    along ``dim``: node -> dim.

    Return ``None`` if ``node`` also depends on values other than parameters, buffers and constants, or has no such
    sharding.

    Args:
        states: names of the placeholders that are parameters, buffers or constants.
    """
    if node.op == "placeholder":
        return {node: dim} if node.name in states else None
    if node.op != "call_function" or not isinstance(node.meta["val"], Tensor):
        return None
    rule = _find_factor_rule(node)
    factors = () if rule is None else rule.results[0][dim]
    if rule is None or len(factors) != 1:
        return None
    (name,) = factors
    if name in rule.whole or name in rule.lower or (rule.spans and rule.spans.factor == name):
        return None
    found = {node: dim}
    for operand, dims in zip(operands_of(node), rule.operands, strict=True):
        at = [d for d, held in enumerate(dims) if name in held]
        if len(at) != 1 or dims[at[0]] != (name,):
            return None
        deeper = _trace_to_states(operand, at[0], states)
        if deeper is None:
            return None
        found |= deeper
    return found


def _find_factor_rule(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of the operator ``node``, which names loop dimensions as in an einsum (``b s i, o i -> b
    s o`` for a linear layer); ``None`` if there is no rule or it does not fit."""
    try:
        return factors_of(node)
    except PartitionError:
        return None


def _find_row_dims(rows: str | None, experts: str | None, dims: tuple[tuple[str, ...], ...]) -> RowExpertDims | None:
    """Return the dims of rows (tokens) and experts in a value, an operand or result of an operator. ``rows``,
    ``experts``: the names of the operator's loop dimensions (as in an einsum) that run over rows and over experts;
    ``experts`` is ``None`` if there is none.

    Return ``None`` unless each given loop dimension is in exactly one dim of the value, which has no other loop
    dimension.

    Args:
        dims: for each dim of the value, the names of its loop dimensions.
    """
    at = [d for d, held in enumerate(dims) if rows in held]
    by = [d for d, held in enumerate(dims) if experts is not None and experts in held]
    if len(at) != 1 or dims[at[0]] != (rows,):
        return None
    if experts is None:
        return RowExpertDims(at[0])
    return RowExpertDims(at[0], by[0]) if len(by) == 1 and dims[by[0]] == (experts,) else None


def _count_result_bytes(node: fx.Node) -> int:
    return sum(v.nbytes for v in results_of(node))


def _collect_descendants(block: Block, nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the operators of ``block`` that depend on one of ``nodes``."""
    found: set[fx.Node] = set()
    for node in block.graph.nodes:
        if node.op == "call_function" and any(o in found or o in nodes for o in node.all_input_nodes):
            found.add(node)
    return found


def _collect_ancestors(block: Block, nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the operators of ``block`` on which one of ``nodes`` depends."""
    found: set[fx.Node] = set()
    for node in reversed(block.graph.nodes):
        if node.op == "call_function" and any(u in found or u in nodes for u in node.users):
            found.add(node)
    return found
