"""The graph of a model for one more size of the batch, from its graphs for two sizes.

Capturing a model takes most of the time of a small plan. A model of which two graphs differ in sizes alone, each of
which grows evenly with the batch, has the same graph with the sizes in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.ir.interpret import refresh_graph_values
from partitioner.passes.ir.model import Captured, TensorSpec
from partitioner.passes.padding.compare import is_prefix, pair_nodes, shapes_of

Line = tuple[int, int, int]  # the two sizes of the batch, and the one in between


class _UnevenError(Exception):
    """Raised if a size, an argument or a constant of a model's graph is not a linear function of the batch size."""


def copy_captured(captured: Captured) -> Captured:
    """Return a copy of ``captured``, a model as one graph, with a graph of its own, which may be changed."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    return captured.with_(graph=graph)


def resize_captured(main: Captured, other: Captured, line: Line) -> Captured | None:
    """Return the captured model for a batch size between two batch sizes for which it was captured. Return ``None`` if
    the two graphs differ in more than sizes, or if a size or a constant is not a linear function of the batch size.

    ``main``, ``other``: the model captured for the two batch sizes. ``line``: three batch sizes, in elements along
    one axis of the batch: that of ``main``, that of ``other``, and that of the result.
    """
    pairs = pair_nodes(main, other)
    if pairs is None or main.turns or other.turns:
        return None
    try:
        return _resize_graph(main, other, pairs, line)
    except _UnevenError:
        return None


def _resize_graph(main: Captured, other: Captured, pairs: Mapping[fx.Node, fx.Node], line: Line) -> Captured:
    """Return a copy of the captured model ``main`` for another batch size, with sizes interpolated between those of
    ``main`` and ``other``, the same model captured for a second batch size.

    ``pairs``: node of ``main`` -> the same node of ``other``. ``line``: the batch sizes of ``main``, of ``other``
    and of the result. Raise :class:`_UnevenError` if a size is not a linear function of the batch size.
    """
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    constants: dict[str, Tensor] = {}
    states = dict(main.states)
    for name, state in main.states.items():
        shape = _resize_shape(state.spec.shape, other.states[name].spec.shape, line)
        states[name] = replace(state, spec=TensorSpec(shape, state.spec.dtype))
        if name in main.constants:
            constants[name] = _cut_constant(main.constants[name], other.constants[name], shape)
    inputs = [
        replace(i, spec=TensorSpec(_resize_shape(i.spec.shape, o.spec.shape, line), i.spec.dtype))
        for i, o in zip(main.inputs, other.inputs, strict=True)
    ]
    specs = {name: state.spec for name, state in states.items()} | {i.value: i.spec for i in inputs}
    for node, partner in pairs.items():
        new = made[node] = graph.node_copy(node, made.__getitem__)
        if node.op == "placeholder":
            new.meta["val"] = specs[main.placeholders[node.name]].meta()
        elif node.op == "call_function":
            args = tuple(_resize_argument(a, b, line) for a, b in zip(node.args, partner.args, strict=True))
            kwargs = {k: _resize_argument(a, partner.kwargs[k], line) for k, a in node.kwargs.items()}
            new.args, new.kwargs = fx.node.map_arg((args, kwargs), made.__getitem__)
    try:
        refresh_graph_values(graph)
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        raise _UnevenError from error
    for node, partner in pairs.items():
        if node.op == "call_function":
            wanted = [_resize_shape(a, b, line) for a, b in zip(shapes_of(node), shapes_of(partner), strict=True)]
            if list(shapes_of(made[node])) != wanted:
                raise _UnevenError
    return main.with_(graph=graph, states=states, inputs=inputs, constants=main.constants | constants)


def _resize_shape(main: tuple[int, ...], other: tuple[int, ...], line: Line) -> tuple[int, ...]:
    """Return the shape that a tensor has at a third batch size, by linear interpolation between its shapes ``main``
    and ``other`` at two batch sizes. ``line``: the batch sizes of ``main``, of ``other`` and of the result. Raise
    :class:`_UnevenError` if a size is not linear in the batch size."""
    if len(main) != len(other):
        raise _UnevenError
    return tuple(_resize_number(a, b, line) for a, b in zip(main, other, strict=True))


def _resize_number(main: int, other: int, line: Line) -> int:
    """Return the value at a third batch size of the linear function that has the values ``main`` and ``other`` at
    two batch sizes. ``line``: the batch sizes of ``main``, of ``other`` and of the result. Raise
    :class:`_UnevenError` if the result is not an integer."""
    first, second, between = line
    steps, left = divmod((main - other) * (between - second), first - second)
    if left:
        raise _UnevenError
    return other + steps


def _resize_argument(main: Any, other: Any, line: Line) -> Any:
    """Return the argument that an operator has in the graph for a third batch size, by linear interpolation of the
    integers in ``main`` and ``other``, the same argument in the graphs for two batch sizes.

    ``line``: the batch sizes of ``main``, of ``other`` and of the result. Raise :class:`_UnevenError` if the
    arguments differ in anything but integers, or a result is not an integer.
    """
    if isinstance(main, fx.Node):
        return main
    if isinstance(main, list | tuple) and isinstance(other, list | tuple):
        if len(main) != len(other):
            raise _UnevenError
        return type(main)(_resize_argument(a, b, line) for a, b in zip(main, other, strict=True))
    if main == other:
        return main
    if type(main) is int and type(other) is int:
        return _resize_number(main, other, line)
    raise _UnevenError


def _cut_constant(main: Tensor, other: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the constant that a model has for a third batch size: the first elements of ``main``, its constant for the
    larger of two batch sizes, in the shape ``shape``.

    Raise :class:`_UnevenError` if ``other``, the constant for the smaller batch size, is not the first part of
    ``main``, or if ``main`` is smaller than ``shape``.
    """
    if tuple(main.shape) == shape and torch.equal(main, other):
        return main
    if not is_prefix(main, other) or any(a < b for a, b in zip(main.shape, shape, strict=True)):
        raise _UnevenError
    return main[tuple(slice(size) for size in shape)].contiguous()
