"""Rewrite rules for copies, casts, views, slices, creation operators and access by strides.

Copies and views that change nothing are removed, and the many spellings of a cast, view or creation operator become
one. Reads and writes by strides (``as_strided``) become reads and writes by index, because the memory layout on
a rank differs from that of the whole tensor. A write to a diagonal becomes a ``where``. ``SHAPES`` and ``STRIDES`` map
each operator to its rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.gradient_flow import is_differentiable
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.rewrite import KEEP, Builder, Rule, aten, get_node_tensor, list_node_sizes


def drop_identity(build: Builder, x: fx.Node, *_: Any, **__: Any) -> Any:
    return x


def to_dtype(build: Builder, x: fx.Node, dtype: torch.dtype | None) -> fx.Node:
    if dtype is None or get_node_tensor(x).dtype == dtype:
        return x
    return build(aten.to.dtype, x, dtype)


def rewrite_cast(build: Builder, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Rewrite ``x.to(...)`` in any of its forms as a cast to a dtype, and return its node; return ``x`` if it has this
    dtype already. ``build``: appends operators to the graph. ``args``, ``kwargs``: the arguments of ``to`` after ``x``:
    a dtype, or a tensor whose dtype is taken; devices among them are ignored."""
    if not isinstance(x, fx.Node):  # a plain number, as nested vmaps pass it
        return _create_full_tensor(build, x)
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.dtype):
            return to_dtype(build, x, argument)
        if isinstance(argument, fx.Node):
            return to_dtype(build, x, get_node_tensor(argument).dtype)
    return x


def rewrite_reshape(build: Builder, x: fx.Node, *_: Any, **__: Any) -> Any:
    """Rewrite a view of ``x`` that keeps the order of its elements as one ``reshape``, and return its node; return
    ``x`` if the view changes nothing. ``build``: appends operators to the graph; ``build.node``, the replaced operator,
    gives the shape."""
    assert build.node is not None
    sizes = list_node_sizes(build.node)
    while x.target is aten.reshape.default:
        x = x.args[0]  # type: ignore[assignment]
    return x if sizes == list_node_sizes(x) else build(aten.reshape.default, x, sizes)


def rewrite_expand(build: Builder, x: fx.Node, *_: Any, **__: Any) -> Any:
    assert build.node is not None
    sizes = list_node_sizes(build.node)
    return x if sizes == list_node_sizes(x) else build(aten.expand.default, x, sizes)


def rewrite_broadcast_tensors(build: Builder, tensors: list[fx.Node]) -> tuple[fx.Node, ...]:
    assert build.node is not None
    sizes = list(build.node.meta["val"][0].shape)
    return tuple(x if list_node_sizes(x) == sizes else build(aten.expand.default, x, sizes) for x in tensors)


def rewrite_slice(
    build: Builder, x: fx.Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Rewrite the slice of ``x`` along ``dim`` from ``start`` to ``end`` (each may be ``None`` or negative) as one with
    bounds from 0 to the size of ``dim``, and return its node; return ``x`` if the slice takes the whole dim. ``build``:
    appends operators to the graph. ``step``: the distance of neighbouring indices."""
    dim %= len(list_node_sizes(x))
    size = list_node_sizes(x)[dim]
    start, end, step = slice(start, end, step).indices(size)
    if (start, step) == (0, 1) and end >= size:
        return x
    return build(aten.slice.Tensor, x, dim, start, max(start, end), step)


def rewrite_narrow(build: Builder, x: fx.Node, dim: int, start: Any, length: int) -> Any:
    if not isinstance(start, int):
        return KEEP
    start = start + list_node_sizes(x)[dim] if start < 0 else start
    return rewrite_slice(build, x, dim, start, start + length)


def rewrite_split(build: Builder, x: fx.Node, sizes: Any, dim: int = 0) -> Any:
    """Rewrite ``split`` or ``chunk`` of ``x`` along ``dim`` as ``split_with_sizes`` with explicit sizes, and return its
    node. ``build``: appends operators to the graph; ``build.node``, the replaced operator, gives the sizes. ``sizes``:
    the replaced operator's argument (sizes or number of the pieces); not used."""
    assert build.node is not None
    dim %= len(list_node_sizes(x))
    return build(aten.split_with_sizes.default, x, [v.shape[dim] for v in build.node.meta["val"]], dim)


def rewrite_padding(
    build: Builder, x: fx.Node, pads: list[int], mode: str = "constant", value: float | None = None
) -> Any:
    """Rewrite padding of ``x`` with a constant as ``constant_pad_nd``, and return its node. If ``mode`` is not
    ``constant``, return ``KEEP`` (the operator stays). ``build``: appends operators to the graph. ``pads``: how many
    elements to add before and after each dim, as pairs in one flat list, beginning with the last dim. ``value``: the
    constant; ``None`` means 0."""
    if mode != "constant":
        return KEEP
    fill = value if value is not None else 0
    return build(
        aten.constant_pad_nd.default, x, pads, int(fill) if not get_node_tensor(x).dtype.is_floating_point else fill
    )


def rewrite_detach(build: Builder, x: fx.Node) -> Any:
    """Rewrite a ``detach`` of ``x``: if the dtype of ``x`` can have a gradient, return ``KEEP`` (the operator stays),
    because the ``detach`` stops the gradient; otherwise return ``x``. ``build`` is not used."""
    return KEEP if is_differentiable(get_node_tensor(x)) else x


def add_nothing(build: Builder, x: fx.Node, other: Any, **_: Any) -> Any:
    integral = not get_node_tensor(x).dtype.is_floating_point and not get_node_tensor(x).dtype.is_complex
    return x if integral and type(other) is int and other == 0 else KEEP


def rewrite_overwrite(build: Builder, x: fx.Node, value: Any, *_: Any) -> Any:
    """Rewrite an operator that overwrites all elements of ``x``, such as ``copy`` or ``fill``: return a node of the new
    elements, in the dtype and shape of ``x``.

    ``build``: appends operators to the graph. ``value``: the new elements, as a node that broadcasts to ``x``, or one
    number.
    """
    if not isinstance(value, fx.Node):
        return _create_full_tensor(build, value)
    value = to_dtype(build, value, get_node_tensor(x).dtype)
    return (
        value if list_node_sizes(value) == list_node_sizes(x) else build(aten.expand.default, value, list_node_sizes(x))
    )


# --- creation: nothing but ``full`` and ``arange``, on the rank's own device ------------------------------------------
def _create_full_tensor(build: Builder, value: Any) -> fx.Node:
    assert build.node is not None
    like = get_node_tensor(build.node)
    value = bool(value) if like.dtype is torch.bool else value
    return build(aten.full.default, list(like.shape), value, dtype=like.dtype, device=META)


def rewrite_zeros(build: Builder, *_: Any, **__: Any) -> fx.Node:
    return _create_full_tensor(build, 0)


def rewrite_ones(build: Builder, *_: Any, **__: Any) -> fx.Node:
    return _create_full_tensor(build, 1)


def rewrite_full(build: Builder, _: Any, value: Any, **__: Any) -> fx.Node:
    return _create_full_tensor(build, value)


def rewrite_new_full(build: Builder, _: fx.Node, sizes: Any, value: Any, **__: Any) -> Any:
    return KEEP if isinstance(value, fx.Node) else _create_full_tensor(build, value)


def rewrite_scalar_tensor(build: Builder, value: Any, **_: Any) -> fx.Node:
    return _create_full_tensor(build, value)


def rewrite_arange(build: Builder, *bounds: Any, **kwargs: Any) -> fx.Node:
    assert build.node is not None
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    return build(aten.arange.start_step, start, end, step, dtype=get_node_tensor(build.node).dtype, device=META)


_SAME = (
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.lift.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)
_CASTS = (
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten.to.prim_Device,
    aten.to.prim_dtype,
    aten.to.prim_other,
    aten._to_copy.default,
    aten.type_as.default,
)
_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.ravel.default,
    aten.squeeze.default,
)
_EXPANDS = (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
_SPLITS = (
    aten.split.Tensor,
    aten.split.sizes,
    aten.chunk.default,
    aten.split_with_sizes.default,
    aten.unsafe_chunk.default,
)
_ZEROS = (
    aten.zeros.default,
    aten.new_zeros.default,
    aten.zeros_like.default,
    aten.empty.memory_format,
    aten.new_empty.default,
    aten.empty_like.default,
)
_ONES = (aten.ones.default, aten.new_ones.default, aten.ones_like.default)

SHAPES: dict[Any, Rule] = {
    **dict.fromkeys(_SAME, drop_identity),
    **dict.fromkeys(_CASTS, rewrite_cast),
    **dict.fromkeys(_RESHAPES, rewrite_reshape),
    **dict.fromkeys(_EXPANDS, rewrite_expand),
    **dict.fromkeys(_SPLITS, rewrite_split),
    **dict.fromkeys(_ZEROS, rewrite_zeros),
    **dict.fromkeys(_ONES, rewrite_ones),
    aten.broadcast_tensors.default: rewrite_broadcast_tensors,
    aten.slice.Tensor: rewrite_slice,
    aten.narrow.default: rewrite_narrow,
    aten.pad.default: rewrite_padding,
    aten.detach.default: rewrite_detach,
    aten.full.default: rewrite_full,
    aten.full_like.default: rewrite_full,
    aten.new_full.default: rewrite_new_full,
    aten.fill.Scalar: rewrite_overwrite,
    aten.fill.Tensor: rewrite_overwrite,
    aten.copy.default: rewrite_overwrite,
    aten.zero.default: rewrite_zeros,
    aten.scalar_tensor.default: rewrite_scalar_tensor,
    aten.arange.default: rewrite_arange,
    aten.arange.start: rewrite_arange,
    aten.arange.start_step: rewrite_arange,
}


def rewrite_as_strided(
    build: Builder, x: fx.Node, sizes: list[int], strides: list[int], offset: int | None = None
) -> fx.Node:
    """Rewrite ``as_strided`` of ``x`` as an index into the flattened tensor, because the memory layout of a
    rank's shard differs, and return its node.

    ``build``: appends operators to the graph. ``sizes``: the shape of the result. ``strides``: for each dim of the
    result, the distance of neighbours in the memory of ``x``, in elements. ``offset``: the position of the first
    element in memory; ``None`` means 0.
    """
    flat, _ = flatten_in_memory_order(
        build, x, 1 + (offset or 0) + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    )
    return build(aten.index.Tensor, flat, [append_strided_positions(build, sizes, strides, offset)])


def flatten_in_memory_order(build: Builder, x: fx.Node, reach: int = 0) -> tuple[fx.Node, list[int]]:
    """Append operators to the graph and return two values: the node of ``x`` as a vector, with its elements in memory
    order, and a list of the dims of ``x`` by decreasing stride.

    ``build``: appends operators to the graph. ``reach``: the number of elements of memory, from the start, that the
    caller accesses. Raise :class:`UnsupportedError` if ``x`` has fewer, or has gaps in memory.
    """
    assert build.node is not None
    old = build.node.args[0].meta["val"]  # type: ignore[union-attr]
    order = sorted(range(old.dim()), key=lambda d: (-old.stride(d), -old.shape[d]))
    if not old.permute(order).is_contiguous() or reach > old.numel():
        raise UnsupportedError(
            f"as_strided at {build.location} reads memory outside of its operand: write it with unfold, slices or an "
            "index"
        )
    return build(aten.reshape.default, build(aten.permute.default, x, order), [old.numel()]), order


def append_strided_positions(build: Builder, sizes: list[int], strides: list[int], offset: int | None) -> fx.Node:
    """Append operators to the graph and return an int64 node of the shape ``sizes``: the memory position, in elements,
    of each element that ``as_strided`` accesses.

    ``build``: appends operators to the graph. ``strides``: the distance in memory between neighbours along each dim, in
    elements. ``offset``: the position of the first element; ``None`` means 0.
    """
    places = build(aten.full.default, [], offset or 0, dtype=torch.int64, device=META)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        along = build(
            aten.mul.Tensor, build(aten.arange.start_step, 0, size, 1, dtype=torch.int64, device=META), stride
        )
        along = build(aten.reshape.default, along, [size if d == dim else 1 for d in range(len(sizes))])
        places = build(aten.add.Tensor, places, along)
    return places


def rewrite_diagonal_scatter(
    build: Builder, x: fx.Node, source: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> fx.Node:
    """Rewrite ``diagonal_scatter`` as a ``where``: ``source`` on a diagonal, ``x`` elsewhere. Return the node
    of the result.

    ``build``: appends operators to the graph. ``source``: the new elements of the diagonal, along its last dim.
    ``dim1``, ``dim2``: the two dims of ``x`` that span the matrices. ``offset``: which diagonal; 0 is the main one,
    positive numbers are above.
    """
    sizes = list_node_sizes(x)
    first, second = dim1 % len(sizes), dim2 % len(sizes)
    along, across = (first, second) if offset >= 0 else (second, first)  # the diagonal is indexed along the first

    def count(dim: int, start: int = 0) -> fx.Node:
        numbers = build(aten.arange.start_step, start, start + sizes[dim], 1, dtype=torch.int64, device=META)
        return build(aten.reshape.default, numbers, [size if d == dim else 1 for d, size in enumerate(sizes)])

    missing = sizes[along] - list_node_sizes(source)[-1]
    if missing:
        source = build(aten.constant_pad_nd.default, source, [0, missing], 0)
    rest = [d for d in range(len(sizes)) if d not in (first, second)]
    order = sorted(range(len(rest) + 1), key=lambda d: [*rest, along][d])
    if order != sorted(order):
        source = build(aten.permute.default, source, order)
    source = build(aten.reshape.default, source, [1 if d == across else size for d, size in enumerate(sizes)])
    return build(aten.where.self, build(aten.eq.Tensor, count(across), count(along, abs(offset))), source, x)


def rewrite_as_strided_scatter(
    build: Builder, x: fx.Node, source: fx.Node, sizes: list[int], strides: list[int], offset: int | None = None
) -> fx.Node:
    """Rewrite ``as_strided_scatter`` as a write by index, or as a write to a diagonal if it is one, and return
    the node of the result. The operator itself has a wrong gradient in torch 2.13: zero for the elements that are not
    overwritten.

    ``build``: appends operators to the graph. ``source``: the new values. ``sizes``, ``strides``, ``offset``: which
    positions in the memory of ``x`` are written: the shape of the written region, the distance of neighbours along each
    dim, and the first position, in elements; an ``offset`` of ``None`` means 0. Raise :class:`UnsupportedError` if
    several elements are written to one position.
    """
    assert build.node is not None
    old = build.node.args[0].meta["val"]  # type: ignore[union-attr]
    if old.dim() == 2 and not offset and [sum(old.stride())] == strides and [min(old.shape)] == sizes:
        return rewrite_diagonal_scatter(build, x, source)
    number = torch.arange(old.numel()).as_strided(sizes, strides, offset or 0)
    if number.unique().numel() != number.numel():
        raise UnsupportedError(
            f"as_strided at {build.location} writes several values to one element: write each element once"
        )
    flat, order = flatten_in_memory_order(build, x)
    flat = build(aten.index_put.default, flat, [append_strided_positions(build, sizes, strides, offset)], source)
    there = build(aten.reshape.default, flat, [list_node_sizes(x)[d] for d in order])
    return build(aten.permute.default, there, [order.index(d) for d in range(len(order))])


def make_slice_write_rule(target: Any) -> Rule:
    """Return the function that rewrites ``target``, an operator that writes a slice into a tensor (``slice_scatter`` or
    ``select_scatter``).

    It rewrites complex tensors as real and imaginary parts, because torch does not differentiate the operator for them.
    For real tensors, it returns ``KEEP`` (the operator stays).
    """

    def rule(build: Builder, x: fx.Node, source: fx.Node, dim: int = 0, *place: Any, **named: Any) -> Any:
        """Append the write of ``source`` into a slice of the complex tensor ``x`` to the graph, on real and imaginary
        parts, and return the node of the result; return ``KEEP`` (the operator stays) for a real ``x``.

        ``build``: appends operators to the graph. ``dim``: the dim along which the slice is taken. ``place``,
        ``named``: the further arguments of the operator: the index for ``select_scatter``, or start, end and step for
        ``slice_scatter``.
        """
        if not get_node_tensor(x).dtype.is_complex:
            return KEEP
        parts = [build(aten.view_as_real.default, value) for value in (x, source)]
        return build(
            aten.view_as_complex.default, build(target, *parts, dim % len(list_node_sizes(x)), *place, **named)
        )

    return rule


STRIDES: dict[Any, Rule] = {
    **{target: make_slice_write_rule(target) for target in (aten.slice_scatter.default, aten.select_scatter.default)},
    aten.as_strided.default: rewrite_as_strided,
    aten.as_strided_copy.default: rewrite_as_strided,
    aten.as_strided_scatter.default: rewrite_as_strided_scatter,
    aten.diagonal_scatter.default: rewrite_diagonal_scatter,
}
