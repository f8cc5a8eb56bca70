"""Distribute experts over the ranks of a mesh axis: rows (tokens) are sent to the ranks of their experts and back.

Requires: a local block (the graph of one rank after the last :func:`partitioner.passes.shard.shard_block.shard_block`)
and its expert regions, the parts that compute by expert (``passes/experts/regions.py``). Provides: the block in which
each rank has ``1 / size`` of the experts' states, and rows are sent before a region and returned after it. The ranks
along the axis must have different rows; a row that two ranks have would be computed twice.

In the routed form, each row has one expert, and a rank may receive any number of rows, from none to all. No row is
dropped or padded, so no operator of the region may have a fixed number of rows in its arguments. In the dense form,
every expert works on the rows of all ranks, so that an all-to-all of equal parts suffices.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.experts.regions import ExpertRegion
from partitioner.passes.ir.collectives import collective_name, is_collective_over, ops
from partitioner.passes.ir.interpret import infer_meta_value, insert_operator_node, resolve_meta_values
from partitioner.passes.ir.layouts import Layout, local_shape, make_shard_layout
from partitioner.passes.ir.model import Block, TensorSpec
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.rules.factors import operands_of, replace_operands
from partitioner.passes.rules.strategies import append_local_call, enumerate_strategies

aten = torch.ops.aten

_SHAPED = (aten.reshape.default, aten.view.default, aten.expand.default)  # operators with a shape among their arguments
_ADDED_TEST_ROWS = 7  # rows that are added to find out whether an operator works on any number of rows


def distribute_experts(
    block: Block,
    regions: Sequence[ExpertRegion],
    axis: str,
    size: int,
    merged: str | None = None,
    expert_axes: Collection[str] = (),
) -> tuple[Block, dict[str, Layout]]:
    """Return two values: a copy of ``block`` (the graph of a piece of the model on one rank) in which each rank of a
    mesh axis has only some of the experts; and a dict: name of a parameter of the experts -> the layout that shards it
    by expert.

    Before each part that computes by expert, rows (tokens) are sent to the ranks of their experts. After it, they are
    sent back. Raise :class:`UnsupportedError` if the number of experts is not divisible by ``size``, or if an operator
    of the experts works only on a fixed number of rows or communicates over a mesh axis in ``expert_axes``.

    Args:
        regions: the parts of the block that compute by expert.
        axis: name of the mesh axis over whose ranks the experts are distributed.
        size: number of ranks of this axis.
        merged: name of a mesh axis, such as ``tp``, whose ranks hold the same experts in ``block`` and different
            experts in the result, so that gradients of the experts are no longer summed over this axis; ``None`` if
            there is none.
        expert_axes: names of all mesh axes, such as ``dp``, along which ranks hold different experts in the result,
            ``merged`` included; no operator of the experts may communicate over them.
    """
    rewriter = _ExpertDistributor(axis, size, merged, expert_axes)
    for region in regions:
        rewriter.add_region(region)
    for node in block.graph.nodes:
        rewriter.copy_node(node)
    drop_unused(rewriter.graph)
    layouts = {name: make_shard_layout(dim) for region in regions for name, dim in region.states.items()}
    return Block(block.name, rewriter.graph, block.states, block.inputs), layouts


class _ExpertDistributor:
    """Builds the graph of a block (a piece of the model on one rank) in which each rank of a mesh axis has some of the
    experts.

    ``axis``, ``size``: the mesh axis and its number of ranks. ``expert_axes``: mesh axes along which ranks have
    different experts, so that experts must not communicate over them. ``merged``: the one of these axes over which the
    block was sharded before, or ``None``. ``tables``: node that is computed only from the experts' parameters -> its
    dim of experts. ``env``: node outside of the expert regions (the parts that compute by expert) -> its copy.
    ``inside``: node in an expert region -> its copy. ``routes``: node with the expert numbers of rows (tokens) -> three
    nodes: the order of the rows by expert, the counts of rows per rank, and the experts of the received rows.
    """

    def __init__(self, axis: str, size: int, merged: str | None, expert_axes: Collection[str]) -> None:
        self.graph = fx.Graph()
        self.axis, self.size, self.merged, self.apart = axis, size, merged, expert_axes
        self.env: dict[fx.Node, fx.Node] = {}
        self.inside: dict[fx.Node, fx.Node] = {}
        self.tables: dict[fx.Node, int] = {}
        self.region_of: dict[fx.Node, ExpertRegion] = {}
        self.routes: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]] = {}
        self.sent: dict[tuple[int, fx.Node], fx.Node] = {}

    def add_region(self, region: ExpertRegion) -> None:
        """Record ``region``, a part of the graph that computes by expert, so that its experts are distributed over the
        ranks. Raise :class:`UnsupportedError` if the ranks cannot have equal numbers of experts."""
        if region.num_experts % self.size:
            where = region.products[0].meta.get("path") or region.products[0].name
            raise UnsupportedError(
                f"{where}: {region.num_experts} experts cannot be distributed over {self.axis}={self.size}; "
                f"expected a divisor of {region.num_experts}"
            )
        self.tables |= region.tables
        self.region_of |= dict.fromkeys(region.nodes, region)

    def copy_node(self, node: fx.Node) -> None:
        """Copy ``node`` to the graph in which each rank has only some of the experts. A parameter of the experts is
        sharded by expert. An operator that computes by expert reads the rows (tokens) that were sent to this rank, and
        the results are sent back. Any other node is copied unchanged."""
        if node in self.tables:
            self._shard_table_node(node, self.tables[node])
        elif node in self.region_of:
            self._copy_region_node(node, self.region_of[node])
        else:
            self.env[node] = self.graph.node_copy(node, self.env.__getitem__)

    def _shard_table_node(self, node: fx.Node, dim: int) -> None:
        """Copy ``node``, which is computed only from the experts' parameters, to the new graph, with only the experts
        of one rank. Raise :class:`UnsupportedError` if the operator cannot be sharded by expert.

        Args:
            dim: the dim of the node's result that indexes experts.
        """
        if node.op == "placeholder":
            local = self.graph.create_node("placeholder", node.name, name=node.name)
            local.meta.update(node.meta)
            shape = local_shape(make_shard_layout(dim), tuple(node.meta["val"].shape), self.size)
            local.meta["val"] = TensorSpec(shape, node.meta["val"].dtype).meta()
            self.env[node] = local
            return
        operands = operands_of(node)
        if collective_name(node.target) == "copy" and self.merged in node.args:
            self.env[node] = self.env[operands[0]]
            return
        self._check_expert_axes(node)
        wanted = tuple(make_shard_layout(self.tables[o]) for o in operands)
        found = (
            s
            for s in enumerate_strategies(node, self.size)
            if s.operands == wanted and s.results == (make_shard_layout(dim),)
        )
        strategy = next(found, None)
        if strategy is None:
            raise UnsupportedError(f"{_format_location(node)} cannot be divided by expert; use ep=1")
        local = append_local_call(node, strategy, self.axis, self.size, [self.env[o] for o in operands], self.graph)
        local.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        self.env[node] = local

    def _copy_region_node(self, node: fx.Node, region: ExpertRegion) -> None:
        """Copy ``node``, an operator in ``region`` (a part of the graph that computes by expert), to the new graph,
        where it works on the rows (tokens) that were sent to this rank. If operators outside of the region read
        ``node``, append the collective that sends its rows back. Raise :class:`UnsupportedError` if ``node`` only works
        on a fixed number of rows."""
        self._check_expert_axes(node)
        operands = [self._find_region_operand(o, region) for o in operands_of(node)]
        args, kwargs = replace_operands(node, operands)
        if node.target in _SHAPED:
            args = (args[0], _compute_local_sizes(node, region, self.size), *args[2:])
        if region.keys is not None:
            self._check_rows(node, region, args, kwargs)
        assert callable(node.target)
        made = insert_operator_node(self.graph, node.target, args, kwargs, like=node)
        made.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        self.inside[node] = made
        if node in region.exits:
            self.env[node] = self._return_from_experts(made, node, region)

    def _find_region_operand(self, node: fx.Node, region: ExpertRegion) -> fx.Node:
        """Return the node of the new graph that replaces ``node``, an operand of an operator in ``region`` (a part of
        the graph that computes by expert).

        If ``node`` has rows (tokens) from outside of the region, the result has the rows that were sent to this rank.
        Otherwise, it is the copy of ``node``.
        """
        if node in region.nodes:
            return self.inside[node]
        if region.keys is not None and node is region.keys:
            return self._route_rows(region, node)[2]
        if node not in region.entries:
            return self.env[node]
        key = id(region), node
        if key not in self.sent:
            self.sent[key] = self._send_to_experts(self.env[node], node, region)
        return self.sent[key]

    def _route_rows(self, region: ExpertRegion, like: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Return three nodes for ``region``, a part of the graph that computes by expert: the order of this rank's rows
        (tokens) by expert, the counts of rows sent to and received from each rank, and the expert number of each
        received row.

        The operator that computes the three is appended at the first call for a node of expert numbers
        (``region.keys``); later calls return the same nodes. ``like``: the node whose metadata the new nodes get.
        """
        assert region.keys is not None
        if region.keys not in self.routes:
            keys = self.env[region.keys]
            made = self._append_collective("route", like, keys, region.num_experts)
            getitem = [self._append_getitem(made, i) for i in range(3)]
            self.routes[region.keys] = (getitem[0], getitem[1], getitem[2])
        return self.routes[region.keys]

    def _append_getitem(self, source: fx.Node, index: int) -> fx.Node:
        return insert_operator_node(self.graph, operator.getitem, (source, index), like=source)

    def _send_to_experts(self, local: fx.Node, node: fx.Node, region: ExpertRegion) -> fx.Node:
        """Append the collective that sends the rows (tokens) of ``local`` to the ranks of their experts, and return the
        new node.

        ``local``: the node of the new graph with the rows of this rank. ``node``: the original node, whose metadata is
        copied. ``region``: the part of the graph that reads the rows.
        """
        if region.keys is None:
            return self._append_collective("all_to_all", node, local, 0, 1)
        return self._append_collective("dispatch", node, local, *self._route_rows(region, region.keys))

    def _return_from_experts(self, local: fx.Node, node: fx.Node, region: ExpertRegion) -> fx.Node:
        """Append the collective that sends the rows (tokens) of ``local`` back to the ranks that they came from, and
        return the new node.

        ``local``: the node of the new graph with the results for the received rows. ``node``: the original node, whose
        metadata is copied. ``region``: the part of the graph that computed the rows.
        """
        if region.keys is None:
            return self._append_collective("all_to_all", node, local, 1, 0)
        return self._append_collective("combine", node, local, *self._route_rows(region, region.keys))

    def _append_collective(self, name: str, like: fx.Node, *args: Any) -> fx.Node:
        """Append the collective operator ``name`` over the experts' mesh axis, and return the new node.

        ``like``: the node whose metadata the new node gets. ``args``: the operator's arguments before the axis and its
        size.
        """
        made = insert_operator_node(self.graph, getattr(ops, name).default, (*args, self.axis, self.size), like=like)
        if name == "route":
            made.meta["grad"] = False
        return made

    def _check_expert_axes(self, node: fx.Node) -> None:
        """Raise :class:`UnsupportedError` if ``node`` communicates over a mesh axis along which ranks will have
        different experts."""
        if is_collective_over(node, self.apart):
            raise UnsupportedError(
                f"{_format_location(node)} is part of the experts and communicates between ranks that will have "
                f"different experts; expected no communication over {', '.join(sorted(self.apart))} there; use "
                f"{self.axis}=1, or fewer ranks on that axis"
            )

    def _check_rows(
        self, node: fx.Node, region: ExpertRegion, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise :class:`UnsupportedError` if ``node`` only works on a fixed number of rows (tokens), for example
        because of its arguments. The number of rows that a rank receives depends on data.

        The operator is executed on meta tensors with more rows to find out. ``args``, ``kwargs``: the arguments in the
        new graph. ``region``: the part of the graph that contains ``node``.
        """
        rows = {self.inside[n] for n in region.nodes if n in self.inside} | set(self.sent.values())
        rows.add(self._route_rows(region, node)[2])

        def longer(value: Any) -> Any:
            return value.new_empty((value.shape[0] + _ADDED_TEST_ROWS, *value.shape[1:]))

        def given(operand: fx.Node) -> Any:
            value = operand.meta["val"]
            if operand not in rows:
                return value
            return tuple(map(longer, value)) if isinstance(value, tuple) else longer(value)

        try:
            made = infer_meta_value(node.target, fx.node.map_arg(args, given), fx.node.map_arg(kwargs, given))  # type: ignore[arg-type]
            plain = infer_meta_value(node.target, resolve_meta_values(args), resolve_meta_values(kwargs))  # type: ignore[arg-type]
        except Exception as error:
            raise UnsupportedError(
                f"{_format_location(node)} cannot work on another number of rows: {error}"
            ) from error
        shapes = [[tuple(v.shape) for v in (m if isinstance(m, tuple) else (m,))] for m in (made, plain)]
        if any(m != (p[0] + _ADDED_TEST_ROWS, *p[1:]) for m, p in zip(*shapes, strict=True)):
            raise UnsupportedError(
                f"{_format_location(node)} has a result of shape {shapes[1]} for the planned rows and "
                f"{shapes[0]} for {_ADDED_TEST_ROWS} more rows; expected {_ADDED_TEST_ROWS} more rows in the "
                "result, because ranks with different experts get different numbers of tokens"
            )


def _compute_local_sizes(node: fx.Node, region: ExpertRegion, size: int) -> list[int]:
    """Return the shape argument for one rank of ``node``, a reshape or expand in a part of the graph that computes by
    expert. The dim of experts is divided by ``size``. The dim of rows (tokens) is multiplied by ``size`` if every
    expert computes all rows; if each row has one expert, the dim of rows is -1 (inferred).

    Args:
        region: the part of the graph that computes by expert and contains ``node``.
        size: number of ranks over which the experts are distributed.
    """
    value: Tensor = node.meta["val"]
    sizes, (place,) = list(value.shape), region.nodes[node]
    if place.experts is not None:
        sizes[place.experts] //= size
        sizes[place.rows] *= size
    else:
        sizes[place.rows] = -1
    return sizes


def _format_location(node: fx.Node) -> str:
    return f"{node.meta.get('path') or node.name} ({node.target})"
