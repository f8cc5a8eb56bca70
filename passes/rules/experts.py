"""Products of rows, sorted by expert, with the matrix of their expert."""

from __future__ import annotations

import torch
from torch import fx

from passes.collectives import ops as collective
from passes.infer import META
from passes.layouts import PARTIAL
from passes.rules.algebra import (
    NAMES,
    Local,
    Lowering,
    OpFactors,
    argument,
    each,
    everything_whole,
    named,
    operands_of,
    shape,
)
from passes.rules.registry import family

aten = torch.ops.aten


@family("partition::expert_mm")
def product_by_expert(node: fx.Node) -> OpFactors:
    """Rows t with k features, experts e of matrices k n. Where experts are sharded, the rows of the other ranks'
    experts are zero, a partial sum."""
    lower = {"e": Lowering(_of_own_experts, PARTIAL, divides_work=True)}
    return named(node, ["tk", "ekn", "t"], ["tn"], linear=each(0, 1), lower=lower)


def _of_own_experts(local: Local) -> fx.Node:
    _, weight, expert = local.operands
    rank = local.call(collective.axis_index.default, local.axis, local.num_ranks)
    first = local.call(aten.mul.Tensor, rank, shape(weight)[0])
    return local.copy(expert=local.call(aten.sub.Tensor, expert, first))


@family("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_product(node: fx.Node) -> OpFactors | None:
    """Rows t with k features, experts e of matrices k n, and where each expert's rows end.

    Which rows an expert has only the data tells: t is whole. Where experts are sharded, every rank finds the rows of
    its own and gives zeros for the rest, a partial sum.
    """
    operands = operands_of(node)
    ranks = tuple(len(shape(o)) for o in operands)
    if ranks == (3, 3):
        return named(node, ["etk", "ekn"], ["etn"], linear=each(0, 1))
    if ranks != (2, 3, 1):
        return None
    lower = {"e": Lowering(_own_experts, PARTIAL, divides_work=True)}
    # The ends are needed of all experts, so they have no factor.
    patterns = [("t", "k"), ("e", "k", "n"), (None,)]
    return named(node, patterns, [("t", "n")], whole=frozenset("t"), linear=each(0, 1), lower=lower)


def _own_experts(local: Local) -> fx.Node:
    """The own experts' rows stand together: they are moved to the front, and moved back behind the product."""
    x, weight, ends = local.operands
    num_rows, num_experts, num_own = shape(x)[0], shape(ends)[0], shape(weight)[0]
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

    # Rows of no group are not computed, forward or backward: what stands there is not to be read.
    rows = local.call(aten.masked_fill.Scalar, local.call(aten.index_select.default, x, 0, to_front), others, 0.0)
    assert callable(local.node.target)
    made = local.call(local.node.target, rows, weight, own_ends, *local.node.args[3:], **_options(local.node))
    made = local.call(aten.masked_fill.Scalar, made, others, 0.0)
    return local.call(aten.index_select.default, made, 0, to_back)


def _options(node: fx.Node) -> dict[str, object]:
    return {name: v for name, v in node.kwargs.items() if not isinstance(v, fx.Node)}


@family("histc")
def histogram(node: fx.Node) -> OpFactors:
    """Counts over a given range add up; the range of the data only all of it tells."""
    (x,) = operands_of(node)
    names = NAMES[: len(shape(x))]
    data_range = argument(node, "min") == argument(node, "max")
    return everything_whole(node) if data_range else named(node, [names], [[None]])
