"""Overlap all-gathers before matrix products, and reduce-scatters after them, with the products, piece by piece.

While one piece is multiplied, the next ones are communicated (Wang et al. 2023, Overlap communication with dependent
computation via decomposition). Requires: a graph that one rank runs, forward or backward, with its collectives.
Provides: ``partition::gather_products`` in place of an all-gather over ``tp`` and the products that read its result,
and ``partition::products_scatter`` in place of products, their sum and the reduce-scatter of this sum. A graph without
such products is unchanged. Results differ from those of the original graph only in the order of sums.

A piece is a part of the shard of one rank, or the shards of several ranks. The number of pieces is a multiple of the
number of ranks, or a divisor of it. If each piece belongs to one rank, a rank multiplies its own shard first. The
sharded dim must not be the last one, which the products sum over or return as columns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from partitioner.passes.ir.collectives import collective_name, ops
from partitioner.passes.ir.model import Block
from partitioner.passes.ir.rewrite import collect_descendants, drop_unused
from partitioner.passes.shard.differentiate import BlockDerivatives, JointSubgraph
from partitioner.passes.shard.piece_counts import PieceCounts

aten = torch.ops.aten

AXIS = "tp"
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.linear.default)


class RowProduct(NamedTuple):
    """A matrix product of rows with one matrix, such as ``linear``. A collective before or after it may be cut into
    pieces, so that one piece is communicated while another is multiplied.

    ``node``: the graph node of the product. ``x``: the node of the rows. ``weight``: the node of the matrix, ``[in,
    out]``, or ``[out, in]`` if ``turned``. ``bias``: the node of the vector that is added to each row, or ``None``.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    turned: bool


def match_gathered_products(gather: fx.Node) -> list[RowProduct]:
    """Return the matrix products whose rows are the result of the node ``gather``. The list is empty if there are none,
    or if ``gather`` is not an all-gather of rows over the mesh axis ``tp``. Other operators may read the result, too.
    """
    if collective_name(gather.target) != "all_gather" or gather.args[2] != AXIS or _is_dynamic(gather):
        return []
    shape = gather.meta["val"].shape
    if len(shape) < 2 or _read_division(gather)[0] == len(shape) - 1:
        return []
    readers = [(user, gather) for user in gather.users]
    readers += [(user, view) for view in gather.users if _keeps_columns(view) for user in view.users]
    order = {node: place for place, node in enumerate(gather.graph.nodes)}
    found = [match_row_product(user) for user, _ in sorted(readers, key=lambda reader: order[reader[0]])]
    of_rows = {value for _, value in readers}
    below = collect_descendants([gather])
    return [
        p
        for p in dict.fromkeys(p for p in found if p is not None)
        if p.x in of_rows and p.weight not in below and p.bias not in below
    ]


def reads_products_only(gather: fx.Node, products: Sequence[RowProduct]) -> bool:
    """Return whether only the matrix products ``products`` read the result of the all-gather ``gather``, so that the
    gradient of the result is a sum of products."""
    known = {p.node for p in products}
    return all(user in known or (_keeps_columns(user) and known.issuperset(user.users)) for user in gather.users)


def match_scattered_products(scatter: fx.Node) -> list[RowProduct]:
    """Return the matrix products whose sum is the operand of ``scatter``, a reduce-scatter over the mesh axis ``tp``.
    The list is empty if ``scatter`` is another operator, or if its operand is not a sum of products alone or has other
    readers."""
    if collective_name(scatter.target) != "reduce_scatter" or scatter.args[2] != AXIS or _is_dynamic(scatter):
        return []
    operand = scatter.args[0]
    assert isinstance(operand, fx.Node)
    shape = operand.meta["val"].shape
    if len(shape) < 2 or _read_division(scatter)[0] == len(shape) - 1:
        return []
    return _match_product_sum(operand) or []


def _read_division(collective: fx.Node) -> tuple[int, int]:
    """Return (dim, number of ranks) of ``collective``: the dim along which an all-gather concatenates the ranks'
    tensors, or which a reduce-scatter cuts."""
    dim, ranks = collective.args[1], collective.args[3]
    assert isinstance(dim, int) and isinstance(ranks, int)
    return dim % collective.meta["val"].dim(), ranks


def _match_product_sum(node: fx.Node) -> list[RowProduct] | None:
    """Return the matrix products whose sum is the value of ``node``; a single product counts as a sum. Return ``None``
    if ``node`` has other addends, or if another operator reads an intermediate result."""
    if len(node.users) != 1 or node.op != "call_function":
        return None
    if node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
        addends = [a for a in node.args if isinstance(a, fx.Node) and a.meta["val"].shape == node.meta["val"].shape]
        parts = [_match_product_sum(a) for a in addends]
        known = [p for part in parts if part is not None for p in part]
        return known if len(addends) == 2 and all(parts) else None
    if _keeps_columns(node):
        return _match_product_sum(node.all_input_nodes[0])
    product = match_row_product(node)
    return [product] if product is not None and product.bias is None else None


def match_row_product(node: fx.Node) -> RowProduct | None:
    """Return the operands of ``node`` if it is a product of rows ``[..., in]`` with one matrix, such as ``linear``;
    ``None`` for any other operator.
    """
    if node.target not in _PRODUCTS or node.kwargs:
        return None
    x, weight, bias = (*node.args, None)[:3]
    if node.target is aten.addmm.default:
        bias, x, weight = node.args
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or weight.meta["val"].dim() != 2:
        return None
    if isinstance(bias, fx.Node) and bias.meta["val"].shape != node.meta["val"].shape[-1:]:
        return None
    return RowProduct(node, x, weight, bias if isinstance(bias, fx.Node) else None, node.target is aten.linear.default)


def _keeps_columns(node: fx.Node) -> bool:
    """Return whether ``node`` is a view (reshape) that keeps the last dim of its operand."""
    if node.target not in _VIEWS or node.kwargs:
        return False
    return bool(node.meta["val"].shape[-1:] == node.all_input_nodes[0].meta["val"].shape[-1:])


def _is_dynamic(collective: fx.Node) -> bool:
    """Return whether the number of rows that the collective ``collective`` communicates depends on data, such as the
    number of rows (tokens) of an expert."""
    return any(bool(node.meta.get("open")) for node in (collective, *collective.all_input_nodes))


def fit_pieces(wanted: int, ranks: int, length: int) -> int:
    """Return the number of pieces into which an all-gather or reduce-scatter over ``ranks`` ranks is cut to overlap
    with matrix products: the largest possible number up to ``wanted``, or the smallest possible one (2 or more) if
    there is none. Possible numbers are the divisors of ``ranks``, and ``ranks`` times a divisor of ``length``, the size
    of the sharded dim on one rank."""
    possible = [n for n in range(2, ranks + 1) if ranks % n == 0]
    possible += [ranks * n for n in range(2, wanted // ranks + 1) if length % n == 0]
    return max((n for n in possible if n <= wanted), default=min(possible))


def overlap_derivatives(derived: BlockDerivatives, pieces: PieceCounts) -> BlockDerivatives:
    """Return a copy of ``derived``, the forward and backward functions of a block (a piece of the model, such as a
    layer), in which all-gathers before matrix products and reduce-scatters after them are cut into pieces that overlap
    with the products. ``pieces``: the numbers of pieces; if all are 0, ``derived`` itself is returned."""
    if not any(pieces):
        return derived

    def change(piece: JointSubgraph, gather: int, scatter: int) -> JointSubgraph:
        return replace(piece, graph=overlap_graph(piece.graph, gather, scatter))

    ahead, back = pieces[:2], pieces[2:]
    return replace(
        derived,
        forward=change(derived.forward, *ahead),
        backward=change(derived.backward, *back),
        backward_input=change(derived.backward_input, *back),
        backward_weight=change(derived.backward_weight, *back),
    )


def overlap_block(block: Block, pieces: PieceCounts) -> Block:
    """Return a copy of ``block``, the graph of a piece of the model that one rank runs without a backward, in which
    all-gathers before matrix products and reduce-scatters after them are cut into pieces that overlap with the
    products. ``pieces``: the numbers of pieces; only those of forward are used."""
    graph = overlap_graph(block.graph, *pieces[:2])
    return block if graph is block.graph else Block(block.name, graph, block.states, block.inputs)


def overlap_graph(graph: fx.Graph, gather_pieces: int, scatter_pieces: int) -> fx.Graph:
    """Return a copy of ``graph`` in which all-gathers before matrix products and reduce-scatters after them are cut
    into pieces, so that one piece is communicated while another one is multiplied.

    ``gather_pieces``, ``scatter_pieces``: the wanted numbers of pieces of all-gathers and of reduce-scatters, reduced
    if the sizes do not allow them; 0 leaves the collectives whole. If nothing changes, ``graph`` itself is returned.
    """
    gathers = {n: found for n in graph.nodes if gather_pieces and (found := match_gathered_products(n))}
    scatters = {n: found for n in graph.nodes if scatter_pieces and (found := match_scattered_products(n))}
    if not gathers and not scatters:
        return graph
    taken = {p.node for found in gathers.values() for p in found}
    # a product between an all-gather and a reduce-scatter overlaps with the all-gather
    scatters = {n: found for n, found in scatters.items() if not taken & {p.node for p in found}}
    return _Rewriter(graph, gathers, scatters).rewrite(gather_pieces, scatter_pieces)


@dataclass
class _Rewriter:
    """Copies the graph ``graph`` and replaces collectives next to matrix products by operators that communicate in
    pieces while they multiply.

    ``gathers``: all-gather -> the products that read its result. ``scatters``: reduce-scatter -> the products whose sum
    is its operand.
    """

    graph: fx.Graph
    gathers: dict[fx.Node, list[RowProduct]]
    scatters: dict[fx.Node, list[RowProduct]]

    def rewrite(self, gather_pieces: int, scatter_pieces: int) -> fx.Graph:
        """Return the copy of the graph. ``gather_pieces``, ``scatter_pieces``: the wanted numbers of pieces of
        all-gathers and of reduce-scatters."""
        self.new = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.pieces = gather_pieces, scatter_pieces
        self.source = {p.node: gather for gather, found in self.gathers.items() for p in found}
        output = self.graph.output_node()
        for node in self.graph.nodes:
            if node is not output:
                self._copy(node)
        self.new.output(fx.node.map_arg(output.args[0], self.values.__getitem__))
        drop_unused(self.new)
        return self.new

    def _copy(self, node: fx.Node) -> None:
        """Append a copy of ``node`` to the new graph, after copies of the nodes that it reads. A collective to overlap
        and its matrix products are replaced by a single operator."""
        stack = [node]
        while stack:
            here = stack[-1]
            missing = [n for n in self._list_needs(here) if n not in self.values]
            if here in self.values or not missing:
                stack.pop()
                if here not in self.values:
                    self._append(here)
            else:
                stack += missing[::-1]

    def _list_needs(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes of the old graph whose copies must be in the new graph before a copy of ``node`` is
        appended.
        """
        if node in self.gathers:
            return [node.all_input_nodes[0], *_list_matrices(self.gathers[node])]
        if node in self.source:
            return [self.source[node]]
        if node in self.scatters:
            return [*(p.x for p in self.scatters[node]), *_list_matrices(self.scatters[node])]
        return node.all_input_nodes

    def _append(self, node: fx.Node) -> None:
        if node in self.gathers:
            self._append_gather(node, self.gathers[node])
        elif node in self.scatters:
            self._append_scatter(node, self.scatters[node])
        else:
            self.values[node] = self.new.node_copy(node, self.values.__getitem__)

    def _append_gather(self, gather: fx.Node, products: Sequence[RowProduct]) -> None:
        """Append the operator ``gather_products`` in place of the all-gather ``gather`` and the matrix products
        ``products`` that read its result. Record the replacements in ``self.values``."""
        x = gather.all_input_nodes[0]
        dim, ranks = _read_division(gather)
        pieces = fit_pieces(self.pieces[0], ranks, x.meta["val"].shape[dim])
        weights = [self._append_matrix(p) for p in products]
        biases = [None if p.bias is None else self.values[p.bias] for p in products]
        args = (self.values[x], weights, biases, dim, *gather.args[2:4], pieces)
        both = self._create(ops.gather_products.default, args, gather)
        whole, values = gather.meta["val"], [_flatten_rows(p.node.meta["val"]) for p in products]
        both.meta["val"] = (whole, *values)
        self.values[gather] = self._create(operator.getitem, (both, 0), gather)
        for place, (product, value) in enumerate(zip(products, values, strict=True), start=1):
            rows = self._create(operator.getitem, (both, place), product.node)
            rows.meta["val"] = value
            shape = list(product.node.meta["val"].shape)
            flat = len(shape) == 2
            self.values[product.node] = rows if flat else self._create(aten.view.default, (rows, shape), product.node)

    def _append_scatter(self, scatter: fx.Node, products: Sequence[RowProduct]) -> None:
        """Append the operator ``products_scatter`` in place of the matrix products ``products`` and the reduce-scatter
        ``scatter`` of their sum. Record the replacement in ``self.values``."""
        value: Tensor = scatter.meta["val"]
        operand = scatter.all_input_nodes[0].meta["val"]
        dim, ranks = _read_division(scatter)
        pieces = fit_pieces(self.pieces[1], ranks, value.shape[dim])
        x, *more = (self.values[p.x] for p in products)
        weights = [self._append_matrix(p) for p in products]
        args = (x, more, weights, list(operand.shape), dim, *scatter.args[2:4], pieces)
        self.values[scatter] = self._create(ops.products_scatter.default, args, scatter)

    def _append_matrix(self, product: RowProduct) -> fx.Node:
        """Return the node of the matrix of ``product`` in the new graph, in the form ``[in, out]``. If the product's
        matrix is ``[out, in]``, a transpose is appended."""
        weight = self.values[product.weight]
        if not product.turned:
            return weight
        turned = self._create(aten.t.default, (weight,), product.node)
        turned.meta["val"] = product.weight.meta["val"].t()
        return turned

    def _create(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """Append a call of the operator ``target`` with the arguments ``args`` to the new graph, with a copy of the
        metadata (meta tensor, module path, source line) of the node ``like``. Return the new node."""
        node = self.new.call_function(target, args)
        node.meta.update(like.meta)
        return node


def _flatten_rows(value: Tensor) -> Tensor:
    return value if value.dim() == 2 else value.flatten(0, -2)


def _list_matrices(products: Sequence[RowProduct]) -> Iterator[fx.Node]:
    """Yield the nodes of the matrices and biases that ``products`` read."""
    for product in products:
        yield product.weight
        if product.bias is not None:
            yield product.bias


__all__ = [
    "AXIS",
    "RowProduct",
    "fit_pieces",
    "match_gathered_products",
    "match_row_product",
    "match_scattered_products",
    "overlap_block",
    "overlap_derivatives",
    "overlap_graph",
    "reads_products_only",
]
