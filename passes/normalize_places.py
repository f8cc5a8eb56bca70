"""Normal form of look-ups that stay with their rows: ``x[arange(n), places]`` is a gather, ``x[mask] = number`` is a
choice between the two."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from passes.rewrite import KEEP, Builder, Rule, aten, shape, val

_RESHAPES = (aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten.squeeze.dim, aten._to_copy.default,
             aten.to.dtype, aten.to.device)  # fmt: skip


def index(build: Builder, x: fx.Node, indices: list[fx.Node | None]) -> Any:
    """Leading indices that count the rows of their dim, and one more: along its dim, ``x`` is gathered."""
    if any(i is None or val(i).dtype not in (torch.int64, torch.int32) for i in indices):
        return KEEP
    *rows, places = (i for i in indices if i is not None)
    sizes = list(torch.broadcast_shapes(*(shape(i) for i in (*rows, places))))
    if not rows or any(_counted(i, len(sizes)) != (d, shape(x)[d]) for d, i in enumerate(rows)):
        return KEEP
    dim = len(rows)
    outer, inner, rest = sizes[:dim], sizes[dim:], shape(x)[dim + 1 :]
    negative = build(aten.lt.Scalar, places, 0)
    places = build(aten.where.self, negative, build(aten.add.Tensor, places, shape(x)[dim]), places)
    places = build(aten.to.dtype, places, torch.int64)
    if shape(places) != sizes:
        places = build(aten.expand.default, places, sizes)
    count = math.prod(inner)
    places = build(aten.reshape.default, places, [*outer, count, *[1] * len(rest)])
    if rest:
        places = build(aten.expand.default, places, [*outer, count, *rest])
    found = build(aten.gather.default, x, dim, places)
    return build(aten.reshape.default, found, [*sizes, *rest])


def _counted(node: fx.Node, rank: int) -> tuple[int, int] | None:
    """The dim of ``rank`` that numbers 0, 1, .. run along, and how many there are; ``None`` for other numbers."""
    sizes = [1] * (rank - len(shape(node))) + shape(node)
    along = [d for d, size in enumerate(sizes) if size > 1]
    while node.target in _RESHAPES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    schema = getattr(node.target, "_schema", None)
    if len(along) != 1 or schema is None or schema.name != "aten::arange":
        return None
    given = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | node.kwargs
    if given.get("start", 0) != 0 or given.get("step", 1) != 1:
        return None
    return along[0], sizes[along[0]]


def index_put(
    build: Builder, x: fx.Node, indices: list[fx.Node | None], value: fx.Node, accumulate: bool = False
) -> Any:
    """One value wherever a mask of the leading dims is true, be it a number or of the dims behind."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or val(mask).dtype != torch.bool:
        return KEEP
    behind, sizes = len(shape(x)) - len(shape(mask)), shape(value)
    if len(sizes) > behind and math.prod(sizes[: len(sizes) - behind]) != 1:
        return KEEP
    mask = build(aten.reshape.default, mask, shape(mask) + [1] * behind)
    if len(sizes) > behind:
        value = build(aten.reshape.default, value, sizes[len(sizes) - behind :])
    if accumulate:
        return build(aten.add.Tensor, x, build(aten.where.ScalarOther, mask, value, 0))
    return build(aten.where.self, mask, value, x)


PLACES: dict[Any, Rule] = {aten.index.Tensor: index, aten.index_put.default: index_put}
