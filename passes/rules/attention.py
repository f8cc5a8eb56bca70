"""Sharding rules of attention, of products of rows (tokens) with their expert's matrix, and of collectives.

With context parallelism (``cp``), queries, keys and values are all sharded along the sequence. Sharding rules state
this as a *form* (:class:`partitioner.passes.rules.factors.MultiFactorForm`). There is one form for each algorithm that
exchanges keys and values: all-gather and ring.

A collective over one mesh axis is sharded along another axis like an ordinary operator. If a collective over n ranks
splits or concatenates a dim, the longer of the operand's and the result's dim is treated as n pieces of the shorter
one.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.collectives import ops as collective
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.layouts import PARTIAL
from partitioner.passes.ops import caches  # noqa: F401 - registers an operator that has a rule here
from partitioner.passes.ops.attention import Band, get_band_limits, make_band
from partitioner.passes.ops.documents import document_ops
from partitioner.passes.ops.scored_attention import get_prefix_band, scored_ops
from partitioner.passes.rules.factors import (
    FIRST,
    NAMES,
    LocalBuilder,
    Lowering,
    MultiFactorForm,
    OpFactors,
    build_factor_rule,
    forbid_sharding,
    get_meta_shape,
    get_node_argument,
    mark_linear_each,
    operands_of,
    replace_operands,
    results_of,
)
from partitioner.passes.rules.pointwise import shard_elementwise
from partitioner.passes.rules.registry import register_family

aten = torch.ops.aten

CONTEXT_FORMS = ("all_gather", "ring")


@register_family(
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
)  # fmt: skip
def shard_attention(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a scaled dot-product attention.

    Batch dims and heads may be sharded. Query positions may be sharded if attention is not causal and the operator has
    a single result (the fused kernels also return a logsumexp). Keys must not be sharded by themselves; queries, keys
    and values may be sharded along the sequence together if the ranks exchange keys and values. The width of heads must
    not be sharded. Attention with dropout is not sharded. With grouped queries (``enable_gqa``), query heads are
    sharded together with their key heads.
    """
    if get_node_argument(node, "dropout_p"):
        return forbid_sharding(node)
    query, key, value, *mask = operands_of(node)
    rank = len(get_meta_shape(query))
    if any(len(get_meta_shape(o)) != rank for o in (key, value)):
        return forbid_sharding(node)
    batch: list[tuple[str, ...]] = [(n,) for n in NAMES[: rank - 2]]
    kv_batch = list(batch)
    fronts = [get_meta_shape(o)[: rank - 2] for o in (query, key, value)]
    sizes = {n: max(dims) for n, *dims in zip(NAMES, *fronts, strict=False)}  # dims of size 1 broadcast
    if get_node_argument(node, "enable_gqa") and rank > 2:
        heads, kv_heads, value_heads = (front[-1] for front in fronts)
        if kv_heads != value_heads:
            return forbid_sharding(node)
        if heads != kv_heads:
            sizes.update({batch[-1][0]: kv_heads, "rep": heads // kv_heads})
            batch[-1] = (*batch[-1], "rep")
    sizes.update(
        q=get_meta_shape(query)[-2], k=get_meta_shape(key)[-2], d=get_meta_shape(query)[-1], v=get_meta_shape(value)[-1]
    )
    whole = {"k", "d", "v"} | ({"q"} if get_node_argument(node, "is_causal") else set())
    patterns = [[*batch, ("q",), ("d",)], [*kv_batch, ("k",), ("d",)], [*kv_batch, ("k",), ("v",)]]
    patterns += [[*batch, ("q",), ("k",)][rank - len(get_meta_shape(m)) :] for m in mask]
    operands = tuple(
        tuple(f if size > 1 else () for f, size in zip(pattern, get_meta_shape(o), strict=True))
        for pattern, o in zip(patterns, operands_of(node), strict=True)
    )
    result, *others = results_of(node)
    made = tuple(f if size > 1 else () for f, size in zip([*batch, ("q",), ("v",)], result.shape, strict=True))
    if others:
        whole.add("q")  # kernels pad the positions of the logsumexp
    sums = tuple((*made[:2], *((),) * (r.dim() - 2)) if r.dim() > 2 else ((),) * r.dim() for r in others)
    found = OpFactors(sizes, operands, (made, *sums), frozenset(whole))
    return found if find_attention_band(node) is None else replace(found, forms=_list_context_forms(node))


@register_family("partition::write_cache")
def write_to_cache(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``partition::write_cache``, which writes new keys or values into
    a cache for generation. Samples and heads may be sharded, in the cache and the written tensor together. Positions
    and the width of heads must not be sharded."""
    dims = ["b", "h", None, None]
    return build_factor_rule(node, [dims, dims, []], [dims])


@register_family("partition::band_attention")
def shard_band_attention(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``partition::band_attention``: attention in which a query sees
    only the keys within a range of positions around its own.

    Batch and heads may be sharded. The sequence may be sharded in queries, keys and values together; the ranks then
    exchange keys and values.
    """
    query, key, *_ = operands_of(node)
    heads, groups = get_meta_shape(query)[-3], get_meta_shape(key)[-3]
    sizes = {"b": get_meta_shape(query)[0], "h": groups, "rep": heads // groups}
    head = ("h",) if heads == groups else ("h", "rep")
    sizes = {f: size for f, size in sizes.items() if size > 1}

    def dims(*factors: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f for f in held if f in sizes) for held in factors)

    keys = dims(("b",), ("h",), (), ())
    queries = dims(("b",), head, (), ())
    return OpFactors(sizes, (queries, keys, keys), (queries, queries[:3]), forms=_list_context_forms(node))


@register_family("partition::document_attention")
def shard_document_attention(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``partition::document_attention``: attention in which a query
    sees only keys of its own document.

    Batch and heads may be sharded. The sequence may be sharded in queries, keys and values together; the ranks then
    exchange keys and values. The document ids ``[batch, positions]`` are sharded like the queries.
    """
    found = shard_band_attention(node)
    ids = tuple(f for f in ("b",) if f in found.sizes), ()
    return replace(found, operands=(*found.operands, ids))


@register_family("partition::combine_ids")
def shard_combined_ids(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``partition::combine_ids``, which gives each distinct pair of two
    ids of a position a number: the dim of the batch may be sharded, that of positions must not be."""
    names = NAMES[:2]
    return build_factor_rule(node, [names, names], [names], whole=frozenset(names[1:]))


@register_family("partition::scored_attention")
def shard_scored_attention(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``partition::scored_attention``: attention with capped scores,
    with a bias that has a slope for each head (ALiBi), or with prefixes: keys that all queries of a document see.

    Batch and heads may be sharded. The sequence may be sharded in queries, keys and values together; the ranks then
    exchange keys and values. Document ids and prefix flags ``[batch, positions]`` are sharded like the queries, slopes
    ``[heads]`` like the heads of the queries.
    """
    found = shard_band_attention(node)
    row = tuple(f for f in ("b",) if f in found.sizes), ()
    further = {"ids": row, "prefix": row, "slopes": (found.operands[0][1],)}
    return replace(found, operands=(*found.operands, *(further[name] for name in _list_optional_operands(node))))


def _list_optional_operands(node: fx.Node) -> list[str]:
    """Return the names of the optional tensors that a call ``node`` of an attention has, in the order of its arguments:
    ``ids`` (document ids), ``prefix`` (flags of keys that all queries of their document see) and ``slopes`` (a slope
    for each head)."""
    return [name for name in ("ids", "prefix", "slopes") if isinstance(get_node_argument(node, name), fx.Node)]


@register_family("partition::context_attention")
def shard_context_attention(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``partition::context_attention``: attention whose sequence is
    already sharded over one mesh axis. Over another mesh axis, its batch and heads may be sharded, but not its
    sequence."""
    return replace(shard_band_attention(node), forms={})


@register_family("partition::context_document_attention")
def shard_context_document_attention(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``partition::context_document_attention``: attention within
    documents whose sequence is already sharded over one mesh axis. Over another mesh axis, its batch and heads may be
    sharded, but not its sequence."""
    return replace(shard_document_attention(node), forms={})


@register_family("partition::context_scored_attention")
def shard_context_scored_attention(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``partition::context_scored_attention``: attention with capped
    scores, with a bias that has a slope for each head (ALiBi), or with prefixes (keys that all queries of a document
    see). Its sequence is already sharded over one mesh axis. Over another mesh axis, its batch and heads may be
    sharded, but not its sequence."""
    return replace(shard_scored_attention(node), forms={})


_BANDS = (
    ops.band_attention.default,
    ops.context_attention.default,
    document_ops.document_attention.default,
    ops.context_document_attention.default,
    scored_ops.scored_attention.default,
    ops.context_scored_attention.default,
)


def find_document_lengths(node: fx.Node) -> tuple[int, ...]:
    """Return a tuple of typical document lengths, in positions, of the attention ``node``; an empty tuple if they are
    unknown or if the attention is not within documents."""
    return tuple(get_node_argument(node, "lengths", ()))


def find_attention_band(node: fx.Node) -> Band | None:
    """Return the range of key positions, relative to a query's own, that the query sees in the attention ``node``.

    Return ``None`` if ``node`` is not an attention, has a mask or dropout, is not four-dimensional, or broadcasts its
    keys.
    """
    if node.target in _BANDS:
        return make_band(get_node_argument(node, "before"), get_node_argument(node, "after"))
    if not str(node.target).startswith("aten.scaled_dot_product_attention") or get_node_argument(node, "dropout_p"):
        return None
    if len(operands_of(node)) != 3 or any(len(get_meta_shape(o)) != 4 for o in operands_of(node)):
        return None
    if (
        not get_node_argument(node, "enable_gqa")
        and get_meta_shape(operands_of(node)[0])[:2] != get_meta_shape(operands_of(node)[1])[:2]
    ):
        return None  # keys that are broadcast
    return Band(None, 0) if get_node_argument(node, "is_causal") else Band()


def find_exchanged_band(node: fx.Node) -> Band | None:
    """Return the range of key positions, relative to a query's own, within which ranks have to exchange keys for the
    attention ``node``: the visible range, or, if the attention has a prefix (keys that all queries of a document see),
    the visible range of the prefix.

    Return ``None`` if ``node`` is not an attention, has a mask or dropout, is not four-dimensional, or broadcasts its
    keys.
    """
    if node.target in _BANDS and get_node_argument(node, "prefix", None) is not None:
        return get_prefix_band(get_node_argument(node, "reach", ()))
    return find_attention_band(node)


def _list_context_forms(node: fx.Node) -> dict[str, MultiFactorForm]:
    """Return a dict of the ways to run the attention ``node`` with a sharded sequence: name of the algorithm by which
    the ranks exchange keys and values (``all_gather`` or ``ring``) -> form. Queries, keys and values are sharded along
    dim 2, and document ids and prefix flags, if there are any, along dim 1."""
    marks = [None if name == "slopes" else 1 for name in _list_optional_operands(node)]
    return {
        name: MultiFactorForm("q", (2, 2, 2, *marks), (2, 2), partial(_lower_context_attention, name))
        for name in CONTEXT_FORMS
    }


def _lower_context_attention(algorithm: str, local: LocalBuilder) -> fx.Node:
    """Append to the graph of one rank an attention whose sequence is sharded over the ranks. Return its node; if the
    replaced operator has only one result, the node of the first result.

    ``algorithm``: how keys and values are exchanged: ``all_gather`` or ``ring``. ``local``: the attention to replace,
    its layouts, and the graph of one rank.
    """
    seen, node = find_attention_band(local.node), local.node
    assert seen is not None, node
    limits = *get_band_limits(seen), get_node_argument(node, "scale")
    reach: tuple[Any, ...] = ()
    if node.target is scored_ops.scored_attention.default:
        target = ops.context_scored_attention.default
        args, _ = replace_operands(node, local.operands)
        names = [argument.name for argument in node.target._schema.arguments]
        args, reach = args[: names.index("reach")], args[names.index("reach") :]
    elif node.target is document_ops.document_attention.default:
        target = ops.context_document_attention.default
        args = (*local.operands, list(find_document_lengths(node)), *limits)
    else:
        target, args = ops.context_attention.default, (*local.operands, *limits)
    made = local.call(
        target,
        *args,
        local.axis,
        local.num_ranks,
        local.strategy.operands[0].zigzag,
        algorithm,
        *reach,
    )
    return local.call(operator.getitem, made, 0) if len(results_of(node)) == 1 else made


@register_family("partition::expert_mm")
def shard_expert_product(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``partition::expert_mm``, which multiplies each row (token) of
    ``[t, k]`` by its expert's matrix in ``[e, k, n]``.

    Every dim may be sharded. If the dim ``e`` of experts is sharded, a rank returns zeros for rows of other ranks'
    experts, so the result is a partial sum.
    """
    lower = {"e": Lowering(_lower_expert_product, PARTIAL, divides_work=True)}
    return build_factor_rule(node, ["tk", "ekn", "t"], ["tn"], linear=mark_linear_each(0, 1), lower=lower)


def _lower_expert_product(local: LocalBuilder) -> fx.Node:
    _, weight, expert = local.operands
    rank = local.call(collective.axis_index.default, local.axis, local.num_ranks)
    first = local.call(aten.mul.Tensor, rank, get_meta_shape(weight)[0])
    return local.copy(expert=local.call(aten.sub.Tensor, expert, first))


@register_family("_grouped_mm", "transformers::grouped_mm_fallback")
def shard_grouped_product(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a grouped matrix product of rows (tokens) ``[t, k]``, sorted by expert,
    with one matrix for each expert, ``[e, k, n]``. Return ``None`` (no sharding) if the operands have other numbers of
    dims.

    ``t`` must not be sharded, because the rows of each expert depend on data. If the dim ``e`` of experts is sharded, a
    rank computes the rows of its own experts and returns zeros for the rest, so the result is a partial sum. If the
    rows are ``[e, t, k]`` (a batch for each expert), every dim may be sharded.
    """
    operands = operands_of(node)
    ranks = tuple(len(get_meta_shape(o)) for o in operands)
    if ranks == (3, 3):
        return build_factor_rule(node, ["etk", "ekn"], ["etn"], linear=mark_linear_each(0, 1))
    if ranks != (2, 3, 1):
        return None
    lower = {"e": Lowering(_lower_grouped_product, PARTIAL, divides_work=True)}
    # Every rank needs the ends of all experts, so they have no factor.
    patterns = [("t", "k"), ("e", "k", "n"), (None,)]
    return build_factor_rule(
        node, patterns, [("t", "n")], whole=frozenset("t"), linear=mark_linear_each(0, 1), lower=lower
    )


def _lower_grouped_product(local: LocalBuilder) -> fx.Node:
    """Append to the graph of one rank the product of rows (tokens) with the matrices of this rank's experts, and return
    the node of the result. ``local``: the grouped product to replace, its layouts, and the graph of one rank.

    The rows of this rank's experts are consecutive. They are moved to the front before the product and back after it;
    all other rows of the result are zero.
    """
    x, weight, ends = local.operands
    num_rows, num_experts, num_own = get_meta_shape(x)[0], get_meta_shape(ends)[0], get_meta_shape(weight)[0]
    rank = local.call(collective.axis_index.default, local.axis, local.num_ranks)
    first = local.call(aten.mul.Tensor, rank, num_own)
    own = local.call(aten.add.Tensor, local.call(aten.arange.default, num_own, device=META), first)
    before = local.call(aten.slice.Tensor, ends, 0, 0, num_experts - 1)
    zero = local.call(aten.zeros.default, [1], dtype=ends.meta["val"].dtype, device=META)
    starts = local.call(aten.cat.default, [zero, before])
    start = local.call(aten.index_select.default, starts, 0, local.call(aten.reshape.default, first, [1]))
    own_ends = local.call(aten.sub.Tensor, local.call(aten.index_select.default, ends, 0, own), start)
    last = local.call(aten.slice.Tensor, own_ends, 0, num_own - 1, num_own)

    place = local.call(aten.arange.default, num_rows, device=META)
    others = local.call(aten.unsqueeze.default, local.call(aten.ge.Tensor, place, last), 1)
    to_front = local.call(aten.remainder.Scalar, local.call(aten.add.Tensor, place, start), num_rows)
    to_back = local.call(aten.remainder.Scalar, local.call(aten.sub.Tensor, place, start), num_rows)

    # Rows outside all groups are not computed, forward or backward, so their values must not be read.
    rows = local.call(aten.masked_fill.Scalar, local.call(aten.index_select.default, x, 0, to_front), others, 0.0)
    assert callable(local.node.target)
    made = local.call(
        local.node.target, rows, weight, own_ends, *local.node.args[3:], **_select_plain_kwargs(local.node)
    )
    made = local.call(aten.masked_fill.Scalar, made, others, 0.0)
    return local.call(aten.index_select.default, made, 0, to_back)


def _select_plain_kwargs(node: fx.Node) -> dict[str, object]:
    return {name: v for name, v in node.kwargs.items() if not isinstance(v, fx.Node)}


@register_family("histc")
def shard_histogram(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``histc``, which counts elements in bins.

    If the value range is given, every dim of the elements may be sharded, and the counts are then partial sums. If
    the range comes from the data, no dim may be sharded.
    """
    (x,) = operands_of(node)
    names = NAMES[: len(get_meta_shape(x))]
    data_range = get_node_argument(node, "min") == get_node_argument(node, "max")
    return forbid_sharding(node) if data_range else build_factor_rule(node, [names], [[None]])


_JOINING_COLLECTIVES = (collective.all_gather.default, collective.shard_pad.default)


@register_family("partition::copy", "partition::all_reduce")
def shard_all_reduce(node: fx.Node) -> OpFactors:
    return shard_elementwise(node, FIRST)


register_family("partition::all_reduce_max", "partition::axis_index")(shard_elementwise)


@register_family(
    "partition::all_gather", "partition::shard_pad", "partition::shard_slice", "partition::shard_narrow",
    "partition::reduce_scatter",
)  # fmt: skip
def cut_or_joined(node: fx.Node) -> OpFactors:
    return _shard_cut_or_join(
        node,
        *(None, get_node_argument(node, "dim"))
        if node.target in _JOINING_COLLECTIVES
        else (get_node_argument(node, "dim"), None),
    )


@register_family("partition::all_to_all")
def shard_all_to_all(node: fx.Node) -> OpFactors:
    return _shard_cut_or_join(node, get_node_argument(node, "split_dim"), get_node_argument(node, "concat_dim"))


def _shard_cut_or_join(node: fx.Node, cut: int | None, joined: int | None) -> OpFactors:
    """Return the sharding rule of ``node``, a collective over one mesh axis, for sharding over another mesh axis. Every
    dim may be sharded.

    ``cut``: the dim of the operand that the collective splits over its ranks. ``joined``: the dim of the result along
    which it concatenates the ranks' tensors. ``None`` means that there is no such dim. Before the split or after the
    concatenation, the dim is treated as (number of ranks) x (size of one rank's piece), and only the second factor may
    be sharded.
    """
    before, after = get_meta_shape(operands_of(node)[0]), tuple(node.meta["val"].shape)
    names = NAMES[: len(before)]
    sizes = {
        "n": get_node_argument(node, "size"),
        **{n: min(a, b) for n, a, b in zip(names, before, after, strict=True)},
    }
    operand = tuple(("n", n) if d == cut else (n,) for d, n in enumerate(names))
    result = tuple(("n", n) if d == joined else (n,) for d, n in enumerate(names))
    return OpFactors(sizes, (operand,), (result,), frozenset("n"), FIRST)
