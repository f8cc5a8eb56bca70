"""Find the batch dim of every value: sharding on the axis ``data``, which counts microbatches times data-parallel
ranks.

The solver is the one of every other axis, with other costs: undivided work is expensive, reductions and exchanges over
samples cost more the more often they happen, and nothing else counts. A mean loss ends as a partial sum; the number of
targets is a total over the batch, known before the pipeline starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import fx

from partitioner.cost.call.operators import is_view
from partitioner.passes.capture.buffers import leading_to
from partitioner.passes.capture.inputs import NO_BATCH
from partitioner.passes.errors import InputsError
from partitioner.passes.ir.layouts import PARTIAL, READ_SHARDED, REPLICATED, Layout, make_shard_layout
from partitioner.passes.ir.model import FoldedModel, ModelInput, TensorSpec
from partitioner.passes.rules.factors import Strategy, results_of
from partitioner.passes.shard.sample_groups import GroupModel
from partitioner.passes.shard.shard_block import RESHARDS
from partitioner.solve.sharding.choices import LayoutRules, matmul_flops
from partitioner.solve.sharding.sharding import DATA, Allowed, ShardingSolution, solve_sharding, whole_sharding

# All work undone costs this many meetings of samples: a thousandth of the work is worth one collective.
_ALL_WORK = 1000.0
_TOTAL = 1e-3  # a total over the batch that needs no gradient: computed in the prologue
_SLICE = 1e-6  # taking a part of a value that is whole
_MOVED = 10.0  # sums over samples that one move of samples is worth, or one slice of a weight, where norms add them up
_WHOLE = 0.1  # an input with a batch dim that every rank reads whole: worth a few totals


def batch_size(model: FoldedModel, global_batch: int | None) -> int:
    """The global batch size: ``global_batch`` if given, else the first dim of the first input that has one. Raises
    :class:`InputsError` if there is none, or if it is 0."""
    if global_batch is not None:
        return global_batch
    sizes = [(i.spec.shape[0], i.path) for i in model.inputs if i.spec.shape]
    if not sizes:
        raise InputsError(NO_BATCH)
    batch, path = sizes[0]
    if batch == 0:
        raise InputsError(f"input {path!r} has no samples; expected one whole global batch, of 1 or more")
    return batch


def shard_batch(model: FoldedModel, batch: int, allowed: Allowed | None = None) -> ShardingSolution:
    """The layouts that split ``batch`` samples; they hold for any number of parts that divides ``batch``.

    ``allowed``: the strategies that an operator may have. Raises
    :class:`partitioner.solve.sharding.choices.ShardingError` if the samples cannot be told apart at all.
    """
    outputs = {
        o.value: [REPLICATED, PARTIAL, *map(make_shard_layout, range(len(model.values[o.value].shape)))]
        for o in model.outputs
        if o.value is not None and o.value != model.loss
    }
    alone = _without_samples(model, batch) | _into_buffers(model)
    samples = frozenset(i.spec for i in model.inputs if batch in i.spec.shape)
    return solve_sharding(
        model,
        DATA,
        batch,
        BatchCosts(_work(model, alone), samples, alone, _MOVED if model.updates else 1.0),
        LayoutRules({i.value: _input_layouts(i, batch) for i in model.inputs}, outputs),
        allowed=allowed,
    )


def of_groups(model: FoldedModel, group: GroupModel, count: int) -> tuple[FoldedModel, ShardingSolution]:
    """``model``, folded from one ``group``, with the inputs of ``count`` groups, and the split of a batch into groups:
    nothing is split within a group, and every gradient is a partial sum."""
    layouts = {i.value: _dim_layout(group.inputs[i.path]) for i in model.inputs}
    layouts |= {o.value: group.outputs[o.path] for o in model.outputs if o.value is not None}
    layouts |= {model.loss: PARTIAL} if model.loss is not None else {}
    inputs = [replace(i, spec=TensorSpec(group.whole_shape(i.path, count), i.spec.dtype)) for i in model.inputs]
    whole = whole_sharding(model, DATA, BatchCosts(_work(model, frozenset())))
    split = replace(
        whole,
        values={**whole.values, **layouts},
        states={name: READ_SHARDED if state.requires_grad else REPLICATED for name, state in model.states.items()},
    )
    return model.with_(inputs=inputs), split


def _dim_layout(dim: int | None) -> Layout:
    return REPLICATED if dim is None else make_shard_layout(dim)


def _input_layouts(model_input: ModelInput, batch: int) -> list[Layout]:
    return [make_shard_layout(d) for d, size in enumerate(model_input.spec.shape) if size == batch] + [REPLICATED]


def _without_samples(model: FoldedModel, batch: int) -> frozenset[fx.Node]:
    """The operators that no sample reaches in any call: they depend on weights, constants and random indices alone."""
    reached = {i.value for i in model.inputs if batch in i.spec.shape}
    found: set[fx.Node] = set()
    for run in model.calls:
        block = model.blocks[run.block]
        inside = {name for name, value in zip(block.inputs, run.inputs, strict=True) if value in reached}
        nodes = {n for n in block.placeholders if n.name in inside}
        for node in block.graph.nodes:
            if node.op == "call_function" and not nodes.isdisjoint(node.all_input_nodes):
                nodes.add(node)
        found |= nodes
        reached.update(v for v, n in zip(run.outputs, block.outputs, strict=True) if n in nodes)
    operators = (n for block in model.blocks.values() for n in block.graph.nodes if n.op == "call_function")
    return frozenset(n for n in operators if n not in found)


def _into_buffers(model: FoldedModel) -> frozenset[fx.Node]:
    """The operators whose results only go into buffers. Dividing their work is not worth exchanges of samples other
    than sums, which can be accumulated over microbatches (``passes/shard/buffer_sums.py``)."""
    taken, found = set(model.updates.values()), set[fx.Node]()
    for name, block in model.blocks.items():
        calls = [c for c in model.calls if c.block == name]
        ends = [n for k, n in enumerate(block.outputs) if calls and all(c.outputs[k] in taken for c in calls)]
        found |= leading_to(block.graph, ends)
    return frozenset(found)


def _work(model: FoldedModel, alone: frozenset[fx.Node]) -> float:
    return sum(
        model.num_calls(name) * node_work(node)
        for name, block in model.blocks.items()
        for node in block.graph.nodes
        if node.op == "call_function" and node not in alone
    )


@lru_cache(maxsize=1 << 16)
def node_work(node: fx.Node) -> float:
    """Approximate work of a node: matrix-multiply FLOPs plus elements of the results; 0 for a view."""
    if is_view(node):
        return 0.0
    return float(matmul_flops(node) + sum(r.numel() for r in results_of(node)))


@dataclass(frozen=True)
class BatchCosts:
    """Costs on the axis ``data``. ``total``: the work on samples. ``samples``: the specs of inputs with a batch dim.

    ``alone``: the operators whose work does not count, mainly those that no sample reaches. ``moved``: the cost of
    moving samples, or of giving each rank a part of a weight, relative to one sum over samples. If it were small,
    channels would be divided instead of samples.
    """

    total: float
    samples: frozenset[TensorSpec] = frozenset()
    alone: frozenset[fx.Node] = frozenset()
    moved: float = 1.0

    def node(self, node: fx.Node, strategy: Strategy, num_ranks: int) -> float:
        if node in self.alone:  # every microbatch needs it whole; dividing it would have samples meet at its gradient
            return 0.0
        work = _ALL_WORK * node_work(node) / max(self.total, 1.0)
        return work / num_ranks if strategy.factor is not None else work

    def reshard(self, spec: TensorSpec, source: Layout, target: Layout, differentiable: bool) -> float:
        if source == target:
            return 0.0
        reshard = RESHARDS.get((source.kind, target.kind))
        if reshard is None:
            return math.inf
        meetings = (reshard.forward is not None) + (differentiable and reshard.backward is not None)
        kinds = (source.kind, target.kind)
        if kinds == ("R'", "S") and self.moved > 1.0:
            return self.moved
        if not meetings:
            return _SLICE
        if "S" in kinds:
            return self.moved * meetings
        is_total = kinds == ("P", "R") and not differentiable
        return _TOTAL if is_total else float(meetings)

    def state(self, spec: TensorSpec, layout: Layout, num_ranks: int) -> float:
        return 0.0

    def boundary(self, spec: TensorSpec, layout: Layout) -> float:
        """A tie-break that prefers the first of two possible batch dims, and the cost of an input with a batch dim read
        whole."""
        if layout.is_shard:
            return _SLICE * layout.dim
        return _WHOLE if spec in self.samples else 0.0
