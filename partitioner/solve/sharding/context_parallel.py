"""Context parallelism: shard the sequence of each sample over the ranks of the mesh axis ``cp``.

The general sharding solver is used with these rules: samples and weights are not sharded, work that is not divided is
expensive, and attention has further strategies along a sequence. Inputs have their positions in order or zigzag (each
rank has one piece from the start and one from the end), whichever makes the step shorter. In-order positions give
causal attention unequal work per rank.

====================  =================================================  ==============================================
``context``           keys and values                                    requires
====================  =================================================  ==============================================
``ring``              are sent from rank to rank during computation      a mask that is a band of positions, or none
``all_gather``        are gathered, in forward and backward              positions that the number of ranks divides
``ulysses``           are exchanged so that each rank has all            key heads that ``tp`` x ``cp`` divides
                      positions of some heads
====================  =================================================  ==============================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from torch import fx

from partitioner.cost.call.operators import is_attention, is_product, is_view
from partitioner.errors import PlanError
from partitioner.passes.ir.layouts import REPLICATED, Layout, can_shard_evenly, local_shape, make_shard_layout
from partitioner.passes.ir.model import FoldedModel, TensorSpec
from partitioner.passes.rules.attention import find_attention_band, find_document_lengths
from partitioner.passes.rules.factors import Strategy, get_meta_shape, get_node_argument, operands_of
from partitioner.passes.shard.repeated_heads import group_queries
from partitioner.passes.shard.shard_block import shard_block
from partitioner.passes.shard.split_batch import is_sharded_over_samples, sample_dims
from partitioner.solve.sharding.choices import LayoutRules, ShardingError, matmul_flops
from partitioner.solve.sharding.costs import TensorCosts
from partitioner.solve.sharding.sharding import Allowed, ShardingSolution, solve_sharding

Algorithm = Literal["all_gather", "ring", "ulysses"]

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
_LEAST_DIVIDED = 0.5  # fraction of the matrix products' work; if less is divided, there is no sequence to share


@dataclass(frozen=True)
class ContextModel:
    """The model with its sequences sharded over the axis ``cp``. ``model``: the sharded model; its graphs and the
    tensors between them have the shapes of one rank, its parameters, buffers and inputs their global shapes.
    ``sharding``: the layouts over ``cp`` that were applied."""

    model: FoldedModel
    sharding: ShardingSolution


def shard_context(
    split: FoldedModel,
    batch: ShardingSolution,
    num_ranks: int,
    costs: TensorCosts,
    *,
    tp: int = 1,
    algorithm: Algorithm | None = None,
    allowed: Allowed | None = None,
    known: ShardingSolution | None = None,
) -> ContextModel:
    """Return the model of one rank of ``cp``: ``split`` with its sequence sharded over ``num_ranks`` ranks at the least
    cost.

    ``split``: the model of one microbatch, not yet sharded over ``cp``. ``batch``: the sharding that says which dim of
    each value indexes samples. ``costs``: prices of the shardings. ``tp``: number of tensor-parallel ranks, over which
    attention heads are divided in addition. ``algorithm``: the algorithm of every attention, such as ``"ring"``, or
    ``None`` to choose. ``allowed``: function that says whether an operator may use a strategy (layouts of operands and
    results); ``None`` allows all. ``known``: a sharding found before, which is then used instead of a search. Raises
    :class:`PlanError` if the algorithm is impossible, or if no sharding divides the sequence usefully."""
    solution = known or _solve_context_sharding(split, batch, num_ranks, costs, tp, algorithm, allowed)
    _check_divided(split, solution)
    blocks = {
        name: group_queries(shard_block(block, solution.blocks[name], "cp", num_ranks), tp)
        for name, block in split.blocks.items()
    }
    values = {
        name: TensorSpec(local_shape(solution.values.get(name, REPLICATED), spec.shape, num_ranks), spec.dtype)
        for name, spec in split.values.items()
    }
    return ContextModel(split.with_(blocks=blocks, values=values), solution)


def _solve_context_sharding(
    split: FoldedModel,
    batch: ShardingSolution,
    num_ranks: int,
    costs: TensorCosts,
    tp: int,
    algorithm: Algorithm | None,
    allowed: Allowed | None,
) -> ShardingSolution:
    """Return the sharding of ``split`` over ``num_ranks`` ranks of ``cp`` at the least cost. Raises :class:`PlanError`
    if there is none.

    ``split``: the model of one microbatch as calls of blocks; equal layers share one block. ``batch``: the sharding
    that says which dim of each value indexes samples. ``costs``: prices of the shardings. ``tp``: number of
    tensor-parallel ranks, over which attention heads are divided in addition. ``algorithm``: the algorithm of every
    attention, such as ``"ring"``, or ``None`` to choose. ``allowed``: function that says whether an operator may use a
    strategy (layouts of operands and results); ``None`` allows all."""
    check_algorithm(split, num_ranks, tp, algorithm)
    layouts = {i.value: _input_layouts(split.values[i.value], batch.values[i.value], num_ranks) for i in split.inputs}
    lengths = {split.values[name].shape[to.dim] for name, found in layouts.items() for to in found if to.is_shard}
    if not lengths:
        raise PlanError(
            f"cp={num_ranks}: no input has a dim besides the batch dim that is divisible by {num_ranks}; use cp=1, "
            "or a length that cp divides"
        )
    try:
        return solve_sharding(
            split,
            "cp",
            num_ranks,
            costs,
            LayoutRules(layouts, pins=dict.fromkeys(split.states, REPLICATED), lengths=frozenset(lengths)),
            allowed=_ContextRules(split, batch, num_ranks, tp, algorithm, allowed),
        )
    except ShardingError as error:
        raise PlanError(f"cp={num_ranks}: {error}") from error


def _input_layouts(spec: TensorSpec, batch: Layout, num_ranks: int) -> list[Layout]:
    """Return the layouts that an input may have: replicated, or sharded on any dim except the one that indexes samples.
    The positions on a rank are in order or zigzag (each rank has a piece from the start and one from the end).
    ``spec``: the shape and dtype of the input. ``batch``: the layout that splits the input's samples. ``num_ranks``:
    size of ``cp``."""
    dims = [d for d in range(len(spec.shape)) if not (batch.is_shard and batch.dim == d)]
    found = [make_shard_layout(d, (), zigzag) for d in dims for zigzag in (False, True)]
    return [REPLICATED, *(to for to in found if can_shard_evenly(to, spec.shape, num_ranks))]


def list_fused_attentions(model: FoldedModel) -> Iterator[fx.Node]:
    """Yield the graph nodes of the fused attention operators of all blocks of ``model``. ``model``: the model as calls
    of blocks; equal layers share one block.
    """
    for block in model.blocks.values():
        yield from (node for node in block.graph.nodes if node.op == "call_function" and is_attention(node))


def check_algorithm(model: FoldedModel, num_ranks: int, tp: int, algorithm: Algorithm | None) -> None:
    """Raise :class:`PlanError` if some attention of ``model`` cannot run by ``algorithm`` over ``num_ranks`` ranks. The
    message names the attention, the reason and an alternative.

    ``algorithm``: such as ``"ring"``; ``None``: nothing is checked. ``tp``: number of ranks that share the attention
    heads. ``model``: the model as calls of blocks; equal layers share one block."""
    if algorithm is None or num_ranks == 1:
        return
    found = list(list_fused_attentions(model))
    if not found:
        raise PlanError(f"context={algorithm!r}: no fused attention was found in the model's graph; leave context out")
    for node in found:
        problem = _explain_algorithm_obstacle(node, num_ranks, tp, algorithm)
        if problem:
            others = [
                a for a in ALGORITHMS if a != algorithm and not _explain_algorithm_obstacle(node, num_ranks, tp, a)
            ]
            advice = f"use context={' or '.join(map(repr, others))}" if others else f"use another cp than {num_ranks}"
            where = f"{node.meta.get('path') or 'the model'} ({node.meta.get('source') or 'source unknown'})"
            raise PlanError(f"context={algorithm!r} with cp={num_ranks}: the attention of {where} {problem}; {advice}")


def _explain_algorithm_obstacle(node: fx.Node, num_ranks: int, tp: int, algorithm: str) -> str:
    """Return the reason why the attention ``node`` cannot run by ``algorithm`` (``"ring"``, ``"all_gather"`` or
    ``"ulysses"``), as the predicate of a sentence; ``""`` if there is no obstacle. ``num_ranks``: size of ``cp``.
    ``tp``: number of ranks that share the attention heads."""
    query, key = (get_meta_shape(o) for o in operands_of(node)[:2])
    if get_node_argument(node, "dropout_p"):
        return "applies dropout to the attention weights inside the operator"
    if algorithm == "ulysses":
        heads = min(query[-3], key[-3]) if len(query) > 2 else 1
        if heads % (num_ranks * tp):
            over = f"cp={num_ranks}" + (f" x tp={tp}" if tp > 1 else "")
            return f"has {heads} key/value heads, which is not divisible by {over}"
        return ""
    if query[-2] % num_ranks or (find_attention_band(node) is not None and key[-2] % num_ranks):
        return f"has {query[-2]} queries and {key[-2]} keys, which are not divisible by {num_ranks} ranks"
    if algorithm == "ring" and find_attention_band(node) is None:
        return (
            "has a mask that is not a band around the diagonal (such as causal or sliding-window), so each query "
            "needs all keys at once"
        )
    return ""


class _ContextRules:
    """A function object that says whether an operator may be run by a strategy (layouts of operands and results) over
    ``cp``. It forbids strategies that shard samples or weights, and attention by another algorithm than the requested
    one.

    ``batch``: the layouts that split the batch; they show which dims have samples. ``num_ranks``: size of ``cp``.
    ``tp``: number of ranks that share the attention heads. ``algorithm``: the requested algorithm; ``None`` allows all.
    ``also``: a further function that must allow a strategy. ``model``: the model to shard."""

    def __init__(
        self,
        model: FoldedModel,
        batch: ShardingSolution,
        num_ranks: int,
        tp: int,
        algorithm: str | None,
        also: Allowed | None,
    ) -> None:
        self.num_ranks, self.tp, self.algorithm, self.also = num_ranks, tp, algorithm, also
        dims = {name: to.dim if to.is_shard else None for name, to in batch.values.items()}
        given = [i.value for i in model.inputs if dims.get(i.value) is not None]
        counts = {model.values[name].shape[dims[name] or 0] for name in given}
        self.samples = sample_dims(model, dims, min(counts)) if counts else {}
        self.states = {
            node: _states_of(node, set(block.states))
            for block in model.blocks.values()
            for node in block.graph.nodes
            if node.op == "call_function"
        }

    def __call__(self, node: fx.Node, strategy: Strategy) -> bool:
        if self.also is not None and not self.also(node, strategy):
            return False
        if self._splits_samples(node, strategy) or self._splits_weights(node, strategy):
            return False
        if not is_attention(node):
            return True
        if strategy.factor is None:
            return all(
                _explain_algorithm_obstacle(node, self.num_ranks, self.tp, algorithm) for algorithm in ALGORITHMS
            )
        how = algorithm_of(node, strategy)
        if how == "ulysses" and _explain_algorithm_obstacle(node, self.num_ranks, self.tp, "ulysses"):
            return False
        if strategy.form and strategy.operands[0].zigzag != self._is_zigzag(node, strategy):
            return False
        return bool(how) and self.algorithm in (None, how)

    def _splits_samples(self, node: fx.Node, strategy: Strategy) -> bool:
        read = zip((self.samples[o] for o in operands_of(node) if o in self.samples), strategy.operands, strict=False)
        made = zip(self.samples.get(node, ()), strategy.results, strict=False)
        return any(of and is_sharded_over_samples(of[0], to) for of, to in read) or any(
            is_sharded_over_samples(of, to) for of, to in made
        )

    def _splits_weights(self, node: fx.Node, strategy: Strategy) -> bool:
        """Return whether ``strategy`` (layouts of operands and results) shards a weight of the operator ``node``, a
        matrix product or an embedding. The result is false for weights of other operators, which have an element for
        each position, as learned position embeddings do. It is also false for the position slopes of an attention
        (ALiBi), which have an element for each head."""
        if not (is_product(node) or "embedding" in str(node.target)):
            return False
        slopes = get_node_argument(node, "slopes")
        read = zip(operands_of(node), strategy.operands, self.states[node], strict=True)
        return any(to.is_shard for operand, to, state in read if state and operand is not slopes)

    def _is_zigzag(self, node: fx.Node, strategy: Strategy) -> bool:
        """Return whether the attention ``node`` under ``strategy`` (layouts of operands and results) must have zigzag
        positions: the sequence is cut into twice as many pieces as ranks, and each rank has one piece counted from the
        start and one from the end.

        Causal attention must have zigzag positions if twice the number of ranks divides the sequence, since this
        balances the work. Other attention, and attention within documents of known lengths, may use the positions that
        ``strategy`` has."""
        seen = find_attention_band(node)
        if seen is None or not seen.is_causal or find_document_lengths(node):
            return strategy.operands[0].zigzag
        return all(get_meta_shape(o)[-2] % (2 * self.num_ranks) == 0 for o in operands_of(node)[:2])


def _states_of(node: fx.Node, states: set[str]) -> list[bool]:
    """Return for each operand of ``node`` whether it is a parameter or buffer, or a view of one. ``states``: names of
    the placeholders (inputs of the graph) that are parameters or buffers."""
    found = []
    for operand in operands_of(node):
        while operand.op == "call_function" and len(operand.all_input_nodes) == 1 and is_view(operand):
            operand = operand.all_input_nodes[0]
        found.append(operand.op == "placeholder" and operand.name in states)
    return found


def algorithm_of(node: fx.Node, strategy: Strategy) -> str:
    """Return the algorithm by which ``strategy`` (layouts of operands and results) runs the attention ``node``:
    ``"ring"``, ``"all_gather"`` or ``"ulysses"``; ``""`` if the strategy divides the work in another way."""
    if strategy.form:
        return strategy.form
    query, key, *_ = strategy.operands
    rank = len(get_meta_shape(operands_of(node)[0]))
    if query.is_shard and query.dim == rank - 2:
        return "all_gather" if find_attention_band(node) is None else ""  # a band has strategy.form
    if query.is_shard and query.dim == rank - 3 and key.is_shard:
        return "ulysses" if not (query.sections or query.zigzag) else ""
    return ""


def algorithms_of(model: FoldedModel, sharding: ShardingSolution) -> dict[str, int]:
    """Return name of an algorithm of context-parallel attention -> number of attention operators of ``model`` that use
    it, most frequent first. The key ``"whole"`` counts operators that use none of the algorithms. ``sharding``: the
    sharding over ``cp``. ``model``: the model as calls of blocks; equal layers share one block."""
    counts: dict[str, int] = {}
    for name, block in model.blocks.items():
        for node in block.graph.nodes:
            if node.op == "call_function" and is_attention(node):
                how = algorithm_of(node, sharding.blocks[name].strategies[node.name]) or "whole"
                counts[how] = counts.get(how, 0) + model.num_calls(name)
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _check_divided(model: FoldedModel, solution: ShardingSolution) -> None:
    """Raise :class:`PlanError` if the sharding ``solution`` divides less than half of the work of the model's matrix
    products. The message names the largest product that is not divided. ``model``: the model as calls of blocks; equal
    layers share one block.
    """
    if solution.matmul_sharded >= _LEAST_DIVIDED:
        return
    work: dict[fx.Node, float] = {}
    for name, block in model.blocks.items():
        for node in block.graph.nodes:
            strategy = solution.blocks[name].strategies.get(node.name)
            if strategy is not None and strategy.factor is None:
                work[node] = model.num_calls(name) * matmul_flops(node)
    node = max(work, key=work.__getitem__)
    where = f"{node.meta.get('path') or 'the model'} ({node.meta.get('source') or 'source unknown'})"
    raise PlanError(
        f"cp={solution.num_ranks} would shard only {solution.matmul_sharded:.0%} of the model's matrix products, "
        f"because {where} cannot be sharded along a dim of the inputs; use cp=1, or a length that cp divides"
    )


__all__ = ["ALGORITHMS", "Algorithm", "ContextModel", "algorithms_of", "check_algorithm", "shard_context"]
