"""Assign equal integers to nodes that compute the same value, and compute signatures of sequences of operators.

A signature does not depend on the names of the values that are read. Sequences with equal signatures, such as equal
layers, become calls of one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


class ValueNumbers:
    """Assigns an integer to each node. Nodes that apply the same operators to the same inputs have the same integer.
    Each random operator has an integer of its own.

    Args:
        shared_numbers: a dict (key of a node -> integer) that the objects of several graphs share, so that their
            integers can be compared; inputs then match by name, and random operators by their order. ``None`` for a
            separate dict.
    """

    def __init__(self, shared_numbers: dict[tuple[str, str, str], int] | None = None) -> None:
        self._alike = {} if shared_numbers is None else shared_numbers
        self._known: dict[fx.Node, int] = {}
        self._draws = 0

    def __call__(self, node: fx.Node) -> int:
        """Return an integer for ``node``. It is equal for nodes that compute the same value by the same operators from
        the same inputs."""
        waiting = [node]
        while waiting:  # no recursion: the graph may be hundreds of layers deep
            last = waiting[-1]
            missing = [n for n in last.all_input_nodes if n not in self._known]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if last not in self._known:
                args = fx.node.map_arg((last.args, last.kwargs), lambda n: ("node", self._known[n]))
                key = self._build_instance_key(last), str(last.target), str(args)
                self._known[last] = self._alike.setdefault(key, len(self._alike))
        return self._known[node]

    def _build_instance_key(self, node: fx.Node) -> str:
        """Return a text that distinguishes ``node`` from nodes with the same operator and operands: a count for a
        random operator, the name of a placeholder, and an empty text for any other node, which needs no distinction."""
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            self._draws += 1
            return str(self._draws)
        return node.name if node.op == "placeholder" else ""


@dataclass(frozen=True)
class GraphSignature:
    """Hashable description of a sequence of operators. Sequences with equal ``key`` do the same computation.

    ``states``: the parameters, buffers and constants that the sequence reads, in the order of first use. ``inputs``:
    the other nodes that it reads from outside, in the order of first use.
    """

    key: tuple[Any, ...]
    states: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]


def compute_signature(nodes: Sequence[fx.Node], outputs: Iterable[fx.Node] = ()) -> GraphSignature:
    """Return a hashable description of the operators ``nodes``, which are in execution order. Two sequences with equal
    descriptions, such as two equal layers, compute the same function.

    The description covers operators, constants, shapes, dtypes, the data flow between the operators, and which operands
    are equal.

    Args:
        outputs: the operators in ``nodes`` whose results are read outside of ``nodes``; sequences with different
            outputs have different descriptions.
    """
    index: dict[fx.Node, int] = {}
    states: dict[fx.Node, int] = {}
    inputs: dict[fx.Node, int] = {}

    def encode(argument: Any) -> Any:
        """Return ``argument``, an argument of an operator, in a hashable form without node names: a node becomes its
        kind and its number in order of first use."""
        if isinstance(argument, fx.Node):
            if argument in index:
                return "n", index[argument]
            if argument.op == "placeholder" and argument.meta.get("state") is not None:
                return "s", states.setdefault(argument, len(states))
            return "x", inputs.setdefault(argument, len(inputs))
        if isinstance(argument, tuple | list):
            return tuple([encode(a) for a in argument])
        if isinstance(argument, slice):
            return "slice", encode(argument.start), encode(argument.stop), encode(argument.step)
        if isinstance(argument, bool | int | float):
            return type(argument).__name__, repr(argument)
        return argument

    rows = []
    for node in nodes:
        kwargs = tuple([(k, encode(v)) for k, v in sorted(node.kwargs.items())]) if node.kwargs else ()
        rows.append((node.target, encode(node.args), kwargs))
        index[node] = len(index)
    key = (
        tuple(rows),
        tuple([(*_build_value_spec(n), n.meta["state"].kind, n.meta["state"].requires_grad) for n in states]),
        tuple([_build_value_spec(n) for n in inputs]),
        tuple([index[n] for n in outputs]),
    )
    return GraphSignature(key, tuple(states), tuple(inputs))


def _build_value_spec(node: fx.Node) -> tuple[Any, ...]:
    """Return (shape, dtype) of the result of ``node``, or a tuple of such pairs if it has several results."""
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return tuple((tuple(v.shape), v.dtype) for v in value)
