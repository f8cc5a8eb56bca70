"""Find the values of a block with the operators that read them, and the groups of values or states that must share one
layout.

Blocks repeat: one graph serves several calls. Tensors that different calls pass through the same port (input, state or
output of a block) therefore have the same layout."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import fx

from partitioner.passes.ir.model import Block, FoldedModel, TensorSpec
from partitioner.passes.rules.factors import operands_of, results_of
from partitioner.passes.rules.strategies import needs_gradient

PortKind = Literal["input", "state", "output"]

Port = tuple[str, PortKind, int]  # block, kind, place


@dataclass(frozen=True)
class ValueReader:
    """An operator (``node``) that reads a value of a block (such as a layer), with the indices (``positions``) of the
    value among its operands. If ``node`` is ``None``, the value is an output of the block, and ``positions`` are its
    indices among the outputs.
    """

    node: fx.Node | None
    positions: tuple[int, ...]


@dataclass(frozen=True)
class BlockValue:
    """A tensor inside a block (such as a layer): the result with the index ``index`` of the node ``source``, with the
    operators and outputs that read it (``readers``). A placeholder has one result.

    ``operator.getitem`` is not counted as an operator; the tensor that it selects is a result of its producer.
    ``spec``: its shape and dtype. ``grad``: whether a gradient flows back through the value.
    """

    source: fx.Node
    index: int
    spec: TensorSpec
    grad: bool
    readers: tuple[ValueReader, ...]


def operators_of(block: Block) -> list[fx.Node]:
    """Return the operators of ``block`` (a piece of the model, such as a layer) for which a strategy (layouts of
    operands and results) must be chosen: every ``call_function`` node except ``getitem``, in graph order."""
    return [n for n in block.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def values_of(block: Block) -> list[BlockValue]:
    """Return every value of ``block`` (a piece of the model, such as a layer) that an operator or an output reads, in
    graph order.
    """
    origin: dict[fx.Node, tuple[fx.Node, int]] = {}
    carries: dict[tuple[fx.Node, int], bool] = {}
    for node in block.graph.nodes:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node), node
            assert isinstance(index, int), node
            origin[node] = (source, index)
        else:
            origin[node] = (node, 0)
        if node.op != "output":
            carries[origin[node]] = needs_gradient(node)
    readers: dict[tuple[fx.Node, int], dict[fx.Node | None, list[int]]] = {}
    for node in operators_of(block):
        for position, operand in enumerate(operands_of(node)):
            readers.setdefault(origin[operand], {}).setdefault(node, []).append(position)
    for place, result in enumerate(block.outputs):
        readers.setdefault(origin[result], {}).setdefault(None, []).append(place)
    order = {node: i for i, node in enumerate(block.graph.nodes)}
    return [
        BlockValue(
            source,
            index,
            TensorSpec.from_tensor(results_of(source)[index]),
            carries[source, index],
            tuple(ValueReader(node, tuple(positions)) for node, positions in by_node.items()),
        )
        for (source, index), by_node in sorted(readers.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    ]


@dataclass(frozen=True)
class LayoutTie:
    """Tensors between blocks (such as layers), or parameters and buffers, that must share one layout, because different
    calls of one block read or return them at the same place, and all calls run the same graph.

    ``names``: names of the tensors. ``ports``: the places, each a tuple of the block's name, a kind (``"input"``,
    ``"state"`` or ``"output"``) and an index among the block's inputs, states or outputs. ``spec``: the common shape
    and dtype of the tensors."""

    names: tuple[str, ...]
    ports: tuple[Port, ...]
    spec: TensorSpec


def tied_values(model: FoldedModel) -> list[LayoutTie]:
    """Return the groups of inputs of ``model`` and outputs of its blocks that must share one layout, because calls of
    one block read or return them at the same place. The groups are in order of first appearance. ``model``: the model
    as calls of blocks; equal layers share one block.
    """
    pairs: list[tuple[str, Port | None]] = [(i.value, None) for i in model.inputs]
    for call in model.calls:
        pairs += [(value, (call.block, "input", i)) for i, value in enumerate(call.inputs)]
        pairs += [(value, (call.block, "output", i)) for i, value in enumerate(call.outputs)]
    return [LayoutTie(names, ports, model.values[names[0]]) for names, ports in _group_connected_ports(pairs)]


def tied_states(model: FoldedModel) -> list[LayoutTie]:
    """Return the groups of states (parameters and buffers) of ``model`` that must share one layout, because calls of
    one block read them at the same place. The groups are in order of first appearance. ``model``: the model as calls of
    blocks; equal layers share one block.
    """
    pairs: list[tuple[str, Port | None]] = [(name, None) for name in model.states]
    for call in model.calls:
        pairs += [(name, (call.block, "state", i)) for i, name in enumerate(call.states)]
    return [LayoutTie(names, ports, model.states[names[0]].spec) for names, ports in _group_connected_ports(pairs)]


def _group_connected_ports(pairs: Iterable[tuple[str, Port | None]]) -> list[tuple[tuple[str, ...], tuple[Port, ...]]]:
    """Group the names of tensors that share a port, directly or through other names. A port is an input, parameter,
    buffer or output of a block (such as a layer). Return for each group its names and its ports, in order of first
    appearance. ``pairs``: the name of a tensor and a port through which it passes, or ``None`` if it passes through no
    port."""
    parent: dict[str | Port, str | Port] = {}

    def root(item: str | Port) -> str | Port:
        while parent.setdefault(item, item) != item:
            parent[item] = item = parent[parent[item]]
        return item

    for name, port in pairs:
        first = root(name)
        if port is not None:
            parent[root(port)] = first
    groups: dict[str | Port, tuple[list[str], list[Port]]] = {}
    for item in list(parent):
        names, ports = groups.setdefault(root(item), ([], []))
        if isinstance(item, str):
            names.append(item)
        else:
            ports.append(item)
    return [(tuple(names), tuple(ports)) for names, ports in groups.values()]
