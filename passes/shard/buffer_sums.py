"""Accumulate buffers whose new value is a sum over the batch, such as a count of the tokens of each expert, over
microbatches.

Requires: the model of one microbatch, split along the axis ``data`` (all parts of the global batch), whose samples are
combined by collectives. Provides: the same model, in which each microbatch computes its addend of such a buffer, and
the runtime sums the addends. This is exact if the new value is linear in the combined values, except for a term that is
equal for all microbatches, for example ``old + counts``, ``0.9 * old + 0.1 * mean``, or ``old`` with the batch's rows
written at some indices. The first microbatch adds that term. If another operator also reads the combined value, its
collective stays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.ir.collectives import COMMUNICATING, collective_name, ops
from partitioner.passes.ir.interpret import META, insert_operator_node
from partitioner.passes.ir.layouts import PARTIAL, make_shard_layout
from partitioner.passes.ir.model import FoldedModel, TensorSpec
from partitioner.passes.ir.rewrite import drop_unused, get_node_tensor
from partitioner.passes.ir.verify import get_collective_axis
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.factors import Strategy, get_node_argument, normalize_dim, operands_of, replace_operands
from partitioner.passes.rules.strategies import append_local_call, enumerate_strategies

aten = torch.ops.aten

Part = tuple[fx.Node | None, fx.Node | None]  # (addend of one microbatch, term that is added once); ``None`` means zero


def accumulate_updates(model: FoldedModel, axis: str, parts: int) -> FoldedModel:
    """Change ``model`` so that each microbatch computes one addend of every buffer whose new value is a sum over the
    batch, such as a count of tokens. The runtime sums the addends, so that no microbatch needs a collective for them.
    Return the changed model; its graphs are changed in place. A buffer whose new value is not such a sum is left
    unchanged.

    ``model``: the model of one microbatch, as graphs and their calls. ``axis``: the mesh axis along which the global
    batch is split into ``parts`` parts, one for each pair of data-parallel rank and microbatch.
    """
    if not model.updates:
        return model
    states: dict[str, list[str]] = {}  # value -> the buffers that it is stored in
    for state, value in model.updates.items():
        if state not in model.keeps:
            states.setdefault(value, []).append(state)
    work = _BufferSumRewriter(model, axis, parts)
    keeps = dict(model.keeps)
    for name, block in model.blocks.items():
        for place in range(len(block.outputs)):
            made = [c.outputs[place] for c in model.calls if c.block == name]
            if all(value in states for value in made) and work.add_up(name, place):
                keeps |= {state: 0.0 for value in made for state in states[value]}
    return work.build_model(keeps)


class _NotLinear(Exception):
    """Raised if the new value of a buffer is not a sum with one addend for each microbatch."""


class _BufferSumRewriter:
    """Rewrites the graphs of a model of one microbatch so that each microbatch computes one addend of every buffer
    whose new value is a sum over the batch.

    ``model``: the model, as blocks (graphs of layers) and their calls. ``axis``: the mesh axis along which the global
    batch is split into ``parts`` parts, one for each pair of data-parallel rank and microbatch. ``meeting``: the nodes
    whose values depend on samples of several parts. Methods write such a value as a sum of two nodes: the addend of one
    microbatch, and a term that is equal for all microbatches and is added only once.
    """

    def __init__(self, model: FoldedModel, axis: str, parts: int) -> None:
        """Copy the dicts of ``model``, so that they can be changed, and find the nodes that depend on samples of
        several parts of the global batch. ``axis``: the mesh axis along which the global batch is split into
        ``parts`` parts, one for each pair of data-parallel rank and microbatch."""
        self.model, self.axis, self.parts = model, axis, parts
        self.blocks, self.calls, self.values = dict(model.blocks), list(model.calls), dict(model.values)
        self.producer = {v: (c.block, k) for c in self.calls for k, v in enumerate(c.outputs)}
        self.meeting = self._find_combining_nodes()
        self._found: dict[fx.Node, Part] = {}
        self._passed: dict[tuple[str, int], int] = {}  # output of a block -> the index of its addend among the outputs
        self._looking: set[fx.Node] = set()

    def _find_combining_nodes(self) -> set[fx.Node]:
        """Return the collectives that combine samples of different parts of the global batch (one for each pair of
        data-parallel rank and microbatch), and all nodes that depend on them, in all graphs of the model."""
        found: set[fx.Node] = set()
        values: set[str] = set()
        size = -1
        while size < len(found):
            size = len(found)
            for run in self.calls:
                block = self.blocks[run.block]
                inside = {n for n, v in zip(block.inputs, run.inputs, strict=True) if v in values}
                found |= {n for n in block.placeholders if n.name in inside}
                for node in block.graph.nodes:
                    if node.op == "call_function" and (
                        self._is_combining_collective(node) or not found.isdisjoint(node.all_input_nodes)
                    ):
                        found.add(node)
                values |= {v for v, n in zip(run.outputs, block.outputs, strict=True) if n in found}
        return found

    def _is_combining_collective(self, node: fx.Node) -> bool:
        """Return whether ``node`` is a collective that communicates between different parts of the global batch (one
        for each pair of data-parallel rank and microbatch)."""
        named = get_collective_axis(node)
        return named is not None and named[0] == self.axis and collective_name(node.target) in COMMUNICATING

    def add_up(self, name: str, place: int) -> bool:
        """If an output of a graph, the new value of a buffer, is a sum over microbatches, replace the output by the
        addend of one microbatch. Return whether it was replaced. It is not replaced if it is equal in every microbatch
        or is not such a sum.

        ``name``: the name of the block (the graph of a piece of the model such as a layer). ``place``: the index of the
        output, from 0.
        """
        block = self.blocks[name]
        node = block.outputs[place]
        if node not in self.meeting:
            return False  # equal in every microbatch
        try:
            part = self._build_microbatch_addend(name, node)
        except _NotLinear:
            return False
        outputs = list(block.outputs)
        outputs[place] = part
        block.graph.output_node().args = (tuple(outputs),)
        return True

    def build_model(self, keeps: dict[str, float]) -> FoldedModel:
        """Return the model with the rewritten graphs, without inputs and outputs that are no longer read. ``keeps``:
        name of each buffer that is a sum over microbatches -> number by which its old value is multiplied before the
        addends are added."""
        for block in self.blocks.values():
            drop_unused(block.graph)
        passed = {c.outputs[place] for name, place in self._passed for c in self.calls if c.block == name}
        while self._drop_unread(passed):
            pass
        return self.model.with_(blocks=self.blocks, calls=self.calls, values=self.values, keeps=keeps)

    def _drop_unread(self, passed: Collection[str]) -> bool:
        """Remove inputs and outputs that are no longer read from the graphs, after a value that passes between graphs
        was replaced by its addends. Return whether any was removed.

        ``passed``: the names of the replaced values; no other inputs and outputs are removed.
        """
        read = {v for c in self.calls for v in c.inputs} | set(self.model.updates.values())
        read |= {o.value for o in self.model.outputs if o.value is not None} | {self.model.loss or ""}
        dropped = False
        for name, block in self.blocks.items():
            nodes = {n.name: n for n in block.placeholders}
            runs = {i: c for i, c in enumerate(self.calls) if c.block == name}
            keep_in = [i for i, n in enumerate(block.inputs)
                       if nodes[n].users or not all(c.inputs[i] in passed for c in runs.values())]  # fmt: skip
            keep_out = [k for k in range(len(block.outputs))
                        if any(c.outputs[k] in read or c.outputs[k] not in passed for c in runs.values())]  # fmt: skip
            if len(keep_in) == len(block.inputs) and len(keep_out) == len(block.outputs):
                continue
            dropped = True
            for i in set(range(len(block.inputs))) - set(keep_in):
                block.graph.erase_node(nodes[block.inputs[i]])
            block.inputs = tuple(block.inputs[i] for i in keep_in)
            block.graph.output_node().args = (tuple(block.outputs[k] for k in keep_out),)
            drop_unused(block.graph)
            for number, run in runs.items():
                inputs, outputs = tuple(run.inputs[i] for i in keep_in), tuple(run.outputs[k] for k in keep_out)
                self.calls[number] = replace(run, inputs=inputs, outputs=outputs)
                for gone in set(run.outputs) - set(outputs):
                    del self.values[gone]
        return dropped

    def _build_microbatch_addend(self, name: str, node: fx.Node) -> fx.Node:
        """Return a node with one microbatch's addend of the value of ``node``, which is a sum over microbatches. A term
        that is equal for all microbatches is included in the addend of the first microbatch only. Raise
        :class:`_NotLinear` if the value is not such a sum.

        ``name``: the name of the graph that contains ``node``.
        """
        if get_node_tensor(node).dtype == torch.bool:
            raise _NotLinear
        adds, once = self._find_node_part(name, node)
        assert adds is not None, node
        if once is None:
            return adds
        build = self._make_node_builder(name, node)
        first = build(aten.eq.Scalar, build(ops.axis_index.default, self.axis, self.parts), 0)
        return build(aten.add.Tensor, adds, build(aten.where.self, first, once, build(aten.zeros_like.default, once)))

    def _make_node_builder(self, name: str, node: fx.Node) -> Callable[..., fx.Node]:
        """Return a function ``build(operator, *args, **kwargs)`` that appends an operator to the graph with the name
        ``name`` and returns its node, with the module path and source line of ``node``."""
        graph = self.blocks[name].graph

        def build(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            with graph.inserting_before(graph.output_node()):
                return insert_operator_node(graph, target, args, kwargs, like=node)

        return build

    def _find_node_part(self, name: str, node: fx.Node) -> Part:
        """Write the value of ``node`` as a sum over microbatches. Return two nodes: the addend of one microbatch, and a
        term that is equal for all microbatches and is added only once; ``None`` in place of a node that is zero. Raise
        :class:`_NotLinear` if the value is not such a sum. Results are cached.

        ``name``: the name of the graph that contains ``node``.
        """
        if node not in self.meeting:
            return None, node
        if node not in self._found:
            if node in self._looking:
                raise _NotLinear  # a cycle: each layer passes the value to the next call of the same graph
            self._looking.add(node)
            try:
                self._found[node] = self._compute_node_part(name, node)
            finally:
                self._looking.discard(node)
        return self._found[node]

    def _compute_node_part(self, name: str, node: fx.Node) -> Part:
        """Append operators to the graph that write the value of ``node`` as a sum over microbatches. Return two nodes:
        the addend of one microbatch, and a term that is equal for all microbatches and is added only once; ``None`` in
        place of a node that is zero. Raise :class:`_NotLinear` if the value is not such a sum.

        ``name``: the name of the graph that contains ``node``.
        """
        build = self._make_node_builder(name, node)
        if node.op == "placeholder":
            return self._split_input(name, node)
        if self._is_combining_collective(node):
            return self._build_collective_addend(node, build), None
        if node.target is operator.getitem:
            adds, once = self._find_node_part(name, node.args[0])  # type: ignore[arg-type]
            return _build_result_item(build, adds, node.args[1]), _build_result_item(build, once, node.args[1])
        operands = operands_of(node)
        if node.target in _SUMS and len(operands) == 1 and isinstance(node.args[0], fx.Node):
            return self._split_number_addition(node, self._find_node_part(name, operands[0]), build)
        summed = {i for i, o in enumerate(operands) if o in self.meeting}
        together = next((p for p in _list_linear_operands(node) if summed <= p), None)
        if together is None:
            return self._split_sample_sum(name, node, build)
        if any(get_node_tensor(o).dtype == torch.bool for i, o in enumerate(operands) if i in together):
            raise _NotLinear
        zero = aten.zeros_like.default
        added, terms = list(operands), list(operands)
        of = {i: self._find_node_part(name, operands[i]) for i in together}
        for i, (adds, once) in of.items():
            added[i] = adds if adds is not None else build(zero, operands[i])
            terms[i] = once if once is not None else build(zero, added[i])
        some = any(once is not None for _, once in of.values())
        return _rebuild_with_operands(node, added, build), _rebuild_with_operands(node, terms, build) if some else None

    def _split_number_addition(self, node: fx.Node, part: Part, build: Callable[..., fx.Node]) -> Part:
        """Write the value of the operator ``node``, which is ``x + number`` or ``x - number``, as a sum over
        microbatches. Return two nodes: the addend of one microbatch, which equals that of ``x``, and a term that
        includes the number and is added only once.

        ``part``: the two nodes of ``x``: its addend of one microbatch, and its term that is added only once. ``build``:
        appends an operator to the graph and returns its node.
        """
        adds, once = part
        assert adds is not None, node
        once = once if once is not None else build(aten.zeros_like.default, adds)
        if get_node_tensor(adds).dtype != get_node_tensor(node).dtype:
            adds = build(aten._to_copy.default, adds, dtype=get_node_tensor(node).dtype)
        return adds, _rebuild_with_operands(node, [once], build)

    def _split_sample_sum(self, name: str, node: fx.Node, build: Callable[..., fx.Node]) -> Part:
        """Write the value of ``node``, a sum over samples, as a sum over microbatches. Return two nodes: the addend of
        one microbatch, and a term that is added only once (``None`` if this term is zero).

        ``name``: the name of the graph that contains ``node``. ``node``: an operator that either adds one row for each
        sample to its first operand at given indices (such as ``index_add``) or sums over all samples. Raise
        :class:`_NotLinear` for any other operator. ``build``: appends an operator to the graph and returns its node.
        """
        operands = operands_of(node)
        rows = _find_added_rows(node)
        if rows is not None:
            mine = [self._build_microbatch_rows(name, o, dim) for o, dim in zip(operands[1:], rows, strict=True)]
            adds, once = self._find_node_part(name, operands[0])
            adds = adds if adds is not None else build(aten.zeros_like.default, operands[0])
            return _rebuild_with_operands(node, [adds, *mine], build), once
        for strategy in enumerate_strategies(node, self.parts):
            if strategy.factor is not None and all(layout == PARTIAL for layout in strategy.results):
                with suppress(_NotLinear):
                    return self._append_for_microbatch(name, node, strategy), None
        raise _NotLinear

    def _build_microbatch_rows(self, name: str, node: fx.Node, dim: int) -> fx.Node:
        """Return a node with the slice of the value of ``node`` that belongs to the samples of one microbatch. ``dim``:
        the dim of samples. ``name``: the name of the graph that contains ``node``. Raise :class:`_NotLinear` if the
        slice depends on samples of other microbatches."""
        build = self._make_node_builder(name, node)
        if node not in self.meeting:
            if get_node_tensor(node).shape[dim] % self.parts:
                raise _NotLinear
            return build(
                aten.index_select.default,
                node,
                dim,
                self._build_row_indices(build, get_node_tensor(node).shape[dim] // self.parts),
            )
        if self._is_combining_collective(node):
            if collective_name(node.target) == "all_gather" and node.args[1] == dim:
                return node.all_input_nodes[0]
            raise _NotLinear
        if node.op == "call_function" and isinstance(node.meta["val"], Tensor):
            for strategy in enumerate_strategies(node, self.parts):
                if strategy.factor is not None and strategy.results == (make_shard_layout(dim),):
                    with suppress(_NotLinear):
                        return self._append_for_microbatch(name, node, strategy)
        raise _NotLinear

    def _append_for_microbatch(self, name: str, node: fx.Node, strategy: Strategy) -> fx.Node:
        """Append a copy of the operator ``node`` for the samples of one microbatch only, and return the new node. Raise
        :class:`_NotLinear` if the part of an operand that belongs to one microbatch cannot be found.

        ``name``: the name of the graph that contains ``node``. ``strategy``: the layouts of the operands; a sharded
        operand is sharded along its dim of samples.
        """
        operands = []
        for operand, layout in zip(operands_of(node), strategy.operands, strict=True):
            if layout.is_shard and not layout.sections:
                operands.append(self._build_microbatch_rows(name, operand, layout.dim))
            elif layout.is_whole and operand not in self.meeting:
                operands.append(operand)
            else:
                raise _NotLinear
        graph = self.blocks[name].graph
        with graph.inserting_before(graph.output_node()):
            return append_local_call(node, strategy, self.axis, self.parts, operands, graph)

    def _build_row_indices(self, build: Callable[..., fx.Node], length: int) -> fx.Node:
        """Return a node ``[length]`` with the indices of one microbatch's rows in the concatenated rows of all
        microbatches. ``length``: the number of rows of each microbatch. ``build``: appends an operator to the graph and
        returns its node."""
        start = build(aten.mul.Tensor, build(ops.axis_index.default, self.axis, self.parts), length)
        return build(aten.add.Tensor, build(aten.arange.default, length, device=META), start)

    def _build_collective_addend(self, node: fx.Node, build: Callable[..., fx.Node]) -> fx.Node:
        """Return a node with one microbatch's addend of the result of ``node``, a collective over the parts of the
        global batch (one part for each pair of data-parallel rank and microbatch). For an all-reduce, this is the
        operand. For an all-gather, it is zero except in the part's own rows, which have the operand. Raise
        :class:`_NotLinear` for any other collective.

        ``build``: appends an operator to the graph and returns its node.
        """
        kind, mine = collective_name(node.target), node.all_input_nodes[0]
        if kind == "all_reduce":
            return mine
        if kind != "all_gather" or get_node_tensor(mine).dtype == torch.bool:
            raise _NotLinear
        dim = int(node.args[1])  # type: ignore[arg-type]
        places = self._build_row_indices(build, get_node_tensor(mine).shape[dim])
        whole = build(
            aten.zeros.default, list(get_node_tensor(node).shape), dtype=get_node_tensor(mine).dtype, device=META
        )
        return build(aten.index_add.default, whole, dim, places, mine)

    def _split_input(self, name: str, node: fx.Node) -> Part:
        """Write an input of a graph as a sum over microbatches. Return two new placeholders: one for the addend of one
        microbatch, and one for the term that is added only once. The graphs that compute the input get the two as
        further outputs.

        ``name``: the name of the graph. ``node``: the placeholder of the input. Raise :class:`_NotLinear` if the input
        is equal for all microbatches in some call of the graph.
        """
        place = self.blocks[name].inputs.index(node.name)
        sources = {c.inputs[place]: self.producer.get(c.inputs[place]) for c in self.calls if c.block == name}
        outputs = {source for source in sources.values() if source is not None}
        if None in sources.values() or any(self._find_output_node(o) not in self.meeting for o in outputs):
            raise _NotLinear  # some calls read a value that is equal for all microbatches
        for output in outputs:
            self._split_output(output)
        made = []
        for further in range(2):
            values = {v: self._find_further_output(v, further) for v in sources}
            made.append(self._add_input(name, place, values, get_node_tensor(node)))
        return made[0], made[1]

    def _find_output_node(self, output: tuple[str, int]) -> fx.Node:
        """Return the node of one output of a graph. ``output``: (name of the graph, index of the output from 0)."""
        block, place = output
        return self.blocks[block].outputs[place]

    def _find_further_output(self, value: str, further: int) -> str:
        """Return the name of one of the two values into which the value ``value``, an output of a call, was split.
        ``further``: 0 for the addend of one microbatch, 1 for the term that is added only once."""
        source = self.producer[value]
        run = next(c for c in self.calls if value in c.outputs)
        return run.outputs[self._passed[source] + further]

    def _split_output(self, output: tuple[str, int]) -> None:
        """Split an output of a graph into two further outputs of the graph and all its calls: the addend of one
        microbatch, and a term that is added only once. The split output is the sum of the addends of all microbatches
        and of this term. Later graphs can then read the two.

        ``output``: (name of the graph, index from 0 of the output to split).
        """
        if output in self._passed:
            return
        name, block = output[0], self.blocks[output[0]]
        node = self._find_output_node(output)
        adds, once = self._find_node_part(name, node)
        assert adds is not None, node
        build = self._make_node_builder(name, node)
        once = once if once is not None else build(aten.zeros_like.default, adds)
        made = [build(aten.detach.default, n) for n in (adds, once)]
        place = self._passed[output] = len(block.outputs)
        block.graph.output_node().args = ((*block.outputs, *made),)
        for i, run in enumerate(self.calls):
            if run.block == name:
                values = tuple(f"{run.outputs[output[1]]}.{part}" for part in ("part", "once"))
                self.values |= {
                    v: TensorSpec.from_tensor(get_node_tensor(n)) for v, n in zip(values, made, strict=True)
                }
                self.producer |= {v: (name, place + k) for k, v in enumerate(values)}
                self.calls[i] = replace(run, outputs=(*run.outputs, *values))

    def _add_input(self, name: str, place: int, values: dict[str, str], like: Tensor) -> fx.Node:
        """Add an input to a graph and to all its calls, and return the new placeholder.

        ``name``: the name of the graph. ``place``: the index of an existing input. ``values``: name of each value that
        a call reads at the input ``place`` -> name of the value that it reads at the new input. ``like``: a tensor of
        the shape and dtype of the new input.
        """
        block = self.blocks[name]
        with block.graph.inserting_after(block.placeholders[-1]):
            made = block.graph.placeholder(f"{block.inputs[place]}_part")
        made.target = made.name
        made.meta["val"] = TensorSpec.from_tensor(like).meta()
        made.meta["grad"] = False
        block.inputs = (*block.inputs, made.name)
        for i, run in enumerate(self.calls):
            if run.block == name:
                self.calls[i] = replace(run, inputs=(*run.inputs, values[run.inputs[place]]))
        return made


_SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
# Sets of operands in which an operator is linear together, where its sharding rule does not state this.
_LINEAR: dict[Any, tuple[frozenset[int], ...]] = {
    aten.lerp.Scalar: (frozenset((0, 1)),),
    aten.lerp.Tensor: (frozenset((0, 1)),),
    aten.addcmul.default: (frozenset((0, 1)), frozenset((0, 2))),
    aten.addcdiv.default: (frozenset((0, 1)),),
    aten.scatter.src: (frozenset((0, 2)),),
    aten.index_copy.default: (frozenset((0, 2)),),
}


def _list_linear_operands(node: fx.Node) -> tuple[frozenset[int], ...]:
    """Return sets of operand positions (from 0) in which the operator ``node`` is linear: if the operands of one set
    are split into addends and the other operands stay unchanged, the result is the sum of the results for the addends.
    """
    factors = factors_of(node)
    known = _LINEAR.get(node.target, () if factors is None else factors.linear)
    if node.target is aten.copy.default and get_node_tensor(node).dtype == get_node_tensor(operands_of(node)[1]).dtype:
        return (*known, frozenset((1,)))
    return known


def _find_added_rows(node: fx.Node) -> list[int] | None:
    """If the operator ``node`` adds rows to its first operand at given indices, as ``index_add`` does, return a list of
    the dim that counts these rows in each further operand (indices and addends). Return ``None`` for any other
    operator, or if the further operands have different numbers of rows."""
    operands = operands_of(node)
    shapes = [get_node_tensor(o).shape for o in operands]
    if node.target in (aten.index_add.default, aten.scatter_add.default) and shapes[0] and shapes[2]:
        dim = normalize_dim(get_node_argument(node, "dim"), len(shapes[0]))
        rows = [0, dim] if node.target is aten.index_add.default else [dim, dim]
    elif node.target is aten.index_put.default and get_node_argument(node, "accumulate"):
        indexed = [d for d, i in enumerate(get_node_argument(node, "indices")) if i is not None]
        at = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
        if any(len(s) != 1 for s in shapes[1:-1]) or len(shapes[-1]) != len(shapes[0]) - len(indexed) + 1:
            return None
        rows = [0] * len(indexed) + [at]
    else:
        return None
    sizes = {s[d] for s, d in zip(shapes[1:], rows, strict=True)}
    return rows if len(sizes) == 1 else None


def _rebuild_with_operands(node: fx.Node, operands: Sequence[fx.Node], build: Callable[..., fx.Node]) -> fx.Node:
    """Append a copy of the operator ``node`` that reads ``operands`` instead of its operands, and return the new node.
    ``build``: appends an operator to the graph and returns its node."""
    args, kwargs = replace_operands(node, operands)
    return build(node.target, *args, **kwargs)


def _build_result_item(build: Callable[..., fx.Node], node: fx.Node | None, index: Any) -> fx.Node | None:
    """Append ``node[index]`` to the graph and return the new node; return ``None`` if ``node`` is ``None``. ``build``:
    appends an operator to the graph and returns its node."""
    return None if node is None else build(operator.getitem, node, index)
