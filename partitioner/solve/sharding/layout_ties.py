"""Ties between layouts: the values inside a block with their readers, and the layouts that several calls share."""

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
    """An operator that reads a value as its operands ``positions``; ``None``: the block's outputs at these places."""

    node: fx.Node | None
    positions: tuple[int, ...]


@dataclass(frozen=True)
class BlockValue:
    """Result ``index`` of ``source`` (a placeholder has one), and who reads it.

    ``operator.getitem`` is no operator of its own here: what it picks is a result of its producer. ``grad``: whether
    the value carries a gradient.
    """

    source: fx.Node
    index: int
    spec: TensorSpec
    grad: bool
    readers: tuple[ValueReader, ...]


def operators_of(block: Block) -> list[fx.Node]:
    """The operators that need a strategy: every call but ``getitem``."""
    return [n for n in block.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def values_of(block: Block) -> list[BlockValue]:
    """Every value of the block that something reads, in graph order."""
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
            TensorSpec.of(results_of(source)[index]),
            carries[source, index],
            tuple(ValueReader(node, tuple(positions)) for node, positions in by_node.items()),
        )
        for (source, index), by_node in sorted(readers.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    ]


@dataclass(frozen=True)
class LayoutTie:
    """Values between calls (or states) that must have one layout, since one block's port reads or makes them all."""

    names: tuple[str, ...]
    ports: tuple[Port, ...]
    spec: TensorSpec


def tied_values(model: FoldedModel) -> list[LayoutTie]:
    """The model's inputs and the calls' outputs, grouped by the ports that they pass through."""
    pairs: list[tuple[str, Port | None]] = [(i.value, None) for i in model.inputs]
    for call in model.calls:
        pairs += [(value, (call.block, "input", i)) for i, value in enumerate(call.inputs)]
        pairs += [(value, (call.block, "output", i)) for i, value in enumerate(call.outputs)]
    return [LayoutTie(names, ports, model.values[names[0]]) for names, ports in _group_connected_ports(pairs)]


def tied_states(model: FoldedModel) -> list[LayoutTie]:
    """The states, grouped by the ports that read them."""
    pairs: list[tuple[str, Port | None]] = [(name, None) for name in model.states]
    for call in model.calls:
        pairs += [(name, (call.block, "state", i)) for i, name in enumerate(call.states)]
    return [LayoutTie(names, ports, model.states[names[0]].spec) for names, ports in _group_connected_ports(pairs)]


def _group_connected_ports(pairs: Iterable[tuple[str, Port | None]]) -> list[tuple[tuple[str, ...], tuple[Port, ...]]]:
    """The connected groups of names and ports, in order of first appearance."""
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
