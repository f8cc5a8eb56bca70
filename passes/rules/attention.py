"""Attention.

Along a sequence that is sharded (``cp``), queries as well as keys are a rank's own: that is a *form* of attention
within a band of positions (:class:`passes.rules.algebra.Form`), one for each way to bring keys and values together.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial

from torch import fx

from passes.band import band_of, limits_of
from passes.collectives import ops
from passes.rules.algebra import (
    NAMES,
    Form,
    Local,
    OpFactors,
    argument,
    everything_whole,
    operands_of,
    results_of,
    shape,
)
from passes.rules.registry import family
from passes.tiles import Band

CONTEXT_FORMS = ("all_gather", "ring")


@family(
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
)  # fmt: skip
def attention(node: fx.Node) -> OpFactors:
    """Batch dims and heads may be sharded, and query positions where no position is masked by its number.

    With grouped queries (``enable_gqa``) a query head is (kv rep): kv groups of rep heads that share one key head.
    The fused kernels also return the logarithms of the softmax's sums, and their random state.
    """
    if argument(node, "dropout_p"):
        return everything_whole(node)
    query, key, value, *mask = operands_of(node)
    rank = len(shape(query))
    if any(len(shape(o)) != rank for o in (key, value)):
        return everything_whole(node)
    batch: list[tuple[str, ...]] = [(n,) for n in NAMES[: rank - 2]]
    kv_batch = list(batch)
    fronts = [shape(o)[: rank - 2] for o in (query, key, value)]
    sizes = {n: max(dims) for n, *dims in zip(NAMES, *fronts, strict=False)}  # dims of size 1 broadcast
    if argument(node, "enable_gqa") and rank > 2:
        heads, kv_heads, value_heads = (front[-1] for front in fronts)
        if kv_heads != value_heads:
            return everything_whole(node)
        if heads != kv_heads:
            sizes.update({batch[-1][0]: kv_heads, "rep": heads // kv_heads})
            batch[-1] = (*batch[-1], "rep")
    sizes.update(q=shape(query)[-2], k=shape(key)[-2], d=shape(query)[-1], v=shape(value)[-1])
    whole = {"k", "d", "v"} | ({"q"} if argument(node, "is_causal") else set())
    patterns = [[*batch, ("q",), ("d",)], [*kv_batch, ("k",), ("d",)], [*kv_batch, ("k",), ("v",)]]
    patterns += [[*batch, ("q",), ("k",)][rank - len(shape(m)) :] for m in mask]
    operands = tuple(
        tuple(f if size > 1 else () for f, size in zip(pattern, shape(o), strict=True))
        for pattern, o in zip(patterns, operands_of(node), strict=True)
    )
    result, *others = results_of(node)
    made = tuple(f if size > 1 else () for f, size in zip([*batch, ("q",), ("v",)], result.shape, strict=True))
    if others:
        whole.add("q")  # kernels pad the positions of their sums
    sums = tuple((*made[:2], *((),) * (r.dim() - 2)) if r.dim() > 2 else ((),) * r.dim() for r in others)
    found = OpFactors(sizes, operands, (made, *sums), frozenset(whole))
    return found if band(node) is None else replace(found, forms=_context_forms(node))


@family("partition::band_attention")
def within_band(node: fx.Node) -> OpFactors:
    """Batch dims and heads; positions are told apart by their numbers."""
    query, key, _ = operands_of(node)
    heads, groups = shape(query)[-3], shape(key)[-3]
    sizes = {"b": shape(query)[0], "h": groups, "rep": heads // groups}
    head = ("h",) if heads == groups else ("h", "rep")
    sizes = {f: size for f, size in sizes.items() if size > 1}

    def dims(*factors: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f for f in held if f in sizes) for held in factors)

    keys = dims(("b",), ("h",), (), ())
    queries = dims(("b",), head, (), ())
    return OpFactors(sizes, (queries, keys, keys), (queries, queries[:3]), forms=_context_forms(node))


@family("partition::context_attention")
def over_ranks(node: fx.Node) -> OpFactors:
    """What one mesh axis shards by sequence, others shard by sample and head."""
    return replace(within_band(node), forms={})


def band(node: fx.Node) -> Band | None:
    """The band of positions within which an attention sees keys; ``None`` where that is not all that decides."""
    if node.target in (ops.band_attention.default, ops.context_attention.default):
        return band_of(argument(node, "before"), argument(node, "after"))
    if not str(node.target).startswith("aten.scaled_dot_product_attention") or argument(node, "dropout_p"):
        return None
    if len(operands_of(node)) != 3 or any(len(shape(o)) != 4 for o in operands_of(node)):
        return None
    if not argument(node, "enable_gqa") and shape(operands_of(node)[0])[:2] != shape(operands_of(node)[1])[:2]:
        return None  # keys that are broadcast
    return Band(None, 0) if argument(node, "is_causal") else Band()


def _context_forms(node: fx.Node) -> dict[str, Form]:
    """Queries, keys and values sharded on their positions."""
    return {name: Form("q", (2, 2, 2), (2, 2), partial(_over_ranks, name)) for name in CONTEXT_FORMS}


def _over_ranks(algorithm: str, local: Local) -> fx.Node:
    seen = band(local.node)
    assert seen is not None, local.node
    made = local.call(
        ops.context_attention.default,
        *local.operands,
        *limits_of(seen),
        argument(local.node, "scale"),
        local.axis,
        local.num_ranks,
        local.strategy.operands[0].zigzag,
        algorithm,
    )
    return local.call(operator.getitem, made, 0) if len(results_of(local.node)) == 1 else made
