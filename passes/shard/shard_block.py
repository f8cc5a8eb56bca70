"""Rewrite a block's graph for the layouts chosen on one mesh axis, so that it has local shapes and explicit
collectives.

A block is a piece of the model with one graph, such as a layer. Requires: values and ``grad`` marks on every node.
Provides: the block as one rank runs it. Each change of a tensor's layout is inserted once and shared by all readers.
The pass is applied once per mesh axis; for the next axis, the graph already has local shapes.

:func:`fuse_bias` merges a bias with the matrix product that it directly follows, which the normal form had separated.
Requires: a local graph (after the last :func:`shard_block`). Provides: an equivalent graph with fewer operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import fx

from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.interpret import insert_operator_node, refresh_node_value
from partitioner.passes.ir.layouts import REPLICATED, Layout, list_rank_pieces, list_sections, local_shape
from partitioner.passes.ir.model import Block, TensorSpec
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.rules.factors import Strategy, operands_of
from partitioner.passes.rules.strategies import append_local_call

aten = torch.ops.aten


@dataclass(frozen=True)
class Reshard:
    """The collectives that change a tensor from one layout to another.

    ``forward``: the name of the collective that forward runs on the tensor, such as ``all_gather``. ``backward``: the
    name of the collective that backward runs on the gradient. ``None`` means no communication.
    """

    forward: str | None
    backward: str | None


# (from, to) -> collectives; absent pairs are impossible. A shard of the same dim needs no reshard.
RESHARDS: dict[tuple[str, str], Reshard] = {
    ("S", "S"): Reshard("all_to_all", "all_to_all"),
    ("S", "R"): Reshard("all_gather", None),
    ("S", "R'"): Reshard("all_gather", "reduce_scatter"),
    ("R", "S"): Reshard(None, "all_gather"),
    ("R", "R"): Reshard(None, None),
    ("R", "R'"): Reshard(None, "all_reduce"),
    ("R", "P"): Reshard(None, "all_reduce"),
    ("P", "S"): Reshard("reduce_scatter", "all_gather"),
    ("P", "R"): Reshard("all_reduce", None),
    ("P", "R'"): Reshard("all_reduce", "all_reduce"),
    ("P", "P"): Reshard(None, None),
    ("R'", "S"): Reshard(None, None),
    ("R'", "R'"): Reshard(None, None),
    ("R'", "P"): Reshard(None, None),
}


@dataclass(frozen=True)
class BlockSharding:
    """The layouts of all tensors of one block (a piece of the model with one graph, such as a layer) on one mesh axis.
    A layout says whether a tensor is sharded along a dim, replicated, or a partial sum.

    ``strategies``: node name of each operator -> layouts of its operands and results. ``inputs``: placeholder name ->
    layout, for activations. ``states``: placeholder name -> layout, for parameters, buffers and constants. ``outputs``:
    the layouts of the outputs, in order.
    """

    strategies: dict[str, Strategy]
    inputs: dict[str, Layout]
    states: dict[str, Layout]
    outputs: tuple[Layout, ...]

    @property
    def key(self) -> Hashable:
        """Return a hashable key of these layouts. Equal layouts have equal keys."""
        return *(tuple(of.items()) for of in (self.strategies, self.inputs, self.states)), self.outputs


def shard_block(block: Block, sharding: BlockSharding, axis: str, num_ranks: int) -> Block:
    """Return ``block``, a piece of the model such as a layer, as one rank of the mesh axis ``axis`` runs it: the graph
    has the shapes of the rank's shards and explicit collectives.

    ``sharding``: the layouts of all tensors of the block on this axis. ``num_ranks``: the size of the axis; if it is 1,
    ``block`` itself is returned.
    """
    if num_ranks == 1:
        return block
    rewriter = _Rewriter(axis, num_ranks)
    layouts = {**sharding.inputs, **sharding.states}
    for node in block.graph.nodes:
        if node.op == "placeholder":
            rewriter.add_placeholder(node, layouts[node.name])
        elif node.op == "call_function":
            rewriter.add_operator(node, sharding.strategies)
    outputs = tuple(rewriter.read_in_layout(n, to) for n, to in zip(block.outputs, sharding.outputs, strict=True))
    rewriter.graph.output(outputs)
    drop_unused(rewriter.graph)
    return Block(block.name, rewriter.graph, block.states, block.inputs)


class _Rewriter:
    """Converts a graph for whole tensors to the graph that one rank of a mesh axis runs, with collectives where layouts
    change.

    ``axis``, ``num_ranks``: the name of the mesh axis and its size. ``graph``: the graph of one rank. ``made``: (node
    of the graph for whole tensors, layout) -> node of the rank's graph that has this value in this layout.
    ``produced``: node of the graph for whole tensors -> layouts of its results when they are computed.
    """

    def __init__(self, axis: str, num_ranks: int) -> None:
        """Start with an empty graph. ``axis``, ``num_ranks``: the name of the mesh axis and its size."""
        self.graph = fx.Graph()
        self.axis = axis
        self.num_ranks = num_ranks
        self.made: dict[tuple[fx.Node, Layout], fx.Node] = {}
        self.produced: dict[fx.Node, tuple[Layout, ...]] = {}

    def add_placeholder(self, node: fx.Node, layout: Layout) -> None:
        """Append a placeholder to the graph of one rank. ``node``: the placeholder in the graph for whole tensors.
        ``layout``: the layout of the tensor, which determines the shape of the rank's part."""
        local = self.graph.create_node("placeholder", node.name, name=node.name)
        local.meta.update(node.meta)
        shape = local_shape(layout, tuple(node.meta["val"].shape), self.num_ranks)
        local.meta["val"] = TensorSpec(shape, node.meta["val"].dtype).meta()
        self.produced[node] = (layout,)
        self.made[node, layout] = local

    def add_operator(self, node: fx.Node, strategies: dict[str, Strategy]) -> None:
        """Append to the graph of one rank the operators that replace ``node``, an operator of the graph for whole
        tensors. ``strategies``: node name of an operator -> layouts of its operands and results."""
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node) and isinstance(index, int)
            layout = self.produced[source][index]
            self.produced[node] = (layout,)
            made = self.made[source, self.produced[source][0]]
            self.made[node, layout] = insert_operator_node(self.graph, operator.getitem, (made, index), like=node)
            return
        strategy = strategies[node.name]
        operands = [self.read_in_layout(o, to) for o, to in zip(operands_of(node), strategy.operands, strict=True)]
        local = append_local_call(node, strategy, self.axis, self.num_ranks, operands, self.graph)
        local.meta.update({k: v for k, v in node.meta.items() if k not in ("val",)})
        self.produced[node] = strategy.results
        self.made[node, strategy.results[0]] = local

    def read_in_layout(self, node: fx.Node, to: Layout) -> fx.Node:
        """Return the node in the graph of one rank that has the value of ``node`` (a node of the graph for whole
        tensors) in the layout ``to``. If the value was computed in another layout, insert collectives."""
        if (node, to) not in self.made:
            (layout,) = self.produced[node]
            self.made[node, to] = self.insert_reshard(node, self.made[node, layout], layout, to)
        return self.made[node, to]

    def insert_reshard(self, node: fx.Node, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append operators that change the layout of a tensor to the graph of one rank, and return the node of the
        result. ``node``: the tensor's node in the graph for whole tensors, for error messages. ``local``: the node of
        the rank's part of the tensor. ``source``, ``to``: the layouts before and after."""
        assert (source.kind, to.kind) in RESHARDS, f"{node.name}: no way from {source} to {to}"
        return _STEPS[source.kind, to.kind](self, local, source, to)

    # Each of the steps below appends nodes and returns the resharded value.

    def insert_collective(self, name: str, local: fx.Node, *args: object) -> fx.Node:
        """Append a collective to the graph of one rank, and return the new node. ``name``: the name of the collective,
        such as ``all_gather``. ``local``: the node of the operand. ``args``: further arguments."""
        return insert_operator_node(self.graph, getattr(ops, name).default, (local, *args), like=local)

    def reorder_to_rank_major(self, local: fx.Node, layout: Layout) -> fx.Node:
        """Append operators that reorder a dim of a whole tensor so that an even split into contiguous parts gives each
        rank its shard of ``layout``. Return the node of the result. ``local``: the node of the whole tensor in the
        graph of one rank.

        If ``layout`` has neither sections (parts of the dim that are each divided over all ranks) nor is zigzag (each
        rank has one piece from each end of the dim), no reordering is needed, and ``local`` is returned.
        """
        if not layout.sections and not layout.zigzag:
            return local
        parts, order = _order_dim_pieces(layout, local.meta["val"].shape[layout.dim], self.num_ranks)
        return self.reorder_parts(local, layout.dim, parts, order)

    def reorder_to_section_major(self, local: fx.Node, layout: Layout) -> fx.Node:
        """Append operators that reorder a gathered dim from the order of the ranks' shards to its original order.
        Return the node of the result. ``local``: the node of the gathered tensor in the graph of one rank. ``layout``:
        the sharded layout before the gather.

        If ``layout`` has neither sections (parts of the dim that are each divided over all ranks) nor is zigzag (each
        rank has one piece from each end of the dim), no reordering is needed, and ``local`` is returned.
        """
        if not layout.sections and not layout.zigzag:
            return local
        parts, order = _order_dim_pieces(layout, local.meta["val"].shape[layout.dim], self.num_ranks)
        back = [0] * len(order)
        for place, piece in enumerate(order):
            back[piece] = place
        return self.reorder_parts(local, layout.dim, [parts[piece] for piece in order], back)

    def reorder_parts(self, local: fx.Node, dim: int, parts: list[int], order: list[int]) -> fx.Node:
        """Append operators that cut the dim ``dim`` of the node ``local`` into pieces and concatenate them in another
        order. Return the node of the result. ``parts``: the sizes of the pieces, in elements. ``order``: the indices of
        the pieces in the new order."""
        split = insert_operator_node(self.graph, aten.split_with_sizes.default, (local, parts, dim), like=local)
        pieces = [insert_operator_node(self.graph, operator.getitem, (split, i), like=local) for i in order]
        return insert_operator_node(self.graph, aten.cat.default, (pieces, dim), like=local)

    def gather_shards(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append an all-gather of a tensor's shards to the graph of one rank, and return the node of the whole tensor.
        ``local``: the node of this rank's shard. ``source``: the sharded layout. ``to``: the layout of the result:
        ``R`` (whole on every rank), or ``R'`` if each rank also computes a partial sum of the gradient, so that
        backward needs a reduce-scatter."""
        grad = "reduce" if to.kind == "R'" else "slice"
        whole = self.insert_collective("all_gather", local, source.dim, self.axis, self.num_ranks, grad)
        return self.reorder_to_section_major(whole, source)

    def slice_whole(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append the operator that takes this rank's shard of a tensor that is whole on every rank, and return the new
        node. ``local``: the node of the whole tensor. ``source``: its layout: ``R``, or ``R'`` if each rank has a
        partial sum of the gradient. ``to``: the sharded layout of the result."""
        name = "shard_narrow" if source.kind == "R'" else "shard_slice"
        return self.insert_collective(name, self.reorder_to_rank_major(local, to), to.dim, self.axis, self.num_ranks)

    def scatter_partials(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append a reduce-scatter of the ranks' partial sums of a tensor, and return the new node. ``local``: the node
        of this rank's partial sum. ``source``: its layout; unused. ``to``: the sharded layout of the result."""
        return self.insert_collective(
            "reduce_scatter", self.reorder_to_rank_major(local, to), to.dim, self.axis, self.num_ranks
        )

    def exchange_shards(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append an all-to-all that changes the sharded dim of a tensor, and return the node of the result. If the dim
        stays the same and only its sections change (parts of the dim that are each divided over all ranks), append an
        all-gather and a slice instead.

        ``local``: the node of this rank's shard. ``source``, ``to``: the sharded layouts before and after.
        """
        if source.dim == to.dim:  # other sections of the same dim
            return self.slice_whole(self.gather_shards(local, source, REPLICATED), REPLICATED, to)
        local = self.reorder_to_rank_major(local, to)
        local = self.insert_collective("all_to_all", local, to.dim, source.dim, self.axis, self.num_ranks)
        return self.reorder_to_section_major(local, source)

    def reduce_partials(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append an all-reduce of the ranks' partial sums of a tensor, and return the new node. ``local``: the node of
        this rank's partial sum. ``source``: its layout; unused. ``to``: the layout of the result: ``R`` (whole on every
        rank), or ``R'`` if each rank also computes a partial sum of the gradient, so that backward needs an all-reduce,
        too."""
        return self.insert_collective(
            "all_reduce", local, self.axis, self.num_ranks, "reduce" if to.kind == "R'" else "copy"
        )

    def copy_whole(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append the collective ``copy``, which returns its operand unchanged and all-reduces the gradient in backward.
        Return the new node. ``local``: the node of a tensor that is whole on every rank. ``source``, ``to``: the
        layouts before and after; unused."""
        return self.insert_collective("copy", local, self.axis, self.num_ranks)

    def make_partial_sums(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append operators that turn a tensor that is whole on every rank into partial sums: each rank divides the
        tensor by the number of ranks. Return the node of the result. ``local``: the node of the whole tensor.
        ``source``, ``to``: the layouts before and after."""
        if source.kind == "R" and local.meta.get("grad"):
            local = self.copy_whole(local, source, to)
        return insert_operator_node(self.graph, aten.mul.Tensor, (local, 1.0 / self.num_ranks), like=local)

    def keep_value(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Return ``local``, the node of this rank's part of a tensor, unchanged: the change of the layout from
        ``source`` to ``to`` needs no operator."""
        return local


def _order_dim_pieces(layout: Layout, size: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """Return two lists for a dim that ``layout`` shards: the sizes, in elements, of the pieces into which the dim is
    cut, in the order of the dim; and the indices of these pieces, sorted by the rank that holds them.

    ``size``: the number of elements of the dim. ``num_ranks``: the number of ranks that share the dim.
    """
    by_rank = list_rank_pieces(layout, num_ranks)
    count = sum(map(len, by_rank))
    sections = list_sections(layout, size)
    order = [s * count + piece for mine in by_rank for s in range(len(sections)) for piece in mine]
    return [s // count for s in sections for _ in range(count)], order


_STEPS: dict[tuple[str, str], Callable[[_Rewriter, fx.Node, Layout, Layout], fx.Node]] = {
    ("S", "S"): _Rewriter.exchange_shards,
    ("S", "R"): _Rewriter.gather_shards,
    ("S", "R'"): _Rewriter.gather_shards,
    ("R", "S"): _Rewriter.slice_whole,
    ("R", "R"): _Rewriter.keep_value,
    ("R", "R'"): _Rewriter.copy_whole,
    ("R", "P"): _Rewriter.make_partial_sums,
    ("P", "S"): _Rewriter.scatter_partials,
    ("P", "R"): _Rewriter.reduce_partials,
    ("P", "R'"): _Rewriter.reduce_partials,
    ("P", "P"): _Rewriter.keep_value,
    ("R'", "S"): _Rewriter.slice_whole,
    ("R'", "R'"): _Rewriter.keep_value,
    ("R'", "P"): _Rewriter.make_partial_sums,
}
assert _STEPS.keys() == RESHARDS.keys()


def fuse_bias(block: Block) -> Block:
    """Return a copy of ``block``, a piece of the model with one graph, in which each matrix product and the addition of
    a bias to it are fused to one operator.

    ``linear(x, w) + b`` becomes ``linear(x, w, b)``, and ``mm(x, w) + b`` becomes ``addmm(b, x, w)``.
    """
    block = block.copy()
    for node in list(block.graph.nodes):
        if node.target != aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        for product, bias in (node.args, node.args[::-1]):
            if _can_fuse_bias(product, bias, node):
                _fuse_product_with_bias(node, product, bias)
                break
    drop_unused(block.graph)
    return block


def _can_fuse_bias(product: object, bias: object, node: fx.Node) -> bool:
    """Return whether the matrix product ``product`` and the addition ``node`` of ``bias`` can become one operator.
    Nothing else may read the product, and ``bias`` must be a vector along the product's last dim, of the same dtype."""
    if not (isinstance(product, fx.Node) and isinstance(bias, fx.Node)) or len(product.users) != 1:
        return False
    if product.target not in (aten.linear.default, aten.mm.default) or len(product.args) != 2:
        return False
    a, b, out = product.meta["val"], bias.meta["val"], node.meta["val"]
    return bool(b.dim() == 1 and b.shape[0] == a.shape[-1] and a.shape == out.shape and a.dtype == b.dtype == out.dtype)


def _fuse_product_with_bias(node: fx.Node, product: fx.Node, bias: fx.Node) -> None:
    """Replace ``node``, the sum of the matrix product ``product`` and ``bias``, by one operator, in place."""
    with node.graph.inserting_before(node):
        if product.target == aten.linear.default:
            fused = node.graph.call_function(aten.linear.default, (*product.args, bias))
        else:
            fused = node.graph.call_function(aten.addmm.default, (bias, *product.args))
    fused.meta.update(product.meta)
    refresh_node_value(fused)
    node.replace_all_uses_with(fused)
    node.graph.erase_node(node)
