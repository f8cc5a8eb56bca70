"""Normal form of what reads and writes by places in memory: look-ups and writes by place, since a rank's memory is
another; what is written to a diagonal is a choice by place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.errors import UnsupportedError
from passes.infer import META
from passes.rewrite import KEEP, Builder, Rule, aten, shape, val


def as_strided(build: Builder, x: fx.Node, sizes: list[int], strides: list[int], offset: int | None = None) -> fx.Node:
    """Places counted in memory, as places counted in order: a rank's memory is another."""
    flat, _ = flat_in_memory(
        build, x, 1 + (offset or 0) + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    )
    return build(aten.index.Tensor, flat, [strided_places(build, sizes, strides, offset)])


def flat_in_memory(build: Builder, x: fx.Node, reach: int = 0) -> tuple[fx.Node, list[int]]:
    """The first operand's elements as they lie in memory, and its dims in this order; ``reach``: how many are read."""
    assert build.node is not None
    old = build.node.args[0].meta["val"]  # type: ignore[union-attr]
    order = sorted(range(old.dim()), key=lambda d: (-old.stride(d), -old.shape[d]))
    if not old.permute(order).is_contiguous() or reach > old.numel():
        raise UnsupportedError(
            f"as_strided at {build.where} reads memory beside its operand: write it with unfold, slices or an index"
        )
    return build(aten.reshape.default, build(aten.permute.default, x, order), [old.numel()]), order


def strided_places(build: Builder, sizes: list[int], strides: list[int], offset: int | None) -> fx.Node:
    """The places in memory that ``as_strided`` speaks of."""
    places = build(aten.full.default, [], offset or 0, dtype=torch.int64, device=META)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        along = build(
            aten.mul.Tensor, build(aten.arange.start_step, 0, size, 1, dtype=torch.int64, device=META), stride
        )
        along = build(aten.reshape.default, along, [size if d == dim else 1 for d in range(len(sizes))])
        places = build(aten.add.Tensor, places, along)
    return places


def diagonal_scatter(
    build: Builder, x: fx.Node, source: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> fx.Node:
    """A choice by place between what is written and what was there."""
    sizes = shape(x)
    first, second = dim1 % len(sizes), dim2 % len(sizes)
    along, across = (first, second) if offset >= 0 else (second, first)  # a place counts the diagonal along the first

    def count(dim: int, start: int = 0) -> fx.Node:
        numbers = build(aten.arange.start_step, start, start + sizes[dim], 1, dtype=torch.int64, device=META)
        return build(aten.reshape.default, numbers, [size if d == dim else 1 for d, size in enumerate(sizes)])

    missing = sizes[along] - shape(source)[-1]
    if missing:
        source = build(aten.constant_pad_nd.default, source, [0, missing], 0)
    rest = [d for d in range(len(sizes)) if d not in (first, second)]
    order = sorted(range(len(rest) + 1), key=lambda d: [*rest, along][d])
    if order != sorted(order):
        source = build(aten.permute.default, source, order)
    source = build(aten.reshape.default, source, [1 if d == across else size for d, size in enumerate(sizes)])
    return build(aten.where.self, build(aten.eq.Tensor, count(across), count(along, abs(offset))), source, x)


def as_strided_scatter(
    build: Builder, x: fx.Node, source: fx.Node, sizes: list[int], strides: list[int], offset: int | None = None
) -> fx.Node:
    """By place; torch's own operator has a wrong gradient (2.13: zero for what is kept)."""
    assert build.node is not None
    old = build.node.args[0].meta["val"]  # type: ignore[union-attr]
    if old.dim() == 2 and not offset and [sum(old.stride())] == strides and [min(old.shape)] == sizes:
        return diagonal_scatter(build, x, source)
    number = torch.arange(old.numel()).as_strided(sizes, strides, offset or 0)
    if number.unique().numel() != number.numel():
        raise UnsupportedError(f"as_strided at {build.where} writes several values to one place: write each place once")
    flat, order = flat_in_memory(build, x)
    flat = build(aten.index_put.default, flat, [strided_places(build, sizes, strides, offset)], source)
    there = build(aten.reshape.default, flat, [shape(x)[d] for d in order])
    return build(aten.permute.default, there, [order.index(d) for d in range(len(order))])


def written_piece(target: Any) -> Rule:
    """``target`` puts a piece into a whole; of complex numbers by their parts, since torch differentiates no other."""

    def rule(build: Builder, x: fx.Node, source: fx.Node, dim: int = 0, *place: Any, **named: Any) -> Any:
        if not val(x).dtype.is_complex:
            return KEEP
        parts = [build(aten.view_as_real.default, value) for value in (x, source)]
        return build(aten.view_as_complex.default, build(target, *parts, dim % len(shape(x)), *place, **named))

    return rule


STRIDES: dict[Any, Rule] = {
    **{target: written_piece(target) for target in (aten.slice_scatter.default, aten.select_scatter.default)},
    aten.as_strided.default: as_strided,
    aten.as_strided_copy.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.diagonal_scatter.default: diagonal_scatter,
}
