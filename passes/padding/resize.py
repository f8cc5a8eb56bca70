"""Derive the graph of a model for a third batch size from its graphs for two other batch sizes.

Capturing a model takes most of the time of a small plan. If two graphs of a model differ in sizes alone, and each size
is a linear function of the batch size, the graph for a batch size between the two has the same operators, with
interpolated sizes. This also holds for the forward and backward of a block: :class:`JointShapes` interpolates the joint
graph of a block between two blocks that were differentiated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from partitioner.passes.ir.interpret import refresh_graph_values
from partitioner.passes.ir.model import Block, Captured, FoldedModel, ModelInput, ModelState, TensorSpec
from partitioner.passes.normalize.document_masks import list_document_attentions, list_prefix_attentions
from partitioner.passes.padding.compare import align_graphs, is_prefix, list_result_shapes, match_nodes
from partitioner.passes.shard.differentiate import JointGraph

Line = tuple[int, int, int]  # two batch sizes, and the one in between
Shapes = tuple[tuple[int, ...], ...]
_ROUNDING = 1e-12  # relative rounding error of numbers that are inverse to the batch size


class _UnevenError(Exception):
    """Raised if a size, an argument or a constant of a model's graph is not a linear function of the batch size."""


def copy_captured(captured: Captured) -> Captured:
    """Return a copy of ``captured``, a model as one graph, whose graph is also a copy and may be changed."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    return captured.with_(graph=graph)


def resize_captured(main: Captured, other: Captured, line: Line) -> Captured | None:
    """Return the captured model for a batch size between two batch sizes for which it was captured. Return ``None`` if
    the two graphs differ in more than sizes, or if a size or a constant is not a linear function of the batch size.

    ``main``, ``other``: the model captured for the two batch sizes. ``line``: the batch sizes of ``main``, of ``other``
    and of the result, in elements along one axis of the batch.
    """
    aligned = align_graphs(main, other)
    if aligned is None or main.turns or other.turns:
        return None
    main, pairs = aligned
    try:
        return _resize_graph(main, other, pairs, line)
    except _UnevenError:
        return None


def _resize_graph(main: Captured, other: Captured, pairs: Mapping[fx.Node, fx.Node], line: Line) -> Captured:
    """Return a copy of the captured model ``main`` for another batch size, with sizes that are interpolated between
    ``main`` and ``other``, the same model captured for a second batch size.

    ``pairs``: node of ``main`` -> the same node of ``other``. ``line``: the batch sizes of ``main``, of ``other``
    and of the result. Raise :class:`_UnevenError` if a size is not a linear function of the batch size.
    """
    states, constants = _resize_states(main, other, line)
    inputs = _resize_inputs(main, other, line)
    specs = {name: state.spec for name, state in states.items()} | {i.value: i.spec for i in inputs}
    placeholders = {node: specs[main.placeholders[node.name]] for node in pairs if node.op == "placeholder"}
    graph = _resize_nodes(pairs, placeholders, line)
    return main.with_(graph=graph, states=states, inputs=inputs, constants=main.constants | constants)


def _resize_states(
    main: Captured | FoldedModel, other: Captured | FoldedModel, line: Line
) -> tuple[dict[str, ModelState], dict[str, Tensor]]:
    """Return the parameters, buffers and constants (states) of a model for a third batch size, by name, and the values
    of its constants, by name. ``main``, ``other``: the model for two batch sizes. ``line``: the batch sizes of
    ``main``, of ``other`` and of the result. Raise :class:`_UnevenError` if a size is not linear in the batch size."""
    states, constants = dict(main.states), dict[str, Tensor]()
    for name, state in main.states.items():
        states[name] = replace(state, spec=_resize_spec(state.spec, other.states[name].spec, line))
        if name in main.constants:
            shape = states[name].spec.shape
            constants[name] = _cut_constant(main.constants[name], other.constants[name], shape)
    return states, constants


def _resize_inputs(main: Captured | FoldedModel, other: Captured | FoldedModel, line: Line) -> list[ModelInput]:
    """Return the inputs of a model for a third batch size. ``main``, ``other``: the model for two batch sizes.
    ``line``: the batch sizes of ``main``, of ``other`` and of the result. Raise :class:`_UnevenError` if a size is not
    linear in the batch size."""
    pairs = zip(main.inputs, other.inputs, strict=True)
    return [replace(ours, spec=_resize_spec(ours.spec, theirs.spec, line)) for ours, theirs in pairs]


def _resize_nodes(pairs: Mapping[fx.Node, fx.Node], placeholders: Mapping[fx.Node, TensorSpec], line: Line) -> fx.Graph:
    """Return a copy of a graph with the sizes for a third batch size. ``pairs``: node of the graph for the first batch
    size -> the same node of the graph for the second. ``placeholders``: placeholder of the first graph -> its shape and
    dtype in the result. ``line``: the three batch sizes. Raise :class:`_UnevenError` if a size is not linear in the
    batch size."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node, partner in pairs.items():
        new = made[node] = graph.node_copy(node, made.__getitem__)
        if node.op == "placeholder":
            new.meta["val"] = placeholders[node].meta()
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
            wanted = [
                _resize_shape(a, b, line)
                for a, b in zip(list_result_shapes(node), list_result_shapes(partner), strict=True)
            ]
            if list(list_result_shapes(made[node])) != wanted:
                raise _UnevenError
    return graph


def resize_folded(main: FoldedModel, other: FoldedModel, line: Line) -> FoldedModel | None:
    """Return the model as calls of blocks (such as layers) for a batch size between two batch sizes for which it is
    known. Only the graphs of the blocks are resized, so equal layers are resized once.

    Return ``None`` if the two models differ in more than sizes, if a size or a constant is not a linear function of the
    batch size, or if attention is within packed documents, whose lengths depend on the batch.

    ``main``, ``other``: the model for the two batch sizes. ``line``: the batch sizes of ``main``, of ``other`` and of
    the result, in elements along one axis of the batch.
    """
    if not _are_equal_but_for_sizes(main, other):
        return None
    try:
        states, constants = _resize_states(main, other, line)
        inputs = _resize_inputs(main, other, line)
        values = {name: _resize_spec(spec, other.values[name], line) for name, spec in main.values.items()}
        blocks = {name: _resize_block(block, other.blocks[name], line) for name, block in main.blocks.items()}
    except _UnevenError:
        return None
    found = main.with_(states=states, constants=main.constants | constants, inputs=inputs, values=values, blocks=blocks)
    return found if _match_call_shapes(found) else None


def _are_equal_but_for_sizes(main: FoldedModel, other: FoldedModel) -> bool:
    """Return whether the models ``main`` and ``other`` have the same calls of blocks (graphs of layers), the same
    parameters, buffers, inputs and outputs, apart from sizes. Return false if an attention is within packed documents
    or has a prefix (keys that all queries of their document see), because its arguments depend on the batch."""
    if main.calls != other.calls or main.blocks.keys() != other.blocks.keys() or main.outputs != other.outputs:
        return False
    if [i.value for i in main.inputs] != [i.value for i in other.inputs]:
        return False
    tables = "states", "values", "constants"
    if any(getattr(main, name).keys() != getattr(other, name).keys() for name in tables):
        return False
    same = "updates", "keeps", "initial", "loss", "notes", "tree", "signature"
    if any(getattr(main, name) != getattr(other, name) for name in same):
        return False
    graphs = [block.graph for block in main.blocks.values()]
    return not any(list_document_attentions(graph) or list_prefix_attentions(graph) for graph in graphs)


def _resize_block(main: Block, other: Block, line: Line) -> Block:
    """Return ``main``, the graph of a piece of the model, such as a layer, with the sizes for a third batch size.
    ``main``, ``other``: the graph for two batch sizes. ``line``: the batch sizes of ``main``, of ``other`` and of the
    result. Raise :class:`_UnevenError` if the graphs differ in more than sizes, or if a size is not linear in the batch
    size."""
    pairs = match_nodes(main.graph, other.graph)
    if pairs is None or (main.states, main.inputs) != (other.states, other.inputs):
        raise _UnevenError
    placeholders: dict[fx.Node, TensorSpec] = {}
    for node, partner in pairs.items():
        if node.op == "placeholder":
            if node.name != partner.name:
                raise _UnevenError
            value, smaller = node.meta["val"], partner.meta["val"]
            placeholders[node] = TensorSpec(_resize_shape(value.shape, smaller.shape, line), value.dtype)
    return replace(main, graph=_resize_nodes(pairs, placeholders, line))


def _match_call_shapes(model: FoldedModel) -> bool:
    """Return whether each call in ``model`` (a use of a block, the graph that equal layers share) has tensors of the
    shapes that the block expects and returns. This may fail after resizing: layers that are equal for two batch sizes
    share a block, and need not be equal for a third."""
    shapes = {name: tuple(spec.shape) for name, spec in model.values.items()}
    shapes |= {i.value: tuple(i.spec.shape) for i in model.inputs}
    for call in model.calls:
        block = model.blocks[call.block]
        given = [tuple(node.meta["val"].shape) for node in block.placeholders]
        states = [tuple(model.states[name].spec.shape) for name in call.states]
        made = [tuple(node.meta["val"].shape) for node in block.outputs]
        if given != [*states, *(shapes[name] for name in call.inputs)]:
            return False
        if made != [shapes[name] for name in call.outputs]:
            return False
    return True


def _resize_spec(main: TensorSpec, other: TensorSpec, line: Line) -> TensorSpec:
    """Return the shape and dtype of a tensor for a third batch size. ``main``, ``other``: its shapes and dtypes for two
    batch sizes. ``line``: the batch sizes of ``main``, of ``other`` and of the result. Raise :class:`_UnevenError` if a
    size is not linear in the batch size, or if the dtypes differ."""
    if main.dtype != other.dtype:
        raise _UnevenError
    return TensorSpec(_resize_shape(main.shape, other.shape, line), main.dtype)


def _resize_shape(main: tuple[int, ...], other: tuple[int, ...], line: Line) -> tuple[int, ...]:
    """Return the shape of a tensor for a third batch size, by linear interpolation between its shapes ``main`` and
    ``other`` for two batch sizes. ``line``: the batch sizes of ``main``, of ``other`` and of the result. Raise
    :class:`_UnevenError` if a size is not linear in the batch size."""
    if len(main) != len(other):
        raise _UnevenError
    return tuple(_resize_number(a, b, line) for a, b in zip(main, other, strict=True))


def _resize_number(main: int, other: int, line: Line) -> int:
    """Return the value for a third batch size by linear interpolation between the values ``main`` and ``other`` for two
    batch sizes. ``line``: the batch sizes of ``main``, of ``other`` and of the result. Raise :class:`_UnevenError` if
    the result is not an integer."""
    first, second, between = line
    steps, left = divmod((main - other) * (between - second), first - second)
    if left:
        raise _UnevenError
    return other + steps


def _resize_argument(main: Any, other: Any, line: Line) -> Any:
    """Return an operator's argument in the graph for a third batch size, from ``main`` and ``other``, the same argument
    in the graphs for two batch sizes. Integers are interpolated linearly. Floats must be inversely proportional to the
    batch size, as in a mean, and so is the result.

    ``line``: the batch sizes of ``main``, of ``other`` and of the result. Raise :class:`_UnevenError` if the arguments
    differ in anything else, or an interpolated number is not an integer.
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
    if type(main) is float and type(other) is float:
        return _resize_factor(main, other, line)
    raise _UnevenError


def _resize_factor(main: float, other: float, line: Line) -> float:
    """Return an operator's factor in the graph for a third batch size, if the factors ``main`` and ``other`` for two
    batch sizes are inversely proportional to the batch size, as in a mean. ``line``: the batch sizes of ``main``, of
    ``other`` and of the result. Raise :class:`_UnevenError` for other factors."""
    if not 0.0 < abs(main) < abs(other) or abs(main * line[0] / (other * line[1]) - 1.0) > _ROUNDING:
        raise _UnevenError
    each = 1.0 / (main * line[0])  # number of elements that a mean has for each element of the batch
    whole = round(each)
    return 1.0 / (whole * line[2]) if abs(each - whole) <= _ROUNDING * abs(each) else main * line[0] / line[2]


def _cut_constant(main: Tensor, other: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a model's constant for a third batch size: the first elements of ``main``, the constant for the larger of
    two batch sizes, in the shape ``shape``.

    Raise :class:`_UnevenError` if ``other``, the constant for the smaller batch size, is not the first part of
    ``main``, or if ``main`` is smaller than ``shape``.
    """
    if tuple(main.shape) == shape and torch.equal(main, other):
        return main
    if not is_prefix(main, other) or any(a < b for a, b in zip(main.shape, shape, strict=True)):
        raise _UnevenError
    return main[tuple(slice(size) for size in shape)].contiguous()


_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+\.?\d*(?:[eE][-+]?\d+)?')  # a quoted text, or a number
_MOST_SHAPES = 256  # most graphs in the cache


class JointShapes:
    """A cache of joint graphs, each with forward and backward of a block (a piece of the model, such as a layer). If a
    block differs from two blocks in the cache only in sizes, and its sizes lie between theirs, its joint graph is
    interpolated instead of traced. The result is for analysis: shapes, dtypes and memory of each node."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[tuple[int, ...], JointGraph]]] = {}

    def find(self, nodes: str, key: Any, trace: Callable[[], JointGraph], parse: Callable[[], Block]) -> JointGraph:
        """Return the joint graph of forward and backward of a block (a piece of the model, such as a layer). If the
        block's sizes lie between those of two blocks in the cache, it is interpolated between their graphs. Otherwise
        it is the result of ``trace()``, which is added to the cache.

        ``nodes``: the block's graph as JSON text. ``key``: further properties on which the joint graph depends, such as
        the inputs that need a gradient; only blocks with equal keys are compared. ``parse``: returns the block.
        """
        form, numbers = split_numbers(nodes)
        known = self._known.setdefault((form, key), [])
        ends = _find_surrounding_sizes(numbers, [each for each, _ in known])
        if ends is not None:
            first, second, line = ends
            found = resize_joint(known[first][1], known[second][1], parse(), line)
            if found is not None:
                return found
        if sum(map(len, self._known.values())) >= _MOST_SHAPES:
            self._known.clear()
            known = self._known.setdefault((form, key), [])
        known.append((numbers, trace()))
        return known[-1][1]


def split_numbers(text: str) -> tuple[str, tuple[int, ...]]:
    """Return (the JSON ``text`` with ``#`` in place of each integer, a tuple of these integers in order). Strings in
    quotes and numbers with a decimal point are not changed."""
    numbers: list[int] = []

    def take(match: re.Match[str]) -> str:
        word = match[0]
        if word[0] == '"' or not word.lstrip("-").isdigit():
            return word
        numbers.append(int(word))
        return "#"

    return _NUMBER.sub(take, text), tuple(numbers)


def _find_surrounding_sizes(numbers: tuple[int, ...], known: Sequence[tuple[int, ...]]) -> tuple[int, int, Line] | None:
    """Find two entries of ``known`` between which ``numbers`` can be interpolated linearly, all numbers with the same
    weight. Return (index of the first entry, index of the second, line). The line gives the weight, by one position at
    which the entries differ: (number in the first entry, number in the second, number in ``numbers``). Return ``None``
    if there are no such entries.

    ``numbers``, and each entry of ``known``: the sizes in a graph, in order.
    """
    for (i, first), (j, second) in combinations(enumerate(known), 2):
        place = next((k for k, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), None)
        if place is None:
            continue
        line = first[place], second[place], numbers[place]
        if not min(line[:2]) < line[2] < max(line[:2]):
            continue
        steps, between = line[0] - line[1], line[2] - line[1]
        every = zip(first, second, numbers, strict=True)
        if all((c - b) * steps == (a - b) * between for a, b, c in every):
            return i, j, line
    return None


def resize_joint(main: JointGraph, other: JointGraph, block: Block, line: Line) -> JointGraph | None:
    """Return the joint graph of forward and backward of ``block``, a piece of the model such as a layer, interpolated
    between ``main`` and ``other``, the joint graphs of the same block for two other batch sizes. Each operator runs
    once on tensors without values, which gives the shapes, strides and shared storages of the results.

    Return ``None`` if the graphs differ in more than sizes, or if a size is not a linear function of the batch size.
    ``line``: where to interpolate, by the value of one size, or of the batch size, in ``main``, in ``other`` and in the
    result.
    """
    pairs = match_nodes(main.graph, other.graph)
    if pairs is None or (main.needs, main.with_grad) != (other.needs, other.with_grad):
        return None
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = False  # few operators of a block recur, so the cache costs more time than it saves
    try:
        with torch._C.DisableTorchFunction(), fake:  # function modes of the caller must not be recorded
            graph = _resize_joint_nodes(pairs, line)
    except (_UnevenError, AssertionError, RuntimeError, ValueError, TypeError):
        return None
    given = [tuple(n.meta["val"].shape) for n in (*block.placeholders, *block.outputs)]
    if given != [tuple(n.meta["val"].shape) for n in graph.find_nodes(op="placeholder")]:
        return None
    return JointGraph(graph, block, main.needs, main.with_grad)


def _resize_joint_nodes(pairs: Mapping[fx.Node, fx.Node], line: Line) -> fx.Graph:
    """Return a copy of a joint graph of forward and backward with the sizes for a third batch size. Each operator runs
    on tensors without values, for which the caller has entered a ``FakeTensorMode``.

    ``pairs``: node of the graph for the first batch size -> the same node of the graph for the second. ``line``: the
    three batch sizes. Raise :class:`_UnevenError` if a size is not linear in the batch size.
    """
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node, partner in pairs.items():
        new = made[node] = graph.node_copy(node, made.__getitem__)
        if node.op == "placeholder":
            value = node.meta["val"]
            shape = _resize_shape(tuple(value.shape), tuple(partner.meta["val"].shape), line)
            new.meta["val"] = torch.empty(shape, dtype=value.dtype, device=value.device)
        elif node.op == "call_function":
            # an operator of experts, whose number of tokens is not known
            if "open" in node.meta or "val" not in node.meta:
                raise _UnevenError
            args = tuple(_resize_argument(a, b, line) for a, b in zip(node.args, partner.args, strict=True))
            kwargs = {k: _resize_argument(a, partner.kwargs[k], line) for k, a in node.kwargs.items()}
            new.args, new.kwargs = fx.node.map_arg((args, kwargs), made.__getitem__)
            values = fx.node.map_arg((new.args, new.kwargs), lambda operand: operand.meta["val"])
            new.meta["val"] = node.target(*values[0], **values[1])  # type: ignore[operator]
            if list_result_shapes(new) != _resize_shapes(list_result_shapes(node), list_result_shapes(partner), line):
                raise _UnevenError
    return graph


def _resize_shapes(main: Shapes, other: Shapes, line: Line) -> Shapes:
    return tuple(_resize_shape(a, b, line) for a, b in zip(main, other, strict=True))
