"""Find the batch dim of every value of a model, by sharding the model on the pseudo-axis ``data``.

The axis ``data`` has one rank per microbatch and data-parallel rank. The solver is the one for other mesh axes, with
other costs: work that is not divided is expensive, and reductions and exchanges over samples cost more the more often
they occur. Nothing else has a cost. A mean loss becomes a partial sum. The number of targets is a total over the batch
that is computed before the pipeline starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import fx

from partitioner.cost.call.operators import is_view
from partitioner.passes.capture.buffers import list_ancestors_of
from partitioner.passes.capture.inputs import NO_BATCH
from partitioner.passes.errors import InputsError
from partitioner.passes.ir.layouts import PARTIAL, READ_SHARDED, REPLICATED, Layout, make_shard_layout
from partitioner.passes.ir.model import FoldedModel, ModelInput, TensorSpec
from partitioner.passes.rules.factors import Strategy, results_of
from partitioner.passes.shard.sample_groups import GroupModel
from partitioner.passes.shard.shard_block import RESHARDS
from partitioner.solve.sharding.choices import LayoutRules, matmul_flops
from partitioner.solve.sharding.sharding import DATA, Allowed, ShardingSolution, solve_sharding, whole_sharding

# Cost of all work if none is divided, in sums over samples: a thousandth of the work is worth one collective.
_ALL_WORK = 1000.0
_TOTAL = 1e-3  # cost of a total over the batch without gradient, which is computed before the pipeline starts
_SLICE = 1e-6  # cost of taking a part of a whole value
_MOVED = 10.0  # cost of one move of samples, or of one slice of a weight, in sums over samples
_WHOLE = 0.1  # cost of an input with a batch dim that every rank reads whole


def batch_size(model: FoldedModel, global_batch: int | None) -> int:
    """Return the global batch size: ``global_batch`` if it is given, otherwise the size of dim 0 of the first model
    input that has a dim. ``model``: the model as calls of blocks; equal layers share one block.

    Raises :class:`InputsError` if no input has a dim, or if that size is 0."""
    if global_batch is not None:
        return global_batch
    sizes = [(i.spec.shape[0], i.path) for i in model.inputs if i.spec.shape]
    if not sizes:
        raise InputsError(NO_BATCH)
    batch, path = sizes[0]
    if batch == 0:
        raise InputsError(f"input {path!r} has no samples; expected one whole global batch, of at least one sample")
    return batch


def shard_batch(model: FoldedModel, batch: int, allowed: Allowed | None = None) -> ShardingSolution:
    """Return the sharding that splits the ``batch`` samples of ``model``. It says for each value which dim indexes
    samples, if any. The layouts are valid for any number of parts that divides ``batch``.

    ``allowed``: function of an operator and a strategy (layouts of its operands and results) that says whether the
    operator may be run in this way; ``None`` allows all. Raises
    :class:`partitioner.solve.sharding.choices.ShardingError` if no sharding exists, because the model does not compute
    samples separately."""
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
    """Return a model for a batch of ``count`` groups of samples, and the sharding that splits the batch into these
    groups. It is for models in which samples interact within a group, such as in a contrastive loss, so that only whole
    groups can run on different ranks.

    ``model`` is the graph of one group, as calls of blocks (such as layers); ``group`` says which dims of its inputs
    and outputs index samples. The returned model has the same graph and the inputs of all ``count`` groups. The
    sharding splits nothing inside a group; the gradient of every trained parameter is a partial sum over groups.
    """
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
    """Return the operators of ``model`` that do not depend on the samples of the batch, but only on weights, constants
    and random indices. These operators need not be divided over the ranks. An operator of a repeated block is returned
    only if it is independent of the samples in all calls of the block.

    ``batch``: number of samples; inputs with a dim of this size are assumed to contain samples. ``model``: the model as
    calls of blocks; equal layers share one block."""
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
    """Return the operators of ``model`` whose results are used only to update buffers of the model. ``model``: the
    model as calls of blocks; equal layers share one block.

    These operators may run on the whole batch, because dividing them would make ranks exchange samples. Sums can be
    divided in any case, since they are accumulated over microbatches (``passes/shard/buffer_sums.py``).
    """
    taken, found = set(model.updates.values()), set[fx.Node]()
    for name, block in model.blocks.items():
        calls = [c for c in model.calls if c.block == name]
        ends = [n for k, n in enumerate(block.outputs) if calls and all(c.outputs[k] in taken for c in calls)]
        found |= list_ancestors_of(block.graph, ends)
    return frozenset(found)


def _work(model: FoldedModel, alone: frozenset[fx.Node]) -> float:
    """Return the approximate work of all operators of ``model`` except those in ``alone``: FLOPs of matrix products
    plus elements of results, times the number of calls. ``model``: the model as calls of blocks; equal layers share one
    block.
    """
    return sum(
        model.num_calls(name) * node_work(node)
        for name, block in model.blocks.items()
        for node in block.graph.nodes
        if node.op == "call_function" and node not in alone
    )


@lru_cache(maxsize=1 << 16)
def node_work(node: fx.Node) -> float:
    """Return the approximate work of the operator ``node``: its matrix-multiply FLOPs plus the number of elements of
    its results; 0 for a view."""
    if is_view(node):
        return 0.0
    return float(matmul_flops(node) + sum(r.numel() for r in results_of(node)))


@dataclass(frozen=True)
class BatchCosts:
    """The costs by which a sharding of the batch over an imagined mesh axis ``data`` is chosen. They are relative
    numbers without a unit.

    ``total``: the work of all operators except ``alone``; the cost of an operator is its fraction of this work.
    ``samples``: the shapes and dtypes of inputs with a batch dim. ``alone``: operators that cost nothing, mainly those
    that depend on no sample. ``moved``: the cost of exchanging samples between ranks, or of giving each rank a part of
    a weight, relative to the cost of one sum over samples; if ``moved`` were small, channels would be divided instead
    of samples."""

    total: float
    samples: frozenset[TensorSpec] = frozenset()
    alone: frozenset[fx.Node] = frozenset()
    moved: float = 1.0

    def node(self, node: fx.Node, strategy: Strategy, num_ranks: int) -> float:
        """Return the cost of running the operator ``node`` by ``strategy`` (layouts of its operands and results), a
        number proportional to the operator's share of the model's work. If the strategy divides the work, the cost is
        divided by ``num_ranks``. For operators that need not be divided, it is 0."""
        if node in self.alone:  # every microbatch needs it whole; if it were divided, its gradient would mix samples
            return 0.0
        work = _ALL_WORK * node_work(node) / max(self.total, 1.0)
        return work / num_ranks if strategy.factor is not None else work

    def reshard(self, spec: TensorSpec, source: Layout, target: Layout, differentiable: bool) -> float:
        """Return the cost of changing a tensor from layout ``source`` to ``target``, a number comparable with the costs
        of operators; ``math.inf`` if the change is impossible. ``differentiable``: whether the layout of the tensor's
        gradient has to be changed back too. ``spec``: whole shape and dtype of the tensor."""
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
        """Return the cost of ``layout`` for a tensor that blocks (such as layers) pass on to each other, a relative
        number without a unit. ``spec``: the tensor's whole shape and dtype.

        A shard costs slightly more on a later dim, so that the first of two possible batch dims is chosen. An input
        with a batch dim costs more if it is not sharded.
        """
        if layout.is_shard:
            return _SLICE * layout.dim
        return _WHOLE if spec in self.samples else 0.0
