"""Find how the inputs of a model may be padded along one axis of the batch without changing the model's results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from partitioner.passes.ir.model import Captured
from partitioner.passes.ir.rewrite import aten, format_node_location
from partitioner.passes.normalize.attention_masks import replace_by_band_attention
from partitioner.passes.padding.compare import (
    align_graphs,
    get_operator_name,
    has_own_number,
    is_prefix,
    list_result_shapes,
)
from partitioner.passes.padding.fills import VIEWS
from partitioner.passes.padding.propagate import Sizes, Values, propagate_padding
from partitioner.passes.padding.resize import copy_captured
from partitioner.passes.padding.unseen import (
    Unseen,
    classify_unseen,
    find_unmasked_scores,
    find_varying_dims,
    list_mask_nodes,
)
from partitioner.passes.padding.values import DimPart, PaddedValue, find_created_part, make_fixed_value
from partitioner.passes.rules.attention import find_attention_band
from partitioner.passes.rules.factors import operands_of

_MAX_COMBINATIONS = 64  # most combinations of numbers that are tried

Fills = Mapping[str, float | None]  # path of an input -> value of its padded elements; None: a copy of the last


class KeyHiding(NamedTuple):
    """How an element of a model input hides a key from the queries of an attention, as a mask of padded positions does.

    ``number``: an element with this value hides the key at its position. ``unseen``: which keys must be hidden so that
    some query sees no key at all. ``"all"``: all keys of its sample. ``"first"``: the first keys of the sample are
    enough, as under a causal mask. ``"gap"``: the keys between visible ones may be enough, too, as under a sliding
    window.
    """

    number: float
    unseen: Unseen


@dataclass(frozen=True)
class AxisPadding:
    """How the inputs of a model can be padded along one axis of the batch (samples or positions) so that results do not
    change.

    ``fills``: path of an input, such as ``input_ids`` -> the value of its padded elements (``None``: a copy of the last
    element). ``outputs``: path of an output -> (the dim that grows with the batch, by how many elements the dim exceeds
    the batch size). ``fault``: the reason why no padding leaves the results unchanged; empty if one does. ``hiding``:
    path of an input that hides keys of an attention -> how it hides them. It has only attentions in which a query that
    sees no key would give weight to padded keys.
    """

    fills: dict[str, float | None] = field(default_factory=dict)
    outputs: dict[str, tuple[int, int]] = field(default_factory=dict)
    fault: str = ""
    hiding: dict[str, KeyHiding] = field(default_factory=dict)


def find_axis_padding(main: Captured, other: Captured, dims: Mapping[str, int], sizes: Sizes) -> AxisPadding:
    """Return how the inputs of a model can be padded along one axis of the batch (samples or positions) without
    changing the model's results: the loss, every update of a buffer, and the elements of every output that belong to
    the original batch.

    The padding is correct for every value of the weights, so gradients are unchanged, too. ``main``, ``other``: the
    model captured for two batch sizes along this axis, each rewritten by ``normalize``. ``dims``: path of an input ->
    the index of its dim along the axis. ``sizes``: the two batch sizes, in elements along the axis.
    """
    aligned = align_graphs(main, other)
    if aligned is None:  # in a shorter sequence, the window of an attention is no limit and was removed
        aligned = align_graphs(*map(_write_bands, (main, other)))
    if aligned is None:
        return AxisPadding(
            fault="the model computes other operators for another size, so one cannot stand for the other"
        )
    main, pairs = aligned
    faults: list[str] = []
    for fills in itertools.islice(_list_fills(main, dims), _MAX_COMBINATIONS):
        axis = _PaddingAxis(dims, fills, sizes)
        values = _propagate_through_graph(main, other, pairs, axis)
        fault = next((v.fault for v in _iterate_preserved_values(main, values) if v.fault), "")
        if not fault:
            hiding = _find_hiding(main, pairs, axis, values)
            fault = _explain_hiding(main, hiding)
            return AxisPadding(dict(fills), _find_output_dims(main, values), fault, hiding)
        faults.append(fault)
    return AxisPadding(fault=faults[-1])  # the fault of the last attempt, which pads all inputs with numbers


def _write_bands(captured: Captured) -> Captured:
    """Return a copy of ``captured`` in which this project's operator for attention within a range of positions replaces
    each torch attention without a mask. The graph can then be compared with one that has a sliding window."""
    copied = copy_captured(captured)
    for node in list(copied.graph.nodes):
        plain = node.target is aten.scaled_dot_product_attention.default
        if plain and (band := find_attention_band(node)) is not None:
            replace_by_band_attention(copied.graph, node, band)
    return copied


@dataclass(frozen=True)
class _PaddingAxis:
    """A candidate padding of the model's inputs along one axis of the batch (samples or positions), of which is tested
    whether it leaves the model's results unchanged.

    ``dims``: path of an input -> the index of its dim along the axis. ``fills``: path of an input -> the value of its
    padded elements (``None``: a copy of the last element). ``sizes``: the two batch sizes, in elements along the axis,
    for which the model was captured.
    """

    dims: Mapping[str, int]
    fills: Fills
    sizes: Sizes


def _propagate_through_graph(
    main: Captured, other: Captured, pairs: Mapping[fx.Node, fx.Node], axis: _PaddingAxis
) -> dict[fx.Node, Values]:
    """Return the effect of padded model inputs on the results of all operators, as a dict: node of the graph of
    ``main`` -> a tuple with the :class:`PaddedValue` of each of its results, that is, which dims grow with the batch,
    and which value padded elements have.

    ``main``, ``other``: the model captured for two batch sizes. ``pairs``: node of ``main`` -> the same node of
    ``other``. ``axis``: the padding of the inputs.
    """
    values: dict[fx.Node, Values] = {}
    paths = {i.value: i.path for i in main.inputs}
    for node, partner in pairs.items():
        if node.op == "placeholder":
            name = main.placeholders[node.name]
            own = (
                _describe_input(node, paths[name], axis) if name in paths else _describe_state(main, other, name, axis)
            )
            values[node] = (own,)
        elif node.op == "call_function":
            values[node] = _propagate_through_node(node, partner, values, axis.sizes)
    return values


def _find_hiding(
    main: Captured, pairs: Mapping[fx.Node, fx.Node], axis: _PaddingAxis, values: Mapping[fx.Node, Values]
) -> dict[str, KeyHiding]:
    """Return which inputs of the model ``main`` can hide padded keys in an attention with finite scores, as a dict:
    path of an input -> the number that hides a key, and which hidden keys leave a query without a visible key. If all
    keys of a query are hidden by finite scores, the query gives weight to padded keys.

    An input hides keys by a number if padded keys are hidden from all queries whenever its padded elements have this
    number. ``pairs``: node of ``main`` -> the same node of the graph for another batch size. ``axis``: a padding of the
    inputs that changes no result. ``values``: node -> the :class:`PaddedValue` of each of its results under this
    padding.
    """
    called = [node for node in pairs if node.op == "call_function" and get_operator_name(node) != "getitem"]
    read = [find_unmasked_scores(node, [values[o][0] for o in operands_of(node)]) for node in called]
    scores = [each for each in read if each is not None]
    nodes = list_mask_nodes(main, scores) if scores else []
    varying = find_varying_dims(nodes, values)
    paths = {i.value: i.path for i in main.inputs}
    given = {n: paths[main.placeholders[n.name]] for n in nodes if main.placeholders.get(n.name) in paths}
    found: dict[str, KeyHiding] = {}
    tries = {(p, number) for n, p in given.items() if p in axis.dims for number in _list_hiding_numbers(n)}
    for path, number in sorted(tries):
        tried, renewed = replace(axis, fills={path: number}), dict(values)
        for node in nodes:
            if node in given:
                renewed[node] = (_describe_input(node, given[node], tried),)
            elif node.op == "call_function":
                renewed[node] = _propagate_through_node(node, pairs[node], renewed, axis.sizes)
        hidden = [each for each in scores if each.hides_padding(renewed)]
        if hidden:
            found[path] = KeyHiding(number, classify_unseen(hidden, varying, values))
    return found


def _list_hiding_numbers(source: fx.Node) -> set[float]:
    """Return the set of numbers by which a model input may hide keys of an attention: 0 and 1, as in masks, and the
    numbers with which the graph compares the input. ``source``: the input's placeholder."""
    return {0.0, 1.0, *(each.number for each in _find_compared_numbers(source))}


def _explain_hiding(main: Captured, hiding: Mapping[str, KeyHiding]) -> str:
    """Return, as text, why padding cannot be checked for a batch: an input of ``main`` hides keys by several numbers,
    as in ``places < 0``, so that the batch does not show whether a query sees no key. Return an empty text if each
    input in ``hiding`` hides keys by a single number. ``hiding``: path of an input -> how it hides keys of an
    attention."""
    for node in main.graph.nodes:
        path = next((i.path for i in main.inputs if i.value == main.placeholders.get(node.name)), None)
        if path in hiding and any(not each.single for each in _find_compared_numbers(node)):
            return f"{path} may hide keys by several numbers, so that a query that sees no key is not recognised"
    return ""


def _propagate_through_node(node: fx.Node, partner: fx.Node, values: Mapping[fx.Node, Values], sizes: Sizes) -> Values:
    """Return a tuple with the :class:`PaddedValue` of each result of the operator ``node``: which dims grow with the
    batch if the model's inputs are padded, and which value padded elements have.

    ``partner``: the same operator in the graph for another batch size. ``values``: earlier node -> the
    :class:`PaddedValue` of each of its results. ``sizes``: the batch sizes of the two graphs, in elements along the
    padded axis.
    """
    if get_operator_name(node) == "getitem":
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return (values[source][index],)
    operands = [values[o][0] for o in operands_of(node)]
    found = propagate_padding(node, operands, list_result_shapes(partner), sizes)
    if not has_own_number(node, partner):
        return found
    reason = (
        f"{get_operator_name(node)} at {format_node_location(node)} reads a number that follows from the batch size, "
        "as a "
        "mean over all places does"
    )
    return tuple(v.with_fault(reason) for v in found)


def _describe_input(node: fx.Node, path: str, axis: _PaddingAxis) -> PaddedValue:
    """Return the :class:`PaddedValue` of a model input: which dims grow with the batch if the inputs are padded, and
    which value the padded elements have. ``node``: the input's placeholder. ``path``: the input's path in the arguments
    of the model. ``axis``: how the inputs are padded."""
    value = make_fixed_value(list_result_shapes(node)[0])
    if path not in axis.dims:
        return value
    return value.with_dim(axis.dims[path], DimPart(axis.sizes[0], grows=True, fill=axis.fills.get(path)))


def _describe_state(main: Captured, other: Captured, name: str, axis: _PaddingAxis) -> PaddedValue:
    """Return the :class:`PaddedValue` of the parameter, buffer or constant ``name`` if the model's inputs are padded:
    which dims grow with the batch size.

    It has a fault (a reason why padding may change results) if its shape or its values depend on the batch size. The
    exception is a constant whose dims grow with the batch, and whose elements are equal for both batch sizes at all
    common indices, such as a table with one row for each position. ``main``, ``other``: the model captured for two
    batch sizes. ``axis``: how the inputs are padded.
    """
    shape, theirs = main.states[name].spec.shape, other.states[name].spec.shape
    if shape == theirs:
        same = name not in main.constants or torch.equal(main.constants[name], other.constants[name])
        return make_fixed_value(shape, "" if same else f"the constant {name} has other numbers for another size")
    parts = [find_created_part(a, b, axis.sizes) for a, b in zip(shape, theirs, strict=True)]
    held: Tensor | None = main.constants.get(name)
    if held is None or any(p is None for p in parts) or not is_prefix(held, other.constants[name]):
        return make_fixed_value(shape, f"{name} has another shape for another size of the batch")
    return PaddedValue(tuple((p,) for p in parts if p is not None))


def _iterate_preserved_values(main: Captured, values: Mapping[fx.Node, Values]) -> Iterator[PaddedValue]:
    """Yield the :class:`PaddedValue` of each value of ``main`` that padding must not change: the loss, new values of
    buffers, and outputs. The padding is wrong if one of them has a ``fault``, a reason why padding may change the
    value. If the loss has a dim that grows with the batch, it is yielded a second time, with a fault, because padding
    would add terms to it.

    ``main``: the captured model. ``values``: node -> the :class:`PaddedValue` of each of its results.
    """
    by_name = {node.name: found[0] for node, found in values.items()}
    names = [main.loss, *main.updates.values(), *(o.value for o in main.outputs)]
    yield from (by_name[n] for n in names if n is not None)
    loss = by_name.get(main.loss or "")
    if loss is not None and loss.grows:
        yield loss.with_fault("the loss is not a sum over the batch")


def _find_output_dims(main: Captured, values: Mapping[fx.Node, Values]) -> dict[str, tuple[int, int]]:
    """Return a dict: path of an output of the model ``main`` -> (the dim that grows with the batch, by how many
    elements the dim exceeds the batch size). Outputs that do not grow are left out. ``values``: node -> the
    :class:`PaddedValue` of each of its results."""
    by_name = {node.name: found[0] for node, found in values.items()}
    found: dict[str, tuple[int, int]] = {}
    for output in main.outputs:
        if output.value is None:
            continue
        for dim, parts in enumerate(by_name[output.value].dims):
            if any(p.grows for p in parts):
                part = by_name[output.value].growing_part(dim)
                found[output.path] = (dim, part.offset if part is not None else 0)
    return found


def _list_fills(main: Captured, dims: Mapping[str, int]) -> Iterator[Fills]:
    """Yield candidates for the values of the padded elements of the inputs of ``main``, in the order in which they
    should be tried. Each candidate is a dict: path of an input -> value (``None``: a copy of the last element).

    Every input can be padded with copies. An integer input that the graph compares with numbers, such as -100 for
    ignored targets or the padding token, can also be padded with these numbers. An input without ignored elements can
    also be padded with zero. All combinations are yielded; the first one pads all inputs with copies. ``dims``: path of
    each input that is padded -> the index of its padded dim.
    """
    inputs = {i.value: i for i in main.inputs if i.path in dims}
    options: list[list[float | None]] = []
    for node in main.graph.nodes:
        name = main.placeholders.get(node.name) if node.op == "placeholder" else None
        if name not in inputs:
            continue
        compared = [] if inputs[name].spec.dtype.is_floating_point else [*_find_compared_numbers(node)]
        zero = [] if any(each.ignored for each in compared) else [0.0]
        options.append([None, *sorted({*zero, *(each.number for each in compared)})])
    order = [
        inputs[main.placeholders[n.name]].path
        for n in main.graph.nodes
        if n.op == "placeholder" and main.placeholders[n.name] in inputs
    ]
    for chosen in itertools.product(*options):
        yield dict(zip(order, chosen, strict=True))


_PASSED = VIEWS | {"slice", "constant_pad_nd", "to", "_to_copy"}


class ComparedNumber(NamedTuple):
    """A number with which the graph compares an integer input. ``number``: the number. ``ignored``: whether elements
    with this value are left out, such as targets of -100 (``!=``). ``single``: whether no other number gives the same
    result of the comparison (``==`` and ``!=``)."""

    number: float
    ignored: bool
    single: bool


# Operator that compares an input with a number -> the integers next to the limit on either side, less the number.
_SIDES = {"lt": (-1, 0), "ge": (-1, 0), "gt": (0, 1), "le": (0, 1), "eq": (0,), "ne": (0,)}


def _find_compared_numbers(source: fx.Node) -> Iterator[ComparedNumber]:
    """Yield the numbers that the graph distinguishes by comparing an integer input with a number, such as -100 for
    ignored targets, or -1 and 0 for ``places < 0``. ``source``: the input's placeholder, or a view or cast of it."""
    for reader in source.users:
        name = get_operator_name(reader) if reader.op == "call_function" else ""
        if name in _PASSED:
            yield from _find_compared_numbers(reader)
        number: Any = reader.args[1] if name in _SIDES and len(reader.args) > 1 else None
        if isinstance(number, int | float):
            for step in _SIDES[name]:
                yield ComparedNumber(float(number) + step, name == "ne", name in ("eq", "ne"))
