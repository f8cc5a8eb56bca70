"""Split the global batch over data-parallel ranks and their microbatches, which together form one mesh axis ``data``.

Requires: the layouts chosen on the axis ``data`` (every block's :class:`BlockSharding`). Provides: a model of one
microbatch on one data-parallel rank. A sum over the global batch that depends on inputs alone, such as the number of
targets that are not ignored, is computed by *prologue* calls before the pipeline starts. A sum that is only written to
a buffer is completed at the end of the step (``passes/shard/buffer_sums.py``). Any other communication between samples
is possible only if a rank has a single microbatch; it then runs over the axis ``dp``.

:func:`sample_dims` finds the batch dim of each value by propagation from operator to operator. Requires: a graph with
``node.meta["val"]``, and the batch dims of its placeholders. The result of an operator that has no sharding rule or
mixes samples has no batch dim.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.collectives import COMMUNICATING, collective_name, ops
from partitioner.passes.ir.interpret import META, insert_operator_node
from partitioner.passes.ir.layouts import REST, TOTALS, Layout, local_shape
from partitioner.passes.ir.model import Block, Call, FoldedModel, TensorSpec
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.rules import factors_of, has_rule
from partitioner.passes.rules.factors import operands_of
from partitioner.passes.shard.buffer_sums import accumulate_updates
from partitioner.passes.shard.shard_block import BlockSharding, shard_block

aten = torch.ops.aten

DATA = "data"


def split_batch(
    model: FoldedModel,
    blocks: Mapping[str, BlockSharding],
    values: Mapping[str, Layout],
    parts: int,
    num_microbatches: int,
) -> FoldedModel:
    """Convert the model of the global batch to the model of one microbatch on one data-parallel rank, and return it.

    ``model``: the model of the global batch, as blocks (graphs of layers) and their calls. ``blocks``: block name ->
    layouts of its tensors on the axis ``data``, along which the global batch is split into ``parts`` parts. ``values``:
    name of each value that passes between calls -> its layout on this axis. ``num_microbatches``: the number of
    microbatches (parts) that each rank runs, one after the other. Raise :class:`UnsupportedError` if samples depend on
    each other in a way that several microbatches cannot compute exactly.
    """
    if parts == 1:
        return model
    local = {name: shard_block(block, blocks[name], DATA, parts) for name, block in model.blocks.items()}
    specs = {
        name: TensorSpec(local_shape(values[name], spec.shape, parts), spec.dtype)
        for name, spec in model.values.items()
    }
    split = model.with_(blocks=local, values=specs)
    split = _extract_totals(split)
    if num_microbatches > 1:
        split = accumulate_updates(split, DATA, parts)
    _localise_data_collectives(split, num_microbatches)
    return split


def has_sample_collectives(model: FoldedModel) -> bool:
    """Return whether ``model``, the model of one microbatch, still has collectives between samples of different parts
    of the global batch, so that its result depends on the number of microbatches. Each pair of data-parallel rank and
    microbatch has one part."""
    nodes = (node for block in model.blocks.values() for node in block.graph.nodes)
    return any(collective_name(node.target) and {"dp", DATA}.intersection(map(str, node.args)) for node in nodes)


def _extract_totals(model: FoldedModel) -> FoldedModel:
    """Move sums over the global batch that do not depend on parameters, such as the number of targets of a loss, into
    new calls that run once, before the microbatches. Return the new model, in which the other calls read the sums as
    inputs. ``model``: the model of one microbatch."""
    producers = {v: (i, k) for i, c in enumerate(model.calls) for k, v in enumerate(c.outputs)}
    prologue: list[Call] = []
    blocks, values = dict(model.blocks), dict(model.values)
    calls: list[Call] = []
    for run in model.calls:
        block = model.blocks[run.block]
        totals = [n for n in block.graph.nodes if n.target == ops.all_reduce.default and n.args[1] == DATA]
        totals = [n for n in totals if _is_independent_total(model, run, n, producers)]
        if not totals:
            calls.append(run)
            continue
        name = block.name + TOTALS
        names = tuple(f"{run.path}:total{i}" for i in range(len(totals)))
        blocks[name], states, inputs = _make_totals_block(model, run, totals, name, producers)
        blocks[block.name + REST] = _turn_totals_into_inputs(block, totals)
        prologue.append(Call(name, run.path, states, inputs, names, shared=True, prologue=True))
        values.update({v: TensorSpec.from_tensor(n.meta["val"]) for v, n in zip(names, totals, strict=True)})
        calls.append(replace(run, block=block.name + REST, inputs=(*run.inputs, *names)))
    used = {c.block for c in [*prologue, *calls]}
    return model.with_(blocks={k: b for k, b in blocks.items() if k in used}, calls=[*prologue, *calls], values=values)


def _is_independent_total(
    model: FoldedModel, call: Call, node: fx.Node, producers: Mapping[str, tuple[int, int]]
) -> bool:
    """Return whether ``node``, a sum over the batch, depends on no parameter and on no other collective, so that it can
    be computed before the first layer runs.

    ``model``: the model as blocks (graphs) and their calls. ``call``: the call whose graph contains ``node``.
    ``producers``: name of a tensor that passes between calls -> (index of the call that computes it, index among the
    outputs of this call).
    """
    block = model.blocks[call.block]
    bound = dict(zip(block.states, call.states, strict=True))
    passed = dict(zip(block.inputs, call.inputs, strict=True))
    for n in _list_ancestor_nodes(node):
        if n is not node and collective_name(n.target) in COMMUNICATING:
            return False
        if n.name in bound and model.states[bound[n.name]].kind == "parameter":
            return False
        if n.name in passed and passed[n.name] in producers:
            index, output = producers[passed[n.name]]
            source = model.calls[index]
            if not _is_independent_total(model, source, model.blocks[source.block].outputs[output], producers):
                return False
    return True


def _list_ancestor_nodes(node: fx.Node) -> list[fx.Node]:
    """Return ``node`` and all nodes on which it depends, directly or indirectly, each once."""
    seen: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        n = stack.pop()
        if n not in seen:
            seen[n] = None
            stack.extend(n.all_input_nodes)
    return list(seen)


def _make_totals_block(
    model: FoldedModel, call: Call, totals: list[fx.Node], name: str, producers: Mapping[str, tuple[int, int]]
) -> tuple[Block, tuple[str, ...], tuple[str, ...]]:
    """Return three values: a new block (a graph) that computes the operands of the sums ``totals`` (not the sums) from
    the inputs of the model; the names of the states (parameters, buffers, constants) that the block reads; and the
    names of the model's inputs that it reads.

    ``totals``: nodes of collectives that sum over the batch. ``model``: the model as blocks and their calls. ``call``:
    the call whose graph contains the nodes ``totals``. ``name``: the name of the new block. ``producers``: name of a
    tensor that passes between calls -> (index of the call that computes it, index among the outputs of this call).
    """
    body = _CallInliner(model, producers)
    here = model.calls.index(call)
    outputs = tuple(body.copy_value(here, n.all_input_nodes[0]) for n in totals)
    body.graph.output(outputs)
    return body.build_block(name)


class _CallInliner:
    """Copies values, with all operators that they depend on, from the graphs of several calls of ``model`` into one new
    graph. A call is one run of a block (a graph, such as that of a layer).

    ``producers``: name of a tensor that passes between calls -> (index of the call that computes it, index among the
    outputs of this call). ``graph``: the new graph.
    """

    def __init__(self, model: FoldedModel, producers: Mapping[str, tuple[int, int]]) -> None:
        """Start with an empty graph. ``model``: the model whose operators are copied. ``producers``: name of a tensor
        that passes between calls -> (index of the call that computes it, index among the outputs of this call)."""
        self.model = model
        self.producers = producers
        self.graph = fx.Graph()
        self.copied: dict[tuple[int, fx.Node], fx.Node] = {}
        self.leaves: dict[str, fx.Node] = {}  # name of a state or model input -> its placeholder
        self.first: fx.Node | None = None

    def copy_value(self, index: int, node: fx.Node) -> fx.Node:
        """Copy ``node`` and all operators that it depends on to the new graph, unless this was done before. Return the
        node's copy. ``index``: the index (from 0) of the model's call whose graph contains ``node``."""
        if (index, node) not in self.copied:
            if node.op == "placeholder":
                self.copied[index, node] = self.resolve_placeholder(index, node)
            else:
                for operand in node.all_input_nodes:
                    self.copy_value(index, operand)
                self.copied[index, node] = self.graph.node_copy(node, lambda n: self.copied[index, n])
        return self.copied[index, node]

    def resolve_placeholder(self, index: int, node: fx.Node) -> fx.Node:
        """Return the node of the new graph that has the value of the placeholder ``node``. If another call computes the
        value, its operators are copied; a model input or state becomes a placeholder. ``index``: the index (from 0) of
        the model's call whose graph contains ``node``."""
        call = self.model.calls[index]
        block = self.model.blocks[call.block]
        bound = dict(zip((*block.states, *block.inputs), (*call.states, *call.inputs), strict=True))
        outer = bound[node.name]
        if outer in self.producers:
            source, output = self.producers[outer]
            return self.copy_value(source, self.model.blocks[self.model.calls[source].block].outputs[output])
        if outer not in self.leaves:
            self.leaves[outer] = self.graph.create_node("placeholder", node.name)
            self.leaves[outer].meta.update(node.meta)
        return self.leaves[outer]

    def build_block(self, name: str) -> tuple[Block, tuple[str, ...], tuple[str, ...]]:
        """Return three values: a block (a graph) with the name ``name`` and the copied operators; the names of the
        model's states (parameters, buffers, constants) that it reads; and the names of the model's inputs that it
        reads. The block's placeholders are the states, then the inputs, in these orders."""
        states = tuple(k for k in self.leaves if k in self.model.states)
        inputs = tuple(k for k in self.leaves if k not in self.model.states)
        order = [self.leaves[k] for k in (*states, *inputs)]
        graph = fx.Graph()
        env = {n: graph.node_copy(n) for n in order}
        for node in self.graph.nodes:
            if node not in env:
                env[node] = graph.node_copy(node, env.__getitem__)
        names = [env[n].name for n in order]
        count = len(states)
        return Block(name, graph, tuple(names[:count]), tuple(names[count:])), states, inputs


def _turn_totals_into_inputs(block: Block, totals: list[fx.Node]) -> Block:
    """Return a copy of ``block`` (the graph of a piece of the model) that reads the values of the nodes ``totals``,
    which are sums over the batch, as additional last inputs instead of computing them."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in block.placeholders:
        env[node] = graph.node_copy(node)
    for total in totals:
        env[total] = graph.create_node("placeholder", total.name, name=total.name)
        env[total].meta.update(total.meta)
    for node in block.graph.nodes:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    drop_unused(graph)
    inputs = (*block.inputs, *(env[t].name for t in totals))
    return Block(block.name + REST, graph, block.states, inputs)


def _localise_data_collectives(model: FoldedModel, num_microbatches: int) -> None:
    """Replace the mesh axis ``data`` in the collectives of ``model``, the model of one microbatch, in place. The axis
    covers all parts of the global batch, one for each pair of data-parallel rank and microbatch.

    If ``num_microbatches``, the number of microbatches of each rank, is 1, the axis becomes ``dp``, the data-parallel
    ranks. Otherwise, slices of the batch become look-ups by the index of the microbatch, and collectives that
    communicate raise :class:`UnsupportedError`, because microbatches of one rank do not run at the same time.
    """
    for block in model.blocks.values():
        for node in list(block.graph.nodes):
            name = collective_name(node.target)
            if name is None or DATA not in node.args:
                continue
            if num_microbatches == 1:
                node.args = tuple("dp" if a == DATA else a for a in node.args)
            elif name in COMMUNICATING or (node.meta.get("grad") and name in ("copy", "shard_slice")):
                raise UnsupportedError(
                    f"{_describe_combining_operator(model, block, node)}, which cannot be kept exact over "
                    f"{num_microbatches} microbatches; use one microbatch: microbatch_size = batch / dp, or "
                    "couple='microbatch', under which samples interact only within a microbatch and loss and "
                    "gradients are the mean over microbatches"
                )
            elif name in ("shard_slice", "shard_narrow"):
                _slice_by_index(block.graph, node)


def _describe_combining_operator(model: FoldedModel, block: Block, node: fx.Node) -> str:
    """Return a text for an error message that names the operator that combines samples: the collective ``node`` itself,
    or the first operator that reads the result of ``node``. ``block``: the graph of ``model`` that contains ``node``.
    """
    reader = node if collective_name(node.target) in _ADDING else _find_first_reader(model, block, node) or node
    where = f"{reader.meta.get('path') or 'the model'} ({reader.meta.get('source') or 'source unknown'})"
    if reader is node or not isinstance(reader.target, torch._ops.OpOverload):
        return f"{where} combines samples across the batch"
    if not has_rule(reader.target):
        return f"{reader.target} at {where} has no rule that tells samples apart (partitioner.rule gives it one)"
    return f"{where} combines samples across the batch ({reader.target})"


_ADDING = ("all_reduce", "all_reduce_max", "reduce_scatter")

_SAMPLE_PRESERVING = (aten.split_with_sizes.default, aten.cat.default, operator.getitem)


def _find_first_reader(model: FoldedModel, block: Block, node: fx.Node) -> fx.Node | None:
    """Return the first operator of ``model`` that reads the result of the collective ``node``; ``None`` if there is
    none. Operators that only move data for the collective are skipped. ``block``: the graph that contains ``node``; the
    reader may be in this graph or in one that runs later."""
    place = node.meta.get("path"), node.meta.get("source")
    waiting: list[tuple[Block, fx.Node]] = [(block, node)]
    seen: set[fx.Node] = set()
    while waiting:
        block, node = waiting.pop(0)
        for user in node.users:
            moves = user.target in _SAMPLE_PRESERVING and (user.meta.get("path"), user.meta.get("source")) == place
            if user.op == "call_function" and not moves and collective_name(user.target) is None:
                return user
            found = [(block, user)] if user.op == "call_function" else _list_readers(model, block, node)
            waiting += [f for f in found if f[1] not in seen]
            seen.update(f[1] for f in found)
    return None


def _list_readers(model: FoldedModel, block: Block, output: fx.Node) -> list[tuple[Block, fx.Node]]:
    """Return a list of (block, placeholder): the placeholders through which calls of ``model`` read ``output``, an
    output node of ``block``. A block is a graph, such as that of a layer, and a call is one run of it."""
    number = block.outputs.index(output)
    values = {c.outputs[number] for c in model.calls if c.block == block.name}
    found = []
    for later in model.calls:
        reading = model.blocks[later.block]
        names = {n for n, value in zip(reading.inputs, later.inputs, strict=True) if value in values}
        found += [(reading, n) for n in reading.placeholders if n.name in names]
    return found


def _slice_by_index(graph: fx.Graph, node: fx.Node) -> None:
    """Replace ``node``, an operator of ``graph`` that slices the rows of one part of the global batch, by an index
    look-up, in place, because the first row depends on the microbatch that runs. Each pair of data-parallel rank and
    microbatch has one part."""
    whole, dim, axis, size = node.args
    length = node.meta["val"].shape[dim]
    with graph.inserting_before(node):
        place = insert_operator_node(graph, ops.axis_index.default, (axis, size), like=node)
        steps = insert_operator_node(graph, aten.arange.default, (length,), {"device": META}, like=node)
        start = insert_operator_node(graph, aten.mul.Tensor, (place, length), like=node)
        index = insert_operator_node(graph, aten.add.Tensor, (steps, start), like=node)
        taken = insert_operator_node(graph, aten.index_select.default, (whole, dim, index), like=node)
    for made in (place, steps, start, index):
        made.meta["grad"] = False
    node.replace_all_uses_with(taken)
    graph.erase_node(node)


Samples = dict[int, int]  # dim -> the number of samples in it; samples are its outermost factor

Results = tuple[Samples, ...]  # one dict for each result of an operator


def sample_dims(model: FoldedModel, dims: Mapping[str, int | None], count: int) -> dict[fx.Node, Results]:
    """Find the dims of all values of ``model`` that hold the ``count`` samples of the batch. Return a dict: graph node
    -> tuple with one dict for each result of the node, from the index of a dim to the number of samples that it holds
    (empty if the result has no batch dim).

    ``dims``: name of each model input or other value -> index of its batch dim; ``None`` or absent if it has none.
    """
    found: dict[fx.Node, Results] = {}
    seen: set[str] = set()
    for placed in model.calls:
        if placed.block in seen:
            continue
        seen.add(placed.block)
        block = model.blocks[placed.block]
        given = {
            name: {dim: count}
            for name, value in zip(block.inputs, placed.inputs, strict=True)
            if (dim := dims.get(value)) is not None
        }
        found |= _infer_block_samples(block, given)
    return found


def is_sharded_over_samples(samples: Samples, layout: Layout) -> bool:
    """Return whether a shard of a tensor with the layout ``layout`` has only some of the samples of the batch.
    ``samples``: index of a dim of the tensor -> number of samples that it holds; dims without samples are absent."""
    count = samples.get(layout.dim, 1) if layout.is_shard else 1
    return count > 1 and max(1, len(layout.sections)) % count != 0


def _infer_block_samples(block: Block, given: Mapping[str, Samples]) -> dict[fx.Node, Results]:
    """Return a dict for ``block`` (a graph of the model): node -> tuple with one dict for each result of the node, from
    the index of a dim to the number of samples of the batch that it holds; dims without samples are absent. ``given``:
    placeholder name -> such a dict, for placeholders that have samples."""
    found: dict[fx.Node, Results] = {}
    for node in block.graph.nodes:
        if node.op == "placeholder":
            found[node] = (dict(given.get(node.name, {})),)
        elif node.target is operator.getitem:
            source, index = node.args
            found[node] = (found[source][index],) if index < len(found[source]) else ({},)
        elif node.op == "call_function":
            found[node] = _infer_operator_samples(node, [found[o][0] if found[o] else {} for o in operands_of(node)])
    return found


def _infer_operator_samples(node: fx.Node, operands: Sequence[Samples]) -> Results:
    """Return a tuple with one dict for each result of the operator ``node``, from the index of a dim to the number of
    samples of the batch that it holds; dims without samples are absent. ``operands``: such a dict for each operand."""
    rule = factors_of(node)
    if rule is None or not any(operands):
        return ({},)
    carried: set[str] = set()
    for samples, dims in zip(operands, rule.operands, strict=True):
        for dim, count in samples.items():
            carried |= set(_select_outer_factors(dims[dim], count, rule.sizes))
    results = []
    for dims in rule.results:
        of_dims = {d: math.prod(rule.sizes[f] for f in names if f in carried) for d, names in enumerate(dims)}
        results.append({d: n for d, n in of_dims.items() if n > 1})
    return tuple(results)


def _select_outer_factors(factors: Sequence[str], count: int, sizes: Mapping[str, int]) -> Sequence[str]:
    """Return the first names in ``factors`` whose sizes multiply to ``count``; an empty sequence if there are none. A
    factor is a named size; the size of a tensor dim is the product of its factors.

    ``factors``: the names of the factors of one dim, outermost first. ``sizes``: name of a factor -> its size.
    """
    product = 1
    for place, name in enumerate(factors):
        if product == count:
            return factors[:place]
        product *= sizes[name]
    return factors if product == count else ()
