"""Factor rules of reductions and of operators that couple the elements of a dim."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from passes.collectives import ops as collective
from passes.layouts import PARTIAL, REPLICATED
from passes.rules.algebra import (
    FIRST,
    NAMES,
    Local,
    Lowering,
    OpFactors,
    argument,
    as_dims,
    named,
    operands_of,
    results_of,
    shape,
)
from passes.rules.registry import family

aten = torch.ops.aten
Linear = tuple[frozenset[int], ...]


def reduced(node: fx.Node, linear: Linear = ()) -> OpFactors:
    """The rule of a sum over the argument ``dim`` (all dims if it is absent): sharding a summed factor gives a partial
    sum."""
    dims = dims_of(node)
    names = NAMES[: len(shape(operands_of(node)[0]))]
    left = [None if d in dims else n for d, n in enumerate(names)]
    kept = left if argument(node, "keepdim", False) else [n for n in left if n is not None]
    return named(node, [names], [kept for _ in results_of(node)], linear=linear)


def dims_of(node: fx.Node) -> tuple[int, ...]:
    given, sizes = argument(node, "dim"), shape(operands_of(node)[0])
    if isinstance(given, list | tuple) and not given and tuple(results_of(node)[0].shape) == sizes:
        return ()  # some operators read an empty list of dims as no dim, others as all dims
    return as_dims(given, len(sizes))


def _numel(node: fx.Node) -> int:
    """Number of elements of the first result."""
    return math.prod(results_of(node)[0].shape)


def factors_along(node: fx.Node) -> frozenset[str]:
    return frozenset(NAMES[d] for d in dims_of(node))


@family("sum")
def sum_(node: fx.Node) -> OpFactors:
    return reduced(node, FIRST)


family("nansum", "count_nonzero")(reduced)


@family(
    "all", "any", "argmax", "argmin", "max", "median", "min", "mode", "nanmedian", "norm", "prod", "std", "std_mean",
    "var", "var_mean", "linalg_vector_norm", "aminmax", "kthvalue",
)  # fmt: skip
def over_whole_dims(node: fx.Node) -> OpFactors:
    """A reduction other than a sum: the reduced dims are whole."""
    return replace(reduced(node), whole=factors_along(node))


@family(
    "_log_softmax", "_safe_softmax", "_softmax", "argsort", "cummax", "cummin", "cumprod", "logcumsumexp",
    "sort",
)  # fmt: skip
def along_whole_dim(node: fx.Node) -> OpFactors:
    """Each element of the results depends on all of the operand's elements along the dim, which is therefore whole."""
    names = NAMES[: len(shape(operands_of(node)[0]))]
    return named(node, [names], [names for _ in results_of(node)], whole=factors_along(node))


@family("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_gradient(node: fx.Node) -> OpFactors:
    """Backward of softmax, which reads the gradient and the result: the dim of the softmax is whole."""
    names = NAMES[: len(node.meta["val"].shape)]
    return named(node, [names, names], [names], whole=factors_along(node))


@family("softmax", "log_softmax")
def softmax(node: fx.Node) -> OpFactors:
    """Along a sharded dim, the ranks all-reduce the maximum and the sum of the exponentials."""
    build = _softmax_sharded if node.target == aten.softmax.int else _log_softmax_sharded
    rows = _numel(node) // max(1, math.prod(shape(operands_of(node)[0])[d] for d in dims_of(node)))
    sent = [("all_reduce_max", rows), ("all_reduce", rows)]
    if node.meta.get("grad", True):
        sent.append(("all_reduce", rows))
    lowering = Lowering(build, REPLICATED, tuple(sent), sections=True)
    return replace(along_whole_dim(node), whole=frozenset(), lower=dict.fromkeys(factors_along(node), lowering))


@family(
    "_fft_c2c", "_fft_c2r", "_fft_r2c", "fft_fft", "fft_fft2", "fft_fftn", "fft_ifft", "fft_ifft2", "fft_ifftn",
    "fft_irfft", "fft_rfft",
)  # fmt: skip
def fourier(node: fx.Node) -> OpFactors:
    """The transformed dims are whole, and may have another size in the result; the other dims may be sharded."""
    rank = len(shape(operands_of(node)[0]))
    dims = argument(node, "dim")
    sizes = argument(node, "s")
    along = range(rank - len(sizes), rank) if dims is None and sizes else as_dims(dims, rank)
    names = [n if d not in along else None for d, n in enumerate(NAMES[:rank])]
    return named(node, [names], [names], linear=FIRST)


@family("stft")
def stft(node: fx.Node) -> OpFactors:
    """Short-time Fourier transform: the time dim is whole; the dim of the signals may be sharded."""
    signals = [*NAMES[: len(shape(operands_of(node)[0])) - 1], None]
    others: list[list[None]] = [[None] for _ in operands_of(node)[1:]]
    rank = len(results_of(node)[0].shape)
    return named(node, [signals, *others], [[*signals[:-1], *[None] * (rank - len(signals) + 1)]], linear=FIRST)


@family("cumsum")
def cumsum(node: fx.Node) -> OpFactors:
    return replace(along_whole_dim(node), linear=FIRST)


@family("topk")
def topk(node: fx.Node) -> OpFactors:
    names, along = NAMES[: len(shape(operands_of(node)[0]))], factors_along(node)
    found = [n if n not in along else "found" for n in names]
    return named(node, [names], [found, found], whole=along | {"found"})


@family("mean")
def mean(node: fx.Node) -> OpFactors:
    """A sharded mean is partial: each rank contributes the mean of its shard divided by the number of shards."""
    lowering = Lowering(divided_by_ranks, PARTIAL, sections=True)
    return replace(reduced(node, FIRST), lower=dict.fromkeys(factors_along(node), lowering))


def divided_by_ranks(local: Local) -> fx.Node:
    return local.call(aten.mul.Tensor, local.copy(), 1.0 / local.num_ranks)


@family("amax", "amin")
def amax(node: fx.Node) -> OpFactors:
    """Over a sharded dim, the ranks all-reduce the maximum. With a gradient, the dim is whole."""
    ordered = node.target == aten.amax.default or node.meta["val"].dtype.is_signed  # amin(x) = -amax(-x)
    if node.meta.get("grad", True) or not ordered:
        return over_whole_dims(node)
    lowering = Lowering(_largest_of_ranks, REPLICATED, (("all_reduce_max", _numel(node)),), sections=True)
    return replace(reduced(node), lower=dict.fromkeys(factors_along(node), lowering))


def _largest_of_ranks(local: Local) -> fx.Node:
    found, axis, size = local.copy(), local.axis, local.num_ranks
    if local.node.target == aten.amax.default:
        return local.call(collective.all_reduce_max.default, found, axis, size)
    found = local.call(collective.all_reduce_max.default, local.call(aten.neg.default, found), axis, size)
    return local.call(aten.neg.default, found)


@family("logsumexp")
def logsumexp(node: fx.Node) -> OpFactors:
    """Over a sharded dim, the ranks all-reduce the maximum and the sum of the exponentials."""
    if not operands_of(node)[0].meta["val"].dtype.is_floating_point:
        return over_whole_dims(node)  # complex numbers have no maximum, integers no infinity
    sent = (("all_reduce_max", _numel(node)), ("all_reduce", _numel(node)))
    lowering = Lowering(_logsumexp_sharded, REPLICATED, sent, sections=True)
    return replace(reduced(node), lower=dict.fromkeys(factors_along(node), lowering))


def _logsumexp_sharded(local: Local) -> fx.Node:
    # Every rank continues with the whole sum, so it has the whole gradient of its own addend.
    _, largest, _, total = _exponentials(local, local.operands[0], "copy")
    found = local.call(aten.add.Tensor, local.call(aten.log.default, total), largest)
    return local.call(aten.reshape.default, found, list(local.result_shape()))


def _softmax_sharded(local: Local) -> fx.Node:
    # Each rank continues with its own shard, so the gradient of the sum is reduced over all ranks.
    _, _, powers, total = _exponentials(local, _softmax_operand(local), "reduce")
    return local.call(aten.div.Tensor, powers, total)


def _log_softmax_sharded(local: Local) -> fx.Node:
    shifted, _, _, total = _exponentials(local, _softmax_operand(local), "reduce")
    return local.call(aten.sub.Tensor, shifted, local.call(aten.log.default, total))


def _softmax_operand(local: Local) -> fx.Node:
    dtype = argument(local.node, "dtype")
    (x,) = local.operands
    return x if dtype is None else local.call(aten._to_copy.default, x, dtype=dtype)


def _exponentials(local: Local, x: fx.Node, grad: str) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """Shifted exponentials of ``x`` along the reduced dims.

    Returns ``x`` minus its maximum over all ranks, that maximum, the exponentials, and their sum over all ranks.
    """
    axis, size = local.axis, local.num_ranks
    dims = list(dims_of(local.node))
    largest = local.call(aten.amax.default, local.call(aten.detach.default, x), dims, True)
    largest = local.call(collective.all_reduce_max.default, largest, axis, size)
    infinite = local.call(aten.isinf.default, largest)
    largest = local.call(aten.masked_fill.Scalar, largest, infinite, 0.0)  # exp(-inf - 0) is 0, exp(-inf + inf) nan
    shifted = local.call(aten.sub.Tensor, x, largest)
    powers = local.call(aten.exp.default, shifted)
    total = local.call(aten.sum.dim_IntList, powers, dims, True)
    total = local.call(collective.all_reduce.default, total, axis, size, grad)
    return shifted, largest, powers, total
