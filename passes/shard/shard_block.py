"""Rewrite a block's graph for the layouts chosen on one mesh axis, so that it has local shapes and explicit
collectives.

A block is a piece of the model with one graph, such as a layer. Requires: values and ``grad`` marks on every node.
Provides: the block as one rank runs it. Each change of a tensor's layout is inserted once and shared by all readers.
The pass is applied once per axis; the next axis sees a smaller graph.

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
from partitioner.passes.ir.layouts import REPLICATED, Layout, local_shape, piece_order, sections_of
from partitioner.passes.ir.model import Block, TensorSpec
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.rules.factors import Strategy, operands_of
from partitioner.passes.rules.strategies import local_call

aten = torch.ops.aten


@dataclass(frozen=True)
class Reshard:
    """The collectives that change a tensor from one layout to another.

    ``forward``: the name of the collective in forward. ``backward``: that for the tensor's gradient. ``None`` means no
    communication.
    """

    forward: str | None
    backward: str | None


# (from, to) -> collectives; an absent pair is not possible. A shard that stays on its dim needs no reshard.
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
    """The layouts chosen for one block (a piece of the model with one graph) on one mesh axis.

    ``strategies``: the layouts of each operator's operands and results, by node name. ``inputs``, ``states``: the
    layouts of the placeholders of activations, and of those of parameters, buffers and constants, by name. ``outputs``:
    the layouts of the outputs, in order.
    """

    strategies: dict[str, Strategy]
    inputs: dict[str, Layout]
    states: dict[str, Layout]
    outputs: tuple[Layout, ...]

    @property
    def key(self) -> Hashable:
        """Return a hashable key of the layouts of one block; it is equal for equal layouts."""
        return *(tuple(of.items()) for of in (self.strategies, self.inputs, self.states)), self.outputs


def shard_block(block: Block, sharding: BlockSharding, axis: str, num_ranks: int) -> Block:
    """Return ``block``, a piece of the model such as a layer, with the graph that one rank of the mesh axis ``axis``
    runs.

    The graph has local shapes and explicit collectives. ``sharding``: the layouts of all tensors. ``num_ranks``: the
    size of the axis; if it is 1, the block itself is returned.
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
    """Builds the graph that one rank of a mesh axis runs, with collectives where a layout changes.

    ``axis``, ``num_ranks``: the name of the mesh axis and its size. ``made``: for each pair of a node of the whole
    graph and a layout, the node of the rank's graph that has this value in this layout. ``produced``: the layouts in
    which the results of a node of the whole graph are computed.
    """

    def __init__(self, axis: str, num_ranks: int) -> None:
        """Start with an empty graph. ``axis``, ``num_ranks``: the name of the mesh axis and its size."""
        self.graph = fx.Graph()
        self.axis = axis
        self.num_ranks = num_ranks
        self.made: dict[tuple[fx.Node, Layout], fx.Node] = {}
        self.produced: dict[fx.Node, tuple[Layout, ...]] = {}

    def add_placeholder(self, node: fx.Node, layout: Layout) -> None:
        """Append a placeholder for ``node``, a placeholder of the whole graph, to the graph that one rank runs. It has
        the shape that ``layout`` gives one rank."""
        local = self.graph.create_node("placeholder", node.name, name=node.name)
        local.meta.update(node.meta)
        shape = local_shape(layout, tuple(node.meta["val"].shape), self.num_ranks)
        local.meta["val"] = TensorSpec(shape, node.meta["val"].dtype).meta()
        self.produced[node] = (layout,)
        self.made[node, layout] = local

    def add_operator(self, node: fx.Node, strategies: dict[str, Strategy]) -> None:
        """Append the operators that one rank runs for ``node``, with its operands in the layouts that ``strategies``
        has for it, by node name.
        """
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
        local = local_call(node, strategy, self.axis, self.num_ranks, operands, self.graph)
        local.meta.update({k: v for k, v in node.meta.items() if k not in ("val",)})
        self.produced[node] = strategy.results
        self.made[node, strategy.results[0]] = local

    def read_in_layout(self, node: fx.Node, to: Layout) -> fx.Node:
        """Return the node, in the graph that one rank runs, with the value of ``node`` (a node of the whole graph) in
        the layout ``to``. Insert collectives if it was computed in another layout."""
        if (node, to) not in self.made:
            (layout,) = self.produced[node]
            self.made[node, to] = self.insert_reshard(node, self.made[node, layout], layout, to)
        return self.made[node, to]

    def insert_reshard(self, node: fx.Node, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append the operators that change the layout of a tensor to the graph of one rank, and return the last node.
        ``local``: the node of the rank's part of the tensor. ``source``, ``to``: the layouts before and after.
        ``node``: the node of the whole graph, for the message."""
        assert (source.kind, to.kind) in RESHARDS, f"{node.name}: no way from {source} to {to}"
        return _STEPS[source.kind, to.kind](self, local, source, to)

    # Each of the steps below appends nodes and returns the resharded value.

    def insert_collective(self, name: str, local: fx.Node, *args: object) -> fx.Node:
        """Append the collective ``name``, such as ``all_gather``, of ``local`` with the further arguments ``args``, and
        return its node.
        """
        return insert_operator_node(self.graph, getattr(ops, name).default, (local, *args), like=local)

    def rank_major(self, local: fx.Node, layout: Layout) -> fx.Node:
        """Append a reordering of the sharded dim of a whole tensor so that an even split into contiguous parts gives
        each rank its shard of ``layout``; return the node. ``local``: the node of the whole tensor in the graph of one
        rank.

        Only a layout with sections (parts that are each divided over all ranks) or a zigzag layout needs this;
        otherwise ``local`` is returned.
        """
        if not layout.sections and not layout.zigzag:
            return local
        parts, order = _order_dim_pieces(layout, local.meta["val"].shape[layout.dim], self.num_ranks)
        return self.reorder_parts(local, layout.dim, parts, order)

    def section_major(self, local: fx.Node, layout: Layout) -> fx.Node:
        """Append a reordering of a gathered dim from the order of ranks to the dim's own order, and return the node.

        ``local``: the node of the gathered tensor. ``layout``: the layout before the gather. Only a layout with
        sections (parts that are each divided over all ranks) or a zigzag layout needs the reordering; otherwise
        ``local`` is returned.
        """
        if not layout.sections and not layout.zigzag:
            return local
        parts, order = _order_dim_pieces(layout, local.meta["val"].shape[layout.dim], self.num_ranks)
        back = [0] * len(order)
        for place, piece in enumerate(order):
            back[piece] = place
        return self.reorder_parts(local, layout.dim, [parts[piece] for piece in order], back)

    def reorder_parts(self, local: fx.Node, dim: int, parts: list[int], order: list[int]) -> fx.Node:
        """Append operators that cut the dim ``dim`` of the node ``local`` into pieces and join them in another order;
        return the last node. ``parts``: the sizes of the pieces, in elements. ``order``: for each place in the new
        order, the index of the piece."""
        split = insert_operator_node(self.graph, aten.split_with_sizes.default, (local, parts, dim), like=local)
        pieces = [insert_operator_node(self.graph, operator.getitem, (split, i), like=local) for i in order]
        return insert_operator_node(self.graph, aten.cat.default, (pieces, dim), like=local)

    def gather_shards(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append an all-gather of the shards of a tensor and return its node. ``local``: the node of this rank's shard.
        ``source``: its layout. ``to``: the layout of the result, whole on every rank; if it is ``R'``, each rank has a
        part of the gradient, which is then summed over the ranks."""
        grad = "reduce" if to.kind == "R'" else "slice"
        whole = self.insert_collective("all_gather", local, source.dim, self.axis, self.num_ranks, grad)
        return self.section_major(whole, source)

    def slice_whole(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append the operator that takes this rank's shard of a tensor that is whole on every rank, and return its
        node. ``local``: the node of the whole tensor. ``source``, ``to``: the layouts before (``R`` or ``R'``) and
        after (sharded)."""
        name = "shard_narrow" if source.kind == "R'" else "shard_slice"
        return self.insert_collective(name, self.rank_major(local, to), to.dim, self.axis, self.num_ranks)

    def scatter_partials(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append a reduce-scatter of partial sums and return its node. ``local``: the node of this rank's partial sum.
        ``source``: its layout. ``to``: the sharded layout of the result."""
        return self.insert_collective("reduce_scatter", self.rank_major(local, to), to.dim, self.axis, self.num_ranks)

    def exchange_shards(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append an all-to-all that changes which dim of a tensor is sharded, and return the last node. For a change of
        the sections of one dim (parts that are each divided over all ranks), append a gather and a slice instead.
        ``local``: the node of this rank's shard. ``source``, ``to``: the sharded layouts before and after."""
        if source.dim == to.dim:  # other sections of the same dim
            return self.slice_whole(self.gather_shards(local, source, REPLICATED), REPLICATED, to)
        local = self.rank_major(local, to)
        local = self.insert_collective("all_to_all", local, to.dim, source.dim, self.axis, self.num_ranks)
        return self.section_major(local, source)

    def reduce_partials(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append an all-reduce of partial sums and return its node. ``local``: the node of this rank's partial sum.
        ``source``: its layout. ``to``: the layout of the result, whole on every rank; if it is ``R'``, each rank has a
        part of the gradient, which is then summed over the ranks."""
        return self.insert_collective(
            "all_reduce", local, self.axis, self.num_ranks, "reduce" if to.kind == "R'" else "copy"
        )

    def copy_whole(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append the collective ``copy``, which returns its operand and sums the gradient over the ranks; return its
        node. ``local``: the node of a tensor that is whole on every rank. ``source``, ``to``: the layouts before and
        after."""
        return self.insert_collective("copy", local, self.axis, self.num_ranks)

    def spread_whole(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Append operators that turn a tensor that is whole on every rank into a partial sum: each rank divides it by
        the number of ranks. Return the node. ``local``: the node of the whole tensor. ``source``, ``to``: the layouts
        before and after."""
        if source.kind == "R" and local.meta.get("grad"):
            local = self.copy_whole(local, source, to)
        return insert_operator_node(self.graph, aten.mul.Tensor, (local, 1.0 / self.num_ranks), like=local)

    def keep_value(self, local: fx.Node, source: Layout, to: Layout) -> fx.Node:
        """Return ``local``, the node of this rank's part of a tensor, because the change of its layout from ``source``
        to ``to`` needs no operator."""
        return local


def _order_dim_pieces(layout: Layout, size: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """Return the sizes of the pieces into which ``layout`` cuts a dim, in the order of the dim, and the indices of the
    pieces in the order of ranks.

    ``size``: the number of elements of the dim. ``num_ranks``: the number of ranks that share it.
    """
    by_rank = piece_order(layout, num_ranks)
    count = sum(map(len, by_rank))
    sections = sections_of(layout, size)
    order = [s * count + piece for mine in by_rank for s in range(len(sections)) for piece in mine]
    return [s // count for s in sections for _ in range(count)], order


_STEPS: dict[tuple[str, str], Callable[[_Rewriter, fx.Node, Layout, Layout], fx.Node]] = {
    ("S", "S"): _Rewriter.exchange_shards,
    ("S", "R"): _Rewriter.gather_shards,
    ("S", "R'"): _Rewriter.gather_shards,
    ("R", "S"): _Rewriter.slice_whole,
    ("R", "R"): _Rewriter.keep_value,
    ("R", "R'"): _Rewriter.copy_whole,
    ("R", "P"): _Rewriter.spread_whole,
    ("P", "S"): _Rewriter.scatter_partials,
    ("P", "R"): _Rewriter.reduce_partials,
    ("P", "R'"): _Rewriter.reduce_partials,
    ("P", "P"): _Rewriter.keep_value,
    ("R'", "S"): _Rewriter.slice_whole,
    ("R'", "R'"): _Rewriter.keep_value,
    ("R'", "P"): _Rewriter.spread_whole,
}
assert _STEPS.keys() == RESHARDS.keys()


def fuse_bias(block: Block) -> Block:
    """Return a copy of ``block``, a piece of the model with one graph, in which a matrix product and the addition of a
    bias to it are one operator.

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
    """Return whether the matrix product ``product`` and the addition ``node`` of ``bias`` to it can become one
    operator. This is so if nothing else reads the product, and the bias is a vector over its last dim, of the same
    type."""
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
