"""Operators that create tensors: each rank creates its own shard. Random tensors are not sharded."""

from __future__ import annotations

import torch
from torch import fx

from passes.collectives import ops as collective
from passes.layouts import sections_of
from passes.rules.algebra import (
    NAMES,
    Local,
    OpFactors,
    argument,
    everything_whole,
    named,
    operands_of,
    shape,
)
from passes.rules.registry import family

aten = torch.ops.aten


@family("full", "zeros", "ones", "empty", "new_full", "new_zeros", "new_ones", "new_empty", "scalar_tensor")
def filled(node: fx.Node) -> OpFactors:
    """A constant tensor of a given size: every dim may be sharded. Operands give the type only."""
    unread = [[None] * len(shape(o)) for o in operands_of(node)]
    return named(node, unread, [NAMES[: len(node.meta["val"].shape)]], local=_local_filled)


def _local_filled(local: Local) -> fx.Node:
    return local.copy(size=list(local.result_shape()))


@family("full_like", "zeros_like", "ones_like", "empty_like")
def like(node: fx.Node) -> OpFactors:
    """A constant tensor of the operand's size: each dim may be sharded as the operand's. Its elements are not read."""
    names = NAMES[: len(node.meta["val"].shape)]
    return named(node, [names], [names])


@family("arange")
def arange(node: fx.Node) -> OpFactors:
    """A sequence may be sharded: a rank creates a sequence of local length and adds the offset of its shard."""
    return named(node, [], [NAMES[:1]], local=_local_arange)


def _local_arange(local: Local) -> fx.Node:
    val = local.node.meta["val"]
    start, step = argument(local.node, "start", 0), argument(local.node, "step", 1)
    if not val.dtype.is_floating_point:  # torch rounds them before it counts
        start, step = int(start), int(step)
    options = {**local.node.kwargs, "dtype": val.dtype}
    rank = local.call(collective.axis_index.default, local.axis, local.num_ranks)
    layout = local.strategy.results[0]
    pieces: list[fx.Node] = []
    for section in sections_of(layout, val.shape[0]):
        length = section // (local.num_ranks * (1 + layout.zigzag))
        for from_end in (False, True) if layout.zigzag else (False,):
            piece = local.call(aten.arange.default, length, **options)
            place = local.call(aten.mul.Tensor, rank, -length if from_end else length)
            piece = local.call(aten.add.Tensor, piece, place)
            if step != 1:
                piece = local.call(aten.mul.Tensor, piece, step)
            first = start + (section - length) * step if from_end else start
            pieces.append(local.call(aten.add.Tensor, piece, first) if first else piece)
        start += section * step
    return pieces[0] if len(pieces) == 1 else local.call(aten.cat.default, pieces)


@family(
    "bernoulli", "eye", "hann_window", "linspace", "logspace", "multinomial", "normal", "poisson", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "tril_indices", "triu_indices", "exponential",
    "uniform", "rrelu", "rrelu_with_noise",
)  # fmt: skip
def whole(node: fx.Node) -> OpFactors:
    """No dim may be sharded: elements depend on each other, or on a generator that must be equal on all ranks."""
    return everything_whole(node)
