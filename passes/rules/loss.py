"""Sharding rules of loss operators that the normal form does not decompose.

Each function returns the :class:`OpFactors` of one operator call: which dims of its tensors may be sharded, and whether
the result of sharding is a partial sum.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
from torch import fx

from partitioner.passes.ir.collectives import ops as collective
from partitioner.passes.ir.gradient_flow import accumulated_in
from partitioner.passes.ir.layouts import PARTIAL, REPLICATED
from partitioner.passes.rules.factors import (
    NAMES,
    LocalBuilder,
    Lowering,
    OpFactors,
    build_factor_rule,
    forbid_sharding,
    get_meta_shape,
    get_meta_tensor,
    get_node_argument,
    normalize_dim,
    operands_of,
    results_of,
)
from partitioner.passes.rules.indexing import localize_row_indices
from partitioner.passes.rules.pointwise import shard_elementwise
from partitioner.passes.rules.reduction import lower_division_by_ranks
from partitioner.passes.rules.registry import register_family

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # the values of ``reduction``


@register_family(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "soft_margin_loss", "poisson_nll_loss", "hinge_embedding_loss",
)  # fmt: skip
def shard_elementwise_loss(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a loss with one term per element, such as ``mse_loss``.

    Every dim may be sharded. If the terms are summed or averaged, the result over sharded dims is a partial sum.
    """
    if get_node_argument(node, "reduction") == _NONE:
        return shard_elementwise(node)
    rank = max(len(get_meta_shape(o)) for o in operands_of(node))
    names = NAMES[:rank]
    found = build_factor_rule(node, [names[rank - len(get_meta_shape(o)) :] for o in operands_of(node)], [()])
    if get_node_argument(node, "reduction") == _SUM:
        return found
    lowering = Lowering(lower_division_by_ranks, PARTIAL, sections=True)
    return replace(found, lower=dict.fromkeys(found.sizes, lowering))


@register_family("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def shard_classification_loss(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``cross_entropy_loss`` or ``nll_loss``.

    The dim of classes must not be sharded. Dims of samples may be sharded unless the loss is a mean: a mean divides by
    the number of samples that are not ignored, which one rank does not know.
    """
    scores, target, *weight = operands_of(node)
    names = NAMES[: len(get_meta_shape(scores))]
    class_dim = min(1, len(names) - 1)
    samples = [n for d, n in enumerate(names) if d != class_dim]
    targets = names if len(get_meta_shape(target)) == len(names) else samples
    reduction = get_node_argument(node, "reduction")
    results: list[list[str]] = [samples if reduction == _NONE else []]
    whole = frozenset(names) if reduction == _MEAN else frozenset((names[class_dim],))
    patterns = [names, targets, *([names[class_dim]] for _ in weight)]
    return build_factor_rule(node, patterns, results, whole=whole)


@register_family("nll_loss_forward", "nll_loss2d_forward")
def shard_nll_loss_forward(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``nll_loss_forward``, which returns the loss and the sum of the
    samples' weights.

    The dim of classes must not be sharded. Dims of samples may be sharded only if ``reduction`` is a sum.
    """
    scores, _target, *weight = operands_of(node)
    names = NAMES[: len(get_meta_shape(scores))]
    class_dim = min(1, len(names) - 1)
    samples = [n for d, n in enumerate(names) if d != class_dim]
    reduction = get_node_argument(node, "reduction")
    whole = frozenset((names[class_dim],)) if reduction == _SUM else frozenset(names)
    losses = samples if reduction == _NONE else []
    return build_factor_rule(node, [names, samples, *([names[class_dim]] for _ in weight)], [losses, []], whole=whole)


@register_family("multi_margin_loss", "multilabel_margin_loss_forward")
def shard_margin_loss(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``multi_margin_loss`` or ``multilabel_margin_loss``, which have
    one term per sample, computed from all classes.

    The dim of classes must not be sharded. The dim of samples may be sharded only if the terms are neither summed nor
    averaged.
    """
    scores, target, *weight = operands_of(node)
    names = NAMES[: len(get_meta_shape(scores))]
    if len(names) < 2:
        return forbid_sharding(node)
    samples = [names[0]] if get_node_argument(node, "reduction") == _NONE else []
    results = [samples, *(names for _ in results_of(node)[1:])]
    patterns = [names, names[: len(get_meta_shape(target))], *([names[-1]] for _ in weight)]
    return build_factor_rule(node, patterns, results, whole=frozenset(names) - frozenset(samples))


@register_family("cosine_similarity")
def shard_cosine_similarity(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``cosine_similarity``: the dim along which vectors are compared
    must not be sharded, other dims may be.
    """
    rank = max(len(get_meta_shape(o)) for o in operands_of(node))
    dim = normalize_dim(get_node_argument(node, "dim"), rank)
    names = NAMES[:rank]
    patterns = [names[rank - len(get_meta_shape(o)) :] for o in operands_of(node)]
    left = [n for d, n in enumerate(names) if d != dim]
    return build_factor_rule(node, patterns, [left], whole=frozenset(names) - frozenset(left))


@register_family("partition::cross_entropy")
def shard_cross_entropy(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``partition::cross_entropy``, which has one loss term for each
    row of logits.

    Dims of rows may be sharded. If the dim of classes is sharded, each rank computes the target's logit and the
    logsumexp over its own classes, and an all-gather over the ranks combines them.
    """
    logits, _ = operands_of(node)
    names = NAMES[: len(get_meta_shape(logits))]
    dim = normalize_dim(get_node_argument(node, "dim"), len(names))
    rows = [name if d != dim else None for d, name in enumerate(names)]
    result = results_of(node)[0]
    sent = 2 * math.prod(result.shape) * accumulated_in(result.dtype).itemsize // result.dtype.itemsize
    lowering = Lowering(_lower_sharded_cross_entropy, REPLICATED, (("all_gather", sent),))
    return build_factor_rule(node, [names, rows], [rows], lower={names[dim]: lowering})


def _lower_sharded_cross_entropy(local: LocalBuilder) -> fx.Node:
    """Append to the graph of one rank the cross entropy of logits whose dim of classes is sharded. Return the node of
    the loss terms, which are whole on every rank. ``local``: the operator to replace, its layouts, and the graph of one
    rank."""
    logits, index = local.operands
    dim = normalize_dim(get_node_argument(local.node, "dim"), len(get_meta_shape(logits)))
    own, elsewhere = localize_row_indices(local, index, get_meta_shape(logits)[dim])
    both = local.call(collective.target_and_logsumexp.default, logits, own, dim)
    target, logsumexp = (local.call(operator.getitem, both, place) for place in range(2))
    target = local.call(aten.masked_fill.Scalar, target, elsewhere, 0.0)
    pair = local.call(aten.stack.default, [target, logsumexp])
    # Every rank computes the same loss from the gathered numbers, so it has their whole gradient and takes its slice.
    alike = local.call(aten.unsqueeze.default, pair, 0)
    alike = local.call(collective.all_gather.default, alike, 0, local.axis, local.num_ranks, "slice")
    targets, sums = (local.call(aten.select.int, alike, 1, place) for place in range(2))
    total = local.call(aten.logsumexp.default, sums, [0])
    terms = local.call(aten.sub.Tensor, total, local.call(aten.sum.dim_IntList, targets, [0]))
    dtype = get_meta_tensor(local.node).dtype
    return terms if get_meta_tensor(terms).dtype == dtype else local.call(aten._to_copy.default, terms, dtype=dtype)
