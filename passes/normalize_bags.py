"""Normal form of ``embedding_bag``: a look-up, and a sum, mean or maximum over the ids of each bag.

The operator itself takes ids and the places where bags begin, and has a kernel for training and one without gradients.
Where all bags are of one size, as ``nn.EmbeddingBag`` makes them of ids ``[bags, size]``, they are a dim, which can be
sharded like any other.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from passes.errors import UnsupportedError
from passes.normalize_shapes import to_dtype
from passes.rewrite import KEEP, Builder, Rule, aten, shape, val

_SUM, _MEAN, _MAX = range(3)  # as torch numbers the modes


def embedding_bag(
    build: Builder,
    weight: fx.Node,
    ids: fx.Node,
    offsets: fx.Node,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: fx.Node | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """``[bags, width]``. Raises :class:`UnsupportedError` for bags of several sizes."""
    bags, length = shape(offsets)[0] - include_last_offset, shape(ids)[0]
    size = length // bags if bags > 0 else 0
    regular = offsets.target is aten.arange.start_step and offsets.args[0] == 0 and offsets.args[2] == size
    if not size or size * bags != length or not regular:
        raise UnsupportedError(
            f"embedding_bag at {build.where} has bags of any size, which would differ between ranks; "
            "give ids as [bags, size], and fill short bags up with padding_idx"
        )
    if scale_grad_by_freq:
        raise UnsupportedError(
            f"embedding_bag at {build.where} scales gradients by how often an id is in the batch, which couples its "
            "samples: expected scale_grad_by_freq=False"
        )
    table = _by_bag(build, ids, [bags, size])
    rows = build(aten.embedding.default, weight, table)
    if per_sample_weights is not None:
        scale = _by_bag(build, per_sample_weights, [bags, size])
        rows = build(aten.mul.Tensor, rows, build(aten.unsqueeze.default, scale, -1))
    kept = None
    if padding_idx is not None and padding_idx >= 0:
        kept = build(aten.ne.Scalar, table, padding_idx)
    return (_reduced(build, rows, kept, mode), None, None, None)


def _by_bag(build: Builder, flat: fx.Node, sizes: list[int]) -> fx.Node:
    while flat.target is aten.reshape.default:
        flat = flat.args[0]  # type: ignore[assignment]
    return flat if shape(flat) == sizes else build(aten.reshape.default, flat, sizes)


def _reduced(build: Builder, rows: fx.Node, kept: fx.Node | None, mode: int) -> fx.Node:
    """``rows`` (``[bags, size, width]``) over the ids ``kept`` (``[bags, size]``, all: ``None``); 0 where none is."""
    left_out = None
    if kept is not None:
        left_out = build(aten.unsqueeze.default, build(aten.logical_not.default, kept), -1)
    if mode == _MAX:
        compared = rows if left_out is None else build(aten.masked_fill.Scalar, rows, left_out, float("-inf"))
        largest = build(operator.getitem, build(aten.max.dim, compared, 1), 0)  # one row has the gradient, as there
        if kept is None:
            return largest
        empty = build(aten.logical_not.default, build(aten.any.dim, kept, 1, True))
        return build(aten.masked_fill.Scalar, largest, empty, 0)
    if left_out is not None:
        rows = build(aten.masked_fill.Scalar, rows, left_out, 0)
    total = build(aten.sum.dim_IntList, rows, [1])
    if mode == _SUM:
        return total
    if kept is None:
        return build(aten.mul.Tensor, total, 1 / shape(rows)[1])
    count = build(aten.sum.dim_IntList, to_dtype(build, kept, val(rows).dtype), [1], True)
    return build(aten.div.Tensor, total, build(aten.clamp.default, count, 1))


def embedding(
    build: Builder, weight: fx.Node, ids: fx.Node, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Any:
    """A look-up whose gradient is dense: torch's sparse tensors say the same in another form."""
    return build(aten.embedding.default, weight, ids, padding, by_frequency) if sparse else KEEP


BAGS: dict[Any, Rule] = {
    aten.embedding.default: embedding,
    aten.embedding_bag.default: embedding_bag,
    aten.embedding_bag.padding_idx: embedding_bag,
}
