"""Normal form of look-ups and writes of whole slices: where one vector of places is expanded over all other dims,
``gather`` is ``index_select``, ``scatter_add`` is ``index_add`` and ``scatter`` is ``index_copy``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.infer import META
from passes.normalize_shapes import to_dtype
from passes.rewrite import KEEP, Builder, Rule, aten, shape, val

_VIEWS = (aten.expand.default, aten.repeat.default, aten.expand_as.default, aten.broadcast_to.default)


def gather(build: Builder, x: fx.Node, dim: int, index: fx.Node, sparse_grad: bool = False) -> Any:
    places = _places(build, x, dim, index)
    return KEEP if places is None else build(aten.index_select.default, x, dim, places)


def scatter_add(build: Builder, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Any:
    return _written(build, aten.index_add.default, x, dim, index, source)


def scatter(build: Builder, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Any:
    return _written(build, aten.index_copy.default, x, dim, index, source)


def index_fill(build: Builder, x: fx.Node, dim: int, index: fx.Node, value: fx.Node) -> Any:
    """A choice: the operator's own gradient counts the places that recur, of which only the data tell how many."""
    if not shape(x):
        return KEEP
    rank, size = len(shape(x)), shape(x)[dim]
    none = build(aten.full.default, [size], False, dtype=torch.bool, device=META)
    mask = build(aten.index_fill.int_Scalar, none, 0, index, True)
    mask = build(aten.reshape.default, mask, [size if d == dim % rank else 1 for d in range(rank)])
    return build(aten.where.self, mask, to_dtype(build, value, val(x).dtype), x)


def _written(build: Builder, target: Any, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Any:
    places = _places(build, x, dim, index) if shape(source) == shape(index) else None
    return KEEP if places is None else build(target, x, dim, places, source)


def _places(build: Builder, x: fx.Node, dim: int, index: fx.Node) -> fx.Node | None:
    """The vector that ``index`` holds along ``dim`` for every slice of ``x``."""
    sizes, rank = shape(index), len(shape(index))
    if rank < 2 or index.target not in _VIEWS or val(index).dtype != torch.int64:
        return None
    dim %= rank
    source: Any = index.args[0]
    others = [d for d in range(rank) if d != dim]
    known = [1] * (rank - len(shape(source))) + shape(source)
    if any(sizes[d] != shape(x)[d] or known[d] != 1 for d in others) or known[dim] != sizes[dim]:
        return None
    while source.target is aten.reshape.default:
        source = source.args[0]
    return source if shape(source) == [sizes[dim]] else build(aten.reshape.default, source, [sizes[dim]])


INDICES: dict[Any, Rule] = {
    aten.gather.default: gather,
    aten.scatter_add.default: scatter_add,
    aten.scatter.src: scatter,
    aten.index_fill.int_Tensor: index_fill,
}
