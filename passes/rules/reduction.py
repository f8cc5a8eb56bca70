"""Sharding rules of reductions, of normalisations, and of operators that couple the elements of a dim, such as a sort.

Each function returns the :class:`OpFactors` of one operator call, which says which dims may be sharded. A sum over a
sharded dim is a partial sum. Dims over which a normalisation computes its statistics must not be sharded; other dims
may be.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from partitioner.passes.ir.collectives import ops as collective
from partitioner.passes.ir.layouts import PARTIAL, REPLICATED
from partitioner.passes.rules.factors import (
    FIRST,
    NAMES,
    Dims,
    LocalBuilder,
    Lowering,
    OpFactors,
    build_factor_rule,
    forbid_sharding,
    get_meta_shape,
    get_node_argument,
    mark_linear_each,
    normalize_dim,
    normalize_dims,
    operands_of,
    results_of,
)
from partitioner.passes.rules.registry import register_family

aten = torch.ops.aten

Linear = tuple[frozenset[int], ...]


def shard_reduction(node: fx.Node, linear: Linear = ()) -> OpFactors:
    """Return the sharding rule of ``node``, a sum over the dims in the operator's argument ``dim`` (all dims if it is
    absent).

    Every dim may be sharded. If a summed dim is sharded, the result is a partial sum. ``linear``: sets of operand
    positions (from 0); if exactly the operands of one set are partial sums, so are the results.
    """
    dims = list_dims(node)
    names = NAMES[: len(get_meta_shape(operands_of(node)[0]))]
    left = [None if d in dims else n for d, n in enumerate(names)]
    kept = left if get_node_argument(node, "keepdim", False) else [n for n in left if n is not None]
    return build_factor_rule(node, [names], [kept for _ in results_of(node)], linear=linear)


def list_dims(node: fx.Node) -> tuple[int, ...]:
    """Return the argument ``dim`` of the operator call ``node`` as a tuple of indices from 0. If the argument is
    absent, return all dims of the operand."""
    given, sizes = get_node_argument(node, "dim"), get_meta_shape(operands_of(node)[0])
    if isinstance(given, list | tuple) and not given and tuple(results_of(node)[0].shape) == sizes:
        return ()  # an empty list means no dim for some operators and all dims for others
    return normalize_dims(given, len(sizes))


def _count_result_elements(node: fx.Node) -> int:
    """Return the number of elements of the first result of the operator ``node``."""
    return math.prod(results_of(node)[0].shape)


def list_factors_along(node: fx.Node) -> frozenset[str]:
    """Return the factor names of the dims in the argument ``dim`` of the operator call ``node`` (of all dims of the
    operand if the argument is absent), for a sharding rule."""
    return frozenset(NAMES[d] for d in list_dims(node))


@register_family("sum")
def shard_sum(node: fx.Node) -> OpFactors:
    return shard_reduction(node, FIRST)


register_family("nansum", "count_nonzero")(shard_reduction)


@register_family(
    "all", "any", "argmax", "argmin", "max", "median", "min", "mode", "nanmedian", "norm", "prod", "std", "std_mean",
    "var", "var_mean", "linalg_vector_norm", "aminmax", "kthvalue",
)  # fmt: skip
def shard_unreduced_dims(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a reduction other than a sum, such as ``max``: the reduced dims must not
    be sharded, other dims may be."""
    return replace(shard_reduction(node), whole=list_factors_along(node))


@register_family(
    "_log_softmax", "_safe_softmax", "_softmax", "argsort", "cummax", "cummin", "cumprod", "logcumsumexp",
    "sort",
)  # fmt: skip
def shard_other_dims(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an operator whose results depend on all elements along the dim in its
    argument ``dim``, such as ``sort``: this dim must not be sharded, other dims may be."""
    names = NAMES[: len(get_meta_shape(operands_of(node)[0]))]
    return build_factor_rule(node, [names], [names for _ in results_of(node)], whole=list_factors_along(node))


@register_family("_softmax_backward_data", "_log_softmax_backward_data")
def shard_softmax_gradient(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, the backward operator of a softmax or log-softmax: the dim of the
    softmax must not be sharded, other dims may be."""
    names = NAMES[: len(node.meta["val"].shape)]
    return build_factor_rule(node, [names, names], [names], whole=list_factors_along(node))


@register_family("softmax", "log_softmax")
def shard_softmax(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a softmax or log-softmax: every dim may be sharded.

    If the dim of the softmax is sharded, the ranks all-reduce the maximum and the sum of exponentials.
    """
    build = _lower_sharded_softmax if node.target == aten.softmax.int else _lower_sharded_log_softmax
    rows = _count_result_elements(node) // max(
        1, math.prod(get_meta_shape(operands_of(node)[0])[d] for d in list_dims(node))
    )
    sent = [("all_reduce_max", rows), ("all_reduce", rows)]
    if node.meta.get("grad", True):
        sent.append(("all_reduce", rows))
    lowering = Lowering(build, REPLICATED, tuple(sent), sections=True)
    return replace(shard_other_dims(node), whole=frozenset(), lower=dict.fromkeys(list_factors_along(node), lowering))


@register_family(
    "_fft_c2c", "_fft_c2r", "_fft_r2c", "fft_fft", "fft_fft2", "fft_fftn", "fft_ifft", "fft_ifft2", "fft_ifftn",
    "fft_irfft", "fft_rfft",
)  # fmt: skip
def shard_fourier_transform(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a Fourier transform: the transformed dims must not be sharded, other
    dims may be."""
    rank = len(get_meta_shape(operands_of(node)[0]))
    dims = get_node_argument(node, "dim")
    sizes = get_node_argument(node, "s")
    along = range(rank - len(sizes), rank) if dims is None and sizes else normalize_dims(dims, rank)
    names = [n if d not in along else None for d, n in enumerate(NAMES[:rank])]
    return build_factor_rule(node, [names], [names], linear=FIRST)


@register_family("stft")
def shard_stft(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a short-time Fourier transform: the batch dim of signals may be sharded,
    the dim of time must not be."""
    signals = [*NAMES[: len(get_meta_shape(operands_of(node)[0])) - 1], None]
    others: list[list[None]] = [[None] for _ in operands_of(node)[1:]]
    rank = len(results_of(node)[0].shape)
    return build_factor_rule(
        node, [signals, *others], [[*signals[:-1], *[None] * (rank - len(signals) + 1)]], linear=FIRST
    )


@register_family("cumsum")
def shard_cumsum(node: fx.Node) -> OpFactors:
    return replace(shard_other_dims(node), linear=FIRST)


@register_family("topk")
def shard_topk(node: fx.Node) -> OpFactors:
    names, along = NAMES[: len(get_meta_shape(operands_of(node)[0]))], list_factors_along(node)
    found = [n if n not in along else "found" for n in names]
    return build_factor_rule(node, [names], [found, found], whole=along | {"found"})


@register_family("mean")
def shard_mean(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``mean``: every dim may be sharded.

    The mean over a sharded dim is a partial sum: each rank contributes the mean of its shard divided by the number
    of ranks.
    """
    lowering = Lowering(lower_division_by_ranks, PARTIAL, sections=True)
    return replace(shard_reduction(node, FIRST), lower=dict.fromkeys(list_factors_along(node), lowering))


def lower_division_by_ranks(local: LocalBuilder) -> fx.Node:
    return local.call(aten.mul.Tensor, local.copy(), 1.0 / local.num_ranks)


@register_family("amax", "amin")
def shard_amax(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``amax`` or ``amin``.

    If no gradient is needed, every dim may be sharded, and the ranks all-reduce the maximum or minimum over a sharded
    dim. The reduced dims must not be sharded if a gradient is needed, or for ``amin`` of an unsigned dtype.
    """
    ordered = node.target == aten.amax.default or node.meta["val"].dtype.is_signed  # amin(x) = -amax(-x)
    if node.meta.get("grad", True) or not ordered:
        return shard_unreduced_dims(node)
    lowering = Lowering(
        _lower_sharded_amax, REPLICATED, (("all_reduce_max", _count_result_elements(node)),), sections=True
    )
    return replace(shard_reduction(node), lower=dict.fromkeys(list_factors_along(node), lowering))


def _lower_sharded_amax(local: LocalBuilder) -> fx.Node:
    """Append to the graph of one rank an ``amax`` or ``amin`` over a sharded dim: the maximum or minimum of the rank's
    own shard, followed by an all-reduce. Return the node of the result. ``local``: the operator to replace, its
    layouts, and the graph of one rank."""
    found, axis, size = local.copy(), local.axis, local.num_ranks
    if local.node.target == aten.amax.default:
        return local.call(collective.all_reduce_max.default, found, axis, size)
    found = local.call(collective.all_reduce_max.default, local.call(aten.neg.default, found), axis, size)
    return local.call(aten.neg.default, found)


@register_family("logsumexp")
def shard_logsumexp(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``logsumexp``: every dim may be sharded.

    Over a sharded dim, the ranks all-reduce the maximum and the sum of exponentials. For integers and complex
    numbers, the reduced dims must not be sharded.
    """
    if not operands_of(node)[0].meta["val"].dtype.is_floating_point:
        return shard_unreduced_dims(node)  # complex numbers have no maximum, integers no infinity
    sent = (("all_reduce_max", _count_result_elements(node)), ("all_reduce", _count_result_elements(node)))
    lowering = Lowering(_lower_sharded_logsumexp, REPLICATED, sent, sections=True)
    return replace(shard_reduction(node), lower=dict.fromkeys(list_factors_along(node), lowering))


def _lower_sharded_logsumexp(local: LocalBuilder) -> fx.Node:
    # Every rank continues with the whole sum, so it has the whole gradient of its own addend.
    _, largest, _, total = _compute_exponentials(local, local.operands[0], "copy")
    found = local.call(aten.add.Tensor, local.call(aten.log.default, total), largest)
    return local.call(aten.reshape.default, found, list(local.result_shape()))


def _lower_sharded_softmax(local: LocalBuilder) -> fx.Node:
    # Each rank continues with its own shard, so the gradient of the sum is reduced over all ranks.
    _, _, powers, total = _compute_exponentials(local, _get_softmax_operand(local), "reduce")
    return local.call(aten.div.Tensor, powers, total)


def _lower_sharded_log_softmax(local: LocalBuilder) -> fx.Node:
    shifted, _, _, total = _compute_exponentials(local, _get_softmax_operand(local), "reduce")
    return local.call(aten.sub.Tensor, shifted, local.call(aten.log.default, total))


def _get_softmax_operand(local: LocalBuilder) -> fx.Node:
    dtype = get_node_argument(local.node, "dtype")
    (x,) = local.operands
    return x if dtype is None else local.call(aten._to_copy.default, x, dtype=dtype)


def _compute_exponentials(local: LocalBuilder, x: fx.Node, grad: str) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """Append operators to the graph of one rank that compute the exponentials of ``x`` for a softmax along a sharded
    dim, after subtracting the maximum over all ranks. Return four nodes: ``x`` minus the maximum, the maximum, the
    exponentials, and their sum over all ranks.

    ``local``: the operator to replace, its layouts, and the graph of one rank. ``grad``: what the all-reduce of this
    sum does to its gradient in backward: ``"reduce"`` sums it over the ranks, ``"copy"`` leaves it unchanged.
    """
    axis, size = local.axis, local.num_ranks
    dims = list(list_dims(local.node))
    largest = local.call(aten.amax.default, local.call(aten.detach.default, x), dims, True)
    largest = local.call(collective.all_reduce_max.default, largest, axis, size)
    infinite = local.call(aten.isinf.default, largest)
    largest = local.call(aten.masked_fill.Scalar, largest, infinite, 0.0)  # exp(-inf - 0) is 0, exp(-inf + inf) nan
    shifted = local.call(aten.sub.Tensor, x, largest)
    powers = local.call(aten.exp.default, shifted)
    total = local.call(aten.sum.dim_IntList, powers, dims, True)
    total = local.call(collective.all_reduce.default, total, axis, size, grad)
    return shifted, largest, powers, total


@register_family("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def shard_layer_norm(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a layer norm or RMS norm: the normalised last dims must not be sharded,
    other dims may be."""
    x, *affine = operands_of(node)
    names = NAMES[: len(get_meta_shape(x))]
    count = len(get_node_argument(node, "normalized_shape"))
    last = names[len(names) - count :]
    results = [names for _ in results_of(node)]
    return build_factor_rule(node, [names, *(last for _ in affine)], results, whole=frozenset(last))


@register_family("group_norm")
def shard_group_norm(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``group_norm``: samples may be sharded, and channels by whole
    groups.

    Each group is normalised over its channels and all spatial dims, which must not be sharded.
    """
    x, *affine = operands_of(node)
    groups = get_node_argument(node, "num_groups")
    channels = ("g", "c")
    operand: Dims = (("b",), channels, *((n,) for n in NAMES[: len(get_meta_shape(x)) - 2]))
    sizes = {
        "b": get_meta_shape(x)[0],
        "g": groups,
        "c": get_meta_shape(x)[1] // groups,
        **dict(zip(NAMES, get_meta_shape(x)[2:], strict=False)),
    }
    whole = frozenset(("c", *NAMES[: len(get_meta_shape(x)) - 2]))
    return OpFactors(sizes, (operand, *((channels,) for _ in affine)), (operand,), whole, local=_lower_group_norm)


def _lower_group_norm(local: LocalBuilder) -> fx.Node:
    return local.copy(num_groups=local.size("g"))


@register_family("native_group_norm")
def shard_native_group_norm(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``native_group_norm``, which also returns the mean and the
    reciprocal standard deviation of each group of each sample.

    Samples may be sharded, and channels by whole groups; spatial dims must not be sharded.
    """
    x, *affine = operands_of(node)
    groups = get_node_argument(node, "group")
    channels = ("g", "c")
    operand: Dims = (("b",), channels, *((n,) for n in NAMES[: len(get_meta_shape(x)) - 2]))
    sizes = {
        "b": get_meta_shape(x)[0],
        "g": groups,
        "c": get_meta_shape(x)[1] // groups,
        **dict(zip(NAMES, get_meta_shape(x)[2:], strict=False)),
    }
    whole = frozenset(("c", *NAMES[: len(get_meta_shape(x)) - 2]))
    statistics: Dims = (("b",), ("g",))
    results = (operand, statistics, statistics)
    return OpFactors(sizes, (operand, *((channels,) for _ in affine)), results, whole, local=_lower_native_group_norm)


def _lower_native_group_norm(local: LocalBuilder) -> fx.Node:
    samples, groups = local.size("b"), local.size("g")
    return local.copy(N=samples, C=groups * local.size("c"), group=groups)


@register_family(
    "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "_batch_norm_with_update_functional",
)  # fmt: skip
def shard_batch_norm(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a batch norm: channels may be sharded.

    Samples and spatial dims may be sharded outside of training, where running statistics are used. In training they
    must not be sharded, because the statistics are computed over them.
    """
    x, *channelwise = operands_of(node)
    if len(get_meta_shape(x)) < 2:
        return forbid_sharding(node)
    names: list[str | None] = ["b", "c", *NAMES[: len(get_meta_shape(x)) - 2]]
    training = get_node_argument(node, "training", "no_training" not in str(node.target))
    patterns = [names if r.dim() == len(names) else _name_statistics_dims(r.shape) for r in results_of(node)]
    whole = frozenset(n for n in names if n != "c" and n) if training else frozenset()
    return build_factor_rule(node, [names, *(["c"] for _ in channelwise)], patterns, whole=whole)


def _name_statistics_dims(size: tuple[int, ...]) -> list[str | None]:
    """Return a list of factor names, for a sharding rule, of the dims of a tensor of batch norm statistics with the
    shape ``size``: ``"c"`` for the dim of channels, or ``None`` (must not be sharded) if this dim is empty."""
    return ["c" if s else None for s in size]


@register_family("_weight_norm", "_weight_norm_interface")
def shard_weight_norm(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a weight norm, which scales each slice of a weight along the operator's
    argument ``dim`` to a given norm. The dim ``dim`` may be sharded, other dims must not be."""
    directions, _ = operands_of(node)
    names = NAMES[: len(get_meta_shape(directions))]
    dim = normalize_dim(get_node_argument(node, "dim"), len(names))
    lengths = [n if d == dim else None for d, n in enumerate(names)]
    whole = frozenset(n for d, n in enumerate(names) if d != dim)
    single = len(results_of(node)) == 1  # the second result, the norms, is not linear in the lengths
    return build_factor_rule(node, [names, lengths], [names, lengths][: len(results_of(node))], whole=whole,
                 linear=mark_linear_each(1) if single else ())  # fmt: skip


@register_family("instance_norm")
def shard_instance_norm(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``instance_norm``, which normalises each channel of each sample
    over its spatial dims.

    Samples and channels may be sharded. Spatial dims may be sharded only if running statistics are used. If running
    statistics are updated, samples must not be sharded.
    """
    x, *channelwise = operands_of(node)
    places = NAMES[: len(get_meta_shape(x)) - 2]
    whole = frozenset(places) if get_node_argument(node, "use_input_stats") else frozenset()
    running = isinstance(get_node_argument(node, "running_mean"), fx.Node)
    if running and get_node_argument(node, "use_input_stats"):
        whole |= {"b"}  # running statistics average over the samples
    names = ["b", "c", *places]
    return build_factor_rule(node, [names, *(["c"] for _ in channelwise)], [names], whole=whole)
